"""Check the kernels on a GPU, in eight minutes, and write a report to send us.

    make gpu-check
    python tests/gpu_check.py --only=tests --exhaustive=true --seconds=7200

The second form installs nothing: torch from 2.11 on, its triton and any pytest do. The parts, each
in a process of its own:

  check      what the scripts do first (kernels/check.py), for six position schemes
  counts     what the host asks of the GPU for a sampled token, compiled: one launch of a graph and
             one read
  tests      the tests of the kernels, compiled

The report is report.md in --out_dir, and has what was found when the check is stopped. Nothing is
sent. Exit status: 0 if all is well, 1 if not, 2 without a GPU or what Triton needs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)
import contextlib
import importlib.util
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch

import kernels
from kernels import check
from model import GPT, GPTConfig
from nanolong.errors import require, run_main
from nanolong.evaluation.provenance import ROOT, provenance

# Shares of the time; what a part leaves is for those after it.
PARTS = {"check": 40, "counts": 15, "tests": 45}
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"]
WINDOW = {"window": 100, "sinks": 4, "layer_pattern": "FW"}
SCHEMES = {"rope": WINDOW, "t5": WINDOW, "alibi": {}, "fox": {}}
REPORTED = 100  # lines of output in the report


@dataclass
class CheckConfig:
    only: tuple[str, ...] = tuple(PARTS)  # of check, counts, tests
    seconds: int = 450  # in all; what is not done by then is ended
    exhaustive: bool = False  # every case of the tests
    out_dir: str = "out/gpu-check"  # of the report and all output

    def __post_init__(self):
        for part in self.only:
            require(part in PARTS, f"there is no part {part!r}: --only takes {', '.join(PARTS)}")


def command_of(part, cfg):
    """The command of a part."""
    if part in ("check", "counts"):
        return [sys.executable, "-c", f"import gpu_check; gpu_check.print_{part}()"]
    # most of the time is Triton's compiler
    workers = ["-n", str(min(8, os.cpu_count()))] if importlib.util.find_spec("xdist") else []
    return [sys.executable, *TESTS, *workers, *["--exhaustive"] * cfg.exhaustive]


def run(command, seconds, output):
    """Run a command for some seconds at most: how it ended, in words. Its output goes to the screen
    and, line by line, to `output`.
    """
    print(f"\n$ {' '.join(command)}", flush=True)
    # the kernels themselves are tested: none may be replaced
    env = {**os.environ, "NANOLONG_GPU": "1", "NANOLONG_CHECK": "0"}
    env["PYTHONPATH"] = str(ROOT / "tests")
    env.pop("TRITON_INTERPRET", None)
    options = {"cwd": ROOT, "env": env, "text": True, "errors": "replace"}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True, **options)

    def kill():
        with contextlib.suppress(ProcessLookupError):  # with its children
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        for line in process.stdout:
            output.append(line.rstrip())
            print(line, end="", flush=True)
        status = process.wait()
    finally:
        timer.cancel()
        kill()
        process.wait()
    took = time.monotonic() - start
    if took >= seconds:
        return f"not done in {took:.0f} s"
    return f"{'well' if status == 0 else f'exit status {status}'}, {took:.0f} s"


def write_report(folder, cfg, found):
    """Write what is known by now; found: part -> how it ended, and the lines of its output."""
    driver = Path("/proc/driver/nvidia/version")
    driver = driver.read_text().partition("\n")[0] if driver.exists() else "unknown"
    versions = f"triton {version('triton')}, Python {sys.version.split()[0]}, driver {driver}"
    lines = ["# The kernels on a GPU", "", provenance(torch.device("cuda")), versions, ""]
    for part in cfg.only:
        ending, output = found.get(part, ("not begun", []))
        (folder / f"{part}.txt").write_text("\n".join(output), encoding="utf-8")
        lines += [f"## {part}: {ending}", "", "````", *output[-REPORTED:], "````", ""]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")


# -----------------------------------------------------------------------------
# Parts of our own. They exit with status 1 if something is not as it should be.


def print_check():
    failed = False
    for pos, config in SCHEMES.items():
        model = GPT(GPTConfig(pos=pos, n_head=4, n_kv_head=2, n_embd=256, **config))
        fault = check.find_fault(model, torch.device("cuda"), torch.bfloat16)
        print(f"{pos}: {fault or 'no fault'}", flush=True)
        failed |= bool(fault)
    from kernels import flash  # imports triton

    if flash.device_family(torch.device("cuda"))[0] == "sm_100":
        print(
            "dq and dkdv copy in one stage here, because Triton 3.7.1 leaves out a fence for more: "
            "nobody has timed these tiles, or run sm_90's, on such a card"
        )
    sys.exit(failed)


def print_counts():
    """What the host asks of the GPU for a sampled token, if that is compiled."""
    model = GPT(GPTConfig()).cuda()
    expected = {"Memcpy DtoH": 1, "GraphLaunch": 1}
    sample(model, 5)  # compiles
    few, many = count_calls(model, 5, expected), count_calls(model, 25, expected)
    counts = {name: (many[name] - few[name]) / 20 for name in expected}
    print(f"a sampled token, compiled: {counts}, and should be {expected}", flush=True)
    sys.exit(counts != expected)


def count_calls(model, n, names):
    """How often the profiler sees calls and copies, by a part of their names, for n tokens."""
    with torch.profiler.profile() as profile:
        sample(model, n)
    events = profile.key_averages()
    return {name: sum(event.count for event in events if name in event.key) for name in names}


def sample(model, n):
    """Sample n tokens, and read each."""
    with torch.autocast("cuda", torch.bfloat16):
        for token in model.generate([[1, 2, 3]], n, temperature=0, compiled=True):
            token.item()


# -----------------------------------------------------------------------------
# main


def what_is_missing():
    """A sentence about what keeps the kernels from running here, or None."""
    if not torch.cuda.is_available():
        return (
            "torch finds no GPU: run this on a machine with one, with the CUDA build of torch and "
            "a driver that fits it"
        )
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80: use an A100, an RTX 3090 or a newer one"
    return kernels.what_triton_lacks()


def main(argv=None):
    cfg = settings.parse(cfg=CheckConfig, argv=argv).cfg
    missing = what_is_missing()
    require(not missing, missing)
    folder = Path(cfg.out_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the report is written
    deadline = time.monotonic()
    found = {}
    try:
        for part in cfg.only:
            deadline += cfg.seconds * PARTS[part] / sum(PARTS[name] for name in cfg.only)
            output = []
            found[part] = ("stopped", output)
            seconds = deadline - time.monotonic()
            found[part] = (run(command_of(part, cfg), seconds, output), output)
            write_report(folder, cfg, found)
    finally:
        write_report(folder, cfg, found)
        for part, (ending, _) in found.items():
            print(f"{part}: {ending}")
        print(f"wrote {folder / 'report.md'}, which we would like to see")
    return 0 if all(ending.startswith("well") for ending, _ in found.values()) else 1


if __name__ == "__main__":
    run_main(main)
