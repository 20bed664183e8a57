"""Documents that ask for something far back: own documents for tasks of RULER (2404.06654).

    niah      one key with one value, at a depth; asked for the value (a passkey)
    multikey  several keys with a value each; asked for the value of one
    nth       one key with several values; asked for the first, second, ... of them
    last      one key with several values; asked for the last of them

A document is a haystack of units (words or sentences) with needles among them, a question and the
answer. Each of these parts is encoded alone, so that its length is the sum of theirs. Vocabularies
of at most 512 tokens get short words and no sentences: 128 bytes are enough for every task.

Evaluation takes the samples of make_document() from 0 on, and datasets others, so that it never
asks what training has shown.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from nanolong.errors import UserError, require

KINDS = {"niah": 0, "multikey": 1, "nth": 4, "last": 5}  # a number of each, part of its seed
FIRST_SAMPLES = {"train": 1 << 32, "val": 1 << 33}  # numbers of the samples in datasets
SEVERAL = {"small": 3, "large": 4}  # keys of multikey, values of nth and last
ORDINALS = ("1st", "2nd", "3rd", "4th")

SENTENCES = """
The ferry left the harbour after dawn. A light rain fell on the roofs. Two children counted boats.
The old clock was slow again. The wind came from the west. A grey cat slept under the bench. The
lamps were lit at six. He wrote a short letter. The market was closed. Snow lay on the pass. The
path turned left behind the last house. The kettle was still warm. They talked about the harvest.
"""
FIRST = "amber bold calm dark early faint golden happy idle jolly keen lonely mild noble odd pale"
SECOND = "anchor bell cabin drum engine forest garden harbour island kettle lake mirror needle"
FILLER = {
    "small": [" sun", " sea", " oak", " fog", " bay"],
    "large": [f" {sentence}." for sentence in " ".join(SENTENCES.split())[:-1].split(". ")],
}
WORDS = {
    "small": ["".join(word) for word in itertools.product("bcdfgklm", "aeiou", "nprstvxz")],
    "large": ["-".join(pair) for pair in itertools.product(FIRST.split(), SECOND.split())],
}
DIGITS = {"small": 3, "large": 7}  # digits of values

# a needle and the question of each kind: every part begins with a space
SMALL = (" {} is {}.", " ? {} is")
CODE = " Question: which code does {0} have? Answer: the code of {0} is"
ORDERED = " Question: what is the {1} code of {0}? Answer: the {1} code of {0} is"
TEXTS = {
    "small": {
        **dict.fromkeys(("niah", "multikey"), SMALL),
        **dict.fromkeys(("nth", "last"), (SMALL[0], " ? {1} {0} is")),
    },
    "large": {
        **dict.fromkeys(("niah", "multikey"), (" The code of {} is {}.", CODE)),
        **dict.fromkeys(("nth", "last"), (" The code of {} is {}.", ORDERED)),
    },
}


@dataclass
class Task:
    """What a document says, before its length is known."""

    units: list[str]  # units of the haystack
    needles: list[tuple[float, str]]  # depth and text; the first n_asked of them answer
    n_asked: int
    question: str
    answer: str


class TooShort(UserError):
    """A document needs more tokens: `needed`."""

    def __init__(self, kind, length, needed):
        super().__init__(
            f"a document of the task {kind} needs {needed} tokens, and {length} are too few: "
            "choose longer --lengths"
        )
        self.needed = needed


def size_of(tokenizer) -> str:
    """Return the size of documents that goes with a tokenizer: small or large."""
    return "small" if tokenizer.vocab_size <= 512 else "large"


def make_task(kind, size, rng, depth):
    """Make the task that is a function of rng."""
    several = SEVERAL[size]
    words = [WORDS[size][i] for i in rng.permutation(len(WORDS[size]))]
    least = 10 ** (DIGITS[size] - 1)
    numbers = rng.choice(9 * least, several, replace=False) + least
    values = [str(number) for number in numbers]
    depths = rng.random(several)
    needle, question = TEXTS[size][kind]
    if kind in ("niah", "multikey"):
        # the first needle answers
        if depth is not None:
            depths[0] = depth
        n_needles = 1 if kind == "niah" else several
        needles = [(depths[i], needle.format(words[i], values[i])) for i in range(n_needles)]
        return Task(FILLER[size], needles, 1, question.format(words[0]), values[0])
    # their order counts
    depths.sort()
    number = int(rng.integers(several)) if kind == "nth" else several - 1
    which = ORDINALS[number] if kind == "nth" else "last"
    question = question.format(words[0], which)
    needles = [(depth, needle.format(words[0], v)) for depth, v in zip(depths, values, strict=True)]
    return Task(FILLER[size], needles, several, question, values[number])


@functools.lru_cache(maxsize=4096)
def encode(tokenizer, text):
    """Encode a part of a document, which begins with a space; a tokenizer may put it there."""
    try:
        ids = tokenizer.encode(text[tokenizer.added_bytes :])
    except UserError:
        ids = []
    if tokenizer.decode(ids) != text.encode():
        raise UserError(
            f"this vocabulary cannot write {text!r}, which documents of tasks need: leave the task "
            "out, or choose another tokenizer, such as bytes"
        )
    return [int(i) for i in ids]


def make_document(kind, tokenizer, length, seed, sample, bos=None, needles=True, depth=None):
    """Make the document that is a function of (seed, kind, sample), in `length` tokens.

    bos: an id that starts it, or None. needles=False leaves out the needles that answer the
    question, and fills their place with haystack: the answer can only be guessed. depth: place
    of niah's needle, from 0, the start, to 1, the end; None: at random.

    Returns inputs and targets, int64 (length,) each; targets before the answer are -1. The haystack
    begins with the end of a unit. Raises TooShort, or UserError if the vocabulary cannot write it.
    """
    entropy = [seed, sample, KINDS[kind]]
    rng = np.random.default_rng([*entropy, 0])
    task = make_task(kind, size_of(tokenizer), rng, depth)
    if not needles:
        task.needles = task.needles[task.n_asked :]
    prefix = [] if bos is None else [bos]
    facts = [encode(tokenizer, text) for _, text in task.needles]
    question, answer = encode(tokenizer, task.question), encode(tokenizer, f" {task.answer}")
    units = [encode(tokenizer, unit) for unit in task.units]
    sizes = np.array([len(unit) for unit in units])

    # as many units as there is space for
    space = length + 1 - len(prefix) - sum(map(len, facts)) - len(question) - len(answer)
    most = max(0, space // sizes.min() + 1)
    # A generator of its own, because the haystack must not depend on the needles.
    rng = np.random.default_rng([*entropy, 1])
    order = rng.integers(len(units), size=most)
    ends = np.concatenate(([0], sizes[order].cumsum()))
    if space < 0:
        raise TooShort(kind, length, length - space)
    n = int(np.searchsorted(ends, space, "right")) - 1
    body = [units[i] for i in order[:n]]

    # Insert from the back, because an insertion would shift the gaps after it.
    gaps = [min(int(depth * (n + 1)), n) for depth, _ in task.needles]
    for i in reversed(np.argsort(gaps, kind="stable")):
        body.insert(gaps[i], facts[i])
    # Fill the last few tokens by the end of a unit.
    left = space - int(ends[n])
    longer = next(unit for unit in reversed(units) if len(unit) > left)
    ids = np.array(
        [*prefix, *longer[len(longer) - left :], *itertools.chain(*body), *question, *answer]
    )
    targets = ids[1:].copy()
    targets[: -len(answer)] = -1
    return ids[:-1].copy(), targets


@functools.lru_cache(maxsize=64)
def least_length(kind, tokenizer, bos=None) -> int:
    """Return a length that is enough for every document of a kind."""
    needs = []
    for sample in range(64):
        try:
            make_document(kind, tokenizer, 0, 0, sample, bos)
        except TooShort as error:
            needs.append(error.needed)
    # Words differ in their number of tokens: others may need more than the longest of these.
    return 2 * max(needs) - min(needs)


def make_documents(weights, tokenizer, bos, length, n_documents):
    """Yield the documents of a dataset, each of a kind at random: "train" or "val", its token ids,
    and for each whether it is scored, as only answers are.

    weights: kind -> relative frequency; n_documents: of "train" and "val". A document fits in a
    sequence of `length` tokens, and has at least a quarter of it. Raises UserError.
    """
    least = {kind: least_length(kind, tokenizer, bos) for kind in weights}
    for kind, needed in least.items():
        require(
            length >= needed,
            f"documents of the task {kind} need up to {needed} tokens, and --length={length} is "
            "less: raise it, or leave out the task",
        )
    kinds = list(weights)
    frequencies = np.array(list(weights.values())) / sum(weights.values())
    # the length is the seed: datasets of two lengths have nothing in common
    rng = np.random.default_rng(length)
    for split, n in n_documents.items():
        for sample in range(FIRST_SAMPLES[split], FIRST_SAMPLES[split] + n):
            kind = kinds[rng.choice(len(kinds), p=frequencies)]
            size = int(rng.integers(max(length // 4, least[kind]), length + 1))
            inputs, targets = make_document(kind, tokenizer, size, length, sample, bos)
            yield split, np.append(inputs, targets[-1]), np.append(False, targets >= 0)
