"""Extend a public checkpoint: its loss by position, what that costs, and the passkeys it finds.

    python hf.py import SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2
    python experiments/public.py out/smollm2                      at most 90 minutes on two cores
    python experiments/public.py out/smollm2 --prose=prose.txt    with a text in English, too
    python experiments/public.py out/smollm2 --budget=try         about 10 minutes

The checkpoint is measured as it is, and extended by several methods: without training, and the best
two after a brief fine-tuning. Code: the largest module of Python's standard library, which is left
out of the text for fine-tuning, the other modules. Loss is in nats per token, of one long document.

Measured are the loss at each position of a long document; the tax, which is how much the loss at
2,048 tokens rises; and passkeys of five digits, hidden at three depths. Each measurement is saved
by itself: stop at any time, the same command continues. One of each kind is timed first; where all
of them would take more than --minutes, fewer are made, and the report says which.

Writes public.md and public*.png into --out_dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import hashlib
import sysconfig
import time
import tomllib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

import data
from data.prepare import build, standard_library
from experiments.public_report import write_report
from experiments.report import Measurements, command_line, read_json, train_or_stop
from extend import ExtendConfig
from model import GPT
from nanolong import cli
from nanolong.devices import autocast, pick_device, pick_dtype
from nanolong.losses import evaluation_mode, loss_by_position
from nanolong.provenance import provenance
from nanolong.run.checkpoint import read_meta
from nanolong.run.folder import list_steps
from nanolong.scoring import read_text
from nanolong.validate import require
from rope_scaling import EVALUATION_ONLY

PRESET = Path(__file__).resolve().parent.parent / "config" / "finetune_public.toml"


@dataclass
class PublicConfig:
    budget: Literal["full", "try"] = "full"  # how much is measured
    code: str = ""  # a long file of source code; by default the standard library's longest module
    prose: str = ""  # a long text in English; by default none is measured
    dataset: str = (
        ""  # text to fine-tune on, in the model's tokens; by default the standard library
    )
    factor: float = 4.0  # how many times longer the context gets
    longrope: str = ""  # a table for longrope (experiments/search.py writes one); without, left out
    minutes: float = 0.0  # the most that all measurements may take; by default 90 (try: 10)
    runs: str = "out/public"  # folder for the measurements and the fine-tuned runs
    out_dir: str = "out/public"  # folder for public.md and its figures
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self):
        require(self.factor >= 1.5, f"factor={self.factor:g} is too small: give at least 1.5")
        require(self.minutes >= 0, f"minutes={self.minutes:g} is negative: give at least 0")


# -----------------------------------------------------------------------------
# What is measured


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths are in tokens, the long ones in original context lengths."""

    code_lengths: float = 4.0
    prose_lengths: float = 2.0
    tax_length: int = 2048
    tax_tokens: int = 16384
    # of the prompts with a passkey: one in tokens, the others in original context lengths
    needle_tokens: int = 2048
    needle_lengths: tuple = (1.0, 2.0)
    depths: tuple = (0.1, 0.5, 0.9)
    prompts: int = 4
    n_needle: int = 4  # methods that are asked for passkeys, as the untouched checkpoint is
    n_tuned: int = 2  # methods that are fine-tuned
    steps: int = 60  # of fine-tuning


PLANS = {
    "full": Plan(),
    "try": Plan(
        code_lengths=2.0,
        prose_lengths=1.0,
        tax_tokens=4096,
        needle_lengths=(1.0,),
        depths=(0.5,),
        prompts=2,
        n_needle=1,
        n_tuned=1,
        steps=2,
    ),
}
MINUTES = {"full": 90.0, "try": 10.0}

# What is given up where the time does not suffice, in this order.
SHRINKING = (
    ("two prompts for each length and depth, not four", {"prompts": 2}),
    ("passkeys asked of the best two methods, not four", {"n_needle": 2}),
    ("40 steps of fine-tuning, not 60", {"steps": 40}),
    ("one prompt for each length and depth", {"prompts": 1}),
    ("one method fine-tuned, not two", {"n_tuned": 1}),
    ("20 steps of fine-tuning, not 60", {"steps": 20}),
    ("no passkeys beyond the original context length", {"needle_lengths": (1.0,)}),
    ("code to twice the original context length", {"code_lengths": 2.0}),
)

UNTOUCHED = "untouched"
METHODS = (
    "pi",
    "ntk",
    "yarn",
    "dynamic-yarn",
    "llama3",
    "longrope",
    "self-extend",
    "lm-infinite",
)
BINS = 64  # parts of a long document with a loss each
STEP_TOKENS = 4096  # of a step of fine-tuning


