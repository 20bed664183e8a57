"""The curve of a run's losses, from its log.jsonl, as a PNG file by matplotlib.

Apart from figures.py, so that training needs nothing that only an evaluation needs.
"""

from pathlib import Path

from nanolong import run
from nanolong.errors import note, require


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


def plot_curves(runs, file):
    """Write a PNG of the losses of runs by step: training is a line, validation is marked.

    runs: name -> run folder. Returns whether the file was written.
    """
    logs = {name: read_losses(folder, "loss") for name, folder in runs.items()}
    for name, (steps, _) in logs.items():
        require(steps, f"{runs[name]} has logged no training step: name runs that have logged one")
    plt = import_pyplot(file)
    if plt is None:
        return False
    figure, axis = plt.subplots(figsize=(7, 4.4), dpi=120, layout="constrained")
    for number, (name, log) in enumerate(logs.items()):
        style = {"color": f"C{number % 10}"}
        axis.plot(*log, linewidth=0.9, alpha=0.6, label=name, **style)
        validation = read_losses(runs[name], "val_loss")
        axis.plot(*validation, marker="o", markersize=4, label=f"{name}, validation", **style)
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(file)
    plt.close(figure)
    print(f"wrote {file}")
    return True


def plot_finished_run(folder):
    """Write curve.png into the folder of a run that has ended.

    The run is saved by then, and nothing that goes wrong here may make it fail: it is a note.
    """
    file = Path(folder) / "curve.png"
    try:
        plot_curves({Path(folder).name: folder}, file)
    except Exception as error:
        note(f"{file} is not written: {error}")
