"""What extend.py is asked for: the options of a method, and the requests that it refuses."""

import difflib
import json
from pathlib import Path

from nanolong import scoring
from nanolong.errors import UserError

RESERVED = {"self", "method", "factor"}  # no names of options


def read_options(text):
    """The options as a dict of numbers, booleans and text; of a file, whatever JSON it has."""
    if text.endswith(".json"):
        return read_file(text)
    options = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if name in ("method", "factor"):
            raise UserError(
                f"--options={text} sets {name}, which is no option of a method: give "
                f"--{name}={value}"
            )
        if not equals or not name.isidentifier() or name in RESERVED:
            raise UserError(
                f"--options={text} is malformed: give NAME=VALUE,NAME=VALUE, or the "
                "name of a .json file"
            )
        if name in options:
            raise UserError(f"--options={text} gives {name} twice: give it once")
        options[name] = parse_option(value)
    return options


def parse_option(value):
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        return value


def read_file(file):
    try:
        options = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(options, dict) or RESERVED & options.keys():
            raise ValueError("it holds no object of options")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--options={file} cannot be read ({error}): give a JSON file such as "
            '{"long_factor": [...]}'
        ) from None
    return options


def fits_scale(method, options):
    """Whether the factor on the scores is to be fitted, not given."""
    return options.get("scale") == "fit" or (method == "scale" and "scale" not in options)


def check_request(parent, cfg, positions):
    """Refuse, before any work, a misspelt method and what cannot be plotted or evaluated."""
    if not any(cfg.method in scheme.methods for scheme in positions.values()):
        methods = positions[parent.config.pos].methods
        similar = difflib.get_close_matches(cfg.method, methods, n=1)
        advice = (
            f"did you mean {similar[0]!r}?" if similar else f"use --method={', '.join(methods)}"
        )
        raise UserError(f"there is no extension method {cfg.method!r}: {advice}")
    if cfg.plot and not getattr(parent.pos, "rotary_dim", 0):
        raise UserError(
            f"--plot shows the wavelengths of rope, and --pos={parent.config.pos} has none: "
            "leave it out"
        )
    if cfg.overwrite and Path(cfg.out_dir).resolve() == parent.folder.parent.resolve():
        raise UserError(
            f"--overwrite would remove {parent.folder}, which is to be extended: choose another "
            "--out_dir"
        )
    check_window(parent, cfg)
    if cfg.text:
        length = cfg.eval_length or round(parent.config.block_size * cfg.factor)
        scoring.read_text(parent, cfg.text).val.require_length(length)


def check_window(parent, cfg):
    """Refuse a length of PoSE's sequences that they cannot have, or without PoSE."""
    original_length = parent.config.original_length
    if cfg.pose_window and not cfg.pose:
        raise UserError(
            f"pose_window={cfg.pose_window} is the length of PoSE's sequences, and pose is off: "
            "give --pose=true too, or leave it out"
        )
    if cfg.pose_window > original_length:
        raise UserError(
            f"pose_window={cfg.pose_window} is longer than the original context of "
            f"{original_length} tokens: give at most that"
        )


def check_same(model, parent, cfg):
    """Raise UserError if a run to resume was made with another parent or method."""
    extension = model.config.extension or {}
    options = read_options(cfg.options)
    if fits_scale(cfg.method, options):
        options["scale"] = extension.get("options", {}).get("scale")
    factor = cfg.factor
    if parent.config.extension:
        factor *= parent.config.extension["factor"]
    asked = {
        "parent": parent.folder.parent.name,
        "method": cfg.method,
        "factor": factor,
        "options": options,
    }
    if cfg.layers != "auto":
        asked["layers"] = cfg.layers
    saved = {"layers": "all", **extension, "parent": Path(model.meta.get("parent", "")).parent.name}
    for name, value in asked.items():
        if saved.get(name) != value:
            raise UserError(
                f"{model.folder} was made with {name} {saved.get(name) or 'none'}, not "
                f"{value or 'none'}: leave the setting out, or choose another --out_dir"
            )
