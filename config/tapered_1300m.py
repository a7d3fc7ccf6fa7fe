# standard_1300m with FFN widths that fall along a cosine from 1.5 to 0.5 of the mean (Bayat, Behrouz and Courville,
# arXiv 2606.23670): average accuracy on eight tasks 56.38 against 56.05, as reported. The shape is ours.
# 100B tokens (as in the paper), 9.0e20 FLOPs.
out_dir = 'out-tapered_1300m'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 1_195_376_640
n_layer = 24
n_head = 16
n_embd = 2048
ffn = 'tapered'
taper = 'cosine'
taper_start = 1.5
taper_end = 0.5

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 190735
eval_interval = 1000
eval_tokens = 10485760
