"""prepare.py: what goes in comes out byte for byte, in a format that others read, or else one line says why not."""

import base64
import gzip
import http.server
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from prepare import Tokenizer, Tokens

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


def test_any_byte_round_trip():
    text = bytes(range(256)) * 500 + b'\xff'
    prepare.prepare('x', input=write('x.txt', text), tokenizer='bytes')
    (train,), (val,) = (read_documents('x', split) for split in ('train', 'val'))
    assert train + val == text
    assert train.endswith(b'\n') and abs(len(val) / len(text) - 0.05) < 0.01  # the end, cut off at a newline


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


def test_stdlib():
    prepare.prepare('stdlib')
    meta = prepare.read_meta('stdlib')
    assert meta['tokenizer'] == 'bytes' and meta['vocab_size'] == 257
    assert 'argparse.py' in meta['inputs'] and 'json/decoder.py' in meta['inputs']
    assert not [name for name in meta['inputs'] if re.search('(^|/)(tests?|site-packages)/', name)]
    assert Path(os.__file__).read_bytes() in read_documents('stdlib', 'train') + read_documents('stdlib', 'val')


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


def test_never_all_documents_are_for_validation():
    write('in/a.jsonl', b'\xef\xbb\xbf{"text": "a"}\r\n')
    write('in/b.txt', 'b')
    write('in/empty.txt', '')
    prepare.prepare('x', input='in', tokenizer='bytes', val_fraction=0.99)
    assert len(read_documents('x', 'train')) == len(read_documents('x', 'val')) == 1


@pytest.mark.parametrize('sizes', [[650_000], [1_000_000, 280], [100_000] * 9, [3000] * 300,
                                   [3 ** i for i in range(13)]],
                         ids=['one', 'long and short', 'long', 'short', 'powers'])
def test_validation_is_its_fraction_of_the_bytes(monkeypatch, sizes):
    monkeypatch.setattr(prepare, 'DOCUMENT_BYTES', 64_000)
    texts = []
    for i, size in enumerate(sizes):
        lengths = np.random.default_rng(i).integers(0, 99, size // 50 + 20).tolist()
        texts.append(b''.join(b'%d.%d %s\n' % (i, line, b'x' * n) for line, n in enumerate(lengths))[:size])
        write(f'in/{i:03d}.txt', texts[-1])
    for val_fraction, seed in ((0.002, 1), (0.05, 1), (0.05, 2), (0.5, 1), (0.99, 1)):
        dataset = f'x{val_fraction}-{seed}'.replace('.', '_')
        prepare.prepare(dataset, input='in', tokenizer='bytes', val_fraction=val_fraction, seed=seed)
        train, val = (read_documents(dataset, split) for split in ('train', 'val'))
        n_train, n_val = len(b''.join(train)), len(b''.join(val))
        assert n_train + n_val == sum(sizes) and not set(train) & set(val)
        assert abs(n_val - val_fraction * sum(sizes)) <= (1500 if len(sizes) == 300 else 100)  # half a document, a line
        assert len(train + val) - len(texts) == len(prepare.read_meta(dataset)['cut']) < sum(sizes) / 60_000 + 1
        ends = {text[-50:] for text in texts}
        assert all(part.endswith(b'\n') or part[-50:] in ends for part in train + val)


def test_copies_are_in_the_same_split():
    texts = [f'document {i // 3}' for i in range(999)]
    write('in.jsonl', ''.join(json.dumps({'text': text}) + '\n' for text in texts))
    prepare.prepare('x', input='in.jsonl', tokenizer='bytes', val_fraction=0.2)
    train, val = (set(read_documents('x', split)) for split in ('train', 'val'))
    assert not train & val and len(train | val) == 333


# -----------------------------------------------------------------------------
# shards and windows

def test_windows_cross_shards(monkeypatch):
    monkeypatch.setattr(prepare, 'SHARD_TOKENS', 1000)
    for i in range(9):
        write(f'in/{i}.txt', bytes(np.random.default_rng(i).integers(0, 256, 777, np.uint8)))
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
        pieces = list(tokenizer.pieces(text.encode()))
        assert len(pieces) > 3 and ''.join(pieces) == text
        assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)


@pytest.mark.skipif('TIKTOKEN_CACHE_DIR' not in os.environ, reason="needs GPT-2's files in TIKTOKEN_CACHE_DIR")
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


# -----------------------------------------------------------------------------
# errors

@pytest.mark.parametrize('line, what', [
    ('{"text": "a"', 'JSON'), ('[1]', 'TypeError'), ('{"other": "a"}', "'text'"), ('{"text": null}', 'NoneType'),
    ('{"text": "\\ud800"}', 'surrogates'), (b'{"text": "\xff"}', 'utf-8'), ('7', 'TypeError'),
    ('[' * 100_000, 'Recursion')])
def test_bad_line_is_named(line, what):
    line = line if isinstance(line, bytes) else line.encode()
    path = write('in.jsonl', b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    message = error_of('x', input=path, tokenizer='bytes')
    assert 'in.jsonl, line 3' in message and what in message


def test_bad_utf8_is_named(monkeypatch):
    monkeypatch.setattr(prepare, 'DOCUMENT_BYTES', 1000)
    write('in/good.txt', 'good')
    write('in/zbad.txt', b'0123456789\n' * 500 + b'\xff')
    message = error_of('x', input='in', tokenizer=write_ranks())
    assert 'zbad.txt, byte 5500:' in message and 'utf-8' in message


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
    assert 'x.txt: Permission denied' in error_of('x', input=path, tokenizer='bytes')
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
    with pytest.raises(SystemExit, match='train_000001.bin is damaged'):
        prepare.prepare('fineweb10B', shards=1)
    assert not Path('data/fineweb10B').exists()


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
    assert 'cut in two at x.txt, byte 475' in result.stdout
    assert read_documents('mine', 'val') == [b'text\n' * 5]
    result = command('--dataset=mine', '--input=x.txt', '--tokenizer=bytes')
    assert result.returncode == 1 and result.stderr.count('\n') == 1 and 'already' in result.stderr
    result = command('--dataste=mine')
    assert result.returncode == 1 and result.stderr.count('\n') == 1 and 'dataset' in result.stderr
