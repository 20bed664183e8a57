"""Documents that ask for what stands far before: own documents for the tasks of RULER.

The tasks are those of Hsieh et al. 2024 (arXiv 2404.06654); texts and code are not, so that scores
cannot be compared with published ones. A document is a haystack of units (filler words, sentences
or the entries of a list), needles among them, a question, and the answer:

    niah        one key with one value; asked for its value
    multikey    several keys; asked for the value of one, so that the others are distractors
    multivalue  several values of one key; asked for all, in their order in the text
    multiquery  several keys; asked for the values of all, in the order of the question
    vt          a chain of variables, each assigned from the one before; asked for their names
    cwe         a list in which some words occur often and the others rarely; asked for the
                common ones, in the order in which they first occur
    fwe         a list whose k-th most frequent word occurs in proportion to k^-a; asked for the
                three most frequent words, the most frequent first

Two sizes: `small`, for byte models of short context, has no instructions, words of three letters
and numbers of three digits; `paper` describes the task in sentences and has numbers as long and
lists as long as the paper's. Its keys and list entries are pairs of words such as calm-river.
"""

import functools
import itertools
import string
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from data.tokenizer import CharTokenizer
from nanolong.errors import UserError

KINDS = ("niah", "multikey", "multivalue", "multiquery", "vt", "cwe", "fwe")
SIZES = ("small", "paper")
WITH_DISTRACTORS = ("multikey",)  # the kinds that distractors=False changes


@dataclass
class Prompt:
    """A document, its tokens, and which of them are scored."""

    inputs: np.ndarray  # int64 (n,)
    targets: np.ndarray  # int64 (n,): the next token of each input; -1 for all but the answer
    text: str  # the whole document with its answer, without <bos>
    answers: list[str]  # in the order in which they stand at the end of the text


@dataclass
class Task:
    """A document before its length is known."""

    names: list[str]  # what the question names: keys or a value
    answers: list[str]
    haystack: Callable[[int], list[str]]  # n -> n units
    # (place, text, asked); the place is between 0, the start of the haystack, and 1
    needles: list[tuple[float, str, bool]] = field(default_factory=list)
    least_units: int = 0
    most_units: float = float("inf")  # with more units the answer would be ambiguous


def ruler_prompt(
    kind, tokenizer, length, seed, sample, size="small", bos=None, needles=True, distractors=True
) -> Prompt:
    """Make a document of at most `length` inputs, and fewer by less than a unit of its haystack.

    The document is a function of (seed, kind, length, sample, size). bos: an id that starts it,
    or None.
    needles=False leaves out the needles that answer the question, and fills their place with
    haystack: the answer can only be guessed. In cwe the common words are then absent; in fwe other
    words, each once, replace the three words.
    distractors=False leaves out the needles that are not asked for (kinds WITH_DISTRACTORS).

    Raises UserError if length is too short, or the vocabulary cannot write the document.
    """
    document = _Document(kind, size, [seed, sample, length], tokenizer, bos, needles, distractors)
    task = document.task
    excess = document.count(task.least_units) - length
    if excess > 0:
        raise UserError(
            f"a document of the task {kind} needs {length + excess} tokens, and {length} are too "
            "few: choose longer --lengths or --block_size"
        )
    n = _most_units(document.count, task.least_units, length)
    if n > task.most_units:
        raise UserError(
            f"a document of the task {kind} has too few different words for {length} tokens: "
            "choose shorter --lengths or --block_size"
        )
    ids = np.array(document.ids(n))
    targets = ids[1:].copy()
    targets[: -len(document.answer_ids)] = -1
    return Prompt(ids[:-1].copy(), targets, f"{document.text(n)} {document.answer}", task.answers)


@functools.lru_cache(maxsize=64)
def needed_length(kind: str, tokenizer, size: str, bos: int | None = None) -> int:
    """Return a length that is enough for every document of a kind. Raises as ruler_prompt()."""
    needs = []
    for sample in range(64):
        document = _Document(kind, size, [0, sample, 0], tokenizer, bos)
        needs.append(document.count(document.task.least_units))
    # Words differ in their number of tokens: others may need more than the longest of these.
    return max(needs) + (max(needs) - min(needs))


def default_size(tokenizer) -> str:
    """Return the size of documents that goes with a tokenizer: paper above 512 tokens."""
    return "small" if tokenizer.vocab_size <= 512 else "paper"


# -----------------------------------------------------------------------------
# The texts. Words and sentences are the project's own.

FILLER = "sun sea sky ice oak elm fog dew bay fen".split()

