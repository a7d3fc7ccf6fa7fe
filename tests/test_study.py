import json
import math
import re
import runpy
import signal
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, make_data, script

STUDY = ROOT / 'config/study'
sys.path.append(str(STUDY))
import report  # noqa: E402

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
max_iters = 40
warmup_iters = 2
eval_interval = 20
eval_tokens = 200
sample_tokens = 0
"""
COMMAND = ['--scale=toy.py', '--results_dir=.', '--only=step', '--seeds=2', '--jobs=1']


@pytest.fixture
def toy(tmp_path, monkeypatch):
    make_data(tmp_path, monkeypatch)
    Path('toy.py').write_text(TOY)


def study(*args):
    """The functions and settings of run.py, called with these arguments, before main()."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['run.py', *args])
        return runpy.run_path(str(STUDY / 'run.py'), run_name='run')['main'].__globals__


@pytest.fixture
def run_study(toy, monkeypatch):
    """Run run.py in this process, and in it, one after the other, the scripts that it starts."""
    def started(command, **_):
        script(Path(command[1]).name, *command[2:])
        return types.SimpleNamespace(poll=lambda: 0, terminate=lambda: None)

    def run_study(*args):
        scope = study(*args)
        scope['subprocess'] = types.SimpleNamespace(Popen=started, run=started)
        scope['main']()
        return results()
    return run_study


def results():
    path = Path('results-toy.json')
    return json.loads(path.read_text())['runs'] if path.exists() else []


def curve(folder):
    lines = map(json.loads, Path(folder, 'metrics.jsonl').read_text().splitlines())
    return {str(line['step']): round(line['val_loss'], 6) for line in lines if 'val_loss' in line}


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def test_every_run_is_kept_and_reported(run_study):
    runs = run_study(*COMMAND)
    assert [(run['seed'], run['arm']) for run in runs] == [(0, 'uniform'), (0, 'step'), (1, 'uniform'), (1, 'step')]
    folder, = Path().glob('out-study-toy-*')
    last = {}
    for run in runs:
        out = folder / f'{run["arm"]}-{run["seed"]}-40-0.003-0.05'
        assert run['val_loss'] == curve(out) and run['max_iters'] == 40
        assert len(run['rho']) == 3 and all(-1 <= rho <= 1 for rho in run['rho'])
        last[run['arm'], run['seed']] = run['val_loss']['40']
    a, b = (last['step', seed] - last['uniform', seed] for seed in (0, 1))
    mean = statistics.mean(last['step', seed] for seed in (0, 1))
    row = f'| step | 0.003 | 2 | {mean:.4f} | {(a + b) / 2:+.4f} ± {abs(a - b) / 2:.4f} | {math.exp(mean):.3f} |'
    assert row in Path('results.md').read_text().replace('*', '')
    # nothing is trained twice, and a run is that of train.py
    ages = {path: path.stat().st_mtime_ns for path in folder.glob('*/*')}
    assert run_study(*COMMAND) == runs
    assert {path: path.stat().st_mtime_ns for path in folder.glob('*/*')} == ages
    script('train.py', 'toy.py', str(STUDY / 'step.py'), '--seed=1', '--out_dir=alone')
    assert curve('alone') == runs[-1]['val_loss']


def test_interrupted_and_gone_on_with(run_study):
    Path('toy.py').write_text(TOY + 'max_iters = 300\neval_interval = 50\n')
    command = [sys.executable, STUDY / 'run.py', *COMMAND, '--only=uniform', '--seeds=1']
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    end = time.time() + 60
    while not list(Path().glob('out-study-toy-*/*/ckpt.pt')):
        assert time.time() < end
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    assert 'stopped, 1 runs to go' in job.communicate(timeout=60)[0] and job.returncode == 0
    assert not results() and '300' not in curve(next(Path().glob('out-study-toy-*/uniform-*')))
    run, = run_study(*COMMAND, '--only=uniform', '--seeds=1')
    script('train.py', 'toy.py', '--seed=0', '--out_dir=alone')
    assert run['val_loss'] == curve('alone')


def test_a_run_that_fails_is_one_line(toy):
    """As where another run.py is at work on it."""
    scope = study(*COMMAND, '--only=uniform')
    scope['subprocess'] = types.SimpleNamespace(Popen=lambda command, stdout, **_: stdout.write('in use') and
                                                types.SimpleNamespace(poll=lambda: 1, terminate=lambda: None))
    with pytest.raises(SystemExit, match='^uniform-0-.* left without finishing: see the end of out-.*/log.txt$'):
        scope['main']()
    log, = Path().glob('out-study-toy-*/uniform-0-*/log.txt')
    assert log.read_text() == 'in use' and not results()


