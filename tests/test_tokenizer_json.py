"""data/tokenizer_json.py compared with the tokenizers package (see requirements-dev.txt)."""

import copy
import functools
import json
import random

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from data import tokenizer_json
from nanolong.errors import UserError
from nanolong.hf_layout import read_json

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
KINDS = ("gpt2", "llama3", "qwen", "smollm")
VOCAB_SIZE = 700
PADDED_VOCAB_SIZE = 707  # the model's


def make_splitter(kind):
    """The pre-tokenizer of GPT-2, Llama 3, Qwen or SmolLM."""
    from tokenizers import Regex, pre_tokenizers

    splits_by_itself = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "gpt2":
        return splits_by_itself
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, splits_by_itself])
    pattern = LLAMA3_PATTERN if kind == "llama3" else QWEN2_PATTERN
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    only_maps_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, only_maps_bytes])


@functools.cache
def train_bpe(kind):
    """Train byte-level BPE by the tokenizers package, of one of KINDS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = make_splitter(kind)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    if kind == "smollm":
        special = [f"<|{i}|>" for i in range(17)]  # first in the vocabulary, as SmolLM has them
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text()[:20000] for path in sorted(ROOT.glob("*.py"))]
    tokenizer.train_from_iterator(texts + [tokenizer_json.SAMPLE * 3], trainer)
    if kind == "llama3":
        begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[begin]
        )
    return tokenizer


def parse(tokenizer):
    """The content of a tokenizer.json, and its added tokens: text -> id."""
    spec = json.loads(tokenizer.to_str())
    return spec, {token["content"]: token["id"] for token in spec["added_tokens"]}


@functools.cache
def import_bpe(kind):
    """train_bpe(), imported, and loaded again from the JSON of a checkpoint."""
    spec, added = parse(train_bpe(kind))
    bos = min(added.values())
    tokenizer = tokenizer_json.from_spec(spec, added, bos, None, PADDED_VOCAB_SIZE)
    return data.tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))


texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab1 2'st\n\r\t =é\u0301½٣ \u00a0", max_size=40),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=texts)
def test_text_is_encoded_as_the_package_encodes_it(kind, text):
    theirs, ours = train_bpe(kind), import_bpe(kind)
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids).decode() == theirs.decode(ids)
    assert int(ours.byte_lengths[ids].sum()) == len(theirs.decode(ids).encode())


def make_tokenizer(kind):
    if kind == "bytes":
        return data.ByteTokenizer()
    if kind == "char":
        return data.CharTokenizer("".join(sorted(set("hello wörld\n"))), True)
    if kind == "tiktoken":
        try:
            return data.BPETokenizer.named("gpt2")
        except UserError:
            pytest.skip("tiktoken's gpt2 vocabulary is not cached (see TIKTOKEN_CACHE_DIR)")
    return import_bpe(kind)


@pytest.mark.parametrize("kind", [*KINDS, "tiktoken", "bytes", "char"])
def test_a_written_tokenizer_is_read_alike(kind, tmp_path, rng):
    """By the tokenizers package; and by us, who then write the same bytes again."""
    from tokenizers import Tokenizer

    ours = make_tokenizer(kind)
    adds_bos = bool(rng.integers(2))
    tokenizer_json.write(tmp_path, ours, adds_bos, 64)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    check_single_tokens(ours, theirs)
    check_texts(kind, ours, theirs, adds_bos, random.Random(int(rng.integers(1 << 30))))

    config = {"bos_token_id": ours.bos, "eos_token_id": ours.bos}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, bos, note = tokenizer_json.read(tmp_path, ours.vocab_size, read_json)
    assert type(again) is type(ours)
    assert bos == (ours.bos if adds_bos else None)
    assert not note
    (tmp_path / "again").mkdir()
    tokenizer_json.write(tmp_path / "again", again, adds_bos, 64)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def check_single_tokens(ours, theirs):
    """All of them, also those that no text of the test happens to contain."""
    special = tokenizer_json.special_tokens(ours)
    for token, i in special.items():
        assert theirs.token_to_id(token) == i
        assert theirs.id_to_token(i) == token
    for i in range(ours.vocab_size):
        if i not in special.values() and len(ours.decode([i])):
            assert theirs.decode([i]) == ours.decode([i]).decode(errors="replace")


def check_texts(kind, ours, theirs, adds_bos, rng):
    letters = "ab1 2'stT\n\r =é½٣e\u0301 \u00a0中🙂aaa   "
    if kind == "char":
        letters = ours.characters
    for _ in range(200):
        text = "".join(rng.choices(letters, k=rng.randint(1, 50)))
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids
        assert theirs.encode(text).ids == [ours.bos] * adds_bos + ids
        if kind != "qwen":  # which composes the text
            assert theirs.decode(ids) == text


# -----------------------------------------------------------------------------
# What tiktoken cannot read


def swap_ids(spec):
    """Two tokens are out of the order of their merges."""
    vocab = spec["model"]["vocab"]
    a, b = (token for token, i in vocab.items() if i in (400, 500))
    vocab[a], vocab[b] = vocab[b], vocab[a]


def remove_a_merge(spec):
    """A token that the sample text needs is never merged."""
    vocab = spec["model"]["vocab"]
    last = max(train_bpe("gpt2").encode(tokenizer_json.SAMPLE).ids)
    merges = spec["model"]["merges"]
    spec["model"]["merges"] = [merge for merge in merges if vocab["".join(merge)] != last]


def lower_case(spec):
    spec["normalizer"] = {"type": "Lowercase"}


def add_a_prefix_space(spec):
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True}


def split_by_punctuation(spec):
    steps = [{"type": "Punctuation"}, {"type": "ByteLevel"}]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def split_by_a_broken_pattern(spec):
    split = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    steps = [split, {"type": "ByteLevel", "use_regex": False}]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


@pytest.mark.parametrize(
    "change, reason",
    [
        (swap_ids, "order"),
        (remove_a_merge, "otherwise"),
        (lower_case, "Lowercase"),
        (add_a_prefix_space, "space"),
        (split_by_punctuation, "Punctuation"),
        (split_by_a_broken_pattern, "cannot read"),
    ],
)
def test_what_tiktoken_cannot_read_is_noticed(change, reason):
    spec, added = parse(train_bpe("gpt2"))
    spec = copy.deepcopy(spec)
    change(spec)
    with pytest.raises(tokenizer_json.UnsupportedTokenizer, match=reason):
        tokenizer_json.from_spec(spec, added, 0, None, VOCAB_SIZE)


def test_a_damaged_tokenizer_json_is_refused(tmp_path):
    spec, _ = parse(train_bpe("gpt2"))
    (tmp_path / "config.json").write_text("{}")
    for damaged in (
        "{",
        "[]",
        "{}",
        json.dumps({**spec, "model": 3}),
        json.dumps({**spec, "added_tokens": [{"id": "x"}]}),
        json.dumps({**spec, "added_tokens": [{"id": 10**9, "content": "x"}]}),
    ):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            tokenizer_json.read(tmp_path, VOCAB_SIZE, read_json)
