"""Tables and plots of measurements: as text for the terminal, and as PNG files by matplotlib.

Records are the dicts that evaluate.py measures and writes to its JSON file.
"""

import contextlib
import itertools
import json
import math
import string
from pathlib import Path

import numpy as np

from nanolong import intervals, scoring
from nanolong.errors import UserError, note


def unique(records, key):
    """Return the different values of a key, in the order of the records."""
    return list(dict.fromkeys(record[key] for record in records))


# -----------------------------------------------------------------------------
# Text


def format_refusals(records):
    """Return a line for each different reason why something could not be measured."""
    lines = []
    for record in records:
        if "refused" in record:
            cell = f"{record['checkpoint']} at {record['length']}"
            lines.append(f"refused: {cell}: {record['refused']}")
    return list(dict.fromkeys(lines))


SCORED_TOKENS = {
    "chunked": "every token",
    "last-quarter": "the last quarter of each sequence",
    "sliding": "the last tokens of overlapping sequences",
    "token-aligned": "the same tokens at every length",
    "last-tokens": "the same last tokens at every length",
    "key-tokens": "tokens that the judge predicts far better from a long context",
}


def format_loss_table(records, lengths):
    """Return the losses as text: a table for each protocol, a line for each checkpoint.

    The columns are the lengths. `position` has a table for each length, whose columns are the
    parts of a sequence.
    """
    lines = []
    for protocol in unique(records, "protocol"):
        measured = [record for record in records if record["protocol"] == protocol]
        if protocol == "position":
            for length in lengths:
                lines += format_positions(measured, length)
        else:
            lines += format_lengths(measured, lengths)
        lines.append("")
    lines += format_refusals(records)
    return "\n".join(lines).rstrip()


def bits_per_byte(records):
    """Return the records of the protocol chunked with their losses in bits per byte of text.

    Those that do not say how many bytes they scored are left out.
    """
    converted = []
    for record in records:
        if record["protocol"] != "chunked":
            continue
        if "refused" in record:
            converted.append(record)
        elif record.get("bytes"):
            converted.append(scoring.in_bits_per_byte(record))
    return converted


def format_lengths(records, lengths, unit="nats per token"):
    """Return the lines of one protocol's table: the loss of each checkpoint at each length."""
    protocol = records[0]["protocol"]
    title = f"{protocol} ({SCORED_TOKENS[protocol]})"
    if "stride" in records[0]:
        title += f", stride {records[0]['stride']}"
    rows = {"": lengths, **loss_cells(records, lengths)}
    n_sequences = {record["length"]: record["n"] for record in records if "n" in record}
    if n_sequences:
        rows["sequences"] = [n_sequences.get(length, "") for length in lengths]
    lines = [f"{title}, {unit}, by context length", *align(rows, 17)]
    lines += explain_asterisk(rows, "sequences")
    for record in records:
        lines += format_extras(record)
    return lines


def explain_asterisk(rows, compared):
    """Return the line below a table that has asterisks; compared: sequences or prompts."""
    if any("*" in cell for cells in rows.values() for cell in map(str, cells)):
        return [f"* differs from the first checkpoint: 95 % interval over the same {compared}"]
    return []


def format_extras(record):
    """Return the lines that only some protocols have, below their table."""
    place = f"{record['checkpoint']} at {record['length']}"
    if "benefit" in record:
        found = intervals.format_interval(record["benefit"], 4)
        mean = f"a doubling of the context saves {found} nats per token"
        return [f"{place}: from the shortest length on, {mean}"]
    if "key_fraction" in record:
        benefit = intervals.format_interval(record["judge_benefit"], 4)
        return [
            f"{place}: {record['tokens']} key tokens, {record['key_fraction']:.2%} of all judged; "
            f"of all, a long context saves the judge {benefit} nats per token"
        ]
    return []


