"""The position schemes: golden values, identities, and cached decoding equal to uncached."""
import math

import pytest
import torch

from model import GPT, POSITIONS, Cache, GPTConfig, PastTrainedLength, Refused

SCHEMES = sorted(POSITIONS)


def scheme(pos, **settings):
    return POSITIONS[pos](GPTConfig(pos=pos, **{"n_head": 4, "n_embd": 32, "block_size": 1024, **settings}))


def test_alibi_slopes():
    """The closed form of the paper for 1..32 heads and some odd ones, and its printed examples."""
    def closed(H):
        if math.log2(H).is_integer():
            return [2 ** (-8 * (h + 1) / H) for h in range(H)]
        c = 2 ** math.floor(math.log2(H))
        return closed(c) + closed(2 * c)[0::2][:H - c]
    for H in (*range(1, 33), 40, 48, 64, 112):
        got = scheme("alibi", n_head=H, head_dim=8).bias(10, 0)
        assert got.dtype == torch.float32 and got.tolist() == pytest.approx(closed(H), rel=1e-6), H
    assert scheme("alibi", n_head=6, head_dim=8).slopes.tolist() == [.25, .0625, .015625, .00390625, .5, .125]
    assert scheme("alibi", n_head=8).slopes.tolist() == [2.0 ** -h for h in range(1, 9)]
    assert scheme("alibi", n_head=12, head_dim=8).slopes[8:].tolist() == pytest.approx([.70711, .35355, .17678, .08839], abs=1e-5)
    assert scheme("alibi", n_head=1).slopes.tolist() == [2.0 ** -8]


def test_t5_buckets():
    """Starts of the logarithmic buckets for 32 buckets and max_distance 128, from T5's own function."""
    t5 = scheme("t5")
    starts = [int((t5.bucket == b).nonzero()[0]) for b in range(32)]
    assert starts == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert len(t5.bucket) == 114  # constant from 113 on: nothing longer is kept
    with torch.no_grad():
        t5.weight.copy_(torch.randn(4, 32))
    table = t5.bias(500, 0)
    assert table.shape == (4, 114) and torch.equal(table[:, -1], t5.weight[:, 31]) and torch.equal(t5.bias(7, 1), t5.weight[:, :7])


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 64, 100, 128, 300])
def test_t5_visits_every_bucket_it_reads(length):
    """A window of L tokens has distances 0..L-1; the bucket read beyond them is one that training visited."""
    bucket = scheme("t5", block_size=length).bucket
    assert 1 <= len(bucket) <= length
    assert (bucket.diff() >= 0).all() and bucket[0] == 0


def test_sinusoidal_golden():
    s = scheme("sinusoidal", n_embd=8, n_head=1)
    got = s.embed(torch.zeros(1, 1, 8), torch.tensor([1]))[0, 0] / s.scale
    assert got.tolist() == pytest.approx([.841471, .540302, .099833, .995004, .01, .99995, .001, 1], abs=1e-6)
    far = s.embed(torch.zeros(1, 1, 8), torch.tensor([1_000_000]))[0, 0] / s.scale
    assert far.tolist() == pytest.approx([f(1_000_000 / 10000 ** (k / 4)) for k in range(4) for f in (math.sin, math.cos)], abs=1e-5)


