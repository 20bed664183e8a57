"""Test claims about position and length that no other experiment tests.

    python experiments/papers/claims.py                   three seeds
    python experiments/papers/claims.py --seeds=2,3       some: two processes may share the seeds
    python experiments/papers/claims.py --parts=examples  only some parts
    python experiments/papers/claims.py --budget=try      seconds, a test without meaning

Stop at any time: the same command continues where it stopped, and one with all seeds and parts
collects what several processes have measured. It writes claims.md, .json and .png to --out_dir.
There are four parts:

1. examples: do more examples in a longer prompt help? Each sample has a secret digit for each of a
   few keys, and shows examples one after another: a key with its digit, or, in half of them, with a
   random one. Before each example the model predicts the secret digit of its key from those before
   it. Models are trained on n examples and tested on 4n. The most that can be expected is the digit
   that was shown most often with the key.
2. learned: interpolate learned embeddings to 4 times their length, and fine-tune them there.
3. attention: how alike the attention of a model without positions is to that of other schemes.
4. pairs: leave RoPE's faster, or its slower, half of the pairs unrotated in a finished model.

Parts 2 to 4 use the text models of reproduce.py: --runs=out/reproduce takes those that are there.
The report also judges, without training, what leaderboard.json and reproduce.json of results/ hold.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import copy
import math
import statistics
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

import data
from data.prepare import prepare
from experiments.attention_maps import compare, distances, mean_of
from experiments.papers.claims_report import write_report
from experiments.probe import sample_sequences
from experiments.report import command_line, count
from experiments.reproduce import FACTOR, SeedRun, extend
from model import GPT, ContextLengthWarning, GPTConfig
from nanolong import cli
from nanolong.attention_maps import attention_maps
from nanolong.devices import pick_device
from nanolong.optim import update_weights
from nanolong.provenance import provenance
from nanolong.validate import require

PARTS = ("examples", "learned", "attention", "pairs")
SEEDS = (1, 2, 3)


@dataclass
class ClaimsConfig:
    budget: Literal["cpu", "try"] = "cpu"  # sizes
    seeds: tuple[int, ...] = SEEDS  # which runs
    parts: tuple[Literal["examples", "learned", "attention", "pairs"], ...] = PARTS
    dataset: str = "python"  # text of the parts 2 to 4
    runs: str = "out/claims"  # folder for the models and the measurements
    out_dir: str = "out/claims"  # folder for the report
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products; part 1 is always in float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self):
        require(self.seeds, "seeds is empty: give numbers, as in --seeds=1,2,3")


# Part 1: examples in training and keys of a table; the size of the model and its training; samples
# of the test.
EXAMPLES = {
    "cpu": {
        "examples": 16,
        "keys": 4,
        "model": {"n_layer": 2, "n_head": 4, "n_embd": 64},
        "steps": 600,
        "tuning_steps": 60,
        "batch_size": 64,
        "samples": 256,
    },
    "try": {
        "examples": 12,
        "keys": 3,
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16},
        "steps": 4,
        "tuning_steps": 2,
        "batch_size": 8,
        "samples": 8,
    },
}
# Of the RoPE model. The last one is fine-tuned, too.
EXTENSIONS = ("none", "window", "lm-infinite", "self-extend", "yarn")

# -----------------------------------------------------------------------------
# Part 1: examples


def make_examples(n, keys, batch_size, seed):
    """Make samples of n examples each; return inputs and targets, int64 (B, 2n).

    An example is two tokens: a key, where its secret digit is the target, and the key with the
    digit that is shown, which is right in half of the cases and random in the others. Tokens 0 to 9
    are the digits, which are only targets; then come the keys, then each key with each digit.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(keys, (batch_size, n), generator=generator)
    digit_of = torch.randint(10, (batch_size, keys), generator=generator)
    secret = digit_of.gather(1, chosen)
    is_right = torch.rand((batch_size, n), generator=generator) < 0.5
    shown = torch.randint(10, (batch_size, n), generator=generator).where(~is_right, secret)
    inputs = torch.stack((10 + chosen, 10 + keys + 10 * chosen + shown), 2).flatten(1)
    targets = torch.full_like(inputs, -1)
    targets[:, 0::2] = secret
    return inputs, targets


def most_shown(inputs, targets, keys):
    """Return the accuracy of the digit most shown with the key before, by example: (n,).

    Of several that were shown equally often, one is guessed.
    """
    chosen, secret = inputs[:, 0::2], targets[:, 0::2]
    shown = (inputs[:, 1::2] - 10 - keys) % 10
    same_key = (chosen[:, :, None] == chosen[:, None]).tril(-1).float()  # (B, n, n)
    times_shown = same_key @ F.one_hot(shown, 10).float()  # (B, n, 10)
    is_most = (times_shown == times_shown.amax(-1, keepdim=True)).float()
    probability = is_most / is_most.sum(-1, keepdim=True)
    return probability.gather(-1, secret[..., None])[..., 0].mean(0)


def train_examples(model, run, n, batch_size, steps, learning_rate, first_seed):
    """Train a GPT in place; the rate rises over 50 steps and falls over the last fifth."""
    keys = EXAMPLES[run.cfg.budget]["keys"]
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
    model.train()
    for step in range(steps):
        rate = min(1, (step + 1) / 50, (steps - step) / (0.2 * steps))
        x, y = make_examples(n, keys, batch_size, first_seed + step)
        model(x.to(run.device), y.to(run.device)).backward()
        update_weights(model, [optimizer], learning_rate * rate)
    model.eval()


