"""The report of experiments/papers/linear_attention.py: tables, claims and the figure."""

import math
import statistics

from experiments.papers.linear_attention import REFUSED
from experiments.papers.linear_attention_runs import EXTENSION, FACTORS, merge_ranges
from experiments.report import (
    RULE,
    Claim,
    confidence_interval,
    format_interval,
    markdown_table,
)
from nanolong.plots import import_pyplot
from nanolong.strict_json import write_json

ROPE, NOPE, BOTH = "linear rope", "linear nope", "linear rope, both rotated"


def select_losses(records, name, protocol, length):
    """Return seed -> loss, None where it is not finite."""
    losses = {}
    for record in records:
        if record["model"] == name:
            for scored in record["losses"]:
                if (scored["protocol"], scored["length"]) == (protocol, length):
                    losses[record["seed"]] = scored.get("loss")
    return losses


def names_of(records):
    """Return the names of the models."""
    return list(dict.fromkeys(record["model"] for record in records))


def format_losses(losses):
    """Return a table's cell: the mean and interval of those that are finite."""
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return "not finite"
    text = format_interval(finite)
    missing = len(losses) - len(finite)
    return f"{text} ({missing} not finite)" if missing else text


def loss_table(board, protocol):
    """Return a Markdown table: a line per model, a column per length."""
    L = board["model"]["block_size"]
    lengths = [factor * L for factor in FACTORS]
    header = ["", *(f"{n:,} ({n // L}x)" for n in lengths), "seconds of a run"]
    rows = []
    for name in names_of(board["records"]):
        row = [name]
        for length in lengths:
            losses = select_losses(board["records"], name, protocol, length)
            row.append(format_losses(list(losses.values())))
        seconds = [r["training_seconds"] for r in board["records"] if r["model"] == name]
        rows.append([*row, f"{statistics.fmean(seconds):.0f}"])
    return markdown_table(header, rows)


def denominator_table(board):
    """Return a Markdown table: a line per model, time and length; the ranges are over all seeds."""
    groups = {}
    for record in board["records"]:
        for measured in record["denominators"]:
            key = (record["model"], measured["when"], measured["length"])
            for kind in ("unrotated", "rotated"):
                if kind in measured:
                    groups.setdefault(key, {}).setdefault(kind, []).append(measured[kind])
    header = ["model", "when", "tokens", "unrotated: smallest"]
    header += ["rotated: smallest", "rotated: closest to 0", "rotated: negative"]
    rows = []
    for (name, when, length), kinds in groups.items():
        plain = merge_ranges(kinds["unrotated"])
        rotated = merge_ranges(kinds["rotated"])
        row = [name, when, f"{length:,}", f"{plain['smallest']:.3g}"]
        row += [f"{rotated['smallest']:,.3f}", f"{rotated['closest']:.1e}"]
        rows.append([*row, f"{rotated['negative'] / rotated['number']:.2%}"])
    return markdown_table(header, rows)


def divergence_table(board):
    """Return a Markdown table of the training of BOTH: a line per seed."""
    header = ["seed", "first loss", "lowest", "at step", "last", "ended"]
    rows = []
    for record in board["records"]:
        if record["model"] != BOTH:
            continue
        losses = record["training_losses"]
        ended = record.get("diverged", f"after all {len(losses)} steps")
        cells = ["–"] * 4
        if losses:
            lowest = min(losses)
            at_step = str(losses.index(lowest) + 1)
            cells = [f"{losses[0]:.3f}", f"{lowest:.3f}", at_step, f"{losses[-1]:.3f}"]
        rows.append([str(record["seed"]), *cells, ended])
    return markdown_table(header, rows)


def extension_table(board):
    """Return a Markdown table: a line per method, a column per model, the reasons at the end."""
    cells, reasons = {}, {}
    for record in board["records"]:
        for scored in record.get("extensions", ()):
            by_model = cells.setdefault(scored["method"], {})
            if "refused" in scored:
                reasons[record["model"], scored["method"]] = scored["refused"]
            by_model.setdefault(record["model"], []).append(scored.get("loss"))
    models = [name for name in ("softmax rope", ROPE) if any(name in row for row in cells.values())]
    rows = []
    for method, by_model in cells.items():
        row = [method]
        for name in models:
            refused = (name, method) in reasons
            row.append("refused" if refused else format_losses(by_model[name]))
        rows.append(row)
    lines = markdown_table(["method", *models], rows)
    for (name, method), reason in reasons.items():
        lines += ["", f"- {name}, `{method}`: {reason}"]
    return lines


