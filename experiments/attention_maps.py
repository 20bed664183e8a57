"""Measure how far attention looks, and how alike the attention of two checkpoints is.

    python experiments/attention_maps.py out/alibi out/nope
    python experiments/attention_maps.py nope=out/nope out/t5 --lengths=256 --plot=out/attention.png

For sequences of validation text, each layer and each head, averaged over all queries but the first
(which only sees itself) and weighted by attention probability (Kazemnejad et al. 2023):
  distance    i - j of query i and key j, in tokens
  normalised  (t - n + 1) / t of query t and key n, both counted from 1: 1 / t is the token itself,
              1 the first token of the sequence; uniform attention is at about 1 / 2
  histogram   the probability in each of --bins equal parts of the normalised distance, from near
              to far
The line `uniform` is a head that attends equally to all it sees. Where a scheme adds -slope x
distance (ALiBi: Press et al. 2022), the table gives each head's slope m, its range 1 / m, and the
mean distance of the slope alone, when all else in the scores is equal: a sequence is too short for
the small slopes to have their whole range.

Divergence of two checkpoints on the same sequences: of two heads, the Jensen-Shannon divergence of
their probabilities in nats (0: equal, ln 2 = 0.693: disjoint), averaged over queries; of two layers
at the same depth, the smallest over all pairs of heads; of two checkpoints, the mean over layers.

The probabilities are those of nanolong/attention_maps.py, in float32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip
import itertools
from dataclasses import dataclass

import torch

from experiments.probe import (
    CheckpointsConfig,
    run_on_checkpoints,
    sample_sequences,
    shortest_context,
)
from experiments.report import line_style, save_figure, select, text_table
from nanolong import cli
from nanolong.attention_maps import attention_maps, dense_attention
from nanolong.errors import UserError
from nanolong.losses import evaluation_mode
from nanolong.plots import format_refusals, unique
from nanolong.validate import require


@dataclass
class MapsConfig(CheckpointsConfig):
    windows: int = 32  # sequences of validation text
    bins: int = 10  # bins of the histogram

    def __post_init__(self):
        super().__post_init__()
        require(
            min(self.windows, self.bins) >= 1,
            "windows and bins must be at least 1: raise the one that is not",
        )
        require(
            min(self.lengths, default=2) >= 2,
            "the first query sees only itself: give lengths of at least 2",
        )


# -----------------------------------------------------------------------------
# How far attention looks.


def summarise(p, bins=10):
    """Average probabilities (B, H, T, T) over sequences and queries 1 .. T-1.

    Returns, per head in float64: distance (H,), normalised distance (H,), histogram (H, bins).
    """
    T = p.shape[-1]
    p = p[:, :, 1:].mean(0).cpu().double()  # (H, T-1, T)
    query = torch.arange(1, T)[:, None]
    distance = (query - torch.arange(T)).clamp(min=0)  # above the diagonal p is 0
    # The bin of the normalised distance; an upper edge belongs to the bin below it. In integers,
    # because 0.3 * 10 is not 3.
    index = (bins * (distance + 1) - 1) // (query + 1)
    histogram = torch.zeros(len(p), bins, dtype=torch.float64)
    histogram.index_add_(1, index.flatten(), p.flatten(1))
    mean_distance = (p * distance).sum(-1).mean(-1)
    mean_normalised = (p * (distance + 1) / (query + 1)).sum(-1).mean(-1)
    return mean_distance, mean_normalised, histogram / (T - 1)


def slope_attention(slopes, T, window=0, sinks=0):
    """Probabilities (1, H, T, T) of causal heads whose only score is -slope x distance."""
    zeros = torch.zeros(1, len(slopes), T, 1)
    _, p = dense_attention(zeros, zeros, zeros, bias=slopes.cpu(), window=window, sinks=sinks)
    return p


def layer_slopes(model, layer, length):
    """The slopes (H,) that the scheme adds in a layer, or None."""
    if not model.config.uses_positions(layer):
        return None
    bias = model.pos.bias(length, layer)
    return bias if bias is not None and bias.dim() == 1 else None


def slope_distances(model, layer, slopes, length):
    """The mean distance (H,) that the slopes alone give, with the layer's window."""
    window, sinks = 0, 0
    if model.config.uses_window(layer):
        window, sinks = model.config.window, model.config.sinks
    return summarise(slope_attention(slopes, length, window, sinks))[0]


