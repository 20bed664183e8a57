"""Attention in Triton, forward and backward, with every score term of a position scheme. Imports only torch and triton: lift it out as it is.

The formula, for query i and key j of one head, d = |i - j| their distance by index:

    score(i, j) = scale (q_i k_j)  +  one of  nothing | -slope d | table[min(d, m-1)] | scale (r_i keys[min(d, m-1)])
    out_i       = sum_j softmax_j(score(i, .)) (v_j + values[min(d, m-1)])        over the keys that i may see

In plain PyTorch: kernels/reference.py, attention(). What the terms serve: slopes are ALiBi (fixed or trained); a table over distances is T5, KERPLE, Sandwich;
vectors over distances are Shaw and NEZHA (keys and values, r = q) and Transformer-XL (keys, r = q + w). A scheme hands over the table, whatever its
parameters; the chain from the table to them is autograd's.

Why a kernel: the (T, T) scores never exist, forward (FlashAttention, arXiv 2205.14135) or backward, with a term and its gradient as without. Blocks of BM
queries meet blocks of BN keys, a tile at a time, with the softmax kept as a running maximum and sum. Five things to know before reading:

1. Units. Scores are in log2 (exp2 is the hardware's), so scale and tables arrive multiplied by log2 e; gradients are in natural units.
2. Tiles. Of the key blocks of a query block some are empty and never visited, some are seen in part and pay for a mask, the rest are seen whole. Those wholly
   beyond m - 1 are `far`: there the term is one number (a table's) or one number a row (vectors'), and costs nothing.
3. Diagonals. In a tile the term depends on r - c alone, so a tile needs one line of BM + BN - 1 values: load it once, expand it (_spread). A gather of (BM, BN)
   pointers would do the same, at forty times the loads. For vectors the line is a slab of rows: one product q slab^T, then expanded the same way.
4. The walk (_walk_table, _walk_vectors). The gradient of table[d] is the sum of dS along diagonal d over rows, heads that share it, and batch. A program walks down
   one diagonal of tiles, and over the batch: all its tiles have the same distances, so it adds the dS tiles up in registers and folds the sum
   along diagonals once, at the end. No atomics, so the same bits every time; O(H m) memory; only the diagonals inside m are walked. The far
   tail, table[m-1], is a sum over whole rows, which the dQ kernel has anyway.
5. The refined delta. dS = P (dP - delta) with delta_i = sum_j P dP, which everyone computes as dO_i O_i from an O that was rounded to 16 bits: then the rows of dS do not sum to zero,
   and a bias gradient, which sums thousands of them, is wrong by percents. But what a row sums to is exactly delta's error: the dQ kernel
   adds it up (one addition an element) and corrects delta for the kernels after it, and for its own tails.

Backward is dQ (and delta, and the tails), then dK and dV, then the walk: no atomics anywhere, no scratch beyond O(T). Deterministic: no autotuning, tile sizes from TILES.
"""
import math
from typing import Optional

import torch
import triton
import triton.language as tl

NONE, SLOPES, TABLE, VECTORS = (tl.constexpr(kind) for kind in range(4))  # the score terms


# ---------------------------------------------------------------------------------------------------------------------
# What the kernels share. r counts the queries of a tile and c its keys; i0 and n0 are the indices of the first ones.

