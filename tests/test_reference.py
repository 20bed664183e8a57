"""What holds for every model of cases.py: the numbers of reference.py, whole, cached, in chunks, in
steps of fixed shape, packed, saved, in bfloat16, compiled, with LoRA, and on another device.
"""

import contextlib
import importlib
import math

import cases
import pytest
import reference
import torch
from conftest import Operators

from kernels import eager
from model import GPT, POSITIONS, KVCache, RelativeVectors
from nanolong.devices import autocast
from nanolong.errors import UserError
from nanolong.evaluation import loss as loss_protocols
from nanolong.evaluation.attention_maps import attention_maps
from nanolong.inference import FixedShapeStep
from nanolong.run import save_model
from rope_scaling import ATTENTION, METHODS

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


def assert_close(found, expected, rel=2e-5):
    assert (found - expected).abs().max() < rel * expected.abs().max()


def random_tokens(*shape):
    return torch.randint(0, 50, shape)


def test_every_scheme_and_method_is_a_row():
    assert {case.pos for case in cases.select("scheme")} == {*cases.SCHEMES}
    for pos, scheme in POSITIONS.items():
        rows = {case.method for case in cases.CASES if case.pos == pos}
        is_own = pos == "rope" or "yarn" not in scheme.methods
        assert not is_own or rows >= {*scheme.methods} - {"none"}, pos


# -----------------------------------------------------------------------------
# The formulas.


@pytest.mark.cases("formulas")
@torch.no_grad()
def test_the_logits_are_those_of_the_formulas(case):
    """Before and beyond the length, where dynamic tables step, and back: nothing is left over."""
    model = case.model()
    tokens = random_tokens(2, case.n)
    steps = "fixed" not in case.tags or case.method in ATTENTION
    for n in (5, 24, 25, 31) if steps else ():
        assert_close(model(tokens[:, :n]), reference.logits(model, tokens[:, :n]))
    maps = []
    assert_close(model(tokens), reference.logits(model, tokens, maps=maps))
    if case.method in ATTENTION or isinstance(model.scheme, RelativeVectors):
        with pytest.raises(UserError, match="has no map"):
            attention_maps(model, tokens)
        return
    for found, expected in zip(attention_maps(model, tokens), maps, strict=True):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.cases("formulas")