def test_rope_interleaved_after_permutation(rng):
    """Our half-split layout equals the interleaved one once each head's rows are permuted (A.9)."""
    import kernels
    D, T = 8, 6
    x = torch.randn(1, 1, T, D)
    angle = torch.arange(T)[:, None] * 10000.0 ** -(torch.arange(0, D, 2) / D)
    half = kernels.rope(x, x, angle.cos(), angle.sin())[0]
    order = torch.arange(D).view(2, D // 2).t().flatten()  # interleaved channel 2c, 2c + 1 is half-split c, c + D/2
    pairs = x[..., order].unflatten(-1, (D // 2, 2))
    turned = torch.stack((pairs[..., 0] * angle.cos() - pairs[..., 1] * angle.sin(), pairs[..., 0] * angle.sin() + pairs[..., 1] * angle.cos()), -1).flatten(-2)
    assert torch.allclose(half[..., order], turned, atol=1e-6)


def test_rope_fraction_edges(make):
    tokens = torch.randint(0, 50, (2, 9))
    none, nope = make(pos="rope", rope_fraction=0.0), make(pos="nope")
    assert torch.equal(none(tokens), nope(tokens))
    assert make(pos="rope", rope_fraction=0.25).pos.inv_freq.tolist() == [1.0]
    assert torch.allclose(make(pos="rope", rope_fraction=0.5, head_dim=16).pos.inv_freq, 10000.0 ** -(torch.arange(0, 8, 2).double() / 8))


@pytest.mark.parametrize("pos", SCHEMES)
def test_shift_invariance(pos, make):
    """Logits of a relative scheme do not move when all positions do; those of an absolute one do."""
    model, tokens = make(pos=pos, block_size=2000), torch.randint(0, 50, (2, 12))
    here, there = model(tokens), model(tokens, positions=torch.arange(12) + 1000)
    assert ((here - there).abs().max() < 1e-4) == (pos not in ("learned", "sinusoidal"))


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"window": 5, "sinks": 2, "n_kv_head": 2}, {"qk_norm": True, "head_dim": 6, "tied": False}], ids=str)
@pytest.mark.parametrize("pos", SCHEMES)
def test_cached_equals_uncached(pos, settings, make):
    """Token by token, in pieces, and at once; past the made-for length too, where the scheme goes there (promise 8)."""
    model = make(pos=pos, **settings)
    T = 24 if pos == "learned" else 40
    tokens = torch.randint(0, 50, (2, T))
    with torch.no_grad(), pytest.warns(PastTrainedLength) if T > 24 else torch.no_grad():
        whole = model(tokens)
        for cuts in ([1] * T, [7, 1, 1, 9, T - 18], [T - 1, 1]):
            cache, parts, at = Cache(), [], 0
            for n in cuts:
                parts.append(model(tokens[:, at:at + n], cache=cache))
                at += n
            assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()


@pytest.mark.parametrize("pos", SCHEMES)
def test_causal_and_documents(pos, make):
    """The future changes nothing, and packed documents read as if they stood alone."""
    model = make(pos=pos)
    a, b = torch.randint(0, 50, (1, 9)), torch.randint(0, 50, (1, 11))
    packed, docs = torch.cat((a, b), 1), torch.tensor([[0] * 9 + [1] * 11])
    positions = torch.cat((torch.arange(9), torch.arange(11)))
    together = model(packed, positions=positions, docs=docs)
    assert torch.allclose(together[:, :9], model(a), atol=1e-5) and torch.allclose(together[:, 9:], model(b), atol=1e-5)
    changed = packed.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 50
    assert torch.allclose(model(changed)[:, :12], model(packed)[:, :12], atol=1e-6)


@pytest.mark.parametrize("pos", SCHEMES)
def test_positions_per_row_and_padding(pos, make):
    """Prompts of unequal length, padded on the left, each with positions of its own."""
    model, pad = make(pos=pos), 4
    a, b = torch.randint(0, 50, (1, 12)), torch.randint(0, 50, (1, 8))
    tokens = torch.cat((a, torch.cat((torch.zeros(1, pad, dtype=torch.long), b), 1)))
    docs = torch.tensor([[0] * 12, [-1] * pad + [0] * 8])
    positions = torch.stack((torch.arange(12), torch.cat((torch.zeros(pad, dtype=torch.long), torch.arange(8)))))
    if POSITIONS[pos].by_index:
        positions[1, :pad] = torch.arange(pad)
    out = model(tokens, positions=positions, docs=docs)
    assert torch.allclose(out[:1], model(a), atol=1e-5) and torch.allclose(out[1:, pad:], model(b), atol=1e-5)


