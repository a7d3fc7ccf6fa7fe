"""
Text in, token shards out, and the readers of both.

    python prepare.py                                     # data/stdlib: Python's own standard library, offline
    python prepare.py --dataset=shakespeare               # a small download
    python prepare.py --dataset=fineweb10B --shards=8     # GPT-2 tokens, ready made, in shards of 100M
    python prepare.py --dataset=mine --input='texts/*.jsonl.gz' --tokenizer=gpt2

Writes data/NAME: train_000000.bin ... and val_000000.bin ... in the format of llm.c and modded-nanogpt, meta.json,
tokenizer.json (all that encoding and decoding need) and token_bytes.npy (the bytes that each token stands for).
"""

import base64
import bisect
import collections
import difflib
import glob
import gzip
import hashlib
import http.client
import io
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import configure, fail

DATA = Path('data')
DOCUMENT_BYTES = 64_000_000  # a longer document is cut into several, so that memory does not grow with it
PIECE_CHARS = 1 << 16  # what one thread encodes at a time; a run of 1M spaces given whole crashes tiktoken
SHARD_TOKENS = 100_000_000
HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
SHARD_FORMATS = {(20240520, 1): '<u2', (20240801, 7): '<u4'}  # (magic, version): type of a token
TEXT_KINDS = ('.txt', '.jsonl', '.txt.gz', '.jsonl.gz')  # what is read in a folder

TEXTS = {  # a data set of one file: its URL and SHA-256
    'shakespeare': ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')}
READY_MADE = {  # shards of GPT-2 tokens: what val_000000.bin and train_000001.bin ... are appended to; how many of these
    'fineweb10B': ('https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_', 103),
    'finewebedu10B': ('https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_', 99),
    'fineweb100B': ('https://huggingface.co/datasets/kjj0/fineweb100B-gpt2/resolve/main/fineweb_', 1030)}
NAMED = ['stdlib', *TEXTS, *READY_MADE]

# -----------------------------------------------------------------------------
# tokenizers

# cl100k's pattern, which is Llama 3's too, in the equivalent form that tiktoken itself uses
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
           r'|\s++$|\s*[\r\n]|\s+(?!\S)|\s')
# Where a newline ends a piece of these patterns, and of GPT-2's: cut there, a text has the same tokens as uncut.
SAFE_CUT = re.compile(r'\S\n(?=\w)|\n(?= \w)')


