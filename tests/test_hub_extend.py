"""hf.py extend: settings change and weights do not, in folders and in GGUF files."""

import hashlib
import json
import os
import shutil

import interchange
import pytest
import torch
from conftest import assert_refused, assert_success, content
from interchange import LENGTH, imported, load_folder, make_theirs, our_logits, quietly

from nanolong.errors import UserError
from nanolong.hub.extend import extend_to

TOKENS = torch.arange(2 * LENGTH)[None] * 37 % interchange.VOCAB_SIZE
TABLE = [1.0, 1.5, 2.0, 4.0]
LONG = {"long_factor": TABLE, "short_factor": [1.0, 1.1, 1.2, 1.3]}

# -----------------------------------------------------------------------------
# Folders


@pytest.fixture
def write(tmp_path):
    """A function that writes a folder of a case, in the form of transformers 5 or 4."""

    def write(family="llama", rope="default", form=5, edit=None, **changes):
        place = tmp_path / "hf"
        options = {"max_shard_size": "20KB"} if changes.pop("sharded", False) else {}
        make_theirs(family, rope, **changes).save_pretrained(place, **options)
        (place / "tokenizer_config.json").write_text('{"model_max_length": 64}')
        if form == 4:
            change(place, to_older)
        if edit:
            change(place, edit)
        return place

    return write


def change(place, edit):
    values = json.loads((place / "config.json").read_text())
    edit(values)
    (place / "config.json").write_text(json.dumps(values))


def to_older(values):
    """Write RoPE as transformers 4 does."""
    rope = values.pop("rope_parameters")
    if "sliding_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.pop("rope_theta")
    fraction = rope.pop("partial_rotary_factor", None)
    if fraction:
        values["partial_rotary_factor"] = fraction
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def read_config(place):
    return json.loads((place / "config.json").read_text())


def hashes(place):
    """SHA-256 of the weights, by name."""
    files = [file for file in place.rglob("*") if file.suffix in (".safetensors", ".bin")]
    return {file.name: hashlib.sha256(file.read_bytes()).digest() for file in files}


# family, rope_type and form of the file; method and options
SAME = [
    ("llama", "default", 4, "yarn", {"beta_fast": 16.0, "attention_factor": 1.2}),
    ("llama", "default", 5, "pi", {}),
    ("llama", "default", 4, "abf", {"new_base": 2e6}),
    ("llama", "default", 4, "longrope", {"long_factor": TABLE}),
    ("llama", "yarn", 5, "yarn", {}),
    ("llama", "llama3", 4, "llama3", {}),
    ("llama", "linear", 4, "pi", {}),
    ("llama", "yarn, options", 5, "yarn", {"attention_factor": 1.1}),
    ("qwen2", "default", 4, "yarn", {}),
    ("qwen3", "default", 5, "ntk", {}),
    ("gemma3_text", "default", 5, "yarn", {}),
    ("gemma3_text", "default", 4, "ntk", {}),
    ("gemma3_text", "yarn", 4, "yarn", {}),
    ("phi3", "longrope", 4, "longrope", {name: x[:3] for name, x in LONG.items()}),
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
    before, weights = read_config(place), hashes(place)
    model, _ = imported(place, tmp_path, verify=False)
    length = model.config.block_size
    own = (model.config.extension or {"options": {}})["options"]
    kept = {name: x for name, x in own.items() if name != "attention_factor"}
    model.extend(method, 2.0, **kept | options)
    text = quietly(extend_to, place, tmp_path / "out", method, 2.0, options)
    assert f"{length:,} -> {2 * length:,} tokens ({method})" in text
    expected, logits = our_logits(model, TOKENS), load_folder(tmp_path / "out")(TOKENS).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (logits - load_folder(place)(TOKENS).logits).abs().max() > 1e-3
    after = read_config(tmp_path / "out")
    assert after["max_position_embeddings"] == 2 * length
    new = after.keys() - before.keys()
    assert new <= {"original_max_position_embeddings"} and not before.keys() - after.keys()
    assert hashes(tmp_path / "out") == weights


def test_a_larger_base_keeps_the_scaling(write, tmp_path):
    """As of a model of this base and this scaling, at the length that the file has, times 2."""
    for rope in ("llama3", "yarn, mscale", "longrope"):
        place = write("llama", rope, 4 if rope == "llama3" else 5)
        quietly(extend_to, place, tmp_path / rope, "abf", 2.0, {"new_base": 8e6})
        theirs = load_folder(place)
        # compared with a config that transformers itself changes
        theirs.config.rope_parameters["rope_theta"] = 8e6
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        found = load_folder(tmp_path / rope)
        torch.testing.assert_close(found(TOKENS).logits, theirs(TOKENS).logits)
        assert found.config.max_position_embeddings == 8 * LENGTH
        shutil.rmtree(place)


def test_the_files_of_a_hub_folder_are_linked(write, tmp_path, call):
    """Shards are relative links to blobs there; larger files of folders go along."""
    place, blobs = write(sharded=True), tmp_path / "blobs"
    (place / "original").mkdir()
    (place / "original" / "notes.txt").write_text("x" * 11_000_000)
    (place / ".cache").mkdir()
    (place / ".cache" / "lock").touch()
    blobs.mkdir()
    files = [*place.glob("*"), place / "original" / "notes.txt"]
    for file in (x for x in files if x.is_file()):
        file.rename(blobs / file.stem)
        file.symlink_to(os.path.relpath(blobs / file.stem, file.parent))
    before = content(tmp_path)
    assert_success(call("hf.py", "extend", place, tmp_path / "out", "--factor=2"))
    after = content(tmp_path / "out")
    assert content(place) == {x[3:]: y for x, y in before.items() if x.startswith("hf/")}
    assert after.keys() == content(place).keys() - {".cache/lock"} and len(hashes(place)) > 1
    changed = {name for name in after if after[name] != before["hf/" + name]}
    assert changed == {"config.json", "tokenizer_config.json"}
    for name in after:
        file = tmp_path / "out" / name
        is_linked = not file.is_symlink() and file.samefile(blobs / file.stem)
        assert is_linked == (name.endswith((".safetensors", ".txt"))), name
    assert load_folder(tmp_path / "out").config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("limit, expected", [(64, 256), (10**30, 10**30), (1000, 1000)])
def test_the_limit_of_a_tokenizer_is_raised(limit, expected, write, tmp_path):
    place = write()
    (place / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit, "x": "é"}))
    quietly(extend_to, place, tmp_path / "out", "yarn", 4.0, {})
    text = (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert json.loads(text) == {"model_max_length": expected, "x": "é"}


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ],
)
def test_a_quantized_folder_is_extended(quantization, write, tmp_path):
    place = write(edit=lambda x: x.update(quantization_config=quantization))
    quietly(extend_to, place, tmp_path / "out", "yarn", 4.0, {})
    assert read_config(tmp_path / "out")["quantization_config"] == quantization
    assert hashes(tmp_path / "out") == hashes(place)


