"""Compare a kernel with eager.py on small random inputs: see first_call.py.

The yardstick is float64. A kernel may have twice the error of plain PyTorch in the same dtype, and
a rounding of that dtype: the bounds of tests/interpreted/, which hold there for all inputs.
"""

import contextlib
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
    # Several tiles and a part of one. Triton compiles multiples of 16 differently.
    lengths = [1041, 1056] if case.kernel == "decoding" else [273, 288]
    if device.type == "cpu":  # the interpreter is slow, and its tiles of attention are small
        lengths = [81] if case.kernel.startswith("attention") else lengths[:1]
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in lengths:
            for name, error, limit in _compare(case, length, device):
                if not error <= limit:  # NaN is a fault, too
                    return f"{name} has a relative error of {error:.2g}, and {limit:.2g} is allowed"
    return ""


def _compare(case, length, device):
    """Yield (name, error of the kernel, largest error allowed) for each output and gradient."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device)

    inputs = _inputs(case, length, randn)
    names = ["queries", "keys"] if case.kernel == "rope" else ["the output"]
    out_grads = [randn(*x.shape).to(case.dtype) for x in list(inputs.values())[: len(names)]]
    has_gradient = case.kernel in ("rope", "attention")
    names += [f"the gradient of {name}" for name in inputs]

    def run(file, dtype=None):
        """The outputs of a file's operator, and the gradients by all inputs."""
        leaves = {name: x.detach().to(dtype or x.dtype) for name, x in inputs.items()}
        for x in leaves.values():
            x.requires_grad_(has_gradient)
        if case.kernel == "rope":
            angle = torch.rand(length, case.rotated // 2, generator=generator.manual_seed(1)) * 1000
            outputs = file.rope(*leaves.values(), angle.cos().to(device), angle.sin().to(device))
        else:
            options = _mask_options(case.mask, length, device)
            options |= _term_options(leaves)
            qkv = [leaves[name] for name in ("queries", "keys", "values")]
            outputs = (file.attention(*qkv, **options),)
        if not has_gradient:
            return outputs
        grads = [grad.to(y.dtype) for grad, y in zip(out_grads, outputs, strict=True)]
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), grads)]

    module = importlib.import_module(f".{FILES[case.kernel]}", __package__)
    results = (run(eager, torch.float64), run(eager), run(module))
    for name, truth, expected, found in zip(names, *results, strict=False):
        rounding = ROUNDING[case.dtype]
        if name.endswith("slopes") and case.dtype == torch.float32:
            rounding *= 100  # a few sums of large terms of both signs: their size tells little
        yield name, _error(found, truth), 2 * _error(expected, truth) + rounding


@torch.no_grad()
def _error(x, truth):
    return float((x.double() - truth).norm() / truth.norm())


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
    inputs = {
        "queries": (size * randn(2, n_queries, H, D)).to(case.dtype).transpose(1, 2),
        "keys": randn(2, length, 2, D).to(case.dtype).transpose(1, 2),
    }
    if case.kernel == "rope":
        return inputs
    inputs["values"] = randn(2, length, 2, D).to(case.dtype).transpose(1, 2)
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


def _term_options(inputs):
    """The arguments of attention() for the inputs of a term."""
    if "relative keys" in inputs:
        offsets = None
        if "offset u" in inputs:
            offsets = (inputs["offset u"], inputs["offset w"])
        return {"relative": (inputs["relative keys"], inputs.get("relative values"), offsets)}
    return {"bias": inputs.get("slopes", inputs.get("table"))}


def _mask_options(mask, length, device):
    """The arguments of attention() for the words of a mask."""
    index = torch.arange(length, device=device)
    options = {"causal": "all keys" not in mask}
    if "window" in mask:
        options["window"] = 40
        options["sinks"] = 3
    if "positions" in mask:
        options["positions"] = index + index // 3
    if "documents" in mask:
        options["docs"] = torch.stack((index // 50, index // 70))
    if "length" in mask:
        options["length"] = torch.tensor([length - 30], device=device)
    return options
