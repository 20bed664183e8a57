"""The runs of experiments/recurrence.py: streams of text, training that resumes, evaluation."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from evaluate import evaluation_mode
from experiments.report import load_finished_run, write_json
from experiments.segment_memory import RecurrentGPT, SegmentMemory
from model import GPTConfig
from nanolong import checkpoint, run_folder
from nanolong.device import prepare_device
from nanolong.errors import UserError
from nanolong.optim import get_lr, make_optimizers
from nanolong.provenance import current_commit
from nanolong.strict_json import to_json
from nanolong.tensor_file import TensorStream, read_header, read_tensor, write_tensors
from nanolong.validate import require
from train import TrainConfig

N_GROUPS = 8  # of positions in a segment, whose losses are told apart


class Streams:
    """
    A text as B parallel streams: at step s, stream b reads the tokens [b N/B + s T, ...) of it.

    N is a multiple of B T, where T is the length of a segment. After the last segment the streams
    start again. The text is the longest file of a split; the targets are one token further on,
    and -1, which is not scored, where a document starts.
    """

    def __init__(self, split, bos, batch_size, segment, n_tokens=0):
        self.split, self.bos = split, bos
        self.batch_size, self.segment = batch_size, segment
        self.file = max(range(len(split.tokens)), key=lambda i: len(split.tokens[i]))
        available = len(split.tokens[self.file]) - 1  # the last token is a target only
        batch_tokens = batch_size * segment
        n_tokens = n_tokens or available // batch_tokens * batch_tokens
        require(
            n_tokens <= available,
            f"the text has {available:,} tokens, not {n_tokens:,}: give a lower --train_tokens",
        )
        require(
            n_tokens >= 2 * batch_tokens,
            f"{batch_size:,} streams of two segments of {segment:,} tokens need "
            f"{2 * batch_tokens:,} tokens, and there are {n_tokens or available:,}: give a lower "
            "--batch_size or --segment, or more text",
        )
        require(
            n_tokens % batch_tokens == 0,
            f"{batch_size} segments of {segment} tokens do not divide a text of {n_tokens:,} "
            f"tokens: give a multiple of {batch_tokens:,} as --train_tokens",
        )
        self.n_segments = n_tokens // batch_tokens  # of each stream

    def batch(self, step):
        """Read the segments of a step: inputs and targets, int64 (B, T)."""
        return self.read([(b, step % self.n_segments) for b in range(self.batch_size)])

    def shuffled_batch(self, step, seed, n_steps):
        """Read a batch of the segments that the streams read in n_steps, in random order."""
        n_read = min(self.n_segments, n_steps)
        epoch, step = divmod(step, n_read)
        rng = np.random.Generator(np.random.PCG64([seed, epoch]))
        order = rng.permutation(self.batch_size * n_read).tolist()
        chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
        return self.read([divmod(i, n_read) for i in chosen])

    def read(self, segments):
        """Read segments, given as (stream, index): inputs and targets, int64 (B, T)."""
        rows = []
        for stream, index in segments:
            start = (stream * self.n_segments + index) * self.segment
            rows.append(self.split.checked_tokens(self.file, start, start + self.segment + 1))
        tokens = torch.from_numpy(np.stack(rows))
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x, y if self.bos is None else y.masked_fill(y == self.bos, -1)


class Run:
    """
    A scheme that is trained in one mode from one seed: shuffled, streams or memory-SEGMENTS.

    cfg: a RecurrenceConfig, budget: one of BUDGETS. Raises UserError for texts that do not fit.
    """

    def __init__(self, cfg, budget, dataset, pos, mode, seed):
        self.pos, self.mode, self.seed = pos, mode, seed
        self.dataset, self.budget = dataset, budget
        self.segment = cfg.segment or budget["segment"]
        self.n_memory = int(mode.removeprefix("memory-")) if mode.startswith("memory-") else 0
        self.name = f"{pos}-{mode}-{seed}"
        self.folder = Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}" / self.name
        # The tables of shaw, nezha and t5 follow block_size. It is the longest context in training,
        # memory included, so that every scheme has the tables that its own rule gives for it. With
        # the same seed, all weights outside the scheme start the same.
        self.config = GPTConfig(
            pos=pos,
            **budget["model"],
            block_size=self.segment * (1 + self.n_memory),
            vocab_size=dataset.vocab_size,
        )
        training = dict(budget["training"])
        training["max_iters"] = cfg.steps or training["max_iters"]
        training["batch_size"] = cfg.batch_size or training["batch_size"]
        self.training = TrainConfig(dataset=cfg.dataset, seed=seed, dtype="float32", **training)
        batch_size = self.training.batch_size
        self.text = Streams(dataset.train, dataset.bos, batch_size, self.segment, cfg.train_tokens)
        self.val_text = Streams(dataset.val, dataset.bos, budget["val_streams"], self.segment)
        needed = max(budget["evaluated"]) + budget["val_segments"]
        require(
            self.val_text.n_segments >= needed,
            f"the validation text has {self.val_text.n_segments} segments a stream, and {needed} "
            "are evaluated: give a lower --segment or more text",
        )
        # Shuffled models know neither a memory nor the order of segments: one length is enough.
        self.evaluated = budget["evaluated"][: 2 if mode == "shuffled" else None]

    def key(self):
        """Return what decides the results, as JSON has it."""
        evaluation = [self.evaluated, self.budget["val_streams"], self.budget["val_segments"]]
        key = {
            "memory": self.n_memory * self.segment,
            "mode": self.mode,
            "model": asdict(self.config),
            "training": asdict(self.training),
            "text": [self.dataset.hash, self.text.n_segments, self.segment],
            "evaluation": evaluation,
        }
        return json.loads(to_json(key))

    # Training

    def batch(self, step):
        """Read the batch of a training step."""
        if self.mode == "shuffled":
            return self.text.shuffled_batch(step, self.seed, self.training.max_iters)
        return self.text.batch(step)

    def start(self, device):
        """Return a new model, its optimizers, its memory or None, and 0, the steps so far."""
        torch.manual_seed(self.seed)
        model = RecurrentGPT(self.config).to(device)
        return model, make_optimizers(model, self.training), self.make_memory(model), 0

    def make_memory(self, model):
        return SegmentMemory(model, self.n_memory * self.segment) if self.n_memory else None

    def resume(self, device):
        """Return what start() does, from the newest checkpoint. Raises UserError."""
        folder = run_folder.list_steps(self.folder)[-1]
        meta = checkpoint.read_meta(folder)
        saved_key = meta.get("run") or {}
        changed = [name for name, value in self.key().items() if saved_key.get(name) != value]
        require(
            not changed,
            f"{folder} was trained with other settings ({', '.join(changed)}): give the same, or "
            "choose another --runs",
        )
        model = RecurrentGPT.load(folder).to(device)
        optimizers, memory = make_optimizers(model, self.training), self.make_memory(model)
        if meta["step"] < self.training.max_iters:  # of a finished run, only the model is kept
            file = folder / "optim.safetensors"
            checkpoint.verify(file, meta)
            checkpoint.load_optimizers(model, optimizers, file)
            if memory is not None:
                file = folder / "memory.safetensors"
                checkpoint.verify(file, meta)
                memory.load_state(read_tensors(file, device))
        return model, optimizers, memory, meta["step"]

    def save(self, model, optimizers, memory, step):
        """Write a checkpoint of a step, whole or not at all; of a finished run, only the model."""
        finished = step == self.training.max_iters
        tensors = {"model": dict(model.named_parameters())}
        if not finished:
            tensors["optim"] = checkpoint.optimizer_tensors(model, optimizers)
        if not finished and memory is not None:
            tensors["memory"] = memory.state()
        tokenizer = self.dataset.tokenizer
        meta = {
            **checkpoint.settings_record("config", self.config),
            **checkpoint.settings_record("train", self.training),
            "step": step,
            "bos": self.dataset.bos,
            "tokenizer": tokenizer.to_json() if tokenizer else None,
            "data_hash": self.dataset.hash,
            "run": self.key(),
        }
        checkpoint.write_checkpoint(self.folder / f"step-{step:06d}", tensors, meta)
        run_folder.prune(self.folder, None)
        if finished:
            for earlier in run_folder.list_steps(self.folder)[:-1]:
                run_folder.remove(earlier)

    def train(self, device):
        """Train what is left to train; return the model."""
        prepare_device(device)
        begin = self.resume if run_folder.list_steps(self.folder) else self.start
        model, optimizers, memory, start = begin(device)
        cfg = self.training
        model.train()
        for step in range(start, cfg.max_iters):
            x, y = self.batch(step)
            if memory is not None and step % self.text.n_segments == 0:
                memory.clear()  # the streams start, again perhaps
            # Forward and backward.
            loss = model(x.to(device), y.to(device), cache=memory)
            loss.backward()
            # Update the weights.
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = get_lr(cfg, step)
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % cfg.eval_interval == 0 or step + 1 == cfg.max_iters:
                self.save(model, optimizers, memory, step + 1)
        return model

    # Evaluation

    def evaluate(self, model):
        """Compute the losses with each length of the memory: float32 (lengths, B, S, T)."""
        first = max(self.budget["evaluated"])  # so many segments are context only, for all
        n_segments = self.budget["val_segments"]
        losses = []
        for n_memory in self.evaluated:
            # The memory is full, and each layer's has passed on what the layer below has seen.
            burn_in = min(first, max(n_memory, model.config.n_layer)) if n_memory else 0
            capacity = n_memory * self.segment
            steps = range(first - burn_in, first + n_segments)
            losses.append(stream_losses(model, self.val_text, capacity, steps)[:, burn_in:])
        return torch.stack(losses)

    def measure(self, device):
        """Train and evaluate, or read what that has left in the run folder: a record."""
        file = self.folder / "record.json"
        if finished := load_finished_run(file, self.key()):
            return finished["record"]
        start = time.perf_counter()
        model = self.train(device)
        trained = time.perf_counter()
        losses = self.evaluate(model)
        means = losses.double().nanmean((1, 2, 3)).tolist()
        if not math.isfinite(sum(means)):
            raise UserError(f"{self.name}: the loss is not finite: try another number of --steps")
        groups = losses.double().tensor_split(min(N_GROUPS, self.segment), -1)
        by_position = torch.stack([group.nanmean((1, 2, 3)) for group in groups], 1)
        stream = TensorStream({"losses": losses}, [("losses", losses)])
        write_tensors(self.folder / "losses.safetensors", stream)
        record = {
            "pos": self.pos,
            "mode": self.mode,
            "seed": self.seed,
            "evaluated": self.evaluated,
            "losses": means,
            "by_position": by_position.tolist(),
            "scored": int(losses[0].isfinite().sum()),
            "training_seconds": trained - start,
            "seconds": time.perf_counter() - start,
            "commit": current_commit(),
        }
        write_json(file, {"key": self.key(), "record": record})
        return record

    def token_losses(self):
        """Return what evaluate() has computed, of a measured run."""
        return read_tensor(self.folder / "losses.safetensors", "losses")


def stream_losses(model, text, capacity, steps):
    """
    Compute the losses of consecutive steps of Streams in nats: float32 (B, steps, T).

    capacity: of the memory in tokens, which is empty at first; 0: every segment by itself. Targets
    that are not scored have nan.
    """
    memory = SegmentMemory(model, capacity) if capacity else None
    losses = []
    with evaluation_mode(model, torch.float32) as device:
        for step in steps:
            x, y = text.batch(step)
            loss = model(x.to(device), y.to(device), cache=memory, reduction="none")
            losses.append(loss.cpu().masked_fill(y < 0, math.nan))
    return torch.stack(losses, 1)


def read_tensors(file, device):
    """Read all tensors of a file, by name."""
    names = read_header(file)
    return {name: read_tensor(file, name).to(device, copy=True) for name in names}
