"""Every kernel as compiled for five architectures, executed on the emulator.

tests/test_kernels.py runs this file in a process of its own. Outputs and gradients are compared
with float64, with the bounds of tests/interpreted, and every launch is checked: see execution.py.
By default a few checks that visit every kernel; --all adds properties and some cases, --exhaustive
every pair of architecture, term, dtype, head dimension, length, mask and layout.
"""

import random

import pytest
from checks import CHECKS
from execution import perform
from kernel_cases import at_level


@pytest.mark.parametrize(
    "name",
    [at_level(check.level, name) for name, check in CHECKS.items()],
)
def test_compiled_kernels_against_float64(name, rng):
    random.seed(int(rng.integers(1 << 30)))
    perform(name, CHECKS[name])
