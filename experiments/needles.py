"""Which models, extended or of another scheme, find a passkey in long text, and at which depth?

Models are trained on passkey documents of up to L tokens, extended 4 times by extend.py, and asked
for passkeys in up to 4L tokens, at 5 depths from the start (0) to the end (1). The control has no
passkey in its prompt; a guess finds 0.001. All models and seeds get the same prompts. Only drope is
trained further, as it has to be: for a fifth of the steps, at L. window is the RoPE model, cut to
a window of L.

Trap: the mean over the depths hides that a window finds only the passkeys near the end.
`evaluate.py --task=needle --plot=FILE.png` draws the heatmap of a run.
"""

from pathlib import Path
from statistics import fmean

from data.prepare import prepare_tasks
from experiments.board import count_tokens
from experiments.leaderboard import FLAGS  # noqa: F401
from experiments.reproduce import extend
from nanolong.evaluation import figures

TITLE = "Passkeys by length and depth"
# trials: prompts for each length and depth
BUDGETS = {
    "cpu": "L=96 layers=4 heads=4 width=96 batch=42 steps=500 warmup=50 rate=3e-3 trials=64",
    "gpu": "L=512 layers=8 heads=8 width=512 batch=64 steps=1500 warmup=50 rate=3e-3 trials=64",
    "try": "L=64 layers=2 heads=2 width=32 batch=5 steps=6 warmup=1 rate=3e-3 trials=4",
}
NAMES = ("none", "pi", "ntk", "ntk-frozen", "ntk-lceg", "ntk-parts", "yarn", "dynamic-yarn")
NAMES += ("mrrope-pro", "mrrope-uni", "dynamic-ntk", "drope")
NAMES += ("window", "lm-infinite", "self-extend", "jet-long")


def make_data(b):
    """Write as many passkey documents as a run has sequences."""
    write_documents(b, "niah")


def write_documents(b, *kinds):
    prepare_tasks(Path(b.data) / "documents", kinds, length=b.L, documents=b.steps * b.batch)


def ARMS(b):
    arms = {}
    dataset = f"--dataset={b.data}/documents"
    for name in NAMES:
        steps = max(2, b.steps // 5) if name == "drope" else 0
        arms[name] = [f"train --pos=rope {dataset}", extend(b, name, steps)]
    for pos in ("nope", "alibi", "fox", "fox-rope"):
        arms[pos] = f"train --pos={pos} {dataset}"
    for name in ("selective-rope", "repo", "fox-open"):
        file = name.replace("-", "_")
        arms[name] = f"train --entry=examples/schemes/{file}.py {dataset}"
    return arms


def EVALUATE(b):
    return f"--task=needle --lengths={b.L},{2 * b.L},{3 * b.L},{4 * b.L} --trials={b.trials}"


MEASURES = ("end - start",)


def derive(board):
    """Yield how many more are found at the end than at the start of the longest prompt."""
    for arm in board.arms:
        start = board.of(arm, "needle 0", "4L")
        for seed, found in board.of(arm, "needle 1", "4L").items():
            yield arm, seed, "end - start", 4 * board.b.L, found - start[seed]


DEPTHS = ["needle 0", "needle 0.25", "needle 0.5", "needle 0.75", "needle 1"]
TABLES = [
    ("Found, mean over the depths", "needle", ["L", "2L", "3L", "4L"]),
    ("Found by depth", DEPTHS, ["4L"]),
]
FINDING = "A window finds only the end, Self-Extend nearly every passkey"
PLACES = {"0": "start", "0.25": "", "0.5": "middle", "0.75": "", "1": "end"}
SHOWN = {"none": "RoPE, unchanged", "yarn": "YaRN", "self-extend": "Self-Extend"}
SHOWN |= {"window": "cut to a window", "jet-long": "Jet-Long", "drope": "DroPE"}
SHOWN |= {"nope": "no positions", "alibi": "ALiBi"}


def plot(board, file):
    """Draw a heatmap for each of eight models: places in the text by its length."""
    pyplot = figures.import_pyplot(file)
    shown = [arm for arm in SHOWN if board.runs_of(arm, "needle 0", "4L")]
    if pyplot is None or not shown:
        return
    figure, axes = pyplot.subplots(2, 4, figsize=(9, 5.4), layout="constrained")
    lengths = ["L", "2L", "3L", "4L"]
    labels = [f"{count_tokens(n, board.b)}" for n in lengths]
    for axis, arm in zip(axes.flat, shown, strict=False):
        cells = [[fmean(board.runs_of(arm, f"needle {x}", n)) for n in lengths] for x in PLACES]
        draw_found(axis, cells, labels, axis in axes[:, 0])
        axis.set_title(SHOWN[arm])
    figure.supylabel("passkeys found, %, by place in the text")
    figure.supxlabel("length of the text, bytes")
    if board.b.budget == "cpu":
        figure.suptitle(FINDING, fontsize=13, fontweight="bold")
    figures.save(figure, file)
    pyplot.close(figure)


def draw_found(axis, cells, lengths, has_places):
    """Draw fractions as a heatmap with numbers: a row for each place, a column for each length."""
    from matplotlib.colors import LinearSegmentedColormap

    found = LinearSegmentedColormap.from_list("found", ["#f6cfc5", "#a9cf9f", "#17714f"])
    axis.imshow(cells, cmap=found, vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            ink = "white" if value > 0.7 else "#22262b"
            axis.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=ink)
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(len(cells)), PLACES.values() if has_places else [""] * len(cells))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


CLAIMS = """
# Passkeys found without fine-tuning
needle: ntk@4L > none@4L
needle: ntk-parts@4L > ntk@4L
needle: yarn@4L > ntk-parts@4L
needle: yarn@4L > 0.8
end - start: alibi@4L > 0
needle: nope@2L > none@2L
needle: nope@3L > none@3L
needle: nope@4L > none@4L
# MrRoPE (2601.22181) and Jet-Long (2607.07740), which claim more than these
needle: mrrope-pro@4L > yarn@4L
needle: mrrope-uni@4L > yarn@4L
needle: mrrope-pro@4L > mrrope-uni@4L
needle: jet-long@4L > yarn@4L
needle: jet-long@4L > dynamic-ntk@4L
needle: jet-long@4L > self-extend@4L
# Positions that depend on the text
needle: fox@L > 0.8
needle: fox@4L > alibi@4L
needle: fox@4L > none@4L
needle: fox-rope@4L > none@4L
needle: fox-open@L > fox@L
needle: fox-open@4L > 0.8
needle: repo@4L > none@4L
needle: selective-rope@4L > none@4L
needle: selective-rope@4L > 0.8
# Exact and approximate attention (Lu et al. 2024)
needle 1: window@4L > 0.5
needle 0: window@4L < 0.1
"""
