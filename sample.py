"""
Sample text from a checkpoint of train.py, as it is generated, or run benchmarks of it:

    python sample.py --out_dir=out --start='def main(' --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=out --tasks=lambada_openai,piqa
"""

import codecs
import signal
import sys
from pathlib import Path

import torch

from configurator import configure, fail
from model import GPT, GPTConfig, resolve_device
from prepare import Tokenizer

out_dir = 'out'  # the folder of the run
checkpoint = ''  # a checkpoint file; empty: out_dir's latest, ckpt.pt
start = ''  # the prompt, or FILE: and the path of a file that has it
num_samples = 1  # samples, one after the other
max_new_tokens = 500  # of each; less where it comes to the end of the text
temperature = 0.8  # 0: always the likeliest token
top_k = 200  # only the k likeliest tokens; 0: all
top_p = 1.0  # only the likeliest tokens that have this much of the probability
tasks = ''  # benchmarks of lm-evaluation-harness to run instead of sampling, separated by commas
tasks_dir = ''  # a folder with task files of your own
limit = 0  # examples of each task, the first ones; 0: all
eval_batch = 16  # sequences of a task that are scored at once
seed = 1337  # of the draws
device = 'auto'  # cuda where there is a GPU, else cpu; or mps
dtype = 'auto'  # bfloat16 where the device is fast in it, else float32

configure(globals(), also='train.py')
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback


def load(path):
    """The model of a checkpoint, ready to run, and its tokenizer."""
    if not path.is_file():
        fail(f'{path}: no such checkpoint; train one with train.py, or say --out_dir or --checkpoint')
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True)
        model = GPT(GPTConfig(**saved['model_args']), compute_dtype)
        model.load_state_dict(saved['model'])
        # Nothing is trained here, so the weights are cast once and for all.
        return model.to(device, compute_dtype).eval(), Tokenizer(saved['tokenizer'])
    except Exception as error:
        fail(f'{path} is no checkpoint of train.py, or of another model.py than this: {error}')


def prompt():
    if not start.startswith('FILE:'):
        return start
    try:
        return Path(start[5:]).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        fail(f'--start={start}: {error}')


def print_samples():
    text = prompt()
    idx = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=device)  # as every document begins
    for _ in range(num_samples):
        print(text, end='')
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may be more than one token
        for token in model.generate_tokens(idx, max_new_tokens, temperature, top_k, top_p, stop_token=tokenizer.eot):
            print(utf8.decode(tokenizer.decode([token.item()])), end='', flush=True)
        print('\n---------------')


def run_tasks():
    if limit < 0 or eval_batch < 1:
        fail(f'limit={limit}, eval_batch={eval_batch}: must be at least 0 and at least 1')
    try:
        from harness import benchmark
    except ImportError as error:
        fail(f'--tasks needs a recent lm-evaluation-harness: pip install -U lm-eval ({error})')
    benchmark(model, tokenizer, tasks, tasks_dir, limit, eval_batch, seed, path.with_name('tasks.json'))


try:
    device, compute_dtype = resolve_device(device, dtype)
except ValueError as error:
    fail(str(error))
torch.manual_seed(seed)
path = Path(checkpoint or Path(out_dir, 'ckpt.pt'))
model, tokenizer = load(path)

try:
    if tasks:
        run_tasks()
    else:
        print_samples()
except ValueError as error:
    fail(str(error))
except BrokenPipeError:
    sys.stderr.close()  # the reader has left: leave without a word
