"""GGUF files of llama.cpp: read as a config of transformers and its tensors."""

import math

import gguf
import torch
from transformers import AutoConfig

import rope_scaling
from nanolong.errors import UserError, require
from nanolong.hub.families import FAMILIES, swap_pairs, tensor_layout
from nanolong.hub.folder import Source
from nanolong.hub.gguf_header import ROPE_TABLES, open_file, read_tensor
from nanolong.hub.verify import as_user_error

# architectures that are read -> whether the rows of q and k have another order than in
# transformers, because llama.cpp rotates adjacent channels (as transformers does in an ERNIE)
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True, "ernie4_5": False}
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
}
# further keys that are read, or are known; any other value that is not 0 is refused
OTHERS = ("rope.dimension_count", "attention.value_length", "rope.freq_base", "rope.scal")
# general.type -> what such a file holds
PARTS = {
    "adapter": "an adapter (LoRA), which changes another model",
    "mmproj": "an mmproj, the half of a model that reads images",
}
# the settings of Llama 3.1 to 3.3; a file has only their table
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192


# -----------------------------------------------------------------------------
# Reading


def read_gguf(file):
    """Return the Source of a file. Raises UserError for features without an equivalent."""
    with as_user_error(file):
        _, metadata, places = open_file(file)
        arch = read_architecture(file, metadata)
        require(
            arch in ARCHITECTURES,
            f"{file} has the architecture {arch!r}, not one of: {', '.join(ARCHITECTURES)}",
        )
        require(
            metadata.get("split.count", 1) in (0, 1),
            f"{file} is a part of a model: join them by llama.cpp's llama-gguf-split --merge",
        )
        own = read_own(file, metadata, arch)
        names = ROPE_TABLES if arch == "llama" else ()
        tables = {name: read_tensor(file, places.pop(name)) for name in names if name in places}
        values = {theirs: own[key] for key, theirs in FIELDS.items() if key in own}
        require("context_length" in own, f"{file} does not say its context_length")
        values.setdefault("vocab_size", places["token_embd.weight"].shape[0])
        values["tie_word_embeddings"] = "output.weight" not in places
        values["rope_parameters"] = read_rope(file, own, tables)
        # Mistral's files say llama, mostly without a window
        kind = "mistral" if own.get("attention.sliding_window") else arch
        c = AutoConfig.for_model(kind, **values, pad_token_id=None)
        require(c.num_hidden_layers <= len(places), f"{file} has not all of its tensors")
        tensors = {}
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
        for theirs, *_ in tensor_layout(FAMILIES[kind], c.num_hidden_layers):
            name = names.get_name(theirs, (".weight", ".bias"))
            if name in places:
                x = read_tensor(file, places.pop(name))
                # the rows of each head may be in another order there
                is_swapped = ARCHITECTURES[arch] and ("attn_q." in name or "attn_k." in name)
                tensors[theirs] = swap_pairs(x, c, -1, 2) if is_swapped else x
    require(not places, f"{file}: there is no parameter here for {', '.join(list(places)[:3])}")
    return Source(c, tensors, metadata)


def read_architecture(file, metadata):
    """Return the name of a model's architecture. Raises UserError if the file has no model."""
    arch = metadata.get("general.architecture")
    kind = "mmproj" if arch == "clip" else metadata.get("general.type", "model")
    problem = f"{file} is no model but {PARTS.get(kind, repr(kind))}"
    require(kind == "model", f"{problem}: give the .gguf of the model itself")
    return arch


def own_metadata(metadata, arch):
    """Return the architecture's metadata, without its name, and one layer's for equal layers."""
    own = {}
    for key, x in metadata.items():
        if key.startswith(f"{arch}."):
            is_same = isinstance(x, list) and len(set(x)) == 1
            own[key.removeprefix(f"{arch}.")] = x[0] if is_same else x
    return own


