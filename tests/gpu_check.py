"""Check the kernels on a GPU, and write a report to send us.

    make gpu-check                                 everything
    python tests/gpu_check.py --only=tests,checks  some of the parts

The parts: `tests`, all tests of the kernels, compiled; `checks`, the self-check of each score term,
timed; `sanitizer`, NVIDIA's compute-sanitizer over some of the tests, if it is installed;
`bench`, the benchmark.

The report is report.md in --out_dir. Nothing is sent. Exit status: 0 if all is well, 1 if a test
failed or the sanitizer found something, 2 without a GPU or what Triton needs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: --help before torch is imported)
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

import kernels
from kernels import first_call, self_check
from nanolong.errors import require, run_main
from nanolong.evaluation.provenance import ROOT, current_commit

PARTS = ("tests", "checks", "sanitizer", "bench")
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"]
TOOLS = ("memcheck", "racecheck", "synccheck")  # of compute-sanitizer
TERMS = (
    *("no term", "slopes", "table", "vectors", "vectors with values"),
    *("vectors by head", "vectors by head with offsets"),
)


@dataclass
class CheckConfig:
    only: tuple[str, ...] = PARTS  # of tests, checks, sanitizer, bench
    lengths: tuple[int, ...] = (2048, 8192)  # attention's tokens in the benchmark
    out_dir: str = "out/gpu-check"  # of the report, the benchmark's files and all output

    def __post_init__(self):
        for part in self.only:
            require(part in PARTS, f"there is no part {part!r}: --only takes {', '.join(PARTS)}")


class Outcome(NamedTuple):
    """What a command printed, and how it ended."""

    text: str
    status: int
    seconds: float


def run(command, log, **environment):
    """Run a command in the project's folder. Its output goes to the screen and to a file."""
    print(f"\n$ {' '.join(map(str, command))}", flush=True)
    start = time.monotonic()
    # the kernels themselves are tested: none may be replaced
    env = {**os.environ, "NANOLONG_GPU": "1", "NANOLONG_CHECK": "0", **environment}
    env.pop("TRITON_INTERPRET", None)
    lines = []
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    text = "".join(lines)
    log.write_text(text, encoding="utf-8")
    return Outcome(text, process.returncode, time.monotonic() - start)


def what_is_missing():
    """Sentences about what keeps the kernels from running here."""
    missing = []
    if not torch.cuda.is_available():
        missing.append(
            "torch finds no GPU: run this on a machine with one, with the CUDA build of torch (pip "
            "install -r requirements.txt) and a driver that fits it"
        )
    elif not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        missing.append("the GPU is older than sm_80: use an A100, an RTX 3090 or a newer one")
    if kernels.what_triton_lacks():
        missing.append(f"{kernels.what_triton_lacks()}: install it")
    return missing


# -----------------------------------------------------------------------------
# The parts. Each returns its section of the report, as lines, and whether all is well.


def run_tests(folder, cfg):
    """All tests of the kernels, compiled."""
    workers = []
    if importlib.util.find_spec("xdist"):  # most of the time is Triton's compiler
        workers = ["-n", str(min(8, os.cpu_count()))]
    done = run([sys.executable, *TESTS, "--exhaustive", *workers], folder / "tests.txt")
    return report_tests(done), done.status == 0


def report_tests(done):
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped|warnings?)", last_line(done.text))
    words = ", ".join(f"{n} {what}" for n, what in counts) or f"exit status {done.status}"
    lines = [f"{words}, {done.seconds:.0f} s", ""]
    if done.status:
        _, _, failures = done.text.partition(" FAILURES ")
        lines += fenced(failures or done.text, 300)
    return lines


def run_checks(folder, cfg):
    """The self-check of first_call.py, case by case: at first with compilation, then again."""
    device = torch.device("cuda", torch.cuda.current_device())
    lines = ["| case | first s | again s | |", "|---|---|---|---|"]
    well = True
    for case in cases():
        seconds = []
        for _ in range(2):
            start = time.monotonic()
            try:
                fault = self_check.find_fault(case, device)
            except Exception as error:  # the compiler, or the launch
                fault = f"{type(error).__name__}: {str(error)[:300]}"
            seconds.append(time.monotonic() - start)
        first, again = seconds
        well = well and not fault
        fault = fault.replace("\n", " ").replace("|", "/")
        lines.append(f"| {case} | {first:.1f} | {again:.2f} | {fault or 'agrees'} |")
        print(lines[-1], flush=True)
    (folder / "checks.txt").write_text("\n".join(lines) + "\n")
    return lines, well


