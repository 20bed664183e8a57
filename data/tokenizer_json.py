"""Hugging Face's tokenizer.json: byte-level BPE (GPT-2, Llama 3, SmolLM, Qwen) becomes a tiktoken encoding, and back.

Both merge the pair of neighbours of the lowest rank. tiktoken ranks a pair by the token that it makes, tokenizer.json by its place in `merges`: where tokens are numbered in the order of their
merges, as in all of these, that is the same. Text is encoded both ways, by tiktoken and by the merges as they stand in the file, before an imported vocabulary is believed.
A vocabulary of another kind (sentencepiece's) keeps its tokenizer.json, which the optional tokenizers package reads.
"""
import json

from config import UserError
from data import BPE, Bytes, Char, Packaged

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what ByteLevel splits by
DIGITS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"  # the same after Digits has cut each digit out
SAMPLE = ("The quick brown fox can't jump 3.14159 times over 1,024 lazy dogs' backs; it'll try, won't it?\n\n\tdef f(x, *, y=None):\n        return {'a': [x ** 2, -y]}  # tail   \n\r\n"
          "Fünf Größen, naïve café, Ærøskøbing; Ελληνικά, Русский текст, עברית, العربية, हिन्दी, 中文字符, 日本語のテキスト, 한국어. ½ ² Ⅻ ١٢٣ 🙂👩‍👩‍👧 e\u0301   \u00a0\u3000aaaaaaa     \n   \n<b>&amp;</b> http://x.org/?q=%20#1")

# the characters that stand for bytes: printable ones for themselves, the others moved up from U+0100
_plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTER = {byte: chr(byte) for byte in _plain} | {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*_plain}))}
BYTE = {character: byte for byte, character in CHARACTER.items()}


class OtherKind(ValueError):
    """Not a byte-level BPE that tiktoken could read, and why."""


def read(folder, vocab_size, read_json):
    """(tokenizer or None, the id to put before a text or None, a note in words) of a Hugging Face directory, for a model with so many ids. Raises UserError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None, None, f"note: there is no tokenizer.json in {folder}: the model works on token ids only" + (" (for text, let transformers write one from tokenizer.model)" if (folder / "tokenizer.model").is_file() else "")
    spec, settings = read_json(file), read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    hf = read_json(folder / "config.json")
    try:
        added = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
        if not all(isinstance(content, str) and type(i) is int for content, i in added.items()):
            raise TypeError("added_tokens need text and ids")
        bos, eos = (_id(hf.get(f"{name}_token_id"), settings.get(f"{name}_token"), added, vocab_size) for name in ("bos", "eos"))
        first = _first(spec.get("post_processor"), added)
        starts = first is not None or bool(settings.get("add_bos_token")) and bos is not None
        bos = eos if bos is None else bos
        bos = bos if first is None else first
        used = max([*added.values(), *(spec["model"]["vocab"].values() if isinstance(spec["model"]["vocab"], dict) else [len(spec["model"]["vocab"]) - 1])])
        if used >= vocab_size:
            raise UserError(f"{file} numbers tokens up to {used}, and the model has {vocab_size}: it belongs to another model")
        try:
            tokenizer = from_spec(spec, added, bos, None if eos == bos else eos, vocab_size)
            note = ""
        except OtherKind as reason:
            note = f"note: {reason}: text needs the tokenizers package (pip install tokenizers); token ids work without it"
            try:
                tokenizer = Packaged(file.read_text(encoding="utf-8"), bos, None if eos == bos else eos, vocab_size)
            except UserError:
                return None, bos if starts else None, note + ", and it is not installed: install it and import again"
        return tokenizer, bos if starts else None, note
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}): fetch it again") from None


def _id(number, token, added, vocab_size):
    """The id of a special token: config.json's, or that of tokenizer_config.json's token; of several the first."""
    number = number[0] if isinstance(number, list) and number else number
    if type(number) is int and 0 <= number < vocab_size:
        return number
    return added.get(token.get("content") if isinstance(token, dict) else token) if isinstance(token, (str, dict)) else None


def _first(processor, added):
    """The id of the special token that a post-processor puts before a text, or None."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        return next((found for part in processor["processors"] if (found := _first(part, added)) is not None), None)
    single = processor.get("single") if processor.get("type") == "TemplateProcessing" else None
    return added.get(single[0]["SpecialToken"]["id"]) if single and "SpecialToken" in single[0] else None


