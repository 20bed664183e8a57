"""How fast are the operators, a training step and sampling, next to the alternatives?

    python experiments/bench.py                        operators, plain PyTorch and FlexAttention
    python experiments/bench.py train --nanogpt=PATH   training steps and a checkout of nanoGPT
    python experiments/bench.py programs --nanogpt=PATH   train.py as a whole, and nanoGPT's
    python experiments/bench.py profile --nanogpt=PATH    a training step by kinds of kernels
    python experiments/bench.py schemes                a training step of each position scheme
    python experiments/bench.py length                 long sequences, and SDPA or FlexAttention
    python experiments/bench.py kernels                attention's kernels without Python
    python experiments/bench.py sample                 generation and transformers, if installed

The implementations of a case take turns, because the speed of a machine drifts. A time is the
median over the turns. `ratio` is the time of the case's first row divided by this row's in the
same turn, the median over the turns: above 1 is faster. Compare within one table only. A table is
written as it grows, so a benchmark that is stopped leaves what it has measured.

Traps: on a CPU, GELU by tanh takes more than twice the time of nanoGPT's GELU by erf, and bfloat16
is slow without amx_bf16. So the processor's instructions stand above each table, and programs are
compared with the same architecture, dtype and optimizer, eager with eager, compiled with compiled.
gpu_minutes.sh runs these benchmarks on a GPU in order of their worth.
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
import subprocess
import tempfile
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch.autograd import DeviceType

import hf
import kernels
from experiments import operators
from experiments.turns import compare, format_table, single_row
from kernels import eager
from model import GPT, POSITIONS, GPTConfig
from nanolong import devices
from nanolong.errors import check_choice, require, run_main
from nanolong.evaluation.provenance import ROOT, provenance
from nanolong.strict_json import write_json


@dataclass
class BenchConfig:
    # in tokens, for attention, schemes, length and the prompts of sample (default: by the device)
    lengths: tuple[int, ...] = ()
    nanogpt: str = ""  # train, programs, profile: a checkout of nanoGPT; without it only ours
    rounds: int = 5  # turns of each implementation
    steps: int = 100  # timed steps of the smallest model; larger ones take fewer, at least 2
    # names of the models of train, programs, profile and sample, or of schemes (default: all)
    shapes: tuple[str, ...] = ()
    compiled: bool | None = None  # train, programs, profile: by torch.compile; default: both
    dtypes: tuple[str, ...] = ()  # train, programs, profile: float32, on a GPU bfloat16
    # train: also our default architecture with the loss in plain PyTorch, not by the kernel
    plain_loss: bool = False
    toy: bool = False  # sizes of a test, and torch.compile without a compiler; times mean nothing
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    out_dir: str = ""  # default: out/bench/DEVICE

    def __post_init__(self):
        for name in ("rounds", "steps"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1")

    def scale(self, device):
        """The sizes to take: toy, cpu or cuda."""
        return "toy" if self.toy else device.type


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
    "toy": {"characters": (1, 2, 32, 32, 65, 2, 1), "GPT-2": (1, 2, 32, 48, 97, 2, 1)},
}
# nanoGPT has biases here because our LayerNorm always has them.
LIKE_NANOGPT = {"pos": "learned", "mlp": "gelu_exact", "norm": "layernorm", "bias": "all"}
SAME, DEFAULT = "ours, same architecture", "ours, default architecture"
ARCHITECTURES = {SAME: LIKE_NANOGPT, DEFAULT: {}}
# Both programs know these settings.
SETTINGS = {"eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "dropout": 0.0}
SETTINGS |= {"learning_rate": 1e-3, "warmup_iters": 1, "gradient_accumulation_steps": 1}


def training_cases(cfg, device):
    """Yield a name, a shape, a dtype, whether it is compiled, and how many steps to take."""
    shapes = SHAPES[cfg.scale(device)]
    dtypes = cfg.dtypes or ("bfloat16" if device.type == "cuda" else "float32",)
    modes = (False, True) if cfg.compiled is None else (cfg.compiled,)
    for name, dtype, compiled in itertools.product(chosen(cfg, shapes), dtypes, modes):
        *sizes, fewer = shapes[name]
        shape = dict(zip(SIZES, sizes, strict=True))
        case = f"{name}, {dtype}, {'compiled' if compiled else 'eager'}"
        yield case, shape, dtype, compiled, max(2, cfg.steps // fewer)


def chosen(cfg, shapes):
    """Return the names of --shapes, by default all."""
    unknown = set(cfg.shapes) - set(shapes)
    require(not unknown, f"--shapes has others than {', '.join(shapes)}: give these")
    return cfg.shapes or shapes


def time_training(cfg, device):
    """AdamW without dropout, in one process: a step of each model in turn (forward, backward,
    clipping, fused AdamW) on the same batch."""
    for case, shape, dtype, compiled, steps in training_cases(cfg, device):
        takers = step_takers(cfg, device, shape, dtype, compiled)
        clocks = {name: functools.partial(clock_step, take) for name, take in takers.items()}
        work = (shape["batch_size"] * shape["block_size"], "tokens/s")
        yield compare("one process", case, clocks, steps, *work, min(steps, WARMUP))


def step_takers(cfg, device, shape, dtype, compiled):
    """Return what takes a training step of nanoGPT's model and of ours: name -> function."""
    # the same sizes for both, and as many parameters
    sizes = {key: shape[key] for key in SIZES[:-1]}
    models = {}
    if cfg.nanogpt:
        spec = importlib.util.spec_from_file_location("nanogpt", Path(cfg.nanogpt, "model.py"))
        nanogpt = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(nanogpt)
        models["nanoGPT"] = nanogpt.GPT(nanogpt.GPTConfig(**sizes, dropout=0.0, bias=True))
    for name, architecture in ARCHITECTURES.items():
        models[name] = GPT(GPTConfig(**sizes, **architecture))
    counts = [sum(p.numel() for p in model.parameters()) for model in models.values()]
    fits = not cfg.nanogpt or counts[0] == counts[1]
    require(fits, f"nanoGPT has {counts[0]:,} parameters, ours {counts[1]:,}")
    torch.compiler.reset()
    where = (2, shape["batch_size"], shape["block_size"])
    batch = torch.randint(shape["vocab_size"], where, device=device)
    how = (getattr(torch, dtype), compiled)
    takers = {}
    for name, model in models.items():
        takers[name] = make_step(cfg, model.to(device), *how, *batch)
    if cfg.plain_loss:
        changes = {"linear_cross_entropy": eager.linear_cross_entropy}
        takers["plain_loss"] = make_step(cfg, models[DEFAULT], *how, *batch, changes=changes)
    return takers