@triton.jit
def _rows(X, x_t, n0, n, limit, c, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Rows n0 + n of X (tokens, D): a tile (n, DP), zero beyond D and, where MASKED, beyond the limit."""
    at = X + tl.cast(n0, tl.int64) * x_t + (n[:, None] * x_t + c[None, :])  # int64: tokens times their stride pass 2^31
    if MASKED:
        return tl.load(at, mask=(n0 + n < limit)[:, None] & (c < D)[None, :], other=0.0)
    elif D < DP:
        return tl.load(at, mask=(c < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _slab(X, x_t, base, m, x, c, D: tl.constexpr, DP: tl.constexpr):
    """Vectors of the distances base + x of a tile, clipped to m - 1: (x, DP)."""
    distance = tl.minimum(tl.abs(base + x), m - 1)
    at = X + distance[:, None] * x_t + c[None, :]
    if D < DP:
        return tl.load(at, mask=(c < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _last(X, x_t, m, channel, D: tl.constexpr):
    """The vector of all distances from m - 1 on, float32."""
    return tl.load(X + (m - 1) * x_t + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _last_product(rows, X, x_t, m, channel, D: tl.constexpr):
    """Its product with each row: what a far tile adds."""
    return tl.sum(rows.to(tl.float32) * _last(X, x_t, m, channel, D)[None, :], 1)


@triton.jit
def _spread(line, r, c, BM: tl.constexpr, BN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """From a line of distances to a tile: element (r, c) is element r - c + BN - 1 of the line (W,). A gather from shared memory."""
    x = r[None, :] - c[:, None] if TRANSPOSED else r[:, None] - c[None, :]
    flat = tl.gather(line, tl.reshape(x + (BN - 1), [BM * BN]), 0)
    return tl.reshape(flat, [BN, BM]) if TRANSPOSED else tl.reshape(flat, [BM, BN])


@triton.jit
def _roll(tile, r, c, B: tl.constexpr, TRANSPOSED: tl.constexpr):
    """From keys to distances and back, in a square tile: column c goes to column y = (r - c - 1) mod B, which is its own inverse.

    There the distance is i0 - n0 - (B - 1) + y where y >= r (on and above the tile's diagonal), and B more where y < r: each column is two distances."""
    if TRANSPOSED:
        at = ((r[None, :] - 1 - c[:, None]) & (B - 1)) * B + r[None, :]
    else:
        at = r[:, None] * B + ((r[:, None] - 1 - c[None, :]) & (B - 1))
    return tl.reshape(tl.gather(tl.reshape(tile, [B * B]), tl.reshape(at, [B * B]), 0), [B, B])


@triton.jit
def _products(rows, X, x_t, base, m, r, c, channel, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Of a square tile, rows_i X[min(d, m-1)] for each query and key: two products, with the vectors of the B smaller and of the B larger distances."""
    low, high = _slab(X, x_t, base, m, c, channel, D, DP), _slab(X, x_t, base + B, m, c, channel, D, DP)
    if TRANSPOSED:
        both = tl.where(c[:, None] >= r[None, :], tl.dot(low, tl.trans(rows), input_precision=PRECISION), tl.dot(high, tl.trans(rows), input_precision=PRECISION))
    else:
        both = tl.where(c[None, :] >= r[:, None], tl.dot(rows, tl.trans(low), input_precision=PRECISION), tl.dot(rows, tl.trans(high), input_precision=PRECISION))
    return _roll(both, r, c, B, TRANSPOSED)


@triton.jit
def _add_vectors(acc, weights, X, x_t, base, m, r, c, channel, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """acc + sum_j weights[r, j] X[min(d, m-1)], the same two products backwards."""
    low, high = _slab(X, x_t, base, m, c, channel, D, DP), _slab(X, x_t, base + B, m, c, channel, D, DP)
    rolled = _roll(weights.to(low.dtype), r, c, B, False)
    acc = tl.dot(tl.where(c[None, :] >= r[:, None], rolled, 0.0), low, acc, input_precision=PRECISION)
    return tl.dot(tl.where(c[None, :] >= r[:, None], 0.0, rolled), high, acc, input_precision=PRECISION)


@triton.jit
def _term(s, qr, far, LINE, line_t, m, slope, scale, r, c, channel, i0, n0, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
          KIND: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """The score term of a tile. s: q k^T, (BM, BN) or transposed. Returns (s, shift): the score in log2 is s + shift where _scaled() says so, else s scale + shift;
    shift is a number, or one for each query. far: the table's last value, or r_i keys[m-1] (BM,)."""
    shift = 0.0
    if KIND == SLOPES:
        if CAUSAL and qr.dtype != tl.float32:  # -slope (i - j): what the column adds, and what row and tile add. Exact to 16 bits, and one multiply-add an element
            column = slope * c.to(tl.float32)
            s = s * scale + (column[:, None] if TRANSPOSED else column[None, :])
            shift = slope * (n0 - i0 - r).to(tl.float32)
        else:
            distance = tl.abs((i0 + r)[None, :] - (n0 + c)[:, None]) if TRANSPOSED else tl.abs((i0 + r)[:, None] - (n0 + c)[None, :])
            s = s * scale - slope * distance.to(tl.float32)
    elif KIND == TABLE:
        if FAR:
            shift = far
        else:
            line = tl.load(LINE + tl.minimum(tl.abs(i0 - n0 - (BN - 1) + tl.arange(0, W)), m - 1))
            s = s * scale + _spread(line, r, c, BM, BN, TRANSPOSED)
    elif KIND == VECTORS:
        if FAR:
            shift = far * scale
        else:
            s += _products(qr, LINE, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, TRANSPOSED, PRECISION)
    return s, shift


@triton.jit
def _scaled(KIND: tl.constexpr, FAR: tl.constexpr):
    """Whether _term() has multiplied the products by the scale."""
    return (KIND == SLOPES) or (KIND == TABLE and not FAR)


@triton.jit
def _seen(i, j, POS, p_t, DOC, d_t, queries, Tk, window, sinks, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which keys a masked tile's queries see: queries i (BM,) and keys j (BN,), by index; `queries` is false past the last one."""
    if TRANSPOSED:
        I, J = i[None, :], j[:, None]
    else:
        I, J = i[:, None], j[None, :]
    seen = J < Tk
    if CAUSAL:
        seen = seen & (J <= I)
    if WINDOW:
        if POSITIONS:
            pi = tl.load(POS + i * p_t, mask=queries, other=0)
            pj = tl.load(POS + j * p_t, mask=j < Tk, other=0)
            if TRANSPOSED:
                I, J = pi[None, :], pj[:, None]
            else:
                I, J = pi[:, None], pj[None, :]
        seen = seen & ((tl.abs(I - J) < window) | (J < sinks))
    if DOCS:
        di = tl.load(DOC + i * d_t, mask=queries, other=-1)
        dj = tl.load(DOC + j * d_t, mask=j < Tk, other=-2)
        seen = seen & ((di[None, :] == dj[:, None]) if TRANSPOSED else (di[:, None] == dj[None, :]))
    return seen


@triton.jit
def _beyond(i0, n0, m, B: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether no distance of the B x B tile that holds key n0, of the queries from i0 on, is below m - 1: then the walk leaves it out."""
    d = i0 - n0 // B * B
    beyond = d - (B - 1) >= m - 1
    if not CAUSAL:  # causal: the walk takes every tile at the diagonal
        beyond |= d + B - 1 <= 1 - m
    return beyond


@triton.jit
def _key_blocks(block, b, first, Tk, m, window, sinks, PLAN, plan_b, BM: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PLANNED: tl.constexpr):
    """The key blocks of a query block, in segments: seen in part, 0 sinks, 1 [lo, left) and 2 [right, hi); seen whole, 3 [near, right), and 4 [left, near) from far,
    in steps of B keys."""
    i0 = first + block * BM
    i1 = i0 + BM - 1
    sink = 0
    if PLANNED:
        at = PLAN + b * plan_b + block * 4
        lo, left, right, hi = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        lo, left, right, hi = 0, 0, Tk // BN, tl.cdiv(Tk, BN)
        if CAUSAL:
            hi = tl.cdiv(tl.minimum(i1 + 1, Tk), BN)
            right = tl.minimum(right, (i0 + 1) // BN)
        if WINDOW:
            lo = tl.maximum(i0 - window + 1, 0) // BN
            left = tl.cdiv(tl.maximum(i1 - window + 1, 0), BN)
            if not CAUSAL:
                hi = tl.minimum(hi, tl.cdiv(i1 + window, BN))
                right = tl.minimum(right, (i0 + window) // BN)
            sink = tl.minimum(tl.cdiv(sinks, BN), lo)
        left = tl.minimum(left, hi)
        right = tl.maximum(tl.minimum(right, hi), left)
    near = left
    if KIND >= TABLE:
        near = tl.minimum(tl.maximum(tl.maximum(i0 - m + 2, 0) // B * (B // BN), left), right)
    return (0, lo, right, near, left), (sink, left, hi, right, near)  # where the segments start and end


@triton.jit
def _query_blocks(block, b, first, Tq, Tk, m, window, sinks, PLAN, plan_b, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PLANNED: tl.constexpr):
    """The query blocks of a key block, in segments: they see it in part, 1 [lo, left) and 2 [right, hi); whole, 3 [left, far), and 4 [far, right) from far."""
    n0 = block * BN
    n1 = n0 + BN - 1
    if PLANNED:
        at = PLAN + b * plan_b + block * 4
        lo, left, right, hi = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        lo, left, right, hi = 0, 0, Tq // BM, tl.cdiv(Tq, BM)
        if CAUSAL:
            lo = tl.maximum(n0 - first, 0) // BM
            left = tl.cdiv(tl.maximum(n1 - first, 0), BM)
        if WINDOW:
            hi = tl.where(n0 < sinks, hi, tl.minimum(hi, tl.cdiv(tl.maximum(n1 + window - first, 0), BM)))
            right = tl.minimum(right, tl.maximum(n0 + window - first, 0) // BM)
            if not CAUSAL:
                lo = tl.where(n0 < sinks, 0, tl.maximum(n0 - window + 1 - first, 0) // BM)
                left = tl.cdiv(tl.maximum(n1 - window + 1 - first, 0), BM)
        left = tl.where(n1 < Tk, tl.minimum(left, hi), hi)  # the last keys: every tile pays for a mask
        right = tl.maximum(tl.minimum(right, hi), left)
    far = right
    if KIND >= TABLE:
        far = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(n1 + m - 1 - first, 0), BM), left), right)
    return (0, lo, right, left, far), (0, left, hi, far, right)


# ---------------------------------------------------------------------------------------------------------------------
# Forward: a program for BM queries of one head.

@triton.jit
def _forward_kernel(Q, QR, K, V, LINE, VALUES, POS, DOC, PLAN, OUT, LSE, q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, line_h, line_t, p_b, p_t, d_b, d_t, plan_b,
                    Tq, Tk, G, m, window, sinks, scale,
                    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
                    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr):
    block, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # the longest first
    r, c, channel = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP)
    K, V, POS, DOC = K + b * k_b + h // G * k_h, V + b * v_b + h // G * v_h, POS + b * p_b, DOC + b * d_b
    LINE, VALUES = LINE + h * line_h, VALUES + h * line_h
    m0 = block * BM
    first, queries = Tk - Tq, m0 + r < Tq
    i0 = first + m0
    q = _rows(Q + b * q_b + h * q_h, q_t, m0, r, Tq, channel, D, DP, True)
    qr, far, slope = q, 0.0, 0.0
    if KIND == SLOPES:
        slope = tl.load(LINE)
    elif KIND == TABLE:
        far = tl.load(LINE + m - 1)
    elif KIND == VECTORS:
        if not SAME:
            qr = _rows(QR + b * qr_b + h * qr_h, qr_t, m0, r, Tq, channel, D, DP, True)
        far = _last_product(qr, LINE, line_t, m, channel, D)
    acc, l, tail = tl.zeros([BM, DP], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    top = tl.full([BM], -1e30, tl.float32)  # finite: a row may see nothing of the first tiles, and -inf - -inf is no number
    starts, ends = _key_blocks(block, b, first, Tk, m, window, sinks, PLAN, plan_b, BM, BN, BN, KIND, CAUSAL, WINDOW, POSITIONS or DOCS)
    for segment in tl.static_range(5):
        if (segment == 2 or segment == 3) or (segment == 4 and KIND >= TABLE) or (segment < 2 and (WINDOW or DOCS)):
            for n in tl.range(starts[segment], ends[segment], disable_licm=KIND == VECTORS):
                n0 = n * BN
                k = _rows(K, k_t, n0, c, Tk, channel, D, DP, segment < 3)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                s, shift = _term(s, qr, far, LINE, line_t, m, slope, scale, r, c, channel, i0, n0, D, DP, BM, BN, W, KIND, CAUSAL, segment == 4, False, PRECISION)
                if segment < 3:
                    s = tl.where(_seen(i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks, WINDOW, CAUSAL, POSITIONS, DOCS, False), s, float("-inf"))
                if _scaled(KIND, segment == 4):
                    new = tl.maximum(top, tl.max(s, 1) + shift)
                    p = tl.exp2(s - (new - shift)[:, None])
                else:  # the maximum before the scale: then one multiply-add an element
                    new = tl.maximum(top, tl.max(s, 1) * scale + shift)
                    p = tl.exp2(s * scale - (new - shift)[:, None])
                old = tl.exp2(top - new)
                sums = tl.sum(p, 1)
                top, l = new, l * old + sums
                acc *= old[:, None]
                if HAS_VALUES:
                    tail *= old
                    if segment == 4:
                        tail += sums
                    else:
                        acc = _add_vectors(acc, p, VALUES, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, PRECISION)
                v = _rows(V, v_t, n0, c, Tk, channel, D, DP, segment < 3)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    if HAS_VALUES:
        acc += tail[:, None] * _last(VALUES, line_t, m, channel, D)[None, :]
    acc = acc / l[:, None]
    out = OUT + b * o_b + h * o_h + tl.cast(m0, tl.int64) * o_t + (r[:, None] * o_t + channel[None, :])
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=queries[:, None] & (channel < D)[None, :])
    tl.store(LSE + (b * tl.num_programs(1) + h) * Tq + m0 + r, top + tl.log2(l), mask=queries)


# ---------------------------------------------------------------------------------------------------------------------
# Backward. P is computed anew from the log-sum-exp; dP = dO (v + values); dS = P (dP - delta).

@triton.jit
def _dq_kernel(Q, QR, K, V, LINE, VALUES, POS, DOC, PLAN, OUT, LSE, DOUT, DLSE, DQ, DQR, DELTA, EXTRA, TAIL,
               q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, line_h, line_t, p_b, p_t, d_b, d_t, plan_b,
               Tq, Tk, G, m, window, sinks, scale,
               D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
               WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr, TAILS: tl.constexpr):
    """A program for BM queries of one head: their dQ, the refined delta, and, where TAILS, the row sums that the term's gradient needs:
    of dS times -d (slopes), or of dS and of P over the tiles that the walk leaves out (they belong to a table's or vectors' last entry). BM is the walk's."""
    block, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, c, channel = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP)
    K, V, POS, DOC = K + b * k_b + h // G * k_h, V + b * v_b + h // G * v_h, POS + b * p_b, DOC + b * d_b
    LINE, VALUES = LINE + h * line_h, VALUES + h * line_h
    m0 = block * BM
    first, queries = Tk - Tq, m0 + r < Tq
    i0 = first + m0
    row = (b * tl.num_programs(1) + h) * Tq + m0 + r
    q = _rows(Q + b * q_b + h * q_h, q_t, m0, r, Tq, channel, D, DP, True)
    do = _rows(DOUT + b * do_b + h * do_h, do_t, m0, r, Tq, channel, D, DP, True)
    out = _rows(OUT + b * o_b + h * o_h, o_t, m0, r, Tq, channel, D, DP, True)
    lse = tl.load(LSE + row, mask=queries, other=float("inf"))  # past the last query: P is 0
    dlse = tl.load(DLSE + row, mask=queries, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse
    qr, far, far_value, slope = q, 0.0, 0.0, 0.0
    if KIND == SLOPES:
        slope = tl.load(LINE)
    elif KIND == TABLE:
        far = tl.load(LINE + m - 1)
    elif KIND == VECTORS:
        if not SAME:
            qr = _rows(QR + b * qr_b + h * qr_h, qr_t, m0, r, Tq, channel, D, DP, True)
        far = _last_product(qr, LINE, line_t, m, channel, D)
        if HAS_VALUES:
            far_value = _last_product(do, VALUES, line_t, m, channel, D)
    dq, dqr = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    extra, tail, share, far_sums = -dlse, tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    # extra: what the rows of dS sum to beyond the gradient of the log-sum-exp; it is delta's error
    starts, ends = _key_blocks(block, b, first, Tk, m, window, sinks, PLAN, plan_b, BM, BN, BM, KIND, CAUSAL, WINDOW, POSITIONS or DOCS)
    for segment in tl.static_range(5):
        if (segment == 2 or segment == 3) or (segment == 4 and KIND >= TABLE) or (segment < 2 and (WINDOW or DOCS)):
            for n in tl.range(starts[segment], ends[segment], disable_licm=KIND == VECTORS):
                n0 = n * BN
                k = _rows(K, k_t, n0, c, Tk, channel, D, DP, segment < 3)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                s, shift = _term(s, qr, far, LINE, line_t, m, slope, scale, r, c, channel, i0, n0, D, DP, BM, BN, W, KIND, CAUSAL, segment == 4, False, PRECISION)
                p = tl.exp2((s if _scaled(KIND, segment == 4) else s * scale) - (lse - shift)[:, None])
                if segment < 3:
                    p = tl.where(_seen(i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks, WINDOW, CAUSAL, POSITIONS, DOCS, False), p, 0.0)
                v = _rows(V, v_t, n0, c, Tk, channel, D, DP, segment < 3)
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if HAS_VALUES:
                    if segment == 4:
                        dp += far_value[:, None]
                    else:
                        dp += _products(do, VALUES, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, False, PRECISION)
                ds = p * (dp - delta[:, None])
                sums = tl.sum(ds, 1)
                extra += sums
                if TAILS:
                    if KIND == SLOPES:
                        if CAUSAL:  # -d: what the column adds, and what row and tile add
                            apart = (n0 - i0 - r).to(tl.float32)
                            tail += tl.sum(ds * c.to(tl.float32)[None, :], 1) + apart * sums
                            share += tl.sum(p * c.to(tl.float32)[None, :], 1) + apart * tl.sum(p, 1)
                        else:
                            weight = -tl.abs((i0 + r)[:, None] - (n0 + c)[None, :]).to(tl.float32)
                            tail += tl.sum(ds * weight, 1)
                            share += tl.sum(p * weight, 1)
                    elif segment == 4:
                        tail += sums
                        share += tl.sum(p, 1)
                    elif segment < 3 or not CAUSAL:  # of the whole near tiles there are none, in causal attention
                        beyond = _beyond(i0, n0, m, BM, CAUSAL).to(tl.float32)
                        tail += sums * beyond
                        share += tl.sum(p, 1) * beyond
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
                if KIND == VECTORS:
                    if segment == 4:
                        far_sums += sums
                    else:
                        if SAME:
                            dq = _add_vectors(dq, ds, LINE, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, PRECISION)
                        else:
                            dqr = _add_vectors(dqr, ds, LINE, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, PRECISION)
    if KIND == VECTORS:
        if SAME:
            dq += far_sums[:, None] * _last(LINE, line_t, m, channel, D)[None, :]
        else:
            dqr += far_sums[:, None] * _last(LINE, line_t, m, channel, D)[None, :]
    LN2: tl.constexpr = 0.6931471805599453
    at = b * dq_b + h * dq_h + tl.cast(m0, tl.int64) * dq_t + (r[:, None] * dq_t + channel[None, :])
    here = queries[:, None] & (channel < D)[None, :]
    tl.store(DQ + at, (dq * (scale * LN2)).to(DQ.dtype.element_ty), mask=here)  # scale has log2 e in it
    if KIND == VECTORS and not SAME:
        tl.store(DQR + at, (dqr * (scale * LN2)).to(DQ.dtype.element_ty), mask=here)
    tl.store(DELTA + row, delta + extra, mask=queries)
    if TAILS:
        tl.store(EXTRA + row, tail - extra * share, mask=queries)  # what the refined delta would have given
        tl.store(TAIL + row, share, mask=queries)


@triton.jit
def _dkdv_kernel(Q, QR, K, V, LINE, VALUES, POS, DOC, PLAN, LSE, DOUT, DELTA, DK, DV,
                 q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, line_h, line_t, p_b, p_t, d_b, d_t, plan_b,
                 Tq, Tk, G, m, window, sinks, scale,
                 D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
                 WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr):
    """A program for BN keys of one key head, over the G query heads that share it: dK and dV. Tiles are transposed, (BN, BM), so that P^T and dS^T come as they are used."""
    block, hk, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, c, channel = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, DP)
    POS, DOC = POS + b * p_b, DOC + b * d_b
    n0, first = block * BN, Tk - Tq
    k = _rows(K + b * k_b + hk * k_h, k_t, n0, c, Tk, channel, D, DP, True)
    v = _rows(V + b * v_b + hk * v_h, v_t, n0, c, Tk, channel, D, DP, True)
    dk, dv = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    starts, ends = _query_blocks(block, b, first, Tq, Tk, m, window, sinks, PLAN, plan_b, BM, BN, KIND, CAUSAL, WINDOW, POSITIONS or DOCS)
    for g in tl.range(0, G):
        h = hk * G + g
        q_at, qr_at, do_at, row = Q + b * q_b + h * q_h, QR + b * qr_b + h * qr_h, DOUT + b * do_b + h * do_h, (b * tl.num_programs(1) * G + h) * Tq
        line, values, far, slope = LINE + h * line_h, VALUES + h * line_h, 0.0, 0.0
        if KIND == SLOPES:
            slope = tl.load(line)
        elif KIND == TABLE:
            far = tl.load(line + m - 1)
        for segment in tl.static_range(1, 5):
            if segment < 4 or KIND >= TABLE:
                for n in tl.range(starts[segment], ends[segment], disable_licm=KIND >= TABLE):
                    m0 = n * BM
                    i0, queries = first + m0, m0 + r < Tq
                    q = _rows(q_at, q_t, m0, r, Tq, channel, D, DP, segment < 3)
                    qr = q
                    if KIND == VECTORS and not SAME:
                        qr = _rows(qr_at, qr_t, m0, r, Tq, channel, D, DP, segment < 3)
                    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                    last = far
                    if KIND == VECTORS and segment == 4:
                        last = _last_product(qr, line, line_t, m, channel, D)
                    s, shift = _term(s, qr, last, line, line_t, m, slope, scale, r, c, channel, i0, n0, D, DP, BM, BN, W, KIND, CAUSAL, segment == 4, True, PRECISION)
                    if segment < 3:
                        lse = tl.load(LSE + row + m0 + r, mask=queries, other=float("inf"))
                        delta = tl.load(DELTA + row + m0 + r, mask=queries, other=0.0)
                    else:
                        lse = tl.load(LSE + row + m0 + r)
                        delta = tl.load(DELTA + row + m0 + r)
                    p = tl.exp2((s if _scaled(KIND, segment == 4) else s * scale) - (lse - shift)[None, :])
                    if segment < 3:
                        p = tl.where(_seen(i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks, WINDOW, CAUSAL, POSITIONS, DOCS, True), p, 0.0)
                    do = _rows(do_at, do_t, m0, r, Tq, channel, D, DP, segment < 3)
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                    if HAS_VALUES:
                        if segment == 4:
                            dp += _last_product(do, values, line_t, m, channel, D)[None, :]
                        else:
                            dp += _products(do, values, line_t, i0 - n0 - (BN - 1), m, r, c, channel, D, DP, BN, True, PRECISION)
                    ds = p * (dp - delta[None, :])
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    LN2: tl.constexpr = 0.6931471805599453
    at = b * dk_b + hk * dk_h + tl.cast(n0, tl.int64) * dk_t + (c[:, None] * dk_t + channel[None, :])
    here = (n0 + c < Tk)[:, None] & (channel < D)[None, :]
    tl.store(DK + at, (dk * (scale * LN2)).to(DK.dtype.element_ty), mask=here)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=here)


@triton.jit
def _walk_tile(acc, acc_high, dv, dv_high, Q, QR, K, V, DOUT, LSE, DELTA, LINE, VALUES, POS, DOC, q_t, qr_t, k_t, v_t, do_t, line_t, p_t, d_t, m0, n0, base, r, c, channel, hidden, Tq, Tk, m, window, sinks, scale,
               D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
               WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the walk, queries m0 .. and keys n0 .., into the sums."""
    queries = m0 + r < Tq
    q = _rows(Q, q_t, m0, r, Tq, channel, D, DP, True)
    k = _rows(K, k_t, n0, c, Tk, channel, D, DP, True)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    qr = q
    if KIND == VECTORS:
        if not SAME:
            qr = _rows(QR, qr_t, m0, r, Tq, channel, D, DP, True)
        s += _products(qr, LINE, line_t, base, m, r, c, channel, D, DP, BM, False, PRECISION)
    lse = tl.load(LSE + m0 + r, mask=queries, other=float("inf"))
    delta = tl.load(DELTA + m0 + r, mask=queries, other=0.0)
    p = tl.exp2(s * scale + hidden - lse[:, None])
    if WINDOW or DOCS or not CAUSAL:
        p = tl.where(_seen(Tk - Tq + m0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks, WINDOW, CAUSAL, POSITIONS, DOCS, False), p, 0.0)
    do = _rows(DOUT, do_t, m0, r, Tq, channel, D, DP, True)
    v = _rows(V, v_t, n0, c, Tk, channel, D, DP, True)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if HAS_VALUES:
        dp += _products(do, VALUES, line_t, base, m, r, c, channel, D, DP, BM, False, PRECISION)
    ds = p * (dp - delta[:, None])
    if KIND == TABLE:
        acc += ds
    else:
        low = c[None, :] >= r[:, None]
        rolled = _roll(ds.to(qr.dtype), r, c, BM, False)
        acc = tl.dot(tl.trans(tl.where(low, rolled, 0.0)), qr, acc, input_precision=PRECISION)
        acc_high = tl.dot(tl.trans(tl.where(low, 0.0, rolled)), qr, acc_high, input_precision=PRECISION)
        if HAS_VALUES:
            rolled = _roll(p.to(do.dtype), r, c, BM, False)
            dv = tl.dot(tl.trans(tl.where(low, rolled, 0.0)), do, dv, input_precision=PRECISION)
            dv_high = tl.dot(tl.trans(tl.where(low, 0.0, rolled)), do, dv_high, input_precision=PRECISION)
    return acc, acc_high, dv, dv_high


@triton.jit
def _walk_kernel(Q, QR, K, V, LINE, VALUES, POS, DOC, PLAN, LSE, DOUT, DELTA, DLINE, DVALUES,
                 q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, line_h, line_t, p_b, p_t, d_b, d_t, plan_b,
                 Tq, Tk, B, G, m, window, sinks, scale, e_lo,
                 D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, HAS_VALUES: tl.constexpr, SAME: tl.constexpr, CAUSAL: tl.constexpr,
                 WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr):
    """A program for one diagonal of square tiles of one head: query block n meets key block n - e, down the sequence and over the batch, or a share of them.

    Adds up dS, with everything that depends on the distance held still, and folds it along the diagonals once: DLINE (shares, H, diagonals, W = 2 BM), by r - c + BM - 1.
    With vectors what is summed is a slab: DLINE (..., W, D) adds up dS r_i, and DVALUES P dO_i, each row at its distance."""
    diagonal, h, share = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    e = e_lo + diagonal
    r, c, channel = tl.arange(0, BM), tl.arange(0, BM), tl.arange(0, DP)
    H, first = tl.num_programs(1), Tk - Tq
    base = first + e * BM - (BM - 1)  # the least distance
    n_lo, n_hi = tl.maximum(e, 0), tl.minimum(tl.cdiv(Tq, BM), tl.cdiv(Tk, BM) + e)
    if WINDOW and not POSITIONS:
        if base >= window:  # beyond the window only sinks are seen
            n_hi = tl.minimum(n_hi, e + tl.cdiv(sinks, BM))
    length = tl.maximum(n_hi - n_lo, 0)
    total = length * B  # tiles
    each = tl.cdiv(total, tl.num_programs(2))
    LINE, VALUES = LINE + h * line_h, VALUES + h * line_h
    hidden = tl.zeros([BM, BM], tl.float32)
    if CAUSAL:
        hidden = tl.where(base + (BM - 1) + r[:, None] - c[None, :] >= 0, 0.0, float("-inf"))  # the future
    if KIND == TABLE:
        hidden += _spread(tl.load(LINE + tl.minimum(tl.abs(base + tl.arange(0, W)), m - 1)), r, c, BM, BM, False)
        acc = tl.zeros([BM, BM], tl.float32)
    else:
        acc = tl.zeros([BM, DP], tl.float32)
    acc_high, dv, dv_high = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    for t in tl.range(share * each, tl.minimum(share * each + each, total), disable_licm=KIND == VECTORS):
        b, n = (t // length).to(tl.int64), n_lo + t % length
        if POSITIONS or DOCS:
            at = PLAN + b * plan_b + n * 4
            if (n - e >= tl.load(at)) & (n - e < tl.load(at + 3)):
                acc, acc_high, dv, dv_high = _walk_tile(
                    acc, acc_high, dv, dv_high, Q + b * q_b + h * q_h, QR + b * qr_b + h * qr_h, K + b * k_b + h // G * k_h, V + b * v_b + h // G * v_h, DOUT + b * do_b + h * do_h, LSE + (b * H + h) * Tq,
                    DELTA + (b * H + h) * Tq, LINE, VALUES, POS + b * p_b, DOC + b * d_b, q_t, qr_t, k_t, v_t, do_t, line_t, p_t, d_t, n * BM, (n - e) * BM, base, r, c, channel, hidden, Tq, Tk, m, window, sinks, scale,
                    D, DP, BM, KIND, HAS_VALUES, SAME, CAUSAL, WINDOW, POSITIONS, DOCS, PRECISION)
        else:
            acc, acc_high, dv, dv_high = _walk_tile(
                acc, acc_high, dv, dv_high, Q + b * q_b + h * q_h, QR + b * qr_b + h * qr_h, K + b * k_b + h // G * k_h, V + b * v_b + h // G * v_h, DOUT + b * do_b + h * do_h, LSE + (b * H + h) * Tq,
                DELTA + (b * H + h) * Tq, LINE, VALUES, POS + b * p_b, DOC + b * d_b, q_t, qr_t, k_t, v_t, do_t, line_t, p_t, d_t, n * BM, (n - e) * BM, base, r, c, channel, hidden, Tq, Tk, m, window, sinks, scale,
                D, DP, BM, KIND, HAS_VALUES, SAME, CAUSAL, WINDOW, POSITIONS, DOCS, PRECISION)
    at = ((share * H + h) * tl.num_programs(0) + diagonal) * W + c
    if KIND == TABLE:  # once for all the tiles
        acc, low = _roll(acc, r, c, BM, False), c[None, :] >= r[:, None]
        tl.store(DLINE + at, tl.sum(tl.where(low, acc, 0.0), 0))
        tl.store(DLINE + at + BM, tl.sum(tl.where(low, 0.0, acc), 0))
    else:
        here, at = (channel < D)[None, :], at[:, None] * D + channel[None, :]
        tl.store(DLINE + at, acc * (scale * 0.6931471805599453), mask=here)
        tl.store(DLINE + at + BM * D, acc_high * (scale * 0.6931471805599453), mask=here)
        if HAS_VALUES:
            tl.store(DVALUES + at, dv, mask=here)
            tl.store(DVALUES + at + BM * D, dv_high, mask=here)


# ---------------------------------------------------------------------------------------------------------------------
# Tile sizes, checked in, so that every process of a run computes the same bits: BM x BN, warps and stages of software pipelining, for no term, slopes, a table, vectors.
# By the architecture (sm_86 stands for sm_89 too, and for any other card), bits of an element and head dimension rounded up.
# Chosen by ahead-of-time compilation (results/aot.md): no spills up to D = 128, shared memory within the card's, fewest instructions an element. Not yet by timing.
# A walk's tile and vectors' tiles are square, and the dQ kernel's BM is the walk's.

TILES = {
    "sm_80": {
        (16, 64): dict(forward="128x64x8x3 128x128x8x2 128x64x8x3 32x32x4x2", dq="128x64x8x2 128x64x8x2 64x32x4x2 32x32x8x2", dkdv="64x128x8x2 32x128x8x2 32x64x4x1 32x32x4x2", walk="- - 64x64x4x2 32x32x4x2"),
        (16, 128): dict(forward="64x64x4x3 128x64x8x3 64x64x4x2 32x32x8x2", dq="128x64x8x2 64x64x8x2 64x32x4x2 16x16x8x1", dkdv="32x64x4x1 16x128x8x2 32x32x4x2 32x32x8x2", walk="- - 64x64x4x2 16x16x8x1"),
    },
    "sm_86": {
        (16, 64): dict(forward="128x64x4x3 64x64x4x3 64x64x4x3 32x32x4x1", dq="128x64x8x2 128x64x8x2 64x32x4x2 32x32x4x1", dkdv="32x128x8x2 32x128x8x2 32x64x4x1 32x32x4x2", walk="- - 64x64x4x2 32x32x4x2"),
        (16, 128): dict(forward="128x64x8x2 64x32x4x3 64x64x8x2 32x32x8x1", dq="64x64x8x2 64x64x8x2 32x32x4x2 16x16x8x1", dkdv="64x64x8x2 32x64x4x1 32x64x8x2 32x32x8x2", walk="- - 32x32x4x2 16x16x8x1"),
    },
    "sm_90": {
        (16, 64): dict(forward="128x128x8x2 128x128x8x2 128x128x8x2 64x64x8x1", dq="128x128x8x2 128x64x8x2 64x64x4x3 32x32x4x2", dkdv="64x128x8x2 64x128x8x2 64x128x8x2 32x32x4x2", walk="- - 64x64x4x2 32x32x4x2"),
        (16, 128): dict(forward="128x128x8x2 128x64x8x3 128x64x8x3 32x32x8x1", dq="128x64x8x2 64x32x4x2 64x32x4x2 16x16x8x1", dkdv="32x128x8x2 32x128x8x2 32x64x4x1 32x32x8x2", walk="- - 64x64x4x2 16x16x8x1"),
    },
    "sm_100": {
        (16, 64): dict(forward="128x64x8x3 128x64x8x3 128x64x8x3 64x64x4x1", dq="128x64x8x2 128x64x8x2 64x64x4x2 64x64x8x1", dkdv="64x128x8x2 64x128x8x2 64x128x8x2 64x64x8x2", walk="- - 64x64x4x2 64x64x8x1"),
        (16, 128): dict(forward="64x32x4x3 128x64x8x3 128x64x8x3 64x64x8x1", dq="128x64x8x2 64x64x8x2 64x64x8x2 64x64x8x1", dkdv="64x128x8x2 64x128x8x2 64x128x8x2 64x64x8x1", walk="- - 64x64x8x2 64x64x8x1"),
    },
    "sm_120": {
        (16, 64): dict(forward="128x64x8x3 64x64x4x3 64x64x4x3 32x32x4x1", dq="128x64x8x2 64x64x8x2 32x32x4x2 32x32x4x1", dkdv="32x128x8x2 32x128x8x2 32x64x4x1 32x32x4x2", walk="- - 32x32x4x2 32x32x8x2"),
        (16, 128): dict(forward="64x64x8x2 64x32x4x3 64x32x4x3 32x32x8x1", dq="64x64x8x2 64x32x8x2 64x32x8x2 16x16x8x1", dkdv="32x64x8x2 32x64x8x2 32x32x4x2 32x32x8x2", walk="- - 32x32x4x2 16x16x8x1"),
    },
    "gfx942": {
        (16, 64): dict(forward="128x64x4x1 128x64x4x1 64x64x4x1 32x32x4x1", dq="64x64x4x1 64x64x4x1 64x64x4x1 32x32x4x1", dkdv="64x64x4x1 64x64x4x1 64x64x4x1 32x32x4x1", walk="- - 64x64x4x1 32x32x4x1"),
        (16, 128): dict(forward="64x64x4x1 64x64x4x1 64x64x4x1 64x64x4x1", dq="64x64x4x1 64x32x4x3 64x32x4x1 16x16x8x1", dkdv="32x64x4x1 32x64x4x1 32x64x4x1 32x32x4x1", walk="- - 64x64x4x1 16x16x8x1"),
    },
}
for _name, _tiles in TILES.items():  # wider elements and heads, much alike on all cards for now
    _vectors = {"sm_100": "64x64x8x1", "gfx942": "16x16x4x1"}.get(_name, "16x16x8x1")
    _32, _16 = "32x32x4x1 32x32x4x1 32x32x4x1 ", "16x16x4x1 16x16x4x1 16x16x4x1 "
    _tiles[16, 256] = dict(forward=_32 + "16x16x4x1", dq=_32 + "16x16x4x1", dkdv=_32 + "16x16x4x1", walk=_32 + "16x16x4x1")
    _tiles[32, 64] = dict(forward=_32 + _vectors, dq=_32 + _vectors, dkdv=_32 + _vectors, walk=_32 + _vectors)
    _tiles[32, 128] = dict(forward=_16 + _vectors, dq=_16 + _vectors, dkdv=_16 + _vectors, walk=_16 + _vectors)
    _tiles[32, 256] = dict.fromkeys(("forward", "dq", "dkdv", "walk"), _16 + "16x16x4x1")


def tile(family, itemsize, DP, kind, direction):
    """(BM, BN, warps, stages) of a kernel: direction "forward", "dq", "dkdv" or "walk"."""
    if family == "interpreter":
        return 32, 32, 4, 1
    row = TILES[family][8 * max(itemsize, 2), max(DP, 64)][direction]
    return tuple(map(int, row.split()[kind].split("x")))


def family_of(device):
    """The rows of TILES for a device, and how float32 products are taken: three of tf32, or plainly where there are none."""
    if device.type == "cpu":
        return "interpreter", "ieee"
    if torch.version.hip:
        return "gfx942", "ieee"
    major, minor = torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get((major, minor), "sm_120" if major >= 12 else "sm_86"), "tf32x3"


def plan(docs, positions, window, sinks, Tq, Tk, BM, BN, causal, of_keys=False):
    """Which tiles packed documents or windows over true positions leave, on the device: int32 (1 or B, query blocks, 4), of each query block the key blocks [lo, hi) that
    it sees at all and [left, right) that it sees whole; of_keys: of each key block the query blocks. By the least and largest document and position of each block, so
    a tile is left out only when it is surely empty, and documents and positions of any order are right; of documents in order no empty tile is visited."""
    device, first = (positions if docs is None else docs).device, Tk - Tq
    nq, nk = triton.cdiv(Tq, BM), triton.cdiv(Tk, BN)
    rows, keys = torch.arange(nq * BM, device=device).clamp(max=Tq - 1) + first, torch.arange(nk * BN, device=device).clamp(max=Tk - 1)
    i, j = rows.view(nq, BM), keys.view(nk, BN)
    some = torch.ones(1, nq, nk, dtype=torch.bool, device=device)
    whole = ((torch.arange(1, nq + 1, device=device) * BM <= Tq)[:, None] & (torch.arange(1, nk + 1, device=device) * BN <= Tk))[None]
    if causal:
        some = some & (j[:, 0] <= i[:, -1:])
        whole = whole & (j[:, -1] <= i[:, :1])

    def ends(values):  # least and largest of each block: (1 or B, nq, 1) and (1 or B, 1, nk), twice
        values = values if values.dim() == 2 else values[None]
        q, k = values[:, rows].unflatten(1, (nq, BM)).aminmax(dim=-1), values[:, keys].unflatten(1, (nk, BN)).aminmax(dim=-1)
        return q.min[:, :, None], q.max[:, :, None], k.min[:, None], k.max[:, None]

    if window:
        q_min, q_max, k_min, k_max = ends(torch.arange(Tk, device=device) if positions is None else positions)
        some = some & (((q_min - k_max < window) & (k_min - q_max < window)) | (k_min < sinks))
        whole = whole & (((q_max - k_min < window) & (k_max - q_min < window)) | (k_max < sinks))
    if docs is not None:
        q_min, q_max, k_min, k_max = ends(docs)
        some = some & (k_min <= q_max) & (q_min <= k_max)
        whole = whole & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    whole = whole & some
    if of_keys:
        some, whole = some.mT, whole.mT
    n, at = some.shape[-1], torch.arange(some.shape[-1], device=device)
    hi = torch.where(some, at + 1, 0).amax(-1)
    lo = torch.where(some, at, n).amin(-1).minimum(hi)
    left = torch.where(whole, at, n).amin(-1).minimum(hi)
    right = torch.where(~whole & (at >= left[..., None]), at, n).amin(-1).minimum(hi)
    return torch.stack((lo, left, right, hi), -1).int().contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# The operator.

class _Call:
    """What every launch of one call has in common."""

    def __init__(self, q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale):
        (self.B, self.H, self.Tq, self.D), (self.HK, self.Tk) = q.shape, k.shape[1:3]
        self.q, self.qr, self.k, self.v = q, q if qr is None else qr, k, v
        self.kind = 0 if line is None else VECTORS.value if line.dim() == 3 else TABLE.value if line.dim() == 2 else SLOPES.value
        self.line, self.values = q if line is None else line, q if values is None else values
        self.window, self.sinks, self.causal, self.positions, self.docs = window, sinks, causal, positions if window else None, docs
        self.m = line.shape[1] if self.kind >= TABLE.value else 0
        self.DP = max(16, triton.next_power_of_2(self.D))
        self.family, precision = family_of(q.device)
        self.planned = self.positions is not None or docs is not None
        by_head = line is not None and line.shape[0] > 1
        self.lines = (line.stride(0) if by_head else 0, line.stride(1) if self.kind == VECTORS.value else 1) if line is not None else (0, 1)
        self.numbers = dict(m=self.m, window=window, sinks=sinks, scale=scale * LOG2E)
        self.constants = dict(D=self.D, DP=self.DP, KIND=self.kind, HAS_VALUES=values is not None, SAME=qr is None, CAUSAL=causal, WINDOW=window > 0, POSITIONS=self.positions is not None,
                              DOCS=docs is not None, PRECISION=precision if q.dtype == torch.float32 else "ieee")

    def tile(self, direction):
        BM, BN, warps, stages = tile(self.family, self.q.element_size(), self.DP, self.kind, direction)
        sizes = dict(BM=BM, W=triton.next_power_of_2(BM + BN)) if direction == "walk" else dict(BM=BM, BN=BN, W=triton.next_power_of_2(BM + BN))
        return BM, BN, dict(**sizes, num_warps=warps, num_stages=stages)

    def masks(self, BM, BN, of_keys=False):
        """Positions, documents and the plan of this tile, with their strides: dummies where there are none."""
        pos, doc = self.q if self.positions is None else self.positions, self.q if self.docs is None else self.docs
        blocks = plan(self.docs, self.positions, self.window, self.sinks, self.Tq, self.Tk, BM, BN, self.causal, of_keys) if self.planned else self.q
        return (pos, doc, blocks), (pos.stride(0) if pos.dim() == 2 else 0, pos.stride(-1), doc.stride(0), doc.stride(-1), blocks.stride(0) if self.planned and blocks.shape[0] > 1 else 0)


LOG2E = 1 / math.log(2)


def _empty(x):
    """Room for a result like x (B, H, T, D), laid out (B, T, H, D), as the matrix product after it reads it."""
    B, H, T, D = x.shape
    return torch.empty(B, T, H, D, dtype=x.dtype, device=x.device).transpose(1, 2)


@torch.library.custom_op("nanolong::attention", mutates_args=())
def _attention(q: torch.Tensor, qr: Optional[torch.Tensor], k: torch.Tensor, v: torch.Tensor, line: Optional[torch.Tensor], values: Optional[torch.Tensor],
               positions: Optional[torch.Tensor], docs: Optional[torch.Tensor], window: int, sinks: int, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    q, qr, k, v = (_last_dense(x) for x in (q, qr, k, v))
    out, lse = _empty(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    call = _Call(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale)
    BM, BN, options = call.tile("forward")
    (pos, doc, blocks), strides = call.masks(BM, BN)
    _forward_kernel[triton.cdiv(call.Tq, BM), call.H, call.B](
        q, call.qr, k, v, call.line, call.values, pos, doc, blocks, out, lse, *q.stride()[:3], *call.qr.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *call.lines, *strides,
        call.Tq, call.Tk, call.H // call.HK, **call.numbers, **call.constants, **options)
    return out, lse


@_attention.register_fake
def _(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale):
    return _empty(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@torch.library.custom_op("nanolong::attention_backward", mutates_args=())
def _attention_backward(dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, qr: Optional[torch.Tensor], k: torch.Tensor, v: torch.Tensor,
                        line: Optional[torch.Tensor], values: Optional[torch.Tensor], positions: Optional[torch.Tensor], docs: Optional[torch.Tensor], window: int, sinks: int, causal: bool, scale: float,
                        of_line: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _results(q, qr, k, v, line if of_line else None, values if of_line else None)
    dq, dqr, dk, dv, dline, dvalues = results
    if not out.numel():
        return tuple(x.zero_() for x in results)
    dout, q, qr, k, v = (_last_dense(x) for x in (dout, q, qr, k, v))
    dlse = (dlse * LOG2E).contiguous()  # of the log-sum-exp in log2 to natural units
    call = _Call(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale)
    B, H, HK, Tq, Tk, D, m = call.B, call.H, call.HK, call.Tq, call.Tk, call.D, call.m
    tails = of_line and call.kind != NONE.value
    delta, extra, share = torch.empty_like(lse), torch.empty_like(lse) if tails else lse, torch.empty_like(lse) if tails else lse
    inputs, q_strides, kv_strides = (q, call.qr, k, v, call.line, call.values), (*q.stride()[:3], *call.qr.stride()[:3]), (*k.stride()[:3], *v.stride()[:3])

    BM, BN, options = call.tile("dq")
    masks, strides = call.masks(BM, BN)
    _dq_kernel[triton.cdiv(Tq, BM), H, B](*inputs, *masks, out, lse, dout, dlse, dq, dqr if qr is not None else dq, delta, extra, share, *q_strides, *kv_strides, *out.stride()[:3], *dout.stride()[:3], *dq.stride()[:3],
                                          *call.lines, *strides, Tq, Tk, H // HK, **call.numbers, **call.constants, TAILS=tails, **options)
    BM, BN, options = call.tile("dkdv")
    masks, strides = call.masks(BM, BN, of_keys=True)
    _dkdv_kernel[triton.cdiv(Tk, BN), HK, B](*inputs, *masks, lse, dout, delta, dk, dv, *q_strides, *kv_strides, *dout.stride()[:3], *dk.stride()[:3], *call.lines, *strides,
                                             Tq, Tk, H // HK, **call.numbers, **call.constants, **options)
    if not tails:
        return results
    if call.kind == SLOPES.value:
        dline.copy_(extra.sum((0, 2)) / LOG2E)  # of slopes in log2 units
        return results
    # The tail: distances from m - 1 on. Then the walk along the diagonals inside.
    if call.kind == TABLE.value:
        last = extra.sum((0, 2)), None  # in natural units
    else:
        last = (extra[..., None] * call.qr.float()).sum((0, 2)) * scale, None if values is None else (share[..., None] * dout.float()).sum((0, 2))  # no matrix product, which autocast would round
    BM, _, options = call.tile("walk")
    masks, strides = call.masks(BM, BM)
    first, near = Tk - Tq, m - 1  # the diagonals e = query block - key block whose tiles hold distances of |d| < near
    if window and not sinks and call.positions is None:
        near = min(near, window)
    e_lo = max(-(triton.cdiv(Tk, BM) - 1), -((first + BM - 1) // BM) if causal else -((first + BM - 1 + near - 1) // BM))
    e_hi = min(triton.cdiv(Tq, BM) - 1, (near - 1 - first + BM - 1) // BM)
    diagonals, W = e_hi - e_lo + 1, options["W"]
    folded = [None, None]
    if diagonals > 0:
        shares = max(1, min(512 // (H * diagonals), B * triton.cdiv(Tq, BM)))  # by the shapes alone, so that the same sums come out anywhere
        room = [torch.empty(shares, H, diagonals, W, *((D,) if call.kind == VECTORS.value else ()), dtype=torch.float32, device=q.device) for _ in range(1 + (values is not None))]
        _walk_kernel[diagonals, H, shares](*inputs, *masks, lse, dout, delta, room[0], room[-1], *q_strides, *kv_strides, *dout.stride()[:3], *call.lines, *strides,
                                           Tq, Tk, B, H // HK, **call.numbers, e_lo=e_lo, **call.constants, **options)
        folded = [*room, None][:2]
    for grad, part, end in ((dline, folded[0], last[0]), (dvalues, folded[1], last[1])):
        if end is not None:
            _gather_diagonals(grad, part, end, first + e_lo * BM - (BM - 1), BM, causal)
    return (dq, dqr, dk, dv, dline / LOG2E if call.kind == TABLE.value else dline, dvalues)


def _gather_diagonals(grad, part, last, d0, BM, causal):
    """Into grad (H or 1, m, ...): the walk's lines (shares, H, diagonals, 2 BM, ...) by distance from d0 on, neighbours overlapping by BM, and `last` (H, ...) at m - 1."""
    total = grad.new_zeros(last.shape[0], *grad.shape[1:])
    if part is not None:
        part = part.sum(0)
        line = part.new_zeros(part.shape[0], (part.shape[1] + 1) * BM, *part.shape[3:])
        line[:, :-BM] += part[:, :, :BM].flatten(1, 2)
        line[:, BM:] += part[:, :, BM:].flatten(1, 2)
        sides = [(line[:, max(0, -d0):], max(0, d0))]  # of distance 0 and more, and where that starts
        if not causal:  # and the keys after the query, from distance -1 down
            sides.append((line[:, :max(0, -d0)].flip(1), max(1, 1 - d0 - line.shape[1])))
        for side, start in sides:
            inside = min(side.shape[1], max(0, grad.shape[1] - 1 - start))
            total[:, start:start + inside] += side[:, :inside]
            total[:, -1] += side[:, inside:].sum(1)
    total[:, -1] += last
    grad.copy_(total if grad.shape[0] == total.shape[0] else total.sum(0, keepdim=True))


def _results(q, qr, k, v, line, values):
    wide = lambda x: torch.empty(0 if x is None else x.shape, dtype=torch.float32, device=q.device)  # noqa: E731
    dq = _empty(q)
    return dq, torch.empty(0, dtype=q.dtype, device=q.device) if qr is None else _empty(q), _empty(k), _empty(v), wide(line), wide(values)


@_attention_backward.register_fake
def _(dout, dlse, out, lse, q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale, of_line):
    return _results(q, qr, k, v, line if of_line else None, values if of_line else None)


def _last_dense(x):
    """As the kernels read it: channels side by side (a gradient that autograd expanded has stride 0), tokens less than 2^24 apart, for a block's offsets are 32 bits wide."""
    return x if x is None or x.stride(-1) == 1 and x.stride(2) < 1 << 24 else x.contiguous()


def _keep(ctx, inputs, output):
    *tensors, ctx.window, ctx.sinks, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, dout, dlse):
    q, qr, k, v, line, values, positions, docs, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    of_line = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
    dq, dqr, dk, dv, dline, dvalues = _attention_backward(dout, dlse, out, lse, q, qr, k, v, line, values, positions, docs, ctx.window, ctx.sinks, ctx.causal, ctx.scale, of_line)
    return (dq, None if qr is None else dqr, dk, dv, dline.to(line.dtype) if of_line else None, dvalues.to(values.dtype) if of_line and values is not None else None, *[None] * 6)


_attention.register_autograd(_backward, setup_context=_keep)


def attention(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None, return_lse=False):
    """softmax(q k^T scale + the score term, over the keys that a query may see) (v + the relative values). All gradients but those of positions and docs.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D), 1 <= D <= 256: float16, bfloat16 or float32, all the same, any strides; Tq <= Tk, and the queries are the last Tq of the Tk tokens.
    Returns (B, H, Tq, D), a view of (B, Tq, H, D); with return_lse also the natural log-sum-exp of the scores, float32 (B, H, Tq), which has a gradient too.
    bias       None; slopes (H,): adds -slope d; or a table (H, m): adds table[h, min(d, m - 1)]. Float32. d = |index of the query - index of the key|.
    relative   None; or (keys, values, offsets): keys (H or 1, m, D) add scale (q + w) keys[min(d, m - 1)] and make q k (q + u) k; values, the same shape, or None; offsets (u, w), (H, D) each, or None.
    window     W > 0: a query sees key j only when their positions are less than W apart or j's position is below `sinks`. positions: (Tk,) or (B, Tk) int, by default the indices.
    docs       (B, Tk) int: attention stays within tokens of the same number. Both below 2^31. causal: no key after its query. scale: above 0, default D ** -0.5.
    Raises ValueError for what the kernels do not do: other dtypes, D > 256, a bias together with relative vectors, scale <= 0, shapes that do not fit.
    """
    (B, H, Tq, D), (HK, Tk) = q.shape, k.shape[1:3]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"attention: queries of {q.dtype}, keys of {k.dtype}, values of {v.dtype}; the kernel takes float16, bfloat16 or float32, all the same")
    if k.shape != (B, HK, Tk, D) or v.shape != k.shape or H % HK or not 1 <= D <= 256 or Tq > Tk or max(B, H) > 65535:
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
    positions, docs = (None if x is None else x.int() for x in (positions, docs))
    line = values = qr = None
    if bias is not None:
        line = (bias.float() * LOG2E).contiguous()
    elif relative is not None:
        keys, values, offsets = relative
        if keys.dim() != 3 or keys.shape[0] not in (1, H) or keys.shape[2] != D or not keys.numel() or values is not None and values.shape != keys.shape:
            raise ValueError(f"attention: relative keys {tuple(keys.shape)}{'' if values is None else f' and values {tuple(values.shape)}'}: ({H} or 1, m, {D}) are needed, both the same")
        line, values = keys.to(q.dtype).contiguous(), None if values is None else values.to(q.dtype).contiguous()
        if offsets is not None:
            q, qr = ((q + offset[:, None]).to(q.dtype) for offset in offsets)
    out, lse = _attention(q, qr, k, v, line, values, positions, docs, window, sinks, causal, scale)
    return (out, lse * math.log(2)) if return_lse else out
