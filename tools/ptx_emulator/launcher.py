"""Compile kernels as Triton's just-in-time compiler would, and launch them on the machine.

launchers = install(flash, "sm_80")
flash.attention(q, k, v)             on CPU tensors: the module's own Python launches the kernels
launchers["_forward_kernel"].machine of the last launch: what was executed
"""

import os
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from .machine import MAX_VISITS, Machine
from .ptx import Kernel, check_target


class Driver:
    """What Triton's launcher asks of a driver before it compiles a kernel."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        if self.target.startswith("gfx"):
            return GPUTarget("hip", self.target, 64)
        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)

    def get_current_device(self):
        return self.target  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device):
        return 0


class Leaf(NamedTuple):
    """An argument of a kernel, or a member of one that is a tuple."""

    name: str
    path: tuple  # its index, and those of the members on the way to it
    type: str  # of Triton, such as "*bf16"; "constexpr" if it is known at compile time
    value: object


class Launcher:
    """A @triton.jit function that is executed by the emulator: launcher[grid](*args, **kwargs).

    options   execute: whether the programs run (True); without, a launch is only kept, to be
              compiled, for any architecture. races: whether ledgers are kept (True). profile:
              whether wavefronts and sectors are counted (False). shuffle: None or a seed, the order
              of warps: see machine.py. order: the order of the programs of a launch, None,
              "reversed" or a seed. max_visits: of blocks, after which a program is taken to hang
    adjust    None, or a function (args, kwargs) -> kwargs: what the module would pass on a GPU
    edit      None, or a function of the PTX text to the text that is executed: faults on purpose
    machine   of the last launch;  last: its (grid, args, kwargs);  launches: how many there were
    """

    kernels = {}  # shared by all launchers: {Triton's hash of a compiled kernel: Kernel}

    def __init__(self, function, target, **options):
        refuse_interpreter()
        self.function = function
        self.target = target
        self.options = {
            "execute": True,
            "races": True,
            "profile": False,
            "shuffle": None,
            "order": None,
            "max_visits": MAX_VISITS,
        }
        unknown = options.keys() - self.options
        if unknown:
            raise TypeError(f"unknown options of a launcher: {', '.join(sorted(unknown))}")
        self.options.update(options)
        if self.options["execute"]:
            check_target(target, getattr(function, "__name__", "kernel"))
        self.adjust = None
        self.edit = None
        self.machine = None
        self.last = None
        self.launches = 0

    def __getitem__(self, grid):
        grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid, args, kwargs):
        """Run all programs of a grid."""
        if self.adjust is not None:
            kwargs = self.adjust(args, kwargs)
        self.last = grid, args, kwargs
        self.launches += 1
        if not self.options["execute"]:
            return
        compiled = self.compile()
        values = {
            leaf.name: leaf.value for leaf in self.leaves(compiled.src) if leaf.type != "constexpr"
        }
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        options = {x: self.options[x] for x in ("races", "profile", "shuffle", "max_visits")}
        machine = Machine(self.kernel_of(compiled), compiled.metadata.shared, tensors, **options)
        self.machine = machine
        numbers = [
            machine.global_memory.address(x) if isinstance(x, torch.Tensor) else x
            for x in values.values()
        ]
        # Triton's last two parameters are scratch memories, which these kernels do not use.
        machine.set_parameters([*numbers, 0, 0])
        with np.errstate(all="ignore"):
            for program in programs(grid, self.options["order"]):
                machine.run(program, grid)

    def compile(self):
        """Compile the kernel of the last launch: Triton's CompiledKernel.

        Triton's own launcher does all but the launch itself, so this is the kernel that a user's
        process compiles: integers of 1 are constants, and pointers and integers that are divisible
        by 16 are declared so. The addresses are those of the CPU's tensors, whose storages start at
        multiples of 64 bytes. On a GPU they start at multiples of 512, so that a view is divisible
        by 16 there if it is here.
        """
        grid, args, kwargs = self.last
        with mock.patch.object(triton.runtime.driver, "_active", Driver(self.target)):
            return self.function.run(*args, grid=grid, warmup=True, **kwargs)

    def specialization(self):
        """What the last launch is compiled for: {a type or a constant: its arguments}.

        ":16" after a type: divisible by 16. Without the flags.
        """
        source = self.compile().src
        flags = {parameter.name for parameter in self.function.params if parameter.is_constexpr}
        found = {}
        for leaf in self.leaves(source):
            if leaf.name in flags or isinstance(leaf.value, triton.language.constexpr):
                continue
            key = leaf.type
            if key == "constexpr":
                key = source.constants[leaf.path]
            elif source.attrs.get(leaf.path) == [["tt.divisibility", 16]]:
                key = f"{key}:16"
            found[key] = f"{found[key]} {leaf.name}" if key in found else leaf.name
        return found

    def leaves(self, source):
        """Yield the Leaf of every argument of the last launch, in the order of the parameters."""
        _, args, kwargs = self.last
        values = {**dict(zip(self.function.arg_names, args, strict=False)), **kwargs}
        for index, (name, type) in enumerate(source.signature.items()):
            if name in values:  # else it has its default, which is a constant
                yield from leaves_of(name, (index,), type, values[name])

    def kernel_of(self, compiled):
        """The Kernel to execute, with the fault in it if there is one."""
        if self.edit is not None:
            return Kernel(self.edit(compiled.asm["ptx"]))
        if compiled.hash not in self.kernels:
            self.kernels[compiled.hash] = Kernel(compiled.asm["ptx"])
        return self.kernels[compiled.hash]


def leaves_of(name, path, type, value):
    """Yield the Leaf of each member of a tuple, however deep, or the one of another argument.

    A member of a NamedTuple has its name, "call.q.t", and one of another tuple its index.
    """
    if not isinstance(type, tuple):
        yield Leaf(name, path, type, value)
        return
    names = getattr(value, "_fields", range(len(value)))
    for index, (member, inner, x) in enumerate(zip(names, type, value, strict=True)):
        yield from leaves_of(f"{name}.{member}", (*path, index), inner, x)


def programs(grid, order=None):
    """All programs (x, y, z) of a grid: x first, reversed, or shuffled by a seed."""
    all_programs = [
        (x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])
    ]
    if order == "reversed":
        return all_programs[::-1]
    if order is not None:
        permutation = np.random.default_rng(order).permutation(len(all_programs))
        return [all_programs[n] for n in permutation]
    return all_programs


def refuse_interpreter():
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError(
            "the emulator executes what Triton compiles, and TRITON_INTERPRET turns the compiler "
            "off: unset it"
        )


def install(module, target, **options):
    """Let a module's kernels be executed by the emulator: {name: Launcher}.

    Replaces its functions whose names end in _kernel. target: "sm_80", for example. options: those
    of Launcher. Can be repeated with another target.
    """
    launchers = {}
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel"):
            launchers[name] = Launcher(getattr(value, "function", value), target, **options)
            setattr(module, name, launchers[name])
    return launchers
