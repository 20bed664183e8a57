"""Documents made rather than read: passkey retrieval (Mohtashami & Jaggi 2023)."""

import numpy as np

from nanolong.errors import UserError

FILLER = "the grass is green. the sky is blue. "
NEEDLE = "key "
DIGITS = 3


def passkey(tokenizer, length, depth, rng, bos=None, hidden=True):
    """Make a passkey document: filler text that hides `key 123. ` and ends with `key 123`.

    depth: where the key is hidden, from 0 (start) to 1 (end). rng: a numpy generator. bos: an id
    that starts the document, or None. hidden=False leaves the key out of the filler, so that the
    answer can only be guessed.

    Returns inputs and targets, int64 (length,) each. The last DIGITS targets are the answer.
    Raises UserError if length is too short, or the vocabulary lacks the characters.
    """

    def encode(text):
        return [int(i) for i in tokenizer.encode(text)]

    filler = encode(FILLER)
    question = encode(NEEDLE)
    answer = [encode(str(digit))[-1] for digit in rng.integers(10, size=DIGITS)]
    needle = question + answer + encode(". ")
    phase = int(rng.integers(len(filler)))

    prefix = [] if bos is None else [bos]
    n_filler = length + 1 - len(prefix) - len(needle) - len(question) - DIGITS
    if n_filler < 0:
        raise UserError(
            f"a passkey document needs {length - n_filler} tokens, and {length} are too few: "
            "choose longer --lengths or --block_size"
        )
    body = [filler[(phase + i) % len(filler)] for i in range(n_filler + len(needle))]
    if hidden:
        start = round(depth * n_filler)
        body[start:] = needle + body[start:n_filler]

    document = np.array(prefix + body + question + answer)
    return document[:-1].copy(), document[1:]
