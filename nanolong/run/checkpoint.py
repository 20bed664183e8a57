"""Checkpoints, whole or absent: how the files of a step folder are written, checked and loaded.

GPT.save() and GPT.load() are what most callers want; the folders are described in folder.py.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from nanolong import tokenizer_files, validate
from nanolong.entry import entry_file, entry_hash, note_other_entry
from nanolong.errors import UserError, note
from nanolong.parallel.sharding import gather, read_part
from nanolong.run.folder import (
    damaged_steps,
    hint_other_checkpoints,
    list_steps,
    step_number,
)
from nanolong.tensor_file import (
    StoredTensor,
    TensorStream,
    read_header,
    read_tensor,
    write_tensors,
)

FORMAT = 2  # of checkpoints, in meta.json
# what values of other types or sizes than ours lead to; RecursionError is a RuntimeError
BAD_VALUES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
# what weights are stored in: safetensors' name -> torch's
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}

# -----------------------------------------------------------------------------
# Writing.


def save_model(model, folder, optim=None, dtype=torch.float32, writes=True, **meta):
    """Write a checkpoint folder.

    optim: a dict of tensors; dtype: of the weights in the file, float32 or bfloat16; meta: what
    JSON can hold. All processes call it for a model in shards, and the one that `writes` gathers
    one tensor at a time; the others only take part in that.

    meta.json also keeps what the model was loaded with, and of `config` and `train`, dataclasses,
    the names of the settings that stand at their default. Raises UserError when the folder exists.
    """
    # a tied head occurs once
    tensors = {"model": tensor_stream(dict(model.named_parameters()), dtype)}
    if optim is not None:
        tensors["optim"] = tensor_stream(optim)
    meta = {**model.meta, **meta, **settings_record("config", model.config)}
    meta["entry"] = entry_file(type(model.pos))
    # of the file that trained the weights, which may have been edited since
    meta.setdefault("entry_hash", entry_hash(type(model.pos)))
    try:
        if writes:
            write_checkpoint(folder, tensors, meta)
    finally:
        # also where the disk is full: the other processes wait for this one in every gather
        for stream in tensors.values():
            for _ in stream.pairs:
                pass


def tensor_stream(tensors, dtype=None):
    """The TensorStream of a dict; tensors in shards are gathered. dtype: None for their own."""
    like = {}
    for name, x in tensors.items():
        like[name] = torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
    return TensorStream(like, ((name, gather(x)) for name, x in tensors.items()))


def settings_record(name, settings):
    """The entries of meta.json for a settings dataclass: its values, and which are defaults."""
    values = asdict(settings)
    defaults = []
    for field in fields(settings):
        # a default may be a stand-in, such as 0 for "as many as n_head"
        try:
            default = replace(settings, **{field.name: field.default})
        except UserError:  # the default cannot stand next to the other settings
            continue
        if getattr(default, field.name) == values[field.name]:
            defaults.append(field.name)
    return {name: values, f"{name}_defaults": defaults}


def write_checkpoint(folder, tensors, meta):
    """Write into .tmp-*, sync it to disk, and publish it by one rename.

    tensors: file stem -> TensorStream. Raises UserError when the folder exists, and OSError when
    the disk is full; then nothing of it is left.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it or save elsewhere")
    tmp = folder.parent / f".tmp-{folder.name}"
    shutil.rmtree(tmp, ignore_errors=True)
    parent_existed = folder.parent.exists()
    try:
        tmp.mkdir(parents=True)
        for stem, stream in tensors.items():
            write_tensors(tmp / f"{stem}.safetensors", stream)
        for name, content in tokenizer_files.contents(meta.get("tokenizer")).items():
            (tmp / name).write_bytes(content)
        checksums = {file.name: sha256(file) for file in sorted(tmp.iterdir())}
        for name in checksums:
            sync(tmp / name)
        meta = {**meta, "format": FORMAT, "checksums": checksums, "torch": torch.__version__}
        write_meta(tmp, meta)
        os.rename(tmp, folder)
    except BaseException as error:  # also one raised while the tensors are produced
        shutil.rmtree(tmp, ignore_errors=True)
        if not parent_existed:
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        if isinstance(error, OSError) and error.filename is None:  # where the disk is full
            n_bytes = sum(x.nbytes for stream in tensors.values() for x in stream.like.values())
            newest = [f"{step} is whole" for step in list_steps(folder.parent)[-1:]]
            needed = [f"it takes {n_bytes / 1e6:,.1f} MB", *newest]
            error.filename = str(folder)
            error.strerror = f"{error.strerror}; {', and '.join(needed)}"
        raise
    sync(folder.parent)


