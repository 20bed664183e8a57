"""The operators in plain PyTorch, in less time and memory: they run wherever no kernel does.

reference.py defines what rope, attention and the loss compute, and tests/test_eager.py compares.
Attention goes through in chunks of queries, which are computed again in the backward pass. The loss
goes through in chunks of tokens, whose gradients are kept, if the loss is summed. A CPU has paths
of its own, and one query, which decodes a token, computes here on every device.
"""

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_private

# MKL chooses its vectorised functions at their first call. Two threads that make this call at the
# same time can get different ones, whose last bits differ. A single thread makes it here, so that
# the same command gives the same bits.
for _dtype in (torch.float32, torch.float64):
    for _function in (torch.exp, torch.log, torch.sin, torch.cos):
        _function(torch.ones(1, dtype=_dtype))

# Norms of queries and keys get bfloat16 with float32 weights under autocast, which is meant.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

# The most scores, or biases added to them, that exist at a time: 64 MiB in float32. The masks of
# documents, one for each sequence, are not counted.
MAX_SCORES = 1 << 24

# Keys of a split of one query's values, if their number is a multiple, as a compiled cache's is.
SPLIT = 256


def linear(x, weight, bias=None):
    """Compute x weight^T + bias: x (..., C), weight (N, C), bias (N,) or None.

    Returns (..., N) in the dtype of autocast, or of the weight where there is none.
    """
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)  # of a model whose norms are wider than its matrices
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

    Of a single column it would do so on one thread only, so that is multiplied twice.
    """
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    columns = torch.cat((rows, rows)).t() if n == 1 else rows.t()
    y = (weight @ columns)[:, :n].t()
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], -1)


def linear_each(x, *layers, joins_on_cpu=True):
    """Compute several linear layers of the same input; returns a list.

    In training they are one product, with joined weights: a GPU fills its last round of tiles
    better, the input is cast and its gradient added once, and threads of a CPU wait less often.
    joins_on_cpu: False for wide layers, whose outputs a CPU would copy out of the product.
    """
    if not torch.is_grad_enabled() or not (joins_on_cpu or x.is_cuda):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return linear(x, weight, bias).split([len(layer.weight) for layer in layers], -1)


def rms_norm(x, weight, eps):
    """Divide x by its root mean square over the last dimension and multiply by weight.

    x (..., C), weight (C,). eps is added to the mean square; None: F.rms_norm's default.
    """
    is_plain = x.device.type == "cpu" and x.dtype == weight.dtype and eps is not None
    is_wide = x.dtype in (torch.float32, torch.float64)
    is_traced = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if is_plain and is_wide and not is_traced and torch_private.fused_rms_norm is not None:
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """rms_norm() for a CPU, where PyTorch differentiates eight operators one by one."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, inverse = torch_private.fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        product = grad * unit
        # the component of grad * weight along x changes nothing
        along = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        dx = (grad * weight).addcmul_(unit, along, value=-1).mul_(inverse)
        return dx, product.flatten(0, -2).sum(0), None


# -----------------------------------------------------------------------------
# Rotary position embedding


def cos_sin(pos, inv_freq, factor=1.0):
    """The cosines and sines of position x frequency, times a factor: float32 (..., R/2).

    pos (...) int64, inv_freq (R/2,) float64: in float32 an angle is off by 0.06 at 1 M tokens.
    """
    # A compiler would compute them again for every channel of every head and layer. Of one token a
    # GPU does so in the kernels that there are, and this operator would launch seven in each layer.
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
    """Compute reference.rope(); the arithmetic is float32, or float64 if q is."""
    # in a decoding step, both at once: half the operator launches
    if q.shape[2] == 1 and not torch.is_grad_enabled():
        return rotate(torch.cat((q, k), 1), cos, sin).split((q.shape[1], k.shape[1]), 1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x, cos, sin):
    """Rotate queries or keys alone (B, H, T, D), as rope() does both."""
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (1 or B, 1, T, R/2)
    return _Rotation.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """A rotation, which keeps no activations: its gradient is the rotation back."""

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
    if torch.compiler.is_compiling():  # it fuses these operators
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
# Attention: by PyTorch's operator, or in bands


