"""The command line: settings from dataclasses, presets in TOML, --help, and errors in one line.

    args = cli.parse(model_config=GPTConfig, cfg=TrainConfig, about=__doc__, presets=True)

    if __name__ == "__main__":
        cli.run_main(main)

A field of the dataclass is a setting. Its help is the comment on the field's line or, where that is
too long, the comment lines directly above it. A comment `# [name]` starts a group of settings:

    @dataclass
    class TrainConfig:
        # [optimisation]
        learning_rate: float = 3e-3  # peak learning rate
"""

import ast
import contextlib
import difflib
import errno
import functools
import inspect
import os
import sys
import textwrap
import time
import tomllib
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

from nanolong import validate
from nanolong.errors import LocalError, UserError, discard_stdout
from nanolong.strict_json import write_json

PRESETS = Path(__file__).resolve().parent.parent / "config"
# class -> its fields that the data and GPT.extend() set, not the user
HIDDEN = {"GPTConfig": ("vocab_size", "extension")}
HELP_WIDTH = 110
OUT_OF_MEMORY = (
    "out of memory: in training lower --batch_size (more --gradient_accumulation_steps keep the "
    "batch), --block_size, --factor, --n_embd or --n_layer, or give --checkpoint_activations=true; "
    "in evaluation lower --lengths, in sampling --max_new_tokens or the prompt"
)


# setting -> other programs' names of it that similar_setting() does not find by their spelling. If
# a name could mean several settings, the first one that the script has is suggested.
LENGTH = "length context context_length ctx n_ctx seq_len max_length"
OTHER_NAMES = {
    "lengths": LENGTH,
    "factor": f"{LENGTH} scale scaling ratio",
    "block_size": LENGTH,
    "max_new_tokens": "max_tokens max_length",
    "pos": "position positions position_embedding scheme",
    "n_layer": "depth",
    "n_head": "heads num_heads",
    "n_kv_head": "num_kv_heads",
    "n_embd": "embed embed_dim hidden_size d_model dim width",
    "rope_base": "base theta rope_theta",
    "learning_rate": "lr max_lr",
    "max_iters": "steps num_steps iters iterations",
    "batch_size": "bs",
    "gradient_accumulation_steps": "grad_accum",
    "weight_decay": "wd",
    "optimizer": "optim",
    "init_from": "resume load checkpoint ckpt",
    "num_samples": "n",
    "start": "prompt text input",
    "temperature": "temp",
    "out_dir": "output_dir run checkpoint ckpt",
    "name": "out output out_dir",
    "dataset": "data",
    "tokenizer": "vocab encoding",
}


# -----------------------------------------------------------------------------
# Reading the command line.


class Setting(typing.NamedTuple):
    """A field of a settings dataclass."""

    name: str
    type: object
    default: object


