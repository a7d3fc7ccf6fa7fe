"""
Text in, token shards out, and the readers of both.

    python prepare.py                                     # data/stdlib: Python's own standard library, offline
    python prepare.py --dataset=shakespeare               # a small download
    python prepare.py --dataset=fineweb10B --shards=8     # GPT-2 tokens, ready made, in shards of 100M
    python prepare.py --dataset=mine --input='texts/*.jsonl.gz' --tokenizer=bpe:8192
    python prepare.py --dataset=mine --input=FOLDER_OF_SHARDS --tokenizer=gpt2

A data set is a folder data/NAME: {train,val}_000000.bin ... in the format of llm.c and modded-nanogpt, meta.json, and
tokenizer.json, which has all that encoding and decoding need. The file goes from tokenizers and the readers of a data
set to how one is made: documents and their split, a BPE trained on them, shards, the command.
"""

import signal

if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the script without a traceback

import base64
import glob
import gzip
import hashlib
import heapq
import json
import os
import random
import re
import shutil
import tempfile
import urllib.request
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from configurator import configure, fail, show

DATA = Path('data')  # in the working directory
SHARD_TOKENS = 100_000_000
SHARD_FORMATS = {(20240520, 1): '<u2', (20240801, 7): '<u4'}  # dtype of the tokens by magic and version
DOCUMENT_SIZE = 8_000_000  # characters; a longer document is cut, so that memory does not grow with it
SHORT_SIZE = 8192  # characters; no shorter document is cut to fill a split
BATCH_BYTES = 4_000_000  # text that is encoded at once, on all cores
SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
READY_MADE = {  # GPT-2 tokens on the Hugging Face hub: the repository, the prefix of its shards, how many for training
    'fineweb10B': ('kjj0/fineweb10B-gpt2', 'fineweb', 103),
    'finewebedu10B': ('kjj0/finewebedu10B-gpt2', 'finewebedu', 99),
    'fineweb100B': ('kjj0/fineweb100B-gpt2', 'fineweb', 1030)}
NAMED = ('stdlib', 'shakespeare', *READY_MADE)

# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

# The pattern of cl100k and of Llama 3, in the faster form that tiktoken has for it.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
           r'|\s++$|\s*[\r\n]|\s+(?!\S)|\s')
IN_UTF8 = {bytes([i]) for i in range(0xF5) if i not in (0xC0, 0xC1)}  # the bytes that occur in text


class Tokenizer:
    """Text to token ids and back, through tiktoken or, for a tokenizer of Hugging Face, through tokenizers.

    Has name; vocab_size; eot, the end-of-text; and bos, the token before every document: the begin-of-text of a
    tokenizer that has one, else eot. state is a dict of str and int, kept in data/NAME/tokenizer.json and in
    checkpoints. Raises ValueError if it makes no byte-level BPE.
    """

    def __init__(self, state):
        self._state = state
        self.name, self.vocab_size, self.eot = state['name'], state['vocab_size'], state['eot']
        self.bos = state.get('bos', self.eot)
        ids, self.encode_batch = open_hf(state) if 'hf' in state else open_bpe(state)
        if not IN_UTF8 <= ids.keys():
            raise ValueError('it has no token for some bytes')
        self.table = [b''] * self.vocab_size  # bytes by id: none for special tokens and unused ids
        for token, i in ids.items():
            self.table[i] = token

    @classmethod
    def load(cls, name):
        """name: bytes, hf:FOLDER_OR_NAME, one that tiktoken knows, or a file: BPE ranks, or tokenizer.json of a data
        set. Ends the program with one line if there is none."""
        try:
            if name == 'bytes':  # a BPE without merges
                return cls(bpe_state(name, PATTERN, {bytes([i]): i for i in range(256)}, eot=256, vocab_size=257))
            if name.startswith('hf:'):
                return cls(read_hf(name[3:]))
            if name.endswith('tokenizer.json'):
                return cls(json.loads(Path(name).read_text(encoding='utf-8')))
            if name in tiktoken.list_encoding_names():
                bpe = tiktoken.get_encoding(name)
                return cls(bpe_state(name, bpe._pat_str, bpe._mergeable_ranks, bpe.eot_token, bpe.n_vocab))
            ranks = Path(name).read_text(encoding='ascii')
            last = max(map(int, ranks.split()[1::2]))
            state = {'name': Path(name).name, 'pattern': PATTERN, 'ranks': ranks}
            if last == 127999:  # Llama 3's
                return cls({**state, 'bos': 128000, 'eot': 128001, 'vocab_size': 128256})
            return cls({**state, 'eot': last + 1, 'vocab_size': last + 2})
        except Exception as error:  # whatever the packages raise
            fail(f'--tokenizer={name} cannot be used: {error} (it may be bytes or bpe:N, which need no network; '
                 'gpt2, for which TIKTOKEN_CACHE_DIR may name a folder; hf:FOLDER_OR_NAME; or a file of BPE ranks)')

    def state(self):
        """The dict from which Tokenizer(state) makes this one again."""
        return dict(self._state)

    def same_tokens(self, other):
        """Whether every id stands for the same in both."""
        return (self.eot, self.bos, self.table) == (other.eot, other.bos, other.table)

    def encode(self, text, bos=False):
        """str -> list of int, after bos if asked for. A text that spells a special token is plain text."""
        tokens = self.encode_batch([text])[0]
        return [self.bos, *tokens] if bos else tokens

    def decode(self, tokens):
        """Token ids -> bytes."""
        return b''.join(self.table[token] for token in tokens if token < self.vocab_size)

    def token_bytes(self):
        """(vocab_size,) int32: the number of bytes that each token stands for."""
        return np.array([len(token) for token in self.table], np.int32)


