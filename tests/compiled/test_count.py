"""The counts of compiled kernels, compared with what can be worked out without them."""

import count
import predict
import pytest

pytestmark = pytest.mark.slow


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


def test_programs_go_to_the_first_free_multiprocessor():
    assert predict.schedule([1.0] * 5, 2) == 3
    assert predict.schedule([3.0, 1.0, 1.0, 1.0], 2) == 3
    assert predict.schedule([1.0, 1.0, 1.0, 3.0], 2) == 4