def from_spec(spec, added, bos, eos, vocab_size):
    """The tokenizer of a parsed tokenizer.json. Raises OtherKind where it is no byte-level BPE that tiktoken, or Bytes, or Char, can stand for."""
    model, before, normal = spec["model"], spec.get("pre_tokenizer") or {}, spec.get("normalizer")
    parts = before.get("pretokenizers", [before])
    if model.get("type") == "WordLevel" and [part.get("type") for part in parts] == ["Split"] and all(len(token) == 1 for token in model["vocab"] if token not in added):
        characters = "".join(sorted((token for token in model["vocab"] if token not in added), key=model["vocab"].get))
        if [*map(model["vocab"].get, characters)] == [*range(len(characters))] and vocab_size == len(characters) + len(added) <= len(characters) + 1:
            return Char(characters, bool(added))
    if model.get("type") != "BPE" or model.get("byte_fallback") or parts[-1].get("type") != "ByteLevel":
        raise OtherKind("this vocabulary is no byte-level BPE")
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")) or parts[-1].get("add_prefix_space"):
        raise OtherKind("this byte-level BPE marks words or puts a space before the text")
    if normal and normal.get("type") == "Sequence" and len(normal["normalizers"]) == 1:
        normal = normal["normalizers"][0]
    if normal and normal.get("type") != "NFC":
        raise OtherKind(f"this byte-level BPE changes the text first ({normal.get('type')})")
    splits = [(part.get("type"), part.get("use_regex", True), part.get("individual_digits"), part.get("behavior"), part.get("invert")) for part in parts]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in model["merges"]]
    if splits == [("ByteLevel", False, None, None, None)] and not merges:  # what write() makes of Bytes
        if {token: i for token, i in model["vocab"].items() if token not in added} == {CHARACTER[byte]: byte for byte in range(256)} and [*added.values()] == [256] and vocab_size == 257:
            return Bytes()
        raise OtherKind("this byte-level vocabulary has no merges")
    if splits == [("ByteLevel", True, None, None, None)]:
        pattern = GPT2
    elif splits == [("Digits", True, True, None, None), ("ByteLevel", True, None, None, None)]:
        pattern = DIGITS_GPT2
    elif len(splits) == 2 and splits[0][0] == "Split" and splits[0][3:] in (("Isolated", False), ("Isolated", None)) and splits[1][:2] == ("ByteLevel", False) and "Regex" in parts[0]["pattern"]:
        pattern = parts[0]["pattern"]["Regex"]
    else:
        raise OtherKind(f"this byte-level BPE cuts text by {', '.join(str(part.get('type')) for part in parts)}, for which tiktoken has no pattern")
    ids = {token: i for token, i in model["vocab"].items() if token not in added}
    try:
        ranks = {bytes(BYTE[c] for c in token): i for token, i in ids.items()}
        made = [ids[a + b] for a, b in merges]
    except KeyError as error:
        raise OtherKind(f"this byte-level BPE has a token or merge outside its alphabet ({error.args[0]!r})") from None
    if len(set(ids.values())) < len(ids) or set(ids.values()) & set(added.values()):
        raise OtherKind("two tokens of this vocabulary share an id")
    if any(a > b for a, b in zip(made, made[1:])) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise OtherKind("this byte-level BPE does not number its tokens in the order of their merges")
    import tiktoken
    try:
        tokenizer = BPE(tiktoken.Encoding("imported", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added), bos, eos, vocab_size, bool(normal))
        mine, theirs = tokenizer.encode(SAMPLE), by_merges(SAMPLE, pattern, ids, merges, bool(normal), model.get("ignore_merges"))
    except Exception as error:  # tiktoken and regex raise what they like on patterns that they do not read
        raise OtherKind(f"tiktoken cannot read this vocabulary ({error})") from None
    if mine != theirs:
        raise OtherKind("tiktoken encodes a sample of text otherwise than this vocabulary's own merges")
    return tokenizer


