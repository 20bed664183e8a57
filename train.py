"""Train a GPT, on one process or many.

    python train.py --pos=rope          trains the demo's model on the built-in dataset
    python train.py config/shakespeare.toml --pos=learned
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2.toml --pos=alibi
    python train.py --out_dir=out/python-rope --init_from=resume

Read model.py first, extend.py next. The order here: settings, batches, validation, one step, the
loop, what happens before and after it. Batches are a function of (seed, step, micro-batch index),
so a run is the same on any number of processes, and one that was stopped resumes with the same
bits.
"""

from nanolong import python_version  # noqa: F401  # isort: skip

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

import data
import kernels
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli, devices, entry, optim, parallel, run, validate


@dataclass
class TrainConfig:
    # [data]
    # a folder with token files: a path, or a name under data/; long:0.34,short:0.66 mixes several
    dataset: str = "python"
    bos: bool | None = None  # start every sequence with <bos>; auto: on for datasets of bytes
    min_doc: int = 0  # train on documents of at least so many tokens only
    separate_docs: bool = False  # attention stays inside a document
    # synthetic documents as KIND:FRACTION of the sequences, such as niah:0.05,passkey:0.1
    tasks: tuple[str, ...] = ()
    # [optimisation]
    batch_size: int = 16  # sequences in a micro-batch of one process
    gradient_accumulation_steps: int = 1  # micro-batches in a step, over all processes
    max_iters: int = 1000  # training steps
    stop_at: int = 0  # end after this step, with the schedule of max_iters; 0: after the last step
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW the rest
    learning_rate: float = 3e-3  # peak learning rate, of both optimizers
    min_lr: float = 0.0  # final learning rate
    warmup_iters: int = 50  # steps of linear warmup
    # after the warmup; trapezoid: constant, then linear decay over the last 40 %
    lr_schedule: Literal["trapezoid", "cosine", "constant"] = "trapezoid"
    weight_decay: float = 0.1  # weight decay of matrices and embeddings
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # clip the norm of the gradients to this; 0: no clipping
    # [evaluation]
    eval_interval: int = 250  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 40  # batches of an evaluation, evenly spaced; 0: the whole validation set
    eval_length: int = 0  # tokens of a validation sequence; 0: the context length
    log_interval: int = 10  # steps between lines of log.jsonl
    wandb: str = ""  # also log to this Weights & Biases project
    # [system]
    # Python files, each with one scheme of your own, to use as --pos=<name of the file>
    entry: tuple[str, ...] = ()
    out_dir: str = ""  # the run folder; by default out/<dataset>-<pos>
    overwrite: bool = False  # rename the run in out_dir to NAME.old1, NAME.old2, ...
    # resume: go on from the newest checkpoint of out_dir
    init_from: Literal["scratch", "resume"] = "scratch"
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products; auto: bfloat16 if the hardware has it, else float16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # torch.compile, if it works; auto: on a GPU, and on a CPU in a run of 500 steps or more
    compile: bool | None = None
    checkpoint_activations: bool = False  # recompute blocks in the backward pass, to save memory
    # each process keeps the whole model (ddp), or its share of weights, gradients, moments (fsdp)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    sequence_parallel: int = 1  # processes that share every sequence, a part of its tokens each
    seed: int = 1337  # random seed of the initial weights, the batches and dropout

    def __post_init__(self):
        validate.check_train(self)

    @property
    def last_step(self):
        """The step after which this command ends; the schedule is that of max_iters."""
        return self.stop_at or self.max_iters


@dataclass
class TrainState:
    """The state of the loop, which a checkpoint keeps with the weights and moments."""

    step: int = 0
    tokens: int = 0  # seen so far
    best: list | None = None  # [step, val_loss]
    val_loss: float | None = None  # of this step; None: not evaluated yet
    loss_scale: float = 1.0  # float16 only
    good_steps: int = 0  # float16 only: steps since one overflowed
    kernels: str = ""  # what computes attention, in words


