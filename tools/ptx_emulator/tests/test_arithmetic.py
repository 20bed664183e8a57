"""Each arithmetic instruction of the emulator against exact arithmetic in Python.

Operands are edge cases in all combinations, or many at random. What an instruction should give is
computed from integers and fractions, without numpy, and rounded once by round_to().
"""

import itertools
import math
import random
import struct
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from small_kernels import evaluate

NAN = math.nan

# -----------------------------------------------------------------------------
# Numbers as bits.

# precision in bits, and the smallest and the largest exponent of a normal number
FORMATS = {"f32": (24, -126, 127), "bf16": (8, -126, 127), "f16": (11, -14, 15)}
TF32 = (11, -126, 127)


def round_to(x, format, ties="even"):
    """The nearest number of a format, as a Python float; x is a Fraction."""
    precision, least, most = format
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    units = size / unit
    whole = int(units)
    rest = units - whole
    if rest > Fraction(1, 2) or rest == Fraction(1, 2) and (ties == "away" or whole % 2):
        whole += 1
    rounded = whole * unit
    if rounded >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


def decode(bits, type):
    """The number that bits stand for."""
    bits = int(bits)
    if type == "pred":
        return bool(bits)
    if type == "f32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if type == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if type == "f16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    size = int(type[1:])
    return bits - (1 << size) if type[0] == "s" and bits >> size - 1 else bits


def encode(value, type):
    """The bits of a number that the type can hold exactly."""
    if type == "pred":
        return int(value)
    if type == "f32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if type == "bf16":
        return struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    if type == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    return value & (1 << int(type[1:])) - 1


def size_of(type):
    return {"pred": 1, "bf16": 16}.get(type) or int(type[1:])


def is_float(type):
    return type in FORMATS


# -----------------------------------------------------------------------------
# Operands.

FLOAT32 = [
    *(0.0, -0.0, 1.0, -1.0, 1.5, -3.7, 0.1, 1e30, -1e-30, 65504.0, 65520.0, 2.0**24),
    *(2.0**-126, -(2.0**-126), 2.0**-127, 2.0**-149, -(2.0**-149), 1 + 2.0**-23, 1 - 2.0**-24),
    *(2.0**128 - 2.0**104, math.inf, -math.inf, NAN, 2.5, -0.5),
]


def values_of(type):
    """Edge cases of a type, as bits."""
    if type == "pred":
        return [0, 1]
    if type == "f32":
        return [struct.unpack("<I", struct.pack("<f", x))[0] for x in FLOAT32]
    if is_float(type):  # of 16 bits: ones, the largest, infinities, a NaN, subnormals
        infinity = encode(math.inf, type)
        few = [0, 1, 2, encode(1.0, type), encode(1.5, type), infinity - 1, infinity, infinity + 1]
        return [*few, *(x | 0x8000 for x in few)]
    size = size_of(type)
    top = 1 << size - 1
    edges = [0, 1, 2, 3, 7, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2]
    generator = random.Random(size)
    return edges + [generator.randrange(2 * top) for _ in range(5)]


def combinations(types, limit=700):
    """Rows of operands, as bits: all combinations of edge cases, or so many of them."""
    rows = list(itertools.product(*map(values_of, types)))
    if len(rows) > limit:
        rows = random.Random(len(rows)).sample(rows, limit)
    return rows


def random_floats(n, count):
    """Rows of n float32 whose exponents are close, so that sums round in every way."""
    generator = random.Random(n)
    rows = []
    for _ in range(count):
        rows.append(
            [
                generator.randrange(2) << 31
                | generator.randrange(110, 140) << 23
                | generator.randrange(1 << 23)
                for _ in range(n)
            ]
        )
    return rows


# -----------------------------------------------------------------------------
# What instructions should give.


