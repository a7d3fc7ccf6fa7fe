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
import codecs
import glob
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import configure, fail

DATA = Path('data')
DOCUMENT_BYTES = 64_000_000  # a longer document is cut into several, so that memory does not grow with it
PIECE = 1 << 16  # characters that a thread encodes at a time; of a million spaces at once tiktoken would crash
SHARD_TOKENS = 100_000_000
SHARD_FORMATS = {(20240520, 1): '<u2', (20240801, 7): '<u4'}  # type of the tokens by magic and version, its first ints
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
BAR = {'unit': 'B', 'unit_scale': True, 'disable': None}  # of progress; None: except on a terminal

# cl100k's pattern, which is Llama 3's too, in the faster form that tiktoken has for it
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
           r'|\s++$|\s*[\r\n]|\s+(?!\S)|\s')
# Between two words and after a lone newline this pattern and GPT-2's end a match: cut there, text has the same tokens.
SAFE_CUT = re.compile(r'\w(?= \w)|\S\n(?=\w)')


class Tokenizer:
    """Bytes or BPE; has name, vocab_size, eot (the end-of-text). Raises ValueError if state makes no BPE over bytes."""

    def __init__(self, state):
        self._state = state
        self.name, self.vocab_size, self.eot = state['name'], state['vocab_size'], state['eot']
        self.encoding, tokens = None, {i: bytes([i]) for i in range(256)}
        self.codec = 'utf-8' if 'ranks' in state else 'latin-1'  # of the text; in latin-1 any byte is a character
        if 'ranks' in state:  # the lines of a file in tiktoken's format: a token in base64, a space and its rank
            import tiktoken
            lines = [line.split() for line in state['ranks'].splitlines()]
            tokens = {int(rank): base64.b64decode(token) for token, rank in lines}
            ranks = {token: rank for rank, token in tokens.items()}
            if len(ranks) < len(lines) or any(bytes([i]) not in ranks for i in range(256)):
                raise ValueError('tokens and ranks should be distinct, and every byte be a token')
            self.encoding = tiktoken.Encoding(self.name, pat_str=state['pattern'], mergeable_ranks=ranks,
                                              special_tokens={'<|endoftext|>': self.eot})
        self.table = [tokens.get(i, b'') for i in range(self.vocab_size)]  # end-of-text and unused ids: no bytes

    @classmethod
    def load(cls, name):
        """name: 'bytes', a name that tiktoken knows, or the path of a BPE rank file; else ends the program."""
        if name == 'bytes':
            return cls({'name': 'bytes', 'vocab_size': 257, 'eot': 256})
        import tiktoken
        try:
            if name in tiktoken.list_encoding_names():
                encoding = tiktoken.get_encoding(name)
                eot, vocab_size, pattern = encoding.eot_token, encoding.n_vocab, encoding._pat_str
                ranks = ''.join(f'{base64.b64encode(token).decode()} {rank}\n'
                                for token, rank in encoding._mergeable_ranks.items())
            else:
                ranks, pattern = Path(name).read_text(encoding='ascii'), PATTERN
                last = max(map(int, ranks.split()[1::2]))
                eot, vocab_size = (128001, 128256) if last == 127999 else (last + 1, last + 2)
            return cls(dict(name=Path(name).name, vocab_size=vocab_size, eot=eot, pattern=pattern, ranks=ranks))
        except (OSError, ValueError, OverflowError) as error:
            fail(f'--tokenizer={name} is not bytes, nor a name that tiktoken knows, nor a BPE rank file: {error}')

    def state(self):
        """A dict of str and int, for JSON files and checkpoints, from which Tokenizer(state) makes it again."""
        return dict(self._state)

    def encode(self, text):
        """str -> list of int, without end-of-text; text that spells a special token is encoded as plain text."""
        return [token for piece in self.pieces(text.encode()) for token in self.encode_piece(piece).tolist()]

    def decode(self, tokens):
        """Token ids -> bytes; end-of-text and unused ids stand for none."""
        return b''.join(self.table[token] for token in tokens if token < self.vocab_size)

    def token_bytes(self):
        """(vocab_size,) int32: how many bytes each token stands for, 0 for end-of-text and unused ids."""
        return np.array([len(token) for token in self.table], np.int32)

    def pieces(self, document):
        """Yield the pieces of a document (bytes) that are encoded one by one. BPE raises UnicodeDecodeError."""
        text, start = document.decode(self.codec), 0
        while start < len(text):
            match = SAFE_CUT.search(text, start + PIECE, start + 2 * PIECE)
            end = match.end() if match else start + 2 * PIECE
            yield text[start:end]
            start = end

    def encode_piece(self, piece, first=False):
        """A piece -> (n,) ints; end-of-text stands before the first of a document. Threads do this side by side."""
        if self.encoding:
            tokens = self.encoding.encode_to_numpy(piece, disallowed_special=())
        else:
            tokens = np.frombuffer(piece.encode(self.codec), np.uint8)
        return np.append(np.uint32(self.eot), tokens) if first else tokens


