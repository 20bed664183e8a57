"""Tokenizers: bytes, characters, tiktoken's encodings, and tokenizer.json, also trained here.

Every tokenizer has

    encode(text)    the token ids of a text, a list of int
    decode(ids)     the bytes that ids stand for; special tokens stand for none
    vocab_size      the number of ids, which is the model's where its vocabulary is padded
    bos             the id that starts a document, or None
    eos             the id that ends one; None if there is none, or if it is bos
    byte_lengths    (vocab_size,) how many bytes each id stands for
    added_bytes     how many bytes encode() puts before a text: 1 where that is a space
    to_json()       a dict from which tokenizer_from_json() makes the tokenizer again

A checkpoint's meta.json holds to_json(), apart from files (nanolong/tokenizer_files.py).
"""

import base64
import codecs
import functools
import itertools
import json
import re
import struct
import zlib

import numpy as np

from nanolong.errors import UserError

MAX_ID = 1 << 24  # ids in a meta.json must be below this; no vocabulary is nearly as large


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and <bos> as 256."""

    vocab_size = 257
    bos = 256
    eos = None
    byte_lengths = np.array([1] * 256 + [0])
    added_bytes = 0

    def encode(self, text):
        if isinstance(text, bytes):
            return list(text)
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids):
        return bytes(i for i in ids if i < 256)

    def to_json(self):
        return {"kind": "bytes"}


class CharTokenizer:
    """The characters of a text, as in nanoGPT's shakespeare_char.

    characters: a string; a character's place in it is its id. bos: whether one more id starts a
    document.
    """

    eos = None
    added_bytes = 0

    def __init__(self, characters: str, bos: bool = False):
        self.characters = characters
        self.ids = {character: i for i, character in enumerate(characters)}
        self.bos = len(characters) if bos else None
        self.vocab_size = len(characters) + bos
        lengths = [len(character.encode("utf-8", "surrogatepass")) for character in characters]
        self.byte_lengths = np.array(lengths + [0] * bos)

    def encode(self, text):
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise UserError(
                f"the character {error.args[0]!r} does not occur in the text that this vocabulary "
                "was made from: leave it out"
            ) from None

    def decode(self, ids):
        text = "".join(self.characters[i] for i in ids if i < len(self.characters))
        return text.encode("utf-8", "surrogatepass")

    def to_json(self):
        return {"kind": "char", "characters": self.characters, "bos": self.bos is not None}


class BPETokenizer:
    """Byte-level BPE by tiktoken. Text that looks like a special token is encoded as plain text.

    encoding: a tiktoken.Encoding. bos: by default the id of <|endoftext|>.
    """

    eos = None
    added_bytes = 0

    def __init__(self, encoding, bos=None):
        self.encoding = encoding
        self.bos = encoding._special_tokens.get("<|endoftext|>") if bos is None else bos
        self.vocab_size = encoding.n_vocab
        self.token_bytes = [b""] * self.vocab_size
        for token, rank in encoding._mergeable_ranks.items():
            self.token_bytes[rank] = token
        self.byte_lengths = np.array([len(token) for token in self.token_bytes])

    @classmethod
    def named(cls, name):
        """Load one of tiktoken's encodings, such as gpt2, from its cache or the network."""
        import tiktoken

        try:
            return cls(tiktoken.get_encoding(name))
        except ValueError:
            names = ", ".join(tiktoken.list_encoding_names())
            raise UserError(
                f"there is no tokenizer {name!r}: choose bytes, char, bpe, a tokenizer.json, or a "
                f"tiktoken encoding ({names})"
            ) from None
        # tiktoken downloads with requests, which raises many kinds of errors
        except Exception as error:
            command = f"python -c \"import tiktoken; tiktoken.get_encoding('{name}')\""
            raise UserError(
                f"the {name} vocabulary could not be downloaded ({type(error).__name__}): run "
                f"{command} with TIKTOKEN_CACHE_DIR=DIR where there is a network, copy DIR here "
                "and set TIKTOKEN_CACHE_DIR to it, or choose bpe, which needs no network"
            ) from None

    def encode(self, text):
        try:
            return self.encoding.encode_ordinary(text)
        # tiktoken's Rust code panics, as on a pattern that matches the empty text
        except BaseException as error:
            raise UserError(
                f"this vocabulary cannot encode the text ({reason_of(error)}): prepare the dataset "
                "again, or use another checkpoint"
            ) from None

    def decode(self, ids):
        return b"".join(self.token_bytes[i] for i in ids if i != self.bos)

    def to_json(self):
        return {
            "kind": "bpe",
            "name": self.encoding.name,
            "pattern": self.encoding._pat_str,
            "special": self.encoding._special_tokens,
            "bos": self.bos,
            "ranks": _pack_ranks(self.encoding._mergeable_ranks),
        }


