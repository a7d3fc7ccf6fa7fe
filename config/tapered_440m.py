# standard_440m with FFN widths that fall along a cosine from 1.5 to 0.5 of the mean (Bayat, Behrouz and Courville,
# arXiv 2606.23670): validation perplexity 14.44 against 16.28, as reported; linear 15.96, sigmoid 16.12. The shape is
# ours.
# 30B tokens (as in the paper), 9.7e19 FLOPs.
out_dir = 'out-tapered_440m'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 8
gradient_accumulation_steps = 16  # half a million tokens a step

param_budget = 388_497_408
n_layer = 24
n_head = 16
n_embd = 1024
ffn = 'tapered'
taper = 'cosine'
taper_start = 1.5
taper_end = 0.5

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 57220
eval_interval = 1000
eval_tokens = 10485760
