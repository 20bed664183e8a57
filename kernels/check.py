"""Before a script uses the kernels: RoPE, attention and the loss with the kernels and without.

Nobody may have tried this GPU with this driver, torch and triton. So every process compares at the
model's head dimension, query groups, bias or gates, window and dtype: results and gradients. A
difference, a failed compilation or launch turns all kernels off in all processes.
NANOLONG_CHECK=0 in the environment leaves this out; 1 checks under Triton's interpreter, too.
`make gpu-check` compares documents and more shapes.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kernels

LENGTH = {"cuda": 385, "cpu": 97}  # three of the device's largest tiles and one token


def choose_kernels(model, device, dtype):
    """Compare the kernels with plain PyTorch, in every process, and turn them off if they differ.

    model: a GPT, whose config and scheme are used; dtype: matrix products' dtype. Returns what
    computes, in words.
    """
    runs = kernels.triton_runs(device)
    setting = os.environ.get("NANOLONG_CHECK", "")
    is_checked = runs and (setting == "1" if device.type == "cpu" else setting != "0")
    answers = [(runs, find_fault(model, device, dtype) if is_checked else "")]
    rank = 0
    if dist.is_available() and dist.is_initialized():
        rank, answers = dist.get_rank(), answers * dist.get_world_size()
        dist.all_gather_object(answers, answers[rank])
    faults = [fault for _, fault in answers if fault]
    if faults and rank == 0:
        # after an illegal access this process cannot use the GPU, so it says how to start again
        remedy = "using plain PyTorch, as with NANOLONG_REFERENCE=1"
        print(f"the Triton kernels are off: {faults[0]}; {remedy}", file=sys.stderr)
    if faults or not all(runs for runs, _ in answers):
        kernels.use_triton(False)
        return "plain PyTorch"
    return "triton" if is_checked else "triton, not checked"


def find_fault(model, device, dtype):
    """A sentence about the kernels' fault, "" if none."""
    try:
        for uses_window in {model.config.uses_window(i) for i in range(model.config.n_layer)}:
            inputs = make_inputs(model, LENGTH[device.type], device, dtype)
            window = min(model.config.window, LENGTH[device.type] // 3) if uses_window else 0
            ours, plain = (compute(inputs, window, on_triton) for on_triton in (True, False))
            wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            exact = compute(wide, window, False)
            for name, x in exact.items():
                difference, error = (float((y[name] - x).norm() / x.norm()) for y in (ours, plain))
                if not difference <= 2 * error + 1e-3:  # NaN is a fault, too
                    return f"{name} is off by {difference:.2g}, and plain PyTorch by {error:.2g}"
        return ""
    except Exception as error:  # a compiler that fails, a launch that is refused
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.200}"
    finally:
        kernels.use_triton(True)


def make_inputs(model, length, device, dtype):
    """Random inputs of attention like the model's: a dict. The CPU's generator keeps its state."""
    config, scheme = model.config, model.scheme
    Hk = min(2, config.n_kv_head)
    H = Hk * config.n_head // config.n_kv_head
    heads = {"q": H, "k": Hk, "v": Hk}
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # not a GPU's generator
        inputs = {name: torch.randn(2, n, length, config.head_dim) for name, n in heads.items()}
        x = torch.zeros(1, length, config.n_embd, device=model.embed.weight.device)
        bias = scheme.bias(x, 0, model.make_context(length))
        if bias is not None and bias.dim() < 3:  # the last slopes are the smallest
            bias = bias.detach().cpu()
            inputs["bias"] = bias[-H:] if bias.dim() == 1 else torch.randn(H, bias.shape[1])
        elif bias is not None:  # heads that forget soon, and heads that hardly do
            steps = torch.randn(2, length, H).double() + torch.linspace(5, 0, H)
            inputs["bias"] = F.logsigmoid(steps).cumsum(1).transpose(1, 2)
        inputs["angles"] = torch.rand(length, getattr(scheme, "rotary_dim", 0) // 2) * 100
        inputs["dy"] = torch.randn(2, H, length, config.head_dim)
        vocabulary = min(config.vocab_size, 10007)  # more columns than the loss takes at once
        inputs["hidden"] = torch.randn(30, 64)
        inputs["head"] = torch.randn(vocabulary, 64) / 4
        targets = torch.randint(-1, vocabulary, (30,))
    for name in (*heads, "hidden", "head"):
        inputs[name] = inputs[name].to(dtype)
    inputs["targets"] = targets
    return {name: x.to(device) for name, x in inputs.items()}


def compute(inputs, window, on_triton):
    """Rotate, attend, take the loss, and differentiate: results and gradients, {name: float64}."""
    kernels.use_triton(on_triton)
    inputs = dict(inputs)
    angles, dy, targets = (inputs.pop(name) for name in ("angles", "dy", "targets"))
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, v, *_ = leaves.values()
    if angles.numel():
        q, k = kernels.rope(q, k, angles.cos(), angles.sin())
    y = kernels.attention(q, k, v, window=window, bias=leaves.get("bias"))
    losses = kernels.linear_cross_entropy(leaves["hidden"], leaves["head"], targets, "none")
    loss = (y.double() * dy).sum() + losses.double().sum()
    grads = torch.autograd.grad(loss, leaves.values())
    results = {f"the gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}
    return {
        name: x.detach().double()
        for name, x in (results | {"the output": y, "the loss": losses}).items()
    }
