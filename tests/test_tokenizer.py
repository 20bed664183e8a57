"""Tokenizers: their form in JSON, prompts, and what the tokenizers package makes of the same text.

makers.py trains vocabularies of the shapes of real ones.
"""

import argparse
import ast
import functools
import inspect
import json

import numpy as np
import pytest
import tiktoken
import tokenizers
from conftest import run_python, write_dataset
from makers import (
    HARD_TEXTS,
    KINDS,
    PADDED_VOCAB_SIZE,
    SENTENCEPIECE,
    VOCAB_SIZE,
    import_tokenizer,
    train,
)

import data
from data.texts import train_bpe
from nanolong import tokenizer_files
from nanolong.errors import UserError
from nanolong.hub.tokenizer import make_exported
from nanolong.run import read_meta, write_checkpoint

TEXT = "def f(x):\n    return 'naïve ☃' * x\n" * 40


def through_json(tokenizer):
    """The tokenizer that a checkpoint's meta.json would give back."""
    return data.tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))


SINGLE_BYTES = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture
def gpt2():
    try:
        return data.BPETokenizer.named("gpt2")
    except UserError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["bytes", "char"])
def test_decoding_undoes_encoding(kind):
    tokenizer = data.ByteTokenizer()
    if kind == "char":
        tokenizer = data.CharTokenizer("".join(sorted(set(TEXT))), bos=True)
    again = through_json(tokenizer)
    ids = again.encode(TEXT)
    assert ids == tokenizer.encode(TEXT)
    assert again.decode(ids) == TEXT.encode()
    assert max(ids) < again.vocab_size == tokenizer.vocab_size
    assert again.bos == tokenizer.bos == again.vocab_size - 1
    assert again.decode([again.bos]) == b""
    assert again.byte_lengths[again.bos] == 0
    assert again.byte_lengths[ids].sum() == len(TEXT.encode())


def test_any_bytes_can_be_encoded():
    tokenizer = data.ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(b"\xff\x00")) == b"\xff\x00"
    assert tokenizer.decode(tokenizer.encode("\udcff")) == b"\xff"


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="'q'"):
        data.CharTokenizer("abc").encode("aq")


def test_gpt2_travels_with_its_ranks(gpt2):
    again = through_json(gpt2)
    for text in (TEXT, "", "<|endoftext|>", " \u200b𝄞 ١٢ \r\n"):
        ids = again.encode(text)
        assert ids == gpt2.encode(text)
        assert again.decode(ids) == text.encode()
        assert again.byte_lengths[ids].sum() == len(text.encode())
    assert again.encode("Hello world") == [15496, 995]
    assert (again.vocab_size, again.bos, again.eos) == (50257, 50256, None)


def test_a_newer_tokenizer_is_refused():
    with pytest.raises(UserError, match="'words'"):
        data.tokenizer_from_json({"kind": "words"})


def test_vocabularies_are_compared_by_their_text():
    def bpe(name, pattern, ranks):
        encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        return data.BPETokenizer(encoding)

    one = bpe("a", ".", SINGLE_BYTES)
    assert data.same_vocabulary(one, bpe("b", "..?", SINGLE_BYTES))
    reversed_ids = {token: 255 - i for token, i in SINGLE_BYTES.items()}
    assert not data.same_vocabulary(one, bpe("c", ".", reversed_ids))
    assert not data.same_vocabulary(data.CharTokenizer("ACGT"), data.CharTokenizer("WXYZ"))


def test_a_prompt_is_never_empty():
    tokenizer = data.ByteTokenizer()
    assert data.encode_prompt(tokenizer, 256, "ab") == [256, 97, 98]
    assert data.encode_prompt(tokenizer, 256, "") == [256]
    assert data.encode_prompt(tokenizer, None, "ab") == [97, 98]
    assert data.encode_prompt(tokenizer, None, "") == [10]
    assert data.encode_prompt(data.CharTokenizer("abc"), None, "") == [0]


# -----------------------------------------------------------------------------
# Byte-level BPE that is trained here


@functools.cache
def trained_bpe(vocab_size=600):
    return train_bpe([inspect.getsource(module) for module in (argparse, ast)], vocab_size)


