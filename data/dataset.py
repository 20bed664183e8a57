"""Datasets: token files, and the batches of a training run.

A dataset is a folder, data/NAME/ or any path, with token files for training and validation and the
meta.json that prepare.py writes. Token files are read in three forms: shards with a header of 256
int32 (llm.c's 20240520 with uint16 tokens, and its 20240801 with uint32), and nanoGPT's uint16
without a header.

Batches are a function of (seed, index of the micro-batch) alone: nothing random is saved in a
checkpoint, and the batches do not depend on the number of processes.
"""

import functools
import hashlib
import json
import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np

from data.ruler import KINDS, default_size, needed_length, ruler_prompt
from data.synthetic import DIGITS, passkey
from data.tokenizer import BPETokenizer, same_vocabulary, tokenizer_from_json
from nanolong import tokenizer_files
from nanolong.errors import LocalError, UserError

HERE = Path(__file__).resolve().parent

# The header of a shard is 256 int32: magic, version, number of tokens, zeros.
# magic -> (version, dtype of the tokens)
HEADER = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
HEADER_BYTES = 1024

TASKS = ("passkey", *KINDS)  # whose documents training can have
TRAINING_SAMPLES = 1 << 32  # the first sample of ruler_prompt() in training
OTHER_DATASET = (
    "choose the --dataset that it was trained on, or prepare the text with the model's own "
    "tokenizer (--tokenizer=RUN)"
)


# -----------------------------------------------------------------------------
# Token files


def write_tokens(file: Path, ids, vocab_size: int, raw: bool = False):
    """Write token ids to a new file, as uint16, or as uint32 where the vocabulary needs it.

    raw: write no header, as nanoGPT does. Raises UserError for what a form cannot hold.
    """
    magic = 20240520 if vocab_size <= 1 << 16 else 20240801
    if raw and magic != 20240520:
        raise UserError(f"uint16 cannot hold a vocabulary of {vocab_size}: leave --raw out")
    version, dtype = HEADER[magic]
    if len(ids) >= 1 << 31:
        raise UserError(
            f"{len(ids):,} tokens are more than a token file can count (2,147,483,647): prepare "
            "the text as several datasets, or with a larger vocabulary"
        )
    with open(file, "xb") as f:
        if not raw:
            header = np.zeros(256, "<i4")
            header[:3] = magic, version, len(ids)
            f.write(header.tobytes())
        f.write(np.asarray(ids, dtype).tobytes())


def open_tokens(file: Path) -> np.memmap:
    """Map a token file into memory, read-only: (tokens,), uint16 or uint32.

    Raises UserError when it is truncated or of an unknown version.
    """
    size = file.stat().st_size
    header = np.fromfile(file, "<i4", 3).tolist() if size >= HEADER_BYTES else [0]
    if header[0] in HEADER:
        magic, version, n = header
        known_version, dtype = HEADER[magic]
        start = HEADER_BYTES
        is_whole = version == known_version and n > 0 and size == start + n * dtype.itemsize
    else:
        dtype = np.dtype("<u2")
        start = 0
        is_whole = size > 0 and size % 2 == 0
    if not is_whole:
        raise UserError(
            f"{file} is truncated ({size} bytes), damaged or of an unknown version: download or "
            "prepare it again"
        )
    return np.memmap(file, dtype, "r", start)


