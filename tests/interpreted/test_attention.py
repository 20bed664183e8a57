"""kernels/flash.py and kernels/decode.py under Triton's interpreter, on CPU tensors.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1. By default it runs small
cases that visit every kernel, kind of bias and mask; --all adds a sample of the large products, and
--exhaustive all of them (make kernels-all).
On a GPU, compiled: NANOLONG_GPU=1 python -m pytest -q tests/interpreted -n 8 --exhaustive
"""

import itertools
import math
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    attention_errors,
    case_name,
    clipped_tail_error,
    error,
    in_levels,
    pairwise_cases,
    random_inputs,
    small_case,
    table_gradient_errors,
    valid_length_errors,
)

import kernels
from kernels import decode, flash, reference

slow = pytest.mark.slow


# -----------------------------------------------------------------------------
# Cases

FACTORS = {
    "T": (1, 17, 63, 64, 65, 130),
    "cached": (0, 1, 37),
    "heads": ((1, 1), (3, 3), (6, 6), (12, 12), (4, 1)),
    "D": (16, 40, 64, 80, 128),
    "m": ("1", "5", "T", "more"),
    "bias": ("none", "slopes", "table", "shaw", "xl"),
    "mask": ("causal", "window", "sinks", "docs", "positions", "all keys"),
    "gradient": ("whole", "expanded", "transposed", "sliced"),
    "dtype": ("float32", "float16", "bfloat16"),
}
PAIRWISE = list(pairwise_cases(FACTORS))
N_PAIRWISE = 14  # with --all; the first cases have the most new pairs


# Every kind of bias with several masks and dtypes. 3 queries: the decoding kernel, too.
SMALL_CASES = [
    small_case(mask="causal", gradient="expanded"),
    small_case(mask="sinks", dtype="bfloat16", gradient="transposed"),
    small_case(mask="positions", T=3),
    small_case(bias="slopes", mask="window", gradient="sliced"),
    small_case(bias="slopes", mask="all keys", cached=0),
    small_case(bias="slopes", mask="causal", T=3, cached=40, B=2, dtype="float16"),
    small_case(bias="table", mask="docs", heads=(2, 2)),
    small_case(bias="table", mask="causal", T=66, heads=(1, 1)),
    small_case(bias="table", mask="all keys", T=50, dtype="bfloat16"),
    small_case(bias="table", mask="sinks", T=3, cached=70, B=2),
    small_case(bias="shaw", mask="causal", T=66, heads=(1, 1)),
    small_case(bias="shaw", mask="window", T=3, cached=40, dtype="float16", B=2),
    small_case(bias="xl", mask="causal", T=66, heads=(1, 1)),
    small_case(bias="xl", mask="positions", T=3, cached=40, B=2),
]


def gradients(loss, leaves, bias=None):
    """Gradients of a sum of squares. Transformer-XL's u may have none."""
    return torch.autograd.grad(loss.square().sum(), leaves, allow_unused=bias == "xl")


# -----------------------------------------------------------------------------
# Against float64


def check(comparisons):
    for name, found, bound in comparisons:
        assert found <= bound, (name, found, bound)


def check_case(case):
    """Compare outputs, log-sum-exps and every gradient with float64."""
    check(attention_errors(case, flash.attention, decode.attention))


@pytest.mark.parametrize("case", SMALL_CASES, ids=case_name)
def test_small_cases_against_float64(case, rng, monkeypatch):
    """With few programs in the sweep, so that each of them visits several tiles."""
    monkeypatch.setattr(flash, "SWEEP_PROGRAMS", 1)
    random.seed(int(rng.integers(1 << 30)))
    check_case(case)


@pytest.mark.parametrize("case", in_levels(PAIRWISE, n_fast=0, n_slow=N_PAIRWISE), ids=case_name)
def test_pairwise_cases_against_float64(case, rng):
    random.seed(int(rng.integers(1 << 30)))
    check_case(case)


@pytest.mark.parametrize("part", in_levels(range(10), n_fast=0, n_slow=1))
def test_random_cases_against_float64(part, rng):
    """Cases sampled from the full product."""
    random.seed(int(rng.integers(1 << 30)))
    for _ in range(10):
        case = {name: random.choice(values) for name, values in FACTORS.items()}
        case["T"] = random.randint(1, 140)
        case["D"] = random.randint(1, 130)
        print(case)
        check_case(case)


TILES = [
    ("table", 16, 64),
    ("shaw", 64, 64),
    ("none", 64, 16),
    ("slopes", 16, 64),
    ("table", 64, 16),
    ("table", 128, 32),
    ("table", 32, 128),
]


