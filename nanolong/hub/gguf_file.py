"""GGUF, the format of llama.cpp: a file's metadata, the places of its tensors, and their values.

A file is a header and data. The header: magic, version, the counts of tensors and of metadata, then
each metadata value (key, type, value) and each tensor (name, dimensions, type, offset). All numbers
are little-endian.

The header is read here, and not by the gguf package, so that no count or offset in it is trusted:
GGUFReader loops over whatever length a damaged array claims. The package dequantises.
"""

import math
import struct
from typing import NamedTuple

import numpy as np
import torch

from nanolong.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# the vocabularies and merges of the largest public models take a fifth of it
MAX_HEADER_BYTES = 1 << 26
# how much of a tensor is dequantised at once
CHUNK_BYTES = 1 << 22

# type of a metadata value -> code of the struct module
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
FLOAT32 = 6
STRING = 8
ARRAY = 9


class GGUFTensor(NamedTuple):
    """Where a tensor is, by the header of its file."""

    # in torch's order; the file has the dimensions in reverse
    shape: tuple
    # a gguf.GGMLQuantizationType
    type: object
    # of its first byte in the file
    offset: int
    n_bytes: int


class GGUFHeader(NamedTuple):
    metadata: dict  # key -> number, text, or list of these
    tensors: dict  # name -> GGUFTensor


def gguf_package():
    """Return the gguf package. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            "reading a GGUF file needs a package that is not installed: pip install gguf"
        ) from None
    return gguf


# -----------------------------------------------------------------------------
# The header


def read_header(file):
    """Return the GGUFHeader of a file. Raises UserError for a file that is none, or not whole."""
    gguf_package()
    try:
        with open(file, "rb") as stream:
            if stream.read(len(MAGIC)) == MAGIC:
                return parse_header(stream, file.stat().st_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a whole GGUF file ({error}): download it again") from None
    raise UserError(
        f"{file} is no GGUF file: give one, or the directory of a Hugging Face checkpoint"
    )


def parse_header(stream, n_bytes):
    """Return the GGUFHeader of a file of n_bytes whose magic was read. Raises ValueError."""
    reader = HeaderReader(stream, min(n_bytes, MAX_HEADER_BYTES))
    version = reader.number("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, and 2 and 3 are known")
    n_tensors, n_values = reader.numbers("Q", 2)
    metadata = {}
    for _ in range(n_values):
        name = reader.new_name(metadata)
        metadata[name] = reader.value(reader.number("I"))
    tensors = {}
    for _ in range(n_tensors):
        name = reader.new_name(tensors)
        tensors[name] = reader.tensor(name)

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"its general.alignment is {alignment!r}")
    # the data begin at the next multiple of the alignment, and the offsets count from there
    start = -(-stream.tell() // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(offset=start + tensor.offset)
    check_places(tensors, n_bytes)
    return GGUFHeader(metadata, tensors)


class HeaderReader:
    """Read the values of a header one after the other; ValueError where it ends before them."""

    def __init__(self, stream, end):
        self.stream = stream
        self.end = end

    def take(self, n_bytes):
        # compared before reading, which takes the memory
        if self.stream.tell() + n_bytes > self.end:
            raise ValueError("it ends within its header")
        return self.stream.read(n_bytes)

    def numbers(self, code, count):
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def number(self, code):
        return self.numbers(code, 1)[0]

    def text(self):
        return self.take(self.number("Q")).decode("utf-8")

    def new_name(self, known):
        """Read the name of a value or tensor, which an error message can hold."""
        name = self.text()
        if not name.isprintable():
            raise ValueError(f"it has the name {name!r:.60}")
        if name in known:
            raise ValueError(f"it has {name} twice")
        return name

    def value(self, kind):
        """Read a metadata value: a number, a text, or a list of either."""
        if kind == STRING:
            return self.text()
        count = None
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == STRING:
                return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        if count is not None:
            return list(self.numbers(NUMBERS[kind], count))
        value = self.number(NUMBERS[kind])
        # 1e-05 is stored as 9.999999747378752e-06
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def tensor(self, name):
        """Read what follows the name of a tensor; the offset counts from the first of all."""
        n_dimensions = self.number("I")
        if not 1 <= n_dimensions <= 4:
            raise ValueError(f"it has a tensor of {n_dimensions} dimensions")
        dimensions = self.numbers("Q", n_dimensions)
        number = self.number("I")
        gguf = gguf_package()
        try:
            kind = gguf.GGMLQuantizationType(number)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(
                f"{name} is of the type {number}, which this gguf package does not know"
            ) from None
        if dimensions[0] % block_size or 0 in dimensions:
            raise ValueError(f"{name} has rows of {dimensions[0]}, not of whole {kind.name}")
        # of Python's integers, which do not overflow
        n_bytes = math.prod(dimensions) // block_size * block_bytes
        return GGUFTensor(dimensions[::-1], kind, self.number("Q"), n_bytes)


def check_places(tensors, n_bytes):
    """Raise ValueError if a tensor is outside of a file of n_bytes, or two overlap.

    So all tensors together take no more memory than the file's size allows.
    """
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"{name} overlaps another tensor")
        end = tensor.offset + tensor.n_bytes
        if end > n_bytes:
            raise ValueError(f"{name} ends at byte {end:,}, and the file has {n_bytes:,}")


# -----------------------------------------------------------------------------
# Tensors


def read_tensor(file, tensor):
    """Return the values of a GGUFTensor: float32, contiguous.

    It is dequantised in parts, so the memory needed is little more than that of the result. Raises
    UserError for a type that the gguf package cannot dequantise.
    """
    quants = gguf_package().quants
    values = torch.empty(tensor.shape)
    rows = values.numpy().reshape(-1, tensor.shape[-1])
    row_bytes = tensor.n_bytes // len(rows)
    rows_at_once = max(1, CHUNK_BYTES // row_bytes)
    with open(file, "rb") as stream:
        stream.seek(tensor.offset)
        for part in np.split(rows, range(rows_at_once, len(rows), rows_at_once)):
            stored = np.frombuffer(stream.read(len(part) * row_bytes), np.uint8)
            try:
                part[:] = quants.dequantize(stored.reshape(len(part), row_bytes), tensor.type)
            except NotImplementedError:
                raise UserError(
                    f"{file} has tensors of the type {tensor.type.name}, which the gguf package "
                    "cannot dequantise: choose another quantisation of the model"
                ) from None
    return values
