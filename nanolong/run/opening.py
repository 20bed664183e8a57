"""Open the folder of a run, new or resumed, and release it in the end."""

import contextlib
import os
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist

import data
from data.prepare import prepare_missing
from nanolong.entry import hash_sources
from nanolong.errors import UserError
from nanolong.parallel.processes import LOCAL_SETTINGS, check_same_everywhere, rank_and_world
from nanolong.parallel.sequence import data_rank_and_world, stop_sharing
from nanolong.parallel.sharding import check_parallel
from nanolong.run.checkpoint import (
    goes_on,
    is_elastic_restart,
    is_resumed,
    read_meta,
    verify,
    weights_hash,
)
from nanolong.run.folder import damaged_steps, list_steps, prune, rename_old
from nanolong.run.lock import held, lock, unlock
from nanolong.run.logger import Logger, check_wandb, report
from nanolong.validate import task_fractions

# of meta.json
NEEDED_TO_RESUME = {"train", "step", "best", "tokens", "val_loss", "scaler", "data_hash"}


def check_processes_agree(given, *configs):
    """Check that code, torch, newest checkpoint and settings are the same in all processes.

    given: the names of the settings that the user has set. Raises LocalError.
    """
    settings = {name: value for config in configs for name, value in vars(config).items()}
    steps = list_steps(settings["out_dir"]) if "out_dir" in settings else []
    check_same_everywhere(
        code=hash_sources(settings["entry"]),
        torch=torch.__version__,
        checkpoint=steps[-1].name if steps else None,
        **{name: settings[name] for name in sorted(given - LOCAL_SETTINGS)},
    )


# -----------------------------------------------------------------------------
# The model of a run to resume.


def load_resumed(GPT, cfg, model_config, given):
    """Load the model of the run to resume, or return None if there is none to resume.

    given: the names of the settings that the user has set; one that contradicts the checkpoint
    raises UserError.
    """
    run = Path(cfg.out_dir)
    if (run / "meta.json").is_file():
        raise UserError(f"{run} is a checkpoint: give its run folder, --out_dir={run.parent}")
    if cfg.overwrite and cfg.init_from == "resume":
        raise UserError("--overwrite and --init_from=resume contradict: leave one of them out")
    if is_elastic_restart(run):
        cfg.init_from = "resume"
    if cfg.init_from != "resume":
        return None
    if not run.is_dir():
        raise UserError(f"there is no run in {run} to resume: leave --init_from=resume out")
    if int(os.environ.get("RANK", 0)) == 0:
        lock_run(run)  # or another process might remove the checkpoint while it is read
    if dist.is_initialized():
        dist.barrier()
    damaged = damaged_steps(run)
    if damaged:
        raise UserError(f"{damaged[-1]} is damaged (it has no meta.json): move it away")
    if not list_steps(run):
        report(f"{run} holds no checkpoint yet: starting from the beginning")
        return None
    model = GPT.load(run, weights=cfg.parallel != "fsdp")
    if not model.meta.keys() >= NEEDED_TO_RESUME:
        raise UserError(f"{model.folder} was not written by training: use extend.py to train it")
    check_same_settings(model, model_config, given)
    return model


def check_same_settings(model, model_config, given):
    """Raise UserError if a given setting of the model differs from the checkpoint's."""
    for name in sorted(given & {field.name for field in fields(model_config)}):
        asked, saved = getattr(model_config, name), getattr(model.config, name)
        if asked != saved:
            raise UserError(f"{model.folder} has {name}={saved}, not {asked}: leave --{name} out")


def ignore_overwrite_of_preset(cfg, flags):
    """Ignore a preset's overwrite when the run is resumed, and in another folder than the preset's.

    flags: the settings that the command line gives as flags. --overwrite is always followed.
    """
    if "overwrite" not in flags and (cfg.init_from == "resume" or "out_dir" in flags):
        cfg.overwrite = False


def is_finished(model, cfg):
    """Whether the model comes from a run that has nothing left to train or to evaluate."""
    if not is_resumed(model, cfg) or not cfg.max_iters:
        return False
    return model.meta["step"] >= cfg.last_step and model.meta["val_loss"] is not None


def prune_finished_run(model, cfg):
    """Remove what a crash has left between the last checkpoint of a run and the end."""
    if rank_and_world()[0]:
        return
    run = Path(cfg.out_dir)
    prune(run, model.meta["best"])
    unlock(run)  # locked by load_resumed()
    step = model.meta["step"]
    setting = "raise --stop_at or leave it out" if cfg.stop_at else "raise --max_iters"
    print(f"{model.folder} is finished: to train beyond step {step}, {setting}")


# -----------------------------------------------------------------------------
# The dataset.


