"""Loss, gradients and greedy text on the simulated GPU, and on the CPU: a line of JSON a case.

    cases.py SCHEME DTYPE [OPTION ...]

The GPU's side goes the whole way of a GPU: Triton's launcher, autograd's device threads, a captured
graph for the decoding step.
"""

import contextlib
import itertools
import json
import sys
import warnings

import counts
import torch

from model import GPT, POSITIONS, GPTConfig
from nanolong.errors import UserError

T = 100  # not a multiple of 16
ORIGINAL_LENGTH = 64
SHAPE = {"vocab_size": 257, "block_size": ORIGINAL_LENGTH, "n_layer": 2, "n_head": 4, "n_embd": 64}
OPTIONS = {
    "plain": {},
    "window and sinks": {"window": 32, "sinks": 4},
    "grouped queries": {"n_kv_head": 2, "qk_norm": "head"},
    "documents": {},
    "positions": {},
    "checkpointing": {},
    "hybrid": {"window": 32, "layer_pattern": "WF", "norm_position": "both", "qk_norm": "all"},
    "learned sinks": {"sink_scores": True, "n_kv_head": 2, "window": 40},
    "score scale": {"score_scale": "logn", "n_kv_head": 2, "window": 40},
    "GPT-2's shape": {"norm": "layernorm", "mlp": "gelu", "bias": "all"},
}
METHOD_OPTIONS = {
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.5] * 4 + [2.0] * 4},
    "scale": {"scale": 1.1},
}


def make_model(pos, option, method, device):
    """A model with all weights random; extended by 2, so that T lies in its context."""
    torch.manual_seed(0)
    length = {"block_size": T} if method == "none" else {}
    model = GPT(GPTConfig(**{**SHAPE, **length}, pos=pos, **OPTIONS[option]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.05)
    if method != "none":
        model.extend(method, 2.0, **METHOD_OPTIONS.get(method, {}))
    model.activation_checkpointing = option == "checkpointing"
    return model.to(device).train()


def make_batch(pos, option):
    """Tokens, targets, positions and documents of two sequences, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 257, (2, T), generator=generator)
    positions = docs = None
    if option == "documents":
        docs = (torch.arange(T) // 40).repeat(2, 1)
    if option == "positions":
        positions = torch.arange(T)
        if not POSITIONS[pos].by_index and not POSITIONS[pos].bounded:
            positions = positions + positions // 10
    return x, x.roll(-1), positions, docs


def measure(pos, option, method, device, dtype):
    """The loss, the gradients in float64, and greedy tokens; or what was refused."""
    context = torch.autocast(device, dtype) if dtype != torch.float32 else contextlib.nullcontext()
    try:
        model = make_model(pos, option, method, device)
        batch = [None if x is None else x.to(device) for x in make_batch(pos, option)]
        with context:
            loss = model(*batch)
        loss.backward()
        grads = {
            name: p.grad.cpu().double()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        model.eval()
        text = batch[0][:, :20]
        if option == "plain" and not model.pos.is_dynamic and not model.pos.needs_whole_text:
            text = [[5, 6, 7], [8, 9, 10, 11, 12]]  # of unequal length
        counts.reset()
        with context:
            tokens = [x.tolist() for x in model.generate(text, 12, temperature=0)]
    except UserError as error:
        return {"refused": str(error)}
    return {"loss": loss.item(), "grads": grads, "tokens": tokens}


def largest_difference(found, expected):
    """The largest relative error of a parameter's gradient; that of a key's bias may be 0."""
    scale = max(grad.norm() for grad in expected.values())
    return max(
        float((found[name] - grad).norm() / (grad.norm() + 1e-3 * scale))
        for name, grad in expected.items()
    )


def run_case(pos, option, method, dtype):
    expected = measure(pos, option, method, "cpu", dtype)
    found = measure(pos, option, method, "cuda", dtype)
    row = {"scheme": pos, "option": option, "method": method, "dtype": str(dtype)}
    if "refused" in expected or "refused" in found:
        return {**row, "refused": expected.get("refused"), "same": expected == found}
    same_names = found["grads"].keys() == expected["grads"].keys()
    return {
        **row,
        "loss": found["loss"],
        "loss of the CPU": expected["loss"],
        "gradients": largest_difference(found["grads"], expected["grads"]) if same_names else None,
        "tokens equal": found["tokens"] == expected["tokens"],
        "graph launches": counts.counts()["graph launches"],
        "illegal": counts.counts()["illegal"],
    }


def main():
    pos, dtype, *options = sys.argv[1:]
    for option, method in itertools.product(options or OPTIONS, POSITIONS[pos].methods):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = run_case(pos, option, method, getattr(torch, dtype))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
