"""Context extension: published numbers, transformers' own functions, caches and checkpoints."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import OFFLINE, ROOT, assert_success, run_python
from reference import BIASES, nezha_vector, shaw_vectors, sinusoid, transformer_xl_keys

import rope_scaling
from model import GPT, POSITIONS, GPTConfig, RoPE
from nanolong.entry import load_entry
from nanolong.errors import UserError
from nanolong.inference import KVCache
from rope_scaling import EVALUATION_ONLY, METHODS, OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


def check_cached_equals_whole(model, tokens, sizes):
    """Compute tokens (1, T) in parts; each equals the end of all tokens up to there at once."""
    cache = KVCache()
    end = 0
    with torch.no_grad():
        for part in tokens.split(sizes, 1):
            end += part.shape[1]
            logits = model(part, cache=cache)
            whole = model(tokens[:, :end])
            difference = (logits - whole[:, -part.shape[1] :]).abs().max()
            assert difference < 2e-5 * whole.abs().max(), f"the part that ends at {end}"


# -----------------------------------------------------------------------------
# Frequencies, as ratios to plain RoPE at these pairs: for rotary_dim 64, base 10,000, an original
# length of 1,024 and factor 4, unless the options have another factor.

PAIRS = [0, 4, 5, 8, 12, 16, 18, 24, 31]
RAMP = [1, 1, 1, 0.826923, 0.596154, 0.365385, 0.25, 0.25, 0.25]
UNROUNDED_RAMP = [1, 1, 1, 0.853986, 0.604842, 0.355697, 0.25, 0.25, 0.25]
RAMP_OF_THE_PAPER = [1, 1, 1, 0.6201, 0.350493, 0.265236, 0.25, 0.25, 0.25]
NTK_4 = [1, 0.836209, 0.799638, 0.699245, 0.584715, 0.488944, 0.447112, 0.341892, 0.25]
NTK_3 = [1, 0.867833, 0.837616, 0.753133, 0.653594, 0.56721, 0.528399, 0.427185, 0.333333]
LLAMA3_8 = [1, 1, 1, 1, 1, 0.308676, 0.125, 0.125, 0.125]
INTERPOLATED = [0.25] * 9
PLAIN = [1] * 9


@pytest.mark.parametrize(
    "method, options, ratios, attention_factor",
    [
        ("none", {}, PLAIN, 1),
        ("pi", {}, INTERPOLATED, 1),
        ("ntk", {}, NTK_4, 1),
        ("ntk-parts", {}, RAMP, 1),
        ("ntk-parts", {"ramp": "paper"}, RAMP_OF_THE_PAPER, 1),
        ("yarn", {}, RAMP, 1.138629),
        ("yarn", {"truncate": False}, UNROUNDED_RAMP, 1.138629),
        ("yarn", {"attention_factor": 1.0}, RAMP, 1),
        ("llama3", {"factor": 8.0}, LLAMA3_8, 1),
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 32.0}, RAMP_OF_THE_PAPER, 1),
        ("dynamic-pi", {"length": 4096}, INTERPOLATED, 1),
        ("dynamic-pi", {"length": 1024}, PLAIN, 1),
        ("dynamic-ntk", {"factor": 2.0, "length": 2048}, NTK_3, 1),
        ("dynamic-ntk", {"factor": 1.0, "length": 4096}, NTK_4, 1),
        ("dynamic-yarn", {"length": 4096}, RAMP, 1.138629),
        ("dynamic-yarn", {"length": 1000}, PLAIN, 1),
        ("lm-infinite", {}, PLAIN, 1),
        ("self-extend", {}, PLAIN, 1),
    ],
    ids=str,
)
def test_frequencies_match_known_numbers(method, options, ratios, attention_factor):
    options = {"factor": 4.0, **options}
    inv_freq, actual_factor = METHODS[method](10000.0, 64, 1024, **options)
    plain = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    assert inv_freq.dtype == torch.float64
    assert inv_freq.shape == (32,)
    assert (inv_freq / plain)[PAIRS].tolist() == pytest.approx(ratios, abs=1e-6)
    assert actual_factor == pytest.approx(attention_factor, abs=1e-6)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"drope"}))
def test_factor_one_is_plain_rope_to_the_bit(method):
    inv_freq, attention_factor = METHODS[method](10000.0, 48, 333, 1.0)
    assert torch.equal(inv_freq, rope_scaling.none(10000.0, 48, 333, 1.0)[0])
    assert attention_factor == 1.0


def test_yarns_attention_factor_matches_published_numbers():
    numbers = [1.069315, 1.138629, 1.207944, 1.277259, 1.346574]
    for factor, number in zip((2.0, 4.0, 8.0, 16.0, 32.0), numbers, strict=True):
        assert rope_scaling.yarn(1e4, 64, 1024, factor)[1] == pytest.approx(number, abs=1e-6)


def test_ntk_by_parts_keeps_the_first_pair_of_a_short_context():
    """With fewer than 64 pi tokens the ramp would begin below index 0."""
    assert rope_scaling.ntk_parts(1e4, 64, 150, 4.0)[0][0] == 1.0


def base_of(method, rotary_dim, original_length, factor, base=1e4, **options):
    """The base that a method's second pair has."""
    inv_freq, _ = METHODS[method](base, rotary_dim, original_length, factor, **options)
    return inv_freq[1].item() ** (-rotary_dim / 2)


