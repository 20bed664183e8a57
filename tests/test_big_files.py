"""Large models through hf.py: one tensor in memory at a time, bfloat16, and several files."""

import errno
import json
import os

import interchange
import pytest
import torch
from conftest import OFFLINE, assert_success, run_python
from safetensors.torch import load_file
from test_gguf import import_file, write_model
from test_hf import check_weights, save_and_open, write_directory

from model import GPT
from nanolong.errors import UserError
from nanolong.hub import exporting
from nanolong.run import save_model

# what is exported in which dtype from bfloat16: a name of interchange.OURS -> dtype
EXPORTED_DTYPES = {
    "rope, biases of q, k and v": "bfloat16",
    "rope in half of a head": "bfloat16",
    "GPT-2": "bfloat16",
    "GPT-2, scores times 1.3, untied": "float32",
    "rope in half of a head, QK-norm, yarn": "float32",
    "drope": "float32",
}


def make_ours(name):
    """A model of interchange.OURS, with random weights, extended."""
    settings, extension = interchange.OURS[name]
    model = interchange.make_our_model(1, settings)
    if extension:
        method, options = extension
        model.extend(method, 4.0, **options)
    return model


def export(model, target, **options):
    return interchange.capture_output(exporting.export_checkpoint, model, target, **options)


# -----------------------------------------------------------------------------
# bfloat16


@pytest.mark.parametrize("store", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_imported_weights_are_stored_as_asked_for(dtype, store, tmp_path, call, rng):
    """And exported in that dtype: what was bfloat16 comes out as it was."""
    tensors = write_directory(tmp_path / "hf", dtype)
    words = ["import", tmp_path / "hf", tmp_path / "run", f"--store={store}"]
    assert_success(call("hf.py", *words))
    model = GPT.load(tmp_path / "run", dtype=None)
    assert model.stored_dtype == getattr(torch, store)
    rounded = {name: tensor.to(getattr(torch, store)) for name, tensor in tensors.items()}
    check_weights(tmp_path / "run", rounded)

    export(interchange.open_run(tmp_path / "run"), tmp_path / "exported", verify=False)
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == rounded.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == rounded[name].dtype and tensor.equal(rounded[name]), name
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == store


def test_gguf_files_are_stored_in_bfloat16_too(tmp_path, call):
    _, meant = write_model(tmp_path / "model.gguf", "llama-yarn")
    words = ["import", tmp_path / "model.gguf", tmp_path / "run", "--store=bfloat16"]
    assert_success(call("hf.py", *words))
    model = GPT.load(tmp_path / "run")
    assert model.stored_dtype == torch.bfloat16
    down = meant["model.layers.1.mlp.down_proj.weight"]
    assert model.blocks[1].mlp.down.weight.equal(down.bfloat16().float())


@pytest.mark.parametrize("name", EXPORTED_DTYPES)
def test_an_export_of_bfloat16_is_exact(name, tmp_path):
    """It has the tensors of the float32 export; scores that are scaled need float32."""
    model = make_ours(name)
    save_model(model, tmp_path / "narrow" / "step-000000", dtype=torch.bfloat16)
    narrow = interchange.open_run(tmp_path / "narrow")
    wide = save_and_open(GPT.load(tmp_path / "narrow"), tmp_path / "wide")
    assert (narrow.stored_dtype, wide.stored_dtype) == (torch.bfloat16, torch.float32)
    tensors = {}
    for folder, model in (("exported", narrow), ("exported-wide", wide)):
        export(model, tmp_path / folder, verify=False)
        tensors[folder] = load_file(tmp_path / folder / "model.safetensors")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["dtype"] == EXPORTED_DTYPES[name]
    for key, tensor in tensors["exported"].items():
        assert str(tensor.dtype) == f"torch.{EXPORTED_DTYPES[name]}"
        assert tensor.float().equal(tensors["exported-wide"][key]), key


# -----------------------------------------------------------------------------
# Several files

LOGITS_SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.dtype == torch.bfloat16
with torch.no_grad():
    logits = model.float()(torch.arange(40)[None]).logits
save_file({"logits": logits}, sys.argv[2])
"""


@pytest.mark.parametrize("name", ["rope, biases of q, k and v", "GPT-2"])
def test_large_weights_are_written_to_several_files(name, tmp_path, monkeypatch):
    """With their index; imported again they are the same."""
    save_model(make_ours(name), tmp_path / "run" / "step-000000", dtype=torch.bfloat16)
    model = interchange.open_run(tmp_path / "run")
    export(model, tmp_path / "one", verify=False)
    whole = load_file(tmp_path / "one/model.safetensors")
    limit = max(tensor.nbytes for tensor in whole.values())
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", limit)
    export(model, tmp_path / "many", verify=False)

    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    parts = {}
    for file in files:
        part = load_file(tmp_path / "many" / file)
        assert sum(tensor.nbytes for tensor in part.values()) <= limit
        assert all(index["weight_map"][name] == file for name in part)
        parts |= part
    assert parts.keys() == whole.keys()
    assert all(parts[name].equal(whole[name]) for name in whole)

    interchange.import_quietly(tmp_path / "many", tmp_path / "again")
    for ours, expected in zip(
        GPT.load(tmp_path / "again").parameters(),
        GPT.load(tmp_path / "run").parameters(),
        strict=True,
    ):
        assert ours.equal(expected)


def test_transformers_loads_several_files_in_bfloat16(tmp_path, monkeypatch):
    model = make_ours("rope")
    save_model(model, tmp_path / "run" / "step-000000", dtype=torch.bfloat16)
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 20000)
    export(interchange.open_run(tmp_path / "run"), tmp_path / "many", verify=False)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    places = [tmp_path / "many", tmp_path / "logits"]
    assert_success(run_python(LOGITS_SCRIPT, *places, cwd=tmp_path, env=OFFLINE))
    theirs = load_file(tmp_path / "logits")["logits"]
    with torch.no_grad():
        ours = GPT.load(tmp_path / "run")(torch.arange(40)[None])
    assert (ours - theirs).abs().max() < 1e-5


# -----------------------------------------------------------------------------
# Whole or absent


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, make, rng):
    """Neither of an import, nor of an export."""
    write_directory(tmp_path / "hf")
    write_model(tmp_path / "model.gguf")
    model = save_and_open(make(), tmp_path / "run")

    def fill_disk(tensors, file, metadata=None):
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.torch.save_file", fill_disk)
    for action in (
        lambda: interchange.import_quietly(tmp_path / "hf", tmp_path / "new"),
        lambda: import_file(tmp_path / "model.gguf", tmp_path / "new"),
        lambda: export(model, tmp_path / "new", verify=False),
    ):
        with pytest.raises((OSError, UserError), match="No space left"):
            action()
        left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
        assert not {name for name in left if "half" in name or name.startswith(".tmp")}
        assert not list((tmp_path / "new").glob("step-*"))
