"""A GPT whose position scheme is a flag: the transformer and the position schemes, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(pos="rope", vocab_size=257))
    logits = model(tokens)  # (B, T) int64 -> (B, T, V)
    loss = model(tokens, targets)  # mean cross-entropy in nats per token, without targets of -1
    for token in model.generate(tokens, 100): ...

Three chapters: the transformer (Attention, MLP, Block, GPTConfig, GPT), what a pass knows of the
text (Context, KVCache), and 14 position schemes, whose base is NoPE. At most 1,500 lines.
Read next: rope_scaling.py (how RoPE's context is extended), train.py.
Shapes: B batch, T tokens, C n_embd, H query heads, Hk key/value heads, D head_dim, R rotary_dim, V
vocab_size. pos: position ids. GPT.scheme: the position scheme, whose name is config.pos.
"""

import math
import operator
import warnings
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import rope_scaling
from nanolong.errors import UserError, check_choice, require


class ContextLengthWarning(UserWarning):
    """The input is longer than the model's context length."""


# -----------------------------------------------------------------------------
# Chapter 1: the transformer. A block has Llama's shape by default: pre-norm, grouped-query
# attention and SwiGLU. GPT-2's LayerNorm, GELU and biases are settings.


SINKS_AND_DOCS = (
    "attention sinks are the first tokens of the text, not of each document: leave out document "
    "ids (--separate_docs=false), or the sinks"
)


class Linear(nn.Linear):
    """nn.Linear by kernels.linear(), because a CPU multiplies a few rows faster in another way."""

    def forward(self, x):
        return kernels.linear(x, self.weight, self.bias)


def make_norm(config):
    norm = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return norm(config.n_embd, config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention, whose positions come from the scheme.

    Grouped queries: n_head / n_kv_head query heads share a key/value head, which makes the cache
    that much smaller. With n_kv_head = 1 this is multi-query attention.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.layer = layer
        self.window = config.window if config.uses_window(layer) else 0
        self.sinks = config.sinks if self.window else 0
        n_embd, D = config.n_embd, config.head_dim
        n_q = config.n_head * D
        n_kv = config.n_kv_head * D
        qkv_bias = config.bias in ("qkv", "all")
        self.q = Linear(n_embd, n_q, bias=qkv_bias)
        self.k = Linear(n_embd, n_kv, bias=qkv_bias)
        self.v = Linear(n_embd, n_kv, bias=qkv_bias)
        self.o = Linear(n_q, n_embd, bias=config.bias == "all")
        self.gate = None
        if config.output_gate != "none":
            n_gates = config.n_head if config.output_gate == "head" else n_q
            self.gate = Linear(n_embd, n_gates, bias=False)
        if config.qk_norm != "none":  # over the channels of a head, or of all heads
            is_by_head = config.qk_norm == "head"
            self.q_norm = nn.RMSNorm(D if is_by_head else n_q, config.norm_eps)
            self.k_norm = nn.RMSNorm(D if is_by_head else n_kv, config.norm_eps)
        scale = config.read_query_scale()
        in_no_layer = scale is None or scale.nope_only and config.uses_positions(layer)
        self.query_scale = None if in_no_layer else scale
        self.sink_scores = None
        if config.sink_scores:
            self.sink_scores = nn.Parameter(torch.zeros(config.n_head))

    def forward(self, x, scheme, context):
        B, T, _ = x.shape
        # Project to queries (B, H, T, D), keys and values (B, Hk, T, D).
        q, k, v = kernels.linear_each(x, self.q, self.k, self.v)
        if self.config.qk_norm != "none":
            q = self.q_norm(q.unflatten(-1, (-1, *self.q_norm.normalized_shape)))
            k = self.k_norm(k.unflatten(-1, (-1, *self.k_norm.normalized_shape)))
        q, k, v = (y.view(B, T, -1, self.config.head_dim).transpose(1, 2) for y in (q, k, v))
        if self.query_scale is not None:
            q = self.scale_queries(q, context.pos[..., None, :, None])
        # Positions enter in two ways: queries and keys are rotated, and scores get a bias.
        q, k = scheme.rotate(q, k, x, self.layer, context)
        bias = scheme.bias(x, self.layer, context)
        # Attend to all tokens of the text.
        scale = self.config.attn_scale * scheme.extra_scale / math.sqrt(self.config.head_dim)
        options = {"window": self.window, "sinks": self.sinks, "scale": scale}
        if self.sink_scores is None:
            y = scheme.attend(q, k, v, bias, self.layer, context, **options)
        else:  # y shrinks, because a sink is one more score in the softmax, without a value
            y, lse = scheme.attend(q, k, v, bias, self.layer, context, return_lse=True, **options)
            y = (y * torch.sigmoid(lse - self.sink_scores[:, None])[..., None]).to(y.dtype)
        y = y.transpose(1, 2)  # (B, T, H, D)
        if self.gate is not None:  # a number for each head, or for each channel of a head
            y = y * self.gate(x).sigmoid().view(B, T, y.shape[2], -1).to(y.dtype)
        # Concatenate the heads and project back.
        return self.o(y.reshape(B, T, -1))

    def scale_queries(self, q, t):
        """Multiply queries (B, H, T, D) by a factor of positions t, (1, T, 1) or (B, 1, T, 1)."""
        length = self.query_scale.length or self.config.original_length
        n = t + 1  # keys that a query sees
        if self.window:
            n = n.clamp(max=self.window + self.sinks)
        if self.query_scale.kind == "llama4":
            steps = (t + self.query_scale.offset) // length
            factor = 1 + self.query_scale.coefficient * (1 + steps).log()
        else:
            factor = (n.log() / math.log(length)).clamp(min=1)
        return (q * factor).to(q.dtype)


class MLP(nn.Module):
    """Llama's MLP (SwiGLU) or Gemma's (GEGLU) with a gate (Shazeer 2020), else GPT-2's."""

    def __init__(self, config):
        super().__init__()
        bias = config.bias == "all"
        others = {"swiglu": nn.SiLU(), "gelu_exact": nn.GELU()}
        self.activation = others.get(config.mlp, nn.GELU("tanh"))
        self.gate = Linear(config.n_embd, config.mlp_dim, bias=bias) if config.is_gated else None
        self.up = Linear(config.n_embd, config.mlp_dim, bias=bias)
        self.down = Linear(config.mlp_dim, config.n_embd, bias=bias)

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = kernels.linear_each(x, self.gate, self.up, joins_on_cpu=False)
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    """Attention and MLP, with norms before or after each part, or both before and after."""

    def __init__(self, config, layer):
        super().__init__()
        norms_inputs = config.norm_position != "post"
        norms_outputs = config.norm_position in ("post", "both")
        self.is_parallel = config.norm_position == "parallel"
        self.attention_norm = make_norm(config) if norms_inputs else nn.Identity()
        self.attention = Attention(config, layer)
        self.attention_post_norm = make_norm(config) if norms_outputs else nn.Identity()
        self.mlp_norm = make_norm(config) if norms_inputs else nn.Identity()
        self.mlp = MLP(config)
        self.mlp_post_norm = make_norm(config) if norms_outputs else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, scheme, context):
        attended = self.attention(self.attention_norm(x), scheme, context)
        if self.is_parallel:
            return x + self.dropout(attended) + self.dropout(self.mlp(self.mlp_norm(x)))
        x = x + self.dropout(self.attention_post_norm(attended))
        return x + self.dropout(self.mlp_post_norm(self.mlp(self.mlp_norm(x))))


class QueryScale(NamedTuple):
    """The parts of GPTConfig.query_scale, whose formulas are in docs/schemes.md."""

    kind: str  # logn or llama4
    nope_only: bool  # whether only layers without positions have the factor
    length: int = 0  # L in tokens (0: the original context length)
    coefficient: float = 0.1  # c of llama4
    offset: int = 0  # o of llama4, added to positions (Llama 4: 1, Ministral 3: 0)


