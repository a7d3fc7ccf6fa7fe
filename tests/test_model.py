import functools
import json
import math
import platform
import random
import re
import subprocess
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
from configurator import configure
from conftest import pretrained
from model import GPT, GPTConfig, Titans, budget, deal, ffn_widths, shape_of, relative_widths

CONFIGS = sorted(Path(__file__).parent.parent.glob('config/*.py'))
TINY = dict(vocab_size=97, block_size=32, n_layer=3, n_head=4, n_embd=32, ffn_width=96, ffn_multiple=8)


@functools.cache
def read_config(path):
    settings = configure({'__file__': model_file.__file__}, GPTConfig, ('train.py', GPTConfig), [str(path)])
    return shape_of(settings)


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**TINY, **changes}))


def tokens(*shape):
    return torch.randint(TINY['vocab_size'], shape, generator=torch.Generator().manual_seed(1))


def test_norm_has_the_gradient_of_its_values():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(model_file.rms_norm, (x, 0.1))
    torch.testing.assert_close(model_file.rms_norm(x, 0.1), F.rms_norm(x, (8,), eps=0.1))


def test_norm_does_not_overflow_in_float16():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 2000
    torch.testing.assert_close(model_file.rms_norm(x.half(), 1e-6), F.rms_norm(x, (64,)).half(), atol=2e-3, rtol=2e-3)


# budgets and widths


def parameters(config):
    """Parameters by component, counted in the model itself."""
    with torch.device('meta'):
        model = GPT(config)
    named = dict(model.named_parameters())  # a tied matrix comes once
    counts = {'gains': 0, 'mixer': 0, 'ffn': 0, 'embedding': 0}
    for name, weight in named.items():
        kind = ('gains' if name.endswith('gain') else 'mixer' if '.mixer.' in name else 'ffn' if '.ffn.' in name
                else 'embedding')
        counts[kind] += weight.numel()
    return counts


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_budget_is_that_of_the_model(path):
    config = read_config(path)
    assert config.init_std == 0.02
    counted, computed = parameters(config), budget(config)
    assert counted == {name: computed[name] for name in counted}
    assert sum(counted.values()) == computed['total']


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_families_match_to_the_parameter(path):
    size, config = re.search(r'_(\d+[mb])', path.stem)[1], read_config(path)
    mine, baseline = budget(config), budget(read_config(path.with_name(f'standard_{size}.py')))
    difference = mine['mixer'] + mine['ffn'] - baseline['mixer'] - baseline['ffn']
    if config.mixer == 'titans':  # exact within its pair; across, as near as the multiple places its small parameters
        assert abs(difference) <= 3 * config.n_embd * config.ffn_multiple / 2
        pair = [budget(read_config(path.with_name(name))) for name in ('titans_760m.py', 'tapered_titans_760m.py')]
        assert pair[0] == pair[1]
    else:
        assert difference == 0


@pytest.mark.parametrize('change', [dict(ffn='tapered_hourglass', qk_norm=True), dict(mixer='gated'),
                                    dict(norm='olmo2', ffn='tapered')])
