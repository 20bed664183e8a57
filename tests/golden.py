"""Compare two checkouts of nanoLong bit for bit: a refactoring must not change a number.

    python tests/golden.py OLD NEW                       all groups, about ten minutes on two cores
    python tests/golden.py OLD NEW --only=models,hf      some of them
    python tests/golden.py OLD NEW --jobs=1              one process at a time

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
    "kernels",
    "models",
    "extension",
    "generation",
    "data",
    "training",
    "extending",
    "sampling",
    "evaluation",
    "hf",
    "statuses",
)

# Changes that are meant: patterns of entries ("group: case | key"), each with the reason.
DELIBERATE = ()

# Cases whose name begins with "compiled" may differ by this much; all others must be identical.
COMPILED_TOLERANCE = 1e-5

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
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="processes at a time")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder in any case")
    args = parser.parse_args()
    groups = args.only.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        parser.error(f"there is no group {unknown.pop()!r}: choose from {', '.join(GROUPS)}")

    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    make_inputs(folder)
    for name, checkout in (("old", args.old), ("new", args.new)):
        copy_checkout(checkout, folder / name / "checkout")

    print(f"{'group':<12}{'cases':>7}{'refused':>9}{'identical':>11}{'deliberate':>12}", end="")
    print(f"{'different':>11}  {'largest':<11}{'seconds':<10}", flush=True)
    differences = []
    for group in groups:
        seconds = run_group(folder, group, args.jobs)
        differences += report_group(folder, group, seconds)
    if differences:
        file = folder / "differences.txt"
        file.write_text("\n".join(differences) + "\n", encoding="utf-8")
        print(f"\n{len(differences)} entries differ; all of them are in {file}")
        return 1
    print("\nall identical")
    if args.keep:
        print(f"what was recorded is in {folder}")
    else:
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
    target.mkdir(parents=True)
    for file in checkout.glob("*.py"):
        shutil.copy(file, target)
    for package in ("config", "kernels", "nanolong", "experiments"):
        if (checkout / package).is_dir():
            shutil.copytree(checkout / package, target / package)
    (target / "data").mkdir()
    for file in (checkout / "data").glob("*.py"):
        shutil.copy(file, target / "data")


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


def run_group(folder, group, jobs):
    """Run a group's cases in both checkouts; return the seconds of each as {name: seconds}."""
    began = time.perf_counter()
    running, seconds = {}, {}
    for name in ("old", "new"):
        log = open(folder / name / f"{group}.log", "w")  # noqa: SIM115
        running[name] = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("golden_cases.py"), group, folder / name],
            cwd=folder / name / "checkout",
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        if jobs == 1:
            running[name].wait()
            seconds[name] = time.perf_counter() - began - sum(seconds.values())
    for name, process in running.items():
        process.wait()
        seconds.setdefault(name, time.perf_counter() - began)
    return seconds


def report_group(folder, group, seconds):
    """Print a group's row and its first differences; return all of them as lines."""
    old, new = (read_results(folder / name, group) for name in ("old", "new"))
    keys = sorted({*old, *new})
    cases = {key.partition(" | ")[0] for key in keys}
    different, deliberate, lines = {}, {}, []
    for key in keys:
        case = key.partition(" | ")[0]
        gap = entry_gap(key, old, new)
        reason = deliberate_reason(f"{group}: {key}")
        if gap and reason:
            deliberate[case] = reason
        elif gap:
            lines.append(f"{group}: {key}: {describe(key, old, new, gap)}")
            different.setdefault(case, []).append((gap, lines[-1]))
    deliberate = {case: deliberate[case] for case in deliberate.keys() - different.keys()}
    refused = [key for key in old if key.endswith(" | refused")]
    identical = len(cases) - len(different) - len(deliberate)
    largest = max((gap for entries in different.values() for gap, _ in entries), default=0.0)
    times = f"{seconds['old']:.0f}, {seconds['new']:.0f}"
    print(
        f"{group:<12}{len(cases):>7}{len(refused):>9}{identical:>11}{len(deliberate):>12}", end=""
    )
    print(f"{len(different):>11}  {largest:<11.2g}{times:<10}", flush=True)
    print_differences(different, deliberate)
    return lines


def print_differences(different, deliberate, most=20):
    """Print the worst entry of each case that differs: a failure before everything else."""
    for entries in list(different.values())[:most]:
        _, line = max(entries, key=lambda entry: (" | failed: " in entry[1], entry[0]))
        more = f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
        print(f"    {line[:300]}{more}")
    if len(different) > most:
        print(f"    and {len(different) - most} more cases")
    for reason in sorted(set(deliberate.values())):
        print(f"    deliberate: {reason}")


def read_results(folder, group):
    """What golden_cases.py recorded: "case | key" -> a tensor, or what JSON can hold."""
    values, tensors = folder / f"{group}.json", folder / f"{group}.safetensors"
    if not values.is_file():
        log = (folder / f"{group}.log").read_text(errors="replace").strip().splitlines()
        return {"the group | failed": (log or ["no output"])[-1]}
    return {**json.loads(values.read_text(encoding="utf-8")), **load_file(tensors)}


def deliberate_reason(entry):
    """Why an entry may differ, or None."""
    for pattern, reason in DELIBERATE:
        if fnmatch(entry, pattern):
            return reason
    return None


def entry_gap(key, old, new):
    """How far an entry is apart in two results: 0 if identical, inf if not comparable."""
    if key.endswith(" | failed") or key not in old or key not in new:
        return math.inf  # a case that fails in both is not identical: it shows nothing
    gap = value_gap(old[key], new[key])
    if key.startswith("compiled") and gap <= COMPILED_TOLERANCE:
        return 0.0
    return gap


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


def describe(key, old, new, gap):
    """A difference in words."""
    if key.endswith(" | failed"):
        errors = [results[key].strip().splitlines()[-1] for results in (old, new) if key in results]
        return errors[-1]
    if key not in old or key not in new:
        return "only in NEW" if key in new else "only in OLD"
    a, b = old[key], new[key]
    if torch.is_tensor(a) and torch.is_tensor(b):
        if gap < math.inf:
            return f"{gap:.2g} apart"
        return f"{a.dtype} {list(a.shape)} in OLD, {b.dtype} {list(b.shape)} in NEW"
    if isinstance(a, dict) and isinstance(b, dict):  # only what differs of them
        same = [key for key in a if key in b and value_gap(a[key], b[key]) == 0]
        a, b = ({key: x[key] for key in x if key not in same} for x in (a, b))
    return f"{gap:.2g} apart: {a!r:.100} in OLD, {b!r:.100} in NEW"


if __name__ == "__main__":
    sys.exit(main())
