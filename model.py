"""nanoLong's GPT: the position schemes, the stretching of RoPE, and a Llama-shaped transformer, in the order of the data flow.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(pos="rope", vocab_size=257))
    logits = model(tokens)                      # (B, T) int64 -> (B, T, V)
    loss = model(tokens, targets)               # mean nats per token, targets of -1 ignored
    for token in model.generate(tokens, 100): ...

Read next: train.py. Shapes in comments: B batch, T tokens, C width, H query heads, Hk key/value heads, D head dimension, V vocabulary.
"""
import hashlib
import inspect
import json
import math
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels

FORMAT = 1  # of checkpoints, in meta.json


class Refused(ValueError):
    """What a scheme, a method or a checkpoint cannot do, in one sentence that names the way out."""


class PastTrainedLength(UserWarning):
    """The model is read at more tokens than it was made for."""


@dataclass
class GPTConfig:
    pos: str = "rope"           # position scheme: nope, learned, sinusoidal, t5, alibi or rope
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
    vocab_size: int = 257       # internal: given by the data
    stretch: dict | None = None  # internal: method, factor, options and trained_length, as GPT.stretch() wrote them

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        if min(self.n_layer, self.n_head, self.n_kv_head, self.n_embd, self.block_size, self.vocab_size) < 1:
            raise Refused("n_layer, n_head, n_kv_head, n_embd, block_size and vocab_size must all be at least 1")
        if not self.head_dim and self.n_embd % self.n_head:
            raise Refused(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them, or give head_dim")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim < 1 or max(self.n_layer, self.n_head, self.head_dim, self.n_embd, self.vocab_size) > 1 << 24:
            raise Refused("head_dim, n_layer, n_head, n_embd and vocab_size are sizes of a model: choose them between 1 and 2^24")
        if self.n_head % self.n_kv_head:
            raise Refused(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: choose a divisor of n_head")
        if self.pos not in POSITIONS:
            raise Refused(f"there is no position scheme {self.pos!r}: pos is one of {', '.join(POSITIONS)}")
        if not 0 <= self.dropout < 1:
            raise Refused(f"dropout={self.dropout} is not a share: choose 0 <= dropout < 1")
        if self.window < 0 or self.sinks < 0 or (self.sinks and not self.window):
            raise Refused("window and sinks count tokens, and sinks need a window: give --window=N (0 sees everything) before --sinks=N")

    @property
    def trained_length(self):
        """The original training length in tokens: block_size before any stretching."""
        return self.stretch["trained_length"] if self.stretch else self.block_size


# ---------------------------------------------------------------------------------------------------------------------
# Position schemes. A scheme can act in the places that NoPE shows, where each is the identity; a new one is a class and
# a line in POSITIONS. `pos` is an int64 tensor of positions, (T,) or (B, T); `layer` the index of the block that asks.

class NoPE(nn.Module):
    """No position at all: causal attention alone must count (Haviv et al. 2022). The base of every scheme.

    bounded: beyond block_size there is nothing to look up, so it is refused. by_index: distances are counted by index, so
    positions with gaps inside a document are refused.
    """
    bounded = by_index = False

    def __init__(self, config):
        super().__init__()
        self.config = config

    def embed(self, x, pos):
        """Add to the token embeddings x (B, T, C)."""
        return x

    def rotate(self, q, k, pos, layer):
        """Rotate queries (B, H, T, D) and keys (B, Hk, T, D)."""
        return q, k

    def bias(self, n, layer):
        """What distance adds to the scores over n keys: None, float32 slopes (H,), or a float32 table (H, m), m <= n, constant from m - 1 on."""
        return None

    def stretch(self, method, factor, **options):
        """Prepare for factor times the trained length, or raise Refused. Here there is nothing to change: only the allowed length rises."""
        if method != "none" or options:
            raise Refused(f"--pos={self.config.pos} has nothing for method {method!r} to change: use --method=none, which only raises the allowed length")

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

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.randn(config.block_size, config.n_embd) * 0.02)

    def embed(self, x, pos):
        return x + self.table[pos]

    def stretch(self, method, factor, **options):
        raise Refused(f"--pos=learned has no vector for a position past {self.config.trained_length} and none of the methods makes one: train it at the longer --block_size")


class Sinusoidal(NoPE):
    """sin and cos of the position, interleaved, at wavelengths of 2 pi to 2 pi 10000 tokens, added to the embeddings (Vaswani et al. 2017).

    The unit sinusoids are scaled to the size of freshly initialised embeddings, 0.02 sqrt(2), or they would drown them.
    """
    scale = 0.02 * math.sqrt(2)

    def __init__(self, config):
        super().__init__(config)
        if config.n_embd % 2:
            raise Refused(f"--pos=sinusoidal pairs channels, so n_embd={config.n_embd} must be even")
        self.constant("inv_freq", 10000.0 ** -(torch.arange(0, config.n_embd, 2, dtype=torch.float64) / config.n_embd))

    def embed(self, x, pos):
        angle = pos[..., None] * self.inv_freq  # (T, C/2) or (B, T, C/2), float64
        return x + self.scale * torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(x.dtype)


class T5(NoPE):
    """A learned score for each head and bucket of distances, shared by all layers (Raffel et al. 2020), added after the 1/sqrt(D).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to max_distance, which is at most the
    trained length: a bucket never visited in training would keep its initial value and be read beyond it.
    """
    by_index = True
    n_buckets, max_distance = 32, 128

    def __init__(self, config):
        super().__init__(config)
        n, far, exact = self.n_buckets, min(self.max_distance, config.trained_length), self.n_buckets // 2
        bucket = [d if d < exact else min(n - 1, exact + int(math.log(d / exact) / math.log(far / exact) * (n - exact))) for d in range(far)]
        self.constant("bucket", torch.tensor(bucket[:bucket.index(bucket[-1]) + 1]))  # (m,), up to the first distance of the last bucket visited
        self.weight = nn.Parameter(torch.zeros(config.n_head, self.n_buckets))

    def bias(self, n, layer):
        return self.weight[:, self.bucket[:n]].float()


class ALiBi(NoPE):
    """Scores fall linearly with distance, by a fixed slope for each head (Press et al. 2022), added after the 1/sqrt(D)."""
    by_index = True

    def __init__(self, config):
        super().__init__(config)
        H, power = config.n_head, 2 ** int(math.log2(config.n_head))  # of a head count that is no power of two, every other slope of the next one
        slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)] + [2 ** (-4 * (2 * h + 1) / power) for h in range(H - power)]
        self.constant("slopes", torch.tensor(slopes, dtype=torch.float64).float())

    def bias(self, n, layer):
        return self.slopes


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
        stretch = config.stretch or {"method": "none", "factor": 1.0, "options": {}}
        self.stretch(stretch["method"], stretch["factor"], **stretch["options"])

    def stretch(self, method, factor, **options):
        if method not in STRETCH:
            raise Refused(f"there is no method {method!r}: --pos=rope is stretched by {', '.join(STRETCH)}")
        takes = list(inspect.signature(STRETCH[method]).parameters)[4:]
        if unknown := sorted(set(options) - set(takes)):
            raise Refused(f"method {method!r} takes no option {unknown[0]!r}: " + (f"its options are {', '.join(takes)}" if takes else "it has none"))
        inv_freq, self.attention_factor = STRETCH[method](self.config.rope_base, self.rotary_dim, self.config.trained_length, factor, **options)
        self.inv_freq = inv_freq if self.inv_freq is None else inv_freq.to(self.inv_freq)

    def rotate(self, q, k, pos, layer):
        angle = pos[..., None] * self.inv_freq  # (T, R/2) or (B, T, R/2), float64: float32 angles are wrong by 0.06 at a million tokens
        return kernels.rope(q, k, (angle.cos() * self.attention_factor).float(), (angle.sin() * self.attention_factor).float())


