"""Fast generation: the cache, prompts of unequal length, decoding steps of fixed shape."""

import functools
import gc
import math
import warnings
import weakref

import numpy as np
import pytest
import torch
from conftest import TINY, assert_success

import kernels
from model import POSITIONS, ContextLengthWarning
from nanolong import inference
from nanolong.devices import compile_model
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
    count = torch.arange(length)
    positions = torch.stack(((count - n_pads).clamp(min=0), count))
    docs = torch.zeros(2, length, dtype=torch.long)
    docs[0, :n_pads] = torch.arange(n_pads, 0, -1)  # every pad token on its own
    return {"positions": positions, "docs": docs}


def prefill(model, tokens, capacity, **mask):
    """A cache that holds these tokens; mask: positions and documents of a longer text."""
    cache = KVCache(capacity)
    known = {name: values[:, : tokens.shape[1]] for name, values in mask.items()}
    model.hidden_states(tokens, **known, cache=cache)
    return cache


# -----------------------------------------------------------------------------
# The cache.


def test_a_cache_takes_documents_in_all_calls_or_in_none(make):
    model = make()
    cache = KVCache()
    tokens = torch.tensor([[1, 2]])
    model(tokens, docs=torch.zeros_like(tokens), cache=cache)
    with pytest.raises(UserError, match="docs are missing"):
        model(tokens, cache=cache)


# -----------------------------------------------------------------------------
# Prompts.


CASES = [(pos, settings) for pos in POSITIONS for settings in ({}, WINDOW)]
CASES += [(pos, {"random_positions": 90}) for pos in (*EMBEDDED, "rope")]


@pytest.mark.parametrize("pos, settings", CASES, ids=str)
def test_prompts_of_unequal_length_are_continued_as_if_alone(pos, settings, make):
    model = make(pos=pos, n_kv_head=2, block_size=64, **settings).double()
    prompts = random_prompts(5, 17, 1, 30)
    together = generate(model, prompts, 12, temperature=0)
    alone = [generate(model, prompt[None], 12, temperature=0) for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


def test_each_of_several_prompts_is_sampled_with_its_own_generator(make):
    model = make().double()
    prompts = random_prompts(5, 17, 1, 12)
    together = generate(model, prompts, 6, top_k=20, generator=seeded_generators(4))
    alone = [
        generate(model, prompt[None], 6, top_k=20, generator=generator)
        for prompt, generator in zip(prompts, seeded_generators(4), strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


PROMPT_FORMS = {
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "an array": lambda rows: np.array(rows),
    "lists of ints": lambda rows: rows,
    "a list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "a tuple of int32": lambda rows: tuple(torch.tensor(row, dtype=torch.int32) for row in rows),
}


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_prompts_may_be_tensors_or_lists(form, make):
    model = make().double()
    rows = [[3, 1, 4], [1, 5, 9]]
    if form.startswith(("a list", "lists", "a tuple")):
        rows.append([2, 6])
    expected = generate(model, [torch.tensor(row) for row in rows], 5, temperature=0)
    assert torch.equal(generate(model, PROMPT_FORMS[form](rows), 5, temperature=0), expected)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.tensor([1, 2]), r"shape \(\), not \(T,\): .* a single one is tokens\[None\] or"),
        ([1, 2], r"shape \(\), not \(T,\): .* or \[tokens\]$"),
        (torch.tensor(1), r"shape \(\), not \(T,\): give tokens \(B, T\)"),
        (torch.zeros(1, 1, 2, dtype=torch.long), r"shape \(1, 2\), not \(T,\): give tokens"),
        ([[[1, 2]]], r"a prompt has the shape \(1, 2\), not \(T,\): "),
        (torch.zeros(1, 2), "tokens are of torch.float32: give token ids, of torch.int64"),
        ([[1.0]], "tokens are of torch.float32"),
        ([[True]], "tokens are of torch.bool"),
        ("text", "are no token ids"),
        (None, "are no token ids"),
        ([["text"]], "are no token ids"),
        ([], "at least one token"),
        (torch.zeros(2, 0, dtype=torch.long), "at least one token"),
        ([[], [1]], "at least one token"),
        ([[1], [2, 50]], "token 50 is outside the model's vocabulary of 50: encode"),
        (torch.tensor([[3, -1]]), "token -1 is outside"),
    ],
    ids=str,
)
def test_what_are_no_prompts_is_refused_at_once(tokens, message, make):
    with pytest.raises(UserError, match=message):
        make().generate(tokens, 3)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1}, "temperature=-1 is no number from 0 on"),
        ({"temperature": math.nan}, "temperature=nan is no number"),
        ({"temperature": math.inf}, "temperature=inf is no number"),
        ({"temperature": "hot"}, "temperature=hot is no number"),
        ({"top_k": -1}, "top_k=-1 is no number from 0 on"),
        ({"top_k": 1.5}, "top_k=1.5 is .*not a whole one"),
        ({"top_p": 0}, "top_p=0 is a probability"),
        ({"top_p": 1.1}, "top_p=1.1 is a probability"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 is no number"),
        ({"max_new_tokens": None}, "max_new_tokens=None is no number"),
    ],
    ids=str,
)
def test_settings_of_sampling_are_checked_at_once(settings, message, make):
    with pytest.raises(UserError, match=message):
        make().generate([[1, 2]], **{"max_new_tokens": 3, **settings})


