"""The loss of every token: which sequences of a text are scored, their losses, and their sums."""

import codecs
import math
import warnings
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

import data
from nanolong import devices, inference, intervals, parallel
from nanolong.errors import UserError

# Tokens in one forward pass: of a batch of sequences, and of a chunk of one long sequence.
BATCH_TOKENS = 16384
CHUNK = 32768
NEXT_SEQUENCE = "\n[next sequence]\n"

# Scored tokens of a sequence in the sliding and token-aligned protocols, by default.
STRIDE = 256

# Protocols that score the same tokens at every length.
ALIGNED = ("token-aligned", "last-tokens")

# Equal parts of a sequence whose losses are known apart.
N_PARTS = 16

# -----------------------------------------------------------------------------
# Which sequences are scored, and which of their tokens: see the protocols in evaluate.py.


def aligned_stride(stride, lengths):
    """Return the scored tokens of an aligned sequence: at most half the shortest length."""
    half_shortest = max(1, min(lengths) // 2)
    return min(stride, half_shortest)


def place_sequences(protocol, length, start, stop, stride, lengths):
    """Place sequences of `length` targets that score the targets from `start` to `stop` of a text.

    Returns a list of (start, n_context): the first n_context targets of a sequence are context
    only and are not scored. lengths: all that are to be compared.
    """
    if protocol in ALIGNED:
        # Sequences of the longest length lie end to end; shorter ones end where these end.
        longest = max(lengths)
        n_context = length - aligned_stride(stride, lengths)
        return [(end - length, n_context) for end in range(start + longest, stop + 1, longest)]

    step = length
    first_end = start + length
    if protocol == "sliding":
        step = min(stride, length)
        first_end = max(length, start + step)  # what comes before `start` is context, too
    ends = [start, *range(first_end, stop, step), stop]
    sequences = []
    for previous_end, end in pairwise(ends):
        n_new = end - previous_end
        sequences.append((end - length, length - n_new))
    return sequences


def fitting_lengths(split, lengths, max_tokens):
    """Return those of `lengths` of which some file of a split holds a sequence."""
    fitting = []
    for length in lengths:
        if length <= max_tokens and split.n_sequences(length).any():
            fitting.append(length)
    return fitting


def find_spans(split, longest, max_tokens):
    """Choose the text that is scored: spans (file, start, stop) of at most max_tokens targets.

    They are sequences of `longest` targets, evenly spaced over all files as in train.py's
    validation. A text of at most max_tokens is scored as a whole, but for files that are shorter.
    """
    sizes = [len(tokens) - split.extra_tokens for tokens in split.tokens]
    if sum(sizes) <= max_tokens:
        return [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
    spans = []
    for index in split.spaced(max_tokens // longest, longest):
        file, start = split.locate(index, longest)
        spans.append((file, start, start + longest))
    return spans


def find_sequences(split, length, max_tokens=65536, protocol="chunked", stride=STRIDE, lengths=()):
    """Place the sequences of a protocol in the text that is scored.

    lengths: all that are to be compared, which score the same text. Returns a list of
    (file, start, n_context): the index of a file in `split`, and what place_sequences() returns.
    Raises UserError when the text is too short.
    """
    fitting = fitting_lengths(split, (*lengths, length), max_tokens)
    if length not in fitting:
        n_targets = max(len(tokens) - split.extra_tokens for tokens in split.tokens)
        raise UserError(
            f"a sequence of {length} tokens is longer than the {min(max_tokens, n_targets)} that "
            "are scored: raise --max_tokens, or give a longer validation text"
        )
    sequences = []
    for file, start, stop in find_spans(split, max(fitting), max_tokens):
        placed = place_sequences(protocol, length, start, stop, stride, fitting)
        sequences += [(file, *place) for place in placed]
    return sequences


def read_sequences(split, length, sequences):
    """Read sequences of find_sequences(): inputs and targets, int64 (B, length).

    Targets of -1 are not scored: here those that are context only, in the text <bos>.
    """
    inputs, targets = [], []
    for file, start, n_context in sequences:
        x, y = split.sequence_at(file, start, length)
        is_context = np.arange(length) < n_context
        inputs.append(x)
        targets.append(np.where(is_context, -1, y))
    x = torch.from_numpy(np.stack(inputs))
    y = torch.from_numpy(np.stack(targets))
    return x, y


# -----------------------------------------------------------------------------
# Losses.


@contextmanager
def evaluation_mode(model, dtype):
    """Disable dropout and gradients, multiply matrices in `dtype`, allow any context length.

    Yields the device of the model. Leaves the model in the mode in which it was.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), devices.autocast(device, dtype), warnings.catch_warnings():
        # model.ContextLengthWarning, by its text: this package does not import the model
        warnings.filterwarnings("ignore", "the text is longer than the model's context")
        with inference.evaluation_mode(model.modules()):
            yield device


def token_losses(model, x, y, positions):
    """Return the loss of every token in nats, (B, T), for inputs and targets (B, T).

    A sequence of more than CHUNK tokens passes through the model in chunks, with a KV cache, so
    that the memory for activations does not grow with its length.
    """
    length = x.shape[1]
    if parallel.sequence_rank_and_size()[1] > 1:  # other processes compute the other tokens
        part = parallel.own_part({"tokens": x, "targets": y, "positions": positions})
        return parallel.gather_tokens(model(**part, reduction="none"))
    # A method whose tables depend on the length has to see the whole sequence at once.
    if length <= CHUNK or model.pos.set_length(CHUNK) != model.pos.set_length(length):
        return model(x, y, positions, reduction="none")
    cache = inference.KVCache(capacity=length)
    losses = []
    for start in range(0, length, CHUNK):
        chunk = slice(start, start + CHUNK)
        pos = None if positions is None else positions[..., chunk]
        losses.append(model(x[:, chunk], y[:, chunk], pos, cache=cache, reduction="none"))
    return torch.cat(losses, 1)


def sequence_losses(model, split, length, sequences, dtype=torch.float32):
    """Yield the loss of every token of `sequences`, which are of find_sequences().

    Yields batches: losses in nats, float64 (B, length), 0 where a target is not scored, and targets
    (B, length), -1 there. The model computes on the device of its weights. Raises UserError when
    the context of the model is too short.
    """
    batch_size = max(1, BATCH_TOKENS // length)
    for i in range(0, len(sequences), batch_size):
        batch = sequences[i : i + batch_size]
        x, y = read_sequences(split, length, batch)
        with evaluation_mode(model, dtype) as device:
            positions = data.random_positions(model.config, len(x), length, batch[0][1])
            losses = token_losses(model, x.to(device), y.to(device), positions)
        yield losses.cpu().double(), y


def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32, **placement):
    """Sum the loss at each position of sequences of `length` tokens.

    Returns two float64 tensors (length,): the summed loss in nats and the number of scored tokens.
    placement: arguments of find_sequences(), the protocol, stride and all `lengths` to
    compare. Raises UserError when the text or the context of the model is too short.
    """
    sequences = find_sequences(split, length, max_tokens, **placement)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    for losses, y in sequence_losses(model, split, length, sequences, dtype):
        loss_sum += losses.sum(0)
        n_scored += (y >= 0).sum(0)
    return loss_sum, n_scored


def part_edges(length):
    """Return where the parts of a sequence begin and end; fewer than N_PARTS if it is shorter."""
    return sorted({length * i // N_PARTS for i in range(N_PARTS + 1)})


def sum_parts(values):
    """Sum values of tokens (B, T) over each part of a sequence: (B, N_PARTS)."""
    edges = part_edges(values.shape[1])
    return torch.stack([values[:, start:end].sum(1) for start, end in pairwise(edges)], 1)


def loss_by_part(model, split, length, sequences, dtype=torch.float32):
    """Sum the loss in each of 16 equal parts of every sequence.

    Returns two float64 tensors (N, 16), fewer parts if length < 16: loss in nats and scored tokens.
    """
    sums, counts = [], []
    for losses, y in sequence_losses(model, split, length, sequences, dtype):
        sums.append(sum_parts(losses))
        counts.append(sum_parts((y >= 0).double()))
    return torch.cat(sums), torch.cat(counts)


def text_losses(model, text, lengths, max_tokens, dtype=torch.float32, n_tokens=4096):
    """Return the loss of each of the first scored tokens, in sequences of the longest length.

    That is the longest of `lengths` that the model can compute. text: a Dataset or TextFile.
    Returns {"length", "start", "tokens", "losses"}: where the text begins, the text of each token
    and its loss in nats; {} if no length can be computed. NEXT_SEQUENCE stands before the first
    token of each later sequence, which is predicted without the text above it.
    """
    split = text.val
    for length in sorted(lengths, reverse=True):
        try:
            sequences = find_sequences(split, length, max_tokens, lengths=lengths)
            sequences = sequences[: math.ceil(n_tokens / length)]
            batches = list(sequence_losses(model, split, length, sequences, dtype))
        except UserError:  # too long for the text, or for the model
            continue
        losses, y = (torch.cat(column).flatten() for column in zip(*batches, strict=True))
        scored = (y >= 0).nonzero()[:n_tokens, 0]
        tokens = token_texts(y[scored].tolist(), text.tokenizer)
        starts = (scored // length).diff().nonzero()[:, 0] + 1
        for i in starts.tolist():
            tokens[i] = NEXT_SEQUENCE + tokens[i]
        file, start, _ = sequences[0]
        return {
            "length": length,
            "start": f"{split.files[file].name}, token {start:,}",
            "tokens": tokens,
            "losses": losses[scored].tolist(),
        }
    return {}


def token_texts(ids, tokenizer):
    """Return the text of each token; a character of several tokens stands at its last one."""
    if tokenizer is None:
        return [f"[{i}]" for i in ids]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(tokenizer.decode([i])) for i in ids]


def describe_change(original, model, split, length, max_tokens, dtype):
    """Say how the loss of a model differs from that of another, with intervals over the sequences:
    of all tokens, and of the last quarter of each sequence.

    Raises UserError when the text or the context of a model is too short.
    """
    sequences = find_sequences(split, length, max_tokens)
    before, counts = loss_by_part(original, split, length, sequences, dtype)
    after, _ = loss_by_part(model, split, length, sequences, dtype)
    texts = []
    for first in (0, before.shape[1] * 3 // 4):
        old, new, n = (x[:, first:].sum(1) for x in (before, after, counts))
        change = intervals.ratio_interval((new - old).tolist(), n.tolist())
        change = intervals.format_interval(change, sign="+")
        texts.append(f"{old.sum() / n.sum():.4f} -> {new.sum() / n.sum():.4f} ({change})")
    return f"{texts[0]} nats per token, in the last quarter {texts[1]}"
