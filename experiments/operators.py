"""Benchmarks of the operators alone, for bench.py: cases, other implementations, kernels and tiles.

Of causal attention half of the products are counted.
"""

import contextlib
import functools
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import kernels
from experiments.turns import (
    clock_call,
    clock_graph,
    compare,
    deterministic,
    single_row,
    with_backward,
)
from kernels import eager, reference
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
flash_attention_2 = functools.partial(attention_by, SDPBackend.FLASH_ATTENTION)


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
    q, k, v, *, bias=None, gates=None, docs=None, window=0, sinks=0, positions=None, scale=None,
    shared=None,
):  # fmt: skip
    """Compute kernels.attention() of a training step by SDPA, or FlexAttention if it has a term."""
    assert not sinks and positions is None, "no peer has these"
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


def attention_cases(cfg, device, D=64, terms=None):
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


class Launch(NamedTuple):
    """A launch of a Triton kernel, to be repeated."""

    kernel: Any
    grid: tuple
    arguments: tuple
    options: dict

    def __call__(self, **others):
        """Launch it, with other options of compilation. Returns the compiled kernel."""
        return self.kernel[self.grid](*self.arguments, **(self.options | others))

    def compile(self, **others):
        """Compile it as __call__() would, and launch nothing."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **(self.options | others))


class Recorder:
    """Takes the place of a kernel in flash.launch(): launches it, and keeps its first launch."""

    def __init__(self, kernel, name, launches):
        self.kernel = kernel
        self.name = name
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.setdefault(self.name, Launch(self.kernel, grid, arguments, options))
            return self.kernel[grid](*arguments, **options)

        return launch


def launches_of(arguments, options, tiles=None):
    """The launches of kernels.attention() and its backward pass, by the names of flash.KERNELS.

    tiles: flash.Tile by name; flash.py has the others.
    """
    from kernels import flash

    launches = {}
    launch, tile_for = flash.launch, flash.tile_for

    def record(kernel, name, *tensors, **sizes):
        launch(Recorder(kernel, name, launches), name, *tensors, **sizes)

    def chosen_tile(q, kind, name):
        return (tiles or {}).get(name) or tile_for(q, kind, name)

    call = with_backward(functools.partial(kernels.attention, *arguments, **options))
    with mock.patch.object(flash, "launch", record):
        with mock.patch.object(flash, "tile_for", chosen_tile):
            call()
    return launches


class LaunchClock:
    """Clocks some launches without Python; its note has the registers of the first one.

    find: returns the launches, when the clock is first called; others: options of compilation.
    """

    def __init__(self, find, device, **others):
        self.find = functools.cache(find)
        self.device = device
        self.others = others
        self.note = ""

    def __call__(self):
        launches = self.find()
        if self.device.type == "cuda" and not self.note:
            compiled = launches[0](**self.others)
            shared = compiled.metadata.shared / 1024
            spilled = f"{compiled.n_spills} spilled, {shared:.0f} KiB"
            self.note = f"{compiled.n_regs} registers, {spilled}"

        def run():
            for launch in launches:
                launch(**self.others)

        return clock_graph(run, self.device)


def require_kernels(device):
    repair = "run it on a GPU, or with TRITON_INTERPRET=1 in front of the command"
    require(kernels.triton_runs(device), f"no Triton kernel runs on this {device.type}: {repair}")


def time_kernels(cfg, device):
    """Attention without the time of Python: captured in a CUDA graph and replayed. Ours: the
    launches of its kernels, together and each alone, with registers, spilled bytes and shared
    memory of a program. FlashAttention-2 is asked for a deterministic backward pass."""
    require_kernels(device)
    terms = ("table",) if cfg.toy else ("no term", "slopes", "table")
    for case, arguments, options, work, unit, both in attention_cases(cfg, device, terms=terms):
        functions = {"FlexAttention": flex_attention}
        if not options:
            functions = {"SDPA": plain_attention, "cuDNN": cudnn_attention} | functions
            functions["FlashAttention-2"] = flash_attention_2
        find = functools.cache(functools.partial(launches_of, arguments, options))
        for direction, times in (("forward", 1), ("forward + backward", both)):
            clocks = {}
            for name, function in functions.items():
                run = functools.partial(function, *arguments, **options)
                call = with_backward(run, times > 1)
                clocks[name] = functools.partial(clock_graph, call, device)
                if name == "FlashAttention-2":
                    clocks[name] = functools.partial(clock_deterministic, clocks[name])
            ours = functools.partial(chosen_launches, find, times > 1)
            clocks["ours"] = LaunchClock(ours, device)
            yield compare(
                "attention", f"{direction}, {case}", clocks, cfg.rounds, times * work, unit
            )
        clocks = {}
        for name in find():
            clocks[name] = LaunchClock(functools.partial(one_launch, find, name), device)
        yield compare("each kernel", case, clocks, cfg.rounds, 1, "launches/s")


def chosen_launches(find, has_backward):
    """The launches of find(), or the forward pass's alone, in a list."""
    return [launch for name, launch in find().items() if has_backward or name == "forward"]


