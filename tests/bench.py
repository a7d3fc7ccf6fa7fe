"""
Speed and memory, side by side: run by hand, not by pytest.

    python tests/bench.py [--quick] [--device=cuda] [--only=memory,steps]

Figures are ratios of medians of interleaved repetitions within one run, where they do not say otherwise. Models have
the 113M shapes with attention fixed: width 768, 12 heads, 3072 hidden units a layer, vocabulary 50,257; 12 layers, or 4
with --quick.
"""

import contextlib
import functools
import importlib.util
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import prepare  # noqa: E402
from configurator import configure, fail  # noqa: E402
from model import GPT, GPTConfig, budget, keep_freed_memory, resolve_device  # noqa: E402

quick = False  # 4 layers and fewer repetitions
device = 'auto'  # cpu or cuda
only = ''  # the sections to run, separated by commas; empty: all
section = ''  # be the process of this section: each has one, as a process keeps what it has freed
steps_of = ''  # be one of the processes that are compared: do a step of this model for every line of input
keep_freed = True  # as train.py does on a CPU
configure(globals())

try:
    device, dtype = resolve_device(device)
except ValueError as error:
    fail(str(error))
CPU = device == 'cpu'
if CPU and keep_freed:
    keep_freed_memory()
LAYERS, REPEATS = (4, 15) if quick else (12, 9)
BATCH, LENGTH = (2, 512) if CPU else (16, 1024)
COMMAND = [sys.executable, __file__, f'--quick={quick}', f'--device={device}']
KINDS = {'standard': dict(ffn='standard'), 'hourglass K=2': dict(ffn='hourglass', n_mlp=2),
         'hourglass K=4': dict(ffn='hourglass', n_mlp=4), 'hourglass K=8': dict(ffn='hourglass', n_mlp=8),
         'tapered': dict(ffn='tapered'), 'tapered hourglass K=8': dict(ffn='tapered_hourglass', n_mlp=8)}


def build(kind='standard', compute_dtype=dtype, **shape):
    torch.manual_seed(0)
    shape = {'block_size': LENGTH, 'n_layer': LAYERS, 'ffn_width': 3072, **KINDS[kind], **shape}
    return GPT(GPTConfig(**shape), compute_dtype).to(device)


def tokens(batch=BATCH, length=LENGTH, vocab_size=50257):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


def build_llama(compute_dtype, length=LENGTH):
    import transformers
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=50257, hidden_size=768, intermediate_size=3072, num_hidden_layers=LAYERS, num_attention_heads=12,
        max_position_embeddings=length, tie_word_embeddings=True)).to(device, compute_dtype)


