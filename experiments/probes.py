"""What does a model know about position, and how far does its attention look?

    python experiments/run.py probes                    text models of six schemes
    python experiments/probes.py out/rope out/alibi     the same measures of any checkpoints

layer N: the mean |predicted - true| of an MLP that learns a token's position in its sequence from
the output of block N of the frozen model (0: the embedding, with what the scheme adds to it), on
validation text, as a fraction of a random guess's error, (T^2 - 1) / (3T) for positions 0 .. T-1.
best layer: the least after layer 0. last token: its loss in nats, and after all tokens before it
are shuffled (both Haviv et al. 2022); last quarter: the same, with the three quarters before it.

distance: i - j of query i and key j in tokens, weighted by attention; a mean over layers, heads and
queries but the first, which only sees itself. token before: the attention to it, of the head with
most. slope error: the most by which the distance of an ALiBi head of slope m is off 1 / m, relative
to it, where 1 / m is below a quarter of the sequence: others do not fit (Press et al. 2022).
divergence: the Jensen-Shannon divergence of two heads in nats (0: equal, ln 2: disjoint), a mean
over queries; of the closest heads of a layer, and averaged over layers (Kazemnejad et al. 2023).
In the experiment divergence is from nope; its last two arms are the finished rope model with half
of its pairs not rotated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import data
from evaluate import load_models
from experiments.leaderboard import FLAGS  # noqa: F401
from experiments.tasks import train_on_samples
from model import GPT, POSITIONS
from nanolong.devices import pick_device
from nanolong.entry import load_entries
from nanolong.errors import UserError, run_main
from nanolong.evaluation.attention_maps import attention_maps
from nanolong.evaluation.loss import evaluation_mode, find_sequences, read_sequences
from nanolong.evaluation.tables import Table

TITLE = "Position in hidden states and in attention"
BUDGETS = {
    "cpu": "L=64 layers=4 heads=4 width=96 batch=64 steps=700 warmup=50 rate=3e-3 probe=400",
    "gpu": "L=512 layers=8 heads=8 width=512 batch=64 steps=5000 warmup=50 rate=3e-3 probe=2000",
    "try": "L=32 layers=2 heads=2 width=32 batch=8 steps=12 warmup=3 rate=3e-3 probe=20",
}
UNROTATED = {"rope-faster-unrotated": 0, "rope-slower-unrotated": 1}
SCHEMES = ("nope", "learned", "sinusoidal", "alibi", "t5", "rope")
ARMS = {pos: f"train --pos={pos}" for pos in SCHEMES}
ARMS |= dict.fromkeys(UNROTATED, "train --pos=rope")

LAYERS = (*(f"layer {layer}" for layer in range(5)), "best layer")
LOSSES = ("last token", "last token, shuffled", "last quarter", "last quarter, shuffled")
TABLES = [
    ("How far attention looks, in tokens", "distance", ["L", "4L"]),
    ("Error of the probe, as a fraction of a guess's error", LAYERS, ["0"]),
    ("Loss after tokens in order, and shuffled", LOSSES, ["0"]),
    ("Attention at the training length", ["token before", "divergence"], ["L"]),
]
MEASURES = dict.fromkeys((*LAYERS, *LOSSES, "token before", "slope error", "divergence"))
MEASURES["distance"] = "tokens"
CLAIMS = """
# Position probe (Haviv et al. 2022)
layer 0: nope > 0.7
layer 0: nope < 1.5
best layer: nope < 0.25
layer 0: learned < 0.05
layer 0: sinusoidal < 0.05
# Attended distance (Press et al. 2022)
distance: alibi@4L < nope@4L
distance: alibi@4L < t5@4L
distance: alibi@4L < rope@4L
slope error: alibi@4L < 0.5
# Attention without positions is nearer to T5's than to others (Kazemnejad et al. 2023)
divergence: t5@L < alibi@L
divergence: t5@L < rope@L
divergence: t5@L < learned@L
# RoPE's faster pairs carry positions, its slower pairs meaning at a distance
last quarter: rope-faster-unrotated > rope-slower-unrotated
token before: rope-faster-unrotated@L < rope-slower-unrotated@L
"""


def measure(arm):
    # the model, of the last two arms with half of its pairs unrotated
    model = arm.load()
    if arm.name in UNROTATED:
        # The faster half comes first. RoPE keeps its tables for as long as this is the same tensor.
        model.pos.inv_freq = model.pos.inv_freq.clone()
        model.pos.inv_freq.chunk(2)[UNROTATED[arm.name]].zero_()
    # divergence is from the nope arm of the same seed, if that was run
    other = GPT.load(arm.runs["nope"]).to(arm.device) if "nope" in arm.runs else None
    dataset = data.open_dataset(arm.dataset)
    return measure_model(model, dataset, (arm.b.L, 4 * arm.b.L), arm.b.probe, arm.seed, other)


def measure_model(model, dataset, lengths, probe_steps, seed, other=None):
    """Return measure, or of attention (measure, length) -> number; all else is at lengths[0]."""
    found = probe(model, dataset, lengths[0], probe_steps, seed)
    found |= shuffled_prefix(model, dataset, lengths[0], seed)
    for length in lengths:
        tokens, _ = read_spaced(dataset.val, length, 32)
        try:
            found |= attended(model, tokens)
            if other and length == lengths[0]:
                found["divergence", length] = divergence(model, other, tokens)
        except UserError:  # no embedding for these positions, or no softmax
            found["distance", length] = "refused"
    return found


def read_spaced(split, length, count):
    """Read evenly spaced sequences of a text: inputs and targets, int64 (count, length)."""
    return read_sequences(split, length, find_sequences(split, length, count * length))


class Probe(nn.Module):
    """An MLP that predicts positions below `length` from hidden states (N, C)."""

    def __init__(self, n_channels, length):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(n_channels, 256), nn.ReLU(), nn.Linear(256, length))

    def forward(self, states, positions):
        return F.cross_entropy(self.mlp(states), positions)


def probe(model, dataset, length, steps, seed):
    """Train a probe for every layer. Returns its error by name, of LAYERS."""
    texts = [read_spaced(dataset.train, length, 400), read_spaced(dataset.val, length, 100)]
    errors = {}
    for layer in range(model.config.n_layer + 1):
        states, test_states = (hidden_states(model, tokens, layer) for tokens, _ in texts)
        errors[f"layer {layer}"] = probe_error(states, test_states, steps, seed)
    return {**errors, "best layer": min(list(errors.values())[1:])}


def hidden_states(model, tokens, layer):
    """Return what enters block `layer`, or the final norm for n_layer: float32 (N, T, C)."""
    states = []

    def keep_input(module, inputs):
        states.append(inputs[0].float())

    hook = [*model.blocks, model.norm][layer].register_forward_pre_hook(keep_input)
    with hook, evaluation_mode(model, torch.float32) as device:
        for i, x in enumerate(tokens.split(64)):
            model.hidden_states(x.to(device), data.random_positions(model.config, *x.shape, i))
    return torch.cat(states)


def probe_error(states, test_states, steps, seed):
    """Train a probe on hidden states (N, T, C). Returns its error on others, 1: a random guess."""
    # Embeddings are small and the last layer's states are large: standardise each channel.
    mean, std = states.mean((0, 1)), states.std((0, 1)).clamp(min=1e-6)
    flat = ((states - mean) / std).flatten(0, 1)
    length = states.shape[1]
    torch.manual_seed(seed)
    trained = Probe(len(mean), length).to(states.device)

    def make_batch(step):
        rows = torch.randint(len(flat), (1024,))
        return flat[rows.to(flat.device)], rows % length

    train_on_samples(trained, make_batch, steps, 1e-2, 1, states.device)
    with torch.no_grad():
        predicted = trained.mlp((test_states - mean) / std).argmax(-1).cpu()  # (N, T)
    error = (predicted - torch.arange(length)).abs().double().mean().item()
    return error / ((length**2 - 1) / (3 * length))


def shuffled_prefix(model, dataset, length, seed):
    """Return the losses by name, of LOSSES; those in order and shuffled are of the same targets."""
    inputs, targets = read_spaced(dataset.val, length, 500)
    generator = torch.Generator().manual_seed(seed)
    first = 0 if dataset.bos is None else 1  # <bos> stays first
    quarter = length * 3 // 4
    found = {}
    # The first scored target, and where the shuffled tokens end.
    for name, start, end in (("quarter", quarter, quarter), ("token", length - 1, length)):
        scored = targets.where(torch.arange(length) >= start, -1)
        order = torch.rand(len(inputs), end - first, generator=generator).argsort(1)
        shuffled = inputs.clone()
        shuffled[:, first:end] = inputs[:, first:end].gather(1, order)
        found[f"last {name}"] = mean_loss(model, inputs, scored)
        found[f"last {name}, shuffled"] = mean_loss(model, shuffled, scored)
    return found


def mean_loss(model, inputs, targets):
    """Return the mean loss in nats of all targets but -1."""
    total = 0.0
    with evaluation_mode(model, torch.float32) as device:
        for i, (x, y) in enumerate(zip(inputs.split(64), targets.split(64), strict=True)):
            positions = data.random_positions(model.config, *x.shape, i)
            losses = model(x.to(device), y.to(device), positions, reduction="none")
            total += losses.double().sum().item()
    return total / (targets >= 0).sum().item()


def maps_of(model, tokens):
    """Yield the attention of tokens (N, T), sequence by sequence: float64 (layers, H, T, T)."""
    for i, sequence in enumerate(tokens.split(1)):
        with evaluation_mode(model, torch.float32):
            maps = attention_maps(model, sequence, i)
        yield torch.cat(maps).cpu().double()


def attended(model, tokens):
    """Return how far attention looks in tokens (N, T): (measure, T) -> number."""
    n = tokens.shape[1]
    maps = sum(maps_of(model, tokens)) / len(tokens)
    steps_back = torch.arange(n)[:, None] - torch.arange(n)
    distance = (maps * steps_back).sum(-1)[:, :, 1:].mean(-1)  # (layers, H)
    before = maps.diagonal(-1, -2, -1).mean(-1)
    found = {("distance", n): distance.mean().item(), ("token before", n): before.max().item()}
    slopes = model.pos.bias(n, 0)
    if slopes is not None and slopes.dim() == 1:
        layers = [model.config.uses_positions(layer) for layer in range(len(distance))]
        errors = (distance[layers] * slopes.cpu() - 1).abs()[:, (slopes > 4 / n).cpu()]
        found["slope error", n] = max(errors.flatten().tolist(), default=0.0)
    return found


def divergence(model, other, tokens):
    """Return how much the closest heads of two models differ on tokens (N, T), in nats."""
    total = 0
    for p, q in zip(maps_of(model, tokens), maps_of(other, tokens), strict=True):
        # All pairs of heads, over queries 1 .. T-1: (layers, H, H')
        total = total + jensen_shannon(p[:, :, None, 1:], q[:, None, :, 1:]).mean(-1)
    return (total / len(tokens)).flatten(1).amin(1).mean().item()


def jensen_shannon(p, q):
    """Return the Jensen-Shannon divergence along the last dimension, in nats."""
    mean = (p + q) / 2
    terms = torch.xlogy(p, p) + torch.xlogy(q, q) - 2 * torch.xlogy(mean, mean)
    return terms.sum(-1) / 2


@dataclass
class ProbesConfig:
    lengths: tuple[int, ...] = ()  # of sequences; default: the shortest original context length
    dataset: str = ""  # text; default: the first checkpoint's
    probe_steps: int = 1000  # training steps of a probe
    seed: int = 1  # of the probes and of shuffling
    entry: tuple[str, ...] = ()  # Python files with schemes of your own
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps


def main(argv=None):
    args = settings.parse(cfg=ProbesConfig, paths="run folders", argv=argv)
    cfg = args.cfg
    load_entries(cfg.entry, POSITIONS)
    # every checkpoint reads the text of the first
    models = load_models(args.paths, False, pick_device(cfg.device))
    first = next(iter(models.values()))
    text = cfg.dataset or first.meta.get("dataset")
    if not text:
        raise UserError("the first checkpoint does not name its training text: give --dataset")
    dataset = data.open_dataset(text, first.meta.get("bos") is not None)
    lengths = cfg.lengths or (min(model.config.original_length for model in models.values()),)
    columns = []
    for name, model in models.items():
        dataset.check_model(name, model.config.vocab_size, model.meta.get("tokenizer"))
        other = first if model.config.n_layer == first.config.n_layer else None
        columns.append(measure_model(model, dataset, lengths, cfg.probe_steps, cfg.seed, other))
    rows = []
    for key in dict.fromkeys(key for found in columns for key in found):
        label = key if isinstance(key, str) else f"{key[0]} at {key[1]}"
        cells = [found.get(key, "–") for found in columns]
        rows.append([label, *(x if isinstance(x, str) else f"{x:.3f}" for x in cells)])
    print(Table("", ["", *models], rows).markdown())
    return 0


if __name__ == "__main__":
    run_main(main)
