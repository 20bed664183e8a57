"""hf.py extend: settings change and weights do not, in folders and in GGUF files."""

import functools
import importlib
import json
import os
import shutil
import sys

import gguf
import pytest
import torch
from conftest import assert_refused, assert_success, content
from interchange import (
    LENGTH,
    VOCAB_SIZE,
    assert_close,
    edit_json,
    imported,
    load_folder,
    our_logits,
    quietly,
    write_folder,
)
from makers import metadata, write_gguf
from transformers.models.llama import modeling_llama

import nanolong.hub
from nanolong.hub.extend import extend_to
from nanolong.hub.gguf_header import open_file

TOKENS = torch.arange(2 * LENGTH)[None] * 37 % VOCAB_SIZE
LONG = {"long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}


def extend_ours(model, method, options):
    """Extend an import by 2; options of the same method stay."""
    own = (model.config.extension or {"options": {}})["options"]
    kept = {name: x for name, x in own.items() if name != "attention_factor"}
    model.extend(method, 2.0, **kept | options)
    return our_logits(model, TOKENS)


# -----------------------------------------------------------------------------
# Folders


@pytest.fixture
def write(tmp_path):
    """A function that writes a folder of a case, in the form of transformers 5 or 4."""

    def write(family="llama", rope="default", form=5, tokenizer=64, **config):
        place = tmp_path / "hf"
        write_folder(place, family, rope)
        edit_json(place / "tokenizer_config.json", {"model_max_length": tokenizer})
        values = read_config(place)
        if form == 4:
            to_older(values)
        (place / "config.json").write_text(json.dumps(values | config))
        return place

    return write


def read_config(place, name="config.json"):
    return json.loads((place / name).read_text())


def to_older(values):
    """Write RoPE as transformers 4 does."""
    rope = values.pop("rope_parameters")
    if "sliding_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    if kind == "longrope":  # Phi-3 has three keys there
        values["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def weights(place):
    return {file.name: file.read_bytes() for file in place.rglob("*.safetensors")}


# family, rope_type and form of the file; method and options
SAME = [
    ("llama", "default", 4, "yarn", {"beta_fast": 16.0, "attention_factor": 1.2}),
    ("llama", "default", 5, "pi", {}),
    ("llama", "default", 4, "abf", {"new_base": 2e6}),
    ("llama", "default", 4, "longrope", {"long_factor": LONG["long_factor"]}),
    ("llama", "default", 4, "longrope", {**LONG, "attention_factor": 1.2}),
    ("llama", "llama3", 4, "llama3", {}),
    ("llama", "linear", 4, "pi", {}),
    ("llama", "yarn, options", 5, "yarn", {"attention_factor": 1.1}),
    ("gemma3_text", "default", 5, "yarn", {}),
    ("gemma3_text", "default", 4, "ntk", {}),
    ("gemma3_text", "yarn", 4, "yarn", {}),
    ("phi3", "longrope", 4, "longrope", {name: x[:3] for name, x in LONG.items()}),
    ("phi3", "longrope", 4, "longrope", {}),
    ("phi3", "default", 5, "ntk", {}),
    ("ministral3", "default", 5, "pi", {}),
    ("gpt_neox", "default", 5, "ntk", {}),
]


@pytest.mark.parametrize("family, rope, form, method, options", SAME)
def test_an_extended_folder_computes_what_an_extended_import_does(
    family, rope, form, method, options, write, tmp_path
):
    """Beyond the original length, by settings of the same form, with the same weights."""
    place = write(family, rope, form)
    before, stored = read_config(place), weights(place)
    model, _ = imported(place, tmp_path, verify=False)
    length = model.config.block_size
    text = quietly(extend_to, place, tmp_path / "out", method, 2.0, options)
    assert f"{length:,} -> {2 * length:,} tokens ({method})" in text
    logits = load_folder(tmp_path / "out")(TOKENS).logits
    assert_close(logits, extend_ours(model, method, options))
    assert (logits - load_folder(place)(TOKENS).logits).abs().max() > 1e-3
    after = read_config(tmp_path / "out")
    assert after["max_position_embeddings"] == 2 * length
    assert before.keys() == after.keys() - ({"original_max_position_embeddings"} - before.keys())
    if family == "phi3" and form == 4:
        assert after["rope_scaling"].keys() == {"type", "long_factor", "short_factor"}
    if method == "longrope" and "attention_factor" in options:  # vLLM reads these
        assert after["rope_scaling"]["short_mscale"] == after["rope_scaling"]["long_mscale"] == 1.2
    assert weights(tmp_path / "out") == stored


@pytest.mark.parametrize("rope, form", [("llama3", 4), ("yarn, mscale", 5), ("longrope", 5)])
def test_a_larger_base_keeps_the_scaling(rope, form, write, tmp_path):
    place = write("llama", rope, form)
    quietly(extend_to, place, tmp_path / "out", "abf", 2.0, {"new_base": 8e6})
    theirs, found = load_folder(place), load_folder(tmp_path / "out")
    theirs.config.rope_parameters["rope_theta"] = 8e6
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    assert_close(found(TOKENS).logits, theirs(TOKENS).logits)
    assert found.config.max_position_embeddings == 8 * LENGTH
    if rope == "longrope":  # sqrt(1 + ln 4 / ln 64), which programs compute of 8 times else
        names = ("attention_factor", "short_mscale", "long_mscale")
        factors = [found.config.rope_parameters[name] for name in names]
        assert factors == pytest.approx([(4 / 3) ** 0.5] * 3)


def test_the_files_of_a_hub_folder_are_linked(write, tmp_path, call):
    """Files there are relative links to blobs."""
    place, blobs = write(), tmp_path / "blobs"
    shutil.copy(place / "model.safetensors", place / "model-00002.safetensors")
    for folder in (place / "original", place / ".cache", blobs):
        folder.mkdir()
    (place / "original" / "notes.txt").write_text("x" * 11_000_000)
    (place / ".cache" / "lock").touch()
    for file in [*place.glob("*.*s*"), place / "original" / "notes.txt"]:
        file.rename(blobs / file.stem)
        file.symlink_to(os.path.relpath(blobs / file.stem, file.parent))
    before = content(place)
    assert_success(call("hf.py", "extend", place, tmp_path / "out", "--factor=2"))
    after = content(tmp_path / "out")
    assert content(place) == before and len(weights(place)) > 1
    assert after.keys() == before.keys() - {".cache/lock"}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"config.json", "tokenizer_config.json"}
    for name in after:
        file = tmp_path / "out" / name
        is_linked = not file.is_symlink() and file.samefile(place / name)
        assert is_linked == name.endswith((".safetensors", ".txt")), name


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    "quantization, limit, expected", [(AWQ, 64, 256), (BITSANDBYTES, 10**30, 10**30)]
)
def test_other_settings_stay(quantization, limit, expected, write, tmp_path):
    place = write(tokenizer=limit, quantization_config=quantization)
    quietly(extend_to, place, tmp_path / "out", "yarn", 4.0, {})
    assert read_config(tmp_path / "out")["quantization_config"] == quantization
    assert read_config(tmp_path / "out", "tokenizer_config.json")["model_max_length"] == expected


