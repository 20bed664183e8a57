"""Import GGUF files, llama.cpp's format: one file becomes the first checkpoint of a run folder.

The metadata become the fields of a config.json, from which hf_import.py makes the settings of the
model; the tensors are dequantised one at a time. What has no equivalent here is refused by name.
"""

import json
import math
from pathlib import Path

import torch

from nanolong import validate
from nanolong.errors import UserError
from nanolong.hub.families import FAMILIES, UNSUPPORTED
from nanolong.hub.gguf_file import check_types, read_header, read_tensor
from nanolong.hub.gguf_tokenizer import NORMAL, text_obstacle, tokenizer_json_of
from nanolong.hub.importing import (
    check_tensors,
    check_unused,
    parameter_shapes,
    read_settings,
    weight_stream,
    write_imported,
)
from nanolong.hub.layout import ConfigFields, tensor_layout
from nanolong.hub.tokenizer import make_tokenizer, read_named_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# Those whose RoPE rotates channels 2k and 2k + 1 of a head in llama.cpp, so that the rows of q and
# k are stored in another order than Hugging Face's, which rotates k and k + head_dim / 2.
INTERLEAVED = ("llama", "smollm3")
# llama.cpp divides RoPE's frequencies by tables of the file in this one alone
WITH_ROPE_TABLES = ("llama",)

# what Llama 3.1 to 3.3 have; the metadata say nothing of it
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192

# The tables below: Hugging Face's names -> GGUF's.
MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


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
    values = config_values(file, header)
    config = validate.coerce(GPT.config_class, read_settings(file, values), str(file))
    validate.check_model(config, GPT.schemes)

    stored = weight_tensors(header)
    shapes = parameter_shapes(GPT, config, file, stored)
    layout = tensor_layout(FAMILIES[values["model_type"]], config, shapes)
    named = {gguf_name(name): held for name, held in layout.items()}
    check_tensors(file, named, stored, shapes, "metadata", "it")
    check_types(file, stored)
    tokenizer, bos, note = read_tokenizer(file, header, values, tokenizer)

    pairs = read_tensors(file, header, layout, config.head_dim, shapes)
    weights = weight_stream(file, pairs, shapes, store)
    kept = {"tokenizer": tokenizer, "bos": bos, "family": values["model_type"]}
    return write_imported(target, file, config, weights, note, **kept)


# -----------------------------------------------------------------------------
# Settings


