"""The probabilities of attention, which the kernels never keep.

    maps = attention_maps(model, tokens)  # (B, T) -> a list of (B, H, T, T), one for each layer

kernels.reference computes them in place of kernels.attention, all scores at once and in the dtype
of the weights; neither the model nor the kernels know about it.
"""

import torch

import kernels
from kernels import reference
from nanolong.errors import UserError
from nanolong.inference import evaluation_mode


@torch.no_grad()
def attention_maps(model, tokens):
    """The probabilities of every layer for tokens (B, T), in eval mode: a list of (B, H, T, T).

    What a learned sink takes is missing in the sums of the rows. Raises UserError for a scheme or a
    method that replaces kernels.attention().
    """
    maps = []
    original = kernels.attention

    def attention(*args, return_lse=False, **options):
        sinks = model.blocks[len(maps)].attention.sink_scores
        # learned sinks want the log-sum-exp, and so does a merge of attention to parts of the keys
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
        with evaluation_mode(model.modules()):
            model.hidden_states(tokens.to(model.embed.weight.device))
    finally:
        kernels.attention = original
    if len(maps) != model.config.n_layer:
        extension = model.config.extension
        name = f"--pos={model.config.pos}" + (f", {extension['method']}," if extension else "")
        raise UserError(
            f"attention with {name} is not kernels.attention(), so it has no map: use a model with "
            "another scheme or method"
        )
    return maps
