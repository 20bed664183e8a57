"""Linear attention against its formula in float64, and what it is compared with."""

import pytest
import reference
import torch
import torch.nn.functional as F

from model import POSITIONS
from nanolong.entry import load_entries

FILES = ["examples/schemes/linear_attention.py"]


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES, POSITIONS)


def rotate(x, fraction):
    """RoPE of a fraction of the channels of x (B, H, T, D), with angles t 10000^(-2c/R)."""
    half = int(x.shape[-1] * fraction) // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    return reference.rotate(x, torch.arange(x.shape[-2])[:, None] * frequencies)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_attention_is_the_formula(fraction, make):
    model = make(pos="linear_attention", rope_fraction=fraction, n_kv_head=2).double()
    q, k, v = (4 * torch.randn(2, heads, 77, 8, dtype=torch.float64) for heads in (4, 2, 2))
    context = model.make_context(77)
    y = model.scheme.attend(q, k, v, None, 0, context, window=0, sinks=0, scale=0.3)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (rotate(q, fraction) @ rotate(k, fraction).mT).tril()
    denominator = (q @ k.mT).tril().sum(-1, keepdim=True)
    assert (y - weights @ v / denominator).abs().max() < 1e-4  # cos and sin are float32
