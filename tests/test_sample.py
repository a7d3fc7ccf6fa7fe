import base64
import contextlib
import functools
import io
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT, pretrained_with_data, script
from model import GPT, GPTConfig, ffn_widths
from prepare import Tokenizer, Tokens, prepare


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


@pytest.mark.parametrize('shape', [[], ['--ffn=hourglass', '--n_mlp=2', '--norm=olmo2'], ['--mixer=titans']])
def test_probe_is_the_cosine_of_what_the_ffn_adds_and_the_stream(train, run, shape):
    train('--max_iters=4', *shape)
    said = run('sample.py', '--probe', '--probe_tokens=40').stdout
    saved = torch.load('out/ckpt.pt', weights_only=True)
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    tokens, cosines, ratios = Tokens('tiny', 'val').window(0, 40), [[], []], [[], []]
    for window in torch.from_numpy(tokens).split(16):  # by hand: a layer after the other, a token after the other
        h = model.embedding(window[None])
        rotary = [table[:len(window)] for table in (model.cos, model.sin)]
        for layer, block in enumerate(model.blocks):
            mixed = block.mixer(block.norm(h) if model.config.norm == 'pre' else h, rotary)
            z = h + (mixed if model.config.norm == 'pre' else block.norm(mixed))
            out = block.ffn(z)
            for h_t, f_t in zip(h[0], (out - z)[0]):
                cosines[layer].append((h_t @ f_t / (h_t @ h_t).sqrt() / (f_t @ f_t).sqrt()).item())
                ratios[layer].append(((f_t @ f_t) / (h_t @ h_t)).sqrt().item())
            h = out
    result = json.loads(Path('out/probe.json').read_text())
    rho, ratio = [statistics.mean(c) for c in cosines], [statistics.mean(r) for r in ratios]
    assert [layer['rho'] for layer in result['layers']] == pytest.approx(rho, abs=1e-5)
    assert [layer['ratio'] for layer in result['layers']] == pytest.approx(ratio, rel=1e-4)
    assert [layer['widths'] for layer in result['layers']] == ffn_widths(model.config)
    assert result['correlation'] == pytest.approx(1 if rho[1] > rho[0] else -1)
    assert f'{result["layers"][1]["rho"]:+.4f}' in said and 'data/tiny val' in said


def test_probe_of_one_layer_has_no_correlation(train, run):
    train('--max_iters=1', '--n_layer=1')
    assert 'correlation' not in run('sample.py', '--probe').stdout
    result = json.loads(Path('out/probe.json').read_text())
    assert result['correlation'] is None and result['step'] == 1 and result['checkpoint'] == 'ckpt.pt'


def test_probe_of_another_data_set(train, run):
    train('--max_iters=1')
    prepare('other', input='texts', tokenizer='bytes', val_fraction=1.0)
    assert 'data/other val' in run('sample.py', '--probe', '--dataset=other').stdout


def test_probe_of_data_prepared_anew(train, run):
    train('--max_iters=1')
    shutil.rmtree('data/tiny')
    Path('other.bpe').write_text(''.join(f'{base64.b64encode(bytes([i])).decode()} {255 - i}\n' for i in range(256)))
    prepare('tiny', input='texts', tokenizer='other.bpe')
    done = run('sample.py', '--probe', status=1)
    assert 'data/tiny was prepared otherwise' in done.stderr and done.stderr.count('\n') == 1
    shutil.rmtree('data/tiny')
    assert 'python prepare.py --dataset=tiny' in run('sample.py', '--probe', status=1).stderr


def test_weights_that_are_no_numbers(sample):
    broken = torch.load('out/ckpt.pt', weights_only=True)
    broken['model']['blocks.0.ffn.mlps.0.up_proj.weight'][0, 0] = float('nan')
    torch.save(broken, 'broken.pt')
    for args in ([], ['--probe']):
        done = sample('--checkpoint=broken.pt', *args, status=1)
        assert 'broken.pt has weights that are infinite or no numbers' in done.stderr and done.stderr.count('\n') == 1


def test_any_temperature_or_top_p_above_0_is_one(sample):
    cold = sample('--temperature=0', '--max_new_tokens=12').stdout
    for flag in ('--temperature=1e-50', '--top_p=1e-300'):
        assert sample(flag, '--max_new_tokens=12').stdout == cold


def test_probe_of_what_overflows(sample):
    large = torch.load('out/ckpt.pt', weights_only=True)
    large['model']['blocks.0.ffn.mlps.0.down_proj.weight'] *= 1e37
    torch.save(large, 'large.pt')
    done = sample('--checkpoint=large.pt', '--probe', status=1)
    assert 'large.pt: what layer 1 adds or reads is too large to compare' in done.stderr and done.stdout == ''
    assert not Path('probe.json').exists()


