"""Execute the project's kernels as compiled for an architecture, and check every launch.

    with execution.emulated("sm_80"):
        flash.attention(q, k, v)  # on CPU tensors, launched by the kernels' own Python

The emulator reports what no GPU would: reads and writes outside of tensors, races in shared memory,
missing waits, and programs that touch what others write. Here every launch also runs a second time,
with its programs in another order, and must give the same bits. Memory that a kernel forgets to
write is NaN.

The process must not have TRITON_INTERPRET set.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import torch
from launchers import install

from kernels import decode, flash, rotary

ANOTHER_ORDER = 1  # the seed of the order in which the programs run the second time
SNAPSHOT_BYTES = 1 << 28  # larger storages are inputs, of which no copy is made


class Modules(NamedTuple):
    """The files of kernels that a check runs: the project's, or one with a fault in it."""

    rotary: object = rotary
    flash: object = flash
    decode: object = decode


PROJECT = Modules()


class WrongNumber(AssertionError):
    """An output or a gradient is further from float64 than its bound."""


class WrongOrder(AssertionError):
    """A launch gives other bits when its programs run in another order."""


# -----------------------------------------------------------------------------
# A launch, twice


def tensors_of(args):
    """The tensors among arguments, also of those that are tuples."""
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)


def storage_bytes(tensors):
    """The storages of tensors, each once, as tensors of bytes."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [
        torch.empty(0, dtype=torch.uint8).set_(storage)
        for storage in storages.values()
        if 0 < len(storage) <= SNAPSHOT_BYTES
    ]


class TwiceLauncher:
    """Launches a kernel, restores its memory, launches it in another order and compares."""

    def __init__(self, launcher, name):
        self.launcher = launcher
        self.name = name

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *args, **kwargs):
        memory = storage_bytes(tensors_of(args))
        before = [x.clone() for x in memory]
        self.launcher[grid](*args, **kwargs)
        after = [x.clone() for x in memory]
        for x, old in zip(memory, before, strict=True):
            x.copy_(old)
        self.launcher.options["order"] = ANOTHER_ORDER
        try:
            self.launcher[grid](*args, **kwargs)
        finally:
            self.launcher.options["order"] = None
        if any(not torch.equal(x, y) for x, y in zip(memory, after, strict=True)):
            raise WrongOrder(f"{self.name}: other bits with the programs in another order")


@contextlib.contextmanager
def emulated(target, modules=PROJECT):
    """Until the end of the block the kernels are those compiled for target, emulated.

    Yields their launchers by name.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    saved = [dict(vars(module)) for module in modules]
    launchers = {}
    try:
        torch.use_deterministic_algorithms(True)  # torch.empty is NaN
        for module in modules:
            for name, launcher in install(module, target).items():
                kernel = name.removeprefix("_").removesuffix("_kernel")
                launchers[kernel] = TwiceLauncher(launcher, kernel)
                setattr(module, name, launchers[kernel])
        yield launchers
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for module, names in zip(modules, saved, strict=True):
            vars(module).update(names)


# -----------------------------------------------------------------------------
# A check


class Check(NamedTuple):
    """compare(modules) runs kernels and yields Comparisons with float64."""

    target: str
    compare: object
    level: str = "slow"  # of kernel_cases.py: when it runs


def perform(name, check, modules=PROJECT, edits=None):
    """Run a check. edits: kernel -> a function that changes its PTX before it runs."""
    with emulated(check.target, modules) as launchers:
        for kernel, edit in (edits or {}).items():
            launchers[kernel].launcher.edit = edit
        for result, error, bound in check.compare(modules):
            if not error <= bound:  # also if it is NaN
                raise WrongNumber(f"{name}: {result}: error {error:.3g}, bound {bound:.3g}")


def with_setting(module_name, setting, value, compare):
    """The comparisons of a check, with one setting of a file of kernels changed."""

    def changed(modules):
        module = getattr(modules, module_name)
        with mock.patch.object(module, setting, value):
            yield from compare(modules)

    return changed