def towards_zero(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def shift_left(a, n):
    return a << min(n, 64)


def shift_right(a, n):
    return a >> min(n, 64)  # of a negative number: filled with its sign


def extract(a, start, length):
    """bfe, bit by bit, as the manual has it; a is signed for .s32."""
    start &= 0xFF
    length &= 0xFF
    bits = a & 0xFFFFFFFF
    if length == 0:
        return 0
    sign = bits >> min(start + length - 1, 31) & 1 if is_signed(a) else 0
    result = 0
    for i in range(32):
        bit = bits >> start + i & 1 if i < length and start + i <= 31 else sign
        result |= bit << i
    return result


class Signed(int):
    """An operand of type .s32, for extract()."""


def is_signed(a):
    return isinstance(a, Signed)


def is_finite(*numbers):
    return all(map(math.isfinite, numbers))


def flush_subnormal(x):
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def rounded(exact, plain):
    """An operation that rounds once: exact on Fractions; plain on floats for inf, NaN and zeros."""

    def function(*operands):
        result = plain(*operands)
        if not is_finite(*operands):
            return result
        fraction = exact(*map(Fraction, operands))
        return round_to(fraction, FORMATS["f32"]) if fraction else result

    return function


def flushed(function):
    return lambda *operands: flush_subnormal(function(*map(flush_subnormal, operands)))


def divide_floats(a, b):
    if b == 0:
        if a == 0 or math.isnan(a) or math.isnan(b):
            return NAN
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    if not is_finite(a, b) or a == 0:
        return a / b
    return round_to(Fraction(a) / Fraction(b), FORMATS["f32"])


def largest(*numbers):
    """-0 is less than +0, and a NaN loses."""
    numbers = [x for x in numbers if not math.isnan(x)]
    return max(numbers, key=lambda x: (x, math.copysign(1, x))) if numbers else NAN


def smallest(*numbers):
    numbers = [x for x in numbers if not math.isnan(x)]
    return min(numbers, key=lambda x: (x, math.copysign(1, x))) if numbers else NAN


def by_decimal(function, limits):
    """A function of one float with 50 digits, rounded once; limits: of inf, -inf, +0, -0, < 0."""

    def result(x):
        at_inf, at_minus_inf, at_zero, at_minus_zero, at_negative = limits
        if math.isnan(x):
            return NAN
        if math.isinf(x):
            return at_inf if x > 0 else at_minus_inf
        if x == 0:
            return at_zero if math.copysign(1, x) > 0 else at_minus_zero
        if x < 0 and at_negative is not None:
            return at_negative
        with localcontext() as context:
            context.prec = 50
            return round_to(Fraction(function(Decimal(x))), FORMATS["f32"])

    return result


INF = math.inf
SPECIAL = {
    "ex2": by_decimal(lambda x: Decimal(2) ** min(max(x, -999), 999), (INF, 0.0, 1.0, 1.0, None)),
    "lg2": by_decimal(lambda x: x.ln() / Decimal(2).ln(), (INF, NAN, -INF, -INF, NAN)),
    "sqrt": by_decimal(lambda x: x.sqrt(), (INF, NAN, 0.0, -0.0, NAN)),
    "rsqrt": by_decimal(lambda x: 1 / x.sqrt(), (0.0, NAN, INF, -INF, NAN)),
    "rcp": by_decimal(lambda x: 1 / x, (0.0, -0.0, INF, -INF, None)),
}


def to_whole(mode):
    """Round a float to a whole number; the sign of a zero is kept."""

    def function(x):
        if not math.isfinite(x):
            return x
        whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](x)
        return math.copysign(float(whole), x)

    return function


def to_integer(mode, type):
    least, most = (-(1 << 31), (1 << 31) - 1) if type[0] == "s" else (0, (1 << 32) - 1)

    def function(x):
        if math.isnan(x):
            return 0
        whole = to_whole(mode)(x)
        return int(min(max(whole, least), most))

    return function


def narrowed(type):
    def function(x):
        return round_to(Fraction(x), FORMATS[type]) if math.isfinite(x) and x else x

    return function


def compared(test):
    plain = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    if test in plain:
        return plain[test]
    if test == "num":
        return lambda a, b: not (math.isnan(a) or math.isnan(b))
    if test == "nan":
        return lambda a, b: math.isnan(a) or math.isnan(b)
    return lambda a, b: math.isnan(a) or math.isnan(b) or plain[test[:-1]](a, b)


def compared_floats(test):
    if test == "ne":  # false where one is NaN
        return lambda a, b: not (math.isnan(a) or math.isnan(b)) and a != b
    return compared(test)


# -----------------------------------------------------------------------------
# The cases: {instruction: (types of its sources, type of its result, what it gives)}.

CASES = {}


def add_cases(names, sources, result, function):
    """sources and result may contain {t}, the type that the name ends in."""
    for name in names:
        type = name.rpartition(".")[2]
        types = [source.format(t=type) for source in sources]
        CASES[name] = types, result.format(t=type), function


