"""kernels/check.py with the real kernels: they pass.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1; on a GPU it runs, too.
tests/test_check.py has the faults that have to be found.
"""

import pytest
import torch
from kernel_cases import in_levels

import kernels
from kernels import check
from model import GPT, GPTConfig

DEVICE = torch.empty(0).device  # of this run
CASES = [("t5", {}, torch.bfloat16)]
WINDOW = {"window": 50, "sinks": 4, "layer_pattern": "FW"}
for dtype in (torch.bfloat16, torch.float32):
    CASES += [(pos, WINDOW, dtype) for pos in ("rope", "t5", "fox")]


def make_model(pos, settings):
    return GPT(GPTConfig(pos=pos, n_head=2, n_kv_head=1, head_dim=16, **settings))


@pytest.fixture(autouse=True)
def leave_triton_on():
    yield
    kernels.use_triton(True)


@pytest.mark.parametrize("pos, settings, dtype", in_levels(CASES, n_fast=0, n_slow=2), ids=str)
def test_kernels_pass(pos, settings, dtype):
    assert check.find_fault(make_model(pos, settings), DEVICE, dtype) == ""
