"""Stretching: the golden table, transformers' own functions, composition, checkpoints, and cached equal to uncached after it."""
import json
import math
import subprocess
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F

from model import GPT, POSITIONS, METHODS, KVCache, GPTConfig, UserError
from rope_scaling import lm_infinite, self_extend

PAIRS = [0, 4, 5, 8, 12, 16, 18, 24, 31]
# omega' / omega at those pairs for d = 64, base 10,000, trained at 1,024, factor 4, and the attention factor
GOLDEN = {
    ("pi",): ([.25] * 9, 1),
    ("ntk",): ([1, .836209, .799638, .699245, .584715, .488944, .447112, .341892, .25], 1),
    ("yarn",): ([1, 1, 1, .826923, .596154, .365385, .25, .25, .25], 1.138629),
    ("yarn", ("truncate", False)): ([1, 1, 1, .853986, .604842, .355697, .25, .25, .25], 1.138629),
    ("ntk-parts", ("ramp", "paper")): ([1, 1, 1, .6201, .350493, .265236, .25, .25, .25], 1),
    ("ntk-parts",): ([1, 1, 1, .826923, .596154, .365385, .25, .25, .25], 1),
    ("none",): ([1] * 9, 1),
    ("llama3", ("factor", 8.0)): ([1, 1, 1, 1, 1, .308676, .125, .125, .125], 1),
    ("llama3", ("low_freq_factor", 1.0), ("high_freq_factor", 32.0)): ([1, 1, 1, .6201, .350493, .265236, .25, .25, .25], 1),
    ("dynamic-ntk", ("factor", 2.0), ("length", 2048)): ([1, .867833, .837616, .753133, .653594, .56721, .528399, .427185, .333333], 1),
    ("dynamic-ntk", ("factor", 1.0), ("length", 4096)): ([1, .836209, .799638, .699245, .584715, .488944, .447112, .341892, .25], 1),
    ("dynamic-yarn", ("length", 4096)): ([1, 1, 1, .826923, .596154, .365385, .25, .25, .25], 1.138629),
    ("dynamic-yarn", ("length", 1000)): ([1] * 9, 1),
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_golden_table(key):
    ratios, factor = GOLDEN[key]
    options = dict(key[1:])
    inv_freq, m = METHODS[key[0]](10000.0, 64, 1024, options.pop("factor", 4.0), **options)
    plain, _ = METHODS["none"](10000.0, 64, 1024, 1.0)
    assert inv_freq.dtype == torch.float64 and inv_freq.shape == (32,)
    assert (inv_freq / plain)[PAIRS].tolist() == pytest.approx(ratios, abs=1e-6) and m == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"drope"}))
def test_factor_one_changes_nothing(method):
    inv_freq, m = METHODS[method](10000.0, 48, 333, 1.0)
    assert torch.equal(inv_freq, METHODS["none"](10000.0, 48, 333, 1.0)[0]) and m == 1.0


def test_limits():
    plain, _ = METHODS["none"](10000.0, 64, 1024, 1.0)
    ntk, _ = METHODS["ntk"](10000.0, 64, 1024, 4.0)
    assert ntk[0] == plain[0] and ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-12)
    parts, _ = METHODS["ntk-parts"](10000.0, 64, 1024, 4.0)
    assert torch.equal(parts[:5], plain[:5]) and torch.equal(parts[18:], plain[18:] / 4)
    assert [METHODS["yarn"](1e4, 64, 1024, float(s))[1] for s in (2, 4, 8, 16, 32)] == pytest.approx([1.069315, 1.138629, 1.207944, 1.277259, 1.346574], abs=1e-6)
    assert METHODS["yarn"](1e4, 64, 1024, 4.0, attention_factor=1.0)[1] == 1.0
    assert METHODS["ntk-parts"](1e4, 64, 150, 4.0)[0][0] == 1.0  # fewer than 64 pi tokens: the ramp's low end is negative and is raised to 0


SIZES = [(10000.0, 64, 1024, 4.0), (10000.0, 64, 1024, 2.5), (500000.0, 128, 8192, 8.0), (10000.0, 24, 64, 4.0), (10000.0, 6, 100, 3.0), (1234.5, 80, 777, 16.0), (10000.0, 32, 256, 4.0), (100.0, 10, 4000, 2.0)]


