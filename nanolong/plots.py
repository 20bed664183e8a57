"""Tables and plots of measurements: as text for the terminal, and as PNG files by matplotlib.

Records are the dicts that evaluate.py measures and writes to its JSON file.
"""

import itertools
import math
import string

import numpy as np

from nanolong import intervals, scoring
from nanolong.curves import new_figure, save_figure


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

    The columns are the lengths. `position` has a table for each length, a column for each part.
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
    return "\n".join(lines + format_refusals(records)).rstrip()


def bits_per_byte(records):
    """Return the records of chunked that know their bytes, with losses in bits per byte of text."""
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
    for record in records:
        lines += format_extras(record)
    return lines


def format_extras(record):
    """Return the lines that only some protocols have, below their table."""
    place = f"{record['checkpoint']} at {record['length']}"
    if "benefit" in record:
        saved = intervals.format_interval(record["benefit"], 4)
        saved = f"a doubling of the context saves {saved} nats per token"
        return [f"{place}: from the shortest length on, {saved}"]
    if "key_fraction" in record:
        fraction = f"{record['key_fraction']:.2%} of all judged"
        saved = intervals.format_interval(record["judge_benefit"], 4)
        saved = f"of all, a long context saves the judge {saved} nats per token"
        return [f"{place}: {record['tokens']} key tokens, {fraction}; {saved}"]
    return []


def loss_cells(records, lengths):
    """Return the losses of one protocol as text: checkpoint -> a cell for each length.

    A loss that is separated from the first checkpoint's has an asterisk.
    """
    cells = {}
    for record in records:
        cell = "refused"
        if "loss" in record:
            cell = intervals.format_interval(record, key="loss")
            cell += asterisk(record)
        cells[record["checkpoint"], record["length"]] = cell
    names = unique(records, "checkpoint")
    return {name: [cells.get((name, length), "unknown") for length in lengths] for name in names}


def asterisk(record):
    """Return "*" if a record differs from that of the first checkpoint, else ""."""
    if "difference" in record and intervals.separation(record["difference"]):
        return "*"
    return ""


def align(rows, width, name_width=10, compared="sequences"):
    """Return the lines of a table: name -> cells, aligned on the right of columns this wide.

    An asterisk stands to the right of the numbers' column, and a line below the table explains it.
    """
    name_width = max(name_width, *map(len, rows))
    is_starred = any(str(cell).endswith("*") for cells in rows.values() for cell in cells)
    lines = []
    for name, cells in rows.items():
        line = name.ljust(name_width)
        for cell in cells:
            text = str(cell)
            if is_starred and not text.endswith("*"):
                text += " "
            line += text.rjust(width)
        lines.append(line.rstrip())
    if is_starred:
        interval = f"95 % interval over the same {compared}"
        lines.append(f"* differs from the first checkpoint: {interval}")
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
        loss, half_width = intervals.format_interval(record, key="loss").split(" ", 1)
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
        rows = {"   depth ": lengths}
        measured = [record for record in records if record["checkpoint"] == name]
        for depth in unique(measured, "depth"):
            label = "  no key "
            if depth is not None:
                label = f"{depth:>8.2f} "
            cells = {r["length"]: format_accuracy(r) for r in measured if r["depth"] == depth}
            rows[label] = [cells[length] for length in lengths]
        lines += [name, *align(rows, 25, name_width=9), ""]
    return "\n".join(lines + format_refusals(records)).rstrip()


def format_accuracy(record):
    """Return a cell of a text heatmap: a shade of gray, the number and its interval."""
    if "accuracy" not in record:
        return "refused"
    shade = " ░▒▓█"[min(4, int(record["accuracy"] * 4.999))]
    return f"{shade * 3} {intervals.format_interval(record, 2, key='accuracy')}"


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
        for name in unique(measured, "checkpoint"):
            cells = {s["length"]: s for s in measured if s["checkpoint"] == name}
            for field, label in RULER_ROWS.items():
                if field in next(iter(cells.values())):
                    row = [ruler_cell(cells.get(length), field) for length in lengths]
                    rows[f"{name}: {label}"] = row
        lines += [*align(rows, 22, compared="prompts"), ""]
    return "\n".join(lines + format_refusals(records)).rstrip()


def ruler_cell(summary, field):
    """Return one interval of a summary as text; summary: None if its prompts were refused."""
    if summary is None:
        return "refused"
    if summary[field] is None:
        return "no gain alone"
    cell = intervals.format_interval(summary[field], 2)
    if field == "nats":
        cell += asterisk(summary)
    return cell


def x_of(record):
    """Return the length of a record, or the end of its part of the positions."""
    return record["position"][1] if "position" in record else record["length"]


