"""Attention in Triton, forward and backward, with the bias of every position scheme.

Imports only torch and triton: copy this file into your project.

For query i and key j of one head, at distance d = |i - j| by index:

    score(i, j) = scale * (q_i . k_j) + bias(i, j)
    out_i       = sum_j softmax_j(score(i, .)) * (v_j + rel_values[min(d, m - 1)])

over the keys that i may see. The bias is one of four kinds:

    NONE      0
    SLOPES    -slope * d                            ALiBi, with fixed or trained slopes
    TABLE     table[min(d, m - 1)]                  T5, KERPLE, Sandwich
    VECTORS   scale * (r_i . keys[min(d, m - 1)])   Shaw and NEZHA: r = q; Transformer-XL: r = q + w

In plain PyTorch: attention() in kernels/reference.py. A scheme passes in its table, whatever its
parameters are; autograd computes the gradient from the table to the parameters.

Why a kernel: the (T, T) scores are never stored, neither forward (FlashAttention, arXiv 2205.14135)
nor backward, with a bias and its gradient as without. Blocks of BM queries meet blocks of BN keys,
one tile at a time, with the softmax kept as a running maximum and a running sum.

Five things to know before reading:

1. Units. Scores are in log2, because exp2 is the hardware's exponential. So the scale, slopes and
   tables arrive multiplied by log2(e). Gradients are in natural units.

2. Segments. Of the key blocks of a query block, some are empty and never visited, some are partly
   visible and need a mask, and the rest are wholly visible. Tiles in which every distance is m - 1
   or more form a segment of their own, CLIPPED: there the bias of a table is a single number, that
   of relative vectors one number a query, and neither costs anything.

3. The bias row. In a tile the bias depends on r - c alone (query r, key c), so BM + BN - 1 values
   describe it. They are loaded once and expanded to the tile (_expand_row). Loading each of the
   BM x BN values by its own pointer gives the same result with forty times the loads. Relative
   vectors are loaded in the same way, multiplied with the queries and then expanded (_skew).

4. The diagonal sweep (_sweep_kernel). The gradient of table[d] is the sum of dS along diagonal d,
   over rows, batch, and heads that share the table. One program visits all tiles of one diagonal of
   tiles. They hold the same distances at the same places, so it adds up the dS tiles in registers
   and sums along their diagonals once, at the end: no atomics, the same bits every time, O(H m)
   memory. Only diagonals with a distance below m - 1 are visited. The kernel of dK and dV computes
   the gradient of the last entry in passing (of vectors, where each query has its own weight: the
   dQ kernel), and that of slopes.

5. The corrected delta. dS = P (dP - delta) with delta_i = sum_j P_ij dP_ij, usually computed as
   dO_i . O_i from an O that was rounded to 16 bits. A bias gradient, which adds up thousands of dS,
   is then wrong by percents. But a row of dS sums to exactly the error of its delta: the dQ kernel
   adds up each row, and corrects delta for the kernels that run after it, and its own row sums.

The backward pass runs dQ (which also corrects delta), then dK and dV, then the diagonal sweep. It
needs no atomics and no scratch memory beyond O(T). Nothing is autotuned: TILES fixes the tile
sizes, so that all processes of a run compute the same bits.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# The kinds of bias.
NONE = tl.constexpr(0)
SLOPES = tl.constexpr(1)
TABLE = tl.constexpr(2)
VECTORS = tl.constexpr(3)

# The segments of blocks that a program visits. Those below WHOLE need a mask.
SINKS = tl.constexpr(0)  # the first keys, where they lie before the window
LEFT_EDGE = tl.constexpr(1)  # partly visible, before the whole ones
RIGHT_EDGE = tl.constexpr(2)  # partly visible, after the whole ones
WHOLE = tl.constexpr(3)  # wholly visible
CLIPPED = tl.constexpr(4)  # wholly visible, and every distance is m - 1 or more

LOG2E = 1 / math.log(2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# -----------------------------------------------------------------------------
# What the kernels share
#
# Pointers are in capitals. BIAS holds the slopes, the table or the relative keys, REL_V the
# relative values, QR the queries that meet the relative keys (where they are not Q). Strides end in
# _b, _h and _t: batch, head and token (for BIAS: distance).
# A tile has BM queries, numbered r (BM,), and BN keys, numbered c (BN,). i0 and n0 are the indices
# of its first query and its first key, d0 is its smallest distance. DP is the head dimension D,
# rounded up to a power of two, and channel is arange(DP). W is BM + BN, rounded up likewise.
# G query heads share a key head.


@triton.jit
def _load_rows(
    X, x_t, n0, n, limit, channel, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows n0 + n of X (tokens, D): (n, DP), zero beyond D and, where MASKED, beyond limit."""
    # int64: a token index times its stride can pass 2^31
    at = X + tl.cast(n0, tl.int64) * x_t + (n[:, None] * x_t + channel[None, :])
    if MASKED:
        return tl.load(at, mask=(n0 + n < limit)[:, None] & (channel < D)[None, :], other=0.0)
    elif D < DP:
        return tl.load(at, mask=(channel < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _load_vectors(X, x_t, d0, m, x, channel, D: tl.constexpr, DP: tl.constexpr):
    """Load the relative vectors of the distances d0 + x, clipped to m - 1: (x, DP)."""
    distance = tl.minimum(tl.abs(d0 + x), m - 1)
    at = X + distance[:, None] * x_t + channel[None, :]
    if D < DP:
        return tl.load(at, mask=(channel < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _clipped_vector(X, x_t, m, channel, D: tl.constexpr):
    """Load the relative vector of all clipped distances: (DP,) float32."""
    return tl.load(X + (m - 1) * x_t + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _clipped_product(rows, X, x_t, m, channel, D: tl.constexpr):
    """Multiply each row with the vector of all clipped distances: (rows,) float32."""
    return tl.sum(rows.to(tl.float32) * _clipped_vector(X, x_t, m, channel, D)[None, :], 1)


@triton.jit
def _difference(rows, columns):
    """Compute rows - columns for a tile, so that the compiler sees what is equal in a thread.

    In the tensor cores' layout a thread's rows differ in the bits 8 and 64, and its columns in all
    bits but 2 and 4: these are known when the kernel is compiled. Added up by themselves they are
    one constant, and elements with the same difference become one load (half of them, or less).
    """
    of_thread = (rows & ~72)[:, None] - (columns & 6)[None, :] + (rows & 64)[:, None]
    return of_thread + ((rows & 8)[:, None] - (columns & ~6)[None, :])


@triton.jit
def _expand_row(row, x):
    """Expand a bias row (W,) to a tile: row[x], for indices x of the shape of the tile."""
    return tl.reshape(tl.gather(row, tl.ravel(x), 0), x.shape)


@triton.jit
def _partial_sums(tile):
    """Sum a tile (rows, columns) to four columns: (rows, 4).

    In the tensor cores' layout four threads share a row. Each sums its own columns, so nothing is
    exchanged in the loop; the four sums are added up after it.
    """
    columns: tl.constexpr = tile.shape[1]
    by_thread = tl.reshape(tile, [tile.shape[0], columns // 8, 4, 2])
    return tl.sum(tl.sum(by_thread, 3), 1)


@triton.jit
def _skew(tile, r, c, B: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Move column c of a square tile to column y = (r - c - 1) mod B, which is its own inverse.

    It leads from keys to distances and back. The distance at column y is d0 + y where y >= r (on
    and above the tile's diagonal), and d0 + y + B where y < r: a column holds two distances.
    """
    if TRANSPOSED:
        at = ((r[None, :] - 1 - c[:, None]) & (B - 1)) * B + r[None, :]
    else:
        at = r[:, None] * B + ((r[:, None] - 1 - c[None, :]) & (B - 1))
    flat = tl.gather(tl.reshape(tile, [B * B]), tl.reshape(at, [B * B]), 0)
    return tl.reshape(flat, [B, B])


@triton.jit
def _vector_products(
    rows, X, x_t, d0, m, r, c, channel,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute rows_r . X[min(d, m - 1)] for each query and key of a square tile: (B, B).

    Two products, with the vectors of the B smaller and of the B larger distances of the tile. A
    triangle chooses between them, and the skew moves the result from distances to keys.
    """
    low = _load_vectors(X, x_t, d0, m, c, channel, D, DP)
    high = _load_vectors(X, x_t, d0 + B, m, c, channel, D, DP)
    if TRANSPOSED:
        by_distance = tl.where(
            c[:, None] >= r[None, :],
            tl.dot(low, tl.trans(rows), input_precision=PRECISION),
            tl.dot(high, tl.trans(rows), input_precision=PRECISION),
        )
    else:
        by_distance = tl.where(
            c[None, :] >= r[:, None],
            tl.dot(rows, tl.trans(low), input_precision=PRECISION),
            tl.dot(rows, tl.trans(high), input_precision=PRECISION),
        )
    return _skew(by_distance, r, c, B, TRANSPOSED)


@triton.jit
def _add_vectors(
    acc, weights, X, x_t, d0, m, r, c, channel,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute acc + sum_c weights[r, c] X[min(d, m - 1)]: _vector_products() backwards."""
    low = _load_vectors(X, x_t, d0, m, c, channel, D, DP)
    high = _load_vectors(X, x_t, d0 + B, m, c, channel, D, DP)
    by_distance = _skew(weights.to(low.dtype), r, c, B, False)
    low_part = tl.where(c[None, :] >= r[:, None], by_distance, 0.0)
    acc = tl.dot(low_part, low, acc, input_precision=PRECISION)
    high_part = tl.where(c[None, :] >= r[:, None], 0.0, by_distance)
    return tl.dot(high_part, high, acc, input_precision=PRECISION)


@triton.jit
def _add_bias(
    s, qr, clipped_bias, BIAS, bias_t, m, slope, scale, r, c, channel, i0, n0,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, IS_CLIPPED: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the bias to s = q k^T, a tile (BM, BN), or (BN, BM) where TRANSPOSED.

    clipped_bias: the table's last value, or r_i . keys[m - 1] for each query (BM,).
    Returns (s, shift). The score in log2 units is s + shift where _is_scaled(), otherwise
    s * scale + shift. shift is a number, or one for each query.
    """
    shift = 0.0
    if KIND == SLOPES:
        if CAUSAL and qr.dtype != tl.float32:
            # -slope (i - j), split into what a column adds and what row and tile add: one
            # multiply-add an element, exact to 16 bits
            column = slope * c.to(tl.float32)
            s = s * scale + (column[:, None] if TRANSPOSED else column[None, :])
            shift = slope * (n0 - i0 - r).to(tl.float32)
        else:
            if TRANSPOSED:
                distance = tl.abs((i0 + r)[None, :] - (n0 + c)[:, None])
            else:
                distance = tl.abs((i0 + r)[:, None] - (n0 + c)[None, :])
            s = s * scale - slope * distance.to(tl.float32)
    elif KIND == TABLE:
        if IS_CLIPPED:
            shift = clipped_bias
        else:
            distance = tl.abs(i0 - n0 - (BN - 1) + tl.arange(0, W))
            bias_row = tl.load(BIAS + tl.minimum(distance, m - 1))
            x = -_difference(c, r) if TRANSPOSED else _difference(r, c)
            s = s * scale + _expand_row(bias_row, x + (BN - 1))
    elif KIND == VECTORS:
        if IS_CLIPPED:
            shift = clipped_bias * scale
        else:
            s += _vector_products(
                qr, BIAS, bias_t, i0 - n0 - (BN - 1), m, r, c, channel,
                D, DP, BN, TRANSPOSED, PRECISION,
            )  # fmt: skip
    return s, shift


@triton.jit
def _is_scaled(KIND: tl.constexpr, IS_CLIPPED: tl.constexpr):
    """Whether _add_bias() has multiplied s by the scale."""
    return (KIND == SLOPES) or (KIND == TABLE and not IS_CLIPPED)


@triton.jit
def _visible(
    i, j, POS, p_t, DOC, d_t, queries, Tk, window, sinks,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The mask of a tile: which keys j (BN,) each query i (BM,) sees, both by index.

    queries (BM,) is false past the last query.
    """
    if TRANSPOSED:
        at_i, at_j = i[None, :], j[:, None]
    else:
        at_i, at_j = i[:, None], j[None, :]
    visible = at_j < Tk
    if CAUSAL:
        visible = visible & (at_j <= at_i)
    if WINDOW:
        if POSITIONS:
            pi = tl.load(POS + i * p_t, mask=queries, other=0)
            pj = tl.load(POS + j * p_t, mask=j < Tk, other=0)
            if TRANSPOSED:
                at_i, at_j = pi[None, :], pj[:, None]
            else:
                at_i, at_j = pi[:, None], pj[None, :]
        visible = visible & ((tl.abs(at_i - at_j) < window) | (at_j < sinks))
    if DOCS:
        di = tl.load(DOC + i * d_t, mask=queries, other=-1)
        dj = tl.load(DOC + j * d_t, mask=j < Tk, other=-2)
        same = (di[None, :] == dj[:, None]) if TRANSPOSED else (di[:, None] == dj[None, :])
        visible = visible & same
    return visible


@triton.jit
def _outside_sweep(i0, n0, m, B: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether the diagonal sweep leaves out its B x B tile of queries from i0, keys from n0.

    It does where no distance in that tile is below m - 1. n0: a number, or one for each key.
    """
    d = i0 - n0
    outside = d - (B - 1) >= m - 1
    if not CAUSAL:  # causal: the sweep visits every tile at the main diagonal
        outside |= d + B - 1 <= 1 - m
    return outside


@triton.jit
def _segment_exists(
    segment: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr
):
    """Whether a query block can have key blocks in a segment."""
    always = (segment == RIGHT_EDGE) or (segment == WHOLE)
    return (
        always
        or (segment == CLIPPED and KIND >= TABLE)
        or (segment < RIGHT_EDGE and (WINDOW or DOCS))
    )


@triton.jit
def _key_blocks(
    block, b, q_start, Tk, m, window, sinks, BLOCK_MASK, mask_b,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_BLOCK_MASK: tl.constexpr,
):  # fmt: skip
    """The key blocks that a query block visits: where each segment starts, and where it ends.

    Of key blocks [lo, hi) some keys are visible, of [left, right) all. So the segments are SINKS,
    LEFT_EDGE [lo, left), RIGHT_EDGE [right, hi), CLIPPED [left, near) and WHOLE [near, right).
    """
    i0 = q_start + block * BM
    i1 = i0 + BM - 1
    sink_end = 0
    if HAS_BLOCK_MASK:
        at = BLOCK_MASK + b * mask_b + block * 4
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
            sink_end = tl.minimum(tl.cdiv(sinks, BN), lo)
        left = tl.minimum(left, hi)
        right = tl.maximum(tl.minimum(right, hi), left)
    near = left
    if KIND >= TABLE:
        clipped_end = tl.maximum(i0 - m + 2, 0) // BN
        near = tl.minimum(tl.maximum(clipped_end, left), right)
    return (0, lo, right, near, left), (sink_end, left, hi, right, near)


@triton.jit
def _query_blocks(
    block, b, q_start, Tq, Tk, m, window, sinks, BLOCK_MASK, mask_b,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_BLOCK_MASK: tl.constexpr,
):  # fmt: skip
    """The query blocks that a key block visits: where each segment starts, and where it ends.

    Query blocks [lo, hi) see some of the keys, [left, right) all. So the segments are
    LEFT_EDGE [lo, left), RIGHT_EDGE [right, hi), WHOLE [left, near) and CLIPPED [near, right).
    """
    n0 = block * BN
    n1 = n0 + BN - 1
    if HAS_BLOCK_MASK:
        at = BLOCK_MASK + b * mask_b + block * 4
        lo, left, right, hi = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        lo, left, right, hi = 0, 0, Tq // BM, tl.cdiv(Tq, BM)
        if CAUSAL:
            lo = tl.maximum(n0 - q_start, 0) // BM
            left = tl.cdiv(tl.maximum(n1 - q_start, 0), BM)
        if WINDOW:
            has_sinks = n0 < sinks
            window_end = tl.cdiv(tl.maximum(n1 + window - q_start, 0), BM)
            hi = tl.where(has_sinks, hi, tl.minimum(hi, window_end))
            right = tl.minimum(right, tl.maximum(n0 + window - q_start, 0) // BM)
            if not CAUSAL:
                lo = tl.where(has_sinks, 0, tl.maximum(n0 - window + 1 - q_start, 0) // BM)
                left = tl.cdiv(tl.maximum(n1 - window + 1 - q_start, 0), BM)
        left = tl.where(n1 < Tk, tl.minimum(left, hi), hi)  # the last keys: every tile needs a mask
        right = tl.maximum(tl.minimum(right, hi), left)
    near = right
    if KIND >= TABLE:
        clipped_start = tl.cdiv(tl.maximum(n1 + m - 1 - q_start, 0), BM)
        near = tl.minimum(tl.maximum(clipped_start, left), right)
    return (0, lo, right, left, near), (0, left, hi, near, right)


# -----------------------------------------------------------------------------
# Forward: one program for BM queries of one head


@triton.jit
def _forward_kernel(
    # pointers
    Q, QR, K, V, BIAS, REL_V, POS, DOC, BLOCK_MASK, OUT, LSE,
    # strides
    q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    bias_h, bias_t, p_b, p_t, d_b, d_t, mask_b,
    # sizes
    Tq, Tk, G, m, window, sinks, scale,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp (log2 units) of BM queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BM)
    c = tl.arange(0, BN)
    channel = tl.arange(0, DP)
    K = K + b * k_b + h // G * k_h
    V = V + b * v_b + h // G * v_h
    POS = POS + b * p_b
    DOC = DOC + b * d_b
    BIAS = BIAS + h * bias_h
    REL_V = REL_V + h * bias_h

    # the queries, and what their bias needs
    m0 = block * BM
    q_start = Tk - Tq
    queries = m0 + r < Tq
    i0 = q_start + m0
    q = _load_rows(Q + b * q_b + h * q_h, q_t, m0, r, Tq, channel, D, DP, True)
    qr, clipped_bias, slope = q, 0.0, 0.0
    if KIND == SLOPES:
        slope = tl.load(BIAS)
    elif KIND == TABLE:
        clipped_bias = tl.load(BIAS + m - 1)
    elif KIND == VECTORS:
        if not QR_IS_Q:
            qr = _load_rows(QR + b * qr_b + h * qr_h, qr_t, m0, r, Tq, channel, D, DP, True)
        clipped_bias = _clipped_product(qr, BIAS, bias_t, m, channel, D)

    acc = tl.zeros([BM, DP], tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    clipped_mass = tl.zeros([BM], tl.float32)  # the probability mass of clipped tiles
    # Finite: a row may see nothing of its first tiles, and -inf - -inf is NaN.
    row_max = tl.full([BM], -1e30, tl.float32)
    starts, ends = _key_blocks(
        block, b, q_start, Tk, m, window, sinks, BLOCK_MASK, mask_b,
        BM, BN, KIND, CAUSAL, WINDOW, POSITIONS or DOCS,
    )  # fmt: skip
    for segment in tl.static_range(5):
        if _segment_exists(segment, KIND, WINDOW, DOCS):
            for n in tl.range(starts[segment], ends[segment], disable_licm=KIND == VECTORS):
                # scores of the tile
                n0 = n * BN
                k = _load_rows(K, k_t, n0, c, Tk, channel, D, DP, segment < WHOLE)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                s, shift = _add_bias(
                    s, qr, clipped_bias, BIAS, bias_t, m, slope, scale, r, c, channel, i0, n0,
                    D, DP, BM, BN, W, KIND, CAUSAL, segment == CLIPPED, False, PRECISION,
                )  # fmt: skip
                if segment < WHOLE:
                    visible = _visible(
                        i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks,
                        WINDOW, CAUSAL, POSITIONS, DOCS, False,
                    )  # fmt: skip
                    s = tl.where(visible, s, float("-inf"))

                # running softmax
                if _is_scaled(KIND, segment == CLIPPED):
                    new_max = tl.maximum(row_max, tl.max(s, 1) + shift)
                    p = tl.exp2(s - (new_max - shift)[:, None])
                else:  # the maximum before the scale: then one multiply-add an element
                    new_max = tl.maximum(row_max, tl.max(s, 1) * scale + shift)
                    p = tl.exp2(s * scale - (new_max - shift)[:, None])
                decay = tl.exp2(row_max - new_max)
                p_sum = tl.sum(p, 1)
                row_max = new_max
                row_sum = row_sum * decay + p_sum

                # values
                acc *= decay[:, None]
                if HAS_REL_V:
                    clipped_mass *= decay
                    if segment == CLIPPED:
                        clipped_mass += p_sum
                    else:
                        acc = _add_vectors(
                            acc, p, REL_V, bias_t, i0 - n0 - (BN - 1), m, r, c, channel,
                            D, DP, BN, PRECISION,
                        )  # fmt: skip
                v = _load_rows(V, v_t, n0, c, Tk, channel, D, DP, segment < WHOLE)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    if HAS_REL_V:
        acc += clipped_mass[:, None] * _clipped_vector(REL_V, bias_t, m, channel, D)[None, :]
    acc = acc / row_sum[:, None]
    at = OUT + b * o_b + h * o_h + tl.cast(m0, tl.int64) * o_t
    at = at + (r[:, None] * o_t + channel[None, :])
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=queries[:, None] & (channel < D)[None, :])
    at = LSE + (b * tl.num_programs(1) + h) * Tq + m0 + r
    tl.store(at, row_max + tl.log2(row_sum), mask=queries)


# -----------------------------------------------------------------------------
# Backward: P is recomputed from the log-sum-exp; dP = dO (v + rel_values); dS = P (dP - delta)


@triton.jit
def _bias_key_sums(
    ds, m0, n0, q_start, m, r, c, B: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr
):
    """Sum a tile of dS^T over its queries, for the gradient of the bias: (BN, 4).

    With slopes, the sum of -d * dS; with a table, of the dS that the diagonal sweep leaves out.
    B is the BM of the sweep. The tile lies within B queries.
    """
    i0 = q_start + m0
    if KIND == TABLE:
        outside = _outside_sweep(i0 - m0 % B, (n0 + c) // B * B, m, B, CAUSAL)
        return _partial_sums(ds) * outside.to(tl.float32)[:, None]
    elif CAUSAL:  # -d is what key and tile add, less r
        of_key = (n0 + c - i0).to(tl.float32)
        of_query = r.to(tl.float32)
        return _partial_sums(ds) * of_key[:, None] - _partial_sums(ds * of_query[None, :])
    else:
        distance = tl.abs((i0 + r)[None, :] - (n0 + c)[:, None])
        return _partial_sums(ds * -distance.to(tl.float32))


@triton.jit
def _dq_kernel(
    # pointers
    Q, QR, K, V, BIAS, REL_V, POS, DOC, BLOCK_MASK, OUT, LSE, DOUT, DLSE,
    DQ, DQR, DELTA, ROW_GRAD, ROW_MASS,
    # strides
    q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    do_b, do_h, do_t, dq_b, dq_h, dq_t, bias_h, bias_t, p_b, p_t, d_b, d_t, mask_b,
    # sizes
    Tq, Tk, G, m, window, sinks, scale,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
    ROW_SUMS: tl.constexpr,
):  # fmt: skip
    """Compute dQ and the corrected delta of BM queries of one head.

    Where ROW_SUMS, also the sums over each row of dS (ROW_GRAD) and P (ROW_MASS) that belong to
    the last vector: over the tiles that the diagonal sweep leaves out. Its tiles are of this size.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BM)
    c = tl.arange(0, BN)
    channel = tl.arange(0, DP)
    K = K + b * k_b + h // G * k_h
    V = V + b * v_b + h // G * v_h
    POS = POS + b * p_b
    DOC = DOC + b * d_b
    BIAS = BIAS + h * bias_h
    REL_V = REL_V + h * bias_h

    # the queries, their output and its gradient, and what their bias needs
    m0 = block * BM
    q_start = Tk - Tq
    queries = m0 + r < Tq
    i0 = q_start + m0
    row = (b * tl.num_programs(1) + h) * Tq + m0 + r
    q = _load_rows(Q + b * q_b + h * q_h, q_t, m0, r, Tq, channel, D, DP, True)
    do = _load_rows(DOUT + b * do_b + h * do_h, do_t, m0, r, Tq, channel, D, DP, True)
    out = _load_rows(OUT + b * o_b + h * o_h, o_t, m0, r, Tq, channel, D, DP, True)
    lse = tl.load(LSE + row, mask=queries, other=float("inf"))  # past the last query P is 0
    dlse = tl.load(DLSE + row, mask=queries, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse
    qr, clipped_bias, clipped_value, slope = q, 0.0, 0.0, 0.0
    if KIND == SLOPES:
        slope = tl.load(BIAS)
    elif KIND == TABLE:
        clipped_bias = tl.load(BIAS + m - 1)
    elif KIND == VECTORS:
        if not QR_IS_Q:
            qr = _load_rows(QR + b * qr_b + h * qr_h, qr_t, m0, r, Tq, channel, D, DP, True)
        clipped_bias = _clipped_product(qr, BIAS, bias_t, m, channel, D)
        if HAS_REL_V:
            clipped_value = _clipped_product(do, REL_V, bias_t, m, channel, D)

    dq = tl.zeros([BM, DP], tl.float32)
    dqr = tl.zeros([BM, DP], tl.float32)
    # What a row of dS sums to, beyond the gradient of its log-sum-exp, is the error of its delta.
    delta_error = -dlse
    row_grad = tl.zeros([BM], tl.float32)
    row_mass = tl.zeros([BM], tl.float32)
    clipped_ds = tl.zeros([BM], tl.float32)  # row sums of dS over clipped tiles
    starts, ends = _key_blocks(
        block, b, q_start, Tk, m, window, sinks, BLOCK_MASK, mask_b,
        BM, BN, KIND, CAUSAL, WINDOW, POSITIONS or DOCS,
    )  # fmt: skip
    for segment in tl.static_range(5):
        if _segment_exists(segment, KIND, WINDOW, DOCS):
            for n in tl.range(starts[segment], ends[segment], disable_licm=KIND == VECTORS):
                # probabilities of the tile
                n0 = n * BN
                k = _load_rows(K, k_t, n0, c, Tk, channel, D, DP, segment < WHOLE)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                s, shift = _add_bias(
                    s, qr, clipped_bias, BIAS, bias_t, m, slope, scale, r, c, channel, i0, n0,
                    D, DP, BM, BN, W, KIND, CAUSAL, segment == CLIPPED, False, PRECISION,
                )  # fmt: skip
                s = s if _is_scaled(KIND, segment == CLIPPED) else s * scale
                p = tl.exp2(s - (lse - shift)[:, None])
                if segment < WHOLE:
                    visible = _visible(
                        i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks,
                        WINDOW, CAUSAL, POSITIONS, DOCS, False,
                    )  # fmt: skip
                    p = tl.where(visible, p, 0.0)

                # gradient of the scores
                v = _load_rows(V, v_t, n0, c, Tk, channel, D, DP, segment < WHOLE)
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if HAS_REL_V:
                    if segment == CLIPPED:
                        dp += clipped_value[:, None]
                    else:
                        dp += _vector_products(
                            do, REL_V, bias_t, i0 - n0 - (BN - 1), m, r, c, channel,
                            D, DP, BN, False, PRECISION,
                        )  # fmt: skip
                ds = p * (dp - delta[:, None])
                ds_sum = tl.sum(ds, 1)
                delta_error += ds_sum
                if ROW_SUMS:
                    if segment == CLIPPED:
                        row_grad += ds_sum
                        row_mass += tl.sum(p, 1)
                    elif segment < WHOLE or not CAUSAL:  # causal: the sweep visits all WHOLE tiles
                        outside = _outside_sweep(i0, n0, m, BN, CAUSAL).to(tl.float32)
                        row_grad += ds_sum * outside
                        row_mass += tl.sum(p, 1) * outside

                # gradient of the queries
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
                if KIND == VECTORS:
                    if segment == CLIPPED:
                        clipped_ds += ds_sum
                    else:
                        d0 = i0 - n0 - (BN - 1)
                        if QR_IS_Q:
                            dq = _add_vectors(
                                dq, ds, BIAS, bias_t, d0, m, r, c, channel, D, DP, BN, PRECISION
                            )
                        else:
                            dqr = _add_vectors(
                                dqr, ds, BIAS, bias_t, d0, m, r, c, channel, D, DP, BN, PRECISION
                            )

    if KIND == VECTORS:
        if QR_IS_Q:
            dq += clipped_ds[:, None] * _clipped_vector(BIAS, bias_t, m, channel, D)[None, :]
        else:
            dqr += clipped_ds[:, None] * _clipped_vector(BIAS, bias_t, m, channel, D)[None, :]
    LN2: tl.constexpr = 0.6931471805599453  # undoes the log2(e) in scale
    at = b * dq_b + h * dq_h + tl.cast(m0, tl.int64) * dq_t
    at = at + (r[:, None] * dq_t + channel[None, :])
    mask = queries[:, None] & (channel < D)[None, :]
    tl.store(DQ + at, (dq * (scale * LN2)).to(DQ.dtype.element_ty), mask=mask)
    if KIND == VECTORS and not QR_IS_Q:
        tl.store(DQR + at, (dqr * (scale * LN2)).to(DQ.dtype.element_ty), mask=mask)
    tl.store(DELTA + row, delta + delta_error, mask=queries)
    if ROW_SUMS:
        # as the corrected delta would have given it
        tl.store(ROW_GRAD + row, row_grad - delta_error * row_mass, mask=queries)
        tl.store(ROW_MASS + row, row_mass, mask=queries)


@triton.jit
def _dkdv_kernel(
    # pointers
    Q, QR, K, V, BIAS, REL_V, POS, DOC, BLOCK_MASK, LSE, DOUT, DELTA, DK, DV, KEY_GRAD,
    # strides
    q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t,
    do_b, do_h, do_t, dk_b, dk_h, dk_t, bias_h, bias_t, p_b, p_t, d_b, d_t, mask_b,
    # sizes
    Tq, Tk, G, m, window, sinks, scale,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
    KEY_SUMS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BN keys of one key head, over the G query heads that share it.

    Tiles are transposed, (BN, BM), because the products need P^T and dS^T.
    Where KEY_SUMS, also KEY_GRAD (batch, query head, key): what the queries of a head add to the
    gradient of its slope, or of the last entry of its table. B is the BM of the sweep, and BM
    divides it.
    """
    block = tl.program_id(0)
    hk = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BM)
    c = tl.arange(0, BN)
    channel = tl.arange(0, DP)
    POS = POS + b * p_b
    DOC = DOC + b * d_b
    n0 = block * BN
    q_start = Tk - Tq
    k = _load_rows(K + b * k_b + hk * k_h, k_t, n0, c, Tk, channel, D, DP, True)
    v = _load_rows(V + b * v_b + hk * v_h, v_t, n0, c, Tk, channel, D, DP, True)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    starts, ends = _query_blocks(
        block, b, q_start, Tq, Tk, m, window, sinks, BLOCK_MASK, mask_b,
        BM, BN, KIND, CAUSAL, WINDOW, POSITIONS or DOCS,
    )  # fmt: skip
    for g in tl.range(0, G):
        h = hk * G + g
        q_head = Q + b * q_b + h * q_h
        qr_head = QR + b * qr_b + h * qr_h
        do_head = DOUT + b * do_b + h * do_h
        row = (b * tl.num_programs(1) * G + h) * Tq
        bias_head = BIAS + h * bias_h
        rel_v_head = REL_V + h * bias_h
        key_grad = tl.zeros([BN, 4], tl.float32)
        last_bias, slope = 0.0, 0.0
        if KIND == SLOPES:
            slope = tl.load(bias_head)
        elif KIND == TABLE:
            last_bias = tl.load(bias_head + m - 1)
        for segment in tl.static_range(1, 5):
            if segment < CLIPPED or KIND >= TABLE:
                for n in tl.range(starts[segment], ends[segment], disable_licm=KIND == VECTORS):
                    # probabilities of the tile
                    m0 = n * BM
                    i0 = q_start + m0
                    queries = m0 + r < Tq
                    q = _load_rows(q_head, q_t, m0, r, Tq, channel, D, DP, segment < WHOLE)
                    qr = q
                    if KIND == VECTORS and not QR_IS_Q:
                        qr = _load_rows(qr_head, qr_t, m0, r, Tq, channel, D, DP, segment < WHOLE)
                    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                    clipped_bias = last_bias
                    if KIND == VECTORS and segment == CLIPPED:
                        clipped_bias = _clipped_product(qr, bias_head, bias_t, m, channel, D)
                    s, shift = _add_bias(
                        s, qr, clipped_bias, bias_head, bias_t, m, slope, scale, r, c, channel,
                        i0, n0, D, DP, BM, BN, W, KIND, CAUSAL, segment == CLIPPED, True, PRECISION,
                    )  # fmt: skip
                    if segment < WHOLE:
                        lse = tl.load(LSE + row + m0 + r, mask=queries, other=float("inf"))
                        delta = tl.load(DELTA + row + m0 + r, mask=queries, other=0.0)
                    else:
                        lse = tl.load(LSE + row + m0 + r)
                        delta = tl.load(DELTA + row + m0 + r)
                    s = s if _is_scaled(KIND, segment == CLIPPED) else s * scale
                    p = tl.exp2(s - (lse - shift)[None, :])
                    if segment < WHOLE:
                        visible = _visible(
                            i0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks,
                            WINDOW, CAUSAL, POSITIONS, DOCS, True,
                        )  # fmt: skip
                        p = tl.where(visible, p, 0.0)

                    # gradients of the values, the scores and the keys
                    do = _load_rows(do_head, do_t, m0, r, Tq, channel, D, DP, segment < WHOLE)
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                    if HAS_REL_V:
                        if segment == CLIPPED:
                            dp += _clipped_product(do, rel_v_head, bias_t, m, channel, D)[None, :]
                        else:
                            dp += _vector_products(
                                do, rel_v_head, bias_t, i0 - n0 - (BN - 1), m, r, c, channel,
                                D, DP, BN, True, PRECISION,
                            )  # fmt: skip
                    ds = p * (dp - delta[None, :])
                    if KEY_SUMS:
                        key_grad += _bias_key_sums(ds, m0, n0, q_start, m, r, c, B, KIND, CAUSAL)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if KEY_SUMS:
            at = KEY_GRAD + (b * tl.num_programs(1) * G + h) * Tk + n0 + c
            tl.store(at, tl.sum(key_grad, 1), mask=n0 + c < Tk)

    LN2: tl.constexpr = 0.6931471805599453  # undoes the log2(e) in scale
    at = b * dk_b + hk * dk_h + tl.cast(n0, tl.int64) * dk_t
    at = at + (c[:, None] * dk_t + channel[None, :])
    mask = (n0 + c < Tk)[:, None] & (channel < D)[None, :]
    tl.store(DK + at, (dk * (scale * LN2)).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=mask)


# -----------------------------------------------------------------------------
# The diagonal sweep: the gradient of a table or of relative vectors


@triton.jit
def _sweep_tile(
    acc, acc_high, dv, dv_high, tile_bias,
    Q, QR, K, V, DOUT, LSE, DELTA, BIAS, REL_V, POS, DOC,
    q_t, qr_t, k_t, v_t, do_t, bias_t, p_t, d_t,
    m0, n0, d0, r, c, channel, Tq, Tk, m, window, sinks, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile, of the queries from m0 on and the keys from n0 on, to the sums of a sweep."""
    queries = m0 + r < Tq
    q = _load_rows(Q, q_t, m0, r, Tq, channel, D, DP, True)
    k = _load_rows(K, k_t, n0, c, Tk, channel, D, DP, True)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    qr = q
    if KIND == VECTORS:
        if not QR_IS_Q:
            qr = _load_rows(QR, qr_t, m0, r, Tq, channel, D, DP, True)
        s += _vector_products(qr, BIAS, bias_t, d0, m, r, c, channel, D, DP, BM, False, PRECISION)
    lse = tl.load(LSE + m0 + r, mask=queries, other=float("inf"))
    delta = tl.load(DELTA + m0 + r, mask=queries, other=0.0)
    p = tl.exp2(s * scale + tile_bias - lse[:, None])
    if WINDOW or DOCS or not CAUSAL:
        visible = _visible(
            Tk - Tq + m0 + r, n0 + c, POS, p_t, DOC, d_t, queries, Tk, window, sinks,
            WINDOW, CAUSAL, POSITIONS, DOCS, False,
        )  # fmt: skip
        p = tl.where(visible, p, 0.0)
    do = _load_rows(DOUT, do_t, m0, r, Tq, channel, D, DP, True)
    v = _load_rows(V, v_t, n0, c, Tk, channel, D, DP, True)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if HAS_REL_V:
        dp += _vector_products(do, REL_V, bias_t, d0, m, r, c, channel, D, DP, BM, False, PRECISION)
    ds = p * (dp - delta[:, None])
    if KIND == TABLE:
        acc += ds
    else:
        # dS^T r_i and P^T dO_i, by distance: for the smaller distances of the tile, and the larger
        low = c[None, :] >= r[:, None]
        by_distance = _skew(ds.to(qr.dtype), r, c, BM, False)
        low_part = tl.trans(tl.where(low, by_distance, 0.0))
        acc = tl.dot(low_part, qr, acc, input_precision=PRECISION)
        high_part = tl.trans(tl.where(low, 0.0, by_distance))
        acc_high = tl.dot(high_part, qr, acc_high, input_precision=PRECISION)
        if HAS_REL_V:
            by_distance = _skew(p.to(do.dtype), r, c, BM, False)
            low_part = tl.trans(tl.where(low, by_distance, 0.0))
            dv = tl.dot(low_part, do, dv, input_precision=PRECISION)
            high_part = tl.trans(tl.where(low, 0.0, by_distance))
            dv_high = tl.dot(high_part, do, dv_high, input_precision=PRECISION)
    return acc, acc_high, dv, dv_high


@triton.jit
def _tile_exists(at, key_block, HAS_BLOCK_MASK: tl.constexpr):
    """Whether the block mask, at a query block, leaves anything of the tile with a key block."""
    if HAS_BLOCK_MASK:
        return (key_block >= tl.load(at)) & (key_block < tl.load(at + 3))
    else:
        return True


@triton.jit
def _sweep_kernel(
    # pointers
    Q, QR, K, V, BIAS, REL_V, POS, DOC, BLOCK_MASK, LSE, DOUT, DELTA, DBIAS, DREL_V,
    # strides
    q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    bias_h, bias_t, p_b, p_t, d_b, d_t, mask_b,
    # sizes
    Tq, Tk, B, G, m, window, sinks, scale, first_diagonal,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dS over one diagonal of BM x BM tiles of one head, or over one of several splits of it.

    Query block n meets key block n - diagonal, for all n and all sequences of the batch. In these
    tiles everything that depends on the distance is the same. With a table the summed tile is then
    summed along its diagonals: DBIAS (splits, H, diagonals, W = 2 BM), by r - c + BM - 1. With
    vectors, DBIAS (..., W, D) receives the sums of dS r_i at each distance, DREL_V those of P dO_i.
    """
    index = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    diagonal = first_diagonal + index
    r = tl.arange(0, BM)
    c = tl.arange(0, BM)
    channel = tl.arange(0, DP)
    H = tl.num_programs(1)
    q_start = Tk - Tq

    # the tiles of this program: query blocks n_lo .. n_hi - 1 of each sequence
    d0 = q_start + diagonal * BM - (BM - 1)  # the smallest distance
    n_lo = tl.maximum(diagonal, 0)
    n_hi = tl.minimum(tl.cdiv(Tq, BM), tl.cdiv(Tk, BM) + diagonal)
    if WINDOW and not POSITIONS:
        if d0 >= window:  # beyond the window only sinks are visible
            n_hi = tl.minimum(n_hi, diagonal + tl.cdiv(sinks, BM))
    length = tl.maximum(n_hi - n_lo, 0)
    total = length * B
    per_split = tl.cdiv(total, tl.num_programs(2))

    # what all its tiles add to their scores: the table, and -inf in the future
    BIAS = BIAS + h * bias_h
    REL_V = REL_V + h * bias_h
    tile_bias = tl.zeros([BM, BM], tl.float32)
    if CAUSAL:
        past = d0 + (BM - 1) + r[:, None] - c[None, :] >= 0
        tile_bias = tl.where(past, 0.0, float("-inf"))
    if KIND == TABLE:
        bias_row = tl.load(BIAS + tl.minimum(tl.abs(d0 + tl.arange(0, W)), m - 1))
        tile_bias += _expand_row(bias_row, r[:, None] - c[None, :] + (BM - 1))
        acc = tl.zeros([BM, BM], tl.float32)
    else:
        acc = tl.zeros([BM, DP], tl.float32)
    acc_high = tl.zeros([BM, DP], tl.float32)
    dv = tl.zeros([BM, DP], tl.float32)
    dv_high = tl.zeros([BM, DP], tl.float32)

    start = split * per_split
    for t in tl.range(start, tl.minimum(start + per_split, total), disable_licm=KIND == VECTORS):
        b = (t // length).to(tl.int64)
        n = n_lo + t % length
        if _tile_exists(BLOCK_MASK + b * mask_b + n * 4, n - diagonal, POSITIONS or DOCS):
            acc, acc_high, dv, dv_high = _sweep_tile(
                acc, acc_high, dv, dv_high, tile_bias,
                Q + b * q_b + h * q_h, QR + b * qr_b + h * qr_h,
                K + b * k_b + h // G * k_h, V + b * v_b + h // G * v_h,
                DOUT + b * do_b + h * do_h, LSE + (b * H + h) * Tq, DELTA + (b * H + h) * Tq,
                BIAS, REL_V, POS + b * p_b, DOC + b * d_b,
                q_t, qr_t, k_t, v_t, do_t, bias_t, p_t, d_t,
                n * BM, (n - diagonal) * BM, d0, r, c, channel, Tq, Tk, m, window, sinks, scale,
                D, DP, BM, KIND, HAS_REL_V, QR_IS_Q, CAUSAL, WINDOW, POSITIONS, DOCS, PRECISION,
            )  # fmt: skip

    at = ((split * H + h) * tl.num_programs(0) + index) * W + c
    if KIND == TABLE:  # the sum along diagonals, once for all tiles
        acc = _skew(acc, r, c, BM, False)
        low = c[None, :] >= r[:, None]
        tl.store(DBIAS + at, tl.sum(tl.where(low, acc, 0.0), 0))
        tl.store(DBIAS + at + BM, tl.sum(tl.where(low, 0.0, acc), 0))
    else:
        LN2: tl.constexpr = 0.6931471805599453  # undoes the log2(e) in scale
        mask = (channel < D)[None, :]
        at = at[:, None] * D + channel[None, :]
        tl.store(DBIAS + at, acc * (scale * LN2), mask=mask)
        tl.store(DBIAS + at + BM * D, acc_high * (scale * LN2), mask=mask)
        if HAS_REL_V:
            tl.store(DREL_V + at, dv, mask=mask)
            tl.store(DREL_V + at + BM * D, dv_high, mask=mask)


# -----------------------------------------------------------------------------
# Tile sizes
#
# Chosen by ahead-of-time compilation (experiments/results/aot.md): nothing spilled up to D = 128,
# shared memory within the card's limit, fewest cycles an element (predicted.md). Not yet chosen by
# timing. The tiles of a sweep and those of vectors are square. With a table, the BM of dK and dV
# divides that of the sweep; with vectors, dQ and the sweep have the same.


class Tile(NamedTuple):
    """What one program works on, and how it is compiled."""

    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int  # of software pipelining


KERNELS = ("forward", "dq", "dkdv", "sweep")

# 16-bit elements: the architecture, the head dimension rounded up, the bias, and for each of
# KERNELS BM,BN,warps,stages. sm_86 stands for sm_89 and unknown cards too. After a slash: the same
# where neither a window, nor documents, nor padding of the head dimension need a mask, if that
# leaves registers for larger tiles or fewer warps.
TILE_TABLE = """
sm_80   64   none     128,32,4,3/128,64,4,3   128,64,8,2           16,128,4,2             -
sm_80   64   slopes   128,32,4,3/128,64,4,3   128,64,8,3           16,128,4,2             -
sm_80   64   table    128,32,4,3/128,64,4,3   128,64,8,3           32,128,8,1/16,128,4,2  64,64,4,2
sm_80   64   vectors  32,32,4,2               32,32,8,2            32,32,4,2              32,32,4,2
sm_80   128  none     64,64,4,3               128,64,8,2           16,128,8,2             -
sm_80   128  slopes   128,64,8,3              128,32,8,2           16,128,8,2             -
sm_80   128  table    64,64,4,2               128,32,8,3           16,128,8,2             64,64,4,2
sm_80   128  vectors  32,32,8,2               16,16,8,1            32,32,8,2              16,16,8,1
sm_86   64   none     128,64,4,3              128,64,8,2           32,128,8,2             -
sm_86   64   slopes   64,64,4,3               128,64,8,2           32,128,8,2             -
sm_86   64   table    64,64,4,3               64,32,4,2            32,64,4,1              64,64,4,2
sm_86   64   vectors  32,32,4,1               32,32,4,1            32,32,4,2              32,32,4,2
sm_86   128  none     128,64,8,2              64,64,8,2            64,64,8,2              -
sm_86   128  slopes   64,32,4,3               64,64,8,2            32,32,4,1/32,32,4,2    -
sm_86   128  table    64,64,8,2               32,32,4,2            32,32,4,2              32,32,4,2
sm_86   128  vectors  32,32,8,1               16,16,8,1            32,32,8,2              16,16,8,1
sm_90   64   none     128,128,8,2             128,128,8,2          64,128,8,2             -
sm_90   64   slopes   128,128,8,2             128,64,8,2           64,128,8,3             -
sm_90   64   table    128,128,8,2             128,128,8,2          64,128,8,3             64,64,4,2
sm_90   64   vectors  64,64,8,1               32,32,4,1/32,32,4,2  32,32,4,2              32,32,4,2
sm_90   128  none     128,128,8,2             128,64,8,2           32,128,8,2             -
sm_90   128  slopes   128,64,8,3/128,128,8,3  128,64,8,2           32,128,8,3             -
sm_90   128  table    128,128,8,2             128,64,8,2           32,128,8,3             64,64,4,2
sm_90   128  vectors  32,32,8,1               16,16,8,1            32,32,8,2              16,16,8,1
sm_100  64   none     128,64,8,3              128,64,8,2           64,128,8,2             -
sm_100  64   slopes   128,64,8,3              128,64,8,2           64,128,8,2             -
sm_100  64   table    128,64,8,3              128,64,8,2           64,128,8,2             64,64,4,2
sm_100  64   vectors  64,64,4,1               64,64,8,1            64,64,8,2              64,64,8,1
sm_100  128  none     64,32,4,3               128,64,8,2           64,128,8,2             -
sm_100  128  slopes   128,64,8,3              64,64,8,2            32,128,8,2/64,128,8,2  -
sm_100  128  table    128,64,8,3              64,64,8,2            32,128,8,2/64,128,8,2  64,64,8,2
sm_100  128  vectors  64,64,8,1               64,64,8,1            64,64,8,1              64,64,8,1
sm_120  64   none     128,64,8,3              128,64,8,2           32,128,8,2             -
sm_120  64   slopes   64,64,4,3               128,32,8,2           32,128,8,2             -
sm_120  64   table    64,64,4,3               32,32,4,2            32,64,4,1              32,32,4,2
sm_120  64   vectors  32,32,4,1               32,32,4,1            32,32,4,2              32,32,8,2
sm_120  128  none     64,64,8,2               64,64,8,2            32,32,4,2/64,64,8,2    -
sm_120  128  slopes   64,32,4,3               64,32,8,2/64,32,4,2  32,32,4,2              -
sm_120  128  table    64,32,4,3               64,32,8,2/64,32,4,2  32,32,4,2              32,32,4,2
sm_120  128  vectors  32,32,8,1               16,16,8,1            32,32,8,2              16,16,8,1
gfx942  64   none     128,64,4,1              64,64,4,1            64,64,4,1              -
gfx942  64   slopes   128,64,4,1              64,32,4,1            64,64,4,1              -
gfx942  64   table    64,64,4,1               64,64,4,1            64,64,4,1              64,64,4,1
gfx942  64   vectors  32,32,4,1               32,32,4,1            32,32,4,1              32,32,4,1
gfx942  128  none     64,64,4,1               64,64,4,1            32,64,4,1              -
gfx942  128  slopes   64,64,4,1               64,32,4,3            32,32,4,1              -
gfx942  128  table    64,64,4,1               64,32,4,1            32,64,4,1              64,64,4,1
gfx942  128  vectors  64,64,4,1               16,16,8,1            32,32,4,1              16,16,8,1
"""
TILES = {tuple(line.split()[:3]): line.split()[3:] for line in TILE_TABLE.strip().splitlines()}

# float32 elements: the tiles of vectors; what TILES lacks is in tile_for()
FLOAT32_VECTORS = {"sm_100": Tile(64, 64, 8, 1), "gfx942": Tile(16, 16, 4, 1)}

# A sweep has about so many programs, where its tiles allow: a diagonal is split to get there.
SWEEP_PROGRAMS = 512


@functools.cache
def tile_for(family, itemsize, DP, kind, kernel, masked):
    """The Tile of one of KERNELS.

    itemsize: bytes of an element. kind: 0 to 3, a kind of bias. masked: whether there is a window,
    are documents, or is a head dimension below DP.
    """
    if family == "interpreter":
        return Tile(32, 64 if kernel == "dkdv" and kind == TABLE.value else 32, 4, 1)
    if itemsize <= 2 and DP <= 128:
        bias = ("none", "slopes", "table", "vectors")[kind]
        cell = TILES[family, str(max(DP, 64)), bias][KERNELS.index(kernel)]
        return Tile(*map(int, cell.split("/")[0 if masked else -1].split(",")))
    if DP <= 128 and kind == VECTORS.value:
        return FLOAT32_VECTORS.get(family, Tile(16, 16, 8, 1))
    # float32: with 4 warps of 32 threads the backward kernels of these biases spill
    adds_bias = kernel in ("dq", "dkdv") and kind in (SLOPES.value, TABLE.value)
    warps = 8 if itemsize > 2 and adds_bias and family != "gfx942" else 4
    side = 16 if kind == VECTORS.value or itemsize > 2 and DP > 64 else 32
    return Tile(side, side, warps, 1)


# -----------------------------------------------------------------------------
# Launching the kernels


def device_family(device):
    """The architecture in TILES for a device, and how float32 products are computed there.

    That is as three tf32 products, or plainly where there are none ("ieee").
    """
    if device.type == "cpu":
        return "interpreter", "ieee"
    if torch.version.hip:
        return "gfx942", "ieee"
    major, minor = torch.cuda.get_device_capability(device)
    known = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
    return known.get((major, minor), "sm_120" if major >= 12 else "sm_86"), "tf32x3"


def block_mask(docs, positions, window, sinks, Tq, Tk, BM, BN, causal, of_keys=False):
    """Which tiles packed documents, or a window over true positions, leave; computed on the device.

    Returns int32 (1 or B, query blocks, 4): lo, left, right and hi of each query block, which sees
    something of the key blocks [lo, hi), and all of the key blocks [left, right).
    of_keys: for each key block the query blocks instead.
    The smallest and largest document and position of each block decide. So a tile is left out only
    if it is surely empty, in whatever order documents and positions are. Where the documents are in
    order, no empty tile is visited.
    """
    device = (positions if docs is None else docs).device
    q_start = Tk - Tq
    nq = triton.cdiv(Tq, BM)
    nk = triton.cdiv(Tk, BN)
    queries = torch.arange(nq * BM, device=device).clamp(max=Tq - 1) + q_start
    keys = torch.arange(nk * BN, device=device).clamp(max=Tk - 1)
    i = queries.view(nq, BM)
    j = keys.view(nk, BN)

    # (1 or B, nq, nk): is something of the tile visible, is all of it?
    some = torch.ones(1, nq, nk, dtype=torch.bool, device=device)
    full_queries = torch.arange(1, nq + 1, device=device) * BM <= Tq
    full_keys = torch.arange(1, nk + 1, device=device) * BN <= Tk
    whole = (full_queries[:, None] & full_keys)[None]
    if causal:
        some = some & (j[:, 0] <= i[:, -1:])
        whole = whole & (j[:, -1] <= i[:, :1])

    def block_ranges(values):
        """The least and largest value of each query block (., nq, 1) and key block (., 1, nk)."""
        values = values if values.dim() == 2 else values[None]
        q = values[:, queries].unflatten(1, (nq, BM)).aminmax(dim=-1)
        k = values[:, keys].unflatten(1, (nk, BN)).aminmax(dim=-1)
        return q.min[:, :, None], q.max[:, :, None], k.min[:, None], k.max[:, None]

    if window:
        where = torch.arange(Tk, device=device) if positions is None else positions
        q_min, q_max, k_min, k_max = block_ranges(where)
        some = some & (((q_min - k_max < window) & (k_min - q_max < window)) | (k_min < sinks))
        whole = whole & (((q_max - k_min < window) & (k_max - q_min < window)) | (k_max < sinks))
    if docs is not None:
        q_min, q_max, k_min, k_max = block_ranges(docs)
        some = some & (k_min <= q_max) & (q_min <= k_max)
        whole = whole & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    whole = whole & some

    if of_keys:
        some, whole = some.mT, whole.mT
    n = some.shape[-1]
    at = torch.arange(n, device=device)
    hi = torch.where(some, at + 1, 0).amax(-1)
    lo = torch.where(some, at, n).amin(-1).minimum(hi)
    left = torch.where(whole, at, n).amin(-1).minimum(hi)
    right = torch.where(~whole & (at >= left[..., None]), at, n).amin(-1).minimum(hi)
    return torch.stack((lo, left, right, hi), -1).int().contiguous()


class _Call:
    """The arguments that all kernels of one call share. q stands in for a tensor that is absent."""

    def __init__(self, q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale):
        self.B, self.H, self.Tq, self.D = q.shape
        self.HK, self.Tk = k.shape[1:3]
        self.kind = NONE.value if bias is None else (SLOPES, TABLE, VECTORS)[bias.dim() - 1].value
        self.m = bias.shape[1] if self.kind >= TABLE.value else 0
        self.window = window
        self.sinks = sinks
        self.causal = causal
        self.positions = positions if window else None
        self.docs = docs
        self.DP = max(16, triton.next_power_of_2(self.D))
        self.family, precision = device_family(q.device)
        self.arguments = {
            "Tq": self.Tq, "Tk": self.Tk, "G": self.H // self.HK, "m": self.m,
            "window": window, "sinks": sinks, "scale": scale * LOG2E,
            "D": self.D, "DP": self.DP, "KIND": self.kind, "HAS_REL_V": rel_v is not None,
            "QR_IS_Q": qr is None, "CAUSAL": causal, "WINDOW": window > 0,
            "POSITIONS": self.positions is not None, "DOCS": docs is not None,
            "PRECISION": precision if q.dtype == torch.float32 else "ieee",
        }  # fmt: skip

        self.q = q
        may_be_absent = (qr, bias, rel_v, self.positions, docs)
        self.qr, bias_or_q, rel_v, pos, doc = (q if x is None else x for x in may_be_absent)
        self.inputs = (q, self.qr, k, v, bias_or_q, rel_v, pos, doc)
        self.strides = _strides(q, self.qr, k, v)
        self.last_strides = (
            bias.stride(0) if bias is not None and bias.shape[0] > 1 else 0,
            bias.stride(1) if self.kind == VECTORS.value else 1,
            pos.stride(0) if pos.dim() == 2 else 0,
            pos.stride(-1),
            doc.stride(0),
            doc.stride(-1),
        )

    def tile(self, kernel):
        """The Tile of one of KERNELS."""
        masked = self.window > 0 or self.docs is not None or self.D < self.DP
        return tile_for(self.family, self.q.element_size(), self.DP, self.kind, kernel, masked)

    def launch(self, name, kernel, tensors, strided, **more):
        """Launch one of KERNELS, given with its grid.

        tensors: the pointers that it takes after those that all kernels take. strided: those of
        which it also takes the strides. more: arguments that the other kernels lack.
        """
        tile = self.tile(name)
        more |= {"BM": tile.BM, "W": triton.next_power_of_2(tile.BM + tile.BN)}
        if name != "sweep":  # square
            more["BN"] = tile.BN
        if name == "dkdv":
            more["B"] = self.tile("sweep").BM if self.kind >= TABLE.value else tile.BM
        mask = self.q
        mask_b = 0
        if self.positions is not None or self.docs is not None:
            mask = block_mask(
                self.docs, self.positions, self.window, self.sinks, self.Tq, self.Tk,
                tile.BM, tile.BN, self.causal, of_keys=name == "dkdv",
            )  # fmt: skip
            mask_b = mask.stride(0) if mask.shape[0] > 1 else 0
        strides = (*self.strides, *_strides(*strided), *self.last_strides, mask_b)
        with torch.cuda.device_of(self.q):  # Triton launches kernels on the current device
            kernel(
                *self.inputs, mask, *tensors, *strides,
                **self.arguments, **more, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip


def _strides(*tensors):
    """Of each (B, H, T, D) the strides of batch, head and token, one after the other."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _empty_output(x):
    """An empty (B, H, T, D) like x, stored as (B, T, H, D), as the next matrix product reads it."""
    B, H, T, D = x.shape
    return torch.empty(B, T, H, D, dtype=x.dtype, device=x.device).transpose(1, 2)


def _kernel_layout(x):
    """Copy x (B, H, T, D) if the kernels cannot read it as it is.

    They need contiguous channels (a gradient that autograd expanded has stride 0), and tokens less
    than 2^24 elements apart, because offsets within a block have 32 bits. They start at a multiple
    of 16 bytes, with strides that are multiples of 16 elements: only then are rows copied
    asynchronously, and for other copies Triton 3.7 leaves out a fence before the products of sm_90.
    """
    if x is None:
        return x
    aligned = all(stride % 16 == 0 for stride in x.stride()[:3]) and x.data_ptr() % 16 == 0
    if aligned and x.stride(3) == 1 and x.stride(2) < 1 << 24:
        return x
    B, H, T, D = x.shape
    rows = x.new_empty(B, H, T, triton.cdiv(D, 16) * 16)[..., :D]
    return rows.copy_(x)


@torch.library.custom_op("nanolong::attention", mutates_args=())
def _attention(
    q: torch.Tensor, qr: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, rel_v: torch.Tensor | None,
    positions: torch.Tensor | None, docs: torch.Tensor | None,
    window: int, sinks: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The forward pass: the output and the log-sum-exp in log2 units.

    bias: slopes (H,), a table (H, m) or relative keys (H or 1, m, D).
    """
    q, qr, k, v = (_kernel_layout(x) for x in (q, qr, k, v))
    out = _empty_output(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if out.numel():
        call = _Call(q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale)
        grid = (triton.cdiv(call.Tq, call.tile("forward").BM), call.H, call.B)
        call.launch("forward", _forward_kernel[grid], (out, lse), (out,))
    return out, lse


@_attention.register_fake
def _(q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale):
    return _empty_output(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("nanolong::attention_backward", mutates_args=())
def _attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, qr: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, rel_v: torch.Tensor | None,
    positions: torch.Tensor | None, docs: torch.Tensor | None,
    window: int, sinks: int, causal: bool, scale: float, bias_grad: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """The backward pass: dq, dqr, dk, dv, dbias, drel_v, empty if there is none."""
    grads = _empty_grads(q, qr, k, v, bias if bias_grad else None, rel_v if bias_grad else None)
    dq, dqr, dk, dv, dbias, drel_v = grads
    if not out.numel():
        return tuple(x.zero_() for x in grads)
    dout, q, qr, k, v = (_kernel_layout(x) for x in (dout, q, qr, k, v))
    dlse = (dlse * LOG2E).contiguous()  # of the log-sum-exp in log2 to natural units
    call = _Call(q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale)
    bias_grad = bias_grad and call.kind != NONE.value

    delta = torch.empty_like(lse)
    row_sums = bias_grad and call.kind == VECTORS.value
    row_grad, row_mass = (torch.empty_like(lse) if row_sums else lse for _ in range(2))
    tensors = out, lse, dout, dlse, dq, dq if qr is None else dqr, delta, row_grad, row_mass
    grid = (triton.cdiv(call.Tq, call.tile("dq").BM), call.H, call.B)
    call.launch("dq", _dq_kernel[grid], tensors, (out, dout, dq), ROW_SUMS=row_sums)

    key_sums = bias_grad and call.kind != VECTORS.value
    key_grad = lse.new_empty(call.B, call.H, call.Tk) if key_sums else lse
    tensors = lse, dout, delta, dk, dv, key_grad
    grid = (triton.cdiv(call.Tk, call.tile("dkdv").BN), call.HK, call.B)
    call.launch("dkdv", _dkdv_kernel[grid], tensors, (dout, dk), KEY_SUMS=key_sums)

    if not bias_grad:
        return grads
    if call.kind == SLOPES.value:
        dbias.copy_(key_grad.sum((0, 2)) / LOG2E)  # slopes arrived in log2 units
        return grads

    # The last entry: what the sweep leaves out. Not a matrix product, which autocast would round.
    if call.kind == TABLE.value:
        last = key_grad.sum((0, 2))
    else:
        last = (row_grad[..., None] * call.qr.float()).sum((0, 2)) * scale
    by_distance, v_by_distance, d0, BM = _sweep(call, lse, dout, delta)
    _sum_by_distance(dbias, by_distance, last, d0, BM, causal)
    if rel_v is not None:
        last = (row_mass[..., None] * dout.float()).sum((0, 2))
        _sum_by_distance(drel_v, v_by_distance, last, d0, BM, causal)
    if call.kind == TABLE.value:
        dbias = dbias / LOG2E  # the table arrived in log2 units
    return dq, dqr, dk, dv, dbias, drel_v


def _sweep(call, lse, dout, delta):
    """Run the diagonal sweep.

    Returns the sums by distance for the bias and for the relative values, float32 (splits, H,
    diagonals, 2 BM, ...) or None, the smallest distance of the first diagonal, and BM.
    """
    BM = call.tile("sweep").BM
    q_start = call.Tk - call.Tq

    # the diagonals (query block - key block) whose tiles hold distances |d| < near
    near = call.m - 1
    if call.window and not call.sinks and call.positions is None:
        near = min(near, call.window)
    lowest = q_start + BM - 1 if call.causal else q_start + BM - 1 + near - 1
    first = max(-(triton.cdiv(call.Tk, BM) - 1), -(lowest // BM))
    last = min(triton.cdiv(call.Tq, BM) - 1, (near - 1 - q_start + BM - 1) // BM)
    d0 = q_start + first * BM - (BM - 1)
    diagonals = last - first + 1
    if diagonals <= 0:
        return None, None, d0, BM

    # The number of splits depends on the shapes alone, so the same sums come out on every device.
    tiles = call.B * triton.cdiv(call.Tq, BM)
    splits = max(1, min(SWEEP_PROGRAMS // (call.H * diagonals), tiles))
    channels = (call.D,) if call.kind == VECTORS.value else ()
    by_distance = lse.new_empty(splits, call.H, diagonals, 2 * BM, *channels)
    v_by_distance = torch.empty_like(by_distance) if call.arguments["HAS_REL_V"] else by_distance
    call.launch(
        "sweep", _sweep_kernel[diagonals, call.H, splits],
        (lse, dout, delta, by_distance, v_by_distance), (dout,), B=call.B, first_diagonal=first,
    )  # fmt: skip
    return by_distance, v_by_distance, d0, BM


def _sum_by_distance(grad, partial, last, d0, BM, causal):
    """Write the gradient of a table or of vectors into grad (H or 1, m, ...).

    partial (splits, H, diagonals, 2 BM, ...): the sums of the sweep, by distance from d0 on, where
    neighbouring diagonals overlap by BM; or None. last (H, ...): the rest of entry m - 1.
    """
    total = grad.new_zeros(last.shape[0], *grad.shape[1:])
    if partial is not None:
        partial = partial.sum(0)
        heads, diagonals, _, *channels = partial.shape
        by_distance = partial.new_zeros(heads, (diagonals + 1) * BM, *channels)
        by_distance[:, :-BM] += partial[:, :, :BM].flatten(1, 2)
        by_distance[:, BM:] += partial[:, :, BM:].flatten(1, 2)
        # the distances from 0 up, and the first of them
        sides = [(by_distance[:, max(0, -d0) :], max(0, d0))]
        if not causal:
            # the keys after the query: the distances from -1 down
            after = by_distance[:, : max(0, -d0)].flip(1)
            sides.append((after, max(1, 1 - d0 - by_distance.shape[1])))
        for side, start in sides:
            inside = min(side.shape[1], max(0, grad.shape[1] - 1 - start))
            total[:, start : start + inside] += side[:, :inside]
            total[:, -1] += side[:, inside:].sum(1)
    total[:, -1] += last
    grad.copy_(total if grad.shape[0] == total.shape[0] else total.sum(0, keepdim=True))


def _empty_grads(q, qr, k, v, bias, rel_v):
    """Empty dq, dqr, dk, dv, dbias (float32) and drel_v (float32); of size 0 if x is None."""
    dq, dqr, dk, dv = (q.new_empty(0) if x is None else _empty_output(x) for x in (q, qr, k, v))
    shapes = [(0,) if x is None else x.shape for x in (bias, rel_v)]
    return dq, dqr, dk, dv, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


@_attention_backward.register_fake
def _(
    dout, dlse, out, lse, q, qr, k, v, bias, rel_v, positions, docs,
    window, sinks, causal, scale, bias_grad,
):  # fmt: skip
    return _empty_grads(q, qr, k, v, bias if bias_grad else None, rel_v if bias_grad else None)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.window, ctx.sinks, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, dout, dlse):
    q, qr, k, v, bias, rel_v, positions, docs, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    bias_grad = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
    dq, dqr, dk, dv, dbias, drel_v = _attention_backward(
        dout, dlse, out, lse, q, qr, k, v, bias, rel_v, positions, docs,
        ctx.window, ctx.sinks, ctx.causal, ctx.scale, bias_grad,
    )  # fmt: skip
    dqr = None if qr is None else dqr
    dbias = dbias.to(bias.dtype) if bias_grad else None
    drel_v = drel_v.to(rel_v.dtype) if bias_grad and rel_v is not None else None
    no_grads = [None] * 6  # positions, docs, window, sinks, causal, scale
    return dq, dqr, dk, dv, dbias, drel_v, *no_grads


_attention.register_autograd(_backward, setup_context=_setup_context)


def attention(
    q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None,
    causal=True, scale=None, return_lse=False,
):  # fmt: skip
    """Compute softmax(q k^T scale + bias, over the visible keys) (v + the relative values).

    q (B, H, Tq, D), k and v (B, Hk, Tk, D), 1 <= D <= 256: float16, bfloat16 or float32, the same
    for all three, with any strides. Tq <= Tk: the queries are the last Tq of the Tk tokens. Returns
    (B, H, Tq, D), a view of (B, Tq, H, D). Gradients reach all tensors but positions and docs.

    bias        None, slopes (H,): adds -slope * d, or a table (H, m): adds table[h, min(d, m - 1)].
                Float32. d = |index of the query - index of the key|.
    relative    None, or (keys, values, offsets). keys (H or 1, m, D) add
                scale * (q + w) . keys[min(d, m - 1)] and turn q . k into (q + u) . k. values: the
                same shape, or None. offsets: (u, w), (H, D) each, or None.
    window      W > 0: a query sees a key only if their positions are less than W apart, or the
                position of the key is below `sinks`.
    positions   (Tk,) or (B, Tk) int below 2^31, for the window. Default: the indices.
    docs        (B, Tk) int below 2^31: a query sees only keys with the same number.
    causal      A query sees no key after it.
    scale       Above 0. Default: D ** -0.5.
    return_lse  Also return the log-sum-exp of the scores (B, H, Tq), float32, natural logarithm. It
                has a gradient too.

    Raises ValueError for what the kernels do not support.
    """
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    _check_arguments(q, k, v, bias, relative, positions, docs, scale)
    positions = None if positions is None else positions.int()
    docs = None if docs is None else docs.int()
    qr = rel_v = None
    if bias is not None:
        bias = (bias.float() * LOG2E).contiguous()
    elif relative is not None:
        keys, values, offsets = relative
        bias = keys.to(q.dtype).contiguous()
        rel_v = None if values is None else values.to(q.dtype).contiguous()
        if offsets is not None:
            u, w = offsets
            q, qr = (q + u[:, None]).to(q.dtype), (q + w[:, None]).to(q.dtype)
    out, lse = _attention(q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale)
    return (out, lse * math.log(2)) if return_lse else out


def _check_arguments(q, k, v, bias, relative, positions, docs, scale):
    """Raise ValueError for what the kernels do not support."""
    B, H, Tq, D = q.shape
    HK, Tk = k.shape[1:3]
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = shapes[1] == shapes[2] == (B, HK, Tk, D) and H % HK == 0 and Tq <= Tk
    keys, values, _ = relative or (None, None, None)
    keys_fit = keys is None or keys.dim() == 3 and keys.shape[0] in (1, H) and keys.shape[2] == D
    if keys is not None and (not keys.numel() or values is not None and values.shape != keys.shape):
        keys_fit = False
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        problem = (
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: use one of {DTYPES}, the same for all"
        )
    elif not fits or not 1 <= D <= 256 or max(B, H) > 65535:
        problem = (
            f"q, k, v {shapes} do not fit: use q (B, H, Tq, D), k and v (B, Hk, Tk, D), with H a "
            "multiple of Hk, Tq <= Tk and D <= 256"
        )
    elif bias is not None and relative is not None:
        problem = "there are a bias and relative vectors: use one of them"
    elif not scale > 0:
        problem = f"scale is {scale}: use one above 0"
    elif bias is not None and not (bias.shape[:1] == (H,) and bias.dim() < 3 and bias.numel()):
        problem = f"the bias has shape {tuple(bias.shape)}: use slopes ({H},) or a table ({H}, m)"
    elif not keys_fit:
        problem = f"relative keys are {tuple(keys.shape)}: use ({H} or 1, m, {D}), as for values"
    elif not _are_integers(positions, (Tk,), (B, Tk)) or not _are_integers(docs, (B, Tk)):
        problem = (
            f"positions or docs do not fit: use integers ({B}, {Tk}), of positions also ({Tk},)"
        )
    else:
        return
    raise ValueError(f"attention: {problem}")


def _are_integers(x, *shapes):
    """Whether x is None, or integers of one of these shapes."""
    return x is None or tuple(x.shape) in shapes and not x.is_floating_point()
