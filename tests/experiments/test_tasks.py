"""Algorithmic tasks, and examples in a prompt: samples, scores, training."""

import random
from statistics import fmean, multimode
from types import SimpleNamespace

import pytest
import torch

from experiments import tasks
from experiments.tasks import BOS, EOS, KEYS, SEP, TASKS


def solve(task, x):  # the text of y from that of x alone, of all tasks but recall
    if task == "span":
        return x.split("|")[1]
    if "+" not in x:
        return {"copy": x, "reverse": x[::-1], "majority": "".join(multimode(x))}[task]
    a, b = x.split("+")
    sums = [int(a[i::-1]) + int(b[i::-1]) for i in range(len(a))]  # of the places up to i
    total = f"{sums[-1]:0{len(a) + 1}d}"[::-1]
    places = ""
    for n, (i, j, s) in enumerate(zip(a, b, sums, strict=True)):
        places += (i + j) * (task == "scratchpad") + f"{s // 10**n % 10}{s // 10 ** (n + 1)},"
    return total if task.startswith("addition") else f"{places}|{total}"


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_right_and_only_y_and_eos_are_scored(task):
    _, tested, per_unit, more = TASKS[task]
    for n in range(1, tested + 1):
        tokens, scored = (t[0].tolist() for t in tasks.make_batch(task, [n, n], random.Random(n)))
        tokens = tokens[: len(tokens) - scored[::-1].index(EOS)]  # without padding
        middle = tokens.index(SEP)
        x, y = tokens[1:middle], tokens[middle + 1 :]
        assert tokens[0] == BOS and len(x + y) <= per_unit * n + more + n % 2
        if task == "recall":
            digit_of = dict(zip(x[::2], x[1::2], strict=True))
            assert len(digit_of) == n and set(digit_of) <= set(KEYS)
            assert len(set(y[::2])) == (n + 1) // 2 and [digit_of[key] for key in y[::2]] == y[1::2]
        else:
            text, answer = ("".join("0123456789abcd+|,"[i] for i in part) for part in (x, y))
            assert answer == solve(task, text)
            assert len(text) == {"span": n + 2}.get(task, n + (n + 1) * ("+" in text))
        expected = [-1 if token in KEYS else token for token in y] + [EOS]
        assert scored == [-1] * middle + expected + [-1] * (len(scored) - len(tokens))


@pytest.mark.parametrize("task", ["span", "scratchpad", "recall"])
def test_one_wrong_token_is_no_exact_match(task, monkeypatch):
    trained, tested, per_unit, more = TASKS[task]
    made, slips = [], 0

    def predict(tokens):  # each next token right, but the first scored one if it slips
        following = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], EOS)), 1)
        first = (tokens == SEP).int().argmax(1) + (task == "recall")
        following[torch.arange(len(tokens)), first] += slips
        return torch.nn.functional.one_hot(following, KEYS.stop + 1)

    monkeypatch.setattr(tasks, "make_model", lambda pos, arm, size, _: made.append(size) or predict)
    monkeypatch.setattr(tasks, "train_on_samples", lambda *args: None)
    b = SimpleNamespace(steps=0, rate=0, warmup=0, batch=1, samples=3)
    arm = SimpleNamespace(name=f"{task}/rope", seed=1, b=b, device=torch.device("cpu"))
    assert list(tasks.measure(arm).values()) == [1.0] * (tested + 2)
    arm.name, slips = f"{task}/learned", 1
    wrong = [1 - 1 / ((n + 1) // 2) if task == "recall" else 0.0 for n in range(1, tested + 1)]
    wrong += [fmean(wrong[:trained]), fmean(wrong[trained:])]
    assert list(tasks.measure(arm).values()) == pytest.approx(wrong)
    assert made == [per_unit * n + more + 2 for n in (trained, tested)]  # learned: the latter


def test_the_learning_rate_rises_and_falls(monkeypatch):
    rates, x = [], torch.ones(1)
    monkeypatch.setattr(tasks, "update_weights", lambda model, optimizers, rate: rates.append(rate))
    tasks.train_on_samples(torch.nn.Bilinear(1, 1, 1), lambda step: (x, x), 10, 3.0, 4, x.device)
    assert rates == pytest.approx([0.75, 1.5, 2.25, 3, 3, 3, 3, 3, 3, 1.5])