def prepare_dataset(name):
    """Make those of the small datasets that are named and missing; in every process of a run."""
    if rank_and_world()[0] == 0:
        for source in data.split_mixture(name):
            prepare_missing(source)
    if dist.is_initialized():
        dist.barrier()


def open_dataset(model, cfg, train_length):
    """The dataset of a run, checked against the model, the settings and what other processes have.

    Raises UserError.
    """
    dataset = data.open_dataset(cfg.dataset, cfg.bos)
    check_same_everywhere(data=dataset.hash, checkpoint=weights_hash(model))
    dataset.check_model("the model", model.config.vocab_size, model.meta.get("tokenizer"))
    if cfg.separate_docs is None:
        cfg.separate_docs = dataset.separator is not None
    dataset.select(cfg.min_doc, cfg.separate_docs)
    T, longest = cfg.eval_length, model.config.block_size
    if T > longest:
        raise UserError(f"eval_length={T} is beyond the context length: give at most {longest}")
    for source in dataset.sources:
        source.train.require_length(train_length)
        source.val.require_length(T or longest)
    for kind in task_fractions(cfg.tasks):
        dataset.check_task(kind, train_length)
    if is_resumed(model, cfg) and model.meta["data_hash"] not in (None, dataset.hash):
        raise UserError(
            f"{cfg.dataset} is not the data of {cfg.out_dir} any more: restore its files"
        )
    return dataset


# -----------------------------------------------------------------------------
# The folder: taken, begun, released.


def open_run(folder, model, cfg, state, dtype):
    """Take the run folder for this process, and on resume fill in the state. Raises UserError.

    state: a new TrainState of train.py. release_run() gives the folder back.
    """
    check_wandb(cfg.wandb)
    check_parallel(cfg.parallel, cfg.optimizer)
    n, world = cfg.gradient_accumulation_steps, data_rank_and_world()[1]
    if n % world:
        raise UserError(
            f"gradient_accumulation_steps={n} is the total, and not divisible by {world} "
            f"processes: choose a multiple of {world}"
        )
    resumed = is_resumed(model, cfg)
    if list_steps(folder) and not (resumed or cfg.overwrite):
        raise existing_run(folder)
    restore_state(model, cfg, state, dtype)
    if rank_and_world()[0]:
        return
    lock_run(folder)
    newest = [None, *list_steps(folder)][-1]
    if newest != (model.folder if resumed else None) and (resumed or not cfg.overwrite):
        raise UserError(f"another process has just written to {folder}: start again")
    if resumed:
        prune(folder, state.best)  # removes what a crash may have left


def restore_state(model, cfg, state, dtype):
    """Fill in how far training is and what validation has found, from the model's checkpoint."""
    if dtype == torch.float16:
        state.loss_scale = 65536.0
    if goes_on(model, cfg):
        # the model may be extended by now, and model.meta that of its new run
        meta = read_meta(model.folder)
        verify(model.folder / "optim.safetensors", meta)
        state.step = meta["step"]
        state.tokens = meta["tokens"]
        if dtype == torch.float16 and meta["scaler"]:
            state.loss_scale, state.good_steps = meta["scaler"]
    if is_resumed(model, cfg):
        state.best = model.meta["best"]
        state.val_loss = model.meta["val_loss"]


def lock_run(run):
    """Make and lock a run folder."""
    run.mkdir(parents=True, exist_ok=True)
    lock(run)


def existing_run(run):
    repairs = "give --init_from=resume, --overwrite or another --out_dir"
    return UserError(f"{run} holds a run already: {repairs}")


def replace_run(folder):
    """Rename the run in a locked folder, if there is one, and lock a new folder in its place."""
    if not any(folder.glob("step-*")):
        return
    if os.name == "nt":  # which renames no folder of an open file
        unlock(folder)
    old_lock = held.pop(folder, None)  # it moves with the run, and is held until the new one is
    report(f"the run in {folder} is {rename_old(folder)} now")
    lock_run(folder)
    if old_lock:
        old_lock.close()


def begin_run(folder, state, loader):
    """From here on the run is written: rename an old one, and open the log.

    Returns the logger, or None but in the first process.
    """
    if rank_and_world()[0]:
        return None
    if loader.cfg.overwrite and not is_resumed(loader.model, loader.cfg):
        replace_run(folder)
    return Logger(folder, state, loader)


def release_run(folder, loader, logger):
    """End the threads, the log and the lock of a run, however training ends."""
    loader.close()
    if logger:
        logger.close()
    stop_sharing(loader.model)
    loader.model.eval()
    release_folder(folder)


def release_folder(folder):
    """Unlock the folder, if this process holds it; one in which nothing was written is removed."""
    if folder not in held:
        return
    with contextlib.suppress(OSError):  # a mount point, or a folder that is gone
        if [item.name for item in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()
    unlock(folder)
