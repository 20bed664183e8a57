"""The pages of experiments/results: the commits and the commands that they name exist."""

import json
import re
import shlex
import subprocess

import pytest
from conftest import ROOT

from experiments.run import available

RESULTS = ROOT / "experiments" / "results"
PAGES = sorted([*RESULTS.rglob("*.md"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# of nanoGPT, GRAPE, picotron and nanochat
THEIRS = {"3adf61e", "f5b539f", "59714b1", "92d63d4"}


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def named_commits():
    """Commits by the file that names them: seven hexadecimal digits, of which one is a letter."""
    pattern = r"(?<![\w.-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}(?![\w.-]\w)(?!\w)"
    for page in PAGES:
        for commit in set(re.findall(pattern, page.read_text(encoding="utf-8"))) - THEIRS:
            yield page.name, commit
    for file in RESULTS.rglob("*.json*"):
        for commit in set(re.findall(r"commit\W+([0-9a-f]{7,})\b", file.read_text())):
            yield file.name, commit


def test_the_commits_that_results_name_are_in_the_history():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no whole clone, so its history cannot be searched")
    history = git("log", "--format=%H").stdout.split()
    found = list(named_commits())
    assert len(found) > 50
    absent = [
        (file, commit)
        for file, commit in found
        if not any(known.startswith(commit) for known in history)
    ]
    assert not absent


def test_the_commands_of_results_parse(call):
    helps = {}
    n_commands = 0
    for page in RESULTS.rglob("*.md"):
        commands = re.findall(r"`python (experiments/[^`]*)`", page.read_text(encoding="utf-8"))
        for command in commands:
            script, *words = shlex.split(command)
            if script not in helps:
                helps[script] = call(script, "--help").stdout
            flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
            assert all(f"  --{flag}=" in helps[script] for flag in flags), (page.name, command)
            if script == "experiments/run.py":
                assert words[0] in available() or words[0].endswith(".py"), (page.name, command)
            n_commands += 1
    assert n_commands > 15


def test_cells_of_the_public_checkpoint_name_their_commit():
    lines = (RESULTS / "public.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line)["commit"].isalnum() for line in lines)