def write_meta(folder, meta):
    """Write or replace meta.json of a checkpoint by one rename, with its own checksum in it."""
    new = Path(folder) / ".meta.json"
    meta = tokenizer_files.without_contents(meta)
    # numbers and arrays of NumPy become numbers and lists
    meta = json.loads(json.dumps(meta, allow_nan=False, default=lambda value: value.tolist()))
    meta["checksums"]["meta.json"] = checksum_of_meta(meta)
    new.write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    sync(new)
    os.replace(new, Path(folder) / "meta.json")
    sync(folder)


def checksum_of_meta(meta):
    """SHA-256 of meta.json's content without this checksum."""
    checksums = {name: value for name, value in meta["checksums"].items() if name != "meta.json"}
    text = json.dumps({**meta, "checksums": checksums}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path):
    """Have the system write a file or folder to disk."""
    if os.name == "nt" and Path(path).is_dir():
        return  # Windows cannot sync folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -----------------------------------------------------------------------------
# Reading. A file may be cut off, damaged or edited: nothing is used before it is checked.


def read_meta(folder):
    """Read meta.json: its format, its own checksum and its types are checked. Raises UserError.

    An imported tokenizer's files, which are in the folder too, become part of the result.
    """
    folder = Path(folder)
    file = folder / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        version = meta["format"]
        if version == FORMAT:
            intact = meta["checksums"]["meta.json"] == checksum_of_meta(meta)
            check_meta(meta)
    except BAD_VALUES as error:
        raise damaged(file, error) from None
    if version != FORMAT:
        raise UserError(
            f"{file} has format {version!r:.20}, and this version reads {FORMAT}: use the version "
            "of nanoLong that wrote it, or train again"
        )
    if not intact:
        raise damaged(file, "it was edited or cut off: its checksum is not the one that it holds")
    spec = meta.get("tokenizer")
    hint = hint_other_checkpoints(folder)
    meta["tokenizer"] = tokenizer_files.read(folder, spec, meta["checksums"], hint)
    replace_old_settings(meta)
    return meta


def check_meta(meta):
    """Check the types of meta.json's values, where they are there. Raises ValueError."""
    dict(meta["config"])
    str(meta["checksums"]["model.safetensors"])
    for name, value in meta.items():
        if value is None:
            continue
        fits = True
        if name in ("step", "tokens", "pretraining_tokens", "bos"):
            fits = is_count(value)
        elif name in ("dataset", "data_hash", "kernels", "parent", "launch", "entry", "entry_hash"):
            fits = isinstance(value, str)
        elif name in ("config_defaults", "train_defaults"):
            fits = all(isinstance(setting, str) for setting in value)
        elif name == "val_loss":
            fits = is_number(value)
        elif name == "tokenizer":
            fits = isinstance(value, dict)
        elif name == "best":
            step, loss = value
            fits = is_count(step) and is_number(loss)
        elif name == "scaler":
            scale, good_steps = value
            fits = is_number(scale) and scale > 0 and is_count(good_steps)
        elif name == "train" and value:
            texts = [value["dataset"], *(value.get("tasks") or [])]
            counts = [value["batch_size"], value["gradient_accumulation_steps"]]
            fits = all(isinstance(text, str) for text in texts) and all(map(is_count, counts))
            fits = fits and is_number(value["learning_rate"])
            validate.check_ranges(value)
        if not fits:
            raise ValueError(f"{name} is {value!r:.60}")


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 53


