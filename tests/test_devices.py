"""Devices, dtypes and compilation."""

from unittest import mock

import pytest
import torch

from nanolong import devices
from nanolong.errors import UserError

CPU = torch.device("cpu")
MPS = torch.device("mps")
GPU = torch.device("cuda")


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "", "cpu:-7"])
def test_a_device_that_cannot_be_used_is_an_error(name):
    assert devices.pick_device("cpu") == CPU
    assert devices.pick_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UserError, match="--device=cpu"):
        devices.pick_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_a_build_without_the_device_says_so(name, monkeypatch):
    kind = name.partition(":")[0]
    monkeypatch.setattr(getattr(torch.backends, kind), "is_built", lambda: False)
    monkeypatch.setattr(torch, "ones", mock.Mock(side_effect=AttributeError("no _cuda_setDevice")))
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    with pytest.raises(UserError, match=f"--device={name} .* was built without it.: give --dev"):
        devices.pick_device(name)


def test_a_gpu_without_its_driver_is_not_replaced_and_one_gpu_is_not_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.Path, "glob", lambda self, pattern: iter(["gpu"]))
    with pytest.raises(UserError, match="there is an NVIDIA GPU.*--device=cpu"):
        devices.pick_device("auto")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="all processes on one GPU: give --device=cuda"):
        devices.pick_device("cuda:0")


def test_dtype_follows_the_device(monkeypatch):
    assert devices.pick_dtype("bfloat16", CPU) == torch.bfloat16
    for has_amx, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        found = {"amx_tile": has_amx, "avx512_bf16": True}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert devices.pick_dtype("auto", CPU) == dtype
    for native, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native
        )
        assert devices.pick_dtype("auto", GPU) == dtype
    assert devices.pick_dtype("auto", MPS) == torch.float32
    with pytest.raises(UserError, match="loss scaling"):
        devices.pick_dtype("float16", MPS)


def test_compilation_is_used_where_it_pays_and_refused_where_it_cannot_work(monkeypatch):
    assert not devices.pick_compile(False, CPU, True)
    assert not devices.pick_compile(None, CPU, False)
    assert not devices.pick_compile(None, MPS, True)
    with pytest.raises(UserError, match="another device than mps"):
        devices.pick_compile(True, MPS, False)
    found = {"compiler": None}
    monkeypatch.setattr(devices.shutil, "which", lambda name: found["compiler"])
    monkeypatch.setattr(devices.Path, "is_file", lambda path: True)
    assert not devices.pick_compile(None, CPU, True)
    with pytest.raises(UserError, match="--compile needs a C.. compiler"):
        devices.pick_compile(True, CPU, False)
    found["compiler"] = "/usr/bin/g++"
    assert devices.pick_compile(True, CPU, False) and devices.pick_compile(None, CPU, True)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install triton"):
        devices.pick_compile(True, GPU, False)


def test_peak_flops_of_known_gpus(monkeypatch):
    assert devices.peak_flops(CPU) is None
    known = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12}
    known |= {"NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA GH200 480GB": 989e12}
    parts = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    unknown = ["Voodoo 2", "NVIDIA L40", "NVIDIA GB200", parts, "NVIDIA RTX 4090 Laptop GPU"]
    for name, flops in {**known, **dict.fromkeys(unknown)}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(GPU) == flops


def test_flops_are_counted_by_weights_and_visible_keys(make):
    """6 a weight of a matrix product, 12 a layer, channel and visible key (PaLM)."""
    model = make(n_layer=3, window=5, sinks=2, layer_pattern="WFN", head_dim=6, mlp="gelu")
    channels = 4 * 6  # of all heads; n_embd is 32
    block = 4 * 32 * channels + 2 * 32 * 128
    weights = 3 * block + 50 * 32
    for length, keys in ((100, 7 + 100 + 100), (4, 4 + 4 + 4)):
        expected = 6 * weights + 12 * channels * keys
        assert devices.flops_per_token(model, length) == expected
