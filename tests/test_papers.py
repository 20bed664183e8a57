"""What papers say of their formulas, which claims.md lists: sinusoids, and RoPE's scores."""

import math

import pytest
import torch

from model import POSITIONS, Context, GPTConfig


def make_scheme(pos, **settings):
    return POSITIONS[pos](GPTConfig(pos=pos, **settings))


def sinusoids(length, dim=64):
    """The embeddings of the first positions, float64 (length, dim)."""
    sinusoidal = make_scheme("sinusoidal", n_head=1, n_embd=dim)
    embedded = sinusoidal.embed(torch.zeros(1, length, dim), torch.arange(length))[0]
    return embedded.double() / (0.02 * math.sqrt(2))  # the size of a fresh token embedding


def test_the_dot_product_of_sinusoids_is_a_sum_of_cosines_of_the_difference():
    numbers = [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1]
    assert sinusoids(2, 8)[1].tolist() == pytest.approx(numbers, abs=1e-6)
    embedded = sinusoids(200)
    frequency = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    position = torch.arange(200).double()
    difference = position[:, None] - position  # (200, 200)
    expected = (difference[..., None] * frequency).cos().sum(-1)
    assert (embedded @ embedded.T - expected).abs().max() < 1e-4


def test_every_position_has_its_own_sinusoids_and_near_ones_are_alike():
    embedded = sinusoids(200)
    similarity = embedded @ embedded.T
    assert similarity.diagonal().tolist() == pytest.approx([32.0] * 200, abs=1e-4)
    others = similarity - 64 * torch.eye(200)
    assert others.max() < 31  # no two positions share a vector
    assert (others.argmax(1) - torch.arange(200)).abs().max() == 1  # a neighbour is the nearest


@pytest.mark.parametrize("k", [1, 7, 50])
def test_sinusoids_further_on_are_a_linear_function_of_those_here(k):
    """One matrix for all positions: a rotation of each pair of sine and cosine."""
    embedded = sinusoids(200)
    frequency = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    blocks = []
    for angle in (k * frequency).tolist():
        cos, sin = math.cos(angle), math.sin(angle)
        blocks.append(torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64))
    matrix = torch.block_diag(*blocks)
    assert (embedded[:-k] @ matrix.T - embedded[k:]).abs().max() < 1e-5


def rope_scores(q, k, positions):
    """RoPE's scores of the same query and key (D,) at all pairs of positions (T,): (T, T)."""
    T, D = len(positions), len(q)
    rope = make_scheme("rope", n_head=1, n_embd=D, block_size=4096)
    rows = [x.expand(1, 1, T, D) for x in (q, k)]
    context = Context()
    context.pos = positions
    context.tables = rope.tables(context)
    q, k = rope.rotate(*rows, None, 0, context)
    return q[0, 0] @ k[0, 0].T


def test_ropes_score_depends_on_the_difference_of_positions_only():
    """Of "my" and "dog" in "my dog" and in "I walk my dog", and anywhere else."""
    q, k = torch.randn(2, 64)
    positions = torch.arange(40)
    scores = rope_scores(q, k, positions)
    for first in (2, 1000, 3000):  # "I walk" are two words
        assert torch.allclose(rope_scores(q, k, positions + first), scores, atol=1e-3)
    assert scores[1, 0].item() == pytest.approx(scores[3, 2].item(), abs=1e-4)
    assert scores[0].std() > 0.1  # and it does depend on that


def test_ropes_score_of_equal_vectors_fades_with_distance_without_a_cut_off():
    """The query equals the key; the means are over distances from one power of 2 to the next."""
    q = torch.ones(64)
    scores = rope_scores(q, q, torch.arange(2048))[:, 0]
    means = [scores[2**i : 2 ** (i + 1)].mean().item() for i in range(11)]
    assert all(a > b for a, b in zip(means, means[1:], strict=False))
    assert scores.argmax() == 0
    assert means[-1] > 0.1 * scores[0]
