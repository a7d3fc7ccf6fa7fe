"""prepare.py: what goes in comes out byte for byte, in a format that others read, or else one line says why not."""

import base64
import gzip
import http.server
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from conftest import script
from prepare import Tokenizer, Tokens

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r'|\s*[\r\n]+|\s+(?!\S)|\s+')  # as in the tokenizer.json of Llama 3
NASTY = ['<|endoftext|>', 'a<|endoftext|>b\n', '😀 naïve\u2028\x00\r\nend', '\ufeffBOM\r\n\r\n', 'no newline',
         ' ' * 300_000, '\n' * 999, 'def f(x):\n    return x\n' * 20_000]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_ranks(path='small.tiktoken', more=(b'th', b'the', b' the', b'in', b'\n\n', b'  ', b'ret', b'\xf0\x9f')):
    tokens = [bytes([i]) for i in range(256)] + list(more)
    return write(path, ''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens)))


def read_shards(dataset, split):
    """An independent reader: (list of the tokens of each shard, size of a token)."""
    shards = []
    for path in sorted(Path('data', dataset).glob(f'{split}_*.bin')):
        data = path.read_bytes()
        magic, version, count = struct.unpack('<3i', data[:12])
        code, size = {(20240520, 1): ('H', 2), (20240801, 7): ('I', 4)}[magic, version]
        assert data[12:1024] == bytes(1012) and len(data) == 1024 + size * count
        shards.append(list(struct.unpack(f'<{count}{code}', data[1024:])))
    return shards, size


def read_documents(dataset, split):
    tokenizer = prepare.read_tokenizer(dataset)
    tokens = np.concatenate(read_shards(dataset, split)[0]).tolist()
    assert tokens[0] == tokenizer.eot  # it stands before each document
    ends = [i for i, token in enumerate(tokens) if token == tokenizer.eot] + [len(tokens)]
    return [tokenizer.decode(tokens[i:j]) for i, j in itertools.pairwise(ends)]


def unsplit(train, val, texts):
    """Whether both splits together are these texts, of which one may be cut in two, its head for training."""
    left, more = list(train + val), list(texts)
    for text in texts:
        if text in left:
            left.remove(text)
            more.remove(text)
    return not left and not more or len(more) == 1 and [b''.join(left)] == more and left[0] in train and left[1] in val


def files():
    return {path: path.stat().st_mtime_ns for path in Path('.').rglob('*') if path != Path('data')}


def error_of(*args, **kwargs):
    """The one line with which prepare() ends, after which there is what there was before."""
    before = files()
    with pytest.raises(SystemExit) as caught:
        prepare.prepare(*args, **kwargs)
    assert files() == before
    assert isinstance(caught.value.code, str) and '\n' not in caught.value.code
    return caught.value.code


# -----------------------------------------------------------------------------
# round trips

@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
@pytest.mark.parametrize('form', ['txt', 'txt.gz', 'jsonl', 'jsonl.gz'])
def test_round_trip(kind, form):
    tokenizer = 'bytes' if kind == 'bytes' else write_ranks()
    if 'jsonl' in form:
        files = {'all': '\n'.join(json.dumps({'body': text}) for text in NASTY) + '\n\n  \n'}
    else:
        files = {str(i): text for i, text in enumerate(NASTY)}
    for name, text in files.items():
        write(f'in/{name}.{form}', gzip.compress(text.encode()) if form.endswith('gz') else text)
    prepare.prepare('x', input='in', tokenizer=tokenizer, field='body', val_fraction=0.3)
    train, val = (read_documents('x', split) for split in ('train', 'val'))
    assert unsplit(train, val, [text.encode() for text in NASTY])
    assert abs(len(b''.join(val)) / len(b''.join(train + val)) - 0.3) < 0.003
    meta, lengths = prepare.read_meta('x'), prepare.read_token_bytes('x')
    assert lengths.shape == (meta['vocab_size'],)
    for split, texts in (('train', train), ('val', val)):
        tokens = Tokens('x', split)
        size = len(b''.join(texts))
        assert meta[split] == {'tokens': len(tokens), 'bytes': size, 'documents': len(texts)}
        assert lengths[tokens.window(0, len(tokens))].sum() == size
    assert not [path for path in os.listdir('data') if path != 'x']


def test_a_long_text_is_cut_at_a_newline():
    text = ('é' * 90 + '\r\n') * 500
    prepare.prepare('x', input=write('x.txt', text), tokenizer='bytes')
    (train,), (val,) = (read_documents('x', split) for split in ('train', 'val'))
    assert train.decode() + val.decode() == text
    assert train.endswith(b'\n') and abs(len(val) / len(text.encode()) - 0.05) < 0.003


def test_one_line_is_cut_between_characters():
    text = '😀' * 1000
    prepare.prepare('x', input=write('x.txt', text), tokenizer=write_ranks())
    (train,), (val,) = (read_documents('x', split) for split in ('train', 'val'))
    assert train.decode() + val.decode() == text and len(val.decode()) == 50


@pytest.mark.parametrize('text', ['line\n' * 1000, 'é' * 3001, '\r\n' * 2000])
def test_large_documents_are_cut(monkeypatch, text):
    monkeypatch.setattr(prepare, 'DOCUMENT_BYTES', 1001)
    for form, content in (('txt', text), ('jsonl', json.dumps({'text': text}))):
        prepare.prepare(form, input=write(f'x.{form}', content), tokenizer=write_ranks(), val_fraction=0.001)
        train, val = (read_documents(form, split) for split in ('train', 'val'))
        assert len(val) == 1 and len(b''.join(train + val)) == len(text.encode())
        assert len(prepare.read_meta(form)['cut']) == len(train + val) - 1
        assert all(0 < len(part) <= 1001 and part.decode() for part in train + val)
        if text.startswith('line'):
            assert all(part.endswith(b'\n') for part in train + val)


