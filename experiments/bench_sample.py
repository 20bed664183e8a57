"""`bench.py sample`: tokens drawn a second, beside transformers' generate on the same weights.

RoPE models of random weights, saved as a checkpoint and handed to transformers by hf.py; each rival is a process of its own, started outside the project, in turns. Timed is the drawing alone: the median
difference between drawing many tokens and a few after prompts of 64 tokens (or of 16, 32, 48 and 64, padded on the left), at temperature 0.8 of the 200 likeliest. `beside` is against the first row of a case in
the same round, the median over the rounds: above 1 is faster. Before that the float32 rivals draw greedily, and whether they draw the same tokens stands in the last column. "as sample.py chooses" is its --dtype=auto; "compiled" is
--compile=true, after the seconds that stand beside it, with an empty cache of the compiler.
On a GPU the share of memory bandwidth is that of reading the weights once a token, in the dtype of products, against a copy's bandwidth measured in our process.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
from config import UserError
from model import GPT, GPTConfig

CASES = {  # name: settings of the model, lengths of the prompts, tokens drawn
    "the demo's shape, 1.8 M, batch 1": (dict(n_layer=4, n_head=3, n_embd=192, block_size=512, vocab_size=257), (64,), 200),
    "GPT-2's shape, 124 M, batch 1": (dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304), (64,), 48),
    "GPT-2's shape, 124 M, 4 prompts of unequal length": (dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304), (16, 32, 48, 64), 24),
}
# Both children: argv is a JSON of how. They print ms a token, the greedy tokens, the bandwidth of a copy, and the seconds of the first few tokens.
OURS = """
import sys; sys.path.insert(0, how["root"])
import config
from model import GPT
model, device = GPT.load(how["folder"]).to(how["device"]), torch.device(how["device"])
dtype = getattr(torch, how["dtype"])
def draw(n, k):
    with config.autocast(device, dtype):
        return torch.cat(list(model.generate([p.to(device) for p in prompts] if len(prompts) > 1 else prompts[0][None].to(device), n, 0.8 if k else 0.0, top_k=k, compiled=how["compiled"])), 1)
"""
THEIRS = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(how["export"], dtype=getattr(torch, how["dtype"]))
model.eval().to(how["device"])
width = max(map(len, prompts))
ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts]).to(how["device"])
mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts]).to(how["device"])
def draw(n, k):
    more = dict(do_sample=True, temperature=0.8, top_k=k) if k else dict(do_sample=False)
    return model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, pad_token_id=0, eos_token_id=-1, **more)[:, width:]
"""
CHILD = """
import json, statistics, sys, time, torch, warnings
how = json.loads(sys.argv[1])
warnings.simplefilter("ignore")
prompts = [torch.tensor(p) for p in how["prompts"]]
{}
def seconds(n):
    start = time.perf_counter()
    draw(n, 200)[0, -1].item()
    return time.perf_counter() - start
few, many = 4, how["tokens"]
first = seconds(few)
greedy = draw(12, 0).tolist()
ms = 1000 * statistics.median((seconds(many) - seconds(few)) / (many - few) for _ in range(3))
copy = None
if how["device"] == "cuda":
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); y = torch.empty_like(x); y.copy_(x); torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10): y.copy_(x)
    torch.cuda.synchronize()
    copy = 20 * x.numel() / (time.perf_counter() - start)
print("RESULT", json.dumps([ms, greedy, copy, first]))
"""


