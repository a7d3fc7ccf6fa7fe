# An hourglass in the middle of what Liao et al., arXiv 2602.06471 found best at 113M with K = 4: d_h / d_model about
# 0.4 (here 0.46) and d_model / L between 100 and 250 (here 128). The shape is ours. Their own 906M model has 0.81.
# 2.26B tokens (20 a parameter), 2.9e18 FLOPs. The recipe is ours, and so is what scales the initial weights down with
# depth: the authors have init_scaled = False.
out_dir = 'out-hourglass_113m_k4'
dataset = 'fineweb10B'
vocab_size = 50257
block_size = 4096
batch_size = 8
gradient_accumulation_steps = 16  # half a million tokens a step

param_budget = 16 * 768**2 * 12
n_layer = 9
n_head = 18
n_embd = 1152
ffn = 'hourglass'
n_mlp = 4
qk_norm = True

init_std = 0.02
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 200
max_iters = 4320
eval_interval = 250
eval_tokens = 10485760