def test_transformers_agrees(tmp_path):
    """transformers' ROPE_INIT_FUNCTIONS, in a process outside the project, at odd sizes too."""
    code = f"""
import json, torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
out = []
for base, d, L, s in {SIZES!r}:
    for kind, extra in (("linear", {{}}), ("yarn", {{}}), ("yarn", {{"truncate": False}}), ("yarn", {{"beta_fast": 16.0, "beta_slow": 2.0}}),
                        ("llama3", {{"low_freq_factor": 1.0, "high_freq_factor": 32.0}}), ("llama3", {{"low_freq_factor": 1.0, "high_freq_factor": 4.0}}), ("dynamic", {{}})):
        own = kind in ("linear", "dynamic")  # these take the trained length from max_position_embeddings
        config = LlamaConfig(hidden_size=2 * d, num_attention_heads=2, head_dim=d, max_position_embeddings=L if own else int(L * s),
                             rope_parameters={{"rope_type": kind, "rope_theta": base, "factor": s, **({{}} if own else {{"original_max_position_embeddings": L}}), **extra}})
        inv_freq, m = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=3 * L)
        out.append([inv_freq.double().tolist(), float(m)])
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = iter(json.loads(done.stdout.splitlines()[-1]))
    for base, d, L, s in SIZES:
        for method, options in (("pi", {}), ("yarn", {}), ("yarn", {"truncate": False}), ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}), ("ntk-parts", {"ramp": "paper"}), ("llama3", {}),
                                ("dynamic-ntk", {"length": 3 * L})):
            inv_freq, m = next(theirs)
            mine, factor = METHODS[method](base, d, L, s, **options)
            assert mine.tolist() == pytest.approx(inv_freq, rel=2e-5), (base, d, L, s, method, options)
            assert factor == pytest.approx(m, rel=1e-9)
            if kind_of(method) == "dynamic":
                assert torch.equal(mine, METHODS["ntk-frozen"](base, d, L, 9.0, multiplier=s, length=3 * L)[0])  # its factor says only how far


def kind_of(method):
    return method.partition("-")[0]


def test_longrope_agrees_with_transformers(tmp_path):
    code = """
import json, torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
long, short = [1.0 + 0.37 * i for i in range(12)], [1.0 + 0.01 * i for i in range(12)]
config = LlamaConfig(hidden_size=48, num_attention_heads=2, head_dim=24, max_position_embeddings=4 * 333, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
                     "original_max_position_embeddings": 333, "long_factor": long, "short_factor": short})
print(json.dumps([[x.double().tolist(), float(m)] for x, m in (ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=n) for n in (1000, 300))]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    tables = dict(long_factor=[1.0 + 0.37 * i for i in range(12)], short_factor=[1.0 + 0.01 * i for i in range(12)])
    for length, (inv_freq, m) in zip((1000, 300), json.loads(done.stdout.splitlines()[-1])):
        mine, factor = METHODS["longrope"](1e4, 24, 333, 4.0, length=length, **tables)
        assert mine.tolist() == pytest.approx(inv_freq, rel=1e-6) and factor == pytest.approx(m, rel=1e-9)
    yarn, m = METHODS["yarn"](1e4, 24, 333, 4.0)
    table = (METHODS["none"](1e4, 24, 333, 1.0)[0] / yarn).tolist()
    again, factor = METHODS["longrope"](1e4, 24, 333, 4.0, long_factor=table, attention_factor=m)
    assert torch.allclose(again, yarn, rtol=1e-14) and factor == m  # any static table can be written so


def test_the_controlled_study_s_bases():
    """evaluation of 'NTK-32K' and 'NTK-64K' for d = 128, L = 4096: bases 305,922 (29 times), frozen up to 32k; 651,131 (61 times) at 64k; 607,779 (57 times)."""
    base = lambda **o: METHODS["ntk-lceg"](1e4, 128, 4096, 8.0, **o)[0][1].item() ** -64  # noqa: E731
    assert [base(), base(length=4096), base(length=32768)] == pytest.approx([305922] * 3, rel=2e-6)
    assert base(length=65536) == pytest.approx(651131, rel=2e-6) and base(multiplier=8.0) == pytest.approx(607779, rel=2e-6)


def test_resonance():
    plain, m = METHODS["yarn"](1e4, 64, 1024, 4.0)
    rounded, same = METHODS["resonance"](1e4, 64, 1024, 4.0)
    waves = 2 * math.pi / rounded
    assert same == m and torch.allclose(waves, waves.round(), rtol=1e-12) and ((waves - 2 * math.pi / plain).abs() <= 0.5 + 1e-9).all() and waves[0] == pytest.approx(6)
    assert torch.allclose(2 * math.pi / METHODS["resonance"](1e4, 64, 1024, 4.0, of="pi")[0], (2 * math.pi / METHODS["pi"](1e4, 64, 1024, 4.0)[0]).round(), rtol=1e-12)


def test_dropping_rope_is_nope(make):
    """The same weights, read by --pos=nope; and a scale multiplies the scores."""
    rope, nope, tokens = make(pos="rope"), make(pos="nope"), torch.randint(0, 50, (2, 60))
    nope.load_state_dict(rope.state_dict())
    rope.extend("drope", 4)
    assert torch.equal(rope(tokens), nope(tokens))
    rope.extend("drope", 1, scale=1.7)
    nope.extend("scale", 4, scale=1.7)
    assert torch.allclose(rope(tokens), nope(tokens), atol=1e-5) and not torch.allclose(rope(tokens), make(pos="nope")(tokens), atol=1e-3)


def turned(x, position, inv_freq):
    """One vector (D,) rotated to a position, in float64, as complex numbers."""
    half = len(inv_freq)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=torch.float64), position * inv_freq)
    return torch.cat((z.real, z.imag))


