"""Datasets with a mask of scored targets: their files, sequences, training and what is refused.

The files are read by code of its own, which shares nothing with data/.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    SMALLEST,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    logged,
    newest,
    write_dataset,
)
from process_cases import train_case

import data
import train
from data import token_files
from data.prepare import prepare_tasks
from data.tasks import make_document
from nanolong import parallel
from nanolong.errors import UserError
from nanolong.run import read_meta

BYTES = data.ByteTokenizer()


def read_documents(folder, split):
    """The documents of a split, as lists of (token, whether it is scored)."""
    ids = np.fromfile(folder / f"{split}.bin", "<u2", offset=1024).tolist()
    documents = []
    for token, byte in zip(ids, (folder / f"{split}.mask").read_bytes(), strict=True):
        if byte & 2:
            documents.append([])
        documents[-1].append((token, byte & 1))
    return documents


def cut(documents, length):
    """The sequences of documents that score a target: pairs of inputs and targets as tuples, padded
    to a length.
    """
    found = []
    for document in documents:
        tokens = [token for token, _ in document]
        targets = [token if scored else -1 for token, scored in document]
        for i in range(0, len(document) - 1, length):
            x, y = tokens[i : i + length], targets[i + 1 : i + 1 + length]
            x = x[: len(y)]
            n = length - len(x)
            if max(y) >= 0:
                found.append((tuple(x + [0] * n), tuple(y + [-1] * n)))
    return found


def rows_of(x, y):
    return [(tuple(a), tuple(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def write_masked(folder, documents, **meta):
    """A dataset of documents, lists of (token, whether it is scored), the same for validation."""
    pairs = [pair for document in documents for pair in document]
    write_dataset(folder, [token for token, _ in pairs], **meta)
    starts = [i == 0 for document in documents for i in range(len(document))]
    mask = bytes(scored + 2 * start for (_, scored), start in zip(pairs, starts, strict=True))
    for split in ("train", "val"):
        (folder / f"{split}.mask").write_bytes(mask)
    return folder


@pytest.fixture(scope="session")
def tasks_data(tmp_path_factory):
    """A dataset of 300 documents of two tasks, of 30 to 120 tokens."""
    folder = tmp_path_factory.mktemp("data") / "tasks"
    prepare_tasks(folder, ["niah:1", "nth:0.5"], length=120, documents=300)
    return folder


# -----------------------------------------------------------------------------
# Making documents of tasks


def test_datasets_of_tasks_have_these_kinds_lengths_and_scores(tasks_data):
    train_documents, val_documents = (read_documents(tasks_data, name) for name in ("train", "val"))
    assert len(train_documents) == 300 and len(val_documents) == 30
    n_niah, sizes = 0, []
    for document in train_documents:
        scored = [token for token, is_scored in document if is_scored]
        assert document[0] == (256, 0) and document[-len(scored)][1]  # the end is the answer
        answer = bytes(scored).decode()
        assert answer[0] == " " and len(scored) == 4 and answer[1:].isdigit()
        text = bytes(token for token, _ in document[1:]).decode()
        n_niah += len(text.rpartition(" ? ")[2].split()) == 3  # nth asks for the 1st of a word
        sizes.append(len(document))
    assert abs(n_niah - 200) < 5 * (300 * 2 / 9) ** 0.5  # five standard deviations
    # a document has one token more than the sequence of it
    assert 31 <= min(sizes) < 50 and 115 < max(sizes) <= 121
    meta = json.loads((tasks_data / "meta.json").read_text())
    assert meta["tasks"] == ["niah", "nth"]
    assert meta["tokens"]["train"] == sum(sizes)


def test_evaluation_validation_and_training_ask_different_things(tmp_path):
    """Also two datasets of unequal lengths; the same command makes the same bytes."""
    shown = []
    for name, length in (("one", 160), ("other", 161), ("again", 160)):
        prepare_tasks(tmp_path / name, ["niah:1"], length=length, documents=100)
        for split in ("train", "val"):
            shown += [
                bytes(t for t, _ in d[1:])[-20:] for d in read_documents(tmp_path / name, split)
            ]
    assert shown[220:] == shown[:110]
    for seed in (1, 160):
        for sample in range(200):
            inputs, targets = make_document("niah", BYTES, 160, seed, sample)
            shown.append(bytes([*inputs, targets[-1]])[-20:])
    del shown[220:330]
    assert len(set(shown)) == len(shown)
    hashes = {name: data.Dataset(tmp_path / name).hash for name in ("one", "other", "again")}
    assert hashes["one"] == hashes["again"] != hashes["other"]


def test_documents_may_have_no_bos_and_another_vocabulary(tmp_path):
    characters = data.CharTokenizer("".join(map(chr, range(32, 127))))
    prepare_tasks(tmp_path / "a", ["niah:1"], characters, length=100, documents=9)
    prepare_tasks(tmp_path / "b", ["niah:1"], length=100, documents=9, bos=False)
    for name in ("a", "b"):
        assert data.Dataset(tmp_path / name).bos is None
    assert read_documents(tmp_path / "b", "train")[0][0][0] != 256
    assert data.Dataset(tmp_path / "b").separator == 256
    with pytest.raises(UserError, match="no token of this tokenizer starts a document"):
        prepare_tasks(tmp_path / "c", ["niah:1"], characters, bos=True)
    with pytest.raises(UserError, match="cannot write"):
        prepare_tasks(tmp_path / "c", ["niah:1"], data.CharTokenizer("abc"))
    with pytest.raises(UserError, match="give --bos=false, or prepare them again with --bos=true"):
        data.Dataset(tmp_path / "b", bos=True)
    assert not (tmp_path / "c").exists()


def test_prepare_makes_a_dataset_of_tasks(call, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "HERE", tmp_path)
    words = ["--task=niah:1,nth:0.5", "--length=64", "--documents=40"]
    done = assert_success(call("data/prepare.py", *words))
    assert "40 train documents of" in done.stdout and "4 val documents of" in done.stdout
    assert done.stdout.endswith("train on it with python train.py --dataset=niah-nth\n")
    assert_refused(call("data/prepare.py", *words), "exists already")
    # no document is split
    (line,) = data.Dataset("niah-nth").describe(64, 64, 8, 64)
    assert "validation on 4 of 4 sequences of 64 tokens" in line


# -----------------------------------------------------------------------------
# Sequences


@pytest.mark.parametrize("length", [120, 121, 50, 7])
def test_an_epoch_has_each_document_once_in_an_order_of_its_own(length, tasks_data):
    """Long ones in parts. Two epochs and two seeds have other orders."""
    dataset = data.Dataset(tasks_data)
    expected = cut(read_documents(tasks_data, "train"), length)
    n = len(expected)
    orders = []
    for first, seed in ((0, 1), (n, 1), (0, 2)):
        x, y, positions, docs = dataset.batch(first, n, length, seed)
        assert x.dtype == y.dtype == np.int64 and positions is None and docs is None
        orders.append(rows_of(x, y))
        assert sorted(orders[-1]) == sorted(expected)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    # however it is asked for
    parts = [dataset.batch(i, 3, length, 1)[0] for i in range(n - 6, n + 6, 3)]
    assert np.array_equal(np.concatenate(parts), dataset.batch(n - 6, 12, length, 1)[0])
    found = [dataset.val.sequence(i, length) for i in dataset.val.spaced(0, length)]
    assert rows_of(*map(np.stack, zip(*found, strict=True))) == cut(
        read_documents(tasks_data, "val"), length
    )


def test_only_the_mask_says_where_documents_are_and_what_counts(tmp_path):
    """Not <bos>, which stands within a document here, and not its first token's score."""
    documents = [[(65, 1), (256, 0), (66, 1), (67, 0)], [(68, 0)], [(256, 0), (69, 1)]]
    documents.append([(70, 1), (71, 0), (72, 0)])  # scores no target
    dataset = data.Dataset(write_masked(tmp_path / "a", documents))
    dataset.select(separate=True)
    x, y, _, docs = dataset.batch(0, 2, 4, 1)
    expected = [((65, 256, 66, 0), (-1, 66, -1, -1)), ((256, 0, 0, 0), (69, -1, -1, -1))]
    assert sorted(rows_of(x, y)) == expected
    assert dataset.train.n_sequences(4).sum() == 2
    assert not docs.any()
    assert not dataset.document_ids(torch.from_numpy(x)).any()
    x, y, positions, _ = dataset.batch(0, 2, 4, 1, max_position=99)
    assert sorted(rows_of(x, y)) == expected and positions.tolist() == [[0, 1, 2, 3]] * 2


