"""Trains small models one after the other, as one process or, started by torchrun, as several.

    torchrun --standalone --nproc_per_node=2 tests/sharding_cases.py CASES.json

A case is {"model": settings of GPTConfig, "train": settings of TrainConfig}. Prints JSON:
of each case the largest number of parameters that a process keeps.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from flags import SMALLEST

from model import GPT, POSITIONS, GPTConfig
from nanolong.cli import run_main, silent
from nanolong.entry import load_entries
from nanolong.parallel import sharding
from nanolong.parallel.processes import join_processes
from train import TrainConfig, train

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 32}
SHORT = {
    **SMALLEST,
    "gradient_accumulation_steps": 4,
    "max_iters": 20,
    "eval_interval": 10,
    "eval_iters": 7,  # not divisible by the number of processes
    "lr_schedule": "constant",
}


def train_case(case):
    """Train the model of a case, from the beginning or from its last checkpoint. Returns it."""
    cfg = TrainConfig(**{**SHORT, **case["train"]})
    if cfg.init_from == "resume":
        model = GPT.load(cfg.out_dir, weights=cfg.parallel != "fsdp")
    else:
        torch.manual_seed(1)
        model = GPT(GPTConfig(**{**SHAPE, "vocab_size": 257, **case["model"]}))
    train(model, cfg)
    return model


def kept_parameters(model):
    parts = (p.to_local() if sharding.is_sharded(p) else p for p in model.parameters())
    return sum(part.numel() for part in parts)


def main():
    load_entries(filter(None, os.environ.get("NANOLONG_ENTRY", "").split(",")), POSITIONS)
    rank, _ = join_processes("cpu")
    kept = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        with silent(True):
            model = train_case(case)
        n_kept = torch.tensor(kept_parameters(model))
        dist.all_reduce(n_kept, dist.ReduceOp.MAX)
        kept.append(n_kept.item())
    if rank == 0:
        print(json.dumps(kept))


if __name__ == "__main__":
    run_main(main)
