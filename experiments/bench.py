"""The operators and a whole training step, timed beside what one would use instead, in one run.

    python experiments/bench.py                                everything: under 10 minutes on a GPU, some 3 on 2 CPU cores
    python experiments/bench.py --only=attention,step          sections: ceilings rope attention decode loss step
    python experiments/bench.py --lengths=1024,4096            attention at these lengths
    python experiments/bench.py train --nanogpt=PATH           whole training runs beside nanoGPT's (bench_train.py)
    python experiments/bench.py sample                         drawing text beside transformers' generate (bench_sample.py)
    python experiments/bench.py memory                         memory counted on paper beside the measured peak (bench_memory.py)

The last three, a few minutes each, write train.md, sample.md and memory.md with their .json to results/<device>/; the others write bench.md, bench.json and bench.png. Every time is a median, side by side with the others of its case, and `beside` is the time of the case's first row
over this row's: above 1 is faster. A rival that is not installed has no row; one that cannot do a case has its reason. On a GPU the L2 is flushed between runs; on a
CPU the rivals take turns. FLOPs of attention are counted as FlashAttention's authors do: 4 T^2 D / 2 a head forward, causal, and 2.5 times that backward.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import gc
import importlib
import importlib.util
import json
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F

import kernels
from config import UserError
from evaluate import pyplot
from kernels import reference
from model import GPT, POSITIONS, GPTConfig, Refused

SECTIONS = ("ceilings", "rope", "attention", "decode", "loss", "step")
WHOLE = ("train", "sample", "memory")  # each in a file of its own


@dataclass
class BenchConfig:
    only: tuple[str, ...] = ()     # sections; by default all but train, sample and memory
    lengths: tuple[int, ...] = ()  # of attention, in tokens; by default 1k to 128k on a GPU, 256 and 1024 on a CPU
    minutes: float = 9.5           # rows that have not begun by then are left out, and said to be
    nanogpt: str = ""              # train: a checkout of nanoGPT to measure beside
    rounds: int = 3                # train, sample: how often the rivals take turns
    iterations: int = 0            # train: of a run; by default 200 and 35
    device: str = "auto"           # auto, cpu, cuda or cuda:N
    out_dir: str = ""              # by default results/<device>

    def __post_init__(self):
        if unknown := sorted({*self.only} - {*SECTIONS, *WHOLE}):
            raise UserError(f"there is no section {unknown[0]!r}: --only takes {', '.join((*SECTIONS, *WHOLE))}")
        if any(n < 1 for n in self.lengths) or self.minutes <= 0 or self.rounds < 1 or self.iterations < 0 or 0 < self.iterations < 8:
            raise UserError("lengths, minutes and rounds must be above 0, and iterations at least 8")


@dataclass
class Row:
    section: str
    case: str          # what all rows of a comparison have in common
    what: str          # ours, or whose
    ms: float | None = None
    rate: float | None = None    # in `unit`
    unit: str = ""
    peak_mb: float | None = None  # of memory, above what was there before; GPUs only
    beside: float | None = None  # the time of the case's first row over this row's
    note: str = ""


class Bench:
    def __init__(self, cfg, device):
        self.cfg, self.device, self.gpu, self.rows, self.start = cfg, device, device.type == "cuda", [], time.monotonic()
        self.dtype, self.flops = torch.bfloat16 if self.gpu else torch.float32, "TFLOP/s" if self.gpu else "GFLOP/s"

    def random(self, *shape, grad=True, dtype=None):
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype).requires_grad_(grad)

    def late(self):
        return time.monotonic() - self.start > 60 * self.cfg.minutes

    def time(self, f, seconds=0.3):
        """Median milliseconds of f()."""
        if self.gpu:
            from triton.testing import do_bench
            return do_bench(f, warmup=30, rep=1000 * seconds, return_mode="median")
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            f()
            times.append(1000 * (time.perf_counter() - begun))
        return statistics.median(times)

    def compare(self, section, case, rivals, amount, unit):
        """A row for each rival, name -> function, or -> a sentence why not. amount / seconds is its rate, given in `unit`."""
        amount /= {"TFLOP/s": 1e9, "GFLOP/s": 1e6, "GB/s": 1e6, "tokens/s": 1e-3}[unit]  # for milliseconds
        if self.late():
            self.rows.append(Row(section, case, "", note="not reached"))
            return
        rows, turns = [], {}
        for name, f in rivals.items():
            row = Row(section, case, name, unit=unit)
            rows.append(row)
            try:
                if isinstance(f, str):
                    raise RuntimeError(f)
                f()  # compiles, and takes its memory
                if self.gpu:
                    torch.cuda.synchronize()
                    gc.collect()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    f()
                    torch.cuda.synchronize()
                    row.peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
                turns[name] = []
            except Exception as error:  # a rival that cannot do this case: its reason is the row
                row.note = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).strip().split("\n")[0][:100]
                gc.collect()
                if self.gpu:
                    torch.cuda.empty_cache()
        for _ in range(1 if self.gpu else 5):
            for name in turns:
                turns[name].append(self.time(rivals[name], 0.15 if self.gpu else 0.1))
        for row in rows:
            if turns.get(row.what):
                row.ms = statistics.median(turns[row.what])
                row.rate = amount / row.ms
                row.beside = rows[0].ms / row.ms if rows[0].ms else None
            shown = "  ".join(filter(None, (f"{row.ms:.3f} ms" if row.ms else "", f"{row.rate:.1f} {unit}" if row.rate else "", f"x{row.beside:.2f}" if row.beside else "", row.note)))
            print(f"{section:10} {case:38} {row.what:34} {shown}", flush=True)
        self.rows += rows


def both(f, leaves):
    """A function that runs f forward and backward, with a gradient of ones' size that is not all ones."""
    out = f()
    ahead = torch.randn_like(out[0] if isinstance(out, tuple) else out)
    del out

    def run():
        y = f()
        torch.autograd.grad(y[0] if isinstance(y, tuple) else y, [x for x in leaves if x.requires_grad], ahead, allow_unused=True)
    return run


