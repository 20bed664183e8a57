"""The report of layers.py: differences of pairs of models, claims, and the figure."""

import itertools
import statistics
from operator import getitem

from experiments.extensibility import STAGES, table, values_by_seed
from experiments.report import (
    RULE,
    Claim,
    claim_lines,
    confidence_interval,
    count,
    format_settings,
    length_axis,
    line_style,
    save_figure,
    section,
    select,
    title,
)

FACTOR = 8  # of the context extension
LENGTHS = (1, 2, 4, FACTOR)  # that are measured, in training lengths

# -----------------------------------------------------------------------------
# Claims

# what is published about pairs of models; a claim for each stage and measure
PREDICTIONS = {
    "Full-attention layers only (Olmo 3, 2512.13961, section 3.6.4)": [
        ("WWWF full", "WWWF all", STAGES[1:], ("loss", "gain")),
    ],
    "p-RoPE: the slowest pairs are those that break (Barbero et al. 2024)": [
        ("p=0.25", "FFFF", STAGES, ("loss",)),
        ("p=0.5", "FFFF", STAGES, ("loss",)),
    ],
    "Score scale on layers without positions (SWAN, 2504.08719), or on all": [
        ("WWWN+logn none", "WWWN none", ("before", "fine-tuned"), ("loss", "gain")),
        ("WWWN+logn all", "WWWN all", STAGES[1:], ("loss", "gain")),
        ("FFFF+logn", "FFFF", STAGES, ("loss", "gain")),
        ("FFFF+ssmax", "FFFF", STAGES, ("loss", "gain")),
    ],
    "Hybrids extend better than full attention with RoPE": [
        ("WWWF full", "FFFF", STAGES, ("loss", "gain")),
        ("FFFN", "FFFF", STAGES, ("loss", "gain")),
        ("WWWN none", "FFFF", STAGES, ("loss", "gain")),
        ("WWWN+logn none", "FFFF", STAGES, ("loss", "gain")),
    ],
}
LEARNED = 1.0  # nats: a model with less gain at the training length has not learned to find values


def difference(values, pair):
    """Return the first model's value minus the second's, of the values of one seed."""
    first, second = pair.split(" - ")
    return values[first] - values[second]


def first_gains(board, name):
    """Return a model's gain at the training length before any extension, by seed."""
    return [values[name] for values in values_by_seed(board, "before", 1, "gain")]


def has_learned(board, name):
    """Whether a model finds values before any extension, in the mean over the seeds."""
    return statistics.fmean(first_gains(board, name)) >= LEARNED


def judge(board, predictions):
    """Return Claims about the target length; none about the gain of models that find no value."""
    claims = []
    for first, second, stages, measures in predictions:
        for measure, stage in itertools.product(measures, stages):
            if measure == "gain" and not (has_learned(board, first) and has_learned(board, second)):
                continue
            pair = f"{first} - {second}"
            values = values_by_seed(board, stage, FACTOR, measure)
            interval = confidence_interval([difference(found, pair) for found in values])
            bound = {"below": 0} if measure == "loss" else {"above": 0}
            claims.append(Claim(f"{stage}, {measure}: {pair}", *interval, **bound))
    return claims


# -----------------------------------------------------------------------------
# The report

MODEL_NOTE = (
    "A letter for each layer: F full attention, W a window of a quarter of the training length, N "
    "full attention without positions; none, full and all: the layers that YaRN changes. `loss`: "
    "nats per byte in the last quarter of a sequence. Of prompts that hide a value, `nats`: of the "
    "answer; `gain`: how many more it has if the value is not in the prompt. Lengths are in "
    "training lengths. The mean over the seeds and its 95 % interval."
)
DIFFERENCE_NOTE = (
    "Of two models of the same seed, the first minus the second. An asterisk: the interval "
    "excludes 0, as by chance one of 20 does."
)
CLAIM_NOTE = (
    "Paired differences at the target length; a published order predicts a lower loss, or a higher "
    "gain, of the first. Gains are judged of models that find values before they are extended: at "
    f"least {LEARNED:.0f} nat at the training length, in the mean. {RULE}"
)


def measured_models(board):
    return [name for name in board["models"] if select(board["records"], model=name)]


def stage_tables(board, names, function):
    """Return the parts of a section: a heading and a table for each stage."""
    parts = []
    for stage in STAGES:
        columns = [(stage, length, name) for name in ("loss", "nats", "gain") for length in LENGTHS]
        parts += [f"### {stage}", table(board, names, function, columns)]
    return parts


def report(board):
    """Return the lines of layers.md."""
    budget = board["budget"]
    models = (
        f"Models of {format_settings(budget['model'])}, trained for {budget['steps']} steps of "
        f"{budget['batch_size']} sequences, extended {FACTOR} times by YaRN, and fine-tuned for "
        f"{count(budget['tuning_steps'], 'step')}. {MODEL_NOTE}"
    )
    measured = measured_models(board)
    names = [f"- {name}: {board['models'][name]}" for name in measured]
    pairs, claims = [], []
    for topic, predictions in PREDICTIONS.items():
        found = [row for row in predictions if {*row[:2]} <= {*measured}]
        pairs += [f"{first} - {second}" for first, second, *_ in found]
        claims += [f"### {topic}", claim_lines(judge(board, found)) or "Not measured."]
    unlearned = [name for name in measured if not has_learned(board, name)]
    not_judged = f"Models whose gain is not judged: {', '.join(unlearned) or 'none'}."
    learned = {name: sum(g >= LEARNED for g in first_gains(board, name)) for name in measured}
    by_model = ", ".join(f"{name} {n}" for name, n in learned.items())
    learning = f"Seeds that have it: {by_model}. {not_judged}"
    return [
        *title(board, "Which layers of a hybrid should be extended"),
        *section("Models", models, names, "![Loss and gain by length](layers.png)"),
        *section("Measured", *stage_tables(board, measured, getitem)),
        *section("Differences", DIFFERENCE_NOTE, *stage_tables(board, pairs, difference)),
        *section("Claims", CLAIM_NOTE, learning, *claims),
    ]


def plot(board, folder):
    """Plot the mean loss and gain by length at each stage."""
    lengths = [board["budget"]["model"]["block_size"] * length for length in LENGTHS]

    def draw(figure, *axes):
        panels = itertools.product(("loss", "gain"), STAGES)
        for axis, (measure, stage) in zip(axes, panels, strict=True):
            for i, name in enumerate(measured_models(board)):
                records = select(board["records"], model=name, stage=stage)
                means = [
                    statistics.fmean(r[measure] for r in select(records, length=length))
                    for length in LENGTHS
                ]
                style = line_style(i) | {"linestyle": "--" if i >= 10 else "-"}
                axis.plot(lengths, means, label=name, **style)
            axis.set(title=stage, ylabel=f"{measure} in nats")
            length_axis(axis, lengths)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)

    save_figure(folder / "layers.png", draw, (13, 7), board["note"], (2, 3))
