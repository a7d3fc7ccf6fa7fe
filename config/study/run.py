"""
The study: train every arm with every seed, all arms of a seed before the next seed, and say what came out.

    python config/study/run.py                         # about three hours on two cores
    python config/study/run.py --scale=113m            # on GPUs, with data/fineweb10B, and with further arms
    python config/study/run.py --curves=out-a,out-b    # draw the losses of any runs of train.py

An arm is a file beside this one, applied on top of that of the scale. Each finished run is kept in results.json; stop
and start again as you like, also on another machine: what is finished is skipped and what was interrupted resumed. When
it ends, results.md has the table and, where matplotlib is installed, results.svg the figure.
"""

import hashlib
import io
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import prepare  # noqa: E402
from configurator import configure, fail  # noqa: E402
from model import GPTConfig, budget, ffn_widths, resolve_device, shape_of  # noqa: E402

scale = 'small'  # or 113m, or the path of a file like scale_small.py
seeds = 5  # runs of each arm, with the seeds 0, 1, ...
only = ''  # the arms to train besides uniform, separated by commas; empty: all
jobs = 0  # runs at a time; 0: one on each GPU, or else on each core
compile = 'auto'  # torch.compile, which needs a C++ compiler on a CPU: auto on a GPU only; or true, false
results_dir = ''  # where results go; empty: beside this file
curves = ''  # folders of runs, separated by commas: only draw their losses, into curves.svg

configure(globals())
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there are runs to stop, Ctrl-C just ends it
for name in ('seeds', 'jobs'):
    if globals()[name] < 0:
        fail(f'{name}={globals()[name]}: must be at least 0')

# ----------------------------------------------------------------------------------------------------------------------
# The arms


def searches():
    """Further arms for 113m, {name: arguments of train.py}: what Liao et al. and Bayat et al. searched, without what
    the files have. All meet the budget exactly."""
    found = {f'k{k}': ['--ffn=hourglass', f'--n_mlp={k}'] for k in (3, 4, 5, 6, 7, 9, 10)}
    for ratio, heads in ((0.75, 21), (0.5, 30), (0.42, 33), (0.25, 39)):
        # d_h / d_model at K = 4; attention, wider than the stream, takes what the FFN gives up
        found[f'narrow_{ratio}'] = ['--ffn=hourglass', '--n_mlp=4', '--head_dim=64', f'--n_head={heads}']
    for layers, width in ((14, 576), (9, 768), (7, 1152), (7, 1536), (5, 1536)):
        found[f'aspect_{width / layers:.0f}'] = ['--ffn=hourglass', '--n_mlp=4', f'--n_layer={layers}',
                                                 f'--n_embd={width}', '--head_dim=64', f'--n_head={width // 64}']
    for taper in ('linear', 'cosine', 'sigmoid'):
        for excess in (0.25, 0.375, 0.5, 0.625, 0.75):
            if taper == 'sigmoid' or excess != 0.5:
                found[f'{taper}_{1 + excess}'] = ['--ffn=tapered', f'--taper={taper}', f'--taper_start={1 + excess}',
                                                  f'--taper_end={1 - excess}']
    return found


def arms():
    """{name: arguments of train.py}, uniform first."""
    files = [path for path in sorted(HERE.glob('*.py')) if path.stem != 'run' and not path.stem.startswith('scale_')]
    files.sort(key=lambda path: path.stem != 'uniform')
    return {**{path.stem: [str(path)] for path in files}, **(searches() if scale == '113m' else {})}


def settings_of(arguments):
    """The settings that train.py would have with these arguments, a Config."""
    return configure({'__file__': str(ROOT / 'train.py')}, argv=[scale_file, *arguments])


