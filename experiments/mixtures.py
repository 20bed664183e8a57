"""On which mixture of long and short documents should an extended model be fine-tuned?

The text is split in two datasets: documents of at least the target length, and others cut into
pieces of the original length L. A model trained on both alike is extended 8 times by YaRN and
fine-tuned, with as many tokens a step, on mixtures (ProLong, 2410.02660, has 60 % of long
documents, Olmo 3, 2512.13961, 34 %). Sequences hold many short documents, and attention stays
inside a document. Losses are in nats per byte in the last quarter of a sequence: on short documents
at L, on long ones at both lengths.
"""

import random
from pathlib import Path

import data
from data.texts import write_dataset

TITLE = "Mixtures of long and short documents"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=64 batch=32 steps=400 warmup=50 tuning=60 scored=32768",
    "try": "L=16 layers=1 heads=2 width=16 batch=32 steps=40 warmup=10 tuning=2 scored=1024",
}
FACTOR = 8  # of the context extension
PERCENT = (0, 34, 66, 100)  # of the sequences that are of long documents


def make_data(b):
    """Write the datasets long and short: documents go to each in turn."""
    dataset = data.Dataset(b.dataset)
    documents = {"long": [], "short": []}
    for name in ("train", "val"):
        split = getattr(dataset, name)
        texts = []
        for tokens in split.tokens:
            edges = data.find_documents(tokens, dataset.separator)
            texts += [bytes(tokens[start:stop].tolist()) for start, stop in edges]
        documents["long"] += [(name, [x]) for x in texts[::2] if len(x) >= FACTOR * b.L]
        n = b.L - 1  # and <bos>
        pieces = [text[i : i + n] for text in texts[1::2] for i in range(0, len(text), n)]
        # Neighbours would be one long text again.
        random.Random(0).shuffle(pieces)
        documents["short"] += [(name, [piece]) for piece in pieces]
    for name, texts in documents.items():
        folder = Path(b.data) / name
        write_dataset(folder, data.ByteTokenizer(), texts, {"source": b.dataset})


def mixture(b, percent):
    """Return the value of --dataset for a percentage of long documents."""
    if percent in (0, 100):
        return f"{b.data}/long" if percent else f"{b.data}/short"
    return f"{b.data}/long:{percent / 100:.2f},{b.data}/short:{1 - percent / 100:.2f}"


def FLAGS(b):
    return (
        f"--n_layer={b.layers} --n_head={b.heads} --n_embd={b.width} --block_size={b.L} "
        f"--batch_size={b.batch} --max_iters={b.steps} --warmup_iters={b.warmup} --eval_iters=1"
    )


def ARMS(b):
    train = f"train --dataset={mixture(b, 50)}"
    arms = {"not-extended": [train]}
    for percent in PERCENT:
        extend = (
            f"extend --method=yarn --factor={FACTOR} --max_iters={b.tuning} --separate_docs=true "
            f"--warmup_iters={min(10, b.tuning // 4)} --max_tokens=1024 "
            f"--dataset={mixture(b, percent)}"
        )
        arms[f"{percent}%"] = [train, extend]
    return arms


def EVALUATE(b):
    flags = f"--protocol=last-quarter --max_tokens={b.scored}"
    return {
        "short": f"{flags} --lengths={b.L} --dataset={b.data}/short",
        "long": f"{flags} --lengths={b.L},{FACTOR * b.L} --dataset={b.data}/long",
    }


TABLES = [
    ("Loss on short documents", "short last-quarter", ["L"]),
    ("Loss on long documents", "long last-quarter", ["L", "8L"]),
]
CLAIMS = """
short last-quarter: 100%@L > 0%@L
short last-quarter: 100%@L > 34%@L
long last-quarter: 100%@8L > 66%@8L
"""
