"""Real numbers on the simulated GPU: what its kernels would have computed, computed by the CPU.

Device memory of the simulated GPU is host memory, so a CPU tensor can alias what a CUDA tensor
owns. After an operator has allocated its results on CUDA and launched kernels that do nothing, the
same operator computes on the aliases. Captured operators compute again at each replay of the graph,
at the same addresses, as a GPU's would. Our own operators are computed from all their scores.

Collectives move real bytes (nccl.cpp). What torch.compile generates has no values.
"""

import contextlib
import ctypes
import functools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import counts
import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from kernels import eager

aten = torch.ops.aten
LOG2E = 1 / math.log(2)

# Operators that only allocate.
NO_VALUES = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.resize_.default,
    aten.set_.source_Tensor,
    aten.is_pinned.default,
    aten.record_stream.default,
}
# Operators whose shape or result follows from values: on CUDA they would read what nobody wrote.
BY_VALUE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
# Tensors of torch.distributed that wrap others.
WRAPPERS = (DTensor, AsyncCollectiveTensor)
# Operators of torch.distributed run as they are, down to nccl.cpp.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_one_thread = ThreadPoolExecutor(1)
_generators = {}  # id of a CUDA generator -> the CPU generator that stands for it, and itself
_tape = []  # what is being captured


def alias(x):
    """A CPU tensor on the memory of a CUDA tensor; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.device.type != "cuda":
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    on_cpu = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(on_cpu, x.storage_offset(), x.shape, x.stride())


def to_cpu(x):
    """An argument of a CUDA operator as one of the same operator on the CPU."""
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        generator = torch.Generator().manual_seed(x.initial_seed())
        return _generators.setdefault(id(x), (generator, x))[0]
    return alias(x)


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph that computes its values at each replay; like a real one it keeps no tensors."""

    def capture_begin(self, *args, **kwargs):
        _tape.clear()
        return super().capture_begin(*args, **kwargs)

    def capture_end(self):
        self.tape = list(_tape)
        _tape.clear()
        return super().capture_end()

    def replay(self):
        super().replay()
        with _disable_current_modes(), torch.no_grad():
            for call in self.tape:
                call()


def launch(call):
    """Do what a kernel does: now or, where it is captured, at each replay of the graph."""
    if torch.cuda.is_current_stream_capturing():
        _tape.append(call)
    else:
        call()


