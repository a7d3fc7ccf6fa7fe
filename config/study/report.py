"""
What came out of the study: results.md and, where matplotlib is installed, results.svg, from every results-SCALE.json.

    python config/study/report.py     # run.py does it too, after its last run

The prose of results.md is text.md: {SCALE_ARM} there becomes the arm's difference to uniform, {SCALE_paper_ARM} that of
the paper.
"""

import contextlib
import functools
import json
import math
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import numpy as np  # noqa: E402

from configurator import configure  # noqa: E402

results_dir = ''  # folder of the results; empty: that of this file

TRIAL_SEEDS = 100, 101, 102  # of the trials that choose learning rates, and of no run that counts
SIZES = 'w32', 'w64', 'w128'  # scales that differ in size alone
PAPERS = {  # arm: parameters, perplexity, perplexity of uniform
    'hourglass_k8': (113e6, 36.179, 36.441), 'moved': (113e6, 35.101, 36.441), 'step': (440e6, 15.96, 16.28),
    'cosine': (440e6, 14.44, 16.28), 'step_reversed': (440e6, 17.29, 16.28)}
BYTES_PER_TOKEN = 4.4  # of the BPE tokens that the papers' perplexities are of

# ----------------------------------------------------------------------------------------------------------------------
# Statistics


@functools.cache
def t_limits(df, comparisons=1):
    """In standard errors: the least mean that is beyond chance (Student's t, two-sided, 5% level, Bonferroni) and the
    least true difference that would be found so with a probability of 80%. From a million seeded draws."""
    rng = np.random.default_rng(0)
    noise, error = rng.standard_normal(10**6), np.sqrt(rng.chisquare(df, 10**6) / df)
    critical = np.quantile(np.abs(noise / error), 1 - 0.05 / comparisons)
    return critical, np.quantile(critical * error - noise, 0.8)


class Estimate:
    """A mean, its standard error, and the degrees of freedom of the error."""

    def __init__(self, mean, error, df):
        self.mean, self.error, self.df = mean, error, df

    @classmethod
    def of(cls, values):
        return cls(statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1)

    def reach(self):
        """Half the 95% interval."""
        return t_limits(self.df)[0] * self.error

    def __str__(self):
        return f'{self.mean:+.4f} ± {self.error:.4f}'

    def with_interval(self):
        return f'{self} ({self.mean - self.reach():+.4f} to {self.mean + self.reach():+.4f})'


def fit_line(points):
    """The slope of a line through {x: Estimate}, weighted by the errors."""
    xs, ys = np.array(list(points)), np.array([point.mean for point in points.values()])
    weights = np.array([point.error**-2 for point in points.values()])
    distance = xs - np.average(xs, weights=weights)
    spread = (weights * distance**2).sum()
    return Estimate((weights * distance * ys).sum() / spread, spread**-0.5, sum(point.df for point in points.values()))


# ----------------------------------------------------------------------------------------------------------------------
# What the runs of a study say


def final_loss(run):
    return list(run['val_loss'].values())[-1]


def losses(study, arm):
    """{seed: validation loss} of the runs that count."""
    return {run['seed']: final_loss(run) for run in study['runs'] if run['arm'] == arm
            and run['seed'] not in TRIAL_SEEDS and str(study['recipe']['max_iters']) in run['val_loss']}


def difference(study, arms, others):
    """The mean loss of arms minus that of others, for each seed that all have; of arms without runs, nothing."""
    mine, theirs = ([found for arm in group if (found := losses(study, arm))] for group in (arms, others))
    seeds = set.intersection(*map(set, mine + theirs)) if mine and theirs else ()
    return [statistics.mean(arm[seed] for arm in mine) - statistics.mean(arm[seed] for arm in theirs)
            for seed in sorted(seeds)]


