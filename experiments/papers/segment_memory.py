"""Segment-level recurrence (Transformer-XL, Dai et al. 2019) for the models of model.py.

    model = RecurrentGPT(GPTConfig(pos="xl", block_size=64 + 64))
    streams = Streams(dataset.train, dataset.bos, batch_size=16, segment=64)
    memory = SegmentMemory(model, 64)
    for step in range(streams.n_segments):
        loss = model(*streams.batch(step), cache=memory)

A text is computed in segments. Each layer attends to its memory, too: its own inputs at the tokens
before the segment. What these hold depends on a memory before them, so the effective context grows
with every layer.
"""

import numpy as np
import torch

from model import GPT, POSITIONS
from nanolong.inference import sample_token
from nanolong.losses import evaluation_mode
from nanolong.validate import require

# Schemes for a memory: when it moves on, tokens keep their distances but not their positions.
RELATIVE = tuple(pos for pos in POSITIONS if pos not in ("learned", "sinusoidal"))


def check_memory(config, capacity):
    """Raise UserError unless a model of this GPTConfig can have a memory of `capacity` tokens."""
    known = f"choose from {', '.join(RELATIVE)}"
    require(config.pos in POSITIONS, f"there is no position scheme {config.pos!r}: {known}")
    require(
        config.pos in RELATIVE,
        f"{config.pos!r} adds absolute positions, which change when a memory moves on: {known}",
    )
    require(capacity >= 1, f"a memory of {capacity} tokens holds nothing: give at least 1 token")
    plain = set(config.layer_pattern) == {"F"} and not config.random_positions
    require(config.qk_norm != "all", "a memory norms keys by head: give --qk_norm=head or none")
    require(
        plain and config.extension is None,
        "a memory is for full attention and positions as they are: leave out windows, layer "
        "patterns, random positions and extensions",
    )


class Streams:
    """
    A text as B parallel streams: at step s, stream b reads the T tokens from b N/B + s T on.

    N is a multiple of B T, where T is the length of a segment. After the last segment the streams
    start again. The text is the longest file of a split; the targets are one token further on,
    and -1, which is not scored, where a document starts.
    """

    def __init__(self, split, bos, batch_size, segment, n_tokens=0):
        self.split = split
        self.bos = bos
        self.batch_size = batch_size
        self.segment = segment  # tokens
        self.file = max(range(len(split.tokens)), key=lambda i: len(split.tokens[i]))
        available = len(split.tokens[self.file]) - 1  # the last token is a target only
        batch_tokens = batch_size * segment
        n_tokens = n_tokens or available // batch_tokens * batch_tokens
        require(
            n_tokens <= available,
            f"the text has {available:,} tokens, not {n_tokens:,}: give a lower --train_tokens",
        )
        require(
            n_tokens >= 2 * batch_tokens,
            f"{batch_size:,} streams of two segments of {segment:,} tokens need "
            f"{2 * batch_tokens:,} tokens, and there are {n_tokens or available:,}: give a lower "
            "--batch_size or --segment, or more text",
        )
        require(
            n_tokens % batch_tokens == 0,
            f"{batch_size} segments of {segment} tokens do not divide a text of {n_tokens:,} "
            f"tokens: give a multiple of {batch_tokens:,} as --train_tokens",
        )
        self.n_segments = n_tokens // batch_tokens  # of each stream

    def batch(self, step):
        """Read the segments of a step: inputs and targets, int64 (B, T)."""
        return self.read([(b, step % self.n_segments) for b in range(self.batch_size)])

    def shuffled_batch(self, step, seed, n_steps):
        """Read a batch of the segments that the streams read in n_steps, in random order."""
        n_read = min(self.n_segments, n_steps)
        epoch, step = divmod(step, n_read)
        rng = np.random.Generator(np.random.PCG64([seed, epoch]))
        order = rng.permutation(self.batch_size * n_read).tolist()
        chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
        return self.read([divmod(i, n_read) for i in chosen])

    def read(self, segments):
        """Read segments, given as (stream, index): inputs and targets, int64 (B, T)."""
        rows = []
        for stream, index in segments:
            start = (stream * self.n_segments + index) * self.segment
            rows.append(self.split.checked_tokens(self.file, start, start + self.segment + 1))
        tokens = torch.from_numpy(np.stack(rows))
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.bos is not None:
            y = y.masked_fill(y == self.bos, -1)
        return x, y