def test_the_text_half_of_images_and_text_is_extended(write, tmp_path):
    place = write("gemma3_text")
    text = read_config(place)
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (place / "config.json").write_text(json.dumps(whole))
    quietly(extend_to, place, tmp_path / "out", "pi", 8.0, {})
    text["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    text["max_position_embeddings"] *= 8
    assert read_config(tmp_path / "out") == whole


def test_folders_do_not_need_the_gguf_package(monkeypatch):
    monkeypatch.setattr(nanolong, "hub", nanolong.hub)
    for name in [name for name in sys.modules if name.startswith("nanolong.hub")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in ("transfer", "extend"):
        importlib.import_module(f"nanolong.hub.{name}")


# -----------------------------------------------------------------------------
# GGUF files


def read_tensors(file):
    """The bytes of each tensor, and the metadata."""
    _, found, places = open_file(file)
    data = file.read_bytes()
    return {name: data[x.offset : x.offset + x.n_bytes] for name, x in places.items()}, found


# one of GGUFS, method and options, other keys of the file
GGUF = [
    ("llama", "yarn", {}, metadata({}, alignment=64)),
    ("llama", "llama3", {}, metadata({}, alignment=64)),
    ("llama-f16-no-gqa", "longrope", {"long_factor": [1.0] * 4 + [3.0] * 4}, None),
    ("llama-q8-linear", "pi", {}, None),
    ("llama-yarn", "yarn", {"attention_factor": 1.3}, None),
    ("qwen2-q4-yarn", "yarn", {"attention_factor": 1.4}, None),
    ("qwen3-q8-wide-heads", "ntk", {}, metadata({"qwen3.rope.freq_base": None})),
    ("smollm3", "abf", {}, None),
]


@pytest.mark.parametrize("name, method, options, edit", GGUF)
def test_an_extended_file_computes_what_an_extended_import_does(
    name, method, options, edit, tmp_path
):
    file, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    write_gguf(file, name, edit)
    before, old = read_tensors(file)
    quietly(extend_to, file, out, method, 2.0, options)
    after, new = read_tensors(out)
    # a table of LongRoPE or Llama 3 is one more tensor
    has_table = method in ("llama3", "longrope")
    assert list(after) == [*before, *["rope_freqs.weight"] * has_table]
    assert before == {key: after[key] for key in before} and list(new)[: len(old)] == list(old)
    reader = gguf.GGUFReader(out)
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == after
    model, _ = imported(file, tmp_path, verify=False)
    assert_close(
        our_logits(imported(out, tmp_path)[0], TOKENS), extend_ours(model, method, options)
    )


def test_parts_are_linked(tmp_path, monkeypatch, call):
    monkeypatch.setattr(
        gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=12)
    )
    write_gguf(tmp_path / "model.gguf", "llama")
    files = sorted(tmp_path.glob("*.gguf"))
    before = [read_tensors(file) for file in files]
    out = tmp_path / "out-00001-of-00002.gguf"
    assert_success(call("hf.py", "extend", files[0], out, "--method=pi", "--factor=2"))
    other = tmp_path / "out-00002-of-00002.gguf"
    assert other.samefile(files[1]) and len(files) == 2
    tensors, found = read_tensors(out)
    assert tensors == before[0][0]
    assert found["llama.context_length"] == 2 * LENGTH and found["split.count"] == 2
    other.unlink()
    shutil.move(files[1], tmp_path / "x")
    before = content(tmp_path)
    for target, phrase in (("a.gguf", "does not end in"), ("b-00001-of-00002.gguf", "is absent")):
        assert_refused(call("hf.py", "extend", files[0], tmp_path / target), phrase)
    assert content(tmp_path) == before


# -----------------------------------------------------------------------------
# What is refused: one sentence, nothing written, nothing changed


def setting(**values):
    return lambda place: edit_json(place / "config.json", values)


def rope(kind, **values):
    return setting(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values})


