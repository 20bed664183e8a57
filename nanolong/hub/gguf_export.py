"""Export a model as a GGUF file, which llama.cpp reads.

Settings and weights are those of the Hugging Face directory that exporting.py writes, under
llama.cpp's names and in its order. What llama.cpp computes by itself, such as YaRN's factor on cos
and sin, is matched or becomes part of the queries' weights; what it does not compute is refused.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from data import BPETokenizer, tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.exporting import copy_tokenizer, export_dtype, export_tensor, write_config
from nanolong.hub.families import FAMILIES
from nanolong.hub.gguf_file import gguf_package, read_header
from nanolong.hub.gguf_import import (
    ARCHITECTURES,
    INTERLEAVED,
    WITH_ROPE_TABLES,
    adjacent_first,
    gguf_name,
)
from nanolong.hub.gguf_tokenizer import tokenizer_metadata
from nanolong.hub.layout import UNROTATED, stored_shapes, tensor_layout
from nanolong.hub.rope import WrittenRope, plain_frequencies
from nanolong.hub.tokenizer import read_files, write_tokenizer
from nanolong.run.checkpoint import sync

# --store -> the type of matrices; all other tensors are float32
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
# type of a value of the metadata -> the writer's method, for the type that llama.cpp expects
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
ADD[list] = "add_array"
BLOCK = 32  # the values of a row that Q8_0 stores together


def export_gguf(model, target, store="auto", tokenizer_from=""):
    """Write a model that checkpoint.open_model() returned to one file, whole or not at all.

    store: a key of TYPES, or "auto": as in the checkpoint, or float32 if queries are scaled.
    tokenizer_from: a Hugging Face directory whose tokenizer is written instead of the model's own,
    or "none". Raises UserError for what llama.cpp would compute otherwise.
    """
    gguf = gguf_package()
    target = Path(target)
    if target.exists():
        raise UserError(f"{target} exists already: remove it, or choose another file")
    written = write_config(model, families_of(model.config), "llama.cpp")
    architecture = written.settings["model_type"]
    values, table, rope = rope_metadata(model, written, architecture)
    written = written._replace(ropes=dict.fromkeys(written.ropes, rope))
    if store == "auto":
        store = str(export_dtype(model, written)).removeprefix("torch.")
    metadata = model_metadata(model.config, architecture) | values
    metadata |= text_metadata(model, tokenizer_from)

    part = target.parent / f".tmp-{target.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer = gguf.GGUFWriter(part, architecture)
        file_type = "ALL_F32" if store == "float32" else f"MOSTLY_{TYPES[store]}"
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_name(model.folder.resolve().parent.name)
        if store == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in metadata.items():
            getattr(writer, ADD[type(value)])(key, value)
        write_tensors(gguf, writer, model, written, table, store)
        read_header(part)  # our own reader trusts nothing in it
        sync(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    print(f"{target}: {architecture}, {model.config.block_size} tokens, {store}")


# -----------------------------------------------------------------------------
# Settings


def families_of(config):
    """Return the families that llama.cpp computes as we do: model_type -> entry.

    It applies no window in these, has SiLU in every MLP whatever config.json said, and leaves RoPE
    out of every fourth layer of a SmolLM3.
    """
    families = {}
    for name in ARCHITECTURES:
        settings = {**FAMILIES[name].settings, "mlp": ("swiglu",)}
        families[name] = replace(
            FAMILIES[name], patterns=("F",), heads_divide=False, settings=settings
        )
    fourth = [(layer + 1) % 4 == 0 for layer in range(config.n_layer)]
    without = [not config.uses_positions(layer) for layer in range(config.n_layer)]
    families["smollm3"] = replace(
        families["smollm3"], patterns=("FN",) if without == fourth else ()
    )
    return families


def model_metadata(config, architecture):
    values = {
        "block_count": config.n_layer,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def rope_metadata(model, written, architecture):
    """Return (metadata, the table that divides the frequencies or None, the WrittenRope)."""
    config = model.config
    rope = next(iter(written.ropes.values()))
    parameters = rope.parameters
    kind = parameters["rope_type"]
    values = {"rope.freq_base": float(parameters["rope_theta"]), "rope.scaling.type": "none"}
    # of YaRN's options llama.cpp has these values, also where it reads none
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    is_usual = all(parameters.get(key, value) == value for key, value in usual.items())
    # the table's angles have no factor on cos and sin in llama.cpp: the queries get all of it
    plain = WrittenRope(parameters, config.block_size, rope.channel_order)
    table = None
    if kind == "default":
        rope = plain
    elif kind == "linear" or (kind == "yarn" and is_usual):
        values["rope.scaling.type"] = kind
        values["rope.scaling.factor"] = float(parameters["factor"])
        values["rope.scaling.original_context_length"] = config.original_length
    elif kind == "longrope":
        if parameters["long_factor"] != parameters["short_factor"]:
            raise UserError(
                "llama.cpp chooses between longrope's two tables by the size of its cache, not by "
                "the length of the text: leave out short_factor to export"
            )
        table, rope = parameters["long_factor"], plain
    else:
        frequencies = plain_frequencies(parameters["rope_theta"], config.head_dim)
        divisors = frequencies / model.pos.inv_freq.double()
        table, rope = divisors.clamp(max=UNROTATED).tolist(), plain
    if table and architecture not in WITH_ROPE_TABLES:
        raise UserError(
            f"llama.cpp reads no table of RoPE frequencies for {architecture}, which this method "
            "needs: extend by --method=yarn, pi or ntk to export"
        )
    if table:
        values["rope.scaling.original_context_length"] = config.original_length
    return {f"{architecture}.{key}": value for key, value in values.items()}, table, rope


def text_metadata(model, tokenizer_from):
    """Return the metadata of the tokenizer, or what says that there is none."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer_from == "none" or not (tokenizer or tokenizer_from):
        print("note: the file has no tokenizer: only token ids work")
        bos = model.meta.get("bos")
        starts = {} if bos is None else {"bos_token_id": bos, "add_bos_token": True}
        named = {f"tokenizer.ggml.{key}": value for key, value in starts.items()}
        return {"tokenizer.ggml.model": "none", **named}
    adds_bos = model.meta.get("bos") is not None
    with tempfile.TemporaryDirectory() as place:
        if tokenizer_from:
            copy_tokenizer(Path(tokenizer_from), Path(place))
        else:
            write_tokenizer(Path(place), tokenizer, adds_bos, model.config.block_size)
        files, settings = read_files(Path(place))
    if "tokenizer.json" not in files:
        raise UserError(
            f"there is no tokenizer.json in --tokenizer={tokenizer_from}: give its folder"
        )
    is_gpt2 = isinstance(tokenizer, BPETokenizer) and tokenizer.encoding.name == "gpt2"
    name = "gpt-2" if is_gpt2 and not tokenizer_from else None
    return tokenizer_metadata(files, settings, model.config.vocab_size, adds_bos, name)


