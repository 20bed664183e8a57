"""nanolong/hub/gguf_tokenizer.py compared with llama.cpp's patterns and plain byte-pair merging."""

import functools
import json
import unicodedata
from itertools import pairwise

import pytest
from conftest import ROOT

from nanolong.errors import UserError
from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer

tokenizers = pytest.importorskip(
    "tokenizers", reason="these need the tokenizers package: pip install tokenizers"
)

# Words, code, many scripts, composed and decomposed characters, every kind of white space, and the
# text of special tokens. No digit follows a white space: transformers splits SmolLM's otherwise.
HARD_TEXT = (
    "The quick brown fox can't jump(3.14159) times over lazy dogs' backs; it'll TRY, WON'T it?"
    "\n\n\tdef f(x, *, y=None):\n        return {'a': [x**2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café e\u0301; Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文字符, "
    "日本語の, 한국어. 🙂👩\u200d👩\u200d👧 x   \u00a0\u3000aaaaaaa     \n   \n<b>&amp;</b> "
    "<|im_start|>user\n"
)
DIGITS = "in 2024,  12 x\n   3 ½ Ⅻ ١٢٣ 1234567 0x1F"

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
    import regex

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


def byte_characters():
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + i) for i, byte in enumerate(others)}


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


@functools.cache
def train(name):
    """The metadata of a small vocabulary, the special tokens first, as SmolLM has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    # so coarse that the splitting decides which of the merges are made
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=900,
        special_tokens=[*special, "<think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    text = (ROOT / "hf.py").read_text(encoding="utf-8")
    lines = (text + HARD_TEXT.replace("<|im_start|>", "") * 3 + DIGITS * 3).splitlines(True)
    tokenizer.train_from_iterator(lines, trainer)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.get)
    # what a converter writes for an id that the tokenizer does not have
    padding = [f"[PAD{len(tokens)}]"]
    types = [3] * len(special) + [4] + [1] * (len(tokens) - 4) + [5]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for message in messages %}\u00e4{% endfor %}",
    }


def build_tokenizer(metadata):
    """The library's tokenizer from the text that is made of a GGUF's metadata."""
    tokenizer, _, note = read("model.gguf", metadata)
    assert note == ""
    return tokenizers.Tokenizer.from_str(tokenizer.text)


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "without a byte"])
def test_text_is_encoded_as_llama_cpp_splits_and_merges_it(name):
    """The vocabulary may lack bytes: SmolLM2's has 235 single ones."""
    metadata = dict(train("smollm" if name == "without a byte" else name))
    if name == "without a byte":
        missing = metadata["tokenizer.ggml.tokens"].index(byte_characters()[0xFE])
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            metadata[key] = metadata[key][:missing] + metadata[key][missing + 1 :]
    text = HARD_TEXT.replace("<|im_start|>", "") + DIGITS
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encode_by_merges(text, metadata)
    assert tokenizer.decode(ids) == (
        unicodedata.normalize("NFC", text) if name == "qwen2" else text
    )


def test_special_tokens_keep_their_ids():
    tokenizer = build_tokenizer(train("smollm"))
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>").ids
    assert (ids[0], ids[2], ids[-1]) == (1, 3, 2)
    added = tokenizer.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {0: True, 1: True, 2: True, 3: False}
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    "name, given, adds_bos",
    [
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos_starts_a_text_where_the_file_says_so(name, given, adds_bos):
    metadata = dict(train(name))
    if given is not None:
        metadata["tokenizer.ggml.add_bos_token"] = given
    assert read("model.gguf", metadata)[1].bos == (1 if adds_bos else None)
    assert (build_tokenizer(metadata).encode("a").ids[0] == 1) == adds_bos


def read(file, metadata):
    return read_tokenizer(file, metadata, len(train("gpt-2")["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("key, value", [("pre", "tekken"), ("model", "llama")])
def test_another_tokenizer_is_not_read(key, value):
    tokenizer, _, note = read("model.gguf", {**train("gpt-2"), f"tokenizer.ggml.{key}": value})
    assert tokenizer is None and f"'{value}'" in note


def with_value(key, value):
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda metadata: metadata.pop("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
        (with_value("tokens", ["a", "b"]), "out of range"),
        (with_value("merges", ["a \u4e2d"]), "vocabulary"),
        (with_value("bos_token_id", 1 << 20), "list index out of range"),
    ],
)
def test_a_damaged_tokenizer_is_refused(damage, message):
    metadata = dict(train("gpt-2"))
    damage(metadata)
    with pytest.raises(UserError, match="damaged tokenizer") as error:
        read("model.gguf", metadata)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
