"""bench.py train: whole training runs, each a process of its own, in turns.

On a CPU: train.py of nanoGPT, run in its checkout (--nanogpt=PATH, with data/shakespeare_char
prepared), with the settings that its README gives for CPUs, and compiled too; our train.py,
compiled and not; and, with --baseline=PATH, that of another checkout of nanoLong. All read the same
token files with the same number of threads, in the shape of nanoGPT's character model and in that
of our demo. The time of a step is the median over a run without its first five steps, as each
program logs it. The first step counts from the start of the process and includes compilation with
an empty cache. Memory is the peak of the process (ru_maxrss) without its compiler's helpers.
`speedup` is relative to the first row in the same round, the median over the rounds. From the
second round on only the first row, our default (compiled) and the baseline run.

On a GPU: 124 M parameters at 1k and 4k tokens, random tokens, bfloat16, compiled, a process each:
ours, the baseline, nanoGPT's model and optimizer, transformers' Llama with SDPA. An alternative
that is not installed has no numbers.
"""

import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from data import find_dataset
from data.prepare import prepare_missing
from experiments.report import ROOT, count, markdown_table
from model import GPT, GPTConfig
from nanolong.devices import peak_flops
from nanolong.errors import UserError
from nanolong.validate import require


@dataclass
class Case:
    name: str
    preset: str  # ours
    nanogpt: dict  # the same shape in nanoGPT's settings
    tokens_per_step: int
    steps: int
    optimizer: str  # of the preset


CASES = (
    Case(
        "characters: 4 layers of 128, 12 x 64 tokens",
        "config/shakespeare_cpu.toml",
        {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
        tokens_per_step=12 * 64,
        steps=200,
        optimizer="adamw",
    ),
    Case(
        "the demo: 4 layers of 192, 16 x 256 tokens",
        "config/demo.toml",
        {"n_layer": 4, "n_head": 3, "n_embd": 192, "block_size": 256, "batch_size": 16},
        tokens_per_step=16 * 256,
        steps=35,
        optimizer="muon",
    ),
)
EVERY_ROUND = ("nanoGPT, CPU settings of its README", "ours, compiled", "baseline, compiled")
GPU_SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304}

# A training loop for a GPU. Arguments: the implementation, batch size, length, its checkout. Prints
# tokens per second and the peak memory in bytes.
GPU_CHILD = """
import json
import sys
import time

implementation, path = sys.argv[1], sys.argv[4]
B, T = int(sys.argv[2]), int(sys.argv[3])
n_steps = 30
sys.path.insert(0, path)
import torch

torch.manual_seed(0)
torch.set_float32_matmul_precision("high")

if implementation == "nanogpt":
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=T, dropout=0.0, bias=False, **SHAPE)).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
elif implementation == "transformers":
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        hidden_size=SHAPE["n_embd"],
        num_hidden_layers=SHAPE["n_layer"],
        num_attention_heads=SHAPE["n_head"],
        intermediate_size=2048,
        vocab_size=SHAPE["vocab_size"],
        max_position_embeddings=T,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
else:
    from model import GPT, GPTConfig
    try:
        from nanolong.devices import prepare_device
    except ImportError:  # a checkout from before 0.1
        from config import prepare_device
    prepare_device(torch.device("cuda"))
    model = GPT(GPTConfig(block_size=T, **SHAPE)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)

def compute_loss(tokens):
    if implementation == "nanogpt":
        return model(tokens, tokens)[1]
    if implementation == "transformers":
        return model(input_ids=tokens, labels=tokens).loss
    return model(tokens, tokens)

compute_loss = torch.compile(compute_loss)

def step():
    tokens = torch.randint(0, SHAPE["vocab_size"], (B, T), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = compute_loss(tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss

for _ in range(5):
    step().item()
torch.cuda.reset_peak_memory_stats()
start = time.perf_counter()
for _ in range(n_steps):
    loss = step()
loss.item()
seconds = time.perf_counter() - start
print("RESULT", json.dumps([n_steps * B * T / seconds, torch.cuda.max_memory_allocated()]))
"""


@dataclass
class Timing:
    step: float  # seconds, the median
    first_step: float  # seconds from the start of the process
    peak_mb: float


# -----------------------------------------------------------------------------
# Running and timing one process.


def run_timed(command, cwd, has_stepped):
    """Run a Python script to its end.

    has_stepped: a function of the text printed so far; whether the first step is done.
    Returns (output, peak memory in MB, seconds until has_stepped first came true).
    """
    first_step = None
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "printed"), "w+") as printed:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)],
            cwd=cwd,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        pid = 0
        while not pid:
            time.sleep(0.01)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            output = Path(printed.name).read_text(errors="replace")
            if first_step is None and has_stepped(output):
                first_step = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    words = " ".join(map(str, command[:3]))
    ending = output[-300:].strip()
    require(not process.returncode, f"{words} failed: run it yourself; it ended with {ending!r}")
    return output, usage.ru_maxrss / 1024, first_step


