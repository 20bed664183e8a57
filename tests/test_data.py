"""Tokenizers, token files, windows and batches."""
import base64
import json
import shutil
import zlib

import numpy as np
import pytest

import data
from config import UserError
from conftest import ROOT
from data.prepare import build, prepare_text

TEXT = "def f(x):\n    return 'naïve ☃' * x\n" * 40


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A data/ of the test's own."""
    monkeypatch.setattr(data, "HERE", tmp_path / "data")
    (tmp_path / "data").mkdir()
    return tmp_path


def test_tokenizers_round_trip():
    char = data.Char("".join(sorted(set(TEXT))), bos=True)
    for tokenizer in (data.Bytes(), char):
        again = data.from_json(json.loads(json.dumps(tokenizer.to_json())))
        ids = again.encode(TEXT)
        assert again.decode(ids) == TEXT.encode() and max(ids) < again.vocab_size == tokenizer.vocab_size and again.bos == tokenizer.bos == again.vocab_size - 1
        assert again.lengths[ids].sum() == len(TEXT.encode()) and again.lengths[again.bos] == 0 and again.decode([again.bos]) == b""
    assert data.Bytes().decode(data.Bytes().encode(b"\xff\x00")) == b"\xff\x00"
    with pytest.raises(UserError, match="'q'"):
        char.encode("q")
    assert "".join(data.stream(data.Bytes().encode("a☃b"), data.Bytes())) == "a☃b"
    assert list(data.stream([0xe2, 0x98, 0x83, 0xe2, 65], data.Bytes())) == ["☃", "\ufffdA"]


def test_gpt2_tokenizer_carries_its_ranks(here):
    """The real encoding, and again from a checkpoint's JSON alone."""
    try:
        gpt2 = data.BPE.named("gpt2")
    except UserError as error:
        pytest.skip(str(error))
    again = data.from_json(json.loads(json.dumps(gpt2.to_json())))
    for text in (TEXT, "", "<|endoftext|>", " \u200b𝄞 ١٢ \r\n"):
        assert again.encode(text) == gpt2.encode(text) and again.decode(again.encode(text)) == text.encode()
        assert again.lengths[again.encode(text)].sum() == len(text.encode())
    assert again.encode("Hello world") == [15496, 995] and again.vocab_size == 50257 and again.bos == 50256
    (here / "t.txt").write_text(TEXT)
    d = data.Dataset(prepare_text(here / "t.txt", "bpe", tokenizer="gpt2"))
    assert d.vocab_size == 50257 and d.bos is None
    assert d.tokenizer.decode(d.train.tokens[0][1:].tolist()) == TEXT[:int(len(TEXT) * .9)].encode()
    assert data.Dataset(here / "data" / "bpe", bos=True).bos == 50256


def test_documents(tmp_path):
    """Where they begin and end; those that are long enough; those that fill a window twice; which number each token has."""
    stream = [9, *[1] * 5, 9, *[2] * 30, 9, 9, *[3] * 12, 9, *[4] * 11]
    for name in ("train", "val"):
        data.write_tokens(tmp_path / f"{name}.bin", stream, 10)
    meta = {"tokenizer": None, "vocab_size": 10, "bos": 9, "bos_default": True}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    d = data.Dataset(tmp_path)
    assert d.train.documents(9) == [[(1, 6), (7, 37), (39, 51), (52, 63)]] and d.train.documents(None) == [[(0, 63)]] and d.train.documents(7) == [[(0, 63)]]
    assert [d.share_of_long(n) for n in (1, 12, 13, 31)] == pytest.approx([1.0, 42 / 58, 30 / 58, 0.0])
    assert d.documents_of(np.array([[9, 1, 9, 9, 2]])) is None
    d.select(12, min_doc=6, upsample=3, separate=True)
    assert [sorted(set(t.tolist())) for t in d.train.tokens] == [[2]] * 3 + [[3]] * 3 + [[4]] and d.train.starts == [7, 7, 7, 39, 39, 39, 52]
    assert d.documents_of(np.array([[9, 1, 9, 9, 2]])).tolist() == [[1, 1, 2, 3, 3]]
    for number in range(20):  # windows stay inside a document
        x, y, positions, docs = d.batch(number, 2, 12, 1)
        assert (x[:, 0] == 9).all() and all(len(set(row)) == 1 for row in y.tolist()) and positions is None and (docs == 1).all()
    with pytest.raises(UserError, match="--min_doc"):
        d.select(12, min_doc=100)
        d.train.require(12)
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "bos": None, "bos_default": False}))
    for words in (dict(min_doc=3), dict(upsample=2), dict(separate=True)):
        with pytest.raises(UserError, match="no <bos>"):
            data.Dataset(tmp_path).select(12, **words)


