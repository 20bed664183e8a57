"""Attention, the position schemes and the whole model in float64, from their formulas.

The one reference of the tests: it calls nothing of the product. Attention takes one query at a time
and is differentiable. The terms of the schemes are written from their papers, one distance at a
time. A distance may be a fraction, as position interpolation makes it. w: the weights by name.
"""

import copy
import math

import rope_formulas
import torch
import torch.nn.functional as F

# -----------------------------------------------------------------------------
# Attention.


def sees(i, Tk, window=0, sinks=0, docs=None, causal=True):
    """The keys that query i sees: (1 or B, Tk)."""
    j = torch.arange(Tk)
    seen = j <= i if causal else j < Tk
    if window:
        seen = seen & (((i - j).abs() < window) | (j < sinks))
    return seen[None] if docs is None else seen & (docs == docs[:, i, None])


def rotate(x, angle, factor=1.0):
    """Turn each pair of channels (c, c + R / 2) of x (..., D) by its angle (..., R / 2)."""
    half = angle.shape[-1]
    z = torch.complex(x[..., :half], x[..., half : 2 * half])
    z = z * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def attention(
    q, k, v, *, bias=None, gates=None, keys=None, values=None, u=0, z=0, turn=None,
    scale=None, sink_scores=None, **mask,
):  # fmt: skip
    """Attend from the last queries (B, H, Tq, D) of a text to its keys (B, Hk, Tk, D).

    bias: slopes (H,) or a table (H, m) by distance, gates: sums (B, H, Tk), as in kernels/
    keys, values: vectors by distance (H or 1, m, D), added to keys and values
    u, z: vectors (H, 1, D) that are added to the query where it meets k, and where it meets keys
    turn: distances (Tq, Tk), frequencies (R / 2,) and a factor: each query is rotated by its
        distance to a key, which is not rotated; a distance below 0 is not seen
    sink_scores: (H,), scores without a value; mask: arguments of sees()

    Returns the output (B, H, Tq, D), the log-sum-exp (B, H, Tq) and the probabilities.
    """
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    found = []
    for row in range(Tq):
        i = Tk - Tq + row
        distance = (i - torch.arange(Tk)).abs()
        query = q[:, :, row, None]  # (B, H, 1, D)
        seen = sees(i, Tk, **mask)
        turned = query + u
        if turn is not None:
            far, frequencies, factor = turn
            seen = seen & (far[row] >= 0)
            turned = rotate(turned.expand(B, H, Tk, D), far[row, :, None] * frequencies, factor)
        scores = (turned * k).sum(-1)  # (B, H, Tk)
        if keys is not None:
            scores = scores + ((query + z) * of_distance(keys, distance)).sum(-1)
        scores = scores * (D**-0.5 if scale is None else scale)
        if bias is not None and bias.dim() == 1:
            scores = scores - bias[:, None] * distance
        elif bias is not None:
            scores = scores + of_distance(bias, distance)
        if gates is not None:
            scores = scores + gates[:, :, i, None] - gates
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if sink_scores is not None:
            scores = torch.cat((scores, sink_scores[:, None].expand(B, H, 1)), -1)
        p = scores.softmax(-1)[..., :Tk]
        y = (p[..., None] * v).sum(2)
        if values is not None:
            y = y + (p[..., None] * of_distance(values, distance)).sum(2)
        found.append((y, scores.logsumexp(-1), p))
    return [torch.stack(each, 2) for each in zip(*found, strict=True)]


def of_distance(table, distance):
    """The entries of a table (H, m, ...) by distance, whose last one holds for all greater ones."""
    return table[:, distance.clamp(max=table.shape[1] - 1)]


# -----------------------------------------------------------------------------
# The schemes: what each adds to the scores by distance, (H,).


def alibi_bias(w, c, distance):
    """ALiBi (Press et al. 2022), by the recursion of its released code."""

    def slopes(n):
        lower = 2 ** math.floor(math.log2(n))
        own = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
        return own if n == lower else own + slopes(2 * lower)[0::2][: n - lower]

    return -torch.tensor(slopes(c.n_head)).double() * distance


