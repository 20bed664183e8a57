"""From texts to a dataset: data/NAME/ with train.bin, val.bin and meta.json.

A document is a file, or the "text" of a line of a .jsonl file. Texts are read and encoded in parts,
into the open token files, so that memory does not grow with them. They are read as they are: line
ends are not translated.
"""

import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import urllib.request
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.dataset import why_no_text
from data.token_files import dataset_folder, write_parts
from data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from nanolong import tokenizer_files
from nanolong.errors import UserError, note, require

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Of fewer documents than this the end of each is validation, and no whole one.
FEW_DOCUMENTS = 20
PART = 1 << 20  # characters or bytes that are read and encoded at once
# where most vocabularies end a token: before a word, after a line, and after a mark of Chinese
CUTS = re.compile(r"(?<=[a-z]) (?=[a-z])|(?<=\S\n)(?=\S)|(?<=[。，、])(?=\w)")


# -----------------------------------------------------------------------------
# Texts that need no text from the user


def prepare(dataset, name="", **options):
    """Make python or shakespeare: data/<name or dataset>, which is returned; options of build()."""
    name = name or dataset
    if dataset == "python":
        source = f"standard library of Python {platform.python_version()}"
        return build(name, standard_library(), source, **options)
    file = dataset_folder(name) / "input.txt"
    download(SHAKESPEARE, file, "run python data/prepare.py FILE --tokenizer=char --name=NAME")
    is_known = hashlib.sha256(file.read_bytes()).hexdigest() == SHAKESPEARE_SHA256
    require(is_known, f"{file} is not what {SHAKESPEARE} held (SHA-256): remove it and try again")
    return build(name, {"input.txt": file}, SHAKESPEARE, **{"tokenizer": "char", **options})


def standard_library():
    """Return the source of the standard library, which differs between Pythons: name -> path."""
    skipped = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
    root = Path(sysconfig.get_path("stdlib"))
    files = files_in(root, "*.py")
    files = {name: file for name, file in files.items() if skipped.isdisjoint(name.split("/"))}
    remedy = "install a Python with its sources, or prepare a text of yours"
    require(len(files) >= 100, f"the standard library's source is not in {root}: {remedy}")
    return files


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
            size = int(response.headers.get("Content-Length") or f.tell())
            if f.tell() != size:
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


class NoText(UserError):
    """Says why a file is no text, and what to do: "compressed: unpack it first"."""


