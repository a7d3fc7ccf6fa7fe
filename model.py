"""
A decoder-only Transformer whose feed-forward networks take any shape at a fixed parameter budget.

Every layer is a token mixer followed by an FFN, and every FFN is a stack of K residual SwiGLU MLPs. So the shape of
all the FFNs of a model is one table of hidden widths, n_layer rows of K, which `ffn_widths` makes:

    standard            K = 1, the same width in every layer
    hourglass           K > 1 narrow MLPs in place of a wide one (Liao et al., arXiv 2602.06471)
    tapered             K = 1, widths that fall with depth (Bayat, Behrouz and Courville, arXiv 2606.23670)
    tapered_hourglass   both

The token mixer is one of three, at any of these shapes:

    attention   causal softmax attention
    gated       the same with its output gated by sigmoid(W x) (Qiu et al., arXiv 2505.06708)
    titans      a memory that learns while it reads (Behrouz et al., arXiv 2501.00663)

The rest is LLaMA: rotary embeddings, pre-norm, SwiGLU, no biases. The norms have no gains, since a gain before a
linear layer could be folded into its matrix: so K MLPs hold exactly as many parameters as one that is K times as wide,
and models of one budget match to the last parameter. With norm = 'olmo2' the block is that of OLMo-2, gains included.

`python model.py config/hourglass_113m.py --baseline=config/standard_113m.py` prints the budget without building
anything.
"""

import copy
import ctypes
import json
import math
import re
import sys
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

# ----------------------------------------------------------------------------------------------------------------------
# The shape of a model and what it costs


@dataclass
class GPTConfig:
    """The shape of a model, its size stated as ffn_width or as param_budget. Raises ValueError if it cannot be had."""

    vocab_size: int = 50257  # true size; the table is padded to a multiple of 64, the logits are not
    block_size: int = 1024  # longest context, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # heads of keys and values; 0: n_head
    head_dim: int = 0  # 0: n_embd // n_head; else attention has a width of its own, n_head * head_dim
    n_embd: int = 768  # d_model, the width of the residual stream
    mixer: str = 'attention'  # or gated, titans
    memory_chunk: int = 64  # tokens that Titans' memory reads between two looks at its own weights
    norm: str = 'pre'  # x + f(norm(x)); or olmo2: x + norm(f(x)), and queries and keys normed whole, all with gains
    ffn: str = 'standard'  # or hourglass, tapered, tapered_hourglass
    ffn_width: int = 0  # hidden units of a layer, the mean over the depth; 0: what meets param_budget
    param_budget: int = 0  # parameters of mixers and FFNs together; 0: what ffn_width gives
    ffn_multiple: int = 16  # every MLP's width is a multiple of this
    n_mlp: int = 4  # K, the MLPs of a hourglass FFN
    mlp_periods: str = ''  # Hope: '1,4,16' updates the l-th MLP of every FFN each 1, 4, 16 steps; empty: all in each
    taper: str = 'cosine'  # or linear, sigmoid, step
    taper_start: float = 1.5  # width of the first layer over the mean
    taper_end: float = 0.5  # width of the last layer over the mean
    rope_theta: float = 10000.0
    qk_norm: bool = False  # RMSNorm of queries and keys, per head
    tie_embeddings: bool = True  # the head is the embedding table
    dropout: float = 0.0
    init_std: float = 0.02  # of the initial weights

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'memory_chunk', 'ffn_multiple',
                     'n_mlp'):
            self.require(getattr(self, name) >= 1, name, 'must be at least 1')
        for name in ('n_kv_head', 'head_dim', 'ffn_width', 'param_budget'):
            self.require(getattr(self, name) >= 0, name, 'must not be negative')
        self.require(self.head_dim or self.n_embd % self.n_head == 0, 'n_head',
                    f'must divide n_embd={self.n_embd}, unless head_dim is given')
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.require(self.mixer in MIXERS, 'mixer', f'must be one of {", ".join(MIXERS)}')
        self.require(self.norm in ('pre', 'olmo2'), 'norm', 'must be one of pre, olmo2')
        if self.mixer == 'titans':
            self.require(self.n_kv_head == 0, 'n_kv_head', 'must be 0 with mixer=titans: every head has its own memory')
            self.require(not self.qk_norm, 'qk_norm', 'must be off with mixer=titans: its queries and keys have norm 1')
        else:
            self.n_kv_head = self.n_kv_head or self.n_head
            self.require(self.n_head % self.n_kv_head == 0, 'n_kv_head', f'must divide n_head={self.n_head}')
        self.require(not (self.qk_norm and self.norm == 'olmo2'), 'qk_norm', 'must be off with norm=olmo2, which has '
                     'norms of queries and keys of its own')
        self.require(self.head_dim % 2 == 0, 'head_dim', 'must be even: rotary embeddings turn pairs')
        if self.mlp_periods:
            self.require(re.fullmatch('[1-9][0-9]*(,[1-9][0-9]*)*', self.mlp_periods), 'mlp_periods',
                         "must be numbers of steps, like '1,4,16'")
            self.require('hourglass' in self.ffn, 'mlp_periods', 'needs ffn=hourglass or tapered_hourglass')
            self.require(self.mlp_periods.count(',') + 1 == self.n_mlp, 'mlp_periods',
                         f'must have a number for each of n_mlp={self.n_mlp} MLPs')
        self.require(self.rope_theta > 0, 'rope_theta', 'must be positive')
        self.require(0 < self.init_std < math.inf, 'init_std', 'must be positive')
        self.require(0 <= self.dropout < 1, 'dropout', 'must be at least 0 and below 1')
        self.require(self.ffn in FFN_KINDS, 'ffn', f'must be one of {", ".join(FFN_KINDS)}')
        if 'tapered' in self.ffn:
            self.require(self.taper in TAPERS, 'taper', f'must be one of {", ".join(TAPERS)}')
            self.require(self.n_layer > 1, 'n_layer', 'a taper needs at least 2 layers')
            for name in ('taper_start', 'taper_end'):
                self.require(0 < getattr(self, name) < math.inf, name, 'must be positive: no layer is left without FFN')
            self.require(self.taper != 'step' or self.taper_start + self.taper_end < 3, 'taper_start',
                         f'leaves the middle layers of a step nothing, 3 - start - end with taper_end={self.taper_end}')
        size = 'param_budget' if self.param_budget else 'ffn_width'
        self.require(min(map(min, ffn_widths(self))) > 0, size,
                     f'leaves some MLP less than one unit of ffn_multiple={self.ffn_multiple}')

    def require(self, ok, name, why):
        if not ok:
            raise ValueError(f'{name}={getattr(self, name)!r}: {why}')


