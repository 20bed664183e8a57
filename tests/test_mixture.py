"""Mixtures of datasets: their batches, losses and guarantees, and what is refused."""

import math

import numpy as np
import pytest
import torch
from conftest import (
    SMALLEST,
    TINY,
    assert_refused,
    assert_success,
    logged,
    newest,
    write_dataset,
)

import data
import train
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.run import read_meta


@pytest.fixture
def short(tmp_path):
    """A dataset of documents of 40 bytes in capital letters, which real text has few of."""
    rng = np.random.default_rng(0)
    documents = [(256, *rng.integers(65, 91, 40).tolist()) for _ in range(200)]
    ids = [token for document in documents for token in document]
    return write_dataset(tmp_path / "short", ids[: 41 * 150], ids[41 * 150 :])


@pytest.fixture
def mixture(text_data, short):
    """The words of --dataset for 30 % of text and 70 % of capital letters."""
    return f"{text_data}:0.3,{short}:0.7"


def is_short(x):
    """Whether rows of tokens (B, T) are of the dataset of capital letters."""
    return np.isin(x, [*range(65, 91), 256]).all(1)


# -----------------------------------------------------------------------------
# Batches.


def test_each_sequence_is_of_a_dataset_with_its_probability(mixture):
    """The number of 10,000 sequences lies within four standard deviations of the binomial."""
    dataset = data.open_dataset(mixture)
    n = 10_000
    is_text = np.array([dataset.source_of(index, 1) == 0 for index in range(n)])
    assert abs(is_text.sum() - 0.3 * n) < 4 * math.sqrt(n * 0.3 * 0.7)
    pairs = (is_text[1:] & is_text[:-1]).sum()
    assert abs(pairs - 0.09 * n) < 0.02 * n  # neighbours are independent


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_batch_is_a_function_of_seed_and_index(is_mixture, mixture, text_data):
    """Batches read in any order, by an object of their own, are the same; other seeds differ."""
    name = mixture if is_mixture else text_data
    forward, backward = data.open_dataset(name), data.open_dataset(name)
    indices = [0, 3, 511, 512, 2000, 10**9]  # a far epoch costs no more than the first
    batches = {i: forward.batch(i, 8, 16, 5) for i in indices}
    for i in reversed(indices):
        x, y, *_ = batches[i]
        assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (8, 16)
        # the same sequences in micro-batches of another size
        halves = [backward.batch(first, 4, 16, 5) for first in (i, i + 4)]
        again = [np.concatenate(parts) for parts in list(zip(*halves, strict=True))[:2]]
        assert all(map(np.array_equal, (x, y), again))
        if is_mixture:
            sources = [forward.source_of(j, 5) for j in range(i, i + 8)]
            assert (np.array(sources) == is_short(x)).all()
        else:
            assert (x[:, 0] == 256).all() and not (y == 256).any()
    assert not np.array_equal(batches[3][0], forward.batch(3, 8, 16, 6)[0])


def test_each_dataset_is_visited_in_its_own_order(mixture, text_data, short):
    """Sequence i is the one that a run on its dataset alone has at i: in an epoch none is twice."""
    dataset = data.open_dataset(mixture)
    alone = [data.Dataset(text_data), data.Dataset(short)]
    seen = [[], []]
    for index in [*range(300), *range(40_000, 40_300)]:
        source = dataset.source_of(index, 9)
        x, *_ = dataset.training_sequence(index, 16, 9, 0)
        expected, *_ = alone[source].training_sequence(index, 16, 9, 0)
        assert np.array_equal(x, expected)
        if index < 300:
            seen[source].append(alone[source].train.training_location(index, 16, 9))
    # an epoch of capital letters has 384 sequences
    assert all(len(set(places)) == len(places) > 60 for places in seen)


