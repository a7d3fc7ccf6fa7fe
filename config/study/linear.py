# Width falls linearly from 1.5 to 0.5 of the mean. Bayat et al. at 440M: perplexity 15.96, uniform 16.28.
ffn = 'tapered'
taper = 'linear'
