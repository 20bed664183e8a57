"""`bench.py memory`: the memory of a training step counted on paper, and held against the peak that was measured; and what the count says of long contexts on one card.

The count is count() below: bytes by shape alone, of our model run eagerly, without compiling. Measured on a CPU: every allocation and release of torch's CPU allocator while a child process builds model and optimizer
and takes two steps, as torch.profiler records them (profile_memory), and the largest running sum: exact for tensors and for operators' scratch that goes through that allocator; oneDNN's and MKL's own is not in it.
On a GPU: torch.cuda.max_memory_allocated(). The longest context is the largest T, one window, whose count stays below the card's memory, less 2 GiB for the CUDA context and fragments; time is the count of
FLOPs (causal attention counted by half) at 45 % of the card's bfloat16 peak: expected, not measured.
"""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import config
from config import PEAK, UserError
from model import GPT, GPTConfig

SHAPES = (  # settings of the model, batch, dtype, activations checkpointed
    (dict(n_layer=4, n_head=3, n_embd=192, block_size=256, vocab_size=257), 16, "float32", False),
    (dict(n_layer=4, n_head=3, n_embd=192, block_size=256, vocab_size=257), 16, "bfloat16", False),
    (dict(n_layer=6, n_head=6, n_embd=384, block_size=1024, vocab_size=65), 4, "bfloat16", False),
    (dict(n_layer=6, n_head=6, n_embd=384, block_size=4096, vocab_size=65), 1, "float32", False),
    (dict(n_layer=6, n_head=6, n_embd=384, block_size=4096, vocab_size=65), 1, "float32", True),
    (dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=256, block_size=512, vocab_size=50304), 4, "float32", False),
)
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304)
CARDS = {"H200": 141e9, "H100": 80e9, "A100": 80e9, "RTX 4090": 24e9}  # bytes, from the makers' data sheets; 24 and 80 GB as they are sold
GOAL = 0.15


