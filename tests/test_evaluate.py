"""Records of losses, the texts that they are of, and the command line of evaluate.py."""

import json
import math

import pytest
import torch
from conftest import ROOT, assert_refused, assert_success, measure_cells
from makers import PADDED_VOCAB_SIZE, import_tokenizer
from test_loss import losses_of

import data
import evaluate
from model import GPT
from nanolong.evaluation import loss
from nanolong.evaluation.provenance import current_commit

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")

# -----------------------------------------------------------------------------
# Records


def measure(models, lengths, *protocols, **settings):
    cfg = evaluate.EvaluateConfig(protocol=protocols, device="cpu", dtype="float32", **settings)
    return measure_cells(models, cfg, lengths)


def test_records_are_the_losses_of_one_sequence_at_a_time(make, text_data):
    """Of each protocol that cuts the same sequences, and of each part of `position`."""
    model = make(vocab_size=257)
    model.meta = {"dataset": str(text_data), "bos": 256}
    records = measure({"m": model}, (21,), "chunked", "last-quarter", "position", max_tokens=100)
    chunked, last_quarter, *parts = records
    val = data.Dataset(str(text_data)).val
    of_tokens, targets = [], []
    for place in loss.find_sequences(val, 21, 100):
        x, y = loss.read_sequences(val, 21, [place])
        losses = losses_of(model, x[0], y[0].clamp(min=0))
        of_tokens.append(losses.where(y[0] >= 0, math.nan))
        targets.append(y)
    of_tokens = torch.stack(of_tokens)  # nan where nothing is scored
    is_byte = torch.cat(targets) < 256
    is_byte &= ~of_tokens.isnan()
    assert is_byte.sum() < (~of_tokens.isnan()).sum()  # the end of a document is a target, too
    ranges = [(0, 21), (15, 21), *zip((0, *ENDS), ENDS, strict=False)]
    for record, (start, end) in zip(records, ranges, strict=True):
        part = of_tokens[:, start:end]
        assert record["tokens"] == (~part.isnan()).sum()
        assert record["bytes"] == is_byte[:, start:end].sum()
        assert record["loss"] == pytest.approx(part.nanmean().item(), abs=1e-5)
        assert record["n"] == (~part.isnan()).any(1).sum() and record["low"] is None
        if "by_sequence" in record:
            sums, _, _, of_bytes = zip(*record["by_sequence"], strict=True)
            assert sums == pytest.approx(part.nansum(1).tolist(), abs=1e-4)
            of_text = part.where(is_byte[:, start:end], 0).nansum(1)
            assert of_bytes == pytest.approx(of_text.tolist(), abs=1e-4)
    assert [part["position"][1] for part in parts] == ENDS
    keys = "checkpoint task protocol length loss low high n tokens bytes by_sequence ids"
    assert list(chunked) == list(last_quarter) == keys.split()


