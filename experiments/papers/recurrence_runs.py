"""The runs of experiments/papers/recurrence.py: training that resumes, and evaluation."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch

from evaluate import evaluation_mode
from experiments.papers.segment_memory import RecurrentGPT, SegmentMemory, Streams
from experiments.report import load_finished_run
from model import GPTConfig
from nanolong.devices import prepare_device
from nanolong.errors import UserError
from nanolong.optim import get_lr, make_optimizers, update_weights
from nanolong.provenance import current_commit
from nanolong.run import checkpoint
from nanolong.run import folder as folder_of_runs
from nanolong.strict_json import to_json, write_json
from nanolong.tensor_file import TensorStream, read_header, read_tensor, write_tensors
from nanolong.validate import require
from train import TrainConfig

N_GROUPS = 8  # of positions in a segment, each with a mean loss of its own


def memory_of(mode):
    """The length of the memory in training, in segments."""
    return int(mode.removeprefix("memory-")) if mode.startswith("memory-") else 0


class Run:
    """
    A scheme that is trained in one mode from one seed: shuffled, streams or memory-SEGMENTS.

    cfg: a RecurrenceConfig, budget: one of BUDGETS. Raises UserError for texts that do not fit.
    """

    def __init__(self, cfg, budget, dataset, pos, mode, seed):
        self.pos, self.mode, self.seed = pos, mode, seed
        self.dataset, self.budget = dataset, budget
        self.segment = cfg.segment or budget["segment"]
        self.n_memory = memory_of(mode)  # segments
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
        self.seconds = 0.0  # of training so far

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
        folder = folder_of_runs.list_steps(self.folder)[-1]
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
        self.seconds = meta["seconds"]
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
            "seconds": self.seconds,
            "bos": self.dataset.bos,
            "tokenizer": tokenizer.to_json() if tokenizer else None,
            "data_hash": self.dataset.hash,
            "run": self.key(),
        }
        checkpoint.write_checkpoint(self.folder / f"step-{step:06d}", tensors, meta)
        folder_of_runs.prune(self.folder, None)
        if finished:
            for earlier in folder_of_runs.list_steps(self.folder)[:-1]:
                folder_of_runs.remove(earlier)

    def train(self, device):
        """Train what is left to train; return the model."""
        prepare_device(device)
        begin = self.resume if folder_of_runs.list_steps(self.folder) else self.start
        model, optimizers, memory, start = begin(device)
        cfg = self.training
        clock_start = time.perf_counter() - self.seconds
        model.train()
        for step in range(start, cfg.max_iters):
            x, y = self.batch(step)
            if memory is not None and step % self.text.n_segments == 0:
                memory.clear()  # the streams start, again perhaps
            # Forward and backward.
            loss = model(x.to(device), y.to(device), cache=memory)
            loss.backward()
            update_weights(model, optimizers, get_lr(cfg, step), cfg.grad_clip)
            if (step + 1) % cfg.eval_interval == 0 or step + 1 == cfg.max_iters:
                self.seconds = time.perf_counter() - clock_start
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
        finished = load_finished_run(file, self.key())
        if finished:
            return finished["record"]
        model = self.train(device)
        start = time.perf_counter()
        losses = self.evaluate(model)
        evaluation_seconds = time.perf_counter() - start
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
            "training_seconds": self.seconds,
            "seconds": self.seconds + evaluation_seconds,
            "commit": current_commit(),
        }
        write_json(file, {"key": self.key(), "record": record})
        return record

    def token_losses(self):
        """Return what evaluate() has computed, of a measured run."""
        return read_tensor(self.folder / "losses.safetensors", "losses")


def stream_losses(model, text, capacity, steps):
    """
    Compute the losses of these steps of Streams in nats: float32 (B, steps, T), nan where none is.

    capacity: of the memory in tokens, which is empty at first; 0: every segment by itself.
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
