"""What is checked of the compiled kernels: CHECKS, by name.

Their levels (see kernel_cases.py) say when they run. test_mutations.py runs the same checks on
kernels with a fault in them.
"""

import itertools
from unittest import mock

import execution
import torch
from execution import Check
from kernel_cases import (
    ROTARY_LIMITS,
    ROTARY_SHAPES,
    Comparison,
    attention_errors,
    bias_arguments,
    clipped_tail_error,
    error,
    pairwise_cases,
    random_inputs,
    rotary_errors,
    rotate_by_complex_numbers,
    small_case,
    table_gradient_errors,
    valid_length_errors,
)

from kernels import reference

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


def attention_check(target, level="slow", sweep_programs=512, splits=None, **changes):
    """A case of attention. splits: over how many programs decoding splits the keys."""
    case = small_case(**{"D": 64, "cached": 0, "dtype": "bfloat16", **changes})

    def compare(modules):
        attention, decode_attention = modules.flash.attention, modules.decode.attention
        backward = case.get("backward", True)
        return attention_errors(case, attention, decode_attention, backward, by_row=True)

    compare = execution.with_setting("flash", "SWEEP_PROGRAMS", sweep_programs, compare)
    if splits:
        number_of_splits = lambda *_: splits  # noqa: E731
        compare = execution.with_setting("decode", "number_of_splits", number_of_splits, compare)
    return Check(target, compare, level)


# -----------------------------------------------------------------------------
# The fast checks: every kernel, sm_80 (mma.sync, cp.async) and sm_90 (wgmma)


def fast_checks():
    """Name -> Check. Tiles have up to 128 queries and 128 keys, so 150 tokens are two blocks."""
    return {
        "none, float16, sm_90": attention_check(
            "sm_90", "fast", T=150, cached=37, dtype="float16", layout="contiguous",
            gradient="sliced",
        ),
        "slopes, grouped queries, sm_80": attention_check(
            "sm_80", "fast", T=150, bias="slopes", D=40, heads=(4, 2), layout="sliced"
        ),
        "table, one sweep, sm_80": attention_check(
            "sm_80", "fast", T=208, bias="table", m="3", dtype="float16", sweep_programs=1, B=2
        ),
        "table, window, sinks and documents, sm_90": attention_check(
            "sm_90", "fast", T=150, cached=20, bias="table", m="T", mask="sinks and docs"
        ),
        "xl, forward, sm_80": attention_check(
            "sm_80", "fast", T=100, bias="xl", m="40", dtype="float16", backward=False
        ),
        "decode, table, sm_80": attention_check(
            "sm_80", "fast", T=2, cached=400, bias="table", heads=(4, 2), B=2, splits=3,
            layout="expanded", backward=False,
        ),
        "rotary, bfloat16, sm_80": rotary_check("sm_80", "fast", (2, 5, 1, 37, 64, 64)),
        "rotary, float32, sm_90": rotary_check(
            "sm_90", "fast", (1, 3, 3, 19, 40, 10), dtype=torch.float32, layout="odd"
        ),
    }  # fmt: skip


def rotary_check(target, level, shape, dtype=torch.bfloat16, per_sequence=True, layout="model"):
    def compare(modules):
        return rotary_errors(shape, dtype, per_sequence, modules.rotary.rope, layout)

    return Check(target, compare, level)


# -----------------------------------------------------------------------------
# What a model launches: test_aot.py compares what Triton compiles for them

# A bias, and its entries or distances: Shaw's 129 are not divisible by 16, the others are as many
# as tokens.
MODEL_BIASES = {"none": "T", "slopes": "T", "table": "T", "shaw": "33", "xl": "T"}


def model_checks():
    """A training step and a decoded token of two sequences, with each bias."""
    checks = {}
    for target, bias in itertools.product(("sm_80", "sm_90"), MODEL_BIASES):
        case = {"bias": bias, "m": MODEL_BIASES[bias], "heads": (2, 2), "B": 2}
        checks[f"training, {bias}, {target}"] = attention_check(target, T=144, **case)
        level = "fast" if target == "sm_80" else "slow"
        checks[f"decoding, {bias}, {target}"] = Check(target, decoding_a_token(**case), level)
    return checks


