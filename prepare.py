"""
Text in, token shards out, and the readers of both.

    python prepare.py                                     # data/stdlib: Python's own standard library, offline
    python prepare.py --dataset=shakespeare               # a small download
    python prepare.py --dataset=fineweb10B --shards=8     # GPT-2 tokens, ready made, in shards of 100M
    python prepare.py --dataset=mine --input='texts/*.jsonl.gz' --tokenizer=bpe:8192
    python prepare.py --dataset=mine --shards_from=FOLDER --tokenizer=gpt2

Tokenizers are bytes; bpe:N, a BPE of N tokens trained here (256 bytes and end-of-text among them); gpt2 and others that
tiktoken knows; a file of BPE ranks; and hf:NAME, a model on the Hugging Face hub or a folder with a tokenizer.json. The
default is bpe:1024 for stdlib, bytes for stdlib_bytes, which is the same text, and gpt2 for all else.

Writes to data/NAME: {train,val}_000000.bin ... in the format of llm.c and modded-nanogpt, meta.json, tokenizer.json
(what encoding and decoding need) and token_bytes.npy (how many bytes each token stands for). Below come tokenizers, the
readers of such a folder, text in, tokenizers made here, token shards out, and the command.
"""

import base64
import contextlib
import glob
import gzip
import hashlib
import heapq
import importlib
import io
import json
import os
import re
import shutil
import signal
import tempfile
import urllib.request
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from configurator import configure, fail, show

DATA = Path('data')
DOCUMENT_BYTES = 64_000_000  # a longer document is cut into several, so that memory does not grow with it
BPE_BYTES = 32_000_000  # of more training text, a BPE is trained on about this much, for the same reason
PIECE = 1 << 16  # characters that a thread encodes at a time; of a million spaces at once tiktoken would crash
SHARD_TOKENS = 100_000_000
SHARD_FORMATS = {(20240520, 1): '<u2', (20240801, 7): '<u4'}  # type of the tokens by magic and version, its first ints
THREADS = os.cpu_count() or 1
BAR = {'unit': 'B', 'unit_scale': True, 'disable': None}  # progress in bytes, shown on a terminal alone

TEXTS = {  # a data set of one file: its URL and SHA-256
    'shakespeare': ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')}
READY_MADE = {  # shards of GPT-2 tokens: the URL up to val_000000.bin and train_000001.bin ...; how many of train
    'fineweb10B': ('https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_', 103),
    'finewebedu10B': ('https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_', 99),
    'fineweb100B': ('https://huggingface.co/datasets/kjj0/fineweb100B-gpt2/resolve/main/fineweb_', 1030)}
NAMED = ['stdlib', 'stdlib_bytes', *TEXTS, *READY_MADE]

# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

# cl100k's pattern, which is Llama 3's too, in the faster form that tiktoken has for it.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
           r'|\s++$|\s*[\r\n]|\s+(?!\S)|\s')
# Between two words and after a lone newline both end a match: cut there, text has the same tokens.
SAFE_CUT = re.compile(r'\w(?= \w)|\S\n(?=\w)')