def make_step(cfg, model, dtype, compiled, x, y, docs=None, changes=None):
    """Return a function that queues a training step, and returns its loss.

    changes: functions that take the place of others in kernels/ meanwhile, by name.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=True)
    forward = model
    if compiled:  # a toy is traced, and not compiled
        forward = torch.compile(model, backend="eager" if cfg.toy else "inductor")

    def take():
        with devices.autocast(x.device, dtype), mock.patch.dict(vars(kernels), changes or {}):
            output = forward(x, y) if docs is None else forward(x, y, docs=docs)
        loss = output[1] if isinstance(output, tuple) else output  # nanoGPT returns logits, too
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return take


def clock_step(take):
    """Return the milliseconds of a training step."""
    start = time.perf_counter()
    take().item()  # waits for a GPU
    return 1000 * (time.perf_counter() - start)


def time_programs(cfg, device):
    """Whole processes: each is a train.py on the same random tokens, and counts as the median over
    the steps that it logs."""
    for case, shape, dtype, compiled, steps in training_cases(cfg, device):
        work = (shape["batch_size"] * shape["block_size"], "tokens/s")
        with tempfile.TemporaryDirectory() as folder:
            programs = program_settings(cfg, device, shape, dtype, compiled, steps, Path(folder))
            clocks = {
                name: functools.partial(time_program, *program)
                for name, program in programs.items()
            }
            rounds = min(cfg.rounds, steps)
            yield compare("whole processes", case, clocks, rounds, *work, in_process=False)


def program_settings(cfg, device, shape, dtype, compiled, steps, folder):
    """Return folder and settings of nanoGPT's train.py and of ours, which use a folder."""
    dataset = folder / "data"
    dataset.mkdir()
    meta = {"tokenizer": None, "vocab_size": shape["vocab_size"], "bos": None, "bos_default": False}
    write_json(dataset / "meta.json", meta)
    # nanoGPT's: a pickled dict of the size, in the oldest protocol, which is text
    (dataset / "meta.pkl").write_text(f"(dp0\nVvocab_size\np1\nI{shape['vocab_size']}\ns.")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        tokens = rng.integers(shape["vocab_size"], size=64 * shape["block_size"], dtype=np.uint16)
        tokens.tofile(dataset / f"{split}.bin")
    shape = {key: value for key, value in shape.items() if key != "vocab_size"}
    compiled = compiled and not cfg.toy  # the compiler would take most of the time
    settings = {**SETTINGS, **shape, "device": device, "dtype": dtype, "compile": compiled}
    settings |= {"max_iters": WARMUP + steps, "out_dir": folder / "run", "dataset": dataset}
    programs = {}
    if cfg.nanogpt:
        programs["nanoGPT"] = (cfg.nanogpt, {**settings, "bias": True})
    for name in (DEFAULT,) if cfg.toy else ARCHITECTURES:  # a process takes seconds to start
        programs[name] = (ROOT, {**settings, **ARCHITECTURES[name], "overwrite": True})
    return programs


