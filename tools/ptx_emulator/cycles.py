"""Count what a compiled kernel costs, without a GPU.

    add = install(my_kernels, "sm_80")["add_kernel"]
    add.options["profile"] = True
    add[4,](x, y, out, 4096, BLOCK=1024)
    print("\n".join(table(count_launch(add), "add")))

For every inner loop: the instructions of a turn by kind, the wavefronts of shared memory and the
sectors of global memory compared with the least possible, and the cycles of a turn by unit. The
unit with most cycles binds.

Turns, wavefronts and sectors come from the emulator, which executes the PTX. Instructions come from
the machine code, because PTX has moves that the assembler removes, and lacks what it fuses. The
loops of both are matched by their order.

All cycles are lower bounds, of one multiprocessor: nothing here knows a latency.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas

from .counting import loops
from .memory import SHARED_BASE

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"  # NVIDIA's tools for machine code

# -----------------------------------------------------------------------------
# What a multiprocessor does in a cycle
#
# Threads' results a cycle, of one multiprocessor, in the order of ARCHITECTURES. Sources:
#   [T] CUDA C++ Best Practices Guide, "Throughput of Native Arithmetic Instructions" (a section of
#       the CUDA C++ Programming Guide before release 13)
#   [P] Nsight Compute, Profiling Guide, "Pipelines": which unit executes what
#   [S] Shared memory has 32 banks of 4 bytes: CUDA C++ Programming Guide, "Shared Memory"
#   [W] The architectures' whitepapers: A100, GA102, Ada, H100, RTX Blackwell
#   [A] An assumption of ours
RATES = {
    "float": (64, 128, 128, 128, 128),  # [T] add, multiply, multiply-add
    "multiply": (64, 64, 64, 64, 64),  # [T] integer multiply, multiply-add
    "add": (64, 64, 64, 64, 128),  # [T] integer add, subtract
    "logic": (64, 64, 64, 64, 64),  # [T] compare, minimum, shift, and, or; [A] select, move
    "exp": (16, 16, 16, 16, 16),  # [T] exp2, log2, reciprocal; count leading zeros
    "convert": (16, 16, 16, 16, 16),  # [T] [P] float to integer and back: the unit of exp2
    "pack": (64, 64, 64, 64, 64),  # [P] two float32 to 16 bits: the integer unit; [A] its rate
    "shuffle": (32, 32, 32, 32, 32),  # [T] warp shuffle
}
# 16-bit products with float32 sums a cycle, of one multiprocessor. [W] A100: 312 TFLOP/s, 108
# multiprocessors, 1.41 GHz; RTX 3090: 71, 82, 1.695; RTX 4090: 165.2, 128, 2.52; H100 SXM: 989.4,
# 132, 1.83; RTX 5090: 209.5, 170, 2.407. Half as many with tf32.
TENSOR = {"sm_80": 1024, "sm_86": 256, "sm_89": 256, "sm_90": 2048, "sm_120": 256}
HOPPER_MMA = 1024  # [A] mma.sync on sm_90, where only wgmma reaches TENSOR: the rate of sm_80
SHARED_BYTES = 128  # [S] of shared memory a cycle
GLOBAL_BYTES = 64  # [A] from the L2 cache into a multiprocessor a cycle
ISSUE = 4  # [W] instructions of a warp a cycle: four schedulers

# -----------------------------------------------------------------------------
# The opcodes of machine code: kind, the unit that executes it, its row of RATES

UNITS = ("tensor", "exp", "float", "integer", "shared", "global", "issue")
KINDS = (
    *("tensor", "exp", "float", "integer", "convert"),
    *("shuffle", "shared", "global", "copy", "control"),
)
OPCODES = (
    ("HMMA HGMMA", "tensor", "tensor", None),
    ("MUFU", "exp", "exp", "exp"),
    ("FADD FMUL FFMA HADD2 HMUL2 HFMA2", "float", "float", "float"),
    ("FADD2 FMUL2 FFMA2 FHFMA FHADD", "float", "float", "float"),
    ("FMNMX FMNMX3 FSETP FSEL FSET FCHK HMNMX2 HSETP2", "float", "integer", "logic"),
    ("IMAD", "integer", "float", "multiply"),
    ("IADD IADD3 VIADD IABS", "integer", "integer", "add"),
    ("LOP3 SHF LEA SGXT BMSK PRMT SEL ISETP IMNMX VIMNMX VIMNMX3", "integer", "integer", "logic"),
    ("VIADDMNMX PLOP3 MOV P2R R2P", "integer", "integer", "logic"),
    ("FLO POPC BREV", "integer", "exp", "exp"),
    ("F2FP I2FP", "convert", "integer", "pack"),
    ("I2F F2I F2F FRND I2I", "convert", "exp", "convert"),
    ("SHFL VOTE VOTEU REDUX", "shuffle", "shared", "shuffle"),
    ("LDS STS LDSM STSM MOVM", "shared", "shared", None),
    ("LDG STG LDL STL RED REDG ATOM ATOMG", "global", "global", None),
    ("LDGSTS", "copy", "global", None),
    ("BRA EXIT BAR BSSY BSYNC BREAK WARPSYNC WARPGROUP CALL RET NOP YIELD", "control", None, None),
    ("DEPBAR LDGDEPBAR FENCE MEMBAR ERRBAR CCTL S2R CS2R S2UR R2UR LDC", "control", None, None),
    ("LDCU PREEXIT ACQBULK BPT ELECT SYNCS", "control", None, None),
)
OPCODE = {name: row for names, *row in OPCODES for name in names.split()}


@dataclass
class Part:
    """A loop, or what lies outside of loops. All numbers are of one program and one turn."""

    name: str
    turns: float  # of all programs of the launch
    instructions: dict = field(default_factory=dict)  # of a warp, by kind
    cycles: dict = field(default_factory=dict)  # of a multiprocessor, by unit
    operand_cycles: float = 0  # of these, shared memory read by the matrix instructions themselves
    wavefronts: float = 0  # through shared memory
    least_wavefronts: float = 0
    sectors: float = 0  # of global memory, 32 bytes each
    least_sectors: float = 0

    @property
    def binding(self):
        return max(self.cycles, key=self.cycles.get)


@dataclass
class KernelCount:
    """What a launch of a kernel cost."""

    name: str
    arch: str
    warps: int
    registers: int
    spilled: int
    shared: int  # bytes
    programs: int
    loops: list
    outside: Part
    tile: tuple = ()  # for the caller: the sizes that were chosen


# -----------------------------------------------------------------------------
# Machine code


def assemble(ptx):
    """Assemble PTX as Triton does: (machine code as text, registers, spilled bytes)."""
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    ptxas = get_ptxas(int(re.search(r"\d+", target)[0])).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        cubin = Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        options = ["-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={target}"]
        run(ptxas, *options, source, "-o", cubin)
        usage = run(BIN / "cuobjdump", "--dump-resource-usage", cubin)
        sass = run(BIN / "nvdisasm", "-c", cubin)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return sass, registers, stack


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_loops(sass):
    """Split machine code: (the instructions of each innermost loop, those outside of loops).

    An instruction is (opcode with modifiers, operands). The loops are in the order of addresses.
    """
    instructions = []
    labels = {}
    branches = []  # (where it leads to, its index): the candidates for the end of a loop
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(instructions)
        found = re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*)", line
        )
        if not found:
            continue
        branch = re.search(r"`\((\.L_x_\d+)\)", found[2])
        if found[1].startswith("BRA") and branch:
            branches.append((branch[1], len(instructions)))
        instructions.append((found[1], found[2]))
    spans = []
    for label, last in branches:
        first = labels.get(label, last)
        if first < last:
            spans.append((first, last))
    spans = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    inner = [instructions[first : last + 1] for first, last in sorted(spans)]
    inside = {i for first, last in spans for i in range(first, last + 1)}
    outside = [x for i, x in enumerate(instructions) if i not in inside]
    return inner, outside


def opcode_row(opcode):
    """The row of OPCODES for an opcode. Uniform instructions (U...) only take a turn to issue."""
    name = opcode.split(".")[0]
    if name in OPCODE:
        return OPCODE[name]
    if name.startswith("U") and not name.startswith(("UTC", "UTMA", "UBLK")):
        return ["control", None, None]
    raise ValueError(f"opcode {opcode}: not in OPCODES of cycles.py: add it")


def products(opcode, arch):
    """The products of a warp's matrix instruction, and those of a multiprocessor in a cycle."""
    warpgroup = re.match(r"HGMMA\.64x(\d+)x(\d+)", opcode)
    if warpgroup:
        n, k = map(int, warpgroup.groups())
        return 16 * n * k, TENSOR[arch]
    k = int(re.match(r"HMMA\.168(\d+)", opcode)[1])
    rate = HOPPER_MMA if arch == "sm_90" else TENSOR[arch]
    return 16 * 8 * k, rate / 2 if "TF32" in opcode else rate


