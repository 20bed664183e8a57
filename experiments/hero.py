"""Does a low loss mean that a model uses the longer text? Four ways to run one RoPE model.

Models are trained on sequences of L bytes: half are Python source, half are documents that hide a
passkey. They are then used on up to four times as long text, without fine-tuning: unchanged, cut
to a window of L bytes, with YaRN, and with Self-Extend. Loss is in the last quarter of Python text.
Passkeys are hidden at five places, from the start (0) to the end (1); a guess finds 0.001.
"""

from experiments.leaderboard import FLAGS  # noqa: F401
from experiments.needles import DEPTHS, make_data  # noqa: F401
from experiments.reproduce import extend

TITLE = "Loss and passkeys of one training"
BUDGETS = {
    "cpu": "L=96 layers=4 heads=4 width=96 batch=42 steps=1000 warmup=50 rate=3e-3 trials=64 "
    "scored=65536",
    "try": "L=64 layers=2 heads=2 width=32 batch=5 steps=6 warmup=1 rate=3e-3 trials=4 scored=1024",
}
NAMES = ("none", "window", "yarn", "self-extend")


def ARMS(b):
    dataset = f"--dataset={b.dataset}:0.5,{b.data}/documents:0.5"
    return {name: [f"train --pos=rope {dataset}", extend(b, name, 0)] for name in NAMES}


def EVALUATE(b):
    lengths = f"--lengths={b.L},{2 * b.L},{4 * b.L}"
    loss = f"--dataset={b.dataset} --protocol=last-quarter {lengths} --max_tokens={b.scored}"
    return [loss, f"--task=needle {lengths} --trials={b.trials}"]


TABLES = [
    ("Loss of Python source", "last-quarter", ["L", "2L", "4L"]),
    ("Passkeys found, mean over the places", "needle", ["L", "2L", "4L"]),
    ("Passkeys found by place", DEPTHS, ["4L"]),
]
CLAIMS = """
last-quarter: window@4L < yarn@4L
last-quarter: window@4L < none@4L - 1
needle 0: window@4L < 0.1
needle 0: yarn@4L > 0.5
needle 0: self-extend@4L > 0.5
"""
