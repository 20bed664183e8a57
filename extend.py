"""Extend the context of a trained checkpoint, fine-tune it briefly, and measure what that bought.

    python extend.py out/python-rope --method=yarn --factor=4    writes out/python-rope-yarn4
    python extend.py out/python-rope --method=pi --factor=2 --max_iters=0         only extends
    python extend.py out/python-rope --factor=4 --pose=true    trains at the original length (PoSE)
    python extend.py out/python-rope --method=drope --factor=4       drops RoPE, then fine-tunes
    python extend.py out/python-rope --factor=4 --keep_optimizer=true     the run's next stage
    python extend.py out/python-rope --factor=4 --init_from=resume   goes on after a stop

The order: load, extend, evaluate, train, evaluate. RoPE's methods are in rope_scaling.py, those of
the other schemes in their classes in model.py. Defaults come from the run that is extended: its
data, its optimizer, as many tokens per step, and 0.3 of its learning rate (all of it, if extend.py
has trained that run), without weight decay.
Extending again multiplies the factors and replaces the method.
"""

from nanolong import python_version  # noqa: F401  # isort: skip

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

import data
import rope_scaling
from evaluate import EvaluateConfig, measure_losses
from model import GPT, POSITIONS, GPTConfig, NoPE
from nanolong import devices, entry, extension, parallel, plots, run, scoring, settings
from nanolong.errors import UserError, require, run_main
from nanolong.extension_cost import describe_change
from nanolong.losses import loss_by_position
from train import (
    TrainConfig,
    TrainState,
    check_model_settings,
    check_schedule,
    check_unused,
    train_and_sample,
)


@dataclass
class ExtendConfig(TrainConfig):
    # [extension]
    # of rope: a name in rope_scaling.py; of other schemes: see docs/extension.md
    method: str = "yarn"
    factor: float = 4.0  # how many times longer the context gets
    options: str = ""  # of the method: ramp=paper,beta_fast=16 for example, or a .json file of them
    # of a model with RoPE and layers with and without a window: extend those without one, or all;
    # by default as it was extended before, or full
    layers: Literal["auto", "full", "all"] = "auto"
    pose: bool = False  # fine-tune at the original length, with skipped positions (PoSE)
    pose_window: int = 0  # tokens of a PoSE sequence; 0: the original length
    train_length: int = 0  # tokens of a training sequence; 0: the extended context length
    keep_optimizer: bool = False  # go on with the run's optimizer, step, schedule and max_iters
    text: str = ""  # evaluate on this text file, not on the dataset's validation set
    max_tokens: int = 65536  # length of the text that the reports before and after score
    # [data]
    # a folder with token files, or a mixture as of train.py; by default the run's dataset
    dataset: str = ""
    separate_docs: bool | None = None  # attention stays inside a document; auto: if these are known
    # [optimisation]
    max_iters: int = 60  # steps of fine-tuning; 0: only extend, which needs no data
    learning_rate: float = 0.0  # peak learning rate; by default 0.3 of the run's
    batch_size: int = 1  # sequences in a micro-batch; by default as many tokens a step as the run
    warmup_iters: int = 10  # steps of linear warmup
    weight_decay: float = 0.0  # weight decay of matrices and embeddings
    # [evaluation]
    eval_interval: int = 1000  # steps between evaluations; the first and the last step have one
    # [system]
    out_dir: str = ""  # the new run folder; by default RUN-<method><factor>


# -----------------------------------------------------------------------------
# Defaults that come from the run that is extended.


def run_defaults(given, paths):
    """The defaults that depend on what is given. Raises UserError if there is no run."""
    if len(paths) != 1:
        raise UserError(
            "extend.py extends one run folder: name it, as in "
            "python extend.py out/python-rope --method=yarn --factor=4"
        )
    folder = run.find_checkpoint(paths[0])
    parent = Path(paths[0]) if run.list_steps(paths[0]) else folder.parent
    extension_before = run.read_meta(folder)["config"]["extension"]
    out_dir = given.get("out_dir") or default_out_dir(parent, given, extension_before)
    steps = run.list_steps(out_dir)
    init_from = given.get("init_from", "scratch")
    require(
        init_from in ("scratch", "resume", "auto"),
        f"--init_from={init_from} is for train.py: extend.py starts from {paths[0]}",
    )
    if init_from == "auto":
        init_from = given["init_from"] = "resume" if steps else "scratch"
    saved = {}
    if init_from == "resume":
        require(steps, f"there is no checkpoint in {out_dir} to resume: leave --init_from out")
        saved = run.read_meta(steps[-1]).get("train") or {}
        saved = {**saved, "text": "", "stop_at": 0, "overwrite": False, "entry": ()}
    if not saved.get("dataset"):
        own = {name: getattr(ExtendConfig, name) for name in ("method", "factor", "max_iters")}
        saved = extension.inherited_settings(run.read_meta(folder), {**own, **given}, paths[0])
    return {**saved, "out_dir": out_dir}


