"""How kernels are launched, and which attention runs, without a GPU: kernels/flash.py, __init__.py.

A compiled kernel is kept under a key of our own. The test of it asks Triton's launcher what it
compiles a kernel for, and demands that arguments with equal keys are equal to Triton.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

import kernels
from kernels import eager, flash

CPU = torch.device("cpu")


def make_arguments(T=48, H=2, D=16, dtype=torch.bfloat16, bias=None, window=0, docs=None, sinks=0):
    """The arguments of the forward kernel, as launch() passes them."""
    q, k, v = (torch.zeros(2, T, H, D, dtype=dtype).transpose(1, 2) for _ in range(3))
    call = flash.make_call(q, k, v, bias, None, docs, window, sinks, True, 0.5)
    segments = torch.zeros(1, 3, 16, dtype=torch.int32)
    out, lse = flash.empty_results(q)
    return call, flash.per_token(segments), flash.as_rows(out), lse


def shifted(x, n):
    """A copy of a tensor whose first number is n elements after a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 16, dtype=x.dtype)
    skip = -memory.data_ptr() % 16 // x.element_size() + n
    return memory[skip : skip + x.numel()].view(x.shape)


def mutations():
    """Arguments that differ by one thing: a dtype, an alignment, a stride, a size, a None."""
    yield from (make_arguments(T=T) for T in (1, 16, 47, 48, 64))
    yield from (make_arguments(H=1), make_arguments(H=3), make_arguments(D=32), make_arguments(D=1))
    yield from (make_arguments(dtype=x) for x in (torch.float16, torch.float32))
    yield from (make_arguments(bias=torch.zeros(2, *m)) for m in ((), (1,), (16,), (17,)))
    yield make_arguments(bias=torch.zeros(2, 16, dtype=torch.float64))
    yield from (make_arguments(window=n) for n in (1, 15, 16))
    yield from (make_arguments(window=16, sinks=n) for n in (1, 16, 2**31))
    docs = torch.zeros(2, 48, dtype=torch.int32)
    yield from (make_arguments(docs=x) for x in (docs, docs[:1], docs.long()))
    call, segments, out, lse = make_arguments()
    yield call, None, out, lse
    yield call, segments, out, None
    yield from ((call, segments, out, shifted(lse, n)) for n in (1, 3, 4))
    for name, field in zip(call._fields, call, strict=True):
        others = ()
        if isinstance(field, flash.Rows):
            moved = field._replace(ptr=shifted(field.ptr, 1))
            strides = [field._replace(**{axis: n}) for axis in "bht" for n in (1, 7, 2**33)]
            others = (moved, *strides)
        elif isinstance(field, tl.constexpr):
            others = map(tl.constexpr, (True, 1, 2, "tf32x3"))
        elif field is not None:
            others = (None, 1, 1.0, True, 16, 17, 2**40)
        for other in others:
            yield call._replace(**{name: other}), segments, out, lse


def test_kernels_with_equal_keys_are_equal_to_triton():
    kernel = flash._forward_kernel
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    found = {}
    n = 0
    for arguments in mutations():
        _, specialization, _ = bind(*arguments, BM=64, BN=64)
        key = tuple(flash.signature(arguments))
        assert found.setdefault(key, str(specialization)) == str(specialization)
        n += 1
    # and the key is as fine as Triton's: kernels that differ there were among them
    assert n > 90 and len(set(found.values())) > 40


