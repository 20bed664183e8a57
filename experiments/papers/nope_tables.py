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

import data
from data.prepare import prepare_missing
from experiments.report import (
    Experiment,
    confidence_interval,
    count,
    format_interval,
    grid,
    hash_code,
    make_main,
    measure_run,
    run_all,
    select,
    title,
    train_model,
)
from nanolong import cli
from nanolong.losses import loss_by_position
from nanolong.plots import unique
from nanolong.provenance import provenance
from nanolong.scoring import find_sequences
from train import TrainConfig


@dataclass
class NopeConfig(Experiment):
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # sizes and lengths
    datasets: tuple[str, ...] = ("python",)  # texts
    pos: tuple[str, ...] = ("nope", "learned", "sinusoidal", "alibi")  # position schemes
    seeds: int = 1  # runs of each scheme, length and size
    tables: tuple[Literal["length", "size"], ...] = ("length", "size")  # what varies
    max_tokens: int = 65536  # tokens of validation text that are scored

    name = "nope"


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


def run_model(name, pos, length, size, seed, cfg):
    """Train and score one run, or read what it has left in its folder: a list of one record."""
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
    shape = {"n_layer": budget["n_layer"], "n_head": size // budget["head_dim"], "n_embd": size}

    def train_and_score():
        device, dtype = cfg.pick_device()
        model = train_model({"pos": pos, "block_size": length, **shape}, train_config, dataset)
        loss_sum, n_scored = loss_by_position(
            model.to(device), dataset.val, length, cfg.max_tokens, dtype, lengths=budget["lengths"]
        )
        loss = float(loss_sum.sum() / n_scored.sum())
        parameters = sum(p.numel() for p in model.parameters())
        return {**key, "loss": loss, "parameters": parameters}

    return [measure_run(run / "score.json", key, train_and_score)]


def loss_table(records, schemes, columns):
    """Return a Markdown table of one text: a line per scheme; columns: (length, size) pairs."""
    titles = {}
    for length, size in columns:
        parameters = select(records, length=length, n_embd=size)[0]["parameters"]
        titles[f"{length:,} tokens, {parameters / 1e6:.1f} M"] = {"length": length, "n_embd": size}

    def cell(pos, column):
        losses = [record["loss"] for record in select(records, pos=pos, **column)]
        mean, _ = confidence_interval(losses)
        return f"{format_interval(losses)} ({math.exp(mean):.2f})"

    return grid(schemes, titles, cell)


def measure(cfg):
    for name in cfg.datasets:
        prepare_missing(name)
        data.find_dataset(name)  # or say at once that there is none
    budget = BUDGETS[cfg.budget]
    columns = {table: table_columns(table, budget) for table in cfg.tables}
    runs = []
    for seed in range(1, cfg.seeds + 1):
        for name in cfg.datasets:
            for column in dict.fromkeys(sum(columns.values(), [])):  # one pair is in both tables
                runs += [(name, pos, *column, seed) for pos in cfg.pos]
    device, _ = cfg.pick_device()
    return {
        "note": (
            f"{provenance(device)}; {budget['max_iters']} steps of "
            f"{budget['tokens_per_step']:,} tokens, {count(cfg.seeds, 'seed')}; nats per token "
            "over whole sequences of the training length (perplexity). Scored: "
            f"{cfg.max_tokens:,} tokens, spread over the validation text"
        ),
        "columns": columns,  # (length, n_embd) pairs of each table
        "records": run_all(runs, run_model, cfg),
    }


def report(board):
    lines = title(board, "Without positions")
    for name in unique(board["records"], "dataset"):
        measured = select(board["records"], dataset=name)
        lines += ["", f"## {name}, data {measured[0]['data']}"]
        for table, columns in board["columns"].items():
            lines += ["", f"By {table}:", ""]
            lines += loss_table(measured, unique(measured, "pos"), columns)
    return lines


main = make_main(NopeConfig, measure, report)

if __name__ == "__main__":
    cli.run_main(main)