@pytest.mark.parametrize("bias,BM,BN", in_levels(TILES, n_fast=0, n_slow=2))
def test_tiles_of_any_size(bias, BM, BN, rng, monkeypatch):
    """The tiles of a sweep and of vectors are square; those of dK and dV are not taller."""
    sizes = {"forward": (BM, BN), "dq": (BM, BN), "dkdv": (min(BM, 64), BN), "sweep": (64, 64)}
    if bias == "shaw":
        sizes = dict.fromkeys(flash.KERNELS, (BM, BM))

    def tile_for(family, itemsize, DP, kind, kernel, masked):
        return flash.Tile(*sizes[kernel], warps=4, stages=1)

    monkeypatch.setattr(flash, "tile_for", tile_for)
    for mask, m in (
        ("causal", "5"),
        ("sinks", "T"),
        ("docs", "5"),
        ("positions", "T"),
        ("all keys", "5"),
    ):
        check_case(small_case(T=100, cached=37, m=m, bias=bias, mask=mask))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("family,DP", sorted({key[:2] for key in flash.TILES}))
def test_tiles_fit_each_other(family, DP, masked):
    def tiles(kind):
        size = int(DP)
        return {x: flash.tile_for(family, 2, size, kind.value, x, masked) for x in flash.KERNELS}

    table = tiles(flash.TABLE)
    assert table["sweep"].BM % table["dkdv"].BM == 0
    vectors = tiles(flash.VECTORS)
    assert all(tile.BM == tile.BN for tile in (table["sweep"], *vectors.values()))
    assert vectors["dq"].BM == vectors["sweep"].BM


@pytest.mark.parametrize("D,pad", [(64, 0), (64, 1), (40, 0), (65, 0)])
def test_rows_reach_the_kernels_at_multiples_of_16_elements(D, pad):
    x = torch.randn(2, 3, 5, D + pad)[..., :D]
    y = flash._kernel_layout(x)
    assert torch.equal(x, y)
    assert all(stride % 16 == 0 for stride in y.stride()[:3]) and y.stride(3) == 1
    assert (y is x) == (D == 64 and pad == 0)  # no copy where none is needed


ONE_ENTRY_CASES = [
    small_case(T=70, cached=cached, m="1", bias=bias, mask=mask)
    for cached in (37, 1)
    for mask in ("causal", "all keys", "docs")
    for bias in ("table", "shaw", "xl")
]


@pytest.mark.parametrize("case", in_levels(ONE_ENTRY_CASES, n_fast=1, n_slow=2), ids=case_name)
def test_table_of_one_entry_with_a_cache(case, rng):
    """Every distance is clipped, also in tiles at the main diagonal, which a cache has shifted."""
    check_case(case)


# -----------------------------------------------------------------------------
# Properties