def reason_of(error) -> str:
    """Return what an error of Rust code says. Raise one from elsewhere again, such as Ctrl-C."""
    # the PanicException of Rust code is not an Exception
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split())[:200]


# -----------------------------------------------------------------------------
# tokenizer.json, read by the tokenizers package


def import_tokenizers():
    """Return the tokenizers package. Raises UserError if it is missing."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "the tokenizers package, which reads and writes tokenizer.json, is not installed: "
            "pip install -r requirements-hf.txt"
        ) from None
    return tokenizers


def load_tokenizer_json(text: str):
    """Return the tokenizers.Tokenizer of a tokenizer.json.

    It encodes a text whole, and the special tokens in it as plain text. Raises UserError for a
    damaged one, and where the package is missing.
    """
    tokenizers = import_tokenizers()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        reason = reason_of(error)
        raise UserError(f"tokenizer.json is damaged ({reason}): download it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


PART_LENGTH = 1 << 17  # characters that an ImportedTokenizer encodes at once
# where most vocabularies end a token: before a word, and after a mark of Chinese or Japanese
SPLITS = re.compile(r"(?<=[a-z]) (?=[a-z])|(?<=[。，、])(?=\w)")


class ImportedTokenizer:
    """A tokenizer.json, and the other tokenizer files that a model came with.

    encode() takes text that looks like a special token for plain text.

    files: name -> content; one is tokenizer.json. vocab_size: the model's, where it is padded.
    decode() and byte_lengths take the ids for the continuation of a text: where the
    package would leave out a space in front, it is there.
    """

    def __init__(self, files: dict[str, bytes], bos, eos, vocab_size: int):
        self.files = files
        self.text = files["tokenizer.json"].decode()
        self.bos = bos
        self.eos = eos
        self.vocab_size = vocab_size

    @functools.cached_property
    def package_tokenizer(self):
        """The tokenizers.Tokenizer, which takes up to a second to load."""
        return load_tokenizer_json(self.text)

    @functools.cached_property
    def special_tokens(self):
        """text -> id"""
        added = self.package_tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @functools.cached_property
    def special_ids(self):
        return set(self.special_tokens.values())

    def encode_with_special_tokens(self, text):
        """Encode a text in which the text of a special token stands for it."""
        self.package_tokenizer.encode_special_tokens = False
        try:
            return self._encode_parts([text])
        finally:
            self.package_tokenizer.encode_special_tokens = True

    def encode(self, text):
        parts = self._split(text)
        ids = self._encode_parts(parts)
        if self.special_ids.isdisjoint(ids):
            return ids
        return self._encode_parts(parts, self._tokenizer_without_special_tokens)

    def _split(self, text):
        """Split a long text into parts that encode to what the whole does, to save memory."""
        parts = []
        start = 0
        stop = self._find_split(text, start)
        while stop is not None:
            parts.append(text[start:stop])
            # a space that encode() puts before a text takes the place of the one that is there
            start = stop + self.added_bytes
            stop = self._find_split(text, start)
        return [*parts, text[start:]]

    def _find_split(self, text, start):
        """Return where the text from start on can be split; None if it is short, or no place is."""
        if len(text) - start <= 2 * PART_LENGTH:
            return None
        for match in itertools.islice(SPLITS.finditer(text, start + PART_LENGTH), 100):
            middle = match.start()
            left = text[middle - 100 : middle]
            right = text[middle : middle + 100]
            parts = [left, right[self.added_bytes :]]
            if self._encode_parts(parts) == self._encode_parts([left + right]):
                return middle
        return None

    def _encode_parts(self, parts, tokenizer=None):
        """Encode parts of a text, by default by the package_tokenizer, and join the ids."""
        tokenizer = tokenizer or self.package_tokenizer
        ids = []
        try:
            # some at a time, in threads
            for i in range(0, len(parts), 16):
                some = parts[i : i + 16]
                "".join(some).encode()  # of half a surrogate pair the package does not say where
                for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                    ids += encoding.ids
        except BaseException as error:
            raise UserError(
                f"this vocabulary cannot encode the text ({reason_of(error)}): leave out what it "
                "lacks, or what is no UTF-8"
            ) from None
        return ids

    @functools.cached_property
    def _tokenizer_without_special_tokens(self):
        """For vocabularies, mostly Unigram, that find special tokens in plain text.

        Here these have names of noncharacters, which text does not hold.
        """
        spec = json.loads(self.text)
        model = spec["model"]
        renamed = {}
        for token in spec["added_tokens"]:
            # the token for unknown characters is found by its name
            if token["special"] and token["content"] != model.get("unk_token"):
                renamed[token["content"]] = "\U0010ffff" * 3 + token["content"]
                token["content"] = renamed[token["content"]]
        if isinstance(model["vocab"], list):
            model["vocab"] = [[renamed.get(name, name), score] for name, score in model["vocab"]]
        else:
            model["vocab"] = {renamed.get(name, name): i for name, i in model["vocab"].items()}
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if merged(pair) not in renamed]
        return load_tokenizer_json(json.dumps(spec, allow_nan=False))

    @functools.cached_property
    def token_bytes(self):
        """The bytes of every id; none for special tokens and for ids that are only padding."""
        tokenizer = self.package_tokenizer
        token_to_bytes = bytes_of_tokens(tokenizer)
        token_bytes = [b""] * self.vocab_size
        for token, i in tokenizer.get_vocab().items():
            if i < self.vocab_size and i not in self.special_ids:
                token_bytes[i] = token_to_bytes(token)
        return token_bytes

    @functools.cached_property
    def byte_lengths(self):
        return np.array([len(token) for token in self.token_bytes])

    @functools.cached_property
    def added_bytes(self):
        return len(self.decode(self.encode("a"))) - 1

    def decode(self, ids):
        return b"".join(self.token_bytes[i] for i in ids)

    def to_json(self):
        return {
            "kind": "imported",
            "bos": self.bos,
            "eos": self.eos,
            "vocab_size": self.vocab_size,
            "files": self.files,
        }


BPE_SEPARATOR = "<|endoftext|>"


def train_bpe(texts, vocab_size: int) -> ImportedTokenizer:
    """Train byte-level BPE, with GPT-2's pattern, of at most vocab_size tokens.

    A short text gives fewer, because a pair that occurs once is not merged.
    """
    tokenizers = import_tokenizers()
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BPE_SEPARATOR],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    # the package needs many times the memory of the longest text that it gets
    parts = (text[i : i + PART_LENGTH] for text in texts for i in range(0, len(text), PART_LENGTH))
    bpe.train_from_iterator(parts, trainer)
    files = {"tokenizer.json": bpe.to_str().encode()}
    bos = bpe.token_to_id(BPE_SEPARATOR)
    return ImportedTokenizer(files, bos, None, bpe.get_vocab_size())


def merged(pair):
    """Return the token that a merge makes. Older files write "left right"."""
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def bytes_of_tokens(tokenizer):
    """Return the function token -> bytes of a tokenizers.Tokenizer, by its decoder.

    Raises UserError for a decoder that is neither byte-level nor sentencepiece's.
    """
    decoder = tokenizer.decoder
    spec = json.loads(decoder.__getstate__()) if decoder else {"type": None}
    types = {step["type"] for step in spec.get("decoders", [spec])}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def byte_level(token):
        if token in added or not byte_of.keys() >= set(token):
            return token.encode()
        return bytes(byte_of[character] for character in token)

    def sentencepiece(token):
        if "ByteFallback" in types and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        # between two others, because the first and the last token may lose a space
        return decoder.decode(["a", token, "a"])[1:-1].encode()

    if "ByteLevel" in types:
        byte_of = byte_level_alphabet()
        return byte_level
    if types <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece
    names = ", ".join(sorted(map(str, types)))
    raise UserError(
        f"the decoder of this tokenizer.json ({names}) is neither byte-level nor sentencepiece's, "
        "so that no token stands for text of its own: remove the file to work on token ids alone"
    )


def byte_level_alphabet():
    """Return how byte-level BPE writes the bytes 0 to 255, in this order: character -> byte.

    Printable bytes stand for themselves, the others for characters from U+0100 on.
    """
    alphabet = sorted(import_tokenizers().pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in alphabet if ord(character) < 256]
    byte_values = printable + sorted(set(range(256)) - set(printable))
    byte_of = dict(zip(alphabet, byte_values, strict=True))
    return dict(sorted(byte_of.items(), key=lambda item: item[1]))


# -----------------------------------------------------------------------------
# Tokenizers in JSON

# what damaged JSON raises
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error, struct.error)


def tokenizer_from_json(spec):
    """Make the tokenizer that to_json() described; None, of token files alone, makes None.

    Raises UserError if the description is damaged or of an unknown kind.
    """
    if spec is None:
        return None
    try:
        kind = spec["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "char":
            if not isinstance(spec["characters"], str) or not isinstance(spec["bos"], bool):
                raise TypeError("characters must be text, and bos true or false")
            return CharTokenizer(spec["characters"], spec["bos"])
        for key in ("bos", "eos", "vocab_size"):
            value = spec.get(key)
            if value is not None and not (type(value) is int and 0 <= value < MAX_ID):
                raise ValueError(f"{key} cannot be {value!r}")
        if kind == "bpe":
            return _bpe_from_json(spec)
        if kind == "imported":
            if spec["vocab_size"] is None:
                raise TypeError("vocab_size must be a number")
            return ImportedTokenizer(spec["files"], spec["bos"], spec["eos"], spec["vocab_size"])
    except DAMAGE as error:
        raise UserError(
            f"the tokenizer in meta.json is damaged ({type(error).__name__}: {error}): prepare the "
            "dataset again, or use another checkpoint"
        ) from None
    raise UserError(f"there is no tokenizer of kind {kind!r} in this version: use a newer one")


def _bpe_from_json(spec):
    import tiktoken

    ranks = _unpack_ranks(spec["ranks"])
    if max(*ranks.values(), *spec["special"].values(), 0) >= MAX_ID:
        raise ValueError("an id is too large")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"byte {missing[0]} has no token")
    encoding = tiktoken.Encoding(
        spec["name"],
        pat_str=spec["pattern"],
        mergeable_ranks=ranks,
        special_tokens=spec["special"],
    )
    return BPETokenizer(encoding, spec["bos"])


def _pack_ranks(ranks):
    """Pack tokens by their ranks: length (2 bytes), rank (4 bytes), token; zlib; base64."""
    items = sorted(ranks.items(), key=lambda item: item[1])
    packed = b"".join(struct.pack("<HI", len(token), rank) + token for token, rank in items)
    return base64.b64encode(zlib.compress(packed, 9)).decode()


def _unpack_ranks(text):
    packed = decompress(text)
    ranks = {}
    start = 0
    while start < len(packed):
        length, rank = struct.unpack_from("<HI", packed, start)
        ranks[packed[start + 6 : start + 6 + length]] = rank
        start += 6 + length
    return ranks


def decompress(text: str, limit: int = 1 << 26) -> bytes:
    """Decompress bytes that zlib compressed, in base64. Raises ValueError for more than `limit`.

    Without a limit, a few bytes of a damaged file could unpack to gigabytes.
    """
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(base64.b64decode(text), limit)
    if decompressor.unconsumed_tail or not decompressor.eof:
        raise ValueError("it is cut short, or larger than any vocabulary")
    return content


def same_vocabulary(one, other) -> bool:
    """Return whether two tokenizers give every id the same text."""
    if one.to_json() == other.to_json():
        return True
    ids = range(len(one.byte_lengths))
    same_lengths = np.array_equal(one.byte_lengths, other.byte_lengths)
    return same_lengths and one.decode(ids) == other.decode(ids)


# -----------------------------------------------------------------------------
# Prompts and generated text


def encode_prompt(tokenizer, bos, text: str) -> list[int]:
    """Encode the text that a model is to continue, after <bos> where there is one.

    An empty text without <bos> becomes a newline, or id 0 if the vocabulary has no newline: a
    model needs one token to continue.
    """
    if bos is not None:
        return [bos, *tokenizer.encode(text)]
    try:
        return tokenizer.encode(text or "\n")
    except UserError:
        if text:
            raise
        return [0]


def decode_stream(tokens, tokenizer):
    """Yield the text of token ids while they are generated.

    Bytes that do not complete a character are held back until they do.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        text = decoder.decode(tokenizer.decode([token]))
        if text:
            yield text
    text = decoder.decode(b"", final=True)
    if text:
        yield text
