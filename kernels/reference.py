"""The operators by their formulas: the definition that every kernel, and eager.py, follows.

Read this before any kernel. It is plain PyTorch with all scores at once, in the dtype of its
inputs: in float64 what the tests compare with, in a kernel's dtype the error to expect of it.
Shapes: B batch, H query heads, Hk key/value heads (H is a multiple of Hk: grouped queries), T
tokens, D head dimension, C model width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions (RoFormer, arXiv 2104.09864).

    In the half-split layout of GPT-NeoX and Llama: channel c < R/2 is paired with channel c + R/2,
    and channels from R on pass through (R <= D, partial rotary width).
    q (B, H, T, D), k (B, Hk, T, D): any float dtype, returned in it.
    cos, sin (T, R/2) or (B, T, R/2): tables of position x frequency, times the attention factor
    where there is one.
    """
    half = cos.shape[-1]
    if cos.dim() == 3:  # positions for each sequence
        cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, R/2)

    def rotate(x):
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat(((a * cos - b * sin).to(x), (b * cos + a * sin).to(x), rest), -1)

    return rotate(q), rotate(k)


def attention(
    q, k, v, *, bias=None, window=0, sinks=0, docs=None, causal=True, scale=None,
    return_lse=False, length=None, shared=None, gates=None, return_probabilities=False,
):  # fmt: skip
    """Compute softmax(q k^T scale + bias, over the visible keys) v.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D). The queries are the last Tq of the Tk tokens (Tq < Tk:
    decoding with a cache), so query row i has the index Tk - Tq + i. All three are used in v's
    dtype: queries and keys that autocast left wider (as norms do) are rounded to it. Returns
    (B, H, Tq, D) in that dtype; kernels and eager.py compute the softmax in float32.

    bias        None, slopes (H,): adds -slope * distance, or a table (H, m): adds
                table[h, min(distance, m - 1)], with gradient. Float32. The distance is the index of
                the query - the index of the key.
    window      W > 0: a query sees key j only if distance < W or j < sinks.
    docs        (B, Tk) int: a query sees only keys with the same document number.
    causal      False: every key is visible, and the distance is |i - j| (masked language models).
    scale       Default: D ** -0.5.
    return_lse  Also return the natural log-sum-exp of each query's scores (B, H, Tq), float32
                (float64 if q is), with gradient.
    length      int64 (1,): the valid length of a cache of fixed capacity; only the first `length`
                keys exist. Without gradient.
    gates       None, or running sums c of log gates (B, H, Tk), float64: adds c_i - c_j to the
                score of query i and key j (FoX, Lin et al. 2025), with gradient. Without a
                bias. The softmax does not see c_i, but the log-sum-exp does. As a bias with
                three dimensions they mean the same.
    shared      None, or a dict, empty at first, that calls with the same mask share, as the layers
                of a step do: kernels keep their tile segments in it. It changes no result.

    return_probabilities, which the kernels do not have: return also the softmax, (B, H, Tq, Tk).
    """
    if bias is not None and bias.dim() == 3:
        gates, bias = bias, None
    if length is not None:
        n = int(length)
        k, v = k[:, :, :n], v[:, :, :n]
        docs = None if docs is None else docs[:, :n]
        gates = None if gates is None else gates[..., :n]
    assert gates is None or bias is None, "gates are with no other term"
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    scale = D**-0.5 if scale is None else scale
    q, k = q.to(v.dtype), k.to(v.dtype)
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))  # (B, H, Tk, D)

    # Distances (Tq, Tk), and which keys each query sees (B, Tq, Tk).
    i = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
    j = torch.arange(Tk, device=q.device)[None]
    distance = (i - j).clamp(min=0) if causal else (i - j).abs()
    visible = ((j <= i) | (not causal)).expand(B, Tq, Tk)
    if window:
        visible = visible & (((i - j).abs() < window) | (j < sinks))
    if docs is not None:
        visible = visible & (docs[:, Tk - Tq :, None] == docs[:, None])

    # Scores (B, H, Tq, Tk).
    score = q @ k.mT * scale
    if bias is not None and bias.dim() == 1:
        score = score + (-bias[:, None, None] * distance).to(score.dtype)
    elif bias is not None:
        score = score + bias[:, distance.clamp(max=bias.shape[1] - 1)].to(score.dtype)
    if gates is not None:
        score = score + (gates[:, :, Tk - Tq :, None] - gates[:, :, None]).to(score.dtype)
    score = score.masked_fill(~visible[:, None], -math.inf)

    # Sum the values.
    p = score.softmax(-1)
    y = p @ v
    more = [score.logsumexp(-1)] if return_lse else []
    more += [p] if return_probabilities else []
    return (y, *more) if more else y


def linear_cross_entropy(x, weight, targets, reduction="mean", z_loss=0.0):
    """Compute the cross-entropy of the logits x weight^T.

    x (N, C), weight (V, C), targets (N,) int64; negative targets are ignored. Returns nats: the
    mean over the targets that are not ignored (nan if there are none), their "sum", or with
    reduction="none" the loss of each (N,), 0 if ignored.
    z_loss: factor of the square of the logits' log-sum-exp, which is added to each loss (PaLM,
    Chowdhery et al. 2022).
    """
    counts = targets >= 0
    logits = x @ weight.T
    losses = F.cross_entropy(logits, targets.where(counts, -1), ignore_index=-1, reduction="none")
    losses = losses + z_loss * logits.logsumexp(-1).square() * counts
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