def names(pattern, *lists):
    return [pattern.format(*words) for words in itertools.product(*(x.split() for x in lists))]


ALL_INTEGERS = "s16 u16 s32 u32 s64 u64"
TWO = ["{t}", "{t}"]
for word, function in (
    ("add", lambda a, b: a + b),
    ("sub", lambda a, b: a - b),
    ("mul.lo", lambda a, b: a * b),
    ("min", min),
    ("max", max),
):
    add_cases(names(word + ".{}", ALL_INTEGERS), TWO, "{t}", function)
add_cases(names("neg.{}", "s16 s32 s64"), ["{t}"], "{t}", lambda a: -a)
add_cases(names("abs.{}", "s16 s32 s64"), ["{t}"], "{t}", abs)
for word, function in (
    ("and", lambda a, b: a & b),
    ("or", lambda a, b: a | b),
    ("xor", lambda a, b: a ^ b),
):
    add_cases(names(word + ".{}", "pred b16 b32 b64"), TWO, "{t}", function)
add_cases(names("not.{}", "b16 b32 b64"), ["{t}"], "{t}", lambda a: ~a)
add_cases(["not.pred"], ["pred"], "pred", lambda a: not a)
for name in names("mul.wide.{}{}", "s u", "16 32"):
    type = name.rpartition(".")[2]
    wide = f"{type[0]}{2 * int(type[1:])}"
    add_cases([name], TWO, wide, lambda a, b: a * b)
    add_cases([name.replace("mul", "mad")], [*TWO, wide], wide, lambda a, b, c: a * b + c)
add_cases(names("mul.hi.{}", "s32 u32"), TWO, "{t}", lambda a, b: a * b >> 32)
add_cases(names("mad.lo.{}", ALL_INTEGERS), [*TWO, "{t}"], "{t}", lambda a, b, c: a * b + c)
for name in names("{}.{}", "div rem", "s32 u32 s64 u64"):
    if name.startswith("div"):
        add_cases([name], TWO, "{t}", lambda a, b: towards_zero(a, b) if b else -1)
    else:
        add_cases([name], TWO, "{t}", lambda a, b: a - b * towards_zero(a, b) if b else a)
add_cases(names("shl.{}", "b16 b32 b64"), ["{t}", "u32"], "{t}", shift_left)
add_cases(names("shr.b{}", "16 32 64"), ["{t}", "u32"], "{t}", shift_right)
add_cases(names("shr.{}", ALL_INTEGERS), ["{t}", "u32"], "{t}", shift_right)
add_cases(["bfe.u32"], ["u32", "u32", "u32"], "u32", extract)
add_cases(["bfe.s32"], ["s32", "u32", "u32"], "u32", lambda a, b, c: extract(Signed(a), b, c))
for test in "eq ne lt le gt ge".split():
    add_cases(names("setp." + test + ".{}", ALL_INTEGERS), TWO, "pred", compared(test))
for test in ("eq", "ne"):
    add_cases(names("setp." + test + ".b{}", "16 32 64"), TWO, "pred", compared(test))
for test in "eq ne lt le gt ge equ neu ltu leu gtu geu num nan".split():
    add_cases([f"setp.{test}.f32"], TWO, "pred", compared_floats(test))
add_cases(
    names("selp.{}", "b16 b32 b64 f32"),
    [*TWO, "pred"],
    "{t}",
    lambda a, b, c: a if c else b,
)
add_cases(names("mov.{}", "pred b16 u16 b32 u32 f32 b64 u64"), ["{t}"], "{t}", lambda a: a)

for word, exact in (
    ("add", lambda a, b: a + b),
    ("sub", lambda a, b: a - b),
    ("mul", lambda a, b: a * b),
):
    function = rounded(exact, exact)
    add_cases([f"{word}.f32", f"{word}.rn.f32"], TWO, "{t}", function)
    add_cases([f"{word}.ftz.f32", f"{word}.rn.ftz.f32"], TWO, "{t}", flushed(function))
