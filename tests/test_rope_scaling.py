"""Context extension: published numbers, the papers' formulas, replaced attention, graphs."""

import copy

import pytest
import reference
import rope_formulas
import torch
from conftest import ROOT
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_scaling
from model import GPT, POSITIONS, GPTConfig, KVCache, RoPE
from nanolong.entry import load_entry
from nanolong.errors import UserError
from nanolong.inference import FixedShapeStep
from rope_scaling import ATTENTION, METHODS, OPTIONS, far_keys

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
slow = pytest.mark.slow  # tracing takes seconds

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


@pytest.mark.parametrize(
    "method, options, ratios, attention_factor",
    [
        ("pi", {}, [0.25] * 9, 1),
        ("ntk", {}, NTK_4, 1),
        ("ntk-parts", {}, RAMP, 1),
        ("ntk-parts", {"ramp": "paper"}, RAMP_OF_THE_PAPER, 1),
        ("yarn", {}, RAMP, 1.138629),
        ("yarn", {"truncate": False}, UNROUNDED_RAMP, 1.138629),
        ("llama3", {"factor": 8.0}, LLAMA3_8, 1),
        ("dynamic-ntk", {"factor": 2.0, "length": 2048}, NTK_3, 1),
    ],
    ids=str,
)
def test_frequencies_match_known_numbers(method, options, ratios, attention_factor):
    options = {"factor": 4.0, **options}
    inv_freq, actual_factor = METHODS[method](10000.0, 64, 1024, **options)
    plain = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    assert inv_freq.dtype == torch.float64
    assert (inv_freq / plain)[PAIRS].tolist() == pytest.approx(ratios, abs=1e-6)
    assert actual_factor == pytest.approx(attention_factor, abs=1e-6)


def test_yarns_attention_factor_matches_published_numbers():
    numbers = [1.069315, 1.138629, 1.207944, 1.277259, 1.346574]
    for factor, number in zip((2.0, 4.0, 8.0, 16.0, 32.0), numbers, strict=True):
        assert rope_scaling.yarn(1e4, 64, 1024, factor)[1] == pytest.approx(number, abs=1e-6)


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


