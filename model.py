"""
A decoder-only Transformer whose feed-forward networks take any shape at a fixed parameter budget.

Every layer is a token mixer followed by an FFN, and every FFN is a stack of K residual SwiGLU MLPs. So the shape of
all the FFNs of a model is one table of hidden widths, n_layer rows of K, which `ffn_widths` makes:

    standard            K = 1, the same width in every layer
    hourglass           K > 1 narrow MLPs in place of a wide one (Liao et al., arXiv 2602.06471)
    tapered             K = 1, widths that fall with depth (Bayat, Behrouz and Courville, arXiv 2606.23670)
    tapered_hourglass   both

The rest is LLaMA: rotary embeddings, pre-norm, SwiGLU, no biases. The norms have no gains, since a gain before a
linear layer could be folded into its matrix: so K MLPs hold exactly as many parameters as one that is K times as wide,
and models of one budget match to the last parameter. Two norms lose something, as no matrix of their own follows: the
last one before a tied head, and that of queries and keys (qk_norm), which bounds attention scores by sqrt(head_dim).
With norm = 'olmo2' the block is that of OLMo-2, gains included.

The file goes from the shape through the layers to the whole model, GPT. After it come other token mixers, pretrained
models, what is written out for speed, what a shape costs, what it may be, and the machine.

`python model.py config/hourglass_113m.py --baseline=config/standard_113m.py` prints what a shape costs without
building anything.
"""

import contextlib
import copy
import ctypes
import logging
import math
import re
import sys
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    """The shape of a model.

    Raises ValueError if no such model can be: see check_shape.
    """

    vocab_size: int = 50257  # token ids; the table is padded to a multiple of 64, the logits are not
    block_size: int = 1024  # tokens of the longest context
    n_layer: int = 12  # layers, each a token mixer and an FFN
    n_head: int = 12  # heads of the token mixer
    n_kv_head: int = 0  # heads of keys and values; 0: n_head
    head_dim: int = 0  # width of a head; 0: n_embd // n_head
    n_embd: int = 768  # d_model, the width of the residual stream
    mixer: str = 'attention'  # attention, gated or titans
    memory_chunk: int = 64  # tokens for which Titans' memory takes its gradients at one set of weights
    norm: str = 'pre'  # pre: x + f(norm(x)); or olmo2: x + norm(f(x)), and queries and keys are normed, all with gains
    ffn: str = 'standard'  # standard, hourglass, tapered or tapered_hourglass
    ffn_width: int = 0  # hidden units of a layer, the mean over the depth; 0: what meets param_budget
    param_budget: int = 0  # parameters of token mixers and FFNs together, where ffn_width is 0
    ffn_multiple: int = 16  # the width of every MLP is a multiple of this
    n_mlp: int = 4  # K, the number of MLPs in every FFN of an hourglass
    mlp_periods: str = ''  # Hope: '1,4,16' changes the MLPs of an FFN every 1, 4 and 16 steps; empty: every step
    taper: str = 'cosine'  # cosine, linear, sigmoid or step
    taper_start: float = 1.5  # width of the first layer over the mean, if the mean of the taper's curve is 1/2
    taper_end: float = 0.5  # width of the last layer over the mean
    norm_eps: float = 1e-6  # what RMSNorm adds to the mean square
    rope_theta: float = 10000.0  # base of the rotary embeddings' wavelengths
    rope_scaling: str = ''  # Llama 3's 'factor,low,high,context' of rotary_table, like '8,1,4,8192'; empty: none
    qk_norm: bool = False  # RMSNorm of queries and keys, per head
    tie_embeddings: bool = True  # the head is the embedding table
    dropout: float = 0.0  # rate for embeddings, attention, and what is added to the stream
    init_std: float = 0.02  # standard deviation of the initial weights
    init_scaled: bool = True  # matrices that write to the stream start smaller, by the root of their number

    def __post_init__(self):
        check_shape(self)  # and fill in head_dim and n_kv_head

    @property
    def is_hourglass(self):
        return self.ffn in ('hourglass', 'tapered_hourglass')

    @property
    def is_tapered(self):
        return self.ffn in ('tapered', 'tapered_hourglass')


# ----------------------------------------------------------------------------------------------------------------------
# The shape of all FFNs


def ffn_widths(config):
    """The hidden widths of all MLPs, a list of n_layer rows of K.

    All hidden units of the model are dealt to the layers in proportion to the taper, then evenly to the K MLPs of each
    layer, in units of ffn_multiple. Nothing is lost in rounding: widths add up to the same total for every kind of FFN.
    """
    unit = config.ffn_multiple
    n_mlp = config.n_mlp if config.is_hourglass else 1
    layers = deal(hidden_units(config) // unit, relative_widths(config))
    return [[unit * share for share in deal(layer, [1] * n_mlp)] for layer in layers]


def deal(total, weights):
    """Split an integer in proportion to the weights, by largest remainder: deal(10, [3, 2, 1]) is [5, 3, 2].

    Every share is rounded down, and what is then left goes one by one to those that lost most, in a tie to the earlier.
    """
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

    A step has thirds of the depth at start and at end; the middle makes the mean 1.
    """
    L, start, end = config.n_layer, Fraction(str(config.taper_start)), Fraction(str(config.taper_end))
    if not config.is_tapered:
        return [1] * L
    if config.taper == 'step':
        third = max(1, L // 3)
        middle = L - 2 * third
        return [start] * third + [(L - third * (start + end)) / (middle or 1)] * middle + [end] * third
    curve = [Fraction(TAPERS[config.taper](Fraction(layer, L - 1))) for layer in range(L)]
    # Rounded, so that the curve and its mirror image add up to exactly 1.
    return [end + (start - end) * y.limit_denominator(10**6) for y in curve]


def mixer_params(config):
    """Parameters of all token mixers, without gains."""
    return config.n_layer * MIXERS[config.mixer].size(config)[0]


def hidden_units(config):
    """The hidden units of all FFNs of the model together, by ffn_width or else by param_budget."""
    if config.ffn_width:
        return config.n_layer * config.ffn_width
    left = config.param_budget - mixer_params(config)
    return round(Fraction(left, 3 * config.n_embd * config.ffn_multiple)) * config.ffn_multiple


# ----------------------------------------------------------------------------------------------------------------------
# The layers


class Linear(nn.Linear):
    """A matrix. Its float32 weights, which the optimizer needs, are used in the dtype of the input. to_stream says that
    what comes out is added to the residual stream: such a matrix starts smaller."""

    def __init__(self, n_in, n_out, to_stream=False):
        super().__init__(n_in, n_out, bias=False)
        self.to_stream = to_stream

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + norm_eps) over the last dimension, with a gain for each of its channels or none."""

    def __init__(self, config, width, gain=False):
        super().__init__()
        self.eps = config.norm_eps
        self.gain = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x):
        y = rms_norm(x, self.eps)
        return y if self.gain is None else y * self.gain.to(x.dtype)


