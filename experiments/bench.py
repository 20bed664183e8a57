"""How fast are the operators, a training step and sampling, next to the alternatives?

    python experiments/bench.py                        operators, plain PyTorch and FlexAttention
    python experiments/bench.py schemes                a training step of each position scheme
    python experiments/bench.py tiles                  a GPU: attention with other tiles
    python experiments/bench.py train --nanogpt=PATH   training and a checkout of nanoGPT
    python experiments/bench.py sample                 generation and transformers, if installed

The implementations of a case take turns, because the speed of a machine drifts. A time is the
median over the turns. `ratio` is the time of the case's first row divided by this row's in the
same turn, the median over the turns: above 1 is faster. Compare within one table only.

Traps: on a CPU, GELU by tanh takes more than twice the time of nanoGPT's GELU by erf, and bfloat16
is slow without amx_bf16. So the processor's instructions stand above each table, and programs are
compared with the same architecture, dtype and optimizer, eager with eager, compiled with compiled.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)
import functools
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.benchmark
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.utils._pytree import tree_leaves, tree_map

import hf
import kernels
from kernels import reference
from model import GPT, POSITIONS, GPTConfig
from nanolong.devices import autocast, pick_device, pick_dtype
from nanolong.errors import require, run_main
from nanolong.evaluation.provenance import ROOT, provenance
from nanolong.evaluation.tables import Table
from nanolong.strict_json import write_json


@dataclass
class BenchConfig:
    lengths: tuple[int, ...] = ()  # in tokens, of attention and of schemes; default: by the device
    nanogpt: str = ""  # train: a checkout in which data/shakespeare_char/prepare.py has run
    rounds: int = 5  # turns of each implementation
    steps: int = 100  # train: timed steps of the smallest model; larger ones take fewer, at least 2
    # of the models of train or sample, or the names of schemes; default: all there are
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # train: default: float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    out_dir: str = ""  # default: out/bench/DEVICE


# -----------------------------------------------------------------------------
# Turns, rows and tables


def take_turns(clocks, rounds, warmup=0):
    """Call clocks (name -> function that returns ms) in turn, every second round in reverse order.

    Returns name -> times of the rounds after the warm-up, and name -> why it failed, or "".
    """
    times = {name: [] for name in clocks}
    notes = dict.fromkeys(clocks, "")
    for number in range(warmup + rounds):
        for name in sorted(clocks, key=list(clocks).index, reverse=number % 2 == 1):
            if notes[name]:
                continue
            try:
                times[name].append(clocks[name]())
            except Exception as error:  # the others can still be compared
                notes[name] = (str(error).strip() or repr(error)).splitlines()[0][:100]
    return {name: ms[warmup:] for name, ms in times.items()}, notes


def compare(section, case, clocks, rounds, work, unit, warmup=0):
    """Time implementations in turns; work: of a call, in `unit` times a second. Returns rows."""
    times, notes = take_turns(clocks, rounds, warmup)
    first = next(iter(times.values()))
    rows = []
    for name, ms in times.items():
        row = {"section": section, "case": case, "name": name, "unit": unit, "note": notes[name]}
        pairs = [a / b for a, b in zip(first, ms, strict=False)]  # fewer if one has failed
        row.update(times=ms, ms=None, rate=None)
        row.update(ms_quartiles=quartiles(ms), ratio_quartiles=quartiles(pairs))
        if ms:
            row["ms"] = row["ms_quartiles"][1]
            row["rate"] = 1000 * work / row["ms"]
        rows.append(row)
        print(*format_row(row), sep="  ", flush=True)
    return rows


def quartiles(values):
    """Return the three quartiles of a list, of which the second is its median."""
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist() if values else []


def format_row(row):
    """Return the cells of a row, in the order of format_table()'s header."""
    cells = [row["section"], row["case"], row["name"]]
    for key, digits in (("ms_quartiles", 3), ("ratio_quartiles", 2)):
        low, median, high = (f"{value:.{digits}f}" for value in row[key] or (0, 0, 0))
        cells.append(f"{median} ({low} to {high})" if row[key] else "")
    rate = f"{row['rate']:,.1f} {row['unit']}" if row["rate"] else ""
    return [*cells, rate, row["note"]]