@pytest.mark.parametrize("T", [5, 16, 17, 33, 53, 77, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method, options",
    [
        ("lm-infinite", {"sinks": 0}),
        ("lm-infinite", {"sinks": 15}),
        ("self-extend", {"window": 5, "group": 3}),
        ("self-extend", {"window": 16, "group": 7}),
        ("self-extend", {"window": 1}),
        ("jet-long", {}),
        ("jet-long", {"window": 1}),
        ("jet-long", {"window": 7}),
    ],
    ids=str,
)
@torch.no_grad()
def test_attention_is_that_by_distance_around_the_window(method, options, T, make):
    """Of 16 tokens, extended to 48; the groups of Jet-Long are of 1, 2, 3, 4, 5 and 13 tokens."""
    model = build(make, {"block_size": 16}, method, 3, options).double()
    tokens = torch.randint(0, 50, (1, T))
    assert_close(model(tokens), reference.logits(model, tokens), 1e-6)


def test_self_extend_moves_far_queries_by_its_window_less_the_groups_in_it():
    """W - W // G, as in Jin et al. (2024). Files of the authors differ unless G divides W."""
    assert rope_scaling.self_extend(16, 4, window=7, group=3).offset == 5


@torch.no_grad()
def test_jet_long_is_the_base_model_up_to_its_length(make):
    base = make(pos="rope", n_kv_head=2)
    own = build(make, {"attn_scale": 1.0}, "jet-long", 4, {})
    for n in (1, 24):
        tokens = torch.randint(0, 50, (2, n))
        assert torch.equal(own(tokens), base(tokens))
    tokens = torch.randint(0, 50, (1, 25))
    assert (own(tokens) - base(tokens)).abs().max() > 1e-3


FAR_OF_48 = [  # method, options: three layers of 48 tokens, extended to 192
    ("jet-long", {}),
    ("jet-long", {"window": 1}),
    ("jet-long", {"length": 130.0}),
    ("self-extend", {}),
    ("self-extend", {"window": 7, "group": 5}),
    ("lm-infinite", {"sinks": 4}),
]
DEEP = {"n_layer": 3, "n_head": 6, "n_embd": 48, "block_size": 48}


@pytest.mark.parametrize("start, end", [(30, 150), (101, 245)])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("method, options", FAR_OF_48, ids=str)
@torch.no_grad()
def test_a_cache_of_far_keys_equals_the_whole_text(method, options, size, start, end, make):
    """Greedy tokens, one by one or in chunks of 7. Jet-Long's group changes three times, and then
    alone the cache is refilled.
    """
    model = build(make, DEEP, method, 4, options)
    is_dynamic = method == "jet-long" and "length" not in options
    tokens = more = torch.randint(0, 50, (1, start))
    cache, parts, versions = KVCache(), [], set()
    while tokens.shape[1] <= end:
        parts.append(model(more, cache=cache))
        versions.add(cache.version)
        more = parts[-1][:, -1:].argmax(-1) if size == 1 else torch.randint(0, 50, (1, size))
        tokens = torch.cat((tokens, more), 1)
    assert len(versions) == (4 if is_dynamic else 1)
    n, whole = 0, {}
    for part in parts:
        n += part.shape[1]
        group = -(-n // 48)  # a text of as many tokens as possible has the logits of all up to it
        if group not in whole:
            whole[group] = model(tokens[:, : 48 * group])
        expected = whole[group][:, n - part.shape[1] : n]
        assert_close(part, expected, 1e-5)
        assert torch.equal(part.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("method, options", FAR_OF_48[2:], ids=str)
@torch.no_grad()
def test_steps_of_fixed_shape_and_documents_are_each_alone(method, options, make):
    """Steps of fixed shape, run as they are, and packed documents."""
    model = build(make, DEEP, method, 4, options)
    tokens = torch.randint(0, 50, (2, 130))
    cache = KVCache(130)
    parts = [model(tokens[:, :120], cache=cache)[:, -1:], model(tokens[:, 120:124], cache=cache)]
    step = FixedShapeStep(model, cache)
    parts += [step.run(token)[:, None] for token in tokens[:, 124:].split(1, 1)]
    assert_close(torch.cat(parts, 1)[:, 1:], model(tokens)[:, 120:], 1e-5)
    if method != "jet-long":  # by the length of one text, and not of each document
        packed = torch.cat((torch.zeros(1, 61), torch.ones(1, 139)), 1).long()
        if method == "lm-infinite":
            with pytest.raises(UserError, match="sinks are the first tokens of the text"):
                model(packed, docs=packed)
            return
        tokens = torch.randint(0, 50, (1, 200))
        separate = [model(part) for part in tokens.split((61, 139), 1)]
        assert_close(model(tokens, docs=packed), torch.cat(separate, 1), 1e-5)


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


def test_jet_long_samples_texts_of_equal_length_uncompiled(make):
    model = build(make, DEEP, "jet-long", 4, {})
    for prompts, options, problem in (
        ([[1, 2], [3]], {}, "is not a batch of prompts .*: give token ids"),
        ([[1, 2]], {"compiled": True}, "leave out --compile"),
    ):
        with pytest.raises(UserError, match=problem):
            next(model.generate(prompts, 9, **options))
    prompts = torch.randint(0, 50, (2, 90))
    together = torch.cat(list(model.generate(prompts, 60, temperature=0)), 1)
    for prompt, text in zip(prompts, together, strict=True):
        alone = torch.cat(list(model.generate(prompt[None], 60, temperature=0)), 1)
        assert torch.equal(text, alone[0])


@pytest.mark.parametrize("method", ["self-extend", "lm-infinite"])
def test_compiled_steps_with_far_keys_sample_the_same_tokens(method, make, compiled_graphs):
    model = build(make, DEEP, method, 4, {})
    prompts = torch.randint(0, 50, (2, 90))
    texts = [
        torch.cat(list(model.generate(prompts, 12, temperature=0, compiled=compiled)), 1)
        for compiled in (False, True)
    ]
    assert torch.equal(*texts)
    assert len(compiled_graphs) == 1


@pytest.mark.parametrize("method", rope_scaling.ATTENTION)
@pytest.mark.parametrize("settings", [{"window": 8}, {"sink_scores": True}])
def test_a_method_that_replaces_attention_is_refused_at_once(method, settings):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, **settings))
    before = model.rope_wavelengths()
    with pytest.raises(UserError, match="without a window and without learned sinks"):
        model.extend(method, 2.0)
    assert model.config.extension is None
    assert torch.equal(model.rope_wavelengths(), before)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(rope_scaling.ATTENTION)))
@pytest.mark.usefixtures("entries_do_not_stay")
@torch.no_grad()
def test_a_scheme_of_ones_own_keeps_its_frequencies_at_every_length(method, make, tmp_path):
    """p-RoPE rotates the first 3 of 4 pairs, as RoPE extended by the method at that length."""
    load_entry(ROOT / "examples" / "schemes" / "p_rope.py", POSITIONS)
    build(make, {"pos": "p_rope"}, method, 4, {}).save(tmp_path / "step-000001")
    own = GPT.load(tmp_path)
    rope = build(make, {"p_rope": 0.75}, method, 4, {})
    tokens = torch.randint(0, 50, (1, 96))
    for n in (5, 24, 25, 96, 24):
        assert torch.equal(own(tokens[:, :n]), rope(tokens[:, :n])), n
    cache = KVCache()
    parts = [own(part, cache=cache) for part in tokens.split(7, 1)]
    assert_close(parts[-1], rope(tokens)[:, -5:])


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
    model = build(make, {"pos": pos}, method, 8, {})
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
    model = build(make, {}, "dynamic-yarn", 8, {})
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
