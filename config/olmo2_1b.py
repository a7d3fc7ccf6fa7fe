# standard_1b with the blocks of OLMo-2 (arXiv 2501.00656): norms after the mixer and the FFN instead of before, and of
# queries and keys over all heads, with gains, which the budget leaves out; its base of the rotary embeddings, and its
# untied head. Validation perplexity 20.46 in Liao et al., arXiv 2602.06471, against 20.002 for the baseline and 20.082
# for the hourglass.
# 21.5B tokens (20 a parameter), 1.7e20 FLOPs. The learning rate is that of the authors' 906M models, the rest of the
# recipe ours, and so is what scales the initial weights down with depth: the authors have init_scaled = False.
out_dir = 'out-olmo2_1b'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 32  # half a million tokens a step

param_budget = 2**30
n_layer = 16
n_head = 16
n_embd = 2048
norm = 'olmo2'
rope_theta = 500000.0
tie_embeddings = False

init_std = 0.02
learning_rate = 2.5e-4
min_lr = 6e-5
warmup_iters = 500
max_iters = 40960
eval_interval = 1000
eval_tokens = 10485760
