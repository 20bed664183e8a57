"""Tokenizers: bytes, characters, tiktoken's encodings, and tokenizer.json.

Every tokenizer has

    encode(text)    the token ids of a text; what looks like a special token is plain text
    decode(ids)     the bytes that ids stand for, as a continuation; special tokens stand for none
    vocab_size      the number of ids, which is the model's if its vocabulary is padded
    bos, eos        the ids that start and end a document, or None; eos only if it is not bos
    starts_text     whether bos is put before every text
    ends            the ids that end a text: a model with several writes any of them
    special_tokens  text -> id
    byte_lengths    (vocab_size,) how many bytes each id stands for
    added_bytes     how many bytes encode() puts before a text: 1 if that is a space
    to_json()       a dict from which tokenizer_from_json() makes the tokenizer again

A meta.json holds to_json(). In a dataset, the files of a tokenizer lie next to it.
"""

import contextlib
import functools
import importlib.util
import json
import re

import numpy as np

from nanolong.errors import UserError, check_choice, require

SEPARATOR = "<|endoftext|>"  # starts a document if nothing else is said to
CANNOT_ENCODE = (
    "this vocabulary cannot encode the text",
    "leave out characters that it lacks, and bytes that are no UTF-8",
)
# the steps of sentencepiece's decoder in a tokenizer.json
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    eos = None
    starts_text = False
    added_bytes = 0
    special_tokens = {}

    def decode(self, ids):
        return b"".join(self.token_bytes[i] for i in ids if i < len(self.token_bytes))

    @property
    def ends(self):
        end = self.bos if self.eos is None else self.eos
        return [] if end is None else [end]

    @functools.cached_property
    def byte_lengths(self):
        return np.array([len(token) for token in self.token_bytes])


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and <bos> as 256."""

    vocab_size = 257
    bos = 256
    starts_text = True
    special_tokens = {"<bos>": 256}
    token_bytes = [bytes([i]) for i in range(256)] + [b""]

    def encode(self, text):
        return list(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))

    def to_json(self):
        return {"kind": "bytes"}


class CharTokenizer(Tokenizer):
    """The characters of a text, as in nanoGPT's shakespeare_char.

    characters: a string; a character's place in it is its id. bos: whether one more id starts a
    document.
    """

    def __init__(self, characters: str, bos: bool = False):
        self.characters = characters
        self.ids = {character: i for i, character in enumerate(characters)}
        self.bos = len(characters) if bos else None
        self.special_tokens = {"<bos>": self.bos} if bos else {}
        self.token_bytes = [c.encode("utf-8", "surrogatepass") for c in characters] + [b""] * bos
        self.vocab_size = len(self.token_bytes)

    def encode(self, text):
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise UserError(
                f"the character {error.args[0]!r} does not occur in the text that this vocabulary "
                "was made from: leave it out"
            ) from None

    def to_json(self):
        return {"kind": "char", "characters": self.characters, "bos": self.bos is not None}


class BPETokenizer(Tokenizer):
    """Byte-level BPE by tiktoken, which has it in its cache or downloads it.

    encoding: a tiktoken.Encoding. <|endoftext|> starts a document.
    """

    def __init__(self, encoding):
        self.encoding = encoding
        names = encoding.special_tokens_set
        self.special_tokens = {name: encoding.encode_single_token(name) for name in names}
        self.bos = self.special_tokens.get(SEPARATOR)
        self.vocab_size = encoding.n_vocab
        self.token_bytes = [b""] * self.vocab_size
        for token in encoding.token_byte_values():
            self.token_bytes[encoding.encode_single_token(token)] = token

    @classmethod
    def named(cls, name):
        """Load one of tiktoken's encodings, such as gpt2."""
        import tiktoken

        names = tiktoken.list_encoding_names()
        remedy = "choose bytes, char, bpe, a tokenizer.json, or a tiktoken encoding ({})"
        check_choice(name, names, "tokenizer", remedy)
        try:
            return cls(tiktoken.get_encoding(name))
        # tiktoken downloads with requests, which raises many kinds of errors
        except Exception as error:
            command = f"python -c \"import tiktoken; tiktoken.get_encoding('{name}')\""
            raise UserError(
                f"the {name} vocabulary could not be downloaded ({type(error).__name__}): run "
                f"{command} with TIKTOKEN_CACHE_DIR=DIR where there is a network, copy DIR here "
                "and set TIKTOKEN_CACHE_DIR to it, or choose bpe, which needs no network"
            ) from None

    def encode(self, text):
        with rust_errors("this vocabulary cannot encode the text", "use another checkpoint"):
            return self.encoding.encode_ordinary(text)

    def to_json(self):
        return {"kind": "bpe", "name": self.encoding.name}


