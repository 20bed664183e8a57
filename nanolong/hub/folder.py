"""Folders of Hugging Face: found or downloaded, read, and written. No pickle and no code is run."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig

from nanolong.errors import UserError, require
from nanolong.hub.families import FAMILIES
from nanolong.hub.rope import KEYS, by_kind
from nanolong.hub.verify import as_user_error
from nanolong.tokenizer_files import FILES

MAX_JSON_BYTES = 1 << 28
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# no folder below the first, and no second copy of the weights, as Mistral's have
DOWNLOADED = ["*.json", "*.jinja", "*.safetensors", *FILES]
NOT_DOWNLOADED = ["*/*", "consolidated*"]
MAX_FILE_SIZE = "5GB"  # larger weights are written to several files, as transformers does


class Source(NamedTuple):
    """A model as it is read: transformers' config, and its tensors by name."""

    c: object
    tensors: dict
    lengths: tuple = ()  # context lengths in tokens that other files and fields say
    notes: tuple = ()  # for the user
    metadata: dict = {}  # of a GGUF file
    added: tuple = ()  # names of the tensors that the file has not, and transformers wants


def find_folder(source):
    """Return a folder, which is downloaded if it is ORG/NAME on Hugging Face's hub."""
    if Path(source).is_dir():
        return Path(source)
    name = source.removeprefix("hf://")
    require(
        re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."),
        f"there is no folder or file {source}: give a folder, a file, or ORG/NAME, the name of a "
        "model on huggingface.co",
    )
    from huggingface_hub import snapshot_download

    try:
        patterns = {"allow_patterns": DOWNLOADED, "ignore_patterns": NOT_DOWNLOADED}
        return Path(snapshot_download(name, **patterns))
    # it raises its own errors, and those of the network, of many kinds
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"there is no folder {source}, and it cannot be downloaded from huggingface.co "
            f"({type(error).__name__}: {reason}): give a folder that is here, or ORG/NAME of a "
            "model; for one that asks for your consent, set HF_TOKEN"
        ) from None


# -----------------------------------------------------------------------------
# Reading


def read_folder(folder):
    """Return the Source of a folder. Raises UserError for what is damaged or has no equivalent."""
    require(
        not (folder / "adapter_config.json").exists(),
        f"{folder} holds an adapter (LoRA), which is a change of another model: merge it into that "
        "model where you made it, and give the result",
    )
    values = read_json(folder / "config.json", "give the folder of a Hugging Face checkpoint")
    text = values.get("text_config")
    text = text if isinstance(text, dict) else values
    require(
        not values.get("quantization_config") and not text.get("quantization_config"),
        f"{folder} is quantized, and weights are read in float32, float16 or bfloat16: download "
        "the checkpoint that it was made from",
    )
    check_model_type(folder, text.get("model_type"))
    with as_user_error(folder / "config.json"):
        c = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with as_user_error(folder):
        c, tensors = text_half(c, read_tensors(folder))
        # checked first: an absurd number of layers takes long to build even without memory
        require(
            c.num_hidden_layers <= len(tensors),
            f"{folder / 'config.json'} says {c.num_hidden_layers} layers, and there are "
            f"{len(tensors)} tensors: download both again",
        )
    names = ("max_sequence_length", "model_max_length", "tokenizer_model_max_length")
    lengths = [text.get(name) for name in names]
    if (folder / "tokenizer_config.json").is_file():
        lengths.append(read_json(folder / "tokenizer_config.json").get("model_max_length"))
    lengths = tuple(int(x) for x in lengths if type(x) in (int, float) and 0 < x < 1 << 30)
    return Source(c, tensors, lengths, fields_not_read(text, c))


def check_model_type(source, model_type):
    require(
        model_type in FAMILIES,
        f"{source} is a model of the type {model_type!r}, which is not one of: "
        f"{', '.join(FAMILIES)}",
    )


def read_json(file, remedy="download it again"):
    """Read a JSON object. Raises UserError, also for a file that is unreasonably large."""
    require(file.is_file(), f"there is no {file}: {remedy}")
    size = file.stat().st_size
    require(size <= MAX_JSON_BYTES, f"{file} is larger than 256 MB: {remedy}")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON ({error}): download it again") from None
    require(isinstance(values, dict), f"{file} holds no JSON object: download it again")
    return values


def fields_not_read(values, c):
    """Return a note that names what is said of RoPE and attention and not read, as a tuple."""
    known = type(c)().to_dict().keys() | c.attribute_map.keys() | KNOWN_FIELDS
    names = [name for name, x in values.items() if x and name not in known]
    names = [name for name in names if re.search("rope|rotary|attn|attention|window|softcap", name)]
    for field in ("rope_scaling", "rope_parameters"):
        for kind in by_kind(values.get(field)):
            names += [f"{field}.{name}" for name in kind if name not in KEYS]
    names = [str(name) for name in dict.fromkeys(names) if not str(name).endswith("truncate")]
    return (f"not read: {', '.join(names)}",) if names else ()


