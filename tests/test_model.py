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
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
from configurator import configure
from conftest import as_llama
from model import GPT, GPTConfig, Titans, budget, deal, ffn_widths, shape_of, layer_weights

CONFIGS = sorted(Path(__file__).parent.parent.glob('config/*.py'))
TINY = dict(vocab_size=97, block_size=32, n_layer=3, n_head=4, n_embd=32, ffn_width=96, ffn_multiple=8)


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
    assert torch.autograd.gradcheck(model_file.rms_norm, (x,))
    torch.testing.assert_close(model_file.rms_norm(x), F.rms_norm(x, (8,), eps=1e-6))


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


def test_flops_of_titans_are_those_of_its_products():
    """Against what torch counts, where the products over a chunk are full squares."""
    model = tiny(mixer='titans', memory_chunk=8)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens(1, 32))[0].flatten(0, 1), tokens(1, 32).flatten()).backward()
    c, C = model.config, model.config.memory_chunk
    squares = 2 * C * c.head_dim + C * C - C * C // 6  # of each head; and the convolution is no product of matrices
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
            widths = ffn_widths(GPTConfig(**shape, ffn=ffn))
            layers = [sum(row) for row in widths]
            assert sum(layers) == total
            assert all(width >= multiple and width % multiple == 0 for row in widths for width in row)
            assert all(a >= b for a, b in zip(layers, layers[1:]))
            assert all(max(row) - min(row) <= multiple and row == sorted(row, reverse=True) for row in widths)
            assert budget(GPTConfig(**shape, ffn=ffn)) == counts
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
        for layer, (exact, width) in enumerate(zip(layer_weights(config), ffn_widths(config), strict=True)):
            assert float(exact) == pytest.approx(weight(layer / 23), abs=1e-9)
            assert abs(sum(width) - 1600 * weight(layer / 23)) <= 16
    assert sum(layer_weights(config)) == 24


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
    shape = '--vocab_size=257', 'config/study/scale_small.py'
    out = run('model.py', *shape, f'--baseline={",".join(shape)},config/study/moved.py').stdout
    assert [line.split()[3] for line in out.splitlines() if 'embedding' in line] == ['921,600', '40,960']
    widths = run('model.py', '--vocab_size=257', '--ffn_width=64').stdout  # outdoes a budget that is only the default
    assert widths.count('################################################  64') == 4
    assert 'n_head=7' in run('model.py', 'config/standard_113m.py', '--n_head=7', status=1).stderr


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
    for length, n in ((1, 60), (16, 9), (50, 21)):
        expected = tokens(3, length)
        for _ in range(n):
            expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(expected[:, :length], n, temperature=0.0), expected)
    assert len(expected.unique()) > 10


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
        mixer.rate_bias[:] = torch.tensor([[0.03], [0.5], [0.999]]).logit().repeat(1, mixer.config.n_head).flatten()
    return mixer