def test_the_text_half_of_images_and_text_is_extended(write, tmp_path):
    place = write("gemma3_text")

    def wrap(values):
        text = dict(values)
        values.clear()
        values |= {"model_type": "gemma3", "text_config": text, "vision_config": {}}

    change(place, wrap)
    before = read_config(place)
    quietly(extend_to, place, tmp_path / "out", "pi", 8.0, {})
    after = read_config(tmp_path / "out")
    text = after["text_config"]
    assert text["rope_parameters"]["full_attention"]["factor"] == 8
    sliding = before["text_config"]["rope_parameters"]["sliding_attention"]
    assert text["rope_parameters"]["sliding_attention"] == sliding
    assert text["max_position_embeddings"] == 8 * LENGTH and after.keys() == before.keys()


def setting(**values):
    return lambda place: change(place, lambda x: x.update(values))


def leave_a_dangling_link(place):
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to("../blobs/absent")


def rope(kind, **values):
    return setting(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values})


# what is done to a folder, words of the command line, and a part of the message
WRONG = {
    "far keys": (None, ["--method=self-extend"], "no file has method 'self-extend'"),
    "no such method": (None, ["--method=yarm"], "give --method=pi, yarn"),
    "dynamic": (None, ["--method=dynamic-ntk"], "use hf.py import and extend.py"),
    "a factor of 1": (None, ["--factor=1"], "does not extend the context"),
    "too small a factor": (None, ["--factor=1.001"], "leaves 64 tokens"),
    "an option": (None, ["--options=ramp=paper"], "no file has ramp for method 'yarn'"),
    "a bad option": (None, ["--options=beta_fast=0.5"], "beta_slow must be below beta_fast"),
    "no table": (None, ["--method=longrope"], "needs its long_factor"),
    "a smaller base": (None, ["--method=abf", "--options=new_base=100"], "its base is 500000"),
    "import's setting": (None, ["--verify=false"], "--verify is not for extend"),
    "another method": (rope("linear"), [], "extended already, by pi and 4"),
    "a dynamic file": (rope("dynamic"), ["--method=abf"], "its rope_type is dynamic"),
    "another rope_type": (rope("axial"), [], "rope_type"),
    "its own factor": (rope("yarn", attention_factor=1.5), [], "attention factor, 1.5, does not"),
    "remote code": (setting(model_type="mine", auto_map={"AutoConfig": "x.Y"}), [], "'mine', and"),
    "no RoPE": (setting(model_type="gpt2", rope_parameters=None), [], "has no settings of RoPE"),
    "no rotary module": (setting(model_type="gptj"), [], "RoPE of 'gptj' without such settings"),
    "no config": (lambda place: (place / "config.json").unlink(), [], "has no config.json"),
    "a broken config": (lambda place: (place / "config.json").write_text("{"), [], "config.json"),
    "a broken tokenizer": (
        lambda place: (place / "tokenizer_config.json").write_text("{"),
        [],
        "tokenizer_config.json",
    ),
    "a link to nothing": (leave_a_dangling_link, [], "is a link to nothing"),
    "no weights": (lambda place: (place / "model.safetensors").unlink(), [], "has no weights"),
    "an adapter": (lambda place: (place / "adapter_config.json").touch(), [], "holds an adapter"),
    "one RoPE for two kinds of layers": (
        setting(model_type="cohere2", layer_types=["sliding_attention"] * 2 + ["full_attention"]),
        [],
        "only its layers without a window",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused(name, write, tmp_path, call):
    damage, words, message = WRONG[name]
    place = write()
    if damage:
        damage(place)
    before = content(tmp_path)
    done = call("hf.py", "extend", place, tmp_path / "new" / "out", "--method=yarn", *words)
    assert_refused(done, message)
    assert content(tmp_path) == before and [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_a_place_that_is_taken_or_inside_is_refused(write, tmp_path):
    place = write()
    before = content(tmp_path)
    targets = {place: "exists already", place / "x": "lies inside", tmp_path / "x.gguf": "a folder"}
    for target, message in targets.items():
        with pytest.raises(UserError, match=message):
            extend_to(place, target, "yarn", 2.0, {})
    assert content(tmp_path) == before
