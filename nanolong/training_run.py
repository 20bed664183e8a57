"""Starting, resuming, saving and ending a training run. The loop is in train.py."""

import math
import os
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from operator import call
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import kernels
from nanolong import cli
from nanolong.checkpoint import (
    is_elastic_restart,
    optimizer_tensors,
    read_meta,
    save_model,
    settings_record,
    verify,
    write_meta,
)
from nanolong.device import autocast, pick_compile, synchronize
from nanolong.distributed import rank_and_world
from nanolong.entry import entry_hash
from nanolong.errors import LocalError, UserError
from nanolong.lock import lock, unlock
from nanolong.logger import TrainLogger, check_wandb
from nanolong.memory import count_memory
from nanolong.run_folder import (
    check_only_run,
    damaged_steps,
    list_steps,
    prune,
    set_aside,
    settle_replaced,
)
from nanolong.sequence_parallel import any_process, data_rank_and_world, stop_sharing
from nanolong.sharding import (
    check_parallel,
    free_gathered,
    is_sharded,
    needs_trial_sum,
    set_gradient_sync,
)


def resume_run(model_class, cfg, model_config, given):
    """
    Load the model of the run to resume, or return None where there is none to resume.

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
        if rank == 0:
            print(f"{run} holds no checkpoint yet: starting from the beginning")
        return None
    model = model_class.load(run, weights=cfg.parallel != "fsdp")
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
    """Raise UserError where a given setting of the model differs from the checkpoint's."""
    for name in sorted(given & {field.name for field in fields(model_config)}):
        asked, saved = getattr(model_config, name), getattr(model.config, name)
        if asked != saved:
            raise UserError(
                f"{model.folder} has {name}={saved}, not {asked}: leave the setting out, or train "
                "again with another --out_dir"
            )


def is_resumed(model, cfg):
    """Whether training goes on from the model's checkpoint."""
    return cfg.init_from == "resume" and "step" in model.meta


def ignore_overwrite_of_preset(cfg):
    """
    Ignore a preset's overwrite when the run is resumed, and in another folder than the preset's.

    The flag --overwrite is always followed.
    """
    flags = cli.flag_names()
    if "overwrite" not in flags and (cfg.init_from == "resume" or "out_dir" in flags):
        cfg.overwrite = False


def is_finished(model, cfg):
    """Whether the model comes from a run that has nothing left to train or to evaluate."""
    if not is_resumed(model, cfg) or not cfg.max_iters:
        return False
    return model.meta["step"] >= cfg.max_iters and model.meta["val_loss"] is not None


def tidy_finished_run(model, cfg):
    """Remove what a crash has left between the last checkpoint of a run and the end."""
    run = Path(cfg.out_dir)
    prune(run, model.meta["best"], model.meta.get("kept", []), finished=True)
    unlock(run)  # locked by resume_run()


def open_run(run, model, cfg, state, dataset, dtype):
    """
    Take the run folder for this process, and on resume fill in the state. Raises UserError.

    state: a new TrainState of train.py.
    """
    rank, _ = rank_and_world()
    _, world = data_rank_and_world()
    check_wandb(cfg.wandb)
    check_parallel(cfg.parallel)
    if cfg.gradient_accumulation_steps % world:
        raise UserError(
            f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is the total over "
            f"processes and not divisible by {world} of them: choose a multiple of {world}"
        )
    resumed = is_resumed(model, cfg)
    if list_steps(run) and not (resumed or cfg.overwrite):
        raise existing_run(run)
    if dtype == torch.float16:
        state.loss_scale = 65536.0
    if resumed:
        meta = model.meta
        verify(model.folder / "optim.safetensors", meta)
        state.step = meta["step"]
        state.tokens = meta["tokens"]
        state.best = meta["best"]
        state.val_loss = meta["val_loss"]
        state.kept = meta.get("kept", [])
        if state.best and validated_on_others(model, cfg, dataset):
            restart_best(run, state)
        if dtype == torch.float16 and meta["scaler"]:
            state.loss_scale, state.good_steps = meta["scaler"]
    if rank == 0:
        if cfg.overwrite and not resumed and run.is_dir():
            check_only_run(run)  # before anything is written
        lock_run(run)  # until closing_run()
        newest = list_steps(run)[-1] if list_steps(run) else None
        if cfg.overwrite and not resumed:
            check_replaceable(run)
        elif newest != (model.folder if resumed else None):
            raise UserError(f"another process has just written to {run}: start again")
        prune(run, state.best, state.kept)  # removes what a crash may have left


