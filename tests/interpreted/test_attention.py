"""kernels/flash.py and kernels/decode.py under Triton's interpreter, on CPU tensors: run by tests/test_kernels.py in a process with TRITON_INTERPRET=1.

On a GPU, compiled: NANOLONG_GPU=1 python -m pytest -q tests/interpreted -n 8."""
import itertools
import math
import random
import warnings

import pytest
import torch

import kernels
from kernels import decode, flash

FACTORS = dict(
    T=(1, 17, 63, 64, 65, 130), cached=(0, 1, 37), heads=((1, 1), (3, 3), (6, 6), (12, 12), (4, 1)), D=(16, 40, 64, 80, 128), m=("1", "5", "T", "more"),
    term=("none", "slopes", "table", "shaw", "xl"), mask=("causal", "window", "sinks", "docs", "positions", "all keys"), gradient=("whole", "expanded", "transposed", "sliced"),
    dtype=("float32", "float16", "bfloat16"))


def pairwise(seed=0):
    """Cases that hold every pair of values of every two factors, found greedily: of 200 random cases the one with most new pairs."""
    draw, names = random.Random(seed), list(FACTORS)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    while left:
        tries = []
        for _ in range(200):
            a, x, b, y = draw.choice(sorted(left, key=str)[:40])
            tries.append({**{name: draw.choice(FACTORS[name]) for name in names}, a: x, b: y})
        best = max(tries, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        yield best


def written(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None):
    """The formula with dense (Tq, Tk) matrices, in the dtype of its inputs: float64 is the truth, the dtype at hand the measure. Returns the output and the log-sum-exp."""
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    scale = D ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    i, j = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)[None]
    d = (i - j).clamp(min=0) if causal else (i - j).abs()
    where = (torch.arange(Tk) if positions is None else positions).expand(B, Tk)
    seen = ((j <= i) | (not causal)).expand(B, Tq, Tk)
    if window:
        seen = seen & (((where[:, Tk - Tq:, None] - where[:, None]).abs() < window) | (where[:, None] < sinks))
    if docs is not None:
        seen = seen & (docs[:, Tk - Tq:, None] == docs[:, None])
    u, w = (0, 0) if relative is None or relative[2] is None else (x[:, None] for x in relative[2])
    s = (q + u) @ k.mT
    if relative is not None:
        s = s + ((q + w)[:, :, :, None] * relative[0][:, d.clamp(max=relative[0].shape[1] - 1)][None]).sum(-1)
    s = s * scale
    if bias is not None:
        s = s + (-bias[:, None, None] * d if bias.dim() == 1 else bias[:, d.clamp(max=bias.shape[1] - 1)]).to(s.dtype)
    s = s.masked_fill(~seen[:, None], -math.inf)
    p = s.softmax(-1)
    y = p @ v
    if relative is not None and relative[1] is not None:
        y = y + (p[..., None] * relative[1][:, d.clamp(max=relative[1].shape[1] - 1)][None]).sum(-2)
    return y, s.logsumexp(-1)


def inputs(T, cached, heads, D, m, term, mask, dtype, B=0, **_):
    """Fresh random inputs of a case: leaves that want a gradient, how to put them together, and the options."""
    (H, Hk), dtype = heads, getattr(torch, dtype)
    B = B or (16 if T == 1 else 1 if H > 4 else 2)  # of a few rows one may cancel by chance
    Tq, Tk = T, T + cached
    m = {"1": 1, "5": 5, "T": Tk, "more": Tk + 9}[m]
    leaves = [torch.randn(B, t, h, D).to(dtype).transpose(1, 2) for t, h in ((Tq, H), (Tk, Hk), (Tk, Hk))]  # as a model has them
    leaves += {"none": lambda: [], "slopes": lambda: [torch.rand(H)], "table": lambda: [torch.randn(H, m)], "shaw": lambda: [torch.randn(1, m, D).to(dtype) for _ in range(2)],
               "xl": lambda: [torch.randn(H, m, D).to(dtype), *(torch.randn(H, D).to(dtype) for _ in range(2))]}[term]()

    def build(q, k, v, *rest):
        return (q, k, v), {"bias": rest[0] if term in ("slopes", "table") else None, "relative": (*rest, None) if term == "shaw" else (rest[0], None, rest[1:]) if term == "xl" else None}

    steps = torch.randint(1, 4, (B, Tk)).cumsum(1)
    options = {"causal": {}, "window": dict(window=random.choice((1, 9, 40, 200))), "sinks": dict(window=random.choice((5, 33)), sinks=random.choice((1, 3, 40))), "all keys": dict(causal=False),
               "docs": dict(docs=(torch.rand(B, Tk) < 0.04).cumsum(1)), "positions": dict(window=20, sinks=9, positions=random.choice((steps, steps[0]))) }[mask]
    if mask == "all keys" and random.random() < 0.5:
        options |= dict(window=25, sinks=2)
    return [x.requires_grad_() for x in leaves], build, options


