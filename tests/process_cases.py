"""What test_processes.py runs in several processes, started by torchrun.

    torchrun --standalone --nproc_per_node=2 tests/process_cases.py CASES.json

trains small models one after the other. A case is {"model": settings of GPTConfig, "train":
settings of TrainConfig}; with "averages" its optimizer is Averaging of tests/optimizers.py.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from flags import SMALLEST
from optimizers import Averaging

from model import GPT, GPTConfig
from nanolong import parallel
from nanolong.errors import run_main
from train import TrainConfig, train

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 32}
SHORT = {
    **SMALLEST,
    "gradient_accumulation_steps": 4,
    "max_iters": 20,
    "eval_interval": 10,
    "eval_iters": 14,  # 7 batches, which no number of processes here divides
    "lr_schedule": "constant",
}


def train_case(case):
    """Train the model of a case, from the beginning or from its last checkpoint. Returns it."""
    cfg = TrainConfig(**{**SHORT, **case["train"]})
    if cfg.init_from == "resume":
        model = GPT.load(cfg.out_dir)
    else:
        torch.manual_seed(1)
        model = GPT(GPTConfig(**{**SHAPE, "vocab_size": 257, **case["model"]}))
    adamw = Averaging if case.get("averages") else torch.optim.AdamW
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        mock.patch("torch.optim.AdamW", adamw),
    ):
        train(model, cfg)
    return model


def main():
    parallel.join_processes(torch.device("cpu"))
    for case in json.loads(Path(sys.argv[1]).read_text()):
        train_case(case)


if __name__ == "__main__":
    run_main(main)
