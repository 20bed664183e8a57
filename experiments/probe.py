"""Measure what a model knows about position (Haviv et al. 2022).

    python experiments/probe.py out/nope out/rope
    python experiments/probe.py nope=out/nope out/rope --lengths=128,256 --plot=out/probe.png

Position probe. The model is frozen. For each layer, an MLP with one hidden layer learns to predict
a token's position in its sequence, 0 .. T-1, from its hidden state. Layer 0 is the embedding with
what the scheme adds to it; layer l is the output of block l. The probes train on sequences of the
training text and are tested on the validation text. The error is the mean of |predicted - true| in
tokens. Random predictions give (T^2 - 1) / (3T), the middle position T / 4. A probe that knows
nothing lies between the two, or slightly above. With <bos>, the first token is easy.

Shuffled prefix. The loss of the last quarter of a sequence, in nats per token, after the first
three quarters in order and shuffled; and the loss of the last target alone, after all tokens before
it in order and shuffled. The second is the test of the paper: no order is left nearby.

The default length is the shortest original context length of the checkpoints.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data import Dataset
from evaluate import check_writable, load_models
from experiments.report import line_style, save_figure, select, text_table
from model import POSITIONS
from nanolong import cli
from nanolong.devices import pick_device
from nanolong.entry import load_entries
from nanolong.errors import UserError
from nanolong.losses import evaluation_mode
from nanolong.plots import format_refusals, unique
from nanolong.provenance import provenance
from nanolong.strict_json import write_json
from nanolong.validate import check_png, require

TOKENS_PER_BATCH = 16384


@dataclass
class CheckpointsConfig:
    """The settings of an experiment on finished checkpoints."""

    lengths: tuple[int, ...] = ()  # sequence lengths; default: the shortest original context length
    dataset: str = ""  # default: the one each checkpoint was trained on
    plot: str = ""  # write a figure to this PNG (needs matplotlib)
    json: str = ""  # write the records to this file
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # load the step with the lowest validation loss, not the newest
    seed: int = 1337  # of the choice of sequences, and of all else that is random
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps

    def __post_init__(self):
        check_png("plot", self.plot)


@dataclass
class ProbeConfig(CheckpointsConfig):
    # sequences of training text per probe, and of validation text for the shuffled prefix
    windows: int = 500
    held_out: int = 100  # sequences of validation text that test the probes
    hidden: int = 256  # hidden units of a probe
    steps: int = 1000  # training steps of a probe

    def __post_init__(self):
        super().__post_init__()
        counts = (self.windows, self.held_out, self.hidden, self.steps)
        require(
            min(counts) >= 1,
            "windows, held_out, hidden and steps must be at least 1: raise the one that is not",
        )
        require(
            min(self.lengths, default=4) >= 4,
            "lengths are cut into quarters: give lengths of at least 4",
        )


def random_guess(n):
    """Mean |predicted - true| over positions 0 .. n-1, both uniform and independent."""
    return (n * n - 1) / (3 * n)


def best_constant(n):
    """Mean |predicted - true| when the middle position is always predicted."""
    return (n * n // 4) / n


# -----------------------------------------------------------------------------
# Text and models.


def sample_sequences(split, length, count, seed):
    """Choose sequences of a data.Split that do not overlap.

    Returns inputs and targets, int64 (N, length) each, with N = min(count, available sequences).
    Raises UserError when the text is shorter than a sequence.
    """
    split.require_length(length)
    available = int(split.n_sequences(length).sum())
    rng = np.random.default_rng(seed)
    chosen = rng.choice(available, min(count, available), replace=False)
    pairs = [split.sequence(int(index), length) for index in chosen]
    inputs, targets = map(np.stack, zip(*pairs, strict=True))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def choose_length(model, length):
    """The sequence length: by default the original context length of the model."""
    length = length or model.config.original_length
    require(length >= 4, f"a sequence of {length} tokens has no quarters: give --lengths=4 or more")
    return length


def hidden_states(model, tokens, layer):
    """The hidden states (N, T, C), float32, that enter block `layer`, of tokens (N, T).

    With layer = n_layer: the states that enter the final norm.
    """
    module = [*model.blocks, model.norm][layer]
    states = []

    def keep_input(module, args):
        states.append(args[0].float())

    hook = module.register_forward_pre_hook(keep_input)
    with hook, evaluation_mode(model, torch.float32) as device:
        for i, x in enumerate(batches(tokens)):
            model.hidden_states(x.to(device), model.sample_positions(*x.shape, i))
    return torch.cat(states)


def batches(sequences):
    """Split (N, T) into batches of about TOKENS_PER_BATCH tokens."""
    return sequences.split(max(1, TOKENS_PER_BATCH // sequences.shape[1]))


# -----------------------------------------------------------------------------
# The position probe.


class Probe(nn.Module):
    """An MLP that predicts positions 0 .. T-1 from hidden states."""

    def __init__(self, mean, std, hidden, length):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.up = nn.Linear(len(mean), hidden)
        self.down = nn.Linear(hidden, length)

    def forward(self, x):
        # Embeddings are small and the last layer's states are large: standardise each channel.
        x = (x - self.mean) / self.std
        return self.down(F.relu(self.up(x)))

    @torch.no_grad()
    def predict(self, states):
        """The most likely position of each state: (..., C) -> int64 (...)."""
        flat = states.reshape(-1, states.shape[-1])
        predictions = [self(part).argmax(-1) for part in flat.split(8192)]
        return torch.cat(predictions).view(states.shape[:-1])


def train_probe(states, hidden, steps, seed, batch_size=1024, learning_rate=1e-2):
    """Train a Probe on hidden states (N, T, C). The global random state is left alone."""
    n_channels = states.shape[-1]
    length = states.shape[1]
    x = states.reshape(-1, n_channels)
    mean = x.mean(0)
    std = x.std(0).clamp(min=1e-6)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        network = Probe(mean, std, hidden, length).to(x.device)
        optimizer = torch.optim.AdamW(network.parameters(), learning_rate)
        for step in range(steps):
            cosine = (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = learning_rate * cosine
            rows = torch.randint(len(x), (batch_size,), generator=generator).to(x.device)
            positions = rows % length
            F.cross_entropy(network(x[rows]), positions).backward()
            optimizer.step()
            optimizer.zero_grad()
    return network


def probe(
    model,
    dataset,
    name="model",
    length=None,
    windows=500,
    held_out=100,
    hidden=256,
    steps=1000,
    seed=1337,
):
    """Train a probe for each layer 0 .. n_layer. Returns a record per layer with its test error.

    dataset: a data.Dataset; probes train on its training text and are tested on its validation
    text. length: default the original context length. A model of random positions gets positions
    as in training, and the probe predicts the index. Raises UserError when the text is too short.
    """
    length = choose_length(model, length)
    train_tokens, _ = sample_sequences(dataset.train, length, windows, seed)
    test_tokens, _ = sample_sequences(dataset.val, length, held_out, seed)
    guesses = {"random_guess": random_guess(length), "best_constant": best_constant(length)}
    records = []
    for layer in range(model.config.n_layer + 1):
        trained = train_probe(hidden_states(model, train_tokens, layer), hidden, steps, seed)
        predicted = trained.predict(hidden_states(model, test_tokens, layer))  # (held_out, T)
        distance = (predicted - torch.arange(length, device=predicted.device)).abs()
        record = {
            "checkpoint": name,
            "task": "probe",
            "length": length,
            "layer": layer,
            "error": distance.float().mean().item(),
            **guesses,
            "tokens": test_tokens.numel(),
        }
        records.append(record)
    return records


# -----------------------------------------------------------------------------
# The shuffled prefix.


def shuffle_prefix(tokens, end, generator, start=0):
    """Shuffle columns start .. end-1 of tokens (N, T), each row in its own order."""
    order = torch.rand(len(tokens), end - start, generator=generator).argsort(1)
    shuffled = tokens[:, start:end].gather(1, order)
    return torch.cat((tokens[:, :start], shuffled, tokens[:, end:]), 1)


def sequence_losses(model, inputs, targets):
    """The summed loss of each sequence in nats: float64 (N,)."""
    sums = []
    with evaluation_mode(model, torch.float32) as device:
        for i, (x, y) in enumerate(zip(batches(inputs), batches(targets), strict=True)):
            positions = model.sample_positions(*x.shape, i)
            losses = model(x.to(device), y.to(device), positions, reduction="none")
            sums.append(losses.cpu().double().sum(1))
    return torch.cat(sums)


def shuffled_prefix(model, dataset, name="model", length=None, windows=500, seed=1337):
    """Measure the loss after an intact and a shuffled prefix. Returns two records.

    The first scores the last quarter after three shuffled quarters, the second the last target
    after a shuffled sequence; a <bos> at the start stays there. Each record has the mean loss
    "intact" and "shuffled" of the same targets, the difference "raised", and "interval", the
    half-width of its 95 % interval over sequences. Arguments and errors as of probe().
    """
    length = choose_length(model, length)
    inputs, targets = sample_sequences(dataset.val, length, windows, seed)
    generator = torch.Generator().manual_seed(seed)
    start = 0 if dataset.bos is None else 1
    quarter = length * 3 // 4
    records = []
    # what is scored, the first scored target, where the shuffled prefix ends
    cases = (("last quarter", quarter, quarter), ("last token", length - 1, length))
    for scored, first, end in cases:
        scored_targets = targets.clone()
        scored_targets[:, :first] = -1
        intact = sequence_losses(model, inputs, scored_targets)
        mixed_inputs = shuffle_prefix(inputs, end, generator, start)
        shuffled = sequence_losses(model, mixed_inputs, scored_targets)
        counts = (scored_targets >= 0).sum(1)
        total = max(1, counts.sum().item())
        mean = intact.sum().item() / total
        mixed_mean = shuffled.sum().item() / total
        # the standard error of a ratio of sums: sequences may differ in their scored targets
        deviations = shuffled - intact - (mixed_mean - mean) * counts
        standard_error = deviations.square().sum().sqrt().item() / total
        record = {
            "checkpoint": name,
            "task": "shuffle",
            "length": length,
            "scored": scored,
            "intact": mean,
            "shuffled": mixed_mean,
            "raised": mixed_mean - mean,
            "interval": 1.96 * standard_error,
            "tokens": total,
        }
        records.append(record)
    return records


# -----------------------------------------------------------------------------
# Table and figure.

TITLES = {
    "last quarter": "last quarter, after three quarters in order and shuffled",
    "last token": "last target, after the sequence in order and shuffled",
}


def format_table(records, cfg=None):
    """The records as text: for each length the probe errors, then the shuffled prefixes."""
    lines = []
    for length in unique(records, "length"):
        at_length = select(records, length=length)
        probed = [r for r in select(at_length, task="probe") if "error" in r]
        rows = []
        for name in unique(records, "checkpoint"):
            errors = [f"{record['error']:.2f}" for record in select(probed, checkpoint=name)]
            rows.append([name, *(errors or ["refused"])])
        layers = sorted({record["layer"] for record in probed})
        lines += [
            f"position probe at length {length}: mean |predicted - true| in tokens after each "
            f"layer; random {random_guess(length):.1f}, always the middle "
            f"{best_constant(length):.1f}",
            *text_table(["", *map(str, layers)], rows),
        ]
        for scored, title in TITLES.items():
            rows = []
            for r in select(at_length, scored=scored):
                row = [
                    r["checkpoint"],
                    f"{r['intact']:.3f}",
                    f"{r['shuffled']:.3f}",
                    f"{r['raised']:+.3f} ± {r['interval']:.3f}",
                    f"{r['tokens']:,}",
                ]
                rows.append(row)
            header = ["", "in order", "shuffled", "difference", "tokens"]
            lines += ["", f"{title}, sequences of {length}, nats per token"]
            lines += text_table(header, rows)
        lines.append("")
    return "\n".join(lines + format_refusals(records)).rstrip()


def plot_probe(axes, records, length, names):
    """Draw the probe error of each layer, a line per checkpoint."""
    for i, name in enumerate(names):
        probed = select(records, checkpoint=name, length=length, task="probe")
        errors = [record["error"] for record in probed if "error" in record]
        if errors:
            axes.plot(range(len(errors)), errors, label=name, **line_style(i))
    axes.axhline(random_guess(length), color="gray", linestyle="--", label="random")
    axes.axhline(best_constant(length), color="gray", linestyle=":", label="always the middle")
    axes.set_title(f"position probe, sequences of {length}")
    axes.set(xlabel="layer", ylabel="mean |predicted - true| in tokens", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)


def plot_shuffled_prefix(axes, records, length, names):
    """Draw two bars per checkpoint: the loss after an intact prefix on the shuffled one (pale)."""
    for i, name in enumerate(names):
        for offset, scored in ((-0.2, "last quarter"), (0.2, "last token")):
            for r in select(records, checkpoint=name, length=length, scored=scored):
                x = i + offset
                axes.bar(x, r["shuffled"], 0.36, color=f"C{i % 10}", alpha=0.35)
                axes.bar(x, r["intact"], 0.36, color=f"C{i % 10}")
                axes.text(x, r["shuffled"], scored, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.12)
    axes.set(ylabel="nats per token", title="loss after a prefix in order, and (pale) shuffled")


def plot_records(records, cfg, note):
    """Draw a PNG with a column per length: probe errors above, losses after shuffling below."""
    lengths = unique(records, "length")
    names = unique(records, "checkpoint")

    def draw(figure, *axes):
        for column, length in enumerate(lengths):
            plot_probe(axes[column], records, length, names)
            plot_shuffled_prefix(axes[len(lengths) + column], records, length, names)

    size = (6.4 * len(lengths), 7.6)
    panels = (2, len(lengths))
    save_figure(cfg.plot, draw, size, note, panels=panels, height_ratios=[3, 2])


# -----------------------------------------------------------------------------
# The command line.


def load_checkpoints(paths, cfg):
    """Load checkpoints and the text of each: name -> (GPT on the device, data.Dataset)."""
    if not paths:
        raise UserError(
            f"no checkpoint: give a run folder, as in python {sys.argv[0]} out/python-nope"
        )
    load_entries(cfg.entry, POSITIONS)
    loaded = {}
    datasets = {}
    for name, model in load_models(paths, cfg.best, pick_device(cfg.device)).items():
        dataset = cfg.dataset or model.meta.get("dataset")
        if not dataset:
            raise UserError(f"{name} does not name the text it was trained on: give --dataset")
        bos = model.meta.get("bos") is not None
        reader = (model.folder, model.config.vocab_size, model.meta.get("tokenizer"))
        if (dataset, bos) not in datasets:
            datasets[dataset, bos] = Dataset(dataset, bos, reader)
        text = datasets[dataset, bos]
        text.check_model(*reader)
        loaded[name] = (model, text)
    return loaded


def shortest_context(loaded):
    return min(model.config.original_length for model, _ in loaded.values())


def run_on_checkpoints(settings, task, measure, format_table, plot_records, compare=None):
    """Run a script on the checkpoints of its command line.

    settings: the class based on CheckpointsConfig. measure(model, dataset, name, length, cfg)
    returns records, and compare(loaded, length, cfg) those of several checkpoints.
    format_table(records, cfg) returns text, and plot_records(records, cfg, note) writes a figure.
    """
    about = sys.modules[settings.__module__].__doc__
    paths = "run folders or step folders; NAME=FOLDER gives a name"
    args = cli.parse(cfg=settings, about=about, paths=paths)
    cfg = args.cfg
    for file in filter(None, (cfg.plot, cfg.json)):
        check_writable(file)
    loaded = load_checkpoints(args.paths, cfg)
    records = []
    for length in cfg.lengths or (shortest_context(loaded),):
        measured = {}
        for name, (model, dataset) in loaded.items():
            try:
                records += measure(model, dataset, name, length, cfg)
                measured[name] = (model, dataset)
            except UserError as error:
                refused = {"checkpoint": name, "task": task, "length": length}
                records.append({**refused, "refused": str(error)})
        if compare:
            records += compare(measured, length, cfg)
    print(format_table(records, cfg))

    first_dataset = next(iter(loaded.values()))[1]
    steps = f", {cfg.steps} steps per probe" if hasattr(cfg, "steps") else ""
    note = (
        f"{provenance(pick_device(cfg.device))}; {first_dataset.name} {first_dataset.hash}, "
        f"{cfg.windows} sequences{steps}, seed {cfg.seed}"
    )
    print(f"\n{note}")
    if cfg.json:
        write_json(Path(cfg.json), records, indent=1)
    if cfg.plot:
        plot_records(records, cfg, note.replace("; ", "\n"))
    return 0


def measure(model, dataset, name, length, cfg):
    """The records of a checkpoint at one length."""
    sizes = {"windows": cfg.windows, "seed": cfg.seed}
    probes = {"held_out": cfg.held_out, "hidden": cfg.hidden, "steps": cfg.steps}
    records = probe(model, dataset, name, length, **sizes, **probes)
    return records + shuffled_prefix(model, dataset, name, length, **sizes)


def main():
    return run_on_checkpoints(ProbeConfig, "probe", measure, format_table, plot_records)


if __name__ == "__main__":
    cli.run_main(main)
