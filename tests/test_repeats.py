"""The gain of a longer context by repeats, against a search of every place, and on known models."""

import hashlib
import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_success, measure_cells, write_dataset

from data import Dataset
from evaluate import EvaluateConfig
from nanolong.evaluation import intervals, repeats, scoring, tables

SEPARATOR = 49
SHORT, LONG = 32, 64


@pytest.fixture
def text():
    """Two texts of 40 different tokens, in documents, in which stretches stand again."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 40, 1200)
    for start in range(80, 1160, 40):
        distance = int(rng.integers(13, 80))
        tokens[start : start + 12] = tokens[start - distance : start - distance + 12]
    tokens[[0, 60, 380, 900]] = SEPARATOR
    return tokens


def places_by_search(tokens, index, n, end):
    """The first token of the last earlier place of the n tokens up to `end`, document by document:
    -1 without one, -2 if they do not fit into the document.
    """
    separators = [i for i in range(index + 1) if tokens[i] == SEPARATOR]
    first = separators[-1] + 1 if separators else 0
    if tokens[index] == SEPARATOR or end - n + 1 < first:
        return -2
    wanted = list(tokens[end - n + 1 : end + 1])
    for start in range(end - n, first - 1, -1):
        if list(tokens[start : start + n]) == wanted:
            return start
    return -1


def test_places_are_found_as_by_a_search(text):
    trigrams, pairs, documents = repeats.repeats_of(text, text == SEPARATOR)
    for i in range(len(text)):
        assert trigrams[i] == places_by_search(text, i, 3, i), i
        assert pairs[i] == places_by_search(text, i, 2, i - 1), i
        assert documents[i] == sum(text[: i + 1] == SEPARATOR)
    assert {-2, -1} < set(trigrams.tolist())


def test_a_place_is_seen_if_its_first_token_is():
    places = np.array([-2, -1, 9, 10, 19, 20])
    masks = repeats.bucket_masks(places, places[::-1], first_near=20, first_far=10)
    found = {bucket: np.flatnonzero(mask).tolist() for bucket, mask in masks.items()}
    expected = {"near": [5], "far": [3, 4], "beyond": [2], "new": [1], "pair far": [1, 2]}
    assert found == {"all": [0, 1, 2, 3, 4, 5], **expected}


class Copier(torch.nn.Module):
    """A model that expects, with a probability of its own for each token, the token that followed
    the last earlier place of the two last tokens in its context; 50 ids have the rest in common.
    """

    def __init__(self, pos, config, copied=0.9):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.scheme = pos
        self.config = config
        self.copied = np.broadcast_to(copied, 50)
        self.meta = {}

    def forward(self, tokens, targets, positions=None, reduction="none"):
        losses = torch.zeros(tokens.shape, dtype=torch.float64)
        for row, sequence in enumerate(tokens.tolist()):
            followed_by = {}  # a pair -> the token after its last place
            for t, (pair, target) in enumerate(
                zip(pairwise([None, *sequence]), targets[row].tolist(), strict=True)
            ):
                p = 1 / 50
                if pair in followed_by:
                    copied = self.copied[followed_by[pair]]
                    p = (1 - copied) / 50 + copied * (followed_by[pair] == target)
                losses[row, t] = -np.log(p) if target >= 0 else 0
                if t + 1 < len(sequence):
                    followed_by[pair] = sequence[t + 1]
        return losses


@pytest.fixture
def measured(text, monkeypatch, make):
    """Measure a model, or with None the copier, on files; settings: EvaluateConfig's."""

    def measure_text(model, bos=None, files=None, copied=0.9, **settings):
        from data import Split

        files = files or [text, text[::-1].copy()]
        nope = make(pos="nope", block_size=LONG)
        model = model or Copier(nope.scheme, nope.config, copied)

        class Two:
            val = Split(list(map(str, range(len(files)))), 50, bos, files)
            hash = name = "two"
            tokenizer = None

            def is_text(self, y):
                return y != SEPARATOR

            def count_bytes(self, *args):
                return None

        monkeypatch.setattr(scoring, "open_texts", lambda models, cfg: {"m": Two()})
        cfg = EvaluateConfig(protocol=("repeats",), dtype="float32", **settings)
        records = measure_cells({"m": model}, cfg, (SHORT, LONG))
        return {record["bucket"]: record for record in records}

    return measure_text


