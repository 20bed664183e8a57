"""Figures by matplotlib: measurements (files, and SVG for the report), and the losses of a log."""

import io
import math
from pathlib import Path

import numpy as np

from nanolong import run
from nanolong.errors import note, require
from nanolong.evaluation import intervals
from nanolong.evaluation.tables import select, unique
from nanolong.strict_json import to_json

MARKERS = "os^Dv*P"
LINES = ("-", "--", "-.", ":")

# Titles of the panels. The loss by position and the gains of repeats have axes of their own.
BY_LENGTH = {
    "chunked": "loss of all tokens",
    "last-quarter": "loss in the last quarter",
    "sliding": "loss of the last tokens of a sequence",
    "token-aligned": "loss of the same tokens",
}
PANELS = {**BY_LENGTH, "position": "loss by position"}


def import_pyplot(file):
    """Return matplotlib's pyplot, which writes to files; without matplotlib say so, return None."""
    try:
        import matplotlib
    except ImportError:
        print(f"note: {file} is not written: install matplotlib (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # names may hold a dollar sign, which is no mathematics; text stays text
    plt.rcParams.update({"text.parse_math": False, "svg.fonttype": "none", "pdf.fonttype": 42})
    return plt


def save(figure, file):
    """Write a figure to a PNG file, and beside it as SVG and PDF, which a slide can enlarge."""
    for suffix in (".png", ".svg", ".pdf"):
        figure.savefig(Path(file).with_suffix(suffix), dpi=200)
    print(f"wrote {file}, and the same as .svg and .pdf")


def curve_style(number):
    """Return the style of a curve, by its number. Of curves that coincide each lies on the one
    before it, and is thinner and its marker smaller, so that all of eight are seen.
    """
    return {
        "color": f"C{number % 10}",
        "linestyle": LINES[number % len(LINES)],
        "linewidth": max(1.0, 3.8 - 0.4 * number),
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": max(3.0, 10.0 - number),
        "markerfacecolor": "none",
    }


def mark_lengths(axis, lengths):
    """Draw a line at each training length."""
    for i, length in enumerate(lengths):
        label = "" if i else "training length"
        axis.axvline(length, color="gray", linestyle=":", linewidth=1.5, label=label)


def new_figure(file, n, n_columns, panel, title, note):
    """Return a figure with n panels, each of a size in inches, and their axes.

    note: in small print below. Without matplotlib it is None, without axes.
    """
    plt = import_pyplot(file)
    if plt is None:
        return None, []
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


def longest_losses(records):
    """Return the records of the longest sequences that have a loss, of one protocol: last-quarter
    if it was measured, because failures beyond the training length are largest there.
    """
    measured = [r for r in records if r.get("protocol") in BY_LENGTH and r.get("loss") is not None]
    measured = select(measured, protocol="last-quarter") or measured
    if not measured:
        return []
    longest = max(record["length"] for record in measured)
    return select(measured, protocol=measured[0]["protocol"], length=longest)


def finding(records, names):
    """Return what the losses show in one sentence, "" if nothing. names: of all checkpoints."""
    found = longest_losses(records)
    if not found:
        return ""
    best = min(found, key=lambda record: record["loss"])
    start = f"At {best['length']:,} tokens {best['checkpoint']} has"
    first = select(found, checkpoint=names[0])
    if len(found) == 1 or not first:
        return f"{start} a loss of {best['loss']:.2f}"
    if best is first[0]:
        return f"{start} the lowest loss, {best['loss']:.2f}"
    is_clear = "difference" in best and intervals.excludes_zero(best["difference"])
    other = f"{first[0]['checkpoint']} has {first[0]['loss']:.2f}"
    doubt = "" if is_clear else ", no clear difference"
    return f"{start} the lowest loss, {best['loss']:.2f}; {other}{doubt}"


def loss_figure(file, records, original_lengths, note="", unit="nats per token"):
    """Draw the losses of each protocol in a panel: a curve with a band for each checkpoint.

    original_lengths are marked. Returns the figure, or None without matplotlib.
    """
    protocols = unique(records, "protocol")
    names = unique(records, "checkpoint")
    title = finding(records, names)
    figure, axes = new_figure(file, len(protocols), 3, (4.6, 3.6), title, note)
    for axis, protocol in zip(axes, protocols, strict=False):
        if protocol == "repeats":
            draw_repeats(axis, select(records, protocol=protocol), names)
            continue
        draw_losses(axis, select(records, protocol=protocol), names)
        mark_lengths(axis, original_lengths)
        axis.set(title=PANELS[protocol], ylabel=f"loss, {unit}")
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
        style = curve_style(number)
        axis.plot(x, y, label=name, **style)
        axis.fill_between(x, low, high, alpha=0.15, color=style["color"], linewidth=0)
    axis.set_xlabel("position, tokens" if by_position else "context length, tokens")
    if not by_position:
        axis.set_xscale("log")
        shown = lengths[:: math.ceil(len(lengths) / 8)]  # labels of neighbours would touch
        axis.set_xticks(shown, [f"{x:,}" for x in shown])
        axis.minorticks_off()
    axis.grid(alpha=0.3)


def draw_repeats(axis, records, names):
    """Draw what the longest context gains over the shortest one, by the bucket of the targets."""
    longest = max(record["length"] for record in records)
    buckets = unique(records, "bucket")
    for number, name in enumerate(names):
        measured = select(records, checkpoint=name, length=longest)
        gains = [(record["bucket"], record["gain"]) for record in measured if "gain" in record]
        x = [buckets.index(bucket) + 0.1 * number for bucket, _ in gains]
        low, mean, high = (
            np.array([gain[key] for _, gain in gains], float) for key in ("low", "mean", "high")
        )
        style = {**curve_style(number), "linestyle": "none", "markersize": 5}
        axis.errorbar(x, mean, (mean - low, high - mean), label=name, capsize=2, **style)
    axis.axhline(0, color="gray", linewidth=1)
    axis.set_xticks(range(len(buckets)), buckets)
    gained = f"gain of {longest:,} over {records[0]['context']:,} tokens"
    axis.set(title="repeats", xlabel="where the tokens stood last", ylabel=f"{gained}, nats")
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
        # Not imshow(), because the report does not allow the address of its image.
        mesh = axis.pcolormesh(cells, vmin=0, vmax=1, cmap="Greens", alpha=0.8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("context length, tokens", fontsize=8)
        for ticks, words in ((axis.set_xticks, lengths), (axis.set_yticks, labels)):
            ticks([i + 0.5 for i in range(len(words))], words, fontsize=7)
    if figure:
        scale = figure.colorbar(mesh, ax=list(axes))
        scale.set_label("fraction of prompts answered right", fontsize=8)
        scale.ax.tick_params(labelsize=7)
        scale.solids.set_rasterized(False)  # an image, too
    return figure


def prompt_label(record):
    return record["kind"] if record["depth"] is None else f"depth {record['depth']:g}"


def read_losses(folder, name):
    """Return the steps of a run that have logged a number of this name, and the numbers."""
    rows = {row["step"]: row[name] for row in run.read_log(folder) if name in row}
    rows = {step: value for step, value in rows.items() if isinstance(value, int | float)}
    return list(rows), list(rows.values())


def plot_curves(runs, file):
    """Plot the losses of runs by step: training is a line, validation is marked.

    Nats per token of different tokens cannot be compared: for runs of other vocabularies only the
    validation is drawn, in bits per byte. runs: name -> run folder. Returns whether files were
    written. Raises UserError for a run that has logged none of these numbers.
    """
    vocabularies = {vocabulary_of(folder) for folder in runs.values()} - {None}
    in_bits = len(vocabularies) > 1
    missing = "bits per byte, by which vocabularies compare" if in_bits else "training step"
    for folder in runs.values():
        steps, _ = read_losses(folder, "val_bits_per_byte" if in_bits else "loss")
        require(steps, f"{folder} has logged no {missing}: name runs that have logged some")
    figure, axes = new_figure(file, 1, 1, (5.6, 3.6), title="", note="")
    if figure is None:
        return False
    axis = axes[0]
    for number, (name, folder) in enumerate(runs.items()):
        style = curve_style(number)
        validation = read_losses(folder, "val_bits_per_byte" if in_bits else "val_loss")
        axis.plot(*validation, label=f"{name}, validation", **style)
        if not in_bits:
            plain = {"color": style["color"], "linewidth": 0.9, "alpha": 0.6}
            axis.plot(*read_losses(folder, "loss"), label=name, **plain)
    axis.set(xlabel="training step", ylabel="loss, nats per token")
    if in_bits:
        axis.set(ylabel="validation loss, bits per byte")
        note("the runs have other vocabularies: only validation is drawn, in bits per byte")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, file)
    return True


def vocabulary_of(folder):
    """Return the vocabulary of a run's newest checkpoint as text; None if there is none yet."""
    steps = run.list_steps(folder)
    if not steps:
        return None
    meta = run.read_meta(steps[-1])
    return to_json(meta["tokenizer"] or meta["config"]["vocab_size"])
