"""What a model knows of position: a probe of every layer, and what it loses when the order of a prefix is lost (Haviv et al. 2022).

    python experiments/probe.py out/nope out/rope                           windows of the shortest trained length
    python experiments/probe.py nope=out/nope out/rope --lengths=128,256 --plot=out/probe.png --json=out/probe.json

The probe: the model is frozen, and for each layer an MLP with one hidden layer of ReLUs learns to name a token's position in its window, 0 .. T-1, from its hidden
state: layer 0 is the embedding with what the scheme adds to it, layer l the output of block l. The windows are of the training text, those that test it of the
validation text. The measure is the mean of |named - true| in tokens. Naming positions at random gives (T^2 - 1) / (3T), always the middle one T / 4; a probe that knows
nothing lies between the two, or a little above. With <bos> a window's first token gives itself away.
The shuffled prefix: the loss of the tokens in a window's last quarter, in nats, with the three quarters before them in order and shuffled; and the loss of the window's
last target alone, with all tokens before it in order and shuffled, which is the paper's test: there no order is left near by.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import json
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import data
from config import UserError
from evaluate import pyplot
from model import GPT, PastTrainedLength, Refused


@dataclass
class ProbeConfig:
    lengths: tuple[int, ...] = ()  # windows in tokens; by default the shortest trained length
    windows: int = 500             # windows of training text that each probe learns from, and of validation text whose prefix is shuffled
    held_out: int = 100            # windows of validation text that test the probes
    hidden: int = 256              # width of a probe's hidden layer
    steps: int = 1000              # updates of each probe
    dataset: str = ""              # by default the one that each checkpoint was trained on
    plot: str = ""                 # write the picture to this PNG (matplotlib draws it)
    json: str = ""                 # write the rows to this file
    best: bool = False             # of a run folder take the step with the best validation loss, not the newest
    seed: int = 1337               # of the windows, the probes and the shuffling
    device: str = "auto"           # auto, cpu, cuda, cuda:N or mps

    def __post_init__(self):
        if min((self.windows, self.held_out, self.hidden, self.steps, *(n // 4 for n in self.lengths))) < 1 or self.seed < 0:
            raise UserError("windows, held_out, hidden and steps must be at least 1, seed at least 0, and lengths, which are cut into quarters, at least 4")
        if self.plot and not self.plot.endswith(".png"):
            raise UserError(f"--plot={self.plot} must end in .png")


def random_guess(n):
    """Mean |named - true| of positions 0 .. n-1 when both are uniform and independent: (n^2 - 1) / (3n)."""
    return (n * n - 1) / (3 * n)


def best_constant(n):
    """Mean |named - true| when the middle position is always named: n/4, and a trifle less where n is odd."""
    return (n * n // 4) / n


def windows_of(split, length, count, seed):
    """Inputs and targets, int64 (N, length) each, of N = min(count, what there is) windows of a data.Split that do not overlap, drawn by the seed."""
    split.require(length)
    total = int(split.count(length).sum())
    drawn = np.random.default_rng(seed).choice(total, min(count, total), replace=False)
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*(split.window(int(number), length) for number in drawn)))


def place(model, device, length):
    """Put the model where it is to compute, in eval mode. Returns that device and the length, by default the trained one; raises UserError for one without quarters."""
    length = length or model.config.trained_length
    if length < 4:
        raise UserError(f"a window of {length} tokens has no quarters: ask for --lengths=4 or more")
    device = torch.device(device) if device is not None else next(model.parameters()).device
    model.to(device).eval()
    return device, length


@torch.no_grad()
def states(model, tokens, layer):
    """The hidden states (N, T, C), float32, of tokens (N, T): what goes into block `layer`, or, of the last layer, into the final norm."""
    kept, device = [], next(model.parameters()).device
    hook = [*model.blocks, model.norm][layer].register_forward_pre_hook(lambda module, given: kept.append(given[0].float()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            for number, x in enumerate(tokens.split(max(1, 16384 // tokens.shape[1]))):
                model.hidden(x.to(device), model.draw_positions(len(x), x.shape[1], number))
    finally:
        hook.remove()
    return torch.cat(kept)


def fit(x, hidden, steps, seed, batch=1024, learning_rate=1e-2):
    """Train a probe on hidden states x (N, T, C): returns the function from states (..., C) to the positions that it names, int64 (...)."""
    T, C = x.shape[1:]
    x = x.flatten(0, 1)
    mean, std = x.mean(0), x.std(0).clamp(min=1e-6)  # embeddings are small and the last layer's states are large: each channel is read in its own units
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        mlp = nn.Sequential(nn.Linear(C, hidden), nn.ReLU(), nn.Linear(hidden, T)).to(x.device)
        optimizer = torch.optim.AdamW(mlp.parameters(), learning_rate)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
            rows = torch.randint(len(x), (batch,), generator=generator).to(x.device)
            F.cross_entropy(mlp((x[rows] - mean) / std), rows % T).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def name(x):
        named = [mlp((part - mean) / std).argmax(-1) for part in x.reshape(-1, C).split(8192)]
        return torch.cat(named).view(x.shape[:-1])
    return name


def probe(model, dataset, name="model", length=None, windows=500, held_out=100, hidden=256, steps=1000, seed=1337, device=None):
    """A row per layer, 0 .. n_layer: the error of its probe in tokens, beside what guessing gives.

    model: a GPT, frozen here, put on the device (default: where it is) and in eval mode. dataset: a data.Dataset, whose train split the probes learn from and whose val
    split tests them. length: tokens in a window, by default the trained length. A model of random positions is read at positions drawn as in training, and the
    probe names the index. Raises Refused or UserError where model or text do not reach that far.
    """
    device, length = place(model, device, length)
    (seen, _), (unseen, _) = windows_of(dataset.train, length, windows, seed), windows_of(dataset.val, length, held_out, seed)
    rows, true = [], torch.arange(length, device=device)
    for layer in range(model.config.n_layer + 1):
        named = fit(states(model, seen, layer), hidden, steps, seed)(states(model, unseen, layer))  # (held_out, T)
        rows.append({"checkpoint": name, "task": "probe", "length": length, "layer": layer, "error": (named - true).abs().float().mean().item(),
                     "random_guess": random_guess(length), "best_constant": best_constant(length), "tokens": unseen.numel()})
    return rows


def shuffle_prefix(tokens, end, generator, first=0):
    """A copy of tokens (N, T) in which each row's columns first .. end-1 stand in a random order of their own."""
    order = torch.rand(len(tokens), end - first, generator=generator).argsort(1)
    return torch.cat((tokens[:, :first], tokens[:, first:end].gather(1, order), tokens[:, end:]), 1)


