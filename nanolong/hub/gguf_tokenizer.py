"""The tokenizer of a GGUF file, as the files of a Hugging Face directory.

A GGUF has no tokenizer.json. It has the tokens, their types, the merges, the ids of some special
tokens and the name of a pre-tokenizer, which stands for how text is split before it is merged.
The patterns are those of the models' own tokenizer.json files; llama.cpp has the same.
"""

import json
from typing import NamedTuple

from data.tokenizer import reason_of
from nanolong import chat
from nanolong.errors import UserError
from nanolong.hub.tokenizer import put_first, token_text

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


def tokenizer_files_of(file, metadata):
    """Return the tokenizer of a GGUF without a text_obstacle(), as a Hugging Face directory has it.

    Returns its files, name -> bytes, and the content of tokenizer_config.json. file: for the error
    messages. Raises UserError if the metadata are damaged.
    """
    try:
        settings = tokenizer_settings(metadata)
        tokenizer = build_tokenizer(metadata, settings)
    # the library raises Exception itself
    except BaseException as error:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError(f"{file} has a damaged tokenizer ({reason}): download it again") from None
    text = json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n"
    contents = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": text}
    return {name: content.encode() for name, content in contents.items()}, settings


def tokenizer_settings(metadata):
    """Return the content of tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in SPECIAL_TOKENS.items():
        if key not in metadata:
            continue
        i = metadata[key]
        if i not in range(len(tokens)):
            raise ValueError(f"{key} is {i!r}, and there are {len(tokens)} tokens")
        settings[name] = tokens[i]
    default = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]].adds_bos
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", default)
    settings["add_bos_token"] = bool(adds_bos) and "bos_token" in settings
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def build_tokenizer(metadata, settings):
    """Return the tokenizers.Tokenizer that the metadata describe."""
    from tokenizers import AddedToken, decoders

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    kinds = {}
    ids = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED:
            continue
        if token in ids:
            raise ValueError(f"tokens {ids[token]} and {i} are both {token!r}")
        ids[token] = i
        kinds[token] = kind
    # a space in a token is written as another character
    pairs = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, right in pairs]
    pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    tokenizer = empty_bpe(pre_tokenizer, ids, merges)
    tokenizer.decoder = decoders.ByteLevel()

    named = {settings[name] for name in SPECIAL_TOKENS if name in settings}
    # in the order of their ids, as a file has them
    for token, kind in kinds.items():
        is_special = kind in SPECIAL or token in named
        if is_special or kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    if settings["add_bos_token"]:
        put_first(tokenizer, ids[settings["bos_token"]])
    return tokenizer


def empty_bpe(pre_tokenizer, ids=None, merges=None):
    """Return a tokenizers.Tokenizer that splits text as a PreTokenizer says, and merges it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    model = models.BPE(ids, merges, ignore_merges=pre_tokenizer.ignores_merges)
    tokenizer = Tokenizer(model)
    if pre_tokenizer.composes_text:
        tokenizer.normalizer = normalizers.NFC()
    is_named = pre_tokenizer.pattern is None
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_named)]
    if not is_named:
        steps.insert(0, pre_tokenizers.Split(Regex(pre_tokenizer.pattern), "isolated"))
    if pre_tokenizer.splits_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    return tokenizer


# -----------------------------------------------------------------------------
# Writing


def tokenizer_metadata(tokenizer, vocab_size, adds_bos, name=None):
    """Return the metadata of an ImportedTokenizer, for a model of so many ids. Raises UserError.

    name: of the pre-tokenizer, if the files cannot say it.
    """
    package_tokenizer = tokenizer.package_tokenizer
    spec = json.loads(package_tokenizer.to_str())
    name = name or pre_tokenizer_name(spec)
    merges = spec["model"].get("merges")
    if name is None or not merges:  # llama.cpp wants some
        raise UserError(
            "llama.cpp has no tokenizer like this model's: give --tokenizer=none or =DIR of another"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in package_tokenizer.get_vocab().items():
        tokens[i], types[i] = token, NORMAL
    for i, token in package_tokenizer.get_added_tokens_decoder().items():
        types[i] = CONTROL if token.special else USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_space_prefix": False,
    }
    settings = chat.read_settings(tokenizer)
    for name, key in SPECIAL_TOKENS.items():
        i = package_tokenizer.token_to_id(token_text(settings, name) or "")
        if i is not None:
            metadata[key] = i
    # without a template it is empty, which is not written
    return metadata | {"tokenizer.chat_template": chat.find_template(tokenizer) or ""}


def pre_tokenizer_name(spec):
    """Return the name of the pre-tokenizer of a tokenizer.json, or None if it has none."""
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        known = json.loads(empty_bpe(pre_tokenizer).to_str())
        same = all(known[part] == spec[part] for part in ("pre_tokenizer", "normalizer"))
        # which only BPE has
        if same and pre_tokenizer.ignores_merges == spec["model"].get("ignore_merges"):
            return name
    return None
