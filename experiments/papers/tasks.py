"""Length generalisation on small algorithmic tasks: train on short samples, test on longer ones.

    python experiments/papers/tasks.py                  nine tasks, five schemes, three seeds
    python experiments/papers/tasks.py --pos=nope,rope --tasks=copy,reverse    only some
    python experiments/papers/tasks.py --budget=gpu     a larger model and batch, 4 times the steps

The default is 135 runs of some minutes each. Stop at any time: the same command continues after the
last finished run. Each run leaves its measurements in out/tasks, so that two processes may share
the work by --tasks or --pos; the results go to tasks.md, .json and .png in --out_dir.

A sample is `<bos> x <sep> y <eos>`; only y and <eos> are scored (after Kazemnejad et al. 2023). The
tasks, by what `length` counts:
  copy        x: that many digits; y: the same digits
  reverse     y: the same digits in reverse order
  addition    x: two numbers of that many digits, least significant first, as in 12+93;
              y: their sum, likewise, with one digit more
  addition-8  the same, with at most 8 digits in training
  scratchpad  the same, but y first writes out each place: both digits, the sum's digit, the carry
  carries     the same, but of each place y first writes the sum's digit and the carry only
  majority    x: that many letters; y: the one that occurs most. Needs no order.
  span        x: that many digits with two markers among them, as in 83|19|4;
              y: what stands between the markers. Needs order.
  recall      x: that many pairs of a key and a digit; y: half of the keys, each followed by its
              digit. The keys in y are the questions and are not scored.

Training samples are generated at every step as a function of (task, seed, step). Test samples are
the same for all runs; of the shortest there are so few that training has seen them. Training uses
lengths 1 to 20 and the tests 21 to 40 (scratchpad 8 and 16, as in the paper, and likewise what it
is compared with; recall 20 and 80).

The score is exact match: the fraction of samples that are right from the first token of y to <eos>;
of recall, the fraction of right answers. `learned` gets an embedding for every tested position: as
in the paper, those beyond the training length keep their initial values. All other schemes are
built for the training length, so that T5's last bucket, for example, occurs in training.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import math
import random
import statistics
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from experiments.report import (
    RULE,
    Experiment,
    check_names,
    claim_lines,
    confidence_interval,
    count,
    format_interval,
    format_settings,
    grid,
    make_main,
    markdown_table,
    measure_run,
    paired_claim,
    run_all,
    save_figure,
    section,
    select,
    title,
    train_on_samples,
)
from model import GPT, POSITIONS, ContextLengthWarning, GPTConfig
from nanolong import cli
from nanolong.devices import autocast, prepare_device
from nanolong.plots import unique
from nanolong.provenance import provenance
from nanolong.validate import require


@dataclass
class TasksConfig(Experiment):
    pos: tuple[str, ...] = ("nope", "rope", "alibi", "t5", "learned")  # position schemes
    tasks: tuple[str, ...] = ()  # names of the tasks; default: all
    # cpu: 0.45 M parameters; gpu: 0.8 M, four times the steps and the batch; try: seconds, a test
    budget: Literal["cpu", "gpu", "try"] = "cpu"
    seeds: int = 3  # runs of each task and scheme
    steps: int = 0  # training steps of a run; 0: as the budget says
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of matrix products

    def __post_init__(self):
        super().__post_init__()
        check_names("task", self.tasks, TASKS)


# Settings of the model and its training, and how many samples of each length test it.
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96},
        "training": {"steps": 1500, "batch_size": 64, "learning_rate": 1e-3, "warmup": 100},
        "samples": 64,
    },
    "gpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 128},
        "training": {"steps": 6000, "batch_size": 256, "learning_rate": 5e-4, "warmup": 200},
        "samples": 256,
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "training": {"steps": 20, "batch_size": 8, "learning_rate": 1e-3, "warmup": 5},
        "samples": 4,
    },
}

# -----------------------------------------------------------------------------
# The tasks. Each is a function of a random.Random and a length that returns x and y, lists of
# token ids.

SYMBOLS = [*"0123456789abcd+|,", "<bos>", "<sep>", "<eos>"]  # a digit is its own token id
LETTERS = range(10, 14)
PLUS, MARK, COMMA, BOS, SEP, EOS = range(14, 20)
KEYS = range(20, 120)  # of recall, after the symbols


def copy(rng, length):
    x = rng.choices(range(10), k=length)
    return x, x


def reverse(rng, length):
    x = rng.choices(range(10), k=length)
    return x, x[::-1]


def addition(rng, length):
    a = rng.choices(range(10), k=length)
    b = rng.choices(range(10), k=length)
    total = []
    carry = 0
    for i, j in zip(a, b, strict=True):
        carry, digit = divmod(i + j + carry, 10)
        total.append(digit)
    return [*a, PLUS, *b], [*total, carry]


def scratchpad(rng, length, writes_operands=True):
    x, total = addition(rng, length)
    a, b = x[:length], x[length + 1 :]
    places = []
    carry = 0
    for i, j, digit in zip(a, b, total[:length], strict=True):
        carry = (i + j + carry) // 10
        operands = [i, j] if writes_operands else []
        places += [*operands, digit, carry, COMMA]
    return x, [*places, MARK, *total]


def carries(rng, length):
    return scratchpad(rng, length, writes_operands=False)


def majority(rng, length):
    while True:
        x = rng.choices(LETTERS, k=length)
        counts = Counter(x).most_common(2)
        if len(counts) == 1 or counts[0][1] > counts[1][1]:
            return x, [counts[0][0]]


def span(rng, length):
    digits = rng.choices(range(10), k=length)
    start, end = sorted(rng.sample(range(length + 1), 2))
    x = [*digits[:start], MARK, *digits[start:end], MARK, *digits[end:]]
    return x, digits[start:end]


def recall(rng, length):
    keys = rng.sample(KEYS, length)
    digits = rng.choices(range(10), k=length)
    pairs = list(zip(keys, digits, strict=True))
    asked = rng.sample(pairs, math.ceil(length / 2))
    x = [token for pair in pairs for token in pair]
    y = [token for pair in asked for token in pair]
    return x, y


@dataclass
class Task:
    make_sample: Callable
    train_length: int  # the longest in training
    test_length: int  # the longest in the tests
    tokens: tuple[int, int]  # of x and y together, at most: for each unit of length, and more
    chance: float = 0.0  # the score of a guess, where it is more than next to nothing


TASKS = {
    "copy": Task(copy, 20, 40, (2, 0)),
    "reverse": Task(reverse, 20, 40, (2, 0)),
    # two numbers, a plus sign, a sum of one digit more
    "addition": Task(addition, 20, 40, (3, 2)),
    "addition-8": Task(addition, 8, 16, (3, 2)),
    # addition's, five tokens for each place, and a marker
    "scratchpad": Task(scratchpad, 8, 16, (8, 3)),
    "carries": Task(carries, 8, 16, (6, 3)),  # three tokens for each place
    "majority": Task(majority, 20, 40, (1, 1), chance=0.25),
    "span": Task(span, 20, 40, (2, 2)),  # the markers may enclose all digits
    "recall": Task(recall, 20, 80, (3, 0), chance=0.1),  # of an odd length one more
}
PAPER_TASKS = ("copy", "reverse", "addition")  # those of the paper's claim, below
SCRATCHPADS = ("scratchpad", "carries")  # two formats, compared with addition-8


def max_tokens(task, length):
    """Return how many tokens x and y have together, at most."""
    per_unit, more = TASKS[task].tokens
    return per_unit * length + more + (length % 2 if task == "recall" else 0)


def score_name(task):
    return "accuracy" if task == "recall" else "exact"


def make_batch(task, lengths, rng):
    """Make a sample of each length; return inputs and targets, int64 (B, T).

    Targets of x, of recall's questions, and of the padding on the right are -1.
    """
    inputs, targets = [], []
    for length in lengths:
        x, y = TASKS[task].make_sample(rng, length)
        inputs.append([BOS, *x, SEP, *y])
        answers = [-1 if token in KEYS else token for token in y]
        targets.append([-1] * (len(x) + 1) + [*answers, EOS])
    return pad(inputs, EOS), pad(targets, -1)


def pad(rows, value):
    """Return lists of unequal lengths as one int64 tensor, padded on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def training_batch(task, seed, step, batch_size):
    """Make the batch of one training step, of lengths 1 to the longest trained, uniformly."""
    rng = random.Random(f"{task} {seed} {step}")
    lengths = rng.choices(range(1, TASKS[task].train_length + 1), k=batch_size)
    return make_batch(task, lengths, rng)


