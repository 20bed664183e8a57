"""A process whose memory test_shared_memory.py measures: python tests/memory_cases.py JSON

The JSON is a task, `train` or `evaluate`, its arguments, and whether freed memory is returned to
Linux at once. Prints the peak in bytes, above what the process takes once torch and the model are
imported.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import evaluate
from model import GPT, GPTConfig
from nanolong import devices
from nanolong.cli import silent
from nanolong.parallel.processes import join_processes
from train import TrainConfig, train


def train_model(model, settings):
    """Train in this process, on one core for each process."""
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_processes])
    torch.set_num_threads(1)
    join_processes("cpu")
    torch.manual_seed(0)
    settings = {"batch_size": 1, "device": "cpu", "dtype": "float32", "compile": False, **settings}
    train(GPT(GPTConfig(**model)), TrainConfig(**settings))


def evaluate_model(words):
    sys.argv = ["evaluate.py", *words]
    evaluate.main()


def resident_memory(name):
    """VmRSS or VmHWM (the peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main():
    task, arguments, returns_freed = json.loads(sys.argv[1])
    if returns_freed:
        set_malloc_options = devices.set_malloc_options
        devices.set_malloc_options = lambda keep_freed_memory: set_malloc_options(False)
    before = resident_memory("VmRSS")
    with silent(True):
        {"train": train_model, "evaluate": evaluate_model}[task](**arguments)
    peak = resident_memory("VmHWM") - before
    # in one write: the lines of several processes must not mix
    sys.stdout.write(f"PEAK {peak} bytes\n")


if __name__ == "__main__":
    main()
