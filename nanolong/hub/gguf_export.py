"""Export a model as a GGUF file, which llama.cpp reads.

Settings and weights are those of the Hugging Face directory that exporting.py writes, under
llama.cpp's names and in its order. What llama.cpp computes by itself, such as YaRN's factor on cos
and sin, is matched or becomes part of the queries' weights; what it does not compute is refused.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from data import BPETokenizer, tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.exporting import export_dtype, export_tensor, write_config
from nanolong.hub.families import FAMILIES
from nanolong.hub.gguf_file import gguf_package, read_header
from nanolong.hub.gguf_import import ARCHITECTURES, FIELDS, WITH_ROPE_TABLES, gguf_layout
from nanolong.hub.gguf_tokenizer import tokenizer_metadata
from nanolong.hub.layout import UNROTATED, stored_shapes
from nanolong.hub.rope import plain_frequencies
from nanolong.hub.tokenizer import make_exported, read_named_tokenizer
from nanolong.run import sync

# --store -> the type of matrices; all other tensors are float32
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
# type of a value of the metadata -> the writer's method, for the type that llama.cpp expects
ADD = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
# of YaRN's options llama.cpp has these values, also where it reads none
YARN_OPTIONS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def export_gguf(model, target, store="auto", tokenizer_from=""):
    """Write a loaded model to one file, whole or not at all.

    store: a key of TYPES, or "auto": as in the checkpoint, or float32 if queries are scaled.
    tokenizer_from: a Hugging Face directory whose tokenizer is written instead of the model's own,
    or "none". Raises UserError for what llama.cpp would compute otherwise.
    """
    gguf = gguf_package()
    target = Path(target)
    if target.exists():
        raise UserError(f"{target} exists already: remove it, or choose another file")
    written = write_config(model, llama_cpp_families(model.config), "llama.cpp")
    architecture = written.settings["model_type"]
    rope_values, table, written = rope_metadata(model, written, architecture)
    if store == "auto":
        store = str(export_dtype(model, written)).removeprefix("torch.")
    # of type linear, the length of a config.json is the original one
    values = written.settings | {"max_position_embeddings": model.config.block_size}
    metadata = {f"{architecture}.{key}": values[name] for key, name in FIELDS.items()}
    metadata |= rope_values | text_metadata(model, tokenizer_from)

    writer = gguf.GGUFWriter(None, architecture)
    file_type = "ALL_F32" if store == "float32" else f"MOSTLY_{TYPES[store]}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_name(model.folder.resolve().parent.name)
    if store == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata.items():
        getattr(writer, f"add_{ADD[type(value)]}")(key, value)
    if table:
        writer.add_tensor("rope_freqs.weight", np.array(table, np.float32))
    add_tensors(gguf, writer, model, written, store)

    part = target.parent / f".tmp-{target.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read_header(part)  # our own reader trusts nothing in it
        sync(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    print(f"{target}: {architecture}, {model.config.block_size} tokens, {store}")


def llama_cpp_families(config):
    """Return the families that llama.cpp computes as we do: model_type -> entry.

    It applies no window in these, has SiLU in every MLP whatever config.json said, and leaves RoPE
    out of every fourth layer of a SmolLM3.
    """
    families = {}
    for name in ARCHITECTURES:
        changes = {"heads_divide": False, "patterns": ("FN",) if name == "smollm3" else ("F",)}
        settings = FAMILIES[name].settings | {"mlp": ("swiglu",)}
        families[name] = replace(FAMILIES[name], settings=settings, **changes)
    if any(config.uses_positions(i) == ((i + 1) % 4 == 0) for i in range(config.n_layer)):
        del families["smollm3"]
    return families


def rope_metadata(model, written, architecture):
    """Return (metadata, the table that divides the frequencies or None, Written for the file)."""
    config = model.config
    rope = next(iter(written.ropes.values()))
    parameters = rope.parameters
    kind = parameters["rope_type"]
    values = {"type": "none"}
    table = None
    has_yarn_options = YARN_OPTIONS | parameters == parameters | YARN_OPTIONS
    if kind == "linear" or (kind == "yarn" and has_yarn_options):
        values = {"type": kind, "factor": float(parameters["factor"])}
    elif kind == "longrope":
        table = parameters["long_factor"]
        if table != parameters["short_factor"]:
            raise UserError(
                "llama.cpp chooses longrope's table by its cache's size: leave out short_factor"
            )
    elif kind != "default":
        plain = plain_frequencies(parameters["rope_theta"], config.head_dim)
        table = (plain / model.pos.inv_freq.double()).clamp(max=UNROTATED).tolist()
    if table and architecture not in WITH_ROPE_TABLES:
        raise UserError(
            f"llama.cpp reads no RoPE table for {architecture}: extend by --method=yarn, pi or ntk"
        )
    if table:
        # its angles have no factor on cos and sin in llama.cpp: the queries get all of it
        rope = rope._replace(attention_factor=1.0)
    if kind != "default":
        values["original_context_length"] = config.original_length
    metadata = {f"{architecture}.rope.scaling.{key}": value for key, value in values.items()}
    return metadata, table, written._replace(ropes=dict.fromkeys(written.ropes, rope))


def text_metadata(model, tokenizer_from):
    """Return the metadata of the tokenizer, or what says that there is none."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    bos = model.meta.get("bos")
    config = model.config
    if tokenizer_from == "none" or not (tokenizer or tokenizer_from):
        print("note: the file has no tokenizer: only token ids work")
        metadata = {"tokenizer.ggml.model": "none"}
        if bos is not None:
            metadata |= {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": True}
        return metadata
    if tokenizer_from:
        tokenizer, _, _ = read_named_tokenizer(Path(tokenizer_from), config.vocab_size)
    is_gpt2 = isinstance(tokenizer, BPETokenizer) and tokenizer.encoding.name == "gpt2"
    exported = make_exported(tokenizer, bos is not None, config.block_size)
    name = "gpt-2" if is_gpt2 else None
    return tokenizer_metadata(exported, config.vocab_size, bos is not None, name)


def add_tensors(gguf, writer, model, written, store):
    """Add all weights, each of which is made when it is written, and then freed."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    layout = gguf_layout(written.family, model.config, shapes, written.settings["model_type"])

    def make_tensor(name):
        return export_tensor(model, written, layout[name]).float().numpy()

    n_rounded = 0
    for name, shape in stored_shapes(layout, shapes).items():
        kind = TYPES[store] if len(shape) == 2 else "F32"
        # a block of Q8_0 holds 32 values of a row
        if kind == "Q8_0" and shape[1] % 32:
            kind = "F16"
            n_rounded += 1
        kind = gguf.GGMLQuantizationType[kind]
        like = gguf.LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, shape)
        tensor = gguf.LazyNumpyTensor(meta=like, args=(name,), func=make_tensor)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    if n_rounded:
        print(f"note: {n_rounded} tensors whose rows are no blocks of 32 are float16")
