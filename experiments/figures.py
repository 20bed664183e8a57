"""Draw the figures of README from the committed results alone: hero, schemes and smollm2.

    python experiments/figures.py [FOLDER]

They go to experiments/results, or to FOLDER. Values with no note are means over seeds; bars of
errors are 95 % intervals with Student's t, over seeds or, for SmolLM2, over documents.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

RESULTS = Path(__file__).resolve().parent / "results"
RED, BLUE, GREEN, ORANGE, VIOLET = "#c8413b", "#2a6fb5", "#1d8a5f", "#d98a1f", "#6b4fa0"
GRAY, LIGHT, INK = "#8a8f98", "#d5d8dc", "#22262b"
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
STYLE = {"font.family": "DejaVu Sans", "font.size": 11, "axes.edgecolor": GRAY}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.facecolor": "white"}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 12, "axes.titleweight": "bold"}

# arm, name, what it does, colour
METHODS = [
    ("none", "RoPE, unchanged", "breaks beyond 1×", RED),
    ("window", "Sliding window", "lowest loss, sees only the end", ORANGE),
    ("yarn", "YaRN", "higher loss, finds nearly all", BLUE),
    ("self-extend", "Self-Extend", "low loss, finds nearly all", GREEN),
]
PLACES = {"0": "start", "0.25": "", "0.5": "middle", "0.75": "", "1": "end"}
FOUND = LinearSegmentedColormap.from_list("found", ["#f6cfc5", "#a9cf9f", "#17714f"])

FLAT = ["xl", "fox-rope", "rope-window", "kerple-power", "fox", "kerple", "sandwich", "alibi"]
BROKEN = {"rope": "RoPE", "nope": "no positions", "t5": "T5", "sinusoidal": "sinusoidal"}
BETWEEN = {"shaw": "Shaw", "nezha": "NEZHA"}

PUBLIC = [
    ("untouched", "not extended", RED),
    ("lm-infinite", "LM-Infinite (a window)", ORANGE),
    ("yarn", "YaRN ×4", BLUE),
    ("jet-long", "Jet-Long ×4", VIOLET),
    ("self-extend", "Self-Extend ×4", GREEN),
]
SAME_UP_TO = {"lm-infinite": 8192, "jet-long": 8192, "self-extend": 2048}


def load(name):
    """Read the rows of an experiment: (arm, measure, length) -> a value for each seed."""
    found = defaultdict(list)
    for arm, _, measure, length, value, *_ in json.loads((RESULTS / name).read_text())["rows"]:
        found[arm, measure, length].append(value)
    return found


def mean(values):
    return sum(values) / len(values)


def half_width(values):
    m, n = mean(values), len(values)
    return T95[n - 1] * math.sqrt(sum((x - m) ** 2 for x in values) / (n - 1) / n)


def write_title(figure, title, below, gap, size=15):
    figure.text(0.012, 0.975, title, fontsize=size, fontweight="bold", va="top")
    figure.text(0.012, 0.975 - gap, below, fontsize=11, color="#555b63", va="top")


def draw_hero():
    """What four methods do to the loss, and to passkeys."""
    found = load("hero.json")
    lengths = sorted({n for _, measure, n in found if measure == "last-quarter"})
    times = [n // lengths[0] for n in lengths]
    grids = {"height_ratios": [1, 1.05], "hspace": 0.36, "wspace": 0.12}
    figure, axes = plt.subplots(2, 4, figsize=(11, 6.2), gridspec_kw=grids)
    figure.subplots_adjust(left=0.115, right=0.985, top=0.775, bottom=0.135)
    for column, (arm, name, verdict, color) in enumerate(METHODS):
        axis, grid = axes[:, column]
        for other, *_ in METHODS:
            losses = [mean(found[other, "last-quarter", n]) for n in lengths]
            axis.plot(times, losses, color=LIGHT, linewidth=1.2)
        seeds = [found[arm, "last-quarter", n] for n in lengths]
        bars = {"yerr": list(map(half_width, seeds)), "capsize": 3, "elinewidth": 1.2}
        losses = list(map(mean, seeds))
        axis.errorbar(times, losses, **bars, color=color, linewidth=2.6, marker="o", markersize=5)
        axis.set_xscale("log", base=2)
        axis.set(ylim=(1, 3.75), xlim=(0.85, 4.7), yticks=[1, 2, 3])
        axis.set_xticks(times, [f"{n}×" for n in times])
        axis.minorticks_off()
        axis.set_title(name, color=color, fontsize=13, pad=20)
        axis.text(0, 1.04, verdict, transform=axis.transAxes, fontsize=10.5, color="#555b63")
        height = losses[-1] + bars["yerr"][-1] + 0.12
        text = {"color": color, "ha": "center", "weight": "bold"}
        axis.text(4, height, f"{losses[-1]:.2f}", **text)

        cells = [[mean(found[arm, f"needle {x}", n]) for n in lengths] for x in PLACES]
        grid.imshow(cells, cmap=FOUND, vmin=0, vmax=1, aspect="auto")
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                ink = "white" if value > 0.7 else INK
                grid.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=ink)
        grid.set_xticks(range(len(times)), [f"{n}×" for n in times])
        grid.set_yticks(range(len(PLACES)), PLACES.values() if column == 0 else [""] * len(PLACES))
        grid.tick_params(length=0)
        grid.spines[:].set_visible(False)
        if column:
            axis.set_yticklabels([])
    axes[0, 0].set_ylabel("loss, nats per byte\n(lower is better)")
    axes[1, 0].set_ylabel("passkeys found, %,\nby place in the text")
    figure.text(0.55, 0.05, "length of the text, in multiples of the training length", ha="center")
    title = "A low loss does not mean that the model can use the longer text"
    below = (
        "Small RoPE models on texts of up to four times their training length (96 bytes), without "
    )
    write_title(figure, title, below + "fine-tuning; 3 seeds", 0.058, 16)
    return figure


def draw_schemes():
    """Which schemes keep their loss at 32 times the training length."""
    board, lengths = load("leaderboard.json"), [64, 256, 512, 2048]

    def curve(arm):
        return [mean(board[arm, "last-quarter", n]) for n in lengths]

    figure, axis = plt.subplots(figsize=(9, 5.2))
    figure.subplots_adjust(left=0.085, right=0.7, top=0.8, bottom=0.13)
    for arms, color in ((BROKEN, RED), (BETWEEN, GRAY)):
        for arm, name in arms.items():
            losses = curve(arm)
            axis.plot(lengths, losses, color=color, linewidth=2.1, marker="o", markersize=4)
            place = losses[-1] + (0.1 if arm == "sinusoidal" else 0)
            axis.text(2250, place, f"{name}  {losses[-1]:.2f}", color=color, va="center")
    for arm in FLAT:
        axis.plot(lengths, curve(arm), color=BLUE, linewidth=1.8, alpha=0.75)
    ends = [curve(arm)[-1] for arm in FLAT]
    text = "ALiBi, KERPLE, FoX, Sandwich,\nTransformer-XL, and RoPE with\na window of 32:  "
    text += f"{min(ends):.2f} to {max(ends):.2f}"
    axis.text(2250, 1.16, text, color=BLUE, va="center", linespacing=1.35)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, ["64\n(trained)", "256\n4×", "512\n8×", "2,048\n32×"])
    axis.minorticks_off()
    axis.set(ylim=(0.9, 4.45), xlim=(58, 2150), xlabel="length of the text, bytes")
    axis.set_ylabel("loss, nats per byte (lower is better)")
    axis.grid(axis="y", color="#e7e9ec")
    title = "RoPE breaks beyond its training length; ALiBi, FoX and others do not"
    below = "0.5 M parameters, Python source, loss in the last quarter of the text, mean of 3 seeds"
    write_title(figure, title, below, 0.07)
    return figure


def ratio(rows):
    """The mean of sums, and half its 95 % interval over documents: rows of (nats, targets)."""
    total = sum(n for _, n in rows)
    m, k = sum(s for s, _ in rows) / total, len(rows)
    squares = sum((s - m * n) ** 2 for s, n in rows)
    return m, T95[k - 1] * math.sqrt(k / (k - 1) * squares) / total


def read_public():
    """Read public.jsonl: arm -> (loss, gain on distant phrases, [whether a number was found])."""
    cells, prompts = {}, defaultdict(list)
    for line in (RESULTS / "public.jsonl").read_text().splitlines():
        cell = json.loads(line)
        if cell["task"] == "repeats" and cell["seed"] == 0:
            cells[cell["arm"], cell["length"], cell["document"]] = cell["values"]
        elif cell["task"] == "niah" and cell["length"] == 12288:
            prompts[cell["arm"]].append(cell["values"]["right"])
    found = {}
    for arm, *_ in PUBLIC:
        short = "untouched" if SAME_UP_TO.get(arm, 0) >= 8192 else arm
        losses, gains = [], []
        for document in sorted(d for a, n, d in cells if (a, n) == (arm, 16384)):
            one, two = cells[short, 8192, document], cells[arm, 16384, document]
            losses.append(two["all"][::-1])
            n, nats = one["far 16384"]
            if n:
                gains.append((nats - two["far 16384"][1], n))
        found[arm] = ratio(losses), ratio(gains), prompts[arm]
    return found


def draw_smollm2():
    """A public checkpoint in twice its context."""
    measured = read_public()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), sharey=True)
    figure.subplots_adjust(left=0.185, right=0.985, top=0.68, bottom=0.15, wspace=0.1)
    for row, (arm, _, color) in enumerate(PUBLIC):
        (loss, _), (gain, width), found = measured[arm]
        bars = {"color": color, "height": 0.62}
        axes[0].barh(row, loss, **bars)
        axes[0].text(loss + 0.12, row, f"{loss:.2f}", va="center")
        if gain > -1:
            axes[1].barh(row, gain, xerr=width, **bars, capsize=3, ecolor=INK)
            axes[1].text(gain + width + 0.03, row, f"{gain:.2f}", va="center")
        else:
            axes[1].text(0.03, row, f"{gain:.1f}  (broken)", va="center", color=color)
        axes[2].barh(row, sum(found), **bars)
        text = f"{sum(found)} of {len(found)}" if found else "not measured"
        axes[2].text(sum(found) + 0.15, row, text, va="center", color=INK if found else GRAY)
    axes[0].set(xlim=(0, 8), xlabel="nats per token")
    axes[0].set_title("Loss in 16,384 tokens\n(lower is better)")
    axes[1].set(xlim=(0, 1.15), xlabel="nats per token")
    axes[1].set_title("Gain on phrases last seen\nover 8,192 tokens ago")
    axes[2].set(xlim=(0, 9.5), xticks=range(0, 9, 2), xlabel="of 8 prompts")
    axes[2].set_title("Hidden number found\nin 12,288 tokens")
    axes[0].set_yticks(range(len(PUBLIC)), [name for _, name, _ in PUBLIC])
    axes[0].invert_yaxis()
    title = (
        "SmolLM2-135M at twice its context: a window keeps the loss low, three methods use the text"
    )
    below = (
        "Trained for 8,192 tokens; 8 documents of code and prose, 95 % intervals, no fine-tuning"
    )
    write_title(figure, title, below, 0.09, 14.5)
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS)
    for name, draw in {"hero": draw_hero, "schemes": draw_schemes, "smollm2": draw_smollm2}.items():
        draw().savefig(folder / f"{name}.png", dpi=160)
        print(folder / f"{name}.png")
