"""The faults that test_mutations.py puts into the kernels: MUTATIONS."""

from typing import NamedTuple

EVERY = -1


class Mutation(NamedTuple):
    """Replace `old` by `new`, and expect a check to find it.

    In the source of a kernel: the text, which must occur exactly once, or its `occurrence`. In the
    PTX of a kernel: the first match of a regular expression, its `occurrence`, or EVERY one; `new`
    may refer to its groups.
    """

    name: str
    check: str  # a name in checks.py: what is expected to find it
    old: str
    new: str
    occurrence: int | None = None  # counted from 0
    file: str = ""  # in kernels/: whose source is changed
    kernel: str = ""  # or the kernel whose PTX is changed


# -----------------------------------------------------------------------------
# Faults in the source

NONE_90 = "none, float16, sm_90"
SLOPES_80 = "slopes, grouped queries, sm_80"
TABLE_80 = "table, one sweep, sm_80"
TABLE_90 = "table, window, sinks and documents, sm_90"
XL_80 = "xl, forward, sm_80"
SHAW_80 = "shaw, sm_80"
FLOAT32_80 = "float32, sm_80"
TABLE_FLOAT32_80 = "table of 3 entries, float32, sm_80"
ALL_KEYS_80 = "all keys, sm_80"
HEADS_80 = "two heads, two sequences, sm_80"
DECODE_80 = "decode, table, sm_80"
ROTARY_80 = "rotary, bfloat16, sm_80"
ROTARY_90 = "rotary, float32, sm_90"
ZERO_SUM_80 = "table gradient sums to zero, sm_80"
TAIL_80 = "clipped tail of the table's gradient, sm_80"
VECTOR_TAIL_80 = "clipped tail of the vectors' gradient, sm_80"
ODD_90 = "odd rows, sm_90"
LARGE_80 = "large constant in the table, sm_80"
DOCUMENTS_80 = "documents, sm_80"
WINDOW_80 = "window, sm_80"
SINKS_80 = "sinks, sm_80"
WHOLE_ROTARY_90 = "rotary, every channel, sm_90"
NEAREST_80 = "rounds to nearest, sm_80"
NEAREST_90 = "rounds to nearest, sm_90"
FAR_80 = "keys far apart in memory, sm_80"
FAR_RESULTS_80 = "results far apart in memory, sm_80"
FAR_HEADS_80 = "heads far apart in memory, sm_80"
FAR_ROTARY_80 = "rotary, far apart in memory, sm_80"