class ImportedTokenizer(Tokenizer):
    """A tokenizer.json, and the other tokenizer files that a model came with.

    files: name -> bytes; one is tokenizer.json. vocab_size: the model's, by default the file's. The
    others are what nanolong/tokenizer_files.py found in the files.
    """

    def __init__(self, files, bos=None, eos=None, vocab_size=None, starts_text=False, ends=()):
        self.files = {name: bytes(content) for name, content in files.items()}
        with rust_errors("tokenizer.json is damaged", "download it again"):
            self.text = self.files["tokenizer.json"].decode()
        self.bos = bos
        self.eos = eos
        self.starts_text = starts_text
        self.known_ends = ends
        self.limit = vocab_size  # no token beyond the model's vocabulary is added
        self.vocab_size = vocab_size or 1 + max(self.package.get_vocab().values(), default=-1)

    @property
    def ends(self):
        return [*self.known_ends] or super().ends

    @functools.cached_property
    def package(self):
        """The tokenizers.Tokenizer, which takes up to a second to load; special tokens are text."""
        tokenizers, settings = tokenizers_package(), self.settings
        with rust_errors("tokenizer.json is damaged", "download it again"):
            package = tokenizers.Tokenizer.from_str(self.text)
        package.no_truncation()
        package.no_padding()
        package.encode_special_tokens = True
        with rust_errors("the tokens of tokenizer_config.json are damaged", "download it again"):
            add_tokens(package, settings, self.limit)
        return package

    @functools.cached_property
    def special_tokens(self):
        added = self.package.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def settings(self):
        """The content of tokenizer_config.json and of older files, as AutoTokenizer reads them."""
        settings = self.read_json("tokenizer_config.json")
        if "added_tokens_decoder" in settings:
            return settings
        older = self.read_json("added_tokens.json")
        decoder = {i: {"content": token} for token, i in older.items()}
        settings |= self.read_json("special_tokens_map.json")
        return settings | {"added_tokens_decoder": decoder}

    def read_json(self, name):
        """Return the object in one of the files, {} if there is no such file."""
        try:
            return dict(json.loads(self.files.get(name, "{}")))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{name} is damaged ({error}): download it again") from None

    def encode(self, text):
        with rust_errors(*CANNOT_ENCODE):
            text.encode()  # because the package does not say where half a surrogate pair is
            return self.package.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_with_special_tokens(self, text):
        """Encode a text in which the text of a special token stands for it."""
        self.package.encode_special_tokens = False
        try:
            with rust_errors(*CANNOT_ENCODE):
                text.encode()
                return self.package.encode(text, add_special_tokens=False).ids
        finally:
            self.package.encode_special_tokens = True

    @functools.cached_property
    def token_bytes(self):
        """The bytes of every id; none for special tokens and for ids that are only padding."""
        # the decoder says how a token is written
        spec = json.loads(self.package.decoder.__getstate__()) if self.package.decoder else {}
        types = {str(step.get("type")) for step in spec.get("decoders", [spec])}
        is_byte_level = "ByteLevel" in types
        require(
            is_byte_level or types <= SENTENCEPIECE,
            f"the decoder of this tokenizer.json ({', '.join(types)}) is neither byte-level nor "
            "sentencepiece's, so that no token stands for text of its own: remove the file to work "
            "on token ids alone",
        )
        byte_of = byte_level_alphabet()
        added = {token.content for token in self.package.get_added_tokens_decoder().values()}
        token_bytes = [b""] * self.vocab_size
        for token, i in self.package.get_vocab().items():
            if token in self.special_tokens or i >= self.vocab_size:
                continue
            if is_byte_level:
                is_text = token in added or not byte_of.keys() >= set(token)
                token_bytes[i] = token.encode() if is_text else bytes(byte_of[c] for c in token)
            elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                token_bytes[i] = bytes([int(token[3:5], 16)])
            else:  # between two others, because the first and the last token may lose a space
                token_bytes[i] = self.package.decoder.decode(["a", token, "a"])[1:-1].encode()
        return token_bytes

    @functools.cached_property
    def known_text(self):
        """A character that the vocabulary has."""
        text = self.decode(range(self.vocab_size)).decode("utf-8", "ignore")
        return "a" if b"a" in self.token_bytes else text[:1]

    @functools.cached_property
    def added_bytes(self):
        text = self.known_text
        return len(self.decode(self.encode(text))) - len(text.encode())

    def to_json(self):
        names = ("bos", "eos", "vocab_size", "starts_text", "ends", "files")
        return {"kind": "imported"} | {name: getattr(self, name) for name in names}