def test_stdlib(monkeypatch):
    found = dict(prepare.find_inputs(''))
    assert 'argparse.py' in found and 'json/decoder.py' in found
    assert not [name for name in found if re.search('(^|/)(tests?|site-packages)/', name)]
    some = [(name, found[name]) for name in ('os.py', 're/_parser.py')]
    monkeypatch.setattr(prepare, 'find_inputs', lambda pattern: some)
    prepare.prepare('stdlib')
    prepare.prepare('stdlib_bytes')
    for dataset, tokenizer, vocab_size in (('stdlib', 'bpe:1024', 1024), ('stdlib_bytes', 'bytes', 257)):
        meta = prepare.read_meta(dataset)
        assert (meta['tokenizer'], meta['vocab_size']) == (tokenizer, vocab_size)
        assert set(meta['inputs']) == {'os.py', 're/_parser.py'}
    for split in ('train', 'val'):  # the same text
        assert read_documents('stdlib', split) == read_documents('stdlib_bytes', split)
    assert 'stdlib_bytes has the tokens of --tokenizer=bytes' in error_of('stdlib_bytes', tokenizer='gpt2')


def test_a_named_set_that_is_there_is_used(monkeypatch, capsys):
    monkeypatch.setattr(prepare, 'find_inputs', lambda pattern: [('os.py', Path(os.__file__))])
    prepare.prepare('stdlib_bytes')
    before, said = files(), capsys.readouterr()
    prepare.prepare('stdlib_bytes')
    assert files() == before and capsys.readouterr() == said
    assert 'is there already' in error_of('stdlib_bytes', seed=1)


def test_the_same_input_gives_the_same_files():
    text = write('in.jsonl', ''.join(json.dumps({'text': f'document {i}'}) + '\n' for i in range(500)))
    for name, seed in (('a', 1), ('b', 1), ('c', 2)):
        prepare.prepare(name, input=text, tokenizer='bytes', val_fraction=0.1, seed=seed)
    a, b, c = ({path.name: path.read_bytes() for path in Path('data', name).iterdir()} for name in 'abc')
    assert a == b and a['val_000000.bin'] != c['val_000000.bin']
    assert set(a) == {'train_000000.bin', 'val_000000.bin', 'meta.json', 'tokenizer.json', 'token_bytes.npy'}
    val, train = read_documents('a', 'val'), read_documents('a', 'train')
    assert len(val) == 50 and len(train) == 450 and not set(val) & set(train)


def test_all_documents_for_validation():
    for name, texts in (('one', ['a single document']), ('two', ['a', 'b'])):
        write(f'{name}.jsonl', ''.join(json.dumps({'text': text}) + '\n' for text in texts))
        prepare.prepare(name, input=f'{name}.jsonl', tokenizer='bytes', val_fraction=1.0)
        assert read_documents(name, 'val') == [text.encode() for text in texts]
        with pytest.raises(SystemExit, match='no shards for train'):
            Tokens(name, 'train')


@pytest.mark.parametrize('val_fraction', [1e-9, 0.05, 0.5, 0.95, 1 - 1e-9])
@pytest.mark.parametrize('texts', [['a', 'bcdefgh'], ['abc\n'] * 2, ['😀😀'], ['\n' * 8], ['a' * 99, 'é']])
def test_both_splits_have_something(texts, val_fraction):
    write('in/a.jsonl', b'\xef\xbb\xbf' + '\r\n'.join(json.dumps({'text': text}) for text in texts).encode())
    write('in/empty.txt', '')
    prepare.prepare('x', input='in', tokenizer='bytes', val_fraction=val_fraction)
    train, val = (read_documents('x', split) for split in ('train', 'val'))
    assert all(b''.join(parts).decode() for parts in (train, val))
    assert sorted(b''.join(train + val)) == sorted(''.join(texts).encode())


# -----------------------------------------------------------------------------
# kinds of files

def test_parquet():
    pyarrow = pytest.importorskip('pyarrow')
    from pyarrow.parquet import write_table
    os.mkdir('in')
    write_table(pyarrow.table({'n': range(len(NASTY)), 'body': NASTY}), 'in/a.parquet', row_group_size=3)
    prepare.prepare('x', input='in', tokenizer='bytes', field='body', val_fraction=0.3)
    assert unsplit(*(read_documents('x', split) for split in ('train', 'val')), [text.encode() for text in NASTY])
    message = error_of('y', input='in', tokenizer='bytes')
    assert "a.parquet, row 1: not text: no text in --field=text of {'n': 0, 'body': '<|endof" in message
    write_table(pyarrow.table({'text': ['fine', None]}), 'b.parquet')
    assert "b.parquet, row 2: not text: no text in --field=text of {'text': None}" in error_of(
        'y', input='b.parquet', tokenizer='bytes')
    write('c.parquet', 'text')
    assert 'c.parquet' in error_of('y', input='c.parquet', tokenizer='bytes')


