"""Choosing the device, the dtype and whether to compile; preparing the device."""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from nanolong.errors import UserError

# Peak FLOP/s of dense bfloat16 matrix products, from the makers' data sheets: the denominator of
# MFU (model FLOPs utilisation). The first key that is part of the device's name counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


# -----------------------------------------------------------------------------
# Choosing a device, a dtype and whether to compile.


def pick_device(name):
    """The torch.device for "auto" or for a name, tried out: of several processes each has its GPU.

    Raises UserError if the device cannot be used. A GPU that is there but does not work is an
    error, too, and never a reason to use the CPU instead.
    """
    try:
        device = torch.device(_best_device() if name == "auto" else name)
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
            raise UserError(
                f"--device={device} would put all processes on one GPU: "
                "give --device=cuda, and each takes its own"
            )
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches kernels on the current device
        torch.ones(8, device=device).sum().item()
        return device
    except (RuntimeError, AssertionError, AttributeError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"device {name!r} cannot be used ({reason}): "
            "choose --device=cpu, cuda, cuda:N or mps, or fix its driver"
        ) from None


def _best_device():
    """The name of the fastest kind of device of this machine."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    if _has_nvidia_gpu():
        raise UserError(
            f"there is an NVIDIA GPU, but torch {torch.__version__} cannot use it: install the "
            "CUDA build (pip install -r requirements.txt) and a driver that fits it, "
            "or give --device=cpu"
        )
    return "cpu"


def _has_nvidia_gpu():
    """Whether Linux lists an NVIDIA GPU that is not hidden by CUDA_VISIBLE_DEVICES."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not is_hidden and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def pick_dtype(name, device):
    """The torch.dtype of matrix products, for "auto" or for a name.

    auto: bfloat16 where the processor or GPU multiplies it natively, float16 on other GPUs, else
    float32.
    """
    if name == "float16" and device.type == "mps":
        raise UserError(
            "--dtype=float16 needs loss scaling, which mps does not have: use float32 or bfloat16"
        )
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu" and _cpu_multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def weights_to_load(name):
    """What --weights says to GPT.load(): a dtype, or for auto None, which keeps what is stored."""
    return None if name == "auto" else getattr(torch, name)


def set_weights_dtype(model, name, dtype):
    """Make a model's weights float32, unless its matrix products have the dtype bfloat16.

    name: of --weights. Raises UserError if that asks for bfloat16 with other products.
    """
    if dtype == torch.bfloat16:
        return
    if name == "bfloat16":
        raise UserError(
            "--weights=bfloat16 is for matrix products in bfloat16: give --dtype=bfloat16 too, or "
            "leave it out"
        )
    model.float()


def _cpu_multiplies_bfloat16():
    # Private functions of torch: bool() stands for those that a version does not have.
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        is_supported = getattr(torch.cpu, name, bool)
        if is_supported():
            return True
    return False


def autocast(device, dtype):
    """The context in which matrix products have this dtype."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def pick_compile(wanted, device, steps):
    """Whether to use torch.compile, and the reason, in words, why not, or None.

    wanted: True, False or None for auto: on a GPU, and on a CPU where the run is long enough to pay
    for the compilation. steps: of the run.
    """
    if wanted is False:
        return False, None
    reason = _reason_not_to_compile(wanted, device, steps)
    return reason is None, reason and f"torch.compile is off: {reason}"


def _reason_not_to_compile(wanted, device, steps):
    if device.type == "mps":
        return "it is not ready for mps"
    if device.type == "cpu" and wanted is None and steps < 500:
        return "compiling takes longer than it saves in a run this short (--compile=true forces it)"
    compilers = ((os.environ.get("CXX") or "g++").split()[0], "clang++", "cl")
    if not any(shutil.which(compiler) for compiler in compilers):
        return "there is no C++ compiler (install g++, as in apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "the Python headers are missing (as in apt-get install python3-dev)"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "there is no triton for the GPU (pip install triton)"
    return None


def compile_model(model):
    """torch.compile(model), which may be called for many models in one process."""
    # Dynamo compiles a function for eight kinds of model and then gives up: reset its count.
    torch._dynamo.reset()
    return torch.compile(model)


def compile_blocks(model):
    """Compile each block of a model by itself, where something is to happen between blocks."""
    torch._dynamo.reset()
    # the blocks share their code: once for each block, in training and in evaluation
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(model.blocks))
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


# -----------------------------------------------------------------------------
# Speed, determinism and memory.


def peak_flops(device):
    """The peak FLOP/s of a GPU in the table, or None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def prepare_device(device, keep_freed_memory=True):
    """Make runs repeatable to the bit, at some cost in speed on a GPU.

    keep_freed_memory: on a CPU, for speed; else return it to the system at once.
    """
    # On a CPU this is for torch.compile, which else sums the embedding's gradient in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif sys.platform == "linux" and device.type == "cpu":
        set_malloc_options(keep_freed_memory)


def set_malloc_options(keep_freed_memory):
    """Have glibc keep freed memory for later tensors, or return it to Linux.

    Faulting in fresh pages for every temporary tensor costs 7 % of a small model's step. Keeping
    them takes up to twice the memory where the sizes of tensors differ, as with --parallel=fsdp.
    """
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8  # parameters of mallopt(3)
    if keep_freed_memory:
        options = {trim_threshold: 2**31 - 1, top_pad: 2**26, mmap_threshold: 2**25}
    else:
        options = {trim_threshold: 2**17, mmap_threshold: 2**17, arena_max: 1}
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        for parameter, value in options.items():
            libc.mallopt(parameter, value)


def to_device(x, device):
    """A tensor, or None, on the device; copied asynchronously to a GPU."""
    if x is None or device.type != "cuda":
        return x if x is None else x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def synchronize(device):
    """Wait for what a GPU still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
