"""Choosing the device, the dtype and whether to compile; preparing the device."""

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from nanolong.errors import UserError, require

# Peak FLOP/s of dense bfloat16 matrix products, from the makers' data sheets: the denominator of
# MFU (model FLOPs utilisation). The first key whose words are in the device's name counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def pick_device(name):
    """The torch.device for "auto" or for a name, tried out: of several processes each has its GPU.

    Raises UserError if it cannot be used. A GPU that is there but does not work is an error, too,
    and never a reason to use the CPU instead.
    """
    if name == "auto":
        has_mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
        has_nvidia = not hidden and any(Path("/proc/driver/nvidia/gpus").glob("*"))
        require(
            name == "cuda" or not has_nvidia,
            f"there is an NVIDIA GPU, but torch {torch.__version__} cannot use it: install the "
            "CUDA build (pip install -r requirements.txt) and a driver that fits it, or give "
            "--device=cpu",
        )
    try:
        device = torch.device(name)
        if device.type == "cuda":
            own = int(os.environ.get("LOCAL_RANK", device.index or 0))
            require(
                device.index in (None, own),
                f"--device={name} would put all processes on one GPU: give --device=cuda",
            )
            device = torch.device("cuda", own)
            torch.cuda.set_device(device)  # Triton launches kernels on the current device
        # On a CPU, denormal numbers, as exp() gives for distant keys, take up to 100 times as long.
        torch.set_flush_denormal(True)
        torch.ones(8, device=device).sum().item()
        return device
    except (RuntimeError, AssertionError, AttributeError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        remedy = "give --device=cpu, cuda, cuda:N or mps, or fix its driver"
        kind = name.partition(":")[0]
        if kind in ("cuda", "mps") and not getattr(torch.backends, kind).is_built():
            reason = f"torch {torch.__version__} was built without it"
            remedy = "give --device=cpu, or install a build of torch that has it"
        raise UserError(f"--device={name} cannot be used ({reason}): {remedy}") from None


def pick_dtype(name, device):
    """The torch.dtype of matrix products, for "auto" or for a name.

    auto: bfloat16 on a GPU that multiplies it natively, and on a CPU with AMX (with AVX512 alone it
    is slower than float32); float16 on other GPUs, else float32.
    """
    require(
        name != "float16" or device.type != "mps",
        "--dtype=float16 needs loss scaling, which mps does not have: give float32 or bfloat16",
    )
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    has_amx = device.type == "cpu" and torch.cpu.get_capabilities().get("amx_tile")
    return torch.bfloat16 if has_amx else torch.float32


def weights_to_load(name):
    """Return the dtype of --weights for GPT.load(); None for auto, which keeps the stored dtype."""
    return None if name == "auto" else getattr(torch, name)


def set_weights_dtype(model, name, dtype):
    """Cast the weights to float32, unless the matrix products are bfloat16.

    name: value of --weights; bfloat16 weights need bfloat16 products, else UserError is raised.
    """
    if dtype == torch.bfloat16:
        return
    require(
        name != "bfloat16",
        "--weights=bfloat16 is for matrix products in bfloat16: give --dtype=bfloat16 too",
    )
    model.float()


def autocast(device, dtype):
    """The context in which matrix products have this dtype."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def compilation_pays(model, n_steps, n_tokens, length, device):
    """Whether torch.compile saves more time in a run than it takes itself.

    n_tokens: tokens of a step, in sequences of this length. By steps and sizes, and no clock, so
    that a resumed run decides alike. On two cores, compiling took 4 to 8 s a layer; a step then
    saved 4 ms a layer, and 2 ms for each 1e9 floating-point operations of a layer
    (experiments/results/maintainers/cpu_train.md).
    """
    flops = n_tokens * flops_per_token(model, length) / len(model.blocks)
    return device.type != "cpu" or n_steps * (0.004 + 2e-12 * flops) >= 8


def pick_compile(wanted, device, pays):
    """Whether to use torch.compile. Raises UserError if it is wanted and cannot work.

    wanted: True, False, or None for auto, which is `pays`.
    """
    if wanted is False or wanted is None and not pays:
        return False
    compilers = ((os.environ.get("CXX") or "g++").split()[0], "clang++", "cl")
    lacks = None
    if device.type == "mps":
        lacks = "another device than mps"
    elif not any(map(shutil.which, compilers)):
        lacks = "a C++ compiler (apt-get install g++)"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        lacks = "the Python headers (apt-get install python3-dev)"
    elif device.type == "cuda" and importlib.util.find_spec("triton") is None:
        lacks = "triton (pip install triton)"
    require(not (wanted and lacks), f"--compile needs {lacks}: give it, or leave --compile out")
    return not lacks


def compile_model(model):
    # Dynamo compiles a function for eight kinds of model and then gives up: reset its count.
    torch.compiler.reset()
    return torch.compile(model)


def flops_per_token(model, length):
    """Count the floating-point operations of a training step per token, as MFU does (PaLM,
    Chowdhery 2022): 6 per weight of a matrix product, and 12 per layer, channel and visible key,
    although causal attention computes half of these.
    """
    products = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    flops = 6 * sum(module.weight.numel() for module in products)
    for block in model.blocks:
        layer = block.attention
        visible = min(length, layer.window + layer.sinks) if layer.window else length
        flops += 12 * visible * layer.o.in_features
    return flops


def peak_flops(device):
    """The peak FLOP/s of a GPU in the table, or None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = [flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)]
    # part of a GPU, and a laptop's, have another peak
    return None if re.search(r"\b(MIG|Laptop)\b", name) else next(iter(found), None)


def peak_memory(device):
    """The most bytes that were in use so far: by tensors on a GPU, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def device_name(device):
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n = torch.get_num_threads()
    return f"{n} CPU thread{'s' if n > 1 else ''}" if device.type == "cpu" else device.type


def prepare_device(device, deterministic):
    """Make runs repeatable to the bit if they are to be, at some cost in speed on a GPU."""
    # On a CPU this is for torch.compile, which else sums the embedding's gradient in any order.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A product that is cut along its sum is added up in float32, not in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    elif sys.platform == "linux" and device.type == "cpu":
        # Have glibc keep freed memory for later tensors: to fault in fresh pages for every
        # temporary tensor costs 7 % of a small model's step.
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # parameters of mallopt(3)
        options = {trim_threshold: 2**31 - 1, top_pad: 2**26, mmap_threshold: 2**25}
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
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