def decoding_a_token(**case):
    """One query of each sequence, over a cache that is not full."""

    def compare(modules):
        n = 77
        leaves, build, _ = random_inputs(
            T=1, cached=143, D=64, mask="causal", dtype="bfloat16", **case
        )

        def arguments(dtype, n):
            (q, k, v), terms = build(*(x.detach().to(dtype) for x in leaves))
            return (q, k[:, :, :n], v[:, :, :n]), terms

        inputs, terms = arguments(torch.bfloat16, None)
        length = torch.tensor([n])
        y, lse = modules.decode.attention(*inputs, **terms, length=length, return_lse=True)
        inputs, terms = arguments(torch.float64, n)
        expected, expected_lse = reference.attention(*inputs, **terms, return_lse=True)
        yield Comparison("decoded y", error(y, expected), 1.2e-2)
        yield Comparison("decoded lse", error(lse, expected_lse), 1e-2)

    return compare


# -----------------------------------------------------------------------------
# Every pair of factors

FACTORS = {
    "target": ARCHITECTURES,
    "T": (1, 17, 65, 131, 208, 300),
    "cached": (0, 1, 37),
    "heads": ((1, 1), (3, 3), (4, 1), (6, 2)),
    "D": (16, 40, 64, 80, 128, 256),
    "m": ("1", "3", "40", "T", "more"),
    "bias": ("none", "slopes", "table", "shaw", "xl"),
    "mask": ("causal", "window", "sinks", "docs", "sinks and docs", "positions", "all keys"),
    "layout": ("model", "contiguous", "sliced", "expanded", "odd", "transposed"),
    "gradient": ("whole", "expanded", "transposed", "sliced"),
    "dtype": ("float32", "float16", "bfloat16"),
    "sweep_programs": (1, 512),
    "splits": (None, 3),
}
MAX_COST = 24e6  # some seconds


def is_affordable(case):
    """Whether the products of a case are few enough to be emulated in seconds."""
    cost = case["heads"][0] * (case["T"] + case["cached"]) ** 2 * case["D"]
    if case["bias"] in ("shaw", "xl"):
        cost *= 4
    if case["dtype"] == "float32":
        cost *= 3
    return cost <= MAX_COST


PAIRWISE = list(pairwise_cases(FACTORS, allowed=is_affordable))
N_PAIRWISE = 14  # with --all; the first cases have the most new pairs


def pairwise_checks():
    checks = {}
    for case in PAIRWISE:
        name = " ".join(str(x).replace(" ", "") for x in case.values())
        n_sequences = 2 if case["T"] < 100 else 1
        if case["T"] == 1:  # with few numbers, a sum of them may cancel by chance
            n_sequences = 16 if case["heads"][0] * case["D"] <= 128 else 4
        level = "slow" if len(checks) < N_PAIRWISE else "exhaustive"
        checks[name] = attention_check(**case, B=n_sequences, level=level)
    return checks


def rotary_checks():
    """Every shape with every dtype; architectures, positions and layouts in turn."""
    checks = {}
    layouts = itertools.cycle(("model", "contiguous", "sliced", "odd", "transposed", "expanded"))
    targets = itertools.cycle(ARCHITECTURES)
    for shape, dtype in itertools.product(ROTARY_SHAPES, ROTARY_LIMITS):
        target, layout = next(targets), next(layouts)
        per_sequence = len(checks) % 2 == 0
        name = f"rotary {shape} {str(dtype)[6:]} {per_sequence} {layout} {target}"
        checks[name] = rotary_check(target, "exhaustive", shape, dtype, per_sequence, layout)
    return checks


# -----------------------------------------------------------------------------
# Properties


def random_queries_keys_values(B, H, T, D, dtype):
    return [torch.randn(B, H, T, D).to(dtype).requires_grad_() for _ in range(3)]


def table_gradient_sums_to_zero(modules):
    return table_gradient_errors(modules.flash.attention, 200, 64, 5, torch.float16)


def clipped_tail(modules):
    yield clipped_tail_error(modules.flash.attention, H=4, T=200, D=64, fraction=0.05)


def clipped_tail_of_vectors(modules):
    yield clipped_tail_error(modules.flash.attention, H=4, T=200, D=64, fraction=0.1, vectors=True)


