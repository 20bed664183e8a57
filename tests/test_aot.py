"""The kernels as compiled for architectures that are not there: see aot.py."""

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it exists for Linux only)",
)
FAST = ["sm_80 table 64 causal", "sm_90 gates 128 masked"]
ALL = [
    " ".join(case)
    for case in itertools.product(
        ("sm_80", "sm_90", "sm_86", "sm_120"), ("64", "128"), ("causal", "masked")
    )
]


def run(*words):
    """A child process that Triton's compiler, and not its interpreter, can live in."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT / "tests")
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in ALL)])
def test_compiled_kernels_fit_the_hardware(case):
    """Nothing is spilled, shared memory suffices, tensor cores are used, and no atomics."""
    done = run(ROOT / "tests/aot.py", *case.split())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for kernel in ("rotate", "forward", "dq", "dkdv", "split", "combine"):
        assert f" | {kernel} | " in done.stdout


FAULTY = """
import aot
import torch
import triton
import triton.language as tl

@triton.jit
def _faulty_kernel(X, Y, stride):
    n = tl.arange(0, 2048)
    x = tl.load(X + n * stride)
    tl.atomic_add(Y + n, tl.cumsum(x, 0).to(tl.float32))

rows = []
x, y = torch.zeros(9 * 2048, dtype=torch.float16), torch.zeros(2048)
aot.Compiler("faulty", _faulty_kernel, "sm_80", rows)[1,](x, y, 9, num_warps=1, maxnreg=32)
print(rows[0]["faults"], aot.faults({**rows[0], "target": "sm_86", "shared": 101_377}))
"""


def test_faults_of_a_compiled_kernel_are_found(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run(tmp_path / "faulty.py")
    found = ["spills", "atomics", "accesses of 2 bytes", "no tensor cores"]
    assert done.stdout == f"{found} {['shared memory', *found[1:]]}\n", done.stderr