def bpe_state(name, pattern, ids, eot, vocab_size):
    """The state of a BPE with these ids by token: it merges the pair whose token has the lowest id first."""
    lines = [f'{base64.b64encode(token).decode()} {i}\n' for token, i in ids.items()]
    return {'name': name, 'vocab_size': vocab_size, 'eot': eot, 'pattern': pattern, 'ranks': ''.join(lines)}


def open_bpe(state):
    """(ids by token, encode_batch: list of str -> list of lists of int) of a BPE, by tiktoken."""
    lines = [line.split() for line in state['ranks'].splitlines()]  # a token in base64, a space and its id
    ids = {base64.b64decode(token): int(i) for token, i in lines}
    if len(set(ids.values())) < len(lines):
        raise ValueError('its tokens and their ranks are not distinct')
    bpe = tiktoken.Encoding(state['name'], pat_str=state['pattern'], mergeable_ranks=ids,
                            special_tokens={'<|endoftext|>': state['eot']})

    def encode_batch(texts):
        cut = [list(pieces(text)) for text in texts]
        tokens = iter(bpe.encode_ordinary_batch([piece for text in cut for piece in text], num_threads=os.cpu_count()))
        return [[token for piece in islice(tokens, len(text)) for token in piece] for text in cut]
    return ids, encode_batch


def pieces(text, size=1 << 16):
    """Yield a text in pieces of about size characters: tiktoken encodes them side by side, and of a million spaces at
    once it would crash. A cut between two words or after a lone newline leaves the tokens as they are."""
    start = 0
    while start < len(text):
        match = re.compile(r'\w(?= \w)|\S\n(?=\w)').search(text, start + size, start + 2 * size)
        end = match.end() if match else start + 2 * size
        yield text[start:end]
        start = end


def read_hf(name):
    """The state of a Tokenizer for a tokenizer.json, in a folder or on the Hugging Face hub."""
    from tokenizers import Tokenizer as HFTokenizer
    folder = name
    if not os.path.isdir(name):
        from huggingface_hub import snapshot_download
        folder = snapshot_download(name, allow_patterns='tokenizer*.json')
    spec = Path(folder, 'tokenizer.json').read_text(encoding='utf-8')
    theirs = HFTokenizer.from_str(spec)
    config = Path(folder, 'tokenizer_config.json')
    eos = json.loads(config.read_text(encoding='utf-8')).get('eos_token') if config.exists() else None
    if isinstance(eos, dict):
        eos = eos['content']
    ends = [theirs.token_to_id(name) for name in (eos, '<|endoftext|>', '<|end_of_text|>', '</s>')
            if name in theirs.get_vocab()]
    if not ends:
        raise ValueError('it has no end-of-text')
    before = theirs.encode('').ids[:1]  # the begin-of-text that its model was trained with, if any
    return {'name': Path(name).resolve().name, 'hf': spec, 'eot': ends[0], 'bos': (before or ends)[0],
            'vocab_size': 1 + max(theirs.get_vocab().values())}


