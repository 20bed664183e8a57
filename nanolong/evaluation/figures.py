"""Figures by matplotlib: measurements (PNG, SVG for the report), and the losses of a log."""

import io
import math

import numpy as np

from nanolong import run
from nanolong.errors import require
from nanolong.evaluation.tables import select, unique

MARKERS = "os^Dv*P"


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


def new_figure(file, n, n_columns, panel, title, note):
    """Return a figure with n panels, each of a size in inches, and their axes.

    note: in small print below. Without matplotlib it is None, without axes.
    """
    plt = import_pyplot(file)
    if plt is None:
        return None, []
    # names may hold a dollar sign, which is no mathematics
    plt.rcParams.update({"text.parse_math": False, "svg.fonttype": "none"})
    n_columns = min(n, n_columns)
    n_rows = math.ceil(n / n_columns)
    size = (panel[0] * n_columns + 1.4, panel[1] * n_rows + 0.8)
    figure = plt.Figure(size, dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10, wrap=True)
    figure.supxlabel(note, fontsize=7, color="gray", wrap=True)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    for axis in axes[n:]:
        axis.axis("off")
    return figure, axes[:n]


def to_svg(figure):
    """Return a figure as an SVG element, without the date and the address of matplotlib."""
    text = io.StringIO()
    hidden = dict.fromkeys(("Date", "Creator", "Type", "Format"))
    figure.savefig(text, format="svg", metadata=hidden)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def loss_figure(file, records, original_lengths, title="", note="", unit="nats per token"):
    """Draw the losses of each protocol in a panel: a curve with a band for each checkpoint.

    original_lengths are marked. Returns the figure, or None without matplotlib.
    """
    protocols = unique(records, "protocol")
    names = unique(records, "checkpoint")
    figure, axes = new_figure(file, len(protocols), 3, (4.6, 3.6), title, note)
    for axis, protocol in zip(axes, protocols, strict=False):
        draw_losses(axis, select(records, protocol=protocol), names)
        for length in original_lengths:
            axis.axvline(length, color="gray", linestyle=":", linewidth=1)
        axis.set(title=protocol, ylabel=f"loss ({unit})")
    if figure:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", fontsize=8)
    return figure


def draw_losses(axis, records, names):
    """Draw the curves of one protocol by length, or by position in the longest sequences."""
    longest = max(record["length"] for record in records)
    by_position = records[0]["protocol"] == "position"
    lengths = sorted(unique(records, "length"))
    for number, name in enumerate(names):
        points = []
        for record in select(records, checkpoint=name):
            if "loss" in record and (not by_position or record["length"] == longest):
                x = record["position"][1] if by_position else record["length"]
                points.append([x, record["loss"], record["low"], record["high"]])
        # None, of a loss that is not finite or an interval that is not there, leaves a gap
        x, y, low, high = np.array(sorted(points), float).reshape(-1, 4).T
        # after ten the colours repeat, and the markers do not
        colour, marker = f"C{number % 10}", MARKERS[number % len(MARKERS)]
        axis.plot(x, y, color=colour, marker=marker, markersize=4, label=name)
        axis.fill_between(x, low, high, alpha=0.15, color=colour, linewidth=0)
    axis.set_xlabel("position (tokens)" if by_position else "context length (tokens)")
    if not by_position:
        axis.set_xscale("log")
        shown = lengths[:: math.ceil(len(lengths) / 8)]  # labels of neighbours would touch
        axis.set_xticks(shown, [f"{x:,}" for x in shown])
        axis.minorticks_off()
    axis.grid(alpha=0.3)


def heatmap_figure(file, records, title="", note=""):
    """Draw the answers that were right, of each checkpoint by prompt (depth or kind) and length."""
    names = unique(records, "checkpoint")
    lengths = unique(records, "length")
    labels = list(dict.fromkeys(map(prompt_label, records)))
    panel = (3.2, 0.8 + 0.35 * len(labels))
    figure, axes = new_figure(file, len(names), 4, panel, title, note)
    for axis, name in zip(axes, names, strict=False):
        cells = [[math.nan] * len(lengths) for _ in labels]
        for record in select(records, checkpoint=name):
            if "refused" not in record:
                i, j = labels.index(prompt_label(record)), lengths.index(record["length"])
                cells[i][j] = record["accuracy"]["mean"]
                label = f"{cells[i][j]:.2f}"
                axis.text(j + 0.5, i + 0.5, label, ha="center", va="center", fontsize=7)
        # of an image, which imshow() draws, the report would not allow the address
        axis.pcolormesh(cells, vmin=0, vmax=1, cmap="Greens", alpha=0.8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=9)
        for ticks, words in ((axis.set_xticks, lengths), (axis.set_yticks, labels)):
            ticks([i + 0.5 for i in range(len(words))], words, fontsize=7)
    return figure


def prompt_label(record):
    return record["kind"] if record["depth"] is None else f"depth {record['depth']:g}"


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
    figure, axes = new_figure(file, 1, 1, (5.6, 3.6), title="", note="")
    if figure is None:
        return False
    axis = axes[0]
    for number, (name, log) in enumerate(logs.items()):
        style = {"color": f"C{number % 10}"}
        axis.plot(*log, linewidth=0.9, alpha=0.6, label=name, **style)
        validation = read_losses(runs[name], "val_loss")
        axis.plot(*validation, marker="o", markersize=4, label=f"{name}, validation", **style)
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(file)
    print(f"wrote {file}")
    return True
