"""Datasets, tokenizers and synthetic documents.

dataset.py    token files, and the batches of a training run
mixture.py    several datasets, of which each sequence comes from one
tokenizer.py  text to token ids and back
synthetic.py  passkey documents, made rather than read
ruler.py      documents for the tasks of RULER, made as well
prepare.py    a script: turns text into a dataset
"""

from data.dataset import (
    TASKS,
    Dataset,
    Split,
    TextFile,
    dataset_exists,
    find_dataset,
    random_positions,
    short_name,
    split_mixture,
    task_fractions,
    vocabulary_size,
    write_tokens,
)
from data.mixture import Mixture, open_dataset
from data.ruler import KINDS, WITH_DISTRACTORS, Prompt, default_size, ruler_prompt
from data.synthetic import DIGITS, passkey
from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    decode_stream,
    encode_prompt,
    load_tokenizer_json,
    same_vocabulary,
    tokenizer_from_json,
)


def prepare_missing(dataset):
    """Make those of the small datasets python and shakespeare that are named and not there yet."""
    for name in split_mixture(dataset):
        if name in ("python", "shakespeare") and not dataset_exists(name):
            from data.prepare import prepare

            prepare(name)
