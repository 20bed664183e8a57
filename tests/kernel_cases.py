"""What the tests of the kernels share: random cases, their comparison with float64, and bounds.

tests/interpreted runs the kernels under Triton's interpreter, or on a GPU, and compares outputs and
gradients with reference.py.
"""

import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch

from kernels import eager, reference

# When a case runs: always, with --all, or only with --exhaustive (make kernels-all).
LEVELS = {"fast": (), "slow": pytest.mark.slow, "exhaustive": pytest.mark.exhaustive}


def at_level(level, *values, id=None):
    """The parameters of a test that runs at one of LEVELS."""
    return pytest.param(*values, marks=LEVELS[level], id=id)


def in_levels(cases, n_fast, n_slow):
    """Cases as parameters: the first n_fast, then n_slow, and the rest only with --exhaustive."""
    params = []
    for i, case in enumerate(cases):
        level = "fast" if i < n_fast else "slow" if i < n_fast + n_slow else "exhaustive"
        values = case if type(case) is tuple else (case,)  # of several parameters, or of one
        params.append(at_level(level, *values))
    return params


class Comparison(NamedTuple):
    """An output or a gradient of a kernel, and how far from float64 it is."""

    name: str
    error: float
    bound: float


def error(x, expected):
    """The relative error."""
    norm = expected.norm().clamp(min=1e-6 * expected.numel() ** 0.5)
    return float((x.detach().double() - expected).norm() / norm)


# -----------------------------------------------------------------------------
# Cases of attention


