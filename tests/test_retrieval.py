"""Prompts of RULER's tasks, and passkeys, asked of models whose answers are known."""

import json
import math
import shutil
import statistics
import types
from itertools import product

import pytest
import torch
from conftest import assert_refused, assert_success

import data
import evaluate
from model import GPT
from nanolong import plots, retrieval
from nanolong.errors import UserError
from nanolong.intervals import fraction_interval

CFG = {"task": "ruler", "trials": 6, "device": "cpu", "dtype": "float32"}


class Oracle(torch.nn.Module):
    """A model of bytes that gives each byte of an answer that it knows this probability.

    The other bytes share the rest. It keeps the prompts that it has seen.
    """

    def __init__(self, probability=0.99):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.probability = probability
        self.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256}
        self.config = types.SimpleNamespace(random_positions=0)
        self.blocks = []
        self.prompts = []

    def hidden_states(self, x, positions):
        logits = torch.zeros(*x.shape, 257)
        for i, row in enumerate(x.tolist()):
            self.prompts.append(tuple(row))
            for place, target in self.answer(row):
                logits[i, place] = math.log((1 - self.probability) / 256)
                logits[i, place, target] = math.log(self.probability)
        return logits

    def head(self, x):
        return x


class RulerOracle(Oracle):
    """It knows the answers to prompts that have their needles, and no others."""

    def __init__(self, probability, kinds, lengths=(150, 200)):
        super().__init__(probability)
        self.answers = {}
        tokenizer = data.ByteTokenizer()
        for kind, length, sample in product(kinds, lengths, range(6)):
            inputs, targets = data.make_document(kind, tokenizer, length, 1, sample, 256)
            self.answers[tuple(inputs)] = targets

    def answer(self, prompt):
        return enumerate(self.answers.get(tuple(prompt), []))


class NeedleOracle(Oracle):
    """It answers with what follows the first " is", the first n bytes of it wrong."""

    def __init__(self, n_wrong=0):
        super().__init__()
        self.n_wrong = n_wrong

    def answer(self, prompt):
        text = bytes(token for token in prompt if token < 256)
        start = text.index(b" is") + 3
        for i, byte in enumerate(text[start : start + 4]):
            yield len(prompt) - 4 + i, byte + (i < self.n_wrong)


def measured(model, **settings):
    cfg = evaluate.EvaluateConfig(**{**CFG, **settings})
    planned = retrieval.plan_ruler({"m": model}, cfg, (150, 200))
    return [record for measurement in planned for record in measurement.measure()]


@pytest.mark.parametrize("kind", data.KINDS)
def test_a_model_that_knows_the_answers_scores_one_and_an_empty_one_zero(kind):
    """Nats are exact: each byte of the answer has 0.9 or, without the needles, 1/257."""
    for probability, accuracy in ((0.9, 1.0), (1 / 257, 0.0)):
        records = measured(RulerOracle(probability, (kind,)), ruler=(kind,))
        assert len(records) == 12
        for record in records:
            what = (kind, data.ByteTokenizer(), record["length"], 1, record["sample"], 256)
            n_bytes = (data.make_document(*what)[1] >= 0).sum()
            assert record["correct"] == bool(accuracy)
            assert record["nats"] == pytest.approx(-n_bytes * math.log(probability), abs=1e-3)
            gain = n_bytes * math.log(257 * probability)
            assert record["gain"] == pytest.approx(gain, abs=1e-3)
        (at_150, at_200) = retrieval.summarise_ruler(records)
        assert (at_150["length"], at_200["length"]) == (150, 200)
        assert at_150["accuracy"] == fraction_interval([bool(accuracy)] * 6)


def test_checkpoints_are_compared_prompt_by_prompt():
    """Their own intervals overlap; the differences, 0.5 to 0.7, are far from 0."""
    base = {"task": "ruler", "kind": "niah", "length": 64, "size": "small", "gain": 1.0}
    nats = {"a": [1.0, 5.0, 9.0, 13.0, 2.0], "b": [1.5, 5.6, 9.7, 13.5, 2.6]}
    prompts = []
    for name, values in nats.items():
        prompts += [{**base, "checkpoint": name, "correct": False, "nats": v} for v in values]
    first, second = retrieval.summarise_ruler(prompts)
    assert "difference" not in first
    expected = statistics.mean([0.5, 0.6, 0.7, 0.5, 0.6])
    half_width = 2.776445 * statistics.stdev([0.5, 0.6, 0.7, 0.5, 0.6]) / math.sqrt(5)
    assert second["difference"]["mean"] == pytest.approx(expected)
    assert expected - second["difference"]["low"] == pytest.approx(half_width, rel=1e-3)
    table = plots.format_ruler_table([first, second], prompts, (64,))
    (row,) = [line for line in table.splitlines() if "b: nats of the answer" in line]
    assert row.endswith("*") and "over the same prompts" in table
    assert "*" not in plots.format_ruler_table([first], prompts, (64,))
    assert all("difference" not in s for s in retrieval.summarise_ruler(prompts, False))


def test_the_prompts_of_all_checkpoints_are_the_same():
    first, second = RulerOracle(0.9, ("niah",)), RulerOracle(0.5, ())
    for model in (first, second):
        measured(model, ruler=("niah",))
    assert first.prompts == second.prompts and len(set(first.prompts)) == 24