def time_nanolong(root, flags, dataset, tokens_per_step, steps, scratch):
    """Time train.py of a nanoLong checkout: Timing."""
    run = Path(scratch, "run")
    shutil.rmtree(run, ignore_errors=True)
    log = run / "log.jsonl"

    def has_stepped(output):
        return log.exists() and '"loss"' in log.read_text()

    command = [
        Path(root, "train.py"),
        *flags,
        f"--dataset={dataset}",
        f"--out_dir={run}",
        f"--max_iters={steps}",
        "--eval_iters=1",
        "--eval_interval=1000000",
        "--log_interval=1",
        "--device=cpu",
    ]
    _, peak_mb, first_step = run_timed(command, root, has_stepped)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    speeds = [row["tokens_per_second"] for row in rows if "loss" in row]
    seconds = statistics.median(tokens_per_step / speed for speed in speeds[5:])
    return Timing(seconds, first_step, peak_mb)


def time_nanogpt(path, shape, compile_model, steps, scratch):
    """Time train.py of nanoGPT, its character configuration with another shape: Timing."""

    def has_stepped(output):
        return re.search(r"^iter .*\n", output, re.M)

    command = [
        "train.py",
        "config/train_shakespeare_char.py",
        "--device=cpu",
        f"--compile={compile_model}",
        "--eval_iters=1",
        "--eval_interval=1000000",
        "--log_interval=1",
        "--dropout=0.0",
        f"--max_iters={steps}",
        f"--lr_decay_iters={steps}",
        f"--out_dir={scratch}/nanogpt",
        *(f"--{name}={value}" for name, value in shape.items()),
    ]
    output, peak_mb, first_step = run_timed(command, path, has_stepped)
    times = re.findall(r"^iter \d+: .*?time ([\d.]+)ms", output, re.M)
    seconds = statistics.median(float(ms) / 1000 for ms in times[5:])
    return Timing(seconds, first_step, peak_mb)


# -----------------------------------------------------------------------------
# The comparison on a CPU.


def copy_nanogpt_data(path, folder):
    """Make a dataset of ours from nanoGPT's token files, in a folder."""
    source = Path(path, "data", "shakespeare_char")
    folder.mkdir()
    vocab_size = 0
    for name in ("train.bin", "val.bin"):
        shutil.copy(source / name, folder / name)
        tokens = memoryview((source / name).read_bytes()).cast("H")
        vocab_size = max(vocab_size, max(tokens) + 1)
    meta = {"tokenizer": None, "vocab_size": vocab_size, "bos": None, "bos_default": False}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def check_paths(cfg):
    """Raise UserError unless there is something to compare with."""
    repair = (
        "give --nanogpt=PATH of a checkout in which python data/shakespeare_char/prepare.py has "
        "run, or --baseline=PATH of an older nanoLong"
    )
    require(cfg.nanogpt or cfg.baseline, f"there is nothing to compare train with: {repair}")
    needed = {cfg.nanogpt: ("train.py", "data/shakespeare_char/train.bin")}
    needed |= {cfg.baseline: ("train.py",)}
    for path, files in needed.items():
        for file in files if path else ():
            require(Path(path, file).is_file(), f"{path} has no {file}: {repair}")


def list_runs(case, cfg, dataset, steps, scratch):
    """The runs of a case: name -> a function without arguments that returns a Timing."""
    runs = {}

    def add_ours(name, root, *flags):
        words = (root, [case.preset, *flags], dataset, case.tokens_per_step, steps, scratch)
        runs[name] = functools.partial(time_nanolong, *words)

    if cfg.nanogpt:
        path = Path(cfg.nanogpt).resolve()
        for name, compiled in (("CPU settings of its README", False), ("compiled", True)):
            words = (path, case.nanogpt, compiled, steps, scratch)
            runs[f"nanoGPT, {name}"] = functools.partial(time_nanogpt, *words)
    if cfg.baseline:
        baseline = Path(cfg.baseline).resolve()
        add_ours("baseline, compiled", baseline, "--compile=true")
        add_ours("baseline, not compiled", baseline, "--compile=false")
    add_ours("ours, compiled", ROOT, "--compile=true")
    add_ours("ours, not compiled", ROOT, "--compile=false")
    if case.optimizer != "adamw":
        add_ours("ours, compiled, AdamW", ROOT, "--compile=true", "--optimizer=adamw")
    return runs


