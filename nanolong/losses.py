"""The loss of every token of a text, as evaluate.py and the experiments measure it."""

import codecs
import math
import warnings
from contextlib import contextmanager

import torch

import data
from nanolong import devices, inference, parallel, scoring
from nanolong.errors import UserError

# Tokens in one forward pass: of a batch of sequences, and of a chunk of one long sequence.
BATCH_TOKENS = 16384
CHUNK = 32768
NEXT_SEQUENCE = "\n[next sequence]\n"


@contextmanager
def evaluation_mode(model, dtype):
    """Disable dropout and gradients, multiply matrices in `dtype`, allow any context length.

    Yields the device of the model. Leaves the model in the mode in which it was.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), devices.autocast(device, dtype), warnings.catch_warnings():
        # model.ContextLengthWarning, by its text: this package does not import the model
        warnings.filterwarnings("ignore", "the text is longer than the model's context")
        with inference.EvaluationMode(model):
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
    """Yield the loss of every token of `sequences`, which are of scoring.find_sequences().

    Yields batches: losses in nats, float64 (B, length), 0 where a target is not scored, and targets
    (B, length), -1 there. The model computes on the device of its weights. Raises UserError when
    the context of the model is too short.
    """
    batch_size = max(1, BATCH_TOKENS // length)
    for i in range(0, len(sequences), batch_size):
        batch = sequences[i : i + batch_size]
        x, y = scoring.read_sequences(split, length, batch)
        with evaluation_mode(model, dtype) as device:
            positions = data.random_positions(model.config, len(x), length, batch[0][1])
            losses = token_losses(model, x.to(device), y.to(device), positions)
        yield losses.cpu().double(), y


def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32, **placement):
    """Sum the loss at each position of sequences of `length` tokens.

    Returns two float64 tensors (length,): the summed loss in nats and the number of scored tokens.
    placement: arguments of scoring.find_sequences(), the protocol, stride and all `lengths` to
    compare. Raises UserError when the text or the context of the model is too short.
    """
    sequences = scoring.find_sequences(split, length, max_tokens, **placement)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    for losses, y in sequence_losses(model, split, length, sequences, dtype):
        loss_sum += losses.sum(0)
        n_scored += (y >= 0).sum(0)
    return loss_sum, n_scored


def loss_by_part(model, split, length, sequences, dtype=torch.float32):
    """Sum the loss in each of 16 equal parts of every sequence.

    Returns two float64 tensors (N, 16), fewer parts if length < 16: loss in nats and scored tokens.
    """
    sums, counts = [], []
    for losses, y in sequence_losses(model, split, length, sequences, dtype):
        sums.append(scoring.sum_parts(losses))
        counts.append(scoring.sum_parts((y >= 0).double()))
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
            sequences = scoring.find_sequences(split, length, max_tokens, lengths=lengths)
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
