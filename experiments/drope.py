"""What does it take to drop RoPE after pretraining (DroPE), and how long is the context then?

A model is trained with RoPE at L tokens, then without it at the same length for some percent of
the steps (extend.py --method=drope), and evaluated at up to 8 times that length. Losses are in nats
per token in the last quarter of a sequence.
"""

from experiments.reproduce import EVALUATE, TABLES  # noqa: F401
from experiments.stages import BUDGETS, FLAGS, train  # noqa: F401

TITLE = "DroPE"


def ARMS(b):
    arms = {
        "not-extended": [train(b, 1)],
        "yarn-zero-shot": [train(b, 1), "extend --method=yarn --factor=8 --max_iters=0"],
    }
    for percent in (0.5, 2, 8):
        steps = max(1, round(percent / 100 * b.steps))
        warmup = min(10, steps // 4)
        command = f"extend --method=drope --factor=8 --max_iters={steps} --warmup_iters={warmup}"
        command += " --learning_rate=3e-3 --separate_docs=false --max_tokens=1024"
        arms[f"drope-{percent}%"] = [train(b, 1), command]
    return arms


CLAIMS = """
last-quarter: yarn-zero-shot@8L > drope-2%@8L
last-quarter: drope-0.5%@8L > drope-8%@8L
last-quarter: drope-8%@L > not-extended@L
"""
