"""Matrix instructions of the emulator against numpy.

The layouts of fragments and tiles are written here once more, element by element, as the PTX ISA
manual has them ("Matrix Fragments for mma.m16n8k16 ...", "Register Fragments and Shared Memory
Matrix Layouts" of wgmma), and for tiles in shared memory as the comments of CUTLASS's
mma_sm90_desc.hpp; nothing of the emulator's own formulas is used.
"""

import math

import numpy as np
import pytest
import torch
from ptx_emulator import Fault
from small_kernels import evaluate, launch

MMA = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("bf16", 16),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": ("f16", 16),
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": ("bf16", 8),
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": ("f16", 8),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": ("tf32", 8),
}
MATRIX_MOVES = [
    f"{way}matrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    for way in ("ld", "st") for count in (1, 2, 4) for trans in ("", ".trans")
]  # fmt: skip
WGMMA = [
    f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type}"
    for n in (8, 16, 32, 64, 128, 256) for type in ("bf16", "f16")
]  # fmt: skip
FENCES = ["fence.proxy.async", "fence.proxy.async.shared::cta"]
GROUPS = [f"wgmma.{word}.sync.aligned" for word in ("fence", "commit_group", "wait_group")]
TESTED = {*MMA, *MATRIX_MOVES, *WGMMA, *FENCES, *GROUPS}


def to_bits(x, type):
    """The bits of numbers that the type can hold."""
    x = np.asarray(x, np.float32)
    if type == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return bits if type == "tf32" else (bits >> 16).astype(np.uint16)


def random_matrix(rng, shape, type):
    """Random numbers that the type can hold, as float32."""
    x = rng.standard_normal(shape).astype(np.float32)
    if type == "f16":
        return x.astype(np.float16).astype(np.float32)
    mask = np.uint32(0xFFFF0000 if type == "bf16" else 0xFFFFE000)
    return (x.view(np.uint32) & mask).view(np.float32)


def exact_product(left, right, sums):
    """left @ right + sums, each element summed exactly and then rounded to float32."""
    result = np.empty(sums.shape, np.float32)
    for row in range(sums.shape[0]):
        for column in range(sums.shape[1]):
            terms = left[row].astype(np.float64) * right[:, column].astype(np.float64)
            result[row, column] = math.fsum([*terms, float(sums[row, column])])
    return result


# -----------------------------------------------------------------------------
# mma: fragments as in the manual. i is the index of an element of a thread's fragment.


def left_place(i, lane, type, depth):
    group, t = lane >> 2, lane % 4
    if type == "tf32":
        return (group if i in (0, 2) else group + 8), (t if i in (0, 1) else t + 4)
    if depth == 8:
        return (group if i in (0, 1) else group + 8), t * 2 + (i & 1)
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, t * 2 + (i & 1) + (8 if i >= 4 else 0)


def right_place(i, lane, type):
    group, t = lane >> 2, lane % 4
    if type == "tf32":
        return (t if i == 0 else t + 4), group
    return t * 2 + (i & 1) + (8 if i >= 2 else 0), group


def sum_place(i, lane):
    group, t = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), t * 2 + (i & 1)


def fragment(matrices, place, n, type):
    """Registers of a fragment of n elements: [(threads,)], two elements of 16 bits in each."""
    elements = np.zeros((n, 32 * len(matrices)), np.uint32)
    for warp, matrix in enumerate(matrices):
        bits = to_bits(matrix, type)
        for lane in range(32):
            for i in range(n):
                elements[i, 32 * warp + lane] = bits[place(i, lane)]
    if type == "tf32":
        return list(elements)
    return [elements[i] | elements[i + 1] << 16 for i in range(0, n, 2)]


