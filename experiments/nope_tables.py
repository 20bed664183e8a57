"""How much a model loses without positions, by length and by size, on any texts (the tables of Haviv et al. 2022).

    python experiments/nope_tables.py --budget=gpu --datasets=python,shakespeare
    python experiments/nope_tables.py --budget=cpu                # small: some 20 minutes of 2 cores; stop it when you like, the same command goes on

Every scheme is trained alike at each length (at the middle size) and at each size (at the greatest length), and scored on whole windows of that length, in nats per token of held-out text and as
a perplexity. The claim: without positions little is lost, and the less the larger the model. Results go to results/nope.md and .json.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import json
import math
from dataclasses import dataclass
from typing import Literal

import torch

import data
from checkpoint import steps
from config import UserError
from data.prepare import prepare
from evaluate import loss_by_position
from experiments.leaderboard import interval
from model import GPT, POSITIONS, GPTConfig, Refused
from train import TrainConfig, train


@dataclass
class NopeConfig:
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # sizes and lengths, below
    datasets: tuple[str, ...] = ("python",)       # texts
    pos: tuple[str, ...] = ("nope", "learned", "sinusoidal", "alibi")  # schemes
    seeds: int = 1                                # runs of each
    max_tokens: int = 65536                       # span of validation text that is scored
    runs: str = "out/nope"                        # where the run folders go
    out_dir: str = "results"                      # where nope.md and .json go
    device: str = "auto"                          # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min(self.seeds, self.max_tokens) < 1 or not self.datasets:
            raise UserError("seeds and max_tokens must be at least 1, and datasets must name a text")
        if unknown := [pos for pos in self.pos if pos not in POSITIONS]:
            raise UserError(f"there is no position scheme {unknown[0]!r}: choose from {', '.join(POSITIONS)}")


BUDGETS = {  # lengths; widths (the middle one is that of all lengths), a head being 32 or 64 wide; layers; tokens an iteration; iterations
    "cpu": dict(lengths=(32, 64, 128), widths=(64, 96, 128), layers=4, head=32, tokens=4096, iters=500),
    "gpu": dict(lengths=(256, 512, 1024), widths=(256, 512, 768), layers=12, head=64, tokens=65536, iters=3000),
    "try": dict(lengths=(8, 16), widths=(32, 64), layers=1, head=32, tokens=64, iters=3),
}


def cells(sizes):
    """(length, width) of every run, each once: all lengths at the middle width, all widths at the greatest length."""
    middle = sizes["widths"][len(sizes["widths"]) // 2]
    return list(dict.fromkeys([*((length, middle) for length in sizes["lengths"]), *((sizes["lengths"][-1], width) for width in sizes["widths"])]))


def score(cfg, name, pos, length, width, seed):
    """The loss of one run, which is trained, or what is left of it, when it is not known yet: a row."""
    sizes, dataset = BUDGETS[cfg.budget], data.Dataset(name)
    run = Path(cfg.runs) / f"{cfg.budget}-{Path(name).name}-{pos}-{length}-{width}-{seed}"
    row = {"dataset": name, "data": dataset.hash, "pos": pos, "length": length, "width": width, "seed": seed, "iters": sizes["iters"], "max_tokens": cfg.max_tokens}
    if (run / "score.json").is_file():
        kept = json.loads((run / "score.json").read_text(encoding="utf-8"))
        if {key: kept.get(key) for key in row} != row:
            raise UserError(f"{run} was made with other settings or data: remove it, or choose other --runs")
        return kept
    how = TrainConfig(dataset=name, out_dir=str(run), seed=seed, batch_size=max(1, sizes["tokens"] // length), max_iters=sizes["iters"], learning_rate=3e-3 if width < 512 else 1e-3, warmup_iters=min(100, sizes["iters"] // 5),
                      eval_interval=10**9, eval_iters=2, device=cfg.device, dtype=cfg.dtype, compile=None if cfg.budget == "gpu" else False)
    if steps(run):
        model, how.init_from = GPT.load(run), "resume"
    else:
        torch.manual_seed(seed)
        model = GPT(GPTConfig(pos=pos, n_layer=sizes["layers"], n_head=width // sizes["head"], n_embd=width, block_size=length, vocab_size=dataset.vocab_size))
    if model.meta.get("step") != sizes["iters"] and train(model, how)["stopped"]:
        raise KeyboardInterrupt
    device = config.pick_device(cfg.device)
    nats, tokens = loss_by_position(model.to(device), dataset.val, length, cfg.max_tokens, config.pick_dtype(cfg.dtype, device))
    row |= {"loss": float(nats.sum() / tokens.sum()), "parameters": sum(p.numel() for p in model.parameters())}
    (run / ".score").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (run / ".score").rename(run / "score.json")
    return row


def table(rows, cfg, name, columns):
    """A Markdown table of one text: a line per scheme; columns: (length, width) pairs."""
    lines = ["| | " + " | ".join(f"{length} tokens, {next(r['parameters'] for r in rows if (r['length'], r['width']) == (length, width)) / 1e6:.1f} M" for length, width in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for pos in cfg.pos:
        found = []
        for length, width in columns:
            mean, half = interval([row["loss"] for row in rows if (row["dataset"], row["pos"], row["length"], row["width"]) == (name, pos, length, width)])
            found.append(f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else "") + f" ({math.exp(mean):.2f})")
        lines.append(f"| {pos} | " + " | ".join(found) + " |")
    return lines


def main():
    cfg, _, _ = config.parse(NopeConfig, about=__doc__)
    for name in cfg.datasets:
        if name in ("python", "shakespeare") and not data.exists(name):
            prepare(name)
        data.locate(name)
    sizes, rows, out = BUDGETS[cfg.budget], [], Path(cfg.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    todo = [(name, pos, length, width, seed) for seed in range(1, cfg.seeds + 1) for name in cfg.datasets for length, width in cells(sizes) for pos in cfg.pos]
    for i, (name, pos, length, width, seed) in enumerate(todo):
        print(f"\n== {pos} on {name}, {length} tokens, {width} wide, seed {seed} ({i + 1} of {len(todo)})", flush=True)
        rows.append(score(cfg, name, pos, length, width, seed))
    command = "python experiments/nope_tables.py " + " ".join(sys.argv[1:])
    text = ["# Without positions", "", f"`{command.strip()}`: {config.provenance(config.pick_device(cfg.device))}; {sizes['iters']} iterations of {sizes['tokens']:,} tokens, {cfg.seeds} seed{'s' * (cfg.seeds > 1)}; "
            "nats per token over whole windows of the trained length (perplexity)."]
    middle = cells(sizes)[0][1]
    for name in cfg.datasets:
        text += ["", f"## {name}, data {next(row['data'] for row in rows if row['dataset'] == name)}", "", "By length:", "", *table(rows, cfg, name, [(length, middle) for length in sizes["lengths"]]), "", "By size:", "",
                 *table(rows, cfg, name, [(sizes["lengths"][-1], width) for width in sizes["widths"]])]
    (out / "nope.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (out / "nope.json").write_text(json.dumps({"command": command.strip(), "rows": rows}) + "\n", encoding="utf-8")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
