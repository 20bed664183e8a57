"""Train a GPT, on one process or many.

    python train.py --pos=rope          trains the demo's model on the built-in dataset
    python train.py config/shakespeare.toml --pos=learned
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2.toml --pos=alibi
    python train.py --out_dir=out/python-rope --init_from=resume
    python train.py --init_from=out/python-rope --dataset=mine      from its weights, on other data

Read model.py first, extend.py next. The order here: settings, batches, validation, one step, the
loop, what happens before and after it. Batches are a function of (seed, step, micro-batch index),
so a run is the same on any number of processes, and one that was stopped resumes with the same
bits.
"""

from nanolong import python_version  # noqa: F401  # isort: skip

import importlib.util
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

import data
import kernels
from data.prepare import prepare_missing
from model import GPT, POSITIONS, GPTConfig
from nanolong import devices, entry, optim, parallel, progress, run, settings
from nanolong.errors import report, require, run_main


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
    eval_iters: int = 640  # sequences of an evaluation, evenly spaced; 0: the whole validation set
    eval_length: int = 0  # tokens of a validation sequence; 0: the context length
    log_interval: int = 10  # steps between lines of log.jsonl
    wandb: str = ""  # also log to this Weights & Biases project
    # [system]
    # Python files, each with one scheme of your own, to use as --pos=<name of the file>
    entry: tuple[str, ...] = ()
    out_dir: str = ""  # the run folder; by default out/<dataset>-<pos>
    overwrite: bool = False  # rename the run in out_dir to NAME.old1, NAME.old2, ...
    # scratch; resume: go on from the newest checkpoint of out_dir; auto: that if there is one;
    # or a run or checkpoint folder: start from its weights, with a new optimizer
    init_from: str = "scratch"
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products; auto: bfloat16 if the GPU has it, or the CPU has AMX, float16 on
    # other GPUs
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool | None = None  # torch.compile; auto: on a GPU, and on a CPU from 500 steps on
    checkpoint_activations: bool = False  # recompute blocks in the backward pass, to save memory
    # each process keeps the whole model (ddp), or its share of weights, gradients, moments (fsdp)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    sequence_parallel: int = 1  # processes that share every sequence, a part of its tokens each
    seed: int = 1337  # random seed of the initial weights, the batches and dropout

    def __post_init__(self):
        for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1")
        require(
            self.stop_at <= self.max_iters,
            f"--stop_at={self.stop_at} is beyond the last step: give at most {self.max_iters}, or "
            "raise --max_iters",
        )
        require(
            self.beta1 < 1 and self.beta2 < 1, "--beta1 and --beta2 must be below 1: 0.9 and 0.95"
        )
        data.task_fractions(self.tasks)

    @property
    def last_step(self):
        """The step after which this command ends; the schedule is that of max_iters."""
        return self.stop_at or self.max_iters

    @property
    def resumes(self):
        """Whether training goes on in the folder of the run."""
        return self.init_from == "resume"

    @property
    def continues(self):
        """Whether it goes on from a step and an optimizer: its own, or of extend.py's parent."""
        return self.resumes or getattr(self, "keep_optimizer", False)


@dataclass
class TrainState:
    """The state of the loop, which a checkpoint keeps with the weights and moments."""

    step: int = 0
    tokens: int = 0  # seen so far
    loss_scale: float = 1.0  # float16 only
    good_steps: int = 0  # float16 only: steps since one overflowed
    kernels: str = ""  # what computes attention, in words


# -----------------------------------------------------------------------------
# Batches and validation.