def t5_bias(w, c, distance):
    """T5 (Raffel et al. 2020), one-sided, with up to 32 buckets, to a quarter of the length."""
    max_distance = min(128, max(2, c.original_length // 4))
    n_buckets = min(32, max_distance)
    exact = n_buckets // 2
    bucket = int(distance)
    if bucket >= exact:
        log_ratio = math.log(bucket / exact) / math.log(max_distance / exact)
        bucket = min(n_buckets - 1, exact + int(log_ratio * (n_buckets - exact)))
    return w["scheme.weight"][:, bucket]


def kerple_bias(w, c, distance):
    """KERPLE, logarithmic (Chi et al. 2022)."""
    r1, r2 = (w[f"scheme.{name}"].exp().log1p() for name in ("r1", "r2"))  # softplus
    return -r1 * (1 + r2 * distance).log()


def kerple_power_bias(w, c, distance):
    """KERPLE, power (Chi et al. 2022)."""
    r1 = w["scheme.r1"].exp().log1p()
    r2 = 2 / (1 + (-w["scheme.r2"]).exp())
    # at 0 without the power, whose derivative is not finite there
    return -r1 * distance**r2 if distance else 0 * r1


def sandwich_bias(w, c, distance):
    """Sandwich (Chi et al. 2023), with sinusoids of 128 channels, less its value at 0."""
    cosines = [math.cos(distance / 10000 ** (2 * k / 128)) for k in range(1, 65)]
    head = torch.arange(1, c.n_head + 1).double()
    return c.n_head / (8 * head) * (sum(cosines) - 64)


BIASES = {
    "alibi": alibi_bias,
    "t5": t5_bias,
    "kerple": kerple_bias,
    "kerple-power": kerple_power_bias,
    "sandwich": sandwich_bias,
}


def sinusoid(position, dim):
    """The embedding of Vaswani et al. (2017), sin, cos, sin, cos, ...: (dim,)."""
    channels = []
    for k in range(dim // 2):
        angle = position / 10000 ** (2 * k / dim)
        channels += [math.sin(angle), math.cos(angle)]
    return torch.tensor(channels, dtype=torch.float64)


def transformer_xl_keys(w, c, distance, layer):
    """W_R R(distance), where R holds all sines, then all cosines (Dai et al. 2019): (H, D)."""
    R = sinusoid(distance, c.n_embd)
    R = torch.cat((R[0::2], R[1::2]))
    return (w["scheme.project"][layer] @ R).view(c.n_head, c.head_dim)


def has_window(c, layer):
    return c.layer_pattern[layer % len(c.layer_pattern)] in "WS"


def has_positions(c, layer):
    return c.layer_pattern[layer % len(c.layer_pattern)] in "FW"


def quarters(c, length):
    """length / original length, rounded up to a quarter, and at least 1."""
    return max(4, math.ceil(4 * length / c.original_length)) / 4


def rope_turn(c, layer, pos):
    """The argument `turn` of attention() for RoPE and its 17 methods."""
    D = int(c.rope_fraction * c.head_dim)
    ext = c.extension or {"method": "none", "factor": 1.0, "options": {}}
    base, n = c.rope_base, int(pos.max()) + 1
    if has_window(c, layer):
        base = c.rope_local_base or base
        if ext.get("layers") == "full":
            ext = {"method": "none", "factor": 1.0, "options": {}}
    L, s, method = c.original_length, ext["factor"], ext["method"]
    options = {"length": L * quarters(c, n), **ext["options"]}
    f, factor = rope_formulas.frequencies(method, base, D, L, s, **options)
    f[int(c.p_rope * D // 2) :] = 0
    distance = (pos[:, None] - pos).double()
    if method in rope_formulas.BY_DISTANCE:
        for i, j in torch.tril_indices(len(pos), len(pos)).T.tolist():
            p = int(pos[i]), int(pos[j])
            d = rope_formulas.distance(method, *p, n, L, s, **ext["options"])
            distance[i, j] = -1 if d is None else d
    return distance, f, factor**2  # of queries and of keys


def terms(w, c, h, layer, pos):
    """The arguments of attention() that the scheme adds in a layer; h: the input (B, T, C)."""
    T = h.shape[1]
    ext = c.extension or {"method": "none"}
    factor = {"pi": ext.get("factor"), "dynamic-pi": quarters(c, T)}.get(ext["method"], 1)
    n_distances = min(T, c.original_length) if ext["method"] == "clamp" else T
    distances = [n / factor for n in range(n_distances)]
    half = max(1, c.original_length // 2)
    found = {}
    if c.pos in BIASES:
        found["bias"] = torch.stack([BIASES[c.pos](w, c, d) for d in distances], 1)
    elif c.pos == "shaw":  # key and value vectors (Shaw et al. 2018)
        index = [min(int(d), 128, half) for d in distances]
        found = {name: w[f"scheme.{name}"][layer][None, index] for name in ("keys", "values")}
    elif c.pos == "nezha":  # the same fixed vectors for keys and values (Wei et al. 2019)
        rows = [sinusoid(min(d, 64, half), c.head_dim) for d in distances]
        found = dict.fromkeys(("keys", "values"), torch.stack(rows)[None])
    elif c.pos == "xl":
        found["keys"] = torch.stack([transformer_xl_keys(w, c, d, layer) for d in distances], 1)
        found |= {"u": w["scheme.u"][:, None], "z": w["scheme.v"][:, None]}
    if c.pos in ("fox", "fox-rope"):  # log f_(j+1) + ... + log f_i (Lin et al. 2025)
        log_f = (h @ w["scheme.weight"][layer].T + w["scheme.gate_bias"][layer]).sigmoid().log()
        found["gates"] = torch.stack([log_f[:, : t + 1].sum(1) for t in range(T)], 2)
    if c.pos in ("rope", "fox-rope", *FILES):
        found["turn"] = rope_turn(c, layer, pos)
    known = found or c.pos in ("nope", "learned", "sinusoidal")
    assert known, f"{c.pos} has no formula in tests/reference.py: add it to BIASES or terms()"
    return found


# Schemes of examples/schemes that are RoPE with other settings; SSMax scales queries, too.
FILES = {
    "p_rope": {"p_rope": 0.75},
    "two_bases": {"rope_base": 1e6, "rope_local_base": 1e4},
    "ssmax": {},
}


def settings_of(model):
    """The GPTConfig of a model, or the one by which model.py has its scheme."""
    c = copy.copy(model.config)
    if c.pos in FILES:
        vars(c).update(FILES[c.pos])
        if c.pos == "two_bases" and c.extension:  # extends layers of full attention only
            c.extension = {**c.extension, "layers": "full"}
    return c


# -----------------------------------------------------------------------------
# The model.


def norm(x, w, name, kind, eps):
    if f"{name}.weight" not in w:
        return x
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]
    return x + w.get(f"{name}.bias", 0)


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def query_scale(w, c, layer, pos):
    """The factor of queries by position, (T, 1) or (H, T, 1), or 1."""
    t = pos.double()[:, None]
    n = (t + 1).clamp(max=c.window + c.sinks) if has_window(c, layer) else t + 1
    if c.pos == "ssmax":
        return w["scheme.s"][layer][:, None, None] * n.log()
    text, _, layers = c.query_scale.partition("@")
    kind, *given = text.split(":")
    L, factor, offset = [*map(float, given), *(0.0, 0.1, 0.0)[len(given) :]]
    L = L or c.original_length
    if layers == "nope" and has_positions(c, layer):
        return 1
    if kind == "logn":
        return (n.log() / math.log(L)).clamp(min=1)
    return 1 + factor * (1 + ((t + offset) / L).floor()).log() if kind == "llama4" else 1


def attention_layer(c, w, name, h, layer, pos, maps):
    """One layer of attention, from h (B, T, C)."""
    D = c.head_dim
    q, k, v = (linear(h, w, f"{name}.{p}") for p in "qkv")
    for by_head in (False, True):  # qk_norm is over all channels, or over those of a head
        if by_head:
            q, k, v = (x.unflatten(-1, (-1, D)) for x in (q, k, v))
        if c.qk_norm == ("head" if by_head else "all"):
            q = norm(q, w, f"{name}.q_norm", "rmsnorm", c.norm_eps)
            k = norm(k, w, f"{name}.k_norm", "rmsnorm", c.norm_eps)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q * query_scale(w, c, layer, pos)
    ext = c.extension or {"method": "none", "options": {}}
    scale = ext["options"].get("scale", 1) if ext["method"] == "scale" else 1
    options = {"scale": scale * c.attn_scale / math.sqrt(D)}
    options |= terms(w, c, h, layer, pos) if has_positions(c, layer) else {}
    if has_window(c, layer):
        options |= {"window": c.window, "sinks": c.sinks}
    if c.sink_scores:
        options["sink_scores"] = w[f"{name}.sink_scores"]
    y, _, p = attention(q, k, v, **options)
    maps.append(p)
    if c.output_gate != "none":
        gates = 1 / (1 + (-(h @ w[f"{name}.gate.weight"].T)).exp())  # (B, T, H or H D)
        width = D if c.output_gate == "head" else 1
        y = y * gates.repeat_interleave(width, -1).unflatten(-1, (-1, D)).transpose(1, 2)
    return linear(y.transpose(1, 2).flatten(2), w, f"{name}.o")


def mlp(c, w, name, h):
    up = linear(h, w, f"{name}.up")
    gelu = "none" if c.mlp == "gelu_exact" else "tanh"
    if c.mlp == "swiglu":
        up = F.silu(linear(h, w, f"{name}.gate")) * up
    elif c.mlp == "geglu":
        up = F.gelu(linear(h, w, f"{name}.gate"), approximate=gelu) * up
    else:
        up = F.gelu(up, approximate=gelu)
    return linear(up, w, f"{name}.down")


def weights(model, requires_grad=False):
    """Copies of a model's weights by name, in float64."""
    named = model.named_parameters()
    return {name: p.detach().double().requires_grad_(requires_grad) for name, p in named}


def logits(model, tokens, pos=None, w=None, maps=None):
    """What the model should compute: (B, T, V) in float64.

    w: weights in place of the model's; maps: a list, which gets the probabilities (B, H, T, T) of
    each layer.
    """
    c, w = settings_of(model), w or weights(model)
    maps = [] if maps is None else maps
    pos = torch.arange(tokens.shape[1]) if pos is None else pos
    x = w["embed.weight"][tokens] * c.embed_scale
    if c.pos == "learned":
        x = x + w["scheme.table"][pos]
    elif c.pos == "sinusoidal":
        s = c.extension["factor"] if c.extension and c.extension["method"] == "pi" else 1
        x = x + 0.02 * math.sqrt(2) * torch.stack([sinusoid(n / s, c.n_embd) for n in pos.tolist()])
    for layer in range(c.n_layer):
        b = f"blocks.{layer}"

        def n(x, name, b=b):
            return norm(x, w, f"{b}.{name}", c.norm, c.norm_eps)

        a = attention_layer(c, w, f"{b}.attention", n(x, "attention_norm"), layer, pos, maps)
        if c.norm_position == "parallel":
            x = x + a + mlp(c, w, f"{b}.mlp", n(x, "mlp_norm"))
            continue
        x = x + n(a, "attention_post_norm")
        x = x + n(mlp(c, w, f"{b}.mlp", n(x, "mlp_norm")), "mlp_post_norm")
    head = w["embed.weight"] if c.tie_embeddings else w["head.weight"]
    return norm(x, w, "norm", c.norm, c.norm_eps) @ head.T


def loss_and_gradients(model, tokens, targets):
    """The mean loss of the targets that are not negative, and its gradients by name."""
    w = weights(model, requires_grad=True)
    losses = logits(model, tokens, w=w).log_softmax(-1)[targets >= 0]
    loss = -losses.gather(-1, targets[targets >= 0][:, None]).mean()
    return loss.detach(), dict(zip(w, torch.autograd.grad(loss, w.values()), strict=True))
