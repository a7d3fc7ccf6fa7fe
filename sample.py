"""
What one asks of a checkpoint of train.py, or of a pretrained model. Text, as it is generated:

    python sample.py --out_dir=out --start='def main(' --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0

The benchmarks of lm-evaluation-harness, and how each layer's FFN relates to the residual stream:

    python sample.py --out_dir=out --tasks=lambada_openai,piqa
    python sample.py --out_dir=out --probe=true
    python sample.py --checkpoint=hf:HuggingFaceTB/SmolLM2-135M --probe=true --dataset=mine
"""

import codecs
import io
import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from configurator import check_range, configure, explain, fail, fail_on, show
from model import GPT, GPTConfig, ffn_widths, resolve_device
from prepare import Tokenizer, Tokens, read_tokenizer

out_dir = 'out'  # folder of the run, and of results; those of hf: go to the working directory unless this is set
checkpoint = ''  # checkpoint file, or hf:FOLDER_OR_NAME, a Llama or OLMo-2; empty: out_dir's latest, ckpt.pt
start = ''  # the prompt, or FILE:PATH for a file that has it
num_samples = 1  # number of samples, one after the other
max_new_tokens = 500  # tokens of a sample, unless it comes to an end-of-text before
temperature = 0.8  # divides the logits: below 1 for likelier tokens; 0: always the likeliest
top_k = 200  # number of the likeliest tokens among which to draw; 0: all
top_p = 1.0  # draw among the likeliest tokens that have this probability together
seed = 1337  # seed of the draws
tasks = ''  # benchmarks of lm-evaluation-harness to run instead of sampling, separated by commas
tasks_dir = ''  # folder with task files of your own
limit = 0  # number of examples of each task, the first ones; 0: all
eval_batch = 16  # number of sequences of a task that are scored at once
probe = False  # measure the alignment of each FFN with the stream instead of sampling
probe_tokens = 65536  # validation tokens of the probe, the first ones, or all if there are fewer
dataset = ''  # data set of the probe; empty: that of the run, of which hf: has none
device = 'auto'  # cpu, cuda, mps, or auto: cuda where there is a GPU, else cpu
dtype = 'auto'  # float32, bfloat16, float16, or auto: bfloat16 where it is fast, else float16 on a GPU, else float32

config = configure(globals(), files_of=('train.py', GPTConfig))
is_pretrained = checkpoint.startswith('hf:')
check_range(config, 'num_samples max_new_tokens seed limit', least=0)
check_range(config, 'eval_batch probe_tokens', least=1)
if tasks and not tasks.replace(',', ' ').split():
    fail(f'tasks={tasks}: names no task')
if tasks and probe:
    fail('--tasks and --probe: one at a time')
if probe and is_pretrained and not dataset:
    fail(f'--probe needs --dataset=NAME here, of data prepared with --tokenizer={checkpoint}')
if tasks_dir and not Path(tasks_dir).is_dir():
    fail(f'tasks_dir={tasks_dir}: no such folder')
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
sys.excepthook = explain

path = Path(checkpoint or Path(out_dir, 'ckpt.pt'))
source = checkpoint if is_pretrained else path.name  # of the model, in results
folder = path.parent if not is_pretrained else Path(out_dir if 'out_dir' in config.given else '')  # of results


def write(name, text):
    """A file of results; what was there before stays whole until it is."""
    part = folder / f'{name}.part'
    with fail_on(OSError, f'{folder / name} cannot be written'):
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding='utf-8')
        os.replace(part, folder / name)


def load():
    """The model and its tokenizer, and of a run of train.py the data set and the number of steps."""
    if is_pretrained:
        return GPT.from_pretrained(checkpoint[3:], compute_dtype), Tokenizer.load(checkpoint), '', None
    if not path.is_file():
        fail(f'{path}: no such checkpoint; train one with train.py, or say --out_dir, or the path by --checkpoint')
    with fail_on(Exception, f'{path} is no checkpoint of train.py, or of another model.py than this'):
        saved = torch.load(path, map_location='cpu', weights_only=True)
        model = GPT(GPTConfig(**saved['model_args']), compute_dtype)
        model.load_state_dict(saved['model'])
        return model, Tokenizer(saved['tokenizer']), saved['config']['dataset'], saved['iter_num']


# ----------------------------------------------------------------------------------------------------------------------
# Samples


def print_samples(model, tokenizer):
    text = start
    if start.startswith('FILE:'):
        with fail_on((OSError, UnicodeDecodeError), f'--start={start}'):
            text = Path(start[5:]).read_text(encoding='utf-8')
    idx = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=device)  # as every document begins
    for _ in range(num_samples):
        show(text, end='')
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may be more than one token
        for token in model.generate_tokens(idx, max_new_tokens, temperature, top_k, top_p, stop_token=tokenizer.eot):
            show(utf8.decode(tokenizer.decode([token.item()])), end='')
        show('\n---------------')


# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks. The harness turns every task into requests of three kinds: how likely is this continuation of this
# context, how likely is this text, and how does this text go on.


