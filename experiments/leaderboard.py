"""Train every position scheme alike at a short length, and evaluate it at up to 32 times that.

    python experiments/leaderboard.py                          all schemes, three seeds
    python experiments/leaderboard.py --entry=my_scheme.py     also a scheme of your own: a file
                                                               with one class based on model.NoPE
    python experiments/leaderboard.py --entries=rope,alibi     only some
    python experiments/leaderboard.py --budget=gpu             a larger model on longer text
    python experiments/leaderboard.py --redraw=true            only the tables and the figure, from
                                                               the leaderboard.json that is there

A run takes about a minute of 2 cores. Stop at any time: the same command continues where it
stopped. Runs are kept in out/leaderboard, each with its settings and a hash of its code: what has
been edited since is trained again. The results go to leaderboard.md, .json and .png in --out_dir.

The score is the loss in the last quarter of a sequence, in nats per token of held-out text, at 1,
4, 8 and 32 times the training length: the mean over the seeds and its 95 % interval (Student's t).
Throughput is measured at the end, for all entries in turn and in several rounds, relative to rope
in the same round.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import functools
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

import rope_scaling
from experiments.report import (
    RULE,
    TextExperiment,
    check_names,
    confidence_interval,
    count,
    count_parameters,
    format_interval,
    format_settings,
    hash_code,
    length_axis,
    make_main,
    markdown_table,
    not_judged,
    paired_claim,
    read_json,
    run_all,
    save_figure,
    score_losses,
    section,
    select,
    time_in_turns,
    title,
    topic_lines,
    train_model,
)
from kernels import definition
from model import GPT, POSITIONS, Block, GPTConfig, RoPE
from nanolong import cli
from nanolong.devices import autocast, pick_compile
from nanolong.entry import load_entries
from nanolong.losses import loss_by_position
from nanolong.optim import get_lr, make_optimizers
from nanolong.plots import terminal_plot
from nanolong.run.checkpoint import settings_record
from nanolong.scoring import find_sequences
from nanolong.strict_json import write_json
from train import TrainConfig, forward_backward, optimizer_step


@dataclass
class LeaderboardConfig(TextExperiment):
    # cpu: 0.5 M parameters, 64 tokens; gpu: 25 M, 256 tokens; try: seconds, to test an entry
    budget: Literal["cpu", "gpu", "try"] = "cpu"
    entries: tuple[str, ...] = ()  # names of the entries to run; default: all
    entry: tuple[str, ...] = ()  # Python files, each with one scheme class of your own
    seeds: int = 3  # runs of each entry
    max_tokens: int = 65536  # tokens of validation text that are scored


# Settings of model and training, the same for all entries.
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96, "block_size": 64},
        "training": {
            "batch_size": 64,
            "max_iters": 700,
            "learning_rate": 3e-3,
            "warmup_iters": 50,
            "compile": False,
        },
    },
    "gpu": {
        "model": {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 256},
        "training": {
            "batch_size": 64,
            "max_iters": 4000,
            "learning_rate": 2e-3,
            "warmup_iters": 200,
        },
    },
    "try": {
        "model": {"n_layer": 4, "n_head": 2, "n_embd": 32, "block_size": 16},
        "training": {
            "batch_size": 8,
            "max_iters": 20,
            "learning_rate": 3e-3,
            "warmup_iters": 2,
            "compile": False,
        },
    },
}

# Entries that are not a scheme alone. window and random_positions count training lengths.
HYBRIDS = {
    "rope-window": {"pos": "rope", "window": 0.5},
    "rope-nope-every-4th": {"pos": "rope", "layer_pattern": "FFFN"},
    "rope-random-positions": {"pos": "rope", "random_positions": 32},
    "rope-p-0.25": {"pos": "rope", "p_rope": 0.25},
    "rope-p-0.5": {"pos": "rope", "p_rope": 0.5},
    "rope-logn": {"pos": "rope", "score_scale": "logn"},
    "rope-ssmax": {"pos": "rope", "score_scale": "ssmax"},
}
HYBRID_NOTES = {
    "rope-window": "a sliding window of half the training length",
    "rope-nope-every-4th": "every fourth layer without positions",
    "rope-random-positions": "positions in training sampled from 32 times the training length",
    "rope-p-0.25": "p-RoPE, the fastest quarter of the pairs is rotated",
    "rope-p-0.5": "p-RoPE, the fastest half of the pairs is rotated",
    "rope-logn": "scores scaled by the logarithm of the position beyond the training length",
    "rope-ssmax": "scores scaled by a learned multiple of the logarithm of the position",
}

MIN_STEPS_TO_JUDGE = 500  # of the predictions of the literature
FACTORS = (1, 4, 8, 32)  # the ranked lengths, in training lengths


# -----------------------------------------------------------------------------
# Entries


def choose_entries(cfg):
    """Return the names of the entries to run: rope first, since throughput is relative to it."""
    own = load_entries(cfg.entry, POSITIONS)
    known = [*POSITIONS, *HYBRIDS]
    check_names("entry", cfg.entries, known)
    names = dict.fromkeys([*(cfg.entries or known), *own])
    return sorted(names, key=lambda name: name != "rope")


def model_settings(name, budget):
    """Return the settings of GPTConfig of an entry, without vocab_size."""
    settings = {**budget["model"], **HYBRIDS.get(name, {"pos": name})}
    for key in {"window", "random_positions"} & settings.keys():
        settings[key] = max(1, int(settings[key] * settings["block_size"]))
    return settings


def make_model(name, budget, vocab_size):
    return GPT(GPTConfig(**model_settings(name, budget), vocab_size=vocab_size))


def evaluation_lengths(length):
    """Return the ranked lengths, twice the training length, and 20 tokens beyond it."""
    return sorted({length * factor for factor in (*FACTORS, 2)} | {length + 20})


# -----------------------------------------------------------------------------
# Measuring


def run_entry(name, seed, cfg, dataset):
    """Train what is left of one run and evaluate it: evaluate.py's records.

    They stay in the run folder as scores.json, so that a finished run is not repeated.
    """
    budget = BUDGETS[cfg.budget]
    torch.manual_seed(seed)
    model = make_model(name, budget, dataset.vocab_size)
    train_config = TrainConfig(
        dataset=cfg.dataset,
        seed=seed,
        eval_interval=10**9,
        eval_iters=8,
        device=cfg.device,
        dtype=cfg.dtype,
        **budget["training"],
    )
    identity = identify(model, train_config, dataset)
    run = choose_run_folder(cfg.run_folder(), f"{name}-{seed}", identity)
    scores = run / "scores.json"
    key = {"max_tokens": cfg.max_tokens, "scored": hash_code([loss_by_position, find_sequences])}
    if scores.is_file() and key.items() <= read_json(scores).items():
        print(f"taken from {run}: remove it to train again")
        return read_json(scores)["records"]

    train_config.out_dir = str(run)
    model = train_model(model_settings(name, budget), train_config, dataset)
    lengths = evaluation_lengths(budget["model"]["block_size"])
    protocols = ("chunked", "last-quarter")
    records = score_losses(name, model, cfg, lengths, protocols, cfg.max_tokens)
    records = [{**record, "seed": seed} for record in records]
    write_json(scores, {**key, "records": records}, indent=1)
    return records


# The code that decides what a run computes, besides the scheme's own class.
TRAINING_CODE = (
    Block,
    GPT.hidden_states,
    GPT.init_weights,
    forward_backward,
    optimizer_step,
    make_optimizers,
    get_lr,
)


def identify(model, train_config, dataset):
    """Return the identity of a run: its settings, its data, and the code that it depends on."""
    code = [type(model.pos), *TRAINING_CODE]
    if isinstance(model.pos, RoPE):
        code.append(rope_scaling.none)
    operators = [definition.hash_definition(name) for name in ("attention", "linear_cross_entropy")]
    return {
        **settings_record("model", model.config),
        **settings_record("training", train_config),
        "data": dataset.hash,
        "code": " ".join((hash_code(code), *operators)),
    }


def same_identity(a, b):
    """Whether two runs are the same; a setting that one lacks stands at its default in the other.

    Where a run lies and how it was started does not count.
    """
    for name in ("model", "training"):
        for setting in (a[name].keys() | b[name].keys()) - {"out_dir", "entry", "overwrite"}:
            if setting in a[name] and setting in b[name]:
                same = a[name][setting] == b[name][setting]
            else:
                same = setting in (a if setting in a[name] else b)[f"{name}_defaults"]
            if not same:
                return False
    return a["data"] == b["data"] and a["code"] == b["code"]


def choose_run_folder(folder, name, identity):
    """Return the run folder of this identity below `folder`, a new one if there is none yet.

    They are NAME, NAME.2, NAME.3 and so on; each keeps its identity in identity.json.
    """
    identity = json.loads(json.dumps(identity, allow_nan=False))
    for number in itertools.count(1):
        run = folder / (name if number == 1 else f"{name}.{number}")
        if not run.exists():
            run.mkdir(parents=True)
            write_json(run / "identity.json", identity, indent=1)
            if number > 1:
                print(f"the code, a setting or the data has changed: training again in {run}")
            return run
        file = run / "identity.json"
        if file.is_file() and same_identity(read_json(file), identity):
            return run


def measure_throughput(names, cfg, dataset, rounds=7, steps=4):
    """Measure the training throughput of all entries, in turn in every round.

    Returns name -> {"tokens_per_second": the median over the rounds, "relative": the median of
    the ratios to the first entry in the same round}.
    """
    budget = BUDGETS[cfg.budget]
    device, dtype = cfg.pick_device()
    compiles, _ = pick_compile(budget["training"].get("compile"), device, 10**6)
    if compiles:
        torch._dynamo.config.recompile_limit = 4 * len(names)  # all models live in one process
    batch_size, length = budget["training"]["batch_size"], budget["model"]["block_size"]

    def train_steps(model, forward, optimizers):
        for step in range(steps):
            x, y, *_ = dataset.batch(step, batch_size, length, 0)
            x = torch.from_numpy(x).to(device)
            y = torch.from_numpy(y).to(device)
            positions = model.sample_positions(len(x), x.shape[1], step)
            with autocast(device, dtype):
                loss = forward(x, y, positions)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    functions = {}
    for name in names:
        torch.manual_seed(0)
        model = make_model(name, budget, dataset.vocab_size).to(device).train()
        forward = torch.compile(model) if compiles else model
        optimizers = make_optimizers(model, TrainConfig())
        functions[name] = functools.partial(train_steps, model, forward, optimizers)
    seconds = time_in_turns(functions, rounds, device)
    tokens = steps * batch_size * length
    return {name: summarize(tokens, seconds[names[0]], seconds[name]) for name in names}


def summarize(tokens, baseline, seconds):
    """Return the throughput of one entry, from its seconds per round and those of the baseline."""
    ratios = [a / b for a, b in zip(baseline, seconds, strict=True)]
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "relative": statistics.median(ratios),
    }


def measure(cfg):
    names = choose_entries(cfg)
    dataset = cfg.load_dataset()
    runs = [(name, seed) for seed in range(1, cfg.seeds + 1) for name in names]
    budget = BUDGETS[cfg.budget]
    return {
        "records": run_all(runs, run_entry, cfg, dataset),
        "note": (
            f"{cfg.note(dataset)}, {cfg.max_tokens:,} tokens scored, spread over the validation "
            f"text, {count(cfg.seeds, 'seed')}"
        ),
        "model": budget["model"],
        "parameters": count_parameters(budget["model"], dataset.vocab_size),
        "training": budget["training"],
        "device": cfg.pick_device()[0].type,
        "throughput": measure_throughput(names, cfg, dataset),
    }


# -----------------------------------------------------------------------------
# The predictions of the literature


PROTOCOLS = {"chunked": "whole sequences", "last-quarter": "last quarter"}
# topic -> pairs of entries, of which the first has the lower loss
AT_TRAINING_LENGTH = {
    "At the training length": (
        ("rope", "alibi"),
        ("alibi", "t5"),
        ("alibi", "sinusoidal"),
        ("t5", "nope"),
        ("sinusoidal", "nope"),
    ),
    "At the training length (Haviv et al. 2022)": (
        ("alibi", "sinusoidal"),
        ("sinusoidal", "learned"),
        ("learned", "nope"),
    ),
}


class Orderings:
    """Claims about differences of two losses, paired by seed, on the same tokens."""

    def __init__(self, records, length):
        self.length = length  # the training length, L below
        self.losses = {}  # (name, protocol, length) -> {seed: loss}
        self.claims = {}  # topic -> [Claim, ...]
        for record in records:
            key = (record["checkpoint"], record["protocol"], record["length"])
            by_seed = self.losses.setdefault(key, {})
            by_seed[record["seed"]] = record.get("loss", math.inf)

    def compare(self, topic, text, a, b, above=None, below=None):
        """Claim that the loss at a minus the loss at b lies above, or below, a bound.

        a and b are (name, protocol, length). What was not measured is left out.
        """
        if a in self.losses and b in self.losses:
            claim = paired_claim(text, self.losses[a], self.losses[b], above, below)
            self.claims.setdefault(topic, []).append(claim)

    def order(self, topic, a, side, b, protocol, factor=1):
        """Claim that entry a lies "above" or "below" entry b, at some training lengths."""
        length = factor * self.length
        place = "at L" if factor == 1 else f"{factor}L"
        text = f"{a} {side} {b}, {PROTOCOLS[protocol]}, {place}"
        self.compare(topic, text, (a, protocol, length), (b, protocol, length), **{side: 0})

    def degrade(self, topic, name, protocol, factor, words, above=None, below=None):
        """Claim how much an entry loses at some training lengths, compared with one."""
        text = f"{name}, {PROTOCOLS[protocol]}, {factor}L against L: perplexity {words}"
        longer = (name, protocol, factor * self.length)
        self.compare(topic, text, longer, (name, protocol, self.length), above, below)

    def judge(self):
        """Return all claims, by topic."""
        topic = "Extrapolation to 2, 4 and 8 times the training length"
        ten_percent = math.log(1.1)
        self.degrade(topic, "alibi", "chunked", 8, "within 10 %", below=ten_percent)
        doubled = math.log(2)
        self.degrade(topic, "sinusoidal", "last-quarter", 2, "more than doubled", above=doubled)
        for factor, times in ((2, 1.5), (4, 3)):
            words = f"more than {times} times"
            self.degrade(topic, "rope", "last-quarter", factor, words, above=math.log(times))
        for factor in (4, 8):
            for name in ("nope", "t5"):
                self.order(topic, name, "above", "alibi", "last-quarter", factor)
                self.order(topic, name, "below", "rope", "last-quarter", factor)

        for topic, pairs in AT_TRAINING_LENGTH.items():
            for a, b in pairs:
                self.order(topic, a, "below", b, "chunked")

        topic = "Extrapolation (Press et al. 2022)"
        L = self.length
        text = f"sinusoidal, whole sequences, L + 20 = {L + 20} against L: perplexity within 10 %"
        entries = [("sinusoidal", "chunked", length) for length in (L + 20, L)]
        self.compare(topic, text, *entries, below=ten_percent)
        self.degrade(topic, "sinusoidal", "chunked", 2, "not within 10 %", above=ten_percent)
        self.degrade(topic, "alibi", "chunked", 32, "within 10 %", below=ten_percent)
        self.order(topic, "sinusoidal", "above", "alibi", "last-quarter", 32)
        return self.claims


# -----------------------------------------------------------------------------
# The report


def select_losses(records, name, protocol, length):
    """Return the losses of all seeds; an empty list if the scheme refuses this length."""
    found = select(records, checkpoint=name, protocol=protocol, length=length)
    return [record["loss"] for record in found if "loss" in record]


def rank_entries(records, length):
    """Return the names, by the mean last-quarter loss over FACTORS.

    Entries that refuse one of these lengths come last, by their loss at the training length.
    """

    def mean_losses(name):
        means = []
        for factor in FACTORS:
            losses = select_losses(records, name, "last-quarter", factor * length)
            means.append(statistics.fmean(losses) if losses else math.inf)
        return statistics.fmean(means), means[0]

    return sorted(dict.fromkeys(record["checkpoint"] for record in records), key=mean_losses)


def loss_table(board, names, protocol):
    """Return the Markdown table of one protocol: a line per entry, a column per length."""
    L = board["model"]["block_size"]
    lengths = [factor * L for factor in FACTORS]
    if protocol == "chunked":
        lengths = evaluation_lengths(L)
    header = [""]
    for length in lengths:
        header.append(f"{length:,}" if length % L else f"{length:,} ({length // L}x)")
    baseline = next(iter(board["throughput"]))
    header += ["tokens/s", f"relative to {baseline}"]

    rows = []
    for rank, name in enumerate(names, 1):
        row = [f"{rank}. {name}"]
        for length in lengths:
            losses = select_losses(board["records"], name, protocol, length)
            row.append(format_interval(losses) if losses else "refused")
        throughput = board["throughput"][name]
        row += [f"{throughput['tokens_per_second']:,.0f}", f"{throughput['relative']:.2f}"]
        rows.append(row)
    return markdown_table(header, rows)


def describe_runs(board, names):
    """Return the paragraph that says what was trained and what the tables show."""
    model = format_settings(board["model"])
    tokens = board["training"]["batch_size"] * board["model"]["block_size"]
    where = "a GPU"
    if board["device"] != "cuda":
        where = "a CPU with the plain PyTorch reference, not compiled"
    text = (
        f"Each run has {board['parameters'] / 1e6:.2f} M parameters ({model}) and trains for "
        f"{board['training']['max_iters']} steps of {tokens:,} tokens with AdamW, on the same "
        "batches for all entries. Losses are in nats per token of held-out text: the mean over "
        "the seeds and its 95 % interval. Entries are ranked by the mean of the four columns of "
        "the first table. `refused`: the scheme has no embedding for these positions. Tokens per "
        f"second are of training on {where}: the median of several rounds, in each of which all "
        "entries are measured in turn."
    )
    for name, note in HYBRID_NOTES.items():
        if name in names:
            text += f" `{name}`: {note}."
    return text


def judge_orderings(board):
    """Return the parts of the section on the literature's predictions."""
    L, steps = board["model"]["block_size"], board["training"]["max_iters"]
    if steps < MIN_STEPS_TO_JUDGE:
        return [not_judged(steps)]
    text = (
        "What the literature predicts, as differences in nats, paired by seed. L is the training "
        f"length, {L} tokens. {RULE}"
    )
    return [text, topic_lines(Orderings(board["records"], L).judge())]


