"""The position leaderboard: every scheme trained alike at a short length, and read at up to 32 times that length.

    python experiments/leaderboard.py                              all schemes, three seeds: about a minute of 2 cores a run
    python experiments/leaderboard.py --entry=my_scheme.py         and one of your own: a file with one class that derives from model.NoPE
    python experiments/leaderboard.py --entries=rope,alibi         only some
    python experiments/leaderboard.py --budget=gpu                 a larger model on longer text

Stop it when you like: the same command goes on where it stopped. Runs lie in out/leaderboard; the results go to results/leaderboard.md, .json and .png.
The score is the loss in the last quarter of a window, in nats per token of held-out text, at 1, 4, 8 and 32 times the trained length, each the mean over the
seeds with its 95 % interval (Student's t). Speed is measured at the end, all schemes in turn, in several rounds, as a share of rope's in the same round.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import importlib.util
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch

import data
from checkpoint import steps
from config import UserError
from data.prepare import prepare
from evaluate import EvaluateConfig, measure, pyplot, terminal_plot
from model import GPT, POSITIONS, GPTConfig, NoPE, Refused
from train import TrainConfig, make_optimizers, train


@dataclass
class LeaderboardConfig:
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # cpu: 0.5 M parameters, 64 tokens; gpu: 25 M, 256 tokens; try: seconds, to see that an entry works
    entries: tuple[str, ...] = ()            # names of those to run; by default all
    entry: tuple[str, ...] = ()              # Python files, each with one scheme class of your own
    seeds: int = 3                           # runs of each entry
    dataset: str = "python"                  # text to train on and to score
    max_tokens: int = 65536                  # span of validation text that is scored
    runs: str = "out/leaderboard"            # where the run folders go
    out_dir: str = "results"                 # where leaderboard.md, .json and .png go
    device: str = "auto"                     # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min(self.seeds, self.max_tokens) < 1:
            raise UserError("seeds and max_tokens must be at least 1")


BUDGETS = {  # settings of model and training, alike for all entries
    "cpu": (dict(n_layer=4, n_head=4, n_embd=96, block_size=64), dict(batch_size=64, max_iters=700, learning_rate=3e-3, warmup_iters=50, compile=False)),
    "gpu": (dict(n_layer=8, n_head=8, n_embd=512, block_size=256), dict(batch_size=64, max_iters=4000, learning_rate=2e-3, warmup_iters=200)),
    "try": (dict(n_layer=4, n_head=2, n_embd=32, block_size=16), dict(batch_size=8, max_iters=20, learning_rate=3e-3, warmup_iters=2, compile=False)),
}
FACTORS = (1, 4, 8, 32)  # of the trained length: what is ranked
HYBRIDS = {"rope, window": dict(pos="rope", window=0.5), "rope, nope every 4th": dict(pos="rope", nope_every=4),
           "rope, random positions": dict(pos="rope", random_positions=32)}  # window and random_positions in trained lengths


def load_entry(file):
    """Put the one scheme class of a Python file into POSITIONS, under the file's name, which is returned. Raises UserError."""
    name = Path(file).stem
    if name in POSITIONS or not Path(file).is_file():
        raise UserError(f"--entry={file}: there is a scheme called {name!r} already: rename the file" if name in POSITIONS else f"--entry={file}: there is no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--entry={file} cannot be imported ({type(error).__name__}: {error}): mend it") from error
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, NoPE) and c.__module__ == name]
    if len(classes) != 1:
        raise UserError(f"--entry={file} holds {len(classes)} classes that derive from model.NoPE: leave exactly one")
    POSITIONS[name] = classes[0]
    return name


def settings_of(name, shape):
    """An entry's model settings."""
    L, settings = shape["block_size"], {**shape, **HYBRIDS.get(name, {"pos": name})}
    return settings | {key: max(1, int(settings[key] * L)) for key in ("window", "random_positions") if key in settings}


def lengths_of(L):
    """The lengths that are read: what is ranked, twice the trained length, and 20 tokens past it."""
    return sorted({L * f for f in (*FACTORS, 2)} | {L + 20})


