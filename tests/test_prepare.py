"""data/prepare.py and data/texts.py: from text to a dataset."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_refused, assert_success, content, run_python, wait_for
from makers import byte_level, write_tokenizer

import data
from data import texts
from data.prepare import find_tokenizer, prepare_text
from data.texts import prepare
from nanolong.errors import UserError
from nanolong.evaluation.scoring import TextFile

TEXT = "def f(x):\n    return 'naïve ☃' * x\n" * 40


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """An empty folder in place of data/."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(data.token_files, "HERE", folder)
    return folder


# Makes a dataset that is missing, as train.py does.
PREPARE_MISSING = """
import sys
import data
from nanolong.errors import run_main
run_main(lambda: data.prepare_missing(sys.argv[1]))
"""
# The text is encoded within a second: slowly, a signal comes while it is.
ENCODE_SLOWLY = """

import time
encode_at_once = encode_document

def encode_document(*arguments):
    time.sleep(0.01)
    return encode_at_once(*arguments)
"""


def texts_of(name):
    """The training and the validation text of a dataset of bytes, with <bos> as a null byte."""
    dataset = data.Dataset(name)
    tokens = (np.asarray(split.tokens[0]) for split in (dataset.train, dataset.val))
    return [bytes(np.where(ids == 256, 0, ids).astype(np.uint8)) for ids in tokens]


def documents_of(dataset, split):
    """The documents of a split, decoded."""
    tokens = split.tokens[0]
    places = data.find_documents(tokens, dataset.separator)
    return [dataset.tokenizer.decode(tokens[start:stop].tolist()) for start, stop in places]


@pytest.fixture
def clone(tmp_path):
    """A clone of the repository without datasets, as far as prepare.py needs it."""
    for package in ("data", "nanolong"):
        (tmp_path / package).mkdir()
        for file in (ROOT / package).glob("*.py"):
            shutil.copy(file, tmp_path / package)
    return tmp_path


def test_texts_are_read_as_they_are(tmp_path, data_folder):
    """Line ends of Windows too, without a byte order mark, by every tokenizer, and by --text."""
    content = "naïve\r\n\r\n\tb\n\r\ufeff".encode() * 100
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbf" + content)
    for name in ("bytes", "char", "bpe"):
        options = {"vocab_size": 300} if name == "bpe" else {}
        folder = prepare_text(tmp_path / "t.txt", name, tokenizer=name, **options)
        dataset = data.Dataset(folder)
        tokenizer = dataset.tokenizer
        assert dataset.bos == (256 if name == "bytes" else None)
        ids = [split.tokens[0].tolist() for split in (dataset.train, dataset.val)]
        assert b"".join(map(tokenizer.decode, ids)) == content
        text = TextFile(tmp_path / "t.txt", tokenizer, dataset.vocab_size, dataset.bos)
        assert tokenizer.decode(text.val.tokens[0]) == content
        # bits per byte are of the bytes of the file
        meta = json.loads((folder / "meta.json").read_text())
        assert sum(meta["bytes"].values()) == len(content)
        assert dataset.bytes_scale == text.bytes_scale == 1


def test_a_folder_is_split_by_whole_files(tmp_path, data_folder, capsys):
    """60 texts in three folders, next to files that are not text or are hidden."""
    source = tmp_path / "src"
    for i in range(60):
        (source / f"p{i % 3}").mkdir(parents=True, exist_ok=True)
        (source / f"p{i % 3}/f{i}.py").write_text(f"# file {i}\n" + TEXT)
    (source / "picture.png").write_bytes(b"\x89PNG some more bytes \0\0")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("secret")
    hashes = {}
    for name, val_fraction in {"one": 0.1, "again": 0.1, "other": 0.5, "least": 1e-9}.items():
        folder = prepare_text(source, name, val_fraction=val_fraction)
        hashes[name] = data.Dataset(folder).hash
        assert "left out picture.png (not UTF-8: unpack it, " in capsys.readouterr().out
    train, val = texts_of("one")
    assert train.count(b"# file") + val.count(b"# file") == 60
    assert 1 <= val.count(b"# file") <= 15
    for left_out in (b"secret", b"PNG"):
        assert left_out not in train + val
    # every document begins with <bos>
    assert train.count(b"\0") == train.count(b"\0# file") == train.count(b"# file")
    assert hashes["one"] == hashes["again"] != hashes["other"]
    # at least one file is validation
    assert texts_of("least")[1].count(b"# file") == 1


