"""An evaluation prints each measurement with the time left, and goes on after it was stopped."""

import json
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, assert_success

import evaluate
from model import GPT
from nanolong import evaluation_log, retrieval, scoring
from nanolong.evaluation import loss
from nanolong.evaluation_log import EvaluationLog, Measurement

LOSS = ["--lengths=24,48", "--max_tokens=960", "--protocol=last-quarter,sliding", "--stride=12"]
NEEDLE = ["--task=needle", "--lengths=26,48", "--depths=2", "--trials=2"]


MEASURING = [(loss, "loss_by_part"), (retrieval, "ask_for_needles")]


@pytest.fixture
def runs(runs):
    """Those that are not bounded by their context."""
    return runs[0], runs[2]


@pytest.fixture
def measured(monkeypatch):
    """The lengths of the forward passes' sequences, by every call that measures something."""
    calls = []
    for module, name in MEASURING:
        original = getattr(module, name)

        def counted(model, text, length, *args, original=original, **named):
            calls.append(length)
            return original(model, text, length, *args, **named)

        monkeypatch.setattr(module, name, counted)
    return calls


def unexpected(done):
    """What is on stderr besides the note that a model never saw a needle."""
    return [line for line in done.stderr.splitlines() if "not trained on niah" not in line]


def without_comparisons(record):
    """A record without what is known only when all are measured."""
    return {key: value for key, value in record.items() if key not in ("difference", "benefit")}


def lines_of(done):
    return [line for line in done.stdout.splitlines() if line.startswith("measured ")]


# -----------------------------------------------------------------------------
# The lines


