"""The report of experiments/papers/recurrence.py: tables, the paper's orderings, and the figure."""

import math
import statistics

from experiments.papers.recurrence_runs import memory_of
from experiments.report import (
    RULE,
    Claim,
    confidence_interval,
    format_interval,
    markdown_table,
)
from nanolong.plots import import_pyplot


class Losses:
    """The records of a board, by scheme and mode."""

    def __init__(self, board):
        self.board = board
        self.records = {}  # (pos, mode) -> {seed: record}
        for record in board["records"]:
            by_seed = self.records.setdefault((record["pos"], record["mode"]), {})
            by_seed[record["seed"]] = record
        self.schemes = list(dict.fromkeys(pos for pos, _ in self.records))
        self.modes = list(dict.fromkeys(mode for _, mode in self.records))

    def select(self, pos, mode, memory=None, groups=None):
        """Return seed -> mean loss, or {} of what was not measured.

        memory: in evaluation, in segments; None: as in training. groups: a slice of the groups of
        positions; None: all of the segment.
        """
        losses = {}
        memory = memory_of(mode) if memory is None else memory
        for seed, record in self.records.get((pos, mode), {}).items():
            if memory not in record["evaluated"]:
                continue
            row = list(record["evaluated"]).index(memory)
            if groups is None:
                losses[seed] = record["losses"][row]
            else:
                losses[seed] = statistics.fmean(record["by_position"][row][groups])
        return losses

    def differences(self, a, b):
        """Return the differences a - b of two results of select(), paired by seed."""
        return [loss - b[seed] for seed, loss in a.items() if seed in b]

    def gain_at(self, pos, groups):
        """Return seed -> memory-1 - streams in some groups of positions."""
        without = self.select(pos, "streams", groups=groups)
        with_memory = self.select(pos, "memory-1", groups=groups)
        return {seed: x - without[seed] for seed, x in with_memory.items() if seed in without}


def cell(losses, digits=3):
    """Return the mean and interval of a list, or of the values of select()."""
    values = list(losses.values()) if isinstance(losses, dict) else losses
    return format_interval(values, digits) if values else "–"


# -----------------------------------------------------------------------------
# Tables


def main_table(losses):
    """Return the table of the modes: a line per scheme."""
    header = ["", *losses.modes, "memory-1 - streams", "streams - shuffled"]
    rows = []
    for pos in losses.schemes:
        by_mode = {mode: losses.select(pos, mode) for mode in ("shuffled", "streams", "memory-1")}
        row = [pos, *(cell(losses.select(pos, mode)) for mode in losses.modes)]
        row.append(cell(losses.differences(by_mode["memory-1"], by_mode["streams"])))
        row.append(cell(losses.differences(by_mode["streams"], by_mode["shuffled"])))
        rows.append(row)
    return markdown_table(header, rows)


def memory_table(losses):
    """Return the table by the memory in evaluation: a line per scheme and mode."""
    lengths = losses.board["evaluated"]
    rows = []
    for pos, mode in losses.records:
        row = [pos, mode]
        row += [cell(losses.select(pos, mode, length)) for length in lengths]
        rows.append(row)
    return markdown_table(["", "trained", *(f"{length}" for length in lengths)], rows)


def position_table(losses):
    """Return the gain of a memory by position: a line per scheme, and the first quarter's share."""
    n_groups = len(losses.board["records"][0]["by_position"][0])
    size = losses.board["segment"] / n_groups
    header = ["", *(f"{round(i * size)}–{round((i + 1) * size) - 1}" for i in range(n_groups))]
    rows = []
    for pos in losses.schemes:
        gains = [losses.gain_at(pos, slice(i, i + 1)) for i in range(n_groups)]
        if not gains[0]:
            continue
        means = [statistics.fmean(by_seed.values()) for by_seed in gains]
        share = f"{sum(means[: n_groups // 4]) / sum(means):.0%}" if sum(means) < 0 else "–"
        rows.append([pos, *(cell(by_seed) for by_seed in gains), share])
    return markdown_table([*header, "the first quarter's share"], rows)