class BatchLoader:
    """The micro-batches of this process in order, each prepared by a thread while the one before it
    is computed.

    train_length: tokens of a sequence. max_position: position ids skip up to there, for PoSE
    (skip-wise training, see extend.py); 0: they do not skip.
    """

    def __init__(self, dataset, model, cfg, train_length, max_position, device, step):
        self.dataset = dataset
        self.model = model
        self.cfg = cfg
        self.train_length = train_length
        self.max_position = max_position
        self.device = device
        self.tasks = validate.task_fractions(cfg.tasks)
        self.tokens_per_step = cfg.gradient_accumulation_steps * cfg.batch_size * train_length
        # A mixture needs the loss of each token, to log that of each dataset. Its backward pass
        # reads the head's weight again, which fsdp has freed by then.
        by_token = dataset.labels and cfg.parallel != "fsdp"
        self.reduction = "none" if by_token else "sum"
        # processes take the micro-batches of a step in turn
        rank, self.world = parallel.data_rank_and_world()
        self.micro_batches = cfg.gradient_accumulation_steps // self.world  # own ones, of a step
        self.part = parallel.own_part(train_length)  # of a sequence's tokens, usually all
        self.index = step * cfg.gradient_accumulation_steps + rank
        self.executor = ThreadPoolExecutor(1)
        self.prefetch = self.executor.submit(self.prepare, self.index)

    def prepare(self, index):
        """Micro-batch `index`: arguments of the model by name, its scored tokens, and its seed."""
        cfg = self.cfg
        seed = ((cfg.seed << 40) + index) % (1 << 63)  # of dropout, and of random positions
        parts = self.dataset.batch(
            index, cfg.batch_size, self.train_length, cfg.seed, self.max_position, self.tasks
        )
        x, y, pos, docs = (None if part is None else torch.from_numpy(part) for part in parts)
        if pos is None:
            pos = self.model.sample_positions(len(x), self.train_length, seed)
        n_targets = int((y[:, self.part] >= 0).sum())
        batch = {"tokens": x, "targets": y, "positions": pos, "docs": docs}
        batch = {name: devices.to_device(part, self.device) for name, part in batch.items()}
        if pos is not None:  # checked here: on a GPU, each step would wait to read them
            self.model.check_positions(pos, docs)
        return batch, n_targets, seed

    def next(self):
        """The next micro-batch: (index, arguments of the model, scored tokens, seed)."""
        index = self.index
        batch, n_targets, seed = self.prefetch.result()
        self.index += self.world
        self.prefetch = self.executor.submit(self.prepare, self.index)
        return index, batch, n_targets, seed

    def wait(self):
        wait([self.prefetch])

    def close(self):
        self.executor.shutdown()


