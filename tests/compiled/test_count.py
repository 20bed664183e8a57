"""The counts of compiled kernels, compared with what can be worked out without them."""

import count
import predict
import pytest


@pytest.fixture(scope="module")
def counts():
    """Counts of every kernel of attention with a table, sm_80, D = 64."""
    return count.count_attention("sm_80", "table", 64)


def test_products_of_a_tile_are_those_of_the_formula(counts):
    n_products = {"forward": 2, "dq": 3, "dkdv": 4, "sweep": 2}
    for kernel, counted in counts.items():
        BM, BN = counted.tile[:2]
        for loop in counted.loops:
            # 16 x 8 x 16 products an instruction
            done = loop.instructions["tensor"] * counted.warps * 2048
            assert done == n_products[kernel] * BM * BN * 64
            assert loop.cycles["tensor"] == done / 1024


def test_a_score_takes_one_exponential(counts):
    for kernel, counted in counts.items():
        BM, BN = counted.tile[:2]
        scores = BM * BN / (32 * counted.warps)
        for loop in counted.loops:
            # and two for each row that a thread holds, in the running softmax
            assert scores <= loop.instructions["exp"] <= scores + 8, (kernel, loop.name)


def test_whole_tiles_have_no_bank_conflicts(counts):
    for loop in counts["forward"].loops:
        assert loop.wavefronts == loop.least_wavefronts > 0


def test_scores_of_a_thread_at_one_distance_share_a_load_of_the_bias():
    """A thread has 2 rows, 8 apart, of 128 columns: scores at 2 x 17 distances instead of 256."""
    counted = count.count_attention("sm_90", "table", 64, ["forward"])["forward"]
    assert counted.tile[:3] == (128, 128, 8)
    masked, whole, clipped = counted.loops
    for loop in (masked, whole):
        assert loop.instructions["shared"] - clipped.instructions["shared"] <= 34 + 2


@pytest.mark.parametrize("kernel", count.KERNELS)
def test_turns_are_those_that_the_emulator_executes(counts, kernel):
    counted = counts[kernel]
    T = 6 * max(counted.tile[:2])
    if kernel != "forward":
        T = 6 * max(max(counts[x].tile[:2]) for x in counts if x != "forward")
    m = T // 2 + 1
    BM, BN = counted.tile[:2]
    if kernel == "sweep":
        programs = predict.sweep_turns(T, BM, m, 2, 1, 1)
    else:
        sweep_side = counts["sweep"].tile[0]
        programs = predict.turns_of(kernel, counted.tile, (2, 1, T, 64), m, sweep_side)
    assert len(programs) == counted.programs
    for loop, turns in zip(counted.loops, zip(*programs, strict=True), strict=True):
        # the compiler may peel the first turn of a loop
        peeled = sum(turn > 0 for turn in turns) if counted.outside.instructions["tensor"] else 0
        assert loop.turns in (sum(turns), sum(turns) - peeled), loop.name


def test_an_unknown_opcode_is_an_error():
    with pytest.raises(ValueError, match="QMMA.16832"):
        count.opcode_row("QMMA.16832.F32.E4M3.E4M3")


def test_machine_code_is_split_into_innermost_loops():
    sass = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0020*/              @!P0 FADD R2, R2, R3 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   BRA `(.L_x_3);
"""
    inner, outside = count.read_loops(sass)
    assert [[opcode for opcode, _ in loop] for loop in inner] == [["FADD", "BRA"]]
    assert [opcode for opcode, _ in outside] == ["MOV", "IADD3", "BRA", "BRA"]


def test_programs_go_to_the_first_free_multiprocessor():
    assert predict.schedule([1.0] * 5, 2) == 3
    assert predict.schedule([3.0, 1.0, 1.0, 1.0], 2) == 3
    assert predict.schedule([1.0, 1.0, 1.0, 3.0], 2) == 4


def test_matrix_instructions_of_a_warp_group_read_shared_memory():
    both = "R24, gdesc[UR4], R24, !UPT ;"
    right = "R24, R4, gdesc[UR4], R24 ;"
    assert count.warpgroup_bytes("HGMMA.64x128x16.F32.BF16", both) == 2 * 16 * (128 + 64)
    assert count.warpgroup_bytes("HGMMA.64x128x16.F32.BF16", right) == 2 * 16 * 128
    assert count.products("HGMMA.64x128x16.F32.BF16", "sm_90") == (16 * 128 * 16, 2048)
    assert count.products("HMMA.1688.F32.TF32", "sm_80") == (16 * 8 * 8, 512)
