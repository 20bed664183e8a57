"""When should the context grow: never, at the start, in one late jump, or in two?

All runs take the same number of steps, and of tokens a step, and start at L tokens, target-length
at 16L. three-lengths: 4L from 90 % of the steps and 16L from 95 %, with one optimizer and schedule;
one-jump: 16L from 90 %, so as many steps beyond L. late-three-lengths and one-late-jump: from 95 %
(16L from 97.5 %) with half as many. Losses are in nats per token in the last quarter of a sequence;
seconds are of the processor, for all commands of a row.
"""

TITLE = "When to extend"
FINDING = "One jump is slightly better than three lengths; half as many long steps cost more"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=64 tokens=2048 steps=400 warmup=50 scored=32768",
    "try": "L=16 layers=1 heads=2 width=16 tokens=512 steps=40 warmup=10 scored=1024",
}


def FLAGS(b):
    return (
        f"--n_layer={b.layers} --n_head={b.heads} --n_embd={b.width} --max_iters={b.steps} "
        f"--warmup_iters={b.warmup} --eval_iters=1"
    )


def train(b, times, flags=""):
    """Return the command that trains at some lengths L, with as many tokens a step at each."""
    batch_size = max(1, b.tokens // (times * b.L))
    return f"train --block_size={times * b.L} --batch_size={batch_size} {flags}"


def ARMS(b):
    early, late, last = (f"--stop_at={round(part * b.steps)}" for part in (0.9, 0.95, 0.975))
    by_4 = "extend --factor=4 --keep_optimizer=true --max_tokens=1024"
    by_16 = "extend --factor=16 --keep_optimizer=true --max_tokens=1024"
    return {
        "original-length": [train(b, 1)],
        "three-lengths": [train(b, 1, early), f"{by_4} {late}", by_4],
        "one-jump": [train(b, 1, early), by_16],
        "late-three-lengths": [train(b, 1, late), f"{by_4} {last}", by_4],
        "one-late-jump": [train(b, 1, late), by_16],
        "target-length": [train(b, 16)],
    }


def EVALUATE(b):
    return f"--lengths={b.L},{4 * b.L},{16 * b.L} --protocol=last-quarter --max_tokens={b.scored}"


TABLES = [
    ("Loss by context length", "last-quarter", ["L", "4L", "16L"]),
    ("Seconds", "seconds", ["0"]),
]
CLAIMS = """
# As many steps beyond L
last-quarter: one-jump@16L < three-lengths@16L
last-quarter: one-late-jump@16L < late-three-lengths@16L
last-quarter: one-jump@L > three-lengths@L
# Twice as many
last-quarter: one-late-jump@16L > one-jump@16L
# At the target from the start
last-quarter: target-length@16L > three-lengths@16L
last-quarter: target-length@L > three-lengths@L
"""
