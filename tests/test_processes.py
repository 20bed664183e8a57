"""Several processes compute what one does, also after a stop."""

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
    assert_success,
    logged,
    newest,
    wait_for,
)
from process_cases import train_case
from safetensors.torch import load_file

from model import GPT
from nanolong.run import list_steps

slow = pytest.mark.slow


def train_cases(cases, processes, run, tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    assert_success(run("tests/process_cases.py", tmp_path / "cases.json", processes=processes))


@pytest.fixture
def case(text_data, tmp_path):
    def case(name, model, **settings):
        settings = {"dataset": str(text_data), "out_dir": str(tmp_path / name), **settings}
        return {"model": model, "train": settings, "averages": True}

    return case


MODES = [  # processes, the model, settings
    (2, {"pos": "xl"}, {}),
    pytest.param(4, {"pos": "t5", "window": 9}, {"separate_docs": True}, marks=slow),
    pytest.param(2, {"pos": "alibi"}, {"optimizer": "muon"}, marks=slow),
    pytest.param(2, {"pos": "rope"}, {"compile": True}, marks=slow),
]


@pytest.mark.parametrize(("processes", "model", "settings"), MODES)
def test_training_is_that_of_one_process(processes, model, settings, case, run, tmp_path):
    """Also of a run that goes on with another batch size, and of whatever an optimizer adds. A run
    of two that was stopped has the bits of one that was not.
    """
    settings = {**settings, "max_iters": 26}
    resume = {**settings, "init_from": "resume"}
    once, half, one = (case(name, model, **settings) for name in ("once", "parts", "one"))
    rest = case("parts", model, **resume, stop_at=20)
    more = [case(name, model, **resume, batch_size=3) for name in ("parts", "one")]
    once["train"]["stop_at"] = one["train"]["stop_at"] = 20
    half["train"]["stop_at"] = 10
    train_cases([once, half, rest, more[0]], processes, run, tmp_path)
    train_case(one)
    train_case(more[1])
    once, several, one = (tmp_path / name for name in ("once", "parts", "one"))
    # DDP forms other buckets after its first step, and the sum of four numbers depends on them
    exact = 0 if processes == 2 else 1e-6
    assert logged(several, "loss")[:20] == pytest.approx(logged(once, "loss"), rel=exact, abs=0)
    for file in ("model.safetensors", "optim.safetensors") if processes == 2 else ():
        steps = [folder / "step-000020" / file for folder in (once, several)]
        assert steps[0].read_bytes() == steps[1].read_bytes()
    # Muon rounds to bfloat16 what it orthogonalizes, and a compiled graph sums in another order
    limit = 1e-3 if settings.get("optimizer") == "muon" else 1e-5
    limit = 1e-4 if settings.get("compile") else limit
    for name in ("loss", "val_loss", "val_bits_per_byte"):
        assert len(logged(one, name)) >= 4
        assert logged(several, name) == pytest.approx(logged(one, name), abs=limit), name
    assert logged(several, "tokens") == logged(one, "tokens")
    for file in ("model.safetensors", "optim.safetensors"):
        a, b = (load_file(newest(folder) / file) for folder in (one, several))
        assert a.keys() == b.keys()
        for name in a:
            x, y = a[name].double(), b[name].double()
            assert (x - y).norm() <= 100 * limit * (x.norm() + 1e-6), name


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


@pytest.mark.parametrize("moment", ["training", pytest.param("evaluation", marks=slow)])
def test_a_stop_signal_in_one_process_saves(moment, words, tmp_path):
    """Also in an evaluation, when the others do not know of it yet."""
    run = tmp_path / "run"
    if moment == "evaluation":
        words += ["--eval_iters=16000", "--eval_interval=5"]
    process = conftest.start(*words, processes=2, env={"OMP_NUM_THREADS": "1"})
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
sys.argv.append(f"--seed={os.environ['RANK']}")
run_main(train.main)
"""


def test_processes_that_differ_stop_before_anything_is_written(words, run, tmp_path):
    script = tmp_path / "unlike.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{UNLIKE}")
    done = run(script, *words[1:], processes=2, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode and "have other settings" in done.stderr
    assert not (tmp_path / "run").exists()


@slow
@pytest.mark.parametrize("pos, method", [("rope", "--method=yarn"), ("learned", "--method=pi")])
def test_an_extension_is_that_of_one_process(pos, method, words, run, tmp_path):
    assert_success(run(*words, f"--pos={pos}", "--max_iters=4"))
    command = ["extend.py", tmp_path / "run", method, "--max_iters=10", "--max_tokens=512"]
    command += ["--factor=2", "--dtype=float32", "--log_interval=1", "--compile=false"]
    one, several = tmp_path / "one", tmp_path / "several"
    assert_success(run(*command, f"--out_dir={one}"))
    assert_success(run(*command, f"--out_dir={several}", processes=2))
    assert len(logged(one, "loss")) == 10
    assert logged(several, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5, rel=0)
