"""`bench.py train`: whole training runs beside what one would use instead, as real processes, in turns.

On a CPU: nanoGPT's own train.py, run in its checkout (--nanogpt=PATH, whose data/shakespeare_char is prepared) as its README says for CPUs and compiled too, beside our train.py as it comes and not compiled, on the
same token files with the same number of threads: nanoGPT's character shape, and the demo's. A run's time is the median over its iterations without the first five, as each program logs them; the
first iteration counts from the start of the process, compilation with an empty cache included; memory is the most that the process held (ru_maxrss, without its compiler's helpers). `beside` is tokens/s over those of the
first row in the same round, the median over the rounds; the second and later rounds are of the first row and of ours as it comes, compiled.

On a GPU: 124 M parameters at T = 1k and 4k, random tokens, bfloat16, compiled, in a process for each: ours, nanoGPT's model with its optimizer, transformers' Llama with SDPA. A rival that is not installed has no row.
"""
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import config
from config import UserError

ROOT = Path(__file__).resolve().parent.parent
CASES = {  # name: our settings, nanoGPT's settings, tokens in an iteration, iterations
    "characters: 4 layers of 128, 12 x 64 tokens": (["config/shakespeare_cpu.toml"], dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12), 12 * 64, 200),
    "the demo: 4 layers of 192, 16 x 256 tokens": (["config/demo.toml"], dict(n_layer=4, n_head=3, n_embd=192, block_size=256, batch_size=16), 16 * 256, 35),
}
ALWAYS = ("nanoGPT, as its README says for CPUs", "ours, compiled")  # in every round; the others in the first
GPU = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304)
# A training step in nanoGPT's style, for a GPU: argv is what, batch, T, its checkout or ours. Prints tokens/s and the peak of memory in bytes.
CHILD = """
import sys, time, json
what, B, T, path, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], 30
sys.path.insert(0, path)
import torch
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
if what == "nanogpt":
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=T, dropout=0.0, bias=False, **SHAPE)).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    loss = lambda x: model(x, x)[1]
elif what == "transformers":
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(hidden_size=SHAPE["n_embd"], num_hidden_layers=SHAPE["n_layer"], num_attention_heads=SHAPE["n_head"], intermediate_size=2048, vocab_size=SHAPE["vocab_size"],
                             max_position_embeddings=T, tie_word_embeddings=True, attn_implementation="sdpa")).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    loss = lambda x: model(input_ids=x, labels=x).loss
else:
    from model import GPT, GPTConfig
    import config
    config.prepare_device(torch.device("cuda"))
    model = GPT(GPTConfig(block_size=T, **SHAPE)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    loss = lambda x: model(x, x)
loss = torch.compile(loss)
def step():
    x = torch.randint(0, SHAPE["vocab_size"], (B, T), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        value = loss(x)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value
for _ in range(5):
    step().item()
torch.cuda.reset_peak_memory_stats()
start = time.perf_counter()
for _ in range(steps):
    value = step()
value.item()
print("RESULT", json.dumps([steps * B * T / (time.perf_counter() - start), torch.cuda.max_memory_allocated()]))
"""


def run(words, cwd, seen):
    """A process from its start to its end: (stdout and stderr, most memory held in MB, seconds until seen(its lines so far) first came true)."""
    lines, first, cache = [], None, tempfile.mkdtemp()
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-u", *map(str, words)], cwd=cwd, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if first is None and seen(lines):
            first = time.monotonic() - start
        if pid:
            break
        time.sleep(0.01)
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join(5)
    shutil.rmtree(cache, ignore_errors=True)
    if process.returncode:
        raise UserError(f"{' '.join(map(str, words[:3]))} failed, and said: {''.join(lines)[-300:].strip()!r}")
    return "".join(lines), usage.ru_maxrss / 1024, first


def ours(words, data, tokens, iterations, scratch):
    """(median seconds of an iteration, seconds to the first, MB) of our train.py."""
    out = Path(scratch, "ours")
    shutil.rmtree(out, ignore_errors=True)
    log = out / "log.jsonl"
    _, memory, first = run([ROOT / "train.py", *words, f"--dataset={data}", f"--out_dir={out}", f"--max_iters={iterations}", "--eval_iters=1", "--eval_interval=1000000", "--log_interval=1", "--device=cpu"], ROOT,
                           lambda lines: log.exists() and '"loss"' in log.read_text())
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return statistics.median(tokens / row["tokens_per_second"] for row in [row for row in rows if "loss" in row][5:]), first, memory


def nanogpt(path, shape, compiled, tokens, iterations, scratch):
    """The same of nanoGPT's train.py, its character configuration with another shape."""
    text, memory, first = run(["train.py", "config/train_shakespeare_char.py", "--device=cpu", f"--compile={compiled}", "--eval_iters=1", "--eval_interval=1000000", "--log_interval=1", "--dropout=0.0",
                               f"--max_iters={iterations}", f"--lr_decay_iters={iterations}", f"--out_dir={scratch}/nanogpt", *(f"--{name}={value}" for name, value in shape.items())], path,
                              lambda lines: any(line.startswith("iter ") for line in list(lines)))
    return statistics.median([float(ms) / 1000 for ms in re.findall(r"^iter \d+: .*?time ([\d.]+)ms", text, re.M)][5:]), first, memory


