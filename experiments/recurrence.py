"""Does a memory of the segment before lengthen the context (Transformer-XL, Dai et al. 2019)?

A text is computed in segments of L tokens. Each layer attends to its segment and to a prefix of
detached hidden states: its own inputs at the tokens before. These depend on a memory before them,
so the effective context grows with every layer; gradients end at them. Position 0 is the
oldest token in memory, so the scheme must be relative.

POS/none is trained without a memory, POS/memory with one of a segment, on the same streams of text:
each row of a batch goes on where it ended in the batch before. Both are evaluated on the same
tokens, by the length of segment and memory together: L is without a memory, 2L with one of a
segment; 3L and 5L are longer than in training. Losses are in nats per token; `early - late` is the
loss in the first quarter of a segment less that in the last. The queries of the memory are
computed, too, and dropped, which is simple but not fast.
"""

import numpy as np
import torch
import torch.nn.functional as F

import data
from experiments.tasks import make_model, update_weights
from nanolong.evaluation.loss import evaluation_mode
from nanolong.optim import get_lr, make_optimizers
from train import TrainConfig

TITLE = "Segment-level recurrence"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 streams=32 steps=260 warmup=20 skipped=16 scored=8",
    "try": "L=16 layers=2 heads=2 width=32 streams=8 steps=10 warmup=2 skipped=8 scored=4",
}
SCHEMES = ("xl", "alibi", "rope")
ARMS = {f"{pos}/{kind}": [] for pos in SCHEMES for kind in ("none", "memory")}
MEASURES = dict.fromkeys(("loss", "early - late"), "nats per token")
TABLES = [
    ("Loss", "loss", ["L", "2L", "3L", "5L"]),
    ("Loss early in a segment, less that late", "early - late", ["L", "2L"]),
]
# A memory lowers the loss, and most so early in a segment; does a longer one than in training?
CLAIMS = "\n".join(
    [f"loss: {pos}/memory@2L < {pos}/none@L" for pos in SCHEMES]
    + [f"early - late: {pos}/memory@2L < {pos}/none@L" for pos in SCHEMES]
    + [f"loss: {pos}/memory@{n}L < {pos}/memory@2L" for pos in SCHEMES for n in (3, 5)]
)


def forward(model, tokens, memory, capacity):
    """Compute the logits (B, T, V) of a segment (B, T), and the memory for the next one.

    memory: of each layer its inputs (B, M, C) at the tokens before; None at the start of a text.
    capacity: tokens that the next memory holds.
    """
    T = tokens.shape[1]
    x = model.embed(tokens)
    memory = memory or [x[:, :0]] * len(model.blocks)
    kept = []
    for block, before in zip(model.blocks, memory, strict=True):
        x = torch.cat((before, x), 1)
        n = x.shape[1]
        kept.append(x[:, max(0, n - capacity) :].detach())
        x = block(x, model.scheme, model.make_context(n))[:, -T:]
    return model.head(model.norm(x)), kept


def stream_losses(model, split, capacity, b, steps):
    """Yield the losses (B, L) of a segment of each stream, in nats."""
    text = max(split.tokens, key=len)
    shape = (b.streams, (len(text) - 1) // (b.streams * b.L), b.L)
    inputs, targets = (text[i : i + np.prod(shape)].reshape(shape) for i in (0, 1))
    for step in range(steps):
        # segment `segment` of each stream, and its next tokens
        segment = step % shape[1]
        if segment == 0:  # the streams start, perhaps again
            memory = None
        both = np.stack((inputs[:, segment], targets[:, segment])).astype(np.int64)
        x, y = torch.from_numpy(both).to(model.embed.weight.device)
        logits, memory = forward(model, x, memory, capacity)
        yield F.cross_entropy(logits.mT, y, reduction="none")


def train(arm, pos, capacity, dataset):
    b = arm.b
    model = make_model(pos, arm, b.L + capacity, dataset.vocab_size)
    settings = TrainConfig(learning_rate=3e-3, max_iters=b.steps, warmup_iters=b.warmup)
    optimizers = make_optimizers(model, settings)
    # one step for each segment, in the order of the text
    segments = stream_losses(model, dataset.train, capacity, b, b.steps)
    for step, losses in enumerate(segments):
        losses.mean().backward()
        update_weights(model, optimizers, get_lr(settings, step))
    return model


def measure(arm):
    """Train a model, and evaluate it with memories of 0, 1, 2 and 4 segments."""
    b = arm.b
    pos, _, kind = arm.name.partition("/")
    dataset = data.open_dataset(arm.dataset)
    model = train(arm, pos, b.L if kind == "memory" else 0, dataset)
    found = {}
    for capacity in (0, b.L, 2 * b.L, 4 * b.L):
        steps = b.skipped + b.scored  # the first segments fill the memory, and are not scored
        with evaluation_mode(model, torch.float32):
            losses = list(stream_losses(model, dataset.val, capacity, b, steps))
        losses = torch.cat(losses[b.skipped :]).double()
        early, late = losses[:, : b.L // 4].mean(), losses[:, -b.L // 4 :].mean()
        found["loss", b.L + capacity] = losses.mean().item()
        found["early - late", b.L + capacity] = (early - late).item()
    return found