def warpgroup_bytes(opcode, operands):
    """The bytes of shared memory that a matrix instruction of a warp group reads."""
    n, k = map(int, re.match(r"HGMMA\.64x(\d+)x(\d+)", opcode).groups())
    left_in_shared = operands.split(",")[1].strip().startswith("gdesc")
    return 2 * k * (n + 64 * left_in_shared)


def price(part, instructions, arch, warps):
    """Add to a part the instructions of a turn of a program of `warps`, and their cycles."""
    part.instructions = dict.fromkeys(KINDS, 0)
    part.cycles = dict.fromkeys(UNITS, 0.0)
    column = ARCHITECTURES.index(arch)
    for opcode, operands in instructions:
        kind, unit, rate = opcode_row(opcode)
        part.instructions[kind] += 1
        part.cycles["issue"] += warps / ISSUE
        if kind == "tensor":
            work, products_a_cycle = products(opcode, arch)
            part.cycles["tensor"] += work * warps / products_a_cycle
            if opcode.startswith("HGMMA"):
                n_bytes = warpgroup_bytes(opcode, operands) * warps / 4
                part.operand_cycles += n_bytes / SHARED_BYTES
        elif rate:
            part.cycles[unit] += 32 * warps / RATES[rate][column]
    part.cycles["shared"] += part.operand_cycles


