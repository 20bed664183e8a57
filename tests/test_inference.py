"""Fast generation. Cached and greedy texts of all kinds of models are in test_reference.py."""

import itertools
import warnings
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch._dynamo  # it copies torch.compiler.is_compiling, which a test replaces

from kernels import eager
from model import POSITIONS, ContextLengthWarning
from nanolong import inference
from nanolong.errors import UserError
from nanolong.inference import KVCache

WINDOW = {"window": 9, "sinks": 2}
EMBEDDED = ("learned", "sinusoidal")  # schemes that act on the embeddings only


def random_prompts(*lengths):
    return [torch.randint(0, 50, (n,)) for n in lengths]


def generate(model, prompts, n, **options):
    """All n new tokens of each prompt: int64 (B, n)."""
    return torch.cat(list(model.generate(prompts, n, **options)), 1)


def seeded_generators(n):
    return [torch.Generator().manual_seed(seed) for seed in range(n)]


def pad_first_row(n_pads, length):
    """Positions and documents (2, length) of two texts, the first padded on the left."""
    count = torch.arange(length) - torch.tensor([[n_pads], [0]])
    return {"positions": count.clamp(min=0), "docs": (-count).clamp(min=0)}  # each pad on its own


def prefill(model, tokens, capacity, mask=()):
    """A cache that holds these tokens; mask: positions and documents of a longer text."""
    cache = KVCache(capacity)
    model(tokens, **{x: mask[x][:, : tokens.shape[1]] for x in mask}, cache=cache)
    return cache


@pytest.mark.parametrize("pos", ["rope", "alibi", *EMBEDDED])
def test_each_of_several_prompts_is_sampled_as_if_alone(pos, make):
    """With a generator of its own; positions that were random in training, too."""
    settings = {} if pos == "alibi" else {"random_positions": 90}
    model = make(pos=pos, n_kv_head=2, **settings).double()
    prompts = random_prompts(5, 17, 1, 12)
    options = {"top_k": 20, "top_p": 0.9, "temperature": 0.8}
    together = generate(model, prompts, 6, generator=seeded_generators(4), **options)
    for row, prompt, generator in zip(together, prompts, seeded_generators(4), strict=True):
        alone = generate(model, prompt[None], 6, generator=generator, **options)
        assert torch.equal(row[None], alone)
    if pos in ("rope", "sinusoidal"):  # in generation they are random as well
        model = make(pos=pos, n_kv_head=2).double()
        others = generate(model, prompts, 6, generator=seeded_generators(4), **options)
        assert not torch.equal(together, others)


