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
    ("a row too many is loaded", NONE_90, "n0 + n < limit", "n0 + n <= limit"),
    ("the query itself is hidden", NONE_90, "at_j <= at_i", "at_j < at_i"),
    ("one future key is seen", NONE_90, "at_j <= at_i", "at_j <= at_i + 1"),
    ("keys past the last are seen", ALL_KEYS_80, "visible = at_j < Tk", "visible = at_j < Tk + 7"),
    ("the window is one too wide", SINKS_80, "(tl.abs(at_i - at_j) < window)",
     "(tl.abs(at_i - at_j) <= window)"),
    ("one sink too many", SINKS_80, "| (at_j < sinks))", "| (at_j <= sinks))"),
    ("documents are not told apart", TABLE_90, "visible = visible & same", "visible = visible"),
    ("the sweep sees the future", TABLE_80, "past = d0 + (BM - 1) + r[:, None] - c[None, :] >= 0",
     "past = d0 + (BM - 1) + r[:, None] - c[None, :] >= -1"),
    # which tiles are visited, and how
    ("a tile too many counts as whole", TABLE_80, "tl.minimum(right, (i0 + 1) // BN)",
     "tl.minimum(right, (i0 + BN) // BN)"),
    ("the last tile of a query block is skipped", NONE_90,
     "hi = tl.cdiv(tl.minimum(i1 + 1, Tk), BN)", "hi = tl.minimum(i1 + 1, Tk) // BN"),
    ("the window starts a tile late", WINDOW_80, "lo = tl.maximum(i0 - window + 1, 0) // BN",
     "lo = tl.maximum(i0 - window + 1 + BN, 0) // BN"),
    ("tiles before the window's edge count as whole", WINDOW_80,
     "left = tl.cdiv(tl.maximum(i1 - window + 1, 0), BN)",
     "left = tl.cdiv(tl.maximum(i0 - window + 1, 0), BN)"),
    ("the tile with the sinks is skipped", SINKS_80,
     "sink_end = tl.minimum(tl.cdiv(sinks, BN), lo)", "sink_end = tl.minimum(sinks // BN, lo)"),
    ("near tiles count as clipped by one", TABLE_FLOAT32_80, "tl.maximum(i0 - m + 2, 0)",
     "tl.maximum(i0 - m + 3, 0)"),
    ("near tiles count as clipped for dK by one", TABLE_FLOAT32_80,
     "tl.maximum(n1 + m - 1 - q_start, 0)", "tl.maximum(n1 + m - 2 - q_start, 0)"),
    ("the first query block of a key block is skipped", NONE_90,
     "lo = tl.maximum(n0 - q_start, 0) // BM", "lo = tl.maximum(n0 - q_start + BM, 0) // BM"),
    ("the last keys need no mask", ALL_KEYS_80, "tl.where(n1 < Tk, tl.minimum(left, hi), hi)",
     "tl.minimum(left, hi)"),
    ("the last tile of a diagonal is skipped", TABLE_FLOAT32_80,
     "n_hi = tl.minimum(tl.cdiv(Tq, BM), tl.cdiv(Tk, BM) + diagonal)",
     "n_hi = tl.minimum(Tq // BM, tl.cdiv(Tk, BM) + diagonal)"),
    ("the sweep drops the rest of a division", "table, splits, sm_80",
     "per_split = tl.cdiv(total, tl.num_programs(2))",
     "per_split = total // tl.num_programs(2)"),
    ("a diagonal is counted twice", TABLE_80, "outside = d - (B - 1) >= m - 1",
     "outside = d + (B - 1) >= m - 1"),
    # the bias
    ("the table is read past its end", TABLE_90, "tl.load(BIAS + tl.minimum(distance, m - 1))",
     "tl.load(BIAS + tl.minimum(distance, m))"),
    ("the bias row is off by one", TABLE_80, "_expand_row(bias_row, x + (BN - 1))",
     "_expand_row(bias_row, x + BN)"),
    ("a difference lacks a bit of the row", TABLE_80, "+ (rows & 64)[:, None]\n", "\n"),
    ("half of the keys take the other half's tile of the sweep", TAIL_80,
     "(n0 + c) // B * B, m, B, CAUSAL)", "n0 + c * 0, m, B, CAUSAL)"),
    ("queries take the sweep's tile at their first row", TAIL_80,
     "_outside_sweep(i0 - m0 % B, (n0", "_outside_sweep(i0, (n0"),
    ("the last vector's tiles are counted twice", SHAW_80,
     "_outside_sweep(i0, n0, m, BN, CAUSAL).to(tl.float32)",
     "(_outside_sweep(i0, n0, m, BN, CAUSAL) | True).to(tl.float32)"),
    ("the skew is off by one", XL_80, "at = r[:, None] * B + ((r[:, None] - 1 - c[None, :])",
     "at = r[:, None] * B + ((r[:, None] - c[None, :])"),
    ("near and far distances are swapped", TABLE_80,
     "tl.store(DBIAS + at, tl.sum(tl.where(low, acc, 0.0), 0))",
     "tl.store(DBIAS + at, tl.sum(tl.where(low, 0.0, acc), 0))"),
    ("the slope is forgotten between tiles", SLOPES_80,
     "shift = slope * (n0 - i0 - r).to(tl.float32)", "shift = slope * (-r).to(tl.float32)"),
    ("clipped values are not decayed", SHAW_80, "clipped_mass *= decay", "clipped_mass *= 1.0"),
    ("the bias of another head", TABLE_80, "BIAS = BIAS + h * bias_h",
     "BIAS = BIAS + h * 0 * bias_h", 0),
    # heads and strides
    ("the wrong head of grouped queries", SLOPES_80, "K = K + b * k_b + h // G * k_h",
     "K = K + b * k_b + h % (tl.num_programs(1) // G) * k_h", 0),
    ("dK of the wrong query heads", SLOPES_80, "h = hk * G + g", "h = g * tl.num_programs(1) + hk"),
    ("values with the stride of keys", NONE_90, "v = _load_rows(V, v_t, n0",
     "v = _load_rows(V, k_t, n0", 0),
    ("values with the batch stride of keys", HEADS_80, "V = V + b * v_b", "V = V + b * k_b", 0),
    ("row sums of the wrong sequence", HEADS_80,
     "row = (b * tl.num_programs(1) * G + h) * Tq", "row = (b * tl.num_programs(1) + h) * Tq"),
    ("the log-sum-exp by the number of keys", NONE_90,
     "at = LSE + (b * tl.num_programs(1) + h) * Tq + m0 + r",
     "at = LSE + (b * tl.num_programs(1) + h) * Tk + m0 + r"),
    ("two programs store the same queries", TABLE_80,
     "block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first",
     "block = tl.program_id(0) // 2"),
    ("a query too many is stored", SLOPES_80,
     "    queries = m0 + r < Tq\n    i0 = q_start + m0\n    q = _load_rows",
     "    queries = m0 + r <= Tq\n    i0 = q_start + m0\n    q = _load_rows"),
    ("the last channels are not stored", NONE_90,
     "mask=queries[:, None] & (channel < D)[None, :])\n    at = LSE",
     "mask=queries[:, None] & (channel < D - 8)[None, :])\n    at = LSE"),
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
    ("delta is not corrected", ZERO_SUM_80, "tl.store(DELTA + row, delta + delta_error",
     "tl.store(DELTA + row, delta"),
    ("the gradient of the last vector is not corrected", VECTOR_TAIL_80,
     "row_grad - delta_error * row_mass", "row_grad"),
    ("the slope's gradient forgets where the tile is", SLOPES_80,
     "of_key = (n0 + c - i0).to(tl.float32)", "of_key = c.to(tl.float32)"),
    ("the slope's gradient of the wrong head", SLOPES_80,
     "at = KEY_GRAD + (b * tl.num_programs(1) * G + h) * Tk + n0 + c",
     "at = KEY_GRAD + (b * tl.num_programs(1) * G + hk * G) * Tk + n0 + c"),
    ("sums of keys past the last are stored", SLOPES_80,
     "tl.store(at, tl.sum(key_grad, 1), mask=n0 + c < Tk)", "tl.store(at, tl.sum(key_grad, 1))"),
    ("the gradient of the log-sum-exp is ignored", FLOAT32_80,
     "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse",
     "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)"),
    ("dQ without the scale", NONE_90, "(dq * (scale * LN2)).to", "dq.to"),
    ("dK in log2 units", NONE_90, "(dk * (scale * LN2)).to", "(dk * scale).to"),
    ("P instead of dS", NONE_90, "dk = tl.dot(ds.to(q.dtype), q, dk",
     "dk = tl.dot(p.to(q.dtype), q, dk"),
    ("rows past the last count in dK", LARGE_80,
     'tl.load(LSE + row + m0 + r, mask=queries, other=float("inf"))\n                        delta',
     "tl.load(LSE + row + m0 + r, mask=queries, other=0.0)\n                        delta"),
    ("rows past the last count in dQ", LARGE_80,
     'lse = tl.load(LSE + row, mask=queries, other=float("inf"))  # past',
     "lse = tl.load(LSE + row, mask=queries, other=0.0)  # past"),
    ("delta is read past the last query", NONE_90,
     "delta = tl.load(DELTA + row + m0 + r, mask=queries, other=0.0)",
     "delta = tl.load(DELTA + row + m0 + r)"),
    # memory
    ("rows that start anywhere reach the kernels", ODD_90, "if aligned and x.stride(3) == 1",
     "if x.stride(3) == 1"),
    ("tokens times their stride in 32 bits", FAR_80, "at = X + tl.cast(n0, tl.int64) * x_t",
     "at = X + n0 * x_t"),
    ("heads times their stride in 32 bits", FAR_HEADS_80, "h = tl.program_id(1).to(tl.int64)",
     "h = tl.program_id(1)", 0),
    ("the output's tokens in 32 bits", FAR_RESULTS_80, "tl.cast(m0, tl.int64) * o_t", "m0 * o_t"),
    ("dQ's tokens in 32 bits", FAR_RESULTS_80, "tl.cast(m0, tl.int64) * dq_t", "m0 * dq_t"),
    ("dK's tokens in 32 bits", FAR_RESULTS_80, "tl.cast(n0, tl.int64) * dk_t", "n0 * dk_t"),
)  # fmt: skip

