"""Data: tokenizers, token files, and the batches drawn from them.

A dataset is a folder, data/NAME/ or any path: train and validation token files and a meta.json that prepare.py writes. Token files
are read in three forms: shards with a 256-int header (llm.c's 20240520 form, uint16, and its 20240801 form, uint32), and
nanoGPT's header-less uint16. Batches are a function of (seed, number of the micro-batch) alone.
"""
import base64
import codecs
import functools
import hashlib
import json
import re
import unicodedata
import zlib
from pathlib import Path

import numpy as np

from config import LocalError, UserError

HERE = Path(__file__).resolve().parent
HEADER = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, dtype), then the number of tokens; 256 int32 in all


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers. Each has encode(text) -> list of ids, decode(ids) -> bytes, vocab_size, bos (an id or None), eos (where it is another), lengths
# (bytes per id), and to_json(); from_json() makes it again from a checkpoint's meta.json, with nothing else at hand.

class Bytes:
    """UTF-8 bytes, and one <bos>."""
    vocab_size, bos, eos = 257, 256, None
    lengths = np.array([1] * 256 + [0])

    def encode(self, text):
        return list(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))

    def decode(self, ids):
        return bytes(i for i in ids if i < 256)

    def to_json(self):
        return {"kind": "bytes"}


class Char:
    """The characters of a text, sorted, as in nanoGPT's shakespeare_char; with bos, one more id that starts a document."""
    eos = None

    def __init__(self, characters, bos=False):
        self.characters, self.index = characters, {c: i for i, c in enumerate(characters)}
        self.bos = len(characters) if bos else None
        self.vocab_size = len(characters) + bos
        self.lengths = np.array([len(c.encode("utf-8", "surrogatepass")) for c in characters] + [0] * bos)

    def encode(self, text):
        try:
            return [self.index[c] for c in text]
        except KeyError as error:
            raise UserError(f"the character {error.args[0]!r} does not occur in the text that this vocabulary was made from: leave it out") from None

    def decode(self, ids):
        return "".join(self.characters[i] for i in ids if i < len(self.characters)).encode("utf-8", "surrogatepass")

    def to_json(self):
        return {"kind": "char", "characters": self.characters, "bos": self.bos is not None}


class BPE:
    """A tiktoken encoding. Text that looks like a special token is encoded as ordinary text.

    bos, eos: what starts, and where it is another, ends a document; vocab_size: the model's, where it is padded; nfc: text is composed (Unicode NFC) before it is encoded.
    """

    def __init__(self, encoding, bos=None, eos=None, vocab_size=None, nfc=False):
        self.encoding, self.vocab_size, self.eos, self.nfc = encoding, vocab_size or encoding.n_vocab, eos, nfc
        self.bos = encoding._special_tokens.get("<|endoftext|>") if bos is None else bos
        tokens = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        self.lengths = np.array([len(tokens.get(i, b"")) for i in range(self.vocab_size)])

    @classmethod
    def named(cls, name):
        import tiktoken
        try:
            return cls(tiktoken.get_encoding(name))
        except ValueError:
            raise UserError(f"there is no tokenizer {name!r}: choose bytes, char, or a tiktoken encoding ({', '.join(tiktoken.list_encoding_names())})") from None
        except Exception as error:  # tiktoken downloads with requests, whose errors are many
            raise UserError(f"the {name} vocabulary could not be downloaded ({type(error).__name__}): fetch it where there is a network (python -c \"import tiktoken; "
                            f"tiktoken.get_encoding('{name}')\" with TIKTOKEN_CACHE_DIR=DIR), copy DIR here and set TIKTOKEN_CACHE_DIR to it") from None

    def encode(self, text):
        try:
            return self.encoding.encode_ordinary(unicodedata.normalize("NFC", text) if self.nfc else text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, which is no Exception: a pattern that matches the empty text, say
                raise
            raise UserError(f"this vocabulary cannot encode the text ({error}): prepare the dataset again, or use another checkpoint") from None

    def decode(self, ids):
        return b"".join(self.encoding.decode_single_token_bytes(i) for i in ids if i != self.bos and self.lengths[i])

    def to_json(self):
        e = self.encoding
        ranks = sorted(e._mergeable_ranks.items(), key=lambda item: item[1])
        packed = b"".join(len(token).to_bytes(2, "little") + rank.to_bytes(4, "little") + token for token, rank in ranks)
        more = {"eos": self.eos, "vocab_size": self.vocab_size, "nfc": self.nfc} if (self.eos, self.vocab_size, self.nfc) != (None, e.n_vocab, False) else {}
        return {"kind": "bpe", "name": e.name, "pattern": e._pat_str, "special": e._special_tokens, "bos": self.bos, **more,
                "ranks": base64.b64encode(zlib.compress(packed, 9)).decode()}


class Packaged:
    """An imported tokenizer.json that is no byte-level BPE (sentencepiece's, say): the optional tokenizers package encodes. Arguments as of BPE."""

    def __init__(self, text, bos, eos, vocab_size):
        self.text, self.bos, self.eos, self.vocab_size = text, bos, eos, vocab_size
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError("this vocabulary is no byte-level BPE, and reading it needs a package: pip install tokenizers (token ids work without)") from None
        try:
            self.tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the package raises Exception itself
            raise UserError(f"the tokenizer in meta.json is damaged ({error}): import the checkpoint again") from None
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self.pieces = [b"" if i in special else self._piece(self.tokenizer.id_to_token(i) or "") for i in range(vocab_size)]
        self.lengths = np.array([len(piece) for piece in self.pieces])

    @staticmethod
    def _piece(token):
        return bytes([int(token[3:5], 16)]) if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else token.replace("\u2581", " ").encode()

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids)

    def to_json(self):
        return {"kind": "packaged", "bos": self.bos, "eos": self.eos, "vocab_size": self.vocab_size, "tokenizer": base64.b64encode(zlib.compress(self.text.encode(), 9)).decode()}