# -----------------------------------------------------------------------------
# A run: train, and test at every length.


def make_config(task, pos, settings):
    """Return the GPTConfig of a run.

    Its context is the longest training sample, or, for a table of positions, the longest test.
    """
    length = TASKS[task].train_length
    if POSITIONS[pos].bounded:
        length = TASKS[task].test_length
    return GPTConfig(
        pos=pos,
        **settings,
        block_size=max_tokens(task, length) + 2,  # <bos> and <sep>; <eos> is only a target
        vocab_size=KEYS.stop if task == "recall" else len(SYMBOLS),
    )


def train(model, task, seed, steps, batch_size, learning_rate, warmup, device, dtype):
    """Train a GPT in place; return the mean loss of the last tenth of the steps, in nats."""
    prepare_device(device)

    def make_batch(step):
        return training_batch(task, seed, step, batch_size)

    run_on = (device, dtype)
    rates = (learning_rate, warmup)
    losses = train_on_samples(model.to(device), make_batch, steps, *rates, run_on, 0.05)
    mean_loss = losses[steps * 9 // 10 :].mean().item()
    require(
        math.isfinite(mean_loss),
        f"{task} with --pos={model.config.pos}, seed {seed}: the loss is not finite: "
        "try --dtype=float32, or another number of --steps",
    )
    return mean_loss


@torch.no_grad()
def score(predict, task, samples, device, dtype=torch.float32):
    """Test at every length, 1 to the longest; return a record for each.

    predict: a GPT, or any function from tokens (B, T) to logits (B, T, V).

    "exact" is the fraction of samples that are all right, "accuracy" that of the scored tokens of y
    without <eos>. Tokens are predicted by argmax after the right ones before them. That is no
    easier than greedy decoding: up to the first mistake both see the same tokens, so a sample is
    all right in one exactly when it is in the other.
    """
    records = []
    for length in range(1, TASKS[task].test_length + 1):
        x, y = make_batch(task, [length] * samples, random.Random(f"{task} test {length}"))
        x = x.to(device)
        y = y.to(device)
        with autocast(device, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextLengthWarning)
            correct = predict(x).argmax(-1) == y
        exact = (correct | (y < 0)).all(1)
        answers = (y >= 0) & (y != EOS)
        record = {"length": length, "exact": exact.float().mean().item()}
        records.append({**record, "accuracy": correct[answers].float().mean().item()})
    return records


def run_task(task, pos, seed, cfg):
    """Train and test one run, or read what it has left in its file: a record for each length."""
    budget = BUDGETS[cfg.budget]
    training = dict(budget["training"])
    if cfg.steps:
        training["steps"] = cfg.steps
    config = make_config(task, pos, budget["model"])
    # A change in how samples are made changes the first batch, and so makes another run.
    first_batch, _ = training_batch(task, seed, 0, training["batch_size"])
    key = {
        "model": asdict(config),
        "training": training,
        "samples": budget["samples"],
        "first_batch": zlib.crc32(first_batch.numpy().tobytes()),
    }

    def train_and_score():
        device, dtype = cfg.pick_device()
        if dtype == torch.float16:  # which would need loss scaling
            dtype = torch.float32
        torch.manual_seed(seed)
        model = GPT(config)
        loss = train(model, task, seed, **training, device=device, dtype=dtype)
        records = []
        for record in score(model, task, budget["samples"], device, dtype):
            records.append({"task": task, "pos": pos, "seed": seed, **record})
        within, beyond = (mean_scores(records, task, pos, part)[seed] for part in (False, True))
        print(
            f"   loss {loss:.3f}, {score_name(task)} {within:.3f} within the training length, "
            f"{beyond:.3f} beyond it"
        )
        return records

    file = Path(cfg.runs) / cfg.budget / f"{task}-{pos}-{seed}.json"
    return measure_run(file, key, train_and_score)


# -----------------------------------------------------------------------------
# The results.


def mean_scores(records, task, pos, beyond):
    """Return seed -> the mean score over the trained lengths, or over the lengths beyond them."""
    scores = {}
    for record in select(records, task=task, pos=pos):
        if (record["length"] > TASKS[task].train_length) == beyond:
            scores.setdefault(record["seed"], []).append(record[score_name(task)])
    return {seed: statistics.fmean(values) for seed, values in scores.items()}


def mean_reciprocal_ranks(records, tasks, schemes):
    """Return scheme -> 1 / its rank beyond the training length, averaged over the tasks.

    Schemes with equal scores share the middle one of their ranks.
    """
    reciprocals = {pos: [] for pos in schemes}
    for task in tasks:
        means = {}
        for pos in schemes:
            means[pos] = statistics.fmean(mean_scores(records, task, pos, beyond=True).values())
        for pos in schemes:
            others = [means[other] for other in schemes if other != pos]
            better = sum(mean > means[pos] for mean in others)
            equal = sum(mean == means[pos] for mean in others)
            reciprocals[pos].append(1 / (1 + better + equal / 2))
    return {pos: statistics.fmean(values) for pos, values in reciprocals.items()}


def group_means(records, tasks, schemes):
    """Return seed -> the mean score beyond the training length, of some schemes over some tasks."""
    scores = [mean_scores(records, task, pos, beyond=True) for pos in schemes for task in tasks]
    return {seed: statistics.fmean(s[seed] for s in scores) for seed in scores[0]}


def judge(records, tasks, schemes):
    """Return the claim of the paper, or None if its schemes or tasks were not run.

    NoPE and T5 lie above RoPE and learned positions beyond the training length, on average over the
    paper's tasks; the differences are paired by seed.
    """
    tasks = [task for task in PAPER_TASKS if task in tasks]
    if not tasks or not {"nope", "t5", "rope", "learned"} <= set(schemes):
        return None
    text = (
        "nope and t5 above rope and learned (Kazemnejad et al. 2023), exact match beyond the "
        f"training length, mean of {', '.join(tasks)}"
    )
    above = group_means(records, tasks, ["nope", "t5"])
    below = group_means(records, tasks, ["rope", "learned"])
    return paired_claim(text, above, below, above=0)


def judge_scratchpads(records, tasks, schemes):
    """Return the claims that a scratchpad helps addition to longer numbers, one for each format.

    They are on the mean over the schemes, paired by seed. A format that was not run is left out.
    """
    claims = []
    for task in SCRATCHPADS:
        if {task, "addition-8"} <= set(tasks):
            text = f"{task} above addition-8, exact match at 9 to 16 digits, mean over the schemes"
            scores, others = (group_means(records, [t], schemes) for t in (task, "addition-8"))
            claims.append(paired_claim(text, scores, others, above=0))
    return claims


def score_table(records, tasks, schemes, beyond):
    """Return a Markdown table: a line per task, a column per scheme."""
    rows = []
    for task in tasks:
        trained = TASKS[task].train_length
        lengths = f"{trained + 1} to {TASKS[task].test_length}" if beyond else f"1 to {trained}"
        scores = [mean_scores(records, task, pos, beyond).values() for pos in schemes]
        rows.append([task, lengths, *map(format_interval, scores)])
    return markdown_table(["", "lengths", *schemes], rows)


def select_scores(records, task, pos, length):
    found = select(records, task=task, pos=pos, length=length)
    return [record[score_name(task)] for record in found]


def recall_table(records, schemes):
    """Return a Markdown table of recall: the fraction of right answers by the number of pairs."""
    lengths = {f"{length}": length for length in (1, 5, 10, 20, 30, 40, 60, 80)}

    def cell(pos, length):
        return format_interval(select_scores(records, "recall", pos, length))

    return grid(schemes, lengths, cell)


def plot_scores(board, folder):
    """Plot the score by length to a PNG: a panel per task, a line per scheme with its interval."""
    records = board["records"]
    tasks = unique(records, "task")
    columns = min(4, len(tasks))
    rows = math.ceil(len(tasks) / columns)

    def draw(figure, *panels):
        for panel in panels[len(tasks) :]:
            panel.axis("off")
        for task, panel in zip(tasks, panels, strict=False):
            draw_task(panel, task, records)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)
        figure.suptitle("Trained up to the dashed line; dotted: chance", fontsize=9)

    size = (max(6, 4 * columns), 3.4 * rows + 0.6)
    save_figure(folder / "tasks.png", draw, size, board["note"], panels=(rows, columns))