def parse(*, about="", presets=False, paths=None, defaults=None, argv=None, unlisted=(), **classes):
    """Read the command line into one instance of each dataclass.

    Takes --name=value, --name value, and --name alone for a true bool.

    classes: dataclasses whose fields are the settings, by the names that their instances get.
    unlisted: the names of those whose settings are not listed by --help.
    about: the text above the list of settings in --help.
    presets: whether *.toml files may be given; they stack in order, and flags win. A bare name is
        looked up in config/ too.
    paths: what other positional arguments are, in words, for --help; None: there are none.
    defaults: a function of the given values by name and of the positional arguments; returns
        values by name that replace the dataclasses' defaults. Other names are ignored.

    Returns an object with the instances, with `given`, the set of names that a preset or flag has
    set, `flags`, those of a flag alone, and `paths`, the list of positional arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    settings = {s.name: s for cls in classes.values() for s in settings_of(cls)}
    from_presets, from_flags, positional = {}, {}, []
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            listed = [cls for name, cls in classes.items() if name not in unlisted]
            print(format_help(listed, about, presets, paths))
            sys.exit(0)
        elif word.startswith("--"):
            name, value = read_flag(word, words, settings)
            if name in from_flags:
                raise UserError(f"--{name} is given twice: give it once (a list has commas)")
            from_flags[name] = value
        elif presets and word.endswith(".toml"):
            from_presets.update(read_preset(word, settings))
        elif paths is not None:
            positional.append(word)
        else:
            ways = "--name=value or config/NAME.toml" if presets else "--name=value"
            raise UserError(f"{word!r} is not a setting: give {ways}; --help lists the settings")

    given_values = {**from_presets, **from_flags}
    values = given_values
    if defaults is not None:
        known = {n: v for n, v in defaults(given_values, positional).items() if n in settings}
        values = convert_all(known, settings, "the earlier run has") | given_values
    args = types.SimpleNamespace(given=set(given_values), flags=set(from_flags), paths=positional)
    for name, cls in classes.items():
        own_values = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        setattr(args, name, validate.build(cls, own_values))
    return args


def settings_of(cls):
    """The settings of a dataclass, in its order, without the hidden ones."""
    hints = typing.get_type_hints(cls)
    hidden = HIDDEN.get(cls.__name__, ())
    settings = []
    for field in fields(cls):
        default = field.default if field.default is not MISSING else field.default_factory()
        if field.name not in hidden:
            settings.append(Setting(field.name, hints[field.name], default))
    return settings


def read_flag(word, following, settings):
    """The name and converted value of a flag.

    word: "--name=value" or "--name"; following: the words after it, from which a value is taken.
    """
    name, has_value, text = word[2:].partition("=")
    name = name.replace("-", "_")
    setting = find_setting(name, settings, word)
    next_is_bool = bool(following) and following[0].lower() in validate.BOOLS
    if not has_value and validate.without_none(setting.type) is bool and not next_is_bool:
        text = "true"
    elif not has_value:
        if not following:
            example = format_value(setting.default) or "TEXT"
            raise UserError(f"--{name} has no value: give one, as in --{name}={example}")
        text = following.pop(0)
    return name, validate.convert(name, text, setting.type, f"--{name}={text:.60}")


def read_preset(word, settings):
    """The converted values of a TOML file, which may be named without its folder."""
    files = [file for file in (Path(word), PRESETS / word, PRESETS.parent / word) if file.is_file()]
    if not files:
        raise UserError(f"there is no preset {word}: config/ holds {', '.join(preset_names())}")
    try:
        values = tomllib.loads(files[0].read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{word} is not valid TOML ({error}): correct it") from None
    for name in values:
        find_setting(name, settings, word)
    return convert_all(values, settings, f"{word}:")


def convert_all(values, settings, where):
    """The values by name as the types of their settings."""
    converted = {}
    for name, value in values.items():
        kind = settings[name].type
        converted[name] = validate.convert(name, value, kind, f"{where} {name} = {value!r:.60}")
    return converted


def preset_names():
    return sorted(file.name for file in PRESETS.glob("*.toml"))


def find_setting(name, settings, where):
    """The setting of this name, or UserError with the name that was probably meant."""
    if name in settings:
        return settings[name]
    replaced_by, remedy = validate.REPLACED_SETTINGS.get(name, (None, None))
    if replaced_by in settings:
        raise UserError(f"{name} is now one of the {replaced_by} ({where:.60}): give {remedy}")
    similar = similar_setting(name, settings)
    advice = f"did you mean {similar!r}?" if similar else "--help lists them all"
    raise UserError(f"there is no setting {name!r} ({where:.60}): {advice}")


def similar_setting(name, settings):
    """The setting that a wrong name probably means, by its meaning or its spelling, or None."""
    known = {setting: setting for setting in settings}
    for setting, other_names in OTHER_NAMES.items():
        if setting in settings:
            for other_name in other_names.split():
                known.setdefault(other_name, setting)
    if name in known:
        return known[name]
    with_word = [setting for setting in settings if name in setting.split("_")]
    if len(with_word) == 1:
        return with_word[0]
    # a lower cutoff takes words for similar that share a few letters, as scheme and seed
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return known[close[0]] if close else None


# -----------------------------------------------------------------------------
# --help.


def format_help(classes, about, presets, paths):
    """The text of --help: a line for each setting, in groups."""
    lines = [about.strip()]
    for group, entries in group_settings(classes).items():
        lines += ["", f"{group}:"] if entries else []
        for setting, comment in entries:
            lines += format_setting(setting, comment)
    if presets:
        names = ", ".join(f"config/{name}" for name in preset_names())
        lines += ["", *wrap(f"presets: {names}; they stack, and flags win", indent=2)]
    if paths:
        lines += ["", *wrap(f"positional: {paths}", indent=2)]
    return "\n".join(lines)


def group_settings(classes):
    """Group name -> list of (setting, comment), both in the order of the dataclasses."""
    groups = {}
    for cls in classes:
        comments = field_comments(cls)
        for group, _ in own_comments(cls).values():  # those that a subclass states come first
            groups.setdefault(group or "settings", [])
        for setting in settings_of(cls):
            group, comment = comments[setting.name]
            groups.setdefault(group or "settings", []).append((setting, comment))
    return groups


def format_setting(setting, comment):
    """`--name=default   type   comment`, wrapped where it is too long for a line."""
    kind = validate.without_none(setting.type)
    if typing.get_origin(kind) is typing.Literal:
        type_name = "choice"
        choices = "|".join(typing.get_args(kind))
        comment = f"{choices}; {comment}" if comment else choices
    elif typing.get_origin(kind) is tuple:
        type_name = "list"
    else:
        type_name = kind.__name__
    default = format_value(setting.default) or "''"
    line = f"  --{setting.name + '=' + default:<34} {type_name:<6} {comment}"
    return wrap(line, indent=46)


def wrap(line, indent):
    """The line in pieces of HELP_WIDTH columns, all but the first indented."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, HELP_WIDTH, subsequent_indent=" " * indent, **options)


