import functools
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
from configurator import configure
from conftest import pretrained
from model import GPT, GPTConfig, Titans, budget, ffn_widths, relative_widths, shape_of

ROOT = Path(model_file.__file__).parent
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('config/*.py'))
TINY = dict(vocab_size=97, block_size=32, n_layer=3, n_head=4, n_embd=32, ffn_width=96, ffn_multiple=8)


@functools.cache
def read_config(path, *flags):
    """The shape of `train.py config/NAME.py FLAGS`."""
    script = {'__file__': model_file.__file__}
    return shape_of(configure(script, GPTConfig, ('train.py', GPTConfig), [str(ROOT / path), *flags]))


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**TINY, **changes}))


def tokens(*shape):
    return torch.randint(TINY['vocab_size'], shape, generator=torch.Generator().manual_seed(1))


def assert_same(losses, weights, **tolerances):
    """That two losses have the same value and gradients."""
    torch.testing.assert_close(*losses)
    for a, b in zip(*(torch.autograd.grad(loss, weights) for loss in losses)):
        torch.testing.assert_close(a, b, **tolerances)


def parameters(config):
    """Parameters by component, counted in the model itself."""
    with torch.device('meta'):
        model = GPT(config)
    counts = {'gains': 0, 'mixer': 0, 'ffn': 0, 'embedding': 0}
    for name, weight in model.named_parameters():  # a tied matrix comes once
        kind = ('gains' if name.endswith('gain') else 'mixer' if '.mixer.' in name else 'ffn' if '.ffn.' in name
                else 'embedding')
        counts[kind] += weight.numel()
    return counts


@pytest.mark.parametrize('path', CONFIGS)
def test_budget_is_that_of_the_model_and_of_its_family(path):
    config = read_config(path)
    counted, computed = parameters(config), budget(config)
    assert counted == {name: computed[name] for name in counted}
    assert sum(counted.values()) == computed['total'] and config.init_std == 0.02
    baseline = budget(read_config(re.sub(r'/\w+?_(\d+[mb]).*', r'/standard_\1.py', path)))
    excess = computed['mixer'] + computed['ffn'] - baseline['mixer'] - baseline['ffn']
    assert excess == (1152 if config.mixer == 'titans' else 2_654_208 if 'authors' in path else 0)


def test_any_shape_keeps_the_total_and_falls():
    draw = random.Random(0)
    for _ in range(150):
        multiple, n_layer, n_mlp = draw.choice([1, 8, 16, 64]), draw.randint(2, 48), draw.randint(1, 8)
        start = draw.choice([1.0, 1.1, 1.25, 1.3, 1.5, 1.75])
        shape = dict(n_layer=n_layer, n_head=2, n_embd=64, n_mlp=n_mlp, ffn_multiple=multiple, taper_start=start,
                     taper_end=2 - start, taper=draw.choice(['linear', 'cosine', 'sigmoid', 'step']),
                     ffn_width=multiple * n_mlp * draw.randint(8, 40))
        counts = budget(GPTConfig(**shape))
        for ffn in ('hourglass', 'tapered', 'tapered_hourglass'):
            config = GPTConfig(**shape, ffn=ffn)
            widths = ffn_widths(config)
            layers = [sum(row) for row in widths]
            assert sum(layers) == shape['ffn_width'] * n_layer and budget(config) == counts
            assert all(width >= multiple and width % multiple == 0 for row in widths for width in row)
            assert all(a >= b for a, b in zip(layers, layers[1:]))
            assert all(max(row) - min(row) <= multiple and row == sorted(row, reverse=True) for row in widths)
            if 'tapered' in ffn and start * shape['ffn_width'] % multiple == 0:
                assert layers[0] == start * shape['ffn_width']
            for same in (dict(param_budget=counts['non_embedding']), dict(flops_budget=counts['flops_per_token'])):
                assert ffn_widths(GPTConfig(**{**shape, 'ffn_width': 0, **same}, ffn=ffn)) == widths


