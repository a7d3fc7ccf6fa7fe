"""
Train a model, on a CPU, on a GPU, or on several under torchrun:

    python train.py                                                      # minutes on a laptop, nothing to download
    python train.py config/hourglass_113m.py --batch_size=32             # a config file, and what to change in it
    torchrun --nproc_per_node=8 train.py config/hourglass_113m.py        # 8 GPUs of one machine
"""

import signal

if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the script without a traceback, torch's import included

import functools
import hashlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import prepare
from configurator import check_range, configure, explain, fail, fail_on, show
from model import GPT, GPTConfig, budget, keep_freed_memory, resolve_device, shape_of

# the run
out_dir = 'out'  # folder of checkpoints and metrics.jsonl
init_from = 'scratch'  # resume (out_dir's ckpt.pt), auto (resume if there is one), or a new run from FILE.pt or hf:NAME
seed = 1337  # seed of the initial weights, the order of the data, and dropout
eval_interval = 200  # steps between evaluations, each of which saves a checkpoint
eval_tokens = 64 * 1024  # validation tokens of an evaluation, the first ones; 0: all
eval_datasets = ''  # data sets to evaluate on besides dataset, separated by commas; prepared with the same tokenizer
eval_only = False  # evaluate once and leave
log_interval = 10  # steps between logged training losses
sample_tokens = 100  # tokens of each sample printed at the end; 0: no samples
wandb_log = False  # send the metrics to Weights & Biases as well
wandb_project = 'tapered-hourglass'  # project at Weights & Biases
wandb_run_name = ''  # name of the run at Weights & Biases; empty: one that it makes up
# the data
dataset = 'stdlib'  # name of the folder in data/ that prepare.py has made
batch_size = 16  # sequences per micro-step
gradient_accumulation_steps = 1  # micro-steps per step, of all processes together
# the model: a small one; all other fields of GPTConfig in model.py are settings too
vocab_size = 0  # token ids; 0: those of the data
block_size = 128
n_layer = 4
n_head = 3
n_embd = 192
param_budget = 1769472  # parameters of token mixers and FFNs together; ffn_width overrules it
init_std = 0.05  # standard deviation of the initial weights; the papers have 0.02, for wider streams
# the optimizer, AdamW
learning_rate = 3e-3  # peak, after the warm-up
max_iters = 800  # steps in all
weight_decay = 0.1  # weight decay of matrices
beta1 = 0.9  # decay of the mean gradient
beta2 = 0.95  # decay of the mean squared gradient
grad_clip = 1.0  # largest norm of the gradient; 0: no limit
warmup_iters = 60  # steps in which the learning rate rises
lr_decay_iters = 0  # step at which the learning rate has fallen to min_lr, along a cosine; 0: max_iters at the start
min_lr = 3e-4  # learning rate from lr_decay_iters on
# the machine
device = 'auto'  # cpu, cuda, mps, or auto: cuda where there is a GPU, else cpu
dtype = 'auto'  # float32, bfloat16, float16, or auto: bfloat16 where it is fast, else float16 on a GPU, else float32
compile = torch.cuda.is_available()  # torch.compile, which needs a C++ compiler on a CPU

config = configure(globals(), GPTConfig)
sys.excepthook = explain
rank, local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))  # torchrun sets them
world_size = int(os.environ.get('WORLD_SIZE', 1))
master = rank == 0  # the process that prints and saves


def say(text):
    if master:
        with tqdm.external_write_mode():
            show(text)