def study_of(arms):
    """What all runs must have in common, and how each arm differs from uniform: the head of results.json."""
    base, described = settings_of(arms['uniform']), {}
    if base['dataset'] == 'stdlib' and not Path('data/stdlib').exists():
        prepare.prepare('stdlib')
    meta = prepare.read_meta(base['dataset'])
    base['vocab_size'] = base['vocab_size'] or meta['vocab_size']
    if not base['param_budget']:
        fail(f'{scale_file}: state the param_budget that all arms are to have')
    for name, arguments in arms.items():
        settings = settings_of(arguments)
        settings['vocab_size'] = base['vocab_size']
        own = {key: value for key, value in settings.items() if value != base[key]}
        others = sorted(own.keys() - OF_AN_ARM)
        if others:
            fail(f'arm {name} has {", ".join(others)} of its own: arms may differ in their shape alone')
        try:
            shape = shape_of(settings)
        except ValueError as error:
            fail(f'arm {name} cannot be had at this scale, leave it out by --only=...: {error}')
        if budget(shape)['non_embedding'] != base['param_budget']:
            fail(f'arm {name} has {budget(shape)["non_embedding"]:,} parameters outside the embeddings: that does not '
                 f'meet param_budget={base["param_budget"]:,}')
        described[name] = {'settings': own, 'widths': [sum(row) for row in ffn_widths(shape)],
                           'total': budget(shape)['total']}
    sha256 = hashlib.sha256()
    for path in sorted(Path('data', base['dataset']).glob('*.bin')):
        sha256.update(hashlib.sha256(path.read_bytes()).digest())
    recipe = {key: value for key, value in base.items() if key not in NOT_OF_THE_RECIPE}
    recipe['dtype'] = str(resolve_device(base['device'], base['dtype'])[1]).removeprefix('torch.')
    return {'data': sha256.hexdigest(), 'torch': torch.__version__.split('+')[0], 'recipe': recipe, 'arms': described,
            'runs': {}}


OF_AN_ARM = {field.name for field in fields(GPTConfig)} - {'vocab_size', 'block_size', 'dropout', 'init_std'}
NOT_OF_THE_RECIPE = {'out_dir', 'init_from', 'seed', 'compile', 'device', 'log_interval', 'sample_tokens', 'eval_only',
                     'wandb_log', 'wandb_project', 'wandb_run_name'}


def go_on(study, path):
    """The study with the runs that results.json has; refuses to mix what was not trained alike."""
    try:
        before = json.loads(path.read_text())
        both = {**study, 'arms': {**before['arms'], **study['arms']}, 'runs': before['runs']}
        pairs = [(key, before[key], study[key]) for key in ('data', 'torch')]
        pairs += [(key, before['recipe'].get(key, value), value) for key, value in study['recipe'].items()]
        pairs += [(f'arm {name}', before['arms'][name], arm) for name, arm in study['arms'].items()
                  if name in before['runs']]
        text(both)  # all that will be read of it is there
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        fail(f'{path} is damaged ({type(error).__name__}: {error}): remove it, or give another --results_dir')
    differences = [f'{what} was {then} and is {now}' for what, then, now in pairs if then != now]
    if differences:
        fail(f'{path} has runs that were trained otherwise: begin anew in another --results_dir, or mend this: '
             + '; '.join(differences))
    return both


# ----------------------------------------------------------------------------------------------------------------------
# The runs


def train_all(arms, study, folder):
    """Train what is not finished, several runs at a time. Ctrl-C or SIGTERM lets each of them save its checkpoint."""
    gpus = torch.cuda.device_count()
    slots = jobs or gpus or os.cpu_count()
    pending = [(seed, name) for seed in range(seeds) for name in arms if str(seed) not in study['runs'].get(name, {})]
    if pending:
        lock(folder)
    running, stopping, failed = {}, [], None  # running: {slot: (process, seed, name, folder of the run)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopping.append(number))
    try:
        while running or (pending and not stopping):
            for slot in set(range(slots)) - set(running):
                if pending and not stopping:
                    seed, name = pending.pop(0)
                    out = folder / f'{name}-{seed}'
                    running[slot] = start(out, [*arms[name], f'--seed={seed}'], slot if gpus else None), seed, name, out
            time.sleep(0.2)
            for slot, (process, seed, name, out) in list(running.items()):
                if stopping and process.poll() is None:
                    process.terminate()  # as often as it takes: train.py may not have been listening yet
                elif process.poll() is not None:
                    del running[slot]
                    run = result_of(out, study['recipe']['max_iters'])
                    if run:
                        study['runs'].setdefault(name, {})[str(seed)] = run
                        write(results / f'{stem}.json', json.dumps(study, indent=1))
                        print(f'{name}, seed {seed}: validation loss {run["val_loss"][-1]:.4f}, '
                              f'{len(pending) + len(running)} runs to go', flush=True)
                    elif not stopping:
                        failed = f'{name}, seed {seed} left without finishing: see the end of {out}/log.txt'
                        stopping.append(failed)
    finally:
        for process, *_ in running.values():
            process.terminate()
    if failed:
        fail(failed)
    if stopping:
        print(f'stopped, with {len(pending)} runs not begun: run it again to go on', flush=True)


