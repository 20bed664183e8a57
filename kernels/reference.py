"""The operators in plain PyTorch: their specification, and what runs wherever no kernel does.

Read this before any kernel: a kernel is right when it agrees with this file. Notation: B batch, H query heads,
Hk key/value heads (H a multiple of Hk: grouped queries), T tokens, D head dimension, C model width, V vocabulary.
"""
import contextlib
import functools

import torch
import torch.nn.functional as F

# MKL picks its vector functions at their first call, and two threads that make that call at once now and then get different ones, whose last
# bits differ (13 processes of 880): one thread picks here, so that the same command gives the same bits.
for _dtype in (torch.float32, torch.float64):
    for _function in (torch.exp, torch.log, torch.sin, torch.cos):
        _function(torch.ones(1, dtype=_dtype))


PIECE = 1 << 24  # scores, or terms added to them, that exist at a time: 64 MiB in float32


def rope(q, k, cos, sin):
    """Rotate queries and keys by their positions (RoFormer, arXiv 2104.09864), in the half-split layout of GPT-NeoX and Llama.

    q (B, H, T, D), k (B, Hk, T, D): any float dtype, returned in it; the arithmetic is float32.
    cos, sin (T, R/2) or (B, T, R/2): float32 tables of position x frequency, times the attention factor where there is one.
    Channel c < R/2 is paired with channel c + R/2; channels from R on pass through (R <= D, partial rotary width).
    """
    half, dtype = cos.shape[-1], torch.promote_types(q.dtype, cos.dtype)
    if cos.dim() == 3:  # a row of positions for each sequence: (B, 1, T, R/2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # (..., T, R): (a, b) -> (a cos - b sin, b cos + a sin)

    def rotate(x):
        turned = x[..., :2 * half].to(dtype)
        turned = (turned * cos + turned.roll(half, -1) * sin).to(x.dtype)
        return turned if x.shape[-1] == 2 * half else torch.cat((turned, x[..., 2 * half:]), -1)

    if q.shape[2] == 1 and not torch.is_grad_enabled():  # a token that is drawn: half the launches
        return rotate(torch.cat((q, k), 1)).split((q.shape[1], k.shape[1]), 1)
    return rotate(q), rotate(k)


