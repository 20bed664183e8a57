"""Train a GPT, on one process or many.

    python train.py --pos=rope          trains the default model on the built-in dataset
    python train.py config/shakespeare.toml --pos=learned
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2.toml --pos=alibi
    python train.py --out_dir=out/python-rope --init_from=resume
    python train.py --init_from=out/python-rope --dataset=mine      from its weights, on other data

A sequence is a function of (seed, its number in the run), so a run is the same on any number of
processes, and a stopped run resumes with the same bits.
"""
# Read model.py first, extend.py next. The order here: settings, batches, validation, one step, the
# loop, main. At most 580 lines.

from nanolong import settings  # isort: skip (first: it refuses an old Python)
import importlib.util
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import data
import kernels
from kernels import check, torch_private
from model import GPT, POSITIONS, SINKS_AND_DOCS, GPTConfig
from nanolong import devices, entry, optim, parallel, progress, run
from nanolong.errors import note, report, require, run_main


@dataclass
class TrainConfig:
    # [data]
    # a folder with token files: a path, or a name under data/. long:0.34,short:0.66 mixes several
    dataset: str = "python"
    bos: bool | None = None  # start every sequence with <bos> (auto: as the parent or tokenizer)
    min_doc: int = 0  # train on documents of at least so many tokens only
    separate_docs: bool = False  # attention stays inside a document
    # [optimisation]
    batch_size: int = 16  # sequences in a micro-batch of one process
    gradient_accumulation_steps: int = 1  # micro-batches in a step, over all processes
    max_iters: int = 1000  # training steps
    stop_at: int = 0  # end after this step, with the schedule of max_iters (0: after the last step)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW the rest
    learning_rate: float = 3e-3  # peak learning rate
    min_lr: float = 0.0  # final learning rate
    warmup_iters: int = 50  # steps of linear warmup
    # after the warmup. trapezoid: constant, then linear decay over the last 40 %
    lr_schedule: Literal["trapezoid", "cosine", "constant"] = "trapezoid"
    weight_decay: float = 0.1  # weight decay of matrices and embeddings
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # clip the norm of the gradients to this (0: no clipping)
    # [evaluation]
    eval_interval: int = 250  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 640  # sequences of an evaluation, evenly spaced (0: the whole validation set)
    eval_length: int = 0  # tokens of a validation sequence (0: the context length)
    log_interval: int = 10  # steps between lines of log.jsonl
    wandb: str = ""  # also log to this Weights & Biases project
    # [system]
    # Python files, each with a scheme of your own, to use as --pos=<name of the file>
    entry: tuple[str, ...] = ()
    out_dir: str = ""  # the run folder, by default out/<dataset>-<pos>
    overwrite: bool = False  # rename the run in out_dir to NAME.old1, NAME.old2, ...
    # scratch, or resume: continue from the newest checkpoint of out_dir, or auto: resume if out_dir
    # has a checkpoint, or a run or checkpoint folder: start from its weights, with a new optimizer
    init_from: str = "scratch"
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products (auto: bfloat16 if the GPU has it, or the CPU has AMX, float16 on
    # other GPUs)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool | None = None  # torch.compile (auto: on a GPU, and on a CPU in a long run)
    # the same bits at every run. false is faster: on a GPU PyTorch's SDPA then computes attention
    # without a bias, gates, documents or a window
    deterministic: bool = True
    checkpoint_activations: bool = False  # recompute blocks in the backward pass, to save memory
    seed: int = 1337  # random seed of the initial weights, the batches and dropout

    def __post_init__(self):
        settings.check(self)
        for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1")
        require(self.stop_at <= self.max_iters, "--stop_at is beyond --max_iters: lower it")
        require(max(self.beta1, self.beta2) < 1, "--beta1 and --beta2 must be below 1")
        installed = not self.wandb or importlib.util.find_spec("wandb")
        require(installed, "--wandb needs its package: pip install wandb, or leave it out")

    @property
    def last_step(self):
        """The step after which this command ends. The schedule ends at max_iters."""
        return self.stop_at or self.max_iters

    @property
    def resumes(self):
        """Whether training continues in the folder of its run, instead of a new folder."""
        return self.init_from == "resume"

    @property
    def continues(self):
        """Whether training continues from the checkpoint's step, with its optimizer."""
        return self.resumes


@dataclass
class TrainState:
    """The state of the loop. A checkpoint keeps it with the weights and moments."""

    step: int = 0
    sequences: int = 0  # seen so far, and the number of the next sequence
    tokens: int = 0  # seen so far
    loss_scale: float = 1.0  # float16 only
    good_steps: int = 0  # float16 only: steps since the last overflow
    kernels: str = ""  # implementation of attention, in words


# -----------------------------------------------------------------------------
# Batches and validation.


def open_dataset(model, cfg, train_length):
    """Return the data of cfg.dataset. Raises UserError if the model cannot read it, or it is too
    short.
    """
    dataset = data.open_dataset(cfg.dataset, cfg.bos)
    dataset.check_model("the model", model.config.vocab_size, model.meta.get("tokenizer"))
    separate = cfg.separate_docs
    if model.config.sinks:
        require(not separate, SINKS_AND_DOCS)
        if separate is None:
            note("attention sinks are the first tokens of the text: --separate_docs=false is used")
        separate = False
    dataset.select(cfg.min_doc, separate)
    for source in dataset.sources:
        source.train.require_length(train_length)
        source.val.require_length(cfg.eval_length or model.config.block_size)
    return dataset


def text_meta(meta, dataset):
    """Return what a checkpoint keeps about its text, added to meta: what it knew before counts."""
    own = dataset.tokenizer
    tokenizer = meta.get("tokenizer") or (own and own.to_json())
    ends = meta.get("ends") or (own.ends if own else [])
    tasks = sorted(dataset.tasks.union(meta.get("tasks", ())))
    return {**meta, "tokenizer": tokenizer, "bos": dataset.bos, "ends": ends, "tasks": tasks}


class Batches:
    """The micro-batches of this process in order. The next is read while a GPU still computes.

    train_length: tokens of a sequence. max_position: position ids skip up to there, for PoSE
    (skip-wise training, see extend.py, 0: no skips). first: number of the first sequence.
    """

    def __init__(self, dataset, model, cfg, train_length, max_position, first):
        self.dataset = dataset
        self.model = model
        self.cfg = cfg
        self.train_length = train_length
        self.max_position = max_position
        self.device = next(model.parameters()).device
        n = cfg.gradient_accumulation_steps
        self.sequences_per_step = n * cfg.batch_size
        self.tokens_per_step = self.sequences_per_step * train_length
        # Allocate what all blocks keep once, because too large a batch then fails here with our
        # message. Later the system would end the process without a message.
        size = (len(model.blocks), cfg.batch_size, train_length)
        torch.empty(*size, model.config.n_embd, device=self.device)
        # processes take the micro-batches of a step in turn
        rank, self.world = parallel.rank_and_world()
        divides = n % self.world == 0
        require(divides, f"--gradient_accumulation_steps must be a multiple of {self.world}")
        self.per_step = n // self.world  # own micro-batches
        self.first = first + rank * cfg.batch_size
        self.ready = self.read(self.first)

    def read(self, first):
        """A micro-batch: arguments of the model by name, its scored tokens, and its seed."""
        cfg = self.cfg
        seed = ((cfg.seed << 40) + first) % (1 << 63)  # shifted, because seeds must not overlap
        parts = self.dataset.batch(
            first, cfg.batch_size, self.train_length, cfg.seed, self.max_position
        )
        x, y, pos, docs = (None if part is None else torch.from_numpy(part) for part in parts)
        # Check here, because on a GPU each step would wait to read them.
        if pos is not None:
            self.model.check_positions(pos, docs)
        return *model_inputs(x, y, pos, docs, self.device), seed

    def advance(self):
        self.first += self.world * self.cfg.batch_size
        self.ready = self.read(self.first)


def model_inputs(x, y, pos, docs, device):
    """Move a batch to the device, as keyword arguments of the model, and count scored targets."""
    inputs = {"tokens": x, "targets": y, "positions": pos, "docs": docs}
    n_targets = int((y.numpy() >= 0).sum())
    return {name: devices.to_device(part, device) for name, part in inputs.items()}, n_targets


@torch.no_grad()
def estimate_loss(model, dataset, cfg, stop=()):
    """Return the validation loss over all processes by name, or None if a stop signal came.

    val_loss: nats per token. val_bits_per_byte: for targets that stand for bytes, if the tokenizer
    is known. val_loss_NAME: of each dataset of a mixture, which counts as a text with its fractions
    of tokens. eval_iters=n scores n sequences, evenly spaced and always the same, and 0 scores all.
    """
    sums = [sum_losses(model, source, cfg, stop) for source in dataset.sources]
    return None if None in sums else dataset.combine(sums)


def sum_losses(model, dataset, cfg, stop):
    """Return the Sums of the validation sequences over all processes, None at a stop signal."""
    rank, world = parallel.rank_and_world()
    T = cfg.eval_length or model.config.block_size
    device = next(model.parameters()).device
    indices = dataset.val.spaced(cfg.eval_iters, T)
    batches = [indices[i : i + cfg.batch_size] for i in range(0, len(indices), cfg.batch_size)]
    sums = torch.zeros(4, dtype=torch.float64)
    was_training = model.training
    model.eval()
    rounds = progress.Rounds(range(rank, math.ceil(len(batches) / world) * world, world))
    for number in rounds:
        if parallel.any_process(stop):
            return None
        if number >= len(batches):  # no break, because the last round has a batch for some only
            continue
        batch = batches[number]
        sequences = [dataset.val.sequence(index, T) for index in batch]
        x, y = (torch.from_numpy(np.stack(column)) for column in zip(*sequences, strict=True))
        inputs, n_targets = model_inputs(x, y, None, dataset.document_ids(x), device)
        ids = [inputs[name].cpu().numpy() for name in ("tokens", "targets")]
        n_bytes = dataset.count_bytes(*ids)  # None: unknown
        # not the compiled model, because it would be compiled again, without gradients
        autocast = devices.autocast(device, getattr(torch, cfg.dtype))
        with run.leave_early(model, stop), autocast:
            losses = model(**inputs, reduction="none").cpu().double().numpy()
        if stop:  # no return, because the processes give up together
            continue
        batch_sums = data.Sums(n_targets, losses.sum(), 0, 0)
        if n_bytes is not None:
            text_loss = losses[dataset.is_text(ids[1])].sum()
            batch_sums = batch_sums._replace(text_loss=text_loss, n_bytes=n_bytes.sum())
        sums += torch.tensor(batch_sums, dtype=torch.float64)
        rounds.show_loss(sums)
    if parallel.any_process(stop):
        return None
    model.train(was_training)
    return data.Sums(*parallel.sum_over_processes(sums).tolist())


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
        inputs, n_targets, seed = batches.ready
        torch.manual_seed(seed)  # because dropout is a function of the sequence's number
        # Sum over processes at the last micro-batch only, because gradients add up before.
        parallel.set_gradient_sync(forward, number == batches.per_step - 1)
        with devices.autocast(device, getattr(torch, cfg.dtype)):
            loss_sum = forward(**inputs, reduction="sum")
        # Divide by all tokens of the step, because the number of scored targets is known only after
        # it: update() corrects. DDP averages over processes, so multiply by their number.
        factor = state.loss_scale * n_processes / batches.tokens_per_step
        (loss_sum * factor).backward()
        batches.advance()
        sums[0] += loss_sum.detach()
        sums[1] += n_targets
    return sums


def update(optimizers, grads, grad_norm, to_mean, state, cfg):
    """Clip the gradients, update the weights and clear the gradients.

    to_mean: factor that turns the gradients into the mean loss's. grad_norm: norm of the gradients
    after that factor, and before clipping.
    """
    if math.isfinite(grad_norm):
        clip = min(1.0, cfg.grad_clip / (grad_norm + 1e-6)) if cfg.grad_clip else 1.0
        torch_private.multiply_each(grads, to_mean * clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optim.get_lr(cfg, state.step)
            optim.take_step(optimizer)
        state.good_steps += 1
        if cfg.dtype == "float16" and state.good_steps % 2000 == 0:
            state.loss_scale *= 2
    else:  # float16 has overflowed: skip this update
        state.loss_scale /= 2
        state.good_steps = 0
    for optimizer in optimizers:
        optimizer.zero_grad()


def check_finite(what, cfg, step, *numbers):
    """Raise FloatingPointError if a number is not finite, after so many steps."""
    if all(map(math.isfinite, numbers)):
        return
    if step == 0:  # because a user's scheme, or weights from elsewhere, may be wrong
        problem = f"{what} is not finite, before any training"
        raise FloatingPointError(f"{problem}: check the scheme, the weights and the data")
    raise FloatingPointError(
        f"{what} is not finite: stopped before the update; go on from the last checkpoint in "
        f"{cfg.out_dir} with a lower --learning_rate, or check the data"
    )


# -----------------------------------------------------------------------------
# The loop.


def train(model: GPT, cfg: TrainConfig, train_length=0, max_position=0) -> dict:
    """Train in place, writing the run folder cfg.out_dir. A stop signal in the loop saves first.

    train_length: tokens of a sequence, by default the context length. max_position: PoSE's.
    To resume, the model must come from GPT.load(cfg.out_dir). Call it in every process of a group.
    Returns the last evaluation, "stopped", "last_step" and "seconds". Raises UserError, and
    FloatingPointError before an update that is not finite.
    """
    device = devices.pick_device(cfg.device)
    longest = model.config.block_size
    require(cfg.eval_length <= longest, f"--eval_length is beyond the context length of {longest}")
    train_length = train_length or longest
    with run.lock(cfg.out_dir):
        cfg = decide_auto(model, cfg, train_length, device)
        if not (cfg.resumes or cfg.overwrite):
            run.check_unused(cfg.out_dir)
        # the data, and how far training is
        dataset = open_dataset(model, cfg, train_length)
        model.meta = text_meta(model.meta, dataset)
        run.check_same(model, cfg, dataset)
        state = restore_state(model, cfg, train_length)

        # the kernels, if their results agree with plain PyTorch
        kernels.use_sdpa(not cfg.deterministic)
        state.kernels = check.choose_kernels(model, device, getattr(torch, cfg.dtype))

        # the model on the device, compiled, and wrapped for several processes
        devices.prepare_device(device, cfg.deterministic)
        model.activation_checkpointing = cfg.checkpoint_activations
        forward = parallel.distribute(model.train(), device, cfg.compile)
        optimizers = optim.make_optimizers(model, cfg)
        if cfg.continues:
            run.load_optimizers(model, optimizers, vars(cfg))
        batches = Batches(dataset, model, cfg, train_length, max_position, state.sequences)
        progress.print_header(batches, state)
        if cfg.overwrite and not cfg.resumes:
            run.move_aside(cfg.out_dir)
        shown = progress.RunLog(batches, state)
        try:
            # From here on a stop signal finishes the step, and saves.
            with run.StopSignals() as stop:
                last_eval = fit(forward, optimizers, batches, state, stop, shown)
            # A signal may have come after the loop's last look.
            stopped = parallel.any_process(stop)
            seconds = time.perf_counter() - shown.started
            return {**last_eval, "stopped": stopped, "last_step": state.step, "seconds": seconds}
        finally:
            shown.close()
            model.eval()


def fit(forward, optimizers, batches, state, stop, shown):
    """The loop: take steps until the last one or a stop signal, save and evaluate.

    Returns the last evaluation.
    """
    model, cfg, dataset = batches.model, batches.cfg, batches.dataset
    last_eval = {"step": state.step}
    stopped = False
    saved_step = evaluated_step = None
    if cfg.resumes:
        saved_step = state.step
        if parallel.broadcast(run.is_evaluated(cfg.out_dir, state.step)):
            evaluated_step = state.step
    while True:
        # Save, then evaluate, because an evaluation may be stopped. Both also before any step.
        is_due = state.step % cfg.eval_interval == 0 or state.step == cfg.last_step
        if (is_due or stopped) and saved_step != state.step:
            run.save_step(model, optimizers, cfg, dataset, **asdict(state))
        if is_due and not stopped and evaluated_step != state.step:
            metrics = estimate_loss(model, dataset, cfg, stop)
            stopped = metrics is None
            if metrics:
                where = f"the validation loss at step {state.step}"
                check_finite(where, cfg, state.step, metrics["val_loss"])
                last_eval = {"step": state.step, **metrics}
                shown.evaluation(state, metrics)
        if stopped or state.step >= cfg.last_step:
            return last_eval

        # Forward and backward. The sums over all processes are read from the device together,
        # because a step waits for each read.
        sums = forward_backward(forward, batches, state)
        grads = optim.gradients(model)
        grad_norm = torch.nn.utils.get_total_norm(grads)
        sums = parallel.sum_over_processes(torch.cat((sums, sums.new_full((1,), bool(stop)))))
        sums = torch.cat((sums, grad_norm[None].to(sums)))
        loss_sum, n_targets, n_signals, grad_norm = sums.tolist()
        stopped = n_signals > 0

        # Clip and update. to_mean: divide by the scored targets, and undo the loss scale.
        loss = loss_sum / max(n_targets, 1)
        to_mean = batches.tokens_per_step / max(n_targets, 1) / state.loss_scale
        grad_norm *= to_mean
        may_overflow = cfg.dtype == "float16" and state.loss_scale > 1  # such a step is skipped
        where = f"the loss {loss:g} or gradient norm {grad_norm:g} of step {state.step + 1}"
        where += optim.name_bad_gradient(model, grad_norm)
        check_finite(where, cfg, state.step, loss_sum, 0 if may_overflow else grad_norm)
        update(optimizers, grads, grad_norm, to_mean, state, cfg)
        del grads  # because they would take memory until the next step has its own
        state.step += 1
        state.sequences += batches.sequences_per_step
        state.tokens += batches.tokens_per_step
        shown.step(state, loss, grad_norm)


def decide_auto(model, cfg, length, device):
    """cfg with the dtype and compilation that `auto` means on the first process."""
    n_tokens = cfg.gradient_accumulation_steps * cfg.batch_size * length
    pays = devices.compilation_pays(model, cfg.max_iters, n_tokens, length, device)
    dtype = str(devices.pick_dtype(cfg.dtype, device)).removeprefix("torch.")
    compiles = devices.pick_compile(cfg.compile, device, pays)
    dtype, compiles = parallel.broadcast((dtype, compiles))
    return replace(cfg, dtype=dtype, compile=compiles)


def restore_state(model, cfg, train_length):
    """How far training is, from the model's checkpoint."""
    state = TrainState(loss_scale=65536.0 if cfg.dtype == "float16" else 1.0)
    if not cfg.continues:
        return state
    meta = run.read_meta(model.folder)  # not model.meta, because extending has changed it
    kept = asdict(state).keys() - {"sequences", "kernels"}
    if meta["train"].get("dtype") != cfg.dtype:
        kept -= {"loss_scale", "good_steps"}
    state = replace(state, **{name: meta[name] for name in kept})
    # counted in this length, because extend.py may go on with longer sequences
    state.sequences = state.tokens // train_length
    return state


# -----------------------------------------------------------------------------
# main


# The settings that one changes first, which --help lists.
FIRST = "dataset batch_size max_iters learning_rate eval_interval out_dir init_from device dtype"
FIRST += " compile entry seed block_size n_layer n_head n_embd dropout pos window"

RESUME_BY_EXTEND = "resume it by its own command and --init_from=resume --out_dir=FOLDER"


def run_defaults(given, paths):
    """The defaults that settings.parse() asks for: the run folder, and another run's settings."""
    entries = [Path(file).stem for file in given.get("entry", ())]
    pos = given.get("pos") or (entries[-1] if entries else GPTConfig.pos)
    init_from = given.get("init_from", "scratch")
    saved = {}
    if init_from not in ("scratch", "resume", "auto"):
        meta = run.read_meta(run.find_checkpoint(init_from))
        saved = {**meta["config"], "bos": meta["bos"] is not None}
        pos = saved["pos"]
    dataset = data.short_name(given.get("dataset", TrainConfig.dataset))
    out_dir = given.get("out_dir") or f"out/{dataset}-{pos}"
    saved = run.settings_to_resume(given, out_dir) or saved
    require("method" not in saved, f"{out_dir} was written by extend.py: {RESUME_BY_EXTEND}")
    return {"pos": pos, **saved, "out_dir": out_dir}


def make_model(args):
    """Return the model to train: a new model, or a checkpoint's. Raises UserError."""
    cfg, config = args.cfg, args.model_config
    if parallel.rank_and_world()[0] == 0:
        data.prepare_missing(cfg.dataset)
    parallel.barrier()
    if cfg.init_from != "scratch":
        model = GPT.load(cfg.out_dir if cfg.resumes else cfg.init_from)
        run.check_settings(model.folder, vars(model.config), vars(config), args.given)
        if not cfg.resumes:
            model.meta = run.take_over(model)
        return model
    config.vocab_size = data.vocabulary_size(cfg.dataset)
    torch.manual_seed(cfg.seed)
    model = GPT(config)
    entry.check_scheme(model)
    progress.note_unused(POSITIONS, config, cfg.entry, args.given)
    return model


def train_and_sample(model, cfg, train_length=0, max_position=0):
    """Train, and print a sample from an empty prompt.

    Returns the exit status, and whether a stop signal came.
    """
    if cfg.resumes and run.is_finished(model, cfg.out_dir, cfg.last_step):
        setting = "raise --stop_at or leave it out" if cfg.stop_at else "raise --max_iters"
        print(f"{model.folder} is finished: to train on, {setting}")
        return 0, False
    try:
        result = train(model, cfg, train_length, max_position)
    except FloatingPointError as error:
        return report(error, on_every_rank=False, status=1), False
    if parallel.rank_and_world()[0] == 0:
        progress.report_end(GPT, cfg, result)
    return 0, result["stopped"]


def main(argv=None):
    classes = {"model_config": GPTConfig, "cfg": TrainConfig}
    args = settings.parse(defaults=run_defaults, argv=argv, first=FIRST.split(), **classes)
    entry.load_entries(args.cfg.entry, POSITIONS)
    parallel.join_processes(devices.pick_device(args.cfg.device))
    with run.lock(args.cfg.out_dir):
        return train_and_sample(make_model(args), args.cfg)[0]


if __name__ == "__main__":
    run_main(main)
