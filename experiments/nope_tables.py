"""How much does a model lose without positions, by context length and by model size?

Haviv et al. (2022): little, and the less the larger the model. Every scheme is trained alike at
each length with the middle width, and with each width at the longest length. Losses are over whole
sequences of the training length, in nats per token of held-out text. A row of a table holds all
models of its scheme.
"""

TITLE = "Without positions"
BUDGETS = {
    "cpu": "L=32 widths=[64,96,128] layers=4 head=32 tokens=4096 steps=500 scored=65536",
    "gpu": "L=256 widths=[256,512,768] layers=12 head=64 tokens=65536 steps=3000 scored=65536",
    "try": "L=4 widths=[32,64,96] layers=1 head=32 tokens=64 steps=3 scored=2048",
}
SCHEMES = ("nope", "learned", "sinusoidal", "alibi", "rope")
SIZES = ("small", "middle", "large")
# model -> training lengths L, and index of its width
MODELS = {"L": (1, 1), "2L": (2, 1), "small": (4, 0), "middle": (4, 1), "large": (4, 2)}


def ARMS(b):
    return {f"{pos}-{name}": train(b, pos, *MODELS[name]) for pos in SCHEMES for name in MODELS}


def train(b, pos, factor, size):
    width = b.widths[size]
    return (
        f"train --pos={pos} --n_layer={b.layers} --n_head={width // b.head} --n_embd={width} "
        f"--block_size={factor * b.L} --batch_size={b.tokens // (factor * b.L)} "
        f"--max_iters={b.steps} --warmup_iters={min(100, b.steps // 5)} "
        f"--learning_rate={3e-3 if width < 512 else 1e-3} --eval_iters=2"
    )


def EVALUATE(b):
    return f"--lengths={b.L},{2 * b.L},{4 * b.L} --protocol=chunked --max_tokens={b.scored}"


MEASURES = dict.fromkeys(("by length", *SIZES), "nats per token")
TABLES = [
    ("By training length, with the middle width", "by length", ["L", "2L", "4L"]),
    ("By width", SIZES, ["4L"]),
]
CLAIMS = """
by length: alibi-middle@4L < sinusoidal-middle@4L
by length: sinusoidal-middle@4L < learned-middle@4L
by length: learned-middle@4L < nope-middle@4L
"""


def derive(board):
    """Put the loss of each model, at its own length, into the row of its scheme's middle one."""
    columns = {"L": ["by length"], "2L": ["by length"], "middle": ["by length", "middle"]}
    for pos in SCHEMES:
        for name, (factor, _) in MODELS.items():
            length = factor * board.b.L
            for seed, loss in board.of(f"{pos}-{name}", "chunked", length).items():
                for measure in columns.get(name, [name]):
                    yield f"{pos}-middle", seed, measure, length, loss
