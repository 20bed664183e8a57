"""A memory of detached hidden states: as one long text forward, and an end of gradients."""

import pytest
import torch

from experiments.recurrence import SCHEMES, forward


@pytest.mark.parametrize("pos", SCHEMES)
def test_segments_with_a_memory_of_all_before_are_one_long_text(pos, make):
    model = make(pos=pos, n_layer=3).double()
    tokens = torch.randint(50, (2, 24))
    with torch.no_grad():
        expected = model(tokens)
    memory = None
    for segment, of_long_text in zip(tokens.split(8, 1), expected.split(8, 1), strict=True):
        logits, memory = forward(model, segment, memory, capacity=16)
        assert (logits - of_long_text).abs().max() < 1e-11
    assert [states.shape[1] for states in memory] == [16] * 3


def test_gradients_end_at_the_memory(make):
    model = make(pos="rope", tie_embeddings=False)
    _, memory = forward(model, torch.arange(8)[None], None, capacity=8)
    logits, _ = forward(model, torch.arange(20, 28)[None], memory, capacity=8)
    (gradient,) = torch.autograd.grad(logits.square().sum(), model.embed.weight)
    assert (gradient[:8] == 0).all()
    assert (gradient[20:28] != 0).all()