def test_loss_and_gradients_are_those_of_the_formulas(case):
    """In float64, with targets that do not count. Tables of cosines are float32."""
    model = case.model().double()
    tokens, targets = random_tokens(2, 2, 16)
    targets[0, :5] = -1
    loss = model(tokens, targets)
    loss.backward()
    expected, gradients = reference.loss_and_gradients(model, tokens, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        difference = (p.grad - gradients[name]).norm()
        assert difference <= 1e-5 * gradients[name].norm() + 1e-9, name


@pytest.mark.cases("scheme own")
def test_gradients_of_schemes_without_a_formula_are_differences(case):
    """In float64, of each parameter along its gradient."""
    model = case.model().double()
    tokens, targets = random_tokens(2, 2, 16)
    model(tokens, targets).backward()
    for name, p in model.named_parameters():
        direction, values = p.grad / p.grad.norm(), []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p += step * direction
                values.append(model(tokens, targets).item())
                p -= step * direction
        slope = (values[0] - values[1]) / 2e-5
        assert slope == pytest.approx(p.grad.norm().item(), rel=1e-3, abs=1e-7), name


@pytest.mark.cases("formulas gaps")
@torch.no_grad()
def test_position_ids_with_gaps_are_those_of_the_formulas(case):
    """A window counts tokens. Beyond 1 million float32 would be too rough."""
    model = case.model()
    tokens = random_tokens(1, 45)
    near = torch.tensor([0, 1, 2, 5, 6, 9, *range(12, 51)])
    for pos in (near, torch.arange(45) * 3 + 1_000_000):
        expected = reference.logits(model, tokens, pos)
        assert_close(model(tokens, positions=pos), expected, 2e-4)
        cache, parts = KVCache(), []
        for index in torch.arange(45).split((7, 30, 1, 7)):
            parts.append(model(tokens[:, index], positions=pos[index], cache=cache))
        assert_close(torch.cat(parts, 1), expected, 2e-4)


@pytest.mark.cases()
def test_gaps_that_a_scheme_would_ignore_are_refused(case):
    counts = case.scheme.counts_indices() or case.method in ATTENTION
    refused = pytest.raises(UserError, match="consecutive position ids, without gaps")
    with refused if counts else contextlib.nullcontext():
        case.model()(random_tokens(1, 3), positions=torch.tensor([0, 2, 3]))


# -----------------------------------------------------------------------------
# The same text in other ways.


@pytest.mark.cases()
@torch.no_grad()
def test_cached_in_any_parts_is_the_whole(case, rng):
    """Each part equals the end of all tokens up to there; of one token, and of several."""
    model = case.model()
    tokens = random_tokens(1, case.n)  # one row: it has a norm of its own
    cuts = sorted({1, 2, *rng.choice(range(3, case.n), 5), case.n})
    cache, start, versions = KVCache(int(rng.integers(2)) * case.n), 0, set()
    whole = model(tokens)
    for end in cuts:
        part = model(tokens[:, start:end], cache=cache)
        up_to_here = whole if "fixed" in case.tags else model(tokens[:, :end])
        assert_close(part, up_to_here[:, start:end], 1e-4)
        start = end
        versions.add(cache.version)
    assert len(versions) == 1 or "fixed" not in case.tags  # else the cache is filled again


@pytest.mark.cases("plain keys", also=["pi", "fixed self-extend", "fixed jet-long", "lm-infinite"])
@torch.no_grad()
def test_steps_of_fixed_shape_are_the_whole(case):
    """As they are compiled, run as they are."""
    model = case.model()
    tokens = random_tokens(2, case.n)
    cache = KVCache(case.n + 3)
    parts = [model(tokens[:, :-4], cache=cache)[:, -1:]]
    step = FixedShapeStep(model, cache)
    parts += [step.run(token)[:, None] for token in tokens[:, -4:].split(1, 1)]
    assert_close(torch.cat(parts, 1), model(tokens)[:, -5:], 1e-4)


@pytest.mark.cases("scheme", also=[*ATTENTION, "dynamic-ntk"])
@torch.no_grad()
def test_losses_in_chunks_are_those_of_the_whole(case, monkeypatch):
    """A text by whose length the tables change is not cut."""
    model = case.model()
    tokens, targets = random_tokens(2, 2, case.n)
    found = []
    for chunk in (4096, 16):
        monkeypatch.setattr(loss_protocols, "CHUNK", chunk)
        calls, hidden_states = [], GPT.hidden_states

        def recorded(self, tokens, *args, calls=calls, hidden_states=hidden_states):
            calls.append(tokens.shape[1])
            return hidden_states(self, tokens, *args)

        with monkeypatch.context() as patch:
            patch.setattr(GPT, "hidden_states", recorded)
            found.append(loss_protocols.token_losses(model, tokens, targets))
    assert len(calls) == math.ceil(case.n / 16) or "fixed" not in case.tags
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.cases("plain keys", also=["fixed self-extend", "lm-infinite"])
@torch.no_grad()
def test_packed_documents_are_documents_alone(case):
    """Positions count from 0 in each, also where a document goes on with a cache."""
    model = case.model()
    tokens = random_tokens(1, case.n)
    docs = torch.tensor([[0] * 9 + [1] * (case.n - 9)])
    # sinks are tokens of the text, which are not in the second document
    if model.config.sinks or case.method == "lm-infinite":
        with pytest.raises(UserError, match="sinks are the first tokens of the text"):
            model(tokens, docs=docs)
        return
    packed = model(tokens, docs=docs)
    cache = KVCache()
    parts = zip(tokens.split(7, 1), docs.split(7, 1), strict=True)
    parts = [model(part, docs=ids, cache=cache) for part, ids in parts]
    assert_close(torch.cat(parts, 1), packed, 1e-4)
    alone = [model(part) for part in tokens.split((9, case.n - 9), 1)]
    assert_close(packed, torch.cat(alone, 1))


@pytest.mark.cases("scheme", also=["extended"])
@torch.no_grad()
def test_greedy_text_is_that_of_the_plain_loop(case):
    """Each of several prompts is continued as if it were alone."""
    model = case.model()
    n = min(case.n, 26)  # tokens of a text, up to a step of the tables
    prompts = random_tokens(2, n - 4)
    texts = torch.cat(list(model.generate(prompts, 4, temperature=0)), 1)
    for prompt, text in zip(prompts, texts, strict=True):
        plain = torch.cat(list(model.generate_plainly(prompt[None], 4, temperature=0)), 1)
        assert torch.equal(text, plain[0])


@pytest.mark.cases("scheme", also=["extended"])
@torch.no_grad()
def test_a_checkpoint_loads_to_the_bit(case, tmp_path):
    model = case.model()
    model.save(tmp_path / "step-000001")
    tokens = random_tokens(1, case.n)
    loaded = GPT.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_learned_embeddings_are_interpolated_linearly(make, tmp_path):
    """A table that is extended again, after it was saved, goes on from there."""
    model = make(pos="learned")
    table = model.scheme.table.detach().double()
    model.extend("pi", 2.5)
    for row in range(60):
        low, part = divmod(row / 2.5, 1)
        low, high = min(int(low), 23), min(int(low) + 1, 23)
        expected = table[low] * (1 - part) + table[high] * part
        assert torch.allclose(model.scheme.table[row].double(), expected, atol=1e-6), row
    model.save(tmp_path / "step-000000")
    loaded = GPT.load(tmp_path)
    loaded.extend("pi", 2)
    assert loaded.scheme.table.shape == (120, 32) and loaded.scheme.table.requires_grad
    assert torch.allclose(loaded.scheme.table[::2], model.scheme.table, atol=1e-7)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"drope"}))
