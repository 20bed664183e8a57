"""When, and on which data, should a model be extended? Four recipes, each against its alternatives.

    python experiments/recipes.py                   all three, three seeds
    python experiments/recipes.py --part=stages --seeds=2
                                                    some: several processes may share the work
    python experiments/recipes.py --budget=try      seconds, a test without meaning

Stop at any time: the same command continues where it stopped, and one with all parts and seeds
collects what several processes have measured. It writes recipes.md, .json and .png to --out_dir.

mixtures: a model is extended by YaRN and fine-tuned on none, a third, two thirds or nothing but
long documents, the rest short ones, in sequences of the target length.
stages: the length grows twice within a run, at 90 % and 95 % of the steps, with the optimizer and
the schedule going on; or once at 95 %; or it is the target from the start, all on as many tokens.
drope: RoPE is dropped after pretraining, and the model trained on at its length for a few steps.
The published report has a fourth part, windows: train.py no longer has a window that grows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import itertools
import random
import time
from dataclasses import dataclass
from typing import Literal

import data
from data.prepare import write_dataset
from experiments import report as base
from experiments.report import (
    RULE,
    TextExperiment,
    by_seed,
    check_names,
    claim_lines,
    commits_of,
    confidence_interval,
    effort,
    format_interval,
    format_settings,
    grid,
    length_axis,
    make_main,
    paired_claim,
    save_figure,
    score_losses,
    section,
    select,
    title,
    train_model,
    train_or_stop,
)
from extend import ExtendConfig, extend_model
from model import GPT
from nanolong import cli
from nanolong.plots import unique
from train import TrainConfig


@dataclass
class RecipesConfig(TextExperiment):
    budget: Literal["cpu", "try"] = "cpu"  # sizes
    seeds: tuple[int, ...] = (1, 2, 3)  # which runs
    part: tuple[str, ...] = ()  # mixtures, stages, drope; default: all

    def __post_init__(self):
        super().__post_init__()
        self.part = self.part or tuple(PARTS)
        check_names("part", self.part, PARTS)


# tokens of a step; steps of a run, and of the fine-tuning on a mixture; scored tokens
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 64},
        "length": 64,
        "tokens": 2048,
        "steps": 400,
        "tuning_steps": 60,
        "max_tokens": 32768,
    },
    "try": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16},
        "length": 16,
        "tokens": 512,
        "steps": 40,
        "tuning_steps": 2,
        "max_tokens": 1024,
    },
}
LEARNING_RATE = 3e-3
MIXTURES = (0, 34, 66, 100)  # % of the sequences that are of long documents
MIXTURE_FACTOR = 8  # of the context extension
STAGE_LENGTHS = (1, 4, 16)  # in original lengths
STAGE_ENDS = (0.9, 0.95)  # of the steps
DROPE_PERCENT = (0.5, 2, 8)  # of the steps of pretraining
DROPE_LENGTHS = (1, 2, 4, 8)

# -----------------------------------------------------------------------------
# Data


def write_sources(dataset, folder, length, target):
    """Write two datasets from one: documents of at least `target` tokens, and pieces of `length`.

    Documents go to each in turn. Pieces are shuffled: neighbours would be one long text again.
    """
    splits = {"long": {}, "short": {}}
    for name in ("train", "val"):
        split = getattr(dataset, name)
        texts = []
        edges_of_files = split.documents(dataset.separator)
        for tokens, edges in zip(split.tokens, edges_of_files, strict=True):
            texts += [bytes(tokens[start:stop].tolist()) for start, stop in edges]
        splits["long"][name] = [text for text in texts[::2] if len(text) >= target]
        n = length - 1  # and <bos>
        pieces = [text[i : i + n] for text in texts[1::2] for i in range(0, len(text), n)]
        random.Random(0).shuffle(pieces)
        splits["short"][name] = pieces
    for name, texts in splits.items():
        if not (folder / name).is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            about = {"source": dataset.name}
            write_dataset(folder / name, data.ByteTokenizer(), texts, about, raw=False)
    return {name: str(folder / name) for name in splits}


# -----------------------------------------------------------------------------
# Measuring


class SeedRun(base.SeedRun):
    """The runs of one part and seed, and what has been measured on them."""

    def __init__(self, cfg, part, seed, dataset):
        folder = cfg.run_folder() / f"{part}-{seed}"
        super().__init__(cfg, seed, dataset, BUDGETS[cfg.budget], folder)
        self.length = self.budget["length"]

    def settings(self, name, length, **changes):
        """Return the settings of TrainConfig of a run with sequences of this length."""
        batch_size = max(1, self.budget["tokens"] // length)
        settings = self.train_settings(name, self.budget["steps"], batch_size=batch_size)
        return settings | changes

    def pretrain(self, name, length=None, **changes):
        length = length or self.length
        config = TrainConfig(**self.settings(name, length, **changes))
        model_settings = {**self.budget["model"], "block_size": length}
        return train_model(model_settings, config, self.dataset).to(self.device)

    def tune(self, model, name, length, steps, **changes):
        """Train a model that is extended already, at 0.3 of the learning rate."""
        changes = {"learning_rate": 0.3 * LEARNING_RATE, "weight_decay": 0.0, **changes}
        config = self.settings(name, length, max_iters=steps, **changes)
        config |= {"warmup_iters": min(10, steps // 4), "overwrite": True}
        train_or_stop(model, TrainConfig(**config), length)
        return model

    def go_on(self, parent, name, factor, **changes):
        """Extend the newest checkpoint of a run, and go on with its optimizer and its schedule."""
        model = GPT.load(self.folder / parent)
        length = round(model.config.block_size * factor)
        settings = self.settings(name, length, overwrite=True, **changes)
        settings = {"weight_decay": TrainConfig.weight_decay, **settings}
        config = ExtendConfig(factor=factor, keep_optimizer=True, **settings)
        extend_model(model, config, {}, 0)
        train_or_stop(model, config)
        return model

    def losses(self, model, factors, dataset=""):
        """Return the loss in the last quarter at each length, in original lengths: name -> nats."""
        lengths = [factor * self.length for factor in factors]
        max_tokens = self.budget["max_tokens"]
        records = score_losses("", model, self.cfg, lengths, ("last-quarter",), max_tokens, dataset)
        return {str(f): record["loss"] for f, record in zip(factors, records, strict=True)}

    # The parts: each returns variant -> measures.

    def mixtures(self):
        target = MIXTURE_FACTOR * self.length
        sources = write_sources(self.dataset, self.folder / "data", self.length, target)
        both = "{long}:{:.2f},{short}:{:.2f}"
        self.pretrain("base", dataset=both.format(0.5, 0.5, **sources))
        found = {}
        for percent in (None, *MIXTURES):
            model = GPT.load(self.folder / "base").to(self.device)
            if percent is not None:
                model.extend("yarn", MIXTURE_FACTOR)
                mixture = both.format(percent / 100, 1 - percent / 100, **sources)
                mixture = {0: sources["short"], 100: sources["long"]}.get(percent, mixture)
                steps = self.budget["tuning_steps"]
                settings = {"dataset": mixture, "separate_docs": True}
                self.tune(model, f"{percent}%", target, steps, **settings)
            short = self.losses(model, [1], sources["short"])["1"]
            long = self.losses(model, [1, MIXTURE_FACTOR], sources["long"])
            name = "not extended" if percent is None else f"{percent} % long"
            found[name] = {"short": short, "long": long[str(MIXTURE_FACTOR)]}
        return found

    def stages(self):
        first, second = (round(end * self.budget["steps"]) for end in STAGE_ENDS)
        start, middle, target = (factor * self.length for factor in STAGE_LENGTHS)
        seconds = {}
        models = {}

        def timed(name, function, *args, **changes):
            began = time.process_time()
            models[name] = function(*args, **changes)
            seconds[name] = time.process_time() - began

        timed("first", self.pretrain, "first", start, stop_at=first)
        timed("second", self.go_on, "first", "second", middle // start, stop_at=second)
        timed("three lengths", self.go_on, "second", "third", target // middle)
        seconds["three lengths"] += seconds["first"] + seconds["second"]
        timed("late", self.pretrain, "late", start, stop_at=second)
        timed("one late jump", self.go_on, "late", "jump", target // start)
        seconds["one late jump"] += seconds["late"]
        timed("target length", self.pretrain, "target", target)
        timed("original length", self.pretrain, "original", start)
        found = {}
        for name in STAGE_VARIANTS:
            losses = self.losses(models[name], STAGE_LENGTHS)
            found[name] = {**losses, "seconds": seconds[name]}
        return found

    def drope(self):
        self.pretrain("base")
        found = {}
        for name in DROPE_VARIANTS:
            model = GPT.load(self.folder / "base").to(self.device)
            if name == "YaRN, zero-shot":
                model.extend("yarn", DROPE_LENGTHS[-1])
            elif name != "not extended":
                model.extend("drope", DROPE_LENGTHS[-1])
                steps = max(1, round(float(name.split()[1]) / 100 * self.budget["steps"]))
                changes = {"learning_rate": LEARNING_RATE}
                self.tune(model, name.replace(" ", "-"), self.length, steps, **changes)
            found[name] = self.losses(model, DROPE_LENGTHS)
        return found


STAGE_VARIANTS = ("original length", "three lengths", "one late jump", "target length")
WINDOW_VARIANTS = ("full attention", "growing window")
DROPE_VARIANTS = ("not extended", "YaRN, zero-shot", *(f"DroPE {p} %" for p in DROPE_PERCENT))
PARTS = {
    "mixtures": SeedRun.mixtures,
    "stages": SeedRun.stages,
    "drope": SeedRun.drope,
}


def measure(cfg):
    dataset = cfg.load_dataset()
    records, runs = [], []
    for part, seed in itertools.product(cfg.part, cfg.seeds):
        run = SeedRun(cfg, part, seed, dataset)
        found = run.measure(part, PARTS[part], run)
        for variant, values in found.items():
            records.append({"part": part, "seed": seed, "variant": variant, **values})
        runs.append(run)
    return {
        "note": f"{cfg.note(dataset, commits_of(runs))}; {effort(runs)}",
        "budget": BUDGETS[cfg.budget],
        "records": records,
    }


# -----------------------------------------------------------------------------
# The report

TITLES = {"mixtures": "Mixtures", "stages": "Stages", "windows": "Windows", "drope": "DroPE"}
NOTES = {
    "mixtures": (
        "`short`: the loss on short documents at the original length; `long`: on long documents at "
        "the target. Sequences of the target length hold many short documents, and attention stays "
        "inside a document."
    ),
    "stages": "The loss by context length in original lengths, and the seconds of the processor.",
    "windows": (
        "As many steps of as many tokens, without and with a window that grows from a 16th of the "
        "context over 60 % of the run. The loss by context length in original lengths (the context "
        "has 8), and the seconds of the processor."
    ),
    "drope": "The loss by context length in original lengths; DroPE by its % of pretraining.",
}


# what the literature says of a part: the first variant has the higher loss
PREDICTIONS = {
    "mixtures": [
        ("100 % long raises the loss on short documents", "100 % long", "0 % long", "short"),
        ("34 % long raises it less than 100 %", "100 % long", "34 % long", "short"),
        ("100 % is not best at the target: 66 % is", "100 % long", "66 % long", "long"),
    ],
    "stages": [
        ("one late jump is worse than three lengths", "one late jump", "three lengths", "16"),
        ("the target from the start is worse", "target length", "three lengths", "16"),
        ("it is worse at the original length, too", "target length", "three lengths", "1"),
    ],
    "windows": [("full attention throughout is worse", *WINDOW_VARIANTS, "8")],
    "drope": [
        ("YaRN is worse than 2 % of DroPE at 8 lengths", "YaRN, zero-shot", "DroPE 2 %", "8"),
        ("0.5 % of DroPE is worse than 8 %", "DroPE 0.5 %", "DroPE 8 %", "8"),
        ("8 % of DroPE costs at the original length", "DroPE 8 %", "not extended", "1"),
    ],
}


def judge(board, part):
    """Return the Claims of the literature about a part; a difference is a minus b, by seed."""
    claims = []
    for text, *pair, measure in PREDICTIONS[part]:
        a, b = (by_seed(board["records"], measure, part=part, variant=name) for name in pair)
        claims.append(paired_claim(text, a, b, above=0))
    return [claim for claim in claims if claim]


def measures_of(records):
    return [key for key in records[0] if key not in ("part", "seed", "variant")]


def table(board, part):
    records = select(board["records"], part=part)

    def cell(variant, measure):
        digits = 0 if measure == "seconds" else 3
        return format_interval(by_seed(records, measure, variant=variant).values(), digits)

    columns = {measure: measure for measure in measures_of(records)}
    return grid(unique(records, "variant"), columns, cell)


def report(board):
    budget = board["budget"]
    about = (
        f"Models of {format_settings(budget['model'])}, trained for {budget['steps']} steps of "
        f"{budget['tokens']:,} tokens; the original length is {budget['length']}. Losses are in "
        "nats per byte in the last quarter of a sequence: the mean over the seeds and its 95 % "
        f"interval. {RULE}"
    )
    lines = [*title(board, "When to extend, and on which data"), "", about]
    for part in unique(board["records"], "part"):
        lines += section(TITLES[part], NOTES[part], table(board, part))
        lines += ["", *claim_lines(judge(board, part))]
    return lines


def plot(board, folder):
    """Draw the losses of each part, with their 95 % intervals."""
    parts = unique(board["records"], "part")

    def draw(figure, *axes):
        for part, axis in zip(parts, axes, strict=True):
            draw_part(board, part, axis)

    save_figure(folder / "recipes.png", draw, (5 * len(parts), 4), board["note"], (1, len(parts)))


def draw_part(board, part, axis):
    records = select(board["records"], part=part)
    measures = [measure for measure in measures_of(records) if measure != "seconds"]
    for variant in unique(records, "variant"):
        of_variant = select(records, variant=variant)
        intervals = [confidence_interval([r[m] for r in of_variant]) for m in measures]
        means, half_widths = zip(*intervals, strict=True)
        if part == "mixtures":
            axis.errorbar(*means, *half_widths[::-1], fmt="o", label=variant)
        else:
            lengths = [int(measure) * board["budget"]["length"] for measure in measures]
            axis.errorbar(lengths, means, half_widths, fmt="o-", capsize=3, label=variant)
            length_axis(axis, lengths)
    if part == "mixtures":
        axis.set(xlabel="loss on short documents", ylabel="loss on long documents")
    else:
        axis.set(ylabel="nats per byte in the last quarter")
    axis.set_title(TITLES[part])
    axis.legend(fontsize=7)


main = make_main(RecipesConfig, measure, report, plot)

if __name__ == "__main__":
    cli.run_main(main)
