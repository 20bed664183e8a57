"""Test claims about position and length that no other experiment tests.

    python experiments/papers/claims.py                   three seeds
    python experiments/papers/claims.py --seeds=2,3       some: two processes may share the seeds
    python experiments/papers/claims.py --parts=examples  only some parts
    python experiments/papers/claims.py --budget=try      seconds, a test without meaning

Stop at any time: the same command continues where it stopped, and one with all seeds and parts
collects what several processes have measured. It writes claims.md, .json and .png to --out_dir.
There are four parts:

1. examples: do more examples in a longer prompt help? Each sample has a secret digit for each of a
   few keys, and shows examples one after another: a key with its digit, or, in half of them, with a
   random one. Before each example the model predicts the secret digit of its key from those before
   it. Models are trained on n examples and tested on 4n. The most that can be expected is the digit
   that was shown most often with the key.
2. learned: interpolate learned embeddings to 4 times their length, and fine-tune them there.
3. attention: how alike the attention of a model without positions is to that of other schemes.
4. pairs: leave RoPE's faster, or its slower, half of the pairs unrotated in a finished model.

Parts 2 to 4 use the text models of reproduce.py: --runs=out/reproduce takes those that are there.
The report also judges, without training, what leaderboard.json and reproduce.json of results/ hold.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import copy
import statistics
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from experiments.attention_maps import compare, distances, mean_of
from experiments.leaderboard import Orderings
from experiments.probe import sample_sequences
from experiments.report import (
    ROOT,
    RULE,
    TextExperiment,
    commits_of,
    count,
    effort,
    format_interval,
    grid,
    make_main,
    markdown_table,
    paired_claim,
    read_json,
    save_figure,
    section,
    select,
    title,
    topic_lines,
    train_on_samples,
)
from experiments.reproduce import DEPTHS, FACTOR, SeedRun, average_needles, extend, needle_lengths
from model import GPT, ContextLengthWarning, GPTConfig
from nanolong import cli
from nanolong.attention_maps import attention_maps

PARTS = ("examples", "learned", "attention", "pairs")


@dataclass
class ClaimsConfig(TextExperiment):
    budget: Literal["cpu", "try"] = "cpu"  # sizes
    seeds: tuple[int, ...] = (1, 2, 3)  # which runs
    parts: tuple[Literal["examples", "learned", "attention", "pairs"], ...] = PARTS
    # dtype of matrix products; part 1 is always in float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


# Part 1: examples in training and keys of a table; the size of the model and its training; samples
# of the test.
EXAMPLES = {
    "cpu": {
        "examples": 16,
        "keys": 4,
        "model": {"n_layer": 2, "n_head": 4, "n_embd": 64},
        "steps": 600,
        "tuning_steps": 60,
        "batch_size": 64,
        "samples": 256,
    },
    "try": {
        "examples": 12,
        "keys": 3,
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16},
        "steps": 4,
        "tuning_steps": 2,
        "batch_size": 8,
        "samples": 8,
    },
}
# Of the RoPE model. The last one is fine-tuned, too.
EXTENSIONS = ("none", "window", "lm-infinite", "self-extend", "yarn")

# -----------------------------------------------------------------------------
# Part 1: examples


def make_examples(n, keys, batch_size, seed):
    """Make samples of n examples each; return inputs and targets, int64 (B, 2n).

    An example is two tokens: a key, where its secret digit is the target, and the key with the
    digit that is shown, which is right in half of the cases and random in the others. Tokens 0 to 9
    are the digits, which are only targets; then come the keys, then each key with each digit.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(keys, (batch_size, n), generator=generator)
    digit_of = torch.randint(10, (batch_size, keys), generator=generator)
    secret = digit_of.gather(1, chosen)
    is_right = torch.rand((batch_size, n), generator=generator) < 0.5
    shown = torch.randint(10, (batch_size, n), generator=generator).where(~is_right, secret)
    inputs = torch.stack((10 + chosen, 10 + keys + 10 * chosen + shown), 2).flatten(1)
    targets = torch.full_like(inputs, -1)
    targets[:, 0::2] = secret
    return inputs, targets


