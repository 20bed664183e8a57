"""Export a model as a Hugging Face directory that transformers' AutoModelForCausalLM loads.

The weights are read from the checkpoint and written one tensor at a time. What was written is
verified (hf_verify.py) before the directory appears. What transformers has no equivalent of is
refused.
"""

import json
import os
import shutil
from pathlib import Path

import torch

from data import tokenizer_from_json
from nanolong.errors import UserError
from nanolong.hub.layout import stored_shape, tensor_layout
from nanolong.hub.rope import WrittenRope, unrotated_rope, write_rope
from nanolong.hub.tokenizer import write_tokenizer
from nanolong.hub.verify import verify_export
from nanolong.run.checkpoint import sync
from nanolong.tensor_file import TensorStream, read_tensor, write_tensors
from nanolong.tokenizer_files import FILES

# Larger weights are written to several files of at most this size and an index, as transformers
# does. A tensor is never divided.
MAX_FILE_BYTES = 5 * 10**9

CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def export_checkpoint(model, target, verify=True, tokenizer_from=""):
    """Write a model that checkpoint.open_model() returned, and its tokenizer, whole or not at all.

    Its weights are those of its checkpoint's file. tokenizer_from: a Hugging Face directory whose
    tokenizer files are copied instead of the model's own. Raises UserError for a model that has no
    equivalent in transformers, or if transformers computes other logits.
    """
    assert all(p.is_meta for p in model.parameters()), "weights in memory are not exported"
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: remove it, or choose another directory")
    settings, rope = write_config(model)
    dtype = export_dtype(model, rope)
    settings["dtype"] = settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    settings |= special_token_ids(tokenizer)

    folder = target.parent / f".tmp-{target.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if tokenizer_from:
            copy_tokenizer(Path(tokenizer_from), folder)
        else:
            add_bos = model.meta.get("bos") is not None
            write_tokenizer(folder, tokenizer, add_bos, model.config.block_size)
        write_weights(folder, model, rope, dtype)
        text = json.dumps(settings, indent=2, sort_keys=True, allow_nan=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
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


def special_token_ids(tokenizer):
    bos = eos = None
    if tokenizer:
        bos = tokenizer.bos
        eos = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}


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
        text += f", rope_type {settings['rope_parameters']['rope_type']}"
    text += f", {model.config.block_size} tokens, {settings['dtype']}"
    if not has_tokenizer:
        text += "; no tokenizer: the model was trained on token files without one"
    print(text)


# -----------------------------------------------------------------------------
# config.json


def write_config(model):
    """Return (config.json as a dict, WrittenRope or None).

    Raises UserError for what has no equivalent in transformers.
    """
    config = model.config
    check_blocks(config)
    check_positions(config)
    settings = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "initializer_range": 0.02,
    }
    if config.norm == "layernorm":
        return settings | gpt2_config(config), None
    uses_rope = layers_with_rope(model)
    rope = choose_rope(model, uses_rope)
    model_type = choose_architecture(config, uses_rope)
    return settings | llama_config(config, model_type, rope, uses_rope), rope


def no_equivalent(what, remedy):
    message = f"{what} has no equivalent among the models that transformers loads: {remedy}"
    return UserError(message)


def check_blocks(config):
    """Raise UserError unless the blocks are Llama's or GPT-2's."""
    blocks = (config.norm, config.mlp, config.bias)
    if blocks == ("layernorm", "gelu", "all"):
        check_gpt2(config)
    elif blocks not in (("rmsnorm", "swiglu", "none"), ("rmsnorm", "swiglu", "qkv")):
        raise no_equivalent(
            f"--norm={config.norm} with --mlp={config.mlp} and --bias={config.bias}",
            "what can be exported is rmsnorm and swiglu with --bias=none or qkv, and GPT-2 "
            "(layernorm, gelu, all)",
        )
    elif config.qk_norm != "none" and config.bias == "qkv":
        raise no_equivalent("--qk_norm with --bias=qkv", "train without one of them to export")


def check_gpt2(config):
    """Raise UserError unless a model of GPT-2's blocks has its other settings, too."""
    requirements = {
        "--pos=learned": config.pos == "learned",
        "--head_dim=0": config.n_head * config.head_dim == config.n_embd,
        "--n_kv_head=0": config.n_kv_head == config.n_head,
        "--qk_norm=false": config.qk_norm == "none",
        "--window=0": not config.window,
    }
    missing = [setting for setting, holds in requirements.items() if not holds]
    if missing:
        raise UserError(
            "of the models with --norm=layernorm, --mlp=gelu and --bias=all transformers has "
            f"GPT-2 alone: train with {', '.join(missing)} to export"
        )


