"""Claims that no other experiment tests: the samples of examples, the parts, and the script."""

import json

import pytest
import torch
from try_budget import try_words

import data
from experiments.papers import claims
from experiments.reproduce import SeedRun


@pytest.fixture
def seed_run(text_data, tmp_path):
    """The smallest budget's first seed; nothing is trained yet."""
    cfg = claims.ClaimsConfig(
        budget="try", dataset=str(text_data), runs=str(tmp_path), device="cpu", dtype="float32"
    )
    return SeedRun(cfg, 1, data.Dataset(text_data))


def test_examples_show_the_secret_digit_in_half_of_the_cases():
    x, y = claims.make_examples(40, keys=3, batch_size=500, seed=3)
    assert x.shape == y.shape == (500, 80)
    assert (y[:, 1::2] == -1).all()
    keys, secret = x[:, 0::2] - 10, y[:, 0::2]
    assert keys.min() == 0 and keys.max() == 2
    shown = x[:, 1::2] - 13 - 10 * keys  # after the digits and the keys, ten tokens for each key
    for digits in (secret, shown):
        assert digits.min() == 0 and digits.max() == 9
    for key in range(3):  # one secret digit in a sample, another one in the next
        of_key = secret.float().where(keys == key, torch.nan)
        means = of_key.nanmean(1)
        assert ((of_key - means[:, None]).nan_to_num().abs() < 1e-5).all()
        assert means.unique().numel() == 10
    # right in half of the cases, and by chance in a tenth of the others
    assert (shown == secret).float().mean().item() == pytest.approx(0.55, abs=0.02)
    again, _ = claims.make_examples(40, keys=3, batch_size=500, seed=3)
    other, _ = claims.make_examples(40, keys=3, batch_size=500, seed=4)
    assert torch.equal(x, again) and not torch.equal(x, other)


def test_the_digit_most_shown_is_that_of_the_same_key_before():
    """One key; the digits 7, 4, 4, 4 are shown, and 4 is the secret one."""
    x = torch.tensor([[10, 11 + 7, 10, 11 + 4, 10, 11 + 4, 10, 11 + 4]])
    y = torch.tensor([[4, -1, 4, -1, 4, -1, 4, -1]])
    # nothing is known; 7; 7 or 4; 4
    assert claims.most_shown(x, y, keys=1).tolist() == pytest.approx([0.1, 0, 0.5, 1])
    x, y = claims.make_examples(200, keys=3, batch_size=50, seed=1)
    assert claims.most_shown(x, y, keys=3)[-20:].mean() > 0.99


def test_accuracies_are_those_of_the_digits(seed_run):
    x, y = claims.make_examples(16, keys=3, batch_size=70, seed=1)

    def oracle(tokens):
        """Knows the digits of the first half of the prompt alone."""
        rows = [(x == row).all(1).nonzero()[0, 0] for row in tokens]
        known = y[torch.stack(rows)].clamp(min=0)
        known[:, 16:] = 16
        return torch.nn.functional.one_hot(known, 17).float()

    assert claims.example_accuracy(oracle, seed_run, x, y) == [1.0] * 8 + [0.0] * 8


def test_every_extension_is_tested_on_the_same_samples(seed_run):
    accuracies = claims.example_accuracies(seed_run, "rope")
    assert set(accuracies) == {
        "digit most shown",
        *(f"rope, {name}" for name in claims.EXTENSIONS),
        "rope, yarn, fine-tuned",
    }
    assert {len(values) for values in accuracies.values()} == {48}
    n = claims.EXAMPLES["try"]["examples"]
    assert accuracies["rope, window"][:n] == accuracies["rope, none"][:n]
    assert set(claims.example_accuracies(seed_run, "nope")) == {"nope"}


def test_learned_embeddings_are_interpolated_and_fine_tuned(seed_run):
    losses = seed_run.measure("learned", claims.learned_losses, seed_run)
    steps = ["untouched", *(f"interpolated, {n} steps" for n in (0, 2, 4))]
    assert list(losses) == steps
    assert [len(values) for values in losses.values()] == [1, 2, 2, 2]
    assert losses[steps[1]] != losses[steps[3]]


def test_unrotated_pairs_change_the_loss(seed_run):
    records = claims.unrotated_records(seed_run)
    model = seed_run.text_model()
    losses = seed_run.last_quarter_losses(model, seed_run.length)
    assert records["none"]["loss"] == pytest.approx(sum(losses) / len(losses))
    assert len({record["loss"] for record in records.values()}) == 3
    assert all(0 < record["before"] < 1 for record in records.values())


def test_two_processes_share_the_seeds_and_a_third_collects(call, text_data, tmp_path, monkeypatch):
    words = try_words("papers/claims", tmp_path, text=text_data)
    for seeds in ("--seeds=1", "--seeds=2"):
        done = call(*words, seeds)
        assert done.returncode == 0, done.stderr
    monkeypatch.setattr(claims, "train_examples", None)
    monkeypatch.setattr(SeedRun, "train_model", None)
    done = call(*words, "--seeds=1,2")
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/claims.json").read_text())
    assert list(board["seeds"]) == ["1", "2"]
    assert set(board["seeds"]["1"]) == set(claims.PARTS)
    assert board["seeds"]["1"]["learned"] != board["seeds"]["2"]["learned"]
    assert board["seeds"]["1"]["attention"]["nope"]["divergence"] == pytest.approx(0, abs=1e-5)
    text = (tmp_path / "results/claims.md").read_text()
    for heading in ("More examples in a longer prompt", "Needles by depth", "The leaderboard"):
        assert f"\n## {heading}\n" in text
    assert "±" in text and "13 to 24" in text and "commit" in text
    assert (tmp_path / "results/claims.png").read_bytes()[:4] == b"\x89PNG"
