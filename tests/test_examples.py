"""The notebooks in examples/ run from top to bottom."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_of(notebook):
    """The code cells of a notebook as one program that plots to no screen."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "import matplotlib\n\nmatplotlib.use('Agg')\n\n" + "\n\n".join(sources)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_hold_no_outputs(notebook):
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(notebook):
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code_of(notebook)],
        cwd=ROOT / "examples",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
