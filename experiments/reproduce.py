"""What does each method of context extension buy, without fine-tuning and after a few steps of it?

A RoPE model is extended from L to 4L by every method of extend.py and fine-tuned there (drope and
yarn-pose: at L). Each step has as many tokens as in training. A model, native, is trained at 4L for
all these steps together. Losses are in nats per token in the last quarter of a sequence:

    gap closed = (none+0 - method) / (none+0 - native)

0 is as bad as the original model, 1 as good as native. METHOD+STEPS is a method after some steps of
fine-tuning; each number of steps is a run of its own, with extend.py's schedule for it. window is
the original model cut to a window of L. learned-pi has interpolated embeddings, gate-yarn is
trained with an output gate for each head, and mrrope-pro and mrrope-uni are YaRN with MrRoPE's
ramps. Names that end in -16 are extended 16 times.

Trap: a low loss does not say that distant text is read. A window closes the whole gap here, and
needles.py shows that it finds nothing beyond it.
"""

from experiments.board import count_tokens, plot_tables
from experiments.leaderboard import FLAGS  # noqa: F401  so that both use the same runs
from nanolong.evaluation.tables import Table
from rope_scaling import ATTENTION, METHODS

TITLE = "What context extension buys"
# tuning: steps of fine-tuning; scored: tokens of validation text
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 batch=64 steps=700 warmup=50 rate=3e-3 "
    "tuning=[0,10,40,80] scored=32768",
    "gpu": "L=512 layers=8 heads=8 width=512 batch=64 steps=5000 warmup=50 rate=3e-3 "
    "tuning=[0,10,40,80,500] scored=1048576",
    "try": "L=32 layers=2 heads=2 width=32 batch=8 steps=12 warmup=3 rate=3e-3 "
    "tuning=[0,4] scored=2048",
}
VARIANTS = {
    "yarn-paper-ramp": "yarn --options=ramp=paper",
    "yarn-pose": "yarn --pose=true",
    "window": "lm-infinite --options=sinks=0",  # what is left is a sliding window of L tokens
}
# MrRoPE (2601.22181) changes YaRN's ramp, and claims most at large factors
MRROPE = {
    "mrrope-pro": "yarn --options=ramp=progressive",
    "mrrope-uni": "yarn --options=ramp=geometric",
}
TIMES_16 = {f"{name}-16": f"{MRROPE.get(name, name)} --factor=16" for name in ("yarn", *MRROPE)}
VARIANTS |= MRROPE | TIMES_16
# longrope needs a table of factors (search.py)
NAMES = [*(name for name in METHODS if name != "longrope"), *VARIANTS]
ZERO_SHOT = ("ntk-frozen", "window", *ATTENTION, *MRROPE, *TIMES_16)  # not fine-tuned


TRAINED = ("native", "gate")
OTHERS = ("learned-pi", "gate-yarn")
GATE = "--pos=rope --output_gate=head"


def ARMS(b):
    native = f"train --pos=rope --block_size={4 * b.L} --batch_size={b.batch // 4}"
    native += f" --max_iters={b.steps + b.tuning[-1]}"
    arms = {"rope": "train --pos=rope", "native": native}
    for name in NAMES:
        tuning = [0] if name in ZERO_SHOT else b.tuning
        for steps in tuning:
            arms[f"{name}+{steps}"] = ["train --pos=rope", extend(b, name, steps)]
    for name, flags, method in (("learned", "--pos=learned", "pi"), ("gate", GATE, "yarn")):
        arms[name] = f"train {flags}"
        for steps in b.tuning:
            arms[f"{name}-{method}+{steps}"] = [f"train {flags}", extend(b, method, steps)]
    return arms


def extend(b, name, steps):
    """Return the command that extends by a method, and reports on little text by itself."""
    method = VARIANTS.get(name, name)
    return f"extend --factor=4 --method={method} --max_iters={steps} --max_tokens={4 * b.L}"


def EVALUATE(b):
    lengths = ",".join(str(times * b.L) for times in (1, 2, 4, 8, 16))
    return f"--lengths={lengths} --protocol=last-quarter --max_tokens={b.scored}"


MEASURES = ("gap closed",)


def derive(board):
    none = board.of("none+0", "last-quarter", "4L")
    native = board.of("native", "last-quarter", "4L")
    for arm in (f"{name}+{steps}" for name in NAMES for steps in board.b.tuning):
        for seed, loss in board.of(arm, "last-quarter", "4L").items():
            if seed in none and seed in native:
                gap = (none[seed] - loss) / (none[seed] - native[seed])
                yield arm, seed, "gap closed", 4 * board.b.L, gap