def compare(records, text, a, b, length, above=None, below=None):
    """Return a Claim about the losses of model a minus those of b, paired by seed, or None.

    b: a name, or a number. Seeds whose loss is not finite are left out.
    """
    losses = select_losses(records, a, "chunked", length)
    others = dict.fromkeys(losses, b)
    if isinstance(b, str):
        others = select_losses(records, b, "chunked", length)
    differences = []
    for seed, loss in losses.items():
        if loss is not None and others.get(seed) is not None:
            differences.append(loss - others[seed])
    if not differences:
        return None
    return Claim(text, *confidence_interval(differences), above, below)


def judge(board):
    """Return the claims that could be judged."""
    records = board["records"]
    L = board["model"]["block_size"]
    pairs = (
        ("linear rope below linear nope", ROPE, NOPE, None, 0),
        ("softmax rope below linear rope", "softmax rope", ROPE, None, 0),
        ("both rotated above linear rope by 0.1", BOTH, ROPE, 0.1, None),
        ("both rotated above byte frequencies", BOTH, board["unigram_loss"], 0, None),
    )
    where = f"whole sequences of {L}"
    claims = [compare(records, f"{pair[0]}, {where}", *pair[1:3], L, *pair[3:]) for pair in pairs]
    return [claim for claim in claims if claim is not None]


def step_table(board):
    """Return a Markdown table of the times of a training step."""
    lengths = list(dict.fromkeys(step["length"] for step in board["steps"]))
    rows = []
    for name in dict.fromkeys(step["model"] for step in board["steps"]):
        row = [name]
        for step in (step for step in board["steps"] if step["model"] == name):
            row.append(f"{step['milliseconds']:.0f} ms ({step['ratio']:.2f})")
        rows.append(row)
    return markdown_table(["", *(f"{length:,} tokens" for length in lengths)], rows)


def describe_memory(board):
    """Return a sentence with the bytes of the state of one text, and of a KV cache, computed."""
    model = board["model"]
    D = model["n_embd"] // model["n_head"]
    heads = model["n_layer"] * model["n_head"]
    state = 4 * heads * (D * D + D)
    token = 4 * heads * 2 * D
    return (
        f"In generation the state takes {heads} x ({D} x {D} + {D}) float32, {state:,} bytes for "
        f"a text of any length; a KV cache takes {token:,} bytes per token, as much as the state "
        f"at {state / token:.1f} tokens and {token * 512 / state:.0f} times as much at 512. "
        "Computed, not measured; the ids of the tokens are not counted."
    )


ABOUT_DENOMINATORS = (
    "Over all heads, layers, tokens and seeds. The model with both rotated divides by the rotated "
    "ones, the others by the unrotated ones; the other columns are what they would be."
)
ABOUT_TIME = (
    "Forward and backward pass of as many tokens as a step has, not compiled: the median of 7 "
    "rounds, in each of which all models are timed in turn, and in brackets that of the ratios to "
    "the first one."
)
WHY_BOTH_FAIL = (
    "phi(q) and phi(k) have positive entries only, so their products, and any sum of them, are "
    "positive. A rotation R turns some entries negative, so that phi(q)^T R phi(k) has any sign: "
    "the sum over the keys may come close to zero or below, and the quotient is then of any size."
)
ABOUT_METHODS = (
    f"The RoPE models are extended {EXTENSION} times without fine-tuning; loss in the last quarter "
    "at the target length. The frequencies are those of softmax attention, as they are. A factor "
    "on cos and sin (yarn, longrope, resonance) is a temperature in softmax attention; here it "
    "multiplies the numerator alone, and so the output of attention, by its square. `longrope` has "
    "no table of its own: here it divides every pair by the factor."
)
ABOUT_ALONE = (
    "That RoPE alone of the relative schemes works in linear attention is the sources' claim. It "
    "holds for the schemes as they are defined, with a term inside the exponent of softmax. The "
    "differences of positions in alibi and the cosines in sandwich and xl could be kept in a "
    "state, but in the denominator they may be negative; in the exponent, alibi would be a decay "
    "of the state, which is another architecture. None of that was tried. learned and sinusoidal "
    "are no relative schemes: they leave attention alone, so nothing keeps them from working."
)