def test_a_width_wins_over_flops_and_flops_win_over_parameters():
    by_width, by_flops, by_parameters = dict(ffn_width=96), dict(flops_budget=500_000), dict(param_budget=100_000)
    for decides, others in ((by_width, {**by_flops, **by_parameters}), (by_flops, by_parameters)):
        alone = GPTConfig(**{**TINY, 'ffn_width': 0, **decides})
        assert ffn_widths(GPTConfig(**{**TINY, 'ffn_width': 0, **decides, **others})) == ffn_widths(alone)
        assert ffn_widths(GPTConfig(**{**TINY, 'ffn_width': 0, **others})) != ffn_widths(alone)


def test_tapers_are_those_of_the_paper():
    def sigma(x):
        return 1 / (1 + math.exp(-x))
    shape = dict(n_layer=24, n_head=2, n_embd=64, ffn_width=1600, ffn='tapered', taper_start=1.4, taper_end=0.6)
    formula = {'cosine': lambda t: 0.6 + 0.4 * (1 + math.cos(math.pi * t)),
               'linear': lambda t: 1.4 - 0.8 * t,
               'sigmoid': lambda t: 0.6 + 0.8 * (sigma(10 * (0.5 - t)) - sigma(-5)) / (sigma(5) - sigma(-5)),
               'step': lambda t: 1.4 if t < 8 / 23 else 1 if t < 16 / 23 else 0.6}
    for taper, weight in formula.items():
        config = GPTConfig(**shape, taper=taper)
        for layer, (exact, width) in enumerate(zip(relative_widths(config), ffn_widths(config), strict=True)):
            assert float(exact) == pytest.approx(weight(layer / 23), abs=1e-9)
            assert abs(sum(width) - 1600 * weight(layer / 23)) <= 16


@pytest.mark.parametrize('ffn_width, taper, expected', [
    (160, dict(taper='linear', taper_start=0.5, taper_end=1.5), [80, 96, 128, 144, 160, 176, 192, 224, 240]),
    (192, dict(taper='step', taper_start=0.75, taper_end=0.75), [144] * 3 + [288] * 3 + [144] * 3),
    (160, dict(taper='1.5,0.5,1,1,1,1,1,0.5,1.5'), [240, 80, 160, 160, 160, 160, 160, 80, 240]),
    (160, dict(taper='1,1,1,1,1,1,1.3333333,1.3333333,0.3333333'), [160] * 6 + [224, 208, 48])])
def test_tapers_may_rise_or_give_each_layer_its_width(ffn_width, taper, expected):
    shape = dict(n_layer=9, n_head=2, n_embd=64, n_mlp=3, ffn_width=ffn_width, **taper)
    layers = [sum(row) for row in ffn_widths(GPTConfig(**shape, ffn='tapered'))]
    assert layers == expected and sum(layers) == 9 * ffn_width
    assert [sum(row) for row in ffn_widths(GPTConfig(**shape, ffn='tapered_hourglass'))] == layers


