"""The folder of a run: checkpoints that are whole or absent, a log, a lock, and stop signals.

out/rope/step-000500/model.safetensors   weights, a tied head stored once
out/rope/step-000500/optim.safetensors   the optimizers' state, <parameter>.<moment>
out/rope/step-000500/meta.json           settings, step, data, checksums: the fields of Meta
out/rope/log.jsonl                       a line for each logged step and each evaluation
out/.rope.lock                           names the process that writes to the folder

Only the first of several processes writes. GPT.save() and GPT.load() are what most callers
want.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from nanolong import entry, parallel
from nanolong.errors import UserError, require
from nanolong.strict_json import from_json, replace_text, to_json

FORMAT = 8  # format of checkpoints, in meta.json
# older formats, and the last commit that reads each
READ_BY = {7: "d5462f6", 6: "5436555", 5: "b046c6d", 4: "b046c6d"}
# Settings that a resumed run does not take over, and their defaults.
NOT_RESUMED = {"stop_at": 0, "overwrite": False, "entry": (), "text": "", "out_dir": ""}

# -----------------------------------------------------------------------------
# Writing a checkpoint.


@dataclass
class Meta:
    """The keys of meta.json. A model that was not trained here has the defaults."""

    config: dict  # settings of the model, a GPTConfig
    train: dict = field(default_factory=dict)  # settings of training, a TrainConfig or ExtendConfig
    # how far training is
    step: int = 0
    sequences: int = 0  # seen in training, by the length of its last sequences
    tokens: int = 0  # seen in training, without pretraining_tokens
    loss_scale: float = 1.0  # float16 only
    good_steps: int = 0  # float16 only: steps since the last overflow
    kernels: str = ""  # implementation of attention, in words
    optimizer_numbers: list = field(default_factory=list)  # keys in optim.safetensors
    # the text
    dataset: str | None = None  # its name, or a mixture as of --dataset
    data_hash: str | None = None
    tokenizer: dict | None = None
    bos: int | None = None  # the token that starts every text
    ends: list = field(default_factory=list)  # the tokens that end a text
    tasks: list = field(default_factory=list)  # kinds of data/tasks.py that it was trained on
    # where the weights came from
    parent: str | None = None  # the checkpoint that was extended, or whose weights training took
    pretraining_tokens: int = 0  # seen before the model was extended
    family: str | None = None  # model_type of transformers
    imported: str | None = None  # the name of the file or folder
    # this checkpoint
    format: int = FORMAT
    torch: str = ""  # the version
    commit: str = ""
    checksums: dict = field(default_factory=dict)  # file -> SHA-256


def save_step(model, optimizers, cfg, dataset, **state):
    """Write a checkpoint of training, in the first process, and remove older checkpoints.

    Processes wait for each other. cfg: a TrainConfig. dataset: a Dataset. state: step, tokens and
    what else is to be restored.
    """
    moments, numbers = optimizer_state(model, optimizers)
    tensors = {"model": model.weights(), "optim": {**parameters_not_stored(model), **moments}}
    if parallel.rank_and_world()[0] == 0:
        save_model(
            model,
            Path(cfg.out_dir) / f"step-{state['step']:06d}",
            tensors=tensors,
            **state,
            train=asdict(cfg),
            dataset=cfg.dataset,
            data_hash=dataset.hash,
            optimizer_numbers=numbers,
        )
        prune(cfg.out_dir)
    parallel.barrier()


def save_model(model, folder, dtype=torch.float32, tensors=None, **meta):
    """Write a checkpoint folder. Raises UserError if it exists or cannot be written.

    dtype: dtype of the weights in the file, float32 or bfloat16. tensors: file stem -> {name:
    tensor}, by default model.weights() as model.safetensors. meta: fields of Meta, in front of
    model.meta, the fields that the model was loaded with.
    """
    tensors = {"model": model.weights(), **(tensors or {})}
    tensors["model"] = {name: x.to(dtype) for name, x in tensors["model"].items()}
    meta = {**model.meta, **meta, "config": asdict(model.config)}
    write_checkpoint(folder, tensors, meta)


def write_checkpoint(folder, tensors, meta):
    """Write into .tmp-*, sync it to disk, and publish it by one rename.

    tensors: file stem -> {name: tensor}. meta: fields of Meta by name. Whenever the process ends,
    the folder is whole or absent.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    require(not folder.exists(), f"{folder} exists already: remove it, or save elsewhere")
    tmp = folder.parent / f".tmp-{folder.name}"
    shutil.rmtree(tmp, ignore_errors=True)
    written_by = {"format": FORMAT, "torch": torch.__version__, "commit": current_commit()}
    meta = vars(Meta(**{**meta, **written_by, "checksums": {}}))
    try:
        tmp.mkdir(parents=True)
        for stem, part in tensors.items():
            file = tmp / f"{stem}.safetensors"
            save_file({name: x.contiguous() for name, x in part.items()}, file)
            meta["checksums"][file.name] = sha256(file)
            sync(file)
        meta["checksums"]["meta.json"] = checksum_of_meta(meta)
        (tmp / "meta.json").write_text(to_json(meta, indent=1) + "\n", encoding="utf-8")
        for stem in tensors:  # safetensors lets nobody else read its files
            shutil.copymode(tmp / "meta.json", tmp / f"{stem}.safetensors")
        sync(tmp / "meta.json")
        sync(tmp)
        os.rename(tmp, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:  # a full disk
        newest = [f"; {step} is whole" for step in list_steps(folder.parent)[-1:]]
        raise UserError(
            f"{folder} cannot be written ({error}){''.join(newest)}: free space, or choose another "
            "folder"
        ) from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def checksum_of_meta(meta):
    """SHA-256 of meta.json's content without this checksum."""
    checksums = {name: value for name, value in meta["checksums"].items() if name != "meta.json"}
    text = to_json({**meta, "checksums": checksums}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path):
    """Have the system write a file or folder to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot sync folders
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def current_commit():
    """The commit of the checkout, and whether its code has changed since."""
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no", "--", "*.py"):
        commit += " with changes"
    return commit


def git(*words):
    """The output of a git command in the project's folder, or "" if it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=entry.ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


# -----------------------------------------------------------------------------
# Reading a checkpoint.


def list_steps(run):
    """The checkpoints of a run folder, oldest first."""
    found = [step for step in Path(run).glob("step-*") if step.is_dir()]
    return sorted((step for step in found if step.name[5:].isdecimal()), key=step_number)


def step_number(folder):
    return int(folder.name[5:])


def find_checkpoint(path, best=False):
    """The checkpoint that a run folder or a checkpoint folder stands for.

    In a run folder it is the newest, or with best=True the lowest in validation loss.
    Raises UserError if there is none.
    """
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    steps = list_steps(path)
    remedy = "give a run folder (out/NAME) or one of its steps, or train one by python train.py"
    require(steps, f"there is no checkpoint in {path}: {remedy}")
    by_loss = {row["step"]: row["val_loss"] for row in read_log(path) if "val_loss" in row}
    evaluated = [step for step in steps if step_number(step) in by_loss]
    if best and evaluated:
        return min(evaluated, key=lambda step: by_loss[step_number(step)])
    return steps[-1]


def latest_run(root="out"):
    """Return the run folder below root with the newest checkpoint, or None, but never an .oldN."""
    metas = [
        meta
        for meta in Path(root).glob("**/step-*/meta.json")
        if not re.search(r"\.old\d+$", meta.parent.parent.name)
    ]
    newest = max(metas, key=lambda meta: meta.stat().st_mtime, default=None)
    return newest and newest.parent.parent


def read_meta(folder):
    """Read meta.json of a checkpoint, whose checksum is in it. Raises UserError."""
    file = Path(folder) / "meta.json"
    try:
        meta = from_json(file.read_text(encoding="utf-8"))
        problem = f"{folder} is a dataset, and no checkpoint"
        require("vocab_size" not in meta, f"{problem}: give a run folder")
        version = meta["format"]
        reader = "the version that wrote it"
        if version in READ_BY:
            reader = f"commit {READ_BY[version]}, the last that reads it"
        problem = f"{file} has format {version!r:.20}, and this version reads {FORMAT}"
        require(version == FORMAT, f"{problem}: use {reader}, or train again")
        if meta["checksums"]["meta.json"] == checksum_of_meta(meta):
            return meta
        reason = "it was edited or cut off: its checksum is not the one that it holds"
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = error
    raise damaged(file, reason)


def read_tensors(folder, stem, meta):
    """Read a file of a checkpoint, after its checksum: {name: tensor}. Raises UserError."""
    from safetensors.torch import load_file

    file = Path(folder) / f"{stem}.safetensors"
    if not file.is_file():
        raise damaged(file, "it is missing")
    if sha256(file) != meta["checksums"].get(file.name):
        raise damaged(file, "its checksum is not the one in meta.json")
    return load_file(file)


def damaged(file, reason):
    """The UserError for a file of a checkpoint that is damaged, with a way to go on."""
    folder = file.parent
    remedy = "no earlier checkpoint is left, so train again"
    for step in list_steps(folder.parent):
        if step.name < folder.name:
            remedy = f"use the one before it, {step} (to resume from there, move this one away)"
    return UserError(f"{file} is damaged ({reason}): {remedy}")


def settings_to_resume(given, out_dir):
    """The settings of the newest checkpoint in out_dir, if a run is to be resumed, else {}.

    given: settings by name. init_from=auto becomes resume if there is a checkpoint, else scratch.
    Raises UserError if there is none to resume, or it was not written by training.
    """
    steps = list_steps(out_dir)
    if given.get("init_from") == "auto":
        given["init_from"] = "resume" if steps else "scratch"
    if given.get("init_from") != "resume":
        return {}
    advice = "leave --init_from out, or give the --out_dir of the run"
    require(steps, f"there is no checkpoint in {out_dir} to resume: {advice}")
    meta = read_meta(steps[-1])
    require(meta["train"], f"{steps[-1]} was not written by training: give another --out_dir")
    return {**meta["config"], **meta["train"], **NOT_RESUMED}


def take_over(model, *more):
    """What a run takes over from the checkpoint of its parent, as meta of a new run."""
    names = ("tokenizer", "bos", "ends", "tasks", "family", *more)
    return {"parent": str(model.folder), **{name: model.meta.get(name) for name in names}}


def changed_settings(saved, asked, names):
    """Return the settings that differ: name -> [old, new]. Names that `asked` lacks are skipped."""
    # As in JSON, because a tuple is saved as a list.
    saved, asked = (from_json(to_json(values)) for values in (saved, asked))
    pairs = {name: [saved[name], asked[name]] for name in sorted(asked.keys() & names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_settings(folder, saved, asked, names):
    """Refuse settings that a checkpoint has otherwise, with arguments of changed_settings()."""
    for name, (old, new) in changed_settings(saved, asked, names).items():
        raise UserError(f"{folder} was made with {name}={old}, not {new}: leave --{name} out")


def check_unused(folder):
    """Refuse to write over a run."""
    repairs = "give --init_from=resume, --overwrite or another --out_dir"
    require(not list_steps(folder), f"{folder} holds a run already: {repairs}")


def check_same(model, cfg, dataset):
    """Raise UserError if processes have other code, data, weights or settings, or if a run would be
    resumed on other data.
    """
    is_loaded = cfg.init_from == "scratch" or hasattr(model, "folder")
    problem = f"init_from={cfg.init_from!r}, and the model was not loaded from a checkpoint"
    require(is_loaded, f"{problem}: pass GPT.load(FOLDER) to train(), or leave init_from out")
    same = not cfg.resumes or model.meta["data_hash"] in (None, dataset.hash)
    problem = f"{cfg.dataset or type(dataset).__name__} is not the data of {cfg.out_dir}"
    require(same, f"{problem}: give that, or --init_from=RUN")
    local = {"dataset", "device", "entry", "out_dir"}  # machines may have them elsewhere
    settings = {**asdict(model.config), **asdict(cfg), "torch": torch.__version__}
    shared = [value for name, value in settings.items() if name not in local]
    parallel.check_same((entry.hash_sources(cfg.entry), dataset.hash, weights_hash(model), shared))


def load_model(GPT, path, best=False, dtype=torch.float32, weights=True):
    """Implement GPT.load(). Raises UserError that names the file and a way out."""
    folder = find_checkpoint(path, best)
    meta = read_meta(folder)
    settings = meta.pop("config")
    unknown = settings.keys() - vars(GPT.config_class()).keys()
    require(
        not unknown,
        f"{folder} has the settings {', '.join(sorted(unknown))}, which this version lacks: use "
        "the version that trained it",
    )
    pos = settings["pos"]
    entries = meta["train"].get("entry", ())
    # a scheme has the name of its file
    entry_file = next((file for file in entries if Path(file).stem == pos), "FILE.py")
    require(
        pos in GPT.schemes,
        f"{folder} was trained with --pos={pos}, which is not in model.py: give "
        f"--entry={shlex.quote(entry_file)}",
    )
    model = parallel.build_without_weights(GPT, GPT.config_class(**settings))
    model.meta = meta
    model.folder = folder
    if weights:
        load_weights(model, read_tensors(folder, "model", meta), dtype)
    return model.eval()


def load_weights(model, tensors, dtype):
    """Make these tensors the parameters of a model that was built without weights.

    dtype: dtype of linear layers and embeddings (None: as stored). Norms and position
    schemes are float32: autocast has them so, and they are small.
    """
    model.stored_dtype = tensors["embed.weight"].dtype
    for name, x in tensors.items():
        module = model.get_submodule(name.rpartition(".")[0])
        is_matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        is_matrix = is_matrix and not name.startswith("scheme.")
        tensors[name] = x.to((dtype or x.dtype) if is_matrix else torch.float32)
    if model.config.tie_embeddings:
        tensors["head.weight"] = tensors["embed.weight"]
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # other names or shapes than the settings say
        raise damaged(model.folder / "model.safetensors", error) from None
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    entry.check_scheme(model)


def optimizer_state(model, optimizers):
    """Whatever optimizers keep in state[parameter], as tensors, and which of them are numbers.

    Returns ({<parameter>.<moment>: tensor}, the keys of Python's numbers). Raises UserError for
    anything else.
    """
    names = {p: name for name, p in model.named_parameters()}
    tensors, numbers = {}, []
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for moment, x in state.items():
                is_held = p in names and isinstance(x, torch.Tensor | int | float)
                problem = f"a checkpoint cannot hold {moment!r} of {type(optimizer).__name__}"
                require(is_held, f"{problem}: keep tensors and numbers in state[parameter]")
                key = f"{names[p]}.{moment}"
                if not torch.is_tensor(x):
                    numbers.append(key)
                    x = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
                tensors[key] = x.detach()
    return tensors, sorted(numbers)


def parameters_not_stored(model):
    """The parameters that model.weights() lacks, such as the factors of LoRA: {name: tensor}."""
    stored = model.weights()
    return {name: p.detach() for name, p in model.named_parameters() if name not in stored}


def load_optimizers(model, optimizers, settings):
    """Restore the state in optim.safetensors of the checkpoint that the model was loaded from.

    settings: settings of training by name. Raises UserError if the state is another optimizer's.
    """
    folder = model.folder
    meta = read_meta(folder)
    tensors = read_tensors(folder, "optim", meta)
    for name, p in parameters_not_stored(model).items():
        if name in tensors:  # an extension that was not trained has none
            p.copy_(tensors.pop(name))
    if not tensors:  # before the first step there is no state
        return
    check_settings(folder, meta["train"], settings, ["optimizer"])
    parameters = dict(model.named_parameters())
    owners = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for key, x in tensors.items():
        name, _, moment = key.rpartition(".")
        p = parameters.get(name)
        require(p in owners, f"{folder} has {key}, which is not trained here: use the same code")
        is_number = key in meta["optimizer_numbers"]
        owners[p].state[p][moment] = x.item() if is_number else x.to(p.device)


def weights_hash(model):
    """Return 16 digits of the weights' checksum, or "none" for a model that was not loaded."""
    return model.meta.get("checksums", {}).get("model.safetensors", "none")[:16]


# -----------------------------------------------------------------------------
# The folder that a run writes to.


@contextlib.contextmanager
def lock(folder):
    """A context in which only this process may write to a run folder, in the first process.

    The lock ends with the process, however the process ends. Entering it twice is entering it once.
    """
    from filelock import FileLock, Timeout

    if parallel.rank_and_world()[0]:
        yield
        return
    require(folder, "the run has no folder: give out_dir, as out_dir='out/NAME'")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f".{folder.name}.lock"
    try:
        held = FileLock(file.absolute(), timeout=0, is_singleton=True).acquire()
    except Timeout:
        advice = "choose another --out_dir, or fix its permissions or the disk"
        require(file.exists(), f"nothing can be written to {folder.parent}: {advice}")
        owner = "another process"
        with contextlib.suppress(OSError):  # Windows reads no file that is locked
            owner = file.read_text(encoding="utf-8")
        raise UserError(
            f"{owner} writes to {folder}: wait for it, or choose another --out_dir (if it does not "
            f"run any more, remove {file})"
        ) from None
    with held:
        with contextlib.suppress(OSError):  # and it writes no lock
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            yield
        finally:
            if not folder.exists():  # nothing was written
                with contextlib.suppress(OSError):
                    file.unlink()


def move_aside(folder):
    """Rename a run folder, if it holds a run, to NAME.old1, NAME.old2, ...: nothing is removed."""
    if parallel.rank_and_world()[0] or not list_steps(folder):
        return
    folder = Path(folder)
    names = (folder.with_name(f"{folder.name}.old{n}") for n in itertools.count(1))
    new = next(name for name in names if not name.exists())
    os.rename(folder, new)
    print(f"the run in {folder} is {new} now")


class Log:
    """The log of a run, in the first process: log.jsonl, and optionally Weights & Biases.

    step: step of the checkpoint that training goes on from. Rows past it are dropped, so that the
    log agrees with the weights, and so is what a crash has left of a checkpoint.
    """

    def __init__(self, folder, step=None, wandb="", settings=None):
        self.wandb = None
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        rows = read_log(folder) if step is not None else []
        kept = "".join(to_json(row) + "\n" for row in rows if row["step"] <= step)
        file = self.folder / "log.jsonl"
        replace_text(file, kept)
        # unbuffered: a row that a full disk has refused would be written again on closing
        self.file = open(file, "ab", buffering=0)
        if wandb:
            import wandb as package

            self.wandb = package.init(project=wandb, name=self.folder.name, config=settings)

    def write(self, step, **row):
        """Append a row."""
        self.file.write((to_json({"step": step, **row}) + "\n").encode())
        if self.wandb:
            self.wandb.log(row, step=step)

    def close(self):
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def read_log(run):
    """The rows of a run's log.jsonl, without a line that a crash has cut off."""
    file = Path(run) / "log.jsonl"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def is_evaluated(run, step):
    """Whether the log has the validation loss of a step."""
    return any(row["step"] == step and "val_loss" in row for row in read_log(run))


def is_finished(model, folder, last_step):
    """Whether the run of a loaded model has taken its last step, and evaluated it."""
    step = model.meta["step"]
    return last_step and step >= last_step and is_evaluated(folder, step)


def prune(run):
    """Keep the last two checkpoints, and the best that was logged. Removes all the rest."""
    steps = list_steps(run)
    for old in steps[:-2]:
        if old != find_checkpoint(run, best=True):
            # renamed first: a checkpoint that is removed in part must not look whole
            tmp = old.with_name(f".tmp-{old.name}")
            os.rename(old, tmp)
            shutil.rmtree(tmp, ignore_errors=True)


# -----------------------------------------------------------------------------
# Stop signals.


# A terminal, a shell or a batch system sends these signals. Windows lacks the last two.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopSignals:
    """A context in which STOP_SIGNALS are noted. It is true once a signal has come.

    A second signal, more than a second later, ends the process as ever: with torchrun each process
    gets Ctrl-C twice, from the terminal and from torchrun. Only the main thread gets signals. A
    signal that is ignored, as SIGHUP under nohup, stays ignored.
    """

    def __init__(self):
        self.time = math.inf
        self.previous = {}

    def __bool__(self):
        return self.time < math.inf

    def note(self, number, frame):
        now = time.monotonic()
        if now > self.time + 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self and int(os.environ.get("RANK", 0)) == 0:
            # not print(), which the signal may have interrupted
            message = "\nstopping after this step, which is saved; again stops without saving\n"
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), message.encode())
        if signal.Signals(number).name == "SIGHUP":
            discard_terminal()
        self.time = min(self.time, now)

    def __enter__(self):
        for number in (getattr(signal, name, None) for name in STOP_SIGNALS):
            if number and signal.getsignal(number) != signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # in another thread
                    self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *error):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def discard_terminal():
    """Send the output to a terminal nowhere: to write to one that is closed raises OSError."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Stopped(Exception):
    """A stop signal has come in a forward pass."""


@contextlib.contextmanager
def leave_early(model, stop):
    """A context that a forward pass leaves at the next block once `stop` is true."""

    def look(*_):
        if stop:
            raise Stopped

    hooks = [block.register_forward_pre_hook(look) for block in model.blocks]
    try:
        with contextlib.suppress(Stopped):
            yield
    finally:
        for hook in hooks:
            hook.remove()