class Tokenizer:
    """Bytes or BPE; has name, vocab_size, eot (the end-of-text). Raises ValueError if state makes no BPE over bytes."""

    def __init__(self, state):
        self._state = state
        self.name, self.vocab_size, self.eot = state['name'], state['vocab_size'], state['eot']
        ranks = {bytes([i]): i for i in range(256)}  # bytes are a BPE without merges
        if 'ranks' in state:  # the lines of a file in tiktoken's format: a token in base64, a space and its rank
            lines = [line.split() for line in state['ranks'].splitlines()]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
            in_utf8 = {bytes([i]) for i in range(0xF5) if i not in (0xC0, 0xC1)}
            if len(set(ranks.values())) < len(lines) or not in_utf8 <= ranks.keys():
                raise ValueError('tokens and ranks should be distinct, and every byte be a token')
        self.encoding = tiktoken.Encoding(self.name, pat_str=state.get('pattern', PATTERN), mergeable_ranks=ranks,
                                          special_tokens={'<|endoftext|>': self.eot})
        tokens = {rank: token for token, rank in ranks.items()}
        self.table = [tokens.get(i, b'') for i in range(self.vocab_size)]  # end-of-text and unused ids: no bytes

    @classmethod
    def load(cls, name):
        """name: bytes, hf:FOLDER_OR_NAME, one of tiktoken's, or the path of a rank file; else ends the program."""
        try:
            if name == 'bytes':
                return cls({'name': 'bytes', 'vocab_size': 257, 'eot': 256})
            if name.startswith('hf:'):
                return cls(read_hf(name[3:]))
            if name.endswith('tokenizer.json'):  # that of a data set
                return cls(json.loads(Path(name).read_text(encoding='utf-8')))
            if name in tiktoken.list_encoding_names():
                bpe = tiktoken.get_encoding(name)
                return cls(bpe_state(name, bpe._pat_str, bpe._mergeable_ranks, bpe.eot_token, bpe.n_vocab))
            ranks = Path(name).read_text(encoding='ascii')
            last = max(map(int, ranks.split()[1::2]))
            eot, vocab_size = (128001, 128256) if last == 127999 else (last + 1, last + 2)  # Llama 3's, or any other
            return cls(dict(name=Path(name).name, vocab_size=vocab_size, eot=eot, pattern=PATTERN, ranks=ranks))
        except Exception as error:  # whatever the packages raise
            wrong = 'is not bytes, nor bpe:N, hf:NAME, a name that tiktoken knows, or a BPE rank file'
            if name in tiktoken.list_encoding_names():
                wrong = ('could not be downloaded; set TIKTOKEN_CACHE_DIR to a folder that has it, or take bpe:1024 or '
                         'bytes, which need no network')
            elif name.startswith('hf:'):
                wrong = 'is no tokenizer that can be had here'
            fail(f'--tokenizer={name} {wrong}: {error}')

    def same_tokens(self, other):
        """Whether every id stands for the same bytes in both, and the same one for end-of-text."""
        return (self.eot, self.table) == (other.eot, other.table)

    def state(self):
        """A dict of str and int, for JSON files and checkpoints, from which Tokenizer(state) makes it again."""
        return dict(self._state)

    def encode(self, text):
        """str -> list of int, without end-of-text; text that spells a special token is encoded as plain text."""
        return [token for piece in pieces(text) for token in self.encode_piece(piece).tolist()]

    def decode(self, tokens):
        """Token ids -> bytes; end-of-text and unused ids stand for none."""
        return b''.join(self.table[token] for token in tokens if token < self.vocab_size)

    def token_bytes(self):
        """(vocab_size,) int32: how many bytes each token stands for, 0 for end-of-text and unused ids."""
        return np.array([len(token) for token in self.table], np.int32)

    def encode_piece(self, piece, first=False):
        """A piece -> (n,) ints; end-of-text stands before the first of a document. Threads do this side by side."""
        tokens = self.encoding.encode_to_numpy(piece, disallowed_special=())
        return np.append(np.uint32(self.eot), tokens) if first else tokens


def pieces(text):
    """Yield the pieces of a text that are encoded one by one."""
    start = 0
    while start < len(text):
        match = SAFE_CUT.search(text, start + PIECE, start + 2 * PIECE)
        end = match.end() if match else start + 2 * PIECE
        yield text[start:end]
        start = end


def bpe_state(name, pattern, ranks, eot, vocab_size):
    """What Tokenizer makes a BPE of. ranks: {token: id}, where the lower id is merged first."""
    lines = (f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks.items())
    return dict(name=name, vocab_size=vocab_size, eot=eot, pattern=pattern, ranks=''.join(lines))


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
        fail(f'{path} is not a whole token shard: its header or its length is wrong')
    return np.memmap(path, dtype, 'r', 1024)


# ----------------------------------------------------------------------------------------------------------------------
# Text in: what files hold, and for which split