def validated_on_others(model, cfg, dataset):
    """Whether the checkpoint of a resumed model was validated on other sequences than from now."""
    before = SimpleNamespace(**model.meta["train"])
    T, T_before = (c.eval_length or model.config.block_size for c in (cfg, before))
    if (T, cfg.separate_docs, dataset.bos) != (T_before, before.separate_docs, model.meta["bos"]):
        return True
    n, n_before = (c.eval_iters * c.batch_size for c in (cfg, before))
    return dataset.val.spaced(n, T) != dataset.val.spaced(n_before, T)


def restart_best(run, state):
    """Let the best loss start over, with the checkpoint of now; the best one so far is kept."""
    state.kept = [*state.kept, state.best[0]]
    state.best = None
    state.val_loss = None
    if rank_and_world()[0] == 0:
        print(
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


@contextmanager
def replacing_run(run, overwrite):
    """
    With overwrite, set the old run of a locked folder aside until the new one has trained.

    Raises UserError where the folder holds anything else.
    """
    if overwrite:
        check_replaceable(run)
        if list_steps(run):
            print(f"replacing {list_steps(run)[-1]}")
        set_aside(run)
    try:
        yield
    finally:
        settle_replaced(run)


@contextmanager
def closing_run(run, model, loader):
    """End the threads and the lock of a run, however it ends."""
    try:
        yield
    finally:
        loader.close()
        stop_sharing()
        model.eval()
        unlock(run)


@contextmanager
def logging_run(run, state, model, loader, dtype):
    """
    The logger, or None but in the first process; it prints what is about to be trained.

    In the end the threads, the log and the lock of the run are released.
    """
    cfg = loader.cfg
    with closing_run(run, model, loader), explaining_out_of_memory(loader, dtype):
        if dist.is_initialized():
            dist.barrier()  # all processes catch signals before the first one says that it trains
        if rank_and_world()[0]:
            yield None
            return
        with (
            replacing_run(run, cfg.overwrite and not is_resumed(model, cfg)),
            closing(
                TrainLogger(run, state, model, cfg, loader.train_length, loader.device)
            ) as logger,
        ):
            logger.banner(model, dtype, loader.dataset, loader.tokens_per_step)
            yield logger


# Floating-point operations a second in training, to tell steps that take seconds from others.
EXPECTED_SPEED = {"cpu": 1e11, "mps": 2e12, "cuda": 2e14}
EXPENSIVE_STEP = 1.0  # seconds; what such a step costs is printed before the first one


def try_ahead(forward, optimizers, loader, state, dtype, stop_signals, logger):
    """
    Before the first step, check the kernels and compile the passes that it needs, and print what a
    step costs: an expensive one, and with CUDA any one.

    No process waits for another meanwhile, so a stop signal ends it at once; where processes share
    sequences or weights, it ends with the batch. In the end they agree on whether one came, which
    is returned, and sum gradients once, if needs_trial_sum().
    """
    check_kernels(loader, state, dtype, stop_signals, logger)
    cfg = loader.cfg
    if state.step >= cfg.max_iters:
        return False
    compiles, _ = pick_compile(cfg.compile, loader.device, cfg.max_iters)
    is_cuda = loader.device.type == "cuda"
    measures_step = is_cuda or expected_seconds(loader) > EXPENSIVE_STEP
    if measures_step and logger:
        logger.print(describe_estimate(loader, dtype))
    run = call if need_each_other(cfg) else stop_signals.interruptible
    # the first batch compiles kernels
    if compiles or measures_step and loader.device.type != "cpu":
        run(try_batch, forward, loader, dtype)
    costs = []
    if measures_step:
        run(measure_batch, forward, optimizers, loader, dtype, costs)
    if costs and logger:
        logger.print(describe_step(loader, costs[0], cfg.max_iters - state.step))
    stopped = torch.tensor(len(stop_signals), device=loader.device)
    if dist.is_initialized():
        dist.all_reduce(stopped)
    if not stopped and needs_trial_sum(forward):
        try_batch(forward, loader, dtype, sync=True)
    return stopped.item() > 0


def need_each_other(cfg):
    """Whether the processes of a run wait for each other in every forward pass."""
    return cfg.sequence_parallel > 1 or cfg.parallel == "fsdp"


def check_kernels(loader, state, dtype, stop_signals, logger):
    """
    Check the kernels that training needs, before anything is compiled; log a change of verdict.

    A kernel that has failed in one process is replaced by plain PyTorch in all of them.
    """
    device = next(loader.model.parameters()).device
    on_triton = kernels.triton_runs(device)
    if on_triton:
        run = call if need_each_other(loader.cfg) else stop_signals.interruptible
        run(meet_kernels, loader, dtype)
    kernels.first_contact.share_faults(device)
    state.kernels = kernels.first_contact.describe(device) if on_triton else "plain PyTorch"
    meta = loader.model.meta
    if logger and is_resumed(loader.model, loader.cfg) and "kernels" in meta:
        old, new = {"kernels": meta["kernels"]}, {"kernels": state.kernels}
        logger.changed_settings(state.step, old, new)


def meet_kernels(loader, dtype):
    """Call each kernel once. A forward pass is enough: a check includes the gradients."""
    batch, _, _ = loader.prefetch.result()
    inputs = {name: batch[name] for name in ("tokens", "positions", "docs")}
    inputs = {name: part[:1, :16] for name, part in inputs.items() if part is not None}
    with autocast(loader.device, dtype):
        loader.model(**inputs)
    free_gathered(loader.model)


def expected_seconds(loader):
    """Roughly what a step takes, from its floating-point operations."""
    flops = loader.tokens_per_step * loader.model.flops_per_token(loader.train_length)
    return flops / rank_and_world()[1] / EXPECTED_SPEED[loader.device.type]


def try_batch(forward, loader, dtype, sync=False, keep_gradients=False):
    """
    Forward and backward of the next micro-batch, which stays the next, without any effect.

    sync: sum the gradients over the processes, all of which then take part. keep_gradients: for
    the next call to add to, as in a step of several micro-batches.
    The random state is not kept: every micro-batch of a step sets it by its own seed.
    """
    batch, _, _ = loader.prefetch.result()
    # in shards gradients are always summed, or the next step would have those of this batch
    set_gradient_sync(forward, sync or is_sharded(forward) and not keep_gradients)
    with autocast(loader.device, dtype):
        loss_sum = forward(**batch, reduction="sum", part=loader.part)
    loss_sum.backward()
    if not keep_gradients:
        forward.zero_grad(set_to_none=True)


@dataclass
class Cost:
    """What the last micro-batch of a step takes."""

    seconds: float
    peak: int = 0  # bytes of tensors, by torch's allocator of CUDA memory
    reserved: int = 0  # bytes that it had taken from the device by then; more when they fragment


def measure_batch(forward, optimizers, loader, dtype, costs):
    """
    Append to `costs` the Cost of a micro-batch.

    With CUDA, all that a later step finds in memory is there: tensors like the moments that the
    optimizers make in their first step, and the gradients of the micro-batches before.
    """
    loader.wait()
    device = loader.device
    is_cuda = device.type == "cuda"
    moments = tensors_like_new_moments(optimizers) if is_cuda else []
    if is_cuda and micro_batches_of(loader) > 1:
        try_batch(forward, loader, dtype, keep_gradients=True)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    start = time.perf_counter()
    try_batch(forward, loader, dtype)
    synchronize(device)
    cost = Cost(time.perf_counter() - start)
    del moments
    if is_cuda:
        cost.peak = torch.cuda.max_memory_allocated(device)
        cost.reserved = torch.cuda.max_memory_reserved(device)
    costs.append(cost)


def tensors_like_new_moments(optimizers):
    """Tensors of the sizes of the moments that the optimizers do not have yet."""
    tensors = []
    for optimizer in optimizers:
        n_moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p not in optimizer.state]
            tensors += [torch.empty_like(p) for p in new for _ in range(n_moments)]
    return tensors


