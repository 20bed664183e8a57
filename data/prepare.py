"""Turn text into a dataset: data/NAME/ with train.bin, val.bin and meta.json.

    python data/prepare.py --dataset=python                      Python's standard library, as bytes
    python data/prepare.py --dataset=shakespeare                 downloads a text, by characters
    python data/prepare.py --dataset=fineweb10B --shards=10      downloads shards of GPT-2 tokens
    python data/prepare.py my.txt --tokenizer=gpt2 --name=mine   a text file, or a folder of them
    python data/prepare.py my.txt --tokenizer=bpe --vocab_size=4096      a vocabulary of its own

Of a folder whole files are validation, by a hash of their path. Of fewer than 20 files, and where
whole files would be too large or too small a share, it is the last tenth of each file.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import urllib.request
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # Python put data/ there, and the packages of the project are in its parent.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from nanolong import settings  # isort: skip (first: --help before torch is imported)

import numpy as np

from data.dataset import dataset_folder, open_tokens, write_tokens
from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    tokenizer_from_json,
    train_bpe,
)
from nanolong import tokenizer_files
from nanolong.errors import UserError, require, run_main

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Of fewer files than this the end of each is validation, and no whole file.
FEW_FILES = 20
# No vocabulary known is as large, and the library takes memory for this many tokens at once.
MAX_VOCAB_SIZE = 1 << 20
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"


@dataclass
class PrepareConfig:
    dataset: str = ""  # a dataset that needs no text of yours: python, shakespeare or fineweb10B
    name: str = ""  # data/NAME is written; by default the dataset's or the file's name
    # bytes, char, bpe (trained on this text), a tiktoken encoding such as gpt2, a tokenizer.json or
    # a folder that has one, or a run folder, for the tokenizer of its model
    tokenizer: str = "bytes"
    vocab_size: int = 4096  # bpe: tokens to learn, with the 256 bytes and <|endoftext|>
    val_fraction: float = 0.1  # fraction of the text that is validation
    raw: bool = False  # write nanoGPT's uint16 without a header instead of shards with one
    shards: int = 10  # fineweb10B: training shards to download, of 100M tokens and 200 MB each


# -----------------------------------------------------------------------------
# What to prepare


def prepare(dataset, name="", shards=10, **options):
    """Make a dataset that needs no text from the user: data/<name or dataset>, which is returned.

    options: those of build(). Raises UserError.
    """
    name = name or dataset
    check_name(name)
    folder = dataset_folder(name)
    if dataset == "python":
        source = f"standard library of Python {platform.python_version()}"
        return build(name, standard_library(), source, **options)
    if dataset == "shakespeare":
        instruction = f"run python data/prepare.py FILE --tokenizer=char --name={shlex.quote(name)}"
        text = download(SHAKESPEARE, folder / "input.txt", SHAKESPEARE_SHA256, instruction)
        options = {"tokenizer": "char", **options}
        return build(name, {"input.txt": text}, SHAKESPEARE, **options)
    if dataset == "fineweb10B":
        for part in ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]:
            file = folder / f"fineweb_{part}.bin"
            download(FINEWEB + file.name, file, None, f"put the file at {file}")
            # raises if what was downloaded is damaged
            open_tokens(file)
        return folder
    raise UserError(
        f"there is no dataset {dataset!r} to prepare: choose python, shakespeare or fineweb10B, or "
        "give a file or folder of text"
    )


def standard_library():
    """Return the files of the standard library's source, which differs between Python versions.

    Returns name -> path. Raises UserError.
    """
    skipped = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
    root = Path(sysconfig.get_path("stdlib"))
    files = files_in(root, "*.py")
    files = {name: file for name, file in files.items() if skipped.isdisjoint(name.split("/"))}
    if len(files) < 100:
        raise UserError(
            f"the standard library's source is not in {root}: install a Python with its sources, "
            "or prepare a text of yours with python data/prepare.py FILE --name=NAME"
        )
    return files


def prepare_text(path, name="", **options):
    """Make data/<name> from a text file, or from the text files of a folder. Raises UserError."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}: give the path of a text")
    files = {path.name: path}
    if path.is_dir():
        # neither hidden files nor those in hidden folders
        files = {name: file for name, file in files_in(path, "*").items() if "/." not in f"/{name}"}
    source = path.resolve().name
    return build(name or path.stem, files, source, binary=path.is_file(), **options)


def files_in(folder, pattern):
    """Find the files under a folder: relative path -> path."""
    files = [file for file in folder.rglob(pattern) if file.is_file()]
    return {file.relative_to(folder).as_posix(): file for file in files}


def check_name(name):
    """Raise UserError unless data/<name> may be the folder of a dataset."""
    is_plain = bool(name) and Path(name).name == name and not name.startswith((".", "_"))
    # data/ holds the modules of this package too
    if not is_plain or dataset_folder(name).is_file():
        raise UserError(
            f"--name={name} cannot be a folder under data/: choose letters, digits and dashes"
        )


# -----------------------------------------------------------------------------
# From files to a dataset: read, split, encode, write