POSITIONS = {"nope": NoPE, "learned": Learned, "sinusoidal": Sinusoidal, "t5": T5, "alibi": ALiBi, "rope": Rope}


# ---------------------------------------------------------------------------------------------------------------------
# Stretching RoPE: pure functions of (base, rotary_dim, trained_context in tokens, factor) that return the inverse frequencies,
# float64 (rotary_dim / 2,), and the attention factor that multiplies cos and sin. At factor 1 each is plain RoPE, to the bit.

def stretch_none(base, rotary_dim, trained_context, factor):
    """Plain RoPE, base^(-2k/d): the frequencies stay."""
    return float(base) ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1)), 1.0


def stretch_pi(base, rotary_dim, trained_context, factor):
    """Position interpolation (Chen et al. 2023): positions, so all frequencies, divided by the factor."""
    return stretch_none(base, rotary_dim, trained_context, factor)[0] / factor, 1.0


def stretch_ntk(base, rotary_dim, trained_context, factor):
    """NTK-aware (bloc97 2023): the base grows so that the slowest pair is interpolated in full and the fastest not at all."""
    if rotary_dim <= 2:
        raise Refused(f"method 'ntk' needs at least two pairs of rotated channels, and rotary_dim is {rotary_dim}: use --method=pi")
    return stretch_none(base * factor ** (rotary_dim / (rotary_dim - 2)), rotary_dim, trained_context, factor)


