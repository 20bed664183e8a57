"""The tokenizer files of a Hugging Face folder, and which tokens start and end a text."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from data.tokenizer import SEPARATOR, ImportedTokenizer, token_text
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
    "generation_config.json",
)
SPECIAL_TOKENS_MAP = FILES[2]
# with the ids of a model: the first that has one counts
MODEL_FILES = ("generation_config.json", "config.json")


@dataclass
class Ends:
    """Which tokens start and end a text, as ids.

    separator: starts a document: bos, or else eos. starts_text: whether bos is put before every
    text. eos: ends a document; None if that is the separator. ids: all that end a text.
    """

    separator: int | None = None
    starts_text: bool = False
    eos: int | None = None
    ids: list = field(default_factory=list)
    files: dict = field(default_factory=dict)  # id -> the file that says so; "start" -> likewise

    @property
    def bos(self):
        """The token that is put before every text, or None."""
        return self.separator if self.starts_text else None

    def describe(self, tokenizer=None):
        """Say in one line which tokens these are, and which file says so."""
        words = {}
        for i, file in self.files.items():
            text = tokenizer.package.id_to_token(i) if tokenizer and i != "start" else None
            words[i] = f"{i} ({file})" if text is None else f"{text} ({i}, {file})"
        start = f"{words[self.separator]}, by {self.files['start']}" if self.starts_text else "none"
        separator = words.get(self.separator, "none")
        ends = ", ".join(words[i] for i in self.ids) or "none"
        return f"before every text: {start}; between documents: {separator}; at an end: {ends}"


def find_ends(tokenizer, ids_of_files, size, starter="") -> Ends:
    """Find which tokens start and end a text: by names of the tokenizer, then by ids in files.

    tokenizer: an ImportedTokenizer, or None. ids_of_files: file -> values, such as bos_token_id.
    size: size of the vocabulary. starter: a file that says that bos starts every text.
    """
    named, written = {}, {}
    for name in ("bos", "eos"):
        named[name] = find_name(tokenizer, f"{name}_token") if tokenizer else ("", [])
        places = ((file, values.get(f"{name}_token_id")) for file, values in ids_of_files.items())
        sources = [(file, as_ids(value, size)) for file, value in places]
        written[name] = first_known(sources)
    # what the post-processor puts first is bos, whatever the names say
    first = first_special_id(tokenizer) if tokenizer else None
    template = ("tokenizer.json", [] if first is None else [first])
    # for a tokenizer without a model
    fallback = ("", [])
    if tokenizer and not ids_of_files:
        fallback = ("tokenizer.json", as_ids(tokenizer.package.token_to_id(SEPARATOR), size))
    bos_file, bos = first_known([template, named["bos"], written["bos"]])
    eos_file, eos = first_known([named["eos"], written["eos"]])
    separator_file, separator = first_known([(bos_file, bos), (eos_file, eos), fallback])
    found = Ends(separator[0] if separator else None)
    if eos and eos[0] != found.separator:
        found.eos = eos[0]
    # a model may write one that its tokenizer does not name, and the other way round
    found.ids = [*dict.fromkeys(written["eos"][1] + named["eos"][1])]
    found.files = dict.fromkeys(separator, separator_file)
    for file, ids in (named["eos"], written["eos"]):
        found.files = dict.fromkeys(ids, file) | found.files
    # transformers 5 ignores the flag next to a tokenizer.json, and others heed it
    if tokenizer and tokenizer.settings.get("add_bos_token"):
        starter = "tokenizer_config.json"
    starter = "tokenizer.json" if first is not None else starter
    if bos and starter:
        found.starts_text = True
        found.files["start"] = starter
    return found


def first_known(sources):
    """Return the first (file, ids) with an id."""
    return next((source for source in sources if source[1]), ("", []))


def find_name(tokenizer, name):
    """Return the file that names bos_token or eos_token, and the id in a list."""
    file = "tokenizer_config.json"
    settings = tokenizer.read_json(file)
    if "added_tokens_decoder" not in settings and name in tokenizer.read_json(SPECIAL_TOKENS_MAP):
        file = SPECIAL_TOKENS_MAP
    text = token_text(tokenizer.settings, name)
    return file, as_ids(tokenizer.package.token_to_id(text or ""), tokenizer.vocab_size)


def as_ids(value, size):
    """Return the ids of a file's entry, which is a number, a list or nothing."""
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if type(i) is int and 0 <= i < size]


def first_special_id(tokenizer):
    """Return the id that the post-processor puts before a text, or None."""
    ids = tokenizer.package.encode(tokenizer.known_text).ids
    return ids[0] if ids[:1] != tokenizer.encode(tokenizer.known_text)[:1] else None


# -----------------------------------------------------------------------------
# Files


def read_tokenizer(path, ids_of_files=None, vocab_size=None, starter=""):
    """Read a tokenizer.json, or a folder's with its other tokenizer files.

    ids_of_files: ids of the model that the tokenizer is for, by default of the same folder;
    vocab_size: its size; starter: see find_ends(). Returns (tokenizer, Ends). Raises UserError for
    damaged files, and for files of another model.
    """
    path = Path(path)
    file = path if path.suffix == ".json" else path / "tokenizer.json"
    require(file.is_file(), f"there is no file {file}: give the path of a tokenizer.json")
    is_whole = file.name == "tokenizer.json"
    names = FILES if is_whole else ()
    found = {name: file.parent / name for name in names if (file.parent / name).is_file()}
    found["tokenizer.json"] = file
    files = {name: part.read_bytes() for name, part in found.items()}
    if ids_of_files is None:
        ids_of_files = read_ids(file.parent) if is_whole else {}
    try:
        return make_tokenizer(files, ids_of_files, vocab_size, starter)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def read_ids(folder):
    """Return what the files of a model's folder hold: file -> {"bos_token_id": ...}.

    A class of transformers has ids of its own, which no file says and which are not the model's.
    """
    found = {}
    for name in MODEL_FILES:
        file = folder / name
        if file.is_file():
            try:
                values = json.loads(file.read_text(encoding="utf-8"))
                text_half = values.get("text_config") or {}
                found[name] = {**text_half, **values}
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(f"{file} is damaged ({error}): download it again") from None
    return found


def make_tokenizer(files, ids_of_files, vocab_size=None, starter=""):
    """Do as read_tokenizer(), for the contents of its files: name -> bytes."""
    tokenizer = ImportedTokenizer(files, vocab_size=vocab_size)
    known = tokenizer.package.get_vocab().values()
    require(known, "tokenizer.json has no tokens: train it first")
    size = tokenizer.vocab_size
    # models pad their vocabulary by a few per cent
    fits = max(known) < size and 0.75 * size <= len(known)
    tokenizer.token_bytes  # noqa: B018 (raises UserError if the decoder is not supported)
    ends = find_ends(tokenizer, ids_of_files, size, starter)
    ids = {ends.separator, ends.eos, *ends.ids} - {None}
    fits = fits and None not in map(tokenizer.package.id_to_token, ids)
    require(
        fits,
        f"tokenizer.json has {len(known)} tokens and the model {size}, or no token with the id of "
        "its special tokens, so it belongs to another model: put the right file in its place",
    )
    tokenizer.bos = ends.separator
    tokenizer.eos = ends.eos
    tokenizer.starts_text = ends.starts_text
    tokenizer.known_ends = ends.ids
    return tokenizer, ends
