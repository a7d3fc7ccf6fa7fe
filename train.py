"""
Train a model, on a CPU, on a GPU, or on several under torchrun:

    python train.py                                                      # minutes on a laptop, nothing to download
    python train.py config/hourglass_113m.py --batch_size=32             # a config file, and what to change in it
    torchrun --nproc_per_node=8 train.py config/hourglass_113m.py        # 8 GPUs of one machine

A step's batch depends on the seed and the step alone, neither on the model nor on the number of processes: two runs
that differ in one setting differ in that alone.

With mlp_periods = '1,4,16' the stack of MLPs learns at several rates, as in Hope's Continuum Memory System (Behrouz et
al. 2025, "Nested Learning"): the l-th MLP of every layer is updated only every C_l steps, with the sum of the steps'
gradients, each clipped. That is the update frequencies in training. It is not Hope's learning while reading: no weight
changes within a sequence, nor after training.
"""

import functools
import hashlib
import inspect
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import prepare
from configurator import configure, fail
from model import GPT, budget, keep_freed_memory, resolve_device, shape_of

# ----------------------------------------------------------------------------------------------------------------------
# The settings. The defaults train a small model on Python's own standard library.

# the run
out_dir = 'out'  # checkpoints and metrics.jsonl go here
init_from = 'scratch'  # or 'resume' from out_dir's checkpoint, or 'auto': resume if there is one
seed = 1337  # of the initial weights, the order of the data, and dropout
eval_interval = 200  # steps between evaluations, each of which saves a checkpoint
eval_tokens = 65536  # validation tokens of an evaluation, the first ones; 0: all
eval_datasets = ''  # data sets to evaluate on besides dataset, separated by commas; prepared with the same tokenizer
eval_only = False  # evaluate once and leave
log_interval = 10  # steps between logged training losses
sample_tokens = 256  # tokens of a sample printed at the end; 0: none
wandb_log = False  # send the metrics to Weights & Biases as well
wandb_project = 'tapered-hourglass'  # where there
wandb_run_name = ''  # under what name; empty: of its choice
# the data
dataset = 'stdlib'  # data/stdlib, from prepare.py
batch_size = 16  # sequences per micro-step
gradient_accumulation_steps = 1  # micro-steps per step, of all processes together
block_size = 128  # tokens per sequence
# the model: see GPTConfig in model.py
vocab_size = 0  # 0: that of the data
n_layer = 4  # layers, each a token mixer and an FFN
n_head = 3  # heads of attention
n_kv_head = 0  # heads of keys and values; 0: n_head
head_dim = 0  # 0: n_embd // n_head
n_embd = 192  # d_model
mixer = 'attention'  # or gated, titans
memory_chunk = 64  # tokens that Titans' memory reads between two looks at its own weights
norm = 'pre'  # or olmo2: norms after mixer and MLPs, and of queries and keys, all with gains
ffn = 'standard'  # or hourglass, tapered, tapered_hourglass
ffn_width = 0  # hidden units per layer, the mean over the depth; 0: what meets param_budget
param_budget = 1769472  # parameters of token mixers and FFNs together; 0: what ffn_width gives
ffn_multiple = 16  # every MLP's width is a multiple of this
n_mlp = 4  # K, the MLPs of a hourglass FFN
mlp_periods = ''  # Hope: '1,4,16' updates the first MLP of every FFN each step, the next each 4, the last each 16
taper = 'cosine'  # or linear, sigmoid, step
taper_start = 1.5  # width of the first layer over the mean
taper_end = 0.5  # width of the last layer over the mean
rope_theta = 10000.0  # base of the rotary embeddings' wavelengths
qk_norm = False  # RMSNorm of queries and keys, per head
tie_embeddings = True  # the head is the embedding table
dropout = 0.0  # of attention and of what is added to the stream
init_std = 0.05  # of the initial weights; the papers have 0.02, for wider streams
# the optimizer, AdamW
learning_rate = 3e-3  # peak, after the warm-up
max_iters = 800  # steps in all
weight_decay = 0.1  # of matrices
beta1 = 0.9  # decay of the mean gradient
beta2 = 0.95  # decay of the mean squared gradient
grad_clip = 1.0  # largest norm of the gradient; 0: no limit
warmup_iters = 60  # linear rise of the learning rate
lr_decay_iters = 0  # the step at which its cosine ends; 0: max_iters, as it is at the start of the run
min_lr = 3e-4  # and what it is then
# the machine
device = 'auto'  # cuda where there is a GPU, else cpu; or mps
dtype = 'auto'  # bfloat16 where the device is fast in it, else float32
compile = 'auto'  # torch.compile: auto on a GPU only; or true, false

