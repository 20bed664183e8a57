"""
The probabilities of attention, which the kernels never keep.

    maps = attention_maps(model, tokens)  # (B, T) -> a list of (B, H, T, T), one for each layer

Attention is computed densely in float32, in place of kernels.attention; neither the model nor the
kernels know about it.
"""

import contextlib

import torch

import kernels
from nanolong.errors import UserError


def visible_keys(distance, window, sinks, positions, docs, causal):
    """Which keys each query may see: bool, (1 or B, Tq, Tk). Arguments as in dense_attention."""
    n_queries, n_keys = distance.shape
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    visible = visible[None]
    if window:
        if positions is None:
            positions = torch.arange(n_keys, device=distance.device)
        keys = positions.view(-1, n_keys)  # (1 or B, Tk)
        queries = keys[:, n_keys - n_queries :]
        near = (queries[:, :, None] - keys[:, None]).abs() < window
        is_sink = keys[:, None] < sinks
        visible = visible & (near | is_sink)
    if docs is not None:
        visible = visible & (docs[:, n_keys - n_queries :, None] == docs[:, None])
    return visible


def bias_scores(bias, distance):
    """The (H, Tq, Tk) that slopes (H,) or a table by distance (H, m) add to the scores."""
    if bias.dim() == 1:
        return -bias[:, None, None] * distance
    return bias[:, distance.clamp(max=bias.shape[1] - 1)]


def dense_attention(
    q,
    k,
    v,
    *,
    bias=None,
    relative=None,
    window=0,
    sinks=0,
    positions=None,
    docs=None,
    causal=True,
    scale=None,
    length=None,
):
    """kernels.attention() that also returns the probabilities.

    Arguments are those of kernels.attention. Returns (B, H, Tq, D) and (B, H, Tq, Tk). Computed in
    float32 (float64 of float64), with all scores in memory.
    """
    assert length is None, "a cache of fixed capacity is not supported"
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    dtype = v.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32)
    # as the kernels: round to v's dtype first, where autocast left queries and keys wider
    q, k, v = (x.to(dtype).to(compute_dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))

    index = torch.arange(Tk, device=q.device)
    distance = index[Tk - Tq :, None] - index  # (Tq, Tk)
    visible = visible_keys(distance, window, sinks, positions, docs, causal)
    distance = distance.clamp(min=0) if causal else distance.abs()

    keys, values, offsets = relative or (None, None, None)
    u, w = 0, 0
    if offsets is not None:
        u, w = (x.to(compute_dtype)[:, None] for x in offsets)  # (H, 1, D)
    scores = (q + u) @ k.mT
    if keys is not None:
        clipped = distance.clamp(max=keys.shape[1] - 1).expand(B, H, Tq, Tk)
        by_distance = (q + w) @ keys.to(compute_dtype).mT  # (B, H, Tq, m)
        scores = scores + by_distance.gather(-1, clipped)
    scores = scores * (D**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias_scores(bias, distance)

    p = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    y = p @ v
    if values is not None:
        # the probability at each clipped distance, times its value vector
        by_distance = p.new_zeros(B, H, Tq, values.shape[1]).scatter_add(-1, clipped, p)
        y = y + by_distance @ values.to(compute_dtype)
    return y.to(dtype), p


@contextlib.contextmanager
def record_attention():
    """Replace kernels.attention by dense_attention. Yields a list that collects probabilities.

    Each call, that is each layer in turn, appends its (B, H, Tq, Tk). A call that wants the
    log-sum-exp, to merge attention to parts of the keys, is computed as ever and appends nothing.
    """
    maps = []
    original = kernels.attention

    def attention(*args, return_lse=False, **options):
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

    seed: of the positions, for a model of random positions. Raises UserError for a scheme or a
    method that replaces softmax attention, or merges it from parts.
    """
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with record_attention() as maps:
            model.hidden_states(tokens.to(device), model.sample_positions(*tokens.shape, seed))
    finally:
        model.train(was_training)
    if len(maps) != model.config.n_layer:
        extension = model.config.extension
        name = f"--pos={model.config.pos}" + (f", {extension['method']}," if extension else "")
        raise UserError(
            f"attention with {name} is not one softmax over the keys, so it has no map: use a "
            "model with another scheme or method"
        )
    return maps
