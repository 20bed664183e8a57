"""Number formats and roundings that numpy lacks, on arrays.

bf16 is the upper half of a float32; numpy knows it as uint16 only. tf32 is a float32 of which the
tensor cores read the upper 19 bits.
"""

import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)
BF16_NAN = np.uint16(0x7FFF)
F16_NAN = np.uint16(0x7FFF)
F32_NAN = np.uint32(0x7FFFFFFF)


def flush(x):
    """Replace subnormal numbers of float32 by zero with their sign, as .ftz says."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fused_multiply_add(a, b, c):
    """a * b + c of float32 numbers, rounded once, to nearest even.

    In float64 the product of two float32 is exact, but the sum may be rounded, and rounding it
    again to float32 could go wrong where the first rounding made a tie. So the sum is rounded to
    odd: the error of the float64 sum is known exactly (Knuth's TwoSum), and where there is one, the
    last bit of the sum is set towards it. That bit then breaks ties in the right direction (Boldo
    and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = a.astype(np.float64) * b
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.atleast_1d(total).view(np.int64)
    # where the last bit is even, go to its neighbour in the direction of the error
    step = np.where((error > 0) == (total > 0), 1, -1)
    is_rounded = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    return np.where(is_rounded, bits + step, bits).view(np.float64).astype(np.float32)


def minimum(a, b):
    """The smaller number; -0 is smaller than +0, and a NaN loses to a number."""
    return -maximum(-a, -b)


def maximum(a, b):
    larger = np.fmax(a, b)
    is_zero = larger == 0
    if is_zero.any():
        # fmax may return either zero: +0 + -0 is +0, -0 + -0 is -0
        larger = np.where((a == 0) & (b == 0), a + b, larger)
    return larger


def to_bf16(x):
    """float32 to the bits of bf16, to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return np.where(np.isnan(x), BF16_NAN, (rounded >> 16).astype(np.uint16))


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_f16(x):
    """float32 to the bits of f16, to nearest even; too large numbers become infinite."""
    return np.where(np.isnan(x), F16_NAN, x.astype(np.float16).view(np.uint16))


def from_f16(bits):
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def to_tf32(bits):
    """The bits of float32 to those of tf32, to nearest, ties away from zero."""
    magnitude = bits & 0x7FFFFFFF
    rounded = bits + np.uint32(0x1000) & np.uint32(0xFFFFE000)
    rounded = np.where(magnitude == 0x7F800000, bits, rounded)
    return np.where(magnitude > 0x7F800000, F32_NAN, rounded)


def from_tf32(bits):
    """What the tensor cores read of a register of tf32: its lower 13 bits are ignored."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


TO_16_BITS = {"bf16": to_bf16, "f16": to_f16}
FROM_16_BITS = {"bf16": from_bf16, "f16": from_f16}
