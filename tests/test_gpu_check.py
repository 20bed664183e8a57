"""tests/gpu_check.py without a GPU: what it refuses, runs and reports, from canned outputs."""

import json
import os
import sys
from pathlib import Path

import gpu_check
import pytest
import torch
from conftest import ROOT

from kernels import first_call

PASSED = """........................................................................ [ 50%]
........................................................................ [100%]
144 passed, 2 skipped, 3 warnings in 61.20s (0:01:01)
"""
FAILED = """.....F.....
=================================== FAILURES ===================================
______________ test_small_cases_against_float64[40-5-table] ____________________
>           assert error(x, expected) <= limit, (name, error(x, expected), limit)
E           AssertionError: ('bias', 0.31, 0.0121)
=========================== short test summary info ============================
FAILED tests/interpreted/test_attention.py::test_small_cases_against_float64[40-5-table]
1 failed, 10 passed in 12.34s
"""
MEMCHECK = """========= COMPUTE-SANITIZER
........
8 passed in 31.00s
========= ERROR SUMMARY: 0 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _forward_kernel+0x110 in flash.py:451
=========     and Read access at _forward_kernel+0x230 in flash.py:460 [4096 hazards]
8 passed in 95.00s
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
H100 = "NVIDIA H100 80GB HBM3"


def bench_row(name, ms, note=""):
    row = {"section": "attention", "case": "forward D64 T2048 B8 H32", "name": name, "ms": ms}
    return {**row, "note": note, "rate": 300.0 if ms else None, "unit": "TFLOP/s"}


# -----------------------------------------------------------------------------
# What it refuses


def test_without_a_gpu_and_a_compiler_it_says_so(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    done = call("gpu_check.py")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "torch finds no GPU: run this on a machine with one" in lines[0]
    assert "there is no C compiler" in lines[1] or "triton is not installed" in lines[1]


def test_an_old_gpu_is_refused(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    done = call("gpu_check.py")
    assert done.returncode == 2 and "the GPU is older than sm_80: use" in done.stderr


def test_unknown_part_is_refused(call):
    done = call("gpu_check.py", "--only=everything")
    assert done.returncode == 2 and "--only takes tests, checks, sanitizer, bench" in done.stderr


# -----------------------------------------------------------------------------
# What it reports


def outcome(text, status=0):
    return gpu_check.Outcome(text, status, 61.2)


def test_tests_are_counted_and_failures_are_kept():
    assert gpu_check.report_tests(outcome(PASSED))[0] == ("144 passed, 2 skipped, 3 warnings, 61 s")
    lines = gpu_check.report_tests(outcome(FAILED, 1))
    assert lines[0] == "1 failed, 10 passed, 61 s"
    assert "E           AssertionError: ('bias', 0.31, 0.0121)" in lines
    assert ".....F....." not in lines and lines.count("````") == 2
    crashed = gpu_check.report_tests(outcome("Segmentation fault (core dumped)\n", -11))
    assert crashed[0] == "exit status -11, 61 s" and "Segmentation fault (core dumped)" in crashed


# -----------------------------------------------------------------------------
# What it runs, with executables that only print

FAKE = """#!{python}
import json, os, sys
names = ("NANOLONG_GPU", "NANOLONG_CHECK", "TRITON_INTERPRET", "PYTORCH_NO_CUDA_MEMORY_CACHING")
with open({log!r}, "a") as file:
    variables = {{name: os.environ[name] for name in names if name in os.environ}}
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], variables]) + "\\n")
words = " ".join(sys.argv)
canned = {canned!r}
for key, (text, status) in canned.items():
    if key in words:
        for word in sys.argv:
            if key == "bench.py" and word.startswith("--out_dir="):
                rows = {{"rows": json.loads(text)}}
                open(word.partition("=")[2] + "/bench.json", "w").write(json.dumps(rows))
        print(text, end="")
        sys.exit(status)
