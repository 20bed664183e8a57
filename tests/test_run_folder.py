"""The run folder: checkpoints whole or absent, the log, the lock, stop signals."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    content,
    logged,
    run_python,
)
from safetensors.torch import load_file

from model import GPT
from nanolong import run as runs
from nanolong.errors import UserError
from nanolong.strict_json import from_json, to_json


@pytest.fixture
def folder(make, tmp_path):
    """A run folder with checkpoints of steps 5 and 10, of which the first is the best."""
    for step, loss in ((5, 1.0), (10, 2.0)):
        runs.save_model(make(pos="t5"), tmp_path / f"run/step-{step:06d}", step=step)
        with open(tmp_path / "run/log.jsonl", "a") as log:
            log.write(f'{{"step": {step}, "val_loss": {loss}}}\n')
    return tmp_path / "run"


@pytest.mark.parametrize("pos", ["rope", "t5", "learned"])
def test_weights_are_stored_and_loaded_to_the_bit_in_either_dtype(pos, make, tmp_path):
    """bfloat16 is rounded as torch rounds; in memory norms and position schemes stay float32."""
    model = make(pos=pos, qk_norm="head", bias="all")
    model.save(tmp_path / "whole/step-000000")
    modes = {file.stat().st_mode for file in (tmp_path / "whole/step-000000").iterdir()}
    assert len(modes) == 1  # others can read them all, or none
    again = GPT.load(tmp_path / "whole")
    assert again.config == model.config and not again.training
    versions = (again.meta["torch"], again.meta["commit"])
    assert versions == (torch.__version__, runs.current_commit())
    assert all(map(torch.equal, again.parameters(), model.parameters()))

    runs.save_model(model, tmp_path / "step-000000", dtype=torch.bfloat16)
    rounded = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    stored = load_file(tmp_path / "step-000000/model.safetensors")
    assert stored.keys() == rounded.keys()
    assert all(stored[name].equal(rounded[name]) for name in rounded)
    for dtype in (torch.float32, None, torch.bfloat16):
        again = GPT.load(tmp_path, dtype=dtype)
        assert again.stored_dtype == torch.bfloat16
        assert again.head.weight is again.embed.weight
        for name, p in again.named_parameters():
            is_matrix = "norm" not in name and not name.startswith("scheme.")
            assert p.dtype == ((dtype or torch.bfloat16) if is_matrix else torch.float32), name
            assert p.float().equal(rounded[name].float())


def test_the_newest_the_named_and_the_best_checkpoint_are_loaded(folder, make):
    """The best has the lowest validation loss in the log; without a log the newest is taken."""
    assert GPT.load(folder).meta["step"] == 10
    assert GPT.load(folder / "step-000005").meta["step"] == 5
    assert GPT.load(folder, best=True).meta["step"] == 5
    (folder / "log.jsonl").unlink()
    assert GPT.load(folder, best=True).meta["step"] == 10


def test_json_has_no_nan_and_holds_bytes_and_numbers_of_numpy():
    text = to_json([float("nan"), float("inf"), 1.5, b"\x00\xff", np.float32(0.5)])
    assert "NaN" not in text and "Infinity" not in text
    assert from_json(text) == [None, None, 1.5, b"\x00\xff", 0.5]


@pytest.mark.parametrize(
    "name, damage",
    [
        ("model.safetensors", "a bit"),
        ("optim.safetensors", "a bit"),
        ("optim.safetensors", "gone"),
        ("meta.json", "cut"),
    ],
)
def test_damage_is_named_with_the_checkpoint_before_it(name, damage, call, text_data, tmp_path):
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    assert_success(call("train.py", *words))
    file = tmp_path / "run/step-000008" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= damage == "a bit"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(raw[:-9] if damage == "cut" else raw)
    before = content(tmp_path / "run")
    done = call("train.py", f"--out_dir={tmp_path}/run", "--init_from=resume", "--max_iters=9")
    assert_refused(done, name, "use the one before it", "step-000004")
    assert content(tmp_path / "run") == before


def test_what_cannot_be_read_here_is_refused(folder, monkeypatch):
    """meta.json was edited or has another format; the scheme is not in this model.py."""
    file = folder / "step-000010/meta.json"
    meta = json.loads(file.read_text())
    for change, message in (
        ({"config": {**meta["config"], "window": 5}}, "damaged"),
        ({"format": 3}, "has format 3, and this version reads 8: use the version that wrote it"),
    ):
        file.write_text(json.dumps({**meta, **change}))
        with pytest.raises(UserError, match=message):
            GPT.load(folder)
    monkeypatch.delitem(GPT.schemes, "t5")
    with pytest.raises(UserError, match="--pos=t5, which is not in.*--entry=FILE.py"):
        GPT.load(folder / "step-000005")


@pytest.mark.parametrize("version, commit", [(4, "b046c6d"), (6, "5436555"), (7, "d5462f6")])
def test_an_older_checkpoint_names_the_commit_that_reads_it(version, commit, folder):
    file = folder / "step-000010/meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": version}))
    with pytest.raises(UserError, match=f"format {version}, .* use commit {commit}, the last"):
        GPT.load(folder)


def test_a_full_disk_names_what_is_whole_and_leaves_nothing(folder, make, monkeypatch):
    before = content(folder)

    def write(tensors, file):
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.torch.save_file", write)
    with pytest.raises(UserError, match="No space left.*step-000010 is whole: free space"):
        make().save(folder / "step-000011")
    assert content(folder) == before
    monkeypatch.undo()
    with pytest.raises(UserError, match="step-000005 exists already"):
        make().save(folder / "step-000005")
    assert content(folder) == before


KILLED = """
import os, signal, sys
kill_at, name = int(sys.argv.pop(1)), sys.argv.pop(1)
seen = 0
def audit(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and name in str(args[0]):
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
import train
sys.addaudithook(audit)
train.main()
print("operations", seen)
"""


@pytest.mark.slow
def test_killed_before_any_file_operation_a_run_goes_on_to_the_same_bits(text_data, tmp_path):
    """kill -9 before each opening, making, renaming and removing in the folder of a run."""
    words = [*TINY, "--max_iters=3", "--eval_interval=1", "--eval_iters=1"]

    def train(name, kill_at=0, *more):
        places = [f"--dataset={text_data}", f"--out_dir={tmp_path / name}"]
        return run_python(KILLED, kill_at, name, *words, *places, *more)

    n = int(assert_success(train("whole")).stdout.rpartition("operations ")[2])
    assert n > 40
    for kill_at in range(1, n + 1):
        name = f"killed-{kill_at}-times"
        assert train(name, kill_at).returncode == -signal.SIGKILL
        assert_success(train(name, 0, "--init_from=auto"))
        assert_same_bits(tmp_path / "whole", tmp_path / name)
        assert not list((tmp_path / name).glob(".tmp*"))
        shutil.rmtree(tmp_path / name)


def test_old_runs_are_renamed_and_nothing_of_them_is_removed(call, text_data, tmp_path):
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    run = tmp_path / "run"
    assert_success(call(*words))
    (run / "notes.txt").write_text("mine")
    before = content(run)
    done = assert_success(call(*words, "--pos=alibi", "--overwrite"))
    assert f"the run in {run} is {run}.old1 now\n" in done.stdout
    assert content(tmp_path / "run.old1") == before
    assert GPT.load(run).config.pos == "alibi"
    second = content(run)
    assert_success(call(*words, "--overwrite"))
    assert content(tmp_path / "run.old1") == before and content(tmp_path / "run.old2") == second
    assert runs.latest_run(tmp_path) == run
    shutil.rmtree(run)
    assert runs.latest_run(tmp_path) is None  # never an .oldN


def test_a_start_that_fails_leaves_the_old_run_where_it_was(call, text_data, tmp_path):
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    assert_success(call(*words))
    before = content(tmp_path)
    assert_refused(call(*words, "--overwrite", "--min_doc=99999999"), "--min_doc")
    assert content(tmp_path) == before


def test_the_log_drops_what_comes_after_the_checkpoint(tmp_path):
    tmp_path.joinpath("log.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 2, "val_loss": 1}\n'
        '{"step": 3, "loss": 1}\n{"step": 4, "lo'
    )
    (tmp_path / ".tmp-step-000003").mkdir()
    log = runs.Log(tmp_path, step=2)
    log.write(3, loss=float("nan"))
    log.close()
    assert not (tmp_path / ".tmp-step-000003").exists()
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 2, 3]
    assert logged(tmp_path)[-1]["loss"] is None
    assert runs.is_evaluated(tmp_path, 2) and not runs.is_evaluated(tmp_path, 3)


WRITER = """
import sys, time
from nanolong import run
for seconds in sys.stdin:
    try:
        with run.lock(sys.argv[1]):
            print("locked", flush=True)
            time.sleep(float(seconds))
    except ValueError as error:
        print(error, flush=True)
"""


def test_a_run_folder_has_one_writer(folder):
    """The error of a second process names the first; kill -9 frees the lock; it can be nested."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", WRITER, str(folder)]
    first, second = (subprocess.Popen(command, **pipes, bufsize=1) for _ in range(2))
    first.stdin.write("60\n")
    assert first.stdout.readline() == "locked\n"
    error = pytest.raises(UserError, match=f"process {first.pid} on .* writes to .*remove")
    with error, runs.lock(folder):
        pass
    first.kill()
    first.wait()
    with runs.lock(folder), runs.lock(folder):
        runs.move_aside(folder)
        second.stdin.write("0\n")
        assert "writes to" in second.stdout.readline()
    assert second.communicate("0\n")[0] == "locked\n"


TWO_SIGNALS = """
import os, signal, time
from nanolong.run import StopSignals
with StopSignals() as stop:
    for number in (signal.SIGTERM, signal.SIGINT):  # at once, as torchrun and a terminal do
        os.kill(os.getpid(), number)
    assert stop
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_signals_are_noted_once_and_a_second_in_earnest_ends_the_process():
    done = run_python(TWO_SIGNALS, timeout=60)
    assert done.returncode == -signal.SIGTERM and done.stderr.count("stopping after") == 1