def gradient_of(kind, shape, dtype):
    """dO as autograd may hand it over."""
    B, H, T, D = shape
    return {"whole": lambda: torch.randn(shape), "expanded": lambda: torch.randn(B, H, 1, 1).expand(shape), "transposed": lambda: torch.randn(D, T, H, B).permute(3, 2, 1, 0),
            "sliced": lambda: torch.randn(B, H, T + 3, 2 * D)[:, :, 2:-1, ::2]}[kind]().to(dtype)


def error(x, right):
    x = x.detach()
    return float((x.detach().double() - right).norm() / right.norm().clamp(min=1e-6 * right.numel() ** 0.5))


def check(case):
    leaves, build, options = inputs(**case)
    dtype = leaves[0].dtype
    (q, k, v), terms = build(*leaves)
    y, lse = flash.attention(q, k, v, **terms, **options, return_lse=True)
    assert y.dtype == dtype and y.shape == q.shape
    dy, dlse = gradient_of(case["gradient"], y.shape, dtype), torch.randn(lse.shape) * (dtype == torch.float32)
    grads = torch.autograd.grad((y, lse), leaves, (dy, dlse), allow_unused=case["term"] == "xl")

    def by_hand(to):
        copies = [x.detach().to(to).requires_grad_() for x in leaves]
        args, more = build(*copies)
        out = written(*args, **more, **options)
        return [*out, *torch.autograd.grad(out, copies, (dy.to(to), dlse.to(to)), allow_unused=True)]

    true, plain = by_hand(torch.float64), by_hand(dtype)
    with torch.no_grad():
        few, few_lse = decode.attention(q, k, v, **terms, **options, return_lse=True) if y.shape[2] <= 17 else (y, lse)
    rounding = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    cancels = 100 if dtype == torch.float32 and (case["m"] == "1" or case["term"] == "slopes") else 1  # few sums of large terms of both signs, whose size tells little of what was rounded
    for what, mine, his, right in zip(("out", "lse", *"qkv", "term", "term", "term"), (y, lse, *grads), plain, true):
        if dtype == torch.float32 or float(right.norm()) > 1e-3 * right.numel() ** 0.5:  # where a gradient is zero there is only rounding to compare
            assert error(mine, right) <= 2 * error(his, right) + rounding * (cancels if what == "term" else 1), (what, error(mine, right), error(his, right))
        else:
            assert float((mine - right).norm()) < 0.1 * right.numel() ** 0.5, what
    assert error(few, true[0]) <= 2 * error(plain[0], true[0]) + rounding and error(few_lse, true[1]) <= 2 * error(plain[1], true[1]) + rounding


def name_of(case):
    return "-".join(str(x).replace(" ", "") for x in case.values())


@pytest.mark.parametrize("case", list(pairwise()), ids=name_of)
def test_against_float64(case, rng):
    """Outputs, log-sum-exp and every gradient; errors at most twice those of the same formula in PyTorch at that dtype. The few-query kernel too."""
    random.seed(int(rng.integers(1 << 30)))
    check(case)


@pytest.mark.slow
def test_fuzz(rng):
    """Cases drawn at random from the full product."""
    random.seed(int(rng.integers(1 << 30)))
    for _ in range(100):
        case = {name: random.choice(values) for name, values in FACTORS.items()} | {"T": random.randint(1, 140), "D": random.randint(1, 130)}
        print(case)
        check(case)


@pytest.mark.parametrize("term,sizes", [("none", (64, 16)), ("slopes", (16, 64)), ("table", (16, 64)), ("table", (64, 16)), ("shaw", (64, 64))], ids=str)
def test_any_tile_sizes(sizes, term, rng, monkeypatch):
    """Tiles that are not square, as a GPU's table may have them; the walk's, and vectors', are square, and the dQ kernel has the walk's height."""
    BM, BN = sizes
    tiles = {"forward": (BM, BN), "dkdv": (BM, BN), "dq": (64, min(BN, 64)), "walk": (64, 64)} if term != "shaw" else dict.fromkeys(("forward", "dkdv", "dq", "walk"), (BM, BM))
    monkeypatch.setattr(flash, "tile", lambda family, itemsize, DP, kind, direction: (*tiles[direction], 4, 1))
    for mask, m in (("causal", "5"), ("sinks", "T"), ("docs", "5"), ("positions", "T"), ("all keys", "5")):
        check(dict(T=100, cached=37, heads=(2, 1), D=16, m=m, term=term, mask=mask, gradient="whole", dtype="float32", B=1))


