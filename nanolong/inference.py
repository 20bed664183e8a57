"""Fast sampling, which GPT.generate() calls: the cache of keys and values, prompts of unequal
length, and a decoding step of fixed shape that can be compiled and, on a GPU, captured as a graph.
"""

import math
import warnings
from numbers import Real

import torch
import torch.nn.functional as F

import kernels
from nanolong import devices
from nanolong.errors import UserError, require


class KVCache:
    """Keys and values of the tokens computed so far, with those tokens and their positions.

    capacity: tokens to allocate memory for; 0: the memory doubles when it is full. With a capacity,
    the scheme's biases are computed once for all of it, not at every step.
    """

    def __init__(self, capacity=0):
        self.capacity = capacity
        self.length = 0  # tokens so far
        self.tokens = None  # (B, length)
        self.pos = None  # (length,) or (B, length)
        self.docs = None  # (B, length) or None
        self.explicit_positions = False  # whether any were given, and not counted from 0
        self.tables_version = None  # of the scheme's tables that the keys were computed with
        self.keys = {}  # layer -> (B, Hk, allocated, D)
        self.values = {}
        self.terms = {}  # layer -> (number of keys, bias, relative)
        # For decoding steps of fixed shape, int64 (1,) on the device: where the next token is
        # written, and how many tokens there are with it.
        self.write_index = None
        self.valid_length = None

    @property
    def fixed_shape(self):
        return self.write_index is not None

    def append(self, tokens, pos, docs, tables_version, explicit_positions):
        """Append tokens (B, T), positions (T,) or (B, T) and documents (B, T) or None.

        Returns the tokens and positions to compute: these, or all so far where the scheme's tables
        have changed. Cached keys cannot be kept then, even unrotated: those of deeper layers were
        computed from hidden states of the old tables.
        """
        if self.length and (docs is None) != (self.docs is None):
            raise UserError("docs are missing in some calls with this cache: pass them to all")
        self.length += tokens.shape[1]
        self.explicit_positions = self.explicit_positions or explicit_positions
        self.tokens = concatenate(self.tokens, tokens)
        self.pos = concatenate(self.pos, pos)
        self.docs = concatenate(self.docs, docs)
        if tables_version == self.tables_version:
            return tokens, pos
        self.tables_version = tables_version
        self.keys, self.values, self.terms = {}, {}, {}
        return self.tokens, self.pos

    def mask(self):
        """The keyword arguments of kernels.attention that hold for all layers."""
        return {
            "docs": self.docs,
            "positions": self.pos if self.explicit_positions else None,
            "length": self.valid_length,
        }

    def update(self, layer, k, v):
        """Append keys and values (B, Hk, T, D) of a layer. Returns all so far."""
        if self.fixed_shape:  # all that is allocated: attention gets the valid length
            keys = self.keys[layer].index_copy_(2, self.write_index, k)
            values = self.values[layer].index_copy_(2, self.write_index, v)
            return keys, values
        end = self.length
        start = end - k.shape[2]
        if layer not in self.keys or self.keys[layer].shape[2] < end:
            size = max(end, self.capacity, 2 * start)
            self.keys[layer] = self.allocate(self.keys.get(layer), k, start, size)
            self.values[layer] = self.allocate(self.values.get(layer), v, start, size)
        self.keys[layer].narrow(2, start, end - start).copy_(k)
        self.values[layer].narrow(2, start, end - start).copy_(v)
        return self.keys[layer].narrow(2, 0, end), self.values[layer].narrow(2, 0, end)

    def allocate(self, old, new, start, size):
        """A buffer for `size` tokens that holds the first `start` of the old one."""
        shape = (*new.shape[:2], size, new.shape[3])
        # in a fixed shape the unused part is multiplied by zero, so it must hold finite numbers
        buffer = new.new_zeros(shape) if self.capacity else new.new_empty(shape)
        if old is not None:
            buffer[:, :, :start] = old[:, :, :start]
        return buffer

    def position_terms(self, scheme, layer, n):
        """The scheme's bias and relative vectors for at least n keys."""
        if not self.capacity:
            return scheme.bias(n, layer), scheme.relative(n, layer)
        if layer not in self.terms or self.terms[layer][0] < n:
            n = max(n, self.capacity)
            self.terms[layer] = (n, scheme.bias(n, layer), scheme.relative(n, layer))
        return self.terms[layer][1:]


def concatenate(old, new):
    return new if old is None else torch.cat((old, new), -1)


