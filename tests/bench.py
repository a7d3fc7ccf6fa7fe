"""
Time and memory of training steps on a CPU, side by side: run by hand, not by pytest.

    python tests/bench.py [--layers=4] [--only=shapes,llama]
    python tests/bench.py --against=PATH    # steps of this checkout over those of another one
    python tests/bench.py --only=recall     # what Titans' memory remembers: trains for minutes

Each model is a process of its own, and the processes take turns at doing a step. A figure is the median of the ratios
of two models' steps in the same turn, with the quartiles of these ratios. Models have the shape of the 113M family with
attention fixed: width 768, 12 heads, 3072 hidden units a layer, vocabulary 50,257; 2 x 512 tokens a step.
"""

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from configurator import configure, fail  # noqa: E402

layers = 12  # number of layers
repeats = 15  # steps of each model that count, after two that do not
only = ''  # sections to run, separated by commas; empty: shapes, mixers, llama and freed
against = ''  # another checkout of this repository, to compare with instead
arm = ''  # what a process of this script is started with: do steps of this model, in JSON
config = configure(globals())

KINDS = {'standard': {}, 'hourglass, K = 2': dict(ffn='hourglass', n_mlp=2),
         'hourglass, K = 4': dict(ffn='hourglass', n_mlp=4), 'hourglass, K = 8': dict(ffn='hourglass', n_mlp=8),
         'tapered': dict(ffn='tapered'), 'tapered hourglass, K = 8': dict(ffn='tapered_hourglass', n_mlp=8),
         'gated': dict(mixer='gated'), 'Titans': dict(mixer='titans')}
SIZE = dict(vocab_size=50257, batch_size=2, block_size=512, root=str(ROOT), dtype='auto', keep_freed=True)


def do_steps(root, batch_size, dtype, keep_freed, llama=False, **shape):
    """Do a training step for each line of input. Answer with its seconds and the process' peak memory in MB."""
    sys.path.insert(0, root)
    from model import GPT, GPTConfig, keep_freed_memory, resolve_device
    if keep_freed:
        keep_freed_memory()
    dtype = resolve_device('cpu', dtype)[1]
    torch.manual_seed(0)
    model = build_llama(shape).to(dtype) if llama else GPT(GPTConfig(**shape), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    idx = torch.randint(shape['vocab_size'], (batch_size, shape['block_size']))
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = model(idx, labels=idx).loss if llama else model(idx, idx.roll(-1, 1))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        unit = 1e3 if sys.platform == 'linux' else 1e6  # of ru_maxrss
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, flush=True)


def build_llama(shape):
    """transformers' Llama in the shape of the standard model."""
    import transformers
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape['vocab_size'], hidden_size=768, intermediate_size=3072, num_hidden_layers=shape['n_layer'],
        num_attention_heads=12, max_position_embeddings=shape['block_size'], tie_word_embeddings=True))


def compare(arms):
    """Let models take turns. arms: {name: settings that differ from SIZE}. Returns {name: seconds of its steps} and
    {name: peak MB}."""
    seconds, peaks = {name: [] for name in arms}, {}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, settings in arms.items():
            settings = {'n_layer': layers, 'ffn_width': 3072, **SIZE, **settings}
            command = [sys.executable, __file__, f'--arm={json.dumps(settings)}']
            processes[name] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for _ in range(2 + repeats):
            for name, process in processes.items():
                print(file=process.stdin, flush=True)
                took, peaks[name] = map(float, process.stdout.readline().split())
                seconds[name].append(took)
    return {name: times[2:] for name, times in seconds.items()}, peaks


def row(what, value, goal=''):
    print(f'| {what:58s} | {value:>20s} | {goal:>8s} |', flush=True)


