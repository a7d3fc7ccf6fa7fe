import functools
import json
import shutil
from pathlib import Path

import pytest
import torch

from conftest import ROOT, TINY_RUN, make_data, pretrained_with_data, script
from model import GPT, GPTConfig
from prepare import Tokenizer, Tokens, prepare


@pytest.fixture(scope='module')
def trained(tmp_path_factory):  # a folder with the data and checkpoints of a short run, and some bad files
    folder = tmp_path_factory.mktemp('trained')
    with pytest.MonkeyPatch.context() as patch:
        make_data(folder, patch)
        script('train.py', *TINY_RUN)
        prepare('other', input='texts', tokenizer='bpe:270')
        _, saved = read_checkpoint('out/ckpt.pt')
        saved['model']['blocks.0.ffn.mlps.0.up_proj.weight'][0, 0] = float('nan')
        torch.save(saved, 'not_finite.pt')
        Path('damaged.pt').write_bytes(Path('out/ckpt.pt').read_bytes()[:-100])  # nor is it UTF-8
    return folder


@pytest.fixture
def sample(trained, tmp_path, monkeypatch, run):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return functools.partial(run, 'sample.py', '--dtype=float32')


def read_checkpoint(path):
    saved = torch.load(path, weights_only=True)
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    return model, saved


def test_samples_are_the_models_own_up_to_end_of_text(sample):
    model, saved = read_checkpoint('out/ckpt.pt')
    tokens = model.generate(torch.tensor([[256, *'the é'.encode()]]), 12, temperature=0.0)[0, 7:].tolist()
    args = '--start=the é', '--max_new_tokens=12', '--num_samples=2'
    for flag in ('--temperature=0', '--temperature=1e-50', '--top_p=1e-300'):
        assert sample(*args, flag).stdout == 2 * f'the é{bytes(tokens).decode("utf-8", "replace")}\n---------------\n'
    saved['tokenizer'].update(bos=256, eot=tokens[3])  # a tokenizer with a begin-of-text besides
    torch.save(saved, 'out/ckpt.pt')
    shown = bytes(tokens[:tokens.index(tokens[3]) + 1]).decode('utf-8', 'replace')
    assert sample(*args, '--temperature=0').stdout == 2 * f'the é{shown}\n---------------\n'


def test_prompt_file_seed_config_file_and_other_checkpoint(sample):
    Path('prompt.txt').write_text('two\nlines', encoding='utf-8-sig')  # with a byte order mark
    args = ['--start=FILE:prompt.txt', '--max_new_tokens=30', '--checkpoint=out/ckpt_best.pt']
    first = sample(*args).stdout
    assert first.startswith('two\nlines') and first == sample(*args).stdout != sample(*args, '--seed=2').stdout
    assert sample(str(ROOT / 'config/standard_113m.py'), *args).stdout == first  # what train.py reads is accepted


def check_probe(path, said, streams):
    """Compare what the probe prints and writes with streams: per layer the h before it and the F that its FFN adds."""
    for i, (layer, (h, added)) in enumerate(zip(json.loads(Path(path).read_text())['layers'], streams, strict=True)):
        rho, ratio = (h * added).sum(-1) / h.norm(dim=-1) / added.norm(dim=-1), added.norm(dim=-1) / h.norm(dim=-1)
        assert layer == pytest.approx({'rho': rho.mean().item(), 'ratio': ratio.mean().item()}, abs=1e-4, rel=1e-4)
        assert f'{i:5d}  {layer["rho"]:+9.4f}  {layer["ratio"]:9.4f}' in said


@pytest.mark.parametrize('shape', [[], ['--ffn=hourglass', '--n_mlp=2'], ['--mixer=titans']])
def test_probe_of_a_checkpoint(train, run, shape):
    train('--max_iters=4', *shape)
    said = run('sample.py', '--probe', '--probe_tokens=16').stdout
    (model, _), streams = read_checkpoint('out/ckpt.pt'), []
    h = model.embedding(torch.from_numpy(Tokens('tiny', 'val').window(0, 16))[None])
    for block in model.blocks:
        z = h + block.mixer(block.norm(h), (model.cos, model.sin))
        streams.append((h, block.ffn(z) - z))
        h = block.ffn(z)
    check_probe('out/probe.json', said, streams)


def pretrained(kind):
    """A small random model of transformers, which is in the folder hf, its tokenizer, and tokens (2, 32) of data/hf."""
    transformers = pytest.importorskip('transformers')
    _, bpe = pretrained_with_data()
    config = getattr(transformers, f'{kind}Config')(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None, bos_token_id=0, eos_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) / 4
    model.save_pretrained('hf')
    return model, bpe, torch.from_numpy(Tokens('hf', 'val').window(0, 64)).view(2, 32)