def test_each_prompt_needs_a_generator_of_its_own(make):
    with pytest.raises(UserError, match="there are 2 generators for 1 prompts: give one"):
        make().generate([[1, 2]], 3, generator=seeded_generators(2))


# -----------------------------------------------------------------------------
# What the caller sees of the model, and of its context length.


def test_a_model_in_training_samples_without_dropout(make):
    """And is in training again between two tokens, each module as it was."""
    model = make(dropout=0.5)
    prompt = [[3, 1, 4]]
    expected = generate(model, prompt, 8, temperature=0)
    model.train()
    model.blocks[0].eval()  # as its caller wants it
    modes = [module.training for module in model.modules()]
    tokens = []
    for token in model.generate(prompt, 8, temperature=0):
        assert [module.training for module in model.modules()] == modes
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected)
    assert [module.training for module in model.modules()] == modes


def test_a_generator_that_ends_early_leaves_the_mode_of_the_model(make, monkeypatch):
    model = make(dropout=0.5).train()
    tokens = model.generate([[1, 2]], 9)
    next(tokens)
    tokens.close()
    assert all(module.training for module in model.modules())

    def fail(*args, **options):
        assert not model.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "hidden_states", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(model.generate([[1, 2]], 9))
    assert all(module.training for module in model.modules())


def test_a_model_may_be_trained_between_two_tokens(make):
    model = make().train()
    for token in model.generate([[1, 2]], 3):
        model.zero_grad()
        model(token.clone(), token.clone()).backward()
        assert model.embed.weight.grad.abs().sum() > 0


def test_the_warning_beyond_the_context_is_shown_once(make):
    model = make(pos="rope")  # of 24 tokens
    for n, expected in ((20, 0), (40, 1), (40, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as Python's, which show a text once for a line
            generate(model, random_prompts(5, 3), n)
        assert [warning.category for warning in caught] == [ContextLengthWarning] * expected


def test_steps_of_fixed_shape_warn_once_too(make, monkeypatch):
    def make_decoding_step(model, cache, pos, docs, compiled):
        return inference.FixedShapeStep(model, cache, pos, docs).run

    monkeypatch.setattr(inference, "make_decoding_step", make_decoding_step)
    with pytest.warns(ContextLengthWarning) as caught:
        generate(make(pos="rope"), random_prompts(5), 40)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "method, message", [("dynamic-ntk", "one at a time"), ("self-extend", "documents")]
)
def test_methods_that_need_prompts_of_one_length(method, message, make):
    model = make(pos="rope")
    model.extend(method, 2)
    with pytest.raises(UserError, match=message):
        generate(model, random_prompts(2, 1), 2)
    assert generate(model, random_prompts(2, 2), 2).shape == (2, 2)


def test_asking_for_no_new_tokens_yields_nothing(make):
    assert list(make().generate(random_prompts(3), 0)) == []


# -----------------------------------------------------------------------------
# Sampling a token.


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.6), (1.3, 7, 0.5), (1.0, 99, 1.0)],
)
def test_tokens_are_sampled_with_their_probabilities(temperature, top_k, top_p, rng):
    """Only those that top_k and top_p keep; the distribution is written out in float64."""
    logits = torch.randn(1, 30) * 2
    n = 20000
    p = (logits[0].double() / temperature).softmax(-1).tolist()
    order = sorted(range(30), key=lambda token: -p[token])
    expected = torch.zeros(30, dtype=torch.float64)
    mass = 0.0  # of the more likely tokens
    for rank, token in enumerate(order):
        if mass < top_p and (rank < top_k or not top_k):
            expected[token] = p[token]
        mass += p[token]
    expected /= expected.sum()

    tokens = inference.sample_token(logits.expand(n, -1), temperature, top_k, top_p, None)
    assert tokens.shape == (n, 1)
    frequencies = torch.bincount(tokens[:, 0], minlength=30) / n
    assert not frequencies[expected == 0].any()
    six_sigma = 6 * 0.5 / n**0.5
    assert (frequencies - expected).abs().max() < six_sigma