def inflate(text, limit=1 << 26):
    """What was compressed and written in base64, of at most so many bytes: a few bytes can promise gigabytes."""
    unpack = zlib.decompressobj()
    content = unpack.decompress(base64.b64decode(text), limit)
    if unpack.unconsumed_tail or not unpack.eof:
        raise ValueError("it is cut short, or larger than any vocabulary")
    return content


def from_json(spec):
    """The tokenizer that to_json() described, or None for None (a dataset of bare token files of unknown making)."""
    try:
        if spec is None:
            return None
        if spec["kind"] == "bytes":
            return Bytes()
        if spec["kind"] == "char":
            if not (isinstance(spec["characters"], str) and isinstance(spec["bos"], bool)):
                raise TypeError("characters are text, and bos is true or false")
            return Char(spec["characters"], spec["bos"])
        if not all(spec.get(key) is None or type(spec[key]) is int and 0 <= spec[key] < 1 << 24 for key in ("bos", "eos", "vocab_size")):
            raise ValueError("its ids are no ids")
        if spec["kind"] == "bpe":
            import tiktoken
            packed, ranks, at = inflate(spec["ranks"]), {}, 0
            while at < len(packed):
                n, rank = int.from_bytes(packed[at:at + 2], "little"), int.from_bytes(packed[at + 2:at + 6], "little")
                ranks[packed[at + 6:at + 6 + n]] = rank
                at += 6 + n
            if max(*ranks.values(), *spec["special"].values(), 0) >= 1 << 24:
                raise ValueError("its ids are no ids")
            if missing := [i for i in range(256) if bytes([i]) not in ranks]:
                raise ValueError(f"byte {missing[0]} has no token")
            return BPE(tiktoken.Encoding(spec["name"], pat_str=spec["pattern"], mergeable_ranks=ranks, special_tokens=spec["special"]), spec["bos"], *(spec.get(key) for key in ("eos", "vocab_size", "nfc")))
        if spec["kind"] == "packaged":
            return Packaged(inflate(spec["tokenizer"]).decode(), spec["bos"], spec["eos"], spec["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error) as error:
        raise UserError(f"the tokenizer in meta.json is damaged ({type(error).__name__}: {error}): prepare the dataset again, or use another checkpoint") from None
    raise UserError(f"this version knows no tokenizer of kind {spec['kind']!r}: use the one that wrote it")


# ---------------------------------------------------------------------------------------------------------------------
# Token files.

def write_tokens(file, ids, vocab_size, raw=False):
    """Write token ids to a new file in the 20240520 form, the 20240801 form when the vocabulary exceeds uint16, or without header (raw)."""
    magic = 20240520 if vocab_size <= 1 << 16 else 20240801
    if raw and magic != 20240520:
        raise UserError(f"--raw writes uint16, which cannot hold a vocabulary of {vocab_size}: leave --raw out")
    version, dtype = HEADER[magic]
    if len(ids) >= 1 << 31:
        raise UserError(f"{len(ids):,} tokens are more than a token file can count (2,147,483,647): prepare the text as a folder of several --name's, or with a larger vocabulary")
    with open(file, "xb") as f:
        if not raw:
            header = np.zeros(256, "<i4")
            header[:3] = magic, version, len(ids)
            f.write(header.tobytes())
        f.write(np.asarray(ids, dtype).tobytes())


def open_tokens(file):
    """A token file as a read-only memory map (tokens,). Raises UserError when it is truncated or of an unknown form."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        header = np.frombuffer(f.read(1024), "<i4") if size >= 1024 else np.zeros(256, "<i4")
    if int(header[0]) in HEADER:
        (version, dtype), n = HEADER[int(header[0])], int(header[2])
        if header[1] != version:
            raise UserError(f"{file} is a shard of version {header[1]}, and this program reads version {version}: convert it, or prepare the text again")
        if size != 1024 + n * dtype.itemsize or n < 1:
            raise UserError(f"{file} is truncated or damaged: its header promises {n} tokens, {1024 + n * dtype.itemsize} bytes, and it has {size}: fetch or prepare it again")
        return np.memmap(file, dtype, "r", 1024, (n,))
    if size == 0 or size % 2:
        raise UserError(f"{file} is truncated: {size} bytes are no whole number of uint16 tokens: fetch or prepare it again")
    return np.memmap(file, "<u2", "r")


class Split:
    """The token files of train or validation, cut into windows that do not overlap and stay inside a file.

    bos: an id that is put first in every window (the first token then is a target as well) and is never scored; or None.
    """

    def __init__(self, files, vocab_size, bos):
        self.files, self.vocab_size, self.bos = list(files), vocab_size, bos
        self.tokens, self.starts = [open_tokens(file) for file in files], [0] * len(files)

    def __len__(self):
        return sum(map(len, self.tokens))

    def count(self, length, offset=0):
        """How many windows of so many targets each file holds, from an offset on: (files,)."""
        return np.array([max(0, (len(t) - offset - (self.bos is None)) // length) for t in self.tokens])

    def documents(self, separator):
        """(start, stop) of every document, a list for each file: they begin at `separator` (or at the start of a file), which is not counted."""
        found = []
        for tokens in self.tokens:
            at = np.flatnonzero(tokens == separator) if separator is not None else np.array([], int)
            edges = [*([] if len(at) and at[0] == 0 else [-1]), *at.tolist(), len(tokens)]
            found.append([(a + 1, b) for a, b in zip(edges, edges[1:]) if b > a + 1])
        return found

    def selected(self, separator, min_doc, upsample, length):
        """This split with documents in the place of files: those of at least min_doc tokens; those that hold a window of `length` are there `upsample` times."""
        other = Split([], self.vocab_size, self.bos)
        for file, tokens, documents in zip(self.files, self.tokens, self.documents(separator)):
            for a, b in documents:
                for _ in range((upsample if b - a >= length + (self.bos is None) else 1) if b - a >= min_doc else 0):
                    other.files.append(file), other.tokens.append(tokens[a:b]), other.starts.append(a)
        return other

    def require(self, length):
        """Raise UserError unless there is a window of this length."""
        if not self.count(length).any():
            if not self.files:
                raise UserError("no training document is as long as --min_doc: lower it, or prepare longer texts")
            raise UserError(f"{self.files[0].name} of {self.files[0].parent} holds {len(self)} tokens, too few for a window of {length}: prepare more text, or ask for a shorter --block_size (or --factor)")

    def window(self, number, length, offset=0):
        """Inputs and targets, int64 (length,) each, of one window; a <bos> among the targets is -1 where bos is set."""
        return self.cut(*self.place(number, length, offset), length)

    def place(self, number, length, offset=0):
        """The file of a window, and where it starts there."""
        ends = _ends(self, length, offset)
        file = int(np.searchsorted(ends, number, "right"))
        return file, offset + (number - (int(ends[file - 1]) if file else 0)) * length

    def cut(self, file, start, length):
        """Inputs and targets of the window whose first target is token `start` (bos) or start + 1 (without) of a file."""
        return self.shifted(self.checked(file, start, start + length + (self.bos is None)))

    def shifted(self, tokens):
        """Inputs and targets of a piece of text."""
        if self.bos is None:
            return tokens[:-1], tokens[1:]
        return np.concatenate(([self.bos], tokens[:-1])), np.where(tokens == self.bos, -1, tokens)

    def skipped(self, file, start, length, reach, rng):
        """Skip-wise training (PoSE: Zhu et al. 2024): inputs, targets and positions, int64 (length,) each, of a window in two parts. The second, from the middle on at
        the latest, is text from up to reach - length tokens further on, and its positions are, independently, up to reach - length further on."""
        first, more = int(rng.integers(1, max(1, length // 2) + 1)), length + (self.bos is None)
        room = len(self.tokens[file]) - start - more
        skip, jump = int(rng.integers(min(reach - length, room) + 1)), int(rng.integers(reach - length + 1))
        tokens = np.concatenate((self.checked(file, start, start + first), self.checked(file, start + first + skip, start + more + skip)))
        return *self.shifted(tokens), np.arange(length) + jump * (np.arange(length) >= first)

    def checked(self, file, start, stop):
        tokens = np.asarray(self.tokens[file][start:stop], np.int64)
        if tokens.max() >= self.vocab_size:
            at = int(tokens.argmax())
            raise LocalError(f"{self.files[file]}: token {self.starts[file] + start + at} is {tokens[at]}, outside the vocabulary of {self.vocab_size}: the file was made with another tokenizer; prepare it again")
        return tokens

    def sample(self, number, length, seed):
        """Where sample `number` of a training run lies: file and start. Every epoch visits every window once, in a permutation and from an offset drawn from (seed, epoch)."""
        epoch, number = divmod(number, _per_epoch(self, length))
        offset, order = _order(self, length, seed, epoch)
        return self.place(int(order[number]), length, offset)

    def batch(self, number, batch_size, length, seed):
        """Micro-batch `number` of a training run: inputs and targets, int64 (batch_size, length)."""
        rows = [self.cut(*self.sample(number * batch_size + i, length, seed), length) for i in range(batch_size)]
        return tuple(np.stack(part) for part in zip(*rows))


@functools.lru_cache(maxsize=8)
def _ends(split, length, offset):
    """Windows in all files up to each: (files,), of which there are as many as documents where those are selected."""
    return split.count(length, offset).cumsum()


@functools.lru_cache
def _per_epoch(split, length):
    """Windows in an epoch: as many as there are at the worst offset, or, of a text too short for that, without one."""
    return int(split.count(length, length - 1).sum() or split.count(length).sum())


@functools.lru_cache(maxsize=4)
def _order(split, length, seed, epoch):
    """An epoch's offset and its order of windows."""
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    offset = int(rng.integers(length)) if split.count(length, length - 1).any() else 0
    return offset, rng.permutation(int(split.count(length, offset).sum()))[:_per_epoch(split, length)]


FILLER, NEEDLE, DIGITS = "the grass is green. the sky is blue. ", "key ", 3  # of passkey documents


def passkey(tokenizer, length, depth, rng, bos=None, hidden=True):
    """A passkey document of length + 1 tokens: filler in which `key 123. ` is hidden at a depth (0 start .. 1 end), `key ` at its end, and the digits, which are the answer.

    Returns inputs and targets, int64 (length,) each; the last DIGITS targets are the answer. bos: an id to begin with. hidden=False leaves the key out of the filler:
    then the answer is known to nobody. Raises UserError when the length has no room, or the vocabulary no such characters.
    """
    def encode(text):
        return [int(t) for t in tokenizer.encode(text)]

    filler, ask, stop = encode(FILLER), encode(NEEDLE), encode(". ")
    answer = [encode(str(d))[-1] for d in rng.integers(10, size=DIGITS)]
    phase, needle = int(rng.integers(len(filler))), ask + answer + stop
    room = length + 1 - (bos is not None) - len(needle) - len(ask) - DIGITS
    if room < 0:
        raise UserError(f"a passkey document needs {length - room} tokens, and {length} are too few: choose longer --lengths or --block_size")
    body = [filler[(phase + i) % len(filler)] for i in range(room + len(needle))]
    if hidden:
        at = round(depth * room)
        body[at:] = needle + body[at:room]
    document = np.array(([] if bos is None else [bos]) + body + ask + answer)
    return document[:-1].copy(), document[1:]


class Dataset:
    """train and val (Split), tokenizer (or None), vocab_size, bos (an id or None), separator (what starts a document, or None), name, hash (of both splits' files)."""

    def __init__(self, name, bos=None):
        folder = locate(name)
        meta = _meta(folder)
        self.name, self.folder, self.tokenizer = name, folder, from_json(meta["tokenizer"])
        self.vocab_size = meta["vocab_size"]
        if self.tokenizer and self.tokenizer.vocab_size > self.vocab_size:
            raise UserError(f"the tokenizer of {folder} has {self.tokenizer.vocab_size} tokens and its meta.json a vocabulary of {self.vocab_size}: prepare the dataset again")
        if bos and meta["bos"] is None:
            raise UserError(f"dataset {name} has no <bos>: leave --bos out, or prepare it with --tokenizer=bytes")
        self.bos, self.separator, self.separate = meta["bos"] if (meta["bos_default"] if bos is None else bos) else None, meta["bos"], False
        train, val = (sorted(p for p in folder.glob("*.bin") if re.search(rf"(?<![a-z])(?:{words})(?![a-z])", p.name.lower())) for words in ("train|training", "val|valid|validation"))
        if both := set(train) & set(val):
            raise UserError(f"{min(both)} could be text for training and for validation: name it after one of them")
        if not train or not val:
            raise UserError(f"{folder} holds no {'train' if not train else 'val'}*.bin: prepare a text with python data/prepare.py FILE --name=NAME, or copy nanoGPT's or llm.c's token files there")
        known = self.tokenizer.vocab_size if self.tokenizer else self.vocab_size  # a vocabulary may be padded
        self.train, self.val = Split(train, known, self.bos), Split(val, known, self.bos)
        self.hash = fingerprint(train + val)

    def require(self, what, vocab_size, tokenizer):
        """Raise UserError unless a model, `what` in the sentence, of this vocabulary and tokenizer (from_json()'s, or None where it is unknown) can read this text."""
        if self.vocab_size != vocab_size:
            raise UserError(f"dataset {self.name} has a vocabulary of {self.vocab_size} and {what} one of {vocab_size}: give the --dataset that it was trained on")
        if tokenizer and self.tokenizer and not same_tokens(self.tokenizer, from_json(tokenizer)):
            raise UserError(f"the tokens of dataset {self.name} stand for other text than those of {what}: give the --dataset that it was trained on, or prepare the text with the model's own tokenizer (--tokenizer=RUN)")

    def select(self, length, min_doc=0, upsample=1, separate=False):
        """Choose what is trained on: documents of at least min_doc tokens only; those that hold a window of `length` `upsample` times an epoch; separate:
        attention stays inside a document. Raises UserError for a dataset that does not tell its documents apart."""
        if (min_doc or upsample > 1 or separate) and self.separator is None:
            raise UserError(f"dataset {self.name} has no <bos> between its documents: leave out --min_doc, --upsample_docs and --separate_docs, or prepare it with --tokenizer=bytes or gpt2")
        if min_doc or upsample > 1:
            self.train = self.train.selected(self.separator, min_doc, upsample, length)
        self.separate = separate

    def share_of_long(self, length, enough=1 << 28):
        """The share of the training tokens that lie in documents of at least `length` tokens; of a large dataset, of its first files."""
        sizes, seen = [], 0
        for file, tokens in zip(self.train.files, self.train.tokens):
            sizes += [b - a for a, b in Split([file], self.vocab_size, None).documents(self.separator)[0]]
            if (seen := seen + len(tokens)) > enough:
                break
        return sum(n for n in sizes if n >= length) / max(1, sum(sizes))

    def documents_of(self, x):
        """Document numbers (B, T) of inputs (B, T), where attention is to stay inside documents; else None."""
        return (x == self.separator).cumsum(1) if self.separate else None

    def batch(self, number, batch_size, length, seed, reach=0, passkeys=0.0):
        """Micro-batch `number` of a training run, a function of (seed, number): inputs and targets, int64 (batch_size, length), positions or None, and documents or None.

        reach > length: each window in two parts whose positions lie within `reach` (PoSE). passkeys: the share of windows that hold a passkey document, of a random
        length, in the place of text.
        """
        rows = []
        for sample in range(number * batch_size, (number + 1) * batch_size):
            file, start = self.train.sample(sample, length, seed)
            rng = np.random.Generator(np.random.PCG64([seed, sample]))
            if passkeys and rng.random() < passkeys:
                short = int(rng.integers(min(length, max(length // 4, 24)), length + 1))
                x, y = passkey(self.tokenizer, short, rng.random(), rng, self.bos)
                y[:-DIGITS] = -1  # only the answer is learned: scored as a whole, filler and hidden digits drown it
                row = np.pad(x, (0, length - short)), np.pad(y, (0, length - short), constant_values=-1)
                rows.append((*row, np.arange(length)) if reach else row)
            else:
                rows.append(self.train.skipped(file, start, length, reach, rng) if reach else self.train.cut(file, start, length))
        x, y, *positions = (np.stack(part) for part in zip(*rows))
        return x, y, positions[0] if reach else None, self.documents_of(x)

    def bytes_of(self, targets):
        """How many bytes of text the targets stand for (targets of -1 count nothing), or None where the tokenizer is unknown."""
        return None if self.tokenizer is None else int(self.tokenizer.lengths[targets[targets >= 0]].sum())


def same_tokens(one, other):
    """Whether two tokenizers give every id the same text."""
    if one.to_json() == other.to_json():
        return True
    n = len(one.lengths)
    return n == len(other.lengths) and bool((one.lengths == other.lengths).all()) and one.decode(range(n)) == other.decode(range(n))


def prompt(tokenizer, bos, text):
    """The ids that a text to be continued begins with: <bos> where there is one. An empty text without one is a new line, or the first token of a vocabulary that has none."""
    ids = [int(i) for i in tokenizer.encode(text)]
    if bos is not None:
        return [bos, *ids]
    if text:
        return ids
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except UserError:
        return [0]


def stream(tokens, tokenizer):
    """Turn an iterable of token ids into text as it comes: yields str, holding back bytes that do not make a character yet."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if text := decoder.decode(tokenizer.decode([token])):
            yield text
    if text := decoder.decode(b"", True):
        yield text


def vocabulary(name):
    """The size of a dataset's vocabulary."""
    return _meta(locate(name))["vocab_size"]


def exists(name):
    """Whether a dataset is there."""
    try:
        return bool(locate(name))
    except UserError:
        return False


def locate(name):
    """The folder of a dataset: a path, or a name under data/. Raises UserError with the command that makes it."""
    path = Path(name)
    if path.is_dir() and (path.is_absolute() or len(path.parts) > 1 or any(path.glob("*.bin"))):
        return path
    if (HERE / name).is_dir() and any((HERE / name).glob("*.bin")):
        return HERE / name
    ready = sorted(p.parent.name for p in HERE.glob("*/meta.json"))
    raise UserError(f"there is no dataset {name!r}: prepare it with python data/prepare.py" + (f" --dataset={name}" if name in ("python", "shakespeare", "fineweb10B") else f" FILE_OR_FOLDER --name={name}")
                    + (f"; ready are {', '.join(ready)}" if ready else ""))


def _meta(folder):
    """meta.json of a dataset; folders of bare token files, as nanoGPT and llm.c leave them, are GPT-2's vocabulary (or GPT-4-sized uint32 shards)."""
    file = folder / "meta.json"
    if file.is_file():
        try:
            meta = json.loads(file.read_text(encoding="utf-8"))
            n, bos = meta["vocab_size"], meta["bos"]
            if not (isinstance(n, int) and n > 0 and (bos is None or isinstance(bos, int) and 0 <= bos < n)):
                raise ValueError(f"vocab_size {n} and bos {bos} do not fit")
            return {key: meta[key] for key in ("tokenizer", "vocab_size", "bos", "bos_default")}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file} is damaged ({type(error).__name__}: {error}): prepare the dataset again") from None
    if (folder / "meta.pkl").exists():
        raise UserError(f"the vocabulary of {folder} is in meta.pkl, a pickle, which nanoLong does not open: make it from the text with python data/prepare.py "
                        f"{folder / 'input.txt'} --tokenizer=char --name=NAME")
    wide = any(open_tokens(p).dtype.itemsize == 4 for p in sorted(folder.glob("*.bin"))[:1])
    if wide:
        raise UserError(f"{folder} holds uint32 tokens and no meta.json that says of which vocabulary: write one with tokenizer (or null), vocab_size, bos and bos_default")
    try:
        tokenizer = BPE.named("gpt2").to_json()
    except UserError:
        tokenizer = None  # training goes on without; bits per byte and sampled text need the vocabulary
    return {"tokenizer": tokenizer, "vocab_size": 50257, "bos": 50256, "bos_default": False}


def fingerprint(files):
    """A hash of token files: of all their bytes up to 64 MB, of their size and 256 blocks of 64 KiB spread over each larger one."""
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
