"""What test_processes.py runs in several processes, started by torchrun.

    torchrun --standalone --nproc_per_node=2 tests/process_cases.py

compares a text that processes share with the same text on one process. Prints JSON: case -> the
relative errors of the loss and of the gradients. In float64, so that what is left is a mistake;
each process computes the whole text too, and takes that as the truth.

With names of schemes, only the cases of these.

    torchrun --standalone --nproc_per_node=2 tests/process_cases.py CASES.json

trains small models one after the other. A case is {"model": settings of GPTConfig, "train":
settings of TrainConfig}; with "averages" its optimizer is Averaging of tests/optimizers.py. Prints
JSON: of each the most parameters that a process keeps.
"""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from flags import SMALLEST
from optimizers import Averaging

import data
import rope_scaling
from model import GPT, POSITIONS, ContextLengthWarning, GPTConfig
from nanolong import parallel
from nanolong.entry import load_entries
from nanolong.errors import run_main
from train import TrainConfig, train

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 32}
SHORT = {
    **SMALLEST,
    "gradient_accumulation_steps": 4,
    "max_iters": 20,
    "eval_interval": 10,
    "eval_iters": 14,  # 7 batches, which no number of processes here divides
    "lr_schedule": "constant",
}
T = 48
# what a longrope table needs: a factor for each pair of channels
LONGROPE = {"long_factor": [1.0, 2.0, 3.0, 4.0]}


def cases():
    """Yield (name, settings of GPTConfig, changes): batch, documents, positions, extension."""
    for pos in POSITIONS:
        yield pos, {"pos": pos}, {}
        yield f"{pos} grouped", {"pos": pos, "n_kv_head": 2}, {}
    for pos in sorted(POSITIONS.keys() & {"rope", "alibi", "shaw", "fox-rope", "selective_rope"}):
        yield f"{pos} window", {"pos": pos, "window": 7, "sinks": 2, "n_kv_head": 1}, {}
        yield f"{pos} docs", {"pos": pos}, {"docs": True}
        yield f"{pos} recomputed", {"pos": pos}, {"recompute": True}
    for pos in ("rope", "learned", "sinusoidal"):
        yield f"{pos} positions", {"pos": pos, "random_positions": 80}, {"positions": True}
    yield "layers without positions", {"pos": "rope", "layer_pattern": "FN"}, {}
    yield "qk norm", {"pos": "rope", "qk_norm": "head", "bias": "qkv"}, {}
    both_kinds = {"layer_pattern": "WF", "window": 7, "rope_local_base": 50.0}
    yield "qk norm of all heads", {"qk_norm": "all", "norm_position": "both", **both_kinds}, {}
    yield "hybrid yarn", both_kinds, {"extension": ("yarn", {})}
    yield "learned sinks", {"pos": "t5", "sink_scores": True, "n_kv_head": 2}, {}
    yield "output gate", {"pos": "rope", "output_gate": "head", "n_kv_head": 2}, {}
    yield "output gate by channel", {"pos": "fox", "output_gate": "channel"}, {"docs": True}
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
    """Arguments of the model; some targets are not scored."""
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(50, (2, T)),
        "targets": torch.randint(-1, 50, (2, T)),
        "positions": data.random_positions(model.config, 2, T, 5) if positions else None,
        "docs": (torch.arange(T) // 13).expand(2, T) if docs else None,
    }


def loss_and_gradients(model, inputs):
    """The loss of each token that this process computes, and the gradients of their sum."""
    model.zero_grad()
    loss = model(**inputs, reduction="none")
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
    parallel.share_sequences(dist.get_world_size(), model, [T])
    loss, gradients = loss_and_gradients(model, parallel.own_part(inputs))
    loss = parallel.gather_tokens(loss)
    parallel.stop_sharing(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    again, _ = loss_and_gradients(model, inputs)
    assert torch.equal(again, wanted)  # nothing of the sharing is left
    # a bias of the keys has no gradient but rounding: softmax does not see it
    floor = 1e-6 * max(gradient.norm() for gradient in wanted_gradients.values())
    errors = [error(gradients[name], wanted_gradients[name], floor) for name in wanted_gradients]
    return error(loss, wanted), max(errors)


def error(x, wanted, floor=1e-30):
    return ((x - wanted).norm() / wanted.norm().clamp(min=floor)).item()


def train_case(case):
    """Train the model of a case, from the beginning or from its last checkpoint. Returns it."""
    cfg = TrainConfig(**{**SHORT, **case["train"]})
    weights = cfg.parallel == "ddp" or parallel.rank_and_world()[0] == 0
    if cfg.init_from == "resume":
        model = GPT.load(cfg.out_dir, weights=weights)
    else:
        torch.manual_seed(1)
        config = GPTConfig(**{**SHAPE, "vocab_size": 257, **case["model"]})
        model = GPT(config) if weights else parallel.build_without_weights(GPT, config)
    adamw = Averaging if case.get("averages") else torch.optim.AdamW
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        mock.patch("torch.optim.AdamW", adamw),
    ):
        train(model, cfg)
    return model


def kept_parameters(model):
    parts = (p.to_local() if parallel.is_sharded(p) else p for p in model.parameters())
    n_kept = torch.tensor(sum(part.numel() for part in parts))
    dist.all_reduce(n_kept, dist.ReduceOp.MAX)
    return n_kept.item()


def main():
    warnings.simplefilter("ignore", ContextLengthWarning)
    load_entries(filter(None, os.environ.get("NANOLONG_ENTRY", "").split(",")), POSITIONS)
    rank, _ = parallel.join_processes(torch.device("cpu"))
    words = sys.argv[1:]
    if words and words[0].endswith(".json"):
        found = json.loads(Path(words[0]).read_text())
        found = [kept_parameters(train_case(case)) for case in found]
    else:
        found = {}
        for name, settings, changes in cases():
            if not words or name.split()[0] in words:
                found[name] = compare(settings, **changes)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    run_main(main)
