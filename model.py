"""
A decoder-only Transformer whose feed-forward networks (FFNs) take any shape at a fixed budget.

Every layer is a token mixer followed by an FFN, and every FFN is a stack of K residual SwiGLU MLPs. So one table of
hidden widths, n_layer rows of K, is the shape of all FFNs of a model. `ffn_widths` makes it:

    standard            K = 1, the same width in every layer
    hourglass           K > 1 narrow MLPs in place of a wide one (Liao et al., arXiv 2602.06471)
    tapered             K = 1, widths that fall with depth (Bayat, Behrouz and Courville, arXiv 2606.23670)
    tapered_hourglass   both

The rest is LLaMA: rotary embeddings, pre-norm, SwiGLU, no biases. The norms have no gains, which the matrices after
them can hold. So K MLPs have exactly as many parameters as one that is K times as wide, and models of one budget match
to the last parameter. Two norms do lose by it, as no matrix of their own follows: the one before a tied head, and that
of queries and keys (qk_norm), which bounds attention scores by sqrt(head_dim).

    python model.py config/hourglass_113m.py --baseline=config/standard_113m.py     # what a shape costs
    python model.py config/standard_113m.py --shapes=true                           # which shapes its budget allows
"""

import signal

if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the command without a traceback

import contextlib
import copy
import ctypes
import math
import re
import sys
from dataclasses import dataclass, fields, replace
from fractions import Fraction

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    """The shape of a model. Raises ValueError, with the field and what would be right, if no such model is possible."""

    vocab_size: int = 50257  # token ids; the table is padded to a multiple of 64, the logits are not
    block_size: int = 1024  # tokens of the longest context
    n_layer: int = 12  # layers, each a token mixer and an FFN
    n_head: int = 12  # heads of the token mixer
    n_kv_head: int = 0  # heads of keys and values; 0: n_head
    head_dim: int = 0  # width of a head; 0: n_embd // n_head
    n_embd: int = 768  # d_model, the width of the residual stream
    mixer: str = 'attention'  # attention, gated or titans
    memory_chunk: int = 64  # tokens for which Titans' memory takes its gradients at one set of weights
    norm: str = 'pre'  # pre: x + f(norm(x)); olmo2: x + norm(f(x)) with gains, and queries and keys are normed too
    ffn: str = 'standard'  # standard, hourglass, tapered or tapered_hourglass
    ffn_width: int = 0  # hidden units of a layer, the mean over the depth; wins over both budgets; 0: by a budget
    flops_budget: int = 0  # FLOPs a token, forward and backward, head included; wins over param_budget; 0: none
    param_budget: int = 0  # parameters of token mixers and FFNs together; 0: none
    ffn_multiple: int = 16  # the width of every MLP is a multiple of this
    n_mlp: int = 4  # K, the number of MLPs in every FFN of an hourglass
    mlp_periods: str = ''  # Hope: '1,4,16' updates the MLPs of an FFN every 1, 4 and 16 steps; empty: every step
    taper: str = 'cosine'  # cosine, linear, sigmoid, step, or each layer's width over the mean: '1.5,1.5,0.5,0.5'
    taper_start: float = 1.5  # first layer's width over the mean, given that the mean of the taper's curve is 1/2
    taper_end: float = 0.5  # last layer's width over the mean, under the same condition
    norm_eps: float = 1e-6  # what RMSNorm adds to the mean square
    rope_theta: float = 10000.0  # base of the rotary embeddings' wavelengths
    rope_scaling: str = ''  # Llama 3's 'factor,low,high,context' of rotary_table, like '8,1,4,8192'; empty: none
    qk_norm: bool = False  # RMSNorm of queries and keys, per head
    tie_embeddings: bool = True  # the head is the embedding table
    dropout: float = 0.0  # rate for embeddings, attention, and what is added to the stream
    init_std: float = 0.02  # standard deviation of the initial weights
    init_scaled: bool = True  # divides init_std by sqrt(their number) for matrices that write to the stream

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        if not self.head_dim and self.n_head > 0 and self.n_embd % self.n_head == 0:
            self.head_dim = self.n_embd // self.n_head
        for name, right, rule in shape_rules(self):
            if not right:
                raise ValueError(f'{name}={getattr(self, name)!r}: {rule}')

    @property
    def sized_by(self):  # the setting that decides the size of the FFNs
        return next((name for name in ('ffn_width', 'flops_budget', 'param_budget') if getattr(self, name)), None)


# ----------------------------------------------------------------------------------------------------------------------
# The shape of all FFNs