def generate(
    model,
    tokens,
    max_new_tokens,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    generator=None,
    compiled=False,
    min_p=0.0,
):
    """Do what GPT.generate() promises; what cannot be generated is refused at once."""
    numbers = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
    for name, number in numbers.items():
        is_number = isinstance(number, Real) and 0 <= number < math.inf
        is_whole = is_number and (name == "temperature" or number == int(number))
        require(is_whole, f"{name}={number} is no number from 0 on, or not a whole one: give one")
    is_number = isinstance(top_p, Real) and 0 < top_p <= 1
    require(is_number, f"top_p={top_p} is a probability: give one above 0 and at most 1")
    tokens = read_prompts(model, tokens)
    check_request(model, [len(row) for row in tokens], max_new_tokens)
    if isinstance(generator, list | tuple) and len(generator) != len(tokens):
        raise UserError(
            f"there are {len(generator)} generators for {len(tokens)} prompts: give one for each, "
            "or a single one"
        )
    sampling = (temperature, top_k, top_p, generator, min_p)
    return generate_tokens(model, tokens, max_new_tokens, sampling, compiled)


@torch.no_grad()
def generate_tokens(model, tokens, max_new_tokens, sampling, compiled):
    """Yield the new tokens (B, 1) one at a time.

    tokens: what read_prompts() returned; sampling: arguments of sample_token() after the logits.
    """
    if not max_new_tokens:
        return
    lengths = [len(row) for row in tokens]
    total = max(lengths) + max_new_tokens - 1  # the last token is not an input
    # Compiled, in steps of 256, so that a slightly longer prompt compiles nothing new.
    capacity = -(-total // 256) * 256 if compiled else total
    tokens, pos, docs = pad_prompts(model, tokens, lengths, total, capacity)
    if compiled and tables_change(model, max(lengths), total):
        raise UserError(
            "this method's tables change as the text grows, so no decoding step can be compiled: "
            "leave out --compile"
        )
    cache = KVCache(capacity)
    # Between two tokens the model is as the caller has it, who may be training it.
    evaluation = EvaluationMode(model)

    # Prefill: compute all prompt tokens, and sample the first new one.
    with evaluation:
        logits = compute_logits(model, tokens, pos, docs, cache)
    next_token = sample_token(logits, *sampling)
    yield next_token

    # Decode: compute one token at a time.
    step = None
    if max_new_tokens > 1:
        with evaluation:
            step = make_decoding_step(model, cache, pos, docs, compiled)
    if step is not None:  # steps of fixed shape do not look at the length
        model.check_length(total)
    for _ in range(max_new_tokens - 1):
        with evaluation:
            if step is None:
                logits = compute_logits(model, next_token, pos, docs, cache)
            else:
                logits = step(next_token)
        next_token = sample_token(logits, *sampling)
        yield next_token


class EvaluationMode:
    """Switch off, inside `with`, what modules do in training only, such as dropout, and the
    deterministic algorithms that training asks torch for.

    Decoding is repeatable without them, and with them a GPU sorts the indices of index_copy_().
    """

    def __init__(self, model):
        self.modules = list(model.modules())  # walking the tree at every token would cost time
        self.training = []
        self.deterministic = 0

    def __enter__(self):
        self.training = [module for module in self.modules if module.training]
        for module in self.training:
            module.training = False
        self.deterministic = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode(0)

    def __exit__(self, *error):
        for module in self.training:
            module.training = True
        torch.set_deterministic_debug_mode(self.deterministic)


def read_prompts(model, tokens):
    """The prompts that generate() was given, int64 on the model's device.

    Returns a tensor (B, T), or a list of tensors (T,) of unequal lengths. Raises UserError.
    """
    if not isinstance(tokens, list | tuple):
        tokens = torch.atleast_1d(read_ids(tokens))
    rows = [read_ids(row) for row in tokens]
    vocab_size = model.config.vocab_size
    for row in rows:
        if row.dim() != 1:
            raise UserError(
                f"a prompt has the shape {tuple(row.shape)}, not (T,): give tokens (B, T) or a "
                "list of prompts; a single one is tokens[None] or [tokens]"
            )
        outside = row[(row < 0) | (row >= vocab_size)]
        if len(outside):
            raise UserError(
                f"token {outside[0].item()} is outside the model's vocabulary of {vocab_size}: "
                "encode the prompt with the model's tokenizer"
            )
    rows = [row.to(model.embed.weight.device) for row in rows]
    have_one_length = len({len(row) for row in rows}) == 1
    return torch.stack(rows) if have_one_length else rows


def read_ids(ids):
    """Token ids as an int64 tensor. Raises UserError for what are none."""
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"tokens are no token ids ({reason}): give an int64 tensor (B, T), or a list of prompts"
        ) from None
    if ids.numel() and ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"tokens are of {ids.dtype}: give token ids, of torch.int64")
    return ids.long()


