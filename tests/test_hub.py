"""hf.py: families in and out, what is refused, lengths, hub ids, nanoGPT's checkpoints, exports."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import interchange
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import assert_refused, assert_success, content, run_python
from interchange import (
    LENGTH,
    OURS,
    REFUSED,
    all_cases,
    compare,
    imported,
    load_folder,
    make_ours,
    make_theirs,
    our_logits,
    quietly,
)
from safetensors.torch import load_file, save_file

import kernels
from data import ByteTokenizer, CharTokenizer, ImportedTokenizer
from model import GPT
from nanolong.errors import UserError
from nanolong.hub import convert, families, transfer, verify
from nanolong.hub.families import FAMILIES, NOT_READ
from nanolong.hub.tokenizer import build_byte_level
from nanolong.hub.transfer import export_to, import_to

TOKENS = torch.arange(70)[None] * 13 % interchange.VOCAB_SIZE

# -----------------------------------------------------------------------------
# Families and RoPE types


# one RoPE type of each family, another for the next
ONE_EACH = [
    [case for case in all_cases() if case[0] == family]
    for family in interchange.FAMILIES
    if "," not in family
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
    assert {family.partition(",")[0] for family, _ in all_cases()} == FAMILIES.keys()
    assert {rope for _, rope in all_cases()} == interchange.ROPES.keys()


@pytest.mark.parametrize("name", OURS)
def test_a_model_of_ours_is_exported_and_imported(name, tmp_path):
    model = make_ours(*OURS[name])
    quietly(export_to, model, tmp_path / "exported")
    expected = our_logits(model, TOKENS)
    theirs = load_folder(tmp_path / "exported")(TOKENS).logits
    assert (theirs - expected).abs().max() < 1e-5 * expected.abs().max()
    again, _ = imported(tmp_path / "exported", tmp_path)
    assert (our_logits(again, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert again.config.block_size == model.config.block_size


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
    model, _ = imported(hf("cohere2"), tmp_path)
    assert model.config.layer_pattern == "WWWN"
    getattr(model.blocks[1].mlp_norm, kind).data += 0.1
    if kind == "bias":
        model.blocks[1].attention_norm.bias.data += 0.1
    with pytest.raises(UserError, match=phrase):
        quietly(export_to, model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    "config, phrase",
    [
        ({"no_rope_layers": [1, 0, 1]}, "its layers without positions have other norms"),
        ({"attention_chunk_size": 32}, "layers of the type chunked_attention are not computed"),
        ({"moe_layers": [1]}, "config.json describes|there is no parameter here|do not fit"),
    ],
)
def test_a_larger_llama4_is_refused(config, phrase, hf, tmp_path):
    with pytest.raises(UserError, match=phrase):
        imported(hf("llama4_text", config=config), tmp_path)


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
    """A function that writes transformers' folder of a case, with changes of its files."""

    def write(family="llama", rope="default", config=None, **changes):
        place = tmp_path / "hf"
        make_theirs(family, rope, **changes).save_pretrained(place)
        edit_config(place, config or {})
        return place

    return write


@pytest.mark.parametrize("name", ["mlp", "head", "window", "layers", "frequencies", "far"])
def test_a_fault_is_noticed(name, hf, tmp_path, monkeypatch):
    """In the last layer, of the head, beyond a window, beyond the original length."""
    # a window of more tokens than the whole models compute
    theirs = load_folder(hf("mistral, window", "llama3", sliding_window=50))
    if name == "layers":
        theirs = load_folder(hf("qwen2, window in some layers", "llama3", sliding_window=50))
    if name == "far":
        theirs = load_folder(hf("llama", "llama3"))
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
# What a file means


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {**LINEAR, "rope_type": "yarn"}
LLAMA3 = {**LINEAR, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KNOWN = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope, config, context_length, lengths",
    [
        (LINEAR, {}, 0, (64, 256)),
        (LINEAR, {}, 1024, (256, 1024)),
        ({**LINEAR, **KNOWN}, {}, 512, (64, 512)),
        ({**YARN, "original_max_position_embeddings": 128}, {}, 0, (128, 512)),
        (YARN, {}, 0, (256, 1024)),
        (LINEAR, {"max_sequence_length": 1024}, 0, (256, 1024)),
        (LINEAR, {"tokenizer": 1024}, 0, (256, 1024)),
        (LINEAR, {"tokenizer": 10**30, "tokenizer_model_max_length": 1024}, 0, (256, 1024)),
        ({**LLAMA3, "original_max_position_embeddings": 256}, {}, 0, (256, 1024)),
        ({"rope_type": "default", "rope_theta": 1e4}, {"model_max_length": 4096}, 0, (256, 256)),
    ],
)
def test_lengths_are_read(rope, config, context_length, lengths, hf, tmp_path):
    """max_position_embeddings, 256, is the original or the extended length: other facts say."""
    changes = {"rope_parameters": rope, "max_position_embeddings": 256}
    config = dict(config)
    tokenizer = config.pop("tokenizer", None)
    place = hf(config=config, **changes)
    if tokenizer:
        settings = json.dumps({"model_max_length": tokenizer})
        (place / "tokenizer_config.json").write_text(settings)
    model, _ = imported(place, tmp_path, context_length=context_length)
    assert (model.config.original_length, model.config.block_size) == lengths
    tokens = TOKENS[:, :50]
    assert (model(tokens) - load_folder(place)(tokens).logits).abs().max() < 1e-5


