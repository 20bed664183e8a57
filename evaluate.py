"""Measure checkpoints: loss by context length and by position, several in one table and plot.

    python evaluate.py out/rope out/rope-yarn4 --lengths=256,512,1024,2048 --plot=out/length.png --json=out/length.json
    python evaluate.py "untouched=out/rope" "stretched=out/rope-yarn4" --protocol=last-quarter

Protocols, in nats per token of the validation text: chunked cuts it into windows of each length that do not overlap and scores every
token; last-quarter scores only those in the last quarter of a window, which whole-window means hide; position splits each window's
loss into 16 stretches. All lengths score the same span of text: of a last window that overlaps, only the rest is scored.
"""
import config  # first: it says in one sentence that a Python is too old
import contextlib
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import data
from config import UserError
from model import GPT, PastTrainedLength, Refused


@dataclass
class EvaluateConfig:
    lengths: tuple[int, ...] = ()    # context lengths in tokens; by default 1, 2, 4 and 8 times the shortest trained length
    task: Literal["loss"] = "loss"   # what is measured
    protocol: tuple[Literal["chunked", "last-quarter", "position"], ...] = ("chunked", "last-quarter")  # how, see above
    max_tokens: int = 65536          # span of validation text that is scored
    dataset: str = ""                # by default the one that each checkpoint was trained on
    plot: str = ""                   # write the picture to this PNG (matplotlib draws it)
    json: str = ""                   # write the rows to this file
    best: bool = False               # of a run folder take the step with the best validation loss, not the newest
    device: str = "auto"             # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min((self.max_tokens, *self.lengths)) < 1:
            raise UserError("lengths and max_tokens count tokens and must be at least 1")
        if self.plot and not self.plot.endswith(".png"):
            raise UserError(f"--plot={self.plot} must end in .png")
        if not self.protocol:
            raise UserError("protocol names nothing: choose from chunked, last-quarter, position")


