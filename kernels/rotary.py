"""Rotary position embedding in Triton: queries and keys in one launch, forward and backward. Imports only torch and triton: lift it out as it is.

The formula (RoFormer, arXiv 2104.09864, in the half-split layout of GPT-NeoX and Llama): of a head's D channels the first R are rotated, channel c < R/2
together with channel c + R/2, by the angle that the token's position has for that pair:

    y[c]       = x[c] cos - x[c + R/2] sin
    y[c + R/2] = x[c + R/2] cos + x[c] sin              channels from R on pass through

In plain PyTorch:  a, b = x[..., :R/2], x[..., R/2:R];  y = cat((a cos - b sin, b cos + a sin, x[..., R:]), -1)

A rotation is orthogonal, so the backward pass is the same kernel with the angle negated (and the same factor on cos and sin, where there is one).

Why a kernel: the operation reads and writes each number once and does six floating point operations between, so it is as fast as memory. Eager PyTorch
makes five passes and as many temporaries. Here a program takes a few tokens, loads their cos and sin once, and uses them for a group of heads; both
halves of a head are loaded and stored as contiguous runs (an interleaved layout would stride by two), and the arithmetic is float32 whatever the dtype:
cos and sin rounded to bfloat16 would turn far positions into each other.
"""
import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_heads(x, y, first, heads, x_h, x_t, y_h, y_t, t, c, cos, sin, T, HALF, D: tl.constexpr, REST_P2: tl.constexpr, GROUP: tl.constexpr):
    """Heads first .. first + GROUP - 1 of x (heads, T, D) into y, for the tokens t (BT,) with their cos and sin (BT, R/2)."""
    seen = (t < T)[:, None] & (c < HALF)[None, :]
    for i in tl.static_range(GROUP):
        h = (first + i).to(tl.int64)
        here = seen & (h < heads)
        low = x + h * x_h + t[:, None] * x_t + c[None, :]
        a = tl.load(low, mask=here, other=0.0).to(tl.float32)
        z = tl.load(low + HALF, mask=here, other=0.0).to(tl.float32)
        out = y + h * y_h + t[:, None] * y_t + c[None, :]
        tl.store(out, (a * cos - z * sin).to(y.dtype.element_ty), mask=here)
        tl.store(out + HALF, (z * cos + a * sin).to(y.dtype.element_ty), mask=here)
        if REST_P2 > 0:  # a partial rotary width: the other channels are copied
            r = 2 * HALF + tl.arange(0, REST_P2)
            rest = (t < T)[:, None] & (r < D)[None, :] & (h < heads)
            tl.store(y + h * y_h + t[:, None] * y_t + r[None, :], tl.load(x + h * x_h + t[:, None] * x_t + r[None, :], mask=rest, other=0.0), mask=rest)


@triton.jit
def _rotate_kernel(Q, K, Q_OUT, K_OUT, COS, SIN, T, H, HK,
                   q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t, c_b, c_t,
                   D: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, INVERSE: tl.constexpr):
    """One program: BT tokens of one sequence, and GROUP heads of the queries or, past the queries' groups, of the keys."""
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)  # int64: tokens times their stride pass 2^31
    c = tl.arange(0, HALF_P2)
    seen = (t < T)[:, None] & (c < HALF)[None, :]
    cos = tl.load(COS + b * c_b + t[:, None] * c_t + c[None, :], mask=seen, other=0.0)  # (BT, R/2)
    sin = tl.load(SIN + b * c_b + t[:, None] * c_t + c[None, :], mask=seen, other=0.0)
    if INVERSE:
        sin = -sin
    group, groups = tl.program_id(1), tl.cdiv(H, GROUP)
    if group < groups:
        _rotate_heads(Q + b * q_b, Q_OUT + b * qo_b, group * GROUP, H, q_h, q_t, qo_h, qo_t, t, c, cos, sin, T, HALF, D, REST_P2, GROUP)
    else:
        _rotate_heads(K + b * k_b, K_OUT + b * ko_b, (group - groups) * GROUP, HK, k_h, k_t, ko_h, ko_t, t, c, cos, sin, T, HALF, D, REST_P2, GROUP)


def tile(D):
    """Tokens and heads of a program, and its warps, for a head of D channels: 4 KiB of bfloat16 a tile, so that each thread loads and stores 16 bytes at a time."""
    return dict(BT=max(1, 2048 // triton.next_power_of_2(D)), GROUP=4, num_warps=4)


@torch.library.custom_op("nanolong::rope", mutates_args=())
def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))  # a gradient that autograd expanded has stride 0
    out = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)
    (B, H, T, D), HK, half, step = q.shape, k.shape[1], cos.shape[-1], tile(q.shape[-1])
    if not (B and T and D):
        return out
    cos, sin = (x if x.stride(-1) == 1 or half == 1 else x.contiguous() for x in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rest = D - 2 * half
    grid = (triton.cdiv(T, step["BT"]), triton.cdiv(H, step["GROUP"]) + triton.cdiv(HK, step["GROUP"]), B)
    _rotate_kernel[grid](q, k, *out, cos, sin, T, H, HK, *q.stride()[:3], *k.stride()[:3], *out[0].stride()[:3], *out[1].stride()[:3],
                         cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2), D, half, triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(rest) if rest else 0,
                         INVERSE=inverse, **step)
    return out


@_rope.register_fake
def _(q, k, cos, sin, inverse):
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    return *_rope(dq, dk, cos, sin, not ctx.inverse), None, None, None


_rope.register_autograd(_backward, setup_context=_keep)


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions.

    q (B, H, T, D), k (B, Hk, T, D): float16, bfloat16 or float32, the same, any strides; returned contiguous, in that dtype.
    cos, sin (T, R/2) or (B, T, R/2): float32 tables of position x frequency, times the attention factor where there is one; no gradient reaches them.
    Raises ValueError for what the kernel does not do: other dtypes, tables that want a gradient, shapes that do not fit.
    """
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype:
        raise ValueError(f"rope: queries of {q.dtype} and keys of {k.dtype}; the kernel takes float16, bfloat16 or float32, both the same")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.requires_grad or sin.requires_grad:
        raise ValueError("rope: cos and sin are float32 tables without gradient")
    B, H, T, D = q.shape
    if k.shape[0] != B or k.shape[2:] != (T, D) or cos.shape != sin.shape or cos.shape[-2] != T or cos.dim() == 3 and cos.shape[0] != B or 2 * cos.shape[-1] > D:
        raise ValueError(f"rope: queries {tuple(q.shape)}, keys {tuple(k.shape)} and tables {tuple(cos.shape)}, {tuple(sin.shape)} do not fit")
    return _rope(q, k, cos, sin, False)
