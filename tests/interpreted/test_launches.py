"""experiments/operators.py under Triton's interpreter: launches that bench.py repeats."""

import pytest
import torch

from experiments import operators
from kernels import flash


def attention_case(rng):
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    return (q, k, v), {"bias": torch.randn(2, 70, requires_grad=True)}


def test_a_launch_is_kept_for_each_kernel(rng):
    arguments, options = attention_case(rng)
    launches = operators.launches_of(arguments, options)
    assert set(launches) == set(flash.KERNELS)
    assert set(operators.launches_of(arguments, {})) == set(flash.KERNELS) - {"sweep"}
    # repeated, the forward pass writes the same output
    out = launches["forward"].arguments[2].ptr.detach()
    expected = out.clone()
    out.data.zero_()
    launches["forward"](num_stages=3, maxnreg=128)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_one_kernel_has_another_tile(kernel, rng):
    arguments, options = attention_case(rng)
    before = flash.launch, flash.tile_for
    now = operators.launches_of(arguments, options)
    changed = operators.launches_of(arguments, options, {kernel: flash.Tile(16, 16, 4, 1)})
    assert before == (flash.launch, flash.tile_for)
    for name in flash.KERNELS:
        sizes = [launches[name].options["BM"] for launches in (now, changed)]
        assert (sizes[1] == 16) == (name == kernel) and sizes[0] == 32
