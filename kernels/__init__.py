"""The operators that the model calls, and which implementation runs where.

Each operator has one signature; reference.py defines rope, attention (which has one argument more
there, for the probabilities) and the loss. rope and attention are Triton kernels on CUDA (sm_80 and
newer) and ROCm, and plain PyTorch elsewhere; the others are plain PyTorch everywhere.

NANOLONG_REFERENCE=1 in the environment forces plain PyTorch. TRITON_INTERPRET=1 runs the kernels on
CPU tensors too, slowly, to test them. first_call.py checks each kernel on the device
at hand, and eager.py takes its place if it computes something else.

Importing this package prints nothing and imports only torch; triton is imported when a kernel first
runs.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from . import eager, first_call
from .eager import (
    linear,
    linear_cross_entropy,
    rms_norm,
)

__all__ = [
    "attention",
    "check_kernels",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "selective_checkpoint",
    "triton_runs",
    "what_triton_lacks",
]


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions: see reference.rope()."""
    # float64 is for checking, and the kernels do not take it
    has_kernel = _triton_runs(q.device.type, q.device.index) and q.dtype != torch.float64
    if not has_kernel or not first_call.rope_passes(q, k, cos):
        return eager.rope(q, k, cos, sin)
    from .rotary import rope as rotary

    return rotary(q, k, cos, sin)


def attention(
    q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None,
    causal=True, scale=None, return_lse=False, length=None, plan=None,
):  # fmt: skip
    """Compute softmax(q k^T scale + bias, over the visible keys) v: see reference.attention()."""
    options = {
        "bias": bias,
        "relative": relative,
        "window": window,
        "sinks": sinks,
        "positions": positions,
        "docs": docs,
        "causal": causal,
        "scale": scale,
        "return_lse": return_lse,
    }
    if not _triton_runs(q.device.type, q.device.index) or v.dtype == torch.float64:
        return eager.attention(q, k, v, **options, length=length)
    q, k = q.to(v.dtype), k.to(v.dtype)  # as in reference.py
    needs_grad = _needs_grad(q, k, v, bias, relative)
    decodes = length is not None or q.shape[2] <= 8 and not needs_grad
    if not first_call.attention_passes(decodes, needs_grad, q, k, length, **options):
        return eager.attention(q, k, v, **options, length=length)
    from . import decode, flash

    if decodes:
        return decode.attention(q, k, v, **options, length=length)
    return flash.attention(q, k, v, **options, plan=plan)


def _needs_grad(q, k, v, bias, relative):
    """Whether attention has to be differentiated."""
    keys, values, offsets = relative or (None, None, None)
    tensors = [q, k, v, bias, keys, values, *(offsets or ())]
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# -----------------------------------------------------------------------------
# Selective activation checkpointing

# Under torch.compile a selective checkpoint warns that in-place operators would go wrong in it.
# There are none in a block, so the warning is silenced. It has to be done here, because a traced
# function cannot set a log level.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def selective_checkpoint(block):
    """Wrap block(*args) so that of its activations only the results of attention are kept.

    That is, its arguments and attention's output and log-sum-exp, whichever kernel computes them.
    The backward pass recomputes the rest, with the same dropout. Where attention is written out in
    plain PyTorch (relative vectors, a bias with gradient), nothing of it is kept.
    """
    context_fn = functools.partial(create_selective_checkpoint_contexts, _save_attention)
    return functools.partial(checkpoint, block, use_reentrant=False, context_fn=context_fn)


def _save_attention(context, operator, *args, **kwargs):
    if "attention" in operator.name():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# -----------------------------------------------------------------------------
# Where Triton runs


def triton_runs(device):
    """Whether Triton kernels run on a torch.device."""
    return _triton_runs(device.type, device.index)


_answers = {}


def _triton_runs(device, index):
    """Whether Triton kernels run on a device: decided once."""
    if (device, index) not in _answers:
        _answers[device, index] = _decide_triton_runs(device, index)
    return _answers[device, index]


def check_kernels(model, inputs, context):
    """Check the kernels that training needs, before anything is compiled: the verdict, for the log.

    inputs: of the model, a dict by name; context: a context manager for the forward pass. A kernel
    that has failed in one process is replaced by plain PyTorch in all of them.
    """
    device = next(model.parameters()).device
    on_triton = triton_runs(device)
    if on_triton:
        # Call each kernel once. A forward pass is enough: a check includes the gradients.
        inputs = {name: inputs[name] for name in ("tokens", "positions", "docs")}
        inputs = {name: part for name, part in inputs.items() if part is not None}
        inputs = {name: x[:1, :16] if x.dim() > 1 else x[:16] for name, x in inputs.items()}
        with context:
            model(**inputs)
    first_call.share_faults(device)
    return first_call.describe(device) if on_triton else "plain PyTorch"


# torch.compile calls it while it traces. This is what torch.compiler.assume_constant_result sets,
# without importing the compiler here.
_triton_runs._dynamo_marked_constant = True


def _decide_triton_runs(device, index):
    """Decide it, and print why if kernels cannot run on a GPU."""
    if os.environ.get("NANOLONG_REFERENCE", "0") not in ("", "0"):
        return False
    if device != "cuda":
        return device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"
    reason = what_triton_lacks()
    if not reason and not torch.version.hip and torch.cuda.get_device_capability(index) < (8, 0):
        reason = "it is older than sm_80"
    if reason:
        name = torch.cuda.get_device_name(index)
        print(f"Triton kernels are off on {name}: {reason}; using plain PyTorch", file=sys.stderr)
    return not reason


def what_triton_lacks():
    """What is not installed here, or None. Triton compiles its launcher with a C compiler."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compilers = (os.environ.get("CC") or "gcc", "clang")
    if not any(shutil.which(compiler) for compiler in compilers):
        return "there is no C compiler, which triton needs (install gcc)"
    if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "the Python headers are missing, which triton needs (apt-get install python3-dev)"
    return None
