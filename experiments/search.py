"""Search a factor for each rotated pair of a RoPE checkpoint (LongRoPE: Ding et al. 2024).

    python experiments/search.py out/rope --factor=4 --out=out/factors.json
    python extend.py out/rope --method=longrope --factor=4 --options=out/factors.json --max_iters=0

The search is evolutionary, with LongRoPE's released settings at a small size. The population of
factor tables starts from those of PI, NTK-aware and NTK-by-parts, and mutations of them. In each
round the better half are the parents of as many children: half of them by mutation (each factor
with a probability of 0.3), half by crossover of two parents. Factors are at least 1, never fall
from one pair to the next slower one, and lie on a grid of 0.01.

The fitness is the loss, in nats per digit, of the digits of hidden passkeys at the target length
(LongRoPE2: Shang et al. 2025; evaluate.py --task=needle): the loss of a whole text hardly depends
on whether distant text can be used. The attention factor is LongRoPE's, sqrt(1 + ln factor / ln
original length). The winner is tested on prompts that the search has not seen.
"""

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

import data
from model import GPT, POSITIONS, RoPE
from nanolong import cli
from nanolong.devices import pick_device, pick_dtype
from nanolong.entry import load_entries
from nanolong.retrieval import find_needle
from nanolong.strict_json import write_json
from nanolong.validate import require
from rope_scaling import METHODS


@dataclass
class SearchConfig:
    factor: float = 4.0  # how many times longer
    # file for the table: extend.py --method=longrope --options=FILE
    out: str = "out/factors.json"
    # Python files, each with one scheme of your own, for a checkpoint that was trained with it
    entry: tuple[str, ...] = ()
    population: int = 16  # tables in a generation
    rounds: int = 10  # generations
    trials: int = 32  # prompts that a table is judged by, a quarter at each of four depths
    seed: int = 1  # of the evolution and the prompts
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self):
        require(self.factor > 1, f"factor={self.factor} does not extend the context: give above 1")
        require(self.population >= 4, f"population={self.population} is too small: give 4 or more")
        require(self.trials >= 4, f"trials={self.trials} is too small: give 4 or more")
        require(self.rounds >= 1, f"rounds={self.rounds} is too small: give at least 1")
        require(self.out.endswith(".json"), f"--out={self.out} is not a JSON file: end it in .json")


DEPTHS = (0.0, 0.25, 0.5, 0.9)  # of the passkeys: 0 is the start of the prompt


def constrain(table, factor):
    """Return the nearest legal table, float64 (pairs,).

    Factors lie from 1 to 1.5 times the factor on a grid of 0.01, and never fall.
    """
    table = np.clip(np.round(table, 2), 1.0, 1.5 * factor)
    return np.maximum.accumulate(table)


def initial_tables(base, rotary_dim, original_length, factor):
    """Return the tables of known methods, by name: the old frequencies over the new ones."""
    old, _ = METHODS["none"](base, rotary_dim, original_length, 1.0)
    tables = {}
    for name in ("pi", "ntk", "ntk-parts"):
        new, _ = METHODS[name](base, rotary_dim, original_length, factor)
        tables[name] = constrain((old / new).numpy(), factor)
    return tables