def test_activations_are_what_the_compiled_model_keeps(change):
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    kept = []

    def count(graph, inputs):
        values = [node.meta['val'] for node in graph.graph.output_node().args[0] if hasattr(node, 'meta')
                  and node.op != 'placeholder']
        storages = {v.untyped_storage()._cdata: v.untyped_storage() for v in values if isinstance(v, torch.Tensor)}
        kept.append(sum(storage.nbytes() for storage in storages.values()))
        return make_boxed_func(graph.forward)

    config = GPTConfig(**{**TINY, 'block_size': 128, 'n_layer': 2, 'n_embd': 64, 'ffn_width': 160, **change})
    backend = aot_autograd(fw_compiler=count, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
                           partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    torch.compile(GPT(config, torch.bfloat16), backend=backend, fullgraph=True)(tokens(16, 128), tokens(16, 128))
    states, activations = model_file.training_memory(config, 16)
    assert states == 16 * sum(p.numel() for p in GPT(config).parameters())
    assert activations == pytest.approx(kept[0], rel=0.1)


def test_flops_of_titans_are_those_of_its_products(monkeypatch):
    """Against what torch counts, where the products over a chunk are full squares and nothing is computed twice."""
    monkeypatch.setattr(model_file, 'checkpoint', lambda f, *args, **kwargs: f(*args))
    model = tiny(mixer='titans', memory_chunk=8)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens(1, 32))[0].flatten(0, 1), tokens(1, 32).flatten()).backward()
    c, C = model.config, model.config.memory_chunk
    # of each head, with the mixing of weights and momenta; and the convolution is no product of matrices
    squares = 2 * C * c.head_dim + C * C - C * C // 6 + 8 * c.head_dim ** 2 // C
    expected = budget(c)['flops_per_token'] + 6 * c.n_layer * (c.n_head * squares - 3 * 4 * c.n_embd)
    assert counter.get_total_flops() / 32 == pytest.approx(expected, rel=0.02)
    assert budget(GPTConfig(**{**TINY, 'mixer': 'titans', 'block_size': 4096})) == budget(
        GPTConfig(**{**TINY, 'mixer': 'titans', 'block_size': 64}))


def test_any_shape_keeps_the_total_and_falls():
    draw = random.Random(0)
    for _ in range(400):
        multiple, n_layer, n_mlp = draw.choice([1, 8, 16, 64]), draw.randint(2, 48), draw.randint(1, 8)
        start = draw.choice([1.0, 1.1, 1.25, 1.3, 1.5, 1.75])
        shape = dict(n_layer=n_layer, n_head=2, n_embd=64, n_mlp=n_mlp, ffn_multiple=multiple, taper_start=start,
                     taper_end=2 - start, taper=draw.choice(['linear', 'cosine', 'sigmoid', 'step']),
                     ffn_width=multiple * n_mlp * draw.randint(8, 40))
        total = shape['ffn_width'] * n_layer
        counts = budget(GPTConfig(**shape))
        for ffn in ('hourglass', 'tapered', 'tapered_hourglass'):
            config = GPTConfig(**shape, ffn=ffn)
            widths = ffn_widths(config)
            layers = [sum(row) for row in widths]
            assert sum(layers) == total
            assert all(width >= multiple and width % multiple == 0 for row in widths for width in row)
            assert all(a >= b for a, b in zip(layers, layers[1:]))
            assert all(max(row) - min(row) <= multiple and row == sorted(row, reverse=True) for row in widths)
            assert budget(config) == counts
            if 'tapered' in ffn and start * shape['ffn_width'] % multiple == 0:
                assert layers[0] == start * shape['ffn_width']
            by_budget = {**shape, 'ffn_width': 0, 'param_budget': counts['non_embedding']}
            assert ffn_widths(GPTConfig(**by_budget, ffn=ffn)) == widths


def test_budget_is_met_as_closely_as_the_multiple_allows():
    for param_budget in range(200_000, 210_000, 777):
        config = GPTConfig(n_layer=3, n_head=2, n_embd=64, ffn='tapered', param_budget=param_budget)
        assert abs(budget(config)['non_embedding'] - param_budget) <= 3 * 64 * 16 / 2


def test_tapers_are_those_of_the_paper():
    shape = dict(n_layer=24, n_head=2, n_embd=64, ffn_width=1600, ffn='tapered', taper_start=1.4, taper_end=0.6)
    formula = {'cosine': lambda t: 0.6 + 0.4 * (1 + math.cos(math.pi * t)),
               'linear': lambda t: 1.4 - 0.8 * t,
               'sigmoid': lambda t: 0.6 + 0.8 * (sigma(10 * (0.5 - t)) - sigma(-5)) / (sigma(5) - sigma(-5)),
               'step': lambda t: 1.4 if t < 8 / 23 else 1 if t < 16 / 23 else 0.6}

    def sigma(x):
        return 1 / (1 + math.exp(-x))

    for taper, weight in formula.items():
        config = GPTConfig(**shape, taper=taper)
        for layer, (exact, width) in enumerate(zip(relative_widths(config), ffn_widths(config), strict=True)):
            assert float(exact) == pytest.approx(weight(layer / 23), abs=1e-9)
            assert abs(sum(width) - 1600 * weight(layer / 23)) <= 16
    assert sum(relative_widths(config)) == 24