def test_a_share_of_validation_far_from_the_fraction_is_said(tmp_path, data_folder, capsys):
    """Of these 20 files the hash takes three for validation."""
    (tmp_path / "src").mkdir()
    for size, noted in ((60, False), (3000, True)):
        for i in range(20):
            n = size if i in (4, 9, 12) else 100
            (tmp_path / "src" / f"f{i}.txt").write_text("x" * n)
        prepare_text(tmp_path / "src", f"of{size}")
        printed = capsys.readouterr()
        share = re.search(r"tokens \((.*)%, whole", printed.out)[1]
        note = f"note: {share}% of the tokens are validation, not 10.0%"
        assert (note in printed.err) == noted, printed


def test_of_few_files_the_last_tenth_of_each_is_validation(tmp_path, data_folder, capsys):
    """A novel, code and a table: one of them would say nothing about the others."""
    (tmp_path / "src").mkdir()
    sizes = {"code.py": 5000, "novel.txt": 2900, "table.csv": 2000}
    for name, size in sizes.items():
        (tmp_path / "src" / name).write_bytes(name[:1].encode() * size)
    train, val = texts_of(prepare_text(tmp_path / "src", "few"))
    for name, size in sizes.items():
        assert train.count(name[:1].encode()) == size * 9 // 10
        assert val.count(name[:1].encode()) == size // 10
    assert train.count(b"\0") == val.count(b"\0") == 3
    assert "(10.0%, the last 10% of each document) from 3 doc" in capsys.readouterr().out


def write_rows(file, rows):
    """A file of JSON by its name: lines, with a byte order mark and an empty one, or a list."""
    content = json.dumps(rows, indent=1 if "long" in file.name else None)
    if "lines" in file.name:
        content = "\ufeff{}\n\n".format("\n".join(map(json.dumps, rows)))
    file.write_text(content, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "name", ["lines.jsonl", "lines.json", "lines.ndjson", "list.json", "long.json", "texts.JSONL"]
)
def test_each_row_of_a_file_of_json_is_a_document(name, tmp_path, data_folder, capsys):
    """Its text is decoded from JSON; whole rows are validation, as they are many; --text has all
    in order.
    """
    expected = [f"{i} naïve\r\n\u2028☃" for i in range(300)]
    rows = expected
    if not name.startswith("texts"):
        rows = [{"id": i, "text": text} for i, text in enumerate(expected)]
    file = write_rows(tmp_path / name, rows)
    for tokenizer in ("bytes", "char"):
        dataset = data.Dataset(prepare_text(file, tokenizer, tokenizer=tokenizer))
        train, val = (documents_of(dataset, split) for split in (dataset.train, dataset.val))
        assert sorted(train + val) == sorted(text.encode() for text in expected)
        assert 15 < len(val) < 45
        for bos in (dataset.separator, None):
            text = TextFile(file, dataset.tokenizer, dataset.vocab_size, bos)
            assert documents_of(dataset, text.val) == [text.encode() for text in expected]
            assert text.bytes_scale == 1
    assert "whole documents) from 300 documents" in capsys.readouterr().out


NOT_UTF8 = "not UTF-8: unpack it, convert"
ZEROS = "not UTF-8 text, for it has zero bytes: unpack it, convert"


