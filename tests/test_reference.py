"""kernels/reference.py against float64 loops written from the formulas, at odd sizes."""
import itertools
import math

import pytest
import torch

import kernels


def attention_by_loops(q, k, v, bias, window, sinks, positions, docs, causal, scale, relative=None):
    """Attention one score at a time; differentiable."""
    keys, values, offsets = relative or (None, None, None)
    B, H, Tq, D = q.shape
    Tk, group = k.shape[2], H // k.shape[1]
    out = []
    for b, h, row in itertools.product(range(B), range(H), range(Tq)):
        far = lambda table, distance: table[h % len(table), min(abs(distance), table.shape[1] - 1)]  # noqa: E731, B023
        i, scores = Tk - Tq + row, []
        for j in range(Tk):
            p = (lambda t: t) if positions is None else (lambda t: int((positions if positions.dim() == 1 else positions[b])[t]))
            distance = i - j
            seen = (distance >= 0 or not causal) and (not window or abs(p(i) - p(j)) < window or p(j) < sinks) and (docs is None or docs[b, i] == docs[b, j])
            score = (q[b, h, row] + (offsets[0][h] if offsets else 0)) @ k[b, h // group, j]
            score = (score + (0 if keys is None else (q[b, h, row] + (offsets[1][h] if offsets else 0)) @ far(keys, distance))) * scale
            if bias is not None and bias.dim() == 1:
                score = score - bias[h] * abs(distance)
            elif bias is not None:
                score = score + bias[h, min(abs(distance), bias.shape[1] - 1)]
            scores.append(score if seen else torch.tensor(-math.inf, dtype=q.dtype))
        p = torch.stack(scores).softmax(0)
        added = 0 if values is None else sum(p[j] * far(values, i - j) for j in range(Tk))
        out.append(p @ v[b, h // group] + added)
    return torch.stack(out).view(B, H, Tq, D)


@pytest.mark.parametrize("case", [
    dict(), dict(Tq=1), dict(Tq=3), dict(Hk=1), dict(Hk=3), dict(causal=False), dict(scale=0.3),
    dict(bias="slopes"), dict(bias="slopes", Tq=2, Hk=2), dict(bias="slopes", causal=False),
    dict(bias=1), dict(bias=5), dict(bias=5, Tq=4), dict(bias=13), dict(bias=13, Tq=1), dict(bias=40), dict(bias=5, causal=False),
    dict(window=4), dict(window=4, sinks=2), dict(window=1), dict(window=50), dict(window=4, sinks=1, Tq=3), dict(window=6, sinks=2, positions="gaps"),
    dict(window=6, positions="rows", Tq=5), dict(docs=True), dict(docs=True, bias=5, window=3, Tq=6), dict(docs=True, bias="slopes", Hk=2, sinks=1, window=5),
], ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()) or "plain")
def test_attention(case, rng):
    B, H, Tk, D = 2, 6, 13, 7
    Tq, Hk = case.get("Tq", Tk), case.get("Hk", H)
    q, k, v = torch.randn(B, H, Tq, D).double(), torch.randn(B, Hk, Tk, D).double(), torch.randn(B, Hk, Tk, D).double()
    bias = case.get("bias")
    bias = None if bias is None else torch.rand(H).double() if bias == "slopes" else torch.randn(H, bias).double()
    positions = {None: None, "gaps": torch.tensor(sorted(rng.choice(30, Tk, replace=False))), "rows": torch.tensor([sorted(rng.choice(30, Tk, replace=False)) for _ in range(B)])}[case.get("positions")]
    docs = torch.tensor([sorted(rng.integers(0, 3, Tk)) for _ in range(B)]) if case.get("docs") else None
    want = attention_by_loops(q, k, v, bias, case.get("window", 0), case.get("sinks", 0), positions, docs, case.get("causal", True), case.get("scale", D**-0.5))
    options = dict(window=case.get("window", 0), sinks=case.get("sinks", 0), positions=positions, docs=docs, causal=case.get("causal", True), scale=case.get("scale"))
    got = kernels.attention(q, k, v, bias=bias, **options)
    assert (got - want).abs().max() < (1e-12 if bias is None else 1e-6)  # the added terms are float32
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        got = kernels.attention(*(t.to(dtype) for t in (q, k, v)), bias=None if bias is None else bias.float(), **options)
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < limit


@pytest.mark.parametrize("case", [
    dict(), dict(heads=1), dict(values=False), dict(offsets=True), dict(values=False, offsets=True), dict(m=1), dict(m=5, heads=1), dict(m=40), dict(Tq=1), dict(Tq=4, offsets=True, Hk=2), dict(Hk=1),
    dict(causal=False), dict(causal=False, m=5, offsets=True), dict(window=4, sinks=2), dict(window=6, positions=True, Tq=5, m=5), dict(docs=True, Hk=3), dict(docs=True, bias=True, window=3, m=5, Tq=6),
    dict(scale=0.3, bias=True, offsets=True),
], ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()) or "plain")
def test_relative_attention(case, rng):
    """Relative keys, values and query offsets, and all their gradients, against float64 loops."""
    B, H, Tk, D, m = 2, 6, 13, 7, case.get("m", 13)
    Tq, Hk, heads = case.get("Tq", Tk), case.get("Hk", H), case.get("heads", H)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v, keys = draw(B, H, Tq, D), draw(B, Hk, Tk, D), draw(B, Hk, Tk, D), draw(heads, m, D)
    values, offsets = draw(heads, m, D) if case.get("values", True) else None, (draw(H, D), draw(H, D)) if case.get("offsets") else None
    bias = torch.randn(H, 6) if case.get("bias") else None
    positions = torch.stack((torch.arange(13), torch.arange(13) + 4)) if case.get("positions") else None
    docs = torch.tensor([sorted(rng.integers(0, 3, Tk)) for _ in range(B)]) if case.get("docs") else None
    options = dict(window=case.get("window", 0), sinks=case.get("sinks", 0), positions=positions, docs=docs, causal=case.get("causal", True))
    want = attention_by_loops(q, k, v, bias if bias is None else bias.double(), scale=case.get("scale", D**-0.5), relative=(keys, values, offsets), **options)
    got = kernels.attention(q, k, v, bias=bias, relative=(keys, values, offsets), scale=case.get("scale"), **options)
    assert (got - want).abs().max() < (1e-12 if bias is None else 1e-6)
    inputs, out = [t for t in (q, k, v, keys, values, *(offsets or ())) if t is not None], torch.randn_like(want)
    theirs = torch.autograd.grad((want * out).sum(), inputs, allow_unused=True)
    for mine, right in zip(torch.autograd.grad((got * out).sum(), inputs), theirs):
        assert (mine - (0 if right is None else right)).abs().max() < (1e-11 if bias is None else 1e-5)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        low = lambda t: None if t is None else t.detach().to(dtype)  # noqa: E731, B023
        y = kernels.attention(low(q), low(k), low(v), bias=bias, relative=(low(keys), low(values), tuple(map(low, offsets)) if offsets else None), scale=case.get("scale"), **options)
        assert y.dtype == dtype and (y.double() - want).norm() / want.norm() < limit


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("keys", [1, 2, 4, 9])
def test_the_shift_is_a_gather(n, keys, rng):
    """From falling distance to keys, and its transpose back."""
    from kernels import reference
    x, p = torch.randn(2, n, n + keys - 1, dtype=torch.float64), torch.randn(2, n, keys, dtype=torch.float64)
    index = n - 1 - torch.arange(n)[:, None] + torch.arange(keys)
    assert torch.equal(reference._to_keys(x, keys), x.gather(2, index.expand(2, n, keys)))
    back = reference._to_distances(p)
    assert torch.equal(back, torch.zeros_like(x).scatter(2, index.expand(2, n, keys), p))
    assert ((reference._to_keys(x, keys) * p).sum() - (x * back).sum()).abs() < 1e-12


def test_relative_attention_in_blocks_of_queries_is_the_same(rng):
    """700 tokens need several blocks at 64 MiB each; so do the same queries cut by hand."""
    q, k, v, table = torch.randn(4, 6, 700, 4), torch.randn(4, 6, 700, 4), torch.randn(4, 6, 700, 4), torch.randn(1, 33, 4)
    whole = kernels.attention(q, k, v, relative=(table, table, None))
    parts = [kernels.attention(q[:, :, i:i + 100], k[:, :, :i + 100], v[:, :, :i + 100], relative=(table, table, None)) for i in range(0, 700, 100)]
    assert (1 << 24) // (4 * 6 * 2 * 700) < 700 and (torch.cat(parts, 2) - whole).abs().max() < 1e-4


def test_attention_in_blocks_of_queries_is_the_same(monkeypatch, rng):
    """Long contexts are computed a block of queries at a time."""
    q, k, v, bias = torch.randn(1, 2, 600, 8), torch.randn(1, 2, 600, 8), torch.randn(1, 2, 600, 8), torch.randn(2, 9)
    whole = kernels.attention(q, k, v, bias=bias, window=100)
    sizes = []
    from kernels import reference
    real = reference._added
    monkeypatch.setattr(reference, "_added", lambda rows, *rest: sizes.append(rows) or real(rows, *rest))
    n = 64  # the same call with queries cut by hand
    parts = [reference.attention(q[:, :, i:i + n], k[:, :, :i + n], v[:, :, :i + n], bias=bias, window=100) for i in range(0, 576, n)]
    assert max(sizes) == n
    assert (torch.cat(parts, 2) - whole[:, :, :576]).abs().max() < 1e-5
    big = torch.randn(1, 1, 1, 8).expand(1, 1, 5000, 8)
    sizes.clear()
    reference.attention(big, big, big, bias=torch.zeros(1))
    assert len(sizes) == 2 and sum(sizes) == 5000


@pytest.mark.parametrize("m", [1, 4, 11, 30])
def test_gradient_of_a_table(m, rng):
    """By finite differences in float64, and its sum over distances is zero: a constant added to all scores changes nothing."""
    q, k, v = (torch.randn(2, 3, 11, 4, dtype=torch.float64) for _ in range(3))
    table = torch.randn(3, m, dtype=torch.float64, requires_grad=True)
    out = torch.randn(2, 3, 11, 4, dtype=torch.float64)
    loss = lambda t: (attention_by_loops(q, k, v, t, 0, 0, None, None, True, 0.5) * out).sum()  # noqa: E731
    (kernels.attention(q, k, v, bias=table, scale=0.5) * out).sum().backward()
    assert table.grad.sum(1).abs().max() < 1e-6
    for h, d in {(0, 0), (2, m - 1), (1, m // 2)}:
        step = torch.zeros_like(table)
        step[h, d] = 1e-4
        slope = (loss(table.detach() + step) - loss(table.detach() - step)) / 2e-4
        assert abs(slope - table.grad[h, d]) < 1e-5 * max(1, abs(slope))


@pytest.mark.parametrize("width,rotated", [(8, 8), (10, 6), (2, 2), (16, 0)])
def test_rope_rotates_pairs(width, rotated, rng):
    """Each pair (c, c + R/2) is a complex number turned by its angle; what is not rotated passes unchanged."""
    q, k = torch.randn(2, 4, 5, width), torch.randn(2, 2, 5, width)
    angle = torch.rand(2, 5, rotated // 2, dtype=torch.float64) * 10
    got = kernels.rope(q, k, angle.cos().float(), angle.sin().float())
    for x, y in zip((q, k), got):
        a, b = x[..., :rotated // 2].double(), x[..., rotated // 2:rotated].double()
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
        assert torch.allclose(y.double(), torch.cat((turned.real, turned.imag, x[..., rotated:].double()), -1), atol=1e-5)
        assert y.dtype == x.dtype
    low = kernels.rope(q.bfloat16(), k.bfloat16(), angle.cos().float(), angle.sin().float())[0]
    assert low.dtype == torch.bfloat16 and (low.float() - got[0]).abs().max() < 0.05


def test_a_loss_of_many_chunks_is_not_unrolled(monkeypatch):
    """Compiled, a graph would hold every chunk again; of many it calls the loss as it is."""
    from kernels import reference
    monkeypatch.setattr(reference, "_chunks", lambda x, w: [slice(i, i + 2) for i in range(0, len(x), 2)])
    for n, in_one in ((32, True), (160, False)):
        torch._dynamo.reset()
        seen, x, w = [], torch.randn(n, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        targets = torch.randint(0, 30, (n,))
        f = lambda x: reference.linear_cross_entropy(x * 2, w, targets)  # noqa: E731
        loss = torch.compile(f, backend=lambda graph, inputs: seen.append(len(graph.graph.nodes)) or graph.forward)(x)
        loss.backward()
        got, x.grad, w.grad = (x.grad, w.grad), None, None
        want = f(x)
        want.backward()
        assert (len(seen) == 1) == in_one and (in_one or sum(seen) < 40) and torch.equal(loss, want) and torch.equal(got[0], x.grad) and torch.equal(got[1], w.grad)


@pytest.mark.parametrize("n,vocab", [(1, 2), (37, 11), (300, 257)])
def test_linear_cross_entropy(n, vocab, monkeypatch, rng):
    """Loss and both gradients against float64 autograd of the plain formula, with several chunks and ignored targets."""
    from kernels import reference
    if n > 1:
        monkeypatch.setattr(reference, "_chunks", lambda x, w: [slice(i, i + 16) for i in range(0, len(x), 16)])
    x, w, y = torch.randn(n, 6), torch.randn(vocab, 6), torch.randint(0, vocab, (n,))
    y[torch.rand(n) < 0.3] = -1
    y[0] = 0
    for reduction in ("mean", "sum", "none"):
        weight = torch.randn(n) if reduction == "none" else None
        a, b = x.double().requires_grad_(), w.double().requires_grad_()
        want = torch.nn.functional.cross_entropy(a @ b.t(), y, ignore_index=-1, reduction=reduction)
        (want if weight is None else (want * weight).sum()).backward()
        c, d = x.clone().requires_grad_(), w.clone().requires_grad_()
        got = kernels.linear_cross_entropy(c, d, y, reduction)
        (got if weight is None else (got * weight).sum()).backward()
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
        for mine, theirs in ((c.grad, a.grad), (d.grad, b.grad)):
            assert (mine.double() - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6  # softmax - 1 cancels where a token is all but certain
        with torch.no_grad():
            assert torch.allclose(kernels.linear_cross_entropy(x, w, y, reduction).double(), want.detach(), rtol=1e-5, atol=1e-5)
    for frozen in (0, 1):  # one of the two alone
        pair = [x.clone(), w.clone()]
        pair[1 - frozen].requires_grad_()
        kernels.linear_cross_entropy(*pair, y, "sum").mul(0.5).backward()
        both = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        (torch.nn.functional.cross_entropy(both[0] @ both[1].t(), y, ignore_index=-1, reduction="sum") / 2).backward()
        assert torch.allclose(pair[1 - frozen].grad, both[1 - frozen].grad, rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_keeps_memory_small(rng):
    """60,000 tokens of 5,000 words: the logits would take 1.2 GB, forward and backward stay under a quarter of that."""
    import subprocess
    import sys
    from conftest import ROOT
    code = ("import resource, torch; from kernels import linear_cross_entropy as f; torch.set_num_threads(2)\n"
            "x, w = torch.randn(60000, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True); y = torch.randint(0, 5000, (60000,))\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; f(x, w, y).backward()\n"
            "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(out) < 700, f"{out} MB"