@pytest.mark.parametrize("pos", SCHEMES)
def test_gaps_are_refused_where_distance_goes_by_index(pos, make):
    model, tokens, gaps = make(pos=pos), torch.randint(0, 50, (1, 6)), torch.tensor([0, 1, 2, 9, 10, 11])
    if pos not in ("nope", "learned", "sinusoidal", "rope"):
        with pytest.raises(Refused, match="by index"):
            model(tokens, positions=gaps)
    else:
        assert model(tokens, positions=gaps).isfinite().all()
    with pytest.raises(Refused, match="negative"):
        model(tokens, positions=torch.arange(6) - 1)


def test_what_is_refused(make):
    for settings, words in ((dict(pos="rope", head_dim=7), "even"), (dict(pos="sinusoidal", n_embd=33, head_dim=8), "even"), (dict(pos="cope"), "one of"), (dict(n_head=4, n_kv_head=3), "divisor"),
                            (dict(n_embd=30), "head_dim"), (dict(sinks=2), "window"), (dict(pos="rope", rope_fraction=1.5), "0..1"), (dict(n_layer=0), "at least 1"), (dict(dropout=1.0), "share"),
                            (dict(pos="rope", rope_base=1.0), "above 1")):
        with pytest.raises(Refused, match=words):
            make(**settings)
    learned = make(pos="learned")
    with pytest.raises(Refused, match="24"):
        learned(torch.zeros(1, 25, dtype=torch.long))
    with pytest.raises(Refused, match="24"):
        learned(torch.zeros(1, 3, dtype=torch.long), positions=torch.tensor([22, 23, 24]))
    with pytest.raises(Refused, match="max_new_tokens=5"):
        list(learned.generate(torch.zeros(1, 20, dtype=torch.long), 6))
    assert len(list(learned.generate(torch.zeros(1, 20, dtype=torch.long), 5))) == 5


@pytest.mark.parametrize("pos", SCHEMES)
def test_constants_keep_their_dtype_and_are_not_saved(pos, make):
    """model.bfloat16() must not round frequencies, slopes or buckets: the classic bug."""
    model = make(pos=pos)
    before = {name: getattr(model.pos, name).clone() for name in model.pos.__dict__.get("_constants", [])}
    model.bfloat16()
    for name, tensor in before.items():
        assert getattr(model.pos, name).dtype == tensor.dtype and torch.equal(getattr(model.pos, name), tensor)
    assert not any(word in name for name in model.state_dict() for word in ("inv_freq", "slopes", "bucket", "pos.table" if pos != "learned" else "inv_freq"))
    assert model(torch.zeros(1, 5, dtype=torch.long)).dtype == torch.bfloat16


# --- the schemes by distance, the hybrids and random positions ---------------------------------------------------------

def layer_by_loops(model, x, terms):
    """The first block's attention over normalised inputs x (T, C) in float64, one score at a time: terms(q, h, i, j) is what the scheme adds to q k, before
    the scale; its second result is added to the value."""
    c, w = model.config, {n: p.detach().double() for n, p in model.blocks[0].attention.named_parameters()}
    T, D = len(x), c.head_dim
    q, k, v = ((x.double() @ w[f"{n}.weight"].T).view(T, -1, D) for n in "qkv")
    out = torch.zeros(T, c.n_head, D, dtype=torch.float64)
    for h in range(c.n_head):
        for i in range(T):
            more = [terms(q[i, h], h, i, j) for j in range(i + 1)]
            p = torch.stack([(q[i, h] @ k[j, h] + more[j][0]) / math.sqrt(D) for j in range(i + 1)]).softmax(0)
            out[i, h] = sum(p[j] * (v[j, h] + more[j][1]) for j in range(i + 1))
    return out.flatten(1) @ w["o.weight"].T


def layer(model, x):
    return model.blocks[0].attention(x[None], model.pos, torch.arange(len(x)), None, None)[0]