def attention(
    q, k, v, *, bias=None, window=0, sinks=0, positions=None, docs=None, causal=True, scale=None,
    return_lse=False, length=None, gates=None,
):  # fmt: skip
    """Compute reference.attention(), whose docstring describes the arguments.

    The softmax is float32, or float64 if q is.
    """
    H, Tq, D = q.shape[1:]
    # One query elsewhere than on a CPU takes the valid length from the device.
    is_single = Tq == 1 and not torch.is_grad_enabled()
    is_single = is_single and q.device.type not in FLASH_DEVICES
    if length is not None and not (is_single or torch.compiler.is_compiling()):
        n = int(length)
        length = None
        k, v = k[:, :, :n], v[:, :, :n]
        gates = None if gates is None else gates[..., :n]
    assert gates is None or bias is None, "gates are with no other term"
    assert length is None or causal, "a valid length is for causal attention"
    Tk = k.shape[2]
    dtype = v.dtype
    scale = D**-0.5 if scale is None else scale
    # A cache of fixed shape: keys past its length lie in the future of all queries.
    q_start = (Tk if length is None else length) - Tq
    mask = _Mask(q_start, Tk, window, sinks, positions, docs, causal)
    needs_mask = mask.hides_keys() or (causal and Tq not in (1, Tk)) or length is not None

    # autocast would round to bfloat16 again
    no_autocast = contextlib.nullcontext()
    if torch.is_autocast_enabled(q.device.type):
        no_autocast = torch.autocast(q.device.type, enabled=False)
    if is_single:
        with no_autocast:
            qkv = (q.to(dtype), k.to(dtype), v)
            return _attend_from_one_query(*qkv, bias, gates, scale, mask, needs_mask, return_lse)

    # Bands have log-sum-exps and gradients of all terms, and need little memory. On a CPU they are
    # also faster than a mask, but for one query or a short text.
    many_on_cpu = q.device.type == "cpu" and Tq > 1
    in_bands = return_lse
    added = gates if bias is None else bias
    if added is not None:
        trains = torch.is_grad_enabled() and added.requires_grad
        n_rows = H * Tq * (1 if gates is None else len(gates))
        in_bands = in_bands or many_on_cpu or trains or n_rows * Tk > MAX_SCORES
    elif needs_mask:
        in_bands = in_bands or (many_on_cpu and Tk >= 512) or Tq * Tk > MAX_SCORES

    # Keep bfloat16 only for PyTorch's operator. There float32 is faster for a short text on a CPU,
    # and for a GPU the mask would get this dtype, in which distances above 256 are rounded.
    wide = torch.promote_types(dtype, torch.float32)
    is_slow = many_on_cpu and Tk < 512
    is_coarse = added is not None and q.device.type != "cpu"
    if not (in_bands or is_slow or is_coarse):
        wide = dtype
    q, k, v = q.to(dtype).to(wide), k.to(dtype).to(wide), v.to(wide)
    with no_autocast:
        if not in_bands:
            return _attend_by_pytorch(q, k, v, bias, gates, scale, mask, needs_mask).to(dtype)
        y, lse = _attend_in_bands(q, k, v, bias, gates, scale, mask, length)
    return (y.to(dtype), lse) if return_lse else y.to(dtype)


