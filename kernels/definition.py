"""Whether eager.py still computes what the kernels do.

Somebody may change an operator in eager.py, and bfloat16 can hide the difference from the check
of first_call.py. So the kernels serve an operator only while its definition is the one that they
were tested against. kernels/README.md says what to do after a change.
"""

import ast
import functools
import hashlib
from pathlib import Path

# Hashes of the definitions that the kernels were tested against.
TESTED = {"rope": "79a2d856e7503218", "attention": "617212448f2cbc24"}


def has_changed(operator):
    """Whether eager.py computes an operator otherwise than when the kernels were tested."""
    return hash_definition(operator) != TESTED[operator]


@functools.cache
def hash_definition(operator):
    """Hash an operator of eager.py, and what it names in that file: 16 hexadecimal digits."""
    source = (Path(__file__).parent / "eager.py").read_text(encoding="utf-8")
    definitions = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            definitions[getattr(target, "name", getattr(target, "id", None))] = node
    used = [operator]
    for name in used:  # it grows
        names = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
        used += sorted((names & definitions.keys()) - set(used))
    code = [dump_code(definitions[name]) for name in sorted(used)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def dump_code(node):
    """Write a syntax tree as text: without comments and docstrings, in every Python alike.

    ast.dump() writes fields that are empty in some versions and not in others.
    """
    if isinstance(node, list):
        return f"[{', '.join(dump_code(item) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    values = [f"{name}={dump_code(value)}" for name, value in fields]
    return f"{type(node).__name__}({', '.join(values)})"


def _is_docstring(node):
    """Whether a statement is a constant, which does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