def stepper(model, loss):
    """A function that does a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def our_step(model, compiled=False, idx=None):
    idx = tokens() if idx is None else idx
    run = torch.compile(model) if compiled else model
    return stepper(model, lambda: run(idx, idx.roll(-1, 1))[1])


def medians(arms, repeats=REPEATS):
    """{name: median seconds} of functions that are called in turn; the first two calls of each are not counted."""
    times = {name: [] for name in arms}
    for repeat in range(repeats + 2):
        for name, call in arms.items():
            start = time.perf_counter()
            call()
            if not CPU:
                torch.cuda.synchronize()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def row(what, value, goal=''):
    print(f'| {what:66s} | {value:>9s} | {goal:>9s} |', flush=True)


def steps():
    goals = {'hourglass K=8': '<= 1.08', 'tapered': '<= 1.03', 'tapered hourglass K=8': '<= 1.08'}
    for kind in list(KINDS)[1:]:  # two models at a time, for more would displace each other from memory
        times = medians({name: our_step(build(name)) for name in ('standard', kind)})
        row(f'step time over standard: {kind}', f'{times[kind] / times["standard"]:.3f}', goals.get(kind, '<= 1.05'))
    row('tokens per second of the standard model (not a ratio)', f'{BATCH * LENGTH / times["standard"]:,.0f}')


def compiled():
    kinds = 'standard', 'hourglass K=8'
    times = medians({kind: our_step(build(kind), compiled=True) for kind in kinds})
    row('step time over standard, both compiled: hourglass K=8', f'{times[kinds[1]] / times[kinds[0]]:.3f}', '<= 1.04')


def mixers():
    """Of one sequence, with a vocabulary of 1024, so that the head does not hide the mixer."""
    seconds = {}
    for length in (1024, 4096):
        idx = tokens(1, length, 1024)
        arms = {mixer: our_step(build(vocab_size=1024, block_size=length, mixer=mixer), idx=idx)
                for mixer in ('attention', 'gated', 'titans')}
        seconds[length] = medians(arms, repeats=3)
        for mixer, goal in (('gated', '<= 1.15'), ('titans', '<= 2.5')):
            row(f'step time over attention, {length} tokens: {mixer}',
                f'{seconds[length][mixer] / seconds[length]["attention"]:.3f}', goal if length == 1024 else '')
    for mixer in seconds[1024]:
        growth = seconds[4096][mixer] / seconds[1024][mixer]
        row(f'step time of 4096 tokens over that of 1024: {mixer}', f'{growth:.2f}')
    start = time.perf_counter()
    our_step(build(vocab_size=1024, block_size=1024, mixer='titans'), compiled=True, idx=tokens(1, 1024, 1024))()
    row('seconds of a first compiled step of 1024 tokens: titans (not a ratio)', f'{time.perf_counter() - start:.0f}')


def peers():
    """A process each, since how memory is kept is decided for a process as a whole."""
    if not importlib.util.find_spec('transformers'):
        return row('step time over transformers\' Llama', 'not installed')
    for kept in False, True:
        goals = {('Llama', kept): '<= 1.0', ('Llama in float32', kept): '<= 0.45'}
        times, _ = steps_apart([('standard', True), *goals])
        for arm, goal in goals.items():
            row(f'step time over {arm[0]}' + ', freed memory kept there too' * kept,
                f'{times["standard", True] / times[arm]:.3f}', '' if kept else goal)


def flops():
    """The rate of a step over that of its matrix products alone, forward and backward, in the same dtype."""
    model = build()
    n, products = BATCH * LENGTH, []
    for name, weight in model.named_parameters():
        n_out, n_in = weight.shape
        products.append([torch.randn(shape, device=device, dtype=dtype)
                         for shape in ((n, n_in), (n_out, n_in), (n, n_out))])

    def multiply():
        for x, w, dy in products:
            x @ w.T, dy @ w, dy.T @ x

    times = medians({'step': our_step(model), 'products': multiply})
    rate = budget(model.config)['flops_per_token'] * n / times['step']
    plain = 6 * sum(w.numel() for _, w, _ in products) * n / times['products']
    row('floating-point rate of a step over that of plain matrix products', f'{rate / plain:.3f}', '>= 0.40')


def peak_memory():
    """MB that a process has needed at most, or on a GPU, that its tensors have."""
    if not CPU:
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e3 if sys.platform == 'linux' else 1e6)


def steps_apart(arms):
    """Median seconds and peak MB of training steps, each arm (what, if it keeps freed memory) in its own process."""
    peaks = {}
    with contextlib.ExitStack() as stack:
        processes = {arm: stack.enter_context(subprocess.Popen(
            [*COMMAND, f'--steps_of={arm[0]}', f'--keep_freed={arm[1]}'], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)) for arm in arms}

        def step(arm):
            print(file=processes[arm].stdin, flush=True)
            peaks[arm] = float(processes[arm].stdout.readline())

        return medians({arm: functools.partial(step, arm) for arm in arms}), peaks


def do_steps(what):
    """What such a process does."""
    if what in KINDS:
        step = our_step(build(what))
    else:
        idx = tokens()
        llama = build_llama(torch.float32 if what == 'Llama in float32' else dtype)
        step = stepper(llama, lambda: llama(idx, labels=idx).loss)
    for _ in sys.stdin:
        step()
        if not CPU:
            torch.cuda.synchronize()
        print(peak_memory(), flush=True)


def memory():
    for kind in KINDS:
        _, peaks = steps_apart([(kind, True)])
        row(f'peak memory of a step in MB, {kind} (not a ratio)', f'{peaks[kind, True]:,.0f}')


def allocation():
    if CPU and sys.platform == 'linux':
        kept, returned = arms = ('standard', True), ('standard', False)
        for what, values in zip(('step time', 'peak memory'), steps_apart(arms)):
            row(f'{what} where freed memory is kept, over that where not', f'{values[kept] / values[returned]:.2f}')


def generation():
    for compute_dtype in dict.fromkeys((dtype, torch.float32)):
        generation_in(compute_dtype)


def generation_in(compute_dtype):
    """512 tokens after a prompt of 32. Without a cache each token costs a pass over all that stands before it, with it
    a read of all weights: so what is gained depends on the rate of matrix products over that of memory."""
    model = build(block_size=576).eval().to(compute_dtype)
    model.compute_dtype = compute_dtype
    prompt = tokens(1, 32)

    @torch.no_grad()
    def uncached():
        idx = tokens(1, 544)
        for length in range(33, 545, 8):  # an eighth of the tokens
            model.logits(model.hidden(idx[:, :length])[:, -1]).argmax(-1)

    times = medians({'cached': lambda: model.generate(prompt, 512, temperature=0.0), 'uncached': uncached}, repeats=3)
    row(f'tokens per second of generation in {str(compute_dtype)[6:]}, cache over none',
        f'{8 * times["uncached"] / times["cached"]:.1f}', '>= 8')


def pretrained():
    """One folder in Hugging Face's format, read here and by transformers: a forward pass, and 512 greedy tokens after a
    prompt of 32."""
    if not importlib.util.find_spec('transformers'):
        return row('tokens per second of a pretrained model over transformers\'', 'not installed')
    import transformers
    how = dict(max_new_tokens=512, min_new_tokens=512, do_sample=False, pad_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        build_llama(torch.float32, LENGTH + 64).save_pretrained(folder)
        for compute_dtype in dict.fromkeys((dtype, torch.float32)):
            ours = GPT.from_pretrained(folder, compute_dtype).to(device, compute_dtype).eval()
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype).to(device).eval()
            idx, prompt = tokens(), tokens(1, 32)
            forward = {ours: lambda: ours(idx), theirs: lambda: theirs(idx)}
            generate = {ours: lambda: ours.generate(prompt, 512, temperature=0.0),
                        theirs: lambda: theirs.generate(prompt, **how)}
            for what, arms, repeats in (('a forward pass', forward, REPEATS), ('generation', generate, 3)):
                with torch.no_grad():
                    times = medians(arms, repeats)
                row(f'tokens per second of {what} in {str(compute_dtype)[6:]} over transformers\'',
                    f'{times[theirs] / times[ours]:.2f}', '>= 1.0')


def tokenizing():
    """prepare() as a whole over tiktoken's batch call."""
    import tiktoken
    try:
        encoding = tiktoken.get_encoding('gpt2')
    except Exception as error:  # no network and no cache
        return row('bytes per second of prepare over tiktoken', type(error).__name__)
    texts = 4 * [path.read_text(encoding='utf-8') for _, path in prepare.find_inputs('')]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.mkdir('texts')
        for i, text in enumerate(texts):
            Path('texts', f'{i}.txt').write_text(text, encoding='utf-8')
        count = iter(range(99))

        def batch():  # with an encoding of its own, as prepare has: a new one is slower at first
            fresh = tiktoken.Encoding('gpt2', pat_str=encoding._pat_str, mergeable_ranks=encoding._mergeable_ranks,
                                      special_tokens=encoding._special_tokens)
            fresh.encode_ordinary_batch(texts, num_threads=os.cpu_count())

        times = medians({'prepare': lambda: prepare.prepare(f'set{next(count)}', input='texts', tokenizer='gpt2'),
                         'tiktoken': batch}, repeats=5)
        os.chdir(ROOT)
    row('bytes per second of prepare over tiktoken', f'{times["tiktoken"] / times["prepare"]:.2f}', '>= 0.8')