def one_launch(find, name):
    return [find()[name]]


def clock_deterministic(clock):
    with deterministic(True):
        return clock()


# -----------------------------------------------------------------------------
# Tiles

# Queries, keys, warps and stages.
TILES = ((32, 32, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 1), (64, 64, 4, 2))
TILES += ((64, 64, 4, 3), (64, 64, 8, 1), (64, 128, 4, 2), (64, 128, 8, 2), (128, 32, 4, 3))
TILES += ((128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))
TOY_TILES = ((32, 32, 4, 1), (64, 32, 4, 1))


def time_tiles(cfg, device):
    """Each kernel of attention alone, without Python, and all of them at once, by tiles: the first
    row has the tile of kernels/flash.py. Most of the time is Triton's compiler."""
    from kernels import flash

    require_kernels(device)
    cases = (case for D in (64, 128) for case in attention_cases(cfg, device, D))
    for case, arguments, options, *_ in cases:
        # the sweep is for tables
        names = flash.KERNELS if case.startswith("table") else flash.KERNELS[:-1]
        for kernel in (*names, "all"):
            clocks = {"now": LaunchClock(find_tile(arguments, options, kernel, {}), device)}
            for tile in TOY_TILES if cfg.toy else TILES:
                if tile[0] == tile[1] or kernel not in ("sweep", "all"):
                    changed = names if kernel == "all" else (kernel,)
                    tiles = dict.fromkeys(changed, flash.Tile(*tile))
                    find = find_tile(arguments, options, kernel, tiles)
                    clocks[str(tile)] = LaunchClock(find, device)
            yield compare(kernel, case, clocks, cfg.rounds, 1, "launches/s")


def find_tile(arguments, options, kernel, tiles):
    """Return a function that returns the launches of one kernel, or of "all", with these tiles."""

    def find():
        launches = launches_of(arguments, options, tiles)
        return list(launches.values()) if kernel == "all" else [launches[kernel]]

    return find


REGISTERS = (128, 168)  # the most that a thread may use; without a limit the compiler decides
WORKERS = 8  # threads that compile


def time_registers(cfg, device):
    """Each kernel of attention alone, without Python, at tiles of 64 x 64 with four warps: by
    stages of software pipelining, and the most registers of a thread (Triton's maxnreg)."""
    from kernels import flash

    require_kernels(device)
    cfg = replace(cfg, lengths=cfg.lengths or ((48,) if cfg.toy else (1024,)))
    tiles = dict.fromkeys(("forward", "dq", "dkdv"), flash.Tile(64, 64, 4, 2))
    others = {}
    for stages, registers in itertools.product((1, 2, 3), (None, *REGISTERS)):
        words = f"{stages} stages" + (f", {registers} registers" if registers else "")
        others[words] = {"num_stages": stages} | ({"maxnreg": registers} if registers else {})
    terms = ("table",) if cfg.toy else ("no term", "slopes", "table")
    cases = attention_cases(cfg, device, terms=terms)
    for case, arguments, options, *_ in cases:
        launches = launches_of(arguments, options, tiles)
        if device.type == "cuda":
            precompile([launches[kernel] for kernel in tiles], others.values())
        for kernel in tiles:
            find = functools.partial(list, [launches[kernel]])
            clocks = {name: LaunchClock(find, device, **how) for name, how in others.items()}
            yield compare(kernel, case, clocks, cfg.rounds, 1, "launches/s")


def precompile(launches, others):
    """Compile each launch with each of the other options, several at a time; what fails is compiled
    again, and its error shown, when it is timed.
    """

    def compile_one(pair):
        launch, options = pair
        with contextlib.suppress(Exception):
            launch.compile(**options)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(compile_one, itertools.product(launches, others)))


# -----------------------------------------------------------------------------
# The loss

LOSS_SIZES = {"cuda": (16384, 768, 50304), "cpu": (1024, 256, 8192), "toy": (96, 16, 97)}
LOSS_ROWS = {"cuda": (640, 2560, 5632, 8192, 16384), "cpu": (256, 1024), "toy": (32, 96)}


