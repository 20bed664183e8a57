"""Loads, stores, copies, shuffles, branches and barriers of the emulator, each against numpy."""

import numpy as np
import pytest
import torch
from ptx_emulator import Fault, Kernel, Machine
from small_kernels import evaluate, launch, text_of

LOADS = [
    *(f"ld.{space}{vector}.b{bits}" for space in ("global", "shared")
      for vector in ("", ".v2", ".v4") for bits in (8, 16, 32)),
    *(f"ld.{space}{vector}.b64" for space in ("global", "shared") for vector in ("", ".v2")),
    *(f"ld.{space}.s{bits}" for space in ("global", "shared") for bits in (8, 16, 32)),
]  # fmt: skip
STORES = [name.replace("ld", "st") for name in LOADS if ".s8" not in name and ".s16" not in name]
STORES = [name for name in STORES if not name.endswith(".s32")]
PARAMETERS = [f"ld.param.{type}" for type in ("b8", "s8", "b16", "s16", "b32", "s32", "b64")]
SHUFFLES = [f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx")]
REDUCTIONS = [f"redux.sync.{kind}.{type}" for kind in ("max", "min") for type in ("s32", "u32")]
COPIES = ["cp.async.ca.shared.global", "cp.async.cg.shared.global"]
WAITS = ["cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "bar.warp.sync"]
TESTED = {*LOADS, *STORES, *PARAMETERS, *SHUFFLES, *REDUCTIONS, *COPIES, *WAITS}


def random_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)


def shape_of(name):
    """(bytes of a number, numbers of a vector, whether it is signed)."""
    type = name.rpartition(".")[2]
    vector = next((int(x[1]) for x in name.split(".") if x in ("v2", "v4")), 1)
    return int(type[1:]) // 8, vector, type[0] == "s"


def braces(registers):
    return registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"


# thread t copies 16 bytes of the first parameter to shared memory
FILL_SHARED = """
    mov.u32 %r201, %tid.x;
    shl.b32 %r202, %r201, 4;
    ld.param.b64 %rd60, [kernel_param_0];
    mad.wide.u32 %rd61, %r201, 16, %rd60;
    ld.global.v4.b32 {%r203, %r204, %r205, %r206}, [%rd61];
    mov.b32 %r207, global_smem;
    add.s32 %r208, %r207, %r202;
    st.shared.v4.b32 [%r208], {%r203, %r204, %r205, %r206};
    bar.sync 0;
"""


@pytest.mark.parametrize("name", LOADS)
def test_load(name):
    """Thread t loads vector 31 - t, into registers of 32 or 64 bits, to which it is extended."""
    width, count, is_signed = shape_of(name)
    data = random_bytes(512)
    wide = 8 if width == 8 or name.endswith("s32") else 4
    registers = [f"%{'rd' if wide == 8 else 'r'}{n + 1}" for n in range(count)]
    size = width * count
    if ".global" in name:
        address = "ld.param.b64 %rd40, [kernel_param_0];"
        address += f" mad.wide.u32 %rd41, %r41, {size}, %rd40;"
        operand = "[%rd41]"
    else:
        address = FILL_SHARED + f"mad.lo.s32 %r42, %r41, {size}, %r207;"
        operand = "[%r42]"
    stores = " ".join(
        f"st.global.b{8 * wide} [%rd45 + {n * wide}], {register};"
        for n, register in enumerate(registers)
    )
    out = torch.zeros(32 * count * wide, dtype=torch.uint8)
    body = f"""
        mov.u32 %r40, %tid.x;
        sub.s32 %r41, 31, %r40;
        {address}
        {name} {braces(registers)}, {operand};
        ld.param.b64 %rd44, [kernel_param_1];
        mad.wide.u32 %rd45, %r40, {count * wide}, %rd44;
        {stores}
    """
    launch(body, torch.from_numpy(data), out.view(torch.int64 if wide == 8 else torch.int32),
           shared_bytes=512)  # fmt: skip
    kind = "i" if is_signed else "u"
    expected = data[: 32 * size].view(f"{kind}{width}").reshape(32, count)[::-1]
    expected = expected.astype(f"{kind}{wide}")
    got = out.numpy().view(f"{kind}{wide}").reshape(32, count)
    assert (got == expected).all()


@pytest.mark.parametrize("name", STORES)
def test_store(name):
    """Thread t stores vector t at place 31 - t; what it stores is the low bits of registers."""
    width, count, _ = shape_of(name)
    size = width * count
    data = random_bytes(32 * 8 * count, seed=1)
    wide = 8 if width == 8 else 4
    registers = [f"%{'rd' if wide == 8 else 'r'}{n + 1}" for n in range(count)]
    loads = " ".join(
        f"ld.global.b{8 * wide} {register}, [%rd41 + {n * wide}];"
        for n, register in enumerate(registers)
    )
    is_global = ".global" in name
    where = "[%rd43]" if is_global else "[%r42]"
    # from shared memory, byte by byte, to the second parameter
    read_back = "" if is_global else "bar.sync 0;"
    for n in range(0 if is_global else size):
        read_back += f"ld.shared.b8 %r50, [%r43 + {n}]; st.global.b8 [%rd44 + {n}], %r50;"
    body = f"""
        mov.u32 %r40, %tid.x;
        sub.s32 %r41, 31, %r40;
        ld.param.b64 %rd40, [kernel_param_0];
        mad.wide.u32 %rd41, %r40, {wide * count}, %rd40;
        {loads}
        ld.param.b64 %rd42, [kernel_param_1];
        mad.wide.u32 %rd43, %r41, {size}, %rd42;
        mad.wide.u32 %rd44, %r40, {size}, %rd42;
        mov.b32 %r44, global_smem;
        mad.lo.s32 %r42, %r41, {size}, %r44;
        mad.lo.s32 %r43, %r40, {size}, %r44;
        {name} {where}, {braces(registers)};
        {read_back}
    """
    out = torch.zeros(32 * size, dtype=torch.uint8)
    launch(body, torch.from_numpy(data), out, shared_bytes=32 * size)
    numbers = data[: 32 * count * wide].view(f"u{wide}").astype(f"u{width}")
    assert (out.numpy().view(f"u{width}").reshape(32, count)[::-1] ==
            numbers.reshape(32, count)).all()  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter(name):
    """Read into a register of 64 bits: extended with zeros, or with the sign."""
    type = name.rpartition(".")[2]
    bits = int(type[1:])
    text = text_of(f"{name} %rd1, [kernel_param_1]; st.global.b64 [%rd9], %rd1;", 1)
    text = text.replace("kernel_param_0\n", f"kernel_param_0,\n .param .u{bits} kernel_param_1\n")
    text = text.replace(f"{name} %rd1", f"ld.param.b64 %rd9, [kernel_param_0]; {name} %rd1")
    number = (1 << bits) - 5  # -5, if it is signed
    out = torch.zeros(1, dtype=torch.int64)
    machine = Machine(Kernel(text), 0, {"out": out})
    machine.set_parameters([machine.global_memory.address(out), number])
    machine.run((0, 0, 0), (1, 1, 1))
    assert int(out) == (-5 if type[0] == "s" or bits == 64 else number)


def test_special_registers():
    out = torch.zeros(6 * 64, 9, dtype=torch.int32)
    reads = "tid.x ntid.x laneid ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z".split()
    body = " ".join(f"mov.u32 %r{n + 1}, %{name};" for n, name in enumerate(reads))
    body += """
        ld.param.b64 %rd1, [kernel_param_0];
        mad.lo.s32 %r20, %r6, 2, %r5;
        mad.lo.s32 %r20, %r20, 1, %r4;
        mad.lo.s32 %r21, %r20, 64, %r1;
        mad.wide.u32 %rd2, %r21, 36, %rd1;
    """
    body += " ".join(f"st.global.b32 [%rd2 + {4 * n}], %r{n + 1};" for n in range(9))
    launch(body, out, grid=(1, 2, 3), n_threads=64)
    for z in range(3):
        for y in range(2):
            for t in range(64):
                row = out[(2 * z + y) * 64 + t].tolist()
                assert row == [t, 64, t % 32, 0, y, z, 1, 2, 3]


def copy_body(name, size, source_size, wait):
    """Thread t copies `size` bytes from place t to shared memory, then out of it."""
    operands = f"[%r2], [%rd3], {size}" + (", %r9" if source_size is not None else "")
    read_back = " ".join(
        f"ld.shared.b32 %r3, [%r2 + {n}]; st.global.b32 [%rd4 + {n}], %r3;"
        for n in range(0, size, 4)
    )
    return f"""
        mov.u32 %r1, %tid.x;
        mov.b32 %r4, global_smem;
        mad.lo.s32 %r2, %r1, {size}, %r4;
        ld.param.b64 %rd1, [kernel_param_0];
        ld.param.b64 %rd2, [kernel_param_1];
        mad.wide.u32 %rd3, %r1, {size}, %rd1;
        mad.wide.u32 %rd4, %r1, {size}, %rd2;
        mov.b32 %r9, {source_size or 0};
        {name} {operands};
        {wait}
        {read_back}
    """


WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize(
    "name, size, source_size",
    [
        ("cp.async.ca.shared.global", 4, None),
        ("cp.async.ca.shared.global", 8, 8),
        ("cp.async.ca.shared.global", 16, 4),
        ("cp.async.ca.shared.global", 4, 2),
        ("cp.async.cg.shared.global", 16, None),
        ("cp.async.cg.shared.global", 16, 0),
        ("cp.async.cg.shared.global", 16, 12),
    ],
)
@pytest.mark.parametrize("wait", [WAIT, "cp.async.wait_all;"])
def test_asynchronous_copy(name, size, source_size, wait):
    """What lies beyond the source size becomes zero."""
    data = random_bytes(32 * size)
    out = torch.full((32 * size,), 7, dtype=torch.uint8)
    body = copy_body(name, size, source_size, wait)
    launch(body, torch.from_numpy(data), out.view(torch.int32), shared_bytes=32 * size)
    expected = data.reshape(32, size).copy()
    expected[:, size if source_size is None else source_size :] = 0
    assert (out.numpy().reshape(32, size) == expected).all()


def test_a_copy_of_no_bytes_may_point_anywhere():
    body = copy_body("cp.async.cg.shared.global", 16, 0, WAIT)
    body = body.replace("mad.wide.u32 %rd3, %r1, 16, %rd1", "mov.b64 %rd3, 16")
    out = torch.ones(128, dtype=torch.int32)
    launch(body, torch.zeros(1, dtype=torch.int32), out, shared_bytes=512)
    assert not out.any()


def shuffle_by_the_manual(mode, lane, values, b, c):
    """The pseudocode of shfl.sync in the PTX manual, for one lane: (value, predicate)."""
    bval = b & 0x1F
    cval = c & 0x1F
    segmask = c >> 8 & 0x1F
    max_lane = (lane & segmask) | (cval & ~segmask & 0x1F)
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        valid = j >= max_lane
    elif mode == "down":
        j = lane + bval
        valid = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        valid = j <= max_lane
    else:
        j = min_lane | (bval & ~segmask & 0x1F)
        valid = j <= max_lane
    return values[j if valid else lane], valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [31, 0, 0x1C1F, 0x181F, 0x1800, 15])
