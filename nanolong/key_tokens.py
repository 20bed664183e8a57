"""Key tokens: those that a judge predicts much better from a long context (LongPPL, 2410.23771)."""

import torch

from nanolong import intervals, scoring
from nanolong.errors import UserError
from nanolong.evaluation.loss import sequence_losses
from nanolong.run import weights_hash

# In nats: how much more probable the long context makes a key token, and how probable at least.
KEY_GAIN = 2.0
KEY_LOG_PROBABILITY = -2.0


class Judge:
    """The model that says which tokens are key tokens.

    A token is one if its log-probability with all of its sequence exceeds that with about the last
    `short_context` tokens only by more than 2 nats, and is itself above -2. A quarter of
    short_context tokens share a short context, so it is up to a quarter longer; the first
    short_context tokens of a sequence are never key.
    """

    def __init__(self, model, short_context, dtype=torch.float32):
        self.model = model
        self.short_context = min(short_context, model.config.block_size // 2)
        self.dtype = dtype
        self.weights = weights_hash(model)
        self.found = {}

    def check_length(self, length):
        """Raise UserError for a length at which key tokens cannot be told."""
        longest = self.model.config.block_size
        if not self.short_context < length <= longest:
            raise UserError(
                f"the judge tells key tokens in sequences of {self.short_context + 1} to {longest} "
                "tokens: choose other --lengths, or another --judge"
            )

    def find(self, text, length, sequences):
        """Return which targets of the sequences are key tokens, bool (N, length), and the benefits.

        text: a Dataset or TextFile; it is judged once for all checkpoints.
        Benefits are what the long context adds to the log-probability of all tokens that may be
        key, float64 (N, 2): the sum over a sequence and its number of such tokens.
        """
        key = (text.hash, length, tuple(sequences))
        if key not in self.found:
            self.found[key] = self._find(text.val, length, sequences)
        return self.found[key]

    def _find(self, split, length, sequences):
        are_key, benefits = [], []
        passes = sequence_losses(self.model, split, length, sequences, self.dtype)
        n_done = 0
        for long, y in passes:
            batch = sequences[n_done : n_done + len(y)]
            n_done += len(y)
            short = self._short_losses(split, length, batch)
            gain = short - long
            judged = (y >= 0) & ~gain.isnan()
            are_key.append(judged & (gain > KEY_GAIN) & (-long > KEY_LOG_PROBABILITY))
            gain = gain.where(judged, 0)
            benefits.append(torch.stack((gain.sum(1), judged.sum(1).double()), 1))
        return torch.cat(are_key), torch.cat(benefits)

    def _short_losses(self, split, length, sequences):
        """Return the loss of each target with a short context, (B, length), nan for the first."""
        context = self.short_context
        block = max(1, context // 4)
        losses = torch.full((len(sequences), length), torch.nan, dtype=torch.float64)
        for start in range(context, length, block):
            stop = min(start + block, length)
            pieces = [(file, first + start - context, 0) for file, first, _ in sequences]
            n = stop - start + context
            passes = sequence_losses(self.model, split, n, pieces, self.dtype)
            losses[:, start:stop] = torch.cat([batch for batch, _ in passes])[:, context:]
        return losses


def key_token_losses(model, split, length, sequences, are_key, dtype=torch.float32):
    """Sum the loss of the key tokens of every sequence: float64 (N,), and their number (N,)."""
    passes = sequence_losses(model, split, length, sequences, dtype)
    losses = torch.cat([batch for batch, _ in passes])
    return losses.where(are_key, 0).sum(1), are_key.sum(1).double()


def measure(record, model, text, sequences, judge, min_key_tokens, dtype):
    """Add to a record the loss on the key tokens of a judge. Raises UserError if they are few."""
    length = record["length"]
    are_key, benefits = judge.find(text, length, sequences)
    n_key = int(are_key.sum())
    n_judged = benefits[:, 1].sum().item()
    if n_key < min_key_tokens:
        raise UserError(
            f"there are only {n_key} key tokens at {length} tokens, and fewer than "
            f"{min_key_tokens} say too little: raise --max_tokens, give another text, or lower "
            "--min_key_tokens"
        )
    sums, counts = key_token_losses(model, text.val, length, sequences, are_key, dtype)
    columns = [sums.tolist(), counts.int().tolist()]
    return {
        **record,
        **scoring.loss_fields(columns),
        "by_sequence": list(zip(*columns, strict=True)),
        "key_fraction": n_key / n_judged,
        "judge_benefit": intervals.ratio_interval(*benefits.T.tolist()),
    }
