# titans_760m with FFN widths that fall along a cosine from 1.5 to 0.5 of the mean (Bayat, Behrouz and Courville, arXiv
# 2606.23670): average accuracy on eight tasks 53.29 against 52.30, as reported. The shape is ours.
# 50B tokens (as in the paper), 2.4e20 FLOPs. Memory is as in titans_760m.
out_dir = 'out-tapered_titans_760m'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 683_016_192
n_layer = 24
n_head = 16
n_embd = 1536
mixer = 'titans'
memory_chunk = 64
ffn = 'tapered'
taper = 'cosine'
taper_start = 1.5
taper_end = 0.5

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 95367
eval_interval = 1000
eval_tokens = 10485760
