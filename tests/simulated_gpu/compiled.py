"""Compile a training step and a decoding step for CUDA: graphs, breaks, launches; a line of JSON.

    compiled.py SCHEME OPTION METHOD

What Inductor generates is compiled and launched, and computes nothing.
"""

import json
import logging
import sys
import warnings

import counts
import torch
from cases import make_batch, make_model
from torch._dynamo.utils import counters

from nanolong.devices import compile_model, prepare_device


def train_step(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(*batch, reduction="sum")
    loss.backward()
    model.zero_grad(set_to_none=True)


def count_launches(forward, batch):
    """The launches of a step once everything is compiled: [of torch, of Triton]."""
    for _ in range(3):
        counts.reset()
        train_step(forward, batch)
    return [counts.counts()[f"launches of {who}"] for who in ("torch", "Triton")]


def main():
    pos, option, method = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    prepare_device(torch.device("cuda"))
    model = make_model(pos, option, method, "cuda")
    batch = [None if x is None else x.to("cuda") for x in make_batch(pos, option)]
    eager = count_launches(model, batch)
    counters.clear()
    compiled = count_launches(compile_model(model), batch)
    row = {
        "scheme": pos,
        "option": option,
        "method": method,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "eager launches": eager,
        "compiled launches": compiled,
        "synchronisations": counts.counts()["synchronisations"],
        "lines": dict(counts.synchronising_lines),
        "illegal": counts.counts()["illegal"],
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
