"""The whole model in float64, from the formulas: every scheme, norm, MLP, mask and extension.

The terms of the schemes are written from their papers, one distance at a time. A distance may be a
fraction, as position interpolation makes it. The weights are those of the scheme that is given.
"""

import math

import rope_formulas
import torch
import torch.nn.functional as F

# -----------------------------------------------------------------------------
# The schemes.


def alibi_bias(scheme, distance):
    """ALiBi (Press et al. 2022), by the recursion of its released code: (H,)."""

    def slopes(n):
        lower = 2 ** math.floor(math.log2(n))
        own = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
        return own if n == lower else own + slopes(2 * lower)[0::2][: n - lower]

    return -torch.tensor(slopes(scheme.config.n_head)).double() * distance


def t5_bias(scheme, distance):
    """
    T5 (Raffel et al. 2020), one-sided, with up to 32 buckets, to a quarter of the length: (H,).
    """
    max_distance = min(128, max(2, scheme.config.original_length // 4))
    n_buckets = min(32, max_distance)
    exact = n_buckets // 2
    bucket = int(distance)
    if bucket >= exact:
        log_ratio = math.log(bucket / exact) / math.log(max_distance / exact)
        bucket = min(n_buckets - 1, exact + int(log_ratio * (n_buckets - exact)))
    return scheme.weight[:, bucket].double()


def kerple_bias(scheme, distance):
    """KERPLE, logarithmic (Chi et al. 2022): (H,)."""
    r1 = scheme.r1.double().exp().log1p()  # softplus
    r2 = scheme.r2.double().exp().log1p()
    return -r1 * (1 + r2 * distance).log()


def kerple_power_bias(scheme, distance):
    """KERPLE, power (Chi et al. 2022): (H,)."""
    r1 = scheme.r1.double().exp().log1p()
    r2 = 2 / (1 + (-scheme.r2.double()).exp())
    return -r1 * distance**r2


def sandwich_bias(scheme, distance):
    """Sandwich (Chi et al. 2023), with sinusoids of 128 channels, less its value at 0: (H,)."""
    cosines = [math.cos(distance / 10000 ** (2 * k / 128)) for k in range(1, 65)]
    head = torch.arange(1, scheme.config.n_head + 1).double()
    return scheme.config.n_head / (8 * head) * (sum(cosines) - 64)


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


def shaw_vectors(scheme, distance, layer, max_distance):
    """The key and value vectors of Shaw et al. (2018), each (D,)."""
    index = min(int(distance), max_distance)
    return scheme.keys[layer, index].double(), scheme.values[layer, index].double()


def nezha_vector(scheme, distance, max_distance):
    """NEZHA's vector of a distance (Wei et al. 2019), for keys and values: (D,)."""
    return sinusoid(min(distance, max_distance), scheme.config.head_dim)


def transformer_xl_keys(scheme, distance, layer):
    """W_R R(distance), where R holds all sines, then all cosines (Dai et al. 2019): (H, D)."""
    R = sinusoid(distance, scheme.config.n_embd)
    R = torch.cat((R[0::2], R[1::2]))
    return (scheme.project[layer].double() @ R).view(scheme.u.shape)


# -----------------------------------------------------------------------------
# The model.


def quarters(config, length):
    """length / original length, rounded up to a quarter, and at least 1."""
    return max(4, math.ceil(4 * length / config.original_length)) / 4


def rope_frequencies(config, layer, length):
    """Inverse frequencies by pair, and the factor of cos and sin, for an input of `length`."""
    D = int(config.rope_fraction * config.head_dim)
    ext = config.extension or {"method": "none", "factor": 1.0, "options": {}}
    base = config.rope_base
    if config.uses_window(layer):
        base = config.rope_local_base or base
        if ext.get("layers") == "full":
            ext = {"method": "none", "factor": 1.0, "options": {}}
    L = config.original_length
    options = {"length": L * quarters(config, length), **ext["options"]}
    f, factor = rope_formulas.frequencies(ext["method"], base, D, L, ext["factor"], **options)
    f[int(config.p_rope * D // 2) :] = 0
    return f, factor


def rotate(x, pos, f, factor):
    """(B, H, T, D) rotated to positions; channel c is paired with c + R / 2."""
    r = len(f)
    angle = pos[:, None].double() * f
    a, b = x[..., :r], x[..., r : 2 * r]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., 2 * r :]), -1)


def scores_by_distance(config, q, k, pos):
    """Scores (B, H, T, T) of queries rotated to a distance of each key's own; -inf: not seen."""
    T, ext = q.shape[2], config.extension
    L, s = config.original_length, ext["factor"]
    scores = torch.full((*q.shape[:3], T), -math.inf).double()
    f, factor = rope_frequencies(config, 0, T)
    n = int(pos.max()) + 1
    for i in range(T):
        for j in range(i + 1):
            p = int(pos[i]), int(pos[j])
            d = rope_formulas.distance(ext["method"], *p, n, L, s, **ext["options"])
            if d is not None:
                rotated = rotate(q[:, :, i : i + 1], torch.tensor([d]), f, factor)
                scores[:, :, i, j] = (rotated[:, :, 0] * k[:, :, j]).sum(-1)
    return scores


def norm(x, w, name, kind, eps):
    if f"{name}.weight" not in w:
        return x
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]
    return x + w.get(f"{name}.bias", 0)


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def visible(config, layer, pos, docs):
    """(B, T, T)"""
    T = len(pos)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (i >= j)[None]
    if config.uses_window(layer):
        index = torch.arange(len(pos))
        near = index[:, None] - index < config.window
        seen = seen & (near | (index < config.sinks))
    return seen if docs is None else seen & (docs[:, :, None] == docs[:, None, :])


