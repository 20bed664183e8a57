"""Predict the speed of the kernels from counts, and say how far such predictions are off.

    python tests/compiled/predict.py            writes results/predicted.md and predicted.json
    python tests/compiled/predict.py --counts=FOLDER    takes counts from count.py --json where they
                                                        are: FOLDER/sm_80_64.json and so on

Nothing here was measured on a GPU. A prediction is a range:

  low   The unit with most cycles is always busy, the work is spread evenly, and the clock is the
        card's boost clock. No real kernel reaches it.
  high  The tensor cores wait for the busiest of the other units and that for them, tile by tile.
        Programs go to the first free multiprocessor, so the last ones run alone. The clock is 0.8
        of the boost clock, memory gives 0.8 of its bandwidth, and a launch takes 5 microseconds.

The calibration applies both to kernels whose speed others have published.
"""

import heapq
import json
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import calibration  # noqa: E402
import count  # noqa: E402
import torch  # noqa: E402
from launchers import install  # noqa: E402
from ptx_emulator.cycles import ARCHITECTURES, UNITS, count_launch  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "results"

# architecture, multiprocessors, boost clock in GHz, memory in GB/s: NVIDIA's data sheets and
# whitepapers. The clock is the one for which they give the tensor cores' speed.
CARDS = {
    "A100-SXM 80GB": ("sm_80", 108, 1.410, 2039),
    "H100-SXM": ("sm_90", 132, 1.830, 3352),
    "RTX 3090": ("sm_86", 82, 1.695, 936),
    "RTX 4090": ("sm_89", 128, 2.520, 1008),
    "RTX 5090": ("sm_120", 170, 2.407, 1792),
}
SUSTAINED_CLOCK = 0.8
SUSTAINED_MEMORY = 0.8
LAUNCH = 5e-6  # seconds

# B, H, T, D, as in the benchmarks of FlashAttention: 16,384 tokens, H D = 2,048
SHAPES = ((8, 32, 2048, 64), (2, 32, 8192, 64), (8, 16, 2048, 128), (2, 16, 8192, 128))
# name, term of count.py, entries of the table or distances of the vectors (0: as many as tokens)
TERMS = (
    ("none", "none", 0),
    ("slopes", "slopes", 0),
    ("table of 128", "table", 128),
    ("table of T", "table", 0),
    ("vectors of 129", "vectors", 129),
    ("xl of T", "xl", 0),
)


# -----------------------------------------------------------------------------
# The turns of each program: what _key_blocks(), _query_blocks() and _sweep() of flash.py compute,
# for causal attention without windows and documents. test_count.py compares them with the emulator.