def test_a_head_of_its_own_stays(hf, tmp_path):
    place = hf()
    with_tensor("lm_head.weight", torch.randn(interchange.VOCAB_SIZE, 48))(place)
    model, _ = imported(place, tmp_path)
    assert not model.config.tie_embeddings
    assert (model(TOKENS) - load_folder(place)(TOKENS).logits).abs().max() < 1e-4


def test_masks_of_older_files_are_left_out(hf, tmp_path):
    """Such as Pythia's, which are no weights, and of a dtype that no weight has."""
    place = hf("gpt_neox")
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    with_tensor("gpt_neox.layers.0.attention.bias", mask)(place)
    model, _ = imported(place, tmp_path)
    assert (model(TOKENS) - load_folder(place)(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_half_of_images_and_text_is_read(prefix, hf, tmp_path):
    """As older and newer files of Gemma 3 name it; the head is tied by the whole's config."""
    place = hf("gemma3_text")
    theirs = load_folder(place)
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    text = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": False}
    (place / "config.json").write_text(json.dumps({**whole, "text_config": text}))

    def rename(stored):
        for name in list(stored):
            to = name if prefix == "language_model." else name.removeprefix("model.")
            stored[prefix + to] = stored.pop(name)
        stored["vision_tower.x.weight"] = torch.ones(3)

    edit_tensors(rename)(place)
    model, _ = imported(place, tmp_path)
    assert model.config.tie_embeddings
    assert (model(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-4


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
    return lambda place: edit_config(place, config)


def edit_config(place, config):
    values = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(values))


def edit_tensors(function):
    def edit(place):
        stored = load_file(place / "model.safetensors")
        function(stored)
        save_file(stored, place / "model.safetensors", {"format": "pt"})

    return edit


def with_tensor(name, x):
    return edit_tensors(lambda stored: stored.update({name: x}))


def write(name, text):
    return lambda place: (place / name).write_text(text)


def cut_file(place):
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def copy_weights(place):
    shutil.copy(place / "model.safetensors", place / "model-00002.safetensors")
    (place / "model.safetensors").rename(place / "model-00001.safetensors")


def leave_gguf(place):
    (place / "model.safetensors").rename(place / "model.Q8_0.gguf")


def leave_pickle(place):
    (place / "model.safetensors").rename(place / "pytorch_model.bin")


def rope(kind, **values):
    return change(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values})


HOSTILE = {
    "another family": (change(model_type="falcon"), "'falcon' is not one of: llama"),
    "a family of earlier versions": (change(model_type="stablelm"), "'stablelm' is not one of"),
    **{
        name: (change(model_type=name), f"'{name}' is not read, because {reason}: choose another")
        for name, reason in NOT_READ.items()
    },
    "quantized": (change(quantization_config={"bits": 4}), "is quantized"),
    "a GGUF file": (leave_gguf, "holds a GGUF file and no safetensors: give "),
    "an adapter": (write("adapter_config.json", "{}"), "holds an adapter (LoRA)"),
    "no JSON": (write("config.json", "[" * 10**6), "config.json cannot be used (RecursionError"),
    "a huge vocabulary": (change(vocab_size=1 << 40), "describes 52,776"),
    "a bias": (change(attention_bias=True), "config.json describes"),
    "a RoPE type": (rope("spiral"), "its rope_type 'spiral' is not one of default, linear, dyn"),
    "RoPE of part of a head": (rope("proportional"), "its rope_type 'proportional' is not one"),
    "an older name": (rope("su"), "its rope_type 'su' is not one"),
    "a RoPE without its factor": (
        change(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "if the file is whole, please report it",
    ),
    "a Mamba layer": (change(layer_types=["mamba"] * 3), "of the type linear_attention are not"),
    "layers of chunks": (
        change(layer_types=["chunked_attention"] * 3),
        "chunked_attention are not",
    ),
    "an activation function": (change(hidden_act="relu"), "relu"),
    "half-rotated heads": (
        rope("linear", partial_rotary_factor=0.5),
        "cannot be used (RuntimeError: The size",
    ),
    "weights that overflow": (
        with_tensor("model.layers.0.mlp.down_proj.weight", torch.full((48, 80), 3e38)),
        "its logits are not finite",
    ),
    "NaN weights": (
        with_tensor("model.norm.weight", torch.full((48,), math.nan)),
        "model.norm.weight has values that are not finite",
    ),
    "a tensor too many": (with_tensor("model.x", torch.ones(3)), "model.x missing, too many"),
    "a tensor of another shape": (
        with_tensor("model.norm.weight", torch.ones(47)),
        "(model.norm.weight missing, or of another shape): download both again",
    ),
    "a file cut off": (cut_file, "model.safetensors cannot be used (SafetensorError"),
    "a larger tensor": (
        with_tensor("model.norm.weight", torch.ones(49)),
        "(model.norm.weight missing, too many, or of another shape): download both again",
    ),
    "one of three files": (
        lambda place: (place / "model.safetensors").rename(
            place / "model-00002-of-00003.safetensors"
        ),
        "1 of the 3 files of weights are there, model-00002-of-00003.safetensors the last of them",
    ),
    "weights twice": (copy_weights, "of another file: remove one of them"),
    "a pickle": (leave_pickle, "(a pickle, such as pytorch_model.bin, is not read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused(name, hf, tmp_path, call):
    edit, phrase = HOSTILE[name]
    place = hf()
    edit(place)
    sentence = assert_refused(call("hf.py", "import", place, tmp_path / "run"), phrase)
    assert len(sentence) < 900
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_remote_code_is_not_run(hf, tmp_path):
    place = hf(
        config={"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    )
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    imported(place, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_files_of_weights_need_no_index(hf, tmp_path):
    place = hf()
    expected, _ = imported(place, tmp_path)
    stored = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    for number in (1, 2):
        part = {name: stored[name] for name in sorted(stored)[number - 1 :: 2]}
        save_file(part, place / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    found, _ = imported(place, tmp_path / "again")
    for name, x in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), x)


@pytest.mark.parametrize("by_layer, by_size", [(True, True), (True, False), (False, False)])
def test_the_scales_of_scores_of_some_gpt2_become_part_of_the_queries(by_layer, by_size, tmp_path):
    """As Mistral's of Stanford divide the scores of a layer by its number."""
    from transformers import GPT2Config, GPT2LMHeadModel

    scales = {"scale_attn_by_inverse_layer_idx": by_layer, "scale_attn_weights": by_size}
    c = GPT2Config(
        n_positions=70, vocab_size=interchange.VOCAB_SIZE, n_layer=3, n_head=4, n_embd=32
    )
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**{**c.to_dict(), **scales})).eval().requires_grad_(False)
    for p in theirs.parameters():
        p.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "hf")
    model, _ = imported(tmp_path / "hf", tmp_path)
    expected = theirs(TOKENS).logits
    assert (our_logits(model, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    quietly(export_to, model, tmp_path / "exported")
    found = load_folder(tmp_path / "exported")(TOKENS).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_bug_of_ours_is_to_be_reported(hf, tmp_path, monkeypatch, call):
    monkeypatch.delitem(convert.FIELDS, "n_layer")
    done = call("hf.py", "import", hf(), tmp_path / "run")
    sentence = assert_refused(done, "(KeyError: ", "please report it")
    assert "download" not in sentence


def test_a_run_and_an_export_are_not_written_over(hf, tmp_path, call):
    place = hf()
    assert_success(call("hf.py", "import", place, tmp_path / "run"))
    before = content(tmp_path)
    assert_refused(call("hf.py", "import", place, tmp_path / "run"), "holds a run already")
    assert_refused(call("hf.py", "export", tmp_path / "run", place), "exists already")
    for run in (tmp_path / "run", tmp_path / "run/step-000000"):
        done = call("hf.py", "import", run, tmp_path / "other")
        assert_refused(done, "is a run folder already", "hf.py export")
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "words, phrase",
    [
        (["export", "a", "b", "--context_length=5"], "--context_length is not for export"),
        (["import", "ckpt.pt", "b"], "there is no folder or file ckpt.pt"),
        (["export", "nowhere", "b"], "there is no checkpoint in nowhere"),
    ],
)
def test_a_wrong_command_is_refused(words, phrase, call, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(call("hf.py", *words, cwd=tmp_path), phrase)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


# -----------------------------------------------------------------------------
# Hub ids and nanoGPT's checkpoints


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


@pytest.mark.parametrize(
    "bias, prefix, block_size",
    [
        (False, "_orig_mod.", 24),
        (True, "", 24),
        (True, "module.", 48),
        (False, "module._orig_mod.", 24),
    ],
)
def test_nanogpt_is_imported(bias, prefix, block_size, tmp_path):
    """Its model.py, as transformers' GPT-2 with GELU by erf; a model without biases gets zeros.

    Names may have the prefixes of DDP and torch.compile; numbers may be NumPy's; the table of
    positions may be shorter than the file says.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50}
    torch.manual_seed(0)
    c = GPT2Config(n_positions=24, activation_function="gelu", **sizes)
    theirs = GPT2LMHeadModel(c).eval().requires_grad_(False)
    stored = {}
    for name, p in theirs.named_parameters():
        p.normal_(0, 0.3)
        if name.endswith("bias") and not bias:
            p.zero_()
            continue
        is_transposed = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc")
        stored[prefix + name] = p.t().contiguous() if is_transposed else p
    stored[prefix + "lm_head.weight"] = theirs.lm_head.weight
    arguments = {**sizes, "block_size": np.int64(block_size), "bias": bias, "dropout": 0.0}
    checkpoint = {"model": stored, "model_args": arguments, "iter_num": np.int32(5)}
    checkpoint |= {"best_val_loss": np.float64(1.5), "lr": np.float32(0.1), "optimizer": {}}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    model, text = imported(tmp_path / "ckpt.pt", tmp_path)
    tokens = TOKENS[:, :24] % 50
    assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    assert (model.config.mlp, model.config.pos) == ("gelu_exact", "learned")
    assert "no tokenizer.json belongs to" in text
    quietly(export_to, model, tmp_path / "exported")
    exported = load_folder(tmp_path / "exported")
    assert (exported(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4


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


# -----------------------------------------------------------------------------
# Exports


def exported_config(settings, extension, tmp_path):
    text = quietly(export_to, make_ours(settings, extension), tmp_path / "exported")
    return json.loads((tmp_path / "exported/config.json").read_text()), text


def test_older_fields_are_written(tmp_path):
    """transformers 4 and mlx-lm read these, and no rope_parameters."""
    config, text = exported_config({}, ("yarn", {}), tmp_path / "yarn")
    assert config["rope_scaling"] == {"type": "yarn", **config["rope_parameters"]}
    assert config["rope_scaling"]["original_max_position_embeddings"] == LENGTH
    assert config["rope_theta"] == 10000.0 and config["torch_dtype"] == "float32"
    config, text = exported_config(interchange.OLMO3, ("yarn", {}), tmp_path / "olmo3")
    assert config["rope_scaling"]["factor"] == 4.0 and config["rope_scaling"]["type"] == "yarn"
    assert config["rope_local_base_freq"] == 500.0
    config, _ = exported_config({"rope_fraction": 0.5, "bias": "none"}, None, tmp_path / "half")
    assert config["rope_scaling"] is None and config["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("pattern, period", [("WWF", 3), ("WFF", None)])
def test_the_pattern_of_gemma_is_written(pattern, period, tmp_path):
    settings = {**interchange.GEMMA3, "layer_pattern": pattern}
    config, text = exported_config(settings, ("pi", {}), tmp_path)
    assert config.get("sliding_window_pattern") == period
    assert config["rope_scaling"]["type"] == "linear" and config["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize("stated, expected", [(150, 256), (10**30, 10**30), (None, None)])
def test_an_export_keeps_sampling_defaults_and_states_its_length(stated, expected, hf, tmp_path):
    """As transformers reads them; of a tokenizer that states no length there is none after."""
    place = hf(vocab_size=257)
    build_byte_level(ByteTokenizer()).save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2]}
    (place / "generation_config.json").write_text(json.dumps(generation))
    model, _ = imported(place, tmp_path)
    model.extend("yarn", 256 / model.config.block_size)
    quietly(export_to, model, tmp_path / "out")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.6, 0.95)
    assert found.eos_token_id == [1, 2]
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings == {"model_max_length": expected}


def test_nothing_is_left_of_a_failed_export(tmp_path, monkeypatch):
    def fail(model, theirs):
        raise UserError("transformers computes other logits")

    monkeypatch.setattr(transfer, "compare", fail)
    with pytest.raises(UserError, match="other logits"):
        quietly(export_to, make_ours({}, None), tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_an_export_says_that_a_vocabulary_of_characters_is_not_written(tmp_path, name="exported"):
    model = make_ours({"vocab_size": 3}, None)
    model.meta = {"tokenizer": CharTokenizer("abc").to_json(), "bos": None}
    text = quietly(export_to, model, tmp_path / name)
    assert "note: no tokenizer is written" in text
    again, _ = imported(tmp_path / name, tmp_path)
    assert again.meta["tokenizer"] is None
    tokens = TOKENS[:, :60] % 3
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("bos", [None, 256])
def test_transformers_encodes_by_exported_bytes(bos, tmp_path):
    from transformers import AutoTokenizer

    model = make_ours({"vocab_size": 257}, None)
    model.meta = {"tokenizer": ByteTokenizer().to_json(), "bos": bos}
    quietly(export_to, model, tmp_path / "exported")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "a  é\0\n👩\u200d👧 <s>"
    start = [] if bos is None else [bos]
    assert theirs(text)["input_ids"] == [*start, *text.encode()]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (256, 256)


@pytest.mark.parametrize("ends", [[2], [2, 1], [1, 2, 256]])
def test_an_export_keeps_all_tokens_that_end_a_text(ends, tmp_path, name="exported"):
    """eos, which the tokenizer names, is 2; with a tokenizer and on token ids alone."""
    model = make_ours({"vocab_size": 264}, None)
    files = {"tokenizer.json": byte_level(["<s>", "</s>", "<|eot|>", "<|eom|>"])}
    names = {"bos_token": "<s>", "eos_token": "<|eot|>"}
    files["tokenizer_config.json"] = json.dumps(names).encode()
    tokenizer = ImportedTokenizer(files, 0, 2, 264, ends=ends)
    model.meta = {"tokenizer": tokenizer.to_json(), "bos": None, "ends": ends}
    quietly(export_to, model, tmp_path / name)
    again, text = imported(tmp_path / name, tmp_path)
    assert {*again.meta["ends"]} == {*ends} and again.meta["tokenizer"]["eos"] == 2
    assert "at an end: " in text and f"<|eot|> (2, {name if '.' in name else ''}" in text
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / name)
    config = json.loads((tmp_path / name / "config.json").read_text())
    expected = ends if len(ends) > 1 else ends[0]
    assert theirs.eos_token_id == config["eos_token_id"] == expected
    model.meta["tokenizer"] = None
    quietly(export_to, model, tmp_path / "ids")
    assert imported(tmp_path / "ids", tmp_path)[0].meta["ends"] == ends


def byte_level(special):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    vocabulary = {"vocab_size": 262, "special_tokens": special, "show_progress": False}
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **vocabulary)
    made.train_from_iterator(["the other other"], trainer)
    return made.to_str().encode()


def test_train_and_sample_do_not_import_transformers():
    code = "import train, sample, evaluate, sys\n"
    code += "print({'transformers', 'nanolong.hub'} & {*sys.modules})"
    assert assert_success(run_python(code)).stdout == "set()\n"