def build(
    name,
    files,
    source,
    tokenizer="bytes",
    vocab_size=None,
    val_fraction=0.1,
    raw=False,
    binary=False,
):
    """Write data/<name>, complete or not at all, and return it. Raises UserError.

    files: name -> path; the split depends on the names. source: where the text is from, for
    meta.json and messages. tokenizer, vocab_size, val_fraction and raw are those of PrepareConfig.
    binary: keep files with null bytes.
    """
    check_name(name)
    check_vocab_size(tokenizer, vocab_size)
    require(0 < val_fraction < 1, f"--val_fraction={val_fraction:g} is no fraction: give 0.1 or so")
    folder = dataset_folder(name)
    if list(folder.glob("*.bin")):
        raise UserError(f"{folder} exists already: choose another --name, or remove it first")

    texts = read_texts(files, source, as_bytes=tokenizer == "bytes", binary=binary)
    train, val, val_texts = split_texts(texts, val_fraction)
    if not any(train) or not any(val):
        raise UserError(
            f"{source} is too short to be split with --val_fraction={val_fraction}: give more text"
        )
    tokenizer = make_tokenizer(tokenizer, texts, train, vocab_size)
    about = {"source": source, "files": len(texts)}
    n_tokens = write_dataset(folder, tokenizer, {"train": train, "val": val}, about, raw)

    n_files = "1 file" if len(texts) == 1 else f"{len(texts)} files"
    print(
        f"{folder}: {n_tokens['train']:,} training and {n_tokens['val']:,} validation tokens from "
        f"{n_files}, vocabulary {tokenizer.vocab_size}"
    )
    share = n_tokens["val"] / sum(n_tokens.values())
    print(f"validation, {share:.1%} of the tokens: {val_texts}")
    return folder


def check_vocab_size(tokenizer, vocab_size):
    """Raise UserError for a vocab_size, None if it is not given, that cannot be."""
    if vocab_size is None:
        return
    if tokenizer != "bpe" or not 257 <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"--vocab_size={vocab_size} is not possible: give --tokenizer=bpe too, and at least "
            f"257, the bytes and <|endoftext|>, and at most {MAX_VOCAB_SIZE}"
        )


def read_texts(files, source, as_bytes, binary):
    """Read the files that hold text: name -> bytes, or str unless as_bytes.

    Raises UserError if there is none, and if the only file is not UTF-8.
    """
    texts = {}
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        if not content or (b"\0" in content and not binary):
            continue
        try:
            text = content if as_bytes else content.decode("utf-8").replace("\r\n", "\n")
            texts[name] = text
        except UnicodeDecodeError as error:
            if len(files) == 1:
                raise UserError(
                    f"{path} is not UTF-8 (byte {error.start}): use --tokenizer=bytes, or convert "
                    "it"
                ) from None
    if not texts:
        raise UserError(f"there is no text in {source}: give a file or folder that holds some")
    left_out = len(files) - len(texts)
    if left_out:
        print(f"left out {left_out} of {len(files)} files that are empty or not text")
    return texts


def split_texts(texts, val_fraction):
    """Split name -> text into training and validation: two lists of texts, and the second in words.

    Whole texts are validation, by a hash of their names, and at least one. But a few texts are not
    alike: where there are few, or whole ones would be more than twice or less than half of
    val_fraction, the end of each text is validation.
    """
    fractions = {name: hash_fraction(name) for name in texts}
    limit = max(val_fraction, min(fractions.values()))
    val = {name: text for name, text in texts.items() if fractions[name] <= limit}
    share = sum(map(len, val.values())) / sum(map(len, texts.values()))
    expected = max(val_fraction, 1 / len(texts))
    if len(texts) >= FEW_FILES and expected / 2 <= share <= expected * 2:
        train = [text for name, text in texts.items() if name not in val]
        return train, list(val.values()), f"whole files, {some_names(val)}"

    train, val = [], []
    for text in texts.values():
        n_train = int(len(text) * (1 - val_fraction))
        train.append(text[:n_train])
        val.append(text[n_train:])
    # one of a few characters may have no beginning
    return (
        list(filter(None, train)),
        val,
        f"the last {100 * val_fraction:.3g}% of each file, {some_names(texts)}",
    )


def some_names(texts):
    """List the first names of texts, and count the others."""
    names = sorted(texts)
    others = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + others