FLASH = (
    # masks
    ("a row too many is loaded", NONE_90, "tl.load(at, mask=(n0 + n < limit)",
     "tl.load(at, mask=(n0 + n <= limit)"),
    ("the query itself is hidden", NONE_90, "at_j <= at_i", "at_j < at_i"),
    ("one future key is seen", NONE_90, "at_j <= at_i", "at_j <= at_i + 1"),
    ("keys past the last are seen", ALL_KEYS_80, "visible = at_j < Tk", "visible = at_j < Tk + 7"),
    ("the window is one too wide", SINKS_80, "(tl.abs(at_i - at_j) < call.window)",
     "(tl.abs(at_i - at_j) <= call.window)"),
    ("one sink too many", SINKS_80, "| (at_j < call.sinks)", "| (at_j <= call.sinks)"),
    ("documents are not told apart", TABLE_90, "visible &= of_i == of_j",
     "visible &= of_i == of_i"),
    ("the sweep sees the future", TABLE_80, "d0 + r[:, None] - c[None, :] >= 0, 0.0",
     "d0 + r[:, None] - c[None, :] >= -1, 0.0"),
    # which tiles are visited, and how
    ("a tile too many counts as whole", TABLE_80, "whole = (j_max <= i_min)",
     "whole = (j_min <= i_min)"),
    ("the last tile of a block is skipped", NONE_90, "hi = n - find_first(some.flip(-1), zero)",
     "hi = n - find_first(some.flip(-1), zero) - 1"),
    ("the window starts a tile late", WINDOW_80, "near = (q_min - window < k_max)",
     "near = (q_min - window < k_min)"),
    ("tiles before the window's edge count as whole", WINDOW_80,
     "near = (q_max - window < k_min)", "near = (q_max - window < k_max)"),
    ("the tile with the sinks is skipped", SINKS_80, "some = some & (near | (k_min < sinks))",
     "some = some & near"),
    ("the sinks have no segment", SINKS_80, "sinks_end = torch.where(lo < n, gap, 0)",
     "sinks_end = zero"),
    ("the sweep skips the sinks", "table and positions, sm_80",
     "return (n < tl.load(at + 1)) | (n >= tl.load(at + 2)) &",
     "return (n >= tl.load(at + 2)) &"),
    ("near tiles count as clipped by one", TABLE_FLOAT32_80, "(j_max <= i_min - (m - 1))",
     "(j_max <= i_min - (m - 2))"),
    ("near tiles and clipped ones are swapped for keys", TABLE_FLOAT32_80,
     "near = (left, turn) if of_keys", "near = (turn, right) if of_keys"),
    ("the last keys need no mask", ALL_KEYS_80, "== columns.shape[1] - 1",
     "<= columns.shape[1]"),
    ("the last queries need no mask", NONE_90, "== columns.shape[1] - 1",
     "<= columns.shape[1]"),
    ("the last tile of a diagonal is skipped", TABLE_FLOAT32_80,
     "n_hi = tl.minimum(tl.cdiv(call.Tq, BM), tl.cdiv(call.Tk, BM) + diagonal)",
     "n_hi = tl.minimum(call.Tq // BM, tl.cdiv(call.Tk, BM) + diagonal)"),
    ("the sweep drops the rest of a division", "table, splits, sm_80",
     "per_split = tl.cdiv(total, tl.num_programs(2))",
     "per_split = total // tl.num_programs(2)"),
    ("a diagonal is left out", TABLE_80, "(near - 1 - q_start + BM - 1) // BM",
     "(near - 1 - q_start) // BM"),
    # the bias
    ("the table is read past its end", TABLE_90,
     "tl.load(bias.ptr + tl.minimum(distance, call.m - 1))",
     "tl.load(bias.ptr + tl.minimum(distance, call.m))", 0),
    ("the bias row is off by one", TABLE_80, "_expand(bias_row, x + last)",
     "_expand(bias_row, x + last + 1)"),
    ("a difference lacks a bit of the row", TABLE_80, "+ (rows & 64)[:, None]\n", "\n"),
    ("the last entry is not what is left", TAIL_80, "device=rest.device), rest, 0.0)",
     "device=rest.device), 0.0 * rest, 0.0)"),
    ("the sweep's share of the last entry counts", TAIL_80, "max(0, grad.shape[1] - 1 - start)",
     "max(0, grad.shape[1] - start)"),
    ("no query reaches the last entry", "table and documents, sm_80",
     "tl.abs(i[:, None] - j[None, :]) >= call.m - 1",
     "tl.abs(i[:, None] - j[None, :]) >= call.m + 100"),
    ("neighbouring diagonals do not overlap", TABLE_80,
     "by_distance[:, BM:] += partial[:, :, BM:].flatten(1, 2)", ""),
    ("a product with the vector before the last", SHAW_80, "at = x.ptr + (call.m - 1) * x.t",
     "at = x.ptr + (call.m - 2) * x.t"),
    ("a query meets the vector of the larger distances", XL_80, "tl.where(j >= i, low_product",
     "tl.where(j > i, low_product"),
    ("the skew is off by one", XL_80, "y = (i - 1 - j) & (B - 1)", "y = (i - j) & (B - 1)"),
    ("near and far distances are swapped", TABLE_80,
     "tl.store(DBIAS + at + c, tl.sum(low, 0))", "tl.store(DBIAS + at + c, tl.sum(high, 0))"),
    ("the slope is forgotten between tiles", SLOPES_80,
     "shift = -constant * (d0 + r).to(tl.float32)", "shift = -constant * r.to(tl.float32)"),
    ("scores with slopes are scaled twice", SLOPES_80,
     "factor = 1.0\n        if call.CAUSAL and", "factor = call.scale\n        if call.CAUSAL and"),
    ("clipped values are not decayed", SHAW_80, "clipped_mass *= decay", "clipped_mass *= 1.0"),
    ("the bias of another head", TABLE_80, "bias = head_rows(call.bias, 0, h)",
     "bias = head_rows(call.bias, 0, h * 0)", 0),
    # heads and strides
    ("the wrong head of grouped queries", SLOPES_80,
     "k_head, v_head = head_rows(call.k, b, h // call.G)",
     "k_head, v_head = head_rows(call.k, b, h % (tl.num_programs(1) // call.G))", 0),
    ("dK of the wrong query heads", SLOPES_80, "h = hk * call.G + g",
     "h = g * tl.num_programs(1) + hk"),
    ("values with the stride of keys", NONE_90, "head_rows(call.v, b, h // call.G)\n",
     "Rows(call.v.ptr + b * call.v.b + h // call.G * call.v.h, 0, 0, call.k.t)\n", 0),
    ("values with the batch stride of keys", HEADS_80, "head_rows(call.v, b, h // call.G)\n",
     "Rows(call.v.ptr + b * call.k.b + h // call.G * call.v.h, 0, 0, call.v.t)\n", 0),
    ("row sums of the wrong sequence", HEADS_80, "row = (b * H + h) * call.Tq\n",
     "row = (b * tl.num_programs(1) + h) * call.Tq\n"),
    ("the log-sum-exp by the number of keys", NONE_90,
     "row = (b * tl.num_programs(1) + h) * call.Tq + m0 + r",
     "row = (b * tl.num_programs(1) + h) * call.Tk + m0 + r", 0),
    ("two programs store the same queries", TABLE_80,
     "block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first",
     "block = tl.program_id(0) // 2"),
    ("a query too many is stored", SLOPES_80,
     "mask = (n0 + n < limit)[:, None] & (channel < call.D)\n",
     "mask = (n0 + n <= limit)[:, None] & (channel < call.D)\n"),
    ("the last channels are not stored", NONE_90,
     "mask = (n0 + n < limit)[:, None] & (channel < call.D)\n",
     "mask = (n0 + n < limit)[:, None] & (channel < call.D - 8)\n"),
    # softmax
    ("the running sum is not decayed", NONE_90, "row_sum = row_sum * decay + p_sum",
     "row_sum = row_sum + p_sum"),
    ("the decay is inverted", NONE_90, "decay = tl.exp2(row_max - new_max)",
     "decay = tl.exp2(new_max - row_max)"),
    ("the maximum starts at minus infinity", DOCUMENTS_80,
     "row_max = tl.full([BM], -1e30, tl.float32)",
     'row_max = tl.full([BM], float("-inf"), tl.float32)'),
    ("the sum goes over the wrong axis", XL_80, "p_sum = tl.sum(p, 1)",
     "p_sum = tl.sum(p, 0)"),
    # gradients
    ("delta is missing", NONE_90, "ds = p * (dp - delta[:, None])\n                ds_sum",
     "ds = p * dp\n                ds_sum"),
    ("delta is missing in dK", NONE_90, "ds = p * (dp - delta[None, :])", "ds = p * dp"),
    ("delta is not corrected", TAIL_80, "tl.store(DELTA + row, delta + delta_error",
     "tl.store(DELTA + row, delta"),
    ("delta is not corrected for vectors", VECTOR_TAIL_80,
     "tl.store(DELTA + row, delta + delta_error", "tl.store(DELTA + row, delta"),
    ("the last vector lacks in dQ", SHAW_80, "dqr += clipped_ds[:, None]",
     "dqr += 0.0 * clipped_ds[:, None]"),
    ("the slope's gradient forgets where the tile is", SLOPES_80,
     "_pair((i0 - n0 + r).to(tl.float32), c", "_pair(r.to(tl.float32), c"),
    ("the slope's gradient of the wrong head", SLOPES_80,
     "at = DSLOPE + (b * H + h) * call.Tk + n0 + c",
     "at = DSLOPE + (b * H + hk * call.G) * call.Tk + n0 + c"),
    ("sums of keys past the last are stored", SLOPES_80,
     "tl.store(at, dslope, mask=n0 + c < call.Tk)", "tl.store(at, dslope)"),
    ("the gradient of the log-sum-exp is ignored", FLOAT32_80,
     "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse",
     "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)"),
    ("dQ without the scale", NONE_90, "call.Tq, dq * unit)", "call.Tq, dq)"),
    ("dK in log2 units", NONE_90, "call.Tk, dk * unit)", "call.Tk, dk * call.scale)"),
    ("P instead of dS", NONE_90, "dk = tl.dot(ds.to(q.dtype), q, dk",
     "dk = tl.dot(p.to(q.dtype), q, dk"),
    ("rows past the last count in dK", LARGE_80,
     'lse = tl.load(LSE + row + m0 + r, mask=in_range, other=float("inf"))',
     "lse = tl.load(LSE + row + m0 + r, mask=in_range, other=0.0)"),
    ("rows past the last count in the sweep", LARGE_80,
     'lse = tl.load(LSE + row, mask=m0 + r < call.Tq, other=float("inf"))',
     "lse = tl.load(LSE + row, mask=m0 + r < call.Tq, other=0.0)"),
    ("rows past the last count in dQ", LARGE_80,
     'lse = tl.load(LSE + row, mask=in_range, other=float("inf"))  # past',
     "lse = tl.load(LSE + row, mask=in_range, other=0.0)  # past"),
    ("delta is read past the last query", NONE_90,
     "delta = tl.load(DELTA + row + m0 + r, mask=in_range, other=0.0)",
     "delta = tl.load(DELTA + row + m0 + r)"),
    # memory
    ("rows that start anywhere reach the kernels", ODD_90, "if aligned and x.stride(3) == 1",
     "if x.stride(3) == 1"),
    ("tokens times their stride in 32 bits", FAR_80, "at = x.ptr + tl.cast(n0, tl.int64) * x.t",
     "at = x.ptr + n0 * x.t", 0),
    ("heads times their stride in 32 bits", FAR_HEADS_80, "h = tl.program_id(1).to(tl.int64)",
     "h = tl.program_id(1)", 0),
    ("results' tokens in 32 bits", FAR_RESULTS_80, "at = x.ptr + tl.cast(n0, tl.int64) * x.t",
     "at = x.ptr + n0 * x.t", 1),
)  # fmt: skip

