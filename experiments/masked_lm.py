"""Masked language modelling: what the schemes are worth when attention is not causal (Haviv et al. 2022).

    python experiments/masked_lm.py                           four schemes, three seeds, causal and masked: 24 runs of some minutes each (not timed whole)
    python experiments/masked_lm.py --pos=nope,rope           only some; any scheme of model.py
    python experiments/masked_lm.py --budget=gpu              a larger model on longer text

Stop it when you like: the same command goes on after the last run that was finished. What each run measured lies in out/masked_lm; the results go to results/masked_lm.md and .json.
A causal model without any position scheme can count: of the tokens that it sees there are more and more. Take the causal mask away and nothing is left to count: then its tokens are a bag,
and every hidden one of a window gets the same answer. Each scheme is trained twice, with the same windows in the same order: to name the next token, and to name 15 % of the tokens, drawn anew for every
window, that are replaced by a mask token, all of them and only they being scored. Attention then sees every token (causal=False). Schemes that act by distance see |i - j|, so
that left and right look alike to them, but for <bos>, which starts each window of bytes and is never masked.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import contextlib
import functools
import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch

import data
import kernels
from config import UserError
from data.prepare import prepare
from experiments.leaderboard import interval
from model import GPT, POSITIONS, GPTConfig, Refused
from train import TrainConfig, learning_rate, make_optimizers


@dataclass
class MaskedConfig:
    pos: tuple[str, ...] = ("nope", "learned", "sinusoidal", "alibi")  # position schemes
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # cpu: 0.5 M parameters, 64 tokens; gpu: 25 M, 256 tokens; try: seconds, to see that it works
    seeds: int = 3               # runs of each scheme, both ways
    steps: int = 0               # updates of each run; 0: what the budget says
    dataset: str = "python"      # text to train on and to score
    max_tokens: int = 65536      # tokens of validation text in the windows that are scored
    runs: str = "out/masked_lm"  # where each finished run leaves what it measured
    out_dir: str = "results"     # where masked_lm.md and .json go
    device: str = "auto"         # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min(self.seeds, self.max_tokens) < 1 or self.steps < 0:
            raise UserError("seeds and max_tokens must be at least 1, and steps too, or 0 for the budget's own")
        if unknown := [name for name in self.pos if name not in POSITIONS]:
            raise UserError(f"there is no position scheme {unknown[0]!r}: schemes are {', '.join(POSITIONS)}")
        if not self.pos:
            raise UserError("pos names nothing: give schemes, as in --pos=nope,learned")


BUDGETS = {  # settings of model and training, alike for all schemes and both ways
    "cpu": (dict(n_layer=4, n_head=4, n_embd=96, block_size=64), dict(batch_size=64, max_iters=1500, learning_rate=3e-3, warmup_iters=50)),
    "gpu": (dict(n_layer=8, n_head=8, n_embd=512, block_size=256), dict(batch_size=64, max_iters=8000, learning_rate=1e-3, warmup_iters=400)),
    "try": (dict(n_layer=2, n_head=2, n_embd=32, block_size=16), dict(batch_size=8, max_iters=20, learning_rate=3e-3, warmup_iters=2)),
}
SHARE = 0.15  # of the tokens that are masked


@contextlib.contextmanager
def bidirectional():
    """While it lasts, every token sees all others: the schemes call kernels.attention, which is wrapped. Forward and backward belong inside; other threads would be hit too."""
    causal = kernels.attention
    kernels.attention = functools.partial(causal, causal=False)
    try:
        yield
    finally:
        kernels.attention = causal


def mask(tokens, token, bos, seed):
    """Of tokens (B, T), drawn by the seed, a share SHARE is replaced by the mask token, never a <bos>. Returns tokens, and targets: what was replaced, -1 elsewhere."""
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < SHARE
    if bos is not None:
        masked &= tokens != bos
    return tokens.masked_fill(masked, token), tokens.masked_fill(~masked, -1)


def examples(objective, x, y, dataset, seed):
    """What a model reads and what it is to name, int64 (B, T) each, of a batch of windows, as data.Split has them."""
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    return (x, y) if objective == "causal" else mask(x, dataset.vocab_size, dataset.bos, seed)  # the mask token comes after the vocabulary


def train(model, objective, dataset, cfg, device, dtype):
    """Train a GPT in place by a TrainConfig, on "causal" or "masked" examples, one batch an update."""
    config.prepare_device(device)
    model.to(device).train()
    optimizers = make_optimizers(model, cfg)
    for step in range(cfg.max_iters):
        x, y = (part.to(device) for part in examples(objective, *dataset.train.batch(step, cfg.batch_size, model.config.block_size, cfg.seed), dataset, (cfg.seed << 40) + step))
        with bidirectional() if objective == "masked" else contextlib.nullcontext():
            with config.autocast(device, dtype):
                loss = model(x, y)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = learning_rate(cfg, step)
            o.step()
            o.zero_grad()
    model.eval()


def scored(objective, dataset, length, max_tokens, rows=64):
    """The examples that are scored, batch by batch: windows evenly spaced over the validation text; their masks are the same for every run."""
    dataset.val.require(length)
    count = int(dataset.val.count(length).sum())
    n = min(count, max(1, max_tokens // length))
    for i in range(0, n, rows):
        yield examples(objective, *map(np.stack, zip(*(dataset.val.window(j * count // n, length) for j in range(i, min(n, i + rows))))), dataset, i)


@torch.no_grad()
def score(model, objective, dataset, max_tokens, device, dtype):
    """(mean nats, number of scored tokens)."""
    nats = tokens = 0
    for x, y in scored(objective, dataset, model.config.block_size, max_tokens):
        with bidirectional() if objective == "masked" else contextlib.nullcontext(), config.autocast(device, dtype):
            nats += model(x.to(device), y.to(device), reduction="sum").item()
        tokens += int((y >= 0).sum())
    return nats / tokens, tokens


def by_frequency(objective, dataset, length, max_tokens):
    """The loss of one who knows only how often each token occurs in the training text: nats per scored token."""
    counts = 1.0 + sum(np.bincount(tokens, minlength=dataset.vocab_size) for tokens in dataset.train.tokens)
    nats = torch.from_numpy(-np.log(counts / counts.sum()))
    return torch.cat([nats[y[y >= 0]] for _, y in scored(objective, dataset, length, max_tokens)]).mean().item()


def run(pos, objective, seed, cfg, dataset, file):
    """Train and score one run, or read what it left: its row, which stays in the file."""
    shape, training = BUDGETS[cfg.budget]
    how = TrainConfig(seed=seed, **training | ({"max_iters": cfg.steps} if cfg.steps else {}))
    settings = GPTConfig(pos=pos, **shape, vocab_size=dataset.vocab_size + 1)
    key = {"model": asdict(settings), "training": asdict(how), "data": dataset.hash, "max_tokens": cfg.max_tokens, "share": SHARE}
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key:
            raise UserError(f"{file} was made with other settings or data: remove it, or choose other --runs")
        return kept["row"]
    device, began = config.pick_device(cfg.device), time.perf_counter()
    dtype = config.pick_dtype(cfg.dtype, device)
    dtype = torch.float32 if dtype == torch.float16 else dtype  # float16 would want a loss scaler
    torch.manual_seed(seed)
    model = GPT(settings)
    train(model, objective, dataset, how, device, dtype)
    loss, tokens = score(model, objective, dataset, cfg.max_tokens, device, dtype)
    if not math.isfinite(loss):
        raise UserError(f"{objective} with --pos={pos}, seed {seed}: the loss is not finite; try --dtype=float32, or another number of --steps")
    row, seconds = {"pos": pos, "objective": objective, "seed": seed, "loss": loss, "tokens": tokens}, round(time.perf_counter() - began)
    file.with_suffix(".tmp").write_text(json.dumps({"key": key, "seconds": seconds, "row": row}) + "\n", encoding="utf-8")
    file.with_suffix(".tmp").rename(file)
    print(f"   {seconds} s; {loss:.3f} nats per token", flush=True)
    return row


def losses(rows, pos, objective):
    """Seed -> nats per token."""
    return {row["seed"]: row["loss"] for row in rows if (row["pos"], row["objective"]) == (pos, objective)}


def cell(values, digits=3):
    """Mean and interval as text."""
    mean, half = interval(list(values))
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def table(rows, schemes, frequency):
    """A Markdown table: a line per scheme, causal and masked loss in nats and as perplexity, mean and interval over the seeds."""
    lines = ["| | causal, nats | causal, perplexity | masked, nats | masked, perplexity |", "|---|---|---|---|---|"]
    for pos in schemes:
        both = [list(losses(rows, pos, objective).values()) for objective in ("causal", "masked")]
        lines.append(f"| {pos} | " + " | ".join(f"{cell(values)} | {cell(map(math.exp, values), 2)}" for values in both) + " |")
    return "\n".join([*lines, "| only how often each token occurs | " + " | ".join(f"{loss:.3f} | {math.exp(loss):.2f}" for loss in frequency) + " |"])


def judge(rows, schemes):
    """Ordering 2's last sentence as (passed, line) for each scheme beside NoPE: masked, NoPE's perplexity is more than twice the other's, seed by seed."""
    lines = []
    for pos in schemes:
        if pos != "nope" and "nope" in schemes:
            nope, other = losses(rows, "nope", "masked"), losses(rows, pos, "masked")
            mean, half = interval([nope[seed] - other[seed] for seed in nope])
            passed = math.isfinite(half) and mean - half > math.log(2)
            lines.append((passed, f"2. nope above {pos}, masked: {mean:+.3f} ± {half:.3f} nats, > {math.log(2):.3f} (twice the perplexity): {'pass' if passed else 'FAIL'}"
                          + ("" if passed or math.isfinite(half) else " (one seed has no interval)")))
    return lines


