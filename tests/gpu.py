"""
What has to be seen on a GPU: whether it computes what a CPU does, and the time and memory of the models in config/.

    python tests/gpu.py                           # one table, in under 8 minutes on an H200; needs no network
    python tests/gpu.py --only cpu micro_steps    # some parts
    python tests/gpu.py --tiny                    # the same parts with tiny models on a CPU: only that they run

Each part is a process with a time limit. A part that fails leaves the others alone: its rows so far are in the
table, and the end of its output goes to stderr. The exit status is 1 if a part failed or missed a goal.
"""

import argparse
import base64
import functools
import json
import math
import os
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import prepare  # noqa: E402
from model import GPT, GPTConfig, activations, budget, ffn_widths  # noqa: E402

LANES = [  # {part: seconds it may take}; lanes run side by side where the GPU has 128 GiB, else one after another
    {'cpu': 90, 'compiled': 150, 'float16': 60, 'resumed': 60, 'two_gpus': 90},
    {'full_size tapered_440m': 120, 'full_size standard_1300m': 180},
    {'full_size titans_760m': 150, 'full_size hourglass_113m': 90, 'full_size hourglass_113m_k8': 120}]
TIMED = {'full_size standard_113m': 90, 'micro_steps': 150, 'attention': 30, 'generation': 60}  # after them, alone
DEADLINE = 465  # seconds for all
PARTS = [part for lane in [*LANES, TIMED] for part in lane]

# Milliseconds and GiB of a compiled micro-step of 8 x 4096 tokens on an H100, worked out without one: matrix products
# at 650 TFLOP/s, attention at 310, all else at 2.8 TB/s; and what torch 2.13's compiler keeps for the backward pass.
WORKED_OUT = {'standard_113m': ('about 93', 'over 12.2'), 'hourglass_113m': ('about 108', 'over 9.2'),
              'hourglass_113m_k8': ('about 108', 'over 16.3'), 'Llama': ('', '')}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--tiny', action='store_true', help='tiny models on a CPU')
parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS, metavar='PART', help=', '.join(PARTS))
parser.add_argument('--part', help=argparse.SUPPRESS)  # run this part in this process
arguments = parser.parse_args()
TINY = arguments.tiny
DEVICE, STEPS, REPEATS = ('cpu', 4, 1) if TINY else ('cuda', 20, 10)
TINY_SHAPE = dict(n_layer=2, n_head=2, n_embd=32, param_budget=0, ffn_width=128, block_size=32, batch_size=2)
SMALL_SHAPE = TINY_SHAPE if TINY else {**TINY_SHAPE, 'n_embd': 128, 'ffn_width': 512, 'block_size': 256}


# ----------------------------------------------------------------------------------------------------------------------
# What the parts share


def row(what, value, goal=''):
    """Print a line of the table: a value, and a goal like '<= 1', or what the value was worked out to be."""
    met = ''
    if goal.startswith(('<=', '>=')):
        ahead = float(goal[3:]) - value if goal.startswith('<=') else value - float(goal[3:])
        met = 'yes' if ahead >= 0 else 'NO'
    value = f'{value:.4g}' if isinstance(value, float) else value
    print(f'| {what[:68]:68s} | {value:>9} | {goal:>15s} | {met:3s} |', flush=True)


def train(*files, launcher=(), **settings):
    """Run train.py, in this process or by a launcher. Returns the lines of metrics.jsonl that have training losses."""
    settings = {'device': DEVICE, 'out_dir': 'out', 'eval_interval': 1000, 'eval_tokens': 1000, 'log_interval': 1,
                'sample_tokens': 0, 'gradient_accumulation_steps': 2, **settings}
    if settings.get('init_from') != 'resume':
        shutil.rmtree(settings['out_dir'], ignore_errors=True)
    command = [str(ROOT / 'train.py'), *files, *(f'--{name}={value}' for name, value in settings.items())]
    if launcher:
        subprocess.run([*launcher, *command], check=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name='__main__')
    lines = map(json.loads, Path(settings['out_dir'], 'metrics.jsonl').read_text().splitlines())
    return [line for line in lines if 'loss' in line]


