"""The tokenizer files that an export writes to a folder, or turns into the metadata of a GGUF."""

import json

from data.tokenizer import (
    ByteTokenizer,
    ImportedTokenizer,
    byte_level_alphabet,
    tokenizer_from_json,
)
from nanolong import tokenizer_files


def make_exported(tokenizer, adds_bos: bool, length: int):
    """Return a tokenizer with the files that are written, or None for characters and tiktoken's.

    adds_bos: whether bos is put before every text. length: the model's context length.
    """
    if isinstance(tokenizer, ByteTokenizer):
        files = {"tokenizer.json": build_byte_level(tokenizer).to_str().encode()}
        tokenizer = ImportedTokenizer(files, tokenizer.bos)
    if not isinstance(tokenizer, ImportedTokenizer):
        return None
    if "tokenizer_config.json" in tokenizer.files:
        return with_length(tokenizer, length)
    text = tokenizer.text
    # transformers lets tokenizer.json decide about bos
    if adds_bos and tokenizer_files.first_special_id(tokenizer) is None:
        # not the tokenizer's own package, which has to stay as it is
        package = ImportedTokenizer({"tokenizer.json": text.encode()}).package
        put_first(package, tokenizer.bos)
        text = package.to_str()
    eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    settings = {"model_max_length": length, "add_bos_token": adds_bos}
    for name, i in (("bos_token", tokenizer.bos), ("eos_token", eos)):
        settings[name] = None if i is None else tokenizer.package.id_to_token(i)
    about = {**tokenizer.to_json(), "files": tokenizer.files | to_files(text, settings)}
    return tokenizer_from_json(about)


def with_length(tokenizer, length):
    """Return a tokenizer whose tokenizer_config.json states at least this length in tokens.

    A length of 0 or less, or a huge one, means that there is none.
    """
    name = "tokenizer_config.json"
    settings = tokenizer.read_json(name)
    if not 1 <= (settings.get("model_max_length") or 0) < length:
        return tokenizer
    text = json.dumps(settings | {"model_max_length": length}, indent=2, ensure_ascii=False)
    files = tokenizer.files | {name: f"{text}\n".encode()}
    return tokenizer_from_json({**tokenizer.to_json(), "files": files})


def to_files(text, settings):
    """Return the files of the text of a tokenizer.json, and of the settings next to it."""
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"clean_up_tokenization_spaces": False}
    config = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": config.encode()}


def build_byte_level(tokenizer):
    """Return the tokenizers.Tokenizer of a ByteTokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # an added token that is not in the vocabulary too would get the next free id
    special = tokenizer.special_tokens
    built = Tokenizer(models.BPE(byte_level_alphabet() | special, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return built


def put_first(package, i):
    """Let a tokenizers.Tokenizer put the special token with id i before every text."""
    from tokenizers.processors import TemplateProcessing

    name = package.id_to_token(i)
    package.post_processor = TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=[(name, i)]
    )
