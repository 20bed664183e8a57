"""What settings may be: their types, their ranges, and the rules that tie several together.

    config = validate.coerce(GPTConfig, {"n_layer": "4"}, "meta.json")  # types and ranges
    validate.check_model(config, POSITIONS)                             # rules across settings

Values from the command line, from presets and from a checkpoint's meta.json take the same path.
Every function here raises UserError with a message in one sentence.
"""

import math
import numbers
import types
import typing
from dataclasses import MISSING, dataclass, fields

import torch

import rope_scaling
from data.dataset import TASKS
from nanolong.errors import UserError


def require(condition, message):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


# -----------------------------------------------------------------------------
# Types.

BOOLS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
}


# settings that were true or false once, in presets and checkpoints of then
OLD_VALUES = {"qk_norm": {"true": "head", "false": "none"}}
# settings that another has replaced -> (the new one, what to write)
REPLACED_SETTINGS = {"passkey": ("tasks", "--tasks=passkey:FRACTION, such as passkey:0.1")}


def coerce(cls, values, where):
    """Make a settings dataclass of values of any type, a dict by name.

    where: what the values come from, for the error message. Fields without a value take their
    default; values that are no field are refused.
    """
    hints = typing.get_type_hints(cls)
    unknown = [name for name in values if name not in hints]
    require(
        not unknown,
        f"{where} has settings that this version does not know ({', '.join(map(str, unknown))}): "
        "use the version of nanoLong that wrote it",
    )
    converted = {}
    for name, value in values.items():
        converted[name] = convert(name, value, hints[name], f"{where}: {name} = {value!r:.60}")
    return build(cls, converted)


def convert(name, value, hint, where):
    """Convert one value to the type `hint`.

    hint: bool, int, float, str, dict, list, a Literal, tuple[T, ...], or one of these | None.
    where: the beginning of the error message.

    Text stands for any of them, as on a command line: "1e3" for 1000, "a,b" for a tuple, "auto" or
    "none" for None.
    """
    kind = without_none(hint)
    optional = kind is not hint
    if optional and (value is None or str(value).lower() in ("none", "auto")):
        return None
    if typing.get_origin(kind) is typing.Literal:
        value = OLD_VALUES.get(name, {}).get(str(value).lower(), value)
        choices = typing.get_args(kind)
        valid = isinstance(value, str) and value in choices
        require(valid, f"{where}: {name} must be one of {', '.join(choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        each = f"each of {name}"
        return tuple(convert(each, item, element, where) for item in split_items(value))
    kind = typing.get_origin(kind) or kind  # dict[str, int] -> dict
    try:
        return convert_scalar(value, kind)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where}: {name} must be {TYPE_NAMES[kind]}") from None


def without_none(hint):
    """The T of a type hint T | None; other hints are returned as they are."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    return next(option for option in typing.get_args(hint) if option is not types.NoneType)


def split_items(value):
    """The items of a tuple setting: of "a, b", of a list, or a single value."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, (list, tuple)):
        return value
    return [value]


