"""Time the operators and a training step, compared with the alternatives, in one run.

    python experiments/bench.py                        the operators; 10 min on a GPU, 3 on a CPU
    python experiments/bench.py --only=attention,step  some of the operators
    python experiments/bench.py --lengths=1024,4096    attention at these lengths
    python experiments/bench.py train --nanogpt=PATH   training runs, compared with nanoGPT's
    python experiments/bench.py sample                 generation, compared with transformers
    python experiments/bench.py train sample --baseline=PATH   compared with a checkout of ours
    python experiments/bench.py train --redraw=true    rewrite the table from its JSON

train and sample (bench_train.py, bench_sample.py) take a few minutes each and write train.md and
sample.md with their JSON to --out_dir. The operators go to bench.md, bench.json and bench.png.
Times are medians. `speedup` is the time of the first row of a case divided by this row's: above 1
is faster. An alternative that is not installed has no row;
one that cannot compute a case has the reason. On a GPU the L2 cache is flushed between runs; on a
CPU the implementations take turns. Attention FLOPs are counted as in FlashAttention's paper:
causal, 4 T^2 D / 2 per head forward, and 2.5 times that backward.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip
import functools
import gc
import importlib.util
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
import torch.utils.benchmark

import kernels
from experiments import bench_sample, bench_train
from experiments.report import (
    check_names,
    load_board,
    markdown_table,
    save_figure,
    section,
    select,
)
from kernels import eager
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.devices import pick_device
from nanolong.errors import UserError
from nanolong.plots import unique
from nanolong.provenance import provenance
from nanolong.strict_json import write_json
from nanolong.validate import require

WHOLE_RUNS = {"train": bench_train, "sample": bench_sample}


@dataclass
class BenchConfig:
    # ceilings, rope, attention, decode, loss, step (default: these), train, sample
    only: tuple[str, ...] = ()
    # attention lengths in tokens; default: 1k to 128k on a GPU, 256 and 1024 on a CPU
    lengths: tuple[int, ...] = ()
    minutes: float = 9.5  # operators: cases that have not started by then are left out
    nanogpt: str = ""  # train: a checkout of nanoGPT to compare with
    baseline: str = ""  # train, sample: another checkout of nanoLong to compare with
    rounds: int = 3  # train, sample: how often the implementations take turns
    iterations: int = 0  # train: steps of a run; default: 200 and 35
    redraw: bool = False  # rewrite tables and figures from the JSON files, without measuring
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    out_dir: str = ""  # default: out/bench/<device>

    def __post_init__(self):
        check_names("section", self.only, (*OPERATORS, *WHOLE_RUNS))
        positive = self.minutes > 0 and self.rounds >= 1
        require(positive, "minutes and rounds must be above 0: raise the one that is not")
        require(
            self.iterations == 0 or self.iterations >= 8,
            f"iterations={self.iterations} has nothing to time after warm-up: give at least 8",
        )


@dataclass
class Row:
    section: str
    case: str  # what the rows of one comparison have in common
    name: str  # the implementation
    ms: float | None = None
    rate: float | None = None  # in `unit`
    unit: str = ""
    peak_mb: float | None = None  # memory above what was allocated before; GPUs only
    speedup: float | None = None  # the time of the case's first row / this row's
    note: str = ""


class Benchmark:
    """The device, the clock and the rows measured so far."""

    def __init__(self, cfg, device):
        self.cfg = cfg
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.flops_unit = "TFLOP/s" if self.is_gpu else "GFLOP/s"
        self.rows = []
        self.start = time.monotonic()

    def randn(self, *shape, requires_grad=True, dtype=None):
        x = torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)
        return x.requires_grad_(requires_grad)

    def randn_heads(self, B, T, H, D, requires_grad=True):
        """Random (B, H, T, D) in the memory layout of a transposed (B, T, H, D)."""
        x = self.randn(B, T, H, D, requires_grad=False)
        return x.transpose(1, 2).requires_grad_(requires_grad)

    def out_of_time(self):
        return time.monotonic() - self.start > 60 * self.cfg.minutes

    def median_ms(self, run, seconds):
        """Median milliseconds of run(), called for so many seconds."""
        if self.is_gpu:
            from triton.testing import do_bench

            return do_bench(run, warmup=30, rep=1000 * seconds, return_mode="median")
        n_threads = torch.get_num_threads()
        timer = torch.utils.benchmark.Timer("run()", globals={"run": run}, num_threads=n_threads)
        return 1000 * timer.blocked_autorange(min_run_time=seconds).median

    def check_and_compile(self, run, row):
        """Call run() once to compile it; on a GPU once more to measure its memory."""
        run()
        if not self.is_gpu:
            return
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        row.peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20

    def compare(self, section, case, implementations, amount, unit):
        """Measure a row for each implementation: name -> function, or -> the reason why not.

        amount: the work of one call, so that amount / seconds is the rate, given in `unit`.
        """
        if self.out_of_time():
            self.rows.append(Row(section, case, "", note="not reached"))
            return
        scale = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9, "tokens/s": 1}[unit]
        rows = []
        times = {}
        for name, run in implementations.items():
            row = Row(section, case, name, unit=unit)
            rows.append(row)
            if isinstance(run, str):
                row.note = run
                continue
            try:
                self.check_and_compile(run, row)
                times[name] = []
            except Exception as error:  # this implementation cannot compute the case
                row.note = first_line(error)
                gc.collect()
                if self.is_gpu:
                    torch.cuda.empty_cache()

        for _ in range(1 if self.is_gpu else 5):
            for name in times:
                seconds = 0.15 if self.is_gpu else 0.1
                times[name].append(self.median_ms(implementations[name], seconds))

        for row in rows:
            if row.name in times:
                row.ms = statistics.median(times[row.name])
                row.rate = amount / scale / (row.ms / 1000)
                if rows[0].ms:
                    row.speedup = rows[0].ms / row.ms
            print(section, *table_row(row), sep="  ", flush=True)
        self.rows += rows


def first_line(error):
    """An exception as one short line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).strip().split("\n")[0][:100]


