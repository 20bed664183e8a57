"""Draw the figures of README and results from the committed results: hero, smollm2 and probes.

    python experiments/figures.py [FOLDER]

They go to experiments/results, or to FOLDER. Values are means over seeds, and bars of errors 95 %
intervals over seeds or, for SmolLM2, over documents.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean as mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.board import BLUE, COLORS, GREEN, ORANGE, RED, VIOLET, interval, label_ends
from experiments.needles import PLACES, draw_found
from experiments.public import read_cells
from experiments.public_report import Cells

RESULTS = Path(__file__).resolve().parent / "results"
GRAY, LIGHT, INK = "#8a8f98", "#d5d8dc", "#22262b"
STYLE = {"font.size": 11, "axes.edgecolor": GRAY}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.facecolor": "white"}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 12, "axes.titleweight": "bold"}

# arm, name, what it does, colour
METHODS = [
    ("none", "RoPE, unchanged", "breaks beyond 1×", RED),
    ("window", "Sliding window", "lowest loss, sees only the end", ORANGE),
    ("yarn", "YaRN", "higher loss, finds nearly all", BLUE),
    ("self-extend", "Self-Extend", "low loss, finds nearly all", GREEN),
]

PUBLIC = [
    ("untouched", "original model", RED),
    ("lm-infinite", "LM-Infinite (a window)", ORANGE),
    ("yarn", "YaRN ×4", BLUE),
    ("jet-long", "Jet-Long ×4", VIOLET),
    ("self-extend", "Self-Extend ×4", GREEN),
]


def load(name):
    """Read the rows of an experiment: (arm, measure, length) -> a value for each seed."""
    found = defaultdict(list)
    for arm, _, measure, length, value, *_ in json.loads((RESULTS / name).read_text())["rows"]:
        found[arm, measure, length].append(value)
    return found


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
        bars = {"yerr": [interval(x)[1] for x in seeds], "capsize": 3, "elinewidth": 1.2}
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
        draw_found(grid, cells, [f"{n}×" for n in times], column == 0)
        if column:
            axis.set_yticklabels([])
    axes[0, 0].set_ylabel("loss, nats per byte\n(lower is better)")
    axes[1, 0].set_ylabel("passkeys found, %,\nby place in the text")
    figure.text(0.55, 0.05, "length of the text, in multiples of the training length", ha="center")
    title = "A low loss does not mean that the model can use the longer text"
    below = "Small RoPE models on texts of up to four times their training length (96 bytes), "
    write_title(figure, title, below + "without fine-tuning; 3 seeds", 0.058, 16)
    return figure


def read_public():
    """Read public.jsonl: arm -> (loss, gain on distant repeats, [whether a number was found])."""
    cells = Cells(read_cells(RESULTS / "public.jsonl"))
    found = {}
    for arm, *_ in PUBLIC:
        keys = [k for k in cells.prompts if (k.task, k.arm, k.length) == ("niah", arm, 12288)]
        prompts = [cells.prompts[key]["values"]["right"] for key in keys]
        gain = cells.gain((arm, 0), 8192, 16384, "far")
        found[arm] = cells.loss((arm, 0), 16384)["mean"], gain, prompts
    return found


def draw_smollm2():
    """A public checkpoint in twice its context."""
    measured = read_public()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), sharey=True)
    figure.subplots_adjust(left=0.185, right=0.985, top=0.68, bottom=0.15, wspace=0.1)
    for row, (arm, _, color) in enumerate(PUBLIC):
        loss, gained, found = measured[arm]
        gain, width = gained["mean"], gained["high"] - gained["mean"]
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
    axes[1].set_title("Gain on distant repeats\n(over 8,192 tokens back)")
    axes[2].set(xlim=(0, 9.5), xticks=range(0, 9, 2), xlabel="of 8 prompts")
    axes[2].set_title("Hidden number found\nin 12,288 tokens")
    axes[0].set_yticks(range(len(PUBLIC)), [name for _, name, _ in PUBLIC])
    axes[0].invert_yaxis()
    title = "SmolLM2-135M at twice its context: a window keeps the loss low, "
    title += "three methods use the text"
    below = "Trained for 8,192 tokens; 8 documents of code and prose, 95 % intervals, "
    below += "without fine-tuning"
    write_title(figure, title, below, 0.09, 14.5)
    return figure


def draw_probes():
    """How well a probe reads the position after each layer."""
    found = load("probes.json")
    arms = "rope learned nope alibi t5 sinusoidal".split()
    figure, axis = plt.subplots(figsize=(9, 4.8))
    figure.subplots_adjust(left=0.085, right=0.85, top=0.8, bottom=0.13)
    ends = []
    for arm, color in zip(arms, (RED, *COLORS), strict=False):
        errors = [mean(found[arm, f"layer {n}", 0]) for n in range(5)]
        axis.plot(range(5), errors, color=color, marker="o", linewidth=2)
        ends.append((arm, 4, errors[-1], color))
    axis.set(ylim=(0, 1.1), xticks=range(5), xlabel="layer (0: the embedding)")
    axis.set_ylabel("error of the probe (1: a guess)")
    label_ends(axis, ends)
    below = "MLP probes on 0.5 M parameters, texts of 64 bytes, mean of 3 seeds; nope: no positions"
    write_title(figure, "After one layer a model without positions knows where it is", below, 0.07)
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS)
    for draw in (draw_hero, draw_smollm2, draw_probes):
        draw().savefig(folder / f"{draw.__name__[5:]}.png", dpi=160)
