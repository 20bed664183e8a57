"""The path of these tests, and what they executed as JSON, at the end."""

import json
import os
import sys
from pathlib import Path

import torch

from nanolong.provenance import provenance

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

COMMAND = "NANOLONG_EXECUTED=FILE python -m pytest tests/compiled/test_kernels_executed.py"


def pytest_sessionfinish(session):
    file = os.environ.get("NANOLONG_EXECUTED")
    execution = sys.modules.get("execution")
    if file and execution:
        summary = {
            "command": COMMAND + " --all" * session.config.getoption("--all"),
            "provenance": provenance(torch.device("cpu")),
            "failed": session.testsfailed,
            **execution.RECORD.summary(),
        }
        Path(file).write_text(json.dumps(summary, indent=1) + "\n")
