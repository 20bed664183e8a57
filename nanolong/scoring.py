"""Which text an evaluation scores, and which of its tokens: see the protocols in evaluate.py."""

import math
from itertools import pairwise

import torch

from data import Dataset, TextFile, same_vocabulary, split_mixture, tokenizer_from_json
from nanolong import intervals
from nanolong.errors import UserError, note
from nanolong.evaluation.loss import (
    ALIGNED,
    STRIDE,
    aligned_stride,
    find_spans,
    fitting_lengths,
    part_edges,
    read_sequences,
    sum_parts,
)

LAST_TOKENS = 500  # scored tokens of a sequence of last-tokens, by default

# -----------------------------------------------------------------------------
# Protocols: which sequences are evaluated, and which of their tokens are scored.


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


# -----------------------------------------------------------------------------
# Sums by sequence and part


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
        if dataset.bytes_scale != 1:
            n_bytes = n_bytes * dataset.bytes_scale
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
