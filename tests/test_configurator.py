import io
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from configurator import check_range, configure, explain, fail, fail_on, show
from conftest import ROOT

SCRIPT = """'''What it does.'''
import os

out_dir = 'out'  # where # things go
n_layer = 3
learning_rate = 1e-3
flag = False
compile = 'auto'
_hidden, CONSTANT, computed = 1, 2, os.getcwd()

from configurator import configure
config = configure(globals())
later = 1
"""
OTHER = "steps = 3  # of the other\nwidth = 16\nout_dir = 'theirs'\nconfigure(globals(), Shape)\n"


@dataclass
class Shape:
    """A shape.

    More about it.
    """

    n_layer: int = 12  # depth
    width: int = 64  # of the stream
    kind: str = 'wide'


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Configure the script above with some arguments: its variables and the config."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'other.py').write_text(OTHER)
    monkeypatch.chdir(tmp_path)

    def call(*argv, **kwargs):
        script = {'__file__': str(tmp_path / 'script.py'), '__doc__': 'What it does.'}
        return script, configure(script, argv=list(argv), **kwargs)
    return call


def test_arguments_are_applied_in_order_and_known_to_be_set(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 5\nlearning_rate = 2\n')
    script, config = call('--n_layer=4', 'a.py', '--flag=true')
    assert dict(config) == {'out_dir': 'out', 'n_layer': 5, 'learning_rate': 2.0, 'flag': True, 'compile': 'auto'}
    assert config.given == {'n_layer', 'learning_rate', 'flag'}
    assert script['n_layer'] == 5 and type(script['learning_rate']) is float
    assert call('a.py', '--n_layer=4')[0]['n_layer'] == 4
    assert call()[1].given == set()


def test_a_file_may_begin_with_a_byte_order_mark(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 5', encoding='utf-8-sig')
    assert call('a.py')[0]['n_layer'] == 5


def test_files_compute_from_the_values_so_far(call, tmp_path):
    (tmp_path / 'a.py').write_text(
        'import math\nfrom pathlib import Path\n_base = n_layer\n'
        'def _double(x):\n    out_dir = x\n    return 2 * x * len([_base for i in range(1)])\n'
        'n_layer = _double(_base)\nout_dir = out_dir + "x"\n')
    script, config = call('--n_layer=4', 'a.py')
    assert script['n_layer'] == 8 and script['out_dir'] == 'outx'
    assert config.given == {'n_layer', 'out_dir'}


def test_fields_of_a_dataclass_are_settings_of_the_result(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 2 * width\nkind = kind + "r"')
    script, config = call('--width=5', 'a.py', dataclass=Shape)
    assert config['n_layer'] == script['n_layer'] == 10 and config['width'] == 5 and config['kind'] == 'wider'
    assert config.given == {'width', 'n_layer', 'kind'} and 'width' not in script and 'kind' not in script
    assert call(dataclass=Shape)[1]['n_layer'] == 3  # the script's own default
    with pytest.raises(SystemExit, match='width should be of type int, like 64'):
        call('--width=x', dataclass=Shape)


def test_files_of_another_script_are_read_whose_flags_have_no_say(call, tmp_path):
    (tmp_path / 'a.py').write_text('steps = 7\nout_dir = "mine"\nkind = str(width)\n')
    other = {'files_of': ('other.py', Shape)}
    script, config = call('a.py', **other)
    assert config['steps'] == 7 and script['out_dir'] == 'mine' and config['kind'] == '16'
    assert not {'steps', 'width', 'kind'} & set(script)
    assert call(**other)[1]['out_dir'] == 'out' and call(**other)[1]['n_layer'] == 3  # the script's own defaults
    for flag, problem in (('--steps=1', 'steps is a setting of other.py, which has no effect here'),
                          ('--width=1', 'width is a setting of other.py, which has no effect here'),
                          ('--step=1', "there is no setting 'step'")):
        with pytest.raises(SystemExit) as error:
            call(flag, **other)
        assert error.value.code == f'{flag}: {problem}'
    # the defaults of a dataclass given here as well are those of the other script
    script, config = call('--kind=x', dataclass=Shape, **other)
    assert config['width'] == 16 and config['kind'] == 'x' and config['n_layer'] == 3


@pytest.mark.parametrize('flag, value', [
    ('--out_dir=a=b', 'a=b'), ('--out_dir=', ''), ('--out_dir=3', '3'), ('--learning_rate=1', 1.0),
    ('--learning_rate=-1e-4', -1e-4), ('--flag=True', True), ('--flag', True), ('--flag=false', False),
    ('--compile=true', True), ('--compile=False', False), ('--compile=auto', 'auto'), ('--n_layer=1_000', 1000),
])
def test_values_keep_the_type_of_the_default(call, flag, value):
    result = call(flag)[0][flag[2:].partition('=')[0]]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize('arg, content, message', [
    ('--n_layers=4', '', "--n_layers=4: there is no setting 'n_layers'; did you mean 'n_layer'?"),
    ('a.py', 'n_layers = 4', "a.py: there is no setting 'n_layers'; did you mean 'n_layer'?"),
    ('--n_layer=x', '', "--n_layer=x: n_layer should be of type int, like 3, and not 'x'"),
    ('--n_layer=1.5', '', 'n_layer should be of type int'), ('--n_layer=true', '', 'n_layer should be of type int'),
    ('--flag=1', '', 'flag should be of type bool'), ('a.py', 'flag = 1', 'a.py: flag should be of type bool'),
    ('a.py', 'out_dir = 3', 'out_dir should be of type str'), ('--learning_rate=', '', 'should be of type float'),
    ('--n_layer', '', '--n_layer: a flag is written --name=value'), ('b.py', '', 'b.py: no such config file'),
    ('x' * 300, '', 'x: no such config file'),
    ('a.py', 'n_layer = 1\nn_layer = 1 / 0', 'a.py, line 2: ZeroDivisionError'),
    ('a.py', 'import sys\nsys.exit()', 'a.py, line 2: SystemExit'),
    ('a.py', 'n_layer = (', 'a.py, line 1: SyntaxError'), ('a.py', '\ndepth + 1', 'a.py, line 2: NameError'),
    ('a.py', 'def n_layer(): pass', 'a.py: n_layer should be of type int, like 3, and not <function'),
    ('a.py', 'learning_rate = 10**400', 'a.py: learning_rate must be below 2**63'),
    ('a.py', 'n_layer = -10**5000', 'n_layer must be below 2**63'), ('a.py', 'a\0', 'a.py, line ?: SyntaxError'),
    (f'--n_layer={2**63}', '', 'n_layer must be below 2**63'),
    ('--CONSTANT=3', '', "no setting 'CONSTANT'"), ('--later=3', '', "no setting 'later'"),
    ('--computed=x', '', "no setting 'computed'"), ('--_hidden=2', '', "no setting '_hidden'"),
])
def test_errors_are_one_line(call, tmp_path, arg, content, message):
    (tmp_path / 'a.py').write_text(content)
    with pytest.raises(SystemExit) as error:
        call(arg)
    assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('error', [MemoryError('Unable to allocate 9 TiB'), RuntimeError('CUDA out of memory. Tried'),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")])
def test_too_little_memory_is_one_line(capsys, error):
    with pytest.raises(SystemExit, match='(allocate|CUDA out of).*: try smaller batches, shorter contexts'):
        explain(type(error), error, None)
    explain(ZeroDivisionError, ZeroDivisionError('a mistake'), None)
    assert 'ZeroDivisionError: a mistake' in capsys.readouterr().err


@pytest.mark.parametrize('rank', ['', '0', 'x', '-1', '1.5', '²', None])
def test_failing_is_one_line_whatever_the_environment(monkeypatch, rank):
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    if rank is not None:
        monkeypatch.setenv('LOCAL_RANK', rank)
    with pytest.raises(SystemExit) as error:
        fail('two\nlines')
    assert error.value.code == 'two lines'


def test_what_is_out_of_range_or_was_expected_to_fail_is_one_line():
    check_range({'a': 0, 'b': 0.5}, 'a b', least=0, below=1)
    for value in (-1, 1, math.nan):
        with pytest.raises(SystemExit, match=f'^a={value}: must be at least 0 and below 1$'):
            check_range({'a': value}, 'a', least=0, below=1)
    with pytest.raises(SystemExit, match='^a=inf: must be at least 0 and finite$'):
        check_range({'a': math.inf}, 'a', least=0)
    with pytest.raises(SystemExit, match='^the file: nothing there$'), fail_on(OSError, 'the file'):
        raise OSError('nothing there')
    with pytest.raises(SystemExit, match='^a is wrong$'), fail_on((ValueError, KeyError)):
        raise ValueError('a is wrong')
    with pytest.raises(ZeroDivisionError), fail_on(ValueError):
        raise ZeroDivisionError


@pytest.mark.parametrize('encoding', ['ascii', 'cp1252'])
def test_messages_survive_any_encoding(monkeypatch, encoding):
    command = [sys.executable, '-c', 'from configurator import fail; fail("→ \\udc80 no \xe9")']
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'PYTHONIOENCODING': encoding}, capture_output=True)
    e_acute = b'\\xe9' if encoding == 'ascii' else 'é'.encode(encoding)
    assert done.returncode == 1 and done.stderr.rstrip() == b'\\u2192 \\udc80 no ' + e_acute
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, 'stdout', stdout)
    show('a → b')
    assert stdout.buffer.getvalue().rstrip() == b'a ? b'


def test_output_without_a_reader_ends_quietly():
    code = 'from configurator import show\nfor i in range(10**5): show(str(i))'
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 0 and not done.stderr


def test_help_shows_every_name_once_with_default_and_comment(call, capsys):
    with pytest.raises(SystemExit) as left:
        call('--help', dataclass=Shape, files_of=('other.py', Shape))
    assert not left.value.code
    own, fields = capsys.readouterr().out.split('\nA shape.\n')
    assert own.startswith('What it does.\n\n  --out_dir')
    own, fields = ([line.split(maxsplit=1) for line in lines.splitlines() if line.startswith('  --')]
                   for lines in (own, fields))
    assert ['--out_dir=out', 'where # things go'] in own and ['--n_layer=3', 'depth'] in own and len(own) == 5
    assert fields == [['--width=16', 'of the stream'], ['--kind=wide']]


@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'prepare.py', 'model.py'])
def test_every_setting_of_every_script_is_explained(script, run):
    lines = [line[40:] for line in run(script, '--help').stdout.splitlines() if line.startswith('  --')]
    assert all(comment.strip() for comment in lines) and lines


def test_configs_work_from_any_directory(tmp_path):
    out = subprocess.run([sys.executable, str(ROOT / 'model.py'), 'config/standard_113m.py'], cwd=tmp_path,
                         capture_output=True, text=True)
    assert out.returncode == 0 and '113,246,208' in out.stdout
