"""Settings: dataclasses, filled from presets in TOML and from the command line.

    args = settings.parse(cfg=TrainConfig, model_config=GPTConfig)

    python train.py config/gpt2.toml --pos=alibi --compile    flags win over presets

A field of a dataclass is a setting. Its help is the comment on its line or directly above it, and a
comment `# [name]` starts a group of settings. Every script imports this file first: it answers a
Python that is too old, --help, and Ctrl-C during the imports, which take seconds.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python has to be able to run this)
    sys.stderr.write(
        "error: nanoLong needs Python 3.11 or newer, and this is {}.{}: install a newer one and "
        "create the environment with it (python3.11 -m venv .venv)\n".format(*sys.version_info)
    )
    sys.exit(2)

import ast
import difflib
import math
import os
import textwrap
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nanolong.errors import UserError, discard_stdout, require

CONFIG = Path(__file__).resolve().parent.parent / "config"
HIDDEN = ("GPTConfig.vocab_size", "GPTConfig.extension")  # the dataset and GPT.extend() set these
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
MOST = 2**53  # whole numbers are below it
KINDS = {
    bool: "true or false",
    int: "a whole number from 0 on, below 2^53",
    float: "a number, finite and not negative",
    str: "text",
}


def parse(*, paths=None, defaults=None, argv=None, unlisted=(), **classes):
    """Read the command line into one instance of each dataclass, by the names given here.

    Takes --name=value, --name value, --name alone for a bool, and presets, which stack. A flag of
    the type Sequence may be given several times.

    paths: what other words are, for --help; None: there are none. defaults: a function (values by
    name, other words) -> values that stand in for the dataclasses' defaults, such as those of a run
    to resume. unlisted: names of dataclasses that --help leaves out.

    Returns an object with the instances, `given`, the set of names that were set, and `paths`, the
    other words.
    """
    hints = {name: hint for cls in classes.values() for name, hint in settings_of(cls).items()}
    words = list(sys.argv[1:] if argv is None else map(str, argv))
    answer_help(words)  # of a main() that is called
    presets, flags, others = {}, {}, []
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, value = read_flag(word, words, hints)
            is_repeated = name in flags and typing.get_origin(hints[name]) is Sequence
            flags[name] = flags[name] + value if is_repeated else value
        elif word.endswith(".toml"):
            values = read_preset(word)
            presets |= {name: convert(name, value, hints, word) for name, value in values.items()}
        else:
            require(paths, f"{word!r} is no setting: give --name=value or config/NAME.toml")
            others.append(word)
    given = presets | flags
    values = defaults(given, others) if defaults else {}
    values = {name: convert(name, values[name], hints) for name in values.keys() & hints} | given
    args = types.SimpleNamespace(given=set(given), paths=others)
    for name, cls in classes.items():
        own = {setting: values[setting] for setting in settings_of(cls) if setting in values}
        setattr(args, name, cls(**own))
    return args


def settings_of(cls):
    """Name -> type of the settings of a dataclass."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    return {name: hints[name] for name in names if f"{cls.__name__}.{name}" not in HIDDEN}


def read_flag(word, following, hints):
    """The name and value of a flag; its value may be the next of the following words."""
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if not equals:
        is_bool = without_none(hints.get(name)) is bool
        takes_next = following and (not is_bool or following[0].lower() in BOOLS)
        require(is_bool or takes_next or name not in hints, f"--{name} has no value: give one")
        value = following.pop(0) if takes_next and name in hints else "true"
    return name, convert(name, value, hints, f"--{name}={value:.60}")


