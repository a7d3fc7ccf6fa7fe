# Width falls from 1.5 to 0.5 of the mean by a cosine. Bayat et al. at 440M: perplexity 14.44, uniform 16.28.
ffn = 'tapered'
taper = 'cosine'