@pytest.mark.parametrize('kind, norms', [  # before and after attention, before and after the MLP
    ('GPT2', 'ln_1 - ln_2 -'),
    *((kind, 'input_layernorm - post_attention_layernorm -') for kind in ('Llama', 'Qwen3', 'Mistral')),
    ('Gemma2', 'input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm'),
    ('Olmo2', '- post_attention_layernorm - post_feedforward_layernorm')])
def test_pretrained_models(train, run, kind, norms):
    model, bpe, idx = pretrained(kind)
    said = run('sample.py', '--checkpoint=hf:hf', '--probe', '--dataset=hf', '--probe_tokens=64').stdout
    decoder, mask, streams = model.base_model, torch.full((1, 1, 32, 32), -torch.inf).triu(1), []
    hidden = model(idx, output_hidden_states=True).hidden_states
    rotary = getattr(decoder, 'rotary_emb', lambda *_: None)(hidden[0], torch.arange(32)[None])
    for layer, h in zip(decoder.h if kind == 'GPT2' else decoder.layers, hidden):
        before, after, before_mlp, after_mlp = (getattr(layer, name, torch.nn.Identity()) for name in norms.split())
        mix = layer.attn if kind == 'GPT2' else layer.self_attn
        z = h + after(mix(before(h), position_embeddings=rotary, attention_mask=mask)[0])
        streams.append((h, after_mlp(layer.mlp(before_mlp(z)))))
    check_probe('probe.json', said, streams)
    if kind in ('Llama', 'Olmo2'):  # of which GPT makes the same model
        ours = GPT.from_pretrained('hf')
        torch.save({'model_args': vars(ours.config), 'model': ours.state_dict(), 'config': {'dataset': 'hf'},
                    'iter_num': 0, 'tokenizer': Tokenizer.load('hf:hf').state()}, 'ours.pt')
        ours = run('sample.py', '--checkpoint=ours.pt', '--probe', '--probe_tokens=64')
        check_probe('probe.json', ours.stdout, streams)
        generated = model.generate(torch.tensor([[0, *bpe.encode('the').ids]]), max_new_tokens=12, do_sample=False)
        args = '--checkpoint=hf:hf --dtype=float32 --start=the --temperature=0 --max_new_tokens=12'.split()
        assert run('sample.py', *args).stdout == bpe.decode(generated[0].tolist()) + '\n---------------\n'


@pytest.mark.parametrize('kind', ['Mamba', 'Bloom'])  # one has no MLPs, the other's MLP returns the stream
def test_models_that_the_probe_cannot_read(train, run, kind):
    pretrained(kind)
    said = run('sample.py', '--checkpoint=hf:hf', '--probe', '--dataset=hf', status=1).stderr
    assert 'hf:hf' in said.splitlines()[-1] and 'Traceback' not in said and not Path('probe.json').exists()


@pytest.mark.parametrize('args, named', [
    ('--out_dir=none', 'none/ckpt.pt'), ('--checkpoint=damaged.pt', 'damaged.pt'), ('--start=FILE:none', 'none'),
    ('--checkpoint=not_finite.pt', 'not_finite.pt'), ('--checkpoint=hf:no/such/folder', 'hf:no/such/folder'),
    ('--checkpoint=hf:a/b/c --probe --dataset=tiny', 'hf:a/b/c'), ('--probe --dataset=none', 'data/none'),
    ('--checkpoint=hf:hf --probe', '--dataset'), ('--probe --dataset=other', 'data/other'), ('--top_p=0', 'top_p'),
    ('--probe --probe_tokens=0', 'probe_tokens'), ('--probe --tasks=x', '--tasks'), ('--seed=' + 20 * '9', 'seed'),
    ('--start=FILE:damaged.pt', 'damaged.pt'), ('--temperature=-1', 'temperature'), ('--n_layer=8', 'n_layer'),
    ('--max_new_tokens=-1', 'max_new_tokens'), ('--limit=-1', 'limit'), ('--top_q=0', 'top_q')])
def test_bad_input_is_one_line(sample, args, named):
    before = {path: path.read_bytes() for path in Path().rglob('*') if path.is_file()}
    done = sample(*args.split(), status=1)
    assert named in done.stderr and done.stderr.count('\n') == 1 and done.stdout in ('', '\n'), done
    assert before == {path: path.read_bytes() for path in Path().rglob('*') if path.is_file()}