def test_ntk_lceg_has_the_bases_of_the_controlled_study():
    """Lu et al. (2024), NTK-32K and NTK-64K of a model of 4,096 tokens, rotary_dim 128."""
    for options, base in (
        ({}, 305_922),
        ({"length": 4096}, 305_922),
        ({"length": 32768}, 305_922),
        ({"length": 65536}, 651_131),
        ({"multiplier": 8.0}, 607_779),
    ):
        assert base_of("ntk-lceg", 128, 4096, 8.0, **options) == pytest.approx(base, rel=2e-6)


def test_ntk_frozen_is_dynamic_ntk_of_a_fixed_factor():
    """The factor of the extension, here 9, does not matter."""
    for factor, length in ((2.0, 2048), (4.0, 3072), (2.5, 1024)):
        dynamic, _ = rope_scaling.dynamic_ntk(1e4, 64, 1024, factor, length=length)
        frozen, _ = rope_scaling.ntk_frozen(1e4, 64, 1024, 9.0, multiplier=factor, length=length)
        assert torch.equal(frozen, dynamic)
    default, _ = rope_scaling.ntk_frozen(1e4, 64, 1024, 9.0, length=2048)
    plain, _ = rope_scaling.none(1e4, 64, 1024, 1.0)
    assert (default / plain)[PAIRS].tolist() == pytest.approx(NTK_3, abs=1e-6)


def test_abf_takes_the_largest_of_three_bases():
    """500,000; what makes the slowest pair reach the target; the base that there was."""
    reaching = (8192 * 1024 / (2 * math.pi)) ** (64 / 62)
    assert base_of("abf", 64, 1024, 4.0) == pytest.approx(5e5, rel=1e-9)
    assert base_of("abf", 64, 8192, 1024.0) == pytest.approx(reaching, rel=1e-9)
    assert base_of("abf", 64, 1024, 4.0, base=1e6) == pytest.approx(1e6, rel=1e-9)
    assert base_of("abf", 64, 1024, 4.0, new_base=7e5) == pytest.approx(7e5, rel=1e-9)
    slowest, _ = rope_scaling.abf(1e4, 64, 8192, 1024.0)
    assert 2 * math.pi / slowest[-1].item() >= 8192 * 1024 * (1 - 1e-9)


@pytest.mark.parametrize("of", ["yarn", "pi", "ntk"])
def test_resonance_rounds_wavelengths_to_whole_tokens(of):
    inv_freq, attention_factor = METHODS[of](1e4, 64, 1024, 4.0)
    rounded, same_factor = rope_scaling.resonance(1e4, 64, 1024, 4.0, of=of)
    wavelengths = 2 * math.pi / rounded
    assert torch.allclose(wavelengths, (2 * math.pi / inv_freq).round(), rtol=1e-12)
    assert wavelengths[0] == pytest.approx(6 if of != "pi" else 25)  # of 2 pi, or of 8 pi
    assert same_factor == attention_factor
    default, _ = rope_scaling.resonance(1e4, 64, 1024, 4.0)
    assert torch.equal(default, rounded) == (of == "yarn")


LONGROPE_TABLES = {
    "long_factor": [1.0 + 0.37 * i for i in range(12)],
    "short_factor": [1.0 + 0.01 * i for i in range(12)],
}


@pytest.mark.parametrize(
    "length, table", [(334, "long_factor"), (333, "short_factor"), (None, "long_factor")]
)
def test_longrope_divides_by_the_table_for_the_length(length, table):
    inv_freq, attention_factor = rope_scaling.longrope(
        1e4, 24, 333, 4.0, length=length, **LONGROPE_TABLES
    )
    expected = [1e4 ** (-2 * k / 24) / LONGROPE_TABLES[table][k] for k in range(12)]
    assert inv_freq.tolist() == pytest.approx(expected, rel=1e-12)
    assert attention_factor == pytest.approx((1 + math.log(4) / math.log(333)) ** 0.5)


def test_drope_has_no_rotation():
    inv_freq, attention_factor = rope_scaling.drope(1e4, 24, 333, 4.0, scale=1.44)
    assert inv_freq.tolist() == [0.0] * 12
    assert attention_factor == pytest.approx(1.2)  # of queries and of keys


# -----------------------------------------------------------------------------
# The functions of transformers, in a process outside the project.

