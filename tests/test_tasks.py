"""Length generalisation and masked language modelling: the tasks against solvers written here, the masking, and both scripts from the shell."""
import json
import math
import random
import statistics

import numpy as np
import pytest
import torch

import kernels
from experiments import masked_lm, tasks
from experiments.tasks import BOS, EOS, KEYS, SEP, SYMBOLS, TASKS
from model import POSITIONS, Refused


def text(tokens):
    return "".join(SYMBOLS[token] for token in tokens)


def number(digits):
    """Of digits as text, least significant first."""
    return int(digits[::-1])


# Each solver gets x and y as text and the length, and says whether y is the answer to an x of that length.

def addition(x, y, n):
    a, b = x.split("+")
    return len(a) == len(b) == n and number(y) == number(a) + number(b) and len(y) == n + 1


def scratchpad(x, y, n):
    a, b = x.split("+")
    places, total = y.split("|")
    *places, rest = places.split(",")
    if not addition(x, total, n) or len(places) != n or rest:
        return False
    for i, place in enumerate(places):
        low = 10 ** (i + 1)
        partial = number(a) % low + number(b) % low  # the sum of the lower digits, up to this place
        if place != a[i] + b[i] + str(partial // 10 ** i % 10) + str(partial // low):
            return False
    return True


SOLVERS = {
    "copy": lambda x, y, n: x == y and len(x) == n and x.isdigit(),
    "reverse": lambda x, y, n: list(reversed(x)) == list(y) and len(x) == n and x.isdigit(),
    "addition": addition,
    "scratchpad": scratchpad,
    "majority": lambda x, y, n: statistics.multimode(x) == [y] and len(x) == n and set(x) <= set("abcd"),
    "span": lambda x, y, n: x.split("|")[1:2] == [y] and x.count("|") == 2 and y.isdigit() and len(x) == n + 2,
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Scripts on models this small are slower on two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_against_a_solver(task, rng):
    function, trained, tested, tokens = TASKS[task]
    drawn, longest = random.Random(int(rng.integers(1 << 30))), 0
    for n in [*range(1, tested + 1), tested]:
        if task == "span" and longest:  # the last time round: markers around all digits, which chance would seldom draw
            drawn.sample = lambda population, k: [population[0], population[-1]]
        for _ in range(5):
            x, y = function(drawn, n)
            assert len(x) + len(y) <= tokens(n)
            longest = max(longest, len(x) + len(y) if n == tested else 0)
            if task != "recall":
                assert SOLVERS[task](text(x), text(y), n), (text(x), text(y))
                continue
            keys, shown = x[::2], dict(zip(x[::2], x[1::2]))
            assert len(x) == 2 * n and len(shown) == n and all(key in KEYS for key in keys) and set(shown.values()) <= set(range(10))
            questions = y[::2]
            assert len(questions) == len(set(questions)) == math.ceil(n / 2) and [shown[key] for key in questions] == y[1::2]
    assert longest == tokens(tested)  # so that `learned` has a vector for each, and no more
    assert (trained, tested) == {"scratchpad": (8, 16), "recall": (20, 80)}.get(task, (20, 40))


def test_the_solvers_refuse_what_is_wrong():
    """One digit or carry changed, by hand: 95 + 17 = 112, least significant first."""
    assert addition("59+71", "211", 2) and scratchpad("59+71", "5721,9111,|211", 2) and not addition("59+71", "112", 2)
    for bad in ("5720,9111,|211", "5721,9110,|211", "5721,9101,|211", "5721,9111,|210", "5721,|211", "5721,9111,|21"):
        assert not scratchpad("59+71", bad, 2)


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_scores_y_alone(task):
    """<bos> x <sep> y <eos>: at each place the target is the next token, of y and <eos> only, and of recall not the questions."""
    lengths = [1, 5, TASKS[task][1], 2]
    x, y = tasks.batch(task, lengths, random.Random("a"))
    again = random.Random("a")
    for tokens, targets, n in zip(x.tolist(), y.tolist(), lengths):
        question, answer = TASKS[task][0](again, n)
        whole = [BOS, *question, SEP, *answer, EOS]
        assert tokens[:len(whole) - 1] == whole[:-1] and set(tokens[len(whole) - 1:]) <= {EOS}
        asks = [i for i, token in enumerate(whole) if i > 1 + len(question) and token not in KEYS]
        assert {i + 1: target for i, target in enumerate(targets) if target >= 0} == {i: whole[i] for i in asks}
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape and int((y == EOS).sum()) == len(lengths)


def test_samples_are_a_function_of_task_seed_and_step():
    """Whatever was drawn before, and whatever else is random."""
    first = [tasks.training_batch("span", 1, step, 8) for step in range(3)]
    random.seed(5)
    torch.manual_seed(5)
    again = [tasks.training_batch("span", 1, step, 8) for step in (2, 0, 1)]
    assert all(torch.equal(a, b) for one, two in zip(first, (again[1], again[2], again[0])) for a, b in zip(one, two))
    assert len({batch[0].numpy().tobytes() for batch in (*first, tasks.training_batch("span", 2, 0, 8), tasks.training_batch("copy", 1, 0, 8), tasks.training_batch("reverse", 1, 0, 8))}) == 6
    lengths = [int((row >= 0).sum()) - 1 for step in range(20) for row in tasks.training_batch("copy", 3, step, 64)[1]]
    assert set(lengths) == set(range(1, 21)) and 9.5 < statistics.fmean(lengths) < 11.5  # uniform: 10.5, standard error 0.16


@pytest.mark.parametrize("task", TASKS)
def test_exact_match_of_an_oracle_and_of_a_constant(task):
    """One reader knows each next token, one always says <eos>; one is wrong in the first token of y alone, after which it is right."""
    device, vocabulary = torch.device("cpu"), KEYS.stop

    def oracle(tokens):
        return torch.nn.functional.one_hot(torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], EOS)), 1), vocabulary).float()

    def slip(tokens):
        logits, at = oracle(tokens), (tokens == SEP).int().argmax(1) + (task == "recall")
        logits[torch.arange(len(tokens)), at] = logits[torch.arange(len(tokens)), at].roll(1, -1)
        return logits

    right, wrong, nearly = (tasks.score(read, task, 3, device) for read in (oracle, lambda tokens: oracle(torch.full_like(tokens, EOS)), slip))
    assert [row["length"] for row in right] == list(range(1, TASKS[task][2] + 1))
    assert all(row["exact"] == row["accuracy"] == 1.0 for row in right) and all(row["exact"] == row["accuracy"] == 0.0 for row in wrong)
    assert all(row["exact"] == 0.0 and row["accuracy"] < 1 for row in nearly) and (task in ("majority", "span") or nearly[-1]["accuracy"] > 0.9)


