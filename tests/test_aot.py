"""The kernels as compiled for architectures that are not there: see aot.py."""

import importlib.util
import itertools

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it exists for Linux only)",
)
FAST = ["sm_80 table 64 causal"]
ALL = [
    " ".join(case)
    for case in itertools.product(("sm_80", "sm_90", "sm_100"), ("64", "128"), ("causal", "masked"))
]
ALL.append("sm_90 gates 128 masked")
# other head sizes, of the architecture whose tiles must not miss a fence
ALL += [f"sm_100 none {D} {mask}" for D in (16, 80, 256) for mask in ("causal", "masked")]


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in ALL)])
def test_compiled_kernels_fit_the_hardware(case, run):
    """Little is spilled, shared memory suffices, tensor cores are used, no atomics, and products
    wait for copies.

    In a child process that Triton's compiler, and not its interpreter, can live in.
    """
    done = run("tests/aot.py", *case.split(), env={"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for kernel in ("rotate", "forward", "dq", "dkdv"):
        assert f" | {kernel} | " in done.stdout