def time_loss(cfg, device):
    """The loss with gradients, not compiled, by the tokens of a chunk: the head's gradient added up
    in float32 by the product itself, or a product in the dtype of the logits and an add. Then the
    products alone. First its numbers are compared with float64."""
    scale = cfg.scale(device)
    N, C, V = LOSS_SIZES[scale]
    row, fault = check_add_product(device, min(N, 2048), C, V)
    yield [row]
    targets = torch.randint(V, (N,), device=device)
    x, weight = random(device, N, C), random(device, V, C)
    unit = "TFLOP/s"
    for rows in LOSS_ROWS[scale]:
        chunks = [slice(i, i + rows) for i in range(0, N, rows)]
        run = functools.partial(kernels.linear_cross_entropy, x, weight, targets)
        call = with_backward(run)
        clocks = {}
        for name, add in (("float32", eager.add_product), ("a product and an add", add_rounded)):
            how = (call, device, chunks, add)
            clocks[name] = functools.partial(clock_loss, *how)
        plain = with_backward(functools.partial(eager.linear_cross_entropy, x, weight, targets))
        how = (plain, device, chunks, eager.add_product)
        clocks["float32, without the kernel"] = functools.partial(clock_loss, *how)
        work = 6 * N * C * V / 1e12
        yield compare("the loss", f"{rows} of {N} tokens", clocks, cfg.rounds, work, unit)
        a, b = x[:rows].detach(), torch.randn(rows, V, device=device, dtype=x.dtype)
        w, total = weight.detach(), torch.zeros(V, C, device=device)
        products = {
            "logits": functools.partial(torch.mm, a, w.t()),
            "gradient of the input": functools.partial(torch.mm, b, w),
            "gradient of the weight": functools.partial(torch.mm, b.t(), a),
            "the same, added up in float32": functools.partial(eager.add_product, total, b, a),
        }
        clocks = {name: functools.partial(clock_graph, f, device) for name, f in products.items()}
        work = 2 * rows * C * V / 1e12
        yield compare("a product", f"{rows} tokens", clocks, cfg.rounds, work, unit)
    require(not fault, f"{fault}: kernels/eager.py is wrong on this device: report it")


def clock_loss(call, device, chunks, add):
    with mock.patch.multiple(eager, token_chunks=lambda x, weight: chunks, add_product=add):
        return clock_call(call, device)


def add_rounded(total, a, b):
    """What eager.add_product() does, by a product in the dtype of a and b and an add."""
    total += a.t() @ b


def check_add_product(device, N, C, V):
    """Compare eager.add_product() with float64. Returns a row whose note has the error, and a
    sentence if the error is larger than sums in float32 have, or "".
    """
    a, b = (random(device, N, n).detach() for n in (V, C))
    total = torch.ones(V, C, device=device)
    eager.add_product(total, a, b)
    right = torch.addmm(torch.ones_like(total).double(), a.t().double(), b.double())
    found = float((total - right).norm() / right.norm())
    rounded = float((a.t() @ b + 1.0 - right).norm() / right.norm())
    note = f"relative error {found:.1e}; of a product in {str(a.dtype)[6:]} {rounded:.1e}"
    row = single_row("the loss", f"{N} tokens of {V}", "compared", None, note=note)
    is_right = found <= 1e-5  # not if it is no number
    return row, "" if is_right else f"a product that is added up in float32 is off by {found:.2g}"


# -----------------------------------------------------------------------------
# Ceilings


def time_ceilings(cfg, device):
    """What the machine reaches: a copy, counting bytes read and written, and a product of square
    matrices; and the time of the host until one addition is queued, and until attention of ours,
    forward and backward, is, not compiled."""
    scale = cfg.scale(device)
    n, size = {"cuda": (1 << 30, 8192), "cpu": (1 << 26, 1024), "toy": (1 << 16, 64)}[scale]
    source = torch.zeros(n, device=device)
    target = torch.empty_like(source)
    ms = clock_call(functools.partial(target.copy_, source), device)
    gigabytes = 2 * n * 4 / 1e9
    rows = [
        single_row(
            "ceiling", f"copy of {n * 4 / 1e9:.1f} GB", "", ms, 1000 * gigabytes / ms, "GB/s"
        )
    ]
    del source, target
    a, b = (random(device, size, size).detach() for _ in "ab")
    ms = clock_call(functools.partial(torch.mm, a, b), device)
    rate = 2 * size**3 / 1e9 / ms
    rows.append(
        single_row("ceiling", f"product of {size}^3", str(a.dtype)[6:], ms, rate, "TFLOP/s")
    )
    one = torch.zeros(1, device=device)
    rows.append(single_row("host", "an addition", "", host_ms(functools.partial(one.add_, 1))))
    q, k, v = (random(device, 1, 32, 2, 64).transpose(1, 2) for _ in range(3))
    call = with_backward(functools.partial(kernels.attention, q, k, v))
    rows.append(single_row("host", "attention and its backward pass", "", host_ms(call)))
    yield rows


def host_ms(call, times=50):
    """Return the milliseconds until call() is queued: the median of some calls."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - start))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return sorted(taken)[math.ceil(times / 2)]
