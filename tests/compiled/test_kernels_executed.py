"""Every kernel as compiled for five architectures, executed on the emulator.

tests/test_kernels.py runs this file in a process of its own. Outputs and gradients are compared
with float64, with the bounds of tests/interpreted, and every launch is checked: see execution.py.
By default a few checks that visit every kernel; --all adds properties and some cases, --exhaustive
every pair of architecture, term, dtype, head dimension, length, mask and layout.
"""

import contextlib
import random
from unittest import mock

import pytest
from checks import CHECKS, FACTORS, N_PAIRWISE, PAIRWISE
from execution import PROJECT, perform
from kernel_cases import at_level
from launchers import install


@pytest.mark.parametrize(
    "name",
    [at_level(check.level, name) for name, check in CHECKS.items()],
)
def test_compiled_kernels_against_float64(name, rng):
    random.seed(int(rng.integers(1 << 30)))
    perform(name, CHECKS[name])


def test_the_sample_of_all_has_every_kernel_bias_and_mask():
    """What runs with --all and not only with --exhaustive; here nothing is executed."""
    launchers = {}
    with contextlib.ExitStack() as stack:
        for module in PROJECT:
            stack.enter_context(mock.patch.dict(vars(module)))
            launchers |= install(module, "sm_80", execute=False)
        missing = set(launchers)
        for check in CHECKS.values():
            if missing and check.level != "exhaustive":
                list(check.compare(PROJECT))
                missing = {name for name in missing if not launchers[name].launches}
    assert not missing
    for factor in FACTORS.keys() - {"D"}:  # 64 and 80 are in other checks
        assert {case[factor] for case in PAIRWISE[:N_PAIRWISE]} == set(FACTORS[factor]), factor