@pytest.mark.parametrize("bos", [None, 999])
def test_skip_wise_windows(bos, tmp_path):
    """PoSE by its definition, on a text whose tokens are their indices: two parts, the first of at most half; gaps in text and positions each within reach - length, and independent."""
    data.write_tokens(tmp_path / "t.bin", np.arange(999), 1000)
    split, seen = data.Split([tmp_path / "t.bin"], 1000, bos), []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        start = seed % 2 * (999 - 20 - (bos is None) - seed % 3 * 30)  # near the end too
        x, y, positions = split.skipped(0, start, 20, 80, rng)
        assert len(x) == len(y) == len(positions) == 20 and positions[0] == 0
        text = y if bos is not None else x
        gaps, jumps = np.diff(text), np.diff(positions)
        first = int(np.argmax(jumps > 1)) + 1 if (jumps > 1).any() else int(np.argmax(gaps > 1)) + 1 if (gaps > 1).any() else 1
        assert text[0] == start and (np.delete(gaps, first - 1) == 1).all() and (np.delete(jumps, first - 1) == 1).all() and first <= 10
        assert 0 <= jumps.sum() - 19 <= 60 and 0 <= gaps.sum() - 19 <= 60 and (bos is None or x[0] == bos) and np.array_equal(x[1:], y[:-1])
        seen.append((first, jumps.sum() - 19, gaps.sum() - 19))
    first, jump, skip = np.array(seen).T
    assert {1, 10} <= set(first) and jump.max() > 55 and skip.max() > 50 and (jump != skip).mean() > 0.8


def test_passkeys(here):
    """Read back from the text: one key, at the depth asked for, of the length asked for, and the same digits at the end; or none; of bytes and characters."""
    import re
    for tokenizer in (data.Bytes(), data.Char("".join(sorted(set(data.FILLER + data.NEEDLE + "0123456789"))), bos=True)):
        for length in (24, 25, 96, 301):
            for depth in (0.0, 0.5, 1.0):
                for bos in (None, tokenizer.bos):
                    rng = np.random.default_rng(length)
                    x, y = data.passkey(tokenizer, length, depth, rng, bos)
                    assert len(x) == len(y) == length and np.array_equal(x[1:], y[:-1]) and x.base is not y.base
                    text = tokenizer.decode([*x.tolist()[bos is not None:], y[-1]]).decode()
                    (first, second) = re.finditer(r"key (\d{3})", text)
                    assert first[1] == second[1] == tokenizer.decode(y[-3:].tolist()).decode() and second.end() == len(text)
                    room = len(text) - len("key 123. key 123")
                    assert first.start() == round(depth * room) and set(text.replace(first[0] + ". ", "", 1)[:-7]) <= set(data.FILLER)
        x, y = data.passkey(tokenizer, 80, 0.5, np.random.default_rng(1), None, hidden=False)
        assert len(re.findall("key", tokenizer.decode(x.tolist()).decode())) == 1 and len(x) == 80
    with pytest.raises(UserError, match="too few"):
        data.passkey(data.Bytes(), 10, 0.5, np.random.default_rng(1))
    with pytest.raises(UserError, match="does not occur"):
        data.passkey(data.Char("abc"), 80, 0.5, np.random.default_rng(1))


