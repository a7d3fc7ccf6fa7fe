# The best 113M model of Liao et al., arXiv 2602.06471: parameters moved from the FFNs to attention, 66M there and 47M
# left, validation perplexity 35.101 against 36.441 for standard_113m. The shape is inferred: the paper gives the two
# sums, and d_model 1536 with 7 layers meets them exactly; K is ours.
# 2.26B tokens (20 a parameter), 3.2e18 FLOPs. The recipe is ours, and so is what scales the initial weights down with
# depth: the authors have init_scaled = False.
out_dir = 'out-hourglass_113m'
dataset = 'fineweb10B'
vocab_size = 50257
block_size = 4096
batch_size = 8
gradient_accumulation_steps = 16  # half a million tokens a step

param_budget = 16 * 768**2 * 12
n_layer = 7
n_head = 24
n_embd = 1536
ffn = 'hourglass'
n_mlp = 2
qk_norm = True

init_std = 0.02
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 200
max_iters = 4320
eval_interval = 250
eval_tokens = 10485760