def test_bpe_is_the_same_in_every_process():
    """Whatever the order of hashing, and the number of threads."""
    code = (
        "import argparse, ast, inspect\n"
        "from data.texts import train_bpe\n"
        "texts = [inspect.getsource(module) for module in (argparse, ast)]\n"
        "print(train_bpe(texts, 600).text, end='')\n"
    )
    done = run_python(code, env={"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "4"})
    assert done.stdout == trained_bpe().text, done.stderr


def test_bpe_has_a_token_between_documents_that_no_text_becomes():
    tokenizer = trained_bpe()
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text)
    assert tokenizer.bos not in ids and tokenizer.eos is None
    assert max(ids) < tokenizer.vocab_size == 600
    assert tokenizer.decode(ids) == text.encode()
    assert tokenizer.decode([tokenizer.bos]) == b""
    assert tokenizer.byte_lengths[tokenizer.bos] == 0
    assert tokenizer.encode_with_special_tokens(text).count(tokenizer.bos) == 1
    # and not from then on
    assert tokenizer.encode(text) == ids


# -----------------------------------------------------------------------------
# What a text becomes

# characters whose UTF-8 has every byte that UTF-8 can have
CODES = [*range(0x800), *range(0x800, 0xD800, 1024), *range(0xE000, 0x110000, 4096)]
EVERY_BYTE = "".join(map(chr, CODES))
OWN = ("bytes", "bpe")


def ours_and_theirs(kind):
    """A tokenizer, and the package's, by which special tokens in a text are plain text."""
    if kind == "bytes":
        ours = data.ByteTokenizer()
        text = make_exported(ours, False, 64).files["tokenizer.json"].decode()
    elif kind == "bpe":
        ours = trained_bpe()
        text = ours.text
    else:
        ours, text = import_tokenizer(kind), train(kind).to_str()
    theirs = tokenizers.Tokenizer.from_str(text)
    theirs.encode_special_tokens = True
    return ours, theirs


@pytest.mark.parametrize("kind", [*KINDS, *OWN])
def test_hard_text_is_encoded_as_the_package_encodes_it(kind):
    ours, theirs = ours_and_theirs(kind)
    # after a prompt, as the package decodes the continuation of one
    prompt = theirs.encode("a", add_special_tokens=False).ids
    for text in (*HARD_TEXTS, EVERY_BYTE):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        chunks = [stream.step(theirs, i) for i in ids]
        decoded = ours.decode(ids).decode()
        assert decoded == "".join(filter(None, chunks))
        plain = decoded.removeprefix(" ") if kind in SENTENCEPIECE else decoded
        assert plain == theirs.decode(ids)
        assert int(ours.byte_lengths[ids].sum()) == len(decoded.encode())
        if kind in ("gpt2", "llama3", *OWN):
            assert decoded == text
        if kind == "llama2":
            assert decoded == (" " + text).replace("\u2581", " ") if text else decoded == ""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_for_no_text(kind):
    ours = import_tokenizer(kind)
    n_special = {"smollm2": 17, "gpt2": 2, "llama3": 2, "qwen": 2}.get(kind, 3)
    assert set(ours.special_tokens.values()) == set(range(n_special))
    assert not ours.byte_lengths[:n_special].any()
    # padding
    assert not ours.byte_lengths[VOCAB_SIZE:].any()
    assert len(ours.byte_lengths) == PADDED_VOCAB_SIZE
    assert ours.decode([0, *ours.encode("ab"), 1]) == ours.decode(ours.encode("ab"))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_documents_are_counted(kind, tmp_path):
    """Of each its own, without the space that sentencepiece puts in front; a <bos> that is put
    before a sequence begins no document, unless the sequence is the first of its file.
    """
    ours = import_tokenizer(kind)
    documents = ["The quick brown fox\n", "naïve ☃ 🙂", "x"] * 3
    ids = [i for text in documents for i in (ours.bos, *ours.encode(text))]
    assert ours.added_bytes == (kind in SENTENCEPIECE)
    dataset = data.Dataset(make_dataset(tmp_path / "set", ours, ids))
    assert dataset.tokenizer.to_json() == ours.to_json()
    x, y = np.array([ids[:-1]]), np.array([ids[1:]])
    n_bytes = len("".join(documents).encode())
    assert dataset.count_bytes(x, y).sum() == n_bytes
    with_bos = data.Dataset(tmp_path / "set", bos=True)
    assert with_bos.count_bytes(x, y).sum() == n_bytes + ours.added_bytes
    assert with_bos.count_bytes(x, y, [True]).sum() == n_bytes


def make_dataset(folder, tokenizer, ids):
    spec = {**tokenizer.to_json(), "files": sorted(tokenizer.files)}
    meta = {"tokenizer": spec, "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos}
    write_dataset(folder, ids, **meta, bos_default=False)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    return folder


def test_an_added_token_that_is_not_special_is_text():
    """Such as Qwen3's <think>."""
    tokenizer = tokenizers.Tokenizer.from_str(train("qwen").to_str())
    added = [("<think>", False), ("<é>", False), ("<|im_end|>", True)]
    for name, special in added:
        tokenizer.add_tokens([tokenizers.AddedToken(name, special=special, normalized=False)])
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    ours = data.ImportedTokenizer(files, bos=0, eos=1, vocab_size=PADDED_VOCAB_SIZE)
    text = "a<think>b<é><|im_end|>"
    ids = ours.encode(text)
    assert ids[1] == VOCAB_SIZE
    assert VOCAB_SIZE + 1 in ids
    assert VOCAB_SIZE + 2 not in ids
    assert ours.decode(ids).decode() == text
    assert ours.byte_lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize(
    "config, model_config, bos, eos",
    [
        ({}, {"eos_token_id": [1, 0]}, 1, None),
        ({"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}, {}, 0, 1),
        ({"bos_token": 3}, {"bos_token_id": "0", "eos_token_id": []}, None, None),
    ],
)
def test_special_ids_are_those_of_the_configs(config, model_config, bos, eos):
    """test_ends.py compares more of them with transformers."""
    files = {"tokenizer.json": train("gpt2").to_str().encode()}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    ids = {"config.json": model_config}
    tokenizer, _ = tokenizer_files.make_tokenizer(files, ids, PADDED_VOCAB_SIZE)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


# -----------------------------------------------------------------------------
# The files in checkpoints and datasets


def test_a_checkpoint_keeps_the_files(tmp_path):
    files = {"tokenizer.json": train("llama3").to_str().encode()}
    files |= {"chat_template.jinja": "{{ messages }} é".encode(), "tokenizer.model": b"\x00\xff"}
    tokenizer = data.ImportedTokenizer(files, 0, 1, 707)
    meta = {"config": {}, "tokenizer": tokenizer.to_json()}
    write_checkpoint(tmp_path / "step-000000", {"model": {}}, meta)
    write_checkpoint(tmp_path / "step-000001", {"model": {}}, read_meta(tmp_path / "step-000000"))
    again = data.tokenizer_from_json(read_meta(tmp_path / "step-000001")["tokenizer"])
    assert again.to_json() == tokenizer.to_json()
    assert again.encode("def f") == tokenizer.encode("def f")
    assert data.same_vocabulary(tokenizer, again)
    assert not data.same_vocabulary(tokenizer, import_tokenizer("qwen"))


def test_damaged_files_of_a_dataset_are_named(tmp_path):
    dataset = make_dataset(tmp_path / "set", import_tokenizer("llama3"), [0, 1, 2])
    (dataset / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        data.Dataset(dataset).tokenizer.encode("a")
    (dataset / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        data.Dataset(dataset)


# -----------------------------------------------------------------------------
# Bad input


def test_a_tokenizer_that_is_damaged_or_of_another_model_is_refused(tmp_path):
    text = train("gpt2").to_str()
    spec = json.loads(text)
    without_merge = {**spec, "model": {**spec["model"], "merges": [["a", "none"]]}}
    damaged = r"tokenizer\.json is damaged"
    for content, vocab_size, ids, message in (
        (b"", VOCAB_SIZE, {}, damaged),
        (b"{}", VOCAB_SIZE, {}, damaged),
        (b"\xff" + text.encode(), VOCAB_SIZE, {}, damaged),
        (json.dumps(without_merge).encode(), VOCAB_SIZE, {}, damaged),
        (b'{"model": ' * (1 << 20), VOCAB_SIZE, {}, damaged),
        (text.encode(), VOCAB_SIZE - 1, {}, "700 tokens and the model 699, .* to another model"),
        (
            text.encode(),
            PADDED_VOCAB_SIZE,
            {"eos_token_id": [703]},
            "no token with the id of its special tokens, so it belongs to another model",
        ),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            tokenizer_files.read_tokenizer(tmp_path, {"config.json": ids}, vocab_size)
        assert len(str(error.value).splitlines()) == 1
