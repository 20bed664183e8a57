"""Weights set manually that know positions without position embeddings, against formulas."""

import pytest
import torch

from experiments import nope_positions as nope
from nanolong.evaluation.attention_maps import attention_maps

LENGTH = 257  # tokens
TEXT = nope.random_text(LENGTH, seed=12345)  # which is not the experiment's


@torch.no_grad()
def states(model, text):
    """The hidden states (T, C): the last norm leaves them as they are."""
    return model.hidden_states(text[None])[0].double()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-2)])
def test_the_states_hold_the_position_of_every_token(dtype, tolerance):
    model = nope.build_model(300, dtype)
    found = states(model, TEXT)[:, nope.POSITION]
    assert (found - torch.arange(LENGTH)).abs().max() < tolerance
    without_bos = states(model, TEXT[1:])[:, nope.POSITION]
    assert (without_bos == without_bos[0]).all()  # no other token has a value


def test_attention_is_that_of_explicit_distances():
    model = nope.build_model(300, torch.float64)
    p = attention_maps(model, TEXT[None])[1][0]  # (2, T, T)
    content = model.embed.weight[TEXT, nope.CONTENT]
    attention = model.blocks[1].attention
    q, k = (content @ layer.weight[:8, nope.CONTENT].T for layer in (attention.q, attention.k))
    for t in (1, 100, LENGTH - 1):
        # The first head has the bias of ALiBi; heads have 16 channels.
        scores = torch.stack([q[t] @ k[i] / 4 - (t - i) / 16 for i in range(t + 1)])
        assert (p[0, t, : t + 1] - scores.softmax(0)).abs().max() < 1e-12
    assert (p[1].diagonal(-3) - 1).abs().max() < 1e-12  # the second copies
    assert nope.errors(model, TEXT)[2:].max() < 1e-12  # of what the heads return


def test_the_width_limits_the_length():
    with pytest.warns(UserWarning, match="longer than the model's context"):
        error = nope.errors(nope.build_model(100, torch.float64), TEXT)[0]
    assert error[:100].max() < 1e-9
    assert error[-1] > 1