# ----------------------------------------------------------------------------------------------------------------------
# Readers of a prepared data set

def read_file(dataset, name, parse):
    path = DATA / dataset / name
    try:
        return parse(path.read_bytes())
    except OSError as error:
        how = '--shards=N, of 100M tokens each' if dataset in READY_MADE else '' if dataset in NAMED else '--input=PATH'
        fail(f'{path}: {error.strerror}; it is made by python prepare.py --dataset={dataset} {how}')
    except Exception as error:  # whatever is wrong with it
        fail(f'{path} is damaged ({type(error).__name__}: {error}): remove data/{dataset} and prepare it again')


def read_meta(dataset):
    """data/NAME/meta.json as a dict: tokenizer, vocab_size, {tokens, bytes, documents} of train and of val, ..."""
    def parse(data):
        meta = json.loads(data)
        return {**meta, 'vocab_size': int(meta['vocab_size'])}
    return read_file(dataset, 'meta.json', parse)


def read_tokenizer(dataset):
    """The Tokenizer that a data set is made with."""
    return read_file(dataset, 'tokenizer.json', lambda data: Tokenizer(json.loads(data)))


def read_token_bytes(dataset):
    """(vocab_size,) int32: how many bytes each token of a data set stands for."""
    return read_file(dataset, 'token_bytes.npy', lambda data: np.load(io.BytesIO(data)))


class Tokens:
    """The tokens of a split, 'train' or 'val': all its shards, in the order of their names, read where they lie."""

    def __init__(self, dataset, split):
        self.name = f'data/{dataset} {split}'
        self.shards = [open_shard(path) for path in sorted((DATA / dataset).glob(f'{split}_*.bin'))]
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        if not self.shards:
            fail(f'{DATA / dataset} has no shards for {split}: they are made by python prepare.py --dataset={dataset}, '
                 'with a --val_fraction that leaves some')

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """(length,) int64: the tokens from start on. Raises IndexError where there are not as many."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f'no window of {length} tokens at {start}: there are {len(self)}')
        parts = [np.empty(0, np.int64)]
        while length > 0:
            i = np.searchsorted(self.ends, start, side='right')
            part = self.shards[i][start - self.ends[i]:][:length]  # counted from the end of the shard
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return np.concatenate(parts)


def open_shard(path):
    """The tokens of a shard, an array that stays on disk. Ends the program if it is not whole."""
    header = np.fromfile(path, '<i4', 256).tolist()
    dtype = SHARD_FORMATS.get(tuple(header[:2]))
    if not dtype or len(header) < 256 or path.stat().st_size != 1024 + header[2] * np.dtype(dtype).itemsize:
        fail(f'{path} is damaged, or no token shard: remove it')
    return np.memmap(path, dtype, 'r', 1024)


# ----------------------------------------------------------------------------------------------------------------------
# What prepares one

def find_inputs(pattern):
    """[(name, path)], sorted, of a file, a glob or a folder; of '', Python's standard library without its tests."""
    if not pattern:
        folder = Path(os.__file__).parent
        paths = [path for path in folder.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(folder).parts)]
    elif os.path.isdir(pattern):
        paths = [path for path in Path(pattern).rglob('*') if path.name.lower().endswith(TEXT_KINDS)]
    else:
        paths = [Path(path) for path in glob.glob(pattern, recursive=True) or [pattern]]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        fail(f'--input={pattern}: no such file, nor a folder with {", ".join(TEXT_KINDS)} files')
    shared = os.path.commonpath([path.parent for path in paths])
    return sorted((path.relative_to(shared).as_posix(), path) for path in paths)


