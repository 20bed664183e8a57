"""Execute the project's kernels as compiled for an architecture, and check every launch.

    with execution.emulated("sm_80"):
        flash.attention(q, k, v)  # on CPU tensors, launched by the kernels' own Python

The emulator reports what no GPU would: reads and writes outside of tensors, races in shared memory,
missing waits, and programs that touch what others write. Here every launch also runs a second time,
with its programs in another order, and must give the same bits. Memory that a kernel forgets to
write is NaN.

The process must not have TRITON_INTERPRET set.
"""

import collections
import contextlib
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from launchers import install  # noqa: E402

from kernels import decode, flash, rotary  # noqa: E402

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


# Which kernel computes a result, by the last word of its name.
KERNEL_OF = {"y": "forward", "lse": "forward", "q": "dq", "k": "dkdv", "v": "dkdv", "bias": "sweep"}


def kernel_of(check, name):
    """The kernel that computes the result `name` of a check."""
    if check.startswith("rotary"):
        return "rotate"
    if name.startswith("decoded"):
        return "split"
    if name == "bias" and "slopes" in check:  # there is no sweep
        return "dkdv"
    return KERNEL_OF.get(name.split()[-1], "other")


class Record:
    """What was executed: launches, and the largest error as a fraction of its bound."""

    def __init__(self):
        self.launches = collections.Counter()  # (architecture, kernel) -> launches
        self.checks = collections.Counter()  # architecture -> checks
        self.worst = {}  # (architecture, kernel) -> (error / bound, error, bound, what)
        self.start = time.monotonic()

    def compare(self, target, check, comparison):
        """Keep a comparison, and raise where the error is above its bound or NaN."""
        name, error, bound = comparison
        if not error <= bound:
            raise WrongNumber(f"{check}: {name}: error {error:.3g}, bound {bound:.3g}")
        key = target, kernel_of(check, name)
        found = (error / bound, error, bound, f"{check}: {name}")
        self.worst[key] = max(self.worst.get(key, found), found)

    def summary(self):
        """The record as JSON."""
        kernels = []
        fields = ("error_over_bound", "error", "bound", "what")
        for target, kernel in sorted({*self.launches, *self.worst}):
            row = {
                "architecture": target,
                "kernel": kernel,
                "launches": self.launches[target, kernel],
            }
            worst = self.worst.get((target, kernel))
            if worst:
                row.update(zip(fields, worst, strict=True))
            kernels.append(row)
        return {
            "checks": dict(sorted(self.checks.items())),
            "kernels": kernels,
            "seconds": round(time.monotonic() - self.start, 1),
        }


RECORD = Record()  # of this process


# -----------------------------------------------------------------------------
# A launch, twice


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

    def __init__(self, launcher, target, name, record):
        self.launcher = launcher
        self.target = target
        self.name = name
        self.record = record
        self.again = True

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launch(grid, args, kwargs)

        return launch

    def launch(self, grid, args, kwargs):
        memory = storage_bytes([x for x in args if isinstance(x, torch.Tensor)])
        before = [x.clone() for x in memory]
        self.launcher[grid](*args, **kwargs)
        self.record.launches[self.target, self.name] += 1
        if not self.again:
            return
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
def emulated(target, modules=PROJECT, record=RECORD):
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
                launchers[kernel] = TwiceLauncher(launcher, target, kernel, record)
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
    fast: bool = False


def perform(name, check, modules=PROJECT, record=RECORD, edits=None):
    """Run a check. edits: kernel -> a function that changes its PTX before it runs."""
    with emulated(check.target, modules, record) as launchers:
        for kernel, edit in (edits or {}).items():
            launchers[kernel].launcher.edit = edit
        for comparison in check.compare(modules):
            record.compare(check.target, name, comparison)
    record.checks[check.target] += 1


def with_setting(module_name, setting, value, compare):
    """The comparisons of a check, with one setting of a file of kernels changed."""

    def changed(modules):
        module = getattr(modules, module_name)
        with mock.patch.object(module, setting, value):
            yield from compare(modules)

    return changed
