"""Generation: the cache of keys and values, the drawing of tokens, and the reading of one token compiled, and on a GPU as a CUDA graph. GPT.generate() in model.py is the door."""
import warnings

import torch
import torch.nn.functional as F

import kernels
from checkpoint import Refused


class Linear(torch.nn.Linear):
    """nn.Linear, whose product with a single row is, under autocast on a CPU, one with a vector: the bfloat16 matrix is read as it lies, and not packed anew for every token."""

    def forward(self, x):
        if not torch.is_autocast_enabled("cpu") or torch.is_grad_enabled() or x.numel() != self.in_features or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ x.view(-1)).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """nn.RMSNorm, which for a single row on a CPU is a dot product and two scalings: the general one launches eight small operators there, for every block and token."""

    def forward(self, x):
        n = self.weight.numel()
        if torch.is_grad_enabled() or x.numel() != n or x.device.type != "cpu" or x.dtype != torch.float32 or not self.eps or torch.compiler.is_compiling():
            return super().forward(x)
        row = x.view(-1)
        return (x * self.weight).mul_((n / (torch.dot(row, row).item() + n * self.eps)) ** 0.5)


class Cache:
    """Keys and values of the tokens read so far, (B, Hk, length, D) per layer, with those tokens and their positions.

    room: for how many tokens memory is taken at once, and what distance adds is tabulated; 0: it doubles when it runs out, and tables are made anew for each reading.
    at, count: of a reading of fixed shape (fixed_step) where its token is written, and how many tokens there are with it: int64 tensors (1,) on the device; else None.
    """

    def __init__(self, room=0):
        self.length, self.scale, self.tokens, self.pos, self.docs, self.k, self.v, self.by_hand = 0, None, None, None, None, {}, {}, False
        self.room, self.tables, self.at, self.count = room, {}, None, None

    def extend(self, tokens, pos, docs, scale):
        """Note tokens (B, T), positions (T,) or (B, T) and documents (B, T) or None that are about to be read, under scheme.prepare()'s scale.

        Returns what to read: these, or, where the scale has changed, everything again: deeper keys and values came of the older scale.
        """
        if self.length and (docs is None) != (self.docs is None):
            raise Refused("give docs with every call of a cached reading, or with none")
        self.length += tokens.shape[1]
        self.tokens, self.pos, self.docs = whole = [new if old is None else torch.cat((old, new), -1) for old, new in ((self.tokens, tokens), (self.pos, pos), (self.docs, docs))]
        if scale != self.scale:
            self.scale, self.k, self.v, self.tables = scale, {}, {}, {}
            return whole
        return tokens, pos, docs

    def append(self, layer, k, v):
        if self.at is not None:  # all of the room: attention is told how many of its keys are there
            return self.k[layer].index_copy_(2, self.at, k), self.v[layer].index_copy_(2, self.at, v)
        new, end = k.shape[2], self.length
        if layer not in self.k or self.k[layer].shape[2] < end:
            for store, part in ((self.k, k), (self.v, v)):
                make = part.new_zeros if self.room else part.new_empty  # in a reading of fixed shape what lies beyond the text is multiplied by nothing, and must be a number
                room = make(*part.shape[:2], max(end, self.room, 2 * (end - new)), part.shape[3])
                if layer in store:
                    room[:, :, :end - new] = store[layer][:, :, :end - new]
                store[layer] = room
        k_room, v_room = self.k[layer], self.v[layer]
        k_room.narrow(2, end - new, new).copy_(k)
        v_room.narrow(2, end - new, new).copy_(v)
        return k_room.narrow(2, 0, end), v_room.narrow(2, 0, end)

    def terms(self, scheme, layer, n):
        """The scheme's bias and relative vectors over n keys or more, in a known room made once."""
        if not self.room:
            return scheme.bias(n, layer), scheme.relative(n, layer)
        if layer not in self.tables or self.tables[layer][0] < n:
            m = max(n, self.room)
            self.tables[layer] = m, scheme.bias(m, layer), scheme.relative(m, layer)
        return self.tables[layer][1:]


