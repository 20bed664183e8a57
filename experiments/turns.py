"""Timing in turns, and tables of the times: what bench.py and operators.py share."""

import time

import numpy as np
import torch
import torch.utils.benchmark
from torch.utils._pytree import tree_leaves

from nanolong.evaluation.tables import Table


def take_turns(clocks, rounds, warmup=0):
    """Call clocks (name -> function that returns ms) in turn, every second round in reverse order.

    Returns name -> times of the rounds after the warm-up, and name -> why it failed, or "".
    """
    times = {name: [] for name in clocks}
    notes = dict.fromkeys(clocks, "")
    for number in range(warmup + rounds):
        for name in sorted(clocks, key=list(clocks).index, reverse=number % 2 == 1):
            if notes[name]:
                continue
            try:
                times[name].append(clocks[name]())
            except Exception as error:  # the others can still be compared
                notes[name] = (str(error).strip() or repr(error)).splitlines()[0][:100]
    return {name: ms[warmup:] for name, ms in times.items()}, notes


def compare(section, case, clocks, rounds, work, unit, warmup=0, in_process=True):
    """Time implementations in turns; work: amount of a call, in `unit` times a second.

    A clock may be an object with a note, which stands in its row. in_process: whether the memory of
    a GPU is this process's. Returns rows.
    """
    peaks = dict.fromkeys(clocks, 0.0)
    measured = clocks
    if in_process and torch.cuda.is_available():
        measured = {name: _with_peak(clock, peaks, name) for name, clock in clocks.items()}
    times, failures = take_turns(measured, rounds, warmup)
    first = next(iter(times.values()))
    rows = []
    for name, ms in times.items():
        row = {"section": section, "case": case, "name": name, "unit": unit}
        pairs = [a / b for a, b in zip(first, ms, strict=False)]  # fewer if one has failed
        row.update(times=ms, ms=None, rate=None, peak_gb=peaks[name])
        row.update(ms_quartiles=quartiles(ms), ratio_quartiles=quartiles(pairs))
        row["note"] = failures[name] or getattr(clocks[name], "note", "")
        if ms:
            row["ms"] = row["ms_quartiles"][1]
            row["rate"] = 1000 * work / row["ms"]
        rows.append(row)
        print(*format_row(row), sep="  ", flush=True)
    return rows


def _with_peak(clock, peaks, name):
    """Wrap a clock, so that peaks[name] gets the most memory of a GPU during a call, in GB."""

    def measured():
        torch.cuda.reset_peak_memory_stats()
        ms = clock()
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() / 1e9)
        return ms

    return measured


def quartiles(values):
    """Return the three quartiles of a list, of which the second is its median."""
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist() if values else []


def format_row(row):
    """Return the cells of a row, in the order of format_table()'s header."""
    cells = [row["section"], row["case"], row["name"]]
    for key, digits in (("ms_quartiles", 3), ("ratio_quartiles", 2)):
        low, median, high = (f"{value:.{digits}f}" for value in row[key] or (0, 0, 0))
        cells.append(f"{median} ({low} to {high})" if row[key] else "")
    rate = f"{row['rate']:,.1f} {row['unit']}" if row["rate"] else ""
    peak = f"{row['peak_gb']:.2f}" if row["peak_gb"] else ""
    return [*cells, rate, peak, row["note"]]


def format_table(rows):
    """Return a Markdown table of rows."""
    header = ["section", "case", "name", "ms (quartiles)", "ratio (quartiles)", "rate"]
    header += ["peak GB", "note"]
    return Table("", header, list(map(format_row, rows))).markdown()


def single_row(section, case, name, ms, rate=None, unit="", note=""):
    """Return a row of one number, to stand in the same table; ms may be None."""
    row = {"section": section, "case": case, "name": name, "unit": unit, "note": note}
    row |= {"times": [], "ms": ms, "rate": rate, "peak_gb": 0.0, "ratio_quartiles": []}
    row["ms_quartiles"] = [] if ms is None else [ms] * 3
    print(*format_row(row), sep="  ", flush=True)
    return row


# -----------------------------------------------------------------------------
# Clocks


def clock_call(call, device):
    """Return the median milliseconds of call(): by triton.testing.do_bench on a GPU."""
    if device.type == "cuda":
        import triton.testing

        return triton.testing.do_bench(call, return_mode="median")
    threads = torch.get_num_threads()
    timer = torch.utils.benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
    return 1000 * timer.blocked_autorange(min_run_time=0.1).median


def clock_graph(call, device):
    """Return the milliseconds of call()'s kernels on a GPU, replayed from a CUDA graph: without the
    time that Python takes. On a CPU, the milliseconds of the call.
    """
    if device.type == "cuda":
        import triton.testing

        return triton.testing.do_bench_cudagraph(call, return_mode="median")
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def with_backward(run, has_backward=True):
    """Return a function that calls run(), a functools.partial, and if asked its backward pass."""
    inputs = [x for x in tree_leaves((run.args, run.keywords)) if torch.is_tensor(x)]
    inputs = [x for x in inputs if x.requires_grad]
    gradients = []

    def call():
        with torch.enable_grad() if has_backward else torch.no_grad():
            outputs = run()
        if has_backward:
            leaves = tree_leaves(outputs)
            if not gradients:  # not all ones, as in training
                gradients.extend(map(torch.randn_like, leaves))
            torch.autograd.grad(leaves, inputs, gradients)

    return call
