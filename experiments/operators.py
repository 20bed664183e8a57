"""Benchmarks of the operators alone, for bench.py: cases, other implementations, and kernels.

Of causal attention half of the products are counted.
"""

import functools
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import kernels
from experiments.turns import clock_call, clock_graph, compare, with_backward
from kernels import reference
from nanolong.errors import require

# -----------------------------------------------------------------------------
# Attention by PyTorch


def plain_attention(q, k, v, bias=None):
    """Compute SDPA with the bias as its mask."""
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    added = -bias[:, None, None] * distance if bias.dim() == 1 else bias[:, distance.clamp(0)]
    mask = added.masked_fill(distance < 0, -torch.inf)[None].to(q.dtype)  # (1, H, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_by(backend, q, k, v):
    """Compute SDPA by one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


cudnn_attention = functools.partial(attention_by, SDPBackend.CUDNN_ATTENTION)


def flex_attention(q, k, v, bias=None, gates=None, docs=None, window=0, scale=None):
    """Compute FlexAttention, compiled on a GPU, with the bias or the gates as its score_mod.

    Its mask of blocks is made once for the same documents, a window and a length.
    """
    blocks = visible_blocks(q.shape[2], docs, window, q.device)
    attend = compiled_flex_attention() if q.is_cuda else compute_flex_attention
    gates = None if gates is None else gates.float()
    return attend(q, k, v, bias, gates, blocks, scale)


def compute_flex_attention(q, k, v, bias, gates, blocks, scale):
    def add_slope(score, b, h, i, j):
        return score - bias[h] * (i - j)

    def add_entry(score, b, h, i, j):
        return score + bias[h, (i - j).clamp(min=0, max=bias.shape[1] - 1)]

    def add_gates(score, b, h, i, j):
        return score + gates[b, h, i] - gates[b, h, j]

    added = None
    if gates is not None:
        added = add_gates
    elif bias is not None:
        added = add_slope if bias.dim() == 1 else add_entry
    grouped = q.shape[1] != k.shape[1]
    return flex.flex_attention(q, k, v, added, blocks, scale=scale, enable_gqa=grouped)


@functools.cache
def compiled_flex_attention():
    # a term, a mask and a length each are compiled
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(compute_flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache(maxsize=1)
def visible_blocks(T, docs, window, device):
    def is_visible(b, h, i, j):
        seen = i >= j
        if window:
            seen = seen & (i - j < window)
        return seen if docs is None else seen & (docs[b, i] == docs[b, j])

    batch = None if docs is None else len(docs)
    return flex.create_block_mask(is_visible, batch, None, T, T, device=device)


def peer_attention(
    q, k, v, *, bias=None, gates=None, docs=None, window=0, sinks=0, scale=None,
    shared=None,
):  # fmt: skip
    """Compute kernels.attention() of a training step by SDPA, or FlexAttention if it has a term."""
    assert not sinks, "no peer has these"
    q, k = q.to(v.dtype), k.to(v.dtype)
    window = 0 if window >= k.shape[2] else window
    if bias is None and gates is None and docs is None and not window:
        options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    return flex_attention(q, k, v, bias, gates, docs, window, scale)


# -----------------------------------------------------------------------------
# Operators. Their cases: name, arguments, options, work, its unit, and with the backward pass how
# many times as much.


def time_operators(cfg, device):
    """Operators on random tensors, forward without gradients, and forward with backward: in
    bfloat16 by triton.testing.do_bench on a GPU, in float32 by torch.utils.benchmark on a CPU,
    where ours are plain PyTorch, too. On a GPU attention is compared with FlexAttention and cuDNN,
    where they have the term. The time of Python counts."""
    attention = (plain_attention, kernels.attention, attention_cases(cfg, device))
    loss = (reference.linear_cross_entropy, kernels.linear_cross_entropy, loss_cases(cfg, device))
    rope = (reference.rope, kernels.rope, rope_cases(cfg, device))
    for plain, ours, cases in (rope, attention, loss):
        for case, arguments, options, work, unit, both in cases:
            functions = {"plain PyTorch": plain, "ours": ours}
            if device.type == "cuda" and plain is plain_attention:
                functions["FlexAttention"] = flex_attention
                functions |= {} if options else {"cuDNN": cudnn_attention}
            for direction, times in (("forward", 1), ("forward + backward", both)):
                clocks = {}
                for name, function in functions.items():
                    run = functools.partial(function, *arguments, **options)
                    call = with_backward(run, times > 1)
                    clocks[name] = functools.partial(clock_call, call, device)
                names = (ours.__name__, f"{direction}, {case}")
                yield compare(*names, clocks, cfg.rounds, times * work, unit)


def random(device, *shape, dtype=None):
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def rope_cases(cfg, device):
    B, T = {"cuda": (8, 4096), "cpu": (2, 1024), "toy": (1, 32)}[cfg.scale(device)]
    for H, Hk, D in ((12, 12, 64), (16, 4, 128)):
        # views of (B, T, H, D), which the projections leave
        q, k = (random(device, B, T, heads, D).transpose(1, 2) for heads in (H, Hk))
        angle = torch.rand(T, D // 2, device=device) * 1000
        gigabytes = 2 * (q.numel() + k.numel()) * q.element_size() / 1e9
        case = f"{B} x {H}/{Hk} heads x {T} x {D}"
        yield case, (q, k, angle.cos(), angle.sin()), {}, gigabytes, "GB/s", 2


LENGTHS = {"cuda": (1024, 4096, 16384), "cpu": (256, 1024), "toy": (48,)}


def attention_cases(cfg, device, terms=None, D=64):
    """terms: the names of some; by default all."""
    scale = cfg.scale(device)
    H = 2 if scale == "toy" else 12
    for T in cfg.lengths or LENGTHS[scale]:
        B = max(1, 16384 // T) if scale == "cuda" else 1
        q, k, v = (random(device, B, T, H, D).transpose(1, 2) for _ in range(3))
        options = {
            "no term": {},
            "slopes": {"bias": 2.0 ** -torch.arange(1, H + 1, device=device)},
            "table": {"bias": random(device, H, T, dtype=torch.float32)},
        }
        for term in terms or options:
            case = f"{term}, {B} x {H} heads x {T} x {D}"
            yield case, (q, k, v), options[term], 2 * B * H * T * T * D / 1e9, "GFLOP/s", 3.5


def loss_cases(cfg, device):
    sizes = ((96, 16, 97),) if cfg.toy else ((512, 256, 50304), (4096, 192, 257))
    for N, C, V in sizes:
        N *= 16 if device.type == "cuda" else 1
        targets = torch.randint(V, (N,), device=device)
        arguments = (random(device, N, C), random(device, V, C), targets)
        yield f"{N} tokens of {V}, width {C}", arguments, {}, 2 * N * C * V / 1e9, "GFLOP/s", 3


# -----------------------------------------------------------------------------
# The kernels of attention alone, by their launches


class Recorder:
    """Takes the place of a kernel in flash.launch(): launches it, and keeps its first launch."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            again = functools.partial(self.kernel[grid], *arguments, **options)
            self.launches.setdefault(self.name, again)
            return again()

        return launch


