"""
What came out of the study: results.md and, where matplotlib is installed, results.svg, from every results-SCALE.json.

    python config/study/report.py                         # run.py does it too, after its last run
    python config/study/report.py --curves=out-a,out-b    # instead, draw the losses of any runs of train.py

What stands in results.md above its first section is ours, and kept.
"""

import functools
import io
import json
import math
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import numpy as np  # noqa: E402

from configurator import configure, fail  # noqa: E402

results_dir = ''  # the folder of the results; empty: that of this file
curves = ''  # folders of runs, separated by commas: only draw their losses, into curves.svg in the first of them

TRIAL_SEED = 100  # of the trials that choose learning rates and initial weights, and of no run that counts

# ----------------------------------------------------------------------------------------------------------------------
# Differences to uniform


def lengths(study):
    """The steps of the runs that count: all, and those of the short ones where there are any."""
    full = study['recipe']['max_iters']
    return [full, full // 4] if runs_of(study, 'uniform', full // 4) else [full]


def tokens_per_parameter(study, steps):
    recipe = study['recipe']
    tokens = recipe['batch_size'] * recipe['gradient_accumulation_steps'] * recipe['block_size']
    return steps * tokens / recipe['param_budget']


def runs_of(study, arm, max_iters):
    """{seed: {step: validation loss}}"""
    return {run['seed']: {int(step): loss for step, loss in run['val_loss'].items()} for run in study['runs']
            if (run['arm'], run['max_iters']) == (arm, max_iters) and run['seed'] != TRIAL_SEED}


def differences(study, arm, max_iters, step=None):
    """{seed: validation loss minus that of uniform, same seed, after a step}, the last one if None."""
    mine, uniform = runs_of(study, arm, max_iters), runs_of(study, 'uniform', max_iters)
    step = max_iters if step is None else step
    return {seed: mine[seed][step] - uniform[seed][step] for seed in mine if seed in uniform}


def mean_and_error(values):
    """The mean and its standard error, NaN for a single value."""
    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def compare(study, max_iters):
    """{arm: (differences to uniform by seed, their mean, its standard error)}, the best first; uniform is not among
    them."""
    found = {arm: differences(study, arm, max_iters) for arm in study['arms'] if arm != 'uniform'}
    rows = {arm: (values, *mean_and_error(values.values())) for arm, values in found.items() if values}
    return dict(sorted(rows.items(), key=lambda row: row[1][1]))


@functools.lru_cache(maxsize=None)
def errors_needed(seeds, comparisons):
    """How many standard errors a mean over seeds must be from 0 to be beyond chance: two-sided at the 5% level, as one
    of so many comparisons (Bonferroni), by Student's t."""
    if seeds < 2:
        return math.inf
    df, step = seeds - 1, 1e-3
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    t = inside = 0
    while inside < 1 - 0.05 / comparisons:
        inside += 2 * step * scale * (1 + (t + step / 2) ** 2 / df) ** (-(df + 1) / 2)
        t += step
    return t


def pooled_reach(study, max_iters, comparisons):
    """The difference of two arms that is beyond chance, as one of so many comparisons, by the scatter that is left of
    all arms together when each arm and each seed has a mean of its own."""
    runs = {arm: runs_of(study, arm, max_iters) for arm in study['arms']}
    seeds = set.intersection(*(set(of_seed) for of_seed in runs.values() if of_seed))
    losses = np.array([[of_seed[seed][max_iters] for seed in sorted(seeds)] for of_seed in runs.values() if of_seed])
    df = (len(losses) - 1) * (len(seeds) - 1)
    if df < 1:
        return math.inf
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    return errors_needed(df + 1, comparisons) * math.sqrt(2 * (rest**2).sum() / df / len(seeds))


# ----------------------------------------------------------------------------------------------------------------------
# In words and tables


def table(head, rows):
    """Markdown."""
    lines = [head, ['---'] + ['--:'] * (len(head) - 1), *rows]
    return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in lines)


def shown(values, mean, error, comparisons):
    """A difference, in bold where it is beyond chance among so many, in italics where it would be alone."""
    mark = ('**' if abs(mean) > errors_needed(len(values), comparisons) * error else
            '*' if abs(mean) > errors_needed(len(values), 1) * error else '')
    return f'{mark}{mean:+.4f}' + (f' ± {error:.4f}' if len(values) > 1 else '') + mark


