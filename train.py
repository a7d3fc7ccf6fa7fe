"""
Train a model, on a CPU, on a GPU, or on several under torchrun:

    python train.py                                                      # minutes on a laptop, nothing to download
    python train.py config/hourglass_113m.py --batch_size=32             # a config file, and what to change in it
    torchrun --nproc_per_node=8 train.py config/hourglass_113m.py        # 8 GPUs of one machine

A step's batch depends on the seed and the step alone, neither on the model nor on the number of processes: two runs
that differ in the model see the same tokens in the same order.

With mlp_periods = '1,4,16' the stack of MLPs learns at several rates, as in Hope's Continuum Memory System (Behrouz et
al. 2025, "Nested Learning"): the i-th MLP of every layer changes only every C_i steps, by the sum of the updates that
the optimizer has made since, each from the gradient at the weights that the model still had. These are Hope's update
frequencies in training, not its learning while reading: no weight changes within a sequence, nor after training.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
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
from configurator import check_range, configure, explain, fail, fail_on, show
from model import GPT, GPTConfig, budget, ffn_widths, keep_freed_memory, prefer_cudnn, resolve_device, shape_of

# ----------------------------------------------------------------------------------------------------------------------
# The settings. The defaults train a small model on Python's own standard library.

# the run
out_dir = 'out'  # folder of checkpoints and metrics.jsonl
init_from = 'scratch'  # or resume (ckpt.pt), auto (resume if it is there), best (to evaluate), hf:FOLDER_OR_NAME
seed = 1337  # seed of the initial weights, the order of the data, and dropout
eval_interval = 200  # steps between evaluations, each of which saves a checkpoint
eval_tokens = 65536  # validation tokens of an evaluation, the first ones; 0: all
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
# the model: a small one; GPTConfig in model.py has all its settings, and says what they mean
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
compile = 'auto'  # torch.compile: true, false, or auto: on a GPU

config = configure(globals(), GPTConfig)
sys.excepthook = explain
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it

# ----------------------------------------------------------------------------------------------------------------------
# Where it starts: from nothing, from a pretrained model, or from a checkpoint with the settings it was trained with

ddp = 'WORLD_SIZE' in os.environ  # one of several processes, with what torchrun sets for each
rank, local_rank, world_size = 0, 0, 1
if ddp:
    with fail_on((KeyError, ValueError), 'WORLD_SIZE is set, but not by torchrun: start with torchrun, or unset it'):
        rank, local_rank, world_size = (int(os.environ[name]) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
        if not 0 <= rank < world_size:
            raise ValueError(f'RANK={rank} of WORLD_SIZE={world_size}')
master = rank == 0  # the process that prints and saves


def say(text):
    if master:
        with tqdm.external_write_mode():
            show(text)


FREE_TO_CHANGE = {'max_iters', 'eval_interval', 'eval_tokens', 'eval_datasets', 'log_interval', 'sample_tokens',
                  'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype', 'compile'}


def take_over(theirs, source):
    """Go on with the settings of a trained model. Ends the run if one was set otherwise that is not free to change."""
    changed = [name for name in sorted(config.given & theirs.keys() - FREE_TO_CHANGE) if config[name] != theirs[name]]
    if changed:
        fail(f'{source} was trained otherwise: '
             + ', '.join(f'{name} was {theirs[name]!r} and is {config[name]!r}' for name in changed))
    config.update({name: value for name, value in theirs.items() if name not in config.given})


is_pretrained = init_from.startswith('hf:')
if init_from not in ('scratch', 'resume', 'auto', 'best') and not is_pretrained:
    fail(f'init_from={init_from}: must be scratch, resume, auto, best or hf:FOLDER_OR_NAME')
if init_from == 'best' and not eval_only:
    fail('init_from=best is for eval_only: training goes on from ckpt.pt, with --init_from=resume')
names = ('ckpt_best.pt',) if init_from == 'best' else ('ckpt.pt', 'ckpt_best.pt')
found = [path for path in (Path(out_dir, name) for name in names) if path.exists()]
checkpoint_path, checkpoint = found[0] if found else None, None
if checkpoint_path and (init_from == 'scratch' or is_pretrained):
    fail(f'{checkpoint_path} is there already: go on from it with --init_from=resume, or choose another --out_dir')
if not checkpoint_path and init_from in ('resume', 'best'):
    fail(f'{Path(out_dir, names[0])}: no such checkpoint')
if checkpoint_path:
    with fail_on(Exception, f'{checkpoint_path} cannot be read, or is no checkpoint of train.py'
                            + ''.join(f'; {path} may be whole: put it in its place' for path in found[1:])):
        checkpoint = torch.load(checkpoint_path, map_location='cpu', weights_only=True, mmap=True)
        for name in ('model', 'optimizer', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'data_id'):
            if name not in checkpoint:
                raise ValueError(f'it has no {name}')
        unknown = sorted(config.keys() - checkpoint['config'].keys())
        if unknown:
            say(f'the checkpoint does not know {", ".join(unknown)}: taken to have been trained with the defaults')
        of_this_run = {'out_dir': out_dir, 'init_from': init_from, 'eval_only': eval_only}
        take_over({**config.defaults, **checkpoint['config'], **of_this_run}, checkpoint_path)
config['lr_decay_iters'] = config['lr_decay_iters'] or config['max_iters']  # a resumed run keeps its schedule
globals().update(config)  # each setting is a variable of this script
check_range(config, 'eval_interval log_interval batch_size gradient_accumulation_steps block_size', least=1)
check_range(config, 'max_iters eval_tokens sample_tokens seed warmup_iters lr_decay_iters', least=0)
check_range(config, 'learning_rate min_lr weight_decay grad_clip', least=0)
check_range(config, 'beta1 beta2', least=0, below=1)
if compile not in ('auto', True, False):
    fail(f'compile={compile}: must be auto, true or false')

# ----------------------------------------------------------------------------------------------------------------------
# The machine, and what its processes share

if gradient_accumulation_steps % world_size and not eval_only:
    fail(f'gradient_accumulation_steps={gradient_accumulation_steps} cannot be shared equally by the {world_size} '
         'processes: make it a multiple')
micro_steps = gradient_accumulation_steps // world_size  # of this process, in each step
with fail_on(ValueError):
    device, compute_dtype = resolve_device(device, dtype)
config['dtype'] = str(compute_dtype).removeprefix('torch.')  # a resumed run goes on in what 'auto' was
device_type = torch.device(device).type
if device_type == 'cpu':
    keep_freed_memory()
if device_type == 'cuda':
    torch.set_float32_matmul_precision('high')  # TF32, where float32 is asked for
if ddp and device_type == 'cuda':
    processes, gpus = int(os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)), torch.cuda.device_count()
    if processes > gpus:
        fail(f'{processes} processes on a machine with {gpus} GPUs: start torchrun with --nproc_per_node={gpus}')
    device = f'cuda:{local_rank}'
    torch.cuda.set_device(device)
if ddp:
    with fail_on((RuntimeError, ValueError), f'the {world_size} processes cannot meet'):
        dist.init_process_group('nccl' if device_type == 'cuda' else 'gloo')
    control = dist.new_group(backend='gloo')  # for small messages between the CPUs


def sum_over_processes(*values):
    sums = torch.tensor(values, dtype=torch.float64)
    if ddp:
        dist.all_reduce(sums, group=control)
    return sums.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# The data

if local_rank == 0 and dataset == 'stdlib' and not Path('data/stdlib').exists():
    say('preparing data/stdlib: the source of Python\'s standard library, in tokens of its own')
    prepare.prepare('stdlib')
if ddp:
    dist.barrier(group=control)
meta = prepare.read_meta(dataset)
tokenizer = prepare.read_tokenizer(dataset)
token_bytes = tokenizer.token_bytes()
train_data, val_data = prepare.Tokens(dataset, 'train'), prepare.Tokens(dataset, 'val')
eval_data = {'': val_data}  # by the suffix of their scores: val_loss, val_loss/NAME
for name in eval_datasets.replace(',', ' ').split():
    if not tokenizer.same_tokens(prepare.read_tokenizer(name)):
        fail(f'data/{name} was prepared with another tokenizer than data/{dataset}: losses per token are no match')
    eval_data[f'/{name}'] = prepare.Tokens(name, 'val')
for data in (train_data, *eval_data.values()):
    if len(data) <= block_size:
        fail(f'{data.name} has {len(data):,} tokens, less than a window of block_size + 1: prepare more text, or lower '
             '--block_size')
n_windows = (len(train_data) - 1) // block_size
described = json.dumps([meta, len(train_data), len(val_data)], sort_keys=True)
data_id = hashlib.sha256(described.encode()).hexdigest()
if checkpoint and checkpoint['tokenizer'] != tokenizer.state():
    fail(f'{checkpoint_path} was trained with another tokenizer than that of data/{dataset}')
if checkpoint and checkpoint['data_id'] != data_id:
    fail(f'{checkpoint_path} was trained on other data: data/{dataset} was prepared anew since')


@functools.lru_cache(maxsize=2)
def window_order(epoch):
    return np.random.default_rng((seed, epoch)).permutation(n_windows)


def read_windows(data, starts, length):
    """Inputs and targets, each (len(starts), length), on the device."""
    tokens = np.stack([data.window(start, length + 1) for start in starts])
    if tokens.max() >= meta['vocab_size']:
        fail(f'{data.name} has a token id {tokens.max()}, outside of its {meta["vocab_size"]}')
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


def get_batches(step):
    """The batches of all micro-steps of this process in a step."""
    first = (step * world_size + rank) * micro_steps
    return [get_batch(i) for i in range(first, first + micro_steps)]


# ----------------------------------------------------------------------------------------------------------------------
# The model and the optimizer

config['vocab_size'] = vocab_size or meta['vocab_size']
torch.manual_seed(seed)
with fail_on(ValueError):
    if is_pretrained:
        raw_model = GPT.from_pretrained(init_from[3:], compute_dtype, block_size=block_size, dropout=config['dropout'])
        take_over(asdict(raw_model.config), init_from)
        if not tokenizer.same_tokens(prepare.Tokenizer.load(init_from)):
            fail(f'data/{dataset} has other tokens than {init_from}: prepare it with --tokenizer={init_from}')
    else:
        raw_model = GPT(shape_of(config), compute_dtype)
model_config = raw_model.config
if model_config.vocab_size < meta['vocab_size']:
    fail(f'vocab_size={model_config.vocab_size} is less than the {meta["vocab_size"]} of data/{dataset}')
raw_model.to(device)
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
scaler = torch.amp.GradScaler(device_type, enabled=compute_dtype == torch.float16)  # so that no gradient rounds to 0
slow_parameters = list(raw_model.slow_parameters())
ahead = {}  # slow parameters by name, as the optimizer has them and the model does not yet
step, best_val_loss = 0, math.inf
if checkpoint:
    with fail_on(Exception, f'{checkpoint_path} does not fit model.py as it is now'):
        raw_model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        if checkpoint.get('scaler'):
            scaler.load_state_dict(checkpoint['scaler'])
        if list(checkpoint['model']) != list(raw_model.state_dict()):  # by which the optimizer knows them
            raise ValueError('its weights are in another order')
        ahead = {name: weight.to(device) for name, weight in checkpoint.get('ahead', {}).items()}
        step, best_val_loss = int(checkpoint['iter_num']), float(checkpoint['best_val_loss'])
    checkpoint = None  # frees its memory
if sum_over_processes(step, n_windows) != [step * world_size, n_windows * world_size]:
    fail(f'the machines see different files: {out_dir} and data/{dataset} must be shared between them, or equal')
compiled = device_type == 'cuda' if compile == 'auto' else compile
if compiled and device_type == 'cpu' and not any(map(shutil.which, (os.environ.get('CXX', 'g++'), 'clang++', 'cl'))):
    fail('compile=true needs a C++ compiler on a CPU, as g++ is: install one, or leave it out')
if compiled:  # Titans compiles each shape of block twice, to train and to evaluate: allow for so many
    torch._dynamo.config.cache_size_limit += 2 * len(set(map(tuple, ffn_widths(model_config))))
model = single_model = torch.compile(raw_model) if compiled else raw_model
if ddp:
    model = DistributedDataParallel(single_model, [local_rank] if device_type == 'cuda' else None,
                                    bucket_cap_mb=100,  # each bucket is a compiled graph: 25 MB make 120 of 1.3B
                                    gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # they never change; as an argument, a newer torch warns of this


def learning_rate_at(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = min(1, (step - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + (learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update_weights():
    """A step of the optimizer. It takes slow parameters further from where it left them; the model sees that only when
    their period is over."""
    seen = {name: parameter.clone() for name, parameter, _ in slow_parameters}
    for name, parameter, _ in slow_parameters:
        parameter.copy_(ahead.pop(name, parameter))
    scaler.step(optimizer)  # in float16, changes nothing if a gradient is infinite
    scaler.update()
    for name, parameter, period in slow_parameters:
        if (step + 1) % period:
            ahead[name] = parameter.clone()
            parameter.copy_(seen[name])


@torch.no_grad()
def evaluate(data):
    """Loss in nats, perplexity, and bits per byte of the first eval_tokens targets, in windows that share no target.

    The sums are over the same tokens however many processes share them. Tokens that stand for no byte, as end-of-text,
    count in the loss and not in bits per byte. Raises KeyboardInterrupt if the run is to stop.
    """
    n_targets = min(len(data) - 1, eval_tokens or len(data))
    starts = range(0, n_targets - n_targets % block_size, block_size)
    batches = [(starts[i:i + batch_size], block_size) for i in range(0, len(starts), batch_size)]
    if n_targets % block_size:
        batches.append(([len(starts) * block_size], n_targets % block_size))
    sums = np.zeros(3)  # nats, nats of the tokens that stand for bytes, bytes
    raw_model.eval()
    for round_ in range(0, len(batches), world_size):
        if round_ + rank < len(batches):
            idx, targets = read_windows(data, *batches[round_ + rank])
            whole = idx.shape == (batch_size, block_size)  # for any other shape the model would be compiled anew
            with prefer_cudnn(device):
                losses = (single_model if whole else raw_model)(idx, targets, reduction='none')[1]
            losses = losses.cpu().double().numpy()
            bytes_of = token_bytes[targets.cpu().numpy()]
            sums += losses.sum(), losses[bytes_of > 0].sum(), bytes_of.sum()
        if any(sum_over_processes(len(stop_signals))):
            raise KeyboardInterrupt
    raw_model.train()
    nats, nats_of_bytes, n_bytes = sum_over_processes(*sums)
    loss, bits_per_byte = nats / n_targets, nats_of_bytes / max(1, n_bytes) / math.log(2)
    if not math.isfinite(loss):
        fail(f'step {step}: the loss on {data.name} is {loss}: try a lower --learning_rate; what is saved is as it was')
    perplexity = math.exp(min(loss, 700))
    say(f'step {step}: {data.name} loss {loss:.4f}, perplexity {perplexity:.3f}, {bits_per_byte:.4f} bits per byte')
    return {'val_loss': loss, 'val_ppl': perplexity, 'val_bpb': bits_per_byte}


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and metrics, kept by the master. If it cannot write them, the run ends, and old files stay whole.

metrics_path = Path(out_dir, 'metrics.jsonl')
unwritable = f'{Path(out_dir)} cannot be written (mend that, or choose another --out_dir)'
evaluated = False  # whether metrics.jsonl has the scores of this step


def check_room(copies):
    """End the run if so many more checkpoints do not fit on the disk."""
    need = copies * 12 * sum(parameter.numel() for parameter in raw_model.parameters())  # weights and two moments
    free = shutil.disk_usage(Path(out_dir)).free
    if free < need:
        fail(f'{out_dir} cannot be written: checkpoints need {need / 1e9:,.3f} GB, and its disk has {free / 1e9:,.3f} '
             'GB left: make room, or choose another --out_dir')


def save(name):
    temporary = Path(out_dir, name + '.tmp')
    try:
        with open(temporary, 'wb') as file:
            torch.save({'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(),
                        'scaler': scaler.state_dict(), 'model_args': asdict(model_config), 'iter_num': step,
                        'best_val_loss': best_val_loss, 'config': dict(config), 'tokenizer': tokenizer.state(),
                        'data_id': data_id, **({'ahead': ahead} if ahead else {})}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, Path(out_dir, name))
    except (OSError, RuntimeError) as error:  # torch.save raises either on a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
            check_room(1)
        fail(f'{unwritable}: {error.__context__ or error}')


def log(numbers):
    with fail_on(OSError, unwritable), open(metrics_path, 'a') as file:
        file.write(json.dumps({'step': step, **numbers}) + '\n')
    if wandb_log:
        wandb.log(numbers, step=step)


if master and not eval_only:
    with fail_on(OSError, unwritable):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        check_room(1 + sum(not Path(out_dir, name).exists() for name in ('ckpt.pt', 'ckpt_best.pt')))
        kept, resumed = [], checkpoint_path and metrics_path.exists()  # not where only a checkpoint was brought here
        for line in metrics_path.read_text(errors='replace').splitlines() if resumed else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the end of a line that was being written, say
                numbers = json.loads(line)
                if numbers['step'] < step or (numbers['step'] == step and 'val_loss' in numbers):
                    kept.append(numbers)
                    evaluated = numbers['step'] == step
        temporary = metrics_path.with_suffix('.tmp')
        temporary.write_text(''.join(json.dumps(numbers) + '\n' for numbers in kept))
        os.replace(temporary, metrics_path)
if master and wandb_log:
    with fail_on(ImportError, 'wandb_log=true needs the package wandb: pip install wandb'):
        import wandb
    wandb.init(project=wandb_project, name=wandb_run_name or None, config=dict(config))

# ----------------------------------------------------------------------------------------------------------------------
# Training

PEAK_FLOPS = {'GB200': 2500e12, 'B200': 2250e12, 'H200 NVL': 835e12, 'H200': 989e12, 'H100 NVL': 835e12,
              'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'RTX 4090': 165e12,
              'RTX 3090': 71e12}  # dense bfloat16 of a GPU, by the first of these that is in its name
gpu = torch.cuda.get_device_name(device) if device_type == 'cuda' else ''
peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu and compute_dtype != torch.float32), None)
counts = budget(model_config)
tokens_per_step = gradient_accumulation_steps * batch_size * block_size
say(f'{model_config.ffn} model of {counts["total"]:,} parameters ({counts["mixer"]:,} {model_config.mixer}, '
    f'{counts["ffn"]:,} FFN, {counts["embedding"]:,} embedding), {config["dtype"]} on {world_size} x {gpu or device}\n'
    f'{tokens_per_step:,} tokens a step, {len(train_data) / tokens_per_step:,.1f} steps an epoch of data/{dataset}')
if checkpoint_path and not eval_only:
    say(f'going on from {checkpoint_path}, which has {step} steps' + ': raise --max_iters' * (step >= max_iters))
if eval_only and not checkpoint_path:
    say(f'{out_dir} has no checkpoint: what follows is of the initial weights')
stop_signals = []  # that this process has had
for name in ('SIGTERM', 'SIGINT', 'SIGHUP'):  # the last when a terminal closes, on systems that have it
    number = getattr(signal, name, signal.SIGTERM)
    if not eval_only and signal.getsignal(number) != signal.SIG_IGN:  # as nohup has SIGHUP
        signal.signal(number, lambda number, frame: stop_signals.append(number))
evaluated = any(sum_over_processes(evaluated))
bar = tqdm(total=max_iters, initial=step, unit='step', disable=not (master and sys.stderr and sys.stderr.isatty()))
clock, clock_step = time.perf_counter(), step
batches = get_batches(step)

try:
    while True:
        if (step % eval_interval == 0 or step >= max_iters or eval_only) and not evaluated:
            scores = {name + suffix: score for suffix, data in eval_data.items()
                      for name, score in evaluate(data).items()}
            if eval_only:
                break
            best, best_val_loss = scores['val_loss'] < best_val_loss, min(scores['val_loss'], best_val_loss)
            if master:
                log(scores)
            if master and step > 0:
                if best:
                    save('ckpt_best.pt')
                save('ckpt.pt')
            clock, clock_step = time.perf_counter(), step
        evaluated = False
        if step >= max_iters:
            break

        lr = learning_rate_at(step)
        for group in optimizer.param_groups:
            group['lr'] = lr
        torch.manual_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))  # of dropout
        loss = 0.0
        for i, (idx, targets) in enumerate(batches):
            if ddp:
                model.require_backward_grad_sync = i == micro_steps - 1  # averages the gradients over the processes
            with prefer_cudnn(device):
                micro_loss = model(idx, targets)[1] / micro_steps
            scaler.scale(micro_loss).backward()
            loss = loss + micro_loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        batches = get_batches(step + 1)  # while the GPU is still at work: the next line waits for it
        loss, grad_norm = torch.stack((loss, grad_norm)).tolist()
        loss, stopping = sum_over_processes(loss / world_size, len(stop_signals))
        if not math.isfinite(loss) or (not math.isfinite(grad_norm) and scaler.get_scale() <= 1):  # 1 without a scaler
            fail(f'step {step}: the loss is {loss}, the norm of its gradient {grad_norm}: try a lower --learning_rate'
                 f'{" or --dtype=float32" if scaler.is_enabled() else ""}; the checkpoint is as it was')
        update_weights()
        optimizer.zero_grad()

        if step % log_interval == 0:
            speed = (step + 1 - clock_step) * tokens_per_step / (time.perf_counter() - clock)
            clock, clock_step = time.perf_counter(), step + 1
            numbers = {'tokens': (step + 1) * tokens_per_step, 'loss': loss, 'lr': lr,
                       'grad_norm': grad_norm if math.isfinite(grad_norm) else None,  # None: the step changed nothing
                       'tokens_per_second': speed}
            if peak_flops:
                numbers['mfu'] = speed * counts['flops_per_token'] / (peak_flops * world_size)
            if master:
                log(numbers)
            bar.set_postfix(loss=f'{loss:.4f}')
            if bar.disable:
                mfu = f', mfu {numbers["mfu"]:.1%}' if peak_flops else ''
                say(f'step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s{mfu}')
        step += 1
        bar.update()
        if stopping:
            raise KeyboardInterrupt
except KeyboardInterrupt:  # in all processes at once, when any of them has had a signal
    if master and step > 0:
        save('ckpt.pt')
    say(f'stopped after {step} steps' + (': go on with --init_from=resume' if step > 0 else ''))

bar.close()
if master and sample_tokens and step >= max_iters and not eval_only:
    for number in (signal.SIGTERM, signal.SIGINT):  # as all is saved
        signal.signal(number, signal.SIG_DFL)
    for start in ('def', 'class') if dataset == 'stdlib' else ('',):
        prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode(start)]], device=device)
        tokens = raw_model.generate(prompt, sample_tokens, temperature=0.8, top_k=50, stop_token=tokenizer.eot)
        say('--- a sample ---\n' + tokenizer.decode(tokens[0].tolist()).decode('utf-8', 'replace'))
if wandb_log and master:
    wandb.finish()
if ddp:
    dist.barrier(group=control)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads can abort an ordinary exit: seen once