def launches_of(arguments, options):
    """The launches of kernels.attention() and its backward pass, by the names of flash.KERNELS."""
    from kernels import flash

    launches = {}
    launch = flash.launch

    def record(kernel, name, *others):
        launch(Recorder(kernel, name, launches), name, *others)

    with mock.patch.object(flash, "launch", record):
        with_backward(functools.partial(kernels.attention, *arguments, **options))()
    return launches


def time_kernels(cfg, device):
    """Attention without the time of Python: captured in a CUDA graph and replayed. Ours: the
    launches of its kernels, together and each alone."""
    repair = "run it on a GPU, or with TRITON_INTERPRET=1 in front of the command"
    require(kernels.triton_runs(device), f"no kernel of Triton runs on a {device.type}: {repair}")
    clock = functools.partial(functools.partial, clock_graph, device=device)
    terms = ("table",) if cfg.toy else None
    for case, arguments, options, work, unit, both in attention_cases(cfg, device, terms):
        functions = {"FlexAttention": flex_attention}
        if not options:
            functions = {"SDPA": plain_attention, "cuDNN": cudnn_attention} | functions
        launches = launches_of(arguments, options)
        for direction, times in (("forward", 1), ("forward + backward", both)):
            clocks = {}
            for name, function in functions.items():
                run = functools.partial(function, *arguments, **options)
                clocks[name] = clock(with_backward(run, times > 1))
            ours = [launches["forward"]] if times == 1 else list(launches.values())
            clocks["ours"] = clock(functools.partial(call_all, ours))
            names = ("attention", f"{direction}, {case}")
            yield compare(*names, clocks, cfg.rounds, times * work, unit)
        clocks = {name: clock(again) for name, again in launches.items()}
        yield compare("each kernel", case, clocks, cfg.rounds, 1, "launches/s")


def call_all(functions):
    for function in functions:
        function()