def format_table(rows):
    """Return a Markdown table of rows."""
    header = ["section", "case", "name", "ms (quartiles)", "ratio (quartiles)", "rate", "note"]
    return Table("", header, list(map(format_row, rows))).markdown()


# -----------------------------------------------------------------------------
# Operators. Their cases: name, arguments, options, work, its unit, and with the backward pass how
# many times as much.


def time_operators(cfg, device):
    """Operators on random tensors, forward without gradients, and forward with backward: in
    bfloat16 by triton.testing.do_bench on a GPU, in float32 by torch.utils.benchmark on a CPU,
    where ours are plain PyTorch, too. Of causal attention half of the products are counted. On a
    GPU attention is compared with FlexAttention and cuDNN, where they have the term."""
    attention = (plain_attention, kernels.attention, attention_cases(device, cfg.lengths))
    loss = (reference.linear_cross_entropy, kernels.linear_cross_entropy, loss_cases(device))
    rows = []
    for plain, ours, cases in ((reference.rope, kernels.rope, rope_cases(device)), attention, loss):
        for case, arguments, options, work, unit, both in cases:
            functions = {"plain PyTorch": plain, "ours": ours}
            if device.type == "cuda" and plain is plain_attention:
                functions |= {} if options.get("relative") else {"FlexAttention": flex_attention}
                functions |= {} if options else {"cuDNN": cudnn_attention}
            for direction, times in (("forward", 1), ("forward + backward", both)):
                clocks = {}
                for name, function in functions.items():
                    run = functools.partial(function, *arguments, **options)
                    clocks[name] = functools.partial(clock_operator, run, times > 1, device)
                names = (ours.__name__, f"{direction}, {case}")
                rows += compare(*names, clocks, cfg.rounds, times * work, unit)
    return rows


def clock_operator(run, has_backward, device):
    """Return the median milliseconds of run(), a partial function, and of its backward pass."""
    inputs = [x for x in tree_leaves((run.args, run.keywords)) if torch.is_tensor(x)]
    inputs = [x for x in inputs if x.requires_grad]
    with torch.no_grad():
        gradients = tree_map(torch.randn_like, run())  # not all ones, as in training

    def call():
        with torch.set_grad_enabled(has_backward):
            outputs = run()
        if has_backward:
            torch.autograd.grad(outputs, inputs, gradients)

    if device.type == "cuda":
        return importlib.import_module("triton.testing").do_bench(call, return_mode="median")
    threads = torch.get_num_threads()
    timer = torch.utils.benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
    return 1000 * timer.blocked_autorange(min_run_time=0.1).median


