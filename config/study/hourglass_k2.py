# Attention fixed, and each MLP split in two with a residual path each: d_h / d_model is 2, so not yet an hourglass.
ffn = 'hourglass'
n_mlp = 2