def ffn_widths(config):
    """The hidden widths of all MLPs, a list of n_layer rows of K.

    All hidden units of the model are dealt to the layers in proportion to the taper, then evenly to the K MLPs of each
    layer, in units of ffn_multiple. Rounding loses nothing: the widths add up to the same total for every kind of FFN.
    """
    unit, n_mlp = config.ffn_multiple, config.n_mlp if 'hourglass' in config.ffn else 1
    layers = deal(hidden_units(config) // unit, relative_widths(config))
    return [[unit * share for share in deal(layer, [1] * n_mlp)] for layer in layers]


def deal(total, weights):
    """Split an integer in proportion to the weights, by largest remainder: deal(10, [3, 2, 1]) is [5, 3, 2]. Shares are
    rounded down, and the rest goes one by one to the shares that lost most; ties go to the earlier share."""
    per_weight = Fraction(total) / sum(weights)
    exact = [weight * per_weight for weight in weights]
    shares = [math.floor(share) for share in exact]
    most_lost_first = sorted(range(len(shares)), key=lambda i: shares[i] - exact[i])
    for i in most_lost_first[:total - sum(shares)]:
        shares[i] += 1
    return shares


TAPERS = {  # the curve of each taper, from 1 at t = 0, the first layer, to 0 at t = 1, the last
    'cosine': lambda t: (1 + math.cos(math.pi * t)) / 2,
    'linear': lambda t: 1 - t,
    'sigmoid': lambda t: (1 + math.tanh(5 * (0.5 - t)) / math.tanh(2.5)) / 2,  # logistic(10 (1/2 - t)), stretched
    'step': None}  # by thirds of the depth


def relative_widths(config):
    """Each layer's FFN width over the mean, as exact fractions. With t = layer / (L - 1), layers from 0, a taper is

        w(t) = end + (start - end) * curve(t)       where the cosine's curve(t) = (1 + cos(pi t)) / 2 (Bayat et al.)

    A step has thirds of the depth at start and at end; the middle makes the mean 1. Where the mean of a curve is not
    1/2, that of w is not 1, and ffn_widths scales all layers, the first and the last included.
    """
    L, start, end = config.n_layer, Fraction(str(config.taper_start)), Fraction(str(config.taper_end))
    if 'tapered' not in config.ffn:
        return [1] * L
    if config.taper not in TAPERS:
        return numbers(config.taper)
    if config.taper == 'step':
        third = max(1, L // 3)
        middle = L - 2 * third
        return [start] * third + [(L - third * (start + end)) / max(1, middle)] * middle + [end] * third
    curve = [Fraction(TAPERS[config.taper](Fraction(layer, L - 1))) for layer in range(L)]
    # Rounded, so that the curve and its mirror image add up to exactly 1.
    return [end + (start - end) * y.limit_denominator(10**6) for y in curve]


def numbers(text):
    """The numbers in a text like '1.5,1,0.5', as exact fractions; an empty list if the text is anything else."""
    number = r'\d+(\.\d+)?'
    return [Fraction(n) for n in text.split(',')] if re.fullmatch(f'{number}(,{number})*', text) else []


def hidden_units(config):
    """The hidden units of all FFNs together: by ffn_width, or the number of units nearest to the budget."""
    c, mixer = config, MIXERS[config.mixer]
    if c.sized_by == 'ffn_width':
        return c.n_layer * c.ffn_width
    left = c.param_budget - c.n_layer * mixer.size(c)[0]
    if c.sized_by == 'flops_budget':
        left = Fraction(c.flops_budget - c.n_layer * mixer.flops(c), 6) - padded_vocab(c) * c.n_embd
    return round(Fraction(left, 3 * c.n_embd * c.ffn_multiple)) * c.ffn_multiple


def padded_vocab(config):
    return -(-config.vocab_size // 64) * 64


# ----------------------------------------------------------------------------------------------------------------------
# The layers

class Linear(nn.Linear):
    """A matrix, float32 for the optimizer, cast to the dtype of its input. to_stream: it writes to the stream."""

    def __init__(self, n_in, n_out, to_stream=False):
        super().__init__(n_in, n_out, bias=False)
        self.to_stream = to_stream

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + norm_eps) over the last dimension, with or without a gain for each channel."""

    def __init__(self, config, width, gain=False):
        super().__init__()
        self.eps = config.norm_eps
        self.gain = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x):
        y = RMSNorm.apply(x, self.eps)
        return y if self.gain is None else y * self.gain.to(x.dtype)


def rotary_table(config):
    """cos and sin of the angles position * theta^(-2i / head_dim), each (block_size, head_dim // 2). With rope_scaling,
    as in Llama 3, waves that fit into the old context more than high times keep their frequency, those that fit less
    than low times have it divided by factor, and others are in between."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling:
        factor, low, high, context = map(float, numbers(config.rope_scaling))
        kept = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / factor + kept * frequencies
    angles = torch.outer(torch.arange(config.block_size).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x (B, H, T, head_dim): dimension i is paired with i + head_dim / 2, as in Llama."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal softmax attention with rotary embeddings and grouped-query heads.

    Every token mixer has these size, flops and forward(x, rotary, cache). The cache, in generation, is a dict, empty at
    first, for what it needs of the tokens read so far. A mixer that can go past block_size with it has reads_on = True.
    """

    @staticmethod
    def size(config):
        """Number of parameters without gains, and number of gains."""
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        return config.n_embd * (2 * q + 2 * kv), (q + kv if config.norm == 'olmo2' else 0)

    @classmethod
    def flops(cls, config):
        """FLOPs of a token, forward and backward: 6 for each parameter of a matrix, and 12 for each channel of each
        token that is attended to, which is half of the context on average."""
        return 6 * cls.size(config)[0] + 12 * config.n_head * config.head_dim * config.block_size // 2

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.q_proj = Linear(c.n_embd, c.n_head * c.head_dim)
        self.k_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim)
        self.v_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim)
        self.o_proj = Linear(c.n_head * c.head_dim, c.n_embd, to_stream=True)
        self.q_norm = Norm(c, c.n_head * c.head_dim, gain=True) if c.norm == 'olmo2' else nn.Identity()
        self.k_norm = Norm(c, c.n_kv_head * c.head_dim, gain=True) if c.norm == 'olmo2' else nn.Identity()

    def forward(self, x, rotary, cache=None):
        """x: (B, T, C); rotary: cos and sin of the T positions. Returns (B, T, C)."""
        return self.o_proj(self.attend(x, rotary, cache))

    def attend(self, x, rotary, cache):
        """The outputs of all heads side by side, (B, T, n_head * head_dim)."""
        c, (B, T, _) = self.config, x.size()
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.view(B, T, -1, c.head_dim).transpose(1, 2) for y in (q, k, v))  # (B, H, T, head_dim)
        if c.qk_norm:
            q, k = RMSNorm.apply(q, c.norm_eps), RMSNorm.apply(k, c.norm_eps)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache:
            k, v = torch.cat((cache['k'], k), dim=2), torch.cat((cache['v'], v), dim=2)
        if cache is not None:
            cache.update(k=k, v=v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None or T > 1, dropout_p=c.dropout if self.training else 0.0,
            enable_gqa=not c.n_kv_head == c.n_head)  # not !=, which torch 2.6 cannot compile
        return y.transpose(1, 2).reshape(B, T, -1)


class MLP(nn.Module):
    """SwiGLU: W_down(silu(W_gate x) * (W_up x)). Narrower than the stream (width < n_embd), it is an hourglass."""

    def __init__(self, config, width):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, width)
        self.up_proj = Linear(config.n_embd, width)
        self.down_proj = Linear(width, config.n_embd, to_stream=True)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FFN(nn.Module):
    """A stack of K residual MLPs, x = x + MLP_i(norm(x)) for i = 1..K (Liao et al.). Takes and returns the stream."""

    def __init__(self, config, widths):
        super().__init__()
        self.olmo2 = config.norm == 'olmo2'
        self.mlps = nn.ModuleList(MLP(config, width) for width in widths)
        self.norms = nn.ModuleList(Norm(config, config.n_embd, gain=self.olmo2) for _ in widths)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        for mlp, norm in zip(self.mlps, self.norms):
            x = x + self.dropout(norm(mlp(x)) if self.olmo2 else mlp(norm(x)))
        return x


class Block(nn.Module):
    """A layer: x = x + mixer(norm(x)), and then the FFN."""

    def __init__(self, config, widths):
        super().__init__()
        self.olmo2 = config.norm == 'olmo2'
        self.mixer = MIXERS[config.mixer](config)
        self.norm = Norm(config, config.n_embd, gain=self.olmo2)
        self.dropout = nn.Dropout(config.dropout)
        self.ffn = FFN(config, widths)

    def forward(self, x, rotary, cache=None):
        mixed = self.norm(self.mixer(x, rotary, cache)) if self.olmo2 else self.mixer(self.norm(x), rotary, cache)
        return self.ffn(x + self.dropout(mixed))


# ----------------------------------------------------------------------------------------------------------------------
# The language model

class GPT(nn.Module):
    """The language model. Matrix products and the residual stream are in compute_dtype; weights are float32."""

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embedding = nn.Embedding(padded_vocab(config), config.n_embd)
        self.blocks = nn.ModuleList(Block(config, widths) for widths in ffn_widths(config))
        self.norm = Norm(config, config.n_embd, gain=config.norm == 'olmo2')
        self.head = Linear(config.n_embd, padded_vocab(config))
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        for name, table in zip(('cos', 'sin'), rotary_table(config)):
            self.register_buffer(name, table, persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, with standard deviation init_std; init_scaled divides it by sqrt(number of matrices that write to
        the stream) for these. Parameters that are no matrices start as their classes say."""
        writes = sum(getattr(module, 'to_stream', False) for module in self.modules())
        for module in self.modules():
            if isinstance(module, (nn.Embedding, Linear)) and not (module is self.head and self.config.tie_embeddings):
                scaled = self.config.init_scaled and getattr(module, 'to_stream', False)
                nn.init.normal_(module.weight, std=self.config.init_std / (math.sqrt(writes) if scaled else 1))

    @classmethod
    def from_pretrained(cls, name, compute_dtype=torch.float32, **changes):
        """A Llama or OLMo-2 of Hugging Face, from a folder or by its name on the hub, with changes to fields of its
        GPTConfig: dropout, or a shorter block_size. Raises ValueError if that is impossible."""
        config, weights = read_pretrained(name, changes)
        return copy_pretrained(weights, cls(config, compute_dtype))

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits (B, T, vocab_size), None) or, given targets, (None, loss):
        the mean cross-entropy in nats. All logits at once can take more memory than the rest of the model."""
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        return None, CrossEntropy.apply(x.flatten(0, 1), self.head.weight, targets.flatten(), self.config.vocab_size)

    def hidden(self, idx, caches=None, start=0):
        """The stream after the last layer and norm, (B, T, C). With caches, idx continues their tokens from start."""
        rotary = [table[start:start + idx.size(1)].to(self.compute_dtype) for table in (self.cos, self.sin)]
        x = F.dropout(self.embedding(idx).to(self.compute_dtype), self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return self.norm(x)

    def logits(self, x):
        """The logits of the next token, (..., vocab_size) in float32, from what `hidden` returns, x (..., C)."""
        return self.head(x)[..., :self.config.vocab_size].float()

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """AdamW, fused. Only matrices are decayed, not gains, biases and Titans' initial memories: near zero, each of
        a memory's two layers would silence the gradient of the other."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        groups = [{'params': matrices, 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.0}]
        return torch.optim.AdamW([group for group in groups if group['params']], learning_rate, betas, fused=True)

    def slow_parameters(self):
        """Yield (name, parameter, period) of the MLPs that mlp_periods updates less often than every step."""
        for layer, block in enumerate(self.blocks):
            for i, period in enumerate(numbers(self.config.mlp_periods)):
                for name, parameter in block.ffn.mlps[i].named_parameters(f'blocks.{layer}.ffn.mlps.{i}'):
                    if period > 1:
                        yield name, parameter, int(period)

    def generate(self, idx, max_new_tokens, **how):
        """Continue the prompts idx (B, T), all of one length: (B, T + n). Arguments as in generate_tokens."""
        return torch.cat([idx, *self.generate_tokens(idx, max_new_tokens, **how)], dim=1)

    @torch.no_grad()
    def generate_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None):
        """Yield the next token of each row, (B, 1), up to max_new_tokens times. temperature 0 is greedy; top_k > 0
        keeps the k likeliest tokens, top_p < 1 the likeliest that reach that mass. A row that has reached stop_token
        repeats it, until all rows have. Past block_size, the last block_size tokens are read anew for every token,
        unless the mixer reads on."""
        if idx.size(1) == 0:
            raise ValueError('the prompt is empty: start it with at least one token')
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1):
            raise ValueError(f'temperature={temperature}, top_k={top_k}, top_p={top_p}: must be >= 0, >= 0, in (0, 1]')
        model = self
        if self.training or self.embedding.weight.dtype != self.compute_dtype:
            model = copy.deepcopy(self).to(self.compute_dtype).eval()  # cast once, not at every token
        reads_on = getattr(MIXERS[self.config.mixer], 'reads_on', False)
        caches, new = [{} for _ in model.blocks], idx
        ended = torch.zeros_like(idx[:, :1], dtype=torch.bool)
        for _ in range(max_new_tokens):
            if idx.size(1) <= self.config.block_size or reads_on:
                x = model.hidden(new, caches, start=idx.size(1) - new.size(1))
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


def sample(logits, temperature, top_k, top_p):
    """Draw a token (B, 1) from logits (B, vocab_size)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    temperature = max(temperature, 1e-30)  # float32 would round a much smaller one to 0
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_k or top_p < 1:
        p, order = p.sort(descending=True, stable=True)
        p[:, top_k or p.size(-1):] = 0
        p[:, 1:][p.cumsum(-1)[:, :-1] >= top_p] = 0  # the likelier tokens already have the mass
        return order.gather(1, torch.multinomial(p, 1))
    return torch.multinomial(p, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Other token mixers

class GatedAttention(Attention):
    """W_o(attention(x) * sigmoid(W_g x)), a gate for each channel of each head (Qiu et al., arXiv 2505.06708)."""

    @staticmethod
    def size(config):
        parameters, gains = Attention.size(config)
        return parameters + config.n_embd * config.n_head * config.head_dim, gains

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = Linear(config.n_embd, config.n_head * config.head_dim)

    def forward(self, x, rotary, cache=None):
        return self.o_proj(self.attend(x, rotary, cache) * self.gate_proj(x).sigmoid())


class Titans(nn.Module):
    """Long-term memory as the token mixer (Behrouz et al., arXiv 2501.00663, sections 3 and 4.4).

    The memory of each head is an MLP, M(k) = norm(W2 silu(W1 k)), which learns while it reads: to map keys to values,
    by gradient descent with momentum eta, step size theta and forgetting alpha, all three computed from each token:

        S_t = eta_t S_{t-1} - theta_t G_t       W_t = (1 - alpha_t) W_{t-1} + S_t       y_t = M_{W_t}(q_t)

    The loss is |M(k) - v|^2 / 2 or, since values are normed too and normed vectors have equal lengths, -v' M(k). Its
    gradient G is taken at the weights at the start of each chunk of memory_chunk tokens. G is an outer product, -u k'
    for W1 and -e a' for W2, so a chunk is a few matrix products. Only the starts of chunks are computed one by one.

    From the paper: these formulas, chunks, queries and keys of norm 1, convolution, SiLU and gate. From its authors'
    "Miras" (arXiv 2504.13173): the norm in M. Ours: y has no other norm; normed values; heads, where the paper draws
    one memory; two layers; depthwise convolutions; no persistent tokens; the memory alone (LMM), not MAC, MAG or MAL.
    """

    SEGMENT = 64  # chunks between two checkpoints: the backward pass computes all else of a segment anew
    reads_on = True  # past block_size, since it has no positions

    @staticmethod
    def size(config):
        """Five projections; three convolutions; alpha, eta and theta; the initial memories. There are no gains."""
        c, width = config, config.n_head * config.head_dim
        return 5 * c.n_embd * width + 3 * 4 * width + 3 * c.n_head * (c.n_embd + 1) + 2 * width * c.head_dim, 0

    @staticmethod
    def flops(config):
        """6 for each parameter of a projection or convolution. In each head, a token is multiplied 11 times by d x d
        matrices (3 for its gradient, 4 to add it to both weights and momenta, 4 to read), and 4 times by the C tokens
        of its chunk, half of which is needed. D E, a product of two triangular matrices, takes C^2 / 6."""
        d, C = config.head_dim, min(config.memory_chunk, config.block_size)
        projections = Titans.size(config)[0] - config.n_head * (2 * d * d + 3)  # without initial memories and biases
        return 6 * (projections + config.n_head * (11 * d * d + 2 * C * d + C * C // 6))

    def __init__(self, config):
        super().__init__()
        self.config = config
        c, width = config, config.n_head * config.head_dim
        self.qkv_proj = Linear(c.n_embd, 3 * width)
        self.rate_proj = Linear(c.n_embd, 3 * c.n_head)
        self.gate_proj = Linear(c.n_embd, width)
        self.o_proj = Linear(width, c.n_embd, to_stream=True)
        self.taps = nn.Parameter(torch.randn(4, 3 * width) / 2)  # four taps of 1/2 keep the scale of their input
        # Keys of norm 1 reach silu with a standard deviation of 1. The norm undoes the scale of W2, but a small W2
        # learns faster than W1: where both are fast, the weights are chaotic and their gradients explode.
        self.memory = nn.Parameter(torch.randn(2, c.n_head, c.head_dim, c.head_dim))
        self.memory.data[1] *= 0.02
        rates = torch.tensor([[0.1 / c.block_size], [0.5], [0.5]])  # initial alpha, eta, and theta over its maximum
        self.rate_bias = nn.Parameter(rates.logit().repeat(1, c.n_head).flatten())

    def initial_state(self, x):
        """What is kept of the tokens read so far: W and S of both layers (2, B, H, d, d), the weights at the start of
        the current chunk, where gradients are taken, the last inputs of the convolution, and the number of tokens."""
        W = self.memory.to(torch.promote_types(x.dtype, torch.float32))[:, None].repeat(1, len(x), 1, 1, 1)
        return dict(W=W, S=torch.zeros_like(W), start=W, inputs=x.new_zeros(len(x), 3, self.taps.size(1)), length=0)

    def forward(self, x, rotary=None, cache=None):
        """x: (B, T, C). Returns (B, T, C). Memory and rates are in float32 in any case."""
        state = cache or self.initial_state(x)
        y = self.read(state, torch.cat((state['inputs'], self.qkv_proj(x)), dim=1), x)
        if cache is not None:
            cache.update(state)
        return self.o_proj(y * self.gate_proj(x).sigmoid())

    @torch.compiler.disable  # a loop over chunks takes minutes to compile, and its time is in matrix products anyway
    def read(self, state, inputs, x):
        """Carry the state through x in segments: the rest of a chunk, up to SEGMENT whole ones, or part of one."""
        chunk, t, outputs = self.config.memory_chunk, 0, []
        while t < x.size(1):
            n = min(chunk - state['length'] % chunk, x.size(1) - t)
            if n == chunk:
                n *= min((x.size(1) - t) // chunk, self.SEGMENT)
            y, state['W'], state['S'] = checkpoint(
                self.read_chunks, inputs[:, t:t + n + 3], x[:, t:t + n], state['W'], state['S'], state['start'],
                use_reentrant=False, preserve_rng_state=False)
            outputs.append(y)
            t, state['length'] = t + n, state['length'] + n
            if state['length'] % chunk == 0:
                state['start'] = state['W']
        state['inputs'] = inputs[:, -3:]
        return torch.cat(outputs, dim=1)

    def read_chunks(self, inputs, x, W, S, start):
        """Read N chunks of C tokens, x (B, N * C, n_embd), with the convolution's inputs (B, 3 + N * C, 3 * width).
        Returns y (B, N * C, width), and the W and S after them.

        In a chunk that begins with W and S, W_t = keep_t W + m_t S - sum_{i <= t} A[t, i] G_i, with D[t, i] the product
        of 1 - alpha over i + 1..t, E[t, i] theta_i times that of eta, A = D E, keep_t and eta_t the products from the
        start through t, m = D eta.
        """
        c, (B, T, _), C = self.config, x.size(), min(x.size(1), self.config.memory_chunk)
        qkv = F.silu(sum(tap * inputs[:, i:i + T] for i, tap in enumerate(self.taps.to(inputs.dtype)))).to(W.dtype)
        q, k, v = qkv.view(B, T // C, C, 3, c.n_head, c.head_dim).permute(3, 1, 0, 4, 2, 5)  # (N, B, H, C, d)
        q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), RMSNorm.apply(v, c.norm_eps)
        rates = self.rate_proj(x.to(W.dtype)) + self.rate_bias
        alpha, eta, theta = rates.view(B, T // C, C, 3, c.n_head, 1).permute(3, 1, 0, 4, 2, 5)  # (N, B, H, C, 1)
        theta = 0.1 * (-eta).sigmoid() * theta.sigmoid() / c.memory_chunk  # as momentum and the steps of a chunk add up
        log_keep, log_eta = F.logsigmoid(-alpha), F.logsigmoid(eta)
        D, E = products(log_keep), products(log_eta) * theta.mT  # (N, B, H, C, C)
        A = D @ E
        keep, eta = log_keep.cumsum(-2).exp(), log_eta.cumsum(-2).exp()
        m = D @ eta
        ends = keep[..., -1:, :], m[..., -1:, :], eta[..., -1:, :]  # of each chunk
        steps = A[..., -1:, :].mT, E[..., -1:, :].mT  # how far each token moves W and S by the end of its chunk
        chunks = []
        for keep_, m_, eta_, A_, E_, k_, v_ in zip(*ends, *steps, k, v):
            u, e, a = gradients(*start, k_, v_, c.norm_eps)
            chunks.append((W, S, u, e, a))
            left, right = torch.stack((u, e)), torch.stack((k_, a))
            W, S = keep_ * W + m_ * S + (A_ * left).mT @ right, eta_ * S + (E_ * left).mT @ right
            start = W
        starts, momenta, u, e, a = (torch.stack(each) for each in zip(*chunks))

        def multiply(x, layer, left, right):
            """W_t x_t of every token t."""
            return keep * (x @ starts[:, layer].mT) + m * (x @ momenta[:, layer].mT) + (A * (x @ right.mT)) @ left

        y = RMSNorm.apply(multiply(F.silu(multiply(q, 0, u, k)), 1, e, a), c.norm_eps)
        return y.permute(1, 0, 3, 2, 4).reshape(B, T, -1).to(x.dtype), W, S


def products(log_rates):
    """(..., C, C): the product of the rates over i + 1..t at [t, i], 0 above the diagonal. log_rates: (..., C, 1)."""
    sums = log_rates.cumsum(-2)
    above = torch.ones(sums.size(-2), sums.size(-2), dtype=torch.bool, device=sums.device).triu(1)
    return (sums - sums.mT).masked_fill(above, -torch.inf).exp()


def gradients(W1, W2, k, v, eps):
    """u, e and a, (..., C, d): the gradients of -v' M(k) are -u k' by W1 and -e a' by W2. k, v: (..., C, d)."""
    z = k @ W1.mT
    s = z.sigmoid()
    a = z * s  # silu(z), whose derivative is s + a (1 - s)
    x = a @ W2.mT
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = r * x
    e = r * (v - y * (v * y).mean(-1, keepdim=True))
    return (e @ W2) * (s + a * (1 - s)), e, a


MIXERS = {'attention': Attention, 'gated': GatedAttention, 'titans': Titans}


# ----------------------------------------------------------------------------------------------------------------------
# Pretrained models: Llama and OLMo-2, as transformers reads them

HF_NAMES = {  # our names of weights and theirs, as regular expressions that are applied one after the other
    r'\.norm\.': '.post_attention_layernorm.', 'ffn.norms.0': 'post_feedforward_layernorm', 'ffn.mlps.0': 'mlp',
    'mixer': 'self_attn', '^blocks': 'model.layers', '^norm': 'model.norm', '^embedding': 'model.embed_tokens',
    '^head': 'lm_head', 'gain$': 'weight'}
LLAMA_NORMS = {'self_attn.[qkv]_proj': 'input_layernorm', 'mlp.(gate|up)_proj': 'post_attention_layernorm',
               'lm_head': 'model.norm'}  # their matrices, and the norm before each
SUPPORTED = {  # settings in transformers that must have one of these values, the default first
    'architectures': [['LlamaForCausalLM'], ['Olmo2ForCausalLM']], 'rope_type': ['default', 'llama3'],
    'attention_bias': [False], 'mlp_bias': [False], 'hidden_act': ['silu'], 'partial_rotary_factor': [1.0],
    'quantization_config': [None]}


def read_pretrained(name, changes):
    """The GPTConfig of a pretrained model, with changes, and its weights by their names in transformers."""
    try:
        import transformers
        transformers.utils.logging.set_verbosity_error()  # what matters of its warnings is among the errors here
        transformers.utils.logging.disable_progress_bar()  # of reading; that of a download stays
        theirs = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = pretrained_shape(theirs)
        if changes.get('block_size', 0) > config.block_size:
            raise ValueError(f'block_size={changes["block_size"]}: it was trained with at most {config.block_size}')
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=theirs, dtype='auto', output_loading_info=True, trust_remote_code=False)
        if wrong := sorted([*found['missing_keys'], *found['unexpected_keys']]):
            raise ValueError(f'its file of weights has missing or unexpected keys: {", ".join(wrong)}')
    except Exception as error:  # of many kinds, also where transformers is not installed
        raise ValueError(f'hf:{name}: {(str(error) or repr(error)).splitlines()[0]}') from error
    return replace(config, **changes), model.state_dict()


