"""Rotary position embedding in Triton: queries and keys in one launch, forward and backward.

Imports only torch and triton: copy this file into your project.

The formula (RoFormer, arXiv 2104.09864, in the half-split layout of GPT-NeoX and Llama): of the D
channels of a head the first R are rotated, channel c < R/2 together with channel c + R/2, by the
angle of the token's position for that pair. Channels from R on pass through:

    a, b = x[..., :R/2], x[..., R/2:R]
    y = cat((a * cos - b * sin, b * cos + a * sin, x[..., R:]), -1)

A rotation is orthogonal, so the backward pass is the same kernel with the angle negated (and the
same attention factor in cos and sin, if there is one).

Why a kernel: the operation reads and writes each number once, with six floating point operations in
between, so memory bandwidth is its limit. Eager PyTorch makes five passes and as many temporaries.
Here a program takes a few tokens, loads their cos and sin once and uses them for a group of heads.
Both halves of a head are loaded and stored as contiguous runs. The arithmetic is float32 whatever
the dtype: in bfloat16, cos and sin would no longer tell distant positions apart.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP = tl.constexpr(4)  # heads of a program


class Heads(NamedTuple):
    """A tensor (batch, head, token, channel) in memory; its channels are next to each other."""

    ptr: Any
    b: Any  # strides
    h: Any
    t: Any
    n: int  # heads


@triton.jit
def _rotate_heads(
    x, y, b, first, t, cos, sin, T, D: tl.constexpr, HALF: tl.constexpr, REST_P2: tl.constexpr
):
    """Rotate heads first .. first + GROUP - 1 of x into y.

    t (BT,): the tokens; cos and sin (BT, R/2): theirs.
    """
    c = tl.arange(0, cos.shape[1])[None, :]
    in_range = (t < T)[:, None] & (c < HALF)
    for i in tl.static_range(GROUP):
        h = (first + i).to(tl.int64)
        mask = in_range & (h < x.n)
        source = x.ptr + b * x.b + h * x.h + t[:, None] * x.t
        target = y.ptr + b * y.b + h * y.h + t[:, None] * y.t
        left = tl.load(source + c, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + HALF + c, mask=mask, other=0.0).to(tl.float32)
        dtype = y.ptr.dtype.element_ty
        tl.store(target + c, (left * cos - right * sin).to(dtype), mask=mask)
        tl.store(target + HALF + c, (right * cos + left * sin).to(dtype), mask=mask)
        if REST_P2 > 0:  # the channels that are not rotated
            rest = 2 * HALF + tl.arange(0, REST_P2)[None, :]
            mask = (t < T)[:, None] & (rest < D) & (h < x.n)
            tl.store(target + rest, tl.load(source + rest, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rotate_kernel(
    Q, K, Q_OUT, K_OUT, COS, SIN, T,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr,
    BT: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate BT tokens of one sequence, for GROUP heads of the queries or of the keys.

    HALF: R/2. _P2: rounded up to a power of two.
    """
    group = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    # int64: a token index times its stride can pass 2^31
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.arange(0, HALF_P2)[None, :]
    mask = (t < T)[:, None] & (c < HALF)
    at = b * COS.b + t[:, None] * COS.t + c
    cos = tl.load(COS.ptr + at, mask=mask, other=0.0)  # (BT, R/2)
    sin = tl.load(SIN.ptr + at, mask=mask, other=0.0)
    if INVERSE:
        sin = -sin
    q_groups = tl.cdiv(Q.n, GROUP)
    if group < q_groups:
        _rotate_heads(Q, Q_OUT, b, group * GROUP, t, cos, sin, T, D, HALF, REST_P2)
    else:
        first = (group - q_groups) * GROUP
        _rotate_heads(K, K_OUT, b, first, t, cos, sin, T, D, HALF, REST_P2)


def heads_of(x):
    """Heads of a tensor (B, H, T, D), or of a table (T, R/2) or (B, T, R/2)."""
    if x.dim() < 4:
        x = x.expand(1, *x.shape) if x.dim() == 2 else x
        return Heads(x, x.stride(0) if len(x) > 1 else 0, 0, x.stride(1), 1)
    return Heads(x, *x.stride()[:3], x.shape[1])


def empty_outputs(q, k):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("nanolong::rope", mutates_args=())
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # the kernel needs contiguous channels; a gradient that autograd expanded has stride 0
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = empty_outputs(q, k)
    B, H, T, D = q.shape
    half = cos.shape[-1]
    rest = D - 2 * half
    if not (B and T and D):
        return q_out, k_out
    cos, sin = (x if x.stride(-1) == 1 or half == 1 else x.contiguous() for x in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    # a tile of 4 KiB of bfloat16: each thread loads and stores 16 bytes at a time
    BT = max(1, 2048 // triton.next_power_of_2(D))
    head_groups = triton.cdiv(H, GROUP.value) + triton.cdiv(k.shape[1], GROUP.value)
    with torch.cuda.device_of(q):  # Triton launches kernels on the current device
        _rotate_kernel[triton.cdiv(T, BT), head_groups, B](
            *map(heads_of, (q, k, q_out, k_out, cos, sin)), T,
            D=D, HALF=half, HALF_P2=triton.next_power_of_2(max(half, 1)),
            REST_P2=triton.next_power_of_2(rest) if rest else 0,
            BT=BT, INVERSE=inverse, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


@_rope.register_fake
def _(q, k, cos, sin, inverse):
    return empty_outputs(q, k)


def _setup_context(ctx, inputs, output):
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    dq, dk = _rope(dq, dk, cos, sin, not ctx.inverse)
    return dq, dk, None, None, None


_rope.register_autograd(_backward, setup_context=_setup_context)


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions.

    q (B, H, T, D), k (B, Hk, T, D): float16, bfloat16 or float32, the same for both, with any
    strides. Returned contiguous, in that dtype.
    cos, sin (T, R/2) or (B, T, R/2): float32 tables of position x frequency, times the attention
    factor if there is one. No gradient reaches them.
    Raises ValueError for what the kernel does not support.
    """
    B, _, T, D = q.shape
    shapes = [tuple(x.shape) for x in (q, k, cos, sin)]
    require(
        q.dtype in DTYPES and k.dtype == q.dtype,
        f"q is {q.dtype}, k {k.dtype}: use float16, bfloat16 or float32, the same for both",
    )
    require(
        not any(x.dtype != torch.float32 or x.requires_grad for x in (cos, sin)),
        "cos and sin are not float32, or have a gradient: use float32 tables without gradient",
    )
    half = cos.shape[-1]
    tables_fit = cos.shape == sin.shape and cos.shape in ((T, half), (B, T, half)) and 2 * half <= D
    require(
        tables_fit and k.shape[0] == B and k.shape[2:] == (T, D),
        f"q, k, cos and sin {shapes} do not fit: use q (B, H, T, D), k (B, Hk, T, D), and tables "
        "(T, R/2) or (B, T, R/2) with R <= D",
    )
    return _rope(q, k, cos, sin, False)


def require(holds, problem):
    if not holds:
        raise ValueError(f"rope: {problem}")
