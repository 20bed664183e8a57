"""Differences on the same tokens, intervals over seeds, and what is said to be unequal."""

import json
import math
import shutil
import types

import numpy as np
import pytest
from conftest import assert_refused, assert_success
from test_evaluate import measure
from test_loss import losses_of

import data
from nanolong.evaluation import comparison, intervals, loss


def text_models(make, text_data, *schemes):
    models = {pos: make(pos=pos, vocab_size=257) for pos in schemes}
    for model in models.values():
        model.meta = {"dataset": str(text_data), "bos": 256}
    return models


def test_the_difference_of_two_checkpoints_is_over_the_same_sequences(make, text_data):
    """Of the losses of every sequence, one at a time; the interval is that of their mean."""
    models = text_models(make, text_data, "nope", "alibi")
    first, second = measure(models, (24,), "chunked", max_tokens=240)
    assert "difference" not in first
    val = data.Dataset(str(text_data)).val
    by_model = []
    for model in models.values():
        of_sequences = []
        for place in loss.find_sequences(val, 24, 240, lengths=(24,)):
            x, y = loss.read_sequences(val, 24, [place])
            of_tokens = losses_of(model, x[0], y[0].where(y[0] >= 0, 0))
            of_sequences.append((of_tokens * (y[0] >= 0)).sum().item())
        by_model.append(np.array(of_sequences))
    differences = by_model[1] - by_model[0]
    tokens = [count for _, count, *_ in first["by_sequence"]]
    mean = differences.sum() / sum(tokens)
    assert second["difference"]["mean"] == pytest.approx(mean, abs=1e-5)
    residuals = differences - mean * np.array(tokens)
    half_width = 2.2622 * math.sqrt(10 / 9 * (residuals**2).sum()) / sum(tokens)
    found = second["difference"]["high"] - second["difference"]["mean"]
    assert found == pytest.approx(half_width, rel=2e-3)


def test_a_difference_is_always_from_the_first_checkpoint(make, text_data):
    """If the first refuses a length, the others have none there."""
    models = text_models(make, text_data, "learned", "nope", "alibi")
    records = measure(models, (24, 48), "chunked", max_tokens=240)
    found = {(r["checkpoint"], r["length"]) for r in records if "difference" in r}
    assert found == {("nope", 24), ("alibi", 24)}


# -----------------------------------------------------------------------------
# Other token ids


def test_other_texts_are_said_to_be_unequal(make, text_data, character_data, call, tmp_path):
    """A <bos> before each sequence moves where they begin."""
    runs = []
    for name, tokenizer, folder, bos in (
        ("bytes", data.ByteTokenizer(), text_data, 256),
        ("without", data.ByteTokenizer(), text_data, None),
        ("of characters", data.CharTokenizer("abc"), character_data, None),
    ):
        model = make(vocab_size=tokenizer.vocab_size)
        model.meta = {"tokenizer": tokenizer.to_json(), "bos": bos, "dataset": str(folder)}
        model.save(tmp_path / name / "step-000001")
        runs.append(tmp_path / name)
    words = ["--lengths=24", "--max_tokens=96", "--protocol=chunked"]
    done = assert_success(call("evaluate.py", *runs, *words))
    assert "unequal texts: the losses of different texts cannot be compared" in done.stdout
    assert "*" not in done.stdout
    done = assert_success(call("evaluate.py", *runs[:2], *words, f"--json={tmp_path}/r.json"))
    assert "unequal token ids: compare bits per byte (of chunked)" in done.stdout
    assert "difference" not in (tmp_path / "r.json").read_text()


# -----------------------------------------------------------------------------
# Seeds


def loss_record(name, value, length=64, **fields):
    record = {"checkpoint": name, "task": "loss", "protocol": "chunked", "length": length}
    return {**record, "loss": value, "low": value, "high": value, "n": 9, "ids": "1", **fields}


def test_the_interval_of_an_arm_is_over_its_runs():
    """The textbook's interval of three values, and of the differences of pairs."""
    losses = {"a": [1.0, 1.2, 1.1], "b": [1.5, 1.6, 1.4], "c": [1.3, 1.3], "d": [1.0]}
    arms = {name: [f"{name}/{i}" for i in range(len(x))] for name, x in losses.items()}
    arms["d"] = ["d"]
    runs = [run for of_arm in arms.values() for run in of_arm]
    values = [value for of_arm in losses.values() for value in of_arm]
    records = [loss_record(*pair) for pair in zip(runs, values, strict=True)]
    a, b, c, d = shown = comparison.over_seeds(records, arms)
    half_width = 4.3027 * 0.1 / math.sqrt(3)
    for record, mean in ((a, 1.1), (b, 1.5)):
        assert record["loss"] == pytest.approx(mean) and record["seeds"] == record["n"] == 3
        assert record["high"] - mean == pytest.approx(half_width, rel=1e-3)
    assert c["low"] is None and d is records[-1]  # equal values have no spread; one run has none
    comparison.compare(shown, list(arms))
    differences = np.array([0.5, 0.4, 0.3])
    half_width = 4.3027 * differences.std(ddof=1) / math.sqrt(3)
    assert b["difference"]["mean"] == pytest.approx(0.4)
    assert b["difference"]["high"] == pytest.approx(0.4 + half_width, rel=1e-3)
    assert not any("difference" in record for record in (a, c, d))  # other numbers of runs

    records[4] = {**records[4], "refused": "too long"}
    (_, b, *_) = comparison.over_seeds(records, arms)
    assert b["refused"] == "too long" and "loss" not in b


