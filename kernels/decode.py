"""Attention of one or a few queries over a long cache, in Triton, with the bias of every scheme.

Shares with flash.py how a call is described, loaded and masked: copy both into your project.

The formula is flash.py's, without a gradient. In plain PyTorch: attention() in
kernels/reference.py.

Why another kernel: a query meets each key once, so the work is to read the cache as fast as memory
allows. The grid of flash.py, one program for a block of queries of a head, would read it with only
B x H programs. Here the keys are split over programs (flash-decoding): each takes some of the key
blocks and stores a maximum, a sum and an unnormalised output. A small second kernel combines the
splits. The query heads that share a key head are packed as rows of one tile, so the cache is read
once for the whole group.

With a single query every bias is simple: key j is at one distance i - j, so a table is read
backwards, one row a head, and relative vectors are loaded like a second cache. If each head has
its own vectors (Transformer-XL) nothing can be packed, and a program takes one head. Gates are read
as they are, in float64: bringing them to two parts would read the cache of them twice.

The number of splits depends on the shapes alone, so the same call gives the same bits.
"""

import math

import torch
import triton
import triton.language as tl

from .flash import (
    LN2,
    SLOPES,
    TABLE,
    VECTORS,
    Rows,
    as_rows,
    empty_results,
    head_rows,
    kernel_layout,
    load_rows,
    make_call,
    needs_grad,
    prepare,
    require,
    store_rows,
    tile_product,
    visible_keys,
)


@triton.jit
def _heads_of_token(x, b, t):
    """The rows of all heads of one token."""
    return Rows(x.ptr + b * x.b + tl.cast(t, tl.int64) * x.t, 0, 0, x.h)


