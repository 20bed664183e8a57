"""Compile the Triton kernels that a model launches, without a GPU, and print what they cost.

    python tests/aot.py                    every case, some thirty minutes of one core
    python tests/aot.py sm_90 table 64     the cases with these words in their name

A line of each kernel: registers, spilled bytes, shared memory, columns of tensor memory, how many
instructions are products and atomics, and what is not as it should be. The exit status is 1 if
anything is. The kernels' own Python launches them on zeros in a CPU's memory. Triton's interpreter
and its compiler cannot live in one process, so test_aot.py runs this file in a child process.
"""

import functools
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from kernel_cases import bias_arguments, bias_leaves  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from kernels import flash, loss, rotary  # noqa: E402
from kernels.flash import _find_family  # noqa: E402

# Bytes of shared memory that a program may take, and bytes that it may spill, by architecture.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
SPILLED = {"sm_80": 144, "sm_90": 264, "sm_100": 136}
TENSOR_MEMORY = 512  # columns of an SM's, in which sm_100 adds up products
BIASES = ("none", "slopes", "table", "gates")
# masked: a window with sinks and documents, at once
MASKS = ("causal", "masked")
BATCH, HEADS, TOKENS, DISTANCES = 2, 12, 1024, 129

KERNELS = [
    (module, name, kernel)
    for module in (flash, loss, rotary)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
]
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
OPCODE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# mma.sync, wgmma (sm_90) and tcgen05.mma (sm_100)
PRODUCT = r"HMMA|HGMMA|UTCHMMA"


def cost_of(compiled):
    """Read off what a compiled kernel costs, with the tools that triton brings along."""

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = output(BIN / "cuobjdump", "--dump-resource-usage", file.name)
        lines = output(BIN / "nvdisasm", "-c", file.name).splitlines()
    # STACK is where spills show; LOCAL stays 0.
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "tensor memory": compiled.metadata.tmem_size or 0,
        "products": count(PRODUCT, lines),
        "atomics": count(r"(?:REDG?|ATOMG?)\b", lines),
    }


def count(pattern, lines):
    """How many instructions of machine code match a pattern."""
    opcodes = [match[1] for match in map(OPCODE.match, lines) if match]
    return sum(re.match(pattern, opcode) is not None for opcode in opcodes)


def faults(row):
    """What is not as it should be, in words."""
    tests = {
        "shared memory": row["shared"] > SHARED[row["target"]],
        "tensor memory": row["tensor memory"] > TENSOR_MEMORY,
        "spills": row["spilled"] > SPILLED[row["target"]],
        "atomics": row["atomics"] > 0,
        "no tensor cores": row["kernel"] in ("forward", "dq", "dkdv") and not row["products"],
    }
    return [name for name, failed in tests.items() if failed]


class Compiler:
    """Takes the place of a kernel, and compiles what is launched; rows receives what it costs.

    It is the driver, too, that Triton asks for what it compiles.
    """

    def __init__(self, name, kernel, target, rows):
        self.name, self.kernel, self.target, self.rows = name, kernel, target, rows

    def get_current_target(self):
        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)

    def get_current_device(self):
        return self.target  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device):
        return 0

    def __getitem__(self, grid):
        return functools.partial(self.compile, grid)

    def compile(self, grid, *args, **kwargs):
        with mock.patch.object(triton.runtime.driver, "_active", self):
            compiled = self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
        row = {"target": self.target, "kernel": self.name, **cost_of(compiled)}
        self.rows.append({**row, "faults": faults(row)})


def compile_case(target, bias, D, mask):
    """Compile a training step of a model: what each kernel costs."""
    rows = []
    capability = divmod(int(target.removeprefix("sm_")), 10)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        family = _find_family.__wrapped__(torch.device("cuda"))
    flash.device_family = lambda device: family
    for module, name, kernel in KERNELS:
        setattr(module, name, Compiler(name[1:-7], kernel, target, rows))
    # the strides that a model gives
    zeros = torch.zeros(BATCH, TOKENS, HEADS, D, dtype=torch.bfloat16)
    q, k, v = (zeros.clone().transpose(1, 2).requires_grad_() for _ in range(3))
    angles = torch.zeros(TOKENS, D // 2)
    leaves = bias_leaves(bias, HEADS, DISTANCES, BATCH, TOKENS)
    terms = bias_arguments(bias, [x.requires_grad_() for x in leaves])
    if mask == "masked":
        docs = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
        terms |= {"window": 256, "sinks": 4, "docs": docs}
    y = flash.attention(*rotary.rope(q, k, angles, angles), v, **terms)
    y.backward(y)
    logits = torch.zeros(8, 50304, dtype=torch.bfloat16)
    loss.row_losses(logits, torch.zeros(8, dtype=torch.int64), 0.0, True)
    return rows


def main(words):
    is_clean = True
    for case in itertools.product(SHARED, BIASES, (64, 128), MASKS):
        if set(words) <= set(map(str, case)):
            for row in compile_case(*case):
                print(*case[1:], *row.values(), sep=" | ", flush=True)
                is_clean = is_clean and not row["faults"]
    sys.exit(not is_clean)


if __name__ == "__main__":
    main(sys.argv[1:])