class Public(Measurements):
    """The checkpoint, the texts, and what has been measured, which is saved in measured.json.

    A measurement has a name such as "loss/yarn/code".
    """

    def __init__(self, cfg, run):
        self.cfg = cfg
        self.run = run
        self.device = pick_device(cfg.device)
        self.dtype = pick_dtype(cfg.dtype, self.device)
        base = GPT.load(run)
        require(
            base.config.pos == "rope" and not base.config.extension,
            f"{run} is not a model with rope that was never extended: give one that is",
        )
        self.tokenizer = data.tokenizer_from_json(base.meta.get("tokenizer"))
        self.imported = base.meta.get("imported") or Path(run).name
        self.original_length = base.config.block_size
        self.n_parameters = sum(p.numel() for p in base.parameters())
        self.texts = {"code": read_text(base, cfg.code or longest_module()).val}
        if cfg.prose:
            self.texts["prose"] = read_text(base, cfg.prose).val
        self.plan = PLANS[cfg.budget]
        for text, split in self.texts.items():
            split.require_length(self.length_of(text))
        self.methods = [name for name in METHODS if name != "longrope" or cfg.longrope]
        self.dropped = {}  # setting of the plan -> what is given up by it, in words
        # the model that was used last
        self.loaded_name = self.loaded_model = None
        self.folder = Path(cfg.runs)
        super().__init__(self.folder / "measured.json", self.key())

    def key(self):
        texts = {}
        for text, split in self.texts.items():
            texts[text] = hashlib.sha256(split.tokens[0].tobytes()).hexdigest()[:16]
        return {
            "checkpoint": read_meta(list_steps(self.run)[-1])["checksums"]["model.safetensors"],
            "texts": texts,
            "factor": self.cfg.factor,
            "dtype": str(self.dtype),
            "device": self.device.type,
            "budget": self.cfg.budget,
        }

    def length_of(self, text):
        """Return the tokens of a text that are scored at once."""
        lengths = self.plan.code_lengths if text == "code" else self.plan.prose_lengths
        return round(lengths * self.original_length)

    def needle_lengths(self, plan=None):
        plan = plan or self.plan
        long = [round(length * self.original_length) for length in plan.needle_lengths]
        return sorted({plan.needle_tokens, *long})

    # The models

    def model(self, name):
        """Return a model on the device: the checkpoint, extended by a method, or fine-tuned."""
        if self.loaded_name != name:
            self.loaded_name = name
            tuned = self.folder / name
            model = GPT.load(tuned) if list_steps(tuned) else self.extended(name)
            self.loaded_model = model.to(self.device)
        return self.loaded_model

    def extended(self, name):
        model = GPT.load(self.run)
        if name == UNTOUCHED:
            return model
        options = {}
        if name == "longrope":
            options = read_json(Path(self.cfg.longrope))
        model.extend(name, self.cfg.factor, **options)
        model.meta = {key: model.meta.get(key) for key in ("bos", "tokenizer")}
        return model

    # Loss

    def loss(self, name, text):
        """Return the mean loss in each of BINS equal parts of a text."""
        key = f"loss/{name}/{text}/{self.length_of(text)}"
        return self.measure(key, self.measure_loss, name, text)

    def measure_loss(self, name, text):
        length = self.length_of(text)
        sums = loss_by_position(self.model(name), self.texts[text], length, length, self.dtype)
        loss_sum, n_scored = (part.view(BINS, -1).sum(1) for part in sums)
        return (loss_sum / n_scored).tolist()

    def tax(self, name, text):
        """Return the mean loss at a length that the untouched checkpoint was trained for."""
        return self.measure(f"tax/spread/{name}/{text}", self.measure_tax, name, text, self.dtype)

    def measure_tax(self, name, text, dtype):
        plan = self.plan
        split = self.texts[text]
        sums = loss_by_position(self.model(name), split, plan.tax_length, plan.tax_tokens, dtype)
        return float(sums[0].sum() / sums[1].sum())

    def loss_in_float32(self):
        """Return the untouched checkpoint's tax() on code in float32."""
        key = f"float32/spread/{UNTOUCHED}"
        return self.measure(key, self.measure_tax, UNTOUCHED, "code", torch.float32)

    # Passkeys

    def needle(self, name, length, depth, prompt):
        """Return whether every token of a passkey has the highest probability."""
        key = f"needle/{name}/{length}/{depth}/{prompt}"
        return self.measure(key, self.measure_needle, name, length, depth, prompt)

    def measure_needle(self, name, length, depth, prompt):
        tokens, n_answer = self.make_prompt(length, depth, prompt)
        model = self.model(name)
        with evaluation_mode(model, self.dtype) as device:
            x = torch.from_numpy(tokens[None, :-1]).to(device)
            logits = model.head(model.hidden_states(x, None)[:, -n_answer:])
            return bool((logits.argmax(-1).cpu().numpy() == tokens[-n_answer:]).all())

    def make_prompt(self, length, depth, seed):
        """Make a text of `length` tokens that hides a passkey and ends with it.

        depth: from 0 (the start) to 1 (the end). Returns the tokens and how many the answer has.
        """
        rng = np.random.Generator(np.random.PCG64([seed, length, round(depth * 100)]))
        passkey = rng.integers(10_000, 100_000)

        def encode(text):
            return [int(i) for i in self.tokenizer.encode(text)]

        bos = self.tokenizer.bos if read_meta(list_steps(self.run)[-1]).get("bos") else None
        start = [] if bos is None else [bos]
        start += encode("A pass key of five digits is hidden in this text. Remember it.\n")
        filler = encode(" The river is wide. The wind is cold. We walk home. They wait outside.")
        hidden = encode(f" The pass key is {passkey}. Remember it: {passkey} is the pass key.")
        question = encode("\nWhat is the pass key that was hidden in the text? The pass key is")
        answer = encode(f" {passkey}")
        n_filler = length - len(start) - len(hidden) - len(question) - len(answer)
        require(n_filler >= 0, f"{length} tokens are too few for a passkey: give a longer text")
        body = [filler[i % len(filler)] for i in range(n_filler)]
        # between two repetitions of the filler
        place = round(depth * n_filler / len(filler)) * len(filler)
        tokens = start + body[:place] + hidden + body[place:] + question + answer
        return np.array(tokens), len(answer)

    # Fine-tuning

    def tune(self, method):
        """Fine-tune the checkpoint, extended by a method; return the name of the result."""
        name = f"{method} + {self.plan.steps} steps"
        self.measure(f"tune/{name}", self.train, method, name)
        return name

    def train(self, method, name):
        config = self.train_config(name)
        model = self.extended(method)
        if list_steps(self.folder / name):
            model = GPT.load(self.folder / name)
            config.init_from = "resume"
        options = (config.pose_window, model.config.block_size)
        return train_or_stop(model, config, *options)["val_loss"]

    def train_config(self, name):
        """Return the preset's settings, for a run of this name."""
        settings = tomllib.loads(PRESET.read_text(encoding="utf-8"))
        window = min(settings["pose_window"], self.original_length)
        settings |= {
            "dataset": self.cfg.dataset or prepare_modules(self.run),
            "out_dir": str(self.folder / name),
            "max_iters": self.plan.steps,
            "pose_window": window,
            "gradient_accumulation_steps": STEP_TOKENS // window,
            "eval_interval": 10**9,
            "eval_length": window,
            "eval_iters": 8,
            "device": self.cfg.device,
            "dtype": self.cfg.dtype,
        }
        return ExtendConfig(**settings)

    def measure_step(self):
        """Return the seconds of a step of fine-tuning, from one of its sequences."""
        window = self.train_config("step").pose_window
        model = self.model(UNTOUCHED).train()
        tokens = torch.from_numpy(self.texts["code"].tokens[0][: window + 1].astype(np.int64))
        x, y = tokens[None, :-1].to(self.device), tokens[None, 1:].to(self.device)
        start = time.perf_counter()
        with autocast(self.device, self.dtype):
            loss = model(x, y)
        loss.backward()
        model.zero_grad()
        model.eval()
        return (time.perf_counter() - start) * STEP_TOKENS / window