def most_shown(inputs, targets, keys):
    """Return the accuracy of the digit most shown with the key before, by example: (n,).

    Of several that were shown equally often, one is guessed.
    """
    chosen, secret = inputs[:, 0::2], targets[:, 0::2]
    shown = (inputs[:, 1::2] - 10 - keys) % 10
    same_key = (chosen[:, :, None] == chosen[:, None]).tril(-1).float()  # (B, n, n)
    times_shown = same_key @ F.one_hot(shown, 10).float()  # (B, n, 10)
    is_most = (times_shown == times_shown.amax(-1, keepdim=True)).float()
    probability = is_most / is_most.sum(-1, keepdim=True)
    return probability.gather(-1, secret[..., None])[..., 0].mean(0)


def train_examples(model, run, n, batch_size, steps, learning_rate, first_seed):
    """Train a GPT in place, on samples of its own; products are in float32."""
    keys = EXAMPLES[run.cfg.budget]["keys"]

    def make_batch(step):
        return make_examples(n, keys, batch_size, first_seed + step)

    run_on = (run.device, torch.float32)
    train_on_samples(model, make_batch, steps, learning_rate, 50, run_on)


@torch.no_grad()
def example_accuracy(model, run, x, y):
    """Return the accuracy of the predicted digits by example: a list of 4n."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        predicted = torch.cat([model(part.to(run.device)).argmax(-1).cpu() for part in x.split(64)])
    return (predicted == y)[:, 0::2].float().mean(0).tolist()


def example_accuracies(run, pos):
    """Train a model and test it, of RoPE with every extension: name -> accuracies."""
    budget = EXAMPLES[run.cfg.budget]
    n, batch_size = budget["examples"], budget["batch_size"]
    torch.manual_seed(run.seed)
    vocab_size = 10 + 11 * budget["keys"]
    config = GPTConfig(pos=pos, **budget["model"], block_size=2 * n, vocab_size=vocab_size)
    model = GPT(config).to(run.device)
    seed = run.seed << 32
    train_examples(model, run, n, batch_size, budget["steps"], 3e-3, seed)
    x, y = make_examples(FACTOR * n, budget["keys"], budget["samples"], 1)
    if pos != "rope":
        model.extend("none", FACTOR)
        return {pos: example_accuracy(model, run, x, y)}

    accuracies = {"digit most shown": most_shown(x, y, budget["keys"]).tolist()}
    for name in EXTENSIONS:
        extended = copy.deepcopy(model)
        extend(extended, name)
        accuracies[f"rope, {name}"] = example_accuracy(extended, run, x, y)
    steps = budget["tuning_steps"]
    seed += budget["steps"]  # the samples of pretraining do not return
    train_examples(extended, run, FACTOR * n, batch_size // FACTOR, steps, 5e-4, seed)
    accuracies[f"rope, {name}, fine-tuned"] = example_accuracy(extended, run, x, y)
    return accuracies


# -----------------------------------------------------------------------------
# Parts 2 to 4: the text models of reproduce.py


def learned_losses(run):
    """Interpolate learned embeddings and fine-tune: name -> last-quarter loss at [L, 4L]."""

    def losses(model, *lengths):
        return [statistics.fmean(run.last_quarter_losses(model, length)) for length in lengths]

    model = run.text_model("learned")
    target = FACTOR * run.length
    found = {"untouched": losses(model, run.length)}
    model.extend("pi", FACTOR)
    steps = run.budget["tuning_steps"]
    batch_size = run.budget["batch_size"] // FACTOR
    for step in run.fine_tune(model, steps[-1], batch_size, target, 1e-3):
        if step in steps:
            found[f"interpolated, {count(step, 'step')}"] = losses(model, run.length, target)
    return found


def attention_records(run):
    """Compare the attention of each scheme with NoPE's: scheme -> its record."""
    nope = run.text_model("nope")
    records = {}
    for pos in ("nope", "t5", "alibi", "rope", "learned"):
        model = run.text_model(pos)
        heads = distances(model, run.dataset, pos, run.length, seed=run.seed)
        layers, _ = compare(nope, model, run.dataset, run.length, 32, run.seed)
        records[pos] = {
            "divergence": layers.mean().item(),
            "distance": mean_of(heads, "distance"),
            "histogram": mean_of(heads, "histogram"),
        }
    return records


def unrotated_records(run):
    """Leave half of RoPE's pairs unrotated: name -> the loss, and attention to the token before."""
    model = run.text_model()
    inv_freq = model.pos.inv_freq  # the fastest pair first
    half = len(inv_freq) // 2
    tokens, _ = sample_sequences(run.dataset.val, run.length, 32, run.seed)
    records = {}
    cases = {"none": slice(0), "faster": slice(half), "slower": slice(half, None)}
    for name, pairs in cases.items():
        model.pos.inv_freq = inv_freq.clone()
        model.pos.inv_freq[pairs] = 0
        maps = torch.stack(attention_maps(model, tokens))  # (layers, B, H, T, T)
        before = maps.diagonal(-1, -2, -1).mean((1, 3))  # (layers, H)
        records[name] = {
            "loss": statistics.fmean(run.last_quarter_losses(model, run.length)),
            "before": before.max().item(),
        }
    return records


