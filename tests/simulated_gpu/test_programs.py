"""train.py, extend.py, evaluate.py and sample.py on the CUDA path: what the CPU computes."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

MODEL = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2".split()
STEPS = "--max_iters=4 --warmup_iters=1 --eval_interval=2 --eval_iters=2 --log_interval=1".split()
EVALUATION = ["--lengths=32,64", "--max_tokens=512", "--protocol=chunked,last-quarter"]
DEVICES = ("cuda", "cpu")


def losses(run):
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


def rounding(dtype):
    return {"float32": 2e-6, "float16": 2e-3, "bfloat16": 5e-3}[dtype]


@pytest.fixture(scope="module")
def start(simulate):
    """Run a script on a device; returns what it printed. It must end with status 0."""

    def start(device, *words, env=None):
        words = [*map(str, words), f"--device={device}"]
        if device == "cuda":
            done = simulate(*words, env=env)
            assert done.report["counts"].get("illegal", 0) == 0
        else:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600
            )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


@pytest.fixture(scope="module")
def runs(start, text_data, tmp_path_factory):
    """A run of train.py on each device, and what each printed."""
    folder = tmp_path_factory.mktemp("runs")
    text = {}
    for device in DEVICES:
        words = [*MODEL, *STEPS, "--dtype=float32", "--compile=false", f"--dataset={text_data}"]
        text[device] = start(device, "train.py", *words, f"--out_dir={folder / device}")
    return folder, text


def test_training_gives_the_losses_and_the_sample_of_the_cpu(runs):
    folder, text = runs
    assert losses(folder / "cuda") == pytest.approx(losses(folder / "cpu"), rel=2e-6)
    samples = [text[device].partition("a sample:")[2] for device in DEVICES]
    assert samples[0] == samples[1] != ""
    assert "H100" in text["cuda"]


RECIPES = {
    "score scales": ["--score_scale=logn", "--layer_pattern=WN", "--window=8"],
}


@pytest.mark.parametrize("recipe", [*RECIPES, "a mixture"])
def test_recipes_give_the_losses_of_the_cpu(start, text_data, tmp_path, recipe):
    other = tmp_path / "other"
    shutil.copytree(text_data, other)
    is_mixture = recipe == "a mixture"
    dataset = f"{text_data}:0.4,{other}:0.6" if is_mixture else text_data
    words = [f"--dataset={dataset}", *RECIPES.get(recipe, [])]
    for device in DEVICES:
        settings = [*MODEL, *STEPS, "--dtype=float32", "--compile=false", *words]
        start(device, "train.py", *settings, f"--out_dir={tmp_path / device}")
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extending_gives_the_losses_of_the_cpu(start, runs, dtype):
    folder, _ = runs
    found = []
    for device in DEVICES:
        if (device, dtype) == ("cpu", "float16"):  # only a GPU trains in it
            continue
        run = folder / f"{device}-yarn-{dtype}"
        words = [folder / "cpu", "--method=yarn", "--factor=2", "--max_iters=2", "--eval_iters=2"]
        words += ["--batch_size=2", "--log_interval=1", "--compile=false", f"--dtype={dtype}"]
        start(device, "extend.py", *words, f"--out_dir={run}")
        found.append(losses(run))
    expected = found[-1] if len(found) == 2 else losses(folder / "cpu-yarn-float32")
    assert found[0] == pytest.approx(expected, rel=rounding(dtype))


@pytest.mark.parametrize("weights", ["auto", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_evaluation_gives_the_losses_of_the_cpu(start, runs, dtype, weights):
    folder, _ = runs
    rows = []
    for device, kind in (("cuda", dtype), ("cpu", "float32")):
        file = folder / f"{device}-{dtype}-{weights}.json"
        words = [folder / "cpu", *EVALUATION, f"--dtype={kind}", f"--weights={weights}"]
        start(device, "evaluate.py", *words, f"--json={file}")
        rows.append([row["loss"] for row in json.loads(file.read_text()) if "loss" in row])
    assert len(rows[0]) >= 3
    assert rows[0] == pytest.approx(rows[1], rel=rounding(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_greedy_text_is_that_of_the_cpu(start, runs, dtype):
    folder, _ = runs
    words = [folder / "cpu", "--start=def ", "--max_new_tokens=24", "--temperature=0"]
    text = [start(device, "sample.py", *words, f"--dtype={dtype}") for device in DEVICES]
    assert text[0] == text[1]


def test_evaluating_needles_gives_the_accuracy_of_the_cpu(start, runs):
    folder, _ = runs
    rows = []
    for device in DEVICES:
        file = folder / f"needle-{device}.json"
        words = [folder / "cpu", "--task=needle", "--lengths=96", "--depths=2", "--trials=2"]
        start(device, "evaluate.py", *words, "--dtype=float32", f"--json={file}")
        rows.append([row["accuracy"] for row in json.loads(file.read_text())])
    assert rows[0] == rows[1]


# -------------------------------------------------------------------------------------------------
# The check of a kernel before its first call


def test_kernels_are_checked_with_real_numbers(simulate, text_data, tmp_path):
    """All pass; where one computes something else, plain PyTorch replaces it and it is named."""
    words = ["train.py", *MODEL, *STEPS, "--pos=alibi", "--dtype=float32", "--compile=false"]
    words += ["--max_iters=1", "--device=cuda", f"--dataset={text_data}"]
    env = {"NANOLONG_CHECK": "1", "XDG_CACHE_HOME": str(tmp_path / "good")}
    good = simulate(*words, f"--out_dir={tmp_path / 'run'}", env=env)
    assert good.returncode == 0, good.stderr[-3000:]
    assert "is off" not in good.stderr
    verdicts = [json.loads(file.read_text()) for file in tmp_path.glob("good/nanolong/kernels/*")]
    assert {verdict["key"]["kernel"] for verdict in verdicts} >= {"attention", "decoding"}
    assert {verdict["fault"] for verdict in verdicts} == {""}

    env |= {"XDG_CACHE_HOME": str(tmp_path / "bad"), "SIMULATED_WRONG_KERNEL": "1"}
    bad = simulate(*words, f"--out_dir={tmp_path / 'wrong'}", env=env)
    assert bad.returncode == 0, bad.stderr[-3000:]
    assert re.search("attention .* is off on .*relative error", bad.stderr)
    assert losses(tmp_path / "wrong") == pytest.approx(losses(tmp_path / "run"), rel=2e-6)


# -------------------------------------------------------------------------------------------------
# What cannot be had


def error_of(done):
    """The line of a user's error. Fails where there is more than it, or another status."""
    assert done.returncode == 2, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    return lines[0]


