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
from conftest import ROOT, STOPS, TINY_RUN, make_data, pretrained_with_data, start_script, torchrun
from model import GPT, GPTConfig, budget


def metrics(out_dir='out'):
    return [json.loads(line) for line in Path(out_dir, 'metrics.jsonl').read_text().splitlines()]


def same_metrics(a, b):
    """Equal line by line, but for the time they took."""
    strip = [[{k: v for k, v in line.items() if k != 'tokens_per_second'} for line in lines] for lines in (a, b)]
    return strip[0] == strip[1]


def load(out_dir='out', name='ckpt.pt'):
    return torch.load(Path(out_dir, name), weights_only=True)


def same_weights(a, b):
    return a['iter_num'] == b['iter_num'] and all(torch.equal(w, b['model'][name]) for name, w in a['model'].items())


# what a run leaves


def test_a_run_learns_and_leaves_checkpoints_and_metrics(train):
    run = train('--max_iters=40', '--eval_interval=20', '--log_interval=10', '--learning_rate=0.01')
    lines = metrics()
    assert [line['step'] for line in lines] == [0, 0, 10, 20, 20, 30, 40]
    assert [line['step'] for line in lines if 'val_loss' in line] == [0, 20, 40]
    assert lines[-1]['val_loss'] < lines[0]['val_loss'] - 1
    assert set(lines[1]) == {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_second'}
    assert lines[2]['tokens'] == 11 * 2 * 4 * 16
    saved = load()
    assert {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config', 'tokenizer'} <= set(saved)
    assert saved['iter_num'] == 40 and saved['best_val_loss'] == min(line.get('val_loss', 9) for line in lines)
    assert saved['config']['learning_rate'] == 0.01 and saved['model_args']['vocab_size'] == 257
    assert not list(Path('out').glob('*.tmp'))
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    assert set(saved['model']) == set(run['raw_model'].state_dict())


def test_best_checkpoint_is_that_of_the_lowest_validation_loss(train):
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


def test_every_shape_of_a_tapered_model_is_compiled(train, monkeypatch):
    """Titans' blocks are compiled one by one, of which torch by itself allows 8."""
    compile = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda model: compile(model, backend='eager'))
    torch.compiler.reset()
    with torch._dynamo.config.patch(cache_size_limit=8, fail_on_cache_limit_hit=True):
        train('--compile=true', '--mixer=titans', '--memory_chunk=8', '--ffn=tapered', '--ffn_multiple=1',
              '--n_layer=9', '--max_iters=1', '--block_size=8')


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
    model = GPT(run['model_config'])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / 3, betas=(0.9, 0.95), weight_decay=0.3)
    idx, targets = (torch.cat(pair) for pair in zip(run['get_batch'](0), run['get_batch'](1)))
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
    run = train('--max_iters=0')
    n, stream = run['n_windows'], [run['train_data'].window(i * 16, 17) for i in range(run['n_windows'])]
    batches = [run['get_batch'](i) for i in range(math.ceil(2 * n / 4))]
    seen = [tuple(row.tolist()) for idx, _ in batches for row in idx][:2 * n]
    targets = [tuple(row.tolist()) for _, targets in batches for row in targets][:2 * n]
    assert sorted(seen[:n]) == sorted(seen[n:]) == sorted(tuple(window[:-1].tolist()) for window in stream)
    assert sorted(zip(seen[:n], targets[:n])) == sorted((tuple(w[:-1].tolist()), tuple(w[1:].tolist())) for w in stream)
    assert seen[:n] != seen[n:]
    other = train('--max_iters=0', '--out_dir=other', '--ffn=hourglass', '--n_mlp=2', '--n_layer=3')
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, map(other['get_batch'], range(len(batches)))))
    assert not torch.equal(train('--max_iters=0', '--out_dir=seed', '--seed=1')['get_batch'](0)[0], batches[0][0])


def plain_scores(model, data, n):
    """Loss, perplexity and bits per byte of the first n targets, token by token."""
    nats, nats_of_bytes, n_bytes = 0.0, 0.0, 0
    for start in range(0, n, 16):
        window = torch.from_numpy(data.window(start, min(16, n - start) + 1))
        log_p = model(window[None, :-1])[0][0].double().log_softmax(-1)
        for t, target in enumerate(window[1:].tolist()):
            nats -= log_p[t, target].item()
            if target < 256:  # end-of-text stands for no byte
                nats_of_bytes -= log_p[t, target].item()
                n_bytes += 1
    return nats / n, math.exp(nats / n), nats_of_bytes / n_bytes / math.log(2)