class Batches:
    """The micro-batches of this process in order; the next one is read while a GPU still computes.

    train_length: tokens of a sequence. max_position: position ids skip up to there, for PoSE
    (skip-wise training, see extend.py); 0: they do not skip.
    """

    def __init__(self, dataset, model, cfg, train_length, max_position, step):
        self.dataset = dataset
        self.model = model
        self.cfg = cfg
        self.train_length = train_length
        self.max_position = max_position
        self.tasks = data.task_fractions(cfg.tasks)
        self.device = next(model.parameters()).device
        n = cfg.gradient_accumulation_steps
        self.tokens_per_step = n * cfg.batch_size * train_length
        # processes take the micro-batches of a step in turn
        rank, self.world = parallel.data_rank_and_world()
        require(
            n % self.world == 0,
            f"--gradient_accumulation_steps={n} is the total, and {self.world} processes do not "
            f"divide it: give a multiple of {self.world}",
        )
        self.per_step = n // self.world  # own micro-batches
        self.index = step * n + rank
        self.ready = self.read(self.index)

    def read(self, index):
        """Micro-batch `index`: arguments of the model by name, its scored tokens, and its seed."""
        cfg = self.cfg
        seed = ((cfg.seed << 40) + index) % (1 << 63)  # of dropout, and of random positions
        parts = self.dataset.batch(
            index, cfg.batch_size, self.train_length, cfg.seed, self.max_position, self.tasks
        )
        x, y, pos, docs = (None if part is None else torch.from_numpy(part) for part in parts)
        if pos is None:
            pos = data.random_positions(self.model.config, len(x), self.train_length, seed)
        if pos is not None:  # checked here: on a GPU, each step would wait to read them
            self.model.check_positions(pos, docs)
        batch = parallel.own_part({"tokens": x, "targets": y, "positions": pos, "docs": docs})
        n_targets = int((batch["targets"].numpy() >= 0).sum())
        batch = {name: devices.to_device(part, self.device) for name, part in batch.items()}
        return batch, n_targets, seed

    def advance(self):
        self.index += self.world
        self.ready = self.read(self.index)


@torch.no_grad()
def estimate_loss(model, dataset, cfg, stop=()):
    """The validation loss, over all processes; None if a stop signal came.

    Returns {"val_loss"} in nats per token, and {"val_bits_per_byte"} if the tokenizer is known; of
    a mixture the weighted mean, and {"val_loss_<name>"} of each dataset. Sequences do not overlap.
    eval_iters=n scores n sequences, evenly spaced and always the same; 0 scores all.
    """
    if dataset.labels:
        return dataset.combine(estimate_loss(model, part, cfg, stop) for part in dataset.sources)
    rank, world = parallel.data_rank_and_world()
    _, n_parts = parallel.sequence_rank_and_size()
    T = cfg.eval_length or model.config.block_size
    device = next(model.parameters()).device
    indices = dataset.val.spaced(cfg.eval_iters, T)
    batches = [indices[i : i + cfg.batch_size] for i in range(0, len(indices), cfg.batch_size)]
    sums = torch.zeros(3, dtype=torch.float64)  # loss, tokens, bytes of text
    was_training = model.training
    model.eval()
    rounds = range(rank, math.ceil(len(batches) / world) * world, world)
    for number in progress.bar(rounds, "validation"):
        if parallel.any_process(stop):
            return None
        # In the last round some have no batch left. They compute one that does not count, since
        # fsdp needs all processes in every forward pass.
        batch = batches[number % len(batches)]
        sequences = [dataset.val.sequence(index, T) for index in batch]
        x, y = (torch.from_numpy(np.stack(column)) for column in zip(*sequences, strict=True))
        pos = data.random_positions(model.config, len(x), T, batch[0])
        docs = dataset.document_ids(x)
        inputs = parallel.own_part({"tokens": x, "targets": y, "positions": pos, "docs": docs})
        n_targets = (inputs["targets"] >= 0).sum()
        n_bytes = (dataset.count_bytes(y.numpy()) or 0) / n_parts  # each process counts all of them
        inputs = {name: devices.to_device(part, device) for name, part in inputs.items()}
        # not `forward`: what is compiled whole would be compiled again, without gradients
        with devices.autocast(device, getattr(torch, cfg.dtype)):
            loss_sum = model(**inputs, reduction="sum")
        if number < len(batches):
            sums += torch.tensor([loss_sum.item(), n_targets, n_bytes], dtype=torch.float64)
    parallel.reshard(model)
    model.train(was_training)
    if dist.is_initialized():
        sums = sums.to(device)
        dist.all_reduce(sums)
    loss_sum, n_tokens, n_bytes = sums.tolist()
    metrics = {"val_loss": loss_sum / n_tokens}
    if n_bytes:
        metrics["val_bits_per_byte"] = loss_sum / math.log(2) / n_bytes
    return metrics