def stretch_ntk_parts(base, rotary_dim, trained_context, factor, beta_fast=32.0, beta_slow=1.0, ramp="index", truncate=True):
    """NTK-by-parts (Peng et al. 2023, YaRN without its temperature): pairs that turn more than beta_fast times in the trained context
    stay, those that turn less than beta_slow times are interpolated, and a ramp leads from one to the other.

    ramp="index" is linear in the pair's index, with its ends rounded outwards (truncate), as YaRN's released code and every runtime
    have it; ramp="paper" is linear in the number of turns, as the paper's text has it.
    """
    if not all(isinstance(beta, (int, float)) for beta in (beta_slow, beta_fast)) or not 0 < beta_slow < beta_fast < math.inf or not isinstance(truncate, bool):
        raise Refused(f"beta_slow={beta_slow} must be above 0 and below beta_fast={beta_fast}, and truncate={truncate} true or false")
    inv_freq, _ = stretch_none(base, rotary_dim, trained_context, factor)
    if ramp == "paper":
        keep = ((trained_context * inv_freq / (2 * math.pi) - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    elif ramp == "index":
        low, high = (rotary_dim * math.log(trained_context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (beta_fast, beta_slow))
        low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
        low, high = max(low, 0), max(min(high, rotary_dim - 1), low, 0)
        keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        raise Refused(f"ramp={ramp!r} is neither 'index' nor 'paper'")
    return inv_freq / factor + keep * (inv_freq - inv_freq / factor), 1.0


def stretch_yarn(base, rotary_dim, trained_context, factor, beta_fast=32.0, beta_slow=1.0, ramp="index", truncate=True, attention_factor=None):
    """YaRN (Peng et al. 2023): NTK-by-parts, with cos and sin multiplied by 0.1 ln(factor) + 1, so logits by its square."""
    if attention_factor is not None and not (isinstance(attention_factor, (int, float)) and 0 < attention_factor < math.inf):
        raise Refused(f"attention_factor={attention_factor} must be a number above 0")
    inv_freq, _ = stretch_ntk_parts(base, rotary_dim, trained_context, factor, beta_fast, beta_slow, ramp, truncate)
    return inv_freq, 0.1 * math.log(factor) + 1 if attention_factor is None else float(attention_factor)


STRETCH = {"none": stretch_none, "pi": stretch_pi, "ntk": stretch_ntk, "ntk-parts": stretch_ntk_parts, "yarn": stretch_yarn}


# ---------------------------------------------------------------------------------------------------------------------
# The transformer: RMSNorm before each half, attention with grouped queries, SwiGLU, no biases: Llama's shape.

class Attention(nn.Module):
    """Causal self-attention with grouped queries, optional QK-norm and window. The scheme rotates and biases; its name is not known here."""

    def __init__(self, config, layer):
        super().__init__()
        H, Hk, D, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.config, self.layer = config, layer
        self.q = nn.Linear(C, H * D, bias=False)
        self.k = nn.Linear(C, Hk * D, bias=False)
        self.v = nn.Linear(C, Hk * D, bias=False)
        self.o = nn.Linear(H * D, C, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(D, 1e-5), nn.RMSNorm(D, 1e-5)

    def forward(self, x, scheme, pos, docs, cache):
        c, (B, T, _) = self.config, x.shape
        q = self.q(x).view(B, T, c.n_head, c.head_dim)
        k = self.k(x).view(B, T, c.n_kv_head, c.head_dim)
        v = self.v(x).view(B, T, c.n_kv_head, c.head_dim).transpose(1, 2)  # (B, Hk, T, D)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = scheme.rotate(q.transpose(1, 2), k.transpose(1, 2), pos, self.layer)
        if cache is not None:  # keys are kept rotated
            k, v = cache.append(self.layer, k, v)
            pos, docs = cache.pos, cache.docs
        y = kernels.attention(q, k, v, bias=scheme.bias(k.shape[2], self.layer), window=c.window, sinks=c.sinks,
                              positions=pos if c.window else None, docs=docs)  # (B, H, T, D)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): three matrices, 8/3 of the model's width rounded up to a multiple of 32 between them."""

    def __init__(self, config):
        super().__init__()
        hidden = -(-8 * config.n_embd // (3 * 32)) * 32
        self.gate = nn.Linear(config.n_embd, hidden, bias=False)
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.n_embd, 1e-5), Attention(config, layer)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.n_embd, 1e-5), MLP(config)
        self.dropout = config.dropout

    def forward(self, x, scheme, pos, docs, cache):
        x = x + F.dropout(self.attention(self.attention_norm(x), scheme, pos, docs, cache), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Cache:
    """Keys and values of the tokens read so far, (B, Hk, length, D) per layer, with their positions; room doubles when it runs out."""

    def __init__(self):
        self.length, self.pos, self.docs, self.k, self.v = 0, None, None, {}, {}

    def extend(self, pos, docs):
        """Note the positions (T,) or (B, T) and documents (B, T) or None of the tokens about to be read."""
        if self.length and (docs is None) != (self.docs is None):
            raise Refused("give docs with every call of a cached reading, or with none")
        self.length += pos.shape[-1]
        self.pos = pos if self.pos is None else torch.cat((self.pos, pos), -1)
        self.docs = docs if self.docs is None else torch.cat((self.docs, docs), -1)

    def append(self, layer, k, v):
        start, end = self.length - k.shape[2], self.length
        for store, new in ((self.k, k), (self.v, v)):
            if layer not in store or store[layer].shape[2] < end:
                room = new.new_empty(*new.shape[:2], max(end, 2 * start), new.shape[3])
                if layer in store:
                    room[:, :, :start] = store[layer][:, :, :start]
                store[layer] = room
            store[layer][:, :, start:end] = new
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.meta = config, {}
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos = POSITIONS[config.pos](config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, 1e-5)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.init_weights()

    def init_weights(self):
        """Every parameter by name: embeddings N(0, 0.02), matrices N(0, 1/(2 sqrt(width in))), the two that feed the residual stream zero,
        gains one; a scheme draws its own. Raises on a name that no rule covers."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                kind = name.split(".")[-2]
                if name.startswith("pos."):
                    continue
                elif kind in ("embed", "head"):
                    p.normal_(0, 0.02)
                elif kind.endswith("norm"):
                    p.fill_(1)
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
        first = cache.length if cache is not None else 0
        end = first + tokens.shape[1]
        if positions is None:
            positions = torch.arange(first, end, device=tokens.device)
        else:
            self.check_positions(positions, docs)
            end = int(positions.max()) + 1 if self.pos.bounded else end
        if end > self.config.block_size:
            if self.pos.bounded:
                raise Refused(f"--pos={self.config.pos} has no vector for position {end - 1}: the model was made for {self.config.block_size} tokens, so "
                              "use no more, or train it with a longer --block_size")
            if not torch.compiler.is_compiling():
                warnings.warn(f"reading {end} tokens with a model made for {self.config.block_size}", PastTrainedLength, stacklevel=2)
        if cache is not None:
            cache.extend(positions, docs)
        x = F.dropout(self.pos.embed(self.embed(tokens), positions), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.pos, positions, docs, cache)
        return self.norm(x)

    def check_positions(self, positions, docs):
        """Positions given by hand: not negative, and without gaps inside a document where the scheme counts distance by index."""
        gaps = positions.diff() != 1
        if docs is not None:
            gaps = gaps & (docs.diff() == 0)
        if self.pos.by_index and gaps.any():
            raise Refused(f"--pos={self.config.pos} counts distance by index, so positions with gaps mean nothing to it: give consecutive positions")
        if (positions < 0).any():
            raise Refused("positions must not be negative")

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Continue tokens (B, T), T >= 1: yields (B, 1) int64 tensors, one at a time, drawn from softmax(logits / temperature).

        temperature 0 takes the likeliest token; top_k > 0 keeps the k likeliest, top_p < 1 the fewest that hold that share of the mass.
        """
        if tokens.shape[1] < 1:
            raise Refused("generate() needs at least one token to go on from")
        if self.pos.bounded and tokens.shape[1] + max_new_tokens - 1 > self.config.block_size:
            raise Refused(f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones are more than the {self.config.block_size} that --pos={self.config.pos} can hold: "
                          f"ask for at most --max_new_tokens={max(0, self.config.block_size + 1 - tokens.shape[1])}, or shorten the prompt")
        cache = Cache()
        for _ in range(max_new_tokens):
            logits = self.head(self.hidden(tokens, cache=cache)[:, -1]).float()  # (B, V)
            if temperature < 1e-5:
                tokens = logits.argmax(-1, keepdim=True)
            else:
                logits, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
                mass = logits.softmax(-1).cumsum(-1) - logits.softmax(-1)  # of the likelier tokens
                drop = mass >= top_p if top_p < 1 else torch.zeros_like(mass, dtype=torch.bool)
                drop[:, top_k or logits.shape[-1]:] = True
                drop[:, 0] = False
                choice = torch.multinomial(logits.masked_fill(drop, float("-inf")).softmax(-1), 1, generator=generator)
                tokens = order.gather(1, choice)
            yield tokens

    def stretch(self, method, factor, **options):
        """Make the model ready for factor times its length, in place; a second stretch replaces the method and multiplies the factors,
        while base and trained length stay the original ones. Raises Refused, with nothing changed, where scheme or factor do not allow it."""
        if not (math.isfinite(factor) and factor >= 1):
            raise Refused(f"factor={factor} does not stretch: give a number of at least 1")
        trained, total = self.config.trained_length, factor * (self.config.stretch or {"factor": 1.0})["factor"]
        self.pos.stretch(method, total, **options)
        self.config.stretch = {"method": method, "factor": total, "options": options, "trained_length": trained}
        self.config.block_size = round(trained * total)

    def flops_per_token(self, length=None):
        """Floating point operations of a training step per token at this length: 6 per weight that multiplies, and 12 per layer, channel
        of the heads and visible token for the two products of attention (PaLM's count: causality saves nothing)."""
        c = self.config
        length = length or c.block_size
        weights = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and not name.startswith(("embed", "pos", "head")))
        return 6 * (weights + self.head.weight.numel()) + 12 * c.n_layer * c.n_head * c.head_dim * min(length, c.window + c.sinks or length)

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints: a folder with model.safetensors, meta.json and, from training, optim.safetensors. It is whole or absent.

    def save(self, folder, optim=None, **meta):
        """Write a checkpoint folder: into .tmp-* beside it, synced, then one rename. optim: a dict of tensors; meta: what else JSON can hold.

        Raises Refused when the folder exists already. A tied head is stored once. What meta the model was loaded with is kept.
        """
        from safetensors.torch import save_file
        folder = Path(folder)
        if folder.exists():
            raise Refused(f"{folder} exists already: remove it or save elsewhere")
        tmp = folder.parent / f".tmp-{folder.name}"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        save_file({name: p.detach().float().cpu().contiguous() for name, p in self.named_parameters()}, tmp / "model.safetensors")
        if optim is not None:
            save_file(optim, tmp / "optim.safetensors")
        sums = {file.name: _sha256(file) for file in sorted(tmp.iterdir())}
        for file in sums:
            _sync(tmp / file)
        write_meta(tmp, {**self.meta, **meta, "format": FORMAT, "config": asdict(self.config), "checksums": sums, "torch": torch.__version__})
        os.rename(tmp, folder)
        _sync(folder.parent)

    @classmethod
    def load(cls, path, best=False):
        """The model of a run folder (its newest whole step, or its best) or of a step folder: on the CPU, float32, eval mode.

        model.meta holds the rest of meta.json. Raises Refused, naming the file and a way out, when there is none or it is damaged.
        """
        from safetensors import SafetensorError, safe_open
        folder = checkpoint_folder(path, best)
        meta = read_meta(folder)
        file = folder / "model.safetensors"
        verify(file, meta)
        config = GPTConfig(**meta.pop("config"))
        with torch.device("meta"):
            want = {name: tuple(p.shape) for name, p in cls(config).named_parameters()}
        try:
            with safe_open(file, framework="pt") as weights:
                have = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
                if have != want:
                    name = next(name for name in {**want, **have} if want.get(name) != have.get(name))
                    raise Refused(f"{file} does not fit its meta.json: {name} is {have.get(name, 'absent')} where {want.get(name, 'nothing')} is expected; {_others(folder)}")
                model = cls(config)
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.copy_(weights.get_tensor(name))
        except SafetensorError as error:
            raise Refused(f"{file} is not a whole safetensors file ({error}); {_others(folder)}") from None
        model.meta, model.folder = meta, folder
        return model.eval()


def steps(run):
    """The whole checkpoints of a run folder, oldest first."""
    return sorted((p for p in Path(run).glob("step-*") if p.name[5:].isdigit() and (p / "meta.json").is_file()), key=lambda p: int(p.name[5:]))


def checkpoint_folder(path, best=False):
    """The step folder that a run folder or step folder stands for. Raises Refused when there is none."""
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    found = steps(path)
    if not found:
        raise Refused(f"there is no checkpoint in {path}: " + ("it does not exist; train one with python train.py --out_dir=" + str(path) if not path.exists()
                      else "give a run folder (out/NAME) or one of its step folders"))
    measured = {p: value for p in found if best and isinstance(value := read_meta(p).get("val_loss"), float)}
    return min(measured, key=measured.get) if measured else found[-1]


def read_meta(folder):
    """meta.json of a step folder, checked: its format, and that its config is one of ours. Raises Refused."""
    file = Path(folder) / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        known, config = {f.name for f in fields(GPTConfig)}, meta["config"]
        if meta["format"] != FORMAT:
            raise Refused(f"{file} is of format {meta['format']}, and this version reads format {FORMAT}")
        if unknown := sorted(set(config) - known):
            raise Refused(f"{file} has settings that this version does not know: {', '.join(unknown)}")
        meta["checksums"]["model.safetensors"], GPTConfig(**config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{file} is damaged ({type(error).__name__}: {error}); {_others(folder)}") from None
    return meta


def write_meta(folder, meta):
    """Write meta.json of a step folder, new or instead of the one it has, by one rename."""
    new = Path(folder) / ".meta.json"
    new.write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _sync(new)
    os.replace(new, Path(folder) / "meta.json")
    _sync(folder)


def verify(file, meta):
    """Compare a checkpoint file's SHA-256 with the one in its meta.json. Raises Refused."""
    if not file.is_file():
        raise Refused(f"{file} is missing; {_others(file.parent)}")
    if _sha256(file) != meta["checksums"].get(file.name):
        raise Refused(f"{file} is damaged: its checksum is not the one in meta.json; {_others(file.parent)}")


def _others(folder):
    others = [str(p) for p in steps(Path(folder).parent) if p.name < Path(folder).name]
    return f"use the step before it, {others[-1]} (to resume from there, move the damaged one away)" if others else "no earlier step is left, so train again"


def _sha256(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path):
    if os.name == "nt" and Path(path).is_dir():
        return  # folders cannot be synced there
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