def compare(study):
    """{arm: differences to uniform}, and those of falling tapers to rising ones, where there are two seeds at least."""
    found = {arm: difference(study, [arm], ['uniform']) for arm in study['arms'] if arm != 'uniform'}
    found['falling - rising'] = difference(study, ('step', 'cosine'), ('step_reversed', 'cosine_reversed'))
    return {arm: values for arm, values in found.items() if len(values) > 1}


def pooled_error(study):
    """(standard error of the difference of any two arms, its degrees of freedom), by the scatter of all runs around a
    mean for each arm and each seed."""
    rows = [found for arm in study['arms'] if (found := losses(study, arm))]
    seeds = set.intersection(*map(set, rows))
    table = np.array([[row[seed] for seed in seeds] for row in rows])
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    df = (len(rows) - 1) * (len(seeds) - 1)
    return (math.sqrt(2 * (rest**2).sum() / df / len(seeds)) if df else math.inf), df


def trials(study, arm):
    """{learning rate: mean validation loss over the trial seeds}"""
    rates, std = {}, study['recipe']['init_std']  # which the older trials tried too
    for run in study['runs']:
        if run['arm'] == arm and run['seed'] in TRIAL_SEEDS and run.get('init_std', std) == std:
            rates.setdefault(run['learning_rate'], []).append(final_loss(run))
    return {rate: statistics.mean(rates[rate]) for rate in sorted(rates)}


def as_in_paper(arm, uniform_loss):
    """The difference that a paper reports, in nats per byte, and as an equal relative change of uniform_loss."""
    _, perplexity, uniform = PAPERS[arm]
    return math.log(perplexity / uniform) / BYTES_PER_TOKEN, (math.log(perplexity, uniform) - 1) * uniform_loss


# ----------------------------------------------------------------------------------------------------------------------
# In words, tables and a picture


def table(head, rows):
    """Markdown."""
    lines = [head, ['---'] + ['--:'] * (len(head) - 1), *rows]
    return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in lines) + '\n'


def section(name, study):
    """The section of results.md on one scale."""
    recipe, rows, tried, probed = study['recipe'], [], [], []
    error, df = pooled_error(study)
    for arm, values in {'uniform': [], **compare(study)}.items():
        estimate = Estimate.of(values).with_interval() if values else ''
        found = losses(study, arm).values()
        rows.append([arm, estimate, len(values or found), f'{statistics.mean(found):.4f}' if found else ''])
        rates = trials(study, arm)
        if len(rates) > 1:
            best, second = sorted(rates.values())[:2]
            tried.append([arm, f'{second - best:+.4f}', ', '.join(f'{rate:g}: {rates[rate]:.4f}' for rate in rates)])
        rhos = [run['rho'] for run in study['runs'] if run['arm'] == arm and 'rho' in run]
        if rhos:
            probed.append([arm, ', '.join(f'{statistics.mean(layer):.3f}' for layer in zip(*rhos))])
    text = f"""
## {name}

{recipe['param_budget']:,} parameters outside the embeddings, {recipe['max_iters']:,} steps on data/{recipe['dataset']}
(SHA-256 {study['data'][:16]}...) in {recipe['dtype']}, torch {study['torch']}. Validation loss in nats per token;
differences are paired by seed, ± standard error (95% interval).

""" + table(['arm', "minus uniform's", 'seeds', 'validation loss'], rows)
    if df:
        single, among = t_limits(df), t_limits(df, len(study['arms']) - 1)
        text += f"""
If all arms scatter alike, a difference is beyond chance from {single[0] * error:.4f} on ({among[0] * error:.4f} among
all of these), and one of {single[1] * error:.4f} ({among[1] * error:.4f}) is found with a probability of 80%.
"""
    if tried:
        text += '\nThe trials, mean validation loss by learning rate:\n\n'
        text += table(['arm', 'second best minus best', 'all'], tried)
    if probed:
        text += '\nrho, the cosine of what an FFN adds with the stream that enters its layer:\n\n'
        text += table(['arm', 'layers from 0 on'], probed)
    return text