class SegmentMemory:
    """
    The last `capacity` inputs of every layer, detached, which stand in the place of a KV cache.

    Keys and values of the memory are computed again in every segment, with the current weights:
    gradients reach these weights, but not the inputs, which are stored after dropout and before the
    layer's norm. Position 0 is that of the oldest token in memory.
    """

    fixed_shape = False  # as in KVCache: the number of keys varies

    def __init__(self, model, capacity):
        check_memory(model.config, capacity)
        self.capacity = capacity  # tokens
        self.clear()

    def clear(self):
        """Forget the text so far: what follows is the start of another one."""
        self.inputs = {}  # layer -> (B, length, C)
        self.next_inputs = {}  # the same after the segment that is being computed
        self.block = None  # of the layer that is being computed
        self.scheme = None

    @property
    def length(self):
        """The number of tokens in memory."""
        return self.inputs[0].shape[1] if self.inputs else 0

    # Called by RecurrentGPT.hidden_states(), around each layer and after all of them.

    def enter_layer(self, layer, block, scheme, x):
        """Keep the input x (B, T, C) of a layer, whose block is computed next."""
        self.block, self.scheme = block, scheme
        parts = (self.inputs[layer], x.detach()) if self.length else (x.detach(),)
        self.next_inputs[layer] = torch.cat(parts, 1)[:, -self.capacity :]

    def advance(self):
        """End a segment: its tokens are in memory for the next one."""
        self.inputs, self.next_inputs = self.next_inputs, {}

    # What the model calls, as of a KVCache.

    def append(self, tokens, pos, docs, tables_version, explicit_positions):
        require(
            docs is None and not explicit_positions,
            "a memory holds one running text: leave out document ids and explicit positions",
        )
        return tokens, pos

    def mask(self):
        return {}

    def update(self, layer, k, v):
        """Put keys and values of the memory before those of a segment, (B, Hk, T, D) each."""
        if not self.length:
            return k, v
        memory_k, memory_v = self.compute_keys_and_values(layer)
        return torch.cat((memory_k.to(k.dtype), k), 2), torch.cat((memory_v.to(v.dtype), v), 2)

    def compute_keys_and_values(self, layer):
        """Compute the keys and values of a layer's memory: (B, Hk, length, D) each."""
        attention = self.block.attention
        x = self.block.attention_norm(self.inputs[layer])
        B, length, _ = x.shape
        shape = (B, length, attention.config.n_kv_head, attention.config.head_dim)
        k = attention.k(x).view(shape)
        v = attention.v(x).view(shape)
        if attention.config.qk_norm != "none":
            k = attention.k_norm(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        pos = torch.arange(length, device=x.device)
        k = self.scheme.rotate(k, k, pos, layer)[1]
        return k, v

    def position_terms(self, scheme, layer, n):
        return scheme.bias(n, layer), scheme.relative(n, layer)


class RecurrentGPT(GPT):
    """A GPT that takes a SegmentMemory as its cache; without one it computes what a GPT does."""

    def hidden_states(self, tokens, positions=None, docs=None, cache=None, *others):
        if not isinstance(cache, SegmentMemory):
            return super().hidden_states(tokens, positions, docs, cache, *others)
        tokens, pos, mask = self.prepare_inputs(tokens, positions, docs, cache)
        # Embed the tokens.
        x = self.dropout(self.embed(tokens).to(self.norm.weight.dtype))
        # Forward the blocks, and keep the input of each.
        for layer, block in enumerate(self.blocks):
            cache.enter_layer(layer, block, self.pos, x)
            x = block(x, self.pos, pos, cache, mask)
        cache.advance()
        return self.norm(x)


def generate(
    model, prompts, max_new_tokens, capacity, segment,
    temperature=1.0, top_k=0, top_p=1.0, generator=None,
):  # fmt: skip
    """
    Continue prompts (B, T), T >= 1, with a memory: int64 (B, max_new_tokens).

    The prompts are computed in segments of `segment` tokens, then each new token is a segment of
    its own. capacity: of the memory, in tokens. The others are those of GPT.generate().
    """
    require(prompts.shape[1] >= 1, "the prompt is empty: give at least one token")
    memory = SegmentMemory(model, capacity)
    new_tokens = [prompts[:, :0]]
    with evaluation_mode(model, torch.float32) as device:
        tokens = prompts.to(device)
        for _ in range(max_new_tokens):
            for part in tokens.split(segment, 1):
                x = model.hidden_states(part, cache=memory)
            logits = model.head(x[:, -1]).float()
            tokens = sample_token(logits, temperature, top_k, top_p, generator)
            new_tokens.append(tokens.to(prompts.device))
    return torch.cat(new_tokens, 1)
