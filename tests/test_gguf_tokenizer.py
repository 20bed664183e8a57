"""nanolong/hub/gguf_tokenizer.py compared with llama.cpp's patterns and plain byte-pair merging."""

import unicodedata
from itertools import pairwise

import pytest
import regex
import tokenizers
from makers import DIGITS, HARD_TEXT, byte_characters, gguf_vocabulary

from nanolong.errors import UserError
from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer

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
