"""Before a script uses the kernels: attention like the model's, with them and without.

Nobody may have tried this GPU with this driver, torch and triton, and somebody may have changed an
operator in eager.py but not its kernel. So train.py, extend.py, evaluate.py and sample.py compare
RoPE, attention and the loss, and their gradients, on random numbers: with the head dimension, query
groups, kind of bias, windows, documents and dtype of the model, and by SDPA where it may compute
attention. A difference, a failed compilation or launch turns all kernels off in all processes.
NANOLONG_CHECK=0 leaves this out. On CPU tensors, under Triton's interpreter, only NANOLONG_CHECK=1
does it. `make gpu-check` compares more.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kernels

LENGTH = {"cuda": 385, "cpu": 97}  # three of the largest tiles and one token; of the interpreter's
CACHED = 20  # keys before the first query; none where SDPA may run, which takes no cache


def choose_kernels(model, device, dtype, docs=False, positions=False):
    """Compare the kernels with plain PyTorch, in every process, and turn them off if they differ.

    model: a GPT, whose config and scheme are used; dtype: matrix products' dtype; docs, positions:
    whether it is given documents, and position ids that do not count from 0. Returns what computes,
    in words.
    """
    runs = kernels.triton_runs(device)
    setting = os.environ.get("NANOLONG_CHECK", "")
    is_checked = runs and (setting == "1" if device.type == "cpu" else setting != "0")
    answers = [(runs, find_fault(model, device, dtype, docs, positions) if is_checked else "")]
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


def find_fault(model, device, *arguments):
    """A sentence about the kernels' fault, "" if none; arguments are choose_kernels()'s."""
    try:
        for name, difference, allowed in compare(model, device, *arguments):
            if not difference <= allowed:  # NaN is a fault, too
                return f"{name} differs by {difference:.2g}, and {allowed:.2g} is allowed"
        return ""
    except Exception as error:  # a compiler that fails, a launch that is refused
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.200}"
    finally:
        kernels.use_triton(True)


def compare(model, device, dtype, docs, positions):
    """Rows of a result's name, the relative difference between the kernels and plain PyTorch, and
    the difference that is allowed: twice plain PyTorch's error, which is taken against float64.
    """
    config = model.config
    length = LENGTH[device.type]
    index = torch.arange(length)
    mask = {"return_lse": config.sink_scores, "scale": config.head_dim**-0.5}
    if docs:  # of other lengths in each sequence
        mask["docs"] = torch.stack((index // (length * 2 // 5), index // (length // 2))).to(device)
    if positions or config.random_positions:
        mask["positions"] = (index + 5 * (index > length // 2)).to(device)
    rows = []
    # small scores, and a window in which each key counts; scores up to 30, and tiles in the window
    for gain, window in ((1, 19), (6, length // 3 + 2)):
        tensors = make_tensors(model, length, gain, dtype, device)
        for uses_window in {config.uses_window(layer) for layer in range(config.n_layer)}:
            options = {**mask, "window": 0, "sinks": 0}
            if uses_window:
                options["window"] = min(config.window, window)
                options["sinks"] = min(config.sinks, 3)
            ours = compute(tensors, options, True)
            plain = compute(tensors, options, False)
            wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
            exact = compute(wide, options, False)
            rows += compare_results(ours, plain, exact, torch.finfo(dtype).eps)
    return rows


def make_tensors(model, length, gain, dtype, device):
    """Random inputs of attention like the model's: a dict. The CPU's generator keeps its state."""
    config, scheme = model.config, model.pos
    Hk = min(2, config.n_kv_head)
    H = Hk * config.n_head // config.n_kv_head
    D = config.head_dim
    heads = {"q": H, "k": Hk, "v": Hk}
    bias = scheme.bias(length, 0)
    vocabulary = min(config.vocab_size, 10007)  # more columns than the loss takes at once
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # not a GPU's generator
        tensors = {name: torch.randn(2, n, length, D).to(dtype) for name, n in heads.items()}
        tensors["q"] *= gain
        if bias is not None and bias.dim() == 1:  # slopes, of which the last are the smallest
            tensors["bias"] = bias.detach().cpu()[-H:].clone()
        elif bias is not None:
            tensors["bias"] = torch.randn(H, bias.shape[1])
        if type(scheme).gates is not type(model.nope).gates:
            # heads that forget soon, and heads that hardly do
            steps = torch.randn(2, length, H).double() + torch.linspace(5, 0, H)
            tensors["gates"] = F.logsigmoid(steps).cumsum(1).transpose(1, 2)
        tensors["hidden"] = torch.randn(30, 64).to(dtype)
        tensors["head"] = torch.randn(vocabulary, 64).to(dtype) / 4
        trained = {name: x.requires_grad_() for name, x in tensors.items()}
        if bias is not None:
            trained["bias"].requires_grad_(bias.requires_grad)
        angles = torch.rand(length, getattr(scheme, "rotary_dim", 0) // 2) * 100
        fixed = {"cos": angles.cos(), "sin": angles.sin()}
        fixed["dy"] = torch.randn(2, H, length, D)
        fixed["targets"] = torch.randint(-1, vocabulary, (30,))
    return {name: x.to(device) for name, x in (trained | fixed).items()}


def compute(tensors, options, on_triton):
    """Rotate, attend, take the loss, and differentiate: results and gradients, {name: float64}."""
    kernels.use_triton(on_triton)
    tensors = dict(tensors)
    cos, sin, dy, targets = (tensors.pop(name) for name in ("cos", "sin", "dy", "targets"))
    leaves = {name: x.detach().requires_grad_(x.requires_grad) for name, x in tensors.items()}
    q, k, v, *_ = leaves.values()
    if cos.numel():
        q, k = kernels.rope(q, k, cos, sin)
    terms = {name: x for name, x in leaves.items() if name in ("bias", "gates")}
    cached = 0 if kernels.sdpa_is_allowed() else CACHED
    y = kernels.attention(q[:, :, cached:], k, v, **terms, **options)
    loss = 0.0
    if options["return_lse"]:
        y, lse = y
        loss = lse.double().sum()
    losses = kernels.linear_cross_entropy(leaves["hidden"], leaves["head"], targets, "none")
    loss = loss + (y.double() * dy[:, :, cached:]).sum() + losses.double().sum()
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, leaves.values())
    results = {f"the gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}
    results |= {"the output": y, "the loss": losses}
    return {name: x.detach().double() for name, x in results.items()}


def compare_results(ours, plain, exact, eps):
    """Rows of compare() for three results of compute(); eps: relative precision of the dtype."""
    error = {name: float((plain[name] - x).norm() / x.norm()) for name, x in exact.items()}
    least = sum(error.values()) / len(error) / 2  # a gradient of few numbers is right by chance
    for name, x in exact.items():
        difference = float((ours[name] - plain[name]).norm() / x.norm())
        yield name, difference, 2 * max(error[name], least) + eps + 1e-3
