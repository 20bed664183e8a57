"""The machine that executes a kernel: all threads of one program at once, as numpy arrays.

A register is an array over the program's threads. An instruction is executed for all threads that
are at the same place, by a few numpy operations under a mask. Programs run one after another.

Branches: a thread has a place, the index of its next block. The machine always runs the block with
the smallest index at which a thread stands that does not wait at a barrier. So threads that part at
a branch meet again where the code does.

Warps run in step here, which is one of the orders that a GPU may take. The ledgers of memory.py
find what would differ in another. With shuffle=seed, warps (warp groups, where the kernel has
wgmma) run one after another from barrier to barrier, in random order: an independent check of the
ledgers, for it shows a race as another result.

Not modelled: time, caches, the order of memory accesses beyond barriers, the payload of NaNs.
"""

import collections
import re

import numpy as np

from .memory import SHARED_BASE, Fault, GlobalMemory, SharedMemory
from .table import OPERATIONS

# A program is taken to hang after so many visits of blocks.
MAX_VISITS = 1 << 20

TYPES = {
    "pred": np.bool_,
    "f32": np.float32,
    "f64": np.float64,
    **{f"{sign}{bits}": np.dtype(f"i{bits // 8}") for sign in "s" for bits in (8, 16, 32, 64)},
    **{f"{sign}{bits}": np.dtype(f"u{bits // 8}") for sign in "ub" for bits in (8, 16, 32, 64)},
}
TYPES = {name: np.dtype(dtype) for name, dtype in TYPES.items()}