def test_zst():
    zstandard = pytest.importorskip('zstandard')
    lines = [json.dumps({'text': f'{i} {text}'}).encode() + b'\n' for text in NASTY for i in range(3)]
    data = b''.join(zstandard.compress(b''.join(lines[i::2])) for i in (0, 1))  # two frames, as parallel tools make
    prepare.prepare('x', input=write('a.jsonl.zst', data), tokenizer='bytes')
    train, val = (read_documents('x', split) for split in ('train', 'val'))
    assert len(b''.join(train + val)) == 3 * len(''.join(NASTY).encode()) + 2 * len(lines)
    for content in (data[:len(data) // 2 - 99], data[:9], b'not zst'):
        assert 'b.jsonl.zst, ' in error_of('y', input=write('b.jsonl.zst', content), tokenizer='bytes')


@pytest.mark.parametrize('package, name', [('zstandard', 'a.jsonl.zst'), ('pyarrow', 'a.parquet')])
def test_missing_package_is_named(monkeypatch, package, name):
    for module in [package, *(module for module in sys.modules if module.startswith(f'{package}.'))]:
        monkeypatch.setitem(sys.modules, module, None)
    assert f'pip install {package}' in error_of('x', input=write(name, 'text'), tokenizer='bytes')


@pytest.mark.parametrize('name', ['a.json', 'a.CSV', 'a.json.gz', 'a.zip', 'a.txt.xz', 'a.txt.zst', 'a.tar.gz'])
def test_what_is_not_text_is_refused_by_its_name(server, name):
    for path in (write(name, '{"text": "some text"}\n' * 100), '.', f'{server.url}/{name}'):
        message = error_of('x', input=path, tokenizer='bytes')
        assert '.txt, .txt.gz, .jsonl, .jsonl.gz, .jsonl.zst, .parquet' in message
    assert not server.requests


@pytest.mark.parametrize('content, what', [
    (b'\x7fELF\0\0', 'byte 0: not text: there are NUL bytes'), (b'text\xff\xfe', 'byte 4: not UTF-8'),
    ('utf-16'.encode('utf-16'), 'byte 0: not UTF-8'), (b'latin-1 \xe9', 'byte 8: not UTF-8')])
def test_what_is_not_text_is_refused_by_what_it_holds(content, what):
    for name in ('a', 'a.bin', 'a.dat.gz'):
        path = write(name, gzip.compress(content) if 'gz' in name else content)
        message = error_of('x', input=path, tokenizer='bytes')
        assert f'{name}, {what}' in message and '.parquet' in message


def test_other_files_of_a_folder_are_counted(capsys):
    for name in ('a.txt', 'b.jsonl.gz.part', 'c.csv', 'd/README.md'):
        write(f'in/{name}', 'some text\n' * 10)
    prepare.prepare('x', input='in', tokenizer='bytes')
    assert list(prepare.read_meta('x')['inputs']) == ['a.txt']
    assert 'in: 3 of its 4 files are not read' in capsys.readouterr().out
    prepare.prepare('y', input='in/d/README.md', tokenizer='bytes')
    assert list(prepare.read_meta('y')['inputs']) == ['README.md']


# -----------------------------------------------------------------------------
# shards and windows

def test_windows_cross_shards(monkeypatch):
    monkeypatch.setattr(prepare, 'SHARD_TOKENS', 1000)
    for i in range(9):
        write(f'in/{i}.txt', bytes(np.random.default_rng(i).integers(0, 128, 777, np.uint8)))
    prepare.prepare('x', input='in/*', tokenizer='bytes', val_fraction=1 / 9)
    shards, _ = read_shards('x', 'train')
    assert [len(shard) for shard in shards] == [1000] * 6 + [8 * 778 - 6000]
    whole, tokens = np.concatenate(shards).tolist(), Tokens('x', 'train')
    assert len(tokens) == len(whole)
    for start, length in ((0, len(whole)), (999, 1), (1000, 1), (999, 2), (500, 2600), (len(whole) - 3, 3), (7, 0)):
        window = tokens.window(start, length)
        assert window.dtype == np.int64 and window.tolist() == whole[start:start + length]
    for start, length in ((-1, 5), (0, len(whole) + 1), (len(whole), 1)):
        with pytest.raises(IndexError):
            tokens.window(start, length)


def test_a_full_last_shard(monkeypatch):
    monkeypatch.setattr(prepare, 'SHARD_TOKENS', 10)
    write('in/a.txt', 'x' * 19)
    write('in/b.txt', 'x' * 19)
    prepare.prepare('x', input='in', tokenizer='bytes', val_fraction=0.5)
    assert [len(shard) for shard in read_shards('x', 'train')[0]] == [10, 10]


def test_large_vocabulary_has_four_bytes():
    more = [f'#{i}'.encode() for i in range(65_600)]
    prepare.prepare('x', input=write('x.txt', '#65599 is late\n' * 20), tokenizer=write_ranks(more=more))
    shards, size = read_shards('x', 'train')
    tokenizer = prepare.read_tokenizer('x')
    assert size == 4 and tokenizer.eot == 65_856 and tokenizer.vocab_size == 65_857
    assert shards[0][0] == tokenizer.eot and max(shards[0][1:]) < tokenizer.eot
    assert Tokens('x', 'train').window(0, 5).tolist() == shards[0][:5]
    assert tokenizer.decode(shards[0]) == b'#65599 is late\n' * 19


@pytest.mark.parametrize('damage', [lambda data: data[:-1], lambda data: b'text' + data[4:], lambda data: data[:500],
                                    lambda data: data + b'\0\0', lambda data: b'', lambda data: data[:1024]])
def test_damaged_shard_is_named(damage):
    prepare.prepare('x', input=write('x.txt', 'some text\n' * 100), tokenizer='bytes')
    path = Path('data/x/train_000000.bin')
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match='train_000000.bin'):
        Tokens('x', 'train')


def test_missing_data_says_what_to_run():
    for read in (prepare.read_meta, prepare.read_tokenizer, prepare.read_token_bytes):
        with pytest.raises(SystemExit, match='python prepare.py --dataset=nothing'):
            read('nothing')
    with pytest.raises(SystemExit, match='val'):
        Tokens('nothing', 'val')


# -----------------------------------------------------------------------------
# tokenizers

def test_bytes_tokenizer():
    tokenizer = Tokenizer.load('bytes')
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.encode('aé') == [97, 0xC3, 0xA9] and tokenizer.encode('') == []
    assert tokenizer.decode([97, 256, 0xFF]) == b'a\xff'
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    assert Tokenizer(json.loads(json.dumps(tokenizer.state()))).encode('x') == [120]


def test_rank_file():
    tokenizer = Tokenizer.load(write_ranks('ranks/bytes'))
    assert tokenizer.name == 'bytes' and tokenizer.eot == 264 and tokenizer.vocab_size == 265
    assert tokenizer.encode('the the') == [257, 258]
    rebuilt = Tokenizer(json.loads(json.dumps(tokenizer.state())))
    for text in NASTY:
        tokens = tokenizer.encode(text)
        assert tokenizer.eot not in tokens and tokens == rebuilt.encode(text)
        assert rebuilt.decode([rebuilt.eot, *tokens]) == text.encode()
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 3, 4, 2, 2, 2, 3, 2] + [0]


def test_rank_file_with_gaps():
    write_ranks()
    with open('small.tiktoken', 'a') as file:
        file.write(base64.b64encode(b'zz').decode() + ' 300\n')
    tokenizer = Tokenizer.load('small.tiktoken')
    assert tokenizer.encode('zz') == [300] and tokenizer.eot == 301 and tokenizer.vocab_size == 302
    assert tokenizer.decode([280, 300, 301]) == b'zz' and tokenizer.token_bytes()[264:].tolist() == [0] * 36 + [2, 0]


def test_llama_3_rank_file():
    more = [f'#{i}'.encode() for i in range(128_000 - 256)]
    tokenizer = Tokenizer.load(write_ranks(more=more))
    assert tokenizer.eot == 128_001 and tokenizer.vocab_size == 128_256
    text = '#5 <|end_of_text|>'
    assert tokenizer.decode(tokenizer.encode(text) + [128_000, 128_001, 128_255]) == text.encode()


