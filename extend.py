"""Extend the context of a trained checkpoint, fine-tune it briefly, and measure the gain.

    python extend.py out/python-rope --method=yarn --factor=4    writes out/python-rope-yarn4
    python extend.py out/python-rope --method=pi --factor=2 --max_iters=0         only extends
    python extend.py out/python-rope --factor=4 --pose=true    trains at the original length (PoSE)
    python extend.py out/python-rope --method=drope --factor=4       drops RoPE, then fine-tunes
    python extend.py out/python-rope --factor=4 --keep_optimizer=true     the run's next stage
    python extend.py out/python-rope --factor=4 --init_from=resume   goes on after a stop

Defaults come from the run that is extended: its data, its optimizer, as many tokens per step, and
0.3 of its learning rate (all of it, if extend.py has trained that run), without weight decay.
"""

# The order: load, extend, evaluate, train, evaluate. RoPE's methods are in rope_scaling.py.

from nanolong import settings  # isort: skip (first: it refuses an old Python)
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

import data
import rope_scaling
from kernels import check
from model import GPT, POSITIONS, GPTConfig, NoPE, RoPE
from nanolong import devices, entry, lora, parallel, run
from nanolong.errors import UserError, note, require, run_main
from nanolong.evaluation import loss, scoring, tables
from train import TrainConfig, TrainState, train_and_sample


@dataclass
class ExtendConfig(TrainConfig):
    # [extension]
    # extension method: for rope a name in rope_scaling.py, for other schemes see docs/extension.md,
    # where the default is pi or none
    method: str = "yarn"
    factor: float = 4.0  # how many times longer the context gets
    options: str = ""  # the method's options: ramp=paper,beta_fast=16 for example, or a .json file
    # which layers to extend, if only some have a window: full (the layers without one), or all.
    # auto: the same layers as in an earlier extension, else full
    layers: Literal["auto", "full", "all"] = "auto"
    pose: bool = False  # fine-tune at the original length, with skipped positions (PoSE)
    # tokens of a training sequence (0: the extended context length, with PoSE the original length)
    train_length: int = 0
    keep_optimizer: bool = False  # go on with the run's optimizer, step, schedule and max_iters
    # LoRA: train updates of this rank of attention's matrices. A checkpoint has the updates merged
    # into its weights (0: train all weights)
    lora: int = 0
    lora_alpha: float = 0.0  # an update is multiplied by alpha / rank (0: alpha is twice the rank)
    # norms, embeddings (of tokens, and the weights of the position scheme): trained besides
    lora_also: tuple[Literal["norms", "embeddings"], ...] = ()
    text: str = ""  # evaluate on this text file, not on the dataset's validation set
    max_tokens: int = 65536  # length of the text that the reports before and after score
    # [data]
    # a folder with token files, or a mixture as in train.py, by default the run's dataset
    dataset: str = ""
    separate_docs: bool | None = None  # attention stays inside a document (auto: if known)
    # [optimisation]
    max_iters: int = 60  # steps of fine-tuning (0: only extend, which needs no data)
    learning_rate: float = 0.0  # peak learning rate, by default 0.3 of the run's
    batch_size: int = 1  # sequences in a micro-batch, by default as many tokens a step as the run
    warmup_iters: int = 10  # steps of linear warmup
    weight_decay: float = 0.0  # weight decay of matrices and embeddings
    # [evaluation]
    eval_interval: int = 1000  # steps between evaluations, besides the first and the last step
    # [system]
    # the new run folder, by default RUN-<method><factor>, with -lora<rank> or -zero (no training)
    out_dir: str = ""
    # resume: continue from the newest checkpoint of out_dir. auto: resume if it has a checkpoint
    init_from: Literal["scratch", "resume", "auto"] = "scratch"

    def __post_init__(self):
        super().__post_init__()
        require(self.max_tokens, "--max_tokens must be at least 1")
        is_used = self.lora or not (self.lora_alpha or self.lora_also)
        require(is_used, "--lora_alpha and --lora_also are settings of LoRA: give --lora=RANK too")
        require(self.max_iters or not self.lora, "--lora trains: leave it out, or --max_iters=0")
        fits = self.optimizer == "adamw"
        require(fits or not self.lora, "--lora trains by AdamW: give --optimizer=adamw")

    @property
    def continues(self):
        return self.resumes or self.keep_optimizer