def rotary_table(config):
    """cos and sin of the angles position * theta^(-2i / head_dim), each (block_size, head_dim // 2).

    With rope_scaling, a wave that fits fewer than low times into the old context is stretched by the factor, one that
    fits more than high times is kept, and those between are mixed (Llama 3)."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling:
        factor, low, high, context = map(float, config.rope_scaling.split(','))
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

    A token mixer offers what this one does: its size and FLOPs by the config alone, and forward(x, rotary, cache). The
    cache, in generation, is a dict that is empty before the prompt; a mixer keeps in it what it needs of the tokens
    that it has read. After the prompt T is 1. With reads_on = True a mixer goes on past block_size by its cache.
    """

    @staticmethod
    def size(config):
        """Parameters, without gains, and gains."""
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        return config.n_embd * (2 * q + 2 * kv), (q + kv if config.norm == 'olmo2' else 0)

    @staticmethod
    def flops(config):
        """FLOPs of a token, forward and backward: 6 for each parameter of a matrix, and 12 for each channel of each
        token that attention reads: half of the context, in the mean."""
        return 6 * Attention.size(config)[0] + 12 * config.n_head * config.head_dim * config.block_size // 2

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
        """All heads side by side, (B, T, n_head * head_dim)."""
        c, (B, T, _) = self.config, x.size()
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.view(B, T, -1, c.head_dim).transpose(1, 2) for y in (q, k, v))  # (B, H, T, head_dim)
        if c.qk_norm:
            q, k = rms_norm(q, c.norm_eps), rms_norm(k, c.norm_eps)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = self.append(cache, k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None or T > 1, dropout_p=c.dropout if self.training else 0.0,
            enable_gqa=not c.n_kv_head == c.n_head)  # not !=, which torch 2.6 cannot compile
        return y.transpose(1, 2).reshape(B, T, -1)

    def append(self, cache, k, v):
        """Add k, v (B, n_kv_head, T, head_dim) to the cache, which has room for block_size. Returns all in it."""
        if not cache:
            room = *k.shape[:2], self.config.block_size, k.size(3)
            cache.update(k=k.new_empty(room), v=v.new_empty(room), length=0)
        start, cache['length'] = cache['length'], cache['length'] + k.size(2)
        cache['k'][:, :, start:cache['length']] = k
        cache['v'][:, :, start:cache['length']] = v
        return cache['k'][:, :, :cache['length']], cache['v'][:, :, :cache['length']]


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
        mixer, norm = self.mixer, self.norm
        x = x + self.dropout(norm(mixer(x, rotary, cache)) if self.olmo2 else mixer(norm(x), rotary, cache))
        return self.ffn(x)


# ----------------------------------------------------------------------------------------------------------------------
# The language model