KINDS = '.txt', '.txt.gz', '.jsonl', '.jsonl.gz', '.jsonl.zst', '.parquet'  # what is read of a folder
NOT_TEXT = {'.json', '.ndjson', '.csv', '.tsv', '.xml', '.html', '.ipynb', '.xz', '.bz2', '.zip', '.tar', '.tgz', '.7z'}
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', 'lib2to3'}
CAN_BE_READ = f'what can be read is UTF-8 text: {", ".join(KINDS)}'
DRAWS = 1 << 16  # the numbers that are drawn for documents are below this


def find_inputs(pattern):
    """[(name, path)], sorted, of a file, a glob or a folder; of '', Python's standard library without its tests."""
    if not pattern:
        folder = Path(os.__file__).parent
        paths = [path for path in folder.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(folder).parts)]
    elif os.path.isdir(pattern):
        walk = os.walk(pattern, onerror=fail)  # no folder is passed over because it cannot be read
        found = [Path(folder, name) for folder, _, names in walk for name in names]
        paths = [path for path in found if path.name.lower().endswith(KINDS)]
        if len(paths) < len(found):
            show(f'{pattern}: {len(found) - len(paths)} of its {len(found)} files are not read; {CAN_BE_READ}')
    else:
        paths = [Path(path) for path in glob.glob(pattern, recursive=True) or [pattern]]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        fail(f'--input={pattern}: no such file, nor a folder with {", ".join(KINDS)} files')
    for path in paths:
        kind_of(path)  # this ends the program if a name is not that of a text
    shared = os.path.commonpath([path.parent for path in paths])
    return sorted((path.relative_to(shared).as_posix(), path) for path in paths)


def kind_of(path):
    """('.jsonl', '.gz') for x.jsonl.gz. Ends the program if the name says that a file is not text."""
    packed = path.suffix.lower() if path.suffix.lower() in ('.gz', '.zst') else ''
    kind = Path(path.name.lower().removesuffix(packed)).suffix
    if kind in NOT_TEXT or packed == '.zst' and kind != '.jsonl' or packed and kind == '.parquet':
        fail(f'{path}: {kind}{packed} is not read; {CAN_BE_READ}')
    return kind, packed


def read(inputs, field):
    """Yield the documents of files, in UTF-8: each line of .jsonl, each row of .parquet, or else each file.

    They come as (place, offset, document): where a document of over DOCUMENT_BYTES goes on, its offset is not 0.
    """
    for name, path in inputs:
        kind, place, offset = kind_of(path)[0], '', 0
        unit = {'.jsonl': 'line', '.parquet': 'row'}.get(kind)
        try:
            for number, item in enumerate(open_items(path, field), 1):
                place, offset = f', {unit} {number}' if unit else '', 0
                for document in cut(io.BytesIO(text_of(item, field)) if unit else item):
                    document.decode()
                    if not unit and kind != '.txt' and b'\0' in document:
                        raise ValueError('there are NUL bytes in it')
                    yield name + place, offset, document
                    offset += len(document)
        except Exception as error:  # whatever it is, say where
            where = place or f', byte {offset + getattr(error, "start", 0)}'
            what = {UnicodeDecodeError: 'not UTF-8', UnicodeEncodeError: 'half of a surrogate pair is no character',
                    json.JSONDecodeError: 'not JSON', ValueError: 'not text'}.get(type(error), type(error).__name__)
            fail(f'{path}{where}: {what}: {getattr(error, "reason", error)}' + ('' if unit else f'; {CAN_BE_READ}'))


def open_items(path, field):
    """Yield what a file holds: lines (bytes) of .jsonl, rows (dicts) of .parquet, or else a stream of all."""
    kind, packed = kind_of(path)
    if kind == '.parquet':
        file = package('pyarrow.parquet').ParquetFile(path)
        for batch in file.iter_batches(256, columns=[field] if field in file.schema_arrow.names else None):
            yield from batch.to_pylist()
        return
    with gzip.open(path) if packed == '.gz' else open(path, 'rb') as file:
        if packed == '.zst':
            zst = package('zstandard').ZstdDecompressor(max_window_size=1 << 31)
            file = io.BufferedReader(zst.stream_reader(file, read_across_frames=True))
            if not file.peek(1):
                raise EOFError('nothing in it, or the file was cut off')
        yield from file if kind == '.jsonl' else [file]