def first_output(out):
    return out[0] if isinstance(out, tuple) else out


def forward_backward(run, inputs):
    """A function that calls run() and its backward pass, for the gradients of the inputs."""
    # a gradient that is not all ones, as in training
    grad = torch.randn_like(first_output(run()))
    inputs = [x for x in inputs if x.requires_grad]

    def run_both():
        out = first_output(run())
        torch.autograd.grad(out, inputs, grad, allow_unused=True)

    return run_both


def is_installed(package):
    return importlib.util.find_spec(package) is not None


# -----------------------------------------------------------------------------
# Sections. The docstring of each stands above its table.


def ceilings(bench):
    """Upper bounds of this machine: a copy, in bytes read and written, and a matrix product."""
    source = torch.empty(1 << (30 if bench.is_gpu else 26), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    size = source.numel()
    bench.compare("ceilings", f"copy of {size >> 20} MiB", {"copy": copy}, 2 * size, "GB/s")

    n = 8192 if bench.is_gpu else 2048
    a = bench.randn(n, n, requires_grad=False)
    b = bench.randn(n, n, requires_grad=False)
    product = functools.partial(torch.mm, a, b)
    dtype = str(bench.dtype).removeprefix("torch.")
    case = f"product of {n}^3, {dtype}"
    bench.compare("ceilings", case, {"torch.mm": product}, 2 * n**3, bench.flops_unit)


def rope(bench):
    """Bytes: queries and keys, read once and written once. The copy moves as many."""
    shapes = ((2, 12, 12, 1024, 64), (1, 16, 4, 2048, 128))
    if bench.is_gpu:
        shapes = ((8, 12, 12, 4096, 64), (4, 32, 8, 8192, 128))
    for B, H, Hk, T, D in shapes:
        q = bench.randn_heads(B, T, H, D)
        k = bench.randn_heads(B, T, Hk, D)
        angle = torch.rand(T, D // 2, device=bench.device) * 1000
        cos, sin = angle.cos(), angle.sin()
        source = torch.empty(q.numel() + k.numel(), dtype=bench.dtype, device=bench.device)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        n_bytes = 2 * source.numel() * source.element_size()

        implementations = {
            "ours": functools.partial(kernels.rope, q, k, cos, sin),
            "plain PyTorch": functools.partial(eager.rope, q, k, cos, sin),
        }
        if bench.is_gpu and is_installed("liger_kernel"):
            from liger_kernel.ops.rope import LigerRopeFunction

            full_cos = torch.cat((cos, cos), -1)[None].to(bench.dtype)
            full_sin = torch.cat((sin, sin), -1)[None].to(bench.dtype)
            implementations["Liger"] = functools.partial(
                LigerRopeFunction.apply, q, k, full_cos, full_sin
            )
        shape = f"B{B} H{H}/{Hk} T{T} D{D}"
        with torch.no_grad():
            both = {"copy": copy, **implementations}
            bench.compare("rope", f"forward {shape}", both, n_bytes, "GB/s")

        grads = [torch.randn_like(q), torch.randn_like(k)]
        backward = {"copy": copy}
        for name, run in implementations.items():
            backward[name] = functools.partial(
                torch.autograd.grad, run(), (q, k), grads, retain_graph=True
            )
        bench.compare("rope", f"backward {shape}", backward, n_bytes, "GB/s")


def sdpa_with_bias(q, k, v, table):
    """SDPA with the bias of a table (H, m), materialised at every call as training would."""
    index = torch.arange(q.shape[2], device=table.device)
    distance = index[:, None] - index
    bias = table[:, distance.clamp(0, table.shape[1] - 1)]
    mask = bias.masked_fill(distance < 0, float("-inf"))[None].to(q.dtype)  # (1, H, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_by(backend, q, k, v):
    """SDPA by one of its backends."""
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention_with_table(q, k, v, table):
    """A function that computes compiled FlexAttention with a table by distance (H, m)."""
    from torch.nn.attention.flex_attention import create_block_mask

    T = q.shape[2]
    last = table.shape[1] - 1

    def is_visible(b, h, i, j):
        return i >= j

    def add_bias(score, b, h, i, j):
        return score + table[h, (i - j).clamp(0, last)]

    mask = create_block_mask(is_visible, None, None, T, T, device=q.device)
    return functools.partial(
        compiled_flex_attention(), q, k, v, score_mod=add_bias, block_mask=mask
    )


def our_attention(bench, q, k, v):
    """kernels.attention with each of its score terms.

    Returns name -> (function, what needs a gradient besides q, k and v), or -> the reason why it is
    left out; and the table and slopes that the alternatives use too.
    """
    _, H, T, D = q.shape
    fixed_slopes = bench.randn(H, requires_grad=False, dtype=torch.float32).abs()
    slopes = bench.randn(H, requires_grad=False, dtype=torch.float32).abs().requires_grad_()
    table = bench.randn(H, T, dtype=torch.float32)
    short_table = bench.randn(H, min(114, T), dtype=torch.float32)
    shaw = tuple(bench.randn(1, min(129, T), D) for _ in range(2))
    xl = bench.randn(H, T, D)

    terms = {
        "no term": ({}, ()),
        "fixed slopes": ({"bias": fixed_slopes}, ()),
        "trained slopes": ({"bias": slopes}, (slopes,)),
        "T5's table of 114": ({"bias": short_table}, (short_table,)),
        "table of T": ({"bias": table}, (table,)),
        "Shaw's vectors": ({"relative": (*shaw, None)}, shaw),
        "Transformer-XL's": ({"relative": (xl, None, None)}, (xl,)),
    }
    candidates = {}
    for name, (options, inputs) in terms.items():
        run = functools.partial(kernels.attention, q, k, v, **options)
        candidates[f"ours, {name}"] = (run, inputs)
    if T > 1024 and not bench.is_gpu:
        candidates["ours, Shaw's vectors"] = "needs a GPU"
    if T > (32768 if bench.is_gpu else 1024):
        candidates["ours, Transformer-XL's"] = "left out: minutes"
    return candidates, short_table, fixed_slopes


def other_attention(bench, q, k, v, table, slopes):
    """The alternatives, as our_attention() returns them."""
    is_small = q.shape[2] <= (4096 if bench.is_gpu else 1024)
    sdpa = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    candidates = {"SDPA, no term": (sdpa, ())}
    candidates["SDPA, T5's table materialised"] = "left out: (H, T, T) scores"
    if is_small:
        run = functools.partial(sdpa_with_bias, q, k, v, table)
        candidates["SDPA, T5's table materialised"] = (run, (table,))
    if not bench.is_gpu:
        return candidates

    from torch.nn.attention import SDPBackend

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        candidates[f"SDPA {name}, no term"] = (functools.partial(sdpa_by, backend, q, k, v), ())
    candidates["FlexAttention, T5's table"] = "left out: minutes"
    if is_small:
        flex = flex_attention_with_table(q, k, v, table)
        candidates["FlexAttention, T5's table"] = (flex, (table,))
    if is_installed("flash_attn"):
        from flash_attn import flash_attn_func

        # flash-attn's layout is (B, T, H, D)
        layout = [x.transpose(1, 2) for x in (q, k, v)]
        run = functools.partial(flash_attn_func, *layout, causal=True, alibi_slopes=slopes)
        candidates["flash-attn, slopes without gradient"] = (run, ())
    return candidates


def attention_case(bench, T, D):
    """Measure forward, and forward with backward, at one length and head dimension."""
    B, H = 1, 12
    if bench.is_gpu:
        # 16k tokens and 2048 channels
        B, H = max(1, 16384 // T), 2048 // D
    if T > 32768:
        H = min(H, 12)
    q, k, v = (bench.randn_heads(B, T, H, D) for _ in range(3))
    candidates, table, slopes = our_attention(bench, q, k, v)
    candidates |= other_attention(bench, q, k, v, table, slopes)
    flops = 4 * B * H * T * T * D / 2
    shape = f"D{D} T{T} B{B} H{H}"

    measurable = {name: both for name, both in candidates.items() if not isinstance(both, str)}
    forward = candidates | {name: run for name, (run, _) in measurable.items()}
    with torch.no_grad():
        bench.compare("attention", f"forward {shape}", forward, flops, bench.flops_unit)
    if bench.out_of_time():
        return
    both = dict(candidates)
    for name, (run, inputs) in measurable.items():
        try:
            both[name] = forward_backward(run, (q, k, v, *inputs))
        except Exception as error:
            both[name] = f"{type(error).__name__}: {first_line(error)}"[:100]
    case = f"forward + backward {shape}"
    bench.compare("attention", case, both, 3.5 * flops, bench.flops_unit)


def attention(bench):
    """Our attention with each score term, compared with SDPA (no term; a materialised bias) and, on
    a GPU, compiled FlexAttention, which also computes the gradient of a table."""
    lengths = (256, 1024)
    if bench.is_gpu:
        lengths = (1024, 4096, 16384, 32768, 131072)
    for D in (64, 128) if bench.is_gpu else (64,):
        for T in bench.cfg.lengths or lengths:
            attention_case(bench, T, D)
            gc.collect()


def decode(bench):
    """One query per sequence against a KV cache. Bytes: the keys and values, read once."""
    shapes = ((1, 12, 4, 4096, 64),)
    if bench.is_gpu:
        shapes = ((8, 32, 8, 8192, 128), (8, 32, 8, 32768, 128), (1, 32, 8, 131072, 128))
    for B, H, Hk, T, D in shapes:
        q = bench.randn(B, H, 1, D, requires_grad=False)
        k = bench.randn(B, Hk, T, D, requires_grad=False)
        v = bench.randn(B, Hk, T, D, requires_grad=False)
        slopes = torch.rand(H, device=bench.device)
        table = torch.randn(H, T, device=bench.device)
        shaw = [bench.randn(1, 129, D, requires_grad=False) for _ in range(2)]
        ours = functools.partial(kernels.attention, q, k, v)
        implementations = {
            "ours, no term": ours,
            "ours, slopes": functools.partial(ours, bias=slopes),
            "ours, table of T": functools.partial(ours, bias=table),
            "ours, Shaw's vectors": functools.partial(ours, relative=(*shaw, None)),
            "ours, window of 1024": functools.partial(ours, window=1024, sinks=4),
            "SDPA, no term": functools.partial(
                F.scaled_dot_product_attention, q, k, v, enable_gqa=True
            ),
        }
        n_bytes = 2 * k.numel() * k.element_size()
        with torch.no_grad():
            case = f"B{B} H{H}/{Hk} T{T} D{D}"
            bench.compare("decode", case, implementations, n_bytes, "GB/s")


def our_loss(x, weight, targets):
    return kernels.linear_cross_entropy(x, weight.to(x.dtype), targets)


def materialised_loss(x, weight, targets):
    logits = F.linear(x, weight.to(x.dtype))
    return F.cross_entropy(logits.float(), targets)


def torch_loss(x, weight, targets):
    return F.linear_cross_entropy(x, weight.to(x.dtype), targets)


def liger_loss(x, weight, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction,
    )

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight.to(x.dtype), targets)[0]


def loss_and_gradients(loss, x, weight, targets):
    torch.autograd.grad(loss(x, weight, targets), (x, weight))


def loss(bench):
    """Hidden states to loss and both gradients. Weights float32, products in the device's dtype."""
    shapes = ((512, 256, 50304), (4096, 192, 257))
    if bench.is_gpu:
        shapes = ((65536, 768, 50304), (8192, 768, 50304))
    losses = {"logits materialised": materialised_loss, "ours": our_loss}
    if hasattr(F, "linear_cross_entropy"):
        losses["torch's linear_cross_entropy"] = torch_loss
    if bench.is_gpu and is_installed("liger_kernel"):
        losses["Liger"] = liger_loss
    for N, C, V in shapes:
        x = bench.randn(N, C)
        weight = bench.randn(V, C, dtype=torch.float32)
        targets = torch.randint(0, V, (N,), device=bench.device)
        implementations = {
            name: functools.partial(loss_and_gradients, function, x, weight, targets)
            for name, function in losses.items()
        }
        case = f"{N} tokens of {V}, width {C}"
        bench.compare("loss", case, implementations, 6 * N * C * V, bench.flops_unit)
        gc.collect()


def training_step(config, tokens):
    """A function: forward, backward and AdamW of a model that is built at the first call."""

    @functools.cache
    def build():
        model = GPT(GPTConfig(**config)).to(tokens.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model, optimizer = build()
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step(bench):
    """Forward, backward and AdamW of a model with each position scheme, not compiled: 124 M
    parameters at 4k tokens on a GPU, a small model on a CPU."""
    B = 4
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257}
    if bench.is_gpu:
        shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 4096}
        shape["vocab_size"] = 50304
    T = shape["block_size"]
    tokens = torch.randint(0, shape["vocab_size"], (B, T), device=bench.device)
    # NoPE first: the others are compared with it
    schemes = ["nope", *(pos for pos in POSITIONS if pos != "nope")]
    implementations = {pos: training_step({**shape, "pos": pos}, tokens) for pos in schemes}
    windowed = {**shape, "pos": "rope", "window": T // 4}
    implementations["rope, window of T / 4"] = training_step(windowed, tokens)
    case = f"{shape['n_layer']} layers of {shape['n_embd']}, {B} x {T} tokens"
    bench.compare("step", case, implementations, B * T, "tokens/s")


OPERATORS = {run.__name__: run for run in (ceilings, rope, attention, decode, loss, step)}


# -----------------------------------------------------------------------------
# Reports.


def table_row(row):
    time = f"{row.ms:.3f}" if row.ms else row.note or "not measured"
    rate = ""
    if row.rate:
        digits = 3 if row.rate <= 1 else 1
        digits = 0 if row.rate > 1000 else digits
        rate = f"{row.rate:,.{digits}f} {row.unit}"
    peak = "" if row.peak_mb is None else f"{row.peak_mb:,.0f}"
    speedup = f"{row.speedup:.2f}" if row.speedup else ""
    return [row.case, row.name, time, rate, peak, speedup]


def format_report(result):
    """bench.md, from what bench.json holds."""
    kind = "Kernels in Triton."
    if result["device"] != "cuda":
        kind = (
            "On a CPU every operator is plain PyTorch, so this is the cost of the reference; "
            "the speed of the kernels is not measured."
        )
    lines = [
        "Medians of one run, in turns. `speedup` is the time of the first row of a case divided by "
        f"this row's: above 1 is faster. {kind}",
    ]
    if attention_rows(result):
        lines += ["", "![attention, forward and backward](bench.png)"]
    for name in unique(result["rows"], "section"):
        description = " ".join(OPERATORS[name].__doc__.split())
        header = ["case", "", "ms", "rate", "peak MB", "speedup"]
        rows = [table_row(Row(**row)) for row in select(result["rows"], section=name)]
        lines += section(name, description, markdown_table(header, rows))
    return lines


def case_number(row, letter):
    """The number behind a letter of a case such as `D64 T1024`."""
    return int(re.search(rf"\b{letter}(\d+)", row.case)[1])


def attention_rows(result):
    """The rows of the figure: attention, forward and backward."""
    rows = [Row(**row) for row in select(result["rows"], section="attention")]
    return [row for row in rows if row.rate and row.case.startswith("forward + backward")]


def plot_attention(result, file):
    """Plot the rate of attention, forward and backward, by length."""
    rows = attention_rows(result)
    if not rows:
        return
    head_dims = sorted({case_number(row, "D") for row in rows})

    def draw(figure, *panels):
        for panel, D in zip(panels, head_dims, strict=True):
            of_panel = [row for row in rows if case_number(row, "D") == D]
            for name in unique([vars(row) for row in of_panel], "name"):
                points = sorted(
                    (case_number(row, "T"), row.rate) for row in of_panel if row.name == name
                )
                style = "o-" if name.startswith("ours") else "s--"
                x, y = zip(*points, strict=True)
                panel.plot(x, y, style, label=name, markersize=4, linewidth=1.2)
            panel.set_xscale("log", base=2)
            panel.set_title(f"attention forward + backward, D = {D}")
            panel.set(xlabel="tokens", ylabel=rows[0].unit, ylim=(0, None))
            panel.legend(fontsize=7)

    save_figure(file, draw, (7 * len(head_dims), 4.5), panels=(1, len(head_dims)), dpi=130)


def measure(cfg, device):
    """What bench.json holds besides the provenance: the rows of the operators."""
    torch.manual_seed(0)
    bench = Benchmark(cfg, device)
    for name in [name for name in cfg.only if name in OPERATORS] or OPERATORS:
        OPERATORS[name](bench)
    return {"rows": [asdict(row) for row in bench.rows]}


def run_bench(name, cfg, device, folder):
    """Measure bench, train or sample, or read what was measured; write its .md and .json."""
    module = WHOLE_RUNS.get(name, sys.modules[__name__])
    file = folder / f"{name}.json"
    if cfg.redraw:
        result = load_board(file)
    else:
        command = "python experiments/bench.py"
        if name in WHOLE_RUNS:
            command += f" {name}"
            command += " --nanogpt=PATH" if name == "train" and cfg.nanogpt else ""
            command += " --baseline=PATH" if cfg.baseline else ""
        result = {"provenance": provenance(device), "command": command, "device": device.type}
        result |= module.measure(cfg, device)
        write_json(file, result, indent=1)
    heading, about = "Benchmark", []
    if name in WHOLE_RUNS:
        heading, about = name, [module.__doc__.partition("\n\n")[2].strip(), ""]
    else:
        plot_attention(result, folder / "bench.png")
    lines = [f"# {heading}", "", f"`{result['command']}`; {result['provenance']}.", "", *about]
    lines += [*module.format_report(result), ""]
    file.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines))
    print(f"wrote {folder / name}.md and .json")


def device_folder(device):
    """The default of --out_dir for a device."""
    if device.type == "cpu":
        return "out/bench/cpu"
    name = torch.cuda.get_device_name(device).lower()
    return "out/bench/" + re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def main():
    args = cli.parse(
        cfg=BenchConfig, about=__doc__, paths="sections, as another way to write --only"
    )
    cfg = replace(args.cfg, only=(*args.cfg.only, *args.paths))
    device = pick_device(cfg.device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device={cfg.device} has no timer here: choose cpu or cuda")
    folder = Path(cfg.out_dir or device_folder(device))
    folder.mkdir(parents=True, exist_ok=True)
    names = [name if name in WHOLE_RUNS else "bench" for name in cfg.only]
    for name in dict.fromkeys(names or ["bench"]):
        run_bench(name, cfg, device, folder)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