@torch.no_grad()
def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, compiled=False):
    """What GPT.generate() promises, of a model."""
    lengths, device = [len(row) for row in tokens], model.embed.weight.device
    width, reach = max(lengths, default=0), model.config.reach
    if min(lengths, default=0) < 1:
        raise Refused("generate() needs at least one token to go on from")
    total = width + max_new_tokens - 1  # the last token is not read
    room = -(-total // 256) * 256 if compiled else total  # so that a prompt longer by a few tokens compiles nothing
    if model.pos.bounded and total > reach:
        raise Refused(f"{width} prompt tokens and {max_new_tokens} new ones are more than the {reach} that --pos={model.config.pos} can hold: "
                      f"ask for at most --max_new_tokens={max(0, reach + 1 - width)}, or shorten the prompt")
    if not max_new_tokens:
        return
    drawn = {n: model.draw_positions(1, n + max_new_tokens - 1, 0) for n in set(lengths)} if model.config.random_positions else {}
    positions, docs = F.pad(drawn[width][0], (0, room - total)) if drawn else None, None
    if min(lengths) < width:  # padded at the left: there a token is a document of its own, so no text sees it, and positions start with the text
        if model.pos.dynamic:
            raise Refused("a dynamic method scales by the length of each text, so prompts of unequal length cannot be read together: give them one at a time, or stretch with --options=length=N")
        rows = [F.pad(drawn[n][0] if drawn else torch.arange(total - width + n, device=device), (width - n, room - total)) for n in lengths]
        positions, docs = torch.stack(rows), (width - torch.tensor(lengths, device=device)[:, None] - torch.arange(room, device=device)).clamp(min=0)
        tokens = torch.stack([F.pad(row, (width - len(row), 0)) for row in tokens])
    elif not torch.is_tensor(tokens):
        tokens = torch.stack(list(tokens))
    if compiled and changes(model, width, total):
        raise Refused("this method's tables change as the text grows, so no step can be compiled: leave out --compile")
    cache, step = Cache(room), None
    for number in range(max_new_tokens):
        if number == 1 and device.type == "cuda":
            step = graph_of(model, cache, positions, docs, compiled)
        elif number == 1 and compiled:
            step, _ = fixed_step(model, cache, positions, docs, compiled)
        if step and number:
            logits = step(tokens)
        else:
            now = slice(cache.length, cache.length + tokens.shape[1])
            logits = model.head(model.hidden(tokens, None if positions is None else positions[..., now], None if docs is None else docs[:, now], cache)[:, -1]).float()  # (B, V)
        tokens = draw(logits, temperature, top_k, top_p, generator)
        yield tokens


def draw(logits, temperature, top_k, top_p, generator):
    """A token for each row of logits (B, V), float32: int64 (B, 1). generator: one, or a list of one for each row. Only top_p without top_k needs the vocabulary in order."""
    if temperature < 1e-5 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    p, order = (logits / temperature).softmax(-1), None
    if 0 < top_k < p.shape[-1]:
        p, order = p.topk(top_k)
    elif top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)  # the mass of the likelier tokens
    if isinstance(generator, (list, tuple)):
        choice = torch.cat([torch.multinomial(row[None], 1, generator=g) for row, g in zip(p, generator, strict=True)])
    else:
        choice = torch.multinomial(p, 1, generator=generator)
    return choice if order is None else order.gather(1, choice)


def changes(model, few, many):
    """Whether a text of few tokens is read otherwise than the beginning of one of many."""
    return model.pos.dynamic or model.pos.prepare(few) != model.pos.prepare(many)


def fixed_step(model, cache, positions=None, docs=None, compiled=False):
    """Reads one token a row into a cache that has room for it, with shapes that do not change as the text grows: returns read(tokens (B, 1)) -> logits (B, V), float32, and
    rewind(), after which it stands at the cache's length again. positions (room,) or (B, room) and docs (B, room) are those of the whole text, where they are not the indices, and one.

    Where it stands are tensors on the device, so a read can be captured. Under autocast the matrices are cast once, here.
    """
    device, length, dtype = cache.tokens.device, cache.length, None
    cache.pos, cache.docs = torch.arange(cache.room, device=device) if positions is None else positions, docs
    cache.at, cache.count = torch.tensor([length], device=device), torch.tensor([length + 1], device=device)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    cast = {f"{name}.{kind}": p.to(dtype) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) for kind, p in module.named_parameters()} if dtype else {}

    def read(tokens):
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):  # a cast that autocast keeps would be freed under a graph
            here = cache.pos.index_select(-1, cache.at)
            logits = torch.func.functional_call(model, cast, (tokens,), {"positions": here, "cache": cache}, tie_weights=False)[:, -1].float()
        torch._foreach_add_([cache.at, cache.count], 1)
        return logits

    def rewind():
        cache.at.fill_(length), cache.count.fill_(length + 1)
    return torch.compile(read, fullgraph=True) if compiled else read, rewind


def graph_of(model, cache, positions, docs, compiled):
    """fixed_step() as a CUDA graph: a function of tokens (B, 1). Where there can be none it says why, and returns None: then every step is launched kernel by kernel."""
    device, stream, was = cache.tokens.device, torch.cuda.current_stream(), (cache.pos, cache.docs)
    try:
        if changes(model, cache.length, cache.room):
            raise RuntimeError("the method's tables change as the text grows")
        if not compiled and not kernels.triton_runs(device):
            raise RuntimeError("plain PyTorch reads on the host how long the text is")
        read, rewind = fixed_step(model, cache, positions, docs, compiled)
        tokens, graph, side = torch.zeros(len(cache.tokens), 1, dtype=torch.long, device=device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):  # compiles what is to be compiled
            for _ in range(2):
                read(tokens)
                rewind()
        stream.wait_stream(side)
        with torch.cuda.graph(graph):
            logits = read(tokens)
        rewind()
    except RuntimeError as error:
        warnings.warn(f"drawing without a CUDA graph: {str(error).splitlines()[0]}", stacklevel=3)
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own
        cache.at = cache.count = None
        cache.pos, cache.docs = was
        return None

    def step(new, kept=read):  # with it the weights that it cast: the graph reads them where they lie
        tokens.copy_(new)
        graph.replay()
        return logits
    return step
