"""GGUF files compared with transformers: models that the gguf package writes.

Optional: the gguf package (requirements-hf.txt). A real model is compared in test_smollm2.py.
"""

import json
import math
import struct
import sys
import tempfile
from pathlib import Path

import interchange
import pytest
import torch
from conftest import OFFLINE, assert_refused, assert_success, run_python
from safetensors.torch import load_file, save_file
from test_gguf_tokenizer import train
from test_hf import shapes_of
from test_hf_tokenizer import train_sentencepiece

from data.tokenizer import tokenizer_from_json
from model import GPT
from nanolong.errors import UserError
from nanolong.hub import gguf_file
from nanolong.hub.families import FAMILIES
from nanolong.hub.gguf_file import read_header
from nanolong.hub.gguf_import import import_gguf
from nanolong.hub.layout import tensor_layout

gguf = pytest.importorskip("gguf", reason="these need the gguf package: pip install gguf")

F32 = gguf.GGMLQuantizationType.F32
VOCAB_SIZE = interchange.VOCAB_SIZE
LENGTH = interchange.LENGTH

# -----------------------------------------------------------------------------
# Small models

# Rows are multiples of 32, of which Q8_0 makes blocks.
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": LENGTH // 2}
YARN_OPTIONS = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.6, 1.7, 1.9],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0],
    "original_max_position_embeddings": LENGTH // 2,
    "attention_factor": 1.2,
}
# name -> architecture in GGUF, quantisation, and what its config.json has other than SHAPE
MODELS = {
    "llama": ("llama", "F32", {}),
    "llama-f16-untied-no-gqa": (
        "llama",
        "F16",
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "llama-q8-linear": ("llama", "Q8_0", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-yarn": ("llama", "Q8_0", {"rope_scaling": YARN}),
    "llama-llama3": (
        "llama",
        "F32",
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "max_position_embeddings": 1 << 16},
    ),
    "llama-llama3-of-64": (
        "llama",
        "F32",
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": LENGTH}},
    ),
    "llama-longrope": ("llama", "F32", {"rope_scaling": LONGROPE}),
    "mistral-window": ("llama", "BF16", {"model_type": "mistral", "sliding_window": 21}),
    "mistral-no-window": ("llama", "F16", {"model_type": "mistral", "sliding_window": None}),
    "qwen2": ("qwen2", "F32", {}),
    "qwen2-q4-yarn": ("qwen2", "Q4_1", {"rope_scaling": {**YARN, **YARN_OPTIONS}}),
    "qwen3-q8-wide-heads": ("qwen3", "Q8_0", {"head_dim": 128, "tie_word_embeddings": False}),
    "smollm3": (
        "smollm3",
        "Q5_0",
        {"num_hidden_layers": 6, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
    ),
}
# those that transformers reads from the file itself: it leaves out RoPE scaling and windows
READ_BY_TRANSFORMERS = ("llama", "llama-f16-untied-no-gqa", "qwen2", "qwen3-q8-wide-heads")


def hf_values(name):
    """The config.json of one of MODELS."""
    architecture, _, more = MODELS[name]
    values = {"model_type": architecture, **SHAPE, **more}
    if architecture == "qwen2":
        values["use_sliding_window"] = False
    return values


def random_tensors(values):
    """Random weights by Hugging Face's names, such that the logits are of size 1."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        shapes = shapes_of(Path(folder))
    tensors = {}
    for name, shape in shapes.items():
        mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        std = shape[1] ** -0.5 if len(shape) == 2 and "layers" in name else 0.1
        tensors[name] = mean + std * torch.randn(shape)
    return tensors


def quantised(tensor, quantisation):
    """A tensor as llama.cpp stores it (vectors in float32): (data, type, what it stands for)."""
    kind = gguf.GGMLQuantizationType[quantisation if tensor.dim() == 2 else "F32"]
    data = gguf.quants.quantize(tensor.numpy(), kind)
    return data, kind, torch.from_numpy(gguf.quants.dequantize(data, kind).copy())


def interleaved(tensor, n_heads):
    """The rows of q or k as llama.cpp's converter orders them: LlamaModel.permute()."""
    parts = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
    return parts.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def not_interleaved(tensor, n_heads):
    rows = interleaved(torch.arange(len(tensor))[:, None], n_heads)[:, 0]
    return tensor[rows.argsort()]


def write_metadata(writer, architecture, values):
    """What llama.cpp's converter writes of a config.json."""
    writer.add_type("model")
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    # llama.cpp's converter leaves it out for Qwen; transformers needs it, as there are no tokens
    writer.add_vocab_size(values["vocab_size"])
    if architecture in ("llama", "smollm3"):
        writer.add_rope_dimension_count(values["head_dim"])
    if values.get("sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
    rope = values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type")
    if rope_type in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if rope_type in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope_type == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if rope_type == "yarn" and "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def llama3_table(values):
    """rope_freqs.weight, as llama.cpp's converter computes it."""
    rope = values["rope_scaling"]
    table = []
    for k in range(values["head_dim"] // 2):
        wavelength = 2 * torch.pi * values["rope_theta"] ** (2 * k / values["head_dim"])
        length = rope["original_max_position_embeddings"]
        if wavelength < length / rope["high_freq_factor"]:
            table.append(1.0)
        elif wavelength > length / rope["low_freq_factor"]:
            table.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (length / wavelength - rope["low_freq_factor"]) / span
            table.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(table)


def rope_tables(values):
    rope = values.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": llama3_table(values)}
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": torch.tensor(rope["long_factor"]),
            "rope_factors_short.weight": torch.tensor(rope["short_factor"]),
        }
    return {}


def write_model(file, name="llama", edit=None, seed=0):
    """Write one of MODELS with random weights, and return (config.json, the weights it stands for).

    edit: a function that changes (writer, tensors by their names in the file) before they are
    written.
    """
    torch.manual_seed(seed)
    architecture, quantisation, _ = MODELS[name]
    values = hf_values(name)
    writer = gguf.GGUFWriter(file, architecture)
    kind_of_model = getattr(gguf.MODEL_ARCH, architecture.upper())
    names = gguf.get_tensor_name_map(kind_of_model, values["num_hidden_layers"])
    write_metadata(writer, architecture, values)
    stored, meant = {}, {}
    for hf_name, tensor in random_tensors(values).items():
        heads = {
            "q_proj": values["num_attention_heads"],
            "k_proj": values["num_key_value_heads"],
        }.get(hf_name.split(".")[-2])
        permutes = heads and architecture in ("llama", "smollm3")
        if permutes:
            tensor = interleaved(tensor, heads)
        data, kind, tensor = quantised(tensor, quantisation)
        stored[names.get_name(hf_name, (".weight", ".bias"))] = (data, kind)
        meant[hf_name] = not_interleaved(tensor, heads) if permutes else tensor
    for table_name, table in rope_tables(values).items():
        stored[table_name] = (table.numpy(), F32)
    if edit:
        edit(writer, stored)
    for stored_name, (data, kind) in stored.items():
        writer.add_tensor(stored_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values, meant


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


def import_file(file, target):
    """Import a file; return what is printed, as lines."""
    return interchange.capture_output(import_gguf, GPT, file, target)


def check_weights(model, meant):
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    layout = tensor_layout(FAMILIES[model.meta["family"]], model.config, shapes)
    assert layout.keys() == meant.keys()
    for name, tensor in layout.items():
        assert torch.equal(parameters[tensor.parameters[0]], meant[name]), name


def largest_difference(model, case, answers):
    logits = interchange.compute_logits(model, case)
    assert logits["long"].abs().max() > 0.5
    return max(interchange.differences(logits, answers, case).values())


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """All MODELS as files, imported, and transformers' logits of the same weights.

    Returns (folder, name -> Case, the answers).
    """
    folder = tmp_path_factory.mktemp("gguf")
    cases = {}
    for seed, name in enumerate(MODELS):
        values, meant = write_model(folder / f"{name}.gguf", name, seed=seed)
        import_file(folder / f"{name}.gguf", folder / f"run-{name}")
        check_weights(GPT.load(folder / f"run-{name}"), meant)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
        save_file(meant, folder / name / "model.safetensors", {"format": "pt"})
        cases[name] = interchange.Case(name, seed, with_cache=False)
    return folder, cases, interchange.run_transformers(list(cases.values()), folder)


# -----------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name, compared):
    """Of the same dequantised weights, beyond the original context length too."""
    folder, cases, answers = compared
    difference = largest_difference(GPT.load(folder / f"run-{name}"), cases[name], answers)
    print(f"{name}: {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_rows_that_stay_interleaved_are_noticed(name, compared):
    """The comparison can fail: with the rows of k as the file has them, the logits differ."""
    folder, cases, answers = compared
    model = GPT.load(folder / f"run-{name}")
    for block in model.blocks:
        rows = block.attention.k.weight.data
        rows.copy_(interleaved(rows, SHAPE["num_key_value_heads"]))
    assert largest_difference(model, cases[name], answers) > 1e-2


def config_of(compared, name):
    return GPT.load(compared[0] / f"run-{name}").config


def test_settings_come_from_the_metadata(compared):
    config = config_of(compared, "llama")
    assert (config.n_layer, config.n_head, config.n_kv_head, config.head_dim) == (2, 4, 2, 16)
    assert (config.n_embd, config.mlp_dim, config.vocab_size) == (64, 96, VOCAB_SIZE)
    assert (config.block_size, config.rope_base, config.norm_eps) == (LENGTH, 10000.0, 1e-5)
    assert (config.tie_embeddings, config.extension, config.layer_pattern) == (True, None, "F")
    assert not config_of(compared, "llama-f16-untied-no-gqa").tie_embeddings
    assert config_of(compared, "qwen3-q8-wide-heads").head_dim == 128
    # every fourth layer is without RoPE, from the fourth on
    assert config_of(compared, "smollm3").layer_pattern == "FFFN"
    # a window is only there where the metadata have one
    for name, window in (("mistral-window", (21, "W")), ("mistral-no-window", (0, "F"))):
        config = config_of(compared, name)
        assert (config.window, config.layer_pattern) == window


@pytest.mark.parametrize(
    "name, method, factor, original_length, length",
    [
        ("llama-q8-linear", "pi", 2.0, LENGTH, 2 * LENGTH),
        ("llama-yarn", "yarn", 2.0, LENGTH // 2, LENGTH),
        ("llama-llama3", "llama3", 8.0, 8192, 1 << 16),
        # the metadata do not say that this table is llama3's
        ("llama-llama3-of-64", "longrope", 1.0, LENGTH, LENGTH),
        ("llama-longrope", "longrope", 2.0, LENGTH // 2, LENGTH),
        ("qwen2-q4-yarn", "yarn", 2.0, LENGTH // 2, LENGTH),
    ],
)
def test_rope_scaling_becomes_an_extension(name, method, factor, original_length, length, compared):
    config = config_of(compared, name)
    found = config.extension
    assert (found["method"], found["factor"]) == (method, factor)
    assert (config.original_length, config.block_size) == (original_length, length)
    if name == "qwen2-q4-yarn":
        assert found["options"] == pytest.approx(YARN_OPTIONS)


def llama_cpp_rope(file):
    """llama.cpp's RoPE beyond the original context length: (frequencies, factor of cos and sin).

    As llama_model_base::load_hparams(), llama_context's constructor and rope_yarn() have it.
    """
    header = read_header(file)

    def value(key, default):
        return header.metadata.get(f"llama.{key}", default)

    scaling_type = value("rope.scaling.type", "linear")
    factor = value("rope.scaling.factor", 0) or value("rope.scale_linear", 0) or 1
    freq_scale = 1 if scaling_type == "none" else 1 / factor
    is_yarn = scaling_type == "yarn"
    length = value("rope.scaling.original_context_length", value("context_length", 0))
    base = value("rope.freq_base", 10000.0)
    n_dims = value("rope.dimension_count", 0)

    def correction_dim(n_rotations):
        return n_dims * math.log(length / (n_rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(correction_dim(32)))
    high = min(n_dims - 1, math.ceil(correction_dim(1)))
    table = torch.ones(n_dims // 2)
    for name in ("rope_freqs.weight", "rope_factors_long.weight"):
        if name in header.tensors:
            table = gguf_file.read_tensor(file, header.tensors[name])
    frequencies = []
    for k in range(n_dims // 2):
        extrapolated = base ** (-2 * k / n_dims) / table[k].item()
        ramp = 0.0
        if is_yarn:
            ramp = 1 - min(1, max(0, (k - low) / max(0.001, high - low)))
        frequencies.append(freq_scale * extrapolated * (1 - ramp) + extrapolated * ramp)
    magnitude = value("rope.scaling.attn_factor", 1.0)
    if is_yarn:
        magnitude *= 1 + 0.1 * math.log(1 / freq_scale)
    return torch.tensor(frequencies), magnitude


def check_rope(file, run):
    """The frequencies of an imported file, and the factor of cos and sin, are llama.cpp's."""
    pos = GPT.load(run).pos
    if pos.is_dynamic:
        pos.update_tables(LENGTH)
    frequencies, magnitude = llama_cpp_rope(file)
    torch.testing.assert_close(pos.inv_freq.float(), frequencies, rtol=1e-5, atol=0)
    assert pos.attention_factor == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_rope_has_the_frequencies_of_llama_cpp(name, compared):
    check_rope(compared[0] / f"{name}.gguf", compared[0] / f"run-{name}")


@pytest.mark.parametrize(
    "scaling, method, length, options",
    [
        ({"scaling.factor": 1.0}, None, 64, {}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None, 64, {}),
        ({"scale_linear": 4.0}, "pi", 256, {}),
        ({"scaling.factor": 4.0, "scaling.original_context_length": 16}, "pi", 64, {}),
        (  # as llama.cpp saves it
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.yarn_ext_factor": -1.0,
                "scaling.yarn_attn_factor": 1.0,
            },
            "yarn",
            256,
            {},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 1.5},
            "yarn",
            256,
            {"attention_factor": 1.5 * 1.138629},
        ),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(scaling, method, length, options, tmp_path):
    edit = metadata({f"llama.rope.{key}": value for key, value in scaling.items()})
    write_model(tmp_path / "model.gguf", edit=edit)
    import_file(tmp_path / "model.gguf", tmp_path / "run")
    config = GPT.load(tmp_path / "run").config
    assert config.block_size == length
    assert (config.extension or {}).get("method") == method
    if method:
        assert config.extension["options"] == pytest.approx(options)
    check_rope(tmp_path / "model.gguf", tmp_path / "run")


def test_the_number_of_token_ids_may_be_absent(tmp_path):
    """As llama.cpp's converter leaves it out for Qwen."""
    write_model(tmp_path / "model.gguf", "qwen2", metadata({"qwen2.vocab_size": None}))
    import_file(tmp_path / "model.gguf", tmp_path / "run")
    assert GPT.load(tmp_path / "run").config.vocab_size == VOCAB_SIZE


def test_tensors_are_dequantised_in_parts(tmp_path, monkeypatch):
    _, meant = write_model(tmp_path / "model.gguf", "llama-yarn")
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 200)
    import_file(tmp_path / "model.gguf", tmp_path / "run")
    check_weights(GPT.load(tmp_path / "run"), meant)


DEQUANTISABLE = [F32, gguf.GGMLQuantizationType.F16]
DEQUANTISABLE += sorted(gguf.quants._type_traits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantises_is_read(kind, tmp_path, rng, monkeypatch):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = rng.integers(256, size=(5, 3 * block_bytes), dtype="uint8")
    (tmp_path / "data").write_bytes(bytes(64) + stored.tobytes())
    tensor = gguf_file.GGUFTensor((5, 3 * block_size), kind, 64, stored.nbytes)
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 2 * 3 * block_bytes)
    found = gguf_file.read_tensor(tmp_path / "data", tensor)
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
    # random bytes are not all numbers
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


TRANSFORMERS_SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

folder, inputs, output = sys.argv[2:]
answers = {}
for name, tokens in json.load(open(inputs)).items():
    options = {"gguf_file": name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        answers[name] = model(torch.tensor(tokens)).logits.contiguous()
save_file(answers, output)
"""


def read_by_transformers(folder, tokens, workplace):
    """transformers' logits of GGUF files that it reads itself: name of the file -> (B, T, V).

    tokens: name of the file -> token ids.
    """
    pytest.importorskip(
        "accelerate", reason="transformers reads GGUF with it: pip install accelerate"
    )
    (workplace / "inputs.json").write_text(json.dumps(tokens))
    words = [Path(gguf.__file__).parent.parent, folder.resolve(), "inputs.json", "answers"]
    assert_success(run_python(TRANSFORMERS_SCRIPT, *words, cwd=workplace, env=OFFLINE))
    return load_file(workplace / "answers")


@pytest.mark.slow
def test_logits_agree_with_transformers_own_reading_of_the_file(compared, tmp_path):
    folder, cases, _ = compared
    tokens = {f"{name}.gguf": cases[name].tokens.tolist() for name in READ_BY_TRANSFORMERS}
    answers = read_by_transformers(folder, tokens, tmp_path)
    for name in READ_BY_TRANSFORMERS:
        theirs = {f"{name}/long": answers[f"{name}.gguf"]}
        ours = interchange.compute_logits(GPT.load(folder / f"run-{name}"), cases[name])
        difference = interchange.differences({"long": ours["long"]}, theirs, cases[name])["long"]
        print(f"{name}: {difference:.1e}")
        assert difference < 1e-3


# -----------------------------------------------------------------------------
# Bad input


def replace(old, new):
    """Change bytes of a file, which must be there once."""

    def edit(data):
        assert data.count(old) == 1
        return data.replace(old, new)

    return edit


def with_key(key, value_type, value):
    """Add a metadata value, with whatever bytes for its type and value."""

    def edit(data):
        n_values = struct.unpack("<Q", data[16:24])[0]
        name = key.encode()
        added = struct.pack("<Q", len(name)) + name + struct.pack("<I", value_type) + value
        return data[:16] + struct.pack("<Q", n_values + 1) + added + data[24:]

    return edit


def with_place(name, dimensions=None, kind=None, offset=None):
    """Change what the header says of a matrix."""

    def edit(data):
        start = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        place = struct.Struct("<IQQIQ")
        n, *found_dimensions, found_kind, found_offset = place.unpack_from(data, start)
        assert n == 2
        values = dimensions or found_dimensions
        kind_or_found = found_kind if kind is None else kind
        offset_or_found = found_offset if offset is None else offset
        new = place.pack(n, *values, kind_or_found, offset_or_found)
        return data[:start] + new + data[start + place.size :]

    return edit


HUGE = struct.pack("<Q", 1 << 60)
# what is done to the bytes of a whole file, and a part of the message
DAMAGED = {
    "no GGUF": (lambda data: b"PK" + data[2:], "is no GGUF file"),
    "another version": (lambda data: data[:4] + b"\1\0\0\0" + data[8:], "its version is 1"),
    "the other byte order": (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "its version is"),
    "a huge number of values": (lambda data: data[:16] + HUGE + data[24:], "its header"),
    "a huge number of tensors": (lambda data: data[:8] + HUGE + data[16:], "its header"),
    "a huge text": (with_key("x", 8, HUGE), "ends within its header"),
    "a huge list": (with_key("x", 9, struct.pack("<I", 0) + HUGE), "ends within its header"),
    "a huge list of texts": (with_key("x", 9, struct.pack("<I", 8) + HUGE), "its header"),
    "a list of lists": (with_key("x", 9, struct.pack("<IQ", 9, 1)), "unknown type 9"),
    "a value of an unknown type": (with_key("x", 77, b""), "unknown type 77"),
    "text that is no UTF-8": (with_key("x", 8, struct.pack("<Q", 1) + b"\xff"), "utf-8"),
    "a key twice": (with_key("general.type", 7, b"\1"), "twice"),
    "an absurd alignment": (with_key("general.alignment", 4, b"\0\0\0\0"), "alignment"),
    "a tensor twice": (replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"), "twice"),
    "a tensor of no size": (with_place("blk.0.attn_q.weight", (64, 0)), "rows of 64"),
    "a tensor of a huge size": (
        with_place("blk.0.attn_q.weight", (1 << 40, 1 << 40)),
        "ends at byte",
    ),
    "a tensor beyond the end": (with_place("blk.0.attn_q.weight", offset=1 << 50), "ends at byte"),
    "tensors that overlap": (with_place("blk.0.attn_q.weight", offset=0), "overlaps"),
    "a tensor of an unknown type": (with_place("blk.0.attn_q.weight", kind=9999), "type 9999"),
    "rows of no whole blocks": (with_place("blk.0.attn_q.weight", (48, 64), 8), "Q8_0"),
}


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_model(file)
    return file.read_bytes()


def refusal(call, file, folder):
    """The message of hf.py, which is one line, with nothing written."""
    before = sorted(folder.iterdir())
    done = call("hf.py", "import", file, folder / "refused")
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert sorted(folder.iterdir()) == before
    return done.stderr


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name, whole_file, tmp_path, call):
    damage, message = DAMAGED[name]
    (tmp_path / "model.gguf").write_bytes(damage(whole_file))
    assert message in refusal(call, tmp_path / "model.gguf", tmp_path)


def test_a_file_may_end_anywhere(whole_file, tmp_path):
    """Cut at many places: always one sentence."""
    file = tmp_path / "model.gguf"
    for end in [*range(0, 3000, 37), *range(3000, len(whole_file), 9973), len(whole_file) - 40]:
        file.write_bytes(whole_file[:end])
        with pytest.raises(UserError, match="no GGUF file|not a whole GGUF file"):
            read_header(file)


def test_changed_bytes_of_the_header_are_no_crash(whole_file, tmp_path, rng):
    """A file with some other bytes is imported, or refused in one sentence."""
    file = tmp_path / "model.gguf"
    header_bytes = whole_file.index(b"blk.1.ffn_down.weight")
    for i in range(100):
        data = bytearray(whole_file)
        for position in rng.integers(header_bytes, size=rng.integers(1, 4)):
            data[position] = rng.integers(256)
        file.write_bytes(data)
        try:
            import_file(file, tmp_path / str(i))
        except UserError as error:
            assert len(str(error).splitlines()) == 1
            assert not (tmp_path / str(i)).exists()


def with_tensor(name, *shape, kind="F32"):
    """A function for edit: add or replace a tensor, of zeros; without a shape there is none."""

    def edit(writer, tensors):
        if not shape:
            del tensors[name]
            return
        quantisation = gguf.GGMLQuantizationType[kind]
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        if kind == "F32":
            tensors[name] = (torch.zeros(shape).numpy(), quantisation)
            return
        n_bytes = shape[-1] // block_size * block_bytes
        tensors[name] = (torch.zeros(shape[0], n_bytes).byte().numpy(), quantisation)

    return edit


def with_value(name, value):
    """A function for edit: one weight of a tensor in float32 becomes this value."""

    def edit(writer, tensors):
        data, _ = tensors[name]
        data.flat[5] = value

    return edit


# one of MODELS, what is done to it, and a part of the message
UNSUITABLE = [
    ("llama", metadata({"general.architecture": "gemma"}), "is not read from GGUF"),
    ("llama", metadata({"general.architecture": None}), "architecture None"),
    ("llama", metadata({"general.type": "adapter"}), "'adapter', not a model"),
    ("llama", metadata({"split.count": 3}), "one of 3 parts"),
    ("llama", metadata({"llama.expert_count": 8}), "expert_count is 8"),
    ("llama", metadata({"llama.attention.causal": False}), "attention.causal is False"),
    ("llama", metadata({"llama.attention.head_count_kv": [2, 1]}), "differs from layer to layer"),
    ("llama", metadata({"llama.attention.head_count": 0}), "head_count is 0"),
    ("llama", metadata({"llama.attention.value_length": 8}), "value_length is 8"),
    ("llama", metadata({"llama.rope.dimension_count": 8}), "dimension_count is 8"),
    ("llama", metadata({"llama.attention.sliding_window_pattern": 4}), "window_pattern is 4"),
    ("qwen2", metadata({"qwen2.attention.sliding_window": 32}), "sliding_window is 32"),
    ("llama", metadata({"llama.block_count": 1 << 20}), "num_hidden_layers is 1048576"),
    ("llama", metadata({"llama.block_count": 1}), "no parameter for blk.1."),
    ("llama", metadata({"llama.block_count": 3}), "blk.2.attn_norm.weight is absent"),
    ("llama", metadata({"llama.embedding_length": "64"}), "hidden_size is '64'"),
    ("llama", metadata({"llama.context_length": None}), "max_position_embeddings is None"),
    ("llama", metadata({"llama.vocab_size": 1000}), "token_embd.weight is (131, 64)"),
    ("llama", metadata({"llama.rope.scaling.type": "su"}), "scaling.type is 'su'"),
    ("llama-yarn", metadata({"llama.rope.scaling.factor": 0.5}), "factor is 0.5"),
    ("llama-yarn", metadata({"llama.rope.scaling.yarn_ext_factor": 0.5}), "ext_factor is 0.5"),
    ("llama-yarn", metadata({"llama.rope.scaling.yarn_log_multiplier": 1.0}), "log_multiplier"),
    ("llama-q8-linear", metadata({"llama.rope.scaling.attn_factor": 2.0}), "attn_factor is 2.0"),
    (
        "llama-llama3",
        metadata({"llama.rope.scaling.factor": 2.0}),
        "the factor 2 and the tables rope_freqs.weight",
    ),
    ("llama-llama3", with_tensor("rope_freqs.weight", 8), "numbers from 1e-30"),
    ("llama-llama3", with_tensor("rope_freqs.weight", 4), "rope_freqs.weight is (4,)"),
    (
        "llama-longrope",
        with_tensor("rope_factors_long.weight"),
        "the tables rope_factors_short.weight",
    ),
    ("smollm3", with_tensor("rope_freqs.weight", 8), "no parameter for rope_freqs.weight"),
    ("llama", with_tensor("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is absent"),
    ("llama", with_tensor("blk.0.attn_q.bias", 64), "no parameter for blk.0.attn_q.bias"),
    ("llama", with_tensor("blk.0.attn_k.weight", 64, 64), "attn_k.weight is (64, 64)"),
    ("llama", with_tensor("blk.0.attn_k.weight", 32, 64, kind="Q8_1"), "of the type Q8_1"),
    ("llama", with_value("blk.1.ffn_up.weight", math.nan), "mlp.up.weight has values that are not"),
]


@pytest.mark.parametrize(
    "name, edit, message", UNSUITABLE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_model_without_an_equivalent_is_refused(name, edit, message, tmp_path, call):
    write_model(tmp_path / "model.gguf", name, edit)
    assert message in refusal(call, tmp_path / "model.gguf", tmp_path)


def test_hf_py_imports_a_file_from_the_shell(tmp_path, call):
    write_model(tmp_path / "model.gguf")
    done = assert_success(call("hf.py", "import", tmp_path / "model.gguf", tmp_path / "run"))
    assert "64 tokens" in done.stdout
    assert "the file has no tokenizer: the model works on token ids only" in done.stdout
    assert GPT.load(tmp_path / "run").meta["imported"] == "model.gguf"

    done = call("hf.py", "import", tmp_path / "model.gguf", tmp_path / "run")
    assert (done.returncode, "holds a run already" in done.stderr) == (2, True)
    assert "there is no file" in refusal(call, tmp_path / "other.gguf", tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    assert "is no GGUF file" in refusal(call, tmp_path / "text.txt", tmp_path)


def with_tokenizer(name):
    """Add the metadata of a small vocabulary, and in the embedding a row for each token."""

    def edit(writer, tensors):
        added = train(name)
        n_tokens = len(added["tokenizer.ggml.tokens"])
        metadata({**added, "llama.vocab_size": n_tokens})(writer, tensors)
        tensors["token_embd.weight"] = (0.1 * torch.randn(n_tokens, 64)).numpy(), F32

    return edit


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_an_imported_file_continues_a_text(name, tmp_path, call):
    write_model(tmp_path / "model.gguf", edit=with_tokenizer(name))
    done = call("hf.py", "import", tmp_path / "model.gguf", tmp_path / "run")
    assert (done.returncode, "token ids only" in done.stdout) == (0, False), done
    options = ["--start=def main", "--max_new_tokens=3", "--temperature=0"]
    done = assert_success(call("sample.py", tmp_path / "run", *options))
    assert done.stdout.startswith("def main")


def test_a_file_whose_text_cannot_be_read_is_imported_for_token_ids(tmp_path, call):
    def edit(writer, tensors):
        with_tokenizer("gpt-2")(writer, tensors)
        metadata({"tokenizer.ggml.pre": "tekken"})(writer, tensors)

    write_model(tmp_path / "model.gguf", edit=edit)
    done = assert_success(call("hf.py", "import", tmp_path / "model.gguf", tmp_path / "run"))
    assert "note: the file's pre-tokenizer is 'tekken'" in done.stdout
    done = call("sample.py", tmp_path / "run", "--start=def main")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_sentencepiece_file_takes_the_tokenizer_of_a_directory(tmp_path, call):
    tokenizer = train_sentencepiece("bpe")
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "llama.vocab_size": len(tokens),
    }

    def edit(writer, tensors):
        metadata(vocabulary)(writer, tensors)
        tensors["token_embd.weight"] = (0.1 * torch.randn(len(tokens), 64)).numpy(), F32

    file, folder = tmp_path / "model.gguf", tmp_path / "hf"
    write_model(file, edit=edit)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = ["hf.py", "import", file]
    done = assert_success(call(*words, tmp_path / "ids"))
    assert "'llama', and only byte-level BPE is read" in done.stdout
    assert "token ids only (for text, give --tokenizer=DIR" in done.stdout
    # llama.cpp adds it for such a vocabulary, if the file does not say otherwise
    assert GPT.load(tmp_path / "ids").meta["bos"] == 1

    done = assert_success(call(*words, tmp_path / "run", f"--tokenizer={folder}"))
    assert "token ids only" not in done.stdout
    text = "def main(): # é"
    meta = GPT.load(tmp_path / "run").meta
    assert meta["bos"] == 1
    imported = tokenizer_from_json(meta["tokenizer"])
    assert list(imported.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids
    options = [f"--start={text}", "--max_new_tokens=3", "--temperature=0"]
    assert assert_success(call("sample.py", tmp_path / "run", *options)).stdout.startswith(text)

    # of another model, and of none
    spec = json.loads(tokenizer.to_str())
    names = {tokens[300]: tokens[301], tokens[301]: tokens[300]}
    vocab = spec["model"]["vocab"]
    spec["model"]["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    message = f"token 300 is {tokens[301]!r} there, and {tokens[300]!r} in "
    assert_refused(call(*words, tmp_path / "other", f"--tokenizer={folder}"), message)
    message = "tokenizer.json: give --tokenizer the directory"
    assert_refused(call(*words, tmp_path / "other", f"--tokenizer={tmp_path}"), message)
    assert not (tmp_path / "other").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path, call):
    def edit(writer, tensors):
        rows, kind = tensors["token_embd.weight"]
        with_tokenizer("gpt-2")(writer, tensors)
        metadata({"llama.vocab_size": VOCAB_SIZE})(writer, tensors)
        tensors["token_embd.weight"] = rows, kind

    write_model(tmp_path / "model.gguf", edit=edit)
    n_tokens = len(train("gpt-2")["tokenizer.ggml.tokens"]) - 2  # without padding
    assert f"has {n_tokens} tokens" in refusal(call, tmp_path / "model.gguf", tmp_path)


def test_the_missing_package_is_named(tmp_path, call, monkeypatch):
    write_model(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in refusal(call, tmp_path / "model.gguf", tmp_path)
