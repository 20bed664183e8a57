"""Fast generation. Cached and greedy texts of all kinds of models are in test_reference.py."""

import itertools
import math
import warnings
from unittest.mock import MagicMock

import pytest
import torch
import torch._dynamo  # it copies torch.compiler.is_compiling, which a test replaces

from model import ContextLengthWarning, KVCache
from nanolong import inference
from nanolong.errors import UserError


def random_prompts(n, length):
    return torch.randint(0, 50, (n, length))


def generate(model, prompts, n, **options):
    """All n new tokens of each prompt: int64 (B, n)."""
    return torch.cat(list(model.generate(prompts, n, **options)), 1)


def test_a_model_in_training_samples_without_dropout(make, monkeypatch):
    """And is in training again between two tokens, each module as it was, as after an error."""
    model = make(dropout=0.5)
    prompt = [[3, 1, 4]]
    expected = generate(model, prompt, 8, temperature=0)
    model.train()
    model.blocks[0].eval()  # as its caller wants it
    modes = [module.training for module in model.modules()]
    tokens = []
    for token in model.generate(prompt, 8, temperature=0):
        assert [module.training for module in model.modules()] == modes
        model.zero_grad()
        model(token.clone(), token.clone()).backward()  # it may be trained meanwhile
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected)

    monkeypatch.setattr(model.scheme, "embed", MagicMock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        next(model.generate(prompt, 9))
    assert [module.training for module in model.modules()] == modes


def test_the_warning_beyond_the_context_is_shown_once(make):
    model = make(pos="rope")  # of 24 tokens
    for n, expected in ((20, 0), (40, 1), (40, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as Python's, which show a text once for a line
            generate(model, random_prompts(2, 3), n)
        assert [warning.category for warning in caught] == [ContextLengthWarning] * expected


@pytest.mark.parametrize("top_k, top_p", [(5, 0.9), (0, 0.6), (0, 1.0)])
@torch.no_grad()
def test_tokens_are_sampled_with_their_probabilities(top_k, top_p, make, rng):
    """Which of them are kept is compared with transformers below."""
    model = make(seed=int(rng.integers(1000)), vocab_size=30, n_layer=1)
    model.head.weight *= 3
    n = 8000
    options = {"temperature": 0.7, "top_k": top_k, "top_p": top_p, "min_p": 0.01}
    p, ids = inference.token_probabilities(model(torch.tensor([[7]]))[:, -1], **options)
    expected = p[0] if ids is None else torch.zeros(30).scatter(0, ids[0], p[0])
    tokens = generate(model, torch.full((n, 1), 7), 1, **options)
    frequencies = torch.bincount(tokens[:, 0], minlength=30) / n
    assert not frequencies[expected == 0].any()
    assert (frequencies - expected / expected.sum()).abs().max() < 6 * 0.5 / n**0.5  # six sigma


TOP_P = (0.01, 0.4, 0.9, 1)
KEPT = [*itertools.product(("random",), (0, 2, 7, 30, 99), TOP_P)]
KEPT += itertools.product(("ties",), (0, 30, 99), TOP_P)  # top_k takes any of a tie


@pytest.mark.parametrize("kind, top_k, top_p", KEPT)
def test_kept_tokens_are_those_of_transformers(kind, top_k, top_p):
    """Temperature, top_k, top_p of what is left, min_p, by its classes in the order of generate().

    Which of equally likely tokens top_p keeps is left open there, so of ties the sorted
    probabilities are compared.
    """
    process = pytest.importorskip("transformers").generation.logits_process
    # the same in every session: a sum that rounds to top_p itself may fall on either side
    logits = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(top_k))
    if kind == "ties":
        logits = logits.round()
    for temperature, min_p in ((0.7, 0.0), (1.6, 0.1), (1.0, 1.0)):
        expected = process.TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = process.TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = process.TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = process.MinPLogitsWarper(min_p)(None, expected)
        expected = expected.softmax(-1)
        p, ids = inference.token_probabilities(logits, temperature, top_k, top_p, min_p)
        found = p if ids is None else torch.zeros(40, 30).scatter(1, ids, p)
        found = found / found.sum(-1, keepdim=True)
        if kind == "ties":
            found, expected = found.sort().values, expected.sort().values
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_outside_their_range_are_refused_at_once(name, value, make):
    if (name, value) == ("temperature", 1.5):
        value = math.inf
    with pytest.raises(UserError, match=name):
        make().generate([[1, 2]], 3, **{name: value})


@pytest.mark.parametrize("first", [True, False])
def test_documents_are_for_all_calls_with_a_cache_or_for_none(first, make):
    model, cache, tokens = make(), KVCache(), random_prompts(1, 3)
    docs = torch.zeros_like(tokens)
    model(tokens, docs=docs if first else None, cache=cache)
    with pytest.raises(UserError, match="docs are missing in some calls with this cache"):
        model(tokens, docs=None if first else docs, cache=cache)


def test_a_graph_is_told_every_tensor_of_its_cache(make):
    model, cache = make(pos="fox", n_layer=1), KVCache(8)
    model(random_prompts(1, 3), cache=cache)
    inference.FixedShapeStep(model, cache)
    # keys, values, gates and their sum; positions, where to write, and the length
    assert len(cache.tensors()) == 7 and all(map(torch.is_tensor, cache.tensors()))


def test_a_row_ends_at_a_stop_token_and_repeats_it(make):
    """Until all rows have ended; before that it is the row of generate() without stop."""
    model = make(block_size=256)
    torch.manual_seed(1)  # rows that end at different places
    prompts = random_prompts(3, 6)

    def sample(n, **options):
        return generate(model, prompts, n, generator=torch.Generator().manual_seed(2), **options)

    free = sample(200)
    stop = {3, 17}
    ends = [next(i for i, token in enumerate(row) if token in stop) for row in free.tolist()]
    assert len(set(ends)) > 1
    rows = sample(200, stop=stop)
    assert rows.shape[1] == max(ends) + 1
    for row, expected, end in zip(rows.tolist(), free.tolist(), ends, strict=True):
        assert row == expected[:end] + [expected[end]] * (len(row) - end)
    # no row has ended after the tokens that were asked for
    n = min(ends)
    assert torch.equal(sample(n, stop=stop), free[:, :n])
    assert generate(model, prompts[:1], 9, stop=range(50)).shape == (1, 1)
    for unknown in (50, [-1], "ab"):
        with pytest.raises(UserError, match="no ids of a vocabulary of 50"):
            model.generate(prompts, 9, stop=unknown)


def test_tokens_of_another_shape_are_answered_by_the_right_one(make):
    model = make()
    with pytest.raises(AssertionError, match=r"\(3,\): give \(B, T\)"):
        model(torch.tensor([1, 2, 3]))
    for prompt in ("def", ["def"], [1, 2, 3], torch.tensor([1, 2]), [[1.5]], 5, None, [[[1]]]):
        with pytest.raises(
            UserError, match=r"int64 tensor \(B, T\), with at least one token in a row"
        ):
            model.generate(prompt, 5)
