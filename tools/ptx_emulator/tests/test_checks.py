"""What the emulator checks and refuses: each check fires, and a clean kernel passes it."""

import numpy as np
import pytest
import torch
from ptx_emulator import Fault, Kernel, Machine
from small_kernels import launch, text_of

# thread t of a program works at number t of its part of the tensors
ADDRESSES = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mad.wide.u32 %rd3, %r4, 4, %rd1;
    mad.wide.u32 %rd4, %r4, 4, %rd2;
    mov.b32 %r5, global_smem;
    mad.lo.s32 %r6, %r1, 4, %r5;
"""
# to shared memory, past a barrier, and from the place of the thread 32 further
EXCHANGE = (
    ADDRESSES
    + """
    ld.global.b32 %r7, [%rd3];
    st.shared.b32 [%r6], %r7;
    bar.sync 0;
    add.s32 %r8, %r1, 32;
    and.b32 %r8, %r8, 63;
    mad.lo.s32 %r9, %r8, 4, %r5;
    ld.shared.b32 %r10, [%r9];
    st.global.b32 [%rd4], %r10;
"""
)


def exchange(body=EXCHANGE, n_in=128, n_out=128, shared_bytes=256, grid=(2, 1, 1), **options):
    """Two programs of 64 threads. Returns what they wrote."""
    source = torch.arange(n_in, dtype=torch.int32)
    out = torch.zeros(n_out, dtype=torch.int32)
    launch(body, source, out, n_threads=64, shared_bytes=shared_bytes, grid=grid, **options)
    return out.tolist()


def check_fault(match, body=EXCHANGE, **options):
    with pytest.raises(Fault, match=match) as fault:
        exchange(body, **options)
    return str(fault.value)


@pytest.mark.parametrize("shuffle", [None, 0, 1, 2])
@pytest.mark.parametrize("order", [None, (1, 0)])
def test_a_clean_kernel_passes(shuffle, order):
    halves = [*range(32, 64), *range(32)]
    expected = halves + [64 + n for n in halves]
    assert exchange(shuffle=shuffle, order=order, profile=True) == expected


# -----------------------------------------------------------------------------
# Bounds and alignment.


def test_a_fault_says_where():
    """PTX line, program, thread, and how many threads; a source line where there is one."""
    message = check_fault("out of bounds: 28 threads read outside of tensor_0", n_in=100)
    assert "kernel, program (1, 0, 0), thread 36 (warp 1)" in message
    assert "(400 bytes), this one 4 bytes from byte 400 on" in message
    line = text_of(EXCHANGE, 2, 64).split("\n").index("    ld.global.b32 %r7, [%rd3];") + 1
    assert f"PTX line {line}: ld.global.b32 %r7, [%rd3]" in message
    assert "from an unknown line" in message
    located = EXCHANGE.replace("ld.global", '.file 1 "/a/flash.py"\n.loc 1 42 7\nld.global')
    located = located.replace('.file 1 "/a/flash.py"\n', "")
    text = text_of(located, 2, 64) + '.file 1 "/a/flash.py"\n'
    loaded = next(i for i in Kernel(text).blocks[0].instructions if i.name == "ld.global.b32")
    assert loaded.source == "flash.py:42"


def test_writes_outside_of_a_tensor():
    check_fault("28 threads write outside of tensor_1", n_out=100)
    check_fault("belongs to no tensor", EXCHANGE.replace("[%rd4]", "[%r6]"))


def test_elements_between_those_of_a_view_are_outside():
    """Every second element is passed, and all are read."""
    source = torch.arange(256, dtype=torch.int32)[::2]
    out = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(Fault, match="out of bounds"):
        launch(EXCHANGE, source, out, n_threads=64, shared_bytes=256)
    body = EXCHANGE.replace("mad.wide.u32 %rd3, %r4, 4", "mad.wide.u32 %rd3, %r4, 8")
    launch(body, source, out, n_threads=64, shared_bytes=256)
    assert out[:3].tolist() == [64, 66, 68]


def test_an_expanded_tensor_has_one_element():
    source = torch.full((1,), 7, dtype=torch.int32).expand(64)
    out = torch.zeros(64, dtype=torch.int32)
    body = EXCHANGE.replace("mad.wide.u32 %rd3, %r4, 4, %rd1", "mov.b64 %rd3, %rd1")
    launch(body, source, out, n_threads=64, shared_bytes=256)
    assert out.tolist() == [7] * 64


def test_shared_memory_has_bounds():
    check_fault("4 bytes at shared address 128 are outside of its 128 bytes", shared_bytes=128)
    below = EXCHANGE.replace("st.shared.b32 [%r6]", "st.shared.b32 [%r6 + -4]")
    check_fault("shared address -4 ", below)


def test_misaligned_accesses():
    check_fault("shared address 2 is not aligned to 4", EXCHANGE.replace("[%r6]", "[%r6 + 2]"),
                shared_bytes=512)  # fmt: skip
    wide = EXCHANGE.replace("ld.global.b32 %r7,", "ld.global.v2.b32 {%r7, %r20},")
    check_fault("byte 4 of tensor_0 is not aligned to 8", wide, n_in=256)
    body = EXCHANGE.replace("st.global.b32 [%rd4]", "st.global.b32 [%rd4 + 1]")
    check_fault("byte 1 of tensor_1 is not aligned to 4", body, n_out=256)


# -----------------------------------------------------------------------------
# Initialisation.


def test_shared_memory_is_read_after_it_was_written():
    check_fault("uninitialised: shared address", EXCHANGE.replace("st.shared.b32 [%r6], %r7;", ""))
    # what an earlier program wrote does not count
    first_only = "setp.eq.s32 %p1, %r2, 0; @%p1 st.shared.b32 [%r6], %r7;"
    message = check_fault(
        "uninitialised", EXCHANGE.replace("st.shared.b32 [%r6], %r7;", first_only)
    )
    assert "program (1, 0, 0)" in message


def test_registers_start_as_nan():
    out = torch.zeros(128)
    launch(ADDRESSES + "st.global.b32 [%rd4], %r77;", out, out, n_threads=64)
    assert out[:64].isnan().all()


# -----------------------------------------------------------------------------
# Races.


def test_a_missing_barrier_is_a_race():
    body = EXCHANGE.replace("bar.sync 0;", "")
    message = check_fault("race: read of shared address", body)
    assert "written by warp" in message and "since the last barrier" in message
    # without the ledgers, numbers tell, if warps run one after another
    halves = [*range(32, 64), *range(32)]
    with pytest.raises(Fault, match="uninitialised"):
        exchange(body, races=False, shuffle=0)
    assert exchange(body, races=False)[:64] == halves


def test_a_write_after_another_warps_read_is_a_race():
    again = EXCHANGE + "st.shared.b32 [%r6], 7;"
    message = check_fault("race: write of shared address", again, grid=(1, 1, 1))
    assert "read by warp" in message
    exchange(EXCHANGE + "bar.sync 0; st.shared.b32 [%r6], 7;")


def test_a_write_of_what_is_there_is_no_race():
    body = EXCHANGE + "xor.b32 %r11, %r1, 32; mad.lo.s32 %r12, %r11, 4, %r5;"
    body += "bar.sync 0; st.shared.b32 [%r6], 5; st.shared.b32 [%r12], {};"
    exchange(body.format(5))
    check_fault("race: write of shared address", body.format(6))


def test_one_warp_needs_no_barrier():
    """Lanes of the same warp read what others wrote, in the order of the program."""
    body = EXCHANGE.replace("bar.sync 0;", "").replace("%r1, 32;", "%r1, 1;")
    body = body.replace("and.b32 %r8, %r8, 63;", "and.b32 %r8, %r8, 31;")
    source = torch.arange(32, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    launch(body, source, out, n_threads=32, shared_bytes=256)
    assert out.tolist() == [*range(1, 32), 0]


def test_two_programs_that_write_the_same_element():
    """Whatever the value is, and in any order of the programs."""
    body = ADDRESSES + "mad.wide.u32 %rd5, %r1, 4, %rd2; st.global.b32 [%rd5], 1;"
    for order in (None, (1, 0)):
        message = check_fault("race: write of byte 0 of tensor_1", body, order=order)
        assert "written by another program of the launch" in message
    exchange(body, grid=(1, 1, 1))


def test_a_program_that_reads_what_another_writes():
    body = ADDRESSES + "xor.b32 %r11, %r4, 64; mad.wide.u32 %rd5, %r11, 4, %rd2;"
    body += "setp.eq.s32 %p1, %r2, 1; st.global.b32 [%rd4], 1; @%p1 ld.global.b32 %r7, [%rd5];"
    message = check_fault("race: read of byte 0 of tensor_1", body)
    assert "written by another program" in message
    message = check_fault("race: write of byte 0 of tensor_1", body, order=(1, 0))
    assert "read by another program" in message


def test_many_programs_may_read_the_same():
    body = ADDRESSES + "ld.global.b32 %r7, [%rd1]; st.global.b32 [%rd4], %r7;"
    assert exchange(body, grid=(2, 1, 1)) == [0] * 128
    writes = body + "setp.eq.s32 %p1, %r4, 64; @%p1 st.global.b32 [%rd1], 3;"
    check_fault("race: write of byte 0 of tensor_0, read by another program", writes)


def test_a_race_of_warps_in_global_memory():
    """A warp reads what another one of its program wrote, without a barrier, and with one."""
    body = ADDRESSES + "xor.b32 %r11, %r4, 32; mad.wide.u32 %rd5, %r11, 4, %rd2;"
    body += "st.global.b32 [%rd4], 1; {} ld.global.b32 %r7, [%rd5];"
    message = check_fault("race: read of byte", body.format(""), grid=(1, 1, 1))
    assert "written by warp 1 since the last barrier" in message
    exchange(body.format("bar.sync 0;"), grid=(1, 1, 1))


def test_threads_that_write_different_values_in_one_instruction():
    shared = ADDRESSES + "st.shared.b32 [%r5], {}; "
    check_fault("two threads write different values to shared address 0", shared.format("%r1"))
    exchange(shared.format(7))
    everywhere = ADDRESSES + "mov.b64 %rd5, %rd2; st.global.b32 [%rd5], {};"
    match = "two threads write different values to byte 0 of tensor_1"
    check_fault(match, everywhere.format("%r1"), grid=(1, 1, 1))
    exchange(everywhere.format(7), grid=(1, 1, 1))


# -----------------------------------------------------------------------------
# Asynchronous copies.

COPY = (
    ADDRESSES
    + """
    cp.async.ca.shared.global [%r6], [%rd3], 4;
    {}
    ld.shared.b32 %r10, [%r6];
    st.global.b32 [%rd4], %r10;
