from pathlib import Path

import pytest
import torch

from conftest import ROOT
from model import GPT, GPTConfig
from prepare import Tokenizer


@pytest.fixture
def sample(train, run):
    """sample.py beside the checkpoint of a short run."""
    train()
    return lambda *args, **how: run('sample.py', '--dtype=float32', *args, **how)


def test_samples_are_the_models_own(sample):
    out = sample('--start=the é', '--temperature=0', '--max_new_tokens=12', '--num_samples=2').stdout
    saved = torch.load('out/ckpt.pt', weights_only=True)
    model, tokenizer = GPT(GPTConfig(**saved['model_args'])), Tokenizer(saved['tokenizer'])
    model.load_state_dict(saved['model'])
    idx = torch.tensor([[256, *'the é'.encode()]])
    expected = tokenizer.decode(model.generate(idx, 12, temperature=0.0, stop_token=256)[0].tolist())
    samples = out.split('\n---------------\n')
    assert samples == [expected.decode('utf-8', 'replace')] * 2 + ['']


def test_seed_file_and_best_checkpoint(sample):
    Path('prompt.txt').write_text('two\nlines', encoding='utf-8')
    args = ['--start=FILE:prompt.txt', '--max_new_tokens=30', '--checkpoint=out/ckpt_best.pt']
    first = sample(*args).stdout
    assert first.startswith('two\nlines') and first == sample(*args).stdout != sample(*args, '--seed=2').stdout
    # a config file of train.py may stand beside the flags
    assert sample(str(ROOT / 'config/standard_113m.py'), '--out_dir=out', *args).stdout == first


def test_errors_are_one_line(sample):
    Path('not.pt').write_text('nonsense')
    Path('latin.txt').write_bytes(b'\xff')
    for args, message in ((['--out_dir=none'], 'none/ckpt.pt: no such checkpoint'),
                          (['--checkpoint=not.pt'], 'not.pt is no checkpoint of train.py'),
                          (['--start=FILE:none.txt'], 'none.txt'), (['--start=FILE:latin.txt'], 'latin.txt'),
                          (['--temperature=-1'], 'temperature=-1'), (['--top_p=0'], 'top_p=0'),
                          (['--top_q=0'], "did you mean 'top_p'")):
        done = sample(*args, status=1)
        assert message in done.stderr and done.stderr.count('\n') == 1 and done.stdout in ('', '\n'), done.stderr
