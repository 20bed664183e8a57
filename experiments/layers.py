"""Which layers of a hybrid should be extended, and which hybrids extend well?

Models are trained on text and on prompts that hide a value, extended by YaRN and fine-tuned. A
letter for each layer: F full attention, W a window of L / 4, N full attention without positions;
none, full and all: the layers that YaRN changes. `gain`: how much the loss of the answer grows
without the value; judged if both models had one of a nat at L.

The claims are after Olmo 3, p-RoPE and SWAN. logn multiplies queries by 1 within the training
length, so models with it have the weights of those without; as extend.py cannot switch it on, they
are trained again. Trap: a gain tells of the extension only if a model found values before it.
"""

import itertools
import statistics
from pathlib import Path

from data.prepare import prepare_tasks
from experiments.board import plot_tables

TITLE = "Which layers of a hybrid should be extended"
BUDGETS = {
    "cpu": "L=64 factor=8 heads=3 width=96 batch=32 steps=450 tuning=60 scored=16384 prompts=64",
    "try": "L=48 factor=8 heads=2 width=16 batch=8 steps=2 tuning=1 scored=512 prompts=2",
}


def FLAGS(b):
    return (
        f"--n_layer=4 --n_head={b.heads} --n_embd={b.width} --block_size={b.L} --eval_iters=1 "
        f"--batch_size={b.batch} --max_iters={b.steps} --warmup_iters={min(50, b.steps // 4)} "
        f"--learning_rate=3e-3 --dataset={mixture(b, 'short')}"
    )


def mixture(b, name):
    """Return the value of --dataset for text and a dataset of make_data()."""
    return f"{b.dataset}:0.25,{b.data}/{name}:0.75"


def make_data(b):
    """Write documents that hide a value, as many as a run has sequences of them."""
    for name, length, steps in (("short", b.L, b.steps), ("long", b.factor * b.L, b.tuning)):
        folder = Path(b.data) / name
        prepare_tasks(folder, ["niah:1"], length=length, documents=steps * b.batch)


def make_stages(b, name, train, extension=""):
    """Return the arms of a model; extend.py takes as many tokens a step."""
    extend = f"extend --factor={b.factor} {extension} --max_tokens=1024"
    tune = f"--max_iters={b.tuning} --warmup_iters={b.tuning // 4} --separate_docs=false"
    tune += f" --dataset={mixture(b, 'long')}"
    return {
        name: [train],
        f"{name}/zero-shot": [train, f"{extend} --max_iters=0"],
        f"{name}/fine-tuned": [train, f"{extend} {tune}"],
    }


def ARMS(b):
    window = f"--window={b.L // 4} --layer_pattern="
    # flags of train.py and of extend.py
    models = {
        "FFFF": ("", "--layers=all"),
        "FFFF-logn": ("--score_scale=logn", "--layers=all"),
        "FFFF-ssmax": ("--entry=examples/schemes/ssmax.py", "--layers=all"),
        "p-0.25": ("--p_rope=0.25", "--layers=all"),
        "p-0.5": ("--p_rope=0.5", "--layers=all"),
        "FFFN": ("--layer_pattern=FFFN", "--layers=all"),
        "WWWF-full": (f"{window}WWWF", "--layers=full"),
        "WWWF-all": (f"{window}WWWF", "--layers=all"),
        "WWWN-none": (f"{window}WWWN", "--method=none --layers=all"),
        "WWWN-all": (f"{window}WWWN", "--layers=all"),
        "WWWN-logn-none": (f"{window}WWWN --score_scale=logn", "--method=none --layers=all"),
        "WWWN-logn-all": (f"{window}WWWN --score_scale=logn", "--layers=all"),
    }
    arms = {}
    for name, (flags, extension) in models.items():
        arms |= make_stages(b, name, f"train {flags}", extension)
    return arms


def EVALUATE(b):
    lengths = ",".join(str(times * b.L) for times in (1, 2, 4, 8) if times <= b.factor)
    return [
        f"--lengths={lengths} --protocol=last-quarter --max_tokens={b.scored} "
        f"--dataset={b.dataset}",
        f"--lengths={lengths} --task=ruler --ruler=niah --trials={b.prompts}",
    ]


TABLES = [("Measured", ["last-quarter", "niah nats", "niah gain"], ["L", "2L", "4L", "8L"])]
MEASURES = ("gain",)


def derive(board):
    """Yield the gains of models that find values before they are extended."""
    for arm in board.arms:
        before = board.of(arm.partition("/")[0], "niah gain", "L").values()
        if before and statistics.fmean(before) >= 1:
            for seed, gain in board.of(arm, "niah gain", "8L").items():
                yield arm, seed, "gain", 8 * board.b.L, gain


def plot(board, file):
    """Plot the loss of zero-shot arms, for the curves of all are too many."""
    board.arms = [name for name in board.arms if name.endswith("/zero-shot")]
    plot_tables([("Loss", "last-quarter", ["L", "2L", "4L", "8L"])], board, file)


STAGES = ("", "/zero-shot", "/fine-tuned")
LOSS = "last-quarter: {}@8L < {}@8L"
GAIN = "gain: {}@8L > {}@8L"


def compare(first, second, stages=STAGES, measures=(LOSS, GAIN)):
    """Return the claims that the first model is the better one, as lines."""
    pairs = itertools.product(measures, stages)
    return "\n".join(measure.format(first + stage, second + stage) for measure, stage in pairs)


CLAIMS = f"""
# Full-attention layers only (Olmo 3, 2512.13961, section 3.6.4)
{compare("WWWF-full", "WWWF-all", STAGES[1:])}
# p-RoPE: the slowest pairs are those that break (Barbero et al. 2024)
{compare("p-0.25", "FFFF", measures=[LOSS])}
{compare("p-0.5", "FFFF", measures=[LOSS])}
# Score scale on layers without positions (SWAN, 2504.08719), or on all
{compare("WWWN-logn-none", "WWWN-none", ("", "/fine-tuned"))}
{compare("WWWN-logn-all", "WWWN-all", STAGES[1:])}
{compare("FFFF-logn", "FFFF")}
{compare("FFFF-ssmax", "FFFF")}
# Hybrids extend better than full attention with RoPE
{compare("WWWF-full", "FFFF")}
{compare("FFFN", "FFFF")}
{compare("WWWN-none", "FFFF")}
{compare("WWWN-logn-none", "FFFF")}
"""
