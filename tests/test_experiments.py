"""Rules for all experiments: what they write by default, and the list of them."""

import ast
import importlib
import re
import shutil
from dataclasses import fields, is_dataclass

import pytest
import torch
from conftest import ROOT

from experiments import bench

FOLDER = ROOT / "experiments"
FILES = sorted(FOLDER.rglob("*.py"))


def name_of(file):
    return file.relative_to(ROOT).as_posix()


def is_script(file):
    """Whether its docstring says how to run it."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return f"python {name_of(file)}" in docstring


def docstrings(tree):
    """The texts of a module that no code reads."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, holders)]
    return {id(node.body[0].value) for node in nodes if isinstance(node.body[0], ast.Expr)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_experiment_writes_into_results_by_default(file):
    """Neither by the default of a setting nor by a path in its code. One reads reports there."""
    module = importlib.import_module(name_of(file).removesuffix(".py").replace("/", "."))
    for cls in vars(module).values():
        if is_dataclass(cls) and cls.__module__ == module.__name__:
            for field in fields(cls):
                if field.name in ("out", "out_dir", "yarn_out", "json", "plot", "runs", "work"):
                    assert field.default == "" or field.default.startswith("out/"), field.name
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unread = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in unread:
            names_results = re.match(r"(\./)?results(/|$)", str(node.value))
            assert not names_results or file.stem == "claims", node.value


def test_the_benchmark_writes_to_a_folder_of_its_device_under_out():
    assert bench.device_folder(torch.device("cpu")) == "out/bench/cpu"


# script -> the reports in results/ that it has written
REPORTS = {
    "leaderboard": ["leaderboard"],
    "reproduce": ["reproduce"],
    "extensibility": ["extensibility"],
    "recipes": ["recipes"],
    "layers": ["layers"],
    "papers/claims": ["claims"],
    "papers/linear_attention": ["linear_attention"],
    "papers/masked_lm": ["masked_lm"],
    "papers/nope_positions": ["nope_positions"],
    "papers/nope_tables": ["nope/nope"],
    "papers/recurrence": ["recurrence"],
    "papers/tasks": [f"{name}/tasks" for name in ("bag_and_span", "length_generalisation")],
}


@pytest.mark.parametrize("script", REPORTS)
def test_redraw_writes_the_published_report(script, call, tmp_path):
    words = [f"experiments/{script}.py", "--redraw=true", f"--out_dir={tmp_path}"]
    done = call(*words)
    assert done.returncode == 2 and ".json, which does not exist" in done.stderr
    for report in REPORTS[script]:
        published = ROOT / "results" / f"{report}.md"
        shutil.copy(published.with_suffix(".json"), tmp_path)
        assert call(*words).returncode == 0
        assert (tmp_path / published.name).read_text() == published.read_text()
    for figure in re.findall(r"\]\((\w+\.png)\)", published.read_text()):
        assert (tmp_path / figure).read_bytes()[:4] == b"\x89PNG"


def test_the_list_has_every_script_and_names_the_other_files_as_their_parts():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    table, parts = text.split("The other files are parts")
    scripts = re.findall(r"^\| `([\w/]+\.py)` \| \w", table, re.M)
    files = [file.relative_to(FOLDER).as_posix() for file in FILES]
    expected = [name for name, file in zip(files, FILES, strict=True) if is_script(file)]
    assert sorted(scripts) == sorted(expected)
    assert sorted(re.findall(r"`([\w/]+\.py)`", parts)) == sorted(set(files) - set(expected))
