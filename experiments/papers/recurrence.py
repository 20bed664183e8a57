"""Train with Transformer-XL's segment-level recurrence (Dai et al. 2019), and without it.

    python experiments/papers/recurrence.py               seven schemes, three seeds
    python experiments/papers/recurrence.py --seeds=1     some seeds: processes can share the work,
                                                          and a call with all collects it
    python experiments/papers/recurrence.py --budget=try  all of it in tiny: a test

Each scheme is trained on the same tokens in three modes. `shuffled`: segments of text in random
order. `streams`: each row of a batch goes on where it ended in the batch before. `memory-1`: the
same, and every layer attends also to its inputs in the segment before (segment_memory.py). xl, shaw
and rope are trained with memories of 2, 4 and 8 segments, too. All models are evaluated on the same
tokens, with memories of several lengths, also longer ones than in training.

Stop at any time: the same command continues after the last finished run. The results go to
recurrence.md, .json and .png in --out_dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import math
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch

import data
from experiments.papers.segment_memory import (
    RecurrentGPT,
    SegmentMemory,
    Streams,
    check_memory,
    generate,
)
from experiments.report import (
    RULE,
    TextExperiment,
    by_seed,
    count,
    format_interval,
    format_settings,
    grid,
    make_main,
    markdown_table,
    measure_run,
    not_judged,
    paired_claim,
    save_figure,
    section,
    select,
    title,
    topic_lines,
    train_step,
)
from model import GPTConfig
from nanolong import cli
from nanolong.devices import prepare_device
from nanolong.errors import UserError
from nanolong.losses import evaluation_mode
from nanolong.optim import get_lr, make_optimizers
from nanolong.plots import unique
from nanolong.provenance import current_commit
from nanolong.tensor_file import TensorStream, read_tensor, write_tensors
from nanolong.validate import require
from train import TrainConfig

# Settings of model, training and evaluation, the same for all runs.
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96},
        "segment": 64,  # tokens
        "training": {
            # streams; half of the leaderboard's, which makes more steps of the same tokens
            "batch_size": 32,
            "max_iters": 260,
            "learning_rate": 3e-3,
            "warmup_iters": 20,
        },
        "evaluated": (0, 1, 2, 4, 8, 16),  # lengths of the memory, in segments
        "val_streams": 32,
        "val_segments": 8,  # of each stream, that are scored
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "segment": 16,
        "training": {
            "batch_size": 8,
            "max_iters": 10,
            "learning_rate": 3e-3,
            "warmup_iters": 2,
        },
        "evaluated": (0, 1, 2, 4, 8),
        "val_streams": 4,
        "val_segments": 4,
    },
}
WITH_LONG_MEMORIES = ("xl", "shaw", "rope")
MIN_STEPS_TO_JUDGE = 50  # of the predictions of the paper
FRACTIONS = (0.1, 0.5, 1.0)  # of the tokens, the hardest ones, for relative contexts
MIN_GAIN = 0.01  # the threshold of Dai et al. (2019)


@dataclass
class RecurrenceConfig(TextExperiment):
    # position schemes: any but learned and sinusoidal
    schemes: tuple[str, ...] = ("xl", "alibi", "t5", "kerple", "shaw", "nezha", "rope")
    # lengths of the memory in training, in segments; above 1 for xl, shaw and rope only
    memories: tuple[int, ...] = (1, 2, 4, 8)
    seeds: tuple[int, ...] = (1, 2, 3)  # a run for each
    # cpu: 0.5 M parameters, segments of 64 tokens; try: a test of a minute
    budget: Literal["cpu", "try"] = "cpu"
    steps: int = 0  # training steps of a run; 0: as the budget says
    batch_size: int | None = None  # streams in a batch; auto: as the budget says
    segment: int = 0  # tokens of a segment; 0: as the budget says
    train_tokens: int = 0  # tokens of text to train on; 0: as many as the streams can hold
    dtype: Literal["float32"] = "float32"  # dtype of matrix products
    sample: str = "def __init__(self"  # prompt of the text that the report shows

    def __post_init__(self):
        super().__post_init__()
        for name in ("segment", "train_tokens"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value} is negative: leave it out for the usual one")
        evaluated = BUDGETS[self.budget]["evaluated"]
        for n_segments in self.memories:
            require(
                n_segments >= 1, f"a memory of {n_segments} segments holds nothing: give 1 or more"
            )
            require(
                n_segments in evaluated,
                f"no memory of {n_segments} segments is evaluated: choose from "
                f"{', '.join(map(str, evaluated[1:]))}",
            )
        for pos in self.schemes:
            check_memory(GPTConfig(pos=pos), 1)


def list_runs(cfg, dataset):
    budget = BUDGETS[cfg.budget]
    runs = []
    for seed in cfg.seeds:
        for pos in cfg.schemes:
            modes = ["shuffled", "streams"]
            for n_segments in cfg.memories:
                if n_segments == 1 or pos in WITH_LONG_MEMORIES:
                    modes.append(f"memory-{n_segments}")
            runs += [Run(cfg, budget, dataset, pos, mode, seed) for mode in modes]
    return runs


def relative_contexts(losses, lengths):
    """Compute the relative effective context length (RECL) of every model of a group.

    losses: name -> (lengths, N) losses of N tokens, nan where there is none, one row for each of
    `lengths`. Returns name -> {fraction: length}.

    Dai et al. (2019): the baseline b(c, t) is the lowest loss at token t of all models with the
    context c. A model's relative loss with c' > c is the mean over t of min(b(c, t), its loss with
    c'), over the fraction r of the tokens whose b(c, t) is highest. While the relative gain, 1 -
    exp(relative loss - mean b(c, t)), is at least 1 %, the context is lengthened by a step; the
    RECL is the length that it ends at. The steps here are those of `lengths`, memories in segments,
    where the paper has a constant number of tokens.
    """
    scored = torch.stack([x.isfinite().all(0) for x in losses.values()]).all(0)
    losses = {name: x[:, scored].double() for name, x in losses.items()}
    baseline = torch.stack(list(losses.values())).amin(0)  # (lengths, scored tokens)
    results = {name: {} for name in losses}
    for fraction in FRACTIONS:
        n_hard = max(1, int(fraction * baseline.shape[1]))
        for name, own in losses.items():
            i = 0
            while i + 1 < len(lengths):
                hard_losses, hardest = baseline[i].topk(n_hard)
                relative = torch.minimum(hard_losses, own[i + 1, hardest])
                if 1 - (relative.mean() - hard_losses.mean()).exp() < MIN_GAIN:
                    break
                i += 1
            results[name][fraction] = lengths[i]
    return results


def measure_contexts(runs, evaluated):
    """Compute the relative effective context lengths, the models of a seed being a group."""
    contexts = []
    for seed in dict.fromkeys(run.seed for run in runs):
        group = [run for run in runs if run.seed == seed and run.mode in ("streams", "memory-1")]
        losses = {run.name: run.token_losses().flatten(1) for run in group}
        if not losses:
            continue
        lengths = relative_contexts(losses, evaluated)
        for run in group:
            for fraction, length in lengths[run.name].items():
                record = {"pos": run.pos, "mode": run.mode, "seed": seed}
                contexts.append({**record, "fraction": fraction, "segments": length})
    return contexts


def make_sample(runs, prompt, device):
    """Continue a prompt with a trained memory: the name of the model and the text; or None."""
    with_memory = [run for run in runs if run.n_memory]
    tokenizer = runs[0].dataset.tokenizer
    if not with_memory or tokenizer is None or not prompt:
        return None
    run = with_memory[0]
    model = RecurrentGPT.load(run.folder).to(device)
    tokens = data.encode_prompt(tokenizer, run.dataset.bos, prompt)
    generator = torch.Generator(device).manual_seed(run.seed)
    new_tokens = generate(
        model,
        torch.tensor([tokens]),
        max_new_tokens=3 * run.segment,
        capacity=run.n_memory * run.segment,
        segment=run.segment,
        temperature=0.8,
        top_k=40,
        generator=generator,
    )
    text = tokenizer.decode(new_tokens[0].tolist()).decode("utf-8", "replace")
    return {"name": run.name, "text": prompt + text}


# -----------------------------------------------------------------------------
# A run: training and evaluation


N_GROUPS = 8  # of positions in a segment, each with a mean loss of its own


def memory_of(mode):
    """The length of the memory in training, in segments."""
    return int(mode.removeprefix("memory-")) if mode.startswith("memory-") else 0


class Run:
    """
    A scheme that is trained in one mode from one seed: shuffled, streams or memory-SEGMENTS.

    cfg: a RecurrenceConfig, budget: one of BUDGETS. Raises UserError for texts that do not fit.
    """

    def __init__(self, cfg, budget, dataset, pos, mode, seed):
        self.pos, self.mode, self.seed = pos, mode, seed
        self.dataset, self.budget = dataset, budget
        self.segment = cfg.segment or budget["segment"]
        self.n_memory = memory_of(mode)  # segments
        self.name = f"{pos}-{mode}-{seed}"
        self.folder = cfg.run_folder() / self.name
        # The tables of shaw, nezha and t5 follow block_size. It is the longest context in training,
        # memory included, so that every scheme has the tables that its own rule gives for it. With
        # the same seed, all weights outside the scheme start the same.
        self.config = GPTConfig(
            pos=pos,
            **budget["model"],
            block_size=self.segment * (1 + self.n_memory),
            vocab_size=dataset.vocab_size,
        )
        training = dict(budget["training"])
        training["max_iters"] = cfg.steps or training["max_iters"]
        training["batch_size"] = cfg.batch_size or training["batch_size"]
        self.training = TrainConfig(dataset=cfg.dataset, seed=seed, dtype="float32", **training)
        batch_size = self.training.batch_size
        self.text = Streams(dataset.train, dataset.bos, batch_size, self.segment, cfg.train_tokens)
        self.val_text = Streams(dataset.val, dataset.bos, budget["val_streams"], self.segment)
        needed = max(budget["evaluated"]) + budget["val_segments"]
        require(
            self.val_text.n_segments >= needed,
            f"the validation text has {self.val_text.n_segments} segments a stream, and {needed} "
            "are evaluated: give a lower --segment or more text",
        )
        # Shuffled models know neither a memory nor the order of segments: one length is enough.
        self.evaluated = budget["evaluated"][: 2 if mode == "shuffled" else None]

    def key(self):
        evaluation = [self.evaluated, self.budget["val_streams"], self.budget["val_segments"]]
        return {
            "memory": self.n_memory * self.segment,
            "mode": self.mode,
            "model": asdict(self.config),
            "training": asdict(self.training),
            "text": [self.dataset.hash, self.text.n_segments, self.segment],
            "evaluation": evaluation,
        }

    # Training

    def batch(self, step):
        if self.mode == "shuffled":
            return self.text.shuffled_batch(step, self.seed, self.training.max_iters)
        return self.text.batch(step)

    def train(self, device):
        prepare_device(device)
        torch.manual_seed(self.seed)
        model = RecurrentGPT(self.config).to(device).train()
        memory = SegmentMemory(model, self.n_memory * self.segment) if self.n_memory else None
        cfg = self.training
        optimizers = make_optimizers(model, cfg)
        for step in range(cfg.max_iters):
            if memory is not None and step % self.text.n_segments == 0:
                memory.clear()  # the streams start, again perhaps
            run_on, rate = (device, torch.float32), get_lr(cfg, step)
            batch = self.batch(step)
            train_step(model, batch, run_on, optimizers, rate, cfg.grad_clip, cache=memory)
        return model

    # Evaluation

    def evaluate(self, model):
        """Compute the losses with each length of the memory: float32 (lengths, B, S, T)."""
        first = max(self.budget["evaluated"])  # so many segments are context only, for all
        n_segments = self.budget["val_segments"]
        losses = []
        for n_memory in self.evaluated:
            # The memory is full, and each layer's has passed on what the layer below has seen.
            burn_in = min(first, max(n_memory, model.config.n_layer)) if n_memory else 0
            capacity = n_memory * self.segment
            steps = range(first - burn_in, first + n_segments)
            losses.append(stream_losses(model, self.val_text, capacity, steps)[:, burn_in:])
        return torch.stack(losses)

    def measure(self, device):
        """Train and evaluate, or read what that has left in the run folder: a record."""
        file = self.folder / "record.json"
        return measure_run(file, self.key(), self.train_and_evaluate, device)

    def train_and_evaluate(self, device):
        """Train and evaluate; return a record. All losses are left in losses.safetensors."""
        start = time.perf_counter()
        model = self.train(device)
        training_seconds = time.perf_counter() - start
        losses = self.evaluate(model)
        means = losses.double().nanmean((1, 2, 3)).tolist()
        if not math.isfinite(sum(means)):
            raise UserError(f"{self.name}: the loss is not finite: try another number of --steps")
        groups = losses.double().tensor_split(min(N_GROUPS, self.segment), -1)
        by_position = torch.stack([group.nanmean((1, 2, 3)) for group in groups], 1)
        stream = TensorStream({"losses": losses}, [("losses", losses)])
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was stopped here
        model.save(self.folder / f"step-{self.training.max_iters:06d}")
        write_tensors(self.folder / "losses.safetensors", stream)
        own = means[self.evaluated.index(self.n_memory)]
        print(f"{self.name}: {own:.3f} nats per token with its own memory", flush=True)
        return {
            "pos": self.pos,
            "mode": self.mode,
            "seed": self.seed,
            "evaluated": self.evaluated,
            "losses": means,
            "by_position": by_position.tolist(),
            "scored": int(losses[0].isfinite().sum()),
            "training_seconds": training_seconds,
            "seconds": time.perf_counter() - start,
            "commit": current_commit(),
        }

    def token_losses(self):
        """Return what evaluate() has computed, of a measured run."""
        return read_tensor(self.folder / "losses.safetensors", "losses")


def stream_losses(model, text, capacity, steps):
    """
    Compute the losses of these steps of Streams in nats: float32 (B, steps, T), nan where none is.

    capacity: of the memory in tokens, which is empty at first; 0: every segment by itself.
    """
    memory = SegmentMemory(model, capacity) if capacity else None
    losses = []
    with evaluation_mode(model, torch.float32) as device:
        for step in steps:
            x, y = text.batch(step)
            loss = model(x.to(device), y.to(device), cache=memory, reduction="none")
            losses.append(loss.cpu().masked_fill(y < 0, math.nan))
    return torch.stack(losses, 1)


# -----------------------------------------------------------------------------
# The report


class Losses:
    """The records of a board, by scheme and mode."""

    def __init__(self, board):
        self.board = board
        self.schemes = unique(board["records"], "pos")
        self.modes = unique(board["records"], "mode")
        self.models = list(dict.fromkeys((r["pos"], r["mode"]) for r in board["records"]))
        self.n_groups = len(board["records"][0]["by_position"][0])  # of positions

    def select(self, pos, mode, memory=None, groups=None):
        """Return seed -> mean loss, or {} of what was not measured.

        memory: in evaluation, in segments; None: as in training. groups: a slice of the groups of
        positions; None: all of the segment.
        """
        losses = {}
        memory = memory_of(mode) if memory is None else memory
        for record in select(self.board["records"], pos=pos, mode=mode):
            if memory not in record["evaluated"]:
                continue
            row = list(record["evaluated"]).index(memory)
            losses[record["seed"]] = record["losses"][row]
            if groups is not None:
                losses[record["seed"]] = statistics.fmean(record["by_position"][row][groups])
        return losses

    def gain_at(self, pos, groups):
        """Return seed -> memory-1 - streams in some groups of positions."""
        without = self.select(pos, "streams", groups=groups)
        with_memory = self.select(pos, "memory-1", groups=groups)
        return subtract(with_memory, without)

    def contexts(self, pos, mode, fraction):
        """Return seed -> relative effective context length in segments."""
        contexts = self.board["contexts"]
        return by_seed(contexts, "segments", pos=pos, mode=mode, fraction=fraction)


def subtract(a, b):
    """Return seed -> a - b, of two results of select()."""
    return {seed: value - b[seed] for seed, value in a.items() if seed in b}


def cell(values, digits=3):
    """Return the mean and interval of values by seed."""
    return format_interval(values.values(), digits) if values else "–"


# -----------------------------------------------------------------------------
# Tables


def main_table(losses):
    """Return the table of the modes: a line per scheme."""
    header = ["", *losses.modes, "memory-1 - streams", "streams - shuffled"]
    rows = []
    for pos in losses.schemes:
        row = [pos, *(cell(losses.select(pos, mode)) for mode in losses.modes)]
        for a, b in (("memory-1", "streams"), ("streams", "shuffled")):
            row.append(cell(subtract(losses.select(pos, a), losses.select(pos, b))))
        rows.append(row)
    return markdown_table(header, rows)


def memory_table(losses):
    """Return the table by the memory in evaluation: a line per scheme and mode."""
    lengths = losses.board["evaluated"]
    rows = []
    for model in losses.models:
        rows.append([*model, *(cell(losses.select(*model, length)) for length in lengths)])
    return markdown_table(["", "trained", *map(str, lengths)], rows)


def position_table(losses):
    """Return the gain of a memory by position: a line per scheme, and the first quarter's share."""
    n_groups = losses.n_groups
    size = losses.board["segment"] / n_groups
    header = ["", *(f"{round(i * size)}–{round((i + 1) * size) - 1}" for i in range(n_groups))]
    rows = []
    for pos in losses.schemes:
        gains = [losses.gain_at(pos, slice(i, i + 1)) for i in range(n_groups)]
        if not gains[0]:
            continue
        means = [statistics.fmean(gain.values()) for gain in gains]
        share = f"{sum(means[: n_groups // 4]) / sum(means):.0%}" if sum(means) < 0 else "–"
        rows.append([pos, *map(cell, gains), share])
    return markdown_table([*header, "the first quarter's share"], rows)


def context_table(losses):
    """Return the table of relative effective context lengths, in tokens of memory."""
    fractions = unique(losses.board["contexts"], "fraction")
    rows = []
    for model in losses.models:
        cells = []
        for fraction in fractions:
            segments = losses.contexts(*model, fraction)
            tokens = {seed: losses.board["segment"] * n for seed, n in segments.items()}
            cells.append(cell(tokens, digits=0))
        if set(cells) != {"–"}:
            rows.append([*model, *cells])
    return markdown_table(["", "trained", *(f"r = {f:g}" for f in fractions)], rows)


def time_table(losses):
    """Return the table of the seconds of training: a line per scheme, a column per mode.

    Of the fastest seed: the other cores may have been busy during some runs.
    """

    def fastest(pos, mode):
        records = select(losses.board["records"], pos=pos, mode=mode)
        seconds = [record["training_seconds"] for record in records]
        return f"{min(seconds):.1f}" if seconds else "–"

    return grid(losses.schemes, {mode: mode for mode in losses.modes}, fastest)


# -----------------------------------------------------------------------------
# Orderings


def judge(losses):
    """Return the claims of Dai et al. (2019), by topic; what was not measured is left out."""
    topics = {}

    def compare(topic, text, a, b, **bound):
        claim = paired_claim(text, a, b, **bound)
        if claim:
            topics.setdefault(topic, []).append(claim)

    for pos in losses.schemes:
        text = f"{pos}: a memory of one segment below streams without"
        with_memory, without = losses.select(pos, "memory-1"), losses.select(pos, "streams")
        compare("Recurrence", text, with_memory, without, below=0)
    for pos in losses.schemes:
        # Gains are negative differences.
        quarter = losses.n_groups // 4
        early = losses.gain_at(pos, slice(0, quarter))
        late = losses.gain_at(pos, slice(-quarter, None))
        text = f"{pos}: the first quarter of a segment gains more than the last"
        compare("Where the gain lies", text, early, late, below=0)
    for mode in losses.modes:
        if memory_of(mode):
            xl, shaw = losses.select("xl", mode), losses.select("shaw", mode)
            compare("Encodings", f"{mode}: xl below shaw", xl, shaw, below=0)
    for pos, mode in losses.models:
        memory = memory_of(mode)
        lengths = [n for n in losses.board["evaluated"] if n > memory][:2] if memory else []
        for length in lengths:
            text = f"{pos}, {mode}: a memory of {length} below one of {memory} in evaluation"
            longer, own = losses.select(pos, mode, length), losses.select(pos, mode, memory)
            compare("Longer memories in evaluation", text, longer, own, below=0)
    for pos in losses.schemes:
        with_memory = losses.contexts(pos, "memory-1", 0.1)
        without = losses.contexts(pos, "streams", 0.1)
        text = f"{pos}: RECL in segments (r = 0.1) above that of streams without"
        compare("Effective context", text, with_memory, without, above=0)
    return topics


def judge_orderings(losses):
    """Return the parts of the section on the paper's orderings."""
    if not losses.board["judged"]:
        return [not_judged(losses.board["steps"])]
    rule = f"Differences in nats, or in segments for contexts, paired by seed. {RULE}"
    return [rule, topic_lines(judge(losses))]


# -----------------------------------------------------------------------------
# The report


def describe_runs(board):
    """Return the paragraph that says what was trained and measured."""
    tokens = board["steps"] * board["batch_size"] * board["segment"]
    fastest = {}  # seed, of each kind of run: other work may slow a machine down for a while
    for record in board["records"]:
        kind = record["pos"], record["mode"]
        fastest[kind] = min(record["seconds"], fastest.get(kind, math.inf))
    return (
        f"Each run ({format_settings(board['model'])}) trains on {tokens:,} tokens: "
        f"{board['steps']} steps of {board['batch_size']} segments of {board['segment']} tokens "
        "with AdamW, the same tokens for all. `shuffled`: in random order; `streams`: in the order "
        "of the text; `memory-N`: as streams, with a memory of N segments. Losses are in nats per "
        "token of held-out text, on the same tokens for all: the mean over the seeds and its 95 % "
        "interval. In evaluation a memory is full before the first scored token, and tokens early "
        "in a segment have only the memory before them. The longest context in training, memory "
        f"included, sets the tables of shaw, nezha and t5. The {len(fastest)} runs of a seed take "
        f"{sum(fastest.values()) / 60:.1f} minutes of one process, evaluation included: each of "
        "them by its fastest seed."
    )


def report(board):
    losses = Losses(board)
    about_contexts = (
        "As Dai et al. (2019) define it, for the group of all models of a seed in this table, in "
        "the steps of the memories above. The definition counts what improves and not what gets "
        "worse, so a model whose losses scatter with a memory that it never saw gains, too."
    )
    contexts = "Relative effective context, in tokens of memory"
    lines = [
        *title(board, "Segment-level recurrence"),
        "",
        describe_runs(board),
        "",
        "![losses](recurrence.png)",
        *section("Loss with the memory of training", main_table(losses)),
        *section("Loss by the memory in evaluation, in segments", memory_table(losses)),
        *section("memory-1 - streams, by position in the segment", position_table(losses)),
        *section(contexts, about_contexts, context_table(losses)),
        *section("Seconds of training, of the fastest seed", time_table(losses)),
        *section("Orderings", *judge_orderings(losses)),
    ]
    if board["sample"]:
        text = board["sample"]["text"].splitlines()
        lines += section(f"A sample of {board['sample']['name']}", ["    " + t for t in text])
    return lines


def plot_losses(board, folder):
    """Plot the loss by position and by the memory in evaluation: the means of the seeds."""
    losses = Losses(board)
    n_groups = losses.n_groups
    centres = [(i + 0.5) * board["segment"] / n_groups for i in range(n_groups)]
    lengths = board["evaluated"]

    def draw(figure, left, right):
        shown = []  # the losses that the limits of the right panel follow
        for i, pos in enumerate(losses.schemes):
            for mode, style in (("streams", "--"), ("memory-1", "-")):
                groups = [slice(g, g + 1) for g in range(n_groups)]
                by_group = [losses.select(pos, mode, groups=group) for group in groups]
                if not by_group[0]:
                    continue
                label = f"{pos}, {mode}"
                means = [statistics.fmean(found.values()) for found in by_group]
                left.plot(centres, means, style, color=f"C{i}", marker=".", label=label)
                by_memory = [losses.select(pos, mode, length) for length in lengths]
                means = [statistics.fmean(found.values()) for found in by_memory]
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
        figure.legend(loc="outside right upper", fontsize=8)

    save_figure(folder / "recurrence.png", draw, (11, 4.8), board["note"], panels=(1, 2))


def measure(cfg):
    dataset = cfg.load_dataset()
    runs = list_runs(cfg, dataset)
    device, _ = cfg.pick_device()
    records = [run.measure(device) for run in runs]
    evaluated = BUDGETS[cfg.budget]["evaluated"]
    steps = runs[0].training.max_iters
    return {
        "note": (
            f"{cfg.note(dataset, [record['commit'] for record in records])}, "
            f"{records[0]['scored']:,} tokens scored, {count(len(cfg.seeds), 'seed')}"
        ),
        "model": BUDGETS[cfg.budget]["model"],
        "segment": runs[0].segment,
        "batch_size": runs[0].training.batch_size,
        "steps": steps,
        "judged": steps >= MIN_STEPS_TO_JUDGE,
        "evaluated": evaluated,
        "records": records,
        "contexts": measure_contexts(runs, evaluated),
        "sample": make_sample(runs, cfg.sample, device),
    }


main = make_main(RecurrenceConfig, measure, report, plot_losses)

if __name__ == "__main__":
    cli.run_main(main)