def test_teacher_forcing_is_greedy_decoding(make):
    """A model's own greedy answer is all right when it is read with teacher forcing, and with one token of it changed it is not."""
    model = make(pos="rope", vocab_size=20)
    prompt = torch.tensor([[BOS, 3, 1, 2, SEP]])
    answer = torch.cat(list(model.generate(prompt, 6, temperature=0)), 1)
    named = lambda answer: model(torch.cat((prompt, answer), 1)[:, :-1])[:, 4:].argmax(-1)  # noqa: E731
    assert torch.equal(named(answer), answer)
    changed = answer.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 20
    assert not torch.equal(named(changed), changed)


def test_each_scheme_is_made_for_the_length_that_it_needs():
    """The trained one, and of `learned`, which cannot go past its table, the tested one: a learned model reads every test."""
    shape = tasks.BUDGETS["try"][0]
    for task, (_, trained, tested, tokens) in TASKS.items():
        for pos in POSITIONS:
            settings = tasks.config_of(task, pos, shape)
            assert settings.block_size == (tokens(tested) if pos == "learned" else tokens(trained)) + 2 and settings.vocab_size == (120 if task == "recall" else 20)
    model = tasks.GPT(tasks.config_of("copy", "learned", shape))
    assert len(tasks.score(model, "copy", 2, torch.device("cpu"))) == 40
    with pytest.raises(Refused):
        tasks.score(tasks.GPT(tasks.GPTConfig(pos="learned", **shape, block_size=80, vocab_size=20)), "copy", 2, torch.device("cpu"))


def rows_of(values):
    """Rows of made-up runs: (task, scheme) -> (in length, beyond) for each seed."""
    return [{"task": task, "pos": pos, "seed": seed, "length": n, "exact": pair[n > TASKS[task][1]], "accuracy": 0.5} for (task, pos), pairs in values.items() for seed, pair in enumerate(pairs, 1)
            for n in range(1, TASKS[task][2] + 1)]


