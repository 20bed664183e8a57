"""The Triton kernels without a GPU: their numbers under the interpreter, and what they cost once compiled, each in a process of its own."""
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)")
SHARED = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}  # bytes that a program may take


@needs_triton
def test_numbers_under_the_interpreter():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/interpreted"], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0 and " passed" in done.stdout


@needs_triton
def test_compiled_ahead_of_time_for_every_architecture(request):
    """No register spills, shared memory within each card's limit, and 16-byte loads and stores where the shape allows them."""
    done = subprocess.run([sys.executable, ROOT / "tests/aot.py", *(["--all"] if request.config.getoption("--all") else [])], env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == set(SHARED) and len(rows) >= 7 * 6
    for row in rows:
        assert row["stack"] == 0 and row["registers"] <= 128 and row["shared"] <= SHARED[row["target"]], row
        if row["target"] != "gfx942" and row["kernel"].startswith("rope"):
            assert row["wide"] > 0 and row["narrow"] == 0, row


def test_dispatch(run):
    """The environment switch, and no triton where it is not needed."""
    code = ("import sys, torch, kernels; q = torch.randn(1, 2, 3, 8); c = torch.ones(3, 4); kernels.rope(q, q, c, c); kernels.rope(q.double(), q.double(), c, c); "
            "print('kernels.rotary' in sys.modules, 'triton' in sys.modules, kernels._triton_runs('cpu', None))")
    for env, said in (({}, "False False False"), ({"NANOLONG_REFERENCE": "1", "TRITON_INTERPRET": "1"}, "False False False"), ({"TRITON_INTERPRET": "1"}, "True True True")):
        if importlib.util.find_spec("triton") or "True" not in said:
            clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NANOLONG_REFERENCE")}
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True)
            assert done.stdout.strip() == said, (env, done.stdout, done.stderr)