def check_positions(config):
    """Raise UserError for position schemes and settings that transformers does not have."""
    if config.random_positions:
        raise UserError(
            "the models that transformers loads count their positions, and this one was trained on "
            "random ones: train without --random_positions to export"
        )
    if config.sinks:
        raise no_equivalent("a window with sinks", "train without --sinks to export")
    if config.norm == "rmsnorm" and config.pos not in ("rope", "nope"):
        raise no_equivalent(
            f"--pos={config.pos}",
            "what can be exported is rope and nope, and GPT-2 (learned, with --norm=layernorm "
            "--mlp=gelu --bias=all)",
        )


def gpt2_config(config):
    return {
        "architectures": [CLASS_NAMES["gpt2"]],
        "model_type": "gpt2",
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.mlp_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def layers_with_rope(model):
    """Return for each layer whether RoPE rotates its queries and keys."""
    config, pos = model.config, model.pos
    if config.pos == "nope" or extension_method(config) == "drope" or not pos.rotary_dim:
        return [False] * config.n_layer
    return [config.uses_positions(layer) for layer in range(config.n_layer)]


def extension_method(config):
    return config.extension["method"] if config.extension else "none"


def choose_rope(model, uses_rope):
    """Return the WrittenRope of a model of Llama's shape, with RoPE or without."""
    config = model.config
    if any(uses_rope):
        return write_rope(model)
    if config.qk_norm != "none":
        # Qwen3 has RoPE in all layers
        parameters = unrotated_rope(config.block_size, config.head_dim)
    else:
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return WrittenRope(parameters, config.block_size)


def choose_architecture(config, uses_rope):
    """Return the model_type that has these layers. Raises UserError if there is none."""
    check_layers_without_rope(config, uses_rope)
    n_window = sum(config.uses_window(layer) for layer in range(config.n_layer))
    if config.qk_norm != "none":
        model_type = "qwen3"
    elif config.bias == "qkv":
        model_type = "qwen2"
    elif not all(uses_rope) or 0 < n_window < config.n_layer:
        model_type = "smollm3"
    # transformers' Llama wants heads that divide the embedding
    elif n_window or config.n_embd % config.n_head:
        model_type = "mistral"
    else:
        model_type = "llama"
    if config.head_dim % 2 and model_type != "smollm3":
        raise UserError(
            f"head_dim={config.head_dim} is odd, and the models that transformers loads pair a "
            "head's channels: choose an even one"
        )
    return model_type


def check_layers_without_rope(config, uses_rope):
    """Raise UserError for layers without RoPE in a model that is not a SmolLM3.

    QK-norm in a model without any RoPE is possible: a Qwen3 whose RoPE rotates nothing.
    """
    if config.qk_norm != "none" and any(uses_rope) and not all(uses_rope):
        other = "--qk_norm"
    elif config.bias == "qkv" and not all(uses_rope):
        other = "--bias=qkv"
    else:
        return
    if not any(uses_rope):
        what = f"a model without positions with {other}"
        raise no_equivalent(what, "train without one of them to export")
    raise no_equivalent(
        f"--layer_pattern={config.layer_pattern} (some layers without positions) with {other}",
        "what can be exported is F and W with it, and all four letters without it",
    )


def llama_config(config, model_type, rope, uses_rope):
    """Return the part of config.json that describes a Llama, or an architecture of its shape."""
    settings = {
        "architectures": [CLASS_NAMES[model_type]],
        "model_type": model_type,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        "max_position_embeddings": rope.max_position_embeddings,
    }
    if model_type in ("llama", "qwen3", "smollm3"):
        settings["attention_bias"] = False
    if model_type in ("llama", "smollm3"):
        settings["mlp_bias"] = False
    if model_type == "smollm3":
        # 1 stands for a layer with RoPE, whatever the name says
        settings["no_rope_layers"] = [int(value) for value in uses_rope]
        settings["no_rope_layer_interval"] = 4
    return settings | window_settings(config, model_type) | rope_settings(rope.parameters)


def window_settings(config, model_type):
    uses_window = [config.uses_window(layer) for layer in range(config.n_layer)]
    window = config.window if any(uses_window) else None
    if model_type == "llama":
        return {}
    if model_type == "mistral":
        return {"sliding_window": window}
    types = {True: "sliding_attention", False: "full_attention"}
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": config.n_layer,
        "layer_types": [types[value] for value in uses_window],
    }


