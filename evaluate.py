"""Measure checkpoints: loss by context length and by position, several in one table and plot; or whether they find a needle.

    python evaluate.py out/rope out/rope-yarn4 --lengths=256,512,1024,2048 --plot=out/length.png --json=out/length.json
    python evaluate.py "untouched=out/rope" "stretched=out/rope-yarn4" --protocol=last-quarter
    python evaluate.py out/rope out/rope-yarn4 --task=needle --plot=out/needle.png

Protocols, in nats per token of the validation text:
  chunked        windows of each length that do not overlap; every token is scored
  last-quarter   of these, only the tokens in a window's last quarter, which whole-window means hide
  position       of these, the loss in each of 16 stretches of the window
  sliding        windows that advance by --stride; only the last `stride` tokens of each are scored (of the first window: all)
  token-aligned  the same tokens at every length, the last of windows that end at the same places: does more context help?
In the first four all lengths score the same span of text: of a last window that overlaps, only the rest is scored. A mean is over all scored tokens,
never over windows. A dynamic method reads every token of a window at the scale of the whole window, as one forward pass does. A model of random
positions reads each window at positions drawn as in training.

Needle: a passkey of three digits hidden in filler at a depth (0 the start, 1 the end) and asked for at the end. A trial counts when each digit is the likeliest one,
given those before it (teacher-forced), so nothing is sampled and guessing finds 1 in 1,000; the control column has no key to find. The prompts are functions of (seed, length,
depth): the same for all checkpoints of one tokenizer. Small models only know the format when training showed it: train.py --passkey=0.1.
"""
import config  # first: it says in one sentence that a Python is too old
import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import data
from config import UserError
from model import GPT, Cache, PastTrainedLength, Refused


@dataclass
class EvaluateConfig:
    lengths: tuple[int, ...] = ()    # context lengths in tokens; by default 1, 2, 4 and 8 times the shortest trained length
    task: Literal["loss", "needle"] = "loss"  # what is measured
    protocol: tuple[Literal["chunked", "last-quarter", "position", "sliding", "token-aligned"], ...] = ("chunked", "last-quarter")  # how, see above
    stride: int = 256                # sliding, token-aligned: tokens scored at the end of a window; at most the window, and half the shortest length if aligned
    max_tokens: int = 65536          # span of validation text that is scored
    depths: int = 5                  # needle: how many, from the start to the end
    trials: int = 64                 # needle: prompts of each length and depth
    seed: int = 1                    # needle: of the prompts
    dataset: str = ""                # by default the one that each checkpoint was trained on
    plot: str = ""                   # write the picture to this PNG (matplotlib draws it)
    json: str = ""                   # write the rows to this file
    best: bool = False               # of a run folder take the step with the best validation loss, not the newest
    device: str = "auto"             # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min((self.max_tokens, self.stride, *self.lengths)) < 1:
            raise UserError("lengths, stride and max_tokens count tokens and must be at least 1")
        if not (1 <= self.depths <= 1000 and 1 <= self.trials <= 1 << 20) or self.seed < 0:
            raise UserError("depths must be at least 1 and at most 1,000, trials at most 2^20, and seed at least 0")
        if self.plot and not self.plot.endswith(".png"):
            raise UserError(f"--plot={self.plot} must end in .png")
        if not self.protocol:
            raise UserError("protocol names nothing: choose from chunked, last-quarter, position, sliding, token-aligned")


