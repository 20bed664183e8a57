"""
Run folders: their checkpoints step-NNNNNN/, and which of them are kept.

    out/rope/step-000500/model.safetensors   weights, a tied head stored once
    out/rope/step-000500/optim.safetensors   keys <parameter>.<moment>
    out/rope/step-000500/meta.json           configs, step, tokenizer, data hash, checksums, parent
    out/rope/log.jsonl                       a line per logged step or evaluation
"""

import os
import shutil
from pathlib import Path


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

    Removes the others, and what a crash has left half-written or half-removed.
    """
    best_name = None if best is None else f"step-{best[0]:06d}"
    for old in list_steps(run)[:-2]:
        if old.name != best_name:
            os.rename(old, run / f".tmp-{old.name}")
    for leftover in run.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def latest_run(root="out"):
    """The run folder below root whose newest checkpoint is newest, or None."""
    newest = {}
    for meta in Path(root).glob("**/step-*/meta.json"):
        run = meta.parent.parent
        newest[run] = max(newest.get(run, 0), meta.stat().st_mtime)
    return max(sorted(newest), key=newest.get) if newest else None


def hint_other_checkpoints(folder):
    """Say where to go on when a checkpoint is damaged."""
    folder = Path(folder)
    earlier = [step for step in list_steps(folder.parent) if step.name < folder.name]
    if not earlier:
        return "no earlier checkpoint is left, so train again"
    return f"use the one before it, {earlier[-1]} (to resume from there, move the damaged one away)"
