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
from dataclasses import dataclass, fields

import torch

import rope_scaling
from data.dataset import TASKS, split_fraction
from nanolong.errors import UserError


def require(condition, message):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


# -----------------------------------------------------------------------------
# Types.

BOOLS = dict.fromkeys(("true", "1", "yes", "on"), True)
BOOLS |= dict.fromkeys(("false", "0", "no", "off"), False)
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
    converted = {}
    for name, value in values.items():
        require(
            name in hints,
            f"{where} has a setting that this version does not know ({name}): use the version of "
            "nanoLong that wrote it",
        )
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
        require(
            (name, value) != ("score_scale", "ssmax"),
            f"{where}: ssmax is a scheme with RoPE now: give --entry=examples/schemes/ssmax.py",
        )
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
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        words = [f"{word} {n:,}" for word, n in bounds.items() if math.isfinite(n)]
        return " and ".join(words) + (", or 0" if self.or_zero else "")


RANGES = {
    name: allowed
    for allowed, names in (
        # 0 turns many of these off
        (Range(least=0), "window sinks pose_window train_length min_doc"),
        (Range(least=0), "max_iters stop_at warmup_iters eval_iters eval_length seed"),
        (Range(least=0), "learning_rate min_lr weight_decay grad_clip"),
        (Range(least=0), "max_new_tokens temperature top_k stride"),
        (Range(least=0, most=1), "rope_fraction p_rope score_scale_offset"),
        (Range(least=0, below=1), "dropout beta1 beta2"),
        # 0 for n_kv_head, head_dim and mlp_dim means that they follow from the others
        (Range(least=0, most=2**16), "n_kv_head head_dim"),
        (Range(least=0, most=2**20), "trials"),
        (Range(least=0, most=2**24), "random_positions"),
        (Range(least=0, most=2**26), "mlp_dim"),
        # bounds that a typing error exceeds, and memory or time would feel first
        (Range(least=1, most=1000), "depths"),
        (Range(least=1, most=10**6), "factor"),
        (Range(least=1, most=2**12), "n_layer"),
        (Range(least=1, most=2**16), "n_head sequence_parallel"),
        (Range(least=1, most=2**20), "batch_size gradient_accumulation_steps"),
        (Range(least=1, most=2**24), "n_embd vocab_size"),
        (Range(least=1, most=2**40), "block_size"),
        # scales, fractions and bases of logarithms and powers
        (Range(above=0), "attn_scale embed_scale score_scale_coefficient"),
        (Range(above=0, below=1), "norm_eps val_fraction"),
        (Range(above=0, most=1), "top_p"),
        (Range(least=1), "eval_interval log_interval shards num_samples"),
        (Range(least=1), "lengths max_tokens min_key_tokens"),
        (Range(above=1), "rope_base"),
        (Range(above=1, or_zero=True), "rope_local_base"),
        (Range(least=2), "short_context"),
        (Range(least=2, most=2**40, or_zero=True), "score_scale_length"),
    )
    for name in names.split()
}


def check_ranges(values):
    """Refuse numbers out of the range of their setting. values: a dict by name."""
    for name in values.keys() & RANGES.keys():
        for number in split_items(values[name]):
            require(
                number in RANGES[name],
                f"{name}={number} is out of range: it must be {RANGES[name]}, and finite",
            )


def build(cls, values):
    """Make a settings dataclass after the checks that its own __post_init__ relies on."""
    check_ranges(values)
    settings = {f.name: f.default for f in fields(cls)} | values
    if "n_embd" in settings and not settings["head_dim"]:
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
    check_channels(config, positions[config.pos], positions["rope"])
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
    check_choices(config)
    parameters = config.n_layer * (config.n_head * config.head_dim + config.mlp_dim)
    require(
        config.n_embd * (parameters + config.vocab_size) <= 2**40,
        "the model would have more than 2^40 parameters: lower n_layer, n_embd, n_head, head_dim, "
        "mlp_dim or vocab_size",
    )


def check_channels(config, scheme, rope):
    """Sines and cosines, and rotations, take channels in pairs."""
    n = getattr(config, scheme.pairs, 0)
    require(
        n % 2 == 0,
        f"{scheme.pairs}={n} is odd: --pos={config.pos} pairs channels, so give an even one",
    )
    rotary_dim = int(config.rope_fraction * config.head_dim)
    require(
        rotary_dim % 2 == 0 or not issubclass(scheme, rope),
        f"rope_fraction={config.rope_fraction} rotates {rotary_dim} of {config.head_dim} "
        "channels, which is odd: rotations pair channels, so give another fraction",
    )
    require(
        not config.rope_local_base or (scheme is rope and config.is_hybrid),
        f"rope_local_base={config.rope_local_base:g} is of rope in layers with a window, next to "
        "layers without one: give a --layer_pattern of both, such as WWWF, and --window=N",
    )
    require(
        1 in (config.p_rope, config.rope_fraction),
        "p_rope and rope_fraction both leave channels unrotated, at different frequencies: "
        "give one of them",
    )


