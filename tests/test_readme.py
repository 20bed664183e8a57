"""What README.md, CONTRIBUTING.md and docs/*.md say is true: commands and code run, files exist.

Commands run as they are typed, those of a page in their order, in a folder of their own. SHORT is
added to what is typed, and wins. Files, runs and datasets that a command reads, and that no command
before it has made, are made here. NOT_RUN says which commands do not run, and why: their flags are
checked nevertheless.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import BUILT_IN, ROOT, TINY, assert_success

import data
import model as model_module
from rope_scaling import METHODS, OPTIONS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ("README.md", "results/README.md", "results/claims.md")
RESULTS = [ROOT / "experiments" / name for name in RESULTS]
FOLDERS = ("config", "data", "docs", "examples", "experiments", "kernels", "nanolong")
FOLDERS += ("examples/schemes",)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

# -----------------------------------------------------------------------------
# Commands and code.

# a part of a command -> why it does not run
NOT_RUN = {
    "torchrun": "it takes several GPUs: test_processes.py runs two and four processes",
    "--dataset=python": "it takes minutes: test_prepare.py prepares it",
    "--dataset=fineweb10B": "it downloads 200 MB and more",
    "--dataset=shakespeare": "it downloads a text",
    "experiments/": "it takes minutes: tests/experiments run the runner",
    "hf.py import": "it needs a public checkpoint: test_hub.py and test_gguf.py write such files",
    "hf.py extend": "it needs a public checkpoint: test_hub_extend.py writes such files",
    ".gguf": "it needs a tokenizer that llama.cpp has: test_gguf.py has some",
    "--chat": "it needs a chat template: test_chat.py has some",
}
SHORT = {
    "train.py": [*TINY, "--n_kv_head=0"],
    "extend.py": "--max_iters=2 --warmup_iters=1 --max_tokens=512 --eval_iters=1".split(),
    "evaluate.py": ["--lengths=32,64", "--max_tokens=256"],
    "sample.py": ["--max_new_tokens=4"],
}


def commands_of(text):
    """The commands in blocks of code: without comments, a line that goes on is one."""
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        if language in ("", "sh", "bash", "shell"):
            lines = block.replace("\\\n", " ").splitlines()
            found = (re.sub(r"\s#.*", "", line).strip().removeprefix("$ ") for line in lines)
            commands += [
                line for line in found if re.match(r"([A-Z_]+=\S+ )*(python|torchrun) ", line)
            ]
    return commands


def script_of(words):
    """The script of a command, which may stand behind torchrun and its flags; None: another's."""
    scripts = (word for word in words if word.endswith(".py") and (ROOT / word).is_file())
    return next(scripts, None)


