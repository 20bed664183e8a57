"""Arithmetic, logic, comparisons and conversions.

Each function is entered into the table under the names of its instructions, and its first comment
line gives their meaning, with the section of NVIDIA's PTX ISA manual that defines them. The
function builds the action: it finds the arrays of the operands once, and returns what runs.

How results are rounded:
  add, sub, mul, fma, mad     once, to nearest even
  div.rn                      once, to nearest even
  ex2, lg2, rcp, rsqrt, sqrt (.approx) and div.full
                              once, to nearest even. The manual allows errors of up to about two
                              units in the last place, so the last bits of a GPU differ from these
"""

import numpy as np

from .formats import (
    FROM_16_BITS,
    TO_16_BITS,
    flush,
    fused_multiply_add,
    maximum,
    minimum,
    to_tf32,
)
from .machine import TYPES
from .table import operation


def assign(register, value, mask):
    """Set a register for the threads of a mask."""
    np.copyto(register, value, where=mask, casting="unsafe")


def type_of(instruction):
    return instruction.name.rpartition(".")[2]


def has(instruction, modifier):
    return modifier in instruction.name.split(".")


def operands(machine, instruction, type):
    """The register that is written and the operands that are read, all of one type."""
    target, *sources = instruction.operands
    return machine.register(target, type), [machine.source(x, type) for x in sources]


# -----------------------------------------------------------------------------
# Data movement between registers.


@operation("mov.{pred,b16,u16,b32,u32,f32,b64,u64}", operands=2)
def move(machine, i):
    # Data Movement: mov: d = a; a may also be a special register or an address. With a list in
    # braces: pack or unpack a vector, the first element in the lowest bits.
    target, source = i.operands
    type = type_of(i)
    if isinstance(target, tuple):
        return unpack(machine, target, source, type)
    if isinstance(source, tuple):
        return pack(machine, target, source, type)
    d = machine.register(target, type)
    a = machine.source(source, type)
    return lambda mask: assign(d, a, mask)


def part_type(type, n_parts):
    bits = 8 * TYPES[type].itemsize // n_parts
    if type[0] != "b" or n_parts not in (2, 4) or bits not in (16, 32):
        raise NotImplementedError(f"{type} in {n_parts} parts")
    return f"b{bits}"


def unpack(machine, targets, source, type):
    part = part_type(type, len(targets))
    parts = machine.register(source, type).view(TYPES[part]).reshape(-1, len(targets)).T
    registers = [None if x == "_" else machine.register(x, part) for x in targets]

    def run(mask):
        values = parts.copy()  # a target may be a part of the source
        for register, value in zip(registers, values, strict=True):
            if register is not None:
                assign(register, value, mask)

    return run


def pack(machine, target, sources, type):
    part = part_type(type, len(sources))
    parts = machine.register(target, type).view(TYPES[part]).reshape(-1, len(sources)).T
    values = [machine.source(x, part) for x in sources]

    def run(mask):
        for register, value in zip(parts, [value.copy() for value in values], strict=True):
            assign(register, value, mask)

    return run


@operation("selp.{b16,b32,f32,b64}", operands=4)
def select(machine, i):
    # Comparison and Selection: selp: d = (c == 1) ? a : b, c a predicate.
    type = type_of(i)
    d = machine.register(i.operands[0], type)
    a, b = (machine.source(x, type) for x in i.operands[1:3])
    c = machine.source(i.operands[3], "pred")
    return lambda mask: assign(d, np.where(c, a, b), mask)


# -----------------------------------------------------------------------------
# Integers. All results are taken modulo 2 to the number of bits.

INTEGER_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


@operation("{add,sub,min,max,mul.lo}.{s16,u16,s32,u32,s64,u64}", operands=3)
@operation("{neg,abs}.{s16,s32,s64}", operands=2)
@operation("{and,or,xor}.{pred,b16,b32,b64}", operands=3)
@operation("not.{pred,b16,b32,b64}", operands=2)
def integer(machine, i):
    # Integer Arithmetic: add: d = a + b, sub: d = a - b, mul.lo: t = a * b; d = t<n-1..0>,
    # min: d = (a < b) ? a : b, max: d = (a > b) ? a : b, neg: d = -a, abs: d = |a|.
    # Logic and Shift: and: d = a & b, or: d = a | b, xor: d = a ^ b, not: d = ~a.
    function = INTEGER_FUNCTIONS[i.name.split(".")[0]]
    d, sources = operands(machine, i, type_of(i))
    return lambda mask: function(*sources, out=d, where=mask)