config = configure(globals())
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it

# ----------------------------------------------------------------------------------------------------------------------
# The checkpoint to resume from. What was not set now is as it was then; what was set must agree, but for a few.

free_to_change = ['out_dir', 'init_from', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_datasets', 'eval_only',
                  'log_interval', 'sample_tokens', 'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype',
                  'compile']
if init_from not in ('scratch', 'resume', 'auto'):
    fail(f'init_from={init_from}: must be scratch, resume or auto')
found = [path for path in (Path(out_dir, 'ckpt.pt'), Path(out_dir, 'ckpt_best.pt')) if path.exists()]
if found and init_from == 'scratch':
    fail(f'{found[0]} is there already: go on from it with --init_from=resume, or choose another --out_dir')
if not found and init_from == 'resume':
    fail(f'{out_dir}/ckpt.pt: no checkpoint to resume from')
checkpoint = None
if found:
    try:
        checkpoint = torch.load(found[0], map_location='cpu', weights_only=True)
        then = checkpoint['config']
        checkpoint['data_id'], checkpoint['tokenizer'], checkpoint['iter_num'], checkpoint['optimizer']
    except Exception as error:
        fail(f'{found[0]} cannot be read, or is no checkpoint of train.py: {type(error).__name__}: {error}')
    differences = [f'{name} was {then[name]!r} and is {config[name]!r}' for name in then if name in config.given
                   and name not in free_to_change and config[name] != then[name]]
    if differences:
        fail(f'{found[0]} was trained otherwise: ' + ', '.join(differences))
    kept = config.given | {'out_dir', 'init_from', 'eval_only'}
    config.update({name: value for name, value in then.items() if name not in kept})
config['lr_decay_iters'] = config['lr_decay_iters'] or config['max_iters']  # a resumed run keeps its schedule
globals().update(config)

at_least_1 = ['eval_interval', 'log_interval', 'batch_size', 'gradient_accumulation_steps', 'block_size']
at_least_0 = ['max_iters', 'eval_tokens', 'sample_tokens', 'seed', 'learning_rate', 'min_lr', 'warmup_iters',
              'lr_decay_iters', 'weight_decay', 'grad_clip']
for names, low, below in ((at_least_1, 1, 2**63), (at_least_0, 0, 2**63), (['beta1', 'beta2'], 0, 1)):
    for name in names:
        if not low <= config[name] < below:
            fail(f'{name}={config[name]}: must be at least {low}' + (f' and below {below}' if below < 2**63 else ''))
if compile not in ('auto', True, False):
    fail(f'compile={compile}: must be auto, true or false')

# ----------------------------------------------------------------------------------------------------------------------
# The processes: one, or those of torchrun

ddp = 'WORLD_SIZE' in os.environ
rank, local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
world_size = int(os.environ.get('WORLD_SIZE', 1))
master = rank == 0  # the process that prints and saves
if gradient_accumulation_steps % world_size and not eval_only:
    fail(f'gradient_accumulation_steps={gradient_accumulation_steps} cannot be shared equally by the {world_size} '
         'processes: make it a multiple')
micro_steps = gradient_accumulation_steps // world_size  # of this process, in each step
try:
    device, compute_dtype = resolve_device(device, dtype)
except ValueError as error:
    fail(str(error))
device_type = torch.device(device).type
if device_type == 'cpu':
    keep_freed_memory()
config['dtype'] = str(compute_dtype).removeprefix('torch.')  # a resumed run goes on in what 'auto' was
if ddp:
    if device_type == 'cuda':
        processes, gpus = int(os.environ['LOCAL_WORLD_SIZE']), torch.cuda.device_count()
        if processes > gpus:
            fail(f'{processes} processes on a machine with {gpus} GPUs: start torchrun with --nproc_per_node={gpus}')
        device = f'cuda:{local_rank}'
        torch.cuda.set_device(device)
    dist.init_process_group('nccl' if device_type == 'cuda' else 'gloo')
    control = dist.new_group(backend='gloo')  # for small messages between the CPUs


def sum_over_processes(*values):
    sums = torch.tensor(values, dtype=torch.float64)
    if ddp:
        dist.all_reduce(sums, group=control)
    return sums.tolist()


def leave_if(problem):
    """End all processes with one line if any of them has a problem to report; all of them must call this."""
    problems = [problem]
    if ddp:
        problems = [None] * world_size
        dist.all_gather_object(problems, problem, group=control)
    if any(problems):
        fail(next(filter(None, problems)))


