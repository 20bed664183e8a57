"""Loads and stores, asynchronous copies, fences, and shuffles between the threads of a warp.

As in arithmetic.py, the first comment line of a function gives the meaning of its instructions,
with the section of NVIDIA's PTX ISA manual.
"""

import numpy as np

from .arithmetic import assign, type_of
from .machine import TYPES
from .memory import Fault
from .table import operation

# -----------------------------------------------------------------------------
# Loads and stores. Data Movement: ld, st.


def as_list(operand):
    return list(operand) if isinstance(operand, tuple) else [operand]


def extended_register(machine, text, sign):
    """A register at its whole width: what is loaded into it is extended to that."""
    return machine.register(text, f"{sign}{machine.register_bits(text)}")


@operation("ld.param.{b8,s8,b16,s16,b32,s32,b64}", operands=2)
def load_parameter(machine, i):
    # Data Movement: ld.param: a parameter of the kernel; in a register wider than the type .s is
    # extended by its sign, .u and .b by zeros.
    type = type_of(i)
    d = extended_register(machine, i.operands[0], "s" if type[0] == "s" else "u")
    name = i.operands[1].strip("[]")
    declared = {name: type for type, name in machine.kernel.parameters}
    if name not in declared or TYPES[declared[name]].itemsize != TYPES[type].itemsize:
        raise NotImplementedError(f"{i.operands[1]} is no parameter of that width")
    return lambda mask: assign(d, machine.parameters[name].view(TYPES[type]), mask)


@operation("ld.{global,shared}{,.v2,.v4}.{b8,b16,b32}", operands=2)
@operation("ld.{global,shared}{,.v2}.b64", operands=2)
@operation("ld.{global,shared}.{s8,s16,s32}", operands=2)
def load(machine, i):
    # Data Movement: ld: d = what lies at address a of the memory named; extended as for parameters;
    # .v2, .v4: a vector, aligned as a whole.
    type = type_of(i)
    sign = "s" if type[0] == "s" else "u"
    width = TYPES[type].itemsize
    registers = [extended_register(machine, x, sign) for x in as_list(i.operands[0])]
    check_vector(i, registers)
    addresses = machine.address(i.operands[1])
    memory = machine.global_memory if i.name.startswith("ld.global") else machine.shared_memory

    def run(mask):
        threads = machine.threads_of(mask)
        values = memory.read(i, addresses()[threads], width, len(registers), threads)
        for register, value in zip(registers, values.T, strict=True):
            register[threads] = value.view(f"{'i' if sign == 's' else 'u'}{width}")

    return run


@operation("st.{global,shared}{,.v2,.v4}.{b8,b16,b32}", operands=2)
@operation("st.{global,shared}{,.v2}.b64", operands=2)
def store(machine, i):
    # Data Movement: st: b goes to address a; its lower bits, where the register is wider.
    type = f"b{type_of(i)[1:]}"
    values = [machine.source(x, type) for x in as_list(i.operands[1])]
    check_vector(i, values)
    addresses = machine.address(i.operands[0])
    memory = machine.global_memory if i.name.startswith("st.global") else machine.shared_memory

    def run(mask):
        threads = machine.threads_of(mask)
        rows = [np.broadcast_to(value, machine.n_threads)[threads] for value in values]
        memory.write(i, addresses()[threads], np.stack(rows, 1), threads)

    return run


def check_vector(i, registers):
    """A list has as many registers as the name says: one without .v2 or .v4."""
    vector = [part for part in i.name.split(".") if part in ("v2", "v4")]
    expected = int(vector[0][1]) if vector else 1
    if len(registers) != expected:
        raise NotImplementedError(f"{len(registers)} registers instead of {expected}")


# -----------------------------------------------------------------------------
# Asynchronous copies. Data Movement: Non-bulk copy: cp.async.


class Copy:
    """A cp.async that some threads have issued and not all of them have waited for."""

    def __init__(self, instruction, threads, at, cells, values, groups):
        self.instruction = instruction
        self.threads = threads
        self.at = at
        self.cells = cells
        self.values = values
        self.groups = groups  # which group of its thread, counted from 0
        self.is_open = np.ones(len(threads), bool)


@operation("cp.async.ca.shared.global", "cp.async.cg.shared.global", operands=(3, 4))
def copy_async(machine, i):
    # cp.async: starts a copy of cp-size bytes from global to shared memory, 4, 8 or 16, for .cg 16.
    # Of these src-size are copied, and the others become zeros. Here the bytes are read when it is
    # issued and arrive at the wait.
    to, of = (machine.address(x) for x in i.operands[:2])
    size = int(i.operands[2], 0)
    if size not in ((16,) if ".cg." in i.name else (4, 8, 16)):
        raise NotImplementedError(f"cp.async of {size} bytes")
    source_size = machine.source(i.operands[3] if len(i.operands) > 3 else str(size), "u32")
    shared = machine.shared_memory

    def run(mask):
        threads = machine.threads_of(mask)
        n_bytes = np.broadcast_to(source_size, machine.n_threads)[threads]
        wrong = n_bytes > size
        if wrong.any():
            machine.refuse(i, wrong, threads, "cp.async reads {} bytes", n_bytes)
        values = np.zeros((len(threads), size), np.uint8)
        for n in np.unique(n_bytes):
            rows = np.flatnonzero(n_bytes == n)
            if n:
                addresses = of()[threads[rows]]
                values[rows, :n] = machine.global_memory.read(
                    i, addresses, 1, int(n), threads[rows], alignment=size
                )
        at = to()[threads]
        cells = shared.cells_of(i, at, size, threads)
        shared.note_write(i, at, cells, threads, lambda: np.zeros(cells.shape, bool))
        shared.is_in_flight[cells] = True
        groups = machine.committed_copies[threads]
        machine.copies.append(Copy(i, threads, at, cells, values.view(np.uint32), groups))

    return run


