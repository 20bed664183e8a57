"""tests/gpu_check.py without a GPU: what it refuses, runs and reports, also when it is stopped."""

import os
import signal
import sys
import threading

import gpu_check
import pytest
import torch

# Prints its words, and what the environment says. A benchmark hangs, in a child; a test fails.
FAKE = """#!{python}
import os, subprocess, sys
print(*sys.argv[1:], os.environ["NANOLONG_CHECK"], os.environ.get("TRITON_INTERPRET"), flush=True)
if "experiments/bench.py" in sys.argv:
    subprocess.run(["sleep", "60"])
if "tests/interpreted" in sys.argv and "memcheck" not in sys.argv:
    sys.exit("1 failed, 10 passed in 12.34s")
"""


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """A machine with a GPU, whose Python and compute-sanitizer only print."""
    facts = {"is_available": True, "get_device_capability": (9, 0), "get_device_name": "a card"}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(gpu_check.kernels, "what_triton_lacks", lambda: None)
    monkeypatch.setattr(gpu_check, "version", lambda name: "3.6.0")
    for name in ("python", "compute-sanitizer"):
        (tmp_path / name).write_text(FAKE.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the tests
    monkeypatch.setattr(gpu_check.sys, "executable", str(tmp_path / "python"))


def test_without_a_gpu_or_with_an_old_one_it_says_so(call, monkeypatch):
    assert "--only takes check, counts" in call("gpu_check.py", "--only=everything").stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU: run this on a machine with one" in call("gpu_check.py").stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    done = call("gpu_check.py")
    assert done.returncode == 2 and "the GPU is older than sm_80: use" in done.stderr


def test_all_parts_are_run_and_reported_and_what_hangs_is_ended(fake_gpu, call, tmp_path):
    done = call("gpu_check.py", f"--out_dir={tmp_path}/out", "--seconds=3")
    assert done.returncode == 1 and "bench: not done in " in done.stdout, done.stderr
    report = (tmp_path / "out/report.md").read_text()
    for text in (
        ", a card, torch 2.",
        "triton 3.6.0, Python 3.",
        "## check: well",
        "import gpu_check; gpu_check.print_counts(",
        "tests: exit status 1, ",
        "-m pytest -q -p no:cacheprovider tests/interpreted",
        "1 failed, 10 passed in 12.34s",
        "## bench: not done in ",
        "experiments/bench.py",
        "## sanitizer: well",
        "--tool memcheck ",
    ):
        assert text in report, text
    assert report.count(" 0 None\n") == 5


def test_a_check_that_is_stopped_reports_what_it_has(fake_gpu, call, tmp_path):
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM))
    old = signal.getsignal(signal.SIGTERM)
    timer.start()
    try:
        done = call("gpu_check.py", f"--out_dir={tmp_path}/out", "--only=check,bench,tests")
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, old)
    assert done.returncode == 143
    report = (tmp_path / "out/report.md").read_text()
    endings = ("## check: well", "## bench: stopped", "## tests: not begun")
    assert all(ending in report for ending in endings) and "--rounds=1 0 None" in report
