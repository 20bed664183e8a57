"""RoPE in a config.json: its rope_parameters, read and written."""

import math
from typing import NamedTuple

import torch

import rope_scaling
from nanolong.errors import UserError
from nanolong.hub.layout import UNROTATED, ConfigFields, is_number

# rope_type of a config.json -> what it means; su is an old name
ROPE_TYPES = {
    "default": "default",
    "yarn": "yarn",
    "longrope": "longrope",
    "llama3": "llama3",
    "linear": "linear",
    "dynamic": "dynamic",
    "proportional": "proportional",
    "su": "longrope",
}
# What a table of the type longrope may divide a frequency by
DIVISORS = {"low": 1e-30, "high": 1e38}

# -----------------------------------------------------------------------------
# Reading


def read_rope(fields, family, head_dim, uses_window):
    """Return the settings of GPTConfig for RoPE. Raises UserError for an unknown rope_type.

    uses_window: of each layer, since families differ in whether these have a RoPE of their own.
    """
    full, local = rope_values(fields, family)
    if all(uses_window):
        full = local or full
    settings = read_parameters(fields, family, head_dim, full)
    if local is None or len(set(uses_window)) < 2:
        return settings
    # layers with and without a window
    local = read_parameters(fields, family, head_dim, local)
    extension = settings["extension"]
    if local["extension"] not in (None, extension) or local["p_rope"] != settings["p_rope"]:
        raise UserError(
            f"{fields.file}: its sliding_attention layers have a scaling of RoPE that differs from "
            "that of its full_attention layers, and here they have the same or none: choose "
            "another checkpoint"
        )
    if local["rope_base"] != settings["rope_base"]:
        settings["rope_local_base"] = local["rope_base"]
    if extension and not local["extension"]:
        extension["layers"] = "full"
    return settings


def rope_values(fields, family):
    """Return the RoPE parameters of full-attention layers, and of those with a window or None.

    They are found as transformers finds them: rope_scaling goes before rope_parameters.
    """
    outer = fields.values
    inner = outer.get("rope_scaling") or outer.get("rope_parameters") or {}
    if not isinstance(inner, dict):
        raise fields.wrong_value("rope_scaling", "an object")
    names = {key: fields.name(key) for key in ("rope_theta", "partial_rotary_factor")}
    shared = {key: outer[name] for key, name in names.items() if name in outer}
    is_nested = any(isinstance(value, dict) for value in inner.values())
    if is_nested and not family.rope_by_kind:
        raise UserError(
            f"{fields.file}: its rope_parameters differ by layer, and in models of this type all "
            "layers have the same: choose another checkpoint"
        )
    if not family.rope_by_kind:
        return shared | inner, None
    local = {"rope_theta": fields.get("rope_local_base_freq")}
    if not is_nested:
        return shared | inner, local
    kinds = [inner.get(name) or {} for name in ("full_attention", "sliding_attention")]
    if not all(isinstance(kind, dict) for kind in kinds):
        raise fields.wrong_value("rope_parameters", "an object of objects")
    # transformers looks for truncate outside
    truncate = {"truncate": inner.get("truncate", True)}
    return shared | kinds[0] | truncate, local | kinds[1] | truncate


