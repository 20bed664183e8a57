"""Which PTX instructions our kernels use, and which the emulator executes.

    python tests/compiled/instructions.py          the usual kernels of aot.py
    python tests/compiled/instructions.py --all    with every head dimension, dtype and bias: slow

Prints a table in Markdown: each instruction with how many kernels of each architecture use it.
Exit status 1 if one is used that the emulator does not execute.
"""

import collections
import re
import sys

import aot
from ptx_emulator import OPERATIONS, TARGETS
from ptx_emulator.ptx import CONTROL, Kernel


def instructions_of(target, make, args):
    """The names of the instructions of one case of aot.py."""
    _, launcher = make(target, *args)
    blocks = Kernel(launcher.compile().asm["ptx"]).blocks
    return {instruction.name for block in blocks for instruction in block.all_instructions}


def usage(cases):
    """({instruction: {target: number of kernels}}, {target: number of kernels})."""
    used = collections.defaultdict(collections.Counter)
    n_kernels = collections.Counter()
    for target, make, args in cases:
        if target not in TARGETS:
            continue
        n_kernels[target] += 1
        for name in instructions_of(target, make, args):
            used[name][target] += 1
    return used, n_kernels


def is_executed(name):
    return name in OPERATIONS or name in CONTROL


def family(name):
    """An instruction without the sizes and types in its name, to sort by."""
    return re.sub(r"\.(?:[bsuf]\d+|pred|v\d|x\d)\b", "", name)


def report(used, n_kernels):
    """The lines of the table."""
    targets = [target for target in TARGETS if n_kernels[target]]
    lines = [
        f"{len(used)} instructions are used by {sum(n_kernels.values())} compiled kernels; "
        f"{len(OPERATIONS) + len(CONTROL)} are executed.",
        "",
        "| instruction | " + " | ".join(f"{x}, of {n_kernels[x]}" for x in targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for name in sorted(used, key=lambda name: (family(name), name)):
        cells = " | ".join(str(used[name][target]) for target in targets)
        note = "" if is_executed(name) else " **not executed**"
        lines.append(f"| {name}{note} | {cells} |")
    others = sorted(set(OPERATIONS) - set(used))
    lines += ["", f"Executed and not used ({len(others)}): " + ", ".join(others) + "."]
    return lines


def main(words):
    scope = next((word for word in words if word == "--all"), "")
    used, n_kernels = usage(aot.cases(scope))
    print("\n".join(report(used, n_kernels)))
    return int(not all(map(is_executed, used)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
