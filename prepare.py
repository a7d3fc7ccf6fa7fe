"""
Text in, token shards out, and the readers of both.

    python prepare.py                                     # data/stdlib: Python's own standard library, offline
    python prepare.py --dataset=shakespeare               # a small download
    python prepare.py --dataset=fineweb10B --shards=8     # GPT-2 tokens, ready made, in shards of 100M
    python prepare.py --dataset=mine --input='texts/*.jsonl.gz' --tokenizer=gpt2

Writes to data/NAME: {train,val}_000000.bin ... in the format of llm.c and modded-nanogpt, meta.json, tokenizer.json
(what encoding and decoding need) and token_bytes.npy (how many bytes each token stands for).
"""

import base64
import collections
import contextlib
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
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import configure, fail

DATA = Path('data')
DOCUMENT_BYTES = 64_000_000  # a longer document is cut into several, so that memory does not grow with it
PIECE = 1 << 16  # characters that a thread encodes at a time; of a million spaces at once tiktoken would crash
SHARD_TOKENS = 100_000_000
HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
SHARD_FORMATS = {(20240520, 1): '<u2', (20240801, 7): '<u4'}  # (magic, version): type of the tokens
TEXT_KINDS = '.txt', '.jsonl', '.txt.gz', '.jsonl.gz'  # what is read of a folder
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'lib2to3'}

TEXTS = {  # a data set of one file: its URL and SHA-256
    'shakespeare': ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')}
READY_MADE = {  # shards of GPT-2 tokens: the URL up to val_000000.bin and train_000001.bin ...; how many of train
    'fineweb10B': ('https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_', 103),
    'finewebedu10B': ('https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_', 99),
    'fineweb100B': ('https://huggingface.co/datasets/kjj0/fineweb100B-gpt2/resolve/main/fineweb_', 1030)}
NAMED = ['stdlib', *TEXTS, *READY_MADE]

# cl100k's pattern, which is Llama 3's too, in the faster form that tiktoken has for it
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
           r'|\s++$|\s*[\r\n]|\s+(?!\S)|\s')
# Between two words and after a lone newline this pattern and GPT-2's end a match: cut there, text has the same tokens.
SAFE_CUT = re.compile(r'\w(?= \w)|\S\n(?=\w)')


class Tokenizer:
    """Bytes or BPE. Has name, vocab_size, eot (the id of end-of-text) and, from these, is rebuilt: see state()."""

    def __init__(self, state):
        """state: what state() returned. Raises ValueError if its ranks make no BPE over bytes."""
        self._state = state
        self.name, self.vocab_size, self.eot = state['name'], state['vocab_size'], state['eot']
        self.encoding = None
        ranks = {bytes([i]): i for i in range(256)}
        if 'ranks' in state:
            import tiktoken
            ranks = parse_ranks(state['ranks'])
            self.encoding = tiktoken.Encoding(self.name, pat_str=state['pattern'], mergeable_ranks=ranks,
                                              special_tokens={'<|endoftext|>': self.eot})
        self.table = [b''] * self.vocab_size  # the bytes of each token; none for end-of-text and unused ids
        for token, rank in ranks.items():
            self.table[rank] = token

    @classmethod
    def load(cls, name):
        """name: 'bytes', a name that tiktoken knows, or the path of a BPE rank file; else ends the program."""
        if name == 'bytes':
            return cls({'name': 'bytes', 'vocab_size': 257, 'eot': 256})
        import tiktoken
        known = tiktoken.list_encoding_names()
        try:
            if name in known:
                encoding = tiktoken.get_encoding(name)
                ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
                text = ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks)
                return cls({'name': name, 'vocab_size': encoding.n_vocab, 'eot': encoding.eot_token,
                            'pattern': encoding._pat_str, 'ranks': text})
            if os.path.isfile(name):
                text = Path(name).read_text(encoding='ascii')
                last = max(parse_ranks(text).values())
                eot, vocab_size = (128001, 128256) if last == 127999 else (last + 1, last + 2)
                return cls({'name': os.path.basename(name), 'vocab_size': vocab_size, 'eot': eot,
                            'pattern': PATTERN, 'ranks': text})
        except OSError as error:
            fail(f'--tokenizer={name} cannot be read or downloaded ({error}); --tokenizer=bytes needs no file')
        except ValueError as error:
            fail(f'--tokenizer={name} is not a BPE rank file: {error}')
        near = difflib.get_close_matches(name, ['bytes', *known])
        fail(f'--tokenizer={name}: there is no such file and no such name in bytes, {", ".join(known)}'
             + (f'; did you mean {" or ".join(near)}?' if near else ''))

    def state(self):
        """A dict of str and int that holds all there is to it: for JSON files and checkpoints."""
        return dict(self._state)

    def encode(self, text):
        """str -> list of int, without end-of-text; text that spells a special token is encoded as plain text."""
        return self.encode_pieces(self.pieces(text.encode())).tolist()

    def decode(self, tokens):
        """Token ids -> bytes; end-of-text and unused ids stand for none."""
        return b''.join(self.table[token] for token in tokens)

    def token_bytes(self):
        """(vocab_size,) int32: how many bytes each token stands for, 0 for end-of-text and unused ids."""
        return np.array([len(token) for token in self.table], np.int32)

    def pieces(self, document):
        """Yield the pieces of a document (bytes) that are encoded one by one. BPE raises UnicodeDecodeError."""
        text, start = document.decode() if self.encoding else document, 0
        while start < len(text):
            match = SAFE_CUT.search(text, start + PIECE, start + 2 * PIECE) if self.encoding else None
            end = match.end() if match else start + 2 * PIECE
            yield text[start:end]
            start = end

    def encode_pieces(self, pieces):
        """Pieces, with None for an end-of-text -> (n,) uint32. Other threads run while tiktoken encodes."""
        tokens = [np.empty(0, np.uint32)]
        for piece in pieces:
            if piece is None:
                tokens.append(np.array([self.eot], np.uint32))
            elif self.encoding:
                tokens.append(self.encoding.encode_to_numpy(piece, disallowed_special=()))
            else:
                tokens.append(np.frombuffer(piece, np.uint8))
        return np.concatenate(tokens)