DECODE = (
    ("the last key block is skipped", DECODE_80, "hi = tl.cdiv(i + 1, BN) if CAUSAL",
     "hi = (i + 1) // BN if CAUSAL"),
    ("the splits drop the rest of a division", DECODE_80,
     "per_split = tl.cdiv(blocks, tl.num_programs(0))",
     "per_split = blocks // tl.num_programs(0)"),
    ("the queries are taken for the first ones", DECODE_80, "i = Tk - Tq + t", "i = Tk - 1"),
    ("the wrong head of grouped queries in decoding", DECODE_80,
     "kv = (group * PACK // G).to(tl.int64)", "kv = (group * PACK % G).to(tl.int64)"),
    ("the table is read past its end in decoding", DECODE_80,
     "tl.load(BIAS_ROWS[:, None] + tl.minimum(distance, m - 1)[None, :])",
     "tl.load(BIAS_ROWS[:, None] + tl.minimum(distance, m)[None, :])"),
    ("splits are not weighted", DECODE_80, "weight = tl.exp2(row_max - total_max)",
     "weight = tl.exp2(row_max * 0.0)"),
    ("a split too many is combined", DECODE_80,
     "mask = (split < splits)[:, None] & (channel < D)[None, :]",
     "mask = (split <= splits)[:, None] & (channel < D)[None, :]"),
    ("the valid length is ignored", "decoding with a valid length, sm_90",
     "Tk = tl.load(LENGTH).to(tl.int32)", "Tk = Tk + 0"),
    ("heads times their stride in 32 bits in decoding", FAR_HEADS_80,
     "tl.minimum(group * PACK + r, H - 1).to(tl.int64)", "tl.minimum(group * PACK + r, H - 1)"),
    ("keys times their stride in 32 bits", FAR_80, "k_at = K + tl.cast(n0, tl.int64) * k_t",
     "k_at = K + n0 * k_t"),
)  # fmt: skip