def evolve(start, fitness, factor, population, rounds, rng, report=None):
    """Find the table with the least fitness(table); return it and its fitness.

    start: a list of tables. rng: a numpy generator. report: called with a line after each round.
    Each table is judged once.
    """
    judged = {}

    def judge(table):
        key = tuple(table)
        if key not in judged:
            judged[key] = fitness(table)
        return judged[key]

    def mutate(table):
        changed = rng.random(len(table)) < 0.3
        changes = rng.uniform(0.7, 1.4, len(table))
        return constrain(table * np.where(changed, changes, 1.0), factor)

    def cross(a, b):
        return constrain(np.where(rng.random(len(a)) < 0.5, a, b), factor)

    generation = list(start)
    for i in range(population - len(start)):
        generation.append(mutate(start[i % len(start)]))
    for number in range(1, rounds + 1):
        parents = sorted(generation, key=judge)[: max(2, population // 2)]
        children = []
        while len(parents) + len(children) < population:
            a, b = (parents[i] for i in rng.choice(len(parents), 2, replace=False))
            children.append(mutate(a) if len(children) % 2 else cross(a, b))
        generation = parents + children
        if report:
            best = judge(parents[0])
            report(f"round {number} of {rounds}: {best:.4f} nats a digit, {len(judged)} tables")
    best = min(generation, key=judge)
    return best, judge(best)


def measure_passkeys(model, tokenizer, dtype, factor, method, options, trials, seed):
    """Extend a model by a method, and hide passkeys at the target length.

    Returns the fraction that is found and the nats per digit, means over DEPTHS.
    """
    # A second extension multiplies the factors and replaces the method.
    if model.config.extension:
        factor = 1.0
    model.extend(method, factor, **options)
    results = []
    for depth in DEPTHS:
        result = find_needle(
            model,
            tokenizer,
            model.config.block_size,
            depth,
            max(1, trials // len(DEPTHS)),
            seed,
            model.meta.get("bos"),
            dtype,
        )
        results.append(result)
    found, loss = np.mean(results, 0).tolist()
    return found, loss


def load(path):
    """Return a RoPE checkpoint, not extended, and its tokenizer. Raises UserError for others."""
    model = GPT.load(path)
    is_rope = isinstance(model.pos, RoPE)
    require(is_rope, f"{path} is --pos={model.config.pos}: give a checkpoint of --pos=rope")
    extended = model.config.extension
    require(not extended, f"{path} is extended already: give the checkpoint it was made from")
    tokenizer = data.tokenizer_from_json(model.meta.get("tokenizer"))
    require(
        tokenizer,
        f"{path} has no tokenizer to make prompts with: give a checkpoint that was trained on a "
        "text prepared by data/prepare.py",
    )
    return model, tokenizer


def main():
    args = cli.parse(
        cfg=SearchConfig,
        about=__doc__,
        paths="the run folder of a RoPE model, trained with --tasks=passkey:0.1",
    )
    cfg = args.cfg
    usage = "give one run folder, as in python experiments/search.py out/rope"
    require(len(args.paths) == 1, usage)
    load_entries(cfg.entry, POSITIONS)
    model, tokenizer = load(args.paths[0])
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    model.to(device)
    out = Path(cfg.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    # Search.
    test = functools.partial(measure_passkeys, model, tokenizer, dtype, cfg.factor)
    config = model.config
    start = initial_tables(
        config.rope_base,
        model.pos.rotary_dim,
        config.original_length,
        cfg.factor,
    )

    def fitness(table):
        _, loss = test("longrope", {"long_factor": table.tolist()}, cfg.trials, cfg.seed)
        return loss

    rng = np.random.default_rng(cfg.seed)
    report = functools.partial(print, flush=True)
    best, _ = evolve(
        list(start.values()),
        fitness,
        cfg.factor,
        cfg.population,
        cfg.rounds,
        rng,
        report,
    )

    # Compare with the methods, on new prompts.
    trials, seed = 4 * cfg.trials, cfg.seed + 1000
    print(f"at {config.block_size:,} tokens, on {trials} prompts that the search has not seen:")
    candidates = {name: (name, {}) for name in ("none", "pi", "ntk", "ntk-parts", "yarn")}
    candidates["searched"] = ("longrope", {"long_factor": best.tolist()})
    for name, (method, options) in candidates.items():
        found, loss = test(method, options, trials, seed)
        print(f"  {name:<10} {found:5.2f} found, {loss:.4f} nats a digit")
    write_json(out, {"long_factor": best.tolist()})
    command = f"python extend.py {shlex.quote(args.paths[0])} --method=longrope"
    command += f" --factor={cfg.factor:g} --options={shlex.quote(str(out))}"
    print(f"{out} is written: {command}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
