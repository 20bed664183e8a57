"""Length generalisation and masked language modelling: the tasks, the masks, and both scripts."""

import json
import math
import random
import statistics

import numpy as np
import pytest
import torch
from conftest import assert_refused
from try_budget import try_words

import data
import kernels
from experiments import report
from experiments.papers import masked_lm, tasks
from experiments.papers.tasks import BOS, EOS, KEYS, SEP, SYMBOLS, TASKS
from model import GPT, POSITIONS, GPTConfig
from nanolong.errors import UserError

CPU = torch.device("cpu")


# -----------------------------------------------------------------------------
# Solvers, independent of tasks.py. Each takes x and y as text and the length, and says whether y is
# the answer to an x of that length.


def to_text(tokens):
    return "".join(SYMBOLS[token] for token in tokens)


def to_number(digits):
    """Digits as text, least significant first."""
    return int(digits[::-1])


def is_copy(x, y, n):
    return x == y and len(x) == n and x.isdigit()


def is_reverse(x, y, n):
    return list(reversed(x)) == list(y) and len(x) == n and x.isdigit()


def is_addition(x, y, n):
    a, b = x.split("+")
    correct = to_number(y) == to_number(a) + to_number(b)
    return correct and len(a) == len(b) == n and len(y) == n + 1


def is_scratchpad(x, y, n):
    a, b = x.split("+")
    places, total = y.split("|")
    *places, rest = places.split(",")
    if not is_addition(x, total, n) or len(places) != n or rest:
        return False
    for i, place in enumerate(places):
        modulus = 10 ** (i + 1)
        partial = to_number(a) % modulus + to_number(b) % modulus  # of the digits up to here
        digit, carry = partial // 10**i % 10, partial // modulus
        if place != a[i] + b[i] + str(digit) + str(carry):
            return False
    return True


def is_majority(x, y, n):
    return statistics.multimode(x) == [y] and len(x) == n and set(x) <= set("abcd")


def is_span(x, y, n):
    parts = x.split("|")
    return len(parts) == 3 and parts[1] == y and y.isdigit() and len(x) == n + 2


def is_carries(x, y, n):
    """A scratchpad without the digits of both numbers."""
    a, b = x.split("+")
    places, total = y.split("|")
    *places, rest = places.split(",")
    if len(places) != n or rest:
        return False
    whole = [a[i] + b[i] + place for i, place in enumerate(places)]
    return is_scratchpad(x, ",".join([*whole, ""]) + "|" + total, n)


SOLVERS = {
    "copy": is_copy,
    "reverse": is_reverse,
    "addition": is_addition,
    "addition-8": is_addition,
    "scratchpad": is_scratchpad,
    "carries": is_carries,
    "majority": is_majority,
    "span": is_span,
}


def test_the_solvers_refuse_wrong_answers():
    """95 + 17 = 112, least significant digit first; then one digit or carry is changed."""
    assert is_addition("59+71", "211", 2) and not is_addition("59+71", "112", 2)
    assert is_scratchpad("59+71", "5721,9111,|211", 2)
    for wrong in ("5720,9111,", "5721,9110,", "5721,9101,", "5721,"):
        assert not is_scratchpad("59+71", wrong + "|211", 2)
    for wrong in ("210", "21"):
        assert not is_scratchpad("59+71", "5721,9111,|" + wrong, 2)
    assert is_carries("59+71", "21,11,|211", 2)
    for wrong in ("20,11,|211", "21,10,|211", "21,11,|210", "21,|211", "5721,9111,|211"):
        assert not is_carries("59+71", wrong, 2)


# -----------------------------------------------------------------------------
# Samples and batches.