MIXERS = ('attention', 'gated', 'titans')
FFN_KINDS = ('standard', 'hourglass', 'tapered', 'tapered_hourglass')
TAPERS = ('cosine', 'linear', 'sigmoid', 'step')


def ffn_widths(config):
    """The hidden widths of every MLP, a list of n_layer rows of K.

    All hidden units of the model are dealt to the layers in proportion to the taper, then evenly to the K MLPs of each
    layer, in units of ffn_multiple. Nothing is lost in rounding: widths add up to the same total for every kind of FFN.
    """
    weights = taper_weights(config) if 'tapered' in config.ffn else [1] * config.n_layer
    n_mlp = config.n_mlp if 'hourglass' in config.ffn else 1
    layers = deal(hidden_units(config) // config.ffn_multiple, weights)
    return [[config.ffn_multiple * share for share in deal(layer, [1] * n_mlp)] for layer in layers]


def deal(total, weights):
    """Split an integer in proportion to the weights: by largest remainder, ties to the earlier."""
    per_weight = Fraction(total) / sum(weights)
    exact = [weight * per_weight for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[:total - sum(shares)]:
        shares[i] += 1
    return shares


def taper_weights(config):
    """Relative FFN widths over the depth, from taper_start to taper_end, as exact fractions.

    With t = layer / (L - 1), cosine is w(t) = end + (start - end) / 2 * (1 + cos(pi t)) (Bayat et al.). All but the
    step are odd about the middle of the depth: functions of c = 1 - 2t, which falls from 1 to -1. Rounding keeps them
    odd, so that the mean of the weights is exactly (start + end) / 2.
    """
    L, start, end = config.n_layer, Fraction(str(config.taper_start)), Fraction(str(config.taper_end))
    if config.taper == 'step':
        third = max(1, L // 3)
        return [start] * third + [3 - start - end] * (L - 2 * third) + [end] * third
    curve = {'linear': lambda c: c,
             'cosine': lambda c: to_fraction(math.sin(math.pi / 2 * c)),
             'sigmoid': lambda c: to_fraction(math.tanh(2.5 * c) / math.tanh(2.5))}[config.taper]
    return [(start + end) / 2 + (start - end) / 2 * curve(Fraction(L - 1 - 2 * layer, L - 1)) for layer in range(L)]


def to_fraction(x):
    return Fraction(round(x * 10**12), 10**12)


def hidden_units(config):
    """The hidden units of all FFNs of the model together, from ffn_width or param_budget. Raises ValueError."""
    c = config
    c.require(c.ffn_width % c.ffn_multiple == 0, 'ffn_width', f'must be a multiple of ffn_multiple={c.ffn_multiple}')
    if not c.param_budget:
        c.require(c.ffn_width, 'ffn_width', 'state the size: ffn_width or param_budget must be given')
        return c.ffn_width * c.n_layer
    left = c.param_budget - mixer_params(c)
    c.require(left > 0, 'param_budget', f'the token mixers alone take {mixer_params(c):,} parameters')
    units = round(Fraction(left, 3 * c.n_embd * c.ffn_multiple)) * c.ffn_multiple
    c.require(c.ffn_width in (0, units / c.n_layer), 'ffn_width',
             f'contradicts param_budget={c.param_budget:,}, which gives {units / c.n_layer:,.2f}: set one of them to 0')
    return units


def mixer_params(config):
    """Parameters of all token mixers, without gains."""
    c, width = config, config.n_head * config.head_dim
    if c.mixer == 'titans':  # five projections; three convolutions; alpha, eta and theta; the initial memories
        one = 5 * c.n_embd * width + 3 * 4 * width + 3 * c.n_head * (c.n_embd + 1) + 2 * width * c.head_dim
    else:
        one = c.n_embd * (2 * width + 2 * c.n_kv_head * c.head_dim + (width if c.mixer == 'gated' else 0))
    return c.n_layer * one


def padded_vocab(config):
    return -(-config.vocab_size // 64) * 64


def budget(config):
    """Parameters by component, and training FLOPs per token, as a dict of ints.

    FLOPs are those of forward and backward: 6 for each parameter of a matrix product, the head's included, and in
    each layer 6 * n_head * head_dim * block_size for attention's scores and averages, half of the full square.

    Titans' memory of head_dim d, in chunks of C tokens, takes instead 6 * (11 d^2 + 2 C d + C^2 / 6) in each head: a
    token is multiplied by d x d matrices 11 times (3 for its gradient, 4 to add it to both weights and momenta, 4 to
    read), by the C tokens of its chunk 4 times, of which half is needed, and D E is a product of two triangles.
    """
    c, widths = config, ffn_widths(config)
    counts = {'attention': mixer_params(c), 'ffn': 3 * c.n_embd * sum(map(sum, widths)), 'gains': 0}
    if c.norm == 'olmo2':  # after the mixer and every MLP, at the end, and of queries and keys
        heads = 0 if c.mixer == 'titans' else c.n_head + c.n_kv_head
        counts['gains'] = c.n_embd * (c.n_layer * (1 + len(widths[0])) + 1) + c.n_layer * heads * c.head_dim
    counts['non_embedding'] = sum(counts.values())
    head = padded_vocab(c) * c.n_embd
    counts['embedding'] = head if c.tie_embeddings else 2 * head
    counts['total'] = counts['non_embedding'] + counts['embedding']
    matrices, mixing = counts['attention'] + counts['ffn'] + head, c.n_layer * c.n_head * c.head_dim * c.block_size
    if c.mixer == 'titans':
        d, C = c.head_dim, min(c.memory_chunk, c.block_size)
        matrices -= c.n_layer * c.n_head * (2 * d * d + 3)  # the initial memories and biases
        mixing = c.n_layer * c.n_head * (11 * d * d + 2 * C * d + C * C // 6)
    counts['flops_per_token'] = 6 * (matrices + mixing)
    return counts


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Linear(nn.Linear):
    """No bias; float32 weights, which the optimizer needs, used in the dtype of the input."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        if x.is_cpu and x.numel() == self.in_features and not torch.is_grad_enabled():  # one token: mv is faster there
            return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
        return F.linear(x, weight)


class RMSNorm(torch.autograd.Function):
    """y = r x with r = 1 / sqrt(mean(x^2) + 1e-6), over the last dimension, without a gain.

    A layer has 1 + K of these, each of which passes over the whole stream, so that they, not the K matrix products, are
    what a stack of MLPs costs in time. Hence a gradient of its own, dx = r (dy - y mean(dy y)), which needs half the
    passes of autograd's and keeps y only, as the matrix product after it does.
    """

    @staticmethod
    def forward(ctx, x):
        mean = x.square().mean(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        r = torch.rsqrt(mean + 1e-6).to(x.dtype)
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        mean = (dy * y).mean(-1, keepdim=True, dtype=torch.promote_types(y.dtype, torch.float32)).to(y.dtype)
        return torch.addcmul(dy, y, mean, value=-1).mul_(r)


norm = RMSNorm.apply


class Norm(nn.Module):
    """RMSNorm with a gain."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return norm(x) * self.gain.to(x.dtype)


def rotary_table(config):
    """cos and sin of the angles position * theta^(-2i / head_dim), each (block_size, head_dim // 2)."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.block_size).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x (B, H, T, head_dim): dimension i is paired with i + head_dim / 2, as in Llama."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class KVCache:
    """Keys and values of the tokens read so far, for one layer."""

    def __init__(self, batch_size, config, device, dtype):
        shape = batch_size, config.n_kv_head, config.block_size, config.head_dim
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k, v):
        """Add k, v (B, n_kv_head, T, head_dim); return all so far."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start:self.length] = k
        self.v[:, :, start:self.length] = v
        return self.k[:, :, :self.length], self.v[:, :, :self.length]


class Attention(nn.Module):
    """Causal softmax attention with rotary embeddings and grouped-query heads."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        c = config
        self.q_proj = Linear(c.n_embd, c.n_head * c.head_dim)
        self.k_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim)
        self.v_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim)
        self.o_proj = Linear(c.n_head * c.head_dim, c.n_embd)
        if c.norm == 'olmo2':
            self.q_norm, self.k_norm = Norm(c.n_head * c.head_dim), Norm(c.n_kv_head * c.head_dim)

    def new_cache(self, batch_size, device, dtype):
        return KVCache(batch_size, self.config, device, dtype)

    def forward(self, x, rotary, cache=None):
        """x: (B, T, C); rotary: cos and sin of the T positions. With a cache, T is 1 or the cache is empty."""
        return self.o_proj(self.attend(x, rotary, cache))

    def attend(self, x, rotary, cache):
        B, T, _ = x.size()
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.config.norm == 'olmo2':
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.view(B, T, -1, self.config.head_dim).transpose(1, 2) for y in (q, k, v))  # (B, H, T, head_dim)
        if self.config.qk_norm:
            q, k = norm(q), norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None or T > 1, dropout_p=self.config.dropout if self.training else 0.0,
            enable_gqa=self.config.n_kv_head < self.config.n_head)
        return y.transpose(1, 2).reshape(B, T, -1)


class GatedAttention(Attention):
    """W_o(attention(x) * sigmoid(W_g x)), a gate for each channel of each head (Qiu et al., arXiv 2505.06708)."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = Linear(config.n_embd, config.n_head * config.head_dim)

    def forward(self, x, rotary, cache=None):
        return self.o_proj(self.attend(x, rotary, cache) * self.gate_proj(x).sigmoid())


class MemoryState:
    """What Titans keep of the tokens read so far, for one layer: weights and momentum, (2, B, H, head_dim, head_dim),
    the weights at the start of the current chunk, where gradients are taken, and the convolution's last inputs."""

    def __init__(self, weights, inputs):
        self.weights = self.start = weights
        self.momentum = torch.zeros_like(weights)
        self.inputs = inputs
        self.length = 0


class Titans(nn.Module):
    """Long-term memory as the token mixer (Behrouz et al., arXiv 2501.00663, sections 3 and 4.4).

    In each head an MLP, M(k) = W2 silu(W1 k), learns while it reads to map keys to values, by gradient descent on
    |M(k) - v|^2 / 2 with momentum eta, step size theta and forgetting alpha, all three computed from each token:

        S_t = eta_t S_{t-1} - theta_t G_t       W_t = (1 - alpha_t) W_{t-1} + S_t       y_t = M_{W_t}(q_t)

    Gradients G are taken at the weights at the start of each chunk of memory_chunk tokens. There they are outer
    products u k' and e a', so everything is exact in matrix products over a chunk: see `read`.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        c, width = config, config.n_head * config.head_dim
        self.qkv_proj = Linear(c.n_embd, 3 * width)
        self.rate_proj = Linear(c.n_embd, 3 * c.n_head)
        self.gate_proj = Linear(c.n_embd, width)
        self.o_proj = Linear(width, c.n_embd)
        # What keeps its input's scale: four taps of 1/2, and matrices of 1 / sqrt(d) for keys of norm 1.
        self.taps = nn.Parameter(torch.randn(4, 3 * width) / 2)
        self.memory = nn.Parameter(torch.randn(2, c.n_head, c.head_dim, c.head_dim) / math.sqrt(c.head_dim))
        # At first alpha = 0.001: faster forgetting ends at zero, where neither layer gives the other a gradient.
        # Momentum makes a step 1 / (1 - eta) times as long, and those of a chunk add up: freely chosen, they diverge
        # within 50 steps of training. So theta = 0.1 (1 - eta) / memory_chunk * sigmoid(.), at first half of the most.
        self.rate_bias = nn.Parameter(torch.tensor([[0.001], [0.9], [0.5]]).logit().repeat(1, c.n_head).flatten())

    def new_cache(self, batch_size, device, dtype):
        memory = self.memory.to(torch.promote_types(dtype, torch.float32))
        return MemoryState(memory[:, None].repeat(1, batch_size, 1, 1, 1),
                           torch.zeros(batch_size, 3, self.taps.size(1), device=device, dtype=dtype))

    def forward(self, x, rotary=None, cache=None):
        """x: (B, T, C). With a cache, T is 1 or the cache is empty. Memory and rates are in float32 in any case."""
        (B, T, _), H, chunk = x.size(), self.config.n_head, self.config.memory_chunk
        state = cache or self.new_cache(B, x.device, x.dtype)
        inputs = torch.cat((state.inputs, self.qkv_proj(x)), dim=1)
        state.inputs = inputs[:, -3:]
        qkv = F.silu(sum(tap * inputs[:, i:i + T] for i, tap in enumerate(self.taps.to(x.dtype))))
        q, k, v = qkv.to(state.weights.dtype).view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, head_dim)
        rates = self.rate_proj(x.to(state.weights.dtype)) + self.rate_bias
        alpha, eta, theta = rates.view(B, T, 3, H).permute(2, 0, 3, 1)  # (B, H, T)
        tokens = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v,
                  F.logsigmoid(-alpha), F.logsigmoid(eta), 0.1 * (-eta).sigmoid() * theta.sigmoid() / chunk)
        whole = T - T % chunk
        parts = [[t[:, :, :whole].unflatten(2, (-1, chunk)) for t in tokens]] if whole else []
        parts += [[t[:, :, None, whole:] for t in tokens]] if whole < T else []  # the beginning of a chunk, or T = 1
        y = torch.cat([self.read(state, *part) for part in parts], dim=2)
        y = norm(y.transpose(1, 2)).reshape(B, T, -1).to(x.dtype)
        return self.o_proj(y * self.gate_proj(x).sigmoid())

    def read(self, state, q, k, v, log_keep, log_eta, theta):
        """Read N chunks of C tokens: q, k, v (B, H, N, C, d), their rates (B, H, N, C). Returns y (B, H, N * C, d).

        Of a chunk that begins with weights W and momentum S, the weights after token t are linear in the gradients:
        W_t = keep_t W + m_t S - sum_{i <= t} A[t, i] G_i, with D[t, i] the product of 1 - alpha over i + 1..t, E[t, i]
        that of eta, A = D E diag(theta), keep_t and eta_t the products from the start through t, m = D eta.
        """
        D, E = products(log_keep), products(log_eta)  # (B, H, N, C, C)
        A = D @ E * theta.unsqueeze(-2)
        keep, eta = (log.cumsum(-1).exp().unsqueeze(-1) for log in (log_keep, log_eta))  # (B, H, N, C, 1)
        m = D @ eta
        end = (keep[..., -1:, :], m[..., -1:, :], eta[..., -1:, :],
               A[..., -1, :].unsqueeze(-1), (E[..., -1, :] * theta).unsqueeze(-1))
        (W1, W2), (S1, S2), u, e, a = self.learn(state, k, v, *end)
        h = F.silu(keep * (q @ W1.mT) + m * (q @ S1.mT) - (A * (q @ k.mT)) @ u)
        y = keep * (h @ W2.mT) + m * (h @ S2.mT) - (A * (h @ a.mT)) @ e
        return y.flatten(2, 3)

    @torch.compiler.disable  # a loop over chunks takes minutes to compile, and its time is in matrix products anyway
    def learn(self, state, *chunks):
        """Carry the state through the chunks. Returns, of each, the weights and momenta at its start and its gradients'
        factors: they are u k' for W1 and e a' for W2."""
        seen = []
        for k, v, keep, m, eta, to_weights, to_momentum in zip(*(t.unbind(2) for t in chunks)):
            W1, W2 = state.start
            z = k @ W1.mT
            s = z.sigmoid()
            a = z * s
            e = a @ W2.mT - v
            u = e @ W2 * (s + a * (1 - s))  # silu'(z)
            seen.append((state.weights, state.momentum, u, e, a))
            left, right = torch.stack((u, e)), torch.stack((k, a))
            state.weights, state.momentum = (
                keep * state.weights + m * state.momentum - (to_weights * left).mT @ right,
                eta * state.momentum - (to_momentum * left).mT @ right)
            state.length += k.size(-2)
            if state.length % self.config.memory_chunk == 0:
                state.start = state.weights
        return [torch.stack(each, dim=-3) for each in zip(*seen)]


def products(log_rates):
    """(..., C, C): the product of the rates over i + 1..t at [t, i], 0 above the diagonal. log_rates: (..., C)."""
    sums = log_rates.cumsum(-1)
    above = torch.ones(sums.size(-1), sums.size(-1), dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()


class MLP(nn.Module):
    """SwiGLU: W_down(silu(W_gate x) * (W_up x)). Narrower than the stream (width < n_embd), it is an hourglass."""

    def __init__(self, config, width):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, width)
        self.up_proj = Linear(config.n_embd, width)
        self.down_proj = Linear(width, config.n_embd)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    """Adds to the stream: x + f(norm(x)), or as in OLMo-2 (arXiv 2501.00656) x + norm(f(x)), with a gain."""

    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config.n_embd) if config.norm == 'olmo2' else None
        self.dropout = config.dropout

    def forward(self, x, f, *args):
        y = self.norm(f(x, *args)) if self.norm else f(norm(x), *args)
        return x + F.dropout(y, self.dropout, self.training)


class FFN(nn.Module):
    """A stack of K residual MLPs, x = x + MLP_i(norm(x)) for i = 1..K (Liao et al.). Takes and returns the stream."""

    def __init__(self, config, widths):
        super().__init__()
        self.mlps = nn.ModuleList(MLP(config, width) for width in widths)
        self.residuals = nn.ModuleList(Residual(config) for _ in widths)

    def forward(self, x):
        for mlp, residual in zip(self.mlps, self.residuals):
            x = residual(x, mlp)
        return x


class Block(nn.Module):
    def __init__(self, config, widths):
        super().__init__()
        self.mixer = {'attention': Attention, 'gated': GatedAttention, 'titans': Titans}[config.mixer](config)
        self.residual = Residual(config)
        self.ffn = FFN(config, widths)

    def forward(self, x, rotary, cache=None):
        return self.ffn(self.residual(x, self.mixer, rotary, cache))


LOSS_CHUNK = 1024  # tokens


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the head's logits, a chunk of tokens at a time.

    The gradient of a mean is known as soon as the softmax is, so it is taken at once: nothing is computed twice, and
    no more than a chunk of logits, the largest tensor of a small model, exists at any time.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        """x: (N, C) in the compute dtype; weight: (padded vocabulary, C); targets: (N,)."""
        w, dx, dw, loss = weight.to(x.dtype), [], None, 0.0
        for x_, targets_ in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)):
            logits = x_ @ w.T
            logits[:, vocab_size:] = -torch.inf
            log_p = logits.log_softmax(-1, dtype=torch.float32)
            rows = torch.arange(len(x_), device=x.device)
            loss = loss - log_p[rows, targets_].sum()
            dlogits = log_p.exp_()
            dlogits[rows, targets_] -= 1  # softmax(logits) - onehot(targets)
            dlogits = dlogits.to(x.dtype)
            dx.append(dlogits @ w)
            dw_ = (dlogits.T @ x_).to(weight.dtype)
            dw = dw_ if dw is None else dw.add_(dw_)
        ctx.save_for_backward(torch.cat(dx), dw)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad / len(dx)
        return dx.mul_(grad), dw.mul_(grad), None, None  # in place: they are large, and used once


class GPT(nn.Module):
    """The language model. compute_dtype is what matrix products and the residual stream are in; weights are float32."""

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(padded_vocab(config), config.n_embd)
        self.blocks = nn.ModuleList(Block(config, widths) for widths in ffn_widths(config))
        self.norm = Norm(config.n_embd) if config.norm == 'olmo2' else norm
        self.head = Linear(config.n_embd, padded_vocab(config))
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config)
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, init_std; what writes to the residual stream is scaled down by the root of the number of such writes.
        Gains and what Titans have besides matrices begin as their classes say."""
        writes = sum(1 + len(block.ffn.mlps) for block in self.blocks)
        for name, weight in self.named_parameters():
            if name.endswith('weight'):
                writes_to_stream = name.endswith(('o_proj.weight', 'down_proj.weight'))
                std = self.config.init_std
                nn.init.normal_(weight, std=std / math.sqrt(writes) if writes_to_stream else std)

    def forward(self, idx, targets=None, reduction='mean'):
        """idx: (B, T) token ids. Returns (logits (B, T, vocab_size) in float32, None), or, given targets (B, T),
        (None, loss): the mean cross-entropy in nats, or that of each token, (B, T), with reduction='none'."""
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        if reduction == 'none':
            losses = [F.cross_entropy(self.logits(x_), targets_, reduction='none') for x_, targets_
                      in zip(x.flatten(0, 1).split(LOSS_CHUNK), targets.flatten().split(LOSS_CHUNK))]
            return None, torch.cat(losses).view_as(targets)
        return None, CrossEntropy.apply(x.flatten(0, 1), self.head.weight, targets.flatten(), self.config.vocab_size)

    def hidden(self, idx, caches=None):
        """The residual stream after the last layer and norm, (B, T, C); with a list of caches, one for each layer, idx
        goes on where they end."""
        start = caches[0].length if caches else 0
        rotary = [table[start:start + idx.size(1)].to(self.compute_dtype) for table in (self.cos, self.sin)]
        x = F.dropout(self.embedding(idx).to(self.compute_dtype), self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return self.norm(x)

    def logits(self, x):
        return self.head(x)[..., :self.config.vocab_size].float()

    def slow_parameters(self):
        """(name, parameter, period) of those that mlp_periods has updated less often than in each step."""
        periods = [int(period) for period in self.config.mlp_periods.split(',') if period]
        for name, parameter in self.named_parameters():
            mlp = re.search(r'mlps\.(\d+)\.', name)
            if periods and mlp and periods[int(mlp[1])] > 1:
                yield name, parameter, periods[int(mlp[1])]

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """AdamW, fused; only matrices are decayed: not gains and biases, nor the initial memories of Titans, which near
        zero could learn nothing, as each of their two layers silences the other's gradient."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        vectors = [p for p in self.parameters() if p.dim() != 2]
        groups = [{'params': matrices, 'weight_decay': weight_decay}]
        if vectors:
            groups.append({'params': vectors, 'weight_decay': 0.0})
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    def generate(self, idx, max_new_tokens, **how):
        """Continue the prompts idx (B, T), all of one length: (B, T + n). Arguments as in generate_tokens."""
        return torch.cat([idx, *self.generate_tokens(idx, max_new_tokens, **how)], dim=1)

    @torch.no_grad()
    def generate_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None):
        """Yield the next token of each row, (B, 1), up to max_new_tokens times.

        temperature 0 is greedy; top_k > 0 keeps the k likeliest tokens, top_p < 1 the likeliest that reach that mass.
        Rows that have reached the stop_token repeat it; when all have, generation ends. Beyond block_size the model
        reads the last block_size tokens anew for each token, without a cache; Titans just read on.
        """
        if idx.size(1) == 0:
            raise ValueError('the prompt is empty: start it with at least one token')
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ValueError(f'temperature={temperature}, top_k={top_k}, top_p={top_p}: '
                             'must be at least 0, at least 0, and above 0 up to 1')
        model, training = self, self.training
        if self.embedding.weight.dtype != self.compute_dtype:
            model = copy.deepcopy(self).to(self.compute_dtype)  # cast once, not at every token
        model.eval()
        caches = [block.mixer.new_cache(idx.size(0), idx.device, self.compute_dtype) for block in model.blocks]
        new, ended = idx, torch.zeros_like(idx[:, :1], dtype=torch.bool)
        try:
            for _ in range(max_new_tokens):
                if idx.size(1) <= self.config.block_size or self.config.mixer == 'titans':
                    x = model.hidden(new, caches)
                else:
                    x = model.hidden(idx[:, -self.config.block_size:])
                new = sample(model.logits(x[:, -1]), temperature, top_k, top_p)
                if stop_token is not None:
                    new = torch.where(ended, stop_token, new)
                    ended = ended | (new == stop_token)
                idx = torch.cat((idx, new), dim=1)
                yield new
                if ended.all():
                    break
        finally:
            self.train(training)


def sample(logits, temperature, top_k, top_p):
    """Draw a token (B, 1) from logits (B, vocab_size)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_k or top_p < 1:
        p, order = p.sort(descending=True, stable=True)
        p[:, top_k or p.size(-1):] = 0
        p[p.cumsum(-1) - p >= top_p] = 0  # what comes before already has the mass
        return order.gather(1, torch.multinomial(p, 1))
    return torch.multinomial(p, 1)


def shape_of(settings):
    """The GPTConfig that settings of train.py, a Config, stand for. Raises ValueError. Where ffn_width is given and
    param_budget only has its default, the width counts."""
    if 'ffn_width' in settings.given and 'param_budget' not in settings.given:
        settings['param_budget'] = 0
    return GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})


def resolve_device(device='auto', dtype='auto'):
    """The device and the compute dtype that these settings of train.py stand for. Raises ValueError."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = device
    available = {'cpu': True, 'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    if kind not in available:
        raise ValueError(f'device={device}: must be auto, cpu, cuda or mps')
    if not available[kind]:
        raise ValueError(f'device={device}: this machine, or this build of torch, has none; try --device=auto')
    if dtype == 'auto':
        if kind == 'cuda':
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            instructions = '_is_avx512_bf16_supported', '_is_amx_tile_supported'  # no public names for these yet
            fast = kind == 'cpu' and any(getattr(torch.cpu, name, bool)() for name in instructions)
        dtype = 'bfloat16' if fast else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f'dtype={dtype}: must be auto, float32 or bfloat16')
    return device, getattr(torch, dtype)


def keep_freed_memory():
    """Have glibc keep what freed tensors took. Else it returns large ones to the system at once, and the next of their
    size costs a page fault every 4 KB. Nothing is done where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


# ----------------------------------------------------------------------------------------------------------------------
# The command: what a shape costs


def print_shape(config):
    """Print the shape of a model, and its FFN widths as a bar chart over the depth."""
    c, widths = config, ffn_widths(config)
    K, d_h = len(widths[0]), Fraction(sum(map(sum, widths)), c.n_layer * len(widths[0]))
    kv_heads = f' ({c.n_kv_head} for keys and values)' if 0 < c.n_kv_head < c.n_head else ''
    print(f'{c.ffn}, {c.mixer}: {c.n_layer} layers, d_model {c.n_embd}, {c.n_head} heads of {c.head_dim}{kv_heads}, '
          f'K = {K}\n')
    for layer, row in enumerate(widths):
        bar = '#' * round(48 * sum(row) / max(map(sum, widths)))
        row = f'{row[0]} x {K}' if len(set(row)) == 1 and K > 1 else ' + '.join(map(str, row))
        print(f'  layer {layer:2d}  {bar:48s}  {row}')
    kind = 'below 1: an hourglass' if d_h < c.n_embd else 'a split of the wide MLP' if K > 1 else 'narrow-wide-narrow'
    print(f'\n  d_model / L    {c.n_embd / c.n_layer:.1f}')
    mean = ' in the mean' if 'tapered' in c.ffn else ''
    print(f'  d_h / d_model  {float(d_h / c.n_embd):.3f}{mean}, {kind}\n')


def print_budget(config, baseline=None):
    """Print parameters and FLOPs by component, beside those of a baseline."""
    def rows(config):
        counts = budget(config)
        head = 6 * padded_vocab(config) * config.n_embd
        flops = counts.pop('flops_per_token')
        return {**counts, 'FLOPs of layers': flops - head, 'FLOPs of the head': head, 'FLOPs per token': flops}

    mine, theirs = rows(config), rows(baseline) if baseline else {}
    print(f'  {"":20s}{"":>16s}{"share":>8s}' + (f'{"baseline":>20s}{"difference":>16s}' if baseline else ''))
    for name, count in mine.items():
        share = count / mine['FLOPs per token' if 'FLOPs' in name else 'total']
        line = f'  {name.replace("_", "-"):20s}{count:16,d}{share:8.1%}'
        if baseline:
            percent = f'{(count - theirs[name]) / theirs[name]:+10.3%}' if theirs[name] else ''
            line += f'{theirs[name]:20,d}{count - theirs[name]:+16,d}{percent}'
        print(line)
    print('\n  FLOPs are those of a token, forward and backward.')


if __name__ == '__main__':
    from configurator import configure, fail

    baseline = ''  # config files to compare with, separated by commas

    def shape(settings):
        if settings['vocab_size'] == 0:
            meta = Path('data', settings['dataset'], 'meta.json')
            if not meta.exists():
                fail(f'vocab_size=0 means that of data/{settings["dataset"]}, which is not prepared: '
                     'run prepare.py, or give --vocab_size=50257')
            settings['vocab_size'] = json.loads(meta.read_text())['vocab_size']
        try:
            return shape_of(settings)
        except ValueError as error:
            fail(str(error))

    config = shape(configure(globals(), also='train.py'))
    compared = shape(configure(dict(globals()), also='train.py', argv=baseline.split(','))) if baseline else None
    print_shape(config)
    print_budget(config, compared)