# -----------------------------------------------------------------------------
# One step.


def forward_backward(forward, batches, state):
    """Forward and backward of this process's micro-batches of a step.

    Returns the sums of losses and of scored tokens over them, float64 (2,) on the device.
    """
    cfg, device = batches.cfg, batches.device
    _, n_processes = parallel.rank_and_world()
    float_type = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    sums = torch.zeros(2, dtype=float_type, device=device)
    for number in range(batches.per_step):
        batch, n_targets, seed = batches.ready
        torch.manual_seed(seed)  # dropout too is a function of (seed, index)
        # Gradients are summed over processes at the last micro-batch only.
        parallel.set_gradient_sync(forward, number == batches.per_step - 1)
        with devices.autocast(device, getattr(torch, cfg.dtype)):
            loss_sum = forward(**batch, reduction="sum")
        # The mean loss if every target is scored. How many are is known only after the step, and
        # optimizer_step() corrects for it. DDP and FSDP average over processes, hence
        # `n_processes`.
        factor = state.loss_scale * n_processes / batches.tokens_per_step
        (loss_sum * factor).backward()
        batches.advance()
        sums[0] += loss_sum.detach()
        sums[1] += n_targets
    return sums


def reduce_and_read(sums, stop, grad_norm):
    """Sum over processes, and read (loss, scored tokens, stop signals, gradient norm) on the host.

    This is the one device-to-host read of a step (a dynamic method reads PoSE's positions, too).
    """
    sums = torch.cat((sums, sums.new_tensor([bool(stop)])))
    if dist.is_initialized():
        dist.all_reduce(sums)
    return torch.cat((sums, grad_norm[None].to(sums))).tolist()


def optimizer_step(optimizers, grads, state, grad_norm, to_mean, cfg):
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
        if cfg.dtype == "float16" and state.good_steps % 2000 == 0:
            state.loss_scale *= 2
    else:  # float16 has overflowed: skip this update
        state.loss_scale /= 2
        state.good_steps = 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    grads.clear()  # or they would take memory until the next step has its own


def check_finite(what, cfg, *numbers):
    """Raise FloatingPointError if one of the numbers is not finite."""
    if all(map(math.isfinite, numbers)):
        return
    newest = [f"; the last checkpoint is {step}" for step in run.list_steps(cfg.out_dir)[-1:]]
    raise FloatingPointError(
        f"{what} is not finite: stopped before the update{''.join(newest)}; lower --learning_rate, "
        "or check the data"
    )


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
    train_length = train_length or model.config.block_size
    with run.lock(cfg.out_dir):
        # the data, what `auto` means, and how far training is
        cfg, dataset = prepare(model, cfg, train_length)
        parallel.share_sequences(
            cfg.sequence_parallel, model, (train_length, cfg.eval_length or model.config.block_size)
        )
        state = restore_state(model, cfg)

        # the model on the device, compiled, and wrapped for several processes
        devices.prepare_device(device)
        model.activation_checkpointing = cfg.checkpoint_activations
        forward = parallel.distribute(model.train(), cfg.parallel, device, cfg.compile)
        optimizers = optim.make_optimizers(model, cfg)
        if cfg.continues:
            run.load_optimizers(model, optimizers, model.folder)
        batches = Batches(dataset, model, cfg, train_length, max_position, state.step)
        progress.print_header(batches)
        # check the kernels on a part of the first micro-batch, before anything is compiled
        autocast = devices.autocast(device, getattr(torch, cfg.dtype))
        state.kernels = kernels.check_kernels(model, batches.ready[0], autocast)
        parallel.reshard(model)
        shown = progress.Progress(batches, state)
        try:
            # from here on a stop signal finishes the step, and saves
            with run.StopSignals() as stop:
                return fit(forward, optimizers, batches, state, stop, shown)
        finally:
            shown.close()
            parallel.stop_sharing(model)
            model.eval()


