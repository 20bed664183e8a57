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
from dataclasses import asdict, dataclass
from typing import Literal

from experiments.extensibility import SeedRun
from experiments.layers_report import FACTOR, LENGTHS, plot, report
from experiments.report import TextExperiment, check_names, commits_of, effort, run_experiment
from model import GPT, GPTConfig
from nanolong import cli


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
    "ssmax": {"score_scale": "ssmax"},
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
    """Return a copy of a model, with logn."""
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
        """Return the records of all extensions of the model."""
        records = []
        for name, extension in select_extensions(self.name).items():
            before = "before, logn" if extension.logn else "before"
            found = self.measure(before, self.measure_before, extension.logn)
            found = found + self.measure(name, self.measure_extension, name)
            records += [{"seed": self.seed, "model": name, **record} for record in found]
        return records


def select_extensions(model):
    """Return the extensions of a trained model: name -> Extension."""
    return {name: found for name, found in EXTENSIONS.items() if found.model == model}


def measure(cfg):
    """Measure the models with all seeds; return what layers.json holds."""
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


def main():
    return run_experiment(LayersConfig, measure, report, plot)


if __name__ == "__main__":
    cli.run_main(main)