@pytest.mark.parametrize("mask", ["causal", "all keys", "docs"])
@pytest.mark.parametrize("term", ["table", "shaw", "xl"])
def test_a_table_of_one_entry_and_a_cache(term, mask, rng):
    """Every distance is the last one's, also of tiles at the diagonal that a cache has shifted."""
    for cached in (1, 37):
        check(dict(T=70, cached=cached, heads=(2, 1), D=16, m="1", term=term, mask=mask, gradient="whole", dtype="float32", B=1))


def small(H=2, T=100, D=16, dtype=torch.float32):
    return [torch.randn(2, H, T, D).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 2e-6), (torch.float16, 2e-4)], ids=str)
def test_what_a_table_cannot_change(dtype, limit, rng):
    """A constant in the table changes only the log-sum-exp, so its gradient sums to zero over distances: also at half precision, where delta from a rounded output would leave percents."""
    q, k, v = small(dtype=dtype)
    for m in (5, 100):
        table = torch.randn(2, m, requires_grad=True)
        y, lse = flash.attention(q, k, v, bias=table, return_lse=True)
        grad, = torch.autograd.grad(y, table, torch.randn_like(y))
        assert (grad.sum(1).abs() < limit * grad.abs().sum(1).clamp(min=1)).all() and grad.abs().sum() > 1
        more, more_lse = flash.attention(q, k, v, bias=table + 3, return_lse=True)
        assert torch.allclose(more, y, atol=2e-3 if dtype == torch.float16 else 1e-5) and torch.allclose(more_lse, lse + 3, atol=1e-4)


def test_the_refined_delta(rng):
    """At half precision, dtable[m - 1] of slowly falling scores: an output rounded to 16 bits would give delta with an error that thousands of terms add up."""
    q, k, v = small(H=1, T=500, dtype=torch.float16)
    table, dy = torch.zeros(1, 8).requires_grad_(), torch.randn(2, 1, 500, 16).half()
    mine, = torch.autograd.grad(flash.attention(q, k, v + 4, bias=table), table, dy)  # an output far from zero is rounded coarsely
    wide = [x.detach().double() for x in (q, k, v + 4)]
    double = table.detach().double().requires_grad_()
    y, lse = written(*wide, bias=double)
    right, = torch.autograd.grad(y, double, dy.double())
    delta = ((y.half().double() - y) * dy.double()).sum(-1)  # what rounding the output does to delta
    p = (wide[0] @ wide[1].mT / 4 + double[:, (torch.arange(500)[:, None] - torch.arange(500)).clamp(0, 7)][None]).tril() - lse[..., None]
    far = torch.ones(500, 500).tril(-7).double()
    unrefined = abs(float((delta * (p.exp() * far).sum(-1)).sum()))
    assert abs(float(mine[0, -1] - right[0, -1])) < 0.3 * unrefined


def test_slopes_equal_their_table(rng):
    q, k, v = small()
    slopes = torch.rand(2, requires_grad=True)
    table = -slopes[:, None] * torch.arange(100)
    mine, theirs = (torch.autograd.grad(flash.attention(q, k, v, bias=bias).square().sum(), (q, k, v, slopes)) for bias in (slopes, table))
    assert all(error(a, b.double()) < 3e-6 for a, b in zip(mine, theirs))


def test_a_window_equals_a_table_of_minus_infinity(rng):
    q, k, v = small()
    table = torch.zeros(2, 31)
    table[:, 30] = -math.inf
    assert error(flash.attention(q, k, v, window=30), flash.attention(q, k, v, bias=table).double()) < 1e-6
    mine, theirs = (torch.autograd.grad(flash.attention(q, k, v, **o).square().sum(), (q, k, v)) for o in (dict(window=30), dict(bias=table.requires_grad_())))
    assert all(error(a, b.double()) < 3e-6 for a, b in zip(mine, theirs))


