"""Extend a 124 M parameter model on real, long text: Python code, 1,024 to 16k and 64k tokens.

    python experiments/long_code.py                 a GPU: half an hour or more, by the card
    python experiments/long_code.py --budget=try    seconds, a test; its numbers mean nothing

Stop at any time: the same command continues where it stopped. The results go to
long_code.md and .json in --out_dir.

The text is the source of the Python packages that are installed next to this program. Each method
is fine-tuned at the target length on 0.1, 1 and 10 % of the pretraining tokens (whole steps, so the
first may be a single one), and evaluated at the original length and at 4, 16 and 64 times that. The
loss is that of the last quarter of sequences that do not overlap, in nats per token of held-out
files.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import sysconfig
from dataclasses import dataclass
from typing import Literal

import torch

import data
from data.prepare import build
from evaluate import loss_by_position
from experiments.report import command_line, markdown_table
from model import GPT, GPTConfig
from nanolong import cli
from nanolong.devices import pick_device, pick_dtype
from nanolong.errors import UserError
from nanolong.provenance import provenance
from nanolong.run.folder import list_steps
from nanolong.strict_json import write_json
from nanolong.validate import require
from rope_scaling import METHODS
from train import TrainConfig, train


@dataclass
class CodeConfig:
    budget: Literal["gpu", "try"] = "gpu"  # sizes of the model and its training
    # RoPE scaling methods
    methods: tuple[str, ...] = ("none", "pi", "ntk", "yarn", "ntk-lceg", "dynamic-yarn")
    factors: tuple[int, ...] = (16, 64)  # how many times longer
    tokenizer: str = "gpt2"  # bytes, or a tiktoken encoding
    dataset: str = ""  # a dataset of your own, instead of the packages' source
    runs: str = "out/long_code"  # folder for the run folders
    out_dir: str = "out/long_code"  # folder for long_code.md and .json
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self):
        for name in self.methods:
            require(
                name in METHODS, f"there is no method {name!r}: choose from {', '.join(METHODS)}"
            )
        require(self.factors, "factors is empty: give numbers above 1, as in --factors=16,64")
        for factor in self.factors:
            require(factor > 1, f"factor {factor} does not extend the context: give more than 1")


BUDGETS = {
    "gpu": {
        "model": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
        "batch_size": 256,  # sequences in a step of pretraining
        "max_iters": 2000,  # steps of pretraining
        "max_tokens": 1 << 19,  # tokens of validation text that are scored
    },
    "try": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
        "batch_size": 16,
        "max_iters": 20,
        "max_tokens": 2048,
    },
}
FRACTIONS = (0.001, 0.01, 0.1)  # of the pretraining tokens, for fine-tuning


def prepare_code(tokenizer):
    """Prepare the dataset of the installed packages' source, split by file; return its name."""
    name = f"code-{tokenizer}"
    if data.dataset_exists(name):
        return name
    root = Path(sysconfig.get_path("purelib"))
    files = {}
    for file in sorted(root.rglob("*.py")):
        if file.stat().st_size > 1024:
            files[file.relative_to(root).as_posix()] = file
    if len(files) < 100:
        raise UserError(
            f"{root} has {len(files)} Python files, too few to learn from: "
            "name a dataset of yours with --dataset"
        )
    build(name, files, source="Python sources of the installed packages", tokenizer=tokenizer)
    return name


