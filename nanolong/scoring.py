"""Which text an evaluation scores, and which of its tokens: see the protocols in evaluate.py."""

import math
from itertools import pairwise

import numpy as np
import torch

from data import Dataset, TextFile, same_vocabulary, tokenizer_from_json
from nanolong.errors import UserError, note

# -----------------------------------------------------------------------------
# Protocols: which sequences are evaluated, and which of their tokens are scored.


def aligned_stride(stride, lengths):
    """Return the scored tokens of a token-aligned sequence: at most half the shortest length."""
    half_shortest = max(1, min(lengths) // 2)
    return min(stride, half_shortest)


def place_sequences(protocol, length, stop, stride=256, lengths=(), start=0):
    """Place sequences of `length` targets that score the targets from `start` to `stop` of a text.

    Returns a list of (start, n_context): the first n_context targets of a sequence are context
    only and are not scored. token-aligned needs all `lengths` that are to be compared.
    """
    if protocol == "token-aligned":
        # Sequences of the longest length lie end to end; shorter ones end where these end.
        longest = max(lengths)
        n_context = length - aligned_stride(stride, lengths)
        return [(end - length, n_context) for end in range(start + longest, stop + 1, longest)]

    step = length
    first_end = start + length
    if protocol == "sliding":
        step = min(stride, length)
        first_end = max(length, start + step)  # what comes before `start` is context, too
    ends = [*range(first_end, stop, step), stop]
    sequences = []
    for previous_end, end in pairwise([start, *ends]):
        n_new = end - previous_end
        sequences.append((end - length, length - n_new))
    return sequences


def group_protocols(protocols, stride, lengths):
    """Group the protocols that share their forward passes, with the extra fields of their records.

    Returns a list of (protocols, fields).
    """
    strides = {"sliding": stride, "token-aligned": aligned_stride(stride, lengths)}
    shared = tuple(protocol for protocol in protocols if protocol not in strides)
    groups = []
    if shared:
        groups.append((shared, {}))
    for protocol in protocols:
        if protocol in strides:
            groups.append(((protocol,), {"stride": strides[protocol]}))
    return groups


def fitting_lengths(split, lengths, max_tokens):
    """Return those of `lengths` of which some file of `split` holds a sequence."""
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


def find_sequences(split, length, max_tokens=65536, protocol="chunked", stride=256, lengths=()):
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
        placed = place_sequences(protocol, length, stop, stride, fitting, start)
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


def bytes_by_position(dataset, length, max_tokens=65536, **placement):
    """Count the bytes of text that the scored targets at each position stand for: int64 (length,).

    dataset: a Dataset or TextFile. placement: arguments of find_sequences(). Returns None if the
    tokenizer, or what its tokens stand for, is unknown.
    """
    if dataset.tokenizer is None:
        return None
    try:
        byte_lengths = torch.from_numpy(dataset.tokenizer.byte_lengths)
        added_bytes = dataset.tokenizer.added_bytes
    except UserError:  # a tokenizer.json whose tokens are no bytes, or without its package
        return None
    split = dataset.val
    n_bytes = torch.zeros(length, dtype=torch.int64)
    for sequence in find_sequences(split, length, max_tokens, **placement):
        (inputs,), (targets,) = read_sequences(split, length, [sequence])
        scored = targets >= 0
        n_bytes[scored] += byte_lengths[targets[scored]]
        if added_bytes:
            # What the tokenizer has put before a document is not the document's.
            starts_document = inputs == dataset.separator
            if split.bos is not None:
                starts_document[0] = sequence[1] == 0
            n_bytes[scored & starts_document] -= added_bytes
    return n_bytes


# -----------------------------------------------------------------------------
# Records


def loss_record(name, protocol, length, **fields):
    """Return a record of a loss, as it is written to the JSON file."""
    return {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length, **fields}


def make_records(name, loss_sum, n_scored, protocols, n_bytes=None, **fields):
    """Turn the sums by position at one length into records: one for each protocol.

    `position` makes one for each part of the sequence. n_bytes: of bytes_by_position(), None if
    they are unknown. `fields` are added to every record.
    """
    length = len(loss_sum)
    records = []
    for protocol in protocols:
        edges = [0, length]
        if protocol == "position":
            edges = sorted({length * i // 16 for i in range(17)})
        elif protocol == "last-quarter":
            edges = [length * 3 // 4, length]
        for start, end in pairwise(edges):
            part = slice(start, end)
            count = int(n_scored[part].sum())
            loss = math.nan
            if count:
                loss = loss_sum[part].sum().item() / count
            record = loss_record(name, protocol, length, **fields)
            if protocol == "position":
                record["position"] = [start, end]
            record["loss"] = loss
            record["tokens"] = count
            if n_bytes is not None:
                record["bytes"] = int(n_bytes[part].sum())
            records.append(record)
    return records


# -----------------------------------------------------------------------------
# Texts


def open_texts(models, cfg, lengths):
    """Open the text that each checkpoint is scored on: a dict from name to Dataset or TextFile.

    cfg: an EvaluateConfig of evaluate.py.
    """
    datasets = {}
    texts = {}
    for name, model in models.items():
        if cfg.text:
            texts[name] = read_text(model, cfg.text)
            check_text_length(texts[name], lengths)
            continue
        key = (cfg.dataset or model.meta["dataset"], model.meta.get("bos") is not None)
        folder = getattr(model, "folder", name)
        reader = (folder, model.config.vocab_size, model.meta.get("tokenizer"))
        if key not in datasets:
            datasets[key] = Dataset(*key, reader)
        texts[name] = datasets[key]
        texts[name].check_model(*reader)
        note_changed_data(folder, model.meta, texts[name])
    longest = max(len(text.val) for text in texts.values())
    if cfg.text and longest > cfg.max_tokens and have_different_vocabularies(models):
        note(
            f"{cfg.max_tokens} tokens are another part of the text in each vocabulary: "
            f"to compare bits per byte on all of it, give --max_tokens={longest}"
        )
    return texts


def read_text(model, file):
    """Read a text file as a TextFile in the tokens of the model. Raises UserError."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        what = getattr(model, "folder", "the model")
        raise UserError(f"the tokenizer of {what} is unknown: give --dataset, not --text")
    return TextFile(file, tokenizer, model.config.vocab_size, model.meta.get("bos"))


def check_text_length(text, lengths):
    """Raise UserError for a text that is too short for a sequence of any length."""
    if not text.val.n_sequences(min(lengths)).any():
        raise UserError(
            f"--text={text.name} holds {len(text.val)} tokens, too few for a sequence of "
            f"{min(lengths)}: give a longer text, or shorter --lengths"
        )


def note_changed_data(what, meta, dataset):
    """Print a note if a dataset has changed since a checkpoint was trained on it.

    What is validation text now may have been training text then. meta: the checkpoint's.
    """
    trained_on = meta.get("data_hash", dataset.hash)
    if dataset.name == meta.get("dataset") and trained_on != dataset.hash:
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
    """Say which part of each different text is scored: a list of lines. texts: of open_texts()."""
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