def read_parameters(fields, family, head_dim, values):
    """Return the settings of GPTConfig for RoPE parameters that are the same in all layers."""
    rope_type = values.get("rope_type", values.get("type", "default"))
    meanings = family.rope_types or ROPE_TYPES
    if not isinstance(rope_type, str) or rope_type not in meanings:
        raise UserError(
            f"{fields.file}: there is no rope_type {rope_type!r} here: what can be imported is "
            f"{', '.join(meanings)}"
        )
    rope_type = meanings[rope_type]
    length = fields.integer("max_position_embeddings")
    # the original length outside goes before one inside
    key = "original_max_position_embeddings"
    original_length = fields.values.get(key) or values.get(key)
    if original_length is None:
        original_length = length
    rope = ConfigFields(fields.file, {**values, key: original_length}, fields.defaults)
    fraction = 1.0
    if rope.get("partial_rotary_factor") is not None:
        fraction = rope.real("partial_rotary_factor", 0, 1)
    # proportional has the frequencies of the whole head, others those of the rotated part
    is_p_rope = rope_type == "proportional"
    if fraction != 1 and not is_p_rope and not family.partial_rope:
        raise UserError(
            f"{fields.file}: partial_rotary_factor is {fraction}, and transformers' own models of "
            "this type rotate whole heads: set it to 1, if that is meant"
        )
    n_pairs = int(fraction * head_dim) // 2
    extension, length = read_extension(rope, rope_type, length, n_pairs, family.rope_by_kind)
    options = extension["options"] if extension else {}
    table = [*options.get("short_factor", []), *options.get("long_factor", [])]
    return {
        # an exported model without RoPE rotates no pair of channels
        "pos": "nope" if table and min(table) >= UNROTATED else "rope",
        "rope_base": rope.real("rope_theta", 1.0, 1e12),
        "rope_fraction": 1.0 if is_p_rope else fraction,
        "p_rope": fraction if is_p_rope else 1.0,
        "extension": extension,
        "block_size": length,
    }


def read_extension(rope, rope_type, length, n_pairs, by_kind):
    """Return GPTConfig.extension, None for plain RoPE, and the context length.

    rope: the fields of its parameters. by_kind: whether it differs by kind of layer.
    """
    original_length = rope.integer("original_max_position_embeddings")
    factor = rope.get("factor")
    if rope_type == "default" or (rope_type == "proportional" and factor is None):
        return None, length
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = length / original_length
    else:
        factor = rope.real("factor", 1, 1e6)
    method = rope_type
    if rope_type in ("linear", "dynamic", "proportional"):
        method = "dynamic-ntk" if rope_type == "dynamic" else "pi"
        # the length is the original one, but in families with RoPE by kind of layer the extended
        if by_kind:
            original_length = round(length / factor)
        else:
            original_length = length
            length = round(length * factor)
    elif rope_type != "longrope" and length == original_length:
        # some configs hold the original length alone
        length = max(length, round(original_length * factor))
    extension = {
        "method": method,
        "factor": factor,
        "options": read_options(rope, rope_type, factor, n_pairs),
        "original_length": original_length,
    }
    return extension, length


def read_options(rope, rope_type, factor, n_pairs):
    """Return the options of an extension method."""
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
        "longrope": ("attention_factor",),
    }
    options = {}
    for key in names.get(rope_type, ()):
        if rope.get(key) is not None:
            options[key] = rope.real(key, 1e-12, 1e12)
    if rope_type == "yarn":
        has_mscale = rope.get("mscale") and rope.get("mscale_all_dim")
        if has_mscale and "attention_factor" not in options and factor > 1:
            # as DeepSeek's configs have it: the ratio of two of YaRN's temperatures
            mscale = 0.1 * rope.real("mscale", 0, 100) * math.log(factor) + 1
            mscale_all_dim = 0.1 * rope.real("mscale_all_dim", 0, 100) * math.log(factor) + 1
            options["attention_factor"] = mscale / mscale_all_dim
        if not rope.values.get("truncate", True):
            options["truncate"] = False
    if rope_type == "longrope":
        tables = {key: rope.reals(key, n_pairs, **DIVISORS) for key in LONGROPE_TABLES}
        if tables["short_factor"] == tables["long_factor"]:
            del tables["short_factor"]
        options |= tables
    return options


# -----------------------------------------------------------------------------
# Writing

LONGROPE_TABLES = ("short_factor", "long_factor")


class WrittenRope(NamedTuple):
    """What a config.json says of RoPE, and what has to be done to the weights for it."""

    parameters: dict  # rope_parameters
    max_position_embeddings: int
    # where a RoPE rotates a part of a head: which of our channels each of theirs is
    channel_order: list | None = None
    # what multiplies cos and sin by these parameters; the weights of the queries say the rest
    attention_factor: float = 1.0


