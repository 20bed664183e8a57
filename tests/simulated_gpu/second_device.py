"""Use a model on cuda:1 while cuda:0 is the current device: a line of JSON."""

import json
import sys

import counts
import torch
from cases import make_batch, make_model


def run(pos, device):
    model = make_model(pos, "plain", "none", device)
    batch = [None if x is None else x.to(device) for x in make_batch(pos, "plain")]
    loss = model(*batch)
    loss.backward()
    grad = model.blocks[0].attention.q.weight.grad.norm().item()
    model.eval()
    tokens = [x.tolist() for x in model.generate(batch[0][:, :20], 8, temperature=0)]
    return {"loss": loss.item(), "grad": grad, "tokens": tokens}


expected = run(sys.argv[1], "cpu")
counts.reset()
found = run(sys.argv[1], "cuda:1")
row = {"expected": expected, "found": found, "counts": counts.counts()}
print(json.dumps({**row, "current device": torch.cuda.current_device()}))
