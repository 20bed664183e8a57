"""The output of a run: a header, its progress, its log, and a sample at the end."""

import math
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import data
from nanolong import devices, errors, optim, parallel, run
from nanolong.errors import note


def no_terminal():
    return not sys.stderr.isatty()


class Rounds(tqdm):
    """The numbers of the batches of a validation, with a bar on a terminal; without one, the first
    process prints a line after the first batch if all take more than some seconds.
    """

    def __init__(self, numbers):
        self.clock = time.perf_counter()
        self.is_first = parallel.rank_and_world()[0] == 0
        hidden = no_terminal() or not self.is_first
        super().__init__(numbers, "validation", leave=False, disable=hidden)

    def show_loss(self, sums):
        """Take the sums of sum_losses() after a batch."""
        is_slow = (time.perf_counter() - self.clock) * self.total > 5
        if no_terminal() and self.is_first and is_slow and sums[0]:
            say(f"validating: loss {sums[1] / sums[0]:.4f} after the first of {self.total} batches")
        self.is_first = False


class RunLog:
    """The log of a run, its progress bar and its speed; in the first process."""

    def __init__(self, batches, state):
        cfg = self.cfg = batches.cfg
        self.rank, self.world = parallel.rank_and_world()
        self.device = batches.device
        self.flops = devices.flops_per_token(batches.model, batches.train_length)
        self.first_step = state.step + 1  # it may compile, so its speed does not count
        self.tokens_per_step = batches.tokens_per_step
        self.started = time.perf_counter()
        self.start_clock(state)
        hidden = self.rank > 0 or no_terminal()
        self.bar = tqdm(total=cfg.last_step, initial=state.step, unit="step", disable=hidden)
        self.log = None
        if self.rank == 0:
            row_settings = {**asdict(batches.model.config), **asdict(cfg)}
            step = state.step if cfg.resumes else None
            self.log = run.Log(cfg.out_dir, step, cfg.wandb, row_settings)
            if cfg.resumes:
                self.resumed(state, batches.model.meta["train"])

    def resumed(self, state, saved):
        """Print, and log, the settings of training that are others now; saved: the checkpoint's."""
        names = saved.keys() - {"init_from", *run.NOT_RESUMED}
        changed = run.changed_settings(saved, asdict(self.cfg), names)
        texts = [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]
        if changed:
            self.log.write(state.step, changed=changed)
        before = optim.get_lr(SimpleNamespace(**saved), max(0, state.step - 1))
        after = optim.get_lr(self.cfg, state.step)
        if changed and max(before, after) > 2 * min(before, after):
            texts.append(f"so the learning rate goes from {before:.3g} to {after:.3g}")
        say("; ".join(filter(None, (f"resumed from step {state.step}", ", ".join(texts)))))

    def start_clock(self, state):
        self.clock, self.clock_tokens = time.perf_counter(), state.tokens

    def step(self, state, loss, grad_norm, **others):
        """Show a step, and log it, with other numbers by name, every log_interval steps."""
        if self.rank:
            return
        cfg, step = self.cfg, state.step
        speed = (state.tokens - self.clock_tokens) / (time.perf_counter() - self.clock)
        peak = devices.peak_flops(self.device)  # None: not in the table
        text = f"loss {loss:7.4f}, {speed:9,.0f} tokens/s"
        text += f", MFU {speed * self.flops / peak / self.world:.1%}" if peak else ""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        is_logged = step % cfg.log_interval == 0 or step == cfg.last_step
        if is_logged:
            norm = grad_norm if math.isfinite(grad_norm) else None
            row = {"loss": loss, "lr": optim.get_lr(cfg, step - 1), "norm": norm}
            row |= {"tokens": state.tokens, "tokens_per_second": round(speed)}
            self.log.write(step, **row, **others)
        # once, and without a terminal whatever is logged
        if step == self.first_step or no_terminal() and is_logged:
            seconds = (cfg.last_step - step) * self.tokens_per_step / speed
            end = f"{tqdm.format_interval(seconds)} left"
            if step == cfg.last_step:
                end = f"{devices.peak_memory(self.device) / 1e9:.3g} GB at the peak"
            say(f"step {step:{len(str(cfg.last_step))}}/{cfg.last_step}: {text}, {end}")
        if is_logged or step == self.first_step:
            self.start_clock(state)

    def evaluation(self, state, metrics):
        """Log and print the results of estimate_loss()."""
        if self.rank == 0:
            self.log.write(state.step, **metrics)
            texts = [f"validation loss {metrics['val_loss']:.4f} nats per token"]
            if "val_bits_per_byte" in metrics:
                texts.append(f"{metrics['val_bits_per_byte']:.4f} bits per byte")
            for name, value in metrics.items():
                # the loss of a dataset of a mixture, or a number of your own
                if name not in ("val_loss", "val_bits_per_byte"):
                    texts.append(f"{name.removeprefix('val_loss_')} {value:.4f}")
            say(f"step {state.step}: {', '.join(texts)}")
            is_first = state.step + 1 == self.first_step <= self.cfg.last_step
            if is_first and self.cfg.compile:
                say("compiling the first step, which takes up to a minute")
        self.start_clock(state)

    def close(self):
        self.bar.close()
        if self.log:
            self.log.close()


