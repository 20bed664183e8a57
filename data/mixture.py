"""Mixtures: each training sequence comes from one of several datasets, each with a probability.

Which one is a function of (seed, index of the sequence) alone, as all of a batch is. Of each
dataset every sequence is visited once before any is visited again.
"""

import functools
import math
from pathlib import Path

import numpy as np

from data.dataset import Dataset, Split, split_mixture
from nanolong.errors import UserError

BLOCK = 4096  # sequences whose datasets are chosen at a time


def open_dataset(name, bos=None, reader=None):
    """Open a dataset by name or path, or a mixture as long:0.34,short:0.66."""
    is_mixture = list(split_mixture(name)) != [str(name)]
    return Mixture(name, bos, reader) if is_mixture else Dataset(name, bos, reader)


class Mixture(Dataset):
    """Several datasets of one vocabulary, with the interface of one.

    sources      the Datasets
    fractions    the probability of each in training
    labels       what each is called in the log: the name of its folder
    train, val   all their files
    hash         those of the sources, with commas
    """

    def __init__(self, name, bos=None, reader=None):
        fractions = split_mixture(name)
        self.name = name
        self.fractions = tuple(fractions.values())
        self.labels = tuple(Path(source).name for source in fractions)
        self.sources = tuple(Dataset(source, bos, reader) for source in fractions)
        first, *others = self.sources
        for other in others:
            _check_same_tokens(first, other)
        self.tokenizer = first.tokenizer
        self.vocab_size = first.vocab_size
        self.bos = first.bos
        self.separator = first.separator
        self.separate = False
        self.train = _join([source.train for source in self.sources])
        self.val = _join([source.val for source in self.sources])
        self.hash = ",".join(source.hash for source in self.sources)
        # seed -> for each block, how many sequences before it are of each source
        self.counts = {}

    def select(self, *args, **settings):
        """Choose what is trained on in every source: Dataset.select()."""
        for source in self.sources:
            source.select(*args, **settings)
        self.separate = self.sources[0].separate
        self.train = _join([source.train for source in self.sources])

    def long_fraction(self, length, max_tokens=1 << 28):
        """Return the fraction of training tokens in documents of at least `length` tokens."""
        found = [source.long_fraction(length, max_tokens) for source in self.sources]
        return _weigh(self.fractions, found)

    def source_of(self, index, seed):
        """Return the number of the source of sequence `index` of a training run."""
        block, i = divmod(index, BLOCK)
        return int(_choose_sources(self.fractions, seed, block)[i])

    def earlier_of_source(self, index, seed):
        """Count the sequences before `index` that are of its source."""
        block, i = divmod(index, BLOCK)
        chosen = _choose_sources(self.fractions, seed, block)
        in_block = (chosen[:i] == chosen[i]).sum()
        return int(self._count_before(seed, block)[chosen[i]] + in_block)

    def _count_before(self, seed, block):
        """Count the sequences of each source before a block: (sources,). One thread calls it."""
        counts = self.counts.setdefault(seed, [np.zeros(len(self.sources), np.int64)])
        while len(counts) <= block:
            chosen = _choose_sources(self.fractions, seed, len(counts) - 1)
            counts.append(counts[-1] + np.bincount(chosen, minlength=len(self.sources)))
        return counts[block]

    def training_sequence(self, index, length, seed, max_position, tasks):
        """Read sequence `index` of a training run: inputs, targets, positions or None."""
        source = self.sources[self.source_of(index, seed)]
        text = self.earlier_of_source(index, seed)
        return source.training_sequence(index, length, seed, max_position, tasks, text)

    def combine(self, evaluations):
        """Combine the evaluations of the sources: their mean, weighted by the fractions.

        evaluations: an iterable of {"val_loss", ...}, read up to the first None, which is returned.
        Bits per byte are those of a text with these fractions of its tokens.
        """
        found = []
        for evaluation in evaluations:
            if evaluation is None:
                return None
            found.append(evaluation)
        losses = [evaluation["val_loss"] for evaluation in found]
        loss = _weigh(self.fractions, losses)
        combined = {"val_loss": loss}
        bits = [evaluation.get("val_bits_per_byte") for evaluation in found]
        if all(bits):
            bytes_per_token = [a / b / math.log(2) for a, b in zip(losses, bits, strict=True)]
            n_bytes = _weigh(self.fractions, bytes_per_token)
            combined["val_bits_per_byte"] = loss / math.log(2) / n_bytes
        for label, of_source in zip(self.labels, losses, strict=True):
            combined[f"val_loss_{label}"] = of_source
        return combined


def _weigh(fractions, values):
    """The mean of values, weighted by fractions."""
    return math.fsum(f * value for f, value in zip(fractions, values, strict=True))


@functools.lru_cache(maxsize=8)
def _choose_sources(fractions, seed, block):
    """Choose the sources of a block of sequences at random: their numbers, int64 (BLOCK,)."""
    rng = np.random.Generator(np.random.PCG64([seed, block, 1]))
    return np.searchsorted(np.cumsum(fractions)[:-1], rng.random(BLOCK), "right")


def _check_same_tokens(first, other):
    """Raise UserError unless two datasets are in the same tokens."""
    remedy = "prepare the sources of a mixture with the same --tokenizer"
    first.check_vocabulary(other.name, other.vocab_size, other.tokenizer, remedy)
    if first.separator != other.separator or first.bos != other.bos:
        raise UserError(
            f"documents of {first.name} start with token {first.separator} and its sequences with "
            f"{first.bos}, those of {other.name} with {other.separator} and {other.bos}: {remedy}, "
            "or give --bos=true or --bos=false"
        )


def _join(splits):
    """Make one Split with the files of several."""
    joined = Split([], splits[0].vocab_size, splits[0].bos)
    for split in splits:
        for part in zip(split.files, split.tokens, split.starts, strict=True):
            joined.add(*part)
    return joined