# -----------------------------------------------------------------------------
# tokenizer.json, by the tokenizers package


@contextlib.contextmanager
def rust_errors(problem, remedy):
    """Turn errors of a package in Rust into a UserError: problem (reason): remedy."""
    try:
        yield
    except BaseException as error:
        # its PanicException is not an Exception, and neither is Ctrl-C
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{problem} ({reason}): {remedy}") from None


def tokenizers_package():
    """Import the tokenizers package, which not every installation has, and return it."""
    require(
        importlib.util.find_spec("tokenizers"),
        "the tokenizers package, which reads and writes tokenizer.json, is not installed: "
        "pip install -r requirements-hf.txt",
    )
    import tokenizers

    return tokenizers


def token_text(settings, name):
    """Return the text of bos_token or another token of a tokenizer's settings, or None."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def add_tokens(package, settings, limit):
    """Add the tokens that the settings of a tokenizer name to its tokenizers.Tokenizer.

    As in AutoTokenizer a new one gets the next id, whatever the file says, and bos and eos are
    special; a name without a token names none. limit: the size of the vocabulary, or None.
    """
    from tokenizers import AddedToken

    known = {token.content for token in package.get_added_tokens_decoder().values()}
    named = {token_text(settings, name) for name in ("bos_token", "eos_token")} - {None}
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    decoder = sorted(settings["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
    for _, token in decoder:
        text = token["content"]
        if text in known:
            continue
        flags = {name: token[name] for name in fields if name in token}
        flags["special"] = flags.get("special", False) or text in named
        is_full = limit and max(package.get_vocab().values()) + 1 >= limit
        if package.token_to_id(text) is not None or not is_full:
            package.add_tokens([AddedToken(text, **flags)])
            known.add(text)
    for text in sorted(named - known):
        if package.token_to_id(text) is not None:
            package.add_tokens([AddedToken(text, special=True)])


@functools.cache
def byte_level_alphabet():
    """Return how byte-level BPE writes bytes: character -> byte.

    Printable bytes stand for themselves, the others for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    characters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return dict(zip(characters, printable + others, strict=True))


# -----------------------------------------------------------------------------
# Tokenizers in JSON, and prompts


def tokenizer_from_json(spec):
    """Make the tokenizer that to_json() described. None, for mere token files, makes None."""
    if spec is None:
        return None
    kinds = {"bytes": ByteTokenizer, "char": CharTokenizer, "imported": ImportedTokenizer}
    kinds["bpe"] = BPETokenizer.named
    options = dict(spec)
    kind = options.pop("kind", None)
    require(kind in kinds, f"there is no tokenizer of kind {kind!r} here: use a newer version")
    return kinds[kind](**options)


def same_vocabulary(one, other) -> bool:
    """Return whether two tokenizers give every id that both have the same text."""
    n = min(one.vocab_size, other.vocab_size)
    return one.to_json() == other.to_json() or one.token_bytes[:n] == other.token_bytes[:n]


def encode_prompt(tokenizer, bos, text: str) -> list[int]:
    """Encode the text that a model is to continue, after <bos> if there is one.

    An empty text without <bos> becomes a newline, or id 0 if the vocabulary has no newline: a
    model needs one token to continue.
    """
    if bos is not None:
        return [bos, *tokenizer.encode(text)]
    can_start = text or b"\n" in tokenizer.token_bytes
    return tokenizer.encode(text or "\n") if can_start else [0]