def test_rising_and_middle_heavy_tapers():
    shape = dict(n_layer=9, n_head=2, n_embd=64, ffn_width=160, ffn='tapered')
    rising = [sum(row) for row in ffn_widths(GPTConfig(**shape, taper_start=0.5, taper_end=1.5))]
    assert rising == sorted(rising) and rising[0] == 80 and rising[-1] == 240
    middle = ffn_widths(GPTConfig(**{**shape, 'ffn_width': 192}, taper='step', taper_start=0.75, taper_end=0.75))
    assert middle == [[144]] * 3 + [[288]] * 3 + [[144]] * 3


def test_deal_by_largest_remainder_ties_to_the_earlier():
    assert deal(7, [1, 1, 1]) == [3, 2, 2]
    assert deal(3, [1, 1]) == [2, 1]
    assert deal(10, [Fraction(3, 2), Fraction(1), Fraction(1, 2)]) == [5, 3, 2]
    assert deal(2, [3, 2, 1]) == [1, 1, 0]


@pytest.mark.parametrize('change, message', [
    (dict(n_head=5), "n_head=5: must divide n_embd=32"),
    (dict(n_kv_head=3), 'n_kv_head=3: must divide n_head=4'),
    (dict(head_dim=7), 'head_dim=7: must be even'),
    (dict(ffn='hourglas'), "ffn='hourglas': must be one of standard, hourglass"),
    (dict(ffn='tapered', taper='cubic'), "taper='cubic': must be one of"),
    (dict(ffn='tapered', n_layer=1), 'n_layer=1: a taper needs'),
    (dict(ffn='tapered', taper_end=0.0), 'taper_end=0.0: must be positive'),
    (dict(ffn='tapered', taper_end=0.75), 'taper_start=1.5: must be 2 - taper_end = 1.25'),
    (dict(ffn='tapered', taper='step', n_layer=2, taper_end=0.75), 'taper_start=1.5: must be 2 - taper_end = 1.25'),
    (dict(ffn='tapered', taper='step', taper_start=2.0, taper_end=1.0), 'taper_start=2.0: leaves'),
    (dict(param_budget=4096, ffn_width=0), 'param_budget=4096: the token mixers alone take 12,288'),
    (dict(ffn='hourglass', n_mlp=13), 'ffn_width=96: leaves some MLP less than one unit'),
    (dict(ffn_width=0), 'ffn_width=0: state the size'),
    (dict(ffn_width=100), 'ffn_width=100: must be a multiple of ffn_multiple=8'),
    (dict(mixer='mamba'), "mixer='mamba': must be one of attention, gated, titans"),
    (dict(norm='post'), "norm='post': must be one of pre, olmo2"),
    (dict(mixer='titans', n_kv_head=2), 'n_kv_head=2: must be 0 with mixer=titans'),
    (dict(mixer='titans', qk_norm=True), 'qk_norm=True: must be off with mixer=titans'),
    (dict(norm='olmo2', qk_norm=True), 'qk_norm=True: must be off with norm=olmo2'),
    (dict(memory_chunk=0), 'memory_chunk=0: must be at least 1'),
    (dict(mlp_periods='1,2'), "mlp_periods='1,2': needs ffn=hourglass"),
    (dict(ffn='hourglass', mlp_periods='1,2'), "mlp_periods='1,2': must have a number for each of n_mlp=4 MLPs"),
    (dict(ffn='hourglass', mlp_periods='1,2,0,4'), "mlp_periods='1,2,0,4': must be numbers of steps"),
    (dict(ffn='hourglass', mlp_periods='1,2,,4'), "mlp_periods='1,2,,4': must be numbers of steps"),
    (dict(dropout=1.0), 'dropout=1.0'), (dict(block_size=0), 'block_size=0'), (dict(rope_theta=0.0), 'rope_theta=0.0'),
    (dict(norm_eps=0.0), 'norm_eps=0.0: must be positive'),
    (dict(rope_scaling='8,1,4'), "rope_scaling='8,1,4': must be four numbers"),
])
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{**TINY, **change})
    assert str(error.value).startswith(message)


