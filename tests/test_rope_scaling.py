"""Context extension: published numbers, the papers' formulas, replaced attention, graphs."""

import copy

import pytest
import rope_formulas
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_scaling
from model import GPT, POSITIONS, GPTConfig, KVCache, RoPE
from nanolong.errors import UserError
from rope_scaling import ATTENTION, METHODS, OPTIONS, far_keys

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
slow = pytest.mark.slow  # tracing takes seconds

# -----------------------------------------------------------------------------
# Frequencies. test_hub.py compares some of the methods with transformers.


def test_ntk_lceg_has_the_bases_of_the_controlled_study():
    """Lu et al. (2024), NTK-32K and NTK-64K of a model of 4,096 tokens, rotary_dim 128."""
    for options, base in (({}, 305_922), ({"length": 65536}, 651_131)):
        inv_freq, _ = METHODS["ntk-lceg"](1e4, 128, 4096, 8.0, **options)
        assert inv_freq[1].item() ** (-128 / 2) == pytest.approx(base, rel=2e-6)


SIZES = [  # base, rotary_dim, original_length, factor
    (10000.0, 64, 1024, 4.0),
    (500000.0, 128, 8192, 8.0),
    (10000.0, 24, 64, 2.5),
    (10000.0, 6, 100, 3.0),  # the ramp of NTK-by-parts would begin below pair 0
    (1234.5, 80, 777, 16.0),
    (100.0, 10, 4000, 2.0),  # it ends behind the last pair
    (1e6, 64, 8192, 1024.0),  # abf: a base that reaches the target
]
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
BASIS = {"low_freq_factor": 2.0, "high_freq_factor": 5.0}
VARIANTS = {  # options other than the defaults
    "ntk-parts": [BETAS, {"ramp": "paper", **BETAS}, {"ramp": "progressive"}],
    "yarn": [
        {"truncate": False},
        {"attention_factor": 0.7},
        {"ramp": "paper"},
        {"ramp": "geometric", **BETAS},
        {"ramp": "progressive"},
    ],
    "abf": [{"new_base": 7e5}],
    "llama3": [BASIS],
    "ntk-frozen": [{"multiplier": 3.0}],
    "ntk-lceg": [{"multiplier": 1.5}],
    "drope": [{"scale": 1.44}],
}