def is_count(value):
    return type(value) is int and 0 <= value < 1 << 53


def replace_old_settings(meta):
    """Write settings of older versions as those of now: passkey is one of the tasks."""
    train = meta.get("train") or {}
    if "passkey" in train:
        fraction = train.pop("passkey")
        train["tasks"] = [f"passkey:{fraction}"] if fraction else []
        defaults = meta.get("train_defaults") or []
        meta["train_defaults"] = ["tasks" if name == "passkey" else name for name in defaults]


def damaged(file, reason):
    """The UserError for a file that is damaged; reason: words, or the exception that says so."""
    if isinstance(reason, Exception) and not isinstance(reason, UserError):
        reason = f"{type(reason).__name__}: {reason}"
    return UserError(f"{file} is damaged ({reason}): {hint_other_checkpoints(file.parent)}")


def verify(file, meta):
    """Compare a file's SHA-256 with the one in meta.json. Raises UserError."""
    if not file.is_file():
        raise UserError(f"{file} is missing: {hint_other_checkpoints(file.parent)}")
    if sha256(file) != meta["checksums"].get(file.name):
        raise damaged(file, "its checksum is not the one in meta.json")


# -----------------------------------------------------------------------------
# Which checkpoint.


def find_checkpoint(path, best=False):
    """The checkpoint folder that a run folder or checkpoint folder stands for.

    Of a run folder the newest, or with best=True the one with the lowest validation loss. Raises
    UserError if there is none.
    """
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    if not path.exists() and list_steps(path.parent):
        names = ", ".join(step.name for step in list_steps(path.parent))
        raise UserError(f"there is no {path}: the steps in {path.parent} are {names}")
    found = list_steps(path)
    if not found:
        repair = "give a run folder (out/NAME) or one of its step folders"
        if not path.exists():
            out_dir = shlex.quote(str(path))
            repair = f"it does not exist; train one with python train.py --out_dir={out_dir}"
        raise UserError(f"there is no checkpoint in {path}: {repair}")
    newest = found[-1]
    for folder in damaged_steps(newest.parent):
        if step_number(folder) > step_number(newest):
            note(f"{folder} has no meta.json: {newest} is used instead")
    if not best:
        return newest
    best_step, _ = read_meta(newest).get("best") or [step_number(newest), None]
    return next((folder for folder in found if step_number(folder) == best_step), newest)


def is_elastic_restart(run):
    """Whether torchrun has restarted us, and the newest checkpoint is from the same launch."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or not list_steps(run):
        return False
    launch = read_meta(list_steps(run)[-1]).get("launch")
    return launch == os.environ.get("TORCHELASTIC_RUN_ID")


def is_resumed(model, cfg):
    """Whether training goes on from the model's checkpoint."""
    return cfg.init_from == "resume" and "step" in model.meta


def goes_on(model, cfg):
    """Whether training goes on from the step and optimizer of the checkpoint in model.folder.

    That is the run's own, or the one that extend.py extends.
    """
    return is_resumed(model, cfg) or getattr(cfg, "keep_optimizer", False)


def weights_hash(model):
    """Of the weights of the checkpoint that a model was loaded from: 16 digits, or "none"."""
    return model.meta.get("checksums", {}).get("model.safetensors", "none")[:16]


# -----------------------------------------------------------------------------
# Models.


def load_model(GPT, path, best=False, dtype=torch.float32, weights=True):
    """Do what GPT.load() promises. Raises UserError that names the file and a way out."""
    assert dtype in (None, *STORED_DTYPES.values()), "weights are float32 or bfloat16"
    model = open_model(GPT, path, best)
    load_weights(model, dtype or model.stored_dtype, "" if weights else "pos.")
    model.check_scheme()
    return model.eval()


