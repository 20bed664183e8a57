"""Which choices of architecture and training make a model hard to extend, and do they add up?

    python experiments/extensibility.py                three seeds of 17 models
    python experiments/extensibility.py --seeds=2,3    some: several processes may share the seeds
    python experiments/extensibility.py --budget=try   seconds, a test without meaning

Stop at any time: the same command continues where it stopped, and one with all seeds collects what
several processes have measured. It writes extensibility.md and .json to --out_dir.

OlmPool, a set of models that were extended, is said to show that QK-norm, grouped queries, window
layers and short pretraining each cost little of the long-context quality, that three together cost
half of it, and that perplexity shows none of it. Its models with QK-norm mostly have their norms
after the layers, so here the position of norms is a factor of its own.

The design is a half fraction, 2^(5-1), with the defining relation I = QNGWS: of the 32 combinations
of five factors the 16 with one, three or five of them. An effect is then confounded with the
interaction of the four other factors only, and an interaction of two with that of the three others.
The plain model, which is not in this half, is trained as well, to compare one and three with it.

Every model learns text and to find a hidden value at the training length, is extended 4 times by
YaRN (with window layers, in the full layers only), and is then fine-tuned for a few steps at the
target length. It is measured before, after (zero-shot) and at the end (fine-tuned), at 1, 2 and 4
times the training length.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import functools
import itertools
import statistics
from dataclasses import dataclass
from operator import getitem
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from data.ruler import ruler_prompt
from experiments import report as base
from experiments.report import (
    RULE,
    Claim,
    TextExperiment,
    claim_lines,
    commits_of,
    confidence_interval,
    count,
    effort,
    format_interval,
    format_settings,
    grid,
    hash_code,
    make_main,
    score_losses,
    section,
    select,
    title,
    train_model,
    train_or_stop,
)
from nanolong import cli
from nanolong.losses import evaluation_mode
from nanolong.scoring import find_sequences
from train import TrainConfig


@dataclass
class ExtensibilityConfig(TextExperiment):
    budget: Literal["cpu", "try"] = "cpu"  # sizes
    seeds: tuple[int, ...] = (1, 2, 3)  # which runs


# steps of pretraining and of fine-tuning, scored tokens of text, and prompts of each length
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64},
        "batch_size": 32,
        "steps": 1000,
        "tuning_steps": 60,
        "max_tokens": 32768,
        "prompts": 128,
    },
    "try": {
        "model": {"n_layer": 4, "n_head": 2, "n_embd": 16, "block_size": 48},
        "batch_size": 4,
        "steps": 2,
        "tuning_steps": 1,
        "max_tokens": 512,
        "prompts": 2,
    },
}
LEARNING_RATE = 3e-3
TASK = "niah"  # one key with one value
# of the sequences: with fewer of these documents models this small learn the task much later
TASK_FRACTION = 0.75
FACTOR = 4  # of the context extension
LENGTHS = (1, 2, FACTOR)  # that are measured, in training lengths
STAGES = ("before", "zero-shot", "fine-tuned")

# -----------------------------------------------------------------------------
# The design

FACTORS = {
    "Q": "QK-norm: RMSNorm on the queries and keys of each head",
    "N": "norm position: norms after attention and MLP, not before",
    "G": "grouped queries: one key/value head for all query heads",
    "W": "window layers: three of four layers see a quarter of the training length",
    "S": "short pretraining: half of the steps",
}


def combinations(n):
    """Return the names of all combinations of n factors: their letters, such as QN."""
    return ["".join(letters) for letters in itertools.combinations(FACTORS, n)]


FRACTION = combinations(1) + combinations(3) + combinations(5)
PLAIN = "none"
MODELS = (PLAIN, *FRACTION)
OF_THE_PAPER = "QGW"  # its factors of the architecture


def model_settings(name, budget):
    """Return the settings of GPTConfig of a model, without vocab_size."""
    settings = dict(budget["model"])
    if "Q" in name:
        settings["qk_norm"] = "head"
    if "N" in name:
        settings["norm_position"] = "post"
    if "G" in name:
        settings["n_kv_head"] = 1
    if "W" in name:
        settings |= {"layer_pattern": "WWWF", "window": settings["block_size"] // 4}
    return settings


# -----------------------------------------------------------------------------
# Measuring


@functools.cache
def make_prompts(dataset, length, n_prompts, needles):
    """Return the inputs and targets of prompts, int64 (N, T); targets that do not count are -1."""
    prompts = []
    for sample in range(n_prompts):
        prompt = ruler_prompt(
            TASK, dataset.tokenizer, length, 1, sample, bos=dataset.bos, needles=needles
        )
        prompts.append((torch.from_numpy(prompt.inputs), torch.from_numpy(prompt.targets)))
    inputs, targets = zip(*prompts, strict=True)
    return pad_sequence(inputs, True), pad_sequence(targets, True, padding_value=-1)


def answer(model, x, y, dtype):
    """Return the nats of each prompt's answer, and whether all its tokens are predicted: (N,)."""
    with evaluation_mode(model, dtype) as device:
        hidden_states = [model.hidden_states(part.to(device), None) for part in x.split(32)]
        logits = model.head(torch.cat(hidden_states)).float().cpu()
    losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=-1)
    is_predicted = (logits.argmax(-1) == y) | (y < 0)
    return losses.sum(1), is_predicted.all(1)


