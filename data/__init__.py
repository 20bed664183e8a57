"""Datasets, tokenizers and synthetic documents.

dataset.py    token files, and the batches of a training run
tokenizer.py  text to token ids and back
synthetic.py  passkey documents, made rather than read
prepare.py    a script: turns text into a dataset
"""

from data.dataset import (
    HEADER,
    Dataset,
    Split,
    TextFile,
    dataset_exists,
    dataset_folder,
    find_dataset,
    hash_files,
    open_tokens,
    vocabulary_size,
    write_tokens,
)
from data.synthetic import DIGITS, FILLER, NEEDLE, passkey
from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ImportedTokenizer,
    decode_stream,
    decompress,
    encode_prompt,
    load_tokenizer_json,
    same_vocabulary,
    tokenizer_from_json,
)

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "DIGITS",
    "Dataset",
    "FILLER",
    "HEADER",
    "ImportedTokenizer",
    "NEEDLE",
    "Split",
    "TextFile",
    "dataset_exists",
    "dataset_folder",
    "decode_stream",
    "decompress",
    "encode_prompt",
    "find_dataset",
    "hash_files",
    "load_tokenizer_json",
    "open_tokens",
    "passkey",
    "same_vocabulary",
    "tokenizer_from_json",
    "vocabulary_size",
    "write_tokens",
]