def test_factor_one_is_plain_rope_to_the_bit(method):
    inv_freq, attention_factor = METHODS[method](10000.0, 48, 333, 1.0)
    assert torch.equal(inv_freq, METHODS["none"](10000.0, 48, 333, 1.0)[0])
    assert attention_factor == 1.0


# -----------------------------------------------------------------------------
# Weights in bfloat16: the numbers of float32 weights under autocast, in half the memory.


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # a norm of bfloat16 queries, which is meant
@pytest.mark.cases("scheme", also=["bfloat16"])
@torch.no_grad()
def test_bfloat16_weights_compute_what_float32_ones_do_under_autocast(case, tmp_path):
    """To the bit, also where the caller does not use autocast; close to float32 products."""
    save_model(case.model(), tmp_path / "step-000001", dtype=torch.bfloat16)
    wide, narrow = GPT.load(tmp_path), GPT.load(tmp_path, dtype=None)
    assert narrow.blocks[0].attention.q.weight.dtype == torch.bfloat16
    tokens = random_tokens(2, 24)
    exact, exact_loss = wide(tokens), wide(tokens, tokens)
    results = []
    for model in (wide, narrow):
        with autocast(torch.device("cpu"), torch.bfloat16):
            cache = KVCache()
            parts = tokens.split((18, 1, 1, 1, 1, 1, 1), 1)
            decoded = torch.cat([model(part, cache=cache) for part in parts], 1)
            results.append((model(tokens), model(tokens, tokens), decoded))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    logits, loss, decoded = results[1]
    assert torch.equal(narrow(tokens), logits)
    assert narrow.hidden_states(tokens).dtype == loss.dtype == torch.float32
    for result in (logits, decoded):
        assert (result - exact).abs().max() < 0.03 * exact.abs().max()
    assert loss.item() == pytest.approx(exact_loss.item(), abs=0.01)


@pytest.mark.cases("content")
@torch.no_grad()
def test_autocast_rounds_nothing_that_is_summed_along_the_text(case):
    model = case.model()
    q, k, x = torch.randn(2, 6, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 24, 36)
    context = model.make_context(24)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            bias = model.scheme.bias(x, 1, context)
            results.append([*model.scheme.rotate(q, k, x, 1, context), q if bias is None else bias])
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)


@pytest.mark.cases("scheme")
def test_constants_keep_their_dtype_and_are_not_saved(case):
    """model.bfloat16() must not round frequencies, slopes or buckets."""
    model = case.model()
    constants = {name: x for name, x in vars(model.scheme).items() if torch.is_tensor(x)}
    has_none = case.pos in ("nope", "learned", "shaw", "kerple", "kerple-power", "fox")
    assert case.pos in cases.OF_FILES or bool(constants) != has_none
    model.bfloat16()
    for name, tensor in constants.items():
        assert getattr(model.scheme, name).dtype == tensor.dtype
        assert torch.equal(getattr(model.scheme, name), tensor)
    if case.pos not in ("alibi", "t5", *cases.OF_FILES):
        assert all(tensor.dtype == torch.float64 for tensor in constants.values())
    saved = {name for name in model.state_dict() if name.startswith("scheme.")}
    assert saved == {f"scheme.{name}" for name, _ in model.scheme.named_parameters()}
    assert model(torch.zeros(1, 5, dtype=torch.long)).dtype == torch.bfloat16
    model.to("meta")
    assert all(getattr(model.scheme, name).is_meta for name in constants)