def section(name, study):
    """The section of results.md on a scale."""
    recipe, full = study['recipe'], lengths(study)[0]
    rows, uniform = compare(study, full), runs_of(study, 'uniform', full)
    n, seconds = len(rows), sum(run['seconds'] for run in study['runs'])
    machines = ', '.join(sorted({run['machine'] for run in study['runs']}))
    tokens = [tokens_per_parameter(study, steps) for steps in lengths(study)]
    text = f"""## {name}: {tokens[0]:.1f} tokens a parameter

{recipe['param_budget']:,} parameters outside the embeddings in every arm, {full:,} steps on data/{recipe['dataset']} in
{recipe['dtype']}, torch {study['torch']}; {seconds / 3600:.1f} hours of training in all, on {machines}.
Validation loss in nats per token; differences to uniform are paired by seed, ± their standard error.

"""
    lines = []
    for arm in sorted(['uniform', *rows], key=lambda arm: rows[arm][1] if arm in rows else 0):
        runs = [run for run in study['runs'] if (run['arm'], run['max_iters']) == (arm, full)
                and run['seed'] in uniform]
        if runs:
            loss = statistics.mean(list(run['val_loss'].values())[-1] for run in runs)
            lines.append([arm, f'{runs[0]["learning_rate"]:g}', len(runs), f'{loss:.4f}',
                          shown(*rows[arm], n) if arm in rows else '', f'{math.exp(loss):.3f}',
                          f'{study["arms"][arm]["total"]:,}'])
    text += table(['arm', 'learning rate', 'seeds', 'validation loss', "minus uniform's", 'perplexity', 'parameters'],
                  lines)
    errors = [error for _, _, error in rows.values() if error == error]
    if errors:
        seeds, error = max(len(values) for values, _, _ in rows.values()), statistics.median(errors)
        needed = errors_needed(seeds, 1), errors_needed(seeds, n)
        text += f"""

In italics: beyond chance at the 5% level if it were the only comparison, {needed[0]:.1f} standard errors
with {seeds} seeds; in bold: with all {n} allowed for, {needed[1]:.1f}. At the scatter of the median arm,
a difference must reach {needed[0] * error:.4f} and {needed[1] * error:.4f} nats to be seen so."""
        single, among_all = pooled_reach(study, full, 1), pooled_reach(study, full, n)
        if single < math.inf:
            text += f"""
If all arms scatter alike, {single:.4f} and {among_all:.4f} would do, by the scatter of all of them together."""
    elif rows:
        text += '\n\nWith one seed, what is chance cannot be told.'
    if len(tokens) > 1:
        short = compare(study, lengths(study)[1])
        text += '\n\nFinished runs of two lengths, minus uniform\'s:\n\n' + table(
            ['tokens a parameter', *(f'{count:.1f}' for count in tokens[1::-1])],
            [[arm, shown(*short[arm], n), shown(*rows[arm], n)] for arm in short if arm in rows])
    trials = [run for run in study['runs'] if run['seed'] == TRIAL_SEED]
    if trials:
        text += '\n\n' + trial_table(trials)
    probed = [run for run in study['runs'] if 'rho' in run]
    if probed:
        text += '\n\n' + rho_table(study, probed)
    return text


def trial_table(trials):
    """The last losses of the trials, by arm and initial weights, for each learning rate."""
    rates, losses = sorted({run['learning_rate'] for run in trials}), {}
    for run in trials:
        losses.setdefault((run['arm'], run['init_std']), {})[run['learning_rate']] = list(run['val_loss'].values())[-1]
    rows = [[arm, f'{std:g}', *(f'{by_rate[rate]:.4f}' if rate in by_rate else '' for rate in rates)]
            for (arm, std), by_rate in losses.items()]
    return (f'The trials that chose learning rates and initial weights: {trials[0]["max_iters"]:,} steps, seed '
            f'{TRIAL_SEED}, validation loss.\n\n' + table(['arm', 'init_std', *(f'{rate:g}' for rate in rates)], rows))


