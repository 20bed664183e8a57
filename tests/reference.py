"""The whole model in float64, from the formulas: every scheme, norm, MLP, mask and extension."""

import math

import rope_formulas
import torch
import torch.nn.functional as F
from formulas import BIASES, nezha_vector, shaw_vectors, sinusoid, transformer_xl_keys


def alibi_bias(scheme, distance):
    """The recursion of ALiBi's released code, for any number of heads."""

    def slopes(n):
        lower = 2 ** math.floor(math.log2(n))
        own = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
        return own if n == lower else own + slopes(2 * lower)[0::2][: n - lower]

    return -torch.tensor(slopes(scheme.config.n_head)).double() * distance


BIASES = {**BIASES, "alibi": alibi_bias}


def input_length(config, length):
    """The length that a dynamic method scales by: rounded up to a quarter of the original one."""
    L = config.original_length
    return max(L, math.ceil(4 * length / L) * L / 4)


def rope_frequencies(config, base, length, extended=True):
    """Inverse frequencies by pair, and the factor of cos and sin, for an input of `length`."""
    D = int(config.rope_fraction * config.head_dim)
    ext = config.extension if extended else None
    ext = ext or {"method": "none", "factor": 1.0, "options": {}}
    options = {"length": input_length(config, length), **ext["options"]}
    L, s = config.original_length, ext["factor"]
    f, factor = rope_formulas.frequencies(ext["method"], base, D, L, s, **options)
    f[int(config.p_rope * D // 2) :] = 0
    return f, factor


def scores_by_distance(config, q, k):
    """Scores (B, H, T, T) of queries rotated to a distance of each key's own; -inf: not seen."""
    T, ext = q.shape[2], config.extension
    L, s = config.original_length, ext["factor"]
    scores = torch.full((*q.shape[:3], T), -math.inf).double()
    f, factor = rope_frequencies(config, config.rope_base, T)
    for i in range(T):
        for j in range(i + 1):
            d = rope_formulas.distance(ext["method"], i, j, L, s, **ext["options"])
            if d is not None:
                rotated = rotate(q[:, :, i : i + 1], torch.tensor([d]), f, factor)
                scores[:, :, i, j] = (rotated[:, :, 0] * k[:, :, j]).sum(-1)
    return scores


def rotate(x, pos, f, factor):
    """(B, H, T, D) rotated to positions; channel c is paired with c + R / 2."""
    r = len(f)
    angle = pos[:, None].double() * f
    a, b = x[..., :r], x[..., r : 2 * r]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., 2 * r :]), -1)


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
        near = pos[:, None] - pos[None, :] < config.window
        seen = seen & (near | (pos < config.sinks)[None, :])
    return seen if docs is None else seen & (docs[:, :, None] == docs[:, None, :])


def position_terms(model, layer, T):
    """Bias (H, T, T), vectors added to keys (H, T, T, D) and to values, and u and v."""
    c, pos = model.config, model.config.pos
    ext, L = c.extension or {"method": "none"}, c.original_length
    factor = ext["factor"] if ext["method"] == "pi" else 1
    if ext["method"] == "dynamic-pi":
        factor = input_length(c, T) / L
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    last = L - 1 if ext["method"] == "clamp" else T
    d = [min(n, last) / factor for n in range(T)]
    half = max(1, L // 2)
    if pos in BIASES:
        return torch.stack([BIASES[pos](model.pos, n) for n in d], 1)[:, distance], None, None, None
    if pos == "shaw":
        rows = [shaw_vectors(model.pos, n, layer, min(128, half)) for n in d]
        keys, values = (torch.stack(part)[None][:, distance] for part in zip(*rows, strict=True))
        return None, keys, values, None
    if pos == "nezha":
        table = torch.stack([nezha_vector(model.pos, n, min(64, half)) for n in d])[None][
            :, distance
        ]
        return None, table, table, None
    if pos == "xl":
        keys = torch.stack([transformer_xl_keys(model.pos, n, layer) for n in d], 1)[:, distance]
        return None, keys, None, (model.pos.u.double(), model.pos.v.double())
    return None, None, None, None


def attention(model, w, name, h, layer, pos, docs):
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
    t, L = pos.double()[:, None], c.score_scale_length or c.original_length
    n = (t + 1).clamp(max=c.window + c.sinks) if c.uses_window(layer) else t + 1
    if c.score_scale == "logn":
        q = q * (n.log() / math.log(L)).clamp(min=1)
    elif c.score_scale == "llama4":
        steps = ((t + c.score_scale_offset) / L).floor()
        q = q * (1 + c.score_scale_coefficient * (1 + steps).log())
    k, v = (torch.stack([x[:, head // group] for head in range(c.n_head)], 1) for x in (k, v))
    bias = keys = values = offsets = None
    by_distance = False
    if c.uses_positions(layer):
        bias, keys, values, offsets = position_terms(model, layer, T)
        if c.pos == "rope":
            is_local = c.uses_window(layer) and c.rope_local_base
            own = c.rope_local_base if is_local else c.rope_base
            ext = c.extension or {}
            extended = ext.get("layers") != "full" or not c.uses_window(layer)
            f, factor = rope_frequencies(c, own, int(pos.max()) + 1, extended)
            by_distance = ext.get("method") in ("lm-infinite", "self-extend")
            if not by_distance:
                q, k = rotate(q, pos, f, factor), rotate(k, pos, f, factor)
    u, z = (x[:, None] for x in offsets) if offsets else (0, 0)
    scores = scores_by_distance(c, q, k) if by_distance else (q + u) @ k.mT
    if keys is not None:
        scores = scores + torch.einsum("bhid,hijd->bhij", q + z, keys.expand(c.n_head, T, T, D))
    scores = scores * c.attn_scale / math.sqrt(D)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible(c, layer, pos, docs)[:, None], -math.inf)
    if c.sink_scores:
        sink = w[f"{name}.sink_scores"][:, None, None].expand(B, -1, T, 1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    y = p @ v
    if values is not None:
        y = y + torch.einsum("bhij,hijd->bhid", p, values.expand(c.n_head, T, T, D))
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
def logits(model, tokens, pos=None, docs=None):
    """What the model should compute: (B, T, V) in float64."""
    c = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    pos = torch.arange(tokens.shape[1]) if pos is None else pos
    x = w["embed.weight"][tokens] * c.embed_scale
    if c.pos == "learned":
        x = x + w["pos.table"][pos]
    elif c.pos == "sinusoidal":
        s = c.extension["factor"] if c.extension and c.extension["method"] == "pi" else 1
        x = x + 0.02 * math.sqrt(2) * torch.stack([sinusoid(n / s, c.n_embd) for n in pos.tolist()])
    for layer in range(c.n_layer):
        b = f"blocks.{layer}"

        def n(x, name, b=b):
            return norm(x, w, f"{b}.{name}", c.norm, c.norm_eps)

        a = attention(model, w, f"{b}.attention", n(x, "attention_norm"), layer, pos, docs)
        if c.norm_position == "parallel":
            x = x + a + mlp(c, w, f"{b}.mlp", n(x, "mlp_norm"))
            continue
        x = x + n(a, "attention_post_norm")
        x = x + n(mlp(c, w, f"{b}.mlp", n(x, "mlp_norm")), "mlp_post_norm")
    head = w["embed.weight"] if c.tie_embeddings else w["head.weight"]
    return norm(x, w, "norm", c.norm, c.norm_eps) @ head.T