def without(name, link=""):
    """Remove a file, or replace it by a link to nothing."""

    def edit(place):
        (place / name).unlink()
        if link:
            (place / name).symlink_to(link)

    return edit


KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
ABF, TOKENIZER = "--method=abf", "tokenizer_config.json"
WINDOW = {"general.architecture": "gemma2", "gemma2.context_length": 64}
WINDOW |= {"gemma2.rope.freq_base": 1e4, "gemma2.attention.sliding_window": 16}
WINDOW |= {"gemma2.rope.dimension_count": 16}
BLOOM = {"general.architecture": "bloom", "bloom.context_length": 64}
UNKNOWN = "no file has method 'dynamic-ntk' in its settings: give --method=pi, yarn, ntk, abf, "
UNKNOWN += "llama3, longrope, or use hf.py import and extend.py"
# "hf" for a folder, or one of GGUFS, what is done to it, a word of the command line, a part of the
# message, and the target if it matters
WRONG = [
    ("hf", None, "--method=dynamic-ntk", UNKNOWN),
    ("hf", None, "--method=self-extend", "or for transformers nanolong.hub.attention"),
    ("hf", None, "--factor=1.001", "does not extend the context of 64"),
    ("hf", None, "--options=ramp=paper", "no file has ramp for method 'yarn'"),
    ("hf", None, "--options=beta_fast=0.5", "beta_slow must be below beta_fast"),
    ("hf", None, "--method=longrope", "needs its long_factor"),
    ("hf", None, ABF, "its base is 500000"),
    ("hf", None, "--verify=false", "--verify is not for extend"),
    ("hf", rope("linear"), "", "extended already, by pi and 4"),
    ("hf", rope("dynamic"), ABF, "its rope_type is dynamic"),
    ("hf", rope("axial"), "", "rope_type 'axial' is not one of"),
    ("hf", rope("yarn", attention_factor=1.5), "", "attention factor, 1.5, does not"),
    ("hf", setting(model_type="mine", auto_map={"AutoConfig": "x.Y"}), "", "'mine', and"),
    ("hf", setting(model_type="gpt2", rope_parameters=None), "", "has no settings of RoPE"),
    ("hf", setting(model_type="gptj"), "", "RoPE of 'gptj' without such settings"),
    ("hf", setting(model_type="phi3", pad_token_id=0), "", "does not compute method 'yarn'"),
    ("hf", setting(model_type="cohere2", layer_types=KINDS), "", "only its layers without"),
    ("hf", setting(model_type="llama4_text"), "", "norm after the rotation removes"),
    ("hf", without("config.json"), "", "has no config.json"),
    ("hf", lambda place: (place / TOKENIZER).write_text("{"), "", TOKENIZER),
    ("hf", without("model.safetensors", link="absent"), "", "is a link to nothing"),
    ("hf", without("model.safetensors"), "", "has no weights"),
    ("hf", None, "", "exists already", "hf"),
    ("hf", None, "", "lies inside", "hf/x"),
    ("hf", None, "", "is a folder: name a folder", "x.gguf"),
    ("llama", metadata(BLOOM), "", "no keys of RoPE"),
    ("llama", metadata(WINDOW), "", "only layers without a window"),
    ("llama", None, "--options=beta_fast=16", "llama.cpp has no beta_fast"),
    ("llama-llama3", None, "--method=llama3", "is one more tensor"),
    ("llama-llama3", None, f"{ABF} --options=new_base=1e6", "a tensor, which depends on the base"),
    ("qwen2", None, "--method=llama3", "is one more tensor, which only a whole 'llama'"),
    ("llama", None, "", "is a file: name a .gguf, not", "x.bin"),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[3])
def test_a_wrong_request_is_refused(row, write, tmp_path, call):
    source, edit, word, message, *target = row
    if source == "hf":
        place = write()
        if edit:
            edit(place)
    else:
        place = tmp_path / "model.gguf"
        write_gguf(place, source, edit)
    target = target or ["out" if source == "hf" else "out.gguf"]
    check_refused(call, place, target[0], word, message)


@pytest.mark.parametrize("name, factor", [("inv_freq", 1 + 2e-6), ("attention_scaling", 1.001)])
def test_a_class_that_computes_otherwise_is_refused(name, factor, write, monkeypatch, call):
    class Other(modeling_llama.LlamaRotaryEmbedding):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, name, getattr(self, name) * factor)

    monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", Other)
    check_refused(call, write(), "out", "", "method 'yarn' in this family (other frequencies)")


def check_refused(call, source, target, word, message):
    before = content(source.parent)
    done = call("hf.py", "extend", source, source.parent / target, *word.split())
    assert_refused(done, message)
    assert content(source.parent) == before and list(source.parent.iterdir()) == [source]
