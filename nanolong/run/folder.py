"""Run folders: their checkpoints step-NNNNNN/, and which of them are kept.

out/rope/step-000500/model.safetensors   weights, a tied head stored once
out/rope/step-000500/optim.safetensors   keys <parameter>.<moment>
out/rope/step-000500/meta.json           configs, step, tokenizer, data hash, checksums, parent
out/rope/step-000500/tokenizer.json      of an imported model, with its other tokenizer files
out/rope/log.jsonl                       a line per logged step or evaluation
out/rope/curve.png                       the losses of log.jsonl, once the run has ended
"""

import itertools
import os
import re
import shutil
from pathlib import Path


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


def prune(run, best):
    """Keep the last two checkpoints of a run, and the best, [step, loss] or None.

    Removes the others, and what a crash has left half-written or half-removed.
    """
    for old in list_steps(run)[:-2]:
        if not best or step_number(old) != best[0]:
            os.rename(old, run / f".tmp-{old.name}")
    for leftover in run.glob(".tmp-*"):
        remove(leftover)


def rename_old(run):
    """Rename a run folder to NAME.old1, NAME.old2, ...: the first that there is none of."""
    names = (Path(f"{run}.old{n}") for n in itertools.count(1))
    old = next(name for name in names if not name.exists())
    os.rename(run, old)
    return old


def remove(path):
    """Remove a file or a folder, as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def latest_run(root="out"):
    """The run folder below root whose newest checkpoint is newest, or None; never an .oldN."""
    newest = {}
    for meta in Path(root).glob("**/step-*/meta.json"):
        run = meta.parent.parent
        if not re.search(r"\.old\d+$", run.name):
            newest[run] = max(newest.get(run, 0), meta.stat().st_mtime)
    return max(sorted(newest), key=newest.get) if newest else None


def hint_other_checkpoints(folder):
    """Say where to go on when a checkpoint is damaged."""
    folder = Path(folder)
    earlier = [step for step in list_steps(folder.parent) if step.name < folder.name]
    if not earlier:
        return "no earlier checkpoint is left, so train again"
    return f"use the one before it, {earlier[-1]} (to resume from there, move the damaged one away)"