LORA = ("lora", "lora_alpha", "lora_also")
# The fine-tuning inherits settings of the training, and has its own defaults for the rest.
INHERITED = "dataset optimizer lr_schedule beta1 beta2 grad_clip log_interval wandb device".split()
INHERITED += "dtype checkpoint_activations deterministic seed".split()
# With --keep_optimizer it also inherits the following, because the training continues.
KEPT = "max_iters learning_rate min_lr warmup_iters weight_decay min_doc separate_docs".split()
KEPT += ["eval_interval", "eval_length", "compile", *LORA]


def run_defaults(given, paths):
    """Return the defaults that depend on the given settings. Raises UserError without a run."""
    advice = "as in extend.py out/python-rope, also to resume"
    require(len(paths) == 1, f"name the one run folder to extend, {advice}")
    folder = run.find_checkpoint(paths[0])
    parent = Path(paths[0]) if run.list_steps(paths[0]) else folder.parent
    entry.load_entries(given.get("entry", ()), POSITIONS)
    run.load_model(GPT, folder, weights=False)  # refuses a scheme whose --entry is not given
    meta = run.read_meta(folder)
    methods = POSITIONS[meta["config"]["pos"]].methods
    before = meta["config"]["extension"] or {"method": "none"}
    preferred = (before["method"],) if before["method"] != "none" else ("yarn", "pi")
    method = next((name for name in preferred if name in methods), "none")
    asked = {"method": method, "factor": ExtendConfig.factor, **given}
    out_dir = given.get("out_dir") or default_out_dir(parent, asked, meta["config"]["extension"])
    saved = run.settings_to_resume(given, out_dir)
    problem = f"{out_dir} was not written by extend.py: resume it by train.py"
    require(not saved or "method" in saved, problem)
    saved = saved or inherited_settings(meta, asked)
    return {"method": method, **saved, "out_dir": out_dir}


def default_out_dir(parent, asked, before):
    """Return RUN-yarn4, RUN-yarn4-beta_fast=16, RUN-yarn4-lora8 or, without training,
    RUN-yarn4-zero. A folder that is extended again has the product of the two factors.

    before: extension of the model, or None: out/rope-yarn4 extended by 2 is out/rope-yarn8.
    """
    factor = asked["factor"]
    name = str(parent)
    own_suffix = f"-{before['method']}{before['factor']:g}" if before else None
    stem, found, kind = name.rpartition(own_suffix) if before else (name, "", "")
    multiplies = before and before["method"] in ("none", asked["method"])
    if found and multiplies and re.fullmatch(r"(-zero|-lora\d+)?", kind) and factor > 1:
        name = stem
        factor *= before["factor"]
    words = [f"{name}-{asked['method']}{factor:g}"]
    words += Path(asked.get("options", "")).name.removesuffix(".json").split(",")
    words.append(f"lora{asked['lora']}" if asked.get("lora") else "")
    words.append("zero" if asked.get("max_iters") == 0 else "")
    return "-".join(filter(None, words))


