"""Compile the Triton kernels that a model launches, without a GPU, and read off what they cost.

    python tests/compiled/aot.py            60 compilations, for seven architectures
    python tests/compiled/aot.py --all      every head dimension, dtype, bias and mask: 1,722
    python tests/compiled/aot.py --all --report    also writes experiments/results/aot.md

Prints JSON, one compilation a line, with the tile sizes that would run on a GPU. --all takes 6 to
10 minutes of 2 cores where triton's cache has the kernels, and most of an hour where it has not.

Triton's interpreter and its compiler cannot live in one process, so tests/test_kernels.py runs this
script in a child process.
"""

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/compiled")]

import torch  # noqa: E402
import triton  # noqa: E402
from kernel_cases import bias_arguments, bias_leaves  # noqa: E402
from launchers import install  # noqa: E402
from ptx_emulator.cycles import BIN  # noqa: E402

TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# bytes of shared memory that a program may take
SHARED = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
# no bias, slopes, a table, relative vectors with values, and Transformer-XL's, without
BIASES = ("none", "slopes", "table", "vectors", "xl")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

INSTRUCTION = re.compile(
    r"\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)",
)
TENSOR_CORE = re.compile(r"HMMA|HGMMA|UTC\w*MMA")


# -----------------------------------------------------------------------------
# What a compiled kernel costs


def cost_of(compiled, target):
    """Read off what a compiled kernel costs.

    Returns registers, spilled bytes (stack), shared memory, counts of the instructions that matter,
    and the lengths of the main loops.
    """
    if target.startswith("gfx"):
        cost = amd_cost(compiled.asm["amdgcn"])
    else:
        cost = nvidia_cost(compiled.asm["cubin"])
    return {**cost, "shared": compiled.metadata.shared}


def amd_cost(text):
    """What the assembly of an AMD kernel says."""

    def number(word):
        return int(re.search(rf"{word}:?\s+(\d+)", text)[1])

    def count(pattern):
        return len(re.findall(pattern, text))

    return {
        "registers": number(r"\.vgpr_count"),
        # .vgpr_spill_count also counts registers that are kept in accumulator registers
        "stack": number("ScratchSize"),
        "wide": count(r"(?:global|buffer)_(?:load|store)_dwordx4"),
        "narrow": count(r"(?:global|buffer)_(?:load|store)_(?:short|ushort)"),
        "atomics": count(r"(?:global|buffer|flat)_atomic"),
        "tensor": count("v_mfma"),
        "loops": [],
    }


def nvidia_cost(cubin):
    """What the machine code of an NVIDIA kernel says, by the tools that triton brings along."""

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output(BIN / "cuobjdump", "--dump-resource-usage", file.name)
        sass = output(BIN / "nvdisasm", "-c", file.name)

    def count(pattern):
        return len(re.findall(pattern, sass))

    # STACK is where spills show; LOCAL stays 0
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {
        "registers": registers,
        "stack": stack,
        "wide": count(r"(?:LDG|STG)\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128"),
        "narrow": count(r"(?:LDG|STG)\.E\.(?:\w+\.)*U16"),
        "atomics": count(r"\s(?:REDG?|ATOMG?)[.\s]"),
        "tensor": len(TENSOR_CORE.findall(sass)),
        "loops": loop_lengths(sass),
    }


def loop_lengths(sass):
    """The number of instructions of each loop that has products, in ascending order.

    The loops over whole tiles, clipped or not, are shorter than those that need a mask.
    """
    lines = sass.splitlines()
    labels = {}
    for i, line in enumerate(lines):
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if label:
            labels[label[1]] = i
    lengths = []
    for i, line in enumerate(lines):
        branch = re.search(r"BRA\S*\s+.*?`\((\.L_x_\d+)\)", line)
        if not branch or labels.get(branch[1], i) >= i:
            continue
        matches = map(INSTRUCTION.match, lines[labels[branch[1]] : i + 1])
        instructions = [match[1] for match in matches if match]
        has_products = any(TENSOR_CORE.match(x) for x in instructions)
        has_exp = any(x.startswith("MUFU") for x in instructions)
        if has_products and has_exp:
            lengths.append(len(instructions))
    return sorted(lengths)


# -----------------------------------------------------------------------------
# What is compiled
#
# The kernels' own Python launches them on zeros in a CPU's memory, 2 sequences of 1,024 tokens with
# 12 heads, so that the compiler is given what it is given when a model trains or decodes.

BATCH, HEADS, TOKENS = 2, 12, 1024


