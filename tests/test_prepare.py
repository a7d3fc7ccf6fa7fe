"""prepare.py: what goes in comes out byte for byte, in a format that others read, or else one line says why not."""

import base64
import functools
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

import prepare
from conftest import script
from prepare import Tokenizer, Tokens

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r'|\s*[\r\n]+|\s+(?!\S)|\s+')  # as in the tokenizer.json of Llama 3
NASTY = ['<|endoftext|>', 'a<|endoftext|>b\n', '😀 naïve\u2028\x00\r\nend', 'x\ufeffBOM\r\n\r\n', 'no newline', '\n' * 999,
         'in 1234 or 56\n  7 and\t8  9\n', 'e\u0301 \u212b ﬁ', 'def f(x):\n    return x\n' * 20_000, ' ' * 300_000]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_texts(path, texts, field='text'):
    """Write documents in the form that the name says. Of .txt each has a file in the folder of that name."""
    if '.txt' in path:
        for i, text in enumerate(texts):
            write(f'{path}/{i}{path[path.index("."):]}', gzip.compress(text.encode()) if '.gz' in path else text)
    elif '.jsonl' in path:
        lines = '\n\n'.join(json.dumps({field: text}) for text in texts)
        write(path, gzip.compress(lines.encode()) if '.gz' in path else lines)
    else:
        pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
        parquet.write_table(pyarrow.table({'n': range(len(texts)), field: texts}), path, row_group_size=3)
    return path


def ranks_file(path='small.bpe', more=(b'th', b'the', b' the', b'in', b'\n\n', b'  ', b'ret', b'\xf0\x9f')):
    tokens = [bytes([i]) for i in range(256)] + list(more)
    return write(path, ''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens)))


def shard(tokens, magic=20240520, version=1, code='H'):
    return struct.pack('<256i', magic, version, len(tokens), *[0] * 253) + struct.pack(f'<{len(tokens)}{code}', *tokens)


def read_shards(dataset, split):
    """An independent reader: the tokens of each shard."""
    shards = []
    for path in sorted(Path('data', dataset).glob(f'{split}_*.bin')):
        magic, version, count = struct.unpack('<3i', path.read_bytes()[:12])
        size, code = {(20240520, 1): (2, 'H'), (20240801, 7): (4, 'I')}[magic, version]
        shards.append(list(struct.unpack(f'<{count}{code}', path.read_bytes()[1024:])))
        assert path.read_bytes() == shard(shards[-1], magic, version, code)
    return shards


def read_documents(dataset, split):
    """The documents of a split: each begins with bos, and ends with eot if that is another token."""
    tokenizer = prepare.read_tokenizer(dataset)
    tokens = list(itertools.chain(*read_shards(dataset, split)))
    starts = [i for i, token in enumerate(tokens) if token == tokenizer.bos]
    assert tokens[:1] in ([], [tokenizer.bos])
    documents = [tokens[i + 1:j] for i, j in itertools.pairwise([*starts, len(tokens)])]
    if tokenizer.bos != tokenizer.eot:
        assert all(document.pop() == tokenizer.eot for document in documents)
    return [tokenizer.decode(document).decode() for document in documents]


def prepared(dataset='x'):
    """All texts of a data set, those for training first."""
    return read_documents(dataset, 'train') + read_documents(dataset, 'val')


def words(n):
    """n different tokens that are words."""
    return [''.join(letters).encode() for letters in itertools.islice(itertools.product(ascii_lowercase, repeat=4), n)]


def check_state(tokenizer):
    """That a tokenizer made from the state is the same."""
    again = Tokenizer(json.loads(json.dumps(tokenizer.state())))
    assert again.same_tokens(tokenizer) and (again.name, again.vocab_size) == (tokenizer.name, tokenizer.vocab_size)
    assert [again.encode(text) for text in NASTY] == [tokenizer.encode(text) for text in NASTY]


