"""Token files, sequences, batches, skip-wise training, passkey documents and datasets."""

import json
import re

import numpy as np
import pytest
from conftest import assert_refused

import data
from nanolong.errors import LocalError, UserError


def make_split(folder, *files, vocab_size, bos):
    """A Split of files that hold these tokens."""
    paths = []
    for i, tokens in enumerate(files):
        paths.append(folder / f"{chr(ord('a') + i)}.bin")
        data.write_tokens(paths[-1], tokens, vocab_size)
    return data.Split(paths, vocab_size, bos)


def make_dataset(folder, tokens, vocab_size, bos=None, tokenizer=None, files=("train", "val")):
    """A dataset folder whose files all hold the same tokens."""
    folder.mkdir(exist_ok=True)
    for name in files:
        data.write_tokens(folder / f"{name}.bin", tokens, vocab_size)
    meta = {"tokenizer": tokenizer and tokenizer.to_json(), "vocab_size": vocab_size}
    meta |= {"bos": bos, "bos_default": bos is not None}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


# -----------------------------------------------------------------------------
# Token files


def test_token_files_have_the_documented_forms(tmp_path):
    ids = list(range(300)) * 3
    data.write_tokens(tmp_path / "a.bin", ids, 300)
    data.write_tokens(tmp_path / "b.bin", [70000, 5], 100000)
    data.write_tokens(tmp_path / "c.bin", ids, 300, raw=True)

    header = np.fromfile(tmp_path / "a.bin", "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 900]
    assert not header[3:].any()
    assert (tmp_path / "a.bin").stat().st_size == 1024 + 1800
    assert np.fromfile(tmp_path / "b.bin", "<i4", 3).tolist() == [20240801, 7, 2]
    assert (tmp_path / "c.bin").stat().st_size == 1800

    assert data.dataset.open_tokens(tmp_path / "a.bin").tolist() == ids
    assert data.dataset.open_tokens(tmp_path / "b.bin").tolist() == [70000, 5]
    assert data.dataset.open_tokens(tmp_path / "c.bin").tolist() == ids


def test_damaged_token_files_are_refused(tmp_path):
    data.write_tokens(tmp_path / "a.bin", range(900), 900)
    whole = (tmp_path / "a.bin").read_bytes()
    damaged_files = [
        whole[:-1],
        whole[:-2],
        whole + b"\0\0",
        whole[:8] + b"\xff\xff\xff\x7f" + whole[12:],  # too many tokens
        whole[:8] + b"\xff\xff\xff\xff" + whole[12:],  # a negative number of tokens
        whole[:8] + b"\x00\x00\x00\x00" + whole[12:1024],  # no tokens
        whole[:4] + b"\x09" + whole[5:],  # another version
        b"",
        b"x",
    ]
    for damaged in damaged_files:
        (tmp_path / "b.bin").write_bytes(damaged)
        with pytest.raises(UserError, match="b.bin"):
            data.dataset.open_tokens(tmp_path / "b.bin")


def test_token_files_are_not_written_with_what_they_cannot_hold(tmp_path):
    class Long(list):
        def __len__(self):
            return 1 << 31

    with pytest.raises(UserError, match="uint16"):
        data.write_tokens(tmp_path / "a.bin", [1, 2], 100000, raw=True)
    with pytest.raises(UserError, match="2,147,483,648 tokens"):
        data.write_tokens(tmp_path / "a.bin", Long(), 5)
    assert not (tmp_path / "a.bin").exists()


def test_the_hash_of_a_large_file_depends_on_its_size_and_ends(tmp_path):
    """That of a small one on every byte."""
    file = tmp_path / "a"
    hashes = []
    for last in (b"x", b"y"):
        file.write_bytes(b"x" * 999 + last)
        hashes.append(data.dataset.hash_files([file]))
    with open(file, "wb") as f:
        # sparse: the file takes no space on disk
        f.truncate(70_000_000)
        hashes.append(data.dataset.hash_files([file]))
        f.truncate(70_000_001)
        hashes.append(data.dataset.hash_files([file]))
        for position in (0, 70_000_000):
            f.seek(position)
            f.write(b"x")
            f.flush()
            hashes.append(data.dataset.hash_files([file]))
    assert len(set(hashes)) == 6


# -----------------------------------------------------------------------------
# Sequences


def test_sequences_cover_every_target_once_within_files(tmp_path):
    """With <bos> they begin with it, and it is never scored."""
    files = [9, *range(1, 8), 9, 8], range(5)
    split = make_split(tmp_path, *files, vocab_size=10, bos=None)
    assert len(split) == 15
    assert split.n_sequences(4).tolist() == [2, 1]
    assert split.n_sequences(5).tolist() == [1, 0]
    assert_sequence(split, 1, [4, 5, 6, 7], [5, 6, 7, 9])
    assert_sequence(split, 2, [0, 1, 2, 3], [1, 2, 3, 4])
    split = data.Split(split.files, 10, bos=9)
    assert split.n_sequences(4).tolist() == split.n_sequences(5).tolist() == [2, 1]
    assert_sequence(split, 0, [9, 9, 1, 2, 3], [-1, 1, 2, 3, 4])
    assert_sequence(split, 1, [9, 5, 6, 7, 9], [5, 6, 7, -1, 8])


def assert_sequence(split, index, inputs, targets):
    x, y = split.sequence(index, len(inputs))
    assert (x.tolist(), y.tolist()) == (inputs, targets)


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    make_split(tmp_path, [9, 1, 2, 3, 4], vocab_size=10, bos=None)
    split = data.Split([tmp_path / "a.bin"], 8, None)
    with pytest.raises(LocalError, match="a.bin: token 0 is 9, outside the vocabulary of 8"):
        split.sequence(0, 4)


def test_too_little_text_is_refused(tmp_path):
    split = make_split(tmp_path, range(10), vocab_size=10, bos=None)
    split.require_length(9)
    with pytest.raises(UserError, match="a.bin .* 10 tokens, too few for a sequence of 10"):
        split.require_length(10)


@pytest.mark.parametrize("bos", [None, 99])
def test_an_epoch_visits_every_sequence_once(tmp_path, bos):
    length = 7
    split = make_split(tmp_path, range(90), vocab_size=100, bos=bos)
    n = int(split.n_sequences(length, length - 1).sum())
    orders = []
    for epoch in range(3):
        indices = range(epoch * n, (epoch + 1) * n)
        starts = []
        for index in indices:
            place = split.training_location(index, length, seed=5)
            starts.append(int(split.sequence_at(*place, length)[1][0]))
        assert len(set(starts)) == n
        # all from the same offset
        assert len({start % length for start in starts}) == 1
        assert starts != sorted(starts)
        orders.append(starts)
    assert orders[0] != orders[1]
    # the offset changes between epochs
    assert len({min(starts) for starts in orders}) > 1


def test_batches_depend_on_seed_and_index_alone(text_data):
    dataset = data.Dataset(text_data)
    x, y, *_ = dataset.batch(3, 6, 32, seed=1)
    assert x.dtype == y.dtype == np.int64
    assert x.shape == y.shape == (6, 32)
    assert (x[:, 0] == 256).all()
    assert not (y == 256).any()

    again_x, again_y, *_ = data.Dataset(text_data).batch(3, 6, 32, seed=1)
    assert np.array_equal(x, again_x)
    assert np.array_equal(y, again_y)
    # the same sequences in micro-batches of another size
    halves = [dataset.batch(index, 3, 32, seed=1)[0] for index in (6, 7)]
    assert np.array_equal(np.concatenate(halves), x)
    assert not np.array_equal(dataset.batch(3, 6, 32, seed=2)[0], x)
    # a far epoch costs no more than the first
    assert dataset.batch(10**9, 2, 32, seed=1)[0].shape == (2, 32)


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
        assert positions[0] == 0
        assert text[0] == start

        text_steps = np.diff(text)
        position_steps = np.diff(positions)
        first = 1
        for steps in (text_steps, position_steps):
            if (steps > 1).any():
                first = int(np.argmax(steps > 1)) + 1
        # two parts, the same in text and positions
        assert first <= length // 2
        assert (np.delete(text_steps, first - 1) == 1).all()
        assert (np.delete(position_steps, first - 1) == 1).all()
        text_skip = text_steps.sum() - (length - 1)
        position_skip = position_steps.sum() - (length - 1)
        assert 0 <= text_skip <= max_position - length
        assert 0 <= position_skip <= max_position - length
        seen.append((first, text_skip, position_skip))
    first, text_skip, position_skip = np.array(seen).T
    assert {1, 10} <= set(first)
    assert text_skip.max() > 50
    assert position_skip.max() > 55
    assert (text_skip != position_skip).mean() > 0.8


# -----------------------------------------------------------------------------
# Passkey documents


def char_tokenizer():
    characters = set(data.synthetic.FILLER + data.synthetic.NEEDLE + "0123456789")
    return data.CharTokenizer("".join(sorted(characters)), bos=True)


@pytest.mark.parametrize("make_tokenizer", [data.ByteTokenizer, char_tokenizer])
@pytest.mark.parametrize("with_bos", [False, True])
def test_a_passkey_is_hidden_at_the_depth_and_asked_for_at_the_end(make_tokenizer, with_bos):
    tokenizer = make_tokenizer()
    bos = tokenizer.bos if with_bos else None
    for length in (24, 25, 96, 301):
        for depth in (0.0, 0.5, 0.77, 1.0):
            x, y = data.passkey(tokenizer, length, depth, np.random.default_rng(length), bos)
            assert len(x) == len(y) == length
            assert np.array_equal(x[1:], y[:-1])
            # targets may be changed without changing the inputs
            assert not np.shares_memory(x, y)

            document = [*x.tolist(), int(y[-1])]
            text = tokenizer.decode(document[with_bos:]).decode()
            hidden, asked = re.finditer(r"key (\d{3})", text)
            assert hidden[1] == asked[1] == tokenizer.decode(y[-3:].tolist()).decode()
            assert asked.end() == len(text)
            n_filler = len(text) - len("key 123. key 123")
            assert hidden.start() == round(depth * n_filler)
            rest = text.replace(hidden[0] + ". ", "", 1)[: -len("key 123")]
            assert set(rest) <= set(data.synthetic.FILLER)


def test_a_passkey_can_be_left_out():
    tokenizer = data.ByteTokenizer()
    x, y = data.passkey(tokenizer, 80, 0.5, np.random.default_rng(1), hidden=False)
    assert len(x) == len(y) == 80
    assert tokenizer.decode(x.tolist()).count(b"key") == 1


def test_a_passkey_that_cannot_be_made_is_refused():
    rng = np.random.default_rng(1)
    with pytest.raises(UserError, match="too few"):
        data.passkey(data.ByteTokenizer(), 10, 0.5, rng)
    with pytest.raises(UserError, match="does not occur"):
        data.passkey(data.CharTokenizer("abc"), 80, 0.5, rng)


# -----------------------------------------------------------------------------
# Documents

# documents of 5, 30, 0, 12 and 11 tokens
DOCUMENTS = [9, *[1] * 5, 9, *[2] * 30, 9, 9, *[3] * 12, 9, *[4] * 11]


@pytest.fixture
def documents(tmp_path):
    """A dataset whose documents begin with 9."""
    return data.Dataset(make_dataset(tmp_path / "documents", DOCUMENTS, 10, bos=9))


def test_documents_begin_after_a_separator(documents):
    assert documents.train.documents(9) == [[(1, 6), (7, 37), (39, 51), (52, 63)]]
    assert documents.train.documents(None) == [[(0, 63)]]
    # a separator that does not occur
    assert documents.train.documents(7) == [[(0, 63)]]


def test_the_fraction_of_long_documents_counts_tokens(documents):
    fractions = [documents.long_fraction(length) for length in (1, 12, 13, 31)]
    assert fractions == pytest.approx([1.0, 42 / 58, 30 / 58, 0.0])


def test_short_documents_are_left_out(documents):
    documents.select(min_doc=6)
    contents = [set(tokens.tolist()) for tokens in documents.train.tokens]
    assert contents == [{2}, {3}, {4}]
    assert documents.train.starts == [7, 39, 52]
    for index in range(20):
        x, y, positions, document_ids = documents.batch(index, 2, 12, 1)
        assert (x[:, 0] == 9).all()
        # a sequence stays inside a document
        assert all(len(set(targets)) == 1 for targets in y.tolist())
        assert positions is None
        assert document_ids is None


@pytest.mark.parametrize("min_doc, n_documents", [(5, 4), (6, 3), (11, 3), (12, 2), (30, 1)])
def test_documents_of_min_doc_tokens_are_kept(min_doc, n_documents, documents):
    documents.select(min_doc=min_doc)
    assert len(documents.train.tokens) == n_documents
    documents.select(min_doc=100)
    with pytest.raises(UserError, match="--min_doc"):
        documents.train.require_length(3)


def test_a_token_outside_the_vocabulary_is_named_by_its_place_in_the_file(documents):
    documents.train.vocab_size = 4
    selected = documents.train.select_documents(9, min_doc=0)
    with pytest.raises(LocalError, match="train.bin: token 52 is 4"):
        selected.sequence_at(3, 0, 5)


def test_documents_are_numbered_where_attention_stays_inside(documents):
    x = np.array([[9, 1, 9, 9, 2]])
    assert documents.document_ids(x) is None
    documents.select(separate=True)
    assert documents.document_ids(x).tolist() == [[1, 1, 2, 3, 3]]
    assert documents.batch(0, 2, 12, 1)[3].shape == (2, 12)


@pytest.mark.parametrize("setting", [{"min_doc": 3}, {"separate": True}])
def test_documents_need_a_separator(setting, tmp_path):
    dataset = data.Dataset(make_dataset(tmp_path / "plain", DOCUMENTS, 10))
    with pytest.raises(UserError, match="no <bos>"):
        dataset.select(**setting)


# -----------------------------------------------------------------------------
# Datasets


def test_files_belong_to_a_split_by_the_words_in_their_names(tmp_path):
    files = ("retrieval_train", "retrieval_val", "constraint_train_000001", "val2")
    folder = make_dataset(tmp_path / "mine", [1, 2, 3], 5, files=files)
    dataset = data.Dataset(folder)
    train = [file.name for file in dataset.train.files]
    val = [file.name for file in dataset.val.files]
    assert train == ["constraint_train_000001.bin", "retrieval_train.bin"]
    assert val == ["retrieval_val.bin", "val2.bin"]
    data.write_tokens(folder / "train_val.bin", [1, 2, 3], 5)
    with pytest.raises(UserError, match="train_val.bin could be"):
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
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match="pickle"):
        data.Dataset(str(tmp_path))


