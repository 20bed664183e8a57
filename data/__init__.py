"""Datasets, tokenizers and synthetic documents.

token_files.py  token files, and how datasets are found
dataset.py      the batches of a training run, also of several datasets
tokenizer.py    text to token ids and back
tasks.py        documents for the tasks of RULER, made rather than read
texts.py        text to a dataset; prepare.py is its script
"""

from data.dataset import (
    Dataset,
    Mixture,
    Split,
    Text,
    find_documents,
    open_dataset,
    random_positions,
    task_fractions,
)
from data.tasks import DIGITS, KINDS, make_document, size_of
from data.token_files import (
    dataset_folder,
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


def prepare_missing(dataset):
    """Make those of the small datasets python and shakespeare that are named and not there yet."""
    for name in {"python", "shakespeare"} & split_mixture(dataset).keys():
        if any(dataset_folder(name).glob("*.bin")):
            continue
        from filelock import FileLock

        from data.texts import prepare

        # of runs that start together, one makes it
        with FileLock(dataset_folder(f".{name}.lock")):
            if not any(dataset_folder(name).glob("*.bin")):
                prepare(name)