def everything():
    return {path: path.read_bytes() for path in Path().rglob('*') if path.is_file()}


# ----------------------------------------------------------------------------------------------------------------------
# Documents and their split

@pytest.mark.parametrize('form', ['in.txt', 'in.txt.gz', 'in.jsonl', 'in.jsonl.gz', 'in.parquet'])
@pytest.mark.parametrize('tokenizer', ['bytes', 'ranks', 'hf', 'bpe:280'])
def test_round_trip(form, tokenizer):
    name = {'ranks': ranks_file, 'hf': lambda: save_hf('gpt2')[0]}.get(tokenizer, lambda: tokenizer)()
    prepare.prepare('x', input=write_texts(form, NASTY, 'body'), tokenizer=name, field='body', val_fraction=0.3)
    train, val = read_documents('x', 'train'), read_documents('x', 'val')
    for text in NASTY:  # whole, or if it is long in two parts
        assert [part for part in train + val if part == text] == [text] or len(text) > 8192 and any(
            head + tail == text for head in train for tail in val)
    assert sorted(''.join(train + val)) == sorted(''.join(NASTY))
    meta, lengths = prepare.read_meta('x'), prepare.read_tokenizer('x').token_bytes()
    assert lengths.shape == (meta['vocab_size'],)
    for split, texts in (('train', train), ('val', val)):
        tokens, size = Tokens('x', split), len(''.join(texts).encode())
        assert meta[split] == {'tokens': len(tokens), 'bytes': size, 'documents': len(texts)}
        assert lengths[tokens.window(0, len(tokens))].sum() == size
    assert os.listdir('data') == ['x']


def test_documents_are_split_by_a_seeded_draw():
    texts = [f'document {i % 2500} ' + 'word ' * (i % 7) for i in range(3000)]  # some occur twice
    write_texts('in.jsonl', texts)
    for name, seed in (('a', 1), ('b', 1), ('c', 2)):
        prepare.prepare(name, input='in.jsonl', tokenizer='bytes', val_fraction=0.1, seed=seed)
        train, val = read_documents(name, 'train'), read_documents(name, 'val')
        assert Counter(train + val) == Counter(texts) and not set(train) & set(val) and 230 < len(val) < 370
    a, b, c = ({path.name: path.read_bytes() for path in Path('data', name).iterdir()} for name in 'abc')
    assert a == b and a['val_000000.bin'] != c['val_000000.bin']


@pytest.mark.parametrize('val_fraction', [1e-9, 0.05, 0.5, 0.95, 1 - 1e-9])
@pytest.mark.parametrize('texts', [['a', 'bcdefgh'], ['abc\n'] * 4, ['one line\n' * 900], [f'text {i}' for i in range(50)]])
def test_short_documents_are_never_cut_and_no_split_is_empty(texts, val_fraction):
    write_texts('in.jsonl', texts)
    before = everything()
    try:
        prepare.prepare('x', input='in.jsonl', tokenizer='bytes', val_fraction=val_fraction)
    except SystemExit as error:
        assert 'val' in error.code and everything() == before
    else:
        train, val = read_documents('x', 'train'), read_documents('x', 'val')
        assert train and val and Counter(train + val) == Counter(texts)


@pytest.mark.parametrize('text', [('é' * 90 + '\r\n') * 500, '😀' * 10_000])
def test_a_lone_long_text_is_cut_at_a_newline_or_between_characters(text):
    prepare.prepare('x', input=write('x.txt', text), tokenizer=ranks_file())
    (train,), (val,) = read_documents('x', 'train'), read_documents('x', 'val')
    assert train + val == text and abs(len(val) / len(text) - 0.05) < 0.003
    assert train.endswith('\n') or '\n' not in text


def test_all_documents_for_validation():
    prepare.prepare('x', input=write_texts('in.jsonl', ['a', 'b' * 9999]), tokenizer='bytes', val_fraction=1.0)
    assert read_documents('x', 'val') == ['a', 'b' * 9999]
    with pytest.raises(SystemExit):
        Tokens('x', 'train')


