"""Retrieval from synthetic prompts: a needle by its depth, and tasks as in RULER (2404.06654)."""

from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

import data
from nanolong import devices, intervals, parallel
from nanolong.errors import UserError, note
from nanolong.evaluation.loss import BATCH_TOKENS, evaluation_mode
from nanolong.evaluation_log import Measurement, measure_all
from nanolong.scoring import have_different_vocabularies

# Prompts for each cell, by default: of a needle, and of the tasks, which cost more.
NEEDLE_TRIALS = 64
RULER_TRIALS = 20


def answer_prompts(model, prompts, device, seed=0):
    """Ask a model for the answers at the end of prompts of equally many tokens, all as long.

    prompts: inputs and targets of each, int64 (length,), where targets before the answer are -1.
    Returns two lists: whether all tokens of an answer had the highest probability (teacher
    forcing), and its loss in nats, the sum over its tokens.
    """
    x, y = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*prompts, strict=True))
    # Processes that share a sequence compute equally many of its tokens.
    _, n_processes = parallel.sequence_rank_and_size()
    padding = (0, -x.shape[1] % n_processes)
    x = F.pad(x, padding)
    y = F.pad(y, padding, value=-1)
    positions = data.random_positions(model.config, len(x), x.shape[1], seed)
    # Only the answer needs logits.
    n_answer = x.shape[1] - int((y >= 0).any(0).int().argmax())
    part = parallel.own_part({"tokens": x, "positions": positions})
    hidden_states = model.hidden_states(part["tokens"], part["positions"])
    last = parallel.gather_tokens(hidden_states[:, -n_answer:], dim=1)[:, -n_answer:]
    logits = model.head(last).float()  # (B, n_answer, V)
    devices.check_logits(logits)
    answer = y[:, -n_answer:]
    correct = (logits.argmax(-1) == answer) | (answer < 0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), answer.flatten(), reduction="none", ignore_index=-1
    )
    return correct.all(1).tolist(), losses.view_as(answer).double().sum(1).tolist()


# -----------------------------------------------------------------------------
# Needle: the task niah, by the depth at which the key stands