def attention(q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None, return_lse=False, length=None):
    """softmax(q k^T scale + bias, over the keys that a query may see) v.

    q (B, H, Tq, D), k and v (B, Hk, Tk, D). The queries are the last Tq of the Tk tokens (Tq < Tk: decoding with a cache), so
    query row i stands at index Tk - Tq + i. Returns (B, H, Tq, D) in q's dtype; softmax in float32.
    bias       None; slopes (H,): adds -slope * distance; or a table (H, m): adds table[h, min(distance, m - 1)], with gradient.
               Float32; distance = index of the query - index of the key.
    relative   None; or (keys, values, offsets), with gradients. keys (H or 1, m, D): the score is (q + u) k + (q + w) keys[min(distance, m - 1)],
               all times scale. values, the same shape, or None: values[min(distance, m - 1)] is added to v. offsets (u, w), each (H, D), or None: zero.
               (Shaw et al. 2018: keys and values; Transformer-XL, Dai et al. 2019: keys and offsets.)
    window     W > 0: a query sees key j only when distance < W or j < sinks, at true positions.
    positions  (Tk,) or (B, Tk) int64: true positions for `window` where they are not the indices.
    docs       (B, Tk) int: attention stays within tokens of the same document number.
    causal     False: every key is seen, and distance is |i - j| (masked language models).
    scale      default D ** -0.5.
    return_lse also the natural log-sum-exp of each query's scores, (B, H, Tq), float32 (float64 of float64), with gradient.
    length     int64 (1,): only so many of the keys are there, without gradient (decoding in a room of fixed size).
    All three in v's dtype: where autocast left queries and keys wider (a norm does), they are rounded to it.
    """
    if length is not None and not torch.compiler.is_compiling():
        n, length = int(length), None
        k, v, positions, docs = k[:, :, :n], v[:, :, :n], None if positions is None else positions[..., :n], None if docs is None else docs[:, :n]
    Tq, Tk, D, out = q.shape[2], k.shape[2], q.shape[3], v.dtype
    if length is not None and not causal:
        raise ValueError("a compiled reading of a room that is partly filled is causal")
    first = Tk - Tq if length is None else length - Tq  # the index of the first query; compiled, a room keeps its shape: a key that is not there yet lies in the future
    q, k = q.to(out), k.to(out)
    if q.device.type == "cpu" and out == torch.bfloat16 and Tk < 512 and q.shape[2] > 1:  # PyTorch's bf16 attention of many queries on CPUs, forward and backward: 5 times slower than float32 at T = 64, twice as fast at T = 1024
        q, k, v = q.float(), k.float(), v.float()
    as_it_is = torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else contextlib.nullcontext()  # autocast would make it bf16 again
    if relative is not None or return_lse:
        with as_it_is:
            y, lse = _written_out(q, k, v, *(relative or (None, None, None)), D ** -0.5 if scale is None else scale, causal, bias, window, sinks, positions, docs, first)
            return (y.to(out), lse) if return_lse else y.to(out)
    plain = length is None and bias is None and docs is None and not (window and (Tk > window or positions is not None))
    sdpa = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    with as_it_is:
        if plain and (Tq == Tk or Tq == 1 or not causal):
            return sdpa(q, k, v, is_causal=True if causal and Tq > 1 else False).to(out)  # a bool, of a compiled length that varies, too
        rows = max(1, PIECE // (Tk * (1 if bias is None else q.shape[1])))  # queries at a time: at most 64 MiB of added terms a sequence
        if bias is not None and q.dtype in (torch.bfloat16, torch.float16) and q.device.type != "cpu":
            q, k, v = q.float(), k.float(), v.float()  # on GPUs a mask has the dtype of the queries, and bf16 would round distances above 256

        def piece(i, q, k, v, bias):
            added = _added(min(rows, Tq - i), first + i, Tk, q.device, bias, window, sinks, positions, docs, causal)
            return sdpa(q[:, :, i:i + rows], k, v, attn_mask=added.double() if q.dtype == torch.float64 and bias is not None else added)
        y = [_again(Tq > rows, piece, i, q, k, v, bias) for i in range(0, Tq, rows)]
        return (y[0] if len(y) == 1 else torch.cat(y, 2)).to(out)


def _again(several, piece, *args):
    """piece(*args). Where there are several, training keeps nothing of one but the arguments, and computes it again in the backward pass: or all pieces together would be a (T, T) tensor."""
    if several and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        from torch.utils.checkpoint import checkpoint
        return checkpoint(piece, *args, use_reentrant=False, preserve_rng_state=False)
    return piece(*args)


def _added(rows, first, Tk, device, bias, window, sinks, positions, docs, causal):
    """What the scores of queries first .. first + rows - 1 (first: an int, or a tensor (1,)) meet, (1 or B, 1 or H, rows, Tk): without bias
    a bool mask of the keys that are seen, with it float32 terms to add, -inf where a key is not seen."""
    here = torch.arange(rows, device=device) + first
    distance = here[:, None] - torch.arange(Tk, device=device)  # (rows, Tk)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    seen = seen[None]  # (1, rows, Tk)
    if window:
        where = torch.arange(Tk, device=device) if positions is None else positions
        where = where if where.dim() == 2 else where[None]  # (1 or B, Tk)
        gap = where[:, here, None] - where[:, None, :]
        seen = seen & ((gap.abs() < window) | (where[:, None, :] < sinks))
    if docs is not None:
        seen = seen & (docs[:, here, None] == docs[:, None, :])
    if bias is None:
        return seen[:, None]
    hidden = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None]
    distance = distance.clamp(min=0) if causal else distance.abs()
    if bias.dim() == 1:  # slopes
        return hidden - bias[:, None, None] * distance
    if causal:
        # A table over distances makes a Toeplitz matrix: the windows of one line of values, read backwards. Its gradient is a sum
        # along diagonals, which unfold's backward does in order (a gather's would add element by element).
        line = bias[:, (here[-1:] - torch.arange(rows + Tk - 1, device=device)).clamp(0, bias.shape[1] - 1)]  # by falling distance
        return hidden + line.unfold(1, Tk, 1).flip(1)
    return hidden + bias[:, distance.clamp(max=bias.shape[1] - 1)]