@pytest.mark.parametrize('text', ['line\n' * 1000, 'é' * 3001, '\r\n' * 2000])
def test_large_files_are_read_in_parts(monkeypatch, text):
    monkeypatch.setattr(prepare, 'DOCUMENT_SIZE', 1000)
    prepare.prepare('x', input=write('x.txt', text), tokenizer='bytes', val_fraction=1.0)
    parts = read_documents('x', 'val')
    assert ''.join(parts) == text and len(parts) > 1 and all(len(part) <= 2000 for part in parts)
    assert 'line' not in text or all(part.endswith('\n') for part in parts)


@pytest.mark.parametrize('form, content', [('txt', b'text\r\n'), ('jsonl', b'{"text": "text\\r\\n"}\r\n')])
@pytest.mark.parametrize('compress, suffix', [(bytes, ''), (gzip.compress, '.gz')])
def test_a_byte_order_mark_is_no_text(form, content, compress, suffix):
    path = write(f'x.{form}{suffix}', compress(b'\xef\xbb\xbf' + content))
    prepare.prepare('x', input=path, tokenizer='bytes', val_fraction=1.0)
    assert read_documents('x', 'val') == ['text\r\n']


def test_inputs_of_a_glob_a_folder_with_links_and_a_home(monkeypatch, folder):
    for name in ('in/a/x.md', 'in/b/x.md', 'in/c.txt', 'in/[z] é.jsonl', 'elsewhere/d.txt', 'in/image.png'):
        write(name, '{"text": "some text"}\n')
    os.symlink('../elsewhere', 'in/link')
    os.symlink('../elsewhere', 'in/link2')  # read once
    os.symlink('..', 'in/a/up')  # a loop
    monkeypatch.setenv('HOME', str(folder))
    for i, (pattern, names) in enumerate((
            ('in/**/*.md', ['a/x.md', 'b/x.md']), (os.path.abspath('in/c.txt'), ['c.txt']), ('~/elsewhere', ['d.txt']),
            ('in/[z] é.jsonl', ['[z] é.jsonl']), ('in', ['[z] é.jsonl', 'c.txt', 'd.txt']))):
        prepare.prepare(str(i), input=pattern, tokenizer='bytes', val_fraction=1.0)
        assert sorted(re.sub('^link2?/', '', name) for name in prepare.read_meta(str(i))['inputs']) == names


def test_stdlib_is_read_without_its_tests(monkeypatch):
    for name in ('os.py', 'json/decoder.py', 'test/test_os.py', 'json/tests/test.py', 'site-packages/a.py', 'data.txt'):
        write(f'lib/{name}', 'import sys\n' * 999)
    monkeypatch.setattr(os, '__file__', os.path.abspath('lib/os.py'))
    prepare.prepare('stdlib', tokenizer='bytes')
    assert list(prepare.read_meta('stdlib')['inputs']) == ['json/decoder.py', 'os.py']


# ----------------------------------------------------------------------------------------------------------------------
# Shards and their readers

def test_windows_cross_shards(monkeypatch):
    monkeypatch.setattr(prepare, 'SHARD_TOKENS', 1000)
    write_texts('in.jsonl', [str(i) * 777 for i in range(9)])
    prepare.prepare('x', input='in.jsonl', tokenizer='bytes', val_fraction=0.3)
    shards, tokens = read_shards('x', 'train'), Tokens('x', 'train')
    whole = list(itertools.chain(*shards))
    assert {len(shard) for shard in shards[:-1]} == {1000} and len(tokens) == len(whole) > 3000
    for start, length in ((0, len(whole)), (999, 1), (1000, 1), (999, 2), (500, 2600), (len(whole) - 3, 3), (7, 0)):
        window = tokens.window(start, length)
        assert window.dtype == np.int64 and window.tolist() == whole[start:start + length]
    for start, length in ((-1, 5), (0, len(whole) + 1), (len(whole), 1)):
        with pytest.raises(IndexError):
            tokens.window(start, length)