@torch.no_grad()
def example_accuracy(model, run, x, y):
    """Return the accuracy of the predicted digits by example: a list of 4n."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        predicted = torch.cat([model(part.to(run.device)).argmax(-1).cpu() for part in x.split(64)])
    return (predicted == y)[:, 0::2].float().mean(0).tolist()


def example_accuracies(run, pos):
    """Train a model and test it, of RoPE with every extension: name -> accuracies."""
    budget = EXAMPLES[run.cfg.budget]
    n, batch_size = budget["examples"], budget["batch_size"]
    torch.manual_seed(run.seed)
    vocab_size = 10 + 11 * budget["keys"]
    config = GPTConfig(pos=pos, **budget["model"], block_size=2 * n, vocab_size=vocab_size)
    model = GPT(config).to(run.device)
    seed = run.seed << 32
    train_examples(model, run, n, batch_size, budget["steps"], 3e-3, seed)
    x, y = make_examples(FACTOR * n, budget["keys"], budget["samples"], 1)
    if pos != "rope":
        model.extend("none", FACTOR)
        return {pos: example_accuracy(model, run, x, y)}

    accuracies = {"digit most shown": most_shown(x, y, budget["keys"]).tolist()}
    for name in EXTENSIONS:
        extended = copy.deepcopy(model)
        extend(extended, name)
        accuracies[f"rope, {name}"] = example_accuracy(extended, run, x, y)
    steps = budget["tuning_steps"]
    seed += budget["steps"]  # the samples of pretraining do not return
    train_examples(extended, run, FACTOR * n, batch_size // FACTOR, steps, 5e-4, seed)
    accuracies[f"rope, {name}, fine-tuned"] = example_accuracy(extended, run, x, y)
    return accuracies


# -----------------------------------------------------------------------------
# Parts 2 to 4: the text models of reproduce.py


def learned_losses(run):
    """Interpolate learned embeddings and fine-tune: name -> last-quarter loss at [L, 4L]."""

    def losses(model, *lengths):
        return [statistics.fmean(run.last_quarter_losses(model, length)) for length in lengths]

    model = run.text_model("learned")
    target = FACTOR * run.length
    found = {"untouched": losses(model, run.length)}
    model.extend("pi", FACTOR)
    steps = run.budget["tuning_steps"]
    batch_size = run.budget["batch_size"] // FACTOR
    for step in run.fine_tune(model, steps[-1], batch_size, target, 1e-3):
        if step in steps:
            found[f"interpolated, {count(step, 'step')}"] = losses(model, run.length, target)
    return found


def attention_records(run):
    """Compare the attention of each scheme with NoPE's: scheme -> its record."""
    nope = run.text_model("nope")
    records = {}
    for pos in ("nope", "t5", "alibi", "rope", "learned"):
        model = run.text_model(pos)
        heads = distances(model, run.dataset, pos, run.length, seed=run.seed)
        layers, _ = compare(nope, model, run.dataset, run.length, 32, run.seed, run.device)
        records[pos] = {
            "divergence": layers.mean().item(),
            "distance": mean_of(heads, "distance"),
            "histogram": mean_of(heads, "histogram"),
        }
    return records


def unrotated_records(run):
    """Leave half of RoPE's pairs unrotated: name -> the loss, and attention to the token before."""
    model = run.text_model()
    inv_freq = model.pos.inv_freq  # the fastest pair first
    half = len(inv_freq) // 2
    tokens, _ = sample_sequences(run.dataset.val, run.length, 32, run.seed)
    records = {}
    cases = {"none": slice(0), "faster": slice(half), "slower": slice(half, None)}
    for name, pairs in cases.items():
        model.pos.inv_freq = inv_freq.clone()
        model.pos.inv_freq[pairs] = 0
        maps = torch.stack(attention_maps(model, tokens))  # (layers, B, H, T, T)
        before = maps.diagonal(-1, -2, -1).mean((1, 3))  # (layers, H)
        records[name] = {
            "loss": statistics.fmean(run.last_quarter_losses(model, run.length)),
            "before": before.max().item(),
        }
    return records


# -----------------------------------------------------------------------------
# The command line


def measure(run, parts):
    """Measure the parts of one seed; return them by name."""
    found = {}
    if "examples" in parts:
        found["examples"] = {}
        steps = EXAMPLES[run.cfg.budget]["steps"]
        for pos in ("rope", "nope", "alibi"):
            name = f"examples {pos}, {count(steps, 'step')}"
            found["examples"] |= run.measure(name, example_accuracies, run, pos)
    if "learned" in parts:
        found["learned"] = run.measure("learned, interpolated", learned_losses, run)
    if "attention" in parts:
        found["attention"] = run.measure("attention", attention_records, run)
    if "pairs" in parts:
        found["pairs"] = run.measure("unrotated pairs", unrotated_records, run)
    return found


def main():
    cfg, *_ = cli.parse(ClaimsConfig, about=__doc__)
    if cfg.dataset == "python" and not data.dataset_exists("python"):
        prepare("python")
    dataset = data.Dataset(cfg.dataset)
    runs = [SeedRun(cfg, seed, dataset) for seed in dict.fromkeys(cfg.seeds)]
    found = {str(run.seed): measure(run, cfg.parts) for run in runs}
    seconds = sum(run.measured["seconds"] for run in runs)
    commits = [commit for run in runs for commit in run.commits()]
    board = {
        "command": command_line("experiments/papers/claims.py"),
        "note": (
            f"{provenance(pick_device(cfg.device), commits)}; {cfg.dataset} {dataset.hash}; "
            f"{count(len(runs), 'seed')}; scored: {runs[0].budget['max_tokens']:,} tokens, spread "
            f"over the validation text; {count(math.ceil(seconds / 60), 'minute')} of training and "
            "measuring in all"
        ),
        "examples": EXAMPLES[cfg.budget],
        "text_models": runs[0].budget,
        "seeds": found,  # by their numbers
    }
    write_report(board, Path(cfg.out_dir))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
