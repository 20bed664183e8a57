"""What the experiments share: finished runs, confidence intervals, claims and tables."""

import ast
import hashlib
import inspect
import json
import math
import statistics
import sys
import textwrap
from dataclasses import dataclass

from kernels.definition import dump_code
from nanolong.entry import entry_hash
from nanolong.strict_json import to_json
from nanolong.validate import require

# Student's t, two-sided 95 %, by degrees of freedom.
T95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}


def confidence_interval(values):
    """Return the mean and the half-width of its 95 % interval (nan for a single value)."""
    n = len(values)
    mean = statistics.fmean(values)
    if n == 1:
        return mean, math.nan
    return mean, T95.get(n - 1, 2.0) * statistics.stdev(values) / math.sqrt(n)


def format_interval(values, digits=3):
    """Return the mean and its 95 % interval as text, "1.235 ± 0.017"; of one value, the value."""
    mean, half_width = confidence_interval(list(values))
    if math.isnan(half_width):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half_width:.{digits}f}"


RULE = (
    "A claim passes when its whole 95 % interval does. It is not separated from its bound when the "
    "interval includes the bound, contradicted when the whole interval lies on the other side of "
    "the bound and of zero, and too small when it lies on the other side of the bound alone."
)


@dataclass
class Claim:
    """A prediction: the whole 95 % interval of a measured mean lies above, or below, a bound."""

    text: str
    mean: float
    half_width: float
    above: float | None = None
    below: float | None = None

    @property
    def margin(self):
        """How far the mean lies on the predicted side of the bound."""
        return self.mean - self.above if self.below is None else self.below - self.mean

    @property
    def passed(self):
        return self.margin > self.half_width  # False if the half-width is nan

    def verdict(self):
        """Return "pass", or "FAIL" and why, in the words of RULE."""
        if self.passed:
            return "pass"
        if math.isnan(self.half_width):
            return "FAIL (a single seed has no interval)"
        if self.margin >= -self.half_width:
            return "FAIL (not separated)"
        return "FAIL (contradicted)" if self.is_contradicted else "FAIL (too small)"

    @property
    def is_contradicted(self):
        """Whether the whole interval lies on the other side of the bound and of zero."""
        if self.below is None:
            return self.mean + self.half_width < min(self.above, 0)
        return self.mean - self.half_width > max(self.below, 0)

    @property
    def bound(self):
        return f"< {self.below:.4g}" if self.above is None else f"> {self.above:.4g}"

    @property
    def measured(self):
        if self.half_width > 0:
            return f"{self.mean:+.3f} ± {self.half_width:.3f}"
        return f"{self.mean:+.3f}"  # a single number, without an interval

    def __str__(self):
        return f"{self.text}: {self.measured}, {self.bound}: {self.verdict()}"


def markdown_table(header, rows):
    """Return a Markdown table as a list of lines; header and rows are lists of cells."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return lines


def count(n, noun):
    """Return "1 seed" or "3 seeds"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def command_line(script):
    """Return the command that started this script."""
    return " ".join(["python", script, *sys.argv[1:]])


def read_json(file):
    """Return the value of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def load_finished_run(file, key):
    """Return what a finished run wrote into this file, or None if there is no such file.

    key: the settings and data of the run, as JSON has them. Raises UserError if the file was
    written by a run with another key.
    """
    if not file.is_file():
        return None
    run = read_json(file)
    require(
        run["key"] == json.loads(to_json(key)),
        f"{file} was made with another version of the scheme, other settings or other data: "
        "remove it, or choose another --runs",
    )
    return run


def load_board(file):
    """Return what an experiment measured, for --redraw. Raises UserError if it is not there."""
    require(
        file.is_file(), f"--redraw needs {file}, which does not exist: measure first, without it"
    )
    return read_json(file)


def hash_code(objects):
    """
    Hash the code of classes and functions, of what they inherit, and of what they name of their
    own modules. Of a class from --entry it is the whole file.
    """
    found = {}
    for item in objects:
        _collect(item, found)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name}: {found[name]}\n".encode())
    return digest.hexdigest()


def _collect(item, found):
    """Put the code of a class or function, and of what it uses, into `found`, by name."""
    key = f"{item.__module__}.{item.__qualname__}"
    if key in found or item.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    found[key] = entry_hash(item)
    for base in getattr(item, "__bases__", ()):
        _collect(base, found)
    if found[key] is not None:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    found[key] = dump_code(tree)
    module = vars(inspect.getmodule(item))
    for node in ast.walk(tree):
        used = module.get(node.id) if isinstance(node, ast.Name) else None
        is_code = inspect.isfunction(used) or inspect.isclass(used)
        if is_code and used.__module__ == item.__module__:
            _collect(used, found)
