"""
Text, benchmarks, and the alignment of FFNs with the residual stream, of a checkpoint or of a pretrained model:

    python sample.py --out_dir=out --start='def main(' --num_samples=3
    python sample.py --out_dir=out --tasks=lambada_openai,piqa
    python sample.py --checkpoint=hf:Qwen/Qwen3-0.6B --probe=true --dataset=mine
"""
# ruff: noqa: E402

import codecs
import json
import os
import re
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the slow imports, so that Ctrl-C never prints a traceback

import torch
from tqdm import tqdm

from configurator import check_range, configure, explain, fail, fail_on, show
from model import GPT, GPTConfig, resolve_device
from prepare import Tokenizer, Tokens, read_tokenizer

out_dir = 'out'  # folder of the run, and of results; results for hf: go to the working directory
checkpoint = ''  # checkpoint file, or hf:FOLDER_OR_NAME, a Llama or OLMo-2, any for --probe; empty: ckpt.pt of out_dir
start = ''  # the prompt, or FILE:PATH of a file with the prompt
num_samples = 1  # number of samples
max_new_tokens = 500  # largest number of tokens in a sample; end-of-text ends a sample earlier
temperature = 0.8  # divides the logits; below 1, likely tokens become likelier; 0: always the likeliest
top_k = 200  # draw among this many of the likeliest tokens; 0: all
top_p = 1.0  # draw among the likeliest tokens that have this probability together
seed = 1337  # seed of the draws
tasks = ''  # benchmarks of lm-evaluation-harness to run instead of sampling, separated by commas
tasks_dir = ''  # folder with task files of your own
limit = 0  # evaluate only this many examples of each task, the first ones; 0: all
eval_batch = 16  # number of sequences of a task in a batch
probe = False  # measure the alignment of each FFN with the stream instead of sampling
probe_tokens = 65536  # number of validation tokens that the probe reads, the first ones
dataset = ''  # data set of the probe; empty: that of the run; for hf:NAME, one prepared with --tokenizer=hf:NAME
device = 'auto'  # cpu, cuda, mps, or auto: cuda where there is a GPU, else cpu
dtype = 'auto'  # float32, bfloat16, float16, or auto: bfloat16 where it is fast, else float16 on a GPU, else float32

config = configure(globals(), files_of=('train.py', GPTConfig))
sys.excepthook = explain
path = Path(checkpoint or Path(out_dir, 'ckpt.pt'))
is_pretrained = checkpoint.startswith('hf:')
results_dir = Path() if is_pretrained else path.parent
check_range(config, 'num_samples max_new_tokens seed limit', least=0)
check_range(config, 'eval_batch probe_tokens', least=1)
if tasks and probe:
    fail('--tasks and --probe: one at a time')
if probe and is_pretrained and not dataset:
    fail(f'--probe needs --dataset=NAME here, of data prepared with --tokenizer={checkpoint}')


def load():
    """The model, its tokenizer, and, for a checkpoint of train.py, the name of its data set and its step."""
    with fail_on(Exception, f'{path} cannot be loaded; name a checkpoint of train.py by --out_dir or --checkpoint'):
        if not is_pretrained:
            saved = torch.load(path, map_location='cpu', weights_only=True)
            model = GPT(GPTConfig(**saved['model_args']), compute_dtype)
            model.load_state_dict(saved['model'])
            return model, Tokenizer(saved['tokenizer']), saved['config']['dataset'], saved['iter_num']
        if probe:
            from transformers import AutoModelForCausalLM
            model = AutoModelForCausalLM.from_pretrained(checkpoint[3:], dtype=torch.float32).get_decoder()
        else:
            model = GPT.from_pretrained(checkpoint[3:], compute_dtype)
        return model, Tokenizer.load(checkpoint), '', None


def write(name, step, results):
    """Write results to a JSON file. An old file stays until the new one is whole."""
    text = json.dumps({'checkpoint': checkpoint or path.name, 'step': step, **results}, indent=1, default=float)
    with fail_on(OSError, f'{results_dir / name} cannot be written'):
        (results_dir / 'part').write_text(text, encoding='utf-8')
        os.replace(results_dir / 'part', results_dir / name)


