import contextlib
import io
import os
import random
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import prepare

ROOT = Path(__file__).parent.parent


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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in a folder of its own and look at what it leaves and prints: run('train.py', '--max_iters=3').
    With processes=2 under torchrun; else, unless alone=True, in this process, which has imported torch already."""
    def run(name, *args, processes=0, status=0, alone=False, env=None, timeout=120):
        if processes or alone:
            torchrun = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
            command = [sys.executable, *(torchrun if processes else []), str(ROOT / name), *args]
            done = subprocess.run(command, cwd=tmp_path, env={**os.environ, 'OMP_NUM_THREADS': '1', **(env or {})},
                                  capture_output=True, text=True, timeout=timeout)
        else:
            out, err, code = io.StringIO(), io.StringIO(), 0
            monkeypatch.chdir(tmp_path)
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


TINY_RUN = ['--dataset=tiny', '--n_layer=2', '--n_embd=32', '--n_head=2', '--ffn_width=64',
            '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2', '--max_iters=12',
            '--lr_decay_iters=12', '--warmup_iters=2', '--eval_interval=4', '--eval_tokens=200', '--log_interval=1',
            '--sample_tokens=0', '--dtype=float32', '--device=cpu']


def make_data(folder, monkeypatch):
    """data/tiny: 40 documents of words, by bytes."""
    draw = random.Random(0)
    (folder / 'texts').mkdir()
    for i in range(40):
        words = draw.choices(['tree', 'stone', 'river', 'é', 'night', '\n'], k=60)
        (folder / 'texts' / f'{i}.txt').write_text(' '.join(words), encoding='utf-8')
    monkeypatch.chdir(folder)
    prepare.prepare('tiny', input='texts', tokenizer='bytes', val_fraction=0.1)


def as_llama(model):
    """transformers' Llama with the weights of a model whose FFNs are standard."""
    transformers = pytest.importorskip('transformers')
    c = model.config
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.ffn_width, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, rms_norm_eps=1e-6,
        rope_theta=c.rope_theta, rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta},
        max_position_embeddings=c.block_size, tie_word_embeddings=c.tie_embeddings))
    names = {'embedding': 'model.embed_tokens', 'head': 'lm_head', 'blocks': 'model.layers', 'mixer': 'self_attn',
             'ffn.mlps.0': 'mlp'}
    state = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = weight[:c.vocab_size] if name.startswith(('model.embed', 'lm_head')) else weight  # unpadded
    missing = llama.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and all('norm' in name for name in missing.missing_keys)
    return llama