def windows_of(protocol, length, span, stride=256, lengths=()):
    """Where a protocol reads: a list of (start, skip), windows of `length` targets of which the first `skip` are not scored, within `span` targets."""
    if protocol == "token-aligned":  # one window of the longest length after the other; of the shorter ones those that end where these do
        return [(end - length, length - min(stride, max(1, min(lengths) // 2))) for end in range(max(lengths), span + 1, max(lengths))]
    step = min(stride, length) if protocol == "sliding" else length
    ends = [*range(length, span, step), span]
    return [(end - length, 0 if i == 0 else length - (end - ends[i - 1])) for i, end in enumerate(ends)]


@torch.no_grad()
def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32, protocol="chunked", stride=256, lengths=()):
    """Sum of nats and number of scored tokens at each position of windows of `length`: two float64 tensors (length,).

    The windows lie in the first min(max_tokens, what there is) targets of the longest file of a data.Split, as windows_of() places them. The model
    computes where its weights are, products in dtype. Raises Refused or UserError where model or text do not reach that far.
    """
    file = max(range(len(split.tokens)), key=lambda i: len(split.tokens[i]))
    span = min(max_tokens, len(split.tokens[file]) - (split.bos is None))
    if (longest := max((length, *lengths)) if protocol == "token-aligned" else length) > span:
        raise UserError(f"a window of {longest} tokens is longer than the {span} that are scored: raise --max_tokens, or give a longer validation text")
    device = next(model.parameters()).device
    nats, tokens = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    windows, rows = windows_of(protocol, length, span, stride, lengths or (length,)), max(1, 16384 // length)
    was, _ = model.training, model.eval()
    for i in range(0, len(windows), rows):
        x, y = map(torch.from_numpy, map(data.np.stack, zip(*(split.cut(file, start, length) for start, _ in windows[i:i + rows]))))
        for row, (_, skip) in zip(y, windows[i:i + rows]):
            row[:skip] = -1
        with config.autocast(device, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            loss = read(model, x.to(device), y.to(device), model.draw_positions(len(x), length, windows[i][0])).cpu().double()
        nats += loss.sum(0)
        tokens += (y >= 0).sum(0)
    model.train(was)
    return nats, tokens


CHUNK = 16384  # tokens


def read(model, x, y, positions):
    """The loss (B, T) of each token. More than CHUNK tokens are read piece by piece into a cache, so that beside it memory does not grow with T; a method whose tables depend on the length of
    the text reads it at once, as does a text that a piece holds."""
    length = x.shape[1]
    if length <= CHUNK or model.pos.prepare(CHUNK) != model.pos.prepare(length):
        return model(x, y, positions, reduction="none")
    cache, pieces = Cache(length), [slice(a, a + CHUNK) for a in range(0, length, CHUNK)]
    return torch.cat([model(x[:, piece], y[:, piece], None if positions is None else positions[..., piece], cache=cache, reduction="none") for piece in pieces], 1)


def rows_of(name, nats, tokens, protocols, **more):
    """The rows that protocols make of one length's sums by position: dicts as they stand in the JSON, with what more is to stand in each."""
    length, rows = len(nats), []
    for protocol in protocols:
        row = {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length}
        edges = sorted({length * i // 16 for i in range(17)}) if protocol == "position" else [length * 3 // 4 if protocol == "last-quarter" else 0, length]
        for a, b in zip(edges, edges[1:]):
            count = int(tokens[a:b].sum())
            where = {"position": [a, b]} if protocol == "position" else {}
            rows.append({**row, **more, **where, "loss": nats[a:b].sum().item() / count if count else math.nan, "tokens": count})
    return rows


def measure(models, cfg, lengths):
    """The rows of every checkpoint (name -> GPT, on its device), length and protocol; a cell that cannot be has "refused" with the reason."""
    rows, splits = [], {}
    for name, model in models.items():
        dataset, bos = cfg.dataset or model.meta["dataset"], model.meta.get("bos") is not None
        if (dataset, bos) not in splits:
            splits[dataset, bos] = data.Dataset(dataset, bos)
        splits[dataset, bos].require(name, model.config.vocab_size, model.meta.get("tokenizer"))
        if dataset == model.meta.get("dataset") and model.meta.get("data_hash", splits[dataset, bos].hash) != splits[dataset, bos].hash:
            print(f"note: dataset {dataset} is {splits[dataset, bos].hash}, and {name} was trained when it was {model.meta['data_hash']}: what is read here it may have seen in training", file=sys.stderr)
        dtype = config.pick_dtype(cfg.dtype, next(model.parameters()).device)
        together = tuple(p for p in cfg.protocol if p not in ("sliding", "token-aligned"))  # these three are made of the same forward passes
        for length, protocols in ((length, ps) for length in lengths for ps in (together, *((p,) for p in cfg.protocol if p not in together)) if ps):
            more = {} if protocols == together else {"stride": min(cfg.stride, max(1, min(lengths) // 2)) if protocols[0] == "token-aligned" else cfg.stride}
            try:
                rows += rows_of(name, *loss_by_position(model, splits[dataset, bos].val, length, cfg.max_tokens, dtype, protocols[0], cfg.stride, lengths), protocols, **more)
            except (Refused, UserError) as refusal:
                rows += [{"checkpoint": name, "task": "loss", "protocol": protocol, "length": length, **more, "refused": str(refusal)} for protocol in protocols]
    return rows


def fit_scale(model, split, max_tokens=16384):
    """The factor on the scores under which a model reads training text best: (factor, {factor: loss}), nats per token in the last quarter of windows of block_size."""
    losses = {}
    for eighth in range(-4, 13):  # 0.71 to 2.83
        model.pos.score_scale = 2 ** (eighth / 8)
        nats, tokens = loss_by_position(model, split, model.config.block_size, max(max_tokens, model.config.block_size))
        last = model.config.block_size * 3 // 4
        losses[model.pos.score_scale] = float(nats[last:].sum() / tokens[last:].sum())
    model.pos.score_scale = 1.0
    return min(losses, key=losses.get), losses


@torch.no_grad()
def find_needle(model, tokenizer, length, depth, trials=64, seed=1, bos=None, dtype=torch.float32, hidden=True):
    """Trials in which all digits of the passkey were likeliest, and the answer's mean nats per digit: two floats. depth 0..1; hidden=False: there is no key."""
    rng = data.np.random.Generator(data.np.random.PCG64([seed, length, round(depth * 1e6), hidden]))
    device, found, nats, rows = next(model.parameters()).device, 0, 0.0, max(1, 16384 // length)
    prompts = [data.passkey(tokenizer, length, depth, rng, bos, hidden) for _ in range(trials)]
    was, _ = model.training, model.eval()
    for i in range(0, trials, rows):
        x, y = (torch.from_numpy(data.np.stack(part)).to(device) for part in zip(*prompts[i:i + rows]))
        with config.autocast(device, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            logits = model.head(model.hidden(x, model.draw_positions(len(x), length, seed))[:, -data.DIGITS:]).float()
        answer = y[:, -data.DIGITS:]
        found += int((logits.argmax(-1) == answer).all(1).sum())
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum").item()
    model.train(was)
    return found / trials, nats / trials / data.DIGITS


def needles(models, cfg, lengths):
    """Rows of every checkpoint, length and depth, and of the control, whose depth is None; a cell that cannot be has "refused" with the reason."""
    rows = []
    for name, model in models.items():
        if not (tokenizer := data.from_json(model.meta.get("tokenizer"))):
            raise UserError(f"{name} has no tokenizer, so it cannot be asked in text: use one that was trained on a text prepared by data/prepare.py")
        dtype = config.pick_dtype(cfg.dtype, next(model.parameters()).device)
        for length in lengths:
            for depth in (*(i / max(1, cfg.depths - 1) for i in range(cfg.depths)), None):
                row = {"checkpoint": name, "task": "needle", "length": length, "depth": depth, "trials": cfg.trials, "seed": cfg.seed}
                try:
                    found, nats = find_needle(model, tokenizer, length, 0.5 if depth is None else depth, cfg.trials, cfg.seed, model.meta.get("bos"), dtype, depth is not None)
                    rows.append({**row, "accuracy": found, "nll": nats})
                except (Refused, UserError) as refusal:
                    rows.append({**row, "refused": str(refusal)})
    return rows


def heatmaps(rows, lengths):
    """Needles found, as text: a block of lines per checkpoint, a line per depth, a column per length."""
    out = []
    for name in dict.fromkeys(row["checkpoint"] for row in rows):
        mine = [row for row in rows if row["checkpoint"] == name]
        out.append(f"{name}: needles found, by depth and length".ljust(20) if not out else name)
        out.append("   depth " + "".join(f"{n:>9}" for n in lengths))
        for depth in dict.fromkeys(row["depth"] for row in mine):
            cells = {row["length"]: row for row in mine if row["depth"] == depth}
            out.append(("  no key " if depth is None else f"{depth:>8.2f} ") + "".join(f"{' ░▒▓█'[min(4, int(cells[n]['accuracy'] * 4.999))] * 3:>4}{cells[n]['accuracy']:>5.2f}" if "accuracy" in cells[n] else f"{'refused':>9}" for n in lengths))
        out.append("")
    out += dict.fromkeys(f"refused: {row['checkpoint']} at {row['length']}: {row['refused']}" for row in rows if "refused" in row)
    return "\n".join(out).rstrip()


def wall(rows, lengths, file, note):
    """The heatmaps as panels of one PNG, one colour scale for all; under each its mean and the control's."""
    if not (plt := pyplot(file)):
        return
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.9 * columns + 0.9, 2.6 * lines + 0.5), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names):]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names):
        mine = {(row["depth"], row["length"]): row.get("accuracy", math.nan) for row in rows if row["checkpoint"] == name}
        depths = sorted({depth for depth, _ in mine if depth is not None})
        cells = [[mine[depth, n] for n in lengths] for depth in depths]
        image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for i, line in enumerate(cells):
            for j, value in enumerate(line):
                axis.text(j, i, "–" if math.isnan(value) else f"{value:.2f}".lstrip("0") if value < 1 else "1", ha="center", va="center", fontsize=7)
        control, known = [mine[None, n] for n in lengths], [v for line in cells for v in line if not math.isnan(v)]
        axis.set_title(f"{name}: mean {sum(known) / len(known):.2f}" if known else f"{name}: refused", fontsize=9)
        axis.set_xticks(range(len(lengths)), lengths, fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        axis.set_xlabel(f"length; without a key at most {max((v for v in control if not math.isnan(v)), default=math.nan):.2f}", fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="passkeys found")
    figure.supxlabel(note, fontsize=7, color="gray")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    print(f"{file} is drawn")


def table(rows, lengths):
    """The rows as text: a line per checkpoint and protocol, a column per length (of `position`: a column per sixteenth)."""
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    wide = max(10, *map(len, names))
    out = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        mine = [row for row in rows if row["protocol"] == protocol]
        if protocol != "position":
            title = protocol + (f", stride {mine[0]['stride']}" if "stride" in mine[0] else "")
            out += [f"{title} (nats per token)".ljust(wide) + "".join(f"{n:>10}" for n in lengths) if wide > 29 + len(title) - len(protocol) else f"{title}, nats per token, at"] + (
                [] if wide > 29 + len(title) - len(protocol) else [" " * wide + "".join(f"{n:>10}" for n in lengths)])
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
    out += dict.fromkeys(f"refused: {row['checkpoint']} at {row['length']}: {row['refused']}" for row in rows if "refused" in row)
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


def pyplot(file):
    """matplotlib's pyplot, drawing to files; without matplotlib None, and the reason why there will be no such file."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {file}: matplotlib is not installed (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def picture(rows, lengths, file, note):
    """Draw a panel per protocol and the first one's table into a PNG; without matplotlib, say so."""
    if not (plt := pyplot(file)):
        return
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


def wavelengths(before, after, trained, target, file, note):
    """Draw each rotated pair's wavelength in tokens before and after a stretching, inverse frequencies (R/2,) each, beside both lengths: in the terminal, and
    as a PNG. A pair whose wavelength exceeds the trained length never completed a turn in training: those are the ones that break beyond it."""
    before, after = (2 * math.pi / inv_freq.double().cpu() for inv_freq in (before, after))
    turned, moved = int((before <= trained).sum()), int((after > before * 1.000001).sum())
    print(f"wavelengths of {len(before)} pairs, in tokens: {turned} complete a turn within the trained {trained}; {moved} are stretched, the slowest from {before[-1]:,.0f} to {after[-1]:,.0f}")
    x = range(1, len(before) + 1)
    print(terminal_plot({"log10 of the wavelength before": list(zip(x, before.log10().tolist())), "after": list(zip(x, after.log10().tolist())),
                         f"trained length {trained}": [(i, math.log10(trained)) for i in (1, len(before))], f"target {target}": [(i, math.log10(target)) for i in (1, len(before))]}))
    if plt := pyplot(file):
        figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
        axes.plot(range(len(before)), before, marker="o", markersize=4, label="before")
        axes.plot(range(len(after)), after, marker="o", markersize=4, label="after")
        for length, word, style in ((trained, "trained length", "--"), (target, "target", ":")):
            axes.axhline(length, color="gray", linestyle=style, label=f"{word} {length}")
        axes.set(yscale="log", xlabel="rotated pair, fastest first", ylabel="wavelength in tokens", title=note)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=120)
        plt.close(figure)
        print(f"{file} is drawn")


def main():
    cfg, _, paths = config.parse(EvaluateConfig, about=__doc__, paths="run folders or step folders, NAME=FOLDER to name one in table and plot")
    if not paths:
        raise UserError("give at least one run folder, as in python evaluate.py out/python-rope")
    device = config.pick_device(cfg.device)
    folders = {path.partition("=")[0] if "=" in path and not Path(path).exists() else path.rstrip("/"): path if Path(path).exists() else path.partition("=")[2] or path for path in paths}
    if len(folders) < len(paths):
        raise UserError("two checkpoints have the same name: give each its own, as in NAME=FOLDER")
    models = {name: GPT.load(folder, cfg.best).to(device) for name, folder in folders.items()}
    for name, model in models.items():
        if cfg.task == "loss" and "dataset" not in model.meta and not cfg.dataset:
            raise UserError(f"{name} does not say on which text it was trained: give --dataset (of an imported checkpoint: prepared by python data/prepare.py FILE --tokenizer={model.folder.parent} --name=NAME)")
    for file in map(Path, filter(None, (cfg.plot, cfg.json))):  # whether they can be written, before the work and not after it
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        open(file, "ab").close()
        if new:
            file.unlink()
    shortest = min(model.config.trained_length for model in models.values())
    lengths = cfg.lengths or tuple(shortest * factor for factor in ((1, 2, 4, 8) if cfg.task == "loss" else (1, 2, 3, 4)))
    rows = (measure if cfg.task == "loss" else needles)(models, cfg, lengths)
    print((table if cfg.task == "loss" else heatmaps)(rows, lengths))
    for protocol in cfg.protocol if cfg.task == "loss" else ():
        print(f"\n{protocol}, nats per token, by " + ("position" if protocol == "position" else "context length"))
        print(terminal_plot(series_of(rows, protocol)))
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if cfg.plot and cfg.task == "needle":
        wall(rows, lengths, cfg.plot, f"{cfg.trials} prompts a cell, teacher-forced, all {data.DIGITS} digits; chance {10 ** -data.DIGITS}")
    elif cfg.plot:
        first = next(iter(models.values()))
        read = data.Dataset(cfg.dataset or first.meta["dataset"])
        picture(rows, lengths, cfg.plot, f"{min(cfg.max_tokens, len(read.val))} tokens of {read.name}, data {read.hash}")
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
