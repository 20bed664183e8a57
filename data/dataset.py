"""Sequences of text, datasets and mixtures of them, and the batches of a training run.

A sequence is a function of (seed, its number in the run) only: nothing random is saved in a
checkpoint, and sequences do not depend on the number of processes or the size of batches.
"""

import functools
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import token_files
from data.tokenizer import same_vocabulary, tokenizer_from_json
from nanolong.errors import LocalError, UserError, require


def generator(*numbers):
    """Return a generator of random numbers, a function of these integers."""
    return np.random.Generator(np.random.PCG64(numbers))


# -----------------------------------------------------------------------------
# Sequences of a split


class Sums(NamedTuple):
    """Sums over the sequences of a validation."""

    n_targets: float  # scored targets
    loss: float  # their losses in nats
    text_loss: float  # the losses of targets that stand for text
    n_bytes: float  # bytes of these targets (0: unknown)


class Split:
    """The token files of training or validation, cut into sequences that do not overlap.

    A sequence of `length` targets lies within one file. bos: an id that is put before every
    sequence, because the first token of text is then a target (None: inputs start with a token of
    the text). What separates documents is a target. tokens: an array for each of the files, which
    may occur several times, once for each selected document (None: all tokens of the files).
    masked_file: the first file that has a mask, or None: see MaskedSplit.
    """

    masked_file = None

    def __init__(self, files, vocab_size: int, bos: int | None, tokens=None):
        self.files = files
        self.vocab_size = vocab_size
        self.bos = bos
        if tokens is None:
            tokens = [token_files.open_tokens(file, vocab_size) for file in files]
        self.tokens = tokens
        # how many tokens of text a sequence needs beyond its length
        self.extra_tokens = 1 if bos is None else 0

    def __len__(self):
        return sum(map(len, self.tokens))

    def n_sequences(self, length, offset=0):
        """Count the sequences of each file from token `offset` on: (files,)."""
        usable = (len(tokens) - offset - self.extra_tokens for tokens in self.tokens)
        return np.array([max(0, n // length) for n in usable], np.int64)

    def spaced(self, n, length):
        """Return the indices of n evenly spaced sequences, or of all if n is 0 or too large."""
        available = int(self.n_sequences(length).sum())
        n = min(n, available) or available
        return [i * available // n for i in range(n)]

    def require_length(self, length):
        """Raise UserError unless there is a sequence of this length."""
        require(self.files, "no training document is as long as --min_doc: lower it")
        require(
            self.n_sequences(length).any(),
            f"{self.files[0]} holds {len(self)} tokens, too few for a sequence of {length}: "
            "prepare more text, or choose a shorter --block_size (or a smaller --factor)",
        )

    # Sequences: inputs and targets, int64 (length,) each

    def sequence(self, index, length):
        """Read sequence `index` of all files: inputs and targets."""
        return self.sequence_at(*self.locate(index, length), length)

    def locate(self, index, length, offset=0):
        """Find sequence `index`: the index of its file, and the token at which it starts there."""
        ends = sequence_ends(self, length, offset)
        file = int(np.searchsorted(ends, index, "right"))
        first_of_file = int(ends[file - 1]) if file else 0
        return file, offset + (index - first_of_file) * length

    def training_location(self, index, length, seed):
        """Find sequence `index` of a training run, as locate().

        An epoch visits each of its sequences once, in an order and from an offset that depend on
        (seed, epoch). All epochs have as many sequences as the largest offset leaves. A text that
        is too short for a sequence at that offset is not shifted.
        """
        last_offset = length - 1 if sequence_ends(self, length, length - 1)[-1] else 0
        per_epoch = int(sequence_ends(self, length, last_offset)[-1])
        epoch, i = divmod(index, per_epoch)
        offset, order = epoch_order(self, length, seed, epoch, last_offset)
        return self.locate(int(order[i]), length, offset)

    def sequence_at(self, file, start, length):
        """Read the sequence whose text starts at a token of a file: inputs and targets."""
        tokens = self.checked_tokens(file, start, start + length + self.extra_tokens)
        return self.inputs_and_targets(tokens)

    def inputs_and_targets(self, tokens):
        """Shift tokens of text by one: inputs and targets."""
        if self.bos is None:
            return tokens[:-1], tokens[1:]
        return np.concatenate(([self.bos], tokens[:-1])), tokens

    def pose_sequence(self, file, start, length, max_position, rng, separator=None):
        """Make a sequence for positional skip-wise training (PoSE: Zhu et al. 2024).

        It has two parts. The second begins at the middle at the latest. Between them the positions
        skip a random number up to max_position - length, and the text another one, at most to the
        next separator, so that the parts belong to one document.
        Returns inputs, targets and positions.
        """
        first = int(rng.integers(1, max(1, length // 2) + 1))
        stop = start + length + self.extra_tokens
        max_skip = max_position - length
        most = min(max_skip, len(self.tokens[file]) - stop)
        if separator is not None:
            skipped = self.tokens[file][start + first : start + first + most]
            most = int(np.argmax(np.append(skipped == separator, True)))
        text_skip = int(rng.integers(most + 1))
        position_skip = int(rng.integers(max_skip + 1))

        first_part = self.checked_tokens(file, start, start + first)
        second_part = self.checked_tokens(file, start + first + text_skip, stop + text_skip)
        inputs, targets = self.inputs_and_targets(np.concatenate((first_part, second_part)))
        positions = np.arange(length)
        positions[first:] += position_skip
        return inputs, targets, positions

    def checked_tokens(self, file, start, stop):
        """Read tokens of a file as int64. Raises LocalError for an id outside the vocabulary."""
        tokens = np.asarray(self.tokens[file][start:stop], np.int64)
        if tokens.max() >= self.vocab_size:
            raise LocalError(
                f"{self.files[file]} holds token {tokens.max()}, outside the vocabulary of "
                f"{self.vocab_size}, so another tokenizer made the file: prepare it again"
            )
        return tokens


def join(splits):
    """Make a Split with the files of several Splits."""
    files = [file for split in splits for file in split.files]
    tokens = [part for split in splits for part in split.tokens]
    joined = Split(files, splits[0].vocab_size, splits[0].bos, tokens)
    joined.masked_file = next((split.masked_file for split in splits if split.masked_file), None)
    return joined


class MaskedSplit(Split):
    """Token files with masks, which say where documents start and which targets are scored.

    A sequence is a document, padded by inputs of 0 and targets of -1, or a part of a longer
    document, and has a scored target. files, tokens, masks: an item for each document.
    """

    def __init__(self, files, vocab_size: int, bos: int | None):
        super().__init__([], vocab_size, bos, [])
        self.masked_file = files[0]
        self.masks = []
        for file in files:
            # arrays, as a memmap of each document would take long to make
            tokens = np.asarray(token_files.open_tokens(file, vocab_size))
            mask = np.asarray(token_files.open_mask(file, len(tokens)))
            starts = np.flatnonzero(mask & token_files.STARTS).tolist()
            for start, stop in pairwise([*starts, len(tokens)]):
                self.files.append(file)
                self.tokens.append(tokens[start:stop])
                self.masks.append(mask[start:stop])

    def n_sequences(self, length, offset=0):
        """Count the sequences of each document, at any offset: (documents,)."""
        return np.array([len(starts) for starts in scored_starts(self, length)], np.int64)

    def locate(self, index, length, offset=0):
        """Find sequence `index`: its document, and the token at which it starts there."""
        document, start = super().locate(index, length)
        return document, int(scored_starts(self, length)[document][start // length])

    def sequence_at(self, file, start, length):
        """Read the sequence that starts at a token of a document: inputs and targets."""
        tokens = self.checked_tokens(file, start, start + length + 1)
        is_scored = self.masks[file][start + 1 : start + length + 1] & token_files.SCORED
        targets = np.where(is_scored, tokens[1:], -1)
        padding = (0, length - len(targets))
        return np.pad(tokens[:-1], padding), np.pad(targets, padding, constant_values=-1)

    def pose_sequence(self, file, start, length, max_position, rng, separator=None):
        """Read a sequence whose positions do not skip: inputs, targets and positions."""
        return *self.sequence_at(file, start, length), np.arange(length)


# What is the same for many sequences of a split is kept.


@functools.lru_cache(maxsize=8)
def scored_starts(split, length):
    """List where the sequences of a document start that score a target: for each document (n,)."""
    scored = (np.flatnonzero(mask[1:] & token_files.SCORED) for mask in split.masks)
    return [np.unique(targets // length) * length for targets in scored]


@functools.lru_cache(maxsize=64)
def sequence_ends(split, length, offset):
    """Count the sequences up to the end of each file: (files,)."""
    return split.n_sequences(length, offset).cumsum()


@functools.lru_cache(maxsize=16)
def epoch_order(split, length, seed, epoch, last_offset):
    """Choose an epoch's offset and the order of its sequences, at random."""
    rng = generator(seed, epoch)
    offset = int(rng.integers(last_offset + 1))
    return offset, rng.permutation(int(sequence_ends(split, length, offset)[-1]))


def find_documents(tokens, separator):
    """List the (start, stop) of every document of a file.

    It begins after a separator, which does not belong to it, or at the start of the file.
    """
    marks = [] if separator is None else np.flatnonzero(tokens == separator).tolist()
    edges = [-1, *marks, len(tokens)]
    return [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


# -----------------------------------------------------------------------------
# Texts to evaluate on


class Text:
    """What evaluation reads: the validation text of a Dataset, or a text file.

    It has a name, val (a Split), a tokenizer, or None, and a hash of its ids and its bytes. bos is
    put before every sequence, and separator starts a document (None: no such token). n_bytes: how
    many bytes it has in its files, or None.
    """

    n_bytes = None

    @functools.cached_property
    def bytes_scale(self):
        """The bytes of the text for each byte that its tokens stand for: not 1 if the tokenizer
        changes text, as normalizers do.
        """
        found = 0
        for tokens in self.val.tokens if self.n_bytes else []:
            n_documents = (tokens == self.separator).sum() + (tokens[0] != self.separator)
            found -= int(n_documents) * self.tokenizer.added_bytes
            # a large file at once would fill the memory
            for start in range(0, len(tokens), 1 << 20):
                part = tokens[start : start + (1 << 20)]
                found += int(self.tokenizer.byte_lengths.take(part, mode="clip").sum())
        return self.n_bytes / found if found else 1.0

    def is_text(self, y):
        """Return which targets y stand for text: neither an end of a document, nor -1.

        Without a tokenizer, every id stands for text except the separator of documents.
        """
        if self.tokenizer is None:
            return (y >= 0) & (y != (-1 if self.separator is None else self.separator))
        return (self.tokenizer.byte_lengths.take(y, mode="clip") > 0) & (y >= 0)

    def count_bytes(self, x, y, starts_file=False):
        """Count the bytes of text of the targets y of sequences with inputs x, (B, T) each. Targets
        that are not scored have 0. None if the bytes are unknown.

        starts_file: whether a sequence is the first of its file, (B,).
        """
        if self.tokenizer is None:
            return None
        try:
            n_bytes = self.tokenizer.byte_lengths.take(y, mode="clip")
            added_bytes = self.tokenizer.added_bytes
        except UserError:  # a tokenizer.json whose tokens are no bytes, or without its package
            return None
        # a token that the tokenizer has put before a document is not the document's
        starts_document = x == self.separator
        if self.bos is not None:
            starts_document[:, 0] = starts_file
        n_bytes = (n_bytes - added_bytes * starts_document) * (y >= 0)
        return n_bytes if self.bytes_scale == 1 else n_bytes * self.bytes_scale


# -----------------------------------------------------------------------------
# Datasets


class Dataset(Text):
    """A dataset by name or path: a Text, with train, a Split, and vocab_size, which may be larger
    than the tokenizer's. tasks: the kinds of data/tasks.py that its documents have. bos=True or
    False overrides the dataset's default, unless it has masks.
    """

    def __init__(self, name, bos: bool | None = None):
        self.name = name
        folder = token_files.find_dataset(name)
        meta = token_files.read_meta(folder)
        self.tokenizer = tokenizer_from_json(meta["tokenizer"])
        self.vocab_size = meta["vocab_size"]
        self.separator = meta["bos"]
        self.bos = self.separator if (meta["bos_default"] if bos is None else bos) else None
        remedy = "prepare its text with --tokenizer=bytes or a run's, or give --bos=false"
        require(self.bos is not None or not bos, f"dataset {name} has no <bos>: {remedy}")
        self.separate = False

        # a model's vocabulary may be padded, but no token of a text is in the padding
        used = min(self.vocab_size, self.tokenizer.vocab_size if self.tokenizer else 1 << 32)
        train_files, val_files = token_files.split_files(folder)
        files = train_files + val_files
        masks = [file.with_suffix(".mask") for file in files]
        masks = masks if any(mask.is_file() for mask in masks) else []
        if masks and bos not in (None, meta["bos_default"]):
            made, other = str(not bos).lower(), str(bos).lower()
            problem = f"the documents of {name} were made with --bos={made}, and not with {other}"
            remedy = f"give --bos={made}, or prepare them again with --bos={other}"
            raise UserError(f"{problem}: {remedy}")
        kind = MaskedSplit if masks else Split
        self.train = kind(train_files, used, self.bos)
        self.val = kind(val_files, used, self.bos)
        self.hash = token_files.hash_files(files + masks)
        self.n_bytes = meta.get("bytes", {}).get("val")
        self.tasks = set(meta.get("tasks", ()))

    fractions = (1.0,)  # A dataset counts as a mixture of itself alone.

    @property
    def sources(self):
        return (self,)

    def weigh(self, values):
        """The mean of values of the sources, weighted by their fractions."""
        return math.fsum(f * value for f, value in zip(self.fractions, values, strict=True))

    def combine(self, sums):
        """Return the metrics of an evaluation. sums: the Sums of each source.

        Several sources count as a text that has these fractions of its tokens.
        """
        losses = [x.loss / x.n_targets for x in sums]
        metrics = {"val_loss": self.weigh(losses)}
        if all(x.n_bytes for x in sums):
            text_loss = self.weigh(x.text_loss / x.n_targets for x in sums)
            n_bytes = self.weigh(x.n_bytes / x.n_targets for x in sums)
            metrics["val_bits_per_byte"] = text_loss / math.log(2) / n_bytes
        if len(sums) > 1:
            for source, loss in zip(self.sources, losses, strict=True):
                metrics[f"val_loss_{Path(source.name).name}"] = loss
        return metrics

    def check_model(self, what: str, vocab_size: int, tokenizer: dict | None):
        """Raise UserError unless a model, whose vocabulary may be larger, can read this text.

        what: the model's name in messages. tokenizer: its to_json(), or None if it is unknown.
        """
        remedy = f"prepare its text with the tokenizer of {what} (--tokenizer=RUN)"
        if tokenizer is None:
            remedy = f"give a dataset of its own token ids, with a vocab_size of {vocab_size}"
        sizes = f"a vocabulary of {self.vocab_size} and {what} one of {vocab_size}"
        require(self.vocab_size <= vocab_size, f"dataset {self.name} has {sizes}: {remedy}")
        known = self.tokenizer and tokenizer_from_json(tokenizer)
        is_same = not known or same_vocabulary(self.tokenizer, known)
        require(is_same, f"dataset {self.name} has other tokens than {what}: {remedy}")

    def select(self, min_doc=0, separate=False):
        """Choose the training text: only documents of at least min_doc tokens.

        separate: attention stays inside a document (None: if documents are known).
        Raises UserError for a dataset that does not mark its documents.
        """
        problem = f"dataset {self.name} has masks, and its documents are trained on whole"
        is_masked = self.train.masked_file is not None
        require(not (min_doc and is_masked), f"{problem}: leave out --min_doc")
        is_marked = self.separator is not None
        self.separate = is_marked if separate is None else separate
        require(
            is_marked or is_masked or not (min_doc or separate),
            f"dataset {self.name} has no <bos> between its documents: leave out --min_doc and "
            "--separate_docs, or prepare it with --tokenizer=bytes, bpe or gpt2",
        )
        if not min_doc:
            return
        # with the separator that follows, so that the end of a document is a target
        documents = [
            (file, tokens[start : stop + 1])
            for file, tokens in zip(self.train.files, self.train.tokens, strict=True)
            for start, stop in find_documents(tokens, self.separator)
            if stop - start >= min_doc
        ]
        files, tokens = ([document[i] for document in documents] for i in (0, 1))
        self.train = Split(files, self.train.vocab_size, self.bos, tokens)

    def long_fraction(self, length):
        """Return the fraction of training tokens in documents of at least `length` tokens."""
        found = []
        for source in self.sources:
            sizes = []
            # with masks each array is a document, which may have separators inside
            separator = None if source.train.masked_file else self.separator
            for tokens in source.train.tokens:
                sizes += [stop - start for start, stop in find_documents(tokens, separator)]
            found.append(sum(size for size in sizes if size >= length) / max(1, sum(sizes)))
        return self.weigh(found)

    def describe(self, n_tokens, train_length, n_val, val_length):
        """List the lines that a run of n_tokens prints: a line for each source, and for documents
        that are too long for a sequence.
        """
        lines = []
        for source, fraction in zip(self.sources, self.fractions, strict=True):
            n = n_tokens * fraction
            epochs = n / train_length / source.train.n_sequences(train_length).sum()
            amount = f"{epochs:.2g} epochs" if epochs >= 1 else f"{epochs:.2g} of an epoch"
            n_scored = len(source.val.spaced(n_val, val_length))
            available = source.val.n_sequences(val_length).sum()
            lines.append(
                f"{source.name}, {n:,.0f} tokens ({amount}); validation on "
                f"{n_scored:,} of {available:,} sequences of {val_length:,} tokens"
            )
            n_long = sum(len(tokens) > train_length + 1 for tokens in source.train.tokens)
            if source.train.masked_file and n_long:
                found = f"{n_long:,} of {len(source.train.tokens):,} documents of {source.name}"
                lines.append(f"{found} are too long for {train_length:,} tokens, and are split")
        return lines

    def document_ids(self, x):
        """Number the documents of inputs (..., T): of this shape, or None unless they are kept
        separate. A sequence with a mask is one document, whatever tokens it has.
        """
        if not self.separate:
            return None
        return x * 0 if self.train.masked_file else (x == self.separator).cumsum(-1)

    def batch(self, first, batch_size, length, seed, max_position=0):
        """Read the sequences from number `first` on, each a function of (seed, number).

        max_position: if not 0, sequences are skip-wise (PoSE), with positions below it.
        Returns NumPy arrays (batch_size, length) int64: inputs, targets (-1 is not scored),
        positions or None, document ids or None.
        """
        numbers = range(first, first + batch_size)
        sequences = [self.training_sequence(i, length, seed, max_position) for i in numbers]
        columns = zip(*sequences, strict=True)
        return tuple(None if column[0] is None else np.stack(column) for column in columns)

    def training_sequence(self, index, length, seed, max_position):
        """Read sequence `index` of a training run: what batch() returns, for a single sequence."""
        file, start = self.train.training_location(index, length, seed)
        if max_position:
            rng = generator(seed, index)
            options = (max_position, rng, self.separator)
            parts = self.train.pose_sequence(file, start, length, *options)
        else:
            parts = (*self.train.sequence_at(file, start, length), None)
        return *parts, self.document_ids(parts[0])


# -----------------------------------------------------------------------------
# Mixtures: each training sequence comes from one of several datasets


def open_dataset(name, bos=None):
    """Open a dataset by name or path, or a mixture as long:0.34,short:0.66."""
    require(name, "no dataset is named: give --dataset=NAME, or pass data of your own to train()")
    fractions = token_files.split_mixture(name)
    is_mixture = list(fractions) != [str(name)]
    return Mixture(name, fractions, bos) if is_mixture else Dataset(name, bos)


class Mixture(Dataset):
    """Several datasets of the same vocabulary, with the interface of a dataset.

    Sequence i of a run is sequence i of a dataset that (seed, i) chooses, each with its
    probability: no sequence is read twice in an epoch of a dataset. train and val have all their
    files. hash is the sources' hashes, with commas.
    """

    sources = ()

    def __init__(self, name, fractions, bos=None):
        self.name = name
        self.sources = tuple(Dataset(source, bos) for source in fractions)
        self.fractions = tuple(fractions.values())
        self.hash = ",".join(source.hash for source in self.sources)
        self.tasks = set().union(*(source.tasks for source in self.sources))
        # the vocabulary of the others may be a part of this one's
        first = max(self.sources, key=lambda source: source.vocab_size)
        self.tokenizer, self.vocab_size = first.tokenizer, first.vocab_size
        self.bos, self.separator = first.bos, first.separator
        for other in self.sources:
            spec = first.tokenizer and first.tokenizer.to_json()
            other.check_model(first.name, first.vocab_size, spec)
            one, two = (f"{x.separator} and {x.bos}" for x in (first, other))
            require(
                one == two,
                f"documents and sequences of {first.name} start with tokens {one}, "
                f"{other.name}'s with {two}: prepare both with the same --tokenizer, or give --bos",
            )
        self.select()
        self.val = join([source.val for source in self.sources])

    def select(self, *args, **settings):
        """Choose the training text of every source: Dataset.select()."""
        for source in self.sources:
            source.select(*args, **settings)
        self.separate = self.sources[0].separate
        self.train = join([source.train for source in self.sources])

    def training_sequence(self, index, length, seed, max_position):
        """Read sequence `index` of a training run, as Dataset.training_sequence()."""
        source = self.sources[self.source_of(index, seed)]
        return source.training_sequence(index, length, seed, max_position)

    def source_of(self, index, seed):
        """Return the number of the source of sequence `index` of a training run."""
        ends = np.cumsum(self.fractions)[:-1]
        return int(np.searchsorted(ends, generator(seed, index, 1).random(), "right"))