def _written_out(q, k, v, keys, values, offsets, scale, causal, bias, window, sinks, positions, docs, start):
    """attention() written out, and its log-sum-exp; relative keys and values are a matrix product over distances, moved from distances to keys along diagonals."""
    (B, H, Tq, _), Tk, wide = q.shape, k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide)
    k, v = (x.to(wide).repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    u, w = (0, 0) if offsets is None else (x.to(wide)[:, None] for x in offsets)  # (H, 1, D)
    rows = max(1, PIECE // (B * H * 2 * Tk))  # queries at a time: at most 64 MiB of scores over distances

    def piece(i, q, k, v, keys, values, u, w, bias):
        n, first = min(rows, Tq - i), start + i
        end = first + n if causal and isinstance(first, int) else Tk  # no key after these queries is seen
        added = _added(n, first, end, q.device, bias, window, sinks, None if positions is None else positions[..., :end], None if docs is None else docs[:, :end], causal)
        rest = q[:, :, i:i + n]
        score = (rest + u) @ k[:, :, :end].mT  # (B, H, n, end)
        if keys is not None:
            distance = first + n - 1 - torch.arange(n + end - 1, device=q.device)  # falling
            line = (distance.clamp(min=0) if causal else distance.abs()).clamp(max=keys.shape[1] - 1)
            score = score + _to_keys((rest + w) @ keys.to(wide)[:, line].mT, end)
        score = (score * scale).masked_fill(~added, float("-inf")) if added.dtype == torch.bool else score * scale + added
        p = score.softmax(-1)
        y = p @ v[:, :, :end]
        return y if values is None else y + _to_distances(p) @ values.to(wide)[:, line], score.logsumexp(-1)
    y, lse = zip(*(_again(Tq > rows, piece, i, q, k, v, keys, values, u, w, bias) for i in range(0, Tq, rows)))
    return (y[0], lse[0]) if len(y) == 1 else (torch.cat(y, 2), torch.cat(lse, 2))


def _to_keys(x, keys):
    """x (..., n, n + keys - 1), over falling distance -> (..., n, keys): row r, which stands r tokens later than row 0, reads from column n - 1 - r on.

    In memory that is one line read from element n - 1 with a stride shorter by one (Transformer-XL's shift)."""
    *batch, n, length = x.shape
    if n == 1:
        return x
    return x.reshape(*batch, n * length)[..., n - 1:n - 1 + n * (length - 1)].reshape(*batch, n, length - 1)[..., :keys]


def _to_distances(p):
    """The way back: p (..., n, keys) -> (..., n, n + keys - 1), zero where there is no key."""
    *batch, n, keys = p.shape
    if n == 1:
        return p
    line = F.pad(p, (0, n - 2)).reshape(*batch, n * (n + keys - 2))
    return F.pad(line, (n - 1, 1)).reshape(*batch, n, n + keys - 1)


def linear_cross_entropy(x, weight, targets, reduction="mean"):
    """Cross-entropy of the logits x weight^T in chunks of tokens, so that logits (tokens, V) never exist at once, neither forward nor backward.

    x (N, C), weight (V, C), targets (N,) int64; negative targets are ignored. Returns nats in float32: the mean over the targets that
    count (nan where there is none), their "sum", or with reduction="none" each one (N,), 0 where ignored.
    The weight's gradient is accumulated in float32 whatever the dtype of the product. No second derivatives.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    early = reduction != "none" and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    apply = _uncompiled if torch.compiler.is_compiling() and len(_chunks(x, weight)) > 32 else _LinearCrossEntropy.apply  # a graph would have each chunk again
    losses = apply(x, weight, targets, dtype, early)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / (targets >= 0).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """The losses (N,), or their sum alone, (1,), where `early`: then every token has the same factor in what follows, so the gradients are taken while a
    chunk's logits are at hand, and only multiplied by it in the backward pass. Otherwise the backward pass makes the logits again."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, early):
        ctx.early, ctx.dtype = early, dtype
        losses, gradients = _chunk_by_chunk(x, weight, targets, dtype, 1 if early else None)
        ctx.save_for_backward(*(gradients if early else (x, weight, targets)))
        return losses.sum(0, keepdim=True) if early else losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.early:
            dx, dweight = ctx.saved_tensors
            return (dx * grad).to(dx.dtype), (dweight * grad).to(dweight.dtype), None, None, None
        _, (dx, dweight) = _chunk_by_chunk(*ctx.saved_tensors, ctx.dtype, grad[:, None])
        return dx, dweight, None, None, None


def _uncompiled(*args):
    return _LinearCrossEntropy.apply(*args)


_uncompiled._torchdynamo_disable = True  # torch.compiler.disable, without importing the compiler here


def _chunk_by_chunk(x, weight, targets, dtype, factor):
    """The losses (N,), and, where there is a factor (1, or one for each token (N, 1)), the gradients of the sum of factor x loss."""
    wide, w, counts = torch.promote_types(dtype, torch.float32), weight.to(dtype), targets[:, None] >= 0
    losses, dx, dweight = [], [], torch.zeros(weight.shape, dtype=wide, device=weight.device) if factor is not None else None
    for rows in _chunks(x, weight):
        chunk, target = x[rows].to(dtype), targets[rows, None].clamp(min=0)
        p = F.log_softmax(chunk @ w.t(), -1, dtype=wide)
        losses.append(torch.where(counts[rows], -p.gather(1, target), 0.0).squeeze(1))
        if factor is not None:  # the gradient of the logits: softmax, less 1 at the target
            p = p.exp_().scatter_(1, target, -1.0, reduce="add").to(dtype)
            weigh = counts[rows] * (factor if isinstance(factor, int) else factor[rows])
            dx.append(((p @ w) * weigh).to(x.dtype))
            dweight += p.t() @ (chunk * weigh).to(dtype)
        del p  # before the next chunk's logits
    gradients = None if factor is None else (torch.cat(dx) if dx else torch.zeros_like(x), dweight.to(weight.dtype))
    return torch.cat(losses) if losses else x.new_zeros(0, dtype=wide), gradients


def _chunks(x, weight):
    size = max(128, (1 << 25) // weight.shape[0] // 128 * 128)  # logits of at most 128 MiB in float32
    return [slice(i, i + size) for i in range(0, len(x), size)]
