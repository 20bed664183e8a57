"""Intervals against tables, exact formulas and simulated samples."""

import math

import numpy as np
import pytest

from nanolong.evaluation import intervals

# 97.5 % quantiles of Student's t, from printed tables.
STUDENT = {1: 12.706, 2: 4.3027, 3: 3.1824, 5: 2.5706, 19: 2.0930, 1000: 1.9623}


@pytest.mark.parametrize("freedom, quantile", STUDENT.items())
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert intervals.student_t(freedom) == pytest.approx(quantile, rel=1e-3)


def test_the_mean_of_one_value_each_has_students_interval():
    values = np.array([2.0, 3.0, 5.0, 7.0, 11.0, 13.0])
    found = intervals.mean_interval(values)
    half_width = 2.5706 * values.std(ddof=1) / math.sqrt(6)
    assert found["n"] == 6 and found["mean"] == pytest.approx(values.mean())
    assert found["high"] - found["mean"] == pytest.approx(half_width, rel=1e-3)
    assert found["mean"] - found["low"] == pytest.approx(half_width, rel=1e-3)


def test_the_interval_covers_the_ratio_of_sequences_of_unequal_length():
    """2,000 samples of 30 sequences whose loss and length are correlated: 95 % of them, to 1.5 %.

    The ratio of the population is 6 / 5: lengths are 1 to 9, losses 1 to 1.4 times as large.
    """
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        counts = rng.integers(1, 10, size=30)
        sums = counts * rng.uniform(1.0, 1.4, size=30)
        found = intervals.ratio_interval(sums, counts)
        covered += found["low"] < 1.2 < found["high"]
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_sequences_without_a_token_do_not_count():
    sums, counts = [3.0, 0.0, 4.0, 5.0, 6.0, 7.0], [1, 0, 1, 1, 1, 1]
    found = intervals.ratio_interval(sums, counts)
    assert found == intervals.mean_interval([3.0, 4.0, 5.0, 6.0, 7.0])
    assert found["n"] == 5


@pytest.mark.parametrize("n", [1, 4])
def test_too_few_samples_have_no_interval(n):
    found = intervals.mean_interval([1.5] * n)
    assert found == {"mean": 1.5, "low": None, "high": None, "n": n}
    assert intervals.format_interval(found) == f"1.500 (n = {n})"
    assert not intervals.excludes_zero(found)


@pytest.mark.parametrize(
    "successes, n, low, high",
    # (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_fractions_have_wilsons_interval(successes, n, low, high):
    found = intervals.fraction_interval([True] * successes + [False] * (n - successes))
    assert found["mean"] == pytest.approx(successes / n)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)
    assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1


def test_an_interval_excludes_zero_on_either_side():
    for low, high, excludes in ((0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False)):
        assert intervals.excludes_zero({"mean": 0.0, "low": low, "high": high}) == excludes


def test_intervals_as_text():
    loss = {"loss": 1.716, "low": 1.695, "high": 1.737, "n": 9}
    assert intervals.format_interval(loss, key="loss") == "1.716 ± 0.021"
    fraction = {"mean": 0.95, "low": 0.76, "high": 0.99, "n": 20}
    assert intervals.format_interval(fraction, 2) == "0.95 (0.76 to 0.99)"
    assert intervals.format_interval({**fraction, "mean": math.inf}) == "not finite"
    assert intervals.format_interval(fraction, 1, sign="+") == "+0.9 (+0.8 to +1.0)"
    assert intervals.format_interval({**fraction, "mean": -1e-9}, 1, sign="+").startswith("+0.0 ")
