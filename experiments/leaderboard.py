"""Every position scheme, trained alike at a short length and evaluated at up to 32 times that.

All runs train with AdamW, on the same batches. Losses are in nats per token of held-out text: the
mean over the seeds and its 95 % interval. Rows are sorted by the mean of the four columns of the
first table. `refused`: the scheme has no embedding for these positions.
"""

from experiments.board import plot_tables
from model import POSITIONS

TITLE = "The position leaderboard"

# cpu: 0.5 M parameters, three to five minutes of a core for each run; gpu: 25 M
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 batch=64 steps=700 warmup=50 rate=3e-3",
    "gpu": "L=256 layers=8 heads=8 width=512 batch=64 steps=4000 warmup=200 rate=2e-3",
    "try": "L=16 layers=4 heads=2 width=32 batch=8 steps=20 warmup=2 rate=3e-3",
}


def FLAGS(b):
    return (
        f"--n_layer={b.layers} --n_head={b.heads} --n_embd={b.width} --block_size={b.L} "
        f"--batch_size={b.batch} --max_iters={b.steps} --warmup_iters={b.warmup} "
        f"--learning_rate={b.rate} --eval_iters=8"
    )


def ARMS(b):
    hybrids = {
        "rope-window": f"--pos=rope --window={b.L // 2}",
        "rope-nope-every-4th": "--pos=rope --layer_pattern=FFFN",
        "rope-p-0.25": "--pos=rope --p_rope=0.25",
        "rope-p-0.5": "--pos=rope --p_rope=0.5",
        "rope-logn": "--pos=rope --query_scale=logn",
        "rope-gate-head": "--pos=rope --output_gate=head",
        "rope-gate-channel": "--pos=rope --output_gate=channel",
        "nope-gate-head": "--pos=nope --output_gate=head",
        "rope-ssmax": "--entry=examples/schemes/ssmax.py",
        "selective-rope": "--entry=examples/schemes/selective_rope.py",
        "selective-rope-nope": "--entry=examples/schemes/selective_rope.py --layer_pattern=FN",
        "repo": "--entry=examples/schemes/repo.py",
        "grape": "--entry=examples/schemes/grape.py",
        "fox-open": "--entry=examples/schemes/fox_open.py",
    }
    schemes = {pos: f"--pos={pos}" for pos in POSITIONS}
    return {name: f"train {flags}" for name, flags in (schemes | hybrids).items()}


def EVALUATE(b):
    lengths = [b.L, b.L + 20, 2 * b.L, 4 * b.L, 8 * b.L, 32 * b.L]
    return f"--lengths={','.join(map(str, lengths))} --protocol=chunked,last-quarter"


TABLES = [
    ("Loss in the last quarter of the sequence", "last-quarter", ["L", "4L", "8L", "32L"]),
    ("Loss over whole sequences", "chunked", ["L", "L+20", "2L"]),
]
SHOWN = {"rope": "RoPE", "nope": "no positions", "t5": "T5", "shaw": "Shaw", "alibi": "ALiBi"}
SHOWN |= {"xl": "Transformer-XL"}


def plot(board, file):
    title = "Beyond the training length RoPE, T5 and no positions break; ALiBi and Shaw do not"
    plot_tables(TABLES[:1], board, file, title, SHOWN)


CLAIMS = """
# Extrapolation to 2, 4 and 8 times the training length
chunked: alibi@8L < alibi@L + ln 1.1
last-quarter: sinusoidal@2L > sinusoidal@L + ln 2
last-quarter: rope@2L > rope@L + ln 1.5
last-quarter: rope@4L > rope@L + ln 3
last-quarter: nope@4L > alibi@4L
last-quarter: nope@4L < rope@4L
last-quarter: t5@4L > alibi@4L
last-quarter: t5@4L < rope@4L
last-quarter: nope@8L > alibi@8L
last-quarter: nope@8L < rope@8L
last-quarter: t5@8L > alibi@8L
last-quarter: t5@8L < rope@8L
# At the training length
chunked: rope@L < alibi@L
chunked: alibi@L < t5@L
chunked: alibi@L < sinusoidal@L
chunked: t5@L < nope@L
chunked: sinusoidal@L < nope@L
# At the training length (Haviv et al. 2022)
chunked: sinusoidal@L < learned@L
chunked: learned@L < nope@L
# Extrapolation (Press et al. 2022)
chunked: sinusoidal@L+20 < sinusoidal@L + ln 1.1
chunked: sinusoidal@2L > sinusoidal@L + ln 1.1
chunked: alibi@32L < alibi@L + ln 1.1
last-quarter: sinusoidal@32L > alibi@32L
# Relative and absolute
chunked: shaw@L < learned@L
chunked: shaw@L < sinusoidal@L
chunked: xl@L < learned@L
chunked: nezha@L < shaw@L
# RoPE
chunked: rope@L < sinusoidal@L
chunked: rope@L < learned@L
chunked: rope@L < t5@L
chunked: rope@L < shaw@L
chunked: rope@L < xl@L
# Learned and sinusoidal
chunked: learned@L < sinusoidal@L + ln 1.1
chunked: sinusoidal@L < learned@L + ln 1.1
# Beyond the training length
last-quarter: shaw@8L < shaw@L + ln 1.1
last-quarter: shaw@32L < shaw@L + ln 1.1
last-quarter: nezha@8L < nezha@L + ln 1.1
last-quarter: nezha@32L < nezha@L + ln 1.1
last-quarter: xl@8L < xl@L + ln 1.1
last-quarter: xl@32L < xl@L + ln 1.1
last-quarter: alibi@8L < alibi@L + ln 1.1
last-quarter: alibi@32L < alibi@L + ln 1.1
last-quarter: t5@8L < t5@L + ln 1.1
last-quarter: t5@32L < t5@L + ln 1.1
# Forget gates (Lin et al. 2025)
chunked: fox@L < rope@L
chunked: fox-rope@L < rope@L
chunked: fox-rope@L < fox@L + 0.02
chunked: fox@L < fox-rope@L + 0.02
last-quarter: fox@4L < rope@4L
last-quarter: fox@8L < fox@L + ln 1.1
last-quarter: fox@32L < fox@L + ln 1.1
last-quarter: fox-rope@32L < fox-rope@L + ln 1.1
last-quarter: fox-open@32L < fox-open@L + ln 1.1
chunked: fox@L < fox-open@L
# Selective RoPE (2025), which claims nothing beyond the training length, and RePo (Li et al. 2025)
chunked: selective-rope@L < rope@L
chunked: repo@L < rope@L + 0.02
last-quarter: repo@4L < rope@4L
# Gates on the output of attention (Qiu et al. 2025, 2505.06708)
chunked: rope-gate-head@L < rope@L
chunked: rope-gate-channel@L < rope@L
chunked: nope-gate-head@L < nope@L
"""
