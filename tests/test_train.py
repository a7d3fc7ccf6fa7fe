import base64
import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
from conftest import ROOT, TINY_RUN, make_data, pretrained_with_data, script, start_script, torchrun
from model import GPT, GPTConfig


def metrics(out_dir='out'):
    """The lines of metrics.jsonl without what depends on the machine."""
    lines = [json.loads(line) for line in Path(out_dir, 'metrics.jsonl').read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != 'tokens_per_second'} for line in lines]


def load(out_dir='out', name='ckpt.pt'):
    return torch.load(Path(out_dir, name), weights_only=True)


def files(folder, pattern='*'):
    return {path: path.read_bytes() for path in Path(folder).rglob(pattern) if path.is_file()}


def same_weights(a, b):
    return a['iter_num'] == b['iter_num'] and all(torch.equal(w, b['model'][name]) for name, w in a['model'].items())


# what a run leaves


def test_a_run_learns_and_leaves_checkpoints_and_metrics(train):
    train('--max_iters=40', '--eval_interval=20', '--log_interval=10', '--learning_rate=0.01')
    lines = metrics()
    assert [(line['step'], 'val_loss' in line) for line in lines] == [
        (0, True), (0, False), (10, False), (20, True), (20, False), (30, False), (40, True)]
    assert lines[-1]['val_loss'] < lines[0]['val_loss'] - 1
    assert set(lines[1]) == {'step', 'tokens', 'loss', 'lr', 'grad_norm'} and lines[2]['tokens'] == 11 * 2 * 4 * 16
    saved = load()
    assert saved['iter_num'] == 40 and saved['best_val_loss'] == min(line.get('val_loss', 9) for line in lines)
    assert sorted(path.name for path in Path('out').iterdir()) == ['ckpt.pt', 'ckpt_best.pt', 'metrics.jsonl']
    GPT(GPTConfig(**saved['model_args'])).load_state_dict(saved['model'])


def test_a_setting_has_one_value(train):
    run = train('--max_iters=1', '--lr_decay_iters=0', '--dtype=auto', '--device=auto')
    assert run['vocab_size'] == 257 and run['head_dim'] == 16 and run['lr_decay_iters'] == 1
    saved, shape = load(), vars(run['raw_model'].config)
    assert saved['config'] == {name: run[name] for name in saved['config']} and shape == saved['model_args']
    assert shape == {name: run[name] for name in shape}


@pytest.mark.parametrize('links', [True, False])
def test_best_checkpoint_is_that_of_the_lowest_validation_loss(train, monkeypatch, links):
    if not links:  # as some file systems
        monkeypatch.setattr(os, 'link', lambda a, b: os.stat('nothing'))
    train('--learning_rate=0.01', '--min_lr=1', '--lr_decay_iters=16', '--max_iters=16')
    scores = {line['step']: line['val_loss'] for line in metrics() if 'val_loss' in line}
    best = load(name='ckpt_best.pt')
    assert best['iter_num'] == min(scores, key=scores.get) < 16
    assert best['best_val_loss'] == load()['best_val_loss'] == min(scores.values())


def test_a_compiled_model_has_plain_names_and_meets_one_shape(train, monkeypatch):
    compile, shapes = torch.compile, set()

    def backend(graph, inputs):
        shapes.update(tuple(x.shape) for x in inputs if getattr(x, 'dtype', None) == torch.int64)
        return graph.forward

    monkeypatch.setattr(torch, 'compile', lambda model: compile(model, backend=backend))
    torch.compiler.reset()
    run = train('--compile=true', '--max_iters=2', '--out_dir=compiled')
    assert run['eval_tokens'] % (4 * 16) and shapes == {(4, 16)}  # the last batch of an evaluation is smaller
    train('--max_iters=2')
    assert set(load('compiled')['model']) == set(load()['model'])


def test_learning_rate_warms_up_and_follows_a_cosine(train):
    train('--learning_rate=0.01', '--min_lr=0.001', '--warmup_iters=4', '--lr_decay_iters=12', '--max_iters=14')
    lr = [line['lr'] for line in metrics() if 'lr' in line]
    assert lr[:4] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert lr[4:12] == pytest.approx([0.001 + 0.0045 * (1 + math.cos(math.pi * i / 8)) for i in range(8)])
    assert lr[12:] == pytest.approx([0.001, 0.001])


