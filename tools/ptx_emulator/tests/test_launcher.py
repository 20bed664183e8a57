"""From Triton to the machine, and what is counted on the way."""

import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ptx_emulator import Fault, Launcher, counts, install, kind, loops
from ptx_emulator.counting import sectors, wavefronts
from ptx_emulator.launcher import programs
from small_kernels import evaluate, launch


@triton.jit
def _scale_kernel(X, Y, N, factor, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Y = factor * X, and the sum of each block's numbers in place of its first one."""
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < N if MASKED else x < N + 1
    value = tl.load(X + x, mask=mask, other=0.0) * factor
    total = tl.sum(value, 0)
    tl.store(Y + x, tl.where(x % BLOCK == 0, total, value), mask=mask)


def scale(x, y, n=None, masked=True):
    """Launch module.kernel as a module of kernels would."""
    n = len(x) if n is None else n
    module._scale_kernel[triton.cdiv(n, 64),](x, y, n, 2.5, BLOCK=64, MASKED=masked, num_warps=2)


module = types.SimpleNamespace(_scale_kernel=_scale_kernel, scale=scale)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_kernel_of_triton_is_compiled_and_executed(target):
    launcher = install(module, target, order="reversed")["_scale_kernel"]
    for n in (150, 160):  # divisible by 16, and not: other code
        x = torch.arange(n, dtype=torch.float32)
        y = torch.full((n,), torch.nan)
        module.scale(x, y)
        expected = 2.5 * x
        expected[::64] = torch.stack([2.5 * part.sum() for part in x.split(64)])
        assert torch.equal(y, expected)
        assert launcher.last[0] == (3, 1, 1) and launcher.last[1][0] is x
    assert launcher.launches == 2
    assert launcher.machine.kernel.target == target
    assert counts(launcher.machine)["shuffle"] > 0

    # a number more than there is
    with pytest.raises(Fault, match="read outside of X") as fault:
        module.scale(x, y, masked=False)
    assert "test_launcher.py:" in str(fault.value)

    # a fault on purpose, in the text
    launcher.edit = lambda text: text.replace("bar.sync", "// bar.sync")
    with pytest.raises(Fault, match="race"):
        module.scale(x, y)
    launcher.edit = None
    launcher.options["races"] = False
    module.scale(x, y)
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "n, expected",
    [(1, 1), (0, "i32:16"), (48, "i32:16"), (-16, "i32:16"), (7, "i32"), (2**31, "i64:16")],
)
def test_a_launch_is_specialized_on_its_arguments(n, expected):
    launcher = Launcher(_scale_kernel, "sm_80", execute=False)
    x = torch.zeros(32)
    launcher[1,](x[8:], x[1:], n, 16.0, BLOCK=64, MASKED=True)  # 32 bytes from the start, and 4
    found = {"*fp32:16": "X", "*fp32": "Y", expected: "N", "fp32": "factor"}
    assert launcher.specialization() == found
    assert launcher.machine is None  # nothing was executed


class Rows(NamedTuple):
    p: Any
    t: Any


class Call(NamedTuple):
    x: Rows
    absent: Rows
    y: Rows
    n: int
    WIDTH: tl.constexpr


@triton.jit
def _add_rows_kernel(a, factor, BLOCK: tl.constexpr):
    """y = x * factor (+ absent), for the first n rows of WIDTH numbers."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * a.x.t + tl.arange(0, a.WIDTH)[None, :]
    mask = (row < a.n)[:, None]
    value = tl.load(a.x.p + at, mask=mask, other=0.0) * factor
    if a.absent is not None:
        value += tl.load(a.absent.p + at, mask=mask, other=0.0)
    at = row[:, None] * a.y.t + tl.arange(0, a.WIDTH)[None, :]
    tl.store(a.y.p + at, value, mask=mask)


@pytest.mark.parametrize("has_absent", [False, True])
def test_members_of_tuples_are_arguments(has_absent):
    """None, constants and numbers of 1 are known at compile time; all others are parameters."""
    launcher = Launcher(_add_rows_kernel, "sm_80")
    x, y = torch.arange(140.0).view(7, 20)[:, :16], torch.full((7, 1, 16), torch.nan)
    absent = Rows(x, 20) if has_absent else None
    call = Call(Rows(x, 20), absent, Rows(y, y.stride(0)), 7, tl.constexpr(16))
    launcher[2,](call, 2.5, BLOCK=4, num_warps=1)
    assert torch.equal(y[:, 0], x * 2.5 + (x if has_absent else 0))
    names = "a.x.p a.absent.p a.y.p" if has_absent else "a.x.p a.y.p"
    expected = {"*fp32:16": names, "i32:16": "a.y.t", "fp32": "factor"}
    expected["i32"] = "a.x.t a.absent.t a.n" if has_absent else "a.x.t a.n"
    assert launcher.specialization() == expected | ({} if has_absent else {None: "a.absent"})

    with pytest.raises(Fault, match="read outside of a.x.p"):
        launcher[2,](call._replace(n=8), 2.5, BLOCK=4, num_warps=1)
    launcher[1,](call._replace(n=1, absent=None), 2.5, BLOCK=4, num_warps=1)
    assert launcher.specialization()[1] == "a.n"


def test_programs_can_run_in_another_order():
    assert programs((2, 1, 2)) == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert programs((2, 1, 2), "reversed") == programs((2, 1, 2))[::-1]
    shuffled = programs((5, 4, 3), 7)
    assert shuffled != programs((5, 4, 3)) and sorted(shuffled) == sorted(programs((5, 4, 3)))


def test_what_cannot_be_emulated_is_refused_by_name(monkeypatch):
    with pytest.raises(NotImplementedError, match="sm_100 is not emulated.*tcgen05"):
        Launcher(_scale_kernel, "sm_100")
    with pytest.raises(NotImplementedError, match="gfx942 is not emulated"):
        Launcher(_scale_kernel, "gfx942")
    with pytest.raises(TypeError, match="unknown options of a launcher: shuffel"):
        Launcher(_scale_kernel, "sm_80", shuffel=1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET turns the compiler off"):
        install(module, "sm_80")


# -----------------------------------------------------------------------------
# Counting.


def test_kinds():
    kinds = {
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "tensor",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": "tensor",
        "wgmma.wait_group.sync.aligned": "barrier",
        "ex2.approx.ftz.f32": "mufu",
        "ld.shared.b32": "shared",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "shared",
        "ld.global.v4.b32": "global",
        "ld.param.b64": "move",
        "cp.async.cg.shared.global": "copy",
        "cp.async.wait_group": "barrier",
        "fma.rn.f32": "fp32",
        "fma.rn.f32x2": "fp32",
        "add.s32": "integer",
        "setp.lt.s32": "integer",
        "cvt.rn.bf16x2.f32": "convert",
        "bra.uni": "control",
    }
    assert {name: kind(name) for name in kinds} == kinds


LOOP = """
    mov.b32 %r2, 0;
