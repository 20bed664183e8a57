"""RoPE in a config.json: its rope_parameters, read and written."""

import math
from typing import NamedTuple

import torch

import rope_scaling
from nanolong.errors import UserError
from nanolong.hub.layout import UNROTATED, ConfigFields

# -----------------------------------------------------------------------------
# Reading


def read_rope(fields, family, head_dim, uses_window):
    """Return the settings of GPTConfig for RoPE. Raises UserError for an unknown rope_type.

    uses_window: of each layer, since families differ in whether these have a RoPE of their own.
    """
    full, local = rope_values(fields, family)
    if all(uses_window):
        full = local or full
    rope = RopeFields(fields, family, head_dim, full)
    extension, length = rope.read_extension()
    settings = {
        "pos": "nope" if rotates_nothing(extension) else "rope",
        "rope_base": rope.base(),
        "rope_fraction": rope.rope_fraction,
        "p_rope": rope.p_rope,
        "extension": extension,
        "block_size": length,
    }
    if local is None or len(set(uses_window)) < 2:
        return settings
    # layers with and without a window
    local_rope = RopeFields(fields, family, head_dim, local)
    local_extension, _ = local_rope.read_extension()
    if local_rope.base() != rope.base():
        settings["rope_local_base"] = local_rope.base()
    is_other = local_extension not in (None, extension) or local_rope.p_rope != rope.p_rope
    if extension and not local_extension:
        extension["layers"] = "full"
    if is_other:
        raise UserError(
            f"{fields.file}: its sliding_attention layers have a scaling of RoPE that differs from "
            "that of its full_attention layers, and here they have the same or none: choose "
            "another checkpoint"
        )
    return settings


def rope_values(fields, family):
    """Return the RoPE parameters of full-attention layers, and of those with a window or None.

    They are found as transformers finds them: rope_scaling goes before rope_parameters.
    """
    outer = fields.values
    inner = outer.get("rope_scaling") or outer.get("rope_parameters") or {}
    names = {key: fields.name(key) for key in ("rope_theta", "partial_rotary_factor")}
    shared = {key: outer[name] for key, name in names.items() if name in outer}
    if not isinstance(inner, dict):
        raise fields.wrong_value("rope_scaling", "an object")
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


def rotates_nothing(extension):
    """Return whether no pair of channels is rotated, as in an exported model without RoPE."""
    options = extension["options"] if extension else {}
    table = [*options.get("short_factor", []), *options.get("long_factor", [])]
    return bool(table) and min(table) >= UNROTATED


class RopeFields(ConfigFields):
    """The RoPE parameters of a config.json; the original length outside goes before one inside."""

    def __init__(self, fields, family, head_dim, values):
        super().__init__(fields.file, values, fields.defaults)
        self.family = family
        self.length = fields.integer("max_position_embeddings")
        self.rope_type = self.known_type()
        fraction = 1.0
        if self.get("partial_rotary_factor") is not None:
            fraction = self.real("partial_rotary_factor", 0, 1)
        # the first has the frequencies of the whole head, the other those of the rotated part
        self.p_rope = fraction if self.rope_type == "proportional" else 1.0
        self.rope_fraction = 1.0 if self.rope_type == "proportional" else fraction
        if self.rope_fraction != 1 and not family.partial_rope:
            raise UserError(
                f"{self.file}: partial_rotary_factor is {fraction}, and transformers' own models "
                "of this type rotate whole heads: set it to 1, if that is meant"
            )
        self.n_pairs = int(self.rope_fraction * head_dim) // 2

        key = "original_max_position_embeddings"
        original_length = fields.values.get(key) or values.get(key)
        if original_length is None:
            original_length = self.length
        self.original_length = ConfigFields(fields.file, {key: original_length}, {}).integer(key)

    def known_type(self):
        rope_type = self.values.get("rope_type", self.values.get("type", "default"))
        meanings = self.family.rope_types or ROPE_TYPES
        if not isinstance(rope_type, str) or rope_type not in meanings:
            raise UserError(
                f"{self.file}: there is no rope_type {rope_type!r} here: what can be imported is "
                f"{', '.join(meanings)}"
            )
        return meanings[rope_type]

    def read_extension(self):
        """Return GPTConfig.extension, None for plain RoPE, and the context length."""
        method, factor, options, original_length, length = READERS[self.rope_type](self)
        extension = {
            "method": method,
            "factor": factor,
            "options": options,
            "original_length": original_length,
        }
        return (None if method == "none" else extension), length

    def base(self):
        return self.real("rope_theta", 1.0, 1e12)

    def factor(self):
        return self.real("factor", 1, 1e6)

    def optional_factor(self):
        """Return the factor, by default what the two lengths say."""
        if self.get("factor") is None:
            return self.length / self.original_length
        return self.factor()

    def extended_length(self, factor):
        """Return the extended context length: some configs hold the original length alone."""
        if self.length != self.original_length:
            return self.length
        return max(self.length, round(self.original_length * factor))

    def options(self, *keys):
        """Return those of the options that are given."""
        return {key: self.real(key, 1e-12, 1e12) for key in keys if self.get(key) is not None}

    def table(self, key):
        """Return a list of factors, one for each rotated pair."""
        table = self.get(key)
        whole = isinstance(table, list) and len(table) == self.n_pairs
        if not whole or not all(is_positive_number(factor) for factor in table):
            raise UserError(
                f"{self.file}: {key} must be a list of {self.n_pairs} numbers above 0, one for "
                "each rotated pair: download it again"
            )
        return table