class Tokenizer:
    """Bytes or BPE, rebuilt from a state of plain values: name, vocab_size, eot, and for BPE pattern and ranks."""

    def __init__(self, state):
        """state: what state() returned. Raises ValueError if its ranks are no byte-level BPE."""
        self._state = dict(state)
        self.name, self.vocab_size, self.eot = state['name'], state['vocab_size'], state['eot']
        self.table = [b''] * self.vocab_size  # the bytes of each token; none for end-of-text and unused ids
        self.encoding = None
        if self.name == 'bytes':
            self.table[:256] = [bytes([i]) for i in range(256)]
            return
        import tiktoken
        ranks = parse_ranks(state['ranks'])
        for token, rank in ranks.items():
            self.table[rank] = token
        self.encoding = tiktoken.Encoding(self.name, pat_str=state['pattern'], mergeable_ranks=ranks,
                                          special_tokens={'<|endoftext|>': self.eot})

    @classmethod
    def load(cls, name):
        """name: 'bytes', a name that tiktoken knows, or the path of a BPE rank file. Ends the program if it is none."""
        if name == 'bytes':
            return cls({'name': 'bytes', 'vocab_size': 257, 'eot': 256})
        import tiktoken
        known = tiktoken.list_encoding_names()
        if name in known:
            try:
                encoding = tiktoken.get_encoding(name)
            except (OSError, ValueError) as error:
                fail(f'tiktoken cannot fetch {name} ({type(error).__name__}): connect to the internet once, '
                     'or use --tokenizer=bytes')
            ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
            text = ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks)
            return cls({'name': name, 'vocab_size': encoding.n_vocab, 'eot': encoding.eot_token,
                        'pattern': encoding._pat_str, 'ranks': text})
        if not os.path.isfile(name):
            near = difflib.get_close_matches(name, ['bytes', *known])
            fail(f'--tokenizer={name}: neither a file nor one of bytes, {", ".join(known)}'
                 + (f'; did you mean {" or ".join(near)}?' if near else ''))
        try:
            text = Path(name).read_text(encoding='ascii')
            ranks = parse_ranks(text)
            last = max(ranks.values())
            eot, vocab_size = (128001, 128256) if len(ranks) == last + 1 == 128000 else (last + 1, last + 2)
            return cls({'name': os.path.basename(name), 'vocab_size': vocab_size, 'eot': eot,
                        'pattern': PATTERN, 'ranks': text})
        except ValueError as error:
            fail(f'{name} is not a BPE rank file (lines of a token in base64, a space, its rank): {error}')

    def state(self):
        """A dict of str and int that holds all there is to it: for JSON files and checkpoints."""
        return dict(self._state)

    def encode(self, text):
        """str -> list of int, without end-of-text: text that spells a special token is encoded as plain text."""
        return [token for piece in self.pieces(text.encode()) for token in self.encode_piece(piece).tolist()]

    def decode(self, tokens):
        """Token ids -> bytes; end-of-text and ids that stand for nothing are left out."""
        return b''.join(self.table[token] for token in tokens)

    def token_bytes(self):
        """(vocab_size,) int32: how many bytes each token stands for, 0 for end-of-text and unused ids."""
        return np.array([len(token) for token in self.table], dtype=np.int32)

    def pieces(self, document):
        """Cut the bytes of a document into pieces for encode_piece. Raises UnicodeDecodeError, except for bytes."""
        if self.encoding is None:
            yield from (document[i:i + PIECE_CHARS] for i in range(0, len(document), PIECE_CHARS))
            return
        text, start = document.decode(), 0
        while len(text) - start > 2 * PIECE_CHARS:
            match = SAFE_CUT.search(text, start + PIECE_CHARS, start + 2 * PIECE_CHARS)
            end = match.end() if match else start + 2 * PIECE_CHARS
            yield text[start:end]
            start = end
        yield text[start:]

    def encode_piece(self, piece):
        """A piece -> (n,) array of token ids. tiktoken lets other threads run meanwhile."""
        if self.encoding is None:
            return np.frombuffer(piece, np.uint8)
        return self.encoding.encode_to_numpy(piece, disallowed_special=())


def parse_ranks(text):
    """{token: rank} from the text of a rank file. Raises ValueError if a byte-level BPE cannot be made of it."""
    ranks, lines = {}, text.rstrip().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f'line {number} is {line[:40]!r}') from None
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f'there is no token for the byte {missing[0]}')
    if not len(lines) == len(ranks) == len(set(ranks.values())):
        raise ValueError('a token or a rank occurs twice')
    if min(ranks.values()) < 0 or max(ranks.values()) >= 1 << 24:
        raise ValueError('a rank is negative or far too large')
    return ranks


# -----------------------------------------------------------------------------
# readers of what is prepared

def read_meta(dataset):
    """The dict of data/NAME/meta.json: tokenizer, vocab_size; for train and val: tokens, bytes, documents; ..."""
    return json.loads(read_file(dataset, 'meta.json'))


def read_tokenizer(dataset):
    """The Tokenizer that prepared a data set."""
    return Tokenizer(json.loads(read_file(dataset, 'tokenizer.json')))


def read_token_bytes(dataset):
    """(vocab_size,) int32: how many bytes each token of a data set stands for."""
    return np.load(io.BytesIO(read_file(dataset, 'token_bytes.npy')))


def read_file(dataset, name):
    try:
        return (DATA / dataset / name).read_bytes()
    except OSError as error:
        command = f'python prepare.py --dataset={dataset}' + ('' if dataset in NAMED else ' --input=...')
        fail(f'{DATA / dataset / name}: {error.strerror}: first run {command}')


