# The shape of config/standard_113m.py, in contexts of 1024 tokens instead of 4096, and 2.26B tokens of FineWeb (20 a
# parameter): 2.2e18 FLOPs a run of uniform, up to 3.0e18 with a wider stream, through the head.
import runpy
from pathlib import Path

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

_learning_rates = [3e-4, 6e-4, 1.2e-3]
_seeds = 3
_arms = ['uniform', 'step', 'step_reversed', 'cosine', 'linear', 'cosine_reversed', 'hourglass_k2', 'hourglass_k8',
         'moved', 'wider', 'tapered_hourglass']
# What Liao et al. searched: K with attention as it is, then d_h / d_model and d_model / L at K = 4.
_more_arms = {f'k{_k}': ['--ffn=hourglass', f'--n_mlp={_k}'] for _k in (3, 4, 5, 6, 7, 9, 10)}
for _ratio, _heads in ((0.75, 21), (0.5, 30), (0.42, 33), (0.25, 39)):
    # Depth and width are uniform's, and what the FFN gives up widens attention.
    _more_arms[f'to_attention_{_ratio}'] = ['--ffn=hourglass', '--head_dim=64', f'--n_head={_heads}']
for _layers, _width in ((39, 576), (22, 768), (12, 1024), (10, 1152), (6, 1536), (3, 2048)):
    # Attention is as wide as the stream, d_h / d_model 0.33 to 0.42.
    _more_arms[f'aspect_{_width / _layers:.0f}'] = ['--ffn=hourglass', f'--n_layer={_layers}', f'--n_embd={_width}',
                                                    '--head_dim=64', f'--n_head={_width // 64}']
# And what Bayat et al. searched.
_more_arms.update(runpy.run_path(Path(__file__).with_name('scale_440m.py'))['_more_arms'])
