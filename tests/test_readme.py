import re

import pytest
import torch
import torch.nn as nn

import model as model_file
from conftest import ROOT, script
from model import FFN, GPT, GPTConfig, Linear, budget

README = (ROOT / 'README.md').read_text(encoding='utf-8')


def classes_of_the_readme():
    scope = dict(vars(model_file))
    for source in re.findall(r'```python\n(.*?)```', README, re.S):
        assert source.count('\n') <= 20
        exec(source, scope)
    return scope


class Average(nn.Module):
    """The mean of the values of all tokens so far."""

    reads_on = True  # past block_size, by its cache
    size = staticmethod(lambda config: (2 * config.n_embd**2, 0))  # parameters, and gains
    flops = staticmethod(lambda config: 6 * 2 * config.n_embd**2)

    def __init__(self, config):
        super().__init__()
        self.v_proj = Linear(config.n_embd, config.n_embd)
        self.o_proj = Linear(config.n_embd, config.n_embd, to_stream=True)

    def forward(self, x, rotary, cache=None):
        v = self.v_proj(x)
        if cache is not None:
            v = cache['v'] = torch.cat((cache.get('v', v[:, :0]), v), dim=1)
        mean = v.cumsum(1) / torch.arange(1, v.size(1) + 1, device=v.device)[:, None]
        return self.o_proj(mean[:, -x.size(1):].to(x.dtype))


def test_a_mixer_is_a_class_and_a_line_in_a_table(monkeypatch):
    monkeypatch.setitem(model_file.MIXERS, 'average', Average)  # the line in the table
    for ffn in ('standard', 'hourglass', 'tapered', 'tapered_hourglass'):
        config = GPTConfig(vocab_size=64, block_size=8, n_layer=3, n_head=2, n_embd=32, mixer='average', ffn=ffn,
                           param_budget=60_000)
        model, idx = GPT(config), torch.randint(64, (2, 12))
        assert sum(p.numel() for p in model.parameters()) == budget(config)['total']
        assert abs(budget(config)['non_embedding'] - 60_000) <= 3 * 32 * 16 / 2
        model(idx, idx)[1].backward()
        x = torch.randn(2, 12, 32)
        means = torch.stack([model.blocks[0].mixer.v_proj(x)[:, :t + 1].mean(1) for t in range(12)], dim=1)
        torch.testing.assert_close(model.blocks[0].mixer(x, None), model.blocks[0].mixer.o_proj(means))
        assert isinstance(model.blocks[2].mixer, Average)
        for weight in model.parameters():
            weight.data *= 5
        expected = idx
        for _ in range(9):  # past block_size, without a cache
            expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(idx, 9, temperature=0.0), expected)


def test_ffn_of_your_own_works_as_the_readme_says(monkeypatch):
    scope = classes_of_the_readme()
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
    scripts = ('train.py', 'sample.py', 'prepare.py', 'model.py', 'config/study/run.py', 'config/study/report.py',
               'tests/bench.py')
    for name in scripts:
        with pytest.raises(SystemExit):
            script(name, '--help')
    settings = capsys.readouterr().out
    commands = [line for line in README.splitlines() if 'python' in line or 'torchrun' in line]
    of_torchrun = 'nproc_per_node', 'nnodes', 'rdzv_backend', 'rdzv_endpoint', 'rdzv_id'
    for flag in re.findall(r'--(\w+)=', ' '.join(commands)):
        assert f'--{flag}=' in settings or flag in of_torchrun, flag
