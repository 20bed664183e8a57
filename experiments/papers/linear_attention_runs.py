"""The runs of linear_attention.py: train, evaluate, extend and time its models."""

import copy
import json
import statistics
import time
from pathlib import Path

import torch

import data
from data.prepare import prepare
from evaluate import EvaluateConfig, evaluation_mode, loss_by_position, measure_losses
from experiments.leaderboard import identify, synchronize
from experiments.papers import linear_attention
from experiments.papers.linear_attention import LinearAttention, running_dot
from experiments.papers.masked_lm import unigram_loss
from experiments.report import command_line, count, load_finished_run, read_json
from model import GPT, POSITIONS, GPTConfig
from nanolong.devices import autocast, pick_device, pick_dtype
from nanolong.entry import hash_code, load_entry
from nanolong.errors import UserError
from nanolong.provenance import current_commit, provenance
from nanolong.strict_json import write_json
from rope_scaling import METHODS
from train import TrainConfig, train

BUDGETS = {
    "cpu": {
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 96, "block_size": 64},
        "training": {"batch_size": 64, "max_iters": 700, "warmup_iters": 50},
    },
    "try": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16},
        "training": {"batch_size": 8, "max_iters": 20, "warmup_iters": 2},
    },
}
FACTORS = (1, 2, 4, 8)  # the evaluated lengths, in training lengths
EXTENSION = 4  # factor of the context extension
TIMED_FACTORS = (1, 8, 32)  # the lengths at which a training step is timed


class BothRotated(LinearAttention):
    """Linear attention whose denominator is rotated, too."""

    rotate_denominator = True


def model_settings(names):
    """Return the models of the experiment: name -> settings of GPTConfig. names: the schemes."""
    load_entry(linear_attention.__file__, POSITIONS)
    POSITIONS["linear_attention_both"] = BothRotated
    models = {f"softmax {pos}": {"pos": pos} for pos in names}
    if "nope" in names:
        models["linear nope"] = {"pos": "linear_attention", "rope_fraction": 0.0}
    if "rope" in names:
        models["linear rope"] = {"pos": "linear_attention"}
        models["linear rope, both rotated"] = {"pos": "linear_attention_both"}
    return models


# -----------------------------------------------------------------------------
# Denominators


class Denominators:
    """What the denominators of a model are, and what they are or would be when rotated."""

    def __init__(self):
        self.ranges = {}

    @torch.no_grad()
    def __call__(self, features, rotated):
        for kind, pair in (("unrotated", features), ("rotated", rotated)):
            denominator, _ = running_dot(*pair)
            denominator = denominator[denominator.isfinite()]
            if not denominator.numel():
                continue
            seen = {
                "smallest": denominator.min().item(),
                "closest": denominator.abs().min().item(),  # to zero
                "negative": int((denominator < 0).sum()),
                "number": denominator.numel(),
            }
            self.ranges[kind] = merge_ranges([self.ranges.get(kind, seen | NOTHING), seen])


NOTHING = {"negative": 0, "number": 0}


def merge_ranges(ranges):
    """Return the range of several: smallest, closest to zero, and how many were negative."""
    return {
        "smallest": min(seen["smallest"] for seen in ranges),
        "closest": min(seen["closest"] for seen in ranges),
        "negative": sum(seen["negative"] for seen in ranges),
        "number": sum(seen["number"] for seen in ranges),
    }


def measure_denominators(model, dataset, when):
    """Return records of the denominators on at most 16 validation sequences of each length."""
    records = []
    for factor in (FACTORS[0], FACTORS[-1]):
        length = factor * model.config.original_length
        dataset.val.require_length(length)
        n = min(16, int(dataset.val.n_sequences(length).sum()))
        x = [dataset.val.sequence(i, length)[0] for i in range(n)]
        model.pos.observe = Denominators()
        with evaluation_mode(model, torch.float32) as device:
            model(torch.stack([torch.from_numpy(row) for row in x]).to(device))
        records.append({"when": when, "length": length, **model.pos.observe.ranges})
        del model.pos.observe
    return records


# -----------------------------------------------------------------------------
# A run


