"""
The study: how do other shapes of the FFN compare with the uniform one, at one budget, on the same data?

    python config/study/run.py                         # 20 tokens a parameter: 2 to 4 hours on two cores
    python config/study/run.py --scale=113m            # or 440m: on GPUs, with what the papers searched

An arm is a file beside this one, applied on top of that of the scale. Trials of a quarter of the steps choose what the
scale leaves open; then come the runs, all arms of a seed before the next seed. Each finished run is kept in
results-SCALE.json; stop and start again as you like, also on another machine: what is finished is skipped and what was
interrupted resumed. At the end report.py says what came out.
"""

import hashlib
import json
import os
import platform
import runpy
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import torch  # noqa: E402

import prepare  # noqa: E402
from configurator import check_range, configure, fail  # noqa: E402
from model import GPTConfig, budget, ffn_widths, resolve_device, shape_of  # noqa: E402
from report import TRIAL_SEED, report, section, write  # noqa: E402

scale = 'long'  # small, long, 113m, 440m, or the path of a file like scale_long.py
seeds = 5  # runs of each arm, with the seeds 0, 1, ...
only = ''  # the arms to train besides uniform, separated by commas; empty: all
jobs = 0  # runs at a time; 0: one on each GPU, or else on each core
compile = 'auto'  # torch.compile, which needs a C++ compiler on a CPU: auto (on a GPU only), true or false
results_dir = ''  # the folder of the results; empty: that of this file

configure(globals())

PLAN = {  # what a scale file says to this one, all optional
    '_arms',  # the files of its arms, without .py; else all
    '_more_arms',  # {name: arguments of train.py}
    '_learning_rates',  # three or more, by one factor: each arm has trials of these
    '_init_stds',  # the same for init_std, tried on uniform and hourglass_k8; where both choose one, all arms have it
    '_short_arms',  # arms that are also trained for a quarter of the steps, with three seeds
}

# ----------------------------------------------------------------------------------------------------------------------
# The arms


def plan_of(scale_file):
    """What a scale file says to run.py."""
    return {key: value for key, value in runpy.run_path(scale_file, settings_of([scale_file])).items() if key in PLAN}


def arms_of(plan):
    """{name: arguments of train.py}, uniform first."""
    files = {path.stem for path in HERE.glob('*.py') if not path.stem.startswith('scale_')} - {'run', 'report'}
    names = plan.get('_arms') or sorted(files, key=lambda name: (name != 'uniform', name))
    return {**{name: [str(HERE / f'{name}.py')] for name in names}, **plan.get('_more_arms', {})}


OF_AN_ARM = {field.name for field in fields(GPTConfig)} - {'vocab_size', 'block_size', 'dropout', 'init_std',
                                                           'init_scaled', 'norm_eps'}
NOT_OF_THE_RECIPE = {'out_dir', 'init_from', 'seed', 'compile', 'device', 'log_interval', 'sample_tokens', 'eval_only',
                     'wandb_log', 'wandb_project', 'wandb_run_name'}


def settings_of(arguments):
    """The settings that train.py would have with these arguments, a Config."""
    return configure({'__file__': str(ROOT / 'train.py')}, GPTConfig, argv=arguments)


def study_of(scale_file, arms):
    """What all runs have in common, and how each arm differs from uniform: results.json before the first run."""
    base, described = settings_of([scale_file, *arms['uniform']]), {}
    if base['dataset'] == 'stdlib_bytes' and not Path('data/stdlib_bytes').exists():
        prepare.prepare('stdlib_bytes')
    meta = prepare.read_meta(base['dataset'])  # ends the program before its first run if there are no data
    base['vocab_size'] = base['vocab_size'] or meta['vocab_size']
    if not base['param_budget']:
        fail(f'{scale_file}: state the param_budget that all arms are to have')
    for name, arguments in arms.items():
        settings = settings_of([scale_file, *arguments])
        settings['vocab_size'] = base['vocab_size']
        own = {key: value for key, value in settings.items() if value != base[key]}
        others = sorted(own.keys() - OF_AN_ARM)
        if others:
            fail(f'arm {name} has {", ".join(others)} of its own: arms may differ in their shape alone')
        try:
            shape = shape_of(settings)
        except ValueError as error:
            fail(f'arm {name} cannot be had at this scale, leave it out by --only=...: {error}')
        counts = budget(shape)
        if counts['non_embedding'] != base['param_budget']:
            fail(f'arm {name} has {counts["non_embedding"]:,} parameters outside the embeddings: that does not meet '
                 f'param_budget={base["param_budget"]:,}')
        described[name] = {'settings': own, 'widths': [sum(row) for row in ffn_widths(shape)], 'total': counts['total']}
    sha256 = hashlib.sha256()
    for path in sorted(Path('data', base['dataset']).glob('*.bin')):
        sha256.update(hashlib.sha256(path.read_bytes()).digest())
    recipe = {key: value for key, value in base.items() if key not in NOT_OF_THE_RECIPE}
    recipe['dtype'] = str(resolve_device(base['device'], base['dtype'])[1]).removeprefix('torch.')
    return {'data': sha256.hexdigest(), 'torch': torch.__version__.split('+')[0], 'recipe': recipe, 'arms': described,
            'runs': []}


