"""Hugging Face's tokenizer.json, read and written.

Byte-level BPE (GPT-2, Llama 3, SmolLM, Qwen) becomes a tiktoken encoding. Both merge the
neighbouring pair of the lowest rank. tiktoken ranks a pair by the token that it makes,
tokenizer.json by its place in `merges`. That is the same where tokens are numbered in the order of
their merges, as they are in all of these. To be sure, an imported vocabulary must encode a sample
text by tiktoken as it does by the merges in the file.

A vocabulary of another kind, such as sentencepiece's, keeps its tokenizer.json, which the optional
tokenizers package reads.
"""

import json
import unicodedata
from itertools import pairwise

from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, PackagedTokenizer
from nanolong.errors import UserError

# What belongs to a tokenizer in a Hugging Face directory.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)

# How the pre-tokenizer ByteLevel splits text, and how Digits and ByteLevel do together.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
)

# Words, code, many scripts, composed and decomposed characters, and every kind of white space.
SAMPLE = (
    "The quick brown fox can't jump 3.14159 times over 1,024 lazy dogs' backs; it'll try, "
    "won't it?\n\n\tdef f(x, *, y=None):\n        return {'a': [x ** 2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café, Ærøskøbing; Ελληνικά, Русский текст, עברית, العربية, हिन्दी, "
    "中文字符, 日本語のテキスト, 한국어. ½ ² Ⅻ ١٢٣ 🙂👩‍👩‍👧 e\u0301   \u00a0\u3000aaaaaaa     "
    "\n   \n<b>&amp;</b> http://x.org/?q=%20#1"
)