def losses(**settings):
    """The losses of all steps of a small model on text: in float32, not compiled, unless settings say otherwise."""
    small = {'dataset': 'text', 'max_iters': STEPS, 'lr_decay_iters': STEPS, 'dtype': 'float32', 'compile': False}
    return [line['loss'] for line in train(**{**small, **SMALL_SHAPE, **settings})]


def difference(a, b):
    """The largest difference between the losses of two runs that end at the same step."""
    return max(abs(x - y) for x, y in zip(reversed(a), reversed(b)))


def shape_in(name):
    """The GPTConfig of a file in config/."""
    settings = {**runpy.run_path(str(ROOT / 'config' / f'{name}.py')), **(TINY_SHAPE if TINY else {})}
    return GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings})


def build(name):
    return GPT(shape_in(name), torch.bfloat16).to(DEVICE)


def build_llama(config):
    """transformers' Llama in the shape of a GPTConfig."""
    import transformers
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=ffn_widths(config)[0][0],
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, tie_word_embeddings=True,
        max_position_embeddings=config.block_size)).to(DEVICE)


def medians(calls):
    """{name: median seconds} of functions that are called in turn. Their first two calls do not count."""
    times = {name: [] for name in calls}
    for _ in range(2 + REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if not TINY:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Parts with small models, on text


def cpu():
    """A GPU's losses are those of a CPU."""
    kinds = {'standard': {}, 'hourglass, K = 8': dict(ffn='hourglass', n_mlp=8), 'gated': dict(mixer='gated'),
             'Titans': dict(mixer='titans', memory_chunk=16), 'OLMo-2': dict(norm='olmo2')}
    for kind, shape in kinds.items():
        here, on_cpu = losses(**shape), losses(**shape, device='cpu')
        row(f'{kind}: losses in float32, difference to a CPU', difference(here, on_cpu), '<= 1e-4')


def compiled():
    """Compiled losses are the eager ones, but for bfloat16's rounding. The model is one graph, except for the memory of
    Titans, and nothing is compiled after two steps."""
    from torch._dynamo.utils import counters
    if TINY:  # compiling for a CPU takes a minute
        torch.compile = functools.partial(torch.compile, backend='aot_eager')

    def compile_and_count(**settings):
        torch._dynamo.reset()
        counters.clear()
        found = losses(**settings, compile=True, eval_interval=2)
        return found, counters['stats']['unique_graphs'], sum(counters['graph_break'].values())

    kinds = {'tapered hourglass': dict(ffn='tapered_hourglass', n_mlp=2), 'Titans': dict(mixer='titans')}
    for kind, shape in kinds.items():
        exact, eager = losses(**shape), losses(**shape, dtype='bfloat16')
        here, graphs, breaks = compile_and_count(**shape, dtype='bfloat16')
        _, first, _ = compile_and_count(**shape, dtype='bfloat16', max_iters=2)
        row(f'{kind}: losses in bfloat16, compiled against eager', difference(here, eager),
            f'<= {2 * difference(eager, exact):.2g}')
        row(f'{kind}: graph breaks', breaks, '' if kind == 'Titans' else '<= 0')
        row(f'{kind}: graphs compiled in two steps and two evaluations', first)
        row(f'{kind}: graphs compiled later', graphs - first, '<= 0')


def float16():
    """The dtype of GPUs without bfloat16, with scaled losses."""
    scaled = losses(dtype='float16', compile=not TINY)
    row('float16: finite losses', sum(map(math.isfinite, scaled)), f'>= {STEPS}')
    row('float16: losses, difference to float32', difference(scaled, losses()), '<= 0.02')


def resumed():
    """A resumed run goes on as one that never stopped."""
    whole = losses()
    losses(max_iters=STEPS // 2, out_dir='stopped')
    row('stopped and resumed: losses, difference to never stopped',
        difference(losses(init_from='resume', out_dir='stopped'), whole), '<= 1e-4')


def two_gpus():
    """Two processes that share the micro-steps of a step compute what one does."""
    if not TINY and torch.cuda.device_count() < 2:
        return row('two GPUs', 'one here')
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    row('two processes: losses, difference to one',
        difference(losses(launcher=torchrun, compile=not TINY), losses()), '<= 1e-4')


# ----------------------------------------------------------------------------------------------------------------------
# Parts with the models of config/ at full size, on random tokens


def full_size(name):
    """Six steps of train.py, of two micro-steps each."""
    lines = train(str(ROOT / 'config' / f'{name}.py'), dataset='random', max_iters=6, compile=not TINY,
                  **(TINY_SHAPE if TINY else {}))
    tokens = lines[0]['tokens'] / 2  # of a micro-step
    row(f'{name}: seconds of the first step, which compiles', 2 * tokens / lines[0]['tokens_per_second'])
    if not TINY:
        worked_out = 16 * budget(shape_in(name))['total'] + tokens * activations(shape_in(name))
        row(f'{name}: GiB at the peak', torch.cuda.max_memory_allocated() / 2**30, f'about {worked_out / 2**30:.1f}')
    saved = [path.stat() for path in Path('out').glob('ckpt*.pt')]
    row(f'{name}: seconds from evaluation to checkpoint on disk',
        max(file.st_ctime for file in saved) - Path('out', 'metrics.jsonl').stat().st_mtime,
        f'{len(saved)} x {saved[0].st_size / 1e9:.1f} GB')
    if f'full_size {name}' in TIMED:
        speed = statistics.median(line['tokens_per_second'] for line in lines[-3:])
        row(f'{name}: milliseconds of a micro-step in train.py', 1e3 * tokens / speed)
        if 'mfu' in lines[-1]:
            row(f'{name}: mfu', statistics.median(line['mfu'] for line in lines[-3:]), '>= 0.5')


def micro_steps():
    """Forward and backward passes, compiled, also of transformers' Llama in the shape of standard_113m."""
    models = {name: build(name) for name in WORKED_OUT if name != 'Llama'}
    standard = models['standard_113m'].config
    models['Llama'] = build_llama(standard)
    idx = torch.randint(50257, (2 if TINY else 8, standard.block_size), device=DEVICE)

    def step(model, compiled):
        if isinstance(model, GPT):
            loss = compiled(idx, idx.roll(-1, 1))[1]
        else:
            with torch.autocast(DEVICE, torch.bfloat16):  # float32 weights, products in bfloat16: as ours
                loss = compiled(idx, labels=idx).loss
        loss.backward()
        model.zero_grad()

    calls = {name: functools.partial(step, model, torch.compile(model, disable=TINY)) for name, model in models.items()}
    seconds = medians(calls)
    for name, call in calls.items():
        ms, gib = WORKED_OUT[name]
        row(f'{name}: milliseconds of a micro-step', 1e3 * seconds[name], ms)
        if not TINY:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            row(f'{name}: GiB of a micro-step', (torch.cuda.max_memory_allocated() - before) / 2**30, gib)
    for name, other, goal in ('hourglass_113m_k8', 'standard_113m', '<= 1.06'), ('standard_113m', 'Llama', '<= 1'):
        row(f'time of {name} over {other}', seconds[name] / seconds[other], '' if TINY else goal)
    for name in 'standard_113m', 'hourglass_113m_k8':
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, DEVICE.upper())]) as profiler:
            calls[name]()
        spent = f'self_{"cpu" if TINY else "device"}_time_total'  # microseconds
        for event in sorted(profiler.key_averages(), key=lambda event: -getattr(event, spent))[:8]:
            row(f'{name}: milliseconds of {event.count} x {event.key}', getattr(event, spent) / 1e3)


