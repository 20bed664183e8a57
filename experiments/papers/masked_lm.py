"""Masked language modelling: what position schemes are worth when attention is not causal.

    python experiments/papers/masked_lm.py                  four schemes, three seeds, both masks
    python experiments/papers/masked_lm.py --pos=nope,rope  only some; any scheme of model.py
    python experiments/papers/masked_lm.py --objectives=masked  half of the runs
    python experiments/papers/masked_lm.py --budget=gpu     a larger model on longer text

The default is 24 runs of some minutes each. Stop at any time: the same command continues after the
last finished run. Each run leaves its measurements in out/masked_lm; the results go to
masked_lm.md and .json in --out_dir, by default the same folder.

A causal model without positions can count how many tokens it sees. Without the causal mask nothing
is left to count: its input is a bag of tokens, and every masked token of a sequence gets the same
prediction (Haviv et al. 2022). Each scheme is trained twice, on the same sequences in the same
order: to predict the next token; and to predict the 15 % of the tokens that are replaced by a mask
token, chosen again for every sequence. Only these are scored. Attention then sees every token
(causal=False). Schemes that act by distance see |i - j|, so that left and right look alike to them,
apart from <bos>, which starts each sequence of bytes and is never masked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import contextlib
import functools
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch

import kernels
from experiments.report import (
    RULE,
    TextExperiment,
    by_seed,
    claim_lines,
    count,
    count_parameters,
    format_interval,
    format_settings,
    make_main,
    markdown_table,
    measure_run,
    paired_claim,
    run_all,
    section,
    title,
    train_step,
)
from model import GPT, GPTConfig
from nanolong import cli
from nanolong.devices import autocast, prepare_device
from nanolong.errors import UserError
from nanolong.optim import get_lr, make_optimizers
from nanolong.plots import unique
from train import TrainConfig


@dataclass
class MaskedConfig(TextExperiment):
    pos: tuple[str, ...] = ("nope", "learned", "sinusoidal", "alibi")  # position schemes
    # what the models learn to predict
    objectives: tuple[Literal["causal", "masked"], ...] = ("causal", "masked")
    # cpu: 0.5 M parameters, 64 tokens; gpu: 25 M, 256 tokens; try: seconds, a test
    budget: Literal["cpu", "gpu", "try"] = "cpu"
    seeds: int = 3  # runs of each scheme and objective
    steps: int = 0  # training steps of a run; 0: as the budget says
    max_tokens: int = 65536  # tokens of the validation sequences that are scored
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of matrix products


# Settings of model and training, the same for all schemes and both objectives.
BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96, "block_size": 64},
        "training": {
            "batch_size": 64,
            "max_iters": 1500,
            "learning_rate": 3e-3,
            "warmup_iters": 50,
        },
    },
    "gpu": {
        "model": {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 256},
        "training": {
            "batch_size": 64,
            "max_iters": 8000,
            "learning_rate": 1e-3,
            "warmup_iters": 400,
        },
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16},
        "training": {"batch_size": 8, "max_iters": 20, "learning_rate": 3e-3, "warmup_iters": 2},
    },
}
MASKED_FRACTION = 0.15


# -----------------------------------------------------------------------------
# The masked objective


@contextlib.contextmanager
def bidirectional():
    """Within this context every token attends to all others.

    The schemes call kernels.attention, which is wrapped. Run the forward and the backward pass
    inside. Other threads would be affected, too.
    """
    causal = kernels.attention
    kernels.attention = functools.partial(causal, causal=False)
    try:
        yield
    finally:
        kernels.attention = causal


def attention_of(objective):
    """Return the context in which models of this objective compute."""
    return bidirectional() if objective == "masked" else contextlib.nullcontext()


def mask_tokens(tokens, mask_id, bos, seed):
    """Replace a random MASKED_FRACTION of tokens (B, T) by the mask token, but never a <bos>.

    Returns inputs, and targets: the replaced tokens, and -1 elsewhere.
    """
    noise = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
    masked = noise < MASKED_FRACTION
    if bos is not None:
        masked &= tokens != bos
    return tokens.masked_fill(masked, mask_id), tokens.masked_fill(~masked, -1)


def make_examples(objective, x, y, dataset, seed):
    """Turn inputs and targets of a batch, numpy (B, T), into those of an objective, int64."""
    x = torch.from_numpy(x)
    y = torch.from_numpy(y)
    if objective == "causal":
        return x, y
    mask_id = dataset.vocab_size  # the first id after the vocabulary
    return mask_tokens(x, mask_id, dataset.bos, seed)


# -----------------------------------------------------------------------------
# A run: train and evaluate


def train(model, objective, dataset, cfg, device, dtype):
    """Train a GPT in place, by a TrainConfig and one batch a step."""
    prepare_device(device)
    model.to(device).train()
    optimizers = make_optimizers(model, cfg)
    for step in range(cfg.max_iters):
        x, y, *_ = dataset.batch(step, cfg.batch_size, model.config.block_size, cfg.seed)
        x, y = make_examples(objective, x, y, dataset, (cfg.seed << 40) + step)
        with attention_of(objective):
            rate = get_lr(cfg, step)
            train_step(model, (x, y), (device, dtype), optimizers, rate, cfg.grad_clip)
    model.eval()


def validation_batches(objective, dataset, length, max_tokens, batch_size=64):
    """Yield the examples that are scored, batch by batch: the same in every run.

    They are sequences that are evenly spaced over the validation text.
    """
    dataset.val.require_length(length)
    available = int(dataset.val.n_sequences(length).sum())
    n = min(available, max(1, max_tokens // length))
    for start in range(0, n, batch_size):
        indices = [i * available // n for i in range(start, min(n, start + batch_size))]
        pairs = [dataset.val.sequence(i, length) for i in indices]
        x, y = map(np.stack, zip(*pairs, strict=True))
        yield make_examples(objective, x, y, dataset, seed=start)


@torch.no_grad()
def evaluate(model, objective, dataset, max_tokens, device, dtype):
    """Return the mean loss in nats per scored token, and the number of scored tokens."""
    loss_sum = 0
    tokens = 0
    length = model.config.block_size
    for x, y in validation_batches(objective, dataset, length, max_tokens):
        with attention_of(objective), autocast(device, dtype):
            loss_sum += model(x.to(device), y.to(device), reduction="sum").item()
        tokens += int((y >= 0).sum())
    return loss_sum / tokens, tokens


def unigram_loss(objective, dataset, length, max_tokens):
    """Return the loss of a model that knows only how often each token occurs in training."""
    counts = 1.0  # add-one smoothing
    for tokens in dataset.train.tokens:
        counts = counts + np.bincount(tokens, minlength=dataset.vocab_size)
    losses = torch.from_numpy(-np.log(counts / counts.sum()))
    batches = validation_batches(objective, dataset, length, max_tokens)
    return torch.cat([losses[y[y >= 0]] for _, y in batches]).mean().item()


def run_objective(pos, objective, seed, cfg, dataset):
    """Train and evaluate one run, or read what it has left in its file: a list of one record."""
    budget = BUDGETS[cfg.budget]
    training = dict(budget["training"])
    if cfg.steps:
        training["max_iters"] = cfg.steps
    train_config = TrainConfig(seed=seed, **training)
    config = GPTConfig(pos=pos, **budget["model"], vocab_size=dataset.vocab_size + 1)
    key = {
        "model": asdict(config),
        "training": asdict(train_config),
        "data": dataset.hash,
        "max_tokens": cfg.max_tokens,
        "masked_fraction": MASKED_FRACTION,
    }

    def train_and_evaluate():
        device, dtype = cfg.pick_device()
        if dtype == torch.float16:  # which would need loss scaling
            dtype = torch.float32
        torch.manual_seed(seed)
        model = GPT(config)
        train(model, objective, dataset, train_config, device, dtype)
        loss, tokens = evaluate(model, objective, dataset, cfg.max_tokens, device, dtype)
        if not math.isfinite(loss):
            raise UserError(
                f"{objective} with --pos={pos}, seed {seed}: the loss is not finite: "
                "try --dtype=float32, or another number of --steps"
            )
        print(f"   {loss:.3f} nats per token")
        return {"pos": pos, "objective": objective, "seed": seed, "loss": loss, "tokens": tokens}

    file = cfg.run_folder() / f"{pos}-{objective}-{seed}.json"
    return [measure_run(file, key, train_and_evaluate)]


# -----------------------------------------------------------------------------
# The results


def loss_table(records, schemes, unigram):
    """Return a Markdown table: a line per scheme, nats and perplexity of each objective.

    unigram: objective -> unigram_loss().
    """
    header = [""]
    for objective in unigram:
        header += [f"{objective}, nats", f"{objective}, perplexity"]
    rows = []
    for pos in schemes:
        row = [pos]
        for objective in unigram:
            losses = by_seed(records, "loss", pos=pos, objective=objective).values()
            row.append(format_interval(losses))
            row.append(format_interval([math.exp(loss) for loss in losses], digits=2))
        rows.append(row)
    row = ["token frequencies only"]
    for objective in unigram:
        row += [f"{unigram[objective]:.3f}", f"{math.exp(unigram[objective]):.2f}"]
    return markdown_table(header, [*rows, row])


def judge(records, schemes):
    """Return the claims of Haviv et al. (2022), paired by seed.

    Masked, NoPE's perplexity is more than twice that of every other scheme.
    """
    claims = []
    nope = by_seed(records, "loss", pos="nope", objective="masked")
    for pos in schemes:
        if pos != "nope":
            other = by_seed(records, "loss", pos=pos, objective="masked")
            text = f"masked: nope's perplexity is more than twice {pos}'s, in nats"
            claims.append(paired_claim(text, nope, other, above=math.log(2)))
    return [claim for claim in claims if claim]


def describe_runs(cfg, dataset):
    """Return the paragraph that says what was trained and what the table shows."""
    budget = BUDGETS[cfg.budget]
    parameters = count_parameters({"pos": "nope", **budget["model"]}, dataset.vocab_size + 1)
    model = format_settings(budget["model"])
    tokens = budget["training"]["batch_size"] * budget["model"]["block_size"]
    return (
        f"Each run has {parameters / 1e6:.2f} M parameters, without those of the scheme ({model}), "
        f"and trains for {cfg.steps or budget['training']['max_iters']:,} steps of {tokens:,} "
        "tokens with AdamW, on the same sequences for all. Nats and perplexity per scored token of "
        "held-out text: the mean over the seeds and its 95 % interval. Causal and masked losses "
        "answer different questions: compare within a column. The paper, masked, perplexity of "
        "subword tokens: nope 147.18, learned 4.06, sinusoidal 4.07, alibi 4.00."
    )


def measure(cfg):
    dataset = cfg.load_dataset()
    length = BUDGETS[cfg.budget]["model"]["block_size"]
    dataset.train.require_length(length)
    unigram = {}
    for objective in cfg.objectives:
        unigram[objective] = unigram_loss(objective, dataset, length, cfg.max_tokens)
    seeds = range(1, cfg.seeds + 1)
    runs = [(pos, task, seed) for seed in seeds for pos in cfg.pos for task in cfg.objectives]
    records = run_all(runs, run_objective, cfg, dataset)
    scored = {record["objective"]: record["tokens"] for record in records}
    scored = [f"{tokens:,} {objective}" for objective, tokens in scored.items()]
    return {
        "note": (
            f"{cfg.note(dataset)}, tokens scored: {' and '.join(scored)}, "
            f"{count(cfg.seeds, 'seed')}"
        ),
        "about": describe_runs(cfg, dataset),
        "orderings": [str(claim) for claim in judge(records, cfg.pos)],
        "unigram_loss": unigram,
        "records": records,
    }


def report(board):
    schemes = unique(board["records"], "pos")
    table = loss_table(board["records"], schemes, board["unigram_loss"])
    lines = [*title(board, "Causal and masked language models"), "", board["about"], "", *table]
    claims = judge(board["records"], schemes)
    if claims:
        rule = f"Differences are paired by seed. {RULE}"
        lines += section("Orderings", rule, claim_lines(claims))
    return lines


main = make_main(MaskedConfig, measure, report)

if __name__ == "__main__":
    cli.run_main(main)