def measure(cfg, device):
    """(lines of Markdown, rows)."""
    if device.type == "cuda":
        return on_gpu(cfg, device)
    data = Path(cfg.nanogpt or ".", "data", "shakespeare_char")
    if not (Path(cfg.nanogpt or ".", "train.py").is_file() and (data / "train.bin").is_file() and cfg.nanogpt):
        raise UserError("train is measured beside nanoGPT: give --nanogpt=PATH of a checkout of it in which python data/shakespeare_char/prepare.py has run")
    rows, path = [], Path(cfg.nanogpt).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        mine = Path(scratch, "data")
        mine.mkdir()
        for file in ("train.bin", "val.bin"):
            shutil.copy(data / file, mine / file)
        vocabulary = 1 + max(max(memoryview((data / file).read_bytes()).cast("H")) for file in ("train.bin", "val.bin"))
        (mine / "meta.json").write_text(json.dumps({"tokenizer": None, "vocab_size": vocabulary, "bos": None, "bos_default": False}))
        for case, (words, shape, tokens, iterations) in CASES.items():
            iterations = cfg.iterations or iterations
            turns = {"nanoGPT, as its README says for CPUs": lambda: nanogpt(path, shape, False, tokens, iterations, scratch),
                     "nanoGPT, compiled": lambda: nanogpt(path, shape, True, tokens, iterations, scratch),
                     "ours, compiled": lambda: ours([*words, "--compile=true"], mine, tokens, iterations, scratch),
                     "ours, not compiled": lambda: ours([*words, "--compile=false"], mine, tokens, iterations, scratch),
                     "ours, compiled, AdamW": lambda: ours([*words, "--compile=true", "--optimizer=adamw"], mine, tokens, iterations, scratch)}
            if "demo" not in case:
                del turns["ours, compiled, AdamW"]  # it is by AdamW anyway
            found = {what: [] for what in turns}
            for number in range(cfg.rounds):
                for what, turn in turns.items():
                    if number and what not in ALWAYS:
                        continue
                    found[what].append(turn())
                    print(f"{case}: {what}: {tokens / found[what][-1][0]:,.0f} tokens/s", flush=True)
            base = [seconds for seconds, _, _ in found[next(iter(turns))]]
            for what, results in found.items():
                seconds, first, memory = (statistics.median(part) for part in zip(*results))
                rows.append({"case": case, "what": what, "tokens_per_second": tokens / seconds, "ms": 1000 * seconds, "beside": statistics.median(b / r[0] for b, r in zip(base, results)),
                             "lowest": min(b / r[0] for b, r in zip(base, results)), "first_step_s": first, "peak_mb": memory})
    commit = subprocess.run(["git", "-C", path, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "unknown"
    lines = [f"nanoGPT {commit}; {cfg.rounds} round{'s' * (cfg.rounds > 1)}, in turns; {', '.join(str(v[3]) if not cfg.iterations else str(cfg.iterations) for v in CASES.values())} iterations a run.", "",
             "| case | | tokens/s | ms an iteration | beside (lowest round) | first iteration after, s | most memory, MB |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {r['case']} | {r['what']} | {r['tokens_per_second']:,.0f} | {r['ms']:.1f} | {r['beside']:.2f} ({r['lowest']:.2f}) | {r['first_step_s']:.1f} | {r['peak_mb']:,.0f} |" for r in rows]
    return lines, rows


def on_gpu(cfg, device):
    from model import GPT, GPTConfig
    import torch
    peak, rows = config.peak_flops(device), []
    for T, B in ((1024, 32), (4096, 8)):
        with torch.device("meta"):
            flops = GPT(GPTConfig(block_size=T, **GPU)).flops_per_token()
        for what, path in (("ours", ROOT), ("nanogpt", Path(cfg.nanogpt).resolve() if cfg.nanogpt else None), ("transformers", Path(tempfile.gettempdir()))):
            if path is None:
                continue
            done = subprocess.run([sys.executable, "-c", f"SHAPE = {GPU!r}\n{CHILD}", what, str(B), str(T), str(path)], cwd=tempfile.gettempdir(), capture_output=True, text=True)
            found = re.search(r"^RESULT (.*)", done.stdout, re.M)
            speed, memory = json.loads(found[1]) if found else (None, None)
            rows.append({"case": f"124 M, {B} x {T}", "what": what, "tokens_per_second": speed, "mfu": speed * flops / peak if speed and peak else None, "peak_mb": memory and memory / 2**20,
                         "note": "" if found else (done.stderr.strip().splitlines() or ["failed"])[-1][:100]})
            print(rows[-1], flush=True)
    show = lambda value, form: format(value, form) if value is not None else "not measured"  # noqa: E731
    return ["MFU counts our model's FLOPs a token for all three, whose shapes are alike.", "", "| case | | tokens/s | MFU | most memory, MB | |", "|---|---|---|---|---|---|"] + [
        f"| {r['case']} | {r['what']} | {show(r['tokens_per_second'], ',.0f')} | {show(r['mfu'], '.1%')} | {show(r['peak_mb'], ',.0f')} | {r['note']} |" for r in rows], rows
