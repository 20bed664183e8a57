"""
The memory of a training step of 124 M parameters, on one process and in shards on four.

    python experiments/bench_sharding.py > results/cpu/sharding.md

Each process is train() of train.py: two steps of AdamW in float32, one sequence of 256 tokens a
process, an evaluation, and checkpoints at the beginning and the end. Measured on Linux: the peak of
the process's resident memory, above what it takes once torch and the model are imported. Counted:
count_memory() of nanolong/memory.py, tensors alone. Four processes need 5 GB, and minutes on two
cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304, "block_size": 256}
GOAL = 0.45  # of the memory of one process, in each of four


def resident_memory(name):
    """VmRSS or VmHWM (the peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"there is no {name}: this script needs Linux")


def train_and_measure(folder, parallel):
    """Train in this process, and print the peak of its memory."""
    before = resident_memory("VmRSS")
    from nanolong.cli import silent
    from nanolong.distributed import join_processes, rank_and_world
    from train import TrainConfig, train

    join_processes("cpu")
    rank, world = rank_and_world()
    with silent(True):
        torch.manual_seed(0)
        settings = {"dataset": f"{folder}/data", "out_dir": f"{folder}/run{world}"}
        settings |= {"batch_size": 1, "gradient_accumulation_steps": world, "max_iters": 2}
        settings |= {"eval_iters": world, "device": "cpu", "dtype": "float32", "compile": False}
        train(GPT(GPTConfig(**SHAPE)), TrainConfig(parallel=parallel, **settings))
    print("PEAK", rank, resident_memory("VmHWM") - before, flush=True)


def write_random_tokens(folder):
    import data

    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 10_000)
    folder.mkdir()
    for split in ("train", "val"):
        data.write_tokens(folder / f"{split}.bin", tokens, SHAPE["vocab_size"])
    meta = {"vocab_size": SHAPE["vocab_size"], "tokenizer": None}
    meta |= {"bos": None, "bos_default": False}
    (folder / "meta.json").write_text(json.dumps(meta, allow_nan=False))


def measure(folder, parallel, processes):
    """The peaks of so many processes, in bytes."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, __file__, str(folder), parallel]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("PEAK")]
    if len(lines) != processes:
        raise RuntimeError(done.stderr[-3000:])
    return [int(peak) for _, _, peak in lines]


def main():
    from nanolong.memory import count_memory
    from nanolong.provenance import provenance

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_tokens(folder / "data")
        measured = {1: measure(folder, "ddp", 1), 4: measure(folder, "fsdp", 4)}
    print("# Memory of training in shards\n")
    print(f"`python experiments/bench_sharding.py`; {provenance(torch.device('cpu'))}.\n")
    print(__doc__.strip().split("\n\n")[2] + "\n")
    print("| processes | peak of each, MiB | counted, MiB | of one process |")
    print("|---|---|---|---|")
    for processes, peaks in measured.items():
        counted = count_memory(
            GPTConfig(**SHAPE), 1, 256, "float32", device="cpu", shards=processes
        )
        listed = ", ".join(f"{peak / 2**20:,.0f}" for peak in sorted(peaks))
        fraction = max(peaks) / measured[1][0]
        what = "1" if processes == 1 else f"{processes}, fsdp"
        print(f"| {what} | {listed} | {counted.peak / 2**20:,.0f} | {fraction:.2f} |")
    met = "met" if max(measured[4]) <= GOAL * measured[1][0] else "missed"
    print(f"\nGoal, at most {GOAL} of one process in each of four: {met}.")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train_and_measure(*sys.argv[1:])
    else:
        main()
