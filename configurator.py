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
import difflib
import functools
import inspect
import io
import os
import re
import signal
import symtable
import sys
import textwrap
import time
import tokenize
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
        show((script['__doc__'] or '').strip() + describe(own))
        if fields:
            show('\n' + dataclass.__doc__.strip().splitlines()[0] + describe(fields))
        sys.exit()
    config = Config({name: default for name, (default, _) in known.items()})
    for arg in argv:
        if not arg.startswith('-'):
            allowed, assigned = known, run_file(find(arg, path.parent), config)
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


def fail(message):
    """End the program with one line on stderr and status 1. Under torchrun, one process of a machine speaks for all."""
    rank = os.environ.get('LOCAL_RANK', '0')
    if rank.isdecimal() and int(rank) > 0:
        # torchrun ends every process as soon as one has left: leave the first the time to speak.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(15)
    raise SystemExit(' '.join(str(message).split()))


def explain(kind, error, trace):
    """As sys.excepthook: a line where there was too little memory, and a traceback of what should not have happened."""
    if issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        fail(f'{error}: try smaller batches, shorter contexts or a smaller model')
    sys.__excepthook__(kind, error, trace)


def show(text='', end='\n'):
    """Print, whatever stdout is: characters that it cannot show are replaced; where it is full, or its reader has left
    as head does, this and all that follows is dropped."""
    try:
        encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
        print(text.encode(encoding, 'replace').decode(encoding), end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')


@functools.lru_cache(maxsize=None)  # the study asks for hundreds of arms
def settings(path, dataclass):
    """The settings of a script, and those of the dataclass that the script does not have, each as {name: (default,
    comment)}."""
    fields = {}
    if dataclass:
        source = textwrap.dedent(inspect.getsource(dataclass))
        fields = literals(source, ast.parse(source).body[0].body)
    source = path.read_text(encoding='utf-8')
    own = {name: (default, comment or fields.get(name, ('', ''))[1])
           for name, (default, comment) in literals(source, top_level(ast.parse(source))).items()}
    return own, {name: setting for name, setting in fields.items() if name not in own}


def literals(source, statements):
    """{name: (default, comment)} of the lower-case names that statements give a literal value, up to a configure()."""
    comments = {token.start[0]: token.string.lstrip('# ')
                for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    found = {}
    for node in statements:
        if 'configure(globals()' in ast.unparse(node):
            break
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        if isinstance(target, ast.Name) and target.id.islower():
            try:
                found[target.id] = ast.literal_eval(node.value), comments.get(node.lineno, '')
            except ValueError:
                pass  # computed, so not a setting
    return found


def top_level(module):
    """The statements of a module, and those of its `if __name__ == '__main__':`."""
    for node in module.body:
        if isinstance(node, ast.If):
            yield from node.body
        elif isinstance(node, (ast.Assign, ast.Expr)):
            yield node


def describe(settings):
    """The lines of --help."""
    lines = ['\n']
    for name, (default, comment) in settings.items():
        default = str(default).lower() if isinstance(default, bool) else default
        lines.append(f'  --{name}={default}'.ljust(40) + comment)
    return '\n'.join(lines)


def find(name, folder):
    """The path of a config file: from the working directory, or else beside the script."""
    for path in (Path(name), folder / name):
        if path.is_file():
            return path
    fail(f'{name}: no such config file (a flag is written --name=value)')


def run_file(path, config):
    """Run a config file, which sees the values so far, and return what it assigns at its top level."""
    namespace = {**config, '__file__': str(path)}
    try:
        source = path.read_text(encoding='utf-8-sig')  # Windows' editors write the mark of it
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
    if isinstance(default, str) and not (default == 'auto' and text.lower() in ('true', 'false')):
        return text
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        return ast.literal_eval(text)
    except Exception:  # whatever Python's parser does not like
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