def test_a_taper_of_ones_own_keeps_the_mean(monkeypatch):
    monkeypatch.setitem(model_file.TAPERS, 'square', lambda t: (1 - t) ** 2)  # its mean is not 1/2
    layers = [sum(row) for row in ffn_widths(GPTConfig(n_layer=6, ffn_width=1600, ffn='tapered', taper='square'))]
    assert sum(layers) == 6 * 1600 and layers == sorted(layers, reverse=True)
    assert layers[0] > 1.6 * 1600 and layers[0] / layers[-1] == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize('change', [  # the first name is that of the field to blame
    dict(n_head=5), dict(n_head=0), dict(n_kv_head=3), dict(n_kv_head=-1), dict(head_dim=7), dict(block_size=0),
    dict(memory_chunk=0), dict(dropout=1.0), dict(rope_theta=0.0), dict(norm_eps=0.0), dict(rope_scaling='8,1,4'),
    dict(rope_scaling='0,1,4,8192'), dict(rope_scaling='8,4,4,8192'),
    dict(init_std=-0.1), dict(mixer='mamba'), dict(norm='post'), dict(ffn='hourglas'),
    dict(n_kv_head=2, mixer='titans'), dict(qk_norm=True, mixer='titans'), dict(qk_norm=True, norm='olmo2'),
    dict(n_layer=1, ffn='tapered'), dict(taper='cubic', ffn='tapered'), dict(taper_end=0.0, ffn='tapered'),
    dict(taper_start=1.25, ffn='tapered'), dict(taper_start=1.25, taper='step', ffn='tapered', n_layer=2),
    dict(taper='step', ffn='tapered', taper_start=2.0, taper_end=1.0), dict(taper='1.5,1,0.5'),
    dict(taper='1.5,0.5', ffn='tapered'), dict(taper='1.5,1,0.6', ffn='tapered'), dict(taper='2,2,-1', ffn='tapered'),
    dict(taper='1.5,0,1.5', ffn='tapered'), dict(taper='1.5,1,0.5,', ffn='tapered'), dict(mlp_periods='1,2'),
    dict(mlp_periods='1,2', ffn='hourglass'), dict(mlp_periods='1,2,0,4', ffn='hourglass'),
    dict(mlp_periods='1,2,,4', ffn='hourglass'), dict(mlp_periods='1,2,1.5,4', ffn='hourglass'),
    dict(ffn_width=0), dict(ffn_width=100), dict(ffn_width=-96), dict(ffn_width=96, ffn='hourglass', n_mlp=13),
    dict(param_budget=4096, ffn_width=0), dict(flops_budget=50_000, ffn_width=0), dict(flops_budget=-1)])
def test_impossible_shapes_are_refused(change):
    with pytest.raises(ValueError, match=f'^{next(iter(change))}='):
        GPTConfig(**{**TINY, **change})


@pytest.mark.parametrize('name, flags, of_the_paper', [
    ('standard_113m', [], ['hourglass_113m', 'hourglass_113m_k4', 'hourglass_113m_k8']),
    ('standard_113m', ['--ffn=hourglass', '--same=flops'], ['hourglass_113m_k8']), ('tapered_hope_760m', [], []),
    ('olmo2_1b', ['--same=flops'], [])])
def test_command_lists_shapes_with_the_flags_that_make_them(run, name, flags, of_the_paper):
    """What a row says, and that the budget is met, is true of the model that its flags make."""
    path, rows = f'config/{name}.py', {}
    out, base, last = run('model.py', ROOT / path, '--shapes=true', *flags).stdout, budget(read_config(path)), 0
    for row in [line for line in out.splitlines() if '--n_layer' in line]:
        K, L, d_model, heads, d_h, mixer, ffn, params, flops, *_ = row.split()
        config = read_config(path, *re.findall(r'--\S+', row))
        counts, unit, widths = budget(config), 3 * config.n_embd * config.ffn_multiple, ffn_widths(config)
        size = counts['mixer'] + counts['ffn']
        assert [int(K), int(L)] == [len(widths[0]), len(widths)] and (60 <= int(d_model) / int(L) <= 250)
        assert [int(d_model), int(heads)] == [config.n_embd, config.n_head] and mixer == f'{counts["mixer"] / size:.1%}'
        assert flops == f'{counts["flops_per_token"] / base["flops_per_token"]:.3f}'
        assert abs(size - base['mixer'] - base['ffn']) <= unit / 2 or '--same=flops' in flags
        assert abs(counts['flops_per_token'] - base['flops_per_token']) <= 6 * unit or '--same=flops' not in flags
        assert counts['flops_per_token'] >= last
        last, rows[config.n_embd, str(widths)] = counts['flops_per_token'], config
    for config in list(rows.values())[::40]:
        assert parameters(config).items() <= budget(config).items()
    for paper in [read_config(f'config/{name}.py') for name in of_the_paper]:
        assert (paper.n_embd, str(ffn_widths(paper))) in rows
    assert len(rows) > 10


