"""kernels/flash.py under Triton's interpreter, on CPU tensors.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1. By default it runs small
cases that visit every kernel, kind of bias and mask; --all adds a sample of the large products, and
--exhaustive all of them (make kernels-all).
On a GPU, compiled: NANOLONG_GPU=1 python -m pytest -q tests/interpreted -n 8 --exhaustive
"""

import functools
import math
import random

import pytest
import reference
import torch
import torch.nn.functional as F
from kernel_cases import (
    LAYOUTS,
    bias_arguments,
    bias_leaves,
    case_name,
    error,
    in_levels,
    mask_options,
    pairwise_cases,
    random_inputs,
    random_layout,
    small_case,
)

import kernels
from kernels import check, flash, rotary
from kernels import reference as definition
from model import GPT, GPTConfig

slow = pytest.mark.slow
FACTORS = {
    "T": (1, 17, 63, 64, 65, 130),
    "cached": (0, 1, 37),
    "heads": ((1, 1), (3, 3), (6, 6), (12, 12), (4, 1)),
    "D": (7, 16, 40, 64, 128),
    "m": ("1", "5", "T", "more"),
    "bias": ("none", "slopes", "table", "gates"),
    "mask": ("causal", "window", "sinks", "docs", "all keys"),
    "layout": LAYOUTS,
    "gradient": (*LAYOUTS, "constant"),
    "dtype": ("float32", "float16", "bfloat16"),
}
N_PAIRWISE = 14  # with --all; the first cases have the most new pairs
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# Every kind of bias with several masks and dtypes.
SMALL_CASES = [
    small_case(mask="causal", gradient="constant"),
    small_case(mask="sinks", dtype="bfloat16", gradient="transposed"),
    small_case(mask="sinks", T=3),
    small_case(bias="slopes", mask="window", gradient="sliced"),
    small_case(bias="slopes", mask="all keys", cached=0),
    small_case(bias="slopes", mask="causal", T=3, cached=40, B=2, dtype="float16"),
    small_case(bias="table", mask="docs", heads=(2, 2)),
    small_case(bias="table", mask="causal", T=66, heads=(1, 1)),
    small_case(bias="table", mask="sinks", T=3, cached=70, B=2),
    # every distance is clipped, also in tiles at the main diagonal, which a cache has shifted
    small_case(bias="table", mask="causal", cached=37, m="1"),
    small_case(bias="gates", mask="causal", D=24, B=2),
    small_case(bias="gates", mask="sinks", T=66, gradient="sliced"),
    small_case(bias="gates", mask="window", T=3, cached=70, heads=(4, 2), dtype="bfloat16"),
]


def small_inputs(H=2, T=100, D=16, dtype=torch.float32):
    return [torch.randn(2, H, T, D).to(dtype).requires_grad_() for _ in range(3)]


# -----------------------------------------------------------------------------
# Against float64


def check_case(case):
    """Compare outputs, log-sum-exps and every gradient of a case with float64.

    The error may be twice that of the same formula in PyTorch at that dtype, and a rounding.
    """
    leaves, build, options = random_inputs(**case)
    dtype = leaves[0].dtype
    dy = random_layout(case["gradient"], *leaves[0].shape, dtype)
    dlse = torch.randn(dy.shape[:3]) * (dtype == torch.float32)

    def compute(attention, leaves):
        arguments, bias = build(*leaves)
        y, lse, *_ = attention(*arguments, **bias, **options)
        grads = torch.autograd.grad((y, lse), leaves, (dy.to(y.dtype), dlse.to(lse.dtype)))
        return [y, lse, *grads]

    exact = compute(reference.attention, [x.detach().double().requires_grad_() for x in leaves])
    plain = compute(functools.partial(definition.attention, return_lse=True), leaves)
    found = compute(functools.partial(flash.attention, return_lse=True), leaves)
    assert found[0].dtype == dtype and found[0].shape == dy.shape
    # A gradient of few numbers, each a sum of large terms of both signs: its size tells little of
    # what was rounded.
    is_small = case["m"] == "1" or case["T"] == 1 or case["bias"] == "slopes"
    cancels = dtype == torch.float32 and is_small
    names = ("y", "lse", "q", "k", "v", "bias")
    for name, x, by_pytorch, expected in zip(names, found, plain, exact, strict=False):
        cancels_here = cancels and name == "bias"
        bound = 2 * error(by_pytorch, expected) + ROUNDING[dtype] * (100 if cancels_here else 1)
        size = expected.numel() ** 0.5
        is_zero = float(expected.norm()) <= 1e-3 * size
        if is_zero and (dtype != torch.float32 or cancels_here):  # there is only rounding
            share = 1e-4 if dtype == torch.float32 else 0.1
            assert float((x - expected).norm()) <= share * size, name
        else:
            assert error(x, expected) <= bound, name


