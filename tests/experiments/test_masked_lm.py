"""Masked language models: what is masked, what a model without a causal mask sees, and verdicts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published import judge_all, make_board, read

from experiments.masked_lm import bidirectional, mask_tokens, measure


@pytest.mark.parametrize("bos", [None, 5])
def test_fifteen_percent_are_masked_and_only_they_are_scored(bos):
    tokens = torch.randint(0, 10, (500, 64), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_tokens(tokens, SimpleNamespace(vocab_size=10, bos=bos), seed=3)
    masked = inputs == 10
    assert torch.equal(inputs.where(~masked, targets), tokens) and (targets[~masked] == -1).all()
    assert masked[tokens != bos].float().mean() == pytest.approx(0.15, abs=0.01)
    assert masked[tokens == 5].any() == (bos is None)


@pytest.mark.parametrize("pos", ["nope", "learned", "sinusoidal", "alibi", "rope"])
def test_without_causality_nope_sees_a_bag_of_tokens(pos, make):
    model, order = make(pos=pos), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[4, 7, 7, 9, 49, 4, 7, 30, 49, 2, 4, 7]])  # 49: masked
    with bidirectional:
        logits, permuted, twice = map(model, (tokens, tokens[:, order], tokens.repeat(1, 2)))
    causal = model(tokens)  # NoPE can count
    pairs = [(logits[:, order], permuted), (logits[0, 4], logits[0, 8]), (logits, twice[:, 12:])]
    equal = [torch.allclose(*pair, atol=1e-4) for pair in (*pairs, (causal[0, 4], causal[0, 8]))]
    assert equal == [pos == "nope"] * 3 + [False]


def test_published_losses_give_the_published_verdicts():
    saved = read("masked_lm")
    rows = [[r["pos"], r["seed"], "loss", 0, r["loss"]] for r in saved["records"]]
    verdicts = list(judge_all("masked_lm", rows).values())
    assert verdicts == [line.rpartition(": ")[2] for line in saved["orderings"]]


def test_masked_tokens_are_scored_and_compared_with_their_frequencies(text_data):
    b = make_board("masked_lm", [], "try").b
    arm = SimpleNamespace(name="nope", seed=1, b=b, dataset=text_data, device=torch.device("cpu"))
    loss, perplexity, frequencies = measure(arm).values()
    assert 2 < loss < 6 and perplexity == pytest.approx(np.exp(loss))
    train, val = (np.fromfile(text_data / f"{name}.bin", np.uint16) for name in ("train", "val"))
    p = (np.bincount(train, minlength=257) + 1) / (len(train) + 257)
    assert frequencies == pytest.approx(-np.log(p[val]).mean(), abs=0.05)
