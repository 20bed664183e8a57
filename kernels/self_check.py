"""Compare a kernel with eager.py on small random inputs: see first_call.py.

The yardstick is float64. A kernel may have twice the error of plain PyTorch in the same dtype, and
a rounding of that dtype: the bounds of tests/interpreted/, which hold there for all inputs.
"""

import contextlib
import functools
import importlib
import warnings
from typing import NamedTuple

import torch

from . import eager


class Case(NamedTuple):
    """What a kernel is compiled for."""

    kernel: str  # a key of FILES
    dtype: torch.dtype
    head_dim: int
    group: int  # query heads for each key head
    term: str  # of attention: "no term", "slopes", "table", or "vectors" with what follows it below
    mask: str = ""  # of attention: the words of _mask_options() that hold
    rotated: int = 0  # of rope: channels

    def __str__(self):
        words = [str(self.dtype).removeprefix("torch."), f"head dimension {self.head_dim}"]
        words += [self.term, self.mask, f"{self.rotated} channels rotated" if self.rotated else ""]
        return f"{self.kernel} ({', '.join(filter(None, words))})"


# The file of each kernel. Without gradient, the backward kernels are not compiled.
FILES = {
    "rope": "rotary",
    "attention": "flash",
    "attention without gradient": "flash",
    "decoding": "decode",
}
# Relative errors that a dtype explains.
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def find_fault(case, device):
    """Compare outputs and gradients. Returns what is wrong with the kernel, in words, or "".

    Raises what the compiler or the launch raises.
    """
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in _lengths(case, device):
            for name, error, limit in _compare(case, length, device):
                if not error <= limit:  # NaN is a fault, too
                    return f"{name} has a relative error of {error:.2g}, and {limit:.2g} is allowed"
    return ""


def _lengths(case, device):
    """Tokens: several tiles and a part of one. Triton compiles multiples of 16 differently."""
    length = 1041 if case.kernel == "decoding" else 273
    if device.type != "cpu":
        return length, length + 15
    # the interpreter is slow, and its tiles of attention are small
    return (81,) if case.kernel.startswith("attention") else (length,)


def _compare(case, length, device):
    """Yield (name, error of the kernel, largest error allowed) for each output and gradient."""
    randn = functools.partial(_randn, torch.Generator().manual_seed(0), device)
    inputs = _inputs(case, length, randn)
    n_outputs = 2 if case.kernel == "rope" else 1
    leaves = list(inputs.values())
    out_grads = [randn(*x.shape).to(case.dtype) for x in leaves[:n_outputs]]
    if case.kernel in ("decoding", "attention without gradient"):
        out_grads = []

    module = importlib.import_module(f".{FILES[case.kernel]}", __package__)
    names = [*list(inputs)[:n_outputs], *(f"the gradient of {name}" for name in inputs)]
    if case.kernel == "rope":
        angle = torch.rand(length, case.rotated // 2, generator=torch.Generator().manual_seed(1))
        tables = ((angle * 1000).cos().to(device), (angle * 1000).sin().to(device))
        calls = [functools.partial(_rope, file.rope, tables) for file in (module, eager)]
    else:
        names[0] = "the output"
        options = _mask_options(case.mask, length, device)
        calls = [
            functools.partial(_attention, file.attention, case.term, options)
            for file in (module, eager)
        ]
    kernel, plain = calls
    exact = _outputs_and_gradients(plain, [x.double() for x in leaves], out_grads)
    expected = _outputs_and_gradients(plain, leaves, out_grads)
    found = _outputs_and_gradients(kernel, leaves, out_grads)
    for name, x, y, truth in zip(names, found, expected, exact, strict=False):
        rounding = ROUNDING[case.dtype]
        if name.endswith("slopes") and case.dtype == torch.float32:
            rounding *= 100  # a few sums of large terms of both signs: their size tells little
        yield name, _error(x, truth), 2 * _error(y, truth) + rounding


def _randn(generator, device, *shape):
    return torch.randn(shape, generator=generator).to(device)


def _inputs(case, length, randn):
    """What has a gradient, by name: queries, keys, values, and what the term needs."""
    D = case.head_dim
    H = 2 * case.group
    n_queries = 1 if case.kernel == "decoding" else length
    m = length // 3  # greater distances are clipped
    heads = H if "by head" in case.term else 1
    # Scores as large as those of trained models, or bfloat16 would hide what happens to large ones,
    # such as a soft cap of 30. With offsets smaller, for the kernels round their sums with queries.
    size = 2 if "offsets" in case.term else 3
    # in memory as a model has them
    q = (size * randn(2, n_queries, H, D)).to(case.dtype).transpose(1, 2)
    k = randn(2, length, 2, D).to(case.dtype).transpose(1, 2)
    v = randn(2, length, 2, D).to(case.dtype).transpose(1, 2)
    if case.kernel == "rope":
        return {"queries": q, "keys": k}
    inputs = {"queries": q, "keys": k, "values": v}
    if case.term == "slopes":
        inputs["slopes"] = randn(H).abs() / 8  # so that not only the nearest keys count
    elif case.term == "table":
        inputs["table"] = randn(H, m)
    elif case.term != "no term":
        inputs["relative keys"] = randn(heads, m, D).to(case.dtype)
    if "values" in case.term:
        inputs["relative values"] = randn(heads, m, D).to(case.dtype)
    if "offsets" in case.term:
        inputs["offset u"] = (randn(H, D) / 2).to(case.dtype)
        inputs["offset w"] = (randn(H, D) / 2).to(case.dtype)
    return inputs


def _mask_options(mask, length, device):
    """Arguments of attention() for the words of a mask."""
    index = torch.arange(length, device=device)
    options = {"causal": "all keys" not in mask}
    if "window" in mask:
        options |= {"window": 40, "sinks": 3}
    if "positions" in mask:
        options["positions"] = index + index // 3
    if "documents" in mask:
        options["docs"] = torch.stack((index // 50, index // 70))
    if "length" in mask:
        options["length"] = torch.tensor([length - 30], device=device)
    return options


def _rope(function, tables, q, k):
    return function(q, k, *tables)


def _attention(function, term, options, q, k, v, *term_inputs):
    if term in ("slopes", "table"):
        options = {**options, "bias": term_inputs[0]}
    elif term != "no term":
        keys, *rest = term_inputs
        values = rest.pop(0) if "values" in term else None
        options = {**options, "relative": (keys, values, tuple(rest) or None)}
    return (function(q, k, v, **options),)


def _outputs_and_gradients(call, inputs, out_grads):
    """out_grads: of the outputs; none: no gradients are computed."""
    leaves = [x.detach().requires_grad_(bool(out_grads)) for x in inputs]
    outputs = call(*leaves)
    if not out_grads:
        return outputs
    out_grads = [grad.to(y.dtype) for grad, y in zip(out_grads, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, out_grads)]


@torch.no_grad()
def _error(x, truth):
    return float((x.double() - truth).norm() / truth.norm())