fused = rounded(lambda a, b, c: a * b + c, lambda a, b, c: a * b + c)
add_cases(["fma.rn.f32"], [*TWO, "{t}"], "{t}", fused)
add_cases(["fma.rn.ftz.f32"], [*TWO, "{t}"], "{t}", flushed(fused))
add_cases(names("fma.rn.f32.{}", "bf16 f16"), [*TWO, "f32"], "f32", fused)
add_cases(["min.f32"], TWO, "{t}", smallest)
add_cases(["max.f32"], TWO, "{t}", largest)
add_cases(["neg.f32"], ["{t}"], "{t}", lambda a: -a)
add_cases(["abs.f32"], ["{t}"], "{t}", abs)
add_cases(["div.rn.f32", "div.full.f32"], TWO, "{t}", divide_floats)
add_cases(["div.full.ftz.f32"], TWO, "{t}", flushed(divide_floats))
for word, function in SPECIAL.items():
    add_cases([f"{word}.approx.f32"], ["{t}"], "{t}", function)
    add_cases([f"{word}.approx.ftz.f32"], ["{t}"], "{t}", flushed(function))

for name in names("cvt.{}.{}", ALL_INTEGERS, ALL_INTEGERS):
    _, to, of = name.split(".")
    add_cases([name], [of], to, lambda a: a)
for of in ALL_INTEGERS.split():
    add_cases([f"cvt.rn.f32.{of}"], [of], "f32", lambda a: round_to(Fraction(a), FORMATS["f32"]))
for mode in ("rni", "rzi", "rmi", "rpi"):
    add_cases([f"cvt.{mode}.f32.f32"], ["f32"], "f32", to_whole(mode))
    for to in ("s32", "u32"):
        add_cases([f"cvt.{mode}.{to}.f32"], ["f32"], to, to_integer(mode, to))
for type in ("bf16", "f16"):
    add_cases([f"cvt.f32.{type}"], [type], "f32", lambda a: a)
    add_cases([f"cvt.rn.{type}.f32"], ["f32"], type, narrowed(type))
add_cases(
    ["cvt.rna.tf32.f32"],
    ["f32"],
    "f32",
    lambda x: round_to(Fraction(x), TF32, ties="away") if math.isfinite(x) and x else x,
)

# These have tests of their own below: two numbers to a register.
PAIRS = {
    **{f"{word}.f32x2": f"{word}.rn.f32" for word in ("add", "sub", "mul")},
    "fma.rn.f32x2": "fma.rn.f32",
    "cvt.rn.bf16x2.f32": "cvt.rn.bf16.f32",
    "cvt.rn.f16x2.f32": "cvt.rn.f16.f32",
}
TESTED = {*CASES, *PAIRS}


def extra_rows(name, sources):
    """Operands in which rounding goes every way."""
    if all(type == "f32" for type in sources):
        return random_floats(len(sources), 300)
    if name.startswith("cvt.rn.f32") and size_of(sources[0]) > 16:
        # around ties: whole numbers of 25 and 26 bits
        return [[(1 << 25) + n] for n in range(40)] + [[(1 << 24) + n] for n in range(40)]
    return []


