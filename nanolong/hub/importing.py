"""Import Hugging Face checkpoints: a local directory becomes the first checkpoint of a run folder.

Only JSON and safetensors files are opened, and names, shapes and dtypes are checked before any
weight is loaded. What has no equivalent here is refused, with the reason.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from nanolong import validate
from nanolong.errors import UserError
from nanolong.hub import tokenizer as hub_tokenizer
from nanolong.hub.layout import (
    CONFIG_DEFAULTS,
    UNSUPPORTED,
    ConfigFields,
    is_redundant,
    read_json,
    stored_shape,
    tensor_layout,
)
from nanolong.hub.rope import extension_of, read_rope, rotates_nothing
from nanolong.run import checkpoint
from nanolong.run import folder as folder_of_runs
from nanolong.tensor_file import TensorStream, read_header, read_tensor


def import_checkpoint(GPT, source, target, store="float32"):
    """Write a Hugging Face directory as the first checkpoint of a run folder; return its folder.

    GPT: the class of model.py. store: the dtype of the weights in the checkpoint,
    float32 or bfloat16. Raises UserError, with nothing written.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise UserError(
            f"there is no directory {source}: give that of a Hugging Face checkpoint, downloaded "
            "to this machine"
        )
    check_unused(target)
    config = validate.coerce(GPT.config_class, read_config(source), str(source / "config.json"))
    validate.check_model(config, GPT.schemes)
    stored = read_headers(source)
    shapes = parameter_shapes(GPT, config, source / "config.json", stored)
    layout = match_layout(config, stored)
    check_tensors(source, layout, stored, shapes, config.tie_embeddings)
    tokenizer, bos, note = hub_tokenizer.read_tokenizer(source, config.vocab_size)

    pairs = read_weights(source, layout, stored, shapes)
    weights = weight_stream(pairs, shapes, store)
    return write_imported(target, source, config, weights, tokenizer, bos, note)


def weight_stream(pairs, shapes, store):
    """Return the TensorStream of (name, tensor) pairs; store: the name of its dtype."""
    dtype = getattr(torch, store)
    like = {name: torch.empty(shapes[name], dtype=dtype, device="meta") for name in shapes}
    return TensorStream(like, pairs)


def check_unused(target):
    if folder_of_runs.list_steps(target):
        raise UserError(f"{target} holds a run already: choose another folder")


def write_imported(target, source, config, weights, tokenizer, bos, note):
    """Write the first checkpoint of a run folder, and print what it is; return its folder.

    weights: a TensorStream. tokenizer, bos, note: what read_tokenizer() returned.
    """
    folder = target / "step-000000"
    meta = {
        "config": asdict(config),
        "tokenizer": None if tokenizer is None else tokenizer.to_json(),
        "bos": bos,
        "imported": source.resolve().name,
    }
    checkpoint.write_checkpoint(folder, {"model": weights}, meta)
    print_summary(folder, config, sum(tensor.numel() for tensor in weights.like.values()))
    if note:
        print(note.strip())
    return folder


def print_summary(folder, config, n_parameters):
    layers = range(config.n_layer)
    text = f"{folder}: {n_parameters / 1e6:.2f} M parameters, context length "
    text += f"{config.block_size} tokens"
    extension = config.extension
    if extension:
        text += f" (originally {config.original_length}, {extension['method']}, "
        text += f"factor {extension['factor']:g})"
    if config.window:
        n_window = sum(config.uses_window(layer) for layer in layers)
        text += f"; window {config.window} in {n_window} of {config.n_layer} layers"
    n_without = sum(not config.uses_positions(layer) for layer in layers)
    if n_without:
        text += f"; {n_without} layers without positions"
    print(text)
    if extension and extension["method"] == "dynamic-ntk":
        print(
            "note: a dynamic scale follows the length of the text rounded up to a quarter of the "
            "original length; transformers takes the exact length, and keeps keys of older scales"
        )


# -----------------------------------------------------------------------------
# config.json


def read_config(folder):
    """Return the settings of GPTConfig that a Hugging Face directory's config.json describes.

    Raises UserError for what has no equivalent here.
    """
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds an adapter (LoRA), which is a change of another model: merge it into "
            "that model where you made it, and give the result"
        )
    if not file.is_file():
        raise UserError(
            f"there is no config.json in {folder}: give the directory of a Hugging Face "
            "checkpoint, downloaded to this machine"
        )
    values = read_json(file)
    if "vision_config" in values:
        raise UserError(
            f"{folder} is a model of images and text, and only models of text can be imported: "
            "choose the checkpoint of its language model, if there is one"
        )
    check_model_type(folder, values.get("model_type"))
    if values.get("quantization_config"):
        raise UserError(
            f"{folder} is quantized, and weights are read in float32, float16 or bfloat16: "
            "download the checkpoint that it was made from"
        )
    return read_settings(file, values)


