"""GGUF files: their tokenizers, and what is refused; test_hub.py compares their logits."""

import math
import struct
import unicodedata
from itertools import pairwise

import gguf
import numpy as np
import pytest
import regex
import tokenizers
from conftest import assert_refused
from interchange import imported
from makers import (
    DIGITS,
    HARD_TEXT,
    SHAPE,
    byte_characters,
    gguf_vocabulary,
    metadata,
    train,
    with_vocabulary,
    write_gguf,
    write_tokenizer,
)

from data.tokenizer import tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.gguf_model import read_gguf
from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer

# -----------------------------------------------------------------------------
# Tokenizers, compared with llama.cpp's patterns and plain byte-pair merging

# As llama.cpp has them (src/llama-vocab.cpp): each one splits the pieces of the one before, and
# what it does not match stays a piece.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CPP = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}


def split(text, patterns):
    pieces = [text]
    for pattern in patterns:
        finer = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                finer += [piece[end : match.start()], match[0]]
                end = match.end()
            finer.append(piece[end:])
        pieces = [piece for piece in finer if piece]
    return pieces


def encode_by_merges(text, metadata):
    """Encode a text without special tokens: split it, then merge the pair of the earliest merge."""
    name = metadata["tokenizer.ggml.pre"]
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = metadata["tokenizer.ggml.merges"]
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    characters = byte_characters()
    if name == "qwen2":
        text = unicodedata.normalize("NFC", text)
    encoded = []
    for piece in split(text, LLAMA_CPP[name]):
        tokens = [characters[byte] for byte in piece.encode()]
        if name == "llama-bpe" and "".join(tokens) in ids:
            tokens = ["".join(tokens)]
        while True:
            pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in rank]
            if not pairs:
                break
            _, i = min(pairs)
            tokens[i : i + 2] = ["".join(tokens[i : i + 2])]
        encoded += [ids[token] for token in tokens]
    return encoded


def read(name, **changes):
    """What is made of a vocabulary's metadata; changes: keys of tokenizer.ggml, None: absent."""
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: x for key, x in (gguf_vocabulary(name) | changed).items() if x is not None}
    n_tokens = len(gguf_vocabulary(name)["tokenizer.ggml.tokens"])
    return metadata, *read_tokenizer("model.gguf", metadata, n_tokens)


def package_of(tokenizer):
    """The library's tokenizer from the text that is made of a GGUF's metadata."""
    return tokenizers.Tokenizer.from_str(tokenizer.text)


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "without a byte"])
def test_text_is_encoded_as_llama_cpp_splits_and_merges_it(name):
    """The vocabulary may lack bytes: SmolLM2's has 235 single ones."""
    changes = {}
    if name == "without a byte":
        name = "smollm"
        missing = gguf_vocabulary(name)["tokenizer.ggml.tokens"].index(byte_characters()[0xFE])
        for key in ("tokens", "token_type"):
            values = gguf_vocabulary(name)[f"tokenizer.ggml.{key}"]
            changes[key] = values[:missing] + values[missing + 1 :]
    metadata, ours, _, note = read(name, **changes)
    text = HARD_TEXT + DIGITS
    ids = package_of(ours).encode(text, add_special_tokens=False).ids
    assert ids == encode_by_merges(text, metadata) and note == ""
    expected = unicodedata.normalize("NFC", text) if name == "qwen2" else text
    assert package_of(ours).decode(ids) == expected


def test_special_tokens_keep_their_ids():
    tokenizer = package_of(read("smollm")[1])
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>").ids
    assert (ids[0], ids[2], ids[-1]) == (1, 3, 2)
    added = tokenizer.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {0: True, 1: True, 2: True, 3: False}
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    "name, given, first", [("llama-bpe", None, 1), ("qwen2", None, None), ("qwen2", True, 1)]
)
def test_bos_starts_a_text_where_the_file_says_so(name, given, first):
    _, ours, ends, _ = read(name, add_bos_token=given)
    assert ends.bos == first
    assert (package_of(ours).encode("a").ids[0] == 1) == (first == 1)


@pytest.mark.parametrize("key, value", [("pre", "tekken"), ("model", "llama")])
def test_another_tokenizer_is_not_read(key, value):
    _, tokenizer, _, note = read("gpt-2", **{key: value})
    assert tokenizer is None and f"'{value}'" in note


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("merges", None, "tokenizer.ggml.merges"),
        ("tokens", ["a", "b"], "out of range"),
        ("merges", ["a \u4e2d"], "vocabulary"),
        ("bos_token_id", 1 << 20, "list index out of range"),
    ],
)
def test_a_damaged_tokenizer_is_refused(key, value, message):
    with pytest.raises(UserError, match="damaged tokenizer") as error:
        read("gpt-2", **{key: value})
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_sentencepiece_file_takes_the_tokenizer_of_a_folder(tmp_path, call):
    trained = train("llama2")
    write_tokenizer(tmp_path / "tok", trained)
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    values |= {"tokenizer.ggml.bos_token_id": 1}
    file = tmp_path / "model.gguf"
    write_gguf(file, edit=with_vocabulary(values))
    model, _ = imported(file, tmp_path, tokenizer=str(tmp_path / "tok"))
    tokenizer = tokenizer_from_json(model.meta["tokenizer"])
    assert tokenizer.encode("a b") == trained.encode("a b", add_special_tokens=False).ids
    assert model.meta["bos"] == 1  # llama.cpp's default for this kind
    tokens[500], tokens[501] = tokens[501], tokens[500]
    write_gguf(file, edit=with_vocabulary(values))
    done = call("hf.py", "import", file, tmp_path / "other", f"--tokenizer={tmp_path / 'tok'}")
    assert_refused(done, "the tokenizer of another model: token 500 is")


