"""Algorithmic tasks, and examples in a prompt: samples, scores, training."""

import random
from statistics import multimode
from types import SimpleNamespace

import pytest
import torch

from experiments import tasks
from experiments.tasks import BOS, EOS, SEP, TASKS, VOCAB_SIZE

CHARACTERS = "0123456789abcd+|,"  # of the token ids


def add_by_places(task, a, b):
    """The text of a sum of two texts of digits, the least significant first."""
    n_places = len(a)
    total = str(int(a[::-1]) + int(b[::-1])).zfill(n_places + 1)[::-1]
    if task.startswith("addition"):
        return total
    places = []
    for n in range(n_places):
        # of the places up to here
        up_to = int(a[n::-1]) + int(b[n::-1])
        operands = a[n] + b[n] if task == "scratchpad" else ""
        digit = up_to // 10**n % 10
        carry = up_to // 10 ** (n + 1)
        places.append(f"{operands}{digit}{carry},")
    return f"{''.join(places)}|{total}"


def solve(task, x):
    """The text of y from that of x alone."""
    if task == "copy":
        return x
    if task == "reverse":
        return x[::-1]
    if task == "majority":
        return "".join(multimode(x))
    if task == "span":
        return x.split("|")[1]
    return add_by_places(task, *x.split("+"))


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_right_and_only_y_and_eos_are_scored(task):
    _, tested, per_unit, more = TASKS[task]
    for n in range(1, tested + 1):
        inputs, targets = tasks.make_batch(task, [n, n], random.Random(n))
        scored = targets[0].tolist()
        n_padding = scored[::-1].index(EOS)
        tokens = inputs[0].tolist()[: len(scored) - n_padding]
        middle = tokens.index(SEP)
        x = tokens[1:middle]
        y = tokens[middle + 1 :]
        assert tokens[0] == BOS
        assert len(x + y) <= per_unit * n + more + n % 2
        text = "".join(CHARACTERS[i] for i in x)
        assert "".join(CHARACTERS[i] for i in y) == solve(task, text)
        n_marks = {"span": 2, "copy": 0, "reverse": 0, "majority": 0}.get(task, n + 1)
        assert len(text) == n + n_marks
        assert scored == [-1] * middle + y + [EOS] + [-1] * n_padding


@pytest.mark.parametrize("task", ["span", "scratchpad"])
def test_one_wrong_token_is_no_exact_match(task, monkeypatch):
    trained, tested, per_unit, more = TASKS[task]
    made, slips = [], 0

    def predict(tokens):  # each next token right, but the first scored one if it slips
        following = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], EOS)), 1)
        first = (tokens == SEP).int().argmax(1)
        following[torch.arange(len(tokens)), first] += slips
        return torch.nn.functional.one_hot(following, VOCAB_SIZE + 1)

    monkeypatch.setattr(tasks, "make_model", lambda pos, arm, size, _: made.append(size) or predict)
    monkeypatch.setattr(tasks, "train_on_samples", lambda *args: None)
    b = SimpleNamespace(steps=0, rate=0, warmup=0, batch=1, samples=3)
    arm = SimpleNamespace(name=f"{task}/rope", seed=1, b=b, device=torch.device("cpu"))
    assert list(tasks.measure(arm).values()) == [1.0] * (tested + 2)
    arm.name, slips = f"{task}/learned", 1
    assert list(tasks.measure(arm).values()) == [0.0] * (tested + 2)
    assert made == [per_unit * n + more + 2 for n in (trained, tested)]  # learned: the latter
