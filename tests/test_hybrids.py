"""Layers that differ: RoPE by kind of layer, p-RoPE, and the shapes of a block."""

import math

import pytest
import torch

from model import GPT, GPTConfig, NoPE, RoPE
from nanolong.attention_maps import attention_maps
from nanolong.errors import UserError

HYBRID = {
    "n_layer": 4,
    "layer_pattern": "WWF",
    "window": 5,
    "rope_base": 5e4,
    "rope_local_base": 300.0,
    "block_size": 16,
}


def plain_frequencies(base, dim):
    return [base ** (-2 * k / dim) for k in range(dim // 2)]


def rotate(x, inv_freq, factor=1.0):
    """Rotate x (B, H, T, D) at positions 0..T-1 by RoPE's formula, in float64."""
    T, D = x.shape[-2:]
    y = x.double().clone()
    for k, frequency in enumerate(inv_freq):
        angle = torch.arange(T, dtype=torch.float64) * frequency
        a, b = x[..., k].double(), x[..., k + D // 2].double()
        y[..., k] = (a * angle.cos() - b * angle.sin()) * factor
        y[..., k + D // 2] = (b * angle.cos() + a * angle.sin()) * factor
    return y


def rotated(model, layer, T):
    """What a layer makes of random queries, and these."""
    config = model.config
    q = torch.randn(2, config.n_head, T, config.head_dim)
    pos = torch.arange(T)
    model.set_length(T)
    return q, model.scheme_of(layer).rotate(q, q, pos, layer)[0]


@pytest.mark.parametrize("layers", ["auto", "full", "all"])
def test_each_kind_of_layer_is_rotated_by_its_own_base_and_method(make, layers):
    model = make(**HYBRID)
    D = model.config.head_dim
    model.extend("pi", 4.0, layers)
    # beyond the window, and beyond the original length
    T = 50
    divisor = 4 if layers == "all" else 1
    local = [f / divisor for f in plain_frequencies(300.0, D)]
    full = [f / 4 for f in plain_frequencies(5e4, D)]
    for layer, inv_freq in enumerate((local, local, full, local)):
        q, found = rotated(model, layer, T)
        torch.testing.assert_close(found.double(), rotate(q, inv_freq), rtol=0, atol=1e-5)


def test_only_the_full_layers_have_the_attention_factor_of_yarn(make):
    model = make(**HYBRID)
    model.extend("yarn", 8.0)
    q, found = rotated(model, 0, 40)
    torch.testing.assert_close(found.norm(dim=-1), q.norm(dim=-1))
    q, found = rotated(model, 2, 40)
    torch.testing.assert_close(found.norm(dim=-1), q.norm(dim=-1) * (0.1 * math.log(8) + 1))


def test_a_hybrid_survives_its_checkpoint(make, tmp_path):
    model = make(**HYBRID, p_rope=0.5).eval()
    model.extend("yarn", 4.0)
    model.save(tmp_path / "step-000000")
    loaded = GPT.load(tmp_path)
    assert loaded.config == model.config
    assert loaded.config.extension["layers"] == "full"
    tokens = torch.randint(0, model.config.vocab_size, (1, 60))
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_second_extension_is_of_the_same_layers(make):
    first = make(**HYBRID)
    first.extend("pi", 2.0, "all")
    first.extend("pi", 2.0)
    assert "layers" not in first.config.extension
    second = make(**HYBRID)
    second.extend("pi", 2.0)
    second.extend("pi", 2.0)
    assert second.config.extension["layers"] == "full"
    torch.testing.assert_close(second.rope_wavelengths(), first.rope_wavelengths())
    torch.testing.assert_close(
        second.rope_wavelengths(window=True) * 4, first.rope_wavelengths(window=True)
    )


@pytest.mark.parametrize(
    "settings, layers",
    [
        ({"layer_pattern": "F"}, "all"),
        ({"layer_pattern": "W", "window": 5}, "all"),
        ({"layer_pattern": "FN"}, "all"),
        ({"layer_pattern": "FW", "window": 5}, "full"),
        ({"layer_pattern": "FW", "window": 5, "pos": "alibi"}, "all"),
    ],
    ids=str,
)
def test_full_is_the_default_of_a_hybrid_with_rope(make, settings, layers):
    model = make(**{"n_layer": 2, **settings})
    model.extend("pi", 2.0)
    assert model.config.extension.get("layers", "all") == layers
    if layers == "all":
        with pytest.raises(UserError, match="--layers=full is not possible"):
            model.extend("pi", 2.0, "full")


def test_full_layers_without_positions_leave_nothing_to_extend(make):
    model = make(n_layer=4, layer_pattern="WWWN", window=5)
    before = model.rope_wavelengths(window=True)
    with pytest.raises(UserError, match="--layers=all"):
        model.extend("yarn", 4.0)
    assert model.config.extension is None
    model.extend("yarn", 4.0, "all")
    assert (model.rope_wavelengths(window=True) > before * 1.5).any()


class OwnRoPE(RoPE):
    """A scheme of a user's, which may have weights and choose frequencies by layer."""


def test_a_scheme_of_ones_own_is_shared_by_all_layers(monkeypatch, make):
    monkeypatch.setitem(GPT.schemes, "own", OwnRoPE)
    model = make(pos="own", n_layer=2, layer_pattern="FW", window=5)
    model.extend("pi", 2.0)
    assert model.pos.local is None
    with pytest.raises(UserError, match="layer_pattern of both"):
        GPT(GPTConfig(**{"pos": "own", **HYBRID}))


# -----------------------------------------------------------------------------
# p-RoPE


@pytest.mark.parametrize("p", [0.0, 0.25, 0.4, 0.75])
@pytest.mark.parametrize("method", ["none", "pi", "ntk", "yarn", "llama3", "resonance", "abf"])
def test_p_rope_rotates_the_fastest_pairs_at_the_frequencies_of_the_whole_head(make, p, method):
    whole = make(head_dim=20)
    part = make(head_dim=20, p_rope=p)
    for model in (whole, part):
        model.extend(method, 4.0)
    n = int(p * 20 // 2)
    expected = whole.pos.inv_freq.clone()
    expected[n:] = 0
    assert torch.equal(part.pos.inv_freq, expected)
    assert part.rope_wavelengths()[n:].isinf().all()
    assert part.pos.attention_factor == whole.pos.attention_factor


# -----------------------------------------------------------------------------
# The shapes of a block, by their formulas


def rms_norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def randomize(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1))
    return model.eval()


@pytest.mark.parametrize("position", ["post", "both"])
def test_a_new_model_whose_outputs_are_normed_has_gradients_of_usual_size(make, position):
    model = make(norm_position=position)
    tokens = torch.randint(0, model.config.vocab_size, (2, 12))
    model(tokens, tokens).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert max(norms) < 100
    assert model.blocks[0].attention.o.weight.abs().max() > 0


# -----------------------------------------------------------------------------
# Learned sinks


def attend_with_sinks(model, x):
    """The first attention's output and weights, by the softmax over the keys and the sink."""
    attention = model.blocks[0].attention
    q, k, v = (
        linear(x).unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2)
        for linear in (attention.q, attention.k, attention.v)
    )
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    T = x.shape[1]
    scores = q @ k.mT / math.sqrt(model.config.head_dim)
    bias = model.pos.bias(T, 0)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    if bias is not None and bias.dim() == 1:
        scores = scores - bias[:, None, None] * distance
    elif bias is not None:
        scores = scores + bias[:, distance.clamp(0, bias.shape[1] - 1)]
    hidden = (distance < 0) | (distance >= (model.config.window or T))
    scores = scores.masked_fill(hidden, -torch.inf)
    sink = attention.sink_scores[:, None, None].expand(len(x), -1, T, 1)
    p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return attention.o((p @ v).transpose(1, 2).flatten(2)), p


def test_attention_maps_leave_out_the_share_of_the_sink(make):
    model = randomize(make(pos="nope", sink_scores=True, n_layer=2))
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))
    maps = attention_maps(model, tokens)
    x = model.blocks[0].attention_norm(model.embed(tokens))
    _, expected = attend_with_sinks(model, x)
    torch.testing.assert_close(maps[0], expected, rtol=1e-4, atol=1e-6)
    assert (maps[1].sum(-1) < 1).all()


class OwnAttention(NoPE):
    """A scheme whose attention takes no notice of arguments that it does not know."""

    def attend(self, q, k, v, pos, layer, cache, **mask):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def test_an_attention_without_a_log_sum_exp_refuses_learned_sinks(monkeypatch, make):
    monkeypatch.setitem(GPT.schemes, "own", OwnAttention)
    tokens = torch.randint(0, 50, (2, 8))  # a batch of two, which unpacks
    make(pos="own")(tokens)
    with pytest.raises(UserError, match="leave out --sink_scores"):
        make(pos="own", sink_scores=True)(tokens)


@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_methods_that_replace_attention_refuse_learned_sinks(make, method):
    with pytest.raises(UserError, match="--sink_scores"):
        make(sink_scores=True).extend(method, 2.0)