def has(*packages):
    return all(importlib.util.find_spec(p) for p in packages)


def ceilings(b):
    """What the machine can do: a copy, in bytes read and written, and a matrix product."""
    x = torch.empty(1 << 30 if b.gpu else 1 << 26, dtype=torch.uint8, device=b.device)
    y, n = torch.empty_like(x), 8192 if b.gpu else 2048
    b.compare("ceilings", f"copy of {x.numel() >> 20} MiB", {"copy": lambda: y.copy_(x)}, 2 * x.numel(), "GB/s")
    p, q = b.random(n, n, grad=False), b.random(n, n, grad=False)
    b.compare("ceilings", f"product of {n}^3, {str(b.dtype)[6:]}", {"torch.mm": lambda: p @ q}, 2 * n**3, b.flops)


def rope(b):
    """Bytes: queries and keys, read once and written once. The copy beside it moves as many."""
    for B, H, Hk, T, D in ((8, 12, 12, 4096, 64), (4, 32, 8, 8192, 128)) if b.gpu else ((2, 12, 12, 1024, 64), (1, 16, 4, 2048, 128)):
        q, k = (b.random(B, T, h, D).detach().transpose(1, 2).requires_grad_() for h in (H, Hk))
        angle = torch.rand(T, D // 2, device=b.device) * 1000
        cos, sin = angle.cos(), angle.sin()
        moved = torch.empty(q.numel() + k.numel(), dtype=b.dtype, device=b.device)
        to, g, bytes_ = torch.empty_like(moved), [torch.randn_like(q), torch.randn_like(k)], 2 * moved.numel() * moved.element_size()
        rivals = {"copy": lambda: to.copy_(moved), "ours": lambda: kernels.rope(q, k, cos, sin), "plain PyTorch": lambda: reference.rope(q, k, cos, sin)}
        if b.gpu and has("liger_kernel"):
            from liger_kernel.ops.rope import LigerRopeFunction
            wide = torch.cat((cos, cos), -1)[None].to(b.dtype), torch.cat((sin, sin), -1)[None].to(b.dtype)
            rivals["Liger"] = lambda: LigerRopeFunction.apply(q, k, *wide)
        with torch.no_grad():
            b.compare("rope", f"forward B{B} H{H}/{Hk} T{T} D{D}", rivals, bytes_, "GB/s")

        def backward(f):
            out = f()
            return lambda: torch.autograd.grad(out, (q, k), g, retain_graph=True)
        b.compare("rope", f"backward B{B} H{H}/{Hk} T{T} D{D}", {name: f if name == "copy" else backward(f) for name, f in rivals.items()}, bytes_, "GB/s")


def bias_of(table, T):
    """The (1, H, T, T) that a table makes where it is materialised, -inf above the diagonal."""
    i = torch.arange(T, device=table.device)
    distance = i[:, None] - i
    return table[:, distance.clamp(0, table.shape[1] - 1)].masked_fill(distance < 0, float("-inf"))[None]


def flex(q, k, v, table, compiled={}):  # noqa: B006: compiled once
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    T, m = q.shape[2], table.shape[1]
    if "attention" not in compiled:
        compiled["attention"] = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device)
    return lambda: compiled["attention"](q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, m - 1)], block_mask=mask)


