"""The tokenizer of a Hugging Face directory: imported as it is, and written for our own ones.

The optional tokenizers package reads and makes each tokenizer.json; bos and eos are in config.json
and tokenizer_config.json.
"""

import importlib.util
import json
import re

from data.tokenizer import (
    BPE_SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    byte_level_alphabet,
    bytes_of_tokens,
    import_tokenizers,
    load_tokenizer_json,
    same_vocabulary,
)
from nanolong.errors import UserError
from nanolong.hub.layout import read_json
from nanolong.tokenizer_files import FILES

MAX_FILE_BYTES = 1 << 26  # the largest tokenizer.json known has 35 MB

# Words, code, many scripts, composed and decomposed characters, joined emoji, control characters,
# and every kind of white space.
SAMPLE = (
    "The quick brown fox can't jump 3.14159 times over 1,024 lazy dogs' backs; it'll try, "
    "won't it?\n\n\tdef f(x, *, y=None):\n        return {'a': [x ** 2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café, Ærøskøbing; Ελληνικά, Русский текст, עברית, العربية, हिन्दी, "
    "中文字符, 日本語のテキスト, 한국어. ½ ² Ⅻ ١٢٣ 🙂👩‍👩‍👧 e\u0301   \u00a0\u3000aaaaaaa     "
    "\n   \n<b>&amp;</b> http://x.org/?q=%20#1 \x00\x01\x7f\u2581 WON'T 12345678 \ufeff"
)


def sample_text(tokenizer) -> str:
    """Return a text that a tokenizer can encode, for comparisons."""
    try:
        tokenizer.encode(SAMPLE)
    except UserError:
        return tokenizer.decode(range(tokenizer.vocab_size)).decode("utf-8", "ignore")
    return SAMPLE


# -----------------------------------------------------------------------------
# Reading


def read_tokenizer(folder, vocab_size: int):
    """Read the tokenizer of a Hugging Face directory, for a model with so many ids.

    Returns the tokenizer or None, the id that starts every text or None, and a note for the user
    that may be empty. Raises UserError if a file is damaged or belongs to another model.
    """
    if not (folder / "tokenizer.json").is_file():
        note = f"note: there is no tokenizer.json in {folder}: the model works on token ids only"
        if (folder / "tokenizer.model").is_file():
            note += " (for text, let transformers write one from tokenizer.model)"
        return None, None, note
    if importlib.util.find_spec("tokenizers") is None:
        note = "note: the model works on token ids only, because the tokenizers package is not "
        note += "installed: for text, pip install -r requirements-hf.txt and import again"
        return None, None, note

    file = folder / "config.json"
    model_config = read_json(file) if file.is_file() else {}
    files, settings = read_files(folder)
    try:
        tokenizer, bos = make_tokenizer(files, settings, model_config, vocab_size)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    return tokenizer, bos, ""


def read_named_tokenizer(folder, vocab_size: int):
    """Do as read_tokenizer(), for a directory that the user names as that of the tokenizer.

    Raises UserError if it has none, or none can be read.
    """
    import_tokenizers()
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"there is no {folder / 'tokenizer.json'}: give --tokenizer the directory of the "
            "tokenizer of this model"
        )
    return read_tokenizer(folder, vocab_size)


def read_tokenizer_json(path):
    """Read a tokenizer.json, or that of a folder, for models that are to be trained.

    With a file of this name the other tokenizer files of its folder are kept. If these do not say
    which token starts a document, it is <|endoftext|>. Raises UserError.
    """
    file = path if path.suffix == ".json" else path / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"there is no file {file}: give the path of a tokenizer.json")
    files, settings = read_files(file.parent) if file.name == "tokenizer.json" else ({}, {})
    files["tokenizer.json"] = read_file(file)
    try:
        tokenizer, _ = make_tokenizer(files, settings, {}, None)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if tokenizer.bos is None:
        tokenizer.bos = tokenizer.package_tokenizer.token_to_id(BPE_SEPARATOR)
    if tokenizer.bos is None:
        print(
            f"note: no token separates documents, because {file} has no {BPE_SEPARATOR} and no "
            "tokenizer_config.json next to it names another bos_token"
        )
    return tokenizer


def read_files(folder):
    """Read the tokenizer files of a folder: name -> bytes, and its tokenizer_config.json or {}."""
    files = {name: read_file(folder / name) for name in FILES if (folder / name).is_file()}
    if "tokenizer_config.json" not in files:
        return files, {}
    return files, read_json(folder / "tokenizer_config.json")


