"""Tokenizers: bytes, characters, byte-level BPE, and whatever the tokenizers package reads.

Every tokenizer has

    encode(text)    the token ids of a text, a list of int
    decode(ids)     the bytes that ids stand for; special tokens stand for none
    vocab_size      the number of ids, which is the model's where its vocabulary is padded
    bos             the id that starts a document, or None
    eos             the id that ends one; None where there is none, or where it is bos
    byte_lengths    (vocab_size,) how many bytes each id stands for
    to_json()       a dict from which tokenizer_from_json() makes the tokenizer again

A checkpoint's meta.json holds to_json(), so sampling from it needs no other file.
"""

import base64
import codecs
import re
import unicodedata
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

    encoding: a tiktoken.Encoding. bos: by default the id of <|endoftext|>. eos: where it is another
    id. vocab_size: the model's, where it is padded. nfc: compose the text (Unicode NFC) first.
    """

    def __init__(self, encoding, bos=None, eos=None, vocab_size=None, nfc=False):
        self.encoding = encoding
        self.bos = encoding._special_tokens.get("<|endoftext|>") if bos is None else bos
        self.eos = eos
        self.vocab_size = vocab_size or encoding.n_vocab
        self.nfc = nfc
        token_bytes = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        self.byte_lengths = np.array([len(token_bytes.get(i, b"")) for i in range(self.vocab_size)])

    @classmethod
    def named(cls, name):
        """Load one of tiktoken's encodings, such as gpt2, from its cache or the network."""
        import tiktoken

        try:
            return cls(tiktoken.get_encoding(name))
        except ValueError:
            names = ", ".join(tiktoken.list_encoding_names())
            raise UserError(
                f"there is no tokenizer {name!r}: choose bytes, char, or a tiktoken encoding "
                f"({names})"
            ) from None
        # tiktoken downloads with requests, which raises many kinds of errors
        except Exception as error:
            command = f"python -c \"import tiktoken; tiktoken.get_encoding('{name}')\""
            raise UserError(
                f"the {name} vocabulary could not be downloaded ({type(error).__name__}): run "
                f"{command} with TIKTOKEN_CACHE_DIR=DIR where there is a network, copy DIR here "
                "and set TIKTOKEN_CACHE_DIR to it"
            ) from None

    def encode(self, text):
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        try:
            return self.encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's Rust code panics, as on a pattern that matches the empty text; its
            # PanicException is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"this vocabulary cannot encode the text ({error}): prepare the dataset again, or "
                "use another checkpoint"
            ) from None

    def decode(self, ids):
        ordinary = (i for i in ids if i != self.bos and self.byte_lengths[i])
        return b"".join(self.encoding.decode_single_token_bytes(i) for i in ordinary)

    def to_json(self):
        spec = {
            "kind": "bpe",
            "name": self.encoding.name,
            "pattern": self.encoding._pat_str,
            "special": self.encoding._special_tokens,
            "bos": self.bos,
        }
        if (self.eos, self.vocab_size, self.nfc) != (None, self.encoding.n_vocab, False):
            spec |= {"eos": self.eos, "vocab_size": self.vocab_size, "nfc": self.nfc}
        spec["ranks"] = compress(_pack_ranks(self.encoding._mergeable_ranks))
        return spec


