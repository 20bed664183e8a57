"""Turn text into a dataset: data/NAME/ with train.bin, val.bin and meta.json.

    python data/prepare.py --dataset=python                      Python's standard library, as bytes
    python data/prepare.py --dataset=shakespeare                 downloads a text, by characters
    python data/prepare.py --dataset=fineweb10B --shards=10      downloads shards of GPT-2 tokens
    python data/prepare.py my.txt --tokenizer=gpt2 --name=mine   a text file, or a folder of them
    python data/prepare.py my.txt --tokenizer=bpe --vocab_size=4096      a vocabulary of its own
    python data/prepare.py --task=niah:1,nth:0.5 --length=256     documents that hide their answer

In a folder of 20 files or more, a hash of the path sends a tenth of the files to validation. With
fewer files, validation is the last tenth of each. In a file of JSON, a list or lines, the "text" of
every row is a document. --task makes documents of data/tasks.py: only their answers are scored.
"""

import math
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

from data import tasks, texts
from data.token_files import read_fractions
from data.tokenizer import BPETokenizer, ByteTokenizer, tokenizer_from_json
from nanolong import tokenizer_files
from nanolong.errors import UserError, require, run_main


@dataclass
class PrepareConfig:
    dataset: str = ""  # a dataset that needs no text of yours: python, shakespeare or fineweb10B
    name: str = ""  # data/NAME is written; by default the dataset's, the file's or the tasks' name
    # bytes (if given, any file is read), char, bpe (trained on this text), an encoding of tiktoken
    # such as gpt2, a tokenizer.json or a folder that has one, or a run folder, for its tokenizer
    tokenizer: str = "bytes"
    vocab_size: int = 4096  # bpe: tokens to learn, with the 256 bytes and <|endoftext|>
    # fraction of the text that is validation; --task adds this fraction of --documents
    val_fraction: float = 0.1
    shards: int = 10  # fineweb10B: training shards to download, of 100M tokens and 200 MB each
    # [task]
    # make documents of these kinds, with relative frequencies: niah, multikey, nth, last
    task: tuple[str, ...] = ()
    length: int = 256  # the most tokens of a document, and so the sequences to train on
    documents: int = 25_000  # documents for training
    # start documents with <bos>, and so prompts of models that train on them (auto: for bytes, and
    # for a tokenizer that does)
    bos: bool | None = None


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


def prepare_tasks(
    folder, words, tokenizer="bytes", length=256, documents=25_000, bos=None, val_fraction=0.1
):
    """Make a dataset of documents of tasks, whose answers are scored. Raises UserError.

    words: kinds and their relative frequencies, as "niah:2", or a kind alone; tokenizer: bytes, or
    a tokenizer; the others are settings of PrepareConfig.
    """
    setting = ",".join(words)
    words = [word if ":" in word else f"{word}:1" for word in words]
    weights = read_fractions(words, f"--task={setting}", most=math.inf)
    is_known = weights.keys() <= {*tasks.KINDS}
    require(is_known, f"--task={setting} names no task: choose from {', '.join(tasks.KINDS)}")
    require(documents, "--documents=0 makes no dataset: give at least 1")
    tokenizer = ByteTokenizer() if tokenizer == "bytes" else tokenizer
    problem = f"--tokenizer={tokenizer} is made of a text, and --task has none"
    is_ready = not isinstance(tokenizer, str)
    require(is_ready, f"{problem}: give bytes, or the tokenizer of a dataset or a run")
    bos = tokenizer.starts_text if bos is None else bos
    problem = "no token of this tokenizer starts a document"
    require(tokenizer.bos is not None or not bos, f"{problem}: leave out --bos")

    n_documents = {"train": documents, "val": math.ceil(documents * val_fraction)}
    first_token = tokenizer.bos if bos else None
    made = tasks.make_documents(weights, tokenizer, first_token, length, n_documents)
    about = {"source": setting, "tasks": list(weights), "bos_default": bos}
    n_tokens = texts.write_files(folder, tokenizer, made, about, masked=True)
    for split, n in n_tokens.items():
        print(f"{folder}: {n_documents[split]:,} {split} documents of {n:,} tokens")


def find_tokenizer(name):
    """Load the tokenizer that --tokenizer names; bytes, char and bpe are made of the text."""
    path = Path(name)
    # a checkpoint has both, a dataset only the first, a Hugging Face directory only the second
    is_checkpoint = (path / "meta.json").is_file() and (path / "model.safetensors").is_file()
    if name in ("bytes", "char", "bpe"):
        return name
    if path.suffix == ".json" or (path / "tokenizer.json").is_file() and not is_checkpoint:
        tokenizer, ends = tokenizer_files.read_tokenizer(path)
        print(ends.describe(tokenizer))
        if tokenizer.bos is None:
            print(f"note: no token separates documents: {path} names no bos_token or eos_token")
        return tokenizer
    if os.sep not in name and not path.is_dir():
        return BPETokenizer.named(name)
    from nanolong import run

    meta = run.read_meta(run.find_checkpoint(name))
    remedy = "prepare its token files with your own program, or choose another --tokenizer"
    problem = f"the model in {name} works on token ids and has no tokenizer"
    require(meta["tokenizer"], f"{problem}: {remedy}")
    tokenizer = tokenizer_from_json(meta["tokenizer"])
    tokenizer.starts_text = meta["bos"] is not None
    return tokenizer


def main(argv=None):
    args = settings.parse(cfg=PrepareConfig, paths="a text file or a folder of them", argv=argv)
    cfg, paths = args.cfg, args.paths
    if len(paths) > 1 or bool(paths) + bool(cfg.dataset) + bool(cfg.task) != 1:
        raise UserError(
            "one dataset is made of one text, or of tasks: give either --dataset=python, "
            "shakespeare or fineweb10B, or one file or folder of yours, or --task=KIND:1"
        )
    of_task = sorted(args.given & {"length", "documents", "bos"})
    problem = f"--{''.join(of_task[:1])} is a setting of --task"
    require(cfg.task or not of_task, f"{problem}: give --task too, or leave it out")
    is_for_bpe = cfg.tokenizer == "bpe" or "vocab_size" not in args.given
    require(is_for_bpe, "--vocab_size is of a vocabulary that is learned: give --tokenizer=bpe too")
    is_for_fineweb = cfg.dataset == "fineweb10B" or "shards" not in args.given
    require(is_for_fineweb, "--shards is of --dataset=fineweb10B: leave it out, or give that")
    # settings that are not given are left to the dataset
    names = ("tokenizer", "val_fraction")
    names += ("length", "documents", "bos") if cfg.task else ("vocab_size",)
    options = {name: getattr(cfg, name) for name in names if name in args.given}
    if "tokenizer" in options:
        options["tokenizer"] = find_tokenizer(cfg.tokenizer)
    if cfg.task:
        kinds = [word.partition(":")[0] for word in cfg.task]
        folder = texts.new_folder(cfg.name or "-".join(kinds), cfg.val_fraction)
        prepare_tasks(folder, cfg.task, **options)
    elif paths:
        folder = prepare_text(paths[0], cfg.name, **options)
    else:
        folder = texts.prepare(cfg.dataset, cfg.name, shards=cfg.shards, **options)
    print(f"train on it with python train.py --dataset={shlex.quote(folder.name)}")


if __name__ == "__main__":
    # as Ctrl-C, so that unfinished files are removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_main(main)
