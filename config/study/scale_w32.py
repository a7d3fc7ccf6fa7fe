# A tenth of a million parameters outside the embeddings, and twenty bytes of Python code for each: 2.0 million, of
# which none is seen twice. The code is torch's own, 46 MB that everyone has who has torch.
from pathlib import Path

import torch

dataset = 'torch_bytes'
block_size = 128
batch_size = 16
dtype = 'float32'
compile = True

n_layer = 6  # the step schedule needs thirds
n_head = 2
n_embd = 32
ffn_multiple = 4
param_budget = 16 * n_embd**2 * n_layer  # hidden units: 4 * n_embd in every layer

init_std = 0.72 / n_embd**0.5  # 0.09 was the best of three at width 64
learning_rate = 6e-3
min_lr = 6e-4
max_iters = 20 * param_budget // (batch_size * block_size)
warmup_iters = max_iters // 20
eval_interval = max_iters
eval_tokens = 0  # all validation bytes
log_interval = 40
sample_tokens = 0

_data = {'input': f'{Path(torch.__file__).parent}/**/*.py', 'tokenizer': 'bytes', 'val_fraction': 0.01}
_arms = ['uniform', 'hourglass_k8', 'moved', 'cosine', 'step_reversed']
_learning_rates = [8.49e-3, 1.2e-2, 1.7e-2]  # by factors of 1.41
_seeds = 16
