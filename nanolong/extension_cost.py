"""What extending has changed: the loss at the original and the extended length, hidden states."""

import torch

from nanolong import scoring
from nanolong.errors import UserError
from nanolong.intervals import format_interval, ratio_interval
from nanolong.losses import evaluation_mode, sequence_losses

DRIFT_TOKENS = 512  # at most, of one sequence


def describe_change(original, model, splits, lengths, max_tokens, dtype):
    """Compare a model with the one that it was extended from, on the same tokens.

    splits: name -> data.Split of validation text, {} if there is none: then hidden states are
    compared on random tokens. Returns lines of text.
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
    n = min(model.config.original_length, DRIFT_TOKENS)
    tokens, what = random_tokens(model, n), "random tokens"
    if splits:
        split = next(iter(splits.values()))
        tokens, _ = scoring.read_sequences(split, n, scoring.find_sequences(split, n, n)[:1])
        what = "tokens of text"
    cosines = layer_cosines(original, model, tokens, dtype)
    cosines = " ".join(f"{cosine:.3f}" for cosine in cosines)
    lines.append(f"drift of hidden states on {n} {what}, cosine by layer: {cosines}")
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


def random_tokens(model, n):
    """The same n random tokens at every call, int64 (1, n)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, n), generator=generator)


def layer_cosines(original, model, tokens, dtype=torch.float32):
    """The cosine of the hidden states of two models after each block, mean over the tokens."""
    before = hidden_states(original, tokens, dtype)
    after = hidden_states(model, tokens, dtype)
    cosines = map(torch.nn.CosineSimilarity(dim=-1), before, after)
    return [cosine.mean().item() for cosine in cosines]


def hidden_states(model, tokens, dtype):
    """The output of every block for tokens (B, T): float32 (B, T, C) on the CPU."""
    found = []
    hooks = [
        block.register_forward_hook(lambda block, inputs, x: found.append(x.float().cpu()))
        for block in model.blocks
    ]
    try:
        with evaluation_mode(model, dtype) as device:
            positions = model.sample_positions(*tokens.shape, 0)
            model.hidden_states(tokens.to(device), positions)
    finally:
        for hook in hooks:
            hook.remove()
    return found