def test_a_mask_is_part_of_the_hash_and_is_checked(tasks_data, tmp_path):
    folder = shutil.copytree(tasks_data, tmp_path / "tasks")
    before = data.Dataset(folder).hash
    mask = (folder / "val.mask").read_bytes()
    (folder / "val.mask").write_bytes(mask.replace(b"\1", b"\0", 1))
    assert data.Dataset(folder).hash != before
    for bad, message in (
        (mask[:-1], f"val.bin has {len(mask) - 1} bytes for {len(mask)} tokens"),
        (b"", "has 0 bytes"),
        (b"\0" + mask[1:], "val.mask starts no document at token 0.* and 2 more"),
        (mask[:-1] + b"\4", "val.mask .* bytes above 3: write"),
        (b"\2" + bytes(len(mask) - 1), "scores no token but the first"),
    ):
        (folder / "val.mask").write_bytes(bad)
        with pytest.raises(UserError, match=message):
            data.Dataset(folder)
    (folder / "val.mask").unlink()
    with pytest.raises(UserError, match="val.mask is missing, .*: write one for each token file"):
        data.Dataset(folder)
    (folder / "train.mask").unlink()
    assert data.Dataset(folder).val.masked_file is None


def test_mixtures_have_masked_and_other_sequences(tasks_data, text_data):
    dataset = data.open_dataset(f"{text_data}:0.7,{tasks_data}:0.3")
    n = 3000
    x, y, *_ = dataset.batch(0, n, 120, 5)
    documents = set(cut(read_documents(tasks_data, "train"), 120))
    is_task = np.array([row in documents for row in rows_of(x, y)])
    assert abs(is_task.sum() - 0.3 * n) < 5 * (n * 0.21) ** 0.5
    text = data.Dataset(text_data).batch(0, n, 120, 5)
    assert np.array_equal(x[~is_task], text[0][~is_task])
    dataset.select(separate=True)
    *_, positions, docs = dataset.batch(0, 40, 120, 5, max_position=500)
    assert not docs[is_task[:40]].any() and docs[~is_task[:40]].all(1).any()
    has_skips = (np.diff(positions) > 1).any(1)
    assert not has_skips[is_task[:40]].any() and has_skips[~is_task[:40]].any()
    with pytest.raises(UserError, match="leave out --min_doc"):
        dataset.select(min_doc=3)
    assert dataset.tasks == {"niah", "nth"}