def say(text):
    if master:
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has left, as head does
            sys.stdout = open(os.devnull, 'w')


# ----------------------------------------------------------------------------------------------------------------------
# The data

if local_rank == 0 and dataset == 'stdlib' and not Path('data/stdlib').exists():
    prepare.prepare('stdlib')
if ddp:
    dist.barrier(group=control)
meta = prepare.read_meta(dataset)
tokenizer = prepare.read_tokenizer(dataset)
token_bytes = prepare.read_token_bytes(dataset)
train_data, val_data = prepare.Tokens(dataset, 'train'), prepare.Tokens(dataset, 'val')
eval_data = {'': val_data}  # by what their scores' names end in: val_loss, val_loss/NAME
for name in eval_datasets.replace(',', ' ').split():
    if prepare.read_tokenizer(name).state() != tokenizer.state():
        fail(f'data/{name} was prepared with another tokenizer than data/{dataset}: losses per token are no match')
    eval_data[f'/{name}'] = prepare.Tokens(name, 'val')
for data in (train_data, *eval_data.values()):
    if len(data) <= block_size:
        fail(f'{data.name} has {len(data):,} tokens, less than a window of block_size + 1: prepare more text, or lower '
             '--block_size')
n_windows = (len(train_data) - 1) // block_size
data_id = json.dumps([meta, len(train_data), len(val_data)], sort_keys=True)
data_id = hashlib.sha256(data_id.encode()).hexdigest()
if checkpoint and checkpoint['tokenizer'] != tokenizer.state():
    fail(f'{found[0]} was trained with another tokenizer than that of data/{dataset}')
if checkpoint and checkpoint['data_id'] != data_id:
    fail(f'{found[0]} was trained on other data: data/{dataset} was prepared anew since')


@functools.lru_cache(maxsize=2)
def window_order(epoch):
    return np.random.default_rng((seed, epoch)).permutation(n_windows)


def read_windows(data, starts, length):
    """Inputs and targets, each (len(starts), length), on the device."""
    tokens = np.stack([data.window(start, length + 1) for start in starts])
    if tokens.max() >= meta['vocab_size']:
        raise ValueError(f'{data.name} has a token id {tokens.max()}, outside of its {meta["vocab_size"]}')
    tokens = torch.from_numpy(tokens)
    if device_type == 'cuda':
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:]


