"""Put faults into the kernels, one at a time, and see which check finds each.

    python tests/compiled/mutations.py                    all of them: the table, some minutes
    python tests/compiled/mutations.py --only=NAME        one (several: separated by commas)
    python tests/compiled/mutations.py --json=FILE        also write it as JSON, for trust.py

A fault is a replacement in the source of a kernel, in a copy of its file in a temporary folder, or
in the PTX that the compiler made of a kernel. The project's own checks (checks.py) then run the
faulty kernel. A text that no longer occurs is an error, so that no mutation stays behind unnoticed
when the kernels change. The exit status is 1 when a fault is not found, unless it is known that it
changes nothing: for those the table gives the reason.
"""

import argparse
import importlib.util
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "tests"), str(ROOT)]

import execution  # noqa: E402
import torch  # noqa: E402
from checks import CHECKS  # noqa: E402
from faults import EVERY, MUTATIONS  # noqa: E402
from ptx_emulator import Fault  # noqa: E402

from nanolong.provenance import provenance  # noqa: E402

# What a Fault says, and what the table calls it.
FAULT_NAMES = (
    ("out of bounds", "access out of bounds"),
    ("outside of", "access out of bounds"),
    ("belongs to no tensor", "access out of bounds"),
    ("not aligned", "misaligned access"),
    ("uninitialised", "uninitialised read"),
    ("another program", "programs that overlap"),
    ("has not arrived", "missing wait for a copy"),
    ("wgmma may still read", "missing wait for wgmma"),
    ("before its wait", "missing wait for wgmma"),
    ("fence", "missing fence"),
    ("race", "race"),
    ("different values", "race"),
    ("does not end", "endless loop"),
)


STALE = "ERROR: nothing to replace"


class Outcome(NamedTuple):
    name: str
    where: str
    found_by: str  # the kind of check; "" where nothing was found
    check: str  # the name in checks.py
    detail: str
    seconds: float


# -----------------------------------------------------------------------------
# One mutation


class StaleMutation(Exception):
    """The text to replace no longer occurs, or not as often as it should."""


def replace_occurrence(text, mutation):
    """The text with the fault in it."""
    count = text.count(mutation.old)
    wanted = mutation.occurrence
    if wanted is None and count != 1 or wanted is not None and count <= wanted:
        raise StaleMutation(f"{mutation.name}: {mutation.old!r} occurs {count} times")
    pieces = text.split(mutation.old)
    at = (wanted or 0) + 1
    return mutation.old.join(pieces[:at]) + mutation.new + mutation.old.join(pieces[at:])


def faulty_modules(mutation, folder):
    """The project's files of kernels, one of them with the fault in it."""
    module = f"faulty_{re.sub(r'[^a-z0-9]+', '_', mutation.name.lower())}"
    source = (ROOT / "kernels" / mutation.file).read_text(encoding="utf-8")
    # operators of its own: a name can be registered only once
    source = replace_occurrence(source, mutation).replace('"nanolong::', f'"{module}::')
    path = Path(folder) / f"{module}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(module, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return execution.PROJECT._replace(**{mutation.file.removesuffix(".py"): loaded})


def ptx_edit(mutation):
    """A function that puts the fault into PTX."""

    def edit(text):
        places = list(re.finditer(mutation.old, text, re.MULTILINE))
        if len(places) <= max(mutation.occurrence or 0, 0):
            raise StaleMutation(f"{mutation.name}: {mutation.old!r} occurs {len(places)} times")
        if mutation.occurrence == EVERY:
            return re.sub(mutation.old, mutation.new, text, flags=re.MULTILINE)
        place = places[mutation.occurrence or 0]
        return text[: place.start()] + place.expand(mutation.new) + text[place.end() :]

    return edit


def perform_mutated(mutation, check, folder):
    """Run a check with the fault in place; what is found is raised."""
    if mutation.kernel is None:
        modules = faulty_modules(mutation, folder)
        execution.perform(mutation.check, check, modules, execution.Record())
    else:
        edits = {mutation.kernel: ptx_edit(mutation)}
        execution.perform(mutation.check, check, record=execution.Record(), edits=edits)


def fault_name(fault):
    message = str(fault)
    return next((name for words, name in FAULT_NAMES if words in message), "emulator")


def try_mutation(mutation):
    """Put in the fault and run its check: an Outcome."""
    start = time.monotonic()
    found_by, detail = "", ""
    check = CHECKS[mutation.check]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        try:
            perform_mutated(mutation, check, folder)
        except Fault as fault:
            found_by, detail = fault_name(fault), str(fault)
        except execution.WrongNumber as wrong:
            found_by, detail = "number compared with float64", str(wrong)
        except execution.WrongOrder as wrong:
            found_by, detail = "order of programs", str(wrong)
        except StaleMutation as stale:
            found_by, detail = STALE, str(stale)
    where = mutation.file
    if mutation.kernel is not None:
        where = f"PTX of {mutation.kernel}, {check.target}"
    seconds = round(time.monotonic() - start, 1)
    return Outcome(mutation.name, where, found_by, mutation.check, detail, seconds)


# -----------------------------------------------------------------------------
# All of them


def record(outcomes, seed, seconds):
    """The table as JSON."""
    rows = []
    for mutation, outcome in outcomes:
        row = {"old": mutation.old, "new": mutation.new, "equivalent": mutation.equivalent}
        rows.append({**outcome._asdict(), **row})
    return {
        "command": "python tests/compiled/mutations.py --json=FILE",
        "seed": seed,
        "provenance": provenance(torch.device("cpu")),
        "seconds": seconds,
        "mutations": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", default="", help="write the table to this file")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name]
    unknown = set(wanted) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        print(f"error: no mutation is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)

    start = time.monotonic()
    outcomes = []
    missed = 0
    for mutation in MUTATIONS:
        if wanted and mutation.name not in wanted:
            continue
        torch.manual_seed(args.seed)
        random.seed(args.seed)
        outcome = try_mutation(mutation)
        outcomes.append((mutation, outcome))
        verdict = outcome.found_by or ("equivalent" if mutation.equivalent else "NOT FOUND")
        missed += verdict in ("NOT FOUND", STALE)
        columns = (outcome.where, outcome.name, verdict, f"{outcome.seconds} s")
        print(" | ".join(columns), flush=True)
        if outcome.detail and (wanted or verdict == STALE):
            print(outcome.detail)
    seconds = round(time.monotonic() - start)
    print(f"{len(outcomes)} mutations, {missed} not found, {seconds} s")
    if args.json:
        table = record(outcomes, args.seed, seconds)
        Path(args.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
