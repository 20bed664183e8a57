"""bench.py sample: tokens generated per second, compared with generate() of transformers.

RoPE models of random weights, saved as checkpoints and exported to transformers by hf.py. Each
implementation is a process of its own, started outside the project, in turns. The time of a
decoding step is the median difference between generating many tokens and a few, after prompts of 64
tokens (or of 16, 32, 48 and 64, padded on the left), at temperature 0.8 and top_k 200. `speedup` is
relative to the first row of a case in the same round, the median over the rounds: above 1 is
faster. The float32 implementations also generate 12 tokens greedily; the last column says whether
ours are those of transformers. "sample.py's default" is --dtype=auto. "compiled" is --compile=true,
after the given seconds of compilation with an empty cache. With --baseline=PATH, another checkout
of nanoLong generates from the same weights.

On a GPU, the fraction of memory bandwidth is that of reading the weights once per decoding step, in
the dtype of the products, relative to a copy in the same process.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from experiments.bench_train import run_child
from experiments.report import ROOT, markdown_table
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.plots import unique
from nanolong.validate import require

GOAL = 1.5  # times transformers in float32, at batch size 1


@dataclass
class Case:
    name: str
    config: dict
    prompt_lengths: tuple[int, ...]
    new_tokens: int


GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
CASES = (
    Case(
        "the demo's shape, 1.8 M, batch 1",
        {"n_layer": 4, "n_head": 3, "n_embd": 192, "block_size": 512, "vocab_size": 257},
        prompt_lengths=(64,),
        new_tokens=200,
    ),
    Case("GPT-2's shape, 124 M, batch 1", GPT2, prompt_lengths=(64,), new_tokens=48),
    Case(
        "GPT-2's shape, 124 M, 4 prompts of unequal length",
        GPT2,
        prompt_lengths=(16, 32, 48, 64),
        new_tokens=24,
    ),
)

# The code of child processes. `job` is the JSON of a dict. SAVE and NANOLONG run in a checkout of
# nanoLong, so they use only what all versions have.
SAVE = """
import json
import sys

job = json.loads(sys.argv[1])
sys.path.insert(0, job["root"])
import torch
from model import GPT, GPTConfig

torch.manual_seed(job["seed"])
model = GPT(GPTConfig(**job["config"]))
with torch.no_grad():
    for p in model.parameters():
        if p.dim() == 2:
            p.normal_(0, 0.04)
model.save(job["folder"])
print("RESULT true")
"""
NANOLONG = """
sys.path.insert(0, job["root"])
from model import GPT

device = torch.device(job["device"])
dtype = getattr(torch, job["dtype"])
model = GPT.load(job["folder"]).to(device)
prompts = [p.to(device) for p in prompts]
if len(prompts) == 1:
    prompts = prompts[0][None]

def generate(n, top_k):
    temperature = 0.8 if top_k else 0.0
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        tokens = model.generate(prompts, n, temperature, top_k=top_k, compiled=job["compiled"])
        return torch.cat(list(tokens), 1)
"""
TRANSFORMERS = """
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

dtype = getattr(torch, job["dtype"])
model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype)
model.eval().to(job["device"])
width = max(len(p) for p in prompts)
ids = [pad(p, (width - len(p), 0)) for p in prompts]
mask = [pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts]
ids = torch.stack(ids).to(job["device"])
mask = torch.stack(mask).to(job["device"])

def generate(n, top_k):
    how = dict(do_sample=True, temperature=0.8, top_k=top_k) if top_k else dict(do_sample=False)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=n,
        min_new_tokens=n,
        pad_token_id=0,
        eos_token_id=-1,
        **how,
    )
    return out[:, width:]
"""
# Before and after one of the two above.
TIMING_START = """
import json
import statistics
import sys
import time
import warnings

import torch

job = json.loads(sys.argv[1])
warnings.simplefilter("ignore")
prompts = [torch.tensor(p) for p in job["prompts"]]
"""
TIMING_END = """
def seconds(n):
    start = time.perf_counter()
    generate(n, 200)[0, -1].item()
    return time.perf_counter() - start