def print_samples(model, tokenizer):
    prompt = start
    if start.startswith('FILE:'):
        with fail_on((OSError, UnicodeDecodeError), f'--start={start}'):
            prompt = Path(start[5:]).read_text(encoding='utf-8-sig')
    tokens = tokenizer.encode(prompt, bos=True)
    for _ in range(num_samples):
        show(prompt, end='')
        for text in generate(model, tokenizer, tokens, max_new_tokens, temperature, top_k, top_p):
            show(text, end='')
        show('\n---------------')


def generate(model, tokenizer, tokens, *how):
    """Yield the text that follows tokens, a list of int, as the model generates it. how: as of GPT.generate_tokens."""
    utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may be more than one token
    for token in model.generate_tokens(torch.tensor([tokens], device=device), *how, stop_token=tokenizer.eot):
        yield utf8.decode(tokenizer.decode([token.item()]))


# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks

def language_model(model, tokenizer):
    """A GPT behind the interface of lm-evaluation-harness. Every text begins as documents do in training, with bos."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    block_size = model.config.block_size

    class LanguageModel(TemplateLM):  # its loglikelihood calls tok_encode and _loglikelihood_tokens
        eot_token_id, prefix_token_id = tokenizer.eot, tokenizer.bos

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, bos=add_special_tokens is not False)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests, **_):
            """For each (_, context, continuation), lists of int: the log-likelihood of the continuation, in nats, and
            whether it is greedy. Contexts lose their beginning to fit in. Raises ValueError if no context would fit."""
            collator, answers = Collator(requests, sort_fn=lambda request: -len(request[1] + request[2])), []
            for batch in tqdm(list(collator.get_batched(n=eval_batch)), 'scoring', unit='batch', disable=None):
                rows = [(context + continuation)[-block_size - 1:-1] for _, context, continuation in batch]
                # Padding comes after the tokens of a row, and no token attends to what comes after it.
                idx = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # (B, T)
                for row, (_, _, continuation), x in zip(rows, batch, model.hidden(idx.to(device))):
                    n = len(continuation)
                    if n > block_size:
                        raise ValueError(f'a continuation of {n} tokens is longer than block_size={block_size}')
                    log_p = model.logits(x[len(row) - n:len(row)]).log_softmax(-1)  # (n, vocab_size)
                    targets = torch.tensor(continuation, device=device)
                    total = log_p.gather(1, targets[:, None]).sum().item()
                    answers.append((total, torch.equal(log_p.argmax(-1), targets)))
            return collator.get_original(answers)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            """The log-likelihood of each whole text, in windows of block_size: each token is predicted once."""
            windows = [(i, *make_disjoint_window(window)) for i, request in enumerate(requests)
                       for window in get_rolling_token_windows(tokenizer.encode(request.args[0]), tokenizer.bos,
                                                               max_seq_len=block_size, context_len=1)]
            totals = [0.0] * len(requests)
            for (i, *_), (log_p, _) in zip(windows, self._loglikelihood_tokens(windows)):
                totals[i] += log_p
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            """What the model generates after each context, up to end-of-text or the first of the stop strings. A long
            context loses its beginning, to make room for what is generated, but keeps at least half of block_size."""
            texts = []
            for context, kwargs in tqdm([request.args for request in requests], 'generating', disable=None):
                how, text = {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, **normalize_gen_kwargs(kwargs)}, ''
                n = how['max_gen_toks']
                tokens = self.tok_encode(context)[-max(block_size - n, block_size // 2):]
                for new in generate(model, tokenizer, tokens, n, how['temperature'], how['top_k'], how['top_p']):
                    text += new
                    if any(stop and stop in text for stop in how['until']):
                        break
                texts.append(postprocess_generated_text(text, how['until'], None))  # without the stop string
            return texts

    return LanguageModel()


def run_tasks(model, tokenizer, step):
    """Write the harness's numbers to tasks.json, or with a limit to tasks-limit-N.json, and print its table."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # the harness's processes, for standard errors, could run this script again
    with fail_on(Exception, f'--tasks={tasks} --tasks_dir={tasks_dir} (which needs pip install -U lm-eval)'):
        import lm_eval.tasks
        manager = lm_eval.tasks.TaskManager(include_path=tasks_dir or None)
        results = lm_eval.simple_evaluate(
            language_model(model, tokenizer), tasks=tasks.split(','), task_manager=manager, limit=limit or None,
            log_samples=False, bootstrap_iters=1000, torch_random_seed=seed)
    kept = 'results', 'groups', 'versions', 'n-shot', 'n-samples', 'lm_eval_version'
    write(f'tasks-limit-{limit}.json' if limit else 'tasks.json', step, {name: results.get(name) for name in kept})
    for part in ('results', 'groups'):
        if part in results:
            show(lm_eval.utils.make_table(results, part))