def test_batches_with_passkeys(text_data):
    """So many of the windows, only their digits scored, the same for any size of micro-batch; the other windows as without."""
    d = data.Dataset(text_data)
    x, y, *_ = d.batch(0, 200, 64, 7, passkeys=0.25)
    plain, _ = d.train.batch(0, 200, 64, 7)
    keys = (y >= 0).sum(1) == data.DIGITS
    assert 30 <= keys.sum() <= 70 and np.array_equal(x[~keys], plain[~keys])
    for row, target in zip(x[keys], y[keys]):
        assert (np.diff(np.flatnonzero(target >= 0)) == 1).all() and b"key" in bytes(row[1:].tolist()) and 15 <= (target >= 0).argmax() < 64
    halves = [d.batch(n, 100, 64, 7, passkeys=0.25) for n in (0, 1)]
    assert np.array_equal(np.concatenate([h[0] for h in halves]), x) and not np.array_equal(d.batch(0, 200, 64, 8, passkeys=0.25)[0], x)
    x, y, positions, _ = d.batch(0, 8, 64, 7, reach=256, passkeys=0.5)
    assert positions.shape == (8, 64) and positions.max() < 256


def test_a_bpe_of_its_own_making():
    """Any tiktoken encoding travels whole: pattern, ranks and special tokens."""
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
    mine = data.BPE(tiktoken.Encoding("mine", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}))
    again = data.from_json(json.loads(json.dumps(mine.to_json())))
    assert again.encode("abcab abc") == mine.encode("abcab abc") == [257, 256, 32, 257]
    assert again.vocab_size == 301 and again.bos == 300 and again.lengths[[257, 300]].tolist() == [3, 0]


