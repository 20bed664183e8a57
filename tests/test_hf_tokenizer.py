"""Imported and exported tokenizers compared with the tokenizers package (requirements-dev.txt).

The vocabularies have the shapes of real ones, and are trained here by the package.
"""

import functools
import json

import numpy as np
import pytest
from conftest import ROOT, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data.tokenizer import byte_level_alphabet
from nanolong import tokenizer_files
from nanolong.errors import UserError
from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, empty_bpe
from nanolong.hub.tokenizer import make_exported
from nanolong.run import read_meta, write_checkpoint

tokenizers = pytest.importorskip("tokenizers")

# kind -> GGUF's name of how it splits text
PRE_TOKENIZER = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen": "qwen2", "smollm2": "smollm"}
BYTE_LEVEL = tuple(PRE_TOKENIZER)
SENTENCEPIECE = ("llama2", "metaspace")
KINDS = (*BYTE_LEVEL, *SENTENCEPIECE)
VOCAB_SIZE = 700
PADDED_VOCAB_SIZE = 707  # the model's
SPECIAL = ["<unk>", "<s>", "</s>"]  # sentencepiece's

# Words, code, many scripts, composed and decomposed characters, joined emoji, control characters,
# and every kind of white space.
SAMPLE = (
    "The quick brown fox can't jump 3.14159 times over 1,024 lazy dogs' backs; it'll try, "
    "won't it?\n\n\tdef f(x, *, y=None):\n        return {'a': [x ** 2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café, Ærøskøbing; Ελληνικά, Русский текст, עברית, العربية, हिन्दी, "
    "中文字符, 日本語のテキスト, 한국어. ½ ² Ⅻ ١٢٣ 🙂👩‍👩‍👧 e\u0301   \u00a0\u3000aaaaaaa     "
    "\n   \n<b>&amp;</b> http://x.org/?q=%20#1 \x00\x01\x7f\u2581 WON'T 12345678 \ufeff"
)
HARD_TEXTS = (
    "",
    " ",
    "a",
    " leading and  double   spaces    ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "e\u0301 \u1e9b\u0323 क्षि ซึ้ง Z̸̡̘a̷l̵g̶o",
    "中文字符，日本語のテキスト。한국어",
    "null \0 and \x01\x1f\x7f control",
    "\t\tdef f(x):\r\n\r\n        return x\n\n\n",
    "<|begin|><|end|> <|3|><s></s><unk> <s>a</s> [INST]",
    "\ufeff\u200b\u2028\u00a0\u3000\u2581\uffff\U0010ffff",
    "123456789 3.14 ١٢٣ ½ Ⅻ ²",
    SAMPLE,
)


def training_texts():
    texts = [path.read_text()[:20000] for path in sorted(ROOT.glob("*.py"))]
    return [*texts, SAMPLE.replace("\x01", "") * 3]


def train_byte_level(kind, vocab_size, special, bytes_left_out=()):
    """Train byte-level BPE by the tokenizers package, which splits text as one of BYTE_LEVEL."""
    tokenizer = empty_bpe(PRE_TOKENIZERS[PRE_TOKENIZER[kind]])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    byte_of = byte_level_alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=[c for c, byte in byte_of.items() if byte not in bytes_left_out],
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


@functools.cache
def train_bpe(kind):
    """Byte-level BPE of the shape that one of BYTE_LEVEL has."""
    if kind == "smollm2":  # without some bytes that UTF-8 has not, or that are controls
        left_out = {*range(0x01, 0x09), 0xC0, 0xC1, *range(0xF5, 0x100)}
        return train_byte_level(kind, VOCAB_SIZE, [f"<|{i}|>" for i in range(17)], left_out)
    tokenizer = train_byte_level(kind, VOCAB_SIZE, ["<|begin|>", "<|end|>"])
    if kind == "llama3":
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
        )
    return tokenizer