class Kernel:
    """Stands in for a kernel, and for what Triton makes of it: keeps what it is called with."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        def launch(*arguments, **others):
            self.calls.append((grid, arguments, others))
            compiled = Kernel([])
            compiled.calls = self.calls
            return compiled

        return launch


def test_a_kernel_that_has_run_is_launched_directly():
    calls = []
    kernel = Kernel(calls)
    x, y = torch.zeros(4), torch.zeros(8)
    sizes = {"BM": 64, "FLAG": True}
    for arguments in ((x, 3), (y, 3), (x, 4), (shifted(x, 1), 3), (y, 3)):
        flash.run(kernel, x, (2, 1, 1), arguments, sizes, num_warps=4)
    flash.run(kernel, x, (5, 1, 1), (x, 3), sizes, num_warps=8)
    flash.run(kernel, x, (5, 1, 1), (x, 3), {**sizes, "BM": 32}, num_warps=4)
    # 4 and a pointer that is not aligned, other warps and other sizes are other kernels
    by_triton = [bool(others) for _, _, others in calls]
    assert by_triton == [True, False, True, True, False, True, True]
    grid, arguments, others = calls[1]
    assert grid == (2, 1, 1) and arguments[0] is y and arguments[1:] == (3, 64, True)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    assert calls[-1][2] == {"BM": 32, "FLAG": True, **options}


def test_few_compiled_kernels_are_kept():
    before = dict(flash._compiled)
    flash._compiled.clear()
    try:
        kernel = Kernel([])
        for n in range(4100):
            flash.run(kernel, torch.zeros(1), (1, 1, 1), (n,), {})
        assert len(flash._compiled) == 4
    finally:
        flash._compiled.clear()
        flash._compiled.update(before)


# -----------------------------------------------------------------------------
# Which attention runs


@pytest.fixture
def attention_by(monkeypatch):
    """A function of arguments of attention(): "sdpa" or "ours". Triton seems to run on the CPU."""
    monkeypatch.setattr(kernels, "triton_runs", lambda device: True)
    monkeypatch.setattr(flash, "attention", lambda q, k, v, **options: "ours")

    def find(Tq=40, Tk=None, D=16, Hk=2, dtype=torch.bfloat16, grad=True, **options):
        shapes = (4, Tq), (Hk, Tk or Tq), (Hk, Tk or Tq)
        q, k, v = (torch.randn(2, H, T, D, dtype=dtype) for H, T in shapes)
        q.requires_grad_(grad)
        y = kernels.attention(q, k, v, **options)
        return y if isinstance(y, str) else "sdpa"

    yield find
    kernels.use_sdpa(False)


DOCS = torch.zeros(2, 40, dtype=torch.int64)
BY_SDPA = [{}, {"Hk": 4}, {"window": 40}, {"window": 99, "sinks": 3}, {"dtype": torch.float16}]
BY_SDPA += [{"grad": False, "Tq": 128}, {"D": 128}, {"scale": 0.3}]
BY_OURS = [{"bias": torch.zeros(4)}, {"bias": torch.zeros(4, 9)}, {"docs": DOCS}, {"window": 39}]
BY_OURS += [{"gates": torch.zeros(2, 4, 40).double()}, {"return_lse": True}, {"Tk": 41}]
BY_OURS += [{"grad": False}, {"D": 12}, {"D": 136}]
BY_OURS += [{"dtype": torch.float32}]


@pytest.mark.parametrize("case", BY_SDPA + BY_OURS, ids=lambda case: ", ".join(case) or "plain")
def test_sdpa_computes_what_it_can_if_it_may(case, attention_by):
    assert attention_by(**case) == "ours"
    kernels.use_sdpa(True)
    is_sdpas = any(case is other for other in BY_SDPA)
    assert attention_by(**case) == ("sdpa" if is_sdpas else "ours")


def test_sdpa_computes_our_attention(attention_by, rng):
    kernels.use_sdpa(True)
    cases = itertools.product((1, 4), (None, 0.3), (True, False))
    for Hk, scale, causal in cases:
        tensors = [torch.randn(2, H, 33, 24).bfloat16().requires_grad_() for H in (4, Hk, Hk)]
        found = kernels.attention(*tensors, scale=scale, causal=causal)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        exact = eager.attention(*wide, scale=scale, causal=causal)
        dy = torch.randn_like(exact)
        grads = torch.autograd.grad(found, tensors, dy.bfloat16())
        expected = torch.autograd.grad(exact, wide, dy)
        for x, y in zip((found, *grads), (exact, *expected), strict=True):
            assert (x - y).norm() <= 0.02 * y.norm()


def test_blocks_by_index_are_found_once(monkeypatch):
    flash._by_index.clear()
    where = (0, 0, 40, 40, 0, True, 32, 32, False, CPU)
    first = flash.segments_by_index(*where)
    assert flash.segments_by_index(*where) is first and len(flash._by_index) == 1
    assert triton.cdiv(40, 32) == first.shape[1]
