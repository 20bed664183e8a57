"""Search a factor for each rotated pair of a RoPE checkpoint (LongRoPE: Ding et al. 2024; with needles for a fitness: LongRoPE2, Shang et al. 2025).

    python experiments/search.py out/rope --factor=4 --out=out/factors.json
    python extend.py out/rope --method=longrope --factor=4 --options=out/factors.json --max_iters=0

Evolution as LongRoPE's released settings have it, made small: a population of factor tables, begun from PI's, NTK's, NTK-by-parts' and YaRN's and mutations of them; each round the best half are
parents of as many children, half by mutation (each factor with a probability of 0.3), half by crossing two; factors are at least 1, never fall from a pair to the next
slower one, and lie on a grid of 0.01. Fitness is the loss, in nats per digit, of the digits of hidden passkeys at the target length (evaluate.py's needles): loss on all of the
text hardly feels whether far text can be read. The attention factor is LongRoPE's, sqrt(1 + ln factor / ln trained length). The winner is judged on prompts that the search has not seen.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np

import data
from config import UserError
from evaluate import find_needle
from model import GPT, STRETCH, Refused


@dataclass
class SearchConfig:
    factor: float = 4.0     # how many times longer
    out: str = "factors.json"  # where the table goes, for extend.py --method=longrope --options=FILE
    population: int = 16    # tables alive at once
    rounds: int = 10        # generations
    trials: int = 32        # prompts that a table is judged by, half of them at depth 0 to 0.5
    seed: int = 1           # of the evolution and the prompts
    device: str = "auto"    # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if min(self.population, self.trials) < 4 or self.rounds < 1 or self.seed < 0 or not self.factor > 1:
            raise UserError("population and trials must be at least 4, rounds at least 1, seed at least 0 and factor above 1")
        if not self.out.endswith(".json"):
            raise UserError(f"--out={self.out} must end in .json")


def proper(table, factor):
    """A table made legal: 1 to 1.5 times the factor, never falling towards the slower pairs, on a grid of 0.01. float64 (pairs,)."""
    return np.maximum.accumulate(np.clip(np.round(table, 2), 1.0, 1.5 * factor))


def beginnings(base, rotary_dim, trained, factor):
    """The tables of known methods: omega / omega', by name."""
    plain, _ = STRETCH["none"](base, rotary_dim, trained, 1.0)
    return {name: proper((plain / STRETCH[name](base, rotary_dim, trained, factor)[0]).numpy(), factor) for name in ("pi", "ntk", "ntk-parts")}


def evolve(start, fitness, factor, population, rounds, rng, say=lambda text: None):
    """The fittest table found (least fitness(table)), and its fitness; start: a list of tables. A table is judged once."""
    known = {}

    def judged(table):
        if (key := tuple(table)) not in known:
            known[key] = fitness(table)
        return known[key]

    def mutated(table):
        change = rng.random(len(table)) < 0.3
        return proper(table * np.where(change, rng.uniform(0.7, 1.4, len(table)), 1.0), factor)

    alive = [*start, *(mutated(start[i % len(start)]) for i in range(population - len(start)))]
    for turn in range(rounds):
        parents = sorted(alive, key=judged)[:max(2, population // 2)]
        children = []
        while len(parents) + len(children) < population:
            a, b = (parents[i] for i in rng.choice(len(parents), 2, replace=False))
            children.append(mutated(a) if len(children) % 2 else proper(np.where(rng.random(len(a)) < 0.5, a, b), factor))
        alive = parents + children
        say(f"round {turn + 1} of {rounds}: {judged(parents[0]):.4f} nats a digit, {len(known)} tables judged")
    best = min(alive, key=judged)
    return best, judged(best)


def loss(model, tokenizer, method, factor, options, trials, seed, dtype):
    """Passkeys at the target length under a method: found, and nats per digit."""
    model.stretch(method, 1.0 if model.config.stretch else factor, **options)
    cells = [find_needle(model, tokenizer, model.config.block_size, depth, max(1, trials // 4), seed, model.meta.get("bos"), dtype) for depth in (0.0, 0.25, 0.5, 0.9)]
    return tuple(float(np.mean(part)) for part in zip(*cells))


def main():
    cfg, _, paths = config.parse(SearchConfig, about=__doc__, paths="the run folder of a RoPE model, trained with passkeys (train.py --passkey)")
    if len(paths) != 1:
        raise UserError("give one run folder, as in python experiments/search.py out/rope --factor=4")
    model = GPT.load(paths[0])
    if model.config.pos != "rope" or model.config.stretch:
        raise UserError(f"{paths[0]} is {'stretched already' if model.config.stretch else f'--pos={model.config.pos}'}: give a RoPE checkpoint as it was trained")
    if not (tokenizer := data.from_json(model.meta.get("tokenizer"))):
        raise UserError(f"{paths[0]} has no tokenizer, so it cannot be asked in text: use one that was trained on a text prepared by data/prepare.py")
    device = config.pick_device(cfg.device)
    model, dtype, c = model.to(device), config.pick_dtype(cfg.dtype, device), model.config
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    rng, start = np.random.default_rng(cfg.seed), beginnings(c.rope_base, model.pos.rotary_dim, c.trained_length, cfg.factor)
    best, _ = evolve(list(start.values()), lambda table: loss(model, tokenizer, "longrope", cfg.factor, {"long_factor": table.tolist()}, cfg.trials, cfg.seed, dtype)[1],
                     cfg.factor, cfg.population, cfg.rounds, rng, lambda text: print(text, flush=True))
    print(f"at {c.block_size} tokens, on {4 * cfg.trials} prompts that the search has not seen:")
    for name, method, options in (("none", "none", {}), ("pi", "pi", {}), ("ntk", "ntk", {}), ("ntk-parts", "ntk-parts", {}), ("yarn", "yarn", {}), ("searched", "longrope", {"long_factor": best.tolist()})):
        found, nats = loss(model, tokenizer, method, cfg.factor, options, 4 * cfg.trials, cfg.seed + 1000, dtype)
        print(f"  {name:<10} {found:5.2f} found, {nats:.4f} nats a digit")
    Path(cfg.out).write_text(json.dumps({"long_factor": best.tolist()}) + "\n", encoding="utf-8")
    print(f"{cfg.out} is written: python extend.py {paths[0]} --method=longrope --factor={cfg.factor:g} --options={cfg.out}")
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
