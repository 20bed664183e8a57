"""A bias that all layers share is built once a pass where kernels run: model.py."""

import pytest
import torch

import kernels
from model import GPT, ALiBi, GPTConfig

SHAPE = {"n_layer": 3, "n_head": 1, "n_embd": 32, "block_size": 40, "layer_pattern": "FNF"}


def gradients(model, tokens, **settings):
    model.zero_grad()
    for name, value in settings.items():
        setattr(model, name, value)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("pos", ["t5", "alibi"])
def test_a_bias_is_built_once_for_all_layers(pos, rng, monkeypatch):
    """Loss and gradients are those of layers that build their own, also where blocks are
    recomputed; layers without positions have none.
    """
    model = GPT(GPTConfig(pos=pos, **SHAPE))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    tokens = torch.randint(257, (1, 18))
    calls = []
    bias = model.pos.bias
    monkeypatch.setattr(model.pos, "bias", lambda *given: calls.append(given) or bias(*given))
    shared = gradients(model, tokens)
    assert calls == [(17, 0)]
    recomputed = gradients(model, tokens, activation_checkpointing=True)
    assert len(calls) == 2
    model.activation_checkpointing = False
    monkeypatch.setattr(kernels, "runs_uncompiled", lambda device: False)
    own = gradients(model, tokens)
    assert calls[2:] == [(17, 0), (17, 2)]
    for x, y, z in zip(shared, recomputed, own, strict=True):
        assert torch.allclose(x, z, rtol=1e-4, atol=1e-6) and torch.equal(x, y)


class ByLayer(ALiBi):
    def bias(self, n, layer):
        return super().bias(n, layer) * (layer + 1)


def test_a_bias_of_ones_own_is_not_shared():
    assert ALiBi.shares_bias and not ByLayer.shares_bias