@pytest.mark.parametrize("clip", [3, 1000])
def test_shaw_by_the_paper(clip, make, monkeypatch):
    """With k >= T it is the unclipped form, a vector for each distance; with k = 3 all distances from 3 on share one."""
    monkeypatch.setattr(POSITIONS["shaw"], "clip", clip)
    model, x = make(pos="shaw", block_size=40), torch.randn(17, 32)
    keys, values = model.pos.keys[0].double(), model.pos.values[0].double()
    assert len(keys) == (4 if clip == 3 else 21)
    want = layer_by_loops(model, x, lambda q, h, i, j: (q @ keys[min(i - j, clip)], values[min(i - j, clip)]))
    assert (layer(model, x) - want).abs().max() < 1e-4
    assert scheme("shaw", block_size=1000).keys.shape == (4, 4 if clip == 3 else 501, 8)  # at most half the trained length


def test_shaw_starts_as_nope_and_never_asks_for_a_row_it_has_not():
    for length in (1, 2, 3, 7, 256):
        assert len(scheme("shaw", block_size=length).keys[0]) == min(128, max(1, length // 2)) + 1
    torch.manual_seed(3)
    shaw = GPT(GPTConfig(pos="shaw", n_embd=32, n_head=4, block_size=24))
    torch.manual_seed(3)
    nope, tokens = GPT(GPTConfig(pos="nope", n_embd=32, n_head=4, block_size=24)), torch.randint(0, 257, (1, 24))
    assert torch.allclose(shaw(tokens), nope(tokens), atol=1e-5)


def test_nezha_by_the_paper(make):
    table = scheme("nezha", n_embd=64, n_head=8).relative(1000, 0)[0][0]
    assert len(table) == 65
    for distance in (0, 1, 17, 64):
        assert table[distance].tolist() == pytest.approx([f(distance * 10000 ** (-2 * k / 8)) for k in range(4) for f in (math.sin, math.cos)], abs=1e-6)
    model, x = make(pos="nezha", block_size=20), torch.randn(17, 32)
    rows = model.pos.relative(1000, 0)[0][0].double()
    want = layer_by_loops(model, x, lambda q, h, i, j: (q @ rows[min(i - j, 10)], rows[min(i - j, 10)]))
    assert len(rows) == 11 and (layer(model, x) - want).abs().max() < 1e-4


def test_xl_by_the_paper(make):
    """(q + u) k + (q + v) W_R R, by gathering R of each distance: what the shift must equal."""
    model, x, C = make(pos="xl"), torch.randn(17, 32), 32
    u, v, W = model.pos.u.double(), model.pos.v.double(), model.pos.project[0].double()
    k = (x.double() @ model.blocks[0].attention.k.weight.double().T).view(17, 4, 8)

    def terms(q, h, i, j):
        R = torch.tensor([f((i - j) * 10000 ** (-2 * c / C)) for f in (math.sin, math.cos) for c in range(C // 2)], dtype=torch.float64)
        return u[h] @ k[j, h] + (q + v[h]) @ (W @ R).view(4, 8)[h], 0
    want = layer_by_loops(model, x, terms)
    assert (layer(model, x) - want).abs().max() < 1e-4 * want.abs().max()
    assert {name: tuple(p.shape) for name, p in model.pos.named_parameters()} == {"u": (4, 8), "v": (4, 8), "project": (2, 32, 32)}  # u and v shared, W_R per layer


def test_xl_keeps_far_sinusoids_apart_under_autocast():
    """The distance's sinusoids and their projection stay float32: in bfloat16, distances past 256 would be alike."""
    torch.manual_seed(0)
    xl = scheme("xl")
    with torch.autocast("cpu", torch.bfloat16):
        keys = xl.relative(3000, 1)[0]
    assert keys.dtype == torch.float32 and torch.equal(keys, xl.relative(3000, 1)[0])


def test_kerple_golden():
    log, power = scheme("kerple"), scheme("kerple-power")
    with torch.no_grad():
        for p in (log.r1, log.r2, power.r1):
            p.fill_(math.log(math.expm1(1.0)))  # softplus of it is 1
        power.r2.fill_(math.log(0.7 / 1.3))  # 2 sigmoid of it is 0.7
    assert log.bias(101, 0)[2, [0, 1, 10, 100]].tolist() == pytest.approx([0, -.6931, -2.3979, -4.6151], abs=1e-4)
    assert power.bias(101, 0)[1, [0, 1, 10, 100]].tolist() == pytest.approx([0, -1, -10**.7, -100**.7], rel=1e-5)
    for s in (log, power):
        s.bias(101, 0).sum().backward()
        assert all(p.grad.isfinite().all() and (p.grad != 0).all() for p in s.parameters())
        assert s.bias(1, 0).tolist() == [[0.0]] * 4 and s.bias(7, 1).dtype == torch.float32
    torch.manual_seed(0)
    log, power = scheme("kerple", n_head=1000, head_dim=8), scheme("kerple-power", n_head=1000, head_dim=8)
    softplus = torch.nn.functional.softplus
    for value, top in ((softplus(log.r1), 2), (softplus(log.r2), 1), (softplus(power.r1), 1), (2 * power.r2.sigmoid(), 2)):
        assert 0 < value.min() < 0.05 and 0.95 * top < value.max() <= top and value.mean().item() == pytest.approx(top / 2, rel=0.1)


def test_sandwich_golden():
    bias = scheme("sandwich", n_head=8, n_embd=64).bias(4097, 0)
    assert bias[0, [0, 1, 16, 256, 4096]].tolist() == pytest.approx([0, -1.4466, -22.3407, -42.4357, -67.2693], abs=1e-4)
    assert torch.allclose(bias[3] * 4, bias[0])  # head h is divided by 8 h / H


def test_what_beyond_odd_widths_is_refused(make):
    for pos, settings, words in (("nezha", dict(head_dim=7), "even"), ("xl", dict(n_embd=33, head_dim=8), "even"), ("rope", dict(nope_every=1), "choose 2 to 2"), ("rope", dict(nope_every=3), "choose 2 to 2"),
                                 ("learned", dict(nope_every=2), "leave it out"), ("nope", dict(nope_every=2), "leave it out"), ("rope", dict(attn_scale=0.0), "above 0"),
                                 ("t5", dict(random_positions=99), "distance by index"), ("nope", dict(random_positions=99), "distance by index"), ("rope", dict(random_positions=23), "block_size=24"), ("rope", dict(random_positions=99, window=8), "a window counts")):
        with pytest.raises(Refused, match=words):
            make(pos=pos, **settings)


@pytest.mark.parametrize("pos", ["rope", "alibi", "xl"])
def test_hybrid_layers(pos, make, tmp_path):
    """Every second block is without scheme and window, as if each block had been given its own by hand; cached too, and through a checkpoint."""
    model, tokens = make(pos=pos, n_layer=4, nope_every=2, window=6, sinks=1), torch.randint(0, 50, (1, 20))
    assert model.config.nope_layers == [1, 3] and model.config.window_layers == [0, 2]
    plain, nope = make(pos=pos, n_layer=4, window=6, sinks=1), make(pos="nope", n_layer=4)
    for other in (plain, nope):
        other.load_state_dict(model.state_dict(), strict=False)
    x, where = model.embed(tokens), torch.arange(20)
    for number in range(4):
        other = (plain, nope)[number % 2]
        x = other.blocks[number](x, other.pos, where, None, None)
    assert torch.allclose(model(tokens), model.head(model.norm(x)), atol=1e-4)
    cache = Cache()
    assert torch.allclose(torch.cat([model(t, cache=cache) for t in tokens.split([7, 1, 12], 1)], 1), model(tokens), atol=1e-4)
    model.save(tmp_path / "step-000000")
    again = GPT.load(tmp_path)
    assert again.config == model.config and torch.equal(again(tokens), model(tokens))
    full, short = 12 * 4 * 8, min(20, 7)  # FLOPs of attention: two layers see all, two see window and sinks
    assert model.flops_per_token(20) - model.flops_per_token(8) == full * 2 * (20 - 8) + full * 2 * (short - short)


def test_attn_scale_multiplies_the_scores(make):
    model, scaled, tokens = make(pos="nope"), make(pos="nope", attn_scale=1.7), torch.randint(0, 50, (2, 15))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight *= 1.7
    assert torch.allclose(model(tokens), scaled(tokens), atol=1e-4) and not torch.allclose(make(pos="nope")(tokens), scaled(tokens), atol=1e-2)


@pytest.mark.parametrize("pos", ["learned", "sinusoidal", "rope"])
def test_random_positions(pos, make, tmp_path):
    model, tokens = make(pos=pos, random_positions=500), torch.randint(0, 50, (3, 20))
    drawn = model.draw_positions(3, 20, seed=1)
    assert drawn.shape == (3, 20) and (drawn.diff() > 0).all() and drawn.min() >= 0 and drawn.max() < 500 and drawn.dtype == torch.int64
    assert torch.equal(drawn, model.draw_positions(3, 20, seed=1)) and not torch.equal(drawn, model.draw_positions(3, 20, seed=2))
    many = model.draw_positions(4000, 5, seed=3).double()
    assert many.mean().item() == pytest.approx(249.5, abs=5) and many[:, 0].mean().item() == pytest.approx(500 / 6, abs=5)  # the least of five uniform draws
    assert torch.equal(make(pos=pos, random_positions=24).draw_positions(2, 24, 0), torch.arange(24).expand(2, 24)) and make(pos=pos).draw_positions(2, 5, 0) is None
    whole = torch.stack([model(t[None], positions=p)[0] for t, p in zip(tokens, drawn)])
    assert torch.allclose(model(tokens, positions=drawn), whole, atol=1e-5)  # a row of positions for each sequence
    written = torch.cat(list(model.generate(tokens, 30, temperature=0)), 1)
    where, grown = model.draw_positions(1, 49, 0)[0], tokens
    for n in range(20, 50):  # the cache changes nothing
        grown = torch.cat((grown, model(grown, positions=where[:n])[:, -1:].argmax(-1)), 1)
    assert torch.equal(grown[:, 20:], written)
    model.save(tmp_path / "step-000000")
    assert torch.equal(GPT.load(tmp_path)(tokens, positions=drawn), model(tokens, positions=drawn))
    if pos != "learned":
        model.stretch("none", 1.0)
    assert torch.equal(GPT.load(tmp_path)(tokens, positions=drawn), model(tokens, positions=drawn))
    with pytest.raises(Refused, match="500"):
        model.stretch("pi", 1.0)  # would cut the vectors of `learned` down to the length of a window
    with pytest.raises(Refused, match="500"):
        model.stretch("none", 2)
    if pos == "learned":
        assert len(model.pos.table) == 500
        with pytest.raises(Refused, match="500"):
            model(tokens, positions=torch.arange(481, 501))


def test_schemes_share_every_other_weight():
    """Of one seed: what differs between two schemes is the scheme."""
    models = []
    for pos in POSITIONS:
        torch.manual_seed(5)
        models.append(GPT(GPTConfig(pos=pos, n_embd=32, n_head=4, n_layer=2)))
    for model in models[1:]:
        for (name, a), (other, b) in zip(models[0].named_parameters(), (item for item in model.named_parameters() if not item[0].startswith("pos."))):
            assert name == other and torch.equal(a, b)


def test_a_window_is_of_positions_where_they_are_given(make):
    """Positions with gaps, a window and sinks: the window counts positions, whole or with a cache, whichever call they came with; without positions it counts indices."""
    model, tokens = make(pos="rope", window=6, sinks=2), torch.randint(0, 50, (1, 14))
    positions = torch.tensor([0, 1, 2, 5, 6, 9, 10, 11, 12, 15, 16, 17, 18, 19])
    whole, cache = model(tokens, positions=positions), Cache()
    parts = [model(tokens[:, :8], positions=positions[:8], cache=cache), *(model(tokens[:, i:i + 1], positions=positions[i:i + 1], cache=cache) for i in range(8, 14))]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4) and not torch.allclose(model(tokens), whole, atol=1e-2)
    assert torch.equal(model(tokens, positions=torch.arange(14)), model(tokens))
    cache = Cache()  # positions are given first, and go on from where the indices are
    parts = [model(tokens[:, :3], positions=torch.tensor([0, 1, 2]), cache=cache), model(tokens[:, 3:], cache=cache)]
    assert cache.by_hand and torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-4)
