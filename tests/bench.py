"""
Speed and memory, side by side, and what Titans' memory remembers: run by hand, not by pytest.

    python tests/bench.py [--quick] [--device=cuda] [--only=memory,steps]
    python tests/bench.py --only=recall,long,language [--seeds=0,1,2]      # these train, for an hour, and only if named

Figures are ratios of medians of interleaved repetitions within one run, where they do not say otherwise. Models have
the 113M shapes with attention fixed: width 768, 12 heads, 3072 hidden units a layer, vocabulary 50,257; 12 layers, or 4
with --quick.
"""

import contextlib
import functools
import importlib.util
import math
import os
import random
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
import torch.nn.functional as F  # noqa: E402

import prepare  # noqa: E402
from configurator import configure, fail, fail_on  # noqa: E402
from model import MIXERS, GPT, GPTConfig, Titans, budget, keep_freed_memory, prefer_cudnn, resolve_device  # noqa: E402
from model import rms_norm, rotate  # noqa: E402

quick = False  # 4 layers and fewer repetitions
device = 'auto'  # cpu or cuda
only = ''  # the sections to run, separated by commas; empty: all
section = ''  # used by this script: be the process of this section, as each has one
seeds = '0,1,2'  # of what is trained, separated by commas
steps_of = ''  # used by this script: do a step of this model for every line of input
keep_freed = True  # used by this script: keep freed memory, as train.py does on a CPU
configure(globals())

with fail_on(ValueError):
    device, dtype = resolve_device(device)
CPU = device == 'cpu'
if CPU and keep_freed:
    keep_freed_memory()
LAYERS, REPEATS = (4, 15) if quick else (12, 9)
BATCH, LENGTH = (2, 512) if CPU else (16, 1024)
COMMAND = [sys.executable, __file__, f'--quick={quick}', f'--device={device}', f'--seeds={seeds}']
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

    def loss():
        with prefer_cudnn(device):
            return run(idx, idx.roll(-1, 1))[1]
    return stepper(model, loss)


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


# What Titans' memory remembers. Models of d_model 64, 2 heads and, where nothing else is said, 2 layers, trained by
# AdamW at a learning rate that rises for 50 steps and falls over the last fifth of all.


class ConvolvedAttention(Titans):
    """Attention in the memory's place, behind the same convolution and the same gate."""

    def forward(self, x, rotary, cache=None):
        B, T, _ = x.size()
        qkv = self.convolve(F.pad(self.qkv_proj(x), (0, 0, 3, 0)))
        q, k, v = qkv.view(B, T, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(rms_norm(q, 1e-6), *rotary), rotate(rms_norm(k, 1e-6), *rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(y * self.gate_proj(x).sigmoid())


MIXERS['convolved'] = ConvolvedAttention


def small(mixer, seed, compute_dtype=torch.float32, **shape):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{'vocab_size': 256, 'n_layer': 2, 'n_head': 2, 'n_embd': 64, 'ffn_width': 192,
                            'mixer': mixer, **shape}), compute_dtype).to(device)


def fit(model, loss, steps, learning_rate):
    """Train. Returns whether the loss stayed finite."""
    optimizer, finite = model.configure_optimizers(0.1, learning_rate, (0.9, 0.95)), True
    for step in range(steps):
        for group in optimizer.param_groups:
            group['lr'] = learning_rate * min(1, (step + 1) / 50, 5 * (1 - step / steps))
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        finite = finite and math.isfinite(value.item())
    return finite


def stop_learning(model):
    """Set theta to 0."""
    for block in model.blocks:
        block.mixer.rate_bias.data[-model.config.n_head:] = -torch.inf


def recall():
    """Sequences of 16 keys, each with its value, then filler, then three times all keys in some order, each with its
    value, which is to be given: of 64 keys, values and fillers. The fillers, 1024, come in 200 further steps of 8."""
    generator = torch.Generator().manual_seed(0)

    def questions(n, filler):
        keys = torch.rand(n, 64, generator=generator).argsort(1)[:, :16]
        pairs = torch.stack((keys, torch.randint(64, 128, (n, 16), generator=generator)), dim=-1)
        orders = torch.cat([torch.rand(n, 16, generator=generator).argsort(1) for _ in range(3)], dim=1)
        asked = pairs.gather(1, orders[..., None].expand(-1, -1, 2))
        fillers = torch.randint(128, 192, (n, filler), generator=generator)
        idx = torch.cat((pairs.flatten(1), fillers, asked.flatten(1)), dim=1).to(device)
        return idx[:, :-1], idx[:, -95::2]  # what is read, and the answers to its last 48 keys

    def answer(model, idx):
        return model.logits(model.hidden(idx)[:, -95::2])

    def loss(model, n, filler):
        idx, answers = questions(n, filler)
        return F.cross_entropy(answer(model, idx).flatten(0, 1), answers.flatten())

    @torch.no_grad()
    def test(what, model, filler, goal):
        right = torch.cat([answer(model, idx).argmax(-1) == answers
                           for idx, answers in (questions(16, filler) for _ in range(8))]).float()
        row(f'right answers {what}', f'{right.mean():.1%}', goal)
        row('  to the first question for each key', f'{right[:, :16].mean():.1%}', goal if filler else '')

    for mixer in 'titans', 'attention':
        model = small(mixer, 0, vocab_size=192, block_size=1152, ffn_width=256)
        fit(model, lambda: loss(model, 32, 0), 600, 3e-3)
        test(f'after 600 steps of 32 x 128 tokens: {mixer}', model, 0, '>= 95%' * (mixer == 'titans'))
        fit(model, lambda: loss(model, 8, 1024), 200, 3e-3)
        test(f'at 1024 tokens, after 200 more steps: {mixer}', model, 1024, '>= 90%' * (mixer == 'titans'))