def draw_task(panel, task, records):
    lengths = range(1, TASKS[task].test_length + 1)
    for i, pos in enumerate(unique(records, "pos")):
        curve = [confidence_interval(select_scores(records, task, pos, n)) for n in lengths]
        panel.plot(lengths, [mean for mean, _ in curve], color=f"C{i % 10}", label=pos)
        low = [max(0, mean - half_width) for mean, half_width in curve]
        high = [min(1, mean + half_width) for mean, half_width in curve]
        panel.fill_between(lengths, low, high, color=f"C{i % 10}", alpha=0.15, linewidth=0)
    panel.axvline(TASKS[task].train_length + 0.5, color="gray", linestyle="--", linewidth=1)
    panel.axhline(TASKS[task].chance, color="gray", linestyle=":", linewidth=1)
    panel.set(title=task, ylim=(-0.03, 1.03), xlabel="length", ylabel="exact match")
    if task == "recall":
        panel.set(xlabel="pairs in x", ylabel="fraction of right answers")
    panel.xaxis.get_major_locator().set_params(integer=True)


def describe_runs(cfg, schemes):
    """Return the paragraph that says what was trained and what the tables show."""
    budget = BUDGETS[cfg.budget]
    training = budget["training"]
    models = [GPT(make_config("copy", pos, budget["model"])) for pos in schemes]
    largest = max(sum(p.numel() for p in model.parameters()) for model in models)
    model = format_settings(budget["model"])
    chances = [f"{task.chance:g} of {name}" for name, task in TASKS.items() if task.chance]
    return (
        f"Each run has {largest / 1e6:.2f} M parameters at most ({model}) and trains for "
        f"{cfg.steps or training['steps']:,} steps of {training['batch_size']} samples with AdamW "
        f"at {training['learning_rate']:g}, on the same samples for all schemes. The score is "
        "exact match, and of recall the fraction of right answers: its mean over the lengths, then "
        f"its mean over the seeds and the 95 % interval. A guess scores {', '.join(chances)}, and "
        "next to nothing of the others. The embeddings that `learned` has beyond the training "
        "length keep their initial values."
    )