@pytest.mark.parametrize('same', ['parameters', 'flops'])
def test_a_listed_shape_trains(train, run, same):
    shape = '--vocab_size=257', '--n_embd=128', '--n_head=2', '--n_layer=2', '--ffn_width=128', '--block_size=16'
    rows = run('model.py', *shape, '--shapes=true', f'--same={same}').stdout.splitlines()
    flags = re.findall(r'--\S+', next(row for row in rows if '--n_mlp=2' in row))
    assert train(*shape, *flags, '--max_iters=1')['raw_model'].config.n_mlp == 2


def test_command_prints_the_budget_and_the_difference(run):
    files = [ROOT / f'config/{name}.py' for name in ('hourglass_113m_k4', 'standard_113m')]
    out = run('model.py', files[0], f'--baseline={files[1]}').stdout
    assert '528 x 4' in out and '0.457' in out and 'param_budget=113,246,208' in out
    row = next(line for line in out.splitlines() if 'non-embedding' in line)
    assert row.split() == ['non-embedding', '113,246,208', '66.1%', '113,246,208', '+0', '+0.000%']
    out = run('model.py', '--vocab_size=257', '--ffn_width=64', '--ffn=tapered').stdout
    assert re.findall(r'layer +(\d+)', out) == ['0', '1', '2', '3'] and 'ffn_width=64' in out
    assert re.search(r'1\.500.* 0\.500', out)  # the ends over the mean


@pytest.mark.parametrize('names, args', [
    ('n_head', ['--vocab_size=257', '--n_head=7']), ('data/bad/meta.json', ['--dataset=bad']),
    ('same', ['--vocab_size=257', '--shapes=true', '--same=size']),
    ('taper', ['--vocab_size=257', '--ffn=tapered', '--taper=1.5,0.5'])])
def test_command_names_what_is_wrong_in_one_line(run, tmp_path, names, args):
    (tmp_path / 'data/bad').mkdir(parents=True)
    (tmp_path / 'data/bad/meta.json').write_text('{')
    error = run('model.py', *args, status=1).stderr
    assert names in error and error.count('\n') == 1 and 'Traceback' not in error


def test_flops_count_every_product_of_matrices():
    config = GPTConfig(**{**TINY, 'n_kv_head': 2, 'head_dim': 16})
    matrices = sum(p.numel() for p in GPT(config).parameters())  # tied: the table counts once, as the head
    assert budget(config)['flops_per_token'] == 6 * matrices + 6 * 3 * 4 * 16 * 32


def test_flops_of_titans_are_those_of_its_products(monkeypatch):
    """Against what torch counts, where the products over a chunk are full squares and nothing is computed twice."""
    monkeypatch.setattr(model_file, 'checkpoint', lambda f, *args, **kwargs: f(*args))
    model = tiny(mixer='titans', memory_chunk=8)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens(1, 32))[0].flatten(0, 1), tokens(1, 32).flatten()).backward()
    c, C = model.config, model.config.memory_chunk
    squares = 2 * C * c.head_dim + C * C - C * C // 6  # of each head; and the convolution is no product of matrices
    expected = budget(c)['flops_per_token'] + 6 * c.n_layer * (c.n_head * squares - 3 * 4 * c.n_embd)
    assert counter.get_total_flops() / 32 == pytest.approx(expected, rel=0.02)


def test_norm_is_rms_norm_and_has_its_gradient():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    norm = model_file.Norm(GPTConfig(ffn_width=16, norm_eps=0.1), 8)
    assert torch.autograd.gradcheck(norm, x)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), eps=0.1))
    large = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 2000  # whose squares are inf in float16
    torch.testing.assert_close(norm(large.half()), norm(large).half(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize('change', [{}, dict(ffn='tapered_hourglass', qk_norm=True), dict(n_kv_head=2, head_dim=12),
                                    dict(mixer='titans', memory_chunk=4)])
def test_causal(change):
    model, idx = tiny(**change), tokens(2, 32)
    with torch.no_grad():
        before = model(idx)[0]
        for t in (0, 13, 31):
            changed = idx.clone()
            changed[:, t] = (changed[:, t] + 1) % 97
            after = model(changed)[0]
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t], after[:, t])