def hash_files(files) -> str:
    """Hash token files: 16 hexadecimal digits of SHA-256.

    All bytes count in files of up to 64 MB; in larger ones the size and 256 evenly spaced blocks of
    64 KiB.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with open(file, "rb") as f:
            if size <= 64_000_000:
                digest.update(f.read())
            else:
                for block in range(256):
                    f.seek((size - 65536) * block // 255)
                    digest.update(f.read(65536))
    return digest.hexdigest()[:16]


# -----------------------------------------------------------------------------
# Sequences of a split


class Split:
    """The token files of training or validation, cut into sequences that do not overlap.

    A sequence of `length` targets lies within one file. bos: an id that is put before every
    sequence, so that the first token of text is a target too; as a target it is not scored (-1).
    None: the inputs start with a token of the text, and the targets are one token further on.

    tokens: one array for each file. starts: where that array begins in its file, which is 0 unless
    documents were selected.
    """

    def __init__(self, files, vocab_size: int, bos: int | None):
        self.files = []
        self.tokens = []
        self.starts = []
        self.vocab_size = vocab_size
        self.bos = bos
        # how many tokens of text a sequence needs beyond its length
        self.extra_tokens = 1 if bos is None else 0
        for file in files:
            self.add(file, open_tokens(file))

    def add(self, file, tokens, start=0):
        self.files.append(file)
        self.tokens.append(tokens)
        self.starts.append(start)

    def __len__(self):
        return sum(len(tokens) for tokens in self.tokens)

    def n_sequences(self, length, offset=0):
        """Count the sequences of each file, the first one starting at token `offset`: (files,)."""
        usable = (len(tokens) - offset - self.extra_tokens for tokens in self.tokens)
        return np.array([max(0, n // length) for n in usable])

    def spaced(self, n, length):
        """Return the indices of n evenly spaced sequences; of all if n is 0 or there are fewer."""
        available = int(self.n_sequences(length).sum())
        n = min(n, available) or available
        return [i * available // n for i in range(n)]

    def require_length(self, length):
        """Raise UserError unless there is a sequence of this length."""
        if not self.files:
            raise UserError(
                "no training document is as long as --min_doc: lower it, or prepare longer texts"
            )
        if not self.n_sequences(length).any():
            raise UserError(
                f"{self.files[0].name} of {self.files[0].parent} holds {len(self)} tokens, too few "
                f"for a sequence of {length}: prepare more text, or choose a shorter --block_size "
                "(or a smaller --factor)"
            )

    # Documents

    def documents(self, separator):
        """List the (start, stop) of every document, a list for each file."""
        return [_find_documents(tokens, separator) for tokens in self.tokens]

    def select_documents(self, separator, min_doc):
        """Make a split with the documents of at least min_doc tokens in place of files."""
        selected = Split([], self.vocab_size, self.bos)
        for file, tokens in zip(self.files, self.tokens, strict=True):
            for start, stop in _find_documents(tokens, separator):
                if stop - start >= min_doc:
                    selected.add(file, tokens[start:stop], start)
        return selected

    # Sequences: inputs and targets, int64 (length,) each

    def sequence(self, index, length):
        """Read sequence `index` of all files: inputs and targets."""
        file, start = self.locate(index, length)
        return self.sequence_at(file, start, length)

    def locate(self, index, length, offset=0):
        """Find sequence `index`: the index of its file, and the token at which it starts there."""
        ends = _cumulative_sequences(self, length, offset)
        file = int(np.searchsorted(ends, index, "right"))
        first_of_file = int(ends[file - 1]) if file else 0
        return file, offset + (index - first_of_file) * length

    def sequence_at(self, file, start, length):
        """Read the sequence whose text starts at a token of a file: inputs and targets."""
        tokens = self.checked_tokens(file, start, start + length + self.extra_tokens)
        return self.inputs_and_targets(tokens)

    def inputs_and_targets(self, tokens):
        """Shift tokens of text by one: inputs and targets."""
        if self.bos is None:
            return tokens[:-1], tokens[1:]
        inputs = np.concatenate(([self.bos], tokens[:-1]))
        return inputs, np.where(tokens == self.bos, -1, tokens)

    def pose_sequence(self, file, start, length, max_position, rng):
        """Make a sequence for positional skip-wise training (PoSE: Zhu et al. 2024).

        It has two parts; the second begins at the middle at the latest. Between them the positions
        skip a random number up to max_position - length, and the text another one.
        Returns inputs, targets and positions.
        """
        first = int(rng.integers(1, max(1, length // 2) + 1))
        stop = start + length + self.extra_tokens
        max_skip = max_position - length
        remaining = len(self.tokens[file]) - stop
        text_skip = int(rng.integers(min(max_skip, remaining) + 1))
        position_skip = int(rng.integers(max_skip + 1))

        first_part = self.checked_tokens(file, start, start + first)
        second_part = self.checked_tokens(file, start + first + text_skip, stop + text_skip)
        inputs, targets = self.inputs_and_targets(np.concatenate((first_part, second_part)))
        positions = np.arange(length)
        positions[first:] += position_skip
        return inputs, targets, positions

    def checked_tokens(self, file, start, stop):
        """Read tokens of a file as int64. Raises LocalError for one outside the vocabulary."""
        tokens = np.asarray(self.tokens[file][start:stop], np.int64)
        if tokens.max() >= self.vocab_size:
            worst = int(tokens.argmax())
            raise LocalError(
                f"{self.files[file]}: token {self.starts[file] + start + worst} is {tokens[worst]},"
                f" outside the vocabulary of {self.vocab_size}, so the file was made with another "
                "tokenizer: prepare it again"
            )
        return tokens

    # Training order

    def training_location(self, index, length, seed):
        """Find sequence `index` of a training run: the index of its file, and where it starts.

        Every epoch visits each of its sequences once, in an order and from an offset that depend on
        (seed, epoch).
        """
        epoch, i = divmod(index, _sequences_per_epoch(self, length))
        offset, order = _epoch_order(self, length, seed, epoch)
        return self.locate(int(order[i]), length, offset)


def _find_documents(tokens, separator):
    """List the (start, stop) of every document of a file.

    It begins after a separator, which does not belong to it, or at the start of the file.
    """
    marks = [] if separator is None else np.flatnonzero(tokens == separator).tolist()
    edges = [-1, *marks, len(tokens)]
    return [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


# What follows is the same for many sequences, so it is cached, for each dataset of a mixture.


@functools.lru_cache(maxsize=64)
def _cumulative_sequences(split, length, offset):
    """Count the sequences up to the end of each file: (files,)."""
    return split.n_sequences(length, offset).cumsum()


@functools.lru_cache
def _sequences_per_epoch(split, length):
    """Count the sequences of an epoch: those of the offset that leaves the fewest.

    A text that is too short for an offset is read without one.
    """
    at_last_offset = split.n_sequences(length, length - 1).sum()
    return int(at_last_offset or split.n_sequences(length).sum())


@functools.lru_cache(maxsize=16)
def _epoch_order(split, length, seed, epoch):
    """Choose an epoch's offset and the order of its sequences, at random."""
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    offset = 0
    if split.n_sequences(length, length - 1).any():
        offset = int(rng.integers(length))
    order = rng.permutation(int(split.n_sequences(length, offset).sum()))
    return offset, order[: _sequences_per_epoch(split, length)]