TEXT = """
The ferry left the harbour a little after dawn. A light rain fell on the roofs of the village. The
baker opened the door and swept the steps. Two children counted the boats on the river. Somebody
had left a ladder against the wall. The old clock in the hall was slow again. In the afternoon the
wind came from the west. The gardener watered the beans and went home. A grey cat slept under the
bench all morning. The train to the coast was almost empty. Nobody remembered who had painted the
fence. The lamps along the bridge were lit at six. She folded the map and looked at the hills. He
wrote a short letter and did not send it. The market was closed because of the holiday. Snow lay
on the pass until the end of May. The teacher wiped the board and shut the window. A cart with
apples stood in front of the mill. The path turned left behind the last house. They talked about
the harvest and the weather. The kettle was still warm when they came back. Some geese flew over
the fields to the south. The shop sold candles, string and lamp oil. After supper the guests
walked along the shore.
"""
SENTENCES = [f"{sentence}." for sentence in " ".join(TEXT.split())[:-1].split(". ")]

FIRST_WORDS = """
amber ancient basic blue bold brave brief bright broad broken calm careful cheap clean clear clever
cold cool copper curious dark deep distant dry early empty equal even faint famous fancy fast fine
firm flat fresh gentle golden grand green grey happy hard heavy hidden hollow honest huge humble
idle iron jolly keen kind large late lazy light little lonely long loud lucky mellow mild modest
narrow neat noble odd open pale patient plain polite proud
""".split()

SECOND_WORDS = """
anchor arrow badge barrel basket beacon bell bench blanket boat bottle bridge broom bucket button
cabin candle canyon castle chair circle cliff cloud coat comet corner cradle crown desert drum
engine feather fence field flute forest garden gate glove hammer harbour hat helmet island jacket
kettle ladder lake lantern letter maple marble meadow mirror mountain needle ocean orchard paddle
pebble pencil pillow planet pocket pond rabbit ribbon river saddle shovel spoon table temple tower
tunnel valley violin wagon window
""".split()

# kind -> the opening, the question and the start of its answer, in the size paper
CODES = "Sentences that name a code are hidden in the text below. Remember the codes."
TEXTS = {
    "niah": (CODES, "Which code does {names} have", "The code of {names} is"),
    "multikey": (CODES, "Which code does {names} have", "The code of {names} is"),
    "multivalue": (
        CODES,
        "Which {n} codes does {names} have, in the order of the text",
        "The codes of {names} are",
    ),
    "multiquery": (
        CODES,
        "Which codes do {names} have, in this order",
        "The codes of {names} are",
    ),
    "vt": (
        "The text below assigns values to variables, to some from another variable.",
        "Which {n} variables have the value {names}, in the order of the text",
        "The variables with the value {names} are",
    ),
    "cwe": (
        "The list below repeats some words often, and the others rarely.",
        "Which {n} words are the most common, in the order of the list",
        "The most common words are",
    ),
    "fwe": (
        "The words of the list below occur with different frequencies.",
        "Which {n} words are the most frequent, the most frequent first",
        "The most frequent words are",
    ),
}
SMALL_QUESTIONS = {"multiquery": "? {} are", "cwe": "? most", "fwe": "? most"}  # else "? {} is"

# of the niah kinds: how many keys, values of each key, and keys that are asked for; n: of SEVERAL
SHAPES = {
    "niah": (1, 1, 1),
    "multikey": ("n", 1, 1),
    "multivalue": (1, "n", 1),
    "multiquery": ("n", 1, "n"),
}
SEVERAL = {"small": 3, "paper": 4}
HOPS = {"small": 2, "paper": 4}  # of vt: the assignments after the first
# of cwe: how many common words, how often each of them and each other word occurs
COMMON_WORDS = {"small": (3, 4, 1), "paper": (10, 30, 3)}
# of fwe: the exponent, and the length of the shortest list whose third word occurs twice, which is
# more often than the fourth
FREQUENT_WORDS = {"small": (1.5, 17), "paper": (2.0, 25)}


@functools.cache
def _vocabulary(size):
    if size == "paper":
        return [f"{a}-{b}" for a, b in itertools.product(FIRST_WORDS, SECOND_WORDS)]
    words = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    return [word for word in words if word not in FILLER and word != "are"]


def _shuffled_vocabulary(size, rng):
    vocabulary = _vocabulary(size)
    return [vocabulary[i] for i in np.argsort(rng.random(len(vocabulary)), kind="stable")]


def _distinct(make, n):
    """Return n different results of make()."""
    found = []
    while len(found) < n:
        new = make()
        if new not in found:
            found.append(new)
    return found


