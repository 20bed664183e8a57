"""Shared by the tests: the --all option, small models and data, and the scripts as processes."""

import argparse
import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from flags import TINY as TINY
from flags import last_of_each_flag

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.entry import load_entries
from nanolong.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = tuple(POSITIONS)  # without those of NANOLONG_ENTRY

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and so do their children
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# NANOLONG_GPU=1 python -m pytest -q tests/interpreted runs the same cases, compiled, on a GPU.
DEVICE = "cuda" if os.environ.get("NANOLONG_GPU") == "1" else "cpu"
if DEVICE == "cuda":
    torch.set_default_device(DEVICE)
# Without a GPU, test_kernels.py runs these in a process of their own, under Triton's interpreter.
interpreting = os.environ.get("TRITON_INTERPRET") == "1" or DEVICE == "cuda"
collect_ignore = [] if interpreting else ["interpreted"]


def pytest_ignore_collect(collection_path, config):
    """
    Some folders are collected only when they are named.

    test_kernels.py runs tests/compiled in a child process; make simulated-gpu runs
    tests/simulated_gpu with another build of torch; tests/papers is slow.
    """
    name = collection_path.name
    named = any(name in str(word) for word in config.args)
    if name == "papers":
        named = named or config.getoption("--all")
    return True if name in ("compiled", "papers", "simulated_gpu") and not named else None


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow tests too")
    parser.addoption("--exhaustive", action="store_true", help="also all cases of the kernels")


def pytest_configure(config):
    """NANOLONG_ENTRY=FILE.py,... adds schemes to those that the tests over all schemes run on."""
    config.addinivalue_line("markers", "slow: only with --all")
    config.addinivalue_line("markers", "exhaustive: only with --exhaustive")
    config.option.all |= config.option.exhaustive
    try:
        load_entries(filter(None, os.environ.get("NANOLONG_ENTRY", "").split(",")), POSITIONS)
    except UserError as error:
        raise pytest.UsageError(f"NANOLONG_ENTRY: {error}") from None


def pytest_collection_modifyitems(config, items):
    for option, mark in (("--all", "slow"), ("--exhaustive", "exhaustive")):
        if not config.getoption(option):
            left_out = [item for item in items if mark in item.keywords]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
    # The longest tests go first, one at the start of each of two workers' share.
    in_children = ("under_the_interpreter", "on_the_emulator")
    longest = [item for item in items if any(name in item.nodeid for name in in_children)]
    rest = [item for item in items if item not in longest]
    half = len(rest) // 2
    items[:] = longest[:1] + rest[:half] + longest[1:] + rest[half:]


@pytest.fixture
def run():
    """Run a script in a process of its own; returns it finished, with stdout and stderr as text."""

    def run(*words, cwd=ROOT, processes=0, env=None, **options):
        launcher = [sys.executable]
        if processes:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
        return subprocess.run(
            [*launcher, str(ROOT / words[0]), *last_of_each_flag(words[1:])],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            **options,
        )

    return run


@pytest.fixture
def call(monkeypatch, capfd):
    """Run a script's main() in this process, which saves the import of torch; returns as run()."""

    def call(script, *words, cwd=None):
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        monkeypatch.setattr(sys, "argv", [script, *last_of_each_flag(words)])
        if cwd:
            monkeypatch.chdir(cwd)
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.run_main(module.main)
        return subprocess.CompletedProcess(words, exit.value.code or 0, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """A dataset folder of real text as bytes with <bos>: four standard modules, 300 kB."""
    folder = tmp_path_factory.mktemp("data") / "text"
    folder.mkdir()
    modules = [inspect.getsource(m).encode() for m in (argparse, ast, typing, inspect)]
    for split, documents in (("train", modules[:3]), ("val", modules[3:])):
        tokens = [token for document in documents for token in (256, *document)]
        data.write_tokens(folder / f"{split}.bin", tokens, 257)
    meta = {"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def character_data(tmp_path):
    """A dataset folder of three characters, without <bos>."""
    folder = tmp_path / "characters"
    folder.mkdir()
    for split in ("train", "val"):
        data.write_tokens(folder / f"{split}.bin", [0, 1, 2] * 200, 3)
    meta = {"tokenizer": data.CharTokenizer("abc").to_json(), "vocab_size": 3}
    (folder / "meta.json").write_text(json.dumps({**meta, "bos": None, "bos_default": False}))
    return folder


@pytest.fixture
def make():
    """Make a small GPT whose weights are all random, so that no term is hidden by a zero."""

    def make(seed=0, **settings):
        torch.manual_seed(seed)
        defaults = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 50}
        model = GPT(GPTConfig(**{**defaults, **settings}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0, 1.0 if name.startswith("pos.") else 0.3)
        return model.eval()

    return make


@pytest.fixture
def entries_do_not_stay():
    """Schemes that a test adds to POSITIONS are gone after it."""
    before = dict(POSITIONS)
    yield
    POSITIONS.clear()
    POSITIONS.update(before)


@pytest.fixture
def rng():
    """A NumPy generator with a fresh seed, which is printed when a test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