def fit(forward, optimizers, batches, state, stop, shown):
    """The loop: take steps until the last one or a stop signal, save and evaluate.

    Returns what train() returns.
    """
    model, cfg, dataset = batches.model, batches.cfg, batches.dataset
    last_eval = {"step": state.step}
    stopped = False
    is_saved = cfg.resumes
    is_evaluated = is_saved and parallel.broadcast(run.is_evaluated(cfg.out_dir, state.step))
    while True:
        # save, then evaluate; after a stop signal only save
        is_due = state.step % cfg.eval_interval == 0 or state.step == cfg.last_step
        if (is_due or stopped) and not is_saved:
            save(model, optimizers, state, cfg, dataset)
        if is_due and not (stopped or is_evaluated):
            metrics = estimate_loss(model, dataset, cfg, stop)
            stopped = metrics is None
            if metrics:
                check_finite(f"the validation loss at step {state.step}", cfg, metrics["val_loss"])
                last_eval = {"step": state.step, **metrics}
                shown.evaluation(state, metrics)
        if stopped or state.step >= cfg.last_step:
            return {**last_eval, "stopped": stopped, "last_step": state.step}
        is_saved = is_evaluated = False

        # forward and backward
        sums = forward_backward(forward, batches, state)
        grads = optim.gradients(model)
        grad_norm = torch.nn.utils.get_total_norm(grads)
        grad_norm = grad_norm.full_tensor() if parallel.is_sharded(grad_norm) else grad_norm
        loss_sum, n_targets, n_signals, grad_norm = reduce_and_read(sums, stop, grad_norm)
        stopped = n_signals > 0

        # clip and update; to_mean: divide by the scored targets, and undo the loss scale
        to_mean = batches.tokens_per_step / max(n_targets, 1) / state.loss_scale
        grad_norm *= to_mean
        overflowed = cfg.dtype == "float16" and state.loss_scale > 1  # is only skipped
        where = f"the loss {loss_sum / max(n_targets, 1):g} or gradient norm {grad_norm:g} of step"
        check_finite(f"{where} {state.step + 1}", cfg, loss_sum, 0 if overflowed else grad_norm)
        optimizer_step(optimizers, grads, state, grad_norm, to_mean, cfg)
        state.step += 1
        state.tokens += batches.tokens_per_step
        shown.step(state, loss_sum / max(n_targets, 1), grad_norm)


def save(model, optimizers, state, cfg, dataset):
    """Save a checkpoint of this step; processes wait for each other."""
    weights = dict(model.named_parameters())
    optim_tensors = run.optimizer_tensors(model, optimizers)
    if parallel.is_sharded(model):
        weights, optim_tensors = parallel.gather(weights), parallel.gather(optim_tensors)
    if parallel.rank_and_world()[0] == 0:
        tokenizer = dataset.tokenizer.to_json() if dataset.tokenizer else None
        run.save_model(
            model,
            Path(cfg.out_dir) / f"step-{state.step:06d}",
            weights=weights,
            optim=optim_tensors,
            **asdict(state),
            train=asdict(cfg),
            code=run.hash_code(model),
            dataset=cfg.dataset,
            data_hash=dataset.hash,
            bos=dataset.bos,
            tokenizer=model.meta.get("tokenizer") or tokenizer,
        )
        run.prune(cfg.out_dir)
    parallel.barrier()


# -----------------------------------------------------------------------------
# Before and after the loop.