def copy_bandwidth():
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 20 * source.numel() / (time.perf_counter() - start)

few = 4
many = job["new_tokens"]
first = seconds(few)
greedy = generate(12, 0).tolist()
differences = [seconds(many) - seconds(few) for _ in range(3)]
result = {
    "ms": 1000 * statistics.median(differences) / (many - few),
    "greedy": greedy,
    "bandwidth": copy_bandwidth() if job["device"] == "cuda" else None,
    "first": first,
}
print("RESULT", json.dumps(result))
"""


@dataclass
class Implementation:
    name: str
    code: str
    dtype: str
    compiled: bool = False
    is_default: bool = False  # what sample.py does when nothing is asked for
    root: str = ""  # of the checkout
    folder: str = ""  # of the checkpoint in its format


# -----------------------------------------------------------------------------
# Preparing checkpoints and running children.


def save_checkpoint(root, config, seed, folder):
    """Save a model of random weights by the code of a checkout, in the format that it reads."""
    job = {"root": str(root), "config": config, "seed": seed, "folder": str(folder)}
    try:
        run_child([SAVE, json.dumps(job)], folder.parent)
    except UserError as error:
        raise UserError(f"the checkout {root} cannot save a model: fix it ({error})") from None


def default_dtype(n_parameters, device):
    """The dtype that sample.py chooses for --dtype=auto."""
    is_fast = n_parameters > 16e6 and torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if device.type == "cuda" or is_fast else "float32"


def list_implementations(dtype, baseline, scratch):
    """What is compared. dtype: the default of sample.py."""
    rows = [("transformers", TRANSFORMERS, other, False) for other in ("float32", "bfloat16")]
    rows += [("ours", NANOLONG, other, False) for other in ("float32", "bfloat16")]
    rows.append(("ours", NANOLONG, dtype, True))
    if baseline:
        rows += [("baseline", NANOLONG, dtype, compiled) for compiled in (False, True)]
    roots = {"ours": str(ROOT), "baseline": str(Path(baseline).resolve())}
    implementations = []
    for program, code, own_dtype, compiled in rows:
        name = f"{program}, {own_dtype}" + (", compiled" if compiled else "")
        is_default = (program, own_dtype, compiled) == ("ours", dtype, False)
        folder = str(Path(scratch, program))
        details = (is_default, roots.get(program, ""), folder)
        implementations.append(Implementation(name, code, own_dtype, compiled, *details))
    return implementations


def make_prompts(case):
    """Random prompts, the same for all implementations: lists of token ids."""
    prompts = []
    for length in case.prompt_lengths:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, case.config["vocab_size"], (length,), generator=generator)
        prompts.append(tokens.tolist())
    return prompts


def time_implementation(implementation, case, device, scratch):
    """Time one implementation: the result of TIMING_END. Raises UserError with the reason."""
    job = asdict(implementation) | {"device": device.type}
    job |= {"prompts": make_prompts(case), "new_tokens": case.new_tokens}
    code = TIMING_START + implementation.code + TIMING_END
    env = {"PYTHONPATH": "", "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=scratch)}
    return run_child([code, json.dumps(job)], scratch, **env)


# -----------------------------------------------------------------------------
# Measuring.


def measure_case(case, seed, cfg, device, scratch):
    ours, theirs = Path(scratch, "ours"), Path(scratch, "transformers")
    save_checkpoint(ROOT, case.config, seed, ours)
    if cfg.baseline:
        save_checkpoint(Path(cfg.baseline).resolve(), case.config, seed, Path(scratch, "baseline"))
    command = [sys.executable, "hf.py", "export", ours, theirs, "--verify=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    reason = done.stderr.strip()[-200:]
    require(not done.returncode, f"hf.py cannot export the model: fix that first ({reason})")
    n_parameters = sum(p.numel() for p in GPT(GPTConfig(**case.config)).parameters())
    dtype = default_dtype(n_parameters, device)
    implementations = list_implementations(dtype, cfg.baseline, scratch)

    results = {implementation.name: [] for implementation in implementations}
    failures = {}
    for _ in range(cfg.rounds):
        for implementation in implementations:
            name = implementation.name
            try:
                result = time_implementation(implementation, case, device, scratch)
            except UserError as error:
                failures[name] = str(error)
                continue
            results[name].append(result)
            print(f"{case.name}: {name}: {result['ms']:.2f} ms per step", flush=True)

    first = results[implementations[0].name]
    rows = []
    for implementation in implementations:
        row = make_row(implementation, case, results[implementation.name], first, n_parameters)
        row["note"] = failures.get(implementation.name, "")
        rows.append(row)
    return rows


def make_row(implementation, case, results, first, n_parameters):
    """A row from the results of an implementation and of the first one, a result per round."""
    name = implementation.name
    if implementation.is_default:
        name += " (sample.py's default)"
    if implementation.compiled and results:
        name += f", after {results[-1]['first']:.0f} s"
    row = {"case": case.name, "name": name}
    if not results:
        return row
    ms = statistics.median(result["ms"] for result in results)
    row["ms"] = ms
    row["tokens_per_second"] = 1000 * len(case.prompt_lengths) / ms
    row["speedup"] = None
    if first:
        # where one of the two failed in some round, there are fewer pairs
        speedups = [a["ms"] / b["ms"] for a, b in zip(first, results, strict=False)]
        row["speedup"] = statistics.median(speedups)
        if implementation.code == NANOLONG and implementation.dtype == "float32":
            row["same_greedy"] = results[-1]["greedy"] == first[-1]["greedy"]
    bandwidth = results[0]["bandwidth"]
    if bandwidth:
        n_bytes = n_parameters * (2 if implementation.dtype == "bfloat16" else 4)
        row["bandwidth"] = n_bytes / (ms / 1000) / bandwidth
    return row


def measure(cfg, device):
    """What sample.json holds besides the provenance: rows."""
    found = not cfg.baseline or Path(cfg.baseline, "model.py").is_file()
    require(found, f"{cfg.baseline} has no model.py: give --baseline=PATH of a checkout")
    rows = []
    for seed, case in enumerate(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure_case(case, seed, cfg, device, scratch)
    return {"rows": rows}


# -----------------------------------------------------------------------------
# The table.


def format_report(result):
    """The lines of Markdown for what measure() returned."""
    header = ["case", "", "ms per step", "tokens/s", "speedup", "of memory bandwidth"]
    rows = result["rows"]
    cells = []
    for row in rows:
        measured = [row.get("note") or "not measured", "", ""]
        if row.get("speedup"):
            measured = [f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.1f}"]
            measured.append(f"{row['speedup']:.2f}")
        bandwidth = f"{row['bandwidth']:.0%}" if row.get("bandwidth") else ""
        same_greedy = {True: "yes", False: "no", None: ""}[row.get("same_greedy")]
        cells.append([row["case"], row["name"], *measured, bandwidth, same_greedy])
    lines = markdown_table([*header, "same greedy tokens"], cells)
    lines.append("")
    for case in unique(rows, "case"):
        if "batch 1" in case:
            lines += goal_lines([row for row in rows if row["case"] == case and "ms" in row])
    return lines


def goal_lines(rows):
    """Whether the goal is met at batch size 1, from the measured rows of a case."""
    default = next((row for row in rows if "sample.py's default" in row["name"]), None)
    if default is None or not default["speedup"]:
        return []
    shape = default["case"].partition(",")[0]
    verdicts = [f"out of the box {format_verdict(default)}"]
    for row in rows:
        if row["name"].startswith("ours") and "compiled" in row["name"] and row["speedup"]:
            verdicts.append(f"compiled {format_verdict(row)}")
    theirs = [row["ms"] for row in rows if row["name"].startswith("transformers")]
    return [
        f"Goal at batch 1, {GOAL} times transformers out of the box (float32): {shape}: "
        f"{'; '.join(verdicts)}. Compared with the faster of its two dtypes, out of the box "
        f"{min(theirs) / default['ms']:.2f}."
    ]


def format_verdict(row):
    verdict = "met" if row["speedup"] >= GOAL else "not met"
    return f"{row['speedup']:.2f}, {verdict}"
