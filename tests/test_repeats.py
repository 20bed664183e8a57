"""The gain of a longer context by repeats, against a search of every place, and on known models."""

import json

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_success, measure_cells, write_dataset

from data import Dataset
from evaluate import EvaluateConfig
from nanolong.evaluation import repeats, scoring

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
    """A model that expects, with 9 of 10, the token that followed the last earlier place of the
    two last tokens in its context; 50 ids have the rest in common.
    """

    def __init__(self, pos, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.pos = pos
        self.config = config
        self.meta = {}

    def forward(self, tokens, targets, positions=None, reduction="none"):
        losses = torch.zeros(tokens.shape, dtype=torch.float64)
        for row, sequence in enumerate(tokens.tolist()):
            for t in range(len(sequence)):
                p = np.full(50, 1 / 50)
                for s in range(t - 2, -1, -1):
                    if sequence[s : s + 2] == sequence[t - 1 : t + 1]:
                        p = np.full(50, 0.1 / 50)
                        p[sequence[s + 2]] += 0.9
                        break
                target = int(targets[row, t])
                losses[row, t] = -np.log(p[target]) if target >= 0 else 0
        return losses


@pytest.fixture
def measured(text, monkeypatch, make):
    """Measure a model, or with None the copier, on two files; settings: EvaluateConfig's."""

    def measure_text(model, bos=None, **settings):
        from data import Split

        model = model or Copier(make(pos="nope", block_size=LONG).pos, make(pos="nope").config)

        class Two:
            val = Split(["a", "b"], 50, bos, [text, text[::-1].copy()])
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


def test_the_script_prints_the_table_and_refuses_a_single_length(call, runs, tmp_path):
    words = ("evaluate", runs[0], runs[2], "--protocol=repeats", "--max_tokens=16384")
    assert_refused(call(*words, "--lengths=64"), "--lengths")
    file = tmp_path / "a.json"
    done = call(*words, "--lengths=24,512", f"--json={file}", f"--plot={tmp_path / 'a.png'}")
    assert_success(done)
    assert f"{runs[2]}: pair far" in done.stdout
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