# Byte-level BPE writes a token with one character for each byte: printable bytes stand for
# themselves, the others are moved up from U+0100.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_TO_CHARACTER = {byte: chr(byte) for byte in PRINTABLE}
BYTE_TO_CHARACTER |= {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


class UnsupportedTokenizer(ValueError):
    """Say why a tokenizer.json cannot be read without the tokenizers package."""


def sample_text(tokenizer) -> str:
    """Return a text that a tokenizer can encode, for comparisons."""
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.characters
    return SAMPLE


# -----------------------------------------------------------------------------
# Reading


def read(folder, vocab_size: int, read_json):
    """Read the tokenizer of a Hugging Face directory, for a model with so many ids.

    read_json: a function from a path to the parsed file.

    Returns the tokenizer or None, the id that starts every text or None, and a note for the user
    that may be empty. Raises UserError where the file is damaged or belongs to another model.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        note = f"note: there is no tokenizer.json in {folder}: the model works on token ids only"
        if (folder / "tokenizer.model").is_file():
            note += " (for text, let transformers write one from tokenizer.model)"
        return None, None, note

    spec = read_json(file)
    settings = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = read_json(folder / "tokenizer_config.json")
    model_config = read_json(folder / "config.json")
    try:
        added = added_tokens(spec)
        bos, eos, starts_text = special_ids(spec, settings, model_config, added, vocab_size)
        check_largest_id(file, spec, added, vocab_size)
        tokenizer, note = make_tokenizer(file, spec, added, bos, eos, vocab_size)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}): download it again"
        ) from None
    if not starts_text:
        bos = None
    return tokenizer, bos, note


def added_tokens(spec):
    """Return the tokens that were added to the vocabulary, mostly special ones: text -> id."""
    added = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    for content, i in added.items():
        if not isinstance(content, str) or type(i) is not int:
            raise TypeError("added_tokens need text and ids")
    return added


def special_ids(spec, settings, model_config, added, vocab_size):
    """Return bos, eos (None where it is bos), and whether bos is put before every text."""
    bos_id = model_config.get("bos_token_id")
    eos_id = model_config.get("eos_token_id")
    bos = special_id(bos_id, settings.get("bos_token"), added, vocab_size)
    eos = special_id(eos_id, settings.get("eos_token"), added, vocab_size)
    first = first_special_id(spec.get("post_processor"), added)
    adds_bos = bool(settings.get("add_bos_token")) and bos is not None
    if first is not None:
        bos = first
    elif bos is None:
        bos = eos
    if eos == bos:
        eos = None
    return bos, eos, first is not None or adds_bos


def special_id(number, token, added, vocab_size):
    """Return the id of a special token, or None.

    number: config.json's id, or a list of them, of which the first counts. token: the token in
    tokenizer_config.json, which counts where there is no number.
    """
    if isinstance(number, list) and number:
        number = number[0]
    if type(number) is int and 0 <= number < vocab_size:
        return number
    if isinstance(token, dict):
        token = token.get("content")
    return added.get(token) if isinstance(token, str) else None


def first_special_id(processor, added):
    """Return the id that a post-processor puts before a text, or None."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        for part in processor["processors"]:
            found = first_special_id(part, added)
            if found is not None:
                return found
        return None
    if processor.get("type") == "TemplateProcessing":
        template = processor.get("single")
        if template and "SpecialToken" in template[0]:
            return added.get(template[0]["SpecialToken"]["id"])
    return None


def check_largest_id(file, spec, added, vocab_size):
    """Raise UserError where a token's id is outside the model's vocabulary."""
    vocab = spec["model"]["vocab"]
    # Unigram models list their tokens
    ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
    largest = max([*added.values(), *ids])
    if largest >= vocab_size:
        raise UserError(
            f"{file} numbers tokens up to {largest}, and the model has {vocab_size}, so it belongs "
            "to another model: put the right file in its place"
        )


def make_tokenizer(file, spec, added, bos, eos, vocab_size):
    """Return the tokenizer of a parsed tokenizer.json, and a note for the user.

    Without the tokenizers package there is none for some files.
    """
    try:
        return from_spec(spec, added, bos, eos, vocab_size), ""
    except UnsupportedTokenizer as reason:
        note = (
            f"note: {reason}: text needs the tokenizers package (pip install tokenizers); token "
            "ids work without it"
        )
    try:
        return PackagedTokenizer(file.read_text(encoding="utf-8"), bos, eos, vocab_size), note
    except UserError:
        return None, note + ", and it is not installed: install it and import again"


def from_spec(spec, added, bos, eos, vocab_size):
    """Make a BPETokenizer, ByteTokenizer or CharTokenizer from a parsed tokenizer.json.

    added: text -> id of the added tokens. Raises UnsupportedTokenizer where none of them encodes
    as the file says.
    """
    model = spec["model"]
    splitter = spec.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    if model.get("type") == "WordLevel":
        tokenizer = read_characters(model, steps, added, vocab_size)
        if tokenizer is not None:
            return tokenizer

    check_byte_level(model, steps)
    nfc = composes_text(spec.get("normalizer"))
    merges = merge_pairs(model)
    ids = ordinary_tokens(model, added)
    if not merges and step_types(steps) == ["ByteLevel"] and not splits_by_regex(steps[-1]):
        return read_bytes(ids, added, vocab_size)
    pattern = split_pattern(steps)
    ranks = merge_ranks(ids, merges, added)
    import tiktoken

    try:
        encoding = tiktoken.Encoding(
            "imported", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
        )
        tokenizer = BPETokenizer(encoding, bos, eos, vocab_size, nfc)
        by_tiktoken = tokenizer.encode(SAMPLE)
        whole = model.get("ignore_merges")
        by_merges = encode_by_merges(SAMPLE, pattern, ids, merges, nfc, whole)
    # tiktoken and regex raise many kinds of errors on patterns that they cannot read
    except Exception as error:
        raise UnsupportedTokenizer(f"tiktoken cannot read this vocabulary ({error})") from None
    if by_tiktoken != by_merges:
        raise UnsupportedTokenizer(
            "tiktoken encodes a sample of text otherwise than this vocabulary's own merges"
        )
    return tokenizer


def merge_pairs(model):
    """Return the merges of a BPE model: pairs of tokens. Older files write "left right"."""
    pairs = []
    for merge in model["merges"]:
        pair = merge if isinstance(merge, list) else merge.split(" ", 1)
        pairs.append(tuple(pair))
    return pairs


def ordinary_tokens(model, added):
    """Return the tokens that were not added: text -> id."""
    return {token: i for token, i in model["vocab"].items() if token not in added}


def step_types(steps):
    return [step.get("type") for step in steps]


def splits_by_regex(byte_level):
    return byte_level.get("use_regex", True)


def read_characters(model, steps, added, vocab_size):
    """Return the CharTokenizer that write() made this WordLevel vocabulary of, or None."""
    if step_types(steps) != ["Split"]:
        return None
    ids = ordinary_tokens(model, added)
    if any(len(token) != 1 for token in ids):
        return None
    if sorted(ids.values()) != list(range(len(ids))):
        return None
    if len(added) > 1 or vocab_size != len(ids) + len(added):
        return None
    return CharTokenizer("".join(sorted(ids, key=ids.get)), bool(added))


def read_bytes(ids, added, vocab_size):
    """Return the ByteTokenizer that write() made this vocabulary without merges of."""
    byte_ids = {BYTE_TO_CHARACTER[byte]: byte for byte in range(256)}
    if ids != byte_ids or list(added.values()) != [256] or vocab_size != 257:
        raise UnsupportedTokenizer("this byte-level vocabulary has no merges")
    return ByteTokenizer()


def check_byte_level(model, steps):
    """Raise UnsupportedTokenizer unless this is byte-level BPE that only merges."""
    last = steps[-1]
    if model.get("type") != "BPE" or model.get("byte_fallback") or last.get("type") != "ByteLevel":
        raise UnsupportedTokenizer("this vocabulary is not byte-level BPE")
    marks = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(mark) for mark in marks) or last.get("add_prefix_space"):
        raise UnsupportedTokenizer(
            "this byte-level BPE marks words or puts a space before the text"
        )


