"""Compile the Triton kernels that a model launches, without a GPU, and print what they cost.

    python tests/aot.py                    every case, some thirty minutes of one core
    python tests/aot.py sm_90 table 64     the cases with these words in their name

A line for each kernel: registers, spilled bytes, shared memory, columns of tensor memory, and what
is not as it should be. The exit status is 1 if anything is. The kernels' own Python launches them
on zeros in a CPU's memory. Triton's interpreter and its compiler cannot live in one process, so
test_aot.py runs this file in a child process.
"""

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

# The most spilled bytes, bytes of shared memory, and columns of tensor memory (sums, on sm_100).
LIMITS = {"sm_80": (144, 166_912, 0), "sm_90": (264, 232_448, 0), "sm_100": (136, 232_448, 512)}
BIASES = ("none", "slopes", "table", "gates")
BATCH, HEADS, TOKENS, DISTANCES = 2, 12, 1024, 129
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ASYNC_PRODUCT = r"wgmma\.mma_async|tcgen05\.mma"  # sm_90, sm_100


def examine(target, kernel, compiled):
    """Return what a compiled kernel costs, and a list of what is not as it should be."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # STACK is where spills show; LOCAL stays 0.
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    costs = [spilled, compiled.metadata.shared, compiled.metadata.tmem_size or 0]
    ptx = compiled.asm["ptx"]
    tests = {
        "too much": any(cost > limit for cost, limit in zip(costs, LIMITS[target], strict=True)),
        "atomics": re.search(r"\b(?:red|atom)\.", ptx),
        "no tensor cores": kernel in ("forward", "dq", "dkdv") and "mma" not in ptx,
        "no fence": lacks_fence(ptx),
    }
    return registers, *costs, [fault for fault, is_found in tests.items() if is_found]


def lacks_fence(ptx):
    """Say if a path of PTX leads from the arrival of a copy to a product without a proxy fence.

    cp.async writes shared memory by another proxy than wgmma and tcgen05.mma read it: a race.
    """
    unfenced_at = set()  # labels of such paths
    for _ in range(3):  # the paths of loops, which jump back, are known from the second turn on
        unfenced = False
        for line in ptx.splitlines():
            name = re.search(r"\$L\w+", line)  # of the place, or of where a jump leads
            if "cp.async.wait" in line or ":" in line and name and name[0] in unfenced_at:
                unfenced = True
            elif "fence.proxy.async" in line:
                unfenced = False
            elif unfenced and name and re.search(r"\bbra\b", line):
                unfenced_at.add(name[0])
            elif unfenced and re.search(ASYNC_PRODUCT, line):
                return True
    return False


def compile_case(target, bias, D, mask):
    """Compile a training step of a model. Returns each kernel's name and examine() of it."""
    rows = []
    driver = mock.Mock()  # what Triton asks of a GPU
    driver.get_current_target.return_value = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    driver.get_current_device.return_value = target  # whose kernels Triton keeps apart

    def run(kernel, x, grid, arguments, constants, **options):
        with mock.patch.object(triton.runtime.driver, "_active", driver):
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **constants, **options)
        name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
        rows.append((name, *examine(target, name, compiled)))

    flash.device_family = lambda device: (target, "tf32x3")
    flash.run = rotary.run = loss.run = run
    # the strides that a model gives
    zeros = torch.zeros(BATCH, TOKENS, HEADS, D, dtype=torch.bfloat16)
    q, k, v = (zeros.clone().transpose(1, 2).requires_grad_() for _ in range(3))
    angles = torch.zeros(TOKENS, D // 2)
    leaves = bias_leaves(bias, HEADS, DISTANCES, BATCH, TOKENS)
    terms = bias_arguments(bias, [x.requires_grad_() for x in leaves])
    if mask == "masked":  # all at once
        terms |= {"window": 256, "sinks": 4, "docs": zeros[:, :, 0, 0].long()}
    y = flash.attention(*rotary.rope(q, k, angles, angles), v, **terms)
    y.backward(y)
    logits = torch.zeros(8, 50304, dtype=torch.bfloat16)
    loss.row_losses(logits, torch.zeros(8, dtype=torch.int64), 0.0, True)
    return rows


def main(words):
    n_faults = 0
    sizes = [int(word) for word in words if word.isdigit()] or [64, 128]
    for case in itertools.product(LIMITS, BIASES, sizes, ("causal", "masked")):
        if set(words) <= set(map(str, case)):
            for row in compile_case(*case):
                print(*case, *row, sep=" | ", flush=True)
                n_faults += len(row[-1])
    sys.exit(n_faults > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
