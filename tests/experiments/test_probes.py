"""Positions in hidden states and attention, and sinks, against formulas."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import data
from experiments import probes, sinks

RANGES = torch.tensor([[4], [16], [64], [256]])  # 1 / m of ALiBi; one is below 24 / 4


def make_arm(model, dataset, name="arm", **runs):
    b = SimpleNamespace(L=24, probe=2)
    arm = SimpleNamespace(name=name, seed=1, b=b, dataset=str(dataset), device="cpu", runs=runs)
    arm.load = lambda: model
    return arm


def without_queries(model):
    """Leave biases and sinks alone in the scores."""
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.q.weight)
    return model


def test_a_probe_finds_what_is_there_and_else_guesses():
    torch.manual_seed(0)
    noise = torch.randn(2, 200, 16, 8)
    assert probes.probe_error(*(noise + 9 * torch.randn(16, 8)), 40, 1) < 0.02
    assert probes.probe_error(*noise, 40, 1) == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_hidden_states_and_losses_after_a_shuffled_prefix(make, text_data):
    dataset, model, seen = data.Dataset(text_data), make(pos="alibi", vocab_size=257), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found = probes.shuffled_prefix(model, dataset, 24, 3)
    x, y = probes.read_spaced(dataset.val, 24, 500)
    _, quarter, _, whole = torch.cat(seen).split(len(x))
    for name, shuffled, end, start in (("quarter", quarter, 18, 18), ("token", whole, 24, 23)):
        assert torch.equal(shuffled.sort(1).values, x.sort(1).values)
        assert (shuffled[:, 0] == 256).all() and torch.equal(shuffled[:, end:], x[:, end:])
        for title, tokens in ((f"last {name}", x), (f"last {name}, shuffled", shuffled)):
            logits = model(tokens)[:, start:].double().flatten(0, 1)
            expected = F.cross_entropy(logits, y[:, start:].flatten(), ignore_index=-1)
            assert found[title] == pytest.approx(expected.item(), rel=1e-6)
    assert (whole != x).float().mean() > 0.5
    states = probes.hidden_states(model, x, layer=2)  # after both blocks
    assert torch.allclose(model.head(model.norm(states)), model(x), atol=1e-4)


def test_attention_of_slopes_alone(make, text_data):
    tokens, _ = probes.read_spaced(data.Dataset(text_data).val, 24, 2)
    nope, alibi = (without_queries(make(pos=pos, vocab_size=257)) for pos in ("nope", "alibi"))
    distance, before, divergence = 0, 0, 0
    for i in range(1, 24):
        steps = torch.arange(i + 1).double()
        p = (-steps / RANGES).softmax(1)
        distance = distance + (p @ steps) / 23
        before = before + p[0, 1] / 23
        mean = p[3] / 2 + 1 / (i + 1) / 2  # nope is uniform, the last slope nearest to it
        divergence += (p[3] * (p[3] / mean).log() - (mean * (i + 1)).log() / (i + 1)).sum() / 46
    expected = [distance.mean().item(), before.item(), abs(distance[0].item() / 4 - 1)]
    assert list(probes.attended(alibi, tokens).values()) == pytest.approx(expected, rel=1e-5)
    assert probes.divergence(nope, alibi, tokens) == pytest.approx(divergence.item(), rel=1e-3)


@pytest.mark.parametrize("half, kept", [("faster", [2, 3]), ("slower", [0, 1])])
def test_an_arm_leaves_half_of_the_pairs_unrotated(half, kept, make, runs, text_data, monkeypatch):
    name = f"rope-{half}-unrotated"
    monkeypatch.setattr(probes, "measure_model", lambda model, *others: (model, others[-1]))
    model, other = probes.measure(make_arm(make(pos="rope"), text_data, name, nope=runs[2]))
    expected = [0.1**i if i in kept else 0 for i in range(4)]
    assert model.pos.inv_freq.tolist() == pytest.approx(expected) and other.config.pos == "alibi"


def test_a_table_of_checkpoints(runs, call):
    done = call("experiments/probes.py", *runs, "--lengths=8,32", "--probe_steps=2")
    table = {line.split(" | ")[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 0 and "| 0.000 | " in table["| divergence at 8"], done.stderr
    assert table["| distance at 32"].count("refused") == 1  # learned positions end at 24


@pytest.mark.parametrize("score, sink", [(-99.0, 0), (99.0, 1)])
def test_attention_to_the_first_token_and_to_a_sink(score, sink, make, text_data):
    model = without_queries(make(pos="alibi", vocab_size=257, sink_scores=True))
    for block in model.blocks:
        torch.nn.init.constant_(block.attention.sink_scores, score)
    p = [(-torch.arange(n) / RANGES).softmax(1)[:, -1].mean() for n in range(13, 25)]
    expected = {"first token": (1 - sink) * sum(p).item() / 12, "sink": sink}
    assert sinks.measure(make_arm(model, text_data)) == pytest.approx(expected, abs=1e-6)