@operation("mul.wide.{s16,u16,s32,u32}", operands=3)
@operation("mad.wide.{s16,u16,s32,u32}", operands=4)
def multiply_wide(machine, i):
    # Integer Arithmetic: mul.wide: t = a * b; d = t, d is twice as wide as a and b;
    # mad.wide: d = t + c.
    narrow = type_of(i)
    wide = f"{narrow[0]}{2 * int(narrow[1:])}"
    d = machine.register(i.operands[0], wide)
    a, b = (machine.source(x, narrow) for x in i.operands[1:3])
    if i.name.startswith("mul"):
        return lambda mask: assign(d, a.astype(TYPES[wide]) * b, mask)
    c = machine.source(i.operands[3], wide)
    return lambda mask: assign(d, a.astype(TYPES[wide]) * b + c, mask)


@operation("mul.hi.{s32,u32}", operands=3)
def multiply_high(machine, i):
    # Integer Arithmetic: mul.hi: t = a * b; d = t<2n-1..n>.
    type = type_of(i)
    d, (a, b) = operands(machine, i, type)
    wide = TYPES[f"{type[0]}64"]
    return lambda mask: assign(d, a.astype(wide) * b >> 32, mask)


@operation("mad.lo.{s16,u16,s32,u32,s64,u64}", operands=4)
def multiply_add(machine, i):
    # Integer Arithmetic: mad.lo: t = a * b; d = t<n-1..0> + c.
    d, (a, b, c) = operands(machine, i, type_of(i))
    return lambda mask: assign(d, a * b + c, mask)


@operation("{div,rem}.{s32,u32,s64,u64}", operands=3)
def divide_integers(machine, i):
    # Integer Arithmetic: div: d = a / b; rem: d = a % b. Towards zero. What a division by zero
    # gives is left open there; here it is all ones, and a for rem.
    d, (a, b) = operands(machine, i, type_of(i))
    is_division = i.name.startswith("div")

    def run(mask):
        divisor = np.where(b == 0, np.ones_like(b), b)
        remainder = np.fmod(a, divisor)
        if is_division:
            quotient = (a - remainder) // divisor
            assign(d, np.where(b == 0, np.invert(np.zeros_like(quotient)), quotient), mask)
        else:
            assign(d, np.where(b == 0, a, remainder), mask)

    return run


@operation("shl.{b16,b32,b64}", "shr.{b16,u16,s16,b32,u32,s32,b64,u64,s64}", operands=3)
def shift(machine, i):
    # Logic and Shift: shl: d = a << b, shr: d = a >> b. The second operand is 32 bits wide and
    # counts at most as the register's width; shr.s fills with the sign.
    type = type_of(i)
    d = machine.register(i.operands[0], type)
    a = machine.source(i.operands[1], type)
    amount = machine.source(i.operands[2], "u32")
    most = 8 * d.dtype.itemsize - 1
    function = np.left_shift if i.name.startswith("shl") else np.right_shift
    if len(amount) == 1 and amount[0] <= most:
        amount = amount.astype(d.dtype)
        return lambda mask: function(a, amount, out=d, where=mask)

    def run(mask):
        beyond = a >> most if type[0] == "s" else np.zeros_like(a)
        shifted = function(a, np.minimum(amount, most).astype(d.dtype))
        assign(d, np.where(amount > most, beyond, shifted), mask)

    return run


@operation("bfe.{s32,u32}", operands=4)
def extract_bits(machine, i):
    # Integer Arithmetic: bfe: pos = b & 0xff; len = c & 0xff; d[i] = (i < len && pos + i <=
    # msb) ? a[pos + i] : sbit; sbit is a[min(pos + len - 1, msb)] for .s32, else 0.
    type = type_of(i)
    d = machine.register(i.operands[0], type)
    a = machine.source(i.operands[1], type)
    start, length = (machine.source(x, "u32") for x in i.operands[2:])

    def run(mask):
        first = (start & 0xFF).astype(np.int64)
        n_bits = (length & 0xFF).astype(np.int64)
        # an arithmetic shift of int64 repeats the sign of .s32 beyond bit 31
        field = a.astype(np.int64) >> np.minimum(first, 63)
        n_bits = np.minimum(n_bits, 32)
        field = field & (1 << n_bits) - 1
        if type == "s32":
            sign = (n_bits > 0) & (field >> np.maximum(n_bits - 1, 0) & 1 == 1)
            field = np.where(sign, field - (1 << n_bits), field)
        assign(d, field, mask)

    return run