def open_hf(state):
    """As open_bpe, by the package tokenizers. Special tokens stand for no bytes."""
    from tokenizers import Tokenizer as HFTokenizer
    theirs, spec = HFTokenizer.from_str(state['hf']), json.loads(state['hf'])
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True  # as plain text
    # Byte-level tokens are spelled in printable characters: a byte as itself if it is one, else as one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}
    added = {token['content']: token['special'] for token in spec['added_tokens']}
    ids = {bytes(map(spelled.get, token)): i for token, i in theirs.get_vocab().items()
           if token not in added and spelled.keys() >= set(token)}
    if spec['model']['type'] != 'BPE' or len(ids) + len(added) < theirs.get_vocab_size():
        raise ValueError(f'it is {spec["model"]["type"]} over characters, and not a byte-level BPE')
    ids.update((token.encode(), theirs.token_to_id(token)) for token, special in added.items() if not special)
    return ids, lambda texts: [text.ids for text in theirs.encode_batch(texts, add_special_tokens=False)]


# ----------------------------------------------------------------------------------------------------------------------
# Readers of a data set

def read_json(dataset, name, parse):
    path = DATA / dataset / name
    try:
        return parse(json.loads(path.read_text(encoding='utf-8')))
    except OSError as error:
        fail(f'{path}: {error.strerror}; make it by python prepare.py --dataset={dataset}')
    except ImportError as error:
        fail(f'{path}: {error}: pip install it')
    except Exception as error:  # whatever is wrong with it
        fail(f'{path} is damaged ({type(error).__name__}: {error}): remove {DATA / dataset} and prepare it again')


def read_meta(dataset):
    """meta.json as a dict: tokenizer, vocab_size, {tokens, bytes, documents} of train and of val, inputs, ..."""
    return read_json(dataset, 'meta.json', lambda meta: {**meta, 'vocab_size': int(meta['vocab_size'])})


def read_tokenizer(dataset):
    """The Tokenizer that a data set was made with."""
    return read_json(dataset, 'tokenizer.json', Tokenizer)