@pytest.mark.parametrize('eval_tokens', [0, 200])
def test_evaluation_is_an_exact_sum(train, eval_tokens):
    prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=1.0)
    run = train('--max_iters=0', f'--eval_tokens={eval_tokens}', '--eval_datasets=other')
    for data, end in ((run['val_data'], ''), (prepare.Tokens('other', 'val'), '/other')):
        scores = plain_scores(run['raw_model'], data, eval_tokens or len(data) - 1)
        assert [metrics()[0][f'val_{key}{end}'] for key in ('loss', 'ppl', 'bpb')] == pytest.approx(scores, rel=1e-5)


def test_a_checkpoint_is_evaluated_with_nothing_else_said(train, run, capsys):
    train('--max_iters=4', '--gradient_accumulation_steps=1')  # which two processes can evaluate but not go on with
    trained = metrics()[-1]
    prepare.prepare('other', input='texts', tokenizer='bytes', val_fraction=1.0, seed=1)
    initial = train('--eval_only=true', '--out_dir=none')
    assert not Path('none').exists() and initial['step'] == 0
    assert 'none has no checkpoint: what follows is of the initial weights' in capsys.readouterr().out
    command = 'train.py', '--init_from=resume', '--eval_only=true', '--eval_datasets=other'
    one, two = (run(*command, processes=processes).stdout.splitlines()[-2:] for processes in (0, 2))
    assert one == two and len(metrics()) == 4 + 2  # nothing was logged
    assert f'data/tiny val loss {trained["val_loss"]:.4f}, perplexity {trained["val_ppl"]:.3f}, ' in one[0]
    assert 'step 4: data/other val loss' in one[1]


def test_data_of_another_tokenizer_is_not_evaluated(train):
    ranks = ''.join(f'{base64.b64encode(bytes([i])).decode()} {255 - i}\n' for i in range(256))
    Path('other.bpe').write_text(ranks)
    prepare.prepare('other', input='texts', tokenizer='other.bpe')
    with pytest.raises(SystemExit, match='data/other was prepared with another tokenizer than data/tiny'):
        train('--eval_datasets=other')


def test_two_processes_equal_one(train, run, tmp_path):
    train('--out_dir=one')
    run('train.py', *TINY_RUN, '--out_dir=two', processes=2)
    one, two = metrics('one'), metrics('two')
    assert [line['step'] for line in one] == [line['step'] for line in two]
    for a, b in zip(one, two):
        for name in ('loss', 'val_loss', 'val_bpb', 'grad_norm'):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), abs=1e-5)
    for a, b in zip(load('one')['model'].values(), load('two')['model'].values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# stopped and resumed

LONG = ['--max_iters=200', '--lr_decay_iters=200', '--eval_interval=5', '--dropout=0.1', '--eval_tokens=64']


def wait_for_step(out_dir, step):
    path, deadline = Path(out_dir, 'metrics.jsonl'), time.time() + 300
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert time.time() < deadline
        time.sleep(0.005)


def test_stopped_by_running_out_of_steps_and_resumed(train):
    train('--out_dir=whole', '--dropout=0.1')
    train('--max_iters=6', '--dropout=0.1')
    train('--max_iters=12', '--init_from=resume')  # dropout comes from the checkpoint
    assert same_weights(load(), load('whole'))
    # the end of the first run was evaluated as well, between two steps
    lines = [line for line in metrics() if line['step'] != 6 or 'loss' in line]
    assert same_metrics(lines, metrics('whole'))


def test_stopped_by_signals_and_resumed(train):
    train(*LONG, '--out_dir=whole')
    run = start_script('train.py', *TINY_RUN, *LONG)
    wait_for_step('out', 20)
    run.terminate()
    run.join(300)
    assert run.exitcode == 0 and 'go on with --init_from=resume' in Path('printed').read_text()
    assert 20 < load()['iter_num'] < 200
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
    assert load()['iter_num'] < 200
    train(*LONG, '--init_from=auto')
    assert same_weights(load(), load('whole')) and load()['best_val_loss'] == load('whole')['best_val_loss']
    assert same_metrics(metrics(), metrics('whole'))


@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='no such signal')
def test_nohup_is_heeded_and_what_is_saved_can_be_left(train, monkeypatch):
    """A closing terminal does not stop a run under nohup; and while samples are made Ctrl-C ends the process."""
    def generate(model, idx, *args, **how):
        handlers.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])
        return idx

    handlers, update = [], torch.optim.AdamW.step
    monkeypatch.setattr(GPT, 'generate', generate)
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda *args, **how: (signal.raise_signal(signal.SIGHUP),
                                                                         update(*args, **how))[1])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train('--max_iters=2', '--sample_tokens=1')
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load()['iter_num'] == 2 and handlers == [[signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]]


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


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_resuming_without_a_word_goes_on_as_it_was(train, dtype, monkeypatch):
    monkeypatch.setattr('conftest.TINY_RUN', [flag for flag in TINY_RUN if not flag.startswith(('--de', '--dt'))])
    train(f'--dtype={dtype}', '--out_dir=whole')
    train(f'--dtype={dtype}', '--max_iters=6')
    monkeypatch.setattr('conftest.TINY_RUN', [])
    resumed = train('--init_from=resume', '--max_iters=12')
    assert str(resumed['compute_dtype']) == f'torch.{dtype}'
    assert same_weights(load(), load('whole')) and load()['scaler'] == load('whole')['scaler']


