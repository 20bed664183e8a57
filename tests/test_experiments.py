"""Rules for all experiments: what they write by default, and the list of them."""

import ast
import importlib
import re
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


def test_figures_go_to_out(call, tmp_path):
    words = ["--length=32", "--n_head=4", "--head_dim=8"]
    done = call("experiments/figures.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert written == ["out/figures/positions.png", "out/figures/yarn.png"]


def test_the_list_has_every_script_and_names_the_other_files_as_their_parts():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    table, parts = text.split("The other files are parts")
    scripts = re.findall(r"^\| `([\w/]+\.py)` \| \w", table, re.M)
    files = [file.relative_to(FOLDER).as_posix() for file in FILES]
    expected = [name for name, file in zip(files, FILES, strict=True) if is_script(file)]
    assert sorted(scripts) == sorted(expected)
    assert sorted(re.findall(r"`([\w/]+\.py)`", parts)) == sorted(set(files) - set(expected))
