"""Before the first step: check the kernels, compile, and say what a step costs."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

import kernels
from nanolong import cli
from nanolong.devices import autocast, pick_compile, synchronize
from nanolong.errors import LocalError
from nanolong.memory import count_memory
from nanolong.parallel.processes import rank_and_world
from nanolong.parallel.sharding import free_gathered, is_sharded, needs_trial_sum, set_gradient_sync
from nanolong.run.logger import print_header, report

# Floating-point operations a second in training, to tell steps that take seconds from others.
EXPECTED_SPEED = {"cpu": 1e11, "mps": 2e12, "cuda": 2e14}
EXPENSIVE_STEP = 1.0  # seconds; what such a step costs is printed before the first one


def check_and_compile(forward, optimizers, loader, state, dtype):
    """Before the first step, check the kernels and compile the passes that it needs.

    Prints what a step costs, if it is expensive or the device is a GPU. Model, gradients and data
    are afterwards as they were; verdicts on kernels and compiled graphs stay.
    """
    if dist.is_initialized():
        dist.barrier()  # all processes watch for signals before the first one says that it trains
    print_header(loader, dtype)
    state.kernels = check_kernels(loader, dtype)
    cfg = loader.cfg
    if state.step >= cfg.last_step:
        return
    compiles, _ = pick_compile(cfg.compile, loader.device, cfg.max_iters)
    measures_step = loader.device.type == "cuda" or expected_seconds(loader) > EXPENSIVE_STEP
    if measures_step:
        estimate = f"{estimate_memory(loader, dtype)} of tensors, estimated from shapes"
        report(f"memory of a step: {estimate} without torch.compile")
    # the first batch compiles kernels
    if compiles or (measures_step and loader.device.type != "cpu"):
        try_batch(forward, loader, dtype)
    if measures_step:
        measured = measure_batch(forward, optimizers, loader, dtype)
        report(describe_step(loader, *measured, cfg.last_step - state.step))
    if needs_trial_sum(forward):
        try_batch(forward, loader, dtype, sync=True)


def check_kernels(loader, dtype):
    """Check the kernels that training needs, before anything is compiled: the verdict, for the log.

    A kernel that has failed in one process is replaced by plain PyTorch in all of them.
    """
    device = next(loader.model.parameters()).device
    on_triton = kernels.triton_runs(device)
    if on_triton:
        # Call each kernel once. A forward pass is enough: a check includes the gradients.
        batch, _, _ = loader.prefetch.result()
        inputs = {name: batch[name] for name in ("tokens", "positions", "docs")}
        inputs = {name: part[:1, :16] for name, part in inputs.items() if part is not None}
        with autocast(loader.device, dtype):
            loader.model(**inputs)
        free_gathered(loader.model)
    kernels.first_call.share_faults(device)
    return kernels.first_call.describe(device) if on_triton else "plain PyTorch"


def expected_seconds(loader):
    """Roughly what a step takes, from its floating-point operations."""
    flops = loader.tokens_per_step * loader.model.flops_per_token(loader.train_length)
    return flops / rank_and_world()[1] / EXPECTED_SPEED[loader.device.type]


def try_batch(forward, loader, dtype, sync=False, keep_gradients=False):
    """Forward and backward of the next micro-batch, which stays the next, without any effect.

    sync: sum the gradients over the processes, all of which then take part. keep_gradients: for
    the next call to add to, as in a step of several micro-batches.
    The random state is not kept: every micro-batch of a step sets it by its own seed.
    """
    batch, _, _ = loader.prefetch.result()
    # in shards gradients are always summed, or the next step would have those of this batch
    set_gradient_sync(forward, sync or is_sharded(forward) and not keep_gradients)
    with autocast(loader.device, dtype):
        loss_sum = forward(**batch, reduction=loader.reduction).sum()
    loss_sum.backward()
    if not keep_gradients:
        forward.zero_grad(set_to_none=True)


def measure_batch(forward, optimizers, loader, dtype):
    """Measure a micro-batch: its seconds, and with CUDA the peak bytes of tensors and reserved.

    With CUDA, all that a later step finds in memory is there: tensors like the moments that the
    optimizers make in their first step, and the gradients of the micro-batches before.
    """
    loader.wait()
    device = loader.device
    is_cuda = device.type == "cuda"
    moments = tensors_like_new_moments(optimizers) if is_cuda else []
    if is_cuda and loader.micro_batches > 1:
        try_batch(forward, loader, dtype, keep_gradients=True)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    start = time.perf_counter()
    try_batch(forward, loader, dtype)
    synchronize(device)
    seconds = time.perf_counter() - start
    del moments
    if not is_cuda:
        return seconds, 0, 0
    return seconds, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def tensors_like_new_moments(optimizers):
    """Tensors of the sizes of the moments that the optimizers do not have yet."""
    tensors = []
    for optimizer in optimizers:
        n_moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p not in optimizer.state]
            tensors += [torch.empty_like(p) for p in new for _ in range(n_moments)]
    return tensors


def estimate_memory(loader, dtype):
    """The bytes of tensors of a process in a step, in words; counted for the eager model."""
    cfg = loader.cfg
    memory = count_memory(
        loader.model,
        cfg.batch_size,
        loader.train_length // cfg.sequence_parallel,
        "float32" if dtype == torch.float32 else "bfloat16",
        cfg.checkpoint_activations,
        cfg.optimizer,
        loader.device.type,
        loader.micro_batches,
        rank_and_world()[1] if cfg.parallel == "fsdp" else 1,
        cfg.sequence_parallel,
    )
    return format_bytes(memory.peak)


def describe_step(loader, seconds, peak, reserved, n_steps):
    """One line: the tokens, time and measured memory of a step, and the time of all that are left.

    seconds, peak, reserved: of one micro-batch, by measure_batch().
    """
    n = loader.micro_batches
    steps = "1 step" if n_steps == 1 else f"{n_steps:,} steps"
    batches = "1 micro-batch" if n == 1 else f"{n} micro-batches"
    memory = ""
    if peak:
        memory = (
            f"; {format_bytes(peak)} of tensors at the peak (measured), {format_bytes(reserved)} "
            "reserved so far"
        )
    return (
        f"a step: {loader.tokens_per_step:,} tokens, about {format_time(n * seconds)} "
        f"({batches} of {seconds:.2g} s, measured){memory}; {steps}: "
        f"{format_time(n_steps * n * seconds)}, evaluations apart"
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
    found = f"a step was estimated to take {estimate_memory(loader, dtype)} of tensors"
    remedies = ["shorten the sequences (--block_size; in extend.py --factor or --pose)"]
    if cfg.batch_size > 1:
        remedies.append("lower --batch_size (more --gradient_accumulation_steps keep the batch)")
    if not cfg.checkpoint_activations:
        remedies.append("give --checkpoint_activations=true")
    if loader.device.type == "cuda":
        reserved = torch.cuda.memory_reserved(loader.device)
        peak = torch.cuda.max_memory_allocated(loader.device)
        found += f"; {format_bytes(peak)} were, of {format_bytes(reserved)} reserved"
        if reserved > 1.05 * peak:  # the rest is in pieces that are too small
            remedies.append("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    remedies.append("share the model or its sequences between devices (docs/training.md)")
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