def measure(cfg, device):
    """(lines of Markdown, rows)."""
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (case, (settings, lengths, tokens)) in enumerate(CASES.items()):
            torch.manual_seed(number)
            model, folder, export = GPT(GPTConfig(**settings)), Path(scratch, f"model{number}"), Path(scratch, f"export{number}")
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_(0, 0.04) if p.dim() == 2 else None
            model.save(folder)
            size = sum(p.numel() for p in model.parameters())
            done = subprocess.run([sys.executable, "hf.py", "export", str(folder), str(export), "--verify=false"], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"hf.py could not export the model to measure beside: {done.stderr.strip()[-200:]}")
            chosen = "bfloat16" if device.type == "cuda" or size > 16e6 and torch.cpu._is_avx512_bf16_supported() else "float32"  # as sample.py has it
            turns = {"transformers, float32": (THEIRS, "float32"), "transformers, bfloat16": (THEIRS, "bfloat16"), "ours, float32": (OURS, "float32"), "ours, bfloat16": (OURS, "bfloat16"),
                     f"ours, {chosen}, compiled": (OURS, chosen)}
            found, greedy, broken, copy, first = {what: [] for what in turns}, {}, {}, None, {}
            for _ in range(cfg.rounds):
                for what, (code, dtype) in turns.items():
                    how = dict(compiled="compiled" in what, root=str(ROOT), folder=str(folder), export=str(export), device=device.type, dtype=dtype, tokens=tokens,
                               prompts=[torch.randint(0, settings["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths])
                    done = subprocess.run([sys.executable, "-c", CHILD.format(code), json.dumps(how)], cwd=scratch, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "", "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=scratch)})
                    if "RESULT" not in done.stdout:
                        broken[what] = (done.stderr.strip().splitlines() or ["without a word"])[-1][:120]
                        continue
                    ms, greedy[what], bandwidth, first[what] = json.loads(done.stdout.split("RESULT")[1])
                    copy = copy or bandwidth
                    found[what].append(ms)
                    print(f"{case}: {what}: {ms:.2f} ms a token", flush=True)
            base = found["transformers, float32"]
            for what in turns:
                row = {"case": case, "what": what + " (as sample.py chooses)" * (what == f"ours, {chosen}") + (f", after {first[what]:.0f} s" if "compiled" in what and what in first else ""), "note": broken.get(what, "")}
                if times := found[what]:
                    ms = statistics.median(times)
                    row |= {"ms": ms, "tokens_per_second": 1000 * len(lengths) / ms, "beside": statistics.median(b / t for b, t in zip(base, times)) if base else None}
                    if copy:
                        row["bandwidth"] = size * (2 if "bfloat16" in what else 4) / (ms / 1000) / copy
                    if what.startswith("ours, float32") and "transformers, float32" in greedy:
                        row["same"] = greedy[what] == greedy["transformers, float32"]
                rows.append(row)
            theirs = [r["ms"] for r in rows if r["case"] == case and r["what"].startswith("transformers") and "ms" in r]
            mine = next((r for r in rows if r["case"] == case and "chooses" in r["what"] and "ms" in r), None)
            compiled = next((r for r in rows if r["case"] == case and "compiled" in r["what"] and r.get("beside")), None)
            if mine and base and "batch 1" in case:
                notes.append(f"Goal at batch 1, 1.5 times transformers as it comes (float32): {case.partition(',')[0]}: as it comes {mine['beside']:.2f}, {'met' if mine['beside'] >= 1.5 else 'not met'}"
                             + (f"; compiled {compiled['beside']:.2f}, {'met' if compiled['beside'] >= 1.5 else 'not met'}" if compiled else "") + f". Beside the faster of its two dtypes, as it comes {min(theirs) / mine['ms']:.2f}.")
    lines = ["| case | | ms a step | tokens/s | beside | of memory bandwidth | same greedy tokens |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r['case']} | {r['what']} | " + (f"{r['ms']:.2f} | {r['tokens_per_second']:,.1f} | {r['beside']:.2f}" if r.get("beside") else f"{r['note'] or 'not measured'} | | ") + " | "
                     + (f"{r['bandwidth']:.0%}" if r.get("bandwidth") else "") + " | " + ({True: "yes", False: "no", None: ""}[r.get("same")]) + " |")
    return [*lines, "", *notes], rows