def default_out_dir(parent, given, before):
    """RUN-yarn4, or RUN-yarn4-beta_fast=16; a folder that is extended again has both factors.

    before: the extension of the model, or None: that of out/rope-yarn4 by ntk is out/rope-ntk8.
    """
    factor = given.get("factor", 4.0)
    name = str(parent)
    own_suffix = f"-{before['method']}{before['factor']:g}" if before else None
    if own_suffix and name.endswith(own_suffix) and factor > 1:
        name = name.removesuffix(own_suffix)
        factor *= before["factor"]
    suffix = f"{given.get('method', 'yarn')}{factor:g}"
    options = given.get("options", "")
    if options:
        suffix += "-" + Path(options).name.removesuffix(".json").replace(",", "-")
    return f"{name}-{suffix}"


# -----------------------------------------------------------------------------
# Extending.


# Entries of meta.json that hold for the extended model, too.
INHERITED = ("bos", "tokenizer", "dataset", "data_hash", "code", "family")


def extend_model(model, cfg, given, rank):
    """Extend a loaded model in place, by the settings. Raises UserError."""
    options = extension.read_options(cfg.options)
    old = model.config.extension
    if rank == 0 and old and model.meta.get("step") and old["method"] != cfg.method:
        print(f"note: {cfg.method} replaces {old['method']}, for which the weights were tuned")
    if extension.fits_scale(cfg.method, options):
        if cfg.text:
            split = scoring.read_text(model, cfg.text).val
        elif cfg.max_iters or "dataset" in given:
            split = open_dataset(model, cfg).train
        else:
            raise UserError(
                f"method {cfg.method!r} needs a scale, or text to fit it on: give "
                "--options=scale=NUMBER, --text=FILE or --dataset=NAME"
            )
        options["scale"] = fit_scale(model, cfg, options, split, rank)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.extend(cfg.method, cfg.factor, cfg.layers, **options)
    if cfg.max_iters and cfg.method in rope_scaling.EVALUATION_ONLY:
        raise UserError(f"method {cfg.method!r} is not for training: give --max_iters=0")
    no_positions = model.pos.by_index or type(model.pos) is NoPE
    if cfg.pose and (no_positions or cfg.method == "drope"):
        what = "method drope" if cfg.method == "drope" else f"--pos={model.config.pos}"
        raise UserError(f"--pose skips position ids, and {what} uses none: leave it out")
    meta = model.meta
    pretraining_tokens = meta.get("pretraining_tokens")
    if cfg.keep_optimizer:
        require(
            shapes == {name: p.shape for name, p in model.named_parameters()},
            f"method {cfg.method!r} changes the shapes of weights, which the optimizer's state "
            "does not have: leave --keep_optimizer out",
        )
        extension.check_optimizer(model, cfg)
    else:
        pretraining_tokens = pretraining_tokens or meta.get("tokens", 0)
    model.meta = {
        "parent": str(model.folder),
        "first_step": meta["step"] if cfg.keep_optimizer else 0,
        "pretraining_tokens": pretraining_tokens,
        **{name: meta.get(name) for name in INHERITED},
    }


def open_dataset(model, cfg):
    """The data.Dataset to train on. Raises UserError if its tokens are not the model's."""
    reader = (model.folder, model.config.vocab_size, model.meta.get("tokenizer"))
    return data.open_dataset(cfg.dataset, cfg.bos, reader)


