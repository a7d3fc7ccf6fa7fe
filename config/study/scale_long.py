# Four hundred thousand parameters outside the embeddings, and twenty bytes of Python's standard library for each: less
# than an epoch. Six layers, for the steps need thirds.
dataset = 'stdlib_bytes'
block_size = 128
batch_size = 16
dtype = 'float32'

n_layer = 6
n_head = 2
n_embd = 64
ffn_multiple = 4
param_budget = 16 * 64**2 * 6  # hidden units: 4 * n_embd in every layer

init_std = 0.09
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 100
max_iters = 3840
eval_interval = 384
eval_tokens = 131072
sample_tokens = 0

_arms = ['uniform', 'hourglass_k8', 'step_reversed', 'cosine', 'moved', 'step', 'cosine_reversed', 'hourglass_k2',
         'wider', 'tapered_hourglass']
_init_stds = 0.06, 0.09, 0.13
_learning_rates = 1.5e-3, 3e-3, 6e-3
_short_arms = 'uniform', 'hourglass_k8', 'moved', 'cosine'
