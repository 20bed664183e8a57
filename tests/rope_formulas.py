"""The 17 extension methods of RoPE from their papers: float64, one pair or one distance at a time.

d rotated channels, L tokens of the original length, s the factor, k the index of a pair.
"""

import math

import torch

# methods that give each query a distance of its own to a key
BY_DISTANCE = ("lm-infinite", "self-extend", "jet-long")


def frequencies(method, base, d, L, s, length=None, **options):
    """Inverse frequencies of the d / 2 pairs, and the factor of cos and sin.

    length: of the input in tokens, for the methods that depend on it.
    """
    s = factor_of_the_input(method, L, s, length, options)
    base = base_of(method, base, d, L, s, options)
    f = [base ** (-2 * k / d) for k in range(d // 2)]
    m = 1.0
    if method in ("pi", "dynamic-pi"):
        f = [x / s for x in f]
    if options.get("ramp") in ("geometric", "progressive"):
        f = mrrope(f, base, d, L, s, options)
    elif method in ("ntk-parts", "yarn", "dynamic-yarn", "llama3"):
        kept = kept_fractions(method, f, base, d, L, options)
        f = [x * (a + (1 - a) / s) for x, a in zip(f, kept, strict=True)]
    if method in ("yarn", "dynamic-yarn"):
        m = options.get("attention_factor") or 0.1 * math.log(s) + 1
    if method == "longrope":
        is_short = length and length <= L and options.get("short_factor")
        table = options["short_factor" if is_short else "long_factor"]
        f = [x / divisor for x, divisor in zip(f, table, strict=True)]
        m = options.get("attention_factor") or math.sqrt(1 + math.log(s) / math.log(L))
    if method == "drope":
        f = [0.0] * len(f)
        m = math.sqrt(options.get("scale", 1.0))  # of queries and of keys
    return torch.tensor(f, dtype=torch.float64), m


def factor_of_the_input(method, L, s, length, options):
    """The factor, which the dynamic methods take from the length of the input."""
    if method in ("dynamic-pi", "dynamic-yarn"):
        return max(1, (length or L) / L)
    multiplier = s
    if method == "ntk-frozen":
        multiplier = options.get("multiplier", 2)
    if method == "ntk-lceg":
        length = max(length or 0, L * s)
        multiplier = options.get("multiplier", s / 2)
    if method in ("dynamic-ntk", "ntk-frozen", "ntk-lceg"):
        return max(1, multiplier * (length or L) / L - (multiplier - 1))
    return s


def base_of(method, base, d, L, s, options):
    if method in ("ntk", "dynamic-ntk", "ntk-frozen", "ntk-lceg"):
        return base * s ** (d / (d - 2))
    if method == "abf":  # 500,000, and a slowest pair that does not repeat within L s tokens
        return options.get("new_base") or max(base, 5e5, (L * s / (2 * math.pi)) ** (d / (d - 2)))
    return base


def kept_fractions(method, f, base, d, L, options):
    """NTK-by-parts: 1 keeps a pair, 0 interpolates it; between them a ramp.

    It is linear in the rotations r = L / wavelength in the paper and in Llama 3.1, and in the index
    of the pair in YaRN's released code.
    """
    fast, slow = options.get("beta_fast", 32), options.get("beta_slow", 1)
    if method == "llama3":
        fast, slow = options.get("high_freq_factor", 4), options.get("low_freq_factor", 1)
    if method == "llama3" or options.get("ramp") == "paper":
        rotations = [L * x / (2 * math.pi) for x in f]
        return [min(1, max(0, (r - slow) / (fast - slow))) for r in rotations]

    def index(rotations):
        return d * math.log(L / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(fast), index(slow)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = max(min(high, d - 1), low)
    width = high - low or 0.001
    return [1 - min(1, max(0, (k - low) / width)) for k in range(d // 2)]


def mrrope(f, base, d, L, s, options):
    """MrRoPE (2601.22181): the pairs from lo to hi are divided by a radix that is the same at each
    step (Uni, geometric), or grows with the step (Pro, progressive).
    """
    lo, hi = (
        d * math.log(L / (2 * math.pi * options.get(name, default))) / (2 * math.log(base))
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    lo = max(math.floor(lo), 0)
    hi = max(min(math.ceil(hi), d - 1), lo)
    found = []
    for i, x in enumerate(f):
        divisor = 1.0
        n = hi - lo
        # the product of a radix for each pair that is passed
        for step in range(1, min(i - lo, n) + 1):
            weight = 1 / n if options["ramp"] == "geometric" else 2 * step / (n * (n + 1))
            divisor *= s**weight
        found.append(x / (s if i > hi else divisor))
    return found


def distance(method, i, j, n, L, s, sinks=10, window=None, group=None, length=None):
    """The distance at which query i sees key j of a text of n tokens, or None: LM-Infinite,
    Self-Extend, Jet-Long.
    """
    if method == "lm-infinite":
        if i - j < L:
            return i - j
        return L if j < sinks else None
    if method == "jet-long":
        group = math.ceil((length or n) / L)
        is_near = group == 1 or i - j < (window or max(1, min(2048, L // 4)))
        return i - j if is_near else i // group - j // group
    window = window or L // 4
    group = group or math.ceil((L * s - window) / (L // 2 - window))
    if i - j < window:
        return i - j
    return i // group + window - window // group - j // group
