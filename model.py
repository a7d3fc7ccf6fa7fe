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
and models of one budget match to the last parameter.

`python model.py config/hourglass_113m.py --baseline=config/standard_113m.py` prints the budget without building
anything.
"""

import copy
import json
import math
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
    ffn: str = 'standard'  # or hourglass, tapered, tapered_hourglass
    ffn_width: int = 0  # hidden units of a layer, the mean over the depth; 0: what meets param_budget
    param_budget: int = 0  # parameters of mixers and FFNs together; 0: what ffn_width gives
    ffn_multiple: int = 16  # every MLP's width is a multiple of this
    n_mlp: int = 4  # K, the MLPs of a hourglass FFN
    taper: str = 'cosine'  # or linear, sigmoid, step
    taper_start: float = 1.5  # width of the first layer over the mean
    taper_end: float = 0.5  # width of the last layer over the mean
    rope_theta: float = 10000.0
    qk_norm: bool = False  # RMSNorm of queries and keys, per head
    tie_embeddings: bool = True  # the head is the embedding table
    dropout: float = 0.0

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'ffn_multiple', 'n_mlp'):
            self.require(getattr(self, name) >= 1, name, 'must be at least 1')
        for name in ('n_kv_head', 'head_dim', 'ffn_width', 'param_budget'):
            self.require(getattr(self, name) >= 0, name, 'must not be negative')
        self.require(self.head_dim or self.n_embd % self.n_head == 0, 'n_head',
                    f'must divide n_embd={self.n_embd}, unless head_dim is given')
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        self.require(self.n_head % self.n_kv_head == 0, 'n_kv_head', f'must divide n_head={self.n_head}')
        self.require(self.head_dim % 2 == 0, 'head_dim', 'must be even: rotary embeddings turn pairs')
        self.require(self.rope_theta > 0, 'rope_theta', 'must be positive')
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
    """Parameters of all token mixers."""
    c = config
    return c.n_layer * c.n_embd * c.head_dim * (2 * c.n_head + 2 * c.n_kv_head)


def padded_vocab(config):
    return -(-config.vocab_size // 64) * 64


def budget(config):
    """Parameters by component, and training FLOPs per token, as a dict of ints.

    FLOPs are those of forward and backward: 6 for each parameter of a matrix product, the head's included, and in
    each layer 6 * n_head * head_dim * block_size for attention's scores and averages, half of the full square.
    """
    c = config
    counts = {'attention': mixer_params(c), 'ffn': 3 * c.n_embd * sum(map(sum, ffn_widths(c))), 'gains': 0}
    counts['non_embedding'] = sum(counts.values())
    head = padded_vocab(c) * c.n_embd
    counts['embedding'] = head if c.tie_embeddings else 2 * head
    counts['total'] = counts['non_embedding'] + counts['embedding']
    counts['flops_per_token'] = (6 * (counts['attention'] + counts['ffn'] + head)
                                 + 6 * c.n_layer * c.n_head * c.head_dim * c.block_size)
    return counts


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Linear(nn.Linear):
    """No bias; float32 weights, which the optimizer needs, used in the dtype of the input."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def norm(x):
    """RMSNorm without a gain, over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


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

    def forward(self, x, rotary, cache=None):
        """x: (B, T, C), normed; rotary: cos and sin of the T positions. With a cache, T is 1 or the cache is empty."""
        B, T, _ = x.size()
        q, k, v = (proj(x).view(B, T, -1, self.config.head_dim).transpose(1, 2)  # (B, H, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            q, k = norm(q), norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=T > 1, dropout_p=self.config.dropout if self.training else 0.0,
            enable_gqa=self.config.n_kv_head < self.config.n_head)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: W_down(silu(W_gate x) * (W_up x)). Narrower than the stream (width < n_embd), it is an hourglass."""

    def __init__(self, config, width):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, width)
        self.up_proj = Linear(config.n_embd, width)
        self.down_proj = Linear(width, config.n_embd)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FFN(nn.Module):
    """A stack of K residual MLPs, x = x + MLP_i(norm(x)) for i = 1..K (Liao et al.). Takes and returns the stream."""

    def __init__(self, config, widths):
        super().__init__()
        self.mlps = nn.ModuleList(MLP(config, width) for width in widths)
        self.dropout = config.dropout

    def forward(self, x):
        for mlp in self.mlps:
            x = x + F.dropout(mlp(norm(x)), self.dropout, self.training)
        return x