def attention(b):
    """Each score term, ours, beside SDPA without one, SDPA with a materialised bias, and compiled FlexAttention, which has a table's gradient too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    lengths = b.cfg.lengths or ((1024, 4096, 16384, 32768, 131072) if b.gpu else (256, 1024))
    for D in (64, 128) if b.gpu else (64,):
        for T in lengths:
            B, H = (max(1, 16384 // T), 2048 // D) if b.gpu else (1, 12)  # 16k tokens, 2048 wide
            H = min(H, 12) if T > 32768 else H
            q, k, v = (b.random(B, T, H, D).detach().transpose(1, 2).requires_grad_() for _ in range(3))
            wide = dict(dtype=torch.float32)
            slopes, learned, near, full = b.random(H, grad=False, **wide).abs(), b.random(H, **wide).detach().abs().requires_grad_(), b.random(H, min(114, T), **wide), b.random(H, T, **wide)
            shaw, xl = [b.random(1, min(129, T), D) for _ in range(2)], b.random(H, T, D)

            def sdpa(backend=None, mask=None):
                def run():
                    if backend is None:
                        return F.scaled_dot_product_attention(q, k, v, is_causal=mask is None, attn_mask=None if mask is None else bias_of(mask, T).to(q.dtype))
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return run
            small = T <= (4096 if b.gpu else 1024)
            rivals = {
                "ours, no term": (lambda: kernels.attention(q, k, v), ()),
                "ours, fixed slopes": (lambda: kernels.attention(q, k, v, bias=slopes), ()),
                "ours, trained slopes": (lambda: kernels.attention(q, k, v, bias=learned), (learned,)),
                "ours, T5's table of 114": (lambda: kernels.attention(q, k, v, bias=near), (near,)),
                "ours, table of T": (lambda: kernels.attention(q, k, v, bias=full), (full,)),
                "ours, Shaw's vectors": (lambda: kernels.attention(q, k, v, relative=(*shaw, None)), shaw) if b.gpu or T <= 1024 else "needs a GPU",
                "ours, Transformer-XL's": (lambda: kernels.attention(q, k, v, relative=(xl, None, None)), (xl,)) if T <= 32768 and b.gpu or T <= 1024 else "left out: minutes",
                "SDPA, no term": (sdpa(), ()),
                "SDPA, T5's table materialised": (sdpa(mask=near), (near,)) if small else "left out: (H, T, T) scores",
            }
            if b.gpu:
                rivals |= {"SDPA cuDNN, no term": (sdpa(SDPBackend.CUDNN_ATTENTION), ()), "SDPA flash, no term": (sdpa(SDPBackend.FLASH_ATTENTION), ())}
                rivals["FlexAttention, T5's table"] = (flex(q, k, v, near), (near,)) if small else "left out: minutes"
                if has("flash_attn"):
                    from flash_attn import flash_attn_func
                    rivals["flash-attn, slopes without gradient"] = (lambda: flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, alibi_slopes=slopes), ())
            flops = 4 * B * H * T * T * D / 2
            with torch.no_grad():
                b.compare("attention", f"forward D{D} T{T} B{B} H{H}", {name: r if isinstance(r, str) else r[0] for name, r in rivals.items()}, flops, b.flops)

            def prepared(name, r, leaves):
                try:
                    return both(r[0], [*leaves, *r[1]])
                except Exception as error:
                    return f"{type(error).__name__}: {error}".split("\n")[0][:100]
            if not b.late():
                b.compare("attention", f"forward + backward D{D} T{T} B{B} H{H}", {name: r if isinstance(r, str) else prepared(name, r, (q, k, v)) for name, r in rivals.items()}, 3.5 * flops, b.flops)
            gc.collect()


def decode(b):
    """One query against a cache. Bytes: the keys and values, read once."""
    for B, H, Hk, T in ((8, 32, 8, 8192), (8, 32, 8, 32768), (1, 32, 8, 131072)) if b.gpu else ((1, 12, 4, 4096),):
        D = 128 if b.gpu else 64
        q = b.random(B, H, 1, D, grad=False)
        k, v = (b.random(B, Hk, T, D, grad=False) for _ in range(2))
        slopes, table, shaw = torch.rand(H, device=b.device), torch.randn(H, T, device=b.device), [b.random(1, 129, D, grad=False) for _ in range(2)]
        with torch.no_grad():
            b.compare("decode", f"B{B} H{H}/{Hk} T{T} D{D}", {
                "ours, no term": lambda: kernels.attention(q, k, v), "ours, slopes": lambda: kernels.attention(q, k, v, bias=slopes), "ours, table of T": lambda: kernels.attention(q, k, v, bias=table),
                "ours, Shaw's vectors": lambda: kernels.attention(q, k, v, relative=(*shaw, None)), "ours, window of 1024": lambda: kernels.attention(q, k, v, window=1024, sinks=4),
                "SDPA, no term": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}, 2 * k.numel() * k.element_size(), "GB/s")


def loss(b):
    """Hidden states to loss and both gradients; weights float32, products in the device's usual dtype."""
    for N, C, V in ((65536, 768, 50304), (8192, 768, 50304)) if b.gpu else ((512, 256, 50304), (4096, 192, 257)):
        x, w, y = b.random(N, C), b.random(V, C, dtype=torch.float32), torch.randint(0, V, (N,), device=b.device)
        rivals = {"logits materialised": lambda: F.cross_entropy(F.linear(x, w.to(x.dtype)).float(), y), "ours": lambda: kernels.linear_cross_entropy(x, w.to(x.dtype), y)}
        if hasattr(F, "linear_cross_entropy"):
            rivals["torch's linear_cross_entropy"] = lambda: F.linear_cross_entropy(x, w.to(x.dtype), y)
        if b.gpu and has("liger_kernel"):
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
            rivals["Liger"] = lambda: Liger.apply(x, w.to(x.dtype), y)[0]

        def run(f):
            return lambda: torch.autograd.grad(f(), (x, w))
        b.compare("loss", f"{N} tokens of {V}, width {C}", {name: run(f) for name, f in rivals.items()}, 6 * N * C * V, b.flops)
        gc.collect()