class Clock:
    """time.perf_counter() that a measurement moves on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(evaluation_log.time, "perf_counter", lambda: self.now)


def test_the_time_left_follows_from_the_flops_of_each_checkpoint(make, monkeypatch, capsys):
    """Twice the FLOPs take twice the time; b runs at a third of the speed of a."""
    clock = Clock(monkeypatch)
    measurements = []
    for name, seconds_per_flop in (("a", 1.0), ("b", 3.0)):
        for length, flops in ((10, 10), (20, 30)):
            unknown = {"loss": 1.5, "low": None, "high": None, "n": 1}
            record = scoring.loss_record(name, "chunked", length, **unknown)

            def find(record=record, seconds=flops * seconds_per_flop):
                clock.now += seconds
                return [record]

            measurements.append(Measurement([record], find, flops))
    models = {name: make() for name in "ab"}
    records = EvaluationLog("", [], models, {"a": {}, "b": {}}).measure(measurements)
    assert [record["checkpoint"] for record in records] == ["a", "a", "b", "b"]
    # after 10 s: 30 + 10 + 30 more FLOPs at 1 s; b at the speed of a until it is measured, then 30
    # FLOPs at 3 s
    assert capsys.readouterr().out.splitlines() == [
        "measured 1 of 4: a at 10: chunked 1.500 (n = 1) nats per token (10 s, about 70 s left)",
        "measured 2 of 4: a at 20: chunked 1.500 (n = 1) nats per token (30 s, about 40 s left)",
        "measured 3 of 4: b at 10: chunked 1.500 (n = 1) nats per token (30 s, about 90 s left)",
        "measured 4 of 4: b at 20: chunked 1.500 (n = 1) nats per token (90 s)",
    ]


# -----------------------------------------------------------------------------
# Stopping and going on


@pytest.mark.parametrize(("words", "count"), [(LOSS, 8), (NEEDLE, 12)])
def test_a_stopped_evaluation_goes_on_with_the_same_records(
    words, count, runs, call, measured, tmp_path, monkeypatch
):
    whole, file = tmp_path / "whole.json", tmp_path / "a.json"
    done = call("evaluate.py", *runs, *words, f"--json={whole}")
    assert done.returncode == 0 and not unexpected(done)
    assert len(measured) == len(lines_of(done)) == count
    for number, line in enumerate(lines_of(done), 1):
        assert line.startswith(f"measured {number} of {count}: ")
        assert ("s, about " in line and " left)" in line) == (number < count)
        assert "nats per token" in line or "passkey" in line
    measured.clear()

    # Ctrl-C in the sixth measurement: five are in the file, and nothing else is.
    with monkeypatch.context() as patch:
        for module, name in MEASURING:
            original = getattr(module, name)

            def stopped(*args, original=original, **named):
                if len(measured) == 5:
                    raise KeyboardInterrupt
                return original(*args, **named)

            patch.setattr(module, name, stopped)
        assert call("evaluate.py", *runs, *words, f"--json={file}").returncode == 130
    expected = json.loads(whole.read_text())
    assert json.loads(file.read_text()) == [without_comparisons(r) for r in expected[:5]]
    assert not [other for other in tmp_path.iterdir() if other.suffix == ".tmp"]

    measured.clear()
    done = call("evaluate.py", *runs, *words, f"--json={file}")
    assert done.returncode == 0 and not unexpected(done)
    assert f"reused: 5 of {count} measurements, from {file}\n" in done.stdout
    assert len(measured) == count - 5 == len(lines_of(done))
    assert json.loads(file.read_text()) == expected

    # A finished one prints the same tables, and measures nothing.
    measured.clear()
    again = call("evaluate.py", *runs, *words, f"--json={file}")
    assert f"reused: {count} of {count} measurements" in again.stdout and not measured
    assert again.stdout.split("\n\n")[1:] == done.stdout.split("\n\n")[1:]
    assert json.loads(file.read_text()) == expected


@pytest.mark.slow
def test_after_kill_9_in_a_pipe_the_lines_are_there_and_the_file_is_whole(runs, call, tmp_path):
    file = tmp_path / "a.json"
    words = ["--lengths=24,48,96,192", "--protocol=sliding", "--stride=4", "--max_tokens=3840"]
    words += [f"--json={file}", "--device=cpu"]
    command = [sys.executable, ROOT / "evaluate.py", *runs, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("measured 2 of 8"):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    # The line comes when the measurement is done, and the record is in the file by then.
    assert process.returncode == -signal.SIGKILL and printed[0].startswith("scored: ")
    records = json.loads(file.read_text())
    assert [record["length"] for record in records][:2] == [24, 48] and len(records) < 8
    done = call("evaluate.py", *runs, *words)
    assert done.returncode == 0 and f"reused: {len(records)} of 8 " in done.stdout
    assert json.loads(file.read_text())[: len(records)] == records


def extend_in_place(run):
    """The same weights under the same name, extended."""
    step = run / "step-000001"
    model = GPT.load(run)
    step.rename(run.parent / "old")
    model.extend("yarn", 4)
    model.meta.pop("checksums")
    model.save(step)


def train_in_place(run):
    step = run / "step-000001"
    model = GPT.load(run)
    step.rename(run.parent / "old")
    model.norm.weight.data.mul_(1.01)
    model.meta.pop("checksums")
    model.save(step)


def save_a_step(run):
    model = GPT.load(run)
    model.meta.pop("checksums")
    model.save(run / "step-000002")


def test_what_depends_on_something_else_is_measured_again(runs, call, measured, text_data):
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
    for words in (
        [f"--text={other_text}"],
        ["--dtype=bfloat16"],
        ["--dtype=bfloat16", "--weights=bfloat16"],
        ["--max_tokens=480"],
        ["--lengths=24,96"],
        ["--protocol=chunked"],
        ["--protocol=sliding", "--stride=6"],
        ["--protocol=sliding", "--stride=12"],
    ):
        assert n_measured(*loss, *words) == 2, words
        assert n_measured(*loss, *words) == 0, words
    assert n_measured(*loss) == 2  # the file has the records of one command only
    for change in (extend_in_place, train_in_place, save_a_step):
        if change is train_in_place:
            (rope.parent / "old").rename(rope.parent / "older")
        change(rope)
        assert (n_measured(*loss), n_measured(*loss)) == (2, 0), change

    needle = ["--task=needle", "--lengths=24", "--depths=1", "--trials=2"]
    assert (n_measured(*needle), n_measured(*needle)) == (2, 0)
    for words in (["--seed=2"], ["--trials=3"], ["--depths=2"]):
        assert n_measured(*needle, *words) == (1 if words == ["--depths=2"] else 2), words
        assert n_measured(*needle) == (0 if words == ["--depths=2"] else 2)


def test_other_code_measures_again_and_says_so(runs, call, measured, monkeypatch, tmp_path):
    words = [runs[0], "--lengths=24,48", "--max_tokens=960", f"--json={tmp_path}/a.json"]
    call("evaluate.py", *words)
    count = len(measured)
    monkeypatch.setattr(evaluate.entry, "hash_sources", lambda entry: "edited")
    done = call("evaluate.py", *words)
    assert len(measured) == 2 * count and "reused" not in done.stdout
    assert done.stderr.startswith(f"note: {tmp_path}/a.json has 6 records that other settings, ")


@pytest.mark.parametrize(
    "content", ["my notes", '{"task": "loss"}', "[1, 2]", '[{"task": "probe"}]', "[[]]", '"loss"']
)
def test_a_file_of_another_kind_is_not_overwritten(content, runs, call, measured, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content)
    done = call("evaluate.py", runs[0], "--lengths=24", "--max_tokens=48", f"--json={file}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{file} holds something else than records" in done.stderr and not measured
    assert file.read_text() == content


def test_links_and_devices_are_written_not_replaced(runs, call, tmp_path):
    words = ["evaluate.py", runs[0], "--lengths=24", "--max_tokens=48"]
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("link.json", "null"):
        assert_success(call(*words, f"--json={tmp_path / name}"))
        assert (tmp_path / name).is_symlink()
    assert len(json.loads((tmp_path / "a.json").read_text())) == 2
    assert not (tmp_path / "null").is_file()