def cases():
    """A case of every kernel, score term and 16-bit or 32-bit dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in (64, 128):
            yield self_check.Case("rope", dtype, D, 1, "", "", D)
            for kernel in ("attention", "decoding"):
                for term in TERMS:
                    yield self_check.Case(kernel, dtype, D, 1, term)


def run_sanitizer(folder, cfg):
    """The small cases of the tests under compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        sentence = "compute-sanitizer (of the CUDA toolkit) is not on the PATH, so it was left out."
        print(sentence)
        return [sentence], True
    lines = []
    well = True
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--print-limit", "20", "--error-exitcode", "1"]
        command += [sys.executable, *TESTS, "-k", "small_cases or rope"]
        # so that each tensor is an allocation, with bounds of its own
        done = run(command, folder / f"{tool}.txt", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        lines += [f"### {tool}", "", *report_sanitizer(done), ""]
        well = well and done.status == 0
    return lines, well


def report_sanitizer(done):
    findings = [line for line in done.text.splitlines() if line.startswith("=========")]
    summaries = [line.strip("= ") for line in findings if "SUMMARY" in line]
    tests = [line for line in done.text.splitlines() if re.search(r"\d+ (passed|failed)", line)]
    words = [*summaries, *(line.strip("= ") for line in tests[-1:]), f"{done.seconds:.0f} s"]
    lines = ["; ".join(words)]
    if done.status:
        lines += ["", *fenced("\n".join(findings) or done.text, 200)]
    return lines


def run_bench(folder, cfg):
    """The benchmark."""
    (folder / "bench.json").unlink(missing_ok=True)
    lengths = ",".join(map(str, cfg.lengths))
    command = [
        sys.executable,
        "experiments/bench.py",
        f"--out_dir={folder}",
        f"--lengths={lengths}",
    ]
    done = run(command, folder / "bench.txt")
    if done.status or not (folder / "bench.json").exists():
        return [f"exit status {done.status}", "", *fenced(done.text, 60)], False
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    lines = ["| | case | | ms | rate |", "|---|---|---|---|---|"]
    for row in rows:
        measured = f"{row['ms']:.3f}" if row["ms"] else row["note"] or "not measured"
        rate = f"{row['rate']:.4g} {row['unit']}" if row["rate"] else ""
        cells = [row["section"], row["case"], row["name"], measured, rate]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, True


# -----------------------------------------------------------------------------
# The report


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def fenced(text, most):
    """The last lines of a text as a block that Markdown leaves alone."""
    return ["````", *text.strip("\n").splitlines()[-most:], "````"]


def machine():
    """What the results hold for: a row for each of device, driver, versions and commit."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    facts = {
        **first_call.environment(device),
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": properties.multi_processor_count,
        "CUDA or ROCm of torch": torch.version.cuda or torch.version.hip,
        "Python": sys.version.split()[0],
        "commit": current_commit(),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]


def main():
    cfg = settings.parse(cfg=CheckConfig).cfg
    missing = what_is_missing()
    for sentence in missing:
        print(f"error: {sentence}", file=sys.stderr)
    if missing:
        return 2
    folder = Path(cfg.out_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.md"
    parts = dict(zip(PARTS, (run_tests, run_checks, run_sanitizer, run_bench), strict=True))
    print(f"on {torch.cuda.get_device_name()}, one after the other:")
    for part in cfg.only:
        print(f"  {part:10} {parts[part].__doc__}")
    print(f"then look at {report}, and send it to us if you like; nothing else leaves this machine")
    sections = ["# The kernels on a GPU", "", *machine(), ""]
    failed = []
    for part in cfg.only:
        lines, well = parts[part](folder, cfg)
        if not well:
            failed.append(part)
        sections += [f"## {part}", "", *lines, ""]
        report.write_text("\n".join(sections), encoding="utf-8")  # also if the next part crashes
    print(f"\nwrote {report}" + "".join(f"; not well: {part}" for part in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
