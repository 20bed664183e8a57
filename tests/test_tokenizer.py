"""Tokenizers: encoding and decoding, their form in JSON, and prompts."""

import argparse
import ast
import functools
import inspect
import json

import pytest
import tiktoken
from conftest import run_python

import data
from data.texts import train_bpe
from nanolong.errors import UserError

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
    """Damaged ones are in test_hf_tokenizer.py."""
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
    """test_hf_tokenizer.py compares what texts become with the package."""
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