def rope_case(target, D, R, inverse):
    """A launch of the rotary kernel for head dimension D, of which R channels are rotated."""
    from kernels import rotary

    launcher = install(rotary, target, execute=False)["_rotate_kernel"]
    q, k = (zeros_of_a_model(TOKENS, D, torch.bfloat16) for _ in range(2))
    table = torch.zeros(TOKENS, R // 2)
    rotated = rotary.rope(q, k, table, table)
    if inverse:
        torch.autograd.backward(rotated, rotated)
    return f"rope D={D} R={R}{' backward' * inverse}", launcher


def attention_case(target, kernel, D, bias, masks=False, dtype="bf16"):
    """A launch of a kernel of flash.py, or of decode.py's for one query of each sequence.

    bias: one of BIASES. masks: a window with sinks over true positions, and documents, all at once.
    """
    from kernels import decode, flash

    n_queries = 1 if kernel == "decode" else TOKENS
    q, k, v = (zeros_of_a_model(n, D, DTYPES[dtype]) for n in (n_queries, TOKENS, TOKENS))
    m = 129 if bias == "vectors" else TOKENS  # as in Shaw et al., KERPLE and Transformer-XL
    options = learned_terms(bias, HEADS, m, D, DTYPES[dtype])
    if masks:
        options["window"] = 256
        options["sinks"] = 4
        options["positions"] = torch.arange(TOKENS)
        options["docs"] = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    if kernel == "decode":
        launcher = install(decode, target, execute=False)["_split_kernel"]
        with torch.no_grad():
            decode.attention(q, k, v, **options, length=torch.tensor([TOKENS]))
    else:
        launcher = install(flash, target, execute=False)[f"_{kernel}_kernel"]
        y = flash.attention(q, k, v, **options)
        if kernel != "forward":
            y.backward(y)
    suffix = ", window + sinks + documents" if masks else ""
    return f"attention {kernel}, {bias}, D={D}, {dtype}{suffix}", launcher


def zeros_of_a_model(n, D, dtype):
    """Queries, keys or values of n tokens, (B, H, n, D), with the strides that a model gives."""
    return torch.zeros(BATCH, n, HEADS, D, dtype=dtype).transpose(1, 2).requires_grad_()


def learned_terms(bias, heads, m, D, dtype):
    """The arguments for one of BIASES with m distances, all learned."""
    bias = "shaw" if bias == "vectors" else bias
    leaves = bias_leaves(bias, heads, m, D, dtype)
    return bias_arguments(bias, [x.requires_grad_() for x in leaves])


def cases(scope=""):
    """All cases of a scope, "" or "--all": (target, function that makes it, arguments).

    They are made in the process that compiles them.
    """
    yield from all_cases() if scope == "--all" else usual_cases()


def usual_cases():
    for target in TARGETS:
        for inverse in (False, True):
            yield target, rope_case, (64, 64, inverse)
        for kernel in ("forward", "dq", "dkdv", "sweep", "decode"):
            yield target, attention_case, (kernel, 64, "table")
    for kernel, D, bias in (
        ("forward", 64, "none"),
        ("forward", 64, "slopes"),
        ("dkdv", 64, "slopes"),
        ("forward", 64, "vectors"),
        ("dq", 64, "vectors"),
        ("dkdv", 64, "vectors"),
        ("sweep", 64, "vectors"),
        ("forward", 128, "none"),
        ("forward", 128, "slopes"),
        ("forward", 128, "table"),
        ("sweep", 128, "table"),
    ):
        yield "sm_90", attention_case, (kernel, D, bias)


def all_cases():
    widths = ((64, 64), (128, 128), (64, 32), (16, 16), (80, 80), (96, 96), (256, 256), (128, 64))
    settings = (
        ("bf16", 64, False),
        ("bf16", 64, True),
        ("bf16", 128, False),
        ("bf16", 128, True),
        ("fp16", 64, False),
        ("bf16", 16, False),
        ("bf16", 80, False),
        ("bf16", 256, False),
        ("fp32", 64, False),
        ("fp32", 128, False),
    )
    for target in TARGETS:
        for D, R in widths:
            for inverse in (False, True):
                yield target, rope_case, (D, R, inverse)
        for dtype, D, masks in settings:
            for bias in BIASES:
                for kernel in ("forward", "dq", "dkdv", "sweep", "decode"):
                    if kernel == "sweep" and bias in ("none", "slopes"):
                        continue
                    yield target, attention_case, (kernel, D, bias, masks, dtype)


def compile_case(case):
    """Compile a case: a dict of what it is and what it costs."""
    target, make, args = case
    name, launcher = make(target, *args)
    _, _, options = launcher.last
    sizes = [str(options[size]) for size in ("BM", "BN", "BT", "GROUP") if size in options]
    return {
        "kernel": name,
        "target": target,
        "tile": "x".join(sizes),
        "warps": options["num_warps"],
        "stages": options.get("num_stages", 0),
        **cost_of(launcher.compile(), target),
    }


# -----------------------------------------------------------------------------
# Judging and reporting

ABOUT = """\
# Compiled ahead of time

`python tests/compiled/aot.py --all --report`: {} configurations clean (triton {}), each launched by
the kernels' own Python and specialized by Triton's launcher, as when a model trains or decodes.
Clean: nothing spilled (up to D = 128), shared memory within the card's limit, tensor-core products
in every 16-bit kernel of attention, no atomics, no 2-byte loads (except at D = 80, where rows are
no multiple of 16 lanes). D = 16, 64, 80, 128, 256; bf16, fp16, fp32; causal, and with a window,
sinks, positions and documents at once.
A cell: clean of all, most registers, most shared memory in KiB.
"""
ABOUT_LOOPS = """\
## Instructions of the main loop, sm_90, bf16, causal

Per thread and tile, for tiles that are wholly visible; `clipped`: for tiles whose distances are all
clipped. The last two columns compare with the loop without bias, and with the same loop and one
multiplication an element more: without a bias the maximum is taken before the scale, which saves a
multiplication that no bias can save. Tiles differ between biases at D = 128, so these two columns
count instructions an element.

| D | bias | tile, warps | clipped | near | an element | relative to none | relative to none + 1 |
|---|---|---|---|---|---|---|---|"""


def faults(row):
    """What is not as it should be in a row, in words."""
    is_attention = not row["kernel"].startswith("rope")
    is_16_bit = "fp32" not in row["kernel"]
    found = []
    if row["stack"] and "D=256" not in row["kernel"]:
        found.append(f"{row['stack']} bytes spilled")
    if row["shared"] > SHARED[row["target"]]:
        found.append(f"{row['shared']} bytes of shared memory")
    if row["atomics"]:
        found.append("atomics")
    if row["narrow"] and is_16_bit and "D=80" not in row["kernel"]:
        found.append("2-byte loads")
    if is_attention and is_16_bit and not row["tensor"]:
        found.append("no tensor cores")
    if not is_attention and row["target"] != "gfx942" and not row["wide"]:
        found.append("no 16-byte loads")
    return found


def forward_loops(rows, D):
    """The forward loops on sm_90: (bias, instructions an element of a thread's share, row)."""
    for bias in BIASES:
        for row in rows:
            name = f"attention forward, {bias}, D={D}, bf16"
            if row["target"] == "sm_90" and row["kernel"] == name:
                BM, BN = map(int, row["tile"].split("x"))
                threads = 32 * row["warps"]
                yield bias, whole_loop(row, bias) * threads / (BM * BN), row


def whole_loop(row, bias):
    """The instructions of the loop over whole tiles; the shortest is that of clipped tiles."""
    return row["loops"][1 if bias in BIASES[2:] else 0]


def report(rows):
    """Write experiments/results/aot.md: by kernel and architecture, what is clean and what not."""
    groups = {}
    for row in rows:
        name = re.sub(r",? ?D=.*", "", row["kernel"])
        groups.setdefault(name, {}).setdefault(row["target"], []).append(row)
    n_clean = sum(not faults(row) for row in rows)
    about = ABOUT.format(f"{n_clean} of {len(rows)}", triton.__version__)
    lines = [about, "| kernel | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for name, by_target in groups.items():
        cells = [summary_cell(by_target[target]) for target in TARGETS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Not clean", "", "| kernel | architecture | tile, warps, stages | what |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        if faults(row):
            tile = f"{row['tile']}, {row['warps']}, {row['stages']}"
            what = "; ".join(faults(row))
            lines.append(f"| {row['kernel']} | {row['target']} | {tile} | {what} |")
    if n_clean == len(rows):
        lines.append("| none | | | |")
    lines += ["", *loop_report(rows)]
    (ROOT / "experiments/results/aot.md").write_text("\n".join(lines) + "\n")


def summary_cell(rows):
    n_clean = sum(not faults(row) for row in rows)
    registers = max(row["registers"] for row in rows)
    shared = max(row["shared"] for row in rows) / 1024
    return f"{n_clean}/{len(rows)}, {registers}, {shared:.0f}"


def loop_report(rows):
    """The section of experiments/results/aot.md on the main loop."""
    lines = [ABOUT_LOOPS]
    for D in (64, 128):
        loops = list(forward_loops(rows, D))
        none = next(per_element for bias, per_element, _ in loops if bias == "none")
        for bias, per_element, row in loops:
            clipped = row["loops"][0] if bias in BIASES[2:] else ""
            lines.append(
                f"| {D} | {bias} | {row['tile']}, {row['warps']} | {clipped} "
                f"| {whole_loop(row, bias)} | {per_element:.2f} | {per_element / none:.2f} "
                f"| {per_element / (none + 1):.2f} |"
            )
    return lines


def main(words):
    scope = next((word for word in words if word == "--all"), "")
    rows = []
    # An executor, because a multiprocessing.Pool waits for ever if a worker is killed.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as executor:
        for row in executor.map(compile_case, cases(scope), chunksize=4):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if "--report" in words:
        report(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
