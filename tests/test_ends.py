"""Which tokens start and end a text: against AutoTokenizer and generation_config of transformers.

Each case is a folder of tiny files. Where transformers fills in what no file holds, ours is none:
KNOWN lists these differences, with the reason.
"""

from itertools import product

import pytest
import transformers
from makers import byte_level, write_tokenizer

from nanolong import tokenizer_files

SPECIAL = ("<s>", "</s>", "<|other|>", "<|eot|>", "<|begin|>")  # ids 0 to 4
VOCAB_SIZE = 270  # the model's: tokenizer.json has 261 tokens
TEXT = "a<|new|>b<|begin|></s>c"
CONFIG = {"model_type": "llama", "vocab_size": VOCAB_SIZE}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}

STRINGS = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
DICTS = {name: {"content": text, "__type": "AddedToken"} for name, text in STRINGS.items()}
OTHERS = {"bos_token": "<s>", "eos_token": "</s>"}
NEW = {"content": "<|new|>", "special": True, "normalized": False}
DECODER = {"added_tokens_decoder": {"261": NEW}}
MAP, SETTINGS = "special_tokens_map.json", "tokenizer_config.json"

# the names of a tokenizer, in its files
NAMES = {
    "none": {},
    "null": {SETTINGS: dict.fromkeys(STRINGS)},
    "strings": {SETTINGS: STRINGS},
    "dicts": {SETTINGS: DICTS},
    "map": {MAP: STRINGS},
    "map of dicts": {MAP: {name: {"content": text} for name, text in STRINGS.items()}},
    "map over strings": {MAP: STRINGS, SETTINGS: OTHERS},
    "strings with decoder over map": {MAP: OTHERS, SETTINGS: STRINGS | DECODER},
    "eos only": {SETTINGS: {"bos_token": None, "eos_token": "<|eot|>"}},
}
# the ids of a model, in its files
GENERATION = "generation_config.json"
OWN = {"bos_token_id": 4, "eos_token_id": 3}
OTHER = {"bos_token_id": 0, "eos_token_id": 1}
LIST = {"bos_token_id": 4, "eos_token_id": [1, 3]}
IDS = {
    "absent": {},
    "own": {"config.json": OWN},
    "other": {"config.json": OTHER},
    "list": {"config.json": LIST},
    "generation": {GENERATION: LIST},
    "generation over config": {"config.json": OTHER, GENERATION: LIST},
}
# what puts a token first
STARTS = {
    "template": {"template": "<|begin|>"},
    "template of another": {"template": "<s>"},
    "flag": {SETTINGS: {"add_bos_token": True}},
    "flag of false": {SETTINGS: {"add_bos_token": False}},
    "template, flag of false": {"template": "<|begin|>", SETTINGS: {"add_bos_token": False}},
}
# tokens that tokenizer.json does not have
ADDED = {
    "decoder": {SETTINGS: STRINGS | DECODER},
    "decoder at another id": {SETTINGS: {"added_tokens_decoder": {"265": NEW}}},
    "decoder, not special": {SETTINGS: {"added_tokens_decoder": {"261": NEW | {"special": False}}}},
    "decoder names eos": {SETTINGS: DECODER | {"eos_token": "<|new|>"}},
    "added_tokens.json": {"added_tokens.json": {"<|new|>": 261}, MAP: STRINGS},
    "added_tokens.json names eos": {"added_tokens.json": {"<|new|>": 261}, MAP: {"eos_token": NEW}},
    "a name without a token": {SETTINGS: {"bos_token": "<|nowhere|>", "eos_token": "<|eot|>"}},
}
CLASS = "no file holds ids, and LlamaConfig fills in 1 and 2"
FLAG = "transformers 5 ignores add_bos_token next to a tokenizer.json, and 4 does not"
NOWHERE = "AutoTokenizer adds a token of that name, which the model has not learnt"
# (part of a case, field): the ids that are only theirs, those that are only ours, and why
KNOWN = {
    ("absent", "ends"): ({2}, set(), CLASS),
    ("absent", "bos"): ({1}, {None}, CLASS),
    ("flag", "first"): ({None}, {4}, FLAG),
    ("a name without a token", "bos"): ({261}, {4}, NOWHERE),
}
FIELDS = ("first", "bos", "ends", "text")