def inherited_settings(meta, asked):
    """Return the settings to inherit from a run. asked: given settings, method and factor."""
    trained = meta.get("train") or {}
    starts_text = {"bos": meta["bos"] is not None}
    if not trained.get("learning_rate"):  # it was imported
        return starts_text
    names = INHERITED + (KEPT if asked.get("keep_optimizer") else [])
    saved = starts_text | {name: trained[name] for name in names if name in trained}
    if asked.get("lora"):
        saved["optimizer"] = "adamw"
    # The first fine-tuning takes 0.3 of the training's learning rate, later ones keep theirs.
    scale = 1 if "method" in trained else 0.3
    saved.setdefault("learning_rate", trained["learning_rate"] * scale)
    # Keep the tokens of a micro-batch, a step and an evaluation, although sequences get longer: 16
    # sequences of 256 tokens become 4 of 1,024.
    config = meta["config"]
    before = config["extension"] or {"factor": 1, "original_length": config["block_size"]}
    original, extended = before["original_length"], config["block_size"]
    longer = sequence_length(asked, original, extended * max(1, asked["factor"]))  # less is refused
    longer /= sequence_length(trained, original, extended)
    n = trained["gradient_accumulation_steps"] * trained["batch_size"]
    saved["batch_size"] = max(1, round(trained["batch_size"] / longer))
    saved["gradient_accumulation_steps"] = max(1, round(n / longer / saved["batch_size"]))
    if trained["eval_iters"]:
        saved["eval_iters"] = max(1, round(trained["eval_iters"] / longer))
    return saved


def sequence_length(given, original_length, extended_length):
    """Return the tokens of a training sequence, from settings by name."""
    is_short = given.get("pose") or given.get("method") == "drope"
    return given.get("train_length") or (original_length if is_short else extended_length)


# -----------------------------------------------------------------------------
# Extending.