# -----------------------------------------------------------------------------
# All parts


def measure_seed(run, parts):
    found = {}
    if "examples" in parts:
        found["examples"] = {}
        steps = EXAMPLES[run.cfg.budget]["steps"]
        for pos in ("rope", "nope", "alibi"):
            name = f"examples {pos}, {count(steps, 'step')}"
            found["examples"] |= run.measure(name, example_accuracies, run, pos)
    for part, name, function in (
        ("learned", "learned, interpolated", learned_losses),
        ("attention", "attention", attention_records),
        ("pairs", "unrotated pairs", unrotated_records),
    ):
        if part in parts:
            found[part] = run.measure(name, function, run)
    return found


def measure(cfg):
    dataset = cfg.load_dataset()
    runs = [SeedRun(cfg, seed, dataset) for seed in cfg.seeds]
    found = {str(run.seed): measure_seed(run, cfg.parts) for run in runs}
    return {
        "note": (
            f"{cfg.note(dataset, commits_of(runs))}; {effort(runs)}; scored: "
            f"{runs[0].budget['max_tokens']:,} tokens, spread over the validation text"
        ),
        "examples": EXAMPLES[cfg.budget],
        "text_models": runs[0].budget,
        "seeds": found,  # by their numbers
    }


# -----------------------------------------------------------------------------
# The report


RESULTS = ROOT / "results"
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
    return f"- {paired_claim(text, dict(enumerate(a)), dict(enumerate(b)), **bound)}"


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
    settings = board["examples"]
    n = settings["examples"]
    groups = example_groups(n)

    def accuracies(name, title):
        curves = values_of(board, "examples", name)
        return [sum(curve[groups[title]]) / len(curve[groups[title]]) for curve in curves]

    names = list(values_of(board, "examples")[0])

    def cell(name, title):
        return format_interval(accuracies(name, title), 2)

    table = grid(names, {title: title for title in groups}, cell)
    _, within, *_, longest = groups
    pairs = {}
    for name in names[1:]:
        text = f"{name}: accuracy at examples {longest} above that at {within}"
        pairs[text] = (name, longest), (name, within)
    for better, worse in (("yarn", "none"), ("yarn", "window"), ("yarn, fine-tuned", "window")):
        text = f"rope, {better} above {worse}, at examples {longest}"
        pairs[text] = (f"rope, {better}", longest), (f"rope, {worse}", longest)
    claims = []
    for text, (a, b) in pairs.items():
        claims.append(claim_difference(text, accuracies(*a), accuracies(*b), above=0))
    return section(
        "More examples in a longer prompt",
        f"Fraction of right digits by the number of the example, after {settings['steps']:,} steps "
        f"of {settings['batch_size']} samples of {n} examples with {settings['keys']} keys; tested "
        f"on {FACTOR * n} examples. Fine-tuned: {settings['tuning_steps']} steps of "
        f"{settings['batch_size'] // FACTOR} samples of {FACTOR * n}. The first line is the digit "
        "that was shown most often with the key; a guess scores 0.1.",
        table,
        "![accuracy by number of examples](claims.png)",
        claims,
    )


