"""
The settings of a script are its own variables, and the fields of a dataclass: no schema, no parser to keep in step.

    # train.py
    batch_size = 16  # sequences per micro-step
    learning_rate = 1e-3  # peak, after the warm-up
    n_layer = 4  # overrides the default of GPTConfig.n_layer, whose comment explains it
    ...
    config = configure(globals(), GPTConfig)

Then `python train.py config/hourglass_113m.py --batch_size=32` runs the file, sets what it assigns, then what the
flags assign, in this order. A file is Python and sees the values so far; names that begin with an underscore are its
own. `--help` prints the settings with the comments beside them. `--name` alone sets a bool to true.
"""

import ast
import contextlib
import difflib
import functools
import inspect
import math
import os
import re
import signal
import symtable
import sys
import time
import traceback
import types
from pathlib import Path


class Config(dict):
    """{name: value} of all settings. `given` holds the names that a file or a flag has set, `defaults` all defaults."""

    def __init__(self, defaults):
        super().__init__(defaults)
        self.defaults, self.given = dict(defaults), set()


def configure(script, dataclass=None, files_of=None, argv=None):
    """Apply config files and flags to the variables of a script and to the fields of a dataclass.

    script: its globals(), in which its own variables are set. dataclass: its fields are settings too, with the script's
    value as their default where the script has a variable of that name. files_of: (script, dataclass) of another
    script in the same folder, whose config files are accepted: what only they know is no flag here. The fields then
    have their defaults from there. argv: the arguments, those of the command line if None.
    Returns the Config of all these names; ends the program with one line if an argument is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    path = Path(script['__file__'])
    own, fields = settings(path, dataclass)
    others = {}
    if files_of:
        theirs, rest = settings(path.with_name(files_of[0]), files_of[1])
        others = {**rest, **theirs}
        fields = {name: others.get(name, setting) for name, setting in fields.items()}
    flags = {**own, **fields}
    known = {**others, **flags}
    if '--help' in argv or '-h' in argv:
        describe((script['__doc__'] or '').strip(), own)
        if fields:
            describe('\n' + dataclass.__doc__.strip().splitlines()[0], fields)
        sys.exit()
    config = Config({name: default for name, (default, _) in known.items()})
    for arg in argv:
        if not arg.startswith('-'):
            files = [file for file in (Path(arg), path.parent / arg) if os.path.isfile(file)]  # or beside the script
            if not files:
                fail(f'{arg}: no such config file (a flag is written --name=value)')
            allowed, assigned = known, run_file(files[0], config)
        else:
            name, equals, text = arg.lstrip('-').partition('=')
            if not equals and type(config.get(name)) is not bool:
                fail(f'{arg}: a flag is written --name=value')
            allowed, assigned = flags, {name: parse(text, config.get(name)) if equals else True}
        for name, value in assigned.items():
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                fail(f'{arg}: {name} is a setting of {files_of[0]}, which has no effect here' if name in known else
                     f'{arg}: there is no setting {name!r}' + (f'; did you mean {near[0]!r}?' if near else ''))
            config[name] = convert(value, known[name][0], f'{arg}: {name}')
            config.given.add(name)
    script.update({name: config[name] for name in own})
    return config


@functools.cache  # the study asks for hundreds of arms
def settings(path, dataclass):
    """The settings of a script, and those of the dataclass that the script does not have, each as {name: (default,
    comment)}."""
    fields = literals(inspect.getsource(dataclass), '    ') if dataclass else {}
    source = path.read_text(encoding='utf-8').partition('configure(globals()')[0]
    script, _, main = source.partition("if __name__ == '__main__':")
    own = {**literals(script, ''), **literals(main, '    ')}
    own = {name: (default, comment or fields.get(name, ('', ''))[1]) for name, (default, comment) in own.items()}
    return own, {name: field for name, field in fields.items() if name not in own}


def literals(source, indent):
    """{name: (default, comment)} of lines `name = literal  # comment` or `name: type = ...`, with this indent."""
    found = {}
    line = rf'^{indent}([a-z][a-z0-9_]*)(?:: \w+)? = (.*?)(?:  # (.*))?$'
    for name, value, comment in re.findall(line, source, re.MULTILINE):
        with contextlib.suppress(ValueError, SyntaxError):  # computed, so not a setting
            found[name] = ast.literal_eval(value), comment
    return found


def describe(title, settings):
    """Print lines of --help."""
    show(title + '\n')
    for name, (default, comment) in settings.items():
        default = str(default).lower() if isinstance(default, bool) else default
        show(f'  --{name}={default}'.ljust(40) + comment)


def run_file(path, config):
    """Run a config file, which sees the values so far, and return what it assigns at its top level."""
    namespace = {**config, '__file__': str(path)}
    try:
        source = path.read_text(encoding='utf-8-sig')  # which Windows' editors write
        exec(compile(source, str(path), 'exec'), namespace)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = (lines or [getattr(error, 'lineno', None) or '?'])[-1]
        fail(f'{path}, line {line}: {type(error).__name__}: {error}')
    assigned = [symbol.get_name() for symbol in symtable.symtable(source, str(path), 'exec').get_symbols()
                if symbol.is_assigned()]
    return {name: namespace[name] for name in assigned if name in namespace and not name.startswith('_')
            and (name in config or not isinstance(namespace[name], (types.ModuleType, types.FunctionType, type)))}


def parse(text, default):
    """The value that a flag's text stands for, where the default is of this type."""
    if text.lower() in ('true', 'false') and (default == 'auto' or not isinstance(default, str)):
        return text.lower() == 'true'
    if not isinstance(default, str):
        with contextlib.suppress(Exception):  # whatever Python's parser does not like
            return ast.literal_eval(text)
    return text


