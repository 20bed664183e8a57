"""RoPE in a config of transformers, which has it in one form: rope_parameters."""

import copy
import math
from typing import NamedTuple

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_scaling
from nanolong.errors import UserError, check_choice, require

# rope_type -> method, if it has another name here
METHODS = {"linear": "pi", "dynamic": "dynamic-ntk"}
OPTIONS = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "yarn": ("beta_fast", "beta_slow", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# method -> rope_type; ntk and abf are another base
TYPES = {"pi": "linear", "yarn": "yarn", "ntk": "default", "abf": "default"}
TYPES |= {"llama3": "llama3", "longrope": "longrope"}
ORIGINAL = "original_max_position_embeddings"
HERE = "use hf.py import and extend.py"
# vLLM reads the last two
MSCALES = ("attention_factor", "short_mscale", "long_mscale")
# names of the context length in tokens in some files; the last: tokenizer_config.json
LENGTHS = ("max_sequence_length", "model_max_length", "tokenizer_model_max_length")
LENGTHS += ("length_of_tokenizer",)


def by_kind(parameters):
    """Return the dicts of rope_parameters: one for each kind of layer, full first, or for all."""
    kinds = [value for _, value in sorted((parameters or {}).items()) if isinstance(value, dict)]
    return kinds or [parameters or {}]


# -----------------------------------------------------------------------------
# Reading


def check_types(c):
    """Refuse kinds of RoPE that are not read here, some of which transformers does not know."""
    for p in by_kind(getattr(c, "rope_parameters", None)):
        kind = p.get("rope_type", "default")
        problem = f"its rope_type {kind!r} is not one of {', '.join(OPTIONS)}"
        require(kind in OPTIONS, f"{problem}, which are read here: choose another checkpoint")


def read_rope(c, uses_window):
    """Return the settings of GPTConfig for the RoPE of a config.

    uses_window: a bool for each layer: families differ in whether windows have their own RoPE.
    """
    parameters = c.rope_parameters
    if by_kind(parameters) == [parameters]:
        return read_parameters(c, parameters, None)
    found = []
    for kind, has_window in (("full_attention", False), ("sliding_attention", True)):
        if has_window in uses_window:
            # transformers looks for truncate outside
            p = {**parameters[kind], "truncate": parameters.get("truncate", True)}
            found.append(read_parameters(c, p, kind))
    settings, local = found[0], found[-1]
    if local["rope_base"] != settings["rope_base"]:
        settings["rope_local_base"] = local["rope_base"]
    # here layers with a window have the scaling of the others, or none
    if settings["extension"] and not local["extension"]:
        settings["extension"]["layers"] = "full"
    return settings


def read_parameters(c, p, layer_type):
    """Return the settings of GPTConfig for rope_parameters that hold for one kind of layer."""
    kind = p.get("rope_type", "default")
    settings = {
        "rope_base": float(p["rope_theta"]),
        "rope_fraction": p.get("partial_rotary_factor") or 1.0,
        "block_size": c.max_position_embeddings,
        "extension": None,
    }
    if kind == "default":
        return settings
    factor = p.get("factor")
    original, length = read_lengths(c, p, kind)
    options = {key: p[key] for key in OPTIONS[kind] if p.get(key) is not None}
    if {"attention_factor", "mscale"} & p.keys() and kind in ("yarn", "longrope"):
        options["attention_factor"] = float(compute(c, p, layer_type)[1])
    if c.model_type == "llama4_text" and c.use_qk_norm and kind in ("yarn", "longrope"):
        options["attention_factor"] = 1.0  # the norm after the rotation removes it
    if options.get("truncate"):
        del options["truncate"]
    if options.get("short_factor") == options.get("long_factor"):
        options.pop("short_factor", None)
    settings["block_size"] = length
    settings["extension"] = {
        "method": METHODS.get(kind, kind),
        "factor": float(factor or max(1.0, length / original)),
        "options": options,
        "original_length": original,
    }
    return settings


def read_lengths(c, p, kind):
    """Return the original and the extended context length in tokens."""
    # it is either, by the convention of whoever wrote it
    length = c.max_position_embeddings
    factor = p.get("factor")
    original = int(p.get("original_max_position_embeddings") or 0)
    if not factor:
        return original or length, length
    if original:
        extended = round(original * factor)
        # llama3's factor is no ratio of lengths; model cards add YaRN and leave the length
        has_both = length > original and (kind in ("llama3", "longrope") or length > extended)
        return original, length if has_both else extended
    others = [getattr(c, name, None) for name in LENGTHS]
    if kind == "linear" and round(length * factor) not in others:
        return max(1, round(length / factor)), length
    # transformers computes the others from this length as the original one
    return length, round(length * factor)


def compute(c, p, layer_type=None):
    """Return transformers' inverse frequencies, float32, and its factor of cos and sin."""
    if p["rope_type"] == "default":
        dim = int(c.head_dim * p.get("partial_rotary_factor", 1.0))
        return rope_scaling.none(p["rope_theta"], dim, 1, 1.0)
    find = ROPE_INIT_FUNCTIONS[p["rope_type"]]
    return find(c, "cpu", seq_len=c.max_position_embeddings, layer_type=layer_type)


# -----------------------------------------------------------------------------
# Writing


def check_method(method, options):
    """Refuse a method of RoPE that no config describes."""
    known = rope_scaling.OPTIONS
    check_choice(method, known, "method")
    # longrope has two tables; ntk-lceg follows the context length, not the text
    is_dynamic = "length" in known[method] and method not in ("longrope", "ntk-lceg")
    is_dynamic &= "length" not in options
    require(
        method not in rope_scaling.ATTENTION,
        f"method {method!r} replaces attention, which no config describes: extend by --method=yarn",
    )
    require(
        not is_dynamic,
        f"method {method!r} follows the length of the text, and a config has fixed frequencies: "
        "extend by a static --method such as yarn, or fix the length by --options=length=N",
    )


def write_rope(config, scheme, family):
    """Return rope_parameters with the frequencies of a RoPE, and the factor of cos and sin there.

    They are the first of candidates() from which transformers computes these frequencies.
    """
    extension = config.extension or {"method": "none", "options": {}}
    method = extension["method"]
    check_method(method, extension["options"])
    if scheme.is_dynamic:
        scheme = copy.deepcopy(scheme)  # the model's follows the length of its inputs
        scheme.update_tables(config.block_size)
    for p in candidates(config, scheme):
        if p["rope_type"] not in (family.rope_types or OPTIONS):
            continue
        if p["rope_type"] != "default":
            p["original_max_position_embeddings"] = config.original_length
        if family.partial:
            p["partial_rotary_factor"] = config.rope_fraction
        c = LlamaConfig(
            rope_parameters=dict(p),
            max_position_embeddings=config.block_size,
            num_attention_heads=1,
            hidden_size=config.head_dim,
            head_dim=config.head_dim,
        )
        inv_freq, factor = compute(c, c.rope_parameters)
        if torch.allclose(inv_freq.double(), scheme.inv_freq, rtol=3e-6, atol=1e-20):
            return p, factor
    raise UserError(
        f"RoPE by method {method!r} has no equivalent in this family of transformers: choose "
        "another --method"
    )


def candidates(config, scheme):
    """Yield rope_parameters that may have the frequencies of a RoPE."""
    extension = config.extension or {"method": "none", "factor": 1.0, "options": {}}
    factor = float(extension["factor"])
    options = {key: value for key, value in extension["options"].items() if value is not None}
    base = {"rope_theta": float(config.rope_base)}
    plain = rope_scaling.none(config.rope_base, scheme.rotary_dim, 1, 1.0)[0]
    # a pair of frequency 0 would have an infinite divisor, which JSON does not have
    table = (plain / scheme.inv_freq).clamp(max=1e30).tolist()
    length = max(config.original_length, 2)
    ratio = max(config.block_size / length, 1.0)
    # mlx-lm multiplies by this factor, whatever is said here: the queries get the rest
    attention_factor = math.sqrt(1 + math.log(ratio) / math.log(length))
    longrope = {"rope_type": "longrope", **base, "factor": ratio, "long_factor": table}
    longrope |= {"short_factor": table} | dict.fromkeys(MSCALES, attention_factor)
    if "short_factor" in options:  # two tables cannot be anything else
        yield longrope | {key: options[key] for key in OPTIONS["longrope"]}
        return
    yield {"rope_type": "default", **base}
    if scheme.rotary_dim > 2 and scheme.inv_freq[-1] > 0 and scheme.attention_factor == 1:
        # another base: the slowest pair has base^(-(dim - 2) / dim)
        slowest = scheme.inv_freq[-1].item() ** (-scheme.rotary_dim / (scheme.rotary_dim - 2))
        yield {"rope_type": "default", "rope_theta": slowest}
    yield {"rope_type": "linear", **base, "factor": factor}
    own = {key: options[key] for key in OPTIONS["yarn"] if key in options}
    yield {"rope_type": "yarn", **base, "factor": factor, **own}
    # llama3 is NTK-by-parts with the ramp of its paper, whose options have other names
    low = options.get("low_freq_factor", options.get("beta_slow", 1.0))
    usual = 32.0 if extension["method"] == "ntk-parts" else 4.0
    high = options.get("high_freq_factor", options.get("beta_fast", usual))
    ramp = {"low_freq_factor": float(low), "high_freq_factor": float(high)}
    yield {"rope_type": "llama3", **base, "factor": factor, **ramp}
    if all(1e-30 < divisor < 1e38 for divisor in table):
        yield longrope


# -----------------------------------------------------------------------------
# Extending what a file says


class Plan(NamedTuple):
    """RoPE after the extension."""

    p: dict  # rope_parameters that change
    before: int  # context length in tokens
    length: int
    dim: int  # channels that are rotated
    scaling: tuple  # (method, base, original_length, factor, options)

    def frequencies(self, length):
        """Return METHODS' inverse frequencies and attention factor for a text of this length."""
        method, base, original, factor, options = self.scaling
        if options.get("short_factor"):
            options = options | {"length": length}
        return rope_scaling.frequencies(method, base, self.dim, original, factor, **options)


def make_plan(c, p, kind, dim, method, factor, options):
    """Return the Plan for the rope_parameters of a file, which may be scaled already.

    c: config of transformers. kind: of layers, or None. dim: channels that are rotated.
    """
    own = read_parameters(c, p, kind)
    base, length = own["rope_base"], own["block_size"]
    plain = {"method": "none", "factor": 1.0, "options": {}, "original_length": length}
    before = own["extension"] or plain
    known, original = before["method"], before["original_length"]
    extended = round(length * factor) if rope_scaling.is_number(factor) else length
    problem = f"factor={factor:g} does not extend the context of {length} tokens"
    require(extended > length, f"{problem}: give a larger one")
    problem = "its rope_type is dynamic, which follows the length of the text"
    require(known != "dynamic-ntk", f"{problem}: {HERE}")
    if method == "abf" or (method == "ntk" and known == "none"):
        found, _ = rope_scaling.frequencies(method, base, dim, length, factor, **options)
        new_base = float(f"{found[-1].item() ** (-dim / (dim - 2)):.12g}")
        problem = f"its base is {base:g} already"
        require(new_base > base, f"{problem}: give a larger one, --options=new_base=NUMBER")
        scaling = known, new_base, original, before["factor"], before["options"]
        kept = {"factor": before["factor"], ORIGINAL: original}
        # a file that lacks them has them by its length, which is another now
        kept = {} if known in ("none", "pi") else kept
        plan = Plan({"rope_theta": new_base, **kept}, length, extended, dim, scaling)
        if known == "longrope":
            # elsewhere it follows the ratio of the lengths
            plan.p.update(dict.fromkeys(MSCALES, plan.frequencies(length)[1]))
        return plan
    require(
        known in ("none", method),
        f"it is extended already, by {known} and {before['factor']:g}, which {method} would "
        f"undo: give --method={known} or abf, or extend the checkpoint that it was made from",
    )
    options = keep_options(p, base, dim, before, options) | options
    is_complete = method != "longrope" or options.get("long_factor")
    require(is_complete, "method 'longrope' needs its long_factor: give --options=FILE.json")
    total = extended / original if method == "longrope" else before["factor"] * factor
    written = {"rope_type": TYPES[method], "factor": float(total), **options}
    # these have no defaults in transformers
    if method == "llama3":
        written = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | written
    if method == "longrope":
        written = {"short_factor": options["long_factor"]} | written
        if "attention_factor" in options:
            written |= dict.fromkeys(MSCALES, options["attention_factor"])
    if method != "pi" or ORIGINAL in p:
        written[ORIGINAL] = original
    return Plan(written, length, extended, dim, (method, base, original, total, options))


def keep_options(p, base, dim, before, options):
    """Return the options of a file that stay when its own method extends it again.

    An attention factor that follows from the factor becomes the one of the new factor.
    """
    kept = dict(before["options"])
    found = kept.pop("attention_factor", None)
    if found is None or "attention_factor" in options:
        return kept
    words = before["method"], base, dim, before["original_length"], before["factor"]
    _, usual = rope_scaling.frequencies(*words, **kept)
    is_usual = math.isclose(found, usual, rel_tol=1e-4) and "mscale" not in p
    problem = f"its attention factor, {found:g}, does not follow from its factor"
    require(is_usual, f"{problem}: give the new one, --options=attention_factor=NUMBER")
    return kept


def agrees(found, expected, plan):
    """Whether inverse frequencies and attention factor agree, as far as float32 goes."""
    plain, _ = rope_scaling.none(plan.scaling[1], plan.dim, 1, 1.0)
    # a ramp from extended pairs to others is rounded as a fraction of the latter
    allowed = 1e-6 * expected[0] + 1.2e-7 * plain
    is_close = ((found[0] - expected[0]).abs() <= allowed).all()
    return bool(is_close) and math.isclose(found[1], expected[1], rel_tol=1e-6)
