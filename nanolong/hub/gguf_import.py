"""Import GGUF files, llama.cpp's format: one file becomes the first checkpoint of a run folder.

The metadata become the fields of a config.json, from which importing.py makes the settings of the
model; the tensors are dequantised one at a time. What has no equivalent here is refused by name.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from nanolong.errors import UserError
from nanolong.hub.families import FAMILIES, UNSUPPORTED
from nanolong.hub.gguf_file import gguf_package, read_header, read_tensor
from nanolong.hub.gguf_tokenizer import NORMAL, text_obstacle, tokenizer_files_of
from nanolong.hub.importing import (
    check_tensors,
    check_unused,
    finite_weights,
    make_config,
    parameter_shapes,
    read_settings,
    write_imported,
)
from nanolong.hub.layout import ADJACENT, ConfigFields, tensor_layout
from nanolong.hub.tokenizer import make_tokenizer, read_named_tokenizer
from rope_scaling import METHODS

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# Those whose RoPE rotates channels 2k and 2k + 1 of a head in llama.cpp, so that the rows of q and
# k are stored in another order than Hugging Face's, which rotates k and k + head_dim / 2.
INTERLEAVED = ("llama", "smollm3")
# llama.cpp divides RoPE's frequencies by tables of the file in this one alone
WITH_ROPE_TABLES = ("llama",)
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# what Llama 3.1 to 3.3 have; the metadata say nothing of it
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192

# keys of the metadata, after the architecture and a dot -> fields of a config.json
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}


def import_gguf(GPT, file, target, store="float32", tokenizer=""):
    """Write a GGUF file as the first checkpoint of a run folder; return its folder.

    GPT: the class of model.py. store: the dtype of the weights in the checkpoint,
    float32 or bfloat16. tokenizer: the Hugging Face directory of the tokenizer, if it is not to be
    read from the file. Raises UserError, with nothing written.
    """
    file, target = Path(file), Path(target)
    if not file.is_file():
        raise UserError(f"there is no file {file}: give that of a GGUF model on this machine")
    check_unused(target)
    header = read_header(file)
    architecture = read_architecture(file, header.metadata)
    table_names = ROPE_TABLES if architecture in WITH_ROPE_TABLES else ()
    tables = {name: header.tensors[name] for name in table_names if name in header.tensors}
    stored = {name: x for name, x in header.tensors.items() if name not in tables}
    values = config_values(file, header.metadata, architecture, stored, tables)
    config = make_config(GPT, read_settings(file, values), file)

    shapes = parameter_shapes(GPT, config, file, stored)
    layout = gguf_layout(FAMILIES[values["model_type"]], config, shapes, architecture)
    check_tensors(file, layout, stored, shapes, "metadata", "it")
    tokenizer, bos, note = read_tokenizer(file, header.metadata, values, tokenizer)

    pairs = (
        pair
        for name, held in layout.items()
        for pair in held.split(read_tensor(file, stored[name]), shapes)
    )
    weights = finite_weights(file, pairs, store)
    kept = {"tokenizer": tokenizer, "bos": bos, "family": values["model_type"]}
    return write_imported(target, file, config, weights, note, **kept)


def gguf_layout(family, config, shapes, architecture):
    """Do as tensor_layout(), for the tensors of a GGUF and by their names there."""
    gguf = gguf_package()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.n_layer)
    if architecture in INTERLEAVED:
        folds = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj"), ADJACENT)
        family = replace(family, folds=folds)
    layout = tensor_layout(family, config, shapes)
    return {names.get_name(name, (".weight", ".bias")): held for name, held in layout.items()}


# -----------------------------------------------------------------------------
# Settings


def read_architecture(file, metadata):
    """Return the architecture of a file. Raises UserError for one that is not imported."""
    if metadata.get("general.type", "model") != "model":
        raise UserError(
            f"{file} is of the type {metadata['general.type']!r}, not a model: give the file of "
            "the model itself"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{file} is one of {metadata['split.count']} parts of a model: join them by "
            "llama.cpp's llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if architecture in ARCHITECTURES:
        return architecture
    reason = "is not read from GGUF files"
    if isinstance(architecture, str):
        reason = UNSUPPORTED.get(architecture, reason)
    raise UserError(
        f"{file} is of the architecture {architecture!r}, which {reason}: what can be imported is "
        f"{', '.join(ARCHITECTURES)}"
    )


def config_values(file, metadata, architecture, stored, tables):
    """Return the fields of the config.json that describes the model as the metadata do.

    stored: the weights, tables: those of RoPE; name -> GGUFTensor. Raises UserError for what has no
    equivalent.
    """
    fields = read_fields(file, metadata, architecture)
    n_head = fields.integer("attention.head_count")
    head_dim = fields.optional_integer("attention.key_length")
    head_dim = head_dim or fields.integer("embedding_length") // n_head
    check_plain(fields, architecture, head_dim)
    if "token_embd.weight" in stored:
        fields.defaults["vocab_size"] = stored["token_embd.weight"].shape[0]
    values = {name: fields.get(key) for key, name in FIELDS.items()}
    values |= {
        "model_type": architecture,
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if fields.get("attention.sliding_window"):
        # Mistral's files say llama, mostly without a window
        values["model_type"] = "mistral"
        values["sliding_window"] = fields.integer("attention.sliding_window")
    return values | rope_values(fields, read_tables(file, tables, head_dim // 2))


def read_fields(file, metadata, architecture):
    """Return the metadata of the architecture as ConfigFields, with llama.cpp's defaults."""
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): x for key, x in metadata.items() if key.startswith(prefix)}
    for name, value in values.items():
        if isinstance(value, list) and len(set(value)) == 1:
            # one value for each layer, all the same
            values[name] = value[0]
        elif isinstance(value, list):
            raise UserError(
                f"{file}: {prefix}{name} differs from layer to layer, and here all layers have the "
                "same: choose another model"
            )
    defaults = {
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    return ConfigFields(file, values, defaults)


def check_plain(fields, architecture, head_dim):
    """Raise UserError for metadata that change what a model computes, and that it has not here."""
    plain = {
        "expert_count": (None, 0),
        "nextn_predict_layers": (None, 0),
        "attention.causal": (None, True),
        "attention.sliding_window_pattern": (None,),
        "attention.value_length": (None, head_dim),
        "rope.dimension_count": (None, head_dim),
        "rope.scaling.type": ("none", "linear", "yarn", "longrope"),
    }
    if architecture != "llama":
        # which layers have the window is not in the metadata
        plain["attention.sliding_window"] = (None, 0)
    for key, values in plain.items():
        if fields.get(key) not in values:
            raise refused(fields, key)


def refused(fields, key):
    return UserError(
        f"{fields.file}: {key} is {fields.get(key)!r}, which has no equivalent here: choose "
        "another model"
    )


# -----------------------------------------------------------------------------
# RoPE


def read_tables(file, tables, n_pairs):
    """Return what divides the frequencies of RoPE: name -> a list of one number for each pair."""
    for name, tensor in tables.items():
        if tensor.shape != (n_pairs,):
            raise UserError(
                f"{file}: {name} is {tensor.shape}, where heads of {2 * n_pairs} channels need "
                f"{(n_pairs,)}: download it again"
            )
    return {name: read_tensor(file, tensor).tolist() for name, tensor in tables.items()}


def rope_values(fields, tables):
    """Return the field rope_scaling, and another max_position_embeddings where it needs one."""
    kind = fields.get("rope.scaling.type")
    factor = 1.0 if kind == "none" else scaling_factor(fields)
    if kind == "longrope" or tables:
        names = ("rope_freqs.weight", "rope_freqs.weight")
        if kind == "longrope":
            names = ("rope_factors_long.weight", "rope_factors_short.weight")
        if factor != 1 or not tables.keys() >= set(names):
            raise UserError(
                f"{fields.file}: rope.scaling.type {kind!r} with the factor {factor:g} and the "
                f"tables {', '.join(tables)} has no equivalent here: choose another model"
            )
        return {"rope_scaling": table_values(fields, kind, *(tables[name] for name in names))}
    if kind == "yarn":
        return {"rope_scaling": yarn_values(fields, factor)}
    if fields.real("rope.scaling.attn_factor", 1e-12, 1e12) != 1:
        raise refused(fields, "rope.scaling.attn_factor")
    if factor == 1:
        return {}
    # of type linear, the length of a config.json is the original one
    length = fields.optional_integer("rope.scaling.original_context_length")
    return {
        "rope_scaling": {"rope_type": "linear", "factor": factor},
        "max_position_embeddings": length or fields.get("context_length"),
    }


def scaling_factor(fields):
    """Return the factor of RoPE scaling; 1 where there is none. Old files have another name."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if fields.get(key):
            return fields.real(key, 1, 1e6)
    return 1.0


def table_values(fields, kind, long_factor, short_factor):
    """Return the field rope_scaling of tables that divide the frequencies.

    llama.cpp's converter writes the type llama3 as one table. It is recognised with the parameters
    that Llama 3.1 to 3.3 have; any other table is longrope's.
    """
    # llama.cpp has 1 where the metadata lack it, transformers a value from the lengths
    multiplier = fields.real("rope.scaling.attn_factor", 1e-12, 1e12)
    length = fields.optional_integer("rope.scaling.original_context_length")
    factor = max(long_factor)
    if kind != "longrope" and multiplier == 1 and 1 < factor < math.inf:
        llama3_length = length or LLAMA3_LENGTH
        words = (fields.real("rope.freq_base", 1, 1e12), 2 * len(long_factor), llama3_length)
        plain, _ = METHODS["none"](*words, factor)
        scaled, _ = METHODS["llama3"](*words, factor, **LLAMA3_ROPE)
        # the converter computes in float32
        divided = scaled * torch.tensor(long_factor, dtype=torch.float64)
        if torch.allclose(divided, plain, rtol=1e-4, atol=0):
            rope = {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
            return {**rope, "original_max_position_embeddings": llama3_length}
    return {
        "rope_type": "longrope",
        "long_factor": long_factor,
        "short_factor": short_factor,
        "attention_factor": multiplier,
        "original_max_position_embeddings": length or fields.integer("context_length"),
    }


def yarn_values(fields, factor):
    """Return the field rope_scaling of YaRN."""
    length = fields.optional_integer("rope.scaling.original_context_length")
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    extrapolation = fields.real("rope.scaling.yarn_ext_factor", -1e6, 1e6)
    # negative: not set, as llama.cpp itself writes it together with its other defaults
    if extrapolation >= 0:
        names["attention_factor"] = "yarn_attn_factor"
        if extrapolation != 1:
            raise refused(fields, "rope.scaling.yarn_ext_factor")
    if fields.get("rope.scaling.yarn_log_multiplier"):
        raise refused(fields, "rope.scaling.yarn_log_multiplier")
    for name, last in names.items():
        if fields.get(f"rope.scaling.{last}") is not None:
            rope[name] = fields.real(f"rope.scaling.{last}", 1e-12, 1e12)
    multiplier = fields.real("rope.scaling.attn_factor", 1e-12, 1e12)
    if multiplier != 1:
        # of the temperature that YaRN has without it
        rope["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1)
    return rope


# -----------------------------------------------------------------------------
# The tokenizer


def read_tokenizer(file, metadata, values, folder):
    """Return the tokenizer or None, the id that starts every text or None, and a note.

    folder: the directory of the tokenizer; empty: it is in the file.
    """
    vocab_size = values["vocab_size"]
    if folder:
        tokenizer, bos, note = read_named_tokenizer(Path(folder), vocab_size)
        check_same_tokens(file, metadata, folder, tokenizer.package_tokenizer)
        if bos is None:
            bos = first_token(file, metadata, vocab_size)
        return tokenizer, bos, note
    reason = text_obstacle(metadata)
    if reason:
        note = f"note: {reason}: the model works on token ids only (for text, give --tokenizer=DIR "
        note += "of its tokenizer.json)"
        return None, first_token(file, metadata, vocab_size), note
    files, settings = tokenizer_files_of(file, metadata)
    try:
        return *make_tokenizer(files, settings, values, vocab_size), ""
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def first_token(file, metadata, n_tokens):
    """Return the id that starts every text for llama.cpp, or None. Raises UserError."""
    # llama.cpp's default for sentencepiece's vocabularies is to add it
    default = metadata.get("tokenizer.ggml.model") == "llama"
    if not metadata.get("tokenizer.ggml.add_bos_token", default):
        return None
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and not (isinstance(bos, int) and 0 <= bos < n_tokens):
        raise UserError(f"{file}: bos_token_id is {bos} of {n_tokens} tokens: download it again")
    return bos


def check_same_tokens(file, metadata, folder, package_tokenizer):
    """Raise UserError if a normal token of a GGUF file is another one in the directory."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=False)):
        other = package_tokenizer.id_to_token(i)
        if token_type == NORMAL and token != other:
            raise UserError(
                f"{folder} has the tokenizer of another model: token {i} is {other!r} there, and "
                f"{token!r} in {file}"
            )
