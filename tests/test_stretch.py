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
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_golden_table(key):
    ratios, factor = GOLDEN[key]
    inv_freq, m = STRETCH[key[0]](10000.0, 64, 1024, 4.0, **dict(key[1:]))
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
                        ("llama3", {{"low_freq_factor": 1.0, "high_freq_factor": 32.0}})):
        config = LlamaConfig(hidden_size=2 * d, num_attention_heads=2, head_dim=d, max_position_embeddings=L if kind == "linear" else int(L * s),
                             rope_parameters={{"rope_type": kind, "rope_theta": base, "factor": s, **({{}} if kind == "linear" else {{"original_max_position_embeddings": L}}), **extra}})
        inv_freq, m = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        out.append([inv_freq.double().tolist(), float(m)])
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = iter(json.loads(done.stdout.splitlines()[-1]))
    for base, d, L, s in SIZES:
        for method, options in (("pi", {}), ("yarn", {}), ("yarn", {"truncate": False}), ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}), ("ntk-parts", {"ramp": "paper"})):
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
        cache, whole = Cache(), once(tokens)
        parts = torch.cat([once(t, cache=cache) for t in tokens.split([60, 1, 1, 38], 1)], 1)
    assert (parts - whole).abs().max() < 2e-5 * whole.abs().max()  # promise 8 for stretched models
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
    for pos in ("nope", "alibi", "t5", "sinusoidal"):
        model = make(pos=pos)
        model.stretch("none", 3)
        assert model.config.block_size == 72
    with pytest.raises(Refused, match="block_size"):
        make(pos="learned").stretch("none", 2)


def test_config_knows_its_trained_length():
    assert GPTConfig(block_size=64).trained_length == 64