def notes(board):
    """Return the tables of the loss and of the gap closed, the lowest loss at 4L first."""

    def cells(name, measure, columns):
        arms = [name if name in TRAINED and n == 0 else f"{name}+{n}" for _, n in columns]
        return [board.cell(arm, measure, x) for arm, (x, _) in zip(arms, columns, strict=True)]

    means = {x: board.points(f"{x}+0", "last-quarter", ["4L"]) for x in (*NAMES, *OTHERS)}
    means |= {x: board.points(x, "last-quarter", ["4L"]) for x in TRAINED}
    names = sorted(filter(means.get, means), key=lambda name: means[name][0][1])
    lines = []
    losses = [(length, n) for length in ("L", "4L", "8L") for n in (0, board.b.tuning[-1])]
    gaps = [("4L", n) for n in board.b.tuning]
    loss = "Loss, without fine-tuning and after it", "last-quarter", losses
    for heading, measure, columns in (loss, ("Gap closed", "gap closed", gaps)):
        header = [f"{count_tokens(length, board.b)}, {n} steps" for length, n in columns]
        rows = [[name, *cells(name, measure, columns)] for name in names]
        rows = [row for row in rows if {*row[1:]} != {"–"}]
        lines += [f"## {heading}", "", Table("", ["", *header], rows).markdown(), ""]
    return lines[:-1]


def plot(board, file):
    """Plot the loss by length of what is not fine-tuned; all arms would be too many curves."""
    board.arms = ["native", *(f"{name}+0" for name in NAMES)]
    table = "", "last-quarter", ["L", "2L", "4L"]
    title = "Without fine-tuning Self-Extend keeps the loss low, YaRN less, and PI does not"
    plot_tables([table], board, file, title, SHOWN)


TABLES = []  # notes() has them
SHOWN = {"none+0": "RoPE, unchanged", "yarn+0": "YaRN", "self-extend+0": "Self-Extend"}
SHOWN |= {"window+0": "cut to a window", "native": "trained at 4 times the length", "pi+0": "PI"}
CLAIMS = """
# Without fine-tuning, at the target
last-quarter: yarn+0@4L < ntk+0@4L
last-quarter: ntk-parts+0@4L < ntk+0@4L
last-quarter: ntk+0@4L < none+0@4L
# Cost at the original length
last-quarter: none+0@L < ntk+0@L
last-quarter: ntk+0@L < ntk-parts+0@L
last-quarter: ntk-parts+0@L < yarn+0@L + 0.02
last-quarter: yarn+0@L < pi+0@L - 0.3
# NTK-aware and dynamic methods
last-quarter: ntk+0@2L < ntk+0@L + ln 1.1
last-quarter: ntk+0@4L > ntk+0@L + ln 1.5
last-quarter: dynamic-pi+0@L < none+0@L + 0.000000001
last-quarter: dynamic-ntk+0@L < none+0@L + 0.000000001
last-quarter: dynamic-yarn+0@L < none+0@L + 0.000000001
last-quarter: ntk-frozen+0@L < none+0@L + 0.000000001
# Beyond the target
last-quarter: yarn+80@8L > yarn+80@4L + 0.1
last-quarter: dynamic-yarn+0@8L < yarn+0@8L
# Exact and approximate attention (Lu et al. 2024)
last-quarter: yarn+80@4L < yarn+0@4L
last-quarter: ntk-lceg+80@4L < ntk-lceg+0@4L
last-quarter: pi+80@4L < pi+0@4L
last-quarter: yarn+80@4L < window+0@4L
last-quarter: yarn+0@4L < window+0@4L
last-quarter: yarn+80@4L < lm-infinite+0@4L
last-quarter: yarn+0@4L < lm-infinite+0@4L
last-quarter: yarn+80@4L < self-extend+0@4L
last-quarter: yarn+0@4L < self-extend+0@4L
last-quarter: ntk-lceg+80@8L < ntk+80@8L
last-quarter: ntk-lceg+80@8L < yarn+80@8L
# Jet-Long (2607.07740): the original model within its length, and better than others beyond it
last-quarter: jet-long+0@L < none+0@L + 0.000000001
last-quarter: jet-long+0@4L < yarn+0@4L
last-quarter: jet-long+0@4L < dynamic-ntk+0@4L
last-quarter: jet-long+0@4L < self-extend+0@4L
last-quarter: jet-long+0@8L < dynamic-ntk+0@8L
# MrRoPE (2601.22181)
last-quarter: mrrope-pro+0@4L < yarn+0@4L
last-quarter: mrrope-pro+0@4L < mrrope-uni+0@4L
last-quarter: mrrope-uni+0@4L < yarn+0@4L
last-quarter: mrrope-pro-16+0@16L < yarn-16+0@16L
last-quarter: mrrope-pro-16+0@16L < mrrope-uni-16+0@16L
last-quarter: mrrope-uni-16+0@16L < yarn-16+0@16L
# An output gate helps extension by YaRN (Qiu et al. 2025, 2505.06708)
last-quarter: gate-yarn+0@4L < yarn+0@4L
last-quarter: gate-yarn+0@4L - gate@L < yarn+0@4L - rope@L
last-quarter: gate-yarn+80@4L < yarn+80@4L
last-quarter: gate-yarn+80@4L - gate@L < yarn+80@4L - rope@L
# Learned embeddings, interpolated
last-quarter: learned-pi+0@4L < learned@L + ln 1.1
last-quarter: learned-pi+80@4L < learned@L + ln 1.1
"""
