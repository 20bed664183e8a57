"""bench.py memory: the memory of a training step, counted from shapes and measured.

The count is count_memory() of nanolong/memory.py: the bytes of our model from its shapes
alone, run eagerly (not compiled). Measured on a CPU: every allocation and release of torch's CPU
allocator while a child process builds model and optimizer and takes two steps, as torch.profiler
records them (profile_memory), and the maximum of their running sum. That is exact for tensors and
for the scratch memory of operators that use this allocator; that of oneDNN and MKL is not in it. On
a GPU: torch.cuda.max_memory_allocated(). The longest context is the largest T, for one sequence per
step, whose count stays below the card's memory less 2 GiB for the CUDA context and fragmentation.
Times are the counted FLOPs (causal attention counted by half) at 45 % of the card's bfloat16 peak:
expected, not measured. A plan is counted in the same way, for each of several cards; what a card
sends is counted by count_sent_bytes(). No plan has been run.
"""

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from model import GPT, GPTConfig
from nanolong.devices import PEAK_FLOPS, autocast
from nanolong.errors import UserError
from nanolong.memory import count_block_matrices, count_memory, count_other_parameters

ROOT = Path(__file__).resolve().parent.parent
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304}
# bytes, from the makers' data sheets
CARDS = {"H200": 141e9, "H100": 80e9, "A100": 80e9, "RTX 4090": 24e9}
CUDA_OVERHEAD = 2 * 2**30
EXPECTED_MFU = 0.45
GOAL = 0.15  # how far the count may be from the measured peak


@dataclass
class Case:
    """A training step whose memory is counted and measured."""

    config: dict
    batch_size: int
    dtype: str
    checkpointing: bool = False
    accumulation: int = 1  # micro-batches in a step


DEMO = {"n_layer": 4, "n_head": 3, "n_embd": 192, "block_size": 256, "vocab_size": 257}
CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}
LARGE_VOCABULARY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "block_size": 512}
LARGE_VOCABULARY["vocab_size"] = 50304
CPU_CASES = (
    Case(DEMO, 16, "float32"),
    Case(DEMO, 16, "bfloat16"),
    Case({**CHARACTERS, "block_size": 1024}, 4, "bfloat16"),
    Case({**CHARACTERS, "block_size": 4096}, 1, "float32"),
    Case({**CHARACTERS, "block_size": 4096}, 1, "float32", checkpointing=True),
    Case(LARGE_VOCABULARY, 4, "float32"),
)


@dataclass
class Plan:
    """Extending or training a model that outgrows one card, by a preset in config/."""

    name: str
    preset: str
    config: dict
    length: int  # tokens of a sequence, one in a micro-batch
    card: str = "H100"
    cards: int = 1
    parts: int = 1  # --sequence_parallel
    parallel: str = "ddp"
    accumulation: int = 1  # micro-batches of a process in a step


