"""Execute the PTX that Triton's compiler emits, on a CPU, with the checks that no GPU makes.

    from ptx_emulator import counts, install

    launchers = install(flash, "sm_80")        flash.py's kernels are now compiled for sm_80
    out = flash.attention(q, k, v)             and executed by the emulator, on CPU tensors
    counts(launchers["_forward_kernel"].machine)

A Fault says what a kernel must not do, with the line of PTX, the line of Python it was compiled
from, the program and the thread: accesses outside of tensors or misaligned, races between warps and
between programs, copies and products that were not waited for, uninitialised shared memory.
An instruction, a modifier or an architecture that the emulator does not know is a
NotImplementedError when the kernel is loaded; nothing is skipped.

Reading order: ptx.py (the text), memory.py (memories and their checks), machine.py (threads,
branches, barriers), table.py (the table of instructions), arithmetic.py, movement.py and
matrices.py (the instructions), launcher.py (from Triton to the machine), counting.py (what a kernel
does, counted).

What it does not show: what ptxas and a driver make of the PTX, the last bits of a GPU's approximate
functions and matrix sums, time, the order of memory accesses beyond barriers, and needs that only
arise at shapes that were not run.

Triton's compiler cannot run in a process with TRITON_INTERPRET set: such a process is refused.
"""

from . import arithmetic, matrices, movement  # noqa: F401 (they fill the table)
from .counting import counts, kind, loops
from .launcher import Launcher, install
from .machine import Machine
from .memory import Fault
from .ptx import TARGETS, Instruction, Kernel
from .table import OPERATIONS

__all__ = [
    "OPERATIONS",
    "TARGETS",
    "Fault",
    "Instruction",
    "Kernel",
    "Launcher",
    "Machine",
    "counts",
    "install",
    "kind",
    "loops",
]