@functools.cache
def text():
    """Python's standard library as bytes, for training and for validation."""
    files = [path.read_bytes() for _, path in sorted(prepare.find_inputs(''))]
    random.Random(0).shuffle(files)
    data = torch.frombuffer(bytearray(b''.join(files)), dtype=torch.uint8).long()
    return data[:-600_000], data[-600_000:]


def windows(data, n, length, generator):
    starts = torch.randint(len(data) - length, (n,), generator=generator).tolist()
    rows = torch.stack([data[i:i + length + 1] for i in starts]).to(device)
    return rows[:, :-1], rows[:, 1:]


def fit_text(model, steps, batch, learning_rate, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return fit(model, lambda: model(*windows(text()[0], batch, model.config.block_size, generator))[1], steps,
               learning_rate)


@torch.no_grad()
def tenths(model, tokens):
    """Mean losses in each tenth of the sequence, of the same text for every model."""
    generator, length = torch.Generator().manual_seed(1), model.config.block_size
    losses = [model(*windows(text()[1], 1, length, generator), reduction='none')[1] for _ in range(tokens // length)]
    return torch.stack([part.mean() for part in torch.cat(losses).mean(0).tensor_split(10)])


def long():
    """One layer, 500 steps of one sequence of 4096 bytes."""
    for compute_dtype in torch.float32, torch.bfloat16:
        for learning_rate in 3e-3, 4e-4:
            what, outputs = f'{str(compute_dtype)[6:]}, {learning_rate:g}', []
            model = small('titans', 0, compute_dtype, block_size=4096, n_layer=1)
            row(f'finite for 500 steps of 4096: {what}', str(fit_text(model, 500, 1, learning_rate)), 'True')
            hooks = [block.mixer.register_forward_hook(lambda *args: outputs.append(args[2])) for block in model.blocks]
            losses = tenths(model, 65536)
            for hook in hooks:
                hook.remove()
            squares = torch.cat(outputs).float().square().mean((0, 2)).tensor_split(10)
            row('  root mean square of the mixers\' output, last tenth over first',
                f'{(squares[-1].mean() / squares[0].mean()).sqrt():.2f}', '1/3 to 3')
            stop_learning(model)
            costs = tenths(model, 65536) - losses
            row('  nats that theta = 0 costs, in the first tenth', f'{costs[0]:.4f}')
            row('  and where it costs least of the others', f'{costs[1:].min():.4f}', '> 0')


def language():
    """1500 steps of 2 x 1024 bytes."""
    for seed in map(int, seeds.split(',')):
        losses = {}
        for arm in 'titans', 'theta = 0', 'convolved':
            model = small('convolved' if arm == 'convolved' else 'titans', seed)
            if arm == 'theta = 0':
                stop_learning(model)
            fit_text(model, 1500, 2, 3e-3, seed)
            losses[arm] = tenths(model, 262144)
            row(f'nats a byte, seed {seed}: {arm}', f'{losses[arm].mean():.4f}')
            if arm == 'titans':
                stop_learning(model)
                losses['stopped'] = tenths(model, 262144)
        for arm, goal in (('theta = 0', '> 0'), ('stopped', '> 0'), ('convolved', '')):
            gains = losses[arm] - losses['titans']
            row(f'  more than titans: {arm}', f'{gains.mean():.4f}', goal)
            row('    in the first tenth', f'{gains[0]:.4f}')
            row('    in the last tenth', f'{gains[-1]:.4f}')


SECTIONS = memory, allocation, steps, compiled, mixers, peers, flops, generation, pretrained, tokenizing, overhead
TRAINED = recall, long, language

if steps_of:
    do_steps(steps_of)
elif section:
    globals()[section]()
else:
    names, trained = ([function.__name__ for function in functions] for functions in (SECTIONS, TRAINED))
    if not set(only.split(',')) <= {'', *names, *trained}:
        fail(f'--only={only}: must be of {", ".join(names + trained)}')
    print(f'{LAYERS} layers, {BATCH} x {LENGTH} tokens, {str(dtype)[6:]}, {device}, torch {torch.__version__}, '
          f'{torch.get_num_threads()} threads\n')
    row('what', 'measured', 'goal')
    print(f'|{"-" * 68}|{"-" * 10}:|{"-" * 10}:|', flush=True)
    for name in only.split(',') if only else names:
        subprocess.run([*COMMAND, f'--section={name}'], check=True)