@torch.no_grad()
def shuffled(model, dataset, name="model", length=None, windows=500, seed=1337, device=None):
    """Two rows: the mean loss in nats of the targets in the last quarter, and of the last target alone, with what stands before them in order ("intact") and shuffled.

    What is shuffled are the first three quarters of a window, or all of it; <bos>, where windows begin with it, stays first. "raised" is the difference, on the same
    targets, and "interval" the half-width of its 95 % interval over the windows. Arguments and errors as of probe().
    """
    device, length = place(model, device, length)
    x, y = windows_of(dataset.val, length, windows, seed)
    generator, rows, quarter = torch.Generator().manual_seed(seed), [], length * 3 // 4
    for scored, start, end in (("last quarter", quarter, quarter), ("last token", length - 1, length)):
        targets = torch.cat((torch.full_like(y[:, :start], -1), y[:, start:]), 1)
        nats = []
        for tokens in (x, shuffle_prefix(x, end, generator, first=int(dataset.bos is not None))):
            losses = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PastTrainedLength)
                for number, (a, b) in enumerate(zip(tokens.split(rate := max(1, 16384 // length)), targets.split(rate))):
                    losses.append(model(a.to(device), b.to(device), model.draw_positions(len(a), length, number), reduction="none").cpu().double().sum(1))
            nats.append(torch.cat(losses))  # (windows,)
        counts = (targets >= 0).sum(1)
        total = max(1, counts.sum().item())
        intact, shuffled = (part.sum().item() / total for part in nats)
        spread = (nats[1] - nats[0] - (shuffled - intact) * counts).square().sum().sqrt().item() / total
        rows.append({"checkpoint": name, "task": "shuffle", "length": length, "scored": scored, "intact": intact, "shuffled": shuffled, "raised": shuffled - intact,
                     "interval": 1.96 * spread, "tokens": total})
    return rows


def load(paths, cfg):
    """The checkpoints that a command line names, NAME=FOLDER or FOLDER, and their text: name -> (GPT on the device, data.Dataset). Raises UserError or Refused."""
    if not paths:
        raise UserError(f"give at least one run folder, as in python {sys.argv[0]} out/python-nope")
    folders = {path.partition("=")[0] if "=" in path and not Path(path).exists() else path.rstrip("/"): path if Path(path).exists() else path.partition("=")[2] or path for path in paths}
    if len(folders) < len(paths):
        raise UserError("two checkpoints have the same name: give each its own, as in NAME=FOLDER")
    device, ready, datasets = config.pick_device(cfg.device), {}, {}
    for name, folder in folders.items():
        model = GPT.load(folder, cfg.best).to(device)
        key = cfg.dataset or model.meta.get("dataset"), model.meta.get("bos") is not None
        if not key[0]:
            raise UserError(f"{name} does not say on which text it was trained: give --dataset")
        if key not in datasets:
            datasets[key] = data.Dataset(*key)
        datasets[key].require(name, model.config.vocab_size, model.meta.get("tokenizer"))
        ready[name] = model, datasets[key]
    return ready


def table(rows):
    """The rows as text: per length the error of every layer, a line per checkpoint, and below it the losses after a prefix in order and shuffled."""
    out, wide = [], max(10, *(len(row["checkpoint"]) for row in rows))
    for length in dict.fromkeys(row["length"] for row in rows):
        probed = [row for row in rows if row["length"] == length and row["task"] == "probe" and "error" in row]
        last = max((row["layer"] for row in probed), default=0)
        out += [f"position probe in windows of {length}: mean |named - true| in tokens after each layer; at random {random_guess(length):.1f}, always the middle {best_constant(length):.1f}",
                " " * wide + "".join(f"{layer:>8}" for layer in range(last + 1))]
        for name in dict.fromkeys(row["checkpoint"] for row in rows):
            errors = [row["error"] for row in probed if row["checkpoint"] == name]
            out.append(name.ljust(wide) + ("".join(f"{error:>8.2f}" for error in errors) if errors else f"{'refused':>8}"))
        out.append("")
        for scored, words in (("last quarter", "the last quarter, after three quarters in order and shuffled"), ("last token", "the last target, after a whole window in order and shuffled")):
            out += [f"{words}, windows of {length}, nats per token", " " * wide + f"{'in order':>10}{'shuffled':>10}{'raised by':>19}{'tokens':>9}"]
            for row in rows:
                if row["length"] == length and row.get("scored") == scored:
                    out.append(row["checkpoint"].ljust(wide) + f"{row['intact']:>10.3f}{row['shuffled']:>10.3f}{row['raised']:>+10.3f} ± {row['interval']:.3f} {row['tokens']:>9,}")
            out.append("")
    out += dict.fromkeys(f"refused: {row['checkpoint']} at {row['length']}: {row['refused']}" for row in rows if "refused" in row)
    return "\n".join(out).rstrip()


def picture(rows, file, note):
    """Per length a panel of the probes' errors by layer over one of the losses after a shuffled prefix, drawn into a PNG."""
    if not (plt := pyplot(file)):
        return
    lengths, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("length", "checkpoint"))
    figure, axes = plt.subplots(2, len(lengths), figsize=(6.4 * len(lengths), 7.6), squeeze=False, height_ratios=[3, 2], layout="constrained")
    for length, top, bottom in zip(lengths, *axes):
        for i, name in enumerate(names):
            if line := [(row["layer"], row["error"]) for row in rows if row["checkpoint"] == name and row["length"] == length and "error" in row]:
                top.plot(*zip(*line), marker="osD^vP*X"[i % 8], markersize=5, color=f"C{i % 10}", label=name)
            for offset, scored in ((-0.2, "last quarter"), (0.2, "last token")):
                for row in rows:
                    if row["checkpoint"] == name and row["length"] == length and row.get("scored") == scored:
                        bottom.bar(i + offset, row["shuffled"], 0.36, color=f"C{i % 10}", alpha=0.35)
                        bottom.bar(i + offset, row["intact"], 0.36, color=f"C{i % 10}")
                        bottom.text(i + offset, row["shuffled"], scored, ha="center", va="bottom", fontsize=7)
        top.axhline(random_guess(length), color="gray", linestyle="--", label="named at random")
        top.axhline(best_constant(length), color="gray", linestyle=":", label="always the middle")
        top.set(xlabel="layer", ylabel="mean |named - true| in tokens", title=f"position probe, windows of {length}", ylim=(0, None))
        top.xaxis.get_major_locator().set_params(integer=True)
        top.legend(fontsize=8)
        bottom.set_xticks(range(len(names)), names)
        bottom.margins(y=0.12)
        bottom.set(ylabel="nats per token", title="loss after a prefix in order, and (pale) shuffled")
        for panel in (top, bottom):
            panel.grid(alpha=0.3)
    figure.supxlabel(note.replace("; ", "\n"), fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"{file} is drawn")


def main():
    cfg, _, paths = config.parse(ProbeConfig, about=__doc__, paths="run folders or step folders, NAME=FOLDER to name one in table and plot")
    for file in filter(None, (cfg.plot, cfg.json)):  # before the work, not after it
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        open(file, "ab").close()
    ready, rows = load(paths, cfg), []
    for length in cfg.lengths or (min(model.config.trained_length for model, _ in ready.values()),):
        for name, (model, dataset) in ready.items():
            try:
                rows += probe(model, dataset, name, length, cfg.windows, cfg.held_out, cfg.hidden, cfg.steps, cfg.seed)
                rows += shuffled(model, dataset, name, length, cfg.windows, cfg.seed)
            except (Refused, UserError) as refusal:
                rows.append({"checkpoint": name, "task": "probe", "length": length, "refused": str(refusal)})
    print(table(rows))
    first, device = next(iter(ready.values()))[1], config.pick_device(cfg.device)
    note = f"{config.provenance(device)}; {first.name} {first.hash}, {cfg.windows} windows, {cfg.steps} updates a probe, seed {cfg.seed}"
    print(f"\n{note}")
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if cfg.plot:
        picture(rows, cfg.plot, note)
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