def test_more_steps_do_not_move_the_schedule(train):
    train('--max_iters=6', '--lr_decay_iters=0', '--min_lr=0.0001')
    train('--init_from=resume', '--lr_decay_iters=6', '--max_iters=8')
    assert [line['lr'] for line in metrics() if 'lr' in line][-2:] == [0.0001, 0.0001]


def test_damaged_lines_of_metrics_are_dropped(train, capsys):
    train('--max_iters=4')
    before = metrics()
    with open('out/metrics.jsonl', 'ab') as file:
        file.write(b'\xff\n}\n{"step": "x"}\n[]\n\0\n{"step": 7, "loss": 1.0}\n{"step": 3, "lo')
    train('--init_from=resume', '--max_iters=4')
    assert metrics() == before
    assert 'ckpt.pt, which has 4 steps: raise --max_iters' in capsys.readouterr().out


def test_a_checkpoint_alone_can_be_resumed(train):
    train('--max_iters=4')
    Path('out/metrics.jsonl').unlink()
    train('--init_from=resume', '--max_iters=6')
    assert [line['step'] for line in metrics()] == [4, 4, 5, 6]


def test_an_out_dir_that_cannot_be_written_is_named(train, monkeypatch):
    Path('file').write_text('')
    Path('out/ckpt.pt.tmp').mkdir(parents=True)
    for out_dir, message in (('file', 'file cannot be written .mend that, or choose.*: .*File exists'),
                             ('file/sub', 'file/sub cannot be written .mend that, or choose.*: .*Not a directory'),
                             ('out', "out cannot be written .*: .*Is a directory: 'out/ckpt.pt.tmp'")):
        with pytest.raises(SystemExit, match=message):
            train(f'--out_dir={out_dir}')
    assert load(name='ckpt_best.pt')['iter_num'] == 4
    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', lambda *args: shutil.rmtree('gone') or open('gone/x'))
        with pytest.raises(SystemExit, match="gone cannot be written .*: .*No such file or directory: 'gone/x'"):
            train('--out_dir=gone')
    train('--out_dir=')  # the working directory
    assert Path('ckpt.pt').exists()


def test_nothing_trained_is_overwritten_unasked(train):
    train('--max_iters=1')
    before = Path('out/ckpt.pt').read_bytes()
    with pytest.raises(SystemExit, match='out/ckpt.pt is there already: go on from it with --init_from=resume'):
        train('--max_iters=1')
    assert Path('out/ckpt.pt').read_bytes() == before
    Path('out/ckpt.pt').rename('out/kept.pt')
    with pytest.raises(SystemExit, match='out/ckpt_best.pt is there already'):
        train('--max_iters=1')
    with pytest.raises(SystemExit, match='elsewhere/ckpt.pt: no such checkpoint'):
        train('--init_from=resume', '--out_dir=elsewhere')
    assert not Path('elsewhere').exists()


