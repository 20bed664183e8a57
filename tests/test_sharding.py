"""Processes that keep a part of the weights each, or of the tokens, train as one process does."""

import json
import os
import signal
import subprocess
import time

import conftest
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    logged,
    newest,
    wait_for,
)
from safetensors.torch import load_file, save_file
from sharding_cases import train_case

from model import GPT, POSITIONS
from nanolong.parallel.sharding import own_rows
from nanolong.run.folder import list_steps
from nanolong.tensor_file import read_tensor

slow = pytest.mark.slow
FSDP = {"parallel": "fsdp"}
# with parameters of their own, and without
SOME = [
    {"pos": "t5", "n_head": 2},  # its table has fewer rows than there are processes of four
    {"pos": "rope", "window": 9, "sinks": 2, "tie_embeddings": False},
]
TWO_PARTS = {"sequence_parallel": 2}
IN_PARTS = [{"pos": "rope"}, {"pos": "alibi"}, {"pos": "rope", "random_positions": 99}]
OTHERS = [{"pos": pos} for pos in sorted(POSITIONS)]


def assert_close(one, several, limit, weight_limit):
    """Two runs have the same losses, and the same weights, relative to their norm."""
    for name in ("loss", "val_loss", "val_bits_per_byte"):
        expected = logged(one, name)
        assert len(expected) >= 2
        assert logged(several, name) == pytest.approx(expected, abs=limit, rel=0), name
    assert logged(several, "tokens") == logged(one, "tokens")
    for file in ("model.safetensors", "optim.safetensors"):
        a, b = (load_file(newest(run) / file) for run in (one, several))
        assert a.keys() == b.keys()
        for name in a:
            assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype)
    a, b = (load_file(newest(run) / "model.safetensors") for run in (one, several))
    for name in a:
        assert (a[name] - b[name]).norm() <= weight_limit * a[name].norm(), name


@pytest.fixture
def train_cases(text_data, tmp_path, run):
    """Train cases on several processes. Returns what tests/sharding_cases.py prints of each."""

    def train_cases(cases, processes):
        file = tmp_path / "cases.json"
        file.write_text(json.dumps(cases))
        done = assert_success(run("tests/sharding_cases.py", file, processes=processes))
        return json.loads(done.stdout)

    return train_cases


@pytest.fixture
def case(text_data, tmp_path):
    def case(name, model, **settings):
        settings = {"dataset": str(text_data), "out_dir": str(tmp_path / name), **settings}
        return {"model": model, "train": settings}

    return case


@pytest.mark.parametrize(
    ("processes", "models", "settings"),
    [
        (2, SOME, FSDP),
        pytest.param(2, OTHERS, FSDP, marks=slow),
        pytest.param(2, SOME, {**FSDP, "checkpoint_activations": True}, marks=slow),
        pytest.param(4, OTHERS, FSDP, marks=slow),
        pytest.param(4, OTHERS, {**FSDP, **TWO_PARTS}, marks=slow),
        pytest.param(2, IN_PARTS, TWO_PARTS, marks=slow),
        pytest.param(4, IN_PARTS[:1], {**TWO_PARTS, "separate_docs": True}, marks=slow),
        pytest.param(4, [{"pos": "xl"}], {"sequence_parallel": 4}, marks=slow),
        pytest.param(2, SOME[:1], {**TWO_PARTS, "optimizer": "muon"}, marks=slow),
        pytest.param(2, SOME[1:], {**TWO_PARTS, "checkpoint_activations": True}, marks=slow),
        pytest.param(2, IN_PARTS[:1], {**TWO_PARTS, "compile": True}, marks=slow),
    ],
)
def test_training_is_that_of_one_process(processes, models, settings, case, train_cases):
    singles = []
    shared = []
    for i, model in enumerate(models):
        several = ("parallel", "sequence_parallel")
        one = {name: value for name, value in settings.items() if name not in several}
        singles.append(case(f"one{i}", model, **one))
        shared.append(case(f"shared{i}", model, **settings))
    # Muon rounds to bfloat16 what it orthogonalizes, so that rounding errors grow
    is_muon = settings.get("optimizer") == "muon"
    limits = (1e-3, 0.1) if is_muon else (1e-5, 1e-4)
    if settings.get("compile"):
        limits = (1e-4, 1e-2)
    kept = train_cases(shared, processes)
    for single, several, n_kept in zip(singles, shared, kept, strict=True):
        model = train_case(single)
        assert_close(single["train"]["out_dir"], several["train"]["out_dir"], *limits)
        if "parallel" not in settings:
            continue
        # a matrix that has no whole number of rows for each process, and that of few rows
        assert n_kept <= sum(p.numel() for p in model.parameters()) / processes * 1.05 + 500


@pytest.mark.slow
def test_a_run_goes_on_in_any_mode(case, train_cases):
    """Alone, fsdp, ddp, in parts, and alone: a checkpoint does not know how it was computed."""
    model = {"pos": "t5"}
    straight = case("straight", model)
    train_case(straight)

    def leg(max_iters, **settings):
        return case("legs", model, max_iters=max_iters, **settings)

    train_case(leg(5))
    legs = [leg(10, init_from="resume", **FSDP), leg(13, init_from="resume")]
    legs += [leg(16, init_from="resume", **TWO_PARTS)]
    train_cases(legs, 2)
    train_case(leg(20, init_from="resume"))
    one, several = straight["train"]["out_dir"], leg(20)["train"]["out_dir"]
    assert len(logged(several, "loss")) == 20
    assert logged(several, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5, rel=0)


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        # of more than two processes ddp sums in another order after its first step
        pytest.param(2, FSDP, marks=slow),
        pytest.param(4, {**FSDP, "sequence_parallel": 2}, marks=slow),
    ],
)
def test_resuming_gives_the_same_bits(processes, settings, case, train_cases):
    settings = {**settings, "gradient_accumulation_steps": processes}
    whole = case("whole", {"pos": "xl"}, **settings)
    half = case("parts", {"pos": "xl"}, max_iters=10, **settings)
    rest = case("parts", {"pos": "xl"}, max_iters=20, init_from="resume", **settings)
    train_cases([whole, half, rest], processes)
    assert_same_bits(whole["train"]["out_dir"], rest["train"]["out_dir"])


