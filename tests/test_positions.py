"""The position schemes: golden values, identities, and cached decoding equal to uncached."""
import math

import pytest
import torch

from model import POSITIONS, Cache, GPTConfig, PastTrainedLength, Refused

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
