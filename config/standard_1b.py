# The 1B baseline of Liao et al., arXiv 2602.06471, in the shape of OLMo-2 1B. Validation perplexity 20.002 in the
# paper, the best at this scale: 20.082 for the hourglass, 20.46 for OLMo-2.
# 21.5B tokens (20 a parameter), 1.7e20 FLOPs. The learning rate is that of the authors' 906M models, the rest of the
# recipe ours, and so is what scales the initial weights down with depth: the authors have init_scaled = False.
out_dir = 'out-standard_1b'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 2**30
n_layer = 16
n_head = 16
n_embd = 2048
qk_norm = True

init_std = 0.02
learning_rate = 2.5e-4
min_lr = 6e-5
warmup_iters = 500
max_iters = 40960
eval_interval = 1000
eval_tokens = 10485760
