"""Figures of measurements by matplotlib: PNG files, and SVG for the report."""

import io
import math
import re

from nanolong.evaluation.curve import import_pyplot
from nanolong.evaluation.tables import select, unique, visible

MARKERS = "os^Dv*P"


def new_figure(plt, size, n_rows=1, n_columns=1, title="", note="", **options):
    """Return a figure and its axes, (n_rows, n_columns). note: in small print below."""
    # names may hold a dollar sign, which is no mathematics
    plt.rcParams.update({"text.parse_math": False, "svg.fonttype": "none"})
    figure = plt.Figure(size, dpi=120, layout="constrained")
    figure.suptitle(visible(title), fontsize=10, wrap=True)
    figure.supxlabel(visible(note), fontsize=7, color="gray", wrap=True)
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **options)


def save(figure, file):
    figure.savefig(file)
    print(f"wrote {file}")


def to_svg(figure):
    """Return a figure as an SVG element: no date, and no name that another one could have."""
    text = io.StringIO()
    figure.savefig(
        text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type", "Format"))
    )
    svg = text.getvalue()
    svg = re.sub(r' id="[A-Za-z]\w*_\d+"', "", svg[svg.index("<svg") :])
    head = r'<svg [^>]*?viewBox="([^"]*)"[^>]*>'
    return re.sub(head, r'<svg class="chart" viewBox="\1">', svg, count=1)


def loss_figure(file, records, original_lengths, title="", note="", unit="nats per token"):
    """Draw the losses of each protocol in a panel: a curve with a band for each checkpoint.

    Of `position` that of the longest sequences. original_lengths are marked. Returns the figure, or
    None without matplotlib.
    """
    plt = import_pyplot(file)
    if plt is None:
        return None
    protocols = unique(records, "protocol")
    names = unique(records, "checkpoint")
    n_columns = min(3, len(protocols))
    n_rows = math.ceil(len(protocols) / n_columns)
    size = (4.6 * n_columns + 1.6, 3.6 * n_rows + 0.6)
    figure, axes = new_figure(plt, size, n_rows, n_columns, title, note)
    for axis in axes.flat[len(protocols) :]:
        axis.axis("off")
    for axis, protocol in zip(axes.flat, protocols, strict=False):
        draw_losses(axis, select(records, protocol=protocol), names)
        for length in original_lengths:
            axis.axvline(length, color="gray", linestyle=":", linewidth=1)
        axis.set(title=protocol, ylabel=f"loss ({unit})")
    if axes[0, 0].lines:
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", fontsize=8)
    return figure


def draw_losses(axis, records, names):
    """Draw the curves of one protocol by length, or by position in the longest sequences."""
    longest = max(record["length"] for record in records)
    by_position = records[0]["protocol"] == "position"
    xs = set()
    for number, name in enumerate(names):
        points = []
        for record in select(records, checkpoint=name):
            if "loss" in record and (not by_position or record["length"] == longest):
                x = record["position"][1] if by_position else record["length"]
                points.append([x, *(record[field] for field in ("loss", "low", "high"))])
        # a loss that is not finite, and an interval that is not there, leave a gap
        points = [[math.nan if value is None else value for value in point] for point in points]
        x, y, low, high = map(list, zip(*sorted(points), strict=True)) if points else ([],) * 4
        colour, marker = f"C{number % 10}", MARKERS[number % len(MARKERS)]
        style = {"linestyle": ["-", "--", ":"][number // 10 % 3], "marker": marker}
        axis.plot(x, y, color=colour, markersize=4, label=visible(name), **style)
        axis.fill_between(x, low, high, alpha=0.15, color=colour, linewidth=0)
        xs.update(x)
    axis.set_xlabel("position (tokens)" if by_position else "context length (tokens)")
    if not by_position:
        axis.set_xscale("log")
        # labels of neighbours would touch
        shown = [x for i, x in enumerate(sorted(xs)) if len(xs) < 9 or i % (len(xs) // 8) == 0]
        axis.set_xticks(shown, [f"{x:,}" for x in shown])
        axis.minorticks_off()
    axis.grid(alpha=0.3)


def heatmap_figure(file, records, title="", note=""):
    """Draw the answers that were right, of each checkpoint by prompt (depth or kind) and length.

    Returns the figure, or None without matplotlib.
    """
    plt = import_pyplot(file)
    if plt is None:
        return None
    names = unique(records, "checkpoint")
    n_columns = min(4, len(names))
    n_rows = math.ceil(len(names) / n_columns)
    lengths = unique(records, "length")
    labels = list(dict.fromkeys(map(prompt_label, records)))
    size = (3.4 * n_columns + 0.9, (0.8 + 0.35 * len(labels)) * n_rows + 0.9)
    figure, axes = new_figure(plt, size, n_rows, n_columns, title, note)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
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
        axis.set_title(visible(name), fontsize=9)
        places = [[i + 0.5 for i in range(len(ticks))] for ticks in (lengths, labels)]
        axis.set_xticks(places[0], [f"{n:,}" for n in lengths], fontsize=7, rotation=30)
        axis.set_yticks(places[1], labels, fontsize=7)
    return figure


def prompt_label(record):
    return record["kind"] if record["depth"] is None else f"depth {record['depth']:g}"
