"""Position schemes: the papers' numbers, distances, the context's end, random positions, and what a
GPU would wait for. Their formulas are in reference.py, and test_reference.py compares with them.
"""

import contextlib
import importlib
import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from conftest import BUILT_IN, Operators

from model import POSITIONS, Context, ContextLengthWarning, GPTConfig, NoPE
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


def test_t5_buckets_match_t5s_own_function():
    t5 = make_scheme("t5")
    t5.weight.data = torch.arange(32.0).expand(4, -1)  # a bucket's score is its number
    bucket = bias_of(t5, 500)[0].tolist()
    starts = [bucket.index(number) for number in range(32)]
    logarithmic = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert starts == [*range(16), *logarithmic]
    assert len(bucket) == 114  # constant from 113 on


@pytest.mark.parametrize(
    "length, buckets, last",
    [(1, 2, 1), (8, 2, 1), (64, 16, 15), (100, 25, 24), (128, 32, 31), (511, 32, 112)],
)
def test_the_last_of_t5s_buckets_starts_within_a_quarter_of_the_length(length, buckets, last):
    """So many buckets, and the distance at which the last one starts. Half hold one distance."""
    t5 = make_scheme("t5", block_size=length)
    assert t5.weight.shape == (4, buckets)
    t5.weight.data = torch.arange(float(buckets)).expand(4, -1)
    bucket = bias_of(t5, 4 * length)[0].long().tolist()
    assert len(bucket) == last + 1
    assert bucket == sorted(bucket) and bucket[-1] == buckets - 1 > bucket[-2]
    assert bucket[: buckets // 2] == list(range(buckets // 2))


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


def sinusoids(length, dim=64):
    """The embeddings of the first positions, float64 (length, dim)."""
    sinusoidal = make_scheme("sinusoidal", n_embd=dim)
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


@pytest.mark.parametrize("pos", BUILT_IN)
def test_only_absolute_schemes_notice_that_all_positions_are_shifted(pos, make):
    model = make(pos=pos, block_size=2000)
    tokens = torch.randint(0, 50, (2, 12))
    shifted = model(tokens, positions=torch.arange(12) + 1000)
    same = (model(tokens) - shifted).abs().max() < 1e-4
    assert same == (pos not in ABSOLUTE)


# -----------------------------------------------------------------------------
# Tables: their dtypes, devices and sizes.


@pytest.mark.parametrize("pos", SCHEMES)
def test_constants_keep_their_dtype_and_are_not_saved(pos, make):
    """model.bfloat16() must not round frequencies, slopes or buckets."""
    model = make(pos=pos)
    constants = {name: x for name, x in vars(model.scheme).items() if torch.is_tensor(x)}
    has_none = pos in ("nope", "learned", "shaw", "kerple", "kerple-power", "fox")
    assert pos not in BUILT_IN or bool(constants) != has_none
    model.bfloat16()
    for name, tensor in constants.items():
        assert getattr(model.scheme, name).dtype == tensor.dtype
        assert torch.equal(getattr(model.scheme, name), tensor)
    if pos != "alibi" and pos != "t5" and pos in BUILT_IN:
        assert all(tensor.dtype == torch.float64 for tensor in constants.values())
    saved = {name for name in model.state_dict() if name.startswith("scheme.")}
    assert saved == {f"scheme.{name}" for name, _ in model.scheme.named_parameters()}
    assert model(torch.zeros(1, 5, dtype=torch.long)).dtype == torch.bfloat16
    model.to("meta")
    assert all(getattr(model.scheme, name).is_meta for name in constants)


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


# -----------------------------------------------------------------------------
# Random positions.


@pytest.fixture
def seen(monkeypatch):
    """The position ids that embed() gets, of every scheme, each (T,) or (B, T)."""
    found = []

    def recording(embed):
        def record(self, x, pos):
            found.append(pos)
            return embed(self, x, pos)

        return record

    for scheme in {*POSITIONS.values(), NoPE}:
        if "embed" in vars(scheme):
            monkeypatch.setattr(scheme, "embed", recording(scheme.embed))
    return found


# -----------------------------------------------------------------------------
# What a GPU would wait for. A tensor on the meta device has no values, so reading one raises.


@torch.no_grad()  # with gradients, torch 2.11 keeps the state of random numbers, on the CPU
@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize(
    "pos, method",
    [
        *((pos, None) for pos in SCHEMES),
        *((pos, "pi") for pos in SCHEMES if "pi" in POSITIONS[pos].methods),
        *(("rope", method) for method in ("self-extend", "lm-infinite")),
    ],
)
def test_nothing_is_read_from_the_device_or_computed_elsewhere(pos, method, make, monkeypatch):
    """Default positions, those on the device, and the scheme's tables."""
    importlib.import_module("torch._dynamo")  # it would keep what is set here
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # there is none of meta
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: contextlib.nullcontext())
    model = make(pos=pos)
    if method is not None:
        model.extend(method, 2)
    model.to("meta")
    tokens = torch.zeros(2, 24 if model.scheme.bounded else 60, dtype=torch.long, device="meta")
    positions = torch.arange(tokens.shape[1]).to("meta")
    with Operators() as operators:
        assert model(tokens).is_meta
        assert model(tokens, positions=positions).is_meta
    assert all(x.is_meta for _, tensors in operators.calls for x in tensors if x.dim())
