"""The counts of compiled kernels, compared with what can be worked out without them."""

import count
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


# The turns of each program: what visited() and _sweep() of flash.py compute, for causal attention
# with a table, without windows and documents.


def ceil_div(a, b):
    return -(-a // b)


def key_turns(block, T, BM, BN, m):
    """Tiles of a query block: masked, whole, clipped."""
    i0 = block * BM
    hi = ceil_div(min(i0 + BM, T), BN)
    right = min(T // BN, (i0 + 1) // BN, hi)
    near = min(max(i0 - m + 2, 0) // BN, right)
    return hi - right, right - near, near


def query_turns(block, T, BM, BN, m):
    """Tiles of a key block: masked, masked at the last queries, whole, clipped."""
    n0 = block * BN
    n1 = n0 + BN - 1
    hi = ceil_div(T, BM)
    lo = n0 // BM
    left = hi
    if n1 < T:
        left = min(ceil_div(n1, BM), hi)
    right = max(min(T // BM, hi), left)
    near = min(max(ceil_div(n1 + m - 1, BM), left), right)
    return left - lo, hi - right, near - left, right - near


def sweep_turns(T, BM, m, B):
    """Tiles of each program of the sweep of one head: each takes a diagonal of B sequences."""
    n_diagonals = min(ceil_div(T, BM) - 1, (m - 2 + BM - 1) // BM) + 1
    return [(B * (ceil_div(T, BM) - diagonal),) for diagonal in range(n_diagonals)]


@pytest.mark.parametrize("kernel", count.KERNELS)
def test_turns_are_those_that_the_emulator_executes(counts, kernel):
    counted = counts[kernel]
    T = 6 * max(counted.tile[:2])
    if kernel != "forward":
        T = 6 * max(max(counts[x].tile[:2]) for x in counts if x != "forward")
    m = T // 2 + 1
    BM, BN = counted.tile[:2]
    if kernel == "sweep":
        programs = sweep_turns(T, BM, m, 2)
    elif kernel == "dkdv":
        programs = [query_turns(block, T, BM, BN, m) for block in range(ceil_div(T, BN))] * 2
    else:
        programs = [key_turns(block, T, BM, BN, m) for block in range(ceil_div(T, BM))] * 2
    assert len(programs) == counted.programs
    for loop, turns in zip(counted.loops, zip(*programs, strict=True), strict=True):
        # the compiler may peel the first turn of a loop
        peeled = sum(turn > 0 for turn in turns) if counted.outside.instructions["tensor"] else 0
        assert loop.turns in (sum(turns), sum(turns) - peeled), loop.name
