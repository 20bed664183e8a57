"""Kernels whose speed others have published, to say how far a prediction from counts is off.

They are written from the descriptions in Triton's tutorials, with the tile sizes that these give.
predict.py counts them as it counts ours.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    """Add two vectors."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(OUT + i, tl.load(X + i, mask=mask) + tl.load(Y + i, mask=mask), mask=mask)


@triton.jit
def matmul_kernel(
    A, B, C, K, a_m, b_k, c_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile (BM, BN) of C = A B, row-major, all sizes multiples of a tile."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = A + m[:, None] * a_m + k[None, :]
    b_at = B + k[:, None] * b_k + n[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in tl.range(0, K, BK):
        acc = tl.dot(tl.load(a_at), tl.load(b_at), acc)
        a_at += BK
        b_at += BK * b_k
    tl.store(C + m[:, None] * c_m + n[None, :], acc.to(C.dtype.element_ty))


@triton.jit
def attention_kernel(
    Q, K, V, OUT, LSE, T, head, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2's forward pass of BM queries of one head. CAUSAL: every tile has a mask."""
    block = tl.program_id(0)
    offset = tl.program_id(1).to(tl.int64) * head
    r = block * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)
    channel = tl.arange(0, D)
    q = tl.load(Q + offset + r[:, None] * D + channel[None, :])
    q = (q * scale).to(Q.dtype.element_ty)
    acc = tl.zeros([BM, D], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    k_at = K + offset + c[:, None] * D + channel[None, :]
    v_at = V + offset + c[:, None] * D + channel[None, :]
    hi = (block + 1) * BM if CAUSAL else T
    for n0 in tl.range(0, hi, BN):
        s = tl.dot(q, tl.trans(tl.load(k_at)))
        if CAUSAL:
            s = tl.where(r[:, None] >= n0 + c[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        decay = tl.exp2(row_max - new_max)
        p = tl.exp2(s - new_max[:, None])
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        acc = tl.dot(p.to(V.dtype.element_ty), tl.load(v_at), acc * decay[:, None])
        k_at += BN * D
        v_at += BN * D
    acc = acc / row_sum[:, None]
    tl.store(OUT + offset + r[:, None] * D + channel[None, :], acc.to(OUT.dtype.element_ty))
    tl.store(LSE + tl.program_id(1) * T + r, row_max + tl.log2(row_sum))


def launch_add(kernel, config):
    """Launch the addition of a few blocks, in float32: config is (BLOCK, warps, stages)."""
    block, warps, stages = config
    x, y, out = (torch.randn(8 * block) for _ in range(3))
    kernel[(8,)](x, y, out, x.numel(), BLOCK=block, num_warps=warps, num_stages=stages)
    assert torch.equal(out, x + y)


def launch_matmul(kernel, config):
    """Launch one tile of a product: config is (BM, BN, BK, warps, stages)."""
    BM, BN, BK, warps, stages = config
    K = 6 * BK
    a = torch.randn(BM, K).half()
    b = torch.randn(K, BN).half()
    c = torch.empty(BM, BN).half()
    kernel[1, 1](a, b, c, K, K, BN, BN, BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-2, atol=2e-2)


def launch_attention(kernel, config, D, causal):
    """Launch a short attention: config is (BM, BN, warps, stages)."""
    BM, BN, warps, stages = config
    T = 4 * max(BM, BN)
    q, k, v, out = (torch.randn(1, 1, T, D).half() for _ in range(4))
    lse = torch.empty(T)
    scale = D**-0.5 * 1.4426950408889634  # log2(e)
    kernel[T // BM, 1](
        q, k, v, out, lse, T, T * D, scale,
        D=D, BM=BM, BN=BN, CAUSAL=causal, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), is_causal=causal
    )
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
