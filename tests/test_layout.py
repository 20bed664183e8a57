"""Rules about the code base itself: who imports whom, sizes, words, and what is in the checkout."""

import ast
import functools
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

from model import POSITIONS

PACKAGES = ("nanolong", "kernels", "data", "experiments")
# as in .gitignore
NOT_OURS = ".git .venv .venv-cuda out exported wandb uv.lock __pycache__ .pytest_cache .hypothesis"
NOT_OURS = {*NOT_OURS.split(), ".ruff_cache"}

MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60
MAX_TEST_LINES = 100  # of functions in tests/, and of those in kernels/ that are no kernels


@functools.cache
def files_under(folder):
    """All files of the project in a folder, sorted, without prepared datasets."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            files.append(path)
        elif path.name not in NOT_OURS and folder != ROOT / "data":
            files += files_under(path)
    return files


def project_files(*suffixes):
    """The files of the project whose names end in one of these; "": those without a suffix."""
    return [file for file in files_under(ROOT) if file.suffix in suffixes]


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
    for file in project_files(".py")
    if file.parent == ROOT or path_of(file).split("/")[0] in PACKAGES
}


def import_statements(node, inside_functions):
    """The import statements in a piece of code, of its functions, too, or not."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    for child in ast.iter_child_nodes(node):
        if inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from import_statements(child, inside_functions)


def imports(file, inside_functions=True, node=None):
    """The names of the modules that a file, or one node of its syntax tree, imports.

    `from nanolong import cli` imports nanolong.cli, `from data import Dataset` imports data.
    """
    name = module_name(file)
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for statement in import_statements(node or parse(file), inside_functions):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        base = statement.module or ""
        if statement.level:  # from . import reference; from .reference import rope
            base = f"{package}.{base}".strip(".")
        for alias in statement.names:
            submodule = f"{base}.{alias.name}"
            found.add(submodule if submodule in MODULES else base)
    return found


def own_imports(file, inside_functions=True, node=None):
    """imports() of this project's modules."""
    return imports(file, inside_functions, node) & MODULES.keys()


def test_model_py_can_be_lifted_out():
    """It imports torch, kernels, rope_scaling and errors; three methods import more."""
    file = ROOT / "model.py"
    allowed = {"kernels", "rope_scaling", "nanolong.errors"}
    assert own_imports(file, inside_functions=False) <= allowed
    others = imports(file, inside_functions=False) - allowed
    assert {name.split(".")[0] for name in others} - {"torch"} <= set(sys.stdlib_module_names)

    functions = [node for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef)]
    importing = {f.name for f in functions if own_imports(file, node=f)}
    assert importing <= {"load", "save", "generate"}
    gpt = next(node for node in parse(file).body if getattr(node, "name", "") == "GPT")
    assert importing <= {node.name for node in gpt.body if isinstance(node, ast.FunctionDef)}


