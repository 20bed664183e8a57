"""The header of a GGUF file, of which nothing is trusted, and the values of its tensors: read, and
the header is written with other keys.

GGUFReader of the gguf package takes 18 times as long for a vocabulary of 150,000 tokens, and loops
over whatever length a damaged array claims. The package dequantises.
"""

import math
import struct
from typing import NamedTuple

import gguf
import numpy as np
import torch

MAX_HEADER_BYTES = 1 << 26  # the vocabularies and merges of the largest models take a fifth of it
# type of a metadata value -> code of the struct module
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
# divisors of RoPE's frequencies, in llama alone
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Place(NamedTuple):
    """Where a tensor is in the file."""

    shape: tuple  # in torch's order; the file has it in reverse
    kind: gguf.GGMLQuantizationType
    offset: int
    n_bytes: int


class Header:
    """The bytes of a header, read one value after the other. Errors of reading are of any kind."""

    def __init__(self, data):
        self.data = data
        self.position = 0
        self.spans = {}  # name of a metadata value -> (start, end) of its bytes, name and type too

    def take(self, form):
        """Return the values of a form of the struct module, little-endian."""
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def text(self):
        (n,) = self.take("Q")
        return self.take(f"{n}s")[0].decode()

    def value(self):
        """Return a number, a text, or a list of either."""
        (kind,) = self.take("I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, n = self.take("IQ")
            if kind == STRING:
                return [self.text() for _ in range(n)]
            return list(self.take(f"{n}{NUMBERS[kind]}"))
        (value,) = self.take(NUMBERS[kind])
        if kind == FLOAT32:
            # 1e-05 is stored as 9.999999747378752e-06
            value = float(str(np.float32(value)))
        return value

    def tensor(self, name):
        """Return the Place of a tensor, whose offset counts from the first of all."""
        (n_dims,) = self.take("I")
        dims = self.take(f"{min(n_dims, 5)}Q")
        number, offset = self.take("IQ")
        kind = gguf.GGMLQuantizationType(number)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not 1 <= len(dims) <= 4 or dims[0] % per_block or 0 in dims:
            raise ValueError(f"{name} has the shape {dims}, of type {kind.name}")
        n_bytes = math.prod(dims) // per_block * block_bytes
        return Place(dims[::-1], kind, offset, n_bytes)

    def parse(self, file_size):
        """Return (metadata, tensors: name -> Place)."""
        magic, version, n_tensors, n_values = self.take("4sIQQ")
        # In a file of the other byte order the version is a large number.
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin as a GGUF file of version 2 or 3 does")
        metadata, tensors = {}, {}
        for _ in range(n_values):
            start = self.position
            name = self.text()
            metadata[name] = self.value()
            self.spans[name] = start, self.position
        for _ in range(n_tensors):
            name = self.text()
            tensors[name] = self.tensor(name)
        # the values of tensors follow the header, each at a multiple of the alignment
        start = end = align(self.position, metadata)
        for name, place in sorted(tensors.items(), key=lambda item: item[1].offset):
            tensors[name] = place._replace(offset=start + place.offset)
            if start + place.offset < end:
                raise ValueError(f"{name} overlaps another tensor")
            end = start + place.offset + place.n_bytes
        if end > file_size:
            raise ValueError("it ends before its tensors do")
        return metadata, tensors


def open_file(file):
    """Return (Header, metadata, tensors: name -> Place). A damaged file raises any error."""
    with open(file, "rb") as stream:
        header = Header(stream.read(MAX_HEADER_BYTES))
        return header, *header.parse(stream.seek(0, 2))


def read_tensor(file, place):
    """Return the values of a tensor, float32."""
    # a block of quantised values has them in a row
    rows = np.memmap(file, np.uint8, "r", place.offset, (place.n_bytes,))
    rows = rows.reshape(math.prod(place.shape[:-1]), -1)
    values = gguf.quants.dequantize(rows, place.kind)
    return torch.from_numpy(np.array(values, np.float32)).reshape(place.shape)


def align(n, metadata):
    """Return a number of bytes rounded up, as tensors are placed."""
    alignment = metadata.get("general.alignment", 32)
    if alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    return -(-n // alignment) * alignment


def write_head(header, metadata, places, keys, table):
    """Return the bytes before the tensors' values, and the number of bytes that these take.

    Whatever does not change is copied: offsets of tensors count from the first.
    """
    data, spans = header.data, header.spans
    magic, version, n_tensors, _ = struct.unpack_from("<4sIQQ", data)
    infos = data[max(end for _, end in spans.values()) : header.position]
    n_copied = max(x.offset + x.n_bytes for x in places.values())
    n_copied = align(n_copied - align(header.position, metadata), metadata)
    if table is not None:
        n_tensors += 1
        infos += text_of(ROPE_TABLES[0]) + struct.pack("<IQIQ", 1, len(table), 0, n_copied)
    values = {name: data[start:end] for name, (start, end) in spans.items()}
    values |= {name: pack(name, x, header) for name, x in keys.items()}
    head = struct.pack("<4sIQQ", magic, version, n_tensors, len(values))
    head += b"".join(values.values()) + infos
    return head.ljust(align(len(head), metadata), b"\0"), n_copied


def text_of(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pack(name, value, header):
    """Return the bytes of a metadata value, of the type that it has in the file."""
    kind = {str: STRING, int: UINT32, float: FLOAT32}[type(value)]
    if name in header.spans:
        start = header.spans[name][0] + len(text_of(name))
        (kind,) = struct.unpack_from("<I", header.data, start)
    content = text_of(value) if kind == STRING else struct.pack(f"<{NUMBERS[kind]}", value)
    return text_of(name) + struct.pack("<I", kind) + content