def check_request(model, lengths, max_new_tokens):
    """Raise UserError for empty prompts, and for more tokens than a bounded scheme has."""
    if min(lengths, default=0) < 1:
        raise UserError("generate() needs at least one token in every prompt: give a prompt")
    longest = max(lengths)
    limit = model.config.max_positions
    if model.pos.bounded and longest > limit:
        raise UserError(
            f"{longest} prompt tokens are more than the {limit} positions of "
            f"--pos={model.config.pos}: shorten the prompt"
        )
    if model.pos.bounded and longest + max_new_tokens - 1 > limit:
        most = max(0, limit + 1 - longest)
        raise UserError(
            f"{longest} prompt tokens and {max_new_tokens} new ones are more than the {limit} "
            f"positions of --pos={model.config.pos}: ask for at most --max_new_tokens={most}, or "
            "shorten the prompt"
        )
    if min(lengths) < longest and model.pos.is_dynamic:
        raise UserError(
            "a dynamic method scales by the length of each text, so prompts of unequal length "
            "cannot be one batch: give them one at a time, or extend with --options=length=N"
        )


def pad_prompts(model, tokens, lengths, total, capacity):
    """Stack what read_prompts() returned, padded on the left: tokens (B, T), and for the whole text
    that will be there, positions (capacity,) or (B, capacity), on the CPU, and documents
    (B, capacity), or None if positions count from 0 and there is one document.

    A pad token is a document of its own, so that no text attends to it.
    """
    width = max(lengths)
    device = model.embed.weight.device
    rows = []
    for n in lengths:
        row = torch.arange(n + total - width)
        if model.config.random_positions:
            from data import random_positions

            row = random_positions(model.config, 1, len(row), 0)[0]
        rows.append(F.pad(row, (width - n, capacity - total)))
    if min(lengths) == width:
        return tokens, rows[0] if model.config.random_positions else None, None
    n_pads = width - torch.tensor(lengths, device=device)[:, None]  # (B, 1)
    docs = (n_pads - torch.arange(capacity, device=device)).clamp(min=0)  # n_pads, ..., 1, 0, 0
    tokens = torch.stack([F.pad(row, (width - len(row), 0)) for row in tokens])
    return tokens, torch.stack(rows), docs


def compute_logits(model, tokens, pos, docs, cache):
    """The logits (B, V), float32, after these tokens, which follow those of the cache."""
    now = slice(cache.length, cache.length + tokens.shape[1])
    pos = None if pos is None else pos[..., now]
    docs = None if docs is None else docs[:, now]
    return model.head(model.hidden_states(tokens, pos, docs, cache)[:, -1]).float()


def sample_token(logits, temperature, top_k, top_p, generator, min_p=0.0):
    """Sample a token for each row of logits (B, V), float32: int64 (B, 1).

    generator: one, or a list of one for each row. Only top_p without top_k sorts the vocabulary.
    """
    devices.check_logits(logits)
    if temperature < 1e-5 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    p = (logits / temperature).softmax(-1)
    token_ids = None  # of the columns of p; None: the columns are the vocabulary
    if 0 < top_k < p.shape[-1]:
        p, token_ids = p.topk(top_k)
    elif top_p < 1:
        p, token_ids = p.sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        mass_before = p.cumsum(-1) - p  # of the more likely tokens
        p = torch.where(mass_before < top_p, p, 0.0)
    if min_p > 0:
        p = torch.where(p < min_p * p.amax(-1, keepdim=True), 0.0, p)
    if isinstance(generator, list | tuple):
        rows = zip(p, generator, strict=True)
        choice = torch.cat([torch.multinomial(row[None], 1, generator=g) for row, g in rows])
    else:
        choice = torch.multinomial(p, 1, generator=generator)
    return choice if token_ids is None else token_ids.gather(1, choice)


# -----------------------------------------------------------------------------
# The decoding step of fixed shape.


def make_decoding_step(model, cache, pos, docs, compiled):
    """A function from tokens (B, 1) to logits (B, V), or None if steps have no fixed shape."""
    if cache.tokens.device.type == "cuda":
        with torch.cuda.device(cache.tokens.device):  # of the streams and the capture
            return capture_graph(model, cache, pos, docs, compiled)
    if compiled:
        return compile_step(FixedShapeStep(model, cache, pos, docs))
    return None