class LongCode:
    """The pretrained model and what is made of it; the records of what was measured."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.budget = BUDGETS[cfg.budget]
        self.dataset_name = cfg.dataset or prepare_code(cfg.tokenizer)
        self.dataset = data.Dataset(self.dataset_name)
        self.folder = Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset or cfg.tokenizer).name}"
        self.device = pick_device(cfg.device)
        self.dtype = pick_dtype(cfg.dtype, self.device)
        self.original_length = self.budget["model"]["block_size"]
        factors = {1, 4, *cfg.factors}
        self.lengths = sorted(factor * self.original_length for factor in factors)
        self.records = []

    def new_model(self):
        torch.manual_seed(1)
        config = GPTConfig(**self.budget["model"], vocab_size=self.dataset.vocab_size)
        return GPT(config)

    def extended_model(self, method, factor):
        """Return the pretrained model, extended by a method."""
        model = GPT.load(self.folder / "base")
        model.extend(method, factor)
        model.meta = {"bos": self.dataset.bos}
        return model

    def train_model(self, name, model, batch_size, length, max_iters, learning_rate):
        """Train a new or extended model, or what is left of it to train.

        batch_size: sequences in a step. Returns the model in eval mode, on the device.
        """
        run = self.folder / name
        micro_batch = batch_size
        if self.cfg.budget == "gpu":  # at most 16,384 tokens at a time
            micro_batch = max(1, min(batch_size, 16384 // length))
        train_config = TrainConfig(
            dataset=self.dataset_name,
            out_dir=str(run),
            seed=1,
            batch_size=micro_batch,
            gradient_accumulation_steps=max(1, batch_size // micro_batch),
            max_iters=max_iters,
            learning_rate=learning_rate,
            warmup_iters=min(100, max_iters // 5),
            eval_interval=10**9,
            eval_iters=2,
            device=self.cfg.device,
            dtype=self.cfg.dtype,
            compile=None if self.cfg.budget == "gpu" else False,
        )
        if list_steps(run):
            model = GPT.load(run)
            train_config.init_from = "resume"
        if model.meta.get("step") != max_iters and train(model, train_config)["stopped"]:
            raise KeyboardInterrupt
        return model.to(self.device).eval()

    def evaluate(self, model, method, factor, fraction):
        """Add a record: the last-quarter loss at every length, or why it cannot be computed."""
        losses = {}
        for length in self.lengths:
            try:
                loss_sum, n_scored = loss_by_position(
                    model,
                    self.dataset.val,
                    length,
                    self.budget["max_tokens"],
                    self.dtype,
                    lengths=self.lengths,
                )
                quarter = slice(length * 3 // 4, None)
                losses[length] = float(loss_sum[quarter].sum() / n_scored[quarter].sum())
            except UserError as error:
                losses[length] = str(error)
        record = {"method": method, "factor": factor, "fraction": fraction, "loss": losses}
        self.records.append(record)
        print(record, flush=True)

    def run(self):
        """Pretrain, extend by every method and factor, and fine-tune."""
        batch_size, max_iters = self.budget["batch_size"], self.budget["max_iters"]
        length = self.original_length
        self.train_model("base", self.new_model(), batch_size, length, max_iters, 1e-3)
        base = GPT.load(self.folder / "base").to(self.device)
        self.evaluate(base, "untouched", 1, 0)
        for factor in self.cfg.factors:
            for method in self.cfg.methods:
                model = self.extended_model(method, factor).to(self.device)
                self.evaluate(model, method, factor, 0)
                for fraction in FRACTIONS:
                    model = self.train_model(
                        f"{method}-{factor}-{fraction:g}",
                        self.extended_model(method, factor),
                        batch_size=max(1, batch_size // factor),
                        length=factor * length,
                        max_iters=max(1, round(fraction * max_iters)),
                        learning_rate=1e-4,
                    )
                    self.evaluate(model, method, factor, fraction)

    def describe(self):
        """Return the paragraph that says what was trained and what the table shows."""
        tokens = self.budget["max_iters"] * self.budget["batch_size"] * self.original_length
        parameters = sum(p.numel() for p in self.new_model().parameters())
        longest = self.lengths[-1]
        long_fraction = self.dataset.long_fraction(longest)
        return (
            f"{parameters / 1e6:.0f} M parameters, pretrained on {tokens:,} tokens at "
            f"{self.original_length:,}; {long_fraction:.0%} of the training tokens are in "
            f"documents of at least {longest:,} tokens. Last-quarter loss, nats per token."
        )

    def loss_table(self):
        """Return a Markdown table: a line per record, a column per length."""
        header = ["method", "factor", "fine-tuned on", *(f"{n:,}" for n in self.lengths)]
        rows = []
        for record in self.records:
            row = [record["method"], str(record["factor"]), f"{record['fraction']:.1%}"]
            for loss in record["loss"].values():
                row.append(f"{loss:.4f}" if isinstance(loss, float) else "–")
            rows.append(row)
        return markdown_table(header, rows)


def main():
    cfg, *_ = cli.parse(CodeConfig, about=__doc__)
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    experiment = LongCode(cfg)
    experiment.run()

    command = command_line("experiments/long_code.py")
    data_hash = f"{experiment.dataset_name} {experiment.dataset.hash}"
    lines = ["# Long code", "", f"`{command}`: {provenance(experiment.device)}; {data_hash}.", ""]
    lines += [experiment.describe(), "", *experiment.loss_table()]
    text = "\n".join(lines) + "\n"
    (out_dir / "long_code.md").write_text(text, encoding="utf-8")
    results = {"command": command, "records": experiment.records}
    write_json(out_dir / "long_code.json", results)
    print(text)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
