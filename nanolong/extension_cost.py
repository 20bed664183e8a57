"""What extending has changed: the loss at the original and at the extended length."""

import torch

from nanolong import scoring
from nanolong.errors import UserError
from nanolong.intervals import format_interval, ratio_interval
from nanolong.losses import sequence_losses


def describe_change(original, model, splits, lengths, max_tokens, dtype):
    """Compare a model with the one that it was extended from, on the same tokens.

    splits: name -> data.Split of validation text, {} if there is none. Returns lines of text.
    """
    lines = []
    for name, split in splits.items():
        for length in lengths:
            try:
                text = describe_loss(original, model, split, length, max_tokens, dtype)
            except UserError as error:  # too long for the text, or for the original model
                text = f"not compared ({error})"
            lines.append(f"loss at {length} tokens, {name}: {text}")
    if not splits:
        lines.append("the change of the loss was not measured: give --text=FILE or --dataset=NAME")
    return lines


def describe_loss(original, model, split, length, max_tokens, dtype):
    """Say by how much the loss has changed, with its interval over the sequences.

    Raises UserError when the text or the context of a model is too short.
    """
    sequences = scoring.find_sequences(split, length, max_tokens)
    sums, counts = [], []
    for one in (original, model):
        batches = list(sequence_losses(one, split, length, sequences, dtype))
        sums.append(torch.cat([losses.sum(1) for losses, _ in batches]))
        counts = torch.cat([(y >= 0).sum(1) for _, y in batches]).tolist()
    before, after = (float(total.sum()) / sum(counts) for total in sums)
    change = ratio_interval((sums[1] - sums[0]).tolist(), counts)
    change = format_interval(change)
    return f"{before:.4f} before extending, {after:.4f} now, a change of {change} nats per token"
