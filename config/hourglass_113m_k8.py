# Attention fixed (Liao et al., arXiv 2602.06471): standard_113m with each FFN split into K = 8 hourglasses, d_h /
# d_model 0.5, nothing else changed. The paper reports validation perplexity 36.179 against 36.441.
# 2.26B tokens (20 a parameter), 2.6e18 FLOPs. The recipe is ours, and so is what scales the initial weights down with
# depth: the authors have init_scaled = False.
out_dir = 'out-hourglass_113m_k8'
dataset = 'fineweb10B'
vocab_size = 50257
block_size = 4096
batch_size = 8
gradient_accumulation_steps = 16  # half a million tokens a step

param_budget = 16 * 768**2 * 12
n_layer = 12
n_head = 12
n_embd = 768
ffn = 'hourglass'
n_mlp = 8
qk_norm = True

init_std = 0.02
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 200
max_iters = 4320
eval_interval = 250
eval_tokens = 10485760
