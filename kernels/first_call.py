"""The first time that a kernel runs on a device, compare it with plain PyTorch.

Nobody may have tried this device with this driver, torch and triton. So before a kernel serves its
first call, self_check.py compares it with eager.py, forward and backward, at the dtype, head
dimension, score term and mask of the call. A kernel that differs, or that cannot be compiled or
launched, is replaced by plain PyTorch for all calls of this case, forward and backward together. So
is one whose operator has changed in eager.py: see definition.py.

A verdict is remembered in the user's cache folder: a file for each case, device, driver, versions
and sources. Delete it to check again. NANOLONG_CHECK=0 trusts all kernels. On CPU tensors, under
Triton's interpreter, only NANOLONG_CHECK=1 checks: it takes a second or more for each case.

The check runs in a thread of its own. The caller may be tracing for torch.compile, may compute
without gradients or under autocast, and none of this reaches another thread.
"""

import functools
import hashlib
import json
import operator
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from . import definition
from .self_check import FILES, Case, find_fault

_faults = {}  # (device type, index, case) -> what is wrong with the kernel, "" if nothing


# -----------------------------------------------------------------------------
# What the dispatch asks. torch.compile traces these functions, and takes _passes() as a constant.


def rope_passes(q, k, cos):
    """Whether the kernel may rotate q and k."""
    rotated = 2 * operator.index(cos.shape[-1])
    return _passes(q.device.type, q.device.index, "rope", *_shape(q, k), "", "", rotated)


def attention_passes(
    decodes, needs_grad, q, k, length, *, bias, relative, window, positions, docs, causal, **_
):
    """Whether kernels/decode.py, or else flash.py, may serve a call of attention()."""
    if decodes:
        kernel = "decoding"
    else:
        kernel = "attention" if needs_grad else "attention without gradient"
    term = "no term"
    if bias is not None:
        term = "slopes" if bias.dim() == 1 else "table"
    elif relative is not None:
        keys, values, offsets = relative
        term = "vectors" if keys.shape[0] == 1 else "vectors by head"
        term += "" if values is None else " with values"
        term += "" if offsets is None else " with offsets"
    words = {
        "window": window and positions is None,
        "window over positions": window and positions is not None,
        "documents": docs is not None,
        "all keys": not causal,
        "length": length is not None,
    }
    mask = ", ".join([word for word, holds in words.items() if holds])
    return _passes(q.device.type, q.device.index, kernel, *_shape(q, k), term, mask)


def _shape(q, k):
    """The dtype, the head dimension, and the query heads for each key head."""
    # index(): while torch.compile traces, sizes may be symbols
    group = operator.index(q.shape[1]) // operator.index(k.shape[1])
    return q.dtype, operator.index(q.shape[3]), group


def _passes(device, index, *fields):
    """Whether a kernel may serve a case, given by its fields; checks it the first time."""
    case = Case(*fields)  # in the order of self_check.py
    # A verdict with gradients also holds without: evaluation computes what training does.
    for kernel in (case.kernel.removesuffix(" without gradient"), case.kernel):
        fault = _faults.get((device, index, (kernel, *case[1:])))
        if fault is not None:
            return not fault
    # In a capture nothing else may run. What is captured has run before, and was checked.
    in_capture = device == "cuda" and torch.cuda.is_current_stream_capturing()
    if in_capture or not _is_enabled(device):
        return True
    with ThreadPoolExecutor(1) as executor:
        fault = executor.submit(_check, case, torch.device(device, index)).result()
    _faults[device, index, case] = fault
    return not fault


# what torch.compiler.assume_constant_result sets
_passes._dynamo_marked_constant = True


def _is_enabled(device):
    setting = os.environ.get("NANOLONG_CHECK", "")
    return setting == "1" if device == "cpu" else setting != "0"


# -----------------------------------------------------------------------------
# What training asks


