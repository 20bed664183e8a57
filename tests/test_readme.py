"""What README.md and docs/ say is true: the code runs, files, settings and presets exist."""

import re
import tomllib
from dataclasses import fields

import pytest
import torch
from conftest import BUILT_IN, ROOT, TINY, assert_success

import model as model_module
from evaluate import EvaluateConfig
from experiments.run import RunConfig
from extend import ExtendConfig
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.inference import KVCache
from rope_scaling import METHODS, OPTIONS
from sample import SampleConfig
from train import TrainConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ("README.md", "results/README.md", "results/negative.md")
RESULTS = [ROOT / "experiments" / name for name in RESULTS]
FOLDERS = ("config", "data", "docs", "examples", "experiments", "kernels", "nanolong")


@pytest.fixture
def log_bias(entries_do_not_stay):
    """The scheme of the README, in POSITIONS for one test."""
    code = re.search(r"```python\n(class .*?)```", README, re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 20
    names = dict(vars(model_module))
    exec(code, names)
    return names["LogBias"]


def test_the_scheme_of_the_readme_trains_caches_extends_and_reloads(log_bias, tmp_path):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "vocab_size": 50}
    model = GPT(GPTConfig(pos="log", **shape))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    tokens = torch.randint(0, 50, (2, 20))
    model(tokens, tokens).backward()
    assert model.pos.rate.grad.abs().min() > 0

    whole = model(tokens)
    cache = KVCache()
    parts = [model(part, cache=cache) for part in tokens.split([12, 1, 7], 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)

    model.extend("none", 2)
    with pytest.raises(UserError, match="use --method=none"):
        model.extend("yarn", 2)
    model.save(tmp_path / "step-000000")
    again = GPT.load(tmp_path)
    assert torch.equal(again(tokens), whole)
    assert again.config.block_size == 64


def test_the_library_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(import torch.*?)```", README, re.S)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    model = names["model"]
    assert model.config.block_size == 256  # 64, extended four times
    assert model.embed.weight.grad.abs().sum() > 0
    printed = capsys.readouterr().out
    assert printed.startswith("tensor([6.28")
    assert re.search(r"dtype=torch.float64\) \[\d+, ", printed)
    again = GPT.load("out/mine")
    assert torch.equal(again.rope_wavelengths(), model.rope_wavelengths())
    assert torch.equal(again(names["tokens"]), model(names["tokens"]))


@pytest.mark.usefixtures("entries_do_not_stay")
def test_the_blocks_of_the_page_on_python_run(call, text_data, tmp_path, capfd):
    """One after the other, with a run of another shape than the page's."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == page.count("```") // 2 == 6
    words = [*TINY, "--block_size=256", f"--dataset={text_data}", "--out_dir=out/rope"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert_success(call("train.py", *words, cwd=tmp_path))
    capfd.readouterr()
    names = {}
    printed = []
    for block in blocks:
        exec(block, names)
        printed.append(capfd.readouterr().out)

    model, tokens, ids, text = (names[name] for name in ("model", "tokens", "ids", "text"))
    assert printed[0] == text + "\n" and ids == [256, *text.encode()]
    mean = model(tokens[:, :-1], tokens[:, 1:])
    assert torch.allclose(names["losses"].mean(), mean, rtol=1e-5)
    assert len(printed[1].splitlines()) == len(text)
    maps = names["maps"]
    assert [tuple(p.shape) for p in maps] == [(1, 2, len(ids), len(ids))] * 2
    assert (maps[1].sum(-1) - 1).abs().max() < 1e-5
    assert len(printed[3]) > 1
    measured = [line.rpartition(" ")[0] for line in printed[4].splitlines()]
    assert measured == ["rope 256", "rope 1024", "YaRN 256", "YaRN 1024"]
    assert GPT.load("out/rope-yarn4-zero").config.block_size == 1024
    for pos in ("p_rope", "slow_rope"):
        assert GPT.load(f"out/{pos}").config.pos == pos
    assert GPT.load("out/p_rope").pos.inv_freq.tolist()[6:] == [0, 0]
    assert GPT.load("out/slow_rope").pos.inv_freq[0] == 0.5


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 180
    assert max(len(line) for line in lines) <= 110
    assert f"`extend.py` has {len(METHODS)} methods for RoPE" in README


def test_the_docs_are_short():
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES[2:]) <= 900


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_text_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = rf"`((?:{'|'.join(FOLDERS)}|tests)/[\w./-]*|\w+\.(?:py|txt|toml))`"
    for name in set(re.findall(paths, text)) - {"mine.py"}:  # a reader's own
        candidates = [ROOT / name, *(ROOT / folder / name for folder in FOLDERS)]
        assert any(path.exists() for path in candidates), name


def test_images_are_png():
    for page in PAGES:
        for image in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / image).read_bytes()[:4] == b"\x89PNG", image


def test_the_documents_know_every_scheme_and_method():
    schemes = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    extension = (ROOT / "docs" / "extension.md").read_text(encoding="utf-8")
    for scheme in BUILT_IN:
        assert f"| `{scheme}` |" in schemes, scheme
        assert f"`{scheme}`" in README, scheme
    for method in METHODS:
        assert f"| `{method}` |" in extension, method
        assert f"`{method}`" in README, method
        for option in OPTIONS[method]:
            assert f"`{option}" in extension, (method, option)


def test_contributing_names_the_pages_that_list_schemes_and_methods():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sections = {section.split("\n")[0]: section for section in text.split("\n## ")}
    for title, page in (
        ("Add a position scheme", "docs/schemes.md"),
        ("Add an extension method of RoPE", "docs/extension.md"),
    ):
        (step,) = re.findall(r"^\d\. Add a line to[^.]*\.md`[^.]*\.md`", sections[title], re.M)
        assert f"`{page}`" in step and "`README.md`" in step, title


def test_settings_in_the_text_exist():
    known = set()
    for config in (GPTConfig, TrainConfig, ExtendConfig, EvaluateConfig, SampleConfig):
        known |= {field.name for field in fields(config)}
    known |= {field.name for field in fields(RunConfig)}
    # of data/prepare.py, hf.py, experiments/bench.py, and torchrun, Slurm, pip and other clients
    known |= {"name", "tokenizer", "shards", "val_fraction", "verify", "help", "nanogpt"}
    known |= {"context_length"}
    known |= {"standalone", "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_id", "rdzv_endpoint"}
    known |= {"max-restarts", "index-url", "no-deps", "all", "check", "store"}
    known |= {"to", "execute", "inplace"}  # of jupyter nbconvert
    known |= {"nodes", "ntasks-per-node", "gpus-per-node", "model", "prompt", "outfile"}
    for page in PAGES:
        for setting in re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert setting in known, f"{page.name}: --{setting}"


def test_presets_hold_settings_that_differ_from_the_defaults():
    training_defaults = {}
    for config in (GPTConfig, TrainConfig):
        training_defaults |= {field.name: field.default for field in fields(config)}
    extension_defaults = {field.name: field.default for field in fields(ExtendConfig)}
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for preset in sorted((ROOT / "config").rglob("*.toml")):
        name = preset.relative_to(ROOT / "config").as_posix()
        assert f"`{name}`" in training, name
        extends = preset.stem in ("finetune_public", "smollm2_64k", "llama3_128k")
        defaults = extension_defaults if extends else training_defaults
        for setting in tomllib.loads(preset.read_text(encoding="utf-8")):
            assert setting in defaults, f"{name}: {setting}"
