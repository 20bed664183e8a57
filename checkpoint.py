"""Run folders: checkpoints that are whole or absent, and the log that agrees with them.

    out/rope/step-000500/model.safetensors   weights, a tied head stored once
    out/rope/step-000500/optim.safetensors   keys <parameter>.<moment>
    out/rope/step-000500/meta.json           model config, training config, step, tokenizer, data hash, checksums, parent
    out/rope/log.jsonl                       a line per logged step or evaluation

GPT.save() and GPT.load() in model.py are what most callers want; this is how the files behind them are written and checked.
"""
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import torch

FORMAT = 1  # of checkpoints, in meta.json


class Refused(ValueError):
    """What a scheme, a method or a checkpoint cannot do, in one sentence that names the way out."""


def write(folder, tensors, meta):
    """Write a checkpoint folder: into .tmp-* beside it, synced, then one rename. tensors: file stem -> dict of tensors; meta: what JSON can hold.

    Raises Refused when the folder exists already, and OSError when the disk is full; then nothing is left of it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    folder = Path(folder)
    if folder.exists():
        raise Refused(f"{folder} exists already: remove it or save elsewhere")
    tmp = folder.parent / f".tmp-{folder.name}"
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        tmp.mkdir(parents=True)
        for stem, named in tensors.items():
            try:
                save_file(named, tmp / f"{stem}.safetensors")
            except SafetensorError as error:  # the system's error, in words
                code = re.search(r"os error (\d+)", str(error))
                raise OSError(int(code[1]) if code else 0, os.strerror(int(code[1])) if code else str(error), str(folder)) from None
        sums = {file.name: _sha256(file) for file in sorted(tmp.iterdir())}
        for file in sums:
            _sync(tmp / file)
        write_meta(tmp, {**meta, "format": FORMAT, "checksums": sums, "torch": torch.__version__})
        os.rename(tmp, folder)
    except OSError:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    _sync(folder.parent)


def steps(run):
    """The whole checkpoints of a run folder, oldest first."""
    return sorted((p for p in Path(run).glob("step-*") if p.name[5:].isdecimal() and (p / "meta.json").is_file()), key=lambda p: int(p.name[5:]))


def prune(run, best):
    """Keep the last two checkpoints of a run and the best, [step, loss] or None; remove the others, and what is half-made or half-removed."""
    for old in steps(run)[:-2]:
        if best is None or old.name != f"step-{best[0]:06d}":
            os.rename(old, run / f".tmp-{old.name}")
    for left in run.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def restarted(run):
    """Whether torchrun has started us again after a crash, and the newest checkpoint is of the same launch."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and bool(steps(run)) and read_meta(steps(run)[-1]).get("launch") == os.environ.get("TORCHELASTIC_RUN_ID")


def checkpoint_folder(path, best=False):
    """The step folder that a run folder or step folder stands for. Raises Refused when there is none."""
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    found = steps(path)
    if not found:
        raise Refused(f"there is no checkpoint in {path}: " + ("it does not exist; train one with python train.py --out_dir=" + str(path) if not path.exists()
                      else "give a run folder (out/NAME) or one of its step folders"))
    measured = {p: value for p in found if best and isinstance(value := read_meta(p).get("val_loss"), float)}
    return min(measured, key=measured.get) if measured else found[-1]


def read_meta(folder):
    """meta.json of a step folder: its format, its own checksum and the kinds of its values checked. Raises Refused."""
    file = Path(folder) / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise Refused(f"{file} is of format {meta['format']!r:.20}, and this version reads format {FORMAT}")
        if meta["checksums"].get("meta.json", seal := _seal(meta)) != seal:  # checkpoints of before 2026-11-21 have none
            raise Refused(f"{file} is damaged or was edited: its checksum is not the one that it holds; {others(folder)}")
        dict(meta["config"]), meta["checksums"]["model.safetensors"]
        for name, fits in KINDS.items():
            if name in meta and not fits(meta[name]):
                raise ValueError(f"{name} is {meta[name]!r:.60}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{file} is damaged ({type(error).__name__}: {error}); {others(folder)}") from None
    return meta


def _number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1 << 53


def _count(x, least=0):
    return type(x) is int and least <= x < 1 << 53


# What the values of meta.json must be, where they are there: a file that was damaged with a fitting checksum is refused, too
KINDS = {"step": _count, "tokens": _count, "pretraining_tokens": _count, "val_loss": lambda x: x is None or _number(x), "bos": lambda x: x is None or _count(x),
         "best": lambda x: x is None or len(x) == 2 and _count(x[0]) and _number(x[1]), "scaler": lambda x: x is None or len(x) == 2 and _number(x[0]) and x[0] > 0 and _count(x[1]),
         "dataset": lambda x: isinstance(x, str), "data_hash": lambda x: isinstance(x, str), "parent": lambda x: isinstance(x, str), "launch": lambda x: x is None or isinstance(x, str),
         "tokenizer": lambda x: x is None or isinstance(x, dict),
         "train": lambda x: not x and (x is None or x == {}) or isinstance(x["dataset"], str) and 0 <= x["learning_rate"] and _number(x["learning_rate"]) and _count(x["batch_size"], 1)
         and _count(x["gradient_accumulation_steps"], 1)}


def _seal(meta):
    """SHA-256 of what a meta.json says, but for this checksum."""
    said = {**meta, "checksums": {name: sum for name, sum in meta["checksums"].items() if name != "meta.json"}}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_meta(folder, meta):
    """Write meta.json of a step folder, new or instead of the one it has, by one rename, with its own checksum in it."""
    new = Path(folder) / ".meta.json"
    meta = json.loads(json.dumps(meta, allow_nan=False))
    meta["checksums"]["meta.json"] = _seal(meta)
    new.write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _sync(new)
    os.replace(new, Path(folder) / "meta.json")
    _sync(folder)