@torch.no_grad()
def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32):
    """Sum of nats and number of scored tokens at each position of windows of `length`: two float64 tensors (length,).

    The windows cover the first min(max_tokens, what there is) targets of the longest file of a data.Split, each exactly once. The model
    computes where its weights are, products in dtype. Raises Refused or UserError where model or text do not reach that far.
    """
    file = max(range(len(split.tokens)), key=lambda i: len(split.tokens[i]))
    span = min(max_tokens, len(split.tokens[file]) - (split.bos is None))
    if length > span:
        raise UserError(f"a window of {length} tokens is longer than the {span} that are scored: raise --max_tokens, or give a longer validation text")
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()
    nats, tokens = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    starts, rows = list(range(0, span, length)), max(1, 16384 // length)
    was, _ = model.training, model.eval()
    for i in range(0, len(starts), rows):
        x, y = map(torch.from_numpy, map(data.np.stack, zip(*(split.cut(file, min(start, span - length), length) for start in starts[i:i + rows]))))
        if starts[i + len(y) - 1] > span - length:  # the last window overlaps: its beginning was scored
            y[-1, :starts[-1] - (span - length)] = -1
        with autocast, warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            loss = model(x.to(device), y.to(device), reduction="none").cpu().double()
        nats += loss.sum(0)
        tokens += (y >= 0).sum(0)
    model.train(was)
    return nats, tokens


def rows_of(name, nats, tokens, protocols):
    """The rows that protocols make of one length's sums by position: dicts as they stand in the JSON."""
    length, rows = len(nats), []
    for protocol in protocols:
        row = {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length}
        edges = {"chunked": [0, length], "last-quarter": [length * 3 // 4, length]}.get(protocol) or sorted({length * i // 16 for i in range(17)})
        for a, b in zip(edges, edges[1:]):
            count = int(tokens[a:b].sum())
            where = {"position": [a, b]} if protocol == "position" else {}
            rows.append({**row, **where, "loss": nats[a:b].sum().item() / count if count else math.nan, "tokens": count})
    return rows


def measure(models, cfg, lengths):
    """The rows of every checkpoint (name -> GPT, on its device), length and protocol; a cell that cannot be has "refused" with the reason."""
    rows, splits = [], {}
    for name, model in models.items():
        dataset, bos = cfg.dataset or model.meta["dataset"], model.meta.get("bos") is not None
        if (dataset, bos) not in splits:
            splits[dataset, bos] = data.Dataset(dataset, bos)
        if splits[dataset, bos].vocab_size != model.config.vocab_size:
            raise UserError(f"{name} has a vocabulary of {model.config.vocab_size} and dataset {dataset} one of {splits[dataset, bos].vocab_size}: give the --dataset that it was trained on")
        dtype = config.pick_dtype(cfg.dtype, next(model.parameters()).device)
        for length in lengths:
            try:
                rows += rows_of(name, *loss_by_position(model, splits[dataset, bos].val, length, cfg.max_tokens, dtype), cfg.protocol)
            except (Refused, UserError) as refusal:
                rows += [{"checkpoint": name, "task": "loss", "protocol": protocol, "length": length, "refused": str(refusal)} for protocol in cfg.protocol]
    return rows


def table(rows, lengths):
    """The rows as text: a line per checkpoint and protocol, a column per length (of `position`: a column per sixteenth)."""
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    wide = max(10, *map(len, names))
    out = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        mine = [row for row in rows if row["protocol"] == protocol]
        if protocol != "position":
            out += [f"{protocol} (nats per token)".ljust(wide) + "".join(f"{n:>10}" for n in lengths) if wide > 29 else f"{protocol}, nats per token, at"] + (
                [] if wide > 29 else [" " * wide + "".join(f"{n:>10}" for n in lengths)])
            for name in names:
                cells = {row["length"]: row for row in mine if row["checkpoint"] == name}
                out.append(name.ljust(wide) + "".join(f"{cells[n]['loss']:>10.4f}" if "loss" in cells[n] else f"{'refused':>10}" for n in lengths))
        else:
            for n in lengths:
                out.append(f"by position in windows of {n}, nats per token, up to")
                edges = sorted({row["position"][1] for row in mine if row["length"] == n and "position" in row})
                out.append(" " * wide + "".join(f"{edge:>7}" for edge in edges))
                for name in names:
                    cells = [row for row in mine if row["checkpoint"] == name and row["length"] == n]
                    out.append(name.ljust(wide) + ("".join(f"{row['loss']:>7.3f}" for row in cells) if "loss" in cells[0] else "   refused"))
        out.append("")
    out += [f"refused: {row['checkpoint']} at {row['length']}: {row['refused']}" for row in rows if "refused" in row and row["protocol"] == rows[0]["protocol"]]
    return "\n".join(out).rstrip()


def terminal_plot(series, height=12, width=64):
    """A plot in characters: series maps a name to its points [(x, y), ...], x on a log scale; each name is drawn with a letter of its own."""
    points = [p for line in series.values() for p in line if math.isfinite(p[1])]
    if not points:
        return "nothing to plot"
    left, right = math.log(min(x for x, _ in points)), math.log(max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * (width + 1) for _ in range(height + 1)]

    def put(x, y, mark):
        column = round((math.log(x) - left) / (right - left or 1) * width)
        row = round((high - y) / (high - low or 1) * height)
        grid[row][column] = mark if grid[row][column] in " ." or mark == grid[row][column] else "*" if mark != "." else grid[row][column]

    for letter, line in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 4, series.values()):
        line = [p for p in line if math.isfinite(p[1])]
        for (x0, y0), (x1, y1) in zip(line, line[1:]):
            for i in range(1, 16):
                put(math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * i / 16), y0 + (y1 - y0) * i / 16, ".")
        for x, y in line:
            put(x, y, letter)
    axis = [f"{high - (high - low) * i / height:7.3f} |" if i % 3 == 0 else " " * 8 + "|" for i in range(height + 1)]
    marks = [" "] * (width + 12)
    for x in sorted({x for x, _ in points}):
        at = round((math.log(x) - left) / (right - left or 1) * width)
        if all(c == " " for c in marks[at:at + len(str(x)) + 1]):
            marks[at:at + len(str(x))] = str(x)
    return "\n".join([a + "".join(g).rstrip() for a, g in zip(axis, grid)] + [" " * 8 + "+" + "-" * (width + 1), " " * 9 + "".join(marks).rstrip()]
                     + [f"  {letter} {name}" for letter, name in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 4, series)])


