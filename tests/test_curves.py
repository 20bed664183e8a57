"""Training curves: what is read from log.jsonl, what is plotted of it, and by which commands."""

import json
import sys

import pytest
from conftest import TINY, assert_refused, assert_success, logged

import evaluate
from nanolong import curves
from nanolong.errors import UserError


def step(number, loss, tokens, speed):
    row = {"step": number, "loss": loss, "lr": 0.1, "norm": None}
    return {**row, "tokens": tokens, "tokens_per_second": speed}


def validation(number, loss):
    return {"step": number, "val_loss": loss}


@pytest.fixture
def write_log(tmp_path):
    """A function that writes a run folder with these rows, or lines of text, as its log."""

    def write_log(*rows, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return write_log


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, by the name of their file; they are written, too."""
    saved = {}
    save = curves.save_figure

    def keep(figure, file):
        saved[str(file)] = figure
        save(figure, file)

    monkeypatch.setattr(curves, "save_figure", keep)
    return saved


def lines_of(axis):
    """Label -> (x, y) of the lines of an axis."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axis.lines}


def test_seconds_are_tokens_by_speed_added_up(write_log):
    run = write_log(
        validation(0, 5.0),
        step(10, 4.0, tokens=1000, speed=100),
        validation(15, 3.5),
        step(20, 3.0, tokens=3000, speed=500),
        validation(20, 2.5),
    )
    log = curves.read_log(run)
    assert log["training"].tolist() == [[10, 10.0, 4.0], [20, 14.0, 3.0]]
    # step 15 is halfway between 10 s and 14 s
    assert log["validation"].tolist() == [[0, 0.0, 5.0], [15, 12.0, 3.5], [20, 14.0, 2.5]]


def test_steps_taken_again_after_a_resume_count_once(write_log):
    """Those of the later start, and nothing that the earlier one had logged after them."""
    run = write_log(
        step(10, 4.0, tokens=100, speed=10),
        step(20, 3.0, tokens=200, speed=10),
        validation(20, 3.1),
        step(30, 2.0, tokens=300, speed=10),
        validation(30, 2.1),
        {"step": 15, "changed": {"learning_rate": [1, 2]}},
        step(20, 3.5, tokens=200, speed=20),
        validation(20, 3.6),
        validation(20, 3.7),
    )
    log = curves.read_log(run)
    assert log["training"].tolist() == [[10, 10.0, 4.0], [20, 15.0, 3.5]]
    assert log["validation"].tolist() == [[20, 15.0, 3.7]]


def test_damaged_lines_are_left_out(write_log):
    good = step(10, 4.0, tokens=100, speed=10)
    run = write_log(
        *("", "{", "[1]", "null", '{"loss": 1}', "\ufffd\x00"),
        *({**good, "loss": None}, {**good, "loss": "1"}, {**good, "tokens_per_second": 0}),
        '{"step": 10, "loss": NaN, "tokens": 100, "tokens_per_second": 10}',
        '{"step": 1e999, "val_loss": 1}',
        {"step": 10, "loss": 4.0},
        good,
        '{"step": 20, "loss": 3.0, "tok',
    )
    log = curves.read_log(run)
    assert log["training"].tolist() == [[10, 10.0, 4.0]] and log["validation"].tolist() == []


@pytest.mark.parametrize("rows", [(), ("{",), (validation(0, 5.0),)])
def test_a_log_without_a_training_step_is_refused(write_log, rows):
    with pytest.raises(UserError, match="run has logged no training step: "):
        curves.read_log(write_log(*rows))


def test_each_run_is_plotted_by_step_and_by_seconds(write_log, figures, tmp_path):
    rows = [validation(0, 5.0), step(10, 4.0, 1000, 100), validation(10, 3.5)]
    runs = {"a": write_log(*rows, name="a"), "b": write_log(step(5, 6.0, 50, 5), name="b")}
    file = tmp_path / "curves.png"
    assert curves.plot_curves(runs, file)
    assert file.read_bytes()[:4] == b"\x89PNG"
    by_step, by_seconds = figures[str(file)].axes
    assert lines_of(by_step) == {
        "a": ([10], [4.0]),
        "a, validation": ([0, 10], [5.0, 3.5]),
        "b": ([5], [6.0]),
        "b, validation": ([], []),
    }
    # 1,000 tokens at 100 a second, and 50 at 5, take 10 seconds
    assert lines_of(by_seconds) == {**lines_of(by_step), "b": ([10.0], [6.0])}
    markers = [line.get_marker() for line in by_step.lines]
    colours = [line.get_color() for line in by_step.lines]
    assert markers == ["None", "o"] * 2
    assert colours[0] == colours[1] != colours[2] == colours[3]
    legend = [text.get_text() for text in by_step.get_legend().get_texts()]
    assert legend == list(lines_of(by_step))


# -----------------------------------------------------------------------------
# The commands.


@pytest.fixture
def words(text_data, tmp_path):
    return ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]


