"""Turn text into a dataset: data/NAME/ with train.bin, val.bin and meta.json.

    python data/prepare.py --dataset=python                          the embedded default: the standard library's source, as bytes
    python data/prepare.py --dataset=shakespeare                     downloads tinyshakespeare, by characters
    python data/prepare.py --dataset=fineweb10B                      downloads ready GPT-2 shards (--shards of 100M tokens)
    python data/prepare.py my.txt --tokenizer=gpt2 --name=mine       any text file, or a folder of them

Of a single file the last tenth is validation; of a folder whole files are, by a hash of their path.
"""
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import config
import data
from checkpoint import Refused, checkpoint_folder, read_meta
from config import UserError

SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"


@dataclass
class PrepareConfig:
    dataset: str = ""          # a dataset to make from nothing: python, shakespeare or fineweb10B
    name: str = ""             # data/NAME is written; by default the dataset's or the file's name
    tokenizer: str = "bytes"   # bytes, char, a tiktoken encoding such as gpt2, or a run folder whose model's tokenizer it is to be
    val_fraction: float = 0.1  # share of the text that is validation
    raw: bool = False          # write nanoGPT's header-less uint16 instead of shards with a header
    shards: int = 10           # fineweb10B: training shards to download, of 100M tokens and 200 MB each


def prepare(dataset, name="", shards=10, **options):
    """Make a dataset that needs no text from the user, data/<name or dataset>. Raises UserError."""
    check_name(name or dataset)
    if dataset == "python":
        skip = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
        root = Path(sysconfig.get_path("stdlib"))
        files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)}
        if len(files) < 100:
            raise UserError(f"the standard library's source is not in {root}: install a Python with its sources, or prepare a text of yours with python data/prepare.py FILE --name=NAME")
        return build(name or dataset, files, source=f"standard library of Python {platform.python_version()}", **options)
    if dataset == "shakespeare":
        folder = data.HERE / (name or dataset)
        folder.mkdir(exist_ok=True)
        text = download(SHAKESPEARE[0], folder / "input.txt", SHAKESPEARE[1], f"python data/prepare.py FILE --tokenizer=char --name={folder.name}")
        return build(folder.name, {"input.txt": text}, source=SHAKESPEARE[0], **{"tokenizer": "char", **options})
    if dataset == "fineweb10B":
        folder = data.HERE / (name or dataset)
        folder.mkdir(exist_ok=True)
        for file in ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]:
            data.open_tokens(download(FINEWEB + file, folder / file, None, f"put the file at {folder / file}"))
        return folder
    raise UserError(f"there is no dataset {dataset!r} to prepare: choose python, shakespeare or fineweb10B, or give a file or folder of text")


def prepare_text(path, name="", **options):
    """Make data/<name> from a text file, or from the text files of a folder. Raises UserError."""
    path = Path(path)
    if not path.is_file() and not path.is_dir():
        raise UserError(f"there is no file or folder {path}: give the path of a text")
    files = {path.name: path}
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = {p.relative_to(path).as_posix(): p for p in inside}
    return build(name or path.stem, files, source=path.resolve().name, binary=path.is_file(), **options)


def check_name(name):
    """Raise UserError unless data/<name> may be a dataset's folder."""
    if not name or Path(name).name != name or name.startswith((".", "_")) or (data.HERE / name).is_file():
        raise UserError(f"--name={name} is no name for a folder under data/: choose letters, digits and dashes")