def small_inputs(H=2, T=100, D=16, dtype=torch.float32):
    return [torch.randn(2, H, T, D).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(
    "dtype,T,m",
    [
        (torch.float16, 60, 5),
        pytest.param(torch.float16, 100, 100, marks=slow),
        pytest.param(torch.float32, 100, 5, marks=slow),
        pytest.param(torch.float32, 100, 100, marks=slow),
    ],
)
def test_table_gradient_sums_to_zero(dtype, T, m, rng):
    check(table_gradient_errors(flash.attention, T, 16, m, dtype))


@slow
@pytest.mark.parametrize("vectors", [False, True])
def test_delta_is_corrected(vectors, rng):
    check([clipped_tail_error(flash.attention, H=1, T=500, D=16, vectors=vectors)])


@pytest.mark.parametrize(
    "bias", in_levels(("table", "xl", "shaw", "slopes", "none"), n_fast=0, n_slow=2)
)
def test_packed_documents_equal_separate_ones(bias, rng):
    """Three documents in one row equal the three alone, forward and backward.

    The same call gives the same bits, and what comes later in the text changes nothing.
    """
    leaves, build, _ = random_inputs(130, 0, (4, 2), 16, "5", bias, "causal", "float32", B=1)
    (q, k, v), terms = build(*leaves)
    docs = torch.tensor([[7] * 40 + [2] * 33 + [5] * 57])
    packed = flash.attention(q, k, v, **terms, docs=docs)
    parts = []
    for a, b in ((0, 40), (40, 73), (73, 130)):
        parts.append(flash.attention(*(x[:, :, a:b] for x in (q, k, v)), **terms))
    separate = torch.cat(parts, 2)
    assert error(packed, separate.double()) < 1e-6
    grads = gradients(packed, leaves, bias)
    for a, b in zip(grads, gradients(separate, leaves, bias), strict=True):
        # the gradient of a slope is a sum of thousands of numbers of both signs
        assert error(a, b.double()) < (3e-6 if a.dim() == 4 else 5e-5)

    again = flash.attention(q, k, v, **terms, docs=docs)
    assert torch.equal(packed, again)
    for a, b in zip(grads, gradients(again, leaves, bias), strict=True):
        assert torch.equal(a, b)

    before = flash.attention(q, k, v, **terms)
    with torch.no_grad():
        k[:, :, 90:] = math.nan
        v[:, :, 90:] = math.inf
    after = flash.attention(q, k, v, **terms)
    assert torch.equal(after[:, :, :64], before[:, :, :64])  # tiles of 32


def test_keys_far_apart_in_memory(rng):
    """Offsets past 2^31 elements: keys whose tokens are 2^23 elements apart.

    Tokens that are too far apart for 32-bit offsets in a block are copied.
    """
    memory = torch.empty(5 << 29, dtype=torch.float16)  # 5 GiB, of which a few pages are touched
    q, near = torch.randn(1, 1, 290, 16).half(), torch.randn(1, 1, 290, 16).half()
    for stride, T in ((1 << 23, 290), (1 << 24, 150)):
        q_T, near_T = q[:, :, :T], near[:, :, :T]
        far = memory.as_strided((1, 1, T, 16), (0, 0, stride, 1)).copy_(near_T)
        expected = flash.attention(q_T, near_T, near_T)
        assert torch.equal(flash.attention(q_T, far, far), expected)
        expected = decode.attention(q[:, :, :1], near_T, near_T)
        assert torch.equal(decode.attention(q[:, :, :1], far, far), expected)


@pytest.mark.parametrize(
    "n,mask",
    in_levels(itertools.product((37, 1, 149, 150), ("all", "none", "sinks")), n_fast=1, n_slow=2),
)
def test_decoding_with_a_valid_length(n, mask, rng):
    check(valid_length_errors(decode.attention, mask, n, torch.float32))


@pytest.mark.parametrize("document_length", [300, 120])
def test_decoding_over_several_splits(document_length, monkeypatch, rng):
    """Three splits of the keys; in the second case the queries see nothing of two of them."""
    monkeypatch.setattr(decode, "number_of_splits", lambda Tk, programs, BN: 3)
    q, k, v = torch.randn(2, 2, 3, 16), torch.randn(2, 1, 300, 16), torch.randn(2, 1, 300, 16)
    docs = torch.arange(300).expand(2, 300) // document_length
    y, lse = decode.attention(q, k, v, docs=docs, return_lse=True)
    expected, expected_lse = reference.attention(
        *(x.double() for x in (q, k, v)), docs=docs, return_lse=True
    )
    assert error(y, expected) < 1e-6 and error(lse, expected_lse) < 1e-6


@pytest.mark.parametrize("BM,BN", [(32, 32), (64, 16), (16, 64)])
def test_block_mask_leaves_no_empty_tile(BM, BN):
    """Of packed documents: exactly the tiles in which something is visible.

    And among the whole ones none that needs a mask.
    """
    T = 271
    docs = torch.cat((torch.zeros(1, 150), torch.ones(1, 51), torch.full((1, 70), 2)), 1).int()
    visible = (docs[:, :, None] == docs[:, None])[0].tril()
    tiles = F.pad(visible, (0, -T % BN, 0, -T % BM)).unflatten(1, (-1, BN)).unflatten(0, (-1, BM))
    tiles = tiles.transpose(1, 2).flatten(2)
    some, whole = tiles.any(-1), tiles.all(-1)
    for of_keys in (False, True):
        mask = flash.block_mask(docs, None, 0, 0, T, T, BM, BN, True, of_keys=of_keys)[0]
        if of_keys:
            some, whole = some.T, whole.T
        for (lo, left, right, hi), some_row, whole_row in zip(
            mask.tolist(), some, whole, strict=True
        ):
            assert torch.arange(len(some_row))[some_row].tolist() == list(range(lo, hi))
            assert lo <= left <= right <= hi
            assert whole_row[left:right].all() and whole_row.sum() == right - left


# -----------------------------------------------------------------------------
# torch.library, torch.compile, errors and the model


@slow
def test_operators_pass_opcheck(rng):
    q, k, v = (torch.randn(2, 40, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    table, keys = torch.randn(4, 7, requires_grad=True), torch.randn(1, 5, 16, requires_grad=True)
    docs = torch.zeros(2, 40, dtype=torch.int32)
    for arguments in (
        (q, None, k, v, None, None, None, None, 0, 0, True, 0.25),
        (q, None, k, v, table, None, None, docs, 9, 1, True, 0.25),
        (q, q.detach(), k, v, keys, keys, None, None, 0, 0, False, 0.25),
    ):
        results = torch.library.opcheck(flash._attention, arguments)
        assert set(results.values()) == {"SUCCESS"}
    few = q.detach()[:, :, :2]
    k, v, table = k.detach(), v.detach(), table.detach()
    length = torch.tensor([30])
    arguments = (few, None, k, v, table, None, None, None, 0, 0, True, 0.25, length)
    results = torch.library.opcheck(decode._decode, arguments)
    assert set(results.values()) == {"SUCCESS"}


@slow
def test_attention_compiles_to_one_graph(rng):
    """With the dispatch in it, at a length that varies."""
    q, k, v = (torch.randn(2, 40, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    table = torch.randn(4, 7, requires_grad=True)

    def attend(q, k, v, table):
        return kernels.attention(q, k, v, bias=table)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (40, 33):
        parts = [x[:, :, :T] for x in (q, k, v)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch.compile looks at that of our slices
            warnings.filterwarnings("ignore", "The .grad attribute")
            grads = gradients(compiled(*parts, table), (q, k, v, table))
        expected = gradients(flash.attention(*parts, bias=table), (q, k, v, table))
        for a, b in zip(grads, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("attention", [flash.attention, decode.attention], ids=["flash", "decode"])
def test_unsupported_arguments_are_rejected(attention):
    q, k, v = (x.detach() for x in small_inputs())
    wide = [x.repeat(1, 1, 1, 20) for x in (q, k, v)]
    two_biases = {"bias": torch.ones(2), "relative": (torch.ones(1, 3, 16), None, None)}
    for words, arguments, options in (
        ("float64", (q.double(), k.double(), v.double()), {}),
        ("the same for all", (q, k.half(), v), {}),
        ("do not fit", (q, k[:, :, :50], v[:, :, :50]), {}),
        ("do not fit", (q[:, :1], k, v), {}),
        ("do not fit", wide, {}),
        ("use one of them", (q, k, v), two_biases),
        ("use one above 0", (q, k, v), {"scale": -1.0}),
        ("use slopes", (q, k, v), {"bias": torch.ones(3)}),
        ("docs", (q, k, v), {"docs": torch.ones(2, 5).int()}),
        ("positions", (q, k, v), {"positions": torch.ones(100), "window": 3}),
        ("relative keys", (q, k, v), {"relative": (torch.ones(3, 3, 16), None, None)}),
    ):
        with pytest.raises(ValueError, match=words):
            attention(*arguments, **options)


def test_decoding_with_a_gradient_is_rejected():
    q, k, v = small_inputs()
    with pytest.raises(ValueError, match="requires a gradient"):
        decode.attention(q, k, v)


def test_empty_batch():
    q, k, v = small_inputs()
    assert flash.attention(q[:0], k[:0], v[:0]).shape == (0, 2, 100, 16)


SCHEMES = (
    *("nope", "alibi", "t5", "kerple", "kerple-power", "sandwich"),
    *("shaw", "nezha", "xl", "learned", "sinusoidal"),
)
WINDOW = {"window": 6, "sinks": 2, "n_kv_head": 2}
MODELS = [
    ("rope", {}),
    ("rope", {"n_kv_head": 2, "rope_fraction": 0.5}),
    ("rope", WINDOW),
    *((pos, {}) for pos in SCHEMES),
    *((pos, WINDOW) for pos in SCHEMES),
]


@pytest.mark.parametrize(
    "pos,settings", in_levels(MODELS, n_fast=1, n_slow=2 + len(SCHEMES)), ids=str
)
def test_schemes_train_and_generate_with_the_kernels(pos, settings, make, rng, monkeypatch):
    """With the model's own dispatch and documents: loss, gradients and text are the reference's."""
    tokens = torch.randint(0, 50, (2, 24))
    docs = torch.arange(24).expand(2, 24) // 9
    model = make(pos=pos, head_dim=16, **settings)
    results = []
    calls = []
    for runs in (True, False):

        def triton_runs(*device, runs=runs):
            calls.append(runs)
            return runs

        monkeypatch.setattr(kernels, "_triton_runs", triton_runs)
        model.zero_grad()
        loss = model(tokens, tokens, docs=docs)
        loss.backward()
        text = torch.cat(list(model.generate(tokens[:, :12], 5, temperature=0)), 1)
        results.append((text, [loss.detach(), *(p.grad.clone() for p in model.parameters())]))
    assert set(calls) == {True, False}
    (text, numbers), (expected_text, expected) = results
    assert torch.equal(text, expected_text)
    for a, b in zip(numbers, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().clamp(min=0.1))
