"""kernels/rotary.py under Triton's interpreter, on CPU tensors.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1.
"""

import warnings

import pytest
import torch
from kernel_cases import ROTARY_CASES, rotary_errors, rotary_inputs

import kernels
from kernels import eager
from kernels.rotary import _rope
from kernels.rotary import rope as rotary


@pytest.mark.parametrize(
    "shape,dtype,per_sequence",
    # by default every shape once, with the dtypes and kinds of positions in turn
    [
        pytest.param(*case, marks=[] if i % 6 == i // 6 % 6 else pytest.mark.slow)
        for i, case in enumerate(ROTARY_CASES)
    ],
    ids=str,
)
def test_rope_against_float64(shape, dtype, per_sequence, rng):
    """Outputs and gradients have at most twice the error of the reference at that dtype."""
    for name, found, bound in rotary_errors(shape, dtype, per_sequence, rotary):
        assert found <= bound, (name, found, bound)


def expanded(q, k):
    return q.sum() + k.sum()


def concatenated(q, k):
    return torch.cat((q, k), 1).square().sum()


def transposed_and_sliced(q, k):
    return (q.mT @ torch.arange(19.0)).sum() + k[:, :, 3:7, ::2].sum()


@pytest.mark.parametrize("loss", [expanded, concatenated, transposed_and_sliced])
def test_gradients_of_any_strides(loss, rng):
    q, k, angle = rotary_inputs(2, 4, 2, 19, 16, 16, False)
    cos, sin = angle.cos().float(), angle.sin().float()
    grads = torch.autograd.grad(loss(*rotary(q, k, cos, sin)), (q, k))
    expected = torch.autograd.grad(loss(*eager.rope(q, k, cos, sin)), (q, k))
    for a, b in zip(grads, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_operator_passes_opcheck_and_compiles_to_one_graph(rng):
    """With the dispatch in the graph."""
    q, k, angle = rotary_inputs(2, 4, 2, 9, 16, 12, True)
    cos, sin = angle.cos().float(), angle.sin().float()
    results = torch.library.opcheck(_rope, (q, k, cos, sin, False))
    assert set(results.values()) == {"SUCCESS"}

    def rotate(q, k):
        return kernels.rope(q, k, cos, sin)

    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = compiled(q, k)
    for a, b in zip(outputs, rotary(q, k, cos, sin), strict=True):
        assert torch.equal(a, b)


def test_unsupported_arguments_are_rejected():
    q, k, angle = rotary_inputs(2, 4, 2, 9, 16, 16, False)
    cos, sin = angle.cos().float(), angle.sin().float()
    for words, arguments in (
        ("float64", (q.double(), k.double(), cos, sin)),
        ("the same for both", (q, k.half(), cos, sin)),
        ("float32 tables", (q, k, cos.half(), sin)),
        ("without gradient", (q, k, cos.clone().requires_grad_(), sin)),
        ("do not fit", (q, k, cos[:5], sin[:5])),
        ("do not fit", (q, k[:1], cos, sin)),
        ("do not fit", (q[..., :8], k[..., :8], cos, sin)),
    ):
        with pytest.raises(ValueError, match=words):
            rotary(*arguments)
