"""Numbers that experiments compute from what they measured, of boards that are made up here."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from boards import make_board

import data
from experiments import examples, linear_attention


def test_the_gap_closed_is_a_fraction_of_what_longer_training_gains():
    rows = [["none+0", 1, "last-quarter", 256, 3.0], ["native", 1, "last-quarter", 256, 1.0]]
    rows += [["yarn+40", seed, "last-quarter", 256, 1.5] for seed in (1, 2)]
    found = make_board("reproduce", rows).of("yarn+40", "gap closed", "4L")
    assert found == {1: pytest.approx(0.75)}  # of seed 2 there is no baseline


def test_gains_are_of_models_that_find_values_before_they_are_extended():
    rows = []
    for name, before in (("FFFF", 1.2), ("WWWN-none", 0.9)):
        rows.append([name, 1, "niah gain", 64, before])
        rows.append([f"{name}/zero-shot", 1, "niah gain", 512, 0.5])
    board = make_board("layers", rows)
    assert board.of("FFFF/zero-shot", "gain", "8L") == {1: 0.5}
    assert board.of("WWWN-none/zero-shot", "gain", "8L") == {}


def test_passkeys_at_the_end_are_compared_with_those_at_the_start():
    L = make_board("needles", []).b.L
    rows = [["nope", 1, f"needle {depth}", 4 * L, x] for depth, x in ((0, 0.25), (1, 1.0))]
    assert make_board("needles", rows).of("nope", "end - start", "4L") == {1: 0.75}


def test_the_middle_model_of_a_scheme_is_in_both_tables():
    rows = [["rope-middle", 1, "chunked", 4 * make_board("nope_tables", []).b.L, 2.0]]
    board = make_board("nope_tables", rows)
    for measure in ("by length", "middle"):
        assert board.of("rope-middle", measure, "4L") == {1: 2.0}


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


def test_a_digit_is_shown_right_half_of_the_time_and_else_by_chance():
    keys, n = 4, 64
    x, y = examples.make_examples(n, keys, 500, seed=1)
    chosen, shown, secret = x[:, ::2] - 10, x[:, 1::2] - 10 - keys, y[:, ::2]
    assert x.shape == y.shape == (500, 2 * n) and (y[:, 1::2] == -1).all()
    assert torch.equal(shown // 10, chosen) and set(chosen.flatten().tolist()) == set(range(keys))
    is_right = (shown % 10 == secret).double()
    assert is_right.mean().item() == pytest.approx(0.5 + 0.5 / 10, abs=0.01)
    for row in range(9):  # a key has one secret digit in a sequence
        pairs = set(zip(chosen[row].tolist(), secret[row].tolist(), strict=True))
        assert len(pairs) == len(set(chosen[row].tolist()))