def test_a_width_wins_over_a_budget():
    assert ffn_widths(GPTConfig(**TINY, param_budget=100_000)) == ffn_widths(GPTConfig(**TINY)) == [[96]] * 3


def test_flops_count_every_product_of_matrices():
    config = GPTConfig(**{**TINY, 'n_kv_head': 2, 'head_dim': 16})
    matrices = sum(p.numel() for p in GPT(config).parameters())  # tied: the table counts once, as the head
    assert budget(config)['flops_per_token'] == 6 * matrices + 6 * 3 * 4 * 16 * 32


def test_command_prints_the_budget_and_the_difference(run):
    out = run('model.py', 'config/hourglass_113m_k4.py', '--baseline=config/standard_113m.py').stdout
    assert '528 x 4' in out and '0.457, below 1: an hourglass' in out
    row = next(line for line in out.splitlines() if 'non-embedding' in line)
    assert row.split() == ['non-embedding', '113,246,208', '66.1%', '113,246,208', '+0', '+0.000%']
    assert '2.55 GiB for weights, gradients and AdamW' in out and 'the activations of 8 x 4096 tokens' in out
    shape = '--vocab_size=257', 'config/study/scale_small.py'
    out = run('model.py', *shape, f'--baseline={",".join(shape)},config/study/moved.py').stdout
    assert [line.split()[3] for line in out.splitlines() if 'embedding' in line] == ['921,600', '51,200']
    widths = run('model.py', '--vocab_size=257', '--ffn_width=64').stdout  # outdoes a budget that is only the default
    assert widths.count('################################################  64') == 4
    assert 'n_head=7' in run('model.py', 'config/standard_113m.py', '--n_head=7', status=1).stderr
    Path('data/bad').mkdir(parents=True)
    Path('data/bad/meta.json').write_text('{')
    for args, message in ((['--dataset=bad'], 'data/bad/meta.json is damaged'),
                          (['--batch_size=0'], 'batch_size=0: must')):
        done = run('model.py', '--ffn_width=64', *args, status=1)
        assert message in done.stderr and done.stderr.count('\n') == 1


# what the model computes


@pytest.mark.parametrize('change', [{}, dict(ffn='tapered_hourglass', qk_norm=True), dict(n_kv_head=2, head_dim=12)])
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


def greedy_without_cache(model, idx, n):
    for _ in range(n):
        logits = model(idx[:, -model.config.block_size:])[0]
        idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize('change', [{}, dict(ffn='hourglass', qk_norm=True), dict(n_kv_head=1, tie_embeddings=False),
                                    dict(mixer='gated'), dict(norm='olmo2', n_kv_head=2)])
def test_cached_generation_equals_uncached(change):
    model = tiny(**change)
    for weight in model.parameters():
        weight.data *= 5  # choices that vary
    for length, n in ((1, 60), (20, 12), (20, 13), (40, 9)):  # up to block_size, past it, and from beyond it
        prompt = tokens(3, length)
        expected = greedy_without_cache(model, prompt, n)
        assert torch.equal(model.generate(prompt, n, temperature=0.0), expected)
    assert len(expected.unique()) > 10


def test_titans_generate_past_block_size():
    model = tiny(mixer='titans', memory_chunk=8, ffn='hourglass')
    for weight in model.parameters():
        weight.data *= 3 if weight.dim() == 2 else 1
    for length, n in ((1, 40), (16, 9), (50, 7)):
        expected = tokens(3, length)
        for _ in range(n):
            expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(expected[:, :length], n, temperature=0.0), expected)
    assert len(expected.unique()) > 10