def package(name):
    """An optional package. Ends the program if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fail(f'{error}: pip install {name.split(".")[0]}')


def text_of(item, field):
    """The text, in UTF-8, of a line of .jsonl or a row of .parquet. Raises ValueError."""
    if isinstance(item, bytes):
        item = json.loads(item.decode('utf-8-sig')) if item.strip() else {field: ''}
    if not isinstance(item, dict) or not isinstance(item.get(field), str):
        raise ValueError(f'no text in --field={field} of {str(item)[:99]}')
    return item[field].encode()


def cut(stream):
    """Yield a stream in parts of at most DOCUMENT_BYTES."""
    data = b''
    while data := data + stream.read(DOCUMENT_BYTES + 1 - len(data)):
        end = find_cut(data, DOCUMENT_BYTES, DOCUMENT_BYTES // 2) if len(data) > DOCUMENT_BYTES else len(data)
        yield data[:end]
        data = data[end:]


def find_cut(data, end, slack):
    """Where to cut off end bytes, or at most slack less: where a line begins, or else between two characters."""
    newline = data.rfind(b'\n', max(0, end - slack - 1), end)
    if newline >= 0 or end <= slack:
        return newline + 1
    return next((i for i in range(end, end - 4, -1) if data[i] >> 6 != 0b10), end)  # 0b10: a character goes on


class Split:
    """The documents of inputs, [(name, path)], dealt to both splits by their bytes.

    They lie in a row, in the order of numbers that are drawn by what they hold, so that equal documents are together.
    Training gets the first n_train bytes. What lies across their end is cut or, if short, goes where most of it lies.
    """

    def __init__(self, inputs, field, val_fraction, seed):
        self.inputs, self.field, self.seed = inputs, field, seed
        sizes = np.zeros(DRAWS, np.int64)  # bytes by draw; this first pass also finds what is wrong
        for _, _, document in tqdm(read(inputs, field), 'checking', unit='', disable=None):
            sizes[self.draw(document)] += len(document)
        ends, self.size = sizes.cumsum(), int(sizes.sum())
        self.begins = (ends - sizes).tolist()
        if self.size < (1 if val_fraction == 1 else 8):
            fail('the input has no text, or too little to split it')
        n_train = self.size - max(1, round(self.size * val_fraction))
        if val_fraction < 1:
            n_train = max(4, n_train)  # a character has up to 4 bytes
        self.slack = min(n_train, self.size - n_train, self.size // 20) // 5
        across = np.searchsorted(ends, n_train)
        nearest = min(self.begins[across], int(ends[across]), key=lambda at: abs(at - n_train))
        self.n_train = nearest if sizes[across] <= self.slack else n_train

    def draw(self, document):
        """An int below DRAWS."""
        digest = hashlib.blake2b(document, digest_size=2, key=str(self.seed).encode()[:64])
        return int.from_bytes(digest.digest(), 'big')

    def parts(self):
        """Yield (draw, part for training, part for validation) of each document; self.cuts tells where one was cut."""
        begins, self.cuts = self.begins.copy(), []
        for place, offset, document in read(self.inputs, self.field):
            drawn = self.draw(document)
            end = min(max(0, self.n_train - begins[drawn]), len(document))
            begins[drawn] += len(document)
            if 0 < end < len(document):
                end = find_cut(document, end, self.slack)
            cuts = {offset, offset + end} - {0, offset + len(document)}
            self.cuts += [f'{place}, byte {at}' for at in sorted(cuts)]
            yield drawn, document[:end], document[end:]


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers made here

def train_tokenizer(n_tokens, split):
    """A byte-level BPE of n_tokens, 256 bytes and end-of-text among them, trained on the training part of a split."""
    pattern, words = package('regex').compile(PATTERN), Counter()
    for drawn, text, _ in tqdm(split.parts(), 'counting words', unit='', disable=None):
        if split.begins[drawn] < BPE_BYTES:
            for piece in pieces(text.decode()):
                words.update(pattern.findall(piece))
    tokens = train_bpe(words, n_tokens - 1)
    if len(tokens) < n_tokens - 1:
        fail(f'--tokenizer=bpe:{n_tokens}: the training text is enough for bpe:{len(tokens) + 1} at most')
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(bpe_state(f'bpe:{n_tokens}', PATTERN, ranks, n_tokens - 1, n_tokens))


def train_bpe(words, n_tokens):
    """The tokens (bytes) of a BPE, in the order of their ranks, trained on words, {str: how often it occurs}.

    Again and again the pair of neighbours that occurs most often, the one of lower ranks if there are several, becomes
    a token. Ends early when none occurs twice.
    """
    tokens = [bytes([i]) for i in range(256)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ids, counts = [-1], [0]  # all words in a row, with -1 before and after each; how often the word of each id occurs
    for word, count in words.items():
        ids += [*word.encode(), -1]
        counts += [count] * (len(ids) - len(counts))
    after, before = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))  # positions, by position
    totals, places, changed = Counter(), defaultdict(list), set()  # of pairs: how often, and where
    heap = [(0, ())]  # (-total, pair) of all pairs, some outdated; the first, of no pair, ends the loop

    def count_pair(at, sign):
        """Add the pair that begins at a position to what is known of all pairs, or take it away."""
        pair = ids[at], ids[after[at]]
        if -1 not in pair:
            totals[pair] += sign * counts[at]
            changed.add(pair)
            if sign > 0:
                places[pair].append(at)

    for at in range(len(ids) - 1):
        count_pair(at, 1)
    while len(tokens) < n_tokens:
        for pair in changed:
            heapq.heappush(heap, (-totals[pair], pair))
        changed.clear()
        total, pair = heapq.heappop(heap)
        if total > -2:
            break
        if total != -totals[pair]:
            continue
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in ranks:  # it may have been made of another pair
            ranks[token] = len(tokens)
            tokens.append(token)
        for first in sorted(places.pop(pair)):
            second = after[first]
            if (ids[first], ids[second]) != pair:  # one of the two is in another token by now
                continue
            for at in (before[first], first, second):
                count_pair(at, -1)
            ids[first], ids[second] = ranks[token], -1
            after[first] = after[second]
            before[after[first]] = first
            for at in (before[first], first):
                count_pair(at, 1)
    return tokens


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE = ("I'm here, you're THERE'S. 1 12 123 1234567 3.14e-5  two   three\n\n\n\ttab\r\n  end \n naïve e\u0301 ﬁ ½² "
          '中文字符。日本語テキスト русский हिन्दी 😀👍🏽 __init__(self): $€ “x” …\u00a0\u2028 <b>&amp;</b>\n \t \n'
          + 'x'.join(' ' * i + '\n' * (i % 5) for i in range(40)))  # shows where two tokenizers differ


def read_hf(name):
    """The state of a Tokenizer equal to a tokenizer.json, in a folder or on the Hugging Face hub. Raises ValueError.

    BPE over ids joins, of all neighbours that make up a token, those of the lowest id. It does the merges of the file
    if these are in the order of their ids, and each token has among them the one by which BPE over lower ids makes it.
    """
    folder = name
    if not os.path.isdir(name):
        folder = package('huggingface_hub').snapshot_download(name, allow_patterns=['tokenizer*.json'])
    theirs = package('tokenizers').Tokenizer.from_file(os.path.join(folder, 'tokenizer.json'))
    theirs.no_truncation()
    spec = json.loads(theirs.to_str())
    model, steps = spec['model'], spec['pre_tokenizer'] or {'type': 'no pre-tokenizer'}
    steps = steps.get('pretokenizers', [steps])
    kinds = [step['type'] for step in steps]
    known = ['ByteLevel'], ['Split', 'ByteLevel'], ['Digits', 'ByteLevel']
    if model['type'] != 'BPE' or spec['normalizer'] or kinds not in known:
        raise ValueError(f'it is {model["type"]} after {" and ".join(kinds)}, and not BPE after ByteLevel, or after '
                         'Split or Digits and ByteLevel, without a normalizer')
    pattern = steps[0]['pattern']['Regex'] if kinds[0] == 'Split' else GPT2_PATTERN
    if kinds[0] == 'Digits':  # each is split off, so that what is before it ends there
        pattern = pattern.replace(r' ?\p{N}+', r'\p{N}').replace(r'(?!\S)', r'(?![^\s\p{N}])')

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are spelled as the same character
    spelling = dict(zip(map(chr, [*printable, *range(256, 324)]), [*printable, *sorted({*range(256)} - {*printable})]))
    special = {token['content']: token['id'] for token in spec['added_tokens']}
    ranks = {bytes(map(spelling.get, token)): i for token, i in model['vocab'].items() if token not in special}
    merges = [tuple(bytes(map(spelling.get, half)) for half in merge) for merge in model['merges']]
    made = [ranks.get(left + right, -1) for left, right in merges]
    own = [tuple(halves(token, ranks)) for token in ranks if len(token) > 1]
    if -1 in made or made != sorted(made) or not set(own) <= set(merges):
        raise ValueError('its merges are not those that BPE by its ids would do')

    config = Path(folder, 'tokenizer_config.json')
    eos = json.loads(config.read_text(encoding='utf-8')).get('eos_token') if config.exists() else None
    names = [eos['content'] if isinstance(eos, dict) else eos, '<|endoftext|>', '<|end_of_text|>', '</s>']
    eot = next((special[name] for name in names if name in special), None)
    if eot is None:
        raise ValueError('it has no end-of-text')
    vocab_size = 1 + max(*ranks.values(), *special.values())
    state = bpe_state(Path(name).resolve().name, pattern, ranks, eot, vocab_size)
    text = SAMPLE + 5 * Path(os.__file__).read_text(encoding='utf-8')  # enough to be cut into pieces
    if Tokenizer(state).encode(text) != theirs.encode(text, add_special_tokens=False).ids:
        raise ValueError('the tokenizers package makes other tokens of a sample of text')
    return state


def halves(token, ranks):
    """The parts that BPE makes of a token with the ranks below its own: two, if it can be made."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while True:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], 1 << 32), i) for i in range(len(parts) - 1))
        if rank >= ranks[token]:
            return parts
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


