"""Import Hugging Face checkpoints: a local directory becomes the first checkpoint of a run folder.

Only JSON and safetensors files are opened, and names, shapes and dtypes are checked before any
weight is loaded. What has no equivalent here is refused, with the reason.
"""

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from nanolong import run
from nanolong.errors import UserError
from nanolong.hub import tokenizer as hub_tokenizer
from nanolong.hub.families import FAMILIES, UNSUPPORTED
from nanolong.hub.layout import (
    ACTIVATIONS,
    MOVED,
    ConfigFields,
    is_redundant,
    read_json,
    stored_shapes,
    tensor_layout,
)
from nanolong.hub.rope import read_rope


def import_checkpoint(GPT, source, target, store="float32", tokenizer=""):
    """Write a Hugging Face directory as the first checkpoint of a run folder; return its folder.

    GPT: the class of model.py. store: the dtype of the weights in the checkpoint,
    float32 or bfloat16. tokenizer: the directory of the tokenizer, if it is another. Raises
    UserError, with nothing written.
    """
    source, target = Path(source), Path(target)
    check_unused(target)
    values = read_values(source)
    settings = read_settings(source / "config.json", values)
    config = make_config(GPT, settings, source / "config.json")
    family = FAMILIES[values["model_type"]]
    stored = rename_tensors(read_headers(source), family)
    shapes = parameter_shapes(GPT, config, source / "config.json", stored)
    layout = tensor_layout(family, config, shapes, values)
    check_tensors(source, layout, stored, shapes)
    read_tokenizer = hub_tokenizer.read_tokenizer
    if tokenizer:
        read_tokenizer = hub_tokenizer.read_named_tokenizer
    tokenizer, bos, note = read_tokenizer(Path(tokenizer or source), config.vocab_size)

    pairs = read_weights(source, layout, stored, shapes)
    weights = finite_weights(source, pairs, store)
    if store == "bfloat16" and any(held.fold not in MOVED for held in layout.values()):
        note += "\nnote: weights that the import computes, in float32, are rounded to bfloat16"
    kept = {"tokenizer": tokenizer, "bos": bos, "family": values["model_type"]}
    return write_imported(target, source, config, weights, note, **kept)


def make_config(GPT, settings, file):
    """The GPTConfig of settings that were read from a file. Raises UserError that names it."""
    try:
        return GPT.config_class(**settings)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def finite_weights(source, pairs, store):
    """The (name, tensor) pairs as a dict; store: the name of its dtype.

    Raises UserError for a tensor with a value that is not finite.
    """
    weights = {}
    for name, tensor in pairs:
        least, greatest = tensor.aminmax()
        if not math.isfinite(least) or not math.isfinite(greatest):
            raise UserError(
                f"{source}: {name} has values that are not finite, so the model computes nothing: "
                "download it again, or choose another checkpoint"
            )
        weights[name] = tensor.to(getattr(torch, store), copy=True)
    return weights


def check_unused(target):
    if run.list_steps(target):
        raise UserError(f"{target} holds a run already: choose another folder")


def write_imported(target, source, config, weights, note, tokenizer, bos, family):
    """Write the first checkpoint of a run folder, and print what it is; return its folder.

    weights: tensors by name. tokenizer, bos, note: what read_tokenizer() returned. family: the
    model_type, which an export has again.
    """
    folder = target / "step-000000"
    meta = {
        "config": asdict(config),
        "tokenizer": None if tokenizer is None else tokenizer.to_json(),
        "bos": bos,
        "family": family,
        "imported": source.resolve().name,
        "code": {},
    }
    run.write_checkpoint(folder, {"model": weights}, meta)
    print_summary(folder, config, sum(tensor.numel() for tensor in weights.values()))
    if note:
        print(note.strip())
    return folder


def print_summary(folder, config, n_parameters):
    text = f"{folder}: {n_parameters / 1e6:.2f} M parameters"
    text += f", context length {config.block_size} tokens"
    extension = config.extension
    if extension:
        text += f" (originally {config.original_length}, {extension['method']}, "
        text += f"factor {extension['factor']:g})"
    layers = range(config.n_layer)
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