def test_a_step_is_adamw_on_the_mean_gradient(train):
    """The first step, against the same in plain torch."""
    run = train('--max_iters=1', '--learning_rate=0.01', '--grad_clip=0.5', '--weight_decay=0.3')
    torch.manual_seed(1337)
    model = GPT(run['raw_model'].config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / 3, betas=(0.9, 0.95), weight_decay=0.3)
    idx, targets = (torch.cat(part) for part in zip(*run['get_batches'](0)))
    loss = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    line = metrics()[1]
    assert line['loss'] == pytest.approx(loss.item(), rel=1e-5)
    assert line['grad_norm'] == pytest.approx(norm.item(), rel=1e-4)
    for name, weight in load()['model'].items():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=2e-5, rtol=1e-4)


# the data of a run


def test_every_window_is_seen_once_an_epoch_in_a_seeded_order(train):
    def batches(*args):
        run = train('--max_iters=0', *args)
        return [batch for step in range(2 * n // 8 + 1) for batch in run['get_batches'](step)]

    data = prepare.Tokens('tiny', 'train')
    n = (len(data) - 1) // 16
    stream = sorted(tuple(data.window(16 * i, 17).tolist()) for i in range(n))
    first = batches('--out_dir=first')
    seen = [(*a.tolist(), b[-1].item()) for idx, targets in first for a, b in zip(idx, targets)]
    assert all(torch.equal(idx[:, 1:], targets[:, :-1]) for idx, targets in first)
    assert sorted(seen[:n]) == sorted(seen[n:2 * n]) == stream and seen[:n] != seen[n:2 * n]
    other = batches('--out_dir=other', '--ffn=hourglass', '--n_mlp=2', '--n_layer=3')
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    assert not torch.equal(batches('--out_dir=seed', '--seed=1')[0][0], first[0][0])


def plain_scores(model, data, n):
    """Loss, perplexity and bits per byte of the first n targets, window by window."""
    windows = [torch.from_numpy(data.window(start, min(16, n - start) + 1)) for start in range(0, n, 16)]
    losses = torch.cat([F.cross_entropy(model(window[None, :-1])[0][0].double(), window[1:], reduction='none')
                        for window in windows])
    bits = losses / math.log(2) * (torch.cat([window[1:] for window in windows]) < 256)  # end-of-text has no bytes
    return losses.mean().item(), losses.mean().exp().item(), bits.sum().item() / bits.count_nonzero().item()


@pytest.mark.parametrize('eval_tokens', [0, 200])
def test_evaluation_is_an_exact_sum(train, eval_tokens):
    prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=1.0)
    run = train('--max_iters=0', f'--eval_tokens={eval_tokens}', '--eval_datasets=other')
    for data, end in ((prepare.Tokens('tiny', 'val'), ''), (prepare.Tokens('other', 'val'), '/other')):
        scores = plain_scores(run['raw_model'], data, eval_tokens or len(data) - 1)
        assert [metrics()[0][f'val_{key}{end}'] for key in ('loss', 'ppl', 'bpb')] == pytest.approx(scores, rel=1e-5)


def test_a_checkpoint_is_evaluated_by_any_number_of_processes(train, run):
    train('--max_iters=4', '--gradient_accumulation_steps=1')  # which two processes can evaluate but not go on with
    before = files('out')
    prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=1.0, seed=1)
    command = 'train.py', '--eval_only=true', '--eval_datasets=other', '--eval_tokens=200'
    scores = [run(*command, f'--init_from={init_from}', processes=processes).stdout.splitlines()[-2:]
              for init_from in ('resume', 'out/ckpt_best.pt') for processes in (0, 2)]
    tiny, other = ([line.split(': ')[1] for line in lines] for lines in zip(*scores))
    assert set(tiny) == {tiny[0]} and set(other) == {other[0]} and tiny[0] != other[0]
    assert f'val_loss {metrics()[-1]["val_loss"]:.4f}, val_ppl {metrics()[-1]["val_ppl"]:.4f}, ' in tiny[0]
    assert files('out') == before