def measure_case(case, cfg, dataset, scratch):
    runs = list_runs(case, cfg, dataset, cfg.iterations or case.steps, scratch)
    timings = {name: [] for name in runs}
    for round_number in range(cfg.rounds):
        for name, run in runs.items():
            if round_number and name not in EVERY_ROUND:
                continue
            timing = run()
            timings[name].append(timing)
            speed = case.tokens_per_step / timing.step
            print(f"{case.name}: {name}: {speed:,.0f} tokens/s", flush=True)

    rows = []
    first = timings[next(iter(runs))]
    for name, of_run in timings.items():
        seconds = statistics.median(timing.step for timing in of_run)
        # a row that ran in fewer rounds is compared in those
        speedups = [a.step / b.step for a, b in zip(first, of_run, strict=False)]
        row = {
            "case": case.name,
            "name": name,
            "tokens_per_second": case.tokens_per_step / seconds,
            "ms": 1000 * seconds,
            "speedup": statistics.median(speedups),
            "lowest_speedup": min(speedups),
            "first_step_s": statistics.median(timing.first_step for timing in of_run),
            "peak_mb": statistics.median(timing.peak_mb for timing in of_run),
        }
        rows.append(row)
    return rows


def commit_of(path):
    """The commit of a checkout, or "unknown"."""
    command = ["git", "-C", path, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def describe_setup(cfg):
    """The commits that are compared, the rounds and the steps, as a sentence."""
    paths = {"nanoGPT": cfg.nanogpt, "baseline": cfg.baseline}
    commits = [f"{name} {commit_of(path)}; " for name, path in paths.items() if path]
    steps = ", ".join(str(cfg.iterations or case.steps) for case in CASES)
    rounds = count(cfg.rounds, "round")
    return f"{''.join(commits)}{rounds}, in turns; {steps} steps per run."


def measure(cfg, device):
    """What train.json holds besides the provenance: rows, and on a CPU a description."""
    if device.type == "cuda":
        return {"rows": measure_gpu(cfg, device)}
    check_paths(cfg)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        if cfg.nanogpt:
            dataset = copy_nanogpt_data(cfg.nanogpt, Path(scratch, "data"))
        else:
            prepare_missing("python")
            dataset = find_dataset("python")
        for case in CASES:
            rows += measure_case(case, cfg, dataset, scratch)
    return {"setup": describe_setup(cfg), "rows": rows}


# -----------------------------------------------------------------------------
# The comparison on a GPU.


def measure_gpu(cfg, device):
    """A row per shape and implementation."""
    paths = {"ours": ROOT, "baseline": cfg.baseline, "nanogpt": cfg.nanogpt}
    paths = {name: Path(path).resolve() for name, path in paths.items() if path}
    paths["transformers"] = Path(tempfile.gettempdir())
    peak = peak_flops(device)
    rows = []
    for T, B in ((1024, 32), (4096, 8)):
        with torch.device("meta"):
            flops = GPT(GPTConfig(block_size=T, **GPU_SHAPE)).flops_per_token()
        for name, path in paths.items():
            row = {
                "case": f"124 M, {B} x {T}",
                "name": name,
                "tokens_per_second": None,
                "mfu": None,
                "peak_mb": None,
                "note": "",
            }
            code = f"SHAPE = {GPU_SHAPE!r}\n{GPU_CHILD}"
            try:
                words = [code, name, str(B), str(T), str(path)]
                speed, memory = run_child(words, tempfile.gettempdir())
                row["tokens_per_second"] = speed
                row["peak_mb"] = memory / 2**20
                row["mfu"] = speed * flops / peak if peak else None
            except UserError as error:
                row["note"] = str(error)
            print(row, flush=True)
            rows.append(row)
    return rows


def run_child(words, cwd, **env):
    """Run Python code, words[0], with arguments; return the JSON that it prints after RESULT.

    Raises UserError with the reason, if it fails.
    """
    command = [sys.executable, "-c", *words]
    env = {**os.environ, **env}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    require("RESULT" in done.stdout, reason[:120])
    return json.loads(done.stdout.split("RESULT")[1])


# -----------------------------------------------------------------------------
# The table.


def format_report(result):
    """The lines of Markdown for what measure() returned."""
    if result["device"] == "cuda":
        return format_gpu_report(result["rows"])
    header = ["case", "", "tokens/s", "ms per step", "speedup (lowest round)"]
    header += ["first step after, s", "peak memory, MB"]
    rows = []
    for row in result["rows"]:
        cells = [
            row["case"],
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ms']:.1f}",
            f"{row['speedup']:.2f} ({row['lowest_speedup']:.2f})",
            f"{row['first_step_s']:.1f}",
            f"{row['peak_mb']:,.0f}",
        ]
        rows.append(cells)
    return [result["setup"], "", *markdown_table(header, rows)]


def format_gpu_report(rows):
    forms = {"tokens_per_second": ",.0f", "mfu": ".1%", "peak_mb": ",.0f"}
    lines = []
    for row in rows:
        cells = dict.fromkeys(forms, "not measured")
        cells |= {name: format(row[name], forms[name]) for name in forms if row[name] is not None}
        lines.append([row["case"], row["name"], *cells.values(), row["note"]])
    header = ["case", "", "tokens/s", "MFU", "peak memory, MB", ""]
    text = "MFU counts the FLOPs per token of our model for all, whose shapes are alike."
    return [text, "", *markdown_table(header, lines)]