class SeedRun(base.SeedRun):
    """The models of one seed, which learn a task, too, and are extended and fine-tuned."""

    factor = FACTOR
    lengths = LENGTHS

    def __init__(self, cfg, seed, dataset, budget, folder):
        training = [LEARNING_RATE, TASK, TASK_FRACTION, self.factor]
        scored = hash_code([find_sequences, ruler_prompt])
        super().__init__(cfg, seed, dataset, budget, folder, training=training, scored=scored)

    def train_config(self, name, steps, **settings):
        tasks = (f"{TASK}:{TASK_FRACTION}",)
        return TrainConfig(**self.train_settings(name, steps, tasks=tasks, **settings))

    def pretrain(self, settings, name, steps):
        """Return the model with these settings of GPTConfig, trained at the first call."""
        config = self.train_config(name, steps, batch_size=self.budget["batch_size"])
        return train_model(settings, config, self.dataset)

    def fine_tune(self, model, name):
        """Train an extended model at its new length, with as many tokens a step as before."""
        config = self.train_config(
            f"{name}-tuned",
            self.budget["tuning_steps"],
            batch_size=self.budget["batch_size"] // self.factor,
            learning_rate=0.3 * LEARNING_RATE,  # as in extend.py
            weight_decay=0.0,
            overwrite=True,  # what was stopped begins again
        )
        train_or_stop(model, config)

    def measure_stage(self, model, stage):
        """Measure loss and retrieval at all lengths: a list of records."""
        lengths = [factor * self.budget["model"]["block_size"] for factor in self.lengths]
        max_tokens = self.budget["max_tokens"]
        losses = score_losses(stage, model, self.cfg, lengths, ("last-quarter",), max_tokens)
        records = []
        for factor, length, loss in zip(self.lengths, lengths, losses, strict=True):
            prompts = (self.dataset, length, self.budget["prompts"])
            nats, is_exact = answer(model, *make_prompts(*prompts, True), self.dtype)
            nats_without, _ = answer(model, *make_prompts(*prompts, False), self.dtype)
            record = {"stage": stage, "length": factor, "loss": loss["loss"]}
            record["nats"] = nats.mean().item()
            record["gain"] = (nats_without - nats).mean().item()
            record["exact"] = is_exact.float().mean().item()
            records.append(record)
        return records

    def measure_model(self, name):
        """Train, extend and fine-tune a model; return the records of all stages."""
        steps = self.budget["steps"]
        if "S" in name:
            steps //= 2
        model = self.pretrain(model_settings(name, self.budget), name, steps).to(self.device)
        records = self.measure_stage(model, "before")
        model.extend("yarn", self.factor)
        records += self.measure_stage(model, "zero-shot")
        self.fine_tune(model, name)
        return records + self.measure_stage(model, "fine-tuned")