def compile_step(step):
    """Compile a decoding step. Raises UserError, when it is called, for what cannot be compiled."""
    compiled_run = torch.compile(step.run, fullgraph=True)

    def run(token):
        try:
            return compiled_run(token)
        except torch._dynamo.exc.Unsupported as error:
            raise UserError(
                f"the decoding step of {type(step.model.pos).__name__} cannot be compiled: leave "
                "out --compile"
            ) from error

    return run


def tables_change(model, short, long):
    """Whether the scheme's tables change between `short` and `long` tokens."""
    return model.pos.is_dynamic or model.pos.set_length(short) != model.pos.set_length(long)


class FixedShapeStep:
    """A decoding step whose shapes do not change as the text grows.

    Where the next token is written is a tensor on the device, so that the step can be compiled
    once, and captured. Under autocast the weights are cast once, here.
    pos (capacity,) or (B, capacity) and docs (B, capacity) are those of the whole text, or None.
    """

    def __init__(self, model, cache, pos=None, docs=None):
        self.model = model
        self.cache = cache
        self.start = cache.length
        self.device_type = cache.tokens.device.type
        device = cache.tokens.device
        pos = torch.arange(cache.capacity, device=device) if pos is None else pos
        cache.pos = pos.to(device)
        cache.docs = docs
        cache.write_index = torch.tensor([cache.length], device=device)
        cache.valid_length = torch.tensor([cache.length + 1], device=device)
        self.dtype = None
        self.weights = {}
        if torch.is_autocast_enabled(self.device_type):
            self.dtype = torch.get_autocast_dtype(self.device_type)
            self.weights = cast_weights(model, self.dtype)

    def run(self, tokens):
        """Map tokens (B, 1) to logits (B, V), float32, and advance by one token."""
        cache = self.cache
        # autocast's own cache of cast weights would be freed under a captured graph
        with torch.autocast(
            self.device_type, self.dtype, enabled=self.dtype is not None, cache_enabled=False
        ):
            pos = cache.pos.index_select(-1, cache.write_index)
            logits = torch.func.functional_call(
                self.model,
                self.weights,
                (tokens,),
                {"positions": pos, "cache": cache},
                tie_weights=False,
            )
        torch._foreach_add_([cache.write_index, cache.valid_length], 1)
        return logits[:, -1].float()

    def rewind(self):
        """Go back to the first step."""
        self.cache.write_index.fill_(self.start)
        self.cache.valid_length.fill_(self.start + 1)


def cast_weights(model, dtype):
    """The weights of all linear layers by name, cast to dtype."""
    weights = {}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            for name, p in module.named_parameters():
                weights[f"{module_name}.{name}"] = p.to(dtype)
    return weights


class GraphedStep:
    """A FixedShapeStep captured as a CUDA graph."""

    def __init__(self, model, cache, pos, docs, compiled):
        # kept: it owns the cast weights, which the graph reads where they lie in memory
        self.step = FixedShapeStep(model, cache, pos, docs)
        run = torch.compile(self.step.run, fullgraph=True) if compiled else self.step.run
        device = cache.tokens.device
        self.tokens = torch.zeros(len(cache.tokens), 1, dtype=torch.long, device=device)
        self.graph = torch.cuda.CUDAGraph()
        # Run it twice on a side stream, so that everything is compiled before the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run(self.tokens)
                self.step.rewind()
        torch.cuda.current_stream().wait_stream(stream)
        if not compiled and kernels.first_call.has_replaced("decoding"):
            raise RuntimeError("plain PyTorch reads the length of the text on the host")
        # torch's own stream for captures is on the device of the first one
        with torch.cuda.graph(self.graph, stream=stream):
            self.logits = run(self.tokens)
        self.step.rewind()

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits


def capture_graph(model, cache, pos, docs, compiled):
    """A GraphedStep, or None with a warning: then the kernels of every step are launched singly."""
    stream = torch.cuda.current_stream()
    old_pos, old_docs = cache.pos, cache.docs
    try:
        if tables_change(model, cache.length, cache.capacity):
            raise RuntimeError("the method's tables change as the text grows")
        if not compiled and not kernels.triton_runs(cache.tokens.device):
            raise RuntimeError("plain PyTorch reads the length of the text on the host")
        return GraphedStep(model, cache, pos, docs, compiled)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"sampling without a CUDA graph: {reason}", stacklevel=4)
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own
        cache.write_index = cache.valid_length = None
        cache.pos, cache.docs = old_pos, old_docs
        return None
