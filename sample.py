"""
What one asks of a checkpoint of train.py. Text, as it is generated:

    python sample.py --out_dir=out --start='def main(' --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0

How each layer's FFN relates to the residual stream:

    python sample.py --out_dir=out --probe=true
"""

import codecs
import json
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from configurator import configure, fail
from model import GPT, GPTConfig, ffn_widths, resolve_device
from prepare import Tokenizer, Tokens

out_dir = 'out'  # the folder of the run
checkpoint = ''  # a checkpoint file; empty: out_dir's latest, ckpt.pt
start = ''  # the prompt, or FILE: and the path of a file that has it
num_samples = 1  # samples, one after the other
max_new_tokens = 500  # of each; less where it comes to the end of the text
temperature = 0.8  # 0: always the likeliest token
top_k = 200  # only the k likeliest tokens; 0: all
top_p = 1.0  # only the likeliest tokens that have this much of the probability
seed = 1337  # of the draws
probe = False  # instead of sampling, measure the alignment of each FFN with the stream, over validation tokens
probe_tokens = 65536  # the first ones, as far as there are as many
device = 'auto'  # cuda where there is a GPU, else cpu; or mps
dtype = 'auto'  # bfloat16 where the device is fast in it, else float32

configure(globals(), also='train.py')
if probe_tokens < 1:
    fail(f'probe_tokens={probe_tokens}: must be at least 1')
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback


def load(path):
    """The model of a checkpoint, ready to run, its tokenizer, and the settings that it was trained with."""
    if not path.is_file():
        fail(f'{path}: no such checkpoint; train one with train.py, or say --out_dir or --checkpoint')
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True)
        model = GPT(GPTConfig(**saved['model_args']), compute_dtype)
        model.load_state_dict(saved['model'])
        # Nothing is trained here, so the weights are cast once and for all.
        return model.to(device, compute_dtype).eval(), Tokenizer(saved['tokenizer']), saved['config']
    except Exception as error:
        fail(f'{path} is no checkpoint of train.py, or of another model.py than this: {error}')


@torch.no_grad()
def alignment(model, tokens):
    """Per layer (rho, ratio), float64 (n_layer, 2), means over tokens (n,): with h the stream that enters layer l and F
    what its whole FFN adds to the stream, rho_l = cosine(F, h) (Bayat et al.) and the ratio |F| / |h|."""
    sums, entering = torch.zeros(len(model.blocks), 2, dtype=torch.float64), {}

    def enter(block, inputs):
        entering[block.ffn] = inputs[0]

    def leave(ffn, inputs, output):
        h, added = entering.pop(ffn), output - inputs[0]
        both = F.cosine_similarity(added, h, dim=-1), added.norm(dim=-1) / h.norm(dim=-1)
        sums[layers[ffn]] += torch.stack([each.double().sum() for each in both]).cpu()

    layers = {block.ffn: layer for layer, block in enumerate(model.blocks)}
    hooks = [block.register_forward_pre_hook(enter) for block in model.blocks]
    hooks += [block.ffn.register_forward_hook(leave) for block in model.blocks]
    for window in tokens.split(model.config.block_size):
        model.hidden(window[None])
    for hook in hooks:
        hook.remove()
    return sums / len(tokens)


def run_probe(model, data):
    """Print the alignment of every layer; write it to probe.json and, where matplotlib is installed, probe.svg."""
    tokens = torch.from_numpy(data.window(0, min(len(data), probe_tokens))).to(device)
    rho, ratio = alignment(model, tokens).T
    depth = torch.arange(len(rho), dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([depth, rho]))[0, 1].item()
    layers = [{'widths': widths, 'rho': rho_, 'ratio': ratio_}
              for widths, rho_, ratio_ in zip(ffn_widths(model.config), rho.tolist(), ratio.tolist())]
    print(f'{len(tokens):,} tokens of {data.name}; F is what the FFN adds, h the stream that enters the layer\n\n'
          'layer  cos(F, h)  |F| / |h|  widths')
    for i, layer in enumerate(layers):
        print(f'{i:5d}  {layer["rho"]:+9.4f}  {layer["ratio"]:9.4f}  {" + ".join(map(str, layer["widths"]))}')
    print(f'\ncorrelation of cos(F, h) with depth: {correlation:+.3f}')
    result = {'data': data.name, 'tokens': len(tokens), 'correlation': correlation, 'layers': layers}
    Path(out_dir, 'probe.json').write_text(json.dumps(result, indent=1))
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use('svg')
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3), layout='constrained')
    for axes, what, values in zip(panels, ('cos(F, h)', '|F| / |h|', 'hidden units'),
                                  (rho, ratio, [sum(layer['widths']) for layer in layers])):
        axes.plot(depth, values, marker='.')
        axes.set(xlabel='layer', title=what)
    figure.savefig(Path(out_dir, 'probe.svg'))


def prompt():
    if not start.startswith('FILE:'):
        return start
    try:
        return Path(start[5:]).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        fail(f'--start={start}: {error}')


try:
    device, compute_dtype = resolve_device(device, 'float32' if probe else dtype)
except ValueError as error:
    fail(str(error))
torch.manual_seed(seed)
model, tokenizer, trained_with = load(Path(checkpoint or Path(out_dir, 'ckpt.pt')))
if probe:
    run_probe(model, Tokens(trained_with['dataset'], 'val'))
    sys.exit()
text = prompt()
idx = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=device)  # every document begins with end-of-text

try:
    for _ in range(num_samples):
        print(text, end='')
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may be more than one token
        for token in model.generate_tokens(idx, max_new_tokens, temperature, top_k, top_p, stop_token=tokenizer.eot):
            print(utf8.decode(tokenizer.decode([token.item()])), end='', flush=True)
        print('\n---------------')
except ValueError as error:
    fail(str(error))
except BrokenPipeError:
    sys.stderr.close()  # the reader has left: leave without a word