def micro_batches_of(loader):
    """The micro-batches of a process in a step."""
    return loader.cfg.gradient_accumulation_steps // loader.world


def estimate_memory(loader, dtype):
    """The bytes of tensors of a process in a step, counted from shapes for the eager model."""
    cfg = loader.cfg
    memory = count_memory(
        loader.model.config,
        cfg.batch_size,
        loader.train_length // cfg.sequence_parallel,
        "float32" if dtype == torch.float32 else "bfloat16",
        cfg.checkpoint_activations,
        cfg.optimizer,
        loader.device.type,
        micro_batches_of(loader),
        rank_and_world()[1] if cfg.parallel == "fsdp" else 1,
        cfg.sequence_parallel,
    )
    return memory.peak


def describe_estimate(loader, dtype):
    """One line: the memory of a step, before one is tried."""
    estimate = format_bytes(estimate_memory(loader, dtype))
    return f"memory of a step: {estimate} of tensors, estimated from shapes without torch.compile"


def describe_step(loader, cost, n_steps):
    """One line: the tokens, time and measured memory of a step, and the time of all that are left.

    cost: of one micro-batch.
    """
    micro_batches = micro_batches_of(loader)
    step_seconds = micro_batches * cost.seconds
    steps = "1 step" if n_steps == 1 else f"{n_steps:,} steps"
    batches = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    memory = ""
    if cost.peak:
        memory = (
            f"; {format_bytes(cost.peak)} of tensors at the peak (measured), "
            f"{format_bytes(cost.reserved)} reserved so far"
        )
    return (
        f"a step: {loader.tokens_per_step:,} tokens, about {format_time(step_seconds)} "
        f"({batches} of {cost.seconds:.2g} s, measured){memory}; {steps}: "
        f"{format_time(n_steps * step_seconds)}, evaluations apart"
    )


