"""Does a learned sink for each head change the loss, and where attention goes?

A sink is a score for each head that takes part in the softmax and has no value (gpt-oss, Granite),
so that a head can attend to nothing. Without one, heads are known to attend to the first token in
its place (Xiao et al. 2024). The models are leaderboard.py's, with which runs are shared.
`first token`, `sink`: the mean fraction of attention that goes there, over layers, heads and the
later half of the queries.
"""

import torch

import data
from experiments.leaderboard import BUDGETS, FLAGS  # noqa: F401
from nanolong.evaluation.attention_maps import attention_maps
from nanolong.evaluation.loss import find_sequences, read_sequences

TITLE = "Learned sinks"
ARMS = {"without": "train --pos=rope", "with-a-sink": "train --pos=rope --sink_scores=true"}


def EVALUATE(b):
    return f"--lengths={b.L},{4 * b.L} --protocol=chunked --max_tokens=65536"


TABLES = [
    ("Loss over whole sequences", "chunked", ["L", "4L"]),
    ("Fraction of attention", ["first token", "sink"], ["0"]),
]
MEASURES = ("first token", "sink")
CLAIMS = """
chunked: with-a-sink@L < without@L
chunked: with-a-sink@4L < without@4L
first token: with-a-sink < without
sink: with-a-sink > 0
"""


def measure(arm):
    text, length = data.open_dataset(arm.dataset).val, arm.b.L
    tokens, _ = read_sequences(text, length, find_sequences(text, length, 32 * length))
    maps = attention_maps(arm.load(), tokens)
    p = torch.stack([layer[:, :, length // 2 :] for layer in maps])  # (layers, B, H, T / 2, T)
    # What is missing in a row of probabilities went to the sink.
    return {"first token": p[..., 0].mean().item(), "sink": 1 - p.sum(-1).mean().item()}
