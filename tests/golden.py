"""Compare two checkouts of nanoLong bit for bit: a refactoring must not change a number.

    python tests/golden.py OLD NEW                       all groups, about ten minutes on two cores
    python tests/golden.py OLD NEW --only=models,hf      some of them

OLD is commit 9ee6ca5 or later: the cases import what they use from where it is today. Both are
copied to a temporary folder, so nothing is written into them. The same cases then run in both
copies, one process per group, with one thread (golden_models.py, golden_scripts.py), and what they
record is compared here. Wording, times and meta.json are not compared. Exit status 1 means that
something differs.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file

GROUPS = (
    *("kernels", "models", "extension", "generation"),
    *("data", "training", "extending", "sampling", "evaluation", "hf", "statuses"),
)

# Changes that are meant: patterns of entries ("group: case | key"), each with the reason.
DELIBERATE = (
    (
        "*: *autocast* | *",
        "attention with a bias is float32, and a row's product is another operator",
    ),
    ("models: *documents* | *", "positions count from 0 in every packed document"),
    ("extension: *documents* | *", "positions count from 0 in every packed document"),
    ("training: long documents | *", "positions count from 0 in every packed document"),
    ("extending: extended again | log val*", "eval_iters counts sequences, here one fewer"),
    ("evaluation: needle*", "needles are prompts of niah, and records of retrieval have one form"),
)

# Cases that went with what they compared:
# statuses: extend.py --plot=a.svg, and --plot of another: extend.py plots no wavelengths any more.
# data, training, extending: "long documents" no longer repeat them, as --upsample_docs did.
# data, training, extending: documents of tasks are others, and token files have headers.

# Entries that may differ by this much, of numbers up to about 400; all others must be identical.
TOLERANCES = (
    ("*: compiled*", 1e-5),
    ("models: *", 4e-5),  # attention with a bias, vectors or a mask goes another way on a CPU
)

# The text of the datasets: some modules of the standard library; 20, or their split is another one.
MODULES = (
    "argparse ast calendar codecs configparser copy csv difflib dis enum fractions gettext glob "
    "heapq inspect optparse statistics tarfile textwrap typing"
).split()

MAKE_GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4)
model = GPT2LMHeadModel(config)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0, 0.3)
model.save_pretrained("gpt2")
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="the checkout to compare with it")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    args = parser.parse_args()
    groups = args.only.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        parser.error(f"there is no group {unknown.pop()!r}: choose from {', '.join(GROUPS)}")

    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    make_inputs(folder)
    for name, checkout in (("old", args.old), ("new", args.new)):
        copy_checkout(checkout, folder / name / "checkout")
    print("group         cases  refused  deliberate  different  seconds", flush=True)
    differences = []
    for group in groups:
        start = time.perf_counter()
        run_group(folder, group)
        found = compare_group(folder, group)
        print(f"  {time.perf_counter() - start:7.0f}", *found[:20], sep="\n    ", flush=True)
        differences += found
    if differences:
        file = folder / "differences.txt"
        file.write_text("\n".join(differences) + "\n", encoding="utf-8")
        print(f"\n{len(differences)} entries differ; all of them are in {file}")
        return 1
    print("\nall identical")
    shutil.rmtree(folder)
    return 0


def make_inputs(folder):
    """Write what both checkouts read: folder/text, and folder/gpt2 where transformers is there."""
    text = folder / "text"
    text.mkdir()
    for module in MODULES:
        shutil.copyfile(Path(sysconfig.get_path("stdlib")) / f"{module}.py", text / f"{module}.py")
    # transformers would take a checkout's kernels package for its own, so it runs in this folder
    made = subprocess.run(
        [sys.executable, "-c", MAKE_GPT2], cwd=folder, env=environment(), capture_output=True
    )
    if made.returncode:
        print("transformers is not installed: the import of a GPT-2 is left out")


def copy_checkout(checkout, target):
    """Copy the code of a checkout, without its datasets, runs and environments."""
    if not (checkout / "model.py").is_file():
        sys.exit(f"error: {checkout} is no checkout of nanoLong: it has no model.py")
    # data/ also holds datasets, in folders
    for part in ("*.py", "data/*.py", "config/*", "kernels/*", "nanolong/**/*", "experiments/**/*"):
        for file in checkout.glob(part):
            copy = target / file.relative_to(checkout)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                shutil.copy(file, copy)


def environment():
    """The environment of every process: one thread, and no modules from elsewhere."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_group(folder, group):
    """Run a group's cases in both checkouts, at the same time."""
    running = []
    for name in ("old", "new"):
        with open(folder / name / f"{group}.log", "w") as log:
            words = [Path(__file__).with_name("golden_cases.py"), group, folder / name]
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder / name / "checkout",
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
    for process in running:
        process.wait()