def lock(folder):
    """Hold a folder for this process and the runs that it starts; ends the program if another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / 'lock', os.O_CREAT | os.O_RDWR)
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # no such locks on Windows
    except OSError:
        fail(f'{folder} is in use: another run.py, or runs that one has left behind, are still at work: '
             'wait for their end, or stop them')
    os.set_inheritable(file, True)


def start(out, arguments, gpu):
    """Start train.py, on one thread or one GPU."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / 'train.py'), scale_file, *arguments, f'--out_dir={out}', '--init_from=auto',
               f'--compile={compile}']
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **({} if gpu is None else {'CUDA_VISIBLE_DEVICES': str(gpu)})}
    with open(out / 'log.txt', 'a') as log:  # a session of its own: Ctrl-C reaches it through train_all alone
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True,
                                close_fds=False)  # they hold the lock as well


def result_of(out, max_iters):
    """The losses of the run in this folder, or None if it has not come to its end."""
    try:
        lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
        val_loss = {line['step']: round(line['val_loss'], 6) for line in lines if 'val_loss' in line}
        logged = [line for line in lines if 'loss' in line]
        if max(val_loss) != max_iters:
            return None
        tokens, speed = logged[-1]['tokens'], statistics.median(line['tokens_per_second'] for line in logged)
    except (OSError, ValueError, IndexError):
        return None
    gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if gpu else f'{os.cpu_count()} cores of {platform.machine()}'
    return {'step': list(val_loss), 'val_loss': list(val_loss.values()), 'seconds': round(tokens / speed),
            'machine': machine}


def write(path, text):
    temporary = path.with_suffix('.tmp')
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, path)


# ----------------------------------------------------------------------------------------------------------------------
# What came out


def compare(study):
    """{arm: (seeds, mean validation loss, mean difference to uniform, its standard error)}, differences paired by seed,
    the best arm first."""
    def last(name):
        return {seed: run['val_loss'][-1] for seed, run in study['runs'].get(name, {}).items()}

    rows, uniform = {}, last('uniform')
    for name in study['runs']:
        losses = {seed: loss for seed, loss in last(name).items() if seed in uniform}
        differences = [loss - uniform[seed] for seed, loss in losses.items()]
        if differences:
            error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
            rows[name] = len(differences), statistics.mean(losses.values()), statistics.mean(differences), error
    return dict(sorted(rows.items(), key=lambda row: row[1][2]))


def table(study):
    """The comparison as a Markdown table."""
    lines = ['| arm | seeds | validation loss | minus uniform\'s | perplexity | parameters |',
             '| --- | --: | --: | --: | --: | --: |']
    for name, (n, loss, difference, error) in compare(study).items():
        difference = '' if name == 'uniform' else f'{difference:+.4f}' + (f' ± {error:.4f}' if n > 1 else '')
        lines.append(f'| {name} | {n} | {loss:.4f} | {difference} | {math.exp(loss):.3f} | '
                     f'{study["arms"][name]["total"]:,} |')
    return '\n'.join(lines)


def text(study):
    """What results.md says."""
    runs = [run for arm in study['runs'].values() for run in arm.values()]
    recipe, machines = study['recipe'], ', '.join(sorted({run['machine'] for run in runs}))
    tokens = recipe['max_iters'] * recipe['batch_size'] * recipe['gradient_accumulation_steps'] * recipe['block_size']
    hours = sum(run['seconds'] for run in runs) / 3600
    return f"""# Results at scale {name_of_scale}

{len(runs)} runs of {tokens:,} tokens of data/{recipe['dataset']}, learning rate {recipe['learning_rate']},
{recipe['dtype']}, torch {study['torch']}; {hours:.1f} hours of training in all, on {machines}. Written by

    python config/study/run.py{'' if scale == 'small' else ' --scale=' + scale}

Validation loss in nats per token after the last step, a mean over the arm's seeds; differences to uniform are paired
by seed, ± their standard error. Parameters are all of them, embeddings included; those outside the embeddings are
{recipe['param_budget']:,} in every arm.

{table(study)}
"""


