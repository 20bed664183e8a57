"""Two processes, each on a GPU of its own, by NCCL: the losses are those of two CPUs by gloo."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

FLAGS = (
    "--dtype=float32 --compile=false --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 "
    "--batch_size=2 --gradient_accumulation_steps=2 --max_iters=4 --warmup_iters=1 "
    "--eval_interval=2 --eval_iters=2 --log_interval=1"
).split()
CASES = {
    "ddp": ["--pos=rope"],
    "fsdp": ["--pos=rope", "--parallel=fsdp"],
    "sequence": ["--pos=alibi", "--sequence_parallel=2"],
    "sequence and fsdp": ["--pos=xl", "--sequence_parallel=2", "--parallel=fsdp"],
}


def losses(run):
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


def training_losses(run):
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def train_on_cpus(words, processes):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*launcher, "train.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_two_cpus(simulate, text_data, tmp_path, case):
    words = [*FLAGS, *CASES[case], f"--dataset={text_data}"]
    train_on_cpus([*words, "--device=cpu", f"--out_dir={tmp_path / 'cpu'}"], 2)
    words += ["--device=cuda", f"--out_dir={tmp_path / 'gpu'}"]
    done = simulate("train.py", *words, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UserWarning" not in done.stderr
    assert done.report["counts"].get("illegal", 0) == 0
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel, processes", [("ddp", (2, 0)), ("fsdp", (2, 0)), ("fsdp", (0, 2))]
)
def test_a_run_resumes_on_another_number_of_devices(
    simulate, text_data, tmp_path, parallel, processes
):
    """The losses after the change are those of a run that one process computed."""
    words = [*FLAGS, "--pos=rope", "--lr_schedule=constant", "--device=cuda"]
    words.append(f"--dataset={text_data}")
    assert simulate("train.py", *words, f"--out_dir={tmp_path / 'one'}").returncode == 0
    words.append(f"--out_dir={tmp_path / 'changed'}")
    for n, more in zip(processes, (["--max_iters=2"], ["--init_from=resume"]), strict=True):
        kind = [f"--parallel={parallel}"] if n else ["--parallel=ddp"]
        done = simulate("train.py", *words, *kind, *more, processes=n)
        assert done.returncode == 0, done.stderr[-3000:]
    one, changed = (training_losses(tmp_path / name) for name in ("one", "changed"))
    assert changed == pytest.approx(one, rel=2e-6) and len(one) == 4