def results_and_exact(attention, leaves):
    """The output and the gradients of attention: (name, found, in float64) of each.

    leaves: queries, keys, values, and perhaps a table.
    """
    dy = torch.randn_like(leaves[0])

    def run(attention, leaves):
        q, k, v, *table = leaves
        y = attention(q, k, v, **bias_arguments("table" if table else "none", table))
        return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    exact = run(reference.attention, [x.detach().double().requires_grad_() for x in leaves])
    names = ("y", "q", "k", "v", "bias")
    return list(zip(names, run(attention, leaves), exact, strict=False))


def large_constant_in_the_table(modules):
    """Scores of 200: 2^288 overflows, so queries past the last must not count, not even as 0."""
    table = (torch.randn(2, 7) + 200).requires_grad_()
    leaves = [*random_queries_keys_values(1, 2, 70, 64, torch.bfloat16), table]
    for name, x, exact in results_and_exact(modules.flash.attention, leaves):
        yield Comparison(name, error(x, exact), 2e-2)


def rounds_to_nearest(modules):
    """The errors of outputs and gradients have no direction: in units of the last place.

    Rounding towards zero, of probabilities or of the output, would make all of them smaller.
    """
    leaves = random_queries_keys_values(1, 4, 150, 64, torch.bfloat16)
    for name, x, exact in results_and_exact(modules.flash.attention, leaves):
        large = exact.abs() > 0.3 * exact.square().mean().sqrt()  # small ones are differences
        last_place = 2.0 ** (exact.abs().log2().floor() - 7)
        growth = (x.double() - exact) * exact.sign() / last_place
        yield Comparison(f"mean growth of {name}", abs(float(growth[large].mean())), 0.05)


def decoding_with_a_valid_length(modules):
    for mask in ("none", "sinks"):
        yield from valid_length_errors(modules.decode.attention, mask, 67, torch.bfloat16, D=64)


def decoding_over_many_splits(modules):
    """1,100 keys: as many splits as decoding chooses itself."""
    q, k, v = (torch.randn(1, 2, T, 64).bfloat16() for T in (1, 1100, 1100))
    y, lse = modules.decode.attention(q, k, v, return_lse=True)
    expected, expected_lse = reference.attention(*(x.double() for x in (q, k, v)), return_lse=True)
    yield Comparison("decoded y", error(y, expected), 1.2e-2)
    yield Comparison("decoded lse", error(lse, expected_lse), 1e-2)


def sparse_memory(elements):
    """Uninitialised bfloat16 of which only the pages that are used exist."""
    setting = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    memory = torch.empty(elements, dtype=torch.bfloat16)
    torch.utils.deterministic.fill_uninitialized_memory = setting
    return memory


def far_apart(modules, q, k, far_q, far_k):
    """Compare with float64: far_q and far_k are copies of q and k with large strides."""
    with torch.no_grad():
        y = modules.flash.attention(far_q, far_k, far_k)
        few = modules.decode.attention(far_q[:, :, -1:], far_k, far_k)
    expected = reference.attention(*(x.double() for x in (q, k, k)))
    yield Comparison("y", error(y, expected), 1.2e-2)
    yield Comparison("decoded y", error(few, expected[:, :, -1:]), 1.2e-2)


def keys_far_apart(modules):
    """Tokens 2^23 elements apart: the offsets of the last ones pass 2^31."""
    T, stride = 270, 1 << 23
    q, k = (torch.randn(1, 1, T, 16).bfloat16() for _ in range(2))
    far = sparse_memory(T * stride).as_strided(k.shape, (0, 0, stride, 1)).copy_(k)
    return far_apart(modules, q, k, q, far)


def heads_far_apart(modules):
    """Heads 2^30 elements apart."""
    near = torch.randn(1, 3, 40, 16).bfloat16()
    far = sparse_memory((2 << 30) + 640).as_strided(near.shape, (0, 1 << 30, 16, 1)).copy_(near)
    return far_apart(modules, near, near, far, far)


def results_far_apart(modules):
    """Outputs and gradients whose tokens are 2^23 elements apart."""
    T, stride = 270, 1 << 23
    leaves = random_queries_keys_values(1, 1, T, 16, torch.bfloat16)

    def far_output(x):
        return sparse_memory(T * stride).as_strided(x.shape, (0, 0, stride, 1))

    with mock.patch.object(modules.flash, "empty_output", far_output):
        results = results_and_exact(modules.flash.attention, leaves)
    for name, x, exact in results:
        yield Comparison(name, error(x, exact), 2e-2)


