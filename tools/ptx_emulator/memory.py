"""The memories that a program sees, with the checks that no GPU makes.

Global memory is the tensors of a launch, each storage at device addresses of its own. Shared memory
is a few KiB that the threads of one program share; it is new for each program.

What every access is checked for:

  bounds          it lies on elements of a tensor that was passed; in shared memory, inside of what
                  the compiler asked for
  alignment       its address is a multiple of its size
  initialisation  it reads no byte of shared memory that the program has not written. Global memory
                  and registers have no such check: outputs made by torch.empty are NaN under
                  torch.use_deterministic_algorithms(True), registers start as all ones, which is
                  NaN or -1, so such a read shows in the numbers
  races           between two barriers, no two warps touch the same bytes if one of them writes
                  another value than is there; in global memory, no two programs of a launch do if
                  one of them writes, whatever the value
  copies          no byte is touched between its cp.async and the wait for it
  tensor cores    wgmma reads shared memory past the cache of ordinary accesses: what was written
                  needs a fence.proxy.async before, and nobody writes it again before the wait

Within a warp, accesses take effect in the order of the program.
"""

import numpy as np
import torch

from . import counting

# Where a program's shared memory starts: the first KiB is the system's.
SHARED_BASE = 1024
# Each storage has 2^40 device addresses of its own.
SEGMENT_BITS = 40

# In a ledger: the units of the warp groups of wgmma start here, and the mark of several units.
WARP_GROUP = 1000
SEVERAL = 4095
UNIT_BITS = 12
PROGRAM_BITS = 40
SEVERAL_PROGRAMS = -1


class Fault(Exception):
    """Something that a kernel must not do."""


def unit_name(unit):
    if unit == SEVERAL:
        return "several warps"
    if unit >= WARP_GROUP:
        return f"wgmma of warp group {unit - WARP_GROUP}"
    return f"warp {unit}"


class Ledger:
    """Who read and who wrote each cell of a memory last: tells which accesses are races.

    A cell is a few bytes. A unit is a warp. An access has a stamp, which counts up with programs,
    within a program with barriers, and ends in the unit. Two accesses of one program are ordered if
    a barrier lies between them, or if they are of the same unit; of two programs they never are.
    """

    def __init__(self, n_cells, between_programs):
        self.between_programs = between_programs
        self.read = np.zeros(n_cells, np.int64)
        self.written = np.zeros(n_cells, np.int64)
        self.program = 0
        self.now = 0

    def begin_program(self):
        self.program += 1 << PROGRAM_BITS
        self.now = self.program

    def pass_barrier(self):
        self.now += 1 << UNIT_BITS

    def is_concurrent(self, earlier, stamps):
        return (earlier >= self.now) & (earlier != stamps)

    def is_of_other_program(self, earlier):
        return (earlier != 0) & (earlier < self.program)

    def on_read(self, cells, units):
        """Note that units (n,) read cells (n, k). Returns where that is a race, (n, k), or None."""
        stamps = self.now + units[:, None]
        written = self.written[cells]
        bad = self.is_concurrent(written, stamps)
        earlier = self.read[cells]
        stamps = np.where(self.is_concurrent(earlier, stamps), self.now + SEVERAL, stamps)
        if self.between_programs:
            bad |= self.is_of_other_program(written)
            stamps = np.where(self.is_of_other_program(earlier), SEVERAL_PROGRAMS, stamps)
        if bad.any():
            return bad
        self.read[cells] = stamps
        # several units in this very access: the last one was noted
        clash = self.read[cells] != stamps
        if clash.any():
            self.read[cells[clash]] = self.now + SEVERAL
        return None

    def on_write(self, cells, units, same_value):
        """Note that units (n,) write cells (n, k). Returns where that is a race, (n, k), or None.

        same_value(): where what is written is what is there already, which is no race of warps.
        """
        stamps = self.now + units[:, None]
        read = self.read[cells]
        written = self.written[cells]
        bad = self.is_concurrent(read, stamps) | self.is_concurrent(written, stamps)
        if bad.any():
            bad &= ~same_value()
        if self.between_programs:
            bad |= self.is_of_other_program(read) | self.is_of_other_program(written)
        if bad.any():
            return bad
        self.written[cells] = stamps
        return None

    def other_access(self, cell, unit):
        """In words, the access to a cell that races with that of a unit."""
        for verb, stamps in (("written", self.written), ("read", self.read)):
            stamp = int(stamps[cell])
            if stamp == SEVERAL_PROGRAMS or 0 < stamp < self.program:
                if self.between_programs:
                    return f"{verb} by another program of the launch"
            elif stamp >= self.now and stamp != self.now + unit:
                return f"{verb} by {unit_name(stamp - self.now)} since the last barrier"
        return "touched by another thread"