def series_of(rows, protocol):
    """name -> [(x, loss), ...] of one protocol: x is the length, or, by position, the end of the stretch in windows of the greatest length."""
    longest, series = max(row["length"] for row in rows), {}
    for row in rows:
        if row["protocol"] == protocol and "loss" in row and (protocol != "position" or row["length"] == longest):
            series.setdefault(row["checkpoint"], []).append((row["position"][1] if protocol == "position" else row["length"], row["loss"]))
    return series


def picture(rows, lengths, file, note):
    """Draw a panel per protocol and the first one's table into a PNG; without matplotlib, say so."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {file}: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    figure, axes = plt.subplots(2, len(protocols), figsize=(6.4 * len(protocols), 4.4 + 0.3 * len(names)), squeeze=False, height_ratios=[4, 0.5 + 0.3 * len(names)], layout="constrained")
    for column, protocol in enumerate(protocols):
        top, bottom = axes[0][column], axes[1][column]
        for name, line in series_of(rows, protocol).items():
            top.plot(*zip(*line), marker="o", markersize=4, label=name, color=f"C{names.index(name) % 10}")
        top.set(xscale="log", xlabel=f"position in windows of {max(lengths)}" if protocol == "position" else "context length in tokens", ylabel="nats per token", title=protocol)
        top.set_xticks(ticks := sorted({x for line in series_of(rows, protocol).values() for x, _ in line} if protocol != "position" else set(lengths)), [str(x) for x in ticks], minor=False)
        top.minorticks_off()
        top.grid(alpha=0.3)
        bottom.axis("off")
        if protocol != "position":
            cells = {(row["checkpoint"], row["length"]): f"{row['loss']:.3f}" if "loss" in row else "refused" for row in rows if row["protocol"] == protocol}
            drawn = bottom.table([[name, *(cells[name, n] for n in lengths)] for name in names], colLabels=["", *lengths], loc="center", cellLoc="center", edges="horizontal")
            drawn.auto_set_font_size(False)
            drawn.set_fontsize(8)
            drawn.auto_set_column_width([0])
    if axes[0][0].lines:
        axes[0][0].legend(fontsize=8)
    figure.supxlabel(note, fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"{file} is drawn")


def main():
    cfg, _, paths = config.parse(EvaluateConfig, about=__doc__, paths="run folders or step folders, NAME=FOLDER to name one in table and plot")
    if not paths:
        raise UserError("give at least one run folder, as in python evaluate.py out/python-rope")
    for file in filter(None, (cfg.plot, cfg.json)):  # before the work, not after it
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        open(file, "ab").close()
    device = config.pick_device(cfg.device)
    folders = {path.partition("=")[0] if "=" in path and not Path(path).exists() else path.rstrip("/"): path if Path(path).exists() else path.partition("=")[2] or path for path in paths}
    if len(folders) < len(paths):
        raise UserError("two checkpoints have the same name: give each its own, as in NAME=FOLDER")
    models = {name: GPT.load(folder, cfg.best).to(device) for name, folder in folders.items()}
    for name, model in models.items():
        if "dataset" not in model.meta and not cfg.dataset:
            raise UserError(f"{name} does not say on which text it was trained: give --dataset")
    shortest = min(model.config.trained_length for model in models.values())
    lengths = cfg.lengths or tuple(shortest * factor for factor in (1, 2, 4, 8))
    rows = measure(models, cfg, lengths)
    print(table(rows, lengths))
    for protocol in cfg.protocol:
        print(f"\n{protocol}, nats per token, by " + ("position" if protocol == "position" else "context length"))
        print(terminal_plot(series_of(rows, protocol)))
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if cfg.plot:
        first = next(iter(models.values()))
        picture(rows, lengths, cfg.plot, f"{cfg.max_tokens} tokens of {cfg.dataset or first.meta['dataset']}, data {first.meta.get('data_hash', 'unknown')}")
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