def test_resuming_as_something_else_names_each_difference(train, tmp_path, monkeypatch):
    train('--max_iters=1')
    with pytest.raises(SystemExit) as error:
        train('--init_from=resume', '--n_layer=3', '--seed=2', '--max_iters=3')
    assert 'n_layer was 2 and is 3' in str(error.value) and 'seed was 1337 and is 2' in str(error.value)
    assert '\n' not in str(error.value)
    tokenizer, meta = {'name': 'bytes', 'vocab_size': 257, 'eot': 255}, {'vocab_size': 257, 'tokenizer': 'bytes'}
    for name, value, message in (('tokenizer.json', tokenizer, 'another tokenizer'),
                                 ('meta.json', meta, 'prepared anew')):
        path = Path('data/tiny', name)
        before = path.read_bytes()
        path.write_text(json.dumps(value))
        with pytest.raises(SystemExit, match=message):
            train('--init_from=resume')
        path.write_bytes(before)
    whole = Path('out/ckpt.pt').read_bytes()
    torch.save({'model': {}, 'optimizer': {}, 'iter_num': 3, 'config': {}}, 'other.pt')  # nanoGPT's, say
    for damaged in (whole[:3000], b'', b'text', Path('other.pt').read_bytes()):
        Path('out/ckpt.pt').write_bytes(damaged)
        with pytest.raises(SystemExit, match='out/ckpt.pt cannot be read, or is no checkpoint.*; out/ckpt_best.pt may'):
            train('--init_from=resume')
    best = torch.load('out/ckpt_best.pt')
    turned = dict(reversed(best['model'].items()))  # so the optimizer's means would go to other weights
    for name, value, message in (('model', {}, 'does not fit model.py as it is now'), ('optimizer', {}, 'does not fit'),
                                 ('model', turned, 'does not fit model.py as it is now: its weights are in another'),
                                 ('config', {**best['config'], 'beta1': 2.0}, 'beta1=2.0: must be'),
                                 ('config', 'x', 'is no checkpoint'), ('iter_num', None, 'does not fit')):
        torch.save({**best, name: value}, 'out/ckpt.pt')
        with pytest.raises(SystemExit, match=message):
            train('--init_from=resume', '--max_iters=3')


@pytest.mark.parametrize('number', sorted(STOPS))
def test_stopped_within_an_evaluation(train, monkeypatch, request, number):
    """After at most two batches, without a result, which the resumed run then has."""
    before = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored
    request.addfinalizer(lambda: signal.signal(number, before))
    train('--out_dir=whole')
    calls, forward = [], GPT.forward

    def stop_at_the_second_batch(model, idx, targets=None, reduction='mean'):
        calls.append(reduction)
        if calls.count('none') == 8 + 2:  # of the second evaluation, where a whole one has four
            signal.raise_signal(number)
        return forward(model, idx, targets, reduction)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, 'forward', stop_at_the_second_batch)
        train()
    assert calls[-1] == 'none' and calls.count('none') <= 8 + 3
    assert load()['iter_num'] == 8 and [line['step'] for line in metrics() if 'val_loss' in line] == [0, 4]
    train('--init_from=resume')
    assert same_weights(load(), load('whole')) and same_metrics(metrics(), metrics('whole'))


def test_two_runs_cannot_share_a_folder(train):
    train('--max_iters=1')
    with open('out/lock', 'w') as file:
        fcntl = pytest.importorskip('fcntl')
        fcntl.flock(file, fcntl.LOCK_EX)
        before = metrics()
        with pytest.raises(SystemExit, match='out is in use by another run'):
            train('--init_from=resume', '--max_iters=3')
        assert metrics() == before
    train('--init_from=resume', '--max_iters=3')


def test_a_setting_that_a_checkpoint_does_not_know_is_named(train, capsys):
    train('--max_iters=1')
    older = load()
    del older['config']['init_scaled']
    torch.save(older, 'out/ckpt.pt')
    with pytest.raises(SystemExit, match='init_scaled was True and is False'):
        train('--init_from=resume', '--init_scaled=false')
    train('--init_from=resume', '--max_iters=2')
    assert 'the checkpoint does not know init_scaled: taken' in capsys.readouterr().out
    assert load()['config']['init_scaled'] is True


def test_the_best_checkpoint_can_be_evaluated(train, capsys):
    train('--max_iters=4')
    torch.save({**load(), 'iter_num': 3}, 'out/ckpt_best.pt')
    train('--init_from=best', '--eval_only=true')
    assert 'step 3: data/tiny val loss' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='init_from=best is for eval_only'):
        train('--init_from=best')


# every architecture

