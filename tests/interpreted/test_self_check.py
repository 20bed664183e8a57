"""kernels/self_check.py and first_call.py with the real kernels, whole and broken.

tests/test_kernels.py runs this file in a process with TRITON_INTERPRET=1; on a GPU it runs, too.
tests/test_first_call.py tests the rest on a fake device.
"""

import importlib.util
import inspect
import sys

import pytest
import torch
from kernel_cases import in_levels

import kernels
from kernels import eager, first_call, flash, rotary
from kernels.self_check import Case, find_fault

DEVICE = torch.empty(0).device  # of this run
slow = pytest.mark.slow

CASES = [
    Case("rope", torch.float32, 16, 2, "", "", 8),
    Case("attention", torch.float32, 16, 1, "table"),
    Case("attention without gradient", torch.bfloat16, 16, 2, "slopes", "window"),
    Case("decoding", torch.float16, 40, 3, "vectors with values", "length"),
]
TERMS = ("no term", "slopes", "table", "vectors with values", "vectors by head with offsets")
MASKS = (
    (torch.float32, "documents"),
    (torch.float16, "window over positions"),
    (torch.bfloat16, "all keys"),
)
# the first third has every kernel with every term and every mask
MORE_CASES = [
    Case(kernel, dtype, 24, 2, term, mask)
    for i in range(3)
    for kernel in ("attention", "decoding")
    for j, term in enumerate(TERMS)
    for dtype, mask in MASKS[(i + j) % 3 :][:1]
]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No verdict is known, and kernels are checked also under the interpreter."""
    monkeypatch.setenv("NANOLONG_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_call, "_faults", {})
    first_call._print_once.cache_clear()
    monkeypatch.setattr(first_call, "_sources", lambda kernel: {"sources": "broken"})


@pytest.mark.parametrize("case", in_levels([*CASES, *MORE_CASES], n_fast=4, n_slow=10), ids=str)
def test_kernels_pass_their_check(case):
    assert find_fault(case, DEVICE) == ""


def edit_flash(monkeypatch, tmp_path, old, new):
    """Replace kernels/flash.py by a copy in which `old` is `new`."""
    source = inspect.getsource(flash)
    assert old in source
    file = tmp_path / "flash.py"
    # operators have names of their own
    file.write_text(source.replace(old, new).replace("nanolong::", f"{tmp_path.name}::"))
    spec = importlib.util.spec_from_file_location("kernels.flash", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "kernels.flash", module)
    monkeypatch.setattr(kernels, "flash", module)


# what is broken, the source and what replaces it, and what is found
BROKEN = [
    ("a scale", "scale * LOG2E,", "scale * LOG2E * 1.05,", "the output"),
    ("a mask", "(at_j <= at_i)", "(at_j <= at_i + 1)", "the output"),
    ("a table's gradient", "grad.copy_(total", "grad.copy_(0 * total", "the gradient of table"),
    ("a wrong row of the bias", "bias_row, x + (BN - 1)", "bias_row, x + BN", "the output"),
    ("a launch that is refused", "B, H, Tq, D = q.shape", "raise ValueError('out')", "ValueError"),
]


@pytest.mark.parametrize(
    "old,new,name",
    [
        *(pytest.param(*edit, id=words) for words, *edit in BROKEN[:3]),
        *(pytest.param(*edit, id=words, marks=slow) for words, *edit in BROKEN[3:]),
    ],
)
def test_broken_attention_is_found_and_replaced(
    old, new, name, fresh, monkeypatch, tmp_path, capfd
):
    edit_flash(monkeypatch, tmp_path, old, new)
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 4, requires_grad=True)
    results = []
    for module in (kernels, eager):
        y = module.attention(q, k, v, bias=table)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v, table))))
    for x, expected in zip(*results, strict=True):
        assert torch.equal(x, expected)
    message = capfd.readouterr().err
    assert message.startswith("attention (float32, head dimension 16, table) is off on ")
    assert name in message and message.count("\n") == 1


def test_broken_rope_is_found_and_replaced(fresh, monkeypatch, capfd):
    """Its backward pass rotates in the wrong direction."""
    right = rotary.rope

    def rope(q, k, cos, sin):
        wrong_q, _ = right(q, k, cos, -sin)
        y, rotated_k = right(q, k, cos, sin)
        return y.detach() + wrong_q - wrong_q.detach(), rotated_k

    monkeypatch.setattr(rotary, "rope", rope)
    q, k = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(2))
    cos, sin = torch.rand(2, 9, 8)
    for x, expected in zip(kernels.rope(q, k, cos, sin), eager.rope(q, k, cos, sin), strict=True):
        assert torch.equal(x, expected)
    assert "the gradient of queries has a relative error of" in capfd.readouterr().err
