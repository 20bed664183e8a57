"""Linear attention against its formula in float64, and what it is compared with."""

from importlib.machinery import PathFinder

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from kernel_cases import rotate_by_complex_numbers

from model import POSITIONS
from nanolong.entry import load_entries

FILES = ["examples/schemes/linear_attention.py", "experiments/linear_attention_both.py"]


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES, POSITIONS)


def rotate(x, fraction):
    """RoPE of a fraction of the channels of x (B, H, T, D), with angles t 10000^(-2c/R)."""
    half = int(x.shape[-1] * fraction) // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    return rotate_by_complex_numbers(x, torch.arange(x.shape[-2])[:, None] * frequencies, 1.0)


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_both"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_attention_is_the_formula(name, fraction, make):
    model = make(pos=name, rope_fraction=fraction, n_kv_head=2).double()
    q, k, v = (4 * torch.randn(2, heads, 77, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = {"window": 0, "sinks": 0, "scale": 0.3, "docs": None, "positions": None}
    y = model.pos.attend(q, k, v, torch.arange(77), 0, None, **mask)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (rotate(q, fraction) @ rotate(k, fraction).mT).tril()
    both = name == "linear_attention_both"
    denominator = (weights if both else (q @ k.mT).tril()).sum(-1, keepdim=True)
    assert (denominator.min() < 0) == (both and fraction > 0)
    # In units of the denominator, since a rotated one may be near zero; cos and sin are float32.
    assert ((y * denominator - weights @ v).abs() / (q @ k.mT).sum(-1, keepdim=True)).max() < 1e-4


def test_the_schemes_are_found_where_there_is_an_experiment_called_examples():
    # python experiments/run.py looks in both folders
    spec = PathFinder.find_spec("examples", [str(ROOT), str(ROOT / "experiments")])
    assert spec.submodule_search_locations == [str(ROOT / "examples")]
