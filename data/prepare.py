"""Turn text into a dataset: data/NAME/ with train.bin, val.bin and meta.json.

    python data/prepare.py --dataset=python                      Python's standard library, as bytes
    python data/prepare.py --dataset=shakespeare                 downloads a text, by characters
    python data/prepare.py --dataset=fineweb10B --shards=10      downloads shards of GPT-2 tokens
    python data/prepare.py my.txt --tokenizer=gpt2 --name=mine   a text file, or a folder of them
    python data/prepare.py my.txt --tokenizer=bpe --vocab_size=4096      a vocabulary of its own

Of a folder whole files are validation, by a hash of their path; of fewer than 20 files it is the
last tenth of each. Of a file of JSON, a list or lines, the "text" of every row is a document.
"""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # Python put data/ there, and the packages of the project are in its parent.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from nanolong import settings  # isort: skip (first: it refuses an old Python)

from data import texts
from data.tokenizer import BPETokenizer, tokenizer_from_json
from nanolong import tokenizer_files
from nanolong.errors import UserError, require, run_main


@dataclass
class PrepareConfig:
    dataset: str = ""  # a dataset that needs no text of yours: python, shakespeare or fineweb10B
    name: str = ""  # data/NAME is written; by default the dataset's or the file's name
    # bytes (if it is given, of any file), char, bpe (trained on this text), an encoding of tiktoken
    # such as gpt2, a tokenizer.json or a folder that has one, or a run folder, for its tokenizer
    tokenizer: str = "bytes"
    vocab_size: int = 4096  # bpe: tokens to learn, with the 256 bytes and <|endoftext|>
    val_fraction: float = 0.1  # fraction of the text that is validation
    shards: int = 10  # fineweb10B: training shards to download, of 100M tokens and 200 MB each


def prepare_text(path, name="", **options):
    """Make data/<name> from a text file, or from the text files of a folder. Raises UserError."""
    path = Path(path)
    is_there = path.is_file() or path.is_dir()
    require(is_there, f"there is no file or folder {path}: give the path of a text")
    files = {path.name: path}
    if path.is_dir():
        # neither hidden files nor those in hidden folders
        files = texts.files_in(path, "*")
        files = {name: file for name, file in files.items() if "/." not in f"/{name}"}
    return texts.build(name or path.stem, files, path.resolve().name, **options)


def find_tokenizer(name):
    """Load the tokenizer that --tokenizer names; bytes, char and bpe are made of the text."""
    path = Path(name)
    # a checkpoint has both, a dataset only the first, a Hugging Face directory only the second
    is_checkpoint = (path / "meta.json").is_file() and (path / "model.safetensors").is_file()
    if name in ("bytes", "char", "bpe"):
        return name
    if path.suffix == ".json" or (path / "tokenizer.json").is_file() and not is_checkpoint:
        tokenizer, _ = tokenizer_files.read_tokenizer(path)
        if tokenizer.bos is None:
            print(f"note: no token separates documents: {path} names no bos_token or eos_token")
        return tokenizer
    if os.sep not in name and not path.is_dir():
        return BPETokenizer.named(name)
    from nanolong import run

    spec = run.read_meta(run.find_checkpoint(name)).get("tokenizer")
    remedy = "prepare its token files with your own program, or choose another --tokenizer"
    require(spec, f"the model in {name} works on token ids and has no tokenizer: {remedy}")
    return tokenizer_from_json(spec)


def main(argv=None):
    args = settings.parse(cfg=PrepareConfig, paths="a text file or a folder of them", argv=argv)
    cfg, paths = args.cfg, args.paths
    if len(paths) > 1 or bool(paths) == bool(cfg.dataset):
        raise UserError(
            "one dataset is made of one text: give either --dataset=python, shakespeare or "
            "fineweb10B, or one file or folder of yours"
        )
    is_for_bpe = cfg.tokenizer == "bpe" or "vocab_size" not in args.given
    require(is_for_bpe, "--vocab_size is of a vocabulary that is learned: give --tokenizer=bpe too")
    is_for_fineweb = cfg.dataset == "fineweb10B" or "shards" not in args.given
    require(is_for_fineweb, "--shards is of --dataset=fineweb10B: leave it out, or give that")
    # what is not given is left to the dataset
    names = ("tokenizer", "vocab_size", "val_fraction")
    options = {name: getattr(cfg, name) for name in names if name in args.given}
    if "tokenizer" in options:
        options["tokenizer"] = find_tokenizer(cfg.tokenizer)
    if paths:
        folder = prepare_text(paths[0], cfg.name, **options)
    else:
        folder = texts.prepare(cfg.dataset, cfg.name, shards=cfg.shards, **options)
    print(f"train on it with python train.py --dataset={shlex.quote(folder.name)}")


if __name__ == "__main__":
    # as Ctrl-C, so that what is half-made is removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_main(main)
