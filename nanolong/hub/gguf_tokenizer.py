"""The tokenizer of a GGUF file, as the files of a Hugging Face folder.

A GGUF has no tokenizer.json. It has the tokens, their types, the merges, the ids of some special
tokens and the name of a pre-tokenizer, which stands for how text is split before it is merged.
The patterns come from the models' own tokenizer.json files; llama.cpp has the same.
"""

from pathlib import Path
from typing import NamedTuple

from data.tokenizer import rust_errors
from nanolong import tokenizer_files
from nanolong.errors import UserError
from nanolong.hub.tokenizer import put_first, to_files
from nanolong.hub.verify import as_user_error

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


class PreTokenizer(NamedTuple):
    """What a name in tokenizer.ggml.pre stands for."""

    pattern: str | None = None  # pattern of the pieces of a text (None: GPT-2's, from the library)
    splits_digits: bool = False  # whether each digit is a piece
    composes_text: bool = False  # whether a text is composed first (Unicode's NFC)
    ignores_merges: bool = False  # whether a piece that is a token stays whole
    adds_bos: bool = False  # whether bos starts every text if the file does not say


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(splits_digits=True),
    "llama-bpe": PreTokenizer(LLAMA3_PATTERN, ignores_merges=True, adds_bos=True),
    "qwen2": PreTokenizer(QWEN2_PATTERN, composes_text=True),
}
# Types of tokens: unknown and control tokens, which stand for no text; tokens that are never
# merged, but stand for text; and the padding of a vocabulary.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = (2, CONTROL)
# the special tokens of a tokenizer_config.json -> their ids in a GGUF
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# the tokens that end a text: of a document, of a turn, of a message
END_TOKENS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def read_tokenizer(file, metadata, vocab_size):
    """Return (tokenizer or None, its Ends, a note for the user).

    Raises UserError if the metadata are damaged.
    """
    ids, starter = read_ids(file, metadata, vocab_size)
    model, name = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2" or str(name) not in PRE_TOKENIZERS:
        note = f"the tokenizer of the file is {model!r} with the pre-tokenizer {name!r}, and only "
        note += f"'gpt2' with {', '.join(PRE_TOKENIZERS)} is read: the model works on token ids "
        note += "only (for text, give --tokenizer=DIR of its tokenizer.json)"
        return None, tokenizer_files.find_ends(None, ids, vocab_size, starter), note
    with rust_errors(f"{file} has a damaged tokenizer", "download it again"):
        settings = tokenizer_settings(metadata)
        files = to_files(build_tokenizer(metadata, settings).to_str(), settings)
    with as_user_error(file):
        tokenizer, ends = tokenizer_files.make_tokenizer(files, ids, vocab_size, starter)
    ends.files = dict.fromkeys(ends.files, Path(file).name)
    return tokenizer, ends, ""


def read_ids(file, metadata, n_tokens):
    """Return the ids of special tokens and, if bos starts every text, the file's name.

    Both are arguments of tokenizer_files.find_ends(). Raises UserError.
    """
    ids = {f"{x}_token_id": metadata.get(f"tokenizer.ggml.{x}_token_id") for x in ("bos", "eos")}
    ids["eos_token_id"] = [metadata.get(key) for key in END_TOKENS]
    name = Path(file).name
    if not adds_bos(metadata):
        return {name: ids}, ""
    bos = ids["bos_token_id"]
    if bos is not None and (not isinstance(bos, int) or not 0 <= bos < n_tokens):
        raise UserError(f"{file}: bos_token_id is {bos} of {n_tokens} tokens: download it again")
    return {name: ids}, name


def adds_bos(metadata):
    """Return whether llama.cpp puts bos before every text, if there is one."""
    # its default for sentencepiece's vocabularies is to add it
    default = metadata.get("tokenizer.ggml.model") == "llama"
    pre_tokenizer = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    default = default or (pre_tokenizer is not None and pre_tokenizer.adds_bos)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def check_same_tokens(file, metadata, folder, package):
    """Raise UserError if a normal token of a GGUF file is another one in the folder."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    for i, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        other = package.id_to_token(i)
        if kind == NORMAL and token != other:
            raise UserError(
                f"{folder} has the tokenizer of another model: token {i} is {other!r} there, and "
                f"{token!r} in {file}: give the folder of this model"
            )


def tokenizer_settings(metadata):
    """Return the content of tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    settings = {}
    for name, key in SPECIAL_TOKENS.items():
        if key in metadata:
            settings[name] = tokens[metadata[key]]
    settings["add_bos_token"] = adds_bos(metadata) and "bos_token" in settings
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def build_tokenizer(metadata, settings):
    """Return the tokenizers.Tokenizer that the metadata describe."""
    from tokenizers import AddedToken, decoders

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    found = enumerate(zip(tokens, types, strict=True))
    used = [(token, i, kind) for i, (token, kind) in found if kind != UNUSED]
    ids = {token: i for token, i, _ in used}
    # a space in a token is written as another character
    pairs = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, right in pairs]
    tokenizer = empty_bpe(PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]], ids, merges)
    tokenizer.decoder = decoders.ByteLevel()

    named = {settings[name] for name in SPECIAL_TOKENS if name in settings}
    # in the order of their ids, as a file has them
    for token, _, kind in used:
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
