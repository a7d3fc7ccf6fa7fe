import json
import math
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, make_data, script

from configurator import configure, settings_of, variables_of
from model import GPTConfig, budget, shape_of

STUDY = ROOT / 'config/study'
sys.path.append(str(STUDY))
import report  # noqa: E402

TOY = """
dataset = 'tiny'
block_size = 16
batch_size = 4
n_layer = 3
n_head = 2
n_embd = 32
param_budget = 16 * 32**2 * 3
max_iters = 40
eval_interval = 20
sample_tokens = 0
_arms = ['uniform', 'step']
_seeds = 1
"""
COMMAND = ['--scale=toy.py', '--results_dir=.', '--jobs=2']

# A train.py that does not train: its loss is how far the learning rate is from the arm's best.
UNTRAINED = """
import json, math, pathlib, sys
if __name__ == '__main__':
    arm = pathlib.Path(sys.argv[2]).stem
    flags = dict(flag[2:].split('=') for flag in sys.argv[3:])
    rate, out = float(flags['learning_rate']), pathlib.Path(flags['out_dir'])
    assert math.isclose(float(flags['min_lr']), rate / 10) and not pathlib.Path('broken').exists()
    loss = 1 + abs(math.log(rate / {'uniform': 3e-3, 'hourglass_k8': 1.2e-2, 'step': 7.5e-4}[arm]))
    (out / 'metrics.jsonl').write_text(json.dumps({'step': 40, 'val_loss': loss}))
    (out / 'probe.json').write_text(json.dumps({'layers': [{'rho': 0.1}, {'rho': 0.2}, {'rho': 0.3}]}))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    make_data(tmp_path, monkeypatch)
    Path('toy.py').write_text(TOY)


@pytest.fixture
def untrained(toy):
    """The path of run.py in a copy of the repository whose train.py does not train."""
    shutil.copytree(STUDY, 'repository/config/study')
    lines = [f'{name} = {value!r}' for name, value in settings_of(variables_of(ROOT / 'train.py')).items()]
    Path('repository/train.py').write_text('\n'.join([*lines, UNTRAINED]))
    return str(Path('repository/config/study/run.py').resolve())


def runs_of_toy():
    return json.loads(Path('results-toy.json').read_text())['runs']


# ----------------------------------------------------------------------------------------------------------------------
# The runs


def test_an_interrupted_study_goes_on_to_the_same_results(toy):
    study = subprocess.Popen([sys.executable, STUDY / 'run.py', *COMMAND], stderr=subprocess.PIPE, text=True)
    while not list(Path().glob('out-study-toy/*/ckpt.pt')):
        assert study.poll() is None
        time.sleep(0.02)
    study.send_signal(signal.SIGINT)
    assert len(study.communicate(timeout=60)[1].splitlines()) == 1 and study.returncode == 1
    script(STUDY / 'run.py', *COMMAND)
    found = {run['arm']: run for run in runs_of_toy()}
    script('train.py', 'toy.py', str(STUDY / 'step.py'), '--seed=0', '--out_dir=alone')
    alone = json.loads(Path('alone/metrics.jsonl').read_text().splitlines()[-1])['val_loss']
    assert found['step']['val_loss']['40'] == round(alone, 6) and len(found['uniform']['rho']) == 3
    ages = {path: path.stat().st_mtime_ns for path in Path().glob('out-study-toy/*/*')}
    script(STUDY / 'run.py', *COMMAND)  # nothing is left to do
    assert ages == {path: path.stat().st_mtime_ns for path in Path().glob('out-study-toy/*/*')}


def test_trials_with_seeds_of_their_own_choose_the_learning_rate_of_each_arm(untrained):
    Path('toy.py').write_text(TOY + "_learning_rates = [1.5e-3, 3e-3, 6e-3]\n_arms.append('hourglass_k8')\n_seeds = 2")
    script(untrained, *COMMAND)
    grids = {'uniform': [1.5e-3, 3e-3, 6e-3], 'hourglass_k8': [1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2],
             'step': [3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3]}  # the best rate is inside each grid
    best = {'uniform': [3e-3], 'hourglass_k8': [1.2e-2], 'step': [7.5e-4]}
    assert sorted((run['arm'], run['seed'], run['learning_rate']) for run in runs_of_toy()) == sorted(
        (arm, seed, rate) for rates, seeds in ((grids, report.TRIAL_SEEDS), (best, (0, 1)))
        for arm in rates for seed in seeds for rate in rates[arm])
    text = Path('results.md').read_text()
    assert f'| uniform | {math.log(2):+.4f} |' in text and '| uniform | 0.100, 0.200, 0.300 |' in text


@pytest.mark.parametrize('change, flag, named', [
    ({}, '--jobs=-1', 'jobs=-1'), ({}, '--scale=none.py', 'none.py'), ({}, '--scale=113m', 'fineweb10B'),
    ({}, '--results_dir=toy.py', 'toy.py'), ({'torch': '1.0'}, '--jobs=1', 'torch=1.0'),
    ({'data': '0'}, '--jobs=1', 'data=0'), ({'recipe': {'max_iters': 9}}, '--jobs=1', 'max_iters=9'),
    ({'arms': {'uniform': 0}}, '--jobs=1', 'uniform=0'), ({'arms': None}, '--jobs=1', 'results-toy.json'),
    ('no JSON', '--jobs=1', 'results-toy.json'), ({'runs': []}, '--jobs=1', 'uniform-0-0.003/log.txt')])
def test_what_is_wrong_is_one_line_and_no_result_is_lost(untrained, run, change, flag, named):
    Path('toy.py').write_text(TOY + "_arms = ['uniform']")
    script(untrained, *COMMAND)
    results, changed = Path('results-toy.json'), change
    if isinstance(change, dict):
        changed = json.dumps({**json.loads(results.read_text()), **change})
    results.write_text(changed)
    if 'log.txt' in named:
        shutil.rmtree('out-study-toy')
        Path('broken').touch()
    error = run(untrained, *COMMAND, flag, status=1).stderr
    assert named in error and len(error.splitlines()) == 1 and results.read_text() == changed


# ----------------------------------------------------------------------------------------------------------------------
# The arms and the published results


@pytest.mark.parametrize('scale, count', [('w32', 5), ('w64', 5), ('w128', 5), ('113m', 42), ('440m', 20)])
def test_all_arms_have_the_budget_of_uniform(scale, count):
    def settings(*arguments):
        return configure(variables_of(ROOT / 'train.py'), GPTConfig, argv=[file, *arguments])
    file = str(STUDY / f'scale_{scale}.py')
    plan = runpy.run_path(file, settings())
    arms = [[str(STUDY / f'{arm}.py')] for arm in plan['_arms']] + list(plan.get('_more_arms', {}).values())
    assert len(arms) == count
    for arm in arms:
        assert budget(shape_of({**settings(*arm), 'vocab_size': 257}))['non_embedding'] == plan['param_budget']


def test_the_published_report_is_that_of_the_results(tmp_path):
    for path in [*STUDY.glob('results-*.json'), STUDY / 'text.md']:
        shutil.copy(path, tmp_path)
    report.report(tmp_path)
    assert (tmp_path / 'results.md').read_text('utf-8') == (STUDY / 'results.md').read_text('utf-8')


def made_up(losses, param_budget=4**9):
    """A study with {arm: losses of the seeds 0, 1, ...}."""
    runs = [{'arm': arm, 'seed': seed, 'learning_rate': 0.1, 'val_loss': {'0': 9.0, '8': loss}}
            for arm, values in losses.items() for seed, loss in enumerate(values)]
    recipe = {'max_iters': 8, 'init_std': 1, 'param_budget': param_budget, 'dataset': 'none', 'dtype': 'none'}
    return {'recipe': recipe, 'arms': dict.fromkeys(losses), 'runs': runs, 'data': 'none', 'torch': 'none'}


def test_differences_are_paired_by_seed():
    study = made_up({'uniform': [1, 2, 4], 'step': [1.5, 2.25, 4.75, 0], 'cosine_reversed': [1, 1.5, 4.5]})
    differences = report.compare(study)
    assert differences == {'step': [0.5, 0.25, 0.75], 'cosine_reversed': [0, -0.5, 0.5],
                           'falling - rising': [0.5, 0.75, 0.25]}
    estimate = report.Estimate.of(differences['step'])
    assert (estimate.mean, estimate.error, estimate.df) == (0.5, pytest.approx(0.25 / math.sqrt(3)), 2)


@pytest.mark.parametrize('df, comparisons, limits', [
    (4, 1, (2.776, 3.761)), (4, 9, (5.437, 6.864)), (36, 1, (2.028, 2.879)), (36, 9, (2.950, 3.820))])
def test_chance_and_power_are_those_of_students_t(df, comparisons, limits):
    assert report.t_limits(df, comparisons) == pytest.approx(limits, rel=0.01)


def test_the_pooled_error_is_that_of_least_squares_with_a_constant_for_each_arm_and_each_seed():
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(4, 3)) + rng.normal(size=(4, 1)) + rng.normal(size=3)
    constants = np.concatenate((np.repeat(np.eye(4), 3, axis=0), np.tile(np.eye(3), (4, 1))), axis=1)
    rest = losses.flatten() - constants @ np.linalg.lstsq(constants, losses.flatten(), rcond=None)[0]
    error, df = report.pooled_error(made_up(dict(zip(('uniform', 'a', 'b', 'c'), losses.tolist()))))
    assert df == 6 and error == pytest.approx(math.sqrt(2 * (rest**2).sum() / 6 / 3))


def test_the_slope_over_sizes_is_weighted_by_the_errors(tmp_path):
    values = [(1, 0.1), (3, 0.1), (99, 1e9)]  # the last one says nothing
    slope = report.fit_line({x: report.Estimate(mean, error, 3) for x, (mean, error) in enumerate(values)})
    assert (slope.mean, slope.error, slope.df) == (pytest.approx(2), pytest.approx(0.1 * math.sqrt(2)), 9)
    for name, cosine, size in (('w32', [1.1, 2.2, 3.3], 4**9), ('w64', [1.3, 2.4, 3.5], 4**10)):
        study = made_up({'uniform': [1, 2, 3], 'cosine': cosine}, size)
        (tmp_path / f'results-{name}.json').write_text(json.dumps(study))
    report.report(tmp_path)
    assert '+0.2000 ±' in (tmp_path / 'results.md').read_text()
    pytest.importorskip('matplotlib')
    assert 'cosine' in (tmp_path / 'results.svg').read_text()