@pytest.mark.parametrize("case", SMALL_CASES, ids=case_name)
def test_small_cases_against_float64(case, rng, monkeypatch):
    """With few programs in the sweep, so that each of them visits several tiles."""
    monkeypatch.setattr(flash, "SWEEP_PROGRAMS", 1)
    random.seed(int(rng.integers(1 << 30)))
    check_case(case)


@pytest.mark.parametrize("case", in_levels(pairwise_cases(FACTORS), 0, N_PAIRWISE), ids=case_name)
def test_more_cases_against_float64(case, rng):
    random.seed(int(rng.integers(1 << 30)))
    check_case(case)


TILES = [("table", 16, 64), ("none", 64, 16), ("slopes", 16, 64), ("table", 128, 32)]


@pytest.mark.parametrize("bias,BM,BN", in_levels(TILES, n_fast=0, n_slow=2))
def test_tiles_of_any_size(bias, BM, BN, rng, monkeypatch):
    """The tiles of a sweep are square."""

    def tile_for(q, kind, kernel):
        is_sweep = kernel == "sweep" and kind == flash.TABLE.value
        return flash.Tile(*((64, 64) if is_sweep else (BM, BN)), warps=4, stages=1)

    monkeypatch.setattr(flash, "tile_for", tile_for)
    for mask in ("causal", "sinks", "docs", "all keys"):
        m = "T" if mask == "sinks" else "5"
        check_case(small_case(T=100, cached=37, m=m, bias=bias, mask=mask))


def test_delta_is_corrected(rng):
    """In gates, whose gradient adds up all that later queries have of keys before them.

    From an output rounded to 16 bits, delta would have an error that thousands of terms add up. The
    gradient has less than a third of what would come of it.
    """
    T, D = 160, 16
    q, k, v, dy = (torch.randn(1, 1, T, D).half() for _ in range(4))
    v = v + 4  # an output far from zero is rounded coarsely
    steps = F.logsigmoid(torch.randn(1, 1, T, dtype=torch.float64) + 4).requires_grad_()
    y = flash.attention(q, k, v, gates=steps.cumsum(2))
    (grad,) = torch.autograd.grad(y, steps, dy)
    q, k, v, dy = (x.double() for x in (q, k, v, dy))
    y, _, p = reference.attention(q, k, v, gates=steps.cumsum(2))
    (expected,) = torch.autograd.grad(y, steps, dy)

    delta_error = ((y.half().double() - y) * dy).sum(-1)
    later_mass = p.flip(-1).cumsum(-1).flip(-1)  # of keys from each one on
    uncorrected = (delta_error[:, :, None] @ later_mass)[:, :, 0]
    assert (grad - expected).norm() <= 0.3 * uncorrected.norm()


