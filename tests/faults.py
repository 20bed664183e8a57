"""Inject 25 faults into changed lines, one at a time, and run the tests of their files on each.

    git diff -U0 COMMIT -- FILE ... | python tests/faults.py SEED FILE=TESTS[,TESTS] ...

A fault replaces an operator, a comparison or a constant, or drops a statement, in a line that the
diff adds to a FILE. A line of JSON says of each whether it was killed (a test fails), survived, or
was too slow: at first of each FILE without a fault. Files are changed in place, and restored.
"""

import ast
import copy
import json
import random
import re
import subprocess
import sys
from pathlib import Path

COMMAND = ["timeout", "180", sys.executable, "-m", "pytest", "-qx"]  # seconds
PAIRS = "Add Sub Mult Div FloorDiv Mod Lt LtE Gt GtE Eq NotEq In NotIn Is IsNot And Or BitAnd BitOr"
OPERATORS = [getattr(ast, name) for name in PAIRS.split()]
OTHER = {operator: OPERATORS[i ^ 1] for i, operator in enumerate(OPERATORS)}
DROPPED = ast.AugAssign | ast.Expr | ast.Raise | ast.Return | ast.Continue


def mutate(node):
    """Return the text of a node of the syntax tree with a fault, or None."""
    node = copy.deepcopy(node)
    if isinstance(node, DROPPED):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return None if is_docstring else "pass"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        node.ops[0] = OTHER[type(node.ops[0])]()
    elif type(getattr(node, "op", None)) in OTHER:
        node.op = OTHER[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        return None
    return f"({ast.unparse(node)})"


def find_faults(diff, tests):
    """Yield (file, line number, start, end, new text) for the files of a diff that have tests."""
    for part in re.split(r"^\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        file = part.partition("\n")[0]
        hunks = re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))?", part, re.MULTILINE)
        lines = {int(first) + i for first, n in hunks for i in range(int(n or 1))}
        source = Path(file).read_bytes()
        starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        nodes = list(ast.walk(ast.parse(source)))
        # parts of formatted strings, whose places are not known
        skipped = {part for x in nodes if isinstance(x, ast.JoinedStr) for part in ast.walk(x)}
        for node in nodes if file in tests else ():
            is_changed = getattr(node, "lineno", None) in lines and node not in skipped
            text = mutate(node) if is_changed else None
            if text is not None:
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                yield file, node.lineno, start, end, text


def main(seed, *words):
    tests = {file: names.split(",") for file, _, names in (word.partition("=") for word in words)}
    faults = random.Random(seed).sample(list(find_faults(sys.stdin.read(), tests)), 25)
    # first each file as it is: a test that fails anyway kills nothing
    for file, line, start, end, text in [*((file, 1, 0, 0, "") for file in tests), *faults]:
        source = Path(file).read_bytes()
        try:
            Path(file).write_bytes(source[:start] + text.encode() + source[end:])
            status = subprocess.run([*COMMAND, *tests[file]], stdout=subprocess.DEVNULL).returncode
        finally:
            Path(file).write_bytes(source)
        result = {0: "survived", 124: "too slow"}.get(status, "killed")
        fault = {"line": f"{file}:{line}", "old": source[start:end].decode(), "new": text}
        print(json.dumps({**fault, "result": result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