DECODE = (
    ("the last key block is skipped", DECODE_80, "hi = tl.cdiv(i + 1, BN) if call.CAUSAL",
     "hi = (i + 1) // BN if call.CAUSAL"),
    ("the splits drop the rest of a division", DECODE_80,
     "per_split = tl.cdiv(blocks, tl.num_programs(0))",
     "per_split = blocks // tl.num_programs(0)"),
    ("the queries are taken for the first ones", DECODE_80, "i = Tk - call.Tq + t", "i = Tk - 1"),
    ("the wrong head of grouped queries in decoding", DECODE_80,
     "k_head = head_rows(call.k, b, h0 // call.G)", "k_head = head_rows(call.k, b, h0 % call.G)"),
    ("the table is read past its end in decoding", DECODE_80,
     "clipped = tl.minimum(distance, call.m - 1)\n            s = s * call.scale\n",
     "clipped = tl.minimum(distance, call.m)\n            s = s * call.scale\n"),
    ("splits are not weighted", DECODE_80, "weight = tl.exp2(row_max - total_max)",
     "weight = tl.exp2(row_max * 0.0)"),
    ("a split too many is combined", DECODE_80, "row * splits + splits, True)",
     "row * splits + splits + 1, True)"),
    ("the valid length is ignored", "decoding with a valid length, sm_90",
     "Tk = tl.load(LENGTH).to(tl.int32)", "Tk = Tk + 0"),
    ("heads times their stride in 32 bits in decoding", FAR_HEADS_80,
     "h0 = (tl.program_id(1) * PACK).to(tl.int64)", "h0 = tl.program_id(1) * PACK"),
)  # fmt: skip