def test_too_little_memory_is_one_line(simulate, text_data, tmp_path):
    words = ["--n_layer=12", "--n_embd=768", "--n_head=12", "--block_size=1024", "--batch_size=32"]
    words += ["--compile=false", "--device=cuda", f"--dataset={text_data}", "--eval_iters=1"]
    done = simulate("train.py", *words, f"--out_dir={tmp_path}", values=False, gb=2)
    assert "memory" in error_of(done)
    assert not list(tmp_path.glob("step-*"))


def test_a_device_that_is_not_there_is_one_line(simulate, runs):
    done = simulate("sample.py", runs[0] / "cpu", "--device=cuda:3", values=False)
    assert "cuda:3" in error_of(done) and "--device=" in error_of(done)


@pytest.mark.parametrize(
    "machine, env, reason",
    [
        ({"capability": 75}, {}, "older than sm_80"),
        ({}, {"PATH": "/nowhere"}, "no C compiler"),
        ({}, {"NANOLONG_REFERENCE": "1"}, ""),
    ],
    ids=["an old GPU", "no compiler", "plain PyTorch by choice"],
)
def test_without_kernels_plain_pytorch_computes_the_same(
    simulate, start, runs, machine, env, reason
):
    words = ["sample.py", runs[0] / "cpu", "--start=def ", "--max_new_tokens=8", "--temperature=0"]
    words.append("--dtype=float32")
    done = simulate(*words, "--device=cuda", env=env, **machine)
    assert done.returncode == 0, done.stderr[-3000:]
    assert reason in done.stderr
    assert done.report["counts"].get("launches of Triton", 0) == 0
    assert done.stdout == start("cpu", *words)
    assert "sampling without a CUDA graph" in done.stderr


def test_a_gpu_without_bfloat16_trains_in_float16(simulate, text_data, tmp_path):
    words = [*MODEL, *STEPS, "--compile=false", "--device=cuda", f"--dataset={text_data}"]
    done = simulate("train.py", *words, f"--out_dir={tmp_path / 'run'}", capability=75)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "float16" in done.stdout


def test_a_dynamic_method_decodes_without_a_graph_and_refuses_compile(simulate, start, runs):
    run = runs[0] / "dynamic"
    words = [runs[0] / "cpu", "--method=dynamic-ntk", "--factor=2", "--max_iters=0"]
    start("cpu", "extend.py", *words, f"--out_dir={run}")
    words = ["sample.py", run, "--max_new_tokens=40", "--temperature=0", "--device=cuda"]
    done = simulate(*words)
    assert done.returncode == 0
    assert "tables change as the text grows" in done.stderr
    assert "leave out --compile" in error_of(simulate(*words, "--compile=true"))