def test_ruler_on_the_command_line_goes_on_where_it_was_stopped(runs, call, tmp_path, monkeypatch):
    words = [runs[0], f"b={runs[2]}", "--task=ruler", "--ruler=niah,multikey,vt", "--trials=5"]
    words += ["--lengths=96,144", "--json=a.json"]
    done = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    records = json.loads((tmp_path / "a.json").read_text())
    prompts = [record for record in records if "summary" not in record]
    summaries = [record for record in records if "summary" in record]
    assert len(prompts) == 2 * 2 * 3 * 5 and len(summaries) == 2 * 2 * 3
    for summary in summaries:
        same = [
            p for p in prompts if all(p[k] == summary[k] for k in ("checkpoint", "kind", "length"))
        ]
        mean = sum(prompt["gain"] for prompt in same) / len(same)
        assert summary["n"] == 5 and summary["gain"]["mean"] == pytest.approx(mean)
        assert f"{mean:.2f} ± " in done.stdout

    # stopped in the 23rd prompt
    count = 0
    real = retrieval.answer_prompts

    def stopped(*args):
        nonlocal count
        count += 1
        if count == 60:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(retrieval, "answer_prompts", stopped)
        words[-1] = "--json=b.json"
        assert call("evaluate.py", *words, cwd=tmp_path).returncode == 130
    saved = json.loads((tmp_path / "b.json").read_text())
    assert 0 < len(saved) < len(prompts)
    done = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    assert f"reused: {len(saved)} of {len(prompts)} measurements" in done.stdout
    assert json.loads((tmp_path / "b.json").read_text()) == records


def test_ruler_refuses_what_it_cannot_ask(runs, call, make, tmp_path):
    done = assert_success(call("evaluate.py", runs[0], "--task=ruler", "--lengths=9"))
    assert "needs" in done.stdout and "refused: " in done.stdout
    assert_refused(call("evaluate.py", runs[0], "--task=ruler", "--ruler=qa"), "niah, multikey")
    make().save(tmp_path / "nameless/step-000001")
    done = call("evaluate.py", tmp_path / "nameless", "--task=ruler")
    assert_refused(done, "has no tokenizer, so it cannot be asked")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_answer(value, save_run, call):
    """As of a checkpoint that overflows in float16."""
    run = save_run(meta={"train": {"tasks": ["niah:1"]}})
    file = run / "step-000001" / "model.safetensors"
    model = GPT.load(run)
    with torch.no_grad():
        model.embed.weight[ord("i")] = value
    shutil.rmtree(run)
    model.save(file.parent)
    for task in ("needle", "ruler"):
        done = call("evaluate.py", run, f"--task={task}", "--lengths=150", "--trials=2")
        found = done.stdout + done.stderr
        assert "logits are not numbers: give --dtype=float32" in " ".join(found.split())


# -----------------------------------------------------------------------------
# Needle


@pytest.mark.parametrize("length", [30, 64, 129])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_model_that_knows_the_value_finds_every_needle(length, depth):
    """One with a wrong digit finds none, and of another seed the prompts are others."""
    right, wrong, other = NeedleOracle(), NeedleOracle(n_wrong=1), NeedleOracle()
    found = []
    for model, seed in ((right, 3), (wrong, 3), (other, 4)):
        tokenizer = data.ByteTokenizer()
        found.append(retrieval.find_needle(model, tokenizer, length, depth, 20, seed, 256))
    accuracy, nll = found[0]
    assert accuracy == found[2][0] == 1.0 and nll < 0.1
    assert found[1][0] == 0.0 and found[1][1] > 1
    assert right.prompts == wrong.prompts
    assert right.prompts != other.prompts


def test_a_model_that_never_saw_a_needle_is_named(make, capsys):
    model = make(vocab_size=257)
    for tasks in (["niah:0.5"], ["passkey:0.5"]):  # the second is of an older run
        model.meta = {"tokenizer": {"kind": "bytes"}, "train": {"tasks": tasks}}
        cfg = evaluate.EvaluateConfig(depths=1, trials=1)
        retrieval.plan_needles({"mine": model}, cfg, (200,))
        is_named = "mine was not trained on niah" in capsys.readouterr().err
        assert is_named == (tasks == ["passkey:0.5"])


def test_needles_need_a_tokenizer(make):
    with pytest.raises(UserError, match="no tokenizer to write prompts with: give that of"):
        retrieval.find_needle(make(), None, 64, 0.5)


def test_needle_records_cover_every_depth_and_the_control(make):
    shape = {"vocab_size": 257, "block_size": 26}
    models = {pos: make(pos=pos, **shape) for pos in ("rope", "learned")}
    for model in models.values():
        model.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256}
    cfg = evaluate.EvaluateConfig(task="needle", depths=3, trials=5, device="cpu", dtype="float32")
    records = retrieval.measure_needles(models, cfg, (26, 60))
    assert [record["depth"] for record in records] == [0, 0.5, 1, None] * 4
    measured = [record for record in records if "refused" not in record]
    assert all(record["accuracy"] == 0 and record["nll"] > 1 for record in measured)
    refused = [record for record in records if "refused" in record]
    assert {(record["checkpoint"], record["length"]) for record in refused} == {("learned", 60)}
    keys = ["checkpoint", "task", "length", "depth", "trials", "seed", "accuracy", "low", "high"]
    assert list(records[0]) == [*keys, "n", "nll", "nll_low", "nll_high"]