class SharedMemory:
    """The shared memory of one program. Addresses are int64 arrays, one per accessing thread.

    It is divided into cells of `cell` bytes, the narrowest access of the kernel.
    """

    def __init__(self, machine, n_bytes, cell):
        self.machine = machine
        self.cell = cell
        self.end = SHARED_BASE + n_bytes
        self.bytes = np.zeros(SHARED_BASE + -(-n_bytes // 16) * 16, np.uint8)
        n_cells = len(self.bytes) // cell
        self.ledger = Ledger(n_cells, between_programs=False)
        self.is_written = np.zeros(n_cells, bool)
        self.is_in_flight = np.zeros(n_cells, bool)  # of a cp.async that was not waited for
        self.tensor_reads = np.zeros(n_cells, np.int16)  # wgmma not waited for that read a cell
        # Ordinary writes that wgmma may not see yet: 0 none, w + 1 by warp w since the last
        # barrier, -1 before it. A fence covers writes of its own thread and of all threads before
        # the last barrier.
        self.unfenced = np.zeros(n_cells, np.int16)

    def begin_program(self):
        self.bytes[:] = 0xFF
        self.is_written[:] = False
        self.is_in_flight[:] = False
        self.tensor_reads[:] = 0
        self.unfenced[:] = 0
        self.ledger.begin_program()

    def pass_barrier(self):
        self.ledger.pass_barrier()
        if self.machine.uses_wgmma:
            self.unfenced[self.unfenced > 0] = -1

    def fence(self, warps):
        """Let wgmma see what these warps wrote, and what was written before the last barrier."""
        self.unfenced[np.isin(self.unfenced, [-1, *(warps + 1)])] = 0

    def cells_of(self, instruction, at, size, threads):
        """The cells of `size` bytes at each address, (n, k), after the checks of any access."""
        refuse = self.machine.refuse
        outside = (at < SHARED_BASE) | (at + size > self.end)
        if outside.any():
            total = self.end - SHARED_BASE
            message = f"{size} bytes at shared address {{}} are outside of its {total} bytes"
            refuse(instruction, outside, threads, message, at - SHARED_BASE)
        misaligned = at % size != 0
        if misaligned.any():
            message = f"shared address {{}} is not aligned to {size} bytes"
            refuse(instruction, misaligned, threads, message, at - SHARED_BASE)
        cells = (at // self.cell)[:, None] + np.arange(size // self.cell)
        in_flight = self.is_in_flight[cells].any(1)
        if in_flight.any():
            message = "shared address {} is touched while cp.async has not arrived"
            refuse(instruction, in_flight, threads, message, at - SHARED_BASE)
        return cells

    def check_initialised(self, instruction, at, cells, threads):
        missing = ~self.is_written[cells].all(1)
        if missing.any():
            message = "uninitialised: shared address {} is read and was never written"
            self.machine.refuse(instruction, missing, threads, message, at - SHARED_BASE)

    def note_read(self, instruction, at, cells, threads, units):
        """Note a read in the ledger; a Fault if it is a race."""
        if self.machine.races:
            bad = self.ledger.on_read(cells, units)
            if bad is not None:
                self._race(instruction, "read", bad, at, cells, threads, units)

    def note_write(self, instruction, at, cells, threads, same_value):
        held = self.tensor_reads[cells].any(1)
        if held.any():
            message = "shared address {} is written while wgmma may still read it"
            self.machine.refuse(instruction, held, threads, message, at - SHARED_BASE)
        if self.machine.races:
            units = self.machine.warp[threads]
            bad = self.ledger.on_write(cells, units, same_value)
            if bad is not None:
                self._race(instruction, "write", bad, at, cells, threads, units)

    def _race(self, instruction, what, bad, at, cells, threads, units):
        row = bad.any(1).argmax()
        cell = cells[row, bad[row].argmax()]
        other = self.ledger.other_access(cell, units[row])
        message = f"race: {what} of shared address {{}}, {other}"
        self.machine.refuse(instruction, bad.any(1), threads, message, at - SHARED_BASE)

    def read(self, instruction, at, width, count, threads):
        """Read `count` numbers of `width` bytes at each address: (n, count) unsigned."""
        cells = self.cells_of(instruction, at, width * count, threads)
        self.check_initialised(instruction, at, cells, threads)
        self.note_read(instruction, at, cells, threads, self.machine.warp[threads])
        if self.machine.profile:
            counting.count_wavefronts(self.machine, instruction, at, width * count, threads)
        return self.bytes.view(f"u{width}")[(at // width)[:, None] + np.arange(count)]

    def write(self, instruction, at, values, threads):
        """Write values (n, count), unsigned, to each address."""
        cells = self.cells_of(instruction, at, values.itemsize * values.shape[1], threads)
        self.store(instruction, at, cells, values, threads)

    def store(self, instruction, at, cells, values, threads):
        """write(), for cells that were checked."""
        width = values.itemsize
        count = values.shape[1]
        numbers = self.bytes.view(f"u{width}")
        where = (at // width)[:, None] + np.arange(count)

        def same_value():
            same = (numbers[where] == values).repeat(width // self.cell, axis=1)
            return same & self.is_written[cells]

        self.note_write(instruction, at, cells, threads, same_value)
        if self.machine.profile:
            counting.count_wavefronts(self.machine, instruction, at, width * count, threads)
        self.is_written[cells] = True
        if self.machine.uses_wgmma:
            self.unfenced[cells] = (self.machine.warp[threads] + 1)[:, None]
        numbers[where] = values
        lost = (numbers[where] != values).any(1)
        if lost.any():
            message = "two threads write different values to shared address {} in one instruction"
            self.machine.refuse(instruction, lost, threads, message, at - SHARED_BASE)


class Storage:
    """One storage of tensors: its bytes, which of them belong to a tensor, and its ledger."""

    def __init__(self, name, tensor):
        storage = tensor.untyped_storage()
        self.names = []
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        # np.zeros touches no memory, so that a tensor with enormous strides costs little
        self.is_inside = np.zeros(len(storage), bool)
        self.cell = tensor.element_size()
        self.ledger = None

    def add(self, name, tensor):
        """Make the elements of a tensor accessible."""
        size = tensor.element_size()
        self.names.append(name)
        self.cell = min(self.cell, size)
        if tensor.numel():
            inside = np.lib.stride_tricks.as_strided(
                self.is_inside[tensor.storage_offset() * size :],
                (*tensor.shape, size),
                (*(stride * size for stride in tensor.stride()), 1),
            )
            inside[...] = True

    def begin_launch(self):
        n_cells = len(self.bytes) // self.cell + 1
        self.ledger = Ledger(n_cells, between_programs=True)


class GlobalMemory:
    """The tensors of a launch at device addresses."""

    def __init__(self, tensors):
        """tensors: {name of the parameter: tensor}, on the CPU."""
        self.numbers = {}  # of the storages, by their address on the CPU
        self.storages = []
        for name, tensor in tensors.items():
            key = tensor.untyped_storage().data_ptr()
            if key not in self.numbers:
                self.numbers[key] = len(self.storages)
                self.storages.append(Storage(name, tensor))
            self.storages[self.numbers[key]].add(name, tensor)
        for storage in self.storages:
            storage.begin_launch()

    def address(self, tensor):
        """The device address of a tensor's first element."""
        number = self.numbers[tensor.untyped_storage().data_ptr()]
        return (number + 1 << SEGMENT_BITS) + tensor.storage_offset() * tensor.element_size()

    def begin_program(self, machine):
        self.machine = machine
        for storage in self.storages:
            storage.ledger.begin_program()

    def pass_barrier(self):
        for storage in self.storages:
            storage.ledger.pass_barrier()

    def read(self, instruction, at, width, count, threads, alignment=None):
        """Read `count` numbers of `width` bytes at each address: (n, count) unsigned.

        alignment: of the addresses, in bytes; that of the whole access, if it is not given.
        """
        values = np.empty((len(threads), count), f"u{width}")
        size = width * count
        alignment = alignment or size
        for storage, rows, offset in self._parts(instruction, at, threads):
            self._check(instruction, storage, offset, size, alignment, threads[rows], None)
            numbers = storage.bytes[: len(storage.bytes) // width * width].view(f"u{width}")
            values[rows] = numbers[(offset // width)[:, None] + np.arange(count)]
        return values

    def write(self, instruction, at, values, threads):
        """Write values (n, count), unsigned, to each address."""
        width = values.itemsize
        count = values.shape[1]
        for storage, rows, offset in self._parts(instruction, at, threads):
            own = values[rows]
            size = width * count
            self._check(instruction, storage, offset, size, size, threads[rows], own)
            numbers = storage.bytes[: len(storage.bytes) // width * width].view(f"u{width}")
            where = (offset // width)[:, None] + np.arange(count)
            numbers[where] = own
            lost = (numbers[where] != own).any(1)
            if lost.any():
                names = ", ".join(storage.names)
                message = f"two threads write different values to byte {{}} of {names}"
                message += " in one instruction"
                self.machine.refuse(instruction, lost, threads[rows], message, offset)

    def _parts(self, instruction, at, threads):
        """The accesses by storage: (storage, which of the threads, byte offsets)."""
        numbers = (at >> SEGMENT_BITS) - 1
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            if not 0 <= number < len(self.storages):
                message = "global address {:#x} belongs to no tensor"
                self.machine.refuse(instruction, numbers == number, threads, message, at)
            yield self.storages[number], rows, at[rows] & (1 << SEGMENT_BITS) - 1

    def _check(self, instruction, storage, offset, size, alignment, threads, values):
        """Check accesses of `size` bytes at byte offsets; values: what is written, or None."""
        machine = self.machine
        names = ", ".join(storage.names)
        verb = "read" if values is None else "write"
        outside = offset + size > len(storage.is_inside)
        if not outside.any():
            outside = ~storage.is_inside[offset[:, None] + np.arange(size)].all(1)
        if outside.any():
            message = (
                f"out of bounds: {outside.sum()} threads {verb} outside of {names} "
                f"({len(storage.bytes)} bytes), this one {size} bytes from byte {{}} on"
            )
            machine.refuse(instruction, outside, threads, message, offset)
        misaligned = offset % alignment != 0
        if misaligned.any():
            message = f"byte {{}} of {names} is not aligned to {alignment} bytes"
            machine.refuse(instruction, misaligned, threads, message, offset)
        if machine.races:
            self._note(instruction, storage, offset, size, threads, values)
        if machine.profile:
            counting.count_sectors(machine, instruction, storage, offset, size, threads)

    def _note(self, instruction, storage, offset, size, threads, values):
        """Note an access in the ledger; a Fault if it is a race."""
        cell = storage.cell
        units = self.machine.warp[threads]
        cells = (offset // cell)[:, None] + np.arange(max(1, size // cell))
        if values is None:
            bad = storage.ledger.on_read(cells, units)
        else:

            def same_value():
                there = storage.bytes[offset[:, None] + np.arange(size)]
                written = np.ascontiguousarray(values).view(np.uint8)
                same = there.reshape(*cells.shape, -1) == written.reshape(*cells.shape, -1)
                return same.all(-1)

            bad = storage.ledger.on_write(cells, units, same_value)
        if bad is None:
            return
        row = bad.any(1).argmax()
        other = storage.ledger.other_access(cells[row, bad[row].argmax()], units[row])
        verb = "read" if values is None else "write"
        message = f"race: {verb} of byte {{}} of {', '.join(storage.names)}, {other}"
        self.machine.refuse(instruction, bad.any(1), threads, message, offset)