def plot_examples(board, folder):
    """Plot the mean accuracy of the seeds by number of examples to a PNG."""
    if "examples" not in next(iter(board["seeds"].values())):
        return
    n = board["examples"]["examples"]

    def draw(figure, axes):
        for i, name in enumerate(values_of(board, "examples")[0]):
            curves = values_of(board, "examples", name)
            means = [sum(column) / len(column) for column in zip(*curves, strict=True)]
            # Single examples are noisy: each point is the mean of as many as training has eighths.
            width = max(1, n // 8)
            ends = range(width, len(means) + 1, width)
            points = [sum(means[end - width : end]) / width for end in ends]
            style = {"linestyle": "--" if name == "digit most shown" else "-", "color": f"C{i}"}
            axes.plot(list(ends), points, marker="osD^vP*X"[i % 8], label=name, **style)
        axes.axvline(n, color="gray", linestyle=":", linewidth=1)
        axes.set(title="Accuracy by number of examples; training ends at the dotted line")
        axes.set(xlabel="examples", ylabel="fraction of right digits", ylim=(0, 1))
        figure.legend(loc="outside right upper", fontsize=8)

    save_figure(folder / "claims.png", draw, (9.5, 5), board["note"], dpi=110)


def report_learned(board):
    L = board["text_models"]["model"]["block_size"]
    names = list(values_of(board, "learned")[0])

    def cell(name, place):
        losses = values_of(board, "learned", name)
        return format_interval([loss[place] for loss in losses]) if place < len(losses[0]) else "–"

    table = grid(names, {f"at {L}": 0, f"at {FACTOR * L}": 1}, cell)
    untouched = [losses[0] for losses in values_of(board, "learned", names[0])]
    claims = []
    for name in (names[1], names[-1]):
        at_target = [losses[1] for losses in values_of(board, "learned", name)]
        text = f"{name}, at {FACTOR * L}: perplexity within 10 % of that untouched at {L}"
        claims.append(claim_difference(text, at_target, untouched, below=TEN_PERCENT))
    return section(
        "Learned embeddings, interpolated",
        f"Last-quarter loss, nats per token, of models trained at {L} tokens as in reproduce.md, "
        "where RoPE's are.",
        table,
        claims,
    )


def report_attention(board):
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
    return section(
        "Attention without positions",
        "Jensen-Shannon divergence in nats (0 to 0.693) of the closest heads of a layer, mean over "
        "the layers; mean attended distance in tokens; and the probability in three of ten equal "
        "parts of the distance, relative to the position. Text models at their training length "
        "(`experiments/attention_maps.py`).",
        markdown_table(header, rows),
        claims,
    )


def report_pairs(board):
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
    return section(
        "RoPE's faster and slower pairs",
        "A finished model, half of whose pairs are not rotated: last-quarter loss at the training "
        "length, and the attention to the token before, of the head with most of it.",
        markdown_table(["not rotated", "loss", "attention to the token before"], rows),
        claims,
    )


# -----------------------------------------------------------------------------
# What other experiments have measured


def report_needles(board):
    """Return the lines of the needles by depth, of reproduce.json."""
    longest = needle_lengths(board["budget"]["needle"]["length"])[-1]
    records = average_needles(board)
    rows = []
    for name in ("none", "window", "lm-infinite", "self-extend", "yarn", "nope", "alibi"):
        found = select(records, checkpoint=name, length=longest)
        cells = {record["depth"]: f"{record['accuracy']:.2f}" for record in found}
        rows.append([name, *(cells[depth] for depth in DEPTHS)])
    return section(
        "Needles by depth",
        f"From reproduce.json ({board['note']}): the fraction of passkeys found in {longest} "
        "tokens, by depth (0: the start), of models trained on up to "
        f"{board['budget']['needle']['length']}. lm-infinite is a window with attention sinks.",
        markdown_table(["", *map(str, DEPTHS)], rows),
    )


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
            orderings.order(topic, a, "below", b, "chunked")
    topic = "Learned and sinusoidal"
    for a, b in (("learned", "sinusoidal"), ("sinusoidal", "learned")):
        text = f"{a} at most 10 % in perplexity above {b}, whole sequences, at L"
        orderings.compare(topic, text, (a, "chunked", L), (b, "chunked", L), below=TEN_PERCENT)
    topic = "Beyond the training length"
    for pos in ("shaw", "nezha", "xl", "alibi", "t5"):
        for factor in (8, 32):
            orderings.degrade(topic, pos, "last-quarter", factor, "within 10 %", below=TEN_PERCENT)
    text = f"From leaderboard.json ({board['note']}). L is {L}."
    return section("The leaderboard", text, topic_lines(orderings.claims))


def report(board):
    lines = title(board, "Claims that no other experiment tests")
    lines[-1] += " Values are means over the seeds with their 95 % intervals."
    lines += ["", f"Differences are paired by seed. {RULE}"]
    reports = (report_examples, report_learned, report_attention, report_pairs)
    for part, report_part in zip(PARTS, reports, strict=True):
        if part in next(iter(board["seeds"].values())):
            lines += report_part(board)
    for name, report_part in (("reproduce", report_needles), ("leaderboard", report_leaderboard)):
        if (RESULTS / f"{name}.json").is_file():
            lines += report_part(read_json(RESULTS / f"{name}.json"))
    return lines


main = make_main(ClaimsConfig, measure, report, plot_examples)

if __name__ == "__main__":
    cli.run_main(main)
