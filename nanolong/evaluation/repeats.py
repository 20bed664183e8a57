"""Does a model use distant text: the gain of a longer context, by where the tokens before a target
stood last (after Sun et al. 2021, arXiv 2109.09115).
"""

import hashlib
import math
from functools import partial

import numpy as np

from nanolong import devices
from nanolong.evaluation import intervals, loss
from nanolong.evaluation.log import Cell

# Groups of targets: see bucket_masks().
BUCKETS = ("all", "near", "far", "beyond", "new", "pair far")
# With fewer documents than this intervals are over places: sequences of the longer context, which
# lie end to end, so that each place has targets and a context of its own.
MIN_DOCUMENTS = 8


def last_places(tokens, n):
    """Find where the n tokens that end at each index of a document stood last, before it.

    tokens: a list of N ids. Returns the index of the first of these tokens at their last place,
    int64 (N,); -1: they stood nowhere; -2: the document has no n tokens up to here.
    """
    places = np.full(len(tokens), -2)
    seen = {}
    for i in range(n - 1, len(tokens)):
        gram = tuple(tokens[i - n + 1 : i + 1])
        places[i] = seen.get(gram, -1)
        seen[gram] = i - n + 1
    return places


def repeats_of(tokens, is_separator):
    """Find the last places of trigrams and of pairs in the tokens of a file, document by document.

    is_separator: bool (N,); a separator is part of no trigram. Returns places of trigrams that end
    at each index, of pairs that end before it, and the number of each index's document.
    """
    trigrams, pairs = np.full(len(tokens), -2), np.full(len(tokens), -2)
    starts = np.flatnonzero(is_separator)
    for start, stop in zip([-1, *starts], [*starts, len(tokens)], strict=True):
        part = slice(start + 1, stop)
        for places, n in ((trigrams, 3), (pairs, 2)):
            found = last_places(tokens[part].tolist(), n)
            places[part] = np.where(found < 0, found, found + start + 1)
    # The pair of a target ends before the target, not at it.
    pairs = np.where(is_separator, -2, np.concatenate(([-2], pairs[:-1])))
    return trigrams, pairs, np.cumsum(is_separator)


def bucket_masks(trigrams, pairs, first_near, first_far):
    """Put targets into buckets, by where the trigram that ends with them stood last before, or the
    pair of tokens before them, whatever followed there: {bucket: bool (N,)}.

    trigrams, pairs: last places from repeats_of(). first_near, first_far: index of the first token
    that is visible to the targets in the shorter and in the longer context.
    """
    is_far = (trigrams < first_near) & (trigrams >= first_far) & (trigrams >= 0)
    return {
        "all": np.ones(len(trigrams), bool),
        "near": (trigrams >= first_near) & (trigrams >= 0),  # in the shorter context
        "far": is_far,  # in the longer context only
        "beyond": (trigrams >= 0) & (trigrams < first_far),  # before both contexts
        "new": trigrams == -1,  # nowhere in the document
        "pair far": (pairs < first_near) & (pairs >= first_far) & (pairs >= 0),
    }


def plan(name, model, text, cfg):
    """Return a cell for each context length of a checkpoint but the shortest."""
    short, *others = sorted(set(cfg.lengths))
    blank = {"checkpoint": name, "task": "loss", "protocol": "repeats"}
    blank |= {"context": short, "stride": loss.aligned_stride(cfg.stride or short, [short])}
    cells = []
    for length in others:
        records = [{**blank, "length": length, "bucket": bucket} for bucket in BUCKETS]
        cells.append(Cell(records, partial(score, records, model, text, cfg), [cfg.max_tokens]))
    return cells


def score(blank, model, text, cfg):
    """Return blank records of one length, one for each bucket, with losses and gains.

    Both contexts score the same targets, as in token-aligned; intervals are over documents, or over
    the places of fewer documents. Raises UserError if a context is too long for the text or the
    model.
    """
    contexts = blank[0]["context"], blank[0]["length"]
    ids = hashlib.sha256(text.hash.encode())
    before, after = (context_losses(model, text, cfg, n, blank[0], ids) for n in contexts)
    repeats = {}  # file -> repeats_of()
    sums = {record["bucket"]: {} for record in blank}  # by place, file and document
    both = zip(before, after, strict=True)
    for place, ((near, *_, losses), (far, file, stop, longer)) in enumerate(both):
        if file not in repeats:
            tokens = np.asarray(text.val.tokens[file], np.int64)
            repeats[file] = repeats_of(tokens, ~text.is_text(tokens))
        targets = slice(stop - len(losses), stop)
        trigrams, pairs, documents = (x[targets] for x in repeats[file])
        rows = np.stack((longer, np.ones(len(losses)), losses - longer))
        for bucket, chosen in bucket_masks(trigrams, pairs, near, far).items():
            for document in np.unique(documents[chosen]):
                key = place, file, int(document)
                sums[bucket][key] = rows[:, chosen & (documents == document)].sum(1)
    # the separator that ends a text is in "all" only, as the first target of the next document
    n_texts = len({key[1:] for bucket in BUCKETS[1:] for key in sums[bucket]})
    return [make_record(record, sums[record["bucket"]], n_texts, ids) for record in blank]


def context_losses(model, text, cfg, length, record, ids):
    """Score the targets of a record in contexts of this length; hash their token ids into ids.

    Returns for each sequence the index in its file of its first visible token, the file, the index
    after its last target, and the losses of its scored targets, float64.
    """
    split = text.val
    dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
    lengths = record["context"], record["length"]
    placement = ("token-aligned", record["stride"], lengths)
    sequences = loss.find_sequences(split, length, cfg.max_tokens, *placement)
    found = []
    for batch, x, y, losses in loss.sequence_losses(model, split, length, sequences, dtype):
        ids.update(x.numpy().tobytes() + y.numpy().tobytes())
        for (file, start, n_context), of_sequence in zip(batch, losses.numpy(), strict=True):
            stop = start + length + split.extra_tokens
            found.append((start, file, stop, of_sequence[n_context:]))
    return found


def make_record(blank, sums, n_texts, ids):
    """Add to a blank record the loss in the longer context, and the gain, its difference from the
    shorter one's, with intervals over documents; over places if n_texts, the number of documents,
    is small, and then the record has "texts", this number.

    sums: by place, file and document the summed loss, the number of targets, and the summed gain.
    """
    if not sums:
        return {**blank, "tokens": 0}
    is_over_places = n_texts < MIN_DOCUMENTS
    if is_over_places:
        blank = {**blank, "texts": n_texts}
    of_units = {}
    for (place, *document), row in sums.items():
        unit = place if is_over_places else tuple(document)
        of_units[unit] = of_units.get(unit, 0) + row
    by_sequence = [[round(float(x), 6) for x in row] for row in of_units.values()]
    losses, tokens, gains = zip(*by_sequence, strict=True)
    least = intervals.MIN_SAMPLES
    # Kish's effective number: if few places have most of the targets, an interval is too narrow
    if is_over_places and sum(tokens) ** 2 < least * sum(n**2 for n in tokens):
        least = math.inf
    found = intervals.ratio_interval(losses, tokens, least)
    record = {**blank, "loss": found.pop("mean"), **found, "tokens": round(sum(tokens))}
    record["gain"] = intervals.ratio_interval(gains, tokens, least)
    return {**record, "by_sequence": by_sequence, "ids": ids.hexdigest()[:16]}