def greedy_without_cache(model, idx, n, reads_on=False):
    for _ in range(n):
        logits = model(idx if reads_on else idx[:, -model.config.block_size:])[0]
        idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize('change', [
    {}, dict(ffn='hourglass', qk_norm=True), dict(n_kv_head=1, tie_embeddings=False), dict(mixer='gated'),
    dict(norm='olmo2', n_kv_head=2), dict(mixer='titans', memory_chunk=8, ffn='hourglass')])
def test_cached_generation_equals_uncached(change):
    model, titans = tiny(**change), change.get('mixer') == 'titans'
    for weight in model.parameters():
        weight.data *= 1 if weight.dim() != 2 else 3 if titans else 5  # choices that vary
    for length, n in ((1, 60), (20, 12), (20, 13), (40, 9)):  # up to block_size, past it, and from beyond it
        expected = greedy_without_cache(model, tokens(3, length), n, reads_on=titans)
        assert torch.equal(model.generate(tokens(3, length), n, temperature=0.0), expected)
    assert len(expected.unique()) > 10


def test_generation_stops_and_leaves_the_model_as_it_was():
    model, prompt = tiny(dropout=0.5).train(), tokens(2, 5)
    free = greedy_without_cache(tiny(dropout=0.5).eval(), prompt, 20)
    stop = free[0, 8].item()
    stopped = model.generate(prompt, 20, temperature=0.0, stop_token=stop)
    for row, reference in zip(stopped, free):
        end = next((t for t in range(5, 25) if reference[t] == stop), 24)
        assert torch.equal(row[:end + 1], reference[:min(end + 1, len(row))]) and (row[end + 1:] == stop).all()
    assert model.training
    for bad in (dict(idx=prompt[:, :0]), dict(temperature=-1), dict(temperature=math.nan), dict(top_k=-1),
                dict(top_p=0.0)):
        with pytest.raises(ValueError):
            model.generate(**{'idx': prompt, 'max_new_tokens': 1, **bad})


@pytest.mark.parametrize('how, expected', [
    ({}, [0.4, 0.3, 0.2, 0.06, 0.04]), (dict(top_k=99), [0.4, 0.3, 0.2, 0.06, 0.04]),
    (dict(top_k=2), [0.4, 0.3, 0, 0, 0]), (dict(top_k=1), [1.0, 0, 0, 0, 0]), (dict(top_p=0.75), [0.4, 0.3, 0.2, 0, 0]),
    (dict(top_p=0.65), [0.4, 0.3, 0, 0, 0]), (dict(top_p=1e-300), [1.0, 0, 0, 0, 0]),  # in float32 it is 0
    (dict(temperature=0.5), [0.16, 0.09, 0.04, 0.0036, 0.0016]), (dict(temperature=1e-50), [1.0, 0, 0, 0, 0])])
