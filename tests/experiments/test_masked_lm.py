"""Masked language models: what is masked, and what a model without a causal mask sees."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from boards import make_board

from experiments.masked_lm import bidirectional, mask_tokens, measure


def test_fifteen_percent_are_masked_and_only_they_are_scored():
    tokens = torch.randint(0, 10, (500, 64), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_tokens(tokens, SimpleNamespace(vocab_size=10, bos=5), seed=3)
    masked = inputs == 10
    assert torch.equal(inputs.where(~masked, targets), tokens) and (targets[~masked] == -1).all()
    assert masked[tokens != 5].float().mean() == pytest.approx(0.15, abs=0.01)
    assert not masked[tokens == 5].any()


@pytest.mark.parametrize("pos", ["nope", "learned", "sinusoidal", "alibi", "rope"])
def test_without_causality_nope_sees_a_bag_of_tokens(pos, make):
    model, order = make(pos=pos), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[4, 7, 7, 9, 49, 4, 7, 30, 49, 2, 4, 7]])  # 49: masked
    with bidirectional:
        logits, permuted, twice = map(model, (tokens, tokens[:, order], tokens.repeat(1, 2)))
    causal = model(tokens)[0]  # NoPE can count
    pairs = (logits[:, order], permuted), (logits[0, 4], logits[0, 8]), (logits, twice[:, 12:])
    equal = [torch.allclose(*pair, atol=1e-4) for pair in (*pairs, (causal[4], causal[8]))]
    assert equal == [pos == "nope"] * 3 + [False]


def test_masked_tokens_are_scored_and_compared_with_their_frequencies(text_data):
    b = make_board("masked_lm", [], "try").b
    arm = SimpleNamespace(name="nope", seed=1, b=b, dataset=text_data, device=torch.device("cpu"))
    loss, perplexity, frequencies = measure(arm).values()
    assert 2 < loss < 6 and perplexity == pytest.approx(np.exp(loss))
    train, val = (np.fromfile(text_data / f"{s}.bin", "u2")[512:] for s in ("train", "val"))
    p = (np.bincount(train, minlength=257) + 1) / (len(train) + 257)
    assert frequencies == pytest.approx(-np.log(p[val]).mean(), abs=0.05)
