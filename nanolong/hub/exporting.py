"""Export a model as a Hugging Face directory that transformers' AutoModelForCausalLM loads.

The weights are read from the checkpoint and written one tensor at a time. What was written is
verified (verify.py) before the directory appears. What transformers has no equivalent of is
refused.
"""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from data import tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.families import FAMILIES, Family
from nanolong.hub.layout import ACTIVATIONS, stored_shapes, tensor_layout
from nanolong.hub.rope import WrittenRope, unrotated_rope, write_rope
from nanolong.hub.tokenizer import write_tokenizer
from nanolong.hub.verify import verify_export
from nanolong.run import sync
from nanolong.tokenizer_files import FILES

# Larger weights are written to several files of at most this size and an index, as transformers
# does. A tensor is never divided.
MAX_FILE_BYTES = 5 * 10**9

# The settings of GPTConfig that an export writes, checks or may leave out. Every other one has a
# value that its family names, or its default: a new one is refused until an export computes it.
KNOWN_SETTINGS = {
    *("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim"),
    *("mlp_dim", "norm_eps", "tie_embeddings", "embed_scale", "dropout", "attn_scale", "extension"),
    *("rope_base", "rope_local_base", "rope_fraction", "p_rope", "window", "layer_pattern"),
    *("score_scale_length", "score_scale_coefficient", "score_scale_offset", "score_scale_layers"),
}


class Written(NamedTuple):
    """What a model becomes: its family, config.json, and what RoPE needs of the weights."""

    family: Family
    settings: dict
    # of layers with and without a window: whether it has one -> WrittenRope
    ropes: dict