def convert_scalar(value, kind):
    """Convert to bool, int, float, str, dict or list; raise ValueError or TypeError."""
    if kind is bool:
        text = str(value).lower()
        if text not in BOOLS:
            raise ValueError
        return BOOLS[text]
    if kind is int:
        return to_int(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
            raise TypeError
        return float(value)
    if not isinstance(value, kind):
        raise TypeError
    return value


def to_int(value):
    """Convert an integer, NumPy's included, a float without a fraction, or text such as "1e3"."""
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError
    text = str(value).replace("_", "")
    is_exact = text.lstrip("+-").isdigit()  # through a float, digits beyond 2^53 would be lost
    number = int(text) if is_exact else float(text)
    if number != int(number) or abs(number) >= 2**63:
        raise ValueError
    return int(number)


# -----------------------------------------------------------------------------
# Ranges. A setting of one name has the same range in every script.


@dataclass(frozen=True)
class Range:
    """Finite numbers; `least` and `most` are among them, `above` and `below` are not."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    or_zero: bool = False  # 0 stands for "none", whatever the bounds

    def __contains__(self, number):
        is_inside = self.least <= number <= self.most and self.above < number < self.below
        return is_inside or (self.or_zero and number == 0)

    def __str__(self):
        bounds = []
        if self.least > -math.inf:
            bounds.append(f"at least {self.least:,}")
        if self.above > -math.inf:
            bounds.append(f"above {self.above:,}")
        if self.most < math.inf:
            bounds.append(f"at most {self.most:,}")
        if self.below < math.inf:
            bounds.append(f"below {self.below:,}")
        return " and ".join(bounds) + (", or 0" if self.or_zero else "")


RANGES = {
    # the model; 0 for n_kv_head, head_dim and mlp_dim means that they follow from the others
    "n_layer": Range(least=1, most=2**12),
    "n_head": Range(least=1, most=2**16),
    "n_kv_head": Range(least=0, most=2**16),
    "head_dim": Range(least=0, most=2**16),
    "n_embd": Range(least=1, most=2**24),
    "mlp_dim": Range(least=0, most=2**26),
    "vocab_size": Range(least=1, most=2**24),
    "block_size": Range(least=1, most=2**40),
    "dropout": Range(least=0, below=1),
    "norm_eps": Range(above=0, below=1),
    "attn_scale": Range(above=0),
    "score_scale_length": Range(least=2, most=2**40, or_zero=True),
    "score_scale_coefficient": Range(above=0),
    "score_scale_offset": Range(least=0, most=1),
    # positions
    "rope_base": Range(above=1),
    "rope_fraction": Range(least=0, most=1),
    "rope_local_base": Range(above=1, or_zero=True),
    "p_rope": Range(least=0, most=1),
    "embed_scale": Range(above=0),
    "window": Range(least=0),
    "sinks": Range(least=0),
    "random_positions": Range(least=0, most=2**24),
    # training
    "batch_size": Range(least=1, most=2**20),
    "sequence_parallel": Range(least=1, most=2**16),
    "gradient_accumulation_steps": Range(least=1, most=2**20),
    "max_iters": Range(least=0),
    "stop_at": Range(least=0),
    "window_steps": Range(least=0),
    "window_changes": Range(least=1, most=1000),
    "learning_rate": Range(least=0),
    "min_lr": Range(least=0),
    "warmup_iters": Range(least=0),
    "weight_decay": Range(least=0),
    "beta1": Range(least=0, below=1),
    "beta2": Range(least=0, below=1),
    "grad_clip": Range(least=0),
    "eval_interval": Range(least=1),
    "eval_iters": Range(least=0),
    "eval_length": Range(least=0),
    "log_interval": Range(least=1),
    "seed": Range(least=0),
    # data
    "min_doc": Range(least=0),
    "upsample_docs": Range(least=1, most=1000),
    "val_fraction": Range(above=0, below=1),
    "shards": Range(least=1),
    # context extension
    "factor": Range(least=1, most=10**6),
    "pose_window": Range(least=0),
    "train_length": Range(least=0),
    # sampling
    "max_new_tokens": Range(least=0),
    "num_samples": Range(least=1),
    "temperature": Range(least=0),
    "top_k": Range(least=0),
    "top_p": Range(above=0, most=1),
    # evaluation
    "lengths": Range(least=1),
    "stride": Range(least=0),
    "max_tokens": Range(least=1),
    "depths": Range(least=1, most=1000),
    "trials": Range(least=0, most=2**20),
    "short_context": Range(least=2),
    "min_key_tokens": Range(least=1),
}


def check_ranges(values):
    """Refuse numbers out of the range of their setting. values: a dict by name."""
    for name in values.keys() & RANGES.keys():
        allowed = RANGES[name]
        for number in split_items(values[name]):
            require(
                math.isfinite(number),
                f"{name}={number} is not a finite number: give one that is {allowed}",
            )
            require(
                number in allowed,
                f"{name}={number} is out of range: it must be {allowed}",
            )


def build(cls, values):
    """Make a settings dataclass after the checks that its own __post_init__ relies on."""
    check_ranges(values)
    settings = {f.name: f.default for f in fields(cls) if f.default is not MISSING} | values
    if {"n_embd", "n_head", "head_dim"} <= settings.keys() and not settings["head_dim"]:
        require(
            settings["n_embd"] % settings["n_head"] == 0,
            f"n_embd={settings['n_embd']} is not divisible by n_head={settings['n_head']}: "
            "change one of them, or give head_dim",
        )
    return cls(**values)


# -----------------------------------------------------------------------------
# Rules across the settings of the model.


def check_model(config, positions):
    """Refuse a GPTConfig that no model can have. positions: the dict POSITIONS of model.py."""
    check_ranges(vars(config))
    require(
        config.pos in positions,
        f"there is no position scheme {config.pos!r}: pos is one of {', '.join(positions)}, or one "
        "of your own with --entry=FILE.py",
    )
    check_architecture(config)
    check_channels(config, positions)
    check_rope(config, positions)
    check_layer_pattern(config, positions)
    check_random_positions(config, positions)
    check_extension(config)
    check_score_scale(config)


def check_architecture(config):
    require(
        config.n_head % config.n_kv_head == 0,
        f"n_head={config.n_head} is not divisible by n_kv_head={config.n_kv_head}: "
        "choose a divisor of n_head",
    )
    for name, hint in typing.get_type_hints(type(config)).items():
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        value = getattr(config, name)
        require(
            not choices or value in choices,
            f"{name}={value} is unknown: choose one of {', '.join(choices)}",
        )

    block_parameters = config.n_embd * (config.n_head * config.head_dim + config.mlp_dim)
    embedding_parameters = config.n_embd * config.vocab_size
    require(
        config.n_layer * block_parameters + embedding_parameters <= 2**40,
        "the model would have more than 2^40 parameters: lower n_layer, n_embd, n_head, head_dim, "
        "mlp_dim or vocab_size",
    )


def check_channels(config, positions):
    """Sines and cosines, and rotations, take channels in pairs."""
    name = positions[config.pos].pairs
    n = getattr(config, name, 0)
    require(
        n % 2 == 0, f"{name}={n} is odd: --pos={config.pos} pairs channels, so give an even one"
    )


def check_rope(config, positions):
    """Rules of the settings that RoPE alone has."""
    is_rope = issubclass(positions[config.pos], positions["rope"])
    rotary_dim = int(config.rope_fraction * config.head_dim)
    require(
        not is_rope or rotary_dim % 2 == 0,
        f"rope_fraction={config.rope_fraction} rotates {rotary_dim} of {config.head_dim} "
        "channels, which is odd: rotations pair channels, so give another fraction",
    )
    is_plain = positions[config.pos] is positions["rope"]
    require(
        not config.rope_local_base or (is_plain and config.is_hybrid),
        f"rope_local_base={config.rope_local_base:g} is of rope in layers with a window, next to "
        "layers without one: give a --layer_pattern of both, such as WWWF, and --window=N",
    )
    require(
        config.p_rope == 1 or config.rope_fraction == 1,
        f"p_rope={config.p_rope} and rope_fraction={config.rope_fraction} both leave channels "
        "unrotated, at different frequencies: give one of them",
    )


def check_layer_pattern(config, positions):
    """F and N: full attention; W and S: sliding window; N and S: without positions."""
    pattern = config.layer_pattern
    require(
        pattern and set(pattern) <= set("FWNS"),
        f"layer_pattern={pattern!r} is not a word of the letters F, W, N and S: "
        "give one such as FFFN",
    )
    require(
        len(pattern) <= config.n_layer,
        f"layer_pattern={pattern} has more letters than the {config.n_layer} layers: "
        "shorten it or raise n_layer",
    )
    has_window_layers = not set(pattern).isdisjoint("WS")
    require(
        config.window or not has_window_layers,
        f"layer_pattern={pattern} has sliding-window layers (W or S) without a window: "
        "give --window=N",
    )
    require(
        has_window_layers or not config.window,
        f"window={config.window} is used by no layer of layer_pattern={pattern}: "
        "put a W or S into the pattern, or leave the window out",
    )
    require(
        config.window or not config.sinks,
        f"sinks={config.sinks} are tokens that stay visible beyond a window, and there is none: "
        "give --window=N too",
    )
    has_layers_without_positions = not set(pattern).isdisjoint("NS")
    require(
        acts_in_attention(config.pos, positions) or not has_layers_without_positions,
        f"layer_pattern={pattern} removes positions from some layers (N or S), and "
        f"--pos={config.pos} acts in none of them: use F and W only",
    )


def check_score_scale(config):
    """Rules of the settings that --score_scale has for each of its kinds."""
    kind = config.score_scale
    defaults = {f.name: f.default for f in fields(config)}
    of_llama4 = ("score_scale_coefficient", "score_scale_offset")
    for name in ("score_scale_length", "score_scale_layers", *of_llama4):
        is_used = kind == "llama4" if name in of_llama4 else kind != "none"
        needed = "llama4" if name in of_llama4 else "logn, llama4 or ssmax"
        require(
            is_used or getattr(config, name) == defaults[name],
            f"{name}={getattr(config, name)} does nothing with --score_scale={kind}: "
            f"leave it out, or give --score_scale={needed}",
        )
    require(
        config.score_scale_layers == "all" or not set(config.layer_pattern).isdisjoint("NS"),
        f"score_scale_layers=nope is of layers without positions, and layer_pattern="
        f"{config.layer_pattern} has none: put an N or S into the pattern, or leave it out",
    )
    length = config.score_scale_length or config.original_length
    require(
        kind not in ("logn", "ssmax") or length > 1,
        f"score_scale={kind} divides by the logarithm of the context length, which is 0 for 1 "
        "token: give a --score_scale_length of at least 2",
    )


def acts_in_attention(pos, positions):
    """Whether a scheme acts inside the layers, not only on the embeddings or not at all."""
    scheme, base = positions[pos], positions["nope"]
    hooks = ("rotate", "bias", "relative")
    return any(getattr(scheme, hook) is not getattr(base, hook) for hook in hooks)


def check_scheme_flags(pos, flags, positions):
    """Refuse flags that the position scheme does not read. A scheme of the user's may read any."""
    scheme = positions.get(pos, positions["rope"])
    is_ours = scheme.__module__ == positions["nope"].__module__
    if is_ours and not issubclass(scheme, positions["rope"]):
        of_rope = {"rope_base", "rope_fraction", "rope_local_base", "p_rope"}
        for name in sorted(of_rope & set(flags)):
            raise UserError(
                f"--{name} is a setting of rope, and --pos={pos} has none: leave it out"
            )


def check_random_positions(config, positions):
    if not config.random_positions:
        return
    scheme = positions[config.pos]
    require(
        not scheme.by_index and scheme is not positions["nope"],
        f"random_positions={config.random_positions} needs a scheme that uses position ids, and "
        f"--pos={config.pos} does not: choose learned, sinusoidal or rope, or leave it out",
    )
    require(
        not config.window,
        f"random_positions={config.random_positions} cannot be combined with a window, which "
        "counts positions too: leave one of them out",
    )
    require(
        config.random_positions >= config.block_size,
        f"random_positions={config.random_positions} is too small: "
        f"it must be at least block_size={config.block_size}",
    )


def check_extension(config):
    """`extension` is written by GPT.extend(), and comes back from a checkpoint's meta.json."""
    if config.extension is None:
        return
    advice = "use an undamaged checkpoint, or extend the original model again"
    layers = config.extension.get("layers", "full")
    require(layers == "full", f"the model's extension has layers={layers!r:.60}: {advice}")
    kinds = {"method": str, "factor": (int, float), "options": dict, "original_length": int}
    for name, kind in kinds.items():
        value = config.extension.get(name)
        require(
            isinstance(value, kind) and not isinstance(value, bool),
            f"the model's extension has {name}={value!r:.60}: {advice}",
        )
    factor = config.extension["factor"]
    original_length = config.extension["original_length"]
    require(
        1 <= factor < 1e12 and 1 <= original_length <= config.block_size,
        f"the model's extension by {factor} from {original_length} to {config.block_size} tokens "
        f"is impossible: {advice}",
    )


def check_extend_model(config, method, factor):
    """Refuse an extension that no scheme can make of this GPTConfig."""
    require(
        isinstance(factor, int | float) and math.isfinite(factor) and factor >= 1,
        f"factor={factor!r} does not extend the context: give a number of at least 1",
    )
    require(
        not config.random_positions or (factor == 1 and method == "none"),
        f"this model was trained on positions below {config.random_positions} and needs no "
        "extension up to there: train with a larger --random_positions to go on",
    )
    changes_attention = config.window or config.sink_scores or config.score_scale != "none"
    require(
        method not in rope_scaling.EVALUATION_ONLY or not changes_attention,
        f"method {method!r} has a window of its own, no learned sinks and no score scale: "
        "use it without --window, --sink_scores and --score_scale",
    )


# -----------------------------------------------------------------------------
# What a model is called with.


def check_inputs(config, tokens, **others):
    """Refuse tokens that are no ids (B, T), and others, if given, that are not as long."""
    require(
        torch.is_tensor(tokens),
        f"tokens are a {type(tokens).__name__}: give a tensor, int64 (B, T)",
    )
    shape = tuple(tokens.shape)
    require(
        tokens.dim() == 2 and not tokens.is_floating_point(),
        f"tokens are {tokens.dtype} of shape {shape}: give int64 (B, T)",
    )
    for name, x in others.items():
        if x is not None and x.shape not in (tokens.shape, tokens.shape[1:]):
            raise UserError(f"{name} are {tuple(x.shape)}, tokens {shape}: give one a token")
    # on the CPU only: this would wait for a GPU
    n = config.vocab_size
    if tokens.is_cpu and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < n:
        raise UserError(
            f"token ids lie between {tokens.min()} and {tokens.max()}, and the vocabulary has "
            f"{n}: use the tokenizer of the model"
        )


# -----------------------------------------------------------------------------
# Rules of the scripts' settings. Each is called by the dataclass's __post_init__.


def check_train(cfg):
    """Refuse a TrainConfig with a number out of range, or what no run can do. Raises UserError."""
    check_ranges(vars(cfg))
    require(
        cfg.stop_at <= cfg.max_iters,
        f"stop_at={cfg.stop_at} is beyond the last step, max_iters={cfg.max_iters}: give at most "
        "that, or raise --max_iters",
    )
    task_fractions(cfg.tasks)
    require(
        cfg.window_schedule or not (cfg.window_steps or cfg.window_yarn),
        "window_steps and window_yarn are of a window that grows: give --window_schedule=START:END "
        "too, or leave them out",
    )
    require(
        cfg.window_steps <= cfg.max_iters or not cfg.max_iters,
        f"window_steps={cfg.window_steps} is beyond the last step, max_iters={cfg.max_iters}: give "
        "at most that",
    )
    if cfg.window_schedule:
        read_window_schedule(cfg.window_schedule)


def read_window_schedule(text):
    """Return START and END of the setting `window_schedule`, in tokens. Raises UserError."""
    numbers = text.split(":")
    is_whole = len(numbers) == 2 and all(number.strip().isdecimal() for number in numbers)
    start, end = map(int, numbers) if is_whole else (0, 0)
    require(
        0 < start < end,
        f"window_schedule={text} is no window that grows: give START:END in tokens, such as 32:256",
    )
    return start, end


def task_fractions(tasks):
    """Return kind -> fraction of the setting `tasks`, words as "vt:0.05". Raises UserError."""
    fractions = {}
    for task in tasks:
        kind, _, number = task.partition(":")
        require(
            kind in TASKS,
            f"tasks={task} is of no known kind: give KIND:FRACTION of {', '.join(TASKS)}",
        )
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        require(
            0 < fraction <= 1,
            f"tasks={task} does not end in a fraction of the sequences, above 0 and at most 1: "
            f"give one, as in {kind}:0.05",
        )
        require(kind not in fractions, f"tasks names {kind} twice: give each kind once")
        fractions[kind] = fraction
    total = math.fsum(fractions.values())
    require(
        total <= 1 + 1e-9,
        f"the fractions of tasks={','.join(tasks)} add up to {total:g}: lower them to 1 or less",
    )
    return fractions


def check_extend(cfg):
    """Refuse an ExtendConfig with a number out of range or a plot in another format than PNG."""
    check_train(cfg)
    check_png("plot", cfg.plot)


def check_sample(cfg):
    """Refuse a SampleConfig with a number out of range, or a conversation without a message."""
    check_ranges(vars(cfg))
    require(
        cfg.chat or not cfg.system,
        "--system is part of a conversation: give --chat too, or leave it out",
    )
    require(
        cfg.start or not cfg.chat,
        "--chat needs the message of a user: give it by --start=TEXT",
    )


def check_evaluate(cfg):
    """Refuse an EvaluateConfig that measures nothing or draws in another format than PNG."""
    check_ranges(vars(cfg))
    require(
        not (cfg.text and cfg.dataset),
        "--text and --dataset both name what is scored: leave one of them out",
    )
    require(
        not cfg.text or cfg.task == "loss",
        f"--text is what --task=loss scores, and --task={cfg.task} has texts of its own: "
        "leave one of them out",
    )
    check_png("plot", cfg.plot)
    check_png("curves", cfg.curves)
    require(
        not cfg.curves or not (cfg.plot or cfg.json or cfg.report),
        "--curves plots logs and measures nothing: leave --plot, --json and --report out, or "
        "--curves",
    )
    require(
        not cfg.report or cfg.report.endswith(".html"),
        f"--report={cfg.report} is not a page: end it in .html",
    )
    check_choices(cfg, "protocol")
    check_choices(cfg, "ruler")
    require(
        bool(cfg.judge) == ("key-tokens" in cfg.protocol),
        "--protocol=key-tokens and --judge=RUN need each other: give both or neither",
    )


def check_choices(cfg, name):
    """Refuse a list of choices that is empty or has another word than its type names."""
    values = getattr(cfg, name)
    known = typing.get_args(typing.get_args(typing.get_type_hints(type(cfg))[name])[0])
    require(
        values and set(values) <= set(known),
        f"{name}={','.join(values)} is not a list of choices: choose from " + ", ".join(known),
    )


def check_png(name, path):
    """Refuse the path of a figure, "" for none, that does not end in .png."""
    require(not path or path.endswith(".png"), f"--{name}={path} is not a PNG: end it in .png")