def go_on(study, path):
    """The study with the runs of its file; refuses to mix what was not trained alike."""
    try:
        before = json.loads(path.read_text())
        both = {**study, 'arms': {**before['arms'], **study['arms']}, 'runs': before['runs'] + study['runs']}
        pairs = [(key, before[key], study[key]) for key in ('data', 'torch')]
        pairs += [(key, before['recipe'].get(key, value), value) for key, value in study['recipe'].items()]
        pairs += [(f'arm {name}', before['arms'][name], arm) for name, arm in study['arms'].items()
                  if name in before['arms']]
        section(path.stem, both)  # all that will be read of it is there
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        fail(f'{path} is damaged ({type(error).__name__}: {error}): remove it, or give another --results_dir')
    differences = [f'{what} was {then} and is {now}' for what, then, now in pairs if then != now]
    if differences:
        fail(f'{path} has runs that were trained otherwise: begin anew in another --results_dir, or mend this: '
             + '; '.join(differences))
    return both


# ----------------------------------------------------------------------------------------------------------------------
# Which runs. A task is what two runs of a study may differ in: {arm, seed, max_iters, learning_rate, init_std}.


def loss_of(study, task):
    """The last validation loss of the run for a task, or None if there is none yet."""
    for run in study['runs']:
        if task.items() <= run.items():
            return list(run['val_loss'].values())[-1]


def choose(study, task, name, values):
    """(the value of a setting that is best in trials, None while one is missing; the tasks of the trials). As long as
    the best of several is the first or the last, another follows, by the same factor; a single one needs no trial."""
    values = list(values)
    while len(values) > 1:
        tasks = [{**task, name: value} for value in values]
        losses = [loss_of(study, task) for task in tasks]
        if None in losses:
            return None, tasks
        best = losses.index(min(losses))
        if 0 < best < len(values) - 1:
            return values[best], tasks
        a, b = values[:2] if best == 0 else values[:-3:-1]
        values.insert(0 if best == 0 else len(values), float(f'{a * a / b:.6g}'))
    return values[0], []