def test_shards_of_llm_c_are_read(tmp_path):
    for name in ("fw_train_000001.bin", "fw_train_000002.bin", "fw_val_000000.bin"):
        data.write_tokens(tmp_path / name, range(100), 50257)
    assert len(data.Dataset(str(tmp_path)).train) == 200
    (tmp_path / "fw_val_000000.bin").unlink()
    with pytest.raises(UserError, match="holds no val"):
        data.Dataset(str(tmp_path))
    (tmp_path / "fw_train_000001.bin").unlink()
    data.write_tokens(tmp_path / "fw_train_000001.bin", range(100), 100_000)
    with pytest.raises(UserError, match="uint32"):
        data.Dataset(str(tmp_path))


def test_a_dataset_that_is_not_there_is_refused_with_the_command():
    assert not data.dataset_exists("nothing")
    with pytest.raises(UserError, match="prepare.py FILE_OR_FOLDER --name=nothing"):
        data.Dataset("nothing")


@pytest.mark.parametrize(
    "change", [{"vocab_size": 0}, {"vocab_size": "9"}, {"bos": 10}, {"bos": "a"}, {"bos": -1}]
)
def test_a_damaged_meta_is_refused(change, tmp_path):
    folder = make_dataset(tmp_path / "mine", [1, 2, 3], 10)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match="meta.json is damaged"):
        data.Dataset(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    folder = make_dataset(tmp_path / "mine", [1, 2, 3], 10, tokenizer=data.ByteTokenizer())
    with pytest.raises(UserError, match="257 tokens"):
        data.Dataset(folder)


def test_bos_needs_a_dataset_that_has_one(tmp_path):
    plain = make_dataset(tmp_path / "plain", [1, 2, 3], 5)
    with pytest.raises(UserError, match="no <bos>: leave --bos out"):
        data.Dataset(plain, bos=True)
    with pytest.raises(UserError, match="no <bos>, with which out/r was trained") as error:
        data.Dataset(plain, bos=True, reader=("out/r", 5, None))
    assert "--bos" not in str(error.value)
    with pytest.raises(UserError, match="vocabulary of 5 and out/r one of 6"):
        data.Dataset(plain, bos=True, reader=("out/r", 6, None))
    marked = make_dataset(tmp_path / "marked", [1, 2, 3], 5, bos=4)
    assert data.Dataset(marked).bos == 4
    assert data.Dataset(marked, bos=False).bos is None
    assert data.Dataset(marked, bos=False).separator == 4


@pytest.mark.parametrize(
    "text, quoted, name",
    [
        ("my.txt", "my.txt", "my"),
        ("some books/a text.txt", "'some books/a text.txt'", "a-text"),
        ("some books", "'some books'", "some-books"),
    ],
)
def test_a_text_in_place_of_a_dataset_is_refused_with_the_two_commands(
    text, quoted, name, call, tmp_path
):
    (tmp_path / "some books").mkdir()
    (tmp_path / "my.txt").write_text("a text")
    (tmp_path / "some books/a text.txt").write_text("a text")
    message = assert_refused(call("train.py", f"--dataset={text}", "--out_dir=x", cwd=tmp_path))
    assert message.startswith(
        f"error: {text} is a text, not a dataset: run python data/prepare.py {quoted} "
        f"--name={name}, and then python train.py --dataset={name}"
    )


def test_a_model_of_another_vocabulary_is_refused(tmp_path):
    abc = data.CharTokenizer("abc")
    dataset = data.Dataset(make_dataset(tmp_path / "mine", [0, 1, 2], 3, tokenizer=abc))
    dataset.check_model("the model", 3, abc.to_json())
    dataset.check_model("the model", 3, None)
    with pytest.raises(UserError, match="vocabulary of 3 and the model one of 4"):
        dataset.check_model("the model", 4, abc.to_json())
    with pytest.raises(UserError, match="other text than those of the model"):
        dataset.check_model("the model", 3, data.CharTokenizer("abd").to_json())


def test_only_scored_targets_count_as_bytes(tmp_path):
    tokenizer = data.CharTokenizer("a☃")
    dataset = data.Dataset(make_dataset(tmp_path / "mine", [0, 1, 0], 2, tokenizer=tokenizer))
    assert dataset.count_bytes(np.array([1, -1, 0])) == 4
    unknown = data.Dataset(make_dataset(tmp_path / "unknown", [0, 1, 0], 2))
    assert unknown.count_bytes(np.array([1, -1, 0])) is None
