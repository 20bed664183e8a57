"""The position probe, the shuffled prefix and the attention maps.

Compared with sums written out, and with models that are known to know, or not to know, positions.
"""

import itertools
import json
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import data
import kernels
from examples.schemes.linear_attention import LinearAttention
from experiments import attention_maps, probe
from model import GPT, POSITIONS, GPTConfig, NoPE
from nanolong.attention_maps import dense_attention, record_attention
from nanolong.errors import UserError
from nanolong.inference import KVCache
from nanolong.run.checkpoint import save_model

NOPE = {"pos": "nope", "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 24}


@pytest.fixture(autouse=True)
def one_thread():
    """The products are small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(text_data):
    return data.Dataset(text_data)


def make_untrained():
    """A NoPE model as it is initialised: its block adds nothing, so that it knows one token."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**NOPE, vocab_size=257))


# -----------------------------------------------------------------------------
# The position probe.


@pytest.mark.parametrize("n", [5, 64])
def test_errors_of_guessing_are_those_of_brute_force(n):
    pairs = [abs(i - j) for i, j in itertools.product(range(n), repeat=2)]
    assert probe.random_guess(n) == pytest.approx(sum(pairs) / n**2)
    constants = [sum(abs(guess - j) for j in range(n)) / n for guess in range(n)]
    assert probe.best_constant(n) == pytest.approx(min(constants))


def test_hidden_states_are_those_of_the_model(make):
    model = make(pos="learned")
    tokens = torch.randint(0, 50, (3, 24))
    first, middle, last = (probe.hidden_states(model, tokens, layer) for layer in range(3))
    assert torch.equal(first, (model.embed(tokens) + model.pos.table).detach())
    pos = torch.arange(24)
    mask = {"docs": None, "positions": None}
    assert torch.equal(middle, model.blocks[0](first, model.pos, pos, None, mask).detach())
    assert torch.allclose(model.head(model.norm(last)), model(tokens), atol=1e-5)
    # no hook is left
    assert not model.norm._forward_pre_hooks and not model.blocks[0]._forward_pre_hooks


def test_probe_finds_positions_where_they_are(make, text):
    sizes = {"windows": 60, "held_out": 60, "hidden": 64, "steps": 150, "seed": 0}
    # its position table is about three times as large as its embeddings
    model = make(pos="learned", vocab_size=257)
    records = probe.probe(model, text, "learned", **sizes)
    assert [record["layer"] for record in records] == [0, 1, 2]
    assert records[0]["length"] == 24 and records[0]["tokens"] == 60 * 24
    assert records[0]["error"] < 0.1
    assert json.dumps(records)


def test_probe_is_deterministic(make, text):
    model = make(vocab_size=257)
    sizes = {"windows": 8, "held_out": 4, "hidden": 8, "steps": 5}
    records = [probe.probe(model, text, **sizes) for _ in range(2)]
    assert records[0] == records[1]


def test_probe_finds_no_positions_where_there_are_none(text):
    """Tokens alone say little about their positions."""
    records = probe.probe(make_untrained(), text, windows=60, held_out=60, hidden=64, steps=150)
    for record in records:
        assert 0.6 * record["random_guess"] < record["error"] < 1.4 * record["random_guess"]


def test_a_probe_of_a_short_text_is_rejected(make, text):
    with pytest.raises(UserError, match="too few"):
        probe.probe(make(pos="alibi", vocab_size=257), text, length=10**7)


# -----------------------------------------------------------------------------
# The shuffled prefix.


def test_shuffling_a_prefix_keeps_the_rest():
    tokens = torch.arange(5 * 32).view(5, 32)
    generator = torch.Generator().manual_seed(0)
    mixed = probe.shuffle_prefix(tokens, 24, generator)
    assert torch.equal(mixed[:, 24:], tokens[:, 24:])
    assert torch.equal(mixed[:, :24].sort(1).values, tokens[:, :24])
    assert not (mixed[:, :24] == tokens[:, :24]).all(1).any()
    # each row has its own order
    assert not torch.equal(mixed[0] + 32, mixed[1])

    mixed = probe.shuffle_prefix(tokens, 32, generator, start=1)
    assert torch.equal(mixed[:, 0], tokens[:, 0])
    assert torch.equal(mixed.sort(1).values, tokens)


def test_shuffled_prefix_losses_are_cross_entropies(make, text):
    model = make(pos="alibi", vocab_size=257)
    records = probe.shuffled_prefix(model, text, "alibi", windows=20, seed=3)
    assert [record["scored"] for record in records] == ["last quarter", "last token"]
    x, y = probe.sample_sequences(text.val, 24, 20, 3)
    logits = model(x).flatten(0, 1)
    losses = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="none").view_as(y)
    for record, start in zip(records, (18, 23), strict=True):
        n = (y[:, start:] >= 0).sum()
        assert record["tokens"] == n
        assert record["intact"] == pytest.approx((losses[:, start:].sum() / n).item(), rel=1e-5)
        assert record["raised"] != 0 and math.isfinite(record["interval"])
    assert json.dumps(records)