def prepare(model, cfg, train_length):
    """Open the dataset, and decide what `auto` means. Returns (cfg, dataset). Raises UserError."""
    device = devices.pick_device(cfg.device)
    parallel.check_parallel(cfg.parallel, cfg.optimizer)
    require(
        not cfg.wandb or importlib.util.find_spec("wandb"),
        "--wandb needs the wandb package: pip install wandb, or leave --wandb out",
    )
    if not cfg.resumes and not cfg.overwrite:
        check_unused(cfg.out_dir)
    dataset = data.open_dataset(cfg.dataset, cfg.bos)
    dataset.check_model("the model", model.config.vocab_size, model.meta.get("tokenizer"))
    separate_docs = cfg.separate_docs
    if separate_docs is None:
        separate_docs = dataset.separator is not None
    dataset.select(cfg.min_doc, separate_docs)
    T, longest = cfg.eval_length, model.config.block_size
    require(T <= longest, f"--eval_length={T} is beyond the context length: give at most {longest}")
    for source in dataset.sources:
        source.train.require_length(train_length)
        source.val.require_length(T or longest)
    for kind in data.task_fractions(cfg.tasks):
        dataset.check_task(kind, train_length)
    require(
        not cfg.resumes or model.meta["data_hash"] in (None, dataset.hash),
        f"{cfg.dataset} is not the data of {cfg.out_dir} any more: restore its files",
    )
    dtype = str(devices.pick_dtype(cfg.dtype, device)).removeprefix("torch.")
    compiles = devices.pick_compile(cfg.compile, device, cfg.max_iters)
    dtype, compiles = parallel.broadcast((dtype, compiles))
    cfg = replace(cfg, dtype=dtype, compile=compiles, separate_docs=separate_docs)
    local = {"dataset", "device", "entry", "out_dir"}  # machines may have them elsewhere
    shared = {**asdict(model.config), **asdict(cfg), "torch": torch.__version__}
    shared = {name: value for name, value in shared.items() if name not in local}
    code = entry.hash_sources(cfg.entry)
    parallel.check_same((code, dataset.hash, run.weights_hash(model), shared))
    return cfg, dataset


def check_unused(out_dir):
    repairs = "give --init_from=resume, --overwrite or another --out_dir"
    require(not run.list_steps(out_dir), f"{out_dir} holds a run already: {repairs}")


def restore_state(model, cfg):
    """How far training is, from the model's checkpoint."""
    state = TrainState(loss_scale=65536.0 if cfg.dtype == "float16" else 1.0)
    if cfg.continues:
        # the model may be extended by now, and model.meta that of its new run
        meta = run.read_meta(model.folder)
        kept = ["step", "tokens"]
        if meta["train"].get("dtype") == cfg.dtype:
            kept += ["loss_scale", "good_steps"]
        state = replace(state, **{name: meta[name] for name in kept})
    return state


def run_defaults(given, paths):
    """The defaults that settings.parse() asks for: the run folder, and those of another run."""
    entries = [Path(file).stem for file in given.get("entry", ())]
    pos = given.get("pos") or (entries[-1] if entries else GPTConfig.pos)
    init_from = given.get("init_from", "scratch")
    meta = {}
    if init_from not in ("scratch", "resume", "auto"):
        meta = run.read_meta(run.find_checkpoint(init_from))
        pos = meta["config"]["pos"]
    dataset = data.short_name(given.get("dataset", TrainConfig.dataset))
    out_dir = given.get("out_dir") or f"out/{dataset}-{pos}"
    require(
        not (Path(out_dir) / "meta.json").is_file(),
        f"{out_dir} is a checkpoint: give its run folder, --out_dir={Path(out_dir).parent}",
    )
    steps = run.list_steps(out_dir)
    if init_from == "auto":
        init_from = given["init_from"] = "resume" if steps else "scratch"
    if init_from == "resume":
        require(steps, f"there is no checkpoint in {out_dir} to resume: leave --init_from out")
        meta = run.read_meta(steps[-1])
    saved = run_settings(meta, given) if init_from == "resume" else {}
    return {"pos": pos, **meta.get("config", {}), **saved, "out_dir": out_dir}


def run_settings(meta, given):
    """The training settings of a run to resume, without those of one command."""
    trained = meta.get("train")
    require(trained, "the run was not written by training: give --init_from=RUN, or extend.py")
    require("method" not in trained, "the run was written by extend.py: resume it by extend.py")
    return {**trained, "stop_at": 0, "overwrite": False, "entry": ()}


