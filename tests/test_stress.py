"""The stress tests in short: a few trials of each kind. All of them: python tests/stress/run.py."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

STRESS = ROOT / "tests" / "stress"
# section -> flags, and the number of trials that it has then at least
SECTIONS = {
    "concurrency": ([], 6),
    "numerics": ([], 13),
    "crash": (["--kills=12"], 23),
    "elastic": ([], 5),
    "sharded": (["--shard_kills=1"], 2),
    "hostile_input": (["--examples=24"], 100),
    "memory": ([], 2),
}


def run_stress(*flags):
    """In a process of its own: it forks, which one that has computed should not."""
    command = [sys.executable, STRESS / "run.py", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(sys.platform != "linux", reason="the stress tests need Linux")
@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_guarantees_hold_under_stress(section, tmp_path):
    flags, least = SECTIONS[section]
    done = run_stress(f"--only={section}", "--fast=true", f"--out_dir={tmp_path}", *flags)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "trust.json").read_text())[section]["rows"]
    n_tried = sum(row["tried"] for row in rows)
    assert n_tried >= least
    assert n_tried == sum(row["passed"] for row in rows)
    for row in rows:
        assert row["tried"], row
    first = rows[0]
    line = f"| {first['trial']} | {first['tried']} | {first['tried']} | 0 |"
    assert line in (tmp_path / "trust.md").read_text()


def test_the_report_is_that_of_its_json(tmp_path):
    results = ROOT / "experiments/results"
    (tmp_path / "trust.json").write_bytes((results / "trust.json").read_bytes())
    done = run_stress("--redraw=true", f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trust.md").read_text() == (results / "trust.md").read_text()


def test_unknown_sections_and_bad_numbers_are_rejected():
    for flag, words in (("--only=trust", "'trust'"), ("--kills=0", "above 0")):
        done = run_stress(flag)
        assert done.returncode == 2
        assert words in done.stderr and len(done.stderr.splitlines()) == 1