def pretrained_shape(c):
    """The GPTConfig of a config of transformers. Raises ValueError, with the setting, if GPT cannot express it."""
    rope = getattr(c, 'rope_parameters', None) or getattr(c, 'rope_scaling', None) or {}  # in transformers 5, and 4
    theirs = {**c.to_dict(), **rope}
    for name, values in SUPPORTED.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(f'{name}={theirs[name]!r}: must be {" or ".join(map(repr, values))}')
    olmo2, llama3 = c.architectures == ['Olmo2ForCausalLM'], theirs.get('rope_type') == 'llama3'
    scaling = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
    return GPTConfig(
        vocab_size=c.vocab_size, block_size=c.max_position_embeddings, n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads, n_kv_head=c.num_key_value_heads, head_dim=theirs.get('head_dim') or 0,
        n_embd=c.hidden_size, norm='olmo2' if olmo2 else 'pre', norm_eps=c.rms_norm_eps,
        rope_theta=float(theirs['rope_theta']), rope_scaling=','.join(str(theirs[name]) for name in scaling if llama3),
        ffn_width=c.intermediate_size, ffn_multiple=1, tie_embeddings=olmo2 and c.tie_word_embeddings)


@torch.no_grad()
def copy_pretrained(theirs, model):
    """Copy their weights into a GPT. Gains of Llama's norms go into the matrices after them, the last into the head."""
    for name, weight in model.state_dict().items():
        for ours, hf in HF_NAMES.items():
            name = re.sub(ours, hf, name)
        weight[:len(theirs[name])] = theirs[name]  # the padding of the vocabulary stays random
        for matrix, norm in LLAMA_NORMS.items():
            if model.config.norm == 'pre' and re.search(matrix, name):
                weight *= theirs[re.sub(matrix, norm, name)].float()
    return model


