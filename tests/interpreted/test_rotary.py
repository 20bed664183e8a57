"""kernels/rotary.py under Triton's interpreter, on CPU tensors.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1.
"""

import itertools
import random

import pytest
import reference
import torch
from kernel_cases import LAYOUTS, error, random_layout

import kernels
from kernels import eager
from kernels.rotary import rope as rotary

# B, H, Hk, T, D, R
SHAPES = [
    (2, 6, 2, 17, 16, 16),
    (1, 3, 3, 1, 40, 24),
    (1, 5, 1, 130, 64, 64),
    (1, 12, 3, 63, 80, 80),
    (1, 1, 1, 7, 10, 0),
    (3, 4, 4, 33, 128, 2),
    (1, 9, 9, 5, 6, 4),
]
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rotary_inputs(B, H, Hk, T, D, R, per_sequence, dtype=torch.float32):
    """Queries and keys as the model has them, views of (B, T, H D), and angles."""
    q, k = (random_layout("model", B, h, T, D, dtype).requires_grad_() for h in (H, Hk))
    batch = (B,) if per_sequence else ()
    return q, k, torch.rand(*batch, T, R // 2, dtype=torch.float64) * 1000


@pytest.mark.parametrize(
    "shape,dtype,per_sequence",
    # by default every shape once, with the dtypes and kinds of positions in turn
    [
        pytest.param(*case, marks=[] if i % 6 == i // 6 % 6 else pytest.mark.slow)
        for i, case in enumerate(itertools.product(SHAPES, LIMITS, (False, True)))
    ],
    ids=str,
)
def test_rope_against_float64(shape, dtype, per_sequence, rng):
    """Outputs and gradients have at most twice the error of eager.py at that dtype."""
    q, k, angle = rotary_inputs(*shape, per_sequence, dtype)
    cos, sin = (angle.cos() * 1.2).float(), (angle.sin() * 1.2).float()  # an attention factor
    # with the strides that autograd may hand over
    random.seed(int(rng.integers(1 << 30)))
    layout = random.choice((*LAYOUTS, "constant"))
    out_grads = [random_layout(layout, *x.shape, dtype) for x in (q, k)]

    def outputs_and_gradients(rope):
        outputs = rope(q, k, cos, sin)
        return [*outputs, *torch.autograd.grad(outputs, (q, k), out_grads)]

    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = [reference.rotate(x, angle[..., None, :, :], 1.2) for x in wide]
    expected += torch.autograd.grad(expected, wide, [x.double() for x in out_grads])
    found, plain = outputs_and_gradients(rotary), outputs_and_gradients(eager.rope)
    assert all(x.transpose(1, 2).is_contiguous() for x in found)
    for x, by_pytorch, right in zip(found, plain, expected, strict=True):
        right = right.detach()
        assert x.dtype == dtype
        assert error(x, right) <= min(2 * error(by_pytorch, right) + 1e-7, LIMITS[dtype])


def test_a_compiler_gets_the_formula_in_one_graph(rng, monkeypatch):
    """It fuses the formula; the kernel would be opaque to it."""
    q, k, angle = rotary_inputs(2, 4, 2, 9, 16, 12, True)
    cos, sin = angle.cos().float(), angle.sin().float()
    expected = rotary(q, k, cos, sin)

    def rotate(q, k):
        return kernels.rope(q, k, cos, sin)

    monkeypatch.delattr("kernels.rotary.rope")
    with pytest.raises(ImportError):
        rotate(q, k)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    outputs = compiled(q, k)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_unsupported_arguments_are_rejected():
    q, k, angle = rotary_inputs(2, 4, 2, 9, 16, 16, False)
    cos, sin = angle.cos().float(), angle.sin().float()
    for words, arguments in (
        ("float64", (q.double(), k.double(), cos, sin)),
        ("float32 tables", (q, k, cos.half(), sin)),
        ("without gradient", (q, k, cos.clone().requires_grad_(), sin)),
        ("do not fit", (q, k, cos[:5], sin[:5])),
        ("do not fit", (q[..., :8], k[..., :8], cos, sin)),
    ):
        with pytest.raises(ValueError, match=words):
            rotary(*arguments)