def config_values(file, header):
    """Return the fields of the config.json that describes the model as the metadata do.

    Raises UserError for what has no equivalent.
    """
    metadata = header.metadata
    architecture = check_architecture(file, metadata)
    fields = architecture_fields(file, metadata, architecture)
    check_plain(fields, architecture)
    n_embd = fields.integer("embedding_length")
    n_head = fields.integer("attention.head_count")
    head_dim = fields.optional_integer("attention.key_length") or n_embd // n_head
    check_head_dim(fields, head_dim)

    values = {
        "model_type": architecture,
        "num_hidden_layers": fields.integer("block_count", high=len(header.tensors)),
        "hidden_size": n_embd,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_attention_heads": n_head,
        "num_key_value_heads": fields.optional_integer("attention.head_count_kv") or n_head,
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-30, 0.1),
        "vocab_size": vocabulary_size(fields, header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": fields.real("rope.freq_base", 1.0, 1e12),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    values |= window_values(fields, architecture)
    values |= rope_values(file, header, fields, architecture, head_dim)
    return values


def check_architecture(file, metadata):
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


def architecture_fields(file, metadata, architecture):
    """Return the metadata of the architecture as ConfigFields, with llama.cpp's defaults."""
    prefix = f"{architecture}."
    values = {}
    for key, value in metadata.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if isinstance(value, list) and len(set(value)) == 1:
            # one value for each layer, all the same
            value = value[0]
        if isinstance(value, list):
            raise UserError(
                f"{file}: {key} differs from layer to layer, and here all layers have the same: "
                "choose another model"
            )
        values[name] = value
    defaults = {
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    return ConfigFields(file, values, defaults)


def check_plain(fields, architecture):
    """Raise UserError for metadata that change what a model computes, and that it has not here."""
    plain = {
        "expert_count": (None, 0),
        "nextn_predict_layers": (None, 0),
        "attention.causal": (None, True),
        "attention.sliding_window_pattern": (None,),
    }
    if architecture != "llama":
        # which layers have the window is not in the metadata
        plain["attention.sliding_window"] = (None, 0)
    for key, values in plain.items():
        if fields.get(key) not in values:
            raise refused(fields, architecture, key)


def refused(fields, architecture, key):
    return UserError(
        f"{fields.file}: {architecture}.{key} is {fields.get(key)!r}, which has no equivalent "
        "here: choose another model"
    )


def check_head_dim(fields, head_dim):
    """Raise UserError unless queries, keys and values are alike and RoPE rotates whole heads."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key) not in (None, head_dim):
            raise UserError(
                f"{fields.file}: {key} is {fields.get(key)!r}, and the heads have {head_dim} "
                "channels, which must be the same here: choose another model"
            )


def vocabulary_size(fields, header):
    """Return the number of token ids: the rows of the embedding, where the metadata lack it."""
    if "token_embd.weight" in header.tensors:
        fields.defaults["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    return fields.integer("vocab_size")


def window_values(fields, architecture):
    """Return the fields of a sliding window. Mistral's files say llama, mostly without one."""
    if architecture != "llama" or not fields.get("attention.sliding_window"):
        return {}
    return {
        "model_type": "mistral",
        "sliding_window": fields.integer("attention.sliding_window"),
    }


# -----------------------------------------------------------------------------
# RoPE


def rope_values(file, header, fields, architecture, head_dim):
    """Return the field rope_scaling, and another max_position_embeddings where it needs one."""
    factor = scaling_factor(fields)
    scaling_type = fields.get("rope.scaling.type")
    tables = {}
    for name in ROPE_TABLES:
        if name in header.tensors and architecture in WITH_ROPE_TABLES:
            tables[name] = header.tensors[name]
    check_types(file, tables)

    if scaling_type == "longrope":
        return longrope_values(file, fields, factor, tables, head_dim)
    if scaling_type not in ("none", "linear", "yarn"):
        raise refused(fields, architecture, "rope.scaling.type")
    if scaling_type == "none":
        factor = 1.0
    if tables:
        if factor != 1 or "rope_freqs.weight" not in tables:
            raise UserError(
                f"{file}: {min(tables)} and rope.scaling.type {scaling_type!r} scale RoPE "
                "together, which has no equivalent here: choose another model"
            )
        table = read_table(file, "rope_freqs.weight", tables, head_dim)
        return frequency_values(fields, table)
    if scaling_type == "yarn":
        return yarn_values(fields, architecture, factor)
    if fields.real("rope.scaling.attn_factor", 1e-12, 1e12) != 1:
        raise refused(fields, architecture, "rope.scaling.attn_factor")
    if factor == 1:
        return {}
    # of type linear, the length of a config.json is the original one
    length = fields.optional_integer("rope.scaling.original_context_length")
    return {
        "rope_scaling": {"rope_type": "linear", "factor": factor},
        "max_position_embeddings": length or fields.integer("context_length"),
    }


def scaling_factor(fields):
    """Return the factor of RoPE scaling; 1 where there is none. Old files have another name."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if fields.get(key):
            return fields.real(key, 1, 1e6)
    return 1.0


def yarn_values(fields, architecture, factor):
    """Return the field rope_scaling of YaRN."""
    key = "rope.scaling.original_context_length"
    rope = {"rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = fields.optional_integer(key)
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    extrapolation = fields.real("rope.scaling.yarn_ext_factor", -1e6, 1e6)
    # negative: not set, as llama.cpp itself writes it together with its other defaults
    if extrapolation >= 0:
        names["attention_factor"] = "yarn_attn_factor"
        if extrapolation != 1:
            raise refused(fields, architecture, "rope.scaling.yarn_ext_factor")
    for name, last in names.items():
        if fields.get(f"rope.scaling.{last}") is not None:
            rope[name] = fields.real(f"rope.scaling.{last}", 1e-12, 1e12)
    if fields.get("rope.scaling.yarn_log_multiplier"):
        raise refused(fields, architecture, "rope.scaling.yarn_log_multiplier")
    multiplier = fields.real("rope.scaling.attn_factor", 1e-12, 1e12)
    if multiplier != 1:
        # of the temperature that YaRN has without it
        rope["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1)
    return {"rope_scaling": rope}


def longrope_values(file, fields, factor, tables, head_dim):
    """Return the field rope_scaling of longrope, whose tables are tensors."""
    rope = {"rope_type": "longrope"}
    rope["long_factor"] = read_table(file, "rope_factors_long.weight", tables, head_dim)
    rope["short_factor"] = read_table(file, "rope_factors_short.weight", tables, head_dim)
    if factor != 1:
        raise refused(fields, "llama", "rope.scaling.factor")
    # llama.cpp has 1 where the metadata lack it, transformers a value from the lengths
    rope["attention_factor"] = fields.real("rope.scaling.attn_factor", 1e-12, 1e12)
    length = fields.optional_integer("rope.scaling.original_context_length")
    rope["original_max_position_embeddings"] = length or fields.integer("context_length")
    return {"rope_scaling": rope}


def read_table(file, name, tables, head_dim):
    """Return what divides the frequencies of RoPE, a list of one number for each pair."""
    found = tables[name].shape if name in tables else "absent"
    if found != (head_dim // 2,):
        raise UserError(
            f"{file}: {name} is {found}, where heads of {head_dim} channels need "
            f"{(head_dim // 2,)}: download it again"
        )
    return read_tensor(file, tables[name]).tolist()


def frequency_values(fields, table):
    """Return the field rope_scaling of a table of divisors of the frequencies.

    llama.cpp's converter writes the type llama3 as such a table. It is recognised with the
    parameters that Llama 3.1 to 3.3 have; any other table is longrope's.
    """
    factor = max(table)
    base = fields.real("rope.freq_base", 1.0, 1e12)
    multiplier = fields.real("rope.scaling.attn_factor", 1e-12, 1e12)
    key = "rope.scaling.original_context_length"
    original_length = fields.optional_integer(key)
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": original_length or LLAMA3_LENGTH}
    expected = llama3_divisors(base, len(table), factor, rope)
    # the converter computes in float32
    same = torch.allclose(torch.tensor(table).double(), expected, rtol=1e-4, atol=0)
    if same and factor > 1 and multiplier == 1:
        return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **rope}}
    rope = {
        "rope_type": "longrope",
        "long_factor": table,
        "short_factor": table,
        "attention_factor": multiplier,
        "original_max_position_embeddings": original_length or fields.integer("context_length"),
    }
    return {"rope_scaling": rope}


def llama3_divisors(base, n_pairs, factor, rope):
    """Return what the type llama3 divides the frequencies by, float64 (n_pairs,)."""
    frequencies = base ** -(torch.arange(n_pairs, dtype=torch.float64) / n_pairs)
    rotations = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # 0 if a pair is interpolated, 1 if it stays as it is
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - unscaled) / factor + unscaled)


# -----------------------------------------------------------------------------
# Tensors


def gguf_name(name):
    """Return GGUF's name of a tensor from Hugging Face's."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    # model.layers.3.self_attn.q_proj.weight
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def weight_tensors(header):
    """Return the tensors of a file that are weights: name -> GGUFTensor."""
    if header.metadata["general.architecture"] not in WITH_ROPE_TABLES:
        return header.tensors
    return {name: tensor for name, tensor in header.tensors.items() if name not in ROPE_TABLES}


def read_tensors(file, header, layout, head_dim, shapes):
    """Yield (our name, float32 tensor) for all parameters, with one of them in memory."""
    interleaved = header.metadata["general.architecture"] in INTERLEAVED
    for name, held in layout.items():
        is_interleaved = interleaved and name.endswith(("q_proj.weight", "k_proj.weight"))
        place = header.tensors[gguf_name(name)]
        yield from held.split(dequantise(file, place, head_dim, is_interleaved), shapes)


def dequantise(file, place, head_dim, is_interleaved):
    tensor = read_tensor(file, place)
    return halves_first(tensor, head_dim) if is_interleaved else tensor


def halves_first(tensor, head_dim):
    """Return the rows of q or k with the two rows of a pair head_dim / 2 apart, not adjacent."""
    pairs = tensor.view(-1, head_dim // 2, 2, tensor.shape[1])  # (H, D / 2, 2, C)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def adjacent_first(tensor, head_dim):
    """Undo halves_first()."""
    halves = tensor.view(-1, 2, head_dim // 2, tensor.shape[1])  # (H, 2, D / 2, C)
    return halves.transpose(1, 2).reshape(tensor.shape)


# -----------------------------------------------------------------------------
# The tokenizer


def read_tokenizer(file, header, values, folder):
    """Return the tokenizer or None, the id that starts every text or None, and a note.

    folder: the directory of the tokenizer; empty: it is in the file.
    """
    if folder:
        tokenizer, bos, note = read_named_tokenizer(Path(folder), values["vocab_size"])
        check_same_tokens(file, header.metadata, folder, tokenizer.package_tokenizer)
        if bos is None:
            bos = first_token(file, header.metadata, values["vocab_size"])
        return tokenizer, bos, note
    reason = text_obstacle(header.metadata)
    if reason:
        bos = first_token(file, header.metadata, values["vocab_size"])
        note = f"note: {reason}: the model works on token ids only (for text, give --tokenizer=DIR "
        note += "of its tokenizer.json)"
        return None, bos, note
    files = tokenizer_json_of(file, header.metadata)
    n_tokens = len(header.metadata["tokenizer.ggml.tokens"])
    if n_tokens > values["vocab_size"]:
        raise UserError(
            f"{file} has {n_tokens} tokens, and its model {values['vocab_size']}: download it again"
        )
    contents = {name: text.encode() for name, text in files.items()}
    settings = json.loads(files["tokenizer_config.json"])
    try:
        tokenizer, bos = make_tokenizer(contents, settings, values, values["vocab_size"])
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return tokenizer, bos, ""


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
