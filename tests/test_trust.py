"""The fast part of tests/torture.py: every attack on the promises, a few times each, with fresh seeds. The whole: python tests/torture.py."""
import json
import subprocess
import sys

import pytest

from conftest import ROOT

# section -> more words, and the trials that a call of it makes
SECTIONS = {"crash": (["--kills=12"], 23), "elastic": ([], 5), "numbers": ([], 13), "input": (["--examples=24"], 100), "concurrency": ([], 7), "memory": ([], 3)}


@pytest.mark.skipif(sys.platform != "linux", reason="torture.py needs Linux")
@pytest.mark.parametrize("section", SECTIONS)
def test_nothing_is_lost(section, tmp_path):
    """In a process of its own, because it forks, which one that has computed should not."""
    words, least = SECTIONS[section]
    done = subprocess.run([sys.executable, ROOT / "tests" / "torture.py", f"--only={section}", "--fast=true", *words, f"--out_dir={tmp_path}"], capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "trust.json").read_text())[section]["rows"]
    tried = sum(row["tried"] for row in rows)
    assert tried >= least and tried == sum(row["survived"] for row in rows) and all(row["tried"] or "not tried" in row["note"] for row in rows), rows
    assert f"| {rows[0]['line']} | {rows[0]['tried']} | {rows[0]['tried']} | 0 |" in (tmp_path / "trust.md").read_text()