def hash_fraction(name):
    """Map a name to a number in [0, 1), the same on every machine."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def make_tokenizer(name, texts, train, vocab_size):
    """Make the tokenizer that --tokenizer names.

    texts: name -> text; char has all their characters. train: the texts that bpe is trained on, to
    vocab_size tokens; None is the default.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "char":
        characters = "".join(sorted(set().union(*texts.values())))
        return CharTokenizer(characters, bos=len(texts) > 1)
    if name == "bpe":
        vocab_size = vocab_size or PrepareConfig.vocab_size
        tokenizer = train_bpe(train, vocab_size)
        if tokenizer.vocab_size < vocab_size:
            print(
                f"note: the training text gives only {tokenizer.vocab_size:,} of {vocab_size:,} "
                "tokens: no other pair of tokens occurs twice"
            )
        return tokenizer

    path = Path(name)
    # a checkpoint has both, a dataset only the first, a Hugging Face directory only the second
    is_checkpoint = (path / "meta.json").is_file() and (path / "model.safetensors").is_file()
    if path.suffix == ".json" or (path / "tokenizer.json").is_file() and not is_checkpoint:
        tokenizer, _ = tokenizer_files.read_tokenizer(path)
        if tokenizer.bos is None:
            print(f"note: no token separates documents: {path} names no bos_token or eos_token")
        return tokenizer
    if os.sep not in name and not path.is_dir():
        return BPETokenizer.named(name)

    # It imports torch, which nothing else here needs.
    from nanolong import run

    spec = run.read_meta(run.find_checkpoint(name)).get("tokenizer")
    if spec is None:
        raise UserError(
            f"the model in {name} works on token ids and has no tokenizer: prepare its token files "
            "with your own program, or choose another --tokenizer"
        )
    return tokenizer_from_json(spec)


def encode_documents(tokenizer, documents):
    """Encode texts, each after <bos> where the tokenizer has one: ids (tokens,)."""
    parts = []
    for text in documents:
        if tokenizer.bos is not None:
            parts.append(np.array([tokenizer.bos], np.uint32))
        if isinstance(text, bytes):
            parts.append(np.frombuffer(text, np.uint8))
        else:
            parts.append(np.array(tokenizer.encode(text), np.uint32))
    return np.concatenate(parts)


def write_dataset(folder, tokenizer, splits, about, raw):
    """Write the token files of splits (name -> texts), and meta.json.

    about: what else belongs into meta.json. raw: token files without a header.
    Returns the number of tokens of each split.
    """
    meta = {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "bos_default": isinstance(tokenizer, ByteTokenizer),
        **about,
        "tokens": {},
        "sha256": {},
    }
    # a temporary folder, so that an interrupted run leaves no half-written dataset
    tmp = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        for split, documents in splits.items():
            file = tmp / f"{split}.bin"
            ids = encode_documents(tokenizer, documents)
            write_tokens(file, ids, tokenizer.vocab_size, raw)
            meta["tokens"][split] = len(ids)
            meta["sha256"][split] = hash_file(file)
        for name, content in tokenizer_files.contents(meta["tokenizer"]).items():
            (tmp / name).write_bytes(content)
            meta["sha256"][name] = hash_file(tmp / name)
        content = json.dumps(tokenizer_files.without_contents(meta), indent=1, allow_nan=False)
        (tmp / "meta.json").write_text(content + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise

    if folder.is_dir():
        # It holds a downloaded text. The files that make it a dataset move in last.
        for file in sorted(tmp.iterdir(), key=lambda file: (file.suffix == ".bin", file.name)):
            os.replace(file, folder / file.name)
        tmp.rmdir()
    else:
        os.rename(tmp, folder)
    return meta["tokens"]


def hash_file(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


# -----------------------------------------------------------------------------
# Downloads


def download(url, file, sha256, instruction):
    """Download url to file, unless it is there, and return file.

    sha256: what the file must hash to, or None. instruction: what to do with the file where it can
    only be downloaded manually. Raises UserError.
    """
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        try:
            download_part(url, part)
        except OSError as error:
            part.unlink(missing_ok=True)
            reason = getattr(error, "reason", error)
            raise UserError(
                f"{file.name} could not be downloaded from {url} ({reason}): download it manually, "
                f"and then {instruction}"
            ) from None
        os.replace(part, file)
    if sha256 and hash_file(file) != sha256:
        raise UserError(
            f"{file} is not the text that {url} is known to hold (SHA-256 differs): remove it and "
            "try again"
        )
    return file


def download_part(url, part):
    """Download url to part. Raises OSError if the connection ends too early."""
    with urllib.request.urlopen(url, timeout=30) as response, open(part, "wb") as f:
        shutil.copyfileobj(response, f, 1 << 20)
        size = response.headers.get("Content-Length")
        if size and f.tell() != int(size):
            raise OSError(f"only {f.tell()} of {size} bytes arrived")


def main(argv=None):
    args = settings.parse(cfg=PrepareConfig, paths="a text file or a folder of them", argv=argv)
    cfg, paths = args.cfg, args.paths
    if len(paths) > 1 or bool(paths) == bool(cfg.dataset):
        raise UserError(
            "one dataset is made of one text: give either --dataset=python, shakespeare or "
            "fineweb10B, or one file or folder of yours"
        )
    # what is not given is left to build(), or to the dataset
    names = ("tokenizer", "vocab_size", "val_fraction", "raw")
    options = {name: getattr(cfg, name) for name in names if name in args.given}
    if paths:
        folder = prepare_text(paths[0], cfg.name, **options)
    else:
        folder = prepare(cfg.dataset, cfg.name, shards=cfg.shards, **options)
    print(f"train on it with python train.py --dataset={shlex.quote(folder.name)}")


if __name__ == "__main__":
    run_main(main)