@pytest.fixture
def reader(tmp_path, text_data, save_run, monkeypatch, entries_do_not_stay):
    """The folder of somebody who reads a page: a function that makes what a command reads."""
    monkeypatch.setattr(data.token_files, "HERE", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data").mkdir()
    scheme = re.search(r"```python\n(class .*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    imports += "from model import POSITIONS, NoPE\n\n\n"
    (tmp_path / "my_scheme.py").write_text(imports + scheme)

    def provide(words):
        presets = [ROOT / word for word in words if word.endswith(".toml")]
        read = [tomllib.loads(preset.read_text(encoding="utf-8")) for preset in presets]
        named = [f"--dataset={values['dataset']}" for values in read if "dataset" in values]
        for word in ["--dataset=python", *named, *words]:
            name, _, value = word.partition("=")
            path = Path((value or name).removeprefix("FILE:").removeprefix("@"))
            if name == "--dataset":
                for part in value.split(","):
                    if not (tmp_path / "data" / part.partition(":")[0]).exists():
                        shutil.copytree(text_data, tmp_path / "data" / part.partition(":")[0])
            elif path.exists() or name in ("--out_dir", "--plot", "--json", "--report", "--name"):
                continue
            elif path.suffix == ".txt":
                path.write_text(README)
            elif word.endswith("/") and not word.startswith("export"):
                shutil.copytree(ROOT / "docs", path)
            elif value.startswith("out/") or word.startswith("out/"):
                trained = {"batch_size": 4, "gradient_accumulation_steps": 1, "eval_iters": 1}
                trained |= {"dataset": str(text_data), "learning_rate": 1e-3}
                meta = {"dataset": str(text_data), "train": trained}
                shutil.copytree(save_run(f"made/{path.name}", meta, block_size=32), path)

    return provide


def run_command(script, words, call, reader):
    """Run a command of the project at the sizes of SHORT; stages end after 4, 6 and 8 steps."""
    reader(words)
    short = list(SHORT.get(script, []))
    if "--task=" in " ".join(words) and script == "data/prepare.py":
        short = ["--documents=20"]
    elif "--task=" in " ".join(words):
        short = ["--lengths=128,160", "--trials=2"]
    if script == "extend.py" and any(word.endswith(".toml") for word in words):
        short += ["--train_length=64", "--eval_length=64"]
    if {"--max_iters=0", "--keep_optimizer=true"} & {*words}:
        short = short[2:]
    if "--stop_at" in " ".join(words):
        short.append("--stop_at=4" if script == "train.py" else "--stop_at=6")
    if script in ("train.py", "extend.py"):
        short += ["--overwrite"] * ("--init_from=resume" not in words)
    if script in SHORT:
        short.append("--device=cpu")
    assert_success(call(script, *words, *short))


@each_page
def test_the_commands_of_a_page_run_as_they_are_typed(page, call, reader):
    for command in commands_of(page.read_text(encoding="utf-8")):
        words = shlex.split(command)
        script = script_of(words)
        if script is None:
            assert "python -m" in command, f"{command}: no script of this project"
            continue
        words = words[words.index(script) + 1 :]
        known = call(script, "--help-all").stdout
        for name in re.findall(r"--(\w+)", " ".join(words)):
            assert f"  --{name}=" in known, f"{command}: {script} has no --{name}"
        if not any(part in command for part in NOT_RUN):
            run_command(script, words, call, reader)


@pytest.mark.parametrize("target", ["demo", pytest.param("stages", marks=pytest.mark.slow)])
def test_the_commands_of_make_run(target, call, reader):
    # this test may itself be run by make, which says then which folder it enters
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/demo", target, "PY=python"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in printed.replace("\\\n", " ").splitlines():
        _, script, *words = shlex.split(line)
        run_command(script, words, call, reader)


def test_the_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.M):
            assert target in targets, f"{page.name}: make {target}"


def test_make_smollm2_links_the_file_that_the_readme_reads():
    command = ["make", "--no-print-directory", "-n", "smollm2"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    name = re.search(r'ln -sf ".*/(.*\.gguf)" out/', printed)[1]
    assert {*re.findall(r"\S*SmolLM2\S*\.gguf", README)} == {f"out/{name}"}


@each_page
def test_the_python_of_a_page_runs(page, reader):
    """One block after the other; a class that stands alone has the names of model.py."""
    names = dict(vars(model_module))
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M):
        reader(re.findall('"(out/rope)"', block))
        exec(block, names)


# -----------------------------------------------------------------------------
# Names.


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 130
    assert max(len(line) for line in lines if not line.startswith("|")) <= 110
    assert f"one of {len(BUILT_IN)} [schemes]" in README
    assert f"`extend.py` has {len(METHODS)} methods for RoPE" in README


def test_the_docs_are_short():
    pages = [page.read_text(encoding="utf-8").splitlines() for page in PAGES[2:]]
    # rows of tables are free, because a new scheme, method or family needs one
    assert sum(line[:1] != "|" for lines in pages for line in lines) <= 520
    texts = [line for lines in pages for line in lines if line[:1] != "|" and "](" not in line]
    assert max(map(len, texts)) <= 110


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


@each_page
def test_files_named_in_text_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = rf"`((?:{'|'.join(FOLDERS)}|tests)/[\w./-]*|\w+\.(?:py|txt|toml))`"
    for name in set(re.findall(paths, text)) - {"mine.py"}:  # a reader's own
        candidates = [ROOT / name, *(ROOT / folder / name for folder in FOLDERS)]
        assert any(path.exists() for path in candidates), name


def test_tests_named_in_text_exist():
    for page in [*PAGES, *(ROOT / "experiments" / "results").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_images_are_png():
    for page in PAGES:
        for image in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / image).read_bytes()[:4] == b"\x89PNG", image


def test_the_documents_know_every_scheme_and_method():
    schemes = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    extension = (ROOT / "docs" / "extension.md").read_text(encoding="utf-8")
    for scheme in BUILT_IN:
        assert f"| `{scheme}` |" in schemes, scheme
    for method in METHODS:
        assert f"| `{method}` |" in extension, method
        for option in OPTIONS[method]:
            assert f"`{option}" in extension, (method, option)


def test_settings_in_the_text_exist(call):
    scripts = "train extend evaluate sample hf data/prepare experiments/run experiments/bench"
    text = "".join(call(f"{script}.py", "--help-all").stdout for script in scripts.split())
    known = {"help", "help-all", *re.findall(r"^  --(\w+)=", text, re.M)}
    # of torchrun, Slurm, pip, make, pytest, jupyter and other clients
    known |= {"standalone", "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_id", "rdzv_endpoint"}
    known |= {"nodes", "ntasks-per-node", "gpus-per-node", "max-restarts", "index-url", "no-deps"}
    known |= {"all", "check", "store", "to", "execute", "inplace", "model", "prompt", "outfile"}
    known |= {"group", "seed", "exhaustive", "model_args", "tasks", "signal", "signals-to-handle"}
    script = (ROOT / "experiments/gpu_minutes.sh").read_text(encoding="utf-8")
    known |= set(re.findall(r"^ +--(\w+)(?:=\*)?\)", script, re.M))
    for page in PAGES:
        for setting in re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert setting in known, f"{page.name}: --{setting}"


def test_presets_have_settings_that_exist_and_are_listed(call):
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    text = "".join(call(script, "--help-all").stdout for script in ("train.py", "extend.py"))
    known = set(re.findall(r"^  --(\w+)=", text, re.M))
    for preset in sorted((ROOT / "config").rglob("*.toml")):
        name = preset.relative_to(ROOT / "config").as_posix()
        assert f"`{name}`" in training, name
        unknown = tomllib.loads(preset.read_text(encoding="utf-8")).keys() - known
        assert not unknown, f"{name}: {unknown}"
