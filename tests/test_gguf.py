"""GGUF files in and out: models that the gguf package writes, compared with transformers."""

import math
import struct

import gguf
import interchange
import numpy as np
import pytest
import torch
from conftest import assert_refused
from interchange import LENGTH, imported, make_theirs, our_logits
from test_gguf_tokenizer import train
from test_hf_tokenizer import train_sentencepiece

from data.tokenizer import tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.gguf_model import read_gguf

F32 = gguf.GGMLQuantizationType.F32
TOKENS = torch.arange(140)[None] * 37 % interchange.VOCAB_SIZE

# -----------------------------------------------------------------------------
# transformers' models, written as llama.cpp's converter writes them

# Rows are multiples of 32, of which Q8_0 makes blocks.
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
HALF = {"original_max_position_embeddings": LENGTH // 2}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, **HALF}
YARN_OPTIONS = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
# name -> model_type, quantisation, RoPE, and what its config has other than SHAPE
MODELS = {
    "llama": ("llama", "F32", {}, {}),
    "llama-f16-no-gqa": ("llama", "F16", {}, {"num_key_value_heads": 4}),
    "llama-q8-linear": ("llama", "Q8_0", LINEAR, {}),
    "llama-yarn": ("llama", "Q8_0", YARN, {}),
    "llama-llama3": ("llama", "F32", LLAMA3, {"max_position_embeddings": 1 << 16}),
    "mistral-window": ("mistral", "BF16", {}, {"sliding_window": 21}),
    "qwen2": ("qwen2", "F32", {}, {}),
    "qwen2-q4-yarn": ("qwen2", "Q4_1", YARN_OPTIONS, {}),
    "qwen3-q8-wide-heads": ("qwen3", "Q8_0", {}, {"head_dim": 128, "tie_word_embeddings": False}),
    "ernie4_5": ("ernie4_5", "Q8_0", LINEAR, {}),
    "smollm3": ("smollm3", "Q5_0", {}, {"num_hidden_layers": 6, "no_rope_layers": None}),
}


def interleaved(tensor, n_heads):
    """The rows of q or k as llama.cpp's converter orders them: LlamaModel.permute()."""
    parts = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
    return parts.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def write_metadata(writer, c):
    """What llama.cpp's converter writes of a config."""
    writer.add_type("model")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    if writer.arch in ("llama", "smollm3"):
        writer.add_rope_dimension_count(c.head_dim)
    if c.model_type == "mistral" and c.sliding_window:
        writer.add_sliding_window(c.sliding_window)
    rope = c.rope_parameters
    rope_type = rope["rope_type"]
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope_type == "yarn" and "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def write_model(file, name="llama", edit=None):
    """Write one of MODELS, and return transformers' model of the weights that the file has.

    edit: a function that changes (writer, tensors by their names in the file) before they are
    written.
    """
    model_type, quantisation, rope, changes = MODELS[name]
    arch = "llama" if model_type == "mistral" else model_type
    rope = {"rope_type": "default", "rope_theta": 1e4, **rope}
    options = {**SHAPE, "rope_parameters": rope, **changes}
    theirs = make_theirs(model_type, "default", len(name), **options)
    c = theirs.config
    writer = gguf.GGUFWriter(file, arch)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    write_metadata(writer, c)
    tensors = {}
    for hf_name, p in theirs.named_parameters():
        kind = gguf.GGMLQuantizationType[quantisation if p.dim() == 2 else "F32"]
        rows = torch.arange(len(p))
        is_query = hf_name.split(".")[-2] in ("q_proj", "k_proj")
        if is_query and arch in ("llama", "smollm3"):
            rows = interleaved(rows, len(p) // c.head_dim)
        data = gguf.quants.quantize(p[rows].numpy(), kind)
        p[rows] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        tensors[names.get_name(hf_name, (".weight", ".bias"))] = (data, kind)
    if rope["rope_type"] == "llama3":  # what divides RoPE's frequencies
        plain = rope["rope_theta"] ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        table = plain / theirs.model.rotary_emb.inv_freq
        tensors["rope_freqs.weight"] = (table.numpy(), F32)
    if edit:
        edit(writer, tensors)
    for tensor_name, (data, kind) in tensors.items():
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return theirs


def metadata(values):
    """A function for edit: add or replace metadata; of a key given as None there is none."""

    def edit(writer, tensors):
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds |= {str: writer.add_string, list: writer.add_array}
        for key, value in values.items():
            writer.kv_data[0].pop(key, None)
            if value is not None:
                kinds[type(value)](key, value)

    return edit


# -----------------------------------------------------------------------------
# Import


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name, tmp_path):
    """Of the same dequantised weights, beyond the original context length; and written again."""
    theirs = write_model(tmp_path / "model.gguf", name)
    expected = theirs(TOKENS).logits
    assert expected.abs().max() > 0.5
    # known by its first bytes: ollama's have no suffix
    (tmp_path / "model.gguf").rename(tmp_path / "model")
    model, _ = imported(tmp_path / "model", tmp_path)
    assert (our_logits(model, TOKENS) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "scaling, options",
    [
        ({}, {}),
        ({"attn_factor": 2.0}, {"attention_factor": 2 * (0.1 * math.log(4) + 1)}),
        (
            {"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 16.0},
            {"beta_fast": 16.0},
        ),
    ],
)
def test_yarn_is_read_as_llama_cpp_reads_it(scaling, options, tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, **scaling}
    file = tmp_path / "model.gguf"
    write_model(file, edit=metadata({f"llama.rope.scaling.{key}": x for key, x in scaling.items()}))
    config = imported(file, tmp_path)[0].config
    assert (config.original_length, config.block_size) == (16, 64)
    assert config.extension["method"] == "yarn"
    assert config.extension["options"] == pytest.approx(options)


# -----------------------------------------------------------------------------
# Tokenizers


def test_a_sentencepiece_file_takes_the_tokenizer_of_a_folder(tmp_path, call):
    trained = train_sentencepiece("llama2")
    (tmp_path / "tok").mkdir()
    trained.save(str(tmp_path / "tok/tokenizer.json"))
    size = trained.get_vocab_size()
    tokens = [trained.id_to_token(i) for i in range(size)]
    file = tmp_path / "model.gguf"

    def edit(writer, tensors):
        table = torch.randn(size, SHAPE["hidden_size"])
        tensors["token_embd.weight"] = (table.numpy(), F32)
        values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
        values |= {"llama.vocab_size": size, "tokenizer.ggml.bos_token_id": 1}
        metadata(values)(writer, tensors)

    write_model(file, edit=edit)
    model, _ = imported(file, tmp_path, tokenizer=str(tmp_path / "tok"))
    tokenizer = tokenizer_from_json(model.meta["tokenizer"])
    assert tokenizer.encode("a b") == trained.encode("a b", add_special_tokens=False).ids
    assert model.meta["bos"] == 1  # llama.cpp's default for this kind
    tokens[500], tokens[501] = tokens[501], tokens[500]
    file.unlink()
    write_model(file, edit=edit)
    done = call("hf.py", "import", file, tmp_path / "other", f"--tokenizer={tmp_path / 'tok'}")
    assert_refused(done, "the tokenizer of another model: token 500 is")


def test_an_imported_file_continues_a_text(tmp_path, call):
    values = train("qwen2")
    size = len(values["tokenizer.ggml.tokens"])

    def edit(writer, tensors):
        tensors["token_embd.weight"] = (torch.randn(size, SHAPE["hidden_size"]).numpy(), F32)
        metadata({**values, "llama.vocab_size": size})(writer, tensors)

    write_model(tmp_path / "model.gguf", edit=edit)
    model, text = imported(tmp_path / "model.gguf", tmp_path)
    assert "note" not in text
    words = ["--start=ab", "--max_new_tokens=3", "--device=cpu"]
    assert call("sample.py", tmp_path / "run-model", *words).stdout.startswith("ab")


# -----------------------------------------------------------------------------
# Bad input


def with_key(key, value_type, value):
    """Add a metadata value, with whatever bytes for its type and value."""

    def edit(data):
        n_values = struct.unpack("<Q", data[16:24])[0]
        name = key.encode()
        added = struct.pack("<Q", len(name)) + name + struct.pack("<I", value_type) + value
        return data[:16] + struct.pack("<Q", n_values + 1) + added + data[24:]

    return edit


def with_place(place):
    """Change what the header says of a matrix: its dimensions, type and offset."""
    name = b"blk.0.attn_q.weight"

    def edit(data):
        start = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
        return data[:start] + struct.pack("<QQIQ", *place) + data[start + 28 :]

    return edit


HUGE = struct.pack("<Q", 1 << 60)
# what is done to the bytes of a whole file, and a part of the message
DAMAGED = {
    "no GGUF": (lambda data: b"PK" + data[2:], "does not begin as a GGUF file"),
    "a huge list": (with_key("x", 9, struct.pack("<I", 0) + HUGE), "cannot be used"),
    "text that is no UTF-8": (with_key("x", 8, struct.pack("<Q", 1) + b"\xff"), "utf-8"),
    "a tensor of a huge size": (with_place((1 << 40, 1 << 40, 0, 0)), "cannot be used"),
    "a tensor beyond the end": (with_place((64, 64, 0, 1 << 50)), "before its tensors do"),
    "rows of no whole blocks": (with_place((48, 64, 8, 0)), "of type Q8_0"),
}


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_model(file)
    return file.read_bytes()


def check_refused(call, phrase, folder):
    done = call("hf.py", "import", folder / "model.gguf", folder / "run")
    assert_refused(done, phrase)
    assert [file.name for file in folder.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name, whole_file, tmp_path, call):
    damage, message = DAMAGED[name]
    (tmp_path / "model.gguf").write_bytes(damage(whole_file))
    check_refused(call, message, tmp_path)


def test_a_file_may_end_anywhere(whole_file, tmp_path):
    """Cut at many places: always one sentence."""
    file = tmp_path / "model.gguf"
    for end in [*range(0, 3000, 37), *range(3000, len(whole_file), 9973), len(whole_file) - 40]:
        file.write_bytes(whole_file[:end])
        with pytest.raises(UserError, match="cannot be used"):
            read_gguf(file)


def with_tensor(name, data, kind="F32"):
    """A function for edit: replace a tensor."""
    return lambda writer, tensors: tensors.update({name: (data, gguf.GGMLQuantizationType[kind])})


def without_tensor(name):
    return lambda writer, tensors: tensors.pop(name)


UP, K = "blk.1.ffn_up.weight", "blk.0.attn_k.weight"
NOT_FINITE = np.full((SHAPE["intermediate_size"], SHAPE["hidden_size"]), math.nan, np.float32)
# one of MODELS, what is done to it, and a part of the message
UNSUITABLE = [
    ("llama", metadata({"general.architecture": "gemma"}), "not one of: llama, qwen2"),
    ("llama", metadata({"general.type": "adapter"}), "is no model but an adapter (LoRA), which"),
    ("llama", metadata({"general.architecture": "clip"}), "is no model but an mmproj, the half"),
    ("llama", metadata({"general.type": "imatrix"}), "is no model but 'imatrix': give the .gguf"),
    ("llama", metadata({"split.count": 3}), "is a part of a model"),
    ("llama", metadata({"llama.rope.dimension_count": 8}), "dimension_count=8"),
    ("qwen2", metadata({"qwen2.attention.sliding_window": 32}), "sliding_window=32"),
    ("llama-yarn", metadata({"llama.rope.scaling.yarn_ext_factor": 0.5}), "yarn_ext_factor"),
    ("llama-q8-linear", metadata({"llama.rope.scaling.attn_factor": 2.0}), "attn_factor"),
    ("llama-llama3", metadata({"llama.rope.scaling.factor": 2.0}), "rope_freqs.weight has no"),
    (
        "llama",
        without_tensor(UP),
        "(model.layers.1.mlp.up_proj.weight missing, or of another shape)",
    ),
    ("llama", with_tensor(K, np.zeros((64, 64), np.float32)), "or of another shape"),
    ("llama", with_tensor(K, np.zeros((32, 80), np.uint8), "Q8_1"), "Q8_1"),
    ("llama", with_tensor(UP, NOT_FINITE), "mlp.up_proj.weight has values that are not"),
]


@pytest.mark.parametrize(
    "name, edit, message", UNSUITABLE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_model_without_an_equivalent_is_refused(name, edit, message, tmp_path, call):
    write_model(tmp_path / "model.gguf", name, edit=edit)
    check_refused(call, message, tmp_path)