def test_an_imported_file_continues_a_text(tmp_path, call):
    write_gguf(tmp_path / "model.gguf", edit=with_vocabulary(gguf_vocabulary("qwen2")))
    model, text = imported(tmp_path / "model.gguf", tmp_path)
    assert "note" not in text
    words = ["--start=ab", "--max_new_tokens=3", "--device=cpu"]
    assert call("sample.py", tmp_path / "run-model", *words).stdout.startswith("ab")


# -----------------------------------------------------------------------------
# Bad input


def with_key(key, value_type, value):
    """Add a metadata value, with whatever bytes for its type and value."""

    def edit(data):
        n_values = struct.unpack("<Q", data[16:24])[0]
        name = key.encode()
        added = struct.pack("<Q", len(name)) + name + struct.pack("<I", value_type) + value
        return data[:16] + struct.pack("<Q", n_values + 1) + added + data[24:]

    return edit


def with_place(place):
    """Change what the header says of a matrix: its dimensions, type and offset."""
    name = b"blk.0.attn_q.weight"

    def edit(data):
        start = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
        return data[:start] + struct.pack("<QQIQ", *place) + data[start + 28 :]

    return edit


def with_tensor(name, data, kind="F32"):
    """A function for edit: replace a tensor."""
    return lambda writer, tensors: tensors.update({name: (data, gguf.GGMLQuantizationType[kind])})


def without_tensor(name):
    return lambda writer, tensors: tensors.pop(name)


HUGE = struct.pack("<Q", 1 << 60)
UP, K = "blk.1.ffn_up.weight", "blk.0.attn_k.weight"
NOT_FINITE = np.full((SHAPE["intermediate_size"], SHAPE["hidden_size"]), math.nan, np.float32)
# one of GGUFS, what is done to it, or "" and what is done to the bytes of a whole file, and a part
# of the message
REFUSED = [
    ("", lambda data: b"PK" + data[2:], "does not begin as a GGUF file"),
    ("", with_key("x", 9, struct.pack("<I", 0) + HUGE), "cannot be used"),  # a huge list
    ("", with_key("x", 8, struct.pack("<Q", 1) + b"\xff"), "utf-8"),
    ("", with_place((1 << 40, 1 << 40, 0, 0)), "cannot be used"),  # a tensor of a huge size
    ("", with_place((64, 64, 0, 1 << 50)), "before its tensors do"),
    ("", with_place((48, 64, 8, 0)), "of type Q8_0"),  # rows of no whole blocks
    ("llama", metadata({"general.architecture": "gemma"}), "not one of: llama, qwen2"),
    ("llama", metadata({"general.type": "adapter"}), "is no model but an adapter (LoRA), which"),
    ("llama", metadata({"general.architecture": "clip"}), "is no model but an mmproj, the half"),
    ("llama", metadata({"general.type": "imatrix"}), "is no model but 'imatrix': give the .gguf"),
    ("llama", metadata({"split.count": 3}), "is a part of a model"),
    ("llama", metadata({"llama.rope.dimension_count": 8}), "dimension_count=8"),
    ("qwen2", metadata({"qwen2.attention.sliding_window": 32}), "sliding_window=32"),
    ("llama-yarn", metadata({"llama.rope.scaling.yarn_ext_factor": 0.5}), "yarn_ext_factor"),
    ("llama-q8-linear", metadata({"llama.rope.scaling.attn_factor": 2.0}), "attn_factor"),
    ("llama-llama3", metadata({"llama.rope.scaling.factor": 2.0}), "rope_freqs.weight has no"),
    (
        "llama",
        without_tensor(UP),
        "(model.layers.1.mlp.up_proj.weight missing, or of another shape)",
    ),
    ("llama", with_tensor(K, np.zeros((64, 64), np.float32)), "or of another shape"),
    ("llama", with_tensor(K, np.zeros((32, 80), np.uint8), "Q8_1"), "Q8_1"),
    ("llama", with_tensor(UP, NOT_FINITE), "mlp.up_proj.weight has values that are not"),
]


@pytest.mark.parametrize(
    "name, edit, message", REFUSED, ids=lambda x: x if isinstance(x, str) else "."
)
def test_a_file_is_refused(name, edit, message, tmp_path, call):
    file = tmp_path / "model.gguf"
    write_gguf(file, name or "llama", edit if name else None)
    if not name:
        file.write_bytes(edit(file.read_bytes()))
    assert_refused(call("hf.py", "import", file, tmp_path / "run"), message)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_may_end_anywhere(tmp_path):
    """Cut at many places: always one sentence."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for end in [*range(0, 3000, 37), *range(3000, len(whole), 9973), len(whole) - 40]:
        file.write_bytes(whole[:end])
        with pytest.raises(UserError, match="cannot be used"):
            read_gguf(file)