def overhead():
    """The share of a default run's time, from its first update to its last, that is outside of the steps' own work."""
    inside, updates = 0.0, []  # seconds so far; (time, seconds inside) at the end of each update

    def timed(function):
        def call(*args, **kwargs):
            nonlocal inside
            start = time.perf_counter()
            result = function(*args, **kwargs)
            inside += time.perf_counter() - start
            if function.__name__ == 'zero_grad':
                updates.append((time.perf_counter(), inside))
            return result
        return call

    places = [(GPT, 'forward'), (torch.Tensor, 'backward'), (torch.nn.utils, 'clip_grad_norm_'),
              (torch.optim.AdamW, 'step'), (torch.optim.AdamW, 'zero_grad')]
    originals = [getattr(*place) for place in places]
    for (owner, name), function in zip(places, originals):
        setattr(owner, name, timed(function))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = ['train.py', '--max_iters=60', '--eval_interval=1000', '--eval_tokens=128', '--sample_tokens=0',
                    f'--device={device}']
        runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
        os.chdir(ROOT)
    for (owner, name), function in zip(places, originals):
        setattr(owner, name, function)
    seconds, inside = (last - first for first, last in zip(updates[0], updates[-1]))
    row('share of a run outside of its steps', f'{1 - inside / seconds:.1%}', '<= 2%')


SECTIONS = memory, allocation, steps, compiled, mixers, peers, flops, generation, pretrained, tokenizing, overhead

if steps_of:
    do_steps(steps_of)
elif section:
    globals()[section]()
else:
    names = [function.__name__ for function in SECTIONS]
    if not set(only.split(',')) <= {'', *names}:
        fail(f'--only={only}: must be of {", ".join(names)}')
    print(f'{LAYERS} layers, {BATCH} x {LENGTH} tokens, {str(dtype)[6:]}, {device}, torch {torch.__version__}, '
          f'{torch.get_num_threads()} threads\n')
    row('what', 'measured', 'goal')
    print(f'|{"-" * 68}|{"-" * 10}:|{"-" * 10}:|', flush=True)
    for name in only.split(',') if only else names:
        subprocess.run([*COMMAND, f'--section={name}'], check=True)