def test_a_finished_run_and_its_extension_are_plotted(call, words, figures, tmp_path):
    done = assert_success(call(*words, "--max_iters=4"))
    assert f"wrote {tmp_path}/run/curve.png" in done.stdout
    assert_success(call(*words, "--init_from=resume"))
    extended = tmp_path / "extended"
    small = ["--factor=2", "--max_iters=2", "--eval_iters=1", "--max_tokens=512"]
    small += ["--log_interval=1", f"--out_dir={extended}"]
    assert_success(call("extend.py", tmp_path / "run", *small))
    for run, n in ((tmp_path / "run", 8), (extended, 2)):
        by_step, by_seconds = figures[str(run / "curve.png")].axes
        steps, losses = lines_of(by_step)[run.name]
        assert steps == list(range(1, n + 1)) and losses == logged(run, "loss")
        assert lines_of(by_step)[f"{run.name}, validation"][1] == logged(run, "val_loss")
        seconds, _ = lines_of(by_seconds)[run.name]
        assert 0 < seconds[0] and seconds == sorted(set(seconds))


def test_without_training_steps_nothing_is_plotted(call, words, tmp_path):
    done = assert_success(call(*words, "--max_iters=0"))
    assert "curve.png" not in done.stdout + done.stderr
    assert not (tmp_path / "run/curve.png").exists()


def test_a_finished_run_never_fails_for_its_plot(call, words, tmp_path, monkeypatch):
    file = tmp_path / "run/curve.png"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        done = assert_success(call(*words, "--max_iters=1", "--warmup_iters=1"))
    assert f"note: {file} is not written: install matplotlib" in done.stdout

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(curves, "save_figure", fail)
        done = assert_success(call(*words, "--max_iters=2", "--init_from=resume"))
    assert f"note: {file} is not written: [Errno 28] No space left" in done.stderr
    monkeypatch.setattr(curves, "read_row", lambda line: None)
    done = assert_success(call(*words, "--max_iters=3", "--init_from=resume"))
    assert f"note: {file} is not written: {tmp_path}/run has logged no training step" in done.stderr
    assert "a sample:" in done.stdout and not file.exists()


def test_evaluate_plots_logs_of_runs_and_needs_nothing_else(call, write_log, figures, tmp_path):
    folders = [write_log(step(n, 1.0, 10, 5), name=f"run{n}") for n in (1, 2)]
    file = tmp_path / "deep/curves.png"
    words = [f"first={folders[0]}", folders[1], f"--curves={file}"]
    done = assert_success(call("evaluate.py", *words))
    assert done.stdout == f"wrote {file}\n"
    lines = lines_of(figures[str(file)].axes[0])
    assert lines["first"] == ([1], [1.0]) and lines[str(folders[1])] == ([2], [1.0])


def test_evaluate_says_what_it_cannot_plot(call, write_log, tmp_path, monkeypatch):
    run = write_log(step(1, 1.0, 10, 5))
    file = f"--curves={tmp_path}/curves.png"
    before = sorted(tmp_path.iterdir())
    for words, phrase in (
        ([file], "give at least one run folder"),
        ([file, tmp_path / "none"], "none/log.jsonl does not exist: "),
        ([file, run / "log.jsonl"], "log.jsonl/log.jsonl does not exist: "),
        ([file, write_log(name="empty")], "empty has logged no training step: "),
        (["--curves=a.jpg", run], "--curves=a.jpg is no PNG: "),
        ([file, "--json=a.json", run], "leave --plot, --json and --report out"),
    ):
        assert_refused(call("evaluate.py", *words), phrase)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = call("evaluate.py", file, run)
    assert done.returncode == 1 and "install matplotlib" in done.stdout
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "empty"])


def test_only_one_process_plots(write_log, tmp_path):
    run = write_log(step(1, 1.0, 10, 5))
    cfg = evaluate.EvaluateConfig(curves=str(tmp_path / "curves.png"))
    assert evaluate.evaluate(cfg, set(), [str(run)], writes=False) == 0
    assert list(tmp_path.iterdir()) == [run]
