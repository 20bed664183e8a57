"""Attention of one or a few queries against a long cache, in Triton, with every score term. Imports only torch and triton: lift it out as it is.

The formula is that of kernels/flash.py, and so is the plain reference (kernels/reference.py, attention()); there is no gradient.

Why another kernel: one query meets each key once, so the work is to read the cache, as fast as memory can. flash.py's grid, a program for a block of queries, would
read it with B H programs, a handful. Here the keys are split over programs (flash decoding): each takes a share of the key blocks and leaves a maximum, a sum and an
unnormalised output, and a second, small kernel puts the shares together. The query heads that share a key head are packed as rows of one tile, so the cache
is read once for the group, and a matrix unit does what would otherwise be G dot products.

A single query makes every score term easy: key j stands at one distance i - j, so a table is read backwards, row by row, and relative vectors are a
second, and a third, cache that is read along. Vectors of each head's own (Transformer-XL) leave nothing to pack: there a program takes one head.
How many shares is decided by the shapes alone, so the same call gives the same bits.
"""
import math
from typing import Optional

import torch
import triton
import triton.language as tl

NONE, SLOPES, TABLE, VECTORS = (tl.constexpr(kind) for kind in range(4))  # the score terms


@triton.jit
def _share_kernel(Q, QR, K, V, LINE, VALUES, POS, DOC, LENGTH, OUT, TOP, SUM, q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, line_h, line_t, p_b, p_t, d_b, d_t,
                  Tq, Tk, H, G, m, window, sinks, scale,
                  D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
                  WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr):
    """A program for a share of the keys, PACK query heads that read the same key head, and one query of each."""
    if COUNTED:  # so many of the keys are there: shapes and launch stay the same as a cache fills its room
        Tk = tl.load(LENGTH).to(tl.int32)
    share, group, bt = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, t = (bt // Tq).to(tl.int64), bt % Tq
    r, n, channel = tl.arange(0, ROWS), tl.arange(0, BN), tl.arange(0, DP)
    i, here, wide = Tk - Tq + t, r < PACK, (channel < D)[None, :]
    h = tl.minimum(group * PACK + r, H - 1).to(tl.int64)  # (ROWS,)
    kv = (group * PACK // G).to(tl.int64)
    K, V, POS, DOC = K + b * k_b + kv * k_h, V + b * v_b + kv * v_h, POS + b * p_b, DOC + b * d_b
    LINES = LINE + h * line_h  # a row of lines; vectors are shared by the rows
    LINE, VALUES = LINE + (group * PACK).to(tl.int64) * line_h, VALUES + (group * PACK).to(tl.int64) * line_h
    q = tl.load(Q + b * q_b + t * q_t + h[:, None] * q_h + channel[None, :], mask=here[:, None] & wide, other=0.0)
    qr, slope = q, tl.zeros([ROWS], tl.float32)
    if KIND == SLOPES:
        slope = tl.load(LINES)
    elif KIND == VECTORS and not SAME:
        qr = tl.load(QR + b * qr_b + t * qr_t + h[:, None] * qr_h + channel[None, :], mask=here[:, None] & wide, other=0.0)
    hi = tl.cdiv(i + 1, BN) if CAUSAL else tl.cdiv(Tk, BN)
    lo, sink = hi * 0, hi * 0
    if WINDOW and not POSITIONS:  # the blocks between sinks and window are not visited
        lo = tl.maximum(i - window + 1, 0) // BN
        sink = tl.minimum(tl.cdiv(sinks, BN), lo)
    blocks = sink + hi - lo
    each = tl.cdiv(blocks, tl.num_programs(0))
    acc, l, top = tl.zeros([ROWS, DP], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], -1e30, tl.float32)
    for block in tl.range(share * each, tl.minimum(share * each + each, blocks)):
        n0 = tl.where(block < sink, block, block - sink + lo) * BN
        j = n0 + n
        inside = (j < Tk)[:, None] & wide
        k = tl.load(K + tl.cast(n0, tl.int64) * k_t + (n[:, None] * k_t + channel[None, :]), mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = tl.abs(i - j)
        if KIND == SLOPES:
            s = s * scale - slope[:, None] * distance.to(tl.float32)[None, :]
        elif KIND == TABLE:
            s = s * scale + tl.load(LINES[:, None] + tl.minimum(distance, m - 1)[None, :])
        elif KIND == VECTORS:
            slab = tl.load(LINE + tl.minimum(distance, m - 1)[:, None] * line_t + channel[None, :], mask=wide, other=0.0)
            s = tl.dot(qr, tl.trans(slab), s, input_precision=PRECISION) * scale
        else:
            s = s * scale
        seen = j < Tk
        if CAUSAL:
            seen = seen & (j <= i)
        if WINDOW:
            if POSITIONS:
                where = tl.load(POS + j * p_t, mask=j < Tk, other=0)
                seen = seen & ((tl.abs(tl.load(POS + i * p_t) - where) < window) | (where < sinks))
            else:
                seen = seen & ((distance < window) | (j < sinks))
        if DOCS:
            seen = seen & (tl.load(DOC + j * d_t, mask=j < Tk, other=-1) == tl.load(DOC + i * d_t))
        s = tl.where(seen[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p, old = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        top, l = new, l * old + tl.sum(p, 1)
        v = tl.load(V + tl.cast(n0, tl.int64) * v_t + (n[:, None] * v_t + channel[None, :]), mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
        if HAS_VALUES:
            slab = tl.load(VALUES + tl.minimum(distance, m - 1)[:, None] * line_t + channel[None, :], mask=wide, other=0.0)
            acc = tl.dot(p.to(v.dtype), slab, acc, input_precision=PRECISION)
    at = ((b * H + h) * Tq + t) * tl.num_programs(0) + share
    tl.store(TOP + at, top, mask=here)
    tl.store(SUM + at, l, mask=here)
    tl.store(OUT + at[:, None] * D + channel[None, :], acc, mask=here[:, None] & wide)


@triton.jit
def _join_kernel(PART, TOP, SUM, OUT, LSE, o_b, o_h, o_t, Tq, H, shares, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr):
    """A program for one query of one head: its shares, each weighted by 2^(its maximum - the largest)."""
    t, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    share, channel = tl.arange(0, S), tl.arange(0, DP)
    at = (b * H + h) * Tq + t
    top = tl.load(TOP + at * shares + share, mask=share < shares, other=-1e30)
    best = tl.max(top, 0)
    weight = tl.exp2(top - best)
    total = tl.sum(tl.load(SUM + at * shares + share, mask=share < shares, other=0.0) * weight, 0)
    part = tl.load(PART + (at * shares + share)[:, None] * D + channel[None, :], mask=(share < shares)[:, None] & (channel < D)[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / total
    tl.store(OUT + b * o_b + h * o_h + t * o_t + channel, out.to(OUT.dtype.element_ty), mask=channel < D)
    tl.store(LSE + at, best + tl.log2(total))


def shares_of(Tk, programs, BN):
    """Over how many programs the keys are split: enough for 256 in all, of four key blocks or more each. By the shapes alone."""
    return max(1, min(256 // programs, triton.cdiv(triton.cdiv(Tk, BN), 4), 64))


def tile(itemsize, DP, vectors):
    """Keys in a block, warps and stages: 16 KiB of keys at a time, half where elements are wide, and half where vectors are read along."""
    BN = max(16, min(128, 16384 // (2 if itemsize > 2 else 1) // (2 if vectors else 1) // (DP * itemsize)))
    return BN, 4, 2 if DP * BN * itemsize <= 8192 else 1


@torch.library.custom_op("nanolong::attention_decode", mutates_args=())
def _decode(q: torch.Tensor, qr: Optional[torch.Tensor], k: torch.Tensor, v: torch.Tensor, line: Optional[torch.Tensor], values: Optional[torch.Tensor],
            positions: Optional[torch.Tensor], docs: Optional[torch.Tensor], window: int, sinks: int, causal: bool, scale: float, length: Optional[torch.Tensor] = None) -> tuple[torch.Tensor, torch.Tensor]:
    q, qr, k, v = (x if x is None or x.stride(-1) == 1 and x.stride(2) < 1 << 24 else x.contiguous() for x in (q, qr, k, v))  # a block's offsets are 32 bits wide
    (B, H, Tq, D), (HK, Tk) = q.shape, k.shape[1:3]
    out, lse = _room(q)
    if not out.numel():
        return out, lse
    kind = NONE if line is None else VECTORS if line.dim() == 3 else TABLE if line.dim() == 2 else SLOPES
    by_head = line is not None and line.shape[0] > 1
    pack = 1 if kind is VECTORS and by_head else H // HK
    DP = max(16, triton.next_power_of_2(D))
    BN, warps, stages = tile(q.element_size(), DP, kind is VECTORS)
    shares = shares_of(min(Tk, window + sinks + 2 * BN) if window and positions is None else Tk, H // pack * B * Tq, BN)
    part = torch.empty(B, H, Tq, shares, D, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(B, H, Tq, shares, dtype=torch.float32, device=q.device) for _ in range(2))
    pos, doc, other = q if positions is None else positions, q if docs is None else docs, q if qr is None else qr
    precision = "ieee" if q.dtype != torch.float32 or q.device.type == "cpu" or torch.version.hip else "tf32x3"
    _share_kernel[shares, H // pack, B * Tq](
        q, other, k, v, q if line is None else line, q if values is None else values, pos, doc, q if length is None else length, part, top, total, *q.stride()[:3], *other.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        line.stride(0) if by_head else 0, line.stride(1) if kind is VECTORS else 1, pos.stride(0) if pos.dim() == 2 else 0, pos.stride(-1), doc.stride(0), doc.stride(-1),
        Tq, Tk, H, H // HK, 0 if kind is NONE else line.shape[1] if line.dim() > 1 else 0, window, sinks, scale / math.log(2),
        D, DP, BN, pack, max(16, triton.next_power_of_2(pack)), kind.value, values is not None, qr is None, causal, window > 0, window > 0 and positions is not None, docs is not None, precision, length is not None,
        num_warps=warps, num_stages=stages)
    _join_kernel[Tq, H, B](part, top, total, out, lse, *out.stride()[:3], Tq, H, shares, D, DP, triton.next_power_of_2(shares), num_warps=4)
    return out, lse


@_decode.register_fake
def _(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale, length=None):
    return _room(q)


def _room(q):
    """Room for the output, laid out (B, Tq, H, D), and the log-sum-exp in log2."""
    B, H, Tq, D = q.shape
    return torch.empty(B, Tq, H, D, dtype=q.dtype, device=q.device).transpose(1, 2), torch.empty(B, H, Tq, dtype=torch.float32, device=q.device)


def attention(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None, return_lse=False, length=None):
    """attention() of kernels/flash.py for few queries, without gradient: the same arguments, results and terms.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D), 1 <= D <= 256: float16, bfloat16 or float32, all the same, any strides; the queries are the last Tq of the Tk tokens. Each query reads
    the cache once. length: int64 (1,), only so many of the keys are there, read on the device: the same launch serves a cache that fills its room (a CUDA graph). Returns (B, H, Tq, D); with return_lse also the natural log-sum-exp, float32 (B, H, Tq). Raises ValueError for what the kernel does not do.
    """
    (B, H, Tq, D), (HK, Tk) = q.shape, k.shape[1:3]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"attention: queries of {q.dtype}, keys of {k.dtype}, values of {v.dtype}; the kernel takes float16, bfloat16 or float32, all the same")
    if k.shape != (B, HK, Tk, D) or v.shape != k.shape or H % HK or not 1 <= D <= 256 or Tq > Tk or max(B * Tq, H) > 65535:
        raise ValueError(f"attention: queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit, or D is above 256")
    if bias is not None and relative is not None:
        raise ValueError("attention: the kernel adds a bias or relative vectors, not both at once")
    scale = D ** -0.5 if scale is None else float(scale)
    if not scale > 0:
        raise ValueError(f"attention: scale={scale}; the kernel needs one above 0")
    if bias is not None and (bias.dim() not in (1, 2) or bias.shape[0] != H or not bias.numel()):
        raise ValueError(f"attention: a bias {tuple(bias.shape)} is neither slopes ({H},) nor a table ({H}, m)")
    for name, x, shapes in (("positions", positions, ((Tk,), (B, Tk))), ("docs", docs, ((B, Tk),))):
        if x is not None and (tuple(x.shape) not in shapes or x.is_floating_point()):
            raise ValueError(f"attention: {name} {tuple(x.shape)} of {x.dtype}; integers of shape {' or '.join(map(str, shapes))} are needed")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, *(() if relative is None else (*relative[:2], *(relative[2] or ()))))):
        raise ValueError("attention: this kernel has no gradient; call it under torch.no_grad(), or kernels/flash.py")
    line = values = qr = None
    if bias is not None:
        line = (bias.float() / math.log(2)).contiguous()
    elif relative is not None:
        keys, values, offsets = relative
        if keys.dim() != 3 or keys.shape[0] not in (1, H) or keys.shape[2] != D or not keys.numel() or values is not None and values.shape != keys.shape:
            raise ValueError(f"attention: relative keys {tuple(keys.shape)}{'' if values is None else f' and values {tuple(values.shape)}'}: ({H} or 1, m, {D}) are needed, both the same")
        line, values = keys.to(q.dtype).contiguous(), None if values is None else values.to(q.dtype).contiguous()
        if offsets is not None:
            q, qr = ((q + offset[:, None]).to(q.dtype) for offset in offsets)
    positions, docs = (None if x is None else x.int() for x in (positions, docs))
    out, lse = _decode(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale, length)
    return (out, lse * math.log(2)) if return_lse else out
