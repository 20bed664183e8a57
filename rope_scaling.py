"""How RoPE's context is extended: one pure function for each method.

    from rope_scaling import METHODS
    inv_freq, attention_factor = METHODS["yarn"](10000.0, 64, 1024, 4.0)

A method maps (base, rotary_dim, original_length in tokens, factor, **options) to the inverse
frequencies, float64 (rotary_dim / 2,), and the attention factor that multiplies cos and sin. At
factor 1 it is plain RoPE to the bit, apart from drope, longrope with a table, and options that say
otherwise (attention_factor, new_base). A method with the option `length`, the tokens of the input,
is dynamic: the model passes the length at every forward pass. To add a method, write a function and
add a line to METHODS. The other schemes' methods are in their classes in model.py.
"""

import inspect
import math
import numbers
import sys
from typing import NamedTuple

import torch

import kernels
from nanolong.errors import UserError, require


def none(base, rotary_dim, original_length, factor):
    """Plain RoPE (Su et al. 2021): frequencies base^(-2k/d)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1)
    return float(base) ** -exponent, 1.0


def pi(base, rotary_dim, original_length, factor):
    """Position interpolation (Chen et al. 2023): positions divided by the factor."""
    inv_freq, _ = none(base, rotary_dim, original_length, factor)
    return inv_freq / factor, 1.0


def ntk(base, rotary_dim, original_length, factor):
    """NTK-aware (bloc97 2023): a larger base; only the slowest pair is fully interpolated."""
    check_pairs("ntk", rotary_dim)
    new_base = base * factor ** (rotary_dim / (rotary_dim - 2))
    return none(new_base, rotary_dim, original_length, factor)


def ntk_parts(
    base,
    rotary_dim,
    original_length,
    factor,
    beta_fast=32.0,
    beta_slow=1.0,
    ramp="index",
    truncate=True,
):
    """
    NTK-by-parts (Peng et al. 2023): pairs with more than beta_fast rotations in the original length
    stay, those with less than beta_slow are interpolated, with a linear ramp between them.

    ramp="index" is linear in the index of the pair, its ends rounded outwards if truncate, as in
    YaRN's released code and in other software; ramp="paper" is linear in the number of rotations.
    Between these ends MrRoPE (arXiv 2601.22181) divides frequencies by factor^e, where e is t / n
    (ramp="geometric") or t (t + 1) / (n (n + 1)) (ramp="progressive") for pair t of n.
    """
    inv_freq, _ = none(base, rotary_dim, original_length, factor)
    if ramp == "paper":
        rotations = original_length * inv_freq / (2 * math.pi)
        keep = ((rotations - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    else:
        fraction, n = index_ramp(base, rotary_dim, original_length, beta_fast, beta_slow, truncate)
        keep = 1 - fraction
    if ramp in ("geometric", "progressive"):
        exponent = fraction if ramp == "geometric" else fraction * (fraction * n + 1) / (n + 1)
        return inv_freq / factor**exponent, 1.0
    interpolated = inv_freq / factor
    return interpolated + keep * (inv_freq - interpolated), 1.0


def index_ramp(base, rotary_dim, original_length, beta_fast, beta_slow, truncate):
    """Rise from 0 to 1 between two pairs: float64 (R/2,), and the distance n of the two."""
    low = index_of_rotations(beta_fast, base, rotary_dim, original_length)
    high = index_of_rotations(beta_slow, base, rotary_dim, original_length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = max(min(high, rotary_dim - 1), low)
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return ((index - low) / (high - low or 0.001)).clamp(0, 1), high - low


def index_of_rotations(rotations, base, rotary_dim, original_length):
    """The (fractional) index of the pair that completes so many rotations in original_length."""
    wavelength = original_length / (rotations * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(base))


def yarn(
    base,
    rotary_dim,
    original_length,
    factor,
    beta_fast=32.0,
    beta_slow=1.0,
    ramp="index",
    truncate=True,
    attention_factor=None,
):
    """YaRN (Peng et al. 2023): NTK-by-parts, with cos and sin multiplied by 0.1 ln(factor) + 1."""
    inv_freq, _ = ntk_parts(
        base, rotary_dim, original_length, factor, beta_fast, beta_slow, ramp, truncate
    )
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1
    return inv_freq, float(attention_factor)


def abf(base, rotary_dim, original_length, factor, new_base=None):
    """A larger base (Xiong et al. 2023; Llama 3), to be fine-tuned: new_base, by default 500,000 or
    what makes the longest wavelength reach the target length.
    """
    new_base = larger_base(base, rotary_dim, original_length, factor, new_base)
    return none(new_base, rotary_dim, original_length, factor)


def larger_base(base, rotary_dim, original_length, factor, new_base=None):
    """Compute the base of abf()."""
    check_pairs("abf", rotary_dim)
    if new_base is not None:
        return new_base
    if factor == 1:
        return base
    target = original_length * factor
    reaching = (target / (2 * math.pi)) ** (rotary_dim / (rotary_dim - 2))
    return max(base, 5e5, reaching)


def llama3(base, rotary_dim, original_length, factor, low_freq_factor=1.0, high_freq_factor=4.0):
    """Llama 3.1: pairs with more than high_freq_factor rotations in the original length stay, those
    with less than low_freq_factor are interpolated; between them linear in the rotations.
    """
    return ntk_parts(
        base, rotary_dim, original_length, factor, high_freq_factor, low_freq_factor, "paper"
    )


def dynamic_pi(base, rotary_dim, original_length, factor, length=None):
    """Position interpolation for the input at hand, by length / original_length."""
    return pi(base, rotary_dim, original_length, dynamic_factor(1.0, length, original_length))


def dynamic_ntk(base, rotary_dim, original_length, factor, length=None):
    """NTK-aware for the input at hand, as in transformers: scaled by
    factor * length / original_length - (factor - 1), so that inputs up to the original length
    are computed as in training.
    """
    return ntk(base, rotary_dim, original_length, dynamic_factor(factor, length, original_length))


def dynamic_yarn(base, rotary_dim, original_length, factor, length=None):
    """YaRN for the input at hand, by length / original_length (Peng et al. 2023)."""
    return yarn(base, rotary_dim, original_length, dynamic_factor(1.0, length, original_length))


def ntk_frozen(base, rotary_dim, original_length, factor, multiplier=2.0, length=None):
    """NTK-Frozen (Lu et al. 2024): dynamic-ntk with its factor at multiplier, not fine-tuned."""
    grown = dynamic_factor(multiplier, length, original_length)
    return ntk(base, rotary_dim, original_length, grown)


def ntk_lceg(base, rotary_dim, original_length, factor, multiplier=None, length=None):
    """The fine-tuned NTK of Lu et al. (2024): dynamic-ntk with its factor at multiplier (by default
    half of factor); all inputs up to the target length have the base of the target length. The
    authors' program rounds the half up: for a factor of 3 give multiplier=2.
    """
    target = original_length * factor
    length = target if length is None else max(target, float(length))
    multiplier = factor / 2 if multiplier is None else multiplier
    grown = dynamic_factor(multiplier, length, original_length)
    return ntk(base, rotary_dim, original_length, grown)


def dynamic_factor(factor, length, original_length):
    """The factor of a dynamic method: 1 up to the original length."""
    length = original_length if length is None else float(length)
    return max(1.0, factor * length / original_length - (factor - 1))


def longrope(
    base,
    rotary_dim,
    original_length,
    factor,
    long_factor=None,
    short_factor=None,
    attention_factor=None,
    length=None,
):
    """LongRoPE (Ding et al. 2024): frequencies divided by the table long_factor beyond the original
    length, by short_factor, if given, up to there. cos and sin are multiplied by
    sqrt(1 + ln(factor) / ln(original_length)). experiments/search.py searches for a table.
    """
    inv_freq, _ = none(base, rotary_dim, original_length, factor)
    if long_factor is None and factor == 1:
        return inv_freq, 1.0
    is_short = short_factor is not None and length is not None and length <= original_length
    table = short_factor if is_short else long_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_length))
    return inv_freq / torch.tensor(table, dtype=torch.float64), float(attention_factor)


def drope(base, rotary_dim, original_length, factor, scale=1.0):
    """DroPE (Gelberg et al. 2025): no rotation; scores multiplied by scale. The model is fine-tuned
    at its original length and then used beyond it. Changes factor 1 too.
    """
    return torch.zeros(rotary_dim // 2, dtype=torch.float64), math.sqrt(float(scale))


METHODS = {
    "none": none,
    "pi": pi,
    "ntk": ntk,
    "ntk-parts": ntk_parts,
    "yarn": yarn,
    "abf": abf,
    "llama3": llama3,
    "dynamic-pi": dynamic_pi,
    "dynamic-ntk": dynamic_ntk,
    "dynamic-yarn": dynamic_yarn,
    "ntk-frozen": ntk_frozen,
    "ntk-lceg": ntk_lceg,
    "longrope": longrope,
    "drope": drope,
}  # and ATTENTION, below


# -----------------------------------------------------------------------------
# Checks. A method is called by users, with options of any type, through frequencies().


@kernels.torch_private.constant_in_graphs
def frequencies(method, base, rotary_dim, original_length, factor, **options):
    """Compute METHODS[method]. Raises UserError for bad options and results that are not finite."""
    check_options(method, rotary_dim, original_length, factor, options)
    problem = "frequencies are not finite"
    try:
        inv_freq, attention_factor = METHODS[method](
            base, rotary_dim, original_length, factor, **options
        )
        is_finite = inv_freq.is_meta or inv_freq.isfinite().all()
        if is_finite and math.isfinite(attention_factor):
            return inv_freq, attention_factor
    except UserError:
        raise
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as error:
        problem = str(error)
    raise UserError(
        f"method {method!r} cannot be computed with {options or 'its defaults'} from "
        f"{original_length} tokens ({problem}): choose other options"
    )


def check_frequencies(found, rotary_dim, name):
    """Raise UserError unless `found` is a result of frequencies(); name: the scheme's class."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and torch.is_tensor(found[0])
    shape = (rotary_dim // 2,)
    require(
        is_pair and (found[0].shape, found[0].dtype) == (shape, torch.float64),
        f"{name}.frequencies() must return a float64 tensor {shape}, the inverse frequencies, and "
        "the factor on cos and sin: make it return these",
    )


# Options that are not a number above 0.
CHOICES = {"ramp": ("index", "paper", "geometric", "progressive"), "truncate": (True, False)}
TABLES = ("long_factor", "short_factor")


def check_options(method, rotary_dim, original_length, factor, options):
    """Raise UserError unless the type and range of each option fit."""
    defaults = option_defaults(method)
    given = {**defaults, **options}
    n_pairs = rotary_dim // 2
    for name, value in given.items():
        needed = None
        if value is None and defaults[name] is None:
            continue
        if name in CHOICES:
            choices = CHOICES[name]
            if value not in choices or not isinstance(value, type(choices[0])):
                needed = f"one of {', '.join(map(str, choices))}"
        elif name in TABLES:
            is_table = isinstance(value, list) and len(value) == n_pairs
            if not (is_table and all(map(is_number, value))):
                needed = f"a list of {n_pairs} numbers above 0, one for each pair"
        elif name == "sinks":
            if not is_number(value, -1) or value not in range(original_length):
                needed = f"a number of tokens, 0 to {original_length - 1}"
        elif name == "new_base":
            if not is_number(value, 1):
                needed = "a number above 1"
        elif not is_number(value):
            needed = "a number above 0"
        elif name in ("window", "group"):
            if value != int(value) or (name == "window" and value > original_length):
                needed = f"a whole number, for a window at most {original_length}"
        require(not needed, f"{name}={value!r:.60} cannot be used: give {needed}")
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        in_order = low not in given or given[low] < given[high]
        require(in_order, f"{low} must be below {high}: exchange them")
    require(
        given.get("truncate", True) or given["ramp"] not in ("geometric", "progressive"),
        f"ramp={given.get('ramp')} needs whole ends: leave truncate=false out",
    )
    require(
        method != "longrope" or factor == 1 or given["long_factor"] is not None,
        f"method 'longrope' needs a table of {n_pairs} numbers: give --options=FILE.json with "
        '{"long_factor": [...]}, as experiments/search.py writes it',
    )


def option_defaults(method):
    """Return the options of a method with their defaults."""
    parameters = inspect.signature(ATTENTION.get(method, METHODS[method])).parameters
    return {name: x.default for name, x in parameters.items() if x.default is not x.empty}


def is_number(value, above=0):
    """Whether a value is a finite number above a bound; true and false are not numbers."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and above < value < math.inf


def check_pairs(method, rotary_dim):
    require(rotary_dim > 2, f"method {method!r} needs two pairs of channels: use --method=pi")


# -----------------------------------------------------------------------------
# Three methods that change attention: near keys keep their distance, and far ones get a distance
# seen in training. All keys of a query are in one softmax.

ALL = sys.maxsize


class FarKeys(NamedTuple):
    """How a query at position p sees keys at positions up to p - window."""

    window: int  # the keys that a query sees as plain RoPE does
    group: int  # far keys seem to be at floor(j / group), and the query at floor(p / group)
    offset: int = 0  # added to the query's
    n_keys: int = ALL  # far keys from this position on are not seen

    def of_keys(self, pos):
        return pos // self.group

    def of_queries(self, pos):
        return pos // self.group + self.offset


def lm_infinite(original_length, factor, sinks=10):
    """LM-Infinite (Han et al. 2024): see keys nearer than the original length, and the first
    `sinks` at this distance.
    """
    return FarKeys(original_length, ALL, original_length, int(sinks))


def self_extend(original_length, factor, window=None, group=None):
    """Self-Extend (Jin et al. 2024): the offset joins far distances to near ones.

    The window is by default a quarter of the original length, and the group keeps the greatest
    distance of the target within half of it.
    """
    window = max(1, original_length // 4) if window is None else int(window)
    if group is None:
        distant = original_length * factor - window
        group = max(1, math.ceil(distant / max(1, original_length // 2 - window)))
    return FarKeys(window, int(group), window - window // int(group))


def jet_long(original_length, factor, window=None, length=None):
    """Jet-Long (arXiv 2607.07740): groups of as many tokens as the text has original lengths, so
    that a text up to the original length is computed as in training.
    """
    window = max(1, min(2048, original_length // 4)) if window is None else int(window)
    return FarKeys(window, math.ceil(max(1, (length or 0) / original_length)))


def unchanged(base, rotary_dim, original_length, factor, **options):
    """Plain RoPE's frequencies, because a method in ATTENTION changes the positions of far keys."""
    return none(base, rotary_dim, original_length, factor)


ATTENTION = {"lm-infinite": lm_infinite, "self-extend": self_extend, "jet-long": jet_long}
METHODS |= dict.fromkeys(ATTENTION, unchanged)
OPTIONS = {name: list(option_defaults(name)) for name in METHODS}


def far_keys(method, original_length, factor, options):
    """The FarKeys of a method with checked options, or None if it does not change attention."""
    if method not in ATTENTION:
        return None
    return ATTENTION[method](original_length, factor, **options)


class Terms(NamedTuple):
    """What attention to far keys needs besides queries, keys and values."""

    far: FarKeys
    inv_freq: torch.Tensor
    tables: tuple  # cos and sin of all keys, which rotate a key to where it seems to be
    pos: torch.Tensor  # position ids of all keys, (T,) or (B, T)
    by_index: bool  # whether position ids are the indices of the keys


def is_in_two(q, terms):
    """Whether attend_in_two() computes this: for many queries. A single one costs less at once."""
    far = terms.far
    return terms.by_index and q.shape[2] >= 128 and (far.n_keys == ALL or far.n_keys <= 128)


def attend_in_two(q, k, v, terms, scale):
    """Attend from queries (B, H, n, D), the last of a text, to its keys (B, Hk, T, D), whose
    positions are their indices: the output (B, H, n, D). See attend_chunk().

    The kernels see near keys through a window, and far ones as a text that ends a window earlier.
    The log-sum-exps of both make one softmax of the two.
    """
    far, inv_freq = terms.far, terms.inv_freq
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    # A CPU's attention computes in float32 anyway.
    used = wide if v.device.type == "cpu" else dtype
    q, k, v = (x.to(dtype).to(used) for x in (q, k, v))
    options = {"scale": scale, "return_lse": True}
    n, m = q.shape[2], k.shape[2] - far.window
    with torch.autocast(q.device.type, enabled=False):
        y, lse = kernels.attention(q, k, v, window=far.window, **options)
        first = max(0, n - m)  # first of the queries that see far keys
        m = min(m, far.n_keys)
        if m <= 0:
            return y.to(dtype)
        pos = torch.arange(first - n, 0, device=q.device) + k.shape[2]
        far_q = kernels.rotate(
            q[:, :, first:], *kernels.cos_sin(far.of_queries(pos) - pos, inv_freq)
        )
        far_k = kernels.rotate(k[:, :, :m], *(table[:m] for table in terms.tables))
        if far.n_keys == ALL:
            far_y, far_lse = kernels.attention(far_q, far_k, v[:, :, :m], **options)
        else:
            scores = kernels.multiply_groups(far_q.to(wide) * scale, far_k.to(wide).mT)
            is_near = torch.arange(m, device=q.device) > pos[:, None] - far.window
            scores = scores.masked_fill(is_near, -math.inf)
            far_y = kernels.multiply_groups(scores.softmax(-1), v[:, :, :m].to(wide))
            far_lse = scores.logsumexp(-1)
        total = torch.logaddexp(lse[:, :, first:], far_lse)
        near_part = (lse[:, :, first:] - total).exp()[..., None]
        both = y[:, :, first:] * near_part + far_y * (far_lse - total).exp()[..., None]
        return torch.cat((y[:, :, :first], both.to(used)), 2).to(dtype)


def attend_chunk(q, k, v, terms, scale, query, key, mask):
    """Attend from queries (B, H, n, D) to keys (B, Hk, m, D), both rotated by plain RoPE: a chunk
    of kernels.attend_in_chunks(), which returns a tuple of the output (B, H, n, D).

    terms: see Terms. mask: the documents of all keys, for kernels.visible_keys().
    """
    far, pos = terms.far, terms.pos[..., query]
    n, m = q.shape[2], k.shape[2]
    # Leave out keys that no query of this chunk can see near, or far.
    near = distant = slice(0, m)
    if terms.by_index:
        near = slice(max(0, m - n - far.window + 1), m)
        distant = slice(0, max(0, min(m - far.window, far.n_keys)))

    def seen(keys, sinks):
        return kernels.visible_keys(query, key[keys], far.window, sinks, **mask)

    # Far scores, for which queries and keys are rotated once more, and near scores.
    q = q * scale
    far_q = kernels.rotate(q, *kernels.cos_sin(far.of_queries(pos) - pos, terms.inv_freq))
    far_k = kernels.rotate(k[:, :, distant], *(table[..., distant, :] for table in terms.tables))
    far_scores = kernels.multiply_groups(far_q, far_k.mT)
    near_scores = kernels.multiply_groups(q, k[:, :, near].mT)
    # One softmax over both, of the keys that are seen.
    is_seen = torch.cat((seen(distant, far.n_keys) & ~seen(distant, 0), seen(near, 0)), -1)
    scores = torch.cat((far_scores, near_scores), -1).masked_fill_(~is_seen, -math.inf)
    far_p, near_p = scores.softmax(-1).tensor_split((far_scores.shape[-1],), -1)
    far_y = kernels.multiply_groups(far_p, v[:, :, distant])
    return (far_y + kernels.multiply_groups(near_p, v[:, :, near]),)
