"""Settings: dataclasses, filled from presets in TOML and from the command line.

    args = settings.parse(cfg=TrainConfig, model_config=GPTConfig)

    python train.py config/gpt2.toml --pos=alibi --compile    flags win over presets

A field of a dataclass is a setting. Its help is the comment on its line or directly above it, and a
comment `# [name]` starts a group of settings. Every script imports this file first: it answers a
Python that is too old.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python has to be able to run this)
    sys.stderr.write(
        "error: nanoLong needs Python 3.11 or newer, and this is {}.{}: install a newer one and "
        "create the environment with it (python3.11 -m venv .venv)\n".format(*sys.version_info)
    )
    sys.exit(2)

import difflib
import functools
import inspect
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path

from nanolong.errors import UserError, check_choice, require

CONFIG = Path(__file__).resolve().parent.parent / "config"
HIDDEN = ("GPTConfig.vocab_size", "GPTConfig.extension")  # the dataset and GPT.extend() set these
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LIMITS = {int: 2**53, float: 3e38}  # numbers are below; float32 ends at 3.4e38
KINDS = {
    bool: "true or false",
    int: "a whole number from 0 on, below 2^53, in digits (8192, not 8k)",
    float: "a number from 0 on, finite in float32",
    str: "text",
}


def parse(*, paths=None, defaults=None, argv=None, unlisted=(), first=(), **classes):
    """Read the command line into one instance of each dataclass, by the names given here.

    Accepts --name=value, --name value, --name for a true bool, and presets, which stack. A flag of
    the type Sequence may be given several times. Returns an object with the instances, `given`, the
    set of names that were set, and `paths`, the other words.

    paths: what other words are, for --help; None: there are none. defaults: a function (values by
    name, other words) -> values that stand in for the dataclasses' defaults, such as a resumed
    run's. unlisted: names of dataclasses that --help leaves out. first: the settings that --help
    shows, with --help-all for every one; (): --help shows every one.
    """
    known = {name: settings_of(cls) for name, cls in classes.items()}
    hints = {name: row[0] for rows in known.values() for name, row in rows.items()}
    words = list(sys.argv[1:] if argv is None else map(str, argv))
    if {"--help", "-h", "--help-all"} & set(words):
        listed = [cls for name, cls in classes.items() if name not in unlisted]
        shown = first if "--help-all" not in words else ()
        print(help_of(listed, paths, shown), flush=True)
        sys.exit(0)
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
            require(paths, f"unexpected argument {word!r}: give --name=value or config/NAME.toml")
            others.append(word)
    given = presets | flags
    values = defaults(given, others) if defaults else {}
    values = {name: convert(name, values[name], hints) for name in values.keys() & hints} | given
    args = types.SimpleNamespace(given=set(given), paths=others)
    for name, cls in classes.items():
        own = values.keys() & known[name]
        setattr(args, name, cls(**{setting: values[setting] for setting in own}))
    return args


def read_flag(word, following, hints):
    """The name and value of a flag; its value may be the next of the following words."""
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if not equals:
        hint = hints.get(name)
        is_bool = hint in (bool, bool | None)
        is_value = following and not following[0].startswith("--")
        takes_next = is_value and (not is_bool or following[0].lower() in BOOLS)
        require(is_bool or takes_next or name not in hints, f"--{name} has no value: give one")
        value = following.pop(0) if takes_next and name in hints else "true"
    return name, convert(name, value, hints, f"--{name}={value:.60}")


def read_preset(word):
    """The values of a TOML file, which may be named without its folder."""
    files = [file for file in (Path(word), CONFIG / word, CONFIG.parent / word) if file.is_file()]
    if not files:
        check_choice(word, preset_names(), "preset")
    try:
        return tomllib.loads(files[0].read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{word} is not valid TOML ({error}): correct it") from None


def preset_names():
    return [file.relative_to(CONFIG).as_posix() for file in sorted(CONFIG.rglob("*.toml"))]


# settings of earlier versions: what went, and what to do instead
GONE = {
    "parallel": "nanoLong trains by DDP; for sharding see torchtitan",
    "sequence_parallel": "a sequence is on one GPU; for longer ones see torchtitan",
    "random_positions": "train with extend.py --pose=true",
    **dict.fromkeys(
        [f"score_scale{part}" for part in ("", "_length", "_coefficient", "_offset", "_layers")],
        "give --query_scale=logn or llama4:LENGTH:COEFFICIENT:OFFSET, with @nope for some layers",
    ),
    "store": "matrices keep the dtype of their file",
}


def convert(name, value, hints, where="the earlier run"):
    """Convert a value, text or of TOML or JSON, to a setting's type. where: how an error begins."""
    check_name(name, hints, where)
    kind = hints[name]
    if isinstance(kind, types.UnionType):  # T | None
        kind = typing.get_args(kind)[0]
        if str(value).lower() in ("none", "auto"):
            return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Sequence:
        return (value,) if isinstance(value, str) else tuple(value)
    if origin is tuple:
        return convert_items(name, value, arguments[0], where)
    if origin is typing.Literal:
        check_choice(value, arguments, f"--{name}" if "--" in where else f"{name} in {where}")
        return value
    return convert_one(name, value, kind, where)