class PackagedTokenizer:
    """An imported tokenizer.json that is not byte-level BPE, such as sentencepiece's.

    text: the content of tokenizer.json, which the optional tokenizers package reads. bos, eos and
    vocab_size are those of BPETokenizer.
    """

    def __init__(self, text: str, bos, eos, vocab_size: int):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(
                "this vocabulary is not byte-level BPE, and reading it needs a package: "
                "pip install tokenizers (token ids work without it)"
            ) from None
        try:
            self.tokenizer = Tokenizer.from_str(text)
        # the package raises Exception itself
        except Exception as error:
            raise UserError(
                f"the tokenizer in meta.json is damaged ({error}): import the checkpoint again"
            ) from None
        self.text = text
        self.bos = bos
        self.eos = eos
        self.vocab_size = vocab_size
        self.token_bytes = self._token_bytes()
        self.byte_lengths = np.array([len(token) for token in self.token_bytes])

    def _token_bytes(self):
        """List the bytes of every id: none for special tokens and for ids that are only padding."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        special = {i for i, token in added if token.special}
        token_bytes = []
        for i in range(self.vocab_size):
            token = "" if i in special else self.tokenizer.id_to_token(i) or ""
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                token_bytes.append(bytes([int(token[3:5], 16)]))
            else:
                # sentencepiece writes a space as U+2581
                token_bytes.append(token.replace("\u2581", " ").encode())
        return token_bytes

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return b"".join(self.token_bytes[i] for i in ids)

    def to_json(self):
        return {
            "kind": "packaged",
            "bos": self.bos,
            "eos": self.eos,
            "vocab_size": self.vocab_size,
            "tokenizer": compress(self.text.encode()),
        }


# -----------------------------------------------------------------------------
# Tokenizers in JSON


def tokenizer_from_json(spec):
    """Make the tokenizer that to_json() described; None, of token files alone, makes None.

    Raises UserError where the description is damaged or of an unknown kind.
    """
    if spec is None:
        return None
    try:
        kind = spec["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "char":
            return _char_from_json(spec)
        _check_ids(spec)
        if kind == "bpe":
            return _bpe_from_json(spec)
        if kind == "packaged":
            text = decompress(spec["tokenizer"]).decode()
            return PackagedTokenizer(text, spec["bos"], spec["eos"], spec["vocab_size"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, zlib.error) as error:
        raise UserError(
            f"the tokenizer in meta.json is damaged ({type(error).__name__}: {error}): prepare the "
            "dataset again, or use another checkpoint"
        ) from None
    raise UserError(f"there is no tokenizer of kind {kind!r} in this version: use a newer one")


def _check_ids(spec):
    for key in ("bos", "eos", "vocab_size"):
        value = spec.get(key)
        if value is not None and not (type(value) is int and 0 <= value < MAX_ID):
            raise ValueError(f"{key} cannot be {value!r}")


def _char_from_json(spec):
    if not isinstance(spec["characters"], str) or not isinstance(spec["bos"], bool):
        raise TypeError("characters must be text, and bos true or false")
    return CharTokenizer(spec["characters"], spec["bos"])


def _bpe_from_json(spec):
    import tiktoken

    ranks = _unpack_ranks(decompress(spec["ranks"]))
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
    return BPETokenizer(
        encoding, spec["bos"], spec.get("eos"), spec.get("vocab_size"), spec.get("nfc")
    )


def _pack_ranks(ranks):
    """Write tokens in the order of their ranks: length (2 bytes), rank (4 bytes), token."""
    packed = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        packed += [len(token).to_bytes(2, "little"), rank.to_bytes(4, "little"), token]
    return b"".join(packed)


def _unpack_ranks(packed):
    ranks = {}
    start = 0
    while start < len(packed):
        length = int.from_bytes(packed[start : start + 2], "little")
        rank = int.from_bytes(packed[start + 2 : start + 6], "little")
        stop = start + 6 + length
        ranks[packed[start + 6 : stop]] = rank
        start = stop
    return ranks


def compress(content: bytes) -> str:
    """Compress bytes with zlib and write them in base64."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def decompress(text: str, limit: int = 1 << 26) -> bytes:
    """Undo compress(). Raises ValueError for more than `limit` bytes.

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
    if not np.array_equal(one.byte_lengths, other.byte_lengths):
        return False
    ids = range(len(one.byte_lengths))
    return one.decode(ids) == other.decode(ids)


# -----------------------------------------------------------------------------
# Prompts and generated text


def encode_prompt(tokenizer, bos, text: str) -> list[int]:
    """Encode the text that a model is to continue, after <bos> where there is one.

    An empty text without <bos> becomes a newline, or id 0 where the vocabulary has no newline: a
    model needs one token to continue.
    """
    ids = [int(i) for i in tokenizer.encode(text)]
    if bos is not None:
        return [bos, *ids]
    if text:
        return ids
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except UserError:
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
