# Titans, the memory alone (Behrouz et al., arXiv 2501.00663), at the budget of standard_760m: uniform in Bayat,
# Behrouz and Courville, arXiv 2606.23670: average accuracy on eight tasks 52.30, as reported, against 53.29 when
# tapered. The shape is ours; its small parameters leave it 1,152 parameters above the budget.
# 50B tokens (as in the paper), 2.4e20 FLOPs. Not compiled, a block keeps 0.2 GiB of each sequence for its backward
# pass, 21 GiB of four sequences in all, and computes about 6 GiB anew when its turn comes; weights, gradients and AdamW
# are 11.3 GiB.
out_dir = 'out-titans_760m'
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

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 95367
eval_interval = 1000
eval_tokens = 10485760