"""
)
COMMIT_AND_WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize(
    "wait",
    ["", "cp.async.commit_group;", "cp.async.wait_group 0;",
     "cp.async.commit_group; cp.async.wait_group 1;"],
)  # fmt: skip
def test_a_copy_that_was_not_waited_for(wait):
    """No wait, no commit, or a wait that leaves the group pending."""
    check_fault("is touched while cp.async has not arrived", COPY.format(wait))


def test_a_copy_that_was_waited_for():
    assert exchange(COPY.format(COMMIT_AND_WAIT)) == list(range(128))
    two_groups = "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;"
    assert exchange(COPY.format(two_groups)) == list(range(128))


def test_another_warps_copy_needs_a_barrier_after_the_wait():
    """The wait is of a thread's own copies."""
    body = COPY.replace("[%r6];", "[%r9];").format(
        COMMIT_AND_WAIT + "{} xor.b32 %r8, %r1, 32; mad.lo.s32 %r9, %r8, 4, %r5;"
    )
    check_fault("race: read of shared address", body.format(""))
    assert exchange(body.format("bar.sync 0;"))[:2] == [32, 33]


def test_a_copy_over_what_is_still_read():
    body = EXCHANGE + "cp.async.ca.shared.global [%r6], [%rd3], 4;" + COMMIT_AND_WAIT
    check_fault("race: write of shared address", body, grid=(1, 1, 1))
    exchange(EXCHANGE + "bar.sync 0; cp.async.ca.shared.global [%r6], [%rd3], 4;" + COMMIT_AND_WAIT)