def measure(cfg):
    dataset = cfg.load_dataset()
    budget, folder = BUDGETS[cfg.budget], cfg.run_folder()
    seeds = cfg.seeds
    runs = [SeedRun(cfg, seed, dataset, budget, folder / str(seed)) for seed in seeds]
    records = []
    for run in runs:
        for name in MODELS:
            for record in run.measure(name, run.measure_model, name):
                records.append({"seed": run.seed, "model": name, **record})
    return {
        "note": f"{cfg.note(dataset, commits_of(runs))}; {effort(runs)}",
        "budget": budget,
        "records": records,
    }


# -----------------------------------------------------------------------------
# The analysis. `values` are those of one seed and one measure: model -> number.


def values_by_seed(board, stage, length, measure):
    found = {}
    for record in select(board["records"], stage=stage, length=length):
        found.setdefault(record["seed"], {})[record["model"]] = record[measure]
    return list(found.values())


def effect(values, factors):
    """Return the effect of a factor, or the interaction of several: a difference of two means.

    They are of the models of the fraction in which an even number of these factors is off, and of
    those in which an odd number is off.
    """
    total = 0.0
    for name in FRACTION:
        n_off = sum(letter not in name for letter in factors)
        total += (-1) ** n_off * values[name]
    return total / (len(FRACTION) / 2)


def change(values, name):
    """Return what the factors of a model change, compared with the plain model."""
    return values[name] - values[PLAIN]


def excess(values, name):
    """Return what the factors of a model change together beyond the sum of each alone."""
    return change(values, name) - sum(change(values, letter) for letter in name)


def rank_correlation(x, y):
    """Return Spearman's rank correlation; 0 if all numbers of either are equal."""
    if len(set(x)) == 1 or len(set(y)) == 1:
        return 0.0

    def ranks(numbers):  # equal ones share their mean rank
        ordered = sorted(numbers)
        return [ordered.index(number) + ordered.count(number) / 2 for number in numbers]

    return statistics.correlation(ranks(x), ranks(y))


def loss_and_retrieval(board, stage, names):
    """Return the rank correlation of loss and exact matches at the target length, by seed."""
    losses = values_by_seed(board, stage, FACTOR, "loss")
    fractions = values_by_seed(board, stage, FACTOR, "exact")
    return [
        rank_correlation([loss[name] for name in names], [exact[name] for name in names])
        for loss, exact in zip(losses, fractions, strict=True)
    ]


# -----------------------------------------------------------------------------
# Claims

LITTLE, MUCH = 0.15, 0.3  # of the plain model's exact matches
LOSS_MARGIN = 0.05  # nats: 5 % of a perplexity


def judge(board, stage):
    """Return the Claims of the paper about one stage, at the target length; [] without retrieval.

    Changes of exact matches are fractions of the plain model's, their mean over the seeds.
    """
    exact = values_by_seed(board, stage, FACTOR, "exact")
    plain = statistics.fmean(values[PLAIN] for values in exact)
    if plain < 0.1:
        return []
    claims = []

    def claim(text, numbers, **bound):
        claims.append(Claim(text, *confidence_interval(numbers), **bound))

    for letter in FACTORS:
        changes = [change(values, letter) / plain for values in exact]
        claim(f"{letter} alone costs little", changes, above=-LITTLE)
    changes = [change(values, OF_THE_PAPER) / plain for values in exact]
    claim(f"{OF_THE_PAPER} costs much", changes, below=-MUCH)
    for text, function, bound in (
        ("three factors cost much", change, -MUCH),
        ("three factors cost more than the sum of each alone", excess, 0),
    ):
        means = [statistics.fmean(function(v, name) for name in combinations(3)) for v in exact]
        claim(f"{text}, mean of ten models", [mean / plain for mean in means], below=bound)
    for letter in "QN":
        effects = [effect(values, letter) / plain for values in exact]
        claim(f"{letter} costs, over the 16 models", effects, below=0)
    changes = [
        change(values, OF_THE_PAPER) for values in values_by_seed(board, stage, FACTOR, "loss")
    ]
    claim(f"{OF_THE_PAPER} hardly raises the loss (nats)", changes, below=LOSS_MARGIN)
    correlations = loss_and_retrieval(board, stage, MODELS)
    claim("the loss ranks models otherwise than exact matches do", correlations, above=-0.5)
    return claims