def open_model(GPT, path, best=False):
    """Return the model of a checkpoint, checked, with its parameters on the meta device.

    All else of it is there: config, meta, folder, the tables of its position scheme, and
    stored_dtype, that of the weights in the file. Raises UserError.
    """
    folder = find_checkpoint(path, best)
    meta = read_meta(folder)
    file = folder / "meta.json"
    settings = known_settings(file, meta, "config", GPT.config_class)
    for name in ("config", "config_defaults"):
        meta.pop(name, None)
    check_scheme(file, settings, GPT.schemes, meta.pop("entry", None))
    try:
        config = validate.coerce(GPT.config_class, settings, str(file))
        validate.check_model(config, GPT.schemes)
        with torch.device("meta"):  # shapes without memory
            parameters = GPT(config).named_parameters()
        shapes = {name: tuple(p.shape) for name, p in parameters}
        if (meta.get("bos") or 0) >= config.vocab_size:
            raise ValueError(f"bos {meta['bos']} is outside the vocabulary")
    except BAD_VALUES as error:
        raise damaged(file, error) from None
    stored_dtype = check_weights(folder / "model.safetensors", meta, shapes)
    note_other_entry(GPT.schemes[config.pos], meta.get("entry_hash"), folder)
    model = build_without_weights(GPT, config)
    model.meta = meta
    model.folder = folder
    model.stored_dtype = stored_dtype
    return model


def build_without_weights(GPT, config):
    """Build a model whose parameters are on the meta device, and whose constants are not."""

    def move_to_meta(module, name, parameter):
        if parameter is None or parameter.is_meta:
            return parameter
        return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move_to_meta)
    try:
        return GPT(config)
    finally:
        hook.remove()


def known_settings(file, meta, name, cls):
    """The settings meta[name] of a checkpoint that are fields of `cls`, as this checkout has it.

    One that is no field, as on another branch, is left out if it stood at its default there, and
    else refused: it may have changed what was computed.
    """
    settings = meta.get(name) or {}
    known = {field.name for field in fields(cls)}
    changed = sorted(set(settings) - known - set(meta.get(f"{name}_defaults") or ()))
    if changed:
        values = ", ".join(f"{name}={settings[name]!r:.40}" for name in changed)
        raise UserError(
            f"{file} has {values}, which this checkout has no setting for: use the checkout that "
            "trained it"
        )
    return {name: value for name, value in settings.items() if name in known}


def saved_settings(folder, model_class, train_class):
    """The settings of a run to resume, as defaults by name: those that belong to the run itself."""
    file, meta = Path(folder) / "meta.json", read_meta(folder)
    if "method" in (meta.get("train") or {}) and not hasattr(train_class, "method"):
        raise UserError(f"{folder} was written by extend.py: resume it with extend.py")
    settings = known_settings(file, meta, "config", model_class)
    settings.update(known_settings(file, meta, "train", train_class))
    # of one command: code is never taken from a checkpoint
    for name in ("entry", "overwrite", "stop_at"):
        settings.pop(name, None)
    return settings


def check_scheme(file, settings, schemes, entry):
    """Raise UserError for a scheme or an extension method that this checkout lacks.

    entry: the file that the scheme was in, None for one of model.py.
    """
    pos, extension = settings.get("pos"), settings.get("extension")
    if not isinstance(pos, str):
        return  # refused with the other settings
    if pos not in schemes:
        repair = "use the checkout that trained it"
        if entry:
            load = f"nanolong.entry.load_entries([{entry!r}], model.POSITIONS)"
            repair = f"give --entry={shlex.quote(entry)} (in Python: {load})"
        raise UserError(
            f"{file} was trained with --pos={pos}, which this checkout lacks: {repair}, or add its "
            "class to POSITIONS in model.py"
        )
    method = extension.get("method") if isinstance(extension, dict) else None
    if isinstance(method, str) and method not in schemes[pos].methods:
        raise UserError(
            f"{file} was extended by method {method!r}, which this checkout lacks for --pos={pos}: "
            "add the method, or use the checkout that extended it"
        )


