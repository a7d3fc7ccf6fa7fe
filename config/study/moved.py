# Fewer layers, a wider stream, and 42% of the parameters in attention instead of 25%: what Liao et al. found best at
# 113M. Four hourglasses a layer, with d_h / d_model 0.45.
ffn = 'hourglass'
n_mlp = 4
n_layer, n_embd, n_head = (9, 1152, 18) if n_embd == 768 else (6, 128, 4)  # noqa: F821
