"""Count what a kernel does: instructions by unit, wavefronts and sectors of memory.

    launcher = install(flash, "sm_80", profile=True)["_forward_kernel"]
    flash.attention(q, k, v)
    counts(launcher.machine)              instructions that warps executed, by kind
    loops(launcher.machine)               the innermost loops and the instructions of one pass
    launcher.machine.traffic              {(PTX line, what): number}, where profile is on

These are instructions of PTX, not of the hardware: ptxas removes moves and joins some of them.

`what` is one of these:
  wavefronts        cycles that shared memory needs for the accesses of a warp: see wavefronts()
  least wavefronts  the same without bank conflicts
  sectors           aligned pieces of 32 bytes of global memory that each warp's access touches
  least sectors     the fewest that hold as many different bytes
  bytes             different bytes of global memory that each warp's access asks for
"""

import collections
import re
from typing import NamedTuple

import numpy as np

N_BANKS = 32
BANK_BYTES = 4
SECTOR_BYTES = 32

# The unit that executes an instruction; the first pattern that matches the start of its name.
KINDS = (
    ("tensor", r"mma\.|wgmma\.mma_async"),
    ("mufu", r"(ex2|lg2|rcp|rsqrt|sqrt)\.|div\.full"),
    ("shared", r"(ld|st)\.shared|ldmatrix|stmatrix"),
    ("shuffle", r"shfl|redux"),
    ("copy", r"cp\.async\.c[ag]\."),
    ("global", r"(ld|st)\.global"),
    ("barrier", r"bar\.|cp\.async\.(commit|wait)|fence|wgmma"),
    ("convert", r"cvt"),
    ("move", r"mov|ld\.param"),
    ("control", r"bra|ret"),
    ("fp32", r"(add|sub|mul|fma|max|min|neg|abs|div)\S*\.f32"),
    ("integer", r""),
)


def kind(name):
    """The kind of an instruction: the unit that executes it."""
    return next(label for label, pattern in KINDS if re.match(pattern, name))


def counts(machine):
    """The instructions that warps executed, by kind: a block's, times how often a warp ran it."""
    total = collections.Counter()
    for block, visits in zip(machine.kernel.blocks, machine.visits, strict=True):
        for instruction in block.all_instructions:
            total[kind(instruction.name)] += int(visits)
    return total


class Loop(NamedTuple):
    """An innermost loop."""

    first_line: int  # of PTX
    last_line: int
    passes: int  # how often a warp went through it
    kinds: collections.Counter  # the instructions of one pass, by kind


def loops(machine):
    """The innermost loops of a kernel, as they lie in the text.

    A loop is a branch backwards with the blocks from its target on; conditional blocks inside count
    as if they were always executed.
    """
    kernel = machine.kernel
    found = []
    for last, block in enumerate(kernel.blocks):
        if block.end is None or not block.end.name.startswith("bra"):
            continue
        first = kernel.labels[block.end.operands[0]]
        if first <= last:
            found.append((first, last))
    innermost = [
        (first, last)
        for first, last in found
        if not any((first, last) != x and first <= x[0] and x[1] <= last for x in found)
    ]
    result = []
    for first, last in innermost:
        inside = [i for block in kernel.blocks[first : last + 1] for i in block.all_instructions]
        kinds = collections.Counter(kind(instruction.name) for instruction in inside)
        passes = int(machine.visits[last])
        result.append(Loop(inside[0].line, inside[-1].line, passes, kinds))
    return result


def wavefronts(at, size, lanes, warps):
    """The wavefronts of shared memory of an access: (number, number without bank conflicts).

    Addresses `at`, each of `size` bytes, by the lanes of warps. Memory has 32 banks of 4 bytes. A
    warp's access goes in phases of 128 bytes: all 32 threads for 4 bytes each, 16 threads for 8,
    8 threads for 16. A phase takes as many wavefronts as the fullest bank has different words.
    """
    words = (at // BANK_BYTES)[:, None] + np.arange(max(1, size // BANK_BYTES))
    threads_of_phase = min(32, 128 // max(BANK_BYTES, size))
    phases = (warps * 32 + lanes) // threads_of_phase
    phases = np.repeat(phases, words.shape[1])
    words = words.ravel()
    # a word that several threads of a phase read is read once
    phases, words = np.unique(np.stack((phases, words)), axis=1)
    names, phases = np.unique(phases, return_inverse=True)
    words_of_bank = np.zeros((len(names), N_BANKS), np.int64)
    np.add.at(words_of_bank, (phases, words % N_BANKS), 1)
    return int(words_of_bank.max(1).sum()), len(names)


def count_wavefronts(machine, instruction, at, size, threads):
    number, least = wavefronts(at, size, machine.lane[threads], machine.warp[threads])
    machine.traffic[instruction.line, "wavefronts"] += number
    machine.traffic[instruction.line, "least wavefronts"] += least


def sectors(offset, size, warps):
    """The sectors that the accesses of warps touch: (number, least number, different bytes)."""
    touched = offset[:, None] + np.arange(size)
    touched = np.unique(np.stack((np.repeat(warps, size), touched.ravel())), axis=1)
    names, n_bytes = np.unique(touched[0], return_counts=True)
    touched[1] //= SECTOR_BYTES
    number = np.unique(touched, axis=1).shape[1]
    return number, int((-(-n_bytes // SECTOR_BYTES)).sum()), int(n_bytes.sum())


def count_sectors(machine, instruction, storage, offset, size, threads):
    number, least, n_bytes = sectors(offset, size, machine.warp[threads])
    machine.traffic[instruction.line, "sectors"] += number
    machine.traffic[instruction.line, "least sectors"] += least
    machine.traffic[instruction.line, "bytes"] += n_bytes
