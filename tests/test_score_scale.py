"""Scores scaled by position: --score_scale."""

import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import rope_scaling
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.hub.importing import read_settings
from nanolong.hub.layout import read_json
from nanolong.inference import KVCache

KINDS = ("logn", "llama4")
# settings of each kind, whose factor grows within the first tokens
SHORT = {
    "logn": {"score_scale": "logn", "score_scale_length": 3},
    "llama4": {
        "score_scale": "llama4",
        "score_scale_length": 4,
        "score_scale_coefficient": 0.4,
        "score_scale_offset": 1,
    },
}
SHAPE = {"n_layer": 4, "n_head": 4, "n_kv_head": 2}


def factor(kind, t, window):
    """What a query at position t is multiplied by, with the settings of SHORT."""
    n = min(t + 1, window) if window else t + 1
    if kind == "logn":
        return max(1.0, math.log(n) / math.log(3))
    return 1 + 0.4 * math.log(1 + math.floor((t + 1) / 4))


def attend(model, layer, x, kind, pos):
    """The attention of a layer at positions pos (T,), by its definition in float64."""
    attention = model.blocks[layer].attention
    config, scheme = model.config, model.scheme_of(layer)
    heads = (-1, config.head_dim)
    parts = (attention.q, attention.k, attention.v)
    q, k, v = (linear(x).unflatten(-1, heads).transpose(1, 2) for linear in parts)
    window = config.window + config.sinks if config.uses_window(layer) else 0
    if config.score_scale_layers == "all" or layer % 2:
        q = q * torch.tensor([factor(kind, t, window) for t in pos.tolist()])[:, None]
    q, k = scheme.rotate(q, k, pos, layer)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    scores = q @ k.mT / math.sqrt(config.head_dim)
    index = torch.arange(len(pos))
    distance = index[:, None] - index
    bias = scheme.bias(len(pos), layer)
    if bias is not None:
        scores = scores - bias[:, None, None] * distance
    hidden = distance < 0
    if window:
        hidden = hidden | ((distance >= config.window) & (index >= config.sinks))
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return attention.o((p @ v).transpose(1, 2).flatten(2))


def test_the_factor_is_1_up_to_the_original_length():
    """Of a new model, and of an extended one, whose original length stays."""
    model = GPT(GPTConfig(score_scale="logn", block_size=24, n_embd=48))
    for length in (24, 96):
        assert model.config.block_size == length
        attention = model.blocks[0].attention
        q = torch.ones(1, 3, 96, 16)
        scaled = attention.scale_queries(q, torch.arange(96)[:, None])[0, 0, :, 0]
        assert scaled[23].item() == pytest.approx(1)
        assert scaled[95].item() == pytest.approx(math.log(96) / math.log(24))
        assert scaled[4].item() == 1
        if length == 24:
            model.extend("yarn", 4.0)


METHODS = sorted(set(rope_scaling.METHODS) - set(rope_scaling.EVALUATION_ONLY))
PATTERNS = ("F", "FN", "WF", "WS")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ("none", *KINDS))
@torch.no_grad()
def test_an_extended_model_decodes_as_in_a_whole_forward_pass(make, kind, method):
    """A Latin square: each two of method, kind of scale and pattern of layers occur together."""
    pattern = PATTERNS[(METHODS.index(method) + ("none", *KINDS).index(kind)) % 4]
    window = {"window": 7, "sinks": 2} if "W" in pattern else {}
    model = make(**SHORT.get(kind, {}), layer_pattern=pattern, **window)
    options = {"long_factor": [1.0, 2.0, 3.0, 4.0]} if method == "longrope" else {}
    model.extend(method, 4.0, **options)
    tokens = torch.randint(0, 50, (2, 60))
    cache = KVCache()
    parts = [model(part, cache=cache) for part in tokens.split((9, 21, 1, 29), 1)]
    last = model(tokens)[:, -29:]
    torch.testing.assert_close(parts[-1], last, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_positions_are_true_positions(make, kind):
    """Given ones count, of documents too; nope alone would not see them."""
    model = make(pos="nope", block_size=80, **SHORT[kind])
    tokens = torch.randint(0, 50, (1, 24))
    shifted = model(tokens, positions=torch.arange(24) + 50)
    assert (shifted - model(tokens)).abs().max() > 1e-2
    docs = torch.tensor([[0] * 10 + [1] * 14])
    positions = torch.cat((torch.arange(10), torch.arange(14)))
    together = model(tokens, positions=positions, docs=docs)
    apart = torch.cat([model(part) for part in tokens.split((10, 14), 1)], 1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_the_same_loss_and_gradients(make, kind):
    model = make(**SHORT[kind]).train()
    tokens = torch.randint(0, 50, (2, 24))
    results = []
    for run in (model, torch.compile(model)):
        model.zero_grad()
        loss = run(tokens, tokens)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
    whole = list(model.generate(tokens[:, :9], 8, temperature=0))
    compiled = list(model.generate(tokens[:, :9], 8, temperature=0, compiled=True))
    assert torch.equal(torch.cat(compiled, 1), torch.cat(whole, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_methods_that_replace_attention_refuse_it(make, kind, method):
    model = make(score_scale=kind)
    with pytest.raises(UserError, match="--score_scale"):
        model.extend(method, 2.0)
    assert model.config.extension is None


# -----------------------------------------------------------------------------
# transformers

TRANSFORMERS_SCRIPT = """
import json
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

config = Llama4TextConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
    no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=4, attn_scale=0.4,
)
config._attn_implementation = "eager"
tensors = load_file("tensors")
x = tensors.pop("x")
attention = Llama4TextAttention(config, 0)
attention.load_state_dict(tensors)
mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
with torch.no_grad():
    save_file({"y": attention(x, None, mask)[0].contiguous()}, "answer")
with open("config.json", "w") as file:
    json.dump(AutoConfig.for_model("ministral3").to_dict(), file)
"""


def test_llama4_and_the_settings_of_ministral_3_are_those_of_transformers(make, tmp_path):
    """Llama 4's attention without positions, and what Ministral 3 has by default."""
    model = make(n_kv_head=2, layer_pattern="FN", **SHORT["llama4"], score_scale_layers="nope")
    attention = model.blocks[1].attention
    x = torch.randn(2, 30, 32)
    tensors = {f"{name}_proj.weight": getattr(attention, name).weight for name in "qkvo"}
    save_file({"x": x, **tensors}, tmp_path / "tensors")
    subprocess.run(
        [sys.executable, "-c", TRANSFORMERS_SCRIPT],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )
    found = attention(x, model.nope, torch.arange(30), None, {})
    torch.testing.assert_close(found, load_file(tmp_path / "answer")["y"], rtol=1e-4, atol=1e-5)

    values = read_json(tmp_path / "config.json")
    settings = read_settings(tmp_path / "config.json", values)
    assert (settings["score_scale"], settings["score_scale_coefficient"]) == ("llama4", 0.1)
    assert (settings["score_scale_length"], settings["score_scale_offset"]) == (16384, 0)
    assert settings["extension"]["original_length"] == 16384
    assert settings["extension"]["options"]["attention_factor"] == 1