def position_terms(model, layer, T):
    """Bias (H, T, T), vectors added to keys (H, T, T, D) and to values, and u and v."""
    c, pos = model.config, model.config.pos
    ext = c.extension or {"method": "none"}
    factors = {"pi": ext.get("factor"), "dynamic-pi": quarters(c, T)}
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    if ext["method"] == "clamp":
        distance = distance.clamp(max=c.original_length - 1)
    d = [n / factors.get(ext["method"], 1) for n in range(T)]
    half = max(1, c.original_length // 2)
    if pos in BIASES:
        return (
            torch.stack([BIASES[pos](model.scheme, n) for n in d], 1)[:, distance],
            None,
            None,
            None,
        )
    if pos == "shaw":
        rows = [shaw_vectors(model.scheme, n, layer, min(128, half)) for n in d]
        keys, values = (torch.stack(part)[None][:, distance] for part in zip(*rows, strict=True))
        return None, keys, values, None
    if pos == "nezha":
        table = torch.stack([nezha_vector(model.scheme, n, min(64, half)) for n in d])[None][
            :, distance
        ]
        return None, table, table, None
    if pos == "xl":
        keys = torch.stack([transformer_xl_keys(model.scheme, n, layer) for n in d], 1)[:, distance]
        return None, keys, None, (model.scheme.u.double(), model.scheme.v.double())
    return None, None, None, None


def forgotten(w, h, layer):
    """The sums of log f_t over j < t <= i, by query i and key j: (B, H, T, T)."""
    log_f = (h @ w["scheme.weight"][layer].T + w["scheme.gate_bias"][layer]).sigmoid().log().mT
    i, j, t = torch.meshgrid(*[torch.arange(h.shape[1])] * 3, indexing="ij")
    return torch.einsum("bht,ijt->bhij", log_f, ((j < t) & (t <= i)).double())


def attention(model, w, name, h, layer, pos, docs, maps):
    c = model.config
    B, T, _ = h.shape
    q, k, v = (linear(h, w, f"{name}.{p}") for p in "qkv")
    D = c.head_dim
    group = c.n_head // c.n_kv_head
    if c.qk_norm == "all":
        q, k = (
            norm(x, w, f"{name}.{p}_norm", "rmsnorm", c.norm_eps) for x, p in ((q, "q"), (k, "k"))
        )
    q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, k, v))
    if c.qk_norm == "head":
        q, k = (
            norm(x, w, f"{name}.{p}_norm", "rmsnorm", c.norm_eps) for x, p in ((q, "q"), (k, "k"))
        )
    t = pos.double()[:, None]
    n = (t + 1).clamp(max=c.window + c.sinks) if c.uses_window(layer) else t + 1
    text, _, layers = c.query_scale.partition("@")
    kind, *given = text.split(":")
    L, factor, offset = [*map(float, given), *(0.0, 0.1, 0.0)[len(given) :]]
    L = L or c.original_length
    if layers == "nope" and c.uses_positions(layer):
        kind = "none"
    if kind == "logn":
        q = q * (n.log() / math.log(L)).clamp(min=1)
    elif kind == "llama4":
        q = q * (1 + factor * (1 + ((t + offset) / L).floor()).log())
    k, v = (torch.stack([x[:, head // group] for head in range(c.n_head)], 1) for x in (k, v))
    bias = keys = values = offsets = None
    ext = c.extension or {"method": "none", "options": {}}
    by_distance = ext["method"] in ("lm-infinite", "self-extend", "jet-long")
    if c.uses_positions(layer):
        bias, keys, values, offsets = position_terms(model, layer, T)
        if c.pos in ("rope", "fox-rope") and not by_distance:
            f, factor = rope_frequencies(c, layer, int(pos.max()) + 1)
            q, k = rotate(q, pos, f, factor), rotate(k, pos, f, factor)
    u, z = (x[:, None] for x in offsets) if offsets else (0, 0)
    scores = scores_by_distance(c, q, k, pos) if by_distance else (q + u) @ k.mT
    if keys is not None:
        scores = scores + torch.einsum("bhid,hijd->bhij", q + z, keys.expand(c.n_head, T, T, D))
    scale = ext["options"].get("scale", 1) if ext["method"] == "scale" else 1
    scores = scores * scale * c.attn_scale / math.sqrt(D)
    if bias is not None:
        scores = scores + bias
    if c.pos in ("fox", "fox-rope") and c.uses_positions(layer):
        scores = scores + forgotten(w, h, layer)
    scores = scores.masked_fill(~visible(c, layer, pos, docs)[:, None], -math.inf)
    if c.sink_scores:
        sink = w[f"{name}.sink_scores"][:, None, None].expand(B, -1, T, 1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    maps.append(p)
    y = p @ v
    if values is not None:
        y = y + torch.einsum("bhij,hijd->bhid", p, values.expand(c.n_head, T, T, D))
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


@torch.no_grad()
def logits(model, tokens, pos=None, docs=None, maps=None):
    """What the model should compute: (B, T, V) in float64.

    maps: a list, which gets the probabilities (B, H, T, T) of each layer.
    """
    c = model.config
    maps = [] if maps is None else maps
    w = {name: p.detach().double() for name, p in model.named_parameters()}
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

        a = attention(model, w, f"{b}.attention", n(x, "attention_norm"), layer, pos, docs, maps)
        if c.norm_position == "parallel":
            x = x + a + mlp(c, w, f"{b}.mlp", n(x, "mlp_norm"))
            continue
        x = x + n(a, "attention_post_norm")
        x = x + n(mlp(c, w, f"{b}.mlp", n(x, "mlp_norm")), "mlp_post_norm")
    head = w["embed.weight"] if c.tie_embeddings else w["head.weight"]
    return norm(x, w, "norm", c.norm, c.norm_eps) @ head.T