@contextmanager
def explaining_out_of_memory(loader, dtype):
    """Where memory runs out, raise LocalError with the estimate and what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not cli.is_out_of_memory(error):
            raise
        raise LocalError(describe_out_of_memory(loader, dtype)) from error


def describe_out_of_memory(loader, dtype):
    cfg = loader.cfg
    estimate = format_bytes(estimate_memory(loader, dtype))
    found = f"a step was estimated to take {estimate} of tensors without torch.compile"
    remedies = []
    if not cfg.checkpoint_activations:
        remedies.append("give --checkpoint_activations=true")
    if cfg.batch_size > 1:
        remedies.append("lower --batch_size (more --gradient_accumulation_steps keep the batch)")
    if loader.device.type == "cuda":
        total = torch.cuda.get_device_properties(loader.device).total_memory
        reserved = torch.cuda.memory_reserved(loader.device)
        peak = torch.cuda.max_memory_allocated(loader.device)
        found += (
            f"; of the GPU's {format_bytes(total)} this process has reserved "
            f"{format_bytes(reserved)}, for {format_bytes(peak)} of tensors at the peak"
        )
        if reserved > 1.05 * peak:  # the rest is in pieces that are too small
            remedies.append("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    remedies += [
        "shorten the sequences (--block_size; in extend.py --factor or --pose)",
        "share the model or its sequences between devices (docs/training.md)",
        "train a smaller model",
    ]
    return f"out of memory ({found}): {', or '.join(remedies)}"


def format_bytes(n):
    """Three digits in GB, or in MB where there is less than one."""
    return f"{n / 1e9:.3g} GB" if n >= 1e9 else f"{n / 1e6:.3g} MB"


def format_time(seconds):
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


def save(run, model, optimizers, state, cfg, dataset, dtype):
    """Save a checkpoint of this step; processes wait for each other."""
    rank, world = rank_and_world()
    folder = run / f"step-{state.step:06d}"
    if any_process(rank == 0 and folder.exists(), everywhere=True):
        # Saved when a signal cut the evaluation short: the weights are the same.
        if rank == 0:
            record = {"val_loss": state.val_loss, "best": state.best, "kept": state.kept}
            write_meta(folder, {**read_meta(folder), **record})
    elif rank == 0 or is_sharded(model):
        tokenizer = dataset.tokenizer.to_json() if dataset.tokenizer else None
        save_model(
            model,
            folder,
            optim=optimizer_tensors(model, optimizers),
            writes=rank == 0,
            **settings_record("train", cfg),
            step=state.step,
            val_loss=state.val_loss,
            best=state.best,
            kept=state.kept,
            tokens=state.tokens,
            scaler=[state.loss_scale, state.good_steps] if dtype == torch.float16 else None,
            dataset=cfg.dataset,
            data_hash=dataset.hash,
            kernels=state.kernels,
            entry_hash=entry_hash(type(model.pos)),
            bos=dataset.bos,
            tokenizer=model.meta.get("tokenizer") or tokenizer,
            launch=os.environ.get("TORCHELASTIC_RUN_ID"),
        )
    if rank == 0:
        prune(run, state.best, state.kept, finished=state.step >= cfg.max_iters)
    if world > 1:
        dist.barrier()


def gradients(model):
    """The gradients of all parameters. Raises UserError for a parameter that has none."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in grads.items():
        if grad is None:
            raise UserError(
                f"{name} gets no gradient: use it in the forward pass, or remove it (a "
                "--layer_pattern of N and S alone uses no scheme: give --pos=nope)"
            )
    return list(grads.values())


def describe_divergence(run, state, cfg, loss_sum, losses):
    """
    The error for a step whose loss or gradient is not finite.

    losses: of this process's micro-batches by index; the first bad one of all processes is named.
    """
    what = "gradient" if math.isfinite(loss_sum) else "loss"
    accumulation = cfg.gradient_accumulation_steps
    first, last = state.step * accumulation, (state.step + 1) * accumulation - 1
    bad = [index for index, loss in losses.items() if not loss.isfinite()]
    device = next(iter(losses.values())).device
    first_bad = torch.tensor(min(bad, default=last + 1), device=device)
    if dist.is_initialized():
        dist.all_reduce(first_bad, dist.ReduceOp.MIN)
    where = f"micro-batches {first} to {last}"
    if first_bad <= last:
        where += f", first of micro-batch {first_bad}"
    message = f"the {what} of step {state.step + 1} ({where}) is not finite"
    return FloatingPointError(f"{message}: {hint_after_divergence(run)}")


def hint_after_divergence(run):
    steps = list_steps(run)
    newest = f"the last checkpoint is {steps[-1]}" if steps else "there is no checkpoint yet"
    return (
        f"stopped before the update, and {newest}; try a lower --learning_rate, or check the data"
    )
