import io
import math
import os
import sys
from dataclasses import dataclass

import pytest

from configurator import check_range, configure, explain, show, variables_of

OTHER = """import os
steps, width, out_dir = 3, 4 * 4, os.sep
config = configure(globals(), Shape)
later = 1 / 0
"""


@dataclass
class Shape:
    n_layer: int = 12  # depth
    width: int = 64
    kind: str = 'wide'


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Configure a script with some arguments: its variables and the config."""
    (tmp_path / 'other.py').write_text(OTHER)
    (tmp_path / 'script.py').write_text("out_dir = 'out'  # where # things go\nn_layer = 3\n")
    monkeypatch.chdir(tmp_path)

    def call(*argv, **kwargs):
        script = {'__file__': str(tmp_path / 'script.py'), '__doc__': 'What it does.', 'os': os, 'out_dir': 'out',
                  'n_layer': 3, 'learning_rate': 1e-3, 'eval_tokens': 64 * 1024, 'flag': False, '_own': 1, 'BIG': 2}
        return script, configure(script, argv=list(argv), **kwargs)
    return call


def test_arguments_are_applied_in_order_and_known_to_be_set(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 5\nlearning_rate = 2\n')
    script, config = call('--n_layer=4', 'a.py', '--flag=true')
    assert dict(config) == {'out_dir': 'out', 'n_layer': 5, 'learning_rate': 2.0, 'eval_tokens': 65536, 'flag': True}
    assert config.given == {'n_layer', 'learning_rate', 'flag'} and call()[1].given == set()
    assert script['n_layer'] == 5 and call('a.py', '--n_layer=4')[0]['n_layer'] == 4


def test_files_compute_from_the_values_so_far(call, tmp_path):
    (tmp_path / 'a.py').write_text('import math\nfrom pathlib import Path\n_base = n_layer\n'
                                   'def _double(x):\n    out_dir = x\n    return sum(_base for i in range(2))\n'
                                   'n_layer = _double(_base)\nflag = False', encoding='utf-8-sig')
    script, config = call('--n_layer=4', 'a.py')
    assert script['n_layer'] == 8 and config.given == {'n_layer', 'flag'}


def test_fields_of_a_dataclass_are_settings_too(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 2 * width\nkind = kind + "r"')
    script, config = call('--width=5', 'a.py', dataclass=Shape)
    assert config['n_layer'] == script['n_layer'] == 10 and config['kind'] == 'wider' and 'width' not in script
    assert call(dataclass=Shape)[1]['n_layer'] == 3  # the script's own default


def test_config_files_of_another_script(call, tmp_path):
    (tmp_path / 'a.py').write_text('steps = 7\nkind = str(width)\n')
    script, config = call('a.py', files_of=('other.py', Shape))
    assert (config['steps'], config['kind'], config['out_dir'], config['n_layer']) == (7, '16', 'out', 3)
    assert not {'steps', 'width', 'kind'} & set(script)
    assert call('--kind=x', dataclass=Shape, files_of=('other.py', Shape))[1]['width'] == 16  # the other's default
    assert configure(variables_of(tmp_path / 'other.py'), argv=['--steps=4'])['steps'] == 4


@pytest.mark.parametrize('flag, value', [
    ('--out_dir=a=b', 'a=b'), ('--out_dir=', ''), ('--out_dir=3', '3'), ('--learning_rate=1', 1.0),
    ('--learning_rate=-1e-4', -1e-4), ('--flag=True', True), ('--flag', True), ('--flag=false', False),
    ('--n_layer=1_000', 1000), ('--eval_tokens=1', 1)])
def test_values_keep_the_type_of_the_default(call, flag, value):
    result = call(flag)[0][flag[2:].partition('=')[0]]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize('arg, content, named', [
    ('--n_layers=4', '', "'n_layer'"), ('a.py', 'n_layers = 4', "'n_layer'"), ('--n_layer=x', '', 'n_layer'),
    ('--n_layer=1.5', '', 'n_layer'), ('--n_layer=true', '', 'n_layer'), ('--flag=1', '', 'flag'),
    ('a.py', 'flag = 1', 'flag'), ('--learning_rate=', '', 'learning_rate'), ('--out_dir', '', '--out_dir'),
    ('a.py', 'def n_layer(): pass', 'n_layer'), ('a.py', 'n_layer = -10**5000', 'n_layer'), ('--BIG=3', '', 'BIG'),
    ('--_own=2', '', '_own'), ('--steps=1', '', 'steps'), ('b.py', '', 'b.py'), ('x' * 300, '', 'xxx'),
    ('a.py', 'n_layer = 1 / 0', 'a.py'), ('a.py', 'n_layer = (', 'a.py'), ('a.py', 'a\0', 'a.py')])
def test_a_wrong_argument_is_one_line(call, tmp_path, arg, content, named):
    (tmp_path / 'a.py').write_text(content)
    with pytest.raises(SystemExit) as error:
        call(arg, files_of=('other.py', Shape))
    assert named in error.value.code and '\n' not in error.value.code


def test_too_little_memory_is_one_line():
    with pytest.raises(SystemExit, match='^CUDA out of memory. Tried'):
        explain(RuntimeError, RuntimeError('CUDA out of memory. Tried'), None)


@pytest.mark.parametrize('value', [-1, 1, math.nan, math.inf, 2**63])
def test_what_is_out_of_range_is_one_line(value):
    check_range({'a': 0, 'b': 0.5}, 'a b', least=0, below=1)
    with pytest.raises(SystemExit, match='^a='):
        check_range({'a': value}, 'a', least=0, below=1)


@pytest.mark.parametrize('encoding', ['ascii', 'cp1252'])
def test_output_goes_anywhere(monkeypatch, encoding):
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    show('a → b', end='')
    assert sys.stdout.buffer.getvalue() == b'a ? b'
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, 'stdout', os.fdopen(writing, 'w', 1))  # whose reader has left
    show('a')


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'prepare.py', 'model.py'])
def test_help_explains_every_setting_of_every_script(name, run):
    lines = [line for line in run(name, '--help').stdout.splitlines() if line.startswith('  --')]
    assert all(line[40:].strip() for line in lines) and len({line.split('=')[0] for line in lines}) == len(lines) > 5