def test_a_model_that_sees_one_token_loses_nothing_by_shuffling(text):
    records = probe.shuffled_prefix(make_untrained(), text, windows=20)
    assert records[0]["raised"] == pytest.approx(0, abs=1e-6)


def test_shuffling_keeps_bos_first_and_the_scored_tokens(make, text):
    model = make(pos="alibi", vocab_size=257)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    probe.shuffled_prefix(model, text, windows=20, seed=3)
    x, _ = probe.sample_sequences(text.val, 24, 20, 3)
    assert len(seen) == 4
    assert all((tokens[:, 0] == 256).all() for tokens in seen)
    assert torch.equal(seen[1][:, 18:], x[:, 18:]) and not torch.equal(seen[1], x)


def test_lengths_that_cannot_be_measured_are_rejected(make, text):
    with pytest.raises(UserError, match="no embedding"):
        probe.shuffled_prefix(make(pos="learned", vocab_size=257), text, length=48)
    with pytest.raises(UserError, match="--lengths=4"):
        probe.shuffled_prefix(make(vocab_size=257), text, length=3)


# -----------------------------------------------------------------------------
# Attention maps.

SETTINGS = [
    *({"pos": pos} for pos in POSITIONS),
    {"pos": "shaw", "n_kv_head": 2},
    {"pos": "alibi", "window": 7, "sinks": 2, "layer_pattern": "WN"},
    {"pos": "rope", "n_kv_head": 1, "qk_norm": True, "attn_scale": 1.5, "window": 5},
]


def name_settings(settings):
    return " ".join(map(str, settings.values()))


@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize("settings", SETTINGS, ids=name_settings)
@torch.no_grad()
def test_recording_attention_does_not_change_the_logits(settings, make):
    """Within the context length and beyond it, and with documents."""
    model = make(**settings)
    tokens = torch.randint(0, 50, (2, 23))
    docs = (torch.arange(23) >= 9).long().expand(2, 23)
    cases = [(tokens, {}), (tokens, {"docs": docs, "positions": torch.arange(23)})]
    if settings["pos"] != "learned":
        cases.append((torch.randint(0, 50, (2, 40)), {}))
    original = kernels.attention
    for x, options in cases:
        with record_attention() as maps:
            logits = model(x, **options)
        assert kernels.attention is original
        assert (logits - model(x, **options)).abs().max() < 1e-4
        assert len(maps) == 2
        for p in maps:
            assert p.shape == (2, 4, x.shape[1], x.shape[1]) and p.dtype == torch.float32
            assert (p.sum(-1) - 1).abs().max() < 1e-5 and not p.triu(1).any()