def read(inputs, field, codec):
    """Yield the documents of files, each line of .jsonl or else each file, as bytes that the codec can decode.

    They come as (place, offset, document): where a document of over DOCUMENT_BYTES goes on, its offset is not 0.
    """
    for name, path in inputs:
        line, offset, jsonl = 0, 0, path.name.lower().endswith(('.jsonl', '.jsonl.gz'))
        try:
            with gzip.open(path) if path.suffix.lower() == '.gz' else open(path, 'rb') as file:
                for stream in file if jsonl else [file]:
                    line, offset, place = line + 1, 0, name
                    if jsonl:
                        text = json.loads(stream.decode('utf-8-sig'))[field] if stream.strip() else ''
                        stream, place = io.BytesIO(text.encode()), f'{name}, line {line}'
                    for document in cut(stream):
                        document.decode(codec)
                        yield place, offset, document
                        offset += len(document)
        except Exception as error:  # whatever it is, say where
            if isinstance(error, UnicodeDecodeError) and not jsonl:
                offset += error.start
            where = f'line {line}, field {field!r}' if jsonl else f'byte {offset}'
            fail(f'{path}, {where}: {type(error).__name__}: {error}')


def cut(stream):
    """Yield a stream in parts of at most DOCUMENT_BYTES."""
    data = b''
    while data := data + stream.read(DOCUMENT_BYTES + 1 - len(data)):
        end = find_cut(data, DOCUMENT_BYTES, DOCUMENT_BYTES // 2) if len(data) > DOCUMENT_BYTES else len(data)
        yield data[:end]
        data = data[end:]


def find_cut(data, end, slack):
    """Where to cut at most end bytes off: after a newline, of which slack bytes are searched, or after a character."""
    start = max(0, end - 4)  # no character has more bytes
    return data.rfind(b'\n', max(0, end - slack), end) + 1 or start + codecs.utf_8_decode(data[start:end], 'replace')[1]


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class Writer:
    """Encodes the documents of a split in the threads of a pool, and writes the tokens, in order, to shards."""

    def __init__(self, folder, split, tokenizer, pool):
        self.prefix, self.tokenizer, self.pool = f'{folder}/{split}', tokenizer, pool
        self.format = (20240520, 1) if tokenizer.vocab_size <= 1 << 16 else (20240801, 7)
        self.counts = {'tokens': 0, 'bytes': 0, 'documents': 0}
        self.tasks = []  # of the pool; each returns the tokens of a piece

    def add(self, document):
        self.counts['bytes'] += len(document)
        self.counts['documents'] += 1
        for i, piece in enumerate(self.tokenizer.pieces(document)):
            self.tasks.append(self.pool.submit(self.tokenizer.encode_piece, piece, first=i == 0))
            if len(self.tasks) == 512:  # half of them keep all cores busy while the others are written
                self.write(256)

    def write(self, n=None):
        """Write the tokens of the first n tasks, or of all that has been added."""
        tokens = np.concatenate([np.empty(0, np.uint32), *(task.result() for task in self.tasks[:n])])
        del self.tasks[:n]
        while len(tokens):
            shard, filled = divmod(self.counts['tokens'], SHARD_TOKENS)
            part, tokens = np.split(tokens, [SHARD_TOKENS - filled])
            with open(f'{self.prefix}_{shard:06d}.bin', 'r+b' if filled else 'wb') as file:
                file.write(np.array([*self.format, filled + len(part), *[0] * 253], '<i4').data)
                file.seek(0, os.SEEK_END)
                file.write(part.astype(SHARD_FORMATS[self.format]).data)
            self.counts['tokens'] += len(part)


def draw(document, seed):
    """An int from 0 to 65535, drawn for a document by what it holds: equal documents come into the same split."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=2, key=str(seed).encode()[:64]).digest(), 'big')


def write_shards(folder, inputs, tokenizer, field, val_fraction, seed):
    """Tokenize the inputs, [(name, path)], into a new folder. Returns what meta.json says of that."""
    sizes = np.zeros(1 << 16, np.int64)  # the bytes by draw: a first pass counts them, and finds what is wrong
    for _, _, document in tqdm(read(inputs, field, tokenizer.codec), 'checking', unit='', disable=None):
        sizes[draw(document, seed)] += len(document)
    size = int(sizes.sum())
    if size == 0:
        fail('the input has no text')
    n_val = size if val_fraction == 1 else min(size - 1, max(1, round(size * val_fraction)))
    n_train = size - n_val
    # Low draws are for training, high ones for validation. Those at the edge go where they are nearer, if this is near
    # enough, or else training gets what it needs of them and a document is cut.
    slack = min(n_train // 5, n_val // 5, size // 100)
    edge = int(np.searchsorted(sizes.cumsum(), n_train))
    needed = n_train - int(sizes[:edge].sum())
    if sizes[edge] <= slack:
        needed = int(sizes[edge]) * (2 * needed > sizes[edge])
    cuts = []
    with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(desc='tokenizing', total=size, **BAR) as bar:
        train, val = (Writer(folder, split, tokenizer, pool) for split in ('train', 'val'))
        for place, offset, document in read(inputs, field, tokenizer.codec):
            drawn = draw(document, seed)
            end = len(document) if drawn < edge else 0  # what is before it is for training
            if drawn == edge:
                end = min(needed, len(document))
                needed -= end
                if 0 < end < len(document):
                    end = find_cut(document, end, slack)
            cuts += [f'{place}, byte {at}' for at in sorted({offset, offset + end}) if 0 < at < offset + len(document)]
            for writer, part in ((train, document[:end]), (val, document[end:])):
                if part:
                    writer.add(part)
            bar.update(len(document))
        train.write()
        val.write()
    if not val.counts['bytes'] or not train.counts['bytes'] and val_fraction < 1:
        fail('the input has too little text to split it')
    return {'train': train.counts, 'val': val.counts, 'seed': seed, 'val_fraction': val_fraction, 'cut': cuts,
            'field': field, 'inputs': {name: sha256(path) for name, path in inputs}}


def describe(folder, tokenizer, meta):
    """Write the small files of a data set: meta.json, which makes it one, last."""
    meta = {'tokenizer': tokenizer.name, 'vocab_size': tokenizer.vocab_size, **meta}
    np.save(folder / 'token_bytes.npy', tokenizer.token_bytes())
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer.state()))
    (folder / 'meta.json.part').write_text(json.dumps(meta, indent=2))
    os.replace(folder / 'meta.json.part', folder / 'meta.json')


def download(url, path, digest=''):
    """Download to path, unless it is there, by way of path.part, and go on where an earlier try has ended."""
    if path.exists():
        return
    part = Path(f'{path}.part')
    done = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={'Range': f'bytes={done}-'})
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.status != 206:  # the server cannot go on, but sends all
                done = 0
            path.parent.mkdir(parents=True, exist_ok=True)
            bar = tqdm(desc=path.name, total=done + (response.length or 0), initial=done, **BAR)
            with open(part, 'ab' if done else 'wb') as file, bar:
                while block := response.read(1 << 16):
                    bar.update(file.write(block))
            if response.length:
                raise ConnectionError(f'the connection ended {response.length:,} bytes too early')
    except (OSError, http.client.HTTPException, ValueError) as error:
        fail(f'{url}: {error}' + (f'; the next try goes on from {part}' if part.exists() else ''))
    if digest and sha256(part) != digest:
        part.unlink()
        fail(f'{url} has changed: its SHA-256 should be {digest}')
    os.replace(part, path)


def prepare_ready_made(dataset, folder, downloads, shards):
    """Download the val shard and the first train shards (0: all) of a ready-made set, except those that are here."""
    url, most = READY_MADE[dataset]
    tokenizer = Tokenizer.load('gpt2')  # first, since this may be a download too
    paths = {path.name: path for path in folder.glob('*.bin')}
    for name in ['val_000000.bin', *(f'train_{i:06d}.bin' for i in range(1, min(shards or most, most) + 1))]:
        if name not in paths:
            paths[name] = downloads / name
            download(url + name, paths[name])
            open_shard(paths[name])  # ends the program if it is damaged
    inputs = {name: sha256(path) for name, path in sorted(paths.items())}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        os.replace(path, folder / name)
    counts = {split: {'tokens': len(Tokens(dataset, split))} for split in ('train', 'val')}
    describe(folder, tokenizer, {**counts, 'inputs': inputs})


def prepare(dataset, input='', tokenizer='', field='text', val_fraction=0.05, seed=1337, shards=0):
    """Prepare data/NAME, as the command does, whose settings are explained below. Ends the program if it cannot."""
    folder, downloads = DATA / dataset, DATA / f'{dataset}.download'
    if not re.fullmatch(r'[\w-]+', dataset) or (not input and dataset not in NAMED):
        fail(f'--dataset={dataset}: should be {", ".join(NAMED)}, or another word and come with an --input')
    if input and dataset in NAMED:
        fail(f'--dataset={dataset}: is the name of other text than --input; take another')
    if shards and dataset not in READY_MADE or dataset in READY_MADE and tokenizer not in ('', 'gpt2'):
        fail(f'--shards is for {", ".join(READY_MADE)}, which are gpt2 tokens, and --tokenizer for all others')
    if not 0 < val_fraction <= 1:
        fail(f'--val_fraction={val_fraction} should be above 0 and at most 1')
    if folder.exists() and dataset not in READY_MADE:
        fail(f'{folder} is there already: remove it, or choose another --dataset')
    try:
        if dataset in READY_MADE:
            prepare_ready_made(dataset, folder, downloads, shards)
        else:
            tokenizer = Tokenizer.load(tokenizer or ('bytes' if dataset == 'stdlib' else 'gpt2'))
            url, digest = TEXTS.get(dataset, (input, ''))
            if url.startswith(('http://', 'https://')):
                path = downloads / re.sub(r'[^\w.]+', '_', url.split('?')[0])
                download(url, path, digest)
                inputs = [(url.split('?')[0], path)]
            else:
                inputs = find_inputs(os.path.expanduser(input))
            DATA.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f'{dataset}.tmp', dir=DATA) as temporary:
                building = Path(temporary, dataset)
                building.mkdir()
                describe(building, tokenizer, write_shards(building, inputs, tokenizer, field, val_fraction, seed))
                os.rename(building, folder)
        shutil.rmtree(downloads, ignore_errors=True)
    except OSError as error:
        fail(f'{error.filename or folder}: {error.strerror or error}')
    meta = read_meta(dataset)
    for split in ('train', 'val'):
        print(f'{folder} {split}:', ', '.join(f'{n:,} {what}' for what, n in meta[split].items()))
    if cuts := meta.get('cut'):
        print(f'{folder}: cut in two at {"; ".join(cuts[:3])}' + f'; and {len(cuts) - 3} more' * (len(cuts) > 3))


if __name__ == '__main__':
    dataset = 'stdlib'  # data/NAME: stdlib, shakespeare, fineweb10B, finewebedu10B, fineweb100B, or any with an input
    input = ''  # a file, a glob, a folder or a URL of .txt (a file is a document) or .jsonl (a line is), also as .gz
    tokenizer = ''  # bytes, gpt2, another name tiktoken knows, or a BPE rank file; '': bytes for stdlib, or else gpt2
    field = 'text'  # of a line of .jsonl
    val_fraction = 0.05  # of the bytes: documents drawn for validation; one that is too long for that is cut; 1.0: all
    seed = 1337  # of this draw
    shards = 0  # train shards to download of a ready-made data set; 0: all
    try:
        prepare(**configure(globals()))
    except KeyboardInterrupt:
        fail('interrupted: nothing was changed, and a download goes on from where it is')