def fit_scale(model, cfg, options, split, rank=0):
    """Find the factor on the scores, 0.71 to 2.83, with the lowest loss in the last quarter of
    sequences of the extended length. The model is a trial: it is extended for each candidate.
    """
    trial = GPT.load(model.folder).to(devices.pick_device(cfg.device))
    trial.extend(cfg.method, cfg.factor, cfg.layers, **{**options, "scale": 1.0})
    length = trial.config.block_size
    losses = {}
    for eighth in range(-4, 13):
        scale = 2 ** (eighth / 8)
        trial.extend(cfg.method, 1.0, **{**options, "scale": scale})
        loss_sum, n_scored = loss_by_position(trial, split, length, max(16384, length))
        last = slice(length * 3 // 4, None)
        losses[scale] = float(loss_sum[last].sum() / n_scored[last].sum())
    best = min(losses, key=losses.get)
    if rank == 0:
        print(
            f"scale {best:.3f}: the best of {len(losses)} for the last quarter of {length} tokens, "
            f"{losses[best]:.4f} nats per token instead of {losses[1.0]:.4f}"
        )
    return best


def training_lengths(model, cfg):
    """The tokens of a training sequence, and with PoSE the positions that they skip through."""
    config = model.config
    is_short = rope_scaling.trains_at_original_length(cfg.method, cfg.pose)
    length = config.original_length if is_short else config.block_size
    if cfg.pose:
        return cfg.pose_window or length, config.block_size
    return cfg.train_length or length, 0


def save_extended(model, cfg):
    """Save a checkpoint that is extended and not fine-tuned; it can be trained by resuming."""
    if cfg.resumes:  # it is saved already
        folder = model.folder
    else:
        folder = Path(cfg.out_dir) / "step-000000"
        trained = bool(run.read_meta(Path(model.meta["parent"])).get("train"))
        # As the parent's weights are stored, unless that would round an interpolated table.
        dtype = model.stored_dtype
        if not all(torch.equal(p.to(dtype).float(), p) for p in model.parameters()):
            dtype = torch.float32
        if cfg.overwrite and run.list_steps(cfg.out_dir):
            run.move_aside(cfg.out_dir)
        train = asdict(cfg) if trained else {}
        run.save_model(model, folder, dtype, optim={}, train=train, **asdict(TrainState()))
    program = "sample.py" if model.meta.get("tokenizer") else "evaluate.py"
    print(f"saved {folder}; use it with python {program} {shlex.quote(cfg.out_dir)}")


# -----------------------------------------------------------------------------
# Reports.


def print_summary(model, cfg):
    """Print the lengths and what will be trained."""
    config = model.config
    before = round(config.block_size / cfg.factor)
    lengths = f"{before:,} -> {config.block_size:,} tokens"
    if before != config.original_length:
        lengths += f", originally {config.original_length:,}"
    layers = ", full-attention layers only" if config.extension.get("layers") == "full" else ""
    print(f"context length: {lengths} ({cfg.method}{layers})")
    if not cfg.max_iters:
        return
    train_length, _ = training_lengths(model, cfg)
    first_step = model.meta.get("first_step", 0)
    tokens = (cfg.last_step - first_step) * train_length
    tokens *= cfg.gradient_accumulation_steps * cfg.batch_size
    pretraining = model.meta.get("pretraining_tokens")
    if cfg.keep_optimizer:
        goes_on = f"training goes on at step {first_step} of {cfg.max_iters}"
        print(f"{goes_on}: {tokens:,} tokens to step {cfg.last_step}")
    elif pretraining:
        of_pretraining = f"{tokens / pretraining:.2%} of the {pretraining:,} of pretraining"
        print(f"fine-tuning on {tokens:,} tokens, {of_pretraining}")
    else:
        print(f"fine-tuning on {tokens:,} tokens, an unknown fraction of pretraining")
    length = cfg.train_length or config.block_size
    fraction = open_dataset(model, cfg).long_fraction(length)
    print(f"{fraction:.0%} of the training tokens are in documents of at least {length} tokens")
    if fraction < 0.01:
        print("warning: there is almost nothing that long to learn from; prepare longer texts")


def report_lengths(model, cfg):
    return sorted({model.config.original_length, cfg.eval_length or model.config.block_size})


def report(model, cfg, when):
    """Print the loss by position at the original and at the extended length, or eval_length.

    Of a mixture, that of each dataset.
    """
    model.to(devices.pick_device(cfg.device))
    lengths = report_lengths(model, cfg)
    for name in [""] if cfg.text else data.split_mixture(cfg.dataset):
        settings = EvaluateConfig(
            protocol=("last-quarter", "position"),
            max_tokens=cfg.max_tokens,
            dataset=name,
            text=cfg.text,
            dtype=cfg.dtype,
        )
        texts = scoring.open_texts({when: model}, settings, lengths)
        for line in scoring.describe_scored(texts, lengths, cfg.max_tokens):
            print(f"scored: {line}")
        records = measure_losses({when: model}, settings, lengths, texts)
        print(plots.format_loss_table(records, lengths), flush=True)


def report_change(model, cfg, has_text):
    """Print what extending, and training since then, has changed."""
    device = devices.pick_device(cfg.device)
    parent = Path(model.meta["parent"])
    if not parent.is_dir():  # training may have gone on there since, or it was moved
        print(f"what extending has changed was not measured: {parent} is gone")
        return
    original = GPT.load(parent).to(device)
    splits = {}
    if cfg.text:
        splits = {cfg.text: scoring.read_text(model, cfg.text).val}
    elif has_text:
        names = data.split_mixture(cfg.dataset)
        sources = open_dataset(original, cfg).sources
        splits = {name: source.val for name, source in zip(names, sources, strict=True)}
    lengths = report_lengths(model, cfg)
    max_tokens = min(cfg.max_tokens, max(16384, 4 * lengths[-1]))
    dtype = devices.pick_dtype(cfg.dtype, device)
    model.to(device)
    for line in describe_change(original, model, splits, lengths, max_tokens, dtype):
        print(line, flush=True)


def load_extended(parent, cfg, given, rank):
    """The model of the run to resume, or the parent, extended. Raises UserError."""
    if cfg.resumes:
        weights = not parent.embed.weight.is_meta
        model = GPT.load(cfg.out_dir, weights=weights)
        extension.check_same(model, parent, cfg)
        return model
    if not cfg.overwrite:
        check_unused(cfg.out_dir)
    extend_model(parent, cfg, given, rank)
    return parent


def fine_tune(model, cfg, rank):
    """Evaluate, train, evaluate. Returns the exit status."""
    if rank == 0 and not cfg.resumes:
        report(model, cfg, "before")
        report_change(model, cfg, has_text=True)
    status = train_and_sample(model, cfg, *training_lengths(model, cfg))
    finished = status == 0 and run.find_checkpoint(cfg.out_dir).name == f"step-{cfg.last_step:06d}"
    if rank == 0 and finished:
        if cfg.parallel == "fsdp":
            model = GPT.load(cfg.out_dir)  # this process alone has no whole model
        report(model, cfg, "after")
        report_change(model, cfg, has_text=True)
    return status


def extend(args, rank):
    """Load the checkpoint, extend it, fine-tune and report. Returns the exit status."""
    cfg = args.cfg
    # with fsdp the others get their rows of the weights from the first process
    trains = cfg.max_iters and cfg.method not in rope_scaling.EVALUATION_ONLY
    parent = GPT.load(args.paths[0], weights=rank == 0 or cfg.parallel == "ddp" or not trains)
    check_model_settings(parent, args)
    extension.check_request(parent, cfg, POSITIONS)
    if "dataset" in args.given:
        open_dataset(parent, cfg)  # what is not for this model is refused before anything is saved
    model = load_extended(parent, cfg, args.given, rank)
    if rank == 0:
        print_summary(model, cfg)
    if cfg.max_iters:
        return fine_tune(model, cfg, rank)
    # Without fine-tuning no dataset is opened, but to evaluate on it or to fit a scale.
    if rank == 0:
        save_extended(model, cfg)
        has_text = bool(cfg.text) or "dataset" in args.given
        if has_text:
            report(model, cfg, "extended")
        report_change(model, cfg, has_text)
    return 0


def main(argv=None):
    args = settings.parse(
        cfg=ExtendConfig,
        model_config=GPTConfig,
        unlisted=("model_config",),
        paths="the run folder, or checkpoint folder, to extend",
        defaults=run_defaults,
        argv=argv,
    )
    check_schedule(args.cfg, args.flags)
    entry.load_entries(args.cfg.entry, POSITIONS)
    rank, _ = parallel.join_processes(devices.pick_device(args.cfg.device))
    with run.lock(args.cfg.out_dir):
        return extend(args, rank)


if __name__ == "__main__":
    run_main(main)