def composes_text(normalizer):
    """Return whether there is a normalizer, NFC. Raises UnsupportedTokenizer for another one."""
    if normalizer and normalizer.get("type") == "Sequence" and len(normalizer["normalizers"]) == 1:
        normalizer = normalizer["normalizers"][0]
    if normalizer and normalizer.get("type") != "NFC":
        raise UnsupportedTokenizer(
            f"this byte-level BPE changes the text first ({normalizer.get('type')})"
        )
    return bool(normalizer)


def split_pattern(steps):
    """Return the regular expression for the pieces of text that a pre-tokenizer makes."""
    types = step_types(steps)
    by_regex = splits_by_regex(steps[-1])
    first = steps[0]
    if types == ["ByteLevel"] and by_regex:
        return GPT2_PATTERN
    if types == ["Digits", "ByteLevel"] and first.get("individual_digits") and by_regex:
        return GPT2_DIGITS_PATTERN
    isolates = first.get("behavior") == "Isolated" and not first.get("invert")
    if types == ["Split", "ByteLevel"] and isolates and not by_regex:
        if "Regex" in first["pattern"]:
            return first["pattern"]["Regex"]
    names = ", ".join(map(str, types))
    raise UnsupportedTokenizer(
        f"this byte-level BPE splits text by {names}, for which tiktoken has no pattern"
    )


def merge_ranks(ids, merges, added):
    """Return tiktoken's ranks, bytes -> id.

    ids: token -> id. merges: pairs of tokens in order. Raises UnsupportedTokenizer where the ids
    are not in the order of the merges.
    """
    try:
        ranks = {bytes(CHARACTER_TO_BYTE[c] for c in token): i for token, i in ids.items()}
        merged_ids = [ids[left + right] for left, right in merges]
    except KeyError as error:
        raise UnsupportedTokenizer(
            f"this byte-level BPE has a token or merge outside its alphabet ({error.args[0]!r})"
        ) from None
    unique = set(ids.values())
    if len(unique) < len(ids) or unique & set(added.values()):
        raise UnsupportedTokenizer("two tokens of this vocabulary share an id")
    in_order = all(a <= b for a, b in pairwise(merged_ids))
    if not in_order or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UnsupportedTokenizer(
            "this byte-level BPE does not number its tokens in the order of their merges"
        )
    return ranks