def random(device, *shape, dtype=None):
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def rope_cases(device):
    B, T = (8, 4096) if device.type == "cuda" else (2, 1024)
    for H, Hk, D in ((12, 12, 64), (16, 4, 128)):
        # views of (B, T, H, D), which the projections leave
        q, k = (random(device, B, T, heads, D).transpose(1, 2) for heads in (H, Hk))
        angle = torch.rand(T, D // 2, device=device) * 1000
        gigabytes = 2 * (q.numel() + k.numel()) * q.element_size() / 1e9
        case = f"{B} x {H}/{Hk} heads x {T} x {D}"
        yield case, (q, k, angle.cos(), angle.sin()), {}, gigabytes, "GB/s", 2


def plain_attention(q, k, v, bias=None, relative=None):
    """Compute SDPA with the bias as its mask; of vectors, which it does not have, the formula."""
    if relative:
        return reference.attention(q, k, v, relative=relative)
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    added = -bias[:, None, None] * distance if bias.dim() == 1 else bias[:, distance.clamp(0)]
    mask = added.masked_fill(distance < 0, -torch.inf)[None].to(q.dtype)  # (1, H, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def cudnn_attention(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex_attention(q, k, v, bias=None):
    """Compute FlexAttention, compiled, with the bias as its score_mod."""
    return compiled_flex_attention()(q, k, v, bias, causal_blocks(q.shape[2], q.device))


@functools.cache
def causal_blocks(T, device):
    def causal(b, h, i, j):
        return i >= j

    return flex.create_block_mask(causal, None, None, T, T, device=device)


@functools.cache
def compiled_flex_attention():
    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def compute(q, k, v, bias, blocks):
        def add_slope(score, b, h, i, j):
            return score - bias[h] * (i - j)

        def add_entry(score, b, h, i, j):
            return score + bias[h, (i - j).clamp(min=0)]

        added = None if bias is None else add_slope if bias.dim() == 1 else add_entry
        return flex.flex_attention(q, k, v, added, blocks)

    return compute


def attention_cases(device, lengths, D=64):
    is_gpu = device.type == "cuda"
    for T in lengths or ((1024, 4096, 16384) if is_gpu else (256, 1024)):
        B, H = (max(1, 16384 // T) if is_gpu else 1), 12
        q, k, v = (random(device, B, T, H, D).transpose(1, 2) for _ in range(3))
        terms = {
            "no term": {},
            "slopes": {"bias": 2.0 ** -torch.arange(1, H + 1, device=device)},
            "table": {"bias": random(device, H, T, dtype=torch.float32)},
            "Shaw's vectors": {"relative": (*(random(device, 1, 129, D) for _ in "kv"), None)},
            "Transformer-XL's vectors": {"relative": (random(device, H, T, D), None, None)},
        }
        for term, options in terms.items():
            case = f"{term}, {B} x {H} heads x {T} x {D}"
            yield case, (q, k, v), options, 2 * B * H * T * T * D / 1e9, "GFLOP/s", 3.5


def loss_cases(device):
    for N, C, V in ((512, 256, 50304), (4096, 192, 257)):
        N *= 16 if device.type == "cuda" else 1
        targets = torch.randint(V, (N,), device=device)
        arguments = (random(device, N, C), random(device, V, C), targets)
        yield f"{N} tokens of {V}, width {C}", arguments, {}, 2 * N * C * V / 1e9, "GFLOP/s", 3


# -----------------------------------------------------------------------------
# Tiles

# Queries, keys, warps and stages. Those of vectors have to be square.
TILES = ((32, 32, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 1), (64, 64, 4, 2))
TILES += ((64, 64, 4, 3), (64, 64, 8, 1), (64, 128, 4, 2), (64, 128, 8, 2), (128, 32, 4, 3))
TILES += ((128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))


def time_tiles(cfg, device):
    """Attention forward, or forward with backward, where one kernel has another tile than that of
    kernels/flash.py, which is the first row. Most of the time is Triton's compiler."""
    from kernels import flash

    require(device.type == "cuda", "tiles are of a GPU's kernels: run it on one")
    rows = []
    cases = (case for D in (64, 128) for case in attention_cases(device, cfg.lengths, D))
    for name, arguments, options, work, unit, both in cases:
        run = functools.partial(kernels.attention, *arguments, **options)
        # the last one is of tables and vectors only
        for kernel in flash.KERNELS if options else flash.KERNELS[:-1]:
            times = both if kernel != "forward" else 1
            clock = functools.partial(clock_operator, run, times > 1, device)
            clocks = {"now": clock}
            for tile in TILES:
                if tile[0] == tile[1] or not ("relative" in options or kernel == "sweep"):
                    how = (flash, kernel, flash.Tile(*tile), clock)
                    clocks[str(tile)] = functools.partial(clock_tile, *how)
            rows += compare(kernel, name, clocks, cfg.rounds, times * work, unit)
    return rows


def clock_tile(flash, kernel, tile, clock):
    """Return the milliseconds of clock() where one of flash.KERNELS has this tile."""
    tile_for = flash.tile_for
    flash.tile_for = lambda q, kind, name: tile if name == kernel else tile_for(q, kind, name)
    try:
        return clock()
    finally:
        flash.tile_for = tile_for


# -----------------------------------------------------------------------------
# Training

WARMUP = 5  # steps that do not count
# nanoGPT's character model, as its README has it for a CPU and its preset for a GPU, and larger
# ones: how many times fewer steps they take is the last number.
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size")
GPT2 = (12, 12, 768, 1024, 50304)
SHAPES = {
    "cpu": {
        "characters": (4, 4, 128, 64, 65, 12, 1),
        "demo": (4, 3, 192, 256, 65, 16, 5),
        "GPT-2": (12, 12, 768, 1024, 65, 1, 50),
    },
    "cuda": {"characters": (6, 6, 384, 256, 65, 64, 1), "GPT-2": (*GPT2, 16, 2)},
}
# nanoGPT has biases here because our LayerNorm always has them.
LIKE_NANOGPT = {"pos": "learned", "mlp": "gelu_exact", "norm": "layernorm", "bias": "all"}
ARCHITECTURES = {"ours, same architecture": LIKE_NANOGPT, "ours, default architecture": {}}
# Both programs know these settings.
SETTINGS = {"eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "dropout": 0.0}
SETTINGS |= {"learning_rate": 1e-3, "warmup_iters": 1, "gradient_accumulation_steps": 1}


def time_training(cfg, device):
    """AdamW without dropout. In one process: a step of each model in turn (forward, backward,
    clipping, fused AdamW) on the same batch. Processes: each is a train.py on the same token files,
    and counts as the median over the steps that it logs; to the first step counts from its start,
    imports included."""
    file = Path(cfg.nanogpt, "data/shakespeare_char/val.bin")
    repair = "give --nanogpt=PATH of a checkout of nanoGPT, and run prepare.py there"
    require(file.is_file(), f"{file} is missing: {repair}")
    rows = []
    dtypes = cfg.dtypes or ("bfloat16" if device.type == "cuda" else "float32",)
    shapes = SHAPES[device.type]
    for name, dtype in itertools.product(chosen(cfg, shapes), dtypes):
        *sizes, fewer = shapes[name]
        shape = dict(zip(SIZES, sizes, strict=True))
        work = (shape["batch_size"] * shape["block_size"], "tokens/s")
        steps = max(2, cfg.steps // fewer)
        for compiled in (False, True):
            case = f"{name}, {dtype}, {'compiled' if compiled else 'eager'}"
            clocks = model_clocks(cfg, device, shape, dtype, compiled)
            warmup = min(steps, WARMUP)
            rows += compare("one process", case, clocks, steps, *work, warmup)
            if name == "characters":
                with tempfile.TemporaryDirectory() as folder:
                    programs = program_settings(cfg, device, shape, dtype, compiled, Path(folder))
                    clocks = call_each(time_program, programs)
                    rows += compare("whole processes", case, clocks, cfg.rounds, *work)
                    if not compiled:  # the compiler would be timed
                        starts = call_each(time_first_step, programs)
                        how = (case, starts, cfg.rounds, 1, "starts/s")
                        rows += compare("to the first step", *how)
    return rows


def chosen(cfg, shapes):
    """Return the names of --shapes, by default all."""
    unknown = set(cfg.shapes) - set(shapes)
    require(not unknown, f"--shapes has others than {', '.join(shapes)}: give these")
    return cfg.shapes or shapes


def model_clocks(cfg, device, shape, dtype, compiled):
    """Return the clocks of training steps of nanoGPT's model and of ours: name -> function."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(cfg.nanogpt, "model.py"))
    nanogpt = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    # the same sizes for both, and as many parameters
    sizes = {key: shape[key] for key in SIZES[:-1]}
    models = {"nanoGPT": nanogpt.GPT(nanogpt.GPTConfig(**sizes, dropout=0.0, bias=True))}
    for name, architecture in ARCHITECTURES.items():
        models[name] = GPT(GPTConfig(**sizes, **architecture))
    counts = [sum(p.numel() for p in model.parameters()) for model in models.values()]
    require(counts[0] == counts[1], f"nanoGPT has {counts[0]:,} parameters, ours {counts[1]:,}")
    torch.compiler.reset()
    where = (2, shape["batch_size"], shape["block_size"])
    batch = torch.randint(shape["vocab_size"], where, device=device)
    how = (getattr(torch, dtype), compiled)
    return {name: clock_step(model.to(device), *how, *batch) for name, model in models.items()}


def clock_step(model, dtype, compiled, x, y):
    """Return a function that takes a training step and returns its milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=True)
    forward = torch.compile(model) if compiled else model

    def clock():
        start = time.perf_counter()
        with autocast(x.device, dtype):
            output = forward(x, y)
        loss = output[1] if isinstance(output, tuple) else output  # nanoGPT returns logits, too
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for a GPU
        return 1000 * (time.perf_counter() - start)

    return clock


def program_settings(cfg, device, shape, dtype, compiled, folder):
    """Return the folder and the settings of nanoGPT's train.py and of ours, which use a folder."""
    dataset = shutil.copytree(Path(cfg.nanogpt, "data/shakespeare_char"), folder / "data")
    meta = {"tokenizer": None, "vocab_size": 65, "bos": None, "bos_default": False}
    write_json(dataset / "meta.json", meta)
    shape = {key: value for key, value in shape.items() if key != "vocab_size"}
    settings = {**SETTINGS, **shape, "device": device, "dtype": dtype, "compile": compiled}
    settings |= {"max_iters": WARMUP + cfg.steps, "out_dir": folder / "run"}
    theirs = {**settings, "dataset": "shakespeare_char", "bias": True}
    programs = {"nanoGPT": (cfg.nanogpt, theirs)}
    for name, architecture in ARCHITECTURES.items():
        ours = {**settings, **architecture, "dataset": dataset, "overwrite": True}
        programs[name] = (ROOT, ours)
    return programs


def call_each(clock, programs):
    return {name: functools.partial(clock, *program) for name, program in programs.items()}


def time_program(root, settings):
    """Run a train.py, and return the median milliseconds of the steps that it prints or logs."""
    done = subprocess.run(command_of(settings), cwd=root, capture_output=True, text=True)
    require(done.returncode == 0, (done.stderr.strip().splitlines() or ["it failed"])[-1])
    times = re.findall(r"^iter \d+: .*?time ([\d.]+)ms", done.stdout, re.M)  # of nanoGPT
    if root == ROOT:
        rows = map(json.loads, (settings["out_dir"] / "log.jsonl").read_text().splitlines())
        speeds = np.array([row["tokens_per_second"] for row in rows if "loss" in row])
        times = 1000 * settings["batch_size"] * settings["block_size"] / speeds
    return np.median(np.array(times[WARMUP:], float)).item()


def time_first_step(root, settings):
    """Return the milliseconds from the start of a train.py to the line of its first step."""
    command = command_of(settings | {"max_iters": 1})
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        lines = ((line, time.perf_counter()) for line in process.stdout)
        ends = [end for line, end in lines if re.match("iter 0:|step 1/", line)]
    require(ends, f"{root}/train.py printed no first step")
    return 1000 * (ends[0] - start)


def command_of(settings):
    return [sys.executable, "-u", "train.py", *(f"--{n}={value}" for n, value in settings.items())]


# -----------------------------------------------------------------------------
# Schemes

# Four layers of bytes: heads, width; lengths; tokens of a step.
SCHEME_SHAPES = {"cpu": (3, 192, (256, 1024), 2048), "cuda": (12, 768, (1024, 4096), 16384)}


def time_schemes(cfg, device):
    """A compiled training step of each position scheme next to RoPE's: forward, backward, clipping
    and fused AdamW. Four layers, a vocabulary of bytes, and on a GPU the width of GPT-2."""
    n_head, n_embd, lengths, tokens = SCHEME_SHAPES[device.type]
    names = ["rope", *(name for name in chosen(cfg, POSITIONS) if name != "rope")]
    torch._dynamo.config.recompile_limit = 4 * len(names)  # one class, many models
    dtype = pick_dtype("auto", device)
    rows = []
    for T in cfg.lengths or lengths:
        torch.compiler.reset()
        batch = torch.randint(257, (2, max(1, tokens // T), T), device=device)
        clocks = {}
        for name in names:
            model = GPT(GPTConfig(pos=name, block_size=T, n_head=n_head, n_embd=n_embd)).to(device)
            clocks[name] = clock_step(model, dtype, True, *batch)
        case = f"{batch.shape[1]} x {T}, {str(dtype).removeprefix('torch.')}, compiled"
        work = (batch[0].numel(), "tokens/s")
        rows += compare("a training step", case, clocks, cfg.steps, *work, WARMUP)
    return rows


# -----------------------------------------------------------------------------
# Sampling

LARGE = dict(zip(SIZES, GPT2, strict=False))
SMOLLM2 = {"n_layer": 30, "n_head": 9, "n_kv_head": 3, "n_embd": 576, "mlp_dim": 1536}
SMOLLM2 |= {"block_size": 1024, "vocab_size": 49152}
MODELS = {
    "1.8 M": ({"block_size": 512}, 1),
    "124 M": (LARGE, 1),
    "124 M, batch 4": (LARGE, 4),
    "SmolLM2's shape": (SMOLLM2, 1),
}


def time_sampling(cfg, device):
    """A decoding step of RoPE models with random weights, at temperature 0.8 and top_k 200: the
    difference between 48 new tokens and 4, after prompts of 64. hf.py exports the models and checks
    that transformers has the same logits. In bfloat16, too, if sample.py uses it here."""
    rows = []
    for size in chosen(cfg, MODELS):
        shape, batch_size = MODELS[size]
        model = GPT(GPTConfig(**shape)).to(device)
        for p in model.parameters():
            torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.04)
        prompts = torch.randint(model.config.vocab_size, (batch_size, 64), device=device)
        # float32, and what sample.py would take
        for dtype in dict.fromkeys((torch.float32, pick_dtype("auto", device))):
            torch.compiler.reset()
            generators = sampling_generators(model, prompts, dtype)
            greedy = [run(max_new_tokens=12, top_k=1)[:, -12:].cpu() for run in generators.values()]
            same = all(torch.equal(tokens, greedy[0]) for tokens in greedy)
            case = f"{size}, {str(dtype).removeprefix('torch.')}"
            case += ", same greedy tokens" if same else ", other greedy tokens"
            clocks = {
                name: functools.partial(clock_decoding, generate)
                for name, generate in generators.items()
            }
            rows += compare("sampling", case, clocks, cfg.rounds, batch_size, "tokens/s", 1)
    return rows


def sampling_generators(model, prompts, dtype):
    """Return what continues the prompts: name -> function of max_new_tokens and top_k."""

    def generate(compiled, max_new_tokens, top_k=200):
        with autocast(prompts.device, dtype):
            tokens = model.generate(prompts, max_new_tokens, 0.8, top_k, compiled=compiled)
            return torch.cat(list(tokens), 1)

    generators = {"ours": functools.partial(generate, False)}
    generators["ours, compiled"] = functools.partial(generate, True)
    if importlib.util.find_spec("transformers"):
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/ours")
            hf.main(["export", f"{folder}/ours", f"{folder}/theirs"])
            theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/theirs", dtype=dtype)
        theirs.to(prompts.device).generation_config.eos_token_id = None
        options = {"do_sample": True, "temperature": 0.8, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(prompts)
        theirs = functools.partial(theirs.generate, prompts, top_k=200, **options)
        generators = {"transformers": theirs, **generators}
    return generators


def clock_decoding(generate):
    """Return the milliseconds of a decoding step."""
    times = [time.perf_counter()]
    for n in (4, 48):
        generate(max_new_tokens=n)[0, -1].item()  # waits for a GPU
        times.append(time.perf_counter())
    few, many = np.diff(times)
    return 1000 * float(many - few) / (48 - 4)


BENCHMARKS = {
    "operators": time_operators,
    "schemes": time_schemes,
    "tiles": time_tiles,
    "train": time_training,
    "sample": time_sampling,
}


def main(argv=None):
    args = settings.parse(cfg=BenchConfig, paths="schemes, tiles, train or sample", argv=argv)
    cfg, name = args.cfg, (args.paths or ["operators"])[0]
    require(name in BENCHMARKS, f"{name!r} is no benchmark: choose {', '.join(BENCHMARKS)}")
    device = pick_device(cfg.device)
    require(device.type in ("cpu", "cuda"), f"{device} has no clock here: choose cpu or cuda")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    device_name = re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).strip("-")
    folder = Path(cfg.out_dir or f"out/bench/{device_name}")
    folder.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python experiments/bench.py", *words])
    # where it runs: the processor counts next to a GPU, too
    machine = f"{gpu}, " * bool(gpu) + provenance(torch.device("cpu"))
    if cfg.nanogpt:
        command = command.replace(f"nanogpt={cfg.nanogpt}", "nanogpt=PATH")
        git = ["git", "-C", cfg.nanogpt, "rev-parse", "--short", "HEAD"]
        found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        machine += f"; nanoGPT {found or 'of an unknown commit'}"
    # measure, and write JSON and Markdown
    rows = BENCHMARKS[name](cfg, device)
    file = folder / f"{'bench' if name == 'operators' else name}.json"
    write_json(file, {"command": command, "machine": machine, "rows": rows}, indent=1)
    about = " ".join(BENCHMARKS[name].__doc__.split())
    lines = [f"# {name}", "", f"`{command}`: {machine}.", "", about, "", format_table(rows), ""]
    file.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    print("", *lines, f"wrote {file.with_suffix('.md')} and {file.name}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