def is_positive_number(value):
    return type(value) in (int, float) and 0 < value < math.inf


# Each returns the method, its factor and options, and the context length before and after.


def read_default_rope(rope):
    return "none", 1.0, {}, rope.length, rope.length


def read_interpolated_rope(rope):
    """The length is the original one, but in families with RoPE by kind of layer the extended."""
    if rope.rope_type == "proportional" and rope.get("factor") is None:
        return read_default_rope(rope)
    method = "dynamic-ntk" if rope.rope_type == "dynamic" else "pi"
    factor = rope.factor()
    if rope.family.rope_by_kind:
        return method, factor, {}, round(rope.length / factor), rope.length
    return method, factor, {}, rope.length, round(rope.length * factor)


def read_llama3_rope(rope):
    factor = rope.factor()
    options = rope.options("low_freq_factor", "high_freq_factor")
    return "llama3", factor, options, rope.original_length, rope.extended_length(factor)


def read_yarn_rope(rope):
    factor = rope.optional_factor()
    options = rope.options("beta_fast", "beta_slow", "attention_factor")
    has_mscale = rope.get("mscale") and rope.get("mscale_all_dim")
    if has_mscale and "attention_factor" not in options and factor > 1:
        # as DeepSeek's configs have it: the ratio of two of YaRN's temperatures
        mscale = 0.1 * rope.real("mscale", 0, 100) * math.log(factor) + 1
        mscale_all_dim = 0.1 * rope.real("mscale_all_dim", 0, 100) * math.log(factor) + 1
        options["attention_factor"] = mscale / mscale_all_dim
    if not rope.values.get("truncate", True):
        options["truncate"] = False
    return "yarn", factor, options, rope.original_length, rope.extended_length(factor)


def read_longrope(rope):
    factor = rope.optional_factor()
    options = rope.options("attention_factor")
    short_factor = rope.table("short_factor")
    long_factor = rope.table("long_factor")
    if short_factor != long_factor:
        options["short_factor"] = short_factor
    options["long_factor"] = long_factor
    return "longrope", factor, options, rope.original_length, rope.length


READERS = {
    "default": read_default_rope,
    "yarn": read_yarn_rope,
    "longrope": read_longrope,
    "llama3": read_llama3_rope,
    **dict.fromkeys(("linear", "dynamic", "proportional"), read_interpolated_rope),
}
# rope_type of a config.json -> key of READERS; su is an old name
ROPE_TYPES = {**{name: name for name in READERS}, "su": "longrope"}


# -----------------------------------------------------------------------------
# Writing


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
    method, options = static_method(method, factor, options, config.original_length)
    # a rotated part of each head is either a field, or a table in which the rest is unrotated
    is_plain = family.partial_rope or pos.rotary_dim == config.head_dim
    rope_type = named_rope_type(method, factor, options, config.p_rope)
    if is_plain and rope_type in (family.rope_types or ROPE_TYPES).values():
        rope = write_named_type(rope_type, config, pos, method, factor, options)
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


def static_method(method, factor, options, original_length):
    """Return the static (method, options) of a dynamic one that is fixed to the extended length.

    Others are returned as they are.
    """
    static = {"dynamic-pi": "pi", "dynamic-yarn": "yarn"}
    if method in static and options.get("length") == original_length * factor:
        return static[method], {}
    return method, options


def named_rope_type(method, factor, options, p_rope):
    """Return the rope_type that transformers has for a method, or None."""
    if p_rope < 1:
        return "proportional" if method in ("none", "pi") else None
    if method == "longrope" and options.get("long_factor"):
        return "longrope"
    if factor <= 1:
        return None
    ramp = options.get("ramp", "index")
    if method == "pi":
        return "linear"
    if method in ("yarn", "ntk-parts") and ramp == "index":
        return "yarn"
    # llama3 is NTK-by-parts with the ramp of its paper
    if method == "llama3" or (method == "ntk-parts" and ramp == "paper"):
        return "llama3"
    return None


