"""Execute our Triton kernels on the simulated GPU, as compiled, and compute everything else.

    with real_values(EmulatedKernels): ...      inside, a launch is executed before it returns
    record()                                    what was executed, by kernel

Triton compiles for the simulated GPU as for any other and gives each launch to the driver, which
calls on_launch() with the function, the grid, the threads, the bytes of shared memory, and the
parameters as they lie in memory. They are read by the types that the PTX declares, and the emulator
of tools/ptx_emulator executes every instruction of every program, on the memory that the pointers
point to. So pointers, strides, scalars and their order are those that a GPU would get. PyTorch's
operators between the launches, also those that our operators call, are computed by values.py.

A launch fails, as on a GPU, if a kernel does what the emulator refuses (memory.py lists it), if it
touches a byte outside of the storages that it was given, or if a pointer points to none. What is
captured is executed at each replay. Memory that nobody has written is NaN.

It cannot say: how fast anything is; whether streams race; what ptxas makes of the PTX; what tensor
cores round to, beyond the emulator's model of them; and whether a kernel leaves its own tensor, but
not the storage that this tensor is a view of.
"""

import bisect
import collections
import ctypes
import functools
import re
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import counts
import numpy as np
import ptx_emulator
import torch
import triton
import values
from ptx_emulator.launcher import programs
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes

PARAMETER_TYPES = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

edit = None  # a function of the PTX text to the text that is executed: faults on purpose
functions = {}  # what the driver has loaded: {its handle: Function}
faults = []  # of launches, in words


class EmulatedKernels(values.Values):
    """Values, but our own operators run down to their launches."""

    def __init__(self):
        super().__init__()
        triton.knobs.runtime.kernel_load_end_hook.add(on_load)
        counts.LIBRARY.simulated_on_launch(on_launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "nanolong":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        # what our operators call arrives here whole, because they run below autograd
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.name() and result.is_cuda and result.is_floating_point():
            values.launch(functools.partial(values.alias(result).fill_, float("nan")))
        return result


class Function:
    """A kernel that the driver has loaded, and how much of it was executed."""

    def __init__(self, ptx):
        self.kernel = ptx_emulator.Kernel(ptx)
        self.pointers = re.findall(r"\.param \.u64 \.ptr [^\n]*?\b(\w+_param_\d+)", ptx)
        # the emulator checks memory by cells as wide as the narrowest access
        widths = [int(bits) // 8 for bits in re.findall(r"\b(?:ld|st)\.global\S*\.[a-z](\d+)", ptx)]
        self.cell = INTEGERS[min([4, *widths])]
        self.machine = None
        self.launches = 0
        self.programs = 0
        self.seconds = 0.0

    def read_parameters(self, addresses):
        """The parameters of a launch, {name: number}, from the addresses of each."""
        parameters = {}
        for n, (kind, name) in enumerate(self.kernel.parameters):
            parameters[name] = PARAMETER_TYPES[kind].from_address(addresses[n]).value
        return parameters

    def execute(self, grid, shared_bytes, parameters, storages):
        """Run the programs of a launch. storages: {name of a pointer: (address, bytes)}."""
        start = time.monotonic()
        with _disable_current_modes():
            tensors = {name: self.view(*storage) for name, storage in storages.items()}
            if self.machine is None:
                self.machine = ptx_emulator.Machine(self.kernel, shared_bytes)
            memory = self.machine.global_memory
            memory.__init__(tensors)
        # the emulator has addresses of its own, so that no storage follows another
        moved = {
            name: memory.address(tensor) + parameters[name] - storages[name][0]
            for name, tensor in tensors.items()
        }
        self.machine.set_parameters({**parameters, **moved}.values())
        with np.errstate(all="ignore"):
            for program in programs(grid):
                self.machine.run(program, grid)
        self.launches += 1
        self.programs += grid[0] * grid[1] * grid[2]
        self.seconds += time.monotonic() - start

    def view(self, address, size):
        """A storage of the device as a tensor."""
        return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=self.cell)


def on_load(module, function, name, metadata_group, hash):
    """Called by Triton when the driver has loaded a kernel: keep the PTX that it was made of."""
    ptx = Path(metadata_group[f"{name}.ptx"]).read_text()
    functions[function] = Function(edit(ptx) if edit else ptx)


@ctypes.CFUNCTYPE(
    ctypes.c_bool,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
)
def on_launch(handle, grid, n_threads, shared_bytes, addresses):
    """Called by the driver: execute a launch, or note it for the graph that is captured."""
    try:
        function = functions[handle]
        if n_threads != function.kernel.n_threads:
            raise ptx_emulator.Fault(
                f"{n_threads} threads, compiled for {function.kernel.n_threads}"
            )
        parameters = function.read_parameters(addresses)
        pointers = {name: parameters[name] for name in function.pointers if parameters[name]}
        storages = find_storages(function.kernel.name, pointers)
        call = function.execute, tuple(grid[:3]), shared_bytes, parameters, storages
        values.launch(functools.partial(*call))
    except Exception as error:
        traceback.print_exc()
        faults.append(f"{type(error).__name__}: {error}")
        return False
    return True


def find_storages(kernel, pointers):
    """The storages that pointers point into, from torch's allocator: {name: (address, bytes)}."""
    blocks = sorted(
        (block["address"], block["requested_size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    storages = {}
    for name, pointer in pointers.items():
        at = bisect.bisect(blocks, (pointer, float("inf"))) - 1
        address, size = blocks[at] if at >= 0 else (0, 0)
        if pointer >= address + size:
            raise ptx_emulator.Fault(f"{kernel}: {name} points to no tensor: {pointer:#x}")
        storages[name] = address, size
    return storages


def record():
    """What was executed: the numbers by the name of the kernel, and the faults."""
    kernels = collections.defaultdict(collections.Counter)
    for function in functions.values():
        if function.launches:
            instructions = ptx_emulator.counts(function.machine).total()
            kernels[function.kernel.name] += collections.Counter(
                compiled=1,
                launches=function.launches,
                programs=function.programs,
                instructions=instructions,
                seconds=function.seconds,
            )
    targets = sorted({function.kernel.target for function in functions.values()})
    return {"targets": targets, "kernels": kernels, "faults": faults}
