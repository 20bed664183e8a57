"""hf.py: families in and out, what is refused, lengths, hub ids, nanoGPT's checkpoints, exports."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from conftest import assert_refused, assert_success, content, run_python
from interchange import (
    FAMILIES,
    GEMMA3,
    GPT2,
    OURS,
    REFUSED,
    ROPES,
    TIED,
    VOCAB_SIZE,
    all_cases,
    assert_close,
    compare,
    edit_json,
    imported,
    load_folder,
    make_ours,
    make_theirs,
    our_logits,
    quietly,
    write_folder,
)
from makers import GGUFS, byte_level, metadata, write_gguf, write_tokenizer
from safetensors.torch import load_file, save_file

import kernels
from data import ByteTokenizer, CharTokenizer, ImportedTokenizer, same_vocabulary
from data.tokenizer import tokenizer_from_json
from model import GPT
from nanolong.errors import UserError
from nanolong.hub import convert, families, verify
from nanolong.hub.tokenizer import make_exported
from nanolong.hub.transfer import export_to, import_to

TOKENS = torch.arange(140)[None] * 37 % VOCAB_SIZE  # more than the original length and the windows
ORIGINAL = "original_max_position_embeddings"

# -----------------------------------------------------------------------------
# Families and RoPE types


# one RoPE type of each family, another for the next
ONE_EACH = [
    [case for case in all_cases() if case[0] == family]
    for family in FAMILIES
    if "," not in family or "scores" in family
]
ONE_EACH = [cases[number % len(cases)] for number, cases in enumerate(ONE_EACH)]
CASES = [
    pytest.param(*case, marks=() if case in ONE_EACH else pytest.mark.slow) for case in all_cases()
]


@pytest.mark.parametrize("family, rope", CASES)
def test_a_family_agrees_with_transformers(family, rope, tmp_path):
    differences, refused = compare(family, rope, tmp_path, seed=len(family + rope))
    assert max(x or 0.0 for x in differences) < 1e-5, differences
    assert bool(refused) == (rope == "dynamic" or family == "bloom"), refused


def test_each_family_and_rope_type_is_compared():
    assert {family.partition(",")[0] for family, _ in all_cases()} == families.FAMILIES.keys()
    assert {rope for _, rope in all_cases()} == ROPES.keys()


@pytest.mark.parametrize("name", OURS)
def test_a_model_of_ours_is_exported_and_imported(name, tmp_path):
    model = make_ours(*OURS[name])
    quietly(export_to, model, tmp_path / "exported")
    check_older_fields(json.loads((tmp_path / "exported/config.json").read_text()))
    expected = our_logits(model, TOKENS)
    assert_close(load_folder(tmp_path / "exported")(TOKENS).logits, expected)
    again, _ = imported(tmp_path / "exported", tmp_path, verify=False)
    assert_close(our_logits(again, TOKENS), expected)
    assert again.config.block_size == model.config.block_size


def check_older_fields(config):
    """transformers 4 and mlx-lm read these, and no rope_parameters."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    names = ("rope_theta", "partial_rotary_factor", ORIGINAL)
    expected = {key: full[key] for key in names if key in full} | {"torch_dtype": "float32"}
    is_scaled = full.get("rope_type", "default") != "default"
    expected["rope_scaling"] = {"type": full["rope_type"], **full} if is_scaled else None
    if "sliding_attention" in rope:
        expected["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    assert expected.items() <= config.items()


def test_adjacent_channels_are_ordered_as_transformers_turns_them():
    """In a part of each head, the rest of which stays, as GLM does; queries are the rows."""
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    c = transformers.GlmConfig(head_dim=12, partial_rotary_factor=0.5)
    rows = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))  # (H, D)
    angles = torch.tensor([0.3, 1.1, 2.0])
    cos, sin = (f(torch.cat((angles, angles)))[None, None] for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(rows[None, :, None], rows[None, :, None], cos, sin)
    stored = rows.flatten()[:, None]  # (H D, 1)
    ours = families.ADJACENT.read(stored, c)
    q = ours.view(1, 2, 1, 12)
    turned, _ = kernels.rope(q, q, angles.cos()[None], angles.sin()[None])
    found = families.ADJACENT.write(turned.reshape(24, 1), c)
    torch.testing.assert_close(found.view(2, 12), expected[0, :, 0])
    assert torch.equal(families.ADJACENT.write(ours, c), stored)


@pytest.mark.parametrize("kind, phrase", [("weight", "has one norm before"), ("bias", "other log")])
def test_a_cohere_that_was_trained_is_not_exported(kind, phrase, hf, tmp_path):
    """It has one norm in each layer, which has no bias, and here are two that do."""
    model, _ = imported(hf("cohere2"), tmp_path, verify=False)
    assert model.config.layer_pattern == "WWWN"
    getattr(model.blocks[1].mlp_norm, kind).data += 0.1
    if kind == "bias":
        model.blocks[1].attention_norm.bias.data += 0.1
    with pytest.raises(UserError, match=phrase):
        quietly(export_to, model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_equivalent_is_not_exported(name, tmp_path):
    settings, extension, phrase = REFUSED[name]
    with pytest.raises(UserError, match=phrase):
        quietly(export_to, make_ours(settings, extension), tmp_path / "exported")
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# Verification


@pytest.fixture
def hf(tmp_path):
    """A function that writes transformers' folder of a case, and returns the folder."""

    def write(*case, **changes):
        write_folder(tmp_path / "hf", *case, **changes)
        return tmp_path / "hf"

    return write


@pytest.mark.parametrize("name", ["mlp", "head", "window", "layers", "frequencies", "far"])
def test_a_fault_is_noticed(name, monkeypatch):
    """In the last layer, of the head, beyond a window, beyond the original length."""
    # a window of more tokens than the whole models compute
    others = {"layers": "qwen2, window in some layers", "far": "llama"}
    theirs = make_theirs(others.get(name, "mistral, window"), "llama3", sliding_window=50)
    model = convert.import_model(GPT, theirs.config, theirs.state_dict())
    assert all(float(line.split(": ")[-1]) < 1e-4 for line in verify.compare(model, theirs))
    if name == "window":
        model.config.window = 51
        for block in model.blocks:
            block.attention.window = 51
    elif name == "layers":  # which have the window
        assert model.config.layer_pattern == "FWW"
        model.config.layer_pattern = "FFW"
        model.blocks[1].attention.window = 0
    elif name == "frequencies":  # of the slowest pair
        model.config.extension["factor"] = 7.9
        model.scheme.inv_freq[-1] *= 8 / 7.9
    elif name == "head":
        model.head.weight.data = model.head.weight * 1.001
    elif name == "far":
        cos_sin, last = kernels.cos_sin, model.config.original_length - 1
        monkeypatch.setattr(kernels, "cos_sin", lambda pos, *f: cos_sin(pos.clamp(max=last), *f))
    else:
        p = model.blocks[-1].mlp.up.weight
        p.data = p + 0.01 * torch.randn_like(p)
    with pytest.raises(UserError, match="transformers computes other logits"):
        verify.compare(model, theirs)


# -----------------------------------------------------------------------------
# What a folder or a file means: its logits are those of transformers' model, and settings


def edit_tensors(function):
    def edit(place):
        stored = load_file(place / "model.safetensors")
        function(stored)
        save_file(stored, place / "model.safetensors", {"format": "pt"})

    return edit


def with_tensor(name, x):
    return edit_tensors(lambda stored: stored.update({name: x}))


def as_text_half(prefix):
    """A Gemma 3 of images and text, as older and newer files name its tensors."""

    def rename(stored):
        for name in list(stored):
            to = name if prefix == "language_model." else name.removeprefix("model.")
            stored[prefix + to] = stored.pop(name)
        stored["vision_tower.x.weight"] = torch.ones(3)

    def edit(place):
        text = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": False}
        whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
        # the head is tied by the whole's config
        (place / "config.json").write_text(json.dumps({**whole, "text_config": text}))
        edit_tensors(rename)(place)

    return edit


def split_weights(place):
    """Two files, without an index."""
    stored = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    for number in (1, 2):
        part = {name: stored[name] for name in sorted(stored)[number - 1 :: 2]}
        save_file(part, place / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})


def with_code(place):
    edit_json(place / "config.json", {"auto_map": {"AutoConfig": "evil.Evil"}})
    (place / "evil.py").write_text(f"open({str(place.parent / 'ran')!r}, 'w')\n")


def folder(*case, edit=None, **changes):
    """A function that writes a folder."""

    def write(tmp_path):
        place = tmp_path / "hf"
        theirs = write_folder(place, *case, **changes)
        if edit:
            edit(place)
        return place, theirs

    return write


def gguf_file(name, edit=None, rope=None):
    """A function that writes a GGUF file, which is known by its first bytes, as ollama's are."""

    def write(tmp_path):
        theirs = write_gguf(tmp_path / "model.gguf", name, edit, rope)
        return (tmp_path / "model.gguf").rename(tmp_path / "model"), theirs

    return write


def yarn_file(keys, options):
    """The YaRN of a GGUF with these keys is transformers' of these options."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    settings = {"original_length": 16, "block_size": 64}
    return gguf_file("llama", metadata(keys), rope | options), settings


def nanogpt(bias, prefix, block_size):
    """Its model.py, as transformers' GPT-2 with GELU by erf; a model without biases gets zeros.

    Names may have the prefixes of DDP and torch.compile; numbers may be NumPy's; the table of
    positions may be shorter than the file says.
    """

    def write(tmp_path):
        theirs = make_theirs("gpt2", "default", activation_function="gelu", n_inner=None)
        stored = {prefix + "lm_head.weight": theirs.lm_head.weight}
        for name, p in theirs.named_parameters():
            if name.endswith("bias") and not bias:
                p.zero_()
                continue
            is_transposed = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc")
            stored[prefix + name] = p.t().contiguous() if is_transposed else p
        sizes = {name: GPT2[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
        arguments = {**sizes, "block_size": np.int64(block_size), "bias": bias, "dropout": 0.0}
        checkpoint = {"model": stored, "model_args": arguments, "iter_num": np.int32(5)}
        checkpoint |= {"best_val_loss": np.float64(1.5), "lr": np.float32(0.1), "optimizer": {}}
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        return tmp_path / "ckpt.pt", theirs

    return write, {"mlp": "gelu_exact", "pos": "learned", "block_size": 160}


# a mask of older files, such as Pythia's, is no weight, and of a dtype that no weight has
MASK = with_tensor("gpt_neox.layers.0.attention.bias", torch.ones(1, 1, 64, 64, dtype=torch.bool))
# name -> (function that writes a source, settings that ours has)
SOURCES = {
    "a head of its own": (
        folder(tie_word_embeddings=False, config=TIED),
        {"tie_embeddings": False},
    ),
    "masks of older files": (folder("gpt_neox", edit=MASK), {}),
    "files of weights without an index": (folder(edit=split_weights), {}),
    "code, which is not run": (folder(edit=with_code), {}),
    **{
        f"the text half of {prefix}": (
            folder("gemma3_text", edit=as_text_half(prefix)),
            {"tie_embeddings": True},
        )
        for prefix in ("language_model.", "model.language_model.")
    },
    **{f"GGUF, {name}": (gguf_file(name), {}) for name in GGUFS},
    "GGUF, factor of YaRN": yarn_file(
        {"attn_factor": 2.0}, {"attention_factor": 2 * (0.1 * math.log(4) + 1)}
    ),
    "GGUF, llama.cpp's defaults of YaRN": yarn_file(
        {"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 16.0},
        {"beta_fast": 16.0},
    ),
    "nanoGPT": nanogpt(False, "_orig_mod.", 160),
    "nanoGPT with biases": nanogpt(True, "", 160),
    "nanoGPT by DDP, its table cut": nanogpt(True, "module.", 320),
    "nanoGPT by DDP, compiled": nanogpt(False, "module._orig_mod.", 160),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_read_as_transformers_reads_it(name, tmp_path):
    write, settings = SOURCES[name]
    place, theirs = write(tmp_path)
    expected = theirs(TOKENS).logits
    assert expected.abs().max() > 0.5
    # folders are verified in the test of families
    model, text = imported(place, tmp_path, verify=place.is_file())
    assert_close(our_logits(model, TOKENS), expected)
    assert {key: getattr(model.config, key) for key in settings} == settings
    assert "no tokenizer.json belongs to" in text or "tokenizer of the file is None" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == [place.name, f"run-{place.stem}"]


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {**LINEAR, "rope_type": "yarn"}
LLAMA3 = {**LINEAR, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "rope, config, of_tokenizer, given, lengths",
    [
        (LINEAR, {}, 0, 0, (64, 256)),
        (LINEAR, {}, 0, 1024, (256, 1024)),
        ({**LINEAR, ORIGINAL: 64}, {}, 0, 512, (64, 512)),
        ({**YARN, ORIGINAL: 128}, {}, 0, 0, (128, 512)),
        (YARN, {}, 0, 0, (256, 1024)),
        (LINEAR, {"max_sequence_length": 1024}, 0, 0, (256, 1024)),
        (LINEAR, {}, 1024, 0, (256, 1024)),
        (LINEAR, {"tokenizer_model_max_length": 1024}, 10**30, 0, (256, 1024)),
        ({**LLAMA3, ORIGINAL: 256}, {}, 0, 0, (256, 1024)),
        ({**LLAMA3, ORIGINAL: 32}, {}, 0, 0, (32, 256)),
        ({**YARN, ORIGINAL: 32}, {}, 0, 0, (32, 256)),
        (PLAIN, {"model_max_length": 4096}, 0, 0, (256, 256)),
    ],
)
def test_lengths_are_read(rope, config, of_tokenizer, given, lengths, tmp_path):
    """max_position_embeddings, 256, is the original or the extended length: other facts say."""
    place, changes = tmp_path / "hf", {"rope_parameters": rope, "max_position_embeddings": 256}
    theirs = write_folder(place, config=config, **changes)
    if of_tokenizer:
        edit_json(place / "tokenizer_config.json", {"model_max_length": of_tokenizer})
    model, _ = imported(place, tmp_path, verify=False, context_length=given)
    assert (model.config.original_length, model.config.block_size) == lengths
    assert_close(our_logits(model, TOKENS), theirs(TOKENS).logits)


def test_bfloat16_is_kept(hf, tmp_path):
    place = hf(config={"dtype": "bfloat16"})
    edit_tensors(lambda s: s.update({name: x.bfloat16() for name, x in s.items()}))(place)
    quietly(import_to, GPT, str(place), tmp_path / "run")
    stored = load_file(tmp_path / "run/step-000000/model.safetensors")
    assert stored["embed.weight"].dtype == torch.bfloat16
    quietly(export_to, GPT.load(tmp_path / "run", dtype=None), tmp_path / "out")
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # a server of another user reads them, too
    before, after = (load_file(x / "model.safetensors") for x in (place, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# -----------------------------------------------------------------------------
# What is refused: one sentence, and nothing written


def change(**config):
    return lambda place: edit_json(place / "config.json", config)


def write(name, text):
    return lambda place: (place / name).write_text(text)


def cut_file(place):
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def copy_weights(place):
    shutil.copy(place / "model.safetensors", place / "model-00002.safetensors")
    (place / "model.safetensors").rename(place / "model-00001.safetensors")


def rename_weights(name):
    return lambda place: (place / "model.safetensors").rename(place / name)


def rope(kind, **values):
    return change(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values})


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
LLAMA4 = "llama4_text"
# what is done to a folder, a part of the message, and a family other than Llama
REFUSED_FOLDERS = [
    (change(model_type="falcon"), "'falcon' is not one of: llama"),
    *(
        (change(model_type=name), f"'{name}' is not read, because {reason}: choose another")
        for name, reason in families.NOT_READ.items()
    ),
    (change(quantization_config={"bits": 4}), "is quantized"),
    (rename_weights("model.Q8_0.gguf"), "holds a GGUF file and no safetensors: give "),
    (write("adapter_config.json", "{}"), "holds an adapter (LoRA)"),
    (write("config.json", "[" * 10**6), "config.json cannot be used (RecursionError"),
    (change(vocab_size=1 << 40), "describes 52,776"),
    (change(attention_bias=True), "config.json describes"),
    (rope("spiral"), "its rope_type 'spiral' is not one of default, linear, dyn"),
    (change(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "if the file is whole"),
    (change(layer_types=["mamba"] * 3), "of the type linear_attention are not"),
    (change(layer_types=["chunked_attention"] * 3), "chunked_attention are not"),
    (change(hidden_act="relu"), "relu"),
    (rope("linear", partial_rotary_factor=0.5), "cannot be used (RuntimeError: The size"),
    (with_tensor(DOWN, torch.full((48, 80), 3e38)), "its logits are not finite"),
    (with_tensor(NORM, torch.full((48,), math.nan)), f"{NORM} has values that are not finite"),
    (with_tensor("model.x", torch.ones(3)), "model.x missing, too many"),
    (with_tensor(NORM, torch.ones(47)), f"({NORM} missing, or of another shape): download both"),
    (with_tensor(NORM, torch.ones(49)), f"({NORM} missing, too many, or of another shape): down"),
    (cut_file, "model.safetensors cannot be used (SafetensorError"),
    (
        rename_weights("model-00002-of-00003.safetensors"),
        "1 of the 3 files of weights are there, model-00002-of-00003.safetensors the last of them",
    ),
    (copy_weights, "of another file: remove one of them"),
    (rename_weights("pytorch_model.bin"), "(a pickle, such as pytorch_model.bin, is not read"),
    (change(no_rope_layers=[1, 0, 1]), "its layers without positions have other norms", LLAMA4),
    (change(attention_chunk_size=32), "the type chunked_attention are not computed", LLAMA4),
    (change(moe_layers=[1]), "config.json describes", LLAMA4),
]


@pytest.mark.parametrize("row", REFUSED_FOLDERS, ids=lambda row: row[1][:50])
def test_a_folder_that_cannot_be_read_is_refused(row, hf, tmp_path, call):
    edit, phrase, *family = row
    place = hf(*family)
    edit(place)
    sentence = assert_refused(call("hf.py", "import", place, tmp_path / "run"), phrase)
    assert len(sentence) < 900
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_a_bug_of_ours_is_to_be_reported(hf, tmp_path, monkeypatch, call):
    monkeypatch.delitem(convert.FIELDS, "n_layer")
    done = call("hf.py", "import", hf(), tmp_path / "run")
    sentence = assert_refused(done, "(KeyError: ", "please report it")
    assert "download" not in sentence


def test_a_wrong_command_writes_nothing(hf, tmp_path, call):
    place, run = hf(), tmp_path / "run"
    assert_success(call("hf.py", "import", place, run))
    before = content(tmp_path)
    for words, phrase in (
        (["import", place, run], "holds a run already"),
        (["export", run, place], "exists already"),
        (["import", run, "other"], "is a run folder already: give it to extend.py"),
        (["import", run / "step-000000", "other"], "sample.py, or to hf.py export"),
        (["export", "a", "b", "--context_length=5"], "--context_length is not for export"),
        (["import", "ckpt.pt", "b"], "there is no folder or file ckpt.pt"),
        (["export", "nowhere", "b"], "there is no checkpoint in nowhere"),
    ):
        assert_refused(call("hf.py", *words, cwd=tmp_path), phrase)
    assert content(tmp_path) == before


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("content", [{"model": Evil()}, {"model": {}, "model_args": {}}, 3])
def test_another_pickle_is_refused(content, tmp_path, call):
    torch.save(content, tmp_path / "ckpt.pt")
    done = call("hf.py", "import", "ckpt.pt", "run", cwd=tmp_path)
    line = assert_refused(done, "is no ckpt.pt of nanoGPT", "give one, a .gguf, or the folder")
    assert line.isprintable()
    assert [file.name for file in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_hub_id_is_downloaded(hf, tmp_path, monkeypatch):
    import huggingface_hub

    place = hf()
    download = mock.Mock(return_value=str(place))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for number, source in enumerate(("ORG/Some-Model_1.5", "hf://ORG/Some-Model_1.5")):
        quietly(import_to, GPT, source, tmp_path / f"run{number}")
        assert download.call_args.args == ("ORG/Some-Model_1.5",)
    download.side_effect = OSError("no network")
    with pytest.raises(UserError, match="there is no folder a/b, and a/b of .*no network"):
        import_to(GPT, "a/b", tmp_path / "run2")
    allowed = download.call_args.kwargs["allow_patterns"]
    assert {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"} <= {*allowed}
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in allowed)


# -----------------------------------------------------------------------------
# Exports


@pytest.mark.parametrize("pattern, period", [("WWF", 3), ("WFF", None)])
def test_the_pattern_of_gemma_is_written(pattern, period):
    c, _ = convert.export_model(make_ours({**GEMMA3, "n_layer": 3, "layer_pattern": pattern}, None))
    assert c.to_dict().get("sliding_window_pattern") == period


def test_an_export_keeps_sampling_defaults_and_states_its_length(hf, tmp_path):
    """As transformers reads them; of a tokenizer that states no length there is none after."""
    place, tokenizer = hf(vocab_size=257), byte_level(["<s>"])
    names = {"bos_token": "<s>", "model_max_length": 150}
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2]}
    write_tokenizer(place, tokenizer, tokenizer_config=names, generation_config=generation)
    model, _ = imported(place, tmp_path)
    model.extend("yarn", 256 / model.config.block_size)
    quietly(export_to, model, tmp_path / "out")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.6, 0.95)
    assert found.eos_token_id == [1, 2]
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings == names | {"model_max_length": 256}
    for stated in (10**30, None):
        names = json.dumps({"model_max_length": stated}).encode()
        files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": names}
        written = make_exported(ImportedTokenizer(files), False, 256).files
        assert json.loads(written["tokenizer_config.json"]) == {"model_max_length": stated}


def test_an_export_says_that_a_vocabulary_of_characters_is_not_written(tmp_path):
    model = make_ours({"vocab_size": 3}, None)
    model.meta = {"tokenizer": CharTokenizer("abc").to_json(), "bos": None}
    text = quietly(export_to, model, tmp_path / "exported")
    assert "note: no tokenizer is written" in text
    again, _ = imported(tmp_path / "exported", tmp_path)
    assert again.meta["tokenizer"] is None
    tokens = TOKENS[:, :60] % 3
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("bos", [None, 256])
def test_bytes_are_written_for_transformers_and_read_again(bos, tmp_path):
    """test_tokenizer.py compares more texts with the package."""
    model = make_ours({"vocab_size": 257}, None)
    model.meta = {"tokenizer": ByteTokenizer().to_json(), "bos": bos}
    quietly(export_to, model, tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "a  é\0\n👩\u200d👧 <s>"
    start = [] if bos is None else [bos]
    assert theirs(text)["input_ids"] == [*start, *text.encode()]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (256, 256)
    again, _ = imported(tmp_path / "exported", tmp_path)
    tokenizer = tokenizer_from_json(again.meta["tokenizer"])
    assert (again.meta["bos"], tokenizer.bos, tokenizer.eos) == (bos, 256, None)
    assert same_vocabulary(tokenizer, ByteTokenizer())
    assert tokenizer.encode("<bos>é") == [*"<bos>é".encode()]


@pytest.mark.parametrize("ends", [[2], [256, 2, 1]])
def test_an_export_keeps_all_tokens_that_end_a_text(ends, tmp_path):
    """eos, which the tokenizer names, is 2; the vocabulary is padded; also without a tokenizer."""
    model = make_ours({"vocab_size": 264}, None)
    made = byte_level(["<s>", "</s>", "<|eot|>", "<|eom|>"])
    files = {"tokenizer.json": made.to_str().encode()}
    files["tokenizer_config.json"] = b'{"bos_token": "<s>", "eos_token": "<|eot|>"}'
    tokenizer = ImportedTokenizer(files, 0, 2, 264, ends=ends)
    model.meta = {"tokenizer": tokenizer.to_json(), "bos": None, "ends": ends}
    quietly(export_to, model, tmp_path / "exported")
    again, text = imported(tmp_path / "exported", tmp_path)
    assert {*again.meta["ends"]} == {*ends} and again.meta["tokenizer"]["eos"] == 2
    assert "at an end: " in text and "<|eot|> (2, " in text
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    expected = ends if len(ends) > 1 else ends[0]
    assert theirs.eos_token_id == config["eos_token_id"] == expected
    model.meta["tokenizer"] = None
    quietly(export_to, model, tmp_path / "ids")
    assert imported(tmp_path / "ids", tmp_path)[0].meta["ends"] == ends


def test_train_and_sample_do_not_import_transformers():
    code = "import train, sample, evaluate, sys\n"
    code += "print({'transformers', 'nanolong.hub'} & {*sys.modules})"
    assert assert_success(run_python(code)).stdout == "set()\n"