def check_name(name, hints, where):
    """Raise UserError for the name of no setting, and advise another."""
    if name in hints:
        return
    require(name not in GONE, f"--{name} went: {GONE.get(name)}")
    similar = difflib.get_close_matches(name, hints, 1)
    advice = f"did you mean --{similar[0]}?" if similar else "--help-all lists every one"
    raise UserError(f"unknown setting --{name} ({where}): {advice}")


def convert_items(name, value, kind, where):
    """Convert a list, or words with commas between them, to a tuple of this type."""
    items = value if isinstance(value, list | tuple) else map(str.strip, str(value).split(","))
    example = ",".join(typing.get_args(kind)[:2]) or "1,2,3"
    try:
        return tuple(convert(name, x, {name: kind}, f"{x!r} in {where}") for x in items if x != "")
    except UserError as error:
        raise UserError(f"{error}, or several, as in --{name}={example}") from None


def convert_one(name, value, kind, where):
    """Convert a value to a text, a bool, or a number, which is finite and not negative."""
    if kind is str and isinstance(value, str):
        return value
    try:
        if kind is bool:
            return BOOLS[str(value).lower()]
        number = kind(float(value))  # by float, because 1e3 and 10_000 are whole numbers
        if not isinstance(value, bool) and 0 <= number < LIMITS[kind] and number == float(value):
            return number
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    raise UserError(f"{where}: {name} must be {KINDS[kind]}")


def read_options(text):
    """The options of a method as a dict, from NAME=VALUE,NAME=VALUE or a .json file."""
    try:
        if text.endswith(".json"):
            options = json.loads(Path(text).read_text(encoding="utf-8"))
        else:
            pairs = [item.split("=") for item in filter(None, text.split(","))]
            require(all(len(pair) == 2 for pair in pairs), "lists go into a file")
            options = {name: parse_option(value) for name, value in pairs}
        if {"self", "method", "factor", "layers"}.isdisjoint(options.keys()):
            return options
        problem = "it sets an option that has its own flag"
    except (OSError, ValueError, AttributeError, UserError) as error:
        problem = str(error)
    raise UserError(
        f"--options={text} cannot be used ({problem}): give NAME=VALUE,NAME=VALUE, or a file "
        'such as {"long_factor": [...]} whose name ends in .json'
    )


def parse_option(value):
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        return value


def check(config):
    """Raise UserError for a number, word or switch of a dataclass that no command line takes."""
    hints = typing.get_type_hints(type(config))
    for name, kind in hints.items():
        value = getattr(config, name)
        if typing.get_origin(kind) is typing.Literal or kind in (bool, int, float):
            setattr(config, name, convert(name, value, hints, type(config).__name__))


def help_of(classes, paths=None, first=()):
    """Return the text of --help: the script's docstring, and a line for each setting, in groups.

    first: names of the only settings to show; (): all.
    """
    groups = {}
    known = {name for cls in classes for name in settings_of(cls)}
    for cls in classes:
        for name, (hint, group, comment) in settings_of(cls).items():
            if first and name not in first:
                continue
            if typing.get_origin(hint) is typing.Literal:
                comment = "|".join(typing.get_args(hint)) + f"; {comment}".rstrip("; ")
            setting = f"--{name}={format_value(getattr(cls, name))}"
            # A long setting has a line of its own, so that all comments begin in one column.
            lines = wrap(f"  {setting if len(setting) <= 36 else '':<36} {comment}")
            lines = lines if len(setting) <= 36 else [f"  {setting}", *lines]
            groups.setdefault(group, []).extend(lines)
    lines = [(sys.modules["__main__"].__doc__ or "").strip()]
    for group, entries in groups.items():
        lines += ["", f"{group}:", *entries]
    lines.append("")
    if first:
        lines.append("  --help-all shows every setting")
    presets = [name for name in preset_names() if read_preset(name).keys() <= known]
    if presets:
        lines += wrap(f"  presets, which stack (flags win): {', '.join(presets)}", 4)
    if paths:
        lines += wrap(f"  other words: {paths}", 4)
    return "\n".join(lines)


@functools.cache
def settings_of(cls):
    """Name -> (type, group, comment) of the settings of a dataclass, its own before its bases'."""
    hints = typing.get_type_hints(cls)
    found, group, above = {}, "settings", []
    for line in "\n".join(map(inspect.getsource, cls.__mro__[:-1])).splitlines():
        line = line.strip()
        setting = re.match(r"(\w+): .* = .*?(?:  # (.*))?$", line)
        if line.startswith("# ["):
            group, above = line[3:-1], []
        elif line.startswith("# "):
            above.append(line[2:])
        elif setting:
            name, comment = setting.groups()
            if name in hints and f"{cls.__name__}.{name}" not in HIDDEN:
                found.setdefault(name, (hints[name], group, comment or " ".join(above)))
            above = []
    return found


def wrap(line, indent=39):
    return textwrap.wrap(line, 110, subsequent_indent=" " * indent, break_on_hyphens=False)


def format_value(value):
    """A value as one would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "''"
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value) or "''"
