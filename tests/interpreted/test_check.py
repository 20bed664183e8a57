"""kernels/check.py with the real kernels: they pass by far, and a broken launch is found.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1; on a GPU it runs, too.
tests/test_check.py has the faults that have to be found.
"""

import pytest
import torch
from kernel_cases import in_levels
from test_check import make_model, wrong_scale

import kernels
from kernels import check, decode

DEVICE = torch.empty(0).device  # of this run
CASES = [
    (pos, dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for pos in ("t5", "rope", "xl", "shaw")
]


@pytest.mark.parametrize("pos, dtype", in_levels(CASES, n_fast=1, n_slow=2), ids=str)
def test_kernels_pass_with_half_of_what_is_allowed(pos, dtype):
    for name, difference, allowed in check.compare(make_model(pos), DEVICE, dtype, True, False):
        assert 2 * difference <= allowed, (name, difference, allowed)


@pytest.mark.slow
def test_a_broken_launch_of_the_decoding_kernel_is_found(monkeypatch):
    right = decode.attention

    def wrong(q, k, v, **options):
        q, k, v, options = wrong_scale(q, k, v, options)
        return right(q, k, v, **options)

    monkeypatch.setattr(decode, "attention", wrong)
    fault = check.find_fault(make_model(), DEVICE, torch.bfloat16, False, False)
    assert fault.startswith("a decoding step differs by ") and kernels.triton_runs(DEVICE)