def test_text_is_cut_where_tokens_end():
    tokenizer = Tokenizer.load(write_ranks())
    for text in ('in the end\nthe thing\n' * 50_000, '  = the = \n\n    the, in\r\n  \tthe 12 in\n' * 30_000,
                 '在线\n的\n' * 200_000):
        pieces = list(prepare.pieces(text))
        assert len(pieces) > 3 and ''.join(pieces) == text
        assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)


@pytest.mark.skipif(not os.environ.get('TIKTOKEN_CACHE_DIR'), reason="needs GPT-2's files in TIKTOKEN_CACHE_DIR")
def test_gpt2(monkeypatch):
    tokenizer = Tokenizer.load('gpt2')
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    assert tokenizer.encode('Hello world<|endoftext|>') == [15496, 995, 27, 91, 437, 1659, 5239, 91, 29]
    monkeypatch.delenv('TIKTOKEN_CACHE_DIR')
    rebuilt = Tokenizer(json.loads(json.dumps(tokenizer.state())))
    assert rebuilt.encode('Hello world') == [15496, 995] and rebuilt.decode([50256, 995]) == b' world'
    assert tokenizer.token_bytes().sum() == sum(len(token) for token in rebuilt.encoding._mergeable_ranks)


@pytest.mark.parametrize('content', ['YQ== 0\n', 'hello\n', 'YQ== x\n', '', b'\xff\xfe', (b'a',), (b'th', b'th')])
def test_bad_rank_file(content):
    path = write_ranks(more=content) if isinstance(content, tuple) else write('bad.tiktoken', content)
    message = error_of('x', input=write('x.txt', 'text'), tokenizer=path)
    assert path in message and 'BPE rank file' in message


def test_unknown_tokenizer():
    message = error_of('x', input=write('x.txt', 'text'), tokenizer='gtp2')
    assert 'gtp2' in message and 'bytes' in message


def test_tokenizer_that_cannot_be_downloaded(monkeypatch):
    import tiktoken

    def no_network(name):
        raise OSError('no route to host')

    monkeypatch.setattr(tiktoken, 'get_encoding', no_network)
    message = error_of('x', input=write('x.txt', 'text'))
    assert '--tokenizer=gpt2 could not be downloaded' in message and 'no route to host' in message
    assert 'TIKTOKEN_CACHE_DIR' in message and 'bpe:1024' in message


# -----------------------------------------------------------------------------
# training a BPE

def naive_bpe(words, n_tokens):
    """BPE by its definition: count all pairs anew for each token."""
    words = {tuple(word.encode()): count for word, count in words.items()}
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < n_tokens:
        totals = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                totals[pair] += count
        pair = min(totals, key=lambda pair: (-totals[pair], pair), default=None)
        if not totals[pair] > 1:
            break
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in tokens:
            tokens.append(token)
        merged = Counter()
        for word, count in words.items():
            ids = []
            for i in word:
                ids.append(i)
                if tuple(ids[-2:]) == pair:
                    ids[-2:] = [tokens.index(token)]
            merged[tuple(ids)] += count
        words = merged
    return tokens


@pytest.mark.parametrize('seed', range(8))
def test_bpe_is_trained_as_defined(seed):
    draw = np.random.default_rng(seed)
    letters = np.array(list('aab' if seed < 4 else 'aabc é😀'))
    words = {''.join(draw.choice(letters, draw.integers(1, 20))): int(draw.integers(1, 9)) for _ in range(30)}
    n_tokens = 256 + int(draw.integers(1, 100))
    assert prepare.train_bpe(words, n_tokens) == naive_bpe(words, n_tokens)
    assert prepare.train_bpe(dict(reversed(words.items())), n_tokens) == naive_bpe(words, n_tokens)


def test_bpe_is_as_good_as_that_of_tokenizers():
    tokenizers = pytest.importorskip('tokenizers')
    from tokenizers import models, pre_tokenizers, trainers
    texts = [Path(module.__file__).read_text(encoding='utf-8') for module in (os, re, gzip, json)]
    write('in.jsonl', ''.join(json.dumps({'text': text}) + '\n' for text in texts))
    ours = prepare.train_tokenizer(700, prepare.Split([('in.jsonl', Path('in.jsonl'))], 'text', 0.001, 1))
    theirs = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(CL100K), 'isolated')
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    theirs.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=699, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    counts = [sum(len(tokenizer.encode(text)) for text in texts) for tokenizer in (ours, theirs)]
    assert theirs.get_vocab_size() == 699 and counts[0] < 1.01 * counts[1]


