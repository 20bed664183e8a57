"""The loss of every token: which sequences of a text are scored, by the protocols of evaluate.py,
and their losses.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import torch

from nanolong import devices, inference
from nanolong.errors import UserError, require
from nanolong.evaluation import intervals

# Tokens in one forward pass: of a batch of sequences, and of a chunk of one long sequence.
BATCH_TOKENS = 16384
CHUNK = 32768

# Scored tokens of a sequence in the sliding and token-aligned protocols, by default.
STRIDE = 256


def aligned_stride(stride, lengths):
    """Return the scored tokens of an aligned sequence: at most half the shortest length."""
    return min(stride, max(1, min(lengths) // 2))


def place_sequences(protocol, length, start, stop, stride, lengths):
    """Place sequences of `length` targets that score the targets from `start` to `stop` of a text.

    lengths: all that are to be compared. Returns a list of (start, n_context): the first n_context
    targets of a sequence are context only.
    """
    if protocol == "token-aligned":
        # Sequences of the longest length lie end to end; shorter ones end where these end.
        longest = max(lengths)
        n_context = length - aligned_stride(stride, lengths)
        return [(end - length, n_context) for end in range(start + longest, stop + 1, longest)]

    step = length
    first_end = start + length
    if protocol == "sliding":
        step = min(stride, length)
        first_end = max(length, start + step)  # tokens before `start` are context, too
    ends = [start, *range(first_end, stop, step), stop]
    n_new = np.diff(ends).tolist()  # targets after the end of the sequence before
    return [(end - length, length - n) for end, n in zip(ends[1:], n_new, strict=True)]


def find_spans(split, lengths, max_tokens):
    """Choose the text that is scored: spans (file, start, stop) of at most max_tokens targets.

    They are sequences of the longest length that fits, evenly spaced over all files as in the
    validation of train.py. A text of at most max_tokens is scored as a whole, but for files that
    are shorter. Returns the spans, and the `lengths` that fit. Raises UserError for a split with
    masks: its sequences are documents.
    """
    problem = f"{split.masked_file} has a mask of scored targets, and running text is scored"
    require(not split.masked_file, f"{problem}: give --text=FILE, or a --dataset without masks")
    sizes = [len(tokens) - split.extra_tokens for tokens in split.tokens]
    fitting = [length for length in lengths if length <= min(max_tokens, max(sizes))]
    if not fitting:
        return [], []
    longest = max(fitting)
    if sum(sizes) <= max_tokens:
        spans = [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
        return spans, fitting
    starts = [split.locate(i, longest) for i in split.spaced(max_tokens // longest, longest)]
    return [(file, start, start + longest) for file, start in starts], fitting


def find_sequences(split, length, max_tokens=65536, protocol="chunked", stride=STRIDE, lengths=()):
    """Place the sequences of a protocol in the text that is scored.

    lengths: all that are to be compared, which score the same text. Returns a list of
    (file, start, n_context): the index of a file in `split`, and what place_sequences() returns.
    Raises UserError when the text is too short.
    """
    spans, fitting = find_spans(split, (*lengths, length), max_tokens)
    if length not in fitting:
        n_targets = max(len(tokens) - split.extra_tokens for tokens in split.tokens)
        raise UserError(
            f"a sequence of {length} tokens is longer than the {min(max_tokens, n_targets)} that "
            "are scored: raise --max_tokens, or give a longer validation text"
        )
    sequences = []
    for file, start, stop in spans:
        for place in place_sequences(protocol, length, start, stop, stride, fitting):
            sequences.append((file, *place))
    return sequences


def read_sequences(split, length, sequences):
    """Read sequences of find_sequences(): inputs and targets, int64 (B, length).

    Targets of -1, which are context only, are not scored.
    """
    inputs, targets = [], []
    for file, start, n_context in sequences:
        x, y = split.sequence_at(file, start, length)
        inputs.append(x)
        targets.append(np.where(np.arange(length) < n_context, -1, y))
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


@contextmanager
def evaluation_mode(model, dtype):
    """Disable dropout and gradients, multiply matrices in `dtype`, and allow any context length.
    Yields the device of the model, which is afterwards in the mode in which it was.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), devices.autocast(device, dtype), warnings.catch_warnings():
        # model.ContextLengthWarning, by its text: this package does not import the model
        warnings.filterwarnings("ignore", "the text is longer than the model's context")
        with inference.evaluation_mode(model.modules()):
            yield device


def token_losses(model, x, y):
    """Return the loss of every token in nats, (B, T), for inputs and targets (B, T).

    A sequence of more than CHUNK tokens passes through the model in chunks, with a KV cache, so
    that the memory for activations does not grow with its length.
    """
    length = x.shape[1]
    # A method whose tables depend on the length has to see the whole sequence at once.
    if length <= CHUNK or model.scheme.set_length(CHUNK) != model.scheme.set_length(length):
        return model(x, y, reduction="none")
    cache = model.cache_class(capacity=length)
    losses = []
    for start in range(0, length, CHUNK):
        chunk = slice(start, start + CHUNK)
        losses.append(model(x[:, chunk], y[:, chunk], cache=cache, reduction="none"))
    return torch.cat(losses, 1)


def sequence_losses(model, split, length, sequences, dtype=torch.float32):
    """Yield batches of sequences of find_sequences(): the sequences, and their inputs, targets and
    losses, (B, length) each.

    Losses are in nats, float64, and 0 where a target is -1, which is not scored. The model computes
    on the device of its weights. Raises UserError when the context of the model is too short.
    """
    batch_size = max(1, BATCH_TOKENS // length)
    for i in range(0, len(sequences), batch_size):
        batch = sequences[i : i + batch_size]
        x, y = read_sequences(split, length, batch)
        with evaluation_mode(model, dtype) as device:
            losses = token_losses(model, x.to(device), y.to(device))
        yield batch, x, y, losses.cpu().double()


def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32, **placement):
    """Sum the loss in nats at each position of sequences, and count the tokens: float64 (length,).

    placement: other arguments of find_sequences(). Raises UserError when the text or the context of
    the model is too short.
    """
    sequences = find_sequences(split, length, max_tokens, **placement)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    for _, _, targets, losses in sequence_losses(model, split, length, sequences, dtype):
        loss_sum += losses.sum(0)
        n_scored += (targets >= 0).sum(0)
    return loss_sum, n_scored


def compare(original, model, split, length, max_tokens, dtype):
    """Return the loss of two models, and how they differ, with intervals over the sequences: for
    all tokens, and for the last quarter of each sequence; by name, two texts each.

    Raises UserError when the text or the context of a model is too short.
    """
    sequences = find_sequences(split, length, max_tokens)
    found = []
    for gpt in (original, model):
        batches = sequence_losses(gpt, split, length, sequences, dtype)
        _, _, *columns = zip(*batches, strict=True)
        found.append([torch.cat(column) for column in columns])
    (targets, before), (_, after) = found
    count = f"{len(targets)} sequences{': noisy' if len(targets) < 5 else ''}"
    texts = {}
    for part, first in ((count, 0), ("last quarter", length * 3 // 4)):
        old, new, n = (x[:, first:].sum(1) for x in (before, after, targets >= 0))
        change = intervals.ratio_interval((new - old).tolist(), n.tolist())
        change = intervals.format_interval(change, sign="+")
        old, new = (float(losses.sum() / n.sum()) for losses in (old, new))
        texts[part] = f"{old:.4f}", f"{new:.4f} ({change})"
    return texts
