"""The operators in plain PyTorch, in less time and memory: they run wherever no kernel does.

reference.py defines what rope, attention and the loss compute, and tests/test_eager.py compares.
Attention is computed in chunks of queries, and again in the backward pass. The loss
goes through in chunks of tokens, whose gradients are kept, if the loss is summed. A CPU has paths
of its own, and one query, which decodes a token, computes here on every device.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# A single thread makes the first call, because MKL chooses its vectorised functions then, and two
# threads at once can get different ones, whose last bits differ: the same command would give other
# bits.
for _dtype in (torch.float32, torch.float64):
    for _function in (torch.exp, torch.log, torch.sin, torch.cos):
        _function(torch.ones(1, dtype=_dtype))

# Not shown, because norms of queries and keys get float32 weights under autocast on purpose.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

# The most scores, or biases added to them, that exist at a time: 64 MiB in float32. The masks of
# documents, one for each sequence, are not counted.
MAX_SCORES = 1 << 24

# Keys of a split of one query's values, if their number is a multiple, as a compiled cache's is.
SPLIT = 256


def linear(x, weight, bias=None):
    """Compute x weight^T + bias: x (..., C), weight (N, C), bias (N,) or None.

    Returns (..., N) in the dtype of autocast, or of the weight without autocast.
    """
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)  # because a model's norms may be wider than its matrices
    if _are_few_rows(x, weight):
        return _multiply_few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def _are_few_rows(x, weight):
    """Whether a decoding step's product takes the time of reading a large weight."""
    n = x.shape[:-1].numel()
    is_large = weight.device.type == "cpu" and weight.numel() >= 1 << 17
    if torch.is_grad_enabled() or not is_large or n > 4:
        return False
    return x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def _multiply_few_rows(x, weight, bias):
    """Compute linear() as weight x^T, by which MKL reads the weight twice to four times as fast.

    A single column is multiplied twice, because MKL would use only one thread for it.
    """
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    columns = torch.cat((rows, rows)).t() if n == 1 else rows.t()
    y = (weight @ columns)[:, :n].t()
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], -1)


def linear_each(x, *layers, joins_on_cpu=True):
    """Compute several linear layers of the same input. Returns a list.

    In training they are one product, with joined weights, because a GPU fills its last round of
    tiles better, the input is cast and its gradient added once, and a CPU's threads wait less often.
    joins_on_cpu: False for wide layers, because a CPU copies their outputs out of the product.
    """
    if not torch.is_grad_enabled() or not (joins_on_cpu or x.is_cuda):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return linear(x, weight, bias).split([len(layer.weight) for layer in layers], -1)


# -----------------------------------------------------------------------------
# Rotary position embedding


def cos_sin(pos, inv_freq, factor=1.0):
    """The cosines and sines of position x frequency, times a factor: float32 (..., R/2).

    pos (...) int64, inv_freq (R/2,) float64: in float32 an angle is off by 0.06 at 1 M tokens.
    """
    # An operator, because a compiler would compute them again for every channel of every head and
    # layer. Not for one token on a GPU, because the operator would launch seven kernels a layer.
    is_fused = pos.is_cuda and pos.shape[-1] == 1
    is_opaque = torch.compiler.is_compiling() and not is_fused
    compute = _cos_sin_operator if is_opaque else _compute_cos_sin
    return compute(pos, inv_freq, factor)


