"""Train a GPT, on one process or many.

    python train.py --pos=rope                                   the demo's model on the embedded default; nothing to prepare
    python train.py config/shakespeare.toml --pos=learned
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2.toml --pos=alibi
    python train.py --out_dir=out/python-rope --init_from=resume goes on from the newest checkpoint

Read model.py first, extend.py next. Each iteration: micro-batches forward and backward, gradients averaged over processes, one
check that everything is finite, one update. Batches are a function of (seed, step, micro-batch), so the run is the same on any number of
processes, and a run that was stopped, by whatever means, goes on with the same bits.
"""
import config  # first: it says in one sentence that a Python is too old
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import data
from checkpoint import Log, checkpoint_folder, load_optimizers, optimizer_tensors, prune, read_meta, restarted, steps, verify, write_meta
from config import UserError
from data.prepare import prepare
from model import GPT, GPTConfig, Refused
from optim import learning_rate, make_optimizers


@dataclass
class TrainConfig:
    dataset: str = "python"         # a folder with token files: a path, or a name under data/
    bos: bool | None = None         # put <bos> first in every window; auto: on for datasets of bytes
    out_dir: str = ""               # the run folder; by default out/<dataset>-<pos>
    init_from: Literal["scratch", "resume"] = "scratch"  # resume: go on from the newest checkpoint in out_dir
    batch_size: int = 16            # windows in a micro-batch of one process
    gradient_accumulation_steps: int = 1  # micro-batches in an iteration, over all processes
    max_iters: int = 1000           # iterations, each one update
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: the blocks' matrices by Muon, the rest by AdamW
    learning_rate: float = 3e-3     # at the peak, for both optimizers
    min_lr: float = 0.0             # at the end
    warmup_iters: int = 50          # iterations of linear rise to the peak
    lr_schedule: Literal["trapezoid", "cosine", "constant"] = "trapezoid"  # after the rise; trapezoid: level, then linear over the last 40 %
    weight_decay: float = 0.1       # of matrices and embeddings
    beta1: float = 0.9              # AdamW's decay of the mean gradient
    beta2: float = 0.95             # AdamW's decay of the mean square
    grad_clip: float = 1.0          # norm that gradients are clipped to; 0: not clipped
    eval_interval: int = 250        # iterations between evaluations, each followed by a checkpoint
    eval_iters: int = 40            # batches in an evaluation, evenly spaced over the validation set; 0: all of it
    log_interval: int = 10          # iterations between lines in log.jsonl
    device: str = "auto"            # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; weights and sums are float32
    compile: bool | None = None     # torch.compile; auto: where it works and the run is long enough to pay for it
    checkpoint_activations: bool = False  # of a block keep its input and its attention, and compute the rest again in the backward pass: less memory for more time
    min_doc: int = 0                # train on documents of at least so many tokens only
    upsample_docs: int = 1          # how often in an epoch documents that fill a window are visited, those that do not being visited once
    separate_docs: bool = False     # attention stays inside a document; false: it runs on across what is packed into a window
    passkey: float = 0.0            # share of the windows that hold a synthetic passkey document, in the place of text
    seed: int = 1337                # of the initial weights, the order of batches and dropout
    wandb: str = ""                 # log to this Weights & Biases project too

    def __post_init__(self):
        for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval", "upsample_docs"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        for name, most in (("batch_size", 1 << 20), ("gradient_accumulation_steps", 1 << 20), ("upsample_docs", 1000)):
            if getattr(self, name) > most:
                raise UserError(f"{name}={getattr(self, name)} would never be done: give at most {most}")
        if not 0 <= self.passkey <= 1:
            raise UserError(f"passkey={self.passkey} is not a share: choose 0 to 1")
        for name in ("max_iters", "min_doc", "warmup_iters", "eval_iters", "learning_rate", "min_lr", "weight_decay", "grad_clip", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)} must be a number of at least 0")
        if self.seed >= 1 << 63:
            raise UserError(f"seed={self.seed} must be below 2^63")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError(f"beta1={self.beta1} and beta2={self.beta2} must lie between 0 and 1")

    def windows(self, model):
        """Tokens in a training window, and, where its positions are drawn with a gap from more than that, from how many (else 0)."""
        return model.config.block_size, 0