def loss_cells(records, lengths):
    """Return the losses of one protocol as text: checkpoint -> a cell for each length.

    A loss that is separated from the first checkpoint's has an asterisk.
    """
    rows = {}
    for record in records:
        row = rows.setdefault(record["checkpoint"], dict.fromkeys(lengths, "unknown"))
        cell = "refused"
        if "loss" in record:
            cell = format_loss(record) + asterisk(record)
        row[record["length"]] = cell
    return {name: list(row.values()) for name, row in rows.items()}


def asterisk(record):
    """Return "*" if a record differs from that of the first checkpoint, else ""."""
    return "*" if "difference" in record and intervals.is_separated(record["difference"]) else ""


def format_loss(record):
    """Return the loss of a record with its interval as text."""
    return intervals.format_interval({**record, "mean": record["loss"]})


def align(rows, width):
    """Return the lines of a table: name -> cells, aligned on the right of columns this wide.

    An asterisk stands to the right of the numbers' column.
    """
    name_width = max(10, *map(len, rows))
    is_starred = any(str(cell).endswith("*") for cells in rows.values() for cell in cells)
    lines = []
    for name, cells in rows.items():
        line = name.ljust(name_width)
        for cell in cells:
            mark = " " if is_starred and not str(cell).endswith("*") else ""
            line += f"{cell}{mark}".rjust(width)
        lines.append(line.rstrip())
    return lines


def format_positions(records, length):
    """Return the lines of a table by position: the loss in each part of sequences of one length.

    Below the losses of a checkpoint are the half-widths of their intervals.
    """
    rows = {"": []}
    counted = ""
    for record in records:
        if record["length"] != length:
            continue
        name = record["checkpoint"]
        losses = rows.setdefault(name, [])
        if "refused" in record:
            losses.append("   refused")
            continue
        loss, half_width = format_loss(record).split(" ", 1)
        losses.append(loss)
        rows.setdefault(f"{name} ±", []).append(half_width.removeprefix("± ").strip("()"))
        if len(losses) > len(rows[""]):
            rows[""].append(record["position"][1])
        counted = f" ({record['n']} sequences)"
    title = f"position, nats per token, in sequences of {length} tokens, up to position{counted}"
    return [title, *align(rows, 7)]


def format_needle_table(records, lengths):
    """Return the accuracy of retrieval as text heatmaps, one for each checkpoint.

    Lines are the depths of the needle, and the control without a passkey; columns are the lengths.
    """
    lines = ["accuracy of passkey retrieval, by depth and context length, with its interval", ""]
    for name in unique(records, "checkpoint"):
        measured = [record for record in records if record["checkpoint"] == name]
        lines.append(name)
        lines.append("   depth " + "".join(f"{length:>25}" for length in lengths))
        for depth in unique(measured, "depth"):
            cells = {r["length"]: r for r in measured if r["depth"] == depth}
            line = "  no key " if depth is None else f"{depth:>8.2f} "
            for length in lengths:
                line += f"{format_accuracy(cells[length]):>25}"
            lines.append(line)
        lines.append("")
    lines += format_refusals(records)
    return "\n".join(lines).rstrip()


def format_accuracy(record):
    """Return a cell of a text heatmap: a shade of gray, the number and its interval."""
    if "accuracy" not in record:
        return "refused"
    accuracy = record["accuracy"]
    shade = " ░▒▓█"[min(4, int(accuracy * 4.999))]
    return f"{shade * 3} {intervals.format_interval({**record, 'mean': accuracy}, 2)}"


RULER_ROWS = {
    "accuracy": "all answers right",
    "nats": "nats of the answer",
    "gain": "nats gained by the needles",
    "recovery": "gain recovered among distractors",
}