def train_run(model, train_config, dataset):
    """Train a new model. Returns what is recorded: its losses by step, and its denominators."""
    record = {"denominators": []}
    is_linear = hasattr(model.pos, "observe")
    if is_linear:
        model.to(pick_device(train_config.device))
        record["denominators"] += measure_denominators(model, dataset, "untrained")
        seen = model.pos.observe = Denominators()
    try:
        if train(model, train_config)["stopped"]:
            raise KeyboardInterrupt
    except FloatingPointError as error:
        record["diverged"] = str(error).partition(":")[0]
    log = (Path(train_config.out_dir) / "log.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in log.splitlines()]
    record["training_losses"] = [round(step["loss"], 4) for step in steps if "loss" in step]
    if is_linear:
        del model.pos.observe
        length = model.config.block_size
        record["denominators"].append({"when": "in training", "length": length, **seen.ranges})
        record["denominators"] += measure_denominators(model, dataset, "trained")
    return record


def score(model, cfg, lengths, protocols, max_tokens):
    """Return records of the loss at each length by each protocol, or of why it is refused."""
    evaluate_config = EvaluateConfig(
        dataset=cfg.dataset, max_tokens=max_tokens, dtype=cfg.dtype, protocol=protocols
    )
    kept = ("protocol", "length", "loss", "refused")
    records = measure_losses({"": model}, evaluate_config, lengths)
    return [{key: record[key] for key in kept if key in record} for record in records]


def score_extensions(model, cfg):
    """Extend the model by every method, without fine-tuning, and score it at the target."""
    records = []
    target = EXTENSION * model.config.block_size
    for method in METHODS:
        options = {}
        if method == "longrope":  # which has no table of its own
            options["long_factor"] = [float(EXTENSION)] * len(model.pos.inv_freq)
        extended = copy.deepcopy(model)
        try:
            extended.extend(method, EXTENSION, **options)
        except UserError as error:
            records.append({"method": method, "refused": str(error)})
            continue
        scored = score(extended, cfg, [target], ("last-quarter",), cfg.max_tokens // 2)
        records.append({"method": method, **scored[0]})
    return records


def run_model(name, settings, seed, cfg, dataset, folder):
    """Train and evaluate one run, or read what it has left in its file: its record."""
    budget = BUDGETS[cfg.budget]
    config = GPTConfig(**budget["model"], **settings, vocab_size=dataset.vocab_size)
    train_config = TrainConfig(
        dataset=cfg.dataset,
        seed=seed,
        learning_rate=3e-3,
        eval_interval=10**9,
        eval_iters=8,
        log_interval=1,
        compile=False,
        device=cfg.device,
        dtype=cfg.dtype,
        **budget["training"],
    )
    torch.manual_seed(seed)
    model = GPT(config)
    identity = identify(model, train_config, dataset)
    key = {
        **identity,
        "max_tokens": cfg.max_tokens,
        "experiment": hash_code([run_model, loss_by_position]),
    }
    run = folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    file = run.with_suffix(".json")
    finished = load_finished_run(file, key)
    if finished:
        print(f"taken from {file}")
        return finished["record"]

    start = time.perf_counter()
    train_config.out_dir = str(run)
    train_config.overwrite = True  # of a run that was stopped: the whole of it is observed
    record = {"model": name, "seed": seed, "commit": current_commit()}
    record |= train_run(model, train_config, dataset)
    record["training_seconds"] = round(time.perf_counter() - start)
    model.meta["bos"] = dataset.bos  # a model that was not loaded does not know it
    lengths = [factor * config.block_size for factor in FACTORS]
    record["losses"] = score(model, cfg, lengths, ("chunked", "last-quarter"), cfg.max_tokens)
    if name in ("softmax rope", "linear rope"):
        record["extensions"] = score_extensions(model, cfg)
    record["seconds"] = round(time.perf_counter() - start)
    write_json(file, {"key": key, "record": record})
    return read_json(file)["record"]  # a loss that is not finite is None


# -----------------------------------------------------------------------------
# Time


def time_steps(models, cfg, dataset, rounds=7):
    """Time forward and backward passes at several lengths, all models in turn in every round.

    Returns records of the median milliseconds, and of the median ratio to the first model.
    """
    budget = BUDGETS[cfg.budget]
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    tokens = budget["training"]["batch_size"] * budget["model"]["block_size"]
    made = {}
    for name, settings in models.items():
        config = GPTConfig(**budget["model"], **settings, vocab_size=dataset.vocab_size)
        config.block_size *= TIMED_FACTORS[-1]
        made[name] = GPT(config).to(device)
    records = []
    for factor in TIMED_FACTORS:
        length = factor * budget["model"]["block_size"]
        tokens_x = torch.randint(0, 256, (max(1, tokens // length), length), device=device)
        times = {name: [] for name in made}
        for _ in range(rounds + 1):
            for name, model in made.items():
                synchronize(device)
                start = time.perf_counter()
                with autocast(device, dtype):
                    loss = model(tokens_x, tokens_x)
                loss.backward()
                model.zero_grad()
                synchronize(device)
                times[name].append(1000 * (time.perf_counter() - start))
        baseline = next(iter(times.values()))[1:]  # the first round is a warm-up
        for name, milliseconds in times.items():
            ratios = [a / b for a, b in zip(milliseconds[1:], baseline, strict=True)]
            record = {"model": name, "length": length, "ratio": statistics.median(ratios)}
            record["milliseconds"] = statistics.median(milliseconds[1:])
            records.append(record)
    return records


def measure(cfg):
    """Run all models with all seeds: what linear_attention.json holds and the report needs."""
    models = model_settings(cfg.pos)
    if cfg.dataset in ("python", "shakespeare") and not data.dataset_exists(cfg.dataset):
        prepare(cfg.dataset)
    dataset = data.Dataset(cfg.dataset)
    budget = BUDGETS[cfg.budget]
    length = budget["model"]["block_size"]
    folder = Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset).name}"
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for seed in dict.fromkeys(cfg.seeds):
        for name, settings in models.items():
            print(f"\n== {name}, seed {seed}", flush=True)
            records.append(run_model(name, settings, seed, cfg, dataset, folder))
    timed = {name: models[name] for name in models if "both" not in name}
    config = GPTConfig(**budget["model"], pos="nope", vocab_size=dataset.vocab_size)
    note = (
        f"{provenance(pick_device(cfg.device), [record['commit'] for record in records])}; "
        f"{cfg.dataset} {dataset.hash}, {cfg.max_tokens:,} tokens scored, spread over the "
        "validation text, "
        f"{count(len(set(cfg.seeds)), 'seed')}"
    )
    return {
        "command": command_line("experiments/papers/linear_attention.py"),
        "note": note,
        "model": budget["model"],
        "training": budget["training"],
        "parameters": sum(p.numel() for p in GPT(config).parameters()),
        "unigram_loss": unigram_loss("causal", dataset, length, cfg.max_tokens),
        "steps": time_steps(timed, cfg, dataset),
        "records": records,
    }
