"""Open the folder of a run: new, resumed or replaced; and release it in the end."""

import contextlib
import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

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
from nanolong.run.folder import (
    check_only_run,
    damaged_steps,
    list_steps,
    prune,
    set_aside,
    settle_replaced,
)
from nanolong.run.lock import held, lock, unlock
from nanolong.run.logger import Logger, check_wandb, report
from nanolong.run.windows import check_schedule, set_window
from nanolong.validate import task_fractions


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


def load_resumed(GPT, cfg, model_config, given):
    """Load the model of the run to resume, or return None if there is none to resume.

    given: the names of the settings that the user has set; one that contradicts the checkpoint
    raises UserError.
    """
    run = Path(cfg.out_dir)
    rank = int(os.environ.get("RANK", 0))
    if (run / "meta.json").is_file():
        raise UserError(
            f"{run} is a checkpoint, not a run folder: give --out_dir={run.parent} (to resume from "
            "this step, move the newer ones away)"
        )
    if cfg.overwrite and cfg.init_from == "resume":
        raise UserError(
            "--overwrite replaces a run and --init_from=resume goes on with it: leave one of them "
            "out"
        )
    if is_elastic_restart(run):
        cfg.init_from = "resume"
    if cfg.init_from != "resume":
        return None
    if not run.is_dir():
        raise UserError(
            f"there is no run in {run} to resume: leave out --init_from=resume to start one, or "
            "name its --out_dir"
        )
    if rank == 0:
        lock(run)  # or another process might remove the checkpoint while it is read
        settle_replaced(run)
    if dist.is_initialized():
        dist.barrier()
    damaged = damaged_steps(run)
    if damaged:
        raise UserError(
            f"{damaged[-1]} is damaged (it has no meta.json): move it away to resume from the step "
            "before it"
        )
    if not list_steps(run):
        report(f"{run} holds no checkpoint yet: starting from the beginning")
        return None
    model = GPT.load(run, weights=cfg.parallel != "fsdp")
    needed = {"train", "step", "best", "tokens", "val_loss", "scaler", "data_hash"}
    if not model.meta.keys() >= needed:
        raise UserError(
            f"{model.folder} was not written by training and cannot be resumed: fine-tune it with "
            "extend.py"
        )
    if "method" in model.meta["train"] and not hasattr(cfg, "method"):
        raise UserError(
            f"{model.folder} was written by extend.py: resume it with the command that made it, "
            "and --init_from=resume"
        )
    check_same_settings(model, model_config, given)
    return model


def check_same_settings(model, model_config, given):
    """Raise UserError if a given setting of the model differs from the checkpoint's."""
    for name in sorted(given & {field.name for field in fields(model_config)}):
        asked, saved = getattr(model_config, name), getattr(model.config, name)
        if asked != saved:
            raise UserError(
                f"{model.folder} has {name}={saved}, not {asked}: leave the setting out, or train "
                "again with another --out_dir"
            )


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
    prune(run, model.meta["best"], model.meta.get("kept", []), finished=True)
    unlock(run)  # locked by load_resumed()
    step = model.meta["step"]
    setting = "raise --stop_at or leave it out" if cfg.stop_at else "raise --max_iters"
    print(f"{model.folder} is finished: to train beyond step {step}, {setting}")


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
    dataset.select(train_length, cfg.min_doc, cfg.upsample_docs, cfg.separate_docs)
    for source in dataset.sources:
        source.train.require_length(train_length)
    if cfg.eval_length > model.config.block_size:
        raise UserError(
            f"eval_length={cfg.eval_length} is beyond the context length of "
            f"{model.config.block_size} tokens: give at most that"
        )
    for source in dataset.sources:
        source.val.require_length(cfg.eval_length or model.config.block_size)
    for kind in task_fractions(cfg.tasks):
        dataset.check_task(kind, train_length)
    if is_resumed(model, cfg) and model.meta["data_hash"] not in (None, dataset.hash):
        raise UserError(
            f"the files of dataset {cfg.dataset} are not those that {cfg.out_dir} was trained on: "
            "restore them, or train again with another --out_dir"
        )
    return dataset


def open_run(folder, model, cfg, state, dataset, dtype):
    """Take the run folder for this process, and on resume fill in the state. Raises UserError.

    state: a new TrainState of train.py. release_run() gives the folder back.
    """
    _, world = data_rank_and_world()
    check_wandb(cfg.wandb)
    check_schedule(model.config, cfg)
    check_parallel(cfg.parallel)
    if cfg.gradient_accumulation_steps % world:
        raise UserError(
            f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is the total over "
            f"processes and not divisible by {world} of them: choose a multiple of {world}"
        )
    resumed = is_resumed(model, cfg)
    if list_steps(folder) and not (resumed or cfg.overwrite):
        raise existing_run(folder)
    if dtype == torch.float16:
        state.loss_scale = 65536.0
    if goes_on(model, cfg):
        restore_step(model, state, dtype)
    if resumed:
        restore_evaluation(folder, model, cfg, state, dataset)
    if rank_and_world()[0] == 0:
        take_folder(folder, model.folder if resumed else None, cfg.overwrite and not resumed)
        prune(folder, state.best, state.kept)  # removes what a crash may have left