def draw(study):
    """The figure: differences to uniform after the last step, each seed a point, and over the course of training."""
    pyplot, rows = plotting(), {name: row for name, row in compare(study).items() if name != 'uniform'}
    if not pyplot or not rows:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout='constrained')
    for y, (name, (n, _, difference, error)) in enumerate(rows.items()):
        runs, uniform = study['runs'][name], study['runs']['uniform']
        curves = [[loss - base for loss, base in zip(run['val_loss'], uniform[seed]['val_loss'])]
                  for seed, run in runs.items() if seed in uniform]
        line = left.errorbar(difference, -y, xerr=error, fmt='o', capsize=3)
        left.plot([curve[-1] for curve in curves], [-y - 0.25] * n, '|', color=line[0].get_color(), markersize=5)
        steps = next(iter(runs.values()))['step']
        right.plot(steps[1:], [statistics.mean(at) for at in list(zip(*curves))[1:]], color=line[0].get_color(),
                   label=name)
    left.set_yticks([-y for y in range(len(rows))], list(rows))
    left.axvline(0, color='gray', linewidth=0.8)
    left.set_xlabel('validation loss minus uniform\'s, nats (mean, error; |: a seed)')
    right.axhline(0, color='gray', linewidth=0.8)
    right.set_xlabel('steps')
    right.set_ylabel('mean difference to uniform, nats')
    right.legend(fontsize=8, ncols=2)
    save_figure(figure, results / f'{stem}.svg')


def draw_curves(folders):
    """Validation and training losses of runs, into curves.svg."""
    pyplot = plotting()
    if not pyplot:
        fail('curves needs the package matplotlib: pip install matplotlib')
    figure, axes = pyplot.subplots(figsize=(8, 5), layout='constrained')
    for folder in folders:
        try:
            lines = [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]
        except (OSError, ValueError) as error:
            fail(f'{folder}/metrics.jsonl cannot be read: {error}')
        losses, evaluations = ([(line['step'], line[key]) for line in lines if key in line]
                               for key in ('loss', 'val_loss'))
        if not losses or not evaluations:
            fail(f'{folder}/metrics.jsonl has no losses yet')
        curve = axes.plot(*zip(*losses), alpha=0.4)[0]
        axes.plot(*zip(*evaluations), marker='.', color=curve.get_color(), label=f'{folder}, validation')
    axes.set_xlabel('steps')
    axes.set_ylabel('loss, nats per token')
    axes.legend()
    save_figure(figure, Path('curves.svg'))


def plotting():
    """matplotlib.pyplot, where it is installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use('svg')
    matplotlib.rcParams.update({'svg.hashsalt': 'study', 'svg.fonttype': 'none'})  # the same file each time, and small
    from matplotlib import pyplot
    return pyplot


def save_figure(figure, path):
    svg = io.StringIO()
    figure.savefig(svg, metadata={'Date': None})
    write(path, svg.getvalue())
    print(f'drew {path}')


try:
    if curves:
        draw_curves(curves.replace(',', ' ').split())
        sys.exit()
    name_of_scale = scale if scale in ('small', '113m') else Path(scale).stem
    scale_file = str(HERE / f'scale_{scale}.py') if scale == name_of_scale else scale
    stem = 'results' if scale == 'small' else f'results-{name_of_scale}'
    results = Path(results_dir or HERE)
    results.mkdir(parents=True, exist_ok=True)
    wanted = {'uniform', *only.replace(',', ' ').split()} if only else set(arms())
    if not wanted <= set(arms()):
        fail(f'only={only}: there is no arm {", ".join(wanted - set(arms()))}; there are {", ".join(arms())}')
    chosen = {name: arguments for name, arguments in arms().items() if name in wanted}
    study = study_of(chosen)
    if (results / f'{stem}.json').exists():
        study = go_on(study, results / f'{stem}.json')
    digest = hashlib.sha256(json.dumps([study[key] for key in ('data', 'torch', 'recipe')]).encode()).hexdigest()
    runs = Path(f'out-study-{name_of_scale}-{digest[:8]}')  # runs of another recipe are no beginnings of these
    train_all(chosen, study, runs)
    if study['runs']:
        print(table(study))
        write(results / f'{stem}.md', text(study))
        draw(study)
except (OSError, ValueError) as error:
    fail(f'{getattr(error, "filename", None) or scale_file}: {getattr(error, "strerror", None) or error}')