def compare_group(folder, group):
    """Print a group's row; return a line for each entry that differs, failures first."""
    old, new = (read_results(folder / name, group) for name in ("old", "new"))
    keys = sorted({*old, *new}, key=lambda key: (not key.endswith(" | failed"), key))
    differing = [key for key in keys if entry_gap(key, old, new) > tolerance(f"{group}: {key}")]
    entries = {key: f"{group}: {key}" for key in differing}
    meant = {key for key in differing if any(fnmatch(entries[key], x) for x, _ in DELIBERATE)}
    different = [key for key in differing if key not in meant]
    counts = [
        count_cases(keys),
        sum(key.endswith(" | refused") for key in old),
        count_cases(meant),
        count_cases(different),
    ]
    print("{:<12}{:>7}{:>9}{:>12}{:>11}".format(group, *counts), end="")
    return [f"{entries[key]}: {describe(key, old, new)}"[:400] for key in different]


def count_cases(keys):
    return len({key.partition(" | ")[0] for key in keys})


def read_results(folder, group):
    """What golden_cases.py recorded: "case | key" -> a tensor, or what JSON can hold."""
    values, tensors = folder / f"{group}.json", folder / f"{group}.safetensors"
    if not values.is_file():
        log = (folder / f"{group}.log").read_text(errors="replace").strip().splitlines()
        return {"the group | failed": (log or ["no output"])[-1]}
    return {**json.loads(values.read_text(encoding="utf-8")), **load_file(tensors)}


def entry_gap(key, old, new):
    """How far an entry is apart in two results: 0 if identical, inf if not comparable."""
    if key.endswith(" | failed") or key not in old or key not in new:
        return math.inf  # a case that fails in both is not identical: it shows nothing
    return value_gap(old[key], new[key])


def tolerance(entry):
    return max((most for pattern, most in TOLERANCES if fnmatch(entry, pattern)), default=0)


def value_gap(a, b):
    """The largest difference of two values: numbers, or tensors, lists and dicts of them."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        return tensor_gap(a, b)
    if type(a) is not type(b):
        return math.inf
    if isinstance(a, dict) and a.keys() == b.keys():
        return max((value_gap(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and len(a) == len(b):
        return max((value_gap(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if repr(a) == repr(b):  # of floats, too: repr is exact, and nan is nan
        return 0.0
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return max(abs(a - b), math.ulp(0.0))
    return math.inf


def tensor_gap(a, b):
    """The largest difference of two tensors; 0 only when all their bits are the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return math.inf
    if torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
        return 0.0
    gap = (a.double() - b.double()).abs().max().item()
    return max(gap, math.ulp(0.0)) if math.isfinite(gap) else math.inf


def describe(key, old, new):
    """A difference in words."""
    if key.endswith(" | failed"):
        return {**old, **new}[key].strip().splitlines()[-1]
    if key not in old or key not in new:
        return "only in NEW" if key in new else "only in OLD"
    a, b = old[key], new[key]
    gap = f"{value_gap(a, b):.2g} apart"
    if torch.is_tensor(a) and torch.is_tensor(b):
        return f"{gap}: {a.dtype} {list(a.shape)} in OLD, {b.dtype} {list(b.shape)} in NEW"
    if isinstance(a, dict) and isinstance(b, dict):  # only what differs of them
        same = [x for x in a if x in b and value_gap(a[x], b[x]) == 0]
        a, b = ({x: values[x] for x in values if x not in same} for values in (a, b))
    return f"{gap}: {a!r:.100} in OLD, {b!r:.100} in NEW"


if __name__ == "__main__":
    sys.exit(main())