@pytest.mark.parametrize("settings", SETTINGS, ids=name_settings)
@torch.no_grad()
def test_recording_attention_works_with_a_cache(settings, make):
    model = make(**settings)
    tokens = torch.randint(0, 50, (2, 23))
    cache = KVCache()
    with record_attention() as maps:
        parts = [model(part, cache=cache) for part in tokens.split([15, 7, 1], 1)]
    assert (torch.cat(parts, 1) - model(tokens)).abs().max() < 1e-4
    assert maps[-1].shape == (2, 4, 1, 23)


@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_attention_that_is_merged_from_parts_has_no_map(method, make):
    model = make(pos="rope").train()
    model.extend(method, 2)
    with pytest.raises(UserError, match=f"--pos=rope, {method}, is not one softmax over the keys"):
        attention_maps.attention_maps(model, torch.randint(0, 50, (1, 40)))
    assert model.training


def test_attention_without_softmax_has_no_map(make, monkeypatch):
    class Copy(NoPE):
        def attend(self, q, k, v, pos, layer, cache, **mask):
            return v

    monkeypatch.setitem(POSITIONS, "copy", Copy)
    with pytest.raises(UserError, match="attention with --pos=copy is not one softmax"):
        attention_maps.attention_maps(make(pos="copy"), torch.randint(0, 50, (1, 9)))


def score_terms(H, T):
    """Arguments of attention over T tokens with head dimension T, by name."""
    torch.manual_seed(0)
    offsets = (torch.randn(H, T), torch.randn(H, T))
    return {
        "plain": {},
        "slopes": {"bias": torch.rand(H)},
        "table": {"bias": torch.randn(H, 6)},
        "relative": {"relative": (torch.randn(1, 5, T), None, offsets)},
        "not causal": {"relative": (torch.randn(1, 40, T), None, offsets), "causal": False},
        "window": {"window": 4, "sinks": 1, "positions": torch.arange(0, 2 * T, 2)},
        "documents": {
            "docs": (torch.arange(T) > 6).long().expand(2, T),
            "causal": False,
            "bias": torch.randn(H, 6),
        },
    }


@pytest.mark.parametrize("name", score_terms(1, 1))
def test_probabilities_are_those_of_the_reference(name):
    """With unit vectors as values, kernels.eager.attention returns the probabilities."""
    H, T = 4, 13
    n_queries = 5 if name == "window" else T
    options = {**score_terms(H, T)[name], "scale": 0.3}
    q = torch.randn(2, H, n_queries, T)
    k = torch.randn(2, 2, T, T)
    v = torch.eye(T).expand(2, 2, T, T)
    y, p = dense_attention(q, k, v, **options)
    expected = kernels.eager.attention(q, k, v, **options)
    assert (p - expected).abs().max() < 1e-5 and (y - expected).abs().max() < 1e-5


def test_distances_of_a_known_pattern():
    """Query 1 attends to itself, 2 to itself and token 0, 3 to token 1; query 0 is left out."""
    p = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 1, 0, 0]])
    distance, normalised, histogram = attention_maps.summarise(p[None, None], 4)
    assert distance.tolist() == [(0 + 1 + 2) / 3]
    # (t - n + 1) / t, counted from 1, of (t, n): (2, 2); (3, 3) and (3, 1); (4, 2)
    expected = (1 / 2 + (1 / 3 + 1) / 2 + 3 / 4) / 3
    assert normalised.tolist() == [pytest.approx(expected)]
    # 1/2 and 1/3 are in the second quarter, 3/4 at the end of the third
    expected = [0, (1 + 0.5) / 3, 1 / 3, 0.5 / 3]
    assert histogram.tolist() == [pytest.approx(expected)]


