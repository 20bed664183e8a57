"""Stretching: the golden table, transformers' own functions, composition, checkpoints, and cached equal to uncached after it."""
import json
import math
import subprocess
import sys

import pytest
import torch

from model import GPT, POSITIONS, STRETCH, Cache, GPTConfig, Refused

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
    inv_freq, m = STRETCH[key[0]](10000.0, 64, 1024, options.pop("factor", 4.0), **options)
    plain, _ = STRETCH["none"](10000.0, 64, 1024, 1.0)
    assert inv_freq.dtype == torch.float64 and inv_freq.shape == (32,)
    assert (inv_freq / plain)[PAIRS].tolist() == pytest.approx(ratios, abs=1e-6) and m == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize("method", STRETCH)
def test_factor_one_changes_nothing(method):
    inv_freq, m = STRETCH[method](10000.0, 48, 333, 1.0)
    assert torch.equal(inv_freq, STRETCH["none"](10000.0, 48, 333, 1.0)[0]) and m == 1.0


def test_limits():
    plain, _ = STRETCH["none"](10000.0, 64, 1024, 1.0)
    ntk, _ = STRETCH["ntk"](10000.0, 64, 1024, 4.0)
    assert ntk[0] == plain[0] and ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-12)
    parts, _ = STRETCH["ntk-parts"](10000.0, 64, 1024, 4.0)
    assert torch.equal(parts[:5], plain[:5]) and torch.equal(parts[18:], plain[18:] / 4)
    assert [STRETCH["yarn"](1e4, 64, 1024, float(s))[1] for s in (2, 4, 8, 16, 32)] == pytest.approx([1.069315, 1.138629, 1.207944, 1.277259, 1.346574], abs=1e-6)
    assert STRETCH["yarn"](1e4, 64, 1024, 4.0, attention_factor=1.0)[1] == 1.0
    assert STRETCH["ntk-parts"](1e4, 64, 150, 4.0)[0][0] == 1.0  # fewer than 64 pi tokens: the ramp's low end is negative and is raised to 0


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
            mine, factor = STRETCH[method](base, d, L, s, **options)
            assert mine.tolist() == pytest.approx(inv_freq, rel=2e-5), (base, d, L, s, method, options)
            assert factor == pytest.approx(m, rel=1e-9)


def test_attention_factor_scales_logits(make):
    """YaRN's factor multiplies queries and keys, so scores by its square."""
    model = make(pos="rope", block_size=256)
    q = torch.randn(1, 4, 9, 8)
    model.stretch("ntk-parts", 4.0)
    a, b = model.pos.rotate(q, q, torch.arange(9), 0)
    model.stretch("yarn", 1.0)
    c, d = model.pos.rotate(q, q, torch.arange(9), 0)
    assert torch.allclose((c @ d.mT) / (a @ b.mT), torch.tensor((0.1 * math.log(4) + 1) ** 2), rtol=1e-4)


@pytest.mark.parametrize("method", STRETCH)
def test_composition_and_checkpoints(method, make, tmp_path):
    """2x then 4x is 8x, to the bit, also through checkpoints; a second stretch replaces the method; base and trained length stay."""
    once, twice, tokens = make(pos="rope"), make(pos="rope"), torch.randint(0, 50, (1, 100))
    once.stretch(method, 8)
    twice.stretch("pi", 2)
    twice.save(tmp_path / "a" / "step-000000")
    twice = GPT.load(tmp_path / "a")
    assert twice.config.stretch == {"method": "pi", "factor": 2.0, "options": {}, "trained_length": 24} and twice.config.block_size == 48
    twice.stretch(method, 4)
    twice.save(tmp_path / "b" / "step-000000")
    twice = GPT.load(tmp_path / "b")
    assert torch.equal(once.pos.inv_freq, twice.pos.inv_freq) and once.pos.attention_factor == twice.pos.attention_factor
    assert twice.config.block_size == 192 and twice.config.trained_length == 24
    assert torch.equal(once(tokens), twice(tokens))
    with torch.no_grad():
        cache, at = Cache(), 0
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
    model.stretch("yarn", 4, ramp="paper", attention_factor=1.25)
    model.save(tmp_path / "step-000000")
    again = GPT.load(tmp_path)
    assert torch.equal(again.pos.inv_freq, model.pos.inv_freq) and again.pos.attention_factor == 1.25


