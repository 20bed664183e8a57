"""safetensors files, written and read one tensor at a time.

A file is the length of the header, 8 bytes, little-endian; the header, JSON that is filled up with
spaces to a multiple of 8 bytes; the bytes of all tensors, one after the other.

safetensors' own save_file() needs all tensors in memory. Its safe_open() maps the file, and what
was read of that counts as memory of the process until the file is closed and its tensors are gone.
"""

import json
import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

# safetensors' names of dtypes
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorStream(NamedTuple):
    """Tensors for a file, made one at a time while they are written."""

    # name -> a tensor of that shape and dtype; values are not used, so it can be on the meta device
    like: dict
    # (name, tensor) of all of them, in any order and dtype
    pairs: Iterable


class StoredTensor(NamedTuple):
    """What the header of a file says of a tensor."""

    dtype: str
    shape: tuple


def write_tensors(file, stream, metadata=None):
    """Write a TensorStream as safetensors' save_file() would, to the byte.

    metadata: text by name. Every tensor is converted to its dtype in the file, and freed before the
    next one is made. Raises OSError, and then the file is not whole.
    """
    header, starts = make_header(stream.like, metadata)
    left = dict(stream.like)
    with open(file, "wb") as output:
        output.write(header)
        for name, tensor in stream.pairs:
            like = left.pop(name)
            assert tensor.shape == like.shape, name
            output.seek(starts[name])
            output.write(tensor_bytes(tensor.to(like.dtype)))
            del tensor
    assert not left, f"there is no tensor {min(left)}"


def make_header(like, metadata):
    """Return the bytes before the tensors, and where in the file each tensor starts."""
    # wide dtypes first, so that every number lies at a multiple of its size
    names = sorted(like, key=lambda name: (-like[name].itemsize, name))
    header = {"__metadata__": metadata} if metadata else {}
    starts = {}
    end = 0
    for name in names:
        tensor = like[name]
        starts[name] = end
        end += tensor.nbytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    return text, {name: len(text) + start for name, start in starts.items()}


def tensor_bytes(tensor):
    """Return the bytes of a tensor as a NumPy array; copied only where it is not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_header(file):
    """Return the tensors of a file: name -> StoredTensor. Reads none of them.

    Raises safetensors.SafetensorError for a file that is not whole, and OSError.
    """
    from safetensors import safe_open

    stored = {}
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():
            header = tensors.get_slice(name)
            stored[name] = StoredTensor(header.get_dtype(), tuple(header.get_shape()))
    return stored


def read_tensor(file, name, rows=None):
    """Return a tensor of a file, or a slice of its rows: only that is read.

    It is read while it is used, and takes no memory when it is freed. Do not change it in place.
    """
    from safetensors import safe_open

    # opened again for every tensor, so that what was read of the others is freed
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name) if rows is None else tensors.get_slice(name)[rows]