@operation("cp.async.commit_group", operands=0)
def commit_copies(machine, i):
    # cp.async.commit_group: all cp.async since the last one become a group, per thread.
    return lambda mask: np.add(
        machine.committed_copies, 1, out=machine.committed_copies, where=mask
    )


@operation("cp.async.wait_group", operands=1)
@operation("cp.async.wait_all", operands=0)
def wait_for_copies(machine, i):
    # cp.async.wait_group N: a thread waits for all of its groups but the last N; wait_all: for all
    # of its cp.async, in a group or not.
    allowed = int(i.operands[0]) if i.operands else -1

    def run(mask):
        here = np.broadcast_to(mask, machine.n_threads)
        limit = machine.committed_copies - allowed
        for copy in machine.copies:
            arrives = copy.is_open & here[copy.threads] & (copy.groups < limit[copy.threads])
            if not arrives.any():
                continue
            copy.is_open &= ~arrives
            cells = copy.cells[arrives]
            machine.shared_memory.is_in_flight[cells] = False
            machine.shared_memory.store(
                copy.instruction, copy.at[arrives], cells, copy.values[arrives],
                copy.threads[arrives],
            )  # fmt: skip
        machine.copies = [copy for copy in machine.copies if copy.is_open.any()]

    return run


@operation("fence.proxy.async{,.shared::cta}", operands=0)
def fence_proxy(machine, i):
    # Parallel Synchronization: membar, fence: fence.proxy.async: wgmma sees ordinary writes to
    # shared memory only after it.
    return lambda mask: machine.shared_memory.fence(machine.warps_of(mask))


@operation("bar.warp.sync", operands=1)
def synchronise_warp(machine, i):
    # Parallel Synchronization: bar.warp.sync: waits for the threads of the warp in membermask.
    # Within a warp, accesses are in order here.
    require_whole_mask(machine, i.operands[0])
    return lambda mask: machine.whole_warps(i, mask)


# -----------------------------------------------------------------------------
# Shuffles. Data Movement: shfl.sync.


def require_whole_mask(machine, text):
    """The member mask names all 32 threads of a warp."""
    if text[0] == "%" or int(text, 0) not in (-1, 0xFFFFFFFF):
        raise NotImplementedError(f"the member mask {text} is not -1")


@operation("shfl.sync.{up,down,bfly,idx}.b32", operands=5)
def shuffle(machine, i):
    # shfl.sync: a thread reads a register of another one of its warp, that of lane j.
    #   bval = b[4:0]; cval = c[4:0]; segmask = c[12:8];
    #   maxLane = (lane[4:0] & segmask) | (cval & ~segmask); minLane = lane[4:0] & segmask;
    #   up: j = lane - bval, pval = j >= maxLane;  down: j = lane + bval, pval = j <= maxLane;
    #   bfly: j = lane ^ bval, pval = j <= maxLane;  idx: j = minLane | (bval & ~segmask),
    #   pval = j <= maxLane;  if (!pval) j = lane; d = register of thread j; d|p: p is pval.
    mode = i.name.split(".")[2]
    target, _, predicate = i.operands[0].partition("|")
    d = machine.register(target, "b32")
    p = machine.register(predicate, "pred") if predicate else None
    a, b, c = (machine.source(x, "u32") for x in i.operands[1:4])
    require_whole_mask(machine, i.operands[4])

    def run(mask):
        machine.whole_warps(i, mask)
        lane = machine.lane
        amount = (b & 31).astype(np.int64)
        segment = (c >> 8 & 31).astype(np.int64)
        most = lane & segment | (c & 31) & ~segment
        if mode == "up":
            j = lane - amount
        elif mode == "down":
            j = lane + amount
        elif mode == "bfly":
            j = lane ^ amount
        else:
            j = lane & segment | amount & ~segment
        is_valid = j >= most if mode == "up" else j <= most
        thread = np.where(is_valid, j, lane) + 32 * machine.warp
        assign(d, np.broadcast_to(a, machine.n_threads)[thread], mask)
        if p is not None:
            assign(p, is_valid, mask)

    return run


@operation("redux.sync.{max,min}.{s32,u32}", operands=3)
def reduce_in_warp(machine, i):
    # redux.sync: d is the largest or the smallest a of the threads of the warp in membermask. They
    # have to name the same threads, and themselves.
    kind, type = i.name.split(".")[2:]
    reduce, neutral = np.max, np.iinfo(TYPES[type]).min
    if kind == "min":
        reduce, neutral = np.min, np.iinfo(TYPES[type]).max
    d = machine.register(i.operands[0], type)
    a = machine.source(i.operands[1], type)
    members = machine.source(i.operands[2], "u32")

    def run(mask):
        machine.whole_warps(i, mask)
        # (warps, threads, threads): whether the last is a member for the one before it
        named = np.broadcast_to(members, machine.n_threads).reshape(-1, 32)
        is_member = (named[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
        if not is_member.diagonal(axis1=1, axis2=2).all():
            raise Fault(f"{i.name}: a thread is not in its own member mask")
        if (is_member & (named[:, :, None] != named[:, None, :])).any():
            raise Fault(f"{i.name}: threads of a member mask have other member masks")
        values = np.broadcast_to(a, machine.n_threads).reshape(-1, 1, 32)
        found = reduce(np.where(is_member, values, np.array(neutral, values.dtype)), axis=2)
        assign(d, found.ravel(), mask)

    return run
