"""What stretching buys, measured: every method on small models, the wall of needles, where positions are known, how far heads look.

    python experiments/reproduce.py --budget=cpu       under an hour of 2 cores: two seeds; stop it when you like, the same command goes on
    python experiments/reproduce.py --budget=gpu       larger models on longer text, three seeds
    python experiments/reproduce.py --budget=try       minutes, to see that it works; its figures mean nothing

Four parts, each a table (and a picture) in results/reproduce.md, .json, .png and needles.png:
1. methods: a RoPE model, stretched 4 times by every method, zero-shot and after fine-tuning at the target. Loss in the last quarter of windows that do not overlap, the same for
   all. Gap closed = (untouched - method) / (untouched - native) at the target: native is a model trained at the target from scratch for as many tokens as pretraining and
   fine-tuning together; 0 is untouched, 1 as good as never having been short.
2. needles: passkeys found, by length and depth, the same prompts for all; models trained on passkey documents of up to the trained length alone.
3. where the position is known (probe), and how far heads look.
4. which method each scheme takes, by trying them all.
What only a GPU has time for is in nope_tables.py, tasks.py, masked_lm.py and long_code.py, each with a --budget=gpu of its own.
And the orderings that the literature predicts, each judged in every seed by itself, with a 95 % interval over windows (or prompts).
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import copy
import json
import math
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

import data
from checkpoint import steps
from config import UserError
from data.prepare import prepare
from evaluate import find_needle, pyplot, wall, windows_of
from experiments.attention_maps import distances
from experiments.probe import probe, shuffled
from model import ATTEND, GPT, POSITIONS, STRETCH, GPTConfig, PastTrainedLength, Refused
from train import TrainConfig, make_optimizers, train


@dataclass
class ReproduceConfig:
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # sizes and seeds, below
    parts: tuple[Literal["methods", "needles", "probe", "table"], ...] = ("methods", "needles", "probe", "table")  # which
    dataset: str = "python"      # text to train on and to score
    runs: str = "out/reproduce"  # where models and unfinished results go
    out_dir: str = "results"     # where the tables and pictures go
    device: str = "auto"         # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products


FACTOR = 4
BUDGETS = {  # model; pretraining; fine-tuning updates at which it is measured; span of text that is scored; needle's trained length, updates and trials; seeds
    "cpu": dict(shape=dict(n_layer=4, n_head=4, n_embd=96, block_size=64), batch=64, iters=700, tune=(0, 10, 40, 80), span=32768, needle=dict(length=96, iters=500, trials=64), probe=400, seeds=2),
    "gpu": dict(shape=dict(n_layer=8, n_head=8, n_embd=512, block_size=512), batch=64, iters=5000, tune=(0, 5, 10, 40, 50, 80, 150, 500), span=1 << 20, needle=dict(length=512, iters=1500, trials=64), probe=2000, seeds=3),
    "try": dict(shape=dict(n_layer=2, n_head=2, n_embd=32, block_size=32), batch=8, iters=12, tune=(0, 2, 4), span=2048, needle=dict(length=48, iters=6, trials=4), probe=20, seeds=1),
}
# part 1: name -> method, options; a "+" trains otherwise than at the target. Those in ATTEND, and those that say so, are not fine-tuned.
METHODS = {name: (name, {}) for name in STRETCH if name not in ("longrope",)} | {"yarn, paper's ramp": ("yarn", {"ramp": "paper"}), "yarn + PoSE": ("yarn", {}), "window": ("none", {})}
ZERO_SHOT = {"ntk-frozen", "window", *ATTEND}
WALL = ("none", "pi", "ntk", "ntk-frozen", "ntk-lceg", "ntk-parts", "yarn", "dynamic-yarn", "nope", "drope", "alibi", "window", "lm-infinite", "self-extend")


class Seed:
    """The models of one seed, trained when they are first asked for, and what has been measured on them: a JSON file, written after each."""

    def __init__(self, cfg, seed, dataset):
        self.cfg, self.seed, self.dataset, self.sizes = cfg, seed, dataset, BUDGETS[cfg.budget]
        self.device = config.pick_device(cfg.device)
        self.dtype = config.pick_dtype(cfg.dtype, self.device)
        self.folder = Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        key = json.loads(json.dumps({"sizes": self.sizes, "data": dataset.hash, "dtype": str(self.dtype), "device": self.device.type}))
        self.file, self.kept = self.folder / "measured.json", {"key": key, "values": {}}
        if self.file.is_file():
            self.kept = json.loads(self.file.read_text(encoding="utf-8"))
            if self.kept["key"] != key:
                raise UserError(f"{self.folder} was made with other sizes, data or device: remove it, or choose other --runs")

    def measured(self, name, measure):
        """What was measured under this name, or measure() now."""
        if name not in self.kept["values"]:
            began = time.perf_counter()
            self.kept["values"][name] = measure()
            self.kept["seconds"] = self.kept.get("seconds", 0) + time.perf_counter() - began
            whole = self.file.with_name(".measured")
            whole.write_text(json.dumps(self.kept), encoding="utf-8")
            whole.rename(self.file)
            print(f"seed {self.seed}: {name}, {time.perf_counter() - began:.0f} s", flush=True)
        return self.kept["values"][name]

    def model(self, name, length, iters, passkey=0.0, **settings):
        """A model trained by train.py's loop, or what is left of it to train: on the device."""
        run = self.folder / name
        how = TrainConfig(dataset=self.cfg.dataset, out_dir=str(run), seed=self.seed, batch_size=max(1, self.sizes["batch"] * self.sizes["shape"]["block_size"] // length), max_iters=iters,
                          learning_rate=3e-3, warmup_iters=min(50, iters // 4), eval_interval=10**9, eval_iters=1, device=self.cfg.device, dtype=self.cfg.dtype, passkey=passkey,
                          compile=False if self.device.type == "cpu" else None)
        if steps(run):
            model, how.init_from = GPT.load(run), "resume"
        else:
            torch.manual_seed(self.seed)
            model = GPT(GPTConfig(**{**self.sizes["shape"], "block_size": length, **settings}, vocab_size=self.dataset.vocab_size))
        if model.meta.get("step") != iters and train(model, how)["stopped"]:
            raise KeyboardInterrupt
        model.meta["bos"] = self.dataset.bos
        return model.to(self.device).eval()

    def text(self, pos="rope"):
        return self.model(pos, self.sizes["shape"]["block_size"], self.sizes["iters"], pos=pos)

    def needle(self, pos="rope"):
        return self.model(f"needle-{pos}", self.sizes["needle"]["length"], self.sizes["needle"]["iters"], 1.0, pos=pos)

    @torch.no_grad()
    def losses(self, model, length):
        """The mean loss of the last quarter of each window, nats per token: a list."""
        split, found, rows = self.dataset.val, [], max(1, 16384 // length)
        file = max(range(len(split.tokens)), key=lambda i: len(split.tokens[i]))
        windows = windows_of("chunked", length, min(self.sizes["span"], len(split.tokens[file]) - (split.bos is None)))
        for i in range(0, len(windows), rows):
            x, y = (torch.from_numpy(data.np.stack(part)) for part in zip(*(split.cut(file, start, length) for start, _ in windows[i:i + rows])))
            y[:, :length * 3 // 4] = -1
            with config.autocast(self.device, self.dtype), warnings.catch_warnings():
                warnings.simplefilter("ignore", PastTrainedLength)
                nats = model.eval()(x.to(self.device), y.to(self.device), reduction="none").cpu().double()
            found += (nats.sum(1) / (y >= 0).sum(1)).tolist()
        return [round(x, 5) for x in found]

    def tuned(self, model, updates, batch, length, rate, reach=0, passkeys=0.0):
        """Fine-tune a model in place, in windows of `length`; yields how many updates it has had: 0, before the first, to `updates`."""
        optimizers = make_optimizers(model, TrainConfig(weight_decay=0.0))
        for update in range(updates):
            yield update
            for group in (group for o in optimizers for group in o.param_groups):
                group["lr"] = rate * min(1, (update + 1) / 5)
            x, y, positions, _ = (None if part is None else torch.from_numpy(part).to(self.device) for part in self.dataset.batch(10**6 + update, batch, length, self.seed, reach, passkeys))
            with config.autocast(self.device, self.dtype):
                loss = model.train()(x, y, positions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for o in optimizers:
                o.step()
                o.zero_grad(set_to_none=True)
        yield updates

    def curve(self, name):
        """A method's losses: {updates: {length: [per window]}}; beside the target, fine-tuned models are read at all lengths only at first and last."""
        L, tune = self.sizes["shape"]["block_size"], self.sizes["tune"]
        model = copy.deepcopy(self.text())
        stretched(model, name)
        short = name == "drope" or "PoSE" in name
        length, reach, batch = L if short else FACTOR * L, FACTOR * L if "PoSE" in name else 0, self.sizes["batch"] // (1 if short else FACTOR)
        found = {}
        for update in () if name in ZERO_SHOT else self.tuned(model, tune[-1], batch, length, 1e-3, reach):
            if update in tune:
                found[update] = {n: self.losses(model, n) for n in ((L, 2 * L, FACTOR * L, 2 * FACTOR * L) if update in (tune[0], tune[-1]) else (FACTOR * L,))}
        return found or {0: {n: self.losses(model, n) for n in (L, 2 * L, FACTOR * L, 2 * FACTOR * L)}}

    def native(self):
        """The oracle: trained at the target for all the tokens of pretraining and fine-tuning."""
        L, iters = self.sizes["shape"]["block_size"], self.sizes["iters"] + self.sizes["tune"][-1]
        model = self.model("native", FACTOR * L, iters, pos="rope")
        return {n: self.losses(model, n) for n in (L, 2 * L, FACTOR * L)}

    def found(self, name):
        """Passkeys found: rows as evaluate.py has them."""
        sizes = self.sizes["needle"]
        model = copy.deepcopy(self.needle(name if name in ("nope", "alibi") else "rope"))
        L = sizes["length"]
        if name in ("nope", "alibi"):
            model.stretch("none", FACTOR)
        else:
            stretched(model, name)
        if name == "drope":  # recalibrated at the trained length, for a tenth of the training
            batch = max(1, self.sizes["batch"] * self.sizes["shape"]["block_size"] // L)
            for _ in self.tuned(model, max(2, sizes["iters"] // 5), batch, L, 2e-3, passkeys=1.0):
                pass
        tokenizer, rows = self.dataset.tokenizer, []
        for length in needle_lengths(L):
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0, None):
                hit, nats = find_needle(model, tokenizer, length, 0.5 if depth is None else depth, sizes["trials"], self.seed, self.dataset.bos, self.dtype, depth is not None)
                rows.append({"checkpoint": name, "task": "needle", "length": length, "depth": depth, "accuracy": hit, "nll": round(nats, 4), "trials": sizes["trials"], "seed": self.seed})
        return rows


def stretched(model, name):
    """In place: the model stretched by an entry of METHODS."""
    method, options = METHODS[name]
    model.stretch(method, FACTOR, **options)
    if name == "window":  # as wide as the trained length
        for block in model.blocks:
            block.attention.window = model.config.trained_length


def needle_lengths(L):
    return [L // 2, L, 3 * L // 2, 2 * L, 3 * L, 4 * L]


class Judge:
    """Claims, each with what was seen in one seed: a difference and its 95 % interval."""

    def __init__(self, seed):
        self.seed, self.lines = seed, []

    def add(self, number, words, mean, half, above=None, below=None):
        passed = mean - half > above if above is not None else mean + half < below
        likely = mean > above if above is not None else mean < below
        bound = f"> {above:.3f}" if above is not None else f"< {below:.3f}"
        self.lines.append({"number": number, "claim": words, "seed": self.seed, "passed": bool(passed), "seen": f"{mean:+.3f} ± {half:.3f}, {bound}" + ("" if passed else " (so in the mean, not separated)" if likely else "")})

    def pair(self, number, words, a, b, **bound):
        """The mean of a minus that of b, lists over the same windows."""
        d = [x - y for x, y in zip(a, b, strict=True)]
        self.add(number, words, statistics.fmean(d), 1.96 * statistics.stdev(d) / math.sqrt(len(d)), **bound)

    def apart(self, number, words, a, b, **bound):
        """The same of two lists of their own windows."""
        self.add(number, words, statistics.fmean(a) - statistics.fmean(b), 1.96 * math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b)), **bound)

    def shares(self, number, words, p, q, n, m, **bound):
        """The difference of two shares of n and m trials (q None: p alone), with Agresti and Caffo's interval."""
        p, n = (p * n + 1) / (n + 2), n + 2
        q, m = (0.0, 1) if q is None else ((q * m + 1) / (m + 2), m + 2)
        self.add(number, words, p - q, 1.96 * math.sqrt(p * (1 - p) / n + q * (1 - q) / m), **bound)


def judged(seed, curves, native, needles, probes, heads):
    """Orderings 3-5, 7-10 and 12 of one seed; what was not measured is not judged."""
    judge, L, last = Judge(seed.seed), seed.sizes["shape"]["block_size"], seed.sizes["tune"][-1]
    far, beyond = FACTOR * L, 2 * FACTOR * L
    if curves:
        at = lambda name, n, update=0: curves[name][str(update)][str(n)]  # noqa: E731
        for a, b in (("yarn", "ntk"), ("ntk-parts", "ntk"), ("ntk", "none")):
            judge.pair(3, f"zero-shot at {far}: {a} below {b}", at(a, far), at(b, far), below=0)
        for a, b, bound in (("none", "ntk", 0), ("ntk", "ntk-parts", 0), ("ntk-parts", "yarn", 0.02), ("yarn", "pi", -0.3)):
            judge.pair(4, f"tax at {L}: {a} below {b}" + (f" by {-bound}" if bound < 0 else f", or at most {bound} above" if bound else ""), at(a, L), at(b, L), below=bound)
        judge.apart(5, f"ntk holds to {2 * L}: within 10 % of its perplexity at {L}", at("ntk", 2 * L), at("ntk", L), below=math.log(1.1))
        judge.apart(5, f"ntk is broken at {far}: above 1.5 times", at("ntk", far), at("ntk", L), above=math.log(1.5))
        for name in ("dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen"):
            judge.add(5, f"{name} equals none at {L}, to the bit", max(abs(x - y) for x, y in zip(at(name, L), at("none", L))), 0.0, below=1e-9)
        judge.apart(7, f"yarn, fine-tuned, breaks at {beyond}, beyond its target", at("yarn", beyond, last), at("yarn", far, last), above=0.1)
        judge.pair(7, f"zero-shot at {beyond}: dynamic-yarn below yarn", at("dynamic-yarn", beyond), at("yarn", beyond), below=0)
        for exact in ("yarn", "ntk-lceg", "pi"):
            judge.pair(12, f"at {far}: {exact}, fine-tuned, below its zero-shot", at(exact, far, last), at(exact, far), below=0)
        for rough in ("window", "lm-infinite", "self-extend"):
            judge.pair(12, f"at {far}: yarn, fine-tuned, below {rough}", at("yarn", far, last), at(rough, far), below=0)
            judge.pair(12, f"at {far}: yarn, zero-shot, below {rough}", at("yarn", far), at(rough, far), below=0)
        for name in ("ntk", "yarn"):
            judge.pair(12, f"at {beyond}: ntk-lceg, fine-tuned, whose base is computed anew there, below {name}, fine-tuned", at("ntk-lceg", beyond, last), at(name, beyond, last), below=0)
    if needles:
        N, trials = seed.sizes["needle"]["length"], seed.sizes["needle"]["trials"]
        cell = {(row["checkpoint"], row["length"], row["depth"]): row["accuracy"] for row in needles}
        mean = lambda name, n: statistics.fmean(cell[name, n, depth] for depth in (0, 0.25, 0.5, 0.75, 1))  # noqa: E731
        for a, b in (("none", "ntk"), ("ntk", "ntk-parts"), ("ntk-parts", "yarn")):
            judge.shares(8, f"needles at {4 * N}: {b} above {a}", mean(b, 4 * N), mean(a, 4 * N), 5 * trials, 5 * trials, above=0)
        judge.shares(8, f"needles at {4 * N}: yarn at least 0.8", mean("yarn", 4 * N), None, 5 * trials, 1, above=0.8)
        judge.shares(8, f"needles at {4 * N}: alibi finds fewer at the start than at the end", cell["alibi", 4 * N, 1.0], cell["alibi", 4 * N, 0.0], trials, trials, above=0)
        for times in (2, 3, 4):
            judge.shares(8, f"needles at {times * N}: nope above rope", mean("nope", times * N), mean("none", times * N), 5 * trials, 5 * trials, above=0)
        judge.shares(12, f"needles at {4 * N}: a window of {N} finds them at the end", cell["window", 4 * N, 1.0], None, trials, 1, above=0.5)
        judge.shares(12, f"needles at {4 * N}: and not at the start", cell["window", 4 * N, 0.0], None, trials, 1, below=0.1)
    if probes:
        error = {(row["checkpoint"], row["layer"]): row["error"] for row in probes if row["task"] == "probe"}
        layers, chance = seed.sizes["shape"]["n_layer"], (L * L - 1) / (3 * L)
        judge.add(9, "nope, layer 0: at chance, in units of it (0.7 to 1.5)", abs(error["nope", 0] / chance - 1.1), 0.0, below=0.4)
        judge.add(9, "nope, its best layer: at most 1/4 of chance", min(error["nope", layer] for layer in range(1, layers + 1)) / chance, 0.0, below=0.25)
        for name in ("learned", "sinusoidal"):
            judge.add(9, f"{name}, layer 0: at most 1/20 of chance", error[name, 0] / chance, 0.0, below=0.05)
        mean = {name: statistics.fmean(row["distance"] for row in heads if row["checkpoint"] == name) for name in dict.fromkeys(row["checkpoint"] for row in heads)}
        for name in (n for n in mean if n != "alibi"):
            judge.add(10, f"mean attended distance at {far}: alibi's {mean['alibi']:.1f} tokens below {name}'s {mean[name]:.1f}, as a ratio", mean["alibi"] / mean[name], 0.0, below=1.0)
        steep = [row for row in heads if row.get("range", math.inf) < far / 4]
        judge.add(10, f"alibi, heads with 1 / slope below {far // 4}: distance over 1 / slope between 0.5 and 1.5, the worst", max((abs(row["distance"] / row["range"] - 1) for row in steep), default=math.inf), 0.0, below=0.5)
    return judge.lines


def support(vocab_size=64):
    """Part 4: {scheme: {method: "" or the sentence that refuses it}}."""
    methods = list(dict.fromkeys([*STRETCH, *(m for scheme in POSITIONS.values() for m in scheme.methods)]))
    found = {}
    for pos in POSITIONS:
        for method in methods:
            model = GPT(GPTConfig(pos=pos, n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=vocab_size))
            try:
                model.stretch(method, 2, **({"long_factor": [1.0, 1.5, 2.0, 2.0]} if method == "longrope" and pos == "rope" else {}))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PastTrainedLength)
                    model.eval()(torch.zeros(1, 32, dtype=torch.int64))
                found.setdefault(pos, {})[method] = ""
            except Refused as refusal:
                found.setdefault(pos, {})[method] = str(refusal)
    return found


def spread(values, digits=3):
    """Mean of the seeds, and the range between them."""
    return f"{statistics.fmean(values):.{digits}f}" + (f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else "")


def write(cfg, seeds, curves, natives, needles, probes, heads, lines, seconds):
    """The report and the pictures."""
    sizes, out = BUDGETS[cfg.budget], Path(cfg.out_dir)
    L, tune = sizes["shape"]["block_size"], sizes["tune"]
    far, mean = FACTOR * L, statistics.fmean
    note = f"{config.provenance(config.pick_device(cfg.device))}; {cfg.dataset} {seeds[0].dataset.hash}; {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    command = "python experiments/reproduce.py " + " ".join(sys.argv[1:])
    count = sum(p.numel() for p in GPT(GPTConfig(**sizes["shape"], vocab_size=seeds[0].dataset.vocab_size)).parameters())
    text = ["# What stretching buys", "", f"`{command.strip()}`: {note}; {seconds / 60:.0f} minutes of measuring and training in all.", "",
            f"{count / 1e6:.2f} M parameters ({', '.join(f'{k}={v}' for k, v in sizes['shape'].items())}), {sizes['iters']} iterations of {sizes['batch'] * L:,} tokens, stretched {FACTOR} times. "
            "Mean of the seeds, and their range. Nats per token in the last quarter of the window."]
    if curves:
        none = [mean(c["none"]["0"][str(far)]) for c in curves]
        oracle = [mean(n[str(far)]) for n in natives]
        closed = lambda name, update: [(a - mean(c[name][str(update)][str(far)])) / (a - b) for a, b, c in zip(none, oracle, curves)]  # noqa: E731
        share = lambda update: update / sizes["iters"]  # noqa: E731
        text += ["", "## Every method", "", f"Trained at {L}, target {far}. Fine-tuned at the target with as many tokens an iteration (drope, PoSE: at {L}). "
                 + f"Native, trained at {far} for all the tokens: {spread(oracle)} there. A tenth of a percent of pretraining would be {sizes['iters'] / 1000:.1f} updates.", "",
                 "| | " + " | ".join(f"at {n}" for n in (L, 2 * L, far, 2 * far)) + " | " + " | ".join(f"{far}, {u} updates ({share(u):.1%})" for u in tune[1:]) + f" | at {L} after {tune[-1]} | at {2 * far} after {tune[-1]} |",
                 "|---" * (len(tune) + 6) + "|"]
        order = sorted(curves[0], key=lambda name: mean(mean(c[name][str(tune[-1] if str(tune[-1]) in c[name] else 0)][str(far)]) for c in curves))
        for name in order:
            cell = lambda update, n: spread([mean(c[name][str(update)][str(n)]) for c in curves]) if str(update) in curves[0][name] else "–"  # noqa: E731
            text.append(f"| {name} | " + " | ".join([*(cell(0, n) for n in (L, 2 * L, far, 2 * far)), *(cell(u, far) for u in tune[1:]), cell(tune[-1], L), cell(tune[-1], 2 * far)]) + " |")
        text += ["", f"### Gap closed at {far}", "", "| | " + " | ".join("zero-shot" if not u else f"{u} updates ({share(u):.1%})" for u in tune) + " |", "|---" * (len(tune) + 1) + "|"]
        text += [f"| {name} | " + " | ".join(spread(closed(name, u), 2) if str(u) in curves[0][name] else "–" for u in tune) + " |" for name in order]
        if plt := pyplot(out / "reproduce.png"):
            figure, axes = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
            colours = [*plt.get_cmap("tab20").colors]
            for i, name in enumerate(order):
                marks = dict(marker="os^D"[i % 4], markersize=4, color=colours[i % 20], label=name)
                lengths = (L, 2 * L, far, 2 * far)
                axes[0].plot(lengths, [mean(mean(c[name]["0"][str(n)]) for c in curves) for n in lengths], **marks)
                if str(tune[-1]) in curves[0][name]:
                    axes[1].plot(tune, [mean(closed(name, u)) for u in tune], **marks)
            axes[0].set(xscale="log", xlabel="context length", ylabel="nats per token, last quarter", title=f"zero-shot, trained at {L}, stretched {FACTOR} times")
            axes[0].set_xticks(lengths, lengths)
            axes[0].minorticks_off()
            axes[1].set(xlabel="updates at the target", ylabel="gap closed", title=f"gap closed at {far}: 0 untouched, 1 trained there", ylim=(-0.25, 1.1))
            figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right")
            for axis in axes:
                axis.grid(alpha=0.3)
            figure.supxlabel(note, fontsize=7, color="gray")
            figure.savefig(out / "reproduce.png", dpi=110)
            plt.close(figure)
        text += ["", "![zero-shot loss and gap closed](reproduce.png)"]
    if needles:
        lengths = needle_lengths(sizes["needle"]["length"])
        rows = [{**row, "accuracy": mean(other["accuracy"] for one in needles for other in one if all(other[k] == row[k] for k in ("checkpoint", "length", "depth")))} for row in needles[0]]
        wall(rows, lengths, str(out / "needles.png"), f"{sizes['needle']['trials']} prompts a cell and seed, teacher-forced; trained on up to {sizes['needle']['length']} tokens; {note}")
        text += ["", "## Needles", "", f"Share of passkeys found, mean over depths (in brackets the worst); models trained on passkey documents of up to {sizes['needle']['length']} tokens, stretched {FACTOR} times without further training "
                 "(drope: recalibrated at the trained length for a fifth of it). The control has no key: 0.001 is chance.", "", "| | " + " | ".join(map(str, lengths)) + " | most without a key |", "|---" * (len(lengths) + 2) + "|"]
        for name in dict.fromkeys(row["checkpoint"] for row in rows):
            at = {n: [row["accuracy"] for row in rows if (row["checkpoint"], row["length"]) == (name, n) and row["depth"] is not None] for n in lengths}
            text.append(f"| {name} | " + " | ".join(f"{mean(at[n]):.2f} ({min(at[n]):.2f})" for n in lengths) + f" | {max(row['accuracy'] for row in rows if row['checkpoint'] == name and row['depth'] is None):.3f} |")
        text += ["", "![needles by length and depth](needles.png)"]
    if probes:
        layers = range(sizes["shape"]["n_layer"] + 1)
        text += ["", "## Where the position is known", "", f"Mean error in tokens of a probe for the absolute position, after each layer (0: the embeddings), in windows of {L}; a random guess is {(L * L - 1) / (3 * L):.1f} off.", "",
                 "| | " + " | ".join(map(str, layers)) + " | last token's loss, in order | shuffled |", "|---" * (len(layers) + 3) + "|"]
        for name in dict.fromkeys(row["checkpoint"] for row in probes[0]):
            mine = [[row for row in one if row["checkpoint"] == name] for one in probes]
            text.append(f"| {name} | " + " | ".join(spread([next(r["error"] for r in one if r.get("layer") == layer) for one in mine], 1) for layer in layers) + " | "
                        + " | ".join(spread([next(r[k] for r in one if r.get("scored") == "last token") for one in mine], 2) for k in ("intact", "shuffled")) + " |")
        text += ["", f"## How far heads look, in windows of {far}", "", "Mean attended distance in tokens over heads and layers.", "", "| | tokens |", "|---|---|"]
        text += [f"| {name} | {spread([mean(r['distance'] for r in one if r['checkpoint'] == name) for one in heads], 1)} |" for name in dict.fromkeys(row["checkpoint"] for row in heads[0])]
    if "table" in cfg.parts:
        found = support()
        methods = list(next(iter(found.values())))
        text += ["", "## Which scheme takes which method", "", "`yes`: stretched and read at twice its length; empty: refused, with the sentence below.", "", "| | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
        text += [f"| {pos} | " + " | ".join("" if sentence else "yes" for sentence in row.values()) + " |" for pos, row in found.items()]
        text += ["", *(f"- {sentence}" for sentence in dict.fromkeys(next(filter(None, row.values())) for row in found.values()))]
    text += ["", "## Orderings", "", "Numbered as in the project's list; each judged in every seed by itself: it passes when its whole 95 % interval does (± 0: a figure without one).", ""]
    text += [f"- {line['number']}. {line['claim']}: {line['seen']}: {'pass' if line['passed'] else 'FAIL'} (seed {line['seed']})" for line in sorted(lines, key=lambda line: (line["number"], line["claim"], line["seed"]))]
    text += ["", f"{sum(line['passed'] for line in lines)} of {len(lines)} judgements pass, over {len(seeds)} seed{'s' * (len(seeds) > 1)}.", ""]
    (out / "reproduce.md").write_text("\n".join(text), encoding="utf-8")
    short = [{name: {u: {n: round(mean(w), 5) for n, w in by.items()} for u, by in curve.items()} for name, curve in c.items()} for c in curves]
    (out / "reproduce.json").write_text(json.dumps({"command": command.strip(), "note": note, "sizes": sizes, "methods": short, "native": [{n: round(mean(w), 5) for n, w in by.items()} for by in natives],
                                                    "needles": needles, "probe": probes, "orderings": lines}, indent=None) + "\n", encoding="utf-8")
    print("\n".join(text))


def main():
    cfg, _, paths = config.parse(ReproduceConfig, about=__doc__)
    if cfg.dataset == "python" and not data.exists("python"):
        prepare("python")
    dataset = data.Dataset(cfg.dataset)
    if dataset.tokenizer is None:
        raise UserError(f"dataset {cfg.dataset} has no tokenizer, and passkeys are text: use one that data/prepare.py made")
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    seeds, curves, natives, needles, probes, heads, lines = [], [], [], [], [], [], []
    for number in range(1, BUDGETS[cfg.budget]["seeds"] + 1):
        seed = Seed(cfg, number, dataset)
        seeds.append(seed)
        L = seed.sizes["shape"]["block_size"]
        again = lambda value: json.loads(json.dumps(value))  # noqa: E731  as the file has it
        if "methods" in cfg.parts:
            natives.append(again(seed.measured("native", seed.native)))
            curves.append({name: again(seed.measured(f"method {name}", lambda: seed.curve(name))) for name in METHODS})
        if "needles" in cfg.parts:
            needles.append([row for name in WALL for row in seed.measured(f"needles {name}", lambda: seed.found(name))])
        if "probe" in cfg.parts:
            options = dict(windows=min(400, 10 * seed.sizes["probe"]), held_out=100, steps=seed.sizes["probe"], seed=number)
            probes.append([row for pos in ("nope", "learned", "sinusoidal", "alibi", "rope")
                           for row in seed.measured(f"probe {pos}", lambda: [*probe(seed.text(pos), dataset, pos, **options), *shuffled(seed.text(pos), dataset, pos, seed=number)])])
            heads.append([row for pos in ("nope", "alibi", "t5", "rope") for row in seed.measured(f"heads {pos}", lambda: distances(seed.text(pos), dataset, pos, FACTOR * L, windows=16, seed=number))])
        lines += judged(seed, curves[-1] if curves else None, natives[-1] if natives else None, needles[-1] if needles else None, probes[-1] if probes else None, heads[-1] if heads else None)
    write(cfg, seeds, curves, natives, needles, probes, heads, lines, sum(seed.kept.get("seconds", 0) for seed in seeds))
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
