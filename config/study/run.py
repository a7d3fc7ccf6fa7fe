"""
The study: how do other shapes of the FFN compare with the uniform one, at one budget, on the same data?

    python config/study/run.py --scale=w32     # then w64, w128; or 113m and 440m, on GPUs

A scale is a file beside this one: the data, the sizes, the learning rates to try, the arms. An arm is a file that
changes the shape alone. Trials choose the learning rate of each arm; then come the runs, seed by seed. Stop the study
at any moment: started again, it resumes interrupted runs and skips what is in results-SCALE.json.
"""

import hashlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import torch  # noqa: E402

import prepare  # noqa: E402
from configurator import check_range, configure, fail, fail_on, variables_of  # noqa: E402
from model import GPTConfig  # noqa: E402
from report import TRIAL_SEEDS, final_loss, report, write  # noqa: E402

scale = 'w32'  # w32, w64, w128, 113m, 440m, or the path of a file like scale_w32.py
jobs = 0  # runs at a time; 0: one on each GPU, or else on each core
results_dir = ''  # folder of the results; empty: that of this file

PLAN = {  # what a scale file says to this script, and the defaults
    '_data': {},  # arguments of prepare.prepare, to make the data set where it is missing
    '_arms': ['uniform'],  # names of arm files
    '_more_arms': {},  # {name: arguments of train.py}
    '_learning_rates': [],  # three or more, each by the same factor above the last: all arms have trials of these
    '_seeds': 5}  # runs of each arm, with the seeds 0, 1, ...
NOT_OF_THE_RECIPE = {'out_dir', 'init_from', 'seed', 'device', 'log_interval', 'sample_tokens', 'eval_only',
                     'wandb_log', 'wandb_project', 'wandb_run_name'}

# ----------------------------------------------------------------------------------------------------------------------
# The study, as it stands in results-SCALE.json


def settings_of(arguments):
    """The Config that train.py has with these arguments."""
    return configure(variables_of(ROOT / 'train.py'), GPTConfig, argv=list(map(str, arguments)))


def new_study(common, arms):
    """What all runs have in common, and what each arm changes of that: results-SCALE.json before its first run."""
    sha256 = hashlib.sha256()
    for path in sorted(Path('data', common['dataset']).glob('*.bin')):
        sha256.update(hashlib.sha256(path.read_bytes()).digest())
    changes = {arm: {name: value for name, value in settings_of(arguments).items() if value != common[name]}
               for arm, arguments in arms.items()}
    recipe = {name: value for name, value in common.items() if name not in NOT_OF_THE_RECIPE}
    return {'data': sha256.hexdigest(), 'torch': torch.__version__.split('+')[0], 'recipe': recipe, 'arms': changes,
            'runs': []}


def load_runs(study, path):
    """Add the arms and runs of a results file. Ends the program if those were trained otherwise."""
    with fail_on((ValueError, KeyError, TypeError), f'{path} is damaged: remove it, or give another --results_dir'):
        before = json.loads(path.read_text())
        then, now = ({**each['recipe'], **each['arms'], 'data': each['data'], 'torch': each['torch']}
                     for each in (before, study))
        study.update(arms={**before['arms'], **study['arms']}, runs=before['runs'])
    for name in then.keys() & now.keys():
        if then[name] != now[name]:
            fail(f'{path} is of {name}={then[name]}, and this is {name}={now[name]}: give another --results_dir')


def save(study, path):
    """JSON, with a line for each run."""
    runs = ',\n  '.join(json.dumps(run) for run in study['runs'])
    head = json.dumps({**study, 'runs': None}, indent=1)
    write(path, head.replace('"runs": null', f'"runs": [\n  {runs}\n ]') + '\n')


# ----------------------------------------------------------------------------------------------------------------------
# Which runs: a task is (arm, seed, learning rate)


def choose_rate(losses, arm, rates):
    """(learning rate with the lowest mean loss in the trials, or None while one is missing; tasks of the trials).
    While the best rate is at an edge of the grid, the grid grows there by its factor."""
    rates = list(rates)
    while True:
        trials = [(arm, seed, rate) for seed in TRIAL_SEEDS for rate in rates]
        if not losses.keys() >= set(trials):
            return None, trials
        best = min(rates, key=lambda rate: statistics.mean(losses[arm, seed, rate] for seed in TRIAL_SEEDS))
        if best == rates[0]:
            rates.insert(0, float(f'{rates[0] ** 2 / rates[1]:.3g}'))
        elif best == rates[-1]:
            rates.append(float(f'{rates[-1] ** 2 / rates[-2]:.3g}'))
        else:
            return best, trials


