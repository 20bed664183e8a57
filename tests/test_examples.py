"""The notebooks in examples/ run from top to bottom, and hold what they printed and plotted."""

import json
import re
import sys
import tempfile

import matplotlib
import matplotlib.pyplot as plt
import pytest
from conftest import ROOT

matplotlib.use("Agg")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)


def code_cells(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@each_notebook
def test_notebooks_hold_their_outputs(notebook):
    """Of one run from top to bottom, with figures, and nothing of the machine that ran them."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        figures = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(figures) == "".join(cell["source"]).count("plt.show()")
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            text = str([output.get("text"), output.get("data", {}).get("text/plain")])
            assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)\b", text), text


@each_notebook
def test_notebooks_run(notebook, text_data, tmp_path, monkeypatch, entries_do_not_stay):
    """With two steps of training in the place of hundreds, and a smaller text."""
    code = "\n\n".join("".join(cell["source"]) for cell in code_cells(notebook))
    code, n_runs = re.subn(r"max_iters=\d+", "max_iters=2", code)
    assert n_runs == 1
    code = code.replace("max_tokens=16384", "max_tokens=2048")
    code = code.replace('"python"', repr(str(text_data)))
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf().get_axes()))
    with matplotlib.rc_context():
        exec(code, {})
    plt.close("all")
    assert len(shown) == code.count("plt.show()") and all(shown)
