"""Training curves: what is read from log.jsonl, what is plotted of it, and by which commands."""

import json

import pytest
from conftest import TINY, assert_success, logged
from matplotlib.figure import Figure


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
    """The axes that are written, by the name of their file; they are written, too."""
    saved = {}
    save = Figure.savefig

    def keep(figure, file, **options):
        saved[str(file)] = figure.axes[0]
        save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def lines_of(axis):
    """Label -> (x, y) of the lines of an axis."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axis.lines}


def test_the_curves_are_the_losses_of_the_logs(call, write_log, figures, tmp_path):
    """Of several rows of a step the last one counts, and damaged lines do not."""
    rows = [{"step": 0, "val_loss": 5.0}, "{", "[1]", '{"loss": 1}', {"step": 5, "loss": None}]
    rows += [{"step": 10, "loss": 4.5}, {"step": 10, "loss": 4.0}, {"step": 10, "val_loss": 3.5}]
    first, second = write_log(*rows, name="a"), write_log({"step": 5, "loss": 6.0}, name="b")
    file = tmp_path / "deep/curves.png"
    done = assert_success(call("evaluate.py", f"A={first}", second, f"--curves={file}"))
    assert done.stdout == f"wrote {file}\n" and file.read_bytes()[:4] == b"\x89PNG"
    assert lines_of(figures[str(file)]) == {
        "A": ([10], [4.0]),
        "A, validation": ([0, 10], [5.0, 3.5]),
        str(second): ([5], [6.0]),
        f"{second}, validation": ([], []),
    }


@pytest.fixture
def words(text_data, tmp_path):
    return ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]


def test_a_finished_run_and_its_extension_are_plotted(call, words, figures, tmp_path):
    assert "curve.png" not in assert_success(call(*words, "--max_iters=0")).stdout
    done = assert_success(call(*words, "--max_iters=4", "--init_from=resume"))
    assert f"wrote {tmp_path}/run/curve.png" in done.stdout
    extended = tmp_path / "extended"
    small = ["--factor=2", "--max_iters=2", "--eval_iters=1", "--max_tokens=512"]
    small += ["--log_interval=1", f"--out_dir={extended}"]
    assert_success(call("extend.py", tmp_path / "run", *small))
    for run in (tmp_path / "run", extended):
        lines = lines_of(figures[str(run / "curve.png")])
        assert lines[run.name][1] == logged(run, "loss")
        assert lines[f"{run.name}, validation"][1] == logged(run, "val_loss")