def maps_of(model, tokens):
    """The attention of each sequence: a list of (1, H, T, T) over layers. One at a time: large."""
    for i, sequence in enumerate(tokens.split(1)):
        with evaluation_mode(model, torch.float32):
            maps = attention_maps(model, sequence, i)
        yield maps


def distances(model, dataset, name="model", length=None, windows=32, bins=10, seed=1337):
    """Measure where each head looks on validation text. Returns a record per layer and head.

    Each has "distance" in tokens, "normalised", "histogram" and, where the scheme adds slopes,
    "slope", "range" (1 / slope) and "slope_alone". model: a GPT. dataset: a data.Dataset. length:
    default the original context length. Raises UserError when the text is shorter, or the model
    cannot compute so many positions.
    """
    length = length or model.config.original_length
    tokens, _ = sample_sequences(dataset.val, length, windows, seed)
    n = len(tokens)
    sums = 0  # over sequences: (layers, H, 2 + bins)
    for maps in maps_of(model, tokens):
        summaries = [summarise(p, bins) for p in maps]
        sums = sums + torch.stack([torch.column_stack(summary) for summary in summaries])
    records = []
    for layer, heads in enumerate((sums / n).tolist()):
        slopes = layer_slopes(model, layer, length)
        if slopes is not None:
            alone = slope_distances(model, layer, slopes, length)
        for head, (distance, normalised, *histogram) in enumerate(heads):
            record = {
                "checkpoint": name,
                "task": "attention",
                "length": length,
                "layer": layer,
                "head": head,
                "distance": distance,
                "normalised": normalised,
                "histogram": histogram,
                "windows": n,
            }
            if slopes is not None:
                slope = slopes[head].item()
                record["slope"] = slope
                record["range"] = 1 / slope
                record["slope_alone"] = alone[head].item()
            records.append(record)
    return records


def uniform(length, bins=10):
    """The record of a head that attends equally to all it sees."""
    distance, normalised, histogram = summarise(slope_attention(torch.zeros(1), length), bins)
    return {
        "checkpoint": "uniform",
        "task": "attention",
        "length": length,
        "distance": distance.item(),
        "normalised": normalised.item(),
        "histogram": histogram[0].tolist(),
    }


# -----------------------------------------------------------------------------
# How alike two checkpoints are.


def entropy(p):
    """Entropy in nats along the last dimension."""
    return -torch.xlogy(p, p).sum(-1)


def jensen_shannon(p, q):
    """Jensen-Shannon divergence in nats along the last dimension, 0 .. ln 2."""
    divergence = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return divergence.clamp(min=0)


def head_divergences(maps, other_maps):
    """Divergences of all pairs of heads of two models, averaged over queries 1 .. T-1.

    maps: a list of (1, H, T, T) over layers, of the same sequence. Returns (layers, H, H').
    """
    layers = []
    for p, q in zip(maps, other_maps, strict=True):
        rows = [jensen_shannon(head, q[0, :, 1:]).mean(-1) for head in p[0, :, 1:]]
        layers.append(torch.stack(rows))
    return torch.stack(layers).cpu()


def check_comparable(name, model, dataset, other_name, other_model, other_dataset):
    """Raise UserError if two checkpoints differ in depth or text."""
    n_layer, other_n_layer = model.config.n_layer, other_model.config.n_layer
    require(
        n_layer == other_n_layer,
        f"{name} has {n_layer} layers and {other_name} {other_n_layer}: compare checkpoints of the "
        "same depth",
    )
    require(
        (dataset.hash, dataset.bos) == (other_dataset.hash, other_dataset.bos),
        f"{name} and {other_name} differ in their dataset or in --bos: compare checkpoints of one "
        "dataset",
    )


def compare(model, other, dataset, length, windows, seed):
    """The divergence of each layer of two models, and the number of sequences."""
    tokens, _ = sample_sequences(dataset.val, length, windows, seed)
    pairs = zip(maps_of(model, tokens), maps_of(other, tokens), strict=True)
    mean = sum(head_divergences(*maps) for maps in pairs) / len(tokens)
    return mean.flatten(1).amin(1), len(tokens)


def divergences(loaded, length=None, windows=32, seed=1337):
    """Compare all pairs of checkpoints. Returns a record per pair.

    Each has "divergence" in nats and "layers", that of each layer, or "refused" with the reason why
    the two cannot be compared. loaded: name -> (GPT, data.Dataset). length: default the shortest
    original context length.
    """
    length = length or shortest_context(loaded)
    records = []
    for a, b in itertools.combinations(loaded, 2):
        model, dataset = loaded[a]
        other, other_dataset = loaded[b]
        record = {"checkpoint": a, "with": b, "task": "divergence", "length": length}
        try:
            check_comparable(a, model, dataset, b, other, other_dataset)
            layers, n = compare(model, other, dataset, length, windows, seed)
            record["divergence"] = layers.mean().item()
            record["layers"] = layers.tolist()
            record["windows"] = n
        except UserError as error:
            record["refused"] = str(error)
        records.append(record)
    return records


