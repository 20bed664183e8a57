"""Every kind of model against reference.py: whole, cached, packed, padded, trained, extended."""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import BUILT_IN

from model import GPT, POSITIONS, GPTConfig, KVCache, RelativeVectors
from nanolong.errors import UserError
from nanolong.evaluation.attention_maps import attention_maps
from rope_scaling import ATTENTION, METHODS, OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
W = {"window": 6, "sinks": 2}
SHAPE = {"n_layer": 2, "n_head": 6, "n_kv_head": 2, "head_dim": 8, "n_embd": 36}
SHAPE |= {"block_size": 24, "vocab_size": 50}
LOCAL = {**W, "layer_pattern": "WF", "rope_local_base": 300.0, "n_layer": 3}
GPT2 = {"norm": "layernorm", "mlp": "gelu", "bias": "all"}
MODELS = [{"pos": pos, **more} for pos in POSITIONS for more in ({}, W)]
MODELS += [{"norm_position": p, "mlp": m} for p, m in (("post", "geglu"), ("both", "gelu_exact"))]
MODELS += [
    {**GPT2, "pos": "learned", "embed_scale": 2.5},
    {**GPT2, "norm_position": "parallel", "rope_fraction": 0.5},
    {"qk_norm": "head", "tie_embeddings": False, "bias": "qkv"},
    {"qk_norm": "all", "attn_scale": 0.7, "p_rope": 0.5},
    {"rope_fraction": 0.0},
    {"output_gate": "head", "norm_position": "parallel"},
    {"output_gate": "channel", "sink_scores": True, **W},
    {"output_gate": "channel", "pos": "fox"},
    {"output_gate": "head", "pos": "shaw"},
    LOCAL,
    {**W, "layer_pattern": "SFN", "n_layer": 3},
    {"norm_eps": 0.1},
    {"sink_scores": True, "pos": "t5"},
    {"sink_scores": True, **W},
    {"query_scale": "logn"},
    {"query_scale": "logn:3", **W},
    {"query_scale": "llama4", **W},
    {"query_scale": "logn@nope", "layer_pattern": "FN"},
    {"query_scale": "llama4:4:0.3:1", "pos": "nope"},
]
# models, and how each is extended: method, options
EXTENDED = [(m, "pi", {}) for m in MODELS if "pi" in POSITIONS[m.get("pos", "rope")].methods]
EXTENDED = [case for case in EXTENDED if case[0].get("pos", "rope") != "learned"]
TABLES = {"long_factor": [1.0, 1.37, 1.74, 2.11], "short_factor": [1.0, 1.01, 1.02, 1.03]}
EXTENDED += [({}, x, TABLES if x == "longrope" else {}) for x in METHODS]
EXTENDED += [(W, x, {}) for x in ("ntk", "yarn", "dynamic-ntk")]
EXTENDED += [(LOCAL, x, {"layers": "all"}) for x in ("pi", "yarn", "dynamic-ntk")]
EXTENDED += [({**W, "layer_pattern": "FW"}, x, {}) for x in ("yarn", "dynamic-ntk")]
EXTENDED += [
    ({"p_rope": 0.5}, "yarn", {}),
    ({"head_dim": 10, "rope_fraction": 0.6}, "dynamic-yarn", {}),
    ({}, "dynamic-ntk", {"length": 48.0}),  # does not follow the text
    ({}, "jet-long", {"length": 70.0}),
    ({"query_scale": "logn"}, "dynamic-ntk", {}),
    ({"pos": "alibi"}, "dynamic-pi", {}),
    ({"pos": "xl", **W}, "clamp", {}),
    ({"pos": "nope"}, "scale", {"scale": 1.3}),
    ({"sink_scores": True}, "drope", {"scale": 1.3}),
]
CASES = [(m, None, {}) for m in MODELS] + EXTENDED
# without the schemes of NANOLONG_ENTRY, which have no formulas here
KNOWN = [case for case in CASES if case[0].get("pos", "rope") in BUILT_IN]


def takes_gaps(settings, method):
    """Whether any position ids can be given: a scheme by distance counts those between indices."""
    scheme = POSITIONS[settings.get("pos", "rope")]
    is_dynamic = "length" in OPTIONS.get(method, ()) or method in ATTENTION
    return not (scheme.counts_indices() or scheme.bounded or is_dynamic or method == "dynamic-pi")