def registers_for(types):
    """A register for each type, all different."""
    prefixes = {1: "p", 16: "rs", 32: "r", 64: "rd"}
    return [f"%{prefixes[size_of(type)]}{n + 1}" for n, type in enumerate(types)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_instruction_equals_exact_arithmetic(name):
    sources, result, function = CASES[name]
    rows = combinations(sources) + extra_rows(name, sources)
    inputs = registers_for(sources)
    (target,) = registers_for([result])
    target = target.replace("1", "9")
    columns = {register: [row[n] for row in rows] for n, register in enumerate(inputs)}
    (got,) = evaluate(f"{name} {target}, {', '.join(inputs)};", columns, [target])
    for row, bits in zip(rows, got, strict=True):
        operands = [decode(x, type) for x, type in zip(row, sources, strict=True)]
        expected = function(*operands)
        if is_float(result) and math.isnan(expected):
            assert math.isnan(decode(bits, result)), (name, operands, hex(bits))
        else:
            assert int(bits) == encode(expected, result), (name, operands, hex(bits), expected)


# -----------------------------------------------------------------------------
# Two numbers in a register.


@pytest.mark.parametrize("name", sorted(x for x in PAIRS if x.endswith("f32x2")))
def test_pairs_of_floats(name):
    """Each half of 64 bits equals the operation on one number."""
    sources, _, function = CASES[PAIRS[name]]
    rows = combinations(sources, 300) + random_floats(len(sources), 200)
    others = rows[::-1]
    inputs = [f"%rd{n + 1}" for n in range(len(sources))]
    columns = {
        register: [low[n] | high[n] << 32 for low, high in zip(rows, others, strict=True)]
        for n, register in enumerate(inputs)
    }
    (got,) = evaluate(f"{name} %rd9, {', '.join(inputs)};", columns, ["%rd9"])
    for low, high, bits in zip(rows, others, got, strict=True):
        for row, half in ((low, int(bits) & 0xFFFFFFFF), (high, int(bits) >> 32)):
            expected = function(*(decode(x, "f32") for x in row))
            if math.isnan(expected):
                assert math.isnan(decode(half, "f32")), (name, row)
            else:
                assert half == encode(expected, "f32"), (name, row)


@pytest.mark.parametrize("name", sorted(x for x in PAIRS if x.startswith("cvt")))
def test_conversion_of_two_floats(name):
    """The first operand goes into the upper half."""
    sources, type, function = CASES[PAIRS[name]]
    rows = combinations(["f32", "f32"]) + random_floats(2, 300)
    columns = {f"%r{n + 1}": [row[n] for row in rows] for n in range(2)}
    (got,) = evaluate(f"{name} %r9, %r1, %r2;", columns, ["%r9"])
    for (upper, lower), bits in zip(rows, got, strict=True):
        for operand, half in ((upper, int(bits) >> 16), (lower, int(bits) & 0xFFFF)):
            expected = function(decode(operand, "f32"))
            if math.isnan(expected):
                assert math.isnan(decode(half, type)), (name, hex(operand))
            else:
                assert half == encode(expected, type), (name, hex(operand))


def test_registers_are_packed_from_the_lowest_bits_on():
    columns = {"%r1": [0x11112222], "%r2": [0x33334444], "%rd1": [0x5555666677778888]}
    instructions = """
        mov.b64 %rd9, {%r1, %r2};
        mov.b64 {%r8, %r9}, %rd1;
        mov.b32 {%rs1, %rs2}, %r1;
        mov.b32 %r7, {%rs2, %rs1};
        mov.b64 {%rs3, _, _, %rs4}, %rd1;
    """
    registers = ["%rd9", "%r8", "%r9", "%rs1", "%rs2", "%r7", "%rs3", "%rs4"]
    got = [int(x[0]) for x in evaluate(instructions, columns, registers)]
    expected = [0x3333444411112222, 0x77778888, 0x55556666, 0x2222, 0x1111, 0x22221111]
    assert got == [*expected, 0x8888, 0x5555]


# -----------------------------------------------------------------------------
# Written out.

WRITTEN_OUT = [
    # an instruction, and the bits of its result; 0f and eight digits are the bits of a float
    ("mov.u32 %r9, 0xffffffffffffffff", 0xFFFFFFFF),  # -1, as Triton writes it
    ("add.s32 %r9, 2147483647, 1", 0x80000000),
    ("sub.s32 %r9, -2147483648, 1", 0x7FFFFFFF),
    ("abs.s32 %r9, -2147483648", 0x80000000),
    ("div.s32 %r9, -7, 2", 0xFFFFFFFD),
    ("rem.s32 %r9, -7, 2", 0xFFFFFFFF),
    ("div.s32 %r9, -2147483648, -1", 0x80000000),
    ("mul.hi.u32 %r9, 4294967295, 4294967295", 0xFFFFFFFE),
    ("mul.hi.s32 %r9, -1, 1", 0xFFFFFFFF),
    ("shl.b32 %r9, 1, 31", 0x80000000),
    ("shl.b32 %r9, 1, 32", 0),
    ("shl.b32 %r9, 1, 4294967295", 0),
    ("shr.u32 %r9, 4294967295, 32", 0),
    ("shr.s32 %r9, -8, 1", 0xFFFFFFFC),
    ("shr.s32 %r9, -8, 40", 0xFFFFFFFF),
    ("bfe.u32 %r9, 0xABCD1234, 8, 8", 0x12),
    ("bfe.s32 %r9, 0x00008000, 8, 8", 0xFFFFFF80),
    ("bfe.s32 %r9, 0x80000000, 28, 8", 0xFFFFFFF8),
    ("bfe.u32 %r9, 0x80000000, 28, 8", 0x8),
    ("bfe.s32 %r9, -1, 40, 3", 0xFFFFFFFF),
    ("bfe.u32 %r9, -1, 40, 3", 0),
    ("bfe.s32 %r9, -1, 3, 0", 0),
    ("max.f32 %r9, 0f7FC00000, 0f80000000", 0x80000000),
    ("max.f32 %r9, 0f80000000, 0f00000000", 0x00000000),
    ("min.f32 %r9, 0f00000000, 0f80000000", 0x80000000),
    ("max.f32 %r9, 0f3F800000, 0f40000000, 0f40400000", 0x40400000),
    ("min.f32 %r9, 0f40400000, 0f3F800000, 0f40000000", 0x3F800000),
    ("mul.f32 %r9, 0f00800000, 0f3F000000", 0x00400000),  # half the smallest normal number
    ("mul.ftz.f32 %r9, 0f80800000, 0f3F000000", 0x80000000),
    ("ex2.approx.f32 %r9, 0fC3000000", 0x00200000),  # 2^-128
    ("ex2.approx.ftz.f32 %r9, 0fC3000000", 0x00000000),
    ("ex2.approx.ftz.f32 %r9, 0fFF800000", 0x00000000),
    ("ex2.approx.ftz.f32 %r9, 0f43000000", 0x7F800000),  # 2^128
    ("div.full.f32 %r9, 0f3F800000, 0f40400000", 0x3EAAAAAB),  # 1 / 3
    ("div.full.f32 %r9, 0f3F800000, 0f80000000", 0xFF800000),
    ("cvt.rzi.s32.f32 %r9, 0f4F000000", 0x7FFFFFFF),  # 2^31 is clamped
    ("cvt.rni.s32.f32 %r9, 0f40200000", 2),  # 2.5, a tie
    ("cvt.rzi.u32.f32 %r9, 0fBF800000", 0),  # -1
    ("cvt.rzi.s32.f32 %r9, 0f7FC00000", 0),
    ("cvt.rn.f32.s32 %r9, 16777217", 0x4B800000),  # 2^24 + 1, a tie to even
    ("cvt.rn.f32.s32 %r9, 16777219", 0x4B800002),
    # 1 + 2^-8 is a tie of bf16: to the even 1; 1 + 3 * 2^-8 to 1 + 2^-6
    ("cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000", 0x3F803F82),
    ("cvt.rn.bf16x2.f32 %r9, 0f7F7FFFFF, 0f80000001", 0x7F808000),  # to infinity, to -0
    ("cvt.rn.f16x2.f32 %r9, 0f477FF000, 0f33000000", 0x7C000000),  # 65520 and 2^-25 are ties
    ("cvt.rna.tf32.f32 %r9, 0f3F801000", 0x3F802000),  # a tie goes away from zero
    ("cvt.rna.tf32.f32 %r9, 0f3F800FFF", 0x3F800000),
]


@pytest.mark.parametrize("text, expected", WRITTEN_OUT)
def test_written_out(text, expected):
    (got,) = evaluate(f"{text};", {"%r1": [0]}, ["%r9"])
    assert got[0] == expected, hex(int(got[0]))


def test_fma_rounds_once():
    """a * b is just less than half a unit of c: float64 loses that, and would round to even, up."""
    a = 1 + 2.0**-23
    b = 2.0**-24 * (1 - 2.0**-23)
    c = 1 + 2.0**-23
    twice = np.float32(np.float64(a) * b + c)
    assert float(twice) == 1 + 2.0**-22
    columns = {f"%r{n}": [encode(x, "f32")] for n, x in enumerate((a, b, c), start=1)}
    (got,) = evaluate("fma.rn.f32 %r9, %r1, %r2, %r3;", columns, ["%r9"])
    assert decode(got[0], "f32") == c
    (got,) = evaluate("neg.f32 %r2, %r2; fma.rn.f32 %r9, %r1, %r2, %r3;", columns, ["%r9"])
    assert decode(got[0], "f32") == c


def test_a_guard_decides_which_threads_execute():
    columns = {"%p1": [0, 1, 0, 1], "%r1": [1, 2, 3, 4], "%r9": [10, 20, 30, 40]}
    (got,) = evaluate("@%p1 mov.b32 %r9, %r1;", columns, ["%r9"])
    assert got.tolist() == [10, 2, 30, 4]
    (got,) = evaluate("@!%p1 add.s32 %r9, %r9, %r1;", columns, ["%r9"])
    assert got.tolist() == [11, 20, 33, 40]