def read_settings(file, values):
    """Return the settings of GPTConfig that the values of a config.json describe.

    file: for the error messages. Raises UserError for what has no equivalent here.
    """
    model_type = values["model_type"]
    fields = ConfigFields(file, values, CONFIG_DEFAULTS[model_type])
    if model_type == "gpt2":
        return read_gpt2_config(fields)
    return read_llama_config(fields, model_type)


def check_model_type(folder, model_type):
    if isinstance(model_type, str) and model_type in CONFIG_DEFAULTS:
        return
    reason = "is not known here"
    if isinstance(model_type, str):
        reason = UNSUPPORTED.get(model_type, reason)
    raise UserError(
        f"{folder} is of model_type {model_type!r}, which {reason}: "
        f"what can be imported is {', '.join(CONFIG_DEFAULTS)}"
    )


def read_gpt2_config(fields):
    fields.require("activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    fields.require("scale_attn_weights", (True,))
    fields.require("scale_attn_by_inverse_layer_idx", (False,))
    fields.require("add_cross_attention", (False,))
    n_embd = fields.integer("n_embd")
    return {
        "pos": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": "all",
        "n_layer": fields.integer("n_layer"),
        "n_head": fields.integer("n_head"),
        "n_embd": n_embd,
        "block_size": fields.integer("n_positions"),
        "vocab_size": fields.integer("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.real("layer_norm_epsilon", 1e-30, 0.1),
        "mlp_dim": fields.optional_integer("n_inner") or 4 * n_embd,
    }


def read_llama_config(fields, model_type):
    fields.require("hidden_act", ("silu", "swish"))
    fields.require_off("mlp_bias")
    fields.require_off("rope_interleaved")
    if model_type != "qwen2":
        fields.require_off("attention_bias")
    n_layer = fields.integer("num_hidden_layers", high=1 << 16)
    n_head = fields.integer("num_attention_heads", high=1 << 16)
    n_embd = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or n_embd // n_head
    rope_base, rope = read_rope(fields, head_dim)
    window, uses_window, uses_rope = read_layers(fields, model_type, n_layer)

    settings = {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": fields.optional_integer("num_key_value_heads") or n_head,
        "head_dim": head_dim,
        "n_embd": n_embd,
        "vocab_size": fields.integer("vocab_size"),
        "qk_norm": "head" if model_type == "qwen3" else "none",
        "bias": "qkv" if model_type == "qwen2" else "none",
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.real("rms_norm_eps", 1e-30, 0.1),
        "mlp_dim": fields.integer("intermediate_size"),
        "window": window if any(uses_window) else 0,
        "block_size": rope.length,
    }
    if not any(uses_rope) or rotates_nothing(rope):
        settings["pos"] = "nope"
        uses_rope = [True] * n_layer
    else:
        settings["pos"] = "rope"
        settings["rope_base"] = rope_base
        settings["extension"] = extension_of(rope)
    settings["layer_pattern"] = layer_pattern(uses_window, uses_rope)
    return settings


# -----------------------------------------------------------------------------
# Layers that differ


def read_layers(fields, model_type, n_layer):
    """Return (window in tokens or None, whether each layer has it, whether each layer has RoPE)."""
    uses_rope = [True] * n_layer
    if model_type == "smollm3":
        uses_rope = read_rope_layers(fields, n_layer)
    types = ("full_attention", "sliding_attention")
    layer_types = fields.list_per_layer("layer_types", n_layer, types)

    window = None
    if model_type == "mistral":
        window = fields.optional_integer("sliding_window")
    elif model_type != "llama" and fields.values.get("use_sliding_window"):
        window = fields.optional_integer("sliding_window")

    if not window:
        uses_window = [False] * n_layer
    elif model_type == "mistral":
        uses_window = [True] * n_layer
    elif layer_types:
        uses_window = [layer_type == "sliding_attention" for layer_type in layer_types]
    elif model_type == "smollm3":
        uses_window = [not has_rope for has_rope in uses_rope]
    else:  # Qwen
        first = fields.integer("max_window_layers", low=0)
        uses_window = [layer >= first for layer in range(n_layer)]
    return window, uses_window, uses_rope


def read_rope_layers(fields, n_layer):
    """Return for each layer of a SmolLM3 whether it has RoPE."""
    # the list holds 1 for layers with RoPE, whatever its name says
    uses_rope = fields.list_per_layer("no_rope_layers", n_layer, (0, 1))
    if uses_rope is not None:
        return [bool(has_rope) for has_rope in uses_rope]
    interval = fields.integer("no_rope_layer_interval")
    return [(layer + 1) % interval != 0 for layer in range(n_layer)]


def layer_pattern(uses_window, uses_rope):
    """Return the shortest layer_pattern that gives these lists when it is repeated."""
    letters = {(False, True): "F", (True, True): "W", (False, False): "N", (True, False): "S"}
    word = "".join(letters[kind] for kind in zip(uses_window, uses_rope, strict=True))
    for period in range(1, len(word)):
        if word.startswith(word[period:]):
            return word[:period]
    return word


# -----------------------------------------------------------------------------
# Tensors


class TensorPlace(NamedTuple):
    """Where a tensor is, by the header of its file."""

    file: str
    shape: tuple


def read_headers(folder):
    """Return the tensors of a directory, by the headers of its files: name -> TensorPlace."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return read_file_header(folder, "model.safetensors")
    if not index.is_file():
        raise no_weights(folder)
    file_of = read_index(index)
    stored = {}
    for file in sorted(set(file_of.values())):
        stored |= read_file_header(folder, file)
    for name, file in file_of.items():
        if name not in stored or stored[name].file != file:
            raise UserError(
                f"{index} says that {name} is in {file}, and it is not: download both again"
            )
    return stored


def no_weights(folder):
    pickles = []
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        pickles += [file.name for file in folder.glob(pattern)]
    if not pickles:
        return UserError(
            f"there is no model.safetensors in {folder}: download the whole checkpoint"
        )
    return UserError(
        f"{folder} holds {min(pickles)}, a pickle, which can run any program and is not opened: "
        "download its model.safetensors, or let transformers load and save it where you trust it"
    )


def read_index(index):
    """Return which file of a directory holds each tensor: name -> file name."""
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
        raise UserError(f"{index} has no weight_map of names to files: download it again")
    for file in set(file_of.values()):
        # a path that leaves the folder would read files that are none of the checkpoint's
        is_plain_name = Path(file).name == file and "\\" not in file and not file.startswith(".")
        if not is_plain_name or not file.endswith(".safetensors"):
            raise UserError(
                f"{index} names {file!r}, which is no safetensors file of this folder: "
                "download the checkpoint from a source that you trust"
            )
    return file_of


def read_file_header(folder, file):
    from safetensors import SafetensorError

    try:
        stored = read_header(folder / file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{folder / file} is not a whole safetensors file ({error}): download it again"
        ) from None
    for name, tensor in stored.items():
        check_dtype(folder / file, name, tensor.dtype)
    return {name: TensorPlace(file, tensor.shape) for name, tensor in stored.items()}


def check_dtype(file, name, dtype):
    if dtype in ("F32", "F16", "BF16", "F64") or is_redundant(name, True):
        return
    raise UserError(
        f"{file}: {name} is of dtype {dtype}, and weights are read in float32, float16 or "
        "bfloat16: download the checkpoint that is not quantized"
    )


def parameter_shapes(GPT, config, file, stored):
    """Return the shapes of our parameters, without taking memory for them.

    file: that with the settings, for the error messages.
    """
    # checked first: an absurd number of layers takes long to build even without memory
    if config.n_layer > len(stored):
        raise UserError(
            f"{file} says {config.n_layer} layers, and there are {len(stored)} tensors: "
            "download both again"
        )
    try:
        with torch.device("meta"):
            model = GPT(config)
    except (AssertionError, RuntimeError, TypeError, OverflowError) as error:
        raise UserError(
            f"{file} describes a model that cannot be built ({error}): download it again"
        ) from None
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def match_layout(config, stored):
    """Return the layout of the tensors, with their prefix or, as in GPT-2's own files, without."""
    layout = tensor_layout(config)
    if any(name.startswith(("model.", "transformer.")) for name in stored):
        return layout
    prefix = r"^(model|transformer)\."
    return {re.sub(prefix, "", name): tensor for name, tensor in layout.items()}


def check_tensors(source, layout, stored, shapes, tied, settings="config.json", files="both"):
    """Raise UserError unless the stored tensors are those of the layout.

    settings: what describes the model. files: what to download again.
    """
    for name, tensor in layout.items():
        expected = stored_shape(tensor, shapes)
        found = stored[name].shape if name in stored else "absent"
        if found != expected:
            raise UserError(
                f"{source}: {name} is {found}, where {settings} asks for {expected}: "
                f"download {files} again"
            )
    extra = [name for name in stored if name not in layout and not is_redundant(name, tied)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{source}: the model has no parameter for {extra[0]}{more}, so it is another one than "
            f"its {settings} says: download {files} again"
        )


def read_weights(source, layout, stored, shapes):
    """Yield (our name, tensor) for all parameters, with one tensor of the files in memory."""
    for name, held in layout.items():
        yield from split_tensor(read_tensor(source / stored[name].file, name), held, shapes)


def split_tensor(tensor, held, shapes):
    """Return views of the parameters that a tensor holds by its HFTensor: [(our name, tensor)]."""
    if held.transposed:
        tensor = tensor.t()
    parts = tensor.split([shapes[parameter][0] for parameter in held.parameters])
    return list(zip(held.parameters, parts, strict=True))