def read_file(file):
    if file.stat().st_size > MAX_FILE_BYTES:
        raise UserError(
            f"{file} is larger than {MAX_FILE_BYTES >> 20} MB, which no tokenizer is: download it "
            "again"
        )
    return file.read_bytes()


def make_tokenizer(files, settings, model_config, vocab_size):
    """Make the ImportedTokenizer of these files: return it, and the id that starts every text.

    files: name -> bytes. settings: tokenizer_config.json, or {}. model_config: bos_token_id and
    eos_token_id, where it has them. vocab_size: the model's; None: that of the files. Raises
    UserError if the files are damaged or belong to another model.
    """
    try:
        tokenizer = ImportedTokenizer(files, None, None, vocab_size)
    except UnicodeDecodeError as error:
        raise UserError(f"tokenizer.json is damaged ({error}): download it again") from None
    package_tokenizer = tokenizer.package_tokenizer
    n_ids = 1 + max(package_tokenizer.get_vocab().values(), default=-1)
    if vocab_size is None:
        tokenizer.vocab_size = n_ids
    check_vocabulary(package_tokenizer, n_ids, model_config, tokenizer.vocab_size)
    bytes_of_tokens(package_tokenizer)  # raises where the decoder is not supported
    bos = special_id(model_config, settings, "bos_token", tokenizer)
    eos = special_id(model_config, settings, "eos_token", tokenizer)
    starts_text = bool(settings.get("add_bos_token")) and bos is not None
    first = first_special_id(tokenizer)
    if first is not None:
        bos = first
        starts_text = True
    tokenizer.bos = eos if bos is None else bos
    tokenizer.eos = None if eos == tokenizer.bos else eos
    return tokenizer, tokenizer.bos if starts_text else None


def check_vocabulary(package_tokenizer, n_ids, model_config, vocab_size):
    """Raise UserError unless the ids of a tokenizer.json can be those of the model."""
    if n_ids < 2:
        raise UserError("tokenizer.json has no tokens: train it first")
    reason = ""
    # models pad their vocabulary by a few per cent
    if n_ids > vocab_size or n_ids < 0.75 * vocab_size:
        reason = f"{n_ids} tokens and the model {vocab_size}"
    for name in ("bos_token_id", "eos_token_id"):
        number = first_number(model_config.get(name))
        if number in range(vocab_size) and package_tokenizer.id_to_token(number) is None:
            reason = reason or f"no token {number}, which is the model's {name}"
    if reason:
        raise UserError(
            f"tokenizer.json has {reason}, so it belongs to another model: put the right file in "
            "its place"
        )


