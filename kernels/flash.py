"""Attention in Triton, forward and backward, with the bias of every position scheme.

Imports only torch, triton and torch_private.py: copy both files into your project.

For query i and key j of one head, at distance d = |i - j| by index:

    score(i, j) = scale * (q_i . k_j) + bias(i, j)
    out_i       = sum_j softmax_j(score(i, .)) * v_j

over the keys that i may see; with gates c_i - c_j is added (7.). The bias is one of three kinds:

    NONE      0
    SLOPES    -slope * d             ALiBi, with fixed or trained slopes
    TABLE     table[min(d, m - 1)]   T5, KERPLE, Sandwich

In plain PyTorch: attention() in kernels/reference.py. A scheme passes in its table, whatever its
parameters are; autograd computes the gradient from the table to the parameters.

The forward pass is FlashAttention (arXiv 2205.14135), as in Triton's tutorial: blocks of BM queries
meet blocks of BN keys, one tile at a time, with the softmax kept as a running maximum and a running
sum, so that the (T, T) scores are never stored. What the tutorial does not have:

1. Units. Scores are in log2, because exp2 is the hardware's exponential. So the scale, slopes and
   tables arrive multiplied by log2(e). Gradients are in natural units.

2. Segments. The host decides which tiles a program visits, in tile_segments(). Of the key blocks of
   a query block, some are empty and never visited, some are partly visible and need a mask, and the
   rest are wholly visible. Tiles in which every distance is m - 1 or more form a segment of their
   own, CLIPPED: there the bias of a table is a single number, which costs nothing.

3. The bias row. In a tile the bias depends on r - c alone (query r, key c), so BM + BN - 1 values
   describe it. They are loaded once and expanded to the tile (_expand). Loading each of the BM x BN
   values by its own pointer gives the same result with forty times the loads.

4. The diagonal sweep (_sweep_kernel). The gradient of table[d] is the sum of dS along diagonal d,
   over rows, batch, and heads that share the table. One program visits all tiles of one diagonal of
   tiles. They hold the same distances at the same places, so it adds up the dS tiles in registers
   and sums along their diagonals once, at the end: no atomics, the same bits every time.

5. The clipped tail. The sweep visits only diagonals with a distance below m - 1. A row of dS sums
   to the gradient of its log-sum-exp (0 if there is none), so it is known what all entries of a
   table's gradient sum to. The last one, of all clipped distances, is this minus the others.

6. The corrected delta. dS = P (dP - delta) with delta_i = sum_j P_ij dP_ij, usually computed as
   dO_i . O_i from an O that was rounded to 16 bits. A bias gradient, which adds up thousands of dS,
   is then wrong by percents, and 5. would be, too. But a row of dS sums to exactly the error of its
   delta: the dQ kernel, which runs first, adds up each row and corrects delta for the others.

7. Gates (arXiv 2503.02130). c (B, H, Tk) are sums of log gates along the text. They pass -10^4, of
   which float32 keeps too few digits. So c arrives as a sum of two float32 numbers, and a program
   counts from its middle token. A key adds its number to the scores; a query's number is the same
   for all keys, so only the log-sum-exp gains it. The gradient of c_j is -dS summed over column j,
   which the program of the key has. Row i of dS sums to the gradient of the log-sum-exp, which is
   what c_i gains. Sums of this gradient along the text need the corrected delta, as tables do.
   (Not float64: each thread needs the numbers of many keys, and most cards are slow at it.)

Scratch memory is O(T + H m). Nothing is autotuned: TILES fixes the tile sizes, so that all
processes of a run compute the same bits.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import torch_private

# The kinds of bias, by the number of dimensions of slopes (H,) and a table (H, m).
NONE = tl.constexpr(0)
SLOPES = tl.constexpr(1)
TABLE = tl.constexpr(2)

# The segments of blocks that a program visits. Those below WHOLE need a mask.
SINKS = tl.constexpr(0)  # the first keys, if blocks between them and the window are not visited
LEFT = tl.constexpr(1)  # partly visible, before the whole ones
RIGHT = tl.constexpr(2)  # partly visible, after the whole ones
WHOLE = tl.constexpr(3)  # wholly visible
CLIPPED = tl.constexpr(4)  # wholly visible, and every distance is m - 1 or more

LOG2E = 1 / math.log(2)
LN2 = tl.constexpr(math.log(2))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Rows(NamedTuple):
    """A tensor (batch, head, token, channel) in memory; its channels are next to each other."""

    ptr: Any
    b: Any  # strides
    h: Any
    t: Any


class Call(NamedTuple):
    """The arguments that all kernels of one call of attention() share; None for an absent one.

    A None is known when a kernel is compiled, as are the fields in capitals below G.
    """

    q: Rows
    k: Rows
    v: Rows
    bias: Rows  # slopes (H,) or a table (H, m); t: distances
    gates: Rows  # in log2 units, of in_two_parts()
    docs: Rows
    Tq: int
    Tk: int
    m: int
    window: int
    sinks: int
    scale: float
    G: int  # query heads that share a key head
    D: tl.constexpr
    DP: tl.constexpr  # D, rounded up to a power of two
    KIND: tl.constexpr
    CAUSAL: tl.constexpr
    PRECISION: tl.constexpr  # precision of float32 products


# -----------------------------------------------------------------------------
# What the kernels share
#
# Pointers are in capitals. A tile has BM queries, numbered r (BM,), and BN keys, numbered c (BN,).
# i0 and n0 are the indices of its first query and its first key, m0 = i0 - (Tk - Tq) is the row of
# the first query, and d0 = i0 - n0 is the distance at r = c. FLIP: a tile is transposed, (BN, BM).


@triton.jit
def head_rows(x, b, h):
    """The rows of one head of one sequence; None of None."""
    if x is not None:
        return Rows(x.ptr + b * x.b + h * x.h, 0, 0, x.t)


@triton.jit
def load_rows(call, x, n0, n, limit, MASKED: tl.constexpr):
    """Load rows n0 + n of x: (n, DP), zero beyond D and, if MASKED, from row `limit` on."""
    channel = tl.arange(0, call.DP)[None, :]
    # int64: a token index times its stride can pass 2^31
    at = x.ptr + tl.cast(n0, tl.int64) * x.t + (n[:, None] * x.t + channel)
    if MASKED:
        return tl.load(at, mask=(n0 + n < limit)[:, None] & (channel < call.D), other=0.0)
    elif call.D < call.DP:
        return tl.load(at, mask=channel < call.D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(call, x, n0, n, limit, values):
    """Store rows n0 + n of x, up to row `limit`."""
    channel = tl.arange(0, call.DP)[None, :]
    at = x.ptr + tl.cast(n0, tl.int64) * x.t + (n[:, None] * x.t + channel)
    mask = (n0 + n < limit)[:, None] & (channel < call.D)
    tl.store(at, values.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pair(r, c, FLIP: tl.constexpr):
    """Something of each query and of each key of a tile, so that they combine to its shape."""
    if FLIP:
        return r[None, :], c[:, None]
    else:
        return r[:, None], c[None, :]


@triton.jit
def tile_product(call, queries, keys, FLIP: tl.constexpr):
    """The product of each query and each key of a tile."""
    if FLIP:
        return tl.dot(keys, tl.trans(queries), input_precision=call.PRECISION)
    else:
        return tl.dot(queries, tl.trans(keys), input_precision=call.PRECISION)


@triton.jit
def _segment(segments, b, block, segment: tl.constexpr):
    """The first block of a segment, and the one after its last: see tile_segments()."""
    at = segments.ptr + b * segments.b + block * segments.t + 2 * segment
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _has_key_blocks(call, segment: tl.constexpr):
    """Whether a query block can have key blocks in a segment."""
    hides_past = call.window is not None or call.docs is not None
    return (
        segment == RIGHT
        or segment == WHOLE
        or (segment == CLIPPED and call.KIND == TABLE)
        or (segment < RIGHT and hides_past)
    )


@triton.jit
def _entries(x, b, n, limit):
    """The documents of tokens n."""
    return tl.load(x.ptr + b * x.b + n * x.t, mask=n < limit, other=-1)


@triton.jit
def visible_keys(call, b, i, j, FLIP: tl.constexpr):
    """The mask of a tile: which keys j each query i sees, both by index."""
    at_i, at_j = _pair(i, j, FLIP)
    visible = at_j < call.Tk
    if call.CAUSAL:
        visible &= at_j <= at_i
    if call.window is not None:
        visible &= (tl.abs(at_i - at_j) < call.window) | (at_j < call.sinks)
    if call.docs is not None:
        doc_i = _entries(call.docs, b, i, call.Tk)
        doc_j = _entries(call.docs, b, j, call.Tk)
        of_i, of_j = _pair(doc_i, doc_j, FLIP)
        visible &= of_i == of_j
    return visible


# -----------------------------------------------------------------------------
# The bias of a tile


@triton.jit
def _difference(rows, columns):
    """Compute rows - columns for a tile, so that the compiler sees equal numbers in a thread.

    In the tensor cores' layout a thread's rows differ in the bits 8 and 64, and its columns in all
    bits but 2 and 4: these are known when the kernel is compiled. Added up by themselves they are
    one constant, and elements with the same difference become one load (half of them, or less).
    """
    of_thread = (rows & ~72)[:, None] - (columns & 6)[None, :] + (rows & 64)[:, None]
    return of_thread + ((rows & 8)[:, None] - (columns & ~6)[None, :])


@triton.jit
def _expand(row, x):
    """Expand a bias row (W,) to a tile: row[x], for indices x of the shape of the tile."""
    return tl.reshape(tl.gather(row, tl.ravel(x), 0), x.shape)


@triton.jit
def _load_constant(call, bias):
    """What does not depend on the distance: the slope, or the last entry of a table, which is the
    bias of all clipped distances.
    """
    if call.KIND == SLOPES:
        return tl.load(bias.ptr)
    elif call.KIND == TABLE:
        return tl.load(bias.ptr + call.m - 1)
    else:
        return 0.0


@triton.jit
def _load_gates(call, gates, i):
    """Load both parts of c_i of a head. Past the end: the last token's."""
    parts = tl.load(gates.ptr + tl.minimum(i, call.Tk - 1) * gates.t)
    low = parts.to(tl.int32).to(tl.float32, bitcast=True)
    return (parts >> 32).to(tl.int32).to(tl.float32, bitcast=True), low


