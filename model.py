"""nanoLong's GPT: the position schemes and a Llama-shaped transformer, in the order of the data flow. How RoPE is stretched: stretch.py; how tokens are drawn: generate.py.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(pos="rope", vocab_size=257))
    logits = model(tokens)                      # (B, T) int64 -> (B, T, V)
    loss = model(tokens, targets)               # mean nats per token, targets of -1 ignored
    for token in model.generate(tokens, 100): ...

Read next: train.py. Shapes in comments: B batch, T tokens, C width, H query heads, Hk key/value heads, D head dimension, V vocabulary.
"""
import inspect
import math
import warnings
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import kernels
from checkpoint import Refused
from generate import Cache, Linear, RMSNorm, generate  # noqa: F401 (from model import Cache)
from stretch import ATTEND, STRETCH, frequencies


class PastTrainedLength(UserWarning):
    """The model is read at more tokens than it was made for."""


@dataclass
class GPTConfig:
    pos: str = "rope"           # position scheme: nope, learned, sinusoidal, shaw, nezha, xl, t5, alibi, kerple, kerple-power, sandwich or rope
    n_layer: int = 4            # blocks
    n_head: int = 3             # query heads
    n_kv_head: int = 0          # key and value heads, each shared by n_head / n_kv_head query heads; 0: n_head
    head_dim: int = 0           # width of a head; 0: n_embd / n_head
    n_embd: int = 192           # width of the model
    block_size: int = 256       # tokens in a window: the length that the model is made for
    dropout: float = 0.0        # share of activations dropped in training
    qk_norm: bool = False       # RMS-normalise queries and keys, with a learned gain, before they are rotated
    tied: bool = True           # the head's matrix is the embedding's
    rope_base: float = 10000.0  # rope: the wavelengths run from 2 pi to about 2 pi rope_base tokens
    rope_fraction: float = 1.0  # rope: share of a head's channels that is rotated
    window: int = 0             # a token sees the last `window` tokens only; 0: all before it
    sinks: int = 0              # with a window: the first `sinks` tokens stay visible
    nope_every: int = 0         # hybrid: every n-th block has no position scheme and no window; 0: all blocks are alike
    attn_scale: float = 1.0     # multiplies the 1 / sqrt(head_dim) of the scores
    random_positions: int = 0   # learned, sinusoidal, rope: a window's positions are drawn, in order, from so many; 0: they are 0, 1, 2, ...
    vocab_size: int = 257       # internal: given by the data
    norm_eps: float = 1e-5      # internal: of imported checkpoints (hf.py)
    mlp_width: int = 0          # internal: of the hidden layer; 0: 8/3 of n_embd, rounded up to a multiple of 32
    qkv_bias: bool = False      # internal: queries, keys and values have a bias
    family: str = ""            # internal: "gpt2" is the subclass in hf.py
    stretch: dict | None = None  # internal: method, factor, options and trained_length, as GPT.stretch() wrote them
    nope_layers: list | None = None    # internal: the blocks without a scheme, by default what nope_every says
    window_layers: list | None = None  # internal: the blocks with the window, by default those with a scheme

    def __post_init__(self):
        for f in fields(self):  # a checkpoint's JSON may hold anything
            value, kinds = getattr(self, f.name), {int: int, float: (int, float), bool: bool, str: str}.get(f.type)
            if kinds and (not isinstance(value, kinds) or isinstance(value, bool) != (f.type is bool) or f.type is float and not abs(value) < math.inf):
                raise Refused(f"{f.name}={value!r:.60} is not of its kind, {f.type.__name__}: see --help")
        self.n_kv_head = self.n_kv_head or self.n_head
        if min(self.n_layer, self.n_head, self.n_kv_head, self.n_embd, self.block_size, self.vocab_size) < 1:
            raise Refused("n_layer, n_head, n_kv_head, n_embd, block_size and vocab_size must all be at least 1")
        if not self.head_dim and self.n_embd % self.n_head:
            raise Refused(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them, or give head_dim")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim < 1 or max(self.n_layer << 12, self.n_head << 8, self.head_dim << 8, self.n_embd, self.vocab_size, self.block_size >> 16) > 1 << 24 or \
                self.n_layer * self.n_embd * (self.n_head * self.head_dim + self.mlp_width) + self.n_embd * self.vocab_size > 1 << 40:
            raise Refused("n_layer (up to 2^12), n_head and head_dim (2^16), n_embd and vocab_size (2^24) and block_size (2^40) are sizes of a model of at most 2^40 parameters: choose smaller ones")
        if self.n_head % self.n_kv_head:
            raise Refused(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: choose a divisor of n_head")
        if self.pos not in POSITIONS:
            raise Refused(f"there is no position scheme {self.pos!r}: pos is one of {', '.join(POSITIONS)}")
        if not 0 <= self.dropout < 1:
            raise Refused(f"dropout={self.dropout} is not a share: choose 0 <= dropout < 1")
        if self.window < 0 or self.sinks < 0 or (self.sinks and not self.window):
            raise Refused("window and sinks count tokens, and sinks need a window: give --window=N (0 sees everything) before --sinks=N")
        if not (0 < self.attn_scale < math.inf and 0 < self.norm_eps < 1 and 0 <= self.mlp_width <= 1 << 24):
            raise Refused(f"attn_scale={self.attn_scale}, norm_eps={self.norm_eps} and mlp_width={self.mlp_width} must be numbers above 0")
        scheme = POSITIONS[self.pos]
        outside = all(getattr(scheme, place) is getattr(NoPE, place) for place in ("rotate", "bias", "relative"))
        if self.nope_every and (outside or not 2 <= self.nope_every <= self.n_layer):
            raise Refused(f"nope_every={self.nope_every} " + (f"takes the scheme out of some blocks, and --pos={self.pos} does nothing in any: leave it out" if outside else
                          f"does not fit {self.n_layer} blocks: choose 2 to {self.n_layer}, or --pos=nope to take the scheme out of all"))
        if self.random_positions and (scheme.by_index or scheme is NoPE or self.window):
            raise Refused("random_positions needs a scheme that reads positions (learned, sinusoidal, rope), and " + ("a window counts them too: leave one of them out" if self.window else f"--pos={self.pos} has only distance by index: leave it out"))
        if self.random_positions and not self.block_size <= self.random_positions <= 1 << 24:
            raise Refused(f"random_positions={self.random_positions} must be at least block_size={self.block_size}, and at most 2^24")
        if self.nope_layers is None:
            self.nope_layers = [layer for layer in range(self.n_layer) if self.nope_every and (layer + 1) % self.nope_every == 0]
        if self.window_layers is None:
            self.window_layers = [layer for layer in range(self.n_layer) if self.window and layer not in self.nope_layers]
        for name in ("nope_layers", "window_layers"):
            if not isinstance(layers := getattr(self, name), list) or len(layers) > self.n_layer or not all(type(layer) is int and 0 <= layer < self.n_layer for layer in layers):
                raise Refused(f"{name} lists blocks, and there are {self.n_layer}")
        if (s := self.stretch) is not None and not (isinstance(s, dict) and {"method", "factor", "options", "trained_length"} <= s.keys() and isinstance(s["options"], dict) and isinstance(s["factor"], (int, float))
                                                    and isinstance(s["method"], str) and 1 <= s["factor"] < 1e12 and type(s["trained_length"]) is int and 1 <= s["trained_length"] <= self.block_size):
            raise Refused("stretch is no stretching that was written by GPT.stretch()")

    @property
    def trained_length(self):
        """The original training length in tokens: block_size before any stretching."""
        return self.stretch["trained_length"] if self.stretch else self.block_size

    @property
    def reach(self):
        """How many positions the model knows: block_size, or more when training drew them at random."""
        return max(self.block_size, self.random_positions)


# ---------------------------------------------------------------------------------------------------------------------
# Position schemes. A scheme can act in the places that NoPE shows, where each is the identity; a new one is a class and
# a line in POSITIONS. `pos` is an int64 tensor of positions, (T,) or (B, T); `layer` the index of the block that asks.

class NoPE(nn.Module):
    """No position at all: causal attention alone must count (Haviv et al. 2022). The base of every scheme.

    bounded: beyond block_size there is nothing to look up, so it is refused. by_index: distances are counted by index, so
    positions with gaps inside a document are refused. methods: what stretch() takes, with each one's options.
    """
    bounded = by_index = dynamic = False
    methods = {"none": (), "scale": ("scale",)}

    def __init__(self, config):
        super().__init__()
        self.config, self.divisor, self.score_scale, self.length, self.clamped = config, 1.0, 1.0, None, False  # divisor: of positions or distances

    def embed(self, x, pos):
        """Add to the token embeddings x (B, T, C)."""
        return x

    def rotate(self, q, k, pos, layer):
        """Rotate queries (B, H, T, D) and keys (B, Hk, T, D)."""
        return q, k

    def bias(self, n, layer):
        """What distance adds to the scores over n keys: None, float32 slopes (H,), or a float32 table (H, m), m <= n, constant from m - 1 on."""
        return None

    def relative(self, n, layer):
        """What distance adds to the keys and values themselves, over n of them: None, or (keys, values, offsets), as kernels.attention has them:
        vectors (H or 1, m, D), m <= n, constant from m - 1 on, the same for values or None, and two query offsets (H, D) or None."""
        return None

    def attend(self, q, k, v, pos, layer, cache, **options):
        """Attention of queries (B, H, T, D) over their own and the cache's keys and values: (B, H, T, D). options: kernels.attention's."""
        q, k = self.rotate(q, k, pos, layer)
        if cache is None:
            bias, relative = self.bias(k.shape[2], layer), self.relative(k.shape[2], layer)
        else:  # keys are kept rotated
            k, v = cache.append(layer, k.to(v.dtype), v)
            bias, relative = cache.terms(self, layer, k.shape[2])
        return kernels.attention(q, k, v, bias=bias, relative=relative, **options)

    def prepare(self, length):
        """Called before `length` tokens in all are read. Returns what the scheme's tables then depend on: a cache filled under another is read anew.

        Dynamic methods scale by the total length, rounded up to a multiple of a quarter of the trained one."""
        if self.dynamic:
            trained = self.config.trained_length
            self.fit(max(trained, -(-4 * length // trained) * trained / 4))
        return self.length

    def fit(self, length):
        """A dynamic method: set the tables for texts of `length` tokens."""
        self.length, self.divisor = length, length / self.config.trained_length

    def stretch(self, method, factor, **options):
        """Prepare for factor times the trained length, or raise Refused. "none" only raises the allowed length, "pi" divides positions, or distances, by the factor,
        "dynamic-pi" by that of the text at hand, "scale" multiplies the scores by options["scale"], which extend.py fits."""
        self.check(method, options)
        self.divisor, self.score_scale, self.dynamic, self.length = factor if method == "pi" else 1.0, options.get("scale", 1.0), method.startswith("dynamic"), None
        self.clamped = method == "clamp"

    def check(self, method, options):
        """Raise Refused unless stretch() takes them."""
        if method not in self.methods:
            raise Refused(f"--pos={self.config.pos} has nothing for method {method!r} to change: use --method={', '.join(self.methods)}")
        if unknown := sorted(set(options) - set(self.methods[method])):
            raise Refused(f"method {method!r} of --pos={self.config.pos} takes no option {unknown[0]!r}: " + (f"its options are {', '.join(self.methods[method])}" if self.methods[method] else "it has none"))
        if isinstance(scale := options.get("scale", 1.0), bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise Refused(f"scale={scale} must be a number above 0")

    def rows(self, n, count):
        """Which of `count` rows, one a distance, n distances read, up to the first that reads the last: a slice, or, of divided distances, int64 (m,)."""
        if self.divisor == 1:
            return slice(n)
        return (torch.arange(min(n, math.ceil((count - 1) * self.divisor) + 1)) / self.divisor + 1e-9).long()

    def constant(self, name, tensor):
        """Keep a tensor that follows the model's device but never its dtype (bfloat16 frequencies are a classic bug) and is not saved."""
        setattr(self, name, tensor)
        self.__dict__.setdefault("_constants", []).append(name)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        device = fn(torch.zeros(1)).device
        for name in self.__dict__.get("_constants", []):
            tensor = getattr(self, name)
            no_double = device.type == "mps" and tensor.dtype == torch.float64
            setattr(self, name, tensor.to(device, torch.float32 if no_double else tensor.dtype))
        return self


class Learned(NoPE):
    """A learned vector for each position, added to the embeddings (GPT-2)."""
    bounded = True
    methods = {"pi": ()}

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.randn(config.reach, config.n_embd) * 0.02)

    def embed(self, x, pos):
        return x + self.table[pos]

    def stretch(self, method, factor, **options):
        """The vectors are interpolated: position t reads between rows t / factor, the last one going on (to be fine-tuned)."""
        super().stretch(method, factor, **options)
        was, rows = len(self.table), round(self.config.trained_length * factor)
        if rows != was:  # of a checkpoint they are
            at = (torch.arange(rows, dtype=torch.float64) * was / rows).clamp(max=was - 1).to(self.table.device)
            low, table = at.long(), self.table.detach()
            self.table = nn.Parameter(torch.lerp(table[low], table[(low + 1).clamp(max=was - 1)], (at - low)[:, None].to(table.dtype)))


class Sinusoidal(NoPE):
    """sin and cos of the position, interleaved, at wavelengths of 2 pi to 2 pi 10000 tokens, added to the embeddings (Vaswani et al. 2017).

    The unit sinusoids are scaled to the size of freshly initialised embeddings, 0.02 sqrt(2), or they would drown them.
    """
    scale = 0.02 * math.sqrt(2)
    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        if config.n_embd % 2:
            raise Refused(f"--pos=sinusoidal pairs channels, so n_embd={config.n_embd} must be even")
        self.constant("inv_freq", 10000.0 ** -(torch.arange(0, config.n_embd, 2, dtype=torch.float64) / config.n_embd))

    def embed(self, x, pos):
        angle = pos[..., None] * (self.inv_freq / self.divisor)  # (T, C/2) or (B, T, C/2), float64
        return x + self.scale * torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(x.dtype)


class Shaw(NoPE):
    """A learned vector for each distance, added to the keys, and one added to the values, shared by the heads of a layer (Shaw et al. 2018).

    Distances from `clip` on share the last vector. It is at most half the trained length, so that training sees the last one often: beyond
    that length it stands for everything far. All start at zero, which is NoPE.
    """
    by_index = True
    methods = {"none": (), "pi": ()}
    clip = 128

    def __init__(self, config):
        super().__init__(config)
        rows = min(self.clip, max(1, config.trained_length // 2)) + 1
        self.keys = nn.Parameter(torch.zeros(config.n_layer, rows, config.head_dim))
        self.values = nn.Parameter(torch.zeros(config.n_layer, rows, config.head_dim))

    def relative(self, n, layer):
        rows = self.rows(n, self.keys.shape[1])
        return self.keys[layer, None, rows], self.values[layer, None, rows], None


class NEZHA(NoPE):
    """Shaw's vectors, but fixed: sin and cos of the distance, interleaved, for keys and values alike, clipped at 64 (Wei et al. 2019)."""
    by_index = True
    methods = {"none": (), "pi": ()}
    clip = 64

    def __init__(self, config):
        super().__init__(config)
        if config.head_dim % 2:
            raise Refused(f"--pos=nezha pairs channels, so head_dim={config.head_dim} must be even")
        self.clip = min(self.clip, max(1, config.trained_length // 2))
        self.constant("inv_freq", 10000.0 ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim))

    def relative(self, n, layer):
        distance = torch.arange(min(n, math.ceil(self.clip * self.divisor) + 1), device=self.inv_freq.device) / self.divisor
        angle = distance.clamp(max=self.clip)[:, None] * self.inv_freq
        table = torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()[None]  # (1, m, D)
        return table, table, None


class XL(NoPE):
    """Transformer-XL's terms (Dai et al. 2019): ((q + u) k + (q + v) W_R R) / sqrt(D), R the sinusoids [sin | cos] of the distance, (C,).

    u and v (H, D) are shared by all layers, W_R (H D, C) is each layer's own. Beyond the trained length its sinusoids are new, unless "clamp" makes them the last.
    """
    by_index = True
    methods = {"none": (), "pi": (), "clamp": ()}

    def __init__(self, config):
        super().__init__(config)
        if config.n_embd % 2:
            raise Refused(f"--pos=xl pairs channels, so n_embd={config.n_embd} must be even")
        self.constant("inv_freq", 10000.0 ** -(torch.arange(0, config.n_embd, 2, dtype=torch.float64) / config.n_embd))
        self.u = nn.Parameter(torch.zeros(config.n_head, config.head_dim))
        self.v = nn.Parameter(torch.zeros(config.n_head, config.head_dim))
        self.project = nn.Parameter(torch.randn(config.n_layer, config.n_head * config.head_dim, config.n_embd) * (0.5 / math.sqrt(config.n_embd)))

    def relative(self, n, layer):
        m = min(n, self.config.trained_length) if self.clamped else n
        angle = torch.arange(m, device=self.u.device)[:, None] * (self.inv_freq / self.divisor)  # (m, C/2), float64
        R = torch.cat((angle.sin(), angle.cos()), -1).to(self.project.dtype)
        with torch.autocast(R.device.type, enabled=False):  # bfloat16 sinusoids would make far distances alike
            return F.linear(R, self.project[layer]).unflatten(-1, self.u.shape).transpose(0, 1), None, (self.u, self.v)  # (H, m, D)


class T5(NoPE):
    """A learned score for each head and bucket of distances, shared by all layers (Raffel et al. 2020), added after the 1/sqrt(D).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to max_distance, which is at most the
    trained length: a bucket never visited in training would keep its initial value and be read beyond it.
    """
    by_index = True
    methods = {"none": (), "pi": ()}
    n_buckets, max_distance = 32, 128

    def __init__(self, config):
        super().__init__(config)
        n, far, exact = self.n_buckets, min(self.max_distance, config.trained_length), self.n_buckets // 2
        bucket = [d if d < exact else min(n - 1, exact + int(math.log(d / exact) / math.log(far / exact) * (n - exact))) for d in range(far)]
        self.constant("bucket", torch.tensor(bucket[:bucket.index(bucket[-1]) + 1]))  # (m,), up to the first distance of the last bucket visited
        self.weight = nn.Parameter(torch.zeros(config.n_head, self.n_buckets))

    def bias(self, n, layer):
        return self.weight[:, self.bucket[self.rows(n, len(self.bucket))]].float()


class ALiBi(NoPE):
    """Scores fall linearly with distance, by a fixed slope for each head (Press et al. 2022), added after the 1/sqrt(D)."""
    by_index = True
    methods = {"none": (), "pi": (), "dynamic-pi": ()}

    def __init__(self, config):
        super().__init__(config)
        H, power = config.n_head, 2 ** int(math.log2(config.n_head))  # of a head count that is no power of two, every other slope of the next one
        slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)] + [2 ** (-4 * (2 * h + 1) / power) for h in range(H - power)]
        self.constant("slopes", torch.tensor(slopes, dtype=torch.float64).float())

    def bias(self, n, layer):
        return self.slopes / self.divisor  # interpolated slopes (Al-Khateeb et al. 2023), where it is not 1


class Kerple(NoPE):
    """KERPLE, logarithmic (Chi et al. 2022): -r1 ln(1 + r2 distance), with r1 and r2 above 0 learned for each head and shared by all layers."""
    by_index = True
    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        self.r1 = nn.Parameter((torch.rand(config.n_head) * 1.99 + 0.01).expm1().log())  # softplus of it: about U(0, 2), and of r2 about U(0, 1)
        self.r2 = nn.Parameter((torch.rand(config.n_head) * 0.99 + 0.01).expm1().log())

    def bias(self, n, layer):
        distance = torch.arange(n, device=self.r1.device) / self.divisor
        return (-F.softplus(self.r1)[:, None] * torch.log1p(F.softplus(self.r2)[:, None] * distance)).float()


class KerplePower(NoPE):
    """KERPLE, power: -r1 distance^r2, with r1 above 0 and 0 < r2 < 2 learned for each head and shared by all layers."""
    by_index = True
    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        self.r1 = nn.Parameter((torch.rand(config.n_head) * 0.99 + 0.01).expm1().log())  # softplus of it: about U(0, 1)
        self.r2 = nn.Parameter((torch.rand(config.n_head) * 0.98 + 0.01).logit())  # 2 sigmoid of it: about U(0, 2)

    def bias(self, n, layer):
        power = (2 * self.r2.sigmoid()[:, None] * (torch.arange(1, n, device=self.r1.device) / self.divisor).log()).exp()  # from distance 1 on: 0^p ln 0 is no gradient
        return (-F.softplus(self.r1)[:, None] * F.pad(power, (1, 0))).float()


class Sandwich(NoPE):
    """What sinusoidal embeddings of width 128 leave of q k, summed over the frequencies and scaled by head (Chi et al. 2023): fixed, and 0 at distance 0."""
    by_index = True
    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        self.constant("inv_freq", 10000.0 ** -(torch.arange(2, 130, 2, dtype=torch.float64) / 128))
        self.constant("slopes", config.n_head / (8 * torch.arange(1, config.n_head + 1, dtype=torch.float64)))

    def bias(self, n, layer):
        lost = (torch.arange(n, device=self.slopes.device)[:, None] * (self.inv_freq / self.divisor)).cos().sum(-1) - 64  # (n,)
        return (self.slopes[:, None] * lost).float()


class Rope(NoPE):
    """Rotate each pair of channels (c, c + R/2) of queries and keys by position x frequency (Su et al. 2021), in the half-split layout."""

    def __init__(self, config):
        super().__init__(config)
        if not 0 <= config.rope_fraction <= 1 or not 1 < config.rope_base < math.inf:
            raise Refused(f"rope_fraction={config.rope_fraction} must lie in 0..1 and rope_base={config.rope_base} above 1")
        self.rotary_dim = int(config.rope_fraction * config.head_dim)
        if config.head_dim % 2 or self.rotary_dim % 2:
            raise Refused(f"--pos=rope pairs channels, so head_dim={config.head_dim} and its rotated part of {self.rotary_dim} must be even")
        self.constant("inv_freq", None)
        self.turned = (None,)
        self.stretch("none", 1.0)

    methods = {name: list(inspect.signature(method).parameters)[4:] for name, method in STRETCH.items()}

    def stretch(self, method, factor, **options):
        """By the functions of stretch.py."""
        self.check(method, options)
        self.set_table(method, factor, options)
        self.dynamic, self.length = "length" in self.methods[method] and "length" not in options, None
        self.plan, self.asked = (method, factor, options), None

    def set_table(self, method, factor, options):
        """Returns whether the table is another one now."""
        inv_freq, m = frequencies(method, self.config.rope_base, self.rotary_dim, self.config.trained_length, factor, **options)
        same = self.inv_freq is not None and m == self.attention_factor and not inv_freq.is_meta and torch.equal(inv_freq, self.inv_freq.to(inv_freq))
        self.inv_freq, self.attention_factor = inv_freq if self.inv_freq is None else inv_freq.to(self.inv_freq), m
        return not same

    def fit(self, length):
        if length != self.asked:
            method, factor, options = self.plan
            if self.set_table(method, factor, {**options, "length": length}) or self.length is None:
                self.length = length  # the shortest text that is read so: a table that stays leaves a cache whole
            self.asked = length

    def prepare(self, length):
        return length if self.plan[0] in ATTEND else super().prepare(length)  # what attends in its own way keeps no rotated keys

    def attend(self, q, k, v, pos, layer, cache, window=0, positions=None, docs=None, scale=None, **options):
        if self.plan[0] not in ATTEND:
            return super().attend(q, k, v, pos, layer, cache, window=window, positions=positions, docs=docs, scale=scale, **options)
        if window or docs is not None or pos.dim() > 1 or q.shape[2] != len(pos) or (pos != torch.arange(len(pos), device=pos.device)).any():
            raise Refused(f"method {self.plan[0]!r} reads one text from its start: leave out windows, documents and positions")
        return ATTEND[self.plan[0]](q, k, v, lambda x, at: kernels.rope(x, x, *self.angles(at))[0], self.config.trained_length, self.plan[1], scale, **self.plan[2])

    def angles(self, pos):
        """cos and sin, float32 (T, R/2) or (B, T, R/2), of int64 positions."""
        if not torch.compiler.is_compiling() and self.turned[0] is pos and self.turned[1] is self.inv_freq and self.turned[2:4] == (pos._version, self.attention_factor):
            return self.turned[4]  # once for all blocks, which share them
        angle = pos[..., None] * self.inv_freq  # float64: float32 angles are wrong by 0.06 at a million tokens
        tables = (angle.cos() * self.attention_factor).float(), (angle.sin() * self.attention_factor).float()
        if not torch.compiler.is_compiling():
            self.turned = pos, self.inv_freq, pos._version, self.attention_factor, tables
        return tables

    def rotate(self, q, k, pos, layer):
        return kernels.rope(q, k, *self.angles(pos))


POSITIONS = {"nope": NoPE, "learned": Learned, "sinusoidal": Sinusoidal, "shaw": Shaw, "nezha": NEZHA, "xl": XL, "t5": T5, "alibi": ALiBi,
             "kerple": Kerple, "kerple-power": KerplePower, "sandwich": Sandwich, "rope": Rope}


# ---------------------------------------------------------------------------------------------------------------------
# The transformer: RMSNorm before each half, attention with grouped queries, SwiGLU, no biases: Llama's shape.

class Attention(nn.Module):
    """Causal self-attention with grouped queries, optional QK-norm and window. The scheme rotates, biases or relates; its name is not known here."""

    def __init__(self, config, layer):
        super().__init__()
        H, Hk, D, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.config, self.layer, self.window = config, layer, config.window if layer in config.window_layers else 0
        self.q = Linear(C, H * D, bias=config.qkv_bias)
        self.k = Linear(C, Hk * D, bias=config.qkv_bias)
        self.v = Linear(C, Hk * D, bias=config.qkv_bias)
        self.o = Linear(H * D, C, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, config.norm_eps), RMSNorm(D, config.norm_eps)

    def forward(self, x, scheme, pos, docs, cache, by_hand=False):
        c, (B, T, _) = self.config, x.shape
        q = self.q(x).view(B, T, c.n_head, c.head_dim)
        k = self.k(x).view(B, T, c.n_kv_head, c.head_dim)
        v = self.v(x).view(B, T, c.n_kv_head, c.head_dim).transpose(1, 2)  # (B, Hk, T, D)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        held = pos if cache is None else cache.pos
        y = scheme.attend(q.transpose(1, 2), k.transpose(1, 2), v, pos, self.layer, cache, window=self.window, sinks=c.sinks if self.window else 0, positions=held if self.window and by_hand else None,
                          docs=docs if cache is None else cache.docs, length=None if cache is None else cache.count, scale=c.attn_scale * scheme.score_scale / math.sqrt(c.head_dim))
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): three matrices, with config.mlp_width channels between them."""

    def __init__(self, config):
        super().__init__()
        hidden = config.mlp_width or -(-8 * config.n_embd // (3 * 32)) * 32
        self.gate = Linear(config.n_embd, hidden, bias=False)
        self.up = Linear(config.n_embd, hidden, bias=False)
        self.down = Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.n_embd, config.norm_eps), Attention(config, layer)
        self.mlp_norm, self.mlp = RMSNorm(config.n_embd, config.norm_eps), MLP(config)
        self.dropout = config.dropout

    def forward(self, x, *rest):  # rest: what Attention.forward takes
        x = x + F.dropout(self.attention(self.attention_norm(x), *rest), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.meta, self.checkpoint_activations = config, {}, False
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.init_weights()
        self.pos, self.nope = POSITIONS[config.pos](config), NoPE(config)  # last: of one seed, all schemes have the same other weights
        if config.stretch:
            self.pos.stretch(config.stretch["method"], config.stretch["factor"], **config.stretch["options"])

    def init_weights(self):
        """Every parameter by name: embeddings N(0, 0.02), matrices N(0, 1/(2 sqrt(width in))), the two that feed the residual stream zero,
        gains one. A scheme draws its own. Raises on a name that no rule covers."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                kind = name.split(".")[-2]
                if kind in ("embed", "head"):
                    p.normal_(0, 0.02)
                elif kind.endswith("norm"):
                    p.fill_(1)
                elif name.endswith("bias"):
                    p.zero_()
                elif kind in ("q", "k", "v", "gate", "up"):
                    p.normal_(0, 0.5 / math.sqrt(p.shape[1]))
                elif kind in ("o", "down"):
                    p.zero_()
                else:
                    raise RuntimeError(f"init_weights has no rule for {name}")

    def forward(self, tokens, targets=None, positions=None, docs=None, cache=None, reduction="mean"):
        """tokens (B, T) int64 -> logits (B, T, V); with targets (B, T) -> the loss in nats, float32, and no logits are kept.

        targets of -1 are ignored; reduction "mean", "sum" or "none" (B, T). positions (T,) or (B, T) int64: by default the indices,
        going on where the cache ends. docs (B, T): document numbers, attention stays inside one. cache: a model.Cache, extended here.
        Past block_size tokens the model computes and warns (PastTrainedLength); a scheme that has nothing to look up there raises Refused.
        """
        x = self.hidden(tokens, positions, docs, cache)
        if targets is None:
            return self.head(x)
        loss = kernels.linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def hidden(self, tokens, positions=None, docs=None, cache=None):
        """The final hidden states (B, T, C), after the last norm; arguments as in forward()."""
        new, first = tokens.shape[1], cache.length if cache is not None else 0
        end, by_hand = first + new, positions is not None or cache is not None and cache.by_hand  # otherwise a token's position is its index
        if cache is not None and cache.at is not None:  # a reading of fixed shape: checked when it began
            return self.layers(tokens, positions, docs, cache, cache.by_hand)
        if positions is None:
            positions = torch.arange(first, end, device=tokens.device)
        elif not torch.compiler.is_compiling():
            end = self.check_positions(positions, docs)
        if end > self.config.reach and not torch.compiler.is_compiling():
            if self.pos.bounded:
                raise Refused(f"--pos={self.config.pos} has no vector for position {end - 1}: the model was made for {self.config.reach} tokens, so "
                              "use no more, or train it with a longer --block_size")
            warnings.warn(f"reading {end} tokens with a model made for {self.config.reach}", PastTrainedLength, stacklevel=2)
        scale = self.pos.prepare(end)
        if cache is not None:
            cache.by_hand, (tokens, positions, docs) = by_hand, cache.extend(tokens, positions, docs, scale)
        return self.layers(tokens, positions, docs, cache, by_hand)[:, -new:]

    def layers(self, tokens, positions, docs, cache, by_hand):
        """hidden() without its checks, of all that is read: (B, T, C)."""
        x = F.dropout(self.pos.embed(self.embed(tokens), positions), self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            run = kernels.keeping_attention(block) if self.checkpoint_activations and torch.is_grad_enabled() else block
            x = run(x, self.nope if layer in self.config.nope_layers else self.pos, positions, docs, cache, by_hand)
        return self.norm(x)

    def check_positions(self, positions, docs):
        """Positions given by hand: not negative, and without gaps inside a document where the scheme counts distance by index. Returns the last one, plus 1."""
        gaps = (positions.diff() != 1) if docs is None else (positions.diff() != 1) & (docs.diff() == 0)
        if self.pos.by_index and gaps.any():
            raise Refused(f"--pos={self.config.pos} counts distance by index, so positions with gaps mean nothing to it: give consecutive positions")
        if (positions < 0).any():
            raise Refused("positions must not be negative")
        return int(positions.max()) + 1

    def draw_positions(self, rows, length, seed):
        """Randomized positions (Ruoss et al. 2023), where config.random_positions is set: int64 (rows, length), each row sorted and distinct, drawn from 0 ..
        random_positions - 1 by this seed; None where it is not. Training, evaluation and generation hand them to forward()."""
        if not self.config.random_positions:
            return None
        noise = torch.rand(rows, max(length, self.config.random_positions), generator=torch.Generator().manual_seed(seed))
        return noise.topk(length).indices.sort().values.to(self.embed.weight.device)

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, compiled=False):
        """Continue tokens (B, T), T >= 1, or a list of B prompts (T,) of any lengths, each as if alone: yields (B, 1) int64 tensors, one at a time, drawn from softmax(logits / temperature).

        temperature 0 takes the likeliest token; top_k > 0 keeps the k likeliest, top_p < 1 the fewest that hold that share of the mass. generator: one, or a list of one a row. compiled: the reading of a token, by torch.compile.
        """
        return generate(self, tokens, max_new_tokens, temperature, top_k, top_p, generator, compiled)

    def stretch(self, method, factor, **options):
        """Make the model ready for factor times its length, in place; a second stretch replaces the method and multiplies the factors,
        while base and trained length stay the original ones. Raises Refused, with nothing changed, where scheme or factor do not allow it."""
        if not (math.isfinite(factor) and factor >= 1):
            raise Refused(f"factor={factor} does not stretch: give a number of at least 1")
        if self.config.random_positions and (factor > 1 or method != "none"):
            raise Refused(f"this model was trained on positions drawn from {self.config.random_positions}: up to there it needs no stretching; train it with a larger --random_positions to go on")
        trained, total = self.config.trained_length, factor * (self.config.stretch or {"factor": 1.0})["factor"]
        self.pos.stretch(method, total, **options)
        self.config.stretch = {"method": method, "factor": total, "options": options, "trained_length": trained}
        self.config.block_size = round(trained * total)

    def flops_per_token(self, length=None):
        """Floating point operations of a training step per token at this length: 6 per weight that multiplies, and 12 per layer, channel
        of the heads and visible token for the two products of attention (PaLM's count: causality saves nothing)."""
        c, length = self.config, length or self.config.block_size
        visible = sum(min(length, c.window + c.sinks) if layer in c.window_layers else length for layer in range(c.n_layer))
        weights = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and not name.startswith(("embed", "pos", "head")))
        return 6 * (weights + self.head.weight.numel()) + 12 * visible * c.n_head * c.head_dim

    def save(self, folder, optim=None, **meta):
        """Write a checkpoint folder, whole or not at all. optim: a dict of tensors; meta: what else JSON can hold, beside what meta the model was loaded with.

        Raises Refused when the folder exists already.
        """
        weights = {name: p.detach().float().cpu().contiguous() for name, p in self.named_parameters()}  # a tied head once
        checkpoint.write(folder, {"model": weights} | ({} if optim is None else {"optim": optim}), {**self.meta, **meta, "config": asdict(self.config)})

    @classmethod
    def load(cls, path, best=False):
        """The model of a run folder (its newest whole step, or its best) or of a step folder: on the CPU, float32, eval mode.

        model.meta holds the rest of meta.json. Raises Refused, naming the file and a way out, when there is none or it is damaged.
        """
        folder = checkpoint.checkpoint_folder(path, best)
        meta = checkpoint.read_meta(folder)
        settings = meta.pop("config")
        if unknown := sorted(set(settings) - {f.name for f in fields(GPTConfig)}):
            raise Refused(f"{folder / 'meta.json'} has settings that this version does not know: {', '.join(unknown)}")
        try:
            config = GPTConfig(**settings)
            if config.family:  # an imported checkpoint of another shape: a subclass
                from hf import FAMILIES
                cls = FAMILIES[config.family]
            with torch.device("meta"):
                shapes = {name: tuple(p.shape) for name, p in cls(config).named_parameters()}
            if not 0 <= (meta.get("bos") or 0) < config.vocab_size:
                raise ValueError(f"bos {meta['bos']} is outside the vocabulary")
        except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError, RuntimeError, ImportError) as error:
            raise Refused(f"{folder / 'meta.json'} is damaged ({type(error).__name__}: {error}); {checkpoint.others(folder)}") from None
        checkpoint.check(folder / "model.safetensors", meta, shapes)  # before memory is taken
        model = cls(config)
        checkpoint.load_weights(model, folder / "model.safetensors")
        model.meta, model.folder = meta, folder
        return model.eval()