SIZES = [  # base, rotary_dim, original_length, factor
    (10000.0, 64, 1024, 4.0),
    (10000.0, 64, 1024, 2.5),
    (500000.0, 128, 8192, 8.0),
    (10000.0, 24, 64, 4.0),
    (10000.0, 6, 100, 3.0),
    (1234.5, 80, 777, 16.0),
    (10000.0, 32, 256, 4.0),
    (100.0, 10, 4000, 2.0),
]
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
SAME_METHODS = [  # our method and its options, transformers' rope_type and its parameters
    ("pi", {}, "linear", {}),
    ("yarn", {}, "yarn", {}),
    ("yarn", {"truncate": False}, "yarn", {"truncate": False}),
    ("yarn", BETAS, "yarn", BETAS),
    ("ntk-parts", {"ramp": "paper"}, "llama3", {"low_freq_factor": 1.0, "high_freq_factor": 32.0}),
    ("llama3", {}, "llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("dynamic-ntk", {}, "dynamic", {}),
]

COMPUTE_IN_TRANSFORMERS = """
import json
import sys

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

results = []
for kind, base, dim, original_length, factor, length, parameters in json.load(sys.stdin):
    # two kinds take the original length from max_position_embeddings
    if kind in ("linear", "dynamic"):
        max_positions = original_length
    else:
        max_positions = int(original_length * factor)
        parameters["original_max_position_embeddings"] = original_length
    parameters.update(rope_type=kind, rope_theta=base, factor=factor)
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    results.append([inv_freq.double().tolist(), float(attention_factor)])
print(json.dumps(results))
"""


def compute_in_transformers(requests, folder):
    """(inv_freq, attention_factor) for each (rope_type, *size, length, parameters)."""
    options = {"cwd": folder, "env": OFFLINE, "input": json.dumps(requests)}
    done = assert_success(run_python(COMPUTE_IN_TRANSFORMERS, **options))
    return json.loads(done.stdout.splitlines()[-1])


def test_frequencies_match_transformers(tmp_path):
    cases = []
    for size in SIZES:
        for same in SAME_METHODS:
            cases.append((size, 3 * size[2], *same))
    for length in (1000, 300):
        same = ("longrope", LONGROPE_TABLES, "longrope", LONGROPE_TABLES)
        cases.append(((1e4, 24, 333, 4.0), length, *same))
    requests = [(kind, *size, length, theirs) for size, length, _, _, kind, theirs in cases]
    results = compute_in_transformers(requests, tmp_path)
    for case, (expected, expected_factor) in zip(cases, results, strict=True):
        size, length, method, options, _, _ = case
        if "length" in OPTIONS[method]:
            options = {**options, "length": length}
        inv_freq, attention_factor = METHODS[method](*size, **options)
        assert inv_freq.tolist() == pytest.approx(expected, rel=2e-5), case
        assert attention_factor == pytest.approx(expected_factor, rel=1e-9), case


# -----------------------------------------------------------------------------
# LM-Infinite and Self-Extend, one score at a time in float64.

PLAIN_FREQUENCIES = 1e4 ** -(torch.arange(0, 6, 2).double() / 6)  # of 6 channels


def rotate_vector(x, position, inv_freq):
    """Rotate x (D,) to a position, as complex numbers in float64."""
    half = len(inv_freq)
    angle = position * inv_freq
    rotated = torch.complex(x[:half], x[half:]) * torch.complex(angle.cos(), angle.sin())
    return torch.cat((rotated.real, rotated.imag))


def rotate_all(x, pos):
    """Rotate x (1, H, T, 6) to positions (T,)."""
    rotated = torch.empty_like(x)
    for head in range(x.shape[1]):
        for t, position in enumerate(pos.tolist()):
            rotated[0, head, t] = rotate_vector(x[0, head, t], position, PLAIN_FREQUENCIES)
    return rotated


def lm_infinite_distance(i, j, original_length, sinks):
    """The distance at which query i sees key j; None: it does not."""
    if i - j < original_length:
        return i - j
    return original_length if j < sinks else None


def self_extend_distance(i, j, window, group):
    if i - j < window:
        return i - j
    return i // group + window - window // group - j // group


def attention_by_distance(q, k, v, inv_freq, scale, distance):
    """Attention whose query i is rotated to distance(i, j) and whose key j is not: (1, H, T, D)."""
    y = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen, scores = [], []
            for j in range(i + 1):
                d = distance(i, j)
                if d is not None:
                    rotated = rotate_vector(q[0, head, i], d, inv_freq)
                    seen.append(j)
                    scores.append(scale * rotated @ k[0, head // group, j])
            y[0, head, i] = torch.stack(scores).softmax(0) @ v[0, head // group, seen]
    return y


@pytest.fixture
def qkv():
    """A function that makes queries of 4 heads, keys and values of 2, each with 6 channels."""

    def qkv(T):
        torch.manual_seed(T)
        return [torch.randn(1, heads, T, 6, dtype=torch.float64) for heads in (4, 2, 2)]

    return qkv


@pytest.mark.parametrize("T", [5, 16, 17, 19, 53])
@pytest.mark.parametrize("sinks", [0, 4])
def test_lm_infinite_matches_the_paper(sinks, T, qkv):
    q, k, v = qkv(T)

    def distance(i, j):
        return lm_infinite_distance(i, j, 16, sinks)

    expected = attention_by_distance(q, k, v, PLAIN_FREQUENCIES, 0.3, distance)
    actual = rope_scaling.lm_infinite(q, k, v, rotate_all, 16, 4, 0.3, sinks)
    assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("T", [4, 5, 6, 17, 53])
def test_self_extend_matches_the_paper(T, qkv):
    q, k, v = qkv(T)

    def distance(i, j):
        return self_extend_distance(i, j, 5, 3)

    expected = attention_by_distance(q, k, v, PLAIN_FREQUENCIES, 0.3, distance)
    actual = rope_scaling.self_extend(q, k, v, rotate_all, 16, 4, 0.3, 5, 3)
    assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
@torch.no_grad()
def test_extended_models_use_these_distances_with_default_options(method, make):
    """From 24 to 72 tokens: 10 sinks; a window of 24 / 4 and groups of (72 - 6) / (24 / 2 - 6)."""
    model = make(pos="rope", n_layer=1, n_kv_head=2, attn_scale=0.7)
    model.extend(method, 3)
    x = torch.randn(1, 60, 32)

    def distance(i, j):
        if method == "lm-infinite":
            return lm_infinite_distance(i, j, original_length=24, sinks=10)
        return self_extend_distance(i, j, window=6, group=11)

    attention = model.blocks[0].attention
    q = attention.q(x).view(1, 60, 4, 8).transpose(1, 2).double()
    k = attention.k(x).view(1, 60, 2, 8).transpose(1, 2).double()
    v = attention.v(x).view(1, 60, 2, 8).transpose(1, 2).double()
    inv_freq = 1e4 ** -(torch.arange(0, 8, 2).double() / 8)
    y = attention_by_distance(q, k, v, inv_freq, 0.7 / math.sqrt(8), distance)
    expected = y.transpose(1, 2).flatten(2) @ attention.o.weight.double().T
    actual = attention(x, model.pos, torch.arange(60), None, {})
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_methods_that_replace_attention_need_one_text_from_its_start(method, make):
    model = make(pos="rope")
    model.extend(method, 2)
    tokens = torch.randint(0, 50, (2, 30))
    for inputs in (
        {"docs": torch.zeros(2, 30, dtype=torch.long)},
        {"positions": torch.arange(30) + 1},
        {"positions": torch.arange(30).expand(2, 30)},
    ):
        with pytest.raises(UserError, match=f"method '{method}' needs one text from its start"):
            model(tokens, **inputs)
    assert torch.equal(model(tokens, positions=torch.arange(30)), model(tokens))
    with pytest.raises(UserError, match="has a window of its own"):
        make(pos="rope", window=9).extend(method, 2)


# -----------------------------------------------------------------------------
# Attention follows the method.


def test_extending_again_replaces_attention_or_gives_it_back(make):
    model = make(pos="rope")
    tokens = torch.randint(0, 50, (1, 60))
    for method in ("pi", "lm-infinite", "self-extend", "lm-infinite", "yarn"):
        model.extend(method, 1.5)
        assert model.pos.needs_whole_text == (method in rope_scaling.ATTENTION)
    direct = make(pos="rope")
    direct.extend("yarn", 1.5**5)
    assert model.config == direct.config
    assert torch.equal(model(tokens), direct(tokens))


def test_a_refused_method_changes_nothing(make):
    model = make(pos="rope")
    model.extend("lm-infinite", 2)
    scheme, config = model.pos, dict(vars(model.config))
    with pytest.raises(UserError, match="has no option 'sinks'"):
        model.extend("yarn", 2, sinks=4)
    with pytest.raises(UserError, match="group=0.5 cannot be used: give a whole number"):
        model.extend("self-extend", 2, group=0.5)
    assert model.pos is scheme
    assert vars(model.config) == config


def test_a_scheme_derived_from_rope_refuses_methods_that_replace_attention(make, monkeypatch):
    """Its own rotation would be lost in them."""

    class MyRoPE(RoPE):
        pass

    monkeypatch.setitem(POSITIONS, "mine", MyRoPE)
    model = make(pos="mine")
    for method in ("lm-infinite", "self-extend"):
        with pytest.raises(UserError, match=f"{method}.* would drop the code of --pos=mine"):
            model.extend(method, 2)
    model.extend("yarn", 2)
    assert type(model.pos) is MyRoPE
    rope = make(pos="rope")
    rope.extend("yarn", 2)
    tokens = torch.randint(0, 50, (1, 40))
    assert torch.equal(model(tokens), rope(tokens))


# -----------------------------------------------------------------------------
# RoPE in the model.

LONGROPE_OPTIONS = {
    "long_factor": [1.0, 1.5, 4.0, 8.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
}


def options_for(method):
    return LONGROPE_OPTIONS if method == "longrope" else {}


@pytest.mark.parametrize("method", METHODS)
def test_extending_twice_through_checkpoints_equals_once(method, make, tmp_path):
    """The second method replaces the first, the factors multiply, the original length stays."""
    once = make(pos="rope")
    once.extend(method, 8, **options_for(method))
    twice = make(pos="rope")
    twice.extend("pi", 2)
    twice.save(tmp_path / "a")
    twice = GPT.load(tmp_path / "a")
    assert twice.config.block_size == 48
    assert twice.config.extension == {
        "method": "pi",
        "factor": 2,
        "options": {},
        "original_length": 24,
    }
    twice.extend(method, 4, **options_for(method))
    twice.save(tmp_path / "b")
    twice = GPT.load(tmp_path / "b")

    assert twice.config == once.config
    assert twice.config.block_size == 192
    assert twice.config.original_length == 24
    assert torch.equal(twice.pos.inv_freq, once.pos.inv_freq)
    assert twice.pos.attention_factor == once.pos.attention_factor
    tokens = torch.randint(0, 50, (1, 100))
    assert torch.equal(twice(tokens), once(tokens))


@pytest.mark.parametrize("method", METHODS)
def test_extended_models_are_cached(method, make):
    """A dynamic method computes a whole text with the tables of its length."""
    model = make(pos="rope")
    model.extend(method, 8, **options_for(method))
    check_cached_equals_whole(model, torch.randint(0, 50, (1, 100)), [60, 1, 1, 38])
    prompt = torch.randint(0, 50, (1, 30))
    cached = torch.cat(list(model.generate(prompt, 12, temperature=0)), 1)
    plain = torch.cat(list(model.generate_plain(prompt, 12, temperature=0)), 1)
    assert torch.equal(cached, plain)


def test_drope_equals_nope_with_the_same_weights(make):
    rope, nope = make(pos="rope"), make(pos="nope")
    tokens = torch.randint(0, 50, (2, 60))
    unscaled = nope(tokens)
    rope.extend("drope", 4)
    assert torch.equal(rope(tokens), unscaled)
    rope.extend("drope", 1, scale=1.7)
    nope.extend("scale", 4, scale=1.7)
    assert torch.allclose(rope(tokens), nope(tokens), atol=1e-5)
    assert not torch.allclose(rope(tokens), unscaled, atol=1e-3)


# -----------------------------------------------------------------------------
# Dynamic methods.

DYNAMIC = ["dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen"]


@pytest.mark.parametrize("length", [24, 30, 64])  # a quarter of 30 is no whole number
@pytest.mark.parametrize("method", DYNAMIC)
def test_dynamic_tables_step_at_quarters_of_the_original_length(method, length, make):
    model, plain = make(pos="rope", block_size=length), make(pos="rope", block_size=length)
    tokens = torch.randint(0, 50, (1, 4 * length))
    model.extend(method, 4)
    for n in (1, length // 2, length - 1, length):
        assert torch.equal(model(tokens[:, :n]), plain(tokens[:, :n])), n
    next_step = length + length // 4
    for n in (length + 1, next_step, next_step + 1, 2 * length, 4 * length, length + 1):
        model(tokens[:, :n])
        quarters = math.ceil(4 * n / length)
        assert quarters > 4
        inv_freq, attention_factor = METHODS[method](
            10000.0, 8, length, 4.0, length=length * quarters / 4
        )
        assert torch.equal(model.pos.inv_freq, inv_freq), n
        assert model.pos.attention_factor == attention_factor, n
    # nothing is left of the long text
    assert torch.equal(model(tokens[:, :length]), plain(tokens[:, :length]))


@pytest.mark.parametrize("method", DYNAMIC)
def test_dynamic_methods_decode_token_by_token(method, make):
    """Over eight steps of the tables."""
    model = make(pos="rope")
    model.extend(method, 4)
    check_cached_equals_whole(model, torch.randint(0, 50, (1, 72)), [1] * 72)


def test_a_dynamic_method_with_a_fixed_length_does_not_change(make):
    model = make(pos="rope")
    tokens = torch.randint(0, 50, (1, 90))
    model.extend("dynamic-ntk", 2, length=48.0)
    inv_freq, _ = rope_scaling.dynamic_ntk(10000.0, 8, 24, 2.0, length=48)
    for n in (90, 9):
        model(tokens[:, :n])
        assert torch.equal(model.pos.inv_freq, inv_freq)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in EVALUATION_ONLY])
@pytest.mark.usefixtures("entries_do_not_stay")
def test_a_variant_of_rope_keeps_its_frequencies_at_every_length(method, make, tmp_path):
    """p-RoPE rotates the first 12 of 16 pairs, as the method does at that length."""
    load_entry(ROOT / "examples" / "schemes" / "p_rope.py", POSITIONS)
    model = make(pos="p_rope", head_dim=32)
    options = {"long_factor": [2.0] * 16} if method == "longrope" else {}
    model.extend(method, 4, **options)
    model.save(tmp_path / "step-000001")
    tokens = torch.randint(0, 50, (1, 96))
    for variant in (model, GPT.load(tmp_path)):
        for n in (5, 24, 25, 96, 24):
            variant(tokens[:, :n])
            given = {"length": max(24, math.ceil(n / 6) * 6)} if method in DYNAMIC else options
            inv_freq, attention_factor = METHODS[method](10000.0, 32, 24, 4.0, **given)
            assert torch.equal(variant.pos.inv_freq[:12], inv_freq[:12]), n
            assert not variant.pos.inv_freq[12:].any(), n
            assert variant.pos.attention_factor == attention_factor, n
    check_cached_equals_whole(model, tokens, [7] * 13 + [5])


def variant(place, change):
    """A class derived from RoPE that changes its frequencies at the end of one of its methods."""

    def method(self, *args, **options):
        getattr(RoPE, place)(self, *args, **options)
        change(self, *args)

    return type("Mine", (RoPE,), {place: method})


def mask_pairs(scheme, *args):
    scheme.inv_freq[2:] = 0


def mask_pairs_of_dynamic_ntk(scheme, method, *args):
    if method == "dynamic-ntk":
        mask_pairs(scheme)


def scale_scores(scheme, *args):
    scheme.attention_factor = 1.1


@pytest.mark.parametrize(
    "place, change",
    [
        ("extend", mask_pairs),
        ("__init__", mask_pairs),
        ("extend", scale_scores),
        ("extend", mask_pairs_of_dynamic_ntk),
    ],
)
def test_a_variant_of_rope_whose_frequencies_would_be_lost_is_refused(
    place, change, make, monkeypatch
):
    """When it is made; or, if it loses them by one method, when it is extended by that."""
    monkeypatch.setitem(POSITIONS, "mine", variant(place, change))
    message = "Mine sets .* override frequencies"
    if change is not mask_pairs_of_dynamic_ntk:
        with pytest.raises(UserError, match=message):
            make(pos="mine")
        return
    model = make(pos="mine")
    model.extend("yarn", 2)
    with pytest.raises(UserError, match=message):
        model.extend("dynamic-ntk", 2)
    assert model.config.extension["method"] == "yarn"


def test_alibis_slopes_are_divided_by_the_length_of_the_input(make):
    """dynamic-pi: in quarters of the original length of 24, from there on."""
    model, plain = make(pos="alibi"), make(pos="alibi")
    model.extend("dynamic-pi", 4)
    tokens = torch.randint(0, 50, (1, 96))
    assert torch.equal(model(tokens[:, :24]), plain(tokens[:, :24]))
    for n, divisor in ((25, 1.25), (30, 1.25), (31, 1.5), (96, 4.0), (24, 1.0)):
        model(tokens[:, :n])
        assert torch.equal(model.pos.bias(n, 0), plain.pos.slopes / divisor)
    check_cached_equals_whole(model, tokens, [1] * 96)


slow = pytest.mark.slow  # tracing takes seconds


@pytest.fixture
def compile_counted():
    """Compile a model without graph breaks: returns it, and the list of its graphs."""

    def compile_counted(model):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        return torch.compile(model, fullgraph=True, backend=backend), graphs

    return compile_counted


@pytest.mark.parametrize(
    "method",
    [
        "dynamic-yarn",
        pytest.param("dynamic-pi", marks=slow),
        pytest.param("dynamic-ntk", marks=slow),
        pytest.param("ntk-frozen", marks=slow),
        pytest.param("ntk-lceg", marks=slow),
        pytest.param("longrope", marks=slow),
    ],
)
def test_a_compiled_dynamic_method_is_one_graph_for_a_quarter(method, make, compile_counted):
    """It computes what the model does, which may be called in between, with a cache too."""
    model = make(pos="rope")
    model.extend(method, 8, **options_for(method))
    compiled, graphs = compile_counted(model)
    tokens = torch.randint(0, 50, (1, 96))
    n_graphs = []
    for n in (24, 24, 60, 56, 24, 60, 90):  # 60 and 56 tokens are in the tenth quarter
        logits = compiled(tokens[:, :n])
        n_graphs.append(len(graphs))
        assert torch.equal(logits, model(tokens[:, :n]))
    assert n_graphs == [1, 1, 2, 2, 2, 2, 3]
    compiled(tokens[:, :60])
    check_cached_equals_whole(model, tokens, [24, 6, 1, 65])


def test_a_compiled_dynamic_method_follows_explicit_positions(make):
    """As in training with skipped positions; to read them breaks the graph in two."""
    model = make(pos="rope")
    model.extend("dynamic-yarn", 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(0, 50, (1, 24))
    for skip in (0, 50, 120):
        positions = torch.arange(24)
        positions[12:] += skip
        logits = compiled(tokens, positions=positions)
        assert torch.equal(logits, model(tokens, positions=positions))


@pytest.mark.parametrize(
    "pos, method",
    [
        ("rope", "self-extend"),
        pytest.param("rope", "lm-infinite", marks=slow),
        pytest.param("alibi", "dynamic-pi", marks=slow),
    ],
)
def test_other_methods_are_compiled_whole(pos, method, make, compile_counted):
    model = make(pos=pos)
    model.extend(method, 4)
    compiled, graphs = compile_counted(model)
    tokens = torch.randint(0, 50, (1, 90))
    assert torch.equal(compiled(tokens), model(tokens))
    assert len(graphs) == 1


# -----------------------------------------------------------------------------
# The other schemes.


def numpy_interpolation(table, factor):
    """A table (n, C) interpolated to n * factor rows by NumPy, constant from its end on."""
    rows = np.arange(round(len(table) * factor)) / factor
    columns = [np.interp(rows, np.arange(len(table)), column) for column in table.T.numpy()]
    return torch.from_numpy(np.stack(columns, 1))


def test_learned_embeddings_are_interpolated_linearly(make):
    model = make(pos="learned")
    expected = numpy_interpolation(model.pos.table.detach().double(), 2.5)
    model.extend("pi", 2.5)
    assert model.config.block_size == 60
    assert model.pos.table.shape == (60, 32)
    assert model.pos.table.requires_grad
    assert torch.allclose(model.pos.table.double(), expected, atol=1e-6)
    with pytest.raises(UserError, match="--method=pi"):
        model.extend("none", 2)


def test_extended_learned_embeddings_come_back_from_a_checkpoint(make, tmp_path):
    model = make(pos="learned")
    model.extend("pi", 2.5)
    model.save(tmp_path / "step-000000")
    loaded = GPT.load(tmp_path)
    tokens = torch.randint(0, 50, (1, 60))
    assert torch.equal(loaded(tokens), model(tokens))
    loaded.extend("pi", 2)
    assert loaded.pos.table.shape == (120, 32)
    assert torch.allclose(loaded.pos.table[::2], model.pos.table, atol=1e-7)


DISTANCES = (0, 1, 2, 7, 23, 40, 89)  # in tables of 90


@pytest.fixture
def interpolated(make):
    """A function that makes a model and extends it by position interpolation."""

    def interpolated(pos, factor):
        model = make(pos=pos)
        for p in model.pos.parameters():
            nn.init.normal_(p, 0, 0.5)
        model.extend("pi", factor)
        return model

    return interpolated


def at_distance(table, distance):
    """What a table (H, m) or (H, m, D) of distances holds; its end holds for all greater ones."""
    return table[:, min(distance, table.shape[1] - 1)].double()


@pytest.mark.parametrize("factor", [2.0, 3.3])
@pytest.mark.parametrize("pos", BIASES)
@torch.no_grad()
def test_interpolation_divides_the_distance_of_a_bias(pos, factor, interpolated):
    scheme = interpolated(pos, factor).pos
    for d in DISTANCES:
        bias = scheme.bias(90, 0)
        actual = -bias.double() * d if bias.dim() == 1 else at_distance(bias, d)
        expected = BIASES[pos](scheme, d / factor)
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6), d


@pytest.mark.parametrize("factor", [2.0, 3.3])
@torch.no_grad()
def test_interpolation_divides_the_distance_of_shaws_vectors(factor, interpolated):
    scheme = interpolated("shaw", factor).pos
    keys, values, _ = scheme.relative(90, 1)
    for d in DISTANCES:
        key, value = shaw_vectors(scheme, d / factor, 1, 12)
        assert torch.equal(at_distance(keys, d)[0], key), d
        assert torch.equal(at_distance(values, d)[0], value), d


@pytest.mark.parametrize("factor", [2.0, 3.3])
@torch.no_grad()
def test_interpolation_divides_the_distance_of_sinusoids(factor, interpolated):
    nezha = interpolated("nezha", factor).pos
    xl = interpolated("xl", factor).pos
    sinusoidal = interpolated("sinusoidal", factor).pos
    for d in DISTANCES:
        expected = nezha_vector(nezha, d / factor, 12)
        actual = at_distance(nezha.relative(90, 0)[0], d)[0]
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6), d

        expected = transformer_xl_keys(xl, d / factor, 1)
        actual = at_distance(xl.relative(90, 1)[0], d)
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6), d

        expected = sinusoid(d / factor, 32) * sinusoidal.scale
        actual = sinusoidal.embed(torch.zeros(1, 1, 32), torch.tensor([d]))[0, 0].double()
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6), d


# schemes that take pi; learned embeddings are interpolated otherwise
INTERPOLATED = [pos for pos in POSITIONS if "pi" in POSITIONS[pos].methods and pos != "learned"]


@pytest.mark.parametrize("factor", [2.0, 3.3])
@pytest.mark.parametrize("pos", [pos for pos in INTERPOLATED if pos != "rope"])
def test_interpolated_models_are_cached_and_saved(pos, factor, interpolated, tmp_path):
    model = interpolated(pos, factor)
    tokens = torch.randint(0, 50, (1, 90))
    model.save(tmp_path / "step-000000")
    loaded = GPT.load(tmp_path)
    assert torch.equal(loaded(tokens), model(tokens))
    check_cached_equals_whole(loaded, tokens, 13)


@torch.no_grad()
def test_transformer_xls_clamp_uses_the_last_distance_of_training(make):
    model = make(pos="xl")
    keys = model.pos.relative(80, 0)[0]
    model.extend("clamp", 4)
    assert torch.equal(model.pos.relative(80, 0)[0], keys[:, :24])
    assert torch.equal(model.pos.relative(9, 0)[0], keys[:, :9])
    check_cached_equals_whole(model, torch.randint(0, 50, (1, 80)), 11)


# -----------------------------------------------------------------------------
# What is refused changes nothing.


@pytest.mark.parametrize(
    "method, factor, options, message",
    [
        ("yarm", 2, {}, "--pos=rope has no extension method 'yarm': use --method=none, pi"),
        ("yarn", 0.5, {}, "factor=0.5 does not extend the context: give a number of at least 1"),
        ("yarn", float("nan"), {}, "factor=nan does not extend"),
        ("yarn", "four", {}, "factor='four' does not extend"),
        ("yarn", math.inf, {}, "factor=inf does not extend"),
        ("yarn", 2, {"beta": 3}, "method 'yarn' of --pos=rope has no option 'beta': use beta_fast"),
        ("pi", 2, {"ramp": "paper"}, "has no option 'ramp': leave it out"),
        ("yarn", 2, {"ramp": "odd"}, "ramp='odd' cannot be used: give one of index, paper"),
        ("yarn", 2, {"truncate": 1}, "truncate=1 cannot be used: give one of True, False"),
        ("yarn", 2, {"beta_slow": 40.0}, "beta_slow=40.0 must be below beta_fast=32.0"),
        ("llama3", 2, {"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below"),
        ("abf", 2, {"new_base": 0.5}, "new_base=0.5 cannot be used: give a number above 1"),
        ("abf", 2, {"new_base": "big"}, "new_base='big' cannot be used: give a number above 1"),
        ("longrope", 2, {}, "needs a table of 4 numbers"),
        ("longrope", 2, {"long_factor": [1.0, 2.0]}, "long_factor=.* give a list of 4 numbers"),
        ("longrope", 2, {"long_factor": [1.0, 2.0, -1.0, 4.0]}, "list of 4 numbers above 0"),
        ("resonance", 2, {"of": "dynamic-ntk"}, "of='dynamic-ntk' cannot be used: give one of"),
        ("drope", 2, {"scale": 0.0}, "scale=0.0 cannot be used: give a number"),
        (
            "lm-infinite",
            2,
            {"sinks": 24},
            "sinks=24 cannot be used: give a number of tokens, 0 to 23",
        ),
        ("self-extend", 2, {"group": 0.5}, "group=0.5 cannot be used: give a whole number"),
        ("self-extend", 2, {"window": "x"}, "window='x' cannot be used: give a number"),
        ("ntk-lceg", 2, {"multiplier": True}, "multiplier=True cannot be used: give a number"),
        ("ntk-frozen", 2, {"multiplier": -1.0}, "multiplier=-1.0 cannot be used: give a number"),
        ("dynamic-pi", 2, {"length": math.inf}, "length=inf cannot be used: give a number"),
        ("dynamic-ntk", 2, {"length": "long"}, "length='long' cannot be used: give a number"),
        ("dynamic-yarn", 2, {"length": -1.0}, "length=-1.0 cannot be used: give a number"),
        ("ntk-parts", 2, {"beta_slow": 1e-320}, "not finite|cannot be computed"),
    ],
    ids=str,
)
def test_a_refused_extension_changes_nothing(method, factor, options, message, make):
    model = make(pos="rope")
    inv_freq, config = model.pos.inv_freq.clone(), dict(vars(model.config))
    with pytest.raises(UserError, match=message):
        model.extend(method, factor, **options)
    assert torch.equal(model.pos.inv_freq, inv_freq)
    assert vars(model.config) == config


@pytest.mark.parametrize("method", ["ntk", "abf", "dynamic-ntk"])
def test_methods_that_change_the_base_need_two_pairs(method, make):
    with pytest.raises(UserError, match="two pairs of rotated channels: use --method=pi"):
        make(pos="rope", head_dim=2).extend(method, 2)


@pytest.mark.parametrize("pos", [pos for pos in POSITIONS if not issubclass(POSITIONS[pos], RoPE)])
def test_other_schemes_refuse_ropes_methods(pos, make):
    model = make(pos=pos)
    with pytest.raises(UserError, match=f"--pos={pos} has no extension method 'yarn'"):
        model.extend("yarn", 2)
    with pytest.raises(UserError, match=f"--pos={pos} has no extension method 'lm-infinite'"):
        model.extend("lm-infinite", 2)
    assert model.config.extension is None


@pytest.mark.parametrize("pos", [pos for pos in POSITIONS if "none" in POSITIONS[pos].methods])
def test_the_method_none_extends_the_context_alone(pos, make):
    model, plain = make(pos=pos), make(pos=pos)
    model.extend("none", 3)
    assert model.config.block_size == 72
    tokens = torch.randint(0, 50, (1, 60))
    assert torch.equal(model(tokens), plain(tokens))


def test_nopes_scale_must_be_a_positive_number(make):
    for scale in (True, 0.0, "2"):
        with pytest.raises(UserError, match="scale=.* cannot be used: give a number above 0"):
            make(pos="nope").extend("scale", 2, scale=scale)


@pytest.mark.parametrize(
    "change",
    [
        lambda inv_freq, factor: inv_freq,
        lambda inv_freq, factor: (inv_freq[1:], factor),
        lambda inv_freq, factor: (inv_freq.float(), factor),
        lambda inv_freq, factor: (inv_freq.tolist(), factor),
        lambda inv_freq, factor: (inv_freq, None),
    ],
)
def test_what_a_scheme_returns_as_frequencies_is_checked(change, monkeypatch):
    class Mine(RoPE):
        def frequencies(self, method, factor, options):
            return change(*super().frequencies(method, factor, options))

    monkeypatch.setitem(POSITIONS, "mine", Mine)
    with pytest.raises(UserError, match=r"^Mine.frequencies\(\) returned .* tensor \(8,\)"):
        GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=9, pos="mine"))


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    plain, _ = rope_scaling.none(10000.0, 64, 1024, 1.0)
    ntk, _ = rope_scaling.ntk(10000.0, 64, 1024, 4.0)
    assert ntk[0] == plain[0]
    assert ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-12)
