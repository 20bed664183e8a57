"""Token files, sequences, batches, skip-wise training, documents and datasets."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_success, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import token_files
from model import GPT
from nanolong.errors import LocalError, UserError

IDS = st.lists(st.integers(0, 59), max_size=60)


def make_split(folder, *files, vocab_size, bos):
    """A Split of files that hold these tokens."""
    paths = []
    for i, tokens in enumerate(files):
        paths.append(folder / f"{chr(ord('a') + i)}.bin")
        data.write_tokens(paths[-1], tokens, vocab_size)
    return data.Split(paths, vocab_size, bos)


def make_dataset(folder, tokens, vocab_size, bos=None, tokenizer=None):
    """A dataset folder whose files hold the same tokens."""
    tokenizer = tokenizer and tokenizer.to_json()
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "bos": bos}
    return write_dataset(folder, tokens, **meta, bos_default=bos is not None)


# -----------------------------------------------------------------------------
# Token files


def test_token_files_have_the_documented_forms(tmp_path):
    ids = list(range(300)) * 3
    data.write_tokens(tmp_path / "a.bin", ids, 300)
    data.write_tokens(tmp_path / "b.bin", [70000, 5], 100000)
    np.array(ids, "<u2").tofile(tmp_path / "c.bin")

    assert np.fromfile(tmp_path / "a.bin", "<i4", 3).tolist() == [20240520, 1, 900]
    assert (tmp_path / "a.bin").stat().st_size == 1024 + 1800
    assert np.fromfile(tmp_path / "b.bin", "<i4", 3).tolist() == [20240801, 7, 2]

    assert token_files.open_tokens(tmp_path / "a.bin").tolist() == ids
    assert token_files.open_tokens(tmp_path / "b.bin").tolist() == [70000, 5]
    assert token_files.open_tokens(tmp_path / "c.bin").tolist() == ids


@pytest.mark.parametrize("ids", [[3, 300], np.array([70000], np.uint32), [-1], [0.5], []])
def test_ids_outside_the_vocabulary_are_not_written(ids, tmp_path):
    with pytest.raises(UserError, match="a.bin is not written: .*, integers from 0 to 299"):
        data.write_tokens(tmp_path / "a.bin", ids, 300)
    assert not any(tmp_path.iterdir())


def test_damaged_token_files_are_refused(tmp_path):
    data.write_tokens(tmp_path / "a.bin", range(900), 900)
    whole = (tmp_path / "a.bin").read_bytes()
    damaged_files = [
        whole[:-1],
        whole + b"\0\0",
        whole[:8] + b"\xff\xff\xff\xff" + whole[12:],  # a negative number of tokens
        whole[:8] + b"\x00\x00\x00\x00" + whole[12:1024],  # no tokens
        whole[:4] + b"\x09" + whole[5:],  # another version
        b"",
    ]
    for damaged in damaged_files:
        (tmp_path / "b.bin").write_bytes(damaged)
        with pytest.raises(UserError, match="b.bin"):
            token_files.open_tokens(tmp_path / "b.bin")


@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
@pytest.mark.parametrize(
    "n, vocab_size", [(20, 70), (40, 4), (400, 15), (400, 257), (9000, 65536), (9000, 200000)]
)
def test_files_without_a_header_that_are_not_uint16_are_refused(
    n, vocab_size, dtype, rng, tmp_path
):
    """Those that are uint16 are read. Tokens are as frequent as words of a text: by Zipf's law."""
    ids = np.minimum(rng.zipf(1.2, n), vocab_size) - 1
    file = tmp_path / "train.bin"
    ids.astype(dtype).tofile(file)
    with pytest.raises(UserError, match="should be uint16.*integers of 4 or 8 bytes.*write_tokens"):
        token_files.open_tokens(file)
    if vocab_size <= 1 << 16:
        ids.astype("<u2").tofile(file)
        assert token_files.open_tokens(file).tolist() == ids.tolist()


def test_a_header_of_numpy_and_a_large_vocabulary_are_refused(tmp_path):
    """With numpy's header of 128 bytes the file would be read as uint16."""
    file = tmp_path / "train.bin"
    for dtype in ("<u2", "<i8"):
        with open(file, "wb") as f:
            np.save(f, np.arange(1000, dtype=dtype))
        with pytest.raises(UserError, match=r"train.bin has.*a file of numpy.save\(\).*write_tok"):
            token_files.open_tokens(file)
    np.arange(1000, dtype="<u2").tofile(file)
    assert len(token_files.open_tokens(file, 1 << 16)) == 1000
    with pytest.raises(UserError, match="its vocabulary is above 65,536"):
        token_files.open_tokens(file, 70_000)