def convert(value, default, what):
    """The value in the type of the default. 'auto' may also be decided by a bool."""
    if type(value) is int and abs(value) >= 2**63:  # which neither numpy nor torch take, nor a float from some size on
        fail(f'{what} must be below 2**63 and above -2**63')
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is type(default) or (default == 'auto' and type(value) is bool):
        return value
    fail(f'{what} should be of type {type(default).__name__}, like {default!r}, and not {value!r}')


# ----------------------------------------------------------------------------------------------------------------------
# What a user is told: lines, and no tracebacks


def show(text='', end='\n'):
    """Print, whatever stdout is: characters that it cannot show are replaced; where it is full, or its reader has left
    as head does, this and all that follows is dropped."""
    try:
        encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
        print(text.encode(encoding, 'replace').decode(encoding), end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')


def fail(message):
    """End the program with one line on stderr and status 1. Under torchrun, one process of a machine speaks for all."""
    rank = os.environ.get('LOCAL_RANK', '0')
    if rank.isdecimal() and int(rank) > 0:
        wait_for_torchrun(15)
    raise SystemExit(' '.join(str(message).split()))


@contextlib.contextmanager
def fail_on(errors, what=''):
    """Where one of these errors is raised, end the program with what is wrong and the error's own words."""
    try:
        yield
    except errors as error:
        fail(f'{what}: {error}' if what else error)


def check_range(settings, names, least, below=math.inf):
    """End the program unless least <= value < below for these settings, names in a text."""
    for name in names.split():
        if not least <= settings[name] < below:
            end = 'finite' if below == math.inf else f'below {below}'
            fail(f'{name}={settings[name]}: must be at least {least} and {end}')


def explain(kind, error, trace):
    """As sys.excepthook: a line where there was too little memory, and a traceback of what should not have happened.
    Where one process of torchrun's fails, those that wait for it fail too, and leave it to torchrun to end them."""
    if 'LOCAL_RANK' in os.environ:
        wait_for_torchrun(10)
    if issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        fail(f'{error}: try smaller batches, shorter contexts or a smaller model')
    sys.__excepthook__(kind, error, trace)


def wait_for_torchrun(seconds):
    """Give torchrun the time to end this process, as it does with all as soon as one has left."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)
