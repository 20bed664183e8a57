"""kernels/rotary.py under Triton's interpreter, on CPU tensors: run by tests/test_kernels.py in a process with TRITON_INTERPRET=1."""
import warnings

import pytest
import torch

import kernels
from kernels import reference
from kernels.rotary import _rope
from kernels.rotary import rope as kernel


def case(B, H, Hk, T, D, R, rows, dtype=torch.float32):
    """Queries and keys as the model has them, views of (B, T, H D), and tables with an attention factor."""
    q, k = (torch.randn(B, T, h * D).to(dtype).view(B, T, h, D).transpose(1, 2).requires_grad_() for h in (H, Hk))
    angle = torch.rand(*((B,) if rows else ()), T, R // 2, dtype=torch.float64) * 1000
    return q, k, angle


def turned(x, angle, factor):
    """The formula in complex numbers, float64: pairs (c, c + R/2) times factor e^(i angle)."""
    half = angle.shape[-1]
    angle = angle[:, None] if angle.dim() == 3 else angle
    z = torch.complex(x[..., :half], x[..., half:2 * half]) * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((z.real, z.imag, x[..., 2 * half:]), -1)


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 2, 17, 16, 16), (1, 3, 3, 1, 40, 24), (2, 5, 1, 130, 64, 64), (1, 12, 3, 63, 80, 80), (1, 1, 1, 7, 10, 0), (3, 4, 4, 33, 128, 2), (1, 9, 9, 5, 6, 4)], ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_rope(shape, rows, dtype, limit, rng):
    """Outputs and gradients against complex float64, at every pair of odd sizes; at most twice the error of the reference at that dtype."""
    q, k, angle = case(*shape, rows, dtype)
    cos, sin = (angle.cos() * 1.2).float(), (angle.sin() * 1.2).float()
    got = kernel(q, k, cos, sin)
    outs = [torch.randn_like(y) for y in got]
    grads = torch.autograd.grad(got, (q, k), outs)
    plain = reference.rope(q, k, cos, sin)
    plain_grads = torch.autograd.grad(plain, (q, k), outs)
    for x, y, p, out, g, pg in zip((q, k), got, plain, outs, grads, plain_grads):
        wide = x.detach().double().requires_grad_()
        want = turned(wide, angle, 1.2)
        right, = torch.autograd.grad(want, wide, out.double())
        assert y.dtype == dtype and y.is_contiguous() and g.dtype == dtype
        for mine, his, true in ((y, p, want), (g, pg, right)):
            error, theirs = ((t.double() - true).norm() / true.norm() for t in (mine, his))
            assert error < limit and error <= 2 * theirs + 1e-7


def test_gradients_of_any_strides(rng):
    """Autograd hands over expanded, transposed and cut gradients."""
    q, k, angle = case(2, 4, 2, 19, 16, 16, False)
    cos, sin = angle.cos().float(), angle.sin().float()
    for function in (lambda a, b: a.sum() + b.sum(), lambda a, b: torch.cat((a, b), 1).square().sum(), lambda a, b: (a.mT @ torch.arange(19.0)).sum() + b[:, :, 3:7, ::2].sum()):
        mine = torch.autograd.grad(function(*kernel(q, k, cos, sin)), (q, k))
        right = torch.autograd.grad(function(*reference.rope(q, k, cos, sin)), (q, k))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, right))


def test_opcheck_and_compile(rng):
    """The operator passes torch's own checks, and compiles to one graph with the dispatch in it."""
    q, k, angle = case(2, 4, 2, 9, 16, 12, True)
    cos, sin = angle.cos().float(), angle.sin().float()
    assert set(torch.library.opcheck(_rope, (q, k, cos, sin, False)).values()) == {"SUCCESS"}
    compiled = torch.compile(lambda q, k: kernels.rope(q, k, cos, sin), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = compiled(q, k)
    assert all(torch.equal(mine, right) for mine, right in zip(got, kernel(q, k, cos, sin)))


def test_what_it_does_not_do():
    q, k, angle = case(2, 4, 2, 9, 16, 16, False)
    cos, sin = angle.cos().float(), angle.sin().float()
    for words, args in (("float64", (q.double(), k.double(), cos, sin)), ("both the same", (q, k.half(), cos, sin)), ("float32 tables", (q, k, cos.half(), sin)), ("without gradient", (q, k, cos.requires_grad_(), sin)),
                        ("do not fit", (q, k, cos.detach()[:5], sin[:5])), ("do not fit", (q, k[:1], cos.detach(), sin)), ("do not fit", (q[..., :8], k[..., :8], cos.detach(), sin))):
        with pytest.raises(ValueError, match=words):
            kernel(*args)


def test_a_model_trains_and_decodes_through_the_kernel(make, rng, monkeypatch):
    """Under the interpreter the model's own dispatch takes the kernel: losses and gradients are the reference's."""
    calls, real = [], kernels._triton_runs
    assert real(torch.get_default_device().type, torch.get_default_device().index)
    model, tokens = make(pos="rope", n_kv_head=2, rope_fraction=0.5, head_dim=16), torch.randint(0, 50, (2, 20))
    model(tokens, tokens).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    written = torch.cat(list(model.generate(tokens, 5, temperature=0)), 1)
    monkeypatch.setattr(kernels, "_triton_runs", lambda *device: calls.append(device) or False)
    model.zero_grad()
    model(tokens, tokens).backward()
    assert calls and all(torch.allclose(g, p.grad, rtol=1e-4, atol=1e-6) for g, p in zip(grads, model.parameters()))
    assert torch.equal(torch.cat(list(model.generate(tokens, 5, temperature=0)), 1), written)