def score(name, seed, cfg, dataset, run):
    """Train one run, or what is left of it, and score it: the rows of evaluate.py, which stay in the run folder as scores.json."""
    shape, training = BUDGETS[cfg.budget]
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**settings_of(name, shape), vocab_size=dataset.vocab_size))
    how = TrainConfig(dataset=cfg.dataset, out_dir=str(run), seed=seed, eval_interval=10**9, eval_iters=8, device=cfg.device, dtype=cfg.dtype, **training)
    key = {"model": asdict(model.config), "training": {k: v for k, v in asdict(how).items() if k not in ("out_dir", "init_from")}, "data": dataset.hash, "max_tokens": cfg.max_tokens}
    if (run / "scores.json").is_file():
        kept = json.loads((run / "scores.json").read_text(encoding="utf-8"))
        if kept["key"] != key:
            raise UserError(f"{run} was made with other settings or data: remove it, or choose other --runs")
        return kept["rows"]
    began = time.perf_counter()
    if steps(run):
        model, how.init_from = GPT.load(run), "resume"
        if asdict(model.config) != key["model"]:
            raise UserError(f"{run} was made with other settings: remove it, or choose other --runs")
    if train(model, how)["stopped"]:
        raise KeyboardInterrupt
    model.meta["bos"] = dataset.bos  # of a model that was not loaded
    rows = measure({name: model}, EvaluateConfig(dataset=cfg.dataset, max_tokens=cfg.max_tokens, dtype=cfg.dtype), lengths_of(shape["block_size"]))
    rows = [{**row, "seed": seed} for row in rows]
    (run / ".scores").write_text(json.dumps({"key": key, "seconds": round(time.perf_counter() - began), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    (run / ".scores").rename(run / "scores.json")
    return rows


def speeds(names, cfg, dataset, rounds=7, updates=4):
    """Tokens per second of training, measured side by side: name -> (median tokens per second, median share of the first name's in the same round)."""
    shape, training = BUDGETS[cfg.budget]
    device = config.pick_device(cfg.device)
    dtype = config.pick_dtype(cfg.dtype, device)
    compiles, _ = config.pick_compile(training.get("compile"), device, 10**6)
    ready = {}
    if compiles:
        torch._dynamo.config.recompile_limit = 4 * len(names)  # they are compiled side by side
    for name in names:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**settings_of(name, shape), vocab_size=dataset.vocab_size)).to(device).train()
        ready[name] = model, torch.compile(model) if compiles else model, make_optimizers(model, TrainConfig())
    took = {name: [] for name in names}
    for round in range(rounds + 1):  # the first one warms up
        for name, (model, forward, optimizers) in ready.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for update in range(updates):
                x, y = (torch.from_numpy(part).to(device) for part in dataset.train.batch(update, training["batch_size"], shape["block_size"], 0))
                with config.autocast(device, dtype):
                    loss = forward(x, y, model.draw_positions(len(x), x.shape[1], update))
                loss.backward()
                for o in optimizers:
                    o.step()
                    o.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took[name].append(time.perf_counter() - began)
    tokens = updates * training["batch_size"] * shape["block_size"]
    first = took[names[0]][1:]
    return {name: (tokens / statistics.median(took[name][1:]), statistics.median(a / b for a, b in zip(first, took[name][1:]))) for name in names}


T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t, two-sided 95 %, by degrees of freedom


def interval(values):
    """Mean and half-width of its 95 % interval (nan for a single value)."""
    n = len(values)
    return statistics.fmean(values), T95.get(n - 1, 2.0) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan


class Orderings:
    """The orderings that must come out, each a claim about losses that were measured on the same tokens: paired differences, seed by seed."""

    def __init__(self, rows, L):
        self.L, self.loss, self.lines = L, {}, []
        for row in rows:
            self.loss.setdefault((row["checkpoint"], row["protocol"], row["length"]), {})[row["seed"]] = row.get("loss", math.inf)

    def claim(self, number, words, a, b, below=None, above=None):
        """The loss at a minus the loss at b, each (scheme, protocol, length), lies below or above a bound with its whole interval."""
        if not all(key in self.loss for key in (a, b)):
            return
        mean, half = interval([self.loss[a][seed] - self.loss[b][seed] for seed in self.loss[a] if seed in self.loss[b]])
        bound = below if below is not None else above
        side = 1 if below is not None else -1
        passed = math.isfinite(half) and side * (mean - bound) + half < 0
        line = f"{number}. {words}: {mean:+.3f} ± {half:.3f} nats, {'<' if below is not None else '>'} {bound:.3f}: {'pass' if passed else 'FAIL'}"
        if not passed:
            line += (" (one seed has no interval)" if not math.isfinite(half) else " (the other way round, by more than the interval)" if side * (mean - bound) - half > 0
                     else " (as claimed in the mean, but the seeds do not separate it)" if side * (mean - bound) < 0 else " (the mean is on the other side, within the interval)")
        self.lines.append((passed, line))

    def judge(self):
        """All claims as (passed, line)."""
        L, chunked, last = self.L, "chunked", "last-quarter"
        within = math.log(1.1)
        self.claim(1, "alibi, whole windows, 8L against L: perplexity within 10 %", ("alibi", chunked, 8 * L), ("alibi", chunked, L), below=within)
        self.claim(1, "sinusoidal, last quarter, 2L against L: perplexity more than doubled", ("sinusoidal", last, 2 * L), ("sinusoidal", last, L), above=math.log(2))
        for factor, times in ((2, 1.5), (4, 3)):
            self.claim(1, f"rope, last quarter, {factor}L against L: perplexity more than {times} times", ("rope", last, factor * L), ("rope", last, L), above=math.log(times))
        for factor in (4, 8):
            for name in ("nope", "t5"):
                self.claim(1, f"{name} above alibi, last quarter, {factor}L", (name, last, factor * L), ("alibi", last, factor * L), above=0)
                self.claim(1, f"{name} below rope, last quarter, {factor}L", (name, last, factor * L), ("rope", last, factor * L), below=0)
        for number, pairs in ((2, ("rope alibi", "alibi t5", "alibi sinusoidal", "t5 nope", "sinusoidal nope")), (13, ("alibi sinusoidal", "sinusoidal learned", "learned nope"))):
            for a, b in map(str.split, pairs):
                self.claim(number, f"{a} below {b}, whole windows, at L", (a, chunked, L), (b, chunked, L), below=0)
        self.claim(14, f"sinusoidal, whole windows, L + 20 = {L + 20} against L: perplexity within 10 %", ("sinusoidal", chunked, L + 20), ("sinusoidal", chunked, L), below=within)
        self.claim(14, "sinusoidal, whole windows, 2L against L: not within 10 %, so its reach is a few dozen tokens", ("sinusoidal", chunked, 2 * L), ("sinusoidal", chunked, L), above=within)
        self.claim(14, "alibi, whole windows, 32L against L: perplexity within 10 %", ("alibi", chunked, 32 * L), ("alibi", chunked, L), below=within)
        self.claim(14, "sinusoidal above alibi, last quarter, 32L", ("sinusoidal", last, 32 * L), ("alibi", last, 32 * L), above=0)
        return self.lines


def ranking(rows, L):
    """Names in the order of the mean last-quarter loss over FACTORS; those that are refused somewhere come last, by their loss at L."""
    def place(name):
        at = {f: [row.get("loss", math.inf) for row in rows if row["checkpoint"] == name and row["protocol"] == "last-quarter" and row["length"] == f * L] for f in FACTORS}
        return statistics.fmean(statistics.fmean(at[f]) for f in FACTORS), statistics.fmean(at[1])
    return sorted(dict.fromkeys(row["checkpoint"] for row in rows), key=place)


def table(rows, names, speed, protocol, L):
    """A Markdown table of one protocol: a line per entry, a column per length, mean and interval."""
    lengths = lengths_of(L) if protocol == "chunked" else [f * L for f in FACTORS]
    lines = ["| | " + " | ".join(f"{n} ({n // L}x)" if n % L == 0 else str(n) for n in lengths) + " | tokens/s | beside rope |", "|" + "---|" * (len(lengths) + 3)]
    for place, name in enumerate(names, 1):
        cells = []
        for n in lengths:
            mine = [row for row in rows if row["checkpoint"] == name and row["protocol"] == protocol and row["length"] == n]
            values = [row["loss"] for row in mine if "loss" in row]
            mean, half = interval(values) if values else (math.nan, math.nan)
            cells.append("refused" if not values else f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else ""))
        lines.append(f"| {place}. {name} | " + " | ".join(cells) + f" | {speed[name][0]:,.0f} | {speed[name][1]:.2f} |")
    return "\n".join(lines)


