"""The report of claims.py: claims.md, .json and .png."""

from pathlib import Path

from experiments.leaderboard import Orderings
from experiments.report import (
    RULE,
    Claim,
    confidence_interval,
    format_interval,
    markdown_table,
    read_json,
)
from experiments.reproduce import DEPTHS, FACTOR, average_needles, needle_lengths
from nanolong.plots import import_pyplot
from nanolong.strict_json import write_json

RESULTS = Path(__file__).resolve().parents[2] / "results"
TEN_PERCENT = 0.0953  # of a perplexity, in nats


def values_of(board, part, *keys):
    """Return a measurement of every seed: a list."""
    values = []
    for found in board["seeds"].values():
        value = found[part]
        for key in keys:
            value = value[key]
        values.append(value)
    return values


def claim_difference(text, a, b, **bound):
    """Claim that a minus b, values by seed, lies above or below a bound; return its line."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return f"- {Claim(text, *confidence_interval(differences), **bound)}"


# -----------------------------------------------------------------------------
# The parts of claims.py


def example_groups(n):
    """Return the groups of examples in the table: title -> slice, in halves and wholes of n."""
    ends = [n // 2, n, *(n * times for times in range(2, FACTOR + 1))]
    starts = [0, *ends]
    return {
        f"{start + 1} to {end}": slice(start, end) for start, end in zip(starts, ends, strict=False)
    }


def report_examples(board):
    """Return the lines of part 1."""
    settings = board["examples"]
    n = settings["examples"]
    groups = example_groups(n)

    def accuracies(name, title):
        curves = values_of(board, "examples", name)
        return [sum(curve[groups[title]]) / len(curve[groups[title]]) for curve in curves]

    names = list(values_of(board, "examples")[0])
    rows = []
    for name in names:
        cells = [format_interval(accuracies(name, title), 2) for title in groups]
        rows.append([name, *cells])
    _, within, *_, longest = groups
    claims = []
    for name in names[1:]:
        text = f"{name}: accuracy at examples {longest} above that at {within}"
        late, early = accuracies(name, longest), accuracies(name, within)
        claims.append(claim_difference(text, late, early, above=0))
    for better, worse in (("yarn", "none"), ("yarn", "window"), ("yarn, fine-tuned", "window")):
        text = f"rope, {better} above {worse}, at examples {longest}"
        above, below = accuracies(f"rope, {better}", longest), accuracies(f"rope, {worse}", longest)
        claims.append(claim_difference(text, above, below, above=0))
    return [
        "",
        "## More examples in a longer prompt",
        "",
        f"Fraction of right digits by the number of the example, after {settings['steps']:,} steps "
        f"of {settings['batch_size']} samples of {n} examples with {settings['keys']} keys; tested "
        f"on {FACTOR * n} examples. Fine-tuned: {settings['tuning_steps']} steps of "
        f"{settings['batch_size'] // FACTOR} samples of {FACTOR * n}. The first line is the digit "
        "that was shown most often with the key; a guess scores 0.1.",
        "",
        *markdown_table(["", *groups], rows),
        "",
        "![accuracy by number of examples](claims.png)",
        "",
        *claims,
    ]


def plot_examples(board, file):
    """Plot the mean accuracy of the seeds by number of examples to a PNG."""
    plt = import_pyplot(file)
    if plt is None:
        return
    n = board["examples"]["examples"]
    figure, axes = plt.subplots(figsize=(9.5, 5), layout="constrained")
    for i, name in enumerate(values_of(board, "examples")[0]):
        curves = values_of(board, "examples", name)
        means = [sum(column) / len(column) for column in zip(*curves, strict=True)]
        # Single examples are noisy: each point is the mean of as many as training has eighths.
        width = max(1, n // 8)
        ends = range(width, len(means) + 1, width)
        points = [sum(means[end - width : end]) / width for end in ends]
        style = "--" if name == "digit most shown" else "-"
        axes.plot(list(ends), points, style, color=f"C{i}", marker="osD^vP*X"[i % 8], label=name)
    axes.axvline(n, color="gray", linestyle=":", linewidth=1)
    axes.set(title="Accuracy by number of examples; training ends at the dotted line")
    axes.set(xlabel="examples", ylabel="fraction of right digits", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.supxlabel(board["note"], fontsize=7, color="gray")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    print(f"wrote {file}")


def report_learned(board):
    """Return the lines of part 2."""
    L = board["text_models"]["model"]["block_size"]
    names = list(values_of(board, "learned")[0])
    rows = []
    for name in names:
        losses = values_of(board, "learned", name)
        row = [format_interval([loss[0] for loss in losses])]
        row.append(format_interval([loss[-1] for loss in losses]) if len(losses[0]) > 1 else "–")
        rows.append([name, *row])
    untouched = [losses[0] for losses in values_of(board, "learned", names[0])]
    claims = []
    for name in (names[1], names[-1]):
        at_target = [losses[1] for losses in values_of(board, "learned", name)]
        text = f"{name}, at {FACTOR * L}: perplexity within 10 % of that untouched at {L}"
        claims.append(claim_difference(text, at_target, untouched, below=TEN_PERCENT))
    return [
        "",
        "## Learned embeddings, interpolated",
        "",
        f"Last-quarter loss, nats per token, of models trained at {L} tokens as in reproduce.md, "
        "where RoPE's are.",
        "",
        *markdown_table(["", f"at {L}", f"at {FACTOR * L}"], rows),
        "",
        *claims,
    ]


def report_attention(board):
    """Return the lines of part 3."""
    schemes = list(values_of(board, "attention")[0])
    rows = []
    for pos in schemes:
        histograms = values_of(board, "attention", pos, "histogram")
        row = [pos, format_interval(values_of(board, "attention", pos, "divergence"))]
        row.append(format_interval(values_of(board, "attention", pos, "distance"), 1))
        row += [format_interval([h[part] for h in histograms], 2) for part in (0, 4, -1)]
        rows.append(row)
    to_t5 = values_of(board, "attention", "t5", "divergence")
    claims = []
    for pos in schemes:
        if pos not in ("nope", "t5"):
            text = f"nope's attention is nearer to t5's than to {pos}'s, in nats"
            other = values_of(board, "attention", pos, "divergence")
            claims.append(claim_difference(text, to_t5, other, below=0))
    header = ["", "divergence from nope", "mean distance", "nearest tenth", "fifth", "farthest"]
    return [
        "",
        "## Attention without positions",
        "",
        "Jensen-Shannon divergence in nats (0 to 0.693) of the closest heads of a layer, mean over "
        "the layers; mean attended distance in tokens; and the probability in three of ten equal "
        "parts of the distance, relative to the position. Text models at their training length "
        "(`experiments/attention_maps.py`).",
        "",
        *markdown_table(header, rows),
        "",
        *claims,
    ]


def report_pairs(board):
    """Return the lines of part 4."""
    rows = []
    for name in ("none", "faster", "slower"):
        losses = values_of(board, "pairs", name, "loss")
        before = values_of(board, "pairs", name, "before")
        rows.append([name, format_interval(losses), format_interval(before, 2)])
    claims = []
    for key, bound in (("loss", "above"), ("before", "below")):
        what = {"loss": "the loss", "before": "attention to the token before"}[key]
        text = f"{what}, the faster half unrotated, minus that with the slower half"
        fast, slow = (values_of(board, "pairs", half, key) for half in ("faster", "slower"))
        claims.append(claim_difference(text, fast, slow, **{bound: 0}))
    return [
        "",
        "## RoPE's faster and slower pairs",
        "",
        "A finished model, half of whose pairs are not rotated: last-quarter loss at the training "
        "length, and the attention to the token before, of the head with most of it.",
        "",
        *markdown_table(["not rotated", "loss", "attention to the token before"], rows),
        "",
        *claims,
    ]


# -----------------------------------------------------------------------------
# What other experiments have measured


def report_needles(board):
    """Return the lines of the needles by depth, of reproduce.json."""
    longest = needle_lengths(board["budget"]["needle"]["length"])[-1]
    records = average_needles(board)
    rows = []
    for name in ("none", "window", "lm-infinite", "self-extend", "yarn", "nope", "alibi"):
        cells = {}
        for record in records:
            if (record["checkpoint"], record["length"]) == (name, longest):
                cells[record["depth"]] = f"{record['accuracy']:.2f}"
        rows.append([name, *(cells[depth] for depth in DEPTHS)])
    return [
        "",
        "## Needles by depth",
        "",
        f"From reproduce.json ({board['note']}): the fraction of passkeys found in {longest} "
        "tokens, by depth (0: the start), of models trained on up to "
        f"{board['budget']['needle']['length']}. lm-infinite is a window with attention sinks.",
        "",
        *markdown_table(["", *map(str, DEPTHS)], rows),
    ]


def report_leaderboard(board):
    """Return the lines of claims on leaderboard.json, which leaderboard.md does not judge."""
    L = board["model"]["block_size"]
    orderings = Orderings(board["records"], L)
    pairs = {
        "Relative and absolute": [("shaw", "learned"), ("shaw", "sinusoidal"), ("xl", "learned")],
        "NEZHA": [("nezha", "shaw")],
        "RoPE": [("rope", pos) for pos in ("sinusoidal", "learned", "alibi", "t5", "shaw", "xl")],
    }
    for topic, names in pairs.items():
        for a, b in names:
            text = f"{a} below {b}, whole sequences, at L"
            orderings.compare(topic, text, (a, "chunked", L), (b, "chunked", L), below=0)
    topic = "Learned and sinusoidal"
    for a, b in (("learned", "sinusoidal"), ("sinusoidal", "learned")):
        text = f"{a} at most 10 % in perplexity above {b}, whole sequences, at L"
        orderings.compare(topic, text, (a, "chunked", L), (b, "chunked", L), below=TEN_PERCENT)
    topic = "Beyond the training length"
    for pos in ("shaw", "nezha", "xl", "alibi", "t5"):
        for times in (8, 32):
            text = f"{pos}, last quarter, {times}L against L: perplexity within 10 %"
            entries = [(pos, "last-quarter", length) for length in (times * L, L)]
            orderings.compare(topic, text, *entries, below=TEN_PERCENT)
    lines = ["", "## The leaderboard", "", f"From leaderboard.json ({board['note']}). L is {L}."]
    for topic, claims in orderings.claims.items():
        lines += ["", f"### {topic}", "", *(f"- {claim}" for claim in claims)]
    return lines


def write_report(board, out_dir):
    """Write claims.md, .json and .png, and print the tables."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / "claims.json", board, indent=1)
    lines = ["# Claims that no other experiment tests", "", f"`{board['command']}`: "]
    lines[-1] += f"{board['note']}. Values are means over the seeds with their 95 % intervals."
    lines += ["", f"Differences are paired by seed. {RULE}"]
    measured = next(iter(board["seeds"].values()))
    if "examples" in measured:
        lines += report_examples(board)
        plot_examples(board, out_dir / "claims.png")
    if "learned" in measured:
        lines += report_learned(board)
    if "attention" in measured:
        lines += report_attention(board)
    if "pairs" in measured:
        lines += report_pairs(board)
    for name, report in (("reproduce", report_needles), ("leaderboard", report_leaderboard)):
        if (RESULTS / f"{name}.json").is_file():
            lines += report(read_json(RESULTS / f"{name}.json"))
    text = "\n".join(lines) + "\n"
    (out_dir / "claims.md").write_text(text, encoding="utf-8")
    print(text)
