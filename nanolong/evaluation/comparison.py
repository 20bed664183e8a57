"""How checkpoints compare: differences on the same tokens, intervals over the seeds of an arm, and
what is unequal between them besides what is compared.
"""

import math
import re

from nanolong.errors import require
from nanolong.evaluation import intervals
from nanolong.evaluation.tables import COSTS, select
from nanolong.run import weights_hash

# What tells the cells of a checkpoint apart.
CELL = ("task", "protocol", "kind", "depth", "length", "position", "stride", "trials", "seed")
CELL += ("context", "bucket")
MEASURES = ("accuracy", "nats", "gain", "control")


def compare(records, names):
    """Add to records how they differ from the first checkpoint's or arm's on the same tokens, in
    place. names: of the checkpoints or arms to compare.

    "difference": of losses in nats per token, or of the nats of an answer, this one minus the
    first, from the differences of the same sequences, prompts, or pairs of seeds in their order.
    """
    # where the first was refused, nothing is compared: not with the second in its place
    first_of = {cell_of(record): record for record in select(records, checkpoint=names[0])}
    for record in records:
        first = first_of.get(cell_of(record), {})
        same = record.get("ids") == first.get("ids") and record.get("seeds") == first.get("seeds")
        if same and "ids" in record and record["checkpoint"] != names[0]:
            pairs = list(zip(samples(record), samples(first), strict=True))
            differences = [value - other for (value, _), (other, _) in pairs]
            counts = [count for (_, count), _ in pairs]
            least = intervals.MIN_SEEDS if "seeds" in record else intervals.MIN_SAMPLES
            record["difference"] = intervals.ratio_interval(differences, counts, least)


def cell_of(record):
    return tuple(str(record.get(name)) for name in CELL)


def samples(record):
    """Return the (value, count) of each sequence, prompt or seed."""
    if "by_seed" in record:
        return [(value, 1) for value in record["by_seed"]]
    if "by_prompt" in record:
        return [(nats, 1) for nats, *_ in record["by_prompt"]]
    return [(total, count) for total, count, *_ in record.get("by_sequence", ())]


def check_runs(models, arms):
    """Raise UserError if two runs of an arm have the same weights: they are one run, and its
    interval would count it twice.
    """
    for arm, runs in arms.items():
        folders = {}
        for run in runs:
            model = models[run]
            other = folders.setdefault(weights_hash(model), model.folder)
            require(
                other is model.folder,
                f"{other} and {model.folder} have the same weights, and would count as two runs of "
                f"{arm}: give one of them, or each a NAME of its own",
            )


def over_seeds(records, arms):
    """Return the records of arms: of several runs their means, with intervals over the runs.

    arms: name -> names of its runs. An arm of a single run has that run's records.
    """
    found = []
    for arm, runs in arms.items():
        if len(runs) == 1:
            found += select(records, checkpoint=next(iter(runs)))
            continue
        cells = {}
        for record in records:
            if record["checkpoint"] in runs:
                cells.setdefault(cell_of(record), []).append(record)
        found += [mean_record(arm, of_runs) for of_runs in cells.values()]
    return found


def mean_record(arm, records):
    """Return the mean record of an arm's runs, for one cell."""
    first = records[0]
    found = {name: first[name] for name in (*CELL, "chance") if name in first}
    found = {"checkpoint": arm, **found, "seeds": len(records)}
    # the mean of the other runs would be of another selection
    refused = [record["refused"] for record in records if "refused" in record]
    if refused:
        return {**found, "refused": refused[0]}
    if len({record.get("ids") for record in records} - {None}) == 1:
        found["ids"] = first["ids"]
    if "loss" in first:
        found["by_seed"] = [record["loss"] for record in records]
        interval = seed_interval(found["by_seed"])
        if "gain" in first:
            found["gain"] = seed_interval([record["gain"]["mean"] for record in records])
        return {**found, "loss": interval.pop("mean"), **interval}
    for measure in MEASURES:
        if measure in first:
            found[measure] = seed_interval([record[measure]["mean"] for record in records])
            found["by_seed"] = [record["nats"]["mean"] for record in records]
    for measure in COSTS:
        if measure in first:
            found[measure] = sum(record[measure] for record in records) / len(records)
    return found


def seed_interval(values):
    """Return the interval of a mean over seeds; equal ones, as if none was right, have no spread
    that says anything.
    """
    least = intervals.MIN_SEEDS if len(set(values)) > 1 else math.inf
    return intervals.mean_interval(values, least)


# -----------------------------------------------------------------------------
# What is unequal

# Arms are compared by pairs of their runs.
NUMBERS = "numbers of runs (with another than the first arm's there are no differences)"


def training_facts(model):
    """Return the properties that must be equal between checkpoints, to compare anything else."""
    meta = model.meta
    # the name of the parent's step folder says how far it was trained
    parent = re.search(r"step-(\d+)$", meta.get("parent") or "")
    steps = [int(parent[1]) if parent else 0, meta.get("step") or 0]
    tokens = (meta.get("pretraining_tokens") or 0) + (meta.get("tokens") or 0)
    data = [meta.get("dataset"), meta.get("data_hash")]
    return {
        "steps": " + ".join(f"{n:,}" for n in steps if n) or "unknown",
        "trained tokens": f"{tokens:,}" if tokens else "unknown",
        "training data": " ".join(filter(None, data)) or "unknown",
    }


def describe_unequal(models, arms):
    """Return a sentence for each thing in which the training of checkpoints, or arms, differs."""
    facts, unfinished = {}, []
    for arm, runs in arms.items():
        for run in runs:
            for what, value in training_facts(models[run]).items():
                facts.setdefault(what, {}).setdefault(value, []).append(arm)
            meta = models[run].meta
            train = meta.get("train") or {}
            last_step = train.get("stop_at") or train.get("max_iters") or 0
            if (meta.get("step") or 0) < last_step:
                unfinished.append(f"{run} ({meta['step']:,} of {last_step:,} steps)")
        facts.setdefault(NUMBERS, {}).setdefault(str(len(runs)), []).append(arm)
    sentences = []
    # equal properties need no sentence
    for what, found in facts.items():
        sides = [f"{value} ({list_names(of)})" for value, of in found.items()]
        if len(sides) > 1:
            sentences.append(f"unequal {what}: {'; '.join(sides)}")
    if unfinished and len(models) > 1:
        sentences.append(f"unfinished: {', '.join(unfinished)}")
    return sentences


def list_names(names):
    """Return different names in words, of many the first five."""
    names = list(dict.fromkeys(names))
    n_others = len(names) - 5
    return ", ".join(names) if n_others < 2 else f"{', '.join(names[:5])} and {n_others} others"


def describe_other_tokens(records, texts, max_tokens):
    """Return a sentence if checkpoints do not score the same token ids, in a list."""
    # Within a protocol and length, because others have other sequences.
    ids = {}
    for record in select(records, task="loss"):
        if "ids" in record:
            ids.setdefault((record["protocol"], record["length"]), set()).add(record["ids"])
    if max(map(len, ids.values()), default=1) == 1:
        return []
    if len({text.name for text in texts.values()}) > 1:
        return ["unequal texts: the losses of different texts cannot be compared"]
    sentence = "unequal token ids: compare bits per byte (of chunked); there are no differences"
    longest = max(len(text.val) for text in texts.values())
    if longest > max_tokens:
        sentence += f"; to score the whole text in all tokens, give --max_tokens={longest}"
    return [sentence]
