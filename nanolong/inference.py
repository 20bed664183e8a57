"""Fast sampling, which GPT.generate() calls, with a decoding step of fixed shape that can be
compiled, on a GPU to a CUDA graph.
"""

import contextlib
import math
from typing import NamedTuple

import torch

from kernels import torch_private
from nanolong.errors import UserError, require

# -----------------------------------------------------------------------------
# Generation.


class Sampling(NamedTuple):
    """How a token is drawn: options of GPT.generate()."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    generator: torch.Generator | None


def generate(model, tokens, max_new_tokens, sampling, compiled, stop):
    """Implement GPT.generate(). A request that cannot be fulfilled is refused at once."""
    temperature, top_k, top_p, min_p, _ = sampling
    given = f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_k={top_k}"
    fits = max_new_tokens >= 0 and 0 <= temperature < math.inf and top_k >= 0
    require(fits, f"{given} are no numbers from 0 on: give others")
    require(0 < top_p <= 1, f"top_p={top_p} is a probability: give one above 0 and at most 1")
    require(0 <= min_p <= 1, f"min_p={min_p} is a fraction: give one from 0 to 1")
    tokens = read_tokens(model, tokens)
    length = tokens.shape[1]
    check_length(model, length, max_new_tokens)
    if compiled:
        check_compiles(model, length, max_new_tokens)
    stop = {stop} if isinstance(stop, int) else set(stop)
    ids = range(model.config.vocab_size)
    is_known = all(token in ids for token in stop)
    require(is_known, f"stop={stop} are no ids of a vocabulary of {len(ids)}: give token ids")
    stop = torch.tensor(sorted(stop), dtype=torch.int64, device=tokens.device)
    steps = generate_tokens(model, tokens, max_new_tokens, sampling, compiled)
    return until_stopped(steps, stop) if len(stop) else steps


def until_stopped(steps, stop):
    """Yield tokens (B, 1) until each row has had an id of `stop`, int64 (n,), which it repeats."""
    is_done = False
    before = None
    for tokens in steps:
        before = tokens if before is None else torch.where(is_done, before, tokens)
        yield before
        is_done = torch.isin(before, stop)
        if is_done.all():
            return


@torch.no_grad()
def generate_tokens(model, tokens, max_new_tokens, sampling, compiled):
    """Yield the new tokens (B, 1) one at a time.

    tokens: result of read_tokens().
    """
    total = tokens.shape[1] + max_new_tokens - 1  # the last token is not an input
    # Compiled, in steps of 256, because a slightly longer prompt then compiles nothing new.
    capacity = -(-total // 256) * 256 if compiled else total
    cache = model.cache_class(capacity)
    modules = list(model.modules())  # once, because walking the tree at every token costs time
    step = None
    # Prefill computes all prompt tokens, and decoding one at a time. Between two tokens the model
    # is in its own mode, because the caller may be training it.
    for number in range(max_new_tokens):
        with evaluation_mode(modules):
            if compiled and number == 1:
                model.check_length(total)  # here, because steps of fixed shape do not check it
                step = FixedShapeStep(model, cache).compile()
            if step is None:
                hidden_states = model.hidden_states(tokens, cache=cache)
                logits = model.head(hidden_states[:, -1]).float()
            else:
                logits = compute_compiled(step, tokens, model)
        if number == 0 or logits.is_cpu:  # not at every token, because the CPU waits for a GPU
            check_logits(logits)
        tokens = sample_token(logits, sampling)
        yield tokens


@contextlib.contextmanager
def evaluation_mode(modules):
    """Switch off, inside `with`, effects of training mode, such as dropout, and the
    deterministic algorithms that training asks torch for.

    Decoding does without them, because it is repeatable, and a GPU would sort each index_copy_().
    """
    in_training = [module for module in modules if module.training]
    debug_mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
        torch.set_deterministic_debug_mode(debug_mode)


def compute_compiled(step, tokens, model):
    """Return the logits (B, V), float32, of a compiled step. Its first call compiles."""
    try:
        return step(tokens)
    except torch_private.graph_errors() as error:
        name = type(model.scheme).__name__
        problem = f"the decoding step of {name} cannot be compiled: leave out --compile"
        raise UserError(problem) from error


def check_logits(logits):
    """Raise UserError unless logits are numbers: in float16 a product can overflow."""
    remedy = "give --dtype=float32, and if that does not help, an earlier checkpoint"
    require(logits.isfinite().all(), f"the model's logits are not numbers: {remedy}")


def sample_token(logits, sampling):
    """Sample a token for each row of logits (B, V), float32: int64 (B, 1)."""
    temperature, top_k, top_p, min_p, generator = sampling
    if temperature < 1e-5 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    p, token_ids = token_probabilities(logits, temperature, top_k, top_p, min_p)
    choice = torch.multinomial(p, 1, generator=generator)
    return choice if token_ids is None else token_ids.gather(1, choice)


def token_probabilities(logits, temperature, top_k, top_p, min_p):
    """The probabilities of the tokens that are kept, (B, n), and their ids, or None for 0, 1, ...

    The order is transformers': temperature, top_k, top_p of what top_k has left, min_p. Only top_p
    without top_k sorts the vocabulary.
    """
    logits = logits / temperature
    token_ids = None
    if 0 < top_k < logits.shape[-1]:
        logits, token_ids = logits.topk(top_k)
    elif top_p < 1:
        logits, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    p = logits.softmax(-1)
    if top_p < 1:
        mass = p.flip(-1).cumsum(-1).flip(-1)  # probability of a token and all less likely tokens
        is_left_out = mass <= 1 - top_p
        is_left_out[:, 0] = False  # because rounding may leave out all
        p = p.masked_fill(is_left_out, 0.0)
    if min_p > 0:
        p = torch.where(p < min_p * p.amax(-1, keepdim=True), 0.0, p)
    return p, token_ids


# -----------------------------------------------------------------------------
# Prompts.


def read_tokens(model, tokens):
    """Return the prompts that generate() was given: int64 (B, T), on the model's device."""
    remedy = "give token ids, an int64 tensor (B, T), with at least one token in a row"
    if isinstance(tokens, list | tuple):
        tokens = [x.tolist() if isinstance(x, torch.Tensor) else x for x in tokens]
    try:
        tokens = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # a text, or rows of unequal length
        raise UserError(f"{tokens!r:.40} is not a batch of prompts ({error}): {remedy}") from None
    found = f"the prompts have the shape {tuple(tokens.shape)} and {tokens.dtype}"
    has_ids = tokens.dim() == 2 and tokens.numel() and not tokens.is_floating_point()
    require(has_ids, f"{found}: {remedy}")
    vocab_size = model.config.vocab_size
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
    require(
        not outside,
        f"token {outside[:1]} is outside the model's vocabulary of {vocab_size}: encode the prompt "
        "with the model's tokenizer",
    )
    return tokens.to(model.embed.weight.device, torch.int64)