class Tokens:
    """The tokens of a split, 'train' or 'val': all its shards in the order of their names, read where they lie."""

    def __init__(self, dataset, split):
        paths = sorted((DATA / dataset).glob(f'{split}_*.bin'))
        self.shards = [open_shard(path) for path in paths]
        self.starts = [0]  # of each shard, and the end of the last
        for shard in self.shards:
            self.starts.append(self.starts[-1] + len(shard))
        if not len(self):
            fail(f'{DATA / dataset} has no {split} tokens')

    def __len__(self):
        return self.starts[-1]

    def window(self, start, length):
        """(length,) int64: the tokens from start on. Raises IndexError where there are not so many."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f'a window of {length} tokens at {start}, but there are {len(self)} tokens')
        window = np.empty(length, np.int64)
        done = 0
        while done < length:
            i = bisect.bisect(self.starts, start + done) - 1
            part = self.shards[i][start + done - self.starts[i]:][:length - done]
            window[done:done + len(part)] = part
            done += len(part)
        return window


def open_shard(path):
    """The tokens of a shard as an array that stays on disk. Ends the program if it is no whole shard."""
    try:
        header, size = np.fromfile(path, '<i4', 256), os.path.getsize(path)
        dtype = SHARD_FORMATS.get(tuple(header[:2].tolist()))
        if len(header) < 256 or dtype is None:
            fail(f'{path} is not a token shard: its header has not the magic number and version of one')
        count = int(header[2])
        if count < 0 or size != HEADER_BYTES + count * np.dtype(dtype).itemsize:
            fail(f'{path} is damaged: its header says {count:,} tokens, and that does not suit its {size:,} bytes')
        return np.memmap(path, dtype, 'r', HEADER_BYTES, (count,)) if count else np.empty(0, dtype)
    except OSError as error:
        fail(f'{path}: {error.strerror}')


# -----------------------------------------------------------------------------
# documents

def find_inputs(pattern):
    """[(name, path)] of a file, a glob or a folder. Names are relative to the folder that the files share."""
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        inside = glob.glob(os.path.join(glob.escape(pattern), '**', '*'), recursive=True)
        paths = [path for path in inside if path.lower().endswith(TEXT_KINDS)]
    else:
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    paths = [Path(path) for path in paths if os.path.isfile(path)]
    if not paths:
        fail(f'--input={pattern}: no such file, or no {", ".join(TEXT_KINDS)} file in this folder')
    return named(paths)


def find_stdlib():
    """[(name, path)] of the modules of Python's own standard library, without its tests and what was installed."""
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'lib2to3', '__pycache__'}
    paths = [path for path in Path(sysconfig.get_path('stdlib')).rglob('*.py') if not skip & set(path.parts[:-1])]
    if not paths:
        fail('this Python has no standard library in source: give --dataset=NAME and --input=FILE')
    return named(paths)


def named(paths):
    shared = os.path.commonpath([path.parent for path in paths])
    return sorted((Path(os.path.relpath(path, shared)).as_posix(), path) for path in paths)


def documents(path, field):
    """Yield (offset, bytes) of each document of a file that is not empty: lines of .jsonl, or else the file."""
    kind = path.name.lower()
    try:
        with gzip.open(path) if kind.endswith('.gz') else open(path, 'rb') as file:
            if not kind.removesuffix('.gz').endswith('.jsonl'):
                yield from cut_large(file)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        text = text_of(line, field)
                    except (ValueError, RecursionError) as error:
                        fail(f'{path}, line {number}: {error}')
                    yield from cut_large(io.BytesIO(text))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(f'{path} is damaged: {error}')


def text_of(line, field):
    """The text of a line of JSON, as UTF-8. Raises ValueError."""
    row = json.loads(line.decode('utf-8-sig'))
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise ValueError(f'no text in a field {field!r} (--field names another)')
    return row[field].encode()


def cut_large(file):
    """Yield (offset, bytes): a binary file in one part, or in several if it is larger than DOCUMENT_BYTES."""
    offset, data = 0, b''
    while data := data + file.read(DOCUMENT_BYTES + 1 - len(data)):
        end = cut(data, DOCUMENT_BYTES) if len(data) > DOCUMENT_BYTES else len(data)
        yield offset, data[:end]
        offset, data = offset + end, data[end:]


