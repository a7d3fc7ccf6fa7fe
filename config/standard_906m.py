# The 906M baseline of Liao et al., arXiv 2602.06471. Hourglass models were ahead of it in loss and on tasks.
# 18.1B tokens (20 a parameter), 1.2e20 FLOPs.
out_dir = 'out-standard_906m'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 16 * 1536**2 * 24
n_layer = 24
n_head = 16
n_embd = 1536
qk_norm = True

init_std = 0.02
learning_rate = 2.5e-4
min_lr = 6e-5
warmup_iters = 500
max_iters = 34560
eval_interval = 1000
eval_tokens = 10485760