def picture(rows, names, L, file, note):
    """Last-quarter loss by length, a line per entry with the interval as a band, drawn to a PNG and in characters."""
    lines = {}
    for name in names:
        for n in (L * f for f in (1, 2, *FACTORS[1:])):
            values = [row["loss"] for row in rows if row["checkpoint"] == name and row["protocol"] == "last-quarter" and row["length"] == n and "loss" in row]
            if values:
                lines.setdefault(name, []).append((n, *interval(values)))
    print(terminal_plot({name: [(n, mean) for n, mean, _ in line] for name, line in lines.items()}, height=18))
    if not (plt := pyplot(file)):
        return
    figure, axes = plt.subplots(figsize=(9.5, 5.6), layout="constrained")
    colours = [*plt.get_cmap("tab20").colors[::2], *plt.get_cmap("tab20").colors[1::2]]
    for i, (name, line) in enumerate(lines.items()):
        x, mean, half = zip(*line)
        axes.plot(x, mean, marker="osD^vP*X"[i % 8], markersize=5, linestyle="--" if name in HYBRIDS else "-", color=colours[i % 20], label=name)
        axes.fill_between(x, [m - h for m, h in zip(mean, half)], [m + h for m, h in zip(mean, half)], color=colours[i % 20], alpha=0.15, linewidth=0)
    means = [mean for line in lines.values() for _, mean, _ in line]
    margin = 0.06 * (max(means) - min(means)) + 1e-3
    axes.set(xscale="log", ylim=(min(means) - margin, max(means) + margin), xlabel="tokens in the window", ylabel="nats per token, last quarter of the window", title=f"Trained at {L} tokens, read at up to {32 * L}")
    axes.set_xticks(ticks := [L * f for f in (1, 2, *FACTORS[1:])], [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, title="best mean first")
    figure.supxlabel(note, fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"{file} is drawn")


def main():
    cfg, *_ = config.parse(LeaderboardConfig, about=__doc__)
    own = [load_entry(file) for file in cfg.entry]
    known = [*POSITIONS, *HYBRIDS]
    if unknown := [name for name in cfg.entries if name not in known]:
        raise UserError(f"there is no entry {unknown[0]!r}: entries are {'; '.join(known)}")
    names = list(dict.fromkeys([*(cfg.entries or known), *own]))
    names = sorted(names, key=lambda name: name != "rope")  # rope first: speed is beside it
    if cfg.dataset in ("python", "shakespeare") and not data.exists(cfg.dataset):
        prepare(cfg.dataset)
    dataset, (shape, training), rows = data.Dataset(cfg.dataset), BUDGETS[cfg.budget], []
    L, folder = shape["block_size"], Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}"
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    for seed in range(1, cfg.seeds + 1):
        for i, name in enumerate(names):
            print(f"\n== {name}, seed {seed} ({(seed - 1) * len(names) + i + 1} of {cfg.seeds * len(names)})", flush=True)
            rows += score(name, seed, cfg, dataset, folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}")
    speed, order = speeds(names, cfg, dataset), ranking(rows, L)
    device = config.pick_device(cfg.device)
    note = f"{config.provenance(device)}; {cfg.dataset} {dataset.hash}, {cfg.max_tokens:,} tokens scored, {cfg.seeds} seed{'s' * (cfg.seeds > 1)}"
    command = "python experiments/leaderboard.py " + " ".join(word for word in sys.argv[1:])
    judged = Orderings(rows, L).judge()
    out, count = Path(cfg.out_dir) / "leaderboard", sum(p.numel() for p in GPT(GPTConfig(**shape, vocab_size=dataset.vocab_size)).parameters())
    text = "\n".join([
        "# The position leaderboard", "", f"`{command.strip()}`: {note}.", "",
        f"Each run: {count / 1e6:.2f} M parameters ({', '.join(f'{k}={v}' for k, v in shape.items())}), {training['max_iters']} iterations of {training['batch_size'] * L:,} tokens by AdamW, "
        "the same batches for all. Losses are nats per token of held-out text, mean over the seeds and 95 % interval; ranked by the mean of the four columns. `refused`: the scheme has nothing to look up there. "
        "Tokens per second are of training, measured side by side at the end (median of rounds), on " + ("a GPU." if device.type == "cuda" else "the CPU reference, not compiled."), "",
        "## Loss in the last quarter of the window", "", table(rows, order, speed, "last-quarter", L), "", "![loss by length](leaderboard.png)", "",
        "## Loss in whole windows", "", table(rows, order, speed, "chunked", L), "", "## Orderings", "",
        "Paired differences over the seeds; a claim passes when its whole interval does.", "", *(f"- {line}" for _, line in judged), ""])
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    Path(f"{out}.json").write_text(json.dumps({"command": command.strip(), "note": note, "speed": speed, "orderings": [line for _, line in judged], "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print("\n" + text)
    picture(rows, order, L, f"{out}.png", note)
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
