"""The paths of these tests, and what they executed as JSON, at the end."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_sessionfinish(session):
    file = os.environ.get("NANOLONG_EXECUTED")
    execution = sys.modules.get("execution")
    if file and execution:
        summary = {**execution.RECORD.summary(), "failed": session.testsfailed}
        Path(file).write_text(json.dumps(summary, indent=1) + "\n")