@pytest.mark.parametrize("bos", [None, SEPARATOR])
def test_a_model_that_copies_gains_where_only_the_longer_context_shows_the_repeat(measured, bos):
    found = measured(None, bos=bos)
    assert found["far"]["tokens"] > 20
    assert found["far"]["gain"]["mean"] > 3
    assert found["pair far"]["gain"]["mean"] > 0.5
    assert abs(found["near"]["gain"]["mean"]) < 1e-9
    parts = [found[bucket]["tokens"] for bucket in ("near", "far", "beyond", "new")]
    # besides, a separator and the first two targets of a document have no trigram
    assert sum(parts) < found["all"]["tokens"] <= sum(parts) + 3 * 8
    total = sum(found[b]["gain"]["mean"] * found[b]["tokens"] for b in ("near", "far", "new"))
    total += found["beyond"]["gain"]["mean"] * found["beyond"]["tokens"]
    rest = found["all"]["gain"]["mean"] * found["all"]["tokens"] - total
    assert abs(rest) < 10 * (found["all"]["tokens"] - sum(parts))


def test_the_gain_of_all_is_the_difference_of_token_aligned_losses(measured, make):
    model = make(pos="alibi", vocab_size=50, block_size=LONG, n_layer=2)
    found = measured(model, stride=7)
    cfg = EvaluateConfig(protocol=("token-aligned",), dtype="float32", stride=7)
    short, long = measure_cells({"m": model}, cfg, (SHORT, LONG))
    assert found["all"]["tokens"] == short["tokens"] == long["tokens"]
    assert abs(found["all"]["gain"]["mean"] - (short["loss"] - long["loss"])) < 1e-6
    assert abs(found["all"]["loss"] - long["loss"]) < 1e-6


def test_nothing_is_gained_beyond_the_receptive_field(measured, make):
    model = make(pos="rope", vocab_size=50, block_size=LONG, n_layer=2, window=8)
    for stride in (1, 16):  # of two layers 15 tokens are seen
        found = measured(model, stride=stride)
        gains = [record["gain"]["mean"] for record in found.values() if record["tokens"]]
        assert max(map(abs, gains)) < 1e-5
    wide = make(pos="rope", vocab_size=50, block_size=LONG, n_layer=2, window=40)
    assert abs(measured(wide)["all"]["gain"]["mean"]) > 1e-5