def test_shuffle(mode, c):
    """Of two warps, by every distance, also one that differs from lane to lane."""
    values = np.random.default_rng(c).integers(0, 1 << 32, 64)
    for b in [[n] * 64 for n in (0, 1, 2, 5, 16, 31, 33)] + [[7 * t % 32 for t in range(64)]]:
        got, valid = evaluate(
            f"shfl.sync.{mode}.b32 %r9|%p9, %r1, %r2, {c}, -1;",
            {"%r1": values, "%r2": b},
            ["%r9", "%p9"],
        )
        for t in range(64):
            warp = values[t // 32 * 32 :][:32]
            expected = shuffle_by_the_manual(mode, t % 32, warp, b[t], c)
            assert (got[t], bool(valid[t])) == expected, (mode, c, t)
    (without_predicate,) = evaluate(
        f"shfl.sync.{mode}.b32 %r9, %r1, %r2, {c}, 0xffffffff;",
        {"%r1": values, "%r2": b},
        ["%r9"],
    )
    assert (without_predicate == got).all()


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("size", [32, 8, 1])
def test_a_reduction_is_over_the_members(name, size):
    """Of two warps, in groups of neighbouring threads."""
    values = np.random.default_rng(size).integers(0, 1 << 32, 64).astype("u4")
    lane = np.arange(64) % 32
    members = ((1 << size) - 1) << (lane // size * size)
    inputs = {"%r1": values, "%r2": members.astype("u4")}
    (found,) = evaluate(f"{name} %r9, %r1, %r2;", inputs, ["%r9"])
    groups = values.view("i4" if name.endswith("s32") else "u4").reshape(-1, size)
    expected = groups.max(1) if ".max." in name else groups.min(1)
    assert (found.view(groups.dtype) == np.repeat(expected, size)).all()


def test_a_reduction_refuses_members_that_disagree():
    values = {"%r1": np.arange(32, dtype="u4"), "%r2": np.full(32, 0xFFFFFFFF, "u4")}
    values["%r2"][3] = 1 << 3
    with pytest.raises(Fault, match="other member masks"):
        evaluate("redux.sync.max.s32 %r9, %r1, %r2;", values, ["%r9"])
    values["%r2"][3] = 1
    with pytest.raises(Fault, match="own member mask"):
        evaluate("redux.sync.max.s32 %r9, %r1, %r2;", values, ["%r9"])


def test_a_shuffle_needs_the_whole_warp():
    for instruction in ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1", "bar.warp.sync -1"):
        launch(f"mov.u32 %r1, %tid.x; {instruction};")
        body = f"mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 {instruction};"
        with pytest.raises(Fault, match="only a part of a warp"):
            launch(body)


# -----------------------------------------------------------------------------
# Branches and barriers.


def test_threads_that_part_meet_again():
    """Even and odd threads take different ways; then all of a warp shuffle."""
    body = """
        and.b32 %r2, %r1, 1;
        setp.eq.b32 %p1, %r2, 0;
        @%p1 bra $EVEN;
        mov.b32 %r3, 100;
        bra.uni $JOIN;
    $EVEN:
        mov.b32 %r3, 200;
    $JOIN:
        shfl.sync.bfly.b32 %r9, %r3, 1, 31, -1;
    """
    (got,) = evaluate(body, {"%r1": np.arange(32)}, ["%r9"])
    assert got.tolist() == [100, 200] * 16


def test_threads_loop_as_often_as_they_need():
    body = """
        mov.b32 %r2, 0;
        mov.b32 %r3, 0;
    $LOOP:
        setp.ge.s32 %p1, %r2, %r1;
        @%p1 bra $DONE;
        add.s32 %r2, %r2, 1;
        add.s32 %r3, %r3, %r2;
        bra $LOOP;
    $DONE:
        mov.b32 %r9, %r3;
    """
    (got,) = evaluate(body, {"%r1": np.arange(50)}, ["%r9"])
    assert got.tolist() == [n * (n + 1) // 2 for n in range(50)]


def test_threads_that_returned_are_not_waited_for():
    """Half of the threads return; the others pass a barrier."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 32;
        @%p1 ret;
        bar.sync 0;
        ld.param.b64 %rd1, [kernel_param_0];
        mad.wide.u32 %rd2, %r1, 4, %rd1;
        st.global.b32 [%rd2], 1;
    """
    launch(body, out, n_threads=64)
    assert out.tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize("shuffle", [None, 0, 1])
def test_a_barrier_orders_warps(shuffle):
    """Each thread reads what a thread of another warp wrote before the barrier."""
    data = torch.arange(128, dtype=torch.int32)
    out = torch.zeros(128, dtype=torch.int32)
    body = """
        mov.u32 %r1, %tid.x;
        mov.b32 %r2, global_smem;
        mad.lo.s32 %r3, %r1, 4, %r2;
        ld.param.b64 %rd1, [kernel_param_0];
        ld.param.b64 %rd2, [kernel_param_1];
        mad.wide.u32 %rd3, %r1, 4, %rd1;
        mad.wide.u32 %rd4, %r1, 4, %rd2;
        ld.global.b32 %r4, [%rd3];
        st.shared.b32 [%r3], %r4;
        bar.sync 0, 128;
        xor.b32 %r5, %r1, 96;
        mad.lo.s32 %r6, %r5, 4, %r2;
        ld.shared.b32 %r7, [%r6];
        st.global.b32 [%rd4], %r7;
    """
    launch(body, data, out, n_threads=128, shared_bytes=512, shuffle=shuffle)
    assert out.tolist() == [t ^ 96 for t in range(128)]