# Fields of any family that change what a model computes, and their value if they do not.
NOT_COMPUTED = {
    "mlp_bias": False,
    "rope_interleaved": False,
    "clip_qkv": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read_values(folder):
    """Return the fields of a Hugging Face directory's config.json, which has a known model_type.

    Of a model of images and text they are those of its text half. Raises UserError for what has no
    equivalent here.
    """
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds an adapter (LoRA), which is a change of another model: merge it into "
            "that model where you made it, and give the result"
        )
    if not file.is_file():
        raise UserError(
            f"there is no {file}: give the directory of a Hugging Face checkpoint, downloaded to "
            "this machine"
        )
    values = read_json(file)
    if values.get("quantization_config"):
        raise UserError(
            f"{folder} is quantized, and weights are read in float32, float16 or bfloat16: "
            "download the checkpoint that it was made from"
        )
    text = values.get("text_config")
    if isinstance(text, dict):
        tied = values.get("tie_word_embeddings")
        values = text if tied is None else {"tie_word_embeddings": tied, **text}
    if "vision_config" in values:
        raise UserError(
            f"{folder} is a model of images and text without a text_config, so its text half "
            "cannot be found: choose the checkpoint of its language model, if there is one"
        )
    model_type = values.get("model_type")
    if str(model_type) not in FAMILIES:
        raise UserError(
            f"{folder} is of model_type {model_type!r}, which "
            f"{UNSUPPORTED.get(str(model_type), 'is not known here')}: what can be imported is "
            f"{', '.join(FAMILIES)}"
        )
    return values


def read_settings(file, values):
    """Return the settings of GPTConfig that the values of a config.json describe.

    file: for the error messages. Raises UserError for what has no equivalent here.
    """
    family = FAMILIES[values["model_type"]]
    if isinstance(values.get("attn_config"), dict):
        # where MPT has those of its attention
        values = {**values, **values["attn_config"]}
    fields = ConfigFields(file, values, family.defaults, family.names)
    for key, value in {**NOT_COMPUTED, **family.fixed}.items():
        fields.require(key, (value,))
    n_layer = fields.integer("num_hidden_layers", high=1 << 16)
    n_head = fields.integer("num_attention_heads", high=1 << 16)
    n_embd = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or n_embd // n_head

    settings = {name: choices[0] for name, choices in family.settings.items()}
    settings |= {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": fields.optional_integer("num_key_value_heads") or n_head,
        "head_dim": head_dim,
        "n_embd": n_embd,
        "vocab_size": fields.integer("vocab_size"),
        "mlp_dim": fields.optional_integer("intermediate_size") or 4 * n_embd,
        "norm_eps": fields.real("rms_norm_eps", 1e-30, 0.1),
    }
    if fields.name("hidden_act"):
        choices = family.settings["mlp"]
        mlp_of = {name: mlp for mlp in choices for name in ACTIVATIONS[mlp]}
        fields.require("hidden_act", list(mlp_of))
        settings["mlp"] = mlp_of[fields.get("hidden_act")]
    if "tie_embeddings" not in family.settings:
        settings["tie_embeddings"] = fields.flag("tie_word_embeddings")
    for key, (name, if_true, if_false) in family.switches.items():
        settings[name] = if_true if fields.flag(key) else if_false
    if settings["pos"] == "rope":
        settings |= read_positions(fields, family, n_layer, head_dim)
    else:
        settings["block_size"] = fields.integer("max_position_embeddings")
    return settings | (family.read(fields, settings) if family.read else {})


# -----------------------------------------------------------------------------
# Layers that differ


def read_positions(fields, family, n_layer, head_dim):
    """Return the settings of GPTConfig for RoPE and for layers that differ from one another."""
    window, uses_window, uses_rope = read_layers(fields, family, n_layer)
    settings = read_rope(fields, family, head_dim, uses_window)
    settings["window"] = window if any(uses_window) else 0
    if not any(uses_rope) or settings["pos"] == "nope":
        settings |= {"pos": "nope", "extension": None}
        uses_rope = [True] * n_layer
    letters = {(False, True): "F", (True, True): "W", (False, False): "N", (True, False): "S"}
    word = "".join(letters[kind] for kind in zip(uses_window, uses_rope, strict=True))
    # the shortest beginning that gives the word when it is repeated
    period = next(n for n in range(1, n_layer + 1) if word.startswith(word[n:]))
    settings["layer_pattern"] = word[:period]
    return settings


