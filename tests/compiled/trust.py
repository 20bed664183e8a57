"""Write what was executed, and what was done to the kernels, into results/trust.md.

    NANOLONG_EXECUTED=executed.json python -m pytest tests/compiled/test_kernels_executed.py --all
    python tests/compiled/mutations.py --json=mutations.json
    python tests/compiled/trust.py --executed=executed.json --mutations=mutations.json

Also into results/trust.json, from which tests/stress/run.py --redraw=true writes trust.md again.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "stress"), str(ROOT)]

from run import read_results, write_results  # noqa: E402


def code(text):
    """Code in a cell of a table."""
    text = " ".join(text.replace("\n", " ").split()).replace("|", "\\|")
    return f"`{text}`" if text else "nothing"


def executed_section(executed):
    """The launches by architecture and kernel, and the largest errors."""
    rows = []
    for row in executed["kernels"]:
        cells = [row["architecture"], row["kernel"], f"{row['launches']:,}", "", ""]
        if "what" in row:
            cells[3] = f"{row['error_over_bound']:.2f}"
            cells[4] = row["what"]
        rows.append(cells)
    launches = sum(row["launches"] for row in executed["kernels"])
    checks = sum(executed["checks"].values())
    return {
        "command": executed["command"],
        "seed": "a new one for each check",
        "provenance": executed["provenance"],
        "seconds": executed["seconds"],
        "text": f"{checks:,} checks, {executed['failed']} failed; {launches:,} launches of kernels "
        "as compiled, each run a second time with its programs in another order for the same "
        "bits. No access out of bounds, no race, no overlap of programs and no uninitialised read "
        "in those that passed. The error is relative to its bound in the comparison with float64; "
        "the last column is where it is largest.",
        "columns": ["architecture", "kernel", "launches", "largest error / bound", "where"],
        "rows": rows,
    }


def mutations_section(table):
    """What was changed in the kernels, and which check found it."""
    rows = []
    for row in table["mutations"]:
        found = row["found_by"] or "not found"
        if row["equivalent"]:
            found = f"nothing changes: {row['equivalent']}"
        change = f"{code(row['old'])} becomes {code(row['new'])}"
        rows.append([row["name"], row["where"], change, found, row["check"]])
    n_found = sum(bool(row["found_by"]) for row in table["mutations"])
    n_equivalent = sum(bool(row["equivalent"]) for row in table["mutations"])
    return {
        "command": table["command"],
        "seed": table["seed"],
        "provenance": table["provenance"],
        "seconds": table["seconds"],
        "text": f"{len(rows)} faults put into the kernels one at a time, in their source or in the "
        f"PTX that the compiler made of it: {n_found} found, {n_equivalent} that change nothing, "
        f"with the reason, {len(rows) - n_found - n_equivalent} not found with the random inputs "
        "of this seed. In PTX the change is a regular expression. The last column is the check "
        "that ran, of tests/compiled/checks.py.",
        "columns": ["fault", "where", "change", "found by", "check"],
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executed", help="what test_kernels_executed.py wrote")
    parser.add_argument("--mutations", help="what mutations.py wrote")
    parser.add_argument("--out_dir", default=str(ROOT / "results"))
    args = parser.parse_args()
    folder = Path(args.out_dir)
    results = read_results(folder)
    if args.executed:
        executed = json.loads(Path(args.executed).read_text(encoding="utf-8"))
        results["compiled kernels"] = executed_section(executed)
    if args.mutations:
        table = json.loads(Path(args.mutations).read_text(encoding="utf-8"))
        results["faults in kernels"] = mutations_section(table)
    write_results(folder, results)


if __name__ == "__main__":
    main()
