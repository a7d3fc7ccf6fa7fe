# An hourglass at the budget of standard_1b (Liao et al., arXiv 2602.06471). Here the standard model is ahead: the paper
# reports validation perplexity 20.082 for its hourglass and 20.002 for the baseline. The shape is ours, with the K = 6
# beyond which the paper saw little gain.
# 21.5B tokens (20 a parameter), 1.7e20 FLOPs. The learning rate is that of the authors' 906M models, the rest of the
# recipe ours, and so is what scales the initial weights down with depth: the authors have init_scaled = False.
out_dir = 'out-hourglass_1b'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 2**30
n_layer = 19
n_head = 16
n_embd = 2048
ffn = 'hourglass'
n_mlp = 6
qk_norm = True

init_std = 0.02
learning_rate = 2.5e-4
min_lr = 6e-5
warmup_iters = 500
max_iters = 40960
eval_interval = 1000
eval_tokens = 10485760