# -----------------------------------------------------------------------------
# Comparisons.

# A comparison of floating point numbers is false where one is NaN; with a u at its end true.
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@operation("setp.{eq,ne}.{b16,b32,b64}", operands=3)
@operation("setp.{eq,ne,lt,le,gt,ge}.{s16,u16,s32,u32,s64,u64}", operands=3)
def compare_integers(machine, i):
    # Comparison and Selection: setp: p = (a CmpOp b).
    _, test, type = i.name.split(".")
    function = COMPARISONS[test]
    d = machine.register(i.operands[0], "pred")
    a, b = (machine.source(x, type) for x in i.operands[1:])
    return lambda mask: function(a, b, out=d, where=mask)


@operation("setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32", operands=3)
def compare_floats(machine, i):
    # Comparison and Selection: setp: p = (a CmpOp b). num: neither is NaN; nan: one of them is;
    # equ, neu, ltu, leu, gtu and geu also hold where one is NaN.
    test = i.name.split(".")[1]
    d = machine.register(i.operands[0], "pred")
    a, b = (machine.source(x, "f32") for x in i.operands[1:])

    def run(mask):
        is_nan = np.isnan(a) | np.isnan(b)
        if test in ("num", "nan"):
            assign(d, is_nan == (test == "nan"), mask)
        elif test.endswith("u"):
            assign(d, COMPARISONS[test[:-1]](a, b) | is_nan, mask)
        else:
            assign(d, COMPARISONS[test](a, b) & ~is_nan, mask)

    return run


# -----------------------------------------------------------------------------
# Floating point numbers.

FLOAT_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": minimum,
    "max": maximum,
    "neg": np.negative,
    "abs": np.abs,
    "fma": fused_multiply_add,
    "div": np.divide,
}


@operation("{add,sub,mul}{,.rn}{,.ftz}.f32", operands=3)
@operation("{min,max}.f32", operands=(3, 4))
@operation("{neg,abs}.f32", operands=2)
@operation("fma.rn{,.ftz}.f32", operands=4)
@operation("div.rn.f32", "div.full{,.ftz}.f32", operands=3)
def floating_point(machine, i):
    # Floating Point: add: d = a + b, sub: d = a - b, mul: d = a * b, neg: d = -a, abs: d = |a|,
    # fma: d = a * b + c, rounded once; div: d = a / b, div.full with at most 2 ulp of error; min,
    # max: of two or three, where NaN loses to a number and -0 is below +0. .ftz: subnormal inputs
    # and results become zeros of the same sign.
    function = FLOAT_FUNCTIONS[i.name.split(".")[0]]
    d, sources = operands(machine, i, "f32")
    if has(i, "ftz"):
        return lambda mask: assign(d, flush(apply(function, [flush(x) for x in sources])), mask)
    if isinstance(function, np.ufunc):
        return lambda mask: function(*sources, out=d, where=mask)
    return lambda mask: assign(d, apply(function, sources), mask)


def apply(function, sources):
    """The function of all sources; of three, a minimum or maximum takes two after another."""
    if function in (minimum, maximum) and len(sources) == 3:
        return function(function(sources[0], sources[1]), sources[2])
    return function(*sources)


@operation("{add,sub,mul}.f32x2", operands=3)
@operation("fma.rn.f32x2", operands=4)
def floating_point_pairs(machine, i):
    # Floating Point: add, sub, mul, fma .f32x2: the operation on each half of 64 bits.
    function = FLOAT_FUNCTIONS[i.name.split(".")[0]]
    d, *sources = (machine.register(x, "b64").view(np.float32) for x in i.operands)

    def run(mask):
        pairs = mask if mask is True else np.repeat(mask, 2)
        assign(d, function(*sources), pairs)

    return run


@operation("fma.rn.f32.{bf16,f16}", operands=4)
def fused_mixed(machine, i):
    # Mixed Precision Floating Point: fma.rn.f32.bf16: d = a * b + c, a and b of 16 bits are
    # converted to f32, c and d are f32.
    widen = FROM_16_BITS[type_of(i)]
    d = machine.register(i.operands[0], "f32")
    a, b = (machine.source(x, "b16") for x in i.operands[1:3])
    c = machine.source(i.operands[3], "f32")
    return lambda mask: assign(d, fused_multiply_add(widen(a), widen(b), c), mask)


