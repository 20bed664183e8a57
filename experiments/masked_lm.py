"""Do masked language models need positions?

A causal model without positions can count the tokens it sees. Without the causal mask its input is
a bag of tokens, and every masked token of a sequence gets the same prediction (Haviv et al. 2022).
Models predict the 15 % of the tokens that are replaced by a mask token, chosen again for every
sequence; only these are scored, in nats, on held-out text. Frequencies: the loss if each token is
predicted as often as it occurs in training. Models compute in float32. The paper's perplexity, of
subwords: nope 147.18, learned 4.06, sinusoidal 4.07, alibi 4.00.

Trap: schemes that act by distance see |i - j|, so that left and right look alike to them, apart
from `<bos>`, which starts each sequence of bytes and is never masked.
"""

import math
from functools import partial
from unittest import mock

import numpy as np
import torch

import data
import kernels
from experiments.tasks import make_model, take_steps
from nanolong.evaluation.loss import find_sequences, read_sequences
from nanolong.optim import get_lr, make_optimizers
from train import TrainConfig

TITLE = "Masked language models"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 batch=64 steps=1500 warmup=50 rate=3e-3 scored=65536",
    "gpu": "L=256 layers=8 heads=8 width=512 batch=64 steps=8000 warmup=400 rate=1e-3 scored=65536",
    "try": "L=16 layers=2 heads=2 width=32 batch=8 steps=20 warmup=2 rate=3e-3 scored=65536",
}
ARMS = {pos: [] for pos in ("nope", "learned", "sinusoidal", "alibi")}
MEASURES = ("loss", "perplexity", "frequencies")
TABLES = [("Loss and perplexity of a masked token", MEASURES, ["0"])]
CLAIMS = "\n".join(f"loss: nope > {pos} + ln 2" for pos in ("learned", "sinusoidal", "alibi"))
# Within this context every token attends to all others: the schemes call kernels.attention.
bidirectional = mock.patch.object(kernels, "attention", partial(kernels.attention, causal=False))


def mask_tokens(tokens, dataset, seed):
    """Replace 15 % of tokens (B, T) by an id after the vocabulary. Returns inputs and targets."""
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    if dataset.bos is not None:
        masked &= tokens != dataset.bos
    return tokens.masked_fill(masked, dataset.vocab_size), tokens.masked_fill(~masked, -1)


@bidirectional
def measure(arm):
    b = arm.b
    dataset = data.open_dataset(arm.dataset)

    def training_batch(step):
        x, *_ = dataset.batch(step * b.batch, b.batch, b.L, arm.seed)
        return mask_tokens(torch.from_numpy(x), dataset, (arm.seed << 40) + step)

    model = make_model(arm.name, arm, b.L, dataset.vocab_size + 1)
    cfg = TrainConfig(max_iters=b.steps, warmup_iters=b.warmup, learning_rate=b.rate)
    rates = [get_lr(cfg, step) for step in range(b.steps)]
    take_steps(model, training_batch, make_optimizers(model, cfg), rates, arm.device)
    counts = sum(np.bincount(t, minlength=dataset.vocab_size) for t in dataset.train.tokens) + 1
    losses_by_token = torch.from_numpy(-np.log(counts / counts.sum()))
    loss = frequencies = n_tokens = 0
    sequences = find_sequences(dataset.val, b.L, b.scored)
    for start in range(0, len(sequences), 64):
        tokens, _ = read_sequences(dataset.val, b.L, sequences[start : start + 64])
        x, y = mask_tokens(tokens, dataset, start)
        with torch.no_grad():
            loss += model(x.to(arm.device), y.to(arm.device), reduction="sum").item()
        frequencies += losses_by_token[y[y >= 0]].sum().item()
        n_tokens += int((y >= 0).sum())
    loss /= n_tokens
    return {"loss": loss, "perplexity": math.exp(loss), "frequencies": frequencies / n_tokens}
