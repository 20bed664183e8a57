"""The lines that each part of a checkout, by default this one, has and may have: make lines.

    python tests/lines.py [CHECKOUT]
    python tests/lines.py --check    fails if a part has more lines, or denser ones, than it may

Density: nodes of the syntax tree a line of code, lines of comment per 100; (at 7ad6d1d). The most
lines are those that landed, rounded up to the next 50: whoever raises a number says why in the
commit. A part may have 5 % more nodes a line than at 7ad6d1d.
"""

import ast
import io
import math
import sys
import tokenize
from pathlib import Path

IS_CHECK = "--check" in sys.argv
FOLDERS = [word for word in sys.argv[1:] if word != "--check"]
ROOT = Path(FOLDERS[0] if FOLDERS else Path(__file__).parent.parent).resolve()
DENSER = 1.05  # than at 7ad6d1d
SCRIPTS = "model.py rope_scaling.py train.py extend.py sample.py evaluate.py hf.py"
LIMITS = dict(zip(SCRIPTS.split(), (1500, 500, 550, 400, 150, 350, 100), strict=True))
REACH = 8300  # train.py, and what it imports
# part -> files and patterns, the most lines, the density of commit 7ad6d1d
PARTS = {script: (script, limit, "") for script, limit in LIMITS.items()} | {
    "scripts": (SCRIPTS, 3450, "(11.2, 8.9)"),
    "kernels/": ("kernels/**/*.py kernels/README.md", 2650, "(15.1, 7.9)"),
    "data/": ("data/**/*.py", 2050, "(10.7, 6.0)"),
    "nanolong/": ("nanolong/**/*.py", 7600, "(10.7, 5.3)"),
    "its HTML, JavaScript": ("nanolong/**/*.html nanolong/**/*.js", 100, ""),
    "product, Python": (
        f"{SCRIPTS} kernels/**/*.py data/**/*.py nanolong/**/*.py",
        15600,
        "(11.7, 6.7)",
    ),
    "experiments/": ("experiments/**/*.py", 4050, "(12.0, 3.5)"),
    "examples/": ("examples/**/*.py", 500, "(13.2, 5.9)"),
    "tests/": ("tests/**/*.py", 15700, "(11.9, 3.6)"),
}


def find_imported(name, found):
    """Add to `found` the file of a module, and of those of ours that it imports, even lazily."""
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if file.is_file() and file not in found:
        found.append(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            package = file.parent.name if getattr(node, "level", 0) else ""
            base = f"{package}.{getattr(node, 'module', None) or ''}"
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                parts = list(filter(None, f"{base}.{alias.name}".split(".")))
                for n in range(1, len(parts) + 1):
                    find_imported(".".join(parts[:n]), found)
    return found


def print_row(part, files, limit, before=""):
    """Print a row of the table. Returns what is too much of the part, in words."""
    n_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {t.start[0] for t in tokens if t.type in (tokenize.NAME, tokenize.OP)}
    comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT} - code
    nodes = sum(1 for _ in ast.walk(ast.parse(text)))
    density = f"{nodes / len(code):.1f}, {100 * len(comments) / len(code):.1f}" if code else ""
    print(f"{part:20} {n_lines:7,} {limit:7,}   {density:10} {before}")
    found = []
    if n_lines > limit:
        found.append(f"{part} has {n_lines:,} lines, and may have {limit:,}")
    most_nodes = DENSER * float(before.strip("(").split(",")[0]) if before else math.inf
    if code and nodes / len(code) > most_nodes:
        found.append(
            f"{part} has {nodes / len(code):.2f} nodes a line, and {most_nodes:.2f} at most"
        )
    return found


print(f"{'':20} {'lines':>7} {'most':>7}   density")
faults = []
for part, (patterns, limit, before) in PARTS.items():
    faults += print_row(part, [f for p in patterns.split() for f in ROOT.glob(p)], limit, before)
faults += print_row("train.py reaches", find_imported("train", []), REACH, "(12.2, 6.4)")
if IS_CHECK and faults:
    sys.exit("error: " + "; ".join(faults) + ": delete lines, or raise the number and say why")
