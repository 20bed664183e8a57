"""The protocols against sums written out window by window."""
import json

import numpy as np
import pytest
import torch

import data
import evaluate
from config import UserError


def split(tmp_path, n=1000, bos=None, files=1):
    rng = np.random.default_rng(0)
    for i in range(files):
        data.write_tokens(tmp_path / f"{i}.bin", rng.integers(0, 49, n - 10 * i), 50)
    return data.Split([tmp_path / f"{i}.bin" for i in range(files)], 50, bos)


@pytest.mark.parametrize("bos", [None, 49])
@pytest.mark.parametrize("length,max_tokens", [(16, 400), (24, 400), (64, 1000), (400, 400), (1, 50), (999, 5000)])
def test_every_target_of_the_span_is_scored_once(length, max_tokens, bos, make, tmp_path):
    """Windows that do not divide the span overlap at the end, and only the rest is scored; the same targets at every length."""
    model, s = make(pos="alibi"), split(tmp_path, bos=bos, files=2)
    nats, tokens = evaluate.loss_by_position(model, s, length, max_tokens)
    span, stream = min(max_tokens, 1000 - (bos is None)), np.asarray(s.tokens[0], np.int64)
    want, count, at = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64), 0
    shift = 0 if bos is not None else 1
    while at < span:
        start = min(at, span - length)
        y = stream[start + shift:start + shift + length]
        x = np.concatenate(([bos], y[:-1])) if bos is not None else stream[start:start + length]
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(x)[None])[0], torch.tensor(y), reduction="none").detach().double()
        new = torch.arange(length) >= at - start
        want, count, at = want + loss * new, count + new, start + length
    assert torch.equal(tokens, count) and int(tokens.sum()) == span
    assert torch.allclose(nats, want, rtol=1e-4, atol=1e-3)


def test_needles(make, text_data, tmp_path):
    """A model that knows the answer finds all, one that guesses none; the same prompts for all models; refusals fill their cells; both maps are drawn."""
    class Oracle(torch.nn.Module):
        """Logits that point at what followed the first 'key '."""
        def __init__(self, wrong=0):
            super().__init__()
            self.weight, self.wrong, self.seen = torch.nn.Parameter(torch.zeros(1)), wrong, []

        def draw_positions(self, *_):
            return None

        def hidden(self, x, positions):
            self.seen.append(x)
            out = torch.zeros(*x.shape, 257)
            for row, logits in zip(x, out):
                text = bytes(t for t in row.tolist() if t < 256)
                digits = text[text.index(b"key ") + 4:][:3]
                for i, d in enumerate(digits):
                    logits[len(row) - 3 + i, d + (i < self.wrong)] = 9.0
            return out

        def head(self, x):
            return x

    oracle = Oracle()
    for length in (30, 64, 129):
        for depth in (0.0, 0.4, 1.0):
            found, nats = evaluate.find_needle(oracle, data.Bytes(), length, depth, 20, 3, 256)
            assert found == 1.0 and nats < 0.1
    assert evaluate.find_needle(Oracle(wrong=1), data.Bytes(), 64, 0.5, 20)[0] == 0.0  # one digit in three is not enough
    again = Oracle()
    evaluate.find_needle(again, data.Bytes(), 30, 0.0, 20, 3, 256)
    assert torch.equal(again.seen[0], oracle.seen[0])
    models = {name: make(pos=name, vocab_size=257) for name in ("rope", "learned")}
    for model in models.values():
        model.meta = {"tokenizer": data.Bytes().to_json(), "bos": 256}
    cfg = evaluate.EvaluateConfig(task="needle", depths=3, trials=5, device="cpu", dtype="float32")
    rows = evaluate.needles(models, cfg, (24, 60))
    assert len(rows) == 2 * 2 * 4 and [("refused" in row) for row in rows if row["checkpoint"] == "learned"] == [False] * 4 + [True] * 4
    assert all(row["accuracy"] == 0 and row["nll"] > 1 for row in rows if "refused" not in row) and json.dumps(rows) and {row["depth"] for row in rows} == {0, 0.5, 1, None}
    text = evaluate.heatmaps(rows, (24, 60))
    assert "no key" in text and "refused: learned at 60" in text and "0.50" in text
    evaluate.wall(rows, (24, 60), str(tmp_path / "wall.png"), "note")
    assert (tmp_path / "wall.png").read_bytes()[:4] == b"\x89PNG"


