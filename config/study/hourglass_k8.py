# Attention fixed, the FFN eight hourglasses with d_h / d_model 0.5. Liao et al. at 113M: perplexity 36.179, uniform
# 36.441.
ffn = 'hourglass'
n_mlp = 8