def pairwise_cases(factors, seed=0, allowed=None):
    """Cases that hold every pair of values of every two factors.

    Found greedily: of 200 random cases the one with the most new pairs. allowed(case) rejects cases
    that would take too long; every pair must be in some case that it accepts.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = set()
    for a, b in itertools.combinations(names, 2):
        missing |= {(a, x, b, y) for x in factors[a] for y in factors[b]}

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    def new_pairs(case):
        return len(pairs(case) & missing)

    while missing:
        first_missing = sorted(missing, key=str)[:40]
        candidates = []
        for _ in range(200):
            a, x, b, y = rng.choice(first_missing)
            case = {name: rng.choice(factors[name]) for name in names}
            case = {**case, a: x, b: y}
            if allowed is None or allowed(case):
                candidates.append(case)
        if not candidates:
            continue
        best = max(candidates, key=new_pairs)
        missing -= pairs(best)
        yield best


def small_case(**changes):
    """More than one tile of 32 x 32, and a partial one, with a cache."""
    return {
        "T": 40,
        "cached": 5,
        "heads": (2, 1),
        "D": 16,
        "m": "5",
        "bias": "none",
        "mask": "causal",
        "gradient": "whole",
        "dtype": "float32",
        "B": 1,
        **changes,
    }


def case_name(case):
    return "-".join(str(x).replace(" ", "") for x in case.values())


# The layouts of queries, keys and values: see random_layout(). In all but the first, each of the
# three has strides of its own.
LAYOUTS = {
    "model": ("model", "model", "model"),
    "contiguous": ("contiguous", "model", "sliced"),
    "sliced": ("sliced", "contiguous", "model"),
    "expanded": ("model", "sliced", "expanded"),
    "odd": ("odd", "model", "contiguous"),
    "transposed": ("contiguous", "odd", "transposed"),
}


def random_layout(layout, B, n, h, D, dtype):
    """Random (B, h, n, D) with the strides that a caller may hand over."""
    if layout == "contiguous":
        return torch.randn(B, h, n, D).to(dtype)
    if layout == "sliced":  # tokens and heads that are parts of a larger tensor
        return torch.randn(B, n + 3, 2 * h, D).to(dtype)[:, 2:-1, ::2].transpose(1, 2)
    if layout == "expanded":  # the same for all heads: stride 0
        return torch.randn(B, n, 1, D).to(dtype).expand(B, n, h, D).transpose(1, 2)
    if layout == "odd":  # no token starts at a multiple of 16 bytes
        return torch.randn(B, n, h, D + 1).to(dtype)[..., 1:].transpose(1, 2)
    if layout == "transposed":  # channels far apart, which the kernels cannot read
        return torch.randn(D, n, h, B).to(dtype).permute(3, 2, 1, 0)
    return torch.randn(B, n, h, D).to(dtype).transpose(1, 2)  # as a model has them


def bias_leaves(bias, H, m, D, dtype):
    """Fresh random parameters of a kind of bias."""
    if bias == "slopes":
        return [torch.rand(H)]
    if bias == "table":
        return [torch.randn(H, m)]
    if bias == "shaw":
        return [torch.randn(1, m, D).to(dtype) for _ in range(2)]
    if bias == "xl":
        return [torch.randn(H, m, D).to(dtype), *(torch.randn(H, D).to(dtype) for _ in range(2))]
    return []


def bias_arguments(bias, leaves):
    """The arguments of attention for a kind of bias with these parameters."""
    if bias in ("slopes", "table"):
        return {"bias": leaves[0]}
    if bias == "shaw":
        return {"relative": (*leaves, None)}
    if bias == "xl":
        return {"relative": (leaves[0], None, tuple(leaves[1:]))}
    return {}


def mask_options(mask, B, Tk):
    """The arguments of a kind of mask; a dict is taken as it is."""
    if isinstance(mask, dict):
        return mask
    steps = torch.randint(1, 4, (B, Tk)).cumsum(1)
    if mask == "window":
        return {"window": random.choice((1, 9, 40, 200))}
    if mask == "sinks":
        return {"window": random.choice((5, 33)), "sinks": random.choice((1, 3, 40))}
    if mask == "docs":
        return {"docs": (torch.rand(B, Tk) < 0.04).cumsum(1)}
    if mask == "sinks and docs":
        docs = (torch.arange(Tk) // 90).expand(B, Tk)
        return {"window": random.choice((20, 70)), "sinks": random.choice((3, 40)), "docs": docs}
    if mask == "positions":
        return {"window": 20, "sinks": 9, "positions": random.choice((steps, steps[0]))}
    if mask == "all keys":
        with_window = {"window": 25, "sinks": 2} if random.random() < 0.5 else {}
        return {"causal": False, **with_window}
    return {}


def random_inputs(T, cached, heads, D, m, bias, mask, dtype, B=0, layout="model", **_):
    """Fresh random inputs of a case: leaves that require a gradient, and the options of a mask.

    And a function from the leaves to (q, k, v) and the arguments for the bias.
    """
    H, Hk = heads
    dtype = getattr(torch, dtype)
    if not B:  # with few rows, one may cancel by chance
        B = 1 if H > 4 else 2
        B = 16 if T == 1 else B
    Tq = T
    Tk = T + cached
    m = {"T": Tk, "more": Tk + 9}[m] if m in ("T", "more") else int(m)
    leaves = []
    for n, h, kind in zip((Tq, Tk, Tk), (H, Hk, Hk), LAYOUTS[layout], strict=True):
        leaves.append(random_layout(kind, B, n, h, D, dtype))
    leaves += bias_leaves(bias, H, m, D, dtype)

    def build(q, k, v, *rest):
        return (q, k, v), bias_arguments(bias, rest)

    return [x.requires_grad_() for x in leaves], build, mask_options(mask, B, Tk)


def output_gradient(kind, shape, dtype):
    """dO with the strides that autograd may hand over."""
    B, H, T, D = shape
    if kind == "expanded":
        dy = torch.randn(B, H, 1, 1).expand(shape)
    elif kind == "transposed":
        dy = torch.randn(D, T, H, B).permute(3, 2, 1, 0)
    elif kind == "sliced":
        dy = torch.randn(B, H, T + 3, 2 * D)[:, :, 2:-1, ::2]
    else:
        dy = torch.randn(shape)
    return dy.to(dtype)


# -----------------------------------------------------------------------------
# Attention compared with float64


ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def attention_errors(case, attention, decode_attention):
    """Compare outputs, log-sum-exps and every gradient of a case with float64, one at a time.

    The error may be twice that of the same formula in PyTorch at that dtype, and a rounding. Few
    queries are also decoded.
    """
    leaves, build, options = random_inputs(**case)
    dtype = leaves[0].dtype
    (q, k, v), bias = build(*leaves)
    y, lse = attention(q, k, v, **bias, **options, return_lse=True)
    assert y.dtype == dtype and y.shape == q.shape
    dy = output_gradient(case["gradient"], y.shape, dtype)
    dlse = torch.randn(lse.shape) * (dtype == torch.float32)
    unused = case["bias"] == "xl"
    results = [y, lse, *torch.autograd.grad((y, lse), leaves, (dy, dlse), allow_unused=unused)]

    def by_formula(dtype):
        copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
        arguments, bias = build(*copies)
        y, lse = reference.attention(*arguments, **bias, **options, return_lse=True)
        out_grads = (dy.to(dtype), dlse.to(dtype))
        grads = torch.autograd.grad((y, lse), copies, out_grads, allow_unused=True)
        return [y.detach(), lse.detach(), *grads]

    exact = by_formula(torch.float64)
    plain = by_formula(dtype)
    rounding = ROUNDING[dtype]
    # A gradient of few numbers, each a sum of large terms of both signs: its size tells little of
    # what was rounded.
    cancels = dtype == torch.float32 and (case["m"] == "1" or case["bias"] == "slopes")
    names = ("y", "lse", "q", "k", "v", "bias", "bias", "bias")
    for name, x, by_pytorch, expected in zip(names, results, plain, exact, strict=False):
        size = expected.numel() ** 0.5
        is_zero = float(expected.norm()) <= 1e-3 * size
        if not is_zero or (dtype == torch.float32 and not (cancels and name == "bias")):
            tolerance = rounding * (100 if cancels and name == "bias" else 1)
            bound = 2 * error(by_pytorch, expected) + tolerance
            yield Comparison(name, error(x, expected), bound)
        else:  # a gradient of zero: there is only rounding to compare
            share = 1e-4 if dtype == torch.float32 else 0.1
            yield Comparison(name, float((x - expected).norm()), share * size)

    if y.shape[2] <= 17:
        with torch.no_grad():
            results = decode_attention(q, k, v, **bias, **options, return_lse=True)
        for name, x, by_pytorch, expected in zip(names, results, plain, exact, strict=False):
            bound = 2 * error(by_pytorch, expected) + rounding
            yield Comparison(f"decoded {name}", error(x, expected), bound)


def clipped_tail_error(attention, H, T, D, fraction=0.3, vectors=False):
    """The gradient of the last entries of a table of zeros, or of vectors, at half precision.

    From an output rounded to 16 bits, delta would have an error that thousands of terms add up. The
    bound is a fraction of what would come of it.
    """
    q, k, v = (torch.randn(2, H, T, D).half().requires_grad_() for _ in range(3))
    v = v + 4  # an output far from zero is rounded coarsely
    bias = torch.zeros(H, 8, D) if vectors else torch.zeros(H, 8)
    dy = torch.randn(2, H, T, D).half()

    def as_arguments(x):
        return {"relative": (x, None, None)} if vectors else {"bias": x}

    bias.requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, k, v, **as_arguments(bias)), bias, dy)

    wide_q, wide_k, wide_v = (x.detach().double() for x in (q, k, v))
    wide_bias = bias.detach().double().requires_grad_()
    y, lse = reference.attention(wide_q, wide_k, wide_v, **as_arguments(wide_bias), return_lse=True)
    (expected,) = torch.autograd.grad(y, wide_bias, dy.double())

    # what rounding the output does to delta, and from there to the gradient
    y, lse = y.detach(), lse.detach()
    delta_error = ((y.half().double() - y) * dy.double()).sum(-1)
    scores = wide_q @ wide_k.mT / D**0.5
    clipped = torch.ones(T, T).tril(-7).double()
    clipped_mass = ((scores.tril() - lse[..., None]).exp() * clipped).sum(-1)
    uncorrected = delta_error * clipped_mass
    if vectors:
        uncorrected = uncorrected[..., None] * wide_q / D**0.5
    uncorrected = uncorrected.sum((0, 2))
    found = float((grad[:, -1] - expected[:, -1]).norm())
    return Comparison("last entries of the bias", found, fraction * float(uncorrected.norm()))


def table_gradient_errors(attention, T, D, m, dtype):
    """A constant in the table changes only the log-sum-exp, so its gradient sums to zero.

    A delta from a rounded output would leave percents: the gradient of the output has the signs of
    the rounding errors, so that they do not cancel, whatever the random inputs.
    """
    q, k, v = (torch.randn(1, 2, T, D).to(dtype).requires_grad_() for _ in range(3))
    table = torch.randn(2, m, requires_grad=True)
    y, lse = attention(q, k, v, bias=table, return_lse=True)
    exact = reference.attention(q.double(), k.double(), v.double(), bias=table.double())
    dy = (y.detach().double() - exact.detach()).sign() * torch.rand(y.shape)
    (grad,) = torch.autograd.grad(y, table, dy.to(dtype))
    assert grad.abs().sum() > 1
    sums = (grad.sum(1).abs() / grad.abs().sum(1).clamp(min=1)).max()
    half = dtype == torch.float16
    yield Comparison("sum of the gradient of the bias", float(sums), 2e-4 if half else 2e-6)
    with torch.no_grad():
        shifted, shifted_lse = attention(q, k, v, bias=table + 3, return_lse=True)
    yield Comparison("y", float((shifted - y).abs().max()), 4e-3 if half else 1e-5)
    yield Comparison("lse", float((shifted_lse - lse - 3).abs().max()), 1e-4)


def valid_length_errors(decode_attention, mask, n, dtype, D=16, capacity=150):
    """decode's length, a tensor: later keys do not exist, whatever is in their memory.

    mask: "none", "sinks", or "all", which adds positions and documents.
    """
    q = torch.randn(2, 4, 1, D).to(dtype)
    k, v = (torch.randn(2, 2, capacity, D).to(dtype) for _ in range(2))
    cache = [torch.cat((x[:, :, :n], torch.full_like(x[:, :, n:], math.nan)), 2) for x in (k, v)]
    index = torch.arange(capacity)
    options = {} if mask == "none" else {"window": 16, "sinks": 2}
    per_key = {}
    if mask == "all":
        per_key["docs"] = (20 - index).clamp(min=0).expand(2, capacity)
        per_key["positions"] = torch.stack(((index - 20).clamp(min=0), index))
    shorter = {name: x[:, :n] for name, x in per_key.items()}
    wide = [x.double() for x in (q, k[:, :, :n], v[:, :, :n])]
    for bias in ("none", "slopes", "table", "shaw", "xl"):
        leaves = bias_leaves(bias, 4, 30 if bias == "shaw" else capacity, D, dtype)
        y, lse = decode_attention(
            q, *cache, **bias_arguments(bias, leaves), **options, **per_key,
            length=torch.tensor([n]), return_lse=True,
        )  # fmt: skip
        wide_bias = bias_arguments(bias, [x.double() for x in leaves])
        exact, exact_lse = reference.attention(
            *wide, **wide_bias, **options, **shorter, return_lse=True
        )
        bound = 1e-6 if dtype == torch.float32 else 1.2e-2
        yield Comparison("decoded y", error(y, exact), bound)
        yield Comparison("decoded lse", error(lse, exact_lse), bound)


# -----------------------------------------------------------------------------
# Rotary embedding

# B, H, Hk, T, D, R
ROTARY_SHAPES = [
    (2, 6, 2, 17, 16, 16),
    (1, 3, 3, 1, 40, 24),
    (2, 5, 1, 130, 64, 64),
    (1, 12, 3, 63, 80, 80),
    (1, 1, 1, 7, 10, 0),
    (3, 4, 4, 33, 128, 2),
    (1, 9, 9, 5, 6, 4),
]
ROTARY_LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROTARY_CASES = list(itertools.product(ROTARY_SHAPES, ROTARY_LIMITS, (False, True)))


def rotary_inputs(B, H, Hk, T, D, R, per_sequence, dtype=torch.float32, layout="model"):
    """Queries and keys, by default as the model has them, views of (B, T, H D), and angles."""
    q, k = (random_layout(layout, B, T, h, D, dtype).requires_grad_() for h in (H, Hk))
    batch = (B,) if per_sequence else ()
    angle = torch.rand(*batch, T, R // 2, dtype=torch.float64) * 1000
    return q, k, angle


def rotate_by_complex_numbers(x, angle, factor):
    """The formula in float64: each pair (c, c + R/2) times factor e^(i angle)."""
    half = angle.shape[-1]
    angle = angle[:, None] if angle.dim() == 3 else angle
    z = torch.complex(x[..., :half], x[..., half : 2 * half])
    z = z * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def rotary_errors(shape, dtype, per_sequence, rotary, layout="model"):
    """Compare outputs and gradients of a shape with float64, one at a time.

    They have at most twice the error of eager.py at that dtype.
    """
    q, k, angle = rotary_inputs(*shape, per_sequence, dtype, layout)
    cos, sin = (angle.cos() * 1.2).float(), (angle.sin() * 1.2).float()  # an attention factor
    outputs = rotary(q, k, cos, sin)
    out_grads = [torch.randn_like(y) for y in outputs]
    grads = torch.autograd.grad(outputs, (q, k), out_grads)
    plain = eager.rope(q, k, cos, sin)
    plain_grads = torch.autograd.grad(plain, (q, k), out_grads)
    for i, x in enumerate((q, k)):
        wide = x.detach().double().requires_grad_()
        expected = rotate_by_complex_numbers(wide, angle, 1.2)
        (expected_grad,) = torch.autograd.grad(expected, wide, out_grads[i].double())
        assert outputs[i].dtype == dtype and outputs[i].is_contiguous()
        assert grads[i].dtype == dtype
        for name, y, plain_y, right in (
            ("qk"[i] + " rotated", outputs[i], plain[i], expected),
            ("qk"[i], grads[i], plain_grads[i], expected_grad),
        ):
            right = right.detach()
            bound = min(2 * error(plain_y, right) + 1e-7, ROTARY_LIMITS[dtype])
            yield Comparison(name, error(y, right), bound)
