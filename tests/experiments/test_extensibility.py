"""Which choices make a model hard to extend: the design, and its analysis."""

import math
from itertools import product

import pytest

from experiments.extensibility import EFFECTS, FRACTION, MODELS, analyse, effect, rank_correlation


def test_effects_and_interactions_of_two_are_found_exactly():
    """The fraction has resolution 5: none of them is confounded with another."""
    known = {factors: 2.0**-i for i, factors in enumerate(EFFECTS)}
    values = dict.fromkeys(FRACTION, 7.0)
    for name, (factors, size) in product(FRACTION, known.items()):
        signs = (1 if letter in name else -1 for letter in factors)
        values[name] += math.prod(signs) * size / 2
    for factors, size in known.items():
        assert effect(values, factors) == pytest.approx(size, abs=1e-12)


def test_an_excess_is_what_single_changes_do_not_explain():
    costs = {"Q": 1, "N": 2, "G": 4, "W": 8, "S": 16}
    values = {name: 100 - sum(costs.get(letter, 0) for letter in name) for name in MODELS}
    assert set(analyse(values, values)["excess"].values()) == {0}
    values["QGW"] -= 5
    change, excess, *_ = analyse(values, values).values()
    assert (change["QGW"], excess["QGW"]) == (-18, -5)
    assert (change["three"], excess["three"]) == (-19.1, -0.5)


def test_rank_correlations_are_spearmans():
    x, y = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6], [2.0, 7.0, 1.0, 8.0, 3.0, 0.0]
    # of ranks 4 1 5 2 6 3 and 3 5 2 6 4 1: 1 - 6 * sum(d^2) / (n (n^2 - 1))
    assert rank_correlation(x, y) == pytest.approx(1 - 6 * (1 + 16 + 9 + 16 + 4 + 4) / 210)
    # equal numbers: of ranks 1 2.5 2.5 4 and 1 3 2 4
    assert rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0
