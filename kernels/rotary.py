"""Rotary position embedding in Triton: queries and keys in one launch, forward and backward.

Imports only torch and triton: copy this file into your project.

The formula (RoFormer, arXiv 2104.09864, in the half-split layout of GPT-NeoX and Llama): of the D
channels of a head the first R are rotated, channel c < R/2 together with channel c + R/2, by the
angle of the token's position for that pair. Channels from R on pass through:

    a, b = x[..., :R/2], x[..., R/2:R]
    y = cat((a * cos - b * sin, b * cos + a * sin, x[..., R:]), -1)

A rotation is orthogonal, so the backward pass is the same kernel with the angle negated (and the
same attention factor in cos and sin, where there is one).

Why a kernel: the operation reads and writes each number once, with six floating point operations in
between, so memory bandwidth is its limit. Eager PyTorch makes five passes and as many temporaries.
Here a program takes a few tokens, loads their cos and sin once and uses them for a group of heads.
Both halves of a head are loaded and stored as contiguous runs. The arithmetic is float32 whatever
the dtype: in bfloat16, cos and sin would no longer tell distant positions apart.
"""

import torch
import triton
import triton.language as tl

GROUP = 4  # heads of a program


@triton.jit
def _rotate_heads(
    x, y, first, heads, x_h, x_t, y_h, y_t, t, c, cos, sin, T,
    HALF, D: tl.constexpr, REST_P2: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rotate heads first .. first + GROUP - 1 of x (heads, T, D) into y.

    t (BT,): the tokens; cos and sin (BT, R/2): theirs.
    """
    in_range = (t < T)[:, None] & (c < HALF)[None, :]
    for i in tl.static_range(GROUP):
        h = (first + i).to(tl.int64)
        mask = in_range & (h < heads)
        source = x + h * x_h + t[:, None] * x_t + c[None, :]
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        target = y + h * y_h + t[:, None] * y_t + c[None, :]
        tl.store(target, (a * cos - b * sin).to(y.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * cos + a * sin).to(y.dtype.element_ty), mask=mask)
        if REST_P2 > 0:  # the channels that are not rotated
            r = 2 * HALF + tl.arange(0, REST_P2)
            mask = (t < T)[:, None] & (r < D)[None, :] & (h < heads)
            target = y + h * y_h + t[:, None] * y_t + r[None, :]
            source = x + h * x_h + t[:, None] * x_t + r[None, :]
            tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rotate_kernel(
    # pointers
    Q, K, Q_OUT, K_OUT, COS, SIN,
    # sizes
    T, H, HK,
    # strides
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t, c_b, c_t,
    # compile-time flags; _P2: rounded up to a power of two
    D: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr,
    BT: tl.constexpr, GROUP: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate BT tokens of one sequence, for GROUP heads of the queries or of the keys."""
    b = tl.program_id(2).to(tl.int64)
    # int64: a token index times its stride can pass 2^31
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.arange(0, HALF_P2)
    mask = (t < T)[:, None] & (c < HALF)[None, :]
    cos = tl.load(COS + b * c_b + t[:, None] * c_t + c[None, :], mask=mask, other=0.0)  # (BT, R/2)
    sin = tl.load(SIN + b * c_b + t[:, None] * c_t + c[None, :], mask=mask, other=0.0)
    if INVERSE:
        sin = -sin
    group = tl.program_id(1)
    q_groups = tl.cdiv(H, GROUP)
    if group < q_groups:
        _rotate_heads(
            Q + b * q_b, Q_OUT + b * qo_b, group * GROUP, H, q_h, q_t, qo_h, qo_t,
            t, c, cos, sin, T, HALF, D, REST_P2, GROUP,
        )  # fmt: skip
    else:
        _rotate_heads(
            K + b * k_b, K_OUT + b * ko_b, (group - q_groups) * GROUP, HK, k_h, k_t, ko_h, ko_t,
            t, c, cos, sin, T, HALF, D, REST_P2, GROUP,
        )  # fmt: skip


def _empty_outputs(q, k):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("nanolong::rope", mutates_args=())
def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # the kernel needs contiguous channels; a gradient that autograd expanded has stride 0
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = _empty_outputs(q, k)
    B, H, T, D = q.shape
    HK = k.shape[1]
    half = cos.shape[-1]
    rest = D - 2 * half
    if not (B and T and D):
        return q_out, k_out
    cos, sin = (x if x.stride(-1) == 1 or half == 1 else x.contiguous() for x in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    # a tile of 4 KiB of bfloat16: each thread loads and stores 16 bytes at a time
    BT = max(1, 2048 // triton.next_power_of_2(D))
    head_groups = triton.cdiv(H, GROUP) + triton.cdiv(HK, GROUP)
    with torch.cuda.device_of(q):  # Triton launches kernels on the current device
        _rotate_kernel[triton.cdiv(T, BT), head_groups, B](
            q, k, q_out, k_out, cos, sin, T, H, HK,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2),
            D=D, HALF=half, HALF_P2=triton.next_power_of_2(max(half, 1)),
            REST_P2=triton.next_power_of_2(rest) if rest else 0, INVERSE=inverse,
            BT=BT, GROUP=GROUP, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


@_rope.register_fake
def _(q, k, cos, sin, inverse):
    return _empty_outputs(q, k)


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
    factor where there is one. No gradient reaches them.
    Raises ValueError for what the kernel does not support.
    """
    B, _, T, D = q.shape
    keys_fit = k.shape[0] == B and k.shape[2:] == (T, D)
    tables_fit = cos.shape == sin.shape and cos.shape[-2] == T and 2 * cos.shape[-1] <= D
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype:
        problem = (
            f"q is {q.dtype}, k {k.dtype}: use float16, bfloat16 or float32, the same for both"
        )
    elif any(x.dtype != torch.float32 or x.requires_grad for x in (cos, sin)):
        problem = (
            "cos and sin are not float32, or have a gradient: use float32 tables without gradient"
        )
    elif not keys_fit or not tables_fit or cos.dim() == 3 and cos.shape[0] != B:
        shapes = [tuple(x.shape) for x in (q, k, cos, sin)]
        problem = (
            f"q, k, cos and sin {shapes} do not fit: use q (B, H, T, D), k (B, Hk, T, D), and "
            "tables (T, R/2) or (B, T, R/2) with R <= D"
        )
    else:
        return _rope(q, k, cos, sin, False)
    raise ValueError(f"rope: {problem}")
