"""Corrects the bfloat16 of Triton's interpreter.

The interpreter multiplies the bit patterns of bfloat16 numbers, and cuts off float32 numbers where
hardware rounds them to the nearest bfloat16.
"""

import os

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

create_dot = interpreter.InterpreterBuilder.create_dot
convert_float = interpreter._convert_float


def widen(x):
    """The float32 numbers of bfloat16 bit patterns."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def create_dot_of_bfloat16(self, a, b, d, *rest):
    if a.dtype.scalar == tl.bfloat16:
        a = interpreter.TensorHandle(widen(a.data), tl.float32)
    if b.dtype.scalar == tl.bfloat16:
        b = interpreter.TensorHandle(widen(b.data), tl.float32)
    return create_dot(self, a, b, d, *rest)


def convert_to_nearest(x, source, target, mode):
    """float32 to bfloat16 rounds to the nearest, ties to even; NaN stays NaN."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return widen(np.ascontiguousarray(x)).view(np.uint32)
    if (source, target) != (tl.float32, tl.bfloat16):
        return convert_float(x, source, target, mode)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    last_bit = (bits >> 16) & 1
    rounded = (bits + 0x7FFF + last_bit) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


if os.environ.get("NANOLONG_GPU") != "1":
    interpreter.InterpreterBuilder.create_dot = create_dot_of_bfloat16
    interpreter._convert_float = convert_to_nearest
