"""The operators that the model calls, and which implementation runs where.

reference.py defines rope, attention and the loss. They are Triton kernels on CUDA (sm_80 and newer)
and ROCm, and plain PyTorch (eager.py) elsewhere. Rope and the loss in a compiled graph, attention
of one query without gradient, and the other operators are plain PyTorch everywhere. The scripts
compare the kernels with plain PyTorch before they use them: check.py.

NANOLONG_REFERENCE=1 in the environment forces plain PyTorch. TRITON_INTERPRET=1 runs the kernels on
CPU tensors too, slowly, to test them. Importing this package prints nothing and imports only torch;
triton is imported when a kernel first runs.
"""

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig

import torch
from torch.utils import checkpoint

from . import eager, torch_private

attend_in_chunks = eager.attend_in_chunks
cos_sin = eager.cos_sin
linear = eager.linear
linear_each = eager.linear_each
multiply_groups = eager.multiply_groups
positions_in_documents = eager.positions_in_documents
rotate = eager.rotate
rotate_by = eager.rotate_by
visible_keys = eager.visible_keys


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions: see reference.rope()."""
    # A compiler fuses the formula with the operators around it. The kernel lacks float64.
    is_plain = torch.compiler.is_compiling() or q.dtype == torch.float64
    if is_plain or not triton_runs(q.device):
        return eager.rope(q, k, cos, sin)
    from .rotary import rope as rotary

    return rotary(q, k, cos, sin)


def attention(q, k, v, *, bias=None, length=None, shared=None, **options):
    """Compute softmax(q k^T scale + bias, over the visible keys) v: see reference.attention().

    bias: also sums (B, H, n), which are the gates of reference.attention().
    """
    if bias is not None and bias.dim() == 3:
        options["gates"], bias = bias, None
    # One query meets each key once, so PyTorch's products read a cache as often as a kernel would.
    is_single = q.shape[2] == 1 and not torch.is_grad_enabled()
    is_plain = is_single or length is not None or v.dtype == torch.float64
    if is_plain or not triton_runs(q.device):
        return eager.attention(q, k, v, bias=bias, length=length, **options)
    from . import flash

    q, k = q.to(v.dtype), k.to(v.dtype)  # as in reference.py
    if bias is None and _sdpa_computes(q, k, **options):
        causal, scale = options.get("causal", True), options.get("scale")
        grouped = q.shape[1] != k.shape[1]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return flash.attention(q, k, v, bias=bias, shared=shared, **options)


def _sdpa_computes(q, k, *, window=0, gates=None, docs=None, return_lse=False, **options):
    """Whether PyTorch's SDPA computes attention without a bias: see use_sdpa()."""
    B, H, T, D = q.shape
    has_term = gates is not None or docs is not None or 0 < window < T
    # SDPA's log-sum-exp has no gradient, and its causal mask starts at the first key.
    fits = _is_sdpa_allowed and not (has_term or return_lse) and T == k.shape[2]
    # FlashAttention's and cuDNN's limits. Not for short prompts, because cuDNN plans each shape for
    # 30 ms.
    fits = fits and q.element_size() == 2 and D % 8 == 0 and D <= 128
    return fits and (T >= 128 or (torch.is_grad_enabled() and q.requires_grad))


def linear_cross_entropy(x, weight, targets, reduction="mean", z_loss=0.0):
    """Compute the loss of linear logits. Few logits exist at a time: see the reference."""
    row_losses = None
    # As in rope(): a compiler fuses the formula, and the kernel lacks float64.
    is_plain = torch.compiler.is_compiling() or weight.dtype == torch.float64
    if not is_plain and triton_runs(x.device):
        from .loss import row_losses
    return eager.linear_cross_entropy(x, weight, targets, reduction, z_loss, row_losses)


def selective_checkpoint(block):
    """Wrap block(*args) so that only the results of attention are kept of its activations.

    These are its arguments and attention's output and log-sum-exp, whichever kernel computes them.
    The backward pass recomputes the rest, with the same dropout. If attention is written out in
    plain PyTorch (a bias with gradient, plain chunks of queries), no activation of it is kept.
    """
    make_contexts = checkpoint.create_selective_checkpoint_contexts
    options = {"context_fn": functools.partial(make_contexts, _save_attention)}
    return functools.partial(checkpoint.checkpoint, block, use_reentrant=False, **options)


def _save_attention(context, operator, *args, **kwargs):
    is_attention = "attention" in operator.name()
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if is_attention else policy.PREFER_RECOMPUTE


# -----------------------------------------------------------------------------
# Where Triton runs

_is_allowed = True


def use_triton(allowed):
    """Let Triton kernels run where they can, or let plain PyTorch compute all of this process."""
    global _is_allowed
    _is_allowed = allowed


@torch_private.constant_in_graphs
def triton_runs(device):
    """Whether Triton kernels run on a torch.device."""
    return _is_allowed and _can_run(device)


_is_sdpa_allowed = False


def use_sdpa(allowed):
    """Let PyTorch's SDPA compute attention without a bias, gates, documents or a window on a GPU.

    It takes cuDNN or FlashAttention, whose gradients have other bits at every run. Where plain
    PyTorch computes all (use_triton()), this changes nothing.
    """
    global _is_sdpa_allowed
    _is_sdpa_allowed = allowed


@functools.cache
def _can_run(device):
    """Whether a device has kernels. Says once, on stderr, why a GPU has none."""
    if os.environ.get("NANOLONG_REFERENCE", "0") not in ("", "0"):
        return False
    if device.type != "cuda":
        return device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"
    reason = what_triton_lacks()
    if not reason and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        reason = "it is older than sm_80"
    if reason:
        name = torch.cuda.get_device_name(device)
        print(f"Triton kernels are off on {name}: {reason}; using plain PyTorch", file=sys.stderr)
    return not reason


def what_triton_lacks():
    """A sentence that names a missing package, or None. Triton compiles its launcher with a C
    compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compilers = (os.environ.get("CC") or "gcc", "clang")
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not any(map(shutil.which, compilers)) or not os.path.isfile(headers):
        return "triton needs a C compiler and Python's headers (apt-get install gcc python3-dev)"
    return None
