"""Attack the guarantees of the project: kill processes, limit files, damage them, stop ranks,
inject NaNs, give hostile input, start two writers, take memory away.

    python tests/stress/run.py                       200 kills, and an hour of training under watch
    python tests/stress/run.py --only=crash --kills=50 --seed=7
    python tests/stress/run.py --only=memory --hours=0.05

Everything is a real process with real signals, in a temporary folder; see harness.py. A section is
the file of its name in this folder, whose trials() yields a description and what went wrong, if
anything, for each trial.

trust.md and trust.json in experiments/results count, for each description, how many trials passed
and failed. A section that is left out keeps its rows, with the command, commit, date and seed that
made them. The exit status is 1 when a trial failed. Linux only.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip
import importlib
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace

import torch

from model import GPT, GPTConfig
from nanolong import cli, validate
from nanolong.errors import UserError
from nanolong.provenance import provenance

SECTIONS = ("crash", "elastic", "sharded", "numerics", "hostile_input")
SECTIONS += ("concurrency", "memory")


@dataclass
class StressConfig:
    only: tuple[str, ...] = ()  # some of the sections; default: all
    kills: int = 200  # crash: by kill -9, over all kinds of processes
    shard_kills: int = 40  # sharded: by kill -9, of one rank of four
    examples: int = 300  # hostile_input: of each kind
    hours: float = 1.0  # memory: of training under watch
    fast: bool = False  # few of the trials that take more than a second, for the tests
    seed: int = -1  # of all random choices; default: a new one
    redraw: bool = False  # rewrite trust.md from trust.json, without any trial
    out_dir: str = "experiments/results"  # where trust.md and trust.json are

    def __post_init__(self):
        for section in self.only:
            validate.require(
                section in SECTIONS,
                f"there is no section {section!r}: --only takes {', '.join(SECTIONS)}",
            )
        validate.require(
            min(self.kills, self.shard_kills, self.examples) >= 1 and 0 < self.hours < 1000,
            "kills, shard_kills, examples and hours must be above 0: raise the one that is not",
        )


@dataclass
class Row:
    """How the trials of one description ended."""

    trial: str
    tried: int = 0
    passed: int = 0
    failed: int = 0
    note: str = ""


# -----------------------------------------------------------------------------
# Running.


def run_section(section, cfg):
    """Run the trials of a section: a list of Row. Failures are printed as they occur."""
    from harness import Harness  # it exists on Linux only

    rows = {}
    with tempfile.TemporaryDirectory(prefix="stress-", ignore_cleanup_errors=True) as folder:
        trials = importlib.import_module(section).trials
        for description, failure, *notes in trials(Harness(cfg, folder)):
            row = rows.setdefault(description, Row(description))
            if notes:
                row.note = notes[0]
            row.tried += 1
            if failure:
                row.failed += 1
                where = f"{section}, {description} (seed {cfg.seed})"
                print(f"failed: {where}: {failure}", flush=True)
            else:
                row.passed += 1
    return list(rows.values())


def prepare_process():
    """What every forked child needs: one thread, and modules that torch imports late."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with torch.device("meta"):
        GPT(GPTConfig(n_layer=1))


def command_line():
    """The command that repeats these trials with a new seed."""
    words = [w for w in sys.argv[1:] if not w.startswith(("--seed", "--out_dir"))]
    return " ".join(["python tests/stress/run.py", *words])


def print_rows(section, rows):
    for row in rows:
        line = f"{section}: {row.trial}: {row.tried} tried, {row.passed} passed, "
        line += f"{row.failed} failed"
        if row.note:
            line += f"; {row.note}"
        print(line, flush=True)


# -----------------------------------------------------------------------------
# Reporting.


def read_results(folder):
    """Section -> what trust.json holds about it."""
    file = folder / "trust.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(folder, results):
    """Write trust.json and trust.md: our sections, then those of the kernels."""
    ordered = {section: results[section] for section in SECTIONS if section in results}
    ordered.update({name: result for name, result in results.items() if name not in SECTIONS})
    (folder / "trust.json").write_text(json.dumps(ordered, indent=1) + "\n")
    (folder / "trust.md").write_text(format_report(ordered))


def format_report(results):
    trials = [result for result in results.values() if "columns" not in result]
    rows = [row for result in trials for row in result["rows"]]
    tried, passed, failed = (sum(row[key] for row in rows) for key in ("tried", "passed", "failed"))
    lines = [
        "# Stress tests",
        "",
        "What was done to the program, how often, and how often a guarantee failed. Repeat it with "
        "`python tests/stress/run.py`; a section that is left out keeps its rows. Bit-exact: the "
        "same weights, optimizer state and log as an undisturbed run.",
        "",
        f"In all: {tried:,} tried, {passed:,} passed, {failed:,} failed.",
        "",
    ]
    for section, result in results.items():
        lines += [
            f"## {section}",
            "",
            f"`{result['command']}`, seed {result['seed']}; {result['provenance']}; "
            f"{result['seconds']} s.",
            "",
            *format_table(result),
            "",
        ]
    return "\n".join(lines)


def format_table(result):
    """The lines of a section: of trials, or a table that says what its columns are."""
    lines = []
    columns = result.get("columns", ["trial", "tried", "passed", "failed"])
    if "text" in result:
        lines += [result["text"], ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in result["rows"]:
        cells = row
        if "columns" not in result:
            trial = f"{row['trial']} ({row['note']})" if row["note"] else row["trial"]
            cells = [trial, *(f"{row[key]:,}" for key in ("tried", "passed", "failed"))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main():
    cfg = cli.parse(cfg=StressConfig, about=__doc__).cfg
    folder = Path(cfg.out_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results(folder)
    if cfg.redraw:
        write_results(folder, results)
        return 0
    if sys.platform != "linux":
        raise UserError(
            "the stress tests use namespaces, /proc and memory limits of Linux: run them there"
        )
    if cfg.seed < 0:
        cfg = replace(cfg, seed=random.randrange(1 << 32))
    print(f"seed {cfg.seed}", flush=True)
    prepare_process()

    any_failed = False
    for section in cfg.only or SECTIONS:
        start = time.monotonic()
        rows = run_section(section, cfg)
        results[section] = {
            "command": command_line(),
            "seed": cfg.seed,
            "provenance": provenance(torch.device("cpu")),
            "seconds": round(time.monotonic() - start),
            "rows": [asdict(row) for row in rows],
        }
        write_results(folder, results)
        print_rows(section, rows)
        any_failed = any_failed or any(row.failed for row in rows)
    print(f"wrote {folder / 'trust.md'}")
    return int(any_failed)


if __name__ == "__main__":
    cli.run_main(main)
