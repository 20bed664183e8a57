"""Datasets, tokenizers and synthetic documents.

dataset.py         token files, and the batches of a training run
tokenizer.py       text to token ids and back
synthetic.py       passkey documents, made rather than read
tokenizer_json.py  Hugging Face's tokenizer.json, for hf.py
prepare.py         a script: turns text into a dataset
"""

from data.dataset import (
    HEADER,
    Dataset,
    Split,
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
    PackagedTokenizer,
    decode_stream,
    decompress,
    encode_prompt,
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
    "NEEDLE",
    "PackagedTokenizer",
    "Split",
    "dataset_exists",
    "dataset_folder",
    "decode_stream",
    "decompress",
    "encode_prompt",
    "find_dataset",
    "hash_files",
    "open_tokens",
    "passkey",
    "same_vocabulary",
    "tokenizer_from_json",
    "vocabulary_size",
    "write_tokens",
]
