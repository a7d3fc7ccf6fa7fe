import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, make_data, script

STUDY = ROOT / 'config/study'
TOY = """
dataset = 'tiny'
block_size = 16
batch_size = 4
dtype = 'float32'
n_layer = 3
n_head = 2
n_embd = 32
ffn_multiple = 4
param_budget = 16 * 32**2 * 3
max_iters = 200
warmup_iters = 2
eval_interval = 100
eval_tokens = 200
sample_tokens = 0
"""
COMMAND = ['--scale=toy.py', '--results_dir=.', '--only=step', '--seeds=2', '--jobs=1']


@pytest.fixture
def toy(tmp_path, monkeypatch):
    make_data(tmp_path, monkeypatch)
    Path('toy.py').write_text(TOY)


def results():
    path = Path('results-toy.json')
    return json.loads(path.read_text())['runs'] if path.exists() else {}


def wait_for(condition):
    end = time.time() + 60
    while not condition():
        assert time.time() < end
        time.sleep(0.02)


def test_interrupted_and_gone_on_with(toy, run):
    job = subprocess.Popen([sys.executable, STUDY / 'run.py', *COMMAND], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: list(Path().glob('out-study-toy-*/step-0/ckpt.pt')))  # uniform is finished, step is not
    folder, = Path().glob('out-study-toy-*')
    job.send_signal(signal.SIGINT)
    assert 'stopped, with 2 runs not begun' in job.communicate(timeout=60)[0] and job.returncode == 0
    first = results()
    assert set(first) == {'uniform'} and set(first['uniform']) == {'0'}
    ages = {path: path.stat().st_mtime_ns for path in (folder / 'uniform-0').iterdir()}

    said = run('config/study/run.py', *COMMAND).stdout
    assert {path: path.stat().st_mtime_ns for path in (folder / 'uniform-0').iterdir()} == ages
    after = results()
    assert {arm: set(runs) for arm, runs in after.items()} == {'uniform': {'0', '1'}, 'step': {'0', '1'}}
    assert after['uniform']['0'] == first['uniform']['0']
    for arm, runs in after.items():
        for seed, result in runs.items():
            lines = map(json.loads, (folder / f'{arm}-{seed}/metrics.jsonl').read_text().splitlines())
            curve = [(line['step'], round(line['val_loss'], 6)) for line in lines if 'val_loss' in line]
            assert curve == list(zip(result['step'], result['val_loss'])) and curve[-1][0] == 200
    # the interrupted run is the one that was never stopped
    run('train.py', 'toy.py', str(STUDY / 'step.py'), '--seed=0', '--out_dir=alone')
    alone = Path('alone/metrics.jsonl').read_text().splitlines()[-1]
    assert round(json.loads(alone)['val_loss'], 6) == after['step']['0']['val_loss'][-1]

    a, b = (after['step'][seed]['val_loss'][-1] - after['uniform'][seed]['val_loss'][-1] for seed in '01')
    mean = statistics.mean(after['step'][seed]['val_loss'][-1] for seed in '01')
    row = f'| step | 2 | {mean:.4f} | {(a + b) / 2:+.4f} ± {abs(a - b) / 2:.4f} | {math.exp(mean):.3f} |'
    assert row in said and row in Path('results-toy.md').read_text()


def test_two_at_once_are_refused(toy, run):
    scope = study(*COMMAND, '--seeds=0')
    scope['lock'](scope['runs'])
    busy = run('config/study/run.py', *COMMAND, status=1).stderr
    assert busy.startswith(f'{scope["runs"]} is in use: another run.py, or runs that one') and busy.count('\n') == 1


@pytest.mark.parametrize('change, message', [
    (lambda study: study.update(torch='1.0'), 'torch was 1.0 and is'),
    (lambda study: study.update(data='0'), 'data was 0 and is'),
    (lambda study: study['recipe'].update(learning_rate=9.0), 'learning_rate was 9.0 and is 0.003'),
    (lambda study: study['arms']['uniform'].update(widths=[1, 1, 1]), 'arm uniform was'),
    (lambda study: study.update(runs=[]), 'is damaged .*: remove it'), (lambda study: study.clear(), 'is damaged'),
    (lambda study: study.update(runs={'uniform': {'0': {}}}), 'is damaged')])