@torch.no_grad()
def validate(model, dataset, cfg, dtype, stopped=lambda: False):
    """Sums over the validation windows: (nats, scored tokens, bytes of text or None), over all processes; None when stopped() came true.

    Windows do not overlap; eval_iters=0 scores each one, n the same n * batch_size evenly spaced ones at every step and process count.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    T, device = model.config.block_size, next(model.parameters()).device
    count = int(dataset.val.count(T).sum())
    n = min(cfg.eval_iters * cfg.batch_size, count) or count
    windows = [i * count // n for i in range(n)]
    batches = [windows[i:i + cfg.batch_size] for i in range(0, n, cfg.batch_size)]
    was, _ = model.training, model.eval()
    sums = torch.zeros(4, dtype=torch.float64)  # nats, tokens, bytes, stopped
    for batch in batches[rank::world]:
        if stopped():
            sums[3] = 1
            break
        x, y = map(torch.from_numpy, map(data.np.stack, zip(*(dataset.val.window(i, T) for i in batch))))
        with config.autocast(device, dtype):
            docs = dataset.documents_of(x)
            nats = model(x.to(device), y.to(device), model.draw_positions(len(x), T, batch[0]), None if docs is None else docs.to(device), reduction="sum")
        sums += torch.tensor([nats.item(), (y >= 0).sum(), dataset.bytes_of(y.numpy()) or 0, 0], dtype=torch.float64)
    model.train(was)
    if world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    nats, tokens, size, stop = sums.tolist()
    return None if stop else (nats, tokens, size or None)


def train(model, cfg):
    """Train a GPT in place by a TrainConfig, writing the run folder cfg.out_dir; returns the last row of the log that holds a val_loss.

    With cfg.init_from="resume" the model must come from GPT.load(cfg.out_dir), and its optimizer and log go on from there. Call it in every
    process of a torch.distributed group, or in one process without a group. Raises UserError for what the user can mend and FloatingPointError,
    before the update, when a loss or gradient is not finite. SIGTERM and SIGINT save and return early.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    run, accumulation, (T, reach) = Path(cfg.out_dir), cfg.gradient_accumulation_steps, cfg.windows(model)
    if accumulation % world:
        raise UserError(f"gradient_accumulation_steps={accumulation} is the total over processes and is not divisible by {world} of them: choose a multiple of {world}")
    resume = cfg.init_from == "resume" and "step" in model.meta
    if steps(run) and not resume:  # looked at again when the lock is ours
        raise UserError(f"{run} holds a run already: go on with it by --init_from=resume, or choose another --out_dir")
    device = config.pick_device(cfg.device)
    dtype = config.pick_dtype(cfg.dtype, device)
    compiles, why_not = config.pick_compile(cfg.compile, device, cfg.max_iters)
    dataset = data.Dataset(cfg.dataset, cfg.bos)
    dataset.require("the model", model.config.vocab_size, model.meta.get("tokenizer"))
    dataset.select(T, cfg.min_doc, cfg.upsample_docs, cfg.separate_docs)
    dataset.train.require(T)
    dataset.val.require(model.config.block_size)
    if cfg.passkey:
        data.passkey(dataset.tokenizer, T, 0.5, data.np.random.default_rng(0), dataset.bos)  # or it says why not
    if resume and model.meta["data_hash"] != dataset.hash:
        raise UserError(f"the files of dataset {cfg.dataset} are not those that {run} was trained on: restore them, or train anew with another --out_dir")
    if rank == 0:
        run.mkdir(parents=True, exist_ok=True)
        config.lock(run)  # until this function returns
        if (steps(run)[-1:] or [None])[0] != (model.folder if resume else None):
            raise UserError(f"another process has just written to {run}: start again")
        prune(run, model.meta["best"] if resume else None)  # what a crash may have left

    config.prepare_device(device)
    model.to(device).train()
    model.checkpoint_activations = cfg.checkpoint_activations
    optimizers = make_optimizers(model, cfg)
    step, scale, good, best, tokens, evaluated = 0, 65536.0 if dtype == torch.float16 else 1.0, 0, None, 0, False
    if resume:
        verify(file := model.folder / "optim.safetensors", meta := model.meta)
        load_optimizers(model, optimizers, file)
        step, best, tokens, evaluated = meta["step"], meta["best"], meta["tokens"], meta["val_loss"] is not None
        if dtype == torch.float16:
            scale, good = meta["scaler"] or (scale, good)
    log = Log(run, step, evaluated, cfg.max_iters, cfg.wandb, asdict(cfg)) if rank == 0 else None
    if resume and rank == 0 and (changed := {k: [model.meta["train"].get(k), v] for k, v in asdict(cfg).items() if model.meta["train"].get(k) != v and k not in ("init_from", "plot")}):
        log.row(step=step, changed=changed)
        log.say("changed since the checkpoint: " + ", ".join(f"{k} {a} -> {b}" for k, (a, b) in changed.items()))
    forward = config.compiled(model) if compiles else model
    if world > 1:
        forward = torch.nn.parallel.DistributedDataParallel(forward, device_ids=[device.index] if device.type == "cuda" else None)
    peak = config.peak_flops(device)
    if rank == 0:
        if why_not:
            log.say(why_not)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else device.type
        log.say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {model.flops_per_token() / 1e6:.1f} MFLOP a token; {world} process{'es' * (world > 1)} on {name}, "
                f"{str(dtype).removeprefix('torch.')}{', compiled' if compiles else ''}; {accumulation * cfg.batch_size * T:,} tokens an iteration"
                + ("" if peak else "; MFU unknown: the peak of this device is not in the table"))
        log.say(f"validation: {'all' if (count := int(dataset.val.count(model.config.block_size).sum())) and not cfg.eval_iters else min(count, cfg.eval_iters * cfg.batch_size)} of {count} windows of {model.config.block_size} tokens")

    told, release = config.catch_signals()

    def prepared(number):
        """Micro-batch `number`: (x, y, positions, docs) on their way to the device, how many targets count, and the seed of its dropout and random positions."""
        seed = ((cfg.seed << 40) + number) % (1 << 63)
        x, y, positions, docs = dataset.batch(number, cfg.batch_size, T, cfg.seed, reach, cfg.passkey)
        parts = [torch.from_numpy(part) if isinstance(part, data.np.ndarray) else part for part in (x, y, model.draw_positions(len(x), T, seed) if positions is None else positions, docs)]
        return [part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and part is not None and not part.is_cuda else part for part in parts], int((y >= 0).sum()), seed

    def save(val_loss):
        if rank == 0:
            folder = run / f"step-{step:06d}"
            if folder.exists():  # saved when a signal cut its evaluation short: the weights are these
                write_meta(folder, {**read_meta(folder), "val_loss": val_loss, "best": best})
            else:
                model.save(folder, optim=optimizer_tensors(model, optimizers), train=asdict(cfg), step=step, val_loss=val_loss, best=best, tokens=tokens,
                           scaler=[scale, good] if dtype == torch.float16 else None, dataset=cfg.dataset, data_hash=dataset.hash, bos=dataset.bos,
                           tokenizer=model.meta.get("tokenizer") or dataset.tokenizer and dataset.tokenizer.to_json(), launch=os.environ.get("TORCHELASTIC_RUN_ID"))
            prune(run, best)
        if world > 1:
            dist.barrier()

    last, clock, since, failure, stop = None, time.perf_counter(), step, None, False  # stop: agreed by all processes, never by one alone
    ahead = ThreadPoolExecutor(1)  # prepares the next micro-batch while this one is computed; what it raises is raised where the batch is asked for
    coming = ahead.submit(prepared, step * accumulation + rank)
    try:
        while True:
            if not stop and not evaluated and (step % cfg.eval_interval == 0 or step == cfg.max_iters):
                sums = validate(model, dataset, cfg, dtype, lambda: bool(told))
                stop = sums is None
                if not stop:
                    last = {"step": step, "val_loss": sums[0] / sums[1]}
                    if not math.isfinite(last["val_loss"]):
                        raise FloatingPointError(f"the validation loss at step {step} is {last['val_loss']}")
                    if sums[2]:
                        last["val_bits_per_byte"] = sums[0] / math.log(2) / sums[2]
                    best = min(best or [step, last["val_loss"]], [step, last["val_loss"]], key=lambda b: b[1])
                    evaluated = True
                    if log:
                        log.row(**last)
                        log.say(f"step {step}: validation {last['val_loss']:.4f} nats per token" + (f", {last['val_bits_per_byte']:.4f} bits per byte" if sums[2] else ""))
                    save(last["val_loss"])
                clock, since = time.perf_counter(), step
            if stop or step >= cfg.max_iters:
                if not evaluated:
                    save(None)
                break
            for o in optimizers:
                for group in o.param_groups:
                    group["lr"] = learning_rate(cfg, step)
            losses, sums = {}, torch.zeros(3, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)  # nats, scored tokens, asked to stop
            for micro in range(rank, accumulation, world):
                parts, scored, seed = coming.result()
                coming = ahead.submit(prepared, step * accumulation + micro + world if micro + world < accumulation else (step + 1) * accumulation + rank)
                x, y, positions, docs = (part if part is None else part.to(device, non_blocking=True) for part in parts)
                torch.manual_seed(seed)  # dropout and random positions, too, are functions of (seed, micro-batch)
                if world > 1:
                    forward.require_backward_grad_sync = micro + world >= accumulation
                with config.autocast(device, dtype):
                    nats = forward(x, y, positions, docs, reduction="sum")
                (nats * (scale * world / (accumulation * cfg.batch_size * T))).backward()
                losses[step * accumulation + micro] = nats.detach()
                sums[0] += nats.detach()
                sums[1] += scored
            sums[2] = len(told)
            if world > 1:
                dist.all_reduce(sums)
            grads = [p.grad for p in model.parameters()]
            norm = torch.nn.utils.get_total_norm(grads)
            wait([coming])  # the next batch is queued
            nats, scored, asked, norm = torch.cat((sums, norm[None].to(sums))).tolist()  # the one read of an iteration
            share = accumulation * cfg.batch_size * T / max(scored, 1) / scale  # from nominal to scored tokens: the mean over what was scored
            norm *= share
            if not math.isfinite(nats) or not math.isfinite(norm):
                if dtype == torch.float16 and math.isfinite(nats) and scale > 1:  # float16 overflows now and then: skip this update, scale less
                    scale, good = scale / 2, 0
                    coefficient = None
                else:
                    first = torch.tensor(min((number for number, loss in losses.items() if not loss.isfinite()), default=(step + 1) * accumulation), device=device)
                    if world > 1:
                        dist.all_reduce(first, dist.ReduceOp.MIN)
                    raise FloatingPointError(f"the {'gradient' if math.isfinite(nats) else 'loss'} of iteration {step + 1} (micro-batches {step * accumulation} to "
                                             f"{(step + 1) * accumulation - 1}{'' if math.isfinite(nats) else f', first of micro-batch {first}'}) is not finite")
            else:
                coefficient = share * min(1.0, cfg.grad_clip / (norm + 1e-6)) if cfg.grad_clip else share
            if coefficient is not None:
                torch._foreach_mul_(grads, coefficient)
                for o in optimizers:
                    o.step()
                good += 1
                if dtype == torch.float16 and good % 2000 == 0:
                    scale *= 2
            for o in optimizers:
                o.zero_grad(set_to_none=True)
            step, tokens, evaluated = step + 1, tokens + accumulation * cfg.batch_size * T, False
            stop = bool(asked)
            if log:
                now = time.perf_counter()
                speed = (step - since) * accumulation * cfg.batch_size * T / (now - clock)
                log.bar(step, f"loss {nats / max(scored, 1):.4f}, {speed:,.0f} tokens/s" + (f", MFU {speed * model.flops_per_token() / peak / world:.1%}" if peak else ""))
                if step % cfg.log_interval == 0 or step == cfg.max_iters:
                    log.row(step=step, loss=nats / max(scored, 1), lr=learning_rate(cfg, step - 1), norm=norm if math.isfinite(norm) else None, tokens=tokens, tokens_per_second=round(speed))
                    clock, since = now, step
    except FloatingPointError as error:
        failure = f"{error}: stopped before the update; " + (f"the last checkpoint is {steps(run)[-1]}" if steps(run) else "no checkpoint was written yet") + "; try a lower --learning_rate, or look at that data"
    finally:
        release()
        ahead.shutdown()
        if log:
            log.close()
        model.eval()
        config.unlock(run)
    if failure:
        raise FloatingPointError(failure)
    return {**(last or {"step": step}), "stopped": stop}