@pytest.mark.parametrize("Tq, Tk, bias", [(2, 75, "none"), (5, 131, "table"), (8, 67, "gates")])
def test_a_few_queries_with_a_cache(Tq, Tk, bias, rng):
    """Without gradient, as when a text is continued by several tokens at once."""
    q, k, v = torch.randn(2, 6, Tq, 16), torch.randn(2, 2, Tk, 16), torch.randn(2, 2, Tk, 16)
    leaves = bias_leaves(bias, 6, 30, 2, Tk)
    options = {"window": 40, "sinks": 3, "docs": torch.arange(Tk).expand(2, Tk) // 50}
    found = flash.attention(q, k, v, **bias_arguments(bias, leaves), **options, return_lse=True)
    wide = [x.double() for x in (q, k, v)]
    terms = bias_arguments(bias, [x.double() for x in leaves])
    exact = reference.attention(*wide, **terms, **options)
    for x, expected in zip(found, exact, strict=False):
        assert error(x, expected) <= 1e-6


# -----------------------------------------------------------------------------
# Which tiles are visited, and what follows from it


def visible_pairs(Tq, Tk, causal=True, window=0, sinks=0, docs=None):
    """(2, Tq, Tk): the keys that each query sees."""
    options = {"window": window, "sinks": sinks, "docs": docs, "causal": causal}
    rows = [reference.sees(i, Tk, **options).expand(2, Tk) for i in range(Tk - Tq, Tk)]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("mask", ["causal", "window", "sinks", "sinks and docs"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("BM,BN", [(32, 32), (64, 16), (16, 64)])
def test_visited_tiles_are_those_that_are_visible(mask, causal, BM, BN, rng, monkeypatch):
    """All of them, no empty one, and without a mask only whole ones."""
    random.seed(int(rng.integers(1 << 30)))
    monkeypatch.setattr(flash, "TILES_AT_ONCE", random.choice((1, 40, 1 << 22)))
    Tq, Tk = random.choice(((271, 271), (150, 271), (140, 170)))
    options = mask_options(mask, 2, Tk)
    # the largest distance of some tile is the window or just below it, the smallest m - 1 or m - 2
    offset = (Tk - Tq) % BN
    if options.get("window"):
        options["window"] = offset + BN + BM - 1 + random.choice((0, 1))
    m = random.choice((0, 1, offset + 128 - (BN - 1) + 1, offset + 128 - (BN - 1) + 2))
    pairs = visible_pairs(Tq, Tk, causal, **options)
    i, j = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)
    near = (i - j < m - 1) if m else torch.ones(Tq, Tk, dtype=torch.bool)
    where = (options.get("docs"), options.get("window", 0), options.get("sinks", 0))
    where += (Tq, Tk, m, causal, BM, BN)

    def by_tile(x, value_of_queries, value_of_keys):
        """(., tiles of queries, tiles of keys, BM BN), with these values past the end."""
        x = F.pad(x, (0, -Tk % BN), value=value_of_keys)
        x = F.pad(x, (0, 0, 0, -Tq % BM), value=value_of_queries)
        return x.unflatten(-1, (-1, BN)).unflatten(-3, (-1, BM)).transpose(-3, -2).flatten(-2)

    for of_keys in (False, True):
        some = by_tile(pairs, False, False).any(-1)
        # of a row's own tokens those past the end need no mask: they are not stored
        whole = by_tile(pairs, not of_keys, of_keys).all(-1)
        has_near = by_tile(near, False, False).any(-1)
        if of_keys:
            some, whole, has_near = some.mT, whole.mT, has_near.mT
        found = flash.tile_segments(*where, of_keys, some.device)[..., :10].unflatten(-1, (5, 2))
        at = torch.arange(some.shape[-1])
        segments = (at >= found[..., :1]) & (at < found[..., 1:])  # (., rows, 5, columns)
        assert (segments.sum(-2) <= 1).all()
        visited = segments.any(-2).expand_as(some)
        assert (visited | ~some).all()
        if not (mask == "sinks" and not causal):
            assert (some | ~visited).all()
        assert (whole | ~segments[..., 3:, :].any(-2)).all()
        assert not (segments[..., 4, :] & has_near).any()
        if mask in ("causal", "window") and m:
            assert (segments[..., 4, :] == (whole & ~has_near)).all()


# length of the longest document, and the other options
LAST_ENTRY_CASES = [(39, {}), (0, {"window": 39, "sinks": 1}), (40, {}), (0, {"window": 40})]
LAST_ENTRY_CASES += [(39, {"causal": False}), (50, {"window": 39})]


@pytest.mark.parametrize("length,options", in_levels(LAST_ENTRY_CASES, n_fast=2, n_slow=4))
def test_an_optimizer_leaves_entries_that_no_pair_reaches(length, options, rng):
    """A table of 40 distances. AdamW makes a step of a rounding error as of any gradient."""
    docs = torch.arange(90).expand(2, 90) // 25
    docs = torch.stack((docs[0], docs[1] + 100))
    docs[1, 20 : 20 + length] = 9
    options = {**options, "docs": docs} if length else options
    leaves, build, _ = random_inputs(
        **small_case(T=90, cached=0, heads=(1, 1), m="40", bias="table", B=2)
    )
    table = leaves[3]
    before = table.detach().clone()
    (q, k, v), terms = build(*leaves)
    flash.attention(q, k, v, **terms, **options).square().sum().backward()
    torch.optim.AdamW([table], weight_decay=0).step()

    distance = (torch.arange(90)[:, None] - torch.arange(90)).abs().clamp(max=39)
    reached = torch.zeros(40, dtype=torch.bool)
    reached[distance[visible_pairs(90, 90, **options).any(0)]] = True
    assert reached[:-1].all()
    assert ((table.detach() != before) == reached).all()


@pytest.mark.parametrize(
    "bias", in_levels(("gates", "table", "slopes", "none"), n_fast=1, n_slow=2)
)
def test_the_same_call_gives_the_same_bits(bias, rng):
    """And what comes later in the text changes nothing."""
    case = small_case(T=100, cached=0, heads=(1, 1), bias=bias, mask="docs")
    leaves, build, options = random_inputs(**case)
    (q, k, v), terms = build(*leaves)
    results = []
    for _ in range(2):
        y = flash.attention(q, k, v, **terms, **options)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        k[:, :, 70:] = math.nan
        v[:, :, 70:] = math.inf
    y = flash.attention(q, k, v, **terms, **options)
    assert torch.equal(y[:, :, :64], results[0][0][:, :, :64])  # tiles of 32


# -----------------------------------------------------------------------------
# Memory


def test_keys_far_apart_in_memory(rng):
    """Offsets past 2^31 elements: keys whose tokens are 2^23 elements apart.

    Tokens that are too far apart for 32-bit offsets in a block are copied.
    """
    memory = torch.empty(5 << 29, dtype=torch.float16)  # 5 GiB, of which a few pages are touched
    q, near = torch.randn(1, 1, 290, 16).half(), torch.randn(1, 1, 290, 16).half()
    for stride, T in ((1 << 23, 290), (1 << 24, 150)):
        q_T, near_T = q[:, :, :T], near[:, :, :T]
        far = memory.as_strided((1, 1, T, 16), (0, 0, stride, 1)).copy_(near_T)
        found = flash.attention(q_T, far, far)
        assert torch.equal(found, flash.attention(q_T, near_T, near_T))


# -----------------------------------------------------------------------------
# Errors


def test_unsupported_arguments_are_rejected():
    q, k, v = (x.detach() for x in small_inputs())
    gates = torch.zeros(2, 2, 100, dtype=torch.float64)
    for words, arguments, options in (
        ("float64", (q.double(), k.double(), v.double()), {}),
        ("do not fit", (q, k[:, :, :50], v[:, :, :50]), {}),
        ("use one of them", (q, k, v), {"bias": torch.ones(2), "gates": gates}),
        ("float64", (q, k, v), {"gates": gates.float()}),
        ("use one above 0", (q, k, v), {"scale": -1.0}),
        ("docs", (q, k, v), {"docs": torch.ones(2, 5).int()}),
    ):
        with pytest.raises(ValueError, match=words):
            flash.attention(*arguments, **options)


# -----------------------------------------------------------------------------
# The model


@pytest.mark.cases("kernels", slow=["scheme formulas"], exhaustive=["plain formulas"])
def test_schemes_train_and_generate_with_the_kernels(case, rng, monkeypatch):
    """With the model's own dispatch and documents: loss, gradients and text are the reference's."""
    model = case.model(n_head=2, n_kv_head=1, head_dim=16)
    tokens = torch.randint(0, 50, (1, 24))
    docs = None if model.config.sinks else torch.arange(24).expand(1, 24) // 9
    results = []
    calls = []
    for runs in (True, False):

        def triton_runs(device, runs=runs):
            calls.append(runs)
            return runs

        monkeypatch.setattr(kernels, "triton_runs", triton_runs)
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


CHECKED = [("t5", {}, torch.bfloat16)]
WINDOW = {"window": 50, "sinks": 4, "layer_pattern": "FW"}
for dtype in (torch.bfloat16, torch.float32):
    CHECKED += [(pos, WINDOW, dtype) for pos in ("rope", "t5", "fox")]


@pytest.mark.parametrize("pos, settings, dtype", in_levels(CHECKED, n_fast=0, n_slow=2), ids=str)
def test_the_check_before_the_first_call_passes(pos, settings, dtype):
    """tests/test_check.py has the faults that have to be found."""
    shape = {"n_head": 2, "n_kv_head": 1, "head_dim": 16}
    model = GPT(GPTConfig(pos=pos, **shape, **settings))
    try:
        assert check.find_fault(model, torch.empty(0).device, dtype) == ""
    finally:
        kernels.use_triton(True)


# -----------------------------------------------------------------------------
# The mask of a step


@pytest.fixture
def masks(monkeypatch):
    """A list that receives an item for each mask that is worked out from documents."""
    found = []
    tile_segments = flash.tile_segments

    def counted(docs, *where):
        found.append(where)
        return tile_segments(docs, *where)

    monkeypatch.setattr(flash, "tile_segments", counted)
    return found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize(
    "pos,settings,checkpointing", [("rope", {}, False), ("t5", {"window": 6}, True)]
)
def test_a_mask_is_worked_out_once_for_all_layers(
    compiled, pos, settings, checkpointing, make, masks, rng, monkeypatch
):
    """Once for the tiles of 32 x 32 and once for those of the kernel of dK and dV.

    A compiled model of checkpointed blocks does it again in the backward pass.
    """
    model = make(pos=pos, n_head=1, head_dim=16, **settings)
    model.activation_checkpointing = checkpointing
    # the partitioner of inductor, which merges equal calls
    backend = "aot_eager_decomp_partition"
    run = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
    tokens = torch.randint(0, 50, (2, 24))
    docs = torch.arange(24).expand(2, 24) // 9
    loss = run(tokens, tokens, docs=docs)
    loss.backward()
    assert len(masks) == (4 if compiled and checkpointing else 2)
    masks.clear()
    with torch.no_grad():
        without_grad = run(tokens, tokens, docs=docs)
        assert len(masks) == 1
        monkeypatch.setattr(kernels, "triton_runs", lambda device: False)
        expected = model(tokens, tokens, docs=docs)
    for x in (loss, without_grad):
        assert x.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_plan_holds_for_the_same_mask_only(rng):
    q, k, v = (x[:1] for x in small_inputs(H=1, T=40))
    docs, others = torch.arange(40)[None] // 18, torch.arange(40)[None] // 7
    shared = {}
    for of_docs, options in (
        (docs, {}),
        (others, {}),
        (docs, {"window": 5}),
        (docs, {"window": 5, "sinks": 34}),
        (docs, {"causal": False}),
        (docs, {"bias": torch.randn(1, 20)}),
    ):
        y = flash.attention(q, k, v, **options, docs=of_docs, shared=shared)
        assert torch.equal(y, flash.attention(q, k, v, **options, docs=of_docs))
    few = q[:, :, 24:]
    y = flash.attention(few, k, v, docs=docs, shared=shared)
    assert torch.equal(y, flash.attention(few, k, v, docs=docs))


@pytest.mark.parametrize("m, options", [(513, {}), (600, {"window": 500, "sinks": 3})])
def test_the_gradient_of_a_long_table(m, options, rng):
    """Summed in several blocks of distances."""
    q, k, v = torch.randn(1, 1, 20, 16), torch.randn(1, 1, 620, 16), torch.randn(1, 1, 620, 16)
    table, dy = torch.randn(1, m).requires_grad_(), torch.randn(1, 1, 20, 16)
    (grad,) = torch.autograd.grad(flash.attention(q, k, v, bias=table, **options), table, dy)
    q, k, v, wide = (x.detach().double() for x in (q, k, v, table))
    y, _, _ = reference.attention(q, k, v, bias=wide.requires_grad_(), **options)
    (exact,) = torch.autograd.grad(y, wide, dy.double())
    assert error(grad, exact) <= 1e-6


def test_compiled_attention_takes_documents_and_a_tensor_twice(rng):
    """In one graph; the segments of two kernels are then one tensor."""
    x, dy = torch.randn(1, 1, 40, 16).requires_grad_(), torch.randn(1, 1, 40, 16)
    docs = torch.arange(40).expand(1, 40) // 15
    compiled = torch.compile(flash.attention, fullgraph=True, backend="aot_eager")
    for options in ({}, {"docs": docs}):
        found, expected = (
            torch.autograd.grad(attend(x, x, x, **options), x, dy)[0]
            for attend in (compiled, definition.attention)
        )
        assert error(found, expected) <= 1e-5


def test_a_second_derivative_is_refused(rng):
    x = torch.randn(1, 2, 8, 16).requires_grad_()
    angles = torch.rand(8, 4)
    for y in (flash.attention(x, x, x), rotary.rope(x, x, angles, angles)[0]):
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()
