"""RoPE in linear attention (RoFormer, section 3.3), with and without, and softmax attention.

    python experiments/papers/linear_attention.py               about 25 minutes of 2 cores
    python experiments/papers/linear_attention.py --seeds=1     one seed: processes may share them
    python experiments/papers/linear_attention.py --budget=try  seconds, a test without meaning

The scheme is examples/schemes/linear_attention.py. The experiment trains softmax and linear
attention, each without positions and with RoPE, and linear attention with a rotated denominator,
and evaluates them at up to 8 times the training length. Stop at any time: the same command
continues after the last finished run. Runs are kept in out/linear_attention; the results go to
linear_attention.md, .json and .png in --out_dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import copy
import functools
import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch

from examples.schemes.linear_attention import LinearAttention, running_dot
from experiments.leaderboard import identify
from experiments.papers.masked_lm import unigram_loss
from experiments.report import (
    RULE,
    TextExperiment,
    check_names,
    claim_lines,
    confidence_interval,
    count,
    count_parameters,
    format_interval,
    format_settings,
    grid,
    hash_code,
    length_axis,
    make_main,
    markdown_table,
    measure_run,
    not_judged,
    paired_claim,
    run_all,
    save_figure,
    score_losses,
    section,
    select,
    time_in_turns,
    title,
    train_or_stop,
)
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.devices import autocast, pick_device
from nanolong.entry import load_entry
from nanolong.errors import UserError
from nanolong.losses import evaluation_mode, loss_by_position
from nanolong.plots import unique
from nanolong.provenance import current_commit
from nanolong.scoring import find_sequences
from rope_scaling import METHODS
from train import TrainConfig

SCHEME = Path(__file__).resolve().parents[2] / "examples" / "schemes" / "linear_attention.py"
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96, "block_size": 64},
        "training": {"batch_size": 64, "max_iters": 700, "warmup_iters": 50},
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16},
        "training": {"batch_size": 8, "max_iters": 20, "warmup_iters": 2},
    },
}
FACTORS = (1, 2, 4, 8)  # the evaluated lengths, in training lengths
EXTENSION = 4  # factor of the context extension
TIMED_FACTORS = (1, 8, 32)  # the lengths at which a training step is timed


@dataclass
class LinearConfig(TextExperiment):
    pos: tuple[str, ...] = ("nope", "rope")  # schemes, in softmax and in linear attention
    budget: Literal["cpu", "try"] = "cpu"  # cpu: 0.5 M parameters, 64 tokens; try: seconds, a test
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of the runs of each model
    # dtype of matrix products outside attention
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_tokens: int = 65536  # tokens of validation text that are scored

    def __post_init__(self):
        self.out_dir = self.out_dir or self.runs
        super().__post_init__()
        for pos in self.pos:
            check_pos(pos)


# -----------------------------------------------------------------------------
# The schemes of model.py that are refused, and why


NO_CHANGE = "it adds to the embeddings and leaves attention as it is with nope"
REFUSED = {
    "learned": NO_CHANGE,
    "sinusoidal": NO_CHANGE,
    "shaw": "it has a vector for each distance, and a sum over keys does not know distances",
    "nezha": "it has a vector for each distance, and a sum over keys does not know distances",
    "xl": "its term by distance has both signs, and the denominator could cross zero",
    "t5": "its score by bucket of distances cannot be a product of a query's and a key's features",
    "alibi": "it subtracts from each score, whose sum, the denominator, could cross zero",
    "kerple": "its logarithm of the distance is no product of a query's and a key's features",
    "kerple-power": "its power of the distance is no product of a query's and a key's features",
    "sandwich": "it subtracts from each score, whose sum, the denominator, could cross zero",
}


def check_pos(pos):
    """Raise UserError unless a scheme of model.py works in linear attention."""
    check_names("position scheme", [pos], POSITIONS)
    if pos in REFUSED:
        reason = REFUSED[pos]
        raise UserError(f"{pos} is not used in linear attention, since {reason}: use nope or rope")


# -----------------------------------------------------------------------------
# The models


class BothRotated(LinearAttention):
    """Linear attention whose denominator is rotated, too."""

    rotate_denominator = True


def model_settings(names):
    """Return the models of the experiment: name -> settings of GPTConfig. names: the schemes."""
    load_entry(SCHEME, POSITIONS)
    POSITIONS["linear_attention_both"] = BothRotated
    models = {f"softmax {pos}": {"pos": pos} for pos in names}
    if "nope" in names:
        models["linear nope"] = {"pos": "linear_attention", "rope_fraction": 0.0}
    if "rope" in names:
        models["linear rope"] = {"pos": "linear_attention"}
        models["linear rope, both rotated"] = {"pos": "linear_attention_both"}
    return models


# -----------------------------------------------------------------------------
# Denominators


class Denominators:
    """What the denominators of a model are, and what they are or would be when rotated."""

    def __init__(self):
        self.ranges = {}

    @torch.no_grad()
    def __call__(self, features, rotated):
        for kind, pair in (("unrotated", features), ("rotated", rotated)):
            denominator, _ = running_dot(*pair)
            denominator = denominator[denominator.isfinite()]
            if not denominator.numel():
                continue
            seen = {
                "smallest": denominator.min().item(),
                "closest": denominator.abs().min().item(),  # to zero
                "negative": int((denominator < 0).sum()),
                "number": denominator.numel(),
            }
            self.ranges[kind] = merge_ranges([self.ranges.get(kind, seen | NOTHING), seen])


NOTHING = {"negative": 0, "number": 0}


def merge_ranges(ranges):
    """Return the range of several: smallest, closest to zero, and how many were negative."""
    return {
        "smallest": min(seen["smallest"] for seen in ranges),
        "closest": min(seen["closest"] for seen in ranges),
        "negative": sum(seen["negative"] for seen in ranges),
        "number": sum(seen["number"] for seen in ranges),
    }


def measure_denominators(model, dataset, when):
    """Return records of the denominators on at most 16 validation sequences of each length."""
    records = []
    for factor in (FACTORS[0], FACTORS[-1]):
        length = factor * model.config.original_length
        dataset.val.require_length(length)
        n = min(16, int(dataset.val.n_sequences(length).sum()))
        x = [dataset.val.sequence(i, length)[0] for i in range(n)]
        model.pos.observe = Denominators()
        with evaluation_mode(model, torch.float32) as device:
            model(torch.stack([torch.from_numpy(row) for row in x]).to(device))
        records.append({"when": when, "length": length, **model.pos.observe.ranges})
        del model.pos.observe
    return records


# -----------------------------------------------------------------------------
# A run


def train_run(model, train_config, dataset):
    """Train a new model. Returns what is recorded: its losses by step, and its denominators."""
    record = {"denominators": []}
    is_linear = hasattr(model.pos, "observe")
    if is_linear:
        model.to(pick_device(train_config.device))
        record["denominators"] += measure_denominators(model, dataset, "untrained")
        seen = model.pos.observe = Denominators()
    try:
        train_or_stop(model, train_config)
    except FloatingPointError as error:
        record["diverged"] = str(error).partition(":")[0]
    log = (Path(train_config.out_dir) / "log.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in log.splitlines()]
    record["training_losses"] = [round(step["loss"], 4) for step in steps if "loss" in step]
    if is_linear:
        del model.pos.observe
        length = model.config.block_size
        record["denominators"].append({"when": "in training", "length": length, **seen.ranges})
        record["denominators"] += measure_denominators(model, dataset, "trained")
    return record


def score(model, cfg, lengths, protocols, max_tokens):
    """Return records of the loss at each length by each protocol, or of why it is refused."""
    kept = ("protocol", "length", "loss", "refused")
    records = score_losses("", model, cfg, lengths, protocols, max_tokens)
    return [{key: record[key] for key in kept if key in record} for record in records]


def score_extensions(model, cfg):
    """Extend the model by every method, without fine-tuning, and score it at the target."""
    records = []
    target = EXTENSION * model.config.block_size
    for method in METHODS:
        options = {}
        if method == "longrope":  # which has no table of its own
            options["long_factor"] = [float(EXTENSION)] * len(model.pos.inv_freq)
        extended = copy.deepcopy(model)
        try:
            extended.extend(method, EXTENSION, **options)
        except UserError as error:
            records.append({"method": method, "refused": str(error)})
            continue
        scored = score(extended, cfg, [target], ("last-quarter",), cfg.max_tokens // 2)
        records.append({"method": method, **scored[0]})
    return records


def run_model(name, seed, models, cfg, dataset, folder):
    """Train and evaluate one run, or read what it has left in its file: a list of its record."""
    budget = BUDGETS[cfg.budget]
    config = GPTConfig(**budget["model"], **models[name], vocab_size=dataset.vocab_size)
    train_config = TrainConfig(
        dataset=cfg.dataset,
        seed=seed,
        learning_rate=3e-3,
        eval_interval=10**9,
        eval_iters=8,
        log_interval=1,
        compile=False,
        device=cfg.device,
        dtype=cfg.dtype,
        **budget["training"],
    )
    torch.manual_seed(seed)
    model = GPT(config)
    identity = identify(model, train_config, dataset)
    key = {
        **identity,
        "max_tokens": cfg.max_tokens,
        "experiment": hash_code([run_model, loss_by_position, find_sequences]),
    }
    run = folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    train_config.out_dir = str(run)
    train_config.overwrite = True  # of a run that was stopped: the whole of it is observed

    def train_and_score():
        start = time.perf_counter()
        record = {"model": name, "seed": seed, "commit": current_commit()}
        record |= train_run(model, train_config, dataset)
        record["training_seconds"] = round(time.perf_counter() - start)
        model.meta["bos"] = dataset.bos  # a model that was not loaded does not know it
        lengths = [factor * config.block_size for factor in FACTORS]
        record["losses"] = score(model, cfg, lengths, ("chunked", "last-quarter"), cfg.max_tokens)
        if name in ("softmax rope", "linear rope"):
            record["extensions"] = score_extensions(model, cfg)
        record["seconds"] = round(time.perf_counter() - start)
        return record

    return [measure_run(run.with_suffix(".json"), key, train_and_score)]


# -----------------------------------------------------------------------------
# Time


def time_steps(models, cfg, dataset, rounds=7):
    """Time forward and backward passes at several lengths, all models in turn in every round.

    Returns records of the median milliseconds, and of the median ratio to the first model.
    """
    budget = BUDGETS[cfg.budget]
    device, dtype = cfg.pick_device()
    tokens = budget["training"]["batch_size"] * budget["model"]["block_size"]
    made = {}
    for name, settings in models.items():
        config = GPTConfig(**budget["model"], **settings, vocab_size=dataset.vocab_size)
        config.block_size *= TIMED_FACTORS[-1]
        made[name] = GPT(config).to(device)
    records = []
    for factor in TIMED_FACTORS:
        length = factor * budget["model"]["block_size"]
        tokens_x = torch.randint(0, 256, (max(1, tokens // length), length), device=device)

        def forward_backward(model, tokens_x=tokens_x):
            with autocast(device, dtype):
                loss = model(tokens_x, tokens_x)
            loss.backward()
            model.zero_grad()

        functions = {
            name: functools.partial(forward_backward, model) for name, model in made.items()
        }
        times = time_in_turns(functions, rounds, device)
        baseline = next(iter(times.values()))
        for name, seconds in times.items():
            ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
            record = {"model": name, "length": length, "ratio": statistics.median(ratios)}
            record["milliseconds"] = 1000 * statistics.median(seconds)
            records.append(record)
    return records


def measure(cfg):
    models = model_settings(cfg.pos)
    dataset = cfg.load_dataset()
    budget = BUDGETS[cfg.budget]
    length = budget["model"]["block_size"]
    folder = cfg.run_folder()
    runs = [(name, seed) for seed in cfg.seeds for name in models]
    records = run_all(runs, run_model, models, cfg, dataset, folder)
    timed = {name: models[name] for name in models if "both" not in name}
    note = (
        f"{cfg.note(dataset, [record['commit'] for record in records])}, {cfg.max_tokens:,} tokens "
        f"scored, spread over the validation text, {count(len(cfg.seeds), 'seed')}"
    )
    return {
        "note": note,
        "model": budget["model"],
        "training": budget["training"],
        "parameters": count_parameters({**budget["model"], "pos": "nope"}, dataset.vocab_size),
        "unigram_loss": unigram_loss("causal", dataset, length, cfg.max_tokens),
        "steps": time_steps(timed, cfg, dataset),
        "records": records,
    }


# -----------------------------------------------------------------------------
# The report

ROPE, NOPE, BOTH = "linear rope", "linear nope", "linear rope, both rotated"


def select_losses(records, name, protocol, length):
    """Return seed -> loss, None if it is not finite."""
    losses = {}
    for record in select(records, model=name):
        for scored in select(record["losses"], protocol=protocol, length=length):
            losses[record["seed"]] = scored.get("loss")
    return losses


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
    for name in unique(board["records"], "model"):
        row = [name]
        for length in lengths:
            losses = select_losses(board["records"], name, protocol, length)
            row.append(format_losses(list(losses.values())))
        seconds = [r["training_seconds"] for r in select(board["records"], model=name)]
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
    for record in select(board["records"], model=BOTH):
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
    finite = [
        {seed: loss for seed, loss in by_seed.items() if loss is not None}
        for by_seed in (losses, others)
    ]
    return paired_claim(text, *finite, above, below)


def judge(board):
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
    lengths = {f"{length:,} tokens": length for length in unique(board["steps"], "length")}

    def cell(name, length):
        (step,) = select(board["steps"], model=name, length=length)
        return f"{step['milliseconds']:.0f} ms ({step['ratio']:.2f})"

    return grid(unique(board["steps"], "model"), lengths, cell)


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


def report(board):
    records = board["records"]
    L, steps = board["model"]["block_size"], board["training"]["max_iters"]
    tokens = board["training"]["batch_size"] * L
    figure = "![loss by length, and in training](linear_attention.png)"
    lines = [
        *title(board, "RoPE in linear attention"),
        "",
        "o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m)^T phi(k_n),"
        " with phi = elu + 1 (Su et al. 2021, section 3.3). `both rotated`: the denominator, too. "
        f"Each model has {board['parameters'] / 1e6:.2f} M parameters "
        f"({format_settings(board['model'])}) and trains for {steps} steps of {tokens:,} tokens, "
        "on the same batches for all. Losses are in nats per "
        "token of held-out text: the mean over the seeds and its 95 % interval. A model of byte "
        f"frequencies alone has {board['unigram_loss']:.3f}.",
    ]
    quarter = loss_table(board, "last-quarter")
    lines += section("Loss in the last quarter of the sequence", quarter, figure)
    lines += section("Loss over whole sequences", loss_table(board, "chunked"))
    rule = f"Differences in nats, paired by seed, over finite losses. {RULE}"
    judged = [rule, claim_lines(judge(board))] if steps >= 500 else [not_judged(steps)]
    lines += section("Claims", *judged)
    if any(record["denominators"] for record in records):
        lines += section("Denominators", ABOUT_DENOMINATORS, denominator_table(board))
    if BOTH in unique(records, "model"):
        lines += section("Both rotated", WHY_BOTH_FAIL, divergence_table(board))
    if any("extensions" in record for record in records):
        lines += section("Extension methods", ABOUT_METHODS, extension_table(board))
    lines += section("Time and memory", ABOUT_TIME, step_table(board), describe_memory(board))
    refused = [f"- `{pos}`: {reason}" for pos, reason in REFUSED.items()]
    return lines + section("Refused schemes", ABOUT_ALONE, refused)


def plot(board, folder):
    """Plot the last-quarter loss by length, and the training loss by step, of all models."""
    lengths = [factor * board["model"]["block_size"] for factor in FACTORS]

    def draw(figure, by_length, by_step):
        for number, name in enumerate(unique(board["records"], "model")):
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
            for record in select(board["records"], model=name):
                by_step.plot(record["training_losses"], color=color, linewidth=0.7, alpha=0.7)
        for axis, text in ((by_length, "Last quarter of the sequence"), (by_step, "In training")):
            axis.set(title=text, ylabel="loss (nats per token)")
            axis.axhline(board["unigram_loss"], color="gray", linestyle=":")
            # a failing model must not flatten the others
            axis.set_ylim(top=min(axis.get_ylim()[1], 8))
        length_axis(by_length, lengths, "context length (tokens); trained at the shortest")
        by_step.set_xlabel("step, a curve per seed")
        by_length.legend(fontsize=8, title="dotted: byte frequencies", title_fontsize=8)

    save_figure(folder / "linear_attention.png", draw, (11, 4.6), board["note"], panels=(1, 2))


main = make_main(LinearConfig, measure, report, plot)

if __name__ == "__main__":
    cli.run_main(main)
