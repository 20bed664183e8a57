"""From texts to a dataset: data/NAME/ with train.bin, val.bin and meta.json.

A text is UTF-8 without zero bytes. A document is a file, or a row of JSON. Texts are read into
memory as they are, without a byte order mark: line ends are not translated.
"""

import codecs
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.token_files import SCORED, STARTS, dataset_folder, open_tokens, token_writer
from data.tokenizer import (
    SEPARATOR,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    byte_level_alphabet,
    tokenizers_package,
)
from nanolong.errors import UserError, check_choice, note, require

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
# With fewer documents than this, validation is the end of each document.
FEW_DOCUMENTS = 20
ROWS = (".json", ".jsonl", ".ndjson")  # endings of files whose rows are documents
ROWS_REMEDY = 'write a list, or a row a line, each with a "text", or name it .txt'
# -----------------------------------------------------------------------------
# Texts that need no text from the user


def prepare(dataset, name="", shards=10, **options):
    """Make python, shakespeare or fineweb10B: data/<name or dataset>, which is returned.

    shards: number of fineweb10B's shards. options: build()'s, for the others. Raises UserError.
    """
    known = ("python", "shakespeare", "fineweb10B")
    remedy = "choose from {}, or give a file or folder of text"
    check_choice(dataset, known, "dataset", remedy)
    require(shards >= 1, "--shards must be at least 1")
    name = name or dataset
    if dataset == "python":
        source = f"standard library of Python {platform.python_version()}"
        return build(name, standard_library(), source, **options)
    if dataset == "shakespeare":
        file = dataset_folder("shakespeare.txt")
        download(SHAKESPEARE, file, "run python data/prepare.py FILE --tokenizer=char --name=NAME")
        is_known = hashlib.sha256(file.read_bytes()).hexdigest() == SHAKESPEARE_SHA256
        remedy = "remove it and try again"
        require(is_known, f"{file} is not what {SHAKESPEARE} held (SHA-256): {remedy}")
        return build(name, {"input.txt": file}, SHAKESPEARE, **{"tokenizer": "char", **options})
    folder = dataset_folder(name)
    for part in ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]:
        file = folder / f"fineweb_{part}.bin"
        download(FINEWEB + file.name, file, f"put the file at {file}")
        # raises if the download is damaged
        open_tokens(file)
    return folder


def standard_library():
    """Return the source of the standard library, which differs between Pythons: name -> path."""
    skipped = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
    files = files_in(Path(sysconfig.get_path("stdlib")), "*.py")
    return {name: file for name, file in files.items() if skipped.isdisjoint(name.split("/"))}


def files_in(folder, pattern):
    """Find the files under a folder: relative path -> path."""
    files = [file for file in folder.rglob(pattern) if file.is_file()]
    return {file.relative_to(folder).as_posix(): file for file in files}


def download(url, file, instruction):
    """Download url to file, unless it is there.

    instruction: what to do with a file that was downloaded manually. Raises UserError.
    """
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    try:
        with urllib.request.urlopen(url, timeout=30) as response, open(part, "wb") as f:
            shutil.copyfileobj(response, f, 1 << 20)
            size = response.headers.get("Content-Length")
            if size and f.tell() != int(size):
                raise OSError(f"only {f.tell()} of {size} bytes arrived")
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(
            f"{file.name} could not be downloaded from {url} ({getattr(error, 'reason', error)}): "
            f"download it manually, and then {instruction}"
        ) from None
    os.replace(part, file)


# -----------------------------------------------------------------------------
# Reading


def why_no_text(path):
    """Say why a file is no text, UTF-8 without zero bytes, and the remedy; None if it is one."""
    problem = "not UTF-8"
    content = path.read_bytes()
    with contextlib.suppress(UnicodeDecodeError):
        if "\0" not in content.decode():
            return None if content else "empty: give a text"
        problem = "not UTF-8 text, for it has zero bytes"
    return f"{problem}: unpack it, convert it by iconv, or write its texts to a .jsonl file"


def read_documents(name, path, as_bytes=False):
    """Return the documents of a file: (name, text or bytes) of each.

    The file is a text by why_no_text(), unless as_bytes. Raises UserError as read_rows().
    """
    if path.suffix.lower() in ROWS:
        rows = read_rows(path)
        return [(f"{name}:{n}", text.encode() if as_bytes else text) for n, text in rows]
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    return [(name, content if as_bytes else content.decode())]


def read_rows(path):
    """Yield the number of each row of a file of JSON, and its text.

    If the file begins with [, it is one list of rows, which is read whole; else a row is a line. A
    row is a text, or has a "text". Raises UserError for another row, and for invalid JSON.
    """
    with open(path, encoding="utf-8-sig") as f:
        is_list = f.read(4096).lstrip().startswith("[")
        f.seek(0)
        if is_list:
            place = "row"
            rows = enumerate(parse_json(f.read(), 1), 1)
        else:
            place = "line"
            rows = ((n, parse_json(line, n)) for n, line in enumerate(f, 1) if line.strip())
        for number, row in rows:
            text = row.get("text") if isinstance(row, dict) else row
            problem = f'JSON without a "text" in {place} {number}'
            require(isinstance(text, str), f"{problem}: {ROWS_REMEDY}")
            problem = f"JSON with half a surrogate pair, which is no character, in {place} {number}"
            half = re.search("[\ud800-\udfff]", text)
            require(not half, f"{problem}: remove it, or write the other half")
            yield number, text