def loss_curves(records, protocol):
    """Return the curves of one protocol: name -> [(x, loss, low, high, record), ...].

    x is that of x_of(); of `position` there are those at the greatest length only.
    """
    longest = max(record["length"] for record in records)
    curves = {}
    for record in records:
        is_shown = protocol != "position" or record["length"] == longest
        if record["protocol"] == protocol and "loss" in record and is_shown:
            point = (x_of(record), record["loss"], record["low"], record["high"], record)
            curves.setdefault(record["checkpoint"], []).append(point)
    return curves


def terminal_plot(series, height=12, width=64):
    """Return a plot in characters: a letter for each curve, x on a log scale.

    series: name -> points [(x, y, ...), ...]. Points whose y is not finite are left out.
    """
    curves = {}
    for name, points in series.items():
        curves[name] = [(x, y) for x, y, *_ in points if math.isfinite(y)]
    all_points = [point for points in curves.values() for point in points]
    if not all_points:
        return "nothing to plot"

    # Map points to cells of the grid.
    xs, ys = zip(*all_points, strict=True)
    left, right = math.log(min(xs)), math.log(max(xs))
    low, high = min(ys), max(ys)

    def to_cell(x, y):
        column = (math.log(x) - left) / (right - left or 1) * width
        row = (high - y) / (high - low or 1) * height
        return column, row

    # Draw the curves, each as 15 dots between its points and a letter at each of them.
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    letters = itertools.cycle(string.ascii_uppercase)
    legend = []
    for letter, (name, points) in zip(letters, curves.items(), strict=False):
        legend.append(f"  {letter} {name}")
        cells = [to_cell(x, y) for x, y in points]
        for ends in itertools.pairwise(cells):
            dots = np.linspace(*ends, 17)[1:-1]
            draw_marks(grid, dots, ".")
        draw_marks(grid, cells, letter)

    # Put the axes around the grid.
    lines = []
    for i, row in enumerate(grid):
        y = high - (high - low) * i / height
        label = "        |"
        if i % 3 == 0:
            label = f"{y:7.3f} |"
        lines.append(label + "".join(row).rstrip())
    lines.append("        +" + "-" * (width + 1))
    ticks = []
    for x in sorted(set(xs)):
        column, _ = to_cell(x, low)
        ticks.append((round(column), str(x)))
    lines.append(" " * 9 + tick_labels(ticks, width))
    return "\n".join(lines + legend)


def draw_marks(grid, cells, mark):
    """Put a character into cells (column, row) of a text plot, * where letters coincide."""
    for cell in cells:
        column, row = round(cell[0]), round(cell[1])
        if grid[row][column] in (" ", ".", mark):
            grid[row][column] = mark
        elif mark != ".":
            grid[row][column] = "*"


def tick_labels(ticks, width):
    """Return a line with the labels of ticks (column, label), without those that would touch."""
    line = [" "] * (width + 12)
    # The first and the last one go before the others.
    for column, label in [ticks[0], ticks[-1], *ticks[1:-1]]:
        end = column + len(label)
        if not "".join(line[max(0, column - 1) : end + 1]).strip():
            line[column:end] = label
    return "".join(line).rstrip()


# -----------------------------------------------------------------------------
# Figures


def spread(values, gap):
    """Return sorted values without those closer than `gap`, in logarithms, to the one before."""
    kept = []
    for value in sorted(values):
        if not kept or math.log(value / kept[-1]) > gap:
            kept.append(value)
    return kept


def plot_losses(records, lengths, file, note, title="", unit="nats per token"):
    """Write a PNG with a panel and a table for each protocol; note: what was scored."""
    protocols = unique(records, "protocol")
    width = 6.4 * len(protocols)
    height = 5.2 + 0.16 * len(unique(records, "checkpoint"))
    figure, axes = new_figure(file, (width, height), 1, len(protocols), title, note)
    if figure is None:
        return
    for axis, protocol in zip(axes[0], protocols, strict=True):
        draw_losses(axis, records, protocol, lengths)
        axis.set_ylabel(f"loss ({unit})")
    if axes[0, 0].lines:
        axes[0, 0].legend(fontsize=8)
    save_figure(figure, file)


