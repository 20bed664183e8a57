"""The report of public.py: tables, figures, and where the orders of small models do not hold."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np

from experiments.report import count, grid, markdown_table, save_figure

# Of models of 0.5 M parameters, extended 4 times without training (results/reproduce.md): the loss
# at 2 and at 4 times the original context length, the loss within it, and the fraction of passkeys
# that are found at 4 times.
SMALL_MODELS = {
    "untouched": (1.692, 2.603, 1.096, 0.07),
    "pi": (2.775, 2.855, 2.765, 0.61),
    "ntk": (1.218, 2.279, 1.178, 0.39),
    "yarn": (1.313, 1.416, 1.260, 0.76),
    "dynamic-yarn": (1.227, 1.416, 1.096, 0.76),
    "llama3": (1.449, 1.535, 1.385, None),
    "self-extend": (1.151, 1.236, 1.113, 0.86),
    "lm-infinite": (1.122, 1.178, 1.096, 0.34),
}
# Losses nearer than this, in nats, and fractions of passkeys, count as equal.
SAME_LOSS = 0.02
SAME_FRACTION = 0.1


def write_report(public, names, asked, source):
    """Write public.md and its figures. names: all models; asked: those with passkeys."""
    out_dir = Path(public.cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    losses = {text: {name: public.loss(name, text) for name in names} for text in public.texts}
    lines = ["# A public checkpoint, extended", ""]
    lines += describe(public, source)
    lines += summarize(public, losses["code"])
    plot_summary(public, losses["code"], out_dir / "public.png")
    lines += ["![loss by position, unmodified and extended](public.png)", ""]
    for text in losses:
        lines += loss_section(public, text, losses[text])
    plot_methods(public, losses, out_dir / "public-methods.png")
    lines += ["![loss by position, every method](public-methods.png)", ""]
    lines += tax_section(public, names)
    lines += needle_section(public, asked)
    plot_needles(public, asked, out_dir / "public-needles.png")
    lines += ["![passkeys found](public-needles.png)", ""]
    lines += order_section(public, losses["code"], asked)
    lines += time_section(public)
    (out_dir / "public.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {out_dir / 'public.md'}")


def describe(public, source):
    """Return the paragraphs that say what was measured and what was given up."""
    length = public.original_length
    text = (
        f"{public.imported}: {public.n_parameters / 1e6:.0f} M parameters, context length "
        f"{length:,} tokens, extended {public.cfg.factor:g} times. Losses are in nats per token; "
        f"products are in {str(public.dtype).removeprefix('torch.')}"
    )
    tax, in_float32 = public.tax("untouched", "code"), public.loss_in_float32()
    text += f" (loss at {public.plan.tax_length:,} tokens of code {tax:.4f}"
    text += f", in float32 {in_float32:.4f})."
    if public.imported.lower().endswith(".gguf"):
        text += " The weights have the quantisation of that file."
    lines = [f"{source}.", "", text, ""]
    for name, split in public.texts.items():
        lines.append(
            f"- {name}: the first {public.length_of(name):,} tokens of {split.files[0].name}, one "
            "sequence"
        )
    if "prose" not in public.texts:
        lines.append("- prose: not measured")
    if "longrope" not in public.methods:
        lines.append("- longrope: not measured, for there is no table for this checkpoint")
    lines += [f"- given up for time: {words}" for words in public.dropped.values()]
    lines.append(
        "- the checkpoint may have seen these texts in training: compare methods, not texts"
    )
    return [*lines, ""]


# -----------------------------------------------------------------------------
# Loss


def ranges(public, text):
    """Return the ranges of positions in a table: up to 1/4, 1/2, 1, 2, 4 original lengths."""
    length = public.length_of(text)
    edges = [round(public.original_length * part) for part in (0.25, 0.5, 1, 2, 4, 8, 16, 32)]
    edges = [0, *(edge for edge in edges if edge < length), length]
    return list(zip(edges, edges[1:], strict=False))


def mean_loss(public, text, losses, start, end):
    """Return the mean loss of the positions from start to end, of losses by bins."""
    width = public.length_of(text) / len(losses)
    return float(np.mean(losses[round(start / width) : round(end / width)]))


def loss_section(public, text, losses):
    parts = {f"{start:,} to {end:,}": (start, end) for start, end in ranges(public, text)}

    def cell(name, part):
        return f"{mean_loss(public, text, losses[name], *part):.3f}"

    return [f"## Loss by position, {text}", "", *grid(losses, parts, cell), ""]


def summarize(public, losses):
    """Return a sentence for each range beyond the original length: which method is the best."""
    lines = []
    for start, end in ranges(public, "code"):
        if start < public.original_length:
            continue
        means = {name: mean_loss(public, "code", losses[name], start, end) for name in losses}
        zero_shot = {name: means[name] for name in public.methods}
        best = min(zero_shot, key=zero_shot.get)
        line = (
            f"- Positions {start:,} to {end:,}: untouched {means['untouched']:.2f} nats per token, "
            f"without training {best} {means[best]:.2f}"
        )
        tuned = {name: mean for name, mean in means.items() if " + " in name}
        if tuned:
            best = min(tuned, key=tuned.get)
            line += f", fine-tuned {best} {tuned[best]:.2f}"
        lines.append(line + ".")
    return [*lines, ""]


def tax_section(public, names):
    """Return the losses at a length that the checkpoint was trained for."""
    texts = list(public.texts)
    header = [""]
    for text in texts:
        header += [text, "more than untouched"]
    rows = []
    for name in names:
        row = [name]
        for text in texts:
            loss = public.tax(name, text)
            row += [f"{loss:.3f}", f"{loss - public.tax('untouched', text):+.3f}"]
        rows.append(row)
    title = f"## What it costs at {public.plan.tax_length:,} tokens"
    what = (
        f"Loss in sequences of {public.plan.tax_length:,} tokens, {public.plan.tax_tokens:,} "
        "tokens of each text, spread over it."
    )
    return [title, "", what, "", *markdown_table(header, rows), ""]


# -----------------------------------------------------------------------------
# Passkeys


def found(public, name, length, depth):
    """Return the fraction of passkeys that a model finds at a length and depth."""
    prompts = range(public.plan.prompts)
    return float(np.mean([public.needle(name, length, depth, prompt) for prompt in prompts]))


def mean_found(public, name, length):
    return float(np.mean([found(public, name, length, depth) for depth in public.plan.depths]))


def needle_section(public, asked):
    lengths = {f"{length:,}": length for length in public.needle_lengths()}

    def cell(name, length):
        by_depth = [f"{found(public, name, length, depth):g}" for depth in public.plan.depths]
        return f"{mean_found(public, name, length):.2f} ({', '.join(by_depth)})"

    depths = ", ".join(f"{depth:g}" for depth in public.plan.depths)
    what = (
        "Fraction of passkeys of five digits whose every token has the highest probability given "
        f"those before it; in brackets by depth ({depths} of the text), "
        f"{count(public.plan.prompts, 'prompt')} each. Chance is 0.00001."
    )
    return ["## Passkeys", "", what, "", *grid(asked, lengths, cell), ""]


# -----------------------------------------------------------------------------
# The orders of small models


def order_section(public, losses, asked):
    """Name every pair of methods whose order differs from that of small models."""
    length = public.original_length
    last = public.length_of("code")
    columns = [("loss at twice the length", 0, loss_between(public, losses, length, 2 * length))]
    if last > 2 * length:
        beyond = loss_between(public, losses, 3 * last // 4, last)
        columns.append((f"loss at {last / length:g} times the length", 1, beyond))
    tax = {name: public.tax(name, "code") for name in losses}
    columns.append((f"loss at {public.plan.tax_length:,} tokens", 2, tax))
    longest = public.needle_lengths()[-1]
    needles = {name: mean_found(public, name, longest) for name in asked}
    columns.append((f"passkeys at {longest:,} tokens", 3, needles))

    lines = [
        "## What small models predicted",
        "",
        "Pairs of methods, without training, whose order here is another one than that of the "
        "models of 0.5 M parameters in [reproduce.md](reproduce.md):",
        "",
    ]
    for title, column, values in columns:
        same, differing = compare_order(values, column)
        lines.append(f"- {title}: {same} of {same + len(differing)} pairs in the same order.")
        lines += [f"  - {words}" for words in differing]
    return [*lines, ""]


def loss_between(public, losses, start, end):
    return {name: mean_loss(public, "code", values, start, end) for name, values in losses.items()}


def compare_order(values, column):
    """Return how many pairs are in the order of small models, and the others in words.

    values: of this checkpoint. column: of SMALL_MODELS. Pairs that are equal there or here, within
    what SAME_LOSS or SAME_FRACTION says, are not counted.
    """
    is_loss = column < 3
    tolerance = SAME_LOSS if is_loss else SAME_FRACTION
    known = [name for name in values if SMALL_MODELS.get(name, (None,) * 4)[column] is not None]
    same = 0
    differing = []
    for a, b in combinations(known, 2):
        small = SMALL_MODELS[a][column] - SMALL_MODELS[b][column]
        here = values[a] - values[b]
        if abs(small) < tolerance or abs(here) < tolerance:
            continue
        if small * here > 0:
            same += 1
            continue
        first, second = (a, b) if here < 0 else (b, a)
        differing.append(
            f"here {first} {values[first]:.2f} is below {second} {values[second]:.2f}; in small "
            f"models {SMALL_MODELS[first][column]:.2f} and {SMALL_MODELS[second][column]:.2f}"
        )
    return same, differing


def time_section(public):
    words = {
        "loss": "loss by position",
        "tax": "loss at the short length",
        "float32": "the same in float32",
        "needle": "passkeys",
        "step": "timing a step",
        "tune": "fine-tuning",
    }
    kinds = Counter()
    for name, taken in public.measured["seconds"].items():
        kinds[words[name.partition("/")[0]]] += taken / 60
    parts = [f"{kind} {minutes:.1f}" for kind, minutes in kinds.items()]
    total = kinds.total()
    return ["## Times", "", f"Minutes: {', '.join(parts)}; {total:.0f} in all.", ""]


# -----------------------------------------------------------------------------
# Figures


def draw_curves(axis, public, text, losses, styles):
    """Draw loss by position, a curve for each model. styles: name -> arguments of plot()."""
    length = public.length_of(text)
    width = length / len(next(iter(losses.values())))
    centres = (np.arange(length / width) + 0.5) * width
    for name, style in styles.items():
        axis.plot(centres, losses[name], label=name, **style)
    axis.axvline(public.original_length, color="gray", linestyle="--", linewidth=1)
    axis.set(xlim=(0, length), ylim=(0, None), xlabel="position (tokens)")
    axis.set_ylabel("loss (nats per token)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def plot_summary(public, losses, file):
    """Plot the untouched checkpoint, the best method, and the best fine-tuned one, on code."""
    last = public.length_of("code")
    means = loss_between(public, losses, last // 2, last)
    styles = {"untouched": {"color": "C3"}}
    # the fine-tuned model, and what it was before
    tuned = [name for name in losses if " + " in name]
    if tuned:
        name = min(tuned, key=means.get)
        styles[name.partition(" + ")[0]] = {"color": "C0"}
        styles[name] = {"color": "C2"}
    else:
        styles[min(public.methods, key=means.get)] = {"color": "C0"}

    def draw(figure, axis):
        draw_curves(axis, public, "code", losses, styles)
        place = (public.original_length, axis.get_ylim()[1] * 0.97)
        words = f" its context length, {public.original_length:,}"
        axis.text(*place, words, fontsize=9, color="gray", verticalalignment="top")
        axis.legend(loc="center right")
        axis.set_title(f"{public.imported}, extended {public.cfg.factor:g} times", fontsize=11)

    save_figure(file, draw, (8, 4))


def plot_methods(public, losses, file):
    """Plot every model, a panel for each text."""

    def draw(figure, *axes):
        for axis, text in zip(axes, losses, strict=True):
            styles = {}
            for i, name in enumerate(losses[text]):
                style = "--" if " + " in name else "-"
                styles[name] = {"color": f"C{i % 10}", "linestyle": style, "linewidth": 1.2}
            draw_curves(axis, public, text, losses[text], styles)
            axis.set_title(text)
        axes[0].legend(fontsize=8)

    save_figure(file, draw, (7 * len(losses), 4.6), panels=(1, len(losses)), dpi=110)


def plot_needles(public, asked, file):
    """Plot the fraction of passkeys found by length and depth, a panel for each model."""
    lengths = public.needle_lengths()
    depths = public.plan.depths

    def draw(figure, *axes):
        for axis, name in zip(axes, asked, strict=True):
            cells = [[found(public, name, length, depth) for length in lengths] for depth in depths]
            axis.grid(False)
            image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            for row, values in enumerate(cells):
                for column, value in enumerate(values):
                    axis.text(column, row, f"{value:g}", ha="center", va="center", fontsize=8)
            axis.set_title(name, fontsize=9)
            axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
            axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
            axis.set_xlabel("tokens", fontsize=8)
        axes[0].set_ylabel("depth", fontsize=8)
        figure.colorbar(image, ax=axes, label="passkeys found")

    save_figure(file, draw, (2.6 * len(asked), 2.6), panels=(1, len(asked)), dpi=110)