def restore_step(model, state, dtype):
    """Fill in how far training is, from the checkpoint in model.folder."""
    # the model may be extended by now, and model.meta that of its new run
    meta = read_meta(model.folder)
    verify(model.folder / "optim.safetensors", meta)
    state.step = meta["step"]
    state.tokens = meta["tokens"]
    if dtype == torch.float16 and meta["scaler"]:
        state.loss_scale, state.good_steps = meta["scaler"]


def restore_evaluation(folder, model, cfg, state, dataset):
    """Fill in the validation losses of the checkpoint that a run resumes from."""
    meta = model.meta
    state.best = meta["best"]
    state.val_loss = meta["val_loss"]
    state.kept = meta.get("kept", [])
    if state.best and validated_on_others(model, cfg, dataset):
        restart_best(folder, state)


def take_folder(folder, resumed_from, overwrite):
    """Make and lock the folder of a run, and check that it holds what it held before.

    resumed_from: the step folder that the run resumes from, or None.
    """
    if overwrite and folder.is_dir():
        check_only_run(folder)  # before anything is written
    lock_run(folder)
    steps = list_steps(folder)
    newest = steps[-1] if steps else None
    if overwrite:
        check_replaceable(folder)
    elif newest != resumed_from:
        raise UserError(f"another process has just written to {folder}: start again")


def validated_on_others(model, cfg, dataset):
    """Whether the checkpoint of a resumed model was validated on other sequences than from now."""
    before = SimpleNamespace(**model.meta["train"])
    T, T_before = (c.eval_length or model.config.block_size for c in (cfg, before))
    if (T, cfg.separate_docs, dataset.bos) != (T_before, before.separate_docs, model.meta["bos"]):
        return True
    if list(dataset.fractions) != list(data.split_mixture(before.dataset).values()):
        return True
    n, n_before = (c.eval_iters * c.batch_size for c in (cfg, before))
    splits = [source.val for source in dataset.sources]
    return any(split.spaced(n, T) != split.spaced(n_before, T) for split in splits)


def restart_best(run, state):
    """Let the best loss start over, with the checkpoint of now; the best one so far is kept."""
    state.kept = [*state.kept, state.best[0]]
    state.best = None
    state.val_loss = None
    report(
        "validation scores other sequences than before, so the best loss starts over; "
        f"{run}/step-{state.kept[-1]:06d}, the best so far, is kept"
    )


def lock_run(run):
    """Make and lock a run folder, and repair what a crash may have left of replacing it."""
    run.mkdir(parents=True, exist_ok=True)
    lock(run)
    settle_replaced(run)


def existing_run(run):
    return UserError(
        f"{run} holds a run already: resume it with --init_from=resume, replace it with "
        "--overwrite, or choose another --out_dir"
    )


def check_replaceable(run):
    """Raise UserError unless a folder is empty, or holds what train.py or extend.py has written."""
    check_only_run(run)
    if list_steps(run) and "train" not in read_meta(list_steps(run)[-1]):
        raise UserError(
            f"--overwrite would remove {run}, which was not trained here: move it away, or choose "
            "another --out_dir"
        )


def replace_run(folder):
    """Set the old run of a locked folder aside until the new one has trained: see release_folder().

    Raises UserError if the folder holds anything else.
    """
    check_replaceable(folder)
    if list_steps(folder):
        report(f"replacing {list_steps(folder)[-1]}")
    set_aside(folder)


def release_folder(folder):
    """Settle what replace_run() has begun and unlock the folder, if this process holds it.

    A folder in which nothing was written is removed.
    """
    if folder not in held:
        return
    settle_replaced(folder)
    with contextlib.suppress(OSError):  # a mount point, or a folder that is gone
        if [item.name for item in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()
    unlock(folder)


def begin_run(folder, model, cfg, state, loader):
    """From here on the run is written: set an old one aside, and open the log.

    Returns the logger, or None but in the first process.
    """
    if rank_and_world()[0]:
        return None
    if cfg.overwrite and not is_resumed(model, cfg):
        replace_run(folder)
    return Logger(folder, state, model, cfg, loader.train_length, loader.device)


def release_run(folder, model, loader, logger):
    """End the threads, the log and the lock of a run, however training ends."""
    loader.close()
    set_window(model, loader.cfg)  # the final one, that of the checkpoint
    if logger:
        logger.close()
    stop_sharing(model)
    model.eval()
    release_folder(folder)