def padded_vocab(config):
    return -(-config.vocab_size // 64) * 64


class GPT(nn.Module):
    """The language model. compute_dtype is what matrix products and the residual stream are in; weights are float32."""

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(padded_vocab(config), config.n_embd)
        self.blocks = nn.ModuleList(Block(config, widths) for widths in ffn_widths(config))
        self.norm = Norm(config, config.n_embd, gain=config.norm == 'olmo2')
        self.head = Linear(config.n_embd, padded_vocab(config))
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config)
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, with standard deviation init_std; that of matrices that write to the stream is divided by the root of
        their number, with init_scaled. What a mixer has besides matrices starts as its class says."""
        writes = sum(getattr(module, 'to_stream', False) for module in self.modules())
        for module in self.modules():
            if isinstance(module, (nn.Embedding, Linear)) and not (module is self.head and self.config.tie_embeddings):
                scaled = self.config.init_scaled and getattr(module, 'to_stream', False)
                nn.init.normal_(module.weight, std=self.config.init_std / (math.sqrt(writes) if scaled else 1))

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, name, compute_dtype=torch.float32, **changes):
        """A Llama or OLMo-2 in the format of Hugging Face, from a folder or by its name there. changes are other values
        of fields of its GPTConfig: block_size, up to what it was trained with, and dropout. Raises ValueError, with
        what is wrong, if there is no such model, or no memory for it, or if GPT cannot express it."""
        config, weights = read_pretrained(name, changes)
        model = cls(config, compute_dtype)
        for name, weight in model.state_dict().items():
            theirs, gain = hf_names(name)
            weight[:len(weights[theirs])] = weights[theirs]  # the padding of the vocabulary stays random
            if gain and config.norm == 'pre':
                weight *= weights[gain].float()
        return model

    def forward(self, idx, targets=None, reduction='mean'):
        """idx: (B, T) token ids. Returns (logits (B, T, vocab_size) in float32, None), or, given targets (B, T),
        (None, loss): the mean cross-entropy in nats, or that of each token, (B, T), with reduction='none'."""
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        if reduction == 'mean':
            return None, cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), self.config.vocab_size)
        losses = [F.cross_entropy(self.logits(x_), targets_, reduction='none') for x_, targets_
                  in zip(x.flatten(0, 1).split(LOSS_CHUNK), targets.flatten().split(LOSS_CHUNK))]
        return None, torch.cat(losses).view_as(targets)

    def hidden(self, idx, caches=None, start=0):
        """The residual stream after the last layer and norm, (B, T, C). With the caches of all layers, idx goes on at
        position start, where they end."""
        rotary = [table[start:start + idx.size(1)].to(self.compute_dtype) for table in (self.cos, self.sin)]
        x = F.dropout(self.embedding(idx).to(self.compute_dtype), self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return self.norm(x)

    def logits(self, x):
        """The logits of the next token, (..., vocab_size) in float32, from the stream x (..., C)."""
        return self.head(x)[..., :self.config.vocab_size].float()

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """AdamW, fused; only matrices are decayed: not gains and biases, nor the initial memories of Titans, which near
        zero could learn nothing, as each of their two layers silences the other's gradient."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        groups = [{'params': matrices, 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.0}]
        return torch.optim.AdamW([group for group in groups if group['params']], learning_rate, betas, fused=True)

    def slow_parameters(self):
        """(name, parameter, period) of those that mlp_periods changes less often than every step."""
        periods = [int(period) for period in self.config.mlp_periods.split(',') if period]
        for layer, block in enumerate(self.blocks):
            for i, period in enumerate(periods):
                for name, parameter in block.ffn.mlps[i].named_parameters(f'blocks.{layer}.ffn.mlps.{i}'):
                    if period > 1:
                        yield name, parameter, period

    def generate(self, idx, max_new_tokens, **how):
        """Continue the prompts idx (B, T), all of one length: (B, T + n). Arguments as in generate_tokens."""
        return torch.cat([idx, *self.generate_tokens(idx, max_new_tokens, **how)], dim=1)

    @torch.no_grad()
    def generate_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None):
        """Yield the next token of each row, (B, 1), up to max_new_tokens times.

        temperature 0 is greedy; top_k > 0 keeps the k likeliest tokens, top_p < 1 the likeliest that reach that mass.
        Rows that have reached the stop_token repeat it; when all have, generation ends. Beyond block_size the model
        reads the last block_size tokens anew for each token, unless its mixer just reads on.
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
        reads_on = getattr(MIXERS[self.config.mixer], 'reads_on', False)
        caches, cached = [{} for _ in model.blocks], 0  # cached: how many tokens of idx are in them
        ended = torch.zeros_like(idx[:, :1], dtype=torch.bool)
        try:
            for _ in range(max_new_tokens):
                if idx.size(1) <= self.config.block_size or reads_on:
                    x = model.hidden(idx[:, cached:], caches, start=cached)
                    cached = idx.size(1)
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
    temperature = max(temperature, 1e-30)  # float32 would round a much smaller one to 0
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_k or top_p < 1:
        p, order = p.sort(descending=True, stable=True)
        p[:, top_k or p.size(-1):] = 0
        p[:, 1:][p.cumsum(-1)[:, :-1] >= top_p] = 0  # what comes before already has the mass
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

    @staticmethod
    def flops(config):
        return Attention.flops(config) + 6 * config.n_embd * config.n_head * config.head_dim

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = Linear(config.n_embd, config.n_head * config.head_dim)

    def forward(self, x, rotary, cache=None):
        return self.o_proj(self.attend(x, rotary, cache) * self.gate_proj(x).sigmoid())


class Titans(nn.Module):
    """Long-term memory as the token mixer (Behrouz et al., arXiv 2501.00663, sections 3 and 4.4).

    In each head an MLP, M(k) = norm(W2 silu(W1 k)), learns while it reads to map keys to values, by gradient descent
    with momentum eta, step size theta and forgetting alpha, all three computed from each token:

        S_t = eta_t S_{t-1} - theta_t G_t       W_t = (1 - alpha_t) W_{t-1} + S_t       y_t = M_{W_t}(q_t)

    The loss is |M(k) - v|^2 / 2 or, since values are normed too and normed vectors have equal lengths, -v' M(k). Its
    gradients G are taken at the weights at the start of each chunk of memory_chunk tokens. There they are outer
    products, -u k' for W1 and -e a' for W2 (`gradients`), so that all is exact in matrix products over a chunk
    (`read_chunks`). Only the weights at the start of each chunk have to be computed one after the other (`Learn`).

    From the paper: these formulas, chunks, queries and keys of norm 1, convolution, SiLU and gate; from its authors'
    "Miras" (arXiv 2504.13173): the norm in M. Ours: that it is the only norm of y; normed values; heads, where the
    paper draws one memory; two layers; depthwise convolutions; no persistent tokens; and the memory alone (LMM), not
    MAC, MAG or MAL.
    """

    SEGMENT = 64  # chunks read at once: of a segment only its ends are kept, and all else is computed anew for backward
    reads_on = True  # beyond block_size: it has no positions

    @staticmethod
    def size(config):
        """Five projections; three convolutions; alpha, eta and theta; the initial memories. There are no gains."""
        c, width = config, config.n_head * config.head_dim
        if c.n_kv_head != c.n_head:
            raise ValueError(f'n_kv_head={c.n_kv_head}: must be 0 with mixer=titans: every head has its own memory')
        if c.qk_norm:
            raise ValueError('qk_norm=True: must be off with mixer=titans: its queries and keys have norm 1')
        return 5 * c.n_embd * width + 3 * 4 * width + 3 * c.n_head * (c.n_embd + 1) + 2 * width * c.head_dim, 0

    @staticmethod
    def flops(config):
        """6 for each parameter of a projection or convolution and, in each head, with d = head_dim and chunks of C
        tokens, 6 * (11 d^2 + 2 C d + C^2 / 6): a token is multiplied by d x d matrices 11 times (3 for its gradient, 4
        to add it to both weights and momenta, 4 to read) and by the C tokens of its chunk 4 times, of which half is
        needed, and D E is a product of two triangles."""
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
        self.taps = nn.Parameter(torch.randn(4, 3 * width) / 2)  # four taps of 1/2 keep their input's scale
        # Keys of norm 1 reach silu with a standard deviation of 1. The norm undoes the scale of W2, but a small W2
        # learns faster than W1: where both are fast, the weights are chaotic and their gradients explode.
        self.memory = nn.Parameter(torch.randn(2, c.n_head, c.head_dim, c.head_dim))
        self.memory.data[1] *= 0.02
        rates = torch.tensor([[0.1 / c.block_size], [0.5], [0.5]])  # alpha, eta and theta over its largest, at first
        self.rate_bias = nn.Parameter(rates.logit().repeat(1, c.n_head).flatten())

    def initial_state(self, x):
        """What is kept of the tokens read so far: weights and momentum (2, B, H, 2, d, d), the weights at the start of
        the current chunk, where gradients are taken, the convolution's last inputs, and the number of tokens."""
        memory = self.memory.to(torch.promote_types(x.dtype, torch.float32))
        start = memory[:, None].repeat(1, len(x), 1, 1, 1)
        return dict(weights=torch.stack((start, torch.zeros_like(start)), dim=-3), start=start,
                    inputs=x.new_zeros(len(x), 3, self.taps.size(1)), length=0)

    def forward(self, x, rotary=None, cache=None):
        """x: (B, T, C). Returns (B, T, C). Memory and rates are in float32 in any case."""
        state = cache or self.initial_state(x)
        y = self.read(state, torch.cat((state['inputs'], self.qkv_proj(x)), dim=1), x)
        if cache is not None:
            cache.update(state)
        return self.o_proj(y * self.gate_proj(x).sigmoid())

    def convolve(self, inputs):
        """SiLU of the convolution: inputs (B, 3 + T, 3 * width) to (B, T, 3 * width)."""
        T, taps = inputs.size(1) - 3, self.taps.to(inputs.dtype)
        return F.silu(sum(tap * inputs[:, i:i + T] for i, tap in enumerate(taps)))

    @torch.compiler.disable  # a loop over chunks takes minutes to compile, and its time is in matrix products anyway
    def read(self, state, inputs, x):
        """Carry the state through x in segments: the rest of a chunk, up to SEGMENT whole ones, or part of one."""
        chunk, t, outputs = self.config.memory_chunk, 0, []
        while t < x.size(1):
            n = min(chunk - state['length'] % chunk, x.size(1) - t)
            if n == chunk:
                n *= min((x.size(1) - t) // chunk, self.SEGMENT)
            y, state['weights'] = checkpoint(
                self.read_chunks, inputs[:, t:t + n + 3], x[:, t:t + n], state['weights'], state['start'],
                use_reentrant=False, preserve_rng_state=False)
            outputs.append(y)
            t, state['length'] = t + n, state['length'] + n
            if state['length'] % chunk == 0:
                state['start'] = state['weights'][..., 0, :, :]
        state['inputs'] = inputs[:, -3:]
        return torch.cat(outputs, dim=1)

    def read_chunks(self, inputs, x, weights, start):
        """Read x (B, N * C, C'), N chunks of C tokens, and the convolution's inputs. Returns y and the weights after.

        Of a chunk that begins with weights W and momentum S, the weights after token t are linear in the gradients:
        W_t = keep_t W + m_t S - sum_{i <= t} A[t, i] G_i, with D[t, i] the product of 1 - alpha over i + 1..t, E[t, i]
        that of eta, A = D E diag(theta), keep_t and eta_t the products from the start through t, m = D eta.
        """
        c, (B, T, _), C = self.config, x.size(), min(x.size(1), self.config.memory_chunk)
        qkv = self.convolve(inputs).to(weights.dtype).view(B, T // C, C, 3, c.n_head, c.head_dim)
        q, k, v = qkv.permute(3, 1, 0, 4, 2, 5)  # (N, B, H, C, d)
        rates = self.rate_proj(x.to(weights.dtype)) + self.rate_bias
        alpha, eta, theta = rates.view(B, T // C, C, 3, c.n_head).permute(3, 1, 0, 4, 2)  # (N, B, H, C)
        q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), rms_norm(v, c.norm_eps)
        # The steps of a chunk add up, and momentum makes each 1 / (1 - eta) times as long.
        theta = 0.1 * (-eta).sigmoid() * theta.sigmoid() / c.memory_chunk
        log_keep, log_eta = F.logsigmoid(-alpha), F.logsigmoid(eta)
        D, E = products(log_keep), products(log_eta)  # (N, B, H, C, C)
        A = D @ E * theta.unsqueeze(-2)
        keep, eta = log_keep.cumsum(-1).exp(), log_eta.cumsum(-1).exp()
        of_start = torch.stack((keep, (D @ eta.unsqueeze(-1)).squeeze(-1)), dim=-1)  # (N, B, H, C, 2): keep and m
        of_end = torch.stack((of_start[..., -1, :], F.pad(eta[..., -1:], (1, 0))), dim=-2)  # (N, B, H, 2, 2)
        steps = torch.stack((A[..., -1, :], E[..., -1, :] * theta), dim=-1)  # (N, B, H, C, 2)
        of_end, steps = torch.stack((of_end, of_end), dim=1), steps[:, None, ..., None]  # as both layers take them
        starts, u, e, a, weights = Learn.apply(weights, start, k, v, of_end, steps, c.norm_eps)

        def multiply(x, WS, left, right):
            """W_t x_t of every token t."""
            both = (x @ WS.flatten(-3, -2).mT).unflatten(-1, (2, -1))  # (N, B, H, C, 2, d): by weights and momentum
            return (of_start.unsqueeze(-1) * both).sum(-2) + (A * (x @ right.mT)) @ left

        y = rms_norm(multiply(F.silu(multiply(q, starts[:, 0], u, k)), starts[:, 1], e, a), c.norm_eps)
        return y.permute(1, 0, 3, 2, 4).reshape(B, T, -1).to(x.dtype), weights


def products(log_rates):
    """(..., C, C): the product of the rates over i + 1..t at [t, i], 0 above the diagonal. log_rates: (..., C)."""
    sums = log_rates.cumsum(-1)
    above = torch.ones(sums.size(-1), sums.size(-1), dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()


silu_backward = torch.ops.aten.silu_backward  # (gradient, silu's input)


def gradients(W1, W2, k, v, eps):
    """What makes up the gradients of -v' M(k), which are -u k' by W1 and -e a' by W2: u, e, a and, for their own
    gradients, z, r, y and f. W1, W2: (..., d, d); k, v: (..., C, d)."""
    z = k @ W1.mT
    a = F.silu(z)
    x = a @ W2.mT
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = r * x
    e = r * across(v, y)
    f = e @ W2
    return silu_backward(f, z), e, a, z, r, y, f


def across(g, y):
    """g - y mean(g y): the part of g that the norm whose output is y lets through to its input, over r."""
    return torch.addcmul(g, y, (g * y).mean(-1, keepdim=True), value=-1)


def factors(u, e, k, a, steps):
    """The two matrices, (2, B, H, C, 2 d) and (2, B, H, C, d), whose product a chunk adds to W above S."""
    return (torch.stack((u, e), dim=-5).unsqueeze(-2) * steps).flatten(-2), torch.stack((k, a), dim=-5)


class Learn(torch.autograd.Function):
    """Carry the memories through N chunks, one after the other.

    weights: W and S of both layers (2, B, H, 2, d, d); start: the W where the first chunk's gradients are taken; k, v:
    (N, B, H, C, d); of_end (N, 2, B, H, 2, 2): how a chunk changes W and S without its tokens; steps (N, 1, B, H, C, 2,
    1): how far each token's gradient moves W and S by its end. Returns W and S at the start of each chunk (N, 2, B, H,
    2, d, d), u, e and a (N, B, H, C, d), and W and S at the end.

    On a GPU this is a queue of small operations, each of which takes as long as its start. Hence a gradient of its own,
    of less than half the operations of autograd's: what does not wait for the chunk after is done for all at once.
    """

    @staticmethod
    def forward(ctx, weights, start, k, v, of_end, steps, eps):
        W, seen = start, []
        for k_, v_, of_end_, steps_ in zip(k, v, of_end, steps):
            u, e, a, *_ = gradients(*W, k_, v_, eps)
            seen.append((weights, u, e, a))
            left, right = factors(u, e, k_, a, steps_)
            weights = (of_end_ @ weights.flatten(-2)).view_as(weights) + (left.mT @ right).view_as(weights)
            W = weights[..., 0, :, :]
        seen = [torch.stack(each) for each in zip(*seen)]
        ctx.save_for_backward(start, k, v, of_end, steps, seen[0])
        ctx.eps = eps
        return *seen, weights

    @staticmethod
    def backward(ctx, dstarts, du, de, da, dweights):
        start, k, v, of_end, steps, starts = ctx.saved_tensors
        W1, W2 = torch.cat((start[None], starts[1:, ..., 0, :, :])).unbind(1)
        u, e, a, z, r, y, f = gradients(W1, W2, k, v, ctx.eps)
        left, right = factors(u, e, k, a, steps)
        s = z.sigmoid()
        curve = f * s * (1 - s) * (2 + z * (1 - 2 * s))  # f silu''(z): the change of u with z
        # e = r (v - y m) with m = mean(v y), y = r x and r from x: its change with x is a symmetric matrix, with which
        # dx = -r^2 (m de + mean(de y) (v - 3 m y) + mean(de v) y) = scale de + de @ inner @ outer.
        m = (v * y).mean(-1, keepdim=True)
        inner = torch.stack((y, v), dim=-1)
        outer = torch.stack((v - 3 * m * y, y), dim=-2) * (-r * r / y.size(-1)).unsqueeze(-1)
        scale, due, seen = -r * r * m, torch.stack((du, de), dim=1), []
        for n in reversed(range(len(k))):
            dproduct = dweights.flatten(-3, -2)
            dleft, (dk, da_) = (right[n] @ dproduct.mT).unflatten(-1, (2, -1)), left[n] @ dproduct
            du, de = (dleft * steps[n]).sum(-2) + due[n]
            df = silu_backward(du, z[n])
            de = de + df @ W2[n].mT
            dx = torch.addcmul((de.unsqueeze(-2) @ inner[n] @ outer[n]).squeeze(-2), scale[n], de)
            dz = torch.addcmul(silu_backward(da_ + da[n] + dx @ W2[n], z[n]), du, curve[n])
            seen.append((dweights, dleft, dk, de, dz))
            dW = torch.stack((dz.mT @ k[n], e[n].mT @ df + dx.mT @ a[n]))
            dweights = (of_end[n].mT @ dweights.flatten(-2)).view_as(dweights) + dstarts[n]
            if n:  # else W is `start`
                dweights[..., 0, :, :].add_(dW)
        dends, dleft, dk, de, dz = (torch.stack(each[::-1]) for each in zip(*seen))
        dof_end = dends.flatten(-2) @ starts.flatten(-2).mT
        dsteps = (dleft * torch.stack((u, e), dim=1).unsqueeze(-2)).sum((1, -1), keepdim=True)
        return dweights, dW, dk + dz @ W1, r * across(de, y), dof_end, dsteps, None


MIXERS = {'attention': Attention, 'gated': GatedAttention, 'titans': Titans}


# ----------------------------------------------------------------------------------------------------------------------
# Pretrained models: Llama and OLMo-2, as transformers reads them. Llama's norms have gains: they go into the columns of
# the matrices after them, those of the last norm into the head, which so becomes a matrix of its own.

HF_NAMES = {  # our names of weights and theirs, as regular expressions that are applied one after the other
    r'\.norm\.': '.post_attention_layernorm.', 'ffn.norms.0': 'post_feedforward_layernorm', 'ffn.mlps.0': 'mlp',
    'mixer': 'self_attn', '^blocks': 'model.layers', '^norm': 'model.norm', '^embedding': 'model.embed_tokens',
    '^head': 'lm_head', 'gain$': 'weight'}
LLAMA_NORMS = {'self_attn.[qkv]_proj': 'input_layernorm', 'mlp.(gate|up)_proj': 'post_attention_layernorm',
               'lm_head': 'model.norm'}  # the norm before each of their matrices
SUPPORTED = {  # settings in transformers that must have one of these values, the default first
    'sliding_window': [None], 'num_local_experts': [None], 'num_experts': [None], 'quantization_config': [None],
    'attention_bias': [False], 'mlp_bias': [False], 'hidden_act': ['silu'], 'partial_rotary_factor': [1.0],
    'rope_type': ['default', 'llama3'], 'architectures': [['LlamaForCausalLM'], ['Olmo2ForCausalLM']]}


def hf_names(name):
    """Their names of a weight and of the gain that goes into it in Llama, or None where there is none."""
    for ours, theirs in HF_NAMES.items():
        name = re.sub(ours, theirs, name)
    norms = [re.sub(matrix, norm, name) for matrix, norm in LLAMA_NORMS.items() if re.search(matrix, name)]
    return name, norms[0] if norms else None


def pretrained_shape(c):
    """The GPTConfig of a config of transformers. Raises ValueError, with the setting, if GPT cannot express it."""
    rope = getattr(c, 'rope_parameters', None) or getattr(c, 'rope_scaling', None) or {}  # in transformers 5, and 4
    theirs = {**c.to_dict(), **rope}
    for name, values in SUPPORTED.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(f'{name}={theirs[name]!r}: must be {" or ".join(map(repr, values))}')
    olmo2, scaling = c.architectures == ['Olmo2ForCausalLM'], ''
    if theirs.get('rope_type') == 'llama3':
        names = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
        scaling = ','.join(str(theirs[name]) for name in names)
    return GPTConfig(
        vocab_size=c.vocab_size, block_size=c.max_position_embeddings, n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads, n_kv_head=c.num_key_value_heads, head_dim=theirs.get('head_dim') or 0,
        n_embd=c.hidden_size, norm='olmo2' if olmo2 else 'pre', norm_eps=c.rms_norm_eps,
        rope_theta=float(theirs['rope_theta']), rope_scaling=scaling, ffn_width=c.intermediate_size, ffn_multiple=1,
        tie_embeddings=olmo2 and c.tie_word_embeddings)


def read_pretrained(name, changes):
    """The GPTConfig of a pretrained model, with changes, and its weights by their names in transformers."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f'hf:{name} needs the package transformers: pip install transformers') from error
    transformers.utils.logging.disable_progress_bar()  # of reading; that of a download stays
    for library in ('transformers', 'huggingface_hub'):  # what matters of their warnings is among the errors here
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        theirs = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = pretrained_shape(theirs)
        if changes.get('block_size', 0) > config.block_size:
            raise ValueError(f'block_size={changes["block_size"]}: it was trained with at most {config.block_size}')
        need, free = budget(config)['total'] * (4 + (theirs.dtype or torch.float32).itemsize), free_memory()
        if need > free:
            raise ValueError(f'reading it takes {need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free')
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=theirs, dtype='auto', output_loading_info=True, trust_remote_code=False)
        for what in ('missing_keys', 'unexpected_keys'):
            if found[what]:
                raise ValueError(f'its file of weights has {what.replace("_", " ")}: {", ".join(sorted(found[what]))}')
    except Exception as error:
        tried = 'no such folder, and of the hub: ' * (isinstance(error, OSError) and not Path(name).is_dir())
        raise ValueError(f'hf:{name}: {tried}{(str(error) or repr(error)).splitlines()[0]}') from error
    return replace(config, **changes), model.state_dict()


# ----------------------------------------------------------------------------------------------------------------------
# What is written out for speed


class RMSNorm(torch.autograd.Function):
    """F.rms_norm(x, x.shape[-1:], eps=eps): y = r x with r = 1 / sqrt(mean(x^2) + eps).

    A layer has 1 + K of these, each of which passes over the whole stream, so that they, not the K matrix products, are
    what a stack of MLPs costs in time. Hence a gradient of its own, dx = r (dy - y mean(dy y)), which needs half the
    passes of autograd's and keeps y only, as the matrix product after it does.
    """

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


rms_norm = RMSNorm.apply
LOSS_CHUNK = 4096 if torch.cuda.is_available() else 1024  # tokens: more keep a GPU busier and fill a CPU's memory


class CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(x @ weight.T, targets), a chunk of tokens at a time. x: (N, C) in the compute dtype; weight:
    (padded vocabulary, C); targets: (N,).

    The logits are the largest tensor of a small model: no more than a chunk of them exists at any time. And nothing is
    computed twice, as the gradient of a mean is known as soon as the softmax is, so that it is taken at once.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        w, dx, dw, loss = weight.to(x.dtype), [], None, 0.0
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
            dw_ = (dlogits.T @ x_).to(weight.dtype)
            dw = dw_ if dw is None else dw.add_(dw_)
        ctx.save_for_backward(torch.cat(dx), dw)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad / len(dx)
        return dx.mul_(grad), dw.mul_(grad), None, None  # in place: they are large, and used once


cross_entropy = CrossEntropy.apply


# ----------------------------------------------------------------------------------------------------------------------
# What a shape costs


def budget(config):
    """Parameters by component, and training FLOPs per token, as a dict of ints.

    FLOPs are those of forward and backward: 6 for each parameter of a matrix product, the head's included, and what a
    token mixer says of its own. Of attention's square that is the half below the diagonal: nanoGPT counts all, so that
    its mfu is 1.2 times ours for standard_113m.
    """
    c, widths, mixer = config, ffn_widths(config), MIXERS[config.mixer]
    ffn, head = 3 * c.n_embd * sum(map(sum, widths)), padded_vocab(c) * c.n_embd
    gains = c.n_layer * mixer.size(c)[1]
    if c.norm == 'olmo2':  # those after the mixer and every MLP, and at the end
        gains += c.n_embd * (c.n_layer * (1 + len(widths[0])) + 1)
    non_embedding, embedding = mixer_params(c) + ffn + gains, head if c.tie_embeddings else 2 * head
    return {'mixer': mixer_params(c), 'ffn': ffn, 'gains': gains, 'non_embedding': non_embedding,
            'embedding': embedding, 'total': non_embedding + embedding,
            'flops_per_token': c.n_layer * mixer.flops(c) + 6 * (ffn + head)}


def training_memory(config, batch_size):
    """Bytes of weights, gradients and AdamW's moments, 16 for each parameter, and an estimate of those of activations:
    what a compiled micro-step of batch_size sequences in bfloat16 or float16 keeps for its backward pass.

    Kept of every token, in 2 bytes each: what every matrix has on its other side than the stream (parameters / n_embd
    channels in all), the inputs of mixers and MLPs (n_embd each, with olmo2 their outputs too), attention's output,
    normed queries and keys, and 2 n_embd at the end. Then the layers' matrices in 2 bytes, and the head's gradient. The
    loss takes 1 GiB more at its peak. Not counted: copies of Hope's slow MLPs, and what Titans keep of their memories.
    """
    c, counts, head = config, budget(config), padded_vocab(config) * config.n_embd
    matrices, width = counts['mixer'] + counts['ffn'], c.n_head * c.head_dim
    olmo2, normed = c.norm == 'olmo2', c.qk_norm or c.norm == 'olmo2'
    reads = c.n_embd * (1 + len(ffn_widths(c)[0])) * (2 if olmo2 else 1)
    attention = width + (width + c.n_kv_head * c.head_dim if normed else 0)
    channels = matrices / c.n_embd + c.n_layer * (reads + attention) + 2 * c.n_embd
    return 16 * counts['total'], round(2 * batch_size * c.block_size * channels + 2 * matrices + 4 * head)


# ----------------------------------------------------------------------------------------------------------------------
# What a shape may be

NORMS = 'pre', 'olmo2'
FFNS = 'standard', 'hourglass', 'tapered', 'tapered_hourglass'


def check_shape(config):
    """Raise ValueError, with the field, its value and what would be right, if no such model can be. Also fills in
    head_dim and n_kv_head."""
    c = config

    def require(ok, name, why):
        if not ok:
            raise ValueError(f'{name}={getattr(c, name)!r}: {why}')

    for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'memory_chunk', 'ffn_multiple', 'n_mlp'):
        require(getattr(c, name) >= 1, name, 'must be at least 1')
    for name in ('n_kv_head', 'head_dim', 'ffn_width', 'param_budget'):
        require(getattr(c, name) >= 0, name, 'must not be negative')
    for name, names in (('mixer', MIXERS), ('norm', NORMS), ('ffn', FFNS), ('taper', TAPERS)):
        require(getattr(c, name) in names, name, f'must be one of {", ".join(names)}')
    require(0 < c.norm_eps < math.inf, 'norm_eps', 'must be positive')
    require(c.rope_theta > 0, 'rope_theta', 'must be positive')
    require(not c.rope_scaling or re.fullmatch(r'\d+(\.\d+)?(,\d+(\.\d+)?){3}', c.rope_scaling), 'rope_scaling',
            "must be four numbers, like '8,1,4,8192'")
    require(0 < c.init_std < math.inf, 'init_std', 'must be positive')
    require(0 <= c.dropout < 1, 'dropout', 'must be at least 0 and below 1')

    require(c.head_dim or c.n_embd % c.n_head == 0, 'n_head', f'must divide n_embd={c.n_embd}, or head_dim be given')
    c.head_dim = c.head_dim or c.n_embd // c.n_head
    require(c.head_dim % 2 == 0, 'head_dim', 'must be even: rotary embeddings turn pairs')
    c.n_kv_head = c.n_kv_head or c.n_head
    require(c.n_head % c.n_kv_head == 0, 'n_kv_head', f'must divide n_head={c.n_head}')
    require(not (c.qk_norm and c.norm == 'olmo2'), 'qk_norm', 'must be off with norm=olmo2, which norms them already')

    if c.mlp_periods:
        require(re.fullmatch('[1-9][0-9]*(,[1-9][0-9]*)*', c.mlp_periods), 'mlp_periods',
                "must be numbers of steps, like '1,4,16'")
        require(c.is_hourglass, 'mlp_periods', 'needs ffn=hourglass or tapered_hourglass')
        require(c.mlp_periods.count(',') + 1 == c.n_mlp, 'mlp_periods',
                f'must have a number for each of n_mlp={c.n_mlp} MLPs')
    if c.is_tapered:
        require(c.n_layer > 1, 'n_layer', 'a taper needs at least 2 layers')
        for name in ('taper_start', 'taper_end'):
            require(0 < getattr(c, name) < math.inf, name, 'must be positive: no layer is left without FFN')
        require(sum(relative_widths(c)) == c.n_layer or abs(c.taper_start + c.taper_end - 2) < 1e-6, 'taper_start',
                f'must be 2 - taper_end = {2 - c.taper_end:g}, so that the mean width is what the budget gives')
        require(min(relative_widths(c)) > 0, 'taper_start', 'leaves the middle layers of the step nothing, with '
                f'taper_end={c.taper_end}')

    if c.ffn_width:
        require(c.ffn_width % c.ffn_multiple == 0, 'ffn_width', f'must be a multiple of ffn_multiple={c.ffn_multiple}')
    else:
        require(c.param_budget, 'ffn_width', 'state the size: ffn_width or param_budget must be given')
        require(c.param_budget > mixer_params(c), 'param_budget',
                f'the token mixers alone take {mixer_params(c):,} parameters')
    MIXERS[c.mixer].size(c)  # raises what the mixer itself refuses
    require(min(map(min, ffn_widths(c))) > 0, 'ffn_width' if c.ffn_width else 'param_budget',
            f'leaves some MLP less than one unit of ffn_multiple={c.ffn_multiple}')


def shape_of(settings):
    """The GPTConfig that the settings of a script, a dict, state. Raises ValueError."""
    return GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})


# ----------------------------------------------------------------------------------------------------------------------
# The machine


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
        dtype = 'bfloat16' if fast else 'float16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'dtype={dtype}: must be auto, float32, bfloat16 or float16')
    return device, getattr(torch, dtype)


def prefer_cudnn(device):
    """A context in which attention on Hopper is cuDNN's, reported to be 1.7 to 2.3 times as fast there as the default.
    On other GPUs it is not, and in generation it would plan anew for every length. The context goes around a compiled
    model: inside of one, torch 2.6 ignores it."""
    if torch.device(device).type != 'cuda' or torch.cuda.get_device_capability(device)[0] != 9:
        return contextlib.nullcontext()
    kernels = 'CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH'
    return sdpa_kernel([getattr(SDPBackend, kernel) for kernel in kernels], set_priority=True)


def keep_freed_memory():
    """Have glibc keep what freed tensors took. Else it returns large ones to the system at once, and the next of their
    size costs a page fault every 4 KB. Nothing is done where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def free_memory():
    """Bytes that a process can still have; without end where the system does not say."""
    try:
        return 1024 * int(re.search(r'MemAvailable: *(\d+)', Path('/proc/meminfo').read_text())[1])
    except OSError:
        return math.inf


# ----------------------------------------------------------------------------------------------------------------------
# The command


def shape_table(config):
    """The shape of a model in text, with its FFN widths as a bar chart over the depth."""
    c, widths = config, ffn_widths(config)
    K, d_h = len(widths[0]), sum(map(sum, widths)) / (c.n_layer * len(widths[0]))
    kv_heads = f' ({c.n_kv_head} for keys and values)' if c.n_kv_head < c.n_head else ''
    yield (f'{c.ffn}, {c.mixer}: {c.n_layer} layers, d_model {c.n_embd}, {c.n_head} heads of {c.head_dim}{kv_heads}, '
           f'K = {K}\n')
    for layer, row in enumerate(widths, start=1):
        bar = '#' * round(48 * sum(row) / max(map(sum, widths)))
        row = f'{row[0]} x {K}' if len(set(row)) == 1 and K > 1 else ' + '.join(map(str, row))
        yield f'  layer {layer:2d}  {bar:48s}  {row}'
    kind = 'below 1: an hourglass' if d_h < c.n_embd else 'a split of the wide MLP' if K > 1 else 'narrow-wide-narrow'
    yield f'\n  d_model / L    {c.n_embd / c.n_layer:.1f}'
    yield f'  d_h / d_model  {d_h / c.n_embd:.3f}{" in the mean" if c.is_tapered else ""}, {kind}\n'


def budget_table(config, baseline=None):
    """Parameters and FLOPs by component in text, beside those of a baseline."""
    def rows(config):
        counts = budget(config)
        head = 6 * padded_vocab(config) * config.n_embd
        flops = counts.pop('flops_per_token')
        return {**counts, 'FLOPs of layers': flops - head, 'FLOPs of the head': head, 'FLOPs per token': flops}

    mine, theirs = rows(config), rows(baseline) if baseline else {}
    yield f'  {"":20s}{"":>16s}{"share":>8s}' + (f'{"baseline":>20s}{"difference":>16s}' if baseline else '')
    for name, count in mine.items():
        share = count / mine['FLOPs per token' if 'FLOPs' in name else 'total']
        line = f'  {name.replace("_", "-"):20s}{count:16,d}{share:8.1%}'
        if baseline:
            percent = f'{(count - theirs[name]) / theirs[name]:+10.3%}' if theirs[name] else ''
            line += f'{theirs[name]:20,d}{count - theirs[name]:+16,d}{percent}'
        yield line
    yield '\n  FLOPs are those of a token, forward and backward.'


def memory_line(config, batch_size):
    states, activations = (size / 2**30 for size in training_memory(config, batch_size))
    return (f'  Training takes {states:.2f} GiB for weights, gradients and AdamW, and about {activations:.2f} GiB for\n'
            f'  the activations of {batch_size} x {config.block_size} tokens, compiled, in bfloat16 or float16.')


if __name__ == '__main__':
    from configurator import check_range, configure, fail_on, show
    from prepare import read_meta

    baseline = ''  # config files of a baseline to compare with, applied in order, separated by commas
    batch_size = 16  # sequences per micro-step, for the memory that training takes
    dataset = 'stdlib'  # prepared data set whose vocabulary counts where vocab_size is 0

    def shape(argv=None):
        settings = configure(dict(globals()), GPTConfig, files_of=('train.py', GPTConfig), argv=argv)
        check_range(settings, 'batch_size', least=1)
        settings['vocab_size'] = settings['vocab_size'] or read_meta(settings['dataset'])['vocab_size']
        with fail_on(ValueError):
            return settings, shape_of(settings)

    settings, config = shape()
    compared = shape(settings['baseline'].split(','))[1] if settings['baseline'] else None
    memory = memory_line(config, settings['batch_size'])
    show('\n'.join([*shape_table(config), *budget_table(config, compared), memory]))