def fit_scale(model, cfg, options):
    """Find the factor on the scores, 0.71 to 2.83, with the lowest loss in the last quarter of
    training sequences, or of --text, of the extended length.
    """
    require(cfg.text or cfg.dataset, "a scale is fitted on text: give --text, --dataset or a scale")
    split = texts_of(model, cfg)[cfg.text] if cfg.text else open_dataset(model, cfg).train
    trial = GPT.load(model.folder).to(devices.pick_device(cfg.device))
    trial.extend(cfg.method, cfg.factor, cfg.layers, **{**options, "scale": 1.0})
    length = trial.config.block_size
    losses = {}
    for scale in (2 ** (eighth / 8) for eighth in range(-4, 13)):
        trial.extend(cfg.method, 1.0, **{**options, "scale": scale})
        sums, counts = loss.loss_by_position(trial, split, length, max(16384, length))
        last = slice(length * 3 // 4, None)
        losses[scale] = float(sums[last].sum() / counts[last].sum())
    best = min(losses, key=losses.get)
    print(f"scale {best:.3f}: {losses[best]:.4f} nats per token instead of {losses[1.0]:.4f}")
    return best


def extend_model(model, cfg):
    """Extend a loaded model in place, by the settings. Raises UserError."""
    options = settings.read_options(cfg.options)
    if cfg.method == "scale":
        options.setdefault("scale", "fit")
    if options.get("scale") == "fit":
        is_first = parallel.rank_and_world()[0] == 0
        options["scale"] = parallel.broadcast(is_first and fit_scale(model, cfg, options))
    shapes = [p.shape for p in model.parameters()]
    model.extend(cfg.method, cfg.factor, cfg.layers, **options)
    has_same_shapes = shapes == [p.shape for p in model.parameters()]
    trains = cfg.max_iters and cfg.method in rope_scaling.ATTENTION
    require(not trains, f"method {cfg.method!r} is not for training: give --max_iters=0")
    if cfg.pose:
        has_none = type(model.scheme) is NoPE or cfg.method == "drope"
        is_read = not (has_none or model.scheme.counts_indices())
        require(is_read, "--pose skips position ids, and this model uses none")
        problem = "--pose skips position ids, and a window counts tokens"
        require(not model.config.window, f"{problem}: give --pose=false")
    length = model.config.block_size
    require(cfg.train_length <= length, f"--train_length is beyond the {length} extended tokens")
    meta = model.meta
    pretraining_tokens = meta.get("pretraining_tokens")
    if cfg.keep_optimizer:
        advice = "leave --keep_optimizer out"
        has_state = (model.folder / "optim.safetensors").is_file()
        require(has_state, f"{model.folder} has no optimizer's state to keep: {advice}")
        problem = f"method {cfg.method!r} changes the shape of a weight, and not of its moments"
        require(has_same_shapes, f"{problem}: {advice}")
        problem = f"{model.folder} has taken all {cfg.last_step} steps"
        require(meta["step"] < cfg.last_step, f"{problem}: raise --max_iters, or {advice}")
        saved = {**asdict(ExtendConfig()), **meta["train"]}  # a run of train.py has no LoRA
        run.check_settings(model.folder, saved, vars(cfg), LORA)
    else:
        pretraining_tokens = pretraining_tokens or meta.get("tokens", 0)
    kept = run.take_over(model, "dataset", "data_hash")
    model.meta = {**kept, "pretraining_tokens": pretraining_tokens}


def check_same_run(model, cfg, path):
    """Raise UserError if the run to resume was made from another parent, or by other settings."""
    made_from = Path(model.meta["parent"]).parent.name
    asked = run.find_checkpoint(path).parent.name
    problem = f"{model.folder} was made from {made_from}, not {asked}"
    require(made_from == asked, f"{problem}: give that run, or another --out_dir")
    names = ("method", "factor", "options", "layers", *LORA)
    run.check_settings(model.folder, model.meta["train"], vars(cfg), names)


def save_extended(model, cfg):
    """Save a checkpoint that is extended and not fine-tuned. Resuming trains it."""
    folder = Path(cfg.out_dir) / "step-000000"
    # As the parent's weights are stored, unless that would round an interpolated table.
    dtype = model.stored_dtype
    if not all(torch.equal(p.to(dtype).float(), p) for p in model.parameters()):
        dtype = torch.float32
    run.move_aside(cfg.out_dir)
    run.save_model(model, folder, dtype, {"optim": {}}, train=asdict(cfg), **asdict(TrainState()))
    print(f"saved {folder}")


# -----------------------------------------------------------------------------
# Reports.


def open_dataset(model, cfg):
    """The dataset to train on. Raises UserError if its tokens are not the model's."""
    dataset = data.open_dataset(cfg.dataset, cfg.bos)
    dataset.check_model(model.folder, model.config.vocab_size, model.meta.get("tokenizer"))
    return dataset


def texts_of(model, cfg):
    """The text of --text, or the validation set of each source of the dataset: by name."""
    if cfg.text:
        return {cfg.text: scoring.read_text(model, model.folder, cfg.text).val}
    return {source.name: source.val for source in open_dataset(model, cfg).sources}


def print_lengths(model, cfg, is_default):
    """Print the context length before and after, and whether there is text as long.

    is_default: whether nobody chose the method, so that the other methods are named.
    """
    config = model.config
    before = round(config.block_size / cfg.factor)
    lengths = f"{before:,} -> {config.block_size:,} tokens"
    if before != config.original_length:
        lengths += f", originally {config.original_length:,}"
    layers = ", full-attention layers only" if config.extension.get("layers") == "full" else ""
    print(f"context length: {lengths} ({cfg.method}{layers})")
    if is_default:
        others = ", ".join(name for name in model.scheme.methods if name != cfg.method)
        print(f"--method={cfg.method} by default; {config.pos} also has {others or 'no other'}")
    # such as Cohere 2: layers without a window have no positions
    kinds = {config.layer_kind(layer) for layer in range(config.n_layer)}
    is_near = "F" not in kinds and 0 < config.window <= config.original_length
    is_near = is_near and isinstance(model.scheme, RoPE) and not config.sinks
    if is_near and cfg.method not in ("none", "drope"):
        note(
            f"RoPE is in layers with a window of {config.window} tokens only, so a longer text has "
            "no new distances: --method=none keeps the trained ones"
        )
    if cfg.max_iters:
        length = cfg.train_length or config.block_size
        fraction = open_dataset(model, cfg).long_fraction(length)
        print(f"{fraction:.0%} of the training tokens are in documents of at least {length} tokens")


def report(model, cfg, column, cells):
    """Measure a column of the table of losses, "extended" or "fine-tuned", and print the table: on
    the same tokens, at the original and at the extended length, or at --eval_length.

    cells: (row, column) -> text, with the columns that were measured before.
    """
    device = devices.pick_device(cfg.device)
    parent = Path(model.meta["parent"])
    if not parent.is_dir():  # training may have gone on there since, or it was moved
        print(f"what extending has changed was not measured: {parent} is gone")
        return
    print(f"comparing with {parent}, on at most {cfg.max_tokens:,} tokens", flush=True)
    original = GPT.load(parent).to(device)
    model.to(device)
    dtype = devices.pick_dtype(cfg.dtype, device)
    lengths = {model.config.original_length, cfg.eval_length or model.config.block_size}
    for name, split in texts_of(model, cfg).items():
        if split.masked_file:
            print(f"{name}, {column}: not compared, because its documents have masks")
            continue
        for length in sorted(lengths):
            try:
                parts = loss.compare(original, model, split, length, cfg.max_tokens, dtype)
            except UserError as error:  # too long for the text, or for the original model
                print(f"{name}, {length:,} tokens, {column}: not compared ({error})", flush=True)
                continue
            for part, (before, after) in parts.items():
                row = f"{name}, {length:,} tokens, {part}"
                cells[row, "original"] = before
                cells[row, column] = after
    if cells:
        title = "loss in nats per token, and its difference from the original model's"
        print(tables.pivot(title, cells).text(), flush=True)


def main(argv=None):
    args = settings.parse(
        cfg=ExtendConfig,
        config=GPTConfig,
        unlisted=("config",),
        paths="the run folder, or checkpoint folder, to extend",
        defaults=run_defaults,
        argv=argv,
    )
    cfg = args.cfg
    device = devices.pick_device(cfg.device)
    rank, _ = parallel.join_processes(device)
    with run.lock(cfg.out_dir):
        if not (cfg.resumes or cfg.overwrite):
            run.check_unused(cfg.out_dir)
        has_record = not cfg.max_iters or (cfg.dataset and cfg.learning_rate)
        needed = ("dataset", "learning_rate")
        lacks = " and ".join(f"--{name}" for name in needed if not getattr(cfg, name))
        problem = f"{args.paths[0]} has no record of its training"
        require(has_record, f"{problem}: give {lacks}, or --max_iters=0")
        # Load, and extend.
        model = GPT.load(cfg.out_dir if cfg.resumes else args.paths[0])
        check.choose_kernels(model, device, devices.pick_dtype(cfg.dtype, device))
        if cfg.resumes:
            check_same_run(model, cfg, args.paths[0])
        else:
            run.check_settings(model.folder, vars(model.config), vars(args.config), args.given)
            extend_model(model, cfg)
        # Evaluate. Without training only a dataset that is given is opened.
        losses = {}
        has_text = cfg.text or "dataset" in args.given or (cfg.max_iters and not cfg.resumes)
        if rank == 0:
            is_default = "method" not in args.given and not cfg.resumes
            print_lengths(model, cfg, is_default)
            if has_text:
                report(model, cfg, "extended", losses)
        # Train.
        config = model.config
        if not cfg.max_iters:
            if rank == 0 and not cfg.resumes:
                save_extended(model, cfg)
            return 0
        length = sequence_length(vars(cfg), config.original_length, config.block_size)
        if cfg.lora:
            alpha = cfg.lora_alpha or 2 * cfg.lora
            lora.add_updates(model, cfg.lora, alpha, cfg.lora_also, cfg.seed)
        max_position = config.block_size if cfg.pose else 0
        status, stopped = train_and_sample(model, cfg, length, max_position)
        # Evaluate.
        if rank == 0 and status == 0 and not stopped:
            model = GPT.load(cfg.out_dir)
            if run.is_finished(model, cfg.out_dir, cfg.last_step):
                report(model, cfg, "fine-tuned", losses)
        return status


if __name__ == "__main__":
    run_main(main)