def test_two_processes_equal_one(train, run):
    train('--out_dir=one')
    run('train.py', *TINY_RUN, '--out_dir=two', processes=2)
    for a, b in zip(metrics('one'), metrics('two'), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    for a, b in zip(load('one')['model'].values(), load('two')['model'].values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# stopped and resumed

LONG = ['--max_iters=200', '--lr_decay_iters=200', '--eval_interval=5', '--dropout=0.1', '--eval_tokens=64']


def wait_for_step(out_dir, step):
    path, deadline = Path(out_dir, 'metrics.jsonl'), time.time() + 300
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert time.time() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_a_resumed_run_equals_one_that_was_never_stopped(train, dtype):
    train('--out_dir=whole', '--dropout=0.1', f'--dtype={dtype}')
    train('--max_iters=6', '--dropout=0.1', f'--dtype={dtype}')
    with open('out/metrics.jsonl', 'ab') as file:
        file.write(b'{"step": 7, "loss": 1.0}\n{"step": 3, "lo')  # it was killed after step 6
    script('train.py', '--init_from=resume', '--max_iters=12', '--device=cpu')  # all else comes from the checkpoint
    assert same_weights(load(), load('whole')) and load()['scaler'] == load('whole')['scaler']
    assert metrics() == metrics('whole')


def test_stopped_by_signals_and_resumed(train):
    train(*LONG, '--out_dir=whole')
    run = start_script('train.py', *TINY_RUN, *LONG)
    wait_for_step('out', 20)
    run.terminate()
    run.join(300)
    assert run.exitcode == 0 and 20 < load()['iter_num'] < 200
    draw = random.Random()
    for _ in range(3):
        step = load()['iter_num'] + draw.randint(3, 12)
        run = start_script('train.py', *TINY_RUN, *LONG, '--init_from=resume')
        wait_for_step('out', step)
        time.sleep(draw.uniform(0, 0.03))
        run.kill()
        run.join(300)
        assert run.exitcode == -signal.SIGKILL
        load(), load(name='ckpt_best.pt')
    train(*LONG, '--init_from=auto')
    assert same_weights(load(), load('whole')) and load()['best_val_loss'] == load('whole')['best_val_loss']
    assert metrics() == metrics('whole')


def test_two_processes_stop_together_and_resume(train, run):
    job = subprocess.Popen([*torchrun(2), str(ROOT / 'train.py'), *TINY_RUN, *LONG], stdout=subprocess.DEVNULL)
    wait_for_step('out', 7)
    pids = subprocess.run(['pgrep', '-P', str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(pids[-1]), signal.SIGINT)  # one of the two
    assert job.wait(300) == 0
    stopped = load()['iter_num']
    assert 7 < stopped < 200
    run('train.py', *TINY_RUN, *LONG, f'--max_iters={stopped + 5}', '--init_from=resume', processes=2)
    assert [line['step'] for line in metrics() if 'loss' in line] == list(range(stopped + 5))


@pytest.mark.parametrize('name', ['train.py', 'model.py', 'prepare.py', 'sample.py'])
def test_interrupt_during_the_imports_is_quiet(run, tmp_path, name):
    for package in ('torch', 'numpy'):
        (tmp_path / f'{package}.py').write_text('import signal\nsignal.raise_signal(signal.SIGINT)\n')
    done = run(name, alone=True, env={'PYTHONPATH': str(tmp_path)}, status=-signal.SIGINT)  # 130 in a shell
    assert done.stdout == done.stderr == ''


def test_a_longer_run_keeps_its_schedule(train):
    train('--max_iters=6', '--lr_decay_iters=0', '--min_lr=0.0001')
    Path('out/metrics.jsonl').unlink()  # a checkpoint is enough
    train('--init_from=resume', '--lr_decay_iters=0', '--max_iters=8')
    assert [line['lr'] for line in metrics() if 'lr' in line] == [0.0001, 0.0001]


def test_a_new_run_starts_from_the_weights_of_a_checkpoint(train, monkeypatch):
    train('--ffn=hourglass', '--n_mlp=2')
    prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=0.5)
    before = Path('out/ckpt.pt').read_bytes()
    monkeypatch.setattr('conftest.TINY_RUN', ['--device=cpu', '--dtype=float32', '--sample_tokens=0'])
    new = '--init_from=out/ckpt.pt', '--learning_rate=0.001', '--eval_tokens=200'
    train(*new, '--out_dir=new', '--max_iters=5', '--dropout=0.1')
    scores = [line['val_loss'] for line in metrics('new') if 'val_loss' in line]
    saved = load('new')
    assert scores[0] == metrics()[-1]['val_loss'] > scores[1]
    assert saved['model_args'] == {**load()['model_args'], 'dropout': 0.1} and saved['config']['dataset'] == 'tiny'
    assert saved['iter_num'] == 5 and all(state['step'] == 5 for state in saved['optimizer']['state'].values())
    train(*new, '--out_dir=other', '--dataset=other', '--max_iters=1')
    assert load('other')['config']['dataset'] == 'other' and Path('out/ckpt.pt').read_bytes() == before


# every architecture


@pytest.mark.parametrize('norm', ['pre', 'olmo2'])
@pytest.mark.parametrize('ffn', ['standard', 'hourglass', 'tapered', 'tapered_hourglass'])
@pytest.mark.parametrize('mixer', ['attention', 'gated', 'titans'])
def test_every_mixer_ffn_and_norm_trains_resumes_and_generates(train, mixer, ffn, norm):
    shape = [f'--mixer={mixer}', f'--ffn={ffn}', f'--norm={norm}', '--memory_chunk=7', '--n_mlp=2', '--log_interval=9']
    train('--max_iters=2', '--eval_interval=9', '--out_dir=whole', '--eval_tokens=20', *shape)
    train('--max_iters=1', '--eval_interval=9', '--eval_tokens=20', *shape)
    train('--max_iters=2', '--init_from=resume')
    assert same_weights(load(), load('whole'))
    saved = load()
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    prompt = torch.tensor([[1, 2, 3]])
    expected = prompt
    for _ in range(10):
        expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(prompt, 10, temperature=0.0), expected)
    assert model.generate(prompt, 20).shape == (1, 23)  # past block_size


@pytest.mark.parametrize('kind', ['Llama', 'Olmo2'])
def test_pretrained_model_is_trained_on_and_resumed(train, kind):
    there, _ = pretrained_with_data(kind)
    start = '--init_from=hf:hf', '--dataset=hf', '--learning_rate=1e-3'
    train(*start, '--out_dir=whole', '--dropout=0.1')
    tokens = torch.from_numpy(prepare.Tokens('hf', 'val').window(0, 113)).view(1, -1)
    with torch.no_grad():
        logits = there(tokens[0, :-1].view(7, 16)).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).item()
    train(*start, '--out_dir=initial', '--max_iters=0', '--eval_tokens=112')
    assert metrics('initial')[0]['val_loss'] == pytest.approx(expected, abs=1e-4)
    assert metrics('whole')[-1]['val_loss'] < expected - 0.1
    train(*start, '--max_iters=5', '--dropout=0.1')
    train('--init_from=resume', '--dataset=hf')
    assert same_weights(load(), load('whole'))
    for flag, named in (('--n_layer=3', 'n_layer'), ('--block_size=65', 'block_size'), ('--dataset=tiny', 'data/tiny')):
        with pytest.raises(SystemExit, match=f'^[^\n]*{named}[^\n]*$'):
            train(*start, '--out_dir=x', flag)


