"""Settings: dataclasses, filled from presets in TOML and from the command line.

    args = settings.parse(cfg=TrainConfig, model_config=GPTConfig, about=__doc__)

    python train.py config/gpt2.toml --pos=alibi --compile    flags win over presets

A field of a dataclass is a setting. Its help is the comment on its line or directly above it, and a
comment `# [name]` starts a group of settings.
"""

import ast
import difflib
import inspect
import math
import sys
import textwrap
import tomllib
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

from nanolong.errors import UserError, require

CONFIG = Path(__file__).resolve().parent.parent / "config"
HIDDEN = ("vocab_size", "extension")  # the dataset and GPT.extend() set these
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def parse(*, about="", paths=None, defaults=None, argv=None, unlisted=(), **classes):
    """Read the command line into one instance of each dataclass, by the names given here.

    Takes --name=value, --name value, --name alone for a bool, and presets, which stack.

    paths: what other words are, for --help; None: there are none. defaults: a function (values by
    name, other words) -> values that stand in for the dataclasses' defaults, such as those of a run
    to resume. unlisted: names of dataclasses that --help leaves out.

    Returns an object with the instances, `given`, the set of names that were set, `flags`, those of
    them that are no preset's, and `paths`, the other words.
    """
    hints = {name: hint for cls in classes.values() for name, hint in settings_of(cls).items()}
    words = list(sys.argv[1:] if argv is None else map(str, argv))
    if "--help" in words or "-h" in words:
        listed = [describe(cls) for name, cls in classes.items() if name not in unlisted]
        others = f"\n  other words: {paths}" if paths else ""
        print(about.strip(), *listed, f"\n  presets: {preset_names()}{others}", sep="\n")
        sys.exit(0)
    presets, flags, others = {}, {}, []
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, value = read_flag(word, words, hints)
            flags[name] = value
        elif word.endswith(".toml"):
            values = read_preset(word)
            presets |= {name: convert(name, value, hints, word) for name, value in values.items()}
        else:
            require(paths, f"{word!r} is no setting: give --name=value or config/NAME.toml")
            others.append(word)
    given = presets | flags
    values = defaults(given, others) if defaults else {}
    values = {name: convert(name, values[name], hints) for name in values.keys() & hints} | given
    args = types.SimpleNamespace(given=set(given), flags=set(flags), paths=others)
    for name, cls in classes.items():
        own = {setting: values[setting] for setting in settings_of(cls) if setting in values}
        setattr(args, name, cls(**own))
    return args


def settings_of(cls):
    """Name -> type of the settings of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.name not in HIDDEN}


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
    return ", ".join(sorted(file.name for file in CONFIG.glob("*.toml")))


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
        limit = ", finite and not negative" if kind in (int, float) else ""
        raise UserError(f"{where}: {name} must be {KINDS[kind]}{limit}") from None


def convert_scalar(value, kind):
    """Convert to bool, int, float or str. Raises ValueError, TypeError, KeyError, OverflowError."""
    if kind is bool:
        return BOOLS[str(value).lower()]
    if isinstance(value, bool) or kind is str and not isinstance(value, str):
        raise TypeError
    if kind is str:
        return value
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError
    if kind is float:
        return number
    # not through a float, which rounds beyond 2^53; 1e3 and 10_000 are whole, too
    digits = str(value).replace("_", "")
    whole = int(digits) if digits.isdecimal() else int(number)
    if whole != number or whole >= 2**63:
        raise ValueError
    return whole


def without_none(hint):
    """The T of a type hint T | None; other hints are returned as they are."""
    return typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint


# -----------------------------------------------------------------------------
# --help.


def describe(cls):
    """A line for each setting of a dataclass, with its default and its comment, in groups."""
    groups, comments = {}, {}
    for base in filter(is_dataclass, cls.__mro__):
        for name, comment in own_comments(base).items():
            comments.setdefault(name, comment)  # what a subclass states comes first
    hints = settings_of(cls)
    defaults = {field.name: field.default for field in fields(cls)}
    for name, (group, comment) in comments.items():
        if name not in hints:
            continue
        kind = without_none(hints[name])
        if typing.get_origin(kind) is typing.Literal:
            comment = f"{'|'.join(typing.get_args(kind))}; {comment}"
        line = f"  --{name + '=' + format_value(defaults[name]):<34} {comment}"
        lines = textwrap.wrap(line, 110, subsequent_indent=" " * 39, break_on_hyphens=False)
        groups.setdefault(group, []).extend(lines)
    return "\n".join(f"\n{group}:\n" + "\n".join(lines) for group, lines in groups.items())


def format_value(value):
    """A value as one would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "''"
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value) or "''"


def own_comments(cls):
    """Name -> (group, comment) of the fields that the class itself states, from its source."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = [line.strip() for line in source.splitlines()]
    comments, group, end = {}, "settings", 0
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        above = []
        for line in lines[end : node.lineno - 1]:  # since the field before
            if line.startswith("# ["):
                group, above = line[3:-1], []
            else:
                above = [*above, line[2:]] if line.startswith("# ") else []
        end = node.end_lineno
        trailing = lines[end - 1].partition("  # ")[2]
        comments[node.target.id] = (group, trailing or " ".join(above))
    return comments