ROTARY = (
    ("the operands of the rotation are swapped", ROTARY_80, "(a * cos - b * sin)",
     "(b * cos - a * sin)"),
    ("the backward pass turns the same way", ROTARY_80, "        sin = -sin", "        sin = sin"),
    ("a channel too many is rotated", WHOLE_ROTARY_90,
     "(t < T)[:, None] & (c < HALF)[None, :]\n    for",
     "(t < T)[:, None] & (c <= HALF)[None, :]\n    for"),
    ("a channel too many is copied", ROTARY_90, "(r < D)[None, :]", "(r <= D)[None, :]"),
    ("heads past the last are rotated", ROTARY_80, "mask = in_range & (h < heads)",
     "mask = in_range"),
    ("angles of the first sequence", ROTARY_80, "sin = tl.load(SIN + b * c_b +",
     "sin = tl.load(SIN + b * 0 +"),
    ("heads times their stride in 32 bits in rotary", FAR_ROTARY_80, "h = (first + i).to(tl.int64)",
     "h = first + i"),
    ("tokens times their stride in 32 bits in rotary", FAR_ROTARY_80,
     "t = tl.program_id(0).to(tl.int64) * BT", "t = tl.program_id(0) * BT"),
)  # fmt: skip

# Those that change nothing, and why.
EQUIVALENT = {
    "rows past the last count in dQ": "rows past the last query are not stored, and no sum "
    "over rows is taken before the store",
    "the last keys need no mask": "in a tile of dK and dV each key has a row of its own, and rows "
    "past the last key are not stored",
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