@pytest.mark.parametrize("task", SOLVERS)
def test_samples_are_solved_and_fit(task, rng):
    longest = TASKS[task].test_length
    generator = random.Random(int(rng.integers(1 << 30)))
    for length in range(1, longest + 1):
        for _ in range(5):
            x, y = TASKS[task].make_sample(generator, length)
            assert SOLVERS[task](to_text(x), to_text(y), length), (to_text(x), to_text(y))
            assert len(x) + len(y) <= tasks.max_tokens(task, length)
    if task == "span":  # markers around all digits: chance would seldom place them so
        generator.sample = lambda population, k: [population[0], population[-1]]
        x, y = TASKS[task].make_sample(generator, longest)
    # so that `learned` has an embedding for every test, and no more
    assert len(x) + len(y) == tasks.max_tokens(task, longest)
    expected = (8, 16) if task in ("addition-8", *tasks.SCRATCHPADS) else (20, 40)
    assert (TASKS[task].train_length, TASKS[task].test_length) == expected


def test_recall_asks_for_half_of_the_pairs(rng):
    generator = random.Random(int(rng.integers(1 << 30)))
    for length in range(1, 81):
        x, y = tasks.recall(generator, length)
        digit_of = dict(zip(x[::2], x[1::2], strict=True))
        assert len(x) == 2 * length and len(digit_of) == length
        assert set(digit_of) <= set(KEYS) and set(digit_of.values()) <= set(range(10))
        questions, answers = y[::2], y[1::2]
        assert len(set(questions)) == len(questions) == math.ceil(length / 2)
        assert [digit_of[key] for key in questions] == answers
        assert len(x) + len(y) == tasks.max_tokens("recall", length)
    assert (TASKS["recall"].train_length, TASKS["recall"].test_length) == (20, 80)


@pytest.mark.parametrize("task", TASKS)
def test_only_y_and_eos_are_scored(task):
    """<bos> x <sep> y <eos>: a target is the next token; recall's questions have none either."""
    lengths = [1, 5, TASKS[task].train_length, 2]
    x, y = tasks.make_batch(task, lengths, random.Random("a"))
    generator = random.Random("a")
    for tokens, targets, length in zip(x.tolist(), y.tolist(), lengths, strict=True):
        question, answer = TASKS[task].make_sample(generator, length)
        sample = [BOS, *question, SEP, *answer, EOS]
        end = len(sample) - 1
        assert tokens[:end] == sample[:-1] and set(tokens[end:]) <= {EOS}
        expected = {}
        for i, token in enumerate(sample):
            if i > 1 + len(question) and token not in KEYS:
                expected[i] = token
        scored = {i + 1: target for i, target in enumerate(targets) if target >= 0}
        assert scored == expected
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape
    assert int((y == EOS).sum()) == len(lengths)


def test_batches_are_a_function_of_task_seed_and_step():
    first = [tasks.training_batch("span", 1, step, 8) for step in range(3)]
    random.seed(5)
    torch.manual_seed(5)
    for step in (2, 0, 1):
        x, y = tasks.training_batch("span", 1, step, 8)
        assert torch.equal(x, first[step][0]) and torch.equal(y, first[step][1])
    others = [
        tasks.training_batch(*run, 0, 8) for run in (("span", 2), ("copy", 1), ("reverse", 1))
    ]
    assert len({x.numpy().tobytes() for x, _ in first + others}) == 6


def test_training_lengths_are_uniform():
    lengths = []
    for step in range(20):
        _, y = tasks.training_batch("copy", 3, step, 64)
        lengths += ((y >= 0).sum(1) - 1).tolist()
    assert set(lengths) == set(range(1, 21))
    assert 9.5 < statistics.fmean(lengths) < 11.5  # expected 10.5, standard error 0.16


# -----------------------------------------------------------------------------
# Scores.


def oracle(tokens):
    """Logits that name each next token."""
    following = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], EOS)), 1)
    return torch.nn.functional.one_hot(following, KEYS.stop).float()


def always_eos(tokens):
    return oracle(torch.full_like(tokens, EOS))


@pytest.mark.parametrize("task", TASKS)
def test_an_oracle_scores_one_and_a_constant_zero(task):
    correct = tasks.score(oracle, task, 3, CPU)
    assert [record["length"] for record in correct] == list(range(1, TASKS[task].test_length + 1))
    assert all(record["exact"] == record["accuracy"] == 1.0 for record in correct)
    wrong = tasks.score(always_eos, task, 3, CPU)
    assert all(record["exact"] == record["accuracy"] == 0.0 for record in wrong)