def test_the_scale_is_fitted(make, text_data):
    """The best of 17 factors by the loss on training text, each as if the model had that attn_scale."""
    model = make(pos="nope", vocab_size=257)
    split = data.Dataset(text_data).train
    best, losses = evaluate.fit_scale(model, split, 2000)
    assert len(losses) == 17 and losses[best] == min(losses.values()) and 1.0 in losses and model.pos.score_scale == 1.0
    model.config.attn_scale = 2 ** 0.5
    nats, tokens = evaluate.loss_by_position(model, split, 24, 2000)
    assert losses[2 ** 0.5] == pytest.approx(float(nats[18:].sum() / tokens[18:].sum()), rel=1e-6)


def test_rows(tmp_path):
    nats, tokens = torch.arange(10, dtype=torch.float64), torch.tensor([1.0] * 9 + [0.0])
    rows = evaluate.rows_of("x", nats, tokens, ("chunked", "last-quarter", "position"))
    assert rows[0] == {"checkpoint": "x", "task": "loss", "protocol": "chunked", "length": 10, "loss": 5.0, "tokens": 9}
    assert rows[1]["loss"] == (7 + 8 + 9) / 2 and rows[1]["tokens"] == 2
    by = [row for row in rows if row["protocol"] == "position"]
    assert [row["position"] for row in by] == [[i, i + 1] for i in range(10)] and by[3]["loss"] == 3.0
    long = [row for row in evaluate.rows_of("x", torch.ones(256), torch.ones(256), ("position",))]
    assert len(long) == 16 and long[-1]["position"] == [240, 256]
    assert "x" in evaluate.table(rows, [10]) and "5.0000" in evaluate.table(rows, [10])


def test_refusals_fill_their_cell(make, tmp_path, text_data):
    model = make(pos="learned", vocab_size=257)
    model.meta = {"dataset": str(text_data), "bos": 256}
    cfg = evaluate.EvaluateConfig(max_tokens=200, protocol=("chunked",), device="cpu", dtype="float32")
    rows = evaluate.measure({"m": model}, cfg, (24, 48, 500))
    assert "loss" in rows[0] and "24 tokens" in rows[1]["refused"] and "--max_tokens" in rows[2]["refused"] and json.dumps(rows)
    assert "refused: m at 48" in evaluate.table(rows, (24, 48, 500))
    with pytest.raises(UserError, match="longer than the"):
        evaluate.loss_by_position(model, data.Dataset(text_data).val, 10**7)


def test_terminal_plot():
    text = evaluate.terminal_plot({"one": [(256, 1.0), (1024, 3.0)], "two": [(256, 1.0), (1024, 2.0), (2048, float("nan"))]})
    lines = text.splitlines()
    assert lines[0].startswith("  3.000 |") and lines[0].rstrip().endswith("A") and "A one" in text and "B two" in text and "256" in lines[-3] and "1024" in lines[-3]
    assert lines[12].startswith("  1.000 |*")  # both start there
    assert evaluate.terminal_plot({"none": []}) == "nothing to plot"


@pytest.mark.parametrize("length,span,stride", [(16, 100, 5), (16, 16, 5), (16, 17, 16), (8, 100, 300), (30, 100, 1), (1, 7, 3)])
def test_windows_of_every_protocol(length, span, stride):
    """chunked and sliding score each target of the span exactly once; sliding scores at most `stride` of a window after the first, and gives each
    of them at least length - stride tokens before it."""
    for protocol in ("chunked", "sliding"):
        scored = []
        for i, (start, skip) in enumerate(evaluate.windows_of(protocol, length, span, stride)):
            assert 0 <= start and start + length <= span and 0 <= skip < length
            scored += range(start + skip, start + length)
            if protocol == "sliding" and i:
                assert length - skip <= stride and skip >= length - stride
        assert scored == list(range(span))


