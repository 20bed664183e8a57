"""The operators in plain PyTorch, in less time and memory: what runs wherever no kernel does.

reference.py defines what rope, attention and the loss compute, and tests/test_eager.py compares.
Queries and tokens go through in chunks: those of queries are computed again in the backward pass,
those of tokens leave their gradients, if a loss is summed. A CPU has paths of its own.
"""

import contextlib
import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

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


def between_graphs(function):
    """Wrap a function so that torch.compile calls it as it is, between two graphs.

    This is torch.compiler.disable(), called when the compiler first traces a call: before, it would
    import the compiler, which takes two seconds.
    """
    disabled = []

    def disable():
        if not disabled:
            disabled.append(torch.compiler.disable(function))

    # Tracing executes it. This is what torch.compiler.assume_constant_result sets.
    disable._dynamo_marked_constant = True

    def call(*args):
        if not torch.compiler.is_compiling():
            return function(*args)
        disable()
        return disabled[0](*args)

    return call


# -----------------------------------------------------------------------------
# Linear layers and norms
#
# Both have a faster path for generation on a CPU, where each layer computes a single row.


def linear(x, weight, bias=None):
    """Compute x weight^T + bias.

    x (..., C), weight (N, C), bias (N,) or None. Returns (..., N) in the dtype of autocast, or of
    the weight where there is none.
    """
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)  # of a model whose norms are wider than its matrices
    if not torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if x.numel() != weight.shape[1] or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    # A single row under autocast: F.linear repacks the bfloat16 matrix for every token, a product
    # with a vector reads it as it is.
    y = (weight @ x.view(-1)).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(y.dtype)


def rms_norm(x, weight, eps):
    """Divide x by its root mean square over the last dimension and multiply by weight.

    x (..., C), weight (C,). eps is added to the mean square; None: F.rms_norm's default.
    """
    n = weight.numel()
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not eps:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.numel() != n or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # A single row: F.rms_norm launches eight small operators, where a dot product and two scalings
    # are enough.
    row = x.view(-1)
    return (x * weight).mul_((n / (torch.dot(row, row).item() + n * eps)) ** 0.5)


# -----------------------------------------------------------------------------
# Rotary position embedding


def rope(q, k, cos, sin):
    """Compute reference.rope(); the arithmetic is float32, or float64 if q is."""
    half = cos.shape[-1]
    dtype = torch.promote_types(q.dtype, cos.dtype)
    if cos.dim() == 3:  # positions for each sequence
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, R/2)
    # (..., T, R): (a, b) -> (a cos - b sin, b cos + a sin)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rotate(x):
        rotated = x[..., : 2 * half].to(dtype)
        rotated = (rotated * cos + rotated.roll(half, -1) * sin).to(x.dtype)
        if x.shape[-1] == 2 * half:
            return rotated
        return torch.cat((rotated, x[..., 2 * half :]), -1)

    # in a decoding step, both at once: half the operator launches
    if q.shape[2] == 1 and not torch.is_grad_enabled():
        return rotate(torch.cat((q, k), 1)).split((q.shape[1], k.shape[1]), 1)
    return rotate(q), rotate(k)


# -----------------------------------------------------------------------------
# Attention