def test_prompts_may_be_tensors_or_lists(make):
    model = make().double()
    rows = [[3, 1, 4], [1, 5, 9], [2, 6]]
    expected = generate(model, [torch.tensor(row) for row in rows], 5, temperature=0)
    for given in (rows, torch.tensor(rows[:2], dtype=torch.int32), np.array(rows[:2])):
        assert torch.equal(generate(model, given, 5, temperature=0), expected[: len(given)])


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

    monkeypatch.setattr(model.pos, "embed", MagicMock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        next(model.generate(prompt, 9))
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("compiled", [False, True])
def test_the_warning_beyond_the_context_is_shown_once(compiled, make, monkeypatch):
    monkeypatch.setattr(inference.FixedShapeStep, "compile", lambda step: step.run)
    model = make(pos="rope")  # of 24 tokens
    for n, expected in ((20, 0), (40, 1), (40, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as Python's, which show a text once for a line
            generate(model, random_prompts(5, 3), n, compiled=compiled)
        assert [warning.category for warning in caught] == [ContextLengthWarning] * expected


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [(0.7, 5, 1.0, 0), (1.0, 0, 0.6, 0), (1.3, 7, 0.5, 0), (1.0, 99, 1.0, 0), (1.0, 9, 0.9, 0.3)],
)
@torch.no_grad()
def test_tokens_are_sampled_with_their_probabilities(temperature, top_k, top_p, min_p, make, rng):
    """Only those that top_k, top_p and min_p keep; the distribution is written out in float64."""
    model = make(seed=int(rng.integers(1000)), vocab_size=30, n_layer=1)
    model.head.weight *= 3
    n = 8000
    p = (model(torch.tensor([[7]]))[0, 0].double() / temperature).softmax(-1).tolist()
    order = sorted(range(30), key=lambda token: -p[token])[: top_k or None]
    expected = torch.zeros(30, dtype=torch.float64)
    mass = 0.0  # of the more likely tokens
    for token in order:
        if mass < top_p * sum(p[kept] for kept in order) and p[token] >= min_p * max(p):
            expected[token] = p[token]
        mass += p[token]
    expected /= expected.sum()

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = generate(model, torch.full((n, 1), 7), 1, **options)
    frequencies = torch.bincount(tokens[:, 0], minlength=30) / n
    assert not frequencies[expected == 0].any()
    assert (frequencies - expected).abs().max() < 6 * 0.5 / n**0.5  # six sigma


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


def test_a_row_ends_at_a_stop_token_and_repeats_it(make):
    """Until all rows have ended; before that it is the row of generate() without stop."""
    model = make(block_size=256)
    torch.manual_seed(1)  # rows that end at different places
    prompts = random_prompts(4, 9, 6)
    free = generate(model, prompts, 200, generator=seeded_generators(3))
    stop = {3, 17}
    ends = [next(i for i, token in enumerate(row) if token in stop) for row in free.tolist()]
    assert len(set(ends)) > 1
    rows = generate(model, prompts, 200, generator=seeded_generators(3), stop=stop)
    assert rows.shape[1] == max(ends) + 1
    for row, expected, end in zip(rows.tolist(), free.tolist(), ends, strict=True):
        assert row == expected[:end] + [expected[end]] * (len(row) - end)
    # no row has ended after the tokens that were asked for
    n = min(ends)
    assert torch.equal(
        generate(model, prompts, n, generator=seeded_generators(3), stop=stop), free[:, :n]
    )
    assert generate(model, prompts[:1], 9, stop=range(50)).shape == (1, 1)
    for unknown in (50, [-1], "ab"):
        with pytest.raises(UserError, match="no ids of a vocabulary of 50"):
            model.generate(prompts, 9, stop=unknown)


def test_tokens_of_another_shape_are_answered_by_the_right_one(make):
    model = make()
    with pytest.raises(AssertionError, match=r"\(3,\): give \(B, T\)"):
        model(torch.tensor([1, 2, 3]))
    for prompt in ("def", ["def"], [1, 2, 3], torch.tensor([1, 2]), [[1.5]], 5, None, [[[1]]]):
        with pytest.raises(UserError, match=r"int64 tensor \(B, T\), or a list of prompts"):
            model.generate(prompt, 5)


# -----------------------------------------------------------------------------
# Decoding steps of fixed shape, run as they are, as compiled for a CPU and for a GPU, and compiled.


@pytest.mark.parametrize("settings", [{}, WINDOW], ids=str)
@pytest.mark.parametrize("mode", ["CPU", "GPU", "GPU, bfloat16"])
@pytest.mark.parametrize("pos", POSITIONS)
@torch.no_grad()
def test_steps_of_fixed_shape_have_the_logits_of_one_forward_pass(
    pos, mode, settings, make, monkeypatch
):
    """Of a padded prompt too; attention goes to the whole capacity."""
    model = make(pos=pos, n_kv_head=2, block_size=64, **settings)
    tokens = torch.randint(0, 50, (2, 40))
    is_16_bit = mode.endswith("bfloat16")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit)
    for mask in ({}, pad_first_row(7, 40)):
        with autocast, monkeypatch.context() as patch:
            expected = model(tokens, **mask)[:, 25:].float()
            cache = prefill(model, tokens[:, :25], 40, mask)
            step = inference.FixedShapeStep(model, cache, mask.get("positions"), mask.get("docs"))
            addresses = [x.data_ptr() for x in cache.tensors()]
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            patch.setattr(eager, "FLASH_DEVICES", ("cpu",) if mode == "CPU" else ())
            logits = torch.stack([step.run(token) for token in tokens[:, 25:].split(1, 1)], 1)
        assert logits.dtype == torch.float32
        tolerance = 0.05 if is_16_bit else 1e-5  # a few hundredths are rounding
        assert (logits - expected).norm() < tolerance * expected.norm()
        assert len(step.weights) == (2 * 7 + 1 if is_16_bit else 0)
        assert [x.data_ptr() for x in cache.tensors()] == addresses


@pytest.mark.parametrize(
    "pos",
    ["fox-rope", "t5", *(pytest.param(pos, marks=pytest.mark.slow) for pos in POSITIONS)],
)
@torch.no_grad()
def test_a_graph_copies_the_token_only(pos, make, compiled_graphs, monkeypatch):
    """All other inputs have static addresses: torch skips a CUDA graph that writes to others."""
    trace = torch.compile

    def compile(function, mode, **options):
        assert mode == "reduce-overhead"
        return trace(function, **options)

    monkeypatch.setattr(torch, "compile", compile)
    model = make(pos=pos, n_kv_head=2, block_size=64, **WINDOW)
    with torch.autocast("cpu", torch.bfloat16):
        tokens, positions, docs = inference.pad_prompts(model, random_prompts(7, 9), 20, 32)
        cache = KVCache(32)
        inference.compute_logits(model, tokens, positions, docs, cache)
        step = inference.FixedShapeStep(model, cache, positions, docs)
        step.device_type = "cuda"
        run = step.compile()
        step.device_type = "cpu"
        run(torch.zeros(2, 1, dtype=torch.int64))
    (graph,) = compiled_graphs
    inputs = [node.meta for node in graph.graph.find_nodes(op="placeholder")]
    moving = [x for x in inputs if "_dynamo_static_input_type" not in x["tensor_dict"]]
    assert [x["example_value"].shape for x in moving] == [(2, 1)]


@pytest.mark.parametrize(
    "pos", ["rope", *(pytest.param(pos, marks=pytest.mark.slow) for pos in POSITIONS)]
)
def test_compiled_steps_sample_the_same_tokens(pos, make, compiled_graphs):
    """One graph without breaks serves texts of about one length."""
    settings = {"layer_pattern": "W" if pos == "nope" else "WN", **WINDOW}
    if pos in EMBEDDED:
        settings = {"random_positions": 70}
    model = make(pos=pos, n_kv_head=2, block_size=64, **settings)
    prompts = random_prompts(7, 3, 12)
    for start in (prompts, prompts[:1], torch.randint(0, 50, (1, 9))):
        tokens = []
        for compiled in (False, True):
            options = {"generator": seeded_generators(len(start)), "compiled": compiled}
            tokens.append(generate(model, start, 11, temperature=0.9, **options))
        assert torch.equal(*tokens)
    assert len(compiled_graphs) == 2  # for three rows, and for one
