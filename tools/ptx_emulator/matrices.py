"""Matrix instructions: ldmatrix, stmatrix, mma (one warp), wgmma (a group of four warps, sm_90).

A matrix that an instruction takes or gives lies in registers, spread over the threads: a fragment.
The formulas of the fragments are below, as in the PTX ISA manual's sections "Matrix Fragments for
mma.m16n8k..." and "Register Fragments" of wgmma. With lane l of a warp, group = l / 4 and
t = l % 4:

  m16n8, sums        number n = 0..3 of a thread:  row = group + 8 (n / 2),  column = 2 t + n % 2
  m16, left, 16 bit  number n = 0..3 or 0..7, two to a register:
                     row = group + 8 (n / 2 % 2),  column = 2 t + n % 2 + 8 (n / 4)
  n8, right, 16 bit  number n = 0..1 or 0..3, two to a register:
                     row = 2 t + n % 2 + 8 (n / 2),  column = group
  m16k8, left, tf32  number n = 0..3, one to a register:
                     row = group + 8 (n % 2),  column = t + 4 (n / 2)
  k8n8, right, tf32  number n = 0..1:  row = t + 4 n,  column = group
  m64, sums          warp w of the group, number n = 0..N/2 - 1:
                     row = 16 w + group + 8 (n / 2 % 2),  column = 8 (n / 4) + 2 t + n % 2

How sums are rounded: products of 16-bit or tf32 numbers are exact; an instruction adds its k
products and the accumulator in float64 and rounds once, to nearest even, to float32. The
accumulator between instructions is float32. (Tensor cores keep fewer bits inside an instruction;
the manual leaves order and rounding open.)
"""

import re

import numpy as np

from .arithmetic import type_of
from .formats import FROM_16_BITS, from_tf32
from .memory import WARP_GROUP
from .table import operation

LANE = np.arange(32)
GROUP = LANE // 4
T = LANE % 4

# -----------------------------------------------------------------------------
# Fragments: rows and columns (numbers, 32 lanes).


def sum_fragment(n_numbers=4):
    """Rows and columns of the sums of one warp, of 8 columns for every four numbers."""
    n = np.arange(n_numbers)[:, None]
    return GROUP + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * T + n % 2


