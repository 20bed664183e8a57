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


FAULTS = {}


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