def sum_over_processes(*values):
    sums = torch.tensor(values, dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(sums)
    return sums.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# The settings: those of the command line and of what the run starts from

# What may be changed when a run is resumed
FREE = {'out_dir', 'init_from', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_datasets', 'eval_only',
        'log_interval', 'sample_tokens', 'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype', 'compile'}
latest, best = Path(out_dir, 'ckpt.pt'), Path(out_dir, 'ckpt_best.pt')
resuming = init_from == 'resume' or (init_from == 'auto' and latest.exists())
source, checkpoint = str(latest) if resuming else init_from, None
advice = f'; a new run from its weights has --init_from={source} and another --out_dir' if resuming else ''
config.given |= {'out_dir', 'init_from', 'eval_only', 'device', 'compile'}  # never from a checkpoint
zero_is_default = 'vocab_size', 'n_kv_head', 'head_dim', 'lr_decay_iters'
config.given -= {name for name in zero_is_default if config[name] == 0}
hint = f' (to resume from the best one: cp {best} {latest})' if resuming and best.exists() else ''
with fail_on(Exception, f'init_from={source} cannot be used{hint}'):
    if source.startswith('hf:'):
        torch.manual_seed(seed)  # for the padding of the vocabulary
        pretrained = GPT.from_pretrained(source[3:], block_size=block_size, dropout=config['dropout'])
        checkpoint = {'model': pretrained.state_dict(), 'model_args': asdict(pretrained.config),
                      'config': {'dataset': dataset}, 'tokenizer': prepare.Tokenizer.load(source).state()}
    elif source not in ('scratch', 'auto'):
        checkpoint = torch.load(source, map_location='cpu', weights_only=True, mmap=True)
    if checkpoint is not None:
        theirs, free = checkpoint['config'], FREE
        if not resuming:
            theirs, free = {'dataset': theirs['dataset'], **checkpoint['model_args']}, {'dataset', 'dropout'}
        changed = [f'{name} was {theirs[name]!r} and is {config[name]!r}' for name in theirs
                   if name in config.given - free and theirs[name] != config[name]]
        if changed:
            fail(f'{source} was trained otherwise: {", ".join(changed)}{advice}')
        config.update({name: theirs[name] for name in theirs.keys() & config.keys() - config.given})
if (latest.exists() or best.exists()) and not resuming and not (eval_only and checkpoint):
    fail(f'{out_dir} has a checkpoint already: go on from it with --init_from=resume, or choose another --out_dir')

check_range(config, 'eval_interval log_interval batch_size gradient_accumulation_steps block_size', least=1)
check_range(config, 'max_iters eval_tokens sample_tokens seed warmup_iters lr_decay_iters', least=0)
check_range(config, 'learning_rate min_lr weight_decay grad_clip', least=0)
check_range(config, 'beta1 beta2', least=0, below=1)
with fail_on(ValueError):
    device, compute_dtype = resolve_device(config['device'], config['dtype'])
device_type = torch.device(device).type
if world_size > 1:
    with fail_on((RuntimeError, ValueError), f'WORLD_SIZE={world_size} needs torchrun, and a GPU for each process'):
        if device_type == 'cuda':
            device = f'cuda:{local_rank}'
            torch.cuda.set_device(device)
        dist.init_process_group('cpu:gloo,cuda:nccl' if device_type == 'cuda' else 'gloo')
if local_rank == 0 and config['dataset'] == 'stdlib' and not Path('data/stdlib').exists():
    say('preparing data/stdlib: the source of Python\'s standard library, in tokens of its own')
    prepare.prepare('stdlib')
sum_over_processes(0)  # waits for the data
tokenizer = prepare.read_tokenizer(config['dataset'])
config['vocab_size'] = config['vocab_size'] or tokenizer.vocab_size
config['lr_decay_iters'] = config['lr_decay_iters'] or config['max_iters']  # a resumed run keeps its schedule
config.update(device=device, dtype=str(compute_dtype).removeprefix('torch.'))
with fail_on(ValueError):
    config.update(asdict(shape_of(config)))
globals().update(config)  # now every setting is final, and a variable
if gradient_accumulation_steps % world_size and not eval_only:
    fail(f'gradient_accumulation_steps={gradient_accumulation_steps} must be a multiple of the {world_size} processes')

# ----------------------------------------------------------------------------------------------------------------------
# Data, model and optimizer

train_data, eval_data = prepare.Tokens(dataset, 'train'), {'': prepare.Tokens(dataset, 'val')}
for name in eval_datasets.replace(',', ' ').split():
    if not tokenizer.same_tokens(prepare.read_tokenizer(name)):
        fail(f'data/{name} was prepared with another tokenizer than data/{dataset}: losses per token are no match')
    eval_data[f'/{name}'] = prepare.Tokens(name, 'val')  # whose scores are val_loss/NAME, ...
n_windows = (len(train_data) - 1) // block_size
if not n_windows:
    fail(f'{train_data.name} has {len(train_data)} tokens, less than a window of block_size={block_size} and one more')
token_bytes = tokenizer.token_bytes()
data_id = hashlib.sha256(json.dumps(prepare.read_meta(dataset), sort_keys=True).encode()).hexdigest()

torch.manual_seed(seed)
raw_model = eval_model = GPT(shape_of(config), compute_dtype)  # eval_model is what evaluate() sees
if checkpoint:
    with fail_on(Exception, f'{source} does not fit'):
        raw_model.load_state_dict(checkpoint['model'])
        if not tokenizer.same_tokens(prepare.Tokenizer(checkpoint['tokenizer'])):
            raise ValueError(f'data/{dataset} has other tokens than it was trained on: prepare it with its --tokenizer')
raw_model.to(device)
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
scaler = torch.amp.GradScaler(device_type, enabled=dtype == 'float16')  # so that no gradient rounds to 0
states = {'optimizer': optimizer, 'scaler': scaler}  # what a checkpoint has besides the model
ahead = {}  # Hope's slow parameters by name, as the optimizer has them and the model does not yet
step, best_val_loss = 0, math.inf
if resuming:
    with fail_on(Exception, f'{source} does not fit'):
        if checkpoint['data_id'] != data_id:
            raise ValueError(f'data/{dataset} is not what it was trained on{advice}')
        for name, state in states.items():
            if checkpoint[name] or name != 'scaler':  # which has no state unless dtype was float16
                state.load_state_dict(checkpoint[name])
        ahead = {name: weight.to(device) for name, weight in checkpoint['ahead'].items()}
        step, best_val_loss = int(checkpoint['iter_num']), float(checkpoint['best_val_loss'])
checkpoint = pretrained = None  # frees their memory
keep_freed_memory()
torch.set_float32_matmul_precision('high')  # TF32, where float32 is asked for
model, hidden = raw_model, eval_model.hidden
if compile:
    with fail_on(Exception, 'torch.compile does not work here, but --compile=false does'):
        torch.compile(torch.neg)(torch.zeros(9, device=device))
    model, hidden = torch.compile(raw_model), torch.compile(eval_model.hidden)
    torch._dynamo.config.cache_size_limit += 2 * n_layer  # the blocks of Titans, to train and to evaluate
if world_size > 1:  # each bucket of gradients is a compiled graph: of 25 MB, a model of 1.3B would have 120
    model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)

PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12,
              'RTX 4090': 165e12, 'RTX 3090': 71e12}  # dense bfloat16 of a GPU, by the first of these in its name
gpu = torch.cuda.get_device_name(device) if device_type == 'cuda' else ''
peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu and dtype != 'float32'), None)
tokens_per_step = gradient_accumulation_steps * batch_size * block_size
counts = budget(raw_model.config)
say(f'{raw_model.config.ffn} model of {counts["total"]:,} parameters ({counts["mixer"]:,} {raw_model.config.mixer}, '
    f'{counts["ffn"]:,} FFN, {counts["embedding"]:,} embedding), {dtype} on {world_size} x {gpu or device}\n'
    f'starts from {source} at step {step}; an epoch has {len(train_data) / tokens_per_step:,.1f} steps')
unwritable = f'{Path(out_dir)} cannot be written (mend that, or choose another --out_dir)'
metrics = Path(out_dir, 'metrics.jsonl')
if master and not eval_only:
    with fail_on((OSError, ValueError, KeyError), unwritable):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        if metrics.exists():  # drop what will be written again, and the half line of a run that was killed
            lines = metrics.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith(b'}\n') and json.loads(line)['step'] < step]
            os.truncate(metrics, sum(map(len, kept)))
if master and wandb_log:
    with fail_on(Exception, 'wandb_log=true, which needs pip install wandb and wandb login'):
        import wandb
        wandb.init(project=wandb_project, name=wandb_run_name or None, config=dict(config))

# ----------------------------------------------------------------------------------------------------------------------
# Training

