"""Every protocol against losses that are summed one sequence at a time."""

import json
import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_refused, assert_success
from test_hf_tokenizer import PADDED_VOCAB_SIZE, import_tokenizer

import data
import evaluate
import train
from model import GPT, POSITIONS
from nanolong import key_tokens, scoring
from nanolong.errors import UserError
from nanolong.evaluation import loss
from nanolong.provenance import current_commit

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


@pytest.fixture
def split(tmp_path):
    """A function that writes random tokens below 49 to files and returns them as a data.Split."""

    def split(n=1000, bos=None, files=1):
        rng = np.random.default_rng(0)
        paths = [tmp_path / f"{i}.bin" for i in range(files)]
        for i, path in enumerate(paths):
            data.write_tokens(path, rng.integers(0, 49, n - 10 * i), 50)
        return data.Split(paths, 50, bos)

    return split


def text_of(split):
    """The tokens of a split's first file, int64 (T,)."""
    return torch.tensor(np.asarray(split.tokens[0], np.int64))


def losses_of(model, x, y):
    """The loss of every token of one sequence, float64 (T,)."""
    with torch.no_grad():
        return F.cross_entropy(model(x[None])[0].double(), y, reduction="none")


# -----------------------------------------------------------------------------
# Which tokens are scored


def pieces_of(val, longest, max_tokens):
    """The (file, start, stop) of the targets that are scored, chosen as train.py does."""
    sizes = [len(tokens) - (val.bos is None) for tokens in val.tokens]
    if sum(sizes) <= max_tokens:
        return [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
    sequences = []
    for file, size in enumerate(sizes):
        starts = range(0, size - longest + 1, longest)
        sequences += [(file, start, start + longest) for start in starts]
    n = min(max_tokens // longest, len(sequences))
    return [sequences[i * len(sequences) // n] for i in range(n)]


@pytest.mark.parametrize("bos", [None, 49])
@pytest.mark.parametrize(
    ("length", "longest", "max_tokens"),  # of 24 in 60 the last sequence of a piece overlaps
    [(16, 64, 400), (24, 60, 400), (400, 400, 400), (1, 7, 50), (33, 500, 5000), (999, 999, 5000)],
)
def test_chunked_equals_one_sequence_at_a_time(length, longest, max_tokens, bos, make, split):
    """Where sequences overlap at the end of a piece, only the new tokens are scored."""
    model = make(pos="alibi")
    val = split(bos=bos, files=3)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    for file, first, stop in pieces_of(val, longest, max_tokens):
        text = torch.tensor(np.asarray(val.tokens[file], np.int64))
        end = first
        while end < stop:
            start = min(end, stop - length)
            if bos is None:
                x = text[start : start + length]
                y = text[start + 1 : start + length + 1]
            else:
                y = text[start : start + length]
                x = torch.cat((torch.tensor([bos]), y[:-1]))
            new = torch.arange(length) >= end - start
            loss_sum += losses_of(model, x, y) * new
            n_scored += new
            end = start + length
    got_sum, got_scored = loss.loss_by_position(
        model, val, length, max_tokens, lengths=(length, longest)
    )
    assert torch.equal(got_scored, n_scored)
    assert torch.allclose(got_sum, loss_sum, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("protocol", ["chunked", "sliding", "token-aligned"])
@pytest.mark.parametrize("max_tokens", [200, 640, 1500, 9999])
@pytest.mark.parametrize("lengths", [(12, 20, 96), (16, 64), (50,), (1, 7), (16, 17)])
@pytest.mark.parametrize("stride", [1, 10, 300])
def test_all_lengths_score_the_same_tokens_once(stride, lengths, max_tokens, protocol, split):
    """Of token-aligned the last ones of each piece, of the others every one."""
    val = split(files=3)
    found = []
    for length in lengths:
        places = loss.find_sequences(val, length, max_tokens, protocol, stride, lengths)
        scored = []
        for file, start, n_context in places:
            assert 0 <= start <= len(val.tokens[file]) - 1 - length
            if protocol == "sliding":  # the first tokens of a file have less context
                assert n_context >= length - stride or start == 0
            scored += [(file, token) for token in range(start + n_context, start + length)]
        found.append(scored)
        assert len(scored) == len(set(scored))
    assert all(sorted(scored) == sorted(found[0]) for scored in found)
    if protocol != "token-aligned":
        pieces = pieces_of(val, max(lengths), max_tokens)
        tokens = [(file, token) for file, *ends in pieces for token in range(*ends)]
        assert sorted(found[0]) == tokens


def test_chunked_at_the_context_length_is_the_validation_loss_of_training(make, text_data):
    """The same sequences, as many, so the same mean."""
    dataset = data.Dataset(text_data)
    model = make(pos="rope", vocab_size=257)
    cfg = train.TrainConfig(dataset=str(text_data), batch_size=4, eval_iters=20, dtype="float32")
    expected = train.estimate_loss(model, dataset, cfg)["val_loss"]
    loss_sum, n_scored = loss.loss_by_position(model, dataset.val, 24, 20 * 24)
    assert float(loss_sum.sum() / n_scored.sum()) == pytest.approx(expected, rel=1e-6)


SLIDING = [(24, 24), (34, 10), (44, 10), (54, 10), (64, 10), (72, 8)]
# Of 13 sequences of 72 targets, numbers 0 and 6: the second piece has context before it.
SLIDING += [(end, 10) for end in range(442, 502, 10)] + [(502, 10), (504, 2)]
ALIGNED = [(200, 7), (400, 7), (600, 7)]


@pytest.mark.parametrize(
    "protocol, length, lengths, max_tokens, stride, scored",
    [
        ("sliding", 24, (24, 72), 150, 10, SLIDING),
        *(("token-aligned", length, (20, 60, 200), 650, 7, ALIGNED) for length in (20, 60, 200)),
    ],
)
def test_ends_of_sequences_equal_one_sequence_at_a_time(
    protocol, length, lengths, max_tokens, stride, scored, make, split
):
    """scored: where sequences end, and how many of their last tokens are scored."""
    model = make(pos="alibi")
    val = split()
    text = text_of(val)
    expected = 0.0
    for end, n_new in scored:
        of_tokens = losses_of(model, text[end - length : end], text[end - length + 1 : end + 1])
        expected += of_tokens[-n_new:].sum().item()
    loss_sum, n_scored = loss.loss_by_position(
        model, val, length, max_tokens, protocol=protocol, stride=stride, lengths=lengths
    )
    assert n_scored.sum() == sum(n_new for _, n_new in scored)
    assert not n_scored[: -max(n_new for _, n_new in scored)].any()
    assert loss_sum.sum().item() == pytest.approx(expected, rel=1e-5)


def test_a_text_too_short_for_a_sequence_is_refused(make, split):
    val = split()
    with pytest.raises(UserError, match="longer than the 999"):
        loss.loss_by_position(make(), val, 10**7, 10**8)
    with pytest.raises(UserError, match="200 tokens"):
        loss.loss_by_position(
            make(), val, 200, 150, protocol="token-aligned", lengths=(20, 60, 200)
        )
    places = loss.find_sequences(val, 20, 150, "token-aligned", 7, (20, 60, 200))
    assert [start for _, start, _ in places] == [40, 520]  # those of 60 targets end there, too


# -----------------------------------------------------------------------------
# What the model computes


def test_a_dynamic_method_scales_by_the_length_of_the_sequence(make, split):
    """Sequences of one length do not disturb the tables for those of another."""
    model = make(pos="rope")
    val = split()
    plain, _ = loss.loss_by_position(model, val, 20, 400)
    model.extend("dynamic-ntk", 4)
    long, _ = loss.loss_by_position(model, val, 90, 400)
    assert torch.equal(loss.loss_by_position(model, val, 20, 400)[0], plain)
    assert torch.equal(loss.loss_by_position(model, val, 90, 400)[0], long)


def test_random_positions_are_the_same_in_every_evaluation(make, split):
    val = split()
    plain, _ = loss.loss_by_position(make(pos="rope"), val, 20, 400)
    model = make(pos="rope", random_positions=300)
    first, _ = loss.loss_by_position(model, val, 20, 400)
    again, _ = loss.loss_by_position(model, val, 20, 400)
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain)


def input_lengths(model):
    """A list to which every forward pass of the model adds the number of its input tokens."""
    lengths = []
    hidden_states = model.hidden_states

    def recorded(tokens, *args):
        lengths.append(tokens.shape[1])
        return hidden_states(tokens, *args)

    model.hidden_states = recorded
    return lengths


def losses_in_chunks(model, monkeypatch, chunk=16):
    """The losses of 2 sequences of 45 random tokens, at once and in chunks, and those passes."""
    x = torch.randint(0, 50, (2, 45))
    y = torch.randint(0, 50, (2, 45))
    positions = data.random_positions(model.config, 2, 45, 3)
    lengths = input_lengths(model)
    with torch.no_grad():
        at_once = loss.token_losses(model, x, y, positions)
        monkeypatch.setattr(loss, "CHUNK", chunk)
        in_chunks = loss.token_losses(model, x, y, positions)
    assert lengths[0] == 45
    return at_once, in_chunks, lengths[1:]


WINDOW = {"window": 9, "sinks": 2, "n_kv_head": 2}
CASES = [(pos, settings) for pos in POSITIONS for settings in ({}, WINDOW)]


@pytest.mark.parametrize("pos, settings", [*CASES, ("rope", {"random_positions": 90})])
def test_a_long_sequence_in_chunks_has_the_same_losses(pos, settings, make, monkeypatch):
    """Beyond the context length too, where the scheme is not bounded by it."""
    model = make(pos=pos, block_size=48 if POSITIONS[pos].bounded else 24, **settings)
    at_once, in_chunks, lengths = losses_in_chunks(model, monkeypatch)
    assert torch.allclose(at_once, in_chunks, atol=1e-4)
    assert lengths == [16, 16, 13]


@pytest.mark.parametrize("method", ["dynamic-ntk", "self-extend"])
def test_a_method_that_depends_on_the_length_is_never_chunked(method, make, monkeypatch):
    model = make(pos="rope")
    model.extend(method, 2)
    at_once, in_chunks, lengths = losses_in_chunks(model, monkeypatch)
    assert torch.equal(at_once, in_chunks)
    assert lengths == [45]


def test_evaluation_leaves_the_mode_of_the_model_as_it_was(make, split):
    model = make(pos="rope", dropout=0.5)
    val = split()
    expected, _ = loss.loss_by_position(model, val, 20, 400)
    model.train()
    assert torch.equal(loss.loss_by_position(model, val, 20, 400)[0], expected)
    assert model.training


# -----------------------------------------------------------------------------
# Records


def test_records_of_each_protocol():
    """Of three sequences with parts 0 to 9, times 1, 2 and 3, whose last part is not scored."""
    sums = torch.arange(10, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [3.0]])
    counts = torch.ones(3, 10)
    counts[:, 9] = 0
    sums[:, 9] = 0
    blank = [scoring.loss_record("x", word, 10) for word in ("chunked", "last-quarter", "position")]
    chunked, last_quarter, *parts = scoring.make_records(blank, sums, counts)
    assert chunked == {
        **{"checkpoint": "x", "task": "loss", "protocol": "chunked", "length": 10},
        **{"loss": 8.0, "low": None, "high": None, "n": 3, "tokens": 27},
        "by_sequence": [(36.0, 9), (72.0, 9), (108.0, 9)],
    }
    assert last_quarter["loss"] == (7 + 8) / 2 * 2
    assert last_quarter["tokens"] == 6
    assert [part["position"] for part in parts] == [[i, i + 1] for i in range(10)]
    assert parts[3]["loss"] == 6.0
    assert math.isnan(parts[9]["loss"]) and parts[9]["n"] == 0
    ones = torch.ones(5, 16)
    parts = scoring.make_records([scoring.loss_record("x", "position", 256)], ones, ones)
    assert len(parts) == 16 and parts[-1]["position"] == [240, 256]


def text_model(make, text_data, **settings):
    """A model of bytes with the dataset of the tests."""
    model = make(vocab_size=257, **settings)
    model.meta = {"dataset": str(text_data), "bos": 256}
    return model


def measure(models, lengths, *protocols, **settings):
    cfg = evaluate.EvaluateConfig(protocol=protocols, device="cpu", dtype="float32", **settings)
    return evaluate.measure_losses(models, cfg, lengths)


def test_records_keep_the_stride_of_their_protocol(make, text_data):
    models = {"m": text_model(make, text_data)}
    protocols = ("token-aligned", "last-quarter", "sliding", "chunked")
    records = measure(models, (24, 48), *protocols, max_tokens=200, stride=15)
    strides = {record["protocol"]: record.get("stride") for record in records}
    assert strides == {"last-quarter": None, "chunked": None, "token-aligned": 12, "sliding": 15}
    assert [record["length"] for record in records] == [24] * 4 + [48] * 4


def test_a_loss_that_cannot_be_measured_is_refused_in_its_record(make, text_data):
    models = {"m": text_model(make, text_data, pos="learned")}
    good, beyond, too_long = measure(models, (24, 48, 500), "chunked", max_tokens=200)
    keys = "checkpoint task protocol length loss low high n tokens bytes by_sequence"
    assert list(good) == keys.split()
    assert good["bytes"] == good["tokens"]
    assert list(beyond) == ["checkpoint", "task", "protocol", "length", "refused"]
    assert "--pos=learned" in beyond["refused"]
    assert "--max_tokens" in too_long["refused"]


# -----------------------------------------------------------------------------
# A text file

TEXT = "Größe, naïve ☃ 🙂: the quick brown fox.\n" + (ROOT / "LICENSE").read_text()[:777]


@pytest.fixture
def imported(make, tmp_path):
    """A function that saves a model with a tokenizer of this kind; returns its run folder."""

    def imported(kind, bos=None, name="imported"):
        model = make(vocab_size=PADDED_VOCAB_SIZE, n_layer=1, pos="rope")
        model.meta = {"tokenizer": import_tokenizer(kind).to_json(), "bos": bos}
        model.save(tmp_path / name / "step-000000")
        return tmp_path / name

    return imported


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def records_of(call, tmp_path, *words):
    """The records of evaluate.py in float32, and what it has printed."""
    file = tmp_path / "records.json"
    done = call("evaluate.py", *words, f"--json={file}", "--dtype=float32", "--device=cpu")
    assert_success(done)
    return json.loads(file.read_text()), done


def losses_in_float64(run, ids, length, bos):
    """The loss of every target of a text, from logits in float64: sequences do not overlap."""
    model = GPT.load(run).double()
    inputs = torch.tensor([bos, *ids] if bos is not None else ids)
    losses = []
    for start in range(0, len(inputs) - 1, length):
        # the last one ends with the text, and only its new tokens are scored
        first = min(start, len(inputs) - 1 - length)
        part = inputs[first : first + length]
        if bos is not None:
            part = torch.cat((torch.tensor([bos]), part[1:]))
        with torch.no_grad():
            hidden = model.hidden_states(part[None])[0]
        log_p = (hidden @ model.head.weight.T).log_softmax(-1)
        targets = inputs[first + 1 : first + 1 + length]
        all_losses = -log_p.gather(1, targets[:, None])[:, 0]
        losses += all_losses[start - first :].tolist()
    return losses


@pytest.mark.parametrize("kind, bos", [("gpt2", None), ("smollm2", 0), ("llama2", 1)])
def test_bits_per_byte_of_a_text_are_those_of_its_bytes(
    kind, bos, imported, text_file, call, tmp_path
):
    """Of the logits in float64 and the UTF-8 bytes of the file, which no tokenizer has counted."""
    run = imported(kind, bos)
    ids = import_tokenizer(kind).encode(TEXT)
    words = [run, f"--text={text_file}", "--lengths=24,61", "--protocol=chunked,position"]
    records, done = records_of(call, tmp_path, *words)
    n_bytes = len(TEXT.encode())
    if bos is None:  # the first token is no target
        n_bytes -= len(import_tokenizer(kind).decode(ids[:1]))
    for length in (24, 61):
        expected = losses_in_float64(run, ids, length, bos)
        chunked, *parts = [record for record in records if record["length"] == length]
        assert chunked["tokens"] == len(expected) == len(ids) - (bos is None)
        assert chunked["bytes"] == sum(part["bytes"] for part in parts) == n_bytes
        bits = chunked["loss"] * chunked["tokens"] / chunked["bytes"] / math.log(2)
        assert bits == pytest.approx(sum(expected) / n_bytes / math.log(2), rel=1e-5)
        table = done.stdout.split("chunked (every token), bits per byte, by context length\n")[1]
        assert f" {bits:.3f} " in table.splitlines()[1]


def test_bytes_of_every_protocol_are_those_of_its_targets(make, text_file, call, tmp_path):
    """A token is a byte."""
    model = make(vocab_size=257)
    model.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256}
    model.save(tmp_path / "run/step-000001")
    protocols = "--protocol=chunked,last-quarter,position,sliding,token-aligned"
    words = [tmp_path / "run", f"--text={text_file}", "--lengths=13,48", protocols, "--stride=5"]
    records, _ = records_of(call, tmp_path, *words, f"--plot={tmp_path}/a.png")
    assert all(record["bytes"] == record["tokens"] for record in records)
    assert {record["protocol"] for record in records} == set(protocols[11:].split(","))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_what_was_scored_is_said(text_file, split):
    """Tokens, files and a hash: below tables and figures."""
    text = data.TextFile(text_file, data.ByteTokenizer(), 257, 256)
    five = types.SimpleNamespace(name="five", val=split(files=5), hash="2c3d")
    files = five.val.files[:2]
    two = types.SimpleNamespace(name="a/two", val=data.Split(files, 50, None), hash="0a1b")
    texts = {"x": text, "y": text, "z": two, "w": five}
    scored = f"96 of {len(TEXT.encode())} tokens of {text_file}, 2 pieces of text.txt"
    assert scoring.describe_scored(texts, (24, 48, 960), 99) == [
        f"{scored}, data {text.hash}",
        "96 of 1,990 tokens of a/two, 2 pieces of 0.bin, 1.bin, data 0a1b",
        "96 of 4,900 tokens of five, 2 pieces of 0.bin, 2.bin, data 2c3d",
    ]
    (line,) = scoring.describe_scored({"w": five}, (24,), 99)
    assert line == "96 of 4,900 tokens of five, 4 pieces of 4 of 5 files, data 2c3d"
    (line,) = scoring.describe_scored({"w": five}, (5000,), 9999)
    assert line.startswith("0 of 4,900 tokens of five")


def test_vocabularies_are_compared_on_one_text_by_bits_per_byte(
    imported, text_file, call, tmp_path
):
    runs = [f"a={imported('gpt2', 0, 'a')}", f"b={imported('llama2', 1, 'b')}"]
    words = [*runs, f"--text={text_file}", "--protocol=last-quarter,chunked"]
    records, done = records_of(call, tmp_path, *words, "--lengths=24,25")
    chunked = [r for r in records if r["protocol"] == "chunked" and r["length"] == 24]
    assert [record["bytes"] for record in chunked] == [len(TEXT.encode())] * 2
    assert chunked[0]["tokens"] != chunked[1]["tokens"]
    assert "losses per token cannot be compared" in done.stderr
    assert "--max_tokens" not in done.stderr
    # one table, and one plot in place of those in nats per token
    assert done.stdout.count("chunked (every token), bits per byte, by context length\n") == 1
    assert done.stdout.count("chunked, bits per byte, by context length\n") == 1
    assert done.stdout.count("bits per byte") == 2
    assert "chunked, nats per token, by context length" not in done.stdout
    # a cut leaves each its own part of the text; of one length there is no plot
    _, done = records_of(call, tmp_path, *words, "--lengths=24", "--max_tokens=100")
    assert "chunked, bits per byte, by context length\n" not in done.stdout
    longest = max(record["tokens"] for record in chunked)
    assert f"to compare bits per byte on all of it, give --max_tokens={longest}" in done.stderr


def test_the_figure_of_two_vocabularies_is_in_bits_per_byte(
    imported, text_file, call, tmp_path, monkeypatch
):
    """Nats per token of two vocabularies cannot be in one plot: without chunked there is none."""
    runs = [f"a={imported('gpt2', 0, 'a')}", f"b={imported('llama2', 1, 'b')}"]
    words = [*runs, f"--text={text_file}", "--lengths=24,48", f"--plot={tmp_path}/a.png"]
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluate.plots, "save_figure", lambda figure, file: figures.append(figure))
        records, _ = records_of(call, tmp_path, *words)
    expected = {}
    for record in records:
        if record["protocol"] == "chunked":
            bits = record["loss"] * record["tokens"] / record["bytes"] / math.log(2)
            expected.setdefault(record["checkpoint"], []).append(bits)
    (axis,) = figures[0].axes
    assert (axis.get_title(), axis.get_ylabel()) == ("chunked", "loss (bits per byte)")
    curves = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert list(curves) == list(expected)
    for name, bits in expected.items():
        assert curves[name] == pytest.approx(bits, rel=1e-6)

    _, done = records_of(call, tmp_path, *words, "--protocol=last-quarter")
    assert "note: nothing is plotted, for a loss per token" in done.stderr
    assert not (tmp_path / "a.png").exists() and "last-quarter, nats per token" not in done.stdout


def test_a_text_that_cannot_be_scored_is_refused(imported, make, text_file, call, tmp_path):
    run = imported("gpt2")
    empty, short, binary = (tmp_path / name for name in ("empty.txt", "short.txt", "binary"))
    empty.write_bytes(b"")
    short.write_text("two words")
    binary.write_bytes(b"\xff\xf0" * 99)
    make().save(tmp_path / "nameless/step-000001")
    for checkpoint, words, phrases in (
        (run, [f"--text={text_file}", "--dataset=x"], ("--text and --dataset",)),
        (run, [f"--text={text_file}", "--task=needle"], ("--text", "--task=needle")),
        (run, [f"--text={tmp_path}/gone.txt"], ("gone.txt cannot be used", "No such file")),
        (run, [f"--text={tmp_path}"], (f"{tmp_path} cannot be used", "directory")),
        (run, [f"--text={empty}"], ("empty.txt is empty",)),
        (run, [f"--text={short}"], ("short.txt holds", "sequence of 24", "--lengths")),
        (run, [f"--text={binary}"], ("cannot encode the text", "no UTF-8")),
        (tmp_path / "nameless", [f"--text={text_file}"], ("tokenizer", "nameless", "--dataset")),
        (run, [], ("give --text=FILE, or --dataset",)),
    ):
        done = call("evaluate.py", checkpoint, *words, f"--json={tmp_path}/a.json")
        assert_refused(done)
        for phrase in phrases:
            assert phrase in done.stderr
    assert not (tmp_path / "a.json").exists()


def test_the_text_of_a_report_marks_where_a_sequence_begins(make, text_data):
    """Its losses are those of one sequence at a time; without the marks it is the scored text."""
    model, text = text_model(make, text_data), data.Dataset(str(text_data))
    found = loss.text_losses(model, text, (24, 48), 960, n_tokens=100)
    sequences = loss.find_sequences(text.val, 48, 960, lengths=(24, 48))[:3]
    x, y = loss.read_sequences(text.val, 48, sequences)
    expected, ids, starts = [], [], []
    for inputs, targets in zip(x, y, strict=True):
        starts.append(len(ids))
        scored = targets >= 0  # <bos> is not
        expected += losses_of(model, inputs, targets.clamp(min=0))[scored].tolist()
        ids += targets[scored].tolist()
    assert found["length"] == 48 and found["losses"] == pytest.approx(expected[:100], abs=1e-5)
    mark = loss.NEXT_SEQUENCE
    tokens = found["tokens"]
    assert [i for i, token in enumerate(tokens) if token.startswith(mark)] == starts[1:]
    assert "".join(tokens).replace(mark, "") == text.tokenizer.decode(ids[:100]).decode()


def test_bytes_that_nobody_knows_are_left_out(make, text_data):
    """Of token files without a tokenizer."""
    dataset = data.Dataset(text_data)
    dataset.tokenizer = None
    assert scoring.bytes_by_part(dataset, 24, [(0, 0, 0)]) is None
    blank, ones = [scoring.loss_record("m", "chunked", 4)], torch.ones(2, 4)
    (record,) = scoring.make_records(blank, ones, ones)
    assert "bytes" not in record


# -----------------------------------------------------------------------------
# Intervals, pairs and the benefit of context


def test_the_difference_of_two_checkpoints_is_over_the_same_sequences(make, text_data):
    """Of the losses of every sequence, one at a time; the interval is that of their mean."""
    models = {pos: text_model(make, text_data, pos=pos) for pos in ("nope", "alibi")}
    first, second = measure(models, (24,), "chunked", max_tokens=240)
    assert "difference" not in first
    val = data.Dataset(str(text_data)).val
    by_model = []
    for model in models.values():
        of_sequences = []
        for place in loss.find_sequences(val, 24, 240, lengths=(24,)):
            x, y = loss.read_sequences(val, 24, [place])
            of_tokens = losses_of(model, x[0], y[0].where(y[0] >= 0, 0))
            of_sequences.append((of_tokens * (y[0] >= 0)).sum().item())
        by_model.append(np.array(of_sequences))
    differences = by_model[1] - by_model[0]
    tokens = [count for _, count, _ in first["by_sequence"]]
    mean = differences.sum() / sum(tokens)
    assert second["difference"]["mean"] == pytest.approx(mean, abs=1e-5)
    residuals = differences - mean * np.array(tokens)
    half_width = 2.2622 * math.sqrt(10 / 9 * (residuals**2).sum()) / sum(tokens)
    found = second["difference"]["high"] - second["difference"]["mean"]
    assert found == pytest.approx(half_width, rel=2e-3)
    assert second["loss"] - first["loss"] == pytest.approx(second["difference"]["mean"], abs=1e-6)


def test_checkpoints_of_other_tokens_are_not_paired(make, text_data):
    models = {"a": text_model(make, text_data), "b": text_model(make, text_data)}
    texts = {"a": data.Dataset(str(text_data)), "b": types.SimpleNamespace(hash="other")}
    assert scoring.identify_texts(models, texts) == {"a": "a", "b": "b"}
    texts["b"] = texts["a"]
    assert scoring.identify_texts(models, texts) == {"a": "a", "b": "a"}
    models["b"].meta["bos"] = 3  # it starts every text
    assert scoring.identify_texts(models, texts) == {"a": "a", "b": "b"}


def test_the_benefit_of_a_doubling_is_over_the_same_places(make, text_data):
    """From 24 tokens to 96 are two doublings; the last 12 tokens of 10 places are scored."""
    models = {"m": text_model(make, text_data, pos="alibi")}
    short, middle, long = measure(models, (24, 48, 96), "last-tokens", max_tokens=960)
    assert short["stride"] == 12 and "benefit" not in short and long["n"] == 10
    assert long["benefit"]["mean"] == pytest.approx((short["loss"] - long["loss"]) / 2, abs=1e-6)
    assert middle["benefit"]["mean"] == pytest.approx(short["loss"] - middle["loss"], abs=1e-6)
    assert long["benefit"]["low"] < long["benefit"]["mean"] < long["benefit"]["high"]


def test_aligned_protocols_of_one_stride_share_their_forward_passes():
    protocols = ("chunked", "token-aligned", "last-tokens", "position", "sliding", "key-tokens")
    assert scoring.group_protocols(protocols, 0, (24, 48)) == [
        (("chunked", "position"), {}),
        (("token-aligned", "last-tokens"), {"stride": 12}),
        (("sliding",), {"stride": 256}),
        (("key-tokens",), {}),
    ]
    aligned = [("token-aligned",), ("last-tokens",)]
    found = scoring.group_protocols(protocols[1:3], 0, (2048, 4096))
    assert found == [(aligned[0], {"stride": 256}), (aligned[1], {"stride": 500})]


# -----------------------------------------------------------------------------
# Key tokens


@pytest.mark.parametrize("bos", [None, 49])
def test_key_tokens_are_those_that_a_long_context_makes_likely(bos, make, split, monkeypatch):
    """One token at a time: with all before it, and with the last 8 or 9, of which two share."""
    monkeypatch.setattr(key_tokens, "KEY_GAIN", 0.01)
    monkeypatch.setattr(key_tokens, "KEY_LOG_PROBABILITY", -3.9)
    model = make(pos="alibi", block_size=24)
    val = split(bos=bos)
    text = text_of(val)
    judge = key_tokens.Judge(model, 8)
    sequences = loss.find_sequences(val, 24, 96, lengths=(24,))
    text_of_val = types.SimpleNamespace(val=val, hash="")
    are_key, benefits = judge.find(text_of_val, 24, sequences)

    expected = torch.zeros(len(sequences), 24, dtype=torch.bool)
    gains = torch.zeros(len(sequences), 2, dtype=torch.float64)
    for row, (_, start, _) in enumerate(sequences):
        for place in range(8, 24):
            target = start + place + (bos is None)
            first_short = start + place - 8 - place % 2
            nats = []
            for first in (start, first_short):
                x = text[first : target + (bos is not None)]
                if bos is not None:
                    x = torch.cat((torch.tensor([bos]), text[first:target]))
                nats.append(losses_of(model, x, text[target].repeat(len(x)))[-1])
            gain = nats[1] - nats[0]
            gains[row] += torch.tensor([gain, 1])
            expected[row, place] = (gain > 0.01) & (-nats[0] > -3.9)
    assert 5 < expected.sum() < 60
    assert torch.equal(are_key, expected)
    assert torch.allclose(benefits, gains, atol=1e-4)

    sums, counts = key_tokens.key_token_losses(model, val, 24, sequences, are_key)
    for row, (_, start, _) in enumerate(sequences):
        x, y = loss.read_sequences(val, 24, [(0, start, 0)])
        of_key = losses_of(model, x[0], y[0])[expected[row]]
        assert sums[row].item() == pytest.approx(of_key.sum().item(), abs=1e-4)
        assert counts[row] == expected[row].sum()


def test_the_judges_context_limits_the_short_context(make):
    assert key_tokens.Judge(make(block_size=24), 4096).short_context == 12
    assert key_tokens.Judge(make(block_size=24), 5).short_context == 5


def test_key_tokens_on_the_command_line(runs, call, tmp_path, monkeypatch):
    monkeypatch.setattr(key_tokens, "KEY_GAIN", 0.001)
    monkeypatch.setattr(key_tokens, "KEY_LOG_PROBABILITY", -9.0)
    words = [runs[0], f"b={runs[2]}", "--protocol=key-tokens", f"--judge={runs[0]}"]
    words += ["--lengths=12,24,48", "--max_tokens=480", "--json=a.json"]
    done = assert_success(call("evaluate.py", *words, "--min_key_tokens=7", cwd=tmp_path))
    records = json.loads((tmp_path / "a.json").read_text())
    assert [record["length"] for record in records if "loss" in record] == [24, 24]
    first, second = (record for record in records if "loss" in record)
    assert first["tokens"] == second["tokens"] and second["difference"]["n"] == first["n"]
    assert first["key_fraction"] == pytest.approx(first["tokens"] / (480 / 24 * 12), abs=0.02)
    assert "at 24: " in done.stdout and " key tokens, " in done.stdout
    assert "sequences of 13 to 24 tokens" in done.stdout
    few = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    assert "fewer than 1000 say too little: raise --max_tokens" in few.stdout
    for bad in (["--protocol=key-tokens"], [f"--judge={runs[0]}"]):
        assert_refused(call("evaluate.py", runs[0], *bad), "need each other")


def test_a_judge_of_another_vocabulary_is_refused(runs, imported, call):
    words = ["--protocol=key-tokens", f"--judge={imported('gpt2')}", "--lengths=24"]
    assert_refused(call("evaluate.py", runs[0], *words), "have different vocabularies")


# -----------------------------------------------------------------------------
# The command line


def test_command_line_writes_tables_json_and_figure(runs, call, tmp_path):
    rope, learned, _ = runs
    words = [rope, f"table={learned}", "--protocol=chunked,position,token-aligned", "--stride=8"]
    words += ["--max_tokens=480", "--json=new/a.json", "--plot=new/a.png"]
    done = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    assert "A " + str(rope) in done.stdout
    assert "B table" in done.stdout
    records = json.loads((tmp_path / "new/a.json").read_text())
    assert {record["checkpoint"] for record in records} == {str(rope), "table"}
    # by default 1, 2, 4 and 8 times the shortest original context length
    assert {record["length"] for record in records} == {24, 48, 96, 192}
    for record in records:
        assert ("refused" in record) == (record["checkpoint"] == "table" and record["length"] > 24)
    # all lengths score the same span, in which a <bos> is no target
    chunked = [record for record in records if record["protocol"] == "chunked"]
    assert {record["tokens"] for record in chunked if "tokens" in record} == {383}
    assert "scored: 384 of " in done.stdout
    assert (tmp_path / "new/a.png").read_bytes()[:4] == b"\x89PNG"


def test_records_say_what_they_came_from(runs, call, text_data, tmp_path):
    rope, learned, _ = runs
    model = GPT.load(rope)
    model.meta.pop("checksums")
    model.save(rope / "step-000002")
    words = [rope, f"x={rope}/step-000001", "--lengths=24", "--max_tokens=48", "--json=a.json"]
    for dtype in ("float32", "bfloat16"):
        done = call("evaluate.py", *words, f"--dtype={dtype}", "--device=cpu", cwd=tmp_path)
        assert_success(done)
        for record in json.loads((tmp_path / "a.json").read_text()):
            step = {str(rope): 2, "x": 1}[record["checkpoint"]]
            assert record["folder"] == str(rope / f"step-00000{step}")
            assert record["dtype"] == dtype and "CPU thread" in record["device"]
            assert record["data_hash"] == data.Dataset(str(text_data)).hash
            assert record["commit"] == current_commit()
    needle = ["--task=needle", "--trials=1", "--depths=1"]
    assert_success(call("evaluate.py", *words, *needle, cwd=tmp_path))
    for record in json.loads((tmp_path / "a.json").read_text()):
        assert record["commit"] and record["folder"] and "data_hash" not in record


def test_the_number_of_sequences_is_in_tables_and_records(runs, call, tmp_path):
    """24 pieces of 48 tokens would be 1,152: of 1,000 tokens there are 20."""
    words = ["--lengths=24,48", "--max_tokens=1000", "--json=a.json"]
    protocols = "--protocol=chunked,last-quarter,position,sliding,token-aligned"
    done = call("evaluate.py", runs[0], *words, protocols, "--stride=12", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    records = json.loads((tmp_path / "a.json").read_text())
    found = {(record["protocol"], record["length"]): record["n"] for record in records}
    for protocol in ("chunked", "last-quarter", "position"):
        assert (found[protocol, 24], found[protocol, 48]) == (40, 20)
    assert (found["token-aligned", 24], found["token-aligned", 48]) == (20, 20)
    assert found["sliding", 48] == 20 * 4 - 3  # all but the first have context before their piece
    tables = done.stdout.split("\n\n")
    for title, counts in (("last-quarter", "40 20"), ("token-aligned", "20 20")):
        (table,) = [table for table in tables if f"\n{title} (" in f"\n{table}"]
        assert f"sequences {counts}" in " ".join(table.split())
    assert "in sequences of 24 tokens, up to position (40 sequences)" in done.stdout


@pytest.mark.parametrize(
    "lengths, max_tokens, few",
    [("24,48,96", 480, "5 at 96"), ("24,240", 480, "2 at 240"), ("24,48", 480, ""), ("96", 96, "")],
)
def test_lengths_of_few_sequences_are_not_compared_without_a_note(
    lengths, max_tokens, few, runs, call
):
    """Of last-quarter each length scores other text; chunked scores the same."""
    words = [runs[0], f"--lengths={lengths}", f"--max_tokens={max_tokens}"]
    done = call("evaluate.py", *words)
    note = f"note: last-quarter has few sequences ({few} tokens), and each length scores other text"
    assert done.stderr.count("\n") == bool(few) and done.stderr.startswith(note if few else "")
    assert not call("evaluate.py", *words, "--protocol=chunked,token-aligned").stderr


def test_by_default_lengths_are_compared_on_the_same_tokens_too(runs, call):
    """Of a single length there is nothing to align, unless that is asked for."""
    aligned = "token-aligned (the same tokens at every length)"
    for words, is_aligned in (("24,48", True), ("24", False)):
        done = call("evaluate.py", runs[0], f"--lengths={words}", "--max_tokens=960")
        assert (aligned in assert_success(done).stdout) == is_aligned
        assert "last-quarter (" in done.stdout
    done = call("evaluate.py", runs[0], "--lengths=24", "--protocol=token-aligned")
    assert aligned in assert_success(done).stdout


def test_json_holds_null_for_a_loss_that_is_no_number(runs, call, tmp_path):
    """A checkpoint whose weights are NaN; the standard of JSON has no NaN."""
    model = GPT.load(runs[0])
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    model.save(tmp_path / "bad/step-000001")
    words = ["--lengths=24", "--max_tokens=48", "--json=a.json"]
    assert_success(call("evaluate.py", "bad", *words, cwd=tmp_path))
    text = (tmp_path / "a.json").read_text()
    assert [record["loss"] for record in json.loads(text)] == [None, None]
    assert "NaN" not in text
    # null may have been an infinity: it is measured again
    assert "reused" not in call("evaluate.py", "bad", *words, cwd=tmp_path).stdout


def test_the_report_chooses_what_to_measure_and_says_what_it_left_out(runs, call, tmp_path):
    """Every loss and gain of the JSON is on the page, with its interval; so is the text."""
    rope, learned, _ = runs
    words = [rope, f"table={learned}", "--max_tokens=960", "--trials=5", "--lengths=24,72"]
    done = call("evaluate.py", *words, "--report=a/r.html", "--json=a/r.json", cwd=tmp_path)
    assert_success(done)
    page = (tmp_path / "a/r.html").read_text(encoding="utf-8")
    records = json.loads((tmp_path / "a/r.json").read_text())
    assert {record.get("protocol") for record in records} >= {"chunked", "position"}
    kinds = {record.get("kind") for record in records if "summary" in record}
    assert kinds == {"niah", "multikey", "vt"}
    longest = [r for r in records if r.get("protocol") == "position" and r["length"] == 72]
    found = [r for r in records if r.get("protocol") == "chunked"] + longest
    for record in found:
        if "refused" in record:
            assert "--pos=learned has no embedding" in page
        else:
            assert f"{record['loss']:.3f} ± " in page
    assert "Protocols that were not measured: sliding, last-tokens, key-tokens" in page
    assert "Tasks that were not measured: fwe" in page
    assert '"losses":' in page and "val.bin, token" in page

    call("evaluate.py", rope, "--protocol=chunked", "--lengths=24", "--report=b.html", cwd=tmp_path)
    assert "Retrieval was not measured" in (tmp_path / "b.html").read_text()
    words = ["--task=ruler", "--ruler=niah", "--trials=1", "--lengths=72", "--report=c.html"]
    call("evaluate.py", rope, *words, cwd=tmp_path)
    assert "Loss was not measured: --task=loss does." in (tmp_path / "c.html").read_text()
    many = [f"{name}={rope}" for name in "abcdefg"]
    done = call("evaluate.py", *many, "--report=d.html", cwd=tmp_path)
    assert_refused(done, "at most 6 checkpoints")
    assert_refused(call("evaluate.py", rope, "--report=d.pdf", cwd=tmp_path), "end it in .html")
    assert not (tmp_path / "d.html").exists()


def test_command_line_measures_needles(runs, call, tmp_path):
    words = ["--task=needle", "--depths=2", "--trials=2", "--json=n.json", "--plot=n.png"]
    done = assert_success(call("evaluate.py", runs[0], *words, cwd=tmp_path))
    assert "no key" in done.stdout
    records = json.loads((tmp_path / "n.json").read_text())
    lengths = [24, 48, 72, 96]
    assert [record["length"] for record in records] == [n for n in lengths for _ in range(3)]
    assert (tmp_path / "n.png").read_bytes()[:4] == b"\x89PNG"


def test_a_checkpoint_that_names_no_dataset_needs_one(make, call, text_data, tmp_path):
    """Of an imported one the meta.json has none, of one that extends it null."""
    model = make(vocab_size=257)
    for meta in ({"bos": 256}, {"bos": 256, "dataset": None}):
        model.meta = meta
        model.save(tmp_path / "run" / f"step-{len(meta):06d}")
        done = call("evaluate.py", tmp_path / "run", "--lengths=24")
        assert_refused(done, "give --text=FILE, or --dataset")
    words = ["--lengths=24", "--max_tokens=48", f"--dataset={text_data}"]
    assert_success(call("evaluate.py", tmp_path / "run", *words))
    model.save(tmp_path / "my run/step-000001")
    done = call("evaluate.py", tmp_path / "my run", "--lengths=24")
    assert f"--tokenizer='{tmp_path}/my run' --name=NAME" in done.stderr


def test_a_dataset_of_another_vocabulary_is_named_as_the_cause(
    runs, call, character_data, tmp_path
):
    """Of characters, without <bos>: the sentence names the checkpoint, and no row of a table."""
    folder = character_data
    expected = f"{folder} has a vocabulary of 3 and {runs[0] / 'step-000001'} one of 257: "
    for script, words in (
        ("evaluate.py", [f"RoPE={runs[0]}"]),
        ("extend.py", [runs[0], "--max_iters=0"]),
        ("extend.py", [runs[0], "--max_iters=1", "--learning_rate=0.1", "--out_dir=b"]),
    ):
        done = call(script, *words, f"--dataset={folder}", cwd=tmp_path)
        assert "--bos" not in assert_refused(done, expected)


def test_checkpoints_of_different_texts_are_not_compared_without_a_note(make, capsys):
    models = {"a": make(), "b": make()}
    for model, dataset in zip(models.values(), ("x", "y"), strict=True):
        model.meta["dataset"] = dataset
    evaluate.check_texts(models, evaluate.EvaluateConfig())
    assert "cannot be compared" in capsys.readouterr().err
    evaluate.check_texts(models, evaluate.EvaluateConfig(dataset="x"))
    assert not capsys.readouterr().err