def attention(
    q, k, v, *, bias=None, relative=None, window=0, sinks=0, positions=None, docs=None,
    causal=True, scale=None, return_lse=False, length=None, plan=None,
):  # fmt: skip
    """Compute reference.attention(), whose docstring describes the arguments.

    The softmax is float32, or float64 if q is.
    """
    if length is not None and not torch.compiler.is_compiling():
        n = int(length)
        length = None
        k, v = k[:, :, :n], v[:, :, :n]
        positions = None if positions is None else positions[..., :n]
        docs = None if docs is None else docs[:, :n]
    if length is not None and not causal:
        raise ValueError(
            "attention: a compiled step with a length is causal: use causal=True, or no length"
        )
    H, Tq, D = q.shape[1:]
    Tk = k.shape[2]
    # The index of the first query. Compiled, a cache keeps its shape: keys past its length lie in
    # the future of all queries, so the causal mask hides them.
    q_start = Tk - Tq if length is None else length - Tq

    dtype = v.dtype
    q, k = q.to(dtype), k.to(dtype)
    # PyTorch's bfloat16 attention of many queries is much slower than float32 on a CPU if the
    # context is short, forward and backward, and faster if it is long.
    if q.device.type == "cpu" and dtype == torch.bfloat16 and Tk < 512 and Tq > 1:
        q, k, v = q.float(), k.float(), v.float()

    # autocast would round to bfloat16 again
    no_autocast = contextlib.nullcontext()
    if torch.is_autocast_enabled(q.device.type):
        no_autocast = torch.autocast(q.device.type, enabled=False)

    mask = _Mask(q_start, Tk, window, sinks, positions, docs, causal)
    hides_keys = window and (Tk > window or positions is not None)
    needs_mask = length is not None or bias is not None or docs is not None or hides_keys
    if relative is not None or return_lse:
        scale = D**-0.5 if scale is None else scale
        only_hides = relative is None and bias is None and length is None
        with no_autocast:
            if only_hides and q.device.type == "cpu" and not torch.is_grad_enabled():
                y, lse = _flash_with_lse(q, k, v, scale, mask, needs_mask)
            else:
                y, lse = _explicit_attention(q, k, v, relative, scale, bias, mask)
        return (y.to(dtype), lse) if return_lse else y.to(dtype)

    sdpa = functools.partial(
        F.scaled_dot_product_attention, scale=scale, enable_gqa=H != k.shape[1]
    )
    with no_autocast:
        if not needs_mask and (Tq == Tk or Tq == 1 or not causal):
            # a bool, also if a compiled length varies
            is_causal = True if causal and Tq > 1 else False
            return sdpa(q, k, v, is_causal=is_causal).to(dtype)

        # On a GPU a mask has the dtype of the queries, and bfloat16 rounds distances above 256.
        is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
        if bias is not None and is_16_bit and q.device.type != "cpu":
            q, k, v = q.float(), k.float(), v.float()

        def attend(i, q, k, v, bias):
            keys, added = mask.of_chunk(i, q, bias)
            if q.dtype == torch.float64 and bias is not None:
                added = added.double()
            return (sdpa(q, k[:, :, keys], v[:, :, keys], attn_mask=added),)

        n_scores = Tk * (1 if bias is None else H)  # of a query
        return _in_chunks(attend, n_scores, q, k, v, bias)[0].to(dtype)


def describe_wrong_terms(bias, relative, n, n_head, head_dim):
    """Say what of a scheme's bias and relative vectors for n keys attention() cannot take.

    Returns the end of an error message that begins with the scheme's name, or None.
    """
    if bias is not None:
        is_table = len(_shape(bias)) == 2 and len(bias) == n_head and 1 <= bias.shape[1] <= n
        fits = _shape(bias) == (n_head,) or is_table
        if not fits or bias.dtype != torch.float32:
            expected = f"slopes ({n_head},) or a table ({n_head}, m) in float32, m <= {n}"
            return _wrong(f"bias({n}, layer)", bias, expected)
    if relative is None:
        return None
    if not isinstance(relative, tuple) or len(relative) != 3:
        return _wrong(f"relative({n}, layer)", relative, "a tuple (keys, values, offsets)")
    keys, values, offsets = relative
    shape = _shape(keys)
    fits = len(shape) == 3 and shape[0] in (1, n_head) and 1 <= shape[1] <= n
    if not fits or shape[2] != head_dim:
        expected = f"keys ({n_head} or 1, m, {head_dim}), m <= {n}"
        return _wrong(f"relative({n}, layer)[0]", keys, expected)
    if values is not None and _shape(values) != shape:
        return _wrong(f"relative({n}, layer)[1]", values, f"values {shape}, or None")
    if offsets is not None and [_shape(x) for x in offsets] != [(n_head, head_dim)] * 2:
        expected = f"two offsets ({n_head}, {head_dim}), or None"
        return _wrong(f"relative({n}, layer)[2]", offsets, expected)
    return None


def _shape(x):
    return tuple(x.shape) if torch.is_tensor(x) else ()


def _wrong(call, x, expected):
    found = type(x).__name__
    if torch.is_tensor(x):
        found = f"{str(x.dtype).removeprefix('torch.')} {_shape(x)}"
    return f"{call} must return {expected}, and returned {found}: see kernels.eager.attention()"


def _in_chunks(attend, n_scores, q, *tensors):
    """Compute attend(i, queries from i on, *tensors), a tuple of tensors, in chunks of queries.

    n_scores: of a query. If there are several chunks, each is computed again in the backward pass:
    training then keeps only the arguments. The activations of all together would be (T, T).
    """
    n = max(1, MAX_SCORES // n_scores)  # queries at a time
    if q.shape[2] > n and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        attend = functools.partial(
            checkpoint, attend, use_reentrant=False, preserve_rng_state=False
        )
    parts = [attend(i, q[:, :, i : i + n], *tensors) for i in range(0, q.shape[2], n)]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(part, 2) for part in zip(*parts, strict=True))


