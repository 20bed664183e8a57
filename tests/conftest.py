"""Shared by the tests: the --all option, small models and data, and the scripts as processes."""

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from flags import SMALLEST, TINY, last_of_each_flag  # noqa: F401  (tests take them from here)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cases

import data
import evaluate
from model import GPT, POSITIONS, GPTConfig
from nanolong.errors import run_main
from nanolong.evaluation import comparison, scoring
from nanolong.run import list_steps

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = tuple(POSITIONS)

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


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow tests too")
    parser.addoption("--exhaustive", action="store_true", help="also what takes minutes each")


def pytest_configure(config):
    config.addinivalue_line("markers", "cases: the rows of cases.py that a test runs on")
    config.addinivalue_line("markers", "slow: only with --all")
    config.addinivalue_line("markers", "exhaustive: only with --exhaustive")
    config.option.all |= config.option.exhaustive
    # workers and child processes inherit it
    os.environ.setdefault("NANOLONG_SEED", str(int.from_bytes(os.urandom(4), "little")))
    if config.pluginmanager.hasplugin("hypothesispytest"):
        import hypothesis.core

        hypothesis.core.global_force_seed = int(os.environ["NANOLONG_SEED"])


def pytest_generate_tests(metafunc):
    """Give a test the rows of cases.py that its mark asks for.

    @pytest.mark.cases(tags): the rows with all of these tags. also, slow, exhaustive: lists of tags
    of more rows, by default, with --all, and with --exhaustive.
    """
    for mark in metafunc.definition.iter_markers("cases"):
        rows = cases.select(*mark.args)
        seen = [*rows]
        for name in ("also", "slow", "exhaustive"):
            marks = () if name == "also" else getattr(pytest.mark, name)
            for tags in mark.kwargs.get(name, ()):
                more = [case for case in cases.select(tags) if case not in seen]
                seen += more
                rows += [pytest.param(case, marks=marks) for case in more]
        metafunc.parametrize("case", rows, ids=str)


@pytest.fixture(autouse=True)
def schemes_of_files(request, monkeypatch):
    """A test of cases.py has the schemes of its files in POSITIONS."""
    if request.node.get_closest_marker("cases"):
        for name in cases.OF_FILES:
            monkeypatch.setitem(POSITIONS, name, cases.SCHEMES[name])


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        seed = os.environ["NANOLONG_SEED"]
        terminalreporter.write_line(f"NANOLONG_SEED={seed} in front of the command replays it")


def pytest_collection_modifyitems(config, items):
    for option, mark in (("--all", "slow"), ("--exhaustive", "exhaustive")):
        if not config.getoption(option):
            left_out = [item for item in items if mark in item.keywords]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
    # The longest tests go first, one at the start of each of two workers' share.
    in_children = ("under_the_interpreter", "fit_the_hardware")
    longest = [item for item in items if any(name in item.nodeid for name in in_children)]
    rest = [item for item in items if item not in longest]
    half = len(rest) // 2
    items[:] = longest[:1] + rest[:half] + longest[1:] + rest[half:]


# -----------------------------------------------------------------------------
# Scripts as processes, what they end with, and the runs that they leave.


def assert_success(done):
    """Exit status 0; returns what is given."""
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return done


def assert_refused(done, *phrases):
    """Exit status 2, and one line on stderr that has all the phrases; returns that line."""
    assert done.returncode == 2, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for phrase in phrases:
        assert phrase in lines[0], lines[0]
    return lines[0]


def command_of(script, *words, processes=0, launcher=()):
    """The command of a script, which torchrun starts where it has processes."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*command, *launcher, str(ROOT / script), *last_of_each_flag(words)]


def start(script, *words, processes=0, launcher=(), env=None):
    """Start a script, and do not wait for it."""
    return subprocess.Popen(
        command_of(script, *words, processes=processes, launcher=launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


def run_command(command, cwd=ROOT, env=None, **options):
    """Run a command; returns it finished, with stdout and stderr as text."""
    env = {**os.environ, **(env or {})}
    options |= {"capture_output": True, "text": True}
    return subprocess.run([str(word) for word in command], cwd=cwd, env=env, **options)


def run_python(code, *words, **options):
    """Run code in a process of its own.

    Code that imports transformers runs outside the project, with env=OFFLINE.
    """
    return run_command([sys.executable, "-c", code, *words], **options)


def run_pytest(*words, request, env):
    """Run tests in a child process, the slow ones with --all, and assert that they pass."""
    words = [*words, "--all"] if request.config.getoption("--all") else words
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = run_command([*command, *words], env=env)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:]


OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


def wait_for(condition, process, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.time() < end, "too slow"
        time.sleep(0.01)


def newest(run):
    """The folder of a run's last checkpoint."""
    return list_steps(run)[-1]


