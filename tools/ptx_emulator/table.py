"""The table of the instructions that the emulator executes, by their whole names.

An entry is a function that builds, from one instruction of a kernel, an action: a function of the
mask of threads that executes it. Building happens once, when a kernel is loaded; the action runs
each time that the instruction is reached. So whatever is not understood is refused at loading.
"""

import re

OPERATIONS = {}


def operation(*patterns, operands):
    """Enter a function into the table, for all names that the patterns stand for.

    Braces enumerate, as in a shell: "add.{s32,u32}" is add.s32 and add.u32, "fma.rn{,.ftz}.f32" is
    with and without .ftz. operands: how many an instruction has, a number or a tuple of numbers.
    """
    allowed = operands if isinstance(operands, tuple) else (operands,)

    def enter(build):
        for pattern in patterns:
            for name in expand(pattern):
                assert name not in OPERATIONS, name
                OPERATIONS[name] = build, allowed
        return build

    return enter


def expand(pattern):
    """All names that a pattern with braces stands for."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    before = pattern[: found.start()]
    after = pattern[found.end() :]
    return [name for word in found[1].split(",") for name in expand(before + word + after)]
