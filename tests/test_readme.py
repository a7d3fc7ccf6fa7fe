import re

import pytest
import torch

import model as model_file
from conftest import ROOT, script
from model import FFN, GPT, GPTConfig, budget

README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_ffn_of_your_own_works_as_the_readme_says(monkeypatch):
    source = re.search(r'```python\n(.*?)```', README, re.S).group(1)
    assert source.count('\n') < 15
    scope = dict(vars(model_file))
    exec(source, scope)
    monkeypatch.setattr(model_file, 'MLP', scope['SquaredReLU'])  # as if FFN named it
    for ffn in ('standard', 'hourglass', 'tapered', 'tapered_hourglass'):
        config = GPTConfig(vocab_size=64, n_layer=3, n_head=2, n_embd=32, ffn=ffn, ffn_width=128)
        model = GPT(config)
        assert sum(p.numel() for p in model.parameters()) == budget(config)['total']
        model(*torch.zeros(2, 1, 8, dtype=torch.long))[1].backward()
    assert isinstance(model.blocks[0].ffn, FFN) and isinstance(model.blocks[0].ffn.mlps[0], scope['SquaredReLU'])


def test_files_and_settings_that_the_readme_names_exist(capsys):
    for path in re.findall(r'config/\w+\.py', README):
        assert (ROOT / path).exists(), path
    scripts = 'train.py', 'sample.py', 'prepare.py', 'model.py', 'config/study/run.py', 'tests/bench.py'
    for name in scripts:
        with pytest.raises(SystemExit):
            script(name, '--help')
    settings = capsys.readouterr().out
    commands = [line for line in README.splitlines() if 'python' in line or 'torchrun' in line]
    of_torchrun = 'nproc_per_node', 'nnodes', 'rdzv_backend', 'rdzv_endpoint', 'rdzv_id'
    for flag in re.findall(r'--(\w+)=', ' '.join(commands)):
        assert f'--{flag}=' in settings or flag in of_torchrun, flag