def cut(data, limit):
    """Where to cut data, at most at limit: after a newline, or if none is near between two UTF-8 characters."""
    end = data.rfind(b'\n', limit // 2, limit) + 1 or limit
    while limit - end < 3 and end > 0 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def read(inputs, field, title, total=None):
    """Yield (path, offset, bytes) of all documents, with a progress bar on a terminal."""
    with progress(title, total) as bar:
        for _, path in inputs:
            for offset, document in documents(path, field):
                yield path, offset, document
                bar.update(len(document))


def progress(title, total, done=0):
    return tqdm(desc=title, total=total, initial=done, unit='B', unit_scale=True, disable=not sys.stderr.isatty())


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# writing

class Writer:
    """Encodes the documents of a split in the threads of a pool and writes them, in order, to shards."""

    def __init__(self, folder, split, tokenizer, pool):
        self.folder, self.split, self.tokenizer, self.pool = folder, split, tokenizer, pool
        self.tokens = self.bytes = self.documents = 0
        self.format = (20240520, 1) if tokenizer.vocab_size <= 1 << 16 else (20240801, 7)
        self.group, self.size = [], 0  # pieces for the next task, None where a document begins; their length
        self.tasks = collections.deque()
        self.file = None

    def add(self, document):
        self.bytes += len(document)
        self.documents += 1
        self.group.append(None)
        for piece in self.tokenizer.pieces(document):
            self.group.append(piece)
            self.size += len(piece)
            if self.size >= PIECE_CHARS:
                self.submit()

    def submit(self):
        if not self.group:
            return
        self.tasks.append(self.pool.submit(self.encode, self.group))
        self.group, self.size = [], 0
        if len(self.tasks) > 4 * os.cpu_count():
            self.write(self.tasks.popleft().result())

    def encode(self, group):
        eot = [self.tokenizer.eot]
        parts = [eot if piece is None else self.tokenizer.encode_piece(piece) for piece in group]
        return np.concatenate(parts, dtype=SHARD_FORMATS[self.format], casting='unsafe')

    def write(self, tokens):
        while len(tokens):
            filled = self.tokens % SHARD_TOKENS
            if not filled:
                self.close_shard()
                self.file = open(self.folder / f'{self.split}_{self.tokens // SHARD_TOKENS:06d}.bin', 'wb')
                self.file.write(bytes(HEADER_BYTES))
            part = tokens[:SHARD_TOKENS - filled]
            self.file.write(part.data)
            self.tokens += len(part)
            tokens = tokens[len(part):]

    def close_shard(self):
        if self.file:
            header = np.zeros(256, '<i4')
            header[:3] = *self.format, (self.tokens - 1) % SHARD_TOKENS + 1
            self.file.seek(0)
            self.file.write(header.data)
            self.file.close()

    def close(self):
        """Write what is left. Returns the counts for meta.json."""
        self.submit()
        while self.tasks:
            self.write(self.tasks.popleft().result())
        self.close_shard()
        return {'tokens': self.tokens, 'bytes': self.bytes, 'documents': self.documents}


def describe(folder, tokenizer, meta):
    """Write the small files of a data set; meta.json, which makes it one, last."""
    array = io.BytesIO()
    np.save(array, tokenizer.token_bytes())
    meta = {'tokenizer': tokenizer.name, 'vocab_size': tokenizer.vocab_size, **meta}
    for name, data in (('tokenizer.json', json.dumps(tokenizer.state()).encode()),
                       ('token_bytes.npy', array.getvalue()),
                       ('meta.json', json.dumps(meta, indent=2).encode())):
        (folder / (name + '.part')).write_bytes(data)
        os.replace(folder / (name + '.part'), folder / name)


def prepare_text(folder, inputs, tokenizer, field, val_fraction, seed):
    """Write the shards of text inputs, a list of (name, path), to a new folder. Returns what goes into meta.json."""
    # First pass: find what is wrong before anything is written, and count, for the draw.
    count = size = 0
    for path, offset, document in read(inputs, field, 'checking'):
        try:
            if tokenizer.encoding:
                document.decode()
        except UnicodeDecodeError as error:
            fail(f'{path}: not UTF-8 at byte {offset + error.start} (--tokenizer=bytes takes any bytes)')
        count, size = count + 1, size + len(document)
    if not count:
        fail('there is no text in the input')
    drawn = min(count - 1, max(1, round(count * val_fraction)))
    drawn = set(random.Random(seed).sample(range(count), drawn))
    meta = {'seed': seed, 'val_fraction': val_fraction, 'field': field,
            'inputs': {name: sha256(path) for name, path in inputs}}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        train, val = (Writer(folder, split, tokenizer, pool) for split in ('train', 'val'))
        for i, (_, _, document) in enumerate(read(inputs, field, 'tokenizing', size)):
            if count == 1:
                end = cut(document, len(document) * 9 // 10)
                if not end:
                    fail('the input is too short to be split into a train and a val part')
                train.add(document[:end])
                val.add(document[end:])
            else:
                (val if i in drawn else train).add(document)
        meta = {'train': train.close(), 'val': val.close(), **meta}
    if meta['train']['bytes'] + meta['val']['bytes'] != size:
        fail('the input has changed while it was read: try again')
    return meta


# -----------------------------------------------------------------------------
# downloads

def download(url, path, check=None):
    """Download to path by way of path.part, from where that ends if an earlier try was interrupted.

    check: called with path.part when it is complete, ends the program if it is not what it should be.
    """
    part = Path(f'{path}.part')
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={'Range': f'bytes={done}-'} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            resumed = response.headers.get('Content-Range', '').startswith(f'bytes {done}-')
            done = done if resumed else 0
            length = response.headers.get('Content-Length')
            total = done + int(length) if length else None
            with open(part, 'ab' if resumed else 'wb') as file, progress(path.name, total, done) as bar:
                while block := response.read(1 << 16):
                    file.write(block)
                    done += len(block)
                    bar.update(len(block))
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send after .part: then it is not a part of this file
            part.unlink()
            return download(url, path, check)
        fail(f'{url}: {error.code} {error.reason}')
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ValueError) as error:
        fail(f'{url}: {getattr(error, "reason", error)}: the same command goes on from here')
    if total is not None and done < total:
        fail(f'{url}: the connection ended after {done:,} of {total:,} bytes: the same command goes on from here')
    try:
        if total is not None and done > total:
            fail(f'{url}: {done:,} bytes came instead of {total:,}: try again')
        if check:
            check(part)
    except SystemExit:
        part.unlink()
        raise
    os.replace(part, path)


def download_text(url, folder, digest=None):
    """[(name, path)] of a text at a URL, in folder. What is there from an earlier try is not loaded again."""
    def check(part):
        if digest and sha256(part) != digest:
            fail(f'{url} has changed: its SHA-256 should be {digest}')

    name = url.split('?')[0].split('#')[0]
    path = folder / f'{hashlib.sha256(url.encode()).hexdigest()[:8]}_{name.split("/")[-1]}'
    if not path.exists():
        folder.mkdir(exist_ok=True)
        download(url, path, check)
    return [(name, path)]


def prepare_ready_made(dataset, shards):
    """Download the val shard and the first train shards (0: all) of a ready-made set, except those that are here."""
    url, most = READY_MADE[dataset]
    if not 0 <= shards <= most:
        fail(f'--shards={shards}: {dataset} has {most} train shards')
    tokenizer = Tokenizer.load('gpt2')  # first, since this may be a download too
    folder = DATA / dataset
    folder.mkdir(exist_ok=True)
    for name in ['val_000000.bin'] + [f'train_{i:06d}.bin' for i in range(1, (shards or most) + 1)]:
        if not (folder / name).exists():
            download(url + name, folder / name, check=open_shard)
    paths = {split: sorted(folder.glob(f'{split}_*.bin')) for split in ('train', 'val')}
    meta = {split: count_tokens(paths[split], tokenizer) for split in paths}
    meta['inputs'] = {path.name: sha256(path) for path in paths['train'] + paths['val']}
    describe(folder, tokenizer, meta)


def count_tokens(paths, tokenizer):
    """The counts for meta.json of shards that were made elsewhere."""
    counts = {'tokens': 0, 'bytes': 0, 'documents': 0}
    lengths = tokenizer.token_bytes()
    for path in tqdm(paths, 'counting', disable=not sys.stderr.isatty()):
        shard = open_shard(path)
        for start in range(0, len(shard), 1 << 24):
            tokens = shard[start:start + (1 << 24)]
            if tokens.max() >= tokenizer.vocab_size:
                fail(f'{path}: token {tokens.max()} is not in the vocabulary of {tokenizer.name}')
            counts['tokens'] += len(tokens)
            counts['bytes'] += int(lengths[tokens].sum(dtype=np.int64))
            counts['documents'] += int((tokens == tokenizer.eot).sum())
    return counts


# -----------------------------------------------------------------------------

def prepare(dataset, input='', tokenizer='', field='text', val_fraction=0.01, seed=1337, shards=0):
    """Prepare data/NAME, as the command does; the settings are explained below. Ends the program if it cannot."""
    if dataset in ('', '.', '..') or dataset != os.path.basename(dataset):
        fail(f'--dataset={dataset}: this is the name of a folder in {DATA}, without slashes')
    if not input and dataset not in NAMED:
        near = difflib.get_close_matches(dataset, NAMED, n=1)
        fail(f'--dataset={dataset} needs an --input; without one there are {", ".join(NAMED)}'
             + (f'; did you mean {near[0]}?' if near else ''))
    if input and dataset in NAMED:
        fail(f'--input: {dataset} is a data set of its own: give this one a name with --dataset=NAME')
    if dataset in READY_MADE and tokenizer not in ('', 'gpt2'):
        fail(f'--tokenizer={tokenizer}: {dataset} is made of tokens of gpt2')
    if shards and dataset not in READY_MADE:
        fail(f'--shards is for {", ".join(READY_MADE)}')
    if not 0 < val_fraction < 1:
        fail(f'--val_fraction={val_fraction} should be between 0 and 1')
    folder, building, downloads = (DATA / f'{dataset}{suffix}' for suffix in ('', '.tmp', '.download'))
    try:
        if dataset in READY_MADE:
            DATA.mkdir(exist_ok=True)
            prepare_ready_made(dataset, shards)
        else:
            if folder.exists():
                fail(f'{folder} is there already: remove it, or choose another --dataset=NAME')
            tokenizer = Tokenizer.load(tokenizer or ('bytes' if dataset == 'stdlib' else 'gpt2'))
            DATA.mkdir(exist_ok=True)
            if dataset in TEXTS:
                inputs = download_text(TEXTS[dataset][0], downloads, digest=TEXTS[dataset][1])
            elif input.startswith(('http://', 'https://')):
                inputs = download_text(input, downloads)
            else:
                inputs = find_inputs(input) if input else find_stdlib()
            shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
            building.mkdir()
            describe(building, tokenizer, prepare_text(building, inputs, tokenizer, field, val_fraction, seed))
            os.rename(building, folder)
            shutil.rmtree(downloads, ignore_errors=True)
    except OSError as error:
        fail(f'{error.filename or folder}: {error.strerror or error}')
    finally:
        shutil.rmtree(building, ignore_errors=True)
        for path in (downloads, folder, DATA):  # those that a failure has left empty
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    meta = read_meta(dataset)
    for split in ('train', 'val'):
        print(f'{folder} {split}:', ', '.join(f'{count:,} {what}' for what, count in meta[split].items()))


if __name__ == '__main__':
    dataset = 'stdlib'  # data/NAME: stdlib, shakespeare, fineweb10B, finewebedu10B, fineweb100B, or any with an input
    input = ''  # a file, a glob, a folder or a URL of .txt (a file is a document) or .jsonl (a line is), also as .gz
    tokenizer = ''  # bytes, gpt2, another name tiktoken knows, or a BPE rank file; '': bytes for stdlib, or else gpt2
    field = 'text'  # of a line of .jsonl
    val_fraction = 0.01  # of the documents, drawn for validation; of a single document it is the last tenth
    seed = 1337  # of this draw
    shards = 0  # train shards to download of a ready-made data set; 0: all
    config = configure(globals())
    try:
        prepare(**config)
    except KeyboardInterrupt:
        print('interrupted: nothing was changed, except that downloads go on from where they are', file=sys.stderr)
        sys.exit(130)