def context_table(losses):
    """Return the table of relative effective context lengths, in tokens of memory."""
    segment = losses.board["segment"]
    fractions = list(dict.fromkeys(record["fraction"] for record in losses.board["contexts"]))
    header = ["", "trained", *(f"r = {fraction:g}" for fraction in fractions)]
    rows = []
    for pos, mode in losses.records:
        row = [pos, mode]
        for fraction in fractions:
            found = select_contexts(losses.board, pos, mode, fraction)
            row.append(cell({seed: segment * n for seed, n in found.items()}, digits=0))
        if any(text != "–" for text in row[2:]):
            rows.append(row)
    return markdown_table(header, rows)


def select_contexts(board, pos, mode, fraction):
    """Return seed -> relative effective context length in segments."""
    wanted = (pos, mode, fraction)
    found = {}
    for record in board["contexts"]:
        if (record["pos"], record["mode"], record["fraction"]) == wanted:
            found[record["seed"]] = record["segments"]
    return found


def time_table(losses):
    """Return the table of the seconds of training: a line per scheme, a column per mode.

    Of the fastest seed: the other cores may have been busy during some runs.
    """
    rows = []
    for pos in losses.schemes:
        row = [pos]
        for mode in losses.modes:
            records = losses.records.get((pos, mode), {}).values()
            seconds = [record["training_seconds"] for record in records]
            row.append(f"{min(seconds):.1f}" if seconds else "–")
        rows.append(row)
    return markdown_table(["", *losses.modes], rows)


# -----------------------------------------------------------------------------
# Orderings


def judge(losses):
    """Return the claims of Dai et al. (2019), by topic; what was not measured is left out."""
    topics = {}

    def compare(topic, text, a, b, **bound):
        differences = losses.differences(a, b)
        if differences:
            claim = Claim(text, *confidence_interval(differences), **bound)
            topics.setdefault(topic, []).append(claim)

    select = losses.select
    for pos in losses.schemes:
        text = f"{pos}: a memory of one segment below streams without"
        compare("Recurrence", text, select(pos, "memory-1"), select(pos, "streams"), below=0)
    for pos in losses.schemes:
        # Gains are negative differences.
        quarter = len(losses.board["records"][0]["by_position"][0]) // 4
        early = losses.gain_at(pos, slice(0, quarter))
        late = losses.gain_at(pos, slice(-quarter, None))
        text = f"{pos}: the first quarter of a segment gains more than the last"
        compare("Where the gain lies", text, early, late, below=0)
    for mode in losses.modes:
        if memory_of(mode):
            xl, shaw = select("xl", mode), select("shaw", mode)
            compare("Encodings", f"{mode}: xl below shaw", xl, shaw, below=0)
    for (pos, mode), memory in ((key, memory_of(key[1])) for key in losses.records):
        lengths = [n for n in losses.board["evaluated"] if n > memory][:2] if memory else []
        for length in lengths:
            text = f"{pos}, {mode}: a memory of {length} below one of {memory} in evaluation"
            longer, own = select(pos, mode, length), select(pos, mode, memory)
            compare("Longer memories in evaluation", text, longer, own, below=0)
    for pos in losses.schemes:
        with_memory = select_contexts(losses.board, pos, "memory-1", 0.1)
        without = select_contexts(losses.board, pos, "streams", 0.1)
        text = f"{pos}: RECL in segments (r = 0.1) above that of streams without"
        compare("Effective context", text, with_memory, without, above=0)
    return topics


def judge_orderings(losses):
    """Return the lines of the section on the paper's orderings."""
    if not losses.board["judged"]:
        return [
            f"Not judged: models trained for {losses.board['steps']} steps say nothing about them."
        ]
    lines = [f"Differences in nats, or in segments for contexts, paired by seed. {RULE}"]
    for topic, claims in judge(losses).items():
        lines += ["", f"### {topic}", "", *(f"- {claim}" for claim in claims)]
    return lines


# -----------------------------------------------------------------------------
# The report