def encode_by_merges(text, pattern, ids, merges, nfc=False, whole=False):
    """Encode text as a tokenizer.json says: merge the pair of the earliest merge, leftmost first.

    It is slow, and only there to check tiktoken. whole: a piece that is a token stays one.
    """
    # installed with tiktoken
    import regex

    rank = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge, i)
    if nfc:
        text = unicodedata.normalize("NFC", text)
    encoded = []
    for piece in regex.findall(pattern, text):
        tokens = [BYTE_TO_CHARACTER[byte] for byte in piece.encode()]
        if whole and "".join(tokens) in ids:
            tokens = ["".join(tokens)]
        while True:
            pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in rank]
            if not pairs:
                break
            _, i = min(pairs)
            tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
        encoded += [ids[token] for token in tokens]
    return encoded


# -----------------------------------------------------------------------------
# Writing


def write(folder, tokenizer, adds_bos: bool, length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; nothing where the tokenizer is None.

    adds_bos: whether bos is put before every text. length: the model's context length.
    """
    if tokenizer is None:
        return
    if isinstance(tokenizer, PackagedTokenizer):
        text = tokenizer.text
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        names = {i: token.content for i, token in added.items()}
    else:
        special = special_tokens(tokenizer)
        spec = tokenizer_spec(tokenizer, special, adds_bos)
        text = json.dumps(spec, ensure_ascii=False, allow_nan=False) + "\n"
        names = {i: name for name, i in special.items()}
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")

    eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "bos_token": names.get(tokenizer.bos),
        "eos_token": names.get(eos),
        "add_bos_token": adds_bos,
    }
    text = json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def special_tokens(tokenizer):
    """Return the special tokens of a tokenizer: text -> id."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encoding._special_tokens
    if tokenizer.bos is None:
        return {}
    return {"<bos>": tokenizer.bos}


def tokenizer_spec(tokenizer, special, adds_bos):
    """Return the content of tokenizer.json. special: text -> id."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, i in sorted(special.items(), key=lambda item: item[1])
    ]
    if isinstance(tokenizer, CharTokenizer):
        parts = character_spec(tokenizer, special)
    elif isinstance(tokenizer, ByteTokenizer):
        parts = byte_spec(special)
    else:
        parts = bpe_spec(tokenizer, special)
    post_processor = None
    if adds_bos:
        names = {i: name for name, i in special.items()}
        post_processor = bos_template(names[tokenizer.bos], tokenizer.bos)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": post_processor,
    }


def bos_template(name, bos):
    """Return the post-processor that puts bos before a text, or before a pair of texts."""
    special = {"SpecialToken": {"id": name, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
    }


# The normalizer, pre_tokenizer, decoder and model of a tokenizer.json. The special tokens are in
# the model's vocabulary too: an added token that is not would get the next free id, not its own.

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
BPE_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": True,
}


def isolated_split(pattern):
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def character_spec(tokenizer, special):
    vocab = {character: i for i, character in enumerate(tokenizer.characters)}
    return {
        "normalizer": None,
        "pre_tokenizer": isolated_split(r"(?m:.)"),
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab | special, "unk_token": "<unk>"},
    }


def byte_spec(special):
    vocab = {BYTE_TO_CHARACTER[byte]: byte for byte in range(256)}
    return {
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {**BPE_MODEL, "vocab": vocab | special, "merges": []},
    }


def bpe_spec(tokenizer, special):
    ranks = tokenizer.encoding._mergeable_ranks
    text = {token: "".join(BYTE_TO_CHARACTER[byte] for byte in token) for token in ranks}
    ids = [(text[token], rank) for token, rank in ranks.items()]
    vocab = dict(sorted([*ids, *special.items()], key=lambda item: item[1]))

    # every pair of tokens that makes a token, in the order of ranks
    merges = []
    for token, rank in ranks.items():
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()

    split = isolated_split(tokenizer.encoding._pat_str)
    return {
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "decoder": BYTE_LEVEL,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "model": {
            **BPE_MODEL,
            "vocab": vocab,
            "merges": [[text[left], text[right]] for *_, left, right in merges],
        },
    }
