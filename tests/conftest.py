"""Shared by the tests: the --all option, and small things made fresh: datasets, models, and the project's scripts as real processes."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; so do the processes that they start
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
DEVICE = "cuda" if os.environ.get("NANOLONG_GPU") == "1" else "cpu"
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" or DEVICE == "cuda" else ["interpreted"]  # test_kernels.py runs those in a process of their own
if DEVICE == "cuda":
    torch.set_default_device(DEVICE)  # NANOLONG_GPU=1 python -m pytest -q tests/interpreted: the same cases, compiled, on a GPU

# the settings of a run of a second or two
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--max_iters=8", "--warmup_iters=2", "--eval_interval=4", "--eval_iters=2",
        "--log_interval=1", "--compile=false", "--dtype=float32", "--device=cpu"]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow products too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    long = [item for item in items if "test_numbers_under_the_interpreter" in item.nodeid]  # minutes each: one at the start of each of two workers' share
    rest = [item for item in items if item not in long]
    items[:] = long[:1] + rest[:len(rest) // 2] + long[1:] + rest[len(rest) // 2:]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --all")


@pytest.fixture
def run():
    """Run a script of the project in a process of its own; returns it finished, with stdout and stderr as text."""
    def run(*words, cwd=ROOT, processes=0, env=None, **options):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else [sys.executable]
        return subprocess.run([*launch, str(ROOT / words[0]), *map(str, words[1:])], cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300, **options)
    return run


@pytest.fixture
def call(monkeypatch, capfd):
    """Run a script's main() in this process, which saves the import of torch; returns what run() does."""
    def call(script, *words, cwd=None):
        import importlib

        import config
        from model import Refused
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        if cwd:
            monkeypatch.chdir(cwd)
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            config.main(module.main, Refused)
        return subprocess.CompletedProcess(words, exit.value.code or 0, *capfd.readouterr())
    return call


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """A dataset folder of real text, bytes with <bos>: some modules of the standard library, 300 kB."""
    import argparse
    import ast
    import inspect
    import json
    import typing
    folder = tmp_path_factory.mktemp("data") / "text"
    folder.mkdir()
    modules = [inspect.getsource(m).encode() for m in (argparse, ast, typing, inspect)]
    for split, documents in (("train", modules[:3]), ("val", modules[3:])):
        data.write_tokens(folder / f"{split}.bin", [t for d in documents for t in (256, *d)], 257)
    (folder / "meta.json").write_text(json.dumps({"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}))
    return folder


@pytest.fixture
def make():
    """A small GPT whose weights are all random, so that nothing hides behind a zero."""
    def make(seed=0, **settings):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(**{"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 50, **settings}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0, 1.0 if name.startswith("pos.") else 0.3)
        return model.eval()
    return make


@pytest.fixture
def rng():
    """A generator of numpy with a fresh seed that is printed when a test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