def format_ruler_table(summaries, records, lengths):
    """Return the tables of RULER's tasks as text: the intervals of every checkpoint by length.

    summaries: of retrieval.summarise_ruler(records).
    """
    lines = []
    for kind in unique(summaries, "kind"):
        measured = [summary for summary in summaries if summary["kind"] == kind]
        lines.append(f"{kind}, {measured[0]['n']} prompts a length, by context length")
        rows = {"": lengths}
        for name, (field, label) in itertools.product(
            unique(measured, "checkpoint"), RULER_ROWS.items()
        ):
            cells = {s["length"]: s for s in measured if s["checkpoint"] == name and field in s}
            if cells:
                cells = {length: ruler_cell(summary, field) for length, summary in cells.items()}
                rows[f"{name}: {label}"] = [cells.get(length, "refused") for length in lengths]
        lines += [*align(rows, 22), *explain_asterisk(rows, "prompts"), ""]
    lines += format_refusals(records)
    return "\n".join(lines).rstrip()


def ruler_cell(summary, field):
    """Return one interval of a summary as text."""
    found = summary[field]
    if found is None:
        return "no gain alone"
    return intervals.format_interval(found, 2) + (asterisk(summary) if field == "nats" else "")


def loss_curves(records, protocol):
    """Return the curves of one protocol: name -> [(x, loss), ...].

    x is the context length; of `position` it is the end of each part, at the greatest length.
    """
    curves = {}
    for x, record in curve_points(records, protocol):
        curves.setdefault(record["checkpoint"], []).append((x, record["loss"]))
    return curves


def loss_bands(records, protocol):
    """Return the intervals around loss_curves(): name -> [(x, low, high), ...]."""
    bands = {}
    for x, record in curve_points(records, protocol):
        band = bands.setdefault(record["checkpoint"], [])
        if record["low"] is not None:
            band.append((x, record["low"], record["high"]))
    return bands


def curve_points(records, protocol):
    """Yield (x, record) for each measured loss of a protocol; x is that of loss_curves()."""
    longest = max(record["length"] for record in records)
    for record in records:
        if record["protocol"] != protocol or "loss" not in record:
            continue
        if protocol != "position":
            yield record["length"], record
        elif record["length"] == longest:
            yield record["position"][1], record


def terminal_plot(series, height=12, width=64):
    """Return a plot in characters: a letter for each curve, x on a log scale.

    series: name -> points [(x, y), ...]. Points whose y is not finite are left out.
    """
    curves = {}
    for name, points in series.items():
        curves[name] = [(x, y) for x, y in points if math.isfinite(y)]
    all_points = [point for points in curves.values() for point in points]
    if not all_points:
        return "nothing to plot"

    # Map points to cells of the grid.
    left = math.log(min(x for x, _ in all_points))
    right = math.log(max(x for x, _ in all_points))
    low = min(y for _, y in all_points)
    high = max(y for _, y in all_points)

    def to_cell(x, y):
        column = (math.log(x) - left) / (right - left or 1) * width
        row = (high - y) / (high - low or 1) * height
        return column, row

    # Draw the curves, each as dots between its points and a letter at each of them.
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    letters = itertools.cycle(string.ascii_uppercase)
    legend = []
    for letter, (name, points) in zip(letters, curves.items(), strict=False):
        legend.append(f"  {letter} {name}")
        cells = [to_cell(x, y) for x, y in points]
        for start, end in itertools.pairwise(cells):
            draw_line(grid, start, end)
        for cell in cells:
            draw_mark(grid, cell, letter)

    # Put the axes around the grid.
    lines = []
    for i, row in enumerate(grid):
        y = high - (high - low) * i / height
        label = f"{y:7.3f} |" if i % 3 == 0 else " " * 8 + "|"
        lines.append(label + "".join(row).rstrip())
    lines.append(" " * 8 + "+" + "-" * (width + 1))
    ticks = [(round(to_cell(x, low)[0]), str(x)) for x in sorted({x for x, _ in all_points})]
    lines.append(" " * 9 + tick_labels(ticks, width))
    return "\n".join(lines + legend)


def draw_mark(grid, cell, mark):
    """Put a character into a cell (column, row) of a text plot, * where letters coincide."""
    column, row = round(cell[0]), round(cell[1])
    if grid[row][column] in (" ", ".", mark):
        grid[row][column] = mark
    elif mark != ".":
        grid[row][column] = "*"