def sizes_section(sizes):
    """The section of results.md on how the differences change with size, from {log4 of the parameters: study}."""
    differences, rows = {size: compare(study) for size, study in sizes.items()}, []
    for arm in differences[min(sizes)]:
        found = {size: Estimate.of(of[arm]) for size, of in differences.items() if arm in of}
        last = found[max(found)]
        seen = t_limits(3)[1] * last.error * math.sqrt(last.df + 1) / 2
        slope = fit_line(found).with_interval() if len(found) > 1 else ''
        rows.append([arm, *(found.get(size, '') for size in sizes), slope, f'{seen:.4f}'])
    return '\n## By size\n\n' + table(
        ['arm', *(f'{study["recipe"]["param_budget"]:,}' for study in sizes.values()), 'slope per factor of four',
         'found at 80% power by 4 seeds'], rows)


def draw(studies, path):
    """Differences to uniform over the size of the model, a panel for each arm, with what the papers report."""
    from matplotlib import figure, rcParams
    rcParams.update({'svg.hashsalt': 'study', 'svg.fonttype': 'none'})  # the same file each time
    drawing = figure.Figure((14, 3.5), layout='constrained')
    panels = drawing.subplots(1, len(PAPERS), sharex=True, sharey=True)
    for axes, arm in zip(panels, PAPERS):
        for i, (name, study) in enumerate(studies.items()):
            size, values = study['recipe']['param_budget'], compare(study).get(arm)
            uniform_loss = statistics.mean(losses(study, 'uniform').values())
            if values:
                estimate = Estimate.of(values)
                axes.scatter([size] * len(values), values, s=4, color=f'C{i}', alpha=0.5)
                axes.errorbar(size, estimate.mean, estimate.reach(), fmt='o', capsize=3, color=f'C{i}', label=name)
        for value, unit, fill in zip(as_in_paper(arm, uniform_loss), ('nats per byte', 'relative loss'), ('k', 'w')):
            axes.plot(PAPERS[arm][0], value, 'ks', markerfacecolor=fill, label=f'paper, {unit}')
        axes.axhline(0, color='gray', linewidth=0.8)
        axes.set(title=arm, xscale='log', ylim=(-0.06, 0.06), xlabel='parameters')
    panels[0].set_ylabel('loss minus uniform\'s, nats per byte')
    drawing.legend(*panels[0].get_legend_handles_labels(), loc='outside right upper')
    drawing.savefig(path, metadata={'Date': None})


def report(folder):
    """Write results.md and results.svg in a folder, from the results-SCALE.json there that have runs to compare."""
    studies = {path.stem.removeprefix('results-'): json.loads(path.read_text())
               for path in sorted(folder.glob('results-*.json'))}
    studies = {name: study for name, study in studies.items() if compare(study)}
    numbers = {}
    for name, study in studies.items():
        numbers.update((f'{name}_{arm}', Estimate.of(values)) for arm, values in compare(study).items())
        uniform_loss = statistics.mean(losses(study, 'uniform').values())
        numbers.update((f'{name}_paper_{arm}', '{:+.4f} ({:+.4f})'.format(*as_in_paper(arm, uniform_loss)))
                       for arm in PAPERS)
    prose = folder / 'text.md'
    text = prose.read_text(encoding='utf-8').format_map(numbers) if prose.exists() else '# Results\n'
    sizes = {math.log(studies[name]['recipe']['param_budget'], 4): studies[name] for name in SIZES if name in studies}
    if sizes:
        text += sizes_section(sizes)
    write(folder / 'results.md', text + ''.join(section(name, study) for name, study in studies.items()))
    with contextlib.suppress(ImportError):  # matplotlib
        if studies:
            draw(studies, folder / 'results.svg')


def write(path, text):
    """Write a file that is whole at any moment."""
    temporary = path.with_suffix('.tmp')
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, path)


if __name__ == '__main__':
    configure(globals())
    report(Path(results_dir or HERE))