def test_refusals_change_nothing(make):
    model = make(pos="rope")
    before, config = model.pos.inv_freq.clone(), dict(vars(model.config))
    for method, factor, options in (("yarm", 2, {}), ("yarn", 0.5, {}), ("yarn", float("nan"), {}), ("yarn", 2, {"beta": 3}), ("pi", 2, {"ramp": "paper"}), ("yarn", 2, {"ramp": "odd"}),
                                    ("yarn", 2, {"beta_slow": 40.0})):
        with pytest.raises(Refused):
            model.stretch(method, factor, **options)
    assert torch.equal(model.pos.inv_freq, before) and vars(model.config) == config
    with pytest.raises(Refused, match="two pairs"):
        make(pos="rope", head_dim=2).stretch("ntk", 2)
    for pos in sorted(set(POSITIONS) - {"rope"}):
        with pytest.raises(Refused, match="none"):
            make(pos=pos).stretch("yarn", 2)
    for method, options in (("llama3", {"low_freq_factor": 4.0}), ("abf", {"new_base": 0.5}), ("abf", {"new_base": "big"}), ("dynamic-ntk", {"length": "long"}), ("dynamic-yarn", {"length": -1.0})):
        with pytest.raises(Refused):
            make(pos="rope").stretch(method, 2, **options)
    for method in ("abf", "dynamic-ntk"):
        with pytest.raises(Refused, match="two pairs"):
            make(pos="rope", head_dim=2).stretch(method, 2)
    for pos in sorted(set(POSITIONS) - {"rope", "learned"}):
        model = make(pos=pos)
        model.stretch("none", 3)
        assert model.config.block_size == 72
    with pytest.raises(Refused, match="block_size"):
        make(pos="learned").stretch("none", 2)


def test_config_knows_its_trained_length():
    assert GPTConfig(block_size=64).trained_length == 64


def test_abf():
    """The base is 500,000, or what the slowest pair needs to reach the target; never less than it was."""
    ratio = lambda base, d, L, s, **o: STRETCH["abf"](base, d, L, s, **o)[0][1].item() ** (-d / 2)  # noqa: E731  the base, from the second pair
    assert ratio(1e4, 64, 1024, 4.0) == pytest.approx(5e5, rel=1e-9)
    assert ratio(1e4, 64, 8192, 1024.0) == pytest.approx((8192 * 1024 / (2 * math.pi)) ** (64 / 62), rel=1e-9)
    assert ratio(1e6, 64, 1024, 4.0) == pytest.approx(1e6, rel=1e-9) and ratio(1e4, 64, 1024, 4.0, new_base=7e5) == pytest.approx(7e5, rel=1e-9)
    slowest = 2 * math.pi / STRETCH["abf"](1e4, 64, 8192, 1024.0)[0][-1].item()
    assert slowest >= 8192 * 1024 * (1 - 1e-9)


@pytest.mark.parametrize("length", [24, 30, 64])
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn"])
def test_dynamic_methods_step_and_shrink(method, length, make):
    """Plain RoPE to the bit up to the trained length; a step at each multiple of a quarter of it, where it is no whole number too; and back."""
    model, plain, tokens = make(pos="rope", block_size=length), make(pos="rope", block_size=length), torch.randint(0, 50, (1, 4 * length))
    model.stretch(method, 4)
    for n in (1, length // 2, length - 1, length):
        assert torch.equal(model(tokens[:, :n]), plain(tokens[:, :n])), n
    for n in (length + 1, length + length // 4, length + length // 4 + 1, 2 * length, 4 * length, length + 1):
        quarters = -(-4 * n // length)
        model(tokens[:, :n])
        inv_freq, m = STRETCH[method](10000.0, model.pos.rotary_dim, length, 4.0, length=length * quarters / 4)
        assert torch.equal(model.pos.inv_freq, inv_freq) and model.pos.attention_factor == m and quarters > 4, n
    assert torch.equal(model(tokens[:, :length]), plain(tokens[:, :length]))  # nothing is left of the long text
    whole, cache = model(tokens[:, :3 * length]), Cache()
    with torch.no_grad():
        for n in range(3 * length):  # token by token over eight steps of the scale
            out = model(tokens[:, n:n + 1], cache=cache)
            if n + 1 in (length, length + 1, 2 * length - 1, 3 * length):
                assert torch.allclose(out, model(tokens[:, :n + 1])[:, -1:], atol=1e-4), n
    assert torch.allclose(out[:, -1], whole[:, -1], atol=1e-4)


def test_a_dynamic_method_with_its_length_fixed(make):
    model, tokens = make(pos="rope"), torch.randint(0, 50, (1, 90))
    model.stretch("dynamic-ntk", 2, length=48.0)
    assert torch.equal(model.pos.inv_freq, STRETCH["dynamic-ntk"](10000.0, 8, 24, 2.0, length=48)[0])
    before = model.pos.inv_freq.clone()
    model(tokens[:, :90]), model(tokens[:, :9])
    assert torch.equal(model.pos.inv_freq, before)