def rotary_far_apart(modules):
    """Heads of the queries 2^30 elements apart, tokens of the keys 2^26."""
    q, k = torch.randn(1, 3, 40, 16).bfloat16(), torch.randn(1, 1, 40, 16).bfloat16()
    far_q = sparse_memory((2 << 30) + 640).as_strided(q.shape, (0, 1 << 30, 16, 1)).copy_(q)
    far_k = sparse_memory(40 << 26).as_strided(k.shape, (0, 0, 1 << 26, 1)).copy_(k)
    angle = torch.rand(40, 8)
    with torch.no_grad():
        results = modules.rotary.rope(far_q, far_k, angle.cos(), angle.sin())
    for name, x, near in zip("qk", results, (q, k), strict=True):
        expected = rotate_by_complex_numbers(near.double(), angle.double(), 1.0)
        yield Comparison(name, error(x, expected), 8e-3)


def property_checks():
    return {
        "table gradient sums to zero, sm_80": Check("sm_80", table_gradient_sums_to_zero),
        "clipped tail of the table's gradient, sm_80": Check("sm_80", clipped_tail),
        "clipped tail of the vectors' gradient, sm_80": Check("sm_80", clipped_tail_of_vectors),
        "large constant in the table, sm_80": Check("sm_80", large_constant_in_the_table),
        "rounds to nearest, sm_80": Check("sm_80", rounds_to_nearest),
        "rounds to nearest, sm_90": Check("sm_90", rounds_to_nearest),
        "decoding with a valid length, sm_90": Check("sm_90", decoding_with_a_valid_length),
        "decoding over many splits, sm_80": Check("sm_80", decoding_over_many_splits),
        "two heads, two sequences, sm_80": attention_check(
            "sm_80", T=40, B=2, heads=(4, 2), bias="table", mask="sinks", layout="contiguous"
        ),
        "shaw, sm_80": attention_check(
            "sm_80", T=150, bias="shaw", m="5", D=40, dtype="float16", sweep_programs=1
        ),
        "float32, sm_80": attention_check("sm_80", T=70, cached=9, dtype="float32"),
        "table of 3 entries, float32, sm_80": attention_check(
            "sm_80", T=100, D=16, dtype="float32", bias="table", m="3", sweep_programs=1
        ),
        "all keys, sm_80": attention_check("sm_80", T=70, bias="slopes", mask={"causal": False}),
        "window, sm_80": attention_check("sm_80", T=300, mask={"window": 200}),
        "sinks, sm_80": attention_check("sm_80", T=200, mask={"window": 20, "sinks": 3}),
        "documents, sm_80": attention_check(
            "sm_80", T=150, mask={"docs": (torch.arange(150) // 100)[None]}
        ),
        "table and positions, sm_80": attention_check(
            "sm_80", T=200, bias="table", m="T",
            mask={"window": 20, "sinks": 3, "positions": 2 * torch.arange(200)},
        ),
        "table and documents, sm_80": attention_check(
            "sm_80", T=150, bias="table", m="40", mask={"docs": (torch.arange(150) // 100)[None]}
        ),
        "table, splits, sm_80": attention_check(
            "sm_80", T=200, bias="table", m="40", heads=(2, 2), sweep_programs=12
        ),
        "odd rows, sm_90": attention_check(
            "sm_90", T=131, cached=1, D=128, dtype="float16", layout="odd", gradient="transposed"
        ),
        "rotary, every channel, sm_90": rotary_check("sm_90", "slow", (1, 3, 3, 19, 80, 80)),
        "keys far apart in memory, sm_80": Check("sm_80", keys_far_apart),
        "results far apart in memory, sm_80": Check("sm_80", results_far_apart),
        "heads far apart in memory, sm_80": Check("sm_80", heads_far_apart),
        "rotary, far apart in memory, sm_80": Check("sm_80", rotary_far_apart),
    }  # fmt: skip


CHECKS = {
    **fast_checks(),
    **model_checks(),
    **property_checks(),
    **rotary_checks(),
    **pairwise_checks(),
}