def _distinct_words(size, rng, n):
    vocabulary = _vocabulary(size)
    return _distinct(lambda: vocabulary[int(rng.integers(len(vocabulary)))], n)


def _distinct_numbers(digits, rng, n):
    return _distinct(lambda: str(rng.integers(10 ** (digits - 1), 10**digits)), n)


def _listed(words):
    """Write words as in "a, b and c"."""
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last


# -----------------------------------------------------------------------------
# The tasks


def _make_task(kind, size, numbers, needles):
    """Make the task that is a function of (kind, size, numbers)."""
    entropy = [*numbers, KINDS.index(kind), SIZES.index(size)]
    rng = np.random.Generator(np.random.PCG64([*entropy, 0]))

    def noise(n):
        # of its own, so that the haystack does not depend on the number of needles; fewer numbers
        # are the start of more
        return np.random.Generator(np.random.PCG64([*entropy, 1])).random(n)

    if kind == "vt":
        return _variable_tracking(size, rng, noise)
    if kind == "cwe":
        return _common_words(size, rng, noise)
    if kind == "fwe":
        return _frequent_words(size, rng, noise, needles)
    return _retrieval(kind, size, rng, noise)


def _filler(size, noise):
    """Return the function that makes n units of filler."""
    units = FILLER if size == "small" else SENTENCES
    return lambda n: [units[int(x * len(units))] for x in noise(n)]


def _retrieval(kind, size, rng, noise):
    shape = [SEVERAL[size] if n == "n" else n for n in SHAPES[kind]]
    n_keys, n_values, n_asked = shape
    keys = _distinct_words(size, rng, n_keys)
    values = _distinct_numbers(7 if size == "paper" else 3, rng, n_keys * n_values)
    places = rng.random(n_keys * n_values)
    if n_values > 1:
        places.sort()
    sentence = "The code of {} is {}." if size == "paper" else "{} is {}."
    owners = [key for key in keys for _ in range(n_values)]
    asked = keys[:n_asked]
    needles = [
        (place, sentence.format(key, value), key in asked)
        for place, key, value in zip(places, owners, values, strict=True)
    ]
    return Task(asked, values[: n_asked * n_values], _filler(size, noise), needles)


def _variable_tracking(size, rng, noise):
    n_names = HOPS[size] + 1
    if size == "small":
        names = _distinct_words(size, rng, n_names)
        value = _distinct_numbers(3, rng, 1)[0]
        sources = [value, *names]
        sentence = "{} is {}."
    else:
        letters = string.ascii_uppercase
        names = _distinct(lambda: "".join(letters[i] for i in rng.integers(26, size=5)), n_names)
        value = _distinct_numbers(5, rng, 1)[0]
        sources = [value, *(f"VAR {name}" for name in names)]
        sentence = "VAR {} = {}."
    texts = map(sentence.format, names, sources)
    # a variable is assigned before another is assigned from it
    places = np.sort(rng.random(n_names))
    needles = [(place, text, True) for place, text in zip(places, texts, strict=True)]
    return Task([value], names, _filler(size, noise), needles)