# -----------------------------------------------------------------------------
# The report

COLUMNS = [("before", 1, "loss"), ("before", 1, "exact")]
COLUMNS += [("zero-shot", length, "exact") for length in LENGTHS[:-1]]
COLUMNS += itertools.product(STAGES[1:], [FACTOR], ("loss", "nats", "gain", "exact"))

MODEL_NOTE = (
    "A name has the letters of its factors. `loss`: nats per byte in the last quarter of a "
    "sequence. Of prompts that hide a value, `nats`: of the answer; `gain`: how many more it has "
    "if the value is not in the prompt; `exact`: the fraction whose whole answer is predicted. "
    "Lengths are in training lengths. The mean over the seeds and its 95 % interval."
)
EFFECT_NOTE = (
    "The mean of the models with a factor minus that of the others, and the interactions of two. "
    "An asterisk: the interval excludes 0, as by chance one of 20 does. A design that moves the "
    "norms with QK-norm, as most models of the paper do, measures Q + N in place of Q."
)
EXCESS_NOTE = "What three factors change in all, minus the sum of what each of them changes alone."
CORRELATION_NOTE = (
    "Spearman's rank correlation of loss and exact matches at the target length; -1: the loss "
    "ranks the models as retrieval does."
)
CLAIM_NOTE = (
    "Changes are fractions of the plain model's exact matches at the target length: little is at "
    f"most {LITTLE:.0%} less, much at least {MUCH:.0%} less. {RULE}"
)


def table(board, names, function, columns):
    """Return a table of function(values, name): a line per name, a stage, length, measure each."""

    def cell(name, column):
        numbers = [function(values, name) for values in values_by_seed(board, *column)]
        mean, half_width = confidence_interval(numbers)
        is_separated = function is not getitem and abs(mean) > half_width
        return format_interval(numbers) + (" *" if is_separated else "")

    titles = [f"{stage} {length}x {measure}" for stage, length, measure in columns]
    return grid(names, dict(zip(titles, columns, strict=True)), cell)


def report(board):
    budget = board["budget"]
    tuning = count(budget["tuning_steps"], "step")
    models = (
        f"Models of {format_settings(budget['model'])}, trained for {budget['steps']} steps, "
        f"extended {FACTOR} times by YaRN, and fine-tuned for {tuning}. {MODEL_NOTE}"
    )
    claims, correlations = [], []
    full = [name for name in MODELS if "S" not in name]
    for stage in STAGES[1:]:
        found = claim_lines(judge(board, stage))
        claims += [f"### {stage}", found or "Not judged: the plain model finds hardly any value."]
        of_all = format_interval(loss_and_retrieval(board, stage, MODELS))
        of_full = format_interval(loss_and_retrieval(board, stage, full))
        correlations.append(f"- {stage}: {of_all}; without short pretraining {of_full}")
    factors = [f"- {letter}: {words}" for letter, words in FACTORS.items()]
    effects = table(board, combinations(1) + combinations(2), effect, COLUMNS)
    of_exact = [column for column in COLUMNS if column[1:] == (FACTOR, "exact")]
    return [
        *title(board, "Which choices make a model hard to extend"),
        *section("Models", models, factors, table(board, MODELS, getitem, COLUMNS)),
        *section("Effects", EFFECT_NOTE, effects),
        *section("Three at once", EXCESS_NOTE, table(board, combinations(3), excess, of_exact)),
        *section("Perplexity and retrieval", CORRELATION_NOTE, correlations),
        *section("Claims", CLAIM_NOTE, *claims),
    ]


main = make_main(ExtensibilityConfig, measure, report)

if __name__ == "__main__":
    cli.run_main(main)