def say(text):
    """Print a line above the progress bar."""
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone: the run goes on
        errors.discard_stdout()


def note_unused(schemes, config, entries, given):
    """Print a note on each setting of a new model that changes nothing.

    schemes: classes by name; config: a GPTConfig; entries: files of --entry; given: names of the
    settings that are given.
    """
    names = [Path(file).stem for file in entries]
    if names and config.pos not in names:  # a preset's scheme wins
        note(f"--pos={config.pos} is trained, and no scheme of --entry: give --pos={names[0]}")
    scheme = schemes[config.pos]
    known = {name for other in schemes.values() for name in other.settings}
    for name in sorted(given & known - {*scheme.settings}):
        if getattr(config, name) != getattr(type(config), name):
            note(f"--pos={config.pos} does not use --{name}: leave it out, or choose another")
    if config.sinks and scheme.forgets:
        note(f"--pos={config.pos} forgets the --sinks: they lose weight with distance")


def print_header(batches, state):
    """Print the model and the data of a training run."""
    rank, world = parallel.rank_and_world()
    if rank:
        return
    model, cfg = batches.model, batches.cfg
    extension = model.config.extension
    extended = f", extended by {extension['method']} x {extension['factor']:g}" if extension else ""
    n_parameters = sum(p.numel() for p in model.parameters())
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = f" ({n_trained:,} trained)" if n_trained < n_parameters else ""
    print(
        f"model: {model.config.pos}{extended}, {n_parameters / 1e6:.2f} M parameters{trained}, "
        f"{batches.tokens_per_step:,} tokens per step"
    )
    processes = "1 process" if world == 1 else f"{world} processes"
    mode = "compiled (the first step takes up to a minute)" if cfg.compile else "not compiled"
    where = f"{processes}, {devices.device_name(batches.device)}"
    print(f"on: {where}, {cfg.dtype}, attention by {state.kernels}, {mode}")
    if not cfg.deterministic:
        print("not deterministic: each run, and a resumed one, has other bits")
    T = cfg.eval_length or model.config.block_size
    # a resumed run may have had other batch sizes before
    n_tokens = state.tokens + (cfg.last_step - state.step) * batches.tokens_per_step
    for line in batches.dataset.describe(n_tokens, batches.train_length, cfg.eval_iters, T):
        print(f"data: {line}", flush=True)


def report_end(GPT, cfg, result):
    """Print where the run was saved; if it is complete, print a sample.

    result: what train() returns.
    """
    folder = run.find_checkpoint(cfg.out_dir)
    took = f"after {tqdm.format_interval(result['seconds'])}"
    if result["stopped"]:
        print(f"stopped and saved {folder} {took}: resume by the same command, --init_from=resume")
        return
    words = [cfg.out_dir, *([f"--entry={','.join(cfg.entry)}"] if cfg.entry else [])]
    print(f"saved {folder} {took}; sample from it with python sample.py {shlex.join(words)}")
    if cfg.last_step < cfg.max_iters:
        ways = "--init_from=resume, or at another length with extend.py --keep_optimizer=true"
        print(f"step {cfg.last_step} of {cfg.max_iters}: go on with {ways}")
    if not cfg.max_iters:
        return
    meta = run.read_meta(folder)
    tokenizer = data.tokenizer_from_json(meta["tokenizer"])
    if not tokenizer:
        return
    print("a sample:\n")
    device = devices.pick_device(cfg.device)
    model = GPT.load(folder).to(device)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    prompt = torch.tensor([data.encode_prompt(tokenizer, meta["bos"], "")], device=device)
    n = min(300, model.config.block_size)
    tokens = model.generate(prompt, n, temperature=0.8, top_k=200, generator=generator)
    # as in training, for which the kernels were checked
    with devices.autocast(device, devices.pick_dtype(cfg.dtype, device)):
        ids = [token.item() for token in tokens]
    print(tokenizer.decode(ids).decode(errors="replace"))