def test_judging_by_hand():
    values = {("copy", "nope"): [(1, 0.5), (1, 0.7)], ("copy", "t5"): [(1, 0.3), (1, 0.5)], ("copy", "rope"): [(1, 0.1), (1, 0.3)], ("copy", "learned"): [(1, 0), (1, 0.2)],
              ("majority", "nope"): [(1, 0.2)] * 2, ("majority", "t5"): [(1, 0.2)] * 2, ("majority", "rope"): [(1, 0.9)] * 2, ("majority", "learned"): [(1, 0.1)] * 2}
    rows, schemes = rows_of(values), ["nope", "t5", "rope", "learned"]
    assert tasks.mean_of(rows, "copy", "nope", True) == pytest.approx({1: 0.5, 2: 0.7}) and tasks.mean_of(rows, "copy", "nope", False) == {1: 1, 2: 1}
    passed, line = tasks.judge(rows, ["copy", "majority"], schemes)  # of the paper's tasks there is one: (0.5 + 0.3 - 0.1 - 0) / 2 and the same for the second seed
    assert passed and "+0.350 ± 0.000" in line and "mean of copy:" in line
    assert not tasks.judge(rows_of({key: pairs[:1] for key, pairs in values.items()}), ["copy"], schemes)[0]  # one seed has no interval
    assert tasks.judge(rows, ["majority"], schemes) is None and tasks.judge(rows, ["copy"], ["nope", "t5", "rope"]) is None
    ranks = tasks.reciprocal_ranks(rows, ["copy", "majority"], schemes)  # of majority: rope first, nope and t5 share 2.5, learned fourth
    assert ranks == pytest.approx({"nope": (1 + 1 / 2.5) / 2, "t5": (1 / 2 + 1 / 2.5) / 2, "rope": (1 / 3 + 1) / 2, "learned": 1 / 4})
    line = tasks.table(rows, ["copy"], schemes, True).splitlines()[-1]
    assert line.startswith("| copy | 21 to 40 | 0.600 ± 1.271 | 0.400 ± 1.271 |")  # two seeds 0.2 apart: 12.706 * 0.2 / sqrt(2) / sqrt(2)


def test_tasks_from_the_shell(run, call, tmp_path, monkeypatch):
    """Two schemes; the same command again computes nothing; one more seed adds to what is there; another number of steps is refused."""
    words = ["experiments/tasks.py", "--budget=try", "--pos=rope,learned", "--tasks=copy,recall", "--steps=4", f"--runs={tmp_path}/runs", f"--out_dir={tmp_path}/results", "--device=cpu", "--dtype=float32"]
    done = run(*words, "--seeds=1", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/tasks.json").read_text())
    assert len(board["rows"]) == 2 * (40 + 80) and {(row["task"], row["pos"]) for row in board["rows"]} == {(task, pos) for task in ("copy", "recall") for pos in ("rope", "learned")}
    written = (tmp_path / "results/tasks.md").read_text()
    assert "commit" in written and "| copy | 21 to 40 |" in written and "Recall by the number of shots" in written and (tmp_path / "results/tasks.png").read_bytes()[:4] == b"\x89PNG"
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*.json")}
    assert len(stamps) == 4 and not list(tmp_path.rglob("*.tmp"))
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "train", None)
        done = call(*words, "--seeds=1")
        assert done.returncode == 0 and json.loads((tmp_path / "results/tasks.json").read_text())["rows"] == board["rows"]
    done = call(*words, "--seeds=2")
    rows = json.loads((tmp_path / "results/tasks.json").read_text())["rows"]
    assert done.returncode == 0 and [row for row in rows if row["seed"] == 1] == board["rows"] and len(rows) == 2 * len(board["rows"])
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items()) and "±" in (tmp_path / "results/tasks.md").read_text()
    for more, said in (("--steps=5", "other settings"), ("--pos=nopes", "nopes"), ("--tasks=copy,cpoy", "cpoy"), ("--seeds=0", "seeds"), ("--pos=", "--pos=nope")):
        done = call(*words, more)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, more


# ---------------------------------------------------------------------------------------------------------------------
# Masked language modelling.

@pytest.mark.parametrize("bos", [None, 256])
def test_fifteen_percent_are_masked_and_only_they_are_scored(bos, rng):
    tokens = torch.from_numpy(rng.integers(0, 256, (400, 64)))
    if bos is not None:
        tokens[:, 0] = tokens[::7, 30] = bos
    read, targets = masked_lm.mask(tokens, 257, bos, 3)
    masked = read == 257
    assert torch.equal(masked, targets >= 0) and torch.equal(targets[masked], tokens[masked]) and torch.equal(read[~masked], tokens[~masked])
    free = tokens.numel() if bos is None else int((tokens != bos).sum())
    assert abs(int(masked.sum()) / free - 0.15) < 5 * math.sqrt(0.15 * 0.85 / free) and not (bos is not None and masked[tokens == bos].any())
    assert torch.equal(read, masked_lm.mask(tokens, 257, bos, 3)[0]) and not torch.equal(read, masked_lm.mask(tokens, 257, bos, 4)[0])