# In float64, then rounded once to float32.
APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@operation("{ex2,lg2,rcp,sqrt,rsqrt}.approx{,.ftz}.f32", operands=2)
def special_function(machine, i):
    # Floating Point: ex2: d = 2 ^ a, lg2: d = log(a) / log(2), rcp: d = 1 / a, sqrt:
    # d = sqrt(a), rsqrt: d = 1 / sqrt(a).
    function = APPROXIMATE[i.name.split(".")[0]]
    d, (a,) = operands(machine, i, "f32")

    def run(mask):
        if has(i, "ftz"):
            result = function(flush(a).astype(np.float64)).astype(np.float32)
            assign(d, flush(result), mask)
        else:
            assign(d, function(a.astype(np.float64)).astype(np.float32), mask)

    return run


# -----------------------------------------------------------------------------
# Conversions. Data Movement and Conversion: cvt.

INTEGERS = "s16,u16,s32,u32,s64,u64"


@operation(f"cvt.{{{INTEGERS}}}.{{{INTEGERS}}}", operands=2)
def convert_integer(machine, i):
    # Data Movement: cvt: to a narrower type modulo its range; in a register wider than the type .s
    # is extended by its sign and .u by zeros.
    _, to, of = i.name.split(".")
    d = machine.register(i.operands[0], f"{to[0]}{machine.register_bits(i.operands[0])}")
    a = machine.source(i.operands[1], of)
    return lambda mask: assign(d, a.astype(TYPES[to]), mask)


@operation(f"cvt.rn.f32.{{{INTEGERS}}}", operands=2)
def integer_to_float(machine, i):
    # .rn: to nearest, ties to even.
    d = machine.register(i.operands[0], "f32")
    a = machine.source(i.operands[1], type_of(i))
    return lambda mask: assign(d, a.astype(np.float32), mask)


TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt.{rni,rzi,rmi,rpi}.{s32,u32}.f32", operands=2)
def float_to_integer(machine, i):
    # To an integer: .rni to nearest, ties to even; .rzi towards zero; .rmi down; .rpi up. What is
    # out of range becomes the nearest end of it; NaN becomes 0.
    function = TO_INTEGER[i.name.split(".")[1]]
    to = i.name.split(".")[-2]
    limits = np.iinfo(TYPES[to])
    d = machine.register(i.operands[0], to)
    a = machine.source(i.operands[1], "f32")

    def run(mask):
        number = np.clip(function(a.astype(np.float64)), limits.min, limits.max)
        assign(d, np.where(np.isnan(number), 0, number).astype(np.int64), mask)

    return run


@operation("cvt.{rni,rzi,rmi,rpi}.f32.f32", operands=2)
def float_to_whole(machine, i):
    # To a whole number that stays a floating-point number.
    function = TO_INTEGER[i.name.split(".")[1]]
    d, (a,) = operands(machine, i, "f32")
    return lambda mask: assign(d, function(a), mask)


@operation("cvt.f32.{bf16,f16}", operands=2)
def widen_float(machine, i):
    # To a wider type: exact.
    widen = FROM_16_BITS[type_of(i)]
    d = machine.register(i.operands[0], "f32")
    a = machine.source(i.operands[1], "b16")
    return lambda mask: assign(d, widen(a), mask)


@operation("cvt.rn.{bf16,f16}.f32", operands=2)
def narrow_float(machine, i):
    # .rn: to nearest, ties to even; NaN becomes the canonical NaN.
    narrow = TO_16_BITS[i.name.split(".")[2]]
    d = machine.register(i.operands[0], "b16")
    a = machine.source(i.operands[1], "f32")
    return lambda mask: assign(d, narrow(a), mask)


@operation("cvt.rn.{bf16x2,f16x2}.f32", operands=3)
def narrow_two_floats(machine, i):
    # .f16x2 and .bf16x2: two numbers of f32 in one register, a in its upper half, b in its lower.
    narrow = TO_16_BITS[i.name.split(".")[2].removesuffix("x2")]
    halves = machine.register(i.operands[0], "b32").view(np.uint16).reshape(-1, 2)
    a, b = (machine.source(x, "f32") for x in i.operands[1:])

    def run(mask):
        upper = narrow(a)
        lower = narrow(b)
        assign(halves[:, 1], upper, mask)
        assign(halves[:, 0], lower, mask)

    return run


@operation("cvt.rna.tf32.f32", operands=2)
def convert_to_tf32(machine, i):
    # .rna: to nearest, ties away from zero.
    d, (a,) = operands(machine, i, "b32")
    return lambda mask: assign(d, to_tf32(a), mask)
