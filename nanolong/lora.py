"""LoRA (Hu et al. 2021): train updates of low rank, alpha / rank * B A, of attention's matrices W.

An update parametrizes the weight of its layer: whatever reads `layer.weight` gets the merged
matrix, a sum in float32, and a checkpoint stores it under the weight's own name. The parameters W,
A and B, which a stopped run needs, are in its optim.safetensors.
"""

import functools
import math

import torch
from torch import nn
from torch.nn.utils import parametrize

FACTORS = ".parametrizations.weight."  # in the names of W ("original"), A and B of a layer


class Update(nn.Module):
    """Add alpha / rank * B A to a weight (N, C): A (rank, C) starts random, B (N, rank) as zero."""

    def __init__(self, weight, rank, alpha, generator):
        super().__init__()
        n_out, n_in = weight.shape
        # on the CPU, so that every device has the same numbers
        A = nn.init.kaiming_uniform_(torch.empty(rank, n_in), math.sqrt(5), generator=generator)
        self.A = nn.Parameter(A.to(weight))
        self.B = nn.Parameter(weight.new_zeros(n_out, rank))
        self.scale = alpha / rank

    def forward(self, weight):
        # autocast would round the update, so that the merged weights were others
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.B, self.A, alpha=self.scale)


def add_updates(model, rank, alpha, also=(), seed=0):
    """Freeze a model's weights, and add updates to q, k, v and o of every layer.

    also: other weights to train, "norms" or "embeddings" (of tokens, and the position scheme's).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        is_norm = name.split(".")[-2].endswith("norm")
        is_embedding = name.startswith(("embed.", "scheme."))
        p.requires_grad_(("norms" in also and is_norm) or ("embeddings" in also and is_embedding))
    for block in model.blocks:
        layer = block.attention
        for linear in (layer.q, layer.k, layer.v, layer.o):
            update = Update(linear.weight, rank, alpha, generator)
            parametrize.register_parametrization(linear, "weight", update)
    model.weights = functools.partial(merged_weights, model)


@torch.no_grad()
def merged_weights(model):
    """The weights by the names that they have without updates, a tied head once."""
    weights = {}
    for name, p in model.named_parameters():
        layer, is_factor, part = name.partition(FACTORS)
        if not is_factor:
            weights[name] = p.detach()
        elif part == "original":
            weights[f"{layer}.weight"] = model.get_submodule(layer).weight
    return weights