def test_bpe_is_trained_on_the_training_part_alone(monkeypatch):
    seen = []
    train_bpe = prepare.train_bpe
    monkeypatch.setattr(prepare, 'train_bpe', lambda words, n: seen.append(words) or train_bpe(words, n))
    draw = np.random.default_rng(0)
    for i in range(50):
        write(f'in/{i}.txt', ''.join(f'word{draw.integers(0, 100)} of{i}\n' for _ in range(100)))
    prepare.prepare('x', input='in', tokenizer='bpe:320', val_fraction=0.2)
    train = read_documents('x', 'train')
    import regex
    assert seen == [Counter(word for text in train for word in regex.findall(prepare.PATTERN, text.decode()))]
    tokenizer, meta = prepare.read_tokenizer('x'), prepare.read_meta('x')
    assert meta['tokenizer'] == 'bpe:320' and meta['vocab_size'] == tokenizer.vocab_size == 320 and tokenizer.eot == 319
    assert b'word' in tokenizer.table and all(tokenizer.table[:319]) and len(set(tokenizer.table)) == 320
    assert max(max(shard) for shard in read_shards('x', 'train')[0]) == 319
    monkeypatch.setattr(prepare, 'BPE_BYTES', len(b''.join(train)) // 4)
    prepare.prepare('y', input='in', tokenizer='bpe:320', val_fraction=0.2)
    assert read_documents('y', 'train') == train
    assert 0.2 < sum(seen[1].values()) / sum(seen[0].values()) < 0.3 and set(seen[1]) <= set(seen[0])


def test_sizes_of_a_bpe():
    path = write('x.txt', 'the cat and the hat\n' * 50)
    for size in ('', '256', '0', '-5', '1e3', '99999999'):
        assert 'bpe:N is trained' in error_of('x', input=path, tokenizer=f'bpe:{size}')
    most = int(re.search(r'for bpe:(\d+) at most', error_of('x', input=path, tokenizer='bpe:100000'))[1])
    assert 'at most' in error_of('x', input=path, tokenizer=f'bpe:{most + 1}')
    for size in (257, most):
        prepare.prepare(f'x{size}', input=path, tokenizer=f'bpe:{size}')
        assert prepare.read_meta(f'x{size}')['vocab_size'] == size
        assert b''.join(read_documents(f'x{size}', 'train')) == b'the cat and the hat\n' * 47


# -----------------------------------------------------------------------------
# a tokenizer.json

def save_hf(folder='hf', pre='gpt2', special=('<|pad|>', '<|endoftext|>'), eos=None, alphabet=True, change=None):
    """A small byte-level BPE as the tokenizers package writes it."""
    tokenizers = pytest.importorskip('tokenizers')
    from tokenizers import Regex, models, pre_tokenizers, trainers
    byte_level = pre_tokenizers.ByteLevel(False, use_regex=pre != 'split')
    first = {'split': [pre_tokenizers.Split(Regex(CL100K), 'isolated')],
             'digits': [pre_tokenizers.Digits(individual_digits=True)],
             'metaspace': [pre_tokenizers.Metaspace()]}.get(pre)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level]) if first else byte_level
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=list(special),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    texts = Path(json.__file__).read_text(encoding='utf-8'), ' 12  34\n\n  5\t' * 9 + 'été de l’' * 9
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    if change:
        change(spec)
    write(f'{folder}/tokenizer.json', json.dumps(spec))
    if eos:
        write(f'{folder}/tokenizer_config.json', json.dumps({'eos_token': eos}))
    return f'hf:{folder}', tokenizer


@pytest.mark.parametrize('pre', ['gpt2', 'split', 'digits'])
def test_tokenizer_json(pre):
    name, theirs = save_hf(pre=pre)
    ours = Tokenizer.load(name)
    assert (ours.name, ours.vocab_size, ours.eot) == ('hf', 700, 1)
    assert ours.decode([0, 1]) == b'' and ours.token_bytes()[:2].tolist() == [0, 0]
    for text in [*NASTY, 'in 1234 or 56\n  7 and\t8  9\n', Path(re.__file__).read_text(encoding='utf-8')]:
        expected = [token for part in re.split(r'(<\|endoftext\|>)', text) for token in
                    (theirs.encode(part).ids if part != '<|endoftext|>' else ours.encode(part))]
        assert ours.encode(text) == expected and ours.decode(expected) == text.encode()
    prepare.prepare('x', input=write('x.txt', 'some text\n' * 99), tokenizer=name)
    assert read_documents('x', 'val') == [b'some text\n' * 5]


@pytest.mark.parametrize('eos, eot', [('<|pad|>', 0), ({'content': '<|pad|>'}, 0), ('<|none|>', 1), (None, 1)])
def test_end_of_text_of_a_tokenizer_json(eos, eot):
    assert Tokenizer.load(save_hf(eos=eos)[0]).eot == eot


def all_splits(spec):
    """Llama 3's has a merge for every two tokens that make up a third."""
    vocab, merges = spec['model']['vocab'], []
    for token in vocab:
        halves = [[token[:i], token[i:]] for i in range(1, len(token))]
        merges += [[left, right] for left, right in halves if left in vocab and right in vocab]
    spec['model']['merges'] = sorted(merges, key=lambda merge: vocab[''.join(merge)])


def test_tokenizer_json_with_all_merges():
    name, theirs = save_hf(pre='split', change=all_splits)
    assert Tokenizer.load(name).encode(NASTY[-1]) == theirs.encode(NASTY[-1]).ids


def swap_merges(spec):
    merges = spec['model']['merges']
    merges[-1], merges[-2] = merges[-2], merges[-1]


def drop_merge(spec):
    token = ''.join(spec['model']['merges'].pop(100))
    spec['model']['merges'] = [merge for merge in spec['model']['merges'] if token not in merge]


def normalize(spec):
    spec['normalizer'] = {'type': 'NFC'}


def prefix(spec):
    spec['pre_tokenizer']['add_prefix_space'] = True


def add_whitespace(spec):
    spec['added_tokens'].append({**spec['added_tokens'][0], 'id': 700, 'content': ' ' * 7, 'special': False})


@pytest.mark.parametrize('kwargs, what', [
    ({'change': swap_merges}, 'not those that BPE'), ({'change': drop_merge}, 'not those that BPE'),
    ({'change': normalize}, 'a normalizer'), ({'change': prefix}, 'other tokens of a sample'),
    ({'change': add_whitespace}, 'other tokens of a sample'), ({'special': ('<|pad|>',)}, 'no end-of-text'),
    ({'pre': 'metaspace'}, 'Metaspace'), ({'alphabet': False}, 'every byte be a token')])
def test_tokenizer_json_that_is_another(kwargs, what):
    message = error_of('x', input=write('x.txt', 'text'), tokenizer=save_hf(**kwargs)[0])
    assert '--tokenizer=hf:hf is no tokenizer that can be had here' in message and what in message


