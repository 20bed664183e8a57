"""The text that an evaluation scores, and its losses as records, by protocol: see evaluate.py."""

import codecs
import hashlib
import math
import shlex
from collections import namedtuple
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch

from data import Dataset, Split, Text, has_masks, split_mixture, tokenizer_from_json
from data.texts import note_separators, read_documents, why_no_text
from data.tokenizer import SEPARATOR
from nanolong import devices
from nanolong.errors import UserError, note, require
from nanolong.evaluation import intervals, loss, repeats
from nanolong.evaluation.log import Cell

N_PARTS = 16  # equal parts of a sequence whose losses `position` records apart
N_SHOWN = 4096  # tokens of the text that the report colours
# Sums over targets of a sequence. text_loss: over those that stand for text. None: unknown.
Row = namedtuple("Row", ("loss", "tokens", "n_bytes", "text_loss"), defaults=(None, None))


def open_texts(models, cfg):
    """Open the text that each checkpoint is scored on: a dict from name to Dataset or TextFile."""
    # once for all checkpoints: its files are hashed
    open_dataset = cache(Dataset)
    texts = {}
    for name, model in models.items():
        meta = model.meta
        folder = getattr(model, "folder", name)
        if cfg.text:
            texts[name] = read_text(model, folder, cfg.text)
            continue
        dataset = name_of_text(cfg.dataset or meta.get("dataset"), folder)
        texts[name] = open_dataset(dataset, meta.get("bos") is not None)
        texts[name].check_model(folder, model.config.vocab_size, meta.get("tokenizer"))
        note_changed_data(folder, meta, texts[name])
    return texts


def name_of_text(name, folder):
    """Return the dataset to score. Raises UserError if none is known, or for a mixture."""
    tokenizer = shlex.quote(str(Path(folder).parent))
    require(
        name,
        f"{folder} does not say on which text it was trained: give --text=FILE, or --dataset "
        f"(prepared by python data/prepare.py FILE --tokenizer={tokenizer} --name=NAME)",
    )
    sources = list(split_mixture(name))
    if len(sources) == 1:
        return sources[0]
    # those with masks have no running text
    texts = [source for source in sources if not has_masks(source)]
    choices = " or ".join(f"--dataset={source}" for source in texts) or "--text=FILE"
    raise UserError(f"{name} is a mixture of datasets, and one is scored: give {choices}")


class TextFile(Text):
    """A text file in the tokens of a model. JSON: its texts, with a separator between two.

    Raises OSError or UserError if the file cannot be read or encoded.
    """

    def __init__(self, file, tokenizer, vocab_size: int, bos: int | None):
        self.name = str(file)
        self.tokenizer = tokenizer
        self.bos = bos
        self.separator = tokenizer.bos if bos is None else bos
        path = Path(file)
        reason = why_no_text(path)
        try:
            require(not reason, reason)
            texts = [text for _, text in read_documents(path.name, path)]
            require(texts, "empty: give a text")
        except UserError as error:
            raise UserError(f"--text={file} is {error}") from None
        note_separators(sum(text.count(SEPARATOR) for text in texts), file)
        self.n_bytes = sum(len(text.encode()) for text in texts)
        between = [] if self.separator is None else [self.separator]
        ids = tokenizer.encode(texts[0])
        for text in texts[1:]:
            ids += between + tokenizer.encode(text)
        ids = np.array(ids)
        self.hash = hashlib.sha256("\0".join(texts).encode() + ids.tobytes()).hexdigest()[:16]
        self.val = Split([Path(file)], vocab_size, bos, [ids])