ROTARY = (
    ("the operands of the rotation are swapped", ROTARY_80, "(left * cos - right * sin)",
     "(right * cos - left * sin)"),
    ("the backward pass turns the same way", ROTARY_80, "        sin = -sin", "        sin = sin"),
    ("a channel too many is rotated", WHOLE_ROTARY_90,
     "(right * cos + left * sin).to(dtype), mask=of_half)",
     "(right * cos + left * sin).to(dtype), mask=mask & (c <= HALF))"),
    ("a channel too many is copied", ROTARY_90, "mask=of_rest), mask=of_rest)",
     "mask=of_rest), mask=mask & (rest <= D))"),
    ("heads past the last are rotated", ROTARY_80, "((t < T) & (h < x.n))",
     "(t < T)"),
    ("angles of the first sequence", ROTARY_80, "at = b * COS.b +", "at = b * 0 +"),
    ("heads times their stride in 32 bits in rotary", FAR_ROTARY_80, "h = (first + i).to(tl.int64)",
     "h = first + i"),
    ("tokens times their stride in 32 bits in rotary", FAR_ROTARY_80,
     "t = tl.program_id(0).to(tl.int64) * BT", "t = tl.program_id(0) * BT"),
)  # fmt: skip

# Those that change nothing, and why.
EQUIVALENT = {
    "rows past the last count in dQ": "rows past the last query are not stored, and no sum "
    "over rows is taken before the store",
    "the sweep sees the future": "the sums of the sweep at distances below 0 are dropped in causal "
    "attention",
    "exponentials keep subnormal numbers": "a weight below 2^-126 is far below the rounding of "
    "the sum that it is added to, which is at least 1",
}
# Tried by `make test`: one each of bounds, overlap, number, race and missing wait.
FAST = {
    "the query itself is hidden",
    "two programs store the same queries",
    "heads past the last are rotated",
    "no barrier after a wait",
    "no wait for copies",
}