def ceil_div(a, b):
    return -(-a // b)


def key_turns(block, T, BM, BN, B, m):
    """Tiles of a query block: masked, whole, clipped. m = 0: no table and no vectors."""
    i0 = block * BM
    hi = ceil_div(min(i0 + BM, T), BN)
    right = min(T // BN, (i0 + 1) // BN, hi)
    near = 0
    if m:
        near = min(max(i0 - m + 2, 0) // B * B // BN, right)
    return hi - right, right - near, near


def query_turns(block, T, BM, BN, m):
    """Tiles of a key block: masked, masked at the last queries, whole, clipped."""
    n0 = block * BN
    n1 = n0 + BN - 1
    hi = ceil_div(T, BM)
    lo = n0 // BM
    left = hi
    if n1 < T:
        left = min(ceil_div(n1, BM), hi)
    right = max(min(T // BM, hi), left)
    near = right
    if m:
        near = min(max(ceil_div(n1 + m - 1, BM), left), right)
    return left - lo, hi - right, near - left, right - near


def sweep_turns(T, BM, m, B, H, programs):
    """Tiles of each program of the sweep of one head, all diagonals and splits."""
    diagonals = min(ceil_div(T, BM) - 1, (m - 2 + BM - 1) // BM) + 1
    splits = max(1, min(programs // (H * diagonals), B * ceil_div(T, BM)))
    found = []
    for split in range(splits):
        for diagonal in range(diagonals):
            total = B * (ceil_div(T, BM) - diagonal)
            per_split = ceil_div(total, splits)
            found.append((max(0, min(per_split, total - split * per_split)),))
    return found


def turns_of(kernel, tile, shape, m, sweep_side):
    """The turns of all programs, in the order of their launch: a list of tuples.

    sweep_side: the side of the tiles of the sweep, if there is one.
    """
    from kernels import flash

    B, H, T, _ = shape
    BM, BN = tile[:2]
    if kernel == "sweep":
        return sweep_turns(T, BM, m, B, H, flash.SWEEP_PROGRAMS) * H
    if kernel == "dkdv":
        blocks = [query_turns(block, T, BM, BN, m) for block in range(ceil_div(T, BN))]
    else:
        side = sweep_side if kernel == "dq" and m else BN
        blocks = [key_turns(block, T, BM, BN, side, m) for block in range(ceil_div(T, BM))]
        blocks.reverse()  # the longest first
    return blocks * (B * H)


# -----------------------------------------------------------------------------
# Time


def seconds(counted, programs, card, n_bytes, clock_is_known=False):
    """The range of the time of a launch in seconds: (low, high).

    counted: {"loops": ..., "outside": ...} of a KernelCount. programs: the turns of each.
    n_bytes: of memory that must be read or written. clock_is_known: the boost clock was held.
    """
    _, n_multiprocessors, clock, bandwidth = card
    parts = counted["loops"] + [without_peeled_turns(counted)]
    turns = [sum(column) for column in zip(*programs, strict=True)] + [len(programs)]
    busy = [
        sum(n * part["cycles"][unit] for n, part in zip(turns, parts, strict=True))
        for unit in UNITS
    ]
    low = max(max(busy) / n_multiprocessors / (clock * 1e9), n_bytes / (bandwidth * 1e9))
    serial = [serial_cycles(part) for part in parts]
    lengths = {}  # programs with the same turns take as long
    for program in set(programs):
        lengths[program] = serial[-1] + sum(n * x for n, x in zip(program, serial, strict=False))
    makespan = schedule([lengths[program] for program in programs], n_multiprocessors)
    sustained = clock * 1e9 * (1 if clock_is_known else SUSTAINED_CLOCK)
    memory = n_bytes / (bandwidth * 1e9 * SUSTAINED_MEMORY)
    return low, max(makespan / sustained, memory) + (0 if clock_is_known else LAUNCH)


def without_peeled_turns(counted):
    """What lies outside of loops, less the turns that the compiler has peeled off a loop.

    With one stage it may put the first turn before the loop, which is counted with the loop here.
    Such turns are known by their products: outside of loops our kernels have none.
    """
    outside = counted["outside"]
    if not outside["cycles"]["tensor"]:
        return outside
    loops = [loop["cycles"] for loop in counted["loops"]]
    peeled = outside["cycles"]["tensor"] / (sum(x["tensor"] for x in loops) / len(loops))
    cycles = {}
    for unit, n in outside["cycles"].items():
        cycles[unit] = max(0, n - peeled * sum(x[unit] for x in loops) / len(loops))
    return {**outside, "cycles": cycles}


def serial_cycles(part):
    """The cycles of a turn in which the tensor cores and the other units take turns."""
    others = {**part["cycles"], "tensor": 0}
    others["shared"] -= part["operand_cycles"]
    return part["cycles"]["tensor"] + max(others.values())


def schedule(lengths, n_multiprocessors):
    """When the last program ends, if each goes to the first multiprocessor that is free."""
    ends = [0.0] * n_multiprocessors
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def memory_bytes(kernel, shape):
    """The bytes that a kernel must move: each tensor once, 16 bits an element, and row sums."""
    B, H, T, D = shape
    tensors = {"forward": 4, "dq": 6, "dkdv": 6, "sweep": 4}[kernel]
    return B * H * T * (2 * D * tensors + 8)


# -----------------------------------------------------------------------------
# Calibration

TRITON_CI = (
    "Triton's python/test/regression/test_performance.py, a version that measures attention by "
    "(causal, sequence parallel) with CUDA graphs (which release was not established), A100: "
    "the fraction of the peak at the clock that the card reported. The 40GB card is inferred from "
    "the memory clock that the file names, 1215 MHz"
)
FLASH_3 = (
    "FlashAttention-3 (arXiv 2407.08608), figure of forward speed, H100 SXM5, 'Triton'; the number "
    "printed on the bar, transcribed by a third party"
)
BENCHMARK_2391 = (
    "pytorch/benchmark, pull request 2391, triton_tutorial_flash_v2; a Hopper card, on which the "
    "same table has FlashAttention-3 at 590 TFLOP/s"
)
ISSUE_3672 = "triton-lang/triton, issue 3672, tutorial 03 on H100; the first lines of its table"
# the card of the first source; results are relative to its clock, which cancels out
CI_CARD = ("sm_80", 108, 1.350, 1555)
CI_PEAK = 2 * 1024 * 108 * 1.350e9
MATMUL_80 = (
    *((128, 256, 32, 8, 3), (256, 128, 32, 8, 3), (256, 64, 32, 4, 4), (64, 256, 32, 4, 4)),
    *((128, 128, 32, 4, 4), (128, 64, 32, 4, 4), (64, 128, 32, 4, 4)),
)
MATMUL_90 = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 32, 4, 4))
ATTENTION_90 = ((128, 64, 4, 3), (128, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))


class Published(NamedTuple):
    """A published speed: a fraction of the peak of CI_CARD, or TFLOP/s."""

    kernel: str
    arguments: tuple  # of its launch: of attention the head dimension, and whether it is causal
    size: object
    candidates: tuple  # among which an autotuner chose
    card: tuple
    speed: float
    source: str


ADD = ((1024, 4, 3),)
ATTENTION_80 = ((128, 64, 4, 4),)
H100 = CARDS["H100-SXM"]
PUBLISHED = (
    Published("add", (), 2**24, ADD, CI_CARD, 0.862, TRITON_CI),
    Published("add", (), 2**26, ADD, CI_CARD, 0.882, TRITON_CI),
    Published("matmul", (), 2048, MATMUL_80, CI_CARD, 0.653, TRITON_CI),
    Published("matmul", (), 8192, MATMUL_80, CI_CARD, 0.839, TRITON_CI),
    Published("attention", (64, True), (4, 48, 4096, 64), ATTENTION_80, CI_CARD, 0.542, TRITON_CI),
    # the file says 0.306, and counts half of the products without a causal mask, too
    Published("attention", (64, False), (4, 48, 4096, 64), ATTENTION_80, CI_CARD, 0.612, TRITON_CI),
    Published("matmul", (), 2816, MATMUL_90, H100, 500.7, ISSUE_3672),
    Published("attention", (64, False), (4, 32, 4096, 64), ATTENTION_90, H100, 400, FLASH_3),
    Published("attention", (128, False), (4, 16, 4096, 128), ATTENTION_90, H100, 389, FLASH_3),
    Published(
        "attention", (128, False), (4, 16, 4096, 128), ATTENTION_90, H100, 458.4, BENCHMARK_2391
    ),
)


def published_seconds(row):
    if row.kernel == "add":
        return 12 * row.size / (row.speed * row.card[3] * 1e9)
    if row.kernel == "matmul":
        operations = 2 * row.size**3
    else:
        operations = attention_operations(row.size) * (1 if row.arguments[1] else 2)
    return operations / (row.speed * (CI_PEAK if row.card is CI_CARD else 1e12))


def attention_operations(shape):
    """What the benchmarks of FlashAttention count for causal attention, forward."""
    B, H, T, D = shape
    return 2 * B * H * T**2 * D


def published_programs(kernel, arguments, size, config):
    """(the turns of all programs, the bytes that must be moved)."""
    if kernel == "add":
        return [()] * (size // config[0]), 12 * size
    if kernel == "matmul":
        BM, BN, BK = config[:3]
        tiles = ceil_div(size, BM) * ceil_div(size, BN)
        return [(size // BK,)] * tiles, 6 * size**2
    B, H, T, D = size
    BM, BN = config[:2]
    blocks = range(ceil_div(T, BM))
    causal = arguments[1]
    turns = [(ceil_div((i + 1) * BM, BN) if causal else ceil_div(T, BN),) for i in blocks]
    return turns * (B * H), memory_bytes("forward", size)


def calibrate():
    """A row for each of PUBLISHED, with the candidate whose range ends first."""
    rows = []
    counted = {}
    for row in PUBLISHED:
        ranges = []
        for config in row.candidates:
            key = (row.card[0], row.kernel, row.arguments, config)
            if key not in counted:
                counted[key] = count_published(*key)
            if not counted[key]["spilled"]:
                programs, n_bytes = published_programs(row.kernel, row.arguments, row.size, config)
                low, high = seconds(counted[key], programs, row.card, n_bytes, row.card is CI_CARD)
                ranges.append((high, low, config))
        high, low, config = min(ranges)
        rows.append(
            {
                "kernel": row.kernel + (" causal" if row.arguments[1:] == (True,) else ""),
                "size": row.size,
                "arch": row.card[0],
                "config": config,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "ms_published": published_seconds(row) * 1e3,
                "source": row.source,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def count_published(arch, kernel, arguments, config):
    """Count a kernel of calibration.py: a KernelCount as a dict."""
    launchers = install(calibration, arch, profile=True, races=False)
    launcher = launchers[f"{kernel}_kernel"]
    getattr(calibration, f"launch_{kernel}")(launcher, config, *arguments)
    return asdict(count_launch(launcher))


# -----------------------------------------------------------------------------
# Prediction


def load_counts(folder, arch, D):
    """{(term, kernel): KernelCount as a dict}, from a file of count.py --json or counted now."""
    path = Path(folder) / f"{arch}_{D}.json" if folder else None
    if path and path.exists():
        rows = json.loads(path.read_text())
        return {(row["term"], row["kernel"]): row for row in rows}
    found = {}
    for term in count.TERMS:
        for kernel, counted in count.count_attention(arch, term, D).items():
            found[term, kernel] = asdict(counted)
    return found


def predict(folder):
    """A row for each card, shape, term and kernel, and one for the backward pass as a whole."""
    rows = []
    for card_name, card in CARDS.items():
        for shape in SHAPES:
            counts = load_counts(folder, card[0], shape[3])
            for name, term, m in TERMS:
                m = (m or shape[2]) if term in ("table", "vectors", "xl") else 0
                sweep_side = counts[term, "sweep"]["tile"][0] if m else 0
                backward = [0.0, 0.0]
                for kernel in count.KERNELS:
                    if (term, kernel) not in counts:
                        continue
                    counted = counts[term, kernel]
                    n_loops = len(counted["loops"])  # without a table there are no clipped tiles
                    programs = turns_of(kernel, counted["tile"], shape, m, sweep_side)
                    programs = [program[:n_loops] for program in programs]
                    times = seconds(counted, programs, card, memory_bytes(kernel, shape))
                    rows.append(prediction(kernel, name, shape, card_name, times))
                    if kernel != "forward":
                        backward = [a + b for a, b in zip(backward, times, strict=True)]
                rows.append(prediction("backward", name, shape, card_name, backward))
    return rows


def prediction(kernel, term, shape, card, times):
    return {
        "kernel": f"{kernel}, {term}",
        "shape": list(shape),
        "card": card,
        "ms_low": round(times[0] * 1e3, 4),
        "ms_high": round(times[1] * 1e3, 4),
    }


# -----------------------------------------------------------------------------
# Reporting


def error_range(calibration, arch):
    """How published times of attention compare with predictions: (of low, of high), as words."""
    rows = [x for x in calibration if x["arch"] == arch and x["kernel"].startswith("attention")]
    if not rows:
        return None
    words = []
    for end in ("ms_low", "ms_high"):
        ratios = [row["ms_published"] / row[end] for row in rows]
        words.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    return words


def report(rows, calibration, folder):
    """The lines of results/predicted.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [
        "# Predicted speed",
        "",
        "Nothing on this page was measured: no kernel of this project has run on a GPU. "
        f"`python tests/compiled/predict.py`, commit {commit}, {date.today()},",
        "sealed by the commit that adds this file. The same numbers, for each kernel: "
        "[predicted.json](predicted.json).",
        "",
        "A prediction is a range of times. **Low**: the unit with most cycles is always busy, the "
        "work is spread evenly, and the clock is",
        "the boost clock. **High**: the tensor cores and the busiest of the other units wait for "
        "each other, tile by tile; a program goes to",
        "the first free multiprocessor, so that the last ones run alone; the clock is "
        f"{SUSTAINED_CLOCK} of the boost clock and memory gives {SUSTAINED_MEMORY} of its",
        f"bandwidth; a launch takes {LAUNCH * 1e6:.0f} microseconds. No latency is modelled, in "
        "either. The counts and the throughputs of the units:",
        "[tests/compiled/count.py](../tests/compiled/count.py). Only kernels are counted, and not "
        "the few sums that PyTorch computes between them.",
        "Rotary embedding and decoding are not predicted.",
        "",
        "## Calibration",
        "",
        "Kernels of others, written again from their description "
        "(tests/compiled/calibration.py), counted and predicted in the same way.",
        "Candidates are those of their autotuner; the tile is the candidate with the shortest "
        "high end. A ratio above 1 says that the published",
        "kernel took longer than predicted. On A100 the speed is relative to the clock and "
        "without the launch, so high has neither.",
        "",
        "| kernel | size | architecture | tile, warps, stages | low ms | high ms | published ms "
        "| published / low | published / high | source |",
        "|" + "---|" * 10,
    ]
    sources = []
    for row in calibration:
        if row["source"] not in sources:
            sources.append(row["source"])
        size = row["size"]
        if not isinstance(size, int):
            size = " x ".join(map(str, size))
        tile = "x".join(map(str, row["config"][:-2]))
        warps, stages = row["config"][-2:]
        low, high, published = (row[f"ms_{x}"] for x in ("low", "high", "published"))
        lines.append(
            f"| {row['kernel']} | {size} | {row['arch']} | {tile}, {warps}, {stages} "
            f"| {low:.3f} | {high:.3f} | {published:.3f} | {published / low:.2f} "
            f"| {published / high:.2f} | {sources.index(row['source']) + 1} |"
        )
    lines.append("")
    lines += [f"{n}. {source}" for n, source in enumerate(sources, 1)]
    return lines + prediction_tables(rows, calibration) + binding_table(folder)


def binding_table(folder):
    """What binds in whole tiles, and how the loops with a bias compare with those without."""
    lines = [
        "",
        "## What binds",
        "",
        "Whole tiles: the unit with most cycles, and its cycles for 4,096 scores, on one "
        "multiprocessor. In brackets: relative to no bias. The goals:",
        "slopes within 1.05 and a table within 1.15, forward and backward.",
        "",
        "| architecture | D | kernel | none | slopes | table | vectors | xl |",
        "|" + "---|" * 8,
    ]
    for arch in ARCHITECTURES:
        for D in (64, 128):
            counts = load_counts(folder, arch, D)
            for kernel in count.KERNELS:
                cells = []
                base = None
                for term in count.TERMS:
                    if (term, kernel) not in counts:
                        cells.append("")
                        continue
                    unit, cycles = binding(counts[term, kernel], kernel)
                    base = cycles if term == "none" else base
                    ratio = f" ({cycles / base:.2f})" if base and term != "none" else ""
                    cells.append(f"{unit} {cycles:.0f}{ratio}")
                lines.append(f"| {arch} | {D} | {kernel} | " + " | ".join(cells) + " |")
    return lines


def binding(counted, kernel):
    """(unit, cycles for 4,096 scores) of the loop over whole tiles."""
    name = "tile" if kernel == "sweep" else "whole"
    loop = next(loop for loop in counted["loops"] if loop["name"] == name)
    BM, BN = counted["tile"][:2]
    unit = max(loop["cycles"], key=loop["cycles"].get)
    return unit, loop["cycles"][unit] * 4096 / (BM * BN)


def prediction_tables(rows, calibration):
    """A table for each card: TFLOP/s at the high and the low end."""
    lines = [
        "",
        "## Predictions",
        "",
        "bf16, causal, B x H x T x D. TFLOP/s at the high and at the low end of the time, counted "
        "as in FlashAttention: 2 B H T^2 D",
        "forward, 2.5 times as many backward. The last column is the calibration of attention on "
        "this architecture: published time as a",
        "multiple of low and of high. A kernel as good as the published ones lies that far from "
        "the two ends.",
    ]
    found = {(row["card"], row["kernel"], tuple(row["shape"])): row for row in rows}
    for card, (arch, *_) in CARDS.items():
        errors = error_range(calibration, arch)
        said = "not calibrated"
        if errors:
            said = f"low x {errors[0]}; high x {errors[1]}"
        header = "| bias | shape | forward | backward | forward and backward, ms | error |"
        lines += ["", f"### {card} ({arch})", "", header, "|---|---|---|---|---|---|"]
        for name, _, _ in TERMS:
            for shape in SHAPES:
                pair = [
                    found[card, f"{kernel}, {name}", shape] for kernel in ("forward", "backward")
                ]
                cells = []
                for row, factor in zip(pair, (1, 2.5), strict=True):
                    work = attention_operations(shape) * factor
                    slow, fast = (work / row[f"ms_{x}"] / 1e9 for x in ("high", "low"))
                    cells.append(f"{slow:.0f} to {fast:.0f}")
                low, high = (sum(row[f"ms_{x}"] for row in pair) for x in ("low", "high"))
                size = " x ".join(map(str, shape))
                lines.append(
                    f"| {name} | {size} | {cells[0]} | {cells[1]} | {low:.2f} to {high:.2f} "
                    f"| {said} |"
                )
    return lines


def main(words):
    folder = ""
    for word in words:
        name, _, folder = word.partition("=")
        if name != "--counts" or not folder:
            sys.exit(f"error: no option {word}: use --counts=FOLDER")
    calibration_rows = calibrate()
    rows = predict(folder)
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    (RESULTS / "predicted.json").write_text(text)
    (RESULTS / "predicted.md").write_text("\n".join(report(rows, calibration_rows, folder)) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main(sys.argv[1:])