def language_model(model, tokenizer, batch_size):
    """A GPT as lm-evaluation-harness asks one. All that it reads begins with end-of-text, as in training."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    block_size = model.config.block_size

    class LanguageModel(TemplateLM):  # which has loglikelihood, by way of tok_encode and _loglikelihood_tokens
        eot_token_id = tokenizer.eot

        def tok_encode(self, string, add_special_tokens=None, **_):
            """str -> list of int, with the end-of-text before it unless add_special_tokens is False."""
            return [tokenizer.eot][:add_special_tokens is not False] + tokenizer.encode(string)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests, **_):
            """requests: [(_, context, continuation)], lists of tokens. Returns for each the log-likelihood of the
            continuation, in nats, and whether each of its tokens is the likeliest. Of what is too long the end counts;
            raises ValueError if a continuation alone is longer than block_size."""
            rows = [(context + continuation)[-block_size - 1:] for _, context, continuation in requests]
            lengths = [len(continuation) for _, _, continuation in requests]
            if max(lengths, default=0) > block_size:
                raise ValueError(f'a continuation of {max(lengths)} tokens is longer than block_size={block_size}')
            # Similar lengths waste little on padding, and the longest first shows at once whether they fit into memory.
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
            answers = [None] * len(rows)
            for start in tqdm(range(0, len(order), batch_size), 'scoring', unit='batch', disable=None):
                batch = order[start:start + batch_size]
                idx = pad_sequence([torch.tensor(rows[i][:-1]) for i in batch], batch_first=True)  # (B, T)
                # Padding stands at the end, where no token before it sees it. Only continuations need logits.
                for i, x in zip(batch, model.hidden(idx.to(device))):
                    end = len(rows[i]) - 1
                    targets = torch.tensor(rows[i][end + 1 - lengths[i]:], device=device)
                    log_p = model.logits(x[end - lengths[i]:end]).log_softmax(-1)  # (length, vocab_size)
                    greedy = (log_p.argmax(-1) == targets).all()
                    answers[i] = log_p.gather(1, targets[:, None]).sum().item(), greedy.item()
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            """The log-likelihood of each whole text, in windows of block_size: each token is predicted once."""
            windows = [(i, *make_disjoint_window(window)) for i, request in enumerate(requests)
                       for window in get_rolling_token_windows(tokenizer.encode(request.args[0]), tokenizer.eot,
                                                               max_seq_len=block_size, context_len=1)]
            totals = [0.0] * len(requests)
            for (i, *_), (log_p, _) in zip(windows, self._loglikelihood_tokens(windows)):
                totals[i] += log_p
            return totals

        def room(self, kwargs, task='a task'):
            """How many tokens of context fit beside what is to be generated. Raises ValueError if none do."""
            n = normalize_gen_kwargs(kwargs)['max_gen_toks']
            if n >= block_size:
                raise ValueError(f'max_gen_toks={n} of {task} leaves no room for a context in block_size={block_size}')
            return block_size - n

        def generate_until(self, requests, disable_tqdm=False):
            """How the model goes on after each context, up to end-of-text or any of the strings to stop at, without it.
            Raises ValueError if there is no room."""
            texts = []
            for context, kwargs in tqdm([request.args for request in requests], 'generating', disable=None):
                how = normalize_gen_kwargs(kwargs)
                stops, room = [stop for stop in how['until'] if stop], self.room(kwargs)
                idx = torch.tensor([self.tok_encode(context)[-room:]], device=device)
                tokens, text = [], ''
                for token in model.generate_tokens(idx, how['max_gen_toks'], how.get('temperature', 0.0),
                                                   how.get('top_k', 0), how.get('top_p', 1.0), tokenizer.eot):
                    tokens.append(token.item())
                    text = tokenizer.decode(tokens).decode('utf-8', 'replace')
                    if any(stop in text for stop in stops):
                        break
                for stop in stops:
                    text = text.split(stop)[0]
                texts.append(text)
            return texts

    return LanguageModel()


def run_tasks(model, tokenizer, step):
    """Write the harness's numbers to tasks.json, or tasks-limit-N.json of a part, and print its table."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # its processes, for standard errors, could run this script again
    with fail_on(ImportError, '--tasks needs a recent lm-evaluation-harness (pip install -U lm-eval)'):
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
        harness_model = language_model(model, tokenizer, eval_batch)
    try:
        manager = TaskManager(include_path=tasks_dir or None)
        loaded = manager.load(tasks.split(','))['tasks']
    except Exception as error:  # of the harness, of a task's own code, of datasets or of the network
        hint = f' (a file in {tasks_dir} that is no valid YAML counts as none)' if tasks_dir else ''
        fail(f'--tasks={tasks}: {type(error).__name__}: {error}{hint}')
    for name, task in loaded.items():  # before hours of scoring, and not when it is this task's turn
        if task.OUTPUT_TYPE == 'generate_until':
            harness_model.room(task.config.generation_kwargs, name)
    results = simple_evaluate(harness_model, tasks=tasks.split(','), limit=limit or None, task_manager=manager,
                              bootstrap_iters=1000, log_samples=False, torch_random_seed=seed)
    kept = 'results', 'groups', 'versions', 'n-shot', 'n-samples', 'lm_eval_version'
    numbers = {'checkpoint': source, 'step': step, **{name: results[name] for name in kept if name in results}}
    write('tasks.json' if not limit else f'tasks-limit-{limit}.json', json.dumps(numbers, indent=1, default=float))
    for part in ['results', *(['groups'] if 'groups' in results else [])]:
        show(make_table(results, part))