def parse_ranks(text):
    """{token: rank} of a file in tiktoken's format: lines of a token in base64 and its rank. Raises ValueError."""
    ranks, lines = {}, text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f'line {number} should be a token in base64, a space and a rank') from None
    if not all(bytes([i]) in ranks for i in range(256)):
        raise ValueError('a byte is missing among its tokens')
    if len(set(ranks.values())) != len(lines) or min(ranks.values()) < 0 or max(ranks.values()) >= 1 << 24:
        raise ValueError('tokens and ranks should be distinct, and ranks count up from 0')
    return ranks


# -----------------------------------------------------------------------------
# readers of a prepared data set

def read_file(dataset, name):
    try:
        return (DATA / dataset / name).read_bytes()
    except OSError as error:
        command = f'python prepare.py --dataset={dataset}' + ('' if dataset in NAMED else ' --input=...')
        fail(f'{DATA / dataset / name}: {error.strerror}; it is made by {command}')


def read_meta(dataset):
    """data/NAME/meta.json as a dict: tokenizer, vocab_size, {tokens, bytes, documents} of train and of val, ..."""
    return json.loads(read_file(dataset, 'meta.json'))


def read_tokenizer(dataset):
    """The Tokenizer that a data set is made with."""
    return Tokenizer(json.loads(read_file(dataset, 'tokenizer.json')))


def read_token_bytes(dataset):
    """(vocab_size,) int32: how many bytes each token of a data set stands for."""
    return np.load(io.BytesIO(read_file(dataset, 'token_bytes.npy')))


class Tokens:
    """The tokens of a split, 'train' or 'val': all its shards, in the order of their names, read where they lie."""

    def __init__(self, dataset, split):
        self.shards = [open_shard(path) for path in sorted((DATA / dataset).glob(f'{split}_*.bin'))]
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        if not self.shards:
            fail(f'{DATA / dataset} has no shards for {split}')

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """(length,) int64: the tokens from start on. Raises IndexError where there are not as many."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f'no window of {length} tokens at {start}: there are {len(self)}')
        parts = [np.empty(0, np.int64)]
        while length > 0:
            i = np.searchsorted(self.ends, start, side='right')
            part = self.shards[i][start - self.ends[i] + len(self.shards[i]):][:length]
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return np.concatenate(parts)


def open_shard(path):
    """The tokens of a shard, an array that stays on disk. Ends the program if it is not whole."""
    try:
        header, size = np.fromfile(path, '<i4', 256), os.path.getsize(path)
        dtype = SHARD_FORMATS.get(tuple(header[:2].tolist()))
        if len(header) < 256 or dtype is None:
            fail(f'{path} is not a token shard: it does not begin with the magic number and version of one')
        count = int(header[2])
        if size != HEADER_BYTES + count * np.dtype(dtype).itemsize:
            fail(f'{path} is damaged: it has {size:,} bytes, which is wrong for the {count:,} tokens of its header')
        return np.memmap(path, dtype, 'r', HEADER_BYTES, (count,)) if count else np.empty(0, dtype)
    except OSError as error:
        fail(f'{path}: {error.strerror}')


# -----------------------------------------------------------------------------
# from text to documents

def find_inputs(pattern):
    """[(name, path)], sorted, of a file, a glob or a folder; of '', Python's standard library without its tests."""
    if not pattern:
        folder = Path(sysconfig.get_path('stdlib'))
        paths = [path for path in folder.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(folder).parts)]
    elif os.path.isdir(pattern):
        paths = [path for path in Path(pattern).rglob('*') if path.name.lower().endswith(TEXT_KINDS)]
    else:
        paths = [Path(path) for path in ([pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True))]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        fail(f'--input={pattern}: no such file, nor a folder with {", ".join(TEXT_KINDS)} files')
    shared = os.path.commonpath([path.parent for path in paths])
    return sorted((Path(os.path.relpath(path, shared)).as_posix(), path) for path in paths)


