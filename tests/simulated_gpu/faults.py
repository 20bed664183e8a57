"""Put faults into the host code, one at a time, and see which tests of this folder find them.

    python tests/simulated_gpu/faults.py [--json=FILE] [NAME ...]

Each fault is one edit of a copy of the tree. A fault that no test can find is listed with the
reason, so that nobody takes a green run for more than it says.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", "results", "python")


class Fault(NamedTuple):
    """Replace `old`, which stands once in a file, by `new`; `tests` are those that should fail."""

    file: str
    old: str
    new: str
    tests: str  # words of pytest, after the folder of the tests
    unseen: str = ""  # why no test can find it


RACE = "everything has completed when a call of the simulated driver returns"

FAULTS = {
    "a table stays on the CPU": Fault(
        "model.py",
        "fn(torch.empty(1, device=table.device))",
        "fn(torch.empty(1))",
        "test_programs.py -k evaluation and float32",
    ),
    "a kernel is launched on the current device": Fault(
        "kernels/rotary.py",
        "with torch.cuda.device_of(q):",
        "with torch.no_grad():",
        "test_devices.py -k rope",
    ),
    "a capture is made on the current device": Fault(
        "nanolong/inference.py",
        "with torch.cuda.device(cache.tokens.device):",
        "with torch.no_grad():",
        "test_devices.py -k rope",
    ),
    "a batch is copied from pageable memory": Fault(
        "nanolong/devices.py",
        "x.pin_memory().to(device, non_blocking=True)",
        "x.to(device, non_blocking=True)",
        "test_counts.py -k a_step_waits and window",
    ),
    "a step reads the loss": Fault(
        "train.py",
        "sums[0] += loss_sum.detach()",
        "sums[0] += loss_sum.item()",
        "test_counts.py -k a_step_waits and window",
    ),
    "a captured graph is not replayed": Fault(
        "nanolong/inference.py",
        "        self.graph.replay()\n",
        "",
        "test_programs.py -k greedy and float32",
    ),
    "a graph reads another tensor than the new token": Fault(
        "nanolong/inference.py",
        "self.tokens.copy_(tokens)",
        "self.tokens = tokens",
        "test_programs.py -k greedy and float32",
    ),
    "a graph is captured on another stream than its kernels": Fault(
        "nanolong/inference.py",
        "self.logits = run(self.tokens)",
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                self.logits = run(self.tokens)",
        "test_programs.py -k greedy and float32",
    ),
    "strides are swapped at a launch": Fault(
        "kernels/rotary.py",
        "return Heads(x, *x.stride()[:3], x.shape[1])",
        "return Heads(x, x.stride(0), x.stride(2), x.stride(1), x.shape[1])",
        "test_emulated.py -k rope",
    ),
    "a grid misses the last block": Fault(
        "kernels/flash.py",
        "(segments.shape[1], heads, len(q))",
        "(max(1, segments.shape[1] - 1), heads, len(q))",
        "test_emulated.py -k rope",
    ),
    "a scale is in the wrong units at a launch": Fault(
        "kernels/flash.py",
        "scale=scale * LOG2E",
        "scale=scale",
        "test_emulated.py -k rope",
    ),
    "gradients are not summed over processes": Fault(
        "train.py",
        "parallel.set_gradient_sync(forward, number == batches.per_step - 1)",
        "parallel.set_gradient_sync(forward, False)",
        "test_distributed.py -k resumes and ddp",
    ),
    "NCCL guesses the device of a process": Fault(
        "nanolong/parallel.py",
        "device_id=device if is_cuda else None",
        "device_id=None",
        "test_distributed.py -k ddp and two_cpus",
    ),
    "a stream does not wait for the warm-up": Fault(
        "nanolong/inference.py",
        "        stream.wait_stream(torch.cuda.current_stream())\n",
        "",
        "test_programs.py -k greedy and float32",
        RACE,
    ),
    "pinned memory is reused before it is copied": Fault(
        "nanolong/devices.py",
        "return x.pin_memory().to(device, non_blocking=True)",
        "pinned = x.pin_memory()\n    copy = pinned.to(device, non_blocking=True)\n"
        "    del pinned\n    torch.zeros_like(x).pin_memory()\n    return copy",
        "test_programs.py -k training",
        RACE,
    ),
    "float32 products are computed in TF32": Fault(
        "nanolong/devices.py",
        "    torch.utils.deterministic.fill_uninitialized_memory = False\n",
        "    torch.utils.deterministic.fill_uninitialized_memory = False\n"
        "    torch.backends.cuda.matmul.allow_tf32 = True\n",
        "test_programs.py -k training",
        "values of matrix products are the CPU's",
    ),
}


def try_fault(name, fault):
    """Whether the tests find the fault, and how long they took."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        file = tree / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(f"{name}: the text to replace stands {text.count(fault.old)} times")
        file.write_text(text.replace(fault.old, fault.new))
        start = time.monotonic()
        words = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider"]
        words += [f"tests/simulated_gpu/{word}" if ".py" in word else word for word in split(fault)]
        done = subprocess.run(words, cwd=tree, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
        return {
            "fault": name,
            "found": done.returncode == 1,
            "by": (lines or [""])[0].removeprefix("E").strip()[:160],
            "unseen": fault.unseen,
            "seconds": round(time.monotonic() - start),
        }


def split(fault):
    """The words of pytest; the last ones may be -k EXPRESSION."""
    files, _, expression = fault.tests.partition(" -k ")
    return [*files.split(), *(["-k", expression] if expression else [])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    rows = []
    for name in args.names or FAULTS:
        rows.append(try_fault(name, FAULTS[name]))
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