def report(board):
    names = rank_entries(board["records"], board["model"]["block_size"])
    figure = "![loss by context length](leaderboard.png)"
    quarter = loss_table(board, names, "last-quarter")
    return [
        *title(board, "The position leaderboard"),
        "",
        describe_runs(board, names),
        *section("Loss in the last quarter of the sequence", quarter, figure),
        *section("Loss over whole sequences", loss_table(board, names, "chunked")),
        *section("Orderings", *judge_orderings(board)),
    ]


def plot_losses(board, folder):
    """Plot the last-quarter loss by length, the intervals as bands, as a PNG and in characters."""
    L = board["model"]["block_size"]
    lengths = sorted(L * factor for factor in (*FACTORS, 2))
    curves = {}  # name -> [(length, mean, half-width of its interval), ...]
    for name in rank_entries(board["records"], L):
        for length in lengths:
            losses = select_losses(board["records"], name, "last-quarter", length)
            if losses:
                point = (length, *confidence_interval(losses))
                curves.setdefault(name, []).append(point)
    means = {name: [point[:2] for point in curve] for name, curve in curves.items()}
    print(terminal_plot(means, height=18))

    def draw(figure, axes):
        from matplotlib import colormaps

        palette = colormaps["tab20"].colors
        palette = [*palette[::2], *palette[1::2]]  # the strong colours first
        for i, (name, curve) in enumerate(curves.items()):
            x, mean, half_width = (list(column) for column in zip(*curve, strict=True))
            color = palette[i % len(palette)]
            style = {"linestyle": "--" if name in HYBRIDS else "-", "marker": "osD^vP*X"[i % 8]}
            axes.plot(x, mean, color=color, markersize=5, label=name, **style)
            low = [m - h for m, h in zip(mean, half_width, strict=True)]
            high = [m + h for m, h in zip(mean, half_width, strict=True)]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        # The limits follow the means: a wide interval of one entry must not flatten all others.
        losses = [loss for curve in means.values() for _, loss in curve]
        margin = 0.06 * (max(losses) - min(losses)) + 1e-3
        axes.set_ylim(min(losses) - margin, max(losses) + margin)
        axes.set_title(f"Trained at {L} tokens, evaluated at up to {32 * L:,}")
        axes.set_ylabel("nats per token, last quarter of the sequence")
        length_axis(axes, lengths)
        figure.legend(loc="outside right upper", fontsize=8, title="best mean first")

    save_figure(folder / "leaderboard.png", draw, (9.5, 5.6), board["note"])


main = make_main(LeaderboardConfig, measure, report, plot_losses)

if __name__ == "__main__":
    cli.run_main(main)
