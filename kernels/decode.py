"""Attention of one or a few queries over a long cache, in Triton, with the bias of every scheme.

Imports only torch and triton: copy this file into your project.

The formula is that of kernels/flash.py, without a gradient. In plain PyTorch: attention() in
kernels/reference.py.

Why another kernel: a query meets each key once, so the work is to read the cache as fast as memory
allows. The grid of flash.py, one program for a block of queries of a head, would read it with only
B x H programs. Here the keys are split over programs (flash-decoding): each takes some of the key
blocks and stores a maximum, a sum and an unnormalised output. A small second kernel combines the
splits. The query heads that share a key head are packed as rows of one tile, so the cache is read
once for the whole group.

With a single query every bias is simple: key j is at one distance i - j, so a table is read
backwards, one row a head, and relative vectors are loaded like a second cache. Where each head has
its own vectors (Transformer-XL) nothing can be packed, and a program takes one head.

The number of splits depends on the shapes alone, so the same call gives the same bits.
"""

import math

import torch
import triton
import triton.language as tl

# The kinds of bias.
NONE = tl.constexpr(0)
SLOPES = tl.constexpr(1)
TABLE = tl.constexpr(2)
VECTORS = tl.constexpr(3)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _split_kernel(
    # pointers
    Q, QR, K, V, BIAS, REL_V, POS, DOC, LENGTH, OUT, ROW_MAX, ROW_SUM,
    # strides
    q_b, q_h, q_t, qr_b, qr_h, qr_t, k_b, k_h, k_t, v_b, v_h, v_t,
    bias_h, bias_t, p_b, p_t, d_b, d_t,
    # sizes
    Tq, Tk, H, G, m, window, sinks, scale,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, HAS_REL_V: tl.constexpr, QR_IS_Q: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    """Attend over one split of the keys: one query of each of PACK heads that share a key head."""
    if HAS_LENGTH:  # the valid length of the cache: shapes and launch stay the same as it grows
        Tk = tl.load(LENGTH).to(tl.int32)
    split = tl.program_id(0)
    group = tl.program_id(1)
    b = (tl.program_id(2) // Tq).to(tl.int64)
    t = tl.program_id(2) % Tq
    r = tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    channel = tl.arange(0, DP)
    i = Tk - Tq + t
    heads = r < PACK
    channels = (channel < D)[None, :]
    h = tl.minimum(group * PACK + r, H - 1).to(tl.int64)  # (ROWS,)
    kv = (group * PACK // G).to(tl.int64)
    K = K + b * k_b + kv * k_h
    V = V + b * v_b + kv * v_h
    POS = POS + b * p_b
    DOC = DOC + b * d_b
    BIAS_ROWS = BIAS + h * bias_h  # a table has a row for each head; vectors are shared by them all
    BIAS = BIAS + (group * PACK).to(tl.int64) * bias_h
    REL_V = REL_V + (group * PACK).to(tl.int64) * bias_h
    q_mask = heads[:, None] & channels
    q_at = Q + b * q_b + t * q_t + h[:, None] * q_h + channel[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    qr, slope = q, tl.zeros([ROWS], tl.float32)
    if KIND == SLOPES:
        slope = tl.load(BIAS_ROWS)
    elif KIND == VECTORS and not QR_IS_Q:
        qr_at = QR + b * qr_b + t * qr_t + h[:, None] * qr_h + channel[None, :]
        qr = tl.load(qr_at, mask=q_mask, other=0.0)

    # the key blocks of this split: with a window, those between sinks and window are not visited
    hi = tl.cdiv(i + 1, BN) if CAUSAL else tl.cdiv(Tk, BN)
    lo, sink_end = hi * 0, hi * 0
    if WINDOW and not POSITIONS:
        lo = tl.maximum(i - window + 1, 0) // BN
        sink_end = tl.minimum(tl.cdiv(sinks, BN), lo)
    blocks = sink_end + hi - lo
    per_split = tl.cdiv(blocks, tl.num_programs(0))

    acc = tl.zeros([ROWS, DP], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    # Finite: a row may see nothing of its first blocks, and -inf - -inf is NaN.
    row_max = tl.full([ROWS], -1e30, tl.float32)
    for block in tl.range(split * per_split, tl.minimum(split * per_split + per_split, blocks)):
        # scores, in log2 units
        n0 = tl.where(block < sink_end, block, block - sink_end + lo) * BN
        j = n0 + n
        key_mask = (j < Tk)[:, None] & channels
        # int64: a token index times its stride can pass 2^31
        k_at = K + tl.cast(n0, tl.int64) * k_t + (n[:, None] * k_t + channel[None, :])
        k = tl.load(k_at, mask=key_mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = tl.abs(i - j)
        if KIND == SLOPES:
            s = s * scale - slope[:, None] * distance.to(tl.float32)[None, :]
        elif KIND == TABLE:
            s = s * scale + tl.load(BIAS_ROWS[:, None] + tl.minimum(distance, m - 1)[None, :])
        elif KIND == VECTORS:
            vectors_at = BIAS + tl.minimum(distance, m - 1)[:, None] * bias_t + channel[None, :]
            vectors = tl.load(vectors_at, mask=channels, other=0.0)
            s = tl.dot(qr, tl.trans(vectors), s, input_precision=PRECISION) * scale
        else:
            s = s * scale

        # mask
        visible = j < Tk
        if CAUSAL:
            visible = visible & (j <= i)
        if WINDOW:
            if POSITIONS:
                pj = tl.load(POS + j * p_t, mask=j < Tk, other=0)
                pi = tl.load(POS + i * p_t)
                visible = visible & ((tl.abs(pi - pj) < window) | (pj < sinks))
            else:
                visible = visible & ((distance < window) | (j < sinks))
        if DOCS:
            dj = tl.load(DOC + j * d_t, mask=j < Tk, other=-1)
            visible = visible & (dj == tl.load(DOC + i * d_t))
        s = tl.where(visible[None, :], s, float("-inf"))

        # running softmax and values
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * decay + tl.sum(p, 1)
        v_at = V + tl.cast(n0, tl.int64) * v_t + (n[:, None] * v_t + channel[None, :])
        v = tl.load(v_at, mask=key_mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        if HAS_REL_V:
            vectors_at = REL_V + tl.minimum(distance, m - 1)[:, None] * bias_t + channel[None, :]
            vectors = tl.load(vectors_at, mask=channels, other=0.0)
            acc = tl.dot(p.to(v.dtype), vectors, acc, input_precision=PRECISION)

    at = ((b * H + h) * Tq + t) * tl.num_programs(0) + split
    tl.store(ROW_MAX + at, row_max, mask=heads)
    tl.store(ROW_SUM + at, row_sum, mask=heads)
    tl.store(OUT + at[:, None] * D + channel[None, :], acc, mask=q_mask)


@triton.jit
def _combine_kernel(
    # pointers
    PARTIAL, ROW_MAX, ROW_SUM, OUT, LSE,
    # strides
    o_b, o_h, o_t,
    # sizes
    Tq, H, splits,
    # compile-time flags
    D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query of one head, weighted by 2^(their maximum - the largest)."""
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, S)
    channel = tl.arange(0, DP)
    row = (b * H + h) * Tq + t
    row_max = tl.load(ROW_MAX + row * splits + split, mask=split < splits, other=-1e30)
    total_max = tl.max(row_max, 0)
    weight = tl.exp2(row_max - total_max)
    row_sum = tl.load(ROW_SUM + row * splits + split, mask=split < splits, other=0.0)
    total = tl.sum(row_sum * weight, 0)
    at = PARTIAL + (row * splits + split)[:, None] * D + channel[None, :]
    mask = (split < splits)[:, None] & (channel < D)[None, :]
    partial = tl.load(at, mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / total
    at = OUT + b * o_b + h * o_h + t * o_t + channel
    tl.store(at, out.to(OUT.dtype.element_ty), mask=channel < D)
    tl.store(LSE + row, total_max + tl.log2(total))


def number_of_splits(Tk, programs, BN):
    """Over how many programs the keys are split: 256 in all, with at least four key blocks each."""
    return max(1, min(256 // programs, triton.cdiv(triton.cdiv(Tk, BN), 4), 64))


def _kernel_layout(x):
    """Copy x if the kernels cannot read it: see kernels/flash.py."""
    if x is None or x.stride(-1) == 1 and x.stride(2) < 1 << 24:
        return x
    return x.contiguous()


@torch.library.custom_op("nanolong::attention_decode", mutates_args=())
def _decode(
    q: torch.Tensor, qr: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor,
    bias: torch.Tensor | None, rel_v: torch.Tensor | None,
    positions: torch.Tensor | None, docs: torch.Tensor | None,
    window: int, sinks: int, causal: bool, scale: float, length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output and the log-sum-exp in log2 units."""
    q, qr, k, v = (_kernel_layout(x) for x in (q, qr, k, v))
    out, lse = _empty_results(q)
    if not out.numel():
        return out, lse
    B, H, Tq, D = q.shape
    HK, Tk = k.shape[1:3]
    DP = max(16, triton.next_power_of_2(D))
    kind = NONE if bias is None else (None, SLOPES, TABLE, VECTORS)[bias.dim()]
    by_head = bias is not None and bias.shape[0] > 1
    m = bias.shape[1] if bias is not None and bias.dim() > 1 else 0
    heads = 1 if kind is VECTORS and by_head else H // HK  # packed into one program

    # a block of 16 KiB of keys, half of that for 32-bit elements, and half for relative vectors
    row = DP * q.element_size()
    n_bytes = 16384 // (2 if q.element_size() > 2 else 1) // (2 if kind is VECTORS else 1)
    BN = max(16, min(128, n_bytes // row))
    visited = min(Tk, window + sinks + 2 * BN) if window and positions is None else Tk
    splits = number_of_splits(visited, H // heads * B * Tq, BN)
    partial = lse.new_empty(B, H, Tq, splits, D)
    row_max, row_sum = (lse.new_empty(B, H, Tq, splits) for _ in range(2))

    # q stands in for a tensor that is absent
    absent = (qr, bias, rel_v, positions, docs, length)
    other, bias_or_q, rel_v_or_q, pos, doc, n = (q if x is None else x for x in absent)
    strides = [stride for x in (q, other, k, v) for stride in x.stride()[:3]]
    is_float32_gpu = q.dtype == torch.float32 and q.device.type != "cpu" and not torch.version.hip
    flags = {
        "KIND": kind.value,
        "HAS_REL_V": rel_v is not None,
        "QR_IS_Q": qr is None,
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "POSITIONS": window > 0 and positions is not None,
        "DOCS": docs is not None,
        "PRECISION": "tf32x3" if is_float32_gpu else "ieee",
        "HAS_LENGTH": length is not None,
    }
    with torch.cuda.device_of(q):  # Triton launches kernels on the current device
        _split_kernel[splits, H // heads, B * Tq](
            q, other, k, v, bias_or_q, rel_v_or_q, pos, doc, n, partial, row_max, row_sum, *strides,
            bias.stride(0) if by_head else 0, bias.stride(1) if kind is VECTORS else 1,
            pos.stride(0) if pos.dim() == 2 else 0, pos.stride(-1), doc.stride(0), doc.stride(-1),
            Tq, Tk, H, H // HK, m, window, sinks, scale / math.log(2),
            D=D, DP=DP, BN=BN, PACK=heads, ROWS=max(16, triton.next_power_of_2(heads)),
            **flags, num_warps=4, num_stages=2 if row * BN <= 8192 else 1,
        )  # fmt: skip
        _combine_kernel[Tq, H, B](
            partial, row_max, row_sum, out, lse, *out.stride()[:3], Tq, H, splits,
            D=D, DP=DP, S=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out, lse


@_decode.register_fake
def _(q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale, length=None):
    return _empty_results(q)


def _empty_results(q):
    """The output, stored as (B, Tq, H, D), and the log-sum-exp in log2 units; both empty."""
    B, H, Tq, D = q.shape
    return q.new_empty(B, Tq, H, D).transpose(1, 2), q.new_empty(B, H, Tq, dtype=torch.float32)


def attention(
    q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None,
    causal=True, scale=None, return_lse=False, length=None,
):  # fmt: skip
    """Compute attention() of kernels/flash.py for few queries, without gradient.

    The arguments, shapes, dtypes and results are the same; each query reads the cache once.

    length      int64 (1,): the valid length, for a cache of fixed capacity: only the first `length`
                keys exist. It is read on the device, so one launch (a CUDA graph) serves a growing
                cache.

    Raises ValueError for what the kernel does not support.
    """
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    _check_arguments(q, k, v, bias, relative, positions, docs, scale)
    qr = rel_v = None
    if bias is not None:
        bias = (bias.float() / math.log(2)).contiguous()
    elif relative is not None:
        keys, values, offsets = relative
        bias = keys.to(q.dtype).contiguous()
        rel_v = None if values is None else values.to(q.dtype).contiguous()
        if offsets is not None:
            u, w = offsets
            q, qr = (q + u[:, None]).to(q.dtype), (q + w[:, None]).to(q.dtype)
    positions = None if positions is None else positions.int()
    docs = None if docs is None else docs.int()
    out, lse = _decode(
        q, qr, k, v, bias, rel_v, positions, docs, window, sinks, causal, scale, length
    )
    return (out, lse * math.log(2)) if return_lse else out


def _check_arguments(q, k, v, bias, relative, positions, docs, scale):
    """Raise ValueError for what the kernel does not support."""
    B, H, Tq, D = q.shape
    HK, Tk = k.shape[1:3]
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = shapes[1] == shapes[2] == (B, HK, Tk, D) and H % HK == 0 and Tq <= Tk
    keys, values, offsets = relative or (None, None, None)
    keys_fit = keys is None or keys.dim() == 3 and keys.shape[0] in (1, H) and keys.shape[2] == D
    if keys is not None and (not keys.numel() or values is not None and values.shape != keys.shape):
        keys_fit = False
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        problem = (
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: use one of {DTYPES}, the same for all"
        )
    elif not fits or not 1 <= D <= 256 or max(B * Tq, H) > 65535:
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
    elif torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, bias, keys, values, *(offsets or ()))
    ):
        problem = (
            "an argument requires a gradient, and this kernel has none: call it under "
            "torch.no_grad(), or call attention() of kernels/flash.py"
        )
    else:
        return
    raise ValueError(f"attention: {problem}")


def _are_integers(x, *shapes):
    """Whether x is None, or integers of one of these shapes."""
    return x is None or tuple(x.shape) in shapes and not x.is_floating_point()