def judge_all(records):
    tasks, schemes = unique(records, "task"), unique(records, "pos")
    claims = [judge(records, tasks, schemes), *judge_scratchpads(records, tasks, schemes)]
    return [claim for claim in claims if claim is not None]


def measure(cfg):
    schemes, tasks = cfg.pos, cfg.tasks or tuple(TASKS)
    seeds = range(1, cfg.seeds + 1)
    runs = [(task, pos, seed) for seed in seeds for task in tasks for pos in schemes]
    records = run_all(runs, run_task, cfg)
    device, _ = cfg.pick_device()
    samples = BUDGETS[cfg.budget]["samples"]
    return {
        "note": (
            f"{provenance(device)}; {count(cfg.seeds, 'seed')}, {samples} samples of each length"
        ),
        "about": describe_runs(cfg, schemes),
        "orderings": [str(claim) for claim in judge_all(records)],
        "reciprocal_ranks": mean_reciprocal_ranks(records, tasks, schemes),
        "records": records,
    }


def report(board):
    records, ranks = board["records"], board["reciprocal_ranks"]
    tasks, schemes = unique(records, "task"), unique(records, "pos")
    beyond = score_table(records, tasks, schemes, beyond=True)
    within = score_table(records, tasks, schemes, beyond=False)
    lines = [*title(board, "Length generalisation"), "", board["about"]]
    lines += section("Beyond the training length", beyond, "![score by length](tasks.png)")
    lines += section("Within the training length", within)
    if "recall" in tasks:
        table = recall_table(records, schemes)
        lines += section("Recall by the number of pairs", "Trained on 1 to 20.", table)
    best_first = sorted(schemes, key=lambda pos: -ranks[pos])
    reported = (
        "- Reported, not judged: the mean reciprocal rank over the tasks, beyond the training "
        f"length: {', '.join(f'{pos} {ranks[pos]:.2f}' for pos in best_first)}. The paper's, over "
        "its ten tasks: nope 0.69, t5 0.55, alibi 0.50, rope 0.33, learned 0.22."
    )
    claims = claim_lines(judge_all(records))
    return lines + section("Orderings", *([RULE] if claims else []), [*claims, reported])


main = make_main(TasksConfig, measure, report, plot_scores)

if __name__ == "__main__":
    cli.run_main(main)
