"""The tokenizer of a GGUF file, as the files of a Hugging Face directory.

A GGUF has no tokenizer.json. It has the tokens, their types, the merges, the ids of some special
tokens and the name of a pre-tokenizer, which stands for how text is split before it is merged.
The patterns are those of the models' own tokenizer.json files; llama.cpp has the same.
"""

import json
from typing import NamedTuple

from data.tokenizer import load_tokenizer_json
from nanolong.errors import UserError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


class PreTokenizer(NamedTuple):
    """What a name in tokenizer.ggml.pre stands for."""

    # regular expression of the pieces of a text; None: GPT-2's, which the library has
    pattern: str | None = None
    # whether each digit is a piece
    splits_digits: bool = False
    # whether a text is composed first (Unicode's NFC)
    composes_text: bool = False
    # whether a piece that is a token stays whole
    ignores_merges: bool = False
    # whether bos starts every text where the file does not say
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(splits_digits=True),
    "llama-bpe": PreTokenizer(LLAMA3_PATTERN, ignores_merges=True, adds_bos=True),
    "qwen2": PreTokenizer(QWEN2_PATTERN, composes_text=True),
}

# Types of tokens: unknown and control tokens, which stand for no text; tokens that are never
# merged, but stand for text; and the padding of a vocabulary.
NORMAL = 1
CONTROL = 3
SPECIAL = (2, CONTROL)
USER_DEFINED = 4
UNUSED = 5

# the special tokens of a tokenizer_config.json -> their ids in a GGUF
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def text_obstacle(metadata):
    """Return why text cannot be encoded for a GGUF with this metadata; empty if it can."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return "the file has no tokenizer"
    if model != "gpt2":
        return f"the file's tokenizer is of the kind {model!r}, and only byte-level BPE is read"
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        return f"the file's pre-tokenizer is {name!r}, and those known here are {known}"
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return "building its tokenizer needs a package (pip install tokenizers, and import again)"
    return ""


def tokenizer_json_of(file, metadata):
    """Return the tokenizer of a GGUF without a text_obstacle(): file name -> its text.

    file: for the error messages. Raises UserError if the metadata are damaged.
    """
    try:
        vocabulary = read_vocabulary(metadata)
        settings = tokenizer_settings(metadata, vocabulary)
        tokenizer = build_tokenizer(metadata, vocabulary, settings)
    # the library raises Exception itself
    except Exception as error:
        raise UserError(
            f"{file} has a damaged tokenizer ({type(error).__name__}: {error}): download it again"
        ) from None
    text = json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": text}


class Vocabulary(NamedTuple):
    tokens: list  # by their ids
    ids: dict  # text -> id, without padding
    special: list  # ids
    user_defined: list  # ids


def read_vocabulary(metadata):
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("its tokens and their types differ in number")
    ids = {}
    special = []
    user_defined = []
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type == UNUSED:
            continue
        if token in ids:
            raise ValueError(f"tokens {ids[token]} and {i} are both {token!r}")
        ids[token] = i
        if token_type in SPECIAL:
            special.append(i)
        elif token_type == USER_DEFINED:
            user_defined.append(i)
    return Vocabulary(tokens, ids, special, user_defined)


def tokenizer_settings(metadata, vocabulary):
    """Return the content of tokenizer_config.json."""
    pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in SPECIAL_TOKENS.items():
        if key in metadata:
            settings[name] = token_of(vocabulary, metadata[key], key)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos)
    settings["add_bos_token"] = bool(adds_bos) and "bos_token" in settings
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def token_of(vocabulary, i, key):
    if type(i) is not int or not 0 <= i < len(vocabulary.tokens):
        raise ValueError(f"{key} is {i!r}, and there are {len(vocabulary.tokens)} tokens")
    return vocabulary.tokens[i]


def build_tokenizer(metadata, vocabulary, settings):
    """Return the tokenizers.Tokenizer that the metadata describe."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=read_merges(metadata),
            ignore_merges=pre_tokenizer.ignores_merges,
        )
    )
    if pre_tokenizer.composes_text:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = build_splitter(pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()

    special = {vocabulary.tokens[i] for i in vocabulary.special}
    special |= {settings[name] for name in SPECIAL_TOKENS if name in settings}
    added = special | {vocabulary.tokens[i] for i in vocabulary.user_defined}
    # in the order of their ids, as a file has them
    for token in sorted(added, key=vocabulary.ids.get):
        is_special = token in special
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])

    if settings["add_bos_token"]:
        bos = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", "$B:1"],
            special_tokens=[(bos, vocabulary.ids[bos])],
        )
    return tokenizer


def read_merges(metadata):
    """Return the merges as pairs of tokens. A space in a token is written as another character."""
    pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"{' '.join(pair)!r} is no merge of two tokens")
    return pairs


def build_splitter(pre_tokenizer):
    """Return the library's pre-tokenizer."""
    from tokenizers import Regex, pre_tokenizers

    if pre_tokenizer.pattern is not None:
        split = pre_tokenizers.Split(Regex(pre_tokenizer.pattern), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, to_bytes])
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not pre_tokenizer.splits_digits:
        return split
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])


# -----------------------------------------------------------------------------
# Writing


def tokenizer_metadata(files, settings, vocab_size, adds_bos, name=None):
    """Return the metadata of a tokenizer: the inverse of tokenizer_json_of().

    files: name -> bytes; settings: of tokenizer_config.json; vocab_size: the model's; name: of the
    pre-tokenizer, if the files cannot say it. Raises UserError for one without a name there.
    """
    tokenizer = load_tokenizer_json(files["tokenizer.json"].decode())
    spec = json.loads(tokenizer.to_str())
    name = name or pre_tokenizer_name(spec)
    if name is None:
        raise UserError(
            "the model's tokenizer is no byte-level BPE whose splitter has a name in llama.cpp: "
            "give --tokenizer=none, for a file that works on token ids only, or --tokenizer=DIR "
            "of another tokenizer"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, NORMAL
    for i, token in tokenizer.get_added_tokens_decoder().items():
        types[i] = CONTROL if token.special else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for name, key in SPECIAL_TOKENS.items():
        token = settings.get(name)
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and tokenizer.token_to_id(token) is not None:
            metadata[key] = tokenizer.token_to_id(token)
    template = settings.get("chat_template")
    if template is None and "chat_template.jinja" in files:
        template = files["chat_template.jinja"].decode()
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = template
    return metadata


def pre_tokenizer_name(spec):
    """Return the name of the pre-tokenizer of a tokenizer.json, or None if it has none."""
    from tokenizers import Tokenizer, models, normalizers

    model = spec["model"]
    if model["type"] != "BPE" or (spec["decoder"] or {}).get("type") != "ByteLevel":
        return None
    if not model["merges"]:  # llama.cpp wants some
        return None
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        known = Tokenizer(models.BPE())
        known.pre_tokenizer = build_splitter(pre_tokenizer)
        if pre_tokenizer.composes_text:
            known.normalizer = normalizers.NFC()
        known = json.loads(known.to_str())
        same = all(known[part] == spec[part] for part in ("pre_tokenizer", "normalizer"))
        if same and pre_tokenizer.ignores_merges == model["ignore_merges"]:
            return name
    return None
