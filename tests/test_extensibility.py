"""Which choices make a model hard to extend: the design, its analysis, and the script."""

import itertools
import json
import math

import pytest
import torch
from try_budget import try_words

import data
from data.ruler import ruler_prompt
from experiments import extensibility
from experiments.extensibility import FACTORS, FRACTION, MODELS, effect, excess, rank_correlation

PAIRS = ["".join(pair) for pair in itertools.combinations("QNGWS", 2)]


def sign(name, factors):
    """The product of the signs of factors in a model: 1 where it has one, -1 where it has not."""
    return math.prod(1 if letter in name else -1 for letter in factors)


def test_the_design_is_a_half_fraction_of_resolution_five():
    assert len(FRACTION) == len(set(FRACTION)) == 16
    assert {sign(name, "QNGWS") for name in FRACTION} == {1}  # I = QNGWS
    columns = [*FACTORS, *PAIRS]
    for a, b in itertools.combinations(columns, 2):
        assert sum(sign(name, a) * sign(name, b) for name in FRACTION) == 0, (a, b)
    for column in columns:
        assert sum(sign(name, column) for name in FRACTION) == 0


def test_known_effects_are_found_exactly():
    """Half an effect lies on either side of the mean."""
    known = {factors: 2.0**-i for i, factors in enumerate([*FACTORS, *PAIRS])}
    values = {}
    for name in FRACTION:
        values[name] = 7 + sum(size * sign(name, factors) / 2 for factors, size in known.items())
    for factors, size in known.items():
        assert effect(values, factors) == pytest.approx(size, abs=1e-12)
    # an interaction of three is confounded with that of the two others
    values = {name: sign(name, "QNG") / 2 for name in FRACTION}
    assert effect(values, "WS") == 1
    assert not any(effect(values, factors) for factors in known if factors != "WS")


def test_an_excess_is_what_single_costs_do_not_explain():
    costs = {"Q": 1, "N": 2, "G": 4, "W": 8, "S": 16}
    values = {name: 100 - sum(costs.get(letter, 0) for letter in name) for name in MODELS}
    assert all(excess(values, name) == 0 for name in FRACTION)
    values["QGW"] -= 5
    assert excess(values, "QGW") == -5
    assert extensibility.change(values, "QGW") == -18


def test_rank_correlations_are_spearmans():
    x, y = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6], [2.0, 7.0, 1.0, 8.0, 3.0, 0.0]
    # of ranks 4 1 5 2 6 3 and 3 5 2 6 4 1: 1 - 6 * sum(d^2) / (n (n^2 - 1))
    assert rank_correlation(x, y) == pytest.approx(1 - 6 * (1 + 16 + 9 + 16 + 4 + 4) / 210)
    assert rank_correlation(x, [-number for number in x]) == pytest.approx(-1)
    # equal numbers: of ranks 1 2.5 2.5 4 and 1 3 2 4
    assert rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


# -----------------------------------------------------------------------------
# Claims.


def make_board(exact, loss):
    """A board of three seeds whose values are functions of the model's name and the seed."""
    records = []
    for seed, name, stage, length in itertools.product(
        (1, 2, 3), MODELS, extensibility.STAGES, extensibility.LENGTHS
    ):
        record = {"seed": seed, "model": name, "stage": stage, "length": length}
        record |= {"exact": exact(name, seed), "loss": loss(name, seed), "nats": 1.0, "gain": 2.0}
        records.append(record)
    budget = extensibility.BUDGETS["cpu"]
    return {"command": "python x", "note": "note", "budget": budget, "records": records}


def letters(name):
    return [letter for letter in FACTORS if letter in name]


def test_claims_hold_on_a_board_as_the_paper_describes_it():
    """One factor costs 5 % of 0.8, three half of it, and the losses have another order."""

    def exact(name, seed):
        fraction_lost = {0: 0, 1: 0.05, 3: 0.5, 5: 0.6}[len(letters(name))]
        return 0.8 * (1 - fraction_lost) + 0.001 * seed

    def loss(name, seed):
        return 1.5 + 0.01 * (MODELS.index(name) * 7 % 17) / 17 + 0.001 * seed

    board = make_board(exact, loss)
    claims = {claim.text: claim for claim in extensibility.judge(board, "zero-shot")}
    assert len(claims) == 12 and all(claim.passed for claim in claims.values())
    assert claims["N alone costs little"].mean == pytest.approx(-0.04 / 0.802)
    assert claims["QGW costs much"].mean == pytest.approx(-0.4 / 0.802)
    beyond = claims["three factors cost more than the sum of each alone, mean of ten models"]
    assert beyond.mean == pytest.approx((-0.4 + 3 * 0.04) / 0.802)
    assert claims["QGW hardly raises the loss (nats)"].mean < 0.01
    text = "\n".join(extensibility.report(board))
    assert text.count(": pass") == 24 and "FAIL" not in text
    # half of either: the mean of the models with Q, 1 + 6 + 1 of them, minus that of the others
    with_q = 0.05 + 6 * 0.5 + 0.6
    without_q = 4 * 0.05 + 4 * 0.5
    expected = f"{-0.8 * (with_q - without_q) / 8:.3f} ± 0.000 *"
    row = next(line for line in text.splitlines() if line.startswith("| Q | -"))
    assert row.endswith(f"| {expected} |")


