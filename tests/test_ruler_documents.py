"""Documents for the tasks of RULER, and training on them.

The answers are computed from the text by a parser of its own, which shares nothing with the
generator.
"""

import hashlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from conftest import TINY, assert_refused
from test_hf_tokenizer import KINDS as IMPORTED
from test_hf_tokenizer import import_tokenizer

import data
from data.ruler import SIZES, needed_length
from nanolong.errors import UserError

BYTES = data.ByteTokenizer()
# tokens of bytes: enough for every kind, and not many more
LENGTHS = {"small": 128, "paper": 5000}
LISTS = ("cwe", "fwe")
ALL = [(kind, size) for size in SIZES for kind in data.KINDS]
each_document = pytest.mark.parametrize("kind, size", ALL)


def make_prompt(kind, size, sample=0, length=None, tokenizer=BYTES, **options):
    length = length or LENGTHS[size]
    return data.ruler_prompt(kind, tokenizer, length, 7, sample, size, **options)


def whole(prompt):
    return [*prompt.inputs.tolist(), int(prompt.targets[-1])]


# -----------------------------------------------------------------------------
# The parser


def split_text(prompt, size):
    """Return the haystack, the question and the answer of a prompt's text."""
    mark = r"\A(?P<body>.*) \? (?P<question>.*)\Z"
    if size == "paper":
        mark = r"\A[^\n]*\n(?P<body>[^\n]*)\nQuestion: [^\n]*\nAnswer: (?P<question>[^\n]*)\Z"
    answer = (" " if size == "small" else ", ").join(prompt.answers)
    assert prompt.text.endswith(" " + answer)
    found = re.match(mark, prompt.text.removesuffix(" " + answer), re.DOTALL)
    return found["body"], found["question"], answer


def find_values(body, question, size):
    """Return the values of the keys that the question names, in its order and then the text's."""
    if size == "small":
        keys = question.rsplit(" ", 1)[0].split(" ")
        pattern = r"(?:^| ){} is (\d{{3}})\."
    else:
        keys = re.fullmatch(r"The codes? of (.*) (?:is|are)", question)[1]
        keys = re.split(", | and ", keys)
        pattern = r"(?:^| )The code of {} is (\d{{7}})\."
    return [value for key in keys for value in re.findall(pattern.format(key), body)]


def find_variables(body, question, size):
    """Follow the assignments from the value that the question names."""
    value = re.search(r"\b(\d{3}|\d{5})\b", question)[1]
    if size == "small":
        pattern, reference = r"(?:^| )([a-z]{{3}}) is {}\.", "{}"
    else:
        pattern, reference = r"(?:^| )VAR ([A-Z]{{5}}) = {}\.", "VAR {}"
    names = []
    found = re.findall(pattern.format(value), body)
    while found:
        (name,) = found
        names.append(name)
        found = re.findall(pattern.format(reference.format(name)), body)
    return names


def find_common_words(body, question, size):
    """Return the words that occur more often than all others, in the order of the text."""
    n = 3 if size == "small" else 10
    counts = Counter(body.split(" ")).most_common()
    if counts[n - 1][1] == counts[n][1]:
        return []
    common = {word for word, _ in counts[:n]}
    return [word for word in dict.fromkeys(body.split(" ")) if word in common]


def find_frequent_words(body, question, size):
    """Return the three most frequent words, if their order is certain."""
    counts = dict(Counter(body.split(" ")).most_common(4))
    return list(counts)[:3] if len(set(counts.values())) == 4 else []


PARSERS = {"vt": find_variables, "cwe": find_common_words, "fwe": find_frequent_words}


def find_answers(prompt, kind, size):
    body, question, _ = split_text(prompt, size)
    return PARSERS.get(kind, find_values)(body, question, size)


# -----------------------------------------------------------------------------
# The documents