def get_batch(micro_step):
    """The windows of a micro-step, counted over the run and all processes: each once an epoch, in a seeded order."""
    windows = range(micro_step * batch_size, (micro_step + 1) * batch_size)
    starts = [int(window_order(i // n_windows)[i % n_windows]) * block_size for i in windows]
    return read_windows(train_data, starts, block_size)


# ----------------------------------------------------------------------------------------------------------------------
# The model and the optimizer

config['vocab_size'] = vocab_size or meta['vocab_size']
try:
    model_config = shape_of(config)
except ValueError as error:
    fail(str(error))
if model_config.vocab_size < meta['vocab_size']:
    fail(f'vocab_size={vocab_size} is less than the {meta["vocab_size"]} of data/{dataset}')
torch.manual_seed(seed)
if device_type == 'cuda':
    torch.set_float32_matmul_precision('high')  # TF32, where float32 is asked for
raw_model = GPT(model_config, compute_dtype).to(device)
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
slow_parameters = list(raw_model.slow_parameters())
pending = {}  # sums of their gradients since their last update
step, best_val_loss = 0, math.inf
if checkpoint:
    try:
        raw_model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
    except (RuntimeError, ValueError) as error:
        fail(f'{found[0]} does not fit model.py as it is now: {error}')
    pending = {name: gradient.to(device) for name, gradient in checkpoint.get('pending', {}).items()}
    step, best_val_loss = checkpoint['iter_num'], checkpoint['best_val_loss']
    checkpoint = None  # frees its memory
if sum_over_processes(step, n_windows) != [step * world_size, n_windows * world_size]:
    fail(f'the machines see different files: {out_dir} and data/{dataset} must be shared between them, or equal')
single_model = torch.compile(raw_model) if (device_type == 'cuda' if compile == 'auto' else compile) else raw_model
model = single_model
if ddp:
    parameters = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = 'forward_sync_buffers' if 'forward_sync_buffers' in parameters else 'broadcast_buffers'  # of old
    model = DistributedDataParallel(single_model, [local_rank] if device_type == 'cuda' else None,
                                    gradient_as_bucket_view=True, **{sync_buffers: False})


def learning_rate_at(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = min(1, (step - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + (learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(data):
    """Loss in nats, perplexity, and bits per byte of the first eval_tokens targets, in windows that share no target.

    The sums are over the same tokens however many processes share them. Tokens that stand for no byte, as end-of-text,
    count in the loss and not in bits per byte.
    """
    n_targets = min(len(data) - 1, eval_tokens or len(data))
    starts = range(0, n_targets - n_targets % block_size, block_size)
    batches = [(starts[i:i + batch_size], block_size) for i in range(0, len(starts), batch_size)]
    if n_targets % block_size:
        batches.append(([len(starts) * block_size], n_targets % block_size))
    nats = nats_of_bytes = n_bytes = 0.0
    problem = None
    single_model.eval()
    try:
        for batch in batches[rank::world_size]:
            idx, targets = read_windows(data, *batch)
            losses = single_model(idx, targets, reduction='none')[1].cpu().double().numpy()
            bytes_of = token_bytes[targets.cpu().numpy()]
            nats, nats_of_bytes = nats + losses.sum(), nats_of_bytes + losses[bytes_of > 0].sum()
            n_bytes += bytes_of.sum()
    except ValueError as error:
        problem = str(error)
    leave_if(problem)
    single_model.train()
    nats, nats_of_bytes, n_bytes = sum_over_processes(nats, nats_of_bytes, n_bytes)
    loss, bits_per_byte = nats / n_targets, nats_of_bytes / max(1, n_bytes) / math.log(2)
    return {'val_loss': loss, 'val_ppl': math.exp(min(loss, 700)), 'val_bpb': bits_per_byte}


# ----------------------------------------------------------------------------------------------------------------------
# What is kept: checkpoints and metrics. The master writes; if it cannot, all leave, and what was there is intact.

metrics_path = Path(out_dir, 'metrics.jsonl')


def write(how, *arguments):
    problem = None
    if master:
        try:
            how(*arguments)
        except (OSError, RuntimeError) as error:  # torch.save raises either on a full disk
            problem = f'{out_dir} cannot be written: {error}'
    leave_if(problem)


def save(name):
    temporary = Path(out_dir, name + '.tmp')
    try:
        with open(temporary, 'wb') as file:
            torch.save({'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(),
                        'model_args': asdict(model_config), 'iter_num': step, 'best_val_loss': best_val_loss,
                        'config': dict(config), 'tokenizer': tokenizer.state(), 'data_id': data_id,
                        **({'pending': pending} if pending else {})}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, Path(out_dir, name))
    finally:
        temporary.unlink(missing_ok=True)


def log(numbers):
    with open(metrics_path, 'a') as file:
        file.write(json.dumps({'step': step, **numbers}) + '\n')
    if wandb_log:
        wandb.log(numbers, step=step)


def rewind_metrics():
    """Drop the lines of steps that the checkpoint does not have, and what is not a line of metrics."""
    global evaluated
    os.makedirs(out_dir, exist_ok=True)
    kept = []
    for line in metrics_path.read_text(errors='replace').splitlines() if metrics_path.exists() else []:
        try:
            if json.loads(line)['step'] < step + ('val_loss' in line):
                kept.append(line + '\n')
                evaluated = json.loads(line)['step'] == step
        except (ValueError, KeyError, TypeError):
            pass
    temporary = metrics_path.with_suffix('.tmp')
    temporary.write_text(''.join(kept))
    os.replace(temporary, metrics_path)


if wandb_log:
    try:
        import wandb
    except ImportError:
        fail('wandb_log=true needs the package wandb: pip install wandb')
    if master:
        wandb.init(project=wandb_project, name=wandb_run_name or None, config=dict(config))

# ----------------------------------------------------------------------------------------------------------------------
# Training

PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12,
              'RTX 4090': 165e12, 'RTX 3090': 71e12}  # dense bfloat16 of a GPU, by what is in its name
gpu = torch.cuda.get_device_name(device) if device_type == 'cuda' else ''
peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
counts = budget(model_config)
tokens_per_step = gradient_accumulation_steps * batch_size * block_size
say(f'{ffn} model of {counts["total"]:,} parameters ({counts["attention"]:,} attention, {counts["ffn"]:,} FFN, '
    f'{counts["embedding"]:,} embedding), {str(compute_dtype)[6:]} on {world_size} x {gpu or device}\n'
    f'{tokens_per_step:,} tokens a step, {len(train_data) / tokens_per_step:,.1f} steps an epoch of data/{dataset}')

stop_requested = False


def request_stop(*_):
    global stop_requested
    stop_requested = True


evaluated = False  # whether the model of this step has been, before the run was stopped
if not eval_only:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    write(rewind_metrics)
    evaluated = any(sum_over_processes(evaluated))
if eval_only and not found:
    say(f'{out_dir} has no checkpoint: what follows is of the initial weights')
if found and step >= max_iters and not eval_only:
    say(f'{found[0]} has {step} steps already: to go on, raise --max_iters')
progress = tqdm(total=max_iters, initial=step, unit='step', disable=not (master and sys.stderr.isatty()))
clock, clock_step = time.perf_counter(), step

while True:  # what is evaluated as of a step is the model after so many steps, which then goes into the step
    if eval_only or (not evaluated and (step % eval_interval == 0 or step >= max_iters)):
        scores = {f'{key}{name}': score for name, data in eval_data.items() for key, score in evaluate(data).items()}
        for name in eval_data:
            say(f'step {step}: {eval_data[name].name} loss {scores[f"val_loss{name}"]:.4f}, perplexity '
                f'{scores[f"val_ppl{name}"]:.3f}, {scores[f"val_bpb{name}"]:.4f} bits per byte')
        if eval_only:
            break
        if not math.isfinite(scores['val_loss']):
            fail(f'step {step}: the validation loss is {scores["val_loss"]}; the checkpoint is as it was')
        write(log, scores)
        if scores['val_loss'] < best_val_loss:
            best_val_loss = scores['val_loss']
            write(save, 'ckpt_best.pt')
        write(save, 'ckpt.pt')
        clock, clock_step = time.perf_counter(), step
    evaluated = False
    if step >= max_iters:
        break

    lr = learning_rate_at(step)
    for group in optimizer.param_groups:
        group['lr'] = lr
    torch.manual_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))  # of dropout
    first, problem = (step * world_size + rank) * micro_steps, None
    try:
        batches = [get_batch(i) for i in range(first, first + micro_steps)]
    except ValueError as error:
        problem = str(error)
    if any(sum_over_processes(problem is not None)):
        leave_if(problem)
    loss = 0.0
    for i, (idx, targets) in enumerate(batches):
        if ddp:
            model.require_backward_grad_sync = i == micro_steps - 1  # averages the gradients over the processes
        micro_loss = model(idx, targets)[1] / micro_steps
        micro_loss.backward()
        loss = loss + micro_loss.detach()
    loss, stopping = sum_over_processes(loss.item() / world_size, stop_requested)
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
    if not math.isfinite(loss + grad_norm):
        fail(f'step {step}: the loss is {loss}, the norm of its gradient {grad_norm}: try a lower --learning_rate; '
             'the checkpoint is as it was')
    for name, parameter, period in slow_parameters:
        if name in pending:
            parameter.grad += pending.pop(name)
        if (step + 1) % period:
            pending[name], parameter.grad = parameter.grad.clone(), None  # cloned, as DDP uses its memory again
    optimizer.step()
    optimizer.zero_grad()

    if step % log_interval == 0:
        speed = (step + 1 - clock_step) * tokens_per_step / (time.perf_counter() - clock)
        clock, clock_step = time.perf_counter(), step + 1
        numbers = {'tokens': (step + 1) * tokens_per_step, 'loss': loss, 'lr': lr, 'grad_norm': grad_norm,
                   'tokens_per_second': speed}
        if peak_flops:
            numbers['mfu'] = speed * counts['flops_per_token'] / (peak_flops * world_size)
        write(log, numbers)
        progress.set_postfix(loss=f'{loss:.4f}')
        if progress.disable:
            mfu = f', mfu {numbers["mfu"]:.1%}' if peak_flops else ''
            say(f'step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s{mfu}')
    step += 1
    progress.update()
    if stopping:
        write(save, 'ckpt.pt')
        say(f'stopped after {step} steps: go on with --init_from=resume')
        break

progress.close()
if master and sample_tokens and step >= max_iters and not eval_only:
    prompt = torch.tensor([[tokenizer.eot]], device=device)
    tokens = raw_model.generate(prompt, sample_tokens, temperature=0.8, top_k=50)[0].tolist()
    say('a sample:\n' + tokenizer.decode(tokens).decode('utf-8', 'replace'))
if wandb_log and master:
    wandb.finish()
if ddp:
    dist.barrier(group=control)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort an ordinary exit: seen once