@triton.jit
def _split_kernel(
    call, LENGTH, OUT, ROW_MAX, ROW_SUM, H,
    BN: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attend over one split of the keys: one query of each of PACK heads that share a key head."""
    Tk = call.Tk
    if LENGTH is not None:  # the valid length of the cache: shapes and launch stay as it grows
        Tk = tl.load(LENGTH).to(tl.int32)
    split = tl.program_id(0)
    b = (tl.program_id(2) // call.Tq).to(tl.int64)
    t = tl.program_id(2) % call.Tq
    i = Tk - call.Tq + t
    # int64: a head index times its stride can pass 2^31
    r = tl.arange(0, ROWS).to(tl.int64)
    c = tl.arange(0, BN)

    # a row for each head, with what its bias needs
    h0 = (tl.program_id(1) * PACK).to(tl.int64)
    h = tl.minimum(h0 + r, H - 1)
    k_head = head_rows(call.k, b, h0 // call.G)
    v_head = head_rows(call.v, b, h0 // call.G)
    q = load_rows(call, _heads_of_token(call.q, b, t), h0, r, h0 + PACK, True)
    if call.KIND == SLOPES:
        slope = tl.load(call.bias.ptr + h * call.bias.h)
    elif call.KIND == VECTORS:
        # all packed heads share the vectors, or there is one head
        qr = load_rows(call, _heads_of_token(call.qr, b, t), h0, r, h0 + PACK, True)
        rel_k = head_rows(call.bias, 0, h0)
        rel_v = head_rows(call.rel_v, 0, h0)
    elif call.gates is not None:
        gates_at = call.gates.ptr + b * call.gates.b + h * call.gates.h
        c_i = tl.load(gates_at + i * call.gates.t)

    # the key blocks of this split: with a window, those between sinks and window are not visited
    hi = tl.cdiv(i + 1, BN) if call.CAUSAL else tl.cdiv(Tk, BN)
    lo = hi * 0
    sink_end = hi * 0
    if call.window is not None and call.pos is None:
        lo = tl.maximum(i - call.window + 1, 0) // BN
        sink_end = tl.minimum(tl.cdiv(call.sinks, BN), lo)
    blocks = sink_end + hi - lo
    per_split = tl.cdiv(blocks, tl.num_programs(0))

    acc = tl.zeros([ROWS, call.DP], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    # Finite: a row may see nothing of its first blocks, and -inf - -inf is NaN.
    row_max = tl.full([ROWS], -1e30, tl.float32)
    for block in tl.range(split * per_split, tl.minimum(split * per_split + per_split, blocks)):
        # scores, in log2 units
        n0 = tl.where(block < sink_end, block, block - sink_end + lo) * BN
        j = n0 + c
        k = load_rows(call, k_head, n0, c, Tk, True)
        s = tile_product(call, q, k, False)
        distance = tl.abs(i - j)
        clipped = tl.minimum(distance, call.m - 1)
        if call.KIND == VECTORS:
            vectors = load_rows(call, rel_k, 0, clipped, 0, False)
            s += tile_product(call, qr, vectors, False)
        s = s * call.scale
        if call.KIND == SLOPES:
            s -= slope[:, None] * distance.to(tl.float32)[None, :]
        elif call.KIND == TABLE:
            s += tl.load(call.bias.ptr + (h * call.bias.h)[:, None] + clipped[None, :])
        elif call.gates is not None:
            c_j = tl.load(
                gates_at[:, None] + (j * call.gates.t)[None, :], mask=(j < Tk)[None, :], other=0.0
            )
            s += (c_i[:, None] - c_j).to(tl.float32) * (1 / LN2)

        # mask
        visible = visible_keys(call, b, tl.zeros([1], tl.int32) + i, j, Tk, False)
        s = tl.where(visible, s, float("-inf"))

        # running softmax and values
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * decay + tl.sum(p, 1)
        v = load_rows(call, v_head, n0, c, Tk, True)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=call.PRECISION)
        if call.rel_v is not None:
            vectors = load_rows(call, rel_v, 0, clipped, 0, False)
            acc = tl.dot(p.to(v.dtype), vectors, acc, input_precision=call.PRECISION)

    # the row of head 0 in (B, H, Tq, splits); the next head is Tq * splits further
    splits = tl.num_programs(0)
    first = (b * H * call.Tq + t) * splits + split
    at = first + h * (call.Tq * splits)
    tl.store(ROW_MAX + at, row_max, mask=r < PACK)
    tl.store(ROW_SUM + at, row_sum, mask=r < PACK)
    to = Rows(OUT + first * call.D, 0, 0, call.Tq * splits * call.D)
    store_rows(call, to, h0, r, h0 + PACK, acc)


@triton.jit
def _combine_kernel(call, PARTIAL, ROW_MAX, ROW_SUM, OUT, LSE, splits, S: tl.constexpr):
    """Combine the splits of one query of one head, weighted by 2^(their maximum - the largest).

    S: the number of splits, rounded up to a power of two.
    """
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = (b * tl.num_programs(1) + h) * call.Tq + t
    split = tl.arange(0, S)
    at = row * splits + split
    # a split that has seen nothing has -1e30 as its maximum, and the weight 0
    row_max = tl.load(ROW_MAX + at, mask=split < splits, other=-1e30)
    total_max = tl.max(row_max, 0)
    weight = tl.exp2(row_max - total_max)
    row_sum = tl.load(ROW_SUM + at, mask=split < splits, other=0.0)
    total = tl.sum(row_sum * weight, 0)
    rows = Rows(PARTIAL, 0, 0, call.D)
    partial = load_rows(call, rows, row * splits, split, row * splits + splits, True)
    out = tl.sum(partial * weight[:, None], 0) / total
    store_rows(call, head_rows(OUT, b, h), t, tl.arange(0, 1), call.Tq, out[None, :])
    tl.store(LSE + row, total_max + tl.log2(total))


def number_of_splits(Tk, programs, BN):
    """Over how many programs the keys are split: 256 in all, with at least four key blocks each."""
    return max(1, min(256 // programs, triton.cdiv(triton.cdiv(Tk, BN), 4), 64))


@torch.library.custom_op("nanolong::attention_decode", mutates_args=())
def _decode(
    q: torch.Tensor, qr: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, rel_v: torch.Tensor | None, gates: torch.Tensor | None,
    docs: torch.Tensor | None, positions: torch.Tensor | None,
    window: int, sinks: int, causal: bool, scale: float, length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output and the log-sum-exp in log2 units."""
    # A cache of any strides is read as it is: a copy would cost more than the attention.
    q, qr, k, v = (kernel_layout(x, multiple=1) for x in (q, qr, k, v))
    out, lse = empty_results(q)
    if not out.numel():
        return out, lse
    B, H, Tq, D = q.shape
    HK, Tk = k.shape[1:3]
    terms = bias, rel_v, gates
    call = make_call(q, qr, k, v, *terms, docs, positions, window, sinks, causal, scale)
    # heads of a program: those that share the keys, if they share the vectors too
    is_vectors = call.KIND.value == VECTORS.value
    packed = 1 if is_vectors and len(bias) > 1 else H // HK

    # a block of 16 KiB of keys, half of that for 32-bit elements, and half for relative vectors
    row = call.DP.value * q.element_size()
    n_bytes = 16384 // (2 if q.element_size() > 2 else 1) // (2 if is_vectors else 1)
    BN = max(16, min(128, n_bytes // row))
    # with a window, only some of the keys are visited
    visited = min(Tk, window + sinks + 2 * BN) if window and positions is None else Tk
    splits = number_of_splits(visited, H // packed * B * Tq, BN)
    partial = lse.new_empty(B, H, Tq, splits, D)
    row_max = lse.new_empty(B, H, Tq, splits)
    row_sum = torch.empty_like(row_max)
    with torch.cuda.device_of(q):  # Triton launches kernels on the current device
        _split_kernel[splits, H // packed, B * Tq](
            call, length, partial, row_max, row_sum, H,
            BN=BN, PACK=packed, ROWS=max(16, triton.next_power_of_2(packed)),
            num_warps=4, num_stages=2 if row * BN <= 8192 else 1,
        )  # fmt: skip
        _combine_kernel[Tq, H, B](
            call, partial, row_max, row_sum, as_rows(out), lse, splits,
            S=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out, lse


_decode.register_fake(empty_results)


def attention(
    q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None,
    causal=True, scale=None, return_lse=False, length=None, gates=None,
):  # fmt: skip
    """Compute attention() of flash.py for few queries, without gradient.

    The arguments, shapes, dtypes and results are the same; each query reads the cache once. length:
    see kernels/reference.py; it is read on the device, so that one launch (a CUDA graph) serves a
    growing cache.

    Raises ValueError for what the kernel does not support.
    """
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tensors = prepare(q, k, v, bias, relative, gates, positions, docs, scale)
    n_queries = q.shape[0] * q.shape[2]
    require(n_queries <= 65535, "{} queries of a head do not fit: use at most 65535", n_queries)
    require(
        not needs_grad(tensors),
        "an argument requires a gradient, and this kernel has none: call it under "
        "torch.no_grad(), or call attention() of kernels/flash.py",
    )
    mask = [None if x is None else torch.atleast_2d(x).int() for x in (docs, positions)]
    out, lse = _decode(*tensors, *mask, window, sinks, causal, scale, length)
    return (out, lse * math.log(2)) if return_lse else out