def read_own(file, metadata, arch):
    """Return the architecture's metadata, if all of it has an equivalent here."""
    own = own_metadata(metadata, arch)
    head = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    own.setdefault("rope.dimension_count", head)
    plain = {"attention.value_length": head, "rope.dimension_count": head, "attention.causal": True}
    if arch != "llama":
        # which layers have the window is not in the metadata
        plain["attention.sliding_window"] = 0
    wrong = []
    for key, x in own.items():
        is_known = not x or key in FIELDS or key.startswith(OTHERS)
        if key in plain:
            is_known = x == plain[key]
        if not is_known:
            wrong.append(key)
    require(
        not wrong,
        f"{file}: {', '.join(f'{key}={own[key]}' for key in wrong)} has no equivalent here: choose "
        "another model",
    )
    return own


def read_rope(file, own, tables):
    """Return rope_parameters."""
    scaling = {
        key.removeprefix("rope.scaling."): x for key, x in own.items() if "rope.scaling." in key
    }
    kind = scaling.get("type", "linear")
    factor = scaling.get("factor") or own.get("rope.scale_linear") or 1.0
    multiplier = scaling.get("attn_factor", 1.0)
    base = {"rope_theta": own.get("rope.freq_base", 1e4)}
    original = scaling.get("original_context_length")
    lengths = {"original_max_position_embeddings": original} if original else {}
    refusal = UserError(
        f"{file}: rope.scaling {scaling} with tables {', '.join(tables) or 'none'} has no "
        "equivalent here: choose another model"
    )
    if tables or kind == "longrope":
        names = ROPE_TABLES[1:] if kind == "longrope" else ROPE_TABLES[:1] * 2
        if not tables.keys() >= set(names) or (kind != "none" and factor != 1):
            raise refusal
        long, short = (tables[name].tolist() for name in names)
        return base | read_tables(own, kind, long, short, multiplier, original)
    if kind == "yarn":
        extrapolation = scaling.get("yarn_ext_factor", 1.0)
        if extrapolation not in (1.0, -1.0) or scaling.get("yarn_log_multiplier"):
            raise refusal
        p = {"rope_type": "yarn", "factor": factor, **lengths}
        p |= {x: scaling[f"yarn_{x}"] for x in ("beta_fast", "beta_slow") if f"yarn_{x}" in scaling}
        # negative: not set, as llama.cpp itself writes it together with its other defaults
        if extrapolation > 0 and "yarn_attn_factor" in scaling:
            p["attention_factor"] = scaling["yarn_attn_factor"]
        if multiplier != 1:
            # It multiplies the temperature that YaRN has without it.
            p["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1)
        return base | p
    if kind not in ("none", "linear") or multiplier != 1:
        raise refusal
    if kind == "none" or factor == 1:
        return {"rope_type": "default", **base}
    return {"rope_type": "linear", "factor": factor, **lengths, **base}


def read_tables(own, kind, long, short, multiplier, original):
    """Return rope_parameters of tables that divide the frequencies.

    llama.cpp's converter writes the type llama3 as one table. It is recognised with the parameters
    that Llama 3.1 to 3.3 have; any other table is longrope's.
    """
    factor = max(long)
    words = (own.get("rope.freq_base", 1e4), 2 * len(long), original or LLAMA3_LENGTH)
    if kind != "longrope" and multiplier == 1 and 1 < factor < math.inf:
        plain, _ = rope_scaling.none(*words, 1.0)
        scaled, _ = rope_scaling.llama3(*words, factor, **LLAMA3)
        # the converter computes in float32
        if torch.allclose(
            scaled * torch.tensor(long, dtype=torch.float64), plain, rtol=1e-4, atol=0
        ):
            p = {"rope_type": "llama3", "factor": factor, **LLAMA3}
            return p | {"original_max_position_embeddings": words[2]}
    # llama.cpp has the factor 1 if the metadata lack it, transformers one from the lengths
    length = original or own["context_length"]
    return {
        "rope_type": "longrope",
        "factor": max(1.0, own["context_length"] / length),
        "long_factor": long,
        "short_factor": short,
        "attention_factor": multiplier,
        "original_max_position_embeddings": length,
    }
