import subprocess
import sys

import pytest

from configurator import configure
from conftest import ROOT

SCRIPT = """'''What it does.'''
import os

out_dir = 'out'  # where # things go
n_layer = 3  # depth
learning_rate = 1e-3
flag = False
compile = 'auto'
_hidden, CONSTANT, computed = 1, 2, os.getcwd()

from configurator import configure
config = configure(globals())
later = 1
"""
OTHER = "depth = 3  # of the other\nout_dir = 'theirs'\nconfigure(globals())\n"


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Configure the script above with some arguments: its variables and the config."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'other.py').write_text(OTHER)
    monkeypatch.chdir(tmp_path)

    def call(*argv, also=None):
        script = {'__file__': str(tmp_path / 'script.py'), '__doc__': 'What it does.'}
        return script, configure(script, also=also, argv=list(argv))
    return call


def test_arguments_are_applied_in_order_and_known_to_be_set(call, tmp_path):
    (tmp_path / 'a.py').write_text('n_layer = 5\nlearning_rate = 2\n')
    script, config = call('--n_layer=4', 'a.py', '--flag=true')
    assert dict(config) == {'out_dir': 'out', 'n_layer': 5, 'learning_rate': 2.0, 'flag': True, 'compile': 'auto'}
    assert config.given == {'n_layer', 'learning_rate', 'flag'}
    assert script['n_layer'] == 5 and type(script['learning_rate']) is float
    assert call('a.py', '--n_layer=4')[0]['n_layer'] == 4
    assert call()[1].given == set()


def test_files_compute_from_the_values_so_far(call, tmp_path):
    (tmp_path / 'a.py').write_text(
        'import math\nfrom pathlib import Path\n_base = n_layer\n'
        'def _double(x):\n    out_dir = x\n    return 2 * x * len([_base for i in range(1)])\n'
        'n_layer = _double(_base)\nout_dir = out_dir + "x"\n')
    script, config = call('--n_layer=4', 'a.py')
    assert script['n_layer'] == 8 and script['out_dir'] == 'outx' and config.given == {'n_layer', 'out_dir'}


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
    ('a.py', 'n_layer = 1\nn_layer = 1 / 0', 'a.py, line 2: ZeroDivisionError'),
    ('a.py', 'import sys\nsys.exit()', 'a.py, line 2: SystemExit'),
    ('a.py', 'n_layer = (', 'a.py, line 1: SyntaxError'), ('a.py', '\ndepth + 1', 'a.py, line 2: NameError'),
    ('--CONSTANT=3', '', "no setting 'CONSTANT'"), ('--later=3', '', "no setting 'later'"),
    ('--computed=x', '', "no setting 'computed'"), ('--_hidden=2', '', "no setting '_hidden'"),
])
def test_errors_are_one_line(call, tmp_path, arg, content, message):
    (tmp_path / 'a.py').write_text(content)
    with pytest.raises(SystemExit) as error:
        call(arg)
    assert message in str(error.value) and '\n' not in str(error.value)


def test_names_of_a_second_script_are_accepted(call, tmp_path):
    (tmp_path / 'a.py').write_text('depth = 7\nout_dir = "mine"\n')
    script, config = call('a.py', also='other.py')
    assert config['depth'] == 7 and script['out_dir'] == 'mine' and 'depth' not in script
    assert call(also='other.py')[1]['out_dir'] == 'out'  # the script's own default
    with pytest.raises(SystemExit, match="no setting 'width'"):
        call('--width=3', also='other.py')


def test_help_shows_names_defaults_and_comments(call, capsys):
    with pytest.raises(SystemExit) as left:
        call('--help')
    assert not left.value.code
    shown = capsys.readouterr().out
    assert shown.startswith('What it does.')
    lines = [line.split(maxsplit=1) for line in shown.splitlines() if line.startswith('  --')]
    assert ['--out_dir=out', 'where # things go'] in lines and ['--n_layer=3', 'depth'] in lines and len(lines) == 5


@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'prepare.py', 'model.py'])
def test_every_setting_of_every_script_is_explained(script, run):
    lines = [line[40:] for line in run(script, '--help').stdout.splitlines() if line.startswith('  --')]
    assert all(comment.strip() for comment in lines) and lines


def test_configs_work_from_any_directory(tmp_path):
    out = subprocess.run([sys.executable, str(ROOT / 'model.py'), 'config/standard_113m.py'], cwd=tmp_path,
                         capture_output=True, text=True)
    assert out.returncode == 0 and '113,246,208' in out.stdout
