# Thirds of the depth at 1.5, 1.0 and 0.5 of the mean width. Bayat et al. at 440M: perplexity 15.96, uniform 16.28.
ffn = 'tapered'
taper = 'step'