def check_length(model, n_tokens, max_new_tokens):
    """Raise UserError for more tokens than a bounded scheme has."""
    limit = model.config.block_size
    most = max(0, limit + 1 - n_tokens)  # the last token is not an input
    require(
        not model.scheme.bounded or max_new_tokens <= most and n_tokens <= limit,
        f"{n_tokens} prompt tokens and {max_new_tokens} new ones are more than the {limit} "
        f"positions of --pos={model.config.pos}: ask for at most --max_new_tokens={most}, or "
        "shorten the prompt",
    )


def check_compiles(model, length, max_new_tokens):
    """Raise UserError if the scheme's tables change while a prompt of this length is continued."""
    changes = tables_change(model, length, length + max_new_tokens - 1)
    problem = "this method's tables change as the text grows, so no decoding step can be compiled"
    require(not changes, f"{problem}: leave out --compile")


# -----------------------------------------------------------------------------
# The decoding step of fixed shape.


def tables_change(model, short, long):
    """Whether the scheme's tables change between `short` and `long` tokens."""
    return model.scheme.is_dynamic or model.scheme.set_length(short) != model.scheme.set_length(
        long
    )


class FixedShapeStep:
    """A decoding step whose shapes and addresses do not change as the text grows.

    Where the next token is written is a tensor on the device. So the step is compiled once, and a
    GPU replays one CUDA graph of it. Under autocast the weights are cast once, here.
    """

    def __init__(self, model, cache):
        self.model = model
        self.cache = cache
        device = cache.tokens.device
        self.device_type = device.type
        cache.all_pos = torch.arange(cache.capacity, device=device)
        cache.write_index = torch.tensor([cache.n], device=device)
        cache.valid_length = torch.tensor([cache.n + 1], device=device)
        self.dtype = None
        self.weights = {}  # weights of linear layers by name, cast
        if torch.is_autocast_enabled(self.device_type):
            self.dtype = torch.get_autocast_dtype(self.device_type)
            for module_name, module in model.named_modules():
                for name, p in module.named_parameters(recurse=False):
                    if isinstance(module, torch.nn.Linear):
                        self.weights[f"{module_name}.{name}"] = p.to(self.dtype)

    def run(self, tokens):
        """Map tokens (B, 1) to logits (B, V), float32, and advance by one token."""
        cache = self.cache
        # without autocast's cache of cast weights, because that is not in the graph
        is_cast = self.dtype is not None
        with torch.autocast(self.device_type, self.dtype, enabled=is_cast, cache_enabled=False):
            positions = cache.all_pos.index_select(-1, cache.write_index)
            options = {"positions": positions, "cache": cache}
            call = torch.func.functional_call
            logits = call(self.model, self.weights, (tokens,), options, tie_weights=False)
        for count in (cache.write_index, cache.valid_length):
            count.add_(1)
        # Removed, because a compiled step would return what it leaves in the cache, and guard it.
        cache.pos, cache.tables, cache.tiles = None, None, {}
        return logits[:, -1].float()

    def compile(self):
        """Return run(), compiled. On a GPU it replays a CUDA graph, and the next call overwrites
        the logits.
        """
        if self.device_type != "cuda":
            return torch.compile(self.run, fullgraph=True)
        # They keep their addresses, because a graph copies other inputs at each step.
        for x in (*self.weights.values(), *self.cache.tensors()):
            torch_private.keep_address(x)
        return torch.compile(self.run, fullgraph=True, mode="reduce-overhead")