@torch.no_grad()
def estimate_loss(model, dataset, cfg, dtype, stop_signals=()):
    """The validation loss, over all processes; None if a stop signal came.

    Returns {"val_loss"} in nats per token, and {"val_bits_per_byte"} if the tokenizer is known; of
    a mixture the weighted mean, and {"val_loss_<name>"} of each dataset. Sequences do not overlap.
    eval_iters=n scores n * batch_size sequences, evenly spaced and always the same; 0 scores all.
    """
    if dataset.labels:
        args = (cfg, dtype, stop_signals)
        return dataset.combine(estimate_loss(model, part, *args) for part in dataset.sources)
    rank, world = parallel.data_rank_and_world()
    T = cfg.eval_length or model.config.block_size
    device = next(model.parameters()).device
    indices = dataset.val.spaced(cfg.eval_iters * cfg.batch_size, T)
    batches = [indices[i : i + cfg.batch_size] for i in range(0, len(indices), cfg.batch_size)]
    part = parallel.own_part(T)  # of a sequence's tokens, usually all
    _, n_parts = parallel.sequence_rank_and_size()
    sums = torch.zeros(4, dtype=torch.float64)  # loss, tokens, bytes of text, stop signals
    was_training = model.training
    model.eval()
    n_rounds = math.ceil(len(batches) / world)
    for number in range(rank, n_rounds * world, world):
        if parallel.any_process(stop_signals, everywhere=parallel.is_sharded(model)):
            sums[3] = 1
            break
        # In the last round some have no batch left. They compute one that does not count, since
        # fsdp needs all processes in every forward pass.
        batch = batches[number % len(batches)]
        sequences = [dataset.val.sequence(index, T) for index in batch]
        x, y = (torch.from_numpy(np.stack(column)) for column in zip(*sequences, strict=True))
        pos = model.sample_positions(len(x), T, batch[0])
        docs = devices.to_device(dataset.document_ids(x), device)
        # not `forward`: what is compiled whole would be compiled again, without gradients
        with devices.autocast(device, dtype):
            loss_sum = model(x.to(device), y.to(device), pos, docs, reduction="sum")
        n_targets = (y[:, part] >= 0).sum()
        n_bytes = (dataset.count_bytes(y.numpy()) or 0) / n_parts  # each process counts all of them
        if number < len(batches):
            sums += torch.tensor([loss_sum.item(), n_targets, n_bytes, 0], dtype=torch.float64)
    parallel.free_gathered(model)
    model.train(was_training)
    if dist.is_initialized():
        sums = sums.to(device)
        dist.all_reduce(sums)
    loss_sum, n_tokens, n_bytes, stopped = sums.tolist()
    if stopped:
        return None
    metrics = {"val_loss": loss_sum / n_tokens}
    if n_bytes:
        metrics["val_bits_per_byte"] = loss_sum / math.log(2) / n_bytes
    return metrics


# -----------------------------------------------------------------------------
# One step.


def forward_backward(forward, loader, state, dtype):
    """Forward and backward of this process's micro-batches of a step.

    Returns the sums of losses and of scored tokens, float64 (2,) on the device, of a mixture
    followed by those of each dataset, and the loss of each micro-batch by index.
    """
    device = loader.device
    _, n_processes = parallel.rank_and_world()
    float_type = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    sums = torch.zeros(2 + 2 * len(loader.dataset.labels), dtype=float_type, device=device)
    losses = {}
    for number in range(loader.micro_batches):
        index, batch, n_targets, seed = loader.next()
        torch.manual_seed(seed)  # dropout too is a function of (seed, index)
        # Gradients are summed over processes at the last micro-batch only.
        parallel.set_gradient_sync(forward, number == loader.micro_batches - 1)
        with devices.autocast(device, dtype):
            loss = forward(**batch, reduction=loader.reduction)
        loss_sum = loss.sum()
        # The mean loss if every target is scored. How many are is known only after the step, and
        # optimizer_step() corrects for it. DDP and FSDP average over processes, hence
        # `n_processes`.
        factor = state.loss_scale * n_processes / loader.tokens_per_step
        (loss_sum * factor).backward()
        losses[index] = loss_sum.detach()
        sums[0] += loss_sum.detach()
        sums[1] += n_targets
        if loader.reduction == "none":
            by_token = loss.detach().to(float_type)
            sums[2:] += run.sum_by_source(loader, index, by_token, batch["targets"])
    return sums, losses


def reduce_and_read(sums, stop_signals, grad_norm):
    """Sum over processes, and read (*sums, stop signals, gradient norm) on the host.

    This is the one device-to-host read of a step (a dynamic method reads PoSE's positions, too).
    """
    sums = torch.cat((sums, sums.new_full((1,), len(stop_signals))))
    if dist.is_initialized():
        dist.all_reduce(sums)
    return torch.cat((sums, grad_norm[None].to(sums))).tolist()