def write_rope(config, pos, family):
    """Return the WrittenRope of a RoPE.

    A method is written by its name in transformers, plain RoPE of whatever base by this base, and
    any other fixed frequencies as a longrope table. Raises UserError for what has no equivalent.
    """
    extension = config.extension or {"method": "none", "factor": 1.0, "options": {}}
    method, options = extension["method"], extension["options"]
    factor = float(extension["factor"])
    check_method(method, pos)
    # a dynamic method that is fixed to the extended length is a static one
    static = {"dynamic-pi": "pi", "dynamic-yarn": "yarn"}
    if method in static and options.get("length") == config.original_length * factor:
        method, options = static[method], {}
    # a rotated part of each head is either a field, or a table in which the rest is unrotated
    is_plain = family.partial_rope or pos.rotary_dim == config.head_dim
    rope_type = named_rope_type(method, factor, options, config.p_rope)
    if is_plain and rope_type in (family.rope_types or ROPE_TYPES).values():
        rope = write_named_type(rope_type, config, pos, factor, options)
    elif method == "longrope" and "short_factor" in options:
        raise UserError(
            f"longrope with two tables and rope_fraction={config.rope_fraction} has no equivalent "
            "among the models that transformers loads: leave out short_factor"
        )
    else:
        if pos.is_dynamic:
            pos.update_tables(config.block_size)
        base = base_of_plain_rope(config, pos, method, factor) if is_plain else None
        if base is None:
            rope = write_table(config, pos, factor, is_plain)
        else:
            parameters = {"rope_type": "default", "rope_theta": base}
            rope = WrittenRope(parameters, config.block_size)
    if family.partial_rope:
        rope.parameters["partial_rotary_factor"] = config.rope_fraction
    return rope


def check_method(method, pos):
    """Raise UserError for a method that transformers cannot compute by fixed frequencies."""
    if method in rope_scaling.EVALUATION_ONLY:
        raise UserError(
            f"method {method!r} replaces attention, and transformers has nothing like it: "
            "extend the model by another --method"
        )
    # ntk-lceg follows the context length, not the text; transformers has longrope's two tables
    if pos.is_dynamic and method not in ("ntk-lceg", "longrope"):
        raise UserError(
            f"method {method!r} follows the length of the text, and transformers' dynamic type "
            "counts otherwise and keeps stale keys: extend by a static --method, or fix the length "
            "by --options=length=N"
        )


def named_rope_type(method, factor, options, p_rope):
    """Return the rope_type that transformers has for a method, or None."""
    if p_rope < 1:
        return "proportional" if method in ("none", "pi") else None
    if method == "longrope" and options.get("long_factor"):
        return "longrope"
    if factor <= 1:
        return None
    # llama3 is NTK-by-parts with the ramp of its paper
    if method == "ntk-parts" and options.get("ramp") == "paper":
        return "llama3"
    if method == "yarn" and options.get("ramp", "index") != "index":
        return None
    return {"pi": "linear", "yarn": "yarn", "ntk-parts": "yarn", "llama3": "llama3"}.get(method)


def write_named_type(rope_type, config, pos, factor, options):
    """Return the WrittenRope of a rope_type that transformers has."""
    options = {key: value for key, value in options.items() if value is not None}
    parameters = {
        "rope_type": rope_type,
        "rope_theta": float(config.rope_base),
        "factor": factor,
    }
    if rope_type == "proportional":
        parameters["partial_rotary_factor"] = config.p_rope
    if rope_type in ("linear", "proportional"):
        # here transformers wants the original length, and multiplies it by the factor
        return WrittenRope(parameters, config.original_length)
    parameters["original_max_position_embeddings"] = config.original_length
    attention_factor = 1.0
    if rope_type == "yarn":
        # without attention_factor, which only transformers reads: mlx-lm and llama.cpp multiply
        # cos and sin by this factor, whatever it says
        for key in options.keys() & {"beta_fast", "beta_slow"}:
            parameters[key] = float(options[key])
        if "truncate" in options:
            parameters["truncate"] = options["truncate"]
        attention_factor = 0.1 * math.log(factor) + 1
    elif rope_type == "llama3":
        # the options of llama3, or of ntk-parts with its ramp
        low = options.get("low_freq_factor", options.get("beta_slow", 1.0))
        usual = 32.0 if options.get("ramp") == "paper" else 4.0
        high = options.get("high_freq_factor", options.get("beta_fast", usual))
        parameters |= {"low_freq_factor": float(low), "high_freq_factor": float(high)}
    else:
        tables = {key: options.get(key) or options["long_factor"] for key in LONGROPE_TABLES}
        parameters |= {key: [float(value) for value in table] for key, table in tables.items()}
        attention_factor = pos.attention_factor
        if "attention_factor" in options:
            attention_factor = longrope_attention_factor(config)
            parameters |= attention_factor_names(attention_factor)
    return WrittenRope(parameters, config.block_size, attention_factor=attention_factor)