# -----------------------------------------------------------------------------
# Datasets


class Dataset:
    """A dataset by name or path.

    train, val   Split
    tokenizer    None if the token files do not say which
    vocab_size   the model's, which may be larger than the tokenizer's
    bos          the id that is put before every sequence, or None
    separator    the id that starts a document, or None
    hash         of the token files
    sources      the datasets that sequences come from: this one, but of a Mixture
    fractions    the probability of each
    labels       their names in the log, of a Mixture

    bos=True or False overrides what the dataset has by default. reader: the arguments of
    check_model(), for the model that will read the text.
    """

    def __init__(self, name, bos: bool | None = None, reader: tuple | None = None):
        self.name = name
        self.folder = find_dataset(name)
        meta = _read_meta(self.folder)
        self.tokenizer = tokenizer_from_json(meta["tokenizer"])
        self.vocab_size = meta["vocab_size"]
        # a model's vocabulary may be padded, but no token of a text is in the padding
        used_vocabulary = self.tokenizer.vocab_size if self.tokenizer else self.vocab_size
        if used_vocabulary > self.vocab_size:
            raise UserError(
                f"the tokenizer of {self.folder} has {used_vocabulary} tokens and its meta.json a "
                f"vocabulary of {self.vocab_size}: prepare the dataset again"
            )
        if reader:
            self.check_model(*reader)
        if bos and meta["bos"] is None:
            advice = ": leave --bos out, or prepare it with --tokenizer=bytes"
            if reader:
                advice = f", with which {reader[0]} was trained: {OTHER_DATASET}"
            raise UserError(f"dataset {name} has no <bos>{advice}")
        if bos is None:
            bos = meta["bos_default"]
        self.bos = meta["bos"] if bos else None
        self.separator = meta["bos"]
        self.separate = False

        train_files, val_files = _split_files(self.folder)
        self.train = Split(train_files, used_vocabulary, self.bos)
        self.val = Split(val_files, used_vocabulary, self.bos)
        self.hash = hash_files(train_files + val_files)
        self.sources = (self,)
        self.fractions = (1.0,)
        self.labels = ()

    def check_model(self, what: str, vocab_size: int, tokenizer: dict | None):
        """Raise UserError unless a model can read this text.

        what: the model's name in messages. tokenizer: its to_json(), or None if it is unknown.
        """
        known = tokenizer_from_json(tokenizer) if tokenizer else None
        self.check_vocabulary(what, vocab_size, known, OTHER_DATASET)

    def check_vocabulary(self, what: str, vocab_size: int, tokenizer, remedy: str):
        """Raise UserError unless the tokens are those of another vocabulary, as far as known."""
        if self.vocab_size != vocab_size:
            raise UserError(
                f"dataset {self.name} has a vocabulary of {self.vocab_size} and {what} one of "
                f"{vocab_size}: {remedy}"
            )
        known = self.tokenizer and tokenizer
        if known and not same_vocabulary(self.tokenizer, tokenizer):
            raise UserError(
                f"the tokens of dataset {self.name} stand for other text than those of {what}: "
                f"{remedy}"
            )

    def select(self, min_doc=0, separate=False):
        """Choose what is trained on: only documents of at least min_doc tokens.

        separate: attention stays inside a document; None: if these are known.
        Raises UserError for a dataset that does not mark its documents.
        """
        if separate is None:
            separate = self.separator is not None
        if (min_doc or separate) and self.separator is None:
            raise UserError(
                f"dataset {self.name} has no <bos> between its documents: leave out --min_doc and "
                "--separate_docs, or prepare it with --tokenizer=bytes, bpe or gpt2"
            )
        if min_doc:
            self.train = self.train.select_documents(self.separator, min_doc)
        self.separate = separate

    def long_fraction(self, length, max_tokens=1 << 28):
        """Return the fraction of training tokens in documents of at least `length` tokens.

        Of a large dataset only the first files count, up to the one that exceeds max_tokens.
        """
        sizes = []
        seen = 0
        for tokens in self.train.tokens:
            documents = _find_documents(tokens, self.separator)
            sizes += [stop - start for start, stop in documents]
            seen += len(tokens)
            if seen > max_tokens:
                break
        return sum(size for size in sizes if size >= length) / max(1, sum(sizes))

    def document_ids(self, x):
        """Number the documents of inputs (B, T): (B, T), or None unless they are kept separate."""
        if not self.separate:
            return None
        return (x == self.separator).cumsum(1)

    def check_task(self, kind: str, length: int):
        """Raise UserError if training sequences cannot be documents of a task."""
        if self.tokenizer is None:
            raise UserError(
                f"dataset {self.name} has no tokenizer, and the documents of --tasks are text: "
                "leave --tasks out, or choose a dataset that data/prepare.py made"
            )
        if kind == "passkey":
            passkey(self.tokenizer, length, 0.5, np.random.default_rng(0), self.bos)
            return
        needed = self._needed_length(kind)
        if length < needed:
            raise UserError(
                f"documents of the task {kind} need up to {needed} tokens, and the training "
                f"sequences have {length}: leave out the task, or train on longer sequences"
            )

    def _needed_length(self, kind):
        return needed_length(kind, self.tokenizer, default_size(self.tokenizer), self.bos)

    def batch(self, index, batch_size, length, seed, max_position=0, tasks=None):
        """Read micro-batch `index` of a training run, a function of (seed, index).

        max_position: if not 0, sequences are skip-wise (PoSE), with positions below it.
        tasks: kind -> the fraction of sequences that are documents of this task, of random lengths.
        Returns inputs and targets, int64 (batch_size, length), positions or None, and document ids
        or None.
        """
        sequences = []
        for i in range(index * batch_size, (index + 1) * batch_size):
            sequences.append(self.training_sequence(i, length, seed, max_position, tasks or {}))
        inputs, targets, positions = zip(*sequences, strict=True)
        x = np.stack(inputs)
        positions = np.stack(positions) if max_position else None
        return x, np.stack(targets), positions, self.document_ids(x)

    def training_sequence(self, index, length, seed, max_position, tasks, text=None):
        """Read sequence `index` of a training run: inputs, targets, positions or None.

        text: which sequence of this dataset it is, if others are in between; by default index.
        """
        rng = np.random.Generator(np.random.PCG64([seed, index]))
        kind = _choose_task(tasks, rng)
        if kind:
            x, y = self._task_document(kind, length, seed, index, rng)
            return x, y, np.arange(length)
        file, start = self.train.training_location(index if text is None else text, length, seed)
        if max_position:
            return self.train.pose_sequence(file, start, length, max_position, rng)
        x, y = self.train.sequence_at(file, start, length)
        return x, y, None

    def _task_document(self, kind, length, seed, index, rng):
        """Make a document of a task, of at most `length` tokens, padded: inputs and targets."""
        least = 24 if kind == "passkey" else self._needed_length(kind)
        n = int(rng.integers(min(length, max(length // 4, least)), length + 1))
        if kind == "passkey":
            inputs, targets = passkey(self.tokenizer, n, rng.random(), rng, self.bos)
            # Only the answer is scored: in the loss of all tokens, filler and digits drown it.
            targets[:-DIGITS] = -1
        else:
            # evaluation takes the samples from 0 on
            sample = TRAINING_SAMPLES + index
            size = default_size(self.tokenizer)
            prompt = ruler_prompt(kind, self.tokenizer, n, seed, sample, size, self.bos)
            inputs, targets = prompt.inputs, prompt.targets
        padding = (0, length - len(inputs))
        return np.pad(inputs, padding), np.pad(targets, padding, constant_values=-1)

    def count_bytes(self, targets):
        """Count the bytes of text of the scored targets; None if the tokenizer is unknown."""
        if self.tokenizer is None:
            return None
        targets = targets[targets >= 0]
        n_bytes = self.tokenizer.byte_lengths[targets].sum()
        # what the tokenizer has put before the documents is not theirs
        n_documents = (targets[:-1] == self.separator).sum()
        return int(n_bytes - n_documents * self.tokenizer.added_bytes)


def _choose_task(tasks, rng):
    """Return one of the tasks with the probability of its fraction, or None."""
    x = rng.random() if tasks else 0
    for kind, fraction in tasks.items():
        if x < fraction:
            return kind
        x -= fraction
    return None


class TextFile:
    """A text file in the tokens of a model: what a model is measured on in place of a Dataset.

    name, val, tokenizer, bos, separator and hash are those of a Dataset; the text has no separator
    in it. Raises OSError or UserError if the file cannot be read or encoded.
    """

    def __init__(self, file, tokenizer, vocab_size: int, bos: int | None):
        self.name = str(file)
        self.tokenizer = tokenizer
        self.bos = bos
        self.separator = bos
        content = Path(file).read_bytes()
        is_bytes = tokenizer.to_json()["kind"] == "bytes"
        if not content or (b"\0" in content and not is_bytes):
            raise UserError(f"--text={file} is empty, or not text but zero bytes: give a text file")
        self.hash = hash_files([Path(file)])
        self.n_bytes = len(content)
        self.val = Split([], vocab_size, bos)
        text = content.decode("utf-8", "surrogateescape")
        self.val.add(Path(file), np.array(tokenizer.encode(text)))


def _split_files(folder):
    """Find the token files of training and of validation by the words in their names."""

    def files_with(words):
        # a word stands between other characters than letters: constraint.bin is not for training
        pattern = re.compile(rf"(?<![a-z])(?:{words})(?![a-z])")
        return sorted(file for file in folder.glob("*.bin") if pattern.search(file.name.lower()))

    train = files_with("train|training")
    val = files_with("val|valid|validation")
    for file in sorted({*train} & {*val}):
        raise UserError(f"{file} could be of training or validation: name it after one of them")
    if not train or not val:
        raise UserError(
            f"{folder} holds no {'val' if train else 'train'}*.bin: prepare a text with python "
            "data/prepare.py FILE --name=NAME, or copy nanoGPT's or llm.c's token files there"
        )
    return train, val


# -----------------------------------------------------------------------------
# Finding datasets


def dataset_folder(name) -> Path:
    """Return data/NAME, where prepare.py writes a dataset."""
    return HERE / name


def find_dataset(name) -> Path:
    """Find the folder of a dataset: a path, or a name under data/.

    Raises UserError with the command that prepares it.
    """
    path = Path(name)
    is_path = path.is_absolute() or len(path.parts) > 1
    if path.is_dir() and (is_path or any(path.glob("*.bin"))):
        return path
    folder = dataset_folder(name)
    if folder.is_dir() and any(folder.glob("*.bin")):
        return folder

    prepare = f"there is no dataset {name!r}: prepare it with python data/prepare.py"
    if name in ("python", "shakespeare"):
        message = f"{prepare} --dataset={name}"
    elif name == "fineweb10B":
        message = f"{prepare} --dataset={name} --shards=N, of 100 million tokens each"
    elif path.exists():
        message = f"{path} is a text, not a dataset: {commands_for_text(path)}"
    elif "," in str(name):
        message = f"{name!r} names several datasets: choose one of them, or, to train on all, give "
        message += "the fraction of each, as in long:0.34,short:0.66"
    else:
        message = f"{prepare} FILE_OR_FOLDER --name={shlex.quote(str(name))}"
    ready = ", ".join(sorted(file.parent.name for file in HERE.glob("*/meta.json")))
    if ready:
        message += f", or choose one that is ready ({ready})"
    raise UserError(message)


def commands_for_text(path):
    """Say how to make a dataset of a text file or folder, and how to train on it."""
    name = re.sub(r"[^\w-]+", "-", path.stem).strip("-_") or "text"
    return (
        f"run python data/prepare.py {shlex.quote(str(path))} --name={name}, and then "
        f"python train.py --dataset={name}"
    )


def split_mixture(name) -> dict[str, float]:
    """Split a mixture, as long:0.34,short:0.66, into its datasets and their fractions.

    Of one dataset, whose name may have colons too, it is {name: 1.0}. Raises UserError.
    """
    name = str(name)
    if ":" not in name or Path(name).exists() or dataset_folder(name).exists():
        return {name: 1.0}
    items = [item.strip() for item in name.split(",")]
    fractions = dict(map(split_fraction, items))
    if all(map(math.isnan, fractions.values())):
        # one dataset, or several without fractions: find_dataset() says what to do
        return {name: 1.0}
    for source, fraction in fractions.items():
        if not 0 < fraction <= 1:
            raise UserError(
                f"the fraction of {source} in dataset={name} is {fraction}: give each dataset "
                "one above 0 and at most 1, as in long:0.34,short:0.66"
            )
    if len({Path(source).name for source in fractions}) < len(items):
        raise UserError(
            f"dataset={name} has two datasets of the same name, which the log could not tell "
            "apart: rename the folder of one, or name each dataset once"
        )
    total = math.fsum(fractions.values())
    if abs(total - 1) > 1e-6:
        raise UserError(f"the fractions of dataset={name} add up to {total:g}: let them add to 1")
    return fractions


def task_fractions(tasks):
    """Return kind -> fraction of the setting `tasks`, words as "vt:0.05". Raises UserError."""
    fractions = {}
    for task in tasks:
        kind, fraction = split_fraction(task)
        if kind not in TASKS or kind in fractions or not 0 < fraction <= 1:
            raise UserError(
                f"tasks={','.join(tasks)} has {task}: give each kind of {', '.join(TASKS)} at most "
                "once, with a fraction of the sequences above 0 and at most 1, as in vt:0.05"
            )
        fractions[kind] = fraction
    total = math.fsum(fractions.values())
    if total > 1 + 1e-9:
        raise UserError(
            f"the fractions of tasks={','.join(tasks)} add up to {total:g}: lower them to 1 or less"
        )
    return fractions


def split_fraction(item):
    """Split "name:0.3" into the name and the fraction, which is nan if there is none."""
    name, _, number = item.strip().rpartition(":")
    try:
        return name, float(number)
    except ValueError:
        return item, math.nan


def random_positions(config, batch_size, length, seed):
    """Sample sorted, distinct position ids (batch_size, length) int64 below random_positions of a
    GPTConfig, on the CPU (Ruoss et al. 2023); None if it is 0. All callers of a model pass them on.
    """
    n = config.random_positions
    if not n:
        return None
    import torch  # data/prepare.py starts without it

    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(batch_size, max(length, n), generator=generator)
    return noise.topk(length).indices.sort().values


def short_name(name) -> str:
    """Return a name for the folder of a run: of a mixture long+short."""
    return "+".join(Path(source).name for source in split_mixture(name))


def dataset_exists(name) -> bool:
    """Return whether find_dataset() finds a dataset."""
    try:
        find_dataset(name)
    except UserError:
        return False
    return True


def vocabulary_size(name) -> int:
    """Return the size of the vocabulary of a dataset, or of the first one of a mixture."""
    first = next(iter(split_mixture(name)))
    return _read_meta(find_dataset(first))["vocab_size"]


def _read_meta(folder):
    """Read the tokenizer, vocab_size, bos and bos_default of a dataset."""
    file = folder / "meta.json"
    if not file.is_file():
        return _meta_of_bare_files(folder)
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        n = meta["vocab_size"]
        bos = meta["bos"]
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"vocab_size cannot be {n!r}")
        if bos is not None and not (isinstance(bos, int) and 0 <= bos < n):
            raise ValueError(f"bos cannot be {bos!r}")
        checksums = dict(meta.get("sha256") or {})
        meta = {key: meta[key] for key in ("tokenizer", "vocab_size", "bos", "bos_default")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}): prepare the dataset again"
        ) from None
    spec = meta["tokenizer"]
    meta["tokenizer"] = tokenizer_files.read(folder, spec, checksums, "prepare the dataset again")
    return meta


def _meta_of_bare_files(folder):
    """Describe token files without a meta.json, as nanoGPT and llm.c write them: GPT-2's tokens."""
    if (folder / "meta.pkl").exists():
        input_file = shlex.quote(str(folder / "input.txt"))
        raise UserError(
            f"the vocabulary of {folder} is in meta.pkl, a pickle, which nanoLong does not open: "
            f"make it from the text with python data/prepare.py {input_file} --tokenizer=char "
            "--name=NAME"
        )
    some_file = sorted(folder.glob("*.bin"))[:1]
    if some_file and open_tokens(some_file[0]).dtype.itemsize == 4:
        raise UserError(
            f"{folder} holds uint32 tokens and no meta.json that says of which vocabulary: write "
            "one with tokenizer (or null), vocab_size, bos and bos_default"
        )
    try:
        tokenizer = BPETokenizer.named("gpt2").to_json()
    except UserError:
        # Training goes on without it; bits per byte and sampled text need the vocabulary.
        tokenizer = None
    return {"tokenizer": tokenizer, "vocab_size": 50257, "bos": 50256, "bos_default": False}