$OUTER:
    mov.b32 %r3, 0;
$INNER:
    add.f32 %r4, %r4, %r4;
    add.s32 %r3, %r3, 1;
    setp.lt.s32 %p1, %r3, 5;
    @%p1 bra $INNER;
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p2, %r2, 3;
    @%p2 bra $OUTER;
"""


def test_loops_and_instructions_are_counted_by_warps():
    machine = launch(LOOP, n_threads=64)
    (loop,) = loops(machine)
    lines = machine.kernel.text.split("\n")
    assert "add.f32" in lines[loop.first_line - 1] and "$INNER" in lines[loop.last_line - 1]
    assert loop.passes == 2 * 3 * 5
    assert loop.kinds == {"fp32": 1, "integer": 2, "control": 1}
    total = counts(machine)
    assert total["fp32"] == 2 * 15
    assert total["integer"] == 2 * (15 * 2 + 3 * 2)
    assert total["move"] == 2 * (1 + 3)
    assert total["control"] == 2 * (15 + 3 + 1)


LANES = np.arange(32)
ZEROS = np.zeros(32, int)


@pytest.mark.parametrize(
    "at, size, expected",
    [
        (4 * LANES, 4, (1, 1)),
        (0 * LANES, 4, (1, 1)),  # one word, read by all
        (8 * LANES, 4, (2, 1)),  # every second bank
        (128 * LANES, 4, (32, 1)),  # one bank
        (132 * LANES, 4, (1, 1)),  # rows of 33 words
        (2 * LANES, 2, (1, 1)),  # two threads to a word
        (8 * LANES, 8, (2, 2)),
        (16 * LANES, 16, (4, 4)),
        (128 * LANES, 16, (32, 4)),
        (128 * LANES + 16 * (LANES % 8), 16, (4, 4)),  # a swizzle
    ],
)
def test_wavefronts(at, size, expected):
    assert wavefronts(at, size, LANES, ZEROS) == expected


def test_wavefronts_of_several_warps_add_up():
    at = np.concatenate((4 * LANES, 8 * LANES))
    warps = np.repeat([0, 1], 32)
    assert wavefronts(at, 4, np.tile(LANES, 2), warps) == (3, 2)


@pytest.mark.parametrize(
    "offset, size, expected",
    [
        (4 * LANES, 4, (4, 4, 128)),
        (4 * LANES + 4, 4, (5, 4, 128)),  # off by one number
        (32 * LANES, 4, (32, 4, 128)),
        (0 * LANES, 4, (1, 1, 4)),
        (16 * LANES, 16, (16, 16, 512)),
    ],
)
def test_sectors(offset, size, expected):
    assert sectors(offset, size, ZEROS) == expected


def test_traffic_is_counted_by_line():
    instructions = "mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r1, 8, %r2; st.shared.b32 [%r3], 1;"
    evaluate(instructions, {"%r1": LANES}, ["%r1"], shared_bytes=256)
    machine = launch(
        "mov.u32 %r1, %tid.x;\n" + instructions.replace("st.shared", "\nst.shared"),
        shared_bytes=256,
        profile=True,
    )
    line = next(
        n for n, text in enumerate(machine.kernel.text.split("\n"), 1) if "st.shared" in text
    )
    assert machine.traffic == {(line, "wavefronts"): 2, (line, "least wavefronts"): 1}
