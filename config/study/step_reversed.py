# Thirds of the depth at 0.5, 1.0 and 1.5 of the mean width. Bayat et al. at 440M: perplexity 17.29, uniform 16.28.
ffn = 'tapered'
taper = 'step'
taper_start = 0.5
taper_end = 1.5
