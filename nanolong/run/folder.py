"""Run folders: their checkpoints step-NNNNNN/, and which of them are kept.

out/rope/step-000500/model.safetensors   weights, a tied head stored once
out/rope/step-000500/optim.safetensors   keys <parameter>.<moment>
out/rope/step-000500/meta.json           configs, step, tokenizer, data hash, checksums, parent
out/rope/step-000500/tokenizer.json      of an imported model, with its other tokenizer files
out/rope/log.jsonl                       a line per logged step or evaluation
out/rope/curve.png                       the losses of log.jsonl, once the run has ended
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
RUN_FILES = {"log.jsonl", "curve.png", "lock"}


def list_steps(run):
    """The whole checkpoints of a run folder, oldest first."""
    return sorted(filter(is_step, Path(run).glob("step-*")), key=step_number)


def is_step(folder):
    return folder.name[5:].isdecimal() and (folder / "meta.json").is_file()


def damaged_steps(run):
    """The step folders of a run that have lost their meta.json, oldest first."""
    folders = sorted(Path(run).glob("step-*"))
    return [folder for folder in folders if folder.name[5:].isdecimal() and not is_step(folder)]


def step_number(folder):
    return int(folder.name[5:])


def prune(run, best, kept=(), finished=False):
    """Keep the last two checkpoints of a run, the best, [step, loss] or None, and the steps `kept`.

    Removes the others, what a crash has left half-written or half-removed, and the run that this
    one replaces, once this one has trained or is finished.
    """
    if finished or has_trained(run):
        settle_replaced(run, finished)
    steps = {*kept, *(best or [])[:1]}
    for old in list_steps(run)[:-2]:
        if step_number(old) not in steps:
            os.rename(old, run / f".tmp-{old.name}")
    for leftover in run.glob(".tmp-*"):
        remove(leftover)


# -----------------------------------------------------------------------------
# Replacing a run. Its files wait in `.replaced` until the new run has a checkpoint after step 0. A
# file `complete` there says that all of them are there; without it no new run has begun.


def has_trained(run):
    """Whether a run has a checkpoint of a later step than 0."""
    return any(step_number(step) > 0 for step in list_steps(run))


def readable_steps(run):
    """The checkpoints of a run folder, oldest first; while a run is being replaced the old ones."""
    aside = Path(run) / ".replaced"
    if not aside.is_dir():
        return list_steps(run)
    if not (aside / "complete").exists():  # a crash has left the old ones in both folders
        return sorted([*list_steps(run), *list_steps(aside)], key=step_number)
    return list_steps(run) if has_trained(run) else list_steps(aside)


def set_aside(run):
    """Move the run in a locked folder aside; settle_replaced() ends it, also after a crash.

    check_only_run() comes first: a folder may hold more than a run.
    """
    run = Path(run)
    aside = run / ".replaced"
    aside.mkdir()
    for item in run_items(run):
        os.rename(item, aside / item.name)
    (aside / "complete").touch()


def settle_replaced(run, finished=False):
    """Remove a run that was set aside if the new one is finished or has trained, or restore it."""
    aside = Path(run) / ".replaced"
    if not aside.is_dir():
        return
    complete = aside / "complete"
    if complete.exists() and (finished or has_trained(run)):
        os.rename(aside, Path(run) / ".tmp-replaced")
        shutil.rmtree(Path(run) / ".tmp-replaced", ignore_errors=True)
        return
    if complete.exists():
        for item in run_items(run):  # what a run that has not trained has written
            os.rename(item, Path(run) / f".tmp-{item.name}")
        complete.unlink()
    for item in aside.iterdir():
        os.rename(item, Path(run) / item.name)
    aside.rmdir()
    for leftover in Path(run).glob(".tmp-*"):
        remove(leftover)


def run_items(run):
    """The checkpoints, the log and its plot of a run folder."""
    return [*list_steps(run), *Path(run).glob("log.jsonl"), *Path(run).glob("curve.png")]


def check_only_run(run):
    """Raise UserError if a folder holds files that are no part of a run."""
    unknown = []
    for item in sorted(Path(run).glob("*")):
        if is_step(item):
            unknown += [file for file in item.iterdir() if file.name not in CHECKPOINT_FILES]
        elif item.name not in RUN_FILES and not item.name.startswith("."):
            unknown.append(item)
    if unknown:
        raise UserError(f"--overwrite would remove {unknown[0]}, no part of a run: move it away")


def remove(path):
    """Remove a file or a folder, as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
