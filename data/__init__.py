"""Datasets, tokenizers and synthetic documents.

dataset.py    token files, and the batches of a training run
tokenizer.py  text to token ids and back
synthetic.py  passkey documents, made rather than read
prepare.py    a script: turns text into a dataset
"""

from data.dataset import (
    Dataset,
    Split,
    TextFile,
    dataset_exists,
    find_dataset,
    vocabulary_size,
    write_tokens,
)
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
