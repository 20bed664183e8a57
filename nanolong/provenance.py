"""What must stand next to a measured number, so that it can be measured again."""

import datetime
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def provenance(device, commits=()):
    """Commit, hardware, torch version and date, as a line of text.

    commits: those of which measurements were kept, where they are not of this call alone.
    """
    commits = list(dict.fromkeys(commits)) or [current_commit()]
    commit = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        n_threads = torch.get_num_threads()
        hardware = f"{n_threads} thread{'s' if n_threads > 1 else ''} of {_cpu_name()}"
    version = torch.__version__.partition("+")[0]
    return f"{commit}, {hardware}, torch {version}, {datetime.date.today()}"


def current_commit():
    """The commit of the checkout, and whether its code has changed since."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    if _git("status", "--porcelain", "--", "*.py"):
        commit += " with changes"
    return commit


def _git(*words):
    """The output of a git command in the project's folder, or "" where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
