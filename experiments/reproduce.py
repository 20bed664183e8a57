"""Measure what context extension buys: every method on small models, needles, and probes.

    python experiments/reproduce.py --budget=cpu     under an hour of 2 cores; two seeds
    python experiments/reproduce.py --budget=gpu     larger models on longer text; three seeds
    python experiments/reproduce.py --budget=try     minutes, a test; its numbers mean nothing
    python experiments/reproduce.py --redraw=true    only the tables and the figures, from the
                                                     reproduce.json that is there

Stop at any time: the same command continues where it stopped. The results go to
reproduce.md, .json, .png and needles.png in --out_dir. There are four parts:

1. methods: a RoPE model is extended 4 times by every method and evaluated, zero-shot and after
   fine-tuning at the target length. The loss is that of the last quarter of sequences that do not
   overlap, the same for all methods.
       gap closed = (baseline - method) / (baseline - native)   at the target length
   where native is a model trained at the target from scratch, for as many tokens as pretraining and
   fine-tuning together. 0 is as bad as the baseline model, 1 as good as the native one.
2. needles: passkeys found, by length and depth, with the same prompts for all methods. The models
   are trained on passkey documents of up to the training length only.
3. probe: which layers know the position, and how far attention heads look.
4. table: which method each scheme takes, by trying them all.

The report ends with the orderings that the literature predicts, each judged in every seed by its
95 % interval over sequences or prompts. experiments/papers/ has more.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import copy
import math
import statistics
from dataclasses import asdict, dataclass, fields
from typing import Literal

import torch

from experiments import report as base
from experiments.attention_maps import distances
from experiments.probe import probe, shuffled_prefix
from experiments.report import (
    RULE,
    Claim,
    TextExperiment,
    commits_of,
    count,
    count_parameters,
    format_settings,
    hash_code,
    length_axis,
    make_main,
    markdown_table,
    save_figure,
    section,
    select,
    title,
    train_model,
    train_step,
)
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.errors import UserError
from nanolong.losses import evaluation_mode, sequence_losses
from nanolong.optim import make_optimizers
from nanolong.plots import plot_needle_heatmaps, unique
from nanolong.retrieval import find_needle
from nanolong.scoring import find_sequences
from nanolong.validate import require
from rope_scaling import EVALUATION_ONLY, METHODS
from train import TrainConfig

PARTS = ("methods", "needles", "probe", "table")


@dataclass
class ReproduceConfig(TextExperiment):
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # sizes and seeds
    # parts of the report
    parts: tuple[Literal["methods", "needles", "probe", "table"], ...] = PARTS


FACTOR = 4  # of the context extension

BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96, "block_size": 64},
        "batch_size": 64,
        "max_iters": 700,  # steps of pretraining
        "tuning_steps": [0, 10, 40, 80],  # steps of fine-tuning after which it is evaluated
        "max_tokens": 32768,  # tokens of validation text that are scored
        "needle": {"length": 96, "max_iters": 500, "trials": 64},
        "probe_steps": 400,
        "seeds": 2,
    },
    "gpu": {
        "model": {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 512},
        "batch_size": 64,
        "max_iters": 5000,
        "tuning_steps": [0, 5, 10, 40, 50, 80, 150, 500],
        "max_tokens": 1 << 20,
        "needle": {"length": 512, "max_iters": 1500, "trials": 64},
        "probe_steps": 2000,
        "seeds": 3,
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
        "batch_size": 8,
        "max_iters": 12,
        "tuning_steps": [0, 2, 4],
        "max_tokens": 2048,
        "needle": {"length": 48, "max_iters": 6, "trials": 4},
        "probe_steps": 20,
        "seeds": 1,
    },
}

# The variants of part 1: name -> (method, options). longrope needs a table (experiments/search.py).
VARIANTS = {name: (name, {}) for name in METHODS if name != "longrope"}
VARIANTS["yarn, paper's ramp"] = ("yarn", {"ramp": "paper"})
VARIANTS["yarn + PoSE"] = ("yarn", {})
VARIANTS["window"] = ("none", {})  # sliding-window attention of the original length
ZERO_SHOT = ("ntk-frozen", "window", *EVALUATION_ONLY)  # not fine-tuned
TUNED_AT_ORIGINAL_LENGTH = ("drope", "yarn + PoSE")

# Part 2: variants of a RoPE model, and two other schemes.
NEEDLE_VARIANTS = (
    "none",
    "pi",
    "ntk",
    "ntk-frozen",
    "ntk-lceg",
    "ntk-parts",
    "yarn",
    "dynamic-yarn",
    "nope",
    "drope",
    "alibi",
    "window",
    "lm-infinite",
    "self-extend",
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

# Part 3: the schemes that are probed, and those whose heads are measured.
PROBED = ("nope", "learned", "sinusoidal", "alibi", "rope")
MEASURED_HEADS = ("nope", "alibi", "t5", "rope")


def extend(model, name):
    method, options = VARIANTS[name]
    model.extend(method, FACTOR, **options)
    if name == "window":
        for block in model.blocks:
            block.attention.window = model.config.original_length


def needle_lengths(length):
    """Return the prompt lengths of part 2, half to four times the training length."""
    return [length // 2, length, 3 * length // 2, 2 * length, 3 * length, 4 * length]


# -----------------------------------------------------------------------------
# Measuring


class SeedRun(base.SeedRun):
    """The models of one seed, each trained when it is first needed, and their measurements."""

    def __init__(self, cfg, seed, dataset):
        folder = Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}-{seed}"
        scored = hash_code([find_sequences])
        super().__init__(cfg, seed, dataset, BUDGETS[cfg.budget], folder, scored=scored)
        self.length = self.budget["model"]["block_size"]  # the training length

    def train_model(self, name, length, max_iters, tasks=(), pos="rope"):
        """Train a model, or what is left of it to train; return it on the device."""
        batch_size = max(1, self.budget["batch_size"] * self.length // length)
        settings = self.train_settings(name, max_iters, batch_size=batch_size, tasks=tasks)
        model_settings = {**self.budget["model"], "block_size": length, "pos": pos}
        model = train_model(model_settings, TrainConfig(**settings), self.dataset)
        return model.to(self.device).eval()

    def text_model(self, pos="rope"):
        """Return the model that was trained on text at the training length."""
        return self.train_model(pos, self.length, self.budget["max_iters"], pos=pos)

    def needle_model(self, pos="rope"):
        """Return the model that was trained on passkey documents."""
        needle = self.budget["needle"]
        return self.train_model(
            f"needle-{pos}", needle["length"], needle["max_iters"], tasks=("passkey:1",), pos=pos
        )

    def last_quarter_losses(self, model, length):
        """Return the mean loss of each sequence's last quarter, in nats per token: a list."""
        split = self.dataset.val
        longest = 2 * FACTOR * self.length  # of all lengths, which score the same text
        sequences = find_sequences(split, length, self.budget["max_tokens"], lengths=(longest,))
        quarter = slice(length * 3 // 4, None)
        losses = []
        for loss, y in sequence_losses(model, split, length, sequences, self.dtype):
            n_scored = (y[:, quarter] >= 0).sum(1)
            losses += (loss[:, quarter].sum(1) / n_scored).tolist()
        return [round(loss, 5) for loss in losses]

    def fine_tune(
        self, model, steps, batch_size, length, learning_rate, max_position=0, tasks=None
    ):
        """Fine-tune a model in place; yield the number of steps done: 0, 1, ... steps.

        max_position > 0 trains skip-wise (PoSE), with positions up to there.
        tasks: kind -> fraction of the sequences.
        """
        optimizers = make_optimizers(model, TrainConfig(weight_decay=0.0))
        for step in range(steps):
            yield step
            index = 10**6 + step  # far from the batches of pretraining
            x, y, positions, _ = self.dataset.batch(
                index, batch_size, length, self.seed, max_position, tasks
            )
            if positions is not None:
                positions = torch.from_numpy(positions).to(self.device)
            model.train()
            batch = (torch.from_numpy(x), torch.from_numpy(y))
            rate, run_on = learning_rate * min(1, (step + 1) / 5), (self.device, self.dtype)
            train_step(model, batch, run_on, optimizers, rate, positions=positions)
        yield steps

    def method_losses(self, name):
        """Extend by a variant and fine-tune; return {steps: {length: losses of the sequences}}.

        All lengths are evaluated before and after fine-tuning, the target also in between.
        """
        model = copy.deepcopy(self.text_model())
        extend(model, name)
        target = FACTOR * self.length
        lengths = (self.length, 2 * self.length, target, 2 * target)
        if name in ZERO_SHOT:
            return {0: {n: self.last_quarter_losses(model, n) for n in lengths}}

        # Every step has as many tokens as a step of pretraining.
        length, batch_size = target, self.budget["batch_size"] // FACTOR
        if name in TUNED_AT_ORIGINAL_LENGTH:
            length, batch_size = self.length, self.budget["batch_size"]
        max_position = target if name == "yarn + PoSE" else 0
        steps = self.budget["tuning_steps"]
        losses = {}
        for step in self.fine_tune(model, steps[-1], batch_size, length, 1e-3, max_position):
            if step in (steps[0], steps[-1]):
                losses[step] = {n: self.last_quarter_losses(model, n) for n in lengths}
            elif step in steps:
                losses[step] = {target: self.last_quarter_losses(model, target)}
        return losses

    def native_losses(self):
        target = FACTOR * self.length
        max_iters = self.budget["max_iters"] + self.budget["tuning_steps"][-1]
        model = self.train_model("native", target, max_iters)
        lengths = (self.length, 2 * self.length, target)
        return {n: self.last_quarter_losses(model, n) for n in lengths}

    def needle_records(self, name):
        """Search passkeys with one of NEEDLE_VARIANTS; return evaluate.py's records."""
        needle = self.budget["needle"]
        if name in ("nope", "alibi"):
            model = copy.deepcopy(self.needle_model(name))
            model.extend("none", FACTOR)
        else:
            model = copy.deepcopy(self.needle_model("rope"))
            extend(model, name)
        if name == "drope":  # recalibrate at the training length, for a fifth of the training
            steps = max(2, needle["max_iters"] // 5)
            batch_size = max(1, self.budget["batch_size"] * self.length // needle["length"])
            for _ in self.fine_tune(
                model, steps, batch_size, needle["length"], 2e-3, tasks={"passkey": 1.0}
            ):
                pass

        records = []
        for length in needle_lengths(needle["length"]):
            for depth in (*DEPTHS, None):  # None: the control, without a key in the prompt
                accuracy, loss = find_needle(
                    model,
                    self.dataset.tokenizer,
                    length,
                    0.5 if depth is None else depth,
                    needle["trials"],
                    self.seed,
                    self.dataset.bos,
                    self.dtype,
                    hidden=depth is not None,
                )
                record = {"checkpoint": name, "task": "needle", "length": length, "depth": depth}
                record |= {"accuracy": accuracy, "nll": round(loss, 4)}
                records.append({**record, "trials": needle["trials"], "seed": self.seed})
        return records

    def probe_records(self, pos):
        """Probe each layer for positions, and shuffle the prefix: records of probe.py."""
        steps = self.budget["probe_steps"]
        windows = min(400, 10 * steps)
        model = self.text_model(pos)
        records = probe(
            model, self.dataset, pos, windows=windows, held_out=100, steps=steps, seed=self.seed
        )
        return records + shuffled_prefix(model, self.dataset, pos, seed=self.seed)

    def head_records(self, pos):
        """Measure how far each head looks in sequences of the target length."""
        target = FACTOR * self.length
        model = self.text_model(pos)
        return distances(model, self.dataset, pos, target, windows=16, seed=self.seed)

    def measure_all(self, parts):
        """Measure the parts; return {"methods", "native", "needles", "probe", "heads"}, or None."""

        def measure_each(kind, names, function):
            return {name: self.measure(f"{kind} {name}", function, name) for name in names}

        found = dict.fromkeys(("methods", "native", "needles", "probe", "heads"))
        if "methods" in parts:
            found["native"] = self.measure("native", self.native_losses)
            found["methods"] = measure_each("method", VARIANTS, self.method_losses)
        if "needles" in parts:
            needles = measure_each("needles", NEEDLE_VARIANTS, self.needle_records)
            found["needles"] = sum(needles.values(), [])
        if "probe" in parts:
            found["probe"] = sum(measure_each("probe", PROBED, self.probe_records).values(), [])
            heads = measure_each("heads", MEASURED_HEADS, self.head_records)
            found["heads"] = sum(heads.values(), [])
        return found


def try_methods(vocab_size=64):
    """Try every method on every scheme; return {scheme: {method: "" or the error message}}."""
    methods = dict.fromkeys(METHODS)
    for scheme in POSITIONS.values():
        methods |= dict.fromkeys(scheme.methods)
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    tokens = torch.zeros(1, 2 * settings["block_size"], dtype=torch.int64)
    errors = {}
    for pos in POSITIONS:
        errors[pos] = {}
        for method in methods:
            model = GPT(GPTConfig(pos=pos, **settings, vocab_size=vocab_size))
            options = {}
            if (pos, method) == ("rope", "longrope"):
                options = {"long_factor": [1.0, 1.5, 2.0, 2.0]}
            errors[pos][method] = ""
            try:
                model.extend(method, 2, **options)
                with evaluation_mode(model, torch.float32):
                    model(tokens)
            except UserError as error:
                errors[pos][method] = str(error)
    return errors


# -----------------------------------------------------------------------------
# The predictions of the literature


class SeedClaims:
    """Claims about what was measured in one seed: differences with their 95 % intervals."""

    def __init__(self, seed):
        self.seed = seed
        self.claims = []

    def add(self, topic, text, mean, half_width=0.0, **bound):
        """Add a claim; `above` or `below` is the bound."""
        claim = Claim(text, mean, half_width, **bound)
        self.claims.append(
            {"topic": topic, "seed": self.seed, **asdict(claim), "passed": claim.passed}
        )

    def losses(self, topic, text, a, b, is_paired, **bound):
        """Add a claim on the mean of a minus that of b, losses of sequences.

        is_paired: they are of the same sequences.
        """
        if is_paired:
            differences = [x - y for x, y in zip(a, b, strict=True)]
            variance = statistics.variance(differences) / len(differences)
        else:
            variance = statistics.variance(a) / len(a) + statistics.variance(b) / len(b)
        mean = statistics.fmean(a) - statistics.fmean(b)
        self.add(topic, text, mean, 1.96 * math.sqrt(variance), **bound)

    def fractions(self, topic, text, p, n, q=None, **bound):
        """Add a claim on p minus q, fractions of n trials each (q None: on p alone).

        The interval is that of Agresti and Caffo (2000), which adds a success and a failure.
        """
        p, *others = ((x * n + 1) / (n + 2) for x in (p, q) if x is not None)
        variance = sum(x * (1 - x) / (n + 2) for x in (p, *others))
        self.add(topic, text, p - sum(others), 1.96 * math.sqrt(variance), **bound)


def judge(run, found):
    """Return the claims of one seed as dicts; what was not measured is not judged."""
    claims = SeedClaims(run.seed)
    if found["methods"]:
        judge_methods(claims, run, found["methods"])
    if found["needles"]:
        judge_needles(claims, run.budget["needle"], found["needles"])
    if found["probe"]:
        judge_probe(claims, run, found["probe"])
        judge_heads(claims, run, found["heads"])
    return claims.claims


def judge_methods(claims, run, methods):
    """Judge part 1; a loss is that of (variant, steps of fine-tuning, length)."""
    L = run.length
    target, beyond = FACTOR * L, 2 * FACTOR * L
    last = run.budget["tuning_steps"][-1]

    def losses(name, step, length):
        return methods[name][str(step)][str(length)]

    def compare(topic, text, a, b, **bound):
        is_paired = a[-1] == b[-1]  # at one length
        claims.losses(topic, text, losses(*a), losses(*b), is_paired, **bound)

    topic = "Zero-shot at the target"
    for a, b in (("yarn", "ntk"), ("ntk-parts", "ntk"), ("ntk", "none")):
        text = f"{a} below {b}, zero-shot at {target}"
        compare(topic, text, (a, 0, target), (b, 0, target), below=0)

    topic = "Cost at the original length"
    for a, b, condition, bound in (
        ("none", "ntk", "", 0),
        ("ntk", "ntk-parts", "", 0),
        ("ntk-parts", "yarn", ", or at most 0.02 above it", 0.02),
        ("yarn", "pi", " by 0.3", -0.3),
    ):
        text = f"{a} below {b}{condition}, zero-shot at {L}"
        compare(topic, text, (a, 0, L), (b, 0, L), below=bound)

    topic = "NTK-aware and dynamic methods"
    text = f"ntk at {2 * L}: within 10 % of its perplexity at {L}"
    compare(topic, text, ("ntk", 0, 2 * L), ("ntk", 0, L), below=math.log(1.1))
    text = f"ntk at {target}: more than 1.5 times its perplexity at {L}"
    compare(topic, text, ("ntk", 0, target), ("ntk", 0, L), above=math.log(1.5))
    for name in ("dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen"):
        pairs = zip(losses(name, 0, L), losses("none", 0, L), strict=True)
        difference = max(abs(x - y) for x, y in pairs)
        claims.add(topic, f"{name} equals none at {L}, to the bit", difference, below=1e-9)

    topic = "Beyond the target"
    text = f"yarn, fine-tuned, at {beyond}: more than 0.1 above its loss at the target"
    compare(topic, text, ("yarn", last, beyond), ("yarn", last, target), above=0.1)
    text = f"dynamic-yarn below yarn, zero-shot at {beyond}"
    compare(topic, text, ("dynamic-yarn", 0, beyond), ("yarn", 0, beyond), below=0)

    topic = "Exact and approximate attention (Lu et al. 2024)"
    for name in ("yarn", "ntk-lceg", "pi"):
        text = f"{name}, fine-tuned, below its zero-shot loss at {target}"
        compare(topic, text, (name, last, target), (name, 0, target), below=0)
    for name in ("window", "lm-infinite", "self-extend"):
        for step, how in ((last, "fine-tuned"), (0, "zero-shot")):
            text = f"yarn, {how}, below {name} at {target}"
            compare(topic, text, ("yarn", step, target), (name, 0, target), below=0)
    for name in ("ntk", "yarn"):
        text = f"ntk-lceg, whose base grows beyond the target, below {name} at {beyond}, both tuned"
        compare(topic, text, ("ntk-lceg", last, beyond), (name, last, beyond), below=0)


def judge_needles(claims, needle, records):
    N = needle["length"]
    trials = needle["trials"]
    accuracy = {}
    for record in records:
        key = (record["checkpoint"], record["length"], record["depth"])
        accuracy[key] = record["accuracy"]

    def mean(name, length):
        return statistics.fmean(accuracy[name, length, depth] for depth in DEPTHS)

    topic = "Passkeys found, zero-shot"
    n = len(DEPTHS) * trials
    for a, b in (("ntk", "none"), ("ntk-parts", "ntk"), ("yarn", "ntk-parts")):
        text = f"{a} above {b} at {4 * N}"
        claims.fractions(topic, text, mean(a, 4 * N), n, mean(b, 4 * N), above=0)
    claims.fractions(topic, f"yarn at least 0.8 at {4 * N}", mean("yarn", 4 * N), n, above=0.8)
    end, start = accuracy["alibi", 4 * N, 1.0], accuracy["alibi", 4 * N, 0.0]
    text = f"alibi finds fewer at the start than at the end of {4 * N}"
    claims.fractions(topic, text, end, trials, start, above=0)
    for times in (2, 3, 4):
        text = f"nope above rope (none) at {times * N}"
        claims.fractions(topic, text, mean("nope", times * N), n, mean("none", times * N), above=0)

    topic = "Exact and approximate attention (Lu et al. 2024)"
    end, start = accuracy["window", 4 * N, 1.0], accuracy["window", 4 * N, 0.0]
    text = f"a window of {N} finds passkeys at the end of {4 * N}"
    claims.fractions(topic, text, end, trials, above=0.5)
    text = f"a window of {N} finds no passkeys at the start of {4 * N}"
    claims.fractions(topic, text, start, trials, below=0.1)


def judge_probe(claims, run, records):
    topic = "Position probe (Haviv et al. 2022)"
    L = run.length
    chance = (L * L - 1) / (3 * L)  # the error of a random guess
    error = {}
    for record in records:
        if record["task"] == "probe":
            error[record["checkpoint"], record["layer"]] = record["error"] / chance

    text = "nope, layer 0: 0.7 to 1.5 times the error of a guess (as the distance from 1.1)"
    claims.add(topic, text, abs(error["nope", 0] - 1.1), below=0.4)
    layers = range(1, run.budget["model"]["n_layer"] + 1)
    best = min(error["nope", layer] for layer in layers)
    claims.add(topic, "nope, best layer: at most 1/4 of the error of a guess", best, below=0.25)
    for name in ("learned", "sinusoidal"):
        text = f"{name}, layer 0: at most 1/20 of the error of a guess"
        claims.add(topic, text, error[name, 0], below=0.05)


def judge_heads(claims, run, records):
    topic = "Attended distance (Press et al. 2022)"
    target = FACTOR * run.length
    mean = mean_distances(records)
    for name in mean:
        if name != "alibi":
            text = f"alibi's mean attended distance at {target} below {name}'s, as a ratio"
            claims.add(topic, text, mean["alibi"] / mean[name], below=1.0)
    deviations = [math.inf]
    steep = [record for record in records if record.get("range", math.inf) < target / 4]
    if steep:
        deviations = [abs(record["distance"] / record["range"] - 1) for record in steep]
    text = f"alibi's heads with 1 / slope below {target // 4}: distance within 50 % of 1 / slope"
    claims.add(topic, text, max(deviations), below=0.5)


def mean_distances(records):
    """Return scheme -> the mean attended distance over heads and layers, in tokens."""
    by_scheme = {}
    for record in records:
        by_scheme.setdefault(record["checkpoint"], []).append(record["distance"])
    return {name: statistics.fmean(values) for name, values in by_scheme.items()}


# -----------------------------------------------------------------------------
# What reproduce.json holds


def mean_losses(losses):
    return {length: round(statistics.fmean(values), 5) for length, values in losses.items()}


def summarize_heads(by_seed):
    """Return scheme -> the mean, least and greatest attended distance of the seeds, in tokens."""
    means = [mean_distances(records) for records in by_seed]
    summary = {}
    for name in means[0]:
        values = [mean[name] for mean in means]
        numbers = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        summary[name] = {key: round(number, 1) for key, number in numbers.items()}
    return summary


def measure(cfg):
    dataset = cfg.load_dataset()
    require(
        dataset.tokenizer is not None,
        f"dataset {cfg.dataset} has no tokenizer, and passkeys are text: "
        "give one that data/prepare.py made",
    )
    budget = BUDGETS[cfg.budget]
    runs = [SeedRun(cfg, seed, dataset) for seed in range(1, budget["seeds"] + 1)]
    found = [run.measure_all(cfg.parts) for run in runs]
    claims = [claim for pair in zip(runs, found, strict=True) for claim in judge(*pair)]
    methods = []
    for seed in found:
        curves = {}
        for name, curve in (seed["methods"] or {}).items():
            curves[name] = {step: mean_losses(losses) for step, losses in curve.items()}
        methods.append(curves)
    scored = f"{budget['max_tokens']:,} tokens, spread over the validation text"
    has_heads = "probe" in cfg.parts
    return {
        "note": f"{cfg.note(dataset, commits_of(runs))}; {count(len(runs), 'seed')}; "
        f"scored: {scored}",
        "seconds": round(sum(run.seconds() for run in runs)),
        "parts": list(cfg.parts),
        "budget": budget,
        "parameters": count_parameters(budget["model"], dataset.vocab_size),
        "methods": methods,
        "native": [mean_losses(seed["native"] or {}) for seed in found],
        "needles": [seed["needles"] for seed in found],
        "probe": [seed["probe"] for seed in found],
        "attended_distance": summarize_heads([s["heads"] for s in found]) if has_heads else None,
        "support": try_methods() if "table" in cfg.parts else None,
        "claims": claims,
    }


# -----------------------------------------------------------------------------
# The report


def spread(values, digits=3):
    """Return the mean of the seeds, and of several seeds the least and the greatest, as text."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}, {max(values):.{digits}f})"


class MethodCurves:
    """Part 1 of a board: losses by variant, steps of fine-tuning and length."""

    def __init__(self, board):
        self.seeds = board["methods"]
        self.native = board["native"]
        self.length = board["budget"]["model"]["block_size"]
        self.target = FACTOR * self.length
        self.lengths = (self.length, 2 * self.length, self.target, 2 * self.target)
        self.steps = board["budget"]["tuning_steps"]
        self.names = sorted(self.seeds[0], key=self.final_loss)

    def is_tuned(self, name):
        return str(self.steps[-1]) in self.seeds[0][name]

    def losses(self, name, step, length):
        return [seed[name][str(step)][str(length)] for seed in self.seeds]

    def native_losses(self):
        return [losses[str(self.target)] for losses in self.native]

    def final_loss(self, name):
        """Return the mean loss at the target after the last step that was measured."""
        step = self.steps[-1] if self.is_tuned(name) else 0
        return statistics.fmean(self.losses(name, step, self.target))

    def gap_closed(self, name, step):
        baseline = self.losses("none", 0, self.target)
        losses = self.losses(name, step, self.target)
        triples = zip(baseline, losses, self.native_losses(), strict=True)
        return [(none - loss) / (none - native) for none, loss, native in triples]


def report_methods(board):
    curves = MethodCurves(board)
    L, target, steps = curves.length, curves.target, curves.steps
    max_iters = board["budget"]["max_iters"]
    native = spread(curves.native_losses())
    step_names = [f"{step} steps ({step / max_iters:.1%})" for step in steps[1:]]

    header = ["", *(f"at {length}" for length in curves.lengths)]
    header += [f"{target}, {name}" for name in step_names]
    header += [f"at {L} after {steps[-1]}", f"at {2 * target} after {steps[-1]}"]
    loss_rows, gap_rows = [], []
    for name in curves.names:
        cells = [spread(curves.losses(name, 0, length)) for length in curves.lengths]
        gaps = [spread(curves.gap_closed(name, 0), 2)]
        if curves.is_tuned(name):
            cells += [spread(curves.losses(name, step, target)) for step in steps[1:]]
            cells += [spread(curves.losses(name, steps[-1], n)) for n in (L, 2 * target)]
            gaps += [spread(curves.gap_closed(name, step), 2) for step in steps[1:]]
        cells += ["–"] * (len(header) - 1 - len(cells))
        gaps += ["–"] * (len(steps) - len(gaps))
        loss_rows.append([name, *cells])
        gap_rows.append([name, *gaps])

    return [
        *section(
            "Every method",
            f"Trained at {L} tokens, extended to {target}. Fine-tuning uses sequences of {target} "
            f"tokens (drope and PoSE: {L}) and as many tokens a step as pretraining. The native "
            f"model, trained at {target} for all of the tokens, reaches {native} there. A tenth of "
            f"a percent of pretraining would be {max_iters / 1000:.1f} steps.",
            markdown_table(header, loss_rows),
        ),
        "",
        f"### Gap closed at {target}",
        "",
        *markdown_table(["", "zero-shot", *step_names], gap_rows),
        "",
        "![zero-shot loss and gap closed](reproduce.png)",
    ]


def plot_methods(board, file):
    """Plot the zero-shot loss by length, and the gap closed by steps of fine-tuning, to a PNG."""
    curves = MethodCurves(board)

    def draw(figure, left, right):
        from matplotlib import colormaps

        palette = colormaps["tab20"].colors
        for i, name in enumerate(curves.names):
            style = {"marker": "os^D"[i % 4], "markersize": 4, "color": palette[i % 20]}
            losses = [statistics.fmean(curves.losses(name, 0, n)) for n in curves.lengths]
            left.plot(curves.lengths, losses, label=name, **style)
            if curves.is_tuned(name):
                gaps = [statistics.fmean(curves.gap_closed(name, step)) for step in curves.steps]
                right.plot(curves.steps, gaps, **style)
        left.set_title(f"zero-shot, trained at {curves.length} tokens, extended {FACTOR} times")
        left.set_ylabel("nats per token, last quarter of the sequence")
        length_axis(left, curves.lengths)
        right.set_title(f"gap closed at {curves.target:,} tokens: 0 baseline, 1 trained there")
        right.set(xlabel="steps of fine-tuning", ylabel="gap closed", ylim=(-0.25, 1.1))
        figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside right")

    save_figure(file, draw, (14, 5), board["note"], panels=(1, 2), dpi=110)


def average_needles(board):
    """Return the records of part 2 with the mean accuracy of the seeds."""
    accuracies = {}
    for records in board["needles"]:
        for record in records:
            key = (record["checkpoint"], record["length"], record["depth"])
            accuracies.setdefault(key, []).append(record["accuracy"])
    averaged = []
    for (name, length, depth), values in accuracies.items():
        record = {"checkpoint": name, "length": length, "depth": depth}
        averaged.append({**record, "accuracy": statistics.fmean(values)})
    return averaged


def report_needles(board):
    needle = board["budget"]["needle"]
    lengths = needle_lengths(needle["length"])
    records = average_needles(board)
    rows = []
    for name in unique(records, "checkpoint"):
        row = [name]
        for length in lengths:
            cells = select(records, checkpoint=name, length=length)
            found = [cell["accuracy"] for cell in cells if cell["depth"] is not None]
            row.append(f"{statistics.fmean(found):.2f} ({min(found):.2f})")
        controls = select(records, checkpoint=name, depth=None)
        rows.append([*row, f"{max(control['accuracy'] for control in controls):.3f}"])
    return section(
        "Needles",
        "Fraction of passkeys found, by prompt length: mean over the depths, and in brackets the "
        "worst depth. The models are trained on passkey documents of up to "
        f"{needle['length']} tokens and extended {FACTOR} times without further training (drope: "
        "recalibrated at the training length, with a fifth of the training steps). The prompts of "
        "the control have no key: chance is 0.001.",
        markdown_table(["", *map(str, lengths), "most without a key"], rows),
        "![passkeys found, by length and depth](needles.png)",
    )


def report_probe(board):
    """Return the lines of part 3: the position probe and the attended distances."""
    L = board["budget"]["model"]["block_size"]
    layers = range(board["budget"]["model"]["n_layer"] + 1)
    records = sum(board["probe"], [])  # of all seeds
    rows = []
    for name in unique(records, "checkpoint"):
        row = [name]
        for layer in layers:
            probed = select(records, checkpoint=name, layer=layer)
            row.append(spread([record["error"] for record in probed], 1))
        shuffled = select(records, checkpoint=name, scored="last token")
        for prefix in ("intact", "shuffled"):
            row.append(spread([record[prefix] for record in shuffled], 2))
        rows.append(row)

    several_seeds = len(board["probe"]) > 1
    distance_rows = []
    for name, distance in board["attended_distance"].items():
        text = f"{distance['mean']:.1f}"
        if several_seeds:
            text += f" ({distance['min']:.1f}, {distance['max']:.1f})"
        distance_rows.append([name, text])
    header = ["", *map(str, layers), "loss of the last token, in order", "shuffled"]
    return [
        *section(
            "Where the position is known",
            "Mean error in tokens of a probe that predicts the absolute position from the hidden "
            f"state after each layer (0: the embeddings), in sequences of {L} tokens. A random "
            f"guess has an error of {(L * L - 1) / (3 * L):.1f}. Last columns: the loss of the "
            "last token after all others in order and shuffled, in nats.",
            markdown_table(header, rows),
        ),
        *section(
            f"How far heads look, in sequences of {FACTOR * L} tokens",
            "Mean attended distance over heads and layers.",
            markdown_table(["", "tokens"], distance_rows),
        ),
    ]


def report_support(board):
    support = board["support"]
    methods = list(next(iter(support.values())))
    rows = []
    messages = []
    for pos, errors in support.items():
        rows.append([pos, *("" if errors[method] else "yes" for method in methods)])
        messages.append(next(error for error in errors.values() if error))
    return section(
        "Which scheme takes which method",
        "`yes`: extended and evaluated at twice the context length; empty: an error, as below.",
        markdown_table(["", *methods], rows),
        [f"- {message}" for message in dict.fromkeys(messages)],
    )


def report_claims(board):
    claims = board["claims"]
    passed = sum(claim["passed"] for claim in claims)
    texts = {claim["text"] for claim in claims}
    seeds = board["budget"]["seeds"]
    lines = section(
        "Orderings",
        f"{len(texts)} predictions of the literature, each judged in every seed by itself; losses "
        f"are in nats. {RULE} {passed} of {len(claims)} judgements pass, over "
        f"{count(seeds, 'seed')}.",
    )
    header = ["", "bound", *(f"seed {seed}" for seed in range(1, seeds + 1))]
    for topic in unique(claims, "topic"):
        rows = {}  # text -> cells
        for judged in select(claims, topic=topic):
            claim = Claim(**{f.name: judged[f.name] for f in fields(Claim)})
            row = rows.setdefault(claim.text, [claim.text, claim.bound])
            row.append(f"{claim.measured}: {claim.verdict()}")
        lines += ["", f"### {topic}", "", *markdown_table(header, rows.values())]
    return lines


def report(board):
    budget = board["budget"]
    tokens = budget["batch_size"] * budget["model"]["block_size"]
    minutes = f"; {board['seconds'] / 60:.0f} minutes of training and measuring in all."
    lines = [
        *title(board, "What context extension buys", minutes),
        "",
        f"The models have {board['parameters'] / 1e6:.2f} M parameters "
        f"({format_settings(budget['model'])}) and train for "
        f"{budget['max_iters']} steps of {tokens:,} tokens; their context is extended {FACTOR} "
        "times. Losses are in nats per token in the last quarter of the sequence: the mean of the "
        "seeds and, in brackets, the least and the greatest.",
    ]
    reports = (report_methods, report_needles, report_probe, report_support)
    for part, report_part in zip(PARTS, reports, strict=True):
        if part in board["parts"]:
            lines += report_part(board)
    if board["claims"]:
        lines += report_claims(board)
    return lines


def plot(board, folder):
    if "methods" in board["parts"]:
        plot_methods(board, folder / "reproduce.png")
    if "needles" in board["parts"]:
        needle = board["budget"]["needle"]
        note = (
            f"{needle['trials']} prompts a cell and seed, teacher-forced; "
            f"trained on up to {needle['length']} tokens; {board['note']}"
        )
        lengths = needle_lengths(needle["length"])
        plot_needle_heatmaps(average_needles(board), lengths, folder / "needles.png", note)


main = make_main(ReproduceConfig, measure, report, plot)

if __name__ == "__main__":
    cli.run_main(main)
