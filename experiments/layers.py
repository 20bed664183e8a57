"""Which layers of a hybrid should be extended, and which hybrids extend well?

    python experiments/layers.py                       three seeds of seven models
    python experiments/layers.py --seeds=2 --models=FFFF,WWWF
                                                       some: several processes may share the work
    python experiments/layers.py --budget=try          seconds, a test without meaning

Stop at any time: the same command continues where it stopped, and one with all seeds and models
collects what several processes have measured. It writes layers.md, .json and .png to --out_dir.

Every model learns text and to find a hidden value at the training length, is extended 8 times by
YaRN, and is then fine-tuned for a few steps at the target length with as many tokens a step. It is
measured before, after (zero-shot) and at the end (fine-tuned), at 1, 2, 4 and 8 times the training
length.

logn multiplies queries by 1 within the training length: these models are the trained models
without it, and it is switched on at the extension.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import itertools
import statistics
from dataclasses import asdict, dataclass
from operator import getitem
from typing import Literal

from experiments.extensibility import STAGES, SeedRun, table, values_by_seed
from experiments.report import (
    RULE,
    Claim,
    TextExperiment,
    check_names,
    claim_lines,
    commits_of,
    confidence_interval,
    count,
    effort,
    format_settings,
    length_axis,
    line_style,
    make_main,
    save_figure,
    section,
    select,
    title,
)
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.entry import load_entries

FACTOR = 8  # of the context extension
LENGTHS = (1, 2, 4, FACTOR)  # that are measured, in training lengths


@dataclass
class LayersConfig(TextExperiment):
    budget: Literal["cpu", "try"] = "cpu"  # sizes
    seeds: tuple[int, ...] = (1, 2, 3)  # which runs
    models: tuple[str, ...] = ()  # which trained models; default: all

    def __post_init__(self):
        super().__post_init__()
        self.models = self.models or tuple(TRAINED)
        check_names("model", self.models, TRAINED)


# steps of pretraining and of fine-tuning, scored tokens of text, and prompts of each length
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 3, "n_embd": 96, "block_size": 64},
        "batch_size": 32,
        "steps": 450,
        "tuning_steps": 60,
        "max_tokens": 16384,
        "prompts": 64,
    },
    "try": {
        "model": {"n_layer": 4, "n_head": 2, "n_embd": 16, "block_size": 48},
        "batch_size": 8,
        "steps": 2,
        "tuning_steps": 1,
        "max_tokens": 512,
        "prompts": 2,
    },
}

# -----------------------------------------------------------------------------
# The models

# trained model -> its settings of GPTConfig; the window is a quarter of the training length
TRAINED = {
    "FFFF": {},
    "WWWF": {"layer_pattern": "WWWF"},
    "FFFN": {"layer_pattern": "FFFN"},
    "WWWN": {"layer_pattern": "WWWN"},
    "p=0.25": {"p_rope": 0.25},
    "p=0.5": {"p_rope": 0.5},
    "ssmax": {"pos": "ssmax"},  # examples/schemes/ssmax.py
}


@dataclass
class Extension:
    """How a trained model is extended."""

    model: str
    about: str
    method: str = "yarn"
    layers: str = "all"
    logn: bool = False  # switch the score scale on


EXTENSIONS = {
    "FFFF": Extension("FFFF", "RoPE and full attention in every layer"),
    "FFFF+logn": Extension("FFFF", "the same with logn", logn=True),
    "FFFF+ssmax": Extension("ssmax", "the same with ssmax, in training too"),
    "p=0.25": Extension("p=0.25", "p-RoPE: the fastest quarter of the pairs is rotated"),
    "p=0.5": Extension("p=0.5", "p-RoPE: the fastest half of the pairs is rotated"),
    "FFFN": Extension("FFFN", "the last layer has no positions"),
    "WWWF full": Extension(
        "WWWF", "windows in three of four layers; YaRN in the fourth", layers="full"
    ),
    "WWWF all": Extension("WWWF", "the same model; YaRN in all layers"),
    "WWWN none": Extension(
        "WWWN", "windows, and one full layer without positions; no YaRN", "none"
    ),
    "WWWN all": Extension("WWWN", "the same model; YaRN in the layers with windows"),
    "WWWN+logn none": Extension("WWWN", "SWAN: the same with logn; no YaRN", "none", logn=True),
    "WWWN+logn all": Extension("WWWN", "with logn, and YaRN in the layers with windows", logn=True),
}


def model_settings(name, budget):
    """Return the settings of GPTConfig of a trained model, without vocab_size."""
    settings = budget["model"] | TRAINED[name]
    if "W" in name:
        settings["window"] = settings["block_size"] // 4
    return settings


def with_logn(model):
    copy = GPT(GPTConfig(**asdict(model.config) | {"score_scale": "logn"}))
    copy.load_state_dict(model.state_dict())
    copy.meta = dict(model.meta)
    return copy


# -----------------------------------------------------------------------------
# Measuring


class ModelRun(SeedRun):
    """One trained model of one seed, its extensions, and what has been measured on them."""

    factor = FACTOR
    lengths = LENGTHS

    def __init__(self, cfg, seed, dataset, name):
        # a file for each model, so that several processes may share a seed
        folder = cfg.run_folder() / str(seed) / name
        super().__init__(cfg, seed, dataset, BUDGETS[cfg.budget], folder)
        self.name = name

    def load_model(self, logn):
        """Return the trained model, which is trained at the first call."""
        settings = model_settings(self.name, self.budget)
        model = self.pretrain(settings, "trained", self.budget["steps"])
        return (with_logn(model) if logn else model).to(self.device)

    def measure_before(self, logn):
        return self.measure_stage(self.load_model(logn), "before")

    def measure_extension(self, name):
        """Extend and fine-tune the model; return the records of both stages."""
        extension = EXTENSIONS[name]
        model = self.load_model(extension.logn)
        model.extend(extension.method, FACTOR, layers=extension.layers)
        records = self.measure_stage(model, "zero-shot")
        self.fine_tune(model, name.replace(" ", "-"))
        return records + self.measure_stage(model, "fine-tuned")

    def measure_all(self):
        records = []
        for name, extension in select_extensions(self.name).items():
            before = "before, logn" if extension.logn else "before"
            found = self.measure(before, self.measure_before, extension.logn)
            found = found + self.measure(name, self.measure_extension, name)
            records += [{"seed": self.seed, "model": name, **record} for record in found]
        return records


def select_extensions(model):
    return {name: found for name, found in EXTENSIONS.items() if found.model == model}


def measure(cfg):
    load_entries([Path(__file__).parent.parent / "examples/schemes/ssmax.py"], POSITIONS)
    dataset = cfg.load_dataset()
    pairs = itertools.product(cfg.seeds, cfg.models)
    runs = [ModelRun(cfg, seed, dataset, name) for seed, name in pairs]
    records = [record for run in runs for record in run.measure_all()]
    return {
        "note": f"{cfg.note(dataset, commits_of(runs))}; {effort(runs)}",
        "budget": BUDGETS[cfg.budget],
        "models": {name: extension.about for name, extension in EXTENSIONS.items()},
        "records": records,
    }


# -----------------------------------------------------------------------------
# Claims

# what is published about pairs of models; a claim for each stage and measure
PREDICTIONS = {
    "Full-attention layers only (Olmo 3, 2512.13961, section 3.6.4)": [
        ("WWWF full", "WWWF all", STAGES[1:], ("loss", "gain")),
    ],
    "p-RoPE: the slowest pairs are those that break (Barbero et al. 2024)": [
        ("p=0.25", "FFFF", STAGES, ("loss",)),
        ("p=0.5", "FFFF", STAGES, ("loss",)),
    ],
    "Score scale on layers without positions (SWAN, 2504.08719), or on all": [
        ("WWWN+logn none", "WWWN none", ("before", "fine-tuned"), ("loss", "gain")),
        ("WWWN+logn all", "WWWN all", STAGES[1:], ("loss", "gain")),
        ("FFFF+logn", "FFFF", STAGES, ("loss", "gain")),
        ("FFFF+ssmax", "FFFF", STAGES, ("loss", "gain")),
    ],
    "Hybrids extend better than full attention with RoPE": [
        ("WWWF full", "FFFF", STAGES, ("loss", "gain")),
        ("FFFN", "FFFF", STAGES, ("loss", "gain")),
        ("WWWN none", "FFFF", STAGES, ("loss", "gain")),
        ("WWWN+logn none", "FFFF", STAGES, ("loss", "gain")),
    ],
}
LEARNED = 1.0  # nats: a model with less gain at the training length has not learned to find values


def difference(values, pair):
    """Return the first model's value minus the second's, of the values of one seed."""
    first, second = pair.split(" - ")
    return values[first] - values[second]


def first_gains(board, name):
    """Return a model's gain at the training length before any extension, by seed."""
    return [values[name] for values in values_by_seed(board, "before", 1, "gain")]