def export_checkpoint(model, target, verify=True, tokenizer_from=""):
    """Write a loaded model and its tokenizer, whole or not at all.

    Its weights are those of its checkpoint's file. tokenizer_from: a Hugging Face directory whose
    tokenizer files are copied instead of the model's own. Raises UserError for a model that has no
    equivalent in transformers, or if transformers computes other logits.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: remove it, or choose another directory")
    written = write_config(model)
    settings = written.settings
    dtype = export_dtype(model, written)
    settings["dtype"] = settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer:
        # a vocabulary of ours has one token that starts and ends every document
        eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
        settings |= {"bos_token_id": tokenizer.bos, "eos_token_id": eos}

    folder = target.parent / f".tmp-{target.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if tokenizer_from:
            copy_tokenizer(Path(tokenizer_from), folder)
        else:
            add_bos = model.meta.get("bos") is not None
            write_tokenizer(folder, tokenizer, add_bos, model.config.block_size)
        write_weights(folder, model, written, dtype)
        write_json(folder / "config.json", settings, sort_keys=True)
        print_summary(settings, model, tokenizer or tokenizer_from)
        if verify:
            verify_export(model, folder, tokenizer)
        else:
            print("not verified: --verify=false")
        if target.exists():
            target.rmdir()
        os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_json(file, values, **options):
    text = json.dumps(values, indent=2, allow_nan=False, **options) + "\n"
    file.write_text(text, encoding="utf-8")


def copy_tokenizer(source, folder):
    names = [name for name in FILES if (source / name).is_file()]
    if not names:
        raise UserError(
            f"there are no tokenizer files in --tokenizer={source}: give the Hugging Face "
            "directory that the model was imported from"
        )
    for name in names:
        shutil.copyfile(source / name, folder / name)


def print_summary(settings, model, has_tokenizer):
    text = settings["architectures"][0]
    if "rope_parameters" in settings:
        rope = settings["rope_parameters"]
        text += f", rope_type {rope.get('full_attention', rope)['rope_type']}"
    text += f", {model.config.block_size} tokens, {settings['dtype']}"
    if not has_tokenizer:
        text += "; no tokenizer: the checkpoint has none"
    print(text)


# -----------------------------------------------------------------------------
# config.json


def write_config(model, families=FAMILIES, reader="transformers"):
    """Return the Written of a model as one of the families, which the reader loads.

    Raises UserError for a model that none of them can be.
    """
    config = model.config
    model_type, letters = choose_family(model, families, reader)
    family = families[model_type]
    settings = {
        "architectures": [family.class_name],
        "model_type": model_type,
        "use_cache": True,
        "initializer_range": 0.02,
        **{key: value for key, value in family.fixed.items() if value is not None},
        **family.written,
    }
    fields, ropes = write_positions(model, family, letters)
    names = ACTIVATIONS[config.mlp]
    usual = family.defaults["hidden_act"]
    fields |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": usual if usual in names else names[0],
        "rms_norm_eps": config.norm_eps,
    }
    for key, value in fields.items():
        settings |= dict.fromkeys(family.names.get(key, (key,)), value)
    for key, (name, if_true, _) in family.switches.items():
        settings[key] = getattr(config, name) == if_true
    settings |= window_settings(config, family)
    if family.write:
        settings |= family.write(config, letters, settings)
    return Written(family, settings, ropes)


def choose_family(model, families, reader):
    """Return (model_type, letters of the kinds of layers that it has to have).

    The model_type is that of the import, if the model still is one of it, or the first that fits.
    Raises UserError if there is none.
    """
    config = model.config
    letters = set()
    for layer in range(config.n_layer):
        letter = config.layer_kind(layer)
        is_rotated = letter in "NS" or is_positioned(scheme_of(model, layer))
        letters.add(letter if is_rotated else {"F": "N", "W": "S"}[letter])
    choices = [letters]
    if letters <= {"N", "S"}:
        # if all layers of a family have RoPE, it can be one that rotates nothing
        choices.append({{"N": "F", "S": "W"}[letter] for letter in letters})
    imported = FAMILIES.get(model.meta.get("family"))
    if imported and imported.read_only:
        raise UserError(f"{imported.read_only}: keep the checkpoint that was imported")
    candidates = [item for item in families.items() if not item[1].read_only]
    found = []
    for letters in choices:
        for model_type, family in sorted(candidates, key=lambda item: item[1] != imported):
            missing = obstacles(model, family, letters)
            if not missing:
                return model_type, letters
            found.append((len(missing), family.class_name, missing))
    _, nearest, missing = min(found, key=lambda item: item[0])
    raise UserError(
        f"{' with '.join(missing)} has no equivalent among the models that {reader} loads: to be a "
        f"{nearest}, which is nearest, it needs {', '.join(missing.values())}"
    )


def scheme_of(model, layer):
    """Return the position scheme of a layer; in one with a window RoPE may have another."""
    scheme = model.scheme_of(layer)
    return scheme.of_layer(layer) if hasattr(scheme, "of_layer") else scheme


def is_positioned(scheme):
    """Return whether a scheme is more than the causal mask."""
    if scheme.config.pos == "rope":
        return extension_method(scheme.config) != "drope" and scheme.rotary_dim > 0
    return scheme.config.pos != "nope"


def extension_method(config):
    return config.extension["method"] if config.extension else "none"


def obstacles(model, family, letters):
    """Return what a model has and a family has not: the setting -> that which it would need."""
    config = model.config
    allowed = dict(family.settings)
    for field in dataclasses.fields(config):
        if field.name not in KNOWN_SETTINGS:
            allowed.setdefault(field.name, (field.default,))
    if config.pos == "nope" and "rope" in allowed["pos"]:
        allowed["pos"] += ("nope",)
    scales = {"one": 1.0, "root": math.sqrt(config.n_embd), "any": config.embed_scale}
    scale = scales[family.embed_scale]
    if not math.isclose(config.embed_scale, scale, rel_tol=1e-6):
        allowed["embed_scale"] = (scale,)
    for name, field, usual in (
        ("head_dim", "head_dim", config.n_embd // config.n_head),
        ("n_kv_head", "num_key_value_heads", config.n_head),
        ("mlp_dim", "intermediate_size", 4 * config.n_embd),
    ):
        # a family without the field has this value
        if family.names.get(field) == ():
            allowed[name] = (usual,)
    found = {}
    for name, choices in allowed.items():
        value = getattr(config, name)
        if value not in choices:
            found[f"--{name}={value}"] = f"--{name}={choices[0]}"
    if not any(letters <= set(pattern) for pattern in family.patterns):
        needed = " or ".join(family.patterns)
        found[f"--layer_pattern={config.layer_pattern}"] = f"--layer_pattern={needed}"
    if family.heads_divide and config.n_embd % config.n_head:
        found[f"--n_head={config.n_head}"] = f"an --n_head that divides {config.n_embd}"
    if config.head_dim % 2 and letters & {"F", "W"} and "rope" in family.settings["pos"]:
        found[f"--head_dim={config.head_dim}"] = "an even --head_dim"
    if getattr(model.pos, "local", None) and letters >= {"F", "W"} and not family.rope_by_kind:
        found["RoPE that differs in layers with a window"] = "--rope_local_base=0 and --layers=all"
    if config.pos == "alibi" and extension_method(config) not in ("none", "scale"):
        found[f"--method={extension_method(config)}"] = "--method=none"
    return found


def write_positions(model, family, letters):
    """Return (fields of config.json by Llama's names, Written.ropes)."""
    config = model.config
    length = {"max_position_embeddings": config.block_size}
    if "rope" not in family.settings["pos"]:
        return length, {}
    # of layers without a window, and with one
    kinds = {False: (config, model.pos), True: (config, model.pos)}
    local = getattr(model.pos, "local", None)
    if local:
        extends_all = config.extension and "layers" not in config.extension
        local_config = dataclasses.replace(
            config,
            rope_base=config.rope_local_base or config.rope_base,
            extension=config.extension if extends_all else None,
        )
        kinds[True] = (local_config, local)
    ropes = {}
    for has_window, (its_config, scheme) in kinds.items():
        if "FW"[has_window] in letters and is_positioned(scheme):
            ropes[has_window] = write_rope(its_config, scheme, family)
    if not ropes:
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        if letters & {"F", "W"}:
            parameters = unrotated_rope(config.block_size, config.head_dim)
        ropes = dict.fromkeys(kinds, WrittenRope(parameters, config.block_size))
    full = ropes.get(False) or ropes[True]
    if family.rope_by_kind:
        local = ropes.get(True) or full
        return length | rope_settings_by_kind(full.parameters, local.parameters), ropes
    length["max_position_embeddings"] = full.max_position_embeddings
    return length | rope_settings(full.parameters), ropes


def window_settings(config, family):
    """Return the fields of a sliding window, for families that have one."""
    if "W" not in "".join(family.patterns):
        return {}
    types = ("full_attention", "sliding_attention")
    layer_types = [types[config.uses_window(layer)] for layer in range(config.n_layer)]
    has_window = types[1] in layer_types
    settings = {"sliding_window": config.window if has_window else None}
    if "W" not in family.patterns:
        settings["layer_types"] = layer_types
    if "use_sliding_window" in family.defaults:
        settings |= {"use_sliding_window": has_window, "max_window_layers": config.n_layer}
    return settings


def rope_settings(parameters):
    """Return RoPE's fields of config.json; older runtimes read those outside rope_parameters."""
    scaling = None
    if parameters["rope_type"] != "default":
        scaling = {"type": parameters["rope_type"], **parameters}
        del scaling["rope_theta"]
    outside = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
    settings = {key: parameters[key] for key in outside if key in parameters}
    return {"rope_parameters": parameters, "rope_scaling": scaling, **settings}


def rope_settings_by_kind(full, local):
    """Return RoPE's fields for layers without and with a window."""
    parameters = {"full_attention": full, "sliding_attention": local}
    if "truncate" in full:
        # transformers looks for it here
        parameters["truncate"] = full["truncate"]
    older = {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    return {"rope_parameters": parameters, **older}


# -----------------------------------------------------------------------------
# Weights


# Parameters of attention whose rows are channels that RoPE rotates
ROTATED_PARAMETERS = (
    "q.weight",
    "k.weight",
    "q.bias",
    "k.bias",
    "q_norm.weight",
    "k_norm.weight",
)


def export_dtype(model, written):
    """Return the dtype of the exported weights: as stored, or float32 where queries are scaled."""
    for layer in range(model.config.n_layer):
        if (query_scale(model, layer, written) != 1).any():
            return torch.float32
    return model.stored_dtype


def write_weights(folder, model, written, dtype):
    """Write the tensors under Hugging Face's names to one file, or to several with an index.

    written: what write_config() returned.
    """
    from safetensors.torch import save_file

    shapes = {name: p.shape for name, p in model.named_parameters()}
    layout = tensor_layout(written.family, model.config, shapes)
    stored = stored_shapes(layout, shapes)
    like = {name: torch.empty(stored[name], dtype=dtype, device="meta") for name in stored}
    files = divide_tensors(like)
    for file, names in files.items():
        tensors = {name: export_tensor(model, written, layout[name]).to(dtype) for name in names}
        tensors = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        sync(folder / file)
    if len(files) > 1:
        file_of = {name: file for file, names in files.items() for name in names}
        total_size = sum(tensor.nbytes for tensor in like.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


def divide_tensors(like):
    """Return which tensors each file holds: file name -> names, at most MAX_FILE_BYTES a file."""
    groups = [[]]
    size = 0
    for name, tensor in like.items():
        if groups[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    files = {}
    for number, names in enumerate(groups, 1):
        files[f"model-{number:05d}-of-{len(groups):05d}.safetensors"] = names
    return files


def export_tensor(model, written, held):
    """Return the tensor that holds these parameters, by its HFTensor."""
    return held.join([export_parameter(model, written, name) for name in held.parameters])


def export_parameter(model, written, name):
    """Return a parameter as transformers' model has it.

    Factors of the attention scores, for which transformers has no setting, become part of the
    queries' weights.
    """
    tensor = model.get_parameter(name).detach()
    block, _, last_name = name.partition(".attention.")
    if last_name not in ROTATED_PARAMETERS:
        return tensor
    layer = int(block.removeprefix("blocks."))
    heads = tensor.unflatten(0, (-1, model.config.head_dim))  # (H, D) or (H, D, C)
    scaled = ("q.weight", "q.bias") if model.config.qk_norm == "none" else ("q_norm.weight",)
    if last_name in scaled:
        scale = query_scale(model, layer, written)
        heads = heads * (scale if heads.dim() == 2 else scale[:, None])
    rope = rope_of(model, layer, written)
    if rope and rope.channel_order:
        heads = heads[:, rope.channel_order]
    return heads.flatten(0, 1)


def rope_of(model, layer, written):
    """Return the WrittenRope of a layer; None if it has no RoPE."""
    has_positions = model.config.uses_positions(layer)
    return written.ropes.get(model.config.uses_window(layer)) if has_positions else None


def query_scale(model, layer, written):
    """Return what the channels of a layer's queries have to be multiplied by: (D,)."""
    config, scheme = model.config, scheme_of(model, layer)
    factor = float(scheme.score_scale)
    if "attention_multiplier" not in written.settings:
        factor *= config.attn_scale
    scale = torch.full((config.head_dim,), factor)
    rope = rope_of(model, layer, written)
    if rope and config.pos == "rope" and scheme.rotary_dim:
        # Queries and keys have both factors. That of the clients is on all channels that they
        # rotate, ours on those that we rotate.
        scale[: scheme.rotary_dim] *= (scheme.attention_factor / rope.attention_factor) ** 2
        if not written.family.partial_rope:
            scale[scheme.rotary_dim :] /= rope.attention_factor**2
    return scale