SMOLLM2 = {"n_layer": 24, "n_head": 32, "n_embd": 2048, "mlp_dim": 8192, "vocab_size": 49152}
LLAMA3 = {"n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096, "mlp_dim": 14336}
LLAMA3 |= {"vocab_size": 128256, "tie_embeddings": False}
PLANS = (
    Plan("SmolLM2-1.7B to 64k", "smollm2_64k", SMOLLM2, 1 << 16),
    Plan("Llama-3-8B to 128k", "llama3_128k", LLAMA3, 1 << 17, "H100", 8, 8, "fsdp"),
    Plan("124 M at 1 M", "gpt2_1m", GPT2, 1 << 20, "H100", 8, 4, "fsdp"),
)


# -----------------------------------------------------------------------------
# From the count.


def count_sent_bytes(
    config,
    B,
    T,
    dtype="bfloat16",
    checkpointing=False,
    processes=1,
    parts=1,
    parallel="ddp",
    accumulation=1,
):
    """Count the bytes that a process sends in a training step of GPT(config): (gradients, tokens).

    B sequences of T tokens in a micro-batch; processes: all of them; parts: those that share a
    sequence; accumulation: micro-batches of a process in a step. The first number is what ddp or
    fsdp sends for weights and gradients, in float32; the second what attention exchanges. Of n
    processes each sends (n - 1) / n of a tensor that is gathered or scattered, and twice that to
    sum one.
    """
    weights = 4 * (count_block_matrices(config) + count_other_parameters(config))
    to_others = (processes - 1) / processes
    # ddp sums gradients; fsdp gathers weights forward and backward, and scatters gradients
    times = 2 if parallel == "ddp" else 2 * accumulation + 1
    of_weights = times * weights * to_others

    # q, k and v to other heads, the output back; keys and values repeated to divide the heads
    e = 4 if dtype == "float32" else 2
    repeated = math.lcm(config.n_kv_head, parts)
    channels = (2 * config.n_head + 2 * repeated) * config.head_dim
    passes = 3 if checkpointing else 2  # forward, backward, and forward again
    exchanged = passes * config.n_layer * B * T // parts * channels * e
    of_tokens = accumulation * exchanged * (parts - 1) / parts
    return round(of_weights), round(of_tokens)


def count_flops(config, N, T):
    """
    The floating-point operations that a step computes, to expect its time.

    Causal attention computes half of what MFU counts by convention: see GPT.flops_per_token().
    """
    weights = count_block_matrices(config) + config.vocab_size * config.n_embd
    return 6 * weights * N + 6 * config.n_layer * config.n_head * config.head_dim * T * N


def count_plan(plan):
    """What the report says of a plan: bytes of a card and sent by it, and seconds of a step."""
    config = GPTConfig(**plan.config, block_size=plan.length)
    shards = plan.cards if plan.parallel == "fsdp" else 1
    # a process has its part of the tokens; in attention its part of the heads, which is as much
    own_tokens = plan.length // plan.parts
    memory = count_memory(
        config, 1, own_tokens, checkpointing=True, accumulation=plan.accumulation, shards=shards,
        parts=plan.parts,
    )  # fmt: skip
    sent = count_sent_bytes(
        config, 1, plan.length, "bfloat16", True, plan.cards, plan.parts, plan.parallel,
        plan.accumulation,
    )  # fmt: skip
    flops = count_flops(config, plan.length, plan.length) / plan.parts
    return {
        **asdict(plan),
        "peak": memory.peak,
        "available": CARDS[plan.card] - CUDA_OVERHEAD,
        "sent_weights": sent[0],
        "sent_tokens": sent[1],
        "seconds": plan.accumulation * flops / PEAK_FLOPS[plan.card] / EXPECTED_MFU,
    }


def longest_context(settings, memory, **how):
    """The largest T, a multiple of 1,024, whose count for one sequence is at most `memory` bytes.

    how: arguments of count_memory().
    """
    low, high = 0, 1 << 16  # thousands of tokens
    while high - low > 1:
        middle = (low + high) // 2
        T = 1024 * middle
        config = GPTConfig(**settings, block_size=T)
        if count_memory(config, 1, T, **how).peak <= memory:
            low = middle
        else:
            high = middle
    return 1024 * low


# -----------------------------------------------------------------------------
# The measurement, in a child process.


def take_two_steps(case, device):
    """Build model and optimizer and train for two steps on random tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**case.config)).to(device).train()
    model.activation_checkpointing = case.checkpointing
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shape = (case.batch_size, case.config["block_size"])
    for _ in range(2):
        for _ in range(case.accumulation):
            tokens = torch.randint(0, case.config["vocab_size"], shape, device=device)
            with autocast(device, getattr(torch, case.dtype)):
                loss = model(tokens, tokens)
            loss.backward()
            del loss
        torch._foreach_mul_([p.grad for p in model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure_peak(case, device):
    """The peak of two training steps in this process, in bytes."""
    device = torch.device(device)
    if device.type == "cuda":
        take_two_steps(case, device)
        return torch.cuda.max_memory_allocated()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        take_two_steps(case, device)
    events = profile.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocated = 0
    peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def measure_in_child(case, device):
    """measure_peak() in a process of its own."""
    command = [sys.executable, __file__, json.dumps([asdict(case), device])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode or "RESULT" not in done.stdout:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"the child that measures {case.config} failed: fix it ({reason[:200]})")
    return int(done.stdout.split("RESULT")[1])


def measure(cfg, device):
    """What memory.json holds besides the provenance: rows of measurements, then of cards."""
    cases = CPU_CASES
    if device.type == "cuda":
        cases = [
            Case({**GPT2, "block_size": T}, 16384 // T, "bfloat16", checkpointing)
            for T in (1024, 16384)
            for checkpointing in (False, True)
        ]
    rows = []
    for case in cases:
        config = GPTConfig(**case.config)
        B, T = case.batch_size, config.block_size
        counted = count_memory(config, B, T, case.dtype, case.checkpointing, device=device.type)
        measured = measure_in_child(case, device.type)
        row = {
            "shape": f"{config.n_layer} layers of {config.n_embd}, "
            f"vocabulary {config.vocab_size}, {B} x {T}",
            "dtype": case.dtype,
            "checkpointing": case.checkpointing,
            "counted_mb": counted.peak / 2**20,
            "measured_mb": measured / 2**20,
            "error": counted.peak / measured - 1,
            "peak_at": counted.peak_at,
        }
        print(row, flush=True)
        rows.append(row)
    return {"rows": rows, "cards": [count_card(name) for name in CARDS]}


def count_card(name):
    """The longest contexts of a card, and two training steps, from the count alone."""
    available = CARDS[name] - CUDA_OVERHEAD
    steps = []
    for T in (131072, 1048576):
        memory = count_memory(GPTConfig(**GPT2, block_size=T), 1, T, checkpointing=True)
        steps.append(
            {
                "length": T,
                "peak": memory.peak,
                "seconds": count_flops(GPTConfig(**GPT2), T, T) / PEAK_FLOPS[name] / EXPECTED_MFU,
                "fits": memory.peak <= available,
            }
        )
    return {
        "card": name,
        "memory": CARDS[name],
        "longest": longest_context(GPT2, available),
        "longest_checkpointing": longest_context(GPT2, available, checkpointing=True),
        "steps": steps,
    }


# -----------------------------------------------------------------------------
# The tables.


def format_report(result):
    """The lines of Markdown for what measure() returned."""
    lines = [
        "| shape | dtype | activation checkpointing | counted, MiB | measured, MiB | error "
        "| the peak is at |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = result["rows"]
    for row in rows:
        cells = [
            row["shape"],
            row["dtype"],
            "yes" if row["checkpointing"] else "no",
            f"{row['counted_mb']:,.1f}",
            f"{row['measured_mb']:,.1f}",
            f"{row['error']:+.1%}",
            row["peak_at"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    missed = [row["shape"] for row in rows if abs(row["error"]) > GOAL]
    verdict = f"not met: {', '.join(missed)}" if missed else "met"
    lines += ["", f"Goal, within {GOAL:.0%}: {verdict}.", ""]
    lines += format_cards(result["cards"])
    lines += ["", *format_plans([count_plan(plan) for plan in PLANS])]
    return lines


def format_cards(cards):
    lines = [
        "## From the count: 124 M parameters, bfloat16, AdamW, one sequence per step; "
        "nothing here is measured",
        "",
        "| card | memory | longest context | with activation checkpointing | 131,072 tokens "
        "| 1,048,576 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for card in cards:
        cells = [
            card["card"],
            f"{card['memory'] / 1e9:.0f} GB",
            f"{card['longest']:,}",
            f"{card['longest_checkpointing']:,}",
        ]
        for step in card["steps"]:
            cell = f"{step['peak'] / 1e9:,.0f} GB, {step['seconds']:,.1f} s"
            cells.append(cell if step["fits"] else f"{cell}: does not fit")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def format_plans(plans):
    lines = [
        "## Plans, from the count: bfloat16, AdamW, activation checkpointing, one sequence in a "
        "micro-batch; none was run",
        "",
        "| plan | preset | cards | flags | memory of a card | sends for weights | and for tokens "
        "| a step, without waiting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        flags = f"--parallel={plan['parallel']} --sequence_parallel={plan['parts']}"
        fits = "" if plan["peak"] <= plan["available"] else ": does not fit"
        cells = [
            plan["name"],
            f"config/{plan['preset']}.toml",
            f"{plan['cards']} {plan['card']}",
            flags if plan["cards"] > 1 else "",
            f"{plan['peak'] / 1e9:.0f} GB{fits}",
            f"{plan['sent_weights'] / 1e9:.1f} GB",
            f"{plan['sent_tokens'] / 1e9:.1f} GB",
            f"{plan['seconds']:,.0f} s",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    case_fields, device_name = json.loads(sys.argv[1])
    print("RESULT", measure_peak(Case(**case_fields), device_name))