def test_sampling_draws_from_what_it_says(how, expected):
    torch.manual_seed(0)
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log().expand(20_000, -1)
    drawn = model_file.sample(logits, **{'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, **how})
    actual, expected = torch.bincount(drawn.flatten(), minlength=5) / len(drawn), torch.tensor(expected)
    assert torch.allclose(actual, expected / expected.sum(), atol=0.015) and not actual[expected == 0].any()


def test_padding_is_neither_scored_nor_sampled():
    model = tiny(vocab_size=65)
    assert model.head.weight.shape[0] == 128
    with torch.no_grad():
        model.head.weight[65:] = 100 * model.head.weight[:63].abs().max()  # would win if it were seen
    idx = tokens(2, 32) % 65
    logits, _ = model(idx)
    assert logits.shape == (2, 32, 65)
    torch.testing.assert_close(model(idx, idx)[1], F.cross_entropy(logits.flatten(0, 1), idx.flatten()))
    assert model.generate(idx[:, :4], 200, temperature=5.0).max() < 65


@pytest.mark.parametrize('chunk', [7, 32, 2048])
def test_chunked_loss_is_cross_entropy(chunk, monkeypatch):
    monkeypatch.setattr(model_file, 'LOSS_CHUNK', chunk)
    model, idx, targets = tiny(), tokens(2, 32), tokens(3, 32)[1:]
    expected = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten())
    assert_same([2 * model(idx, targets)[1], 2 * expected], list(model.parameters()))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_loss_in_half_precision_has_the_gradient_of_float64(dtype):
    """Within the rounding of its entries, among which are tokens that are nearly certain and tokens of padding."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(50, 32).to(dtype), torch.randn(128, 32).to(dtype), torch.randint(97, (50,))
    x[::3] = 0.5 * weight[targets[::3]]
    x, weight, x64, weight64 = (y.requires_grad_() for y in (x, weight.float(), x.double(), weight.double()))
    F.cross_entropy((x64 @ weight64.T)[:, :97], targets).backward()
    model_file.CrossEntropy.apply(x, weight, targets, 97).backward()
    for rounded, exact in ((x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert (rounded - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32 and not weight.grad[97:].any()


def test_hourglass_is_a_stack_of_residual_mlps():
    model, x = tiny(ffn='hourglass'), torch.randn(2, 5, 32)
    ffn, expected = model.blocks[0].ffn, x
    for mlp in ffn.mlps:
        z = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gate, up, down = (getattr(mlp, f'{name}_proj').weight for name in ('gate', 'up', 'down'))
        expected = expected + (F.silu(z @ gate.T) * (z @ up.T)) @ down.T
    assert len(ffn.mlps) == 4 and [m.gate_proj.weight.shape for m in ffn.mlps] == [(24, 32)] * 4
    torch.testing.assert_close(ffn(x), expected)


@pytest.mark.parametrize('change', [dict(ffn='tapered_hourglass', qk_norm=True), dict(norm='olmo2', mixer='gated')])
def test_activations_are_what_the_compiled_model_keeps(change):
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    kept, config = [], GPTConfig(**{**TINY, 'n_layer': 2, 'block_size': 128, 'n_embd': 64, 'ffn_width': 160, **change})

    def run(graph, inputs):
        outputs = [node for node in graph.graph.output_node().args[0] if node and node.op != 'placeholder']
        values = [node.meta['val'] for node in outputs]
        storages = {v.untyped_storage()._cdata: v.untyped_storage() for v in values if isinstance(v, torch.Tensor)}
        kept.append(sum(storage.nbytes() for storage in storages.values()))
        return make_boxed_func(graph.forward)
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    torch.compile(GPT(config, torch.bfloat16), backend=backend, fullgraph=True)(tokens(16, 128), tokens(16, 128))
    counts = budget(config)
    weights = 2 * (counts['mixer'] + counts['ffn']) + 4 * counts['embedding']  # in bfloat16; the gradient of the head
    assert 16 * 128 * model_file.activations(config) + weights == pytest.approx(kept[0], rel=0.1)


def test_what_is_decayed():
    model = tiny(mixer='titans', norm='olmo2')
    names = {weight: name.split('.')[-1] for name, weight in model.named_parameters()}
    decayed, rest = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert decayed['weight_decay'] == 0.1 and {names[p] for p in decayed['params']} == {'weight', 'taps'}
    assert rest['weight_decay'] == 0 and {names[p] for p in rest['params']} == {'gain', 'memory', 'rate_bias'}


def test_initial_weights():
    model = GPT(GPTConfig(vocab_size=512, n_layer=6, n_head=4, n_embd=256, ffn='hourglass', ffn_width=1024))
    for name, weight in model.named_parameters():
        to_stream = 'o_proj' in name or 'down_proj' in name
        assert weight.std().item() == pytest.approx(0.02 / (6 * 5) ** 0.5 if to_stream else 0.02, rel=0.02), name


@pytest.mark.parametrize('change', [dict(ffn='tapered_hourglass'), dict(mixer='titans', memory_chunk=8)])
def test_bfloat16_is_close_and_trains_float32_weights(change):
    model, idx = tiny(**change), tokens(2, 32)
    low = GPT(model.config, torch.bfloat16)
    low.load_state_dict(model.state_dict())
    loss = low(idx, idx)[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(idx, idx)[1].item(), rel=5e-3)
    loss.backward()
    assert low.generate(idx[:, :4], 40).shape == (2, 44)
    assert all(weight.dtype == weight.grad.dtype == torch.float32 for weight in low.parameters())


@pytest.mark.parametrize('change, dynamic', [
    ({}, True),  # of any length at once
    (dict(mixer='gated', norm='olmo2'), False), (dict(mixer='titans', memory_chunk=8), False)])
def test_compiles_and_equals_eager(change, dynamic):
    model, idx = tiny(ffn='hourglass', n_layer=2, n_mlp=2, **change), tokens(2, 32)
    whole = change.get('mixer') != 'titans'  # its loop over chunks is left out
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=whole, dynamic=dynamic, backend='aot_eager')  # all but generating C++
    assert_same([f(idx, idx)[1] for f in (model, compiled)], list(model.parameters()), atol=1e-6, rtol=1e-4)


def titans(memory_chunk):
    """A mixer in float64 whose memory learns a lot."""
    torch.manual_seed(0)
    mixer = Titans(GPTConfig(**TINY, mixer='titans', memory_chunk=memory_chunk)).double()
    for name, weight in mixer.named_parameters():
        weight.data.normal_(std=0.2 if 'proj' in name else 0.5)
    with torch.no_grad():
        mixer.rate_bias[:] = torch.tensor([[0.03], [0.5], [0.9]]).logit().repeat(1, mixer.config.n_head).flatten()
    return mixer


def titans_by_the_token(mixer, x):
    """What Titans' docstring says, token by token, the memory's gradients by autograd."""
    c, (B, T, _) = mixer.config, x.shape
    inputs, rates = mixer.qkv_proj(x), mixer.rate_proj(x) + mixer.rate_bias
    W = [w.expand(B, -1, -1, -1) for w in mixer.memory]
    S, y = [torch.zeros_like(w) for w in W], []

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def recalled(W, x):
        return normed((W[1] @ F.silu(W[0] @ x.unsqueeze(-1))).squeeze(-1))

    for t in range(T):
        if t % c.memory_chunk == 0:
            start = W
        taps = sum(mixer.taps[3 - i] * inputs[:, t - i] for i in range(4) if t >= i)
        q, k, v = F.silu(taps).view(B, 3, c.n_head, -1).unbind(1)
        q, k = (x / x.square().sum(-1, keepdim=True).sqrt() for x in (q, k))
        alpha, eta, theta = rates[:, t].sigmoid().view(B, 3, c.n_head, 1, 1).unbind(1)
        theta = 0.1 * (1 - eta) * theta / c.memory_chunk
        loss = -(normed(v) * recalled(start, k)).sum()
        S = [eta * s - theta * g for s, g in zip(S, torch.autograd.grad(loss, start, create_graph=True))]
        W = [(1 - alpha) * w + s for w, s in zip(W, S)]
        y.append(recalled(W, q).flatten(1))
    return mixer.o_proj(torch.stack(y, dim=1) * mixer.gate_proj(x).sigmoid())


@pytest.mark.parametrize('chunk', [1, 16, 64, 7])
def test_titans_equal_a_loop_over_tokens(chunk):
    mixer, x = titans(chunk), torch.randn(2, 128, 32, dtype=torch.float64, requires_grad=True)
    cache, expected = {}, titans_by_the_token(mixer, x)
    assert expected.std() > 0.1
    parts = [mixer(part, None, cache) for part in x.split([21, 1, 1, 37, 5, 63], dim=1)]
    weights, direction = (x, *mixer.parameters()), torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), weights)
    for y in mixer(x), torch.cat(parts, dim=1):
        torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
        for a, b in zip(torch.autograd.grad((y * direction).sum(), weights), expected_gradients):
            torch.testing.assert_close(a, b, atol=1e-10 * b.abs().max().item(), rtol=0)


def test_titans_keep_little_for_the_backward_pass():
    def kept(chunk):
        storages = {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = titans(chunk)(torch.randn(1, 512, 32, dtype=torch.float64))
        return sum(storages.values()), y  # which keeps them alive
    assert kept(8)[0] < 1.1 * kept(64)[0]


@pytest.mark.parametrize('settings', [
    {}, dict(head_dim=16, num_key_value_heads=4, rms_norm_eps=1e-2, tie_word_embeddings=True, intermediate_size=96),
    dict(max_position_embeddings=256, dtype='bfloat16', rope_parameters=dict(
        rope_type='llama3', rope_theta=5e3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)),
    dict(kind='Olmo2'), dict(kind='Olmo2', rms_norm_eps=1e-2, tie_word_embeddings=True)])
def test_pretrained_models_are_those_of_transformers(settings, tmp_path):
    there, model = pretrained(tmp_path, **settings), GPT.from_pretrained(tmp_path)
    idx = torch.randint(131, (2, model.config.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = model(idx)[0], there.float()(idx).logits
    assert (logits - expected).abs().max() < 1e-4 and expected.std() > 0.3
    assert model.generate(idx[:, :5], 30, temperature=0.0).tolist() == there.generate(
        idx[:, :5], max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize('kind, names, value', [
    ('Llama', 'attention_bias', True), ('Llama', 'mlp_bias', True), ('Llama', 'hidden_act', 'gelu'),
    ('Llama', 'quantization_config', dict(quant_method='fp8')), ('Mixtral', 'architectures', ['MixtralForCausalLM']),
    ('Llama', 'rope_type', dict(rope_type='linear', factor=2.0, rope_theta=1e4)),
    ('Llama', 'partial_rotary_factor', dict(rope_type='default', partial_rotary_factor=0.5, rope_theta=1e4))])
def test_pretrained_models_with_other_parts_are_refused(kind, names, value, tmp_path):
    transformers = pytest.importorskip('transformers')
    settings = {'architectures': [f'{kind}ForCausalLM'], 'rope_parameters' if 'ro' in names else names: value}
    getattr(transformers, f'{kind}Config')(**settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f'^hf:{re.escape(str(tmp_path))}: {names}='):
        GPT.from_pretrained(tmp_path)


def test_pretrained_models_that_cannot_be_had(tmp_path, monkeypatch):
    pretrained(tmp_path)
    safetensors, weights = pytest.importorskip('safetensors.torch'), tmp_path / 'model.safetensors'
    whole = weights.read_bytes()

    def refused(names, name=tmp_path, **changes):
        with pytest.raises(ValueError) as error:
            GPT.from_pretrained(name, **changes)
        assert str(error.value).startswith(f'hf:{name}') and names in str(error.value) and '\n' not in str(error.value)

    refused('none', tmp_path / 'none')  # not a name of the hub either, so the network is not asked
    refused('block_size=65', block_size=65)
    weights.write_bytes(whole[:-100])
    refused('')
    tensors = safetensors.load(whole)
    tensors['model.layers.0.self_attn.q_proj.bias'] = tensors.pop('model.norm.weight')
    safetensors.save_file(tensors, weights, {'format': 'pt'})
    refused('model.norm.weight')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    refused('transformers')
