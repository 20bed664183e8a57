"""Several processes compute what one does: DDP, FSDP, sequence parallelism, checkpoints."""

import json
import os
import signal
import time
from pathlib import Path

import conftest
import pytest
from conftest import (
    ROOT,
    TINY,
    assert_same_bits,
    assert_success,
    logged,
    newest,
    wait_for,
)
from process_cases import cases, train_case
from safetensors.torch import load_file

from model import GPT, POSITIONS
from nanolong.run import list_steps

slow = pytest.mark.slow
DDP, FSDP, PARTS = {}, {"parallel": "fsdp"}, {"sequence_parallel": 2}
FOUR = ("rope", "t5", "shaw", "alibi")
# a table that has fewer rows than there are processes of four, and what is not shared
SMALL = [{"pos": "t5", "n_head": 2}, {"pos": "rope", "window": 9, "tie_embeddings": False}]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=slow)])
def test_losses_and_gradients_of_parts_are_those_of_the_whole(processes, run):
    """In float64: every scheme, mask and extension method, at an input beyond the context."""
    done = assert_success(run("tests/process_cases.py", processes=processes))
    errors = json.loads(done.stdout)
    assert errors.keys() == {name for name, *_ in cases()}
    for name, (loss_error, gradient_error) in errors.items():
        assert loss_error < 1e-12, name
        assert gradient_error < 1e-9, name


def train_cases(cases, processes, run, tmp_path):
    """Train cases on several processes: what tests/process_cases.py prints of them."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = run("tests/process_cases.py", tmp_path / "cases.json", processes=processes)
    return json.loads(assert_success(done).stdout)


@pytest.fixture
def case(text_data, tmp_path):
    def case(name, model, **settings):
        settings = {"dataset": str(text_data), "out_dir": str(tmp_path / name), **settings}
        return {"model": model, "train": settings}

    return case


MODES = [  # processes, models, settings
    (2, [{"pos": "rope"}], DDP),
    (2, SMALL, FSDP),
    pytest.param(2, [{"pos": pos} for pos in FOUR], PARTS, marks=slow),
    pytest.param(2, [{"pos": pos} for pos in sorted(POSITIONS)], FSDP, marks=slow),
    pytest.param(4, [{"pos": pos} for pos in FOUR], {**FSDP, **PARTS}, marks=slow),
    pytest.param(4, [{"pos": "rope"}], {**PARTS, "separate_docs": True}, marks=slow),
    pytest.param(2, SMALL[:1], {**PARTS, "optimizer": "muon"}, marks=slow),
    pytest.param(2, [{"pos": "rope"}], {**PARTS, "compile": True}, marks=slow),
    pytest.param(2, [{"pos": "alibi", "n_layer": 10}], {**FSDP, "compile": True}, marks=slow),
]


@pytest.mark.parametrize(("processes", "models", "settings"), MODES)
def test_training_is_that_of_one_process(processes, models, settings, case, run, tmp_path):
    pairs = []
    for i, model in enumerate(models):
        alone = {name: x for name, x in settings.items() if "parallel" not in name}
        pairs.append((case(f"one{i}", model, **alone), case(f"several{i}", model, **settings)))
    kept = train_cases([several for _, several in pairs], processes, run, tmp_path)
    # Muon rounds to bfloat16 what it orthogonalizes, and a compiled block sums in another order
    limit = 1e-3 if settings.get("optimizer") == "muon" else 1e-5
    limit = 1e-4 if settings.get("compile") else limit
    for (one, several), n_kept in zip(pairs, kept, strict=True):
        model = train_case(one)
        one, several = (each["train"]["out_dir"] for each in (one, several))
        for name in ("loss", "val_loss", "val_bits_per_byte"):
            assert len(logged(one, name)) >= 3
            assert logged(several, name) == pytest.approx(logged(one, name), abs=limit), name
        assert logged(several, "tokens") == logged(one, "tokens")
        for file in ("model.safetensors", "optim.safetensors"):
            a, b = (load_file(newest(folder) / file) for folder in (one, several))
            assert {name: (x.shape, x.dtype) for name, x in a.items()} == {
                name: (x.shape, x.dtype) for name, x in b.items()
            }
            for name in a:
                assert (a[name] - b[name]).norm() <= 100 * limit * (a[name].norm() + 1e-6), name
        if "parallel" in settings:
            # a matrix that has no whole number of rows for each process, and that of few rows
            assert n_kept <= sum(p.numel() for p in model.parameters()) / processes * 1.05 + 500


@slow
def test_a_run_goes_on_in_any_mode(case, run, tmp_path):
    """Alone, fsdp, ddp, in parts, and alone: a checkpoint does not know how it was computed."""
    straight = case("straight", {"pos": "t5"})
    train_case(straight)

    def leg(max_iters, **settings):
        return case("legs", {"pos": "t5"}, max_iters=max_iters, **settings)

    train_case(leg(5))
    resumed = {"init_from": "resume"}
    legs = [leg(10, **resumed, **FSDP), leg(13, **resumed), leg(16, **resumed, **PARTS)]
    train_cases(legs, 2, run, tmp_path)
    train_case(leg(20, **resumed))
    one, several = straight["train"]["out_dir"], leg(20)["train"]["out_dir"]
    assert len(logged(several, "loss")) == 20
    assert logged(several, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5, rel=0)


@pytest.mark.parametrize(
    ("processes", "settings"),
    # of more than two processes ddp sums in another order after its first step
    [
        pytest.param(2, DDP, marks=slow),
        (2, FSDP),
        pytest.param(4, {**FSDP, **PARTS}, marks=slow),
    ],
)
def test_resuming_several_processes_gives_the_same_bits(processes, settings, case, run, tmp_path):
    """Also whatever an optimizer adds: with fsdp in shards if it has its parameter's shape."""
    settings = {**settings, "gradient_accumulation_steps": processes}
    whole = case("whole", {"pos": "xl"}, **settings)
    half = case("parts", {"pos": "xl"}, max_iters=20, stop_at=10, **settings)
    rest = case("parts", {"pos": "xl"}, max_iters=20, init_from="resume", **settings)
    cases = [{**each, "averages": True} for each in (whole, half, rest)]
    train_cases(cases, processes, run, tmp_path)
    assert_same_bits(whole["train"]["out_dir"], rest["train"]["out_dir"])


