"""experiments/search.py: numbers against formulas, and the table in extend.py."""

import json

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_success

import data
from data.tasks import make_document
from experiments import search
from model import GPT


def test_evolution_finds_a_hidden_table_and_judges_none_twice():
    judged = {}

    def distance(table):
        assert table not in judged and list(table) == sorted(table) and 1 <= table[0] <= 6
        return judged.setdefault(table, np.abs(np.array(table) - [1, 1, 1.3, 2.2, 3.1, 5]).sum())

    start = [search.constrain(np.array(x), 4.0) for x in ([4] * 6, [0, 1, 2, 3, 9, 1])]
    assert start[1] == (1, 1, 2, 3, 6, 6)  # at most 1.5 times the factor, and never falling
    best = search.evolve(start, distance, 4.0, 16, 25, np.random.default_rng(0))
    assert judged[best] == min(judged.values()) < 0.5 * judged[start[1]]


def test_the_fitness_is_the_loss_of_the_digits(save_run):
    model = GPT.load(save_run(pos="rope", block_size=64))
    found, losses = search.passkey_loss(model, 2.0, 4, 7, "longrope", (2.0, 2.0, 2.0, 2.0)), []
    for depth in (0.0, 0.25, 0.5, 0.9):
        what = ("niah", data.ByteTokenizer(), 128, 7, 0, 256)
        x, y = map(torch.tensor, make_document(*what, depth=depth))
        losses.append(model(x[None], y[None], reduction="sum").item() / 3)  # digits
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_table_extends_the_model(call, save_run, tmp_path):
    run, file = save_run(pos="rope", block_size=64), tmp_path / "factors.json"
    words = ["--factor=2", "--population=4", "--rounds=1", "--trials=4", "--device=cpu"]
    assert_success(call("experiments/search.py", run, *words, f"--out={file}"))
    words = ["--method=longrope", "--factor=2", f"--options={file}", "--max_iters=0"]
    assert_success(call("extend.py", run, *words, f"--out_dir={tmp_path}/longer"))
    table = (GPT.load(run).scheme.inv_freq / GPT.load(tmp_path / "longer").scheme.inv_freq).tolist()
    assert table == pytest.approx(sorted(json.loads(file.read_text())["long_factor"]))
    assert_refused(call("experiments/search.py", tmp_path / "longer"), "give one")