def ask_for_needles(model, tokenizer, length, depth, trials, seed, bos, dtype, hidden):
    """Ask for needles; arguments are those of find_needle(). Returns as answer_prompts()."""
    if tokenizer is None:
        raise UserError(
            "find_needle() has no tokenizer to write prompts with: give that of the model, "
            'data.tokenizer_from_json(model.meta["tokenizer"])'
        )
    prompts = []
    for sample in range(trials):
        what = ("niah", tokenizer, length, seed, sample, bos, hidden, depth)
        prompts.append(data.make_document(*what))
    batch_size = max(1, BATCH_TOKENS // length)
    correct, nats = [], []
    with evaluation_mode(model, dtype) as device:
        for i in range(0, trials, batch_size):
            found = answer_prompts(model, prompts[i : i + batch_size], device, seed)
            correct += found[0]
            nats += found[1]
    return correct, nats


def find_needle(
    model, tokenizer, length, depth, trials=64, seed=1, bos=None, dtype=torch.float32, hidden=True
):
    """Ask for a value that stands at a depth from 0 to 1, in prompts of `length` tokens.

    Returns two floats: the fraction of trials in which all digits had the highest probability, and
    the mean loss in nats per digit. hidden=False leaves the needle out of the prompt (control).
    """
    correct, nats = ask_for_needles(
        model, tokenizer, length, depth, trials, seed, bos, dtype, hidden
    )
    return sum(correct) / trials, sum(nats) / trials / count_digits(tokenizer)


def count_digits(tokenizer):
    """Return how many digits a value has."""
    return data.DIGITS[data.size_of(tokenizer)]


def plan_needle(name, model, tokenizer, cfg, length, depth):
    """Return the Measurement of retrieval at one length and depth, or of the control (None)."""
    trials = cfg.trials or NEEDLE_TRIALS
    record = {"checkpoint": name, "task": "needle", "length": length, "depth": depth}
    record.update(trials=trials, seed=cfg.seed)

    def find():
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        bos = model.meta.get("bos")
        hidden = depth is not None
        correct, nats = ask_for_needles(
            model, tokenizer, length, depth, trials, cfg.seed, bos, dtype, hidden
        )
        accuracy = intervals.fraction_interval(correct)
        found = {**record, "accuracy": accuracy.pop("mean"), **accuracy}
        nll = intervals.mean_interval([total / count_digits(tokenizer) for total in nats])
        return [{**found, "nll": nll["mean"], "nll_low": nll["low"], "nll_high": nll["high"]}]

    return Measurement([record], find, trials * length * devices.flops_per_token(model, length))


def plan_needles(models, cfg, lengths):
    """Plan retrieval for every checkpoint, length and depth, and for the control (depth None)."""
    depths = [i / max(1, cfg.depths - 1) for i in range(cfg.depths)]
    measurements = []
    for name, model in models.items():
        tokenizer = tokenizer_of(name, model)
        note_untrained(name, model, tokenizer, ("niah",))
        for length, depth in product(lengths, (*depths, None)):
            measurements.append(plan_needle(name, model, tokenizer, cfg, length, depth))
    return measurements


def measure_needles(models, cfg, lengths):
    """Measure what plan_needles() plans. Returns a list of records."""
    return measure_all(plan_needles(models, cfg, lengths))


def tokenizer_of(name, model):
    """Return the tokenizer of a checkpoint. Raises UserError if it has none."""
    tokenizer = data.tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        raise UserError(
            f"{name} has no tokenizer, so it cannot be asked in text: "
            "use one that was trained on a text prepared by data/prepare.py"
        )
    return tokenizer


def note_untrained(name, model, tokenizer, kinds):
    """Print a note if a small model never saw documents of one of these kinds in training."""
    tasks = (model.meta.get("train") or {}).get("tasks") or []
    trained_on = [task.partition(":")[0] for task in tasks]
    missing = [kind for kind in kinds if kind not in trained_on]
    if missing and data.size_of(tokenizer) == "small":
        note(
            f"{name} was not trained on {', '.join(missing)} documents (train.py "
            f"--tasks={missing[0]}:0.1), so it may not know the question"
        )


# -----------------------------------------------------------------------------
# RULER


def plan_ruler_prompt(name, model, tokenizer, cfg, length, kind, sample):
    """Return the Measurement of one prompt of a task.

    "gain" is what the needles save of the answer's nats.
    """
    record = {"checkpoint": name, "task": "ruler", "length": length, "kind": kind}
    record.update(sample=sample, size=data.size_of(tokenizer), seed=cfg.seed)

    def ask(needles):
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        what = (kind, tokenizer, length, cfg.seed, sample, model.meta.get("bos"), needles)
        prompt = data.make_document(*what)
        with evaluation_mode(model, dtype) as device:
            found = answer_prompts(model, [prompt], device, cfg.seed)
        return found[0][0], found[1][0]

    def find():
        correct, nats = ask(needles=True)
        gain = ask(needles=False)[1] - nats
        return [{**record, "correct": correct, "nats": nats, "gain": gain}]

    flops = 2 * length * devices.flops_per_token(model, length)
    return Measurement([record], find, flops, brief=True)


def plan_ruler(models, cfg, lengths):
    """Plan every prompt of every task of cfg.ruler, for every checkpoint and length."""
    measurements = []
    for name, model in models.items():
        tokenizer = tokenizer_of(name, model)
        note_untrained(name, model, tokenizer, cfg.ruler)
        samples = range(cfg.trials or RULER_TRIALS)
        for length, kind, sample in product(lengths, cfg.ruler, samples):
            planned = plan_ruler_prompt(name, model, tokenizer, cfg, length, kind, sample)
            measurements.append(planned)
    return measurements


def summarise_ruler(records, same_prompts=True):
    """Return a record for every checkpoint, task and length, with intervals over the prompts.

    "accuracy", "nats" and "gain" are intervals. "difference" is the nats of the answer minus those
    of the first checkpoint, from the differences of the same prompts; same_prompts: whether the
    checkpoints have the same, which takes the same vocabulary.
    """
    cells = {}
    for record in records:
        if record["task"] == "ruler" and "refused" not in record:
            cell = (record["checkpoint"], record["kind"], record["length"])
            cells.setdefault(cell, []).append(record)
    summaries = []
    first_of = {}
    for (name, kind, length), prompts in cells.items():
        correct, nats, gains = ([p[f] for p in prompts] for f in ("correct", "nats", "gain"))
        summary = {"checkpoint": name, "task": "ruler", "kind": kind, "length": length}
        summary.update(summary=True, size=prompts[0]["size"], n=len(prompts))
        summary["accuracy"] = intervals.fraction_interval(correct)
        summary["nats"] = intervals.mean_interval(nats)
        first = first_of.setdefault((kind, length), nats)
        if same_prompts and first is not nats:
            differences = [a - b for a, b in zip(nats, first, strict=True)]
            summary["difference"] = intervals.mean_interval(differences)
        summary["gain"] = intervals.mean_interval(gains)
        summaries.append(summary)
    return summaries


def measure_ruler(models, cfg, lengths):
    """Measure what plan_ruler() plans. Returns a list of records, of summarise_ruler()."""
    records = measure_all(plan_ruler(models, cfg, lengths))
    return summarise_ruler(records, not have_different_vocabularies(models))