@dataclass
class GPTConfig:
    # [model]
    vocab_size: int = 257  # set by the dataset
    block_size: int = 256  # context length in tokens
    n_layer: int = 4  # transformer blocks
    n_head: int = 3  # query heads
    n_kv_head: int = 0  # key/value heads (grouped-query attention) (0: n_head)
    n_embd: int = 192  # embedding size
    # hidden channels of the MLP (0: about 8/3 n_embd with a gate, else 4 n_embd)
    mlp_dim: int = 0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # swiglu and geglu have a gate, gelu is computed by tanh (GPT-2), gelu_exact by erf (Pythia)
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_exact"] = "swiglu"
    dropout: float = 0.0  # fraction of activations dropped in training
    # multiply attention's outputs by sigmoid(W x), for each head or channel (Qiu et al. 2025)
    output_gate: Literal["none", "head", "channel"] = "none"
    # [position]
    # the scheme: nope, learned, sinusoidal, shaw, nezha, xl, t5, alibi, kerple, kerple-power,
    # sandwich, rope, fox or fox-rope
    pos: str = "rope"
    rope_base: float = 10000.0  # rope: wavelengths run from 2 pi to about 2 pi rope_base tokens
    # rope: fraction of a head's pairs that is rotated, the fastest, at the frequencies of the whole
    # head (p-RoPE, Barbero et al. 2024)
    p_rope: float = 1.0
    window: int = 0  # sliding-window attention: tokens that a query sees (0: all)
    sinks: int = 0  # attention sinks: with a window, the first tokens stay visible
    # a letter per layer, repeated: F full attention, W window, N and S the same without positions
    # (auto: F, or W if there is a window)
    layer_pattern: str | None = None
    # [architectures of other models]
    head_dim: int = 0  # channels of a head (0: n_embd / n_head)
    # norms before attention and MLP (pre), after them (post: Olmo 2), or before and after (both:
    # Gemma 3). parallel: pre, and the MLP reads the same hidden states as attention (Pythia)
    norm_position: Literal["pre", "post", "both", "parallel"] = "pre"
    bias: Literal["none", "qkv", "all"] = "none"  # linear layers that have a bias
    norm_eps: float = 1e-5  # added to the variance in the norms
    # RMSNorm on queries and keys before they are rotated: of each head (Qwen3), or all (Olmo 2)
    qk_norm: Literal["none", "head", "all"] = "none"
    tie_embeddings: bool = True  # the output layer shares the embedding's weights
    embed_scale: float = 1.0  # multiplies the embeddings, not the output layer's weights (Gemma)
    attn_scale: float = 1.0  # multiplies the 1 / sqrt(head_dim) of the attention scores
    # rope: the base in layers with a window, if other layers have none (Gemma 3, 0: rope_base)
    rope_local_base: float = 0.0
    # rope: fraction of a head's channels that is rotated. The exponent runs over the rotated
    # channels only, as with partial_rotary_factor, and not over the head as in p-RoPE
    rope_fraction: float = 1.0
    # learned sinks: a score for each head that takes part in the softmax and has no value (gpt-oss)
    sink_scores: bool = False
    # multiplies queries by a factor that grows with their position: none, logn[:LENGTH], or
    # llama4[:LENGTH[:COEFFICIENT[:OFFSET]]], with @nope at the end in layers without positions only
    query_scale: str = "none"
    # set by GPT.extend(): method, factor, options, original_length, and layers if not all
    extension: dict | None = None

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1")
        divides = self.head_dim or self.n_embd % self.n_head == 0
        problem = f"--n_embd={self.n_embd} is not a multiple of --n_head={self.n_head}"
        require(divides, f"{problem}: change one, or give --head_dim")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if not self.mlp_dim and self.is_gated:
            self.mlp_dim = -(-8 * self.n_embd // (3 * 32)) * 32  # rounded up to a multiple of 32
        self.mlp_dim = self.mlp_dim or 4 * self.n_embd
        if self.layer_pattern is None:
            self.layer_pattern = "W" if self.window else "F"
        self.check_values()
        self.check_layers()

    def check_values(self):
        """Raise UserError for a value that no model can have."""
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                check_choice(getattr(self, name), get_args(hint), f"--{name}")
        require(0 <= self.dropout < 1, f"dropout={self.dropout} is no fraction below 1: give one")
        for name in ("embed_scale", "attn_scale", "rope_base"):
            require(getattr(self, name) > 0, f"{name} must be above 0: give another")
        n, n_kv = self.n_head, self.n_kv_head
        require(n % n_kv == 0, f"n_head={n} is not divisible by n_kv_head={n_kv}: give a divisor")
        self.read_query_scale()

    def check_layers(self):
        """Raise UserError for kinds of layers that do not fit the other settings."""
        pattern, window = self.layer_pattern, self.window
        require(
            pattern and set(pattern) <= set("FWNS") and len(pattern) <= self.n_layer,
            f"layer_pattern={pattern!r} is no word of the letters F, W, N and S, at most one for "
            f"each of {self.n_layer} layers: give one such as {'FFFN'[: self.n_layer]}",
        )
        require(
            set(pattern).isdisjoint("WS") == (not window),
            f"layer_pattern={pattern} and window={window} do not fit: give --window=N and a "
            "pattern with W or S, or neither",
        )
        require(window or not self.sinks, "sinks stay visible beyond a window: give --window=N too")

    @property
    def is_gated(self):
        """Whether the MLP has a gate."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def is_hybrid(self):
        """Whether some layers have a window and some attend to the whole text."""
        return len({self.uses_window(layer) for layer in range(self.n_layer)}) == 2

    def read_query_scale(self) -> QueryScale | None:
        """Read the parts of query_scale (none: None). Raises UserError."""
        text = self.query_scale
        kind, *numbers = text.removesuffix("@nope").split(":")
        most = {"none": 0, "logn": 1, "llama4": 3}.get(kind, -1)
        try:
            parts = [read(x) for read, x in zip((int, float, int), numbers[:most], strict=False)]
        except ValueError:
            parts = [-1.0]  # because that is refused below
        require(
            len(numbers) <= most and all(0 <= x < math.inf for x in parts) and text != "none@nope",
            f"query_scale={text} is unknown: give none, logn:LENGTH or "
            "llama4:LENGTH:COEFFICIENT:OFFSET (numbers may be left out), with @nope at the end for "
            "layers without positions",
        )
        return None if kind == "none" else QueryScale(kind, text.endswith("@nope"), *parts)

    @property
    def original_length(self):
        """The context length in tokens before any extension."""
        return self.extension["original_length"] if self.extension else self.block_size

    def layer_kind(self, layer):
        """The letter of a layer: F, W, N or S."""
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def uses_window(self, layer):
        return self.layer_kind(layer) in "WS"

    def uses_positions(self, layer):
        return self.layer_kind(layer) in "FW"


class GPT(nn.Module):
    config_class = GPTConfig  # nanolong/ finds it here, because it cannot import this file
    schemes = {}  # POSITIONS, at the end of this file
    cache_class = None  # KVCache

    def __init__(self, config: GPTConfig):
        super().__init__()
        check_choice(config.pos, POSITIONS, "scheme", "choose from {}, or give --entry=FILE.py")
        POSITIONS[config.pos].check_config(config)
        self.config = config
        self.meta = {}  # the rest of meta.json, if the model comes from a checkpoint
        self.activation_checkpointing = False  # recompute blocks in the backward pass
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.init_weights()
        # Created last, because all schemes then start from the same other weights, by their seed.
        self.scheme = POSITIONS[config.pos](config)  # the position scheme
        self.nope = NoPE(config)  # the scheme of layers without positions
        if config.extension:
            self.extend_scheme(config.extension)

    def forward(
        self, tokens, targets=None, positions=None, docs=None, cache=None, reduction="mean"
    ):
        """Map tokens (B, T) int64 to logits (B, T, V), or with targets (B, T) to the loss.

        The loss is in nats, float32. Targets of -1 are ignored. Only some of the logits (B, T, V)
        exist at a time.

        positions: position ids, (T,) or (B, T) int64. By default they go on after the cache's, from
                   0 in every document. Give position ids on the CPU, because a check on a GPU waits
        docs:      document ids (B, T), because attention stays within a document
        cache:     a KVCache, extended in place
        reduction: "mean", "sum" or "none" (B, T)

        Warns beyond the context length (ContextLengthWarning). Raises UserError for a scheme that
        cannot compute these positions.
        """
        x = self.hidden_states(tokens, positions, docs, cache)
        if targets is None:
            return self.head(x)
        assert targets.shape == tokens.shape, "give a target for each token"
        assert reduction in ("mean", "sum", "none"), reduction
        loss = kernels.linear_cross_entropy(
            x.flatten(0, 1), self.head.weight, targets.flatten(), reduction
        )
        return loss.view_as(targets) if reduction == "none" else loss

    def hidden_states(self, tokens, positions=None, docs=None, cache=None):
        """Compute the hidden states (B, T, C) after the last norm, from forward's arguments."""
        assert tokens.dim() == 2, f"tokens have the shape {tuple(tokens.shape)}: give (B, T)"
        T = tokens.shape[1]
        tokens, context = self.prepare_inputs(tokens, positions, docs, cache)
        # Embed the tokens. Hidden states have the norms' dtype, because bfloat16 sums would round.
        x = self.embed(tokens).to(self.norm.weight.dtype)
        if self.config.embed_scale != 1:
            x = x * self.config.embed_scale
        x = self.dropout(self.scheme.embed(x, context.pos))
        # Forward the blocks.
        for layer, block in enumerate(self.blocks):
            scheme = self.scheme_of(layer)
            if self.activation_checkpointing and torch.is_grad_enabled():
                block = kernels.selective_checkpoint(block)
            x = block(x, scheme, context)
        # Keep the new tokens only, because x has the whole text if the cache's tables have changed.
        return self.norm(x)[:, -T:]

    def scheme_of(self, layer):
        """The position scheme of a layer."""
        return self.scheme if self.config.uses_positions(layer) else self.nope

    @torch.no_grad()
    def init_weights(self):
        """Initialize every parameter by its name, but for the position scheme's own."""
        for name, p in self.named_parameters():
            module = name.split(".")[-2]
            if name.endswith(("bias", "sink_scores")):
                p.zero_()
            elif module in ("embed", "head"):
                p.normal_(std=0.02)
            elif module.endswith("norm"):
                p.fill_(1)
            elif module in ("o", "down") and self.config.norm_position in ("pre", "parallel"):
                p.zero_()  # because a block then starts as the identity, if no norm follows
            elif module in ("q", "k", "v", "o", "gate", "up", "down"):
                p.normal_(std=0.5 / math.sqrt(p.shape[1]))
            else:
                raise RuntimeError(f"init_weights() has no rule for {name}: add one")

    def prepare_inputs(self, tokens, positions, docs, cache):
        """Check the inputs and add the tokens to the cache, or to a Context that keeps nothing.

        Returns the tokens to compute, and the Context.
        """
        context = Context() if cache is None else cache
        if context.write_index is not None:  # nothing is checked, because a graph reads no values
            context.pos = positions
        else:
            T = tokens.shape[1]
            end = context.n + T
            for x in (positions, docs):
                assert x is None or x.shape[-1] == T, f"give {T} positions and ids of documents"
            require(docs is None or not self.config.sinks, SINKS_AND_DOCS)
            context.has_gaps |= positions is not None
            if positions is None and docs is None:
                positions = torch.arange(context.n, end, device=tokens.device)
            elif positions is None:
                whole = docs if context.docs is None else torch.cat((context.docs, docs), 1)
                positions = kernels.positions_in_documents(whole)[:, -T:]
            # Mostly on the CPU, because it would wait for a GPU to send the position ids. Never in
            # a compiled graph, because reading a value breaks it in two.
            elif self.scheme.is_dynamic or (positions.is_cpu and not torch.compiler.is_compiling()):
                end = self.check_positions(positions, docs)
            positions = positions.to(tokens.device, non_blocking=True)
            self.check_length(end)
            version = self.scheme.set_length(end)
            tokens = context.add(tokens, positions, docs, version)
        context.tables = self.scheme.tables(context)
        context.tiles = {}
        return tokens, context

    def make_context(self, n):
        """Return the Context of a text of n tokens at positions 0 to n - 1."""
        context = Context()
        pos = torch.arange(n, device=self.embed.weight.device)
        context.add(pos[None], pos, None, None)
        context.tables = self.scheme.tables(context)
        return context

    def check_positions(self, positions, docs=None):
        """Check explicit position ids, (T,) or (B, T), by reading them: the greatest, plus 1."""
        positions = positions.cpu()
        gaps = positions.diff() != 1
        if docs is not None:
            gaps = gaps & (docs.cpu().diff() == 0)
        # Attention to far keys also counts tokens.
        counts = self.scheme.counts_indices() or self.scheme.scaling[0] in rope_scaling.ATTENTION
        require(
            not (counts and gaps.any()),
            f"--pos={self.config.pos} uses distances between indices: give consecutive position "
            "ids, without gaps",
        )
        require(positions.min() >= 0, "position ids must not be negative: count from 0")
        return int(positions.max()) + 1

    def check_length(self, end):
        """Warn beyond the context length, or raise UserError if the scheme ends there."""
        limit = self.config.block_size
        if torch.compiler.is_compiling() or end <= limit:
            return
        require(
            not self.scheme.bounded,
            f"--pos={self.config.pos} has no embedding for position {end - 1}: the context is "
            f"{limit} tokens, so use no more, or extend it by extend.py --method=pi",
        )
        # Without the number of tokens, because Python shows only equal messages once.
        message = f"the text is longer than the model's context of {limit} tokens"
        message += ": extend it by extend.py, or give a shorter one"
        warnings.warn(message, ContextLengthWarning, stacklevel=4)

    def extend(self, method: str, factor: float, layers: str = "auto", **options) -> None:
        """Extend the context by factor, in place. Only the weights of learned embeddings change.

        A second extension by the same method multiplies the factors. Another method is refused,
        because it would throw away frequencies that the weights were trained with, but for abf and
        the methods that replace attention, which keep them. The method none counts as no extension.
        Raises UserError, with nothing changed, for what the scheme cannot do.

        layers: "all", or "full": only layers without a window, in a model with RoPE that also has
        layers with a window. By default the same layers as in an earlier extension, at first full
        if that is possible, because a window hides all tokens that lie farther away.
        """
        config = self.config
        old = config.block_size, config.extension
        config.block_size, config.extension = self.extend_config(method, factor, layers, options)
        try:
            self.extend_scheme(config.extension)
        except UserError:
            config.block_size, config.extension = old
            raise

    def extend_config(self, method, factor, layers, options):
        """Return the context length in tokens and GPTConfig.extension after another extension."""
        config = self.config
        is_number = isinstance(factor, int | float) and 1 <= factor < math.inf
        require(is_number, f"factor={factor!r} does not extend the context: give at least 1")
        before = config.extension or {"method": "none", "factor": 1.0, "options": {}}
        has_full = type(self.scheme) is RoPE and config.is_hybrid and "F" in config.layer_pattern
        if layers == "auto":
            is_full = not config.extension or "layers" in before
            layers = "full" if has_full and is_full else "all"
        require(
            layers == "all" or (layers == "full" and has_full),
            "--layers=full is for rope if some layers have a window, and others have positions and "
            "no window: give --layers=all",
        )
        extension = {"method": method, "factor": factor, "options": options}
        if before["method"] in ("none", method):
            if method == before["method"]:
                extension["options"] = {**before["options"], **options}
            extension["factor"] *= before["factor"]
            extension |= {"original_length": config.original_length}
            extension |= {name: before[name] for name in ("under",) if name in before}
            # Exact for lengths of our own. A file may have another length than its method's.
            length = config.original_length * before["factor"]
            length = length if round(length) == config.block_size else config.block_size
        else:
            self.check_second_method(method, before)
            length = config.block_size
            if before["method"] == "longrope":  # its long table stays, at every length
                before = {**before, "options": {**before["options"], "length": length}}
            extension |= {"original_length": length, "under": before}
        if layers == "full":
            extension["layers"] = "full"
        length = round(factor * length)
        require(
            factor == 1 or length > config.block_size,
            f"factor={factor} leaves the context length at {length} tokens: give a larger one",
        )
        return length, extension

    def check_second_method(self, method, before):
        """Raise UserError unless a method keeps the frequencies of the method before it."""
        name = before["method"]
        keeps = method == "abf" or method in rope_scaling.ATTENTION
        is_fixed = name == "longrope" or not self.scheme.is_dynamic
        is_fixed = is_fixed and name not in rope_scaling.ATTENTION
        has_base = isinstance(self.scheme, RoPE) and name != "drope"
        own = type(self.scheme).frequencies is RoPE.frequencies if has_base else False
        others = ", abf or a method that replaces attention" if is_fixed and own else ""
        require(
            keeps and is_fixed and own,
            f"the model is extended by {name} already, and {method} would replace what its weights "
            f"were trained with: give --method={name}{others}, or extend the original checkpoint",
        )

    def extend_scheme(self, extension):
        options = {name: extension[name] for name in ("layers", "under") if name in extension}
        options |= extension["options"]
        self.scheme.extend(extension["method"], extension["factor"], **options)

    def rope_wavelengths(self, window: bool = False) -> torch.Tensor:
        """The wavelengths in tokens of RoPE's pairs of channels, fastest first: float64 (R/2,).

        They are the extended model's, and infinite if a pair is not rotated. window: for the layers
        with a window, whose wavelengths may differ. Raises UserError for a scheme without RoPE.
        """
        require(
            isinstance(self.scheme, RoPE), f"--pos={self.config.pos} has no wavelengths: use rope"
        )
        scheme = self.scheme.local if window and self.scheme.local else self.scheme
        return 2 * math.pi / scheme.inv_freq.cpu().double()

    def generate(
        self,
        tokens,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator=None,
        compiled: bool = False,
        min_p: float = 0.0,
        stop=(),
    ):
        """Continue prompts: yields the next token of every row, int64 (B, 1), one at a time.

        With a cache, in evaluation mode. Every module is in its own mode between two tokens.
        Warns once beyond the context length. Raises UserError at once for a wrong argument.

        tokens:      (B, T) int64 or int32, T >= 1: prompts of one length
        temperature: 0 is greedy
        top_k:       keep the k most likely tokens (0: all)
        top_p:       keep the most likely tokens whose probabilities sum to this
        compiled:    compile the decoding step, on a GPU to a CUDA graph
        min_p:       keep tokens of at least this fraction of the highest probability
        stop:        token ids that end a row: it yields its own id, and then this id again, until
                     all rows have ended
        """
        from nanolong import inference  # here, because forward() does not need it

        sampling = inference.Sampling(temperature, top_k, top_p, min_p, generator)
        return inference.generate(self, tokens, max_new_tokens, sampling, compiled, stop)

    @torch.no_grad()
    def generate_plainly(self, tokens, max_new_tokens, temperature=1.0):
        """Continue a prompt (1, T) as generate() does, slowly: without a cache."""
        for _ in range(max_new_tokens):
            logits = self(tokens)[:, -1].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat((tokens, token), 1)
            yield token

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint stores, by name, a tied head once. LoRA replaces this."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def save(self, folder) -> None:
        """Write a checkpoint folder, whole or not at all. Raises UserError when it exists."""
        from nanolong import run

        run.save_model(self, folder)

    @classmethod
    def load(cls, path, best=False, dtype=torch.float32, weights=True) -> "GPT":
        """Load the newest (or best) checkpoint of a run folder, or a checkpoint folder, on the CPU
        in eval mode. model.meta holds the rest of meta.json. Raises UserError if it is damaged.

        dtype: dtype of embeddings and linear layers, float32 or bfloat16 (None: as stored).
        weights: False leaves all but the position scheme's on the meta device.
        """
        from nanolong import run

        return run.load_model(cls, path, best, dtype, weights)


# -----------------------------------------------------------------------------
# Chapter 2: what a pass knows of the text.


class Context:
    """What a forward pass knows of the text. Nothing is kept, because the pass has all of it."""

    write_index = valid_length = None  # set in a KVCache for steps of fixed shape

    def __init__(self):
        self.n = 0  # tokens so far, with the tokens of this pass
        self.pos = None  # position ids of the tokens of this pass, (T,) or (B, T)
        self.all_pos = None  # position ids of all tokens, (n,) or (B, n)
        self.docs = None  # document ids of all tokens, (B, n), or None
        self.has_gaps = False  # whether position ids may differ from the indices of the tokens
        self.tables = None  # result of the scheme's tables()
        self.tiles = {}  # what the kernels compute once for all layers

    @property
    def n_keys(self):
        """Number of keys that attention sees."""
        return self.n

    def add(self, tokens, pos, docs, version):
        """Add the tokens of a pass. Returns the tokens to compute.

        version: version of the scheme's tables, from set_length().
        """
        self.n, self.docs = tokens.shape[1], docs
        self.pos = self.all_pos = pos
        return tokens

    def mask(self):
        """Return the options of kernels.attention() that are the same in all layers."""
        return {"docs": self.docs, "length": self.valid_length, "shared": self.tiles}

    def keep(self, layer, **new):
        """Append tensors (B, h, T, c), by name, to those kept for a layer. Returns all of each."""
        return list(new.values())

    def sum(self, layer, x):
        """Sum x (B, h, T, c) along the text, in float64. Use differences within a document."""
        return x.to(torch.float32 if x.device.type == "mps" else torch.float64).cumsum(2)

    def before(self, layer, x, n):
        """Return x (B, h, T, c) of the last n tokens before this pass: (B, h, m, c), m <= n."""
        return x[:, :, :0]

    def table(self, layer, compute):
        """Return compute(n), a tuple by distance, for at least the n keys of this pass."""
        return compute(self.n_keys)


class KVCache(Context):
    """A Context that keeps tokens, keys and values, so that a pass computes only the new tokens.

    capacity: tokens to allocate memory for (0: the memory doubles when it is full). For decoding
    steps of fixed shape, write_index is where the next token is written and valid_length is the
    number of tokens with it, both int64 (1,) on the device.
    """

    def __init__(self, capacity=0):
        super().__init__()
        self.capacity = capacity
        self.tokens = None  # (B, n)
        self.version = None  # version of the scheme's tables by which the keys were computed
        self.kept = {}  # (layer, name) -> (B, h, allocated, c)
        self.last = {}  # (layer, name) -> running values of the last tokens, (B, h, m, c)
        self.computed = {}  # layer -> number of keys, and the result of table() for them

    @property
    def n_keys(self):
        return self.n if self.write_index is None else self.capacity

    def add(self, tokens, pos, docs, version):
        """Add the tokens of a pass. Returns the tokens to compute: all, if the tables have changed.

        Cached keys cannot be kept then, even unrotated, because deeper layers computed theirs from
        hidden states of the old tables.
        """
        same_kind = not self.n or (docs is None) == (self.docs is None)
        require(same_kind, "docs are missing in some calls with this cache: pass them to all")
        self.n += tokens.shape[1]
        self.pos, self.all_pos = pos, concatenate(self.all_pos, pos)
        self.tokens = concatenate(self.tokens, tokens)
        self.docs = concatenate(self.docs, docs)
        if version == self.version:
            return tokens
        self.version, self.kept, self.last, self.computed = version, {}, {}, {}
        self.pos = self.all_pos
        return self.tokens

    def keep(self, layer, **new):
        return [self.write((layer, name), x) for name, x in new.items()]

    def write(self, key, new):
        """Write (B, h, T, c) to the end of a buffer, and grow it if need be. Returns all so far."""
        if self.write_index is not None:  # all that is allocated: attention gets the valid length
            return self.kept[key].index_copy_(2, self.write_index, new)
        start = self.n - new.shape[2]
        old = self.kept.get(key)
        if old is None or old.shape[2] < self.n:
            # zeros, because steps of fixed shape multiply the unused part by 0, and 0 x NaN is NaN
            size = max(self.n, self.capacity, 2 * start)
            self.kept[key] = new.new_zeros(*new.shape[:2], size, new.shape[3])
            if old is not None:
                self.kept[key][:, :, :start] = old[:, :, :start]
        self.kept[key].narrow(2, start, new.shape[2]).copy_(new)
        return self.kept[key].narrow(2, 0, self.n)

    def sum(self, layer, x):
        x = super().sum(layer, x)
        if (layer, "sum") in self.last:
            x = x + self.last[layer, "sum"]
        self.set_last((layer, "sum"), x[:, :, -1:])
        return x

    def before(self, layer, x, n):
        old = self.last.get((layer, "before"), x[:, :, :0]).clone()  # because set_last() reuses it
        self.set_last((layer, "before"), torch.cat((old, x), 2)[:, :, -n:])
        return old

    def table(self, layer, compute):
        """Compute the table once for the capacity, because a step would spend most time on it."""
        if not self.capacity:
            return super().table(layer, compute)
        if layer not in self.computed or self.computed[layer][0] < self.n_keys:
            n = max(self.n_keys, self.capacity)
            self.computed[layer] = n, compute(n)
        return self.computed[layer][1]

    def set_last(self, key, x):
        if self.write_index is None:
            self.last[key] = x.detach().clone()
        else:  # in place, because a CUDA graph writes to its address
            self.last[key].copy_(x)

    def tensors(self):
        """Return all tensors that a step of fixed shape reads or writes."""
        counts = self.all_pos, self.docs, self.write_index, self.valid_length
        tables = [x for _, table in self.computed.values() for x in table]
        found = (*counts, *self.kept.values(), *self.last.values(), *tables)
        return [x for x in found if isinstance(x, torch.Tensor)]


def concatenate(old, new):
    return new if old is None else torch.cat((old, new), -1)


# -----------------------------------------------------------------------------
# Chapter 3: the position schemes. To add one, derive a class from NoPE, override embed(), rotate()
# or bias(), or replace attention by attend(), and add a line to POSITIONS.


class NoPE(nn.Module):
    """No position information but the causal mask (Haviv et al. 2022). The base of all schemes.

    In the hooks, x (B, T, C) is what queries and keys were projected from, layer is the index of
    the layer, and context is a Context. Distance: index of the query minus index of the key.
    """

    # name of the setting that must be even, because channels are paired: n_embd or head_dim
    pairs = ""
    bounded = False  # True: nothing can be computed at positions from block_size on
    methods = {"none": (), "scale": ("scale",)}  # extension methods and the options of each
    settings = ()  # settings of GPTConfig that have an effect on such schemes only
    forgets = False  # True: tokens lose weight with every token after them, attention sinks too

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.scaling = "none", 1.0, {}  # method, factor and options of the last extend()
        self.position_scale = 1.0  # positions, or distances, are divided by this
        self.extra_scale = 1.0  # attention scores are multiplied by this
        self.is_dynamic = False  # True: the tables follow the length of the input
        self._length = None  # input length for which the dynamic tables were computed
        self._tables_version = None  # changes with the tables, because cached keys are then stale

    # The hooks. Most schemes override one hook.

    def embed(self, x, pos):
        """Add to the token embeddings x (B, T, C) at position ids pos, (T,) or (B, T) int64."""
        return x

    def tables(self, context):
        """Compute what the layers of a pass share. They find the result in context.tables."""
        return None

    def rotate(self, q, k, x, layer, context):
        """Rotate queries (B, H, T, D) and keys (B, Hk, T, D): kernels.rotate_by() takes angles."""
        return q, k

    def bias(self, x, layer, context):
        """Add to the scores: None, or

        slopes (H,), float32: -slope * distance is added
        a table (H, m), float32: table[min(distance, m - 1)] is added, m <= context.n_keys
        sums c (B, H, n), float64, of all tokens so far: c_i - c_j is added for query i and key j
        """
        return None

    def attend(self, q, k, v, bias, layer, context, **options):
        """Attend from queries (B, H, T, D) to all keys, with the cached keys: (B, H, T, D).

        bias: result of bias(). options: window, sinks, scale and return_lse of kernels.attention().
        Called once a layer, because the cache keeps one k and one v for each: a scheme with two
        softmaxes stacks its queries, and a bias, as heads.
        """
        n_bias = q.shape[1] if bias is None else bias.shape[-2:][0]  # its heads, in all three forms
        require(
            n_bias == q.shape[1],
            f"{type(self).__name__} attends from {q.shape[1]} heads with a bias of {n_bias}: stack "
            "the bias as the queries are stacked, by repeat_interleave() say",
        )
        k, v = context.keep(layer, k=k.to(v.dtype), v=v)  # keys are kept rotated
        return kernels.attention(q, k, v, bias=bias, **context.mask(), **options)

    @classmethod
    def overridden(cls):
        """Return the names of the hooks that are not NoPE's."""
        hooks = ("embed", "tables", "rotate", "bias", "attend")
        return {hook for hook in hooks if getattr(cls, hook) is not getattr(NoPE, hook)}

    @classmethod
    def check_config(cls, config):
        """Raise UserError for a GPTConfig that the scheme cannot have, or partly ignores."""
        paired = getattr(config, cls.pairs, 0)
        require(paired % 2 == 0, f"{cls.pairs}={paired} is odd: --pos={config.pos} pairs channels")
        acts_in_layers = cls.overridden() & {"rotate", "bias", "attend"}
        require(
            acts_in_layers or set(config.layer_pattern).isdisjoint("NS"),
            f"--pos={config.pos} acts in no layer, so none can be without positions: use F and W "
            "only",
        )
        require(
            not config.rope_local_base or (cls is RoPE and config.is_hybrid),
            "rope_local_base is of rope in layers with a window, next to layers without one: give "
            "--window=N and a --layer_pattern of both, such as WWWF",
        )

    @classmethod
    def counts_indices(cls):
        """Return whether position ids must be consecutive, because not all hooks read them.

        By default embed() and tables() read position ids, and other hooks count tokens. A bias
        adds to the scores by distances between indices, or sums along the text.
        """
        own = cls.overridden()
        return "bias" in own or bool(own) and own.isdisjoint(("embed", "tables"))

    # Context extension.

    def extend(self, method, factor, **options):
        """Prepare for factor times the original length. Raises UserError, with nothing changed."""
        self.check_method(method, options)
        self.scaling = method, factor, options
        self.position_scale = factor if method == "pi" else 1.0
        self.extra_scale = options.get("scale", 1.0)
        self.is_dynamic = method.startswith("dynamic")
        self._length = self._tables_version = None

    def check_method(self, method, options):
        """Raise UserError unless extend() takes this method and these options."""
        check_choice(method, self.methods, f"method of --pos={self.config.pos}")
        known = self.methods[method]
        for name in options:
            require(known, f"method {method!r} has no options: leave {name!r} out")
            check_choice(name, known, f"option of method {method!r}")
        scale = options.get("scale", 1.0)
        require(rope_scaling.is_number(scale), f"scale={scale!r} is no number above 0: give one")

    def set_length(self, length):
        """Set the tables for an input of this many tokens, with the cached tokens, before a forward
        pass. Returns the version of the tables: a cache filled under another is refilled.
        """
        if self.is_dynamic:
            # Quarters of the original length, because each change computes cached keys again.
            original = self.config.original_length
            # index(), because a length may be a symbol while torch.compile traces
            quarters = operator.index(-(-4 * length // original))
            length = max(original, quarters * original / 4)
            # always in a graph, because it must have the table of its own length
            if torch.compiler.is_compiling() or length != self._length:
                if self.update_tables(length) or self._tables_version is None:
                    self._tables_version = length
                self._length = length
        return self._tables_version

    def update_tables(self, length):
        """Set the tables of a dynamic method for inputs of this many tokens.

        Returns whether they have changed.
        """
        self.position_scale = length / self.config.original_length
        return True

    def distance_index(self, n, size, device=None):
        """Index a table of `size` distances by the distances 0..n-1, divided by position_scale.

        Returns a slice or int64 (m,), m <= n: it ends where the table's last entry is reached.
        device: the table's, because the CPU waits for a GPU to index by an index on the CPU.
        """
        if self.position_scale == 1:
            return slice(n)
        m = min(n, math.ceil((size - 1) * self.position_scale) + 1)
        # float64 and 1e-9, because an exact multiple of position_scale must not be rounded down
        on_mps = device is not None and device.type == "mps"  # which has no float64
        distance = torch.arange(m, dtype=torch.float64, device=None if on_mps else device)
        return (distance / self.position_scale + 1e-9).long()

    # Constant tables follow the model's device but keep their dtype, because model.bfloat16() must
    # not round frequencies. They are not buffers, because these are saved, and DDP broadcasts them.

    def register_constant(self, name, tensor):
        """Keep a tensor that follows the model's device, never its dtype, and is not saved."""
        setattr(self, name, tensor)
        self.__dict__.setdefault("_constants", []).append(name)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for name in self.__dict__.get("_constants", []):
            table = getattr(self, name)
            # fn is tried on another tensor, because .to() and .float() may also change the dtype
            device = fn(torch.empty(1, device=table.device)).device
            no_float64 = device.type == "mps" and table.dtype == torch.float64
            setattr(self, name, table.to(device, torch.float32 if no_float64 else table.dtype))
        return self


class Learned(NoPE):
    """Learned absolute position embeddings (GPT-2)."""

    bounded = True
    methods = {"pi": ()}

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.randn(config.block_size, config.n_embd) * 0.02)

    def embed(self, x, pos):
        return x + self.table[pos]

    def extend(self, method, factor, **options):
        """Interpolate the table linearly to factor times its rows. Fine-tune it afterwards."""
        super().extend(method, factor, **options)
        old_size = len(self.table)
        new_size = round(self.config.original_length * factor)
        if new_size == old_size:  # the model is loaded from an extended checkpoint
            return
        table = self.table.detach()
        source = torch.arange(new_size, dtype=torch.float64) * old_size / new_size
        source = source.clamp(max=old_size - 1).to(table.device)
        low = source.long()
        high = (low + 1).clamp(max=old_size - 1)
        weight = (source - low)[:, None].to(table.dtype)
        self.table = nn.Parameter(torch.lerp(table[low], table[high], weight))


def sinusoid_frequencies(dim):
    """The inverse frequencies of Vaswani et al. (2017): float64 (dim / 2,)."""
    return 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def interleave_sin_cos(angle):
    """(..., n) angles -> (..., 2n): sin, cos, sin, cos, ..."""
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


class Sinusoidal(NoPE):
    """Fixed sinusoidal position embeddings (Vaswani et al. 2017)."""

    pairs = "n_embd"
    methods = {"none": (), "pi": ()}
    scale = 0.02 * math.sqrt(2)  # because unit sinusoids would dominate fresh token embeddings

    def __init__(self, config):
        super().__init__(config)
        self.register_constant("inv_freq", sinusoid_frequencies(config.n_embd))

    def embed(self, x, pos):
        angle = pos[..., None] * (self.inv_freq / self.position_scale)  # (T, C/2) or (B, T, C/2)
        return x + self.scale * interleave_sin_cos(angle).to(x.dtype)


class RelativeVectors(NoPE):
    """The base of schemes that add vectors to keys and values by distance.

    Attention is plain PyTorch, a chunk of queries at a time, because the kernels have no vectors.
    """

    def vectors(self, n, layer):
        """Return (keys, values, offsets) for n tokens. The score of a query and a key is
        scale * ((q + u) k + (q + w) keys[distance]), and values[distance] is added to the value.

        keys: (H or 1, m, D), m <= n. The last vector holds for all greater distances.
        values: the same shape or None. offsets: u and w, each (H, D), or None.
        """
        raise NotImplementedError

    def attend(self, q, k, v, bias, layer, context, *, scale, window=0, sinks=0, return_lse=False):
        k, v = context.keep(layer, k=k.to(v.dtype), v=v)
        mask = {"window": window, "sinks": sinks, "docs": context.docs}
        vectors = context.table(layer, lambda n: self.vectors(n, layer))
        options = vectors, scale, mask, context.valid_length
        y, lse = kernels.attend_in_chunks(attend_with_vectors, q, k, v, *options)
        return (y, lse) if return_lse else y


def attend_with_vectors(q, k, v, vectors, scale, query, key, mask):
    """Attend with relative vectors: a chunk of kernels.attend_in_chunks().

    vectors: what RelativeVectors.vectors() returns.
    """
    keys, values, offsets = vectors
    u, w = (x[:, None] for x in offsets) if offsets else (0, 0)
    distance = (query[:, None] - key).clamp(0, keys.shape[1] - 1)
    index = distance.expand(*q.shape[:2], -1, -1)  # (B, H, n, m)
    scores = kernels.multiply_groups(q + u, k.mT)
    scores = scores + ((q + w) @ keys.to(q.dtype).mT).gather(-1, index)
    seen = kernels.visible_keys(query, key, **mask)
    scores = (scores * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    y = kernels.multiply_groups(p, v)
    if values is not None:
        by_distance = p.new_zeros(*p.shape[:3], values.shape[1]).scatter_add(-1, index, p)
        y = y + by_distance @ values.to(p.dtype)
    return y, lse


class Shaw(RelativeVectors):
    """Learned vectors by distance, added to keys and values (Shaw et al. 2018), at first zero.

    All distances from max_distance on share the last vector. That is at most half the original
    length, so that training uses the last vector often: it stands for everything farther away.
    """

    methods = {"none": (), "pi": ()}
    max_distance = 128

    def __init__(self, config):
        super().__init__(config)
        size = min(self.max_distance, max(1, config.original_length // 2)) + 1
        self.keys = nn.Parameter(torch.zeros(config.n_layer, size, config.head_dim))
        self.values = nn.Parameter(torch.zeros(config.n_layer, size, config.head_dim))

    def vectors(self, n, layer):
        index = self.distance_index(n, self.keys.shape[1], self.keys.device)
        return self.keys[layer, None, index], self.values[layer, None, index], None


class NEZHA(RelativeVectors):
    """Shaw's scheme with fixed sinusoidal vectors (Wei et al. 2019)."""

    pairs = "head_dim"
    methods = {"none": (), "pi": ()}
    max_distance = 64

    def __init__(self, config):
        super().__init__(config)
        self.max_distance = min(self.max_distance, max(1, config.original_length // 2))
        self.register_constant("inv_freq", sinusoid_frequencies(config.head_dim))

    def vectors(self, n, layer):
        m = min(n, math.ceil(self.max_distance * self.position_scale) + 1)
        distance = torch.arange(m, device=self.inv_freq.device) / self.position_scale
        angle = distance.clamp(max=self.max_distance)[:, None] * self.inv_freq
        table = interleave_sin_cos(angle).float()[None]  # (1, m, D)
        return table, table, None


class TransformerXL(RelativeVectors):
    """Scores (q + u) k + (q + v) W_R R(distance), R sinusoidal (Transformer-XL, Dai et al. 2019).

    All layers share u and v (H, D), and every layer has its own W_R (H D, C). The method "clamp"
    uses the last distance seen in training for all greater distances.
    """

    pairs = "n_embd"
    methods = {"none": (), "pi": (), "clamp": ()}

    def __init__(self, config):
        super().__init__(config)
        H, D, C = config.n_head, config.head_dim, config.n_embd
        self.register_constant("inv_freq", sinusoid_frequencies(C))
        self.u = nn.Parameter(torch.zeros(H, D))
        self.v = nn.Parameter(torch.zeros(H, D))
        self.project = nn.Parameter(torch.randn(config.n_layer, H * D, C) * (0.5 / math.sqrt(C)))

    def vectors(self, n, layer):
        is_clamped = self.scaling[0] == "clamp"
        m = min(n, self.config.original_length) if is_clamped else n
        distance = torch.arange(m, device=self.u.device)
        angle = distance[:, None] * (self.inv_freq / self.position_scale)  # (m, C/2), float64
        R = torch.cat((angle.sin(), angle.cos()), -1).to(self.project.dtype)
        with torch.autocast(R.device.type, enabled=False):  # because bfloat16 merges distances
            keys = F.linear(R, self.project[layer])
        keys = keys.unflatten(-1, self.u.shape).transpose(0, 1)  # (H, m, D)
        return keys, None, (self.u, self.v)


class T5(NoPE):
    """A learned score by head and bucket of distances, shared by all layers (Raffel et al. 2020).

    Half of the buckets hold one distance each, the rest grow logarithmically to max_distance.
    """

    methods = {"none": (), "pi": ()}
    n_buckets = 32
    max_distance = 128
    lengths = 4  # max_distance is at most the original length / 4, as in the paper: 512 and 128

    def __init__(self, config):
        super().__init__(config)
        max_distance = min(self.max_distance, max(2, config.original_length // self.lengths))
        n_buckets = min(self.n_buckets, max_distance)
        bucket = [bucket_of(distance, n_buckets, max_distance) for distance in range(max_distance)]
        bucket = bucket[: bucket.index(bucket[-1]) + 1]  # because the last entry is for the rest
        self.register_constant("bucket", torch.tensor(bucket))
        self.weight = nn.Parameter(torch.zeros(config.n_head, n_buckets))

    def bias(self, x, layer, context):
        index = self.distance_index(context.n_keys, len(self.bucket), self.bucket.device)
        return self.weight[:, self.bucket[index]].float()


def bucket_of(distance, n_buckets, max_distance):
    """Return the bucket of a distance. Half of them hold one distance each."""
    exact = n_buckets // 2
    if distance < exact:
        return distance
    log_ratio = math.log(distance / exact) / math.log(max_distance / exact)
    return min(n_buckets - 1, exact + int(log_ratio * (n_buckets - exact)))


class ALiBi(NoPE):
    """Scores fall linearly with distance, by a fixed slope for each head (Press et al. 2022)."""

    methods = {"none": (), "pi": (), "dynamic-pi": ()}

    def __init__(self, config):
        super().__init__(config)
        n = 2 ** int(math.log2(config.n_head))
        slopes = [2 ** (-8 * (h + 1) / n) for h in range(n)]
        # heads beyond a power of two take every other slope of the next power
        slopes += [2 ** (-4 * (2 * h + 1) / n) for h in range(config.n_head - n)]
        self.register_constant("slopes", torch.tensor(slopes, dtype=torch.float64).float())

    def bias(self, x, layer, context):
        return self.slopes / self.position_scale  # interpolated slopes (Al-Khateeb et al. 2023)


class Kerple(NoPE):
    """KERPLE, logarithmic (Chi et al. 2022): -r1 log(1 + r2 distance), learned by head."""

    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        # softplus(r1) starts near U(0, 2), softplus(r2) near U(0, 1)
        self.r1 = nn.Parameter((torch.rand(config.n_head) * 1.99 + 0.01).expm1().log())
        self.r2 = nn.Parameter((torch.rand(config.n_head) * 0.99 + 0.01).expm1().log())

    def bias(self, x, layer, context):
        distance = torch.arange(context.n_keys, device=self.r1.device) / self.position_scale
        r1 = F.softplus(self.r1)[:, None]
        r2 = F.softplus(self.r2)[:, None]
        return (-r1 * torch.log1p(r2 * distance)).float()


class KerplePower(NoPE):
    """KERPLE, power (Chi et al. 2022): -r1 distance^r2 with 0 < r2 < 2, learned by head."""

    methods = {"none": (), "pi": ()}

    def __init__(self, config):
        super().__init__(config)
        # softplus(r1) starts near U(0, 1), 2 sigmoid(r2) near U(0, 2)
        self.r1 = nn.Parameter((torch.rand(config.n_head) * 0.99 + 0.01).expm1().log())
        self.r2 = nn.Parameter((torch.rand(config.n_head) * 0.98 + 0.01).logit())

    def bias(self, x, layer, context):
        # It begins at distance 1, because the derivative of 0^r2 is not finite
        distance = torch.arange(1, context.n_keys, device=self.r1.device) / self.position_scale
        r1 = F.softplus(self.r1)[:, None]
        r2 = 2 * self.r2.sigmoid()[:, None]
        power = (r2 * distance.log()).exp()
        return (-r1 * F.pad(power, (1, 0))).float()


class Sandwich(NoPE):
    """The product of two sinusoidal embeddings by distance, a fixed bias (Chi et al. 2023)."""

    methods = {"none": (), "pi": ()}
    dim = 128  # size of the sinusoidal embeddings, whatever the size of the model

    def __init__(self, config):
        super().__init__(config)
        index = torch.arange(2, self.dim + 2, 2, dtype=torch.float64)
        head = torch.arange(1, config.n_head + 1, dtype=torch.float64)
        self.register_constant("inv_freq", 10000.0 ** -(index / self.dim))
        self.register_constant("slopes", config.n_head / (8 * head))

    def bias(self, x, layer, context):
        distance = torch.arange(context.n_keys, device=self.slopes.device)[:, None]
        product = (distance * (self.inv_freq / self.position_scale)).cos().sum(-1)
        return (self.slopes[:, None] * (product - self.dim // 2)).float()  # 0 at distance 0


class RoPE(NoPE):
    """Rotary position embeddings (Su et al. 2021): channel c is paired with c + rotary_dim / 2.

    Layers with a window may have frequencies of their own, in the RoPE `local`: with another base
    (Gemma 3), or not extended.
    """

    pairs = "head_dim"
    methods = rope_scaling.OPTIONS
    settings = ("rope_base", "p_rope", "rope_fraction")

    def __init__(self, config):
        super().__init__(config)
        self.rotary_dim = int(config.rope_fraction * config.head_dim)
        self.attention_factor = 1.0  # cos and sin are multiplied by this
        self.register_constant("inv_freq", torch.zeros(self.rotary_dim // 2, dtype=torch.float64))
        self.under = None  # an extension whose frequencies stay under the last one
        self.far = None  # FarKeys, if far keys are rotated otherwise than near keys
        self.local = None
        self.extend("none", 1.0)  # sets inv_freq: plain RoPE is the method none

    @classmethod
    def check_config(cls, config):
        super().check_config(config)
        p = config.p_rope
        require(0 <= p <= 1, f"p_rope={p} is no fraction: give one up to 1")
        n = int(config.rope_fraction * config.head_dim)
        require(
            n % 2 == 0 and n <= config.head_dim,
            f"rope_fraction={config.rope_fraction} rotates {n} of {config.head_dim} channels: give "
            "a fraction that is an even number of them",
        )

    def tables(self, context):
        """Compute cos and sin of position x frequency, float32 (T, R/2) or (B, T, R/2): for layers
        without a window, for layers with one, and for far keys.
        """
        full = kernels.cos_sin(context.pos, self.inv_freq, self.attention_factor)
        local, far = full, None
        if self.local is not None:
            factor = self.local.attention_factor
            local = kernels.cos_sin(context.pos, self.local.inv_freq, factor)
        if self.far is not None and self.far.group > 1:
            has_sinks = self.far.n_keys != rope_scaling.ALL
            require(context.docs is None or not has_sinks, SINKS_AND_DOCS)
            pos = context.all_pos
            far = kernels.cos_sin(self.far.of_keys(pos) - pos, self.inv_freq)
        return full, local, far

    def rotate(self, q, k, x, layer, context):
        full, local, _ = context.tables
        return kernels.rope(q, k, *(local if self.config.uses_window(layer) else full))

    def of_layer(self, layer):
        return self.local if self.local and self.config.uses_window(layer) else self

    def attend(self, q, k, v, bias, layer, context, **options):
        far = self.far
        if far is None or far.group == 1:
            return super().attend(q, k, v, bias, layer, context, **options)
        # Far keys are rotated once more, because the cache keeps keys as rotate() leaves them.
        k, v = context.keep(layer, k=k.to(v.dtype), v=v)
        docs, pos, length = context.docs, context.all_pos, context.valid_length
        by_index = docs is None and length is None and not context.has_gaps
        terms = rope_scaling.Terms(far, self.inv_freq, context.tables[2], pos, by_index)
        scale = options["scale"]
        if rope_scaling.is_in_two(q, terms):
            return rope_scaling.attend_in_two(q, k, v, terms, scale)
        arguments = q, k, v, terms, scale, {"docs": docs}, length
        (y,) = kernels.attend_in_chunks(rope_scaling.attend_chunk, *arguments)
        return y

    def set_length(self, length):
        version = super().set_length(length)
        return version if self.far is None else self.far.group

    def extend(self, method, factor, layers="all", under=None, **options):
        """Take the frequencies of a method of rope_scaling.py.

        layers: "full" leaves layers with a window as they were trained. under: an extension whose
        frequencies stay, in GPTConfig.extension's form, or None.
        """
        self.check_method(method, options)
        replaces_attention = method in rope_scaling.ATTENTION
        is_plain = type(self) is RoPE and not (self.config.window or self.config.sink_scores)
        require(
            is_plain or not replaces_attention,
            f"method {method!r} replaces attention: it is for --pos=rope without a window and "
            "without learned sinks, so choose another method",
        )
        old, self.under = self.under, under
        try:
            self.set_frequencies(method, factor, options)
        except UserError:
            self.under = old
            raise
        self.scaling = method, factor, options
        self.is_dynamic = "length" in self.methods[method] and "length" not in options
        self._length = self._tables_version = None
        # Layers with a window have the same frequencies, or a RoPE of their own.
        self.local = None
        if layers == "full" or self.config.rope_local_base:
            self.local = self.make_local()
            if layers != "full":
                self.local.extend(method, factor, under=under, **options)

    def make_local(self):
        """Make the RoPE of layers with a window, which is not extended."""
        config = self.config
        settings = {"rope_base": config.rope_local_base or config.rope_base, "rope_local_base": 0.0}
        settings |= {"block_size": config.original_length, "extension": None}
        return RoPE(replace(config, **settings)).to(self.inv_freq.device)

    def update_tables(self, length):
        method, factor, options = self.scaling
        changed = self.set_frequencies(method, factor, {**options, "length": length})
        if self.local and self.local.is_dynamic:
            changed |= self.local.update_tables(length)
        return changed

    def set_frequencies(self, method, factor, options):
        """Set the table. Returns whether it has changed."""
        old, old_factor, old_far = self.inv_freq, self.attention_factor, self.far
        tables = self.frequencies(method, factor, options)
        rope_scaling.check_frequencies(tables, self.rotary_dim, type(self).__name__)
        self.inv_freq = tables[0].to(old, non_blocking=True)
        self.attention_factor = tables[1]
        self.far = rope_scaling.far_keys(method, self.config.original_length, factor, options)
        if torch.compiler.is_compiling():
            return True  # because a traced table has no values to compare
        same = old.is_meta or torch.equal(self.inv_freq, old)
        return not same or (self.attention_factor, self.far) != (old_factor, old_far)

    def frequencies(self, method, factor, options):
        """Compute inverse frequencies, float64 (R/2,), and the factor on cos and sin: a hook."""
        config = self.config
        base, length = config.rope_base, config.original_length
        under = self.under
        if under:
            if method == "abf":
                base = rope_scaling.larger_base(base, self.rotary_dim, length, factor, **options)
                problem = f"the base {config.rope_base:g} is as large as abf's already"
                require(base > config.rope_base or factor == 1, f"{problem}: give new_base")
            else:  # checks the options
                rope_scaling.frequencies(method, base, self.rotary_dim, length, factor, **options)
            method, factor, options = under["method"], under["factor"], under["options"]
            length = under["original_length"]
        inv_freq, attention_factor = rope_scaling.frequencies(
            method, base, self.rotary_dim, length, factor, **options
        )
        if config.p_rope < 1:
            n_rotated = int(config.p_rope * self.rotary_dim // 2)
            inv_freq = inv_freq * (torch.arange(len(inv_freq)) < n_rotated)
        return inv_freq, attention_factor


class FoX(NoPE):
    """Forget gates (Lin et al. 2025): f_t = sigmoid(w x_t + b), learned for each head and layer.

    The score of query i and key j gains log f_(j+1) + ... + log f_i.
    """

    methods = {"none": ()}
    forgets = True
    first_bias = 0.0  # f = 0.5 (5 is f = 0.993, as in data-dependent ALiBi)

    def __init__(self, config):
        super().__init__(config)
        shape = (config.n_layer, config.n_head)
        self.weight = nn.Parameter(torch.randn(*shape, config.n_embd) * 0.02)
        self.gate_bias = nn.Parameter(torch.full(shape, self.first_bias))

    def bias(self, x, layer, context):
        wide = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = (y.to(wide) for y in (x, self.weight[layer], self.gate_bias[layer]))
        # In float32 or wider, because a running sum adds up rounding errors of bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            log_f = F.logsigmoid(F.linear(x, weight, bias))  # (B, T, H)
        (sums,) = context.keep(layer, gates=context.sum(layer, log_f.mT[..., None]))
        return sums[..., 0]


class FoXRoPE(FoX, RoPE):
    """Forget gates, and queries and keys rotated as by RoPE."""

    methods = {m: x for m, x in RoPE.methods.items() if m not in rope_scaling.ATTENTION}


POSITIONS = {
    "nope": NoPE,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "shaw": Shaw,
    "nezha": NEZHA,
    "xl": TransformerXL,
    "t5": T5,
    "alibi": ALiBi,
    "kerple": Kerple,
    "kerple-power": KerplePower,
    "sandwich": Sandwich,
    "rope": RoPE,
    "fox": FoX,
    "fox-rope": FoXRoPE,
}

GPT.schemes = POSITIONS  # here, because the class stands before both
GPT.cache_class = KVCache
