"""Rules about the code base itself: who imports whom, and what is installed."""

import ast
import functools
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

PACKAGES = ("nanolong", "kernels", "data", "experiments")


def path_of(file):
    return file.relative_to(ROOT).as_posix()


@functools.cache
def parse(file):
    return ast.parse(file.read_text(encoding="utf-8"))


# -----------------------------------------------------------------------------
# Imports.


def module_name(file):
    """The dotted name under which a file is imported."""
    return path_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {
    module_name(file): file
    for pattern in ("*.py", *(f"{package}/**/*.py" for package in PACKAGES))
    for file in sorted(ROOT.glob(pattern))
}


def imports(file):
    """The names of the modules that a file imports, also in functions.

    `from nanolong import cli` imports nanolong.cli, `from data import Dataset` imports data.
    """
    name = module_name(file)
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            # from . import reference; from .reference import rope
            parts = [package] * node.level + [node.module]
            base = ".".join(filter(None, parts))
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            found |= submodules & MODULES.keys() or {base}
    return found


def own_imports(file):
    """imports() of this project's modules."""
    return imports(file) & MODULES.keys()


def test_model_py_imports_only_torch_and_what_it_is_copied_with():
    """tests/test_model.py copies these files, and computes with the copy."""
    packages = {name.partition(".")[0] for name in imports(ROOT / "model.py")}
    allowed = {"kernels", "nanolong", "rope_scaling", "torch"}
    assert packages - allowed <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "importing, allowed",
    [
        ("kernels/**/*.py", "kernels nanolong"),  # check.py decodes a token
        ("nanolong/**/*.py", "nanolong data kernels rope_scaling"),
        ("data/**/*.py", "data nanolong"),
        ("rope_scaling.py", "kernels nanolong"),
        ("model.py", "kernels nanolong rope_scaling"),
        ("train.py", "data kernels model nanolong rope_scaling"),
        ("evaluate.py", "data kernels model nanolong rope_scaling"),
        ("sample.py", "data kernels model nanolong"),
        ("hf.py", "data model nanolong"),
        ("extend.py", "data evaluate kernels model nanolong rope_scaling train"),
    ],
)
def test_imports_go_one_way(importing, allowed):
    """The plumbing imports no model, and nothing imports an experiment."""
    for file in ROOT.glob(importing):
        packages = {name.split(".")[0] for name in own_imports(file)}
        assert packages <= set(allowed.split()), file


def test_there_is_no_import_cycle():
    """Not by an import inside a function, either."""
    graph = {name: own_imports(file) for name, file in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_training_imports_nothing_that_only_others_need():
    """Not even in a function: neither texts, tasks, evaluation, Hugging Face nor experiments."""
    reached = set()
    found = {"train"}
    while found - reached:
        reached |= found
        found = set().union(*(own_imports(MODULES[name]) for name in reached))
    others = ("data.texts", "data.tasks", "data.prepare", "nanolong.hub", "nanolong.evaluation")
    others += ("experiments",)
    assert not [name for name in reached if name.startswith(others)]


PRIVATE_FILE = "kernels/torch_private.py"


def private_names(file):
    """The names with a leading underscore that a file takes from elsewhere: from no class of its
    own, and not what Python's named tuples promise.
    """
    names = {name for name in imports(file) if re.search(r"\._[^_]", name)}
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and node.attr != "_replace":
                names.add(f"{owner}.{node.attr}")
        if isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            names.add(node.value)
    return names


def test_private_names_of_torch_stand_in_one_file():
    product = [file for file in MODULES.values() if "experiments" not in path_of(file)]
    found = {path_of(file): names for file in product if (names := private_names(file))}
    assert {"torch._dynamo", "torch._foreach_mul_"} < found.pop(PRIVATE_FILE)
    assert found == {"model.py": {"super()._apply"}}


def test_nothing_unpickles_or_evaluates_text():
    for file in MODULES.values():
        assert not imports(file) & {"pickle", "marshal", "shelve", "dill"}, file
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.save"), file
                # nanoGPT's ckpt.pt: tensors, numbers and texts alone
                settings = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert called != "torch.load" or settings["weights_only"] == "True", file


# -----------------------------------------------------------------------------
# Dependencies.


def test_pip_and_uv_install_the_same():
    """The lines of the requirements files that include no other are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"]
    hub = project["dependency-groups"]["hub"]
    include, *dev = project["dependency-groups"]["dev"]
    assert include == {"include-group": "hub"}
    for name, expected in (("", needed), ("-hf", hub), ("-dev", dev)):
        text = (ROOT / f"requirements{name}.txt").read_text().replace('"', "'")
        assert {line for line in text.splitlines() if line[:3] != "-r "} == set(expected), name
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in tested if not line.startswith("#")]
    assert project["tool"]["uv"]["constraint-dependencies"] == pins


# In code and pages: a pronoun for a noun, and fragments that have to be read twice.
DIALECT = r"\bthat of\b|\bthose of (?!one process)|; of |undecided against|\bless [\w-]+'s\b"


def test_a_noun_stands_where_a_pronoun_or_a_fragment_would():
    """Each such line costs a second reading. The losses of processes are compared with "those of
    one process", because "the losses" would stand twice in the sentence.
    """
    files = [file for file in MODULES.values() if file.name != "__init__.py"]
    assert len(files) > 60
    results = (ROOT / "experiments" / "results").glob("*.md")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *results]
    found = []
    for file in [*files, *pages]:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(rf"{DIALECT}|# of ", line):
                found.append(f"{path_of(file)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
