"""95 % intervals of measurements, over the sequences, prompts or seeds that were measured.

An interval is a dict {"mean", "low", "high", "n"}: n counts the sequences, prompts or seeds. With
too few of them low and high are None.
"""

import math
from statistics import NormalDist

# With fewer sequences or prompts than this their spread says too little.
MIN_SAMPLES = 5
MIN_SEEDS = 2  # each is a training run: few are usual, and Student's t makes their intervals wide

Z = NormalDist().inv_cdf(0.975)
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182}  # where the expansion below is not exact enough


def student_t(freedom):
    """Return the 97.5 % quantile of Student's t, to 0.1 %.

    From 4 degrees of freedom on by the expansion of Abramowitz and Stegun, 26.7.5.
    """
    if freedom in T_TABLE:
        return T_TABLE[freedom]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def ratio_interval(sums, counts, least=MIN_SAMPLES):
    """Return the interval of sum(sums) / sum(counts), which is a mean over tokens.

    sums, counts: summed loss and number of tokens of each sequence. Sequences differ in both, so
    this is the ratio estimator of survey statistics (Cochran 1977, 6.4). Sequences without a token
    do not count; with fewer than `least` others there is no interval.
    """
    pairs = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    n = len(pairs)
    n_tokens = sum(count for _, count in pairs)
    mean = math.nan
    if n:
        mean = sum(total for total, _ in pairs) / n_tokens
    if n < least:
        return {"mean": mean, "low": None, "high": None, "n": n}
    squares = sum((total - mean * count) ** 2 for total, count in pairs)
    standard_error = math.sqrt(n / (n - 1) * squares) / n_tokens
    half_width = student_t(n - 1) * standard_error
    return {"mean": mean, "low": mean - half_width, "high": mean + half_width, "n": n}


def mean_interval(values, least=MIN_SAMPLES):
    """Return the interval of the mean of one value for each sequence, prompt or seed."""
    values = list(values)
    return ratio_interval(values, [1] * len(values), least)


def fraction_interval(successes):
    """Return Wilson's interval of a fraction; unlike Student's it has a width at 0 and at 1.

    successes: a bool for each prompt.
    """
    n = len(successes)
    mean = sum(successes) / n
    if n < MIN_SAMPLES:
        return {"mean": mean, "low": None, "high": None, "n": n}
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    spread = mean * (1 - mean) / n + Z**2 / (4 * n**2)
    half_width = Z / (1 + Z**2 / n) * math.sqrt(spread)
    low = min(mean, centre - half_width)  # rounding may exceed 0 or 1
    high = max(mean, centre + half_width)
    return {"mean": mean, "low": low, "high": high, "n": n}


def excludes_zero(found):
    """Return whether an interval, of a difference, is above or below 0."""
    return found["low"] is not None and (found["low"] > 0 or found["high"] < 0)


def format_interval(found, digits=3, sign="", key="mean", units=""):
    """Return an interval as text: "1.716 ± 0.021", "0.95 (0.76 to 0.99)" or "1.716 (n = 1)".

    sign: "+" for differences. key: name of the mean, which is "loss" in a loss's record. units: the
    samples in words, in place of their number n.
    """
    mean, low, high = found[key], found["low"], found["high"]
    if mean is None or not math.isfinite(mean):
        return "not finite"
    text = f"{mean:{sign}z.{digits}f}"  # z: not -0.000
    if low is None:
        units = units or f"n = {found['n']}"
        return f"{text} ({units})"
    if abs((high - mean) - (mean - low)) < 10**-digits:  # symmetric
        return f"{text} ± {(high - low) / 2:.{digits}f}"
    return f"{text} ({low:{sign}z.{digits}f} to {high:{sign}z.{digits}f})"
