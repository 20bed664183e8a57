"""Position schemes: the papers' numbers, distances and the context's end. Their formulas are in
reference.py, and test_reference.py compares with them.
"""

import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from conftest import BUILT_IN

from model import POSITIONS, Context, ContextLengthWarning, GPTConfig
from nanolong.errors import UserError

SCHEMES = sorted(POSITIONS)
ABSOLUTE = ("learned", "sinusoidal")


def make_scheme(pos, **settings):
    defaults = {"n_head": 4, "n_embd": 32, "block_size": 1024}
    return POSITIONS[pos](GPTConfig(pos=pos, **{**defaults, **settings}))


# -----------------------------------------------------------------------------
# Numbers that the papers and their code give.


def bias_of(scheme, n):
    """The bias for n tokens."""
    context = Context()
    context.n = n
    return scheme.bias(None, 0, context)


@pytest.mark.parametrize(
    "length, buckets, last",
    [(1, 2, 1), (8, 2, 1), (64, 16, 15), (100, 25, 24), (128, 32, 31), (1024, 32, 113)],
)
def test_the_last_of_t5s_buckets_starts_within_a_quarter_of_the_length(length, buckets, last):
    """So many buckets, and the distance at which the last one starts. Half hold one distance; the
    others start where they do in T5's own function.
    """
    t5 = make_scheme("t5", block_size=length)
    assert t5.weight.shape == (4, buckets)
    t5.weight.data = torch.arange(float(buckets)).expand(4, -1)
    bucket = bias_of(t5, 4 * length)[0].long().tolist()
    assert len(bucket) == last + 1
    assert bucket == sorted(bucket) and bucket[-1] == buckets - 1 > bucket[-2]
    assert bucket[: buckets // 2] == list(range(buckets // 2))
    if last == 113:
        logarithmic = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
        assert [bucket.index(number) for number in range(16, 32)] == logarithmic


def test_kerple_starts_from_uniform_samples_with_finite_gradients_and_shaw_from_zero():
    torch.manual_seed(0)
    logarithmic = make_scheme("kerple", n_head=1000, head_dim=8)
    power = make_scheme("kerple-power", n_head=1000, head_dim=8)
    for values, top in (
        (F.softplus(logarithmic.r1), 2),
        (F.softplus(logarithmic.r2), 1),
        (F.softplus(power.r1), 1),
        (2 * power.r2.sigmoid(), 2),
    ):
        assert 0 < values.min() < 0.05
        assert 0.95 * top < values.max() <= top
        assert values.mean().item() == pytest.approx(top / 2, rel=0.1)
    for scheme in (logarithmic, power):
        bias_of(scheme, 101).sum().backward()
        assert all(p.grad.isfinite().all() and (p.grad != 0).all() for p in scheme.parameters())
        assert (bias_of(scheme, 1) == 0).all()
    assert all((p == 0).all() for p in make_scheme("shaw").parameters())  # as NoPE


@pytest.mark.parametrize("pos", BUILT_IN)
def test_only_absolute_schemes_notice_that_all_positions_are_shifted(pos, make):
    model = make(pos=pos, block_size=2000)
    tokens = torch.randint(0, 50, (2, 12))
    shifted = model(tokens, positions=torch.arange(12) + 1000)
    same = (model(tokens) - shifted).abs().max() < 1e-4
    assert same == (pos not in ABSOLUTE)


# -----------------------------------------------------------------------------
# Tables: their dtypes, devices and sizes.


def test_transformer_xl_tells_great_distances_apart_under_autocast():
    """In bfloat16, distances above 256 would be merged."""
    xl = make_scheme("xl")
    with torch.autocast("cpu", torch.bfloat16):
        keys = xl.vectors(3000, 1)[0]
    assert keys.dtype == torch.float32
    assert torch.equal(keys, xl.vectors(3000, 1)[0])


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.5, 2, 2.15, 7, 16])
def test_an_exact_multiple_of_the_factor_is_not_rounded_down(factor):
    scheme = make_scheme("shaw")
    scheme.extend("pi", factor)
    exact = Fraction(str(factor))
    index = scheme.distance_index(3000, 129)
    assert index.tolist() == [math.floor(d / exact) for d in range(len(index))]
    assert index[-1] == 128


# -----------------------------------------------------------------------------
# Beyond the context.


@pytest.mark.parametrize("pos", SCHEMES)
def test_beyond_the_context_a_scheme_warns_or_refuses(pos, make):
    model = make(pos=pos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(1, 24, dtype=torch.long))
    tokens = torch.zeros(1, 25, dtype=torch.long)
    if model.scheme.bounded:
        with pytest.raises(UserError, match="no embedding for position 24"):
            model(tokens)
        assert len(list(model.generate(tokens[:, :20], 5))) == 5  # the last is not an input
    else:
        with pytest.warns(ContextLengthWarning, match="context of 24 tokens: extend it by extend"):
            model(tokens)