# Hope: MLPs updated at several periods

HOPE = ['--ffn=tapered_hourglass', '--n_mlp=3', '--ffn_multiple=8', '--lr_decay_iters=12']
PERIODS = '--mlp_periods=1,4,3'


def test_slow_mlps_change_by_the_sum_of_the_updates_of_their_period(train):
    """Against an optimizer whose weights are copied into the model each so many steps."""
    run = train(*HOPE, PERIODS, '--max_iters=10', '--grad_clip=0.5', '--weight_decay=0.3')
    torch.manual_seed(1337)
    model, fast = GPT(run['raw_model'].config), GPT(run['raw_model'].config)
    fast.load_state_dict(model.state_dict())
    optimizer = fast.configure_optimizers(0.3, 0.0, (0.9, 0.95))
    for step in range(10):
        for batch in run['get_batches'](step):
            (model(*batch)[1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group['lr'] = run['learning_rate_at'](step)
        for weight, made in zip(model.parameters(), fast.parameters()):
            made.grad, weight.grad = weight.grad, None
        optimizer.step()
        for (name, weight), made in zip(model.named_parameters(), fast.parameters()):
            period = 4 if '.mlps.1.' in name else 3 if '.mlps.2.' in name else 1
            if step % period == period - 1:
                weight.data.copy_(made.data)
    saved, made = load(), dict(fast.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, saved['model'][name], atol=1e-6, rtol=1e-5)
        if '.mlps.1.' in name or '.mlps.2.' in name:
            torch.testing.assert_close(made[name], saved['ahead'][name], atol=1e-6, rtol=1e-5)


def test_slow_mlps_resume_between_updates_and_are_the_same_in_two_processes(train, run):
    train(*HOPE, PERIODS, '--out_dir=whole', '--max_iters=11')
    for steps in (5, 6, 11):
        train(*HOPE, PERIODS, f'--max_iters={steps}', '--init_from=auto')
    run('train.py', *TINY_RUN, *HOPE, PERIODS, '--max_iters=11', '--out_dir=two', processes=2)
    assert same_weights(load(), load('whole'))
    for kind in ('model', 'ahead'):
        for name, weight in load('whole')[kind].items():
            assert torch.equal(load()[kind][name], weight)
            torch.testing.assert_close(load('two')[kind][name], weight, atol=1e-5, rtol=1e-3)


# float16


def test_float16_learns_as_float32(train):
    train('--out_dir=float32', '--weight_decay=0.3', '--grad_clip=0.5')
    train('--dtype=float16', '--weight_decay=0.3', '--grad_clip=0.5')
    for exact, line in zip(metrics('float32'), metrics(), strict=True):
        assert line == pytest.approx(exact, rel=2e-3)
    assert load()['scaler']['scale'] == 2**16 and load()['model']['embedding.weight'].dtype == torch.float32


def test_a_step_that_overflows_float16_is_skipped(train, monkeypatch):
    monkeypatch.setattr(torch.amp, 'GradScaler', functools.partial(torch.amp.GradScaler, init_scale=2.0**26))
    train('--dtype=float16')
    lines, saved = [line for line in metrics() if 'loss' in line], load()
    skipped = [line['grad_norm'] for line in lines].count(None)
    assert 2 < skipped < 9 and saved['scaler']['scale'] == 2**(26 - skipped)
    assert all(state['step'] == 12 - skipped for state in saved['optimizer']['state'].values())


# what can go wrong


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with a run in out/ of 4 steps on data/tiny; data/other has the same tokens, data/ranks has others."""
    folder = tmp_path_factory.mktemp('trained')
    with pytest.MonkeyPatch.context() as patch:
        make_data(folder, patch)
        ranks = ''.join(f'{base64.b64encode(bytes([i])).decode()} {255 - i}\n' for i in range(256))
        Path('bytes.bpe').write_text(ranks)
        prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=0.5)
        prepare.prepare('ranks', input='texts', tokenizer='bytes.bpe', val_fraction=0.5)
        script('train.py', *TINY_RUN, '--max_iters=4')
    return folder


def change(**changes):
    torch.save({**load(), **changes}, 'out/ckpt.pt')


def break_data():
    """Write a token id past the vocabulary into the training data."""
    shard = np.fromfile('data/tiny/train_000000.bin', dtype=np.uint16)
    shard[612] = 60000
    shard.tofile('data/tiny/train_000000.bin')


NEW, RESUME, FINETUNE = '--out_dir=new', '--init_from=resume', '--init_from=out/ckpt.pt'
WRONG = [([NEW, f'--{flag}'], flag, None) for flag in (
    'batch_size=0', 'eval_tokens=-1', 'grad_clip=-1.0', 'beta1=1.0', 'seed=-1', f'seed={2**63}', 'n_head=5',
    'vocab_size=100', 'learning_rates=1', 'device=cpu:x', 'device=tpu', 'device=mps', 'dtype=float8', 'init_from=x.pt',
    'block_size=100000', 'init_from=best')]
CP_BEST = 'cp out/ckpt_best.pt out/ckpt.pt'  # what to type if ckpt.pt is damaged


@pytest.mark.parametrize('args, named, damage', WRONG + [
    ([NEW, '--dataset=nothing'], 'data/nothing', None),
    ([NEW, '--eval_datasets=ranks'], 'data/ranks', None),
    (['--out_dir=bytes.bpe'], 'bytes.bpe', None),
    ([], 'out', None),
    ([], 'out', lambda: os.remove('out/ckpt.pt')),
    (['--eval_only=true'], 'out', None),
    ([RESUME, NEW], 'new/ckpt.pt', None),
    ([RESUME, '--learning_rate=1e-4'], FINETUNE, None),
    ([RESUME, '--n_layer=3', '--seed=2'], 'n_layer was 2 and is 3, seed was 1337 and is 2', None),
    ([RESUME, '--dataset=other'], FINETUNE, None),
    ([RESUME], 'data/tiny', lambda: shutil.copy('data/other/meta.json', 'data/tiny/meta.json')),
    ([FINETUNE], 'out', None),
    ([FINETUNE, NEW, '--n_layer=3'], 'n_layer', None),
    ([FINETUNE, NEW, '--dataset=ranks'], 'data/ranks', None),
    ([RESUME], CP_BEST, lambda: os.truncate('out/ckpt.pt', 3000)),
    ([RESUME], CP_BEST, lambda: os.remove('out/ckpt.pt')),
    ([RESUME], 'out/ckpt.pt', lambda: change(model={})),
    ([RESUME], 'out/ckpt.pt', lambda: change(optimizer={})),
    ([RESUME], 'out/ckpt.pt', lambda: change(config='x')),
    ([RESUME], 'out/ckpt.pt', lambda: change(iter_num=None)),
    ([RESUME], 'beta1=2.0', lambda: change(config={**load()['config'], 'beta1': 2.0})),
    ([RESUME, '--eval_only=true'], 'step 4', lambda: change(
        model={name: weight / 0 for name, weight in load()['model'].items()})),
    ([NEW, '--max_iters=200', '--eval_interval=1000'], '60000', break_data),
    ([NEW], 'data/tiny/meta.json', lambda: Path('data/tiny/meta.json').write_bytes(b'{')),
    ([NEW], 'data/tiny/tokenizer.json', lambda: Path('data/tiny/tokenizer.json').write_bytes(b'{}')),
    ([NEW, '--wandb_log=true'], 'wandb_log', None),
    ([RESUME], 'ckpt.tmp', lambda: os.mkdir('out/ckpt.tmp')),
])
def test_what_is_wrong_is_one_line_and_nothing_is_lost(trained, tmp_path, monkeypatch, args, named, damage):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'wandb', None)  # not installed
    if damage:
        damage()
    before = files('.')
    with pytest.raises(SystemExit) as left:
        script('train.py', *TINY_RUN, *args)
    assert named in left.value.code and '\n' not in left.value.code
    assert files('.') == {**files('.'), **before}


def one_line_of(done, named):
    assert sum(named in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert 'train.py", line' not in done.stderr and 'Warning' not in done.stderr  # no traceback of ours


def test_failures_under_torchrun_are_one_message_and_no_hang(run, tmp_path, monkeypatch):
    make_data(tmp_path, monkeypatch)
    one_line_of(run('train.py', *TINY_RUN, '--gradient_accumulation_steps=3', processes=2, status=1),
                'gradient_accumulation_steps=3')
    break_data()  # one of the two processes meets it
    one_line_of(run('train.py', *TINY_RUN, '--max_iters=200', '--eval_interval=1000', processes=2, alone=True,
                    status=1), '60000')
    monkeypatch.setenv('WORLD_SIZE', '2')  # without torchrun
    one_line_of(run('train.py', *TINY_RUN, status=1), 'WORLD_SIZE=2')


def test_full_disk_leaves_the_last_checkpoint_whole(train, run):
    resource = pytest.importorskip('resource')
    train('--max_iters=4')
    before = files('out', '*.pt')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, limits[1]))
    try:
        done = run('train.py', *TINY_RUN, '--init_from=resume', '--max_iters=9', '--eval_interval=3', status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one_line_of(done, 'out cannot be written')
    assert files('out', '*.pt') == before


def test_closed_output_does_not_end_the_run(train, monkeypatch):
    command = f'{sys.executable} {ROOT}/train.py {" ".join(TINY_RUN)} | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(['bash', '-c', command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == '' and load()['iter_num'] == 12


def test_a_run_without_a_finite_gradient_ends(train, monkeypatch):
    def root(model, idx, targets):  # of 0, whose gradient is infinite
        total = sum(weight.sum() for weight in model.parameters())
        return None, (total - total.detach()).sqrt()

    monkeypatch.setattr(GPT, 'forward', root)
    with pytest.raises(SystemExit, match='^step 16: [^\n]*--dtype=float32[^\n]*$'):  # 2^16 halved to 1
        train('--dtype=float16', '--max_iters=100')
    assert load()['iter_num'] == 16


def test_default_run_prepares_its_data_and_shows_a_sample(run, tmp_path):
    out = run('train.py', '--max_iters=2', '--eval_tokens=2000').stdout
    assert '--- a sample ---\ndef' in out and '--- a sample ---\nclass' in out
    assert (tmp_path / 'data/stdlib/meta.json').exists()
