"""Compile the Triton kernels ahead of time for every architecture, without a GPU, and read off what they cost. A script: prints JSON, one object a line.

    python tests/aot.py            60 compilations for sm_80, 86, 89, 90, 100, 120 and gfx942, with the tile sizes that would run
    python tests/aot.py --all      every head dimension, dtype, score term and mask: 1,722 compilations, 6 to 10 minutes of 2 cores where triton's cache has them, most of an hour where not; --report writes results/aot.md

Triton's interpreter and its compiler cannot live in one process, so tests/test_kernels.py runs this in a child. Pointers, strides and token counts are declared
divisible by 16, as the just-in-time compiler finds them in a model: without that the code is not the code that runs.
"""
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
SHARED = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}  # bytes that a program may take
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
TENSOR_CORE = re.compile(r"HMMA|HGMMA|UTC\w*MMA")
TERMS = ("none", "slopes", "table", "vectors", "xl")


def compile_for(kernel, target, signature, constants, **options):
    """Compile; returns registers, spilled bytes (stack), shared memory, and counts of the instructions that matter."""
    amd = target.startswith("gfx")
    signature = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    sixteens = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name] != "constexpr" and (signature[name][0] == "*" or name in ("T", "Tq", "Tk") or re.search("_[bht]$", name))}
    done = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants, attrs=sixteens), target=GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32), options=options)
    if amd:
        text = done.asm["amdgcn"]
        number = lambda word: int(re.search(rf"{word}:?\s+(\d+)", text)[1])  # noqa: E731
        return {"registers": number(r"\.vgpr_count"), "stack": number(r"\.vgpr_spill_count") + number("ScratchSize"), "shared": done.metadata.shared, "wide": len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", text)),
                "narrow": len(re.findall(r"(?:global|buffer)_(?:load|store)_(?:short|ushort)", text)), "atomics": len(re.findall(r"(?:global|buffer|flat)_atomic", text)), "tensor": len(re.findall("v_mfma", text)), "loops": []}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run([BIN / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # STACK is where spills show; LOCAL stays 0
    return {"registers": registers, "stack": stack, "shared": done.metadata.shared, "wide": len(re.findall(r"(?:LDG|STG)\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", sass)),
            "narrow": len(re.findall(r"(?:LDG|STG)\.E\.(?:\w+\.)*U16", sass)), "atomics": len(re.findall(r"\s(?:REDG?|ATOMG?)[.\s]", sass)), "tensor": len(TENSOR_CORE.findall(sass)), "loops": loops(sass)}


def loops(sass):
    """Instructions of each loop that has products, in ascending order: the loops of whole tiles, far and near, are shorter than those of masked ones."""
    labels, lines, found = {}, sass.splitlines(), []
    for i, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = i
    for i, line in enumerate(lines):
        if (back := re.search(r"BRA\S*\s+.*?`\((\.L_x_\d+)\)", line)) and labels.get(back[1], i) < i:
            ops = [op[1] for op in map(INSTRUCTION.match, lines[labels[back[1]]:i + 1]) if op]
            if any(TENSOR_CORE.match(op) for op in ops) and any(op.startswith("MUFU") for op in ops):
                found.append(len(ops))
    return sorted(found)


def rope_case(D, R, inverse):
    from kernels.rotary import _rotate_kernel, tile
    ints = {name: "i32" for name in _rotate_kernel.arg_names if name[0].islower() or name in ("T", "H", "HK")}
    step, power = tile(D), triton.next_power_of_2
    constants = {"D": D, "HALF": R // 2, "HALF_P2": power(R // 2), "REST_P2": power(D - R) if D > R else 0, "BT": step["BT"], "GROUP": step["GROUP"], "INVERSE": inverse}
    signature = {**ints, **{name: "*bf16" for name in ("Q", "K", "Q_OUT", "K_OUT")}, "COS": "*fp32", "SIN": "*fp32"}
    return f"rope D={D} R={R}{' backward' * inverse}", _rotate_kernel, signature, constants, {"num_warps": step["num_warps"]}


def attention_case(target, direction, D, term, masks=False, dtype="bf16", G=1):
    """A kernel of flash.py or decode.py: term is one of TERMS; masks: a window with sinks over true positions, and documents, all at once."""
    from kernels import decode, flash
    kernel = {"forward": flash._forward_kernel, "dq": flash._dq_kernel, "dkdv": flash._dkdv_kernel, "walk": flash._walk_kernel, "decode": decode._share_kernel}[direction]
    kind, DP, bits = min(TERMS.index(term), 3), max(16, triton.next_power_of_2(D)), 32 if dtype == "fp32" else 16
    if direction == "decode":
        BN, warps, stages = decode.tile(bits // 8, DP, kind == 3)
        sizes = dict(BN=BN, PACK=G, ROWS=max(16, triton.next_power_of_2(G)))
    else:
        family = {"sm_89": "sm_86"}.get(target, target)
        BM, BN, warps, stages = flash.tile(family, bits // 8, DP, kind, direction)
        sizes = dict(BM=BM, BN=BN, W=triton.next_power_of_2(BM + BN))
    constants = dict(**sizes, D=D, DP=DP, KIND=kind, HAS_VALUES=term == "vectors", SAME=term != "xl", CAUSAL=True, WINDOW=masks, POSITIONS=masks, DOCS=masks, COUNTED=masks, TAILS=kind > 0,
                     PRECISION="ieee" if bits == 16 or target.startswith("gfx") else "tf32x3", p_t=1, d_t=1, **({"G": 1} if G == 1 else {}), **({"line_t": 1} if kind < 3 else {}))
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def type_of(name):
        if name in ("LSE", "DLSE", "DELTA", "EXTRA", "TAIL", "DLINE", "DVALUES", "TOP", "SUM") or name == "LINE" and 0 < kind < 3 or name == "OUT" and direction == "decode":
            return "*fp32"
        if name == "LENGTH":
            return "*i64"
        if name in ("POS", "DOC", "PLAN"):
            return "*i32" if masks else f"*{dtype}"
        if name[0].isupper() and name not in ("Tq", "Tk", "G", "B", "H"):
            return f"*{dtype}"
        return "fp32" if name == "scale" else "i32"
    name = f"attention {direction}, {term}, D={D}, {dtype}{', window + sinks + documents' * masks}"
    return name, kernel, {name: type_of(name) for name in kernel.arg_names}, constants, {"num_warps": warps, "num_stages": stages}


def cases(everything):
    """(target, how to make the case, its arguments): made in the process that compiles it."""
    for target in TARGETS:
        for D, R in ((64, 64), (128, 128), (64, 32), (16, 16), (80, 80), (96, 96), (256, 256), (128, 64)) if everything else ((64, 64),):
            for inverse in (False, True):
                yield target, rope_case, (D, R, inverse)
        if everything:
            for dtype, D, masks in (("bf16", 64, False), ("bf16", 64, True), ("bf16", 128, False), ("bf16", 128, True), ("fp16", 64, False), ("bf16", 16, False), ("bf16", 80, False), ("bf16", 256, False), ("fp32", 64, False), ("fp32", 128, False)):
                for term in TERMS:
                    for direction in ("forward", "dq", "dkdv", *(("walk",) if term in TERMS[2:] else ()), "decode"):
                        yield target, attention_case, (target, direction, D, term, masks, dtype)
            continue
        for direction in ("forward", "dq", "dkdv", "walk", "decode"):
            yield target, attention_case, (target, direction, 64, "table")
    if not everything:
        for direction, D, term in (("forward", 64, "none"), ("forward", 64, "slopes"), ("dkdv", 64, "slopes"), ("forward", 64, "vectors"), ("dq", 64, "vectors"), ("dkdv", 64, "vectors"), ("walk", 64, "vectors"), ("forward", 128, "none"), ("forward", 128, "slopes"),
                                   ("forward", 128, "table"), ("walk", 128, "table")):
            yield "sm_90", attention_case, ("sm_90", direction, D, term)


def compiled(case):
    target, make, args = case
    name, kernel, signature, constants, options = make(*args)
    row = {"kernel": name, "target": target, "tile": "x".join(str(constants[size]) for size in ("BM", "BN", "BT", "GROUP") if size in constants), "warps": options["num_warps"], "stages": options.get("num_stages", 0)}
    return {**row, **compile_for(kernel, target, signature, constants, **options)}


def faults(row):
    """What is not as it should be in a row, in words."""
    product, sixteen = not row["kernel"].startswith("rope"), "fp32" not in row["kernel"]
    return [words for wrong, words in ((row["stack"] and "D=256" not in row["kernel"], f"{row['stack']} bytes spilled"), (row["shared"] > SHARED[row["target"]], f"{row['shared']} bytes of shared memory"),
                                       (row["atomics"], "atomics"), (row["narrow"] and sixteen and "D=80" not in row["kernel"], "2-byte loads"), (product and sixteen and not row["tensor"], "no tensor cores"), (not product and row["target"] != "gfx942" and not row["wide"], "no 16-byte loads")) if wrong]


def report(rows):
    """results/aot.md: what is clean, by kernel and architecture, and every configuration that is not."""
    groups = {}
    for row in rows:
        groups.setdefault(re.sub(r",? ?D=.*", "", row["kernel"]), {}).setdefault(row["target"], []).append(row)
    clean = [row for row in rows if not faults(row)]
    lines = ["# Compiled ahead of time", "", f"`python tests/aot.py --all --report`: {len(clean)} of {len(rows)} configurations clean (triton {triton.__version__}), each with the tile sizes that would run. Clean: nothing spilled (up to D = 128), shared memory within the card's,",
             "tensor-core products in every 16-bit kernel of attention, no atomics, no 2-byte loads (rows of D = 80 are not a multiple of 16 lanes: exempt). D = 16, 64, 80, 128, 256; bf16, fp16, fp32; causal, and with a window, sinks, positions and documents at once.",
             "A cell: clean of all, most registers, most shared memory in KiB.", "", "| kernel | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for name, by_target in groups.items():
        cells = [f"{sum(not faults(r) for r in by_target[t])}/{len(by_target[t])}, {max(r['registers'] for r in by_target[t])}, {max(r['shared'] for r in by_target[t]) / 1024:.0f}" for t in TARGETS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Not clean", "", "| kernel | architecture | tile, warps, stages | what |", "|---|---|---|---|"]
    lines += [f"| {r['kernel']} | {r['target']} | {r['tile']}, {r['warps']}, {r['stages']} | {'; '.join(faults(r))} |" for r in rows if faults(r)] or ["| none | | | |"]
    lines += ["", "## Instructions of the main loop, sm_90, bf16, causal", "", "Per thread and tile, of tiles that are seen whole; `far`: tiles whose distances are all clipped. In proportion: beside the unbiased loop, and beside the same with a multiplication an element, which its trick of",
              "taking the maximum before the scale saves and no added term can save. Tiles differ between terms at D = 128: instructions an element.", "", "| D | term | tile, warps | far | near | an element | beside none | beside none without the trick |", "|---|---|---|---|---|---|---|---|"]
    for D in (64, 128):
        for term, per, row in ratios(rows, D):
            none = next(p for t, p, _ in ratios(rows, D) if t == "none")
            far = row["loops"][0] if term in TERMS[2:] else ""
            lines.append(f"| {D} | {term} | {row['tile']}, {row['warps']} | {far} | {row['loops'][1 if term in TERMS[2:] else 0]} | {per:.2f} | {per / none:.2f} | {per / (none + 1):.2f} |")
    (ROOT / "results/aot.md").write_text("\n".join(lines) + "\n")


def ratios(rows, D):
    """(term, instructions an element of a thread's share, row) of the forward loops on sm_90."""
    for term in TERMS:
        for row in rows:
            if row["target"] == "sm_90" and row["kernel"] == f"attention forward, {term}, D={D}, bf16":
                BM, BN = map(int, row["tile"].split("x"))
                yield term, row["loops"][1 if term in TERMS[2:] else 0] * 32 * row["warps"] / (BM * BN), row


if __name__ == "__main__":
    rows = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for row in pool.imap(compiled, list(cases("--all" in sys.argv)), chunksize=4):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if "--report" in sys.argv:
        report(rows)