def step(b):
    """Forward, backward and AdamW of a whole model with each scheme: 124 M parameters at 4k tokens on a GPU, a small one on a CPU. Not compiled."""
    shape = dict(n_layer=12, n_head=12, n_embd=768, block_size=4096, vocab_size=50304) if b.gpu else dict(n_layer=4, n_head=4, n_embd=128, block_size=256, vocab_size=257)
    B, T, rivals = 4, shape["block_size"], {}
    tokens = torch.randint(0, shape["vocab_size"], (B, T), device=b.device)

    def make(settings):
        def run(kept={}):  # noqa: B006: built when it is first called
            if "model" not in kept:
                kept["model"] = GPT(GPTConfig(**shape, **settings)).to(b.device)
                kept["optimizer"] = torch.optim.AdamW(kept["model"].parameters(), lr=1e-4, fused=True)
            with torch.autocast(b.device.type, torch.bfloat16, enabled=b.gpu):
                loss = kept["model"](tokens, tokens)
            loss.backward()
            kept["optimizer"].step()
            kept["optimizer"].zero_grad()
        return run
    for name in ("nope", *(p for p in POSITIONS if p != "nope")):
        rivals[name] = make(dict(pos=name))
    rivals |= {"rope, window of T / 4": make(dict(pos="rope", window=T // 4))}
    b.compare("step", f"{shape['n_layer']} layers of {shape['n_embd']}, {B} x {T} tokens", rivals, B * T, "tokens/s")


def write(b, folder, plotted):
    """bench.md and bench.json; `beside` is of the same run."""
    (folder / "bench.json").write_text(json.dumps({"provenance": config.provenance(b.device), "command": "python experiments/bench.py", "rows": [asdict(r) for r in b.rows]}, indent=1) + "\n")
    lines = ["# Benchmark", "", f"`python experiments/bench.py`; {config.provenance(b.device)}.", "",
             "Medians, side by side in one run. `beside`: the time of the case's first row over this row's, above 1 is faster."
             + (" Kernels in Triton." if b.gpu else " On a CPU every operator is plain PyTorch, so this says what the reference costs; the kernels' speed: not measured."), ""]
    if plotted:
        lines += ["![attention, forward and backward](bench.png)", ""]
    for section in dict.fromkeys(r.section for r in b.rows):
        rows = [r for r in b.rows if r.section == section]
        lines += [f"## {section}", "", f"{globals()[section].__doc__}", "", "| case | | ms | rate | peak MB | beside |", "|---|---|---|---|---|---|"]
        for r in rows:
            cells = [r.case, r.what, f"{r.ms:.3f}" if r.ms else r.note or "not measured", f"{r.rate:,.{0 if r.rate > 1000 else 1 if r.rate > 1 else 3}f} {r.unit}" if r.rate else "",
                     f"{r.peak_mb:,.0f}" if r.peak_mb is not None else "", f"{r.beside:.2f}" if r.beside else ""]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    (folder / "bench.md").write_text("\n".join(lines))


def plot(b, file):
    """Attention, forward and backward: rate by length, a panel for each head dimension."""
    rows = [r for r in b.rows if r.section == "attention" and r.case.startswith("forward +") and r.rate]
    widths = sorted({int(re.search(r"D(\d+)", r.case)[1]) for r in rows})
    if not rows or not (plt := pyplot(str(file))):
        return False
    figure, axes = plt.subplots(1, len(widths), figsize=(7 * len(widths), 4.5), squeeze=False)
    for axis, D in zip(axes[0], widths):
        for what in dict.fromkeys(r.what for r in rows):
            points = sorted((int(re.search(r"T(\d+)", r.case)[1]), r.rate) for r in rows if r.what == what and f" D{D} " in r.case)
            axis.plot(*zip(*points), "o-" if what.startswith("ours") else "s--", label=what, markersize=4, linewidth=1.2) if points else None
        axis.set_xscale("log", base=2)
        axis.set(title=f"attention forward + backward, D = {D}", xlabel="tokens", ylabel=b.flops, ylim=(0, None))
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    return True


def main():
    cfg, _, words = config.parse(BenchConfig, about=__doc__, paths="sections, as another way to say --only")
    if words:
        cfg = replace(cfg, only=(*cfg.only, *words))
    device = config.pick_device(cfg.device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device={cfg.device}: timings are taken on cpu and cuda")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-") if device.type == "cuda" else "cpu"
    folder = Path(cfg.out_dir or f"results/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    for section in dict.fromkeys(word for word in cfg.only if word in WHOLE):
        room = importlib.import_module(f"bench_{section}")
        lines, rows = room.measure(cfg, device)
        command = f"python experiments/bench.py {section}{' --nanogpt=PATH' * (section == 'train')}"
        (folder / f"{section}.json").write_text(json.dumps({"provenance": config.provenance(device), "command": command, "rows": rows}, indent=1) + "\n")
        (folder / f"{section}.md").write_text("\n".join([f"# {section}", "", f"`{command}`; {config.provenance(device)}.", "", room.__doc__.strip().partition(": ")[2], "", *lines, ""]))
        print("\n".join([*lines, f"wrote {folder / section}.md and .json"]))
    torch.manual_seed(0)
    b = Bench(cfg, device)
    for section in (chosen := [word for word in cfg.only if word in SECTIONS] if cfg.only else SECTIONS):
        globals()[section](b)
    if chosen:
        write(b, folder, plot(b, folder / "bench.png"))
        print(f"wrote {folder / 'bench.md'} and bench.json")


if __name__ == "__main__":
    config.main(main, Refused)
