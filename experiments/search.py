"""Which factor should divide the frequency of each RoPE pair? (LongRoPE: Ding et al. 2024)

    python experiments/search.py out/rope --factor=4 --out=out/factors.json
    python extend.py out/rope --method=longrope --factor=4 --options=out/factors.json --max_iters=0

An evolutionary search from PI, NTK and NTK-by-parts. Four of its settings are LongRoPE's: factors
lie on a grid of 0.01, never fall from pair to pair, are mutated with probability 0.3, and the
better half of a generation stays. The others are its own: factors from 1 to 1.5 times --factor,
fewer tables and rounds, and no search for the first tokens that LongRoPE leaves unscaled. The
fitness is the loss of the digits of passkeys at the target length (LongRoPE2: Shang et al. 2025),
because the loss of a text hardly depends on distant text. So the run needs documents of
data/prepare.py --task=niah:1 among its data.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)
import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import data
from data.tasks import DIGITS, make_document, size_of
from model import GPT, POSITIONS, RoPE
from nanolong import devices, entry
from nanolong.errors import require, run_main
from nanolong.strict_json import write_json
from rope_scaling import METHODS


@dataclass
class SearchConfig:
    factor: float = 4.0  # how many times longer
    out: str = "out/factors.json"  # the file to write
    entry: tuple[str, ...] = ()  # Python files, each with the scheme that a checkpoint needs
    population: int = 16  # tables in a generation, at least 4
    rounds: int = 10  # generations
    trials: int = 32  # prompts that judge a table, a quarter at each of four depths
    seed: int = 1  # seed of the evolution and the prompts
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps


def constrain(table, factor):
    """Return the nearest table that is allowed, a tuple."""
    table = np.clip(np.round(table, 2), 1.0, 1.5 * factor)
    return tuple(np.maximum.accumulate(table).tolist())


def evolve(start, fitness, factor, population, rounds, rng):
    """Return the table with the least fitness(table); each is judged once."""
    fitness = functools.cache(fitness)

    def mutate(table):
        changed = rng.random(len(table)) < 0.3
        changes = rng.uniform(0.7, 1.4, len(table))
        return constrain(table * np.where(changed, changes, 1.0), factor)

    def cross(a, b):
        return constrain(np.where(rng.random(len(a)) < 0.5, a, b), factor)

    mutants = [mutate(start[i % len(start)]) for i in range(population - len(start))]
    generation = [*start, *mutants]
    for number in range(rounds):
        # the better half stays, and the rest are made from it
        parents = sorted(generation, key=fitness)[: population // 2]
        generation = list(parents)
        for i in range(population - len(parents)):
            a, b = (parents[i] for i in rng.choice(len(parents), 2, replace=False))
            generation.append(mutate(a) if i % 2 else cross(a, b))
        print(f"round {number + 1}: {fitness(parents[0]):.4f} nats a digit", flush=True)
    return min(generation, key=fitness)


@torch.no_grad()
def passkey_loss(model, factor, trials, seed, method, table=None):
    """Extend a model, and return its loss in nats per digit of hidden passkeys."""
    options = {"long_factor": list(table)} if table else {}
    # Start from the original model, because a second extension would lie on the first.
    model.config.block_size, model.config.extension = model.config.original_length, None
    model.extend(method, factor, **options)
    tokenizer = data.tokenizer_from_json(model.meta["tokenizer"])
    length = model.config.block_size
    digits = DIGITS[size_of(tokenizer)]
    losses = []
    for depth in (0.0, 0.25, 0.5, 0.9):  # 0 is the start of the prompt
        for sample in range(trials // 4):
            what = ("niah", tokenizer, length, seed, sample, model.meta.get("bos"))
            x, y = map(torch.from_numpy, make_document(*what, depth=depth))
            hidden_states = model.hidden_states(x[None].to(model.embed.weight.device))
            scored = y >= 0
            logits = model.head(hidden_states[0, scored])  # the others are not needed
            nats = F.cross_entropy(logits.cpu(), y[scored], reduction="sum").item()
            losses.append(nats / digits)
    return sum(losses) / len(losses)


def main(argv=None):
    args = settings.parse(cfg=SearchConfig, paths="the run folder", argv=argv)
    cfg = args.cfg
    require(len(args.paths) == 1, "give one run folder, such as out/rope")
    entry.load_entries(cfg.entry, POSITIONS)
    model = GPT.load(args.paths[0]).to(devices.pick_device(cfg.device))
    config = model.config
    is_known = (
        isinstance(model.scheme, RoPE) and not config.extension and model.meta.get("tokenizer")
    )
    require(is_known, f"{args.paths[0]} is no run of train.py --pos=rope on a text: give one")
    shape = (config.rope_base, model.scheme.rotary_dim, config.original_length, cfg.factor)
    # the first generation: the divisors of the methods that have none of their own
    plain, *known = (METHODS[m](*shape)[0] for m in ("none", "pi", "ntk", "ntk-parts"))
    start = [constrain((plain / inv_freq).numpy(), cfg.factor) for inv_freq in known]
    loss = functools.partial(passkey_loss, model, cfg.factor)
    fitness = functools.partial(loss, cfg.trials, cfg.seed, "longrope")
    rng = np.random.default_rng(cfg.seed)
    # search, and compare on new prompts
    best = evolve(start, fitness, cfg.factor, cfg.population, cfg.rounds, rng)
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(cfg.out), {"long_factor": best})
    print(f"wrote {cfg.out}; in nats a digit, on {4 * cfg.trials} prompts that are new:")
    for method in ("none", "pi", "ntk", "ntk-parts", "yarn", "longrope"):
        table = best if method == "longrope" else None
        print(f"  {method:<10} {loss(4 * cfg.trials, cfg.seed + 1000, method, table):.4f}")
    return 0


if __name__ == "__main__":
    run_main(main)