def read_text(model, folder, file):
    """Read a text file as a TextFile in the tokens of the model. Raises UserError."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    require(tokenizer, f"the tokenizer of {folder} is unknown: give --dataset, not --text")
    return TextFile(file, tokenizer, model.config.vocab_size, model.meta.get("bos"))


def note_changed_data(folder, meta, dataset):
    """Print a note if a dataset has changed since a checkpoint with this meta was trained on it."""
    hashes = (meta.get("data_hash") or dataset.hash).split(",")  # a mixture has several
    was_trained_on = dataset.name in split_mixture(meta.get("dataset") or "")
    if was_trained_on and dataset.hash not in hashes:
        note(
            f"dataset {dataset.name} is now {dataset.hash}, and {folder} was trained on "
            f"{', '.join(hashes)}: the model may have seen the scored text in training"
        )


def describe_scored(texts, lengths, max_tokens):
    """Say which part of each different text is scored: a list of lines."""
    lines = []
    for text in texts.values():
        spans, _ = loss.find_spans(text.val, lengths, max_tokens)
        n_tokens = sum(stop - start for _, start, stop in spans)
        n_files = len({file for file, _, _ in spans})
        found = f"{n_tokens:,} of {len(text.val):,} tokens of {text.name}"
        lines.append(f"{found} (sequences: {len(spans)}, files: {n_files}), data {text.hash}")
    return list(dict.fromkeys(lines))


def plan_losses(models, cfg, texts):
    """Return the cells of every checkpoint and length: one for all protocols that share their
    forward passes.
    """
    running = [protocol for protocol in cfg.protocol if protocol != "repeats"]
    groups = group_protocols(running, cfg.stride, cfg.lengths)
    cells = []
    for (name, model), length, (protocols, fields) in product(models.items(), cfg.lengths, groups):
        blank = {"checkpoint": name, "task": "loss"}
        records = [{**blank, "protocol": p, "length": length, **fields} for p in protocols]
        compute = partial(score, records, model, texts[name], cfg)
        cells.append(Cell(records, compute, [cfg.max_tokens, cfg.lengths]))
    if "repeats" in cfg.protocol:
        for name, model in models.items():
            cells += repeats.plan(name, model, texts[name], cfg)
    return cells


def group_protocols(protocols, stride, lengths):
    """List the protocols that share their forward passes, and the extra fields of their records:
    (protocols, fields) each. stride: 0 for the default.
    """
    groups = {}
    for protocol in protocols:
        fields = {}
        if protocol == "token-aligned":
            fields = {"stride": loss.aligned_stride(stride or loss.STRIDE, lengths)}
        elif protocol == "sliding":
            fields = {"stride": stride or loss.STRIDE}
        shared, _ = groups.setdefault(protocol if fields else "chunked", ([], fields))
        shared.append(protocol)
    return list(groups.values())


def score(blank, model, text, cfg):
    """Return blank records of one length, of protocols that share their forward passes, with their
    losses; `position` has a record for each part of the sequence.
    """
    first = blank[0]
    length = first["length"]
    placement = (first["protocol"], first.get("stride"), cfg.lengths)
    sequences = loss.find_sequences(text.val, length, cfg.max_tokens, *placement)
    dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
    # the tokens are hashed, because one vocabulary may split text in two ways
    ids = hashlib.sha256(text.hash.encode())
    parts = [(record, *part) for record in blank for part in parts_of(record["protocol"], length)]
    rows = [[] for _ in parts]  # a Row for each sequence, because all losses would fill the memory
    for batch, x, y, losses in loss.sequence_losses(model, text.val, length, sequences, dtype):
        ids.update(x.numpy().tobytes() + y.numpy().tobytes())
        values = [losses, y >= 0]  # in the order of Row
        n_bytes = text.count_bytes(x.numpy(), y.numpy(), [start == 0 for _, start, _ in batch])
        if n_bytes is not None:
            is_text = torch.from_numpy(text.is_text(y.numpy()))
            values += [torch.from_numpy(n_bytes), losses * is_text]
        for (_, start, end), own in zip(parts, rows, strict=True):
            sums = [value[:, start:end].sum(1).tolist() for value in values]
            own += [Row(*(round(x, 6) for x in row)) for row in zip(*sums, strict=True)]
    return [make_record(*part, own, ids) for part, own in zip(parts, rows, strict=True)]


def parts_of(protocol, length):
    """Return the (start, end) of the parts of a sequence whose losses are recorded apart."""
    if protocol == "position":
        return pairwise(sorted({length * i // N_PARTS for i in range(N_PARTS + 1)}))
    return [(length * 3 // 4 if protocol == "last-quarter" else 0, length)]


def make_record(blank, start, end, rows, ids):
    """Add to a blank record the mean of the losses of sequences, and its origin."""
    tokens = [row.tokens for row in rows]
    interval = intervals.ratio_interval([row.loss for row in rows], tokens)
    record = {**blank, "loss": interval.pop("mean"), **interval, "tokens": sum(tokens)}
    if rows[0].n_bytes is not None:
        record["bytes"] = round(sum(row.n_bytes for row in rows))
    if blank["protocol"] == "position":
        return {**blank, "position": [start, end], **record}
    # to compare checkpoints sequence by sequence, if the token ids are the same
    record["by_sequence"] = [[x for x in row if x is not None] for row in rows]
    return {**record, "ids": ids.hexdigest()[:16]}


def in_bits_per_byte(records):
    """Return the records of chunked with losses in bits per byte of text, without what separates
    documents; [] if no token is more than a byte.
    """
    converted = []
    for record in records:
        if "by_sequence" in record and record.get("bytes") and record["protocol"] == "chunked":
            rows = [Row(*row) for row in record["by_sequence"]]
            bits = [row.text_loss / math.log(2) for row in rows]
            interval = intervals.ratio_interval(bits, [row.n_bytes for row in rows])
            converted.append({**record, "loss": interval.pop("mean"), **interval})
        elif record.get("protocol") == "chunked" and "refused" in record:
            converted.append(record)
    # If tokens are bytes, bits per byte are nats in another unit.
    says_more = any(record.get("bytes", 0) > record.get("tokens", 0) for record in converted)
    return converted if says_more else []


def text_losses(model, text, cfg):
    """Return the loss of each token of the first sequence of the longest length that a model can
    compute: {"about", "tokens", "losses"}; {} if there is none.

    about: where it is from; tokens: the text of each, a character of several at its last one.
    """
    dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for length in sorted(cfg.lengths, reverse=True):
        try:
            places = loss.find_sequences(text.val, length, cfg.max_tokens, lengths=cfg.lengths)
            batches = loss.sequence_losses(model, text.val, length, places[:1], dtype)
            (((file, start, _),), _, (y,), (losses,)) = next(iter(batches))
        except UserError:  # too long for the text, or for the model
            continue
        scored = (y >= 0).nonzero()[:N_SHOWN, 0]
        tokens = [f"[{i}]" for i in y[scored].tolist()]
        if text.tokenizer:
            tokens = [decoder.decode(text.tokenizer.decode([i])) for i in y[scored].tolist()]
        about = f"{len(tokens):,} tokens of a context of {length:,}, from "
        about += f"{text.val.files[file].name}, token {start:,}"
        losses = [round(value, 2) for value in losses[scored].tolist()]
        return {"about": about, "tokens": tokens, "losses": losses}
    return {}