@pytest.mark.parametrize("term", ["none", "slopes", "table", "shaw", "xl"])
def test_packed_equals_separate(term, rng):
    """Three documents in one row equal the three alone, and the same call gives the same bits, forward and backward; what is ahead changes nothing."""
    leaves, build, _ = inputs(130, 0, (4, 2), 16, "5", term, "causal", "float32", B=1)
    (q, k, v), terms = build(*leaves)
    docs = torch.tensor([[7] * 40 + [2] * 33 + [5] * 57])
    whole = flash.attention(q, k, v, **terms, docs=docs)
    parts = torch.cat([flash.attention(*(x[:, :, a:b] for x in (q, k, v)), **terms) for a, b in ((0, 40), (40, 73), (73, 130))], 2)
    assert error(whole, parts.double()) < 1e-6
    dy = torch.randn_like(whole)
    mine, theirs = (torch.autograd.grad(y, leaves, dy, allow_unused=True) for y in (whole, parts))
    assert all(error(a, b.double()) < (3e-6 if a.dim() == 4 else 5e-5) for a, b in zip(mine, theirs))  # a slope's gradient is a sum of thousands of numbers of both signs
    again = flash.attention(q, k, v, **terms, docs=docs)
    assert torch.equal(whole, again) and all(torch.equal(a, b) for a, b in zip(mine, torch.autograd.grad(again, leaves, dy, allow_unused=True)))
    before = flash.attention(q, k, v, **terms)
    with torch.no_grad():
        k[:, :, 90:], v[:, :, 90:] = math.nan, math.inf
    assert torch.equal(flash.attention(q, k, v, **terms)[:, :, :64], before[:, :, :64])  # tiles of 32


def test_far_apart_in_memory(rng):
    """Offsets past 2^31 elements: keys whose tokens are 2^23 elements apart, and some too far apart for a block, which are copied."""
    room = torch.empty(5 << 29, dtype=torch.float16)  # 5 GiB, of which a few pages are touched
    q, near = torch.randn(1, 1, 290, 16).half(), torch.randn(1, 1, 290, 16).half()
    for step, T in ((1 << 23, 290), (1 << 24, 150)):
        k = room.as_strided((1, 1, T, 16), (0, 0, step, 1)).copy_(near[:, :, :T])
        assert torch.equal(flash.attention(q[:, :, :T], k, k), flash.attention(q[:, :, :T], near[:, :, :T], near[:, :, :T]))
        assert torch.equal(decode.attention(q[:, :, :1], k, k), decode.attention(q[:, :, :1], near[:, :, :T], near[:, :, :T]))


def test_a_room_partly_filled(rng):
    """decode's length, a tensor: the keys from there on, whatever lies in their memory, are not there; every term, and all masks at once."""
    room, D = 150, 16
    q, k, v = torch.randn(2, 4, 1, D), torch.randn(2, 2, room, D), torch.randn(2, 2, room, D)
    docs, positions = (20 - torch.arange(room)).clamp(min=0).expand(2, room), torch.stack(((torch.arange(room) - 20).clamp(min=0), torch.arange(room)))
    for n in (1, 37, 149, room):
        rest = [torch.cat((x[:, :, :n], torch.full_like(x[:, :, n:], math.nan)), 2) for x in (k, v)]
        for terms in ({}, dict(bias=torch.rand(4)), dict(bias=torch.randn(4, room)), dict(relative=(torch.randn(1, 30, D), torch.randn(1, 30, D), None)), dict(relative=(torch.randn(4, room, D), None, (torch.randn(4, D), torch.randn(4, D))))):
            for masks in ({}, dict(window=16, sinks=2), dict(window=16, sinks=2, positions=positions, docs=docs)):
                shorter = {**masks, **{name: masks[name][:, :n] for name in ("positions", "docs") if name in masks}}
                got, lse = decode.attention(q, *rest, **terms, **masks, length=torch.tensor([n]), return_lse=True)
                right, right_lse = decode.attention(q, k[:, :, :n], v[:, :, :n], **terms, **shorter, return_lse=True)
                assert error(got, right.double()) < 1e-6 and torch.allclose(lse, right_lse, atol=1e-5), (n, terms.keys(), masks.keys())


def test_no_tile_is_visited_in_vain(rng):
    """The plan of packed documents: exactly the tiles that hold something seen, and among the whole ones none that needs a mask."""
    docs, T = torch.cat((torch.zeros(1, 150), torch.ones(1, 51), torch.full((1, 70), 2)), 1).int(), 271
    seen = (docs[:, :, None] == docs[:, None])[0].tril()
    for BM, BN in ((32, 32), (64, 16), (16, 64)):
        tiles = torch.nn.functional.pad(seen, (0, -T % BN, 0, -T % BM)).unflatten(1, (-1, BN)).unflatten(0, (-1, BM)).transpose(1, 2).flatten(2)
        for plan, some, whole in ((flash.plan(docs, None, 0, 0, T, T, BM, BN, True)[0], tiles.any(-1), tiles.all(-1)), (flash.plan(docs, None, 0, 0, T, T, BM, BN, True, of_keys=True)[0], tiles.any(-1).T, tiles.all(-1).T)):
            for (lo, left, right, hi), line, full in zip(plan.tolist(), some, whole):
                assert torch.arange(len(line))[line].tolist() == list(range(lo, hi)) and lo <= left <= right <= hi and full[left:right].all() and full.sum() == right - left