def titans_by_the_token(mixer, x):
    """What Titans' docstring says, token by token, its gradients by autograd."""
    c, (B, T, _) = mixer.config, x.shape
    inputs, rates = mixer.qkv_proj(x), mixer.rate_proj(x) + mixer.rate_bias
    W = [w.expand(B, -1, -1, -1) for w in mixer.memory]
    S, y = [torch.zeros_like(w) for w in W], []

    def read(W, x):
        return (W[1] @ F.silu(W[0] @ x.unsqueeze(-1))).squeeze(-1)

    for t in range(T):
        if t % c.memory_chunk == 0:
            start = [w.detach().requires_grad_() for w in W]
        taps = sum(mixer.taps[3 - i] * inputs[:, t - i] for i in range(4) if t >= i)
        q, k, v = F.silu(taps).view(B, 3, c.n_head, -1).unbind(1)
        q, k = (x / x.square().sum(-1, keepdim=True).sqrt() for x in (q, k))
        alpha, eta, theta = rates[:, t].sigmoid().view(B, 3, c.n_head, 1, 1).unbind(1)
        theta = 0.1 * (1 - eta) * theta / c.memory_chunk
        gradients = torch.autograd.grad((read(start, k) - v).square().sum() / 2, start)
        S = [(eta * s - theta * g).detach() for s, g in zip(S, gradients)]
        W = [((1 - alpha) * w + s).detach() for w, s in zip(W, S)]
        read_out = read(W, q)
        y.append((read_out / (read_out.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1))
    return mixer.o_proj(torch.stack(y, dim=1) * mixer.gate_proj(x).sigmoid())


@pytest.mark.parametrize('chunk', [1, 16, 64, 7])
def test_titans_equal_a_loop_over_tokens(chunk):
    mixer, x = titans(chunk), torch.randn(2, 128, 32, dtype=torch.float64)
    expected = titans_by_the_token(mixer, x)
    assert expected.std() > 0.1
    torch.testing.assert_close(mixer(x), expected, atol=1e-10, rtol=0)
    cache = {}
    parts = [mixer(part, None, cache) for part in (x[:, :21], *x[:, 21:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-10, rtol=0)


def test_titans_are_causal_and_differentiable():
    mixer, x = titans(4), torch.randn(1, 14, 32, dtype=torch.float64)
    changed = torch.cat((x[:, :6], torch.randn(1, 8, 32, dtype=torch.float64)), dim=1)
    same = (mixer(x) == mixer(changed)).all(-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 8
    mixer = titans(3, n_head=2, n_embd=4)
    names, weights = zip(*mixer.named_parameters())

    def f(x, *weights):
        return torch.func.functional_call(mixer, dict(zip(names, weights)), (x,))
    assert torch.autograd.gradcheck(f, (torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True), *weights))


def test_memory_is_float32_in_bfloat16():
    torch.manual_seed(0)
    mixer = Titans(GPTConfig(**{**TINY, 'mixer': 'titans', 'memory_chunk': 8}))
    cache, x = {}, torch.randn(2, 20, 32)
    y, state = mixer(x.bfloat16(), None, cache), cache['state']
    assert y.dtype == state.inputs.dtype == torch.bfloat16
    assert state.weights.dtype == state.momentum.dtype == state.start.dtype == torch.float32
    assert (y - mixer(x)).abs().max() < 0.02 * mixer(x).abs().max()


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
    model, idx = tiny(ffn='hourglass', **change), tokens(2, 32)
    whole = change.get('mixer') != 'titans'  # its loop over chunks is left out
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=whole, dynamic=dynamic, backend='aot_eager')  # all but generating C++
    losses = [f(idx, idx)[1] for f in (model, compiled)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_shape_of_a_checkpoint_is_valid_again():
    for change in (dict(mixer='titans'), dict(norm='olmo2', n_kv_head=2), dict(ffn='hourglass', mlp_periods='4,1,2,1'),
                   dict(param_budget=100_000, ffn_width=0, mixer='gated')):
        config = GPTConfig(**{**TINY, **change})
        assert GPTConfig(**asdict(config)) == config


def test_olmo2_is_olmo2():
    transformers = pytest.importorskip('transformers')
    for change in (dict(), dict(n_kv_head=2, tie_embeddings=False)):
        model = tiny(vocab_size=128, rope_theta=5000.0, norm='olmo2', **change)
        c = model.config
        olmo2 = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(
            vocab_size=128, hidden_size=c.n_embd, intermediate_size=96, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, rms_norm_eps=1e-6,
            rope_theta=c.rope_theta, rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta},
            max_position_embeddings=32, tie_word_embeddings=c.tie_embeddings))
        names = {'ffn.norms.0': 'post_feedforward_layernorm', '.norm.gain': '.post_attention_layernorm.gain',
                 'ffn.mlps.0': 'mlp', 'mixer': 'self_attn', 'blocks': 'model.layers', 'embedding': 'model.embed_tokens',
                 'head': 'lm_head', 'gain': 'weight'}
        state = {}
        for name, weight in model.state_dict().items():
            weight.copy_(weight * 3 if name.endswith('weight') else 1 + torch.randn_like(weight) / 3)
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            state['model.' + name if name.startswith('norm') else name] = weight
        olmo2.load_state_dict(state)
        idx = torch.randint(128, (2, 32))
        with torch.no_grad():
            ours, theirs = model(idx)[0], olmo2(idx).logits
        assert (ours - theirs).abs().max() < 1e-4 and theirs.std() > 0.3


def test_standard_model_is_llama():
    for change in (dict(), dict(n_kv_head=2, head_dim=16, tie_embeddings=False)):
        model = tiny(vocab_size=128, rope_theta=5000.0, **change)
        for weight in set(model.parameters()):
            weight.data *= 3  # so that attention is far from uniform
        llama = as_llama(model)
        idx = torch.randint(128, (2, 32))
        with torch.no_grad():
            ours, theirs = model(idx)[0], llama(idx).logits
        assert (ours - theirs).abs().max() < 1e-4 and theirs.std() > 0.3


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
