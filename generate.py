"""Generation: the cache of keys and values, and the drawing of tokens. GPT.generate() in model.py is the door."""
import torch

from checkpoint import Refused


class Cache:
    """Keys and values of the tokens read so far, (B, Hk, length, D) per layer, with those tokens and their positions; room doubles when it runs out."""

    def __init__(self):
        self.length, self.scale, self.tokens, self.pos, self.docs, self.k, self.v, self.by_hand = 0, None, None, None, None, {}, {}, False

    def extend(self, tokens, pos, docs, scale):
        """Note tokens (B, T), positions (T,) or (B, T) and documents (B, T) or None that are about to be read, under scheme.prepare()'s scale.

        Returns what to read: these, or, where the scale has changed, everything again: deeper keys and values came of the older scale.
        """
        if self.length and (docs is None) != (self.docs is None):
            raise Refused("give docs with every call of a cached reading, or with none")
        self.length += tokens.shape[1]
        self.tokens, self.pos, self.docs = whole = [new if old is None else torch.cat((old, new), -1) for old, new in ((self.tokens, tokens), (self.pos, pos), (self.docs, docs))]
        if scale != self.scale:
            self.scale, self.k, self.v = scale, {}, {}
            return whole
        return tokens, pos, docs

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


@torch.no_grad()
def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """What GPT.generate() promises, of a model."""
    if tokens.shape[1] < 1:
        raise Refused("generate() needs at least one token to go on from")
    total, reach = tokens.shape[1] + max_new_tokens - 1, model.config.reach  # the last token is not read
    if model.pos.bounded and total > reach:
        raise Refused(f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones are more than the {reach} that --pos={model.config.pos} can hold: "
                      f"ask for at most --max_new_tokens={max(0, reach + 1 - tokens.shape[1])}, or shorten the prompt")
    cache, drawn = Cache(), model.draw_positions(1, total, 0) if max_new_tokens else None
    for _ in range(max_new_tokens):
        positions = None if drawn is None else drawn[0, cache.length:cache.length + tokens.shape[1]]
        logits = model.head(model.hidden(tokens, positions, cache=cache)[:, -1]).float()  # (B, V)
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