def resumed(cfg, gpt, given):
    """The model of the run to go on with, or None when cfg does not ask for it or nothing was saved yet. Raises UserError where a given setting contradicts the checkpoint."""
    run = Path(cfg.out_dir)
    if (run / "meta.json").is_file():
        raise UserError(f"{run} is a checkpoint, not a run folder: give --out_dir={run.parent} (to go on from this step, move the newer ones away)")
    if restarted(run):
        cfg.init_from = "resume"
    if cfg.init_from != "resume":
        return None
    if not run.is_dir():
        raise UserError(f"there is no run in {run} to go on with: leave out --init_from=resume to start one, or name its --out_dir")
    if not steps(run):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{run} holds no checkpoint yet: starting from the beginning")
        return None
    if int(os.environ.get("RANK", 0)) == 0:
        config.lock(run)  # or another process might take away the step that is read
    model = GPT.load(run)
    if not model.meta.keys() >= {"train", "step", "best", "tokens", "val_loss", "scaler", "data_hash"}:
        raise UserError(f"{model.folder} was not written by training and cannot be resumed: extend.py can fine-tune it")
    if "method" in model.meta["train"] and not hasattr(cfg, "method"):
        raise UserError(f"{model.folder} was written by extend.py: go on with it by the command that made it, and --init_from=resume")
    agree(model, gpt, given)
    return model