def run_mma(name, left, right, sums, garbage=0):
    """(warps, 16, 8): the products of each warp's matrices. garbage: lower bits of tf32."""
    type, depth = MMA[name]
    a = fragment(left, lambda i, lane: left_place(i, lane, type, depth), depth // 2, type)
    b = fragment(right, lambda i, lane: right_place(i, lane, type), depth // 4, type)
    c = fragment(sums, sum_place, 4, "tf32")  # whole float32: to_bits of tf32 cuts nothing
    columns = {f"%r{10 + n}": x | garbage for n, x in enumerate(a)}
    columns |= {f"%r{20 + n}": x | garbage for n, x in enumerate(b)}
    columns |= {f"%r{30 + n}": x for n, x in enumerate(c)}

    def braces(first, count):
        return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"

    lists = braces(40, 4), braces(10, len(a)), braces(20, len(b)), braces(30, 4)
    got = evaluate(f"{name} {', '.join(lists)};", columns, [f"%r{40 + n}" for n in range(4)])
    result = np.empty((len(left), 16, 8), np.float32)
    for warp in range(len(left)):
        for lane in range(32):
            for i in range(4):
                value = got[i].view(np.float32)[32 * warp + lane]
                result[(warp, *sum_place(i, lane))] = value
    return result


@pytest.mark.parametrize("name", MMA)
def test_mma(name):
    """Two warps, each with matrices of its own."""
    type, depth = MMA[name]
    rng = np.random.default_rng(depth)
    left = random_matrix(rng, (2, 16, depth), type)
    right = random_matrix(rng, (2, depth, 8), type)
    sums = rng.standard_normal((2, 16, 8)).astype(np.float32)
    got = run_mma(name, left, right, sums)
    for warp in range(2):
        assert (got[warp] == exact_product(left[warp], right[warp], sums[warp])).all()


def test_mma_ignores_the_lower_bits_of_tf32():
    name = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    rng = np.random.default_rng(1)
    left = random_matrix(rng, (1, 16, 8), "tf32")
    right = random_matrix(rng, (1, 8, 8), "tf32")
    sums = np.zeros((1, 16, 8), np.float32)
    assert (run_mma(name, left, right, sums, 0x1FFF) == run_mma(name, left, right, sums)).all()


def test_mma_accumulates_in_float32():
    """2^24 + 1 is no float32: added one by one the ones are lost, added together they count."""
    name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    left = np.zeros((1, 16, 16), np.float32)
    left[0, :, 3] = 1
    ones = np.ones((1, 16, 8), np.float32)
    sums = np.full((1, 16, 8), 2.0**24, np.float32)
    once = run_mma(name, left, ones, sums)
    assert (once == 2.0**24).all()
    assert (run_mma(name, left, ones, once) == 2.0**24).all()
    assert (run_mma(name, np.ones((1, 16, 16)), ones, sums) == 2.0**24 + 16).all()
    # a product is not rounded to 16 bits, nor is a sum
    left[0, :, 3] = 1 + 2.0**-7
    right = np.zeros((1, 16, 8), np.float32)
    right[0, 3] = 1 + 2.0**-7
    assert (run_mma(name, left, right, 0 * sums) == (1 + 2.0**-7) ** 2).all()


def test_mma_of_infinities():
    name = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    left = np.zeros((1, 16, 8), np.float32)
    left[0, 0, 0] = np.inf
    left[0, 1, 0] = 65504.0
    right = np.zeros((1, 8, 8), np.float32)
    right[0, 0] = [1, -1, 0, 65504, 0, 0, 0, 0]
    got = run_mma(name, left, right, np.zeros((1, 16, 8), np.float32))[0]
    assert got[0, 0] == np.inf and got[0, 1] == -np.inf and np.isnan(got[0, 2])
    assert got[1, 3] == 65504.0**2


# -----------------------------------------------------------------------------
# ldmatrix, stmatrix.


@pytest.mark.parametrize("name", [name for name in MATRIX_MOVES if name.startswith("ld")])
def test_ldmatrix(name):
    """Rows lie in shared memory in a random order; thread l gets two elements of row l / 4."""
    count = int(name.split(".x")[1][0])
    rng = np.random.default_rng(count)
    data = rng.integers(0, 1 << 16, (64, 8)).astype(np.uint16)  # 64 rows of 16 bytes
    order = rng.permutation(64)  # of two warps: row l % 8 of matrix l / 8 is order[32 warp + l]
    registers = [f"%r{n + 1}" for n in range(count)]
    body = f"""
        mov.b32 %r120, global_smem;
        mad.lo.s32 %r121, %r100, 16, %r120;
        st.shared.v4.b32 [%r121], {{%r101, %r102, %r103, %r104}};
        bar.sync 0;
        mad.lo.s32 %r122, %r105, 16, %r120;
        {name} {{{", ".join(registers)}}}, [%r122];
    """
    words = data.view(np.uint32)
    columns = {"%r100": np.arange(64), "%r105": order}
    columns |= {f"%r{101 + n}": words[:, n] for n in range(4)}
    if count < 4:  # only the first 8 x count threads of a warp hold addresses
        is_used = np.arange(64) % 32 < 8 * count
        columns["%r105"] = np.where(is_used, order, 1 << 20)
    got = evaluate(body, columns, registers, shared_bytes=1024)
    for thread in range(64):
        warp, lane = divmod(thread, 32)
        for j in range(count):
            matrix = data[order[32 * warp + 8 * j :][:8]]
            if ".trans" in name:
                matrix = matrix.T
            low, high = matrix[lane // 4, lane % 4 * 2 :][:2]
            assert got[j][thread] == int(low) | int(high) << 16


@pytest.mark.parametrize("name", [name for name in MATRIX_MOVES if name.startswith("st")])
def test_stmatrix(name):
    count = int(name.split(".x")[1][0])
    rng = np.random.default_rng(count)
    matrices = rng.integers(0, 1 << 16, (2, 4, 8, 8)).astype(np.uint16)
    order = rng.permutation(64)
    columns = {"%r100": np.arange(64), "%r105": order}
    for j in range(count):
        values = []
        for thread in range(64):
            warp, lane = divmod(thread, 32)
            matrix = matrices[warp, j].T if ".trans" in name else matrices[warp, j]
            low, high = matrix[lane // 4, lane % 4 * 2 :][:2]
            values.append(int(low) | int(high) << 16)
        columns[f"%r{1 + j}"] = values
    registers = ", ".join(f"%r{1 + j}" for j in range(count))
    body = f"""
        mov.b32 %r120, global_smem;
        mad.lo.s32 %r121, %r100, 16, %r120;
        st.shared.v4.b32 [%r121], {{0, 0, 0, 0}};
        bar.sync 0;
        mad.lo.s32 %r122, %r105, 16, %r120;
        {name} [%r122], {{{registers}}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r101, %r102, %r103, %r104}}, [%r121];
    """
    got = evaluate(body, columns, [f"%r{101 + n}" for n in range(4)], shared_bytes=1024)
    rows = np.stack(got, 1).view(np.uint16)  # (64 rows, 8)
    expected = np.zeros((64, 8), np.uint16)
    for warp in range(2):
        for j in range(count):
            expected[order[32 * warp + 8 * j :][:8]] = matrices[warp, j]
    assert (rows == expected).all()


# -----------------------------------------------------------------------------
# wgmma.

# {bytes of the swizzle: (the descriptor's number, bits of the swizzle)}
SWIZZLES = {16: (0, 0), 128: (1, 3), 64: (2, 2), 32: (3, 1)}


def swizzled(address, bits):
    """CUTLASS's Swizzle<bits, 4, 3>: bits 4 and up are xored with those three above them."""
    for n in range(bits):
        if address >> 7 + n & 1:
            address ^= 1 << 4 + n
    return address


def canonical(index, shape, strides):
    """The offset of a nested index: CuTe's layout (shape):(strides)."""
    offset = 0
    for size, stride in zip(shape, strides, strict=True):
        offset += index % size * stride
        index //= size
    return offset


class Tile:
    """A matrix (rows, 16) in shared memory, in one of the canonical layouts of wgmma.

    mma_sm90_desc.hpp, in elements of 16 bits, T = 8 to 16 bytes, W = bytes of the swizzle / 16:
      K-major    ((8,m),(T,2)) : ((W T, SBO), (1, T)), without swizzle ((T, SBO), (1, LBO))
      MN-major   ((T,W,m),(8,k)) : ((1, T, LBO), (W T, SBO)), without ((1, T, SBO), (T, LBO))
    """

    def __init__(self, rows, start, width, is_across):
        self.rows = rows
        self.start = start
        self.width = width
        self.is_across = is_across
        pieces = width // 16
        if width == 16:
            self.leading, self.stride = 128 * (rows // 8), 128
            if not is_across:
                self.leading, self.stride = 128, 256
        elif is_across:
            self.leading, self.stride = 16 * width, 8 * width
        else:
            self.leading, self.stride = 16, 8 * width
        lbo, sbo = self.leading // 2, self.stride // 2
        if is_across and width == 16:
            self.layouts = ((8, 1, 999), (1, 8, sbo)), ((8, 2), (8, lbo))
        elif is_across:
            self.layouts = ((8, pieces, 999), (1, 8, lbo)), ((8, 2), (8 * pieces, sbo))
        elif width == 16:
            self.layouts = ((8, 999), (8, sbo)), ((8, 2), (1, lbo))
        else:
            self.layouts = ((8, 999), (8 * pieces, sbo)), ((8, 2), (1, 8))

    def address(self, row, k):
        (row_shape, row_strides), (k_shape, k_strides) = self.layouts
        offset = canonical(row, row_shape, row_strides) + canonical(k, k_shape, k_strides)
        return swizzled(self.start + 2 * offset, SWIZZLES[self.width][1])

    def put(self, image, matrix, type):
        """Write a matrix (rows, 16) into an image of shared memory."""
        bits = to_bits(matrix, type)
        for row in range(self.rows):
            for k in range(16):
                image[self.address(row, k) // 2] = bits[row, k]

    def descriptor_text(self, register):
        """PTX that puts the descriptor into a register; the address of the tile is added to it."""
        number = SWIZZLES[self.width][0] << 62
        number |= self.leading >> 4 << 16 | self.stride >> 4 << 32
        return f"""
            mov.b32 %r290, global_smem;
            add.s32 %r290, %r290, {self.start};
            bfe.u32 %r290, %r290, 4, 14;
            cvt.u64.u32 {register}, %r290;
            or.b64 {register}, {register}, {number};
        """


LEFT_START = 0
RIGHT_START = 16384
SHARED_BYTES = 16384 + 65536


def fill_shared(n_bytes):
    """PTX: 128 threads copy the first parameter to shared memory."""
    lines = ["mov.u32 %r280, %tid.x; mov.b32 %r281, global_smem;"]
    lines.append("ld.param.b64 %rd50, [kernel_param_0]; mad.wide.u32 %rd51, %r280, 16, %rd50;")
    lines.append("mad.lo.s32 %r282, %r280, 16, %r281;")
    for at in range(0, n_bytes, 2048):
        lines.append(f"ld.global.v4.b32 {{%r283, %r284, %r285, %r286}}, [%rd51 + {at}];")
        lines.append(f"st.shared.v4.b32 [%r282 + {at}], {{%r283, %r284, %r285, %r286}};")
    return "\n".join(lines)


def store_sums(n):
    """PTX: the n / 2 sums of each thread go to the second parameter."""
    lines = [f"ld.param.b64 %rd52, [kernel_param_1]; mad.wide.u32 %rd53, %r280, {2 * n}, %rd52;"]
    lines += [f"st.global.b32 [%rd53 + {4 * i}], %r{i};" for i in range(n // 2)]
    return "\n".join(lines)


def braces(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def wgmma_text(name, left, right, keep="0"):
    n = right.rows
    if left is None:
        flags = f"1, 1, {right.is_across:d}"
        return f"{name} {braces(0, n // 2)}, {braces(200, 4)}, %rd1, {keep}, {flags};"
    flags = f"1, 1, {left.is_across:d}, {right.is_across:d}"
    return f"{name} {braces(0, n // 2)}, %rd2, %rd1, {keep}, {flags};"


FENCE = "fence.proxy.async.shared::cta;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
PREPARE = f"{FENCE} bar.sync 0; wgmma.fence.sync.aligned;"


def wgmma_body(name, left, right, prepare=PREPARE, finish=COMMIT + WAIT, products=None):
    """A kernel that multiplies once. left: a Tile or None, where registers %r200 to %r203 hold it.

    products: the text of the products, where it is not one.
    """
    load_left = ""
    if left is None:  # thread t has its four registers in the third parameter
        load_left = """
            ld.param.b64 %rd54, [kernel_param_2]; mad.wide.u32 %rd55, %r280, 16, %rd54;
            ld.global.v4.b32 {%r200, %r201, %r202, %r203}, [%rd55];
        """
    return f"""
        {fill_shared(RIGHT_START + 256 * max(right.rows, 64))}
        {right.descriptor_text("%rd1")}
        {left.descriptor_text("%rd2") if left else load_left}
        {prepare}
        {products or wgmma_text(name, left, right)}
        {finish}
        {store_sums(right.rows)}
    """


def wgmma_sums(out, n):
    """(64, n) of the sums that 128 threads stored."""
    result = np.empty((64, n), np.float32)
    numbers = out.numpy().reshape(128, n // 2)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(n // 2):
            row = warp * 16 + lane // 4 + 8 * (i // 2 % 2)
            column = i // 4 * 8 + lane % 4 * 2 + i % 2
            result[row, column] = numbers[thread, i]
    return result


def left_registers(matrix, type):
    """The registers of a left matrix (64, 16): (128, 4), each warp's as of mma.m16n8k16."""
    quarters = matrix.reshape(4, 16, 16)
    registers = fragment(quarters, lambda i, lane: left_place(i, lane, type, 16), 8, type)
    return torch.from_numpy(np.stack(registers, 1).astype(np.uint32).view(np.int32))


def run_wgmma(name, left_layout, right_layout, prepare=PREPARE, finish=COMMIT + WAIT):
    """(what wgmma gives, what it should). Layouts: (bytes of the swizzle, across), left or None."""
    n = int(name.split("m64n")[1].split("k")[0])
    type = name.rpartition(".")[2]
    rng = np.random.default_rng(n)
    a = random_matrix(rng, (64, 16), type)
    b = random_matrix(rng, (n, 16), type)
    image = np.zeros(SHARED_BYTES // 2, np.uint16)
    right = Tile(n, RIGHT_START, *right_layout)
    right.put(image, b, type)
    left = None
    if left_layout:
        left = Tile(64, LEFT_START, *left_layout)
        left.put(image, a, type)
    out = torch.zeros(64 * n)
    tensors = [torch.from_numpy(image.view(np.int16)), out]
    if left is None:
        tensors.append(left_registers(a, type))
    body = wgmma_body(name, left, right, prepare, finish)
    launch(body, *tensors, n_threads=128, shared_bytes=SHARED_BYTES)
    return wgmma_sums(out, n), exact_product(a, b.T, np.zeros((64, n), np.float32))


@pytest.mark.parametrize("name", WGMMA)
@pytest.mark.parametrize("fence", FENCES)
def test_wgmma(name, fence):
    """The left side from registers, or with the other fence from shared memory."""
    left = None if fence == FENCES[0] else (128, False)
    prepare = PREPARE.replace(FENCE, fence + ";")
    width = 128 if name.split("m64n")[1].split("k")[0] != "8" else 16
    got, expected = run_wgmma(name, left, (width, False), prepare)
    assert (got == expected).all()


NAME = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("is_across", [False, True])
@pytest.mark.parametrize("width", SWIZZLES)
def test_wgmma_tiles_in_every_layout(width, is_across, is_left):
    """Each swizzle, with k or with rows contiguous, of the left and of the right side."""
    other = (128, False)
    layouts = ((width, is_across), other) if is_left else (other, (width, is_across))
    got, expected = run_wgmma(NAME, *layouts)
    assert (got == expected).all()


def constant_kernel(**changes):
    """A kernel of one product of tiles of ones, changed: (body, tensors)."""
    left = Tile(64, LEFT_START, 128, False)
    right = Tile(64, RIGHT_START, 128, False)
    ones = np.full(SHARED_BYTES // 2, 0x3F80, np.uint16)
    out = torch.zeros(64 * 64)
    tensors = [torch.from_numpy(ones.view(np.int16)), out]
    return wgmma_body(NAME, left, right, **changes), tensors


def run_constant(shuffle=None, edit=None, **changes):
    """The sums of constant_kernel(), which are all alike."""
    body, tensors = constant_kernel(**changes)
    if edit:
        body = edit(body)
    launch(body, *tensors, n_threads=128, shared_bytes=SHARED_BYTES, shuffle=shuffle)
    return tensors[1]


PRODUCT = wgmma_text(NAME, Tile(64, 0, 128, False), Tile(64, 0, 128, False))
ADD = PRODUCT.replace("%rd1, 0,", "%rd1, 1,")


@pytest.mark.parametrize("shuffle", [None, 3])
def test_wgmma_adds_to_its_sums(shuffle):
    """A product that replaces the sums, two that add to them, in groups of one and two."""
    assert (run_constant(shuffle) == 16).all()
    assert (run_constant(shuffle, products=PRODUCT + ADD + ADD) == 48).all()
    groups = PRODUCT + COMMIT + ADD + ADD
    assert (run_constant(shuffle, products=groups) == 48).all()
    predicate = "mov.pred %p1, -1;" + ADD.replace("%rd1, 1,", "%rd1, %p1,")
    assert (run_constant(shuffle, products=PRODUCT + predicate) == 32).all()


def test_wait_group_leaves_the_latest_groups_pending():
    other = PRODUCT.replace(braces(0, 32), braces(40, 32))
    waits_for_first = COMMIT + "wgmma.wait_group.sync.aligned 1;"
    assert (run_constant(products=PRODUCT + COMMIT + other, finish=waits_for_first) == 16).all()
    with pytest.raises(Fault, match="used before its wait"):
        run_constant(products=other + COMMIT + PRODUCT, finish=waits_for_first)


@pytest.mark.parametrize("finish", ["", COMMIT, WAIT])
def test_a_missing_wait_is_a_fault(finish):
    """Without the wait, without both, and without the commit."""
    with pytest.raises(Fault, match="a register of a wgmma is used before its wait"):
        run_constant(finish=finish)


def test_a_missing_proxy_fence_is_a_fault():
    with pytest.raises(Fault, match=r"written without fence\.proxy\.async after it"):
        run_constant(prepare=PREPARE.replace(FENCE, ""))
    # after the barrier it does, too
    run_constant(prepare=f"bar.sync 0; {FENCE} wgmma.fence.sync.aligned;")
    # only half of the threads
    half = "setp.lt.u32 %p2, %r280, 64; @%p2 " + PREPARE
    with pytest.raises(Fault, match=r"written without fence\.proxy\.async after it"):
        run_constant(prepare=half)


def test_a_missing_register_fence_is_a_fault():
    without = PREPARE.replace("wgmma.fence.sync.aligned;", "")
    with pytest.raises(Fault, match=r"without wgmma\.fence after it"):
        run_constant(prepare=without)
    with pytest.raises(Fault, match=r"without wgmma\.fence after it"):
        run_constant(prepare=PREPARE + "mov.b32 %r7, 0;")
    run_constant(prepare=PREPARE + "mov.b32 %r150, 0;")  # no register of the product
    # the left side's registers may be written after the fence
    got, expected = run_wgmma(NAME, None, (128, False), prepare=PREPARE + "mov.b32 %r200, %r200;")
    assert (got == expected).all()


def test_a_tile_is_not_overwritten_before_the_wait():
    overwrite = "st.shared.b32 [%r282], 0;"
    with pytest.raises(Fault, match="is written while wgmma may still read it"):
        run_constant(finish=COMMIT + overwrite + WAIT)
    # a warp's wait says nothing of the other warps of its group
    with pytest.raises(Fault, match="race: write .* read by wgmma of warp group 0"):
        run_constant(finish=COMMIT + WAIT + overwrite)
    assert (run_constant(finish=COMMIT + WAIT + "bar.sync 0;" + overwrite) == 16).all()


def test_a_tile_that_another_warp_writes_needs_a_barrier():
    with pytest.raises(Fault, match="race"):
        run_constant(prepare=PREPARE.replace("bar.sync 0;", ""))


def test_a_tile_must_be_written_and_inside_of_shared_memory():
    body, _ = constant_kernel()
    stores = [line for line in body.splitlines() if "st.shared" in line]
    with pytest.raises(Fault, match="uninitialised"):
        run_constant(edit=lambda body: body.replace(stores[1], ""))
    with pytest.raises(Fault, match="outside of its"):
        run_constant(edit=lambda body: body.replace("%r290, 16384", f"%r290, {SHARED_BYTES}"))


def test_only_whole_warp_groups_multiply():
    half = "setp.lt.u32 %p2, %r280, 64;" + PREPARE
    with pytest.raises(Fault, match="only a part of a warp group"):
        run_constant(prepare=half, products="@%p2 " + PRODUCT)


def test_all_threads_name_the_same_tile():
    differ = "cvt.u64.u32 %rd10, %r280; add.s64 %rd1, %rd1, %rd10;" + PREPARE
    with pytest.raises(Fault, match="different descriptors"):
        run_constant(prepare=differ)