def documents(path, field):
    """Yield (offset, bytes) of the documents of a file: the lines of .jsonl, or else the file; none that is empty."""
    kind = path.name.lower()
    try:
        with gzip.open(path) if kind.endswith('.gz') else open(path, 'rb') as file:
            if not kind.endswith(('.jsonl', '.jsonl.gz')):
                yield from parts(file)
                return
            for number, line in enumerate(file, 1):
                try:
                    text = json.loads(line.decode('utf-8-sig'))[field].encode() if line.strip() else b''
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                    fail(f'{path}, line {number}: not a JSON object with a text in {field!r}, which --field names '
                         f'({type(error).__name__}: {error})')
                yield from parts(io.BytesIO(text))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(f'{path} is damaged: {error}')


def parts(file):
    """Yield (offset, bytes): a file as it is or, if it is larger than DOCUMENT_BYTES, in several parts."""
    offset, data = 0, b''
    while data := data + file.read(DOCUMENT_BYTES + 1 - len(data)):
        end = cut(data, DOCUMENT_BYTES) if len(data) > DOCUMENT_BYTES else len(data)
        yield offset, data[:end]
        offset, data = offset + end, data[end:]


def cut(data, limit):
    """Where to cut data at or before limit: after a newline or, if none is near, between two UTF-8 characters."""
    end = data.rfind(b'\n', limit // 2, limit) + 1 or limit
    while end > max(0, limit - 3) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def read(inputs, field, title, total=None):
    """Yield (path, offset, bytes) of all documents, with a progress bar."""
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
# from documents to shards

class Writer:
    """Encodes the documents of a split in the threads of a pool, and writes the tokens, in order, to shards."""

    def __init__(self, folder, split, tokenizer, pool):
        self.prefix, self.tokenizer, self.pool = f'{folder}/{split}', tokenizer, pool
        self.format = (20240520, 1) if tokenizer.vocab_size <= 1 << 16 else (20240801, 7)
        self.tokens = self.bytes = self.documents = 0
        self.group, self.size = [], 0  # pieces of documents for the next task, None for an end-of-text; their length
        self.tasks = collections.deque()

    def add(self, document):
        self.bytes += len(document)
        self.documents += 1
        self.group.append(None)
        for piece in self.tokenizer.pieces(document):
            self.group.append(piece)
            self.size += len(piece)
            if self.size >= PIECE:
                self.submit(4 * os.cpu_count())

    def submit(self, most):
        """Make a task of the group, and write what the tasks have encoded until at most this many are left."""
        self.tasks.append(self.pool.submit(self.tokenizer.encode_pieces, self.group))
        self.group, self.size = [], 0
        while len(self.tasks) > most:
            self.write(self.tasks.popleft().result())

    def write(self, tokens):
        while len(tokens):
            shard, filled = divmod(self.tokens, SHARD_TOKENS)
            part, tokens = np.split(tokens, [SHARD_TOKENS - filled])
            with open(f'{self.prefix}_{shard:06d}.bin', 'ab' if filled else 'wb') as file:
                if not filled:
                    file.write(bytes(HEADER_BYTES))  # until its number of tokens is known
                file.write(part.astype(SHARD_FORMATS[self.format]).data)
            self.tokens += len(part)

    def finish(self):
        """Write all that is left, and the headers. Returns the counts for meta.json."""
        self.submit(0)
        for shard, start in enumerate(range(0, self.tokens, SHARD_TOKENS)):
            with open(f'{self.prefix}_{shard:06d}.bin', 'r+b') as file:
                file.write(np.array([*self.format, min(SHARD_TOKENS, self.tokens - start)], '<i4').data)
        return {'tokens': self.tokens, 'bytes': self.bytes, 'documents': self.documents}


def write_shards(folder, inputs, tokenizer, field, val_fraction, seed):
    """Tokenize the inputs, [(name, path)], into a new folder. Returns what meta.json says of that."""
    count = size = 0  # a first pass finds what is wrong and counts the documents, to draw among them
    for path, offset, document in read(inputs, field, 'checking'):
        count, size = count + 1, size + len(document)
        try:
            if tokenizer.encoding:
                document.decode()
        except UnicodeDecodeError as error:
            fail(f'{path}: byte {offset + error.start} is not UTF-8; --tokenizer=bytes takes any bytes')
    if size < 2:
        fail('the input has no text, or too little to split it')
    drawn = min(count - 1, max(1, round(count * val_fraction)))
    drawn = set(random.Random(seed).sample(range(count), drawn))
    digests = {name: sha256(path) for name, path in inputs}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        train, val = (Writer(folder, split, tokenizer, pool) for split in ('train', 'val'))
        for i, (_, _, document) in enumerate(read(inputs, field, 'tokenizing', size)):
            if count == 1:
                end = cut(document, len(document) * 9 // 10)
                train.add(document[:end])
                val.add(document[end:])
            else:
                (val if i in drawn else train).add(document)
        counts = {'train': train.finish(), 'val': val.finish()}
    if train.bytes + val.bytes != size:
        fail('the input has changed while it was read: try again')
    return {**counts, 'seed': seed, 'val_fraction': val_fraction, 'field': field, 'inputs': digests}


def describe(folder, tokenizer, meta):
    """Write the small files of a data set: meta.json, which makes it one, last."""
    lengths = io.BytesIO()
    np.save(lengths, tokenizer.token_bytes())
    meta = {'tokenizer': tokenizer.name, 'vocab_size': tokenizer.vocab_size, **meta}
    for name, data in {'tokenizer.json': json.dumps(tokenizer.state()).encode(), 'token_bytes.npy': lengths.getvalue(),
                       'meta.json': json.dumps(meta, indent=2).encode()}.items():
        part = folder / f'{name}.part'
        part.write_bytes(data)
        os.replace(part, folder / name)


# -----------------------------------------------------------------------------
# downloads

def download(url, path, check):
    """Download to path by way of path.part, and go on where an earlier try has ended.

    check: called with path.part when it is complete; ends the program if that is not what it should be.
    """
    part = Path(f'{path}.part')
    done = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={'Range': f'bytes={done}-'} if done else {})
        with urllib.request.urlopen(request, timeout=60) as response:
            resumed = response.headers.get('Content-Range', '').startswith(f'bytes {done}-')
            done = done if resumed else 0
            total = done + response.length if response.length else None
            with open(part, 'ab' if resumed else 'wb') as file, progress(path.name, total, done) as bar:
                while block := response.read(1 << 16):
                    bar.update(file.write(block))
            if response.length:
                raise ConnectionError(f'the connection ended {response.length:,} bytes too early')
    except (OSError, http.client.HTTPException, ValueError) as error:
        if getattr(error, 'code', None) == 416:  # no bytes beyond those of .part: so it is not a part of this file
            part.unlink()
            return download(url, path, check)
        fail(f'{url}: {error}' + ('; the same command will go on from there' if part.exists() else ''))
    try:
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

    name = re.split('[?#]', url)[0]
    path = folder / f'{hashlib.sha256(url.encode()).hexdigest()[:8]}_{name.split("/")[-1]}'
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        download(url, path, check)
    return [(name, path)]


def prepare_ready_made(dataset, folder, downloads, shards):
    """Download the val shard and the first train shards (0: all) of a ready-made set, except those that are here."""
    url, most = READY_MADE[dataset]
    if not 0 <= shards <= most:
        fail(f'--shards={shards}: {dataset} has {most} train shards')
    tokenizer = Tokenizer.load('gpt2')  # first, since this may be a download too
    downloads.mkdir(parents=True, exist_ok=True)
    paths = {path.name: path for path in folder.glob('*.bin')}
    for name in ['val_000000.bin', *(f'train_{i:06d}.bin' for i in range(1, (shards or most) + 1))]:
        if name not in paths:
            paths[name] = downloads / name
            if not paths[name].exists():
                download(url + name, paths[name], check=open_shard)
    meta = {split: count_tokens([path for name, path in paths.items() if name.startswith(split)], tokenizer)
            for split in ('train', 'val')}
    meta['inputs'] = {name: sha256(path) for name, path in sorted(paths.items())}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        os.replace(path, folder / name)
    describe(folder, tokenizer, meta)


def count_tokens(paths, tokenizer):
    """The counts for meta.json of shards made elsewhere, all of whose tokens should be in the vocabulary."""
    lengths = tokenizer.token_bytes()
    tokens = size = count = 0
    for path in paths:
        shard = open_shard(path)
        for start in range(0, len(shard), 1 << 24):
            part = shard[start:start + (1 << 24)]
            if part.max() >= tokenizer.vocab_size:
                fail(f'{path}: its token {part.max()} is not in the vocabulary of {tokenizer.name}')
            tokens += len(part)
            size += int(lengths[part].sum(dtype=np.int64))
            count += int((part == tokenizer.eot).sum())
    return {'tokens': tokens, 'bytes': size, 'documents': count}


# -----------------------------------------------------------------------------

def remove_left_overs(dataset):
    """Remove the temporary folders of runs that were killed, and not of those that are at work."""
    for path in DATA.glob(f'{glob.escape(dataset)}.tmp*'):
        try:
            if os.name == 'posix':
                os.kill(int(path.suffix[4:]), 0)  # 0: no signal, only an error if there is no such process
                continue
        except (ValueError, OSError):
            pass
        shutil.rmtree(path, ignore_errors=True)


def prepare(dataset, input='', tokenizer='', field='text', val_fraction=0.01, seed=1337, shards=0):
    """Prepare data/NAME, as the command does, whose settings are explained below. Ends the program if it cannot."""
    folder, building, downloads = (DATA / (dataset + end) for end in ('', f'.tmp{os.getpid()}', '.download'))
    if not re.fullmatch(r'[^./\\][^/\\]*', dataset) or '.tmp' in dataset or '.download' in dataset:
        fail(f'--dataset={dataset} should be a name for a folder in {DATA}, without .tmp and .download')
    if not input and dataset not in NAMED:
        near = difflib.get_close_matches(dataset, NAMED, n=1)
        fail(f'--dataset={dataset}: what is its --input? The data sets that need none are {", ".join(NAMED)}'
             + (f'; did you mean {near[0]}?' if near else ''))
    if input and dataset in ('stdlib', *READY_MADE):
        fail(f'--input: {dataset} has its own; give this another name with --dataset=NAME')
    if shards and dataset not in READY_MADE or dataset in READY_MADE and tokenizer not in ('', 'gpt2'):
        fail(f'--shards is for {", ".join(READY_MADE)}, which are gpt2 tokens, and --tokenizer for all others')
    if not 0 < val_fraction < 1:
        fail(f'--val_fraction={val_fraction} should be between 0 and 1')
    if folder.exists() and dataset not in READY_MADE:
        fail(f'{folder} is there already: remove it, or choose another --dataset')
    try:
        if dataset in READY_MADE:
            prepare_ready_made(dataset, folder, downloads, shards)
        else:
            tokenizer = Tokenizer.load(tokenizer or ('bytes' if dataset == 'stdlib' else 'gpt2'))
            if dataset in TEXTS and not input:
                inputs = download_text(TEXTS[dataset][0], downloads, digest=TEXTS[dataset][1])
            elif input.startswith(('http://', 'https://')):
                inputs = download_text(input, downloads)
            else:
                inputs = find_inputs(os.path.expanduser(input))
            remove_left_overs(dataset)
            building.mkdir(parents=True)
            describe(building, tokenizer, write_shards(building, inputs, tokenizer, field, val_fraction, seed))
            try:
                os.rename(building, folder)
            except OSError:  # another run may have made it meanwhile: then it should be the same
                if not folder.exists() or read_file(folder.name, 'meta.json') != read_file(building.name, 'meta.json'):
                    raise
            shutil.rmtree(downloads, ignore_errors=True)
    except OSError as error:
        fail(f'{error.filename or folder}: {error.strerror or error}')
    finally:
        shutil.rmtree(building, ignore_errors=True)
        for path in (downloads, DATA):
            with contextlib.suppress(OSError):
                path.rmdir()  # if it is empty
    for split in ('train', 'val'):
        print(f'{folder} {split}:', ', '.join(f'{n:,} {what}' for what, n in read_meta(dataset)[split].items()))


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
        print('interrupted: nothing has changed, and a download will go on from where it is', file=sys.stderr)
        sys.exit(130)