def test_histogram_bins_are_exact():
    n, n_bins = 31, 10
    p = torch.rand(1, 2, n, n).tril()
    expected = torch.zeros(2, n_bins, dtype=torch.float64)
    for i in range(1, n):
        for j in range(i + 1):
            index = math.ceil(Fraction(n_bins * (i - j + 1), i + 1)) - 1
            expected[:, index] += p[0, :, i, j].double() / (n - 1)
    assert torch.allclose(attention_maps.summarise(p, n_bins)[2], expected)


def test_a_slope_alone_has_about_the_range_one_over_m():
    """1 / (e^m - 1) without an end of the sequence."""
    p = attention_maps.slope_attention(torch.tensor([0.25, 0.05]), 400)[0, :, -1]
    distance = p @ (399 - torch.arange(400.0))
    expected = [1 / math.expm1(0.25), 1 / math.expm1(0.05)]
    assert distance.tolist() == pytest.approx(expected, rel=1e-4)


def test_distances_of_heads_with_slopes_only(make, text):
    """Where queries are zero, the slopes are all there is; a layer without positions is uniform."""
    model = make(pos="alibi", vocab_size=257, n_layer=3, window=9, layer_pattern="WNF")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.zero_()
    records = attention_maps.distances(model, text, "alibi", windows=2)
    assert len(records) == 12 and json.dumps(records)
    windowed, no_positions, full = records[:4], records[4:8], records[8:]
    for record in windowed + full:
        slope = 2 ** (-2 * (record["head"] + 1))
        assert record["slope"] == pytest.approx(slope)
        assert record["range"] == pytest.approx(1 / slope)
        assert record["distance"] == pytest.approx(record["slope_alone"], rel=1e-4)
    assert windowed[3]["slope_alone"] < 4 < full[3]["slope_alone"]
    uniform = attention_maps.uniform(24)
    for record in no_positions:
        assert "slope" not in record
        assert record["distance"] == pytest.approx(uniform["distance"], rel=1e-4)
        assert record["histogram"] == pytest.approx(uniform["histogram"], abs=1e-5)


def test_jensen_shannon_divergence():
    """In nats: 0 of equal probabilities, ln 2 of disjoint ones."""
    p = torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5], [1, 0, 0], [1, 0, 0]])
    q = torch.tensor([[0.0, 0.4, 0.6], [0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0]])
    last = -0.75 * math.log(0.75) - 0.25 * math.log(0.25) - math.log(2) / 2
    found = attention_maps.jensen_shannon(p, q).tolist()
    assert found == pytest.approx([math.log(2), 0, 0, last], abs=1e-6)


def test_head_divergences_compare_all_pairs():
    a = torch.rand(1, 3, 6, 6).tril()
    b = torch.rand(1, 3, 6, 6).tril()
    a = a / a.sum(-1, keepdim=True)
    b = b / b.sum(-1, keepdim=True)
    order = [2, 0, 1]
    found = attention_maps.head_divergences([a, a], [b, a[:, order]])
    assert found.shape == (2, 3, 3) and found[0].min() > 0.001
    expected = attention_maps.jensen_shannon(a[0, 1, 1:], b[0, 2, 1:]).mean()
    assert found[0, 1, 2].item() == pytest.approx(expected.item(), rel=1e-5)
    # of the reordered heads, each has one that is equal
    for other, head in enumerate(order):
        assert found[1, head, other] < 1e-6