# ----------------------------------------------------------------------------------------------------------------------
# Speed: two operations written out, device and dtype, memory

class RMSNorm(torch.autograd.Function):
    """F.rms_norm(x, x.shape[-1:], eps=eps): y = r x with r = 1 / sqrt(mean(x^2) + eps). This gradient, dx = r (dy - y
    mean(dy y)), takes half the passes over the stream of autograd's and keeps only y, which the next matrix product
    keeps too. With F.rms_norm a step at K = 8 takes 1.05 times as long (12 layers, on a CPU)."""

    @staticmethod
    def forward(ctx, x, eps):
        square = x.float().square() if x.dtype == torch.float16 else x.square()  # in float16 256^2 is infinite
        mean = square.mean(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        r = torch.rsqrt(mean + eps).to(x.dtype)
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        mean = (dy * y).mean(-1, keepdim=True, dtype=torch.promote_types(y.dtype, torch.float32)).to(y.dtype)
        return torch.addcmul(dy, y, mean, value=-1).mul_(r), None


LOSS_CHUNK = 4096 if torch.cuda.is_available() else 1024  # tokens: more keep a GPU busier and fill a CPU's memory


class CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(x @ weight.T, targets). x: (N, C) in the compute dtype; weight: (padded vocabulary, C).

    The logits are the largest tensor of a small model, so they exist for a chunk of tokens at a time. The gradient is
    taken as soon as the softmax is known: nothing is computed twice."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        w, dx, dw, loss = weight.to(x.dtype), [], torch.zeros_like(weight), 0.0
        for x_, targets_ in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)):
            logits = x_ @ w.T
            logits[:, vocab_size:] = -torch.inf
            log_p = logits.log_softmax(-1, dtype=torch.float32)
            log_p_targets = log_p.gather(1, targets_[:, None])
            loss = loss - log_p_targets.sum()
            # softmax(logits) - onehot(targets): rounded in one compiled pass, then the targets' entries are set.
            dlogits = log_p.exp_().to(x.dtype)
            dlogits.scatter_(1, targets_[:, None], (log_p_targets.exp() - 1).to(x.dtype))
            dx.append(dlogits @ w)
            dw.add_(dlogits.T @ x_)
        ctx.save_for_backward(torch.cat(dx), dw)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad / len(dx)
        return dx.mul_(grad), dw.mul_(grad), None, None  # in place: they are large, and used once