class Tokens:
    """The tokens of a split, 'train' or 'val': memory-maps all its shards, sorted by name."""

    def __init__(self, dataset, split):
        self.name = f'data/{dataset} {split}'
        self.shards = [open_shard(path) for path in sorted((DATA / dataset).glob('*.bin')) if split_of(path) == split]
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # of each shard, in tokens from the first
        if not self.shards:
            fail(f'data/{dataset} has no shards for {split}: prepare it anew, with a --val_fraction that leaves some')

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """(length,) int64: the tokens from start on. Raises IndexError if the split ends before."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f'no window of {length} tokens at {start}: there are {len(self)}')
        parts = [np.empty(0, np.int64)]
        while length > 0:
            i = np.searchsorted(self.ends, start, side='right')
            part = self.shards[i][start - self.ends[i]:][:length]  # a negative index, from the end of the shard
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return np.concatenate(parts)


def split_of(path):
    """The split that a shard is for, by its name."""
    return 'val' if 'val' in path.name.lower() else 'train'


def open_shard(path):
    """The tokens of a shard, memory-mapped. Ends the program if the shard is not whole."""
    header = np.fromfile(path, '<i4', 256).tolist()
    dtype = SHARD_FORMATS.get(tuple(header[:2]))
    if not dtype or len(header) < 256 or path.stat().st_size != 1024 + header[2] * np.dtype(dtype).itemsize:
        fail(f'{path} is not a whole token shard: its header or its length is wrong')
    return np.memmap(path, dtype, 'r', 1024)


# ----------------------------------------------------------------------------------------------------------------------
# Documents and their split

KINDS = '.txt', '.txt.gz', '.jsonl', '.jsonl.gz', '.parquet'  # what is read of a folder


def find_inputs(pattern):
    """{name: path}, sorted, of a file, a glob or a folder; of '', Python's standard library without its tests."""
    if not pattern:
        folder, tests = Path(os.__file__).parent, {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
        paths = [path for path in folder.rglob('*.py') if not tests & set(path.relative_to(folder).parts)]
    elif os.path.isdir(pattern):
        found = list(walk(pattern, seen=set()))
        paths = [path for path in found if path.name.lower().endswith(KINDS)]
        if len(paths) < len(found):
            show(f'{pattern}: reads {len(paths)} of {len(found)} files, those that are {", ".join(KINDS)}')
    else:
        found = sorted(glob.glob(pattern, recursive=True) or [pattern], key=len, reverse=True)
        files = {os.path.realpath(path): Path(path) for path in found if os.path.isfile(path)}
        paths = list(files.values())  # each file once, by its shortest name: symbolic links can loop
    if not paths:
        fail(f'--input={pattern}: no such file, nor a folder with {", ".join(KINDS)} files')
    shared = os.path.commonpath([path.parent for path in paths])
    return dict(sorted((path.relative_to(shared).as_posix(), path) for path in paths))


def walk(folder, seen):
    """Yield all files below a folder, symbolic links included, each real folder once."""
    seen.add(os.path.realpath(folder))
    for path in Path(folder).iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in seen:
            yield from walk(path, seen)


def read(paths, field):
    """Yield the documents of files as str: lines of .jsonl, rows of .parquet, or else whole files; one of more than
    DOCUMENT_SIZE comes in parts. Ends the program with the file and the place of what is no text."""
    for path in paths:
        number, kind = 0, Path(path.name.lower().removesuffix('.gz')).suffix
        try:
            for number, text in enumerate(texts(path, kind, field), 1):
                yield text
        except Exception as error:  # whatever it is, say where
            place = {'.jsonl': f', line {number + 1}', '.parquet': f', row {number + 1}'}.get(kind, '')
            fail(f'{path}{place}: {error}')


def texts(path, kind, field):
    """Yield the texts of a file."""
    if kind in ('.json', '.ndjson', '.csv', '.tsv', '.xml', '.html', '.ipynb'):
        raise ValueError(f'{kind} is not read; plain text is: {", ".join(KINDS)}')
    if kind == '.parquet':
        from pyarrow.parquet import ParquetFile
        table = ParquetFile(path)
        for batch in table.iter_batches(256, columns=[field] if field in table.schema_arrow.names else None):
            yield from (text_of(row, field) for row in batch.to_pylist())
        return
    opener = gzip.open if path.suffix.lower() == '.gz' else open
    if kind == '.jsonl':
        with opener(path, 'rb') as file:  # json decodes each line, and drops a byte order mark
            yield from (text_of(json.loads(line), field) if line.strip() else '' for line in file)
        return
    with opener(path, 'rt', encoding='utf-8-sig', newline='\n') as file:  # drops a byte order mark
        try:
            while part := file.read(DOCUMENT_SIZE) + file.readline(DOCUMENT_SIZE):
                if '\0' in part and kind != '.txt':
                    raise ValueError('no text: it has NUL bytes')
                yield part
        except UnicodeDecodeError as error:
            at = file.buffer.tell() - len(error.object) + error.start
            raise ValueError(f'not UTF-8: {error.reason} at byte {at}') from error


def text_of(record, field):
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'--field={field} has no text in {str(record)[:99]}')
    text.encode()  # fails on half of a surrogate pair
    return text


