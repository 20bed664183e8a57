"""Training in less memory: activation checkpointing, and attention in chunks of queries."""

import pytest
import torch
from conftest import SMALLEST, Operators, logged

import train
from kernels import eager
from model import GPT, POSITIONS, GPTConfig


def count(operators, part):
    """How many operators of the forward pass have this in their name."""
    return sum(part in name and "backward" not in name for name, _ in operators.calls)


def losses(run):
    """(step, training or validation loss) of every line of a run's log."""
    return [(row["step"], row.get("loss", row.get("val_loss"))) for row in logged(run)]


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_all_close(tensors, expected, **tolerance):
    for a, b in zip(tensors, expected, strict=True):
        assert torch.allclose(a, b, **tolerance)


# -----------------------------------------------------------------------------
# Activation checkpointing.


def backward(model, tokens, checkpointing):
    """The loss with all gradients, and the operators of the forward and of the backward pass."""
    model.activation_checkpointing = checkpointing
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    with Operators() as forward_operators:
        loss = model(tokens, tokens, reduction="sum")
    with Operators() as backward_operators:
        loss.backward()
    return [loss.detach(), *gradients_of(model)], forward_operators, backward_operators


# attention without relative vectors or a trained bias, which is a single operator
FUSED = ("nope", "learned", "sinusoidal", "alibi", "sandwich", "rope")


@pytest.mark.parametrize("pos", POSITIONS)
def test_checkpointing_recomputes_blocks_and_keeps_every_bit(pos, make):
    """With dropout; all is computed again in the backward pass, but fused attention."""
    model = make(pos=pos, n_kv_head=2, qk_norm="head", dropout=0.2).train()
    tokens = torch.randint(0, 50, (2, 24))
    expected, _, plain = backward(model, tokens, False)
    results, forward, recomputed = backward(model, tokens, True)
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
    assert (count(plain, "silu"), count(recomputed, "silu")) == (0, 2)  # one in each of two blocks
    if pos in FUSED:
        assert count(forward, "dot_product") == 2
        assert count(recomputed, "dot_product") == 0


@pytest.mark.parametrize("n_layer", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpointed_blocks_can_be_compiled(n_layer, make):
    """In one graph, and with the gradients of the compiled model without checkpointing."""
    model = make(pos="rope", n_layer=n_layer, dropout=0.2).train()
    tokens = torch.randint(0, 50, (2, 24))
    results = []
    for checkpointing in (False, True):
        torch._dynamo.reset()
        model.activation_checkpointing = checkpointing
        model.zero_grad()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        torch.manual_seed(5)  # of dropout
        loss = compiled(tokens, tokens, reduction="sum")
        loss.backward()
        results.append([loss.detach(), *gradients_of(model)])
    assert_all_close(*results, rtol=1e-5, atol=1e-6)


def test_a_run_with_checkpointing_logs_the_same_losses(text_data, tmp_path):
    logs = []
    for checkpointing in (False, True):
        out = tmp_path / f"checkpointing-{checkpointing}"
        places = {"dataset": str(text_data), "out_dir": str(out)}
        settings = {"gradient_accumulation_steps": 2, "checkpoint_activations": checkpointing}
        cfg = train.TrainConfig(**SMALLEST, **places, **settings)
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, dropout=0.2))
        train.train(model, cfg)
        assert model.activation_checkpointing == checkpointing
        logs.append(losses(out))
    assert logs[0] == logs[1]


# -----------------------------------------------------------------------------
# Attention in chunks of queries.


def train_in_chunks(model, tokens, max_scores, monkeypatch):
    """The loss with all gradients, and the bytes that are kept for the backward pass."""
    monkeypatch.setattr(eager, "MAX_SCORES", max_scores)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}  # address -> size

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def give(tensor):
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        loss = model(tokens, tokens)
    loss.backward()
    return [loss.detach(), *gradients_of(model)], sum(kept.values())


@pytest.mark.parametrize("pos", POSITIONS)
def test_attention_in_chunks_keeps_no_scores_for_the_backward_pass(pos, make, monkeypatch):
    """It keeps about as little as fused attention, and the gradients are the same."""
    T = 80
    tokens = torch.randint(0, 50, (1, T))
    model = make(pos="nope", block_size=T)
    _, fused = train_in_chunks(model, tokens, 1 << 24, monkeypatch)
    scores = 2 * T * T * 4  # bytes of float32 (T, T), one in each of two layers

    model = make(pos=pos, window=20, block_size=T)
    expected, at_once = train_in_chunks(model, tokens, 1 << 24, monkeypatch)
    assert at_once >= fused + scores
    for checkpointing in (False, True):
        model.activation_checkpointing = checkpointing
        results, in_chunks = train_in_chunks(model, tokens, 4000, monkeypatch)
        assert in_chunks < fused + scores
        assert_all_close(results, expected, rtol=1e-3, atol=1e-5)
