# A million parameters outside the embeddings, on the bytes of Python's standard library: three million tokens, five to
# seven minutes of one core. Nine layers, for the steps need thirds.
dataset = 'stdlib'
block_size = 128
batch_size = 16
dtype = 'float32'

n_layer = 9
n_head = 2
n_embd = 80
ffn_multiple = 4
param_budget = 16 * 80**2 * 9  # hidden units: 4 * n_embd in every layer

init_std = 0.08  # 0.02 is for wider streams: in a trial of half the steps it cost uniform 0.12 nats, and K = 8 0.19
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 150
max_iters = 1465
eval_interval = 293
eval_tokens = 131072
sample_tokens = 0
