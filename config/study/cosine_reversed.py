# Width rises from 0.5 to 1.5 of the mean: the control that should lose.
ffn = 'tapered'
taper = 'cosine'
taper_start = 0.5
taper_end = 1.5