@pytest.mark.parametrize('change, message', [
    (lambda study: study.update(torch='1.0'), 'torch was 1.0 and is'),
    (lambda study: study.update(data='0'), 'data was 0 and is'),
    (lambda study: study['recipe'].update(learning_rate=9.0), 'learning_rate was 9.0 and is 0.003'),
    (lambda study: study['arms']['uniform'].update(widths=[1, 1, 1]), 'arm uniform was'),
    (lambda study: study.update(runs={}), 'is damaged .*: remove it'), (lambda study: study.clear(), 'is damaged'),
    (lambda study: study.update(runs=[{'arm': 'uniform', 'seed': 0}]), 'is damaged')])
def test_runs_that_do_not_agree_are_refused(toy, change, message):
    scope = study(*COMMAND)
    mine = scope['study_of']('toy.py', scope['arms_of']({'_arms': ['uniform', 'step']}))
    before = json.loads(scope['dump'](mine))
    assert before == mine
    change(before)
    Path('results-toy.json').write_text(json.dumps(before))
    with pytest.raises(SystemExit, match=message):
        scope['go_on'](mine, Path('results-toy.json'))


def test_the_published_runs_are_not_added_to_on_other_data(toy):
    Path('data/tiny').rename('data/stdlib_bytes')
    scope = study('--scale=small')
    mine = scope['study_of'](str(STUDY / 'scale_small.py'), scope['arms_of']({'_arms': ['uniform']}))
    with pytest.raises(SystemExit) as error:
        scope['go_on'](mine, STUDY / 'results-small.json')
    assert re.search('trained otherwise: begin anew in another --results_dir, .*: data was 27cebd.* and is',
                     error.value.code) and '\n' not in error.value.code


# ----------------------------------------------------------------------------------------------------------------------
# Which runs


def test_trials_choose_for_each_arm_what_its_runs_have(toy):
    """With losses from a formula in place of training: arms that want 3e-3, 1.2e-2 and 7.5e-4."""
    scope = study(*COMMAND)
    plan = {'_learning_rates': (1.5e-3, 3e-3, 6e-3), '_init_stds': (0.06, 0.09, 0.13), '_short_arms': ['uniform']}
    best = {'uniform': 3e-3, 'hourglass_k8': 1.2e-2, 'step': 7.5e-4}
    mine = {'runs': [], 'recipe': {'max_iters': 400, 'learning_rate': 3e-3, 'init_std': 0.06}}
    while True:
        tasks = scope['tasks_of'](mine, plan, best, seeds=4)
        task = next((task for task in tasks if scope['loss_of'](mine, task) is None), None)
        if not task:
            break
        loss = abs(math.log(task['learning_rate'] / best[task['arm']])) + abs(task['init_std'] - 0.09)
        mine['runs'].append({**task, 'val_loss': {'0': 9.0, str(task['max_iters']): loss}})
    done = [tuple(run[name] for name in ('arm', 'seed', 'max_iters', 'init_std', 'learning_rate'))
            for run in mine['runs']]
    assert len(set(done)) == len(done)
    for arm, rates in (('uniform', {1.5e-3, 3e-3, 6e-3}), ('hourglass_k8', {1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2}),
                       ('step', {1.5e-3, 3e-3, 6e-3, 7.5e-4, 3.75e-4})):
        assert {run[4] for run in done if run[:4] == (arm, 100, 100, 0.09)} == rates
    counting = [run for run in done if run[1] != 100]
    assert counting == [run for seed in range(4) for run in (
        *((arm, seed, 400, 0.09, rate) for arm, rate in best.items()),
        *([('uniform', seed, 100, 0.09, 3e-3)] if seed < 3 else []))]


@pytest.mark.parametrize('scale, arms', [('small', 11), ('long', 10), ('113m', 42), ('440m', 20)])
def test_all_arms_have_the_budget_of_the_uniform_one(toy, scale, arms):
    scope, file = study(), str(STUDY / f'scale_{scale}.py')
    Path('data/tiny').rename(f'data/{scope["settings_of"]([file])["dataset"]}')
    mine = scope['study_of'](file, scope['arms_of'](scope['plan_of'](file)))  # which ends if one has not
    assert len(mine['arms']) == arms


@pytest.mark.parametrize('arm, message', [
    ('max_iters = 20\neval_tokens = 100', 'has eval_tokens, max_iters of its own: arms may'),
    ('ffn_multiple = 64\nn_layer = 2', r'has 51,200 parameters .* does not meet param_budget=49,152'),
    ("ffn = 'wide'", "cannot be had at this scale, .*: ffn='wide': must be one of")])
def test_an_arm_may_differ_in_its_shape_alone(toy, arm, message):
    Path('arm.py').write_text(arm)
    with pytest.raises(SystemExit, match=f'arm mine {message}'):
        study(*COMMAND)['study_of']('toy.py', {'uniform': [], 'mine': ['arm.py']})


@pytest.mark.parametrize('flag, message', [
    ('--jobs=-1', 'jobs=-1: must be'), ('--only=uni', 'there is no arm uni; there are uniform, cosine'),
    ('--scale=none.py', 'none.py: no such config file'), ('--results_dir=toy.py', 'toy.py: File exists'),
    ('--scale=113m', 'meta.json: No such file or directory; it is made by python prepare.py --dataset=fineweb10B')])
