"""Where attention looks: how far back, and how alike the patterns of two checkpoints are (Kazemnejad et al. 2023; ALiBi's slopes: Press et al. 2022).

    python experiments/attention_maps.py out/alibi out/nope                          windows of the shortest trained length
    python experiments/attention_maps.py nope=out/nope out/t5 --lengths=256 --plot=out/attention.png --json=out/attention.json

Over windows of validation text, for each layer and head, every query but a window's first, which has only itself to look at, weighs what it attends to by probability:
  distance     in tokens, i - j of query i and key j
  normalised   (t - n + 1) / t of query t and key n, both counted from 1: 1/t is the token itself, 1 the window's first. Even attention is about 1/2
  histogram    the share of the probability in each of --bins equal stretches of the normalised distance, the nearest first
`even` is a model that attends to all it sees alike. Where a scheme adds -slope x distance (alibi), each head's slope m stands beside its range 1/m, and beside the distance
that the slope gives alone, when all else in the scores is equal: a window is too short for the small slopes to have their whole range.
The divergence of two checkpoints on the same windows: of two heads, the Jensen-Shannon divergence of their probabilities, in nats (0: the same, ln 2 = 0.693: nowhere alike),
averaged over the queries; of two layers at the same depth, the least over all pairs of heads, one of each checkpoint; of two checkpoints, the mean over the layers.

Attention is computed here for that, densely and in float32, in the place of kernels.attention; the model and its kernels know nothing of it.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import contextlib
import itertools
import json
import warnings
from dataclasses import dataclass

import torch

import kernels
from config import UserError
from evaluate import pyplot
from experiments.probe import load, windows_of
from model import PastTrainedLength, Refused


@dataclass
class MapsConfig:
    lengths: tuple[int, ...] = ()  # windows in tokens; by default the shortest trained length
    windows: int = 32              # windows of validation text
    bins: int = 10                 # of the histogram
    dataset: str = ""              # by default the one that each checkpoint was trained on
    plot: str = ""                 # write the picture to this PNG (matplotlib draws it)
    json: str = ""                 # write the rows to this file
    best: bool = False             # of a run folder take the step with the best validation loss, not the newest
    seed: int = 1337               # of the windows
    device: str = "auto"           # auto, cpu, cuda, cuda:N or mps

    def __post_init__(self):
        if min((self.windows, self.bins, *(n - 1 for n in self.lengths))) < 1 or self.seed < 0:
            raise UserError("windows and bins must be at least 1, seed at least 0, and lengths, which count tokens, at least 2")
        if self.plot and not self.plot.endswith(".png"):
            raise UserError(f"--plot={self.plot} must end in .png")


def dense(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None, length=None):
    """kernels.attention() with its probabilities, (B, H, Tq, D) and (B, H, Tq, Tk): arguments as there, every score at once, in float32 (float64 of float64)."""
    assert length is None, "no room that is partly filled is looked into"
    (B, H, Tq, D), Tk, out = q.shape, k.shape[2], v.dtype
    wide = torch.promote_types(out, torch.float32)
    q, k, v = (x.to(out).to(wide) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    index = torch.arange(Tk, device=q.device)
    distance = index[Tk - Tq:, None] - index  # (Tq, Tk)
    seen = (distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool))[None]
    if window:
        where = index[None] if positions is None else positions.view(-1, Tk)  # (1 or B, Tk)
        seen = seen & (((where[:, Tk - Tq:, None] - where[:, None]).abs() < window) | (where[:, None] < sinks))
    if docs is not None:
        seen = seen & (docs[:, Tk - Tq:, None] == docs[:, None])
    distance = distance.clamp(min=0) if causal else distance.abs()
    keys, values, offsets = relative or (None, None, None)
    u, w = (x.to(wide)[:, None] for x in offsets) if offsets is not None else (0, 0)  # (H, 1, D)
    score = (q + u) @ k.mT
    if keys is not None:
        row = distance.clamp(max=keys.shape[1] - 1).expand(B, H, Tq, Tk)  # of the vectors
        score = score + ((q + w) @ keys.to(wide).mT).gather(-1, row)
    score = score * (D ** -0.5 if scale is None else scale)
    if bias is not None:
        score = score + (-bias[:, None, None] * distance if bias.dim() == 1 else bias[:, distance.clamp(max=bias.shape[1] - 1)])
    p = score.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    y = p @ v
    if values is not None:
        y = y + p.new_zeros(B, H, Tq, values.shape[1]).scatter_add(-1, row, p) @ values.to(wide)
    return y.to(out), p


@contextlib.contextmanager
def captured():
    """While it lasts, kernels.attention is dense() above. Yields a list to which each call, that is each layer in turn, adds its probabilities (B, H, Tq, Tk)."""
    maps, plain = [], kernels.attention

    def attention(*given, **options):
        y, p = dense(*given, **options)
        maps.append(p)
        return y
    kernels.attention = attention
    try:
        yield maps
    finally:
        kernels.attention = plain


@torch.no_grad()
def maps_of(model, tokens, number=0):
    """The probabilities of every layer, a list of (B, H, T, T), over tokens (B, T), in eval mode. Models of random positions draw them by `number`."""
    was, device = model.training, next(model.parameters()).device
    model.eval()
    with captured() as maps, warnings.catch_warnings():
        warnings.simplefilter("ignore", PastTrainedLength)
        model.hidden(tokens.to(device), model.draw_positions(*tokens.shape, number))
    model.train(was)
    return maps


def attended(p, bins=10):
    """Probabilities (B, H, T, T) -> per head, meaned over sequences and queries 1 .. T-1: distance (H,), normalised distance (H,), histogram (H, bins), float64."""
    T = p.shape[-1]
    mass = p[:, :, 1:].mean(0).cpu().double()  # (H, T-1, T)
    i, j = torch.arange(1, T)[:, None], torch.arange(T)
    distance = (i - j).clamp(min=0)  # above the diagonal there is no mass
    stretch = (bins * (distance + 1) - 1) // (i + 1)  # the bin of (distance + 1) / (i + 1), which belongs to the one it closes; in whole numbers, since 0.3 * 10 is not 3
    histogram = torch.zeros(len(mass), bins, dtype=torch.float64).index_add_(1, stretch.flatten(), mass.flatten(1))
    return (mass * distance).sum(-1).mean(-1), (mass * (distance + 1) / (i + 1)).sum(-1).mean(-1), histogram / (T - 1)


def by_slope(slopes, T, window=0, sinks=0):
    """Probabilities (1, H, T, T) of causal heads in whose scores -slope x distance is all there is: slopes (H,)."""
    nothing = torch.zeros(1, len(slopes), T, 1)
    return dense(nothing, nothing, nothing, bias=slopes.cpu(), window=window, sinks=sinks)[1]


def distances(model, dataset, name="model", length=None, windows=32, bins=10, seed=1337, device=None):
    """A row per layer and head: "distance" in tokens, "normalised", "histogram", and, where the scheme adds slopes, "slope", "range" (1 / slope) and "slope_alone".

    model: a GPT, which is put on the device (default: where it is). dataset: a data.Dataset, whose val split is read. length: tokens in a window, by default the
    trained length. Raises Refused or UserError where model or text do not reach that far.
    """
    length, rows = length or model.config.trained_length, []
    tokens, _ = windows_of(dataset.val, length, windows, seed)
    model.to(device or next(model.parameters()).device)
    sums = None
    for number, window in enumerate(tokens.split(1)):  # one at a time: maps are large
        found = [attended(p, bins) for p in maps_of(model, window, number)]
        sums = found if sums is None else [tuple(a + b for a, b in zip(*pair)) for pair in zip(sums, found)]
    for layer, (distance, normalised, histogram) in enumerate(sums):
        slopes = None if layer in model.config.nope_layers else model.pos.bias(length, layer)
        slopes = slopes if slopes is not None and slopes.dim() == 1 else None
        alone = None if slopes is None else attended(by_slope(slopes, length, *((model.config.window, model.config.sinks) if layer in model.config.window_layers else ())))[0]
        for head in range(len(distance)):
            rows.append({"checkpoint": name, "task": "attention", "length": length, "layer": layer, "head": head, "distance": distance[head].item() / len(tokens),
                         "normalised": normalised[head].item() / len(tokens), "histogram": (histogram[head] / len(tokens)).tolist(), "windows": len(tokens)})
            if slopes is not None:
                rows[-1] |= {"slope": slopes[head].item(), "range": 1 / slopes[head].item(), "slope_alone": alone[head].item()}
    return rows


def even(length, bins=10):
    """The row of a head that attends alike to all that it sees."""
    distance, normalised, histogram = attended(by_slope(torch.zeros(1), length), bins)
    return {"checkpoint": "even", "task": "attention", "length": length, "distance": distance.item(), "normalised": normalised.item(), "histogram": histogram[0].tolist()}


def divergence(p, q):
    """Jensen-Shannon divergence in nats of probabilities along the last dimension, 0 .. ln 2: the entropy of their mean less the mean of their entropies."""
    def entropy(x):
        return -torch.xlogy(x, x).sum(-1)
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)


def between(maps, others):
    """Divergences (layers, H, H') of all pairs of heads of two models' maps over the same window, lists of (1, H, T, T), meaned over queries 1 .. T-1."""
    return torch.stack([torch.stack([divergence(head, q[0, :, 1:]).mean(-1) for head in p[0, :, 1:]]) for p, q in zip(maps, others)]).cpu()


def divergences(ready, length=None, windows=32, seed=1337, device=None):
    """A row per pair of checkpoints: "divergence" in nats, as defined above, and "layers", that of each layer.

    ready: name -> (GPT, data.Dataset). length: by default the shortest trained length. Two checkpoints of different depth or text cannot be compared: "refused" says why.
    """
    length, rows = length or min(model.config.trained_length for model, _ in ready.values()), []
    for a, b in itertools.combinations(ready, 2):
        (model, text), (other, other_text) = ready[a], ready[b]
        row = {"checkpoint": a, "with": b, "task": "divergence", "length": length}
        try:
            if model.config.n_layer != other.config.n_layer:
                raise UserError(f"{a} has {model.config.n_layer} layers and {b} {other.config.n_layer}: compare checkpoints of one depth")
            if (text.hash, text.bos) != (other_text.hash, other_text.bos):
                raise UserError(f"{a} and {b} read different text, or only one of them <bos>: compare checkpoints of one data set")
            tokens, pairs = windows_of(text.val, length, windows, seed)[0], 0
            for one in (model, other):
                one.to(device or next(one.parameters()).device)
            for number, window in enumerate(tokens.split(1)):
                pairs = pairs + between(maps_of(model, window, number), maps_of(other, window, number))
            layers = (pairs / len(tokens)).flatten(1).amin(1)
            rows.append({**row, "divergence": layers.mean().item(), "layers": layers.tolist(), "windows": len(tokens)})
        except (Refused, UserError) as refusal:
            rows.append({**row, "refused": str(refusal)})
    return rows


def mean_of(rows, key):
    """The mean of a number, or of each in a list, over rows."""
    values = torch.tensor([row[key] for row in rows], dtype=torch.float64).mean(0)
    return values.tolist()


def table(rows, bins):
    """The rows as text: per length a line per checkpoint, then its heads, its slopes and the divergences."""
    out, wide = [], max(10, *(len(row["checkpoint"]) for row in rows))
    for length in dict.fromkeys(row["length"] for row in rows):
        mine = [row for row in rows if row["length"] == length and "distance" in row]
        names = list(dict.fromkeys(row["checkpoint"] for row in mine))
        out += [f"attention in windows of {length}, mean over layers and heads: distance in tokens, normalised, and percent of the probability in each {bins}th of it, nearest first",
                " " * wide + f"{'tokens':>8}{'norm.':>7}  " + "".join(f"{(b + 1) / bins:>6.2f}" for b in range(bins))]
        for name in (*names, "even"):
            heads = [row for row in mine if row["checkpoint"] == name] if name in names else [even(length, bins)]
            out.append(name.ljust(wide) + f"{mean_of(heads, 'distance'):>8.1f}{mean_of(heads, 'normalised'):>7.3f}  " + "".join(f"{100 * share:>6.1f}" for share in mean_of(heads, "histogram")))
        for name in names:
            heads = [row for row in mine if row["checkpoint"] == name]
            out += ["", f"{name}, tokens (normalised) of each head", " " * 10 + "".join(f"{'head ' + str(head):>14}" for head in range(max(row["head"] for row in heads) + 1))]
            for layer in dict.fromkeys(row["layer"] for row in heads):
                out.append(f"layer {layer}".ljust(10) + "".join(f"{row['distance']:>7.1f} ({row['normalised']:.2f})" for row in heads if row["layer"] == layer))
            if sloped := [row for row in heads if "slope" in row]:
                out += ["", f"{name}, by slope m, tokens", f"{'head':<10}{'m':>10}{'1/m':>10}{'m alone':>10}{'measured':>10}"]
                for head in dict.fromkeys(row["head"] for row in sloped):
                    same = [row for row in sloped if row["head"] == head]
                    out.append(f"{head:<10}{same[0]['slope']:>10.5f}{same[0]['range']:>10.1f}{same[0]['slope_alone']:>10.1f}{mean_of(same, 'distance'):>10.1f}")
        out.append("")
        if pairs := [row for row in rows if row["length"] == length and "divergence" in row]:
            out.append("Jensen-Shannon divergence of attention, nats, 0 to 0.693: the closest heads of each layer, mean over the layers, and each layer; the most alike first")
            both = max(len(f"{row['checkpoint']}, {row['with']}") for row in pairs)
            for row in sorted(pairs, key=lambda row: row["divergence"]):
                out.append(f"{row['checkpoint']}, {row['with']}".ljust(both) + f"{row['divergence']:>8.3f}  " + "".join(f"{layer:>7.3f}" for layer in row["layers"]))
            out.append("")
    out += dict.fromkeys(f"refused: {row['checkpoint']} at {row['length']}: {row['refused']}" for row in rows if "refused" in row)
    return "\n".join(out).rstrip()


def picture(rows, bins, file, note):
    """Per length: the histograms, every head's mean distance by layer, the slopes' ranges where there are any, and the divergences where there are two checkpoints."""
    if not (plt := pyplot(file)):
        return
    lengths = [n for n in dict.fromkeys(row["length"] for row in rows) if any("distance" in row and row["length"] == n for row in rows)]
    if not lengths:
        return
    sloped, paired = any("slope" in row for row in rows), any("divergence" in row for row in rows)
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    figure, axes = plt.subplots(len(lengths), 2 + sloped + paired, figsize=(5.6 * (2 + sloped + paired), 4.4 * len(lengths)), squeeze=False, layout="constrained")
    for length, (shares, far, *more) in zip(lengths, axes):
        mine = [row for row in rows if row["length"] == length and "distance" in row]
        centres, flat = [(b + 0.5) / bins for b in range(bins)], even(length, bins)
        for i, name in enumerate(names):
            if not (heads := [row for row in mine if row["checkpoint"] == name]):
                continue
            look = {"color": f"C{i % 10}", "marker": "osD^vP*X"[i % 8], "markersize": 4}
            shares.plot(centres, mean_of(heads, "histogram"), label=name, **look)
            far.plot([row["layer"] + 0.6 * (i / len(names) - 0.5) for row in heads], [row["distance"] for row in heads], linestyle="", **look)
            if (own := [row for row in heads if "slope" in row]):
                more[0].plot([row["range"] for row in own], [row["distance"] for row in own], linestyle="", label=f"{name}, each layer's heads", **look)
                more[0].plot([row["range"] for row in own], [row["slope_alone"] for row in own], linestyle="", marker="_", markersize=14, color="black", label="slope alone")
        shares.plot(centres, flat["histogram"], color="gray", linestyle="--", label="even")
        far.axhline(flat["distance"], color="gray", linestyle="--")
        shares.set(xlabel="normalised distance, (t - n + 1) / t", ylabel="share of the probability", title=f"where attention looks, windows of {length}", ylim=(0, None))
        far.set(xlabel="layer", ylabel="mean distance in tokens", title="every head's mean distance", yscale="log")
        far.xaxis.get_major_locator().set_params(integer=True)
        if sloped:
            reach = [1, max([length, *(row["range"] for row in mine if "slope" in row)])]
            more[0].plot(reach, reach, color="gray", linestyle=":", label="distance = 1/m")
            more[0].set(xscale="log", yscale="log", xlabel="1/m", ylabel="mean distance in tokens", title="a head's slope m and its range")
        for panel in (shares, far, *more[:sloped]):
            panel.grid(alpha=0.3)
        for panel in (shares, *more[:sloped]):
            handles = dict(zip(*reversed(panel.get_legend_handles_labels())))  # each label once
            panel.legend(handles.values(), handles.keys(), fontsize=8)
        if paired:
            square = torch.full((len(names), len(names)), float("nan")).fill_diagonal_(0)
            for row in rows:
                if row["length"] == length and "divergence" in row:
                    a, b = names.index(row["checkpoint"]), names.index(row["with"])
                    square[a, b] = square[b, a] = row["divergence"]
            drawn = more[-1].imshow(square.numpy(), cmap="viridis_r", vmin=0)
            for a, b in (square > 0).nonzero().tolist():
                more[-1].text(b, a, f"{square[a, b]:.2f}", ha="center", va="center", fontsize=7, color="white" if square[a, b] > square.nan_to_num().max() / 2 else "black")
            more[-1].set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
            more[-1].set_yticks(range(len(names)), names, fontsize=8)
            more[-1].set(title="Jensen-Shannon divergence in nats")
            figure.colorbar(drawn, ax=more[-1], shrink=0.8)
    figure.supxlabel(note.replace("; ", "\n"), fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"{file} is drawn")


def main():
    cfg, _, paths = config.parse(MapsConfig, about=__doc__, paths="run folders or step folders, NAME=FOLDER to name one in table and plot")
    for file in filter(None, (cfg.plot, cfg.json)):  # before the work, not after it
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        open(file, "ab").close()
    ready, rows = load(paths, cfg), []
    for length in cfg.lengths or (min(model.config.trained_length for model, _ in ready.values()),):
        for name, (model, dataset) in ready.items():
            try:
                rows += distances(model, dataset, name, length, cfg.windows, cfg.bins, cfg.seed)
            except (Refused, UserError) as refusal:
                rows.append({"checkpoint": name, "task": "attention", "length": length, "refused": str(refusal)})
        refused = [row["checkpoint"] for row in rows if row["length"] == length and "refused" in row]
        rows += divergences({name: pair for name, pair in ready.items() if name not in refused}, length, cfg.windows, cfg.seed)
    print(table(rows, cfg.bins))
    first, device = next(iter(ready.values()))[1], config.pick_device(cfg.device)
    note = f"{config.provenance(device)}; {first.name} {first.hash}, {cfg.windows} windows, seed {cfg.seed}"
    print(f"\n{note}")
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if cfg.plot:
        picture(rows, cfg.bins, cfg.plot, note)
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
