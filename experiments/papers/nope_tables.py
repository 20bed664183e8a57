"""Measure how much a model loses without positions, by context length and by model size.

    python experiments/papers/nope_tables.py --budget=cpu           about 20 minutes of 2 cores
    python experiments/papers/nope_tables.py --budget=gpu --datasets=python,shakespeare
    python experiments/papers/nope_tables.py --tables=length --seeds=3 --pos=nope,learned,alibi,rope

Stop at any time: the same command continues where it stopped. The results go to nope.md and
.json in --out_dir.

These are the tables of Haviv et al. (2022): every scheme is trained alike at each length (with the
middle size) and with each size (at the greatest length), and scored over whole sequences of that
length, in nats per token of held-out text and as a perplexity. Their claim: without positions
little is lost, and the less the larger the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import math
from dataclasses import dataclass
from typing import Literal

import torch

import data
from data.prepare import prepare_missing
from evaluate import loss_by_position
from experiments.report import (
    command_line,
    confidence_interval,
    count,
    format_interval,
    hash_code,
    load_finished_run,
    markdown_table,
)
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.devices import pick_device, pick_dtype
from nanolong.provenance import provenance
from nanolong.run.folder import list_steps
from nanolong.scoring import find_sequences
from nanolong.strict_json import write_json
from nanolong.validate import require
from train import TrainConfig, train


@dataclass
class NopeConfig:
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # sizes and lengths
    datasets: tuple[str, ...] = ("python",)  # texts
    pos: tuple[str, ...] = ("nope", "learned", "sinusoidal", "alibi")  # position schemes
    seeds: int = 1  # runs of each scheme, length and size
    tables: tuple[Literal["length", "size"], ...] = ("length", "size")  # what varies
    max_tokens: int = 65536  # tokens of validation text that are scored
    runs: str = "out/nope"  # folder for the run folders
    out_dir: str = "out/nope"  # folder for nope.md and .json
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self):
        require(self.seeds >= 1, f"seeds={self.seeds} is too small: give at least 1")
        require(self.tables, "tables is empty: give --tables=length,size")
        require(self.datasets, "datasets is empty: name a text, as in --datasets=python")
        for name in self.pos:
            require(
                name in POSITIONS,
                f"there is no position scheme {name!r}: choose from {', '.join(POSITIONS)}",
            )


# All lengths are trained at the middle one of the sizes (n_embd).
BUDGETS = {
    "cpu": {
        "lengths": (32, 64, 128),
        "sizes": (64, 96, 128),
        "n_layer": 4,
        "head_dim": 32,
        "tokens_per_step": 4096,
        "max_iters": 500,
    },
    "gpu": {
        "lengths": (256, 512, 1024),
        "sizes": (256, 512, 768),
        "n_layer": 12,
        "head_dim": 64,
        "tokens_per_step": 65536,
        "max_iters": 3000,
    },
    "try": {
        "lengths": (8, 16),
        "sizes": (32, 64),
        "n_layer": 1,
        "head_dim": 32,
        "tokens_per_step": 64,
        "max_iters": 3,
    },
}


def table_columns(table, budget):
    """Return the (length, size) of every column of the table by length, or of that by size."""
    if table == "length":
        middle = budget["sizes"][len(budget["sizes"]) // 2]
        return [(length, middle) for length in budget["lengths"]]
    return [(budget["lengths"][-1], size) for size in budget["sizes"]]


def train_model(cfg, name, pos, length, size, seed, run):
    """Train a model, or what is left of it to train; return it."""
    budget = BUDGETS[cfg.budget]
    train_config = TrainConfig(
        dataset=name,
        out_dir=str(run),
        seed=seed,
        batch_size=max(1, budget["tokens_per_step"] // length),
        max_iters=budget["max_iters"],
        learning_rate=3e-3 if size < 512 else 1e-3,
        warmup_iters=min(100, budget["max_iters"] // 5),
        eval_interval=10**9,
        eval_iters=2,
        device=cfg.device,
        dtype=cfg.dtype,
        compile=None if cfg.budget == "gpu" else False,
    )
    if list_steps(run):
        model = GPT.load(run)
        train_config.init_from = "resume"
    else:
        torch.manual_seed(seed)
        model = GPT(
            GPTConfig(
                pos=pos,
                n_layer=budget["n_layer"],
                n_head=size // budget["head_dim"],
                n_embd=size,
                block_size=length,
                vocab_size=data.vocabulary_size(name),
            )
        )
    if model.meta.get("step") != budget["max_iters"]:
        if train(model, train_config)["stopped"]:
            raise KeyboardInterrupt
    return model


def run_model(cfg, name, pos, length, size, seed):
    """Train and score one run, or read what it has left in its folder: its record."""
    dataset = data.Dataset(name)
    budget = BUDGETS[cfg.budget]
    run = Path(cfg.runs) / f"{cfg.budget}-{Path(name).name}-{pos}-{length}-{size}-{seed}"
    key = {
        "dataset": name,
        "data": dataset.hash,
        "pos": pos,
        "length": length,
        "n_embd": size,
        "seed": seed,
        "max_iters": budget["max_iters"],
        "max_tokens": cfg.max_tokens,
        "scored": hash_code([loss_by_position, find_sequences]),
    }
    finished = load_finished_run(run / "score.json", key)
    if finished:
        return finished["record"]
    device = pick_device(cfg.device)
    model = train_model(cfg, name, pos, length, size, seed, run).to(device)
    dtype = pick_dtype(cfg.dtype, device)
    loss_sum, n_scored = loss_by_position(
        model, dataset.val, length, cfg.max_tokens, dtype, lengths=budget["lengths"]
    )
    record = {
        **key,
        "loss": float(loss_sum.sum() / n_scored.sum()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    write_json(run / "score.json", {"key": key, "record": record})
    return record


def select(records, **values):
    """Return the records that have these values."""
    return [r for r in records if all(r[key] == value for key, value in values.items())]


def loss_table(records, schemes, columns):
    """Return a Markdown table of one text: a line per scheme; columns: (length, size) pairs."""
    header = [""]
    for length, size in columns:
        parameters = select(records, length=length, n_embd=size)[0]["parameters"]
        header.append(f"{length:,} tokens, {parameters / 1e6:.1f} M")
    rows = []
    for pos in schemes:
        row = [pos]
        for length, size in columns:
            losses = [r["loss"] for r in select(records, pos=pos, length=length, n_embd=size)]
            mean, _ = confidence_interval(losses)
            row.append(f"{format_interval(losses)} ({math.exp(mean):.2f})")
        rows.append(row)
    return markdown_table(header, rows)


def run_all(cfg):
    """Run every text, scheme, length, size and seed; return the records."""
    budget = BUDGETS[cfg.budget]
    columns = {}  # one pair is in both tables
    for table in cfg.tables:
        columns |= dict.fromkeys(table_columns(table, budget))
    runs = []
    for seed in range(1, cfg.seeds + 1):
        for name in cfg.datasets:
            for length, size in columns:
                runs += [(name, pos, length, size, seed) for pos in cfg.pos]
    records = []
    for number, (name, pos, length, size, seed) in enumerate(runs, 1):
        what = f"{pos} on {name}, {length} tokens, n_embd={size}, seed {seed}"
        print(f"\n== {what} ({number} of {len(runs)})", flush=True)
        records.append(run_model(cfg, name, pos, length, size, seed))
    return records


def main():
    cfg, *_ = cli.parse(NopeConfig, about=__doc__)
    for name in cfg.datasets:
        prepare_missing(name)
        data.find_dataset(name)  # or say at once that there is none
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    records = run_all(cfg)

    budget = BUDGETS[cfg.budget]
    command = command_line("experiments/papers/nope_tables.py")
    lines = [
        "# Without positions",
        "",
        f"`{command}`: {provenance(pick_device(cfg.device))}; {budget['max_iters']} steps of "
        f"{budget['tokens_per_step']:,} tokens, {count(cfg.seeds, 'seed')}; nats per token over "
        "whole sequences of the training length (perplexity). Scored: "
        f"{cfg.max_tokens:,} tokens, spread over the validation text.",
    ]
    for name in cfg.datasets:
        measured = select(records, dataset=name)
        lines += ["", f"## {name}, data {measured[0]['data']}"]
        for table in cfg.tables:
            lines += ["", f"By {table}:", ""]
            lines += loss_table(measured, cfg.pos, table_columns(table, budget))
    text = "\n".join(lines) + "\n"
    (out_dir / "nope.md").write_text(text, encoding="utf-8")
    write_json(out_dir / "nope.json", {"command": command, "records": records})
    print(text)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