def cases():
    """Return (names, ids, a start or an added token) -> file -> content."""
    found = {}
    for names, ids in product(NAMES, IDS):
        found[names, ids, ""] = merge(NAMES[names], IDS[ids])
    for names, ids, start in product(("none", "strings"), ("absent", "own"), STARTS):
        found[names, ids, start] = merge(NAMES[names], IDS[ids], STARTS[start])
    for added in ADDED:
        found["", "own", added] = merge(IDS["own"], ADDED[added])
    half = {"model_type": "gemma3_text", "vocab_size": VOCAB_SIZE, **OWN}
    nested = {"config.json": {"model_type": "gemma3", "text_config": half}}
    found["none", "own, of the text half", ""] = merge(nested)
    return found


def merge(*files):
    found = {"config.json": CONFIG, SETTINGS: FAST}
    for part in files:
        for name, content in part.items():
            is_file = name.endswith(".json")
            found[name] = {**found.get(name, {}), **content} if is_file else content
    return found


def write(folder, files):
    """A byte-level BPE without merges, and the files."""
    files = dict(files)
    made = byte_level(SPECIAL, first=files.pop("template", None))
    files = {name.removesuffix(".json"): content for name, content in files.items()}
    write_tokenizer(folder, made, **files)


def ours(folder):
    ids = tokenizer_files.read_ids(folder)
    tokenizer, ends = tokenizer_files.read_tokenizer(folder, ids, VOCAB_SIZE)
    # without a name and an id of bos, documents are separated by eos
    is_eos = ends.separator in (ends.eos, *ends.ids) and not ends.starts_text
    bos = None if is_eos and ends.eos is None else ends.separator
    text = tokenizer.encode_with_special_tokens(TEXT)
    return dict(zip(FIELDS, (ends.bos, bos, sorted(ends.ids), text), strict=True))


def theirs(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if (folder / GENERATION).is_file():
        model = transformers.GenerationConfig.from_pretrained(folder)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.GenerationConfig.from_model_config(config)
    eos = model.eos_token_id
    ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    first = whole[0] if whole != plain else None
    candidates = (first, tokenizer.bos_token_id, model.bos_token_id)
    bos = next((i for i in candidates if i is not None), None)
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    return dict(zip(FIELDS, (first, bos, sorted(ends), text), strict=True))


@pytest.mark.parametrize("case", cases(), ids=": ".join)
def test_starts_and_ends_are_those_of_transformers(case, tmp_path):
    write(tmp_path, cases()[case])
    found, expected = ours(tmp_path), theirs(tmp_path)
    for field in FIELDS:
        known = [KNOWN[part, field] for part in case if (part, field) in KNOWN]
        if known:
            of_theirs, of_ours, _ = known[0]
            a, b = as_set(found[field]), as_set(expected[field])
            assert b - a <= of_theirs and a - b <= of_ours, field
        else:
            assert found[field] == expected[field], field


@pytest.mark.parametrize(
    "case, expected",
    [
        (("strings", "list", ""), (SETTINGS, "config.json", SETTINGS)),
        (("none", "generation over config", ""), (GENERATION, GENERATION, GENERATION)),
        (("map over strings", "other", ""), (MAP, "config.json", MAP)),
    ],
)
def test_the_line_of_an_import_names_the_file_of_each_token(case, expected, tmp_path):
    write(tmp_path, cases()[case])
    ids = tokenizer_files.read_ids(tmp_path)
    line = "before every text: none; between documents: <|begin|> (4, {}); "
    line += "at an end: </s> (1, {}), <|eot|> (3, {})"
    tokenizer, ends = tokenizer_files.read_tokenizer(tmp_path, ids, VOCAB_SIZE)
    assert ends.describe(tokenizer) == line.format(*expected)


def as_set(values):
    return {*values} if isinstance(values, list) else {values}
