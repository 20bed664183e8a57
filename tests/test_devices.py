"""Devices, dtypes and compilation; signals, locks and the limits of waiting for other processes."""

import os
import re
import signal
import threading

import pytest
import torch
from conftest import assert_success, run_python

from nanolong import devices, provenance
from nanolong.errors import UserError
from nanolong.parallel import processes
from nanolong.run import lock, signals

CPU = torch.device("cpu")
MPS = torch.device("mps")
GPU = torch.device("cuda")


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "", "cpu:-7"])
def test_a_device_that_cannot_be_used_is_an_error(name):
    assert devices.pick_device("cpu") == CPU
    assert devices.pick_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UserError, match="--device=cpu"):
        devices.pick_device(name)


def test_a_gpu_without_its_driver_is_never_replaced_by_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "_has_nvidia_gpu", lambda: True)
    with pytest.raises(UserError, match="there is an NVIDIA GPU.*--device=cpu"):
        devices.pick_device("auto")
    assert devices.pick_device("cpu") == CPU


def test_several_processes_do_not_share_one_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="all processes on one GPU: give --device=cuda"):
        devices.pick_device("cuda:0")


def test_dtype_follows_the_device(monkeypatch):
    assert devices.pick_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setattr(devices, "_cpu_multiplies_bfloat16", lambda: False)
    assert devices.pick_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(devices, "_cpu_multiplies_bfloat16", lambda: True)
    assert devices.pick_dtype("auto", CPU) == torch.bfloat16
    for native, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native
        )
        assert devices.pick_dtype("auto", GPU) == dtype
    assert devices.pick_dtype("auto", MPS) == torch.float32
    with pytest.raises(UserError, match="loss scaling"):
        devices.pick_dtype("float16", MPS)


def test_compilation_is_used_where_it_pays_and_left_out_with_a_reason(monkeypatch):
    assert devices.pick_compile(False, CPU, 10**6) == (False, None)
    assert "a run this short" in devices.pick_compile(None, CPU, 499)[1]
    assert "mps" in devices.pick_compile(True, MPS, 10**6)[1]
    found = {"compiler": None}
    monkeypatch.setattr(devices.shutil, "which", lambda name: found["compiler"])
    monkeypatch.setattr(devices.Path, "is_file", lambda path: True)
    compiles, reason = devices.pick_compile(True, CPU, 0)
    assert not compiles and reason.startswith("torch.compile is off: there is no C++ compiler")
    found["compiler"] = "/usr/bin/g++"
    assert devices.pick_compile(True, CPU, 0) == (True, None)
    assert devices.pick_compile(None, CPU, 500) == (True, None)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in devices.pick_compile(None, GPU, 500)[1]


def test_peak_flops_of_known_gpus(monkeypatch):
    assert devices.peak_flops(CPU) is None
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A10G": 70e12}
    for name, flops in {**names, "Voodoo 2": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(GPU) == flops


def test_provenance_names_commit_hardware_version_and_date():
    parts = provenance.provenance(CPU).split(", ")
    assert parts[0].startswith("commit ")
    assert parts[-2] == "torch " + torch.__version__.partition("+")[0]
    assert parts[-1].count("-") == 2
    assert re.match(rf"{torch.get_num_threads()} threads? of ", parts[1])


@pytest.mark.parametrize(("rank", "answer"), [("0", "stopping after this step"), ("1", "")])
def test_signals_are_noted_and_answered_and_handlers_restored(rank, answer, capfd, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    before = signal.getsignal(signal.SIGTERM)
    with signals.catch_signals() as stop_signals:
        assert not stop_signals
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # at once, as of an impatient terminal: noted, too
        assert len(stop_signals) == 2
    assert signal.getsignal(signal.SIGTERM) is before
    assert answer in capfd.readouterr().err


def test_a_second_signal_in_earnest_ends_the_process():
    code = (
        "import signal, time\n"
        "from nanolong.run.signals import catch_signals\n"
        "with catch_signals() as stop_signals:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(1.1)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = run_python(code)
    assert done.returncode == -signal.SIGTERM and not done.stdout, done.stderr


def test_signals_can_be_caught_outside_the_main_thread():
    caught = []

    def work():
        with signals.catch_signals() as stop_signals:
            caught.append(len(stop_signals))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [0]


def test_a_lock_is_held_once_and_released(tmp_path):
    lock.lock(tmp_path)
    lock.lock(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nanolong.run.lock import lock\n"
        "lock(Path(sys.argv[1]))\n"
    )
    other = run_python(code, tmp_path)
    assert f"process {os.getpid()} is writing to {tmp_path}: wait for it" in other.stderr
    lock.unlock(tmp_path)
    lock.unlock(tmp_path)
    assert_success(run_python(code, tmp_path))


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", ("nccl", 1)), ("cpu", ("gloo", None))])
def test_a_process_names_its_gpu_when_it_joins(name, expected, monkeypatch):
    """NCCL otherwise guesses it from the rank, and every process warns."""
    monkeypatch.delenv("RANK", raising=False)
    assert processes.join_processes("cpu") == processes.rank_and_world() == (0, 1)
    joined = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(processes, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    dist = torch.distributed
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(None, 1, 2)]))
    monkeypatch.setattr(processes, "_store_of_this_start", lambda *args: None)

    def join(backend, device_id=None, **options):
        joined.append((backend, device_id))

    monkeypatch.setattr(dist, "init_process_group", join)
    assert processes.join_processes(name) == (1, 2)
    assert joined == [expected]


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e9"])
def test_the_collective_timeout_is_a_number_of_seconds(text, monkeypatch):
    monkeypatch.delenv("NANOLONG_TIMEOUT", raising=False)
    assert processes.collective_timeout() == 600
    monkeypatch.setenv("NANOLONG_TIMEOUT", "2.5")
    assert processes.collective_timeout() == 2.5
    monkeypatch.setenv("NANOLONG_TIMEOUT", text)
    with pytest.raises(UserError, match=f"NANOLONG_TIMEOUT={text}"):
        processes.collective_timeout()


def test_the_error_of_a_lost_process_is_recognised(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    lost = [
        torch.distributed.DistBackendError("NCCL"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc] Read error"),
        RuntimeError("Connection closed by peer [127.0.0.1]"),
    ]
    for error in lost:
        message = processes.lost_peer_message(error)
        assert message.startswith("process 1 has lost another process")
        assert "NANOLONG_TIMEOUT" in message and "--init_from=resume" in message
    assert processes.lost_peer_message(RuntimeError("shape mismatch")) is None