@pytest.mark.parametrize('n_ranks, size', [(65_535, 2), (65_536, 4)])
def test_tokens_have_four_bytes_where_two_are_too_few(n_ranks, size):
    text = f'{words(n_ranks - 256)[-1].decode()} is the last\n' * 999
    prepare.prepare('x', input=write('x.txt', text), tokenizer=ranks_file(more=words(n_ranks - 256)))
    assert ''.join(prepared()) == text and Tokens('x', 'val').window(0, 2).tolist() == [n_ranks, n_ranks - 1]
    assert Path('data/x/val_000000.bin').stat().st_size == 1024 + size * len(Tokens('x', 'val'))


@pytest.mark.parametrize('damage', [lambda data: data[:-1], lambda data: b'text' + data[4:], lambda data: data[:500],
                                    lambda data: data + b'\0\0', lambda data: b'', lambda data: data[:1024]])
def test_damaged_shard_is_named(damage):
    write('data/x/train_000000.bin', damage(shard([1, 2, 3])))
    with pytest.raises(SystemExit, match='^.*train_000000.bin.*$'):
        Tokens('x', 'train')


@pytest.mark.parametrize('read', [prepare.read_meta, prepare.read_tokenizer, functools.partial(Tokens, split='val')])
@pytest.mark.parametrize('content', [None, b'{"vocab', b'[]', b'\xff'])
def test_missing_or_damaged_data_is_named(read, content):
    for name in ('meta.json', 'tokenizer.json') if content else ():
        write(f'data/x/{name}', content)
    with pytest.raises(SystemExit, match='^.*data/x.*$'):
        read('x')


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

def test_bytes_and_rank_files():
    tokenizer = Tokenizer.load('bytes')
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot, tokenizer.bos) == ('bytes', 257, 256, 256)
    assert tokenizer.encode('aé') == [97, 0xC3, 0xA9] and tokenizer.encode('', bos=True) == [256]
    assert tokenizer.decode([97, 256, 0xFF]) == b'a\xff' and tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    tokenizer = Tokenizer.load(ranks_file('ranks/bytes'))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot, tokenizer.bos) == ('bytes', 265, 264, 264)
    assert tokenizer.encode('the the') == [257, 258]
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [2, 3, 4, 2, 2, 2, 3, 2] + [0]
    check_state(tokenizer)
    other = Tokenizer.load(ranks_file('other.bpe', more=[b'th', b'the', b' the', b'in', b'\n\n', b'  ', b'ret', b'yy']))
    assert not other.same_tokens(tokenizer) and not tokenizer.same_tokens(other)
    with open('ranks/bytes', 'a') as file:  # a gap before its last token
        file.write(base64.b64encode(b'zz').decode() + ' 300\n')
    tokenizer = Tokenizer.load('ranks/bytes')
    assert tokenizer.encode('zz') == [300] and (tokenizer.eot, tokenizer.vocab_size) == (301, 302)
    assert tokenizer.decode([280, 300, 301]) == b'zz' and tokenizer.token_bytes()[264:].tolist() == [0] * 36 + [2, 0]


def test_llama_3_rank_file():
    tokenizer = Tokenizer.load(ranks_file(more=words(128_000 - 256)))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eot) == (128_256, 128_000, 128_001)
    tokens = tokenizer.encode('aaab <|end_of_text|>', bos=True)
    assert tokens[:2] == [128_000, 257] and tokenizer.decode([*tokens, 128_001, 128_255]) == b'aaab <|end_of_text|>'
    check_state(tokenizer)