# ----------------------------------------------------------------------------------------------------------------------
# Token shards out

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
        for i, piece in enumerate(pieces(document.decode())):
            self.tasks.append(self.pool.submit(self.tokenizer.encode_piece, piece, first=i == 0))
            if len(self.tasks) == 16 * THREADS:  # half of them keep all cores busy while the others are written
                self.write(8 * THREADS)

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


def write_shards(folder, split, tokenizer):
    """Tokenize both parts of a split into a folder. Returns what meta.json says of that."""
    with ThreadPoolExecutor(THREADS) as pool, tqdm(desc='tokenizing', total=split.size, **BAR) as bar:
        train, val = writers = [Writer(folder, name, tokenizer, pool) for name in ('train', 'val')]
        for _, *parts in split.parts():
            for writer, part in zip(writers, parts):
                if part:
                    writer.add(part)
                    bar.update(len(part))
        train.write()
        val.write()
    inputs = {name: sha256(path) for name, path in split.inputs}
    return {'train': train.counts, 'val': val.counts, 'cut': split.cuts, 'inputs': inputs}


def take_shards(folder, paths, tokenizer, put):
    """Put shards, {name: path}, into a folder, where all are as they should be. Returns what meta.json says of them."""
    counts = {'train': {'tokens': 0}, 'val': {'tokens': 0}}
    for name, path in paths.items():
        tokens = open_shard(path)
        counts[name.split('_')[0]]['tokens'] += len(tokens)
        if len(tokens) and tokens.max() >= tokenizer.vocab_size:
            fail(f'{path} has the id {tokens.max()}, beyond the {tokenizer.vocab_size:,} of {tokenizer.name}: give the '
                 '--tokenizer that made it')
    inputs = {name: sha256(path) for name, path in paths.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        if path != folder / name:
            put(path, folder / name)
    return {**counts, 'inputs': inputs}


def find_shards(folder):
    """{name: path} of the shards in a folder, under our names: those with val in theirs are for validation."""
    paths = {'train': [], 'val': []}
    for path in sorted(Path(folder).expanduser().glob('*.bin')):
        paths['val' if 'val' in path.name.lower() else 'train'].append(path)
    if not paths['val']:
        fail(f'--shards_from={folder}: there is no .bin file with val in its name; rename the shard for validation')
    return {f'{split}_{i:06d}.bin': path for split in paths for i, path in enumerate(paths[split])}


def lock(file, shared=False):
    """Lock an open file until it is closed or its process ends. False: another has it; None: there are no locks."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (OSError, ImportError):  # a disk or a system without locks
        return None


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
            size = done + (response.length or 0)
            progress = tqdm.wrapattr(response, 'read', total=size, initial=done, desc=path.name, **BAR)
            with open(part, 'ab') as file, progress as stream:
                if lock(file) is False or file.tell() < done:
                    raise ConnectionError('another process is downloading it')
                file.truncate(done)
                shutil.copyfileobj(stream, file)
            if response.length:
                raise ConnectionError(f'the connection ended {response.length:,} bytes too early')
    except Exception as error:  # whatever is wrong with the URL, the server or the disk
        fail(f'{url}: {error}' + (f'; the next try goes on from {part}' if part.exists() else ''))
    if digest and sha256(part) != digest:
        part.unlink()
        fail(f'{url} has changed: its SHA-256 should be {digest}')
    os.replace(part, path)


def prepare_ready_made(dataset, folder, downloads, shards):
    """Download the val shard and the first train shards (0: all) of a ready-made set, except those that are here."""
    url, most = READY_MADE[dataset]
    tokenizer = Tokenizer.load('gpt2')  # first, since this may be a download too
    paths = {path.name: path for split in ('train', 'val') for path in folder.glob(f'{split}_*.bin')}
    for name in ['val_000000.bin', *(f'train_{i:06d}.bin' for i in range(1, min(shards or most, most) + 1))]:
        if name not in paths:
            paths[name] = downloads / (url + name).rpartition('/')[2]
            download(url + name, paths[name])
    describe(folder, tokenizer, take_shards(folder, paths, tokenizer, os.replace))
    with contextlib.suppress(OSError):  # it may have more shards than were asked for
        downloads.rmdir()


# ----------------------------------------------------------------------------------------------------------------------
# The command

@contextlib.contextmanager
def new_folder(folder):
    """A folder to write to, which becomes data/NAME at the end, or else leaves nothing.

    All who write share a lock on data/. Who can have it alone removes what processes that were killed have left.
    """
    DATA.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if os.name != 'nt':  # Windows cannot open folders
            file = os.open(DATA, os.O_RDONLY)
            stack.callback(os.close, file)
            for left in DATA.glob('*.unfinished-*') if lock(file) else []:
                shutil.rmtree(left, ignore_errors=True)
            lock(file, shared=True)
        temporary = tempfile.TemporaryDirectory(prefix=f'{folder.name}.unfinished-', dir=DATA)
        new = Path(stack.enter_context(temporary), folder.name)
        new.mkdir()
        yield new
        try:
            os.rename(new, folder)
        except OSError as error:
            if not folder.exists() or json.loads((new / 'meta.json').read_text()) != read_meta(folder.name):
                fail(f'{folder}: {error.strerror}: another process may have made it meanwhile, of something else: '
                     'choose another --dataset')


def prepare(dataset, input='', tokenizer='', field='text', val_fraction=0.05, seed=1337, shards=0, shards_from=''):
    """Prepare data/NAME, as the command does, whose settings are explained below. Ends the program if it cannot."""
    folder, downloads = DATA / dataset, DATA / f'{dataset}.download'
    default = {'stdlib': 'bpe:1024', 'stdlib_bytes': 'bytes'}.get(dataset, 'gpt2')
    name, settings = tokenizer or default, {'field': field, 'val_fraction': val_fraction, 'seed': seed}
    trained = re.fullmatch(r'bpe:(\d{1,6})', name)
    if not re.fullmatch(r'[\w-]+', dataset) or (dataset in NAMED) + bool(input) + bool(shards_from) != 1:
        fail(f'--dataset={dataset}: should be one of {", ".join(NAMED)}, or another word with --input or --shards_from')
    if dataset in ('stdlib_bytes', *READY_MADE) and name != default:
        fail(f'--dataset={dataset} has the tokens of --tokenizer={default} and no other')
    if shards and dataset not in READY_MADE:
        fail(f'--shards is for {", ".join(READY_MADE)}')
    if not 0 < val_fraction <= 1:
        fail(f'--val_fraction={val_fraction} should be above 0 and at most 1')
    if name.startswith('bpe:') and (shards_from or not trained or int(trained[1]) < 257):
        fail(f'--tokenizer={name}: bpe:N is trained on the text of an input, with N tokens, of which 257 are given')
    try:
        if dataset in READY_MADE:
            prepare_ready_made(dataset, folder, downloads, shards)
        elif folder.exists():
            made = read_meta(dataset) if dataset in NAMED and (folder / 'meta.json').exists() else {}
            if not {'tokenizer': name, **settings}.items() <= made.items():
                fail(f'{folder} is there already: remove it, or choose another --dataset')
        elif shards_from:
            paths, tokenizer = find_shards(shards_from), Tokenizer.load(name)
            with new_folder(folder) as new:
                describe(new, tokenizer, take_shards(new, paths, tokenizer, shutil.copyfile))
        else:
            tokenizer = None if trained else Tokenizer.load(name)
            url, digest = TEXTS.get(dataset, (input, ''))
            if url.startswith(('http://', 'https://')):
                path = downloads / re.sub(r'[^\w.]+', '_', url.split('?')[0])
                kind_of(path)
                download(url, path, digest)
                inputs = [(url.split('?')[0], path)]
            else:
                inputs = find_inputs(os.path.expanduser(input))
            with new_folder(folder) as new:
                split = Split(inputs, field, val_fraction, seed)
                tokenizer = tokenizer or train_tokenizer(int(trained[1]), split)
                describe(new, tokenizer, {**write_shards(new, split, tokenizer), **settings})
            shutil.rmtree(downloads, ignore_errors=True)
    except OSError as error:
        fail(f'{error.filename or folder}: {error.strerror or error}')
    meta = read_meta(dataset)
    for split in ('train', 'val'):
        if meta[split]['tokens']:
            show(f'{folder} {split}: ' + ', '.join(f'{n:,} {what}' for what, n in meta[split].items()))
    if cuts := meta.get('cut'):
        show(f'{folder}: documents too long to be kept whole are cut: {len(cuts)} times, first at {cuts[0]}')


if __name__ == '__main__':
    dataset = 'stdlib'  # stdlib, stdlib_bytes, shakespeare, fineweb10B, finewebedu10B, fineweb100B, or a name of yours
    input = ''  # a file, a glob, a folder or a URL of .txt (a document each), .jsonl (one a line), .parquet (one a row)
    shards_from = ''  # instead of input, a folder with shards of llm.c or modded-nanogpt, val in the name of some
    tokenizer = ''  # bytes, bpe:N, gpt2, another that tiktoken knows, a BPE rank file, or hf:NAME; empty: as said above
    field = 'text'  # the field that has the text, in .jsonl and .parquet
    val_fraction = 0.05  # the part of the bytes for validation, in whole documents if these are short enough; 1.0: all
    seed = 1337  # the seed for drawing these documents
    shards = 0  # train shards to download of a ready-made data set; 0: all
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(**configure(globals()))
    except KeyboardInterrupt:
        fail('interrupted: nothing was changed, and a download goes on from where it is')