def check_prompt(kind, size, sample, length):
    prompt = make_prompt(kind, size, sample, length)
    assert find_answers(prompt, kind, size) == prompt.answers
    # the bytes of the longest unit: a word of filler or of a list, or a sentence
    unit = 4 if size == "small" else 50
    if kind in LISTS:
        unit = 4 if size == "small" else 17
    assert length - unit < len(prompt.inputs) <= length
    assert len(prompt.inputs) == len(prompt.targets)
    assert BYTES.decode(whole(prompt)).decode() == prompt.text
    *_, answer = split_text(prompt, size)
    assert BYTES.decode(prompt.targets[prompt.targets >= 0].tolist()).decode() == " " + answer

    empty = make_prompt(kind, size, sample, length, needles=False)
    assert empty.answers == prompt.answers
    body, question, _ = split_text(empty, size)
    assert question == split_text(prompt, size)[1]
    assert not any(re.search(rf"\b{answer}\b", body) for answer in prompt.answers)
    assert find_answers(empty, kind, size) != prompt.answers
    assert length - unit < len(empty.inputs) <= length


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
@each_document
def test_answers_follow_from_the_text_and_only_from_the_needles(kind, size, n):
    for sample in range(n):
        check_prompt(kind, size, sample, LENGTHS[size] + sample // 100 * 30)


# the first 16 digits of the SHA-256 of sample 0's text
GOLDEN = {
    ("niah", "small"): "5bae873db024330c",
    ("multikey", "small"): "277a2c358e75403c",
    ("multivalue", "small"): "0d5d7f709bc0b59b",
    ("multiquery", "small"): "b7d654ea1319b3e2",
    ("vt", "small"): "28cb61644a9fae1a",
    ("cwe", "small"): "b2c0b8c4e83300c2",
    ("fwe", "small"): "eb601b6b1c861a70",
    ("niah", "paper"): "baeaab54d2766707",
    ("multikey", "paper"): "018a0ed680130910",
    ("multivalue", "paper"): "6e9da9493f522476",
    ("multiquery", "paper"): "87b62d5a9c2586eb",
    ("vt", "paper"): "43b1d991ae5a5cec",
    ("cwe", "paper"): "f50bb593a595f263",
    ("fwe", "paper"): "4dadd2683fced78c",
}


@each_document
def test_documents_are_the_same_everywhere(kind, size):
    prompt = make_prompt(kind, size)
    digest = hashlib.sha256(prompt.text.encode()).hexdigest()[:16]
    assert digest == GOLDEN[kind, size]
    other = make_prompt(kind, size, sample=1)
    assert other.text != prompt.text
    assert other.answers != prompt.answers


@each_document
def test_a_length_that_is_too_short_is_refused_with_the_needed_one(kind, size):
    with pytest.raises(UserError, match=rf"the task {kind} needs \d+ tokens, and 9 are") as error:
        make_prompt(kind, size, length=9)
    needed = int(re.search(r"\d+", str(error.value))[0])
    assert size == "paper" or needed <= 128
    # the words of another length may be longer or shorter
    prompt = make_prompt(kind, size, length=needed + 200)
    assert find_answers(prompt, kind, size) == prompt.answers
    most = needed_length(kind, BYTES, size)
    for sample in range(30):
        make_prompt(kind, size, sample, length=most)
    with pytest.raises(UserError):
        [make_prompt(kind, size, sample, length=max(10, needed - 100)) for sample in range(30)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["niah", "multikey", "multivalue"])
def test_needles_are_anywhere_in_the_haystack(kind, size):
    places = []
    for sample in range(300):
        prompt = make_prompt(kind, size, sample, length=3000)
        body, *_ = split_text(prompt, size)
        places += [body.index(f" is {answer}.") / len(body) for answer in prompt.answers]
    counts, _ = np.histogram(places, 5, (0, 1))
    expected = len(places) / 5
    # five standard deviations
    assert abs(counts - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("size", SIZES)
def test_distractors_can_be_left_out(size):
    value = r" is \d+\."
    for kind in data.KINDS:
        prompt = make_prompt(kind, size)
        alone = make_prompt(kind, size, distractors=False)
        assert (alone.text != prompt.text) == (kind in data.WITH_DISTRACTORS)
        assert alone.answers == prompt.answers
        assert find_answers(alone, kind, size) == prompt.answers
    n_keys = 3 if size == "small" else 4
    full = split_text(make_prompt("multikey", size), size)[0]
    alone = split_text(make_prompt("multikey", size, distractors=False), size)[0]
    nothing = make_prompt("multikey", size, needles=False, distractors=False)
    found = [len(re.findall(value, text)) for text in (full, alone, split_text(nothing, size)[0])]
    assert found == [n_keys, 1, 0]
    # the haystack with fewer needles begins as the one with all
    plain = re.sub(r"(The code of )?\S+ is \d+\. ?", "", full)
    assert re.sub(r"(The code of )?\S+ is \d+\. ?", "", alone).startswith(plain.rstrip())


@pytest.mark.parametrize("size", SIZES)
def test_words_have_the_frequencies_of_their_task(size):
    common, often, rarely = (3, 4, 1) if size == "small" else (10, 30, 3)
    body, *_ = split_text(make_prompt("cwe", size, length=6000), size)
    counts = Counter(body.split(" "))
    assert Counter(counts.values())[often] == common
    assert set(counts.values()) <= {*range(1, rarely + 1), often}
    assert sum(n == rarely for n in counts.values()) > 40

    exponent = 1.5 if size == "small" else 2.0
    body, *_ = split_text(make_prompt("fwe", size, length=6000), size)
    ranked = [n for _, n in Counter(body.split(" ")).most_common(8)]
    assert ranked[0] > 100
    for rank, n in enumerate(ranked, 1):
        # the last steps of the list may be missing
        assert abs(n - ranked[0] / rank**exponent) <= 1


def test_bos_starts_the_document_if_it_is_given():
    assert 256 not in whole(make_prompt("niah", "small"))
    with_bos = make_prompt("niah", "small", bos=256)
    first, *ids = whole(with_bos)
    assert first == 256 and 256 not in ids
    assert BYTES.decode(ids).decode() == with_bos.text


# -----------------------------------------------------------------------------
# Tokenizers


def tiktoken_bpe():
    import tiktoken

    trained = import_tokenizer("gpt2")
    tokens = [token for token in trained.token_bytes if token]
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return data.BPETokenizer(encoding)


def ascii_characters():
    return data.CharTokenizer("\n" + "".join(map(chr, range(32, 127))), bos=True)


@pytest.mark.parametrize("name", ["characters", "tiktoken", *IMPORTED])
@each_document
def test_every_tokenizer_writes_the_same_answers(name, kind, size):
    if name == "characters":
        tokenizer = ascii_characters()
    elif name == "tiktoken":
        tokenizer = tiktoken_bpe()
    else:
        tokenizer = import_tokenizer(name)
    prompt = make_prompt(kind, size, tokenizer=tokenizer, bos=tokenizer.bos)
    assert find_answers(prompt, kind, size) == prompt.answers
    ids = whole(prompt)
    if tokenizer.bos is not None:
        assert ids.pop(0) == tokenizer.bos
        assert tokenizer.bos not in ids
    # a space before the text is the tokenizer's
    assert tokenizer.decode(ids).decode()[tokenizer.added_bytes :] == prompt.text
    *_, answer = split_text(prompt, size)
    scored = prompt.targets[prompt.targets >= 0]
    assert tokenizer.decode(scored.tolist()).decode() == " " + answer
    assert (prompt.targets[-len(scored) :] == scored).all()
    # as many tokens as the longest sentence has
    assert LENGTHS[size] - 50 < len(prompt.inputs) <= LENGTHS[size]
    # as the whole text is encoded, unless the vocabulary has tokens such as "is " that span the end
    # of the question and the space before the answer
    if name not in ("llama2", "metaspace"):
        assert ids == tokenizer.encode(prompt.text)


def test_a_vocabulary_that_lacks_characters_is_refused():
    letters = data.CharTokenizer("abcdefghijklmnopqrstuvwxyz .?\n")
    with pytest.raises(UserError, match="task niah need the characters '0123456789', which"):
        make_prompt("niah", "small", tokenizer=letters)
    assert find_answers(make_prompt("cwe", "small", tokenizer=letters), "cwe", "small")
    # another prompt needs other capitals
    letters = data.CharTokenizer(letters.characters + "0123456789,-:=AQTVRWABCDE")
    with pytest.raises(UserError, match="task vt need the characters 'FGHIJKLMNOPSUXYZ', which"):
        make_prompt("vt", "paper", tokenizer=letters)
    letters = data.CharTokenizer("abcdefghijklmnopqrstuvwxyz .?\n")
    with pytest.raises(UserError, match="task cwe need the characters ',-01:AQTW', which"):
        make_prompt("cwe", "paper", tokenizer=letters)


def test_the_size_follows_from_the_vocabulary():
    assert data.default_size(BYTES) == "small"
    assert data.default_size(import_tokenizer("gpt2")) == "paper"


# -----------------------------------------------------------------------------
# Training


def byte_dataset(folder):
    """Write a dataset of the bytes 0 to 255, again and again."""
    folder.mkdir()
    data.write_tokens(folder / "train.bin", np.arange(20_000) % 256, 257)
    data.write_tokens(folder / "val.bin", np.arange(2_000) % 256, 257)
    meta = {"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}
    (folder / "meta.json").write_text(json.dumps(meta))
    return data.Dataset(str(folder))


@pytest.mark.parametrize(
    "fraction, length, max_position, digests",
    [
        (1.0, 64, 0, ["8451711d6d7ae5c6", "6a70da7d3bac2ac7"]),
        (0.25, 96, 0, ["cdcf514f2bd215b7", "1034361662486f36"]),
        (0.3, 64, 256, ["23784305c85690c4", "176497f0ae46e63e", "ec9e7d25823c7ec0"]),
    ],
)
def test_passkeys_are_those_of_the_old_setting(fraction, length, max_position, digests, tmp_path):
    # the digests are of commit e4b7bf2, with passkey_fraction
    dataset = byte_dataset(tmp_path / "bytes")
    parts = dataset.batch(3, 100, length, 1337, max_position, {"passkey": fraction})
    found = [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in parts if x is not None]
    assert found == digests


def test_batches_hold_the_fractions_of_the_tasks(text_data):
    dataset = data.Dataset(text_data)
    tasks = {"niah": 0.2, "vt": 0.1, "passkey": 0.1}
    x, y, *_ = dataset.batch(0, 2000, 160, 7, tasks=tasks)
    halves = [dataset.batch(i, 1000, 160, 7, tasks=tasks)[0] for i in (0, 1)]
    assert np.array_equal(np.concatenate(halves), x)
    found = Counter()
    lengths = []
    for inputs, targets in zip(x, y, strict=True):
        scored = np.flatnonzero(targets >= 0)
        if len(scored) > 12:
            found["text"] += 1
            continue
        answer = BYTES.decode(targets[scored].tolist()).decode()
        stop = scored[-1] + 1
        assert (np.diff(scored) == 1).all()
        assert inputs[0] == 256
        assert not inputs[stop:].any()
        kind = "vt" if re.fullmatch("( [a-z]{3}){3}", answer) else "niah"
        if re.fullmatch(r"\d{3}", answer):
            kind = "passkey"
        else:
            text = BYTES.decode(inputs[:stop].tolist()).decode() + answer[-1]
            prompt = data.Prompt(None, None, text, answer.split())
            assert find_answers(prompt, kind, "small") == prompt.answers
            lengths.append(stop)
        found[kind] += 1
    assert abs(found["niah"] - 400) < 90
    assert abs(found["vt"] - 200) < 70
    assert abs(found["passkey"] - 200) < 70
    assert min(lengths) < 60
    assert max(lengths) == 160
    # the other sequences are those of a run without tasks
    plain = dataset.batch(0, 2000, 160, 7)[0]
    is_text = (y >= 0).sum(1) > 12
    assert np.array_equal(x[is_text], plain[is_text])


def test_evaluation_does_not_ask_what_training_showed(text_data):
    x, *_ = data.Dataset(text_data).batch(0, 50, 160, 7, tasks={"niah": 1.0})
    shown = {bytes(row[1:].tolist()).strip(b"\0") for row in x}
    for sample in range(50):
        for length in range(40, 161):
            prompt = data.ruler_prompt("niah", BYTES, length, 7, sample)
            assert bytes(prompt.inputs.tolist()) not in shown


def test_tasks_that_cannot_be_made_are_refused_before_training(call, text_data, tmp_path):
    out = tmp_path / "run"
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={out}", "--block_size=64"]
    done = call("train.py", *words, "--tasks=fwe:0.1")
    assert_refused(done, "documents of the task fwe need up to", "the training sequences have 64")
    done = call("train.py", *words, "--tasks=passkey:0.1", "--block_size=15")
    assert_refused(done, "a passkey document needs")
    bare = tmp_path / "bare"
    byte_dataset(bare)
    meta = {"tokenizer": None, "vocab_size": 257, "bos": 256, "bos_default": True}
    (bare / "meta.json").write_text(json.dumps(meta))
    done = call("train.py", *words, "--tasks=niah:0.1", f"--dataset={bare}")
    assert_refused(done, "has no tokenizer")
    assert not out.exists()
