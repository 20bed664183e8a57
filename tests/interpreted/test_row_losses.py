"""kernels/loss.py under Triton's interpreter, on CPU tensors; on a GPU it runs, too.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1.
"""

import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import eager, loss

DEVICE = torch.empty(0).device
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# rows, vocabulary, columns of a step: less than a step, whole steps, and a rest
SIZES = [(3, 2, 8192), (5, 257, 8192), (4, 64, 16), (7, 1009, 64), (2, 8193, 8192)]
CASES = [(*size, dtype, z) for size in SIZES for dtype in LIMITS for z in (0.0, 0.3)]


def random_rows(n, vocab, dtype, rng):
    """Logits, and targets of which some are not scored, the first and last id among them."""
    logits = (torch.randn(n, vocab, device=DEVICE) * 5 + 30).to(dtype)
    targets = torch.randint(0, vocab, (n,), device=DEVICE)
    targets[:3] = torch.tensor([vocab - 1, -1, 0])[:n]
    return logits, targets


# by default every size once, with the dtypes and both z_loss in turn
@pytest.mark.parametrize(
    "n, vocab, block, dtype, z_loss",
    [
        pytest.param(*c, marks=[] if i % 6 == i // 6 else pytest.mark.slow)
        for i, c in enumerate(CASES)
    ],
    ids=str,
)
def test_rows_against_float64(n, vocab, block, dtype, z_loss, monkeypatch, rng):
    monkeypatch.setattr(loss, "BLOCK", block)
    logits, targets = random_rows(n, vocab, dtype, rng)
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, ignore_index=-1, reduction="none")
    losses = losses + z_loss * wide.logsumexp(1).square() * (targets >= 0)
    (expected,) = torch.autograd.grad(losses.sum(), wide)

    found, nothing = loss.row_losses(logits.clone(), targets, z_loss, False)
    assert nothing is None
    again, grad = loss.row_losses(logits, targets, z_loss, True)
    assert torch.equal(found, again) and grad is logits and grad.dtype == dtype
    assert (found.double() - losses).abs().max() <= 1e-5 * losses.abs().max() + 1e-6
    assert (grad.double() - expected).abs().max() <= LIMITS[dtype] * expected.abs().max() + 1e-6
    assert (found[targets < 0] == 0).all() and (grad[targets < 0] == 0).all()


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(logit, rng):
    logits, targets = random_rows(4, 300, torch.float32, rng)
    logits[0, 17] = logit
    targets[3] = 300  # outside the vocabulary
    found, _ = loss.row_losses(logits, targets, 0.0, True)
    assert found.isfinite().tolist() == [False, True, True, False]


@pytest.mark.parametrize("reduction, z_loss", [("mean", 0.0), ("sum", 0.1), ("none", 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_models_loss_uses_the_kernel(dtype, reduction, z_loss, monkeypatch, rng):
    """In several chunks, with weights of tokens: as plain PyTorch, and the gradients too."""
    chunks = [slice(0, 16), slice(16, 32), slice(32, 37)]
    monkeypatch.setattr(eager, "token_chunks", lambda x, weight: chunks)
    x = torch.randn(37, 12, device=DEVICE).requires_grad_()
    weight = torch.randn(101, 12, device=DEVICE).requires_grad_()
    targets = torch.randint(-1, 101, (37,), device=DEVICE)
    token_weight = torch.randn(37, device=DEVICE) if reduction == "none" else 1.0
    calls = []
    kernel = loss.row_losses
    monkeypatch.setattr(loss, "row_losses", lambda *args: calls.append(1) or kernel(*args))
    results = []
    for on_triton in (True, False):
        kernels.use_triton(on_triton)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            losses = kernels.linear_cross_entropy(x, weight, targets, reduction, z_loss)
        total = (losses * token_weight).sum()
        results.append([losses, *torch.autograd.grad(total, (x, weight))])
    kernels.use_triton(True)
    # the backward pass of separate losses computes the logits again
    assert len(calls) == (6 if reduction == "none" else 3)
    for ours, plain in zip(*results, strict=True):
        assert ours.dtype == plain.dtype
        difference = (ours.double() - plain.double()).norm() / plain.double().norm()
        assert difference < (1e-5 if dtype == torch.float32 else 4e-3)