def test_a_wrong_setting_is_one_line(toy, flag, message):
    with pytest.raises(SystemExit) as error:
        study(*COMMAND, '--seeds=0', flag)['main']()
    assert message in error.value.code and '\n' not in error.value.code


# ----------------------------------------------------------------------------------------------------------------------
# The report


def published():
    return {path.stem.removeprefix('results-'): json.loads(path.read_text()) for path in STUDY.glob('results-*.json')}


def test_the_published_report_is_that_of_the_results():
    text = (STUDY / 'results.md').read_text(encoding='utf-8')
    assert text.startswith('# ') and published()
    for name, mine in published().items():
        assert report.section(name, mine) in text


@pytest.mark.parametrize('name', published())
def test_published_runs_are_fairly_compared(name):
    """Every run that counts has the learning rate that was best in trials of its arm, the best not at an end."""
    mine = published()[name]
    trials = [run for run in mine['runs'] if run['seed'] == report.TRIAL_SEED]
    for run in mine['runs']:
        if trials and run['seed'] != report.TRIAL_SEED:
            losses = {trial['learning_rate']: list(trial['val_loss'].values())[-1] for trial in trials
                      if (trial['arm'], trial['init_std']) == (run['arm'], run['init_std'])}
            assert run['learning_rate'] == min(losses, key=losses.get)
            assert min(losses) < run['learning_rate'] < max(losses) and len(losses) >= 3


def test_differences_and_their_errors():
    runs = [{'arm': arm, 'seed': seed, 'max_iters': 8, 'val_loss': {'0': 9.0, '8': loss}}
            for seed, losses in enumerate([(1, 1.5), (2, 2.25), (4, 4.75)])
            for arm, loss in zip(('uniform', 'other'), losses)] + [
        {'arm': 'other', 'seed': 7, 'max_iters': 8, 'val_loss': {'8': 0.0}},  # without uniform
        {'arm': 'other', 'seed': 0, 'max_iters': 2, 'val_loss': {'2': 0.0}},  # shorter
        {'arm': 'uniform', 'seed': report.TRIAL_SEED, 'max_iters': 8, 'val_loss': {'8': 0.0}}]
    mine = {'arms': {'uniform': {}, 'other': {}}, 'recipe': {'max_iters': 8}, 'runs': runs}
    assert report.compare(mine, 8) == {'other': ({0: 0.5, 1: 0.25, 2: 0.75}, 0.5, pytest.approx(0.25 / 3 ** 0.5))}


def test_scatter_of_all_arms_together():
    """The residuals are those of least squares with a constant for each arm and each seed."""
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(4, 3)) / 100 + rng.normal(size=(4, 1)) + rng.normal(size=3)
    study = {'arms': dict.fromkeys('abcd'), 'runs': [
        {'arm': arm, 'seed': seed, 'max_iters': 7, 'val_loss': {'7': losses['abcd'.index(arm), seed]}}
        for arm in 'abcd' for seed in range(3)]}
    constants = np.concatenate((np.repeat(np.eye(4), 3, axis=0), np.tile(np.eye(3), (4, 1))), axis=1)
    rest = losses.flatten() - constants @ np.linalg.lstsq(constants, losses.flatten(), rcond=None)[0]
    expected = 2.447 * np.sqrt(2 * (rest**2).sum() / 6 / 3)  # t with 6 degrees of freedom
    assert report.pooled_reach(study, 7, 1) == pytest.approx(expected, rel=1e-3)
    study['runs'] = [run for run in study['runs'] if run['seed'] == 0 or run['arm'] == 'a']
    assert report.pooled_reach(study, 7, 1) == np.inf


def test_chance_is_that_of_students_t_with_all_comparisons_allowed_for():
    for seeds, comparisons, t in ((5, 1, 2.776), (2, 1, 12.706), (5, 10, 5.598), (3, 1, 4.303), (10**4, 1, 1.960)):
        assert report.errors_needed(seeds, comparisons) == pytest.approx(t, abs=2e-3)
    a = {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}
    assert [report.shown(a, 0.1, error, 10) for error in (0.01, 0.03, 0.05)] == [
        '**+0.1000 ± 0.0100**', '*+0.1000 ± 0.0300*', '+0.1000 ± 0.0500']


def test_figures(toy):
    pytest.importorskip('matplotlib')
    report.draw(published(), Path('results.svg'))
    assert 'step_reversed' in Path('results.svg').read_text()
    script('train.py', 'toy.py', '--out_dir=out-a')
    script('config/study/report.py', '--curves=out-a,out-a')
    assert '</svg>' in Path('out-a/curves.svg').read_text()
    with pytest.raises(SystemExit, match='none/metrics.jsonl cannot be read'):
        report.draw_curves(['none'])