@pytest.mark.parametrize('part', ['in the end\nthe thing\n', '  = the = \n\n    the, in\r\n  \tthe 12 in\n', '在线\n的\n'])
def test_long_texts_have_the_tokens_of_their_parts(part):
    tokenizer = Tokenizer.load(ranks_file())
    assert tokenizer.encode(part * 30_000) == tokenizer.encode(part) * 30_000
    assert tokenizer.decode(tokenizer.encode(' ' * 1_000_000)) == b' ' * 1_000_000


SHAPES = {  # of a tokenizer.json: how it normalizes and cuts text; the special tokens, begin-of-text first if there is
    'gpt2': (None, [], True, ['<|endoftext|>']), 'qwen': ('NFC', ['split'], False, ['<|endoftext|>', '<|im_end|>']),
    'llama3': (None, ['split'], False, ['<|begin_of_text|>', '<|end_of_text|>']),
    'smollm2': (None, ['digits'], True, ['<|endoftext|>', '<|im_start|>'])}


def save_hf(shape, special=None, eos=None, model='BPE', folder='hf'):
    """A small tokenizer.json in the shape of a model's. Returns the name for --tokenizer, and that of tokenizers."""
    tokenizers = pytest.importorskip('tokenizers')
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
    normalizer, cuts, use_regex, known = SHAPES[shape]
    cutters = {'split': pre_tokenizers.Split(tokenizers.Regex(CL100K), 'isolated'),
               'digits': pre_tokenizers.Digits(individual_digits=True)}
    theirs = tokenizers.Tokenizer(getattr(models, model)())
    theirs.normalizer = normalizers.NFC() if normalizer else None
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [cutters[cut] for cut in cuts] + [pre_tokenizers.ByteLevel(False, use_regex=use_regex)])
    alphabet = {'initial_alphabet': pre_tokenizers.ByteLevel.alphabet()} if model != 'WordLevel' else {}
    trainer = getattr(trainers, {'BPE': 'Bpe'}.get(model, model) + 'Trainer')(
        vocab_size=700, show_progress=False, special_tokens=known if special is None else special, **alphabet)
    texts = Path(json.__file__).read_text(encoding='utf-8'), ' 12  34\n\n  5\t' * 9 + 'été de l’' * 9
    theirs.train_from_iterator(texts, trainer)
    if shape == 'llama3':
        theirs.post_processor = processors.TemplateProcessing('<|begin_of_text|> $A', special_tokens=[(known[0], 0)])
    write(f'{folder}/tokenizer.json', theirs.to_str())
    if eos:
        write(f'{folder}/tokenizer_config.json', json.dumps({'eos_token': eos}))
    return f'hf:{folder}', theirs


@pytest.mark.parametrize('shape, eos, bos_and_eot', [
    ('gpt2', None, (0, 0)), ('qwen', '<|im_end|>', (1, 1)), ('qwen', None, (0, 0)), ('llama3', '<|end_of_text|>', (0, 1)),
    ('llama3', {'content': '<|end_of_text|>'}, (0, 1)), ('smollm2', '<|not there|>', (0, 0))])
def test_tokenizers_of_hugging_face(shape, eos, bos_and_eot):
    name, theirs = save_hf(shape, eos=eos)
    ours = Tokenizer.load(name)
    assert (ours.name, ours.vocab_size, ours.bos, ours.eot) == ('hf', 700, *bos_and_eot)
    theirs.encode_special_tokens = True
    for text in [*NASTY, Path(re.__file__).read_text(encoding='utf-8')]:
        tokens = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == tokens and ours.encode(text, bos=True) == [ours.bos, *tokens]
        if shape != 'qwen':  # which normalizes text
            assert ours.decode([ours.bos, *tokens]) == text.encode()
    prepare.prepare('x', input=write_texts('in.jsonl', ['some text'] * 2), tokenizer=name, val_fraction=1.0)
    assert read_documents('x', 'val') == ['some text'] * 2
    check_state(ours)