@functools.cache
def train_sentencepiece(kind):
    """Train a tokenizer.json such as Llama's: a space is U+2581, rare characters are bytes."""
    decoders = tokenizers.decoders
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    model = tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    trained = tokenizers.Tokenizer(model)
    normalizers = tokenizers.normalizers
    marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    trained.normalizer = normalizers.Sequence(marks)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *fallback],
        limit_alphabet=90,
        show_progress=False,
    )
    trained.train_from_iterator([text[:4000] for text in training_texts()], trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = spec["added_tokens"][: len(SPECIAL)]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    if kind == "metaspace":
        tokenizer.normalizer = None
        pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def train(kind):
    return train_bpe(kind) if kind in BYTE_LEVEL else train_sentencepiece(kind)


@functools.cache
def import_tokenizer(kind):
    """train(), imported."""
    files = {"tokenizer.json": train(kind).to_str().encode()}
    ids = {"config.json": {"bos_token_id": 1, "eos_token_id": 2}}
    tokenizer, _ = tokenizer_files.make_tokenizer(files, ids, PADDED_VOCAB_SIZE)
    return tokenizer


@functools.cache
def reference(kind):
    """train() as text is encoded by it: special tokens in it are plain text."""
    tokenizer = tokenizers.Tokenizer.from_str(train(kind).to_str())
    tokenizer.encode_special_tokens = True
    return tokenizer


# -----------------------------------------------------------------------------
# Imported tokenizers


def check_text(kind, text):
    ours, theirs = import_tokenizer(kind), reference(kind)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids

    # after a prompt, as the package decodes the continuation of one
    prompt = theirs.encode("a", add_special_tokens=False).ids
    stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    chunks = [stream.step(theirs, i) for i in ids]
    decoded = ours.decode(ids).decode()
    assert decoded == "".join(filter(None, chunks))

    assert (decoded if kind in BYTE_LEVEL else decoded.removeprefix(" ")) == theirs.decode(ids)
    assert int(ours.byte_lengths[ids].sum()) == len(decoded.encode())
    return decoded


@pytest.mark.parametrize("kind", KINDS)
def test_hard_text_is_encoded_as_the_package_encodes_it(kind):
    for text in HARD_TEXTS:
        decoded = check_text(kind, text)
        if kind in ("gpt2", "llama3"):
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
    "kind, config, model_config, bos, eos, first",
    [
        ("gpt2", {}, {"bos_token_id": 1, "eos_token_id": 1}, 1, None, None),
        ("gpt2", {}, {"eos_token_id": [1, 0]}, 1, None, None),
        ("gpt2", {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}, {}, 0, 1, None),
        ("gpt2", {"add_bos_token": True}, {"bos_token_id": 0, "eos_token_id": 1}, 0, 1, 0),
        ("gpt2", {"bos_token": 3}, {"bos_token_id": "0", "eos_token_id": []}, None, None, None),
        ("llama3", {}, {"bos_token_id": 1, "eos_token_id": 1}, 0, 1, 0),
    ],
)
def test_special_ids_are_those_of_the_configs(kind, config, model_config, bos, eos, first):
    files = {"tokenizer.json": train(kind).to_str().encode()}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    ids = {"config.json": model_config}
    tokenizer, ends = tokenizer_files.make_tokenizer(files, ids, PADDED_VOCAB_SIZE)
    assert (tokenizer.bos, tokenizer.eos, ends.bos) == (bos, eos, first)


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
# Our own vocabularies


@settings(max_examples=60, deadline=None)
# the package reads the name of a token in a text as the token
@given(text=st.text(max_size=60).filter(lambda text: "<bos>" not in text), adds_bos=st.booleans())
def test_bytes_are_written_for_the_package(text, adds_bos):
    """They encode and decode alike in the package, and when they are imported again."""
    ours = data.ByteTokenizer()
    files = make_exported(ours, adds_bos, 64).files
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = ours.encode(text)
    assert theirs.encode(text).ids == [ours.bos] * adds_bos + ids
    assert theirs.decode(ids) == text
    assert theirs.token_to_id("<bos>") == ours.bos == theirs.get_vocab_size() - 1
    config = {"bos_token_id": ours.bos, "eos_token_id": ours.bos}
    again, ends = tokenizer_files.make_tokenizer(files, {"config.json": config}, ours.vocab_size)
    assert (again.bos, again.eos, ends.bos) == (ours.bos, None, ours.bos if adds_bos else None)
    assert data.same_vocabulary(again, ours)
    assert again.encode("<bos>" + text) == [*b"<bos>", *ids]


# -----------------------------------------------------------------------------
# Bad input


def refuse(folder, content, message, vocab_size=VOCAB_SIZE, **config):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        tokenizer_files.read_tokenizer(folder, {"config.json": config}, vocab_size)
    assert len(str(error.value).splitlines()) == 1


def test_a_damaged_tokenizer_json_is_refused(tmp_path):
    text = train("gpt2").to_str()
    spec = json.loads(text)
    model = spec["model"]
    for damaged in (
        b"",
        b"{}",
        b"\xff" + text.encode(),
        json.dumps({**spec, "model": {**model, "merges": [["a", "none"]]}}).encode(),
        b'{"model": ' * (1 << 20),
    ):
        refuse(tmp_path, damaged, r"tokenizer\.json is damaged")


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    text = train("gpt2").to_str().encode()
    message = "700 tokens and the model 699, or .* belongs to another model"
    refuse(tmp_path, text, message, VOCAB_SIZE - 1)
    message = "no token with the id of its special tokens, so it belongs to another model"
    refuse(tmp_path, text, message, PADDED_VOCAB_SIZE, eos_token_id=[703])
