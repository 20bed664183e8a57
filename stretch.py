"""Stretching RoPE: pure functions of (base, rotary_dim, trained_context in tokens, factor, **options) that return the inverse frequencies, float64
(rotary_dim / 2,), and the attention factor that multiplies cos and sin. A new method is one function and one line in STRETCH.

    from model import STRETCH
    inv_freq, attention_factor = STRETCH["yarn"](10000.0, 64, 1024, 4.0)

At factor 1 each is plain RoPE, to the bit, but for drope, which takes RoPE away, and for longrope with a table. A method with an option `length`, the tokens of the whole text at hand,
is dynamic: the model gives it at every forward pass. What the other schemes have to stretch is in their classes, in model.py.
"""
import math

import torch

import kernels
from checkpoint import Refused


def stretch_none(base, rotary_dim, trained_context, factor):
    """Plain RoPE, base^(-2k/d): the frequencies stay."""
    return float(base) ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1)), 1.0


def stretch_pi(base, rotary_dim, trained_context, factor):
    """Position interpolation (Chen et al. 2023): positions, so all frequencies, divided by the factor."""
    return stretch_none(base, rotary_dim, trained_context, factor)[0] / factor, 1.0


def stretch_ntk(base, rotary_dim, trained_context, factor):
    """NTK-aware (bloc97 2023): the base grows so that the slowest pair is interpolated in full and the fastest not at all."""
    if rotary_dim <= 2:
        raise Refused(f"method 'ntk' needs at least two pairs of rotated channels, and rotary_dim is {rotary_dim}: use --method=pi")
    return stretch_none(base * factor ** (rotary_dim / (rotary_dim - 2)), rotary_dim, trained_context, factor)