def build(name, files, source, tokenizer="bytes", val_fraction=0.1, raw=False, binary=False):
    """Write data/<name>: files maps the names that the split is drawn from to paths. Published by one rename; binary files are left out unless asked for."""
    check_name(name)
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction={val_fraction} is no share: choose one between 0 and 1, such as 0.1")
    target = data.HERE / name
    if list(target.glob("*.bin")):
        raise UserError(f"{target} exists already: choose another --name, or remove it first")
    contents = {key: path.read_bytes() for key, path in sorted(files.items())}
    texts = {key: content for key, content in contents.items() if content and (binary or b"\0" not in content)}
    if tokenizer != "bytes":
        decoded, texts = texts, {}
        for key, content in decoded.items():
            try:
                texts[key] = content.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                if len(files) == 1:
                    raise UserError(f"{files[key]} is not UTF-8 (byte {error.start}): use --tokenizer=bytes, or convert it") from None
    if not texts:
        raise UserError(f"there is no text in {source}: give a file or folder that holds some")
    if len(texts) < len(files):
        print(f"left out {len(files) - len(texts)} of {len(files)} files that are empty or not text")

    if len(texts) == 1:
        (text,) = texts.values()
        cut = int(len(text) * (1 - val_fraction))
        train, val = [text[:cut]], [text[cut:]]
    else:
        draw = {key: int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64 for key in texts}
        limit = max(val_fraction, min(draw.values()))  # at least one file
        train, val = ([text for key, text in texts.items() if (draw[key] <= limit) == wanted] for wanted in (False, True))
    if not train or not all(map(any, (train, val))):
        raise UserError(f"{source} is too short to be split with --val_fraction={val_fraction}: give more text")

    if tokenizer == "bytes":
        tokenizer = data.Bytes()
    elif tokenizer == "char":
        tokenizer = data.Char("".join(sorted(set().union(*texts.values()))), bos=len(texts) > 1)
    elif os.sep in tokenizer or Path(tokenizer).is_dir():
        found = read_meta(checkpoint_folder(tokenizer)).get("tokenizer")
        if found is None:
            raise UserError(f"the model in {tokenizer} works on token ids and has no tokenizer: prepare its token files with your own program, or choose another --tokenizer")
        tokenizer = data.from_json(found)
    else:
        tokenizer = data.BPE.named(tokenizer)
    tmp = data.HERE / f".tmp-{name}-{os.getpid()}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    meta = {"tokenizer": tokenizer.to_json(), "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "bos_default": isinstance(tokenizer, data.Bytes),
            "source": source, "files": len(texts), "tokens": {}, "sha256": {}}
    try:
        for split, documents in (("train", train), ("val", val)):
            start = [] if tokenizer.bos is None else [tokenizer.bos]
            ids = np.concatenate([part for text in documents for part in (np.array(start, np.uint32), np.frombuffer(text, np.uint8) if isinstance(text, bytes)
                                                                          else np.array(tokenizer.encode(text), np.uint32))])
            data.write_tokens(tmp / f"{split}.bin", ids, tokenizer.vocab_size, raw)
            meta["tokens"][split] = len(ids)
            meta["sha256"][split] = hashlib.sha256((tmp / f"{split}.bin").read_bytes()).hexdigest()
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    if target.is_dir():  # with a downloaded text in it: the files move in, those that make it a dataset last
        for file in ("meta.json", "val.bin", "train.bin"):
            os.replace(tmp / file, target / file)
        tmp.rmdir()
    else:
        os.rename(tmp, target)
    print(f"{target}: {meta['tokens']['train']:,} training and {meta['tokens']['val']:,} validation tokens from {len(texts)} file{'s' * (len(texts) > 1)}, vocabulary {tokenizer.vocab_size}")
    return target


def download(url, file, sha256, otherwise):
    """Fetch url to file, unless it is there. Raises UserError that says what, from where, and what to do by hand."""
    if not file.exists():
        part = file.with_suffix(".part")
        try:
            with urllib.request.urlopen(url, timeout=30) as reply, open(part, "wb") as f:
                shutil.copyfileobj(reply, f, 1 << 20)
                if (size := reply.headers.get("Content-Length")) and f.tell() != int(size):
                    raise OSError(f"{f.tell()} of {size} bytes came")
        except (OSError, urllib.error.URLError) as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{file.name} could not be downloaded from {url} ({getattr(error, 'reason', error)}): fetch it by hand, and then {otherwise}") from None
        os.replace(part, file)
    if sha256 and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        raise UserError(f"{file} is not the text that {url} is known to hold (SHA-256 differs): remove it and try again")
    return file


def main():
    cfg, given, paths = config.parse(PrepareConfig, about=__doc__, paths="a text file or a folder of them")
    if cfg.shards < 1:
        raise UserError(f"--shards={cfg.shards} must be at least 1")
    options = {key: getattr(cfg, key) for key in ("tokenizer", "val_fraction", "raw") if key in given}
    if len(paths) > 1 or bool(paths) == bool(cfg.dataset):
        raise UserError("give either --dataset=python|shakespeare|fineweb10B, or one file or folder of text")
    if paths:
        prepare_text(paths[0], cfg.name, **options)
    else:
        folder = prepare(cfg.dataset, cfg.name, shards=cfg.shards, **options)
        print(f"train on it with python train.py --dataset={folder.name}")


if __name__ == "__main__":
    config.main(main, Refused)