def resolve_device(device='auto', dtype='auto'):
    """The device and the compute dtype for these settings of train.py. Raises ValueError."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    kind = re.sub(r':\d+$', '', device)
    available = {'cpu': True, 'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    if not available.get(kind):
        raise ValueError(f'device={device}: must be auto, or one of cpu, cuda and mps that this machine and torch have')
    if dtype == 'auto' and kind == 'cuda':
        dtype = 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    if dtype == 'auto':
        instructions = '_is_avx512_bf16_supported', '_is_amx_tile_supported'  # torch has no public names for these yet
        fast = kind == 'cpu' and any(getattr(torch.cpu, name, bool)() for name in instructions)
        dtype = 'bfloat16' if fast else 'float32'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'dtype={dtype}: must be auto, float32, bfloat16 or float16')
    return device, getattr(torch, dtype)


def keep_freed_memory():
    """Make glibc keep the memory of freed tensors. By default it returns large blocks to the system at once, and the
    next tensor of that size costs a page fault every 4 KB. Does nothing with another C library."""
    if sys.platform == 'linux' and hasattr(ctypes.CDLL(None), 'mallopt'):
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


# ----------------------------------------------------------------------------------------------------------------------
# What a shape costs, and which shapes are possible

def budget(config):
    """Parameters by component, and FLOPs of a token, forward and backward, as a dict of ints. FLOPs are 6 for each
    parameter of an FFN or the head, and what the mixer says. nanoGPT counts the masked half of attention too, which
    makes its mfu 1.2 times ours for standard_113m."""
    c, widths, mixer, head = config, ffn_widths(config), MIXERS[config.mixer], padded_vocab(config) * config.n_embd
    counts = {'mixer': c.n_layer * mixer.size(c)[0], 'ffn': 3 * c.n_embd * sum(map(sum, widths)),
              'gains': c.n_layer * mixer.size(c)[1]}
    if c.norm == 'olmo2':  # after every mixer and MLP, and at the end
        counts['gains'] += c.n_embd * (c.n_layer * (1 + len(widths[0])) + 1)
    counts['non_embedding'] = sum(counts.values())
    counts['embedding'] = head if c.tie_embeddings else 2 * head
    counts['total'] = counts['non_embedding'] + counts['embedding']
    counts['layer_flops'] = c.n_layer * mixer.flops(c) + 6 * counts['ffn']
    counts['head_flops'] = 6 * head
    counts['flops_per_token'] = counts['layer_flops'] + counts['head_flops']
    return counts


def activations(config):
    """Bytes a token that a compiled micro-step in bfloat16 keeps for its backward pass: worked out, not measured. Kept
    are the side of every matrix that is not the stream (parameters / n_embd channels in all), the inputs of mixers and
    MLPs (with olmo2 their outputs too), attention's output, normed queries and keys, and the last norm's two sides."""
    c, counts, q = config, budget(config), config.n_head * config.head_dim
    olmo2, stream = c.norm == 'olmo2', (1 + len(ffn_widths(c)[0])) * c.n_embd
    layer = stream * (1 + olmo2) + q + (olmo2 or c.qk_norm) * (q + c.n_kv_head * c.head_dim)
    return 2 * round((counts['mixer'] + counts['ffn']) / c.n_embd + c.n_layer * layer + 2 * c.n_embd)


def possible_shapes(settings, same):
    """Which shapes can I have at the same parameters (of mixers and FFNs) or the same flops (a token)? K = 1, 2, 4, 8;
    d_model from about 0.75 to 2 times the settings', in whole heads; d_model / L from 60 to 250. Yields the settings
    that make each shape, and its GPTConfig. Raises ValueError."""
    config = shape_of(settings)
    counts, own = budget(config), config.n_embd // config.head_dim
    sizes = {'parameters': {'ffn_width': 0, 'flops_budget': 0, 'param_budget': counts['mixer'] + counts['ffn']},
             'flops': {'ffn_width': 0, 'flops_budget': counts['flops_per_token']}}
    if same not in sizes:
        raise ValueError(f'same={same}: must be parameters or flops')
    one, stack = ('tapered', 'tapered_hourglass') if 'tapered' in config.ffn else ('standard', 'hourglass')
    quarter = max(1, own // 4)
    for n_mlp in sorted({1, 2, 4, 8, config.n_mlp}):
        for n_head in range(own - quarter, 2 * own + 1, quarter):
            n_embd = n_head * config.head_dim
            for n_layer in range(math.ceil(n_embd / 250), n_embd // 60 + 1):
                shape = {'ffn': stack if n_mlp > 1 else one, 'n_mlp': n_mlp, 'n_layer': n_layer, 'n_embd': n_embd,
                         'n_head': n_head, 'n_kv_head': settings['n_kv_head'] * n_head // own, **sizes[same]}
                with contextlib.suppress(ValueError):  # too little is left for the FFNs
                    yield shape, shape_of({**settings, **shape})


def shape_of(settings):
    """The GPTConfig in the settings of a script, a dict. Raises ValueError."""
    return GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})


def shape_rules(c):
    """Yield (field, whether it is right, what would be right). A rule may rely on those before it."""
    for name in 'vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'memory_chunk', 'ffn_multiple', 'n_mlp':
        yield name, getattr(c, name) >= 1, 'must be at least 1'
    for name in 'n_kv_head', 'head_dim', 'ffn_width', 'flops_budget', 'param_budget':
        yield name, getattr(c, name) >= 0, 'must not be negative'
    for name in 'norm_eps', 'rope_theta', 'init_std', 'taper_start', 'taper_end':
        yield name, 0 < getattr(c, name) < math.inf, 'must be positive and finite'
    ffns = 'standard', 'hourglass', 'tapered', 'tapered_hourglass'
    for name, known in (('mixer', MIXERS), ('norm', ('pre', 'olmo2')), ('ffn', ffns)):
        yield name, getattr(c, name) in known, f'must be one of {", ".join(known)}'
    yield 'dropout', 0 <= c.dropout < 1, 'must be at least 0 and below 1'
    scaling = numbers(c.rope_scaling or '8,1,4,8192')
    yield 'rope_scaling', len(scaling) == 4 and scaling[1] < scaling[2] and min(scaling) > 0, 'must be like 8,1,4,8192'
    yield 'n_head', c.head_dim, f'must divide n_embd={c.n_embd}, or head_dim be given'
    yield 'head_dim', c.head_dim % 2 == 0, 'must be even: rotary embeddings turn pairs'
    yield 'n_kv_head', c.n_head % c.n_kv_head == 0, f'must divide n_head={c.n_head}'
    yield 'n_kv_head', c.mixer != 'titans' or c.n_kv_head == c.n_head, 'must be 0: Titans has a memory for each head'
    normed = c.mixer == 'titans' or c.norm == 'olmo2'
    yield 'qk_norm', not (c.qk_norm and normed), f'must be off: {c.mixer} with norm={c.norm} norms them already'
    yield 'mlp_periods', re.fullmatch(r'([1-9]\d*(,[1-9]\d*)*)?', c.mlp_periods), "must be like '1,4,16'"
    yield 'mlp_periods', len(numbers(c.mlp_periods)) in (0, c.n_mlp), f'must be a number for each of {c.n_mlp} MLPs'
    yield 'mlp_periods', not c.mlp_periods or 'hourglass' in c.ffn, 'needs ffn=hourglass or tapered_hourglass'
    yield 'taper', c.taper in TAPERS or 'tapered' in c.ffn, f'must be one of {", ".join(TAPERS)}, unless ffn=tapered'
    yield 'n_layer', c.n_layer > 1 or 'tapered' not in c.ffn, 'a taper needs at least 2 layers'
    widths = relative_widths(c)
    yield 'taper', len(widths) == c.n_layer, f'must be {", ".join(TAPERS)}, or n_layer={c.n_layer} relative widths'
    is_1 = abs(sum(widths) - c.n_layer) <= 1e-6 * c.n_layer  # their mean
    yield 'taper', is_1 or c.taper in TAPERS, 'must have the mean 1'
    yield 'taper_start', is_1 or abs(c.taper_start + c.taper_end - 2) < 1e-6, f'must be 2 - {c.taper_end} (taper_end)'
    yield 'taper', min(widths) > 0, 'leaves a layer nothing'
    yield 'ffn_width', c.sized_by, 'state the size: ffn_width, flops_budget or param_budget'
    yield 'ffn_width', c.ffn_width % c.ffn_multiple == 0, f'must be a multiple of ffn_multiple={c.ffn_multiple}'
    yield c.sized_by, min(map(min, ffn_widths(c))) > 0, f'leaves some MLP less than ffn_multiple={c.ffn_multiple} units'


def shape_table(config):
    """The shape of a model in text, with its FFN widths as a bar chart over the depth."""
    c, widths = config, ffn_widths(config)
    K, layers = len(widths[0]), [sum(row) for row in widths]
    mean = sum(layers) / c.n_layer
    heads = f'{c.n_head} heads of {c.head_dim}, {c.n_kv_head} of keys and values'
    yield f'{c.ffn}, {c.mixer}: K = {K}, L = {c.n_layer}, d_model = {c.n_embd}, {heads}\n'
    for layer, row in enumerate(widths):
        row_text = f'{row[0]} x {K}' if len(set(row)) == 1 and K > 1 else ' + '.join(map(str, row))
        yield f'  layer {layer:2d}  {"#" * round(48 * sum(row) / max(layers)):48s}  {row_text}'
    yield f'\n  hidden units   {mean:,.1f} a layer on average, from {c.sized_by}={getattr(c, c.sized_by):,}'
    if 'tapered' in c.ffn:
        yield f'  over the mean  {layers[0] / mean:.3f} in the first layer, {layers[-1] / mean:.3f} in the last'
    kind = 'below 1: an hourglass' if mean < K * c.n_embd else 'a split of the wide MLP' if K > 1 else 'wide'
    yield f'  d_model / L    {c.n_embd / c.n_layer:.1f}\n  d_h / d_model  {mean / K / c.n_embd:.3f}, {kind}\n'


def budget_table(config, baseline=None):
    """Parameters, FLOPs and memory in text, with the difference to a baseline."""
    mine, theirs = budget(config), budget(baseline or config)
    yield f'  {"":16s}{"":>18s}{"share":>10s}' + (f'{"baseline":>18s}{"difference":>18s}' if baseline else '')
    for name, count in mine.items():
        cells = f'{count:18,d}{count / mine["flops_per_token" if "flops" in name else "total"]:10.1%}'
        if baseline:
            change = count - theirs[name]
            cells += f'{theirs[name]:18,d}{change:+18,d}{change / max(1, theirs[name]):+10.3%}'
        yield f'  {name.replace("_", "-"):16s}{cells}'
    states, kept = 16 * mine['total'] / 2**30, config.block_size * activations(config) / 2**30
    yield f'\n  FLOPs are of a token, forward and backward. Weights, gradients and AdamW take {states:.2f} GiB,'
    yield f'  activations of a sequence about {kept:.2f} GiB (worked out for bfloat16, not measured).'


def shapes_table(settings, same):
    """What the possible shapes cost in text, sorted by FLOPs, with the flags that make each."""
    base, columns = budget(shape_of(settings)), 'K L d_model heads d_h/d mixer FFN params FLOPs layers cache saved'
    found = [(budget(config), config, shape) for shape, config in possible_shapes(settings, same)]
    yield ''.join(f'{column:>8s}' for column in columns.split()) + '  flags'
    for counts, c, shape in sorted(found, key=lambda row: row[0]['flops_per_token']):
        size, d_h = counts['mixer'] + counts['ffn'], counts['ffn'] / (3 * c.n_embd * c.n_layer * c.n_mlp)
        cells = [c.n_mlp, c.n_layer, c.n_embd, c.n_head, f'{d_h / c.n_embd:.3f}']
        cells += [f'{counts[name] / size:.1%}' for name in ('mixer', 'ffn')]
        cells += [f'{counts[name] / base[name]:.3f}' for name in ('non_embedding', 'flops_per_token', 'layer_flops')]
        reads_on = getattr(MIXERS[c.mixer], 'reads_on', False)  # by a state of fixed size
        cells += [0 if reads_on else 4 * c.n_layer * c.n_kv_head * c.head_dim, activations(c)]
        flags = ' '.join(f'--{name}={value}' for name, value in shape.items() if value or settings[name])
        yield ''.join(f'{cell:>8}' for cell in cells) + f'  {flags}'
    yield '\nOver those of the config: params (without embeddings), FLOPs (a token), layers (FLOPs without the head).'
    yield 'Bytes a token in bfloat16: cache (keys and values), saved (activations for the backward pass).'


if __name__ == '__main__':
    from configurator import configure, fail_on, show
    from prepare import read_meta

    baseline = ''  # config files of a baseline to compare with, applied in order, separated by commas
    shapes = False  # list the shapes that the budget allows, with the flags that make them
    same = 'parameters'  # what all these shapes share: parameters (of token mixers and FFNs) or flops (of a token)
    dataset = 'stdlib'  # prepared data set whose vocabulary counts where vocab_size is 0

    def read_settings(argv=None):
        settings = configure(dict(globals()), GPTConfig, files_of=('train.py', GPTConfig), argv=argv)
        settings['vocab_size'] = settings['vocab_size'] or read_meta(settings['dataset'])['vocab_size']
        return settings

    with fail_on(ValueError):
        settings = read_settings()
        lines, files = shapes_table(settings, settings['same']), settings['baseline']
        if not settings['shapes']:
            compared = shape_of(read_settings(files.split(','))) if files else None
            lines = [*shape_table(shape_of(settings)), *budget_table(shape_of(settings), compared)]
        show('\n'.join(lines))