def by_merges(text, pattern, ids, merges, nfc=False, whole=False):
    """Encode as a tokenizer.json says: the pair of the earliest merge first, the leftmost of several. Slow; to check by. whole: a piece that is a token stays one."""
    import unicodedata

    import regex
    rank, out = {merge: i for i, merge in reversed([*enumerate(merges)])}, []
    for piece in regex.findall(pattern, unicodedata.normalize("NFC", text) if nfc else text):
        parts = [CHARACTER[byte] for byte in piece.encode()]
        if whole and "".join(parts) in ids:
            parts = ["".join(parts)]
        while pairs := [(rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in rank]:
            _, i = min(pairs)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        out += [ids[part] for part in parts]
    return out


def sample_of(tokenizer):
    """A text that both sides can encode."""
    return tokenizer.characters if isinstance(tokenizer, Char) else SAMPLE


def write(folder, tokenizer, starts, length):
    """tokenizer.json and tokenizer_config.json of a tokenizer; starts: whether bos is put before a text. None: nothing is written."""
    if tokenizer is None:
        return
    special = tokenizer.encoding._special_tokens if isinstance(tokenizer, BPE) else {} if tokenizer.bos is None else {"<bos>": tokenizer.bos}
    name = {i: token for token, i in special.items()}
    if isinstance(tokenizer, Packaged):
        text = tokenizer.text
        name = {i: token.content for i, token in tokenizer.tokenizer.get_added_tokens_decoder().items()}
    else:
        text = json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for token, i in sorted(special.items(), key=lambda item: item[1])],
            **_spec(tokenizer, special), "post_processor": None if not starts else {
                "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": name[tokenizer.bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"SpecialToken": {"id": name[tokenizer.bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {name[tokenizer.bos]: {"id": name[tokenizer.bos], "ids": [tokenizer.bos], "tokens": [name[tokenizer.bos]]}}}}, ensure_ascii=False) + "\n"
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "clean_up_tokenization_spaces": False, "bos_token": name.get(tokenizer.bos), "eos_token": name.get(eos), "add_bos_token": starts}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _spec(tokenizer, special):
    """normalizer, pre_tokenizer, decoder and model of a tokenizer.json. special: text -> id. These are in the vocabulary too: a token of added_tokens that is not gets the next free id, whatever id stands there."""
    cut, whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}, {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                                                                                                         "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    if isinstance(tokenizer, Char):
        vocab = {c: i for i, c in enumerate(tokenizer.characters)}
        return {"normalizer": None, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(?m:.)"}, "behavior": "Isolated", "invert": False}, "decoder": {"type": "Fuse"},
                "model": {"type": "WordLevel", "vocab": vocab | special, "unk_token": "<unk>"}}
    if isinstance(tokenizer, Bytes):
        return {"normalizer": None, "pre_tokenizer": cut, "decoder": cut, "model": {**whole, "vocab": {CHARACTER[byte]: byte for byte in range(256)} | special, "merges": []}}
    ranks = tokenizer.encoding._mergeable_ranks
    made = [(rank, ranks[token[:i]], ranks[token[i:]], token[:i], token[i:]) for token, rank in ranks.items() for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    written = {token: "".join(CHARACTER[byte] for byte in token) for token in ranks}
    return {"normalizer": {"type": "NFC"} if tokenizer.nfc else None, "decoder": cut,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": tokenizer.encoding._pat_str}, "behavior": "Isolated", "invert": False}, cut]},
            "model": {**whole, "vocab": dict(sorted([*((written[token], rank) for token, rank in ranks.items()), *special.items()], key=lambda item: item[1])), "merges": [[written[a], written[b]] for *_, a, b in sorted(made)]}}