def count(c, B, T, dtype="bfloat16", checkpointed=False, optimizer="adamw", device="cuda"):
    """Bytes that a training step of model.GPT(c) holds at its peak, B windows of T tokens: {"parameters": , "gradients": , "optimizer": , "activations": , "peak": }, and FLOPs.

    N = B T tokens, C width, A = H D channels of the heads, K = Hk D, M width of the MLP, V vocabulary, e bytes of a product's element (2 under autocast to bfloat16, else 4). The residual stream, norms, sums and
    all parameters are float32. A block keeps for its backward pass, a token:
      attention   its input x 4C; the normed input of q, k and v: C e each under autocast, one for all of float32; q, k, v and the output (2A + 2K) e, and the log-sum-exp 4H
      MLP         x 4C; the normed input of gate and up, as above; gate, silu(gate), up and their product 4M e
    and with dropout 8C of masks. On a CPU the norms keep what they normed before its gain, 4C each; bfloat16 attention below 512 tokens is computed in float32 (kernels/reference.py), so its four tensors have 4 bytes, and the output is there in bfloat16 too.
    Checkpointed, a block keeps x 4C, the output A e and the log-sum-exp 4H, and one block at a time has all of the above again.
    The loss holds its gradient of the hidden states 4 N C, of the head 4 V C, and a chunk of R tokens' logits, twice: R = max(128, 2^25 / V).
    The peak is the largest of: the loss (no gradients yet but those); the start of the backward pass (both of the loss's gradients once more); inside the last block's MLP (its gradients: two of M, two of C); and the update.
    """
    e, N, C, A, K, V = (4 if dtype == "float32" else 2), B * T, c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.vocab_size
    M, cast = c.mlp_width or -(-8 * C // 96) * 32, e < 4
    block = C * (A + 2 * K) + A * C + 3 * C * M
    matrices = c.n_layer * block
    P = matrices + (1 if c.tied else 2) * V * C + (2 * c.n_layer + 1) * C + (c.reach * C if c.pos == "learned" else 0)
    state = 8 * P if optimizer == "adamw" else 8 * (P - matrices) + 4 * matrices
    short = cast and device == "cpu" and T < 512
    attention = (2 * A + 2 * K) * (4 if short else e) + (A * e if short else 0)
    norm = 4 * C if device == "cpu" else 0
    layer = N * (2 * norm + 4 * C + (3 * e if cast else 4) * C + attention + 4 * c.n_head + 4 * C + (2 * e if cast else 4) * C + 4 * M * e + (8 * C if c.dropout else 0))
    kept = N * (4 * C + A * e + 4 * c.n_head) if checkpointed else layer
    activations = c.n_layer * kept + (matrices * 2 if cast else 0)  # autocast's copies of the matrices
    ends = N * (2 * 4 * C + norm)  # the last block's output and the final norm's
    R = min(N, max(128, (1 << 25) // V // 128 * 128))
    at_loss = activations + ends + 4 * N * C + 4 * V * C + (e * V * C if cast else 0) + R * V * (4 + e) + R * C * e
    at_start = activations + ends + 2 * (4 * N * C + 4 * V * C)
    inside = activations + (layer if checkpointed else 0) + 4 * V * C + N * (2 * M * e + 2 * 4 * C)
    peak = 4 * P + state + max(at_loss, at_start, inside, 4 * P)
    flops = 6 * (matrices + V * C) * N + 6 * c.n_layer * A * T * N  # of attention, causal: half of PaLM's 12
    return {"parameters": 4 * P, "gradients": 4 * P, "optimizer": state, "activations": activations, "peak": peak, "flops": flops, "where": ["loss", "backward's start", "last MLP", "update"][
        [at_loss, at_start, inside, 4 * P].index(max(at_loss, at_start, inside, 4 * P))]}


def longest(settings, memory, **how):
    """The largest T, a multiple of 1,024, whose count stays within `memory` bytes."""
    low, high = 0, 1 << 16  # thousands of tokens
    while high - low > 1:
        middle = (low + high) // 2
        fits = count(GPTConfig(**settings, block_size=1024 * middle), 1, 1024 * middle, **how)["peak"] <= memory
        low, high = (middle, high) if fits else (low, middle)
    return 1024 * low


def child(settings, B, dtype, checkpointed, device):
    """Two steps in this process; prints the measured peak in bytes."""
    import torch
    device = torch.device(device)

    def steps():
        torch.manual_seed(0)
        model = GPT(GPTConfig(**settings)).to(device).train()
        model.checkpoint_activations = checkpointed
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            x = torch.randint(0, settings["vocab_size"], (B, settings["block_size"]), device=device)
            with config.autocast(device, getattr(torch, dtype)):
                loss = model(x, x)
            loss.backward()
            torch._foreach_mul_([p.grad for p in model.parameters()], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            del loss

    if device.type == "cuda":
        steps()
        peak = torch.cuda.max_memory_allocated()
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            steps()
        held = peak = 0
        for event in sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
    print("RESULT", peak)


def measure(cfg, device):
    """(lines of Markdown, rows)."""
    shapes = SHAPES if device.type == "cpu" else tuple((dict(GPT2, block_size=T), 16384 // T, "bfloat16", checkpointed) for T in (1024, 16384) for checkpointed in (False, True))
    rows = []
    for settings, B, dtype, checkpointed in shapes:
        done = subprocess.run([sys.executable, __file__, json.dumps([settings, B, dtype, checkpointed, device.type])], cwd=ROOT, capture_output=True, text=True)
        if done.returncode or "RESULT" not in done.stdout:
            raise UserError(f"the child that measures {settings} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1][:200]}")
        T, measured, paper = settings["block_size"], int(done.stdout.split("RESULT")[1]), count(GPTConfig(**settings), B, settings["block_size"], dtype, checkpointed, device=device.type)
        rows.append({"shape": f"{settings['n_layer']} layers of {settings['n_embd']}, vocabulary {settings['vocab_size']}, {B} x {T}", "dtype": dtype, "checkpointed": checkpointed, "paper_mb": paper["peak"] / 2**20,
                     "measured_mb": measured / 2**20, "off": paper["peak"] / measured - 1, "where": paper["where"]})
        print(rows[-1], flush=True)
    lines = ["| shape | dtype | blocks checkpointed | paper, MiB | measured, MiB | off by | the peak is at |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {r['shape']} | {r['dtype']} | {'yes' if r['checkpointed'] else 'no'} | {r['paper_mb']:,.1f} | {r['measured_mb']:,.1f} | {r['off']:+.1%} | {r['where']} |" for r in rows]
    met = all(abs(r["off"]) <= GOAL for r in rows)
    lines += ["", f"Goal, within {GOAL:.0%}: {'met' if met else 'not met: ' + ', '.join(r['shape'] for r in rows if abs(r['off']) > GOAL)}."]
    lines += ["", "## On paper: 124 M parameters, bfloat16, AdamW, one window a step; nothing here is measured", "", "| card | memory | longest context | with blocks checkpointed | 131,072 tokens | 1,048,576 tokens |", "|---|---|---|---|---|---|"]
    for card, memory in CARDS.items():
        def cell(T):
            paper = count(GPTConfig(**GPT2, block_size=T), 1, T, checkpointed=True)
            return f"{paper['peak'] / 1e9:,.0f} GB, {paper['flops'] / PEAK[card] / 0.45:,.1f} s" + ("" if paper["peak"] <= memory - 2 * 2**30 else ": does not fit")
        far = [longest(GPT2, memory - 2 * 2**30, checkpointed=checkpointed) for checkpointed in (False, True)]
        lines.append(f"| {card} | {memory / 1e9:.0f} GB | {far[0]:,} | {far[1]:,} | {cell(131072)} | {cell(1048576)} |")
        rows.append({"card": card, "memory": memory, "longest": far[0], "longest_checkpointed": far[1]})
    return lines, rows


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))
