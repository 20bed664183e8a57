"""Folders of Hugging Face: found or downloaded, read, and written. No pickle and no code is run."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from nanolong.errors import UserError, require
from nanolong.hub.families import FAMILIES, NOT_READ
from nanolong.hub.rope import by_kind
from nanolong.hub.verify import as_user_error
from nanolong.run import sync
from nanolong.strict_json import write_json
from nanolong.tokenizer_files import FILES

# no folder below the first, and no second copy of the weights, as Mistral's have
DOWNLOADED = ["*.json", "*.jinja", "*.safetensors", *FILES]
NOT_DOWNLOADED = ["*/*", "consolidated*"]
# the defaults of sampling in generation_config.json
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
WEIGHTS = (".safetensors", ".bin", ".gguf")
MAX_COPIED_BYTES = 10_000_000  # larger files are linked, as weights are
MAX_FILE_SIZE = "5GB"  # larger weights are written to several files, as transformers does


class Source(NamedTuple):
    """A model as it is read: transformers' config, and its tensors by name."""

    c: object
    tensors: dict
    metadata: dict = {}  # metadata of a GGUF file


def find_folder(source):
    """Return a folder, which is downloaded if it is ORG/NAME on Hugging Face's hub."""
    if Path(source).is_dir():
        return Path(source)
    name = source.removeprefix("hf://")
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
    require(
        is_name and not name.endswith((".gguf", ".pt")),
        f"there is no folder or file {source}: give a folder, a file, or ORG/NAME, the name of a "
        "model on huggingface.co",
    )
    from huggingface_hub import snapshot_download

    # it raises errors of its own and of the network, of many kinds
    with as_user_error(f"there is no folder {source}, and {name} of huggingface.co"):
        return Path(
            snapshot_download(name, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED)
        )


# -----------------------------------------------------------------------------
# Reading


def check_folder(folder):
    """Raise UserError unless a folder is one of a whole model."""
    require(
        not (folder / "adapter_config.json").exists(),
        f"{folder} holds an adapter (LoRA), which is a change of another model: merge it into that "
        "model where you made it, and give the result",
    )
    if not any(folder.glob("*.safetensors")):
        for file in sorted(folder.glob("*.gguf")):
            raise UserError(f"{folder} holds a GGUF file and no safetensors: give {file}")
    has_config = (folder / "config.json").is_file()
    require(has_config, f"{folder} has no config.json: give the folder of a checkpoint")


def read_folder(folder):
    """Return the Source of a folder. Raises UserError if it is damaged or has no equivalent."""
    check_folder(folder)
    with as_user_error(folder / "config.json"):
        values, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        model_type = values.get("text_config", values).get("model_type")
        reason = NOT_READ.get(model_type)
        problem = f"its model_type {model_type!r} is not read, because {reason}"
        require(not reason, f"{problem}: choose another model, such as a Qwen 3")
        require(
            model_type in FAMILIES,
            f"its model_type {model_type!r} is not one of: {', '.join(FAMILIES)}",
        )
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        c = whole.get_text_config()
    require(
        not getattr(whole, "quantization_config", None),
        f"{folder} is quantized, and weights are read in float32, float16 or bfloat16: download "
        "the checkpoint that it was made from",
    )
    with as_user_error(folder):
        tensors = read_tensors(folder)
        if c is not whole:
            tensors = text_half(whole, tensors)
        file = folder / "tokenizer_config.json"
        if file.is_file():  # some say the extended length nowhere else
            settings = json.loads(file.read_text(encoding="utf-8"))
            c.length_of_tokenizer = settings.get("model_max_length")
    return Source(c, tensors)


def read_tensors(folder):
    """Return the tensors of a folder, name -> tensor, which are in their files until they are used.

    No file says where they are: all model*.safetensors are read, unless one has them all.
    """
    file = folder / "model.safetensors"
    files = [file] if file.is_file() else sorted(folder.glob("model*.safetensors"))
    require(
        files,
        "there is no model.safetensors (a pickle, such as pytorch_model.bin, is not read, because "
        "it can run any program): download it, or let transformers load and save the model where "
        "you trust it",
    )
    # such as model-00001-of-00002.safetensors
    total = re.search(r"-of-(\d+)\.safetensors$", files[-1].name)
    n_files = int(total[1]) if total else len(files)
    problem = f"{len(files)} of the {n_files} files of weights are there"
    remedy = "download the others"
    require(len(files) == n_files, f"{problem}, {files[-1].name} the last of them: {remedy}")
    tensors = {}
    for file in files:
        with as_user_error(file):
            part = load_file(file)
        twice = sorted(tensors.keys() & part.keys())[:3]
        require(not twice, f"{file} has {', '.join(twice)} of another file: remove one of them")
        tensors |= part
    return tensors


def text_half(whole, tensors):
    """Return the tensors of the text half of a model of images and text; whole: its config."""
    found = {}
    for name, x in tensors.items():
        if "language_model." in name or name.startswith("lm_head."):
            name = re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model.", name)
            found[name.removeprefix("language_model.")] = x
    if "lm_head.weight" not in found and whole.tie_word_embeddings:
        whole.get_text_config().tie_word_embeddings = True
    return found


# -----------------------------------------------------------------------------
# Writing


def write_folder(folder, theirs, tokenizer):
    """Write transformers' model and the files of a tokenizer, or None, to a new folder."""
    folder.mkdir()
    for name, content in tokenizer.files.items() if tokenizer else ():
        (folder / name).write_bytes(content)
    theirs.save_pretrained(folder, max_shard_size=MAX_FILE_SIZE)
    file = folder / "config.json"
    values = add_older_fields(json.loads(file.read_text(encoding="utf-8")))
    write_json(file, values, indent=2)
    ids = {name: values.get(name) for name in ("bos_token_id", "eos_token_id")}
    generation = tokenizer.read_json("generation_config.json") if tokenizer else {}
    sampling = {name: generation[name] for name in SAMPLING if name in generation}
    write_json(folder / "generation_config.json", sampling | ids, indent=2)
    for weights in folder.glob("*.safetensors"):  # which else only their owner can read
        shutil.copymode(file, weights)


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


def check_absent(target):
    """Refuse a path to write to that holds anything."""
    require(
        not target.exists() or (target.is_dir() and not any(target.iterdir())),
        f"{target} exists already: remove it, or choose another",
    )


def whole(target, write):
    """Let write() fill a folder or file that appears when all is written, or not at all.

    write: takes the path to write to. Files that it writes beside the path appear too.
    """
    check_absent(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target.parent) as tmp:
        part = Path(tmp) / target.name
        write(part)
        written = sorted(Path(tmp).iterdir(), key=lambda file: file == part)
        for file in (*part.glob("*"), *written):
            sync(file)
        if target.exists():
            target.rmdir()
        for file in written:
            os.rename(file, target.parent / file.name)


def place_file(file, target):
    """Link weights and large files by their real path, or copy them; copy any other file."""
    real = Path(file).resolve()
    if str(file).endswith(WEIGHTS) or real.stat().st_size > MAX_COPIED_BYTES:
        try:
            os.link(real, target)
            return
        except OSError:  # another disk, or one without links
            pass
    shutil.copy(real, target)