@pytest.mark.parametrize("pos", POSITIONS)
def test_a_bidirectional_model_sees_later_tokens(pos, make):
    """A later token changes what stands before it, with a gradient, and afterwards, also after an error, attention is causal again."""
    model, tokens = make(pos=pos), torch.arange(20)[None] % 7
    changed = tokens.clone()
    changed[0, 12] = 40
    causal, plain = model(tokens), kernels.attention
    assert torch.equal(causal[:, :12], model(changed)[:, :12]) and not torch.allclose(causal[:, 12], model(changed)[:, 12])
    with masked_lm.bidirectional():
        both, after = model(tokens), model(changed)
        assert ((both - after).abs().amax(-1) > 1e-6).all()
        at_first = torch.full_like(tokens, -1)
        at_first[0, 0] = 5
        (gradient,) = torch.autograd.grad(model(tokens, at_first), model.embed.weight)
        assert gradient.isfinite().all()
    with pytest.raises(ZeroDivisionError), masked_lm.bidirectional():
        raise ZeroDivisionError
    assert kernels.attention is plain and torch.equal(model(tokens), causal)


def test_without_causality_nope_has_a_bag_of_tokens(make):
    """Tokens in another order give the same states in that order, so all masked tokens of a window get one answer; with any scheme that knows distance they do not."""
    tokens, order = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(0)), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    tokens[0, [4, 11]] = 49
    for pos in ("nope", "learned", "sinusoidal", "alibi", "rope"):
        model = make(pos=pos)
        with masked_lm.bidirectional():
            y, moved = model(tokens), model(tokens[:, order])
        assert torch.allclose(y[:, order], moved, atol=1e-4) == torch.allclose(y[0, 4], y[0, 11], atol=1e-4) == (pos == "nope"), pos
        assert not torch.allclose(model(tokens)[0, 4], model(tokens)[0, 11], atol=1e-4)  # causal NoPE counts


def test_the_loss_by_frequency(text_data):
    """Against counts made here, on the same targets; and what is scored is the same each time."""
    dataset = masked_lm.data.Dataset(text_data)
    stream = np.concatenate([np.asarray(tokens) for tokens in dataset.train.tokens])
    logs = np.log([(np.sum(stream == token) + 1) / (len(stream) + 257) for token in range(257)])
    for objective in ("causal", "masked"):
        targets = np.concatenate([y[y >= 0].numpy() for _, y in masked_lm.scored(objective, dataset, 32, 3000)])
        assert masked_lm.by_frequency(objective, dataset, 32, 3000) == pytest.approx(-logs[targets].mean())
        assert (0.11 if objective == "masked" else 0.99) < len(targets) / 2976 < (0.19 if objective == "masked" else 1.001)  # 93 windows of 32, of whose tokens one is <bos>


def test_masked_lm_from_the_shell(run, call, text_data, tmp_path, monkeypatch):
    words = ["experiments/masked_lm.py", "--budget=try", "--pos=nope,alibi", "--steps=4", f"--dataset={text_data}", "--max_tokens=2000", f"--runs={tmp_path}/runs", f"--out_dir={tmp_path}/results",
             "--device=cpu", "--dtype=float32"]
    done = run(*words, "--seeds=1", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/masked_lm.json").read_text())
    assert {(row["pos"], row["objective"]) for row in board["rows"]} == {(pos, objective) for pos in ("nope", "alibi") for objective in ("causal", "masked")}
    assert all(2 < row["loss"] < 7 for row in board["rows"]) and "nope above alibi" in board["orderings"][0]
    with monkeypatch.context() as patched:
        patched.setattr(masked_lm, "train", None)
        done = call(*words, "--seeds=1")
        assert done.returncode == 0 and json.loads((tmp_path / "results/masked_lm.json").read_text())["rows"] == board["rows"]
    done = call(*words, "--seeds=2")
    assert done.returncode == 0 and json.loads((tmp_path / "results/masked_lm.json").read_text())["rows"][:4] == board["rows"] and "±" in (tmp_path / "results/masked_lm.md").read_text()
    for more, said in (("--max_tokens=1000", "other settings"), ("--pos=bert", "bert"), ("--seeds=0", "seeds")):
        done = call(*words, more)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, more


def test_masked_claims_by_hand():
    """NoPE's perplexity more than twice the other's: the paired difference with its whole interval above ln 2."""
    rows = [{"pos": pos, "objective": "masked", "seed": seed, "loss": base + shared} for pos, base in (("nope", 3.0), ("learned", 2.0), ("alibi", 2.5)) for seed, shared in enumerate((0.0, 1.0, -1.0), 1)]
    (first, line), (second, _) = masked_lm.judge(rows, ["nope", "learned", "alibi"])
    assert first and not second and "+1.000 ± 0.000" in line
    assert not masked_lm.judge([row for row in rows if row["seed"] == 1], ["nope", "learned"])[0][0] and masked_lm.judge(rows, ["learned", "alibi"]) == []
    rows += [{**row, "objective": "causal"} for row in rows]
    assert "| nope | 3.000 ± 2.484 |" in masked_lm.table(rows, ["nope"], (3.0, 3.1))  # 4.303 / sqrt(3)