def test_tokenizer_json_that_is_not_there(monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    pytest.importorskip('tokenizers')

    def unknown(name, **kwargs):
        raise OSError(f'404 for {name}')

    monkeypatch.setattr(hub, 'snapshot_download', unknown)
    os.mkdir('folder')
    for name, what in (('folder', 'No such file'), ('some/model', '404 for some/model')):
        assert what in error_of('x', input=write('x.txt', 'text'), tokenizer=f'hf:{name}')
    monkeypatch.setattr(hub, 'snapshot_download', lambda name, **kwargs: 'on-hub')
    save_hf('on-hub')
    assert Tokenizer.load('hf:some/model').name == 'model'
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    assert 'pip install tokenizers' in error_of('x', input='x.txt', tokenizer='hf:folder')


# -----------------------------------------------------------------------------
# errors

@pytest.mark.parametrize('line, what', [
    ('{"text": "a"', 'not JSON'), ('[1]', "no text in --field=text of [1]"), ('7', 'of 7'),
    ('{"id": 1, "body": "a"}', "no text in --field=text of {'id': 1, 'body': 'a'}"),
    ('{"text": null}', "of {'text': None}"), ('{"text": 7}', "of {'text': 7}"),
    ('{"text": "a\\ud800"}', 'half of a surrogate pair'),
    (b'{"text": "\xff"}', 'not UTF-8'), ('[' * 100_000, 'Recursion')])
def test_bad_line_is_named(line, what):
    line = line if isinstance(line, bytes) else line.encode()
    path = write('in.jsonl', b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    message = error_of('x', input=path, tokenizer='bytes')
    assert 'in.jsonl, line 3: ' in message and what in message


def test_bad_utf8_is_named(monkeypatch):
    monkeypatch.setattr(prepare, 'DOCUMENT_BYTES', 1000)
    write('in/good.txt', 'good')
    write('in/zbad.txt', b'0123456789\n' * 500 + b'\xff')
    message = error_of('x', input='in', tokenizer=write_ranks())
    assert 'zbad.txt, byte 5500: not UTF-8' in message


def test_damaged_gz_is_named():
    data = gzip.compress(os.urandom(100_000))
    for content in (data[:50_000], b'not gzip', data[:200] + b'\0' * 200 + data[400:], data + b'more'):
        assert 'a.txt.gz, byte' in error_of('x', input=write('in/a.txt.gz', content), tokenizer='bytes')


@pytest.mark.parametrize('kwargs, what', [
    ({'input': 'none/*.txt'}, 'no such file'), ({'input': 'folder'}, '.jsonl'), ({'input': 'empty.txt'}, 'no text'),
    ({'dataset': 'shakespear'}, 'shakespeare'), ({'dataset': 'a/b', 'input': 'a.txt'}, '--dataset=a/b'),
    ({'dataset': '', 'input': 'a.txt'}, '--dataset'), ({'dataset': 'x.tmp1', 'input': 'a.txt'}, '--dataset=x.tmp1'),
    ({'dataset': '..', 'input': 'a.txt'}, '--dataset'), ({'dataset': 'stdlib', 'input': 'a.txt'}, '--input'),
    ({'input': 'a.txt', 'shards': 2}, '--shards'), ({'dataset': 'fineweb10B', 'input': 'a.txt'}, '--input'),
    ({'input': 'a.txt', 'val_fraction': 0.0}, 'above 0'), ({'input': 'a.txt', 'val_fraction': 1.1}, 'at most 1'),
    ({'dataset': 'fineweb10B', 'tokenizer': 'bytes'}, 'gpt2')])
def test_bad_settings(kwargs, what):
    write('a.txt', 'text')
    write('empty.txt', '')
    write('folder/readme.md', 'not read')
    assert what in error_of(**{'dataset': 'x', 'tokenizer': '' if 'fine' in str(kwargs) else 'bytes', **kwargs})


def test_nothing_is_overwritten():
    path = write('x.txt', 'some text\n' * 100)
    prepare.prepare('x', input=path, tokenizer='bytes')
    assert 'data/x is there already' in error_of('x', input=path, tokenizer='bytes')
    assert len(read_documents('x', 'train')) == 1


def test_names_of_inputs():
    for name in ('a/x.md', 'a/b/x.md', 'c.txt', 'a/[z].txt'):
        write(name, 'some text\n')
    for dataset, pattern, names in (('1', 'a/**/*.md', ['b/x.md', 'x.md']), ('2', os.path.abspath('c.txt'), ['c.txt']),
                                    ('3', '.', ['a/[z].txt', 'c.txt']), ('4', 'a/[z].txt', ['[z].txt'])):
        prepare.prepare(dataset, input=pattern, tokenizer='bytes')
        assert list(prepare.read_meta(dataset)['inputs']) == names


@pytest.mark.skipif(os.name == 'nt' or not hasattr(os, 'geteuid') or os.geteuid() == 0, reason='root may do anything')
def test_no_permission(folder):
    path = write('x.txt', 'text')
    os.chmod(path, 0)
    assert re.search('x.txt.*Permission denied', error_of('x', input=path, tokenizer='bytes'))
    os.chmod(path, 0o600)
    os.mkdir('data', 0o500)
    assert 'Permission denied' in error_of('x', input=path, tokenizer='bytes')


def test_full_disk_is_one_line(monkeypatch):
    def no_space(writer):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(prepare.Writer, 'write', no_space)
    assert 'No space left' in error_of('x', input=write('x.txt', 'text\n' * 50), tokenizer='bytes')


# -----------------------------------------------------------------------------
# downloads

class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; of those in server.broken it sends a half, once. Keeps (path, Range) of each request."""

    def do_GET(self):
        path = self.path.split('?')[0]
        self.server.requests.append((path, self.headers['Range']))
        data = self.server.files.get(path)
        if data is None:
            return self.send_error(404)
        start = 0
        if self.headers['Range'] and self.server.ranges:
            start = int(re.fullmatch(r'bytes=(\d+)-', self.headers['Range'])[1])
            if start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header('Content-Range', f'bytes {start}-{len(data) - 1}/{len(data)}')
        else:
            self.send_response(200)
        self.send_header('Content-Length', str(len(data) - start))
        self.end_headers()
        if path in self.server.broken:
            self.server.broken.remove(path)
            data = data[:len(data) // 2]
        self.wfile.write(data[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.files, server.broken, server.requests, server.ranges = {}, set(), [], True
    server.url = f'http://127.0.0.1:{server.server_address[1]}'
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


TEXT = b''.join(b'line %d of a text\n' % i for i in range(20_000))


def texts(dataset):
    return b''.join(read_documents(dataset, 'train') + read_documents(dataset, 'val'))


def test_download(server):
    server.files['/a.txt.gz'] = gzip.compress(TEXT)
    prepare.prepare('x', input=f'{server.url}/a.txt.gz?key=1', tokenizer='bytes')
    assert texts('x') == TEXT and os.listdir('data') == ['x']
    assert list(prepare.read_meta('x')['inputs']) == [f'{server.url}/a.txt.gz']


@pytest.mark.parametrize('ranges', [True, False])
def test_download_resumes(server, ranges):
    server.files['/a.txt'], server.ranges = TEXT, ranges
    server.broken.add('/a.txt')
    with pytest.raises(SystemExit, match='204,445 bytes too early'):
        prepare.prepare('x', input=f'{server.url}/a.txt', tokenizer='bytes')
    assert os.listdir('data') == ['x.download']
    prepare.prepare('x', input=f'{server.url}/a.txt', tokenizer='bytes')
    assert server.requests == [('/a.txt', 'bytes=0-'), ('/a.txt', f'bytes={len(TEXT) // 2}-')]
    assert texts('x') == TEXT and os.listdir('data') == ['x']


def test_download_errors(server):
    assert '404' in error_of('x', input=f'{server.url}/none.txt', tokenizer='bytes')
    assert 'http://127.0.0.1:9/' in error_of('x', input='http://127.0.0.1:9/a.txt', tokenizer='bytes')
    assert 'http://[' in error_of('x', input='http://[/a.txt', tokenizer='bytes')


def test_named_text_is_checked(server, monkeypatch):
    server.files['/input.txt'] = TEXT
    monkeypatch.setitem(prepare.TEXTS, 'shakespeare', (f'{server.url}/input.txt', '0' * 64))
    with pytest.raises(SystemExit, match='has changed'):
        prepare.prepare('shakespeare', tokenizer='bytes')
    digest = prepare.hashlib.sha256(TEXT).hexdigest()
    monkeypatch.setitem(prepare.TEXTS, 'shakespeare', (f'{server.url}/input.txt', digest))
    prepare.prepare('shakespeare', tokenizer='bytes')
    assert texts('shakespeare') == TEXT and os.listdir('data') == ['shakespeare']


def shard(tokens):
    header = struct.pack('<256i', 20240520, 1, len(tokens), *[0] * 253)
    return header + struct.pack(f'<{len(tokens)}H', *tokens)


@pytest.fixture
def ready_made(server, monkeypatch):
    """A ready-made set of 3 train shards, with a small tokenizer for GPT-2's."""
    server.files.update({f'/web_train_{i:06d}.bin': shard([264, 97 + i, 257] * 100) for i in (1, 2, 3)})
    server.files['/web_val_000000.bin'] = shard([264, 258])
    small = Tokenizer.load(write_ranks())
    monkeypatch.setattr(Tokenizer, 'load', lambda name: small)
    monkeypatch.setitem(prepare.READY_MADE, 'fineweb10B', (f'{server.url}/web_', 3))
    return server


def test_ready_made_shards(ready_made):
    prepare.prepare('fineweb10B', shards=1)
    meta = prepare.read_meta('fineweb10B')
    assert (meta['train'], meta['val']) == ({'tokens': 300}, {'tokens': 2})
    assert set(meta['inputs']) == {'train_000001.bin', 'val_000000.bin'}
    assert Tokens('fineweb10B', 'train').window(0, 4).tolist() == [264, 98, 257, 264]
    del ready_made.requests[:]
    write('data/fineweb10B/theirs.bin', 'no shard of ours')
    prepare.prepare('fineweb10B')  # 0: all
    assert [path for path, _ in ready_made.requests] == ['/web_train_000002.bin', '/web_train_000003.bin']
    assert prepare.read_meta('fineweb10B')['train']['tokens'] == len(Tokens('fineweb10B', 'train')) == 900
    assert os.listdir('data') == ['fineweb10B']


def test_interrupted_ready_made_shards(ready_made):
    prepare.prepare('fineweb10B', shards=1)
    before = {path.name: path.read_bytes() for path in Path('data/fineweb10B').iterdir()}
    ready_made.broken.add('/web_train_000003.bin')
    del ready_made.requests[:]
    with pytest.raises(SystemExit, match='too early'):
        prepare.prepare('fineweb10B', shards=3)
    assert {path.name: path.read_bytes() for path in Path('data/fineweb10B').iterdir()} == before
    prepare.prepare('fineweb10B', shards=3)
    assert ready_made.requests == [('/web_train_000002.bin', 'bytes=0-'), ('/web_train_000003.bin', 'bytes=0-'),
                                   ('/web_train_000003.bin', f'bytes={(1024 + 600) // 2}-')]
    assert len(Tokens('fineweb10B', 'train')) == 900 and os.listdir('data') == ['fineweb10B']


@pytest.mark.parametrize('data', [b'<html>Too many requests</html>', shard([1] * 99)[:-2], shard([1] * 99) + b'\0'])
def test_bad_ready_made_shard(ready_made, data):
    ready_made.files['/web_train_000001.bin'] = data
    with pytest.raises(SystemExit, match='train_000001.bin is not a whole token shard'):
        prepare.prepare('fineweb10B', shards=1)
    assert not Path('data/fineweb10B').exists()


def test_shards_are_not_downloaded_again(ready_made):
    for name in ('web_val_000000.bin', 'web_train_000001.bin', 'web_train_000003.bin'):
        write(f'data/fineweb10B.download/{name}', ready_made.files[f'/{name}'])
    prepare.prepare('fineweb10B', shards=1)
    assert not ready_made.requests and len(Tokens('fineweb10B', 'train')) == 300
    assert os.listdir('data/fineweb10B.download') == ['web_train_000003.bin']  # not asked for, and not removed
    prepare.prepare('fineweb10B')
    assert [path for path, _ in ready_made.requests] == ['/web_train_000002.bin']
    assert len(Tokens('fineweb10B', 'train')) == 900 and os.listdir('data') == ['fineweb10B']


def test_one_process_downloads_at_a_time(server):
    server.files['/a.txt'] = TEXT
    os.makedirs('data/x.download')
    with open('data/x.download/' + re.sub(r'[^\w.]+', '_', f'{server.url}/a.txt') + '.part', 'ab') as other:
        if not prepare.lock(other):
            pytest.skip('has no locks')
        assert 'another process is downloading it' in error_of('x', input=f'{server.url}/a.txt', tokenizer='bytes')
    prepare.prepare('x', input=f'{server.url}/a.txt', tokenizer='bytes')
    assert texts('x') == TEXT


# -----------------------------------------------------------------------------
# shards from elsewhere

def large_shard(tokens):
    return struct.pack('<256i', 20240801, 7, len(tokens), *[0] * 253) + struct.pack(f'<{len(tokens)}I', *tokens)


def test_shards_from_elsewhere():
    tokenizer = write_ranks()
    theirs = {'tinyshakespeare_val.bin': shard([264, 97]), 'fineweb_train_000002.bin': shard([264, 98, 257]),
              'fineweb_train_000001.bin': large_shard([264, 99]), 'VAL2.bin': shard([100])}
    for name, data in theirs.items():
        write(f'theirs/{name}', data)
    write('theirs/state.json', '{}')
    before = files()
    prepare.prepare('x', shards_from='theirs', tokenizer=tokenizer)
    assert {path: time for path, time in files().items() if path.parts[0] != 'data'} == before
    for split, tokens in (('train', [264, 99, 264, 98, 257]), ('val', [100, 264, 97])):
        data = Tokens('x', split)
        assert data.window(0, len(data)).tolist() == tokens
        assert prepare.read_meta('x')[split] == {'tokens': len(tokens)}
    assert prepare.read_meta('x')['tokenizer'] == 'small.tiktoken' and prepare.read_tokenizer('x').eot == 264
    assert prepare.read_token_bytes('x').shape == (265,) and len(prepare.read_meta('x')['inputs']) == 4
    Path('data/x/train_000000.bin').write_bytes(b'')
    assert Path('theirs/fineweb_train_000001.bin').read_bytes() == theirs['fineweb_train_000001.bin']


@pytest.mark.parametrize('name, data, what', [
    ('train.bin', shard([1, 265]), 'train.bin has the id 265, beyond the 265 of small.tiktoken'),
    ('train.bin', shard([1, 2])[:-1], 'train.bin is not a whole'), ('train.bin', b'', 'train.bin is not a whole'),
    ('val.bin', shard([300]), 'val.bin has the id 300'), ('val.bin', None, 'no .bin file with val in its name')])
def test_shards_that_cannot_be_taken_over(name, data, what):
    for path, content in {'train.bin': shard([1, 2]), 'val.bin': shard([3]), name: data}.items():
        if content is not None:
            write(f'theirs/{path}', content)
    assert what in error_of('x', shards_from='theirs', tokenizer=write_ranks())
    assert 'bpe:N is trained' in error_of('x', shards_from='theirs', tokenizer='bpe:512')
    assert '--input or --shards_from' in error_of('x', shards_from='theirs', input='small.tiktoken')


# -----------------------------------------------------------------------------
# several processes, and stopped ones

def prepare_meanwhile(monkeypatch, *args, **kwargs):
    """Have another call of prepare() begin and end while the next one writes."""
    write_shards = prepare.write_shards

    def wrapped(*own):
        monkeypatch.setattr(prepare, 'write_shards', write_shards)
        prepare.prepare(*args, **kwargs)
        return write_shards(*own)

    monkeypatch.setattr(prepare, 'write_shards', wrapped)


def test_two_at_a_time(monkeypatch, capsys):
    one, other = write('one.txt', 'some text\n' * 99), write('other.txt', 'other text\n' * 99)
    prepare_meanwhile(monkeypatch, 'x', input=one, tokenizer='bytes')
    prepare.prepare('x', input=one, tokenizer='bytes')
    out = capsys.readouterr().out
    assert os.listdir('data') == ['x'] and out[:len(out) // 2] == out[len(out) // 2:]
    prepare_meanwhile(monkeypatch, 'y', input=one, tokenizer='bytes')
    with pytest.raises(SystemExit, match='data/y: .*another process may have made it meanwhile, of something else'):
        prepare.prepare('y', input=other, tokenizer='bytes')
    assert read_documents('y', 'train') == read_documents('x', 'train') and sorted(os.listdir('data')) == ['x', 'y']


def test_what_killed_runs_left_is_removed():
    path = write('x.txt', 'some text\n' * 99)
    write('data/x.unfinished-abc/x/train_000000.bin', 'half')
    write('data/y.unfinished-abc/y/train_000000.bin', 'half')
    write('data/z/train_000000.bin', 'not ours')
    prepare.prepare('x', input=path, tokenizer='bytes')
    assert sorted(os.listdir('data')) == ['x', 'z']


def test_what_a_living_run_writes_is_not_removed(monkeypatch):
    path = write('x.txt', 'some text\n' * 99)
    with prepare.new_folder(Path('data/y')) as folder:
        write(folder / 'train_000000.bin', 'half')
        write('data/z.unfinished-abc/x/train_000000.bin', 'half')
        prepare.prepare('x', input=path, tokenizer='bytes')
        assert (folder / 'train_000000.bin').read_bytes() == b'half'
    assert sorted(os.listdir('data')) == ['x', 'y', 'z.unfinished-abc']
    prepare.prepare('w', input=path, tokenizer='bytes')
    assert sorted(os.listdir('data')) == ['w', 'x', 'y']


# -----------------------------------------------------------------------------
# the command

def command(*args):
    return subprocess.run([sys.executable, prepare.__file__, *args], check=False, capture_output=True, text=True,
                          timeout=60)


def test_command():
    write('x.txt', 'text\n' * 100)
    result = command('--dataset=mine', '--input=x.txt', '--tokenizer=bytes')
    assert result.returncode == 0 and result.stderr == ''
    assert 'data/mine train: 476 tokens, 475 bytes, 1 documents' in result.stdout.replace(os.sep, '/')
    assert 'documents too long to be kept whole are cut: 1 times, first at x.txt, byte 475' in result.stdout
    assert read_documents('mine', 'val') == [b'text\n' * 5]
    result = command('--dataset=mine', '--input=x.txt', '--tokenizer=bytes')
    assert result.returncode == 1 and result.stderr.count('\n') == 1 and 'already' in result.stderr
    result = command('--dataste=mine')
    assert result.returncode == 1 and result.stderr.count('\n') == 1 and 'dataset' in result.stderr


def test_the_command_is_stopped(monkeypatch):
    write('x.txt', 'text\n' * 100)
    monkeypatch.setattr(np, 'save', lambda *args: signal.raise_signal(signal.SIGTERM))  # in the midst of writing
    with pytest.raises(SystemExit, match='interrupted'):
        script('prepare.py', '--dataset=mine', '--input=x.txt', '--tokenizer=bytes')
    assert os.listdir('data') == []
