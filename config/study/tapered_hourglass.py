# Both ideas together, which neither paper tried: eight hourglasses a layer, whose d_h / d_model falls from 0.75 in the
# first layer to 0.25 in the last. Liao et al. saw losses below 0.4.
ffn = 'tapered_hourglass'
taper = 'cosine'
n_mlp = 8