def test_token_files(tmp_path):
    ids = list(range(300)) * 3
    data.write_tokens(tmp_path / "a.bin", ids, 300)
    data.write_tokens(tmp_path / "b.bin", [70000, 5], 100000)
    data.write_tokens(tmp_path / "c.bin", ids, 300, raw=True)
    header = np.fromfile(tmp_path / "a.bin", "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 900] and not header[3:].any() and (tmp_path / "a.bin").stat().st_size == 1024 + 1800
    assert np.fromfile(tmp_path / "b.bin", "<i4", 3).tolist() == [20240801, 7, 2] and data.open_tokens(tmp_path / "b.bin").tolist() == [70000, 5]
    assert data.open_tokens(tmp_path / "a.bin").tolist() == ids == data.open_tokens(tmp_path / "c.bin").tolist() and (tmp_path / "c.bin").stat().st_size == 1800
    with pytest.raises(UserError, match="uint16"):
        data.write_tokens(tmp_path / "d.bin", ids, 100000, raw=True)
    whole = (tmp_path / "a.bin").read_bytes()
    for damaged in (whole[:-1], whole[:-2], whole + b"\0\0", whole[:8] + b"\xff\xff\xff\x7f" + whole[12:], whole[:8] + b"\xff\xff\xff\xff" + whole[12:], whole[:4] + b"\x09" + whole[5:], b"", b"x"):
        (tmp_path / "e.bin").write_bytes(damaged)
        with pytest.raises(UserError, match="e.bin"):
            data.open_tokens(tmp_path / "e.bin")


def test_windows(tmp_path):
    """Every target once, in order, within files; <bos> first and never scored."""
    data.write_tokens(tmp_path / "a.bin", [9, *range(1, 8), 9, 8], 10)
    data.write_tokens(tmp_path / "b.bin", list(range(5)), 10)
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    plain, bos = data.Split(files, 10, None), data.Split(files, 10, 9)
    assert plain.count(4).tolist() == [2, 1] and bos.count(4).tolist() == [2, 1] and plain.count(5).tolist() == [1, 0] and bos.count(5).tolist() == [2, 1]
    x, y = plain.window(1, 4)
    assert x.tolist() == [4, 5, 6, 7] and y.tolist() == [5, 6, 7, 9]
    x, y = plain.window(2, 4)
    assert x.tolist() == [0, 1, 2, 3] and y.tolist() == [1, 2, 3, 4]
    x, y = bos.window(0, 5)
    assert x.tolist() == [9, 9, 1, 2, 3] and y.tolist() == [-1, 1, 2, 3, 4]
    x, y = bos.window(1, 5)
    assert x.tolist() == [9, 5, 6, 7, 9] and y.tolist() == [5, 6, 7, -1, 8]
    low = data.Split(files, 8, None)
    with pytest.raises(UserError, match=r"a.bin: token 0 is 9, outside the vocabulary of 8"):
        low.window(0, 4)


@pytest.mark.parametrize("bos", [None, 99])
def test_an_epoch_visits_every_window_once(tmp_path, bos):
    data.write_tokens(tmp_path / "a.bin", list(range(90)), 100)
    split = data.Split([tmp_path / "a.bin"], 100, bos)
    n, L = int(split.count(7, 6).sum()), 7
    orders = []
    for epoch in range(3):
        targets = [split.batch(number, 1, L, 5)[1][0] for number in range(epoch * n, (epoch + 1) * n)]
        starts = [int(t[0]) for t in targets]
        assert len(set(starts)) == n and len({s % L for s in starts}) == 1  # windows of one grid, each once
        orders.append(starts)
    assert orders[0] != orders[1] and sorted(orders[0]) != sorted(orders[1]) or sorted(orders[1]) != sorted(orders[2])  # the grid's offset moves


def test_batches_depend_on_seed_and_number_alone(text_data):
    d = data.Dataset(text_data)
    a = d.train.batch(3, 6, 32, 1)
    again = data.Dataset(text_data).train.batch(3, 6, 32, 1)
    assert all(np.array_equal(x, y) for x, y in zip(a, again)) and a[0].dtype == np.int64 and a[0].shape == (6, 32)
    halves = [d.train.batch(n, 3, 32, 1) for n in (6, 7)]  # the same samples in micro-batches of another size
    assert np.array_equal(np.concatenate([h[0] for h in halves]), a[0])
    assert not np.array_equal(d.train.batch(3, 6, 32, 2)[0], a[0])
    far = d.train.batch(10**9, 2, 32, 1)  # the millionth epoch costs no more than the first
    assert far[0].shape == (2, 32)
    assert (a[0][:, 0] == 256).all() and not (a[1] == 256).any()


def test_prepare_a_file(here):
    (here / "t.txt").write_bytes(TEXT.encode())
    for tokenizer in ("bytes", "char"):
        d = data.Dataset(prepare_text(here / "t.txt", tokenizer, tokenizer=tokenizer))
        text = TEXT.encode() if tokenizer == "bytes" else TEXT
        assert d.tokenizer.decode(d.train.tokens[0].tolist()) + d.tokenizer.decode(d.val.tokens[0].tolist()) == TEXT.encode()
        assert len(d.val) - (tokenizer == "bytes") == len(text) - int(len(text) * .9)
        assert (d.bos, d.tokenizer.bos) == ((256, 256) if tokenizer == "bytes" else (None, None))
    with pytest.raises(UserError, match="exists"):
        prepare_text(here / "t.txt", "char", tokenizer="char")
    with pytest.raises(UserError, match="no <bos>"):
        data.Dataset("char", bos=True)
    assert data.Dataset("bytes", bos=False).bos is None and d.bytes_of(np.array([d.tokenizer.index["☃"], -1, 0])) == 4


def test_prepare_a_folder(here):
    for i in range(60):
        (here / "src" / f"p{i % 3}").mkdir(parents=True, exist_ok=True)
        (here / "src" / f"p{i % 3}" / f"f{i}.py").write_text(f"# file {i}\n" + TEXT)
    (here / "src" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (here / "src" / ".git").mkdir()
    (here / "src" / ".git" / "config").write_text("secret")
    d = data.Dataset(prepare_text(here / "src", "folder"))
    train, val = (bytes(t for t in split.tokens[0] if t < 256) for split in (d.train, d.val))
    assert train.count(b"# file") + val.count(b"# file") == 60 and 1 <= val.count(b"# file") <= 15 and b"secret" not in train + val and b"PNG" not in train + val
    assert (np.asarray(d.train.tokens[0]) == 256).sum() == train.count(b"# file")
    again = data.Dataset(prepare_text(here / "src", "again"))
    assert again.hash == d.hash != data.Dataset(prepare_text(here / "src", "more", val_fraction=0.5)).hash


def test_what_prepare_refuses(here):
    (here / "bad.txt").write_bytes(b"abc\xff\xfe" * 9)
    (here / "empty").mkdir()
    (here / "none.txt").write_bytes(b"")
    (here / "good.txt").write_text(TEXT)
    for path, options, words in (("bad.txt", dict(tokenizer="char"), "byte 3"), ("empty", {}, "no text"), ("none.txt", {}, "no text"), ("gone.txt", {}, "no file"),
                                 ("good.txt", dict(tokenizer="gpt7"), "gpt7"), ("bad.txt", dict(val_fraction=0.0), "between 0 and 1"), ("bad.txt", dict(name="../x"), "--name")):
        with pytest.raises(UserError, match=words):
            prepare_text(here / path, **{"name": "x", **options})
    assert not list((here / "data").iterdir())  # nothing half-made is left
    prepare_text(here / "bad.txt", "fine")  # as bytes anything goes


def test_foreign_token_folders(here, monkeypatch):
    """nanoGPT's train.bin and val.bin, and llm.c's shards, as they are."""
    folder = here / "owt"
    folder.mkdir()
    np.arange(500, dtype="<u2").tofile(folder / "train.bin")
    np.arange(100, dtype="<u2").tofile(folder / "val.bin")
    d = data.Dataset(str(folder))
    assert d.vocab_size == 50257 and d.bos is None and len(d.train) == 500
    assert data.Dataset(str(folder), bos=True).bos == 50256
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match="pickle"):
        data.Dataset(str(folder))
    shards = here / "fineweb"
    shards.mkdir()
    for name in ("fw_train_000001.bin", "fw_train_000002.bin", "fw_val_000000.bin"):
        data.write_tokens(shards / name, range(100), 50257)
    assert len(data.Dataset(str(shards)).train) == 200
    (shards / "fw_val_000000.bin").unlink()
    with pytest.raises(UserError, match="val"):
        data.Dataset(str(shards))
    with pytest.raises(UserError, match="prepare.py"):
        data.Dataset("nothing")


def test_fingerprint_notices_a_changed_byte(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    one = data.fingerprint([tmp_path / "a"])
    (tmp_path / "a").write_bytes(b"x" * 999 + b"y")
    assert data.fingerprint([tmp_path / "a"]) != one
    with open(tmp_path / "big", "wb") as f:
        f.truncate(70_000_000)
    two = data.fingerprint([tmp_path / "big"])
    with open(tmp_path / "big", "r+b") as f:
        f.truncate(70_000_001)
    assert data.fingerprint([tmp_path / "big"]) != two


def test_the_embedded_default(here):
    from data.prepare import prepare
    d = data.Dataset(prepare("python"))
    meta = json.loads((here / "data" / "python" / "meta.json").read_text())
    assert 5e6 < meta["tokens"]["train"] < 2e7 and 3e5 < meta["tokens"]["val"] and meta["files"] >= 180 and len(meta["sha256"]) == 2
    text = bytes(t for t in np.asarray(d.train.tokens[0]) if t < 256)
    assert b"class ArgumentParser" in text or b"class ArgumentParser" in bytes(t for t in np.asarray(d.val.tokens[0]) if t < 256)
    assert d.bos == 256 and d.train.tokens[0][0] == 256


@pytest.mark.parametrize("name,url", [("shakespeare", "tinyshakespeare"), ("fineweb10B", "fineweb_val")])
def test_what_cannot_be_downloaded_is_said(here, name, url, monkeypatch):
    import urllib.request
    from data.prepare import prepare

    def no_network(*a, **k):
        raise OSError("Network is unreachable")
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(UserError, match=url) as error:
        prepare(name)
    assert "by hand" in str(error.value) and "unreachable" in str(error.value)
    if name == "shakespeare":  # put by hand: checked
        (here / "data" / name / "input.txt").write_text("not it")
        with pytest.raises(UserError, match="SHA-256"):
            prepare(name)


def test_a_download_that_is_cut_off(here):
    """It is not kept as if it were whole, and fetched again the next time."""
    import http.server
    import threading
    from data.prepare import download
    sent = []

    class Half(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            sent.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "11024")
            self.end_headers()
            self.wfile.write(bytes(4000 if len(sent) < 3 else 11024))

        def log_message(self, *words):
            pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Half)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file, url = here / "x_train_0.bin", f"http://127.0.0.1:{server.server_port}/x"
    try:
        for _ in range(2):
            with pytest.raises(UserError, match="4000 of 11024"):
                download(url, file, None, "put it there")
            assert not file.exists() and not list(here.glob("*.part"))
        assert download(url, file, None, "put it there").stat().st_size == 11024 and len(sent) == 3
    finally:
        server.shutdown()


def test_which_files_are_which_split(tmp_path):
    """By words: a retrieval_train.bin is not for validation."""
    for name in ("retrieval_train.bin", "retrieval_val.bin", "constraint_train_000001.bin", "val2.bin"):
        data.write_tokens(tmp_path / name, [1, 2, 3], 5)
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": None, "vocab_size": 5, "bos": None, "bos_default": False}))
    d = data.Dataset(str(tmp_path))
    assert [f.name for f in d.train.files] == ["constraint_train_000001.bin", "retrieval_train.bin"] and [f.name for f in d.val.files] == ["retrieval_val.bin", "val2.bin"]
    data.write_tokens(tmp_path / "train_val.bin", [1, 2, 3], 5)
    with pytest.raises(UserError, match="train_val.bin could be"):
        data.Dataset(str(tmp_path))


def test_more_tokens_than_a_header_counts(tmp_path):
    class Long(list):
        def __len__(self):
            return 1 << 31
    with pytest.raises(UserError, match="2,147,483,648 tokens"):
        data.write_tokens(tmp_path / "x.bin", Long(), 5)
    assert not (tmp_path / "x.bin").exists()


def test_the_same_tokens():
    """By what they stand for, however they are written down."""
    gpt2 = data.from_json({"kind": "bpe", "name": "a", "pattern": ".", "special": {}, "bos": None, "ranks": base64.b64encode(zlib.compress(b"".join(b"\1\0" + i.to_bytes(4, "little") + bytes([i]) for i in range(256)))).decode()})
    other = data.from_json({**gpt2.to_json(), "name": "b", "pattern": "..?"})
    swapped = data.from_json({**gpt2.to_json(), "ranks": base64.b64encode(zlib.compress(b"".join(b"\1\0" + (255 - i).to_bytes(4, "little") + bytes([i]) for i in range(256)))).decode()})
    assert data.same_tokens(gpt2, other) and not data.same_tokens(gpt2, swapped) and data.same_tokens(data.Bytes(), data.Bytes())
    assert not data.same_tokens(data.Char("ACGT", False), data.Char("WXYZ", False)) and not data.same_tokens(data.Char("AC", False), data.Char("ACG", False))


def test_build_into_the_real_data_folder_leaves_nothing(tmp_path):
    before = set((ROOT / "data").iterdir())
    with pytest.raises(UserError):
        build("x-test", {"a": tmp_path / "a"} if (tmp_path / "a").write_bytes(b"") == 0 else {}, "a")
    assert set((ROOT / "data").iterdir()) == before
    shutil.rmtree(ROOT / "data" / "x-test", ignore_errors=True)