def attention():
    """Forward and backward passes of causal attention as in standard_113m, by the kernels that torch can choose."""
    shape = (1, 2, 32, 16) if TINY else (8, 12, 4096, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call(kernel):
        with sdpa_kernel(kernel):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    kernels = [SDPBackend.FLASH_ATTENTION] if TINY else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    seconds = medians({kernel.name: functools.partial(call, kernel) for kernel in kernels})
    for name in seconds:
        row(f'attention of a layer, {name}: milliseconds', 1e3 * seconds[name], '' if TINY else 'about 2.3')


def generation():
    """Greedy tokens after a prompt of 16."""
    n = 8 if TINY else 256
    prompt = torch.randint(50257, (1, 16), device=DEVICE)
    models = {name: build(name).to(torch.bfloat16) for name in ('standard_113m', 'hourglass_113m_k8')}
    calls = {name: functools.partial(model.generate, prompt, n, temperature=0.0) for name, model in models.items()}
    llama = build_llama(models['standard_113m'].config).to(torch.bfloat16).eval()
    calls['Llama'] = functools.partial(llama.generate, prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False,
                                       pad_token_id=0)
    seconds = medians(calls)
    for name in calls:
        row(f'{name}: generated tokens a second', n / seconds[name])
    row('generated tokens a second, standard_113m over Llama', seconds['Llama'] / seconds['standard_113m'],
        '' if TINY else '>= 1')


# ----------------------------------------------------------------------------------------------------------------------
# The table


def make_data():
    """data/text, the source of this repository in bytes, and data/random, tokens of GPT-2's number."""
    prepare.prepare('text', input=str(ROOT / '*.py'), tokenizer='bytes', val_fraction=0.2)
    tokens = [bytes([i]) for i in range(256)] + [bytes([i // 256, i % 256]) for i in range(50000)]
    Path('ranks').write_text(''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens)))
    Path('shards').mkdir()
    for split, n in ('train', 1_000_000), ('val', 10_000):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, n
        random = np.random.default_rng(0).integers(50257, size=n, dtype=np.uint16)
        Path('shards', f'{split}_000000.bin').write_bytes(header.tobytes() + random.tobytes())
    prepare.prepare('random', input='shards', tokenizer='ranks')


def run_part(part, limit):
    """Run a part in a folder of its own, and print its rows. Returns whether it ended and met its goals."""
    start = time.perf_counter()
    folder = Path(part.replace(' ', '-'))
    folder.mkdir()
    Path(folder, 'data').symlink_to(Path('data').resolve())
    command = [sys.executable, __file__, f'--part={part}', *(['--tiny'] if TINY else [])]
    with open(f'{folder}.log', 'w') as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(max(1, min(limit, STARTED + DEADLINE - start)))
        except subprocess.TimeoutExpired:
            status = 'too slow'
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
    shutil.rmtree(folder)  # its checkpoints take many GB
    output = Path(f'{folder}.log').read_text(errors='replace').splitlines()
    rows = [line for line in output if line.startswith('| ')]
    print('\n'.join(rows), flush=True)
    row(f'{part}: seconds, and exit status', time.perf_counter() - start, str(status))
    if status:
        print(f'{part} ended like this:', *output[-25:], sep='\n', file=sys.stderr)
    return status == 0 and not any('| NO ' in line for line in rows)


def run_lane(lane):
    return all([run_part(part, limit) for part, limit in lane.items() if part in arguments.only])


def main():
    os.environ['NVIDIA_TF32_OVERRIDE'] = '0'  # float32 is float32: train.py allows TF32
    if TINY:
        os.environ['OMP_NUM_THREADS'] = '1'
    side_by_side = TINY or torch.cuda.get_device_properties(0).total_memory > 128 * 2**30
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_data()
        print(f'\n{"CPU" if TINY else torch.cuda.get_device_name()}, torch {torch.__version__}\n')
        print(f'| {"what":68s} | measured  | goal            | met |\n|{"-" * 70}|{"-" * 10}:|{"-" * 16}:|{"-" * 5}|')
        with ThreadPoolExecutor(len(LANES) if side_by_side else 1) as pool:
            well = [*pool.map(run_lane, LANES), run_lane(TIMED)]
        os.chdir(ROOT)
    sys.exit(0 if all(well) else 1)


STARTED = time.perf_counter()
if arguments.part:
    name, *words = arguments.part.split()
    globals()[name](*words)
else:
    main()