def logged(run, name=None):
    """The rows of a run's log.jsonl, or the numbers of that name in them."""
    rows = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    return rows if name is None else [row[name] for row in rows if name in row]


def content(folder):
    """Path -> bytes of all files but locks, whose content is the last writer's number."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


def assert_same_bits(run, other):
    """The newest checkpoints of two runs hold the same tensors, and their logs the same numbers."""
    assert newest(run).name == newest(other).name
    for file in ("model.safetensors", "optim.safetensors"):
        x, y = load_file(newest(run) / file), load_file(newest(other) / file)
        assert x.keys() == y.keys()
        assert all(torch.equal(x[key], y[key]) for key in x), file
    logs = [logged(folder) for folder in (run, other)]
    for row in (*logs[0], *logs[1]):
        row.pop("tokens_per_second", None)
    assert logs[0] == logs[1]


@pytest.fixture
def run():
    """Run a script in a process of its own, or in several."""

    def run(*words, processes=0, **options):
        return run_command(command_of(*words, processes=processes), timeout=300, **options)

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
            run_main(module.main)
        return subprocess.CompletedProcess(words, exit.value.code or 0, *capfd.readouterr())

    return call


def write_dataset(folder, train_ids, val_ids=None, **meta):
    """A dataset folder of these tokens, of bytes with <bos> unless meta says otherwise."""
    folder.mkdir(parents=True)
    defaults = {"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}
    meta = {**defaults, **meta}
    for split, ids in (("train", train_ids), ("val", train_ids if val_ids is None else val_ids)):
        data.write_tokens(folder / f"{split}.bin", ids, meta["vocab_size"])
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """A dataset folder of real text as bytes with <bos>: four standard modules, 300 kB."""
    modules = [inspect.getsource(m).encode() for m in (argparse, ast, typing, inspect)]
    train_ids = [token for module in modules[:3] for token in (256, *module)]
    return write_dataset(tmp_path_factory.mktemp("data") / "text", train_ids, [256, *modules[3]])


@pytest.fixture
def character_data(tmp_path):
    """A dataset folder of three characters, without <bos>."""
    meta = {"tokenizer": data.CharTokenizer("abc").to_json(), "vocab_size": 3}
    meta |= {"bos": None, "bos_default": False}
    return write_dataset(tmp_path / "characters", [0, 1, 2] * 200, **meta)


@pytest.fixture
def make():
    """Make a small GPT whose weights are all random, so that no term is hidden by a zero."""

    def make(seed=0, **settings):
        torch.manual_seed(seed)
        defaults = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 50}
        model = GPT(GPTConfig(**{**defaults, **settings}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0, 1.0 if name.startswith("scheme.") else 0.3)
        return model.eval()

    return make


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Have torch.compile trace and then run what it traced. Returns the list of its graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return graphs


@pytest.fixture
def entries_do_not_stay():
    """Schemes that a test adds to POSITIONS are gone after it."""
    before = dict(POSITIONS)
    yield
    POSITIONS.clear()
    POSITIONS.update(before)


@pytest.fixture(autouse=True)
def rng():
    """A NumPy generator; PyTorch's has the same seed, which is another in every session."""
    seed = int(os.environ["NANOLONG_SEED"])
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture
def save_run(make, tmp_path):
    """A function that writes the run folder of an untrained model of bytes, and returns it."""

    def save_run(name="run", meta=None, **settings):
        model = make(**{"vocab_size": 257, **settings})
        model.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256, "step": 1}
        model.meta.update(meta or {})
        model.save(tmp_path / name / "step-000001")
        return tmp_path / name

    return save_run


@pytest.fixture
def runs(save_run, text_data):
    """Run folders of untrained models that name their data: RoPE, learned positions, ALiBi."""
    meta = {"dataset": str(text_data), "data_hash": data.Dataset(str(text_data)).hash}
    return [save_run(pos, meta, pos=pos) for pos in ("rope", "learned", "alibi")]


def measure_cells(models, cfg, lengths):
    """The records of evaluate.py of checkpoints, name -> GPT, compared with the first."""
    cfg.lengths = tuple(lengths)
    texts = scoring.open_texts(models, cfg) if "loss" in cfg.task else {}
    records = [x for cell in evaluate.plan(models, cfg, texts) for x in cell.measure()]
    comparison.compare(records, list(models))
    return records


class Operators(TorchDispatchMode):
    """Inside `with`, list each operator that runs with the tensors that it takes and returns."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if torch.is_tensor(x)]
        self.calls.append((operator.name(), tensors))
        return result