def read_layers(fields, family, n_layer):
    """Return (window in tokens or None, whether each layer has it, whether each layer has RoPE)."""

    def all_but_every(key):
        period = fields.integer(key)
        return [(layer + 1) % period != 0 for layer in range(n_layer)]

    uses_rope = [True] * n_layer
    if "no_rope_layer_interval" in family.defaults:
        # the list holds 1 for layers with RoPE, whatever its name says
        listed = fields.list_per_layer("no_rope_layers", n_layer, (0, 1))
        uses_rope = list(map(bool, listed or all_but_every("no_rope_layer_interval")))
    has_window = "W" in "".join(family.patterns)
    if "use_sliding_window" in family.defaults:
        has_window = fields.flag("use_sliding_window")
    window = fields.optional_integer("sliding_window") if has_window else None
    if not window:
        return None, [False] * n_layer, uses_rope

    types = ("full_attention", "sliding_attention")
    layer_types = fields.list_per_layer("layer_types", n_layer, types)
    if "W" in family.patterns:
        uses_window = [True] * n_layer
    elif layer_types:
        uses_window = [layer_type == "sliding_attention" for layer_type in layer_types]
    elif "sliding_window_pattern" in family.defaults:
        uses_window = all_but_every("sliding_window_pattern")
    elif "max_window_layers" in family.defaults:
        first = fields.integer("max_window_layers", low=0)
        uses_window = [layer >= first for layer in range(n_layer)]
    else:  # SmolLM3
        uses_window = [not has_rope for has_rope in uses_rope]
    return window, uses_window, uses_window if "WN" in family.patterns else uses_rope


# -----------------------------------------------------------------------------
# Tensors


class TensorPlace(NamedTuple):
    """Where a tensor is, by the header of its file."""

    file: str
    shape: tuple
    name: str  # in the file


def read_headers(folder):
    """Return the tensors of a directory, by the headers of its files: name -> TensorPlace."""
    index = folder / "model.safetensors.index.json"
    file_of = {}
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file():
        file_of = read_index(index)
        files = sorted(set(file_of.values()))
    stored = {}
    for file in files:
        stored |= read_file_header(folder, file)
    for name, file in file_of.items():
        if name not in stored or stored[name].file != file:
            raise UserError(
                f"{index} says that {name} is in {file}, and it is not: download both again"
            )
    return stored


def read_index(index):
    """Return which file of a directory holds each tensor: name -> file name."""
    if not index.is_file():
        pickles = [f.name for f in index.parent.iterdir() if f.suffix in PICKLES]
        left_out = f" ({min(pickles)}, a pickle, can run any program)" if pickles else ""
        raise UserError(
            f"there is no model.safetensors in {index.parent}{left_out}: download it, or let "
            "transformers load and save the model where you trust it"
        )
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


PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_file_header(folder, file):
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            stored = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{folder / file} is not a whole safetensors file ({error}): download it again"
        ) from None
    for name, (dtype, _) in stored.items():
        if dtype not in ("F32", "F16", "BF16", "F64") and not is_redundant(name):
            raise UserError(
                f"{folder / file}: {name} is of dtype {dtype}, and weights are read in float32, "
                "float16 or bfloat16: download the checkpoint that is not quantized"
            )
    return {name: TensorPlace(file, shape, name) for name, (_, shape) in stored.items()}


def rename_tensors(stored, family):
    """Return the tensors by their names of today: old files have others, or leave out a prefix.

    Of a model of images and text, only those of the text half are returned.
    """
    is_half = any("language_model." in name for name in stored)
    prefix = next(iter(family.model)).partition(".")[0] + "."
    has_prefix = is_half or any(name.startswith(prefix) for name in stored)
    renamed = {}
    for name, place in stored.items():
        if is_half and "language_model." not in name and not name.startswith("lm_head."):
            continue
        name = re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model.", name)
        name = name.removeprefix("language_model.")
        name = re.sub(r"^embed_out\.", "lm_head.", name)  # in Pythia's files
        if not has_prefix and not name.startswith("lm_head."):
            name = prefix + name
        renamed[name] = place
    return renamed


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


def check_tensors(source, layout, stored, shapes, settings="config.json", files="both"):
    """Raise UserError unless the stored tensors are those of the layout.

    settings: what describes the model. files: what to download again.
    """
    expected = stored_shapes(layout, shapes)
    for name, shape in expected.items():
        found = stored[name].shape if name in stored else "absent"
        if found != shape:
            raise UserError(
                f"{source}: {name} is {found}, where {settings} asks for {shape}: "
                f"download {files} again"
            )
    extra = [name for name in stored if name not in expected and not is_redundant(name)]
    if extra:
        raise UserError(
            f"{source}: the model has no parameter for {', '.join(extra[:3])}, so it is another "
            f"one than its {settings} says: download {files} again"
        )


def read_weights(source, layout, stored, shapes):
    """Yield (our name, tensor) for all parameters, with one tensor of the files in memory."""
    from safetensors import safe_open

    for name, held in layout.items():
        tensors = []
        for place in (stored[name] for name in (name, *held.norm_tensors)):
            with safe_open(source / place.file, framework="pt") as file:
                tensors.append(file.get_tensor(place.name))
        yield from held.split(tensors[0], shapes, tensors[1:])