def longrope_attention_factor(config):
    """Return what mlx-lm multiplies cos and sin by, whatever attention_factor says."""
    if config.block_size <= config.original_length or config.original_length == 1:
        return 1.0
    factor = config.block_size / config.original_length
    return math.sqrt(1 + math.log(factor) / math.log(config.original_length))


def attention_factor_names(value):
    """Return the factor of cos and sin under its three names; older runtimes use the last two."""
    return dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), float(value))


def plain_frequencies(base, dim):
    """Return base^(-2k / dim), float64 (dim / 2,)."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def base_of_plain_rope(config, pos, method, factor):
    """Return the base whose plain frequencies are those of a RoPE, or None."""
    dim = pos.rotary_dim
    if pos.attention_factor != 1 or dim <= 2:
        return None
    inv_freq = pos.inv_freq.double()
    base = float(config.rope_base)
    if method != "none" and factor != 1:
        # the slowest pair has base^(-(dim - 2) / dim)
        base = inv_freq[-1].item() ** (-dim / (dim - 2))
    same = torch.allclose(inv_freq, plain_frequencies(base, dim), rtol=1e-9, atol=0)
    return base if same else None


def write_table(config, pos, factor, is_plain):
    """Return the WrittenRope of any frequencies: the longrope table that divides plain ones.

    is_plain: whether the family rotates as many channels as the model.
    """
    base = float(config.rope_base)
    rotary_dim = pos.rotary_dim
    head_dim = rotary_dim if is_plain else config.head_dim
    plain = plain_frequencies(base, head_dim)[: rotary_dim // 2]
    # a pair of frequency 0 would have an infinite factor, which JSON does not have
    table = (plain / pos.inv_freq.double()).clamp(max=UNROTATED).tolist()
    table += [UNROTATED] * ((head_dim - rotary_dim) // 2)
    if not all(is_number(divisor, **DIVISORS) for divisor in table):
        raise UserError(
            f"--pos={config.pos} has frequencies that are negative or not finite, and transformers "
            "cannot read such a table: correct the scheme or the method"
        )
    attention_factor = longrope_attention_factor(config)
    parameters = longrope_table(base, factor, config.original_length, table, attention_factor)
    order = pairs_first(head_dim, rotary_dim) if rotary_dim < head_dim else None
    return WrittenRope(parameters, config.block_size, order, attention_factor)


def pairs_first(head_dim, rotary_dim):
    """Return the order of channels that pairs channel c with c + head_dim / 2, rotated pairs first.

    Ours pair c with c + rotary_dim / 2, and the channels from rotary_dim on are not rotated.
    """
    channels = list(range(head_dim))
    half = rotary_dim // 2
    middle = (head_dim + rotary_dim) // 2
    first_of_pair = channels[:half] + channels[rotary_dim:middle]
    second_of_pair = channels[half:rotary_dim] + channels[middle:]
    return first_of_pair + second_of_pair


def longrope_table(base, factor, original_length, table, attention_factor):
    """Return rope_parameters of type longrope with one table for all lengths."""
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": original_length,
        **dict.fromkeys(LONGROPE_TABLES, table),
        **attention_factor_names(attention_factor),
    }


def unrotated_rope(length, head_dim):
    """Return rope_parameters that rotate nothing, for architectures that rotate all layers."""
    return longrope_table(10000.0, 1.0, length, [UNROTATED] * (head_dim // 2), 1.0)