# -----------------------------------------------------------------------------
# Table.


def mean_of(records, key):
    """The mean of a number, or of each number of a list, over records."""
    values = torch.tensor([record[key] for record in records], dtype=torch.float64)
    return values.mean(0).tolist()


def summary_lines(records, length, names, bins):
    """A line per checkpoint, averaged over layers and heads, and one of uniform attention."""
    rows = []
    for name in (*names, "uniform"):
        heads = select(records, checkpoint=name) or [uniform(length, bins)]
        row = [name, f"{mean_of(heads, 'distance'):.1f}", f"{mean_of(heads, 'normalised'):.3f}"]
        rows.append(row + [f"{100 * p:.1f}" for p in mean_of(heads, "histogram")])
    edges = [f"{(b + 1) / bins:.2f}" for b in range(bins)]
    return [
        f"attention at length {length}, mean over layers and heads: distance in tokens, "
        f"normalised distance, percent of the probability in each bin of it (nearest first)",
        *text_table(["", "tokens", "norm.", *edges], rows),
    ]


def head_lines(heads, name):
    """The distance of each head of a checkpoint, a line per layer; and each slope, if it has any.

    Of a slope: its range and the measured distance, averaged over layers.
    """
    rows = []
    for layer in unique(heads, "layer"):
        cells = [
            f"{record['distance']:.1f} ({record['normalised']:.2f})"
            for record in select(heads, layer=layer)
        ]
        rows.append([f"layer {layer}", *cells])
    titles = [f"head {head}" for head in unique(heads, "head")]
    lines = ["", f"{name}, tokens (normalised) of each head", *text_table(["", *titles], rows)]
    with_slopes = [record for record in heads if "slope" in record]
    if not with_slopes:
        return lines
    rows = []
    for head in unique(with_slopes, "head"):
        layers = select(with_slopes, head=head)
        first = layers[0]
        distances = [first["range"], first["slope_alone"], mean_of(layers, "distance")]
        rows.append([str(head), f"{first['slope']:.5f}", *(f"{x:.1f}" for x in distances)])
    header = ["head", "m", "1/m", "m alone", "measured"]
    return [*lines, "", f"{name}, by slope m, tokens", *text_table(header, rows)]


def divergence_lines(pairs):
    """A line per pair of checkpoints, the most alike first."""
    rows = []
    for record in sorted(pairs, key=lambda record: record["divergence"]):
        title = f"{record['checkpoint']}, {record['with']}"
        rows.append([title, *(f"{x:.3f}" for x in (record["divergence"], *record["layers"]))])
    layers = [str(layer) for layer in range(len(pairs[0]["layers"]))]
    return [
        "Jensen-Shannon divergence of attention in nats, 0 to 0.693, of the closest heads of each "
        "layer: mean over layers, then each layer; the most alike first",
        *text_table(["", "mean", *layers], rows),
    ]


def format_table(records, cfg):
    """The records as text: per length the summary, heads, slopes and divergences."""
    lines = []
    for length in unique(records, "length"):
        at_length = select(records, length=length)
        measured = [record for record in at_length if "distance" in record]
        names = unique(measured, "checkpoint")
        lines += summary_lines(measured, length, names, cfg.bins)
        for name in names:
            lines += head_lines(select(measured, checkpoint=name), name)
        lines.append("")
        pairs = [record for record in at_length if "divergence" in record]
        if pairs:
            lines += [*divergence_lines(pairs), ""]
    return "\n".join(lines + format_refusals(records)).rstrip()


# -----------------------------------------------------------------------------
# Figure.


def plot_histograms(axes, records, names, length, bins):
    """Draw the probability by normalised distance, a line per checkpoint."""
    centres = [(b + 0.5) / bins for b in range(bins)]
    for i, name in enumerate(names):
        heads = select(records, checkpoint=name)
        if heads:
            axes.plot(centres, mean_of(heads, "histogram"), label=name, **line_style(i))
    flat = uniform(length, bins)["histogram"]
    axes.plot(centres, flat, color="gray", linestyle="--", label="uniform")
    axes.set_title(f"where attention looks, sequences of {length}")
    axes.set_xlabel("normalised distance, (t - n + 1) / t")
    axes.set(ylabel="fraction of the probability", ylim=(0, None))
    axes.legend(fontsize=8)