def share_faults(device):
    """Give all processes the faults of each. Call it in all of them, before compiling anything."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = {case: fault for (_, _, case), fault in _faults.items() if fault}
    of_processes = [None] * dist.get_world_size()
    dist.all_gather_object(of_processes, mine)
    for faults in of_processes:
        for case, fault in faults.items():
            _faults[device.type, device.index, case] = fault


def describe(device):
    """Say what computes on a device on which Triton runs."""
    where = (device.type, device.index)
    replaced = [str(key[2]) for key, fault in _faults.items() if fault and key[:2] == where]
    if replaced:
        return f"triton, but plain PyTorch for {' and '.join(sorted(replaced))}"
    return "triton" if _is_enabled(device.type) else "triton, not checked"


def has_replaced(kernel):
    """Whether plain PyTorch serves a case of this kernel."""
    return any(fault and case.kernel == kernel for (_, _, case), fault in _faults.items())


# -----------------------------------------------------------------------------
# Verdicts, in memory and on disk


def _check(case, device):
    """What is wrong with a kernel, "" if nothing: remembered, or found now. Prints a fault."""
    operator_name = "rope" if case.kernel == "rope" else "attention"
    if definition.has_changed(operator_name):
        fault = f"eager.{operator_name}() has changed since its kernels were tested"
        _print_once(f"{fault}: using plain PyTorch, see kernels/README.md")
        return fault
    key = {**environment(device), **_sources(case.kernel)}
    key |= {name: str(value) for name, value in case._asdict().items()}
    fault = _read(key)
    is_lost = False
    if fault is None:
        try:
            fault = find_fault(case, device)
            _write(key, fault)
        except Exception as error:  # a compiler that fails, a launch that is refused
            first_line = (str(error).strip().splitlines() or [""])[0]
            fault = f"{type(error).__name__}: {first_line[:200]}"
            # Not remembered: it may be a full disk, or a compiler that Ctrl-C has stopped.
            is_lost = _is_lost(device)
            if is_lost:
                _write(key, fault)
    if fault:
        _print_once(f"{case} is off on {key['device']}: {fault}; using plain PyTorch")
    if is_lost:
        raise RuntimeError(
            "this process cannot use the GPU any more, after the kernel named above: start again, "
            "and plain PyTorch replaces it (NANOLONG_REFERENCE=1 replaces all kernels)"
        )
    return fault


def _is_lost(device):
    """Whether a kernel has left this process without GPU, as an illegal access does."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@functools.cache
def environment(device):
    """The device, its driver and the versions that a verdict holds for."""
    import triton

    driver = "unknown"
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        if os.path.exists(file):
            driver = Path(file).read_text().partition("\n")[0]
    name = "a CPU, interpreted"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


@functools.cache
def _sources(kernel):
    """A hash of a kernel and of what checks it."""
    files = [Path(__file__).with_name(f"{x}.py") for x in (FILES[kernel], "eager", "self_check")]
    text = b"".join(file.read_bytes() for file in files)
    return {"sources": hashlib.sha256(text).hexdigest()[:16]}


def _cache_file(key):
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder / "nanolong" / "kernels" / f"{name}.json"


def _read(key):
    """The remembered verdict, or None."""
    try:
        file = _cache_file(key)
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["key"] == key and isinstance(record["fault"], str):
            return record["fault"]
        error = "the verdict of another case"
    except (OSError, RuntimeError):  # it is not there, or _write() will say what is wrong
        return None
    except (ValueError, KeyError, TypeError) as reason:
        error = reason
    _print_once(f"{file} is damaged ({error!r:.80}): checking this kernel again")
    return None


def _write(key, fault):
    """Remember a verdict, by one rename: other processes may do the same at this moment."""
    try:
        file = _cache_file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump({"fault": fault, "key": key}, new, indent=1)
        os.replace(new.name, file)
    except (OSError, RuntimeError) as error:
        _print_once(f"kernels will be checked again at every start: {error}")


@functools.cache
def _print_once(line):
    print(line, file=sys.stderr)