@pytest.mark.parametrize('fast, dtype', [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_computes_in_half_precision(monkeypatch, fast, dtype):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: fast)
    assert model_file.resolve_device() == ('cuda', dtype)


def test_generation_stops_and_leaves_the_model_as_it_was():
    model, prompt = tiny().train(), tokens(2, 5)
    free = model.generate(prompt, 20, temperature=0.0)
    stop = free[0, 8].item()
    stopped = model.generate(prompt, 20, temperature=0.0, stop_token=stop)
    for row, reference in zip(stopped, free):
        end = next((t for t in range(5, 25) if reference[t] == stop), 24)
        assert torch.equal(row[:end + 1], reference[:min(end + 1, len(row))]) and (row[end + 1:] == stop).all()
    assert model.training
    with pytest.raises(ValueError, match='prompt is empty'):
        model.generate(prompt[:, :0], 1)
    with pytest.raises(ValueError, match='temperature=-1'):
        model.generate(prompt, 1, temperature=-1)


def test_sampling_draws_from_what_it_says():
    torch.manual_seed(0)
    p = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = p.log().expand(20_000, -1)

    def frequencies(**how):
        drawn = model_file.sample(logits, **{'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, **how})
        return torch.bincount(drawn.flatten(), minlength=5) / len(drawn)

    def close(actual, expected):
        expected = torch.tensor(expected)
        return torch.allclose(actual, expected / expected.sum(), atol=0.015) and not actual[expected == 0].any()

    assert close(frequencies(), [0.4, 0.3, 0.2, 0.06, 0.04])
    assert close(frequencies(temperature=0.5), [0.16, 0.09, 0.04, 0.0036, 0.0016])
    assert close(frequencies(top_k=2), [0.4, 0.3, 0, 0, 0])
    assert close(frequencies(top_p=0.75), [0.4, 0.3, 0.2, 0, 0])
    assert close(frequencies(top_p=0.65), [0.4, 0.3, 0, 0, 0])
    assert frequencies(top_p=1e-300)[0] == 1  # in float32 it is 0
    assert close(frequencies(top_k=1), [1, 0, 0, 0, 0])
    assert close(frequencies(top_k=99), [0.4, 0.3, 0.2, 0.06, 0.04])


def test_padding_is_neither_scored_nor_sampled():
    model = tiny(vocab_size=65)
    assert model.head.weight.shape[0] == 128
    with torch.no_grad():
        model.head.weight[65:] = 100 * model.head.weight[:63].abs().max()  # would win if it were seen
    idx = tokens(2, 32) % 65
    logits, _ = model(idx)
    assert logits.shape == (2, 32, 65)
    _, loss = model(idx, idx)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), idx.flatten()))
    assert model.generate(idx[:, :4], 200, temperature=5.0).max() < 65


