"""
The settings of a script are its own variables and the fields of a dataclass:

    batch_size = 16  # sequences per micro-step
    config = configure(globals(), GPTConfig)

`python train.py config/hourglass_113m.py --batch_size=32` runs the file, applies what it assigns, then what the flags
assign, in this order. `--name` alone sets a bool. A file is Python, sees the values so far, and calls its own names _x.
"""

import ast
import builtins
import contextlib
import difflib
import inspect
import os
import re
import signal
import sys
import time
from pathlib import Path


class Config(dict):
    """{name: value} of all settings. Its attribute `given` has the names that a file or a flag has set."""


def configure(script, dataclass=None, files_of=None, argv=None):
    """Apply config files and flags to the variables of a script and to the fields of a dataclass.

    script: its globals(), in which they are set. dataclass: its fields are settings too; a variable of that name is
    their default. files_of: (name, dataclass) of a script in the same folder, whose config files are accepted, and
    whose defaults the fields get. argv: the arguments, those of the command line if None.
    Returns the Config of all these names. Ends the program with one line if an argument is wrong.
    """
    own, fields, theirs = settings_of(script), settings_of(vars(dataclass or object)), {}
    if files_of:
        variables = variables_of(Path(script['__file__']).with_name(files_of[0]))
        theirs = {**settings_of(vars(files_of[1])), **settings_of(variables)}
    defaults, flags = {**fields, **theirs, **own}, {**own, **fields}
    config, config.given = Config(defaults), set()
    for arg in sys.argv[1:] if argv is None else argv:
        if arg in ('-h', '--help'):
            show_help(script, dataclass, {name: defaults[name] for name in flags})
        if arg.startswith('-'):
            name, equals, text = arg.lstrip('-').partition('=')
            if not equals and type(config.get(name)) is not bool:
                fail(f'{arg}: a flag is written --name=value')
            allowed, assigned = flags, {name: text if equals else 'true'}
        else:
            allowed, assigned = config, run_file(arg, config)
        for name, value in assigned.items():
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                fail(f'{arg}: there is no setting {name!r} here' + (f'; did you mean {near[0]!r}?' if near else ''))
            config[name] = convert(value, defaults[name], f'{arg}: {name}')
            config.given.add(name)
    script.update({name: config[name] for name in own})
    return config


def settings_of(variables):
    """The settings among variables: numbers, texts and bools with lower-case names."""
    return {name: value for name, value in variables.items()
            if name.islower() and not name.startswith('_') and isinstance(value, (bool, int, float, str))}


def variables_of(path):
    """The variables that a script has when it calls configure, without running it: by its imports and assignments."""
    source, variables = Path(path).read_text(encoding='utf-8').partition('\nconfig = configure(')[0], {}
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign))]
    exec(compile(tree, str(path), 'exec'), variables)
    return {'__file__': str(path), **variables}


def show_help(script, dataclass, settings):
    """Print settings with the comments beside them in the source of the script, or else of the dataclass, and exit."""
    sources = Path(script['__file__']).read_text(encoding='utf-8'), inspect.getsource(dataclass or Config)
    comments = dict(reversed(re.findall(r'(?m)^ *(\w+)(?:: \w+)? = .*?  # (.*)$', '\n'.join(sources))))
    show((script['__doc__'] or '').strip() + '\n')
    for name, default in settings.items():
        show(f'  --{name}={default}'.ljust(40) + comments.get(name, ''))
    sys.exit()


def run_file(path, config):
    """Run a config file and return what it assigns."""
    # The file sees the values as it sees built-in names, so that its namespace holds only what it assigns.
    namespace = {'__file__': path, '__builtins__': {**vars(builtins), **config}}
    with fail_on(Exception, f'config file {path}'):
        exec(compile(Path(path).read_text(encoding='utf-8-sig'), path, 'exec'), namespace)
    return {name: value for name, value in namespace.items() if not name.startswith('_')
            and (name in config or not (callable(value) or inspect.ismodule(value)))}


def convert(value, default, what):
    """A value, or its text, in the type of the default."""
    kind = type(default)
    try:
        return {'true': True, 'false': False}[str(value).lower()] if kind is bool else kind(str(value))
    except (KeyError, ValueError):
        fail(f'{what} should be of type {kind.__name__}, like {default!r}')


def show(text='', end='\n'):
    """Print. What stdout cannot show is replaced; once its reader has left, all is dropped."""
    try:
        encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
        print(text.encode(encoding, 'replace').decode(encoding), end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')


def fail(message):
    """End the program with one line on stderr and status 1. Under torchrun, one process of a machine speaks for all."""
    if os.environ.get('LOCAL_RANK', '0') != '0':
        wait_for_torchrun()
    raise SystemExit(' '.join(str(message).split()))


@contextlib.contextmanager
def fail_on(errors, what=''):
    """Where one of these errors is raised, end the program with what is wrong and the error's own words."""
    try:
        yield
    except errors as error:
        fail(f'{what}: {error}' if what else error)


def check_range(settings, names, least, below=2**63):
    """End the program unless least <= value < below for these settings, names in a text."""
    for name in names.split():
        if not least <= settings[name] < below:
            fail(f'{name}={settings[name]}: must be at least {least} and below {below}')


def explain(kind, error, trace):
    """As sys.excepthook: one line if memory ran out, else a traceback. Under torchrun the first to fail speaks."""
    if 'LOCAL_RANK' in os.environ:
        wait_for_torchrun()
    if issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        fail(f'{error}: try smaller batches, shorter contexts or a smaller model')
    sys.__excepthook__(kind, error, trace)


def wait_for_torchrun():
    """Give torchrun the time to end this process, as it does with all as soon as one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(10)
