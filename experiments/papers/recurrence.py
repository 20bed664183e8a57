"""Train with Transformer-XL's segment-level recurrence (Dai et al. 2019), and without it.

    python experiments/papers/recurrence.py               seven schemes, three seeds
    python experiments/papers/recurrence.py --seeds=1     some seeds: processes can share the work,
                                                          and a call with all collects it
    python experiments/papers/recurrence.py --budget=try  all of it in tiny: a test

Each scheme is trained on the same tokens in three modes. `shuffled`: segments of text in random
order. `streams`: each row of a batch goes on where it ended in the batch before. `memory-1`: the
same, and every layer attends also to its inputs in the segment before (segment_memory.py). xl, shaw
and rope are trained with memories of 2, 4 and 8 segments, too. All models are evaluated on the same
tokens, with memories of several lengths, also longer ones than in training.

Stop at any time: the same command continues where it stopped, with the same bits. The results go to
recurrence.md, .json and .png in --out_dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Literal

import torch

import data
from data.prepare import prepare
from experiments.papers.recurrence_report import write_report
from experiments.papers.recurrence_runs import Run
from experiments.papers.segment_memory import RecurrentGPT, check_memory, generate
from experiments.report import command_line, count
from model import GPTConfig
from nanolong import cli
from nanolong.devices import pick_device
from nanolong.provenance import provenance
from nanolong.strict_json import write_json
from nanolong.validate import require

# Settings of model, training and evaluation, the same for all runs.
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96},
        "segment": 64,  # tokens
        "training": {
            # streams; half of the leaderboard's, which makes more steps of the same tokens
            "batch_size": 32,
            "max_iters": 260,
            "learning_rate": 3e-3,
            "warmup_iters": 20,
            "eval_interval": 100,  # steps between checkpoints
        },
        "evaluated": (0, 1, 2, 4, 8, 16),  # lengths of the memory, in segments
        "val_streams": 32,
        "val_segments": 8,  # of each stream, that are scored
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "segment": 16,
        "training": {
            "batch_size": 8,
            "max_iters": 10,
            "learning_rate": 3e-3,
            "warmup_iters": 2,
            "eval_interval": 5,
        },
        "evaluated": (0, 1, 2, 4, 8),
        "val_streams": 4,
        "val_segments": 4,
    },
}
WITH_LONG_MEMORIES = ("xl", "shaw", "rope")
MIN_STEPS_TO_JUDGE = 50  # of the predictions of the paper
FRACTIONS = (0.1, 0.5, 1.0)  # of the tokens, the hardest ones, for relative contexts
MIN_GAIN = 0.01  # the threshold of Dai et al. (2019)


@dataclass
class RecurrenceConfig:
    # position schemes: any but learned and sinusoidal
    schemes: tuple[str, ...] = ("xl", "alibi", "t5", "kerple", "shaw", "nezha", "rope")
    # lengths of the memory in training, in segments; above 1 for xl, shaw and rope only
    memories: tuple[int, ...] = (1, 2, 4, 8)
    seeds: tuple[int, ...] = (1, 2, 3)  # a run for each
    # cpu: 0.5 M parameters, segments of 64 tokens; try: a test of a minute
    budget: Literal["cpu", "try"] = "cpu"
    steps: int = 0  # training steps of a run; 0: as the budget says
    batch_size: int | None = None  # streams in a batch; auto: as the budget says
    segment: int = 0  # tokens of a segment; 0: as the budget says
    train_tokens: int = 0  # tokens of text to train on; 0: as many as the streams can hold
    dataset: str = "python"  # text for training and evaluation
    sample: str = "def __init__(self"  # prompt of the text that the report shows
    runs: str = "out/recurrence"  # folder for the run folders
    out_dir: str = "out/recurrence"  # folder for recurrence.md, .json and .png
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps

    def __post_init__(self):
        for name in ("schemes", "seeds"):
            require(getattr(self, name), f"{name} is empty: leave it out for all")
        for name in ("steps", "segment", "train_tokens"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value} is negative: leave it out for the usual one")
        require(min(self.seeds) >= 0, f"seed {min(self.seeds)} is negative: give 0 or more")
        evaluated = BUDGETS[self.budget]["evaluated"]
        for n_segments in self.memories:
            require(
                n_segments >= 1, f"a memory of {n_segments} segments holds nothing: give 1 or more"
            )
            require(
                n_segments in evaluated,
                f"no memory of {n_segments} segments is evaluated: choose from "
                f"{', '.join(map(str, evaluated[1:]))}",
            )
        for pos in self.schemes:
            check_memory(GPTConfig(pos=pos), 1)


def list_runs(cfg, dataset):
    """Return the runs, those of a seed together."""
    budget = BUDGETS[cfg.budget]
    runs = []
    for seed in dict.fromkeys(cfg.seeds):
        for pos in dict.fromkeys(cfg.schemes):
            modes = ["shuffled", "streams"]
            for n_segments in dict.fromkeys(cfg.memories):
                if n_segments == 1 or pos in WITH_LONG_MEMORIES:
                    modes.append(f"memory-{n_segments}")
            runs += [Run(cfg, budget, dataset, pos, mode, seed) for mode in modes]
    return runs


def measure(runs, device):
    """Measure all runs; return their records."""
    records = []
    for number, run in enumerate(runs, 1):
        record = run.measure(device)
        own = record["losses"][record["evaluated"].index(run.n_memory)]
        print(
            f"{run.name} ({number} of {len(runs)}): {own:.3f} nats per token with its own memory; "
            f"{record['training_seconds']:.0f} s of training, {record['seconds']:.0f} s in all",
            flush=True,
        )
        records.append(record)
    return records


def relative_contexts(losses, lengths):
    """Compute the relative effective context length (RECL) of every model of a group.

    losses: name -> (lengths, N) losses of N tokens, nan where there is none, one row for each of
    `lengths`. Returns name -> {fraction: length}.

    Dai et al. (2019): the baseline b(c, t) is the lowest loss at token t of all models with the
    context c. A model's relative loss with c' > c is the mean over t of min(b(c, t), its loss with
    c'), over the fraction r of the tokens whose b(c, t) is highest. While the relative gain, 1 -
    exp(relative loss - mean b(c, t)), is at least 1 %, the context is lengthened by a step; the
    RECL is the length that it ends at. The steps here are those of `lengths`, memories in segments,
    where the paper has a constant number of tokens.
    """
    scored = torch.stack([x.isfinite().all(0) for x in losses.values()]).all(0)
    losses = {name: x[:, scored].double() for name, x in losses.items()}
    baseline = torch.stack(list(losses.values())).amin(0)  # (lengths, scored tokens)
    results = {name: {} for name in losses}
    for fraction in FRACTIONS:
        n_hard = max(1, int(fraction * baseline.shape[1]))
        for name, own in losses.items():
            i = 0
            while i + 1 < len(lengths):
                hard_losses, hardest = baseline[i].topk(n_hard)
                relative = torch.minimum(hard_losses, own[i + 1, hardest])
                if 1 - (relative.mean() - hard_losses.mean()).exp() < MIN_GAIN:
                    break
                i += 1
            results[name][fraction] = lengths[i]
    return results


def measure_contexts(runs, evaluated):
    """Compute the relative effective context lengths, the models of a seed being a group."""
    contexts = []
    for seed in dict.fromkeys(run.seed for run in runs):
        group = [run for run in runs if run.seed == seed and run.mode in ("streams", "memory-1")]
        losses = {run.name: run.token_losses().flatten(1) for run in group}
        if not losses:
            continue
        lengths = relative_contexts(losses, evaluated)
        for run in group:
            for fraction, length in lengths[run.name].items():
                record = {"pos": run.pos, "mode": run.mode, "seed": seed}
                contexts.append({**record, "fraction": fraction, "segments": length})
    return contexts


def make_sample(runs, prompt, device):
    """Continue a prompt with a trained memory: the name of the model and the text; or None."""
    with_memory = [run for run in runs if run.n_memory]
    tokenizer = runs[0].dataset.tokenizer
    if not with_memory or tokenizer is None or not prompt:
        return None
    run = with_memory[0]
    model = RecurrentGPT.load(run.folder).to(device)
    tokens = data.encode_prompt(tokenizer, run.dataset.bos, prompt)
    generator = torch.Generator(device).manual_seed(run.seed)
    new_tokens = generate(
        model,
        torch.tensor([tokens]),
        max_new_tokens=3 * run.segment,
        capacity=run.n_memory * run.segment,
        segment=run.segment,
        temperature=0.8,
        top_k=40,
        generator=generator,
    )
    text = tokenizer.decode(new_tokens[0].tolist()).decode("utf-8", "replace")
    return {"name": run.name, "text": prompt + text}


def main():
    cfg, *_ = cli.parse(RecurrenceConfig, about=__doc__)
    if cfg.dataset in ("python", "shakespeare") and not data.dataset_exists(cfg.dataset):
        prepare(cfg.dataset)
    dataset = data.Dataset(cfg.dataset)
    runs = list_runs(cfg, dataset)
    device = pick_device(cfg.device)
    records = measure(runs, device)

    evaluated = BUDGETS[cfg.budget]["evaluated"]
    steps = runs[0].training.max_iters
    commits = [record["commit"] for record in records]
    board = {
        "command": command_line("experiments/papers/recurrence.py"),
        "note": (
            f"{provenance(device, commits)}; {cfg.dataset} {dataset.hash}, "
            f"{records[0]['scored']:,} tokens scored, {count(len(set(cfg.seeds)), 'seed')}"
        ),
        "model": BUDGETS[cfg.budget]["model"],
        "segment": runs[0].segment,
        "batch_size": runs[0].training.batch_size,
        "steps": steps,
        "judged": steps >= MIN_STEPS_TO_JUDGE,
        "evaluated": evaluated,
        "records": records,
        "contexts": measure_contexts(runs, evaluated),
        "sample": make_sample(runs, cfg.sample, device),
    }
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_json(out_dir / "recurrence.json", board, indent=1)
    write_report(board, out_dir)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