def report_lines(board):
    """Return the report as a list of lines."""
    model = ", ".join(f"{key}={value}" for key, value in board["model"].items())
    L, steps = board["model"]["block_size"], board["training"]["max_iters"]
    tokens = board["training"]["batch_size"] * L
    lines = ["# RoPE in linear attention", "", f"`{board['command']}`: {board['note']}.", ""]
    lines += [
        "o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m)^T phi(k_n),"
        " with phi = elu + 1 (Su et al. 2021, section 3.3). `both rotated`: the denominator, too. "
        f"Each model has {board['parameters'] / 1e6:.2f} M parameters ({model}) and trains for "
        f"{steps} steps of {tokens:,} tokens, on the same batches for all. Losses are in nats per "
        "token of held-out text: the mean over the seeds and its 95 % interval. A model of byte "
        f"frequencies alone has {board['unigram_loss']:.3f}.",
        "",
    ]
    table = loss_table(board, "last-quarter")
    lines += ["## Loss in the last quarter of the sequence", "", *table, ""]
    lines += ["![loss by length, and in training](linear_attention.png)", ""]
    lines += ["## Loss over whole sequences", "", *loss_table(board, "chunked"), ""]
    claims = [f"- {claim}" for claim in judge(board)]
    rule = f"Differences in nats, paired by seed, over finite losses. {RULE}"
    if steps < 500:
        claims, rule = [], f"Not judged: models trained for {steps} steps say nothing about them."
    lines += ["## Claims", "", rule, "", *claims, ""]
    if any(record["denominators"] for record in board["records"]):
        lines += ["## Denominators", "", ABOUT_DENOMINATORS, "", *denominator_table(board), ""]
    if BOTH in names_of(board["records"]):
        lines += ["## Both rotated", "", WHY_BOTH_FAIL, "", *divergence_table(board), ""]
    if any("extensions" in record for record in board["records"]):
        lines += ["## Extension methods", "", ABOUT_METHODS, "", *extension_table(board), ""]
    lines += ["## Time and memory", "", ABOUT_TIME, "", *step_table(board), ""]
    lines += [describe_memory(board), "", "## Refused schemes", "", ABOUT_ALONE, ""]
    lines += [f"- `{pos}`: {reason}" for pos, reason in REFUSED.items()]
    return lines


def write_report(board, out_dir):
    """Write linear_attention.md, .json and .png, and print the report."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / "linear_attention.json", board, indent=1)
    text = "\n".join(report_lines(board)) + "\n"
    (out_dir / "linear_attention.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    plot(board, out_dir / "linear_attention.png")


def plot(board, file):
    """Plot the last-quarter loss by length, and the training loss by step, of all models."""
    plt = import_pyplot(file)
    if plt is None:
        return
    figure, (by_length, by_step) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    L = board["model"]["block_size"]
    lengths = [factor * L for factor in FACTORS]
    for number, name in enumerate(names_of(board["records"])):
        color = f"C{number}"
        points = []
        for length in lengths:
            losses = select_losses(board["records"], name, "last-quarter", length).values()
            finite = [loss for loss in losses if loss is not None]
            if finite:
                points.append((length, *confidence_interval(finite)))
        x, mean, half_width = zip(*points, strict=True) if points else ((), (), ())
        error = [0 if math.isnan(width) else width for width in half_width]
        by_length.errorbar(x, mean, error, marker="o", capsize=3, color=color, label=name)
        for record in board["records"]:
            if record["model"] == name:
                by_step.plot(record["training_losses"], color=color, linewidth=0.7, alpha=0.7)
    for axis, title in ((by_length, "Last quarter of the sequence"), (by_step, "In training")):
        axis.set(title=title, ylabel="loss (nats per token)")
        axis.axhline(board["unigram_loss"], color="gray", linestyle=":")
        axis.grid(alpha=0.3)
        axis.set_ylim(top=min(axis.get_ylim()[1], 8))  # a failing model must not flatten the others
    by_length.set(xscale="log", xlabel="context length (tokens); trained at the shortest")
    by_length.set_xticks(lengths, [f"{length:,}" for length in lengths])
    by_length.minorticks_off()
    by_step.set_xlabel("step, a curve per seed")
    by_length.legend(fontsize=8, title="dotted: byte frequencies", title_fontsize=8)
    figure.supxlabel(board["note"], fontsize=6, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"wrote {file}")