def draw_losses(axis, records, protocol, lengths):
    """Draw the curves of one protocol, and its table below them."""
    names = unique(records, "checkpoint")  # which have the same colours in all panels
    for name, points in loss_curves(records, protocol).items():
        numbers = [point[:4] for point in points]
        x, y, low, high = np.array(numbers, float).T  # without an interval low and high are nan
        colour = f"C{names.index(name) % 10}"
        axis.plot(x, y, marker="o", markersize=4, label=name, color=colour)
        axis.fill_between(x, low, high, alpha=0.15, color=colour, linewidth=0)
    axis.set(xscale="log", title=protocol)
    if protocol == "position":
        axis.set_xlabel(f"position in sequences of {max(lengths):,} tokens")
    else:
        measured = [record for record in records if record["protocol"] == protocol]
        table = align({"": lengths, **loss_cells(measured, lengths)}, 16)
        width = max(map(len, table))
        lines = ["context length (tokens)", "", *(line.ljust(width) for line in table)]
        # At most as wide as the panel: a character of this font is 0.6 of its size wide.
        font_size = min(8, 680 / width)
        axis.set_xlabel("\n".join(lines), family="monospace", fontsize=font_size)
    # A label takes about a tenth of the axis.
    gap = 0.1 * math.log(max(lengths) / min(lengths))
    shown = spread(lengths, gap)
    axis.set_xticks(shown, [f"{length:,}" for length in shown])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def plot_needle_heatmaps(records, lengths, file, note, title=""):
    """Write a PNG with a heatmap of passkey retrieval for each checkpoint, in one colour scale."""
    names = unique(records, "checkpoint")
    n_columns = min(5, len(names))
    n_rows = math.ceil(len(names) / n_columns)
    width = 2.9 * n_columns + 0.9
    height = 2.6 * n_rows + 0.5
    figure, axes = new_figure(file, (width, height), n_rows, n_columns, title, note)
    if figure is None:
        return
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
        measured = [record for record in records if record["checkpoint"] == name]
        image = draw_heatmap(axis, measured, name, lengths)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    colorbar = figure.colorbar(image, ax=axes, shrink=0.6)
    colorbar.set_label("fraction of passkeys found", fontsize=8)
    save_figure(figure, file)


def draw_heatmap(axis, records, name, lengths):
    """Draw the accuracy of one checkpoint, and the highest of its control. Returns the image."""
    accuracy = {}
    for record in records:
        accuracy[record["depth"], record["length"]] = record.get("accuracy", math.nan)
    depths = sorted({depth for depth, _ in accuracy if depth is not None})
    cells = np.array([[accuracy[depth, length] for length in lengths] for depth in depths])
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (i, j), value in np.ndenumerate(cells):
        axis.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=7)

    known = cells[~np.isnan(cells)]
    mean = "refused"
    if known.size:
        mean = f"mean {known.mean():.2f}"
    control = [accuracy[None, length] for length in lengths]
    most = np.fmax.reduce(control)  # without nan, of refusals
    axis.set_title(f"{name}: {mean}", fontsize=9)
    axis.set_xlabel(f"context length (tokens)\nwithout a passkey at most {most:.2f}", fontsize=7)
    labels = [f"{length:,}" for length in lengths]
    # The axis has room for about 36 characters: label every length, or every second, or ...
    step = math.ceil(len(" ".join(labels)) / 36)
    axis.set_xticks(range(0, len(lengths), step), labels[::step])
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axis.tick_params(labelsize=7)
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
    """Print and plot the wavelength of each of RoPE's pairs before and after an extension.

    before, after: inverse frequencies, (R/2,) each. A pair whose wavelength exceeds the original
    length completed no period in training: beyond that length, these pairs meet unseen angles.
    """
    before = 2 * math.pi / before.double().cpu()  # inf: a pair that is not rotated
    after = 2 * math.pi / after.double().cpu()
    print(describe_wavelengths(before, after, original_length))
    pairs = range(1, len(before) + 1)
    wavelengths = {"before": before.tolist(), "after": after.tolist()}
    lengths = {"original length": original_length, "target length": target_length}
    curves = {}
    for name, values in wavelengths.items():
        curves[name] = list(zip(pairs, map(math.log10, values), strict=True))
    for name, length in lengths.items():
        height = math.log10(length)
        curves[f"{name} {length}"] = [(1, height), (len(before), height)]
    print("log10 of the wavelength, by pair (1: the fastest)")
    print(terminal_plot(curves))

    figure, axes = new_figure(file, (7, 4.4), title=note)
    if figure is None:
        return
    axis = axes[0, 0]
    for name, values in wavelengths.items():
        axis.plot(pairs, values, marker="o", markersize=4, label=name)
    for (name, length), style in zip(lengths.items(), ("--", ":"), strict=True):
        axis.axhline(length, color="gray", linestyle=style, label=f"{name} {length:,}")
    axis.set(yscale="log", xlabel="frequency pair (fastest first)", ylabel="wavelength (tokens)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(figure, file)