def test_token_aligned_scores_the_same_tokens_at_every_length(make, tmp_path):
    """Against cross-entropies written out: the last `stride` targets of windows that end at multiples of the longest length."""
    model, s = make(pos="nope"), split(tmp_path)
    stream, lengths, stride = torch.tensor(np.asarray(s.tokens[0], np.int64)), (20, 60, 200), 7
    for length in lengths:
        nats, tokens = evaluate.loss_by_position(model, s, length, 650, protocol="token-aligned", stride=stride, lengths=lengths)
        want = 0.0
        for end in (200, 400, 600):
            x, y = stream[end - length:end], stream[end - length + 1:end + 1]
            want += torch.nn.functional.cross_entropy(model(x[None])[0].double(), y, reduction="none")[-stride:].sum().item()
        assert tokens.sum() == 3 * stride and not tokens[:-stride].any() and nats.sum().item() == pytest.approx(want, rel=1e-5)
    assert evaluate.windows_of("token-aligned", 20, 650, 256, lengths)[0] == (180, 10)  # at most half the shortest length
    with pytest.raises(UserError, match="200 tokens"):
        evaluate.loss_by_position(model, s, 20, 150, protocol="token-aligned", lengths=lengths)


def test_sliding_against_one_window_at_a_time(make, tmp_path):
    model, s = make(pos="alibi"), split(tmp_path)
    stream, length, stride, span = torch.tensor(np.asarray(s.tokens[0], np.int64)), 24, 10, 95
    nats, tokens = evaluate.loss_by_position(model, s, length, span, protocol="sliding", stride=stride)
    want = torch.nn.functional.cross_entropy(model(stream[:24][None])[0].double(), stream[1:25], reduction="sum").item()
    for end, new in ((34, 10), (44, 10), (54, 10), (64, 10), (74, 10), (84, 10), (94, 10), (95, 1)):
        want += torch.nn.functional.cross_entropy(model(stream[end - 24:end][None])[0].double(), stream[end - 23:end + 1], reduction="none")[-new:].sum().item()
    assert tokens.sum() == span and nats.sum().item() == pytest.approx(want, rel=1e-5)


def test_a_dynamic_model_is_read_at_the_scale_of_the_window(make, tmp_path):
    """One forward pass of the whole window, which a window of another length before it does not disturb; random positions are drawn, and alike each time."""
    model, s = make(pos="rope"), split(tmp_path)
    plain = evaluate.loss_by_position(model, s, 20, 400)[0]
    model.stretch("dynamic-ntk", 4)
    far = evaluate.loss_by_position(model, s, 90, 400)[0]
    assert torch.equal(evaluate.loss_by_position(model, s, 20, 400)[0], plain) and torch.equal(evaluate.loss_by_position(model, s, 90, 400)[0], far)
    drawn = make(pos="rope", random_positions=300)
    a, b = (evaluate.loss_by_position(drawn, s, 20, 400)[0] for _ in range(2))
    assert torch.equal(a, b) and not torch.allclose(a, plain)


def test_wavelengths(tmp_path, capsys):
    from model import STRETCH
    evaluate.wavelengths(STRETCH["none"](1e4, 64, 1024, 1.0)[0], STRETCH["yarn"](1e4, 64, 1024, 4.0)[0], 1024, 4096, str(tmp_path / "w.png"), "yarn")
    said = capsys.readouterr().out
    assert "18 complete a turn within the trained 1024" in said and "26 are stretched" in said and "47,117 to 188,469" in said  # 2 pi 10000^(62/64), times 4
    assert (tmp_path / "w.png").read_bytes()[:4] == b"\x89PNG"