# ----------------------------------------------------------------------------------------------------------------------
# The probe of Bayat et al.: is what the FFN adds to the stream more aligned with the stream in deeper layers?

MLPS = r'(.*\w\.\d+)\.(ffn\.mlps\.\d+|mlp|feed_forward|block_sparse_moe|fc2)'  # names: ours, and in transformers


@torch.no_grad()
def alignment(model, windows):
    """Per layer (rho, ratio), float64 (n_layer, 2), means over the tokens of windows, each (T,): with h the stream that
    enters layer l and F what its FFN adds, rho_l = cosine(F, h) (Bayat et al.), and the ratio is |F| / |h|. model: a
    GPT or a decoder of transformers. Ends the program if its MLPs are not found.

    Every window is read twice, as a batch of two rows. In the second row the MLPs return 0, so F is the difference
    between the rows after a layer. This is right for any norm or factor after the MLP, and for parallel attention."""
    def silence(mlp, inputs, output):
        if len(inputs) > 1:
            fail(f'{path}: {type(mlp).__name__} reads more than the stream, so the probe cannot tell what it adds')
        (output[0] if isinstance(output, tuple) else output).chunk(2)[1].zero_()

    def look(layer, inputs, output):
        output = output[0] if isinstance(output, tuple) else output
        h, added = inputs[0][0], output[0] - output[1]
        output[1] = output[0]  # the next layer reads two equal rows again
        rho, ratio = torch.cosine_similarity(added, h, dim=-1), added.norm(dim=-1) / h.norm(dim=-1)
        found[layer].append(torch.stack((rho, ratio), dim=1).cpu().double())

    found = {}  # by layer: (rho, ratio) of the tokens of each window
    for name, module in model.named_modules():
        if match := re.fullmatch(MLPS, name):
            module.register_forward_hook(silence)
            found[model.get_submodule(match[1])] = []
    if not found:
        fail(f'{path}: the probe finds no MLPs in the layers of {type(model).__name__}')
    for layer in found:
        layer.register_forward_hook(look)
    for window in windows:
        batch = torch.stack([window, window])
        model.hidden(batch) if isinstance(model, GPT) else model(batch, use_cache=False)
    return torch.stack([torch.cat(values).mean(0) for values in found.values()])


def run_probe(model, tokenizer, dataset, step):
    """Print the alignment of every layer and write it to probe.json."""
    data = Tokens(dataset, 'val')
    tokens = torch.from_numpy(data.window(0, min(len(data), probe_tokens)))
    if not tokenizer.same_tokens(read_tokenizer(dataset)):
        fail(f'{data.name} has other tokens than the model was trained on: prepare it with the tokenizer of the model')
    context = getattr(model.config, 'max_position_embeddings' if is_pretrained else 'block_size', 4096)
    found = alignment(model, tokens.to(device).split(min(context, 4096))).tolist()
    write('probe.json', step, {'data': data.name, 'tokens': len(tokens),
                               'layers': [{'rho': rho, 'ratio': ratio} for rho, ratio in found]})
    show(f'FFNs add F to the stream h; means over {len(tokens):,} tokens of {data.name}\n\nlayer  cos(F, h)  |F| / |h|')
    for layer, (rho, ratio) in enumerate(found):
        show(f'{layer:5d}  {rho:+9.4f}  {ratio:9.4f}')


with fail_on(ValueError):
    device, compute_dtype = resolve_device(device, 'float32' if probe else dtype)
    torch.manual_seed(seed)
    model, tokenizer, trained_on, step = load()
    if not all(weight.isfinite().all() for weight in model.parameters()):
        fail(f'{path}: some weights are not finite: the training went wrong, take an earlier checkpoint')
    model.to(device, compute_dtype).eval()  # nothing is trained here, so weights are cast once and for all
    if tasks:
        run_tasks(model, tokenizer, step)
    elif probe:
        run_probe(model, tokenizer, dataset or trained_on, step)
    else:
        print_samples(model, tokenizer)