def read_preset(word):
    """The values of a TOML file, which may be named without its folder."""
    files = [file for file in (Path(word), CONFIG / word, CONFIG.parent / word) if file.is_file()]
    require(files, f"there is no preset {word}: config/ has {preset_names()}")
    try:
        return tomllib.loads(files[0].read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{word} is not valid TOML ({error}): correct it") from None


def preset_names():
    files = sorted(CONFIG.rglob("*.toml"))
    return ", ".join(file.relative_to(CONFIG).as_posix() for file in files)


def convert(name, value, hints, where="the earlier run"):
    """Convert a value, text or of TOML or JSON, to the type of a setting.

    where: the beginning of the error message. Numbers must be finite and not negative.
    """
    if name not in hints:
        similar = difflib.get_close_matches(name, hints, 1)
        advice = f"did you mean --{similar[0]}?" if similar else "--help lists them all"
        raise UserError(f"there is no setting {name!r} ({where}): {advice}")
    kind = without_none(hints[name])
    if kind is not hints[name] and str(value).lower() in ("none", "auto"):
        return None
    if typing.get_origin(kind) is Sequence:
        return (value,) if isinstance(value, str) else tuple(value)
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        items = items if isinstance(items, list | tuple) else [items]
        each = {name: typing.get_args(kind)[0]}
        items = [item.strip() if isinstance(item, str) else item for item in items]
        return tuple(convert(name, item, each, where) for item in items if item != "")
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        require(value in choices, f"{where}: {name} is one of {', '.join(choices)}")
        return value
    try:
        return convert_scalar(value, kind)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise UserError(f"{where}: {name} must be {KINDS[kind]}") from None


def convert_scalar(value, kind):
    """Convert to bool, int, float or str. Raises ValueError, TypeError, KeyError, OverflowError."""
    if kind is bool:
        return BOOLS[str(value).lower()]
    if isinstance(value, bool) or kind is str and not isinstance(value, str):
        raise TypeError
    if kind is str:
        return value
    number = float(value)
    if not 0 <= number < (math.inf if kind is float else MOST):
        raise ValueError
    if kind is float:
        return number
    # 1e3 and 10_000 are whole, too
    if number != int(number):
        raise ValueError
    return int(number)


def without_none(hint):
    """The T of a type hint T | None; other hints are returned as they are."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


# -----------------------------------------------------------------------------
# --help, from the source of a script alone: before torch is imported, which takes seconds.


def answer_help(words):
    """Print --help of the script that is run, and exit, if the words ask for it."""
    file = Path(sys.argv[0])
    if {"--help", "-h"} & set(words) and file.suffix == ".py":
        try:
            print(help_of(file), flush=True)
        except BrokenPipeError:  # whoever reads it has seen enough: python train.py --help | head
            discard_stdout()
        sys.exit(0)


def help_of(file):
    """The text of --help: a script's docstring, and a line for each setting, in groups."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parsed = next(call for call in calls if ast.unparse(call.func) == "settings.parse")
    words = {keyword.arg: keyword.value for keyword in parsed.keywords}
    unlisted = ast.literal_eval(words.get("unlisted", ast.Tuple([])))
    groups = {}
    for name, value in words.items():
        if ast.unparse(value).endswith("Config") and name not in unlisted:
            cls = ast.unparse(value)
            for setting, (group, line) in describe(file, cls).items():
                if f"{cls}.{setting}" not in HIDDEN:
                    groups.setdefault(group, []).append(line)
    lines = [ast.get_docstring(tree)]
    for group, entries in groups.items():
        lines += ["", f"{group}:", *entries]
    lines += ["", *wrap(f"  presets: {preset_names()}; they stack, and flags win")]
    if "paths" in words:
        lines += wrap(f"  other words: {ast.literal_eval(words['paths'])}")
    return "\n".join(lines)


def describe(file, name):
    """Setting -> (group, line) of a dataclass in a file, or in one that this file imports it from.

    The comment of a setting is on its line, or directly above it.
    """
    file, node = find_class(file, name)
    source = file.read_text(encoding="utf-8").splitlines()
    found, group, end = {}, "settings", node.lineno
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        above = []
        for line in map(str.strip, source[end : field.lineno - 1]):  # since the field before
            if line.startswith("# ["):
                group, above = line[3:-1], []
            else:
                above = [*above, line[2:]] if line.startswith("# ") else []
        end = field.end_lineno
        comment = source[end - 1].partition("  # ")[2] or " ".join(above)
        annotation = ast.unparse(field.annotation)
        if annotation.startswith("Literal["):
            choices = ast.literal_eval(field.annotation.slice)
            comment = "|".join(choices) + (f"; {comment}" if comment else "")
        default = format_value(ast.literal_eval(field.value))
        line = f"  --{field.target.id + '=' + default:<34} {comment}"
        found[field.target.id] = (group, "\n".join(wrap(line)))
    for base in node.bases:
        found = {**found, **{k: v for k, v in describe(file, base.id).items() if k not in found}}
    return found


def find_class(file, name):
    """The file that states a class which a file states or imports, and its node."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return find_class(CONFIG.parent / f"{node.module.replace('.', '/')}.py", name)
    raise LookupError(f"{file} has no class {name}")


def wrap(line):
    return textwrap.wrap(line, 110, subsequent_indent=" " * 39, break_on_hyphens=False)


def format_value(value):
    """A value as one would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "''"
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value) or "''"


def exit_if_interrupted(kind, error, traceback):
    """The hook for uncaught errors: errors.run_main() catches Ctrl-C only after the imports."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    sys.__excepthook__(kind, error, traceback)


sys.excepthook = exit_if_interrupted
answer_help(sys.argv[1:])