class Split:
    """The documents of files, each for training or for validation; every pass over it gives the same.

    A hash of the document and the seed decides, so that equal documents are in the same split. A document that would
    be over a quarter of the validation text is cut: its tail, from the start of a line, is for validation.
    """

    def __init__(self, inputs, field, val_fraction, seed):
        self.inputs, self.field, self.val_fraction, self.seed = inputs, field, val_fraction, seed
        self.size = sum(path.stat().st_size for path in inputs.values())  # in bytes
        self.long = max(SHORT_SIZE, val_fraction * self.size / 4)

    def __iter__(self):
        """Yield ('train' or 'val', document)."""
        for document in read(self.inputs.values(), self.field):
            n_val = round(self.val_fraction * len(document))
            end = len(document) - n_val
            if len(document) > self.long:
                end = document.rfind('\n', max(0, end - n_val), end) + 1 or end
            else:
                drawn = hashlib.blake2b(document.encode(), digest_size=4, key=str(self.seed).encode()).digest()
                end = 0 if int.from_bytes(drawn, 'big') < self.val_fraction * 2**32 else len(document)
            for name, part in (('train', document[:end]), ('val', document[end:])):
                if part:
                    yield name, part


# ----------------------------------------------------------------------------------------------------------------------
# Training a BPE

def train_tokenizer(n_tokens, split):
    """A byte-level BPE of n_tokens, 256 bytes and end-of-text among them, trained on the training part of a split, or
    on a sample of it of some 4 KB for each token."""
    import regex  # which tiktoken brings
    pattern, words, draw = regex.compile(PATTERN), Counter(), random.Random(split.seed)
    for name, document in tqdm(split, 'counting words', unit='', disable=None):
        if name == 'train' and draw.random() * split.size < 4000 * n_tokens:
            for piece in pieces(document):
                words.update(pattern.findall(piece))
    ids = train_bpe(words, n_tokens - 1)
    if len(ids) < n_tokens - 1:
        fail(f'--tokenizer=bpe:{n_tokens}: the training text is enough for bpe:{len(ids) + 1} at most')
    return Tokenizer(bpe_state(f'bpe:{n_tokens}', PATTERN, ids, n_tokens - 1, n_tokens))


def train_bpe(words, n_tokens):
    """{token: id} of a BPE trained on words, {str: count}: again and again the most frequent pair of neighbours becomes
    a token; ties go to the pair of lower ids. Ends early when no pair occurs twice."""
    words = [(list(word.encode()), count) for word, count in words.items()]  # words as ids
    tokens = [bytes([i]) for i in range(256)]
    ids = {token: i for i, token in enumerate(tokens)}
    totals, places = Counter(), defaultdict(set)  # of each pair of ids: how often it occurs, and in which words
    heap, changed = [], set()  # (-total, pair), some of them outdated; pairs whose totals are not in the heap yet

    def count_pairs(i, sign):
        word, count = words[i]
        for pair in zip(word, word[1:]):
            totals[pair] += sign * count
            places[pair].add(i)
            changed.add(pair)

    for i in range(len(words)):
        count_pairs(i, 1)
    while len(tokens) < n_tokens:
        for pair in changed:
            heapq.heappush(heap, (-totals[pair], pair))
        changed.clear()
        while heap and -heap[0][0] != totals[heap[0][1]]:
            heapq.heappop(heap)
        if not heap or heap[0][0] > -2:
            break
        pair = heap[0][1]
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in ids:  # another pair may have made it before
            ids[token] = len(tokens)
            tokens.append(token)
        for i in places.pop(pair):
            count_pairs(i, -1)
            words[i] = merge(words[i][0], pair, ids[token]), words[i][1]
            count_pairs(i, 1)
    return ids


def merge(word, pair, new):
    """A word, as ids, in which every occurrence of a pair is the id new."""
    merged = []
    for i in word:
        if merged and (merged[-1], i) == pair:
            merged[-1] = new
        else:
            merged.append(i)
    return merged


# ----------------------------------------------------------------------------------------------------------------------
# Token shards out