def test_the_hash_of_a_large_file_depends_on_its_size_and_ends(tmp_path):
    """That of a small one on every byte."""
    file = tmp_path / "a"
    hashes = []
    for last in (b"x", b"y"):
        file.write_bytes(b"x" * 999 + last)
        hashes.append(token_files.hash_files([file]))
    with open(file, "wb") as f:
        # sparse: the file takes no space on disk
        f.truncate(70_000_000)
        hashes.append(token_files.hash_files([file]))
        f.truncate(70_000_001)
        hashes.append(token_files.hash_files([file]))
        for position in (0, 70_000_000):
            f.seek(position)
            f.write(b"x")
            f.flush()
            hashes.append(token_files.hash_files([file]))
    assert len(set(hashes)) == 6


# -----------------------------------------------------------------------------
# Sequences


@given(st.lists(IDS, min_size=1, max_size=5), st.integers(1, 20), st.booleans())
@settings(deadline=None, max_examples=50)
def test_sequences_cover_every_target_once_within_files(files, length, has_bos):
    """Against slices of the lists. With <bos> they begin with it; what separates is a target."""
    files = [[*ids, 59] for ids in files]
    bos = 59 if has_bos else None
    with tempfile.TemporaryDirectory() as folder:
        split = make_split(Path(folder), *files, vocab_size=60, bos=bos)
        expected = []
        for ids in files:
            for start in range(0, len(ids), length):
                x = [59, *ids[start : start + length - 1]] if has_bos else ids[start:][:length]
                y = ids[start : start + length] if has_bos else ids[start + 1 :][:length]
                if len(x) == len(y) == length:
                    expected.append((x, y))
        assert split.n_sequences(length).sum() == len(expected)
        found = [split.sequence(i, length) for i in range(len(expected))]
        assert [(x.tolist(), y.tolist()) for x, y in found] == expected


def test_too_little_text_and_tokens_outside_the_vocabulary_are_refused(tmp_path):
    split = make_split(tmp_path, range(10), vocab_size=10, bos=None)
    split.require_length(9)
    with pytest.raises(UserError, match="a.bin holds 10 tokens, too few for a sequence of 10"):
        split.require_length(10)
    split = data.Split(split.files, 8, None)
    with pytest.raises(LocalError, match="a.bin holds token 9, outside the vocabulary of 8"):
        split.sequence(0, 9)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=50)
