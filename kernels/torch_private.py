"""All that nanoLong uses of torch without a public name, and what stands in where torch lacks it.

Torch may rename them in any version, so each has a fallback, which computes the same numbers in
more time or memory. No other file has such a name (tests/test_layout.py), but for model.py, which
overrides Module._apply: a torch without it would leave constants on the CPU, and a GPU refuse them.
"""

import contextlib
import logging

import torch

# Under torch.compile a selective checkpoint warns that in-place operators would go wrong in it.
# There are none in a block, so the warning is silenced. It has to be done here, because a traced
# function cannot set a log level. Under another name it would be printed.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def multiply_each(tensors, factor):
    """Multiply tensors by a number, in place and in one launch, or one by one."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
        return
    for x in tensors:
        x.mul_(factor)


def constant_in_graphs(function):
    """Have torch.compile call a function while it traces, and keep the result.

    It is torch.compiler.assume_constant_result, without its import of the compiler, which takes
    seconds. A torch that reads another attribute traces the function.
    """
    function._dynamo_marked_constant = True
    return function


def graph_errors():
    """The error of torch.compile for what it cannot trace; without it none, and torch's is seen."""
    return getattr(torch._dynamo.exc, "Unsupported", ())


def keep_address(x):
    """Promise that a tensor stays where it is; without it a CUDA graph copies it at each step."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.mark_static_address(x)


muon_step = getattr(getattr(torch.optim, "_muon", None), "_zeropower_via_newtonschulz", None)


def muon_in_float32():
    """Have torch.optim.Muon multiply in float32 on a CPU. It takes bfloat16, which a CPU without
    instructions for it multiplies several times as slowly, as a torch without this name still does.
    """
    if muon_step:
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalize


def orthogonalize(grad, coefficients, steps, eps):
    """Compute Newton and Schulz's iteration of Muon (Jordan 2024) for a matrix, on a CPU in its dtype."""
    if not grad.is_cpu:
        return muon_step(grad, coefficients, steps, eps)
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x
