"""Which models, extended or of another scheme, know the order of what they have read?

The models of needles.py, trained on other documents: a key has three values, and the question asks
for the first, second or third of them (nth), or for the last (last): only the order answers that.
A guess among the three values is right in 0.33 and costs 1.10 nats. Prompts have up to 4L tokens,
and are the same for all models and seeds.
"""

from experiments.board import plot_tables
from experiments.needles import ARMS, FLAGS, NAMES, SHOWN, write_documents  # noqa: F401

TITLE = "The order of values by length"
# three times the steps of needles.py, after which RoPE has learned only `last`
BUDGETS = {
    "cpu": "L=96 layers=4 heads=4 width=96 batch=42 steps=1500 warmup=50 rate=3e-3 trials=64",
    "try": "L=64 layers=2 heads=2 width=32 batch=5 steps=6 warmup=1 rate=3e-3 trials=4",
}


def make_data(b):
    write_documents(b, "nth", "last")


def EVALUATE(b):
    lengths = f"--lengths={b.L},{2 * b.L},{4 * b.L}"
    return f"--task=ruler --ruler=nth,last {lengths} --trials={b.trials}"


TABLES = [
    ("The n-th value: fraction right", "nth accuracy", ["L", "2L", "4L"]),
    ("The last value: fraction right", "last accuracy", ["L", "2L", "4L"]),
]


def plot(board, file):
    title = "No method keeps the order of values at four times the training length"
    shown = {name: SHOWN[name] for name in SHOWN if name in NAMES}
    plot_tables(TABLES, board, file, title, shown)


CLAIMS = """
# At the training length: more than a guess among the values
nth accuracy: none@L > 0.333
nth accuracy: nope@L > 0.333
last accuracy: none@L > 0.333
last accuracy: nope@L > 0.333
# MrRoPE (2601.22181) and Jet-Long (2607.07740), which claim more than these on RULER's tasks
nth nats: mrrope-pro@4L < yarn@4L
last nats: mrrope-pro@4L < yarn@4L
nth nats: jet-long@4L < yarn@4L
last nats: jet-long@4L < yarn@4L
nth nats: jet-long@4L < self-extend@4L
last nats: jet-long@4L < self-extend@4L
# Forget gates weigh what is new (Lin et al. 2025)
last nats: fox-rope@4L < none@4L
"""