def needed_options(method, n_pairs):
    if method != "longrope":
        return {}
    long_factor = [1.0 + 0.37 * k for k in range(n_pairs)]
    return {"long_factor": long_factor, "short_factor": [1.0 + 0.01 * k for k in range(n_pairs)]}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frequencies_match_the_papers(method, size):
    """Every option, and for dynamic methods inputs around the original and the target length."""
    base, d, L, s = size
    lengths = [{}]
    if "length" in OPTIONS[method]:
        lengths += [{"length": n} for n in (L // 2, L, L + 1, L * s, 3 * L * s)]
    for variant in ({}, *VARIANTS.get(method, [])):
        for length in lengths:
            options = {**needed_options(method, d // 2), **variant, **length}
            inv_freq, attention_factor = METHODS[method](*size, **options)
            expected, expected_factor = rope_formulas.frequencies(method, *size, **options)
            assert torch.allclose(inv_freq, expected, rtol=1e-12, atol=0), options
            assert attention_factor == pytest.approx(expected_factor, rel=1e-12), options


# -----------------------------------------------------------------------------
# Extended models, of 24 tokens at first. test_reference.py compares all methods with the formulas.


def build(make, settings, method, factor, options):
    """An extended model of 4 heads of queries, 2 of keys."""
    model = make(**{"pos": "rope", "n_kv_head": 2, "attn_scale": 0.7, **settings})
    model.extend(method, factor, **needed_options(method, 4), **options)
    return model


def assert_close(found, expected, rel=5e-5):
    assert (found - expected).abs().max() < rel * expected.abs().max()


FAR_OF_48 = [  # method, options: two layers of 48 tokens, extended to 192
    ("jet-long", {}),
    ("jet-long", {"window": 1}),
    ("jet-long", {"length": 130.0}),
    ("self-extend", {}),
    ("self-extend", {"window": 7, "group": 5}),
    ("lm-infinite", {"sinks": 4}),
]
DEEP = {"n_layer": 2, "n_head": 6, "n_embd": 48, "block_size": 48}


@pytest.mark.parametrize("method, options", FAR_OF_48, ids=str)
def test_many_queries_at_once_equal_chunks(method, options, make, monkeypatch):
    """With gradients, and the last 150 of 290 tokens against a cache, in float64."""
    model = build(make, {**DEEP, "n_kv_head": 2}, method, 4, options).double()
    tokens = torch.randint(0, 50, (2, 290))
    found, calls = [], []
    real = rope_scaling.attend_in_two
    monkeypatch.setattr(rope_scaling, "attend_in_two", lambda *a: calls.append(1) or real(*a))
    for in_two in (True, False):
        if not in_two:
            monkeypatch.setattr(rope_scaling, "is_in_two", lambda q, terms: False)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        cache = KVCache()
        with torch.no_grad():
            parts = [model(part, cache=cache) for part in tokens.split((140, 150), 1)]
            parts += [model(tokens[:, :130])]
        found.append([*grads, *parts])
    assert len(calls) == 4 * DEEP["n_layer"]
    for own, expected in zip(*found, strict=True):
        assert_close(own, expected, 1e-12)


@pytest.mark.parametrize("method", rope_scaling.ATTENTION)
@pytest.mark.parametrize("settings", [{"window": 8}, {"sink_scores": True}])
def test_a_method_that_replaces_attention_is_refused_at_once(method, settings):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, **settings))
    before = model.rope_wavelengths()
    with pytest.raises(UserError, match="without a window and without learned sinks"):
        model.extend(method, 2.0)
    assert model.config.extension is None
    assert torch.equal(model.rope_wavelengths(), before)


@pytest.mark.parametrize("table", [torch.ones(4), torch.ones(3).double(), [1.0] * 4], ids=str)
def test_frequencies_of_ones_own_are_checked(table, make, monkeypatch):
    class Wrong(RoPE):
        def frequencies(self, method, factor, options):
            return table, 1.0

    monkeypatch.setitem(POSITIONS, "wrong", Wrong)
    with pytest.raises(UserError, match=r"Wrong.frequencies\(\) must return a float64 tensor"):
        make(pos="wrong")


# -----------------------------------------------------------------------------
# Compiled.


@pytest.mark.parametrize(
    "pos, method",
    [
        ("rope", "dynamic-yarn"),
        *(pytest.param("rope", method, marks=slow) for method in ("ntk-frozen", "longrope")),
        *(pytest.param("rope", method, marks=slow) for method in rope_scaling.ATTENTION),
        pytest.param("alibi", "dynamic-pi", marks=slow),
    ],
)
def test_compiled_graphs_keep_their_tables(pos, method, make, compiled_graphs):
    """One graph without breaks for each quarter; the model may be called in between."""
    model = build(make, {"pos": pos, "n_layer": 1}, method, 8, {})
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.randint(0, 50, (1, 96))
    n_graphs = []
    for n in (24, 24, 60, 56, 24, 60, 90):  # 60 and 56 tokens are in the tenth quarter
        logits = compiled(tokens[:, :n])
        n_graphs.append(len(compiled_graphs))
        assert torch.equal(logits, model(tokens[:, :n]))
    if pos == "rope" and "length" in OPTIONS[method] and method != "jet-long":
        assert n_graphs == [1, 1, 2, 2, 2, 2, 3]


def test_a_compiled_dynamic_method_follows_explicit_positions(make):
    """As in training with skipped positions; to read them breaks the graph in two."""
    model = build(make, {"n_layer": 1}, "dynamic-yarn", 8, {})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(0, 50, (1, 24))
    for skip in (0, 50, 120):
        positions = torch.arange(24)
        positions[12:] += skip
        logits = compiled(tokens, positions=positions)
        assert torch.equal(logits, model(tokens, positions=positions))


# -----------------------------------------------------------------------------
# Checkpoints that are scaled already.

# what a file holds -> its extension here; Llama 3.1 has a longer context than its method's factor
SCALED = {
    "llama3": {"method": "llama3", "factor": 8.0, "options": {}, "original_length": 8192},
    "yarn": {
        "method": "yarn",
        "factor": 4.0,
        "options": {"beta_fast": 16},
        "original_length": 32768,
    },
    "longrope": {
        "method": "longrope",
        "factor": 32.0,
        "options": {"long_factor": [1.0 + i for i in range(8)]},
        "original_length": 4096,
    },
}


def scaled(name):
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 32, "rope_base": 1e4, "vocab_size": 50}
    return GPT(GPTConfig(**settings, block_size=131072, extension=copy.deepcopy(SCALED[name])))


@pytest.mark.parametrize("name", SCALED)
def test_a_second_extension_lengthens_what_the_file_has(name):
    """By the same method the factors multiply; far keys keep the frequencies of the file."""
    trained = scaled(name).scheme.inv_freq
    same = scaled(name)
    same.extend(name, 2.0)
    before = SCALED[name]
    assert same.config.block_size == 262144
    assert same.config.extension["factor"] == 2 * before["factor"]
    assert same.config.extension["options"] == before["options"]
    for method in ATTENTION:
        model = scaled(name)
        model.extend(method, 2.0)
        assert torch.equal(model.scheme.inv_freq, trained)
        assert (model.config.block_size, model.config.original_length) == (262144, 131072)
        assert model.scheme.far == far_keys(method, 131072, 2.0, {})
        assert torch.equal(GPT(model.config).scheme.inv_freq, trained)
    for method in ("pi", "ntk", "none", "drope", "dynamic-ntk"):
        model = scaled(name)
        with pytest.raises(UserError, match=f"extended by {name} already, and {method} would"):
            model.extend(method, 2.0)
        assert model.config.extension == before and model.config.block_size == 131072


def test_a_larger_base_lies_under_the_scaling_of_the_file():
    """As transformers computes Llama 3.1's frequencies from another rope_theta."""
    model = scaled("llama3")
    model.extend("abf", 2.0, new_base=8e6)
    parameters = {"rope_type": "llama3", "rope_theta": 8e6, "factor": 8.0}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=16, num_attention_heads=1, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert factor == model.scheme.attention_factor == 1
    assert torch.allclose(model.scheme.inv_freq.float(), expected, rtol=1e-6)
    assert model.config.block_size == 262144
    model = scaled("yarn")
    with pytest.raises(UserError, match="as large as abf's already: give new_base"):
        model.extend("abf", 2.0, new_base=1e4)
    assert model.scheme.under is None and model.config.extension == SCALED["yarn"]


def test_after_none_anything_follows_and_after_a_dynamic_method_nothing_else(make):
    model = make(block_size=24)
    model.extend("none", 2.0)
    model.extend("yarn", 2.0)
    assert (model.config.block_size, model.config.original_length) == (96, 24)
    for first, second in (("dynamic-ntk", "abf"), ("self-extend", "jet-long")):
        model = make(block_size=24)
        model.extend(first, 2.0)
        with pytest.raises(UserError, match=f"give --method={first}, or extend the original"):
            model.extend(second, 2.0)
    with pytest.raises(UserError, match="leaves the context length at 48 tokens"):
        model.extend(first, 1.001)


@pytest.mark.parametrize("method", ["jet-long", "dynamic-ntk"])
def test_tables_that_follow_the_text_are_refused_in_compiled_decoding(method, make):
    model = make(block_size=24)
    model.extend(method, 4.0)
    with pytest.raises(UserError, match="leave out --compile"):
        next(model.generate([[1, 2]], 60, compiled=True))