def test_an_epoch_visits_every_sequence_once(sizes, length, has_bos):
    """As many as the offset that leaves the fewest, all from the same offset."""
    files = [range(100 * i, 100 * i + size) for i, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder:
        bos = 999 if has_bos else None
        split = make_split(Path(folder), *files, vocab_size=1000, bos=bos)
        n = int(split.n_sequences(length, length - 1).sum())
        if not n:
            return
        for epoch in range(3):
            starts = []
            for index in range(epoch * n, (epoch + 1) * n):
                place = split.training_location(index, length, seed=5)
                starts.append(int(split.sequence_at(*place, length)[1][0]) - (not has_bos))
            assert len(set(starts)) == n
            assert len({start % 100 % length for start in starts}) == 1


@pytest.mark.parametrize("bos", [None, 999])
def test_pose_sequences_skip_text_and_positions_independently(bos, tmp_path):
    length, max_position = 20, 80
    # every token is its own index in the text
    split = make_split(tmp_path, range(999), vocab_size=1000, bos=bos)
    last_start = 999 - length - (bos is None)
    seen = []
    for seed in range(300):
        # every other sequence lies near the end of the text
        start = (last_start - seed % 3 * 30) if seed % 2 else 0
        rng = np.random.default_rng(seed)
        x, y, positions = split.pose_sequence(0, start, length, max_position, rng)
        text = x if bos is None else y
        assert len(x) == len(y) == len(positions) == length
        assert np.array_equal(x[1:], y[:-1])
        assert bos is None or x[0] == bos
        assert (text[0], positions[0]) == (start, 0)

        # two parts, the same in text and positions; between them both skip
        steps = np.stack((np.diff(text), np.diff(positions)))
        (places,) = np.nonzero((steps > 1).any(0))
        assert len(places) <= 1 and (steps >= 1).all()
        first = int(places[0]) + 1 if len(places) else 1
        skips = steps.sum(1) - (length - 1)
        assert first <= length // 2 and (skips <= max_position - length).all()
        seen.append((first, *skips))
    first, text_skip, position_skip = np.array(seen).T
    assert {1, 10} <= set(first) and text_skip.max() > 50 and position_skip.max() > 55
    assert (text_skip != position_skip).mean() > 0.8


@pytest.mark.parametrize("length", [64, 256])
def test_both_parts_of_a_pose_sequence_are_of_one_document(length, tmp_path, rng):
    """Each token of a document is its number: it changes behind a separator only."""
    sizes = rng.integers(60, 180, 250)
    text = [token for i, n in enumerate(sizes, 1) for token in (0, *[i] * n)]
    dataset = data.Dataset(make_dataset(tmp_path / "pose", text, 251, bos=0))
    x, y, positions, _ = dataset.batch(0, 500, length, seed=3, max_position=4 * length)
    before, after = x[:, :-1], x[:, 1:]
    assert ((before == after) | (before == 0) | (after == 0)).all()
    skips = dataset.batch(0, 500, length, 3, length)[0] != x  # the same sequences without skips
    assert skips.any(1).mean() > 0.1 and (np.diff(positions) > 1).any(1).mean() > 0.9


# -----------------------------------------------------------------------------
# Documents

# documents of 5, 30, 0, 12 and 11 tokens
DOCUMENTS = [9, *[1] * 5, 9, *[2] * 30, 9, 9, *[3] * 12, 9, *[4] * 11]


@pytest.fixture
def documents(tmp_path):
    """A dataset whose documents begin with 9."""
    return data.Dataset(make_dataset(tmp_path / "documents", DOCUMENTS, 10, bos=9))


@given(st.lists(st.integers(0, 3)), st.sampled_from([None, 0, 9]))
def test_documents_begin_after_a_separator(ids, separator):
    """Against str.split()."""
    ids = np.array(ids, int)
    text = "".join(map(str, ids))
    parts = text.split(str(separator)) if separator is not None else [text]
    found = ["".join(map(str, ids[i:j])) for i, j in data.find_documents(ids, separator)]
    assert found == [part for part in parts if part]


def test_the_fraction_of_long_documents_counts_tokens(documents):
    fractions = [documents.long_fraction(length) for length in (1, 12, 13, 31)]
    assert fractions == pytest.approx([1.0, 42 / 58, 30 / 58, 0.0])


def test_short_documents_are_left_out(documents):
    documents.select(min_doc=6)
    contents = [set(tokens.tolist()) for tokens in documents.train.tokens]
    # with the separator that follows each but the last
    assert contents == [{2, 9}, {3, 9}, {4}]
    for index in range(20):
        x, y, *_ = documents.batch(index, 2, 12, 1)
        assert (x[:, 0] == 9).all()
        # a sequence stays inside a document
        assert all(len(set(targets) - {9}) == 1 for targets in y.tolist())
    documents.select(min_doc=12)
    assert [len(tokens) for tokens in documents.train.tokens] == [31, 13]
    documents.select(min_doc=100)
    with pytest.raises(UserError, match="--min_doc"):
        documents.train.require_length(3)


def test_documents_are_numbered_where_attention_stays_inside(documents):
    x = np.array([[9, 1, 9, 9, 2]])
    assert documents.document_ids(x) is None
    documents.select(separate=True)
    assert documents.document_ids(x).tolist() == [[1, 1, 2, 3, 3]]
    assert documents.batch(0, 2, 12, 1)[3].shape == (2, 12)


# -----------------------------------------------------------------------------
# Datasets


def test_files_belong_to_a_split_by_the_words_in_their_names(tmp_path):
    folder = make_dataset(tmp_path / "mine", [1, 2, 3], 5)
    (folder / "train.bin").rename(folder / "retrieval_train.bin")
    (folder / "val.bin").rename(folder / "retrieval_val.bin")
    for name in ("constraint_train_000001", "val2"):
        data.write_tokens(folder / f"{name}.bin", [1, 2, 3], 5)
    dataset = data.Dataset(folder)
    train = [file.name for file in dataset.train.files]
    val = [file.name for file in dataset.val.files]
    assert train == ["constraint_train_000001.bin", "retrieval_train.bin"]
    assert val == ["retrieval_val.bin", "val2.bin"]
    data.write_tokens(folder / "train_val.bin", [1, 2, 3], 5)
    with pytest.raises(UserError, match="train_val.bin could be"):
        data.Dataset(folder)
    for name in ("train_val", "retrieval_val", "val2"):
        (folder / f"{name}.bin").unlink()
    with pytest.raises(UserError, match="holds no val"):
        data.Dataset(folder)


def test_token_files_of_nanogpt_are_read_without_a_network(tmp_path, monkeypatch):
    def no_network(name):
        raise UserError("no network")

    monkeypatch.setattr(data.BPETokenizer, "named", no_network)
    np.arange(500, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(100, dtype="<u2").tofile(tmp_path / "val.bin")
    dataset = data.Dataset(str(tmp_path))
    assert (dataset.vocab_size, dataset.bos, len(dataset.train)) == (50257, None, 500)
    assert dataset.tokenizer is None
    assert data.Dataset(str(tmp_path), bos=True).bos == 50256
    assert data.vocabulary_size(str(tmp_path)) == 50257
    # of llm.c's shards, which have a header, some are of another vocabulary
    data.write_tokens(tmp_path / "fw_train_000001.bin", range(100), 100_000)
    with pytest.raises(UserError, match="uint32"):
        data.Dataset(str(tmp_path))
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match="pickle"):
        data.Dataset(str(tmp_path))


@pytest.mark.parametrize("change", [{"vocab_size": "9"}, {"bos": 10}])
def test_a_damaged_meta_is_refused(change, tmp_path):
    folder = make_dataset(tmp_path / "mine", [1, 2, 3], 10)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match="meta.json is damaged"):
        data.Dataset(folder)


