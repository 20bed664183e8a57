"""The operators that the model calls: rope(), attention(), linear_cross_entropy().

Each has one signature, stated in reference.py, and this file is the only one that knows on which device which implementation runs:
rope and attention are Triton kernels on CUDA (sm_80 and newer) and ROCm, and plain PyTorch elsewhere; linear_cross_entropy is plain PyTorch on every device.
NANOLONG_REFERENCE=1 in the environment forces plain PyTorch everywhere; TRITON_INTERPRET=1 runs the kernels on CPU tensors too, slowly, to test them.
Importing this package prints nothing and imports nothing but torch; triton is imported when a kernel first runs.
"""
import logging
import os
import sys

import torch

from . import reference
from .reference import linear_cross_entropy

__all__ = ["rope", "attention", "linear_cross_entropy"]


def rope(q, k, cos, sin):
    """reference.rope(), by kernels/rotary.py where Triton runs."""
    if _triton_runs(q.device.type, q.device.index) and q.dtype.itemsize < 8:  # float64 is for checking, and only the reference has it
        from .rotary import rope as kernel
        return kernel(q, k, cos, sin)
    return reference.rope(q, k, cos, sin)


def attention(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None, return_lse=False, length=None):
    """reference.attention(), where Triton runs by kernels/flash.py, or, of few queries that need no gradient, by kernels/decode.py."""
    kernel = reference.attention
    if _triton_runs(q.device.type, q.device.index) and v.dtype.itemsize < 8:
        from .decode import attention as decode
        from .flash import attention as flash
        q, k = q.to(v.dtype), k.to(v.dtype)  # as the reference: under autocast a norm leaves them wider
        given = (q, k, v, bias, *(() if relative is None else (*relative[:2], *(relative[2] or ()))))
        kernel = decode if length is not None else flash if q.shape[2] > 8 or torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given) else decode
    more = {} if length is None else {"length": length}
    return kernel(q, k, v, bias=bias, relative=relative, window=window, sinks=sinks, positions=positions, docs=docs, causal=causal, scale=scale, return_lse=return_lse, **more)


logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # under torch.compile the next one is warned of in four lines: it asks for no in-place operators, and there are none


def keeping_attention(block):
    """block(*args), of whose activations only the arguments and attention's output and log-sum-exp are kept, whichever kernel makes them: the backward pass computes the rest again, with the
    same dropout. Of attention that is written out in plain PyTorch (relative vectors; a bias with gradient) nothing is kept."""
    from functools import partial
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    return partial(checkpoint, block, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _kept))


def _kept(context, operator, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy
    return CheckpointPolicy.MUST_SAVE if "attention" in operator.name() else CheckpointPolicy.PREFER_RECOMPUTE


def triton_runs(device):
    """Whether Triton kernels run on a torch.device."""
    return _triton_runs(device.type, device.index)


_asked = {}


def _triton_runs(device, index):
    """Whether Triton kernels run on a device: asked once."""
    if (device, index) not in _asked:
        _asked[device, index] = _ask(device, index)
    return _asked[device, index]


_triton_runs._dynamo_marked_constant = True  # torch.compile calls it while tracing: torch.compiler.assume_constant_result, without importing the compiler here


def _ask(device, index):
    """A GPU on which Triton kernels do not run says so in one line."""
    if os.environ.get("NANOLONG_REFERENCE", "0") not in ("", "0"):
        return False
    if device == "cpu":
        return os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device != "cuda":
        return False
    import importlib.util
    import shutil
    import sysconfig
    why = ("triton is not installed" if importlib.util.find_spec("triton") is None else
           "there is no C compiler, with which triton builds its launcher (install gcc)" if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang"))) else
           "the Python headers are missing, with which triton builds its launcher (as in apt-get install python3-dev)" if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")) else
           "it is older than sm_80" if not torch.version.hip and torch.cuda.get_device_capability(index) < (8, 0) else "")
    if why:
        print(f"Triton kernels are off on {torch.cuda.get_device_name(index)}: {why}; plain PyTorch serves instead", file=sys.stderr)
    return not why