def _compute_cos_sin(pos: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angle = pos[..., None] * inv_freq
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


_cos_sin_operator = torch.library.custom_op("nanolong::cos_sin", _compute_cos_sin, mutates_args=())


@_cos_sin_operator.register_fake
def _fake_cos_sin(pos, inv_freq, factor):
    shape = (*pos.shape, len(inv_freq))
    return tuple(inv_freq.new_empty(shape, dtype=torch.float32) for _ in range(2))


def rope(q, k, cos, sin):
    """Compute reference.rope() in float32, or in float64 if q is float64."""
    # both at once in a decoding step, because that launches half the operators
    if q.shape[2] == 1 and not torch.is_grad_enabled():
        return rotate(torch.cat((q, k), 1), cos, sin).split((q.shape[1], k.shape[1]), 1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x, cos, sin):
    """Rotate only queries or only keys (B, H, T, D), as rope() does."""
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (1 or B, 1, T, R/2)
    return _Rotation.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """A rotation that keeps no activations, because its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x, cos, sin):
    """x (B, H, T, D): (a, b) -> (a cos - b sin, b cos + a sin) in the first R channels.

    The result lies in memory as x does, which is (B, T, H, D) in a model.
    """
    half = cos.shape[-1]
    R = 2 * half
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    if torch.compiler.is_compiling():  # not in place, because it fuses these operators
        wide, cos, sin = (y.transpose(1, 2) for y in (wide, cos, sin))
        a, b = wide[..., :half], wide[..., half:R]
        first = torch.addcmul(a * cos, b, sin, value=-1)
        y = torch.cat((first, torch.addcmul(b * cos, a, sin), wide[..., R:]), -1)
        return y.to(x.dtype).transpose(1, 2)
    a, b = wide[..., :half], wide[..., half:R]
    y = torch.empty_like(wide)
    torch.mul(a, cos, out=y[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=y[..., half:R]).addcmul_(a, sin)
    if R < x.shape[-1]:
        y[..., R:] = wide[..., R:]
    return y.to(x.dtype)


def rotate_by(q, k, angles):
    """Rotate pairs of channels as rope(), by angles of each key head and token, with gradient.

    q (B, H, T, D), k (B, Hk, T, D), angles (B, Hk or 1, T, R/2), float64, because they may grow
    along the text. The other arithmetic is float32, or float64 if q is.
    """
    angles = torch.remainder(angles, 2 * math.pi).to(torch.promote_types(q.dtype, torch.float32))
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)  # (B, Hk, 1, T, R/2)
    half = cos.shape[-1]

    def rotate(x):
        groups = x.unflatten(1, (cos.shape[1], -1)).to(cos.dtype)  # (B, Hk, H / Hk, T, D)
        a, b, rest = groups.split((half, half, x.shape[-1] - 2 * half), -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        return y.flatten(1, 2).to(x.dtype)

    return rotate(q), rotate(k)


def positions_in_documents(docs):
    """Position ids that count from 0 in every document: int64 (B, T), of document ids (B, T)."""
    index = torch.arange(docs.shape[1], device=docs.device)
    starts = F.pad(docs[:, 1:] != docs[:, :-1], (1, 0)) * index  # 0 but where one begins
    return index - starts.cummax(1).values


# -----------------------------------------------------------------------------
# Attention

CHUNK = 128  # queries at a time, but all in a graph, because a compiler unrolls the chunks
# Where PyTorch's operator with a mask is the fastest way for one query, too.
MASKED_DEVICES = ("cpu",)


def attention(
    q, k, v, *, bias=None, window=0, sinks=0, docs=None, causal=True, scale=None,
    return_lse=False, length=None, gates=None,
):  # fmt: skip
    """Compute reference.attention(), whose docstring describes the arguments.

    The softmax is float32, or float64 if q is.
    """
    H, Tq, D = q.shape[1:]
    Hk, Tk = k.shape[1:3]
    assert gates is None or bias is None, "gates are with no other term"
    dtype = v.dtype
    scale = D**-0.5 if scale is None else scale
    mask = {"window": window if window < Tk else 0, "sinks": sinks, "docs": docs}
    has_term = bias is not None or gates is not None or mask["window"] or docs is not None
    has_term = has_term or length is not None
    is_plain = not (has_term or return_lse) and (not causal or Tq in (1, Tk))
    is_single = Tq == 1 and not torch.is_grad_enabled() and q.device.type not in MASKED_DEVICES
    if is_single and not (is_plain and (H == Hk or dtype.itemsize == 2)):
        with torch.autocast(q.device.type, enabled=False):
            qkv = q.to(dtype), k.to(dtype), v
            return _attend_from_one_query(*qkv, bias, gates, scale, mask, length, return_lse)
    if is_plain:
        # float32, because on a CPU float32 is faster for a short text
        is_slow = q.device.type == "cpu" and Tq > 1 and Tk < 512
        used = torch.promote_types(dtype, torch.float32) if is_slow else dtype
        q, k, v = q.to(dtype).to(used), k.to(dtype).to(used), v.to(used)
        # by if, because Tq > 1 is a symbol while a varying length is compiled
        is_causal = True if causal and Tq > 1 else False
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": H != Hk}
        with torch.autocast(q.device.type, enabled=False):
            return F.scaled_dot_product_attention(q, k, v, **options).to(dtype)
    terms = bias, gates, return_lse
    mask["causal"] = causal
    found = attend_in_chunks(attend_chunk, q, k, v, terms, scale, mask, length)
    return found if return_lse else found[0]


def attend_in_chunks(attend_chunk, q, k, v, terms, scale, mask, length=None):
    """Attend a chunk of queries at a time. Returns the results of attend_chunk for all queries.

    The backward pass computes each chunk again, because memory then grows only as the text does.

    attend_chunk: function of a chunk, which gets terms, the indices of its queries and its keys,
    and mask, options of visible_keys(). It returns a tuple: the output (B, H, n, D), and perhaps
    the log-sum-exp. The rest are arguments of attention().
    """
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(dtype).to(wide), k.to(dtype).to(wide), v.to(wide)
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    size = max(1, min(Tq, MAX_SCORES // (B * H * Tk)))
    size = size if torch.compiler.is_compiling() else min(size, CHUNK)
    # Keys after the last query are in its future, and some keys may be before all windows.
    is_causal = mask.get("causal", True)
    has_window = mask.get("window") and not mask["sinks"]
    parts = []
    with torch.autocast(q.device.type, enabled=False):  # because it would round scores
        for start in range(0, Tq, size):
            rows = q[:, :, start : start + size]
            first = Tk - Tq + start
            end = first + rows.shape[2]
            keys = slice(0, end if is_causal else Tk)
            if has_window and length is None:
                keys = slice(max(0, first - mask["window"] + 1), keys.stop)
            query = torch.arange(first, end, device=q.device)
            if length is not None:
                # all keys, because only the device knows where the queries end
                keys, query = slice(0, Tk), query - Tk + length
            key = torch.arange(keys.start, keys.stop, device=q.device)
            arguments = rows, k[:, :, keys], v[:, :, keys], terms, scale, query, key, mask
            if torch.is_grad_enabled() and size < Tq:
                part = checkpoint(attend_chunk, *arguments, use_reentrant=False)
            else:
                part = attend_chunk(*arguments)
            parts.append(part)
    y, *lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return y.to(dtype), *lse


def attend_chunk(q, k, v, terms, scale, query, key, mask):
    """Attend from queries (B, H, n, D) to keys (B, Hk, m, D), with a bias or gates."""
    bias, gates, with_lse = terms
    seen = visible_keys(query, key, **mask)
    added = _scores_to_add(query, key, bias, gates, seen, q.dtype)
    if not with_lse:
        enable_gqa = q.shape[1] != k.shape[1]
        added = seen if added is None else added
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return (F.scaled_dot_product_attention(q, k, v, added, **options),)
    scores = multiply_groups(q, k.mT) * scale
    scores = scores.masked_fill(~seen, -math.inf) if added is None else scores + added
    lse = scores.logsumexp(-1)
    return multiply_groups((scores - lse[..., None]).exp(), v), lse


def visible_keys(query, key, window=0, sinks=0, docs=None, causal=True):
    """Find out which keys (m,) each query (n,) sees: bool (1 or B, 1, n, m).

    query, key: indices in the text. The rest are options of attention().
    """
    seen = query[:, None] >= key if causal else torch.ones_like(query[:, None] >= key)
    if window:
        seen = seen & (((query[:, None] - key).abs() < window) | (key < sinks))
    seen = seen[None]
    if docs is not None:
        seen = seen & (docs[:, query, None] == docs[:, None, key])
    return seen[:, None]


def _scores_to_add(query, key, bias, gates, seen, dtype):
    """Return the bias or gates of scores, -inf for keys that are not seen (None: no term).

    (B or 1, H or 1, n, m).
    """
    distance = (query[:, None] - key).abs()
    if gates is not None:  # in float64, because their difference is small and they are large
        scores = gates[:, :, query, None] - gates[:, :, None, key]
    elif bias is None:
        return None
    elif bias.dim() == 1:
        scores = -bias[:, None, None] * distance
    else:
        scores = bias[:, distance.clamp(max=bias.shape[1] - 1)]
    return scores.masked_fill(~seen, -math.inf).to(dtype)


def multiply_groups(x, y):
    """Multiply x (B, H, n, a) by y (B, Hk, a, b) without a copy of y, which H / Hk heads share."""
    groups = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)  # (B, Hk, H / Hk * n, a)
    return (groups @ y).view(*x.shape[:3], y.shape[3])


def _attend_from_one_query(q, k, v, bias, gates, scale, mask, length, return_lse):
    """Compute attention of one query, without gradient.

    Keys and values are read once, in their dtype: the queries that share them are the rows of one
    product, with float32 scores.
    """
    B, H, _, D = q.shape
    Hk, Tk = k.shape[1:3]
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # views of a cache
    scores = _wide_product(q.reshape(B * Hk, -1, D), k.mT).view(B, H, 1, Tk) * scale
    key = torch.arange(Tk, device=q.device)
    query = key[-1:] if length is None else length - 1
    seen = visible_keys(query, key, **mask)
    added = _scores_to_add(query, key, bias, gates, seen, scores.dtype)
    scores = scores.masked_fill(~seen, -math.inf) if added is None else scores + added
    # Values are split over products, because a product of few rows can leave most of a GPU idle.
    n = SPLIT if Tk % SPLIT == 0 and v.is_contiguous() else Tk
    p = scores.softmax(-1).to(v.dtype).view(B * Hk, -1, Tk // n, n).transpose(1, 2)
    parts = _wide_product(p.reshape(-1, H // Hk, n), v.reshape(-1, n, D))
    y = parts.view(B, Hk, -1, H // Hk, D).sum(2).view(B, H, 1, D).to(v.dtype)
    return (y, scores.logsumexp(-1)) if return_lse else y


def _wide_product(a, b):
    """Multiply matrices (n, ., .) of 16 bits to float32, and of other dtypes to their own."""
    if a.dtype.itemsize > 2:
        return a @ b
    if a.is_cuda and torch.version.cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# -----------------------------------------------------------------------------
# Cross-entropy


def linear_cross_entropy(x, weight, targets, reduction="mean", z_loss=0.0, row_losses=None):
    """Compute reference.linear_cross_entropy() in float32, in chunks of tokens.

    Of the logits (N, V) at most 128 MiB, on a GPU 1 GiB in 16 bits, or 128 tokens exist at a time.
    The gradient of the weight is accumulated in float32, whatever the dtype of the product. There
    are no second derivatives. row_losses: a kernel in place of _row_losses().
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    is_trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    grads_in_forward = is_trained and reduction != "none"
    options = dtype, z_loss, row_losses or _row_losses
    losses = _Loss.apply(x, weight, targets, options, grads_in_forward)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets >= 0).sum()