def write_named_type(rope_type, config, pos, method, factor, options):
    """Return the WrittenRope of a rope_type that transformers has."""
    attention_factor = 1.0
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
    if rope_type == "yarn":
        parameters |= yarn_parameters(options)
        attention_factor = yarn_attention_factor(factor)
    elif rope_type == "llama3":
        parameters |= llama3_parameters(method, options)
    else:
        long_factor = [float(value) for value in options["long_factor"]]
        short_factor = [float(value) for value in options.get("short_factor") or long_factor]
        parameters |= {"long_factor": long_factor, "short_factor": short_factor}
        attention_factor = pos.attention_factor
        if options.get("attention_factor") is not None:
            attention_factor = longrope_attention_factor(config)
            parameters |= attention_factor_names(attention_factor)
    return WrittenRope(parameters, config.block_size, attention_factor=attention_factor)


def yarn_parameters(options):
    """Return YaRN's options, without attention_factor, which only transformers reads."""
    parameters = {}
    for key in ("beta_fast", "beta_slow"):
        if options.get(key) is not None:
            parameters[key] = float(options[key])
    if options.get("truncate") is not None:
        parameters["truncate"] = options["truncate"]
    return parameters


def yarn_attention_factor(factor):
    """Return what mlx-lm and llama.cpp multiply cos and sin by, whatever attention_factor says."""
    return 0.1 * math.log(factor) + 1


def llama3_parameters(method, options):
    if method == "llama3":
        low = options.get("low_freq_factor", 1.0)
        high = options.get("high_freq_factor", 4.0)
    else:
        low = options.get("beta_slow", 1.0)
        high = options.get("beta_fast", 32.0)
    return {"low_freq_factor": float(low), "high_freq_factor": float(high)}


def longrope_attention_factor(config):
    """Return what mlx-lm multiplies cos and sin by, whatever attention_factor says."""
    if config.block_size <= config.original_length or config.original_length == 1:
        return 1.0
    factor = config.block_size / config.original_length
    return math.sqrt(1 + math.log(factor) / math.log(config.original_length))


def attention_factor_names(value):
    """Return the factor of cos and sin under its three names; older runtimes use the last two."""
    return {"attention_factor": value, "short_mscale": value, "long_mscale": value}


def plain_frequencies(base, dim):
    """Return base^(-2k / dim), float64 (dim / 2,)."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def base_of_plain_rope(config, pos, method, factor):
    """Return the base whose plain frequencies are those of a RoPE, or None."""
    dim = pos.rotary_dim
    if pos.attention_factor != 1 or dim <= 2:
        return None
    inv_freq = pos.inv_freq.double()
    if method == "none" or factor == 1:
        base = float(config.rope_base)
    else:
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
    n_rotated = rotary_dim // 2
    n_unrotated = (head_dim - rotary_dim) // 2
    plain = plain_frequencies(base, head_dim)[:n_rotated]
    # a pair of frequency 0 would have an infinite factor, which JSON does not have
    table = (plain / pos.inv_freq.double()).clamp(max=UNROTATED).tolist()
    table += [UNROTATED] * n_unrotated
    if not all(map(is_positive_number, table)):
        raise UserError(
            f"--pos={config.pos} has frequencies that are negative or not finite, and transformers "
            "cannot read such a table: correct the scheme or the method"
        )
    attention_factor = longrope_attention_factor(config)
    parameters = longrope_table(base, factor, config.original_length, table, attention_factor)
    channel_order = None
    if n_unrotated:
        channel_order = pairs_first(head_dim, rotary_dim)
    return WrittenRope(parameters, config.block_size, channel_order, attention_factor)


def pairs_first(head_dim, rotary_dim):
    """Return the order of channels that pairs channel c with c + head_dim / 2, rotated pairs first.

    Ours pair c with c + rotary_dim / 2, and the channels from rotary_dim on are not rotated.
    """
    half = rotary_dim // 2
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    first_of_pair = [*range(half), *range(rotary_dim, middle)]
    second_of_pair = [*range(half, rotary_dim), *range(middle, head_dim)]
    return first_of_pair + second_of_pair


def longrope_table(base, factor, original_length, table, attention_factor):
    """Return rope_parameters of type longrope with one table for all lengths."""
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": original_length,
        "long_factor": table,
        "short_factor": table,
        **attention_factor_names(float(attention_factor)),
    }


def unrotated_rope(length, head_dim):
    """Return rope_parameters that rotate nothing, for architectures that rotate all layers."""
    return longrope_table(10000.0, 1.0, length, [UNROTATED] * (head_dim // 2), 1.0)
