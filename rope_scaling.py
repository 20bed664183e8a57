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
        low = index_of_rotations(beta_fast, base, rotary_dim, original_length)
        high = index_of_rotations(beta_slow, base, rotary_dim, original_length)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low = max(low, 0)
        high = max(min(high, rotary_dim - 1), low)
        index = torch.arange(rotary_dim // 2, dtype=torch.float64)
        fraction = ((index - low) / (high - low or 0.001)).clamp(0, 1)
        if ramp == "geometric":
            return inv_freq / factor**fraction, 1.0
        if ramp == "progressive":
            n = high - low
            return inv_freq / factor ** (fraction * (fraction * n + 1) / (n + 1)), 1.0
        keep = 1 - fraction
    interpolated = inv_freq / factor
    return interpolated + keep * (inv_freq - interpolated), 1.0


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
    check_pairs("abf", rotary_dim)
    if new_base is None and factor == 1:
        new_base = base
    elif new_base is None:
        target = original_length * factor
        reaching = (target / (2 * math.pi)) ** (rotary_dim / (rotary_dim - 2))
        new_base = max(base, 5e5, reaching)
    return none(new_base, rotary_dim, original_length, factor)


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
    half of factor); all inputs up to the target length have the base of the target length.
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


def frequencies_of_lm_infinite(base, rotary_dim, original_length, factor, sinks=10):
    """LM-Infinite (Han et al. 2024) changes attention, not frequencies: see lm_infinite()."""
    return none(base, rotary_dim, original_length, factor)


def frequencies_of_self_extend(base, rotary_dim, original_length, factor, window=None, group=None):
    """Self-Extend (Jin et al. 2024) changes attention, not frequencies: see self_extend()."""
    self_extend_sizes(original_length, factor, window, group)
    return none(base, rotary_dim, original_length, factor)


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
    "lm-infinite": frequencies_of_lm_infinite,
    "self-extend": frequencies_of_self_extend,
}
OPTIONS = {name: list(inspect.signature(f).parameters)[4:] for name, f in METHODS.items()}
EVALUATION_ONLY = ("lm-infinite", "self-extend")  # they replace attention: ATTENTION, below


# -----------------------------------------------------------------------------
# Checks. A method is called by users, with options of any type, through frequencies().


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


# torch.compile calls it while it traces. torch.compiler.assume_constant_result sets this,
# without importing the compiler here.
frequencies._dynamo_marked_constant = True


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
    parameters = inspect.signature(METHODS[method]).parameters
    defaults = {name: parameters[name].default for name in OPTIONS[method]}
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
        elif name in ("window", "group") and value != int(value):
            needed = "a whole number of at least 1"
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


def is_number(value, above=0):
    """Whether a value is a finite number above a bound; true and false are not numbers."""
    return (
        isinstance(value, numbers.Real) and not isinstance(value, bool) and above < value < math.inf
    )


def check_pairs(method, rotary_dim):
    require(rotary_dim > 2, f"method {method!r} needs two pairs of channels: use --method=pi")


# -----------------------------------------------------------------------------
# Two methods that change attention: near keys keep their distance, and distant ones get a distance
# seen in training. Each is ordinary attention over two sets of keys, merged by their log-sum-exps.
# q (B, H, T, D), k and v (B, Hk, T, D), not rotated; rotate(x, pos (T,)) rotates x; scale
# multiplies the scores; then come the options. Both return (B, H, T, D).


def lm_infinite(q, k, v, rotate, original_length, factor, scale, sinks=10):
    """Attend to keys nearer than the original length and to the first `sinks`, at a distance of at
    most the original length (Han et al. 2024).
    """
    T = q.shape[2]
    window = original_length
    sinks = int(sinks)
    pos = torch.arange(T, device=q.device)
    near = kernels.attention(
        rotate(q, pos), rotate(k, pos), v, window=window, scale=scale, return_lse=True
    )
    if T <= window or not sinks:
        return near[0]
    # the sinks, unrotated at position 0, from queries at position `window`
    far_q = rotate(q[:, :, window:], torch.full_like(pos[window:], window))
    sink_k = k[:, :, :sinks]
    sink_v = v[:, :, :sinks]
    # the first of these queries do not have all sinks behind their window: causal attention
    n = min(sinks, T - window)
    far = kernels.attention(
        far_q[:, :, :n], sink_k[:, :, :n], sink_v[:, :, :n], scale=scale, return_lse=True
    )
    if T - window > n:  # more queries than keys, which only eager.py takes
        rest = kernels.eager.attention(
            far_q[:, :, n:], sink_k, sink_v, causal=False, scale=scale, return_lse=True
        )
        far = [torch.cat(part, 2) for part in zip(far, rest, strict=True)]
    return merge_attention(near, far, window)


def self_extend_sizes(original_length, factor, window=None, group=None):
    """
    The window and the group size in tokens: by default a quarter of the original length, and what
    keeps the greatest grouped distance of the target within half of it.
    """
    window = max(1, original_length // 4) if window is None else int(window)
    if group is None:
        distant = original_length * factor - window
        group = max(1, math.ceil(distant / max(1, original_length // 2 - window)))
    return window, int(group)


def self_extend(q, k, v, rotate, original_length, factor, scale, window=None, group=None):
    """Keep distances below the window, group greater ones by `group` tokens (Jin et al. 2024):
    floor(i / group) + window - floor(window / group) - floor(j / group).
    """
    window, group = self_extend_sizes(original_length, factor, window, group)
    T = q.shape[2]
    pos = torch.arange(T, device=q.device)
    near = kernels.attention(
        rotate(q, pos), rotate(k, pos), v, window=window, scale=scale, return_lse=True
    )
    if T <= window:
        return near[0]
    # query i attends to the keys up to i - window, so shifting the queries makes this causal
    far_q = rotate(q[:, :, window:], pos[window:] // group + window - window // group)
    far_k = rotate(k[:, :, :-window], pos[:-window] // group)
    far = kernels.attention(far_q, far_k, v[:, :, :-window], scale=scale, return_lse=True)
    return merge_attention(near, far, window)


def merge_attention(near, far, start):
    """Merge attention over two sets of keys from (output, log-sum-exp) of each: (B, H, T, D).

    far belongs to the queries from `start` on.
    """
    y, lse = near
    far_y, far_lse = far
    weight = torch.sigmoid(far_lse - lse[:, :, start:])[..., None]  # of the far keys
    late = y[:, :, start:] + weight * (far_y - y[:, :, start:])
    return torch.cat((y[:, :, :start], late.to(y.dtype)), 2)


ATTENTION = {"lm-infinite": lm_infinite, "self-extend": self_extend}