def longest_module():
    """Return the largest module of Python's standard library."""
    return max(standard_library().values(), key=lambda file: file.stat().st_size)


def prepare_modules(run):
    """Prepare the standard library without its longest module, in a run's tokens."""
    digest = read_meta(list_steps(run)[-1])["checksums"]["model.safetensors"][:8]
    name = f"public-{digest}"
    if not data.dataset_exists(name):
        files = standard_library()
        longest = longest_module()
        files = {key: file for key, file in files.items() if file != longest}
        version = sysconfig.get_python_version()
        source = f"standard library of Python {version} without {longest.name}"
        build(name, files, source, tokenizer=str(run))
    return name


# -----------------------------------------------------------------------------
# The order of the measurements


def time_kinds(public):
    """Measure one of each kind, on the untouched checkpoint; return kind -> seconds."""
    seconds = public.measured["seconds"]
    taken = {}
    for text in public.texts:
        public.loss(UNTOUCHED, text)
        taken[f"loss on {text}"] = seconds[f"loss/{UNTOUCHED}/{text}/{public.length_of(text)}"]
        public.tax(UNTOUCHED, text)
        taken[f"tax on {text}"] = seconds[f"tax/spread/{UNTOUCHED}/{text}"]
    depth = public.plan.depths[0]
    for length in public.needle_lengths():
        public.needle(UNTOUCHED, length, depth, 0)
        taken[f"passkey at {length:,}"] = seconds[f"needle/{UNTOUCHED}/{length}/{depth}/0"]
    taken["step"] = public.measure("step", public.measure_step)
    return taken