@pytest.mark.parametrize("task", TASKS)
def test_one_wrong_token_is_no_exact_match(task):
    """A predictor that is wrong in the first scored token of y alone."""

    def slip(tokens):
        logits = oracle(tokens)
        rows = torch.arange(len(tokens))
        first = (tokens == SEP).int().argmax(1) + (task == "recall")
        logits[rows, first] = logits[rows, first].roll(1, -1)
        return logits

    records = tasks.score(slip, task, 3, CPU)
    assert all(record["exact"] == 0.0 and record["accuracy"] < 1 for record in records)
    if task not in ("majority", "span"):  # whose y is short
        assert records[-1]["accuracy"] > 0.9


def test_teacher_forcing_finds_what_greedy_decoding_finds(make):
    """A model's own greedy answer is all right with teacher forcing; a changed one is not."""
    model = make(pos="rope", vocab_size=20)
    prompt = torch.tensor([[BOS, 3, 1, 2, SEP]])
    answer = torch.cat(list(model.generate(prompt, 6, temperature=0)), 1)

    def predicted(answer):
        return model(torch.cat((prompt, answer), 1)[:, :-1])[:, 4:].argmax(-1)

    assert torch.equal(predicted(answer), answer)
    changed = answer.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 20
    assert not torch.equal(predicted(changed), changed)


@pytest.mark.parametrize("task", TASKS)
def test_contexts_are_the_training_length_or_of_learned_the_tests(task):
    settings = tasks.BUDGETS["try"]["model"]
    for pos in POSITIONS:
        length = TASKS[task].test_length if pos == "learned" else TASKS[task].train_length
        config = tasks.make_config(task, pos, settings)
        assert config.block_size == tasks.max_tokens(task, length) + 2
        assert config.vocab_size == (120 if task == "recall" else 20)


def test_learned_positions_reach_every_test():
    settings = tasks.BUDGETS["try"]["model"]
    model = GPT(tasks.make_config("copy", "learned", settings))
    assert len(tasks.score(model, "copy", 2, CPU)) == 40
    shorter = GPT(GPTConfig(pos="learned", **settings, block_size=80, vocab_size=20))
    with pytest.raises(UserError):
        tasks.score(shorter, "copy", 2, CPU)


# -----------------------------------------------------------------------------
# Results.


def make_records(scores):
    """Records of made-up runs: (task, scheme) -> (within, beyond the training length) by seed."""
    records = []
    for (task, pos), by_seed in scores.items():
        for seed, (within, beyond) in enumerate(by_seed, 1):
            for length in range(1, TASKS[task].test_length + 1):
                exact = beyond if length > TASKS[task].train_length else within
                record = {"task": task, "pos": pos, "seed": seed, "length": length}
                records.append({**record, "exact": exact, "accuracy": 0.5})
    return records


SCHEMES = ["nope", "t5", "rope", "learned"]
SCORES = {
    ("copy", "nope"): [(1, 0.5), (1, 0.7)],
    ("copy", "t5"): [(1, 0.3), (1, 0.5)],
    ("copy", "rope"): [(1, 0.1), (1, 0.3)],
    ("copy", "learned"): [(1, 0), (1, 0.2)],
    ("majority", "nope"): [(1, 0.2)] * 2,
    ("majority", "t5"): [(1, 0.2)] * 2,
    ("majority", "rope"): [(1, 0.9)] * 2,
    ("majority", "learned"): [(1, 0.1)] * 2,
}