# -----------------------------------------------------------------------------
# A launch


def count_launch(launcher, names=()):
    """Count the last launch of a kernel: a KernelCount.

    launcher: one of the launchers that install() returned, after a launch with
    options["profile"]. names: of its loops, in the order of the source.
    """
    machine = launcher.machine
    ptx = machine.kernel.text
    arch = re.search(r"\.target (sm_\d+)", ptx)[1]
    warps = machine.n_warps
    grid = launcher.last[0]
    programs = grid[0] * grid[1] * grid[2]
    sass, registers, spilled = assemble(ptx)
    inner, rest = read_loops(sass)
    executed = loops(machine)
    if len(inner) != len(executed):
        raise ValueError(
            f"{machine.kernel.name}: {len(executed)} loops in PTX, {len(inner)} in the machine "
            "code: the assembler has unrolled or merged one, and they cannot be matched"
        )
    parts = []
    for n, (instructions, loop) in enumerate(zip(inner, executed, strict=True)):
        lines = range(loop.first_line, loop.last_line + 1)
        name = names[n] if n < len(names) else f"loop {n + 1}"
        part = Part(name, turns_of_loop(machine, lines))
        price(part, instructions, arch, warps)
        add_traffic(part, machine.traffic, lines)
        parts.append(part)
    outside = Part("outside", programs)
    price(outside, rest, arch, warps)
    lines = {n for loop in executed for n in range(loop.first_line, loop.last_line + 1)}
    elsewhere = {line for line, _ in machine.traffic} - lines
    add_traffic(outside, machine.traffic, elsewhere)
    name = machine.kernel.name
    shared = machine.shared_memory.end - SHARED_BASE
    return KernelCount(name, arch, warps, registers, spilled, shared, programs, parts, outside)


def turns_of_loop(machine, lines):
    """The turns of a loop, of all programs.

    A loop may be left in its middle: the most visited of its blocks was executed in each turn.
    """
    visits = [
        int(visits)
        for block, visits in zip(machine.kernel.blocks, machine.visits, strict=True)
        if any(instruction.line in lines for instruction in block.all_instructions)
    ]
    return max(visits) / machine.n_warps


def add_traffic(part, traffic, lines):
    """Add the traffic of lines of PTX, which is of all turns of the launch, to a part."""
    total = Counter()
    for (line, what), n in traffic.items():
        if line in lines:
            total[what] += int(n)
    turns = max(part.turns, 1)
    part.wavefronts = total["wavefronts"] / turns
    part.least_wavefronts = total["least wavefronts"] / turns
    part.sectors = total["sectors"] / turns
    part.least_sectors = total["least sectors"] / turns
    part.cycles["shared"] += part.wavefronts
    part.cycles["global"] += part.sectors * 32 / GLOBAL_BYTES


# -----------------------------------------------------------------------------
# Printing


def table(count, title):
    """The lines that show a KernelCount."""
    lines = [
        f"{title}: {count.warps} warps, {count.registers} registers, {count.spilled} bytes "
        f"spilled, {count.shared / 1024:.0f} KiB of shared memory",
        "    instructions of a warp      " + "".join(f"{kind:>9}" for kind in KINDS),
    ]
    parts = [part for part in count.loops if part.turns] + [count.outside]
    for part in parts:
        numbers = "".join(f"{part.instructions[kind]:9d}" for kind in KINDS)
        lines.append(f"    {part.name:20}{'':8}{numbers}")
    units = "".join(f"{unit:>9}" for unit in UNITS)
    lines.append(
        f"    cycles                      {units}  binds     wavefronts/least  sectors/least"
    )
    for part in parts:
        numbers = "".join(f"{part.cycles[unit]:9.0f}" for unit in UNITS)
        wavefronts = f"{part.wavefronts:.0f}/{part.least_wavefronts:.0f}"
        sectors = f"{part.sectors:.0f}/{part.least_sectors:.0f}"
        lines.append(
            f"    {part.name:20}{'':8}{numbers}  {part.binding:8}{wavefronts:>14}{sectors:>15}"
        )
    return lines