@pytest.mark.parametrize("T", [5, 16, 17, 19, 53])
@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_two_distances_in_one_attention(method, T, make):
    """Against the papers' definitions, score by score in float64: which keys are seen, and at what distance."""
    L, D, W, G, sinks = 16, 6, 5, 3, 4
    q, k, v = (torch.randn(1, h, T, D, dtype=torch.float64) for h in (4, 2, 2))
    inv_freq = METHODS["none"](1e4, D, L, 1.0)[0]
    turn = lambda x, pos: torch.stack([torch.stack([turned(x[0, h, t], pos[t], inv_freq) for t in range(x.shape[2])]) for h in range(x.shape[1])])[None]  # noqa: E731
    mine = lm_infinite(q, k, v, turn, L, 4.0, 0.3, sinks) if method == "lm-infinite" else self_extend(q, k, v, turn, L, 4.0, 0.3, W, G)
    right = torch.zeros_like(q)
    for h in range(4):
        for i in range(T):
            seen, scores = [], []
            for j in range(i + 1):
                far = i - j >= (L if method == "lm-infinite" else W)
                if method == "lm-infinite" and far and j >= sinks:
                    continue
                distance = i - j if not far else L if method == "lm-infinite" else i // G + W - W // G - j // G
                seen.append(j)
                scores.append(0.3 * turned(q[0, h, i], distance, inv_freq) @ k[0, h // 2, j])
            right[0, h, i] = torch.stack(scores).softmax(0) @ v[0, h // 2, seen]
    assert torch.allclose(mine, right, atol=1e-12)
    if method == "self-extend":  # the distances of W = 4, G = 2, i = 11
        assert [d if d < 4 else 11 // 2 + 4 - 2 - (11 - d) // 2 for d in range(12)] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_learned_vectors_are_interpolated(make, tmp_path):
    """Between rows, as numpy's interp has it; stretching again goes on from there; a checkpoint brings the longer table."""
    model = make(pos="learned")
    table = model.pos.table.detach().double()
    model.extend("pi", 2.5)
    assert model.pos.table.shape == (60, 32) and model.config.block_size == 60
    for c in (0, 31):
        assert model.pos.table[:, c].tolist() == pytest.approx(numpy.interp(numpy.arange(60) / 2.5, numpy.arange(24), table[:, c].numpy()).tolist(), abs=1e-6)
    model.save(tmp_path / "step-000000")
    again, tokens = GPT.load(tmp_path), torch.randint(0, 50, (1, 60))
    assert torch.equal(again(tokens), model(tokens)) and again.pos.table.requires_grad
    again.extend("pi", 2)
    assert again.pos.table.shape == (120, 32) and torch.allclose(again.pos.table[::2], model.pos.table, atol=1e-7)
    with pytest.raises(UserError, match="--method=pi"):
        again.extend("none", 2)


@pytest.mark.parametrize("factor", [2.0, 3.3])
@pytest.mark.parametrize("pos", ["sinusoidal", "shaw", "nezha", "xl", "t5", "alibi", "kerple", "kerple-power", "sandwich"])
def test_distances_and_positions_are_divided(pos, factor, make, tmp_path):
    """What acts at distance d after the stretching acted at d / factor before (in steps where there are rows), cached and whole, and through a checkpoint."""
    model, n = make(pos=pos), 90
    with torch.no_grad():
        for p in model.pos.parameters():
            p.normal_(0, 0.5)
    at = lambda table, d: table[..., min(d, table.shape[-1] - 1)].double()  # noqa: E731
    rows = lambda table, d: table[:, min(d, table.shape[1] - 1)].double()  # noqa: E731
    before = make(pos=pos)
    before.load_state_dict(model.state_dict())
    model.extend("pi", factor)
    for d in (0, 1, 2, 7, 23, 40, 89):
        if pos == "sinusoidal":
            angle = d / factor * before.pos.inv_freq.double()
            right, mine = torch.stack((angle.sin(), angle.cos()), -1).flatten() * before.pos.scale, model.pos.embed(torch.zeros(1, 1, 32), torch.tensor([d]))[0, 0].double()
        elif pos == "alibi":
            right, mine = before.pos.bias(n, 0).double() / factor * d, model.pos.bias(n, 0).double() * d
        elif pos in ("t5", "shaw"):
            right, mine = (at(m.pos.bias(n, 0), x) if pos == "t5" else torch.cat([rows(t, x) for t in m.pos.relative(n, 1)[:2]]) for m, x in ((before, int(d / factor + 1e-9)), (model, d)))
        elif pos == "nezha":
            angle = min(d / factor, 12) * 1e4 ** -(torch.arange(0, 8, 2).double() / 8)
            right, mine = torch.stack((angle.sin(), angle.cos()), -1).flatten(), rows(model.pos.relative(n, 0)[0], d)[0]
        elif pos == "xl":
            angle = d / factor * 1e4 ** -(torch.arange(0, 32, 2).double() / 32)
            right, mine = (model.pos.project[1].double() @ torch.cat((angle.sin(), angle.cos()))).view(4, 8), rows(model.pos.relative(n, 1)[0], d)
        else:
            r = [p.double() for p in (model.pos.parameters())]
            slopes = 4 / (8 * torch.arange(1, 5).double())
            right = {"kerple": lambda: -F.softplus(r[0]) * torch.log1p(F.softplus(r[1]) * d / factor), "kerple-power": lambda: -F.softplus(r[0]) * (d / factor) ** (2 * r[1].sigmoid()),
                     "sandwich": lambda: slopes * ((d / factor * 1e4 ** -(torch.arange(2, 130, 2).double() / 128)).cos().sum() - 64)}[pos]()
            mine = at(model.pos.bias(n, 0), d)
        assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6), d
    model.save(tmp_path / "step-000000")
    again, tokens, cache = GPT.load(tmp_path), torch.randint(0, 50, (2, n)), KVCache()
    with torch.no_grad():
        whole = again(tokens)
        assert torch.equal(whole, model(tokens)) and torch.allclose(torch.cat([again(t, cache=cache) for t in tokens.split(13, 1)], 1), whole, atol=1e-5)


def test_alibi_s_slopes_for_the_text_at_hand(make):
    """dynamic-pi: unchanged up to the trained length, then divided by length / trained, in steps of a quarter, cached too."""
    model, plain, tokens = make(pos="alibi"), make(pos="alibi"), torch.randint(0, 50, (1, 96))
    model.extend("dynamic-pi", 4)
    with torch.no_grad():
        assert torch.equal(model(tokens[:, :24]), plain(tokens[:, :24]))
        for n, position_scale in ((25, 1.25), (30, 1.25), (31, 1.5), (96, 4.0), (24, 1.0)):
            model(tokens[:, :n])
            assert torch.equal(model.pos.bias(n, 0), plain.pos.slopes / position_scale)
        cache = KVCache()
        for n in range(96):
            last = model(tokens[:, n:n + 1], cache=cache)
        assert torch.allclose(last[:, -1], model(tokens)[:, -1], atol=1e-5)


def test_transformer_xl_s_clamp(make):
    """Distances past the trained length read as the farthest that was trained."""
    model = make(pos="xl")
    with torch.no_grad():
        free = model.pos.relative(80, 0)[0]
        model.extend("clamp", 4)
        assert torch.equal(model.pos.relative(80, 0)[0], free[:, :24]) and torch.equal(model.pos.relative(9, 0)[0], free[:, :9])
        keys, tokens, cache = model.pos.relative(80, 0)[0], torch.randint(0, 50, (1, 80)), KVCache()
        assert keys.shape[1] == 24 and torch.allclose(torch.cat([model(t, cache=cache) for t in tokens.split(11, 1)], 1), model(tokens), atol=1e-5)


def test_attention_factor_scales_logits(make):
    """YaRN's factor multiplies queries and keys, so scores by its square."""
    model = make(pos="rope", block_size=256)
    q = torch.randn(1, 4, 9, 8)
    model.extend("ntk-parts", 4.0)
    a, b = model.pos.rotate(q, q, torch.arange(9), 0)
    model.extend("yarn", 1.0)
    c, d = model.pos.rotate(q, q, torch.arange(9), 0)
    assert torch.allclose((c @ d.mT) / (a @ b.mT), torch.tensor((0.1 * math.log(4) + 1) ** 2), rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_composition_and_checkpoints(method, make, tmp_path):
    """2x then 4x is 8x, to the bit, also through checkpoints; a second stretch replaces the method; base and trained length stay."""
    once, twice, tokens = make(pos="rope"), make(pos="rope"), torch.randint(0, 50, (1, 100))
    options = {"longrope": dict(long_factor=[1.0, 1.5, 4.0, 8.0], short_factor=[1.0, 1.1, 1.2, 1.3])}.get(method, {})
    once.extend(method, 8, **options)
    twice.extend("pi", 2)
    twice.save(tmp_path / "a" / "step-000000")
    twice = GPT.load(tmp_path / "a")
    assert twice.config.extension == {"method": "pi", "factor": 2, "options": {}, "original_length": 24} and twice.config.block_size == 48
    twice.extend(method, 4, **options)
    twice.save(tmp_path / "b" / "step-000000")
    twice = GPT.load(tmp_path / "b")
    assert torch.equal(once.pos.inv_freq, twice.pos.inv_freq) and once.pos.attention_factor == twice.pos.attention_factor
    assert twice.config.block_size == 192 and twice.config.original_length == 24
    assert torch.equal(once(tokens), twice(tokens))
    with torch.no_grad():
        cache, at = KVCache(), 0
        for n in (60, 1, 1, 38):  # promise 8 for stretched models: each part equals a full reading of the same length, whose scale a dynamic method takes
            part, at = once(tokens[:, at:at + n], cache=cache), at + n
            whole = once(tokens[:, :at])
            assert (part - whole[:, -n:]).abs().max() < 2e-5 * whole.abs().max()
    greedy = torch.cat([t for t in once.generate(tokens[:, :30], 12, temperature=0)], 1)
    grown = tokens[:, :30]
    for _ in range(12):
        grown = torch.cat((grown, once(grown)[:, -1:].argmax(-1)), 1)
    assert torch.equal(greedy, grown[:, 30:])


def test_options_survive_a_checkpoint(make, tmp_path):
    model = make(pos="rope", block_size=512)
    model.extend("yarn", 4, ramp="paper", attention_factor=1.25)
    model.save(tmp_path / "step-000000")
    again = GPT.load(tmp_path)
    assert torch.equal(again.pos.inv_freq, model.pos.inv_freq) and again.pos.attention_factor == 1.25


def test_refusals_change_nothing(make):
    model = make(pos="rope")
    before, config = model.pos.inv_freq.clone(), dict(vars(model.config))
    for method, factor, options in (("yarm", 2, {}), ("yarn", 0.5, {}), ("yarn", float("nan"), {}), ("yarn", 2, {"beta": 3}), ("pi", 2, {"ramp": "paper"}), ("yarn", 2, {"ramp": "odd"}),
                                    ("yarn", 2, {"beta_slow": 40.0}), ("longrope", 2, {}), ("longrope", 2, {"long_factor": [1.0, 2.0]}), ("longrope", 2, {"long_factor": [1.0, 2.0, -1.0, 4.0]}),
                                    ("resonance", 2, {"of": "dynamic-ntk"}), ("drope", 2, {"scale": 0.0}), ("lm-infinite", 2, {"sinks": 24}), ("self-extend", 2, {"group": 0.5}), ("self-extend", 2, {"window": "x"}),
                                    ("ntk-lceg", 2, {"multiplier": True}), ("ntk-frozen", 2, {"multiplier": -1.0}), ("dynamic-pi", 2, {"length": math.inf})):
        with pytest.raises(UserError):
            model.extend(method, factor, **options)
    assert torch.equal(model.pos.inv_freq, before) and vars(model.config) == config
    with pytest.raises(UserError, match="two pairs"):
        make(pos="rope", head_dim=2).extend("ntk", 2)
    for pos in sorted(set(POSITIONS) - {"rope"}):
        with pytest.raises(UserError, match="use --method="):
            make(pos=pos).extend("yarn", 2)
    for method, options in (("llama3", {"low_freq_factor": 4.0}), ("abf", {"new_base": 0.5}), ("abf", {"new_base": "big"}), ("dynamic-ntk", {"length": "long"}), ("dynamic-yarn", {"length": -1.0})):
        with pytest.raises(UserError):
            make(pos="rope").extend(method, 2, **options)
    for method in ("abf", "dynamic-ntk"):
        with pytest.raises(UserError, match="two pairs"):
            make(pos="rope", head_dim=2).extend(method, 2)
    for pos in sorted(set(POSITIONS) - {"rope", "learned"}):
        model = make(pos=pos)
        model.extend("none", 3)
        assert model.config.block_size == 72
    with pytest.raises(UserError, match="scale"):
        make(pos="nope").extend("scale", 2, scale=True)


def test_config_knows_its_trained_length():
    assert GPTConfig(block_size=64).original_length == 64


def test_abf():
    """The base is 500,000, or what the slowest pair needs to reach the target; never less than it was."""
    ratio = lambda base, d, L, s, **o: METHODS["abf"](base, d, L, s, **o)[0][1].item() ** (-d / 2)  # noqa: E731  the base, from the second pair
    assert ratio(1e4, 64, 1024, 4.0) == pytest.approx(5e5, rel=1e-9)
    assert ratio(1e4, 64, 8192, 1024.0) == pytest.approx((8192 * 1024 / (2 * math.pi)) ** (64 / 62), rel=1e-9)
    assert ratio(1e6, 64, 1024, 4.0) == pytest.approx(1e6, rel=1e-9) and ratio(1e4, 64, 1024, 4.0, new_base=7e5) == pytest.approx(7e5, rel=1e-9)
    slowest = 2 * math.pi / METHODS["abf"](1e4, 64, 8192, 1024.0)[0][-1].item()
    assert slowest >= 8192 * 1024 * (1 - 1e-9)


@pytest.mark.parametrize("length", [24, 30, 64])
@pytest.mark.parametrize("method", ["dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen"])
def test_dynamic_methods_step_and_shrink(method, length, make):
    """Plain RoPE to the bit up to the trained length; a step at each multiple of a quarter of it, where it is no whole number too; and back."""
    model, plain, tokens = make(pos="rope", block_size=length), make(pos="rope", block_size=length), torch.randint(0, 50, (1, 4 * length))
    model.extend(method, 4)
    for n in (1, length // 2, length - 1, length):
        assert torch.equal(model(tokens[:, :n]), plain(tokens[:, :n])), n
    for n in (length + 1, length + length // 4, length + length // 4 + 1, 2 * length, 4 * length, length + 1):
        quarters = -(-4 * n // length)
        model(tokens[:, :n])
        inv_freq, m = METHODS[method](10000.0, model.pos.rotary_dim, length, 4.0, length=length * quarters / 4)
        assert torch.equal(model.pos.inv_freq, inv_freq) and model.pos.attention_factor == m and quarters > 4, n
    assert torch.equal(model(tokens[:, :length]), plain(tokens[:, :length]))  # nothing is left of the long text
    whole, cache = model(tokens[:, :3 * length]), KVCache()
    with torch.no_grad():
        for n in range(3 * length):  # token by token over eight steps of the scale
            out = model(tokens[:, n:n + 1], cache=cache)
            if n + 1 in (length, length + 1, 2 * length - 1, 3 * length):
                assert torch.allclose(out, model(tokens[:, :n + 1])[:, -1:], atol=1e-4), n
    assert torch.allclose(out[:, -1], whole[:, -1], atol=1e-4)


def test_a_dynamic_method_with_its_length_fixed(make):
    model, tokens = make(pos="rope"), torch.randint(0, 50, (1, 90))
    model.extend("dynamic-ntk", 2, length=48.0)
    assert torch.equal(model.pos.inv_freq, METHODS["dynamic-ntk"](10000.0, 8, 24, 2.0, length=48)[0])
    before = model.pos.inv_freq.clone()
    model(tokens[:, :90]), model(tokens[:, :9])
    assert torch.equal(model.pos.inv_freq, before)
