"""Does RoPE work in linear attention, and why only in the numerator (RoFormer, section 3.3)?

    o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m)^T phi(k_n)

with phi = elu + 1 (Su et al. 2021). Softmax and linear attention are trained without positions and
with RoPE. Their losses are compared with a model that knows only how often each token occurs, and
are in nats per token of held-out text. With RoPE in the denominator too, sums of products can have
any sign and the quotient any size: commit b046c6d trains that model, as linear-rope-both.
"""

import numpy as np

import data
from experiments.leaderboard import FLAGS  # noqa: F401

TITLE = "RoPE in linear attention"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 batch=64 steps=700 warmup=50 rate=3e-3 scored=65536",
    "try": "L=16 layers=2 heads=2 width=32 batch=8 steps=20 warmup=2 rate=3e-3 scored=4096",
}
ARMS = {
    "softmax-nope": "train --pos=nope",
    "softmax-rope": "train --pos=rope",
    "linear-nope": "train --entry=examples/schemes/linear_attention.py --rope_fraction=0",
    "linear-rope": "train --entry=examples/schemes/linear_attention.py",
}


def EVALUATE(b):
    lengths = f"{b.L},{2 * b.L},{4 * b.L},{8 * b.L}"
    return f"--lengths={lengths} --protocol=chunked,last-quarter --max_tokens={b.scored}"


MEASURES = ("token frequencies", "above token frequencies")
TABLES = [
    ("Loss in the last quarter of the sequence", "last-quarter", ["L", "2L", "4L", "8L"]),
    ("Loss over whole sequences", "chunked", ["L", "2L", "4L", "8L"]),
    ("Loss over whole sequences, less the loss of token frequencies", MEASURES[1], ["L"]),
]
CLAIMS = """
chunked: linear-rope@L < linear-nope@L
chunked: softmax-rope@L < linear-rope@L
above token frequencies: linear-rope@L < 0
"""


def measure(arm):
    """Measure the loss on the validation text of how often each token occurs in training."""
    dataset = data.open_dataset(arm.dataset)
    training, validation = (
        sum(np.bincount(tokens, minlength=dataset.vocab_size) for tokens in split.tokens)
        for split in (dataset.train, dataset.val)
    )
    losses = -np.log((training + 1) / (training + 1).sum())
    return {"token frequencies": float(losses @ validation / validation.sum())}


def derive(board):
    """Subtract the loss of token frequencies from a model's loss."""
    for arm in board.arms:
        frequencies = board.of(arm, "token frequencies")
        for seed, loss in board.of(arm, "chunked", "L").items():
            yield arm, seed, "above token frequencies", board.b.L, loss - frequencies[seed]