@pytest.mark.parametrize('chunk', [7, 32, 2048])
def test_chunked_loss_is_cross_entropy(chunk, monkeypatch):
    monkeypatch.setattr(model_file, 'LOSS_CHUNK', chunk)
    model, idx, targets = tiny(), tokens(2, 32), tokens(3, 32)[1:]
    (2 * model(idx, targets)[1]).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    loss = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten())
    (2 * loss).backward()
    torch.testing.assert_close(model(idx, targets)[1], loss)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name])
    each = model(idx, targets, reduction='none')[1]
    assert each.shape == targets.shape
    torch.testing.assert_close(each.mean(), loss)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_loss_in_half_precision_has_the_gradient_of_float32(dtype):
    """Within the rounding of its entries, among which are tokens that are nearly certain and tokens of padding."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(50, 32).to(dtype), torch.randn(128, 32).to(dtype), torch.randint(97, (50,))
    x[::3] = (0.5 * weight[targets[::3]]).clone()
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    F.cross_entropy((exact[0] @ exact[1].T)[:, :97], targets).backward()
    x, weight = x.requires_grad_(), weight.float().requires_grad_()
    model_file.cross_entropy(x, weight, targets, 97).backward()
    assert x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    for rounded, gradient in zip((x, weight), exact):
        error = (rounded.grad - gradient.grad).norm() / gradient.grad.norm()
        assert error < 2 * torch.finfo(dtype).eps, error
    assert not weight.grad[97:].any()


def test_grouped_query_heads_equal_full_attention_with_heads_repeated():
    grouped, full = tiny(n_kv_head=2), tiny(param_budget=0)
    state = grouped.state_dict()
    for name, weight in state.items():
        if 'k_proj' in name or 'v_proj' in name:
            state[name] = weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens(2, 32))[0], full(tokens(2, 32))[0])


def test_hourglass_of_one_is_the_standard_model_bit_for_bit():
    standard, hourglass, idx = tiny(), tiny(ffn='hourglass', n_mlp=1), tokens(2, 32)
    losses = [model(idx, idx)[1] for model in (standard, hourglass)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for a, b in zip(standard.parameters(), hourglass.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


def test_hourglass_is_a_stack_of_residual_mlps():
    model, x = tiny(ffn='hourglass'), torch.randn(2, 5, 32)
    ffn, expected = model.blocks[0].ffn, x
    for mlp in ffn.mlps:
        z = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gate, up, down = (getattr(mlp, f'{name}_proj').weight for name in ('gate', 'up', 'down'))
        expected = expected + (F.silu(z @ gate.T) * (z @ up.T)) @ down.T
    assert len(ffn.mlps) == 4 and [m.gate_proj.weight.shape for m in ffn.mlps] == [(24, 32)] * 4
    torch.testing.assert_close(ffn(x), expected)


# Titans


def titans(memory_chunk, **changes):
    """A mixer in float64 whose memory learns a lot."""
    torch.manual_seed(0)
    mixer = Titans(GPTConfig(**{**TINY, 'mixer': 'titans', 'memory_chunk': memory_chunk, **changes})).double()
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
    """In outputs and gradients, read at once or, from a cache, in parts."""
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


def test_titans_remember_at_once():
    """As they begin, untrained, they know which of 8 values they have read with a key. Guessing gives an eighth."""
    d, pairs, generator = 32, 8, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    mixer = Titans(GPTConfig(**{**TINY, 'mixer': 'titans', 'n_embd': 2 * d, 'n_head': 1, 'head_dim': d}))
    keys, values = torch.randn(2, 100, pairs, d, generator=generator)
    read_key, read_value = torch.eye(2 * d).chunk(2)
    with torch.no_grad():
        mixer.qkv_proj.weight.copy_(torch.cat((read_key, read_key, read_value)))
        mixer.taps.copy_(torch.tensor([[0.0], [0.0], [0.0], [1.0]]).expand_as(mixer.taps))
        mixer.rate_proj.weight.zero_()
        mixer.gate_proj.weight.zero_()
        mixer.o_proj.weight.copy_(read_key.T)
        asked = torch.cat((keys, torch.zeros_like(values)), dim=-1)
        y = mixer(torch.cat((torch.cat((keys, values), dim=-1), asked), dim=1))[:, pairs:, :d]
    guesses = (y @ F.normalize(F.silu(values), dim=-1).mT).argmax(-1)
    assert (guesses == torch.arange(pairs)).float().mean() > 0.7


def test_what_titans_read_out_does_not_fade():
    model = tiny(mixer='titans', block_size=4096, n_layer=1)
    squares = model.blocks[0].mixer(torch.randn(1, 4096, 32)).square().mean((0, 2))
    assert 1 / 9 < squares[-400:].mean() / squares[:400].mean() < 9


def test_titans_keep_little_for_the_backward_pass(monkeypatch):
    """Less than their chunks have by a factor that grows with their number."""
    mixer, x = titans(8), torch.randn(1, 512, 32, dtype=torch.float64)

    def kept():
        storages = {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = mixer(x)
        return sum(storages.values()), y
    little, _ = kept()
    monkeypatch.setattr(model_file, 'checkpoint', lambda f, *args, **kwargs: f(*args))
    all_of_it, _ = kept()
    assert little < all_of_it / 6


def test_titans_are_causal():
    mixer, x = titans(4), torch.randn(1, 14, 32, dtype=torch.float64)
    changed = torch.cat((x[:, :6], torch.randn(1, 8, 32, dtype=torch.float64)), dim=1)
    same = (mixer(x) == mixer(changed)).all(-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 8


def test_memory_is_float32_in_bfloat16():
    torch.manual_seed(0)
    mixer = Titans(GPTConfig(**{**TINY, 'mixer': 'titans', 'memory_chunk': 8}))
    cache, x = {}, torch.randn(2, 20, 32)
    y = mixer(x.bfloat16(), None, cache)
    assert y.dtype == cache['inputs'].dtype == torch.bfloat16
    assert cache['weights'].dtype == cache['start'].dtype == torch.float32
    assert (y - mixer(x)).abs().max() < 0.04 * mixer(x).abs().max()


def test_what_is_decayed():
    model = tiny(mixer='titans', norm='olmo2')
    decayed, rest = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert decayed['weight_decay'] == 0.1 and rest['weight_decay'] == 0
    rest = {name for name, weight in model.named_parameters() if any(weight is w for w in rest['params'])}
    assert {name.rsplit('.', 1)[1] for name in rest} == {'gain', 'memory', 'rate_bias'}
    assert len(decayed['params']) + len(rest) == len(list(model.parameters()))


def test_initial_weights():
    model = GPT(GPTConfig(vocab_size=512, n_layer=6, n_head=4, n_embd=256, ffn='hourglass', ffn_width=1024))
    for name, weight in model.named_parameters():
        to_stream = 'o_proj' in name or 'down_proj' in name
        assert weight.std().item() == pytest.approx(0.02 / (6 * 5) ** 0.5 if to_stream else 0.02, rel=0.02), name


def test_bfloat16_is_close_and_trains_float32_weights():
    model = tiny(ffn='tapered_hourglass')
    low, idx = GPT(model.config, torch.bfloat16), tokens(2, 32)
    low.load_state_dict(model.state_dict())
    loss = low(idx, idx)[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(idx, idx)[1].item(), rel=5e-3)
    loss.backward()
    assert all(weight.dtype == weight.grad.dtype == torch.float32 for weight in low.parameters())
    assert low.generate(idx[:, :4], 40).shape == (2, 44)
    assert low.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize('change, dynamic', [
    ({}, True),  # of any length at once
    (dict(mixer='gated', norm='olmo2'), False), (dict(mixer='titans', memory_chunk=8), False)])
def test_compiles_and_equals_eager(change, dynamic):
    model, idx = tiny(ffn='hourglass', n_layer=2, n_mlp=2, **change), tokens(2, 32)
    whole = change.get('mixer') != 'titans'  # its loop over chunks is left out
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=whole, dynamic=dynamic, backend='aot_eager')  # all but generating C++
    losses = [f(idx, idx)[1] for f in (model, compiled)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize('capability, first', [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_cudnn_is_preferred_on_hopper_alone(monkeypatch, capability, first):
    order = torch._C._get_sdp_priority_order
    before, model, idx = order(), tiny(n_layer=1), tokens(2, 32)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    with model_file.prefer_cudnn('cuda'):
        assert (order()[0] == SDPBackend.CUDNN_ATTENTION.value) == first and sorted(order()) == sorted(before)
        torch.testing.assert_close(compiled(idx)[0], model(idx)[0])
    assert order() == before


def test_shape_of_a_checkpoint_is_valid_again():
    for change in (dict(mixer='titans'), dict(norm='olmo2', n_kv_head=2), dict(ffn='hourglass', mlp_periods='4,1,2,1'),
                   dict(param_budget=100_000, ffn_width=0, mixer='gated')):
        config = GPTConfig(**{**TINY, **change})
        assert GPTConfig(**asdict(config)) == config


LLAMA3_ROPE = dict(rope_type='llama3', rope_theta=5e3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)


@pytest.mark.parametrize('settings', [
    {}, dict(head_dim=16, num_key_value_heads=4, rms_norm_eps=1e-2, tie_word_embeddings=True, intermediate_size=96),
    dict(rope_parameters=LLAMA3_ROPE, max_position_embeddings=256, dtype='bfloat16'),
    dict(kind='Olmo2'), dict(kind='Olmo2', rms_norm_eps=1e-2, tie_word_embeddings=True)])
def test_pretrained_models_are_those_of_transformers(settings, tmp_path):
    there, model = pretrained(tmp_path, **settings), GPT.from_pretrained(tmp_path)
    again = GPT(GPTConfig(**json.loads(json.dumps(asdict(model.config)))))  # as from a checkpoint
    again.load_state_dict(model.state_dict())
    idx = torch.randint(131, (2, model.config.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = model(idx)[0], there.float()(idx).logits
        assert torch.equal(again(idx)[0], logits)
    assert (logits - expected).abs().max() < 1e-4 and expected.std() > 0.3
    assert model.generate(idx[:, :5], 30, temperature=0.0).tolist() == there.generate(
        idx[:, :5], max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize('kind, settings, message', [
    ('Llama', dict(attention_bias=True), 'attention_bias=True: must be False'),
    ('Llama', dict(mlp_bias=True), 'mlp_bias=True: must be False'),
    ('Llama', dict(hidden_act='gelu'), "hidden_act='gelu': must be 'silu'"),
    ('Llama', dict(rope_parameters=dict(rope_type='linear', factor=2.0, rope_theta=1e4)), "rope_type='linear': must "),
    ('Llama', dict(rope_parameters=dict(rope_type='default', partial_rotary_factor=0.5, rope_theta=1e4)),
     'partial_rotary_factor=0.5: must be 1.0'),
    ('Llama', dict(quantization_config=dict(quant_method='fp8')), 'quantization_config='),
    ('Mistral', dict(sliding_window=32), 'sliding_window=32: must be None'),
    ('Mixtral', dict(num_local_experts=2, sliding_window=None), 'num_local_experts=2: must be None'),
    ('Mistral', dict(sliding_window=None), r"architectures=\['MistralForCausalLM'\]: must be \['Llama"),
])
def test_pretrained_models_with_other_parts_are_refused(kind, settings, message, tmp_path):
    transformers = pytest.importorskip('transformers')
    settings = getattr(transformers, f'{kind}Config')(architectures=[f'{kind}ForCausalLM'], **settings)
    settings.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f'^hf:{re.escape(str(tmp_path))}: {message}'):
        GPT.from_pretrained(tmp_path)


def test_pretrained_models_that_cannot_be_had(tmp_path, monkeypatch):
    pretrained(tmp_path)

    def refused(message, name=tmp_path, **changes):
        with pytest.raises(ValueError) as error:
            GPT.from_pretrained(name, **changes)
        assert str(error.value).startswith(f'hf:{name}') and message in str(error.value), error.value
        assert '\n' not in str(error.value)

    refused('no such folder, and of the hub: ', tmp_path / 'none')  # no name of the hub, so the network is not asked
    refused('block_size=65: it was trained with at most 64', block_size=65)
    with monkeypatch.context() as patch:
        patch.setattr(model_file, 'free_memory', lambda: 3e5)
        refused('reading it takes 0.0 GB of memory, and 0.0 GB are free')
    weights = tmp_path / 'model.safetensors'
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused('')
    safetensors = pytest.importorskip('safetensors.torch')
    tensors = safetensors.load(whole)
    tensors['model.layers.0.self_attn.q_proj.bias'] = tensors.pop('model.norm.weight')
    safetensors.save_file(tensors, weights, {'format': 'pt'})
    refused('its file of weights has missing keys: model.norm.weight')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    refused('needs the package transformers: pip install transformers')


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='elsewhere nothing is done')
def test_freed_memory_is_kept():
    code = """if True:
        import resource, torch
        from model import keep_freed_memory

        def page_faults_of_a_tensor(size):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(size)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        keep_freed_memory()
        large, half = [page_faults_of_a_tensor(size) for size in (2**25, 2**24)]
        assert large > 10 * half, (large, half)"""
    subprocess.run([sys.executable, '-c', code], cwd=Path(model_file.__file__).parent, check=True)
