import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prepare

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)  # which is faster for what is as small as here, also in the processes that tests start
os.environ['OMP_NUM_THREADS'] = '1'


def script(name, *args):
    """Run a script of the repository in this process; returns its variables."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [name, *map(str, args)])
        try:
            return runpy.run_path(str(ROOT / name), run_name='__main__')
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run_and_print_to(path, environment, name, args):
    os.environ.update(environment)
    with open(path, 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    script(name, *args)


def start_script(name, *args, printed='printed', **environment):
    """Start a script in a process that prints into a file, forked off one that has imported what takes seconds."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['pytest', 'tiktoken', 'torch._dynamo'])
    process = context.Process(target=run_and_print_to, args=(printed, environment, name, args), daemon=True)
    process.start()
    return process


def start_ranks(n, name, *args):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        shared = dict(WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free.getsockname()[1]))
    return [start_script(name, *args, printed=f'printed{rank}', RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank in range(n)]


def torchrun(n):
    return [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}']


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in a folder of its own and look at what it leaves and prints: run('train.py', '--max_iters=3').
    With processes=2 in two; with alone=True as a command of its own, by torchrun for processes; else in this one."""
    def run(name, *args, processes=0, status=0, alone=False, env={}, timeout=300):
        monkeypatch.chdir(tmp_path)
        if alone:
            command = [*(torchrun(processes) if processes else [sys.executable]), str(ROOT / name), *args]
            done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout)
        elif processes:
            ranks = start_ranks(processes, name, *args)
            multiprocessing.connection.wait([process.sentinel for process in ranks], timeout)
            failed = any(process.exitcode for process in ranks)
            for process in ranks:
                if failed:
                    process.terminate()  # as torchrun does as soon as one has failed
                process.join(timeout)
            code = int(any(process.exitcode != 0 for process in ranks))
            printed = ''.join(Path(f'printed{rank}').read_text() for rank in range(processes))
            done = subprocess.CompletedProcess(args, code, printed, printed)  # both in one
        else:
            out, err, code = io.StringIO(), io.StringIO(), 0
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    script(name, *args)
                except SystemExit as left:  # a text goes to stderr, and is status 1
                    code = 1 if isinstance(left.code, str) else left.code or 0
                    print(left.code if code else '', end='\n' if code else '', file=err)
            done = subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
        assert done.returncode == status, f'{name} {args} left with {done.returncode}:\n{done.stdout}\n{done.stderr}'
        return done
    return run


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run train.py in this process, in a folder with a small data set; returns its variables."""
    make_data(tmp_path, monkeypatch)
    return lambda *args: script('train.py', *TINY_RUN, *args)


TINY_RUN = ['--dataset=tiny', '--n_layer=2', '--n_embd=32', '--n_head=2', '--ffn_width=64', '--block_size=16',
            '--batch_size=4', '--gradient_accumulation_steps=2', '--max_iters=12', '--lr_decay_iters=12',
            '--warmup_iters=2', '--eval_interval=4', '--eval_tokens=200', '--log_interval=1', '--sample_tokens=0',
            '--dtype=float32', '--device=cpu', '--compile=false']


def make_data(folder, monkeypatch):
    """data/tiny: 40 documents of words, by bytes."""
    draw = random.Random(0)
    (folder / 'texts').mkdir()
    for i in range(40):
        words = draw.choices(['tree', 'stone', 'river', 'é', 'night', '\n'], k=60)
        (folder / 'texts' / f'{i}.txt').write_text(' '.join(words), encoding='utf-8')
    monkeypatch.chdir(folder)
    prepare.prepare('tiny', input='texts', tokenizer='bytes', val_fraction=0.1)


def pretrained(folder, kind='Llama', dtype='float32', **settings):
    """A random Llama or Olmo2 of transformers, tiny, with gains, and saved in the folder in that dtype."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    there = getattr(transformers, f'{kind}ForCausalLM')(getattr(transformers, f'{kind}Config')(**{
        **dict(vocab_size=131, hidden_size=32, intermediate_size=100, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=64, dtype=dtype), **settings}))
    for weight in there.parameters():  # so large that attention is far from uniform
        larger = 1 + torch.randn_like(weight) / 3 if weight.dim() == 1 else 5 * weight
        weight.data = larger.to(getattr(torch, dtype))
    there.save_pretrained(folder)
    return there.eval()


def pretrained_with_data(kind='Llama'):
    """Such a model in the shape of TINY_RUN, in the folder hf, with a BPE, with which data/hf is prepared."""
    tokenizers = pytest.importorskip('tokenizers')
    there = pretrained('hf', kind, vocab_size=300, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                       eos_token_id=0)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train([str(path) for path in sorted(Path('texts').iterdir())], tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=['<|endoftext|>'], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    bpe.save('hf/tokenizer.json')
    prepare.prepare('hf', input='texts', tokenizer='hf:hf', val_fraction=0.1)
    return there, bpe
