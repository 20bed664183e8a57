"""The Triton kernels without a GPU: their numbers under the interpreter, and where they run.

Triton's interpreter and its compiler cannot live in one process, so each runs in a child process.
Their cost once compiled: test_aot.py.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it exists for Linux only)",
)


def environment(**variables):
    """The environment of a child process, without what decides where kernels run."""
    decisive = ("TRITON_INTERPRET", "NANOLONG_REFERENCE")
    return {**{k: v for k, v in os.environ.items() if k not in decisive}, **variables}


def run_tests(folder, request, **variables):
    """Run the tests of a folder in a child process, and assert that they pass.

    With --all a sample of the slow ones; make kernels-all runs all of them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(ROOT / "tests" / folder)
    if request.config.getoption("--all"):
        command.append("--all")
    env = environment(OMP_NUM_THREADS="1", **variables)
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0 and " passed" in done.stdout


@needs_triton
def test_numbers_under_the_interpreter(request):
    run_tests("interpreted", request, TRITON_INTERPRET="1")


LIFTED_CALLS = """
import torch
from lifted import decode, flash, rotary
q = torch.randn(1, 2, 3, 8)
table = torch.zeros(2, 3)
for y in (
    rotary.rope(q, q, torch.ones(3, 4), torch.zeros(3, 4))[0],
    flash.attention(q, q, q, bias=table)[:, :, :1],
    decode.attention(q, q, q, bias=table)[:, :, :1],
):
    assert (y - q[:, :, : y.shape[2]]).abs().max() < 1e-6
"""


@needs_triton
def test_kernels_run_outside_the_project(tmp_path):
    """Copied into a folder of their own. A first token attends to itself only."""
    (tmp_path / "lifted").mkdir()
    for name in ("rotary", "flash", "decode"):
        text = (ROOT / f"kernels/{name}.py").read_text()
        (tmp_path / f"lifted/{name}.py").write_text(text)
    command = [sys.executable, "-c", LIFTED_CALLS]
    env = environment(TRITON_INTERPRET="1")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


DISPATCH = """
import sys
import torch
import kernels
q = torch.randn(1, 2, 3, 8)
table = torch.ones(3, 4)
kernels.rope(q, q, table, table)
kernels.rope(q.double(), q.double(), table, table)
ran = [name in sys.modules for name in ("kernels.rotary", "triton")]
print(*ran, kernels.triton_runs(torch.device("cpu")))
"""


@pytest.mark.parametrize(
    "variables,expected",
    [
        ({}, "False False False"),
        ({"NANOLONG_REFERENCE": "1", "TRITON_INTERPRET": "1"}, "False False False"),
        pytest.param({"TRITON_INTERPRET": "1"}, "True True True", marks=needs_triton),
    ],
    ids=["default", "reference", "interpreter"],
)
def test_environment_decides_where_kernels_run(variables, expected):
    """And triton is not imported where it is not needed."""
    command = [sys.executable, "-c", DISPATCH]
    env = environment(**variables)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr
