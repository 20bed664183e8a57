"""kernels/reference.py, eager.py and relative vectors, compared with reference.py of the tests."""

import itertools
import math
import random

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import assert_success, run_python
from kernel_cases import bias_arguments, bias_leaves, error, mask_options

import kernels
import model
from kernels import eager
from kernels import reference as definition


def case_name(case):
    return " ".join(f"{name}={value}" for name, value in case.items()) or "plain"


# -----------------------------------------------------------------------------
# Attention


ATTENTION_CASES = [
    {},
    {"Tq": 1},
    {"causal": False},
    {"causal": False, "Tq": 20},
    {"bias": "slopes", "Tq": 2, "Hk": 2},
    {"bias": "slopes", "causal": False},
    {"bias": "slopes", "causal": False, "Tq": 20},
    {"bias": 1},
    {"bias": 5},
    {"bias": 40, "Tq": 4},
    {"bias": 5, "causal": False},
    {"bias": 5, "causal": False, "Tq": 20},
    {"window": 4, "sinks": 2},
    {"window": 4, "sinks": 1, "Tq": 3},
    {"window": 6, "Tq": 5},
    {"docs": True},
    {"docs": True, "bias": 5, "window": 3, "Tq": 6},
    {"docs": True, "bias": "slopes", "Hk": 2, "sinks": 1, "window": 5},
    {"gates": True, "Tq": 1, "Hk": 2},
    {"gates": True, "causal": False},
    {"gates": True, "window": 4, "sinks": 2, "Tq": 9},
    {"gates": True, "docs": True, "Hk": 1},
]


RELATIVE_CASES = [  # test_reference.py has more masks
    {},
    {"m": 5, "heads": 1, "docs": True, "Hk": 3},
    {"values": False, "offsets": True, "Tq": 4, "Hk": 2, "scale": 0.3},
    {"window": 6, "sinks": 1, "Hk": 1, "m": 1},
    {"window": 6, "Tq": 5, "m": 5, "docs": True},
    {"Tq": 1, "offsets": True, "Hk": 2, "docs": True},
    {"Tq": 1, "m": 5, "window": 4, "sinks": 2, "heads": 1},
]


def random_mask(case, B, Tk, rng):
    """The options of a case that say which keys a query sees."""
    docs = None
    if case.get("docs"):
        docs = torch.tensor([sorted(rng.integers(0, 3, Tk)) for _ in range(B)])
    options = {"window": case.get("window", 0), "sinks": case.get("sinks", 0)}
    return {**options, "docs": docs, "causal": case.get("causal", True)}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(outputs, leaves, weights):
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=case_name)
def test_attention_and_its_gradients_match_loops(case, rng, monkeypatch):
    """With the log-sum-exp: in one chunk of queries, in several, and with little memory."""
    B, H, Tk, D = 2, 6, 13, 7
    Tq, Hk = case.get("Tq", Tk), case.get("Hk", H)
    q, k, v = leaf(B, H, Tq, D), leaf(B, Hk, Tk, D), leaf(B, Hk, Tk, D)
    bias = None
    if "bias" in case:
        bias = leaf(H) if case["bias"] == "slopes" else leaf(H, case["bias"])
    options = {**random_mask(case, B, Tk, rng), "scale": case.get("scale", D**-0.5)}
    terms = {"bias": bias, "gates": leaf(B, H, Tk) if case.get("gates") else None}
    leaves = [x for x in (q, k, v, *terms.values()) if x is not None]
    weights = [torch.randn(B, H, Tq, D), torch.randn(B, H, Tq)]
    expected = reference.attention(q, k, v, **terms, **options)[:2]
    expected_grads = gradients(expected, leaves, weights)
    found = definition.attention(q, k, v, **terms, **options, return_lse=True)
    assert largest_difference(found, expected) < 1e-12
    only_y = gradients(found[:1], leaves, weights[:1])
    for chunk, max_scores in ((128, 1 << 24), (4, 1 << 24), (128, 500)):
        monkeypatch.setattr(eager, "CHUNK", chunk)
        monkeypatch.setattr(eager, "MAX_SCORES", max_scores)
        y, lse = eager.attention(q, k, v, **terms, **options, return_lse=True)
        assert largest_difference((y, lse), expected) < 1e-12
        assert largest_difference(gradients((y, lse), leaves, weights), expected_grads) < 1e-11
        y = eager.attention(q, k, v, **terms, **options)
        assert largest_difference(gradients([y], leaves, weights[:1]), only_y) < 1e-11
        with torch.no_grad():
            y = eager.attention(q, k, v, **terms, **options)
        assert (y - expected[0]).abs().max() < 1e-12

    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        low = [x.detach().to(dtype) for x in (q, k, v)]
        y = kernels.attention(*low, **terms, **options)
        assert y.dtype == dtype
        assert (y - expected[0]).norm() / expected[0].norm() < limit


@pytest.mark.parametrize("case", RELATIVE_CASES, ids=case_name)
def test_relative_vectors_and_their_gradients_match_loops(case, rng, monkeypatch):
    """In one chunk of queries, in several, and without gradients in a cache of fixed shape."""
    B, H, Tk, D = 2, 6, 13, 7
    Tq, Hk = case.get("Tq", Tk), case.get("Hk", H)
    q, k, v = leaf(B, H, Tq, D), leaf(B, Hk, Tk, D), leaf(B, Hk, Tk, D)
    keys = leaf(case.get("heads", H), case.get("m", Tk), D)
    values = leaf(*keys.shape) if case.get("values", True) else None
    offsets = (leaf(H, D), leaf(H, D)) if case.get("offsets") else None
    leaves = [x for x in (q, k, v, keys, values, *(offsets or ())) if x is not None]
    options = {**random_mask(case, B, Tk, rng), "scale": case.get("scale", D**-0.5)}
    vectors = {"keys": keys, "values": values}
    if offsets:
        vectors |= {"u": offsets[0][:, None], "z": offsets[1][:, None]}
    expected = reference.attention(q, k, v, **vectors, **options)[:2]
    weights = [torch.randn(B, H, Tq, D), torch.randn(B, H, Tq)]
    expected_grads = gradients(expected, leaves, weights)

    scheme = model.RelativeVectors(model.GPTConfig())
    monkeypatch.setattr(scheme, "vectors", lambda n, layer: (keys, values, offsets))
    del options["causal"]
    context = model.Context()
    context.docs = options.pop("docs")
    arguments = q, k, v, None, 0, context
    for size, max_scores in ((128, 1 << 24), (4, 1 << 24), (128, B * H * Tk * 3)):
        monkeypatch.setattr(eager, "CHUNK", size)
        monkeypatch.setattr(eager, "MAX_SCORES", max_scores)
        found = scheme.attend(*arguments, **options, return_lse=True)
        assert largest_difference(found, expected) < 1e-12
        assert largest_difference(gradients(found, leaves, weights), expected_grads) < 1e-11
    y = scheme.attend(*arguments, **options)
    assert torch.equal(y, found[0])

    # keys past the length, of any finite value, in a cache of more
    context.docs = None if context.docs is None else F.pad(context.docs, (0, 5))
    context.valid_length = torch.tensor([Tk])
    longer = [F.pad(x, (0, 0, 0, 5), value=1e9) for x in (k, v)]
    with torch.no_grad():
        y, lse = scheme.attend(q, *longer, None, 0, context, **options, return_lse=True)
    assert largest_difference((y, lse), expected) < 1e-12


def largest_difference(found, expected):
    return max((a - b).abs().max() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("slope, mean", [(2**-1, None), (2**-8, None), (None, 0), (None, 3.5)])
def test_slopes_and_gates_are_exact_over_16k_tokens(slope, mean, dtype, limit):
    """Float32 rounds slope * index, which is up to 8,192, and bfloat16 merges indices above 256.

    The sum of gates reaches -13,400, which float32 rounds by 1e-3; weak gates see far.
    """
    T, n, D = 16384, 150, 4  # two chunks of queries, at the end of the text
    shapes = ((1, 1, n, D), (1, 1, T, D), (1, 1, T, D))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    if slope is None:
        logits = torch.randn(1, 1, T).double() + mean
        gates = F.logsigmoid(logits).cumsum(2).requires_grad_()
        leaves.append(gates)
        terms = {"gates": gates}
    else:
        gates = -slope * torch.arange(T).double().expand(1, 1, T)
        terms = {"bias": torch.tensor([slope])}
    q, k, v = leaves[:3]
    y, lse = eager.attention(q, k, v, **terms, return_lse=True)
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse, _ = reference.attention(*wide, gates=gates)
    assert (y - expected).norm() < limit * expected.norm()
    assert (lse - expected_lse).abs().max() < 1e-5
    with torch.no_grad():  # a decoding step
        last = eager.attention(q[:, :, -1:], k, v, **terms)
    assert (last - expected[:, :, -1:]).norm() < 2 * limit * expected[:, :, -1:].norm()
    weight = torch.randn_like(y)
    found, right = (torch.autograd.grad(x, leaves, weight.to(x.dtype)) for x in (y, expected))
    for a, b in zip(found, right, strict=True):
        assert (a.double() - b).norm() < 2 * limit * b.norm()
    # the gradient of log f, a sum over all later tokens and their rounding
    for a, b in zip(found[3:], right[3:], strict=True):
        a, b = (x.flip(-1).cumsum(-1) for x in (a, b))
        assert (a - b).norm() < max(2 * limit, 1e-4) * b.norm()


LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("heads", [(6, 2), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "sinks", "sinks and docs"])
@pytest.mark.parametrize("bias", ["none", "slopes", "table", "gates"])
@torch.no_grad()
def test_one_query_as_on_a_gpu_against_float64(bias, mask, heads, rng, monkeypatch):
    """The log-sum-exp has no rounding of 16 bits. Tokens behind a valid length change nothing."""
    monkeypatch.setattr(eager, "MASKED_DEVICES", ())
    random.seed(int(rng.integers(1 << 30)))
    H, Hk = heads
    for dtype, (n, capacity) in itertools.product(
        LIMITS, ((1, 1), (37, 37), (37, 61), (301, 301), (301, 512))
    ):
        q, k, v = torch.randn(2, H, 1, 24), torch.randn(2, Hk, n, 24), torch.randn(2, Hk, n, 24)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        leaves = bias_leaves(bias, H, 20, 2, n)
        masks = mask_options(mask, 2, capacity)
        shorter = {name: x[..., :n] if torch.is_tensor(x) else x for name, x in masks.items()}
        terms = bias_arguments(bias, [x.double() for x in leaves])
        wide = [x.double() for x in (q, k, v)]
        exact = definition.attention(*wide, **terms, **shorter, return_lse=True)
        if capacity > n:
            k, v = (F.pad(x, (0, 0, 0, capacity - n), value=3e4) for x in (k, v))
            leaves = [F.pad(x, (0, capacity - n), value=1e9) for x in leaves if bias == "gates"]
            leaves = leaves or list(terms.values())
            masks["length"] = torch.tensor([n])
        terms = bias_arguments(bias, [x if bias == "gates" else x.float() for x in leaves])
        y, lse = eager.attention(q, k, v, **terms, **masks, return_lse=True)
        assert y.dtype == dtype and error(y, exact[0]) <= LIMITS[dtype]
        assert lse.dtype == torch.float32 and error(lse, exact[1]) <= 1e-6
        y = eager.attention(q, k, v, **terms, **masks)
        assert y.dtype == dtype and error(y, exact[0]) <= LIMITS[dtype]


@pytest.mark.parametrize("capacity, n", [(512, 512), (600, 512), (300, 301)])
@torch.no_grad()
def test_one_query_reads_the_cache_where_it_lies(capacity, n, monkeypatch):
    """In its dtype, once, also if several queries share a head of it."""
    monkeypatch.setattr(eager, "MASKED_DEVICES", ())
    read = []
    product = eager._wide_product

    def record(a, b):
        read.append((b.data_ptr(), b.numel(), b.dtype))
        return product(a, b)

    monkeypatch.setattr(eager, "_wide_product", record)
    q = torch.randn(2, 6, 1, 8).bfloat16()
    k, v = (torch.randn(2, 2, max(capacity, n), 8).bfloat16()[:, :, :n] for _ in range(2))
    eager.attention(q, k, v, bias=torch.rand(6))
    assert read == [(x.data_ptr(), x.numel(), x.dtype) for x in (k, v)]


@pytest.mark.parametrize("hides", ["documents", "window"])
def test_entries_that_no_pair_reaches_have_no_gradient(hides, monkeypatch):
    """Not even rounding noise, from which AdamW would take whole steps."""
    monkeypatch.setattr(eager, "CHUNK", 4)
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
    mask = {"docs": (torch.arange(40) // 5).expand(2, 40)}
    if hides == "window":  # a chunk leaves out distant keys, or masks them
        mask = {"window": 5}
    table = torch.randn(2, 9, requires_grad=True)
    y = eager.attention(q, k, v, bias=table, **mask)
    (grad,) = torch.autograd.grad(y.square().sum(), table)
    assert grad[:, :5].all() and not grad[:, 5:].any()


def test_two_threads_compute_the_same_bits_each_time():
    q, k, v = (torch.randn(2, 4, 300, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 90, requires_grad=True)
    options = {"docs": (torch.arange(300) // 170).expand(2, 300)}
    n = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = []
        for _ in range(2):
            y = eager.attention(q, k, v, bias=table, **options)
            results.append([y, *torch.autograd.grad(y.sum(), (q, k, v, table))])
    finally:
        torch.set_num_threads(n)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -----------------------------------------------------------------------------
# Rotary position embedding


@pytest.mark.parametrize("width,rotated", [(10, 6), (2, 2), (16, 0)])
def test_rope_rotates_pairs(width, rotated, rng):
    """Each pair (c, c + R/2) is a complex number times e^(i angle); the rest passes unchanged."""
    q, k = torch.randn(2, 4, 5, width), torch.randn(2, 2, 5, width)
    angle = torch.rand(2, 5, rotated // 2, dtype=torch.float64) * 10
    cos, sin = angle.cos().float(), angle.sin().float()
    outputs = kernels.rope(q, k, cos, sin)
    wide = definition.rope(q.double(), k.double(), angle.cos(), angle.sin())
    for x, y, right in zip((q, k), outputs, wide, strict=True):
        expected = reference.rotate(x.double(), angle[:, None])
        assert torch.allclose(y.double(), expected, atol=1e-5)
        assert torch.allclose(right, expected, atol=1e-12)
        assert y.dtype == x.dtype
    low, _ = kernels.rope(q.bfloat16(), k.bfloat16(), cos, sin)
    assert low.dtype == torch.bfloat16
    assert (low.float() - outputs[0]).abs().max() < 0.05
    # the gradient is that of the formula, eager and as a compiler traces it
    grad = torch.randn_like(q)
    q.requires_grad_()
    right = torch.autograd.grad(definition.rope(q, k, cos, sin)[0], q, grad)[0]
    compiled = torch.compile(eager.rope, backend="aot_eager", fullgraph=True)
    for rope in (eager.rope, compiled) if rotated == 6 else (eager.rope,):
        assert_close(torch.autograd.grad(rope(q, k, cos, sin)[0], q, grad)[0], right.double(), 1e-6)


@pytest.mark.parametrize("heads", [1, 2])
def test_rotation_by_large_angles_of_each_key_head(heads, rng):
    """Where float32 would round them by 0.06; 10 of 12 channels are rotated."""
    q, k = torch.randn(1, 4, 3, 12), torch.randn(1, 2, 3, 12)
    angles = torch.randn(1, heads, 3, 5, dtype=torch.float64) * 1e6
    wide = [x.double().requires_grad_() for x in (q, k, angles)]
    for x, rotated, exact in zip((q, k), kernels.rotate_by(q, k, angles), wide, strict=False):
        for head in range(x.shape[1]):
            angle = angles[:, head * heads // x.shape[1], None]
            expected = reference.rotate(exact[:, head, None], angle)
            assert (rotated[:, head, None] - expected).abs().max() < 1e-5
    assert torch.autograd.gradcheck(kernels.rotate_by, wide)


# -----------------------------------------------------------------------------
# Linear layers and norms


def assert_close(found, expected, limit):
    """Within a limit of the largest value, and of the dtype that it was computed in."""
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_linear_layers_of_one_input_are_each_its_own(bias, autocast, rng):
    x = torch.randn(2, 5, 16, requires_grad=True)
    layers = [torch.nn.Linear(16, n, bias=bias) for n in (12, 4, 7)]
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = kernels.linear_each(x, *layers)
        expected = [layer(x) for layer in layers]
        apart = kernels.linear_each(x, *layers, joins_on_cpu=False)
        assert all(map(torch.equal, apart, expected))
    grads = [torch.randn_like(y) for y in expected]
    both = [torch.autograd.grad(y, parameters, grads) for y in (found, expected)]
    limit = 2e-2 if autocast else 1e-6
    for one, right in zip([*found, *both[0]], [*expected, *both[1]], strict=True):
        assert one.shape == right.shape and one.dtype == right.dtype
        assert_close(one, right.double(), limit)


# -----------------------------------------------------------------------------
# Cross-entropy


def small_chunks(size):
    """A stand-in for eager.token_chunks."""
    return lambda x, weight: [slice(i, i + size) for i in range(0, len(x), size)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1)])
def test_few_rows_are_multiplied_alike(shape, bias):
    x, weight = (torch.randn(*size) for size in ((*shape, 131), (1009, 131)))
    b = torch.randn(1009) if bias else None
    right = F.linear(x.double(), weight.double(), b if b is None else b.double())
    with torch.no_grad():
        y = kernels.linear(x, weight, b)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-4)
    assert torch.equal(kernels.linear(x, weight, b), F.linear(x, weight, b))  # with a graph


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("n,vocab,z_loss", [(1, 2, 0.0), (300, 257, 0.0), (67, 31, 0.3)])
def test_linear_cross_entropy_matches_float64(n, vocab, z_loss, reduction, monkeypatch, rng):
    """Loss and both gradients, with several chunks and ignored targets."""
    if n > 1:
        monkeypatch.setattr(eager, "token_chunks", small_chunks(16))
    x, weight, targets = random_loss_inputs(n, vocab)
    token_weight = torch.randn(n) if reduction == "none" else torch.ones(())

    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = wide_x @ wide_weight.t()
    expected = F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
    z_term = z_loss * logits.exp().sum(-1).log() ** 2 * (targets >= 0)
    total = {"none": z_term, "sum": z_term.sum(), "mean": z_term.sum() / (targets >= 0).sum()}
    expected = expected + total[reduction]
    found = definition.linear_cross_entropy(wide_x, wide_weight, targets, reduction, z_loss)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    (expected * token_weight).sum().backward()
    x.requires_grad_()
    weight.requires_grad_()
    loss = kernels.linear_cross_entropy(x, weight, targets, reduction, z_loss)
    (loss * token_weight).sum().backward()

    assert torch.allclose(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for grad, right in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        # softmax - 1 cancels where a token is almost certain
        assert (grad.double() - right).norm() <= 1e-5 * right.norm() + 1e-6
    # with one gradient of the two, and without any
    for inputs in ((x.detach(), weight), (x, weight.detach())):
        loss = kernels.linear_cross_entropy(*inputs, targets, reduction, z_loss)
        of_one = [leaf for leaf in inputs if leaf.requires_grad]
        (grad,) = torch.autograd.grad((loss * token_weight).sum(), of_one)
        right = wide_x.grad if of_one[0] is x else wide_weight.grad
        assert (grad.double() - right).norm() <= 1e-5 * right.norm() + 1e-6
    with torch.no_grad():
        loss = kernels.linear_cross_entropy(x, weight, targets, reduction, z_loss)
        assert torch.allclose(loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_linear_cross_entropy_can_be_differentiated_twice_where_the_graph_is_kept(rng):
    """Its saved gradients are scaled in place by the last backward pass only."""
    x, weight, targets = random_loss_inputs(37, 11)
    x.requires_grad_()
    weight.requires_grad_()
    loss = kernels.linear_cross_entropy(x, weight, targets, "sum") * 0.3
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, (x, weight))
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("is_cuda, numbers", [(False, 1 << 25), (True, 1 << 29)])
def test_chunks_of_the_loss_are_of_one_size(is_cuda, numbers):
    """They cover all tokens, and the last one is shorter by less than 128 tokens a chunk."""
    for n, vocab in ((16384, 50304), (40000, 50257), (1000, 257), (0, 9), (1, 9), (999, 1 << 29)):
        x = type("Tokens", (), {"is_cuda": is_cuda, "__len__": lambda self, n=n: n})()
        chunks = eager.token_chunks(x, torch.empty(vocab, 0))
        rows = [index for chunk in chunks for index in range(n)[chunk]]
        assert rows == list(range(n))
        sizes = [len(range(n)[chunk]) for chunk in chunks]
        assert max(sizes) * vocab <= max(numbers, 128 * vocab)
        assert len(set(sizes[:-1])) <= 1 and max(sizes) - sizes[-1] < 128 * len(sizes)
        least = math.ceil(n * vocab / numbers)
        assert len(chunks) <= max(1, least + 1, math.ceil(n / 128)), (n, vocab)
    assert len(eager.token_chunks(torch.empty(16384, 0), torch.empty(50304, 0))) == 26


@pytest.mark.parametrize("n_chunks", [1, 3])
def test_a_compiled_loss_adds_each_chunk_to_one_gradient(n_chunks, monkeypatch, rng):
    """A compiler sees one operator for a chunk, and the gradients are those of float64."""
    x, weight, targets = random_loss_inputs(48, 11)
    monkeypatch.setattr(eager, "token_chunks", small_chunks(48 // n_chunks))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    wide = [part.double().requires_grad_() for part in (x, weight)]
    expected = torch.autograd.grad(definition.linear_cross_entropy(*wide, targets), wide)
    inputs = [part.requires_grad_() for part in (x, weight)]
    compiled = torch.compile(kernels.linear_cross_entropy, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*inputs, targets), inputs)
    assert sum(graph.count("nanolong.add_product") for graph in graphs) == n_chunks
    for grad, right in zip(found, expected, strict=True):
        assert_close(grad, right, 1e-5)


def random_loss_inputs(n, vocab):
    """Hidden states, a weight, and targets of which some are ignored and the first is not."""
    targets = torch.randint(0, vocab, (n,))
    targets[torch.rand(n) < 0.3] = -1
    targets[0] = 0
    return torch.randn(n, 6), torch.randn(vocab, 6), targets


def test_linear_cross_entropy_needs_little_memory():
    """16,000 tokens of 5,000 words: the logits would take 305 MB, both passes at most 280 MB."""
    code = """
import resource, torch
from kernels import linear_cross_entropy
torch.set_num_threads(2)
x = torch.randn(16000, 8, requires_grad=True)
weight = torch.randn(5000, 8, requires_grad=True)
targets = torch.randint(0, 5000, (16000,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(x, weight, targets).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = assert_success(run_python(code))
    assert float(done.stdout) < 280, f"{done.stdout} MB"
