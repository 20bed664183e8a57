"""Processes of different code, settings or data stop before the first step, with a sentence."""

import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY
from flags import last_of_each_flag

from data import write_tokens
from data.dataset import open_tokens
from nanolong.entry import SOURCES, hash_sources
from nanolong.run.checkpoint import find_checkpoint, read_meta, verify

SHARED = ["--gradient_accumulation_steps=2"]


def run_ranks(commands):
    """Run one command in each of several processes, which join. Returns statuses and outputs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    children = []
    for rank, command in enumerate(commands):
        env = {"RANK": rank, "WORLD_SIZE": len(commands), "LOCAL_RANK": rank}
        env |= {"LOCAL_WORLD_SIZE": len(commands), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"NANOLONG_TIMEOUT": 60}
        child = subprocess.Popen(
            [sys.executable, *last_of_each_flag(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **{name: str(value) for name, value in env.items()}},
        )
        children.append(child)
    outputs = [child.communicate(timeout=200)[0] for child in children]
    return [child.returncode for child in children], outputs


def assert_all_refuse(commands, words):
    """Each process ends with status 2 and one line that has these words."""
    statuses, outputs = run_ranks(commands)
    assert statuses == [2] * len(commands), outputs
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in output, output
        assert f"process {rank} of {len(commands)} stops" in lines[0]
        for word in words:
            assert word in lines[0], output


def copy_sources(folder):
    """Copy the files that a run executes."""
    for pattern in SOURCES:
        for file in ROOT.glob(pattern):
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return folder


def change_a_token(dataset):
    file = dataset / "val.bin"
    tokens = np.array(open_tokens(file))
    tokens[-1] = (tokens[-1] + 1) % 256
    file.unlink()
    write_tokens(file, tokens, 257)


def test_processes_of_other_code_stop(text_data, tmp_path):
    other = copy_sources(tmp_path / "tree")
    with open(other / "kernels" / "eager.py", "a") as file:
        file.write("# changed\n")
    words = [*TINY, *SHARED, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    commands = [[folder / "train.py", *words] for folder in (ROOT, other)]
    assert_all_refuse(commands, ["code is", "check out the same commit"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_of_other_data_stop_and_leave_the_checkpoint_whole(call, text_data, tmp_path):
    run, other = tmp_path / "run", tmp_path / "text"
    words = [*TINY, *SHARED, f"--out_dir={run}"]
    assert call("train.py", *words, f"--dataset={text_data}").returncode == 0
    before = read_meta(find_checkpoint(run))
    shutil.copytree(text_data, other)
    change_a_token(other)
    words = [*words, "--init_from=resume", "--max_iters=20"]
    commands = [[ROOT / "train.py", *words, f"--dataset={data}"] for data in (text_data, other)]
    assert_all_refuse(commands, ["data is", "share the dataset"])
    assert read_meta(find_checkpoint(run)) == before
    for name in ("model.safetensors", "optim.safetensors"):
        verify(find_checkpoint(run) / name, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "words"),
    [
        (["--learning_rate=0.01"], ["learning_rate is not given in process 0", "same command"]),
        (["--sequence_parallel=2"], ["sequence_parallel is not given in process 0"]),
        (["--parallel=fsdp"], ["parallel is not given in process 0"]),
    ],
)
def test_processes_of_other_settings_stop(own, words, text_data, tmp_path):
    command = [ROOT / "train.py", *TINY, *SHARED, f"--dataset={text_data}"]
    command += [f"--out_dir={tmp_path}/run"]
    assert_all_refuse([command, [*command, *own]], words)


@pytest.mark.slow
def test_processes_of_other_checkpoints_stop(call, text_data, tmp_path):
    """As two machines that do not share the run folder, of which one has an older checkpoint."""
    words = [*TINY, *SHARED, f"--dataset={text_data}"]
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, steps in zip(runs, (8, 4), strict=True):
        done = call("train.py", *words, f"--max_iters={steps}", f"--out_dir={run}")
        assert done.returncode == 0
    words = [ROOT / "train.py", *words, "--init_from=resume", "--max_iters=20"]
    commands = [[*words, f"--out_dir={run}"] for run in runs]
    assert_all_refuse(commands, ["checkpoint is step-000008 in process 0", "share the run folder"])


def test_the_hash_of_the_code_includes_every_file_and_entry(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    first = hash_sources([file])
    assert first not in (hash_sources(), hash_sources([file, file]))
    file.write_text("x = 2\n")
    assert hash_sources([file]) != first
    assert hash_sources() == hash_sources(())
