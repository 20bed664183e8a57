"""Hand-set weights that know positions without position embeddings, and what they need for it."""

import pytest
import torch

from experiments.papers import nope_positions as nope
from nanolong.attention_maps import attention_maps

LENGTH = 257  # tokens
POSITIONS = torch.arange(LENGTH, dtype=torch.float64)


@pytest.fixture(scope="module")
def text():
    """Random tokens, not those of the experiment."""
    return nope.random_text(LENGTH, seed=12345)


@pytest.fixture
def model():
    return nope.build_model(300, torch.float64)


@torch.no_grad()
def states(model, text):
    """The hidden states (T, C): the last norm leaves them as they are."""
    return model.hidden_states(text[None])[0].double()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-2)])
def test_the_states_hold_the_position_of_every_token(text, dtype, tolerance):
    found = states(nope.build_model(300, dtype), text)
    error = (found[:, nope.POSITION] - POSITIONS).abs().max()
    assert error < tolerance
    assert (found[:, nope.INVERSE] * (POSITIONS + 1) - 1).abs().max() < tolerance


def test_positions_do_not_depend_on_the_other_tokens(model, text):
    other = nope.random_text(LENGTH, seed=54321)
    assert (other[1:] != text[1:]).any()
    difference = states(model, text)[:, nope.POSITION] - states(model, other)[:, nope.POSITION]
    assert difference.abs().max() < 1e-9


def test_without_bos_all_positions_are_the_same(model, text):
    found = states(model, text[1:])[:, nope.POSITION]
    assert (found == found[0]).all()


def test_attention_is_that_of_explicit_distances(model, text):
    assert nope.errors(model, text)[2:].max() < 1e-12  # of the outputs
    p = attention_maps(model, text[None])[1][0]  # (2, T, T)
    expected, _ = nope.relative_attention(model, text)
    assert (p - expected).abs().max() < 1e-12


def test_one_head_has_the_bias_of_alibi_and_the_other_copies(model, text):
    """Their probabilities, from formulas written out again for some queries."""
    p = attention_maps(model, text[None])[1][0]  # (2, T, T)
    content = model.embed.weight[text, nope.CONTENT]
    attention = model.blocks[1].attention
    q, k = (content @ layer.weight[:8, nope.CONTENT].T for layer in (attention.q, attention.k))
    for t in (1, 100, LENGTH - 1):
        scores = torch.stack([q[t] @ k[i] / 4 - (t - i) / 16 for i in range(t + 1)])
        assert (p[0, t, : t + 1] - scores.softmax(0)).abs().max() < 1e-12
    # All of the attention goes to the third token before.
    assert (p[1].diagonal(-3) - 1).abs().max() < 1e-12


@pytest.mark.parametrize(
    "layer, name, row, channel",
    [
        (0, "attention.v", 0, nope.IS_BOS),
        (0, "mlp.gate", 50, nope.INVERSE),
        (0, "mlp.down", nope.POSITION, 50),
        (1, "attention.q", 8, nope.CONSTANT),
        (1, "attention.k", 8, nope.POSITION),
        (1, "attention.k", 25, nope.SQUARE),
    ],
)
def test_a_changed_weight_breaks_it(model, text, layer, name, row, channel):
    weight = model.blocks[layer].get_submodule(name).weight
    assert weight[row, channel] != 0
    with torch.no_grad():
        weight[row, channel] *= 1.01
    assert nope.errors(model, text).max() > 1e-3


def test_the_width_limits_the_length(text):
    model = nope.build_model(100, torch.float64)
    with pytest.warns(UserWarning, match="longer than the model's context"):
        error = nope.errors(model, text)[0]
    assert error[:100].max() < 1e-9
    assert error[-1] > 1