def slow_bpe(words, n_tokens):
    """BPE by its definition: count all pairs anew for each token."""
    words = {tuple(word.encode()): count for word, count in words.items()}
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < n_tokens:
        totals = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                totals[pair] += count
        pair = min(totals, key=lambda pair: (-totals[pair], pair))
        if tokens[pair[0]] + tokens[pair[1]] not in tokens:
            tokens.append(tokens[pair[0]] + tokens[pair[1]])
        merged = Counter()
        for word, count in words.items():
            ids = []
            for i in word:
                ids.append(i)
                if tuple(ids[-2:]) == pair:
                    ids[-2:] = [tokens.index(tokens[pair[0]] + tokens[pair[1]])]
            merged[tuple(ids)] += count
        words = merged
    return tokens


@pytest.mark.parametrize('letters', ['aab', 'aab ', 'aabc é😀', 'ab 1\n'])
def test_bpe_is_trained_as_defined_on_the_training_text(letters):
    import regex
    draw = random.Random(0)
    write_texts('in.jsonl', [''.join(draw.choices(letters, k=draw.randrange(1, 200))) for _ in range(60)])
    prepare.prepare('x', input='in.jsonl', tokenizer='bpe:300', val_fraction=0.3)
    words = Counter(word for text in read_documents('x', 'train') for word in regex.findall(CL100K, text))
    tokenizer = prepare.read_tokenizer('x')
    assert [tokenizer.decode([i]) for i in range(299)] == slow_bpe(words, 299)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot, tokenizer.bos) == ('bpe:300', 300, 299, 299)
    prepare.prepare('y', input='in.jsonl', tokenizer='data/x/tokenizer.json', val_fraction=0.3)  # again for other data
    assert prepare.read_tokenizer('y').same_tokens(tokenizer) and read_shards('y', 'val') == read_shards('x', 'val')


# ----------------------------------------------------------------------------------------------------------------------
# Ready-made shards and downloads

def test_ready_made_shards_as_input():
    theirs = {'tinyshakespeare_val.bin': shard([264, 97]), 'fineweb_train_000002.bin': shard([264, 98, 257]),
              'fineweb_train_000001.bin': shard([264, 99], 20240801, 7, 'I'), 'VAL2.bin': shard([100])}
    for name, data in theirs.items():
        write(f'theirs/{name}', data)
    before = everything()
    prepare.prepare('x', input='theirs', tokenizer=ranks_file())
    for split, tokens in (('train', [264, 99, 264, 98, 257]), ('val', [100, 264, 97])):
        data = Tokens('x', split)
        assert data.window(0, len(data)).tolist() == tokens and prepare.read_meta('x')[split] == {'tokens': len(tokens)}
    assert prepare.read_meta('x')['tokenizer'] == 'small.bpe' and prepare.read_tokenizer('x').eot == 264
    assert set(prepare.read_meta('x')['inputs']) == set(theirs)
    assert before.items() <= everything().items()


def test_fineweb_is_downloaded_by_huggingface_hub(monkeypatch):
    hub, asked, small = pytest.importorskip('huggingface_hub'), [], Tokenizer.load(ranks_file())

    def download(repository, name, repo_type):
        asked.append((repository, name, repo_type))
        return write(f'cache/{name}', shard([264, len(asked)]))
    monkeypatch.setattr(hub, 'hf_hub_download', download)
    monkeypatch.setattr(Tokenizer, 'load', lambda name: small)
    prepare.prepare('fineweb10B', shards=1)
    names = 'fineweb_val_000000.bin', 'fineweb_train_000001.bin'
    assert asked == [('kjj0/fineweb10B-gpt2', name, 'dataset') for name in names]
    assert Tokens('fineweb10B', 'train').window(0, 2).tolist() == [264, 2] and Path('cache', names[0]).is_file()