def left_fragment(n_registers, type):
    if type == "tf32":
        n = np.arange(n_registers)[:, None]
        return GROUP + 8 * (n % 2), T + 4 * (n // 2)
    n = np.arange(2 * n_registers)[:, None]
    return GROUP + 8 * (n // 2 % 2), 2 * T + n % 2 + 8 * (n // 4)


def right_fragment(n_registers, type):
    if type == "tf32":
        n = np.arange(n_registers)[:, None]
        return T + 4 * n, GROUP + 0 * n
    n = np.arange(2 * n_registers)[:, None]
    return 2 * T + n % 2 + 8 * (n // 2), GROUP + 0 * n


def gather_order(fragment, shape):
    """For each element of a matrix the index of its number in a fragment, flattened."""
    rows, columns = fragment
    order = np.full(shape, -1)
    order[rows, columns] = np.arange(rows.size).reshape(rows.shape)
    assert (order >= 0).all() and rows.size == order.size
    return order


def fragment_numbers(registers, type):
    """Numbers of the threads' registers in float64: (warps, numbers x 32 lanes)."""
    stack = np.stack(registers)
    if type == "tf32":
        numbers = from_tf32(stack)[:, None]
    else:
        halves = stack.view(np.uint16).reshape(len(registers), -1, 2)
        numbers = FROM_16_BITS[type](halves).transpose(0, 2, 1)
    numbers = numbers.reshape(-1, numbers.shape[-1] // 32, 32)  # (numbers, warps, lanes)
    return numbers.transpose(1, 0, 2).reshape(numbers.shape[1], -1).astype(np.float64)


# -----------------------------------------------------------------------------
# ldmatrix, stmatrix. Warp Level Matrix Instructions.


@operation("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}.shared.b16", operands=2)
def load_matrices(machine, i):
    # ldmatrix: a warp loads one to four 8 x 8 matrices from shared memory. The first 8 threads hold
    # the addresses of the rows of the first matrix, the next 8 of the second, and so on. A row is
    # 16 bytes, and thread l gets elements 2 (l % 4) and + 1 of row l / 4; with .trans, of column
    # l / 4.
    registers, addresses, count = matrix_operands(machine, i, *i.operands)
    is_transposed = ".trans" in i.name

    def run(mask):
        warps = machine.whole_warps(i, mask)
        threads = row_threads(warps, count)
        rows = machine.shared_memory.read(i, addresses()[threads], 2, 8, threads)
        matrices = rows.reshape(len(warps), count, 8, 8)
        if is_transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, 32)
        for n, register in enumerate(registers):
            register[warps] = pairs[:, n]

    return run


@operation("stmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}.shared.b16", operands=2)
def store_matrices(machine, i):
    # stmatrix: a warp stores one to four matrices, with rows and fragments as ldmatrix has them.
    registers, addresses, count = matrix_operands(machine, i, *i.operands[::-1])
    is_transposed = ".trans" in i.name

    def run(mask):
        warps = machine.whole_warps(i, mask)
        threads = row_threads(warps, count)
        pairs = np.stack([register[warps] for register in registers], 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(len(warps), count, 8, 8)
        if is_transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).reshape(-1, 8)
        machine.shared_memory.write(i, addresses()[threads], rows.view(np.uint32), threads)

    return run


def matrix_operands(machine, i, registers, address):
    """(registers as (warps, 32), function of the addresses, number of matrices)."""
    count = int(re.search(r"\.x(\d)", i.name)[1])
    if not isinstance(registers, tuple) or len(registers) != count:
        raise NotImplementedError(f"{registers} are not {count} registers")
    registers = [machine.register(x, "b32").reshape(-1, 32) for x in registers]
    return registers, machine.address(address), count


def row_threads(warps, count):
    """The threads that hold the addresses of rows: the first 8 x count of each warp."""
    return (32 * warps[:, None] + np.arange(8 * count)).ravel()


# -----------------------------------------------------------------------------
# mma. Warp Level Matrix Instructions: mma.


@operation(
    "mma.sync.aligned.m16n8k{8,16}.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k{8,16}.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    operands=4,
)
def multiply_matrices(machine, i):
    # mma: D = A * B + C, A is 16 x k, B k x 8, C and D 16 x 8 of f32.
    depth = int(re.search(r"n8k(\d+)", i.name)[1])
    type = i.name.split(".")[7]
    d, a, b, c = i.operands
    n_left = depth // 2 if type == "tf32" else depth // 4
    if [len(x) for x in (d, a, b, c)] != [4, n_left, n_left // 2, 4]:
        raise NotImplementedError("lists of another length")
    d, c = ([machine.register(x, "f32").reshape(-1, 32) for x in y] for y in (d, c))
    a, b = ([machine.register(x, "b32") for x in y] for y in (a, b))
    left_order = gather_order(left_fragment(n_left, type), (16, depth))
    right_order = gather_order(right_fragment(n_left // 2, type), (depth, 8))
    rows, columns = sum_fragment()

    def run(mask):
        warps = machine.whole_warps(i, mask)
        left = fragment_numbers(a, type)[:, left_order]
        right = fragment_numbers(b, type)[:, right_order]
        products = left @ right  # (warps, 16, 8)
        accumulators = [register.copy() for register in c]
        for n in range(4):
            total = products[:, rows[n], columns[n]] + accumulators[n]
            d[n][warps] = total[warps]

    return run


# -----------------------------------------------------------------------------
# wgmma. Asynchronous Warpgroup Level Matrix Instructions.
#
# wgmma.mma_async multiplies a 64 x 16 matrix, in shared memory or in registers, with a 16 x N
# matrix in shared memory. It runs while the program goes on, so here it is computed at the wait
# that ends it. Until then its registers are a Fault to use, its tiles a Fault to overwrite.


class Product:
    """A wgmma.mma_async that was issued and not waited for."""

    def __init__(self, instruction, number, group, register_names):
        self.instruction = instruction
        self.number = number  # of the commit group that it belongs to
        self.group = group
        self.threads = np.arange(128 * group, 128 * group + 128)
        self.register_names = register_names
        self.left_tile = None
        self.right_tile = None
        self.keeps_sums = False


def tile_addresses(descriptor, rows, is_across):
    """Addresses in shared memory (rows, 16) of a matrix of 16-bit numbers.

    descriptor: "Matrix Descriptor Format": bits 0-13 the start, 16-29 the leading dimension byte
    offset, 32-45 the stride dimension byte offset, each without its four lowest bits; 49-51 the
    base offset; 62-63 the swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes.
    rows: of the left matrix, or columns of the right one; the other index, of 16, is k.
    is_across: whether rows are contiguous, not k ("MN-major").

    "Strides": the matrix is made of core matrices of 8 times 16 bytes. With a swizzle of `width`
    bytes, 8 lines of `width` bytes repeat; within them, pieces of 16 bytes are permuted: the index
    of a piece is xored with that of its line of 128 bytes.
    """

    def field(low):
        return (descriptor >> low & 0x3FFF) << 4

    start, leading, stride = field(0), field(16), field(32)
    width = (16, 128, 64, 32)[descriptor >> 62]
    x = np.arange(rows)[:, None]
    k = np.arange(16)[None]
    if width == 16 and is_across:
        at = x // 8 * stride + x % 8 * 2 + k % 8 * 16 + k // 8 * leading
    elif width == 16:
        at = x // 8 * stride + x % 8 * 16 + k % 8 * 2 + k // 8 * leading
    elif is_across:
        per_line = width // 2
        at = x // per_line * leading + x % per_line * 2 + k % 8 * width + k // 8 * stride
    else:
        at = x // 8 * stride + x % 8 * width + k * 2
    at = at + start
    return at ^ (at >> 7 & width // 16 - 1) << 4


@operation(
    "wgmma.mma_async.sync.aligned.m64n{8,16,32,64,128,256}k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n{8,16,32,64,128,256}k16.f32.f16.f16",
    operands=(7, 8),
)
def multiply_asynchronously(machine, i):
    # wgmma.mma_async: D = A * B + D, or D = A * B where scale-d is false; operands: D, A (list or
    # descriptor), B's descriptor, scale-d, imm-scale-a, imm-scale-b (1 or -1), and for A in shared
    # memory imm-trans-a, then imm-trans-b (1: rows or columns are contiguous, not k).
    width = int(re.search(r"m64n(\d+)k16", i.name)[1])
    sums, left, right, keep = i.operands[:4]
    has_left_registers = isinstance(left, tuple)
    transposed = i.operands[6:]
    expected = 1 if has_left_registers else 2
    if i.operands[4:6] != ("1", "1") or len(transposed) != expected:
        raise NotImplementedError("a sign or a number of operands that is not emulated")
    if len(sums) != width // 2 or has_left_registers and len(left) != 4:
        raise NotImplementedError("lists of another length")
    if not set(transposed) <= {"0", "1"} or machine.n_warps % 4:
        raise NotImplementedError("a transposition that is no 0 or 1, or no whole warp groups")
    across = [x == "1" for x in transposed]
    descriptor = None if has_left_registers else machine.register(left, "u64")
    right = machine.register(right, "u64")
    keep = machine.source(keep, "pred")
    names = frozenset(sums) | (frozenset(left) if has_left_registers else frozenset())
    # checks that the operands are registers
    for name in names:
        machine.register(name, "b32")

    def run(mask):
        for group in whole_groups(machine, i, mask):
            check_fence(machine, i, group)
            product = Product(i, int(machine.committed_products[group]), group, names)
            if not has_left_registers:
                product.left_tile = claim_tile(machine, product, descriptor, 64, across[0])
            product.right_tile = claim_tile(machine, product, right, width, across[-1])
            product.keeps_sums = bool(np.broadcast_to(keep, machine.n_threads)[128 * group])
            machine.products.append(product)

    return run


def whole_groups(machine, i, mask):
    """The warp groups that execute an instruction, which is of all their threads."""
    warps = machine.whole_warps(i, mask)
    groups, n_warps = np.unique(warps // 4, return_counts=True)
    if (n_warps != 4).any():
        message = "only a part of a warp group executes this"
        machine.fault(i, message, 128 * groups[n_warps != 4][0])
    return groups


def check_fence(machine, i, group):
    """A Fault if a sum was used after the last wgmma.fence, or there was no fence at all.

    The manual requires a fence "before the first wgmma.mma_async" and "between a register access
    and any wgmma.mma_async that accesses the same registers", other than as sums of products of the
    same shape. For the registers of the left side that is not checked: Triton's compiler moves
    their conversion to 16 bits past the fence, and leaves the order to the data dependence.
    """
    used = machine.used_registers[group]
    if used is None or not used.isdisjoint(i.operands[0]):
        machine.fault(i, "a sum of wgmma was used without wgmma.fence after it", 128 * group)


def claim_tile(machine, product, descriptors, rows, is_across):
    """The tile that a product reads: (addresses, cells), checked, and noted as being read."""
    i = product.instruction
    threads = product.threads
    shared = machine.shared_memory
    differ = descriptors[threads] != descriptors[threads[0]]
    if differ.any():
        message = "the threads of a warp group give different descriptors, this one {:#x}"
        machine.refuse(i, differ, threads, message, descriptors[threads])
    descriptor = int(descriptors[threads[0]])
    if descriptor >> 49 & 7:
        machine.fault(i, "a descriptor with a base offset is not emulated", threads[0])
    at = tile_addresses(descriptor, rows, is_across)
    pieces = at[::8].ravel() if is_across else at[:, ::8].ravel()  # of 16 bytes
    owners = np.full(len(pieces), threads[0])
    cells = shared.cells_of(i, pieces, 16, owners)
    shared.check_initialised(i, pieces, cells, owners)
    unfenced = (shared.unfenced[cells] != 0).any(1)
    if unfenced.any():
        message = "wgmma reads shared address {}, written without fence.proxy.async after it"
        machine.refuse(i, unfenced, owners, message, pieces)
    units = np.full(len(pieces), WARP_GROUP + product.group)
    shared.note_read(i, pieces, cells, owners, units)
    shared.tensor_reads[cells] += 1
    return at, cells


def read_tile(machine, product, tile):
    """The numbers of a tile in float64, which is released."""
    at, cells = tile
    shared = machine.shared_memory
    shared.tensor_reads[cells] -= 1
    if machine.races:  # it may have been read as late as this
        units = np.full(len(cells), WARP_GROUP + product.group)
        shared.ledger.on_read(cells, units)
    bits = shared.bytes.view(np.uint16)[at // 2]
    return FROM_16_BITS[type_of(product.instruction)](bits).astype(np.float64)


def complete(machine, product):
    """Compute a product and put its sums into their registers."""
    i = product.instruction
    threads = product.threads
    if product.left_tile is None:
        type = type_of(i)
        registers = [machine.register(x, "b32")[threads] for x in i.operands[1]]
        order = gather_order(left_fragment(4, type), (16, 16))
        left = fragment_numbers(registers, type)[:, order].reshape(64, 16)
    else:
        left = read_tile(machine, product, product.left_tile)
    right = read_tile(machine, product, product.right_tile)
    products = (left @ right.T).reshape(4, 16, -1)  # (warps, 16, N)
    rows, columns = sum_fragment(len(i.operands[0]))
    for n, name in enumerate(i.operands[0]):
        register = machine.register(name, "f32")
        total = products[:, rows[n], columns[n]].ravel()
        if product.keeps_sums:
            total = total + register[threads]
        register[threads] = total


@operation("wgmma.fence.sync.aligned", operands=0)
def fence_products(machine, i):
    # wgmma.fence: wgmma.mma_async after it sees what was done before it to the group's registers.
    def run(mask):
        for group in whole_groups(machine, i, mask):
            machine.used_registers[group] = set()

    return run


@operation("wgmma.commit_group.sync.aligned", operands=0)
def commit_products(machine, i):
    # wgmma.commit_group: all wgmma.mma_async since the last one become a group, per warp group.
    def run(mask):
        machine.committed_products[whole_groups(machine, i, mask)] += 1

    return run


@operation("wgmma.wait_group.sync.aligned", operands=1)
def wait_for_products(machine, i):
    # wgmma.wait_group N: waits for all groups but the last N.
    allowed = int(i.operands[0])

    def run(mask):
        groups = whole_groups(machine, i, mask)
        pending = []
        for product in machine.products:
            limit = machine.committed_products[product.group] - allowed
            if product.group in groups and product.number < limit:
                complete(machine, product)
            else:
                pending.append(product)
        machine.products = pending

    return run