# -----------------------------------------------------------------------------
# Decoding steps of fixed shape, which a compiler or a CUDA graph needs, run as they are.


@pytest.mark.parametrize("settings", [{}, WINDOW], ids=str)
@pytest.mark.parametrize("is_compiling", [False, True], ids=["eager", "as compiled"])
@pytest.mark.parametrize("pos", POSITIONS)
@torch.no_grad()
def test_steps_of_fixed_shape_have_the_logits_of_one_forward_pass(
    pos, is_compiling, settings, make, monkeypatch
):
    """
    After a rewind, and for a padded prompt; the memory of the cache stays where it is.

    As compiled: attention computes with the whole capacity, as where the length is not a number.
    """
    model = make(pos=pos, n_kv_head=2, block_size=64, **settings)
    tokens = torch.randint(0, 50, (2, 40))
    for mask in ({}, pad_first_row(7, 40)):
        expected = model(tokens, **mask)[:, 25:]
        cache = prefill(model, tokens[:, :25], 40, **mask)
        address = cache.keys[0].data_ptr()
        step = inference.FixedShapeStep(model, cache, mask.get("positions"), mask.get("docs"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
            step.run(torch.zeros(2, 1, dtype=torch.long))
            step.rewind()
            logits = [step.run(token) for token in tokens[:, 25:].split(1, 1)]
        assert torch.allclose(torch.stack(logits, 1), expected, atol=1e-4)
        assert cache.keys[0].data_ptr() == address


@pytest.mark.parametrize("settings", [{}, WINDOW], ids=str)
@pytest.mark.parametrize("pos", POSITIONS)
@torch.no_grad()
def test_steps_of_fixed_shape_work_under_autocast(pos, settings, make):
    """Their weights are cast once; in bfloat16 a few hundredths are rounding."""
    model = make(pos=pos, n_kv_head=2, block_size=64, **settings)
    tokens = torch.randint(0, 50, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)[:, -1].float()
        cache = prefill(model, tokens[:, :-1], 40)
        step = inference.FixedShapeStep(model, cache)
        assert step.weights
        assert all(weight.dtype == torch.bfloat16 for weight in step.weights.values())
        logits = step.run(tokens[:, -1:])
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_decoding_after_training_does_not_use_deterministic_algorithms(mode, make, monkeypatch):
    """With them, on a GPU, index_copy_() sorts its indices: ten more kernels a layer and token."""
    modes_of_copies = []
    real = torch.Tensor.index_copy_

    def index_copy_(self, *args):
        modes_of_copies.append(torch.get_deterministic_debug_mode())
        return real(self, *args)

    def make_decoding_step(model, cache, pos, docs, compiled):
        return inference.FixedShapeStep(model, cache, pos, docs).run

    monkeypatch.setattr(torch.Tensor, "index_copy_", index_copy_)
    monkeypatch.setattr(inference, "make_decoding_step", make_decoding_step)
    model = make(pos="rope", n_layer=2)
    expected = generate(model, torch.tensor([[1, 2]]), 4, temperature=0)
    torch.set_deterministic_debug_mode(mode)
    try:
        modes_between = []
        tokens = []
        for token in model.generate(torch.tensor([[1, 2]]), 4, temperature=0):
            modes_between.append(torch.get_deterministic_debug_mode())
            tokens.append(token)
    finally:
        torch.set_deterministic_debug_mode(0)
    assert torch.equal(torch.cat(tokens, 1), expected)
    assert modes_between == [mode] * 4
    assert modes_of_copies == [0] * 2 * 2 * 2 * 3  # twice, keys and values, 2 layers, 3 steps


# -----------------------------------------------------------------------------
# CUDA graphs, without a GPU: what surrounds the capture.


class FakeCuda:
    """A CUDA graph, a stream, or the context of one: nothing is captured or replayed."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def wait_stream(self, stream):
        pass

    def replay(self):
        pass


class FailingCapture(FakeCuda):
    def __enter__(self):
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")


@pytest.fixture
def restored_streams(monkeypatch):
    """Replace what a capture uses of torch.cuda. Returns the list of streams that are set."""
    for name in ("CUDAGraph", "Stream", "current_stream", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, FakeCuda)
    streams = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(kernels, "triton_runs", lambda device: True)
    return streams


@torch.no_grad()
def test_a_captured_step_owns_what_it_reads(restored_streams, make, monkeypatch):
    """A graph reads the cast weights where they lie in memory, so they must live as long as it."""
    real = torch.func.functional_call
    weights_of_last_call = []

    def functional_call(model, weights, *args, **options):
        weights_of_last_call[:] = [weakref.ref(weight) for weight in weights.values()]
        return real(model, weights, *args, **options)

    monkeypatch.setattr(torch.func, "functional_call", functional_call)
    model = make(pos="rope")
    tokens = torch.randint(0, 50, (1, 10))
    with torch.autocast("cpu", torch.bfloat16):
        cache = prefill(model, tokens[:, :9], 20)
        step = inference.capture_graph(model, cache, None, None, False)
    gc.collect()
    assert len(weights_of_last_call) == 2 * 7 + 1  # seven matrices in each block, and the head
    assert all(weight() is not None for weight in weights_of_last_call)
    assert restored_streams == []

    # Warming up and capturing have left the cache before its first step.
    assert (cache.write_index.item(), cache.valid_length.item()) == (9, 10)
    assert step(tokens[:, 9:]).shape == (1, 50)
    assert torch.equal(step.tokens, tokens[:, 9:])


@torch.no_grad()
def test_what_is_captured_is_compiled_where_that_is_asked_for(restored_streams, make, monkeypatch):
    compiled = []

    def compile_step(run, fullgraph):
        assert fullgraph
        compiled.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compile_step)
    monkeypatch.setattr(kernels, "triton_runs", lambda device: False)  # the compiler has its own
    model = make(pos="rope")
    cache = prefill(model, torch.randint(0, 50, (1, 9)), 20)
    step = inference.capture_graph(model, cache, None, None, True)
    assert compiled == [step.step.run]
    assert restored_streams == []


@pytest.mark.parametrize(
    "obstacle, reason",
    [
        ("no triton", "plain PyTorch"),
        ("dynamic method", "tables change"),
        ("failing capture", "stream is capturing$"),
    ],
)
@torch.no_grad()
def test_where_no_graph_can_be_captured_decoding_goes_on(
    obstacle, reason, restored_streams, make, monkeypatch
):
    """With a warning, the stream of before and a cache of growing length."""
    model = make(pos="rope")
    if obstacle == "no triton":
        monkeypatch.setattr(kernels, "triton_runs", lambda device: False)
    elif obstacle == "dynamic method":
        model.extend("dynamic-ntk", 2)
    else:
        monkeypatch.setattr(torch.cuda, "graph", FailingCapture)
    tokens = torch.randint(0, 50, (1, 10))
    cache = prefill(model, tokens[:, :9], 20)
    positions = cache.pos
    with pytest.warns(UserWarning, match=reason):
        assert inference.capture_graph(model, cache, None, None, False) is None
    assert len(restored_streams) == 1
    assert not cache.fixed_shape
    assert cache.pos is positions and cache.docs is None

    logits = inference.compute_logits(model, tokens[:, 9:], None, None, cache)
    assert torch.allclose(logits, model(tokens)[:, -1], atol=1e-4)


# -----------------------------------------------------------------------------
# Compiled decoding.


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Have torch.compile trace and then run what it traced. Returns the list of its graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return graphs


def compiled_cases():
    """(scheme, settings); all but one are slow, as tracing takes seconds."""
    cases = []
    for pos in POSITIONS:
        settings = {"layer_pattern": "W", **WINDOW}
        if pos not in ("nope", *EMBEDDED):
            settings["layer_pattern"] = "WN"
        marks = [] if pos == "rope" else [pytest.mark.slow]
        cases.append(pytest.param(pos, settings, marks=marks))
    for pos in ("sinusoidal", "rope"):
        cases.append(pytest.param(pos, {"random_positions": 70}, marks=[pytest.mark.slow]))
    return cases


@pytest.mark.parametrize("pos, settings", compiled_cases(), ids=str)
def test_compiled_steps_sample_the_same_tokens(pos, settings, make, compiled_graphs):
    """One graph without breaks serves texts of about one length."""
    model = make(pos=pos, n_layer=2, n_kv_head=2, block_size=64, **settings)
    prompts = random_prompts(7, 3, 12)
    for start in (prompts, prompts[:1], torch.randint(0, 50, (1, 9))):
        options = {"temperature": 0.9, "compiled": False}
        expected = generate(model, start, 11, generator=seeded_generators(len(start)), **options)
        options["compiled"] = True
        tokens = generate(model, start, 11, generator=seeded_generators(len(start)), **options)
        assert torch.equal(tokens, expected)
    assert len(compiled_graphs) == 2  # for three rows, and for one


@pytest.mark.parametrize("method", ["dynamic-yarn", "ntk-frozen", "self-extend"])
def test_methods_whose_tables_change_are_not_compiled(method, make):
    model = make(pos="rope")
    model.extend(method, 2)
    with pytest.raises(UserError, match="leave out --compile"):
        generate(model, torch.tensor([[1]]), 2, compiled=True)


@pytest.mark.slow
def test_compiled_sampling_from_the_command_line_prints_the_same_text(run, text_data, tmp_path):
    trained = run("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run")
    assert trained.returncode == 0, trained.stderr
    words = ["--start=the ", "--max_new_tokens=24", "--temperature=0", "--dtype=float32"]
    texts = []
    for compiled in ("false", "true"):
        done = assert_success(run("sample.py", tmp_path / "run", *words, f"--compile={compiled}"))
        texts.append(done.stdout)
    assert texts[0] == texts[1]


# -----------------------------------------------------------------------------
# Operators of a decoding step.


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_a_single_row_under_autocast_is_a_product_with_a_vector(has_bias, rng, monkeypatch):
    """It reads the matrix as it is; F.linear, which several rows use, repacks it."""
    x = torch.randn(1, 1, 70)
    weight = torch.randn(33, 70)
    bias = torch.randn(33) if has_bias else None
    exact = x.double() @ weight.double().T
    if has_bias:
        exact += bias.double()
    real = torch.nn.functional.linear
    shapes = []

    def linear(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with torch.autocast("cpu", torch.bfloat16):
        y = kernels.linear(x, weight, bias)
        assert shapes == []
        two_rows = kernels.linear(x.expand(1, 2, 70), weight, bias)
        expected = real(x.expand(1, 2, 70), weight, bias)
    assert y.dtype == torch.bfloat16 and y.shape == (1, 1, 33)
    assert (y - exact).abs().max() < 0.02 * exact.abs().max()
    assert torch.equal(two_rows, expected)

    assert torch.equal(kernels.linear(x, weight, bias), real(x, weight, bias))  # in float32
    assert shapes == [(1, 2, 70), (1, 1, 70)]


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("width", [1, 7, 192, 768])
def test_the_norm_of_a_single_row_is_accurate(width, scale, rng):
    """Compared with float64; several rows have the same values."""
    x = torch.randn(1, 1, width) * scale
    weight = torch.randn(width)
    mean_square = x.double().square().mean(-1, keepdim=True)
    exact = x.double() / (mean_square + 1e-5).sqrt() * weight.double()
    y = kernels.rms_norm(x, weight, 1e-5)
    assert torch.allclose(y, exact.float(), rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        y = kernels.rms_norm(x, weight, 1e-5)
        three_rows = kernels.rms_norm(x.expand(1, 3, width), weight, 1e-5)
    assert y.shape == x.shape
    assert (y - exact).abs().max() <= 1e-6 * (exact.abs().max() + 1e-9)
    assert torch.allclose(three_rows, y.expand(1, 3, width), rtol=1e-5, atol=1e-7)


def test_a_single_row_has_gradients(rng):
    x = torch.randn(1, 1, 8, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kernels.linear, (x, matrix))
    assert torch.autograd.gradcheck(lambda x, gain: kernels.rms_norm(x, gain, 1e-5), (x, gain))


# -----------------------------------------------------------------------------
# Compiling many models, for training or decoding.


def test_more_models_are_compiled_in_one_process_than_dynamo_allows(make, compiled_graphs):
    """Dynamo traces a function for eight kinds of model by default, and then runs it untraced."""
    tokens = torch.randint(0, 50, (1, 8))
    with torch._dynamo.config.patch(recompile_limit=1):
        for pos in ("nope", "learned", "alibi"):
            compiled_graphs.clear()
            compile_model(make(pos=pos, n_layer=1))(tokens, tokens)
            assert compiled_graphs, pos
