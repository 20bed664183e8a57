"""Retrieval from synthetic prompts: one path for a needle at every depth, and for tasks as in RULER
(2404.06654).
"""

import hashlib
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

import data
from data.tasks import DIGITS, SEVERAL, make_document, size_of
from nanolong import devices, inference
from nanolong.errors import note, require
from nanolong.evaluation import intervals
from nanolong.evaluation.log import Cell
from nanolong.evaluation.loss import BATCH_TOKENS, evaluation_mode

# Prompts for each cell, by default: at each depth, and of each of RULER's tasks, which cost more.
TRIALS = {"needle": 64, "ruler": 20}


def chance(kind, size):
    """Return the fraction of prompts that a guess answers: one of the values in the text, or if
    that is one, any number. Its loss is -ln of this, in nats.
    """
    if kind == "niah":
        return 1 / (9 * 10 ** (DIGITS[size] - 1))
    return 1 / SEVERAL[size]


def plan_retrieval(task, models, cfg):
    """Return the cells of a task, needle or ruler: of every checkpoint, length and kind of prompt,
    of needle at all depths.
    """
    kinds, depths = cfg.ruler, [None]
    if task == "needle":
        kinds = ["niah"]
        depths = [i / max(1, cfg.depths - 1) for i in range(cfg.depths)]
    trials = cfg.trials or TRIALS[task]
    cells, untrained = [], []
    for name, model in models.items():
        tokenizer = data.tokenizer_from_json(model.meta.get("tokenizer"))
        problem = f"{name} has no tokenizer, so it cannot be asked in text"
        require(tokenizer, f"{problem}: use one that was trained on a text of data/prepare.py")
        seen = set(model.meta.get("tasks", ()))
        if size_of(tokenizer) == "small" and not seen.issuperset(kinds):
            untrained.append(name)
        for length, kind in product(cfg.lengths, kinds):
            blank = {"checkpoint": name, "task": task, "kind": kind, "depth": None}
            blank |= {"length": length, "trials": trials, "seed": cfg.seed}
            blank["chance"] = chance(kind, size_of(tokenizer))
            records = [{**blank, "depth": depth} for depth in depths]
            cells.append(Cell(records, partial(ask, records, model, tokenizer, cfg.dtype)))
    if untrained:
        note(
            f"{', '.join(untrained)}: not trained on {', '.join(kinds)} documents "
            f"(data/prepare.py --task={kinds[0]}:1), and so may not know the question"
        )
    return cells


def ask(records, model, tokenizer, dtype):
    """Return records, which differ in their depth, with the answers to their prompts, and to the
    same ones without their needles, which are the same at every depth.

    "accuracy": the fraction with all answers right; "nats": the loss of the answer; "gain": what
    the needles save of it; "control": the fraction that is right without them; "by_prompt": nats,
    right, gain and right without needles, of each. Raises UserError.
    """
    bos = model.meta.get("bos")
    answers = []
    for record in records:
        prompts = make_prompts(record, tokenizer, bos, needles=True)
        ids = hashlib.sha256(b"".join(tokens.tobytes() for prompt in prompts for tokens in prompt))
        right, nats = answer_prompts(model, prompts, dtype)
        answers.append((record, right, nats, ids.hexdigest()[:16]))
    prompts = make_prompts(records[0], tokenizer, bos, needles=False)
    guessed, nats_without = answer_prompts(model, prompts, dtype)
    measured = []
    for record, right, nats, ids in answers:
        gain = [without - nat for without, nat in zip(nats_without, nats, strict=True)]
        found = {
            "accuracy": intervals.fraction_interval(right),
            "nats": intervals.mean_interval(nats),
            "gain": intervals.mean_interval(gain),
            "control": intervals.fraction_interval(guessed),
            "by_prompt": list(zip(nats, right, gain, guessed, strict=True)),
        }
        measured.append({**record, **found, "ids": ids})
    return measured


def make_prompts(record, tokenizer, bos, needles):
    """Return inputs and targets of each prompt, int64; targets before the answer are -1."""
    kind, length, seed, depth = (record[name] for name in ("kind", "length", "seed", "depth"))
    return [
        make_document(kind, tokenizer, length, seed, sample, bos, needles, depth)
        for sample in range(record["trials"])
    ]


def answer_prompts(model, prompts, dtype):
    """Ask a model for the answers at the end of prompts of one length, each (inputs, targets).

    Returns two lists: whether all tokens of an answer had the highest probability (teacher
    forcing), and its loss in nats, the sum over its tokens.
    """
    device = next(model.parameters()).device
    batch_size = max(1, BATCH_TOKENS // len(prompts[0][0]))
    answers = []
    with evaluation_mode(model, devices.pick_dtype(dtype, device)):
        for i in range(0, len(prompts), batch_size):
            answers += answer_batch(model, prompts[i : i + batch_size], device)
    return zip(*answers, strict=True)


def answer_batch(model, prompts, device):
    """Answer prompts of equally many tokens: (whether it is right, nats) of each."""
    x, y = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*prompts, strict=True))
    # Only the answer needs logits.
    n_answer = x.shape[1] - int((y >= 0).any(0).int().argmax())
    hidden_states = model.hidden_states(x)
    logits = model.head(hidden_states[:, -n_answer:]).float()  # (B, n_answer, V)
    answer = y[:, -n_answer:]
    inference.check_logits(logits)
    right = (logits.argmax(-1) == answer) | (answer < 0)
    nats = F.cross_entropy(
        logits.flatten(0, 1), answer.flatten(), reduction="none", ignore_index=-1
    ).view_as(answer)
    return list(zip(right.all(1).tolist(), nats.double().sum(1).tolist(), strict=True))