def stretch_ntk_parts(base, rotary_dim, trained_context, factor, beta_fast=32.0, beta_slow=1.0, ramp="index", truncate=True):
    """NTK-by-parts (Peng et al. 2023, YaRN without its temperature): pairs that turn more than beta_fast times in the trained context
    stay, those that turn less than beta_slow times are interpolated, and a ramp leads from one to the other.

    ramp="index" is linear in the pair's index, with its ends rounded outwards (truncate), as YaRN's released code and every runtime
    have it; ramp="paper" is linear in the number of turns, as the paper's text has it.
    """
    if not all(isinstance(beta, (int, float)) for beta in (beta_slow, beta_fast)) or not 0 < beta_slow < beta_fast < math.inf or not isinstance(truncate, bool):
        raise Refused(f"beta_slow={beta_slow} must be above 0 and below beta_fast={beta_fast}, and truncate={truncate} true or false")
    inv_freq, _ = stretch_none(base, rotary_dim, trained_context, factor)
    if ramp == "paper":
        keep = ((trained_context * inv_freq / (2 * math.pi) - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    elif ramp == "index":
        low, high = (rotary_dim * math.log(trained_context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (beta_fast, beta_slow))
        low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
        low, high = max(low, 0), max(min(high, rotary_dim - 1), low, 0)
        keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        raise Refused(f"ramp={ramp!r} is neither 'index' nor 'paper'")
    return inv_freq / factor + keep * (inv_freq - inv_freq / factor), 1.0


def stretch_yarn(base, rotary_dim, trained_context, factor, beta_fast=32.0, beta_slow=1.0, ramp="index", truncate=True, attention_factor=None):
    """YaRN (Peng et al. 2023): NTK-by-parts, with cos and sin multiplied by 0.1 ln(factor) + 1, so logits by its square."""
    if attention_factor is not None and not (isinstance(attention_factor, (int, float)) and 0 < attention_factor < math.inf):
        raise Refused(f"attention_factor={attention_factor} must be a number above 0")
    inv_freq, _ = stretch_ntk_parts(base, rotary_dim, trained_context, factor, beta_fast, beta_slow, ramp, truncate)
    return inv_freq, 0.1 * math.log(factor) + 1 if attention_factor is None else float(attention_factor)


def stretch_abf(base, rotary_dim, trained_context, factor, new_base=None):
    """A larger base (ABF: Xiong et al. 2023, Llama 3): 500,000, or what lets the slowest pair's wavelength reach the target; to be fine-tuned."""
    if rotary_dim <= 2:
        raise Refused(f"method 'abf' needs at least two pairs of rotated channels, and rotary_dim is {rotary_dim}: use --method=pi")
    if new_base is None:
        new_base = base if factor == 1 else max(base, 5e5, (trained_context * factor / (2 * math.pi)) ** (rotary_dim / (rotary_dim - 2)))
    if not (isinstance(new_base, (int, float)) and 1 < new_base < math.inf):
        raise Refused(f"new_base={new_base} must be a number above 1")
    return stretch_none(new_base, rotary_dim, trained_context, factor)


def stretch_llama3(base, rotary_dim, trained_context, factor, low_freq_factor=1.0, high_freq_factor=4.0):
    """Llama 3.1's: pairs that turn more than high_freq_factor times in the trained context stay, less than low_freq_factor are interpolated,
    and between them the mix is linear in the number of turns: the paper's ramp of NTK-by-parts with other ends."""
    if not all(isinstance(f, (int, float)) and not isinstance(f, bool) for f in (low_freq_factor, high_freq_factor)) or not 0 < low_freq_factor < high_freq_factor < math.inf:
        raise Refused(f"low_freq_factor={low_freq_factor} must be above 0 and below high_freq_factor={high_freq_factor}")
    return stretch_ntk_parts(base, rotary_dim, trained_context, factor, high_freq_factor, low_freq_factor, "paper")


def stretch_dynamic_pi(base, rotary_dim, trained_context, factor, length=None):
    """Position interpolation for the text at hand: positions divided by length / trained_context. The factor only says how far the model is meant to go."""
    return stretch_pi(base, rotary_dim, trained_context, _grown(1.0, length, trained_context))


def stretch_dynamic_ntk(base, rotary_dim, trained_context, factor, length=None):
    """NTK-aware for the text at hand, as transformers has it: of `length` tokens in all, scaled by factor x length / trained_context - (factor - 1),
    so that texts up to trained_context are read as they were learned. Without a length: those."""
    return stretch_ntk(base, rotary_dim, trained_context, _grown(factor, length, trained_context))


def stretch_dynamic_yarn(base, rotary_dim, trained_context, factor, length=None):
    """YaRN for the text at hand: scaled by length / trained_context (Peng et al. 2023, Dynamic Scaling). The factor only says how far the model is meant to go."""
    return stretch_yarn(base, rotary_dim, trained_context, _grown(1.0, length, trained_context))


def stretch_ntk_frozen(base, rotary_dim, trained_context, factor, multiplier=2.0, length=None):
    """The controlled study's NTK-Frozen (Lu et al. 2024): dynamic-ntk with transformers' factor at 2, for a model that is not fine-tuned. The factor only says how far."""
    return stretch_ntk(base, rotary_dim, trained_context, _grown(_number("multiplier", multiplier), length, trained_context))


def stretch_ntk_lceg(base, rotary_dim, trained_context, factor, multiplier=None, length=None):
    """The controlled study's fine-tuned NTK (Lu et al. 2024): dynamic-ntk with transformers' factor at `multiplier`, by default half the factor, whose base is frozen
    at its value for the target for all texts up to there, and recomputed for longer ones."""
    target = trained_context * factor
    multiplier = factor / 2 if multiplier is None else _number("multiplier", multiplier)
    return stretch_ntk(base, rotary_dim, trained_context, _grown(multiplier, target if length is None else max(target, _number("length", length)), trained_context))


def stretch_longrope(base, rotary_dim, trained_context, factor, long_factor=None, short_factor=None, attention_factor=None, length=None):
    """LongRoPE (Ding et al. 2024) from a table: pair k's frequency divided by long_factor[k] for texts longer than trained_context, by short_factor[k], where there is
    one, for others, whatever the factor; cos and sin multiplied by sqrt(1 + ln factor / ln trained_context). Searched for by experiments/search.py; any static table can be written so."""
    inv_freq, _ = stretch_none(base, rotary_dim, trained_context, factor)
    for name, table in (("long_factor", long_factor), ("short_factor", short_factor)):
        if table is not None and not (isinstance(table, list) and len(table) == len(inv_freq) and all(isinstance(x, (int, float)) and 0 < x < math.inf for x in table)):
            raise Refused(f"{name} must be a list of {len(inv_freq)} numbers above 0, one for each rotated pair")
    if long_factor is None and factor == 1:
        return inv_freq, 1.0
    if long_factor is None:
        raise Refused(f"method 'longrope' applies a table: give --options=FILE.json, where FILE.json holds {{\"long_factor\": [...]}} with {len(inv_freq)} numbers, as experiments/search.py writes it")
    short = short_factor is not None and length is not None and length <= trained_context
    m = math.sqrt(1 + math.log(factor) / math.log(trained_context)) if attention_factor is None else _number("attention_factor", attention_factor)
    return inv_freq / torch.tensor(short_factor if short else long_factor, dtype=torch.float64), m


def stretch_resonance(base, rotary_dim, trained_context, factor, of="yarn"):
    """Resonance (Wang et al. 2024): another static method's wavelengths, rounded to whole tokens, so that a pair's angles repeat and were all seen in training."""
    if of not in ("none", "pi", "ntk", "ntk-parts", "yarn", "abf", "llama3"):
        raise Refused(f"of={of!r} is no method whose wavelengths resonance rounds: choose none, pi, ntk, ntk-parts, yarn, abf or llama3")
    inv_freq, m = STRETCH[of](base, rotary_dim, trained_context, factor)
    return inv_freq if factor == 1 else 2 * math.pi / (2 * math.pi / inv_freq).round(), m


def stretch_drope(base, rotary_dim, trained_context, factor, scale=1.0):
    """DroPE (Gelberg et al. 2025): nothing is rotated any more; the model is recalibrated at its trained length, and may then read longer text, its scores
    multiplied by `scale`. The one method that changes factor 1 too."""
    return torch.zeros(rotary_dim // 2, dtype=torch.float64), math.sqrt(_number("scale", scale))


def stretch_lm_infinite(base, rotary_dim, trained_context, factor, sinks=10):
    """LM-Infinite (Han et al. 2024), for evaluation: the frequencies stay; see lm_infinite()."""
    if not (isinstance(sinks, (int, float)) and 0 <= sinks < trained_context and sinks == int(sinks)):
        raise Refused(f"sinks={sinks} must be a number of tokens below the trained {trained_context}")
    return stretch_none(base, rotary_dim, trained_context, factor)


def stretch_self_extend(base, rotary_dim, trained_context, factor, window=None, group=None):
    """Self-Extend (Jin et al. 2024), for evaluation: the frequencies stay; see self_extend()."""
    self_extend_sizes(trained_context, factor, window, group)
    return stretch_none(base, rotary_dim, trained_context, factor)


def at_trained_length(method, pose):
    """Whether fine-tuning reads windows of the trained length, not of the stretched one."""
    return pose or method == "drope"


def frequencies(method, base, rotary_dim, trained_context, factor, **options):
    """STRETCH[method], of options that were not looked at yet: Refused, too, where its arithmetic leads nowhere."""
    try:
        inv_freq, m = STRETCH[method](base, rotary_dim, trained_context, factor, **options)
    except Refused:
        raise
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as error:
        raise Refused(f"method {method!r} cannot be computed with {options or 'its defaults'} from {trained_context} tokens ({error}): choose other options") from None
    if not (math.isfinite(m) and (inv_freq.is_meta or inv_freq.isfinite().all())):
        raise Refused(f"method {method!r} with {options or 'its defaults'} makes frequencies that are no numbers: choose other options")
    return inv_freq, m


def _number(name, value):
    if isinstance(value, bool) or not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise Refused(f"{name}={value} must be a number above 0")
    return float(value)


def _grown(factor, length, trained_context):
    """The scale of a dynamic method: 1 up to the trained context."""
    length = trained_context if length is None else _number("length", length)
    return max(1.0, factor * length / trained_context - (factor - 1))


STRETCH = {"none": stretch_none, "pi": stretch_pi, "ntk": stretch_ntk, "ntk-parts": stretch_ntk_parts, "yarn": stretch_yarn, "abf": stretch_abf, "llama3": stretch_llama3,
           "dynamic-pi": stretch_dynamic_pi, "dynamic-ntk": stretch_dynamic_ntk, "dynamic-yarn": stretch_dynamic_yarn, "ntk-frozen": stretch_ntk_frozen, "ntk-lceg": stretch_ntk_lceg,
           "longrope": stretch_longrope, "resonance": stretch_resonance, "drope": stretch_drope, "lm-infinite": stretch_lm_infinite, "self-extend": stretch_self_extend}


# ---------------------------------------------------------------------------------------------------------------------
# Two that change attention, not frequencies: near keys at their distance, far ones at a distance that was trained. Each is two (or three)
# calls of ordinary attention whose outputs are merged by their log-sum-exps. For evaluation: a cached reading reads everything anew at every token.

def lm_infinite(q, k, v, turn, trained_context, factor, scale, sinks=10):
    """Keys nearer than the trained context, and the first `sinks`; a distance is at most the trained context (Han et al. 2024, the Lambda-shaped mask).

    q (B, H, T, D), k and v (B, Hk, T, D), not rotated; turn(x, positions (T,)) rotates. Returns (B, H, T, D)."""
    T, W, sinks = q.shape[2], trained_context, int(sinks)
    pos = torch.arange(T, device=q.device)
    near = kernels.attention(turn(q, pos), turn(k, pos), v, window=W, scale=scale, return_lse=True)
    if T <= W or not sinks:
        return near[0]
    far, first = turn(q[:, :, W:], torch.full_like(pos[W:], W)), (k[:, :, :sinks], v[:, :, :sinks])  # keys at position 0, queries at W: distance W
    rows = min(sinks, T - W)  # the first of these queries have not all sinks behind their window
    parts = [kernels.attention(far[:, :, :rows], *(x[:, :, :rows] for x in first), scale=scale, return_lse=True)]
    if T - W > rows:
        parts.append(kernels.reference.attention(far[:, :, rows:], *first, causal=False, scale=scale, return_lse=True))  # more queries than keys
    return _merged(near, tuple(torch.cat(part, 2) for part in zip(*parts)), W)


def self_extend_sizes(trained_context, factor, window=None, group=None):
    """Window and group: by default a quarter of the trained context, and what keeps the farthest grouped distance of the target within half of it."""
    for name, value in (("window", window), ("group", group)):
        if value is not None and _number(name, value) != int(value):
            raise Refused(f"{name}={value} must be a whole number of at least 1")
    window = max(1, trained_context // 4) if window is None else int(window)
    return window, max(1, math.ceil((trained_context * factor - window) / max(1, trained_context // 2 - window))) if group is None else int(group)


def self_extend(q, k, v, turn, trained_context, factor, scale, window=None, group=None):
    """Distances below the window W as they are; beyond it of groups of G tokens: floor(i / G) + W - floor(W / G) - floor(j / G) (Jin et al. 2024).

    Arguments as of lm_infinite()."""
    W, G = self_extend_sizes(trained_context, factor, window, group)
    T = q.shape[2]
    pos = torch.arange(T, device=q.device)
    near = kernels.attention(turn(q, pos), turn(k, pos), v, window=W, scale=scale, return_lse=True)
    if T <= W:
        return near[0]
    far = kernels.attention(turn(q[:, :, W:], pos[W:] // G + W - W // G), turn(k[:, :, :-W], pos[:-W] // G), v[:, :, :-W], scale=scale, return_lse=True)  # query i beside key i - W: causal
    return _merged(near, far, W)


def _merged(near, far, W):
    """Attention over two sets of keys, from each one's output and log-sum-exp; far is of the queries from W on."""
    (y, lse), (y_far, lse_far) = near, far
    share = torch.sigmoid(lse_far - lse[:, :, W:])[..., None]  # of the far keys
    return torch.cat((y[:, :, :W], (y[:, :, W:] + share * (y_far - y[:, :, W:])).to(y.dtype)), 2)


ATTEND = {"lm-infinite": lm_infinite, "self-extend": self_extend}
