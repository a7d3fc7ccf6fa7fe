# The 113M models of config/, in 2.26B tokens of FineWeb each (20 a parameter): 2.6e18 FLOPs a run.
dataset = 'fineweb10B'
vocab_size = 50257
block_size = 1024
batch_size = 32
gradient_accumulation_steps = 16  # half a million tokens a step

n_layer = 12
n_head = 12
n_embd = 768
param_budget = 16 * 768**2 * 12  # hidden units: 4 * n_embd in every layer
qk_norm = True

init_std = 0.02
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 200
max_iters = 4320
eval_interval = 432
eval_tokens = 10485760
sample_tokens = 0