def test_bos_and_documents_need_a_dataset_that_has_them(tmp_path):
    plain = make_dataset(tmp_path / "plain", [1, 2, 3], 5)
    with pytest.raises(
        UserError, match="no <bos>: prepare its text with --tokenizer=bytes or a run's"
    ):
        data.Dataset(plain, bos=True)
    for setting in ({"min_doc": 3}, {"separate": True}):
        with pytest.raises(UserError, match="no <bos>"):
            data.Dataset(plain).select(**setting)
    marked = make_dataset(tmp_path / "marked", [1, 2, 3], 5, bos=4)
    assert data.Dataset(marked).bos == 4
    assert data.Dataset(marked, bos=False).bos is None
    assert data.Dataset(marked, bos=False).separator == 4


def test_a_model_of_another_vocabulary_is_refused(tmp_path):
    abc = data.CharTokenizer("abc")
    dataset = data.Dataset(make_dataset(tmp_path / "mine", [0, 1, 2], 3, tokenizer=abc))
    dataset.check_model("the model", 3, abc.to_json())
    # one that is padded, or has more tokens
    for tokenizer in (abc.to_json(), data.CharTokenizer("abcd").to_json(), None):
        dataset.check_model("the model", 4, tokenizer)
    for tokenizer, remedy in ((abc.to_json(), "--tokenizer=RUN"), (None, "a vocab_size of 2")):
        with pytest.raises(UserError, match=f"of 3 and the model one of 2: .*{remedy}"):
            dataset.check_model("the model", 2, tokenizer)
    for characters in ("abd", "abdc", "ab☃"):
        with pytest.raises(UserError, match="other tokens than the model"):
            dataset.check_model("the model", 4, data.CharTokenizer(characters).to_json())


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_each_command_reads_data_of_a_part_of_the_vocabulary(
    has_tokenizer, call, save_run, tmp_path
):
    """A model of 320 ids and data of 257, with and without a tokenizer of 257."""
    meta = {"bos": None} if has_tokenizer else {"bos": None, "tokenizer": None}
    run = save_run("run", meta, vocab_size=320)
    ids = np.random.default_rng(0).integers(0, 256, 985)
    kinds = {} if has_tokenizer else {"tokenizer": None}
    dataset = f"--dataset={write_dataset(tmp_path / 'ids', ids, bos_default=False, **kinds)}"
    file = tmp_path / "a.json"
    words = [run, dataset, "--lengths=24", "--protocol=chunked", f"--json={file}"]
    assert_success(call("evaluate.py", *words, f"--report={tmp_path}/a.html"))
    model = GPT.load(run)
    x, y = (torch.tensor(ids[i : i + 984].reshape(41, 24)) for i in (0, 1))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert json.loads(file.read_text())[0]["loss"] == pytest.approx(expected, rel=1e-5)

    tiny = ["--max_iters=2", "--compile=false", "--device=cpu", "--eval_iters=2", dataset]
    assert_success(call("train.py", f"--init_from={run}", *tiny, f"--out_dir={tmp_path}/more"))
    words = [run, "--factor=2", "--learning_rate=1e-3", "--max_tokens=256"]
    assert_success(call("extend.py", *words, *tiny, f"--out_dir={tmp_path}/longer"))
    for name in ("more", "longer"):
        assert GPT.load(tmp_path / name).config.vocab_size == 320
        done = call("sample.py", tmp_path / name, "--max_new_tokens=40")
        if has_tokenizer:
            assert_success(done)
        else:
            assert_refused(done, "has no tokenizer for text: sample ids as docs/python.md")


def test_only_scored_targets_count_as_bytes(tmp_path):
    tokenizer = data.CharTokenizer("a☃")
    dataset = data.Dataset(make_dataset(tmp_path / "mine", [0, 1, 0], 2, tokenizer=tokenizer))
    assert dataset.count_bytes(*np.array([[[1, 0, 1]], [[1, -1, 0]]])).tolist() == [[3, 0, 1]]