def first_number(value):
    """Return an id of config.json, where it may be in a list; None if there is none."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if type(value) is int else None


def special_id(model_config, settings, name, tokenizer):
    """Return the id of bos_token or eos_token, or None.

    model_config, which has a number, counts more than settings, which has the token.
    """
    number = first_number(model_config.get(f"{name}_id"))
    if number in range(tokenizer.vocab_size):
        return number
    token = token_text(settings, name)
    return None if token is None else tokenizer.package_tokenizer.token_to_id(token)


def token_text(settings, name):
    """Return bos_token or another token of tokenizer_config.json, or None."""
    token = settings.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def first_special_id(tokenizer):
    """Return the id that the post-processor puts before a text, or None."""
    text = sample_text(tokenizer)
    plain = tokenizer.encode(text)
    ids = tokenizer.package_tokenizer.encode(text).ids
    return ids[0] if ids[:1] != plain[:1] else None


# -----------------------------------------------------------------------------
# Writing


def write_tokenizer(folder, tokenizer, adds_bos: bool, length: int) -> None:
    """Write the files of make_exported(); none for None."""
    files = make_exported(tokenizer, adds_bos, length).files if tokenizer else {}
    for name, content in files.items():
        (folder / name).write_bytes(content)


def make_exported(tokenizer, adds_bos: bool, length: int) -> ImportedTokenizer:
    """Return a tokenizer with the files that it came with, or those of one of our own.

    adds_bos: whether bos is put before every text. length: the model's context length. Raises
    UserError if a tokenizer.json would encode text otherwise than the tokenizer.
    """
    if not isinstance(tokenizer, ImportedTokenizer):
        tokenizer = build_tokenizer(tokenizer, adds_bos)
    if "tokenizer_config.json" in tokenizer.files:
        return tokenizer
    files = {
        **tokenizer.files,
        "tokenizer_config.json": tokenizer_config(tokenizer, adds_bos, length),
    }
    # transformers lets tokenizer.json decide about bos
    if adds_bos and first_special_id(tokenizer) is None:
        package_tokenizer = load_tokenizer_json(tokenizer.text)
        put_first(package_tokenizer, tokenizer.bos)
        files["tokenizer.json"] = package_tokenizer.to_str().encode()
    return ImportedTokenizer(files, tokenizer.bos, tokenizer.eos, tokenizer.vocab_size)


def tokenizer_config(tokenizer, adds_bos, length):
    """Return the content of a tokenizer_config.json, for a tokenizer without one."""
    eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": None,
        "add_bos_token": adds_bos,
    }
    for name, i in (("bos_token", tokenizer.bos), ("eos_token", eos)):
        if i is not None:
            settings[name] = tokenizer.package_tokenizer.id_to_token(i)
    return (json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def build_tokenizer(tokenizer, adds_bos):
    """Return the ImportedTokenizer that does what a tokenizer of our own does.

    Raises UserError if there is none, as for some patterns of a BPETokenizer.
    """
    import_tokenizers()
    reason = "it encodes a sample of text otherwise"
    try:
        built = build_package_tokenizer(tokenizer)
        if adds_bos:
            put_first(built, tokenizer.bos)
        files = {"tokenizer.json": built.to_str().encode()}
        built = ImportedTokenizer(files, tokenizer.bos, tokenizer.eos, tokenizer.vocab_size)
        encode_alike = all(
            tokenizer.encode(x) == built.encode(x) for x in texts_to_compare(tokenizer)
        )
        if encode_alike and same_vocabulary(tokenizer, built):
            return built
    # the package raises Exception itself
    except Exception as error:
        reason = str(error)
    raise UserError(
        f"no tokenizer.json can be made that encodes text as this vocabulary does ({reason}), and "
        "nothing was written: give --tokenizer=DIR with tokenizer files of your own, or report it"
    )


def texts_to_compare(tokenizer):
    """Return whole texts, each character of them, and what must not become a special token."""
    sample = sample_text(tokenizer)
    texts = [sample, sample[::-1], *sample]
    if isinstance(tokenizer, CharTokenizer):
        return texts
    return [*texts, sample.replace(" ", "\n"), *special_tokens(tokenizer)]


def build_package_tokenizer(tokenizer):
    """Return the tokenizers.Tokenizer of a ByteTokenizer, CharTokenizer or BPETokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    def split(pattern):
        return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")

    # These are in the models' vocabularies too: an added token that is not would get the next free
    # id, not its own.
    special = special_tokens(tokenizer)
    steps = [pre_tokenizers.ByteLevel(False, use_regex=False)]
    decoder = decoders.ByteLevel()
    if isinstance(tokenizer, CharTokenizer):
        model = models.WordLevel(tokenizer.ids | special, unk_token="<unk>")
        steps = [split("(?m:.)")]
        decoder = decoders.Fuse()
    elif isinstance(tokenizer, ByteTokenizer):
        model = models.BPE(byte_level_alphabet() | special, [])
    else:
        vocab, merges = bpe_vocabulary(tokenizer.encoding._mergeable_ranks)
        # a piece of text that is a token is not split into bytes
        model = models.BPE(vocab | special, merges, ignore_merges=True)
        # the package's regular expressions take the + of {1,3}+ for another repetition
        pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.encoding._pat_str)
        steps.insert(0, split(pattern))
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    built.decoder = decoder
    names = sorted(special, key=special.get)
    built.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return built


def bpe_vocabulary(ranks):
    """Return (vocabulary, merges) of byte-level BPE from tiktoken's ranks of tokens."""
    characters = list(byte_level_alphabet())
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    # every pair of tokens that makes a token, in the order of ranks
    merges = []
    for token, rank in ranks.items():
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    pairs = [(text[left], text[right]) for *_, left, right in merges]
    return {text[token]: rank for token, rank in ranks.items()}, pairs


def put_first(package_tokenizer, i):
    """Let a tokenizers.Tokenizer put the special token with id i before every text."""
    name = package_tokenizer.id_to_token(i)
    package_tokenizer.post_processor = import_tokenizers().processors.TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=[(name, i)]
    )


def special_tokens(tokenizer):
    """Return the special tokens of a tokenizer: text -> id."""
    if isinstance(tokenizer, ImportedTokenizer):
        return tokenizer.special_tokens
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encoding._special_tokens
    return {} if tokenizer.bos is None else {"<bos>": tokenizer.bos}