def test_shakespeare_is_checked(monkeypatch):
    path = Path(write('theirs.txt', 'line of a play\n' * 999))
    monkeypatch.setattr(prepare, 'SHAKESPEARE', path.resolve().as_uri())
    with pytest.raises(SystemExit, match='^.*shakespeare.*$'):
        prepare.prepare('shakespeare', tokenizer='bytes')
    assert os.listdir('data') == []
    monkeypatch.setattr(prepare, 'SHAKESPEARE_SHA256', hashlib.sha256(path.read_bytes()).hexdigest())
    prepare.prepare('shakespeare', tokenizer='bytes')
    assert ''.join(prepared('shakespeare')) == path.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, and runs that are stopped or not alone

GOOD = 'some text\n' * 1000
GZ = gzip.compress(os.urandom(100_000))
LINE = b'{"text": "fine"}\n\n%s\n{"text": "fine"}\n'


@pytest.mark.parametrize('path, content, settings, named', [
    *(('x.jsonl', LINE % line, {}, 'x.jsonl, line 3') for line in (
        b'{"text": "a"', b'[1]', b'7', b'{"body": "a"}', b'{"text": null}', b'{"text": 7}', b'{"text": "\\ud800"}',
        b'{"text": "\xff"}', b'[' * 100_000)),
    ('in/x.txt', b'0123456789\n' * 2000 + b'\xff', {}, 'x.txt.*22000'), ('x.txt', b'latin-1 \xe9', {}, 'x.txt.* 8'),
    ('x.txt', 'utf-16'.encode('utf-16'), {}, 'x.txt.* 0'), ('x.bin', b'\x7fELF\0\0', {}, 'x.bin'),
    *(('x.txt.gz', data, {}, 'x.txt.gz') for data in (GZ[:50_000], b'no gz', GZ[:200] + b'\0' * 200 + GZ[400:])),
    *((name, GOOD, {}, name) for name in ('x.json', 'x.CSV', 'x.json.gz', 'x.parquet', 'in/x.html')),
    *((f'theirs/{name}', data, {'input': 'theirs', 'tokenizer': 'small.bpe'}, name) for name, data in (
        ('train.bin', shard([1, 265])), ('val.bin', shard([300])), ('val.bin', b''), ('train.bin', shard([1, 2])[:-1]))),
    ('x.txt', GOOD, {'input': 'none.txt'}, 'none.txt'), ('in/x.md', GOOD, {'input': 'in'}, 'input=in'),
    ('x.txt', '', {}, 'train'), ('x.txt', GOOD, {'val_fraction': 0.0}, 'val_fraction=0'),
    ('x.txt', GOOD, {'val_fraction': 1.5}, 'val_fraction=1.5'), ('x.txt', GOOD, {'dataset': 'a/b'}, 'a/b'),
    ('x.txt', GOOD, {'dataset': 'stdlib'}, 'stdlib'), ('x.txt', GOOD, {'dataset': 'x', 'input': ''}, 'dataset=x'),
    ('x.txt', GOOD, {'shards': 3}, 'shards'), ('data/x/mine.txt', GOOD, {}, 'data/x'),
    *(('x.txt', GOOD, {'tokenizer': f'bpe:{n}'}, f'bpe:{n}') for n in ('', '256', '-5', '1e3', '9999999', '5000')),
    ('x.txt', GOOD, {'tokenizer': 'gtp2'}, 'gtp2'), ('x.txt', GOOD, {'tokenizer': 'hf:none'}, 'hf:none'),
    *(('x.bpe', ranks, {'tokenizer': 'x.bpe'}, 'x.bpe') for ranks in ('YQ== 0\n', 'hello\n', 'YQ== x\n', '', b'\xff'))])