def test_divergences_of_checkpoints(make, text):
    """The closest heads of each layer count, averaged over sequences."""
    model = make(vocab_size=257)
    other = make(seed=1, vocab_size=257)
    deep = make(n_layer=3, vocab_size=257)
    loaded = {"one": model, "same": model, "other": other, "deep": deep}
    loaded = {name: (model, text) for name, model in loaded.items()}
    records = attention_maps.divergences(loaded, windows=2)
    assert len(records) == 6 and json.dumps(records)
    pairs = {(record["checkpoint"], record["with"]): record for record in records}
    assert pairs["one", "same"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert "compare checkpoints of the same depth" in pairs["one", "deep"]["refused"]

    record = pairs["one", "other"]
    assert 0.001 < record["divergence"] < math.log(2)
    expected = []
    for x in probe.sample_sequences(text.val, 24, 2, 1337)[0].split(1):
        maps = [attention_maps.attention_maps(m, x) for m in (model, other)]
        expected.append(attention_maps.head_divergences(*maps))
    expected = torch.stack(expected).mean(0).flatten(1).amin(1)
    assert record["layers"] == pytest.approx(expected.tolist(), rel=1e-4)


# -----------------------------------------------------------------------------
# The command line.

SCRIPTS = {
    "probe": ["--windows=8", "--held_out=4", "--hidden=8", "--steps=3"],
    "attention_maps": ["--windows=2", "--bins=4"],
}


@pytest.fixture
def runs(make, text_data, tmp_path):
    """A run folder for each of three schemes."""
    for pos in ("nope", "learned", "alibi"):
        model = make(pos=pos, vocab_size=257)
        folder = tmp_path / pos / "step-000001"
        save_model(model, folder, dataset=str(text_data), bos=256)
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cell_that_cannot_be_measured_has_the_reason(script, runs, call):
    paths = [runs / "nope", f"table={runs}/learned", runs / "alibi"]
    plot = runs / f"{script}.png"
    json_file = runs / "deep" / f"{script}.json"
    output = [f"--plot={plot}", f"--json={json_file}", "--device=cpu"]
    done = call(f"experiments/{script}.py", *paths, "--lengths=24,32", *SCRIPTS[script], *output)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "refused: table at 32: --pos=learned" in done.stdout
    assert "alibi" in done.stdout and "commit" in done.stdout
    assert ("1/m" in done.stdout) == (script == "attention_maps")  # ALiBi's slopes
    records = json.loads(json_file.read_text())
    assert {record["length"] for record in records} == {24, 32}
    assert len([record for record in records if "refused" in record]) == 1
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_attention_without_a_map_is_refused_and_the_rest_measured(make, text_data, call, tmp_path):
    """Two methods merge attention over two sets of keys; linear attention has no probabilities."""
    for name in ("plain", "lm-infinite", "self-extend"):
        model = make(pos="rope", vocab_size=257)
        if name != "plain":
            model.extend(name, 2)
        save_model(model, tmp_path / name / "step-000001", dataset=str(text_data), bos=256)
    POSITIONS["linear"] = LinearAttention
    try:
        linear = make(pos="linear", vocab_size=257)
        save_model(linear, tmp_path / "linear" / "step-000001", dataset=str(text_data), bos=256)
        names = ("plain", "lm-infinite", "self-extend", "linear")
        paths = [f"{name}={tmp_path / name}" for name in names]
        words = ["--windows=2", "--device=cpu", f"--plot={tmp_path}/a.png"]
        done = call("experiments/attention_maps.py", *paths, *words)
    finally:
        del POSITIONS["linear"]
    assert done.returncode == 0 and not done.stderr, done.stderr
    for name in ("lm-infinite", "self-extend"):
        reason = f"attention with --pos=rope, {name}, is not one"
        assert f"refused: {name} at 24: {reason}" in done.stdout
    assert "refused: linear at 24: attention with --pos=linear is not one" in done.stdout
    assert "plain, tokens (normalised) of each head" in done.stdout
    only = [tmp_path / "lm-infinite", "--windows=2", "--device=cpu", f"--plot={tmp_path}/b.png"]
    assert call("experiments/attention_maps.py", *only).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "words, message",
    [
        ([], "run folder"),
        (["nope", "nope"], "same name"),
        (["nope", "--lengths=1"], "at least"),
        (["nope", "--plot=x.jpg"], ".png"),
        (["gone"], "gone"),
    ],
)
def test_bad_settings_are_rejected(script, words, message, runs, call):
    done = call(f"experiments/{script}.py", *words, "--device=cpu", cwd=runs)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