MIXERS, FFNS, NORMS = ('attention', 'gated', 'titans'), ('standard', 'hourglass', 'tapered', 'tapered_hourglass'), (
    'pre', 'olmo2')


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('ffn', FFNS)
@pytest.mark.parametrize('mixer', MIXERS)
def test_every_mixer_ffn_and_norm_trains_resumes_and_generates(train, mixer, ffn, norm):
    shape = [f'--mixer={mixer}', f'--ffn={ffn}', f'--norm={norm}', '--memory_chunk=7', '--n_mlp=2', '--log_interval=9']
    whole = train('--max_iters=2', '--eval_interval=9', '--out_dir=whole', '--eval_tokens=20', *shape)
    train('--max_iters=1', '--eval_interval=9', '--eval_tokens=20', '--lr_decay_iters=12', *shape)
    train('--max_iters=2', '--init_from=resume')
    assert same_weights(load(), load('whole'))
    saved = load()
    model = GPT(GPTConfig(**saved['model_args']))
    assert any(not torch.equal(weight, saved['model'][name]) for name, weight in model.state_dict().items())
    model.load_state_dict(saved['model'])
    prompt = torch.tensor([[1, 2, 3]])
    expected = prompt
    for _ in range(10):
        expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(prompt, 10, temperature=0.0), expected)
    assert model.generate(prompt, 20).shape == (1, 23)  # past block_size
    twin = GPTConfig(**{**saved['model_args'], 'ffn': 'standard', 'norm': 'pre'})
    counts = [budget(config) for config in (whole['model_config'], twin)]
    assert [counts[0][name] - counts[1][name] for name in ('mixer', 'ffn')] == [0, 0]
    assert counts[0]['total'] == sum(weight.numel() for weight in model.parameters())


# Hope: MLPs updated at several periods

HOPE = ['--ffn=tapered_hourglass', '--n_mlp=3', '--ffn_multiple=8', '--lr_decay_iters=12']
PERIODS = '--mlp_periods=1,4,3'


