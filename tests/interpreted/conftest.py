"""Triton's interpreter multiplies bfloat16 by its bit patterns (numpy has no such type): widen the operands of a product first."""
import os

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_dot = interpreter.InterpreterBuilder.create_dot


def _wide(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)


if os.environ.get("NANOLONG_GPU") != "1":
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, *rest: _dot(self, _wide(a), _wide(b), d, *rest)
