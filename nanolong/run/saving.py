"""Save a step of training, say what to do when it diverges, and what the end of it is."""

import math
import os
import shlex

import torch
import torch.distributed as dist

import data
from nanolong import curves, devices
from nanolong.entry import entry_hash
from nanolong.parallel.processes import rank_and_world
from nanolong.parallel.sequence import any_process
from nanolong.parallel.sharding import is_sharded
from nanolong.run.checkpoint import (
    find_checkpoint,
    optimizer_tensors,
    read_meta,
    save_model,
    settings_record,
    write_meta,
)
from nanolong.run.folder import list_steps, prune


def save(run, model, optimizers, state, cfg, dataset, dtype):
    """Save a checkpoint of this step; processes wait for each other."""
    rank, world = rank_and_world()
    folder = run / f"step-{state.step:06d}"
    if any_process(rank == 0 and folder.exists(), everywhere=True):
        # Saved when a signal cut the evaluation short: the weights are the same.
        if rank == 0:
            record = {"val_loss": state.val_loss, "best": state.best}
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
        prune(run, state.best)
    if world > 1:
        dist.barrier()


def record_evaluation(folder, state, metrics, logger):
    """Put an evaluation into the state and the log. Returns it with its step."""
    val_loss = metrics["val_loss"]
    if not math.isfinite(val_loss):
        raise not_finite(f"the validation loss at step {state.step} is {val_loss}", folder)
    if state.best is None or val_loss < state.best[1]:
        state.best = [state.step, val_loss]
    state.val_loss = val_loss
    if logger:
        logger.evaluation(state.step, metrics)
    return {"step": state.step, **metrics}


def divergence_error(run, state, cfg, loss_sum, losses):
    """The error for a step whose loss or gradient is not finite.

    losses: of this process's micro-batches by index; the first bad one of all processes is named.
    """
    what = "gradient" if math.isfinite(loss_sum) else "loss"
    n = cfg.gradient_accumulation_steps
    first, last = state.step * n, (state.step + 1) * n - 1
    bad = [index for index, loss in losses.items() if not loss.isfinite()]
    device = next(iter(losses.values())).device
    first_bad = torch.tensor(min(bad, default=last + 1), device=device)
    if dist.is_initialized():
        dist.all_reduce(first_bad, dist.ReduceOp.MIN)
    where = f"micro-batches {first} to {last}"
    if first_bad <= last:
        where += f", first of micro-batch {first_bad}"
    return not_finite(f"the {what} of step {state.step + 1} ({where}) is not finite", run)


def not_finite(what, run):
    """The error that ends a run, with what to do."""
    steps = list_steps(run)
    newest = f"the last checkpoint is {steps[-1]}" if steps else "there is no checkpoint yet"
    repair = "try a lower --learning_rate, or check the data"
    return FloatingPointError(f"{what}: stopped before the update, and {newest}; {repair}")


def report_end(model, cfg, stopped):
    """Print where the run was saved; if it is complete, plot its losses and print a sample."""
    folder = find_checkpoint(cfg.out_dir)
    if stopped:
        print(f"stopped and saved {folder}: resume with the same command and --init_from=resume")
        return
    print(f"saved {folder}; sample from it with python sample.py {shlex.quote(cfg.out_dir)}")
    if cfg.last_step < cfg.max_iters:
        ways = "--init_from=resume, or at another length with extend.py --keep_optimizer=true"
        print(f"step {cfg.last_step} of {cfg.max_iters}: go on with {ways}")
    if cfg.max_iters:
        curves.plot_finished_run(cfg.out_dir)
    meta = read_meta(folder)
    tokenizer = data.tokenizer_from_json(meta.get("tokenizer"))
    if not (cfg.max_iters and tokenizer):
        return
    print("a sample:\n")
    if is_sharded(model):  # which needs all processes
        model = type(model).load(folder).to(devices.pick_device(cfg.device))
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(cfg.seed)
    prompt = torch.tensor([data.encode_prompt(tokenizer, meta.get("bos"), "")], device=device)
    n = min(300, model.config.block_size)
    tokens = model.generate(prompt, n, temperature=0.8, top_k=200, generator=generator)
    for text in data.decode_stream((token.item() for token in tokens), tokenizer):
        print(text, end="", flush=True)
    print()
