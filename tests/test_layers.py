"""Which layers to extend: the models, the claims about them, and the script."""

import itertools
import json
import math
import re

import pytest
import torch
from try_budget import try_words

from experiments import layers
from experiments.extensibility import STAGES
from experiments.layers import EXTENSIONS, LENGTHS, PREDICTIONS, TRAINED


def test_every_extension_is_one_that_its_model_can_have(make):
    """And full and all differ in the layers with windows only."""
    budget = layers.BUDGETS["cpu"]
    pairs = {}
    for name, extension in EXTENSIONS.items():
        model = make(**layers.model_settings(extension.model, budget), vocab_size=257)
        model.extend(extension.method, layers.FACTOR, layers=extension.layers)
        assert model.config.block_size == 512
        pairs[name] = model
    assert {extension.model for extension in EXTENSIONS.values()} == set(TRAINED)
    full, every = pairs["WWWF full"], pairs["WWWF all"]
    assert torch.equal(full.pos.inv_freq, every.pos.inv_freq) and every.local is None
    unchanged = pairs["WWWN none"].pos.inv_freq
    assert torch.equal(full.local.inv_freq, unchanged)
    assert not torch.equal(unchanged, pairs["WWWN all"].pos.inv_freq)


def test_logn_changes_nothing_within_the_training_length(make):
    """So the models with it need no training of their own."""
    torch.manual_seed(1)
    model = make(vocab_size=50, block_size=16, layer_pattern="WN", window=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    copy = layers.with_logn(model)
    x = torch.randint(50, (2, 64))
    assert torch.equal(copy(x[:, :16]), model(x[:, :16]))
    for each in (copy, model):
        each.extend("none", 4, layers="all")
    assert torch.equal(copy(x)[:, :16], model(x)[:, :16])
    assert not torch.allclose(copy(x)[:, 17:], model(x)[:, 17:], atol=1e-3)


# -----------------------------------------------------------------------------
# Claims.


def make_board(loss, gain):
    """A board of three seeds whose values are functions of name, stage, length and seed."""
    records = []
    for seed, name, stage, length in itertools.product((1, 2, 3), EXTENSIONS, STAGES, LENGTHS):
        record = {"seed": seed, "model": name, "stage": stage, "length": length, "nats": 1.0}
        where = (name, stage, length, seed)
        records.append(record | {"loss": loss(*where), "gain": gain(*where)})
    models = {name: extension.about for name, extension in EXTENSIONS.items()}
    budget = layers.BUDGETS["cpu"]
    return {"command": "x", "note": "x", "budget": budget, "models": models, "records": records}


def judge_all(board):
    claims = [layers.judge(board, found) for found in PREDICTIONS.values()]
    return {claim.text: claim for claim in itertools.chain(*claims)}


def test_claims_are_paired_differences_at_the_target_length():
    """Seeds lie far apart, and the first model of each pair is better by the same amount in all."""
    rank = {"FFFF": 3, "WWWN none": 2, "WWWN all": 2, "WWWF all": 2}

    def loss(name, stage, length, seed):
        return seed + (rank.get(name, 1) / 8 if length == 8 else 0)

    board = make_board(loss, lambda *where: 10 - loss(*where))
    claims = judge_all(board)
    assert len(claims) == sum(
        len(stages) * len(measures)
        for rows in PREDICTIONS.values()
        for _, _, stages, measures in rows
    )
    assert all(claim.passed for claim in claims.values())
    assert claims["zero-shot, loss: WWWF full - WWWF all"].mean == -1 / 8
    assert claims["fine-tuned, gain: FFFF+logn - FFFF"].mean == 2 / 8
    text = "\n".join(layers.report(board))
    assert text.count(": pass") == len(claims) and "FAIL" not in text
    # the other way round all fail
    board = make_board(lambda *where: 10 - loss(*where), loss)
    assert all("contradicted" in claim.verdict() for claim in judge_all(board).values())


def test_gains_of_models_that_never_learned_are_not_judged():
    def gain(name, stage, length, seed):
        return 0.5 if name == "p=0.5" or name.startswith("WWWF") else 3.0

    board = make_board(lambda *where: 1.0, gain)
    text = "\n".join(layers.report(board))
    assert "Models whose gain is not judged: p=0.5, WWWF full, WWWF all.\n" in text
    assert "Seeds that have it: FFFF 3, FFFF+logn 3, FFFF+ssmax 3, p=0.25 3, p=0.5 0, " in text
    claims = judge_all(board)
    judged = [text for text in claims if ", gain: " in text]
    assert not any("WWWF" in text for text in judged)
    assert "before, gain: FFFF+logn - FFFF" in judged and "zero-shot, gain: FFFN - FFFF" in judged


def test_some_models_are_reported_without_the_others():
    board = make_board(lambda *where: where[3] + len(where[0]), lambda *where: 0.0)
    board["records"] = [r for r in board["records"] if r["model"].startswith("WWWF")]
    text = "\n".join(layers.report(board))
    assert re.search(r"^\| WWWF full - WWWF all \| 1\.000 ± 0\.000 \*", text, re.M)
    assert text.count("Not measured.") == 3 and "FFFN:" not in text


# -----------------------------------------------------------------------------
# Measuring.


def test_an_unknown_model_is_refused(call):
    done = call("experiments/layers.py", "--models=FFFF,WWFF")
    assert done.returncode == 2 and "there is no model 'WWFF': choose from FFFF, " in done.stderr


@pytest.mark.slow
def test_processes_share_a_seed_and_one_collects(call, text_data, tmp_path):
    words = try_words("layers", tmp_path, "--seeds=1", text=text_data)
    done = call(*words, "--models=WWWF")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "try-text" / "1"
    first = (folder / "WWWF/measured.json").read_text()
    assert call(*words).returncode == 0
    assert (folder / "WWWF/measured.json").read_text() == first
    board = json.loads((tmp_path / "results/layers.json").read_text())
    found = sorted((r["model"], r["stage"], r["length"]) for r in board["records"])
    assert found == sorted(itertools.product(EXTENSIONS, STAGES, LENGTHS))
    numbers = [record[name] for record in board["records"] for name in ("loss", "nats", "gain")]
    assert all(map(math.isfinite, numbers))
    values = {(r["model"], r["stage"], r["length"]): r["loss"] for r in board["records"]}
    # both extensions of a model begin with the same weights, and end with different ones
    for length in LENGTHS:
        assert values["WWWF full", "before", length] == values["WWWF all", "before", length]
        assert values["WWWF full", "zero-shot", length] != values["WWWF all", "zero-shot", length]
        assert values["WWWN none", "zero-shot", length] == values["WWWN none", "before", length]
        assert values["WWWN none", "fine-tuned", length] != values["WWWN none", "before", length]