def draw_line(grid, start, end):
    """Draw 15 dots between two cells (column, row) of a text plot."""
    for i in range(1, 16):
        column = start[0] + (end[0] - start[0]) * i / 16
        row = start[1] + (end[1] - start[1]) * i / 16
        draw_mark(grid, (column, row), ".")


def tick_labels(ticks, width):
    """Return a line with the labels of ticks (column, label), without those that would touch.

    The first and the last one go before the others.
    """
    line = [" "] * (width + 12)
    for column, label in [ticks[0], ticks[-1], *ticks[1:-1]]:
        end = column + len(label)
        if all(character == " " for character in line[max(0, column - 1) : end + 1]):
            line[column:end] = label
    return "".join(line).rstrip()


# -----------------------------------------------------------------------------
# Figures


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


def save_figure(plt, figure, file, dpi):
    """Write a figure to a PNG file and free its memory."""
    figure.savefig(file, dpi=dpi)
    plt.close(figure)
    print(f"wrote {file}")


def label_lengths(axis, lengths):
    """Put a tick at each length of a log x axis, and label those whose labels do not touch."""
    lengths = sorted(lengths)
    span = math.log(lengths[-1] / lengths[0])
    labels = []
    last_labelled = None
    for length in lengths:
        # A label takes about a tenth of the axis.
        if last_labelled is None or math.log(length / last_labelled) > 0.1 * span:
            labels.append(f"{length:,}")
            last_labelled = length
        else:
            labels.append("")
    axis.set_xticks(lengths, labels)
    axis.minorticks_off()


def plot_losses(records, lengths, file, note, title="", unit="nats per token"):
    """Write a PNG with a panel and a table for each protocol; without matplotlib, say so.

    note: what the losses were measured on, in small print below.
    """
    plt = import_pyplot(file)
    if plt is None:
        return
    protocols = unique(records, "protocol")
    names = unique(records, "checkpoint")
    table_height = 0.5 + 0.3 * len(names)
    figure, axes = plt.subplots(
        2,
        len(protocols),
        figsize=(6.4 * len(protocols), 4.4 + 0.3 * len(names)),
        squeeze=False,
        height_ratios=[4, table_height],
        layout="constrained",
    )
    for column, protocol in enumerate(protocols):
        draw_losses(axes[0][column], records, protocol, names, lengths, unit)
        axes[1][column].axis("off")
        if protocol != "position":
            draw_loss_table(axes[1][column], records, protocol, names, lengths)
    if axes[0][0].lines:
        axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(note, fontsize=7, color="gray")
    save_figure(plt, figure, file, dpi=120)


def draw_losses(axis, records, protocol, names, lengths, unit):
    """Draw the curves of one protocol, in the same colours in all panels."""
    curves = loss_curves(records, protocol)
    bands = loss_bands(records, protocol)
    for name, points in curves.items():
        x, y = zip(*points, strict=True)
        colour = f"C{names.index(name) % 10}"
        axis.plot(x, y, marker="o", markersize=4, label=name, color=colour)
        if bands[name]:
            axis.fill_between(*zip(*bands[name], strict=True), alpha=0.15, color=colour, lw=0)
    if protocol == "position":
        x_label = f"position in sequences of {max(lengths):,} tokens"
        ticks = set(lengths)
    else:
        x_label = "context length (tokens)"
        ticks = {x for points in curves.values() for x, _ in points}
    axis.set(xscale="log", xlabel=x_label, ylabel=f"loss ({unit})", title=protocol)
    if ticks:
        label_lengths(axis, ticks)
    axis.grid(alpha=0.3)