def test_claims_fail_where_factors_add_up_and_the_loss_tells():
    def exact(name, seed):
        return 0.75 - len(letters(name)) / 16 + seed / 1024  # exact in float64

    board = make_board(exact, lambda name, seed: 2 - exact(name, seed))
    claims = {claim.text: claim for claim in extensibility.judge(board, "fine-tuned")}
    failed = [text for text, claim in claims.items() if not claim.passed]
    assert failed == [
        "QGW costs much",
        "three factors cost much, mean of ten models",
        "three factors cost more than the sum of each alone, mean of ten models",
        "QGW hardly raises the loss (nats)",
        "the loss ranks models otherwise than exact matches do",
    ]
    correlation = claims["the loss ranks models otherwise than exact matches do"]
    assert correlation.mean == pytest.approx(-1)


def test_without_retrieval_nothing_is_judged():
    board = make_board(lambda name, seed: 0.05, lambda name, seed: 1.0)
    assert extensibility.judge(board, "zero-shot") == []
    assert "\n".join(extensibility.report(board)).count("Not judged: ") == 2


# -----------------------------------------------------------------------------
# Measuring.


def test_answers_are_those_of_each_prompt_alone(make, text_data):
    """Against the log-probabilities of the tokens of the answer, one prompt at a time."""
    dataset = data.Dataset(text_data)
    model = make(vocab_size=257, block_size=64)
    x, y = extensibility.make_prompts(dataset, 64, 5, True)
    nats, is_exact = extensibility.answer(model, x, y, torch.float32)
    assert x.shape == y.shape and len(nats) == 5 and not is_exact.any()
    for sample in range(5):
        prompt = ruler_prompt("niah", dataset.tokenizer, 64, 1, sample, bos=dataset.bos)
        with torch.no_grad():
            logits = model(torch.from_numpy(prompt.inputs)[None])[0].double()
        expected = 0.0
        for position, target in enumerate(prompt.targets):
            if target >= 0:
                expected -= logits[position].log_softmax(0)[target].item()
        assert nats[sample].item() == pytest.approx(expected, rel=1e-4)
    # targets that the model itself predicts are an exact match
    predicted = model(x).argmax(-1).where(y >= 0, -1)
    _, is_exact = extensibility.answer(model, x, predicted, torch.float32)
    assert is_exact.all()
    predicted[3, (y[3] >= 0).nonzero()[-1]] ^= 1
    _, is_exact = extensibility.answer(model, x, predicted, torch.float32)
    assert is_exact.tolist() == [True, True, True, False, True]


@pytest.mark.slow
def test_the_script_measures_all_models_once(call, text_data, tmp_path, monkeypatch):
    words = try_words("extensibility", tmp_path, "--seeds=1", text=text_data)
    done = call(*words)
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/extensibility.json").read_text())
    found = [(record["model"], record["stage"], record["length"]) for record in board["records"]]
    stages, lengths = extensibility.STAGES, extensibility.LENGTHS
    assert found == list(itertools.product(MODELS, stages, lengths))
    numbers = [record[name] for record in board["records"] for name in ("loss", "nats", "gain")]
    assert all(map(math.isfinite, numbers))
    # extension changes what is measured, and so does fine-tuning
    losses = [record["loss"] for record in board["records"][:9]]
    assert len(set(losses)) == 9
    folder = tmp_path / "runs" / "try-text" / "1"
    assert (folder / "QGW/step-000002").is_dir() and (folder / "QGS/step-000001").is_dir()
    text = (tmp_path / "results/extensibility.md").read_text()
    assert text.count("Not judged: ") == 2 and "1 seed, " in text

    monkeypatch.setattr(extensibility, "train_model", None)
    assert call(*words).returncode == 0
    assert json.loads((tmp_path / "results/extensibility.json").read_text()) == board


def test_a_name_says_what_a_model_is():
    budget = extensibility.BUDGETS["cpu"]
    plain = extensibility.model_settings("none", budget)
    assert plain == budget["model"]
    all_factors = extensibility.model_settings("QNGWS", budget)
    different = {key: value for key, value in all_factors.items() if plain.get(key) != value}
    assert different == {
        "qk_norm": "head",
        "norm_position": "post",
        "n_kv_head": 1,
        "layer_pattern": "WWWF",
        "window": 16,
    }