class _Loss(torch.autograd.Function):
    """The losses (N,), or, with grads_in_forward, their sum (1,).

    The gradient of a sum is known up to one factor, so it is computed while a chunk's logits are in
    memory. Otherwise the backward pass computes the logits again.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, options, grads_in_forward):
        ctx.options = options
        ctx.grads_in_forward = grads_in_forward
        factor = torch.ones_like(targets, dtype=x.dtype) if grads_in_forward else None
        losses, *grads = _compute_losses(x, weight, targets, factor, *options)
        ctx.save_for_backward(*(grads if grads_in_forward else (x, weight, targets)))
        return losses.sum(0, keepdim=True) if grads_in_forward else losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.grads_in_forward:
            dx, dweight = ((saved * grad).to(saved.dtype) for saved in ctx.saved_tensors)
        else:
            _, dx, dweight = _compute_losses(*ctx.saved_tensors, grad, *ctx.options)
        return dx, dweight, None, None, None


def _compute_losses(x, weight, targets, factor, dtype, z_loss, row_losses):
    """The losses (N,), and for factors (N,) the gradients of sum(factor * loss) for x and weight.

    Many chunks are one operator in a compiled graph, because it would repeat all for each chunk.
    """
    if torch.compiler.is_compiling() and len(token_chunks(x, weight)) > 32:
        return _compute_many_losses(x, weight, targets, factor, dtype, z_loss)
    wide = torch.promote_types(dtype, torch.float32)
    w = weight.to(dtype)
    losses, dx = [], []
    dweight = torch.zeros_like(weight if factor is not None else x[:0], dtype=wide)
    for rows in token_chunks(x, weight):
        chunk = x[rows].to(dtype)
        loss, p = row_losses(chunk @ w.t(), targets[rows], z_loss, factor is not None)
        losses.append(loss)
        if factor is not None:
            token_weight = (targets[rows, None] >= 0) * factor[rows, None]
            dx.append(((p @ w) * token_weight).to(x.dtype))
            add_product(dweight, p, (chunk * token_weight).to(dtype))
        del p  # because the next chunk's logits need its memory
    dx = torch.cat(dx) if dx else x.new_empty(0)
    return torch.cat(losses), dx, dweight.to(weight.dtype)


def _row_losses(logits, targets, z_loss, has_grad):
    """The losses of rows of logits (N, V), and the logits' gradient, or None, where targets count.

    The caller keeps no reference to the logits, because the gradient needs their memory.
    """
    dtype = logits.dtype
    target = targets[:, None].clamp(min=0)
    p = F.log_softmax(logits, -1, dtype=torch.promote_types(dtype, torch.float32))
    loss = -p.gather(1, target)
    if z_loss:
        log_sum_exp = logits.gather(1, target) + loss
        loss = loss + z_loss * log_sum_exp.square()
    del logits
    loss = torch.where(targets >= 0, loss.squeeze(1), 0.0)
    if not has_grad:
        return loss, None
    # the gradient of the logits: softmax, minus 1 at the target
    p = p.exp_()
    if z_loss:
        p = p * (1 + 2 * z_loss * log_sum_exp)
    if torch.compiler.is_compiling():  # fused, because a deterministic scatter would sort
        p = p - (torch.arange(p.shape[1], device=p.device) == target).to(p.dtype)
    else:
        p = p.scatter_(1, target, -1.0, reduce="add")
    return loss, p.to(dtype)


@torch.library.custom_op("nanolong::losses", mutates_args=())
def _compute_many_losses(
    x: Tensor, weight: Tensor, targets: Tensor, factor: Tensor | None, dtype: torch.dtype,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _compute_losses(x, weight, targets, factor, dtype, z_loss, _row_losses)


@_compute_many_losses.register_fake
def _fake_losses(x, weight, targets, factor, dtype, z_loss):
    losses = x.new_empty(len(x), dtype=torch.promote_types(dtype, torch.float32))
    if factor is None:
        return losses, x.new_empty(0), weight.new_empty(0, x.shape[1])
    return losses, torch.empty_like(x), torch.empty_like(weight)


def add_product(total, a, b):
    """Add a^T b to total (V, C), in place. a (N, V) and b (N, C) may have a shorter dtype.

    An operator in a graph, because a compiler would keep the products of all chunks to the end.
    """
    add = _add_product_operator if torch.compiler.is_compiling() else _add_product
    add(total, a, b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda and torch.version.cuda and a.dtype != total.dtype:
        # Unchecked: no GPU has compared its numbers yet.
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total += a.t() @ b


_add_product_operator = torch.library.custom_op(
    "nanolong::add_product", _add_product, mutates_args=("total",)
)


def token_chunks(x, weight):
    """Slices of the tokens, all of one size but for a last one that may be shorter.

    Their logits take at most 128 MiB in float32. On a GPU they take 1 GiB in 16 bits, because
    products of few rows leave most of it idle.
    """
    numbers = 1 << (29 if x.is_cuda else 25)
    most = max(128, numbers // weight.shape[0] // 128 * 128)
    n_chunks = max(1, math.ceil(len(x) / most))
    size = max(1, math.ceil(len(x) / n_chunks / 128)) * 128
    return [slice(i, i + size) for i in range(0, max(1, len(x)), size)]