def make_model(args):
    """The model to train: a new one, or that of a checkpoint. Raises UserError."""
    cfg, config = args.cfg, args.model_config
    for source in data.split_mixture(cfg.dataset):
        if parallel.rank_and_world()[0] == 0:
            prepare_missing(source)
    parallel.barrier()
    # with fsdp the others get their rows from the first process
    weights = cfg.parallel == "ddp" or parallel.rank_and_world()[0] == 0
    if cfg.init_from != "scratch":
        model = GPT.load(cfg.out_dir if cfg.resumes else cfg.init_from, weights=weights)
        check_model_settings(model, args)
        if not cfg.resumes:
            kept = {name: model.meta.get(name) for name in ("tokenizer", "bos", "family")}
            model.meta = {**kept, "parent": str(model.folder)}
        return model
    check_scheme_flags(config.pos, args.flags)
    config.vocab_size = data.vocabulary_size(cfg.dataset)
    torch.manual_seed(cfg.seed)
    return GPT(config) if weights else parallel.build_without_weights(GPT, config)


def check_model_settings(model, args):
    """Refuse a given setting of the model that the checkpoint has otherwise."""
    for name in sorted(args.given & vars(args.model_config).keys()):
        asked, saved = getattr(args.model_config, name), getattr(model.config, name)
        require(
            asked == saved, f"{model.folder} has {name}={saved}, not {asked}: leave --{name} out"
        )


def check_scheme_flags(pos, flags):
    """Refuse flags that the position scheme does not read. A scheme of the user's may read any."""
    of_rope = {"rope_base", "rope_fraction", "rope_local_base", "p_rope"} & flags
    scheme = POSITIONS.get(pos, POSITIONS["rope"])
    is_ours = scheme.__module__ == POSITIONS["nope"].__module__
    require(
        not (of_rope and is_ours) or issubclass(scheme, POSITIONS["rope"]),
        f"--{', --'.join(sorted(of_rope))} is a setting of rope, and --pos={pos} has none: leave "
        "it out",
    )


def check_schedule(cfg, flags):
    """Refuse flags of a schedule that the run would never reach; a default may be beyond it."""
    warmup, last = cfg.warmup_iters, cfg.max_iters
    require(
        "warmup_iters" not in flags or not last or warmup <= last,
        f"--warmup_iters={warmup} is beyond the run: give at most {last}",
    )
    require(
        not {"min_lr", "learning_rate"} & flags or cfg.min_lr <= cfg.learning_rate,
        f"--min_lr={cfg.min_lr:g} is above learning_rate={cfg.learning_rate:g}: lower it",
    )


def train_and_sample(model, cfg, train_length=0, max_position=0):
    """Train, and print a sample from an empty prompt. Returns the exit status."""
    if cfg.resumes and cfg.max_iters and model.meta["step"] >= cfg.last_step:
        if run.is_evaluated(cfg.out_dir, model.meta["step"]):
            setting = "raise --stop_at or leave it out" if cfg.stop_at else "raise --max_iters"
            print(f"{model.folder} is finished: to train on, {setting}")
            return 0
    try:
        result = train(model, cfg, train_length, max_position)
    except FloatingPointError as error:
        return report(error, on_every_rank=False, status=1)
    if parallel.rank_and_world()[0] == 0:
        progress.report_end(GPT, cfg, result["stopped"])
    return 0


def main(argv=None):
    args = settings.parse(model_config=GPTConfig, cfg=TrainConfig, defaults=run_defaults, argv=argv)
    check_schedule(args.cfg, args.flags)
    entry.load_entries(args.cfg.entry, POSITIONS)
    parallel.join_processes(devices.pick_device(args.cfg.device))
    with run.lock(args.cfg.out_dir):
        return train_and_sample(make_model(args), args.cfg)


if __name__ == "__main__":
    run_main(main)