def test_runs_of_an_arm_on_the_command_line(runs, save_run, call, tmp_path, text_data):
    """Other weights, as of other seeds; retrieval and cost are averaged as well."""
    meta = {"dataset": str(text_data), "data_hash": data.Dataset(str(text_data)).hash}
    more = [save_run(f"{pos}-2", meta, pos=pos, seed=2) for pos in ("rope", "alibi")]
    rope, alibi = f"RoPE={runs[0]},{more[0]}", f"ALiBi={runs[2]},{more[1]}"
    words = ["--task=loss,ruler", "--ruler=niah", "--trials=5", "--lengths=128", "--cost=true"]
    words += ["--max_tokens=960", "--json=a.json"]
    done = assert_success(call("evaluate.py", rope, alibi, *words, cwd=tmp_path))
    records = json.loads((tmp_path / "a.json").read_text())
    names = {record["checkpoint"] for record in records if "seeds" not in record}
    assert names == {"RoPE/1", "RoPE/2", "ALiBi/1", "ALiBi/2"}
    for record in (record for record in records if "seeds" in record):
        own = [r for r in records if r["checkpoint"].startswith(record["checkpoint"] + "/")]
        same = [r for r in own if comparison.cell_of(r) == comparison.cell_of(record)]
        assert len(same) == record["seeds"] == 2
        for name in {"loss", "tokens_per_second"} & record.keys():
            assert record[name] == pytest.approx(np.mean([r[name] for r in same]))
        if "gain" in record:
            expected = intervals.mean_interval([r["gain"]["mean"] for r in same], 2)
            assert record["gain"] == pytest.approx(expected)
    assert "RoPE/1" not in done.stdout
    assert_refused(call("evaluate.py", f"a={runs[0]},", "--lengths=24"), "no checkpoint in")


@pytest.mark.parametrize("kind", ["one folder twice", "copied", "extended without training"])
def test_one_run_is_not_counted_as_two(runs, save_run, text_data, call, tmp_path, kind):
    """An extension without training changes no weight."""
    same = {"one folder twice": runs[0], "copied": tmp_path / "copy"}.get(kind, tmp_path / "long")
    if kind == "copied":
        shutil.copytree(runs[0], same)
    elif kind == "extended without training":
        words = ["--method=yarn", "--factor=2", "--max_iters=0", f"--out_dir={same}"]
        assert_success(call("extend.py", runs[0], *words))
    other = save_run("rope-2", pos="rope", seed=2)
    done = call("evaluate.py", f"a={runs[0]},{other},{same}", "--lengths=24")
    assert_refused(done, f"{same}/step-", "have the same weights", "two runs of a:")
    # as checkpoints of their own they are compared
    both = [f"a={runs[0]},{other}", f"b={same},{other}"]
    words = [f"--dataset={text_data}", "--lengths=24", "--max_tokens=96", "--protocol=chunked"]
    assert_success(call("evaluate.py", *both, *words))


# -----------------------------------------------------------------------------
# What is unequal


def model_of(step=10, max_iters=10, tokens=100, **meta):
    meta = {"step": step, "tokens": tokens, "dataset": "x", "data_hash": "f0", **meta}
    meta["train"] = {"max_iters": max_iters, "stop_at": 0}
    return types.SimpleNamespace(meta=meta)


EXTENDED = {"parent": "out/a/step-000010", "pretraining_tokens": 100}


@pytest.mark.parametrize(
    "other, sentences",
    [
        ({}, []),
        ({"tokens": 200}, ["unequal trained tokens: 100 (a); 200 (b)"]),
        ({"data_hash": "f1"}, ["unequal training data: x f0 (a); x f1 (b)"]),
        (
            None,  # imported
            [
                "unequal steps: 10 (a); unknown (b)",
                "unequal trained tokens: 100 (a); unknown (b)",
                "unequal training data: x f0 (a); unknown (b)",
            ],
        ),
        ({"step": 6}, ["unequal steps: 10 (a); 6 (b)", "unfinished: b (6 of 10 steps)"]),
        # extended without training, which costs nothing, and with
        ({**EXTENDED, "step": 0, "max_iters": 0, "tokens": 0}, []),
        (
            {**EXTENDED, "step": 4, "max_iters": 4},
            ["unequal steps: 10 (a); 10 + 4 (b)", "unequal trained tokens: 100 (a); 200 (b)"],
        ),
    ],
)
def test_what_is_unequal_is_said(other, sentences):
    other = types.SimpleNamespace(meta={}) if other is None else model_of(**other)
    models = {"a": model_of(), "b": other}
    assert comparison.describe_unequal(models, {"a": ["a"], "b": ["b"]}) == sentences