sys.exit("nothing is canned for " + words)
"""


@pytest.fixture
def fake_machine(monkeypatch, tmp_path):
    """A machine with a GPU, whose Python and sanitizer print what is canned: key -> text, status.

    Returns a function from what is canned to a function that lists the commands run so far.
    """
    properties = type("Properties", (), {"total_memory": 80 << 30, "multi_processor_count": 132})
    facts = {"device": H100, "driver": "570", "torch": "2", "triton": "3"}
    for name, value in {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_name": H100,
        "current_device": 0,
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(gpu_check.kernels, "what_triton_lacks", lambda: None)
    monkeypatch.setattr(first_call, "environment", lambda device: facts)
    monkeypatch.setattr(gpu_check, "cases", lambda: [])
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the tests

    def prepare(canned, *names):
        log = tmp_path / "log"
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            content = FAKE.format(python=sys.executable, log=str(log), canned=canned)
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(gpu_check.sys, "executable", str(folder / "python"))
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return prepare


def test_everything_is_run_and_reported(fake_machine, call, tmp_path):
    rows = [bench_row("ours, no term", 0.75), bench_row("SDPA", None, note="out of memory")]
    canned = {
        "memcheck": (MEMCHECK, 0),
        "racecheck": (RACECHECK, 1),
        "synccheck": (MEMCHECK, 0),
        "--exhaustive": (FAILED, 1),
        "bench.py": (json.dumps(rows), 0),
    }
    commands = fake_machine(canned, "python", "compute-sanitizer")
    out = tmp_path / "out"
    done = call("gpu_check.py", f"--out_dir={out}", "--lengths=2048,4096")
    assert done.returncode == 1, done.stderr
    assert f"wrote {out / 'report.md'}; not well: tests; not well: sanitizer" in done.stdout

    tests, *sanitizer, bench = commands()
    variables = {"NANOLONG_GPU": "1", "NANOLONG_CHECK": "0"}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"]
    name, arguments, environment = tests
    assert name == "python" and arguments[:7] == [*words, "--exhaustive"]
    assert environment == variables
    for tool, (name, arguments, environment) in zip(gpu_check.TOOLS, sanitizer, strict=True):
        assert name == "compute-sanitizer" and arguments[:2] == ["--tool", tool]
        at = arguments.index(str(tmp_path / "bin/python"))
        assert arguments[at + 1 : at + 7] == words
        assert environment == {**variables, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert bench[1] == ["experiments/bench.py", f"--out_dir={out}", "--lengths=2048,4096"]

    report = (out / "report.md").read_text()
    for text in (
        f"| device | {H100} |",
        "| driver | 570 |",
        "| commit | ",
        "1 failed, 10 passed",
        "AssertionError: ('bias', 0.31, 0.0121)",
        "ERROR SUMMARY: 0 errors; 8 passed in 31.00s",
        "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings); 8 passed",
        "_forward_kernel+0x110 in flash.py:451",
        "| attention | forward D64 T2048 B8 H32 | ours, no term | 0.750 | 300 TFLOP/s |",
        "| attention | forward D64 T2048 B8 H32 | SDPA | out of memory |  |",
    ):
        assert text in report
    assert (out / "tests.txt").read_text() == FAILED


def test_without_the_sanitizer_it_goes_on(fake_machine, call, monkeypatch, tmp_path):
    fake_machine({"--exhaustive": (PASSED, 0)}, "python")
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    done = call("gpu_check.py", f"--out_dir={tmp_path}", "--only=tests,sanitizer")
    assert done.returncode == 0, done.stderr
    assert "is not on the PATH, so it was left out" in done.stdout
    assert "was left out" in (tmp_path / "report.md").read_text()


def test_a_benchmark_that_fails_is_reported(fake_machine, call, tmp_path):
    (tmp_path / "bench.json").write_text('{"rows": []}')  # of another time
    fake_machine({"bench.py": ("[]", 3)}, "python")
    done = call("gpu_check.py", f"--out_dir={tmp_path}", "--only=bench")
    assert done.returncode == 1
    assert "exit status 3" in (tmp_path / "report.md").read_text()


def test_self_checks_are_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = []

    def find_fault(case, device):
        found.append(case)
        if case.kernel == "rope":
            raise RuntimeError("out of\nresource | shared memory")
        return "the output is wrong" if case.term == "table" else ""

    monkeypatch.setattr(gpu_check.self_check, "find_fault", find_fault)
    lines, well = gpu_check.run_checks(tmp_path, None)
    cases = list(gpu_check.cases())
    assert not well and found == [case for case in cases for _ in range(2)]
    assert {case.kernel for case in cases} == {"rope", "attention", "decoding"}
    for case, line in zip(cases, lines[2:], strict=True):
        last = line.split(" | ")[-1].removesuffix(" |")
        expected = "the output is wrong" if case.term == "table" else "agrees"
        if case.kernel == "rope":
            expected = "RuntimeError: out of resource / shared memory"
        assert last == expected and line.count("|") == 5


def test_make_has_the_command():
    text = (ROOT / "Makefile").read_text()
    assert "\ngpu-check: .venv/test\n\t$(PY) tests/gpu_check.py\n" in text
    assert Path(gpu_check.__file__) == ROOT / "tests/gpu_check.py"
