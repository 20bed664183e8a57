"""What the tests of the kernels share: random cases."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F


def in_levels(cases, n_fast, n_slow):
    """Cases as parameters: the first n_fast run always, then n_slow with --all, and the rest only
    with --exhaustive (make kernels-all).
    """
    params = []
    for i, case in enumerate(cases):
        marks = pytest.mark.slow if i < n_fast + n_slow else pytest.mark.exhaustive
        values = case if type(case) is tuple else (case,)  # of several parameters, or of one
        params.append(pytest.param(*values, marks=() if i < n_fast else marks))
    return params


def error(x, expected):
    """The relative error."""
    norm = expected.norm().clamp(min=1e-6 * expected.numel() ** 0.5)
    return float((x.detach().double() - expected).norm() / norm)


# -----------------------------------------------------------------------------
# Cases of attention


def pairwise_cases(factors):
    """Cases that hold every pair of values of every two factors.

    Found greedily: of 200 random cases always the one with the most new pairs.
    """
    rng = random.Random(0)
    missing = set()
    for a, b in itertools.combinations(factors, 2):
        values = itertools.product(factors[a], factors[b])
        missing |= {((a, x), (b, y)) for x, y in values}

    def new_pairs(case):
        return missing.intersection(itertools.combinations(case.items(), 2))

    while missing:
        some = sorted(missing, key=str)
        candidates = []
        for _ in range(200):
            case = {name: rng.choice(values) for name, values in factors.items()}
            candidates.append({**case, **dict(rng.choice(some))})
        best = max(candidates, key=lambda case: len(new_pairs(case)))
        missing -= new_pairs(best)
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
        "layout": "model",
        "gradient": "contiguous",
        "dtype": "float32",
        "B": 1,
        **changes,
    }


def case_name(case):
    return "-".join(str(x).replace(" ", "") for x in case.values())


LAYOUTS = ("model", "contiguous", "sliced", "expanded", "odd", "transposed")


def random_layout(layout, B, h, n, D, dtype):
    """Random (B, h, n, D) with the strides that a caller, or autograd, may hand over."""
    if layout == "contiguous":
        return torch.randn(B, h, n, D).to(dtype)
    if layout == "sliced":  # tokens and heads that are parts of a larger tensor
        return torch.randn(B, n + 3, 2 * h, D).to(dtype)[:, 2:-1, ::2].transpose(1, 2)
    if layout == "expanded":  # the same for all heads: stride 0
        return torch.randn(B, n, 1, D).to(dtype).expand(B, n, h, D).transpose(1, 2)
    if layout == "constant":  # the gradient of a sum
        return torch.randn(B, h, 1, 1).to(dtype).expand(B, h, n, D)
    if layout == "odd":  # no token starts at a multiple of 16 bytes
        return torch.randn(B, n, h, D + 1).to(dtype)[..., 1:].transpose(1, 2)
    if layout == "transposed":  # channels far apart, which the kernels cannot read
        return torch.randn(D, n, h, B).to(dtype).permute(3, 2, 1, 0)
    return torch.randn(B, n, h, D).to(dtype).transpose(1, 2)  # as a model has them


def bias_leaves(bias, H, m, B, Tk):
    """Fresh random parameters of a kind of bias; gates far into a text, with a model's strides."""
    if bias == "gates":
        steps = F.logsigmoid(torch.randn(B, Tk, H, dtype=torch.float64) + 1)
        return [(steps.cumsum(1) - 12_000).transpose(1, 2)]
    if bias == "slopes":
        return [torch.rand(H)]
    if bias == "table":
        return [torch.randn(H, m)]
    return []


def bias_arguments(bias, leaves):
    """The arguments of attention for a kind of bias with these parameters."""
    if bias in ("slopes", "table"):
        return {"bias": leaves[0]}
    if bias == "gates":
        return {"gates": leaves[0]}
    return {}


def mask_options(mask, B, Tk):
    """The arguments of a kind of mask."""
    if mask == "window":
        return {"window": random.choice((1, 9, 40, 200))}
    if mask == "sinks":
        return {"window": random.choice((5, 33)), "sinks": random.choice((1, 3, 40))}
    if mask == "docs":
        return {"docs": (torch.rand(B, Tk) < 0.04).cumsum(1)}
    if mask == "sinks and docs":
        docs = (torch.arange(Tk) // 90).expand(B, Tk)
        return {"window": random.choice((20, 70)), "sinks": random.choice((3, 40)), "docs": docs}
    if mask == "all keys":
        with_window = {"window": 25, "sinks": 2} if random.random() < 0.5 else {}
        return {"causal": False, **with_window}
    return {}


def random_inputs(T, cached, heads, D, m, bias, mask, dtype, layout, B=0, **_):
    """Fresh random inputs of a case: leaves that require a gradient, and the options of a mask.

    And a function from the leaves to (q, k, v) and the arguments for the bias.
    """
    H, Hk = heads
    dtype = getattr(torch, dtype)
    if not B:  # with few rows, one may cancel by chance
        B = 1 if H > 4 else 2
        B = 16 if T == 1 else B
    Tk = T + cached
    m = {"T": Tk, "more": Tk + 9}[m] if m in ("T", "more") else int(m)
    leaves = [random_layout(layout, B, H, T, D, dtype)]
    leaves += [random_layout(layout, B, Hk, Tk, D, dtype) for _ in range(2)]
    leaves += bias_leaves(bias, H, m, B, Tk)

    def build(q, k, v, *rest):
        return (q, k, v), bias_arguments(bias, rest)

    return [x.requires_grad_() for x in leaves], build, mask_options(mask, B, Tk)