# -----------------------------------------------------------------------------
# Tensors


def write_tensors(gguf, writer, model, written, table, store):
    """Write the header, and then the tensors with one of them in memory."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layout = tensor_layout(written.family, model.config, shapes)
    if table:
        table = np.array(table, np.float32)
        writer.add_tensor_info("rope_freqs.weight", table.shape, table.dtype, table.nbytes)
    types = {}
    rounded = []
    for name, shape in stored_shapes(layout, shapes).items():
        types[name] = gguf.GGMLQuantizationType[TYPES[store] if len(shape) == 2 else "F32"]
        if types[name].name == "Q8_0" and shape[1] % BLOCK:
            types[name] = gguf.GGMLQuantizationType.F16
            rounded.append(name)
        width = gguf.quant_shape_to_byte_shape(shape, types[name])
        n_bytes = int(np.prod(width))
        writer.add_tensor_info(gguf_name(name), shape, np.dtype("V1"), n_bytes, types[name])
    if rounded:
        print(f"note: {len(rounded)} tensors whose rows are no blocks of {BLOCK} are float16")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if table is not None:
        writer.write_tensor_data(table)
    interleaved = written.settings["model_type"] in INTERLEAVED
    for name, held in layout.items():
        tensor = export_tensor(model, written, held).float()
        if interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = adjacent_first(tensor, model.config.head_dim)
        data = gguf.quants.quantize(tensor.contiguous().numpy(), types[name])
        writer.write_tensor_data(data.view(np.uint8))
    writer.close()