def has_learned(board, name):
    """Whether a model finds values before any extension, in the mean over the seeds."""
    return statistics.fmean(first_gains(board, name)) >= LEARNED


def judge(board, predictions):
    """Return Claims about the target length; none about the gain of models that find no value."""
    claims = []
    for first, second, stages, measures in predictions:
        for measure, stage in itertools.product(measures, stages):
            if measure == "gain" and not (has_learned(board, first) and has_learned(board, second)):
                continue
            pair = f"{first} - {second}"
            values = values_by_seed(board, stage, FACTOR, measure)
            interval = confidence_interval([difference(found, pair) for found in values])
            bound = {"below": 0} if measure == "loss" else {"above": 0}
            claims.append(Claim(f"{stage}, {measure}: {pair}", *interval, **bound))
    return claims


# -----------------------------------------------------------------------------
# The report

MODEL_NOTE = (
    "A letter for each layer: F full attention, W a window of a quarter of the training length, N "
    "full attention without positions; none, full and all: the layers that YaRN changes. `loss`: "
    "nats per byte in the last quarter of a sequence. Of prompts that hide a value, `nats`: of the "
    "answer; `gain`: how many more it has if the value is not in the prompt. Lengths are in "
    "training lengths. The mean over the seeds and its 95 % interval."
)
DIFFERENCE_NOTE = (
    "Of two models of the same seed, the first minus the second. An asterisk: the interval "
    "excludes 0, as by chance one of 20 does."
)
CLAIM_NOTE = (
    "Paired differences at the target length; a published order predicts a lower loss, or a higher "
    "gain, of the first. Gains are judged of models that find values before they are extended: at "
    f"least {LEARNED:.0f} nat at the training length, in the mean. {RULE}"
)