class Writer:
    """Encodes the documents of a split in batches and writes their tokens to shards."""

    def __init__(self, folder, name, tokenizer):
        self.prefix, self.tokenizer = f'{folder}/{name}', tokenizer
        self.format = (20240520, 1) if tokenizer.vocab_size <= 1 << 16 else (20240801, 7)
        self.counts = {'tokens': 0, 'bytes': 0, 'documents': 0}
        self.batch, self.waiting = [], 0  # documents to be encoded, and their bytes

    def add(self, document):
        size = len(document.encode())
        self.counts['bytes'] += size
        self.counts['documents'] += 1
        self.batch.append(document)
        self.waiting += size
        if self.waiting >= BATCH_BYTES:
            self.write()

    def write(self):
        """Encode the batch and append its tokens to the last shard, or to new ones where that is full."""
        bos, eot = [self.tokenizer.bos], [self.tokenizer.eot]
        if bos == eot:
            eot = []  # bos alone parts the documents
        documents = [bos + tokens + eot for tokens in self.tokenizer.encode_batch(self.batch)]
        tokens = np.array([token for document in documents for token in document], np.uint32)
        self.batch, self.waiting = [], 0
        while len(tokens):
            shard, filled = divmod(self.counts['tokens'], SHARD_TOKENS)
            part, tokens = np.split(tokens, [SHARD_TOKENS - filled])
            with open(f'{self.prefix}_{shard:06d}.bin', 'r+b' if filled else 'wb') as file:
                file.write(np.array([*self.format, filled + len(part), *[0] * 253], '<i4').data)
                file.seek(0, os.SEEK_END)
                file.write(part.astype(SHARD_FORMATS[self.format]).data)
            self.counts['tokens'] += len(part)


def write_shards(folder, split, tokenizer):
    """Tokenize a Split into a folder. Returns what meta.json says of it."""
    writers = {name: Writer(folder, name, tokenizer) for name in ('train', 'val')}
    with tqdm(desc='tokenizing', unit='B', unit_scale=True, disable=None) as bar:
        for name, document in split:
            writers[name].add(document)
            bar.update(len(document))
    for name, writer in writers.items():
        writer.write()
        if not writer.counts['tokens'] and (name == 'val' or split.val_fraction < 1):
            fail(f'no text is drawn for {name}: give more or longer documents, or another --val_fraction or --seed')
    return {**{name: writer.counts for name, writer in writers.items()},
            'inputs': {name: sha256(path) for name, path in split.inputs.items()}}


def sha256(path):
    return hashlib.sha256(np.memmap(path, 'u1', 'r') if path.stat().st_size else b'').hexdigest()


def take_shards(paths, folder, tokenizer):
    """Link ready-made shards into a folder, or copy them. Returns what meta.json says of them."""
    counts = {'train': {'tokens': 0}, 'val': {'tokens': 0}}
    for path in paths:
        tokens = open_shard(path)
        if len(tokens) and tokens.max() >= tokenizer.vocab_size:
            fail(f'{path} has the id {tokens.max()}, beyond the {tokenizer.vocab_size:,} of {tokenizer.name}: give the '
                 '--tokenizer that made it')
        counts[split_of(path)]['tokens'] += len(tokens)
        try:
            os.link(os.path.realpath(path), folder / path.name)  # a cache has symbolic links
        except OSError:  # another disk, or one without links
            shutil.copyfile(path, folder / path.name)
    if not all(count['tokens'] for count in counts.values()):
        fail(f'{paths[0].parent}: some shard for validation must have val in its name, and some other must not')
    return {**counts, 'inputs': {path.name: sha256(path) for path in paths}}


# ----------------------------------------------------------------------------------------------------------------------
# The command

def download_shards(dataset, shards):
    """The paths of the val shard and the first train shards (0: all), which huggingface_hub keeps in its cache."""
    from huggingface_hub import hf_hub_download
    repository, prefix, most = READY_MADE[dataset]
    names = ['val_000000', *(f'train_{i:06d}' for i in range(1, min(shards or most, most) + 1))]
    return [Path(hf_hub_download(repository, f'{prefix}_{name}.bin', repo_type='dataset')) for name in names]


def download_shakespeare(folder):
    """The path of the text."""
    path = Path(folder, 'shakespeare.txt')
    urllib.request.urlretrieve(SHAKESPEARE, path)
    if sha256(path) != SHAKESPEARE_SHA256:
        raise ValueError(f'{SHAKESPEARE} has changed: its SHA-256 should be {SHAKESPEARE_SHA256}')
    return path


