"""The tokenizer files of a Hugging Face folder: read for an import, and written for an export."""

import json
import re

from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    byte_level_alphabet,
    load_tokenizer_json,
    rust_errors,
    same_vocabulary,
)
from nanolong import tokenizer_files
from nanolong.errors import require

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
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.characters
    return SAMPLE


def read_tokenizer(folder, model_config, vocab_size: int, named=False):
    """Read the tokenizer of a Hugging Face folder, for a model with so many ids.

    named: whether the user has named the folder for its tokenizer, which then has to be there.
    Returns the tokenizer or None, the id that starts every text or None, and a note for the user
    that may be empty. Raises UserError if a file is damaged or belongs to another model.
    """
    require(
        (folder / "tokenizer.json").is_file() or not named,
        f"there is no {folder / 'tokenizer.json'}: give --tokenizer the folder of this model's",
    )
    if not (folder / "tokenizer.json").is_file():
        note = f"there is no tokenizer.json in {folder}: the model works on token ids only"
        if (folder / "tokenizer.model").is_file():
            note += " (for text, let transformers write one from tokenizer.model)"
        return None, None, note
    return *tokenizer_files.read_tokenizer(folder, model_config, vocab_size), ""


# -----------------------------------------------------------------------------
# Writing


def make_exported(tokenizer, adds_bos: bool, length: int) -> ImportedTokenizer:
    """Return a tokenizer with the files that it came with, or those of one of our own.

    adds_bos: whether bos is put before every text. length: the model's context length. Raises
    UserError if a tokenizer.json would encode text otherwise than the tokenizer.
    """
    if not isinstance(tokenizer, ImportedTokenizer):
        tokenizer = build_tokenizer(tokenizer)
    if "tokenizer_config.json" in tokenizer.files:
        return tokenizer
    text = tokenizer.text
    # transformers lets tokenizer.json decide about bos
    if adds_bos and tokenizer_files.first_special_id(tokenizer) is None:
        package = load_tokenizer_json(text)
        put_first(package, tokenizer.bos)
        text = package.to_str()
    eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
    }
    for name, i in (("bos_token", tokenizer.bos), ("eos_token", eos)):
        settings[name] = None if i is None else tokenizer.package.id_to_token(i)
    config = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    files = {"tokenizer.json": text.encode(), "tokenizer_config.json": config.encode()}
    return ImportedTokenizer(
        tokenizer.files | files, tokenizer.bos, tokenizer.eos, tokenizer.vocab_size
    )


def build_tokenizer(tokenizer):
    """Return the ImportedTokenizer that does what a tokenizer of our own does, or raise UserError.

    It is compared on a text, on each character of it, and on what must not become a special token.
    """
    problem = "no tokenizer.json can be made that encodes text as this vocabulary does"
    remedy = "give --tokenizer=DIR with tokenizer files of your own"
    text = sample_text(tokenizer)
    texts = [text, text[::-1], *text]
    if not isinstance(tokenizer, CharTokenizer):
        texts += [text.replace(" ", "\n"), *tokenizer.special_tokens]
    with rust_errors(problem, remedy):
        files = {"tokenizer.json": build_package(tokenizer).to_str().encode()}
        built = ImportedTokenizer(files, tokenizer.bos, tokenizer.eos, tokenizer.vocab_size)
        alike = all(tokenizer.encode(x) == built.encode(x) for x in texts)
    require(alike and same_vocabulary(tokenizer, built), f"{problem}: {remedy}")
    return built


def build_package(tokenizer):
    """Return the tokenizers.Tokenizer of a ByteTokenizer, CharTokenizer or BPETokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # Special tokens are in the models' vocabularies too: an added token that is not would get the
    # next free id, not its own.
    special = tokenizer.special_tokens
    steps = [pre_tokenizers.ByteLevel(False, use_regex=False)]
    decoder = decoders.ByteLevel()
    if isinstance(tokenizer, CharTokenizer):
        model = models.WordLevel(tokenizer.ids | special, unk_token="<unk>")
        steps = [pre_tokenizers.Split(tokenizers.Regex("(?m:.)"), "isolated")]
        decoder = decoders.Fuse()
    elif isinstance(tokenizer, ByteTokenizer):
        model = models.BPE(byte_level_alphabet() | special, [])
    elif isinstance(tokenizer, BPETokenizer):
        vocab, merges = bpe_vocabulary(tokenizer.encoding._mergeable_ranks)
        # a piece of text that is a token is not split into bytes
        model = models.BPE(vocab | special, merges, ignore_merges=True)
        # the package's regular expressions take the + of {1,3}+ for another repetition
        pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", tokenizer.encoding._pat_str)
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    built.decoder = decoder
    names = sorted(special, key=special.get)
    built.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return built


def bpe_vocabulary(ranks):
    """Return (vocabulary, merges) of byte-level BPE from tiktoken's ranks of tokens."""
    character_of = {byte: character for character, byte in byte_level_alphabet().items()}
    text = {token: "".join(character_of[byte] for byte in token) for token in ranks}
    # every pair of tokens that makes a token, in the order of ranks
    merges = []
    for token, rank in ranks.items():
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    pairs = [(text[left], text[right]) for *_, left, right in sorted(merges)]
    return {text[token]: rank for token, rank in ranks.items()}, pairs


def put_first(package, i):
    """Let a tokenizers.Tokenizer put the special token with id i before every text."""
    from tokenizers.processors import TemplateProcessing

    name = package.id_to_token(i)
    package.post_processor = TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=[(name, i)]
    )
