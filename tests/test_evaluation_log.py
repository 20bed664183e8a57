"""An evaluation goes on after it was stopped, and measures again what depends on something else."""

import json
import shutil

import pytest
from conftest import assert_refused, assert_success

import evaluate
from model import GPT
from nanolong.evaluation import log

LOSS = ["--lengths=24,48", "--max_tokens=960", "--protocol=last-quarter,sliding", "--stride=12"]
NEEDLE = ["--task=needle", "--lengths=128,160,192,224", "--depths=2", "--trials=2"]


@pytest.fixture
def runs(runs):
    """Those that are not bounded by their context."""
    return runs[0], runs[2]


@pytest.fixture
def measured(monkeypatch):
    """The lengths of the cells that are measured."""
    calls = []
    original = log.Cell.measure

    def counted(cell):
        calls.append(cell.records[0]["length"])
        return original(cell)

    monkeypatch.setattr(log.Cell, "measure", counted)
    return calls


@pytest.mark.parametrize("words", [LOSS, NEEDLE])
def test_a_stopped_evaluation_goes_on_with_the_same_records(
    words, runs, call, measured, tmp_path, monkeypatch
):
    """Needles of all depths are one measurement, as losses that share their forward passes are."""
    whole, file = tmp_path / "whole.json", tmp_path / "a.json"
    assert_success(call("evaluate.py", *runs, *words, f"--json={whole}"))
    expected = json.loads(whole.read_text())
    assert len(measured) == 8
    measured.clear()

    # Ctrl-C in the sixth cell: five are in the file, and nothing else is.
    with monkeypatch.context() as patch:
        original = log.Cell.measure

        def stopped(cell):
            if len(measured) == 5:
                raise KeyboardInterrupt
            return original(cell)

        patch.setattr(log.Cell, "measure", stopped)
        assert call("evaluate.py", *runs, *words, f"--json={file}").returncode == 130
    saved = json.loads(file.read_text())
    assert len({record["key"] for record in saved}) == 5
    for record, other in zip(saved, expected, strict=False):
        assert {**record, "difference": None} == {**other, "difference": None}

    for n_measured in (3, 0):  # a finished one measures nothing
        measured.clear()
        assert_success(call("evaluate.py", *runs, *words, f"--json={file}"))
        assert len(measured) == n_measured
        assert json.loads(file.read_text()) == expected


def save_again(run, change):
    """Save a run's model after a change of it, under the same name."""
    model = GPT.load(run)
    shutil.rmtree(run / "step-000001")
    change(model)
    model.meta.pop("checksums")
    model.save(run / "step-000001")


def test_what_depends_on_something_else_is_measured_again(runs, call, measured):
    rope, _ = runs
    file = rope.parent / "a.json"

    def n_measured(*words):
        measured.clear()
        assert_success(call("evaluate.py", rope, *words, f"--json={file}", "--device=cpu"))
        return len(measured)

    loss = ["--lengths=24,48", "--max_tokens=960", "--dtype=float32", "--protocol=last-quarter"]
    assert (n_measured(*loss), n_measured(*loss)) == (2, 0)
    other_text = rope.parent / "other.txt"
    other_text.write_text("one two three four five six seven eight nine ten " * 40)
    for words in ([f"--text={other_text}"], ["--dtype=bfloat16"], ["--max_tokens=480"]):
        assert n_measured(*loss, *words) == 2, words
        assert n_measured(*loss, *words) == 0, words
    assert n_measured(*loss) == 2  # the file has the records of one command only
    for change in (
        lambda model: model.extend("yarn", 4),
        lambda model: model.norm.weight.data.mul_(1.01),
    ):
        save_again(rope, change)
        assert (n_measured(*loss), n_measured(*loss)) == (2, 0)

    needle = ["--task=needle", "--lengths=128", "--depths=1", "--trials=2"]
    assert (n_measured(*needle), n_measured(*needle)) == (1, 0)
    for words in ("--seed=2", "--trials=3", "--depths=2"):
        assert (n_measured(*needle, words), n_measured(*needle, words)) == (1, 0), words


def test_other_code_measures_again_and_says_so(runs, call, measured, monkeypatch, tmp_path):
    words = [runs[0], "--lengths=24,48", "--max_tokens=960", f"--json={tmp_path}/a.json"]
    call("evaluate.py", *words)
    count = len(measured)
    monkeypatch.setattr(evaluate.entry, "hash_sources", lambda entry: "edited")
    done = call("evaluate.py", *words)
    assert len(measured) == 2 * count and "reused" not in done.stdout
    assert done.stderr.startswith(f"note: {tmp_path}/a.json has 6 records that other settings, ")


def test_a_file_of_another_kind_is_not_overwritten(runs, call, measured, tmp_path):
    file = tmp_path / "a.json"
    words = ["evaluate.py", runs[0], "--lengths=24", "--max_tokens=48", f"--json={file}"]
    for content in ("my notes", '[{"task": "probe"}]'):
        file.write_text(content)
        assert_refused(call(*words), f"{file} holds something else than records")
        assert file.read_text() == content and not measured