def draw_loss_table(axis, records, protocol, names, lengths):
    """Draw the losses of one protocol as numbers: a row for each checkpoint."""
    cells = loss_cells([r for r in records if r["protocol"] == protocol], lengths)
    table = axis.table(
        [[name, *cells[name]] for name in names],
        colLabels=["", *(f"{length:,}" for length in lengths)],
        loc="center",
        cellLoc="center",
        edges="horizontal",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width([0])


def plot_needle_heatmaps(records, lengths, file, note, title=""):
    """Write a PNG with a heatmap of passkey retrieval for each checkpoint, in one colour scale.

    Below each is the highest accuracy of the control. note: how it was measured, in small print.
    """
    plt = import_pyplot(file)
    if plt is None:
        return
    names = unique(records, "checkpoint")
    n_columns = min(5, len(names))
    n_rows = math.ceil(len(names) / n_columns)
    figure, axes = plt.subplots(
        n_rows,
        n_columns,
        figsize=(2.9 * n_columns + 0.9, 2.6 * n_rows + 0.5),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
        measured = [record for record in records if record["checkpoint"] == name]
        image = draw_heatmap(axis, measured, name, lengths)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    colorbar = figure.colorbar(image, ax=axes, shrink=0.6)
    colorbar.set_label("fraction of passkeys found", fontsize=8)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.supxlabel(note, fontsize=7, color="gray")
    save_figure(plt, figure, file, dpi=110)


def draw_heatmap(axis, records, name, lengths):
    """Draw the accuracy of one checkpoint by depth and length. Returns the image."""
    accuracy = {}
    for record in records:
        accuracy[record["depth"], record["length"]] = record.get("accuracy", math.nan)
    depths = sorted({depth for depth, _ in accuracy if depth is not None})
    cells = [[accuracy[depth, length] for length in lengths] for depth in depths]
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            text = f"{value:.2f}".lstrip("0")
            axis.text(j, i, text, ha="center", va="center", fontsize=7)

    known = [value for row in cells for value in row if not math.isnan(value)]
    mean = f"mean {sum(known) / len(known):.2f}" if known else "refused"
    control = [accuracy[None, length] for length in lengths]
    most = max((value for value in control if not math.isnan(value)), default=math.nan)
    axis.set_title(f"{name}: {mean}", fontsize=9)
    axis.set_xlabel(f"context length (tokens)\nwithout a passkey at most {most:.2f}", fontsize=7)
    labels = [f"{length:,}" for length in lengths]
    # The axis has room for about 36 characters: label every length, or every second, or ...
    characters = sum(len(label) + 1 for label in labels)
    shown = slice(0, None, math.ceil(characters / 36))
    axis.set_xticks(range(len(lengths))[shown], labels[shown], fontsize=7)
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    return image


def describe_wavelengths(before, after, original_length):
    """Return what an extension changes in words. before, after: wavelengths in tokens, (R/2,)."""
    n_complete = int((before <= original_length).sum())
    rotated = before.isfinite() & after.isfinite()
    lengthened = rotated & (after > before * 1.000001)
    text = (
        f"wavelengths of {len(before)} pairs, in tokens: {n_complete} complete a period within the "
        f"original {original_length}; {int(lengthened.sum())} are lengthened"
    )
    if rotated.any():
        longest = after.where(rotated, 0).argmax()
        text += f", the longest from {before[longest]:,.0f} to {after[longest]:,.0f}"
    n_fixed = int(after.isinf().sum())
    if n_fixed:
        text += f"; {n_fixed} are not rotated"
    return text


def plot_wavelengths(before, after, original_length, target_length, file, note):
    """Plot the wavelength in tokens of each of RoPE's pairs before and after an extension.

    before, after: inverse frequencies, (R/2,) each. A pair whose wavelength exceeds the original
    length completed no period in training: beyond that length, these pairs meet unseen angles.
    Prints a plot in characters and writes a PNG.
    """
    before = 2 * math.pi / before.double().cpu()  # inf: a pair that is not rotated
    after = 2 * math.pi / after.double().cpu()
    print(describe_wavelengths(before, after, original_length))
    pairs = range(1, len(before) + 1)
    curves = {
        "before": list(zip(pairs, before.log10().tolist(), strict=True)),
        "after": list(zip(pairs, after.log10().tolist(), strict=True)),
    }
    lengths = {"original length": original_length, "target length": target_length}
    for name, length in lengths.items():
        height = math.log10(length)
        curves[f"{name} {length}"] = [(1, height), (len(before), height)]
    print("log10 of the wavelength, by pair (1: the fastest)")
    print(terminal_plot(curves))

    plt = import_pyplot(file)
    if plt is None:
        return
    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    axis.plot(pairs, before, marker="o", markersize=4, label="before")
    axis.plot(pairs, after, marker="o", markersize=4, label="after")
    for (name, length), style in zip(lengths.items(), ("--", ":"), strict=True):
        axis.axhline(length, color="gray", linestyle=style, label=f"{name} {length:,}")
    axis.set(yscale="log", xlabel="frequency pair (fastest first)", ylabel="wavelength (tokens)")
    axis.set_title(note)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(plt, figure, file, dpi=120)


# -----------------------------------------------------------------------------
# Training curves, from the log.jsonl of run folders

TRAINING = {"step", "loss", "tokens", "tokens_per_second"}
VALIDATION = {"step", "val_loss"}


def read_log(run):
    """Return the losses that a run has logged: {"training", "validation"}.

    Each is a list of (step, seconds, loss), in the order of the steps. Seconds are those of the
    training steps, without evaluations, compilation and the time between two starts of a run.
    Raises UserError if the run folder has no log.jsonl, or that has no training step.
    """
    rows = read_rows(Path(run) / "log.jsonl")
    # of several rows of a step the last one counts
    training = {row["step"]: row for row in rows if row.keys() >= TRAINING}
    validation = {row["step"]: row["val_loss"] for row in rows if row.keys() >= VALIDATION}
    if not training:
        raise UserError(
            f"{run} has logged no training step: name runs that have logged at least one"
        )

    steps, seconds, tokens = [0], [0.0], 0
    for step, row in training.items():
        duration = max(0, row["tokens"] - tokens) / row["tokens_per_second"]
        seconds.append(seconds[-1] + duration)
        steps.append(step)
        tokens = row["tokens"]
    # an evaluation may lie between two logged steps
    evaluated_at = np.interp(list(validation), steps, seconds).tolist()
    losses = [row["loss"] for row in training.values()]
    return {
        "training": list(zip(training, seconds[1:], losses, strict=True)),
        "validation": list(zip(validation, evaluated_at, validation.values(), strict=True)),
    }


def read_rows(file):
    """Return the rows of a log.jsonl, without damaged ones, in the order of their steps.

    A run that has gone on from an earlier step is as it went on: what followed that step before is
    left out.
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

    runs: name -> run folder. Returns whether the file was written. Raises as read_log().
    """
    logs = {name: read_log(folder) for name, folder in runs.items()}
    plt = import_pyplot(file)
    if plt is None:
        return False
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    draw_curves(axes, logs)
    save_figure(plt, figure, file, dpi=120)
    return True


def draw_curves(axes, logs):
    """Draw losses by step on the first axis, and by seconds on the second.

    logs: name -> what read_log() returns. Training is a line, validation is marked.
    """
    for number, (name, log) in enumerate(logs.items()):
        colour = f"C{number % 10}"
        for axis, column in zip(axes, (0, 1), strict=True):
            x, y = points_of(log["training"], column)
            axis.plot(x, y, color=colour, linewidth=0.9, alpha=0.6, label=name)
            x, y = points_of(log["validation"], column)
            label = f"{name}, validation"
            axis.plot(x, y, color=colour, marker="o", markersize=4, label=label)
    axes[0].set(xlabel="step", ylabel="loss (nats per token)")
    axes[1].set(xlabel="seconds of training steps")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)


def points_of(rows, column):
    """Return x, a column of (step, seconds, loss), and y, the loss, as lists."""
    return [row[column] for row in rows], [row[2] for row in rows]


def plot_finished_run(run):
    """Write curve.png into the folder of a run that has ended.

    The run is saved by then, and nothing that goes wrong here may make it fail: it is a note.
    """
    file = Path(run) / "curve.png"
    try:
        plot_curves({Path(run).name: run}, file)
    except Exception as error:
        note(f"{file} is not written: {error}")