def predict(public, plan, taken):
    """Return the seconds that the measurements of a plan take, by kind. taken: of one of each."""
    # self-extend attends twice
    n_models = 1.5 + len(public.methods) + plan.n_tuned
    n_asked = 1 + plan.n_needle + plan.n_tuned
    n_prompts = n_asked * len(plan.depths) * plan.prompts
    predicted = {"step": taken["step"] * plan.n_tuned * plan.steps}
    for text in public.texts:
        predicted[f"loss on {text}"] = taken[f"loss on {text}"] * n_models
        predicted[f"tax on {text}"] = taken[f"tax on {text}"] * n_models
    # between as the length and as its square
    shorter = (plan.code_lengths / PLANS[public.cfg.budget].code_lengths) ** 1.5
    predicted["loss on code"] *= shorter
    for length in public.needle_lengths(plan):
        predicted[f"passkey at {length:,}"] = taken[f"passkey at {length:,}"] * n_prompts
    return predicted


def choose_plan(public):
    """Time one measurement of each kind, and shrink the plan until the sum is affordable."""
    taken = time_kinds(public)
    allowed = 60 * (public.cfg.minutes or MINUTES[public.cfg.budget])
    shrinking = list(SHRINKING)
    while True:
        predicted = predict(public, public.plan, taken)
        total = sum(predicted.values())
        if total <= allowed or not shrinking:
            break
        words, settings = shrinking.pop(0)
        smaller = replace(public.plan, **settings)
        if sum(predict(public, smaller, taken).values()) < total:
            public.plan = smaller
            # what was given up of this setting before is included
            public.dropped[min(settings)] = words
    for kind, seconds in predicted.items():
        print(f"  {kind}: {taken[kind]:.0f} s once, {seconds / 60:.1f} min in all")
    print(f"all together {total / 60:.0f} min, of {allowed / 60:.0f} allowed", flush=True)
    for words in public.dropped.values():
        print(f"  given up: {words}")


def measure_all(public):
    """Measure everything in the plan; return the names of all models."""
    choose_plan(public)
    names = [UNTOUCHED, *public.methods]
    beyond = {}
    for name in names:
        beyond[name] = float(np.mean(public.loss(name, "code")[BINS // 2 :]))
        for text in public.texts:
            public.loss(name, text)
            public.tax(name, text)
    public.loss_in_float32()

    best = sorted(public.methods, key=beyond.get)
    asked = [UNTOUCHED, *best[: public.plan.n_needle]]
    # a dynamic method is, at the full length, the one that it is named after
    trainable = [
        name for name in best if name not in EVALUATION_ONLY and not name.startswith("dynamic")
    ]
    for method in trainable[: public.plan.n_tuned]:
        name = public.tune(method)
        names.append(name)
        asked.append(name)
        for text in public.texts:
            public.loss(name, text)
            public.tax(name, text)
    for name in asked:
        for length in public.needle_lengths():
            for depth in public.plan.depths:
                for prompt in range(public.plan.prompts):
                    public.needle(name, length, depth, prompt)
    return names, asked


def main():
    args = cli.parse(cfg=PublicConfig, about=__doc__, paths="the run folder of an import")
    require(
        len(args.paths) == 1,
        "public.py measures one checkpoint: import it by hf.py and name its run folder, as in "
        "python experiments/public.py out/smollm2",
    )
    public = Public(args.cfg, Path(args.paths[0]))
    names, asked = measure_all(public)
    where = provenance(public.device, public.commits())
    source = f"`{command_line('experiments/public.py')}`, {where}"
    write_report(public, names, asked, source)


if __name__ == "__main__":
    cli.run_main(main)