def open_documents(name, path, as_bytes):
    """Yield the name of each document of a file, and a stream of its bytes or characters."""
    with open(path, "rb") as f:
        reason = why_no_text(f.read(4096))
    if reason:
        raise NoText(reason)
    if path.suffix.lower() != ".jsonl":
        with open(path, "rb") if as_bytes else open(path, encoding="utf-8", newline="") as f:
            yield name, f
        return
    with open(path, encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                content = text.encode()
            except (ValueError, TypeError, KeyError, AttributeError):
                remedy = "write one (of messages, all of a conversation), or name the file .txt"
                raise NoText(f'JSON without a "text" in line {number}: {remedy}') from None
            stream = io.BytesIO(content) if as_bytes else io.StringIO(text, newline="")
            yield f"{name}:{number}", stream


def read_parts(stream, bar, n=sys.maxsize):
    """Yield the next n bytes or characters of a stream, in parts that a progress bar counts."""
    while n > 0:
        part = stream.read(min(n, PART))
        if not part:
            break
        n -= len(part)
        bar.update(len(part))
        yield part


def hash_fraction(name):
    """Map a name to a number in [0, 1), the same on every machine."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class Texts:
    """The documents of files, and which part of each is validation.

    Whole documents are validation, by a hash of their names; of few the end of each.

    files: name -> path. as_bytes: whether documents are bytes, or UTF-8. Reads all of them once,
    and prints which files are left out. Raises UserError if there is no text.
    """

    def __init__(self, files, source, as_bytes, val_fraction):
        self.files = {}
        self.as_bytes = as_bytes
        self.val_fraction = val_fraction
        self.characters = set()
        # of each document its bytes or characters, and what its name is hashed to
        self.sizes = array("q")
        self.hashes = array("d")
        left_out = {}
        with self.progress("reading", sum(path.stat().st_size for path in files.values())) as bar:
            for name, path in sorted(files.items()):
                n = len(self.sizes)
                try:
                    self.survey(name, path, bar, keep_zeros=len(files) == 1)
                    self.files[name] = path
                except NoText as error:
                    require(len(files) > 1, f"{path} is {error}")
                    del self.sizes[n:], self.hashes[n:]
                    left_out.setdefault(str(error), []).append(name)
        for reason, names in left_out.items():
            others = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            print(f"left out {', '.join(names[:5])}{others} ({reason})")
        require(self.files, f"there is no text in {source}: give a file or folder that holds some")
        self.are_few = len(self.sizes) < FEW_DOCUMENTS

    def progress(self, what, total=0):
        """Show on a terminal how many of the bytes or characters are done."""
        settings = {"unit": "B", "unit_scale": True, "leave": False}
        total = total or sum(self.sizes)
        return tqdm(desc=what, total=total, disable=not sys.stderr.isatty(), **settings)

    def survey(self, name, path, bar, keep_zeros):
        """Read a file for the first time. Raises NoText."""
        zero = b"\0" if self.as_bytes else "\0"
        characters = set()
        try:
            for document, stream in open_documents(name, path, self.as_bytes):
                size = 0
                for part in read_parts(stream, bar):
                    if zero in part and not keep_zeros:
                        raise NoText("not text, but has zero bytes")
                    size += len(part)
                    characters.update("" if self.as_bytes else part)
                self.sizes.append(size)
                self.hashes.append(hash_fraction(document))
        except UnicodeDecodeError:
            raise NoText("not UTF-8: convert it, or use --tokenizer=bytes") from None
        self.characters |= characters

    def documents(self, split, bar):
        """Yield the documents of train or val, each as an iterator of its parts."""
        # at least one document is validation
        limit = max(self.val_fraction, min(self.hashes))
        numbers = itertools.count()
        for name, path in self.files.items():
            for _, stream in open_documents(name, path, self.as_bytes):
                number = next(numbers)
                n_train = sys.maxsize if self.hashes[number] > limit else 0
                if self.are_few:
                    n_train = int(self.sizes[number] * (1 - self.val_fraction))
                train = read_parts(stream, bar, n_train)
                if split == "train":
                    yield train
                elif n_train < sys.maxsize:
                    for _ in train:
                        pass
                    yield read_parts(stream, bar)


# -----------------------------------------------------------------------------
# Encoding and writing


def build(name, files, source, tokenizer="bytes", vocab_size=4096, val_fraction=0.1):
    """Write data/<name>, complete or not at all, and return it. Raises UserError.

    files: name -> path; the split depends on the names. source: where the text is from, for
    meta.json and messages. tokenizer: bytes, char, bpe, or a tokenizer.
    """
    is_plain = bool(name) and Path(name).name == name and not name.startswith((".", "_"))
    folder = dataset_folder(name)
    # data/ holds the modules of this package too
    remedy = "choose letters, digits and dashes"
    require(is_plain and not folder.is_file(), f"--name={name} cannot be a folder: {remedy}")
    require(0 < val_fraction < 1, f"--val_fraction={val_fraction:g} is no fraction: give 0.1 or so")
    remedy = "choose another --name, or remove it first"
    require(not list(folder.glob("*.bin")), f"{folder} exists already: {remedy}")

    texts = Texts(files, source, tokenizer == "bytes", val_fraction)
    tokenizer = make_tokenizer(tokenizer, texts, vocab_size)
    about = {"source": source, "files": len(texts.files)}
    # of few documents validation reads what is before it, too
    with texts.progress("encoding", sum(texts.sizes) * (1 + texts.are_few)) as bar:
        splits = {split: texts.documents(split, bar) for split in ("train", "val")}
        n_tokens = write_dataset(folder, tokenizer, splits, about)
    share = n_tokens["val"] / sum(n_tokens.values())
    part = f"the last {val_fraction:.0%} of each document" if texts.are_few else "whole documents"
    print(
        f"{folder}: {n_tokens['train']:,} training and {n_tokens['val']:,} validation tokens "
        f"({share:.1%}, {part}) from {len(texts.sizes):,} documents, vocabulary "
        f"{tokenizer.vocab_size}"
    )
    return folder


def make_tokenizer(name, texts, vocab_size):
    """Make the tokenizer bytes, char or bpe; another one is returned as it is."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "char":
        return CharTokenizer("".join(sorted(texts.characters)), bos=len(texts.sizes) > 1)
    if name != "bpe":
        return name
    # of a larger one the library would allocate all memory
    limits = f"at least 257, the bytes and <|endoftext|>, and at most {1 << 20}"
    is_possible = 257 <= vocab_size <= 1 << 20
    require(is_possible, f"--vocab_size={vocab_size} is not possible: give {limits}")
    with texts.progress("training the tokenizer") as bar:
        parts = itertools.chain.from_iterable(texts.documents("train", bar))
        tokenizer = train_bpe(parts, vocab_size)
    if tokenizer.vocab_size < vocab_size:
        n = f"{tokenizer.vocab_size:,} of {vocab_size:,}"
        note(f"the training text gives only {n} tokens: no other pair of tokens occurs twice")
    return tokenizer


def encode_parts(tokenizer, parts):
    """Encode a document that comes in parts: yield ids. None of its parts is empty."""
    rest = ""
    for number, part in enumerate(parts):
        if number == 0 and tokenizer.bos is not None:
            yield [tokenizer.bos]
        if isinstance(part, bytes):
            yield np.frombuffer(part, np.uint8)
            continue
        rest += part
        cut = find_cut(rest, tokenizer) if len(rest) >= PART else None
        if cut:
            yield tokenizer.encode(rest[:cut])
            # a space that encode() puts before a text takes the place of the one that is there
            rest = rest[cut + tokenizer.added_bytes :]
    if rest:
        yield tokenizer.encode(rest)


def find_cut(text, tokenizer):
    """Return where a text can be cut, so that both parts encode to what the whole does, or None."""
    for match in itertools.islice(CUTS.finditer(text, len(text) // 2), 100):
        cut = match.start()
        left, right = text[cut - 100 : cut], text[cut : cut + 100]
        both = tokenizer.encode(left) + tokenizer.encode(right[tokenizer.added_bytes :])
        if both == tokenizer.encode(left + right):
            return cut
    return None


def write_dataset(folder, tokenizer, splits, about):
    """Write the token files of splits, and meta.json: a folder, complete or not at all.

    splits: name -> documents, each an iterable of parts. about: what else belongs into meta.json.
    Returns the number of tokens of each split.
    """
    meta = {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "bos_default": isinstance(tokenizer, ByteTokenizer),
        **about,
        "tokens": {},
        "bytes": dict.fromkeys(splits, 0),
        "sha256": {},
    }

    def count(split, parts):
        for part in parts:
            meta["bytes"][split] += len(part if isinstance(part, bytes) else part.encode())
            yield part

    # a temporary folder, so that an interrupted run leaves no half-written dataset
    tmp = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        for split, documents in splits.items():
            encoded = (encode_parts(tokenizer, count(split, parts)) for parts in documents)
            ids = itertools.chain.from_iterable(encoded)
            meta["tokens"][split] = write_parts(tmp, split, ids, tokenizer.vocab_size)
            remedy = "give more text, or another --val_fraction"
            require(meta["bytes"][split], f"there is too little text for {split}.bin: {remedy}")
        for name, content in tokenizer_files.contents(meta["tokenizer"]).items():
            (tmp / name).write_bytes(content)
            meta["sha256"][name] = hashlib.sha256(content).hexdigest()
        content = json.dumps(tokenizer_files.without_contents(meta), indent=1, allow_nan=False)
        (tmp / "meta.json").write_text(content + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    if not folder.is_dir():
        os.rename(tmp, folder)
        return meta["tokens"]
    # It holds a downloaded text. The files that make it a dataset move in last.
    for file in sorted(tmp.iterdir(), key=lambda file: (file.suffix == ".bin", file.name)):
        os.replace(file, folder / file.name)
    tmp.rmdir()
    return meta["tokens"]
