"""The notebooks in examples/ run from top to bottom, and hold what they printed and plotted."""

import json
import re
import shutil
import subprocess
import sys
import tempfile

import matplotlib
import matplotlib.pyplot as plt
import pytest
from conftest import ROOT, run_python

matplotlib.use("Agg")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)


def code_cells(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@each_notebook
def test_notebooks_hold_their_outputs(notebook):
    """Of one run from top to bottom, with figures, and nothing of the machine that ran them."""
    assert notebook.stat().st_size < 1_000_000
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    n_figures = 0
    for cell in cells:
        figures = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(figures) == "".join(cell["source"]).count("plt.show()")
        n_figures += len(figures)
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            text = "".join(output.get("text", [])) + json.dumps(
                output.get("data", {}).get("text/plain")
            )
            assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)\b", text), text
    assert n_figures


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


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_a_notebook_that_is_alone_fetches_the_repository(tmp_path):
    """From the address in its first cell, which is the same in all notebooks."""
    first_cells = {"".join(code_cells(notebook)[0]["source"]) for notebook in NOTEBOOKS}
    assert len(first_cells) == 1
    code = first_cells.pop() + "\nprint(root)"
    alone = tmp_path / "elsewhere" / "downloads"
    alone.mkdir(parents=True)
    done = run_python(code.replace('REPOSITORY = "', 'REPOSITORY = ""  # "'), cwd=alone)
    assert "put the address of its repository into REPOSITORY" in done.stderr

    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(ROOT / "model.py", source)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(source)]
    for words in (["init", "-q"], ["add", "model.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    code = re.sub('REPOSITORY = ".*?"', f"REPOSITORY = {source.as_uri()!r}", code)
    for _ in range(2):  # the second time it is there
        done = run_python(code, cwd=alone)
        assert done.stdout.strip() == str(alone / "nanoLong"), done.stderr
        assert (alone / "nanoLong" / "model.py").is_file()