@slow
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_products_of_half_precision_train(settings, case, train_cases):
    """Rounding differs between processes; the loss scale of float16 is the same in all."""
    one, shared = case("one", {}, **settings), case("shared", {}, **settings, **FSDP)
    train_case(one)
    train_cases([shared], 2)
    a, b = one["train"]["out_dir"], shared["train"]["out_dir"]
    assert logged(a, "loss") == pytest.approx(logged(b, "loss"), abs=0.02, rel=0)


@slow
def test_compiled_blocks_train_as_others_do(case, train_cases):
    model = {"pos": "alibi", "n_layer": 10}  # more than Dynamo compiles of one function by itself
    cases = [case("plain", model, **FSDP), case("compiled", model, compile=True, **FSDP)]
    train_cases(cases, 2)
    a, b = (case["train"]["out_dir"] for case in cases)
    assert logged(a, "loss") == pytest.approx(logged(b, "loss"), abs=1e-4, rel=0)


def test_fsdp_of_one_process_and_of_muon_is_refused(call, text_data, tmp_path):
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run", "--parallel=fsdp"]
    assert_refused(call("train.py", *words), "there is one")
    assert_refused(call("train.py", *words, "--optimizer=muon"), "give --optimizer=adamw")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("n", "world"), [(1, 2), (5, 4), (8, 4), (257, 3), (3, 8)])
def test_a_process_reads_the_rows_that_torch_gives_it(n, world, tmp_path):
    x = torch.arange(3.0 * n).view(n, 3)
    save_file({"x": x}, tmp_path / "x.safetensors")
    parts = [own_rows(n, rank, world) for rank in range(world)]
    read = [read_tensor(tmp_path / "x.safetensors", "x", part) for part in parts]
    assert torch.equal(torch.cat(read), x)
    for part, chunk in zip(read, x.chunk(world), strict=False):
        assert torch.equal(part, chunk)


# -----------------------------------------------------------------------------
# The scripts: stop signals, lost processes, a full disk, extend.py.


def ranks_of(launcher):
    """The process ids of the ranks that a launcher has started."""
    listed = subprocess.run(
        ["ps", "--ppid", str(launcher.pid), "-o", "pid="], capture_output=True, text=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def start(*words, launcher=()):
    env = {"OMP_NUM_THREADS": "1"}
    return conftest.start(*words, processes=2, launcher=launcher, env=env)


@pytest.fixture
def words(text_data, tmp_path):
    long = [*TINY, "--max_iters=120", "--eval_interval=10", "--gradient_accumulation_steps=2"]
    return ["train.py", *long, f"--dataset={text_data}", "--parallel=fsdp", "--pos=t5"]


@slow
@pytest.mark.parametrize("moment", ["evaluation", "training"])
def test_a_stop_signal_in_one_process_saves(moment, words, tmp_path):
    """Also in an evaluation, when the others do not know of it yet."""
    run = tmp_path / "run"
    words = [*words, f"--out_dir={run}"]
    if moment == "evaluation":
        words += ["--eval_iters=4000", "--eval_interval=5"]
        process = start(*words)
        wait_for(lambda: (run / "log.jsonl").is_file(), process)
        time.sleep(1)
    else:
        process = start(*words)
        wait_for(lambda: list_steps(run), process)
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output[-2000:]
    assert "stopped and saved" in output
    assert GPT.load(run).meta["step"] < 120


@slow
def test_a_full_disk_ends_all_processes(words, tmp_path):
    """The first process goes on taking part in what the others wait for, and then says it."""
    code = (
        "import os, sys, errno, runpy\n"
        "from nanolong.run import checkpoint\n"
        "def full(file, stream):\n"
        "    next(iter(stream.pairs))\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "checkpoint.write_tensors = full\n"
        "sys.argv.pop(0)\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    (tmp_path / "full.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    begin = time.time()
    process = start(tmp_path / "full.py", *words, f"--out_dir={tmp_path}/run")
    output, _ = process.communicate(timeout=100)
    assert process.returncode
    assert "No space left on device" in output
    assert time.time() - begin < 60
    assert not list((tmp_path / "run").glob("*step*"))


@slow
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_an_extension_is_that_of_one_process(pos, words, run, tmp_path):
    source, one, shared = tmp_path / "source", tmp_path / "one", tmp_path / "shared"
    words = [word for word in words if not word.startswith(("--parallel", "--pos"))]
    done = assert_success(run(*words, f"--pos={pos}", "--max_iters=4", f"--out_dir={source}"))
    method = "--method=yarn" if pos == "rope" else "--method=pi"
    command = ["extend.py", source, method, "--max_iters=10", "--max_tokens=512", "--factor=2"]
    command += ["--dtype=float32", "--log_interval=1", "--compile=false"]
    expected = assert_success(run(*command, f"--out_dir={one}"))
    done = assert_success(run(*command, f"--out_dir={shared}", "--parallel=fsdp", processes=2))
    assert logged(shared, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5, rel=0)
    # the tables of losses before and after
    tables = [[line for line in x.stdout.splitlines() if "|" in line] for x in (expected, done)]
    assert tables[0] == tables[1]