def describe_runs(board):
    """Return the paragraph that says what was trained and measured."""
    model = ", ".join(f"{name}={value}" for name, value in board["model"].items())
    tokens = board["steps"] * board["batch_size"] * board["segment"]
    fastest = {}  # seed, of each kind of run: other work may slow a machine down for a while
    for record in board["records"]:
        kind = record["pos"], record["mode"]
        fastest[kind] = min(record["seconds"], fastest.get(kind, math.inf))
    return (
        f"Each run ({model}) trains on {tokens:,} tokens: {board['steps']} steps of "
        f"{board['batch_size']} segments of {board['segment']} tokens with AdamW, the same tokens "
        "for all. `shuffled`: in random order; `streams`: in the order of the text; `memory-N`: as "
        "streams, with a memory of N segments. Losses are in nats per token of held-out text, on "
        "the same tokens for all: the mean over the seeds and its 95 % interval. In evaluation a "
        "memory is full before the first scored token, and tokens early in a segment have only "
        "the memory before them. The longest context in training, memory included, sets the tables "
        f"of shaw, nezha and t5. The {len(fastest)} runs of a seed take "
        f"{sum(fastest.values()) / 60:.1f} minutes of one process, evaluation included: each of "
        "them by its fastest seed."
    )


def write_report(board, out_dir):
    """Write recurrence.md and recurrence.png, and print the text."""
    losses = Losses(board)
    sections = {
        "Loss with the memory of training": main_table(losses),
        "Loss by the memory in evaluation, in segments": memory_table(losses),
        "memory-1 - streams, by position in the segment": position_table(losses),
        "Relative effective context, in tokens of memory": [
            "As Dai et al. (2019) define it, for the group of all models of a seed in this table, "
            "in the steps of the memories above. The definition counts what improves and not what "
            "gets worse, so a model whose losses scatter with a memory that it never saw gains, "
            "too.",
            "",
            *context_table(losses),
        ],
        "Seconds of training, of the fastest seed": time_table(losses),
        "Orderings": judge_orderings(losses),
    }
    lines = ["# Segment-level recurrence", "", f"`{board['command']}`: {board['note']}.", ""]
    lines += [describe_runs(board), "", "![losses](recurrence.png)"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *content]
    if board["sample"]:
        text = board["sample"]["text"].splitlines()
        lines += ["", f"## A sample of {board['sample']['name']}", "", *("    " + t for t in text)]
    text = "\n".join(lines) + "\n"
    (out_dir / "recurrence.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    plot_losses(losses, out_dir / "recurrence.png")


def plot_losses(losses, file):
    """Plot the loss by position and by the memory in evaluation: the means of the seeds."""
    plt = import_pyplot(file)
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    n_groups = len(losses.board["records"][0]["by_position"][0])
    centres = [(i + 0.5) * losses.board["segment"] / n_groups for i in range(n_groups)]
    lengths = losses.board["evaluated"]
    shown = []  # the losses that the limits of the right panel follow
    for i, pos in enumerate(losses.schemes):
        for mode, style in (("streams", "--"), ("memory-1", "-")):
            by_group = [losses.select(pos, mode, groups=slice(g, g + 1)) for g in range(n_groups)]
            if not by_group[0]:
                continue
            label = f"{pos}, {mode}"
            means = [statistics.fmean(by_seed.values()) for by_seed in by_group]
            left.plot(centres, means, style, color=f"C{i}", marker=".", label=label)
            by_memory = [losses.select(pos, mode, length) for length in lengths]
            means = [statistics.fmean(by_seed.values()) for by_seed in by_memory]
            right.plot(range(len(lengths)), means, style, color=f"C{i}", marker=".")
            # Without a memory in training, all but the first may be far above the others.
            shown += means if memory_of(mode) else means[:1]
    if shown:
        margin = 0.06 * (max(shown) - min(shown)) + 1e-3
        right.set_ylim(min(shown) - margin, max(shown) + margin)
    left.set(title="With the memory of training", xlabel="position in the segment (tokens)")
    right.set(title="With other memories", xlabel="memory in evaluation (segments)")
    right.set_xticks(range(len(lengths)), lengths)
    left.set_ylabel("loss (nats per token)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.supxlabel(losses.board["note"], fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"wrote {file}")