def private_names(file):
    """The names with one leading underscore that a file gives to things, and those it uses."""
    given, used = set(), set()
    for node in ast.walk(parse(file)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            given.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.add(node.id)
        elif isinstance(node, ast.Attribute):
            (given if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return [{name for name in names if re.match("_[^_]", name)} for names in (given, used)]


def test_private_names_are_used_in_their_own_file_only():
    product = [file for file in MODULES.values() if not path_of(file).startswith("experiments/")]
    names = {file: private_names(file) for file in product}
    for file, (given, used) in names.items():
        for other, (given_there, _) in names.items():
            foreign = (used - given) & given_there
            assert not foreign, f"{path_of(file)} uses names of {path_of(other)}"


@pytest.mark.parametrize(
    "importing, allowed",
    [
        ("kernels/**/*.py", "kernels"),
        ("nanolong/**/*.py", "nanolong data kernels rope_scaling"),
        ("data/**/*.py", "data nanolong"),
        ("rope_scaling.py", "kernels nanolong"),
        ("model.py", "kernels nanolong rope_scaling"),
        ("train.py", "data kernels model nanolong rope_scaling"),
        ("evaluate.py", "data kernels model nanolong rope_scaling"),
        ("sample.py", "data model nanolong"),
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


def test_every_script_first_checks_the_version_of_python():
    """Before it, only modules are imported that an old Python has."""
    old_modules = set(sys.stdlib_module_names) - {"tomllib"}
    for file in MODULES.values():
        text = file.read_text(encoding="utf-8")
        if "run_main(" not in text or (ROOT / "nanolong") in file.parents:
            continue
        before, check, _ = text.partition("\nfrom nanolong import settings")
        imported = {name.split(".")[0] for name in imports(file, node=ast.parse(before))}
        assert check and imported <= old_modules, path_of(file)


def test_the_transformer_names_no_scheme():
    for node in parse(ROOT / "model.py").body:
        if getattr(node, "name", "") in ("Attention", "Block"):
            constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            assert not [value for value in constants if value in POSITIONS], node.name
            assert ".pos ==" not in ast.unparse(node), node.name


def test_nothing_unpickles_or_evaluates_text():
    for file in MODULES.values():
        assert not imports(file) & {"pickle", "marshal", "shelve", "dill"}, file
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "torch.save"), file


# -----------------------------------------------------------------------------
# Sizes.


def lines_left_alone(tree, lines):
    """The numbers of the lines that `# fmt: skip` leaves to their author."""
    numbers = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        last = node.end_lineno
        if hasattr(node, "body"):  # of a function its signature
            last = node.body[0].lineno - 1
        if any("# fmt: skip" in line for line in lines[node.lineno - 1 : last]):
            numbers |= set(range(node.lineno, last + 1))
    return numbers


def test_lines_have_at_most_100_columns():
    violations = []
    for file in project_files(".py", ".toml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        skipped = lines_left_alone(parse(file), lines) if file.suffix == ".py" else set()
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_COLUMNS and "http" not in line and number not in skipped:
                violations.append(f"{path_of(file)}:{number}: {len(line)} columns")
    assert not violations


def test_functions_are_short():
    for file in project_files(".py"):
        folder = path_of(file).split("/")[0]
        limit = MAX_TEST_LINES if folder in ("tests", "kernels") else MAX_FUNCTION_LINES
        for node in ast.walk(parse(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
                is_short = node.end_lineno - node.lineno < limit
                assert is_kernel or is_short, f"{path_of(file)}: {node.name}"


def test_no_large_file_is_in_the_checkout():
    for file in files_under(ROOT):
        assert file.stat().st_size < 1_000_000 or file.suffix == ".png", path_of(file)


# -----------------------------------------------------------------------------
# Words.

ANY_WORD = None
ALLOWED_WORDS = {
    "tests/private_words.txt": ANY_WORD,
    "tests/test_layout.py": ANY_WORD,  # tests whether they are found
    "CHANGELOG.md": ANY_WORD,  # says what was renamed
    # commands of the commits that measured
    "experiments/results/README.md": {"tests/torture"},
    "experiments/results/trust.md": {"tests/torture"},
}


@functools.cache
def private_words():
    """One regular expression of all lines of tests/private_words.txt."""
    words, others = [], []
    for line in (ROOT / "tests" / "private_words.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            # A phrase may run over the end of a line, also of a comment.
            phrase = line.replace(" ", r"\s+(?:#\s*)?")
            if line[-1].isalnum() or line[-1] in ")?":
                phrase += r"(?![\w-])"
            (words if line[0].isalnum() else others).append(phrase)
    return re.compile(rf"(?<![\w/-])(?=\w)(?:{'|'.join(words)})|{'|'.join(others)}")


def test_private_words_are_found():
    """Whole words only, also over the end of a line."""
    text = "a trained\n    # length, restretch, stretched, by hand; by hand-made, nanolong/stretch"
    found = [match[0] for match in private_words().finditer(text)]
    assert found == ["trained\n    # length", "stretched", "by hand"]


def test_no_private_words():
    violations = []
    for file in project_files(".py", ".md", ".toml", ".cff", ".yml", ".txt", ""):
        allowed = ALLOWED_WORDS.get(path_of(file), set())
        text = "" if allowed is ANY_WORD else file.read_text(encoding="utf-8")
        for match in private_words().finditer(text):
            if match[0] not in allowed:
                number = text.count("\n", 0, match.start()) + 1
                violations.append(f"{path_of(file)}:{number}: {match[0]}")
    assert not violations


# -----------------------------------------------------------------------------
# Dependencies.


def requirements(name):
    """The lines of a requirements file, and of the files that it includes."""
    lines = set((ROOT / name).read_text().replace('"', "'").splitlines())
    included = {line for line in lines if line.startswith("-r ")}
    return (lines - included).union(*(requirements(line[3:]) for line in included))


def test_pip_and_uv_install_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = set(project["project"]["dependencies"])
    hub = set(project["dependency-groups"]["hub"])
    include, *dev = project["dependency-groups"]["dev"]
    assert include == {"include-group": "hub"}
    assert needed == requirements("requirements.txt")
    assert needed | hub == requirements("requirements-hf.txt") | needed
    assert needed | hub | set(dev) == requirements("requirements-dev.txt")