# of RoPE and attention: older names that are read, and what only says how it is computed
KNOWN_FIELDS = {
    *("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct"),
    *("rotary_emb_base", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
    *("_attn_implementation", "attn_implementation", "_flash_attn_2_enabled", "attention_dropout"),
    *("_attn_implementation_internal", "_attn_implementation_autoset", "no_rope_layer_interval"),
}


def read_tensors(folder):
    """Return the tensors of a folder, name -> tensor, which are in their files until they are used.

    Raises UserError for files that are not whole, or lead out of the folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    file_of = {}
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file():
        file_of = read_index(index)
        files = sorted(set(file_of.values()))
    tensors = {}
    for file in files:
        try:
            part = load_file(folder / file)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{folder / file} is not a whole safetensors file ({error}): download it again"
            ) from None
        absent = [name for name, x in file_of.items() if x == file and name not in part]
        require(
            not absent,
            f"{index} says that {', '.join(absent[:3])} is in {file}, and it is not: download both "
            "again",
        )
        for name, x in part.items():
            require(
                x.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64),
                f"{folder / file}: {name} is of dtype {x.dtype}, and weights are read in float32, "
                "float16 or bfloat16: download the checkpoint that is not quantized",
            )
        tensors |= part
    return tensors


def read_index(index):
    """Return which file of a folder holds each tensor: name -> file name."""
    folder = index.parent
    if not index.is_file():
        names = sorted(file.name for file in folder.iterdir())
        shards = [name for name in names if name.endswith(".safetensors")]
        pickles = [name for name in names if name.endswith(PICKLES)]
        reason = f"there is no model.safetensors in {folder}: download it"
        if shards:
            reason = f"{folder} has {shards[0]} but no {index.name}, the index of its files"
            reason += ": download that too"
        elif pickles:
            reason = f"{folder} has {pickles[0]}, a pickle, which can run any program, and no "
            reason += "model.safetensors: let transformers load and save the model where you "
            reason += "trust it"
        raise UserError(reason)
    file_of = read_json(index).get("weight_map")
    is_map = isinstance(file_of, dict) and all(isinstance(x, str) for x in file_of.values())
    require(is_map, f"{index} has no weight_map of names to files: download it again")
    for file in set(file_of.values()):
        is_plain = Path(file).name == file and "\\" not in file and not file.startswith(".")
        require(
            is_plain and file.endswith(".safetensors"),
            f"{index} names {file!r}, which is no safetensors file of this folder: download the "
            "checkpoint from a source that you trust",
        )
    return file_of


def text_half(c, tensors):
    """Return the config and tensors of the text half of a model of images and text."""
    text = c.get_text_config()
    if text is c:
        return c, tensors
    found = {}
    for name, x in tensors.items():
        if "language_model." in name or name.startswith("lm_head."):
            name = re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model.", name)
            found[name.removeprefix("language_model.")] = x
    if "lm_head.weight" not in found and c.tie_word_embeddings:
        text.tie_word_embeddings = True
    return text, found


# -----------------------------------------------------------------------------
# Writing


def write_folder(folder, theirs, ids):
    """Write transformers' model to an empty folder; ids: of special tokens, for its config."""
    for name, i in ids.items():
        setattr(theirs.config, name, i)
    theirs.save_pretrained(folder, max_shard_size=MAX_FILE_SIZE)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "config.json"
    values = add_older_fields(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def add_older_fields(values):
    """Return the fields of a config.json, with RoPE's of transformers 4, which mlx-lm reads."""
    rope = values.get("rope_parameters") or {}
    full = by_kind(rope)[0]
    outside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    older = {key: full[key] for key in outside if key in full}
    if values["model_type"] == "gpt_neox":
        older |= {
            "rotary_emb_base": full["rope_theta"],
            "rotary_pct": full["partial_rotary_factor"],
        }
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    is_scaled = full.get("rope_type", "default") != "default"
    older["rope_scaling"] = {"type": full["rope_type"], **full} if is_scaled else None
    return values | older | {"torch_dtype": values.get("dtype")}


def whole(target, write):
    """Let write() fill a folder or file that appears when all is written, or not at all.

    write: takes the path to write to.
    """
    require(
        not target.exists() or (target.is_dir() and not any(target.iterdir())),
        f"{target} exists already: remove it, or choose another",
    )
    part = target.parent / f".tmp-{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(part)
        if target.exists():
            target.rmdir()
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
