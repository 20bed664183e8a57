"""The position probe, the shuffled prefix and the attention maps, against sums written out and models that are known to know, or not to know, where they are."""
import itertools
import json
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import data
import kernels
from config import UserError
from experiments import attention_maps, probe
from model import GPT, POSITIONS, Cache, GPTConfig, Refused


@pytest.fixture(autouse=True)
def one_thread():
    """These products are small: threads that share busy cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(text_data):
    return data.Dataset(text_data)


def test_guesses_against_brute_force():
    for n in (5, 64):
        pairs = [abs(i - j) for i, j in itertools.product(range(n), repeat=2)]
        assert probe.random_guess(n) == pytest.approx(sum(pairs) / n**2)
        assert probe.best_constant(n) == pytest.approx(min(sum(abs(guess - j) for j in range(n)) / n for guess in range(n)))
    assert probe.random_guess(1024) == pytest.approx(341.33, abs=0.01) and probe.best_constant(64) == 16  # Haviv et al.: about 340 before the first layer


def test_states_are_those_of_the_model(make):
    model, tokens = make(pos="learned"), torch.randint(0, 50, (3, 24))
    assert torch.equal(probe.states(model, tokens, 0), (model.embed(tokens) + model.pos.table).detach())  # with what the scheme adds
    assert torch.allclose(model.head(model.norm(probe.states(model, tokens, 2))), model(tokens), atol=1e-5)
    middle = probe.states(model, tokens, 1)
    assert torch.equal(middle, model.blocks[0](probe.states(model, tokens, 0), model.pos, torch.arange(24), None, None).detach())
    assert not model.norm._forward_pre_hooks and not model.blocks[0]._forward_pre_hooks


def test_the_probe_finds_positions_that_are_there_and_no_others(make, text):
    sizes = dict(windows=60, held_out=60, hidden=64, steps=150, seed=0)
    learned = make(pos="learned", vocab_size=257)  # its table is some three times as large as its embeddings
    rows = probe.probe(learned, text, "learned", **sizes)
    assert [row["layer"] for row in rows] == [0, 1, 2] and rows[0]["length"] == 24 and rows[0]["tokens"] == 60 * 24 and rows[0]["error"] < 0.1
    torch.manual_seed(0)
    nope = probe.probe(GPT(GPTConfig(pos="nope", n_layer=1, n_head=2, n_embd=32, block_size=24, vocab_size=257)), text, **sizes)
    for row in nope:  # untrained, a block adds nothing: tokens alone say little
        assert 0.6 * row["random_guess"] < row["error"] < 1.4 * row["random_guess"], row
    again = probe.probe(learned, text, "learned", **sizes)
    assert again == rows and json.dumps(rows)


def test_the_shuffled_prefix_keeps_the_rest():
    tokens, generator = torch.arange(5 * 32).view(5, 32), torch.Generator().manual_seed(0)
    mixed = probe.shuffle_prefix(tokens, 24, generator)
    assert torch.equal(mixed[:, 24:], tokens[:, 24:]) and torch.equal(mixed[:, :24].sort(1).values, tokens[:, :24]) and not (mixed[:, :24] == tokens[:, :24]).all(1).any()
    assert not torch.equal(mixed[0] + 32, mixed[1])  # each row in an order of its own
    kept = probe.shuffle_prefix(tokens, 32, generator, first=1)
    assert torch.equal(kept[:, 0], tokens[:, 0]) and torch.equal(kept.sort(1).values, tokens)


def test_shuffling_by_hand(make, text):
    """Losses in order against cross-entropies written out; a model whose blocks add nothing sees one token, and does not mind what stands before it."""
    model = make(pos="alibi", vocab_size=257)
    quarter, last = probe.shuffled(model, text, "alibi", windows=20, seed=3)
    x, y = probe.windows_of(text.val, 24, 20, 3)
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none").view_as(y)
    for row, start in ((quarter, 18), (last, 23)):
        assert row["intact"] == pytest.approx((losses[:, start:].sum() / (y[:, start:] >= 0).sum()).item(), rel=1e-5) and row["tokens"] == (y[:, start:] >= 0).sum()
    assert (quarter["scored"], last["scored"]) == ("last quarter", "last token") and quarter["raised"] != 0 and math.isfinite(last["interval"]) and json.dumps([quarter, last])
    blind = probe.shuffled(GPT(GPTConfig(pos="nope", n_layer=1, n_head=2, n_embd=32, block_size=24, vocab_size=257)), text, windows=20)
    assert blind[0]["raised"] == pytest.approx(0, abs=1e-6)
    read = []
    model.register_forward_pre_hook(lambda module, given: read.append(given[0]))
    probe.shuffled(model, text, windows=20, seed=3)
    assert len(read) == 4 and all((tokens[:, 0] == 256).all() for tokens in read) and torch.equal(read[1][:, 18:], x[:, 18:]) and not torch.equal(read[1], x)  # <bos> stays first
    with pytest.raises(Refused, match="no vector"):
        probe.shuffled(make(pos="learned", vocab_size=257), text, length=48)
    with pytest.raises(UserError, match="too few"):
        probe.probe(model, text, length=10**7)
    with pytest.raises(UserError, match="--lengths=4"):
        probe.shuffled(model, text, length=3)


@pytest.mark.filterwarnings("ignore::model.PastTrainedLength")
@pytest.mark.parametrize("settings", [*({"pos": pos} for pos in POSITIONS), {"pos": "shaw", "n_kv_head": 2}, {"pos": "alibi", "window": 7, "sinks": 2, "nope_every": 2},
                                      {"pos": "rope", "n_kv_head": 1, "qk_norm": True, "attn_scale": 1.5, "window": 5}], ids=lambda s: " ".join(map(str, s.values())))
def test_captured_attention_is_the_models(settings, make):
    """Of every scheme: the same logits, to 1e-4, while the maps are recorded; beyond the trained length, with documents, and of cached decoding too."""
    model, tokens, plain = make(**settings), torch.randint(0, 50, (2, 23)), kernels.attention
    cases = [(tokens, {})] + ([] if settings["pos"] == "learned" else [(torch.randint(0, 50, (2, 40)), {})])
    cases.append((tokens, {"docs": (torch.arange(23) >= 9).long().expand(2, 23), "positions": torch.arange(23)}))
    for x, options in cases:
        with torch.no_grad(), attention_maps.captured() as maps:
            got = model(x, **options)
        assert kernels.attention is plain and (got - model(x, **options)).abs().max() < 1e-4
        assert len(maps) == 2 and all(p.shape == (2, 4, x.shape[1], x.shape[1]) and p.dtype == torch.float32 for p in maps)
        assert all((p.sum(-1) - 1).abs().max() < 1e-5 and not p.triu(1).any() for p in maps)
    with torch.no_grad(), attention_maps.captured() as maps:
        cache = Cache()
        parts = torch.cat([model(part, cache=cache) for part in tokens.split([15, 7, 1], 1)], 1)
    assert (parts - model(tokens)).abs().max() < 1e-4 and maps[-1].shape == (2, 4, 1, 23)


@pytest.mark.parametrize("case", [dict(), dict(bias="slopes"), dict(bias=6), dict(relative=5), dict(relative=40, causal=False), dict(window=4, sinks=1, positions=True, Tq=5), dict(docs=True, causal=False, bias=6)],
                         ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()) or "plain")
def test_probabilities_against_the_reference(case):
    """kernels.reference.attention of unit vectors as values returns the probabilities themselves."""
    torch.manual_seed(0)
    B, H, T, Tq = 2, 4, 13, case.get("Tq", 13)
    q, k, v = torch.randn(B, H, Tq, T), torch.randn(B, 2, T, T), torch.eye(T).expand(B, 2, T, T)
    m = case.get("relative")
    options = dict(bias=None if "bias" not in case else torch.rand(H) if case["bias"] == "slopes" else torch.randn(H, case["bias"]), causal=case.get("causal", True), scale=0.3,
                   relative=m and (torch.randn(1, m, T), None, (torch.randn(H, T), torch.randn(H, T))), window=case.get("window", 0), sinks=case.get("sinks", 0),
                   positions=torch.arange(0, 2 * T, 2) if case.get("positions") else None, docs=(torch.arange(T) > 6).long().expand(B, T) if case.get("docs") else None)
    y, p = attention_maps.dense(q, k, v, **options)
    want = kernels.reference.attention(q, k, v, **options)
    assert (p - want).abs().max() < 1e-5 and (y - want).abs().max() < 1e-5


def test_distance_of_a_pattern_by_hand():
    """Four tokens: query 1 looks at itself, query 2 half at itself and half at token 0, query 3 all at token 1. Query 0 does not count."""
    p = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 1, 0, 0]])[None, None]
    distance, normalised, histogram = attention_maps.attended(p, 4)
    assert distance.tolist() == [(0 + 1 + 2) / 3]
    assert normalised.tolist() == [pytest.approx((1 / 2 + (1 / 3 + 1) / 2 + 3 / 4) / 3)]  # (t - n + 1) / t, from 1: (2, 2), then (3, 3) and (3, 1), then (4, 2)
    assert histogram.tolist() == [pytest.approx([0, (1 + 0.5) / 3, 1 / 3, 0.5 / 3])]  # 1/2 and 1/3 lie in the second quarter, 3/4 closes the third
    p, exact = torch.rand(1, 2, 31, 31).tril(), torch.zeros(2, 10, dtype=torch.float64)
    for i, j in zip(*map(torch.Tensor.tolist, torch.tril_indices(31, 31)[:, 1:])):
        exact[:, math.ceil(Fraction(10 * (i - j + 1), i + 1)) - 1] += p[0, :, i, j].double() / 30
    assert torch.allclose(attention_maps.attended(p)[2], exact)
    assert attention_maps.even(101)["distance"] == pytest.approx(sum(i / 2 for i in range(1, 101)) / 100) and sum(attention_maps.even(101)["histogram"]) == pytest.approx(1)


def test_slopes(make, text):
    """A slope alone reaches about 1/m: 1 / (e^m - 1) in a window without end; where queries are zero, nothing else is there to measure."""
    far = attention_maps.by_slope(torch.tensor([0.25, 0.05]), 400)[0, :, -1] @ (399 - torch.arange(400.0))
    assert far.tolist() == [pytest.approx(1 / math.expm1(0.25), rel=1e-4), pytest.approx(1 / math.expm1(0.05), rel=1e-4)]
    model = make(pos="alibi", vocab_size=257, n_layer=3, window=9, window_layers=[0], nope_every=2)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.zero_()
    rows = attention_maps.distances(model, text, "alibi", windows=2)
    assert len(rows) == 12 and json.dumps(rows) and rows[3]["slope_alone"] < 4 < rows[11]["slope_alone"]
    for row in rows[:4] + rows[8:]:
        assert row["distance"] == pytest.approx(row["slope_alone"], rel=1e-4) and row["range"] == pytest.approx(1 / row["slope"]) and row["slope"] == pytest.approx(2 ** (-2 * (row["head"] + 1)))
    for row in rows[4:8]:  # this block has no scheme and no window
        assert "slope" not in row and row["distance"] == pytest.approx(attention_maps.even(24)["distance"], rel=1e-4) and row["histogram"] == pytest.approx(attention_maps.even(24)["histogram"], abs=1e-5)


def test_divergence(make, text):
    """In nats: 0 of the same, ln 2 of disjoint probabilities; of two models the closest heads count, so an order of heads does not."""
    p = torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5], [1, 0, 0], [1, 0, 0]])
    q = torch.tensor([[0.0, 0.4, 0.6], [0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0]])
    by_hand = -0.75 * math.log(0.75) - 0.25 * math.log(0.25) - math.log(2) / 2
    assert attention_maps.divergence(p, q).tolist() == pytest.approx([math.log(2), 0, 0, by_hand], abs=1e-6)
    a, b = torch.rand(1, 3, 6, 6).tril(), torch.rand(1, 3, 6, 6).tril()
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    found = attention_maps.between([a, a], [b, a[:, [2, 0, 1]]])
    assert found.shape == (2, 3, 3) and found[0].min() > 0.001 and found[1].flatten().sort().values[:3].abs().max() < 1e-6 and found[1, 0, 1] < 1e-6
    want = sum(attention_maps.divergence(a[0, 1, i], b[0, 2, i]).item() for i in range(1, 6)) / 5
    assert found[0, 1, 2].item() == pytest.approx(want, rel=1e-5)
    model, other = make(vocab_size=257), make(seed=1, vocab_size=257)
    rows = attention_maps.divergences({"one": (model, text), "same": (model, text), "other": (other, text), "deep": (make(n_layer=3, vocab_size=257), text)}, windows=2)
    one = {(row["checkpoint"], row["with"]): row for row in rows}
    assert one["one", "same"]["divergence"] == pytest.approx(0, abs=1e-6) and 0.001 < one["one", "other"]["divergence"] < math.log(2) and len(one["one", "other"]["layers"]) == 2
    windows = probe.windows_of(text.val, 24, 2, 1337)[0].split(1)
    pairs = torch.stack([attention_maps.between(attention_maps.maps_of(model, x), attention_maps.maps_of(other, x)) for x in windows]).mean(0)
    assert one["one", "other"]["layers"] == pytest.approx(pairs.flatten(1).amin(1).tolist(), rel=1e-4)
    assert "3" in one["one", "deep"]["refused"] and len(rows) == 6 and json.dumps(rows)


def test_from_the_command_line(make, text_data, call, tmp_path):
    """Several checkpoints in one table; a cell that cannot be says so, and the rest is there."""
    for pos in ("nope", "learned", "alibi"):
        make(pos=pos, vocab_size=257).save(tmp_path / pos / "step-000001", dataset=str(text_data), bos=256)
    paths = [tmp_path / "nope", f"table={tmp_path}/learned", tmp_path / "alibi"]
    for script, words in (("probe", ["--windows=8", "--held_out=4", "--hidden=8", "--steps=3"]), ("attention_maps", ["--windows=2", "--bins=4"])):
        done = call(f"experiments/{script}.py", *paths, "--lengths=24,32", *words, "--device=cpu", f"--plot={tmp_path}/{script}.png", f"--json={tmp_path}/deep/{script}.json")
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert "refused: table at 32: --pos=learned" in done.stdout and "alibi" in done.stdout and "commit" in done.stdout
        rows = json.loads((tmp_path / "deep" / f"{script}.json").read_text())
        assert {row["length"] for row in rows} == {24, 32} and len([row for row in rows if "refused" in row]) == 1 and (tmp_path / f"{script}.png").read_bytes()[:4] == b"\x89PNG"
        for wrong, say in (([], "run folder"), ([paths[0], paths[0]], "same name"), ([paths[0], "--lengths=1"], "at least"), ([paths[0], "--plot=x.jpg"], ".png"), ([tmp_path / "gone"], "gone")):
            done = call(f"experiments/{script}.py", *wrong, "--device=cpu", cwd=tmp_path)
            assert done.returncode == 2 and say in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert "1/m" in call("experiments/attention_maps.py", paths[2], "--windows=1", "--device=cpu").stdout