def rho_table(study, probed):
    """rho_l = cosine(F, h) by layer, a mean over the seeds."""
    rows = []
    for arm in study['arms']:
        layers = list(zip(*(run['rho'] for run in probed if run['arm'] == arm)))
        if layers:
            means = [statistics.mean(layer) for layer in layers]
            rows.append([arm, *(f'{rho:+.3f}' for rho in means),
                         f'{statistics.correlation(range(len(means)), means):+.2f}'])
    most = max(len(row) for row in rows) - 2
    rows = [[*row[:-1], *[''] * (most + 2 - len(row)), row[-1]] for row in rows]
    return ('rho, the cosine of what the FFN of a layer adds with the stream that enters the layer, and how it is '
            'correlated with depth:\n\n' + table(['arm', *(f'layer {layer}' for layer in range(most)), 'depth'], rows))


# ----------------------------------------------------------------------------------------------------------------------
# In pictures


def course(study, arm, max_iters):
    """Tokens per parameter, mean differences to uniform and their errors, three arrays, at all steps but 0."""
    runs = [*runs_of(study, arm, max_iters).values(), *runs_of(study, 'uniform', max_iters).values()]
    rows = [(tokens_per_parameter(study, step), *mean_and_error(differences(study, arm, max_iters, step).values()))
            for step in sorted(set.intersection(*map(set, runs)) - {0})]
    return np.array(rows).T


def draw(studies, path):
    """Differences to uniform over tokens per parameter, a panel for each arm, all scales on its axes."""
    pyplot = plotting()
    names = list(dict.fromkeys(arm for study in studies.values() for arm in compare(study, lengths(study)[0])))
    if not pyplot or not names:
        return
    columns = min(4, len(names))
    figure, panels = pyplot.subplots(-(-len(names) // columns), columns, sharex=True, sharey=True, squeeze=False,
                                     figsize=(2.8 * columns, 0.4 + 2.2 * -(-len(names) // columns)),
                                     layout='constrained')
    for axes, arm in zip(panels.flat, names):
        for i, (name, study) in enumerate(studies.items()):
            for length in lengths(study):
                if not differences(study, arm, length):
                    continue
                x, means, errors = course(study, arm, length)
                if length == lengths(study)[0]:
                    axes.plot(x, means, color=f'C{i}', label=name)
                    axes.fill_between(x, means - errors, means + errors, color=f'C{i}', alpha=0.2, linewidth=0)
                axes.errorbar(x[-1], means[-1], errors[-1], fmt='o', capsize=2, markersize=4, color=f'C{i}')
        axes.axhline(0, color='gray', linewidth=0.8)
        axes.set(title=arm, xscale='log', ylim=(-0.03, 0.05))
        axes.set_xticks(ticks := [0.5, 1, 2, 5, 10, 20], [f'{tick:g}' for tick in ticks], minor=False)
        axes.minorticks_off()
    for axes in panels.flat[len(names):]:
        axes.axis('off')
    figure.supxlabel('tokens per parameter (o: the end of a schedule)')
    figure.supylabel('loss minus uniform\'s, nats')
    figure.legend(*next(axes.get_legend_handles_labels() for axes in panels.flat), loc='outside upper right', ncols=4)
    save_figure(figure, path)


def draw_curves(folders):
    """Validation and training losses of runs, into curves.svg in the first of their folders."""
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
    axes.set(xlabel='steps', ylabel='loss, nats per token')
    axes.legend()
    save_figure(figure, Path(folders[0], 'curves.svg'))


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


def write(path, text):
    temporary = path.with_suffix('.tmp')
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, path)


def report(folder):
    """Write results.md and results.svg in a folder, from the results-SCALE.json there that have runs to compare."""
    studies = {path.stem.removeprefix('results-'): json.loads(path.read_text())
               for path in sorted(folder.glob('results-*.json'))}
    studies = {name: study for name, study in studies.items() if runs_of(study, 'uniform', lengths(study)[0])}
    path = folder / 'results.md'
    ours = path.read_text(encoding='utf-8').partition('\n## ')[0] if path.exists() else '# Results'
    write(path, '\n\n'.join([ours.strip(), *(section(name, study) for name, study in studies.items())]) + '\n')
    draw(studies, folder / 'results.svg')


if __name__ == '__main__':
    configure(globals())
    if curves:
        draw_curves(curves.replace(',', ' ').split())
    else:
        report(Path(results_dir or HERE))