def test_slow_mlps_change_by_the_sum_of_the_updates_of_their_period(train):
    """Against an optimizer whose weights are copied into the model each so many steps."""
    run = train(*HOPE, PERIODS, '--max_iters=10', '--grad_clip=0.5', '--weight_decay=0.3')
    torch.manual_seed(1337)
    model, fast = GPT(run['model_config']), GPT(run['model_config'])
    fast.load_state_dict(model.state_dict())
    optimizer = fast.configure_optimizers(0.3, 0.0, (0.9, 0.95))
    for step in range(10):
        for i in (2 * step, 2 * step + 1):
            (model(*run['get_batch'](i))[1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group['lr'] = run['learning_rate_at'](step)
        for (name, weight), made in zip(model.named_parameters(), fast.parameters()):
            made.grad, weight.grad = weight.grad, None
        optimizer.step()
        for (name, weight), made in zip(model.named_parameters(), fast.parameters()):
            period = 4 if '.mlps.1.' in name else 3 if '.mlps.2.' in name else 1
            if step % period == period - 1:
                weight.data.copy_(made.data)
    saved, made = load(), dict(fast.named_parameters())
    assert set(saved['ahead']) == {name for name in made if '.mlps.1.' in name or '.mlps.2.' in name}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, saved['model'][name], atol=1e-6, rtol=1e-5)
        if name in saved['ahead']:
            torch.testing.assert_close(made[name], saved['ahead'][name], atol=1e-6, rtol=1e-5)


def test_on_a_constant_gradient_all_periods_move_equally_far(train, monkeypatch):
    def move(model, idx, targets, reduction='mean'):  # the gradient of every weight is 1, that of the head included
        total = sum(weight.sum() for weight in model.parameters())
        return None, total if reduction == 'mean' else torch.ones(idx.shape)

    monkeypatch.setattr(GPT, 'forward', move)
    run = train('--ffn=hourglass', '--n_mlp=3', '--ffn_multiple=1', '--ffn_width=63', '--mlp_periods=1,4,12',
                '--weight_decay=0.3')
    torch.manual_seed(1337)
    start = GPT(run['model_config']).state_dict()
    expected = None
    for name, weight in load()['model'].items():
        if 'mlps' in name:  # decayed alike, by a factor, and moved alike
            moved = weight - start[name] * run_decay(run)
            expected = moved.mean() if expected is None else expected
            torch.testing.assert_close(moved, expected.expand_as(moved), atol=1e-6, rtol=1e-4)


def run_decay(run):
    return math.prod(1 - 0.3 * run['learning_rate_at'](step) for step in range(12))


def test_periods_of_one_change_nothing(train):
    train(*HOPE, '--out_dir=plain')
    train(*HOPE, '--mlp_periods=1,1,1')
    assert same_weights(load(), load('plain')) and 'ahead' not in load()
    train(*HOPE, PERIODS, '--out_dir=slow')
    assert not same_weights(load('slow'), load()) and 'ahead' not in load('slow')  # 12 steps: all are updated


def test_slow_mlps_resume_between_updates(train):
    train(*HOPE, PERIODS, '--out_dir=whole', '--max_iters=11')
    for steps in (5, 6, 11):
        train(*HOPE, PERIODS, f'--max_iters={steps}', '--init_from=auto')
    assert same_weights(load(), load('whole'))
    assert all(torch.equal(weight, load('whole')['ahead'][name]) for name, weight in load()['ahead'].items())


def test_slow_mlps_are_the_same_however_the_batch_is_shared(train, run):
    train(*HOPE, PERIODS, '--max_iters=11', '--out_dir=one')
    train(*HOPE, PERIODS, '--max_iters=11', '--batch_size=8', '--gradient_accumulation_steps=1')
    run('train.py', *TINY_RUN, *HOPE, PERIODS, '--max_iters=11', '--out_dir=two', processes=2)
    for other in ('out', 'two'):
        for kind in ('model', 'ahead'):
            for name, weight in load('one')[kind].items():
                torch.testing.assert_close(load(other)[kind][name], weight, atol=1e-5, rtol=1e-3)


# float16

def with_scale(monkeypatch, scale):
    monkeypatch.setattr(torch.amp, 'GradScaler', functools.partial(torch.amp.GradScaler, init_scale=scale))


def test_float16_learns_as_float32(train):
    train('--out_dir=float32', '--weight_decay=0.3', '--grad_clip=0.5')
    train('--dtype=float16', '--weight_decay=0.3', '--grad_clip=0.5')
    for exact, line in zip(metrics('float32'), metrics(), strict=True):
        for name in exact.keys() - {'tokens_per_second'}:
            assert line[name] == pytest.approx(exact[name], rel=2e-3), line
    assert load()['scaler']['scale'] == 2**16
    assert all(weight.dtype == torch.float32 for weight in load()['model'].values())


def test_a_step_that_overflows_float16_is_skipped(train, monkeypatch):
    with_scale(monkeypatch, 2.0**26)
    run = train('--dtype=float16')
    lines, saved = [line for line in metrics() if 'loss' in line], load()
    skipped = [line['grad_norm'] for line in lines].count(None)
    assert 2 < skipped < 9 and all(line['grad_norm'] > 0 for line in lines[skipped:])
    assert saved['scaler']['scale'] == 2**(26 - skipped)
    assert all(state['step'] == 12 - skipped for state in saved['optimizer']['state'].values())
    assert [line['lr'] for line in lines] == [run['learning_rate_at'](step) for step in range(12)]
    scores = [line['val_loss'] for line in metrics() if 'val_loss' in line]
    assert scores[-1] < scores[0] and all(map(math.isfinite, scores))


def test_a_skipped_step_leaves_slow_mlps_where_they_are(train, monkeypatch):
    with_scale(monkeypatch, 2.0**60)
    run = train('--dtype=float16', *HOPE, PERIODS, '--max_iters=11')
    torch.manual_seed(1337)
    initial, saved = GPT(run['model_config']).state_dict(), load()
    assert saved['ahead'] and saved['scaler']['scale'] == 2**49
    for kind in ('model', 'ahead'):
        assert all(torch.equal(weight, initial[name]) for name, weight in saved[kind].items())


def test_a_run_whose_every_step_is_skipped_ends(train, monkeypatch):
    def root(model, idx, targets, reduction='mean'):  # of 0, whose gradient is infinite
        total = sum(weight.sum() for weight in model.parameters())
        return None, (total - total.detach()).sqrt() if reduction == 'mean' else torch.ones(idx.shape)

    monkeypatch.setattr(GPT, 'forward', root)
    with pytest.raises(SystemExit, match='step 16: the loss is 0.0, .* (nan|inf): try .* or --dtype=float32'):
        train('--dtype=float16', '--max_iters=100')
    assert load()['iter_num'] == 16


# what can go wrong


@pytest.mark.parametrize('args, message', [
    (['--dataset=other'], 'data/other'),
    (['--n_head=5'], 'n_head=5: must divide'),
    (['--block_size=100000'], 'less than a window of block_size'),
    (['--vocab_size=100'], 'vocab_size=100 is less than the 257 of data/tiny'),
    (['--batch_size=0'], 'batch_size=0: must be at least 1'), (['--eval_tokens=-1'], 'eval_tokens=-1: must be at'),
    (['--grad_clip=-1'], 'grad_clip=-1.0: must be at least 0'), (['--beta1=1'], 'beta1=1.0: must be at least 0 and'),
    (['--seed=-1'], 'seed=-1: must be'), (['--device=cpu:x'], 'device=cpu:x: must be'),
    (['--init_from=gpt2'], 'init_from=gpt2: must be'),
    (['--device=tpu'], 'device=tpu: must be'),
    (['--device=mps'], 'device=mps: this machine'),
    (['--dtype=float8'], 'dtype=float8: must be'),
    (['--compile=maybe'], 'compile=maybe: must be'),
    (['--learning_rates=1'], "did you mean 'learning_rate'"),
])
def test_a_wrong_setting_is_one_line(train, args, message):
    with pytest.raises(SystemExit) as error:
        train(*args)
    assert message in str(error.value) and '\n' not in str(error.value)
    assert not Path('out').exists()


def test_a_disk_without_room_is_named_before_the_first_step(train, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda path: type('usage', (), {'free': 1000}))
    with pytest.raises(SystemExit, match='out cannot be written: checkpoints need 0.001 GB, and its disk has 0.000 GB'):
        train()


def test_stderr_may_be_closed(train, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', None)
    train('--max_iters=1')
    assert load()['iter_num'] == 1


def test_an_odd_environment_is_one_line(train, monkeypatch):
    for variables, message in (({'WORLD_SIZE': '2'}, "WORLD_SIZE is set, but not by torchrun: .*: 'RANK'"),
                               ({'WORLD_SIZE': 'two', 'RANK': '0', 'LOCAL_RANK': '0'}, 'WORLD_SIZE is set, but not'),
                               ({'WORLD_SIZE': '0', 'RANK': '0', 'LOCAL_RANK': '0'}, 'RANK=0 of WORLD_SIZE=0'),
                               ({'WORLD_SIZE': '2', 'RANK': '0', 'LOCAL_RANK': '0'}, 'the 2 processes cannot meet: ')):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match=message):
            for name, value in variables.items():
                patch.setenv(name, value)
            train()
    monkeypatch.setattr('shutil.which', lambda name: None)
    with pytest.raises(SystemExit, match='compile=true needs a C'):
        train('--compile=true')


def test_loss_that_is_not_finite(train, capsys):
    train('--max_iters=4')
    before = {path.name: path.read_bytes() for path in Path('out').glob('*.pt')}
    broken = load()
    broken['model']['blocks.0.ffn.mlps.0.up_proj.weight'][:] = math.inf
    torch.save(broken, 'out/ckpt.pt')
    with pytest.raises(SystemExit, match='step 4: the loss is (nan|inf).*try a lower --learning_rate'):
        train('--init_from=resume', '--max_iters=9')
    assert load()['iter_num'] == 4 and Path('out/ckpt_best.pt').read_bytes() == before['ckpt_best.pt']
    capsys.readouterr()
    with pytest.raises(SystemExit, match='step 4: the loss on data/tiny val is nan: try a lower'):
        train('--init_from=resume', '--eval_only=true')
    assert 'nan' not in capsys.readouterr().out


def corrupt(position):
    """Write a token id past the vocabulary into the training data."""
    path = Path('data/tiny/train_000000.bin')
    shard = np.fromfile(path, dtype=np.uint16)
    shard[512 + position] = 60000
    shard.tofile(path)


def test_token_outside_of_the_vocabulary(train):
    corrupt(100)
    with pytest.raises(SystemExit, match='data/tiny train has a token id 60000, outside of its 257'):
        train('--max_iters=200', '--eval_interval=1000')
    assert not Path('out/ckpt.pt').exists()  # no step was done that would be worth one


@pytest.mark.parametrize('name, content', [('meta.json', b'{'), ('meta.json', b'{}'), ('tokenizer.json', b'{}'),
                                           ('token_bytes.npy', b'')])
def test_damaged_data_is_named(train, name, content):
    Path('data/tiny', name).write_bytes(content)
    with pytest.raises(SystemExit, match=f'data/tiny/{name} is damaged'):
        train()


@pytest.mark.skipif(sys.platform == 'win32', reason='a pipe of bash')
def test_a_reader_that_leaves_does_not_end_the_run(train):
    command = f'{sys.executable} {ROOT}/train.py {" ".join(TINY_RUN)} | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(['bash', '-c', command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == '' and load()['iter_num'] == 12


def test_vocabulary_larger_than_the_tokenizers(train):
    train('--vocab_size=5000', '--sample_tokens=50', '--max_iters=1')  # nearly untrained, so it draws from all 5000


def one_line_of(done, message):
    said = [line for line in done.stderr.splitlines() if message in line]
    assert len(said) == 1, done.stderr
    assert 'train.py", line' not in done.stderr  # no traceback of ours
    assert 'Warning' not in done.stderr


def test_failures_under_torchrun_are_one_message_and_no_hang(run, tmp_path, monkeypatch):
    make_data(tmp_path, monkeypatch)
    one_line_of(run('train.py', *TINY_RUN, '--gradient_accumulation_steps=3', processes=2, status=1),
                'gradient_accumulation_steps=3 cannot be shared equally')
    corrupt(100)  # one of the two processes meets it
    one_line_of(run('train.py', *TINY_RUN, '--max_iters=200', '--eval_interval=1000', processes=2, alone=True,
                    status=1),
                'has a token id 60000')


@pytest.mark.parametrize('processes', [0, 2])
def test_full_disk_leaves_the_last_checkpoint_whole(train, run, processes):
    resource = pytest.importorskip('resource')
    train('--max_iters=4')
    before = {path.name: path.read_bytes() for path in Path('out').iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, limits[1]))
    try:
        done = run('train.py', *TINY_RUN, '--init_from=resume', '--max_iters=9', '--eval_interval=3',
                   processes=processes, alone=processes > 0, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one_line_of(done, 'out cannot be written (mend that, or choose another --out_dir): ')
    assert {path.name: path.read_bytes() for path in Path('out').glob('*.pt')} == {
        name: data for name, data in before.items() if name.endswith('.pt')}
    assert not list(Path('out').glob('*.tmp'))


def test_default_run_prepares_its_data_and_shows_a_sample(run, tmp_path):
    out = run('train.py', '--max_iters=2', '--eval_tokens=2000').stdout
    assert '--- a sample ---\ndef' in out and '--- a sample ---\nclass' in out
    assert (tmp_path / 'data/stdlib/meta.json').exists()
    again = run('train.py', status=1)
    assert again.stderr.count('\n') == 1


# pretrained models


@pytest.mark.parametrize('kind', ['Llama', 'Olmo2'])
def test_pretrained_model_is_trained_on_and_resumed(train, kind):
    there, _ = pretrained_with_data(kind)
    start = '--init_from=hf:hf', '--dataset=hf', '--learning_rate=1e-3'
    train(*start, '--out_dir=whole', '--dropout=0.1')
    tokens = torch.from_numpy(prepare.Tokens('hf', 'val').window(0, 193)).view(1, -1)
    with torch.no_grad():
        logits = there(tokens[0, :-1].view(12, 16)).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).item()
    train(*start, '--out_dir=initial', '--max_iters=0', '--eval_tokens=192')
    assert metrics('initial')[0]['val_loss'] == pytest.approx(expected, abs=1e-4)
    losses = [line['val_loss'] for line in metrics('whole') if 'val_loss' in line]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    train(*start, '--max_iters=5', '--dropout=0.1')
    train('--init_from=resume', '--dataset=hf')
    assert same_weights(load(), load('whole'))
    shape = load()['model_args']
    assert (shape['norm'], shape['n_kv_head'], shape['block_size'], shape['dropout']) == (
        'olmo2' if kind == 'Olmo2' else 'pre', 2, 16, 0.1)
    for args, message in (
            ([], 'out/ckpt.pt is there already'),
            (['--out_dir=x', '--n_layer=3'], 'hf:hf was trained otherwise: n_layer was 2 and is 3'),
            (['--out_dir=x', '--block_size=65', '--eval_tokens=65'], 'hf:hf: block_size=65: it was trained with'),
            (['--out_dir=x', '--dataset=tiny'], 'data/tiny has other tokens than hf:hf: prepare it with --tokenizer')):
        with pytest.raises(SystemExit, match=message):
            train(*start, *args)