def test_scores_are_averaged_within_and_beyond_the_training_length():
    records = make_records(SCORES)
    assert tasks.mean_scores(records, "copy", "nope", True) == pytest.approx({1: 0.5, 2: 0.7})
    assert tasks.mean_scores(records, "copy", "nope", False) == {1: 1, 2: 1}
    line = tasks.score_table(records, ["copy"], SCHEMES, beyond=True)[-1]
    # two seeds 0.2 apart: 12.706 * 0.2 / sqrt(2) / sqrt(2)
    assert line.startswith("| copy | 21 to 40 | 0.600 ± 1.271 | 0.400 ± 1.271 |")


def test_the_papers_ordering_is_judged_on_its_tasks():
    records = make_records(SCORES)
    claim = tasks.judge(records, ["copy", "majority"], SCHEMES)
    assert claim.mean == pytest.approx((0.5 + 0.3 - 0.1 - 0) / 2) and claim.half_width < 1e-9
    assert claim.passed and "mean of copy" in claim.text
    one_seed = make_records({key: by_seed[:1] for key, by_seed in SCORES.items()})
    assert not tasks.judge(one_seed, ["copy"], SCHEMES).passed
    assert tasks.judge(records, ["majority"], SCHEMES) is None
    assert tasks.judge(records, ["copy"], ["nope", "t5", "rope"]) is None


def test_scratchpads_are_compared_with_addition_of_the_same_lengths():
    scores = {
        ("addition-8", "nope"): [(1, 0.1), (1, 0.1)],
        ("addition-8", "rope"): [(1, 0.3), (1, 0.1)],
        ("scratchpad", "nope"): [(1, 0.5), (1, 0.4)],
        ("scratchpad", "rope"): [(1, 0.5), (1, 0.4)],
        ("carries", "nope"): [(1, 0.0), (1, 0.2)],
        ("carries", "rope"): [(1, 0.0), (1, 0.2)],
    }
    records = make_records(scores)
    names = ["addition-8", "scratchpad", "carries"]
    whole, short = tasks.judge_scratchpads(records, names, ["nope", "rope"])
    assert whole.mean == pytest.approx(0.3) and whole.half_width < 1e-9 and whole.passed
    assert short.mean == pytest.approx((-0.2 + 0.1) / 2) and not short.passed
    assert short.text.startswith("carries above addition-8")
    assert tasks.judge_scratchpads(records, ["scratchpad", "copy"], ["nope"]) == []
    assert len(tasks.judge_scratchpads(records, names[:2], ["nope"])) == 1


def test_equal_schemes_share_a_rank():
    """In majority rope is first, nope and t5 share rank 2.5, learned is fourth."""
    ranks = tasks.mean_reciprocal_ranks(make_records(SCORES), ["copy", "majority"], SCHEMES)
    expected = {
        "nope": (1 + 1 / 2.5) / 2,
        "t5": (1 / 2 + 1 / 2.5) / 2,
        "rope": (1 / 3 + 1) / 2,
        "learned": 1 / 4,
    }
    assert ranks == pytest.approx(expected)