def rope_settings(parameters):
    """Return RoPE's fields of config.json; older runtimes read those outside rope_parameters."""
    settings = {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None,
    }
    if parameters["rope_type"] != "default":
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        settings["rope_scaling"] = {"type": parameters["rope_type"], **scaling}
    key = "original_max_position_embeddings"
    if key in parameters:
        settings[key] = parameters[key]
    return settings


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


def export_dtype(model, rope):
    """Return the dtype of the exported weights: as stored, or float32 where queries are scaled."""
    for layer in range(model.config.n_layer):
        scale = query_scale(model, layer, rope)
        if (scale != 1).any():
            return torch.float32
    return model.stored_dtype


def write_weights(folder, model, rope, dtype):
    """Write the tensors under Hugging Face's names to one file, or to several with an index.

    rope: what write_config() returned.
    """
    layout = tensor_layout(model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    like = {}
    for name, held in layout.items():
        like[name] = torch.empty(stored_shape(held, shapes), dtype=dtype, device="meta")
    files = divide_tensors(like)
    for file, names in files.items():
        pairs = ((name, export_tensor(model, rope, layout[name])) for name in names)
        stream = TensorStream({name: like[name] for name in names}, pairs)
        write_tensors(folder / file, stream, {"format": "pt"})
        sync(folder / file)
    if len(files) > 1:
        file_of = {name: file for file, names in files.items() for name in names}
        total_size = sum(tensor.nbytes for tensor in like.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
        text = json.dumps(index, indent=2, allow_nan=False) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


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


def export_tensor(model, rope, held):
    """Return the tensor that holds these parameters, by its HFTensor."""
    parts = [export_parameter(model, rope, name) for name in held.parameters]
    tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return tensor.t() if held.transposed else tensor


def export_parameter(model, rope, name):
    """Read a parameter from the checkpoint, and return it as transformers' model has it.

    Factors of the attention scores, for which transformers has no setting, become part of the
    queries' weights.
    """
    tensor = read_tensor(model.folder / "model.safetensors", name)
    block, _, last_name = name.partition(".attention.")
    if not last_name:
        return tensor
    layer = int(block.removeprefix("blocks."))
    config = model.config
    reorders = reorders_channels(model, rope, layer)
    scaled = ("q_norm.weight",) if config.qk_norm != "none" else ("q.weight", "q.bias")
    if last_name in scaled:
        tensor = scale_channels(tensor, query_scale(model, layer, rope))
    if reorders and last_name in ROTATED_PARAMETERS:
        tensor = reorder_channels(tensor, config.head_dim, rope.channel_order)
    return tensor


def reorders_channels(model, rope, layer):
    return bool(rope and rope.channel_order) and model.config.uses_positions(layer)


def query_scale(model, layer, rope):
    """Return what the channels of a layer's queries have to be multiplied by: (D,)."""
    config, pos = model.config, model.pos
    scale = torch.full((config.head_dim,), float(config.attn_scale))
    if config.uses_positions(layer):
        scale *= pos.score_scale
        if config.pos == "rope" and pos.rotary_dim:
            # Queries and keys have both factors. That of the clients is on all channels, ours on
            # those that are rotated.
            scale[: pos.rotary_dim] *= (pos.attention_factor / rope.attention_factor) ** 2
            scale[pos.rotary_dim :] /= rope.attention_factor**2
    return scale


def scale_channels(tensor, scale):
    """Multiply the channels of every head (D,), in the first dimension of a parameter."""
    if (scale == 1).all():
        return tensor
    heads = tensor.unflatten(0, (-1, len(scale)))  # (H, D) or (H, D, C)
    scale = scale if heads.dim() == 2 else scale[:, None]
    return (heads * scale).flatten(0, 1)


def reorder_channels(tensor, head_dim, order):
    """Reorder the channels of every head, in the first dimension of a parameter."""
    heads = tensor.unflatten(0, (-1, head_dim))
    return heads[:, order].flatten(0, 1)
