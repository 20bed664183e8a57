"""Check the kernels on a GPU, in eight minutes, and write a report to send us.

    make gpu-check
    python tests/gpu_check.py --only=tests --exhaustive=true --seconds=7200

The second form installs nothing: torch from 2.11 on, its triton and any pytest do. The parts, each
in a process of its own:

  check      what the scripts do first (kernels/check.py), for six position schemes
  counts     what the host asks of the GPU: one synchronization in a training step, one read for a
             sampled token, and if that is compiled one launch of a graph
  tests      the tests of the kernels, compiled
  bench      the operators in experiments/bench.py, at one length
  sanitizer  NVIDIA's compute-sanitizer over some of the tests, if it is installed

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
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch

import data
import kernels
import train
from kernels import check
from model import GPT, GPTConfig
from nanolong.errors import require, run_main
from nanolong.evaluation.provenance import ROOT, provenance

# Shares of the time; what a part leaves is for those after it.
PARTS = {"check": 30, "counts": 14, "tests": 26, "bench": 16, "sanitizer": 14}
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"]
WINDOW = {"window": 100, "sinks": 4, "layer_pattern": "FW"}
SCHEMES = {"rope": WINDOW, "t5": WINDOW, "alibi": {}, "fox": {}}
REPORTED = 100  # lines of output in the report


@dataclass
class CheckConfig:
    only: tuple[str, ...] = tuple(PARTS)  # of check, counts, tests, bench, sanitizer
    seconds: int = 450  # in all; what is not done by then is ended
    exhaustive: bool = False  # every case of the tests
    out_dir: str = "out/gpu-check"  # of the report and all output

    def __post_init__(self):
        for part in self.only:
            require(part in PARTS, f"there is no part {part!r}: --only takes {', '.join(PARTS)}")


def command_of(part, cfg, folder):
    """The command of a part, or None if it cannot run here."""
    if part in ("check", "counts"):
        code = f"import gpu_check; gpu_check.print_{part}({str(folder)!r})"
        return [sys.executable, "-c", code]
    if part == "bench":
        words = [f"--out_dir={folder}", "--lengths=2048", "--rounds=1"]
        return [sys.executable, "experiments/bench.py", *words]
    if part == "tests":
        # most of the time is Triton's compiler
        workers = ["-n", str(min(8, os.cpu_count()))] if importlib.util.find_spec("xdist") else []
        return [sys.executable, *TESTS, *workers, *["--exhaustive"] * cfg.exhaustive]
    sanitizer = shutil.which("compute-sanitizer")
    options = ["--tool", "memcheck", "--print-limit", "20", "--error-exitcode", "1"]
    tests = [sys.executable, *TESTS, "-k", "small_cases or rope"]
    return [sanitizer, *options, *tests] if sanitizer else None


def run(command, seconds, output):
    """Run a command for some seconds at most: how it ended, in words. Its output goes to the screen
    and, line by line, to `output`.
    """
    print(f"\n$ {' '.join(command)}", flush=True)
    # the kernels themselves are tested: none may be replaced
    env = {**os.environ, "NANOLONG_GPU": "1", "NANOLONG_CHECK": "0"}
    env["PYTHONPATH"] = str(ROOT / "tests")
    # for the sanitizer: each tensor is an allocation, with bounds of its own
    env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = str(int("memcheck" in command))
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


def print_check(folder):
    failed = False
    for pos, config in SCHEMES.items():
        model = GPT(GPTConfig(pos=pos, n_head=4, n_kv_head=2, n_embd=256, **config))
        fault = check.find_fault(model, torch.device("cuda"), torch.bfloat16)
        print(f"{pos}: {fault or 'no fault'}", flush=True)
        failed |= bool(fault)
    sys.exit(failed)


def print_counts(folder):
    """What the host asks of the GPU in a training step, and for a sampled token."""
    model = GPT(GPTConfig()).cuda()
    one_read = {"Memcpy DtoH": 1}
    failed = False
    for name, act, expected in (
        ("a training step", lambda n: take_steps(n, folder), {"Synchronize": 1}),
        ("a sampled token", lambda n: sample(model, n, False), one_read),
        (
            "a sampled token, compiled",
            lambda n: sample(model, n, True),
            one_read | {"GraphLaunch": 1},
        ),
    ):
        act(5)  # compiles
        few, many = count_calls(act, 5), count_calls(act, 25)
        counts = {key: (many[key] - few[key]) / 20 for key in many}
        print(f"{name}: {counts}, and should be {expected}", flush=True)
        failed |= any(counts[key] != n for key, n in expected.items())
    sys.exit(failed)


def count_calls(act, n):
    """How often the profiler sees calls and copies, by a part of their names, during act(n)."""
    with torch.profiler.profile() as profile:
        act(n)
    events = profile.key_averages()
    names = ("Synchronize", "Memcpy DtoH", "GraphLaunch", "LaunchKernel")
    return {name: sum(event.count for event in events if name in event.key) for name in names}


def take_steps(n, folder):
    """Train a small model for n steps."""
    data.prepare_missing("python")
    model = GPT(GPTConfig(vocab_size=data.vocabulary_size("python")))
    rare = {"eval_interval": 10**6, "log_interval": 10**6, "eval_iters": 16}
    options = {"out_dir": f"{folder}/run", "overwrite": True, "compile": False, **rare}
    train.train(model, train.TrainConfig(max_iters=n, **options))


def sample(model, n, compiled):
    """Sample n tokens, and read each."""
    with torch.autocast("cuda", torch.bfloat16):
        for token in model.generate([[1, 2, 3]], n, temperature=0, compiled=compiled):
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
            command = command_of(part, cfg, folder)
            ending = "well: compute-sanitizer is not on the PATH"
            if command:
                ending = run(command, deadline - time.monotonic(), output)
            found[part] = (ending, output)
            write_report(folder, cfg, found)
    finally:
        write_report(folder, cfg, found)
        for part, (ending, _) in found.items():
            print(f"{part}: {ending}")
        print(f"wrote {folder / 'report.md'}, which we would like to see")
    return 0 if all(ending.startswith("well") for ending, _ in found.values()) else 1


if __name__ == "__main__":
    run_main(main)