def test_bad_input_is_one_line(path, content, settings, named):
    ranks_file()
    for name, data in {'theirs/train.bin': shard([1, 2]), 'theirs/val.bin': shard([3]), path: content}.items():
        write(name, data)
    before = everything()
    with pytest.raises(SystemExit) as error:
        prepare.prepare(**{'dataset': 'x', 'input': path, 'tokenizer': 'bytes', **settings})
    assert re.search(named, error.value.code) and '\n' not in error.value.code
    assert everything() == before and set(Path().glob('data/*')) <= {Path('data/x')} & {path.parent for path in before}


@pytest.mark.parametrize('model, special', [('WordPiece', None), ('Unigram', None), ('WordLevel', None), ('BPE', [])])
def test_other_tokenizers_of_hugging_face_are_one_line(model, special):
    name, _ = save_hf('gpt2', special, model=model)
    with pytest.raises(SystemExit, match='^.*hf:hf.*$'):
        prepare.prepare('x', input=write('x.txt', GOOD), tokenizer=name)


@pytest.mark.parametrize('package, settings', [
    ('pyarrow', {'input': 'x.parquet'}), ('tokenizers', {'tokenizer': 'hf:hf'}), ('regex', {'tokenizer': 'bpe:300'}),
    ('huggingface_hub', {'tokenizer': 'hf:a/b'})])
def test_missing_package_is_named(monkeypatch, package, settings):
    save_hf('gpt2')
    write('x.parquet', GOOD)
    for module in [package, *(module for module in sys.modules if module.startswith(f'{package}.'))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=f'^.*{package}.*$'):
        prepare.prepare(**{'dataset': 'x', 'input': write('x.txt', GOOD), 'tokenizer': 'bytes', **settings})


def test_a_killed_run_leaves_no_data_set_and_can_be_repeated():
    write('x.txt', GOOD)
    code = 'import os, prepare; os.rename = lambda *_: os._exit(9); prepare.prepare("x", "x.txt", "bytes")'
    folder = Path(prepare.__file__).parent
    assert subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(folder)}).returncode == 9
    assert not Path('data/x').exists()
    prepare.prepare('x', input='x.txt', tokenizer='bytes')
    assert ''.join(prepared()) == GOOD


def full(*_, **__):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('happens', [full, lambda *_, **__: signal.raise_signal(signal.SIGTERM),
                                     lambda *_, **__: signal.raise_signal(signal.SIGINT)])
def test_a_stopped_run_leaves_nothing(monkeypatch, happens):
    write('x.txt', GOOD)
    monkeypatch.setattr(Path, 'write_text', happens)
    with pytest.raises(SystemExit) as error:
        script('prepare.py', '--dataset=x', '--input=x.txt', '--tokenizer=bytes')
    assert '\n' not in error.value.code and os.listdir('data') == []


@pytest.mark.parametrize('text, agrees', [(GOOD, True), ('other text\n' * 999, False)])
def test_two_runs_at_once(monkeypatch, text, agrees):
    write('one.txt', GOOD)
    write('two/one.txt', text)
    rename = os.rename

    def other_run_first(*paths):
        monkeypatch.setattr(os, 'rename', rename)
        prepare.prepare('x', input='two/one.txt', tokenizer='bytes')
        rename(*paths)
    monkeypatch.setattr(os, 'rename', other_run_first)
    if agrees:
        prepare.prepare('x', input='one.txt', tokenizer='bytes')
    else:
        with pytest.raises(SystemExit, match='^.*data/x.*$'):
            prepare.prepare('x', input='one.txt', tokenizer='bytes')
    assert os.listdir('data') == ['x'] and ''.join(prepared()) == text


def test_command(run):
    write('x.txt', GOOD)
    done = run('prepare.py', '--dataset=mine', '--input=x.txt', '--tokenizer=bytes', alone=True)
    assert f'{len(Tokens("mine", "train")):,} tokens' in done.stdout and done.stderr == ''
    before = everything()
    for flags in (['--dataset=mine', '--input=x.txt'], ['--dataste=mine']):
        done = run('prepare.py', *flags, status=1)
        assert done.stderr.count('\n') == 1 and everything() == before