def test_a_copy_out_of_bounds():
    check_fault("out of bounds", COPY.format(COMMIT_AND_WAIT), n_in=100)
    check_fault("outside of its 128 bytes", COPY.format(COMMIT_AND_WAIT), shared_bytes=128)


# -----------------------------------------------------------------------------
# Control.


def test_a_loop_without_end():
    check_fault("this does not end", "$LOOP:\n bra.uni $LOOP;", max_visits=1000)


def test_threads_of_a_warp_at_different_barriers():
    body = """
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 7;
        @%p1 bra $OTHER;
        bar.sync 0;
        bra.uni $END;
    $OTHER:
        bar.sync 0;
    $END:
    """
    check_fault("threads of one warp wait at different barriers", body)


# -----------------------------------------------------------------------------
# What is refused when a kernel is loaded.


@pytest.mark.parametrize(
    "line, why",
    [
        ("lop3.b32 %r1, %r2, %r3, %r4, 128;", "lop3.b32 is not in the table"),
        ("add.sat.s32 %r1, %r2, %r3;", "add.sat.s32 is not in the table"),
        ("ld.global.L1::evict_last.b32 %r1, [%rd1];", "is not in the table"),
        ("fma.rz.f32 %r1, %r2, %r3, %r4;", "is not in the table"),
        ("atom.global.add.f32 %r1, [%rd1], %r2;", "is not in the table"),
        ("add.s32 %r1, %r2;", "it has 2 operands"),
        ("add.s32 %r1, %r2, %xyz;", "%xyz"),
        ("add.s32 %r1, %r2, {%r3, %r4};", "is a list"),
        ("add.s64 %r1, %rd2, %rd3;", "the register %r1 is not s64"),
        ("add.s32 %p1, %r2, %r3;", "the register %p1 is not s32"),
        ("add.s32 %r1, %r2, 4294967296;", "does not fit s32"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("mov.b32 %r1, other_smem;", "other_smem"),
        ("ld.shared.b32 %r1, [other_smem];", "unknown symbol"),
        ("ld.shared.b32 %r1, [%r2 + %r3];", "is no address"),
        ("ld.shared.v2.b32 {%r1}, [%r2];", "1 registers instead of 2"),
        ("ld.param.b32 %r1, [kernel_param_0];", "no parameter of that width"),
        ("ld.param.b64 %rd1, [kernel_param_9];", "no parameter of that width"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, 15;", "the member mask 15 is not -1"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, %r3;", "the member mask %r3 is not -1"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "cp.async of 8 bytes"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 12;", "cp.async of 12 bytes"),
        ("mov.b64 {%rs1, %rs2}, %rd1;", "the register %rs1 is not b32"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];", "are not 2 registers"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1,%r2}, {%r1,%r2}, {%r1}, {%r1};",
         "lists of another length"),
        ("bar.sync 1;", "operands that the emulator does not execute"),
        ("bar.sync 0, 32;", "operands that the emulator does not execute"),
        ("bra $NOWHERE;", "operands that the emulator does not execute"),
        (".shared .b8 buffer[4];", "not understood"),
        (".reg .b128 %q<2>;", "an unknown declaration"),
        ("{ add.s32 %r1, %r2, %r3; }", "no instruction that ends on its line"),
        ("add.s32 %r1,", "no instruction that ends on its line"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_with_its_line(line, why):
    text = text_of(f"mov.b32 %r1, 0;\n{line}", 1, n_threads=64)
    with pytest.raises(NotImplementedError) as error:
        Machine(Kernel(text))
    message = str(error.value)
    number = text.split("\n").index(line) + 1
    assert f"kernel, PTX line {number}: " in message and why in message, message


def test_numbers_beyond_a_cp_async_are_a_fault():
    body = COPY.replace("], 4;", "], 4, 8;").format(COMMIT_AND_WAIT)
    check_fault("cp.async reads 8 bytes", body)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120a"])
def test_architectures(target):
    assert Kernel(text_of("", target=target)).target == target.rstrip("a")


@pytest.mark.parametrize(
    "target, why",
    [("sm_100a", "tcgen05"), ("sm_75", "sm_75 is not emulated"), ("sm_103a", "sm_103a")],
)
def test_other_architectures_are_refused_by_name(target, why):
    with pytest.raises(NotImplementedError, match=f"kernel: .*{why}"):
        Kernel(text_of("", target=target))


def test_a_text_must_end():
    for end in ("", "@%p1 ret;\n", "bar.sync 0;\n"):
        text = text_of("mov.b32 %r1, 0;").replace("    ret;\n", end)
        with pytest.raises(NotImplementedError, match="does not end in ret"):
            Kernel(text)


def test_a_text_has_one_kernel():
    for other in (".visible .entry other()\n{ret;}\n", ".func helper()\n{ret;}\n"):
        with pytest.raises(NotImplementedError, match="another kernel, or a function"):
            Kernel(text_of("") + other)


def test_threads_are_whole_warps():
    with pytest.raises(NotImplementedError, match="40 threads are no whole warps"):
        Kernel(text_of("", n_threads=40))


def test_large_strides_cost_no_memory():
    """Two rows of a tensor that spans more than 2^31 elements of two bytes."""
    storage = np.zeros(2**31 + 64, np.int16)
    rows = torch.from_numpy(storage).as_strided((2, 32), (2**31, 1))
    body = """
        mov.u32 %r1, %tid.x;
        ld.param.b64 %rd1, [kernel_param_0];
        mad.wide.u32 %rd2, %r1, 2, %rd1;
        {}
        mov.b16 %rs1, 5;
        st.global.b16 [%rd2], %rs1;
    """
    launch(body.format("add.s64 %rd2, %rd2, 4294967296;"), rows)
    assert rows[1].tolist() == [5] * 32
    with pytest.raises(Fault, match="out of bounds"):
        launch(body.format("add.s64 %rd2, %rd2, 2147483648;"), rows)
