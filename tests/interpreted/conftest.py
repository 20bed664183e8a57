"""Triton's interpreter knows bfloat16 by halves: it multiplies its bit patterns, and cuts float32 off where hardware rounds it to the nearest. Both are put right here."""
import os

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_dot, _convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float


def _widened(x):
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _dot_of_wide(self, a, b, d, *rest):
    a, b = (interpreter.TensorHandle(_widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, d, *rest)


def _convert_to_nearest(x, source, target, mode):
    """float32 to bfloat16: half of the last place is added, less a little where the last bit is even; NaN stays NaN."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return _widened(np.ascontiguousarray(x)).view(np.uint32)
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(x, source, target, mode)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if os.environ.get("NANOLONG_GPU") != "1":
    interpreter.InterpreterBuilder.create_dot = _dot_of_wide
    interpreter._convert_float = _convert_to_nearest