# -----------------------------------------------------------------------------
# Faults in the PTX

WAIT = r"\tcp\.async\.wait_group[^;]*;\n"
COMMIT = r"\tcp\.async\.commit_group;\n"
MMA = r"(mma\.sync[^{]*\{[^}]*\}, "

# two float32 numbers to bfloat16, to the nearest; and with their last 16 bits cut off before
CONVERSION = r"cvt\.rn\.bf16x2\.f32 \t(%r\d+), (%r\d+), (%r\d+);"
TRUNCATION = (
    "and.b32 \\t\\2, \\2, -65536;\n\tand.b32 \\t\\3, \\3, -65536;\n"
    "\tcvt.rn.bf16x2.f32 \\t\\1, \\2, \\3;"
)

# name, kernel, check, old, new, occurrence
PTX = (
    ("no barrier after a wait", "forward", TABLE_80,
     r"(cp\.async\.wait_group[^;]*;\n)\tbar\.sync[^;]*;\n", r"\1"),
    ("no barrier between storing and reading a row", "forward", TABLE_80,
     r"(st\.shared\.b32[^;]*;\n)\tbar\.sync[^;]*;\n", r"\1"),
    ("no barrier between two tiles", "dkdv", SLOPES_80, r"\tbar\.sync[^;]*;\n", "", 1),
    ("no wait for copies", "forward", TABLE_80, WAIT, ""),
    ("no wait for copies in dQ", "dq", NONE_90, WAIT, ""),
    ("the wait leaves every copy in flight", "forward", TABLE_80,
     r"(cp\.async\.wait_group \t)[1-9]\d*;", r"\g<1>63;"),
    ("the last commit before a loop is missing", "forward", TABLE_80, COMMIT, "", 5),
    ("a buffer too few", "forward", TABLE_80,
     r"(add\.s32 \t(%r\d+), %r\d+, 1;\n\tsetp\.gt\.s32 \t%p\d+, \2, )1;", r"\g<1>0;", EVERY),
    ("no wait for wgmma", "forward", NONE_90, r"\twgmma\.wait_group[^;]*;\n", ""),
    ("no wait for wgmma in dK", "dkdv", NONE_90, r"\twgmma\.wait_group[^;]*;\n", "", 1),
    ("no fence of registers before wgmma", "forward", NONE_90, r"\twgmma\.fence[^;]*;\n", ""),
    ("no fence between storing and wgmma", "forward", NONE_90,
     r"\tfence\.proxy\.async[^;]*;\n", "", EVERY),
    ("wgmma is never committed", "forward", NONE_90, r"\twgmma\.commit_group[^;]*;\n", ""),
    ("wgmma reads its tile across", "forward", NONE_90,
     r"(wgmma\.mma_async[^;]*, 1, 1, \d, )0;", r"\g<1>1;"),
    ("swapped registers of the right operand", "forward", TABLE_80,
     MMA + r"\{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
    ("swapped registers of the left operand", "forward", TABLE_80,
     MMA + r"\{ %r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    ("a matrix is loaded without transposing", "forward", TABLE_80,
     r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1"),
    ("two numbers in the wrong order", "forward", TABLE_80,
     r"(cvt\.rn\.f16x2\.f32 \t%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    ("rounding towards zero", "forward", NEAREST_80, CONVERSION, TRUNCATION, EVERY),
    ("rounding towards zero in dK", "dkdv", NEAREST_90, CONVERSION, TRUNCATION, EVERY),
    ("exponentials keep subnormal numbers", "forward", NEAREST_80,
     r"ex2\.approx\.ftz", "ex2.approx", EVERY),
    ("a reduction over the wrong lanes", "forward", TABLE_80,
     r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )2(, 31)", r"\g<1>1\2"),
    ("a store under the opposite predicate", "forward", TABLE_80,
     r"@(%p\d+) (st\.global)", r"@!\1 \2"),
    ("a store under the opposite predicate in rotary", "rotate", ROTARY_80,
     r"@(%p\d+) (st\.global)", r"@!\1 \2"),
    ("a load without its predicate", "dq", SLOPES_80, r"@%p\d+ (ld\.global)", r"\1", EVERY),
    ("a copy without its bound", "forward", NONE_90,
     r"(cp\.async\.cg[^;]*, 0x10, )%r\d+;", r"\g<1>0x10;", EVERY),
    ("a comparison without equality", "forward", TABLE_80, r"setp\.le\.s32", "setp.lt.s32", EVERY),
    ("swapped choices of a mask", "forward", TABLE_80,
     r"(selp\.f32 \t%r\d+, )(%r\d+), (0fFF800000)", r"\1\3, \2"),
    ("a shared address without its offset", "forward", TABLE_80,
     r"(ld\.shared\.b32 \t%r\d+, \[%r\d+)\+\d+\]", r"\1]"),
    ("a store to shared memory is missing", "forward", TABLE_80, r"\tst\.shared\.b32[^;]*;\n", ""),
    ("a copy to shared memory is missing", "forward", TABLE_80,
     r"\t(@%p\d+ )?cp\.async\.c[ag]\.[^;]*;\n", ""),
    ("an odd shared address", "forward", TABLE_80,
     r"(ldmatrix[^;]*\[%r\d+\+\d*)[02468]\]", r"\g<1>1]"),
    ("a loop that ends too early", "forward", TABLE_80,
     r"@(%p\d+) (bra \t\$L__BB0_2;)", r"@!\1 \2"),
)  # fmt: skip

MUTATIONS = (
    *(Mutation(*row, file="flash.py") for row in FLASH),
    *(Mutation(*row, file="decode.py") for row in DECODE),
    *(Mutation(*row, file="rotary.py") for row in ROTARY),
    *(Mutation(name, *row, kernel=kernel) for name, kernel, *row in PTX),
)
