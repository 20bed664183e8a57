"""Documents for the tasks of RULER; test_masks.py trains on them.

The answers are computed from the text by a solver of its own, which shares nothing with the
generator.
"""

import functools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import trained_bpe

import data
from data.tasks import KINDS, TooShort, least_length, make_document
from nanolong.errors import UserError

BYTES = data.ByteTokenizer()
bpe = functools.partial(trained_bpe, 2000)


def solve(text):
    """Return the answer that follows from a text and its question, or None."""
    small = re.fullmatch(r"(.*) \? (.+) is", text)
    large = re.fullmatch(r"(.*) Question: (.*)\? Answer: (.*)", text)
    body, question, *begun = (small or large).groups()
    facts = re.findall(r"(?:The code of)? (\S+) is (\S+)\.", body)
    in_order = re.fullmatch(r"(?:what is the )?(last|\d)\w* (?:code of )?(\S+)", question)
    if in_order:
        assert not begun or question.replace("what is ", "") + " is" == begun[0]
        values = [value for key, value in facts if key == in_order[2]]
        place = len(values) if in_order[1] == "last" else int(in_order[1])
        return values[place - 1] if place <= len(values) > 1 else None
    asked = question
    if large:
        asked = re.search(r"code does (\S+) have", question)[1]
    values = [value for key, value in facts if key == asked]
    return values[0] if len(values) == 1 else None


def read(tokenizer, inputs, targets):
    """Return the text and the answer of a document, and check that they are its tokens."""
    first = int((targets >= 0).argmax())
    assert (targets[:first] == -1).all()
    assert np.array_equal(inputs[first + 1 :], targets[first:-1])
    text = tokenizer.decode(inputs[: first + 1].tolist()).decode()
    return text, tokenizer.decode(targets[first:].tolist()).decode()


@given(
    st.sampled_from(list(KINDS)),
    st.booleans(),
    st.integers(400, 16_000),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 32),
)
@settings(deadline=None, max_examples=150)
def test_answers_follow_from_the_text_and_only_from_the_needles(kind, is_bpe, length, seed, sample):
    tokenizer = bpe() if is_bpe else BYTES
    what = (kind, tokenizer, length, seed, sample, tokenizer.bos)
    inputs, targets = make_document(*what)
    assert len(inputs) == len(targets) == length and inputs[0] == tokenizer.bos
    text, answer = read(tokenizer, inputs, targets)
    assert " " + solve(text) == answer

    text, same_answer = read(tokenizer, *make_document(*what, needles=False))
    assert same_answer == answer
    assert not {*re.findall(r"[\w-]+", text)} & {*answer.split()}
    assert solve(text) != answer[1:]
    # the other keys of multikey stay
    n_others = len(re.findall(r" is \d+\.", text))
    assert n_others == ((3 if is_bpe else 2) if kind == "multikey" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_documents_have_answers_too(kind):
    """128 bytes are enough; of fewer the message says how many are needed."""
    assert least_length(kind, BYTES, 256) <= 128
    for tokenizer in (BYTES, bpe()):
        least = least_length(kind, tokenizer, tokenizer.bos)
        for sample in range(40):
            with pytest.raises(TooShort, match=f"task {kind} needs") as error:
                make_document(kind, tokenizer, 9, 3, sample, tokenizer.bos)
            needed = error.value.needed
            assert needed <= least
            for n in (needed, needed + 1):
                document = make_document(kind, tokenizer, n, 3, sample, tokenizer.bos)
                text, answer = read(tokenizer, *document)
                assert " " + solve(text) == answer
            with pytest.raises(TooShort):
                make_document(kind, tokenizer, needed - 1, 3, sample, tokenizer.bos)


@pytest.mark.parametrize("kind", ["niah", "multikey"])
def test_the_needle_stands_at_its_depth(kind):
    """By default anywhere; the rest of the document does not depend on where."""
    for depth in (0, 0.25, 1):
        for sample in range(9):
            what = (kind, BYTES, 3000, 1, sample)
            text, answer = read(BYTES, *make_document(*what, depth=depth))
            place = text.index(f" is{answer}.") / (len(text) - 8)
            assert abs(place - depth) < 0.02
    places = []
    for sample in range(300):
        text, answer = read(BYTES, *make_document(kind, BYTES, 3000, 1, sample))
        places.append(text.index(f" is{answer}.") / len(text))
    counts, _ = np.histogram(places, 5, (0, 1))
    assert abs(counts - 60).max() < 5 * 60**0.5  # five standard deviations


def test_a_vocabulary_that_cannot_write_documents_is_refused():
    letters = data.CharTokenizer("abcdefghijklmnopqrstuvwxyz .?")
    with pytest.raises(UserError, match="cannot write ' ... is \\d+.', which documents of tasks"):
        make_document("niah", letters, 300, 1, 1)