@triton.jit
def _gates_since(call, gates, start, i):
    """Compute c_i - start in float32, for a start that is near c_i where it matters."""
    high, low = _load_gates(call, gates, i)
    return (high - start) + low


@triton.jit
def _scores(call, bias, q, k, constant, i0, n0, r, c, IS_CLIPPED: tl.constexpr, FLIP: tl.constexpr):
    """The scores of a tile, in log2 units, are s * factor + shift: returns the three.

    factor is a number, and shift a number or one for each query. So the scale, and a bias that is
    the same for all keys, cost no multiplication or addition of their own: a maximum is taken
    before them, and then there is one multiply-add an element in the exponent.
    constant: from _load_constant(); with gates, of each key from _gates_since().
    """
    s = tile_product(call, q, k, FLIP)
    factor = call.scale
    shift = 0.0
    d0 = i0 - n0
    if call.KIND == SLOPES:
        factor = 1.0
        if call.CAUSAL and q.dtype != tl.float32:
            # -slope (i - j), split into a part of the key and a part of query and tile: one
            # multiply-add an element, exact to 16 bits
            _, of_key = _pair(r, constant * c.to(tl.float32), FLIP)
            s = s * call.scale + of_key
            shift = -constant * (d0 + r).to(tl.float32)
        else:
            i, j = _pair(d0 + r, c, FLIP)
            s = s * call.scale - constant * tl.abs(i - j).to(tl.float32)
    elif call.KIND == TABLE:
        if IS_CLIPPED:
            shift = constant
        else:
            factor = 1.0
            last: tl.constexpr = c.shape[0] - 1
            W: tl.constexpr = triton.next_power_of_2(r.shape[0] + c.shape[0])
            distance = tl.abs(d0 - last + tl.arange(0, W))
            bias_row = tl.load(bias.ptr + tl.minimum(distance, call.m - 1))
            x = -_difference(c, r) if FLIP else _difference(r, c)
            s = s * call.scale + _expand(bias_row, x + last)
    elif call.gates is not None:
        factor = 1.0
        _, of_key = _pair(r, constant, FLIP)
        s = s * call.scale - of_key
    return s, factor, shift


# -----------------------------------------------------------------------------
# Forward: one program for BM queries of one head