def check_weights(file, meta, shapes):
    """Verify a file of weights, and that it holds tensors of exactly these shapes.

    Returns their dtype, float32 or bfloat16.
    """
    verify(file, meta)
    hint = hint_other_checkpoints(file.parent)
    stored = stored_tensors(file)
    found = {name: tensor.shape for name, tensor in stored.items()}
    for name in {**shapes, **found}:
        if shapes.get(name) != found.get(name):
            expected = shapes.get(name, "nothing")
            raise UserError(
                f"{file} does not fit its meta.json: {name} is {found.get(name, 'absent')} where "
                f"{expected} is expected: {hint}"
            )
    dtypes = {tensor.dtype for tensor in stored.values()}
    if len(dtypes) != 1 or not dtypes <= STORED_DTYPES.keys():
        raise UserError(
            f"{file} holds {' and '.join(sorted(dtypes))} tensors, and a checkpoint holds float32 "
            f"or bfloat16 alone: {hint}"
        )
    return STORED_DTYPES[dtypes.pop()]


def stored_tensors(file):
    """The StoredTensors of a file, by name. Raises UserError for a file that is not whole."""
    from safetensors import SafetensorError

    try:
        return read_header(file)
    except SafetensorError as error:
        hint = hint_other_checkpoints(file.parent)
        raise UserError(f"{file} is not a whole safetensors file ({error}): {hint}") from None


def load_weights(model, dtype, prefix=""):
    """Replace the parameters of a model from open_model() by those of its file, one at a time.

    prefix: of the names of those to replace, where they are on the meta device.

    The weights of linear layers and embeddings become `dtype`. Norms and position schemes are
    float32: autocast has them so, and they are small.
    """
    file = model.folder / "model.safetensors"
    loaded = {}
    for name, old in model.named_parameters(remove_duplicate=False):
        if not (old.is_meta and name.startswith(prefix)):
            continue
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        is_matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        wanted = dtype if is_matrix and not name.startswith("pos.") else torch.float32
        if old not in loaded:  # a tied head is stored as the embedding
            tensor = read_tensor(file, name).to(wanted, copy=True)
            loaded[old] = torch.nn.Parameter(tensor, old.requires_grad)
        setattr(module, attribute, loaded[old])


# -----------------------------------------------------------------------------
# Optimizers.


def optimizer_tensors(model, optimizers):
    """The optimizers' state as <parameter>.<moment> -> tensor."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for moment, value in state.items():
                if torch.is_tensor(value):
                    tensors[f"{names[id(p)]}.{moment}"] = value.detach()
    return tensors


def load_optimizers(model, optimizers, file):
    """Put the tensors of optim.safetensors back. Raises UserError when they do not fit."""
    stored = stored_tensors(file)
    names = {id(p): name for name, p in model.named_parameters()}
    places = {}  # key in the file -> (optimizer, parameter, moment, a tensor of its shape)
    for optimizer in optimizers:
        is_muon = isinstance(optimizer, torch.optim.Muon)
        moments = ["momentum_buffer"] if is_muon else ["exp_avg", "exp_avg_sq", "step"]
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for moment in moments:
                like = torch.empty((), device=p.device) if moment == "step" else p
                places[f"{names[id(p)]}.{moment}"] = (optimizer, p, moment, like)

    wrong = []
    for key, tensor in sorted(stored.items()):
        if key not in places or tensor != StoredTensor("F32", tuple(places[key][-1].shape)):
            wrong.append(f"holds {key}")
    if stored:  # before the first step an optimizer keeps nothing
        wrong += [f"lacks {key}" for key in sorted(places.keys() - stored.keys())]
    if wrong:
        raise UserError(
            f"{file} {wrong[0]}, which is not what this optimizer keeps: resume with the optimizer "
            "that the run was started with"
        )
    for key in stored:
        optimizer, p, moment, like = places[key]
        optimizer.state[p][moment] = read_part(file, key, like)
