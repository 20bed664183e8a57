"""Before a script uses the kernels: a small model like its own, with them and without.

Nobody may have tried this GPU with this driver, torch and triton, and somebody may have changed an
operator in eager.py but not its kernel. So train.py, extend.py, evaluate.py and sample.py compare
the logits, the gradients and two decoded tokens of a small model of the same class: its kinds of
layers, head dimension, query groups, position scheme, window and documents. A difference, a failed
compilation or launch turns all kernels off in all processes. NANOLONG_CHECK=0 leaves this out. On
CPU tensors, under Triton's interpreter, only NANOLONG_CHECK=1 does it.
"""

import contextlib
import io
import os
import sys
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kernels
from nanolong import inference

LENGTH = {"cuda": 385, "cpu": 97}  # three of the largest tiles and one token; of the interpreter's
WIDTH = 64  # channels, hidden channels, and tokens of the vocabulary


def choose_kernels(model, device, dtype, docs=False, positions=False):
    """Compare the kernels with plain PyTorch, in every process, and turn them off if they differ.

    model: its class and config are used; dtype: matrix products' dtype; docs, positions: whether it
    is given documents, and position ids that do not count from 0. Returns what computes, in words.
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
    length = LENGTH[device.type]
    index = torch.arange(length)
    rows = []
    # small scores, and a window in which each key counts; scores up to 30, and tiles in the window
    for gain, window in ((1, 19), (6, length // 3 + 2)):
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the text is longer than the context
            torch.default_generator.manual_seed(0)  # not a GPU's generator
            small = make_small(model, length, gain, window).to(device)
            inputs = {"tokens": torch.randint(WIDTH, (2, length))}
            if docs:  # of other lengths in each sequence
                inputs["docs"] = torch.stack((index // (length * 2 // 5), index // (length // 2)))
            if positions or model.config.random_positions:
                inputs["positions"] = index + 5 * (index > length // 2)
            inputs = {name: x.to(device) for name, x in inputs.items()}
            ours = compute(small, inputs, dtype, True)
            plain = compute(small, inputs, dtype, False)
            exact = compute(small.double(), inputs, torch.float64, False)
        # those with hardly a gradient are compared with all gradients
        whole = exact["the gradient"].norm()
        size = {name: x.norm() + 1e-3 * whole for name, x in exact.items()}
        error = {name: float((plain[name] - x).norm() / size[name]) for name, x in exact.items()}
        least = sum(error.values()) / len(error) / 2  # a gradient of few numbers is right by chance
        for name, x in plain.items():
            difference = float((ours[name] - x).norm() / size[name])
            allowed = 2 * max(error[name], least) + torch.finfo(dtype).eps / 4 + 1e-3
            rows.append((name, difference, allowed))
    return rows


def make_small(model, length, gain, window):
    """A model of the same kind, on the CPU: narrow, with two layers of each kind and a context that
    ends within `length` tokens, if the scheme goes beyond. All of its weights are random.
    """
    config = model.config
    kinds = "".join(dict.fromkeys(map(config.layer_kind, range(config.n_layer))))
    extension = dict(config.extension or {"factor": 1.0, "options": {}})
    context = 2 * length if model.pos.bounded else length // 2
    sinks = extension["options"].get("sinks", 10)  # of LM-Infinite: fewer than the context
    original = max(round(context / extension["factor"]), sinks + 1)
    extension["original_length"] = original
    n_kv_head = min(2, config.n_kv_head)
    n_head = n_kv_head * config.n_head // config.n_kv_head
    sizes = {"vocab_size": WIDTH, "n_embd": WIDTH, "mlp_dim": WIDTH, "n_layer": 2 * len(kinds)}
    sizes |= {"n_head": n_head, "n_kv_head": n_kv_head, "layer_pattern": kinds, "dropout": 0.0}
    sizes |= {"block_size": round(original * extension["factor"]), "random_positions": 0}
    sizes |= {"window": min(config.window, window), "sinks": min(config.sinks, 3)}
    extension = extension if config.extension else None
    with contextlib.redirect_stderr(io.StringIO()):  # the model's own notes were printed before
        small = type(model)(replace(config, **sizes, extension=extension))
    with torch.no_grad():
        for name, p in small.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.1)  # a matrix of zeros would hide what is before it
            if name.endswith(("q.weight", "q_norm.weight")):
                p.mul_(gain)
            if name.endswith("gate_bias"):  # heads that forget soon, and heads that hardly do
                p.add_(torch.linspace(5, 0, p.shape[-1]))
    return small


def compute(model, inputs, dtype, on_triton):
    """Logits, the gradient of each parameter and logits of decoded tokens: {name: float64}."""
    kernels.use_triton(on_triton)
    tokens = inputs["tokens"]
    parameters = dict(model.named_parameters())
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    with torch.autocast(tokens.device.type, dtype, enabled=is_16_bit):
        logits = model(**inputs)
        loss = F.cross_entropy(logits.double().mT, tokens.roll(-1, 1), reduction="sum")
        grads = torch.autograd.grad(loss, parameters.values(), materialize_grads=True)
        with torch.no_grad():
            decoded = decode(model, inputs)
    results = {f"the gradient of {name}": x for name, x in zip(parameters, grads, strict=True)}
    results["the gradient"] = torch.cat([x.flatten() for x in grads])
    results |= {"the output": logits, "a decoding step": decoded}
    return {name: x.detach().double() for name, x in results.items()}


def decode(model, inputs):
    """The logits of the last two tokens, from a cache that grows."""
    n = inputs["tokens"].shape[1] - 2
    cache = inference.KVCache()
    logits = []
    for part in (slice(n), slice(n, n + 1), slice(n + 1, n + 2)):
        found = model(**{name: x[..., part] for name, x in inputs.items()}, cache=cache)
        logits.append(found[:, -1])
    return torch.stack(logits[1:])
