"""The Triton kernels without a GPU: their numbers under the interpreter, and where they run.

Triton's interpreter and its compiler cannot live in one process, so each runs in a child process.
Their cost once compiled: test_aot.py.
"""

import importlib.util

import pytest
from conftest import ROOT, assert_success, run_pytest, run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it exists for Linux only)",
)


# what decides where kernels run
PLAIN = {"TRITON_INTERPRET": "0", "NANOLONG_REFERENCE": "0"}
INTERPRETED = {**PLAIN, "TRITON_INTERPRET": "1"}


@needs_triton
def test_numbers_under_the_interpreter(request):
    """With --all a sample of the slow tests; make kernels-all runs all of them."""
    run_pytest("tests/interpreted", request=request, env={**INTERPRETED, "OMP_NUM_THREADS": "1"})


LIFTED_CALLS = """
import torch
from lifted import flash, rotary
q = torch.randn(1, 2, 3, 8)
table = torch.zeros(2, 3)
for y in (
    rotary.rope(q, q, torch.ones(3, 4), torch.zeros(3, 4))[0],
    flash.attention(q, q, q, bias=table)[:, :, :1],
):
    assert (y - q[:, :, : y.shape[2]]).abs().max() < 1e-6
"""


@needs_triton
def test_kernels_run_outside_the_project(tmp_path):
    """Copied into a folder of their own. A first token attends to itself only."""
    (tmp_path / "lifted").mkdir()
    for name in ("rotary", "flash", "torch_private"):
        text = (ROOT / f"kernels/{name}.py").read_text()
        (tmp_path / f"lifted/{name}.py").write_text(text)
    assert_success(run_python(LIFTED_CALLS, cwd=tmp_path, env=INTERPRETED))


DISPATCH = """
import sys
import torch
import kernels
q = torch.randn(1, 2, 3, 8)
table = torch.ones(3, 4)
with torch.no_grad():
    kernels.attention(q[:, :, :1], q, q)
kernels.rope(q.double(), q.double(), table, table)
kernels.attention(q.double(), q.double(), q.double())
ran = ["triton" in sys.modules]
kernels.rope(q, q, table, table)
ran += [name in sys.modules for name in ("kernels.rotary", "triton")]
print(*ran, kernels.triton_runs(torch.device("cpu")))
"""


@pytest.mark.parametrize(
    "variables,expected",
    [
        (PLAIN, "False False False False"),
        ({**INTERPRETED, "NANOLONG_REFERENCE": "1"}, "False False False False"),
        pytest.param(INTERPRETED, "False True True True", marks=needs_triton),
    ],
    ids=["default", "reference", "interpreter"],
)
def test_environment_decides_where_kernels_run(variables, expected):
    """And triton is not imported where it is not needed, as for one query."""
    done = run_python(DISPATCH, env=variables)
    assert done.stdout.strip() == expected, done.stderr
