"""The probabilities of attention, which the kernels never keep.

    maps = attention_maps(model, tokens)  # (B, T) -> a list of (B, H, T, T), one for each layer

Attention is computed densely in float32, in place of kernels.attention; neither the model nor the
kernels know about it.
"""

import contextlib

import torch

import data
import kernels
from kernels import reference
from nanolong.errors import UserError
from nanolong.inference import evaluation_mode


def dense_attention(q, k, v, *, relative=None, **options):
    """kernels.attention() that also returns the probabilities.

    Arguments are those of kernels.attention. Returns (B, H, Tq, D), the log-sum-exp if it is asked
    for, and (B, H, Tq, Tk). Computed in float32 (float64 of float64), with all scores in memory.
    """
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    # as the kernels: round to v's dtype first, where autocast left queries and keys wider
    q, k, v = (x.to(dtype).to(wide) for x in (q, k, v))
    options["relative"] = cast(relative, wide)
    y, *more = reference.attention(q, k, v, **options, return_probabilities=True)
    return y.to(dtype), *more


def cast(terms, dtype):
    """Cast a tensor, None, or a tuple of these."""
    if isinstance(terms, tuple):
        return tuple(cast(term, dtype) for term in terms)
    return None if terms is None else terms.to(dtype)


@contextlib.contextmanager
def record_attention(blocks=()):
    """Replace kernels.attention by dense_attention. Yields a list that collects probabilities.

    Each call, that is each layer in turn, appends its (B, H, Tq, Tk). A call that wants the
    log-sum-exp, to merge attention to parts of the keys, is computed as ever and appends nothing;
    but learned sinks want it too, in models that are given by their blocks.
    """
    maps = []
    original = kernels.attention

    def attention(*args, return_lse=False, **options):
        sinks = blocks[len(maps)].attention.sink_scores if blocks else None
        if sinks is not None:
            y, lse, p = dense_attention(*args, **options, return_lse=True)
            maps.append(p * torch.sigmoid(lse - sinks[:, None])[..., None])
            return y, lse
        if return_lse:
            return original(*args, return_lse=True, **options)
        y, p = dense_attention(*args, **options)
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
    model of random positions. Raises UserError for a scheme or a
    method that replaces softmax attention, or merges it from parts.
    """
    device = next(model.parameters()).device
    with evaluation_mode(model.modules()), record_attention(model.blocks) as maps:
        positions = data.random_positions(model.config, *tokens.shape, seed)
        model.hidden_states(tokens.to(device), positions)
    if len(maps) != model.config.n_layer:
        extension = model.config.extension
        name = f"--pos={model.config.pos}" + (f", {extension['method']}," if extension else "")
        raise UserError(
            f"attention with {name} is not one softmax over the keys, so it has no map: use a "
            "model with another scheme or method"
        )
    return maps