@functools.lru_cache(maxsize=2)
def window_order(epoch):
    return np.random.default_rng((seed, epoch)).permutation(n_windows)


def read_windows(data, starts, length):
    """Inputs and targets, each (len(starts), length), on the device."""
    tokens = torch.from_numpy(np.stack([data.window(start, length + 1) for start in starts]))
    if tokens.max() >= vocab_size:
        fail(f'{data.name} has a token id {tokens.max()}, outside of vocab_size={vocab_size}')
    tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:]


def get_batches(step):
    """The micro-batches of this process. All processes together read each window once an epoch, in a seeded order."""
    size = gradient_accumulation_steps * batch_size // world_size
    windows = range((step * world_size + rank) * size, (step * world_size + rank + 1) * size)
    starts = [int(window_order(i // n_windows)[i % n_windows]) * block_size for i in windows]
    return [read_windows(train_data, starts[i:i + batch_size], block_size) for i in range(0, size, batch_size)]


def learning_rate_at(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = min(1, (step - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + (learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update_weights():
    """A step of the optimizer. Hope's slow parameters (mlp_periods) go on from where the optimizer left them, and the
    model gets them when their period is over (Behrouz et al. 2025, "Nested Learning")."""
    slow = [(name, parameter, period, parameter.clone()) for name, parameter, period in raw_model.slow_parameters()]
    for name, parameter, *_ in slow:
        parameter.copy_(ahead.pop(name, parameter))
    scaler.step(optimizer)  # in float16, changes nothing if a gradient is infinite
    scaler.update()
    for name, parameter, period, seen in slow:
        if (step + 1) % period:
            ahead[name] = parameter.clone()
            parameter.copy_(seen)


@torch.no_grad()
def evaluate(data):
    """Loss in nats, perplexity, and bits per byte of the first eval_tokens targets, in windows that share no target.
    Tokens that stand for no byte, as end-of-text, count in the loss and not in bits per byte."""
    n_targets = min(len(data) - 1, eval_tokens or len(data))
    starts = range(0, n_targets - n_targets % block_size, block_size)
    batches = [(starts[i:i + batch_size], block_size) for i in range(0, len(starts), batch_size)]
    if n_targets % block_size:
        batches.append(([len(starts) * block_size], n_targets % block_size))
    sums = np.zeros(3)  # nats, nats of tokens that stand for bytes, bytes
    eval_model.eval()
    for windows, length in batches[rank::world_size]:
        idx, targets = read_windows(data, windows, length)
        x = (hidden if idx.shape == (batch_size, block_size) else eval_model.hidden)(idx)  # one shape is compiled
        for x_, targets_ in zip(x.flatten(0, 1).split(1024), targets.flatten().split(1024)):  # all logits: gigabytes
            logits = eval_model.logits(x_)
            losses = F.cross_entropy(logits, targets_, reduction='none').cpu().double().numpy()
            bytes_of = token_bytes[targets_.cpu().numpy()]
            sums += losses.sum(), losses[bytes_of > 0].sum(), bytes_of.sum()
    eval_model.train()
    nats, nats_of_bytes, n_bytes = sum_over_processes(*sums)
    scores = {'val_loss': nats / n_targets, 'val_ppl': math.exp(min(nats / n_targets, 700)),
              'val_bpb': nats_of_bytes / max(1, n_bytes) / math.log(2)}
    if not math.isfinite(scores['val_loss']):
        fail(f'step {step}: the loss on {data.name} is {scores["val_loss"]}: try a lower --learning_rate; the '
             'checkpoints are as they were')
    say(f'step {step}: {data.name}, ' + ', '.join(f'{name} {score:.4f}' for name, score in scores.items()))
    return scores


def save(is_best=False):
    """Write ckpt.pt; make ckpt_best.pt the same file, or a copy. If that fails, the old files stay and the run ends."""
    temporary = Path(out_dir, 'ckpt.tmp')
    with fail_on((OSError, RuntimeError), unwritable):  # torch.save raises either on a full disk
        with open(temporary, 'wb') as file:
            torch.save({'model': raw_model.state_dict(), 'ahead': ahead, 'iter_num': step, 'data_id': data_id,
                        **{name: state.state_dict() for name, state in states.items()}, 'config': dict(config),
                        'best_val_loss': best_val_loss, 'model_args': asdict(raw_model.config),
                        'tokenizer': tokenizer.state()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, latest)
        if is_best:
            try:
                os.link(latest, temporary)
            except OSError:  # a file system without links
                shutil.copyfile(latest, temporary)
            os.replace(temporary, best)


def log(numbers):
    with fail_on(OSError, unwritable), open(metrics, 'a', newline='\n') as file:
        file.write(json.dumps({'step': step, **numbers}) + '\n')
    if wandb_log:
        wandb.log(numbers, step=step)


stop_signals = []  # that this process has had
if not eval_only:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop_signals.append(number))
bar = tqdm(total=max_iters, initial=step, unit='step', disable=not (master and sys.stderr and sys.stderr.isatty()))
clock, clock_step = time.perf_counter(), step
batches = get_batches(step)

while True:
    if step % eval_interval == 0 or step >= max_iters or eval_only:
        scores = {name + suffix: score for suffix, data in eval_data.items() for name, score in evaluate(data).items()}
        if eval_only:
            break
        is_best = scores['val_loss'] < best_val_loss
        best_val_loss = min(scores['val_loss'], best_val_loss)
        if master:
            log(scores)
        if master and step > 0:
            save(is_best)
        clock, clock_step = time.perf_counter(), step
    if step >= max_iters:
        break

    lr = learning_rate_at(step)
    for group in optimizer.param_groups:
        group['lr'] = lr
    torch.manual_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))  # of dropout
    loss = 0.0
    for i, (idx, targets) in enumerate(batches, start=1):
        if world_size > 1:
            model.require_backward_grad_sync = i == len(batches)  # averages the gradients over the processes
        micro_loss = model(idx, targets)[1] / len(batches)
        scaler.scale(micro_loss).backward()
        loss = loss + micro_loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    stopping = sum_over_processes(len(stop_signals))[0]  # this and the next batches while the GPU is still at work
    batches = get_batches(step + 1)
    loss, grad_norm = torch.stack((loss, grad_norm)).tolist()
    if not math.isfinite(loss) or (not math.isfinite(grad_norm) and scaler.get_scale() <= 1):  # 1 without a scaler
        fail(f'step {step}: the loss is {loss}, the norm of its gradient {grad_norm}: try a lower --learning_rate'
             f'{" or --dtype=float32" if scaler.is_enabled() else ""}; the checkpoint is as it was')
    update_weights()
    optimizer.zero_grad()

    if step % log_interval == 0:
        loss = sum_over_processes(loss / world_size)[0]
        speed = (step + 1 - clock_step) * tokens_per_step / (time.perf_counter() - clock)
        clock, clock_step = time.perf_counter(), step + 1
        numbers = {'tokens': (step + 1) * tokens_per_step, 'loss': loss, 'lr': lr, 'tokens_per_second': speed,
                   'grad_norm': grad_norm if math.isfinite(grad_norm) else None}  # None: the step changed nothing
        if peak_flops:
            numbers['mfu'] = speed * counts['flops_per_token'] / (peak_flops * world_size)
        if master:
            log(numbers)
        mfu = f', mfu {numbers["mfu"]:.1%}' if peak_flops else ''
        say(f'step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s{mfu}')
    step += 1
    bar.update()
    if stopping:
        if master:
            save()
        say(f'stopped after {step} steps: go on with --init_from=resume')
        break

if master and sample_tokens and step >= max_iters and not eval_only:
    for start in ('def', 'class') if dataset == 'stdlib' else ('',):
        prompt = torch.tensor([tokenizer.encode(start, bos=True)], device=device)
        tokens = eval_model.generate(prompt, sample_tokens, temperature=0.8, top_k=50, stop_token=tokenizer.eot)
        say('--- a sample ---\n' + tokenizer.decode(tokens[0].tolist()).decode('utf-8', 'replace'))
if world_size > 1:
    dist.destroy_process_group()