def format_value(value):
    """A value as one would type it on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value)


def field_comments(cls):
    """Field name -> (group, comment), each from the class of the hierarchy that states it."""
    comments = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        for name, (group, comment) in own_comments(base).items():
            inherited_group, _ = comments.get(name, ("", ""))
            comments[name] = (group or inherited_group, comment)
    return comments


@functools.cache
def own_comments(cls):
    """field_comments() of the fields that the class itself states, from its source."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = [line.strip() for line in source.splitlines()]
    comments = {}
    group = ""
    end = 0  # of the field before
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        above = []
        for line in lines[end : node.lineno - 1]:
            if line.startswith("# [") and line.endswith("]"):
                group = line[3:-1]
                above = []
            else:
                above = [*above, line[2:]] if line.startswith("# ") else []
        end = node.end_lineno
        trailing = lines[end - 1].partition("  # ")[2]
        comments[node.target.id] = (group, trailing or " ".join(above))
    return comments


# -----------------------------------------------------------------------------
# Running a script.


def run_main(main):
    """Run a script's main() and exit with the status that it returns.

    Exit status 2, with one line on stderr: UserError, a file that cannot be used, out of memory.
    Status 1: another process of the run was lost. 130: interrupted from the keyboard. 0: whoever
    reads our output has closed it, as in `python sample.py | head`.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal may know ASCII only
    try:
        status = main()
    except BrokenPipeError:
        discard_stdout()
        status = 0
    except UserError as error:
        print_error(error, on_every_rank=isinstance(error, LocalError))
        status = 2
    except OSError as error:
        print_error(describe_os_error(error), on_every_rank=True)
        status = 2
    except (RuntimeError, MemoryError) as error:
        exit_if_peer_lost(error)
        if not is_out_of_memory(error):
            raise
        print_error(OUT_OF_MEMORY, on_every_rank=True)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def print_error(message, on_every_rank):
    """Of several processes rank 0 alone prints what all of them meet alike."""
    if on_every_rank or int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun ends its traceback, which it prints of every failure, with this message; the
        # format is that of torch.distributed.elastic.multiprocessing.errors
        error = {"message": str(message), "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            write_json(Path(error_file), {"message": error})


@contextlib.contextmanager
def silent(condition):
    """Print nothing while the condition holds, as in all processes but the first."""
    if not condition:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def describe_os_error(error):
    if error.errno == errno.ENOMEM:
        return OUT_OF_MEMORY
    return (
        f"{error.filename or 'a file'} cannot be used ({error.strerror or error}): "
        "choose another path, or fix its permissions or the disk"
    )


def exit_if_peer_lost(error):
    """End the process with status 1 if the error says that another process of the run is gone."""
    if "torch" not in sys.modules:  # data/prepare.py runs without it
        return
    from nanolong.parallel import processes

    message = processes.lost_peer_message(error)
    if message:
        # not to torchrun, which takes the first message for the cause
        print(f"error: {message}", file=sys.stderr, flush=True)
        # The process group is broken: an orderly shutdown could wait for the lost process.
        os._exit(1)


def is_out_of_memory(error):
    phrases = ("out of memory", "t allocate memory", "bad_alloc", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)