def measured_models(board):
    return [name for name in board["models"] if select(board["records"], model=name)]


def stage_tables(board, names, function):
    """Return the parts of a section: a heading and a table for each stage."""
    parts = []
    for stage in STAGES:
        columns = [(stage, length, name) for name in ("loss", "nats", "gain") for length in LENGTHS]
        parts += [f"### {stage}", table(board, names, function, columns)]
    return parts


def report(board):
    budget = board["budget"]
    models = (
        f"Models of {format_settings(budget['model'])}, trained for {budget['steps']} steps of "
        f"{budget['batch_size']} sequences, extended {FACTOR} times by YaRN, and fine-tuned for "
        f"{count(budget['tuning_steps'], 'step')}. {MODEL_NOTE}"
    )
    measured = measured_models(board)
    names = [f"- {name}: {board['models'][name]}" for name in measured]
    pairs, claims = [], []
    for topic, predictions in PREDICTIONS.items():
        found = [row for row in predictions if {*row[:2]} <= {*measured}]
        pairs += [f"{first} - {second}" for first, second, *_ in found]
        claims += [f"### {topic}", claim_lines(judge(board, found)) or "Not measured."]
    unlearned = [name for name in measured if not has_learned(board, name)]
    not_judged = f"Models whose gain is not judged: {', '.join(unlearned) or 'none'}."
    learned = {name: sum(g >= LEARNED for g in first_gains(board, name)) for name in measured}
    by_model = ", ".join(f"{name} {n}" for name, n in learned.items())
    learning = f"Seeds that have it: {by_model}. {not_judged}"
    return [
        *title(board, "Which layers of a hybrid should be extended"),
        *section("Models", models, names, "![Loss and gain by length](layers.png)"),
        *section("Measured", *stage_tables(board, measured, getitem)),
        *section("Differences", DIFFERENCE_NOTE, *stage_tables(board, pairs, difference)),
        *section("Claims", CLAIM_NOTE, learning, *claims),
    ]


def plot(board, folder):
    """Plot the mean loss and gain by length at each stage."""
    lengths = [board["budget"]["model"]["block_size"] * length for length in LENGTHS]

    def draw(figure, *axes):
        panels = itertools.product(("loss", "gain"), STAGES)
        for axis, (measure, stage) in zip(axes, panels, strict=True):
            for i, name in enumerate(measured_models(board)):
                records = select(board["records"], model=name, stage=stage)
                means = [
                    statistics.fmean(r[measure] for r in select(records, length=length))
                    for length in LENGTHS
                ]
                style = line_style(i) | {"linestyle": "--" if i >= 10 else "-"}
                axis.plot(lengths, means, label=name, **style)
            axis.set(title=stage, ylabel=f"{measure} in nats")
            length_axis(axis, lengths)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)

    save_figure(folder / "layers.png", draw, (13, 7), board["note"], (2, 3))


main = make_main(LayersConfig, measure, report, plot)

if __name__ == "__main__":
    cli.run_main(main)
