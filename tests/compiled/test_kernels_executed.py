"""Every kernel as compiled for five architectures, executed on the emulator.

tests/test_kernels.py runs this file in a process of its own. Outputs and gradients are compared
with float64, with the bounds of tests/interpreted, and every launch is checked: see execution.py.
By default a few checks that visit every kernel; --all adds every pair of architecture, term, dtype,
head dimension, length, mask and layout. NANOLONG_EXECUTED=FILE writes what was executed, as JSON.
"""

import random

import pytest
from checks import CHECKS
from execution import perform


@pytest.mark.parametrize(
    "name",
    [
        name if check.fast else pytest.param(name, marks=pytest.mark.slow)
        for name, check in CHECKS.items()
    ],
)
def test_compiled_kernels_against_float64(name, rng):
    random.seed(int(rng.integers(1 << 30)))
    perform(name, CHECKS[name])