# -----------------------------------------------------------------------------
# Memory: activation checkpointing, and attention in chunks of queries.


def loss_and_gradients(model, forward, tokens, checkpointing=False):
    """The loss of predicting the tokens themselves, and all gradients."""
    model.activation_checkpointing = checkpointing
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    loss = forward(tokens, tokens, reduction="sum")
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads]


@pytest.mark.cases("scheme")
def test_checkpointing_recomputes_blocks_and_keeps_every_bit(case):
    """With dropout; all is computed again in the backward pass, but fused attention."""
    model = case.model(qk_norm="head", dropout=0.2).train()
    tokens = random_tokens(2, 24)
    results, silus = [], []
    for checkpointing in (False, True):
        with Operators() as operators:
            results.append(loss_and_gradients(model, model, tokens, checkpointing))
        names = [name for name, _ in operators.calls if "backward" not in name]
        silus.append(sum("silu" in name for name in names))
        if case.pos in ("nope", "learned", "sinusoidal", "rope"):
            assert sum("dot_product" in name for name in names) == 2
    assert silus[1] == 2 * silus[0] >= 4  # at least one in each of two blocks
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def train_in_chunks(model, tokens, max_scores, monkeypatch):
    """The loss with all gradients, and the bytes that are kept for the backward pass."""
    monkeypatch.setattr(eager, "MAX_SCORES", max_scores)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}  # address -> size

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.zero_grad()
        loss = model(tokens, tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], sum(kept.values())


@pytest.mark.cases("chunked")
def test_attention_in_chunks_keeps_no_scores_for_the_backward_pass(case, monkeypatch):
    """It keeps as little as fused attention, whatever the number of queries at a time."""
    T = 160
    tokens = random_tokens(1, T)
    nope = cases.Case("nope").model(block_size=T)
    _, fused = train_in_chunks(nope, tokens, 1 << 24, monkeypatch)
    scores = 2 * T * T * 4  # bytes of float32 (T, T), one in each of two layers
    model = case.model(window=20, block_size=T)
    expected, _ = train_in_chunks(model, tokens, 1 << 24, monkeypatch)
    for checkpointing in (False, True):
        model.activation_checkpointing = checkpointing
        results, in_chunks = train_in_chunks(model, tokens, 4000, monkeypatch)
        assert in_chunks < fused + scores
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-5)


# -----------------------------------------------------------------------------
# Compiled, and on another device.


@pytest.mark.cases("steps", slow=["scheme keys"])
def test_compiled_steps_sample_the_same_tokens(case, compiled_graphs):
    model = case.model()
    prompts = random_tokens(2, case.n - 8)
    texts = [
        torch.cat(list(model.generate(prompts, 6, temperature=0, compiled=compiled)), 1)
        for compiled in (False, True)
    ]
    assert torch.equal(*texts)
    assert len(compiled_graphs) == 1


@pytest.mark.cases("compile", slow=["scheme", "traced"])
def test_the_compiled_model_is_one_graph_with_the_same_gradients(case):
    """With --all also of another length, for which it is traced again."""
    model = case.model().double()
    tokens = random_tokens(2, 24)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    results = [loss_and_gradients(model, forward, tokens) for forward in (model, compiled)]
    # norms are other operators there
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)
    if "compile" in case.tags:
        return
    shorter = tokens[:, :13]
    expected = model(shorter, shorter)
    torch.testing.assert_close(compiled(shorter, shorter), expected, rtol=1e-8, atol=0)


# A tensor on the meta device has no values, so reading one raises.
@torch.no_grad()  # with gradients, torch 2.11 keeps the state of random numbers, on the CPU
@pytest.mark.cases("scheme", also=("pi", "self-extend", "lm-infinite"))
def test_nothing_is_read_from_the_device_or_computed_elsewhere(case, monkeypatch):
    """What a GPU would wait for: default positions, those on the device, the scheme's tables."""
    importlib.import_module("torch._dynamo")  # it would keep what is set here
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # there is none of meta
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: contextlib.nullcontext())
    model = case.model(n_layer=len(case.settings.get("layer_pattern", "F"))).to("meta")
    tokens = torch.zeros(2, case.n, dtype=torch.long, device="meta")
    positions = torch.arange(tokens.shape[1]).to("meta")
    with Operators() as operators:
        assert model(tokens).is_meta
        assert model(tokens, positions=positions).is_meta
    assert all(x.is_meta for _, tensors in operators.calls for x in tensors if x.dim())