def optimizer_step(optimizers, grads, state, grad_norm, to_mean, cfg, dtype):
    """Clip the gradients, update the weights and clear the gradients.

    to_mean: the factor that makes the gradients those of the mean loss; grad_norm: their norm after
    that factor, and before clipping.
    """
    if math.isfinite(grad_norm):
        clip = min(1.0, cfg.grad_clip / (grad_norm + 1e-6)) if cfg.grad_clip else 1.0
        torch._foreach_mul_(grads, to_mean * clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optim.get_lr(cfg, state.step)
            optimizer.step()
        state.good_steps += 1
        if dtype == torch.float16 and state.good_steps % 2000 == 0:
            state.loss_scale *= 2
    else:  # float16 has overflowed: skip this update
        state.loss_scale /= 2
        state.good_steps = 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    grads.clear()  # or they would take memory until the next step has its own


def has_diverged(loss_sum, grad_norm, state, dtype):
    """Whether the step must not be taken; an overflow of float16 is only skipped."""
    if not math.isfinite(loss_sum):
        return True
    may_retry = dtype == torch.float16 and state.loss_scale > 1
    return not (math.isfinite(grad_norm) or may_retry)


# -----------------------------------------------------------------------------
# The loop.


def train(model: GPT, cfg: TrainConfig, train_length: int = 0, max_position: int = 0) -> dict:
    """Train in place, writing the run folder cfg.out_dir; a stop signal in the loop saves first.

    train_length: tokens of a sequence, by default the context length; max_position: of PoSE. To
    resume, the model must come from GPT.load(cfg.out_dir). Call it in every process of a group.
    Returns the last evaluation, "stopped" and "last_step". Raises UserError, and FloatingPointError
    before an update that is not finite.
    """
    device = devices.pick_device(cfg.device)
    dtype = devices.pick_dtype(cfg.dtype, device)
    train_length = train_length or model.config.block_size
    folder = Path(cfg.out_dir)
    state = TrainState()

    # the data, and the run folder, from which a resumed run fills in the state
    dataset = run.open_dataset(model, cfg, train_length)
    parallel.share_sequences(model, cfg.sequence_parallel, (train_length, cfg.eval_length))
    run.open_run(folder, model, cfg, state, dtype)

    # the model on the device, compiled, and wrapped for several processes
    devices.prepare_device(device, keep_freed_memory=cfg.parallel == "ddp")
    compiles, _ = devices.pick_compile(cfg.compile, device, cfg.max_iters)
    model.activation_checkpointing = cfg.checkpoint_activations
    forward = parallel.distribute(model.train(), cfg.parallel, device, compiles)
    optimizers = optim.make_optimizers(model, cfg)
    if run.goes_on(model, cfg):
        run.load_optimizers(model, optimizers, model.folder / "optim.safetensors")

    loader = BatchLoader(dataset, model, cfg, train_length, max_position, device, state.step)
    logger = None
    try:
        run.print_header(loader, dtype)
        # check the kernels on a part of the first micro-batch, before anything is compiled
        inputs, _, _ = loader.prefetch.result()
        state.kernels = kernels.check_kernels(model, inputs, devices.autocast(device, dtype))
        parallel.free_gathered(model)
        # an evaluation before the first step, which a stop signal ends as any program
        metrics = None
        if state.val_loss is None and is_due(state.step, cfg):
            metrics = estimate_loss(model, dataset, cfg, dtype)
        # from here on a stop signal finishes the step, and saves
        with run.catch_signals() as stop_signals:
            logger = run.begin_run(folder, state, loader)
            return fit(forward, optimizers, loader, state, metrics, stop_signals, logger, dtype)
    finally:
        run.release_run(folder, loader, logger)


def fit(forward, optimizers, loader, state, metrics, stop_signals, logger, dtype):
    """The loop: take steps until the last one or a stop signal, evaluate and save.

    metrics: of an evaluation before the first step, or None. Returns what train() returns.
    """
    model = loader.model
    cfg = loader.cfg
    folder = Path(cfg.out_dir)
    last_eval = {"step": state.step}
    if metrics:
        last_eval = run.record_evaluation(folder, state, metrics, logger)
        run.save(folder, model, optimizers, state, cfg, loader.dataset, dtype)
    stopped = False
    while not stopped and state.step < cfg.last_step:
        # forward and backward
        if logger:
            logger.start_step(state.tokens)
        sums, losses = forward_backward(forward, loader, state, dtype)
        grads = optim.gradients(model)
        grad_norm = parallel.gather(torch.nn.utils.get_total_norm(grads))
        loader.wait()  # the thread queues its copy before this process blocks on the device
        numbers = reduce_and_read(sums, stop_signals, grad_norm)
        loss_sum, n_targets, *of_sources, n_signals, grad_norm = numbers

        # clip and update; to_mean: divide by the scored targets, and undo the loss scale
        to_mean = loader.tokens_per_step / max(n_targets, 1) / state.loss_scale
        grad_norm *= to_mean
        if has_diverged(loss_sum, grad_norm, state, dtype):
            raise run.divergence_error(folder, state, cfg, loss_sum, losses)
        optimizer_step(optimizers, grads, state, grad_norm, to_mean, cfg, dtype)
        state.step += 1
        state.tokens += loader.tokens_per_step
        state.val_loss = None
        if logger:
            logger.step(state, loss_sum / max(n_targets, 1), grad_norm, of_sources)

        # evaluate and save; after a stop signal only save
        stopped = n_signals > 0
        metrics = None
        if is_due(state.step, cfg) and not stopped:
            metrics = estimate_loss(model, loader.dataset, cfg, dtype, stop_signals)
            stopped = metrics is None
        if metrics:
            last_eval = run.record_evaluation(folder, state, metrics, logger)
        if metrics or stopped:
            run.save(folder, model, optimizers, state, cfg, loader.dataset, dtype)
    return {**last_eval, "stopped": stopped, "last_step": state.step}


def is_due(step, cfg):
    """Whether the model is evaluated after this many steps."""
    return step % cfg.eval_interval == 0 or step == cfg.last_step


# -----------------------------------------------------------------------------
# Before and after the loop.


def run_defaults(given, paths):
    """The defaults that cli.parse() asks for: the run folder, and on resume all settings."""
    dataset = data.short_name(given.get("dataset", "python"))
    entry_names = [Path(file).stem for file in given.get("entry", ())]
    pos = given.get("pos") or (entry_names[-1] if entry_names else GPTConfig.pos)
    out_dir = given.get("out_dir") or f"out/{dataset}-{pos}"
    resumed = given.get("init_from") == "resume" or run.is_elastic_restart(out_dir)
    settings = {}
    if resumed and run.list_steps(out_dir):
        settings = run.saved_settings(run.list_steps(out_dir)[-1], GPTConfig, TrainConfig)
    elif given.get("entry"):
        settings = {"pos": pos}
    # the checkpoint's own init_from must not decide whether this command resumes
    return {**settings, "out_dir": out_dir, "init_from": "scratch"}


def train_and_sample(model, cfg, train_length=0, max_position=0):
    """Train, and print a sample from an empty prompt. Returns the exit status."""
    if run.is_finished(model, cfg):
        run.prune_finished_run(model, cfg)
        return 0
    try:
        result = train(model, cfg, train_length, max_position)
    except FloatingPointError as error:
        cli.print_error(error, on_every_rank=False)
        return 1
    if parallel.rank_and_world()[0] == 0:
        run.report_end(model, cfg, result["stopped"])
    return 0


def main(argv=None):
    args = cli.parse(
        model_config=GPTConfig,
        cfg=TrainConfig,
        about=__doc__,
        presets=True,
        defaults=run_defaults,
        argv=argv,
    )
    model_config, cfg = args.model_config, args.cfg
    entry.load_entries(cfg.entry, POSITIONS)
    parallel.join_processes(cfg.device)
    run.check_processes_agree(args.given, cfg, model_config)
    run.ignore_overwrite_of_preset(cfg, args.flags)
    model = run.load_resumed(GPT, cfg, model_config, args.given)
    if model is None:
        validate.check_model(model_config, POSITIONS)
        validate.check_scheme_flags(model_config.pos, args.flags, POSITIONS)
    run.prepare_dataset(cfg.dataset)
    if model is None:
        model_config.vocab_size = data.vocabulary_size(cfg.dataset)
        torch.manual_seed(cfg.seed)
        model = GPT(model_config)
    return train_and_sample(model, cfg)


if __name__ == "__main__":
    cli.run_main(main)
