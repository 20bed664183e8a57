"""The probabilities of attention, which the kernels never keep.

    maps = attention_maps(model, tokens)  # (B, T) -> a list of (B, H, T, T), one for each layer

kernels.reference computes them in place of kernels.attention, all scores at once and in the dtype
of the weights; neither the model nor the kernels know about it.
"""

import contextlib

import torch

import data
import kernels
from kernels import reference
from nanolong.errors import UserError
from nanolong.inference import evaluation_mode


@contextlib.contextmanager
def record_attention(blocks):
    """Replace kernels.attention. Yields a list that collects probabilities.

    Each call, that is each of the blocks in turn, appends its (B, H, Tq, Tk). A call that wants the
    log-sum-exp, to merge attention to parts of the keys, is computed as ever and appends nothing;
    but learned sinks want it too.
    """
    maps = []
    original = kernels.attention

    def attention(*args, return_lse=False, **options):
        sinks = blocks[len(maps)].attention.sink_scores
        if return_lse and sinks is None:
            return original(*args, return_lse=True, **options)
        y, lse, p = reference.attention(
            *args, return_lse=True, return_probabilities=True, **options
        )
        if sinks is not None:
            maps.append(p * torch.sigmoid(lse - sinks[:, None])[..., None])
            return y, lse
        maps.append(p)
        return y

    kernels.attention = attention
    try:
        yield maps
    finally:
        kernels.attention = original


@torch.no_grad()
def attention_maps(model, tokens, seed=0):
    """The probabilities of every layer for tokens (B, T), in eval mode: a list of (B, H, T, T).

    What a learned sink takes is missing in the sums of the rows. seed: of the positions, for a
    model of random positions. Raises UserError for a scheme or a method that replaces
    kernels.attention(), or merges its results for parts of the keys.
    """
    device = next(model.parameters()).device
    with evaluation_mode(model.modules()), record_attention(model.blocks) as maps:
        positions = data.random_positions(model.config, *tokens.shape, seed)
        model.hidden_states(tokens.to(device), positions)
    if len(maps) != model.config.n_layer:
        extension = model.config.extension
        name = f"--pos={model.config.pos}" + (f", {extension['method']}," if extension else "")
        raise UserError(
            f"attention with {name} is not kernels.attention(), so it has no map: use a model with "
            "another scheme or method"
        )
    return maps
