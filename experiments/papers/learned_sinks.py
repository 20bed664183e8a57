"""Does a learned sink for each head change the loss, and where attention goes?

    python experiments/papers/learned_sinks.py                six runs of about a minute of 2 cores
    python experiments/papers/learned_sinks.py --seeds=1 --budget=try

A sink is a score for each head that takes part in the softmax and has no value (gpt-oss, Granite),
so that a head can attend to nothing. Models with and without are trained alike. Without one, heads
are known to attend to the first token in its place (Xiao et al. 2024). The runs are kept in
out/learned_sinks: the same command continues where it stopped.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import torch

from experiments.leaderboard import BUDGETS
from experiments.report import (
    TextExperiment,
    format_interval,
    make_main,
    markdown_table,
    run_all,
    select,
    train_model,
)
from nanolong import cli
from nanolong.attention_maps import attention_maps
from nanolong.losses import loss_by_position
from nanolong.scoring import find_sequences, read_sequences
from train import TrainConfig

MODELS = {"without": False, "with a sink": True}
FACTORS = (1, 4)  # lengths, in training lengths
MAX_TOKENS = 65536
N_MAPS = 32  # sequences whose attention is looked at


@dataclass
class SinksConfig(TextExperiment):
    # as in experiments/leaderboard.py
    budget: Literal["cpu", "gpu", "try"] = "cpu"
    seeds: int = 3  # runs of each model


def measure(cfg):
    dataset = cfg.load_dataset()
    runs = [(name, seed) for seed in range(1, cfg.seeds + 1) for name in MODELS]
    records = run_all(runs, measure_model, cfg, dataset)
    return {"note": cfg.note(dataset), "budget": cfg.budget, "records": records}


def measure_model(name, seed, cfg, dataset):
    """Train a model, and measure its losses and its attention: a list of one record."""
    device, dtype = cfg.pick_device()
    budget = BUDGETS[cfg.budget]
    folder = cfg.run_folder() / f"{name.replace(' ', '-')}-{seed}"
    config = TrainConfig(
        **budget["training"],
        dataset=cfg.dataset,
        out_dir=str(folder),
        device=cfg.device,
        dtype=cfg.dtype,
        seed=seed,
        eval_interval=10**6,
    )
    model = train_model({**budget["model"], "sink_scores": MODELS[name]}, config, dataset).to(
        device
    )
    T = model.config.block_size
    lengths = [factor * T for factor in FACTORS]
    record = {"model": name, "seed": seed}
    for length in lengths:
        sums, counts = loss_by_position(
            model, dataset.val, length, MAX_TOKENS, dtype, lengths=lengths
        )
        record[f"loss {length}"] = (sums.sum() / counts.sum()).item()
    sequences = find_sequences(dataset.val, T, N_MAPS * T)[:N_MAPS]
    x, _ = read_sequences(dataset.val, T, sequences)
    # of the second half of the queries: (layers, B, H, T / 2, T)
    maps = torch.stack([p[:, :, T // 2 :] for p in attention_maps(model, x)])
    record["first token"] = maps[..., 0].mean().item()
    record["sink"] = 1 - maps.sum(-1).mean().item()
    return [record]


def report(board):
    """Return the lines of the Markdown report."""
    keys = [key for key in board["records"][0] if key not in ("model", "seed")]
    rows = [[name] for name in (*MODELS, "difference")]
    for key in keys:
        values = [[r[key] for r in select(board["records"], model=name)] for name in MODELS]
        values.append([b - a for a, b in zip(*values, strict=True)])
        for row, column in zip(rows, values, strict=True):
            row.append(format_interval(column, 4))
    return [
        "# Learned sinks",
        "",
        f"`{board['command']}`, {board['note']}",
        "",
        *markdown_table(["model", *keys], rows),
        "",
        "`loss N`: nats per token of validation text in sequences of N tokens. `first token` and",
        "`sink`: the mean share of attention, over layers, heads and the second half of the",
        "queries, that goes to the first token, here <bos>, and to the sink. Mean over the seeds",
        "and its 95 % interval; the last row is of the differences of each seed.",
    ]


main = make_main(SinksConfig, measure, report)

if __name__ == "__main__":
    cli.run_main(main)
