"""Segment-level recurrence (Transformer-XL, Dai et al. 2019) for the models of model.py.

    model = RecurrentGPT(GPTConfig(pos="xl", block_size=64 + 64))
    memory = SegmentMemory(model, 64)
    for x, y in segments:  # (B, 64) each, where row b continues row b of the segment before
        loss = model(x, y, cache=memory)

A text is computed in segments. Each layer attends to its memory, too: its own inputs at the tokens
before the segment. So a layer sees as far back as its memory, and what lies there has seen farther.
"""

import torch

from evaluate import evaluation_mode
from model import GPT
from nanolong.inference import sample_token
from nanolong.validate import require

# Schemes whose attention depends on distances alone. Tokens keep their distances when the memory
# moves on, but not their positions.
RELATIVE = ("xl", "alibi", "t5", "kerple", "shaw", "nezha", "rope")


def check_memory(config, capacity):
    """Raise UserError unless a model of this GPTConfig can have a memory of `capacity` tokens."""
    require(
        config.pos in RELATIVE,
        f"{config.pos!r} is no scheme for a memory, which shifts absolute positions: "
        f"choose from {', '.join(RELATIVE)}",
    )
    require(capacity >= 1, f"a memory of {capacity} tokens holds nothing: give at least 1 token")
    plain = set(config.layer_pattern) == {"F"} and not config.random_positions
    require(
        plain and config.extension is None,
        "a memory is for full attention and positions as they are: leave out windows, layer "
        "patterns, random positions and extensions",
    )


class SegmentMemory:
    """
    The last `capacity` inputs of every layer, detached, which stand in the place of a KV cache.

    Keys and values of the memory are computed again for every segment, under the weights of that
    time: gradients reach these weights through the memory, but not what the memory holds. Positions
    are counted from the oldest token of the memory on. Its inputs are those after dropout, and
    before the layer's norm.
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
        self.block, self.scheme = None, None  # the layer that is being computed

    @property
    def length(self):
        """The number of tokens in memory."""
        return self.inputs[0].shape[1] if self.inputs else 0

    def state(self):
        """Return the tensors that a checkpoint keeps, by name."""
        return {f"layer-{layer}": x for layer, x in self.inputs.items()}

    def load_state(self, tensors):
        """Take back what state() returned."""
        self.inputs = {layer: tensors[f"layer-{layer}"] for layer in range(len(tensors))}

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
        shape = (B, length, attention.n_kv_head, attention.head_dim)
        k = attention.k(x).view(shape)
        v = attention.v(x).view(shape)
        if attention.qk_norm:
            k = attention.k_norm(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        pos = torch.arange(length, device=x.device)
        k = self.scheme.rotate(k, k, pos, layer)[1]
        return k, v

    def position_terms(self, scheme, layer, n):
        return scheme.bias(n, layer), scheme.relative(n, layer)


class RecurrentGPT(GPT):
    """A GPT that takes a SegmentMemory as its cache; without one it computes what a GPT does."""

    def hidden_states(self, tokens, positions=None, docs=None, cache=None, part=slice(None)):
        if not isinstance(cache, SegmentMemory):
            return super().hidden_states(tokens, positions, docs, cache, part)
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
