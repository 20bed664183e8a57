"""Which text an evaluation scores, and which of its tokens: see the protocols in evaluate.py."""

import math
from itertools import pairwise

import numpy as np
import torch

from data import Dataset, TextFile, same_vocabulary, split_mixture, tokenizer_from_json
from nanolong import intervals
from nanolong.errors import UserError, note

# The scored tokens of a sequence, by default: of sliding and token-aligned, and of last-tokens.
STRIDE = 256
LAST_TOKENS = 500

# Protocols that score the same tokens at every length.
ALIGNED = ("token-aligned", "last-tokens")

# Equal parts of a sequence whose losses are known apart.
N_PARTS = 16

# -----------------------------------------------------------------------------
# Protocols: which sequences are evaluated, and which of their tokens are scored.


def aligned_stride(stride, lengths):
    """Return the scored tokens of an aligned sequence: at most half the shortest length."""
    half_shortest = max(1, min(lengths) // 2)
    return min(stride, half_shortest)


def place_sequences(protocol, length, start, stop, stride, lengths):
    """Place sequences of `length` targets that score the targets from `start` to `stop` of a text.

    Returns a list of (start, n_context): the first n_context targets of a sequence are context
    only and are not scored. lengths: all that are to be compared.
    """
    if protocol in ALIGNED:
        # Sequences of the longest length lie end to end; shorter ones end where these end.
        longest = max(lengths)
        n_context = length - aligned_stride(stride, lengths)
        return [(end - length, n_context) for end in range(start + longest, stop + 1, longest)]

    step = length
    first_end = start + length
    if protocol == "sliding":
        step = min(stride, length)
        first_end = max(length, start + step)  # what comes before `start` is context, too
    ends = [start, *range(first_end, stop, step), stop]
    sequences = []
    for previous_end, end in pairwise(ends):
        n_new = end - previous_end
        sequences.append((end - length, length - n_new))
    return sequences


def group_protocols(protocols, stride, lengths):
    """Group the protocols that share their forward passes, with the extra fields of their records.

    stride: 0 for each protocol's own. Returns a list of (protocols, fields).
    """
    groups = {}
    for protocol in protocols:
        fields = {}
        sequences = protocol
        if protocol in ALIGNED:
            default = LAST_TOKENS if protocol == "last-tokens" else STRIDE
            fields = {"stride": aligned_stride(stride or default, lengths)}
            sequences = "aligned"
        elif protocol == "sliding":
            fields = {"stride": stride or STRIDE}
        elif protocol != "key-tokens":
            sequences = "chunked"
        shared, _ = groups.setdefault((sequences, *fields.values()), ([], fields))
        shared.append(protocol)
    return [(tuple(shared), fields) for shared, fields in groups.values()]


def fitting_lengths(split, lengths, max_tokens):
    """Return those of `lengths` of which some file of a split holds a sequence."""
    fitting = []
    for length in lengths:
        if length <= max_tokens and split.n_sequences(length).any():
            fitting.append(length)
    return fitting


def find_spans(split, longest, max_tokens):
    """Choose the text that is scored: spans (file, start, stop) of at most max_tokens targets.

    They are sequences of `longest` targets, evenly spaced over all files as in train.py's
    validation. A text of at most max_tokens is scored as a whole, but for files that are shorter.
    """
    sizes = [len(tokens) - split.extra_tokens for tokens in split.tokens]
    if sum(sizes) <= max_tokens:
        return [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
    spans = []
    for index in split.spaced(max_tokens // longest, longest):
        file, start = split.locate(index, longest)
        spans.append((file, start, start + longest))
    return spans


def find_sequences(split, length, max_tokens=65536, protocol="chunked", stride=STRIDE, lengths=()):
    """Place the sequences of a protocol in the text that is scored.

    lengths: all that are to be compared, which score the same text. Returns a list of
    (file, start, n_context): the index of a file in `split`, and what place_sequences() returns.
    Raises UserError when the text is too short.
    """
    fitting = fitting_lengths(split, (*lengths, length), max_tokens)
    if length not in fitting:
        n_targets = max(len(tokens) - split.extra_tokens for tokens in split.tokens)
        raise UserError(
            f"a sequence of {length} tokens is longer than the {min(max_tokens, n_targets)} that "
            "are scored: raise --max_tokens, or give a longer validation text"
        )
    sequences = []
    for file, start, stop in find_spans(split, max(fitting), max_tokens):
        placed = place_sequences(protocol, length, start, stop, stride, fitting)
        sequences += [(file, *place) for place in placed]
    return sequences


def read_sequences(split, length, sequences):
    """Read sequences of find_sequences(): inputs and targets, int64 (B, length).

    Targets of -1 are not scored: here those that are context only, in the text <bos>.
    """
    inputs, targets = [], []
    for file, start, n_context in sequences:
        x, y = split.sequence_at(file, start, length)
        is_context = np.arange(length) < n_context
        inputs.append(x)
        targets.append(np.where(is_context, -1, y))
    x = torch.from_numpy(np.stack(inputs))
    y = torch.from_numpy(np.stack(targets))
    return x, y


# -----------------------------------------------------------------------------
# Sums by sequence and part


def part_edges(length):
    """Return where the parts of a sequence begin and end; fewer than N_PARTS if it is shorter."""
    return sorted({length * i // N_PARTS for i in range(N_PARTS + 1)})


def sum_parts(values):
    """Sum values of tokens (B, T) over each part of a sequence: (B, N_PARTS)."""
    edges = part_edges(values.shape[1])
    return torch.stack([values[:, start:end].sum(1) for start, end in pairwise(edges)], 1)


def bytes_by_part(dataset, length, sequences):
    """Count the bytes of text that the scored targets stand for: int64 (N, N_PARTS).

    dataset: a Dataset or TextFile; sequences: of find_sequences(). Returns None if the tokenizer,
    or what its tokens stand for, is unknown.
    """
    if dataset.tokenizer is None:
        return None
    try:
        byte_lengths = torch.from_numpy(dataset.tokenizer.byte_lengths)
        added_bytes = dataset.tokenizer.added_bytes
    except UserError:  # a tokenizer.json whose tokens are no bytes, or without its package
        return None
    split = dataset.val
    counts = []
    for sequence in sequences:
        inputs, targets = read_sequences(split, length, [sequence])
        scored = targets >= 0
        n_bytes = byte_lengths[targets.where(scored, 0)] * scored
        if added_bytes:
            # What the tokenizer has put before a document is not the document's.
            starts_document = inputs == dataset.separator
            if split.bos is not None:
                starts_document[0, 0] = sequence[1] == 0
            n_bytes -= added_bytes * (scored & starts_document)
        counts.append(sum_parts(n_bytes))
    return torch.cat(counts)


# -----------------------------------------------------------------------------
# Records


def loss_record(name, protocol, length, **fields):
    """Return a record of a loss, as it is written to the JSON file."""
    return {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length, **fields}


def make_records(records, sums, counts, n_bytes=None):
    """Add the sums of every sequence by part to records of loss_record(), one for each protocol.

    `position` makes one for each part of the sequence. sums, counts: of losses.loss_by_part();
    n_bytes: of bytes_by_part(), None if they are unknown. Returns a list of records.
    """
    length = records[0]["length"]
    edges = part_edges(length)
    found = []
    for record in records:
        ranges = [(0, length)]
        if record["protocol"] == "position":
            ranges = pairwise(edges)
        elif record["protocol"] == "last-quarter":
            ranges = [(length * 3 // 4, length)]
        for start, end in ranges:
            parts = slice(edges.index(start), edges.index(end))
            of_sequences = [round(total, 6) for total in sums[:, parts].sum(1).tolist()]
            columns = [of_sequences, counts[:, parts].sum(1).int().tolist()]
            if n_bytes is not None:
                columns.append(n_bytes[:, parts].sum(1).tolist())
            if record["protocol"] == "position":
                found.append({**record, "position": [start, end], **loss_fields(columns)})
            else:  # these are compared sequence by sequence
                by_sequence = list(zip(*columns, strict=True))
                found.append({**record, **loss_fields(columns), "by_sequence": by_sequence})
    return found


def loss_fields(columns):
    """Return the fields of a record for the summed losses, tokens and bytes of its sequences.

    columns: a list of each, that of the bytes only if they are known.
    """
    sums, tokens, *n_bytes = columns
    found = intervals.ratio_interval(sums, tokens)
    fields = {"loss": found.pop("mean"), **found, "tokens": sum(tokens)}
    if n_bytes:
        fields["bytes"] = sum(n_bytes[0])
    return fields


def in_bits_per_byte(record):
    """Return a record with its loss and interval in bits per byte of the text."""
    sums, _, n_bytes = zip(*record["by_sequence"], strict=True)
    found = intervals.ratio_interval([total / math.log(2) for total in sums], n_bytes)
    return {**record, "loss": found.pop("mean"), **found}


def compare(records, text_ids):
    """Add to records of losses how they differ from others on the same text, in place.

    "difference": this checkpoint minus the first one, from the differences of the same sequences.
    "benefit", of last-tokens: what each doubling of the context takes off the loss, from the
    shortest length to this one, from the differences of the same places.
    text_ids: of identify_texts().
    """
    first_of, shortest_of = {}, {}
    for record in records:
        if "by_sequence" not in record:
            continue
        text = text_ids[record["checkpoint"]]
        first = first_of.setdefault((text, record["protocol"], record["length"]), record)
        if first is not record:
            record["difference"] = paired_difference(record, first)
        if record["protocol"] == "last-tokens":
            shortest = shortest_of.setdefault(record["checkpoint"], record)
            doublings = math.log2(record["length"] / shortest["length"])
            if doublings > 0:
                record["benefit"] = paired_difference(shortest, record, doublings)


def paired_difference(record, other, divisor=1.0):
    """Return the interval of a difference of losses, by sequence, divided by the divisor."""
    differences, n_tokens = [], []
    for found, of_other in zip(record["by_sequence"], other["by_sequence"], strict=True):
        differences.append((found[0] - of_other[0]) / divisor)
        n_tokens.append(found[1])
    return intervals.ratio_interval(differences, n_tokens)


def identify_texts(models, texts):
    """Return an id for the text of each checkpoint: the same if they score the same tokens."""
    ids = {}
    for name, model in models.items():
        ids[name] = name
        for other in ids:
            same_text = texts[name].hash == texts[other].hash
            # the token that starts every text moves where the sequences begin
            same_text &= model.meta.get("bos") == models[other].meta.get("bos")
            if same_text and not have_different_vocabularies({0: model, 1: models[other]}):
                ids[name] = ids[other]
                break
    return ids


# -----------------------------------------------------------------------------
# Texts


def open_texts(models, cfg, lengths):
    """Open the text that each checkpoint is scored on: a dict from name to Dataset or TextFile."""
    datasets = {}
    texts = {}
    for name, model in models.items():
        if cfg.text:
            texts[name] = read_text(model, cfg.text)
            split = texts[name].val
            if not split.n_sequences(min(lengths)).any():
                raise UserError(
                    f"--text={cfg.text} holds {len(split)} tokens, too few for a sequence of "
                    f"{min(lengths)}: give a longer text, or shorter --lengths"
                )
            continue
        meta = model.meta
        key = (name_of_text(cfg.dataset or meta["dataset"]), meta.get("bos") is not None)
        folder = getattr(model, "folder", name)
        reader = (folder, model.config.vocab_size, meta.get("tokenizer"))
        if key not in datasets:
            datasets[key] = Dataset(*key, reader)
        texts[name] = datasets[key]
        texts[name].check_model(*reader)
        note_changed_data(folder, meta, texts[name])
    longest = max(len(text.val) for text in texts.values())
    if cfg.text and longest > cfg.max_tokens and have_different_vocabularies(models):
        note(
            f"{cfg.max_tokens} tokens are another part of the text in each vocabulary: "
            f"to compare bits per byte on all of it, give --max_tokens={longest}"
        )
    return texts


def name_of_text(name):
    """Return the dataset to score. Raises UserError for a mixture, which is no text."""
    first, *others = split_mixture(name)
    if others:
        choices = " or ".join(f"--dataset={source}" for source in (first, *others))
        raise UserError(f"{name} is a mixture of datasets, and one is scored: give {choices}")
    return first


def read_text(model, file):
    """Read a text file as a TextFile in the tokens of the model. Raises UserError."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        what = getattr(model, "folder", "the model")
        raise UserError(f"the tokenizer of {what} is unknown: give --dataset, not --text")
    return TextFile(file, tokenizer, model.config.vocab_size, model.meta.get("bos"))


def note_changed_data(what, meta, dataset):
    """Print a note if a dataset has changed since a checkpoint was trained on it.

    What is validation text now may have been training text then. meta: the checkpoint's.
    """
    name, found = meta.get("dataset"), meta.get("data_hash")
    if not name or not found:
        return
    sources = split_mixture(name) if "," in found else [name]  # a mixture has a hash for each
    hashes = dict(zip(sources, found.split(","), strict=False))
    trained_on = hashes.get(dataset.name, dataset.hash)
    if trained_on != dataset.hash:
        note(
            f"dataset {dataset.name} is now {dataset.hash}, and {what} was trained on "
            f"{trained_on}: the model may have seen in training what is scored here"
        )


def have_different_vocabularies(models):
    """Return whether a token stands for different text in some of the checkpoints."""
    first, *others = models.values()
    for model in others:
        if model.config.vocab_size != first.config.vocab_size:
            return True
        tokenizers = [tokenizer_from_json(m.meta.get("tokenizer")) for m in (first, model)]
        if None not in tokenizers and not same_vocabulary(*tokenizers):
            return True
    return False


def describe_scored(texts, lengths, max_tokens):
    """Say which part of each different text is scored: a list of lines."""
    lines = []
    for text in texts.values():
        split = text.val
        spans = []
        fitting = fitting_lengths(split, lengths, max_tokens)
        if fitting:
            spans = find_spans(split, max(fitting), max_tokens)
        n_tokens = sum(stop - start for _, start, stop in spans)
        pieces = f"{len(spans)} pieces"
        if len(spans) == 1:
            pieces = "1 piece"
        used = sorted({file for file, _, _ in spans})
        files = ", ".join(split.files[file].name for file in used)
        if len(used) > 3:
            files = f"{len(used)} of {len(split.files)} files"
        lines.append(
            f"{n_tokens:,} of {len(split):,} tokens of {text.name}, {pieces} of {files or 'it'}, "
            f"data {text.hash}"
        )
    return list(dict.fromkeys(lines))