def ratio_row(what, seconds, name, other, goal=''):
    """Print the time of one model over that of another."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds[name], seconds[other])], n=4)
    row(what, f'{middle:.2f} ({low:.2f} to {high:.2f})', goal)


# ----------------------------------------------------------------------------------------------------------------------
# Sections


def shapes():
    goals = {'hourglass, K = 8': '<= 1.08', 'tapered': '<= 1.03', 'tapered hourglass, K = 8': '<= 1.08'}
    for kind, shape in KINDS.items():
        if 'ffn' in shape:
            seconds, peaks = compare({'standard': {}, kind: shape})
            ratio_row(f'time over the standard FFN\'s: {kind}', seconds, kind, 'standard', goals.get(kind, '<= 1.05'))
            row(f'peak memory over the standard FFN\'s: {kind}', f'{peaks[kind] / peaks["standard"]:.2f}')


def mixers():
    """Of one sequence, with a small vocabulary, so that the head does not hide the mixer."""
    for length in 1024, 4096:
        size = dict(vocab_size=1024, batch_size=1, block_size=length)
        seconds, _ = compare({kind: {**size, **KINDS[kind]} for kind in ('standard', 'gated', 'Titans')})
        for kind, goal in ('gated', '<= 1.15'), ('Titans', '<= 2.5'):
            ratio_row(f'time over attention\'s, {length} tokens: {kind}', seconds, kind, 'standard', goal)


def llama():
    """transformers' Llama in our dtype and in its own float32, with freed memory returned as usual, or kept as ours."""
    for kept, where in (False, ''), (True, ', freed memory kept'):
        arms = {dtype: dict(llama=True, dtype=dtype, keep_freed=kept) for dtype in ('auto', 'float32')}
        seconds, _ = compare({'ours': {}, **arms})
        ratio_row(f'time over Llama\'s{where}', seconds, 'ours', 'auto', '<= 1')
        ratio_row(f'time over Llama\'s in float32{where}', seconds, 'ours', 'float32', '<= 0.45')


def freed():
    seconds, peaks = compare({'kept': {}, 'returned': dict(keep_freed=False)})
    ratio_row('time with freed memory kept over without', seconds, 'kept', 'returned')
    row('peak memory with freed memory kept over without', f'{peaks["kept"] / peaks["returned"]:.2f}')


def compare_checkouts():
    for kind, n_layer in [(kind, 4) for kind in ('standard', 'hourglass, K = 8', 'tapered', 'gated', 'Titans')] + [
            ('standard', 12), ('hourglass, K = 8', 12)]:
        shape = dict(KINDS[kind], n_layer=n_layer)
        seconds, _ = compare({'before': {**shape, 'root': against}, 'now': shape})
        ratio_row(f'time over that of {against}: {kind}, {n_layer} layers', seconds, 'now', 'before', '<= 1.03')


def recall():
    """16 keys, each with its value, then filler, then each key three times in a random order, each with its value. The
    model is to give these values: chance is 1 in 64. With AdamW, 600 steps of 32 sequences without filler, then 200
    steps of 8 with 1024 tokens of it."""
    from model import GPT, GPTConfig
    generator = torch.Generator().manual_seed(0)

    def questions(n, filler):
        """Token ids (n, 128 + filler - 1), and the values to be given for the last 48 keys."""
        keys = torch.rand(n, 64, generator=generator).argsort(1)[:, :16]
        pairs = torch.stack((keys, torch.randint(64, 128, (n, 16), generator=generator)), dim=-1)
        orders = torch.cat([torch.rand(n, 16, generator=generator).argsort(1) for _ in range(3)], dim=1)
        asked = pairs.gather(1, orders[..., None].expand(-1, -1, 2))
        fillers = torch.randint(128, 192, (n, filler), generator=generator)
        idx = torch.cat((pairs.flatten(1), fillers, asked.flatten(1)), dim=1)
        return idx[:, :-1], idx[:, -95::2]

    def logits(idx):
        return model.logits(model.hidden(idx)[:, -95::2])

    for kind in 'Titans', 'standard':
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=192, block_size=1152, n_layer=2, n_head=2, n_embd=64, ffn_width=256,
                              **KINDS[kind]))
        for steps, batch_size, filler in (600, 32, 0), (200, 8, 1024):
            optimizer = model.configure_optimizers(0.1, 3e-3, (0.9, 0.95))
            for step in range(steps):  # the learning rate rises for 50 steps, and falls over the last fifth
                for group in optimizer.param_groups:
                    group['lr'] = 3e-3 * min(1, (step + 1) / 50, 5 * (1 - step / steps))
                idx, answers = questions(batch_size, filler)
                F.cross_entropy(logits(idx).flatten(0, 1), answers.flatten()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                idx, answers = questions(128, filler)
                right = (logits(idx).argmax(-1) == answers).float().mean()
            row(f'right answers over {filler} tokens: {kind}', f'{right:.1%}', '>= 90%' if kind == 'Titans' else '')


if arm:
    do_steps(**json.loads(arm))
else:
    sections = {section.__name__: section for section in (shapes, mixers, llama, freed, recall)}
    names = only.split(',') if only else ['shapes', 'mixers', 'llama', 'freed']
    if not set(names) <= sections.keys():
        fail(f'only={only}: must be of {", ".join(sections)}')
    print(f'{layers} layers, torch {torch.__version__}, {torch.get_num_threads()} threads\n')
    row('what', 'measured', 'goal')
    print(f'|{"-" * 60}|{"-" * 21}:|{"-" * 9}:|', flush=True)
    for section in [compare_checkouts] if against else [sections[name] for name in names]:
        section()
