"""Compares a text that processes share with the same text on one process; started by torchrun.

    torchrun --standalone --nproc_per_node=2 tests/parallel_cases.py

Prints JSON: case -> the relative errors of the loss and of the gradients. In float64, so that what
is left is a mistake; each process computes the whole text too, and takes that as the truth.
"""

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import rope_scaling
from model import GPT, POSITIONS, ContextLengthWarning, GPTConfig
from nanolong.entry import load_entries
from nanolong.parallel.processes import join_processes
from nanolong.parallel.sequence import gather_tokens, share_sequences

T = 48
# what a longrope table needs: a factor for each pair of channels
LONGROPE = {"long_factor": [1.0, 2.0, 3.0, 4.0]}


def cases():
    """Yield (name, settings of GPTConfig, changes): batch, documents, positions, extension."""
    for pos in POSITIONS:
        yield pos, {"pos": pos}, {}
        yield f"{pos} grouped", {"pos": pos, "n_kv_head": 2}, {}
    for pos in ("rope", "alibi", "shaw"):
        yield f"{pos} window", {"pos": pos, "window": 7, "sinks": 2, "n_kv_head": 1}, {}
        yield f"{pos} docs", {"pos": pos}, {"docs": True}
        yield f"{pos} recomputed", {"pos": pos}, {"recompute": True}
    for pos in ("rope", "learned", "sinusoidal"):
        yield f"{pos} positions", {"pos": pos, "random_positions": 80}, {"positions": True}
    yield "layers without positions", {"pos": "rope", "layer_pattern": "FN"}, {}
    yield "qk norm", {"pos": "rope", "qk_norm": True, "bias": "qkv"}, {}
    both_kinds = {"layer_pattern": "WF", "window": 7, "rope_local_base": 50.0}
    yield "qk norm of all heads", {"qk_norm": "all", "norm_position": "both", **both_kinds}, {}
    yield "hybrid yarn", both_kinds, {"extension": ("yarn", {})}
    yield "learned sinks", {"pos": "t5", "sink_scores": True, "n_kv_head": 2}, {}
    logn = {"score_scale": "logn", "score_scale_length": 8, "n_kv_head": 2}
    yield "logn", {"pos": "alibi", **logn}, {"docs": True}
    llama4 = {"score_scale": "llama4", "score_scale_length": 8, "random_positions": 80}
    yield "llama4's score scale", {"pos": "rope", **llama4}, {"positions": True}
    yield "gpt2", {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all"}, {}
    for method in rope_scaling.METHODS:
        options = LONGROPE if method == "longrope" else {}
        yield f"rope {method}", {"pos": "rope"}, {"extension": (method, options)}
    for pos in ("alibi", "t5", "shaw", "xl"):
        yield f"{pos} pi", {"pos": pos}, {"extension": ("pi", {})}
    yield "alibi dynamic-pi", {"pos": "alibi"}, {"extension": ("dynamic-pi", {})}


def make_model(settings):
    torch.manual_seed(0)
    defaults = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": 50}
    model = GPT(GPTConfig(**{**defaults, **settings}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model


def make_inputs(model, docs=False, positions=False):
    """Tokens, targets of which some are not scored, positions and documents."""
    torch.manual_seed(1)
    tokens = torch.randint(50, (2, T))
    targets = torch.randint(-1, 50, (2, T))
    doc_ids = (torch.arange(T) // 13).expand(2, T) if docs else None
    pos = model.sample_positions(2, T, 5) if positions else None
    return tokens, targets, pos, doc_ids


def loss_and_gradients(model, inputs):
    """The loss of each token that this process computes, and the gradients of their sum."""
    model.zero_grad()
    loss = model(*inputs, reduction="none")
    loss.sum().backward()
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: p.grad.clone() for name, p in used.items()}


def compare(settings, docs=False, positions=False, recompute=False, extension=None):
    """The relative errors of the losses by token and of the gradients."""
    if extension:
        # an input of three times the original length, so that dynamic methods rescale
        settings = {**settings, "block_size": T // 3}
    model = make_model(settings)
    if extension:
        method, options = extension
        model.extend(method, 4.0, **options)
    model.double()
    model.activation_checkpointing = recompute
    inputs = make_inputs(model, docs, positions)
    wanted, wanted_gradients = loss_and_gradients(model, inputs)
    share_sequences(model, dist.get_world_size(), [T])
    loss, gradients = loss_and_gradients(model, inputs)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    # a bias of the keys has no gradient but rounding: softmax does not see it
    floor = 1e-6 * max(gradient.norm() for gradient in wanted_gradients.values())
    errors = [error(gradients[name], wanted_gradients[name], floor) for name in wanted_gradients]
    return error(gather_tokens(loss), wanted), max(errors)


def error(x, wanted, floor=1e-30):
    return ((x - wanted).norm() / wanted.norm().clamp(min=floor)).item()


def main():
    warnings.simplefilter("ignore", ContextLengthWarning)
    load_entries(filter(None, os.environ.get("NANOLONG_ENTRY", "").split(",")), POSITIONS)
    rank, _ = join_processes("cpu")
    errors = {name: compare(settings, **changes) for name, settings, changes in cases()}
    if rank == 0:
        print(json.dumps(errors))


if __name__ == "__main__":
    main()