def tasks_of(study, plan, arms, seeds):
    """All tasks that are known by now, in their order, also those that are done."""
    recipe, tasks = study['recipe'], []
    steps, std = recipe['max_iters'], recipe['init_std']

    def task(arm, seed, steps, rate=recipe['learning_rate']):
        return {'arm': arm, 'seed': seed, 'max_iters': steps, 'learning_rate': rate, 'init_std': std}

    def chosen(arm, name):
        best, trials = choose(study, task(arm, TRIAL_SEED, steps // 4), name, plan.get(f'_{name}s', [recipe[name]]))
        tasks.extend(trials)
        return best

    stds = {chosen(arm, 'init_std') for arm in ('uniform', 'hourglass_k8') if arm in arms}
    if None in stds:
        return tasks
    std = stds.pop() if len(stds) == 1 else std  # one for all arms, changed only where both want the same
    rates = {arm: chosen(arm, 'learning_rate') for arm in arms}
    for seed in range(seeds):
        for length, names in ((steps, arms), (steps // 4, plan.get('_short_arms', ()) if seed < 3 else ())):
            tasks += [task(arm, seed, length, rates[arm]) for arm in names if arm in arms and rates[arm]]
    return tasks


# ----------------------------------------------------------------------------------------------------------------------
# The runs


def train_all(study, path, scale_file, plan, arms, folder):
    """Train what is not finished, several runs at a time. Ctrl-C or SIGTERM lets each of them save its checkpoint."""
    def waiting():
        return [task for task in tasks_of(study, plan, arms, seeds) if loss_of(study, task) is None]

    gpus = torch.cuda.device_count()
    slots = jobs or gpus or os.cpu_count()
    print(f'{len(waiting())} runs to do, {slots} at a time; what trials choose may add to them', flush=True)
    running, stopping, failed = {}, [], None  # running: {slot: (process, task, folder of the run)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopping.append(number))
    try:
        while running or (waiting() and not stopping):
            for slot in set(range(slots)) - set(running):
                taken = [task for _, task, _ in running.values()]
                task = next((task for task in waiting() if task not in taken), None)
                if task and not stopping:
                    out = folder / '-'.join(f'{value:g}' if key != 'arm' else value for key, value in task.items())
                    running[slot] = start(out, scale_file, arms[task['arm']], task, study['recipe'],
                                          slot if gpus else None), task, out
            time.sleep(0.2)
            for slot, (process, task, out) in list(running.items()):
                if stopping and process.poll() is None:
                    process.terminate()  # as often as it takes: train.py may not have been listening yet
                elif process.poll() is not None:
                    del running[slot]
                    run = result_of(out, task, task['max_iters'] == study['recipe']['max_iters'])
                    if run:
                        study['runs'].append(run)
                        write(path, dump(study))
                        print(f'{out.name}: validation loss {loss_of(study, task):.4f}, {len(waiting())} runs to go',
                              flush=True)
                    elif not stopping:
                        failed = f'{out.name} left without finishing: see the end of {out}/log.txt'
                        stopping.append(failed)
    finally:
        for process, *_ in running.values():
            process.terminate()
    if failed:
        fail(failed)
    if stopping:
        print(f'stopped, {len(waiting())} runs to go: run it again to go on', flush=True)


def start(out, scale_file, arguments, task, recipe, gpu):
    """Start train.py, on one thread or one GPU."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in task.items() if name != 'arm'}
    settings['min_lr'] = float(f'{task["learning_rate"] * recipe["min_lr"] / recipe["learning_rate"]:.6g}')
    command = [sys.executable, str(ROOT / 'train.py'), scale_file, *arguments, f'--out_dir={out}', '--init_from=auto',
               f'--compile={compile}', *(f'--{name}={value}' for name, value in settings.items())]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **({} if gpu is None else {'CUDA_VISIBLE_DEVICES': str(gpu)})}
    with open(out / 'log.txt', 'a') as log:  # a session of its own: Ctrl-C reaches it through train_all alone
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def result_of(out, task, probed):
    """The task with the losses of the run in this folder, with rho of every layer if probed. None if the run has not
    come to its end."""
    try:
        lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
        val_loss = {str(line['step']): round(line['val_loss'], 6) for line in lines if 'val_loss' in line}
        logged = [line for line in lines if 'loss' in line]
        tokens, speed = logged[-1]['tokens'], statistics.median(line['tokens_per_second'] for line in logged)
        rho = {}
        if str(task['max_iters']) not in val_loss:
            return None
        if probed:
            with open(out / 'log.txt', 'a') as log:
                subprocess.run([sys.executable, str(ROOT / 'sample.py'), f'--out_dir={out}', '--probe=true'],
                               stdout=log, stderr=log)
            rho = {'rho': [round(layer['rho'], 4) for layer in json.loads((out / 'probe.json').read_text())['layers']]}
    except (OSError, ValueError, IndexError):
        return None
    gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if gpu else f'{os.cpu_count()} cores of {platform.machine()}'
    return {**task, 'val_loss': val_loss, **rho, 'seconds': round(tokens / speed), 'machine': machine}


def dump(study):
    """JSON, with a line for each arm and each run."""
    lines = {'arms': (f'"{name}": {json.dumps(arm)}' for name, arm in study['arms'].items()),
             'runs': map(json.dumps, study['runs'])}
    head = json.dumps({key: value for key, value in study.items() if key not in lines}, indent=1)[:-2]
    arms, runs = (',\n  '.join(lines[key]) for key in ('arms', 'runs'))
    return f'{head},\n "arms": {{\n  {arms}\n }},\n "runs": [\n  {runs}\n ]\n}}\n'


# ----------------------------------------------------------------------------------------------------------------------


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there are runs to stop, Ctrl-C just ends it
    check_range(globals(), 'seeds jobs', least=0)
    beside = HERE / f'scale_{scale}.py'
    name, scale_file = (scale, str(beside)) if beside.exists() else (Path(scale).stem, scale)
    plan = plan_of(scale_file)
    arms = arms_of(plan)
    wanted = {'uniform', *only.replace(',', ' ').split()} if only else set(arms)
    if not wanted <= set(arms):
        fail(f'only={only}: there is no arm {", ".join(sorted(wanted - set(arms)))}; there are {", ".join(arms)}')
    arms = {name: arguments for name, arguments in arms.items() if name in wanted}
    folder = Path(results_dir or HERE)
    path = folder / f'results-{name}.json'
    study = study_of(scale_file, arms)
    if path.exists():
        study = go_on(study, path)
    digest = hashlib.sha256(json.dumps([study[key] for key in ('data', 'torch', 'recipe')]).encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of the recipe's: what was begun with another is no beginning of these runs.
        train_all(study, path, scale_file, plan, arms, Path(f'out-study-{name}-{digest[:8]}'))
        report(folder)
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')


if __name__ == '__main__':
    main()