class _Mask(NamedTuple):
    """Which keys the queries see: options of attention(), and the index of the first query."""

    q_start: int | Tensor  # or (1,)
    n_keys: int
    window: int
    sinks: int
    positions: Tensor | None
    docs: Tensor | None
    causal: bool

    def hides_keys(self):
        """Whether a window or documents hide keys."""
        has_window = self.window and (self.n_keys > self.window or self.positions is not None)
        return bool(has_window) or self.docs is not None

    def range_of(self, rows):
        """The keys that these queries may see: both are slices."""
        first, end = self.q_start + rows.start, self.q_start + rows.stop
        start, stop = 0, end if self.causal else self.n_keys
        if self.window and not self.sinks and self.positions is None:
            start, stop = max(0, first - self.window + 1), min(stop, end + self.window - 1)
        if self.docs is not None:
            # Documents lie side by side, so this finds few documents without a query.
            docs = self.docs[:, first:end]
            low, high = docs.amin(1, keepdim=True), docs.amax(1, keepdim=True)
            docs = self.docs[:, start:stop]
            found = ((docs >= low) & (docs <= high)).any(0).nonzero()
            start, stop = start + int(found[0]), start + int(found[-1]) + 1
        return slice(start, stop)

    def indices(self, rows, device):
        """The indices (n,) among the keys of these queries, a slice."""
        return torch.arange(rows.start, rows.stop, device=device) + self.q_start

    def visible(self, rows, keys, device):
        """Which of these keys, a slice, each of these queries sees, and their distances.

        bool (1 or B, 1, n, keys) and int64 (n, keys), which is negative for later keys.
        """
        query = self.indices(rows, device)
        key = torch.arange(self.n_keys, device=device)[keys]
        return visible_keys(query, key, *self[2:]), query[:, None] - key


def visible_keys(query, key, window=0, sinks=0, positions=None, docs=None, causal=True):
    """Find out which keys (m,) each query (n,) sees: bool (1 or B, 1, n, m).

    query, key: indices in the text; the others: options of attention().
    """
    seen = query[:, None] >= key if causal else torch.ones_like(query[:, None] >= key)
    seen = seen[None]
    if window:
        pos = None if positions is None else torch.atleast_2d(positions)
        of_query, of_key = (x[None] if pos is None else pos[:, x] for x in (query, key))
        gap = of_query[:, :, None] - of_key[:, None]
        seen = seen & ((gap.abs() < window) | (of_key[:, None] < sinks))
    if docs is not None:
        seen = seen & (docs[:, query, None] == docs[:, None, key])
    return seen[:, None]


def multiply_groups(x, y):
    """Multiply x (B, H, n, a) by y (B, Hk, a, b), which H / Hk heads share, without a copy of y."""
    groups = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)  # (B, Hk, H / Hk * n, a)
    return (groups @ y).view(*x.shape[:3], y.shape[3])


def _attend_by_pytorch(q, k, v, bias, gates, scale, mask, needs_mask):
    """Compute attention by PyTorch's operator, with a mask if one is needed."""
    added = None
    if bias is not None or gates is not None or needs_mask:
        added = _scores_to_add(q, k.shape[2], bias, gates, mask)
    # a bool, also if a compiled length varies
    is_causal = True if added is None and mask.causal and q.shape[2] > 1 else False
    enable_gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, added, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _scores_to_add(q, Tk, bias, gates, mask):
    """The bias or gates of all scores, -inf for keys that are not seen; without them, a bool mask.

    (B or 1, H or 1, Tq, Tk).
    """
    rows = slice(0, q.shape[2])
    visible, distance = mask.visible(rows, slice(0, Tk), q.device)
    distance = distance.abs()
    if gates is not None:
        of_queries = gates.index_select(2, mask.indices(rows, q.device))
        scores = of_queries[..., None] - gates[:, :, None]
    elif bias is None:
        return visible
    elif bias.dim() == 1:
        scores = -bias[:, None, None] * distance
    else:
        scores = bias[:, distance.clamp(max=bias.shape[1] - 1)]
    added = scores.masked_fill(~visible, float("-inf"))
    return added.to(torch.promote_types(q.dtype, torch.float32))


