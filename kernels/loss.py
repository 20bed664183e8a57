"""The cross-entropy of rows of logits in Triton, with its gradient written over the logits.

Of a row with logits x (V,) and target t, with lse = log(sum(exp(x))):

    loss = lse - x[t] + z_loss * lse^2
    gradient = exp(x - lse) * (1 + 2 * z_loss * lse) - onehot(t)

A row without a target, t = -1, has loss 0 and gradient 0.

Why a kernel: in eager PyTorch a chunk of logits makes about nine passes over memory in float32 (the
softmax, its exponential, the target's one, casts). Here it is read twice and written once, in its
own dtype; the second read mostly finds the row in the L2 cache. Compiled, eager.py's formula is
fused as well, so this runs in eager PyTorch only.
"""

import torch
import triton
import triton.language as tl

from .flash import run

BLOCK = 8192  # columns of a step: 98 registers a thread with 8 warps

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _loss_kernel(
    LOGITS, TARGETS, LOSSES, V, z_loss,
    BV: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """The loss of a row; with HAS_GRAD its logits are overwritten by their gradient."""
    n = tl.program_id(0).to(tl.int64)  # int64: a row times V can pass 2^31
    row = LOGITS + n * V
    target = tl.load(TARGETS + n)
    # a running maximum and sum for each column modulo BV, merged once
    tops = tl.full([BV], -1e30, tl.float32)
    totals = tl.zeros([BV], tl.float32)
    for v in tl.range(0, V, BV):
        c = v + tl.arange(0, BV)
        x = tl.load(row + c, mask=c < V, other=float("-inf")).to(tl.float32)
        new_tops = tl.maximum(tops, x)
        totals = totals * tl.exp2((tops - new_tops) * LOG2_E) + tl.exp2((x - new_tops) * LOG2_E)
        tops = new_tops
    # lse = top + log(total), whose parts stay apart: their sum would lose the last bits
    top = tl.max(tops, 0)
    total = tl.log2(tl.sum(totals * tl.exp2((tops - top) * LOG2_E), 0))
    lse = top + total * LN_2
    # a target outside the vocabulary makes the loss NaN, and is not read
    is_scored = target >= 0
    at = tl.load(row + target, mask=is_scored & (target < V), other=float("nan")).to(tl.float32)
    loss = (top - at) + total * LN_2 + z_loss * lse * lse
    tl.store(LOSSES + n, tl.where(is_scored, loss, 0.0))
    if HAS_GRAD:
        tl.debug_barrier()  # all threads have read the target's logit before it is overwritten
        of_lse = 1 + 2 * z_loss * lse
        for v in tl.range(0, V, BV):
            c = v + tl.arange(0, BV)
            x = tl.load(row + c, mask=c < V, other=0.0).to(tl.float32)
            p = tl.exp2((x - top) * LOG2_E - total)
            grad = p * of_lse - (c == target).to(tl.float32)
            grad = tl.where(is_scored, grad, 0.0).to(LOGITS.dtype.element_ty)
            tl.store(row + c, grad, mask=c < V)


def row_losses(logits, targets, z_loss, has_grad):
    """Compute the losses of rows, float32 (N,), and with has_grad their gradient, else None.

    logits (N, V): float16, bfloat16 or float32, contiguous; the gradient takes their memory.
    targets (N,): int64, contiguous; -1 is not scored.
    """
    assert logits.is_contiguous() and targets.is_contiguous(), "rows have to be contiguous"
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    if N:
        sizes = {"BV": min(BLOCK, triton.next_power_of_2(V)), "HAS_GRAD": has_grad}
        arguments = logits, targets, losses, V, float(z_loss)
        run(_loss_kernel, logits, (N, 1, 1), arguments, sizes, num_warps=8)
    return losses, logits if has_grad else None