def main():
    cfg, *_ = config.parse(MaskedConfig, about=__doc__)
    if cfg.dataset in ("python", "shakespeare") and not data.exists(cfg.dataset):
        prepare(cfg.dataset)
    dataset, schemes, rows = data.Dataset(cfg.dataset), list(dict.fromkeys(cfg.pos)), []
    (shape, training), folder = BUDGETS[cfg.budget], Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}"
    dataset.train.require(shape["block_size"])
    folder.mkdir(parents=True, exist_ok=True)
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    frequency = [by_frequency(objective, dataset, shape["block_size"], cfg.max_tokens) for objective in ("causal", "masked")]
    counted = 0
    for seed in range(1, cfg.seeds + 1):
        for pos in schemes:
            for objective in ("causal", "masked"):
                counted += 1
                print(f"{pos}, {objective}, seed {seed} ({counted} of {2 * cfg.seeds * len(schemes)})", flush=True)
                rows.append(run(pos, objective, seed, cfg, dataset, folder / f"{pos}-{objective}-{seed}.json"))
    scored_tokens = {row["objective"]: row["tokens"] for row in rows}
    note = (f"{config.provenance(config.pick_device(cfg.device))}; {cfg.dataset} {dataset.hash}, {scored_tokens['causal']:,} tokens scored causally and {scored_tokens['masked']:,} masked, "
            f"{cfg.seeds} seed{'s' * (cfg.seeds > 1)}")
    command, judged = " ".join(["python experiments/masked_lm.py", *sys.argv[1:]]), judge(rows, schemes)
    size = sum(p.numel() for p in GPT(GPTConfig(pos="nope", **shape, vocab_size=dataset.vocab_size + 1)).parameters())
    lines = ["# Causal and masked language models", "", f"`{command}`: {note}.", "",
             f"Each run: {size / 1e6:.2f} M parameters before what the scheme adds ({', '.join(f'{k}={v}' for k, v in shape.items())}), {cfg.steps or training['max_iters']:,} iterations of "
             f"{training['batch_size'] * shape['block_size']:,} tokens by AdamW, the same windows for all. Held-out text, nats and perplexity per scored token, mean over the seeds and 95 % interval. "
             "Causal and masked losses are of different questions: compare within a column. The paper, masked, perplexity of subword tokens: nope 147.18, learned 4.06, sinusoidal 4.07, alibi 4.00.", "",
             table(rows, schemes, frequency), ""]
    if judged:
        lines += ["## Orderings", "", "Paired differences over the seeds; a claim passes when its whole interval does.", "", *(f"- {line}" for _, line in judged), ""]
    text, out = "\n".join(lines), Path(cfg.out_dir) / "masked_lm"
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    Path(f"{out}.json").write_text(json.dumps({"command": command, "note": note, "orderings": [line for _, line in judged], "by_frequency": dict(zip(("causal", "masked"), frequency)), "rows": rows}, indent=1) + "\n",
                                   encoding="utf-8")
    print("\n" + text)
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