def _common_words(size, rng, noise):
    n_common, n_often, n_rarely = COMMON_WORDS[size]
    words = _shuffled_vocabulary(size, rng)
    common = words[:n_common]
    others = words[n_common:]
    places = np.sort(rng.random(n_common * n_often))
    occurrences = np.repeat(np.arange(n_common), n_often)
    order = occurrences[np.argsort(rng.random(len(occurrences)), kind="stable")]
    needles = [(place, common[i], True) for place, i in zip(places, order, strict=True)]
    answers = [common[i] for i in dict.fromkeys(order.tolist())]

    def haystack(n):
        order = np.argsort(noise(n), kind="stable")
        return [others[i // n_rarely % len(others)] for i in order]

    most = len(others) * (n_often - n_rarely)
    return Task([], answers, haystack, needles, most_units=most)


def _frequent_words(size, rng, noise, needles):
    exponent, least = FREQUENT_WORDS[size]
    words = _shuffled_vocabulary(size, rng)

    def haystack(n):
        entries = [words[rank] for rank in _zeta_ranks(n, exponent)]
        if not needles:
            rare = itertools.cycle(reversed(words))
            entries = [next(rare) if word in words[:3] else word for word in entries]
        return [entries[i] for i in np.argsort(noise(n), kind="stable")]

    return Task([], words[:3], haystack, least_units=least)


def _zeta_ranks(n, exponent):
    """Return the ranks, from 0, of n words with frequencies by a zeta distribution.

    While a number c grows, the word of rank k - 1 is appended whenever c / k^exponent reaches an
    integer, so that a longer list begins with the shorter ones.
    """
    k = np.arange(1, n + 1)
    counts = (n / k**exponent).astype(np.int64)
    ranks = np.repeat(k, counts)
    occurrence = np.concatenate([np.arange(1, count + 1) for count in counts])
    # the same integer on machines whose powers differ in the last bit
    c = np.ceil(occurrence * ranks**exponent - 1e-6)
    order = np.lexsort((ranks, c))[:n]
    return (ranks[order] - 1).tolist()


# -----------------------------------------------------------------------------
# Filling a document to its length


class _Document:
    """The text and the tokens of a task with any number of units."""

    def __init__(self, kind, size, numbers, tokenizer, bos, needles=True, distractors=True):
        self.task = task = _make_task(kind, size, numbers, needles)
        kept = {True: needles, False: distractors}
        self.needles = [(place, text) for place, text, asked in task.needles if kept[asked]]
        if size == "small":
            self.opening = ""
            self.question = SMALL_QUESTIONS.get(kind, "? {} is").format(" ".join(task.names))
        else:
            self.opening, question, start = TEXTS[kind]
            form = f"Question: {question}?\nAnswer: {start}"
            self.question = form.format(names=_listed(task.names), n=len(task.answers))
        self.separator = " " if size == "small" else "\n"
        self.answer = (" " if size == "small" else ", ").join(task.answers)
        self.tokenizer = tokenizer
        self.prefix = [] if bos is None else [bos]
        self.check_characters(kind)
        self.answer_ids = _encode_answer(tokenizer, kind, self.answer)
        self.encoded = {}

    def text(self, n):
        """Return the text without the answer."""
        body = " ".join(_insert(self.task.haystack(n), self.needles))
        parts = (self.opening, body, self.question)
        return self.separator.join(part for part in parts if part)

    def ids(self, n):
        """Return the ids of the whole document. Tokens may span units: all is encoded at once."""
        if n not in self.encoded:
            question_ids = [int(i) for i in self.tokenizer.encode(self.text(n))]
            self.encoded[n] = self.prefix + question_ids + self.answer_ids
        return self.encoded[n]

    def count(self, n):
        """Return the number of inputs: the last token is only a target."""
        return len(self.ids(n)) - 1

    def check_characters(self, kind):
        """Raise UserError if a character of such documents, not only of this one, has no id."""
        if not isinstance(self.tokenizer, CharTokenizer):
            return
        facts = " ".join([self.answer, *(text for _, text in self.needles)])
        units = self.task.haystack(self.task.least_units + 1)
        needed = set(" ".join([self.opening, self.question, facts, *units]))
        needed |= set(string.ascii_lowercase)
        if set(facts) & set(string.digits):
            needed |= set(string.digits)
        if self.answer.isupper():
            needed |= set(string.ascii_uppercase)
        missing = "".join(sorted(needed - set(self.tokenizer.characters)))
        if missing:
            raise UserError(
                f"documents of the task {kind} need the characters {missing!r}, which this "
                "vocabulary lacks: leave out the task, or prepare the dataset with "
                "--tokenizer=bytes"
            )


def _most_units(count, low, limit):
    """Return an n with count(n) <= limit < count(n + 1). count(low) must be at most limit."""
    high = low + 16
    while count(high) <= limit:
        low = high
        high *= 2
    n_rounds = 0
    while high - low > 1:
        # Counts are almost linear in n, so that interpolation needs a few rounds where bisection
        # needs ten; bisection ends the search if they are not.
        fraction = (limit - count(low)) / (count(high) - count(low)) if n_rounds < 8 else 0.5
        middle = min(max(low + round(fraction * (high - low)), low + 1), high - 1)
        if count(middle) <= limit:
            low = middle
        else:
            high = middle
        n_rounds += 1
    return low


def _insert(units, needles):
    """Insert needles into a list of units, each at its place."""
    gaps = [int(place * (len(units) + 1)) for place, _ in needles]
    parts = list(units)
    for i in reversed(np.argsort(gaps, kind="stable")):
        parts.insert(gaps[i], needles[i][1])
    return parts


def _encode_answer(tokenizer, kind, answer):
    """Encode the answer as it continues the question, with the space before it.

    It is encoded alone, so that no token spans the question and the answer. A tokenizer that puts
    a space before every text gets the answer without one.
    """
    text = " " + answer
    ids = [int(i) for i in tokenizer.encode(text[tokenizer.added_bytes :])]
    if tokenizer.decode(ids) != text.encode():
        raise UserError(
            f"this vocabulary cannot write {answer!r}, an answer of the task {kind}: leave out the "
            "task, or choose another tokenizer"
        )
    return ids