def test_tasks_continue_and_refuse_other_settings(call, tmp_path, monkeypatch):
    words = ["--pos=rope,learned", "--tasks=copy,recall", "--steps=4"]
    words = try_words("papers/tasks", tmp_path, *words)
    done = call(*words, "--seeds=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "results/tasks.json").read_text())["records"]
    runs = {(record["task"], record["pos"]) for record in first}
    assert len(runs) == 4 and len(first) == 2 * (40 + 80)
    text = (tmp_path / "results/tasks.md").read_text()
    assert "commit" in text and "| copy | 21 to 40 |" in text and "Recall by the number" in text
    assert (tmp_path / "results/tasks.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.rglob("*.tmp"))

    # The same command trains nothing; one more seed adds to what is there.
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "train", None)
        patched.setattr(report, "import_pyplot", lambda file: None)
        assert call(*words, "--seeds=1").returncode == 0
    assert json.loads((tmp_path / "results/tasks.json").read_text())["records"] == first
    monkeypatch.setattr(report, "import_pyplot", lambda file: None)
    assert call(*words, "--seeds=2").returncode == 0
    second = json.loads((tmp_path / "results/tasks.json").read_text())["records"]
    assert second[: len(first)] == first and len(second) == 2 * len(first)
    assert "±" in (tmp_path / "results/tasks.md").read_text()

    assert_refused(call(*words, "--steps=5"), "other settings")
    assert_refused(call(*words, "--pos=nopes"), "nopes")
    assert_refused(call(*words, "--tasks=copy,cpoy"), "cpoy")
    assert_refused(call(*words, "--seeds=0"), "seeds")
    assert_refused(call(*words, "--pos="), "--pos=nope")


# -----------------------------------------------------------------------------
# Masked language modelling.


@pytest.mark.parametrize("bos", [None, 256])
def test_fifteen_percent_are_masked_and_only_they_are_scored(bos, rng):
    tokens = torch.from_numpy(rng.integers(0, 256, (400, 64)))
    n_maskable = tokens.numel()
    if bos is not None:
        tokens[:, 0] = bos
        tokens[::7, 30] = bos
        n_maskable = int((tokens != bos).sum())
    inputs, targets = masked_lm.mask_tokens(tokens, 257, bos, seed=3)
    masked = inputs == 257
    assert torch.equal(masked, targets >= 0)
    assert torch.equal(targets[masked], tokens[masked])
    assert torch.equal(inputs[~masked], tokens[~masked])
    standard_error = math.sqrt(0.15 * 0.85 / n_maskable)
    assert abs(int(masked.sum()) / n_maskable - 0.15) < 5 * standard_error
    if bos is not None:
        assert not masked[tokens == bos].any()
    assert torch.equal(inputs, masked_lm.mask_tokens(tokens, 257, bos, seed=3)[0])
    assert not torch.equal(inputs, masked_lm.mask_tokens(tokens, 257, bos, seed=4)[0])


@pytest.mark.parametrize("pos", POSITIONS)
def test_a_bidirectional_model_sees_later_tokens(pos, make):
    model = make(pos=pos)
    tokens = torch.arange(20)[None] % 7
    changed = tokens.clone()
    changed[0, 12] = 40
    before = model(tokens)
    assert torch.equal(before[:, :12], model(changed)[:, :12])
    assert not torch.allclose(before[:, 12], model(changed)[:, 12])

    causal = kernels.attention
    with masked_lm.bidirectional():
        change = (model(tokens) - model(changed)).abs().amax(-1)
        assert (change > 1e-6).all()
        first_only = torch.full_like(tokens, -1)
        first_only[0, 0] = 5
        (gradient,) = torch.autograd.grad(model(tokens, first_only), model.embed.weight)
        assert gradient.isfinite().all()

    # Afterwards attention is causal again, also after an error.
    with pytest.raises(ZeroDivisionError), masked_lm.bidirectional():
        raise ZeroDivisionError
    assert kernels.attention is causal and torch.equal(model(tokens), before)


@pytest.mark.parametrize("pos", ["nope", "learned", "sinusoidal", "alibi", "rope"])
def test_without_causality_nope_sees_a_bag_of_tokens(pos, make):
    """Permuted tokens give the same, permuted states, and all masked tokens the same prediction."""
    tokens = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    tokens[0, [4, 11]] = 49  # two mask tokens
    model = make(pos=pos)
    with masked_lm.bidirectional():
        logits = model(tokens)
        permuted = model(tokens[:, order])
    assert torch.allclose(logits[:, order], permuted, atol=1e-4) == (pos == "nope")
    assert torch.allclose(logits[0, 4], logits[0, 11], atol=1e-4) == (pos == "nope")
    causal = model(tokens)  # causal, NoPE can count
    assert not torch.allclose(causal[0, 4], causal[0, 11], atol=1e-4)


def test_without_causality_nope_sees_only_the_proportions_of_tokens(make):
    """A text and the same text twice or three times; causal attention can tell them apart."""
    model = make(pos="nope")
    tokens = torch.tensor([[4, 7, 7, 9, 4, 7, 30, 2]])
    with masked_lm.bidirectional():
        once = model(tokens)
        for times in (2, 3):
            repeated = model(tokens.repeat(1, times))
            assert torch.allclose(repeated, once.repeat(1, times, 1), atol=1e-4)
        more_fours = tokens.where(tokens != 30, 4)  # other proportions
        assert not torch.allclose(model(more_fours)[:, 0], once[:, 0], atol=1e-4)
    causal = model(tokens.repeat(1, 2))
    assert not torch.allclose(causal[:, 8:], causal[:, :8], atol=1e-4)


@pytest.mark.parametrize(
    "objective, fraction", [("causal", (0.99, 1.001)), ("masked", (0.11, 0.19))]
)
def test_the_unigram_loss_is_that_of_the_training_frequencies(objective, fraction, text_data):
    dataset = data.Dataset(text_data)
    stream = np.concatenate([np.asarray(tokens) for tokens in dataset.train.tokens])
    counts = np.array([np.sum(stream == token) + 1 for token in range(257)])
    losses = -np.log(counts / (len(stream) + 257))
    batches = masked_lm.validation_batches(objective, dataset, 32, 3000)
    targets = np.concatenate([y[y >= 0].numpy() for _, y in batches])
    unigram = masked_lm.unigram_loss(objective, dataset, 32, 3000)
    assert unigram == pytest.approx(losses[targets].mean())
    # 93 sequences of 32 tokens, of which one in all is a <bos>
    low, high = fraction
    assert low < len(targets) / 2976 < high


def test_masked_claims_are_paired_by_seed():
    """NoPE's perplexity is more than twice the other's: a difference above ln 2."""
    losses = {"nope": 3.0, "learned": 2.0, "alibi": 2.5}
    records = []
    for pos, loss in losses.items():
        for seed, shared in enumerate((0.0, 1.0, -1.0), 1):
            record = {"pos": pos, "objective": "masked", "seed": seed, "loss": loss + shared}
            records += [record, {**record, "objective": "causal"}]
    learned, alibi = masked_lm.judge(records, list(losses))
    assert learned.mean == 1.0 and learned.half_width == 0 and learned.passed
    assert alibi.mean == 0.5 and not alibi.passed
    one_seed = [record for record in records if record["seed"] == 1]
    assert not masked_lm.judge(one_seed, ["nope", "learned"])[0].passed
    without_nope = [record for record in records if record["pos"] != "nope"]
    assert masked_lm.judge(without_nope, ["learned", "alibi"]) == []

    table = masked_lm.loss_table(records, ["nope"], {"causal": 3.0, "masked": 3.1})
    assert table[2].startswith("| nope | 3.000 ± 2.484 |")  # 4.303 / sqrt(3)
    assert table[3].startswith("| token frequencies only | 3.000 | 20.09 | 3.100 |")


def test_masked_lm_continues_and_refuses_other_settings(call, text_data, tmp_path, monkeypatch):
    words = ["--pos=nope,alibi", "--steps=4", "--max_tokens=2000"]
    words = try_words("papers/masked_lm", tmp_path, *words, text=text_data)
    results = tmp_path / "results/masked_lm.json"
    done = call(*words, "--seeds=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = json.loads(results.read_text())
    assert len({(record["pos"], record["objective"]) for record in first["records"]}) == 4
    assert all(2 < record["loss"] < 7 for record in first["records"])
    assert "more than twice alibi's" in first["orderings"][0]

    with monkeypatch.context() as patched:
        patched.setattr(masked_lm, "train", None)
        assert call(*words, "--seeds=1").returncode == 0
    assert json.loads(results.read_text())["records"] == first["records"]
    assert call(*words, "--seeds=2").returncode == 0
    assert json.loads(results.read_text())["records"][:4] == first["records"]
    assert "±" in (tmp_path / "results/masked_lm.md").read_text()

    assert_refused(call(*words, "--max_tokens=1000"), "other settings")
    assert_refused(call(*words, "--pos=bert"), "bert")
    assert_refused(call(*words, "--seeds=0"), "seeds")