def check_layer_pattern(config, positions):
    """F and N: full attention; W and S: sliding window; N and S: without positions."""
    pattern = config.layer_pattern
    letters = set(pattern)
    require(
        letters and letters <= set("FWNS") and len(pattern) <= config.n_layer,
        f"layer_pattern={pattern!r} is not a word of the letters F, W, N and S, at most one for "
        f"each of the {config.n_layer} layers: give one such as FFFN",
    )
    require(
        bool(letters & set("WS")) == bool(config.window),
        f"layer_pattern={pattern} and window={config.window} do not fit, for W and S are layers "
        "with a window: give --window=N and a pattern with one of them, or neither",
    )
    require(
        config.window or not config.sinks,
        "sinks are tokens that stay visible beyond a window: give --window=N too",
    )
    require(
        acts_in_attention(config.pos, positions) or not letters & set("NS"),
        f"layer_pattern={pattern} removes positions from some layers (N or S), and "
        f"--pos={config.pos} acts in none of them: use F and W only",
    )


def check_score_scale(config):
    """Rules of the settings that --score_scale has for each of its kinds."""
    kind = config.score_scale
    kinds = ("logn", "llama4")
    users = {"score_scale_length": kinds, "score_scale_layers": kinds}
    users |= {"score_scale_coefficient": ("llama4",), "score_scale_offset": ("llama4",)}
    for name, used_by in users.items():
        require(
            kind in used_by or getattr(config, name) == getattr(type(config), name),
            f"{name}={getattr(config, name)} does nothing with --score_scale={kind}: leave it out, "
            f"or give --score_scale={' or '.join(used_by)}",
        )
    require(
        config.score_scale_layers == "all" or not set(config.layer_pattern).isdisjoint("NS"),
        "score_scale_layers=nope is of layers without positions, and layer_pattern="
        f"{config.layer_pattern} has none: put an N or S into the pattern, or leave it out",
    )
    require(
        kind != "logn" or (config.score_scale_length or config.original_length) > 1,
        "score_scale=logn divides by the logarithm of the context length, which is 0 for 1 "
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
    of_rope = {"rope_base", "rope_fraction", "rope_local_base", "p_rope"} & set(flags)
    require(
        not of_rope or not is_ours or issubclass(scheme, positions["rope"]),
        f"--{', --'.join(sorted(of_rope))} is a setting of rope, and --pos={pos} has none: leave "
        "it out",
    )


def check_random_positions(config, positions):
    if not config.random_positions:
        return
    scheme = positions[config.pos]
    require(
        not scheme.by_index and scheme is not positions["nope"],
        f"random_positions needs a scheme that uses position ids, and --pos={config.pos} does not: "
        "choose learned, sinusoidal or rope, or leave it out",
    )
    require(
        not config.window,
        "random_positions cannot be combined with a window, which counts positions too: leave one "
        "of them out",
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
    extension = {"layers": "full", **config.extension}
    kinds = {"method": str, "factor": (int, float), "options": dict, "original_length": int}
    is_whole = all(isinstance(extension.get(name), kind) for name, kind in kinds.items())
    require(
        is_whole
        and extension["layers"] == "full"
        and not isinstance(extension["factor"], bool)
        and 1 <= extension["factor"] < 1e12
        and 1 <= extension["original_length"] <= config.block_size,
        f"the model's extension to {config.block_size} tokens is damaged or impossible "
        f"({config.extension!r:.200}): use an undamaged checkpoint, or extend the original model "
        "again",
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
    if not torch.is_tensor(tokens):
        raise UserError(f"tokens are a {type(tokens).__name__}: give a tensor, int64 (B, T)")
    shape = tuple(tokens.shape)
    if len(shape) != 2 or tokens.is_floating_point():
        raise UserError(f"tokens are {tokens.dtype} of shape {shape}: give int64 (B, T)")
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


def task_fractions(tasks):
    """Return kind -> fraction of the setting `tasks`, words as "vt:0.05". Raises UserError."""
    fractions = {}
    for task in tasks:
        kind, fraction = split_fraction(task)
        require(
            kind in TASKS and kind not in fractions and 0 < fraction <= 1,
            f"tasks={','.join(tasks)} has {task}: give each kind of {', '.join(TASKS)} at most "
            "once, with a fraction of the sequences above 0 and at most 1, as in vt:0.05",
        )
        fractions[kind] = fraction
    total = math.fsum(fractions.values())
    require(
        total <= 1 + 1e-9,
        f"the fractions of tasks={','.join(tasks)} add up to {total:g}: lower them to 1 or less",
    )
    return fractions


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
    require(not (cfg.text and cfg.dataset), "--text and --dataset both name a text: leave one out")
    require(
        not cfg.text or cfg.task == "loss",
        f"--text is of --task=loss, and --task={cfg.task} has texts of its own: leave one out",
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
    check_choices(cfg)
    require(
        bool(cfg.judge) == ("key-tokens" in cfg.protocol),
        "--protocol=key-tokens and --judge=RUN need each other: give both or neither",
    )


def check_choices(cfg):
    """Refuse a word that the type of its setting does not name, and an empty list of them."""
    for name, hint in typing.get_type_hints(type(cfg)).items():
        is_list = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if is_list else hint
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            value = getattr(cfg, name)
            words = value if is_list else (value,)
            require(
                words and set(words) <= set(choices),
                f"{name}={value} is unknown: choose one of {', '.join(choices)}",
            )


def check_png(name, path):
    """Refuse the path of a figure, "" for none, that does not end in .png."""
    require(not path or path.endswith(".png"), f"--{name}={path} is not a PNG: end it in .png")