def parse_json(text, line):
    """Parse JSON that begins in a line of a file. Raises UserError."""
    try:
        return json.loads(text.rstrip())
    except (ValueError, RecursionError) as error:
        line += getattr(error, "lineno", 1) - 1
        raise UserError(f"no JSON in line {line}: {ROWS_REMEDY}") from None


def hash_name(document):
    """Return the number in [0, 1) that says whether a document of this name is validation."""
    digest = hashlib.sha256(document.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def note_separators(n, source):
    """Print a note if the text of SEPARATOR occurs n times in a source, where it ends nothing."""
    if n:
        note(
            f"{SEPARATOR} in {source} ({n} times) is plain text, and ends no document: to end one "
            'there, write the documents as lines {"text": ...} of a .jsonl file'
        )


class Texts:
    """The documents of files, and which part of each is validation.

    Whole documents are validation, by a hash of their names. If there are few, the end of each is.

    files: name -> path. as_bytes: whether documents are bytes, or text. allows_all: take the bytes
    of files that are no text, with a note. Prints which files are left out, apart from empty ones.
    Raises UserError if there is no text.
    """

    def __init__(self, files, source, as_bytes, val_fraction, allows_all=False):
        self.files = []
        self.val_fraction = val_fraction
        self.documents = []  # (name, text or bytes)
        not_text = []
        for name, path in tqdm(sorted(files.items()), "reading", leave=False, disable=None):
            try:
                reason = why_no_text(path)
                takes_all = path.stat().st_size > 0 and path.suffix.lower() not in ROWS
                require(not reason or (allows_all and takes_all), reason)
                documents = read_documents(name, path, as_bytes)
            except UserError as error:
                advice = ""
                if reason and takes_all:
                    advice = ", or give --tokenizer=bytes for its bytes"
                require(len(files) > 1, f"{path} is {error}{advice}")
                if path.stat().st_size:
                    print(f"left out {name} ({error})")
                continue
            not_text += [name] if reason else []
            self.files.append(name)
            self.documents += documents
        if not_text:
            n = f"{len(not_text)} of {len(files)} files, such as {not_text[0]},"
            note(f"{n} are no text: their bytes are taken as they are")
        separator = SEPARATOR.encode() if as_bytes else SEPARATOR
        note_separators(sum(text.count(separator) for _, text in self.documents), source)
        is_there = bool(self.documents)
        require(is_there, f"there is no text in {source}: give a file or folder that holds some")
        self.are_few = len(self.documents) < FEW_DOCUMENTS

    def parts(self):
        """Yield "train" or "val", and the training or the validation text of each document."""
        fractions = [hash_name(name) for name, _ in self.documents]
        limit = max(self.val_fraction, min(fractions))  # at least one document is validation
        documents = zip(self.documents, fractions, strict=True)
        for (_, text), fraction in tqdm(documents, "encoding", leave=False, disable=None):
            n_train = len(text) if fraction > limit else 0
            if self.are_few:
                n_train = int(len(text) * (1 - self.val_fraction))
            yield "train", text[:n_train]
            yield "val", text[n_train:]


# -----------------------------------------------------------------------------
# Encoding and writing


def build(name, files, source, tokenizer="", vocab_size=4096, val_fraction=0.1):
    """Write data/<name>, complete or not at all, and return it. Raises UserError.

    files: name -> path; the split depends on the names. source: where the text is from, for
    meta.json and messages. tokenizer: bytes, which takes any file, char, bpe, or a tokenizer; by
    default the bytes of texts.
    """
    folder = new_folder(name, val_fraction)
    as_bytes = tokenizer in ("", "bytes")
    texts = Texts(files, source, as_bytes, val_fraction, allows_all=tokenizer == "bytes")
    tokenizer = make_tokenizer(tokenizer, texts, vocab_size)
    about = {"source": source, "files": len(texts.files)}
    n_tokens = write_dataset(folder, tokenizer, texts.parts(), about)
    share = n_tokens["val"] / sum(n_tokens.values())
    part = f"the last {val_fraction:.0%} of each document" if texts.are_few else "whole documents"
    if abs(share - val_fraction) > val_fraction / 2:
        note(
            f"{share:.1%} of the tokens are validation, not {val_fraction:.1%}, as whole documents "
            "are, by a hash of their names: another --val_fraction moves the share"
        )
    print(
        f"{folder}: {n_tokens['train']:,} training and {n_tokens['val']:,} validation tokens "
        f"({share:.1%}, {part}) from {len(texts.documents):,} documents, vocabulary "
        f"{tokenizer.vocab_size}"
    )
    return folder


def new_folder(name, val_fraction):
    """Return data/<name>, a folder to write. Raises UserError, also for a fraction of 0 or 1."""
    is_plain = bool(name) and Path(name).name == name and not name.startswith(".")
    require(is_plain, f"--name={name} cannot be a folder: choose letters, digits and dashes")
    require(0 < val_fraction < 1, f"--val_fraction={val_fraction:g} is no fraction: give 0.1 or so")
    folder = dataset_folder(name)
    remedy = "choose another --name, or remove it first"
    require(not folder.exists(), f"{folder} exists already: {remedy}")
    return folder


def make_tokenizer(name, texts, vocab_size):
    """Make the tokenizer bytes, char or bpe; another one is returned as it is."""
    if name in ("", "bytes"):
        return ByteTokenizer()
    if name == "char":
        characters = sorted(set().union(*(text for _, text in texts.documents)))
        return CharTokenizer("".join(characters), bos=len(texts.documents) > 1)
    if name != "bpe":
        return name
    # The library would allocate all memory for a larger vocabulary.
    limits = f"at least 257, the bytes and <|endoftext|>, and at most {1 << 20}"
    is_possible = 257 <= vocab_size <= 1 << 20
    require(is_possible, f"--vocab_size={vocab_size} is not possible: give {limits}")
    return train_bpe((text for split, text in texts.parts() if split == "train"), vocab_size)


def train_bpe(texts, vocab_size: int) -> ImportedTokenizer:
    """Train byte-level BPE, with GPT-2's pattern, of at most vocab_size tokens.

    A short text gives fewer, because a pair that occurs once is not merged.
    """
    tokenizers = tokenizers_package()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(byte_level_alphabet()),
        show_progress=False,
    )
    # the package needs many times the memory of the longest text that it gets
    parts = (text[i : i + (1 << 17)] for text in texts for i in range(0, len(text), 1 << 17))
    bpe.train_from_iterator(parts, trainer)
    return ImportedTokenizer({"tokenizer.json": bpe.to_str().encode()}, bpe.token_to_id(SEPARATOR))