def agree(model, gpt, given):
    """Raise UserError where a setting of the model that was given differs from what the checkpoint has."""
    for name in given & set(GPTConfig.__dataclass_fields__):
        if getattr(gpt, name) != (was := getattr(model.config, name)):
            raise UserError(f"{model.folder} has {name}={was}, and you ask for {getattr(gpt, name)}: leave the setting out, or train anew with another --out_dir")


def run_defaults(values, paths):
    """What the command line leaves open: on resume as the run had it, and its folder."""
    out_dir = values.get("out_dir") or f"out/{Path(values.get('dataset', 'python')).name}-{values.get('pos', 'rope')}"
    again = values.get("init_from") == "resume" or restarted(out_dir)
    meta = read_meta(steps(out_dir)[-1]) if again and steps(out_dir) else {"config": {}, "train": {}}
    return {**meta["config"], **(meta.get("train") or {}), "out_dir": out_dir, "init_from": "scratch"}


def finish(model, cfg):
    """Train, in however many processes; say how it ended, and let the model speak: 300 tokens from an empty prompt. Returns the exit status."""
    try:
        result = train(model, cfg)
    except FloatingPointError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    if dist.is_initialized() and dist.get_rank():
        return 0
    folder = checkpoint_folder(cfg.out_dir)
    if result["stopped"]:
        print(f"stopped and saved in {folder}; the same command with --init_from=resume goes on")
        return 0
    print(f"{folder} is written; go on with python sample.py {cfg.out_dir}")
    meta = read_meta(folder)
    if cfg.max_iters and (tokenizer := data.from_json(meta["tokenizer"])):
        generator = torch.Generator(next(model.parameters()).device).manual_seed(cfg.seed)
        start = torch.tensor([data.prompt(tokenizer, meta["bos"], "")], device=generator.device)
        print("a sample:\n")
        for text in data.stream((t.item() for t in model.generate(start, min(300, model.config.block_size), 0.8, top_k=200, generator=generator)), tokenizer):
            print(text, end="", flush=True)
        print()
    return 0


def main():
    gpt, cfg, given, _ = config.parse(GPTConfig, TrainConfig, about=__doc__, presets=True, defaults=run_defaults)
    rank, world = config.join_processes(cfg.device)
    if cfg.dataset in ("python", "shakespeare"):
        if rank == 0 and not data.exists(cfg.dataset):
            prepare(cfg.dataset)
        if world > 1:
            dist.barrier()
    model = resumed(cfg, gpt, given)
    if not model:
        torch.manual_seed(cfg.seed)
        gpt.vocab_size = data.vocabulary(cfg.dataset)
        config.require_memory(4 * gpt.n_embd * (gpt.n_layer * (2 * (gpt.n_head + gpt.n_kv_head) * gpt.head_dim + 8 * gpt.n_embd) + (2 - gpt.tied) * gpt.vocab_size))  # of the weights
        model = GPT(gpt)
    return finish(model, cfg)


if __name__ == "__main__":
    config.main(main, Refused)