def time_program(root, settings):
    """Run a train.py, and return the median milliseconds of the steps that it prints or logs."""
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-u", "train.py", *flags]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    require(done.returncode == 0, (done.stderr.strip().splitlines() or ["it failed"])[-1])
    times = re.findall(r"^iter \d+: .*?time ([\d.]+)ms", done.stdout, re.M)  # nanoGPT's log
    if root == ROOT:
        rows = map(json.loads, (settings["out_dir"] / "log.jsonl").read_text().splitlines())
        speeds = np.array([row["tokens_per_second"] for row in rows if "loss" in row])
        times = 1000 * settings["batch_size"] * settings["block_size"] / speeds
    return np.median(np.array(times[WARMUP:], float)).item()


# -----------------------------------------------------------------------------
# A profile

# Kinds of kernels, by a part of their names: the first that fits counts.
KINDS = {
    "products": "gemm|nvjet|cutlass|splitk|cublas|::mm|addmm|bmm|linear",
    "attention, forward": "_forward_kernel|fwd|fprop|flash_attention_for",
    "attention, dq": "_dq_kernel",
    "attention, dk and dv": "_dkdv_kernel",
    "attention, table": "_sweep_kernel|_reach_kernel",
    "attention, backward": "bwd|bprop|flash_attention.*backward|attention_backward",
    "RoPE": "rotate|rope|cos_sin",
    "loss": "log_softmax|logsumexp|nll|softmax|cross_entropy",
    "AdamW": "adam",
    "clipping": "foreach|multi_tensor|lpnorm|linalg_vector_norm",
    "norms": "norm",
    "activation": "gelu|silu",
    "embedding": "embedding|index|gather|scatter",
    "copies": "clone|cat|copy|memcpy|memset|fill|zeros",
    "sums": "sum|add|reduce",
}
PROFILED = 5  # steps
LARGEST = 12  # products that have rows of their own


