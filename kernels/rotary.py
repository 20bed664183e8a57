"""Rotary position embedding in Triton: queries and keys in one launch, forward and backward.

Shares with flash.py how a tensor is described: copy it, too, into your project.

The formula (RoFormer, arXiv 2104.09864, in the half-split layout of GPT-NeoX and Llama): of the D
channels of a head the first R are rotated, channel c < R/2 together with channel c + R/2, by the
angle of the token's position for that pair. Channels from R on pass through:

    a, b = x[..., :R/2], x[..., R/2:R]
    y = cat((a * cos - b * sin, b * cos + a * sin, x[..., R:]), -1)

A rotation is orthogonal, so the backward pass is the same kernel with the angle negated (and the
same attention factor in cos and sin, if there is one).

Why a kernel: memory bandwidth is the limit, and eager PyTorch makes five passes over each number.
Here a program takes a few tokens, loads their cos and sin once and uses them for groups of heads.
The arithmetic is float32 whatever the dtype: in bfloat16, cos and sin would no longer tell distant
positions apart.
"""

import torch
import triton
import triton.language as tl

from .flash import DTYPES, Rows, as_rows, distinct, empty_output, operator, require, run

GROUP = tl.constexpr(4)  # heads of a program, of the queries and of the keys


@triton.jit
def _rotate_kernel(
    Q, K, Q_OUT, K_OUT, COS, SIN, H, HK, T,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, BT: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate BT tokens of one sequence, for GROUP heads of the queries and of the keys.

    HALF: R/2. HALF_P2: that, rounded up to a power of two.
    """
    b = tl.program_id(2).to(tl.int64)
    # int64: a token or head index times its stride can pass 2^31
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    first = tl.program_id(1).to(tl.int64) * GROUP
    c = tl.arange(0, HALF_P2)[None, :]
    # the angles, of all heads
    mask = (t < T)[:, None] & (c < HALF)
    at = b * COS.b + t[:, None] * COS.t + c
    cos = tl.load(COS.ptr + at, mask=mask, other=0.0)  # (BT, R/2)
    sin = tl.load(SIN.ptr + at, mask=mask, other=0.0)
    if INVERSE:
        sin = -sin
    for part in tl.static_range(2):
        x, y, n = ((Q, Q_OUT, H), (K, K_OUT, HK))[part]
        dtype = y.ptr.dtype.element_ty
        for i in tl.static_range(GROUP):
            mask = (t < tl.where(first + i < n, T, 0))[:, None]  # no tokens of a head beyond
            source = x.ptr + b * x.b + (first + i) * x.h + t[:, None] * x.t
            target = y.ptr + b * y.b + (first + i) * y.h + t[:, None] * y.t
            # the two halves that are rotated with each other, each a contiguous run
            of_half = mask & (c < HALF)
            left = tl.load(source + c, mask=of_half, other=0.0).to(tl.float32)
            right = tl.load(source + HALF + c, mask=of_half, other=0.0).to(tl.float32)
            tl.store(target + c, (left * cos - right * sin).to(dtype), mask=of_half)
            tl.store(target + HALF + c, (right * cos + left * sin).to(dtype), mask=of_half)
            # the channels that pass through
            if 2 * HALF < D:
                rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(D - 2 * HALF))[None, :]
                of_rest = mask & (rest < D)
                tl.store(target + rest, tl.load(source + rest, mask=of_rest), mask=of_rest)


def empty_outputs(q, k, *others):
    return empty_output(q), empty_output(k)


@operator("nanolong::rope", empty_outputs)
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel needs contiguous channels. A gradient that autograd expanded has stride 0.
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = empty_outputs(q, k)
    B, H, T, D = q.shape
    half = cos.shape[-1]
    if not (B and T and D):
        return q_out, k_out
    # tables of all heads, the same for all sequences or not
    tables = (x.contiguous() for x in (cos, sin))
    tables = (Rows(x, T * half if x.dim() == 3 else 0, 0, half) for x in tables)
    # a tile of 4 KiB of bfloat16: each thread loads and stores 16 bytes at a time
    BT = max(1, 2048 // triton.next_power_of_2(D))
    HK = k.shape[1]
    groups = triton.cdiv(max(H, HK), GROUP.value)
    half_p2 = triton.next_power_of_2(max(half, 1))
    run(
        _rotate_kernel, q, (triton.cdiv(T, BT), groups, B),
        (*map(as_rows, (q, k, q_out, k_out)), *tables, H, HK, T),
        {"D": D, "HALF": half, "HALF_P2": half_p2, "BT": BT, "INVERSE": inverse}, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rope(q, k, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        dq, dk = _rope(dq, dk, *ctx.saved_tensors, True)
        return dq, dk, None, None


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions.

    q (B, H, T, D), k (B, Hk, T, D): float16, bfloat16 or float32, the same for both, with any
    strides. Returned in that dtype, as views of (B, T, H, D).
    cos, sin (T, R/2) or (B, T, R/2): float32 tables of position x frequency, times the attention
    factor if there is one. No gradient reaches them.
    Raises ValueError for what the kernel does not support.
    """
    B, _, T, D = q.shape
    half = cos.shape[-1]
    require(
        q.dtype in DTYPES and k.dtype == q.dtype,
        "q is {}, k {}: use float16, bfloat16 or float32, the same for both",
        *(q.dtype, k.dtype),
    )
    fits = all(x.dtype == torch.float32 and not x.requires_grad for x in (cos, sin))
    require(fits, "cos and sin do not fit: use float32 tables without gradient")
    fits = cos.shape == sin.shape and cos.shape in ((T, half), (B, T, half)) and 2 * half <= D
    require(
        fits and k.shape[0] == B and k.shape[2:] == (T, D),
        "q, k, cos and sin {}, {}, {}, {} do not fit: use q (B, H, T, D), k (B, Hk, T, D), tables "
        "(T, R/2) or (B, T, R/2) with R <= D",
        *(q.shape, k.shape, cos.shape, sin.shape),
    )
    return _Rope.apply(*distinct(q, k, cos, sin))
