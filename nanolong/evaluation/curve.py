"""The curve of a run's losses, from its log.jsonl, as a PNG file by matplotlib.

Apart from figures.py, so that training needs nothing that only an evaluation needs.
"""

from pathlib import Path

from nanolong import run
from nanolong.errors import note


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


def read_losses(folder, name):
    """Return the steps of a run that have logged a number of this name, and the numbers."""
    rows = {row["step"]: row[name] for row in run.read_log(folder) if name in row}
    rows = {step: value for step, value in rows.items() if isinstance(value, int | float)}
    return list(rows), list(rows.values())


def plot_finished_run(folder):
    """Write curve.png into the folder of a run that has ended: validation is marked.

    The run is saved by then, and nothing that goes wrong here may make it fail: it is a note.
    """
    file = Path(folder) / "curve.png"
    try:
        plt = import_pyplot(file)
        if plt is None:
            return
        figure, axis = plt.subplots(figsize=(7, 4.4), dpi=120, layout="constrained")
        name = Path(folder).name
        training, validation = read_losses(folder, "loss"), read_losses(folder, "val_loss")
        axis.plot(*training, linewidth=0.9, alpha=0.6, label=name, color="C0")
        style = {"marker": "o", "markersize": 4, "color": "C0"}
        axis.plot(*validation, label=f"{name}, validation", **style)
        axis.set(xlabel="step", ylabel="loss (nats per token)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        figure.savefig(file)
        plt.close(figure)
        print(f"wrote {file}")
    except Exception as error:
        note(f"{file} is not written: {error}")