class _Mask(NamedTuple):
    """Which keys the queries see: options of attention(), and the index of the first query."""

    q_start: int | torch.Tensor  # or (1,)
    n_keys: int
    window: int
    sinks: int
    positions: torch.Tensor | None
    docs: torch.Tensor | None
    causal: bool

    def of_chunk(self, i, q, bias):
        """The mask and bias of a chunk of queries q, row i and later: (1 or B, 1 or H, n, keys).

        Without bias a bool mask, true where a key is visible. With bias float32, to be added to the
        scores, -inf where a key is not visible. The keys are a slice, which is returned first, and
        outside of which none is visible.
        """
        n, device = q.shape[2], q.device
        first = self.q_start + i
        keys = slice(0, self.n_keys)
        if self.causal and isinstance(first, int):
            hides_first = self.window and not self.sinks and self.positions is None
            keys = slice(max(0, first - self.window + 1) if hides_first else 0, first + n)
        query = torch.arange(n, device=device) + first
        key = torch.arange(keys.start, keys.stop, device=device)
        distance = query[:, None] - key  # (n, keys)
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        visible = visible[None]  # (1, n, keys)
        if self.window:
            pos = self.positions
            pos = torch.arange(keys.stop, device=device) if pos is None else pos
            pos = pos if pos.dim() == 2 else pos[None]  # (1 or B, Tk)
            gap = pos[:, query, None] - pos[:, None, keys]
            visible = visible & ((gap.abs() < self.window) | (pos[:, None, keys] < self.sinks))
        if self.docs is not None:
            visible = visible & (self.docs[:, query, None] == self.docs[:, None, keys])
        if bias is None:
            return keys, visible[:, None]

        hidden = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))
        hidden = hidden[:, None]
        distance = distance.clamp(min=0) if self.causal else distance.abs()
        if bias.dim() == 1:  # slopes
            return keys, hidden - bias[:, None, None] * distance
        if not self.causal:
            return keys, hidden + bias[:, distance.clamp(max=bias.shape[1] - 1)]
        # A table over distances makes a Toeplitz matrix: its rows are overlapping pieces of one
        # bias row, in reverse. Its gradient is a sum along diagonals, which the backward of unfold
        # computes in a fixed order (that of indexing would add element by element).
        falling = query[-1:] - key[0] - torch.arange(n + len(key) - 1, device=device)
        bias_row = bias[:, falling.clamp(0, bias.shape[1] - 1)]
        return keys, hidden + bias_row.unfold(1, len(key), 1).flip(1)


