"""Run a script of the project on the simulated GPU, as python tests/simulated_gpu/start.py.

    start.py [--values | --emulated] [--report=FILE] SCRIPT ARGUMENTS

The process must have the simulated GPU preloaded: conftest.py does so. --values computes real
numbers, --emulated too, and executes our kernels as compiled; --report writes what was counted, as
JSON.
"""

import atexit
import contextlib
import json
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import counts  # noqa: E402


def report(file):
    import torch

    record = {
        "counts": counts.counts(),
        "kernels": counts.kernels(),
        "synchronising lines": counts.synchronising_lines,
        "peak": torch.cuda.max_memory_allocated(),
    }
    if "emulated" in sys.modules:
        record["emulated"] = sys.modules["emulated"].record()
    Path(file).write_text(json.dumps(record, indent=1))


def main():
    words = sys.argv[1:]
    numbers = words.pop(0) if words[0] in ("--values", "--emulated") else None
    if words[0].startswith("--report="):
        atexit.register(report, words.pop(0).removeprefix("--report="))
    sys.argv = words
    context = contextlib.nullcontext()
    if numbers:
        from values import Values, real_values

        kind = Values
        if numbers == "--emulated":
            from emulated import EmulatedKernels as kind
        context = real_values(kind)
    with context:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