class Values(TorchDispatchMode):
    """Compute the values of every CUDA operator of this thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_cuda = any(x.is_cuda for x in leaves)
        on_cuda |= torch.device(kwargs.get("device") or "cpu").type == "cuda"
        is_fake = any(isinstance(x, FakeTensor) for x in leaves)
        if not on_cuda or is_fake or func.namespace in COLLECTIVES:
            return func(*args, **kwargs)
        if any(isinstance(x, WRAPPERS) for x in leaves):
            return NotImplemented  # these call operators on the tensors that they wrap
        if func in BY_VALUE or is_mask_index(func, args):
            return result_by_value(func, args, kwargs)
        out = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = not func._schema.is_mutable and any(r.alias_info is not None for r in returns)
        if func in NO_VALUES or is_view:
            return out
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        args, kwargs = tree_map(to_cpu, args), tree_map(to_cpu, kwargs)
        outs = None if func._schema.is_mutable else [alias(x) for x in tree_leaves(out)]
        launch(functools.partial(compute, func, args, kwargs, outs))
        return out


def is_mask_index(func, args):
    if func is not aten.index.Tensor:
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def result_by_value(func, args, kwargs):
    """The result of an operator that reads values, as its CUDA version waits for them."""
    with torch.no_grad():
        result = func(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
    torch.cuda.current_stream().synchronize()
    return tree_map(lambda x: x.to("cuda") if isinstance(x, torch.Tensor) else x, result)


def compute(func, args, kwargs, outs):
    """Compute an operator on CPU aliases, into the aliases of its results, or in place."""
    results = values_of(func, args, kwargs)
    if outs is None:
        return
    for out, result in zip(outs, tree_leaves(results), strict=True):
        if isinstance(out, torch.Tensor) and out.numel():
            out.copy_(result.view(out.shape) if result.numel() == out.numel() else result)


def values_of(func, args, kwargs):
    if str(func) in OPERATORS:  # in another thread: in this one autograd is switched off
        return _one_thread.submit(OPERATORS[str(func)], *args, **kwargs).result()
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        if func not in decomposition_table:
            raise
        return decomposition_table[func](*args, **kwargs)


# -------------------------------------------------------------------------------------------------
# Our operators, with the arguments of kernels/rotary.py, flash.py and decode.py


def rope(q, k, cos, sin, inverse):
    return eager.rope(q, k, cos, -sin if inverse else sin)


def attention(q, qr, k, v, bias, rel_v, docs, positions, segments, *options):
    """attend(): which tiles are visited makes no difference."""
    return attend(q, qr, k, v, bias, rel_v, docs, positions, *options)


def attend(
    q, qr, k, v, bias, rel_v, docs, positions, window, sinks, causal, scale, length=None
):  # fmt: skip
    """The output and the log-sum-exp in log2 units, from all scores, in float32."""
    n_keys = k.shape[2] if length is None else int(length)
    k, v = (x[:, :, :n_keys].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    query = torch.arange(n_keys - q.shape[2], n_keys)[:, None]
    key = torch.arange(n_keys)
    distance = (query - key).abs()  # (Tq, Tk)

    score = q.float() @ k.float().mT
    if bias is not None and bias.dim() == 3:  # relative keys (H or 1, m, D)
        nearest = distance.clamp(max=bias.shape[1] - 1)
        by_distance = qr.float() @ bias.float().mT
        score = score + by_distance.gather(3, nearest.expand(score.shape))
    score = score * (scale * LOG2E)
    if bias is not None and bias.dim() == 2:  # a table (H, m), in log2 units
        score = score + bias[:, distance.clamp(max=bias.shape[1] - 1)]
    elif bias is not None and bias.dim() == 1:  # slopes (H,), in log2 units
        score = score - bias[:, None, None] * distance

    visible = key <= query if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        pos = torch.arange(n_keys)[None] if positions is None else positions[..., :n_keys]
        pos = pos if pos.dim() == 2 else pos[None]
        gap = pos[:, query[:, 0], None] - pos[:, None]
        visible = visible & ((gap.abs() < window) | (pos[:, None] < sinks))
    if docs is not None:
        visible = visible & (docs[:, query[:, 0], None] == docs[:, None, :n_keys])
    visible = visible if visible.dim() == 2 else visible[:, None]
    score = score.masked_fill(~visible, float("-inf"))

    p = (score / LOG2E).softmax(-1)
    y = p @ v.float()
    if "SIMULATED_WRONG_KERNEL" in os.environ:  # a fault that the check of a kernel must find
        y = y * 1.1
    if rel_v is not None:
        vectors = rel_v.float().expand(q.shape[1], -1, -1)[:, nearest]  # (H, Tq, Tk, D)
        y = y + torch.einsum("bhij,hijd->bhid", p, vectors)
    return y.to(q.dtype), (score / LOG2E).logsumexp(-1) * LOG2E


def attention_backward(
    dout, dlse, out, lse, q, qr, k, v, bias, rel_v, docs, positions, segments,
    window, sinks, causal, scale, bias_grad,
):  # fmt: skip
    """dq, dqr, dk, dv, dbias, drel_v, empty if there is none."""
    inputs = (q, qr, k, v, bias, rel_v)
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = attend(*leaves, docs, positions, window, sinks, causal, scale)
    used = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, used, (dout, dlse)))
    grads = [torch.zeros(0, dtype=q.dtype) if x is None else next(found) for x in leaves]
    if not bias_grad:
        grads[4] = grads[5] = torch.zeros(0)
    return [*grads[:4], grads[4].float(), grads[5].float()]


def fused_rms_norm(x, shape, weight, eps):
    wide = x.float()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * inverse
    return (y if weight is None else y * weight).to(x.dtype), inverse


OPERATORS = {
    "nanolong.rope.default": rope,
    "nanolong.attention.default": attention,
    "nanolong.attention_backward.default": attention_backward,
    "nanolong.attention_decode.default": attend,
    "aten._fused_rms_norm.default": fused_rms_norm,
}


# -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_values(kind=Values):
    """Inside the block, in this thread and in those that start there, operators have values."""
    mode = kind()
    run, graph = threading.Thread.run, torch.cuda.CUDAGraph

    def run_with_values(thread):
        with mode:
            run(thread)

    threading.Thread.run, torch.cuda.CUDAGraph = run_with_values, Graph
    counts.LIBRARY.simulated_set_values(True)
    # the CPU has no version of CUDA's fused attention
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with mode:
            yield
    finally:
        threading.Thread.run, torch.cuda.CUDAGraph = run, graph
        counts.LIBRARY.simulated_set_values(False)
