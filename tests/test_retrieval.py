"""Prompts of needle and ruler, asked of models whose answers are known."""

import json
import math
import random
import re
import types

import pytest
import torch
from conftest import assert_refused, assert_success

import data
import evaluate
from data.tasks import make_document
from nanolong.evaluation import intervals, retrieval

LENGTHS = (130, 190)


class Oracle(torch.nn.Module):
    """A model of bytes that gives each byte of an answer that it knows this probability.

    The other bytes share the rest. It knows the answers to the prompts of some records, and none to
    the same ones without their needles. It keeps what it has seen.
    """

    def __init__(self, records, probability=0.99):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.probability = probability
        self.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256}
        self.config = types.SimpleNamespace()
        self.blocks = []
        self.prompts = []
        self.answers = {}
        for record in records:
            for inputs, targets in retrieval.make_prompts(record, data.ByteTokenizer(), 256, True):
                self.answers[tuple(inputs)] = targets

    def hidden_states(self, x):
        logits = torch.zeros(*x.shape, 257)
        for i, row in enumerate(x.tolist()):
            self.prompts.append(tuple(row))
            for place, target in enumerate(self.answers.get(tuple(row), [])):
                if target >= 0:
                    logits[i, place] = math.log((1 - self.probability) / 256)
                    logits[i, place, target] = math.log(self.probability)
        return logits

    def head(self, x):
        return x


def plan(model, task, **settings):
    cfg = {"task": (task,), "trials": 6, "dtype": "float32", "depths": 3, **settings}
    cfg = evaluate.EvaluateConfig(lengths=LENGTHS, **cfg)
    return retrieval.plan_retrieval(task, {"m": model}, cfg)


@pytest.mark.parametrize("probability, accuracy", [(0.9, 1.0), (1 / 257, 0.0)])
@pytest.mark.parametrize("task", ["needle", "ruler"])
def test_a_model_that_knows_the_answers_scores_one_and_another_zero(
    task, probability, accuracy, monkeypatch
):
    """Nats are exact: each byte of an answer has the probability or, without needles, 1/257."""
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", 700)  # of 6 prompts 5 or 3 are a batch
    blank = [record for cell in plan(Oracle([]), task) for record in cell.records]
    assert len(blank) == len(LENGTHS) * (3 if task == "needle" else 4)
    model = Oracle(blank, probability)
    for record in [record for cell in plan(model, task) for record in cell.measure()]:
        sizes = []
        prompts = retrieval.make_prompts(record, data.ByteTokenizer(), 256, True)
        for _, targets in prompts:
            sizes.append(int((targets >= 0).sum()))
        nats = [-math.log(probability) * size for size in sizes]
        assert [row[0] for row in record["by_prompt"]] == pytest.approx(nats, abs=1e-3)
        gains = [math.log(257 * probability) * size for size in sizes]
        assert [row[2] for row in record["by_prompt"]] == pytest.approx(gains, abs=1e-3)
        assert record["nats"] == pytest.approx(intervals.mean_interval(nats), abs=1e-3)
        assert record["gain"] == pytest.approx(intervals.mean_interval(gains), abs=1e-3)
        assert record["accuracy"] == intervals.fraction_interval([bool(accuracy)] * 6)
        assert record["control"]["mean"] == 0
    # without its needle a prompt is the same at every depth, and asked once
    assert len(model.prompts) == len(LENGTHS) * 6 * (3 + 1 if task == "needle" else 4 + 4)
    assert len(set(model.prompts)) == len(model.prompts)


def test_prompts_depend_on_the_seed_the_task_and_the_length_only():
    first, second, other = Oracle([]), Oracle([], 0.5), Oracle([])
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        for cell in plan(model, "needle", seed=seed):
            assert [record["depth"] for record in cell.records] == [0, 0.5, 1]
            cell.measure()
    assert first.prompts == second.prompts
    assert set(first.prompts).isdisjoint(other.prompts)


@pytest.mark.parametrize("kind", ["multikey", "nth", "last"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_chance_is_the_share_of_guesses_that_are_right(kind, size):
    """Counted: how often a value that the document states, chosen at random, is the answer."""
    rng = random.Random(1)
    characters = data.CharTokenizer("".join(map(chr, range(32, 632))))
    tokenizer = data.ByteTokenizer() if size == "small" else characters
    n_right = 0
    for sample in range(500):
        x, y = make_document(kind, tokenizer, 1200, 1, sample)
        text = tokenizer.decode([*x, y[-1]]).decode()
        document, answer = text.rsplit(" ", 1)
        n_right += rng.choice(re.findall(r" is (\d+)\.", document)) == answer
    expected = retrieval.chance(kind, size)
    assert n_right / 500 == pytest.approx(expected, abs=0.07)  # three standard deviations


def test_chance_of_numbers_is_that_of_all_of_them():
    # numbers from 100 to 999
    assert -math.log(retrieval.chance("niah", "small")) == pytest.approx(math.log(900))
    assert 1 / retrieval.chance("niah", "large") == pytest.approx(9e6)


def test_an_answer_with_one_wrong_token_is_wrong():
    (cell, *_) = plan(Oracle([]), "ruler", ruler=("niah",))
    model = Oracle(cell.records)
    for targets in model.answers.values():
        targets[-1] += 1
    (cell, *_) = plan(model, "ruler", ruler=("niah",))
    (record,) = cell.measure()
    assert record["accuracy"] == intervals.fraction_interval([False] * 6)


def test_retrieval_on_the_command_line(runs, call, make, tmp_path):
    """Differences are of the nats of the same prompts."""
    words = [runs[0], f"b={runs[2]}", "--task=ruler,needle", "--ruler=niah,multikey", "--depths=2"]
    words += ["--trials=5", "--lengths=96,144", "--json=a.json", "--plot=a.png"]
    done = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    records = json.loads((tmp_path / "a.json").read_text())
    assert len(records) == 2 * 2 * (2 + 2)
    nats = {}
    for record in records:
        found = [row[0] for row in record["by_prompt"]]
        first = nats.setdefault(
            tuple(record[k] for k in ("task", "kind", "depth", "length")), found
        )
        if found is not first:
            expected = [a - b for a, b in zip(found, first, strict=True)]
            assert record["difference"] == pytest.approx(intervals.mean_interval(expected))
        assert f"{record['nats']['mean']:.2f} ± " in done.stdout or record["task"] == "needle"
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    done = call("evaluate.py", runs[0], "--task=ruler", "--lengths=9")
    assert done.returncode == 2 and "nothing could be measured: a document of the" in done.stderr
    make().save(tmp_path / "nameless/step-000001")
    done = call("evaluate.py", tmp_path / "nameless", "--task=ruler")
    assert_refused(done, "has no tokenizer, so it cannot be asked")