def test_probe_of_layers_that_are_alike_has_no_correlation(sample):
    alike = torch.load('out/ckpt.pt', weights_only=True)
    for name, weight in alike['model'].items():
        if 'down_proj' in name:
            weight.zero_()
    torch.save(alike, 'alike.pt')
    assert 'correlation' not in sample('--checkpoint=alike.pt', '--probe').stdout
    assert json.loads(Path('probe.json').read_text())['correlation'] is None


@pytest.mark.parametrize('encoding', ['ascii', 'cp1252'])
def test_text_that_stdout_cannot_show_is_replaced(train, capsys, encoding):
    train()
    capsys.readouterr()
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding)) as out:
        script('sample.py', '--dtype=float32', '--start=\u2248 \u65e5', '--max_new_tokens=2')
    out.flush()
    assert out.buffer.getvalue().startswith(b'? ') and capsys.readouterr().err == ''


@pytest.mark.parametrize('kind', ['Llama', 'Olmo2'])
def test_pretrained_model(train, run, kind):
    there, bpe = pretrained_with_data(kind)
    run_hf = functools.partial(run, 'sample.py', '--checkpoint=hf:hf', '--dtype=float32')
    said = run_hf('--start=the tree', '--temperature=0', '--max_new_tokens=12').stdout
    idx = torch.tensor([[0, *bpe.encode('the tree').ids]])
    expected = there.generate(idx, max_new_tokens=12, do_sample=False)[0, 1:].tolist()
    assert said == bpe.decode(expected) + '\n---------------\n'

    entering, rho = [], []  # of transformers' own layers
    for layer in there.model.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: entering.append(inputs[0]))
        adds = layer.mlp if kind == 'Llama' else layer.post_feedforward_layernorm
        adds.register_forward_hook(lambda _, inputs, output: rho.append(
            F.cosine_similarity(output, entering.pop(), dim=-1).mean().item()))
    tokens = torch.from_numpy(Tokens('hf', 'val').window(0, 64))
    with torch.no_grad():
        there(tokens[None])
    said = run_hf('--probe', '--dataset=hf', '--probe_tokens=64').stdout
    result = json.loads(Path('probe.json').read_text())  # in the working directory
    assert [layer['rho'] for layer in result['layers']] == pytest.approx(rho, abs=1e-5)
    assert result['checkpoint'] == 'hf:hf' and result['step'] is None
    assert f'    1  {rho[0]:+9.4f}' in said and f'    2  {rho[1]:+9.4f}' in said and 'Bayat et al.' in said
    run_hf('--probe', '--dataset=hf', '--probe_tokens=64', '--out_dir=results/hf')
    assert json.loads(Path('results/hf/probe.json').read_text()) == result


def test_pretrained_models_that_do_not_fit(train, run):
    pretrained_with_data()
    for args, message in ((['--checkpoint=hf:no/such/folder'], 'hf:no/such/folder: no such folder, and of the hub: '),
                          (['--checkpoint=hf:hf', '--probe'], '--probe needs --dataset=NAME here'),
                          (['--checkpoint=hf:hf', '--probe', '--dataset=tiny'], 'data/tiny was prepared otherwise')):
        done = run('sample.py', *args, status=1)
        assert message in done.stderr and done.stderr.count('\n') == 1, done.stderr


def test_errors_are_one_line(sample):
    Path('not.pt').write_text('nonsense')
    Path('latin.txt').write_bytes(b'\xff')
    for args, message in ((['--out_dir=none'], 'none/ckpt.pt: no such checkpoint'),
                          (['--checkpoint=not.pt'], 'not.pt is no checkpoint of train.py'),
                          (['--start=FILE:none.txt'], 'none.txt'), (['--start=FILE:latin.txt'], 'latin.txt'),
                          (['--probe', '--probe_tokens=0'], 'probe_tokens=0'),
                          (['--probe', '--tasks=x'], 'one at a time'),
                          (['--temperature=-1'], 'temperature=-1'), (['--top_p=0'], 'top_p=0'),
                          (['--n_layer=8'], 'n_layer is a setting of train.py, which has no effect here'),
                          (['--seed=12345678901234567890123'], 'seed must be below 2**63'),
                          (['--max_new_tokens=-1'], 'max_new_tokens=-1: must be'),
                          (['--num_samples=-1'], 'num_samples=-1: must be'), (['--tasks=,'], 'tasks=,: names no task'),
                          (['--top_q=0'], "did you mean 'top_p'")):
        done = sample(*args, status=1)
        assert message in done.stderr and done.stderr.count('\n') == 1 and done.stdout in ('', '\n'), done
    done = sample('--top_q=0', status=1, alone=True)
    assert done.stderr.count('\n') == 1 and done.stdout == ''
