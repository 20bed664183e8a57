"""Compile kernels as Triton's just-in-time compiler would, and launch them on the machine.

launchers = install(flash, "sm_80")
flash.attention(q, k, v)             on CPU tensors: the module's own Python launches the kernels
launchers["_forward_kernel"].machine of the last launch: what was executed
"""

import os

import numpy as np
import torch

from .machine import MAX_VISITS, Machine
from .ptx import Kernel, check_target

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


class Launcher:
    """A @triton.jit function that is executed by the emulator: launcher[grid](*args, **kwargs).

    options   races: whether ledgers are kept (True). profile: whether wavefronts and sectors are
              counted (False). shuffle: None or a seed, the order of warps: see machine.py. order:
              the order of the programs of a launch, None, "reversed" or a seed. max_visits: of
              blocks, after which a program is taken to hang
    edit      None, or a function of the PTX text to the text that is executed: faults on purpose
    machine   of the last launch;  last: its (grid, args, kwargs);  launches: how many there were
    """

    compiled = {}  # shared by all launchers: {what decides the code: (Kernel, shared bytes)}

    def __init__(self, function, target, **options):
        refuse_interpreter()
        check_target(target, getattr(function, "__name__", "kernel"))
        self.function = function
        self.target = target
        self.options = {
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
        self.edit = None
        self.machine = None
        self.last = None
        self.launches = 0

    def __getitem__(self, grid):
        grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid, args, kwargs):
        """Run all programs of a grid."""
        self.last = grid, args, kwargs
        self.launches += 1
        names = self.function.arg_names
        values = dict(zip(names, args, strict=False))
        values.update({name: value for name, value in kwargs.items() if name in names})
        launch_options = {name: value for name, value in kwargs.items() if name not in names}
        self._take_precision_of_a_gpu(values)
        kernel, shared_bytes, passed = self.compile(values, launch_options)

        values = {name: values[name] for name in passed}
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        options = {name: value for name, value in self.options.items() if name != "order"}
        machine = Machine(kernel, shared_bytes, tensors, **options)
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

    @staticmethod
    def _take_precision_of_a_gpu(values):
        """Compute float32 products as on a GPU; on a CPU's tensors the module would not ask to."""
        if "PRECISION" in values:
            first = next(x for x in values.values() if isinstance(x, torch.Tensor))
            values["PRECISION"] = "tf32x3" if first.dtype == torch.float32 else "ieee"

    def compile(self, values, launch_options):
        """(Kernel, bytes of shared memory, names of its parameters) for these arguments."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, attributes = specialise(self.function, values)
        key = self.function, self.target, str((signature, constants, attributes, launch_options))
        if key not in self.compiled:
            source = ASTSource(
                self.function, signature=signature, constexprs=constants, attrs=attributes
            )
            target = GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)
            done = triton.compile(source, target=target, options=launch_options)
            self.compiled[key] = Kernel(done.asm["ptx"]), done.metadata.shared
        kernel, shared_bytes = self.compiled[key]
        if self.edit is not None:
            kernel = Kernel(self.edit(kernel.text))
        passed = [name for name in signature if signature[name] != "constexpr"]
        return kernel, shared_bytes, passed


def specialise(function, values):
    """How Triton specialises a call: (signature, constants, attributes).

    Integers of 1 and None become constants; pointers and integers that are divisible by 16 are
    declared so.
    """
    signature = {}
    constants = {}
    attributes = {}
    for index, (name, parameter) in enumerate(
        zip(function.arg_names, function.params, strict=True)
    ):
        value = values[name]
        is_integer = type(value) is int
        if parameter.is_constexpr or value is None or (is_integer and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
            continue
        is_divisible = is_integer and value % 16 == 0
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + DTYPE_NAMES[value.dtype]
            # a storage starts at a device address that is a multiple of 16
            is_divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, bool):
            signature[name] = "u1"
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        if is_divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


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

    Replaces its functions whose names end in _kernel, and its choice of tile sizes by that for the
    target, "sm_80" for example. options: those of Launcher. Can be repeated with another target.
    """
    launchers = {}
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel"):
            launchers[name] = Launcher(getattr(value, "function", value), target, **options)
            setattr(module, name, launchers[name])
    if hasattr(module, "device_family"):
        family = {"sm_89": "sm_86"}.get(target, target)
        module.device_family = lambda device: (family, "tf32x3")
    return launchers
