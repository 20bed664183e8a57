"""
Run folders: their checkpoints step-NNNNNN/, and which of them are kept.

    out/rope/step-000500/model.safetensors   weights, a tied head stored once
    out/rope/step-000500/optim.safetensors   keys <parameter>.<moment>
    out/rope/step-000500/meta.json           configs, step, tokenizer, data hash, checksums, parent
    out/rope/step-000500/tokenizer.json      of an imported model, with its other tokenizer files
    out/rope/log.jsonl                       a line per logged step or evaluation
"""

import os
import shutil
from pathlib import Path

from nanolong import tokenizer_files
from nanolong.errors import UserError

CHECKPOINT_FILES = {
    *("model.safetensors", "optim.safetensors", "meta.json"),
    *tokenizer_files.FILES,
}
RUN_FILES = {"log.jsonl", "lock"}


def list_steps(run):
    """The whole checkpoints of a run folder, oldest first."""
    return sorted(filter(is_step, Path(run).glob("step-*")), key=step_number)


def is_step(folder):
    return folder.name[5:].isdecimal() and (folder / "meta.json").is_file()


def step_number(folder):
    return int(folder.name[5:])


def prune(run, best):
    """
    Keep the last two checkpoints of a run and the best, [step, loss] or None.

    Removes the others, what a crash has left half-written or half-removed, and the run that this
    one replaces.
    """
    settle_replaced(run)
    best_name = None if best is None else f"step-{best[0]:06d}"
    for old in list_steps(run)[:-2]:
        if old.name != best_name:
            os.rename(old, run / f".tmp-{old.name}")
    for leftover in run.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


# -----------------------------------------------------------------------------
# Replacing a run. Its files wait in `.replaced` until the new run has a checkpoint. A file
# `complete` there says that all of them are there; without it no new run has begun.


def set_aside(run):
    """
    Move the run in a locked folder aside; settle_replaced() ends it, also after a crash.

    check_only_run() comes first: a folder may hold more than a run.
    """
    run = Path(run)
    aside = run / ".replaced"
    aside.mkdir()
    for item in run_items(run):
        os.rename(item, aside / item.name)
    (aside / "complete").touch()


def settle_replaced(run):
    """Remove a run that was set aside if the new one has a checkpoint, else put it back."""
    aside = Path(run) / ".replaced"
    if not aside.is_dir():
        return
    complete = aside / "complete"
    if complete.exists() and list_steps(run):
        os.rename(aside, Path(run) / ".tmp-replaced")
        shutil.rmtree(Path(run) / ".tmp-replaced", ignore_errors=True)
        return
    if complete.exists():
        for item in run_items(run):  # the log of a run without a checkpoint
            item.unlink()
        complete.unlink()
    for item in aside.iterdir():
        os.rename(item, Path(run) / item.name)
    aside.rmdir()


def run_items(run):
    """The checkpoints and the log of a run folder."""
    return [*list_steps(run), *Path(run).glob("log.jsonl")]


def check_only_run(run):
    """Raise UserError where a folder holds files that are no part of a run."""
    unknown = []
    for item in sorted(Path(run).iterdir()):
        if is_step(item):
            unknown += [file for file in item.iterdir() if file.name not in CHECKPOINT_FILES]
        elif item.name not in RUN_FILES and not item.name.startswith("."):
            unknown.append(item)
    if unknown:
        raise UserError(
            f"--overwrite would remove {unknown[0]}, which is no part of a run: move it away, or "
            "choose another --out_dir"
        )


def latest_run(root="out"):
    """The run folder below root whose newest checkpoint is newest, or None."""
    newest = {}
    for meta in Path(root).glob("**/step-*/meta.json"):
        run = meta.parent.parent
        if run.name == ".replaced":
            continue
        newest[run] = max(newest.get(run, 0), meta.stat().st_mtime)
    return max(sorted(newest), key=newest.get) if newest else None


def hint_other_checkpoints(folder):
    """Say where to go on when a checkpoint is damaged."""
    folder = Path(folder)
    earlier = [step for step in list_steps(folder.parent) if step.name < folder.name]
    if not earlier:
        return "no earlier checkpoint is left, so train again"
    return f"use the one before it, {earlier[-1]} (to resume from there, move the damaged one away)"
