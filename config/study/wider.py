# A third of the layers given up for half as much width again, as wide an attention as before, which so keeps its 25% of
# the parameters, and four hourglasses a layer with d_h / d_model 0.67: the way of the 906M model of Liao et al.
ffn = 'hourglass'
n_mlp = 4
head_dim = n_embd // n_head  # noqa: F821
n_layer = n_layer * 2 // 3  # noqa: F821
n_embd = n_embd * 3 // 2  # noqa: F821
init_std = init_std / 1.5**0.5  # noqa: F821 -- init_std**2 * n_embd is that of uniform
