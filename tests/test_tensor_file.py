"""Our writer of safetensors files compared with the safetensors package."""

import json
import weakref

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanolong.tensor_file import TensorStream, read_header, read_tensor, write_tensors


def random_tensors(dtype):
    """Tensors of odd shapes, among them a scalar, an empty one and a transposed one."""
    tensors = {
        "b.weight": torch.randn(3, 5),
        "a.weight": torch.randn(7).double(),
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "ünï": torch.randn(1),
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def stream_of(tensors, names):
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return TensorStream(like, ((name, tensors[name]) for name in names))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_is_that_of_save_file(dtype, metadata, tmp_path, rng):
    """To the byte, in whatever order the tensors come; also without any."""
    tensors = random_tensors(dtype)
    write_tensors(tmp_path / "ours", stream_of(tensors, reversed(tensors)), metadata)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype and loaded[name].equal(tensor)

    write_tensors(tmp_path / "ours", TensorStream({}, []), metadata)
    save_file({}, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_dtypes_can_be_mixed(tmp_path, rng):
    """Each number lies at a multiple of its size, as readers that map the file want it."""
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3).half(),
        "low": torch.randn(5).bfloat16(),
        "steps": torch.arange(3),
        "wide": torch.randn(3).double(),
        "weight": torch.randn(3),
    }
    write_tensors(tmp_path / "file", stream_of(tensors, tensors))
    for name, tensor in load_file(tmp_path / "file").items():
        assert tensor.dtype == tensors[name].dtype and tensor.equal(tensors[name])
    content = (tmp_path / "file").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0
    for name, entry in json.loads(content[8 : 8 + size]).items():
        assert entry["data_offsets"][0] % tensors[name].itemsize == 0


def test_tensors_are_read_one_at_a_time(tmp_path, rng):
    tensors = random_tensors(torch.bfloat16)
    write_tensors(tmp_path / "file", stream_of(tensors, tensors))
    stored = read_header(tmp_path / "file")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name] == ("BF16", tuple(tensor.shape))
        assert read_tensor(tmp_path / "file", name).equal(tensor)
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        read_header(tmp_path / "file")


def test_no_two_tensors_are_kept(tmp_path):
    """Each tensor is freed before the next one is made."""
    made = []

    def make():
        assert not any(reference() is not None for reference in made)
        tensor = torch.ones(4)
        made.append(weakref.ref(tensor))
        return tensor

    like = {str(number): torch.empty(4, device="meta") for number in range(3)}
    pairs = ((str(number), make()) for number in range(3))
    write_tensors(tmp_path / "file", TensorStream(like, pairs))
    assert len(load_file(tmp_path / "file")) == 3


def test_a_tensor_that_is_missing_or_of_another_shape_is_an_error(tmp_path):
    like = {"a": torch.ones(2), "b": torch.ones(2)}
    for pairs in ([("a", like["a"])], [("a", torch.ones(3))]):
        with pytest.raises(AssertionError):
            write_tensors(tmp_path / "file", TensorStream(like, pairs))