def build(settings, method=None, options=None, seed=0):
    """A model whose weights are all random, so that no term is hidden by a zero."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SHAPE, **settings}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 1.0 if name.startswith("scheme.") else 0.3)
    if method:
        first = method if settings.get("pos", "rope") != "rope" else "none"
        layers = {name: x for name, x in options.items() if name == "layers"}
        model.extend(first, 1.4, **(layers if first == "none" else options))
        options = {name: x for name, x in options.items() if name != "layers"}
        model.extend(method, 2.0, **options)  # of the same layers; the factors multiply
        assert model.config.block_size == 67  # 24 x 2.8
        assert model.config.original_length == 24
    return model.eval()


def beyond(model):
    """A length beyond the context where the scheme can go there."""
    return 24 if model.scheme.bounded else 45


def expected_logits(model, tokens, pos=None):
    """By the formulas; for a scheme that they do not have, by the model without a cache."""
    if model.config.pos in BUILT_IN:
        return reference.logits(model, tokens, pos)
    return model(tokens, positions=pos)


def assert_close(found, expected, rel=2e-5):
    assert (found - expected).abs().max() < rel * expected.abs().max()


@pytest.mark.parametrize("settings, method, options", KNOWN, ids=str)
@torch.no_grad()
def test_the_logits_are_those_of_the_formulas(settings, method, options):
    """Before and beyond the length, where dynamic tables step, and back: nothing is left over."""
    model = build(settings, method, options)
    tokens = torch.randint(0, 50, (2, beyond(model)))
    for n in (5, 24, 31) if model.scheme.is_dynamic else ():
        assert_close(model(tokens[:, :n]), reference.logits(model, tokens[:, :n]))
    maps = []
    assert_close(model(tokens), reference.logits(model, tokens, maps=maps))
    if method in ATTENTION or isinstance(model.scheme, RelativeVectors):
        with pytest.raises(UserError, match="has no map"):
            attention_maps(model, tokens)
        return
    for found, expected in zip(attention_maps(model, tokens), maps, strict=True):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "settings, method, options", [case for case in KNOWN if takes_gaps(*case[:2])], ids=str
)
@torch.no_grad()
def test_position_ids_with_gaps_are_those_of_the_formulas(settings, method, options):
    """A window counts tokens. Beyond 1 million float32 would be too rough."""
    model = build(settings, method, options)
    tokens = torch.randint(0, 50, (1, 45))
    near = torch.tensor([0, 1, 2, 5, 6, 9, *range(12, 51)])
    for pos in (near, torch.arange(45) * 3 + 1_000_000):
        expected = reference.logits(model, tokens, pos)
        assert_close(model(tokens, positions=pos), expected, 2e-4)
        cache, parts = KVCache(), []
        for index in torch.arange(45).split((7, 30, 1, 7)):
            parts.append(model(tokens[:, index], positions=pos[index], cache=cache))
        assert_close(torch.cat(parts, 1), expected, 2e-4)


@pytest.mark.parametrize("settings, method, options", CASES, ids=str)
@torch.no_grad()
def test_cached_in_any_parts_is_the_whole(settings, method, options, rng):
    """Each part equals the end of all tokens up to there; of one token, and of several."""
    model = build(settings, method, options)
    tokens = torch.randint(0, 50, (1, beyond(model)))  # one row: it has a norm of its own
    cuts = sorted({1, 2, *rng.choice(range(3, tokens.shape[1]), 5), tokens.shape[1]})
    cache, start = KVCache(int(rng.integers(2)) * tokens.shape[1]), 0
    for end in cuts:
        part = model(tokens[:, start:end], cache=cache)
        assert_close(part, expected_logits(model, tokens[:, :end])[:, start:], 1e-4)
        start = end


@pytest.mark.parametrize("settings", MODELS, ids=str)
@torch.no_grad()
def test_packed_documents_are_documents_alone(settings):
    """Positions count from 0 in each, also where a document goes on with a cache."""
    model = build(settings)
    tokens = torch.randint(0, 50, (1, 20))
    docs = torch.tensor([[0] * 9 + [1] * 11])
    if model.config.sinks:  # of the text, which are not in the second document
        with pytest.raises(UserError, match="sinks are the first tokens of the text"):
            model(tokens, docs=docs)
        return
    packed = model(tokens, docs=docs)
    cache = KVCache()
    parts = [model(tokens[:, i : i + 7], docs=docs[:, i : i + 7], cache=cache) for i in (0, 7, 14)]
    assert_close(torch.cat(parts, 1), packed, 1e-4)
    alone = [expected_logits(model, part) for part in tokens.split((9, 11), 1)]
    assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_loss_and_gradients_are_right(settings):
    """Of targets that count: the loss of the formulas, and finite differences."""
    model = build(settings).double()
    tokens, targets = torch.randint(0, 50, (2, 2, 16))
    targets[0, :5] = -1
    loss = model(tokens, targets)
    logits = expected_logits(model, tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    for name, p in model.named_parameters():
        index = p.grad.abs().argmax()
        gradient, values = p.grad.view(-1)[index].item(), []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                p.view(-1)[index] += step
                values.append(model(tokens, targets).item())
                p.view(-1)[index] -= step
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(gradient, rel=2e-2, abs=1e-6), name


@pytest.mark.parametrize("settings, method, options", CASES, ids=str)
@torch.no_grad()
def test_greedy_text_is_that_of_the_plain_loop(settings, method, options):
    model = build(settings, method, options)
    prompts = torch.randint(0, 50, (3, 5))
    texts = torch.cat(list(model.generate(prompts, 6, temperature=0)), 1)
    for prompt, text in zip(prompts, texts, strict=True):
        plain = torch.cat(list(model.generate_plainly(prompt[None], 6, temperature=0)), 1)
        assert torch.equal(text, plain[0])


@pytest.mark.parametrize("settings, method, options", EXTENDED + CASES[: len(MODELS) : 3], ids=str)
@torch.no_grad()
def test_a_checkpoint_loads_to_the_bit(settings, method, options, tmp_path):
    model = build(settings, method, options)
    model.save(tmp_path / "step-000001")
    tokens = torch.randint(0, 50, (1, beyond(model)))
    loaded = GPT.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_learned_embeddings_are_interpolated_linearly(tmp_path):
    """A table that is extended again, after it was saved, goes on from there."""
    model = build({"pos": "learned"})
    table = model.scheme.table.detach().double()
    model.extend("pi", 2.5)
    for row in range(60):
        low, part = divmod(row / 2.5, 1)
        low, high = min(int(low), 23), min(int(low) + 1, 23)
        expected = table[low] * (1 - part) + table[high] * part
        assert torch.allclose(model.scheme.table[row].double(), expected, atol=1e-6), row
    model.save(tmp_path / "step-000000")
    loaded = GPT.load(tmp_path)
    loaded.extend("pi", 2)
    assert loaded.scheme.table.shape == (120, 36) and loaded.scheme.table.requires_grad
    assert torch.allclose(loaded.scheme.table[::2], model.scheme.table, atol=1e-7)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"drope"}))
def test_factor_one_is_plain_rope_to_the_bit(method):
    inv_freq, attention_factor = METHODS[method](10000.0, 48, 333, 1.0)
    assert torch.equal(inv_freq, METHODS["none"](10000.0, 48, 333, 1.0)[0])
    assert attention_factor == 1.0
    assert math.isfinite(float(inv_freq.sum()))


@pytest.mark.parametrize("position", ["pre", "parallel"])
@pytest.mark.parametrize("silent", ["attention.o", "mlp.down"])
@torch.no_grad()
def test_dropout_acts_on_attention_and_mlp_of_every_block(silent, position):
    """In training, and not in evaluation: with the output of the other one at zero."""
    tokens = torch.randint(0, 50, (1, 12))
    for number in range(2):
        model = build({"dropout": 0.5, "norm_position": position})
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        model.dropout.p = 0.0  # that of the embeddings
        for i, block in enumerate(model.blocks):
            block.dropout.p = 0.5 if i == number else 0.0
            block.get_submodule(silent).weight.zero_()
        assert not torch.equal(model(tokens), model(tokens)), number