def _attend_from_one_query(q, k, v, bias, gates, scale, mask, needs_mask, return_lse):
    """Compute attention of one query, without gradient.

    Keys and values are read once, in their dtype: the queries that share them are the rows of one
    product, with float32 scores. PyTorch's operator does this if there is nothing to add or hide.
    """
    B, H, _, D = q.shape
    Hk, Tk = k.shape[1:3]
    is_plain = bias is None and gates is None and not (needs_mask or return_lse)
    if is_plain and (H == Hk or v.dtype.itemsize == 2):  # else it would copy keys for each query
        return _attend_by_pytorch(q, k, v, None, None, scale, mask, False)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # views of a cache
    scores = _wide_product(q.reshape(B * Hk, -1, D), k.mT).view(B, H, 1, Tk) * scale
    if bias is not None or gates is not None:
        scores = scores + _scores_to_add(q, Tk, bias, gates, mask)
    elif needs_mask:
        visible = _scores_to_add(q, Tk, bias, gates, mask)
        scores = scores.masked_fill(~visible, -math.inf)
    # Values are split over products: a single one of few rows can leave most of a GPU idle.
    n = SPLIT if Tk % SPLIT == 0 and v.is_contiguous() else Tk
    p = scores.softmax(-1).to(v.dtype).view(B * Hk, -1, Tk // n, n).transpose(1, 2)
    parts = _wide_product(p.reshape(-1, H // Hk, n), v.reshape(-1, n, D))
    y = parts.view(B, Hk, -1, H // Hk, D).sum(2).view(B, H, 1, D).to(v.dtype)
    return (y, scores.logsumexp(-1)) if return_lse else y


def _wide_product(a, b):
    """Multiply matrices (n, ., .) of 16 bits to float32, others in their dtype."""
    if a.dtype.itemsize > 2:
        return a @ b
    if a.is_cuda and torch.version.cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# -----------------------------------------------------------------------------
# Attention in bands
#
# A chunk of queries gets explicit scores for near keys, with the bias of each distance. Keys from
# the distance `reach` on share the last entry and go through PyTorch's flash attention for CPUs;
# the two parts are merged by their log-sum-exps. The backward pass of flash attention takes the
# output and the log-sum-exp over **all** keys, and returns the gradients for the distant keys. The
# last table entry is added to every distant score. Its gradient is the part of the row's total that
# the near scores do not take; the total is the gradient of the log-sum-exp.
#
# Gates c_i - c_j go through flash attention for all keys before the chunk: c_i is a constant of
# query i, which the log-sum-exp gets, and -c_j, a channel more of k. Each chunk counts c from its
# own first query, in float64, as float32 rounds great numbers. Slopes are gates: c_i = -slope * i.
#
# That operator exists on CPUs only. Elsewhere, and if attention is not causal, all keys are near.

_flash = torch_private.flash_for_cpu
_flash_backward = torch_private.flash_for_cpu_backward
FLASH_DEVICES = ("cpu",) if _flash and _flash_backward else ()
CHUNK = 128  # queries at a time on a CPU


def _attend_in_bands(q, k, v, bias, gates, scale, mask, length):
    """Compute attention in bands: the output, and the log-sum-exp (B, H, Tq)."""
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    if bias is not None and bias.dim() == 1:
        index = torch.arange(Tk if mask.causal else max(Tq, Tk), device=q.device)
        if mask.causal:
            gates = (-bias[:, None].double() * index)[None]  # (1, H, Tk)
            bias = None
        else:
            bias = -bias[:, None] * index
    bias = q.new_zeros(1, 1) if bias is None else bias.to(q.dtype)

    # The first distance that is not near, and the number of queries at a time.
    reach = max(2, bias.shape[1]) - 1
    if q.device.type not in FLASH_DEVICES:
        reach = Tk
    if mask.window and not mask.sinks and mask.positions is None:
        reach = min(reach, mask.window)
    # Not causal, all are near, and of more queries than keys the first ones are before all keys.
    reach = min(reach, Tk) if mask.causal else max(Tq, Tk)
    n = Tq if q.device.type not in FLASH_DEVICES else CHUNK
    if reach == 1 and not mask.hides_keys():  # almost all is flash attention's: in larger blocks
        n = max(n, min(6 * CHUNK, Tk // 16))
    n = max(1, min(n, Tq, MAX_SCORES // (2 * B * H * (reach + n) + B * Tk)))

    table = _by_falling_distance(reach, n, mask.causal, bias)
    return _Bands.apply(
        (mask.window, mask.sinks, int(mask.causal), reach, n), scale,
        q, k, v, table, gates, mask.docs, mask.positions, length,
    )  # fmt: skip


def _by_falling_distance(reach, n, causal, table):
    """Table (H, m) at distances 0, 1, ... -> (H, L), from distance reach + n - 1 down.

    Behind distance 0 are n - 1 times -inf, or if attention is not causal, later keys.
    """
    last = table[:, -1:].expand(-1, max(0, reach + n - table.shape[1]))
    table = torch.cat((table, last), 1)[:, : reach + n]
    future = torch.full_like(table[:, : n - 1], float("-inf"))
    later = future if causal else table[:, 1 : reach + n - 1]
    return torch.cat((table.flip(1), later), 1)


class _Bands(torch.autograd.Function):
    """Attention in bands, of which both passes are operators of their own for torch.compile."""

    @staticmethod
    def forward(ctx, sizes, scale, *tensors):
        is_compiling = torch.compiler.is_compiling()
        compute = _forward_operator if is_compiling else _attend_forward
        y, lse = compute(tensors, sizes, scale)
        ctx.save_for_backward(y, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.scale = sizes, scale
        return y, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dlse):
        y, lse, *tensors = ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        is_compiling = torch.compiler.is_compiling()
        compute = _backward_operator if is_compiling else _attend_backward
        *_, table_grad, gates_grad = ctx.needs_input_grad[2:7]
        more = (ctx.sizes, ctx.scale, table_grad, gates_grad)
        dq, dk, dv, dtable, *dgates = compute(dy, dlse, y, lse, tensors, *more)
        return None, None, dq, dk, dv, dtable, *(dgates or [None]), None, None, None


class _Call:
    """The arguments of both passes, prepared."""

    def __init__(self, tensors, sizes, scale, has_channel):
        *tensors, docs, positions, length = tensors
        q, k, v, self.table, self.gates = tensors
        window, sinks, causal, self.reach, self.n = sizes
        Tq, Tk = q.shape[2], k.shape[2] if length is None else int(length)
        self.scale = scale
        self.mask = _Mask(Tk - Tq, Tk, window, sinks, positions, docs, bool(causal))
        self.hides = self.mask.hides_keys()
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        # What flash attention takes, with a channel for gates, or for the log-sum-exp's gradient.
        self.distant = [self.q, self.k, self.v]
        if has_channel:
            weight = 0.0 if self.gates is None else 1 / scale
            self.distant = [
                F.pad(x, (0, 1), value=w) for x, w in zip(self.distant, (weight, 0, 0), strict=True)
            ]

        # The bias of n queries, one row below the other (H or 1, n, distances); chunks read parts.
        self.near_table = self.table[:, 1:].unfold(1, self.table.shape[1] - self.n, 1).flip(1)

    def chunks(self):
        """Yield rows of queries, their near keys, columns of near_table for these, and distant
        keys: all are slices.
        """
        Tq, n = self.q.shape[2], self.n
        for i in range(0, Tq, n):
            rows = slice(i, min(i + n, Tq))
            first = self.mask.q_start + i
            seen = self.mask.range_of(rows)
            start = max(seen.start, first - self.reach + 1)
            # Column 0 has distance reach - 1 in the first row, and index 0 has reach + n - 1.
            column = self.reach - 1 - (first - start)
            columns = slice(column, column + seen.stop - start)
            yield rows, slice(start, seen.stop), columns, slice(seen.start, start)

    def indices(self, rows):
        """The same slice of the keys."""
        return slice(self.mask.q_start + rows.start, self.mask.q_start + rows.stop)

    def near_scores(self, rows, near, columns):
        """Explicit scores (B, H, n, near)."""
        q = self.q[:, :, rows] * self.scale
        scores = q @ self.k[:, :, near].mT
        scores += self.near_table[:, : q.shape[2], columns]
        if self.gates is not None:
            of_queries = self.gates[:, :, self.indices(rows), None]
            scores += (of_queries - self.gates[:, :, None, near]).to(scores.dtype)
        if self.hides:
            seen, _ = self.mask.visible(rows, near, q.device)
            scores.masked_fill_(~seen, float("-inf"))
        return scores

    def distant_scores(self, rows, keys):
        """The arguments of flash attention for these scores, and the terms that it lacks.

        q, k, v; a mask to add, and the queries that see no key, or None twice; what the scores of a
        query have in common (H or 1, n or 1), or for each sequence.
        """
        shift = self.table[:, :1]
        if self.gates is not None:
            own = self.gates[:, :, self.indices(rows)]
            self.distant[1][:, :, keys, -1] = (own[..., :1] - self.gates[:, :, keys]).to(shift)
            shift = shift + (own - own[..., :1]).to(shift)
        added = is_blind = None
        if self.hides:
            seen, _ = self.mask.visible(rows, keys, self.q.device)
            is_blind = ~seen.any(-1)
            added = torch.zeros(seen.shape, dtype=self.q.dtype).masked_fill_(~seen, float("-inf"))
        q, k, v = (x[:, :, part] for x, part in zip(self.distant, (rows, keys, keys), strict=True))
        return (q, k, v), added, is_blind, shift


def _attend_forward(
    tensors: Sequence[Tensor | None], sizes: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp."""
    call = _Call(tensors, sizes, scale, tensors[4] is not None)
    y, lse = _zero_outputs(tensors)
    for rows, near, columns, distant in call.chunks():
        p = call.near_scores(rows, near, columns)
        unit = p.amax(-1, keepdim=True)
        p = p.sub_(unit).exp_()
        part = p @ call.v[:, :, near]
        unit = unit.squeeze(-1)
        total = unit + p.sum(-1).log()
        if distant.start < distant.stop:
            qkv, added, is_blind, shift = call.distant_scores(rows, distant)
            far, far_lse = _flash(*qkv, 0.0, False, attn_mask=added, scale=scale)
            far_lse = far_lse + shift
            if is_blind is not None:
                far_lse.masked_fill_(is_blind, float("-inf"))
            total = torch.logaddexp(total, far_lse)
            y[:, :, rows] = far[..., : y.shape[-1]] * (far_lse - total).exp()[..., None]
        y[:, :, rows] += part * (unit - total).exp()[..., None]
        lse[:, :, rows] = total
    return y, lse


def _attend_backward(
    dy: Tensor, dlse: Tensor | None, y: Tensor, lse: Tensor,
    tensors: Sequence[Tensor | None], sizes: Sequence[int], scale: float, table_grad: bool,
    gates_grad: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v, the table and, if there are any, the gates."""
    call = _Call(tensors, sizes, scale, tensors[4] is not None or dlse is not None)
    grads = [None if x is None else x.new_zeros(x.shape) for x in tensors[:5]]
    dq, dk, dv, dtable, dgates = grads
    near_dtable = torch.zeros_like(call.near_table) if table_grad else None
    D = y.shape[-1]
    out, dout = y, dy
    if call.distant[0].shape[-1] > D:
        # flash attention subtracts dout out from the products of dout and v: add dlse
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        out, dout = torch.cat((y, -dlse[..., None]), -1), F.pad(dy, (0, 1), value=1.0)
    for rows, near, columns, distant in call.chunks():
        q, g, total = call.q[:, :, rows], dy[:, :, rows], lse[:, :, rows]
        k, v = call.k[:, :, near], call.v[:, :, near]
        # the gradient of a number added to all scores of a query
        rest = torch.zeros_like(total) if dlse is None else dlse[:, :, rows]
        delta = (g * y[:, :, rows]).sum(-1) - rest
        p = call.near_scores(rows, near, columns).sub_(total[..., None]).exp_()
        ds = (g @ v.mT).sub_(delta[..., None]).mul_(p)
        if gates_grad:  # gradients of a query's scores sum to the gradient of its log-sum-exp
            dgates[:, :, call.indices(rows)] += _sum_to_batch(rest, dgates)
            dgates[:, :, near] -= _sum_to_batch(ds.sum(-2), dgates)
        if table_grad:
            rest = rest - ds.sum(-1)
            near_dtable[:, : ds.shape[2], columns] += _sum_to(ds, dtable)
        ds *= scale
        dv[:, :, near] += p.mT @ g
        dk[:, :, near] += ds.mT @ q
        dq[:, :, rows] = ds @ k
        if distant.start < distant.stop:
            qkv, added, is_blind, shift = call.distant_scores(rows, distant)
            far_dq, far_dk, far_dv = _flash_backward(
                dout[:, :, rows], *qkv, out[:, :, rows], total - shift, 0.0, False,
                attn_mask=added, scale=scale,
            )  # fmt: skip
            dq[:, :, rows] += far_dq[..., :D]
            dk[:, :, distant] += far_dk[..., :D]
            dv[:, :, distant] += far_dv[..., :D]
            if gates_grad:
                dgates[:, :, distant] -= _sum_to_batch(far_dk[..., D], dgates)
            if table_grad:
                rest = rest if is_blind is None else rest.masked_fill(is_blind, 0)
                dtable[:, :1] += _sum_to(rest, dtable).sum(1, keepdim=True)
    if table_grad:
        dtable[:, 1:] += _keys_to_distances(near_dtable).sum(1)
    return [x for x in grads if x is not None]


def _sum_to(x, like):
    """x (B, H, ...) summed over B, and over H where all heads share a term (1, ...)."""
    return x.sum(0) if len(like) > 1 else x.sum((0, 1))[None]


def _sum_to_batch(x, like):
    """x (B, H, ...) summed over B where all sequences share a term (1, H, ...)."""
    return x if len(like) > 1 else x.sum(0, keepdim=True)


def _zero_outputs(tensors, *others):
    """The output, a view of (B, T, H, D), and the log-sum-exp (B, H, T)."""
    q = tensors[0]
    B, H, T, D = q.shape
    return q.new_zeros(B, T, H, D).transpose(1, 2), q.new_zeros(B, H, T)


_forward_operator = torch.library.custom_op(
    "nanolong::attention_in_bands", _attend_forward, mutates_args=()
)
_backward_operator = torch.library.custom_op(
    "nanolong::attention_in_bands_backward", _attend_backward, mutates_args=()
)


_forward_operator.register_fake(_zero_outputs)


@_backward_operator.register_fake
def _fake_gradients(dy, dlse, y, lse, tensors, sizes, scale, table_grad, gates_grad):
    return [x.new_empty(x.shape) for x in tensors[:5] if x is not None]


def _keys_to_distances(p):
    """p (..., n, n_keys), by key -> (..., n, n + n_keys - 1), over falling distances.

    Row r is r tokens later than row 0, so its keys start at column n - 1 - r (Transformer-XL's
    shift). Where a row has no key it is zero.
    """
    *batch, n, n_keys = p.shape
    if n == 1:
        return p
    p = F.pad(p, (0, n - 2)).reshape(*batch, n * (n + n_keys - 2))
    return F.pad(p, (n - 1, 1)).reshape(*batch, n, n + n_keys - 1)


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

    A compiled graph would repeat the operators for each chunk; of many, it calls this as it is.
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
        del p  # before the next chunk's logits
    dx = torch.cat(dx) if dx else x.new_empty(0)
    return torch.cat(losses), dx, dweight.to(weight.dtype)


def _row_losses(logits, targets, z_loss, has_grad):
    """The losses of rows of logits (N, V), and the logits' gradient, or None, where targets count.

    Takes the only reference to the logits: they are freed before the gradient needs its memory.
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
    # the gradient of the logits: softmax, less 1 at the target
    p = p.exp_()
    if z_loss:
        p = p * (1 + 2 * z_loss * log_sum_exp)
    if torch.compiler.is_compiling():  # fused; a deterministic scatter would sort
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
    """Add a^T b to total (V, C), in place and in its dtype; a (N, V) and b (N, C) may have 16 bits.

    A compiler would keep the products of all chunks, and add them up at the end.
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
    """Slices of the tokens, all of one size but the last, which may be a little shorter.

    Their logits take at most 128 MiB in float32; on a GPU 1 GiB in 16 bits, for products of few
    rows leave most of it idle.
    """
    numbers = 1 << (29 if x.is_cuda else 25)
    most = max(128, numbers // weight.shape[0] // 128 * 128)
    n_chunks = max(1, math.ceil(len(x) / most))
    size = max(1, math.ceil(len(x) / n_chunks / 128)) * 128
    return [slice(i, i + size) for i in range(0, max(1, len(x)), size)]
