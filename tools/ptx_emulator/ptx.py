"""Read PTX, the assembly language that Triton's compiler emits, into blocks of instructions.

PTX is text, one instruction a line. A kernel compiled by Triton looks like this:

    .visible .entry _kernel(                         the parameters, in the order of the call
        .param .u64 .ptr .global .align 1 _kernel_param_0,
        .param .u32 _kernel_param_1
    )
    .reqntid 128                                     128 threads a program
    {
        .reg .pred  %p<3>;                           registers: predicates (true or false) %p0 ...,
        .reg .b32   %r<40>;                          of 32 bits %r0 ..., of 64 bits %rd0 ...
        mov.u32     %r1, %tid.x;
        setp.lt.s32 %p1, %r1, 7;
    @%p1 bra        $L__BB0_2;                       only the threads branch for which %p1 is true
        ...
    $L__BB0_2:
        ret;
    }

A register has a width but no type: the instruction's name says how its bits are read. `@%p1` and
`@!%p1` before an instruction are its guard.

What is not understood is refused here, with the line, and never skipped.
"""

import re
from typing import NamedTuple

# The architectures whose PTX the emulator executes.
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")

# What ends a block.
CONTROL = ("bra", "bra.uni", "bar.sync", "ret")

# Directives inside a kernel's body that carry nothing to execute.
IGNORED_DIRECTIVES = (".loc", ".pragma")

REGISTER_BITS = {".pred": 1, ".b16": 16, ".b32": 32, ".b64": 64, ".f32": 32, ".f64": 64}


class Instruction(NamedTuple):
    name: str  # with its modifiers: "ld.shared.v2.b32"
    operands: tuple  # of strings; a list in braces is a tuple of strings
    guard: str | None  # the register of the guard, "%p1"
    negated: bool  # whether the guard is negated
    line: int  # in the PTX text, from 1
    source: str  # the line of Python it was compiled from, "flash.py:426"
    text: str


class Block(NamedTuple):
    """Instructions without a branch among them, and the one that ends the block.

    end is a branch, a barrier or ret, or None if the next block is the target of a branch.
    """

    instructions: tuple
    end: Instruction | None

    @property
    def all_instructions(self):
        return self.instructions if self.end is None else (*self.instructions, self.end)


class Kernel:
    """The kernel of a PTX text.

    name, text, target ("sm_80"); parameters: (type, name) in order; n_threads of a program;
    registers: {prefix: (bits, number)}; blocks; labels: {label: index of its block}.
    Raises NotImplementedError for an architecture or a line that the emulator does not know.
    """

    def __init__(self, text):
        self.text = text
        entry = re.search(r"\.entry\s+(\w+)\s*\(", text)
        self.name = entry[1]
        if len(re.findall(r"^\s*(?:\.visible\s+)?\.(?:entry|func)\b", text, re.M)) != 1:
            raise NotImplementedError(f"{self.name}: the text has another kernel, or a function")
        self.target = check_target(re.search(r"^\.target\s+(\w+)", text, re.M)[1], self.name)
        body_at = text.index("{", text.index(")", entry.end()))
        head = text[entry.end() : body_at]
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^\n]*?\b(\w+_param_\d+)", head)
        self.n_threads = int(re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)[1])
        if self.n_threads % 32:
            raise NotImplementedError(f"{self.name}: {self.n_threads} threads are no whole warps")
        self.files = dict(re.findall(r'\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"', text))
        self.targets_of_branches = set(re.findall(r"\bbra(?:\.uni)?\s+(\$\w+)", text))
        self.registers = {}
        self.blocks = []
        self.labels = {}
        self._read_body(text[body_at + 1 :], first_line=text.count("\n", 0, body_at) + 1)
        self._check_flow()

    def _read_body(self, body, first_line):
        source = ""
        pending = []  # instructions of the block that is being read
        for number, line in enumerate(body.split("\n"), first_line):
            line = line.split("//")[0].strip()
            if line == "}":
                break
            label = re.match(r"(\$\w+):$", line)
            if not line:
                continue
            elif label:
                if label[1] in self.targets_of_branches:
                    self._close_block(pending)
                    self.labels[label[1]] = len(self.blocks)
            elif line.startswith(".loc"):
                _, file, at = line.split()[:3]
                source = f"{self.files.get(file, file)}:{at}"
            elif line.startswith(".reg"):
                self._declare(line, number)
            elif not line.startswith(IGNORED_DIRECTIVES):
                self._read_line(line, number, source, pending)
        self._close_block(pending)

    def _declare(self, line, number):
        """Read `.reg .b32 %r<40>;`."""
        found = re.match(r"\.reg\s+(\.\w+)\s+%([a-z]+)<(\d+)>;$", line)
        if not found or found[1] not in REGISTER_BITS:
            self.refuse(number, line, "an unknown declaration")
        self.registers[found[2]] = REGISTER_BITS[found[1]], int(found[3])

    def _read_line(self, line, number, source, pending):
        """Read the instructions of a line; nearly always it is one."""
        if not line.endswith(";"):
            self.refuse(number, line, "no instruction that ends on its line")
        for text in line[:-1].split(";"):
            text = text.strip()
            found = re.match(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(\S.*))?$", text)
            if not found:
                self.refuse(number, text, "not understood")
            negation, guard, name, operands = found.groups()
            operands = split_operands(operands or "")
            instruction = Instruction(name, operands, guard, negation == "!", number, source, text)
            if name in CONTROL:
                self._close_block(pending, instruction)
            else:
                pending.append(instruction)

    def _close_block(self, pending, end=None):
        if pending or end:
            self.blocks.append(Block(tuple(pending), end))
            pending.clear()

    def _check_flow(self):
        """Refuse operands of branches and barriers that the machine does not execute."""
        for block in self.blocks:
            end = block.end
            if end is None:
                continue
            elif end.name == "ret":
                is_known = end.operands == ()
            elif end.name == "bar.sync":  # barrier 0, of all threads
                is_known = end.operands in (("0",), ("0", str(self.n_threads)))
            else:
                is_known = len(end.operands) == 1 and end.operands[0] in self.labels
            if not is_known:
                self.refuse(end.line, end.text, "operands that the emulator does not execute")
        last = self.blocks[-1].end if self.blocks else None
        if last is None or last.guard or last.name == "bar.sync":
            raise NotImplementedError(f"{self.name}: the text does not end in ret or a branch")

    def refuse(self, line, text, why):
        raise NotImplementedError(f"{self.name}, PTX line {line}: {why}: {text}")


def check_target(target, name):
    """The architecture without the letter of its variant (sm_90a); raise if it is not supported."""
    family = re.sub(r"[a-z]$", "", target)
    if family == "sm_100":
        raise NotImplementedError(
            f"{name}: {family} is not emulated: its tensor cores are programmed by tcgen05 "
            "instructions with a memory of their own"
        )
    if family not in TARGETS:
        raise NotImplementedError(f"{name}: {target} is not emulated: use {', '.join(TARGETS)}")
    return family


def split_operands(text):
    """The operands of an instruction: split at commas outside of braces and brackets."""
    operands = []
    for piece in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        piece = piece.strip()
        if piece[0] == "{":
            piece = tuple(x.strip() for x in piece[1:-1].split(","))
        operands.append(piece)
    return tuple(operands)