# ----------------------------------------------------------------------------------------------------------------------
# The probe


@torch.no_grad()
def alignment(model, tokens):
    """Per layer (rho, ratio), float64 (n_layer, 2), means over tokens (n,): with h the stream that enters layer l and F
    what its whole FFN adds to the stream, rho_l = cosine(F, h) (Bayat et al.) and the ratio |F| / |h|. Tokens are read
    in windows of block_size, of long ones 4096."""
    h, found = [], []

    def look(ffn, inputs, output):
        entering, added = h.pop(), output - inputs[0]
        both = F.cosine_similarity(added, entering, dim=-1), added.norm(dim=-1) / entering.norm(dim=-1)
        found.append(torch.cat(both).cpu().double().sum(-1))

    hooks = [block.register_forward_pre_hook(lambda block, inputs: h.append(inputs[0])) for block in model.blocks]
    hooks += [block.ffn.register_forward_hook(look) for block in model.blocks]
    for window in tokens.split(min(model.config.block_size, 4096)):
        model.hidden(window[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found).view(-1, len(model.blocks), 2).sum(0) / len(tokens)


def run_probe(model, tokenizer, dataset, step):
    """Print the alignment of every layer; write it to probe.json and, where matplotlib is installed, probe.svg."""
    data = Tokens(dataset, 'val')
    tokens = torch.from_numpy(data.window(0, min(len(data), probe_tokens)))
    if not tokenizer.same_tokens(read_tokenizer(dataset)) or tokens.max() >= model.config.vocab_size:
        fail(f'{data.name} has other tokens than the model was trained on: data/{dataset} was prepared otherwise')
    rho, ratio = alignment(model, tokens.to(device)).T
    layers = [{'widths': widths, 'rho': rho_, 'ratio': ratio_}
              for widths, rho_, ratio_ in zip(ffn_widths(model.config), rho.tolist(), ratio.tolist())]
    for i, layer in enumerate(layers, start=1):
        if not math.isfinite(layer['rho'] * layer['ratio']):
            fail(f'{path}: what layer {i} adds or reads is too large to compare: its training went wrong')
    depth = torch.arange(1, len(rho) + 1, dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([depth, rho]))[0, 1].item() if rho.std(correction=0) > 0 else None
    write('probe.json', json.dumps({'checkpoint': source, 'step': step, 'data': data.name, 'tokens': len(tokens),
                                    'correlation': correlation, 'layers': layers}, indent=1))
    show('The question of Bayat et al.: is what the FFN adds, F, more aligned with the stream, h, in deeper layers?\n'
         f'Means over {len(tokens):,} tokens of {data.name}, with h as it enters the layer:\n\n'
         'layer  cos(F, h)  |F| / |h|  widths')
    for i, layer in enumerate(layers, start=1):
        show(f'{i:5d}  {layer["rho"]:+9.4f}  {layer["ratio"]:9.4f}  {" + ".join(map(str, layer["widths"]))}')
    if correlation is not None:
        show(f'\ncorrelation of cos(F, h) with depth: {correlation:+.3f}')
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 3), layout='constrained')
    for axes, what, values in zip(figure.subplots(1, 3), ('cos(F, h)', '|F| / |h|', 'hidden units'),
                                  (rho, ratio, [sum(layer['widths']) for layer in layers])):
        axes.plot(depth, values, marker='.')
        axes.set(xlabel='layer', title=what)
    svg = io.StringIO()
    figure.savefig(svg, format='svg')
    write('probe.svg', svg.getvalue())


# ----------------------------------------------------------------------------------------------------------------------

with fail_on(ValueError):
    device, compute_dtype = resolve_device(device, 'float32' if probe else dtype)
    if torch.device(device).type == 'cuda':
        torch.set_float32_matmul_precision('high')  # TF32, as in training
    torch.manual_seed(seed)
    model, tokenizer, trained_on, step = load()
    if not all(weight.isfinite().all() for weight in model.parameters()):
        fail(f'{path} has weights that are infinite or no numbers: its training went wrong, take an earlier checkpoint')
    model.to(device, compute_dtype).eval()  # nothing is trained here, so weights are cast once and for all
    if tasks:
        run_tasks(model, tokenizer, step)
    elif probe:
        run_probe(model, tokenizer, dataset or trained_on, step)
    else:
        print_samples(model, tokenizer)
