"""log.jsonl, the progress bar, and optionally Weights & Biases."""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import asdict

import torch

from nanolong.devices import peak_flops, pick_compile
from nanolong.entry import entry_hash
from nanolong.errors import UserError, discard_stdout
from nanolong.optim import get_lr
from nanolong.parallel.processes import rank_and_world
from nanolong.run.checkpoint import is_resumed
from nanolong.strict_json import to_json

# Settings of one command, not of a run.
ONE_COMMAND = ("entry", "init_from", "overwrite", "stop_at", "text")


class Logger:
    """Write the log of a run from a step on, and show its progress, in the first process.

    Records past the step that a run resumes from are dropped: the log agrees with the weights.
    """

    def __init__(self, folder, state, loader):
        from tqdm import tqdm

        self.loader = loader
        cfg = loader.cfg
        self.cfg = cfg
        evaluated = state.val_loss is not None
        file = folder / "log.jsonl"
        kept = kept_lines(file, state.step, evaluated) if state.step or evaluated else []
        (folder / ".log").write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(folder / ".log", file)
        # unbuffered: what a full disk has refused would be written again when the file is closed
        self.file = open(file, "ab", buffering=0)
        self.timed_from = state.step + 1  # the first step may compile
        self.last_printed = state.step
        self.seconds = 0.0  # of training steps, without evaluations and compilation
        self.clock = None  # started by the first step after a pause
        disable = not sys.stderr.isatty()
        total, step = cfg.last_step, state.step
        self.bar = tqdm(total=total, initial=step, unit="step", disable=disable, leave=False)
        self.wandb = None
        if cfg.wandb:
            import wandb

            self.wandb = wandb.init(project=cfg.wandb, name=folder.name, config=asdict(cfg))
        if is_resumed(loader.model, cfg):
            self.record_changes(state, loader.model)

    def record_changes(self, state, model):
        """Log the settings that differ from those of the checkpoint."""
        old = {**model.meta["train"], "entry_hash": model.meta.get("entry_hash")}
        # meta.json has lists for tuples
        cfg = json.loads(to_json(asdict(self.cfg)))
        new = {**cfg, "entry_hash": entry_hash(type(model.pos))}
        if "kernels" in model.meta:
            old["kernels"], new["kernels"] = model.meta["kernels"], state.kernels
        changed = {}
        for name, value in new.items():
            if old.get(name) != value and name not in ONE_COMMAND:
                changed[name] = [old.get(name), value]
        if changed:
            self.record(step=state.step, changed=changed)
            words = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in changed.items())
            report(f"changed since the checkpoint: {words}")

    def record(self, **record):
        """Append a line to log.jsonl."""
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            self.file.write(line.encode())
        except OSError as error:
            error.filename = self.file.name
            raise
        if self.wandb:
            values = {key: value for key, value in record.items() if key != "step"}
            self.wandb.log(values, step=record["step"])

    def evaluation(self, step, metrics):
        """Log and print what estimate_loss() has returned."""
        self.record(step=step, **metrics)
        texts = []
        for name, value in metrics.items():
            if name == "val_loss":
                texts.append(f"validation loss {value:.4f} nats per token")
            elif name == "val_bits_per_byte":
                texts.append(f"{value:.4f} bits per byte")
            else:  # of a dataset of a mixture
                texts.append(f"{name.removeprefix('val_loss_')} {value:.4f}")
        report(f"step {step}: {', '.join(texts)}")
        self.clock = None

    def start_step(self, tokens):
        """Measure the speed from here on, where it is not being measured."""
        self.step_start = time.perf_counter()
        if self.clock is None:
            self.clock = self.step_start
            self.clock_tokens = tokens

    def step(self, state, loss, grad_norm, of_sources):
        """Log a step, and show it. of_sources: sum_by_source() of a mixture."""
        now = time.perf_counter()
        self.seconds += now - self.step_start
        speed = (state.tokens - self.clock_tokens) / (now - self.clock)
        text = f"loss {loss:.4f}, {speed:,.0f} tokens/s"
        peak = peak_flops(self.loader.device)  # None: not in the table
        if peak:
            flops = self.loader.model.flops_per_token(self.loader.train_length)
            text += f", MFU {speed * flops / peak / rank_and_world()[1]:.1%}"
        if self.loader.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.loader.device)
            text += f", {allocated / 1e9:.3g} GB at the peak"
        self.progress(state.step, text)
        if state.step % self.cfg.log_interval == 0 or state.step == self.cfg.last_step:
            self.record(
                step=state.step,
                loss=loss,
                lr=get_lr(self.cfg, state.step - 1),
                norm=grad_norm if math.isfinite(grad_norm) else None,
                tokens=state.tokens,
                tokens_per_second=round(speed),
                **losses_by_source(self.loader.dataset.labels, of_sources),
            )
            self.clock = None
        if state.step == self.timed_from:  # that step has compiled
            self.seconds = 0.0
            self.clock = None

    def progress(self, step, text):
        """Move the progress bar; without a terminal, print a line for every tenth of the run."""
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step - self.last_printed >= max(1, self.cfg.last_step // 10):
            self.last_printed = step
            seconds_a_step = self.seconds / max(1, step - self.timed_from)
            left = seconds_a_step * (self.cfg.last_step - step)
            report(f"step {step}/{self.cfg.last_step}: {text}, {left:.0f} s left")

    def close(self):
        self.bar.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def report(text):
    """Print a line, in the first process; above the progress bar if there is one."""
    from tqdm import tqdm

    if rank_and_world()[0]:
        return
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone: the run goes on
        discard_stdout()


def sum_by_source(loader, index, losses, targets):
    """Sum the losses of micro-batch `index` of a mixture, and count its scored tokens, by dataset.

    losses: of the tokens that this process computes, (B, T); targets: of all tokens, (B, T).
    Returns the summed losses of the S datasets followed by the counts, (2 S,), as losses' dtype.
    """
    dataset, cfg = loader.dataset, loader.cfg
    sources = dataset.sources_of_batch(index, cfg.batch_size, cfg.seed)
    is_source = torch.tensor(sources)[:, None] == torch.arange(len(dataset.sources))  # (B, S)
    scored = targets[:, loader.part] >= 0
    by_sequence = torch.stack((losses.sum(1), scored.to(losses.dtype).sum(1)))  # (2, B)
    return (by_sequence @ is_source.to(losses)).flatten()


def losses_by_source(labels, sums):
    """The mean loss of each dataset by its name in the log. sums: of sum_by_source()."""
    losses = {}
    for label, loss_sum, n_tokens in zip(labels, sums, sums[len(labels) :], strict=False):
        if n_tokens:  # a step may have no sequence of a dataset
            losses[f"loss_{label}"] = loss_sum / n_tokens
    return losses


def kept_lines(file, step, evaluated):
    """The lines of a log that a run resumed at this step keeps."""
    if not file.exists():
        return []
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off by a crash
            record = json.loads(line)
            # a validation loss that the checkpoint does not have will be computed again
            at_step = record["step"] == step and (evaluated or "val_loss" not in record)
            if record["step"] < step or at_step:
                kept.append(line)
    return kept


def check_wandb(project):
    """Raise UserError if a project is named and the package is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb needs the wandb package: pip install wandb, or leave --wandb out")


def print_header(loader, dtype):
    """Print what is about to be trained, and on what."""
    model, cfg, dataset = loader.model, loader.cfg, loader.dataset
    parameters = sum(p.numel() for p in model.parameters())
    flops_per_token = model.flops_per_token(loader.train_length)
    report(
        f"model: {describe_scheme(model.config)}, {parameters / 1e6:.2f} M parameters, "
        f"{flops_per_token / 1e6:.1f} MFLOP per token, {loader.tokens_per_step:,} tokens per step"
    )
    world = rank_and_world()[1]
    processes = "1 process" if world == 1 else f"{world} processes ({cfg.parallel})"
    compiles, why_not = pick_compile(cfg.compile, loader.device, cfg.max_iters)
    mode = "compiled" if compiles else "not compiled"
    dtype_name = str(dtype).removeprefix("torch.")
    report(f"on: {processes}, {device_name(loader.device)}, {dtype_name}, {mode}")
    for source, fraction in zip(dataset.sources, dataset.fractions, strict=True):
        print_data(loader, source, fraction)
    if why_not:
        report(why_not)
    if compiles:
        report("compiling the forward and backward pass: about a minute at the first time")
    if loader.device.type == "cuda" and peak_flops(loader.device) is None:
        report("MFU: unknown (add this GPU to PEAK_FLOPS in nanolong/devices.py)")


def print_data(loader, dataset, fraction):
    """Print how much is trained and validated on of a dataset, the fraction of all of it."""
    cfg = loader.cfg
    n_tokens = cfg.last_step * loader.tokens_per_step * fraction
    epochs = n_tokens / len(dataset.train)
    name = f" of {dataset.name}" if fraction < 1 else ""
    report(f"training: {n_tokens:,.0f} tokens{name}, {epochs:.2g} epochs of {len(dataset.train):,}")
    T = cfg.eval_length or loader.model.config.block_size
    n = len(dataset.val.spaced(cfg.eval_iters * cfg.batch_size, T))
    names = [file.name for file in dataset.val.files]
    files = ", ".join(names) if len(names) <= 3 else f"{len(names)} files"
    report(
        f"validation: {n:,} of {dataset.val.n_sequences(T).sum():,} sequences of {T:,} tokens, "
        f"{files} of {dataset.name}"
    )


def describe_scheme(config):
    """The position scheme and what changes it, as "rope, extended by yarn x 4"."""
    scheme = config.pos
    if config.score_scale != "none":
        scheme += f", score scale {config.score_scale}"
    if config.extension:
        method, factor = config.extension["method"], config.extension["factor"]
        scheme += f", extended by {method} x {factor:g}"
    return scheme


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        n = torch.get_num_threads()
        return "1 CPU thread" if n == 1 else f"{n} CPU threads"
    return device.type