def time_profile(cfg, device):
    """A training step by torch.profiler: milliseconds by kind of kernel, of the products by shape,
    in all (GPU busy), of the whole step (wall) and of the host until everything is queued. On a CPU
    the operators stand for kernels."""
    for case, shape, dtype, compiled, _ in training_cases(cfg, device):
        for name, take in step_takers(cfg, device, shape, dtype, compiled).items():
            for _ in range(1 if cfg.toy else 3):
                take().item()
            yield profile_rows(f"{name}, {case}", take, device)


def profile_rows(case, take, device):
    """Profile steps; return rows of ms a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    walls, hosts = [], []
    for _ in range(PROFILED):  # without the profiler, which takes time itself
        start = time.perf_counter()
        loss = take()
        hosts.append(1000 * (time.perf_counter() - start))
        loss.item()
        walls.append(1000 * (time.perf_counter() - start))
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(PROFILED):
            take().item()
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    by_kind, busy, end = {}, 0.0, 0.0
    events = [event for event in profile.events() if event.device_type == wanted]
    for event in sorted(events, key=lambda event: event.time_range.start):
        kind = kind_of(event.name)
        us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        by_kind[kind] = by_kind.get(kind, 0.0) + us / 1000 / PROFILED
        start, stop = max(event.time_range.start, end), event.time_range.end
        busy += max(0.0, stop - start) / 1000 / PROFILED
        end = max(end, stop)
    rows = [single_row("wall", case, "", float(np.median(walls)))]
    rows.append(single_row("host, until queued", case, "", float(np.median(hosts))))
    rows.append(single_row("busy", case, "", busy))
    for kind, ms in sorted(by_kind.items(), key=lambda pair: -pair[1]):
        rows.append(single_row("kind of kernel", case, kind, ms))
    return rows + product_rows(case, profile, device)


def kind_of(name):
    for kind, pattern in KINDS.items():
        if re.search(pattern, name.lower()):
            return kind
    return "other"


def product_rows(case, profile, device):
    """Rows of the products that take most, by the shapes of their matrices."""
    found = []
    for event in profile.key_averages(group_by_input_shape=True):
        us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if event.key in ("aten::mm", "aten::addmm", "aten::bmm") and us:
            shapes = [shape for shape in event.input_shapes if shape][:3]
            words = " by ".join("x".join(map(str, shape)) for shape in shapes)
            count = round(event.count / PROFILED)
            found.append((us / 1000 / PROFILED, f"{count} {event.key[6:]} of {words}"))
    largest = sorted(found, reverse=True)[:LARGEST]
    return [single_row("product", case, words, ms) for ms, words in largest]


# -----------------------------------------------------------------------------
# Schemes, and length

# Layers, heads, width, vocabulary; lengths; tokens of a step.
SCHEME_SHAPES = {
    "cpu": ((4, 3, 192, 257), (256, 1024), 2048),
    "cuda": ((12, 12, 768, 50304), (1024, 4096), 16384),
    "toy": ((1, 2, 32, 97), (48,), 96),
}


def time_schemes(cfg, device):
    """A compiled training step of each position scheme next to RoPE's: forward, backward, clipping
    and fused AdamW. On a GPU with the shape of GPT-2, else with four layers of bytes."""
    sizes, lengths, tokens = SCHEME_SHAPES[cfg.scale(device)]
    n_layer, n_head, n_embd, vocab_size = sizes
    names = ["rope", *(name for name in chosen(cfg, POSITIONS) if name != "rope")]
    torch._dynamo.config.recompile_limit = 4 * len(names)  # one class, many models
    dtype = devices.pick_dtype("auto", device)
    for T in cfg.lengths or lengths:
        torch.compiler.reset()
        batch = torch.randint(vocab_size, (2, max(1, tokens // T), T), device=device)
        clocks = {}
        for name in names:
            shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": T}
            model = GPT(GPTConfig(pos=name, vocab_size=vocab_size, **shape)).to(device)
            take = make_step(cfg, model, dtype, True, *batch)
            clocks[name] = functools.partial(clock_step, take)
        case = f"{batch.shape[1]} x {T}, {str(dtype).removeprefix('torch.')}, compiled"
        work = (batch[0].numel(), "tokens/s")
        yield compare("a training step", case, clocks, cfg.steps, *work, min(cfg.steps, WARMUP))


# Layers, query and key heads, width, vocabulary; lengths.
LONG_SHAPES = {
    "cpu": ((2, 6, 2, 192, 257), (1024,)),
    "cuda": ((12, 12, 4, 768, 50304), (16384, 32768)),
    "toy": ((1, 3, 1, 48, 97), (48,)),
}
LONG_SCHEMES = ("rope", "alibi", "t5", "fox")


def time_length(cfg, device):
    """A training step on one long sequence, not compiled, with a key head for three query heads:
    ours, and the same model whose attention is SDPA, or FlexAttention (compiled on a GPU) if there
    is a term, a window of an eighth of the sequence, or documents of a quarter."""
    sizes, lengths = LONG_SHAPES[cfg.scale(device)]
    n_layer, n_head, n_kv_head, n_embd, vocab_size = sizes
    dtype = devices.pick_dtype("auto", device)
    schemes = chosen(cfg, dict.fromkeys(LONG_SCHEMES))
    for T, pos, kind in itertools.product(
        cfg.lengths or lengths, schemes, ("causal", "window", "documents")
    ):
        shape = {"n_layer": n_layer, "n_head": n_head, "n_kv_head": n_kv_head, "n_embd": n_embd}
        window = T // 8 if kind == "window" else 0
        shape |= {"block_size": T, "vocab_size": vocab_size, "window": window}
        model = GPT(GPTConfig(pos=pos, **shape)).to(device)
        batch = torch.randint(vocab_size, (2, 1, T), device=device)
        docs = None
        if kind == "documents":
            docs = (torch.arange(T, device=device) // (T // 4))[None]
        clocks = {}
        theirs = {"attention": operators.peer_attention}
        for name, changes in (("ours", {}), ("PyTorch's attention", theirs)):
            take = make_step(cfg, model, dtype, False, *batch, docs, changes)
            clocks[name] = functools.partial(clock_step, take)
        case = f"{pos}, {kind}, 1 x {T}, {str(dtype).removeprefix('torch.')}"
        yield compare("a long step", case, clocks, cfg.rounds, T, "tokens/s", 1)


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
TOY_MODELS = {"toy": ({"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 128}, 1)}
NEW = 48  # tokens, the first four of which do not count


def time_sampling(cfg, device):
    """A decoding step of RoPE models with random weights, at temperature 0.8 and top_k 200: the
    difference between 48 new tokens and 4, by default after prompts of 64. hf.py exports the models
    and checks that transformers has the same logits. In bfloat16 too, if sample.py uses it here."""
    models = TOY_MODELS if cfg.toy else MODELS
    for size, length in itertools.product(chosen(cfg, models), cfg.lengths or (64,)):
        shape, batch_size = models[size]
        shape = shape | {"block_size": max(shape["block_size"], length + NEW)}
        model = GPT(GPTConfig(**shape)).to(device)
        for p in model.parameters():
            torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.04)
        prompts = torch.randint(model.config.vocab_size, (batch_size, length), device=device)
        # float32, and what sample.py would take
        for dtype in dict.fromkeys((torch.float32, devices.pick_dtype("auto", device))):
            torch.compiler.reset()
            generators = sampling_generators(cfg, model, prompts, dtype)
            greedy = [run(max_new_tokens=12, top_k=1)[:, -12:].cpu() for run in generators.values()]
            same = all(torch.equal(tokens, greedy[0]) for tokens in greedy)
            case = f"{size}, {length} keys, {str(dtype).removeprefix('torch.')}"
            case += ", same greedy tokens" if same else ", other greedy tokens"
            clocks = {
                name: functools.partial(clock_decoding, generate)
                for name, generate in generators.items()
            }
            yield compare("sampling", case, clocks, cfg.rounds, batch_size, "tokens/s", 1)


def sampling_generators(cfg, model, prompts, dtype):
    """Return what continues the prompts: name -> function of max_new_tokens and top_k."""

    def generate(compiled, max_new_tokens, top_k=200):
        with devices.autocast(prompts.device, dtype):
            options = {"temperature": 0.8, "top_k": top_k, "compiled": compiled}
            tokens = model.generate(prompts, max_new_tokens, **options)
            return torch.cat(list(tokens), 1)

    generators = {"ours": functools.partial(generate, False)}
    if cfg.toy:  # the compiler would take most of the time
        return generators
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
    for n in (4, NEW):
        generate(max_new_tokens=n)[0, -1].item()  # waits for a GPU
        times.append(time.perf_counter())
    few, many = np.diff(times)
    return 1000 * float(many - few) / (NEW - 4)


# -----------------------------------------------------------------------------
# main

BENCHMARKS = {
    "operators": operators.time_operators,
    "train": time_training,
    "programs": time_programs,
    "profile": time_profile,
    "schemes": time_schemes,
    "length": time_length,
    "kernels": operators.time_kernels,
    "sample": time_sampling,
}
# Settings that only some benchmarks have.
TRAINING = ("train", "programs", "profile")
USED_BY = {"nanogpt": TRAINING, "compiled": TRAINING, "dtypes": TRAINING, "plain_loss": ("train",)}
USED_BY |= {
    "shapes": (*TRAINING, "schemes", "length", "sample"),
    "lengths": ("operators", "kernels", "schemes", "length", "sample"),
}


def describe_machine(cfg, device):
    """Return commit, hardware, versions and nanoGPT's commit in words."""
    # where it runs: the processor counts next to a GPU, too
    words = provenance(torch.device("cpu"))
    if device.type == "cuda":
        triton = importlib.import_module("triton").__version__
        words = f"{torch.cuda.get_device_name(device)}, triton {triton}, {words}"
    if cfg.nanogpt:
        git = ["git", "-C", cfg.nanogpt, "rev-parse", "--short", "HEAD"]
        found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        words += f"; nanoGPT {found or 'of an unknown commit'}"
    return words


