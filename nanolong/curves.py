"""Figures as PNG files by matplotlib, and the curve of a run's losses, from its log.jsonl.

Apart from plots.py, so that training needs nothing that only an evaluation needs.
"""

import contextlib
import json
import math
from pathlib import Path

import numpy as np

from nanolong.errors import UserError, note

TRAINING = {"step", "loss", "tokens", "tokens_per_second"}
VALIDATION = {"step", "val_loss"}


def import_pyplot(file):
    """Return matplotlib's pyplot, which writes to files; without matplotlib say so, return None."""
    try:
        import matplotlib
    except ImportError:
        print(f"note: {file} is not written: install matplotlib (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def new_figure(file, size, n_rows=1, n_columns=1, title="", note="", sharey=False):
    """Return a figure for a file and its axes, (n_rows, n_columns); None without matplotlib.

    note: in small print below.
    """
    plt = import_pyplot(file)
    if plt is None:
        return None, None
    figure = plt.Figure(size, dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10, wrap=True)
    figure.supxlabel(note, fontsize=7, color="gray")
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, sharey=sharey)


def save_figure(figure, file):
    """Write a figure to a PNG file."""
    figure.savefig(file)
    print(f"wrote {file}")


def read_log(run):
    """Return the losses that a run has logged: {"training", "validation"}.

    Each is an array (n, 3) of step, seconds and loss, in the order of the steps. Seconds are those
    of the training steps, without evaluations, compilation and the time between two starts of a
    run. Raises UserError if the run folder has no log.jsonl, or that has no training step.
    """
    rows = read_rows(Path(run) / "log.jsonl")
    # of several rows of a step the last one counts
    training = {row["step"]: row for row in rows if row.keys() >= TRAINING}
    validation = {row["step"]: row["val_loss"] for row in rows if row.keys() >= VALIDATION}
    if not training:
        raise UserError(
            f"{run} has logged no training step: name runs that have logged at least one"
        )
    losses, tokens, speeds = (
        [row[key] for row in training.values()] for key in ("loss", "tokens", "tokens_per_second")
    )
    seconds = np.cumsum(np.diff(tokens, prepend=0).clip(min=0) / speeds)
    # an evaluation may lie between two logged steps
    evaluated_at = np.interp(list(validation), [0, *training], [0, *seconds])
    return {
        "training": np.column_stack([list(training), seconds, losses]),
        "validation": np.column_stack([list(validation), evaluated_at, list(validation.values())]),
    }


def read_rows(file):
    """Return the rows of a log.jsonl, without damaged ones, in the order of their steps.

    Where a run has gone on from an earlier step, what followed that step before is left out.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{file} does not exist: name run folders that have been trained") from None
    rows = []
    for row in filter(None, map(read_row, lines)):
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def read_row(line):
    """Return the numbers of a line of log.jsonl by name, or None if the line is damaged."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
        row = json.loads(line)
        numbers = {name: row[name] for name in (TRAINING | VALIDATION) & row.keys()}
        is_finite = all(math.isfinite(number) for number in numbers.values())
        if "step" in numbers and is_finite and numbers.get("tokens_per_second", 1) > 0:
            return numbers
    return None


def plot_curves(runs, file):
    """Write a PNG of the losses of runs by step and by seconds; without matplotlib, say so.

    runs: name -> run folder. Training is a line, validation is marked. Returns whether the file was
    written. Raises as read_log().
    """
    logs = {name: read_log(folder) for name, folder in runs.items()}
    figure, axes = new_figure(file, (11, 4.4), 1, 2, sharey=True)
    if figure is None:
        return False
    for number, (name, log) in enumerate(logs.items()):
        colour = f"C{number % 10}"
        for column, axis in enumerate(axes[0]):
            x, y = log["training"][:, (column, 2)].T
            axis.plot(x, y, color=colour, linewidth=0.9, alpha=0.6, label=name)
            x, y = log["validation"][:, (column, 2)].T
            label = f"{name}, validation"
            axis.plot(x, y, color=colour, marker="o", markersize=4, label=label)
    for axis, label in zip(axes[0], ("step", "seconds of training steps"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[0, 0].legend(fontsize=8)
    save_figure(figure, file)
    return True


def plot_finished_run(run):
    """Write curve.png into the folder of a run that has ended.

    The run is saved by then, and nothing that goes wrong here may make it fail: it is a note.
    """
    file = Path(run) / "curve.png"
    try:
        plot_curves({Path(run).name: run}, file)
    except Exception as error:
        note(f"{file} is not written: {error}")