class Machine:
    """One kernel, loaded, with the tensors of a launch.

    shared_bytes: of shared memory. tensors: {name: tensor}. races: whether ledgers are kept.
    profile: whether wavefronts and sectors are counted. shuffle: None or a seed.

    After a run: visits[block], how many warps ran each block of kernel.blocks; traffic, counted
    where profile is true: {(PTX line, what): number}, see counting.py.
    """

    def __init__(
        self, kernel, shared_bytes=0, tensors=None, races=True, profile=False, shuffle=None,
        max_visits=MAX_VISITS,
    ):  # fmt: skip
        self.kernel = kernel
        self.races = races
        self.profile = profile
        self.random = None if shuffle is None else np.random.default_rng(shuffle)
        self.max_visits = max_visits
        self.n_threads = kernel.n_threads
        self.n_warps = kernel.n_threads // 32
        self.thread = np.arange(self.n_threads)
        self.lane = self.thread % 32
        self.warp = self.thread // 32

        names = {i.name for block in kernel.blocks for i in block.all_instructions}
        self.uses_wgmma = any(name.startswith("wgmma.mma") for name in names)
        self.global_memory = GlobalMemory(tensors or {})
        self.shared_memory = SharedMemory(self, shared_bytes, narrowest_shared_access(names))
        self.parameters = {}
        self.visits = np.zeros(len(kernel.blocks), np.int64)
        self.traffic = collections.Counter()

        self.registers = {
            prefix: np.zeros((count, self.n_threads), bool if bits == 1 else f"u{bits // 8}")
            for prefix, (bits, count) in kernel.registers.items()
        }
        self.special = self._special_registers()
        self.actions = [
            [self._load(instruction) for instruction in block.instructions]
            for block in kernel.blocks
        ]
        self.register_names = [
            [register_names(instruction) for instruction in block.instructions]
            for block in kernel.blocks
        ]

    def _special_registers(self):
        """The registers that only read: which thread and which program this is."""
        values = {"tid.x": self.thread, "laneid": self.lane, "ntid.x": self.n_threads}
        for axis in "xyz":
            values[f"ctaid.{axis}"] = 0
            values[f"nctaid.{axis}"] = 0
        return {f"%{k}": np.atleast_1d(value).astype(np.uint32) for k, value in values.items()}

    def set_parameters(self, values):
        """Set the kernel's parameters, numbers, in order."""
        for (type, name), value in zip(self.kernel.parameters, values, strict=True):
            self.parameters[name] = np.array([value]).astype(TYPES[type])

    # -------------------------------------------------------------------------
    # Operands.

    def register(self, text, type):
        """A register as an array over threads that can be written, read as a type.

        The type is as wide as the register, or narrower: then its low bits.
        """
        found = re.match(r"%([a-z]+)(\d+)$", text)
        if not found or found[1] not in self.registers:
            raise NotImplementedError(f"the operand {text} is no register")
        row = self.registers[found[1]][int(found[2])]
        dtype = TYPES[type]
        if dtype.itemsize > row.itemsize or (type == "pred") != (row.dtype.kind == "b"):
            raise NotImplementedError(f"the register {text} is not {type}")
        if row.dtype == dtype:
            return row
        return row.view(dtype)[:: row.itemsize // dtype.itemsize]

    def register_bits(self, text):
        """The width of a register."""
        return 8 * self.registers[re.match(r"%([a-z]+)", text)[1]].itemsize

    def source(self, text, type):
        """An operand that is read, as a type: (n_threads,), or (1,) where all threads have one.

        It is a register, a special register, a number, or the address of shared memory.
        """
        dtype = TYPES[type]
        if isinstance(text, tuple):
            raise NotImplementedError(f"the operand {text} is a list")
        if text in self.special:
            if dtype.itemsize != 4:
                raise NotImplementedError(f"{text} is read as {type}")
            return self.special[text].view(dtype)
        if text[0] == "%":
            return self.register(text, type)
        if text == "global_smem":
            return np.array([SHARED_BASE], dtype)
        return constant(text, type)

    def address(self, text):
        """A function that returns the addresses (n_threads,) of `[register + number]`."""
        found = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]$", text)
        if not found:
            raise NotImplementedError(f"the operand {text} is no address")
        base = found[1]
        offset = int(found[2] or 0)
        if base == "global_smem":
            return lambda: np.full(self.n_threads, SHARED_BASE + offset)
        if base[0] != "%":
            raise NotImplementedError(f"the address {text} is of an unknown symbol")
        row = self.register(base, f"u{self.register_bits(base)}")
        return lambda: row.astype(np.int64) + offset

    # -------------------------------------------------------------------------
    # Loading.

    def _load(self, instruction):
        """Build the action of an instruction, with its guard; raise if the table lacks it."""
        build, allowed = OPERATIONS.get(instruction.name, (None, ()))
        if build is None:
            self._refuse_to_load(instruction, f"{instruction.name} is not in the table")
        if len(instruction.operands) not in allowed:
            self._refuse_to_load(instruction, f"it has {len(instruction.operands)} operands")
        try:
            action = build(self, instruction)
            if instruction.guard is None:
                return action
            guard = self.register(instruction.guard, "pred")
        except NotImplementedError as error:
            self._refuse_to_load(instruction, str(error))
        negated = instruction.negated

        def guarded(mask):
            mask = mask & (~guard if negated else guard)
            if mask.any():
                action(True if mask.all() else mask)

        return guarded

    def _refuse_to_load(self, instruction, why):
        raise NotImplementedError(
            f"{self.kernel.name}, PTX line {instruction.line}: {why}: {instruction.text}"
        ) from None

    # -------------------------------------------------------------------------
    # Faults.

    def fault(self, instruction, message, thread):
        """Raise a Fault that says where."""
        program = tuple(int(self.special[f"%ctaid.{axis}"][0]) for axis in "xyz")
        raise Fault(
            f"{self.kernel.name}, program {program}, thread {int(thread)} "
            f"(warp {int(thread) // 32}): {message}\n"
            f"    PTX line {instruction.line}: {instruction.text}\n"
            f"    from {instruction.source or 'an unknown line'}"
        )

    def refuse(self, instruction, bad, threads, message, values):
        """Raise a Fault for the first of `threads` where bad; its value goes into the message."""
        first = int(np.argmax(bad))
        self.fault(instruction, message.format(int(values[first])), threads[first])

    # -------------------------------------------------------------------------
    # Masks: which threads execute an instruction. True stands for all of them.

    def threads_of(self, mask):
        return self.thread if mask is True else np.flatnonzero(mask)

    def warps_of(self, mask):
        return np.arange(self.n_warps) if mask is True else np.unique(self.warp[mask])

    def whole_warps(self, instruction, mask):
        """The warps that execute an instruction which all threads of a warp execute together."""
        if mask is True:
            return np.arange(self.n_warps)
        by_warp = mask.reshape(-1, 32)
        partial = by_warp.any(1) & ~by_warp.all(1)
        if partial.any():
            self.fault(instruction, "only a part of a warp executes this", 32 * partial.argmax())
        return np.flatnonzero(by_warp.all(1))

    # -------------------------------------------------------------------------
    # Running.

    def run(self, program, grid):
        """Run one program, (x, y, z) of the grid, from its first instruction to its last ret."""
        self._begin_program(program, grid)
        place = np.zeros(self.n_threads, np.int64)
        alive = np.ones(self.n_threads, bool)
        waiting = np.zeros(self.n_threads, bool)
        for _ in range(self.max_visits):
            if not alive.any():
                return
            ready = alive & ~waiting
            if not ready.any():
                self._pass_barrier(place, alive)
                waiting[:] = False
                continue
            if self.random is not None:
                ready &= self._next_warp(ready)
            at = int(place[ready].min())
            here = ready & (place == at)
            self._run_block(at, True if here.all() else here)
            self.visits[at] += len(self.warps_of(here))

            place[here] = at + 1
            end = self.kernel.blocks[at].end
            if end is None:
                continue
            taken = here
            if end.guard is not None:
                taken = here & (self.register(end.guard, "pred") ^ end.negated)
            if end.name == "ret":
                alive &= ~taken
            elif end.name == "bar.sync":
                waiting |= taken
            else:
                place[taken] = self.kernel.labels[end.operands[0]]
        block = self.kernel.blocks[at]
        message = f"this does not end: {self.max_visits} blocks were executed"
        self.fault(block.all_instructions[-1], message, np.flatnonzero(here)[0])

    def _begin_program(self, program, grid):
        for axis, index, size in zip("xyz", program, grid, strict=True):
            self.special[f"%ctaid.{axis}"][:] = index
            self.special[f"%nctaid.{axis}"][:] = size
        for row in self.registers.values():
            row.view(np.uint8)[:] = 0 if row.dtype == bool else 0xFF
        self.shared_memory.begin_program()
        self.global_memory.begin_program(self)
        # cp.async (movement.py): what was issued and not waited for, and groups by thread
        self.copies = []
        self.committed_copies = np.zeros(self.n_threads, np.int64)
        # wgmma (matrices.py), by warp group; the registers used since wgmma.fence, None: no fence
        n_groups = -(-self.n_warps // 4)
        self.products = []
        self.committed_products = np.zeros(n_groups, np.int64)
        self.used_registers = [None] * n_groups
        self.warp_order = None

    def _run_block(self, at, mask):
        if not self.uses_wgmma:
            for action in self.actions[at]:
                action(mask)
            return
        names = self.register_names[at]
        instructions = self.kernel.blocks[at].instructions
        groups = np.unique(self.warps_of(mask) // 4)
        for action, named, instruction in zip(self.actions[at], names, instructions, strict=True):
            if not instruction.name.startswith("wgmma."):
                self._check_pending_registers(instruction, named, mask)
                for group in groups:
                    if self.used_registers[group] is not None:
                        self.used_registers[group] |= named
            action(mask)

    def _check_pending_registers(self, instruction, named, mask):
        """A Fault if an instruction names a register of a wgmma that was not waited for."""
        for product in self.products:
            if named.isdisjoint(product.register_names):
                continue
            group = product.threads
            thread = group[0] if mask is True else group[np.argmax(mask[group])]
            if mask is True or mask[thread]:
                self.fault(instruction, "a register of a wgmma is used before its wait", thread)

    def _pass_barrier(self, place, alive):
        """All threads that are left wait at a barrier: let them pass."""
        for warp in np.unique(self.warp[alive]):
            places = np.unique(place[alive & (self.warp == warp)])
            if len(places) > 1:
                end = self.kernel.blocks[places[0] - 1].end
                self.fault(end, "threads of one warp wait at different barriers", 32 * warp)
        self.shared_memory.pass_barrier()
        self.global_memory.pass_barrier()
        self.warp_order = None

    def _next_warp(self, ready):
        """The threads of the warp, or warp group, whose turn it is when warps are shuffled."""
        size = 128 if self.uses_wgmma else 32
        if self.warp_order is None:
            self.warp_order = self.random.permutation(-(-self.n_threads // size))
        group = self.thread // size
        chosen = next(n for n in self.warp_order if ready[group == n].any())
        return group == chosen


def narrowest_shared_access(names):
    """The bytes of the narrowest load or store of shared memory, at most 4."""
    widths = [re.match(r"(?:ld|st)\.shared\S*?\.[a-z](\d+)$", name) for name in names]
    return min([4, *(int(found[1]) // 8 for found in widths if found)])


def register_names(instruction):
    """The registers that an instruction names, in its operands and its guard."""
    words = [instruction.guard or ""]
    for operand in instruction.operands:
        words += operand if isinstance(operand, tuple) else [operand]
    return frozenset(re.findall(r"%[a-z]+\d+", " ".join(words)))


def constant(text, type):
    """A number that is written in an instruction, as an array of one element."""
    dtype = TYPES[type]
    bits = 8 * dtype.itemsize
    hexadecimal_float = re.match(r"0f([0-9A-Fa-f]{8})$", text)
    if hexadecimal_float and bits == 32:
        return np.array([int(hexadecimal_float[1], 16)], np.uint32).view(dtype)
    if not re.match(r"-?(\d+|0x[0-9A-Fa-f]+)$", text) or type[0] == "f":
        raise NotImplementedError(f"the operand {text} is not known as {type}")
    number = int(text, 0)
    if type == "pred":
        return np.array([number != 0])
    if number >= 1 << 63:  # constants have 64 bits, and Triton writes -1 as 0xffffffffffffffff
        number -= 1 << 64
    if not -1 << bits - 1 <= number < 1 << bits:
        raise NotImplementedError(f"the number {text} does not fit {type}")
    return np.array([number & (1 << bits) - 1], f"u{dtype.itemsize}").view(dtype)