def test_runs_that_do_not_agree_are_refused(toy, change, message):
    study('--scale=toy.py', '--results_dir=.', '--only=step', '--seeds=0')
    scope = study('--scale=toy.py', '--results_dir=.', '--only=step', '--seeds=0')
    before = {**scope['study'], 'runs': {'uniform': {}}}
    change(before)
    Path('results-toy.json').write_text(json.dumps(before))
    with pytest.raises(SystemExit, match=message):
        study('--scale=toy.py', '--results_dir=.', '--only=step', '--seeds=0')


def study(*args):
    """Run run.py in this process; returns its variables."""
    return script('config/study/run.py', *args)


@pytest.mark.parametrize('scale, dataset', [('small', 'stdlib'), ('113m', 'fineweb10B')])
def test_all_arms_have_the_budget_of_the_uniform_one(toy, tmp_path, scale, dataset):
    os.rename('data/tiny', f'data/{dataset}')
    scope = study(f'--scale={scale}', f'--results_dir={tmp_path}', '--seeds=0')
    assert len(scope['study']['arms']) == (10 if scale == 'small' else 39)
    for name, arguments in scope['arms']().items():
        counts = scope['budget'](scope['shape_of'](scope['settings_of'](arguments + ['--vocab_size=257'])))
        assert counts['non_embedding'] == scope['study']['recipe']['param_budget'], name


def test_the_published_table_is_that_of_the_results(toy):
    scope = study(*COMMAND, '--seeds=0')
    published = json.loads((STUDY / 'results.json').read_text())
    table = scope['table'](published)
    assert table.count('\n') == 1 + len(published['runs'])
    for path in (STUDY / 'results.md', ROOT / 'README.md'):
        assert table in path.read_text(encoding='utf-8'), path


def test_a_run_that_fails_is_one_line(toy, run):
    Path('toy.py').write_text(TOY + "block_size = 10**6\n")
    done = run('config/study/run.py', *COMMAND, status=1)
    assert re.fullmatch('uniform, seed 0 left without finishing: see the end of out-study-toy-.*/uniform-0/log.txt\n',
                        done.stderr), done.stderr


@pytest.mark.parametrize('arm, message', [
    ('max_iters = 20\neval_tokens = 100', 'has eval_tokens, max_iters of its own: arms may'),
    ('ffn_multiple = 64\nn_layer = 2', r'has 51,200 parameters .* does not meet param_budget=49,152'),
    ("ffn = 'wide'", "cannot be had at this scale, .*: ffn='wide': must be one of")])
def test_an_arm_may_differ_in_its_shape_alone(toy, arm, message):
    scope = study(*COMMAND, '--seeds=0')
    Path('arm.py').write_text(arm)
    with pytest.raises(SystemExit, match=f'arm mine {message}'):
        scope['study_of']({'uniform': [], 'mine': ['arm.py']})


@pytest.mark.parametrize('flag, message', [
    ('--jobs=-1', 'jobs=-1: must be'), ('--only=uni', 'there is no arm uni; there are uniform, cosine'),
    ('--scale=none.py', 'none.py: no such config file'), ('--results_dir=toy.py', 'toy.py: File exists')])
def test_a_wrong_setting_is_one_line(toy, flag, message):
    with pytest.raises(SystemExit) as error:
        study(*COMMAND, flag)
    assert message in error.value.code and '\n' not in error.value.code


def test_curves_of_any_runs(toy, run):
    pytest.importorskip('matplotlib')
    run('train.py', 'toy.py', '--out_dir=out-a')
    run('config/study/run.py', '--curves=out-a,out-a')
    assert '</svg>' in Path('curves.svg').read_text()
    assert run('config/study/run.py', '--curves=none', status=1).stderr.startswith('none/metrics.jsonl cannot be read')
