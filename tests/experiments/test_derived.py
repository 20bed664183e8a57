"""Numbers that experiments compute from what they measured, of boards that are made up here."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from boards import make_board

import data
from experiments import linear_attention


def test_the_gap_closed_is_a_fraction_of_what_longer_training_gains():
    rows = [["none+0", 1, "last-quarter", 256, 3.0], ["native", 1, "last-quarter", 256, 1.0]]
    rows += [["yarn+40", seed, "last-quarter", 256, 1.5] for seed in (1, 2)]
    found = make_board("reproduce", rows).of("yarn+40", "gap closed", "4L")
    assert found == {1: pytest.approx(0.75)}  # of seed 2 there is no baseline


def test_passkeys_at_the_end_are_compared_with_those_at_the_start():
    L = make_board("needles", []).b.L
    rows = [["nope", 1, f"needle {depth}", 4 * L, x] for depth, x in ((0, 0.25), (1, 1.0))]
    assert make_board("needles", rows).of("nope", "end - start", "4L") == {1: 0.75}


def test_losses_are_compared_with_that_of_token_frequencies(text_data):
    dataset = data.Dataset(str(text_data))
    train, val = (Counter(split.tokens[0].tolist()) for split in (dataset.train, dataset.val))
    n, n_val = sum(train.values()) + 257, sum(val.values())
    expected = sum(-math.log((train[token] + 1) / n) * count for token, count in val.items())
    found = linear_attention.measure(SimpleNamespace(dataset=str(text_data)))
    assert found == {"token frequencies": pytest.approx(expected / n_val, rel=1e-9)}
    arm = "softmax-nope"
    rows = [[arm, 1, "token frequencies", 0, 3.0], [arm, 1, "chunked", 64, 2.5]]
    assert make_board("linear_attention", rows).of(arm, "above token frequencies", "L") == {1: -0.5}