def simulated_text(seed):
    """24 places of the longer length, in which stretches stand again: in some often, in others not,
    and now and then with a wrong token.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, 24 * LONG + 1)
    start = 60
    while start < len(tokens) - 20:
        n = int(rng.integers(4, 14))
        distance = int(rng.integers(34, 60))
        tokens[start : start + n] = tokens[start - distance : start - distance + n]
        tokens[start + int(rng.integers(n))] = rng.integers(0, 40)
        start += n + int(rng.exponential(10))
    return tokens


@pytest.mark.slow
def test_intervals_over_the_places_of_one_text_cover(measured):
    """The number to be covered is the gain in 100 texts together: of 95 % intervals 90 to 98."""
    copied = np.linspace(0, 0.9, 50)  # not every token equally well
    texts = [[simulated_text(seed)] for seed in range(100)]
    found = [measured(None, files=files, copied=copied)["far"] for files in texts]
    gains = [row[2] for record in found for row in record["by_sequence"]]
    expected = sum(gains) / sum(record["tokens"] for record in found)
    gains = [record["gain"] for record in found]
    assert 90 <= sum(gain["low"] <= expected <= gain["high"] for gain in gains) <= 98


def test_units_are_places_if_there_are_few_documents(measured, text):
    """Of one text, 18 places of 64 tokens with 16 targets each; of eight, the documents."""
    whole = np.where(text == SEPARATOR, 0, text)
    found = measured(None, files=[whole])["all"]
    assert found["texts"] == 1
    assert [row[1] for row in found["by_sequence"]] == [16] * 18
    assert "texts" not in measured(None)["all"]  # four documents, and the same again
    found = measured(None, files=[text])["all"]
    assert found["texts"] == 4 and found["n"] == 18
    found = measured(None, files=[np.append(whole[: 64 * 18], SEPARATOR)])["all"]
    assert found["texts"] == 1  # the separator at the end is not a document


def test_no_interval_if_one_place_has_most_of_the_targets():
    blank = {"bucket": "far"}
    sums = {(place, 0, 0): np.array([1.0, 1, place]) for place in range(6)}
    of_equal = repeats.make_record(blank, sums, 1, hashlib.sha256())
    assert of_equal["gain"] == intervals.mean_interval(range(6))
    sums[0, 0, 0] = np.array([50.0, 50, 50])
    gain = repeats.make_record(blank, sums, 1, hashlib.sha256())["gain"]
    assert gain == {"mean": 65 / 55, "low": None, "high": None, "n": 6}
    assert repeats.make_record(blank, sums, 8, hashlib.sha256())["gain"]["n"] == 1  # a document


@pytest.mark.parametrize(
    "of_far, sentence",
    [
        (
            {"gain": (0.3, 0.88), "texts": 1},
            "distant repeats gain 0.59 ± 0.29 at 64 tokens (one text, 12 places): "
            "the longer context is used",
        ),
        (
            {"gain": (-0.9, -0.3), "texts": 3},
            "distant repeats gain -0.60 ± 0.30 at 64 tokens (3 texts, 12 places): "
            "the longer context does harm",
        ),
        (
            {"gain": (-0.1, 0.3)},
            "no clear gain of distant repeats, 0.10 ± 0.20 at 64 tokens (12 documents): "
            "use of the longer context is not shown",
        ),
        (
            {"gain": (1e-6, 2e-6), "seeds": 12},
            "no clear gain of distant repeats, 0.00 ± 0.00 at 64 tokens (12 runs): "
            "use of the longer context is not shown",
        ),
        (
            {"gain": (None, None), "texts": 1},
            "too few distant repeats, 1,024 targets at 64 tokens: "
            "raise --max_tokens, or give a longer text, or code",
        ),
        ({}, "too few distant repeats, 0 targets at 64 tokens: raise --max_tokens"),
        (
            {"gain": (None, None), "seeds": 12},
            "no clear gain of distant repeats, 0.50 (12 runs) at",
        ),
        ({"seeds": 3}, "too few distant repeats, 0 targets at 64 tokens: raise --max_tokens"),
        ({"refused": "too long"}, None),
    ],
)
def test_a_sentence_says_whether_a_checkpoint_uses_the_longer_context(of_far, sentence):
    record = {"checkpoint": "x", "protocol": "repeats", "length": 64, "context": 32, "stride": 16}
    far = {**record, "bucket": "far", "tokens": 0, **of_far}
    if "gain" in of_far:
        low, high = of_far["gain"]
        mean = 0.5 if low is None else (low + high) / 2
        far |= {"gain": {"mean": mean, "low": low, "high": high, "n": 12}, "tokens": 1024}
    table = tables.repeats_table([far])
    assert any(f"x: {sentence}" in note for note in table.notes) == (sentence is not None)
    assert "(n = " not in table.text()
    whole = tables.repeats_table([far, {**far, "bucket": "all"}])
    assert ("over one text, 12 places, with 1,024" in whole.text()) == (far.get("texts") == 1)


def test_the_script_prints_the_table_and_refuses_a_single_length(call, runs, tmp_path):
    words = ("evaluate", runs[0], runs[2], "--protocol=repeats", "--max_tokens=16384")
    assert_refused(call(*words, "--lengths=64"), "--lengths")
    file = tmp_path / "a.json"
    done = call(*words, "--lengths=24,512", f"--json={file}", f"--plot={tmp_path / 'a.png'}")
    assert_success(done)
    assert f"{runs[2]}: pair far" in done.stdout
    about = (
        "at 512 tokens intervals are over one text, 32 places, with 384 targets, 12 a sequence\n"
    )
    assert about in done.stdout
    pattern = f"{runs[2]}: .*distant repeats.* at 512 tokens \\(one text, [0-9]+ places\\): "
    assert re.search(pattern, done.stdout)
    records = json.loads(file.read_text())
    assert {record["bucket"] for record in records} == set(repeats.BUCKETS)
    assert "reused: 2 of 2" in call(*words, "--lengths=24,512", f"--json={file}").stdout


def test_ids_without_a_tokenizer_are_measured(call, save_run, tmp_path, rng):
    """Every id is text except the separator."""
    ids = rng.integers(0, 9, 400)
    run = save_run(vocab_size=9, block_size=16)
    folder = write_dataset(tmp_path / "ids", ids, vocab_size=9, bos=0, tokenizer=None)
    is_text = Dataset(str(folder)).is_text(np.array([-1, 0, 1, 8]))
    assert is_text.tolist() == [False, False, True, True]
    words = [f"--dataset={folder}", "--lengths=16,32", "--protocol=repeats", "--max_tokens=64"]
    done = call("evaluate.py", run, *words)
    assert_success(done)
    assert "near" in done.stdout
