"""Datasets and tokenizers.

token_files.py  token files, and how datasets are found
dataset.py      the batches of a training run, from a dataset or several
tokenizer.py    text to token ids and back
texts.py        text to a dataset; prepare.py is its script
tasks.py        documents for the tasks of RULER, made rather than read; training does not import it
"""

import subprocess
import sys

from data.dataset import (
    Dataset,
    Mixture,
    Split,
    Sums,
    Text,
    find_documents,
    open_dataset,
)
from data.token_files import (
    dataset_folder,
    has_masks,
    short_name,
    split_mixture,
    vocabulary_size,
    write_tokens,
)
from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    encode_prompt,
    same_vocabulary,
    tokenizer_from_json,
)
from nanolong.errors import require


def prepare_missing(dataset):
    """Make the small datasets python and shakespeare, if they are named and not there yet.

    data/prepare.py does it, in a process of its own: training imports nothing that makes datasets.
    Exits with the status of that process if it fails, after its message. Raises UserError.
    """
    for name in {"python", "shakespeare"} & split_mixture(dataset).keys():
        if any(dataset_folder(name).glob("*.bin")):
            continue
        from filelock import FileLock

        # One of several runs that start together makes it.
        with FileLock(dataset_folder(f".{name}.lock")):
            if not any(dataset_folder(name).glob("*.bin")):
                run_prepare(f"--dataset={name}")


def run_prepare(setting):
    """Run data/prepare.py, and wait for its end: see prepare_missing()."""
    process = subprocess.Popen([sys.executable, dataset_folder("prepare.py"), setting])
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C stops it, too, and it removes unfinished files
        raise
    require(status >= 0, f"data/prepare.py {setting} was ended by signal {-status}: start it again")
    if status:
        sys.exit(status)