@triton.jit
def _forward_kernel(call, segments, OUT, LSE, BM: tl.constexpr, BN: tl.constexpr):
    """Compute the output and the log-sum-exp (log2 units) of BM queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, c = tl.arange(0, BM), tl.arange(0, BN)
    k_head, v_head = head_rows(call.k, b, h // call.G), head_rows(call.v, b, h // call.G)
    bias = head_rows(call.bias, 0, h)
    gates = head_rows(call.gates, b, h)

    # the queries, and the constants of their bias
    m0 = block * BM
    i0 = call.Tk - call.Tq + m0
    if gates is not None:
        start, _ = _load_gates(call, gates, i0 + BM // 2)
    q = load_rows(call, head_rows(call.q, b, h), m0, r, call.Tq, True)
    constant = _load_constant(call, bias)

    acc = tl.zeros([BM, call.DP], tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    # Finite: a row may see nothing of its first tiles, and -inf - -inf is NaN.
    row_max = tl.full([BM], -1e30, tl.float32)
    for segment in tl.static_range(5):
        if _has_key_blocks(call, segment):
            first, end = _segment(segments, b, block, segment)
            for n in tl.range(first, end):
                # scores of the tile
                n0 = n * BN
                k = load_rows(call, k_head, n0, c, call.Tk, segment < WHOLE)
                of_tile = constant
                if gates is not None:
                    of_tile = _gates_since(call, gates, start, n0 + c)
                s, factor, shift = _scores(
                    call, bias, q, k, of_tile, i0, n0, r, c, segment == CLIPPED, False
                )
                if segment < WHOLE:
                    visible = visible_keys(call, b, i0 + r, n0 + c, False)
                    s = tl.where(visible, s, float("-inf"))

                # running softmax
                new_max = tl.maximum(row_max, tl.max(s, 1) * factor + shift)
                p = tl.exp2(s * factor - (new_max - shift)[:, None])
                decay = tl.exp2(row_max - new_max)
                row_max = new_max
                row_sum = row_sum * decay + tl.sum(p, 1)

                # values
                acc *= decay[:, None]
                v = load_rows(call, v_head, n0, c, call.Tk, segment < WHOLE)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=call.PRECISION)

    store_rows(call, head_rows(OUT, b, h), m0, r, call.Tq, acc / row_sum[:, None])
    to = LSE + ((b * tl.num_programs(1) + h) * call.Tq + m0 + r)
    lse = row_max + tl.log2(row_sum)
    if gates is not None:
        lse += _gates_since(call, gates, start, i0 + r)
    tl.store(to, lse, mask=m0 + r < call.Tq)


# -----------------------------------------------------------------------------
# Backward: P is recomputed from the log-sum-exp; dP = dO v; dS = P (dP - delta)


@triton.jit
def _dq_kernel(call, segments, OUT, LSE, DOUT, DLSE, DQ, DELTA, BM: tl.constexpr, BN: tl.constexpr):
    """Compute dQ and the corrected delta of BM queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, c = tl.arange(0, BM), tl.arange(0, BN)
    k_head, v_head = head_rows(call.k, b, h // call.G), head_rows(call.v, b, h // call.G)
    bias = head_rows(call.bias, 0, h)
    gates = head_rows(call.gates, b, h)

    # the queries, their output and its gradient, and the constants of their bias
    m0 = block * BM
    i0 = call.Tk - call.Tq + m0
    q = load_rows(call, head_rows(call.q, b, h), m0, r, call.Tq, True)
    do = load_rows(call, head_rows(DOUT, b, h), m0, r, call.Tq, True)
    out = load_rows(call, head_rows(OUT, b, h), m0, r, call.Tq, True)
    constant = _load_constant(call, bias)
    row = (b * tl.num_programs(1) + h) * call.Tq + m0 + r
    in_range = m0 + r < call.Tq
    lse = tl.load(LSE + row, mask=in_range, other=float("inf"))  # past the last query P is 0
    if gates is not None:
        start, _ = _load_gates(call, gates, i0 + BM // 2)
        lse -= _gates_since(call, gates, start, i0 + r)
    # Zeros are loaded too, because without the load the kernel needs 80 more registers on sm_90.
    dlse = tl.load(DLSE + row, mask=in_range, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse

    dq = tl.zeros([BM, call.DP], tl.float32)
    # What a row of dS sums to, beyond the gradient of its log-sum-exp, is the error of its delta.
    delta_error = -dlse
    for segment in tl.static_range(5):
        if _has_key_blocks(call, segment):
            first, end = _segment(segments, b, block, segment)
            for n in tl.range(first, end):
                # probabilities of the tile
                n0 = n * BN
                k = load_rows(call, k_head, n0, c, call.Tk, segment < WHOLE)
                of_tile = constant
                if gates is not None:
                    of_tile = _gates_since(call, gates, start, n0 + c)
                s, factor, shift = _scores(
                    call, bias, q, k, of_tile, i0, n0, r, c, segment == CLIPPED, False
                )
                p = tl.exp2(s * factor - (lse - shift)[:, None])
                if segment < WHOLE:
                    visible = visible_keys(call, b, i0 + r, n0 + c, False)
                    p = tl.where(visible, p, 0.0)

                # gradient of the scores
                v = load_rows(call, v_head, n0, c, call.Tk, segment < WHOLE)
                dp = tile_product(call, do, v, False)
                ds = p * (dp - delta[:, None])
                delta_error += tl.sum(ds, 1)

                # gradient of the queries
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=call.PRECISION)

    unit = call.scale * LN2  # ln 2 undoes the log2(e) in scale
    store_rows(call, head_rows(DQ, b, h), m0, r, call.Tq, dq * unit)
    tl.store(DELTA + row, delta + delta_error, mask=in_range)


@triton.jit
def _dkdv_kernel(
    call, segments, LSE, DOUT, DELTA, DK, DV, DKEY, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute dK and dV of BN keys of one key head, over the G query heads that share it.

    Tiles are transposed, (BN, BM), because the products need P^T and dS^T.
    DKEY (batch, query head, key), if it is not None: what the queries of a head add, at each key,
    to the gradient of its slope, or the gradient of the gates as what a key adds.
    """
    block = tl.program_id(0)
    hk, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, c = tl.arange(0, BM), tl.arange(0, BN)
    n0 = block * BN
    H = tl.num_programs(1) * call.G
    k = load_rows(call, head_rows(call.k, b, hk), n0, c, call.Tk, True)
    v = load_rows(call, head_rows(call.v, b, hk), n0, c, call.Tk, True)
    dk = tl.zeros([BN, call.DP], tl.float32)
    dv = tl.zeros([BN, call.DP], tl.float32)
    for g in tl.range(0, call.G):
        h = hk * call.G + g
        q_head = head_rows(call.q, b, h)
        do_head = head_rows(DOUT, b, h)
        bias = head_rows(call.bias, 0, h)
        gates = head_rows(call.gates, b, h)
        row = (b * H + h) * call.Tq
        constant = _load_constant(call, bias)
        if gates is not None:
            start, _ = _load_gates(call, gates, n0 + BN // 2)
            constant = _gates_since(call, gates, start, n0 + c)
        dkey = tl.zeros([BN], tl.float32)
        for segment in tl.static_range(1, 5):
            if segment < CLIPPED or call.KIND == TABLE:
                first, end = _segment(segments, b, block, segment)
                for n in tl.range(first, end):
                    # probabilities of the tile
                    m0 = n * BM
                    i0 = call.Tk - call.Tq + m0
                    q = load_rows(call, q_head, m0, r, call.Tq, segment < WHOLE)
                    s, factor, shift = _scores(
                        call, bias, q, k, constant, i0, n0, r, c, segment == CLIPPED, True
                    )
                    if segment < WHOLE:
                        in_range = m0 + r < call.Tq
                        lse = tl.load(LSE + row + m0 + r, mask=in_range, other=float("inf"))
                        delta = tl.load(DELTA + row + m0 + r, mask=in_range, other=0.0)
                    else:
                        lse = tl.load(LSE + row + m0 + r)
                        delta = tl.load(DELTA + row + m0 + r)
                    if gates is not None:
                        lse -= _gates_since(call, gates, start, i0 + r)
                    p = tl.exp2(s * factor - (lse - shift)[None, :])
                    if segment < WHOLE:
                        visible = visible_keys(call, b, i0 + r, n0 + c, True)
                        p = tl.where(visible, p, 0.0)

                    # gradients of the values, the scores and the keys
                    do = load_rows(call, do_head, m0, r, call.Tq, segment < WHOLE)
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=call.PRECISION)
                    dp = tile_product(call, do, v, True)
                    ds = p * (dp - delta[None, :])
                    if DKEY is not None:
                        if gates is not None:
                            dkey -= tl.sum(ds, 1)
                        else:
                            i, j = _pair((i0 - n0 + r).to(tl.float32), c.to(tl.float32), True)
                            dkey -= tl.sum(ds * tl.abs(i - j), 1)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=call.PRECISION)
        if DKEY is not None:
            at = DKEY + (b * H + h) * call.Tk + n0 + c
            tl.store(at, dkey, mask=n0 + c < call.Tk)

    unit = call.scale * LN2  # ln 2 undoes the log2(e) in scale
    store_rows(call, head_rows(DK, b, hk), n0, c, call.Tk, dk * unit)
    store_rows(call, head_rows(DV, b, hk), n0, c, call.Tk, dv)


# -----------------------------------------------------------------------------
# The diagonal sweep: the gradient of a table


@triton.jit
def _tile_exists(segments, b, block, n):
    """Whether documents leave anything of key block n for a query block."""
    if segments is None:
        return True
    else:  # SINKS, or from the start of LEFT to the end of RIGHT
        at = segments.ptr + b * segments.b + block * segments.t
        return (n < tl.load(at + 1)) | (n >= tl.load(at + 2)) & (n < tl.load(at + 5))


@triton.jit
def _split_by_distance(tile, r, c):
    """A square tile by distance instead of by key: the smaller distances, and the larger.

    Column c goes to column y = (r - c - 1) mod B, which is its own inverse. The distance at column
    y is d0 - (B - 1) + y if y >= r (on and above the tile's diagonal), and B more if y < r.
    """
    B: tl.constexpr = r.shape[0]
    i = r[:, None]
    y = (i - 1 - c[None, :]) & (B - 1)
    tile = tl.reshape(tl.gather(tl.ravel(tile), tl.ravel(i * B + y), 0), [B, B])
    is_low = c[None, :] >= i
    return tl.where(is_low, tile, 0.0), tl.where(is_low, 0.0, tile)


@triton.jit
def _sweep_kernel(call, segments, LSE, DOUT, DELTA, DBIAS, B, first_diagonal, BM: tl.constexpr):
    """Sum dS over one diagonal of BM x BM tiles of one head, or over one of several splits of it.

    Query block n meets key block n - diagonal, for all n and all sequences of the batch. In these
    tiles everything that depends on the distance is the same. The summed tile is then summed along
    its diagonals: DBIAS (splits, H, diagonals, 2 BM), by r - c + BM - 1.
    segments: None if the indices alone decide which keys are visible.
    """
    index = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    H = tl.num_programs(1)
    diagonal = first_diagonal + index
    d0 = call.Tk - call.Tq + diagonal * BM
    r, c = tl.arange(0, BM), tl.arange(0, BM)
    bias = head_rows(call.bias, 0, h)

    # the tiles of this program: query blocks n_lo .. n_hi - 1 of each sequence
    n_lo = tl.maximum(diagonal, 0)
    n_hi = tl.minimum(tl.cdiv(call.Tq, BM), tl.cdiv(call.Tk, BM) + diagonal)
    if call.window is not None:
        if d0 - (BM - 1) >= call.window:  # beyond the window only sinks are visible
            n_hi = tl.minimum(n_hi, diagonal + tl.cdiv(call.sinks, BM))
    length = tl.maximum(n_hi - n_lo, 0)
    total = length * B
    per_split = tl.cdiv(total, tl.num_programs(2))
    start = split * per_split

    # added to the scores of all its tiles: the table, and -inf in the future
    tile_bias = tl.zeros([BM, BM], tl.float32)
    if call.CAUSAL:
        tile_bias = tl.where(d0 + r[:, None] - c[None, :] >= 0, 0.0, float("-inf"))
    distance = tl.abs(d0 - (BM - 1) + tl.arange(0, 2 * BM))
    bias_row = tl.load(bias.ptr + tl.minimum(distance, call.m - 1))
    tile_bias += _expand(bias_row, r[:, None] - c[None, :] + (BM - 1))

    acc = tl.zeros([BM, BM], tl.float32)
    for t in tl.range(start, tl.minimum(start + per_split, total)):
        b = (t // length).to(tl.int64)
        block = n_lo + t % length
        if _tile_exists(segments, b, block, block - diagonal):
            # probabilities of the tile
            m0 = block * BM
            n0 = (block - diagonal) * BM
            q = load_rows(call, head_rows(call.q, b, h), m0, r, call.Tq, True)
            k = load_rows(call, head_rows(call.k, b, h // call.G), n0, c, call.Tk, True)
            s = tile_product(call, q, k, False)
            row = (b * H + h) * call.Tq + m0 + r
            lse = tl.load(LSE + row, mask=m0 + r < call.Tq, other=float("inf"))
            delta = tl.load(DELTA + row, mask=m0 + r < call.Tq, other=0.0)
            p = tl.exp2(s * call.scale + tile_bias - lse[:, None])
            if call.window is not None or call.docs is not None or not call.CAUSAL:
                i = call.Tk - call.Tq + m0 + r
                p = tl.where(visible_keys(call, b, i, n0 + c, False), p, 0.0)

            # gradient of the scores
            do = load_rows(call, head_rows(DOUT, b, h), m0, r, call.Tq, True)
            v = load_rows(call, head_rows(call.v, b, h // call.G), n0, c, call.Tk, True)
            dp = tile_product(call, do, v, False)
            acc += p * (dp - delta[:, None])

    # the sum along diagonals, once for all tiles
    at = ((split * H + h) * tl.num_programs(0) + index) * (2 * BM)
    low, high = _split_by_distance(acc, r, c)
    tl.store(DBIAS + at + c, tl.sum(low, 0))
    tl.store(DBIAS + at + BM + c, tl.sum(high, 0))


@triton.jit
def _table_kernel(
    PARTIAL, TOTAL, REACHED, GRAD, m, d0, splits, diagonals,
    BM: tl.constexpr, BN: tl.constexpr, IS_REACHED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one head's table: GRAD (H, m), in natural units.

    PARTIAL: the sweep's, of which the first number is the sum at distance d0. Neighbouring
    diagonals overlap by BM. TOTAL (H,): what all entries sum to; None: 0. The last one is the rest,
    or exactly 0 if no query reaches it: an optimizer would make steps of a rounding. Whether one
    does is in REACHED, or if that is None IS_REACHED.
    """
    h = tl.program_id(0).to(tl.int64)
    H = tl.num_programs(0)
    others = 0.0
    for start in tl.range(0, m, BN):
        n = start + tl.arange(0, BN)
        grad = tl.zeros([BN], tl.float32)
        # keys before the query, and after it
        for sign in tl.static_range(-1, 2, 2):
            at = -sign * n - d0
            is_counted = (n < m - 1) & (at >= 0) & ((n > 0) | (sign < 0))
            low = tl.zeros([BN], tl.float32)
            high = tl.zeros([BN], tl.float32)
            for split in tl.range(0, splits):
                # A distance is in the first half of its diagonal, and in the second of the one before.
                row = PARTIAL + (split * H + h) * diagonals * (2 * BM) + at + at // BM * BM
                low += tl.load(row, mask=is_counted & (at < diagonals * BM), other=0.0)
                is_high = is_counted & (at >= BM) & (at < (diagonals + 1) * BM)
                high += tl.load(row - BM, mask=is_high, other=0.0)
            grad += low + high
        grad *= LN2  # the table arrived in log2 units
        tl.store(GRAD + h * m + n, grad, mask=n < m - 1)
        others += tl.sum(grad, 0)
    rest = -others
    if TOTAL is not None:
        rest += tl.load(TOTAL + h) * LN2
    if REACHED is not None:
        rest = tl.where(tl.load(REACHED), rest, 0.0)
    elif not IS_REACHED:
        rest = 0.0
    tl.store(GRAD + h * m + m - 1, rest)


@triton.jit
def _reach_kernel(call, segments, REACHED, BM: tl.constexpr, BN: tl.constexpr):
    """Find out for BM queries of one sequence whether any sees a key at a clipped distance."""
    block = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    i = call.Tk - call.Tq + block * BM + tl.arange(0, BM)
    _, sinks_end = _segment(segments, b, block, SINKS)
    first, _ = _segment(segments, b, block, LEFT)
    _, end = _segment(segments, b, block, RIGHT)
    reached = tl.zeros([BM], tl.int32)
    for t in tl.range(0, sinks_end + end - first):
        j = tl.where(t < sinks_end, t, t - sinks_end + first) * BN + tl.arange(0, BN)
        is_clipped = tl.abs(i[:, None] - j[None, :]) >= call.m - 1
        is_clipped &= visible_keys(call, b, i, j, False) & (i < call.Tk)[:, None]
        reached |= tl.max(is_clipped.to(tl.int32), 1)
    tl.store(REACHED + b * tl.num_programs(0) + block, tl.max(reached, 0))


# -----------------------------------------------------------------------------
# Tile sizes
#
# sm_90's tiles were timed on an H200. Nobody has timed the others.
# They were chosen by ahead-of-time compilation: nothing is spilled up to D = 128, and shared memory
# is within the card's limit. sm_100 and sm_103 have sm_90's tiles, without bounds on registers, which
# spill there. dq and dkdv have one stage there: with more, Triton 3.7.1 leaves out a proxy fence
# between cp.async and some products, which is a race by the rules of PTX. tests/aot.py looks for it.
# Compiled for sm_100 and never timed there, these tiles spill at most 136 bytes.


class Tile(NamedTuple):
    """What one program works on, and how it is compiled."""

    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int  # stages of software pipelining
    registers: int = 0  # the most of a thread, on CUDA; 0: the compiler decides


KERNELS = ("forward", "dq", "dkdv", "sweep")
KINDS = ("none", "slopes", "table")
# 16-bit elements: the architecture and the head dimension, rounded up, to a Tile for each of
# KERNELS. sm_90: and newer data-centre cards; small: cards with 99 KiB of shared memory. A row for
# one of KINDS on one architecture goes before the general one.
# A bound on registers is for calls without a window or documents: there it spills at most 8 bytes,
# and a multiprocessor has room for a program more.
TILES = {
    ("sm_80", 64): ((128, 32, 4, 3), (128, 64, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2)),
    ("sm_80", 128): ((64, 64, 4, 2), (128, 32, 8, 3), (16, 128, 8, 2), (64, 64, 4, 2)),
    ("sm_90", 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
    ("sm_90 slopes", 64): (
        (64, 64, 4, 2, 128),
        (64, 64, 4, 2, 168),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
    ),
    ("sm_90 table", 64): ((64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 64, 4, 2), (64, 64, 4, 3)),
    ("sm_90", 128): ((128, 64, 8, 3), (128, 64, 8, 3), (32, 128, 8, 3), (64, 64, 4, 3)),
    ("sm_90 none", 128): ((64, 64, 4, 3), (128, 64, 8, 3), (32, 128, 8, 3), (64, 64, 4, 3)),
    ("sm_100", 64): ((64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 3)),
    ("sm_100", 128): ((128, 64, 8, 3), (128, 64, 8, 1), (32, 128, 8, 1), (64, 64, 4, 3)),
    ("sm_100 none", 128): ((64, 64, 4, 3), (128, 64, 8, 1), (32, 128, 8, 1), (64, 64, 4, 3)),
    ("small", 64): ((64, 64, 4, 2), (64, 32, 8, 2), (32, 64, 4, 1), (32, 32, 4, 2)),
    ("small", 128): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 2)),
}
SWEEP_PROGRAMS = 512  # about so many, if the tiles allow: a diagonal is split to get there


def tile_for(q, kind, kernel):
    """The Tile of one of KERNELS for queries (B, H, T, D) and a kind of bias."""
    family, _ = device_family(q.device)
    D = q.shape[3]
    if family == "interpreter":
        return Tile(32, 64 if kernel == "dkdv" else 32, 4, 1)
    if q.element_size() > 2 or D > 128:
        side = 16 if D > 64 else 32
        return Tile(side, side, 8, 1)
    width = 64 if D <= 64 else 128
    row = TILES.get((f"{family} {KINDS[kind]}", width)) or TILES[family, width]
    return Tile(*row[KERNELS.index(kernel)])


@torch_private.constant_in_graphs
def device_family(device):
    """The architecture in TILES of a device, and how float32 products are computed there.

    That is as three tf32 products, or plainly if there are none ("ieee").
    """
    return _find_family(device)


@functools.cache
def _find_family(device):
    if device.type == "cpu":
        return "interpreter", "ieee"
    if torch.version.hip:
        return "small", "ieee"
    major, minor = torch.cuda.get_device_capability(device)
    known = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
    return known.get((major, minor), "small"), "tf32x3"


# -----------------------------------------------------------------------------
# Which tiles are visited

TILES_AT_ONCE = 1 << 22  # tiles of a matrix in tile_segments()


def tile_segments(docs, window, sinks, Tq, Tk, m, causal, BM, BN, of_keys, device):
    """The key blocks that each query block visits; if of_keys, the query blocks of each key block.

    Returns int32 (1 or B, blocks, 16): the start and the end of each segment, SINKS to CLIPPED, and
    6 zeros, so that every row starts at a multiple of 16 bytes. m: 0 without a table.
    The smallest and largest index and document of each block decide. So a tile is left out only if
    it is surely empty, in whatever order documents are. If they are in order, no empty tile is
    visited.
    """
    # the indices of the tokens of each block; past the end the last one is repeated
    i = torch.arange(triton.cdiv(Tq, BM) * BM, device=device).clamp(max=Tq - 1) + Tk - Tq
    j = torch.arange(triton.cdiv(Tk, BN) * BN, device=device).clamp(max=Tk - 1)
    i, j = i.view(-1, BM), j.view(-1, BN)
    rows, columns = (j, i) if of_keys else (i, j)
    found = []
    for part in rows.split(max(1, TILES_AT_ONCE // len(columns))):
        i, j = (columns, part) if of_keys else (part, columns)
        some, whole, clipped = classify_tiles(docs, window, sinks, m, causal, i, j)
        if of_keys:
            some, whole, clipped = some.mT, whole.mT, clipped.mT
        # tokens past the end: their results are not stored
        is_full = columns[:, -1] - columns[:, 0] == columns.shape[1] - 1
        found.append(find_segments(some, whole & is_full, clipped & is_full, of_keys))
    return torch.nn.functional.pad(torch.cat(found, 1).int(), (0, 6))


def block_ranges(x, i, j):
    """The least and largest x of each query block (., nq, 1) and key block (., 1, nk)."""
    x_i, x_j = (i[None], j[None]) if x is None else (x[:, i], x[:, j])
    q_min, q_max = x_i.long().aminmax(dim=-1)
    k_min, k_max = x_j.long().aminmax(dim=-1)
    return q_min[..., None], q_max[..., None], k_min[:, None], k_max[:, None]


def classify_tiles(docs, window, sinks, m, causal, i, j):
    """Which tiles are visible in part, which wholly, and which wholly and at clipped distances.

    Three masks (1 or B, query blocks, key blocks). No comparison has a sum of a query and a key in
    it, which would need 8 bytes a tile.
    """
    i_min, i_max, j_min, j_max = block_ranges(None, i, j)
    some = (j_min <= i_max) | (not causal)
    whole = (j_max <= i_min) | (not causal)
    if window:
        near = (i_min - window < j_max) & (j_min < i_max + window)
        some = some & (near | (j_min < sinks))
        near = (i_max - window < j_min) & (j_max < i_min + window)
        whole = whole & (near | (j_max < sinks))
    if docs is not None:
        q_min, q_max, k_min, k_max = block_ranges(docs, i, j)
        some = some & (k_min <= q_max) & (q_min <= k_max)
        whole = whole & (q_min == k_max) & (q_max == k_min)
    whole = whole & some
    return some, whole, whole & (j_max <= i_min - (m - 1)) & (m > 0)


def find_first(x, start):
    """Return the first index from `start` (...) on at which each row (..., n) is True, or n."""
    n = x.shape[-1]
    x = x & (torch.arange(n, device=x.device) >= start[..., None])
    return torch.where(x.any(-1), x.view(torch.uint8).argmax(-1), n)


def find_segments(some, whole, clipped, of_keys):
    """The segments of each row of tiles, from the three masks: (1 or B, rows, 10).

    All visible tiles are in [lo, hi), except for SINKS, and those in [left, right) are whole.
    """
    n = some.shape[-1]
    zero = torch.zeros(some.shape[:-1], dtype=torch.int64, device=some.device)
    hi = n - find_first(some.flip(-1), zero)
    # The tiles before a first gap are sinks, if there are more after it.
    gap = zero if of_keys else find_first(~some, zero)
    lo = find_first(some, gap)
    sinks_end = torch.where(lo < n, gap, 0)
    lo = torch.where(lo < n, lo, 0)
    left = find_first(whole, lo)
    left = torch.where(left < n, left, lo)
    right = find_first(~whole, left).minimum(hi)
    # Distances grow from query block to query block, and fall from key block to key block.
    turn = find_first(clipped if of_keys else ~clipped, left).minimum(right)
    near = (left, turn) if of_keys else (turn, right)
    clipped = (turn, right) if of_keys else (left, turn)
    return torch.stack((zero, sinks_end, lo, left, right, hi, *near, *clipped), -1)


_by_index = {}


def segments_by_index(*where):
    """tile_segments() where nothing but indices decides: once for all calls of these sizes.

    In a CUDA graph, unless known before: a tensor computed there has no values outside of it.
    """
    segments = _by_index.get(where)
    if segments is None:
        segments = tile_segments(None, *where)
        if where[-1].type != "cuda" or not torch.cuda.is_current_stream_capturing():
            if len(_by_index) >= 128:
                _by_index.clear()
            _by_index[where] = segments
    return segments


@torch.library.custom_op("nanolong::tile_segments", mutates_args=())
def _tile_segments(
    docs: torch.Tensor, window: int, sinks: int,
    Tq: int, Tk: int, m: int, causal: bool, BM: int, BN: int, of_keys: bool,
) -> torch.Tensor:  # fmt: skip
    """tile_segments(), which torch.compile does not look into."""
    where = window, sinks, Tq, Tk, m, causal, BM, BN, of_keys
    return tile_segments(docs, *where, docs.device)


@_tile_segments.register_fake
def _(docs, window, sinks, Tq, Tk, m, causal, BM, BN, of_keys):
    blocks = triton.cdiv(Tk, BN) if of_keys else triton.cdiv(Tq, BM)
    return docs.new_empty(len(docs), blocks, 16, dtype=torch.int32)


def prepare_mask(tensors, docs, window, sinks, causal, has_grad, shared):
    """Bring documents (B, Tk) to int32, and find the tiles that they leave.

    Returns the documents, and tile_segments() for each of KERNELS that will run. Without documents
    the list is empty, because find_tiles() keeps these. shared: None, or a dict in which the result
    stays for calls with the same mask.
    """
    q, k, _, bias, _ = tensors
    if docs is None:
        return None, []
    kind, m = kind_of(bias)
    names = KERNELS[:1]
    if has_grad:
        names = KERNELS if kind == TABLE.value else KERNELS[:3]
    tiles = tuple((*tile_for(q, kind, name)[:2], name == "dkdv") for name in names)
    where = (window, sinks, q.shape[2], k.shape[2], m, causal)
    # In training, torch.compile itself merges equal calls of an operator; and it cannot change a
    # dict of the model in a block that is checkpointed.
    is_shared = shared is not None and not (has_grad and torch.compiler.is_compiling())
    if is_shared and (where, tiles) in shared:
        of_docs, result = shared[where, tiles]
        if of_docs is docs:
            return result
    narrow = docs.int()
    found = {tile: _tile_segments(narrow, *where, *tile) for tile in dict.fromkeys(tiles)}
    result = narrow, [found[tile] for tile in tiles]
    if is_shared:
        shared[where, tiles] = docs, result
    return result


# -----------------------------------------------------------------------------
# Launching the kernels

_compiled = {}  # kernels that have run


def run(kernel, x, grid, arguments, constants, **options):
    """Run kernel[grid](*arguments, **constants, **options) on the device of the tensor x.

    A kernel that has run is launched without Triton's search for it, which takes 20 us of 25.
    constants: the tl.constexpr arguments, which come last, in order. grid: three numbers.
    """
    values = *constants.values(), *options.values()
    key = (kernel, x.device, *signature(arguments), *signature(values))
    compiled = _compiled.get(key)
    with torch.cuda.device_of(x):  # Triton launches kernels on the current device
        if compiled is not None:
            compiled[grid](*arguments, *constants.values())
            return
        # a product and a sum in one instruction: Triton 3.9 warns that 3.10 will not by default
        compiled = kernel[grid](*arguments, **constants, **options, enable_fp_fusion=True)
    if compiled is not None:  # the interpreter has none
        if len(_compiled) >= 4096:
            _compiled.clear()
        _compiled[key] = compiled


NUMBERS = (int, float, bool, type(None))


def signature(arguments):
    """What Triton compiles a kernel for: dtypes, whether a tensor starts at a multiple of 16 bytes,
    and of a number its type, size and some divisors, which follow from its value.
    """
    known = []
    for x in arguments:
        kind = type(x)
        if kind in NUMBERS:
            known += kind, x
        elif kind is Rows:
            ptr, *strides = x
            known += ptr.dtype, ptr.data_ptr() % 16, *strides
        elif kind is Call:
            known += signature(x)
        elif kind is tl.constexpr:
            known += type(x.value), x.value
        else:
            known += x.dtype, x.data_ptr() % 16
    return known


def kind_of(bias):
    """The kind of bias, and the number m of distances of a table."""
    kind = 0 if bias is None else bias.dim()
    return kind, bias.shape[1] if kind == TABLE.value else 0


def as_rows(x):
    """Rows of a tensor (B, H, T, D), or None."""
    return None if x is None else Rows(x, *x.stride()[:3])


def per_token(x):
    """Rows of a number for each token (1 or B, T), or of 16 for each block, or None."""
    return None if x is None else Rows(x, x.stride(0) if len(x) > 1 else 0, 0, x.stride(1))


def per_distance(x):
    """Rows of slopes (H,) or a table (H, m), or None."""
    return None if x is None else Rows(x, 0, x.stride(0), 1)


def in_two_parts(gates):
    """Gates (B, H, T) float64 as two float32 numbers in the bits of one int64, in log2 units."""
    if gates is None:
        return None
    gates = gates * LOG2E
    high = gates.float()
    low = (gates - high).float()
    return torch.stack((low, high), -1).view(torch.int64)[..., 0]


def make_call(q, k, v, bias, gates, docs, window, sinks, causal, scale):
    kind, m = kind_of(bias)
    _, H, Tq, D = q.shape
    _, HK, Tk, _ = k.shape
    precision = device_family(q.device)[1] if q.dtype == torch.float32 else "ieee"
    return Call(
        as_rows(q), as_rows(k), as_rows(v), per_distance(bias), as_rows(gates),
        per_token(docs), Tq, Tk, m, window or None, sinks, scale * LOG2E, H // HK,
        *constants(D, max(16, triton.next_power_of_2(D)), kind, causal, precision),
    )  # fmt: skip


@functools.cache
def constants(*values):
    """The fields of a Call that are known when a kernel is compiled."""
    return tuple(map(tl.constexpr, values))


def find_tiles(name, call, segments):
    """Return tile_segments() for one of KERNELS, as in prepare_mask()'s, and a grid of its rows."""
    q = call.q.ptr
    of_keys = name == "dkdv"
    if segments:
        tiles = segments[KERNELS.index(name)]
    else:
        BM, BN, *_ = tile_for(q, call.KIND.value, name)
        where = (call.window or 0, call.sinks, call.Tq, call.Tk, call.m, call.CAUSAL.value)
        tiles = segments_by_index(*where, BM, BN, of_keys, q.device)
    return tiles, (tiles.shape[1], (call.k.ptr if of_keys else q).shape[1], len(q))


def launch(kernel, name, grid, call, tiles, *arguments):
    """Launch a kernel with the Tile of one of KERNELS, and the arguments after its segments.

    tiles: result of tile_segments(), or None for a sweep over all.
    """
    tile = tile_for(call.q.ptr, call.KIND.value, name)
    # The sweep's tiles are square.
    sizes = {"BM": tile.BM} if name == "sweep" else {"BM": tile.BM, "BN": tile.BN}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers and call.window is None and call.docs is None:
        options["maxnreg"] = tile.registers
    run(kernel, call.q.ptr, grid, (call, per_token(tiles), *arguments), sizes, **options)


def empty_output(x):
    """An empty (B, H, T, D) like x, stored as (B, T, H, D), as the next matrix product reads it."""
    B, H, T, D = x.shape
    return torch.empty(B, T, H, D, dtype=x.dtype, device=x.device).transpose(1, 2)


def empty_results(q, *others):
    """The output of attention and its log-sum-exp, both empty."""
    return empty_output(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def kernel_layout(x):
    """Copy x (B, H, T, D) if the kernels cannot read it as it is.

    They need contiguous channels (a gradient that autograd expanded has stride 0), and tokens less
    than 2^24 elements apart, because offsets within a block have 32 bits. They start at a multiple
    of 16 bytes, with strides that are multiples of 16 elements: only then are rows copied
    asynchronously, and for other copies Triton 3.7 leaves out a fence before the products of sm_90.
    """
    aligned = all(stride % 16 == 0 for stride in x.stride()[:3])
    aligned = aligned and x.data_ptr() % 16 == 0
    if aligned and x.stride(3) == 1 and x.stride(2) < 1 << 24:
        return x
    B, H, T, D = x.shape
    return x.new_empty(B, H, T, triton.cdiv(D, 16) * 16)[..., :D].copy_(x)


# -----------------------------------------------------------------------------
# The operators


def operator(name, fake):
    """Register a function as an operator, which torch.compile does not look into: a decorator.

    fake: function of the same arguments that returns empty results. torch.library.custom_op does
    more, at three times the cost of a call: an autograd.Function differentiates these.
    """

    def register(function):
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, fake)
        namespace, _, own = name.partition("::")
        return getattr(getattr(torch.ops, namespace), own).default

    return register


@operator("nanolong::attention", empty_results)
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, gates: torch.Tensor | None,
    docs: torch.Tensor | None, segments: list[torch.Tensor],
    window: int, sinks: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The forward pass: the output and the log-sum-exp in log2 units."""
    q, k, v = (kernel_layout(x) for x in (q, k, v))
    out, lse = empty_results(q)
    if out.numel():
        terms = bias, in_two_parts(gates)
        call = make_call(q, k, v, *terms, docs, window, sinks, causal, scale)
        tiles, grid = find_tiles("forward", call, segments)
        launch(_forward_kernel, "forward", grid, call, tiles, as_rows(out), lse)
    return out, lse


def _empty_grads(q, k, v, bias, gates, bias_grad):
    """Empty dq, dk, dv, and with bias_grad float32 dbias or dgates, whichever there is."""
    terms = [x for x in (bias, gates) if x is not None and bias_grad]
    grads = [empty_output(x) for x in (q, k, v)]
    return grads + [x.new_empty(x.shape, dtype=torch.float32) for x in terms]


def _fake_grads(dout, dlse, out, lse, q, k, v, bias, gates, *others):
    return _empty_grads(q, k, v, bias, gates, bias_grad=others[-1])


@operator("nanolong::attention_backward", _fake_grads)
def _attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, gates: torch.Tensor | None,
    docs: torch.Tensor | None, segments: list[torch.Tensor],
    window: int, sinks: int, causal: bool, scale: float, bias_grad: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The backward pass: dq, dk, dv, and with bias_grad dbias or dgates."""
    grads = _empty_grads(q, k, v, bias, gates, bias_grad)
    dq, dk, dv, *of_term = grads
    dgates = of_term[0] if of_term and gates is not None else None
    if not out.numel():
        return [x.zero_() for x in grads]
    dout, q, k, v = (kernel_layout(x) for x in (dout, q, k, v))
    if dlse is not None:
        dlse = (dlse * LOG2E).contiguous()  # from a log-sum-exp in log2 to natural units
    terms = bias, in_two_parts(gates)
    call = make_call(q, k, v, *terms, docs, window, sinks, causal, scale)
    kind = call.KIND.value if bias_grad else NONE.value

    delta = torch.empty_like(lse)
    of_rows = torch.zeros_like(lse) if dlse is None else dlse
    tensors = as_rows(out), lse, as_rows(dout), of_rows, as_rows(dq), delta
    tiles, grid = find_tiles("dq", call, segments)
    launch(_dq_kernel, "dq", grid, call, tiles, *tensors)
    dkey = dgates
    if kind == SLOPES.value:
        dkey = lse.new_empty(*lse.shape[:2], call.Tk)
    tensors = lse, as_rows(dout), delta, as_rows(dk), as_rows(dv), dkey
    tiles, grid = find_tiles("dkdv", call, segments)
    launch(_dkdv_kernel, "dkdv", grid, call, tiles, *tensors)
    if dgates is not None and dlse is not None:
        dgates[..., call.Tk - call.Tq :] += dlse
    if kind == SLOPES.value:
        of_term[0].copy_(dkey.sum((0, 2)) / LOG2E)  # slopes arrived in log2 units
    if kind == TABLE.value:
        partial, d0, BM = _sweep(call, segments, lse, dout, delta)
        splits, H, diagonals, _ = partial.shape
        total = None if dlse is None else dlse.sum((0, 2))
        reached = reaches_last_entry(call, segments)
        is_known = isinstance(reached, bool)
        run(
            _table_kernel, lse, (H, 1, 1),
            (partial, total, None if is_known else reached, of_term[0],
             call.m, d0, splits, diagonals),
            {"BM": BM, "BN": 512, "IS_REACHED": is_known and reached},
            num_warps=4,
        )  # fmt: skip
    return grads


def _sweep(call, segments, lse, dout, delta):
    """Run the diagonal sweep.

    Returns the sums by distance, float32 (splits, H, diagonals, 2 BM), the smallest distance of the
    first diagonal, and BM.
    """
    B, H = lse.shape[:2]
    BM = tile_for(call.q.ptr, call.KIND.value, "sweep").BM
    q_start = call.Tk - call.Tq

    # the diagonals (query block - key block) whose tiles hold distances |d| < near
    near = call.m - 1
    if call.window and not call.sinks:
        near = min(near, call.window)
    lowest = q_start + BM - 1
    if not call.CAUSAL.value:
        lowest += near - 1
    first = max(1 - triton.cdiv(call.Tk, BM), -(lowest // BM))
    last = min(triton.cdiv(call.Tq, BM) - 1, triton.cdiv(near - 1 - q_start, BM))
    d0 = q_start + first * BM - (BM - 1)
    diagonals = max(0, last - first + 1)

    # The number of splits depends on the shapes alone, so the same sums come out on every device.
    tiles = B * triton.cdiv(call.Tq, BM)
    splits = max(1, min(SWEEP_PROGRAMS // (H * max(1, diagonals)), tiles))
    partial = lse.new_empty(splits, H, diagonals, 2 * BM)
    if diagonals:
        tiles = segments[KERNELS.index("sweep")] if segments else None
        tensors = lse, as_rows(dout), delta, partial
        launch(_sweep_kernel, "sweep", (diagonals, H, splits), call, tiles, *tensors, B, first)
    return partial, d0, BM


def reaches_last_entry(call, segments):
    """Whether a query sees a key at distance m - 1 or more: a bool, or one on the device."""
    if segments:
        tiles, (n_blocks, _, B) = find_tiles("dq", call, segments)
        reached = tiles.new_empty(B, n_blocks)
        launch(_reach_kernel, "dq", (n_blocks, 1, B), call, tiles, reached)
        return reached.any()
    is_near = call.window and call.window < call.m and not call.sinks
    return bool(call.Tk >= call.m and not is_near)


class _Attention(torch.autograd.Function):
    """The operators, differentiated: `options` are the numbers that both take."""

    @staticmethod
    def forward(ctx, return_lse, options, q, k, v, bias, gates, docs, *segments):
        tensors = q, k, v, bias, gates, docs
        out, lse = _attention(*tensors, list(segments), *options)
        ctx.save_for_backward(out, lse, *tensors, *segments)
        ctx.options = options
        return (out, lse) if return_lse else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse=None):
        out, lse, *saved = ctx.saved_tensors
        tensors, segments = saved[:6], saved[6:]
        needed = ctx.needs_input_grad[2:7]  # the last two: bias and gates
        grads = _attention_backward(
            dout, dlse, out, lse, *tensors, segments, *ctx.options, any(needed[3:])
        )
        dq, dk, dv, *of_term = grads
        dbias = of_term[0] if needed[3] else None
        dgates = of_term[0].double() if needed[4] else None
        return None, None, dq, dk, dv, dbias, dgates, None, *[None] * len(segments)


# -----------------------------------------------------------------------------
# The function to call


def attention(
    q, k, v, *, bias=None, window=0, sinks=0, docs=None, causal=True, scale=None,
    return_lse=False, shared=None, gates=None,
):  # fmt: skip
    """Compute softmax(q k^T scale + bias, over the visible keys) v.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D), 1 <= D <= 256: float16, bfloat16 or float32, the same
    for all three, with any strides. Tq <= Tk: the queries are the last Tq of the Tk tokens. Returns
    (B, H, Tq, D), a view of (B, Tq, H, D). Gradients reach all tensors but docs.

    bias: None, slopes (H,) or a table (H, m), float32. gates: None, or c (B, H, Tk) float64,
    without a bias. docs (B, Tk): integers below 2^31.
    What they mean, and the other arguments: attention() of kernels/reference.py.

    Raises ValueError for what the kernels do not support.
    """
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tensors = prepare(q, k, v, bias, gates, docs, scale)
    has_grad = needs_grad(tensors)
    docs, segments = prepare_mask(tensors, docs, window, sinks, causal, has_grad, shared)
    options = (window, sinks, causal, scale)
    arguments = distinct(*tensors, docs, *segments)
    result = _Attention.apply(return_lse, options, *arguments)
    return (result[0], result[1] * math.log(2)) if return_lse else result


def distinct(*tensors):
    """Return the tensors, and views where one comes again: torch.compile differentiates no function
    that is given a tensor twice.
    """
    result = list(tensors)
    if torch.compiler.is_compiling():
        for place, x in enumerate(tensors):
            if x is not None and any(x is y for y in tensors[:place]):
                result[place] = x.view_as(x)
    return result


def needs_grad(tensors):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def require(holds, problem, *values):
    """Raise ValueError unless it holds. problem: a sentence, with {} for each value."""
    if not holds:
        raise ValueError(problem.format(*values))


def prepare(q, k, v, bias, gates, docs, scale):
    """Check the arguments of attention(), and bring them to the units and dtypes of the kernels.

    Returns q, k, v, bias and gates: see Call.
    """
    B, H, Tq, D = q.shape
    HK, Tk = k.shape[1:3]
    require(
        q.dtype == k.dtype == v.dtype and q.dtype in DTYPES,
        "q, k, v are {}, {}, {}: use one of {}, the same for all",
        *(q.dtype, k.dtype, v.dtype, DTYPES),
    )
    fits = k.shape == v.shape == (B, HK, Tk, D) and H % HK == 0 and Tq <= Tk
    require(
        fits and 1 <= D <= 256 and max(B, H) <= 65535,
        "q, k, v {}, {}, {} do not fit: use q (B, H, Tq, D), k and v (B, Hk, Tk, D), with H a "
        "multiple of Hk, Tq <= Tk and D <= 256",
        *(q.shape, k.shape, v.shape),
    )
    require(scale > 0, "scale is {}: use one above 0", scale)
    fits = docs is None or docs.shape == (B, Tk) and not docs.is_floating_point()
    require(fits, "docs do not fit: use integers of the shape {}", (B, Tk))
    require(bias is None or gates is None, "bias and gates are given: use one of them")
    if gates is not None:
        fits = gates.shape == (B, H, Tk) and gates.dtype == torch.float64
        require(fits, "gates are {}, {}: use (B, H, Tk), float64", gates.shape, gates.dtype)
    if bias is not None:
        fits = bias.shape[:1] == (H,) and bias.dim() < 3 and bias.numel()
        require(fits, "the bias has shape {}: use slopes (H,) or a table (H, m)", bias.shape)
        bias = (bias.float() * LOG2E).contiguous()
    return q, k, v, bias, gates
