"""
The settings of a script are its own variables: no schema, no parser to keep in step.

    # train.py
    batch_size = 16  # sequences per micro-step
    learning_rate = 1e-3  # peak, after the warm-up
    ...
    config = configure(globals())

Then `python train.py config/hourglass_113m.py --batch_size=32` runs the file, sets what it assigns, then what the
flags assign, in this order. A file is Python and sees the values so far; names that begin with an underscore are its
own. `--help` prints the variables with the comments beside them. `--name` alone sets a bool to true.
"""

import ast
import difflib
import io
import os
import signal
import symtable
import sys
import time
import tokenize
import traceback
import types
from pathlib import Path


class Config(dict):
    """{name: value} of all settings; `given` holds the names that a file or a flag has set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.given = set()


def configure(script, also=None, argv=None):
    """Apply config files and flags to the variables of a script.

    script: its globals(), changed in place. also: a second script, beside the first, whose names are accepted as
    well; they end up in the result only. argv: the arguments, those of the command line if None.
    Returns the Config; ends the program with one line if an argument is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    path = Path(script['__file__'])
    own = settings(path)
    others = settings(path.with_name(also)) if also else {}
    others = {name: setting for name, setting in others.items() if name not in own}
    known = {**own, **others}
    if '--help' in argv or '-h' in argv:
        for title, names in ((script['__doc__'].strip(), own), (f'\nand of {also}, where it has a say:', others)):
            if names:
                print(title + '\n')
            for name, (default, comment) in names.items():
                default = str(default).lower() if isinstance(default, bool) else default
                print(f'  --{name}={default}'.ljust(40), comment)
        sys.exit()
    config = Config({name: default for name, (default, _) in known.items()})
    for arg in argv:
        if not arg.startswith('-'):
            assigned = run_file(find(arg, path.parent), config)
        else:
            name, equals, text = arg.lstrip('-').partition('=')
            if not equals and type(config.get(name)) is not bool:
                fail(f'{arg}: a flag is written --name=value')
            assigned = {name: parse(text, config.get(name)) if equals else True}
        for name, value in assigned.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                fail(f'{arg}: there is no setting {name!r}' + (f'; did you mean {near[0]!r}?' if near else ''))
            config[name] = convert(value, known[name][0], f'{arg}: {name}')
            config.given.add(name)
    script.update({name: config[name] for name in own})
    return config


def fail(message):
    """End the program with one line on stderr and status 1. Under torchrun, one process of a machine speaks for all."""
    if int(os.environ.get('LOCAL_RANK', 0)) > 0:
        # torchrun ends every process as soon as one has left: leave the first the time to speak.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(15)
    raise SystemExit(' '.join(str(message).split()))


def settings(path):
    """{name: (default, comment)} of a script's lower-case variables with a literal value, up to its configure()."""
    source = path.read_text(encoding='utf-8')
    comments = {token.start[0]: token.string.lstrip('# ')
                for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    found = {}
    for node in top_level(ast.parse(source)):
        if 'configure(globals()' in ast.unparse(node):
            break
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.islower():
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value), comments.get(node.lineno, '')
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
        source = path.read_text(encoding='utf-8')
        exec(compile(source, str(path), 'exec'), namespace)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, 'lineno', '?')
        fail(f'{path}, line {line}: {type(error).__name__}: {error}')
    assigned = [symbol.get_name() for symbol in symtable.symtable(source, str(path), 'exec').get_symbols()
                if symbol.is_assigned()]
    return {name: namespace[name] for name in assigned if name in namespace and not name.startswith('_')
            and not isinstance(namespace[name], (types.ModuleType, types.FunctionType, type))}


def parse(text, default):
    """The value that a flag's text stands for, where the default is of this type."""
    if isinstance(default, str) and not (default == 'auto' and text.lower() in ('true', 'false')):
        return text
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def convert(value, default, what):
    """The value in the type of the default. 'auto' may also be decided by a bool."""
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is type(default) or (default == 'auto' and type(value) is bool):
        return value
    fail(f'{what} should be of type {type(default).__name__}, like {default!r}, and not {value!r}')