def test_opcheck_and_compile(rng):
    """The operators pass torch's own checks, and compile to one graph with the dispatch in it, at a length that varies too."""
    q, k, v = (torch.randn(2, 40, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    table, keys = torch.randn(4, 7, requires_grad=True), torch.randn(1, 5, 16, requires_grad=True)
    docs = torch.zeros(2, 40, dtype=torch.int32)
    for args in ((q, None, k, v, None, None, None, None, 0, 0, True, 0.25), (q, None, k, v, table, None, None, docs, 9, 1, True, 0.25), (q, q.detach(), k, v, keys, keys, None, None, 0, 0, False, 0.25)):
        assert set(torch.library.opcheck(flash._attention, args).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(decode._decode, (q.detach()[:, :, :2], None, k.detach(), v.detach(), table.detach(), None, None, None, 0, 0, True, 0.25, torch.tensor([30]))).values()) == {"SUCCESS"}
    compiled = torch.compile(lambda q, k, v, table: kernels.attention(q, k, v, bias=table), fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (40, 33):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile looks at that of our slices
            got = torch.autograd.grad(compiled(q[:, :, :T], k[:, :, :T], v[:, :, :T], table).square().sum(), (q, k, v, table))
        right = torch.autograd.grad(flash.attention(q[:, :, :T], k[:, :, :T], v[:, :, :T], bias=table).square().sum(), (q, k, v, table))
        assert all(torch.equal(a, b) for a, b in zip(got, right))


def test_what_it_does_not_do(rng):
    q, k, v = (x.detach() for x in small())
    for kernel in (flash.attention, decode.attention):
        for words, args, options in (("float64", (q.double(), k.double(), v.double()), {}), ("all the same", (q, k.half(), v), {}), ("do not fit", (q, k[:, :, :50], v[:, :, :50]), {}), ("do not fit", (q[:, :1], k, v), {}),
                                     ("do not fit", (q.repeat(1, 1, 1, 20), k.repeat(1, 1, 1, 20), v.repeat(1, 1, 1, 20)), {}), ("not both", (q, k, v), dict(bias=torch.ones(2), relative=(torch.ones(1, 3, 16), None, None))),
                                     ("above 0", (q, k, v), dict(scale=-1.0)), ("neither", (q, k, v), dict(bias=torch.ones(3))), ("docs", (q, k, v), dict(docs=torch.ones(2, 5).int())), ("positions", (q, k, v), dict(positions=torch.ones(100), window=3)),
                                     ("relative keys", (q, k, v), dict(relative=(torch.ones(3, 3, 16), None, None)))):
            with pytest.raises(ValueError, match=words):
                kernel(*args, **options)
    with pytest.raises(ValueError, match="no gradient"):
        decode.attention(q.requires_grad_(), k, v)
    empty = flash.attention(q[:0], k[:0], v[:0])
    assert empty.shape == (0, 2, 100, 16)


@pytest.mark.parametrize("pos", ["nope", "rope", "alibi", "t5", "kerple", "kerple-power", "sandwich", "shaw", "nezha", "xl", "learned", "sinusoidal"])
def test_every_scheme_trains_and_decodes_through_the_kernels(pos, make, rng, monkeypatch):
    """By the model's own dispatch: the loss, every gradient and the text written are the reference's, with a window and documents too."""
    tokens, docs = torch.randint(0, 50, (2, 24)), torch.arange(24).expand(2, 24) // 9
    for settings in ({}, dict(window=6, sinks=2, n_kv_head=2)):
        model, calls = make(pos=pos, head_dim=16, **settings), []
        results = []
        for runs in (True, False):
            monkeypatch.setattr(kernels, "_triton_runs", lambda *device: calls.append(runs) or runs)
            model.zero_grad()
            loss = model(tokens, tokens, docs=docs)
            loss.backward()
            results.append([loss.detach()[None], *(p.grad.clone() for p in model.parameters())])
            results[-1].append(torch.cat(list(model.generate(tokens[:, :12], 5, temperature=0)), 1))
        assert {True, False} <= set(calls) and torch.equal(results[0].pop(), results[1].pop())
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().clamp(min=0.1)) for a, b in zip(*results))
