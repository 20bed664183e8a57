"""Rotate queries and keys on the simulated GPU, as compiled, with one fault after another.

Prints a line of JSON for each: the relative error of the result, "nan" or none, and the faults that
were reported.
"""

import json

import emulated
import torch

from kernels import eager, rotary

# places among the arguments of the kernel
Q, T = 0, 6


def no_fault(grid, args):
    pass


def swapped_strides(grid, args):
    args[Q] = args[Q]._replace(h=args[Q].t, t=args[Q].h)


def one_block_too_few(grid, args):
    grid[0] -= 1


def one_head_too_few(grid, args):
    args[Q] = args[Q]._replace(n=args[Q].n - 1)


def one_token_too_many(grid, args):
    args[T] += 1


LAUNCHES = (no_fault, swapped_strides, one_block_too_few, one_head_too_few, one_token_too_many)
INSTRUCTIONS = {  # one of several hundred: (in the PTX, instead of it)
    "a sign": ("neg.f32", "mov.b32"),
    "a bound": ("setp.lt.s64", "setp.le.s64"),
}


class FaultyKernel:
    """The kernel, launched with another grid or other arguments than its host code gives."""

    def __init__(self, kernel, change):
        self.kernel = kernel
        self.change = change

    def __getitem__(self, grid):
        def launch(*args, **flags):
            changed_grid, changed_args = list(grid), list(args)
            self.change(changed_grid, changed_args)
            self.kernel[tuple(changed_grid)](*changed_args, **flags)

        return launch


def rotate():
    """The relative error of rotated queries (B, H, T, D) in the layout of the model."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 70, n, 64, generator=generator) for n in (3, 1))
    angle = torch.rand(70, 32, generator=generator)
    inputs = [q.transpose(1, 2), k.transpose(1, 2), angle.cos(), angle.sin()]
    expected, _ = eager.rope(*inputs)
    found, _ = rotary.rope(*(x.to("cuda") for x in inputs))
    return float((found.cpu() - expected).norm() / expected.norm())


def report(name):
    try:
        error = rotate()
        error = "nan" if error != error else error
    except RuntimeError:  # of Triton: the launch has failed
        error = None
    print(json.dumps({"fault": name, "error": error, "reported": emulated.faults}), flush=True)
    emulated.faults.clear()


def main():
    kernel = rotary._rotate_kernel
    for change in LAUNCHES:
        rotary._rotate_kernel = FaultyKernel(kernel, change)
        report(change.__name__)
    rotary._rotate_kernel = kernel
    for name, (old, new) in INSTRUCTIONS.items():
        emulated.edit = lambda ptx, old=old, new=new: ptx.replace(old, new, 1)
        kernel.device_caches.clear()  # so that it is loaded again
        report(name)


if __name__ == "__main__":
    main()
