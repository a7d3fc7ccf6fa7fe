# The 440M model of config/standard_440m.py in 30B tokens of FineWeb, as many as Bayat et al. gave it, with their searches:
# the three groups, and schedules times ratios. 9.7e19 FLOPs a run. The learning rate is theirs.
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 8
gradient_accumulation_steps = 16  # half a million tokens a step

n_layer = 24
n_head = 16
n_embd = 1024
param_budget = 388_497_408  # 3904 hidden units in every layer

init_std = 0.02
learning_rate = 4e-4
min_lr = 4e-5
warmup_iters = 1000
max_iters = 57220
eval_interval = 5722
eval_tokens = 10485760
sample_tokens = 0

_arms = ['uniform', 'step', 'step_reversed', 'cosine', 'linear', 'cosine_reversed']