def encode_document(tokenizer, text):
    """Encode a document between the tokens that start and end it."""
    if isinstance(text, bytes):
        ids = np.frombuffer(text, np.uint8)
    else:
        ids = np.array(tokenizer.encode(text), np.int64)
    start = [] if tokenizer.bos is None else [tokenizer.bos]
    # a document that ends at another token than the next one's first ends with it
    end = [] if tokenizer.eos is None else [tokenizer.eos]
    return np.concatenate([np.array(part, np.int64) for part in (start, ids, end)])


def write_dataset(folder, tokenizer, parts, about):
    """Write a dataset of texts, complete or not at all.

    parts: pairs of "train" or "val" and a text or bytes; about: other keys of meta.json. Returns
    the number of tokens of each split.
    """
    n_bytes = {"train": 0, "val": 0}

    def encode():
        for split, text in parts:
            if text:
                n_bytes[split] += len(text if isinstance(text, bytes) else text.encode())
                yield split, encode_document(tokenizer, text)
        for split, n in n_bytes.items():
            remedy = "give more text, or another --val_fraction"
            require(n, f"there is too little text for {split}.bin: {remedy}")

    return write_files(folder, tokenizer, encode(), {**about, "bytes": n_bytes})


def write_files(folder, tokenizer, pieces, about, masked=False):
    """Write token files, masks and meta.json to a new folder, as write_dataset().

    pieces: pairs of "train" or "val" and token ids; with masks a third item, whether each token is
    scored, and every piece is a document.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    n_tokens = {}
    meta = {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "bos_default": tokenizer.starts_text,
        **about,
        "tokens": n_tokens,
    }
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as tmp:
        made = Path(tmp) / folder.name
        made.mkdir()
        with contextlib.ExitStack() as stack:
            write, masks = {}, {}
            for split in ("train", "val"):
                writer = token_writer(made / f"{split}.bin", tokenizer.vocab_size)
                write[split] = stack.enter_context(writer)
                if masked:
                    masks[split] = stack.enter_context(open(made / f"{split}.mask", "xb"))
            for split, ids, *is_scored in pieces:
                write[split](ids)
                if masked:
                    mask = np.where(*is_scored, SCORED, 0).astype(np.uint8)
                    mask[0] |= STARTS
                    masks[split].write(mask.tobytes())
        for split in write:
            n_tokens[split] = len(open_tokens(made / f"{split}.bin"))
        tokenizer_files = meta["tokenizer"].get("files", {})
        for name, content in tokenizer_files.items():
            (made / name).write_bytes(content)
        if tokenizer_files:
            meta["tokenizer"]["files"] = sorted(tokenizer_files)
        content = json.dumps(meta, indent=1, allow_nan=False)
        (made / "meta.json").write_text(content + "\n", encoding="utf-8")
        os.rename(made, folder)
    return n_tokens