def plot_head_distances(axes, records, names, length, bins):
    """Draw the mean distance of every head, by layer."""
    for i, name in enumerate(names):
        heads = select(records, checkpoint=name)
        # side by side within a layer
        offset = 0.6 * (i / len(names) - 0.5)
        layers = [record["layer"] + offset for record in heads]
        tokens = [record["distance"] for record in heads]
        axes.plot(layers, tokens, linestyle="", **line_style(i))
    axes.axhline(uniform(length, bins)["distance"], color="gray", linestyle="--")
    axes.set(xlabel="layer", ylabel="mean distance in tokens", yscale="log")
    axes.set_title("mean distance of every head")
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_slopes(axes, records, names, length):
    """Draw each head's mean distance over the range 1/m of its slope."""
    with_slopes = [record for record in records if "slope" in record]
    for i, name in enumerate(names):
        heads = select(with_slopes, checkpoint=name)
        if not heads:
            continue
        ranges = [record["range"] for record in heads]
        tokens = [record["distance"] for record in heads]
        alone = [record["slope_alone"] for record in heads]
        label = f"{name}, heads of all layers"
        axes.plot(ranges, tokens, linestyle="", label=label, **line_style(i))
        dash = {"linestyle": "", "marker": "_", "markersize": 14, "color": "black"}
        axes.plot(ranges, alone, label="slope alone", **dash)
    ends = [1, max([length, *(record["range"] for record in with_slopes)])]
    axes.plot(ends, ends, color="gray", linestyle=":", label="distance = 1/m")
    axes.set(xscale="log", yscale="log", xlabel="1/m", ylabel="mean distance in tokens")
    axes.set_title("a head's slope m and its range")
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # each label once
    axes.legend(by_label.values(), by_label.keys(), fontsize=8)


def plot_divergences(figure, axes, pairs, names):
    matrix = torch.full((len(names), len(names)), float("nan")).fill_diagonal_(0)
    for record in pairs:
        a = names.index(record["checkpoint"])
        b = names.index(record["with"])
        matrix[a, b] = matrix[b, a] = record["divergence"]
    axes.grid(False)
    image = axes.imshow(matrix.numpy(), cmap="viridis_r", vmin=0)
    half = matrix.nan_to_num().max() / 2
    for a, b in (matrix > 0).nonzero().tolist():
        color = "white" if matrix[a, b] > half else "black"
        label = f"{matrix[a, b]:.2f}"
        axes.text(b, a, label, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title("Jensen-Shannon divergence in nats")
    figure.colorbar(image, ax=axes, shrink=0.8)


def plot_records(records, cfg, note):
    """Draw a PNG with a row per length.

    Panels: the histograms, the mean distance of every head, the slopes where there are any, and the
    divergences where there are two checkpoints.
    """
    measured = [record for record in records if "distance" in record]
    if not measured:
        return
    lengths = unique(measured, "length")
    names = unique(records, "checkpoint")
    has_slopes = any("slope" in record for record in records)
    has_pairs = any("divergence" in record for record in records)
    n_columns = 2 + has_slopes + has_pairs

    def draw(figure, *axes):
        for i, length in enumerate(lengths):
            row = axes[i * n_columns : (i + 1) * n_columns]
            heads = select(measured, length=length)
            plot_histograms(row[0], heads, names, length, cfg.bins)
            plot_head_distances(row[1], heads, names, length, cfg.bins)
            if has_slopes:
                plot_slopes(row[2], heads, names, length)
            if has_pairs:
                pairs = [r for r in select(records, length=length) if "divergence" in r]
                plot_divergences(figure, row[-1], pairs, names)

    size = (5.6 * n_columns, 4.4 * len(lengths))
    save_figure(cfg.plot, draw, size, note, panels=(len(lengths), n_columns))


# -----------------------------------------------------------------------------
# The command line.


def measure(model, dataset, name, length, cfg):
    return distances(model, dataset, name, length, cfg.windows, cfg.bins, cfg.seed)


def compare_all(loaded, length, cfg):
    return divergences(loaded, length, cfg.windows, cfg.seed)


def main():
    scripts = (measure, format_table, plot_records, compare_all)
    return run_on_checkpoints(MapsConfig, "attention", *scripts)


if __name__ == "__main__":
    cli.run_main(main)
