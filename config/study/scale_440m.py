# The model of config/standard_440m.py in 30B tokens of FineWeb, as many as Bayat et al. gave it, with their searches:
# widths in three groups, and schedules times ratios. 9.7e19 FLOPs a run.
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
_more_arms = {'step_middle': ['--ffn=tapered', '--taper=step', '--taper_start=0.75', '--taper_end=0.75']}
for _taper in ('linear', 'cosine', 'sigmoid'):
    for _start in (1.25, 1.375, 1.5, 1.625, 1.75):
        if (_taper, _start) not in (('linear', 1.5), ('cosine', 1.5)):  # which have files
            _more_arms[f'{_taper}_{_start}'] = ['--ffn=tapered', f'--taper={_taper}', f'--taper_start={_start}',
                                                f'--taper_end={2 - _start}']
