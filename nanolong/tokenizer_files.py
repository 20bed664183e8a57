"""The tokenizer files of a Hugging Face folder."""

from data.tokenizer import SEPARATOR, ImportedTokenizer
from nanolong.errors import UserError, require

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


def read_tokenizer(path, model_config=None, vocab_size=None):
    """Read a tokenizer.json, or a folder's with its other tokenizer files.

    model_config: what has bos_token_id and eos_token_id, if there is a model; vocab_size: its size.
    Returns (tokenizer, the id that starts every text or None). Raises UserError for damaged files,
    and for files of another model.
    """
    file = path if path.suffix == ".json" else path / "tokenizer.json"
    require(file.is_file(), f"there is no file {file}: give the path of a tokenizer.json")
    names = FILES if file.name == "tokenizer.json" else ()
    found = {name: file.parent / name for name in names if (file.parent / name).is_file()}
    found["tokenizer.json"] = file
    files = {name: part.read_bytes() for name, part in found.items()}
    try:
        return make_tokenizer(files, model_config, vocab_size)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def make_tokenizer(files, model_config=None, vocab_size=None):
    """Do as read_tokenizer(), for the contents of its files: name -> bytes."""
    tokenizer = ImportedTokenizer(files, vocab_size=vocab_size)
    known = tokenizer.package.get_vocab().values()
    require(known, "tokenizer.json has no tokens: train it first")
    size = tokenizer.vocab_size
    # models pad their vocabulary by a few per cent
    fits = max(known) < size and 0.75 * size <= len(known)
    ids = {}
    for name in ("bos", "eos"):
        i = (model_config or {}).get(f"{name}_token_id")
        i = i[0] if isinstance(i, list) and i else i
        is_id = type(i) is int and 0 <= i < size
        fits = fits and not (is_id and tokenizer.package.id_to_token(i) is None)
        text = token_text(tokenizer.settings, f"{name}_token") or ""
        ids[name] = i if is_id else tokenizer.package.token_to_id(text)
    require(
        fits,
        f"tokenizer.json has {len(known)} tokens and the model {size}, or no token with the id of "
        "its special tokens, so it belongs to another model: put the right file in its place",
    )
    tokenizer.token_bytes  # noqa: B018 (raises UserError if the decoder is not supported)
    first = first_special_id(tokenizer)
    bos = ids["bos"] if first is None else first
    tokenizer.bos = ids["eos"] if bos is None else bos
    if tokenizer.bos is None and model_config is None:
        tokenizer.bos = tokenizer.package.token_to_id(SEPARATOR)
    tokenizer.eos = None if ids["eos"] == tokenizer.bos else ids["eos"]
    starts_text = first is not None or bool(tokenizer.settings.get("add_bos_token"))
    return tokenizer, bos if starts_text else None


def token_text(settings, name):
    """Return the text of bos_token or another token of tokenizer_config.json, or None."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def first_special_id(tokenizer):
    """Return the id that the post-processor puts before a text, or None."""
    ids = tokenizer.package.encode(tokenizer.known_text).ids
    return ids[0] if ids[:1] != tokenizer.encode(tokenizer.known_text)[:1] else None
