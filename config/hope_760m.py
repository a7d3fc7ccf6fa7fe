# Hope-attention (Behrouz et al. 2025, "Nested Learning") at the budget of standard_760m: uniform in Bayat,
# Behrouz and Courville, arXiv 2606.23670: average accuracy on eight tasks 53.69, as reported, against 54.05 when
# tapered. The shape and the periods are ours. Of Hope's memory this has the update frequencies in training (train.py).
# 50B tokens (as in the paper), 2.7e20 FLOPs.
out_dir = 'out-hope_760m'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 683_016_192
n_layer = 24
n_head = 16
n_embd = 1536
ffn = 'hourglass'
n_mlp = 3
mlp_periods = '1,4,16'

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 95367
eval_interval = 1000
eval_tokens = 10485760
