"""What extend.py is asked for: what it takes over from the run, options, and what it refuses."""

import difflib
import json
from pathlib import Path

import rope_scaling
from nanolong import run, scoring
from nanolong.errors import UserError

RESERVED = {"self", "method", "factor"}  # no names of options

# -----------------------------------------------------------------------------
# Defaults that come from the run that is extended.

# What the fine-tuning takes over from the training; extend.py has its own defaults for the rest.
INHERITED_SETTINGS = (
    *("dataset", "bos", "tasks"),
    *("batch_size", "gradient_accumulation_steps", "optimizer", "lr_schedule"),
    *("beta1", "beta2", "grad_clip", "eval_iters", "log_interval", "wandb"),
    *("device", "dtype", "checkpoint_activations", "seed"),
)
# and what --keep_optimizer takes over besides, so that the training goes on
KEPT_SETTINGS = (
    *("max_iters", "learning_rate", "min_lr", "warmup_iters", "weight_decay"),
    *("min_doc", "separate_docs", "eval_interval", "eval_length", "compile"),
)


def inherited_settings(meta, asked, path):
    """The settings to take over from a checkpoint's meta.json.

    asked: the settings that are given, and method, factor and max_iters in any case.
    """
    trained = meta.get("train") or {}
    if not trained:
        if asked["max_iters"] and not {"dataset", "learning_rate"} <= asked.keys():
            raise UserError(
                f"{path} has no record of its training: give --dataset and --learning_rate, or "
                "--max_iters=0 to only extend it"
            )
        return {"bos": meta.get("bos") is not None}
    names = INHERITED_SETTINGS
    if asked.get("keep_optimizer"):
        names += KEPT_SETTINGS
    settings = {name: trained[name] for name in names if name in trained}
    factor = asked["factor"]
    if not 1 <= factor <= 1e6:
        return settings  # refused by the range check
    # The first fine-tuning takes 0.3 of the training's learning rate, later ones keep theirs.
    was_fine_tuned = "method" in trained  # a setting of extend.py
    scale = 1 if was_fine_tuned else 0.3
    settings.setdefault("learning_rate", trained["learning_rate"] * scale)
    # Keep the tokens of a micro-batch and of a step, if sequences get longer: 16 sequences of 256
    # tokens become 4 of 1,024.
    earlier = meta["config"].get("extension") or {"factor": 1.0}
    original_length = earlier.get("original_length", meta["config"]["block_size"])
    length = relative_length(asked, factor * earlier["factor"], original_length)
    longer = length / relative_length(trained, earlier["factor"], original_length)
    batch_size = max(1, round(trained["batch_size"] / longer))
    accumulation = trained["gradient_accumulation_steps"] * trained["batch_size"] / longer
    settings["batch_size"] = batch_size
    settings["gradient_accumulation_steps"] = max(1, round(accumulation / batch_size))
    if trained["eval_iters"]:  # as many tokens of an evaluation
        settings["eval_iters"] = max(1, round(trained["eval_iters"] / longer))
    return settings


def relative_length(settings, factor, original_length):
    """The tokens of a training sequence, in original lengths. settings: a dict; factor: in all."""
    tokens = settings.get("pose_window") if settings.get("pose") else settings.get("train_length")
    if tokens:
        return tokens / original_length
    if rope_scaling.trains_at_original_length(settings.get("method"), settings.get("pose")):
        return 1
    return factor


# -----------------------------------------------------------------------------
# The options of a method.


def read_options(text):
    """The options as a dict of numbers, booleans and text; of a file, whatever JSON it has."""
    if text.endswith(".json"):
        return read_file(text)
    options = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if name in ("method", "factor"):
            problem = f"sets {name}, which is no option of a method: give --{name}={value}"
        elif not equals or not name.isidentifier() or name in RESERVED:
            problem = "is malformed: give NAME=VALUE,NAME=VALUE, or the name of a .json file"
        elif name in options:
            problem = f"gives {name} twice: give it once"
        else:
            options[name] = parse_option(value)
            continue
        raise UserError(f"--options={text} {problem}")
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


# -----------------------------------------------------------------------------
# Requests that are refused.


def check_request(parent, cfg, positions):
    """Refuse, before any work, a misspelt method and what cannot be trained."""
    config = parent.config
    original, extended = config.original_length, round(config.block_size * cfg.factor)
    if not any(cfg.method in scheme.methods for scheme in positions.values()):
        methods = positions[config.pos].methods
        similar = difflib.get_close_matches(cfg.method, methods, n=1)
        advice = f"use --method={', '.join(methods)}"
        if similar:
            advice = f"did you mean {similar[0]!r}?"
        raise UserError(f"there is no extension method {cfg.method!r}: {advice}")
    if cfg.overwrite and Path(cfg.out_dir).resolve() == parent.folder.parent.resolve():
        raise UserError(
            f"--overwrite would rename {parent.folder}, which is to be extended: "
            "choose another --out_dir"
        )
    # The lengths of training sequences, with PoSE and without.
    if cfg.pose_window and not cfg.pose:
        raise UserError(
            f"pose_window={cfg.pose_window} is the length of PoSE's sequences, and pose is off: "
            "give --pose=true too, or leave it out"
        )
    if cfg.pose_window > original:
        raise UserError(
            f"pose_window={cfg.pose_window} is longer than the original context of {original} "
            "tokens: give at most that"
        )
    if cfg.train_length and cfg.pose:
        raise UserError(
            f"train_length={cfg.train_length} is not for PoSE, whose sequences have --pose_window "
            "tokens: leave one of --train_length and --pose out"
        )
    if cfg.train_length > extended:
        raise UserError(
            f"train_length={cfg.train_length} is longer than the extended context of {extended} "
            "tokens: give at most that, or a larger --factor"
        )
    if cfg.keep_optimizer and not cfg.max_iters and cfg.init_from != "resume":
        raise UserError(
            "--keep_optimizer=true goes on training, and --max_iters=0 only extends: "
            "leave one of them out"
        )
    if cfg.text:
        scoring.read_text(parent, cfg.text).val.require_length(cfg.eval_length or extended)


def check_optimizer(model, cfg):
    """Refuse to keep an optimizer whose state is missing or that of another.

    model.folder and model.meta are still those of the run that is extended.
    """
    folder = model.folder
    advice = "leave --keep_optimizer out"
    has_state = (folder / "optim.safetensors").is_file()
    if not (has_state and run.read_tensors(folder, "optim", model.meta)):
        raise UserError(f"{folder} has no optimizer state to keep: {advice}")
    trained_with = model.meta["train"]["optimizer"]
    if cfg.optimizer != trained_with:
        raise UserError(
            f"{folder} was trained with {trained_with}, whose state {cfg.optimizer} cannot keep: "
            f"leave --optimizer out, or {advice}"
        )
    if model.meta["step"] >= cfg.last_step:
        raise UserError(
            f"{folder} has taken all {cfg.last_step} steps, so there is nothing to go on with: "
            f"train it with --stop_at=STEP, raise --max_iters, or {advice}"
        )


def check_same(model, parent, cfg):
    """Raise UserError if a run to resume was made with another parent or method."""
    extension = model.config.extension or {}
    options = read_options(cfg.options)
    if fits_scale(cfg.method, options):
        options["scale"] = extension.get("options", {}).get("scale")
    before = parent.config.extension or {"factor": 1.0}
    asked = {
        "parent": parent.folder.parent.name,
        "method": cfg.method,
        "factor": cfg.factor * before["factor"],
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