def _flash_with_lse(q, k, v, scale, mask, needs_mask):
    """Compute attention() without bias on a CPU, forward only: the output and the log-sum-exp.

    What F.scaled_dot_product_attention computes there, which does not return the second.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    flash = functools.partial(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, dropout_p=0.0, scale=scale
    )
    if not needs_mask and (q.shape[2] == k.shape[2] or not mask.causal):
        return flash(q, k, v, is_causal=mask.causal)

    def attend(i, q):
        keys, visible = mask.of_chunk(i, q, None)
        added = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        return flash(q, k[:, :, keys], v[:, :, keys], attn_mask=added)

    return _in_chunks(attend, k.shape[2], q)


def _explicit_attention(q, k, v, relative, scale, bias, mask):
    """Compute attention() with explicit scores: the output and the log-sum-exp.

    Relative keys and values are matrix products over distances, moved between distances and keys.
    """
    B, H = q.shape[:2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    keys, values, offsets = relative or (None, None, None)
    u, w = 0, 0
    if offsets is not None:
        u, w = (x.to(dtype)[:, None] for x in offsets)  # (H, 1, D)

    def attend(i, q, k, v, keys, values, u, w, bias):
        seen, added = mask.of_chunk(i, q, bias)
        score = (q + u) @ k[:, :, seen].mT  # (B, H, n, seen)
        if keys is not None:
            n, n_seen = score.shape[2:]
            # falling
            distance = mask.q_start + i - seen.start + n - 1
            distance = distance - torch.arange(n + n_seen - 1, device=q.device)
            distance = distance.clamp(min=0) if mask.causal else distance.abs()
            distance = distance.clamp(max=keys.shape[1] - 1)
            relative_score = (q + w) @ keys.to(dtype)[:, distance].mT
            score = score + _distances_to_keys(relative_score, n_seen)
        if added.dtype == torch.bool:
            score = (score * scale).masked_fill(~added, float("-inf"))
        else:
            score = score * scale + added
        p = score.softmax(-1)
        y = p @ v[:, :, seen]
        if values is not None:
            y = y + _keys_to_distances(p) @ values.to(dtype)[:, distance]
        return y, score.logsumexp(-1)

    return _in_chunks(attend, B * H * 2 * k.shape[2], q, k, v, keys, values, u, w, bias)


def _distances_to_keys(x, n_keys):
    """x (..., n, n + n_keys - 1), over falling distances -> (..., n, n_keys).

    Row r is r tokens later than row 0, so its keys start at column n - 1 - r. In memory, that is
    one long row, read from element n - 1 on with a stride shorter by one (Transformer-XL's shift).
    """
    *batch, n, length = x.shape
    if n == 1:
        return x
    x = x.reshape(*batch, n * length)[..., n - 1 : n - 1 + n * (length - 1)]
    return x.reshape(*batch, n, length - 1)[..., :n_keys]


def _keys_to_distances(p):
    """The inverse: p (..., n, n_keys) -> (..., n, n + n_keys - 1), zero where there is no key."""
    *batch, n, n_keys = p.shape
    if n == 1:
        return p
    p = F.pad(p, (0, n - 2)).reshape(*batch, n * (n + n_keys - 2))
    return F.pad(p, (n - 1, 1)).reshape(*batch, n, n + n_keys - 1)


# -----------------------------------------------------------------------------
# Cross-entropy


def linear_cross_entropy(x, weight, targets, reduction="mean"):
    """Compute reference.linear_cross_entropy() in float32, in chunks of tokens.

    Of the logits (N, V) at most 128 MiB, or 128 tokens, exist at a time. The gradient of the
    weight is accumulated in float32, whatever the dtype of the product. There are no second
    derivatives.
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    grads_in_forward = reduction != "none" and needs_grad
    apply = _LinearCrossEntropy.apply
    if torch.compiler.is_compiling() and len(_chunks(x, weight)) > 32:
        apply = _apply_between_graphs  # a graph would repeat the operators for each chunk
    losses = apply(x, weight, targets, dtype, grads_in_forward)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (targets >= 0).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """The losses (N,), or, with grads_in_forward, their sum (1,).

    The gradient of a sum is known up to one factor, so it is computed while a chunk's logits are in
    memory, and the backward pass multiplies it by that factor. Otherwise the backward pass computes
    the logits again.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, grads_in_forward):
        ctx.grads_in_forward = grads_in_forward
        ctx.dtype = dtype
        if grads_in_forward:
            losses, gradients = _losses_and_gradients(x, weight, targets, dtype, 1)
            ctx.save_for_backward(*gradients)
            return losses.sum(0, keepdim=True)
        losses, _ = _losses_and_gradients(x, weight, targets, dtype, None)
        ctx.save_for_backward(x, weight, targets)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.grads_in_forward:
            dx, dweight = (_scale(saved, grad) for saved in ctx.saved_tensors)
        else:
            _, gradients = _losses_and_gradients(*ctx.saved_tensors, ctx.dtype, grad[:, None])
            dx, dweight = gradients
        return dx, dweight, None, None, None


def _scale(saved, factor):
    """Multiply a saved gradient: in place, unless retain_graph=True may need it once more."""
    # torch has no public way to ask for retain_graph (2.13)
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return (saved * factor).to(saved.dtype)
    return saved.mul_(factor)


_apply_between_graphs = between_graphs(_LinearCrossEntropy.apply)


def _losses_and_gradients(x, weight, targets, dtype, factor):
    """The losses (N,), and the gradients of sum(factor * loss) for x and weight.

    factor: 1, one for each token (N, 1), or None: no gradients.
    """
    wide = torch.promote_types(dtype, torch.float32)
    w = weight.to(dtype)
    counts = targets[:, None] >= 0
    losses, dx = [], []
    dweight = None
    for rows in _chunks(x, weight):
        chunk = x[rows].to(dtype)
        target = targets[rows, None].clamp(min=0)
        p = F.log_softmax(chunk @ w.t(), -1, dtype=wide)
        losses.append(torch.where(counts[rows], -p.gather(1, target), 0.0).squeeze(1))
        if factor is not None:
            # the gradient of the logits: softmax, less 1 at the target
            if torch.compiler.is_compiling():  # fused; a deterministic scatter would sort
                at_target = torch.arange(p.shape[1], device=p.device) == target
                p = p.exp() - at_target.to(wide)
            else:
                p = p.exp_().scatter_(1, target, -1.0, reduce="add")
            p = p.to(dtype)
            token_weight = counts[rows] * (factor if isinstance(factor, int) else factor[rows])
            dx.append(((p @ w) * token_weight).to(x.dtype))
            product = (p.t() @ (chunk * token_weight).to(dtype)).to(wide)
            dweight = product if dweight is None else dweight.add_(product)
            del product
        del p  # before the next chunk's logits
    losses = torch.cat(losses) if losses else x.new_zeros(0, dtype=wide)
    if factor is None:
        return losses, None
    if not dx:
        return losses, (torch.zeros_like(x), torch.zeros_like(weight))
    dx = torch.cat(dx)
    return losses, (dx, dweight.to(weight.dtype))


def _chunks(x, weight):
    """Slices of the tokens, whose logits take at most 128 MiB in float32."""
    size = max(128, (1 << 25) // weight.shape[0] // 128 * 128)
    return [slice(i, i + size) for i in range(0, len(x), size)]