def main(argv=None):
    args = settings.parse(cfg=BenchConfig, paths=", ".join(BENCHMARKS), argv=argv)
    cfg, name = args.cfg, (args.paths or ["operators"])[0]
    check_choice(name, BENCHMARKS, "benchmark")
    for setting, names in USED_BY.items():
        fits = setting not in args.given or name in names
        require(fits, f"{name} has no --{setting}: leave it out, or choose {', '.join(names)}")
    model = Path(cfg.nanogpt, "model.py")
    repair = "give --nanogpt=PATH of a checkout of nanoGPT"
    require(not cfg.nanogpt or model.is_file(), f"{model} is missing: {repair}")
    device = devices.pick_device(cfg.device)
    require(device.type in ("cpu", "cuda"), f"{device} has no clock here: choose cpu or cuda")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    device_name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = Path(cfg.out_dir or f"out/bench/{device_name}")
    folder.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python experiments/bench.py", *words])
    if cfg.nanogpt:
        command = command.replace(f"nanogpt={cfg.nanogpt}", "nanogpt=PATH")
    machine = describe_machine(cfg, device)
    # measure, and write JSON and Markdown after each case
    file = folder / f"{'bench' if name == 'operators' else name}.json"
    about = " ".join(BENCHMARKS[name].__doc__.split())
    rows = []
    for found in BENCHMARKS[name](cfg, device):
        rows += found
        write_json(file, {"command": command, "machine": machine, "rows": rows}, indent=1)
        lines = [f"# {name}", "", f"`{command}`: {machine}.", "", about, "", format_table(rows), ""]
        file.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    print("", *lines, f"wrote {file.with_suffix('.md')} and {file.name}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
