# The shape of config/standard_113m.py, in contexts of 1024 tokens instead of 4096, and 2.26B tokens of FineWeb (20 a
# parameter): 2.2e18 FLOPs a run of uniform, up to 3.0e18 with a wider stream, through the head.
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