def tasks_of(study, plan, arms):
    """The tasks that are known by now and not done, in their order."""
    losses = {(run['arm'], run['seed'], run['learning_rate']): final_loss(run) for run in study['runs']}
    tasks, rates = [], dict.fromkeys(arms, study['recipe']['learning_rate'])
    for arm in arms if plan['_learning_rates'] else ():
        rates[arm], trials = choose_rate(losses, arm, plan['_learning_rates'])
        tasks += trials
    tasks += [(arm, seed, rates[arm]) for seed in range(plan['_seeds']) for arm in arms if rates[arm]]
    return [task for task in tasks if task not in losses]


def train_all(study, path, plan, arms, folder):
    """Train what is not finished, several runs at a time. On SIGINT or SIGTERM each of them saves its checkpoint."""
    gpus = torch.cuda.device_count()
    running, stopping = {}, []  # {slot: (process, task, folder of the run)}; why the study stops
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.append('stopped: start it again to go on'))
    while running or (tasks_of(study, plan, arms) and not stopping):
        for slot in set(range(jobs or gpus or os.cpu_count())) - running.keys():
            taken = [task for _, task, _ in running.values()]
            waiting = [task for task in tasks_of(study, plan, arms) if task not in taken]
            if waiting and not stopping:
                task, out = waiting[0], folder / '-'.join(map(str, waiting[0]))
                running[slot] = start(out, arms[task[0]], task, study['recipe'], slot if gpus else ''), task, out
        time.sleep(0.2)
        for slot, (process, task, out) in list(running.items()):
            if process.poll() is not None:
                del running[slot]
                run = result_of(out, task, study['recipe']['max_iters'])
                if run:
                    study['runs'].append(run)
                    save(study, path)
                    print(f'{out.name}: validation loss {final_loss(run):.4f}', flush=True)
                elif not stopping:
                    stopping.append(f'{out.name} ended before its last step: see the end of {out}/log.txt')
            elif stopping:
                process.terminate()  # again and again: train.py may not have been listening yet
    if stopping:
        fail(stopping[0])


def start(out, arguments, task, recipe, gpu):
    """Start train.py on one thread or one GPU."""
    out.mkdir(parents=True, exist_ok=True)
    _, seed, rate = task
    min_lr = rate * recipe['min_lr'] / recipe['learning_rate']
    command = [sys.executable, ROOT / 'train.py', *arguments, f'--out_dir={out}', '--init_from=auto', f'--seed={seed}',
               f'--learning_rate={rate}', f'--min_lr={min_lr:.6g}']
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': str(gpu)}
    with open(out / 'log.txt', 'a') as log:  # in a session of its own: Ctrl-C reaches it through train_all alone
        return subprocess.Popen(list(map(str, command)), env=env, stdout=log, stderr=log, start_new_session=True)


def result_of(out, task, max_iters):
    """The result of the run in this folder, for the arm uniform with rho of every layer. None if it has not ended."""
    try:
        lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
        run = {**dict(zip(('arm', 'seed', 'learning_rate'), task)),
               'val_loss': {str(line['step']): round(line['val_loss'], 6) for line in lines if 'val_loss' in line}}
        if str(max_iters) not in run['val_loss']:
            return None
        if run['arm'] == 'uniform' and run['seed'] not in TRIAL_SEEDS:
            with open(out / 'log.txt', 'a') as log:
                subprocess.run([sys.executable, str(ROOT / 'sample.py'), f'--out_dir={out}', '--probe=true'],
                               stdout=log, stderr=log)
            run['rho'] = [round(layer['rho'], 4) for layer in json.loads((out / 'probe.json').read_text())['layers']]
        return run
    except (OSError, ValueError, LookupError):
        return None


def main():
    configure(globals())
    check_range(globals(), 'jobs', least=0)
    path = HERE / f'scale_{scale}.py' if (HERE / f'scale_{scale}.py').exists() else Path(scale)
    common = settings_of([path])
    plan = {**PLAN, **runpy.run_path(str(path), common)}
    arms = {**{arm: [path, HERE / f'{arm}.py'] for arm in plan['_arms']},
            **{arm: [path, *arguments] for arm, arguments in plan['_more_arms'].items()}}
    if plan['_data'] and not Path('data', common['dataset']).exists():
        prepare.prepare(common['dataset'], **plan['_data'])
    prepare.read_meta(common['dataset'])  # ends the program if there are no data
    study, folder, name = new_study(common, arms), Path(results_dir or HERE), path.stem.removeprefix('scale_')
    results = folder / f'results-{name}.json'
    if results.exists():
        load_runs(study, results)
    with fail_on(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        train_all(study, results, plan, arms, Path(f'out-study-{name}'))
        report(folder)


if __name__ == '__main__':
    main()