# -----------------------------------------------------------------------------
# Training, validation and evaluation


def test_losses_are_those_of_the_scored_targets(tasks_data, make, call, tmp_path):
    model = make(vocab_size=257, block_size=120)
    found = train.estimate_loss(model, data.Dataset(tasks_data), train.TrainConfig(**SMALLEST))
    sequences = cut(read_documents(tasks_data, "val"), 120)
    chosen = [sequences[i * 30 // 4] for i in range(4)]
    x, y = (torch.tensor(column) for column in zip(*chosen, strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1).item()
    assert found["val_loss"] == pytest.approx(expected, rel=1e-5)
    # the tokens are bytes
    assert found["val_bits_per_byte"] == pytest.approx(expected / np.log(2), rel=1e-5)

    # a step: the mean over the scored targets of two sequences
    words = ["--batch_size=2", "--learning_rate=0", "--max_iters=1", "--block_size=120"]
    run = tmp_path / "run"
    words = [*TINY, *words, f"--dataset={tasks_data}", f"--out_dir={run}"]
    assert_success(call("train.py", *words))
    model = train.GPT.load(run)
    x, y = map(torch.from_numpy, data.Dataset(tasks_data).batch(0, 2, 120, 1337)[:2])
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1).item()
    assert logged(run, "loss") == pytest.approx([expected], rel=1e-4)


def test_a_run_says_which_documents_are_split_and_goes_on_at_the_next(
    tasks_data, call, tmp_path, monkeypatch
):
    """Also with another batch size, and its meta.json names the tasks."""
    seen = []
    forward = train.GPT.forward

    def spied(self, tokens, targets=None, *args, **kwargs):
        if self.training:
            seen.extend(rows_of(tokens, targets))
        return forward(self, tokens, targets, *args, **kwargs)

    monkeypatch.setattr(train.GPT, "forward", spied)
    words = ["train.py", *TINY, f"--dataset={tasks_data}", "--block_size=64"]
    whole, part = [f"--out_dir={tmp_path}/{name}" for name in ("whole", "part")]
    n_long = sum(len(document) > 65 for document in read_documents(tasks_data, "train"))
    line = f"{n_long} of 300 documents of {tasks_data} are too long for 64 tokens, and are split"
    assert assert_success(call(*words, whole)).stdout.count(line) == 1
    expected, seen[:] = seen[:], []
    assert len(expected) == 32 and len(set(expected)) == 32
    assert_success(call(*words, part, "--stop_at=4"))
    assert_success(call(*words, part, "--init_from=resume", "--stop_at=8"))
    assert_same_bits(tmp_path / "whole", tmp_path / "part")
    assert seen == expected
    assert_success(call(*words, part, "--init_from=resume", "--max_iters=16", "--batch_size=3"))
    x, y, *_ = data.Dataset(tasks_data).batch(0, 56, 64, 1337)
    assert seen == rows_of(x, y)
    assert read_meta(newest(tmp_path / "part"))["tasks"] == ["niah", "nth"]


def test_processes_share_the_sequences_of_a_step(tasks_data, make, monkeypatch):
    model = make(vocab_size=257, block_size=64)
    dataset = data.Dataset(tasks_data)
    cfg = train.TrainConfig(**{**SMALLEST, "gradient_accumulation_steps": 4})
    seen = {}
    for rank in (0, 1):
        monkeypatch.setattr(parallel, "rank_and_world", lambda rank=rank: (rank, 2))
        batches = train.Batches(dataset, model, cfg, 64, 0, 0)
        for _ in range(4):
            inputs, n_targets, _ = batches.ready
            assert n_targets == (inputs["targets"] >= 0).sum()
            seen[batches.first] = rows_of(inputs["tokens"], inputs["targets"])
            batches.advance()
    x, y, *_ = dataset.batch(0, 16, 64, cfg.seed)
    assert sum((seen[first] for first in sorted(seen)), []) == rows_of(x, y)


@pytest.mark.slow
def test_two_processes_compute_the_losses_of_one(tasks_data, run, tmp_path):
    """Though their micro-batches have unequal numbers of scored targets."""
    cases = []
    for name in ("one", "two"):
        settings = {"dataset": str(tasks_data), "out_dir": str(tmp_path / name)}
        cases.append({"model": {"pos": "rope"}, "train": settings})
    (tmp_path / "cases.json").write_text(json.dumps(cases[1:]))
    assert_success(run("tests/process_cases.py", tmp_path / "cases.json", processes=2))
    train_case(cases[0])
    for name in ("loss", "val_loss", "val_bits_per_byte"):
        one, two = (logged(tmp_path / folder, name) for folder in ("one", "two"))
        assert len(one) >= 3 and two == pytest.approx(one, abs=1e-5)


def test_masked_runs_are_evaluated_extended_and_named(tasks_data, text_data, call, tmp_path):
    """Running text is scored on a text only; what tasks a model knows outlives other data."""
    run, extended = tmp_path / "run", tmp_path / "extended"
    words = [*TINY, "--block_size=64", f"--dataset={tasks_data}", f"--out_dir={run}"]
    assert_success(call("train.py", *words))
    evaluate = ["evaluate.py", run, "--lengths=64", "--device=cpu"]
    assert_refused(call(*evaluate), "has a mask of scored targets", "--text=FILE")
    assert_success(call(*evaluate, f"--dataset={text_data}", "--max_tokens=256"))
    needle = ["--task=needle", "--trials=2", "--depths=2"]
    assert "not trained on" not in assert_success(call(*evaluate, *needle)).stderr

    words = ["extend.py", run, "--factor=2", "--max_iters=2", "--device=cpu", "--max_tokens=512"]
    mixture = f"{tasks_data}:0.5,{text_data}:0.5"
    done = assert_success(call(*words, f"--out_dir={extended}", f"--dataset={mixture}"))
    assert done.stdout.count(f"{tasks_data}, extended: not compared, because its documents") == 1
    assert done.stdout.count("not compared") == 2  # before and after
    assert f"{text_data}, 64 tokens, last quarter" in done.stdout
    assert "loss_tasks" in str(logged(extended)[0])
    mixed = assert_refused(
        call("evaluate.py", extended, "--device=cpu"), f"give --dataset={text_data}"
    )
    assert f"--dataset={tasks_data}" not in mixed
    done = assert_success(call(*words, f"--out_dir={tmp_path}/text", f"--dataset={text_data}"))
    evaluate[1] = tmp_path / "text"
    assert "not trained on" not in assert_success(call(*evaluate, *needle)).stderr
    ruler = assert_success(call(*evaluate, "--task=ruler", "--ruler=multikey", "--trials=2"))
    assert "not trained on multikey documents (data/prepare.py --task=multikey:1)" in ruler.stderr
    words += ["--method=drope", "--options=scale=fit", f"--out_dir={tmp_path}/scale"]
    assert_refused(call(*words), "has a mask of scored targets")