def verify(file, meta):
    """Compare a checkpoint file's SHA-256 with the one in its meta.json. Raises Refused."""
    if not file.is_file():
        raise Refused(f"{file} is missing; {others(file.parent)}")
    if _sha256(file) != meta["checksums"].get(file.name):
        raise Refused(f"{file} is damaged: its checksum is not the one in meta.json; {others(file.parent)}")


def check(file, meta, shapes):
    """Verify a file of weights, and that it holds tensors of exactly these names and shapes. Raises Refused."""
    from safetensors import SafetensorError, safe_open
    verify(file, meta)
    try:
        with safe_open(file, framework="pt") as weights:
            have = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
            if kinds := {weights.get_slice(name).get_dtype() for name in have} - {"F32"}:
                raise Refused(f"{file} holds numbers of kind {kinds.pop()}, and checkpoints hold float32; {others(file.parent)}")
    except SafetensorError as error:
        raise Refused(f"{file} is not a whole safetensors file ({error}); {others(file.parent)}") from None
    if have != shapes:
        name = next(name for name in {**shapes, **have} if shapes.get(name) != have.get(name))
        raise Refused(f"{file} does not fit its meta.json: {name} is {have.get(name, 'absent')} where {shapes.get(name, 'nothing')} is expected; {others(file.parent)}")


@torch.no_grad()
def load_weights(model, file):
    """Copy a file of weights that check() has passed into a model's parameters."""
    from safetensors import safe_open
    with safe_open(file, framework="pt") as weights:
        for name, p in model.named_parameters():
            p.copy_(weights.get_tensor(name))


def optimizer_tensors(model, optimizers):
    """The optimizers' state as <parameter>.<moment> -> tensor on the CPU."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"{names[id(p)]}.{key}": value.detach().cpu().contiguous() for o in optimizers for p, state in o.state.items() for key, value in state.items() if torch.is_tensor(value)}


def load_optimizers(model, optimizers, file):
    """Put the tensors of optim.safetensors back. Raises Refused when they do not belong to these optimizers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        tensors, params = load_file(file), dict(model.named_parameters())
    except SafetensorError as error:
        raise Refused(f"{file} is not a whole safetensors file ({error}); {others(file.parent)}") from None
    owner = {id(p): o for o in optimizers for g in o.param_groups for p in g["params"]}
    wanted = {f"{name}.{moment}": () if moment == "step" else tuple(p.shape) for name, p in params.items()
              for moment in (("momentum_buffer",) if isinstance(owner[id(p)], torch.optim.Muon) else ("exp_avg", "exp_avg_sq", "step"))}
    if wrong := sorted(key for key, value in tensors.items() if wanted.get(key) != tuple(value.shape) or value.dtype != torch.float32) or sorted(tensors and wanted.keys() - tensors.keys()):
        raise Refused(f"{file} {'holds' if wrong[0] in tensors else 'lacks'} {wrong[0]}, which is not what this optimizer keeps: resume with the optimizer that the run was started with")
    for key, value in tensors.items():
        name, _, moment = key.rpartition(".")
        owner[id(params[name])].state[params[name]][moment] = value.to(params[name].device)


def others(folder):
    """Where to go on when a step folder is damaged, in words."""
    left = [str(p) for p in steps(Path(folder).parent) if p.name < Path(folder).name]
    return f"use the step before it, {left[-1]} (to resume from there, move the damaged one away)" if left else "no earlier step is left, so train again"


def _sha256(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path):
    if os.name == "nt" and Path(path).is_dir():
        return  # folders cannot be synced there
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Log:
    """log.jsonl, the progress bar, and optionally wandb (a project's name). Rows past the step that a run resumes from are dropped: the log agrees with the weights."""

    def __init__(self, run, step, evaluated, max_iters, wandb="", settings=None):
        from tqdm import tqdm
        file, rows = run / "log.jsonl", []
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() and (step or evaluated) else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut short by a crash
                row = json.loads(line)
                if row["step"] < step or row["step"] == step and (evaluated or "val_loss" not in row):
                    rows.append(line)
        (run / ".log").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
        os.replace(run / ".log", file)
        self.file, self.began, self.first, self.told, self.max_iters = open(file, "a", encoding="utf-8"), time.perf_counter(), step, step, max_iters
        self.tqdm = tqdm(total=max_iters, initial=step, unit="it", disable=not sys.stderr.isatty(), leave=False)
        self.wandb = None
        if wandb:
            try:
                import wandb as package
            except ImportError:
                raise Refused("--wandb needs the wandb package: pip install wandb, or leave --wandb out") from None
            self.wandb = package.init(project=wandb, name=run.name, config=settings)

    def row(self, **row):
        self.file.write(json.dumps(row, allow_nan=False) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def say(self, text):
        try:
            self.tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads us any more: the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def bar(self, step, text):
        if not self.tqdm.disable:
            self.tqdm.set_postfix_str(text, refresh=False)
            self.tqdm.update(step - self.tqdm.n)
        elif step - self.told >= max(1, self.max_iters // 10):  # no terminal: a line now and then
            self.told = step
            left = (time.perf_counter() - self.began) / max(1, step - self.first) * (self.max_iters - step)
            self.say(f"iteration {step}/{self.max_iters}: {text}, {left:.0f} s left")

    def close(self):
        self.tqdm.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()