@pytest.mark.parametrize("name", ["stories.txt", "lines.jsonl"])
def test_text_that_looks_like_a_separator_is_noted(name, tmp_path, data_folder, call):
    story = "Once upon a time.\n<|endoftext|>\n"
    file = write_rows(tmp_path / name, [story] * 40)
    if name.endswith(".txt"):
        file.write_text(story * 40)
    for tokenizer in ("bytes", "char"):
        done = call("data/prepare.py", file, f"--name={tokenizer}", f"--tokenizer={tokenizer}")
        note = f"note: <|endoftext|> in {name} (40 times) is plain text, and ends no document: "
        assert assert_success(done).stderr.startswith(note)
        assert ".jsonl" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 80, NOT_UTF8),
        ("a.txt", "naïve\n".encode("latin-1") * 3000, NOT_UTF8),
        ("a.txt", TEXT.encode("utf-16"), NOT_UTF8),
        ("a.txt", "abc".encode("utf-16-le"), ZEROS),
        ("a.txt", TEXT.encode() + b"\0", ZEROS),
        ("a.json", TEXT.encode("latin-1", "replace"), NOT_UTF8),
        ("a.jsonl", b'{"text": "a"}\n{"messages": []}', 'JSON without a "text" in line 2'),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', 'JSON without a "text" in line 2'),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "', "no JSON in line 3"),
        ("a.jsonl", b'{"text": "\\ud83d"}', "JSON with half a surrogate pair, which is no chara"),
        ("a.json", b'[{"text": "a"},\n "b", 3]', 'JSON without a "text" in row 3'),
        ("a.json", b'[{"text": "a"},\n{"text": "b"}', "no JSON in line 2"),
        ("a.json", b'{\n "text": "a"\n}', "no JSON in line 1"),
        ("a.json", b'{"a": ' * 100_000, "no JSON in line 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_text_is_told(name, content, reason, tmp_path, data_folder, call):
    """A single file is refused, one of a folder is left out; --tokenizer=bytes takes the bytes."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / name).write_bytes(content)
    for tokenizer in ("char", "bpe"):
        done = call("data/prepare.py", folder / name, "--name=x", f"--tokenizer={tokenizer}")
        line = assert_refused(done, f"{name} is {reason}")
    with pytest.raises(UserError, match=re.escape(f"{name} is {reason}")):
        TextFile(folder / name, data.ByteTokenizer(), 257, 256)
    assert not list(data_folder.iterdir())
    (folder / "b.txt").write_text(TEXT)
    (folder / "c.txt").touch()
    done = assert_success(call("data/prepare.py", folder, "--name=x", "--tokenizer=char"))
    assert f"left out {name} ({reason}" in done.stdout and "c.txt" not in done.stdout
    assert "from 1 documents" in done.stdout
    assert data.Dataset("x").tokenizer.characters == "".join(sorted(set(TEXT)))

    done = call("data/prepare.py", folder / name, "--name=y", "--tokenizer=bytes")
    assert (done.returncode == 0) == ("or give --tokenizer=bytes for its bytes" in line)
    if "json" in name:
        assert_refused(done, reason)
        return
    assert done.stderr.startswith(f"note: 1 of 1 files, such as {name}, are no text: their")
    train, val = (text[1:] for text in texts_of("y"))
    assert train + val == content
    done = call("data/prepare.py", folder, "--name=z", "--tokenizer=bytes")
    assert "from 2 documents" in assert_success(done).stdout and "note: 1 of 3" in done.stderr


@pytest.mark.parametrize("content", ["", "\n \n", "[]"])
def test_a_file_of_json_without_rows_is_no_text(content, tmp_path, data_folder, call):
    (tmp_path / "a.json").write_text(content)
    for tokenizer in ("bytes", "char"):
        words = [tmp_path / "a.json", "--name=x", f"--tokenizer={tokenizer}"]
        assert_refused(call("data/prepare.py", *words), "give a")
    with pytest.raises(UserError, match="empty: give a text"):
        TextFile(tmp_path / "a.json", data.ByteTokenizer(), 257, 256)


def test_bpe_learns_from_the_training_text_alone(tmp_path, data_folder):
    """Of a word that only the validation text has, no two letters become one token."""
    (tmp_path / "t.txt").write_text(TEXT * 9 + "qzqzqz " * 100)
    dataset = data.Dataset(prepare_text(tmp_path / "t.txt", "mine", tokenizer="bpe"))
    tokenizer = dataset.tokenizer
    train = tokenizer.decode(dataset.train.tokens[0].tolist())
    assert b"qz" not in train and len(tokenizer.encode("qzqzqz")) == 6
    assert len(dataset.train) < len(train) / 2
    # no pair of tokens occurs twice any more
    assert tokenizer.vocab_size < 4096


def test_the_tokenizer_can_be_that_of_a_run(tmp_path, data_folder, monkeypatch):
    meta = {"tokenizer": data.CharTokenizer("abc").to_json(), "bos": None}
    monkeypatch.setattr("nanolong.run.find_checkpoint", lambda path: Path(path))
    monkeypatch.setattr("nanolong.run.read_meta", lambda folder: meta)
    (tmp_path / "t.txt").write_text("ccab" * 10)
    tokenizer = find_tokenizer(str(tmp_path))
    dataset = data.Dataset(prepare_text(tmp_path / "t.txt", "mine", tokenizer=tokenizer))
    assert dataset.train.tokens[0][:4].tolist() == [2, 2, 0, 1]
    meta["tokenizer"] = None
    with pytest.raises(UserError, match="has no tokenizer"):
        find_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "special, settings, start, end",
    [
        (["<pad>", "<|endoftext|>"], {}, "<|endoftext|>", ""),
        (["<pad>", "<s>"], {"bos_token": "<s>", "chat_template": "é"}, "<s>", ""),
        (["<s>", "</s>"], {"bos_token": None, "eos_token": "</s>"}, "</s>", ""),
        (["<pad>"], {}, "", ""),
        (["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, "<s>", "</s>"),
        (["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "<s>"}, "<s>", ""),
        (["<s>"], {"bos_token": "<s>", "add_bos_token": True}, "<s>", ""),
    ],
)
def test_the_tokenizer_can_be_a_tokenizer_json(
    special, settings, start, end, tmp_path, data_folder, capsys
):
    """A document ends with eos if that is not what starts the next one."""
    write_rows(tmp_path / "lines.jsonl", [f"text {i}" for i in range(100)])
    theirs = byte_level(special)
    files = {"tokenizer_config": settings} if settings else {}
    write_tokenizer(tmp_path / "tok", theirs, **files)
    tokenizer = find_tokenizer(str(tmp_path / "tok/tokenizer.json"))
    folder = prepare_text(tmp_path / "lines.jsonl", "one", tokenizer=tokenizer)
    assert ("note: no token separates documents" in capsys.readouterr().out) == (not start)
    dataset = data.Dataset(folder)
    ids = np.concatenate([dataset.train.tokens[0], dataset.val.tokens[0]])
    text = "".join(map(theirs.id_to_token, ids.tolist()))
    order = [int(number) for number in re.findall(r"Ġ(\d+)", text)]
    assert sorted(order) == list(range(100))
    assert text == "".join(f"{start}textĠ{i}{end}" for i in order)
    bos = theirs.token_to_id(start)
    assert (dataset.vocab_size, dataset.separator) == (theirs.get_vocab_size(), bos)
    assert dataset.bos == (bos if "add_bos_token" in settings else None)
    meta = json.loads((folder / "meta.json").read_text())
    expected = theirs.token_to_id(settings.get("eos_token") or start)
    assert meta["tokenizer"]["ends"] == ([] if expected is None else [expected])
    for file in (tmp_path / "tok").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()

    # the same as its folder
    tokenizer = find_tokenizer(str(tmp_path / "tok"))
    other = prepare_text(tmp_path / "lines.jsonl", "two", tokenizer=tokenizer)
    assert data.Dataset(other).hash == dataset.hash


@pytest.mark.parametrize(
    "words, message",
    [
        ("empty --name=x", "no text"),
        ("short.txt --name=x", "too little text for train.bin"),
        ("good.txt --name=x --val_fraction=0", "is no fraction: give 0.1"),
        ("good.txt --name=x --tokenizer=bpe --vocab_size=256", "at least 257"),
        ("good.txt --name=../x", "--name"),
        ("good.txt --name=mine", "exists already"),
        ("good.txt --name=x --tokenizer=gpt7", "gpt7"),
        ("good.txt --name=x --tokenizer=damaged.json", "damaged.json: tokenizer.json is damaged"),
    ],
)
def test_a_refusal_leaves_nothing(words, message, tmp_path, data_folder, call):
    (tmp_path / "short.txt").write_bytes(b"a")
    (tmp_path / "good.txt").write_text(TEXT)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "empty").mkdir()
    prepare_text(tmp_path / "good.txt", "mine")
    before = content(data_folder)
    assert_refused(call("data/prepare.py", *words.split(), cwd=tmp_path), message)
    assert content(data_folder) == before


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, data_folder, monkeypatch):
    def disk_full(*arguments):
        raise OSError("No space left on device")

    (tmp_path / "t.txt").write_text(TEXT)
    monkeypatch.setattr(texts, "encode_document", disk_full)
    with pytest.raises(OSError, match="No space"):
        prepare_text(tmp_path / "t.txt", "mine")
    assert not list(data_folder.iterdir())


def test_of_two_runs_that_start_together_one_makes_the_standard_library(clone):
    command = [sys.executable, "-c", PREPARE_MISSING, "python"]
    options = {"cwd": clone, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    printed = sorted(process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], printed
    assert not printed[0] and "training and" in printed[1]
    folder = clone / "data/python"
    dataset = data.Dataset(folder)
    meta = json.loads((folder / "meta.json").read_text())
    assert 5e6 < meta["tokens"]["train"] < 2e7
    assert 3e5 < meta["tokens"]["val"]
    assert meta["files"] >= 180
    assert meta["bytes"]["val"] == (dataset.val.tokens[0] < 256).sum()
    train, val = dataset.train.tokens[0], dataset.val.tokens[0]
    assert train[0] == val[0] == dataset.bos == 256
    text = b"".join(tokens[tokens < 256].astype(np.uint8).tobytes() for tokens in (train, val))
    assert b"class ArgumentParser" in text


def test_a_missing_dataset_that_cannot_be_made_is_one_error(clone):
    (clone / "data/shakespeare.txt").write_text(TEXT)
    done = run_python(PREPARE_MISSING, "shakespeare", cwd=clone)
    assert_refused(done, "SHA-256", "remove it and try again")
    assert not (clone / "data/shakespeare").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups of signals")
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_leaves_no_half_made_dataset(number, status, clone):
    before = {*(clone / "data").iterdir()}
    with open(clone / "data/texts.py", "a") as f:
        f.write(ENCODE_SLOWLY)
    command = [sys.executable, "-c", PREPARE_MISSING, "python"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # a job in the background ignores Ctrl-C, and its children do so, too
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    # its own process group, as a terminal starts it
    process = subprocess.Popen(command, cwd=clone, start_new_session=True, **options)
    wait_for(lambda: [*clone.glob("data/.tmp-*/python/train.bin")], process)
    os.killpg(process.pid, number)
    printed, _ = process.communicate()  # until the last process of the group has ended
    assert process.returncode == status and not printed
    left = {file.name for file in {*(clone / "data").iterdir()} - before}
    assert left <= {"__pycache__", ".python.lock"}


# -----------------------------------------------------------------------------
# Downloads


def test_a_downloaded_text_that_is_another_is_refused(data_folder, monkeypatch):
    (data_folder / "shakespeare.txt").write_text(TEXT)
    with pytest.raises(UserError, match="SHA-256"):
        prepare("shakespeare")
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    monkeypatch.setattr("data.texts.SHAKESPEARE_SHA256", digest)
    assert data.Dataset(prepare("shakespeare")).tokenizer.characters == "".join(sorted(set(TEXT)))


def test_a_download_that_is_cut_off_is_not_kept(tmp_path, monkeypatch):
    """It sends 4,000 of 11,024 bytes, and then all of them."""
    sent = iter([bytes(4000), bytes(11024)])

    def open_url(*arguments, **options):
        response = io.BytesIO(next(sent))
        response.headers = {"Content-Length": "11024"}
        return response

    monkeypatch.setattr("urllib.request.urlopen", open_url)
    file = tmp_path / "x_train_0.bin"
    with pytest.raises(UserError, match="4000 of 11024"):
        texts.download("http://x", file, "put it there")
    assert not list(tmp_path.iterdir())
    for _ in range(2):  # what is there is not downloaded again
        texts.download("http://x", file, "put it there")
        assert file.stat().st_size == 11024