def prepare(dataset, input='', tokenizer='', field='text', val_fraction=0.05, seed=1337, shards=0):
    """Make data/NAME. The arguments are the settings of the command below. Ends the program with one line if it
    cannot; what was there before stays."""
    folder, source = DATA / dataset, Path(input).expanduser()
    name = tokenizer or ('bpe:1024' if dataset == 'stdlib' else 'gpt2')
    is_trained = name.startswith('bpe:')
    bins = sorted(source.glob('*.bin')) if input else []
    if not re.fullmatch(r'[\w-]+', dataset) or (dataset in NAMED) == bool(input):
        fail(f'--dataset={dataset}: must be one of {", ".join(NAMED)}, or another word with --input')
    if is_trained and (bins or not re.fullmatch(r'bpe:\d{1,6}', name) or int(name[4:]) < 257):
        fail(f'--tokenizer={name}: bpe:N is trained on text, with N tokens, of which 257 are the bytes and end-of-text')
    if (shards and dataset not in READY_MADE) or (name != 'gpt2' and dataset in READY_MADE):
        fail(f'--shards is for {", ".join(READY_MADE)}, which have the tokens of --tokenizer=gpt2')
    if not 0 < val_fraction <= 1:
        fail(f'--val_fraction={val_fraction}: must be above 0 and at most 1')
    if folder.exists():
        fail(f'{folder} is there already: remove it, or choose another --dataset')
    tokenizer = None if is_trained else Tokenizer.load(name)
    try:
        DATA.mkdir(exist_ok=True)
        # A folder gets its name when it is whole: a run that is killed leaves no half data set.
        with tempfile.TemporaryDirectory(prefix=f'{dataset}.unfinished-', dir=DATA) as temporary:
            new = Path(temporary, dataset)
            new.mkdir()
            if dataset == 'shakespeare':
                source = download_shakespeare(temporary)
            if dataset in READY_MADE:
                bins = download_shards(dataset, shards)
            if bins:
                meta = take_shards(bins, new, tokenizer)
            else:
                split = Split(find_inputs(str(source) if source.name else ''), field, val_fraction, seed)
                tokenizer = tokenizer or train_tokenizer(int(name[4:]), split)
                meta = {**write_shards(new, split, tokenizer), 'val_fraction': val_fraction, 'seed': seed}
            meta = {'tokenizer': tokenizer.name, 'vocab_size': tokenizer.vocab_size, **meta}
            (new / 'tokenizer.json').write_text(json.dumps(tokenizer.state()), encoding='utf-8')
            (new / 'meta.json').write_text(json.dumps(meta, indent=1), encoding='utf-8')
            try:
                os.rename(new, folder)
            except OSError as error:  # another process may have made the same meanwhile
                if not folder.exists() or read_meta(dataset) != meta:
                    fail(f'{folder}: {error.strerror}: choose another --dataset')
    except Exception as error:  # of the disk, the network, the hub or a package that is not installed
        fail(f'--dataset={dataset}: {type(error).__name__}: {error}')
    for split in ('train', 'val'):
        show(f'{folder} {split}: ' + ', '.join(f'{n:,} {what}' for what, n in meta[split].items()))


if __name__ == '__main__':
    dataset = 'stdlib'  # stdlib, shakespeare, fineweb10B, finewebedu10B, fineweb100B, or a name of yours
    input = ''  # file, glob or folder: .txt (one document), .jsonl (one a line), .parquet (one a row), or .bin shards
    tokenizer = ''  # bytes, bpe:N (trained here), gpt2 or another of tiktoken's, a file of BPE ranks, hf:FOLDER_OR_NAME
    field = 'text'  # the field of .jsonl and .parquet that has the text
    val_fraction = 0.05  # fraction of the text that is for validation; 1.0: all
    seed = 1337  # seed of the draw of documents for validation
    shards = 0  # train shards to download of a ready-made data set; 0: all
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prepare(**configure(globals()))
    except KeyboardInterrupt:
        fail('interrupted: there is no new data set')