class Block(nn.Module):
    def __init__(self, config, widths):
        super().__init__()
        self.attention = Attention(config)
        self.ffn = FFN(config, widths)
        self.dropout = config.dropout

    def forward(self, x, rotary, cache=None):
        x = x + F.dropout(self.attention(norm(x), rotary, cache), self.dropout, self.training)
        return self.ffn(x)


LOSS_CHUNK = 1024  # tokens


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the head's logits, a chunk of tokens at a time.

    The gradient of a mean is known as soon as the softmax is, so it is taken at once: nothing is computed twice, and
    no more than a chunk of logits, the largest tensor of a small model, exists at any time.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        """x: (N, C) in the compute dtype; weight: (padded vocabulary, C); targets: (N,)."""
        w, dx, dw, loss = weight.to(x.dtype), [], 0.0, 0.0
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
            dw = dw + (dlogits.T @ x_).float()
        ctx.save_for_backward(torch.cat(dx), dw)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad / len(dx)
        return grad.to(dx.dtype) * dx, grad * dw, None, None


class GPT(nn.Module):
    """The language model. compute_dtype is what matrix products and the residual stream are in; weights are float32."""

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(padded_vocab(config), config.n_embd)
        self.blocks = nn.ModuleList(Block(config, widths) for widths in ffn_widths(config))
        self.head = Linear(config.n_embd, padded_vocab(config))
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config)
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, 0.02; what writes to the residual stream is scaled down by the root of the number of such writes."""
        writes = sum(1 + len(block.ffn.mlps) for block in self.blocks)
        for name, weight in self.named_parameters():
            writes_to_stream = name.endswith(('o_proj.weight', 'down_proj.weight'))
            nn.init.normal_(weight, std=0.02 / math.sqrt(writes) if writes_to_stream else 0.02)

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
        """The residual stream after the last layer and norm, (B, T, C); with a list of KVCaches, one for each layer,
        idx goes on where they end."""
        start = caches[0].length if caches else 0
        rotary = [table[start:start + idx.size(1)].to(self.compute_dtype) for table in (self.cos, self.sin)]
        x = F.dropout(self.embedding(idx).to(self.compute_dtype), self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return norm(x)

    def logits(self, x):
        return self.head(x)[..., :self.config.vocab_size].float()

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """AdamW, fused; vectors are not decayed."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
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
        reads the last block_size tokens anew for each token, without a cache.
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
        caches = [KVCache(idx.size(0), self.config, idx.device, self.compute_dtype) for _ in self.blocks]
        new, ended = idx, torch.zeros_like(idx[:, :1], dtype=torch.bool)
        try:
            for _ in range(max_new_tokens):
                if idx.size(1) <= self.config.block_size:
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


# ----------------------------------------------------------------------------------------------------------------------
# The command: what a shape costs


def print_shape(config):
    """Print the shape of a model, and its FFN widths as a bar chart over the depth."""
    c, widths = config, ffn_widths(config)
    K, d_h = len(widths[0]), Fraction(sum(map(sum, widths)), c.n_layer * len(widths[0]))
    kv_heads = f' ({c.n_kv_head} for keys and values)' if c.n_kv_head < c.n_head else ''
    print(f'{c.ffn}: {c.n_layer} layers, d_model {c.n_embd}, {c.n_head} heads of {c.head_dim}{kv_heads}, K = {K}\n')
    for layer, row in enumerate(widths):
        bar = '#' * round(48 * sum(row) / max(map(sum, widths)))
        row = f'{row[0]} x {K}' if len(set(row)) == 1 and K > 1 else ' + '.join(map(str, row))
        print(f'  layer {layer:2d}  {bar:48s}  {row}')
    kind = 'below 1: an hourglass' if d_h < c.n_embd else 'a split of the wide MLP' if K > 1 else 'narrow-wide-narrow'
    print(f'\n  d_model / L    {c.n_embd / c.n_layer:.1f}')
    print(f'  d_h / d_model  {float(d_h / c.n_embd):.3f}, {kind}\n')


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

    baseline = ''  # a config file to compare with

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
    compared = shape(configure(dict(globals()), also='train.py', argv=[baseline])) if baseline else None
    print_shape(config)
    print_budget(config, compared)