def test_skips_and_choices_of_documents_are_of_every_dataset(mixture):
    dataset = data.open_dataset(mixture)
    _, _, positions, _ = dataset.batch(0, 64, 16, 1, max_position=200)
    shorts = np.array([dataset.source_of(i, 1) for i in range(64)], bool)
    skips = (np.diff(positions) > 1).any(1)
    assert skips[shorts].sum() > 20 and skips[~shorts].sum() > 10

    dataset.select(separate=True)
    assert len(dataset.train) == sum(len(source.train) for source in dataset.sources)
    _, _, _, docs = dataset.batch(0, 4, 16, 1)
    assert docs.shape == (4, 16)
    dataset.select(min_doc=41)
    with pytest.raises(UserError, match="as long as --min_doc"):
        dataset.sources[1].train.require_length(16)


# -----------------------------------------------------------------------------
# Losses.


@torch.no_grad()
def test_validation_losses_of_each_dataset_are_logged(mixture, text_data, short, tmp_path):
    """The first evaluation, computed again on each dataset alone."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape))
    out = tmp_path / "run"
    settings = {**SMALLEST, "batch_size": 8, "gradient_accumulation_steps": 2, "max_iters": 1}
    cfg = train.TrainConfig(dataset=mixture, out_dir=str(out), **settings)

    alone, of_text, n_bytes = [], [], []
    for name in (text_data, short):
        dataset = data.Dataset(name)
        source_settings = {**vars(cfg), "dataset": str(name)}
        source_cfg = train.TrainConfig(**source_settings)
        alone.append(train.estimate_loss(model, dataset, source_cfg)["val_loss"])
        indices = dataset.val.spaced(cfg.eval_iters, 16)
        sequences = [dataset.val.sequence(i, 16) for i in indices]
        x, y = (torch.from_numpy(np.stack(column)) for column in zip(*sequences, strict=True))
        # a byte is a token, and <bos> is none
        of_text.append(model(x, y.where(y < 256, -1), reduction="sum").item() / y.numel())
        n_bytes.append((y < 256).double().mean().item())
    assert min(n_bytes) < 1
    with torch.enable_grad():
        train.train(model, cfg)

    evaluation = logged(out)[0]
    assert [evaluation["val_loss_text"], evaluation["val_loss_short"]] == alone
    assert evaluation["val_loss"] == pytest.approx(0.3 * alone[0] + 0.7 * alone[1], rel=1e-12)
    nats, size = (0.3 * a + 0.7 * b for a, b in (of_text, n_bytes))
    assert evaluation["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_a_mixture_has_the_largest_vocabulary_of_its_datasets(short, tmp_path):
    """Bytes, and ids of an unknown tokenizer, of which no number of bytes is known."""
    wider = write_dataset(tmp_path / "wider", [256, 299] * 60, vocab_size=300, tokenizer=None)
    for words in (f"{short}:0.5,{wider}:0.5", f"{wider}:0.5,{short}:0.5"):
        dataset = data.open_dataset(words)
        assert dataset.vocab_size == data.vocabulary_size(words) == 300
        assert dataset.batch(0, 40, 16, 1)[1].max() == 299
        sums = {
            str(short): data.Sums(2.0, 4.0, 3.0, 2.0),
            str(wider): data.Sums(2.0, 8.0, 0.0, 0.0),
        }
        found = dataset.combine([sums[source.name] for source in dataset.sources])
        assert found == {"val_loss": 3.0, "val_loss_short": 2.0, "val_loss_wider": 4.0}


# -----------------------------------------------------------------------------
# What is refused, and names with colons.


@pytest.mark.parametrize(
    "words, message",
    [
        ("short:0.5,a/short:0.5", "has two folders of the same name"),
        ("unmarked:0.5,short:0.5", "start with tokens None and None, short's with 256"),
        ("brief:0.5,short:0.5", "brief/train.bin holds 5 tokens, too few"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(words, message, short, tmp_path, monkeypatch):
    ids = [256, *b"some text " * 20]
    write_dataset(tmp_path / "a" / "short", ids, ids)
    write_dataset(tmp_path / "unmarked", ids[1:], ids[1:], bos=None, bos_default=False)
    write_dataset(tmp_path / "brief", ids[:5], ids)
    monkeypatch.chdir(tmp_path)
    cfg = train.TrainConfig(dataset=words, out_dir=str(tmp_path / "run"), **SMALLEST)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16))
    with pytest.raises(UserError, match=message):
        train.train(model, cfg)
    assert not (tmp_path / "run").exists()


# -----------------------------------------------------------------------------
# Evaluating and extending what was trained on a mixture.


def test_a_run_on_a_mixture_is_recorded_resumed_scored_and_extended(
    mixture, short, text_data, call, tmp_path
):
    """It goes on with other fractions, but not with other texts."""
    out, extended = tmp_path / "run", tmp_path / "extended"
    train_it = ["train.py", f"--out_dir={out}"]
    words = [*TINY, f"--dataset={mixture}", "--gradient_accumulation_steps=4"]
    printed = assert_success(call(*train_it, *words)).stdout
    assert f"data: {text_data}, 1,229 tokens" in printed  # 0.3 of 8 x 4 x 4 x 32
    assert f"data: {short}, 2,867 tokens (0.47 of an epoch); validation on 8 of" in printed
    meta = read_meta(newest(out))
    assert meta["data_hash"] == ",".join(data.Dataset(name).hash for name in (text_data, short))

    # the report scores each dataset, and attention stays inside documents by default
    words = ["extend.py", out, "--factor=2", "--max_iters=2", "--max_tokens=256", "--device=cpu"]
    done = assert_success(call(*words, f"--out_dir={extended}"))
    for name in (text_data, short):
        rows = [row for row in done.stdout.splitlines() if f"{name}, 32 tokens, last" in row]
        assert [row.count("(") for row in rows] == [1, 2]  # extended, then fine-tuned as well
    assert read_meta(newest(extended))["train"]["dataset"] == mixture
    assert "30% of the training tokens are in documents of at least 64 tokens" in done.stdout
    assert {"val_loss_text", "val_loss_short"} <= logged(extended)[0].keys()

    words = ["evaluate.py", out, "--lengths=32", "--max_tokens=512"]
    assert_refused(call(*words), "is a mixture of datasets", f"or --dataset={short}")
    assert_refused(call(*words, f"--dataset={mixture}"), "is a mixture of datasets")
    done = assert_success(call(*words, f"--dataset={short}"))
    assert f"tokens of {short}" in done.stdout and "note:" not in done.stderr

    resume = [*train_it, "--init_from=resume", "--max_iters=12"]
    assert_refused(call(*resume, f"--dataset={mixture.split(':0.3')[0]}"), "is not the data of")
    other = mixture.replace(":0.3", ":0.5").replace(":0.7", ":0.5")
    assert_success(call(*resume, f"--dataset={other}"))
    data.write_tokens(short / "more_val.bin", [256, *b"OTHER TEXT " * 9], 257)
    done = assert_success(call(*words, f"--dataset={short}"))
    assert "the model may have seen the scored text" in done.stderr + done.stdout


@torch.no_grad()
def test_documents_are_apart_in_validation_too(short, make):
    model = make(vocab_size=257)
    dataset = data.Dataset(short)
    dataset.select(separate=True)
    cfg = train.TrainConfig(**SMALLEST)
    found = train.estimate_loss(model, dataset, cfg)["val_loss"]
    indices = dataset.val.spaced(4, 24)
    sequences = [dataset.val.sequence(i, 24) for i in indices]
    x, y = (torch.from_numpy(np.stack(part)) for part in zip(*sequences, strict=True))
    logits = model(x, docs=(x == 256).cumsum(1)).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, y.flatten(), ignore_index=-1)
    assert found == pytest.approx(expected.item(), rel=1e-5)