# -----------------------------------------------------------------------------
# The scripts.


@pytest.fixture
def words(text_data, tmp_path):
    long = [*TINY, "--max_iters=120", "--eval_interval=10", "--gradient_accumulation_steps=2"]
    long += ["--n_head=4", "--n_kv_head=2", f"--dataset={text_data}"]
    return ["train.py", *long, f"--out_dir={tmp_path}/run"]


def ranks_of(launcher):
    """The process ids of the ranks that a launcher has started."""
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("--parallel=ddp", "training"),
        pytest.param("--parallel=fsdp", "evaluation", marks=slow),
    ],
)
def test_a_stop_signal_in_one_process_saves(mode, moment, words, tmp_path):
    """Also in an evaluation, when the others do not know of it yet."""
    run = tmp_path / "run"
    if moment == "evaluation":
        words += ["--eval_iters=16000", "--eval_interval=5"]
    process = conftest.start(*words, mode, processes=2, env={"OMP_NUM_THREADS": "1"})
    wait_for(lambda: list_steps(run), process)
    time.sleep(1)
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output[-2000:]
    assert "stopped and saved" in output
    assert GPT.load(run).meta["step"] < 120


UNLIKE = """
import os, sys, train
from nanolong.errors import run_main
sys.argv += [f"--seed={os.environ['RANK']}"] * (sys.argv.pop() == "seed")
run_main(train.main)
"""


@pytest.mark.parametrize("what", ["seed", pytest.param("fsdp and muon", marks=slow)])
def test_processes_that_differ_stop_before_anything_is_written(what, words, run, tmp_path):
    script = tmp_path / "unlike.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{UNLIKE}")
    flags = ["--parallel=fsdp", "--optimizer=muon"] if what != "seed" else []
    done = run(script, *words[1:], *flags, what, processes=2, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode
    message = "have other settings" if what == "seed" else "give --optimizer=adamw"
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@slow
@pytest.mark.parametrize(
    ("pos", "method", "mode"),
    [
        ("rope", "--method=yarn", "--parallel=fsdp"),
        ("learned", "--method=pi", "--parallel=fsdp"),
        ("rope", "--method=dynamic-yarn", "--sequence_parallel=2"),
        ("rope", "--pose=true", "--sequence_parallel=2"),
    ],
)
def test_an_extension_is_that_of_one_process(pos, method, mode, words, run, tmp_path):
    assert_success(run(*words, f"--pos={pos}", "--max_iters=4"))
    command = ["extend.py", tmp_path / "run", method, "--max_iters=10", "--max_tokens=512"]
    command += ["--factor=2", "--dtype=float32", "--log_interval=1", "--compile=false"]
    one, several = tmp_path / "one", tmp_path / "several"
    expected = assert_success(run(*command, f"--out_dir={one}"))
    done = assert_success(run(*command, f"--out_dir={several}", mode, processes=2))
    assert len(logged(one, "loss")) == 10
    assert logged(several, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5, rel=0)
    # the tables of losses before and after
    tables = [[line for line in x.stdout.splitlines() if "|" in line] for x in (expected, done)]
    assert tables[0] == tables[1]


@slow
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--protocol=chunked,position,sliding", "--lengths=128,512"], ("loss",)),
        (["--task=needle", "--lengths=128,256", "--depths=2", "--trials=2"], ("nats", "accuracy")),
    ],
)
def test_an_evaluation_is_that_of_one_process(words, numbers, save_run, run, tmp_path):
    text = ["--text=tests/test_model.py", "--max_tokens=1024"] if "task" not in words[0] else []
    command = ["evaluate.py", save_run(block_size=128), *words, *text, "--dtype=float32"]
    assert_success(run(*command, f"--json={tmp_path}/one.json"))
    done = run(*command, f"--json={tmp_path}/two.json", "--sequence_parallel=2", processes=2)
    assert_success(done)
    assert done.stdout.count("wrote ") == 1  # the first process alone prints
    expected, found = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert len(expected) == len(found) > 1
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        for name in numbers:
            numbers_of = [r[name] if name == "loss" else r[name]["mean"] for r in (a, b)]
            assert numbers_of[0] == pytest.approx(numbers_of[1], abs=1e-5)