ENDS = [21 * i // 16 for i in range(1, 17)]


# -----------------------------------------------------------------------------
# A text file

TEXT = "Größe, naïve ☃ 🙂: the quick brown fox.\n" + (ROOT / "LICENSE").read_text()[:777]


@pytest.fixture
def imported(make, tmp_path):
    """A function that saves a model with a tokenizer of this kind; returns its run folder."""

    def imported(kind, bos=None):
        model = make(vocab_size=PADDED_VOCAB_SIZE, n_layer=1, pos="rope")
        model.meta = {"tokenizer": import_tokenizer(kind).to_json(), "bos": bos}
        model.save(tmp_path / "imported/step-000000")
        return tmp_path / "imported"

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


@pytest.mark.parametrize("kind, bos", [("gpt2", None), ("llama2", 1)])
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


def test_bytes_are_those_of_the_file_if_a_normalizer_changes_it(make, tmp_path):
    """NFC makes one character of a letter and its accent: two bytes of three."""
    import tokenizers

    text = "e\u0301a\u0301 " * 200
    whole = tokenizers.Tokenizer.from_str(import_tokenizer("gpt2").text)
    whole.normalizer = tokenizers.normalizers.NFC()
    files = {"tokenizer.json": whole.to_str().encode()}
    tokenizer = data.ImportedTokenizer(files, 0, None, PADDED_VOCAB_SIZE)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    model = make(vocab_size=PADDED_VOCAB_SIZE, n_layer=1)
    model.meta = {"tokenizer": tokenizer.to_json(), "bos": 0}
    (record,) = measure({"m": model}, (24,), "chunked", text=str(tmp_path / "text.txt"))
    assert record["tokens"] == len(tokenizer.encode(text))
    assert record["bytes"] == len(text.encode())


def test_a_text_that_cannot_be_scored_is_refused(imported, make, text_file, call, tmp_path):
    run = imported("gpt2")
    short, binary = (tmp_path / name for name in ("short.txt", "binary"))
    short.write_text("two words")
    binary.write_bytes(b"\xff\xf0" * 99)
    make().save(tmp_path / "nameless/step-000001")
    for checkpoint, words, phrases in (
        (run, [f"--text={tmp_path}/gone.txt"], ("gone.txt cannot be used", "no such file")),
        (run, [f"--text={binary}"], ("binary is not UTF-8: unpack it, convert",)),
        (tmp_path / "nameless", [f"--text={text_file}"], ("tokenizer", "nameless", "--dataset")),
        (run, [], ("give --text=FILE, or --dataset", f"--tokenizer={run} --name=NAME")),
        (f"\x07={run}", [f"--text={text_file}"], ("cannot be printed: give NAME=FOLDER",)),
    ):
        done = call("evaluate.py", checkpoint, *words, f"--json={tmp_path}/a.json")
        assert_refused(done, *phrases)
    assert not (tmp_path / "a.json").exists()
    phrases = ("a sequence of 24 tokens is longer than", "or give a longer validation text")
    assert_refused(call("evaluate.py", run, f"--text={short}"), *phrases)


# -----------------------------------------------------------------------------
# The command line


def test_lengths_are_by_default_multiples_of_the_shortest_original_one(runs, call, tmp_path):
    words = [runs[0], runs[2], "--max_tokens=480", "--protocol=chunked"]
    records, _ = records_of(call, tmp_path, *words)
    assert [record["length"] for record in records] == [24, 48, 96, 192] * 2


def test_records_say_what_they_came_from(runs, call, text_data, tmp_path):
    rope = runs[0]
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


def test_a_loss_that_is_no_number_is_said_to_be(runs, call, tmp_path):
    """A checkpoint whose weights are NaN; the standard of JSON has no NaN."""
    rope = runs[0]
    model = GPT.load(rope)
    model.norm.weight.data.fill_(math.nan)
    model.meta.pop("checksums")
    model.save(rope / "step-000002")
    words = ["--lengths=24", "--max_tokens=48", "--json=a.json", "--plot=a.png", "--report=a.html"]
    done = assert_success(call("evaluate.py", rope, *words, "--protocol=chunked", cwd=tmp_path))
    assert "not finite: the logits are no numbers: try --dtype=float32" in done.stdout
    text = (tmp_path / "a.json").read_text()
    assert "NaN" not in text and json.loads(text)[0]["loss"] is None
    needle = ["--task=needle", "--lengths=128", "--trials=1", "--depths=1"]
    done = call("evaluate.py", rope, *needle)
    assert done.returncode == 2 and "--dtype=float32" in done.stderr


def test_nothing_measured_is_an_error(runs, call, tmp_path):
    """The records say why, too."""
    words = [runs[1], "--lengths=48,96", "--max_tokens=96", f"--json={tmp_path}/a.json"]
    done = call("evaluate.py", *words)
    assert_refused(done, "nothing could be measured: --pos=learned has no embedding")
    records = json.loads((tmp_path / "a.json").read_text())
    assert all("--pos=learned" in record["refused"] for record in records)
    assert "refused" in done.stdout


def test_the_cost_grows_with_the_length(runs, call, tmp_path):
    """The cache holds keys and values of 2 layers, 32 channels and float32."""
    words = ["--lengths=24,96", "--max_tokens=96", "--protocol=chunked", "--cost=true"]
    records, done = records_of(call, tmp_path, runs[0], f"table={runs[1]}", *words)
    costs = [record for record in records if record["task"] == "cost"]
    assert [record.get("cache_megabytes") for record in costs] == pytest.approx(
        [24 * 2 * 2 * 32 * 4 / 1e6, 96 * 2 * 2 * 32 * 4 / 1e6, 24 * 2 * 2 * 32 * 4 / 1e6, None]
    )
    assert all(record["prefill_seconds"] > 0 for record in costs[:3])
    assert all(record["tokens_per_second"] > 0 for record in costs[:3])
    assert f"{runs[0]}: seconds of prefill" in done.stdout and "table: MB of cache" in done.stdout
    assert "refused" in costs[3]
