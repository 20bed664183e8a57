"""Which choices of architecture and training make a model hard to extend, and do they add up?

OlmPool, a set of extended models, is said to show that QK-norm, grouped queries, window layers and
short pretraining each cost little of the long-context quality, that three together cost half of it,
and that perplexity shows none of it. Its norms mostly move with QK-norm; here that is a factor too.

The design is a half fraction, 2^(5-1), with I = QNGWS: of all 32 models the 16 with one, three or
five factors. An effect is confounded with the interaction of the four other factors, that of two
with that of three. Trap: if the plain model, the 17th, finds hardly any value, nothing is judged.

Models are trained on text and on prompts that hide a value, extended by YaRN and fine-tuned. Q:
QK-norm, N: norms after attention and MLP, G: one key/value head, W: a window of L / 4 in three of
four layers (YaRN extends the fourth), S: half of the steps. `gain`: how much the loss of the answer
grows without the value. Fractions of the plain model's accuracy: `change`, `excess` over the
changes by single factors, `effect` (a difference of means).
"""

import statistics
from itertools import combinations

from experiments.board import format_table, plot_tables

TITLE = "Which choices make a model hard to extend"
BUDGETS = {
    "cpu": "L=64 factor=4 heads=4 width=64 batch=32 steps=1000 tuning=60 scored=32768 prompts=128",
    "try": "L=48 factor=4 heads=2 width=16 batch=4 steps=2 tuning=1 scored=512 prompts=2",
}
STAGES = ("zero-shot", "fine-tuned")
# n -> all combinations of n factors, each named by its letters, such as QN
NAMES = {n: ["".join(letters) for letters in combinations("QNGWS", n)] for n in (1, 2, 3, 5)}
FRACTION = [*NAMES[1], *NAMES[3], *NAMES[5]]
MODELS = ["plain", *FRACTION]
EFFECTS = [*NAMES[1], *NAMES[2]]


def FLAGS(b):
    return (
        f"--n_layer=4 --n_head={b.heads} --n_embd={b.width} --block_size={b.L} --eval_iters=1 "
        f"--batch_size={b.batch} --max_iters={b.steps} --warmup_iters={min(50, b.steps // 4)} "
        "--learning_rate=3e-3 --tasks=niah:0.75"
    )


def make_stages(b, name, train, extension=""):
    """Return the arms of a model; extend.py takes over its tasks, and as many tokens a step."""
    extend = f"extend --factor={b.factor} {extension} --max_tokens=1024"
    tune = f"--max_iters={b.tuning} --warmup_iters={b.tuning // 4} --separate_docs=false"
    return {
        name: [train],
        f"{name}/zero-shot": [train, f"{extend} --max_iters=0"],
        f"{name}/fine-tuned": [train, f"{extend} {tune}"],
    }


def ARMS(b):
    flags = {
        "Q": "--qk_norm=head",
        "N": "--norm_position=post",
        "G": "--n_kv_head=1",
        "W": f"--layer_pattern=WWWF --window={b.L // 4}",
        "S": f"--max_iters={b.steps // 2}",
    }
    arms = {}
    for name in MODELS:
        own = [flags[letter] for letter in flags if letter in name]
        arms |= make_stages(b, name, " ".join(["train", *own]))
    return arms


def EVALUATE(b):
    lengths = ",".join(str(times * b.L) for times in (1, 2, 4, 8) if times <= b.factor)
    return [
        f"--lengths={lengths} --protocol=last-quarter --max_tokens={b.scored}",
        f"--lengths={lengths} --task=ruler --ruler=niah --trials={b.prompts}",
    ]


TABLES = [
    ("Loss and accuracy", ["last-quarter", "niah accuracy"], ["L", "2L", "4L"]),
    ("At the target length", ["niah nats", "niah gain", "change", "excess"], ["4L"]),
]
MEASURES = ("change", "excess", "effect", "effect on loss", "rank correlation")
CLAIMS_OF_A_STAGE = """
# {stage}
change: Q/{stage}@4L > -0.15
change: N/{stage}@4L > -0.15
change: G/{stage}@4L > -0.15
change: W/{stage}@4L > -0.15
change: S/{stage}@4L > -0.15
change: QGW/{stage}@4L < -0.3
change: three/{stage}@4L < -0.3
excess: three/{stage}@4L < 0
effect: Q/{stage}@4L < 0
effect: N/{stage}@4L < 0
last-quarter: QGW/{stage}@4L < plain/{stage}@4L + 0.05
rank correlation: all/{stage}@4L > -0.5
"""
CLAIMS = "".join(CLAIMS_OF_A_STAGE.format(stage=stage) for stage in STAGES)


def effect(values, factors):
    """Return the effect of a factor, or the interaction of several: a difference of two means."""
    return sum((-1) ** len(set(factors) - set(name)) * values[name] for name in FRACTION) / 8


def rank_correlation(*rows):
    """Return Spearman's rank correlation of two lists, 0 of a constant one; equals share a rank."""
    if any(len(set(row)) == 1 for row in rows):
        return 0.0
    ranks = [[sorted(row).index(number) + row.count(number) / 2 for number in row] for row in rows]
    return statistics.correlation(*ranks)


def analyse(accuracy, loss):
    """Return measure -> arm -> number. accuracy, loss: model -> number, of a seed and a stage."""
    change = {name: accuracy[name] - accuracy["plain"] for name in FRACTION}
    excess = {name: change[name] - sum(change[factor] for factor in name) for name in NAMES[3]}
    change["three"] = statistics.fmean(change[name] for name in NAMES[3])
    excess["three"] = statistics.fmean(excess.values())
    return {
        "change": change,
        "excess": excess,
        "effect": {factors: effect(accuracy, factors) for factors in EFFECTS},
        "effect on loss": {factors: effect(loss, factors) for factors in EFFECTS},
        "rank correlation": {"all": rank_correlation(list(loss.values()), list(accuracy.values()))},
    }


def derive(board):
    """Yield what analyse() returns of the seeds in which all models were measured."""
    for stage in STAGES:
        loss = {name: board.of(f"{name}/{stage}", "last-quarter", "4L") for name in MODELS}
        accuracy = {name: board.of(f"{name}/{stage}", "niah accuracy", "4L") for name in MODELS}
        seeds = set.intersection(*map(set, [*loss.values(), *accuracy.values()]))
        plain = statistics.fmean([accuracy["plain"][seed] for seed in seeds] or [0])
        for seed in seeds if plain >= 0.1 else ():
            fractions = {name: accuracy[name][seed] / plain for name in MODELS}
            losses = {name: loss[name][seed] for name in MODELS}
            for measure, numbers in analyse(fractions, losses).items():
                for name, number in numbers.items():
                    yield f"{name}/{stage}", seed, measure, 4 * board.b.L, number


def notes(board):
    names = [f"{factors}/{stage}" for stage in STAGES for factors in EFFECTS]
    return ["## Effects", "", *format_table(board, names, ["effect", "effect on loss"], ["4L"])]


def plot(board, file):
    """Plot the loss of zero-shot arms, for the curves of all are too many."""
    board.arms = [name for name in board.arms if name.endswith("/zero-shot")]
    plot_tables([("Loss", "last-quarter", ["L", "2L", "4L", "8L"])], board, file)
