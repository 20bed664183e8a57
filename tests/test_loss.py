"""Every protocol against losses that are summed one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
import train
from nanolong.errors import UserError
from nanolong.evaluation import loss

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


def make_split(folder, n=1000, bos=None, files=1):
    """Random tokens below 49 in files of n, n - 10, ... tokens, as a data.Split."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{i}.bin" for i in range(files)]
    for i, path in enumerate(paths):
        path.unlink(missing_ok=True)
        data.write_tokens(path, rng.integers(0, 49, n - 10 * i), 50)
    return data.Split(paths, 50, bos)


def losses_of(model, x, y):
    """The loss of every token of one sequence, float64 (T,)."""
    with torch.no_grad():
        return F.cross_entropy(model(x[None])[0].double(), y, reduction="none")


# -----------------------------------------------------------------------------
# Which tokens are scored


def pieces_of(val, longest, max_tokens):
    """The (file, start, stop) of the targets that are scored, chosen as train.py does."""
    sizes = [len(tokens) - (val.bos is None) for tokens in val.tokens]
    if sum(sizes) <= max_tokens:
        return [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
    sequences = []
    for file, size in enumerate(sizes):
        starts = range(0, size - longest + 1, longest)
        sequences += [(file, start, start + longest) for start in starts]
    n = min(max_tokens // longest, len(sequences))
    return [sequences[i * len(sequences) // n] for i in range(n)]


FILES = st.tuples(st.integers(1, 3), st.sampled_from([None, 49]), st.integers(40, 400))
LENGTHS = st.lists(st.integers(1, 130), min_size=1, max_size=3, unique=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files=FILES, lengths=LENGTHS, max_tokens=st.integers(1, 900), stride=st.integers(1, 300))
def test_all_lengths_score_the_same_tokens_once(
    files, lengths, max_tokens, stride, tmp_path_factory
):
    """Of token-aligned the last ones of each piece, of the others every one."""
    n_files, bos, n = files
    val = make_split(tmp_path_factory.mktemp("split"), n, bos, n_files)
    longest_file = n - (bos is None)
    fitting = [length for length in lengths if length <= min(max_tokens, longest_file)]
    for protocol in ("chunked", "sliding", "token-aligned"):
        found = []
        for length in lengths:
            if length not in fitting:
                with pytest.raises(UserError, match="raise --max_tokens"):
                    loss.find_sequences(val, length, max_tokens, protocol, stride, lengths)
                continue
            scored = []
            places = loss.find_sequences(val, length, max_tokens, protocol, stride, lengths)
            for file, start, n_context in places:
                assert 0 <= start <= len(val.tokens[file]) - (bos is None) - length
                if protocol == "sliding":  # the first tokens of a file have less context
                    assert n_context >= length - stride or start == 0
                scored += [(file, token) for token in range(start + n_context, start + length)]
            found.append(scored)
            assert len(scored) == len(set(scored))
        assert all(sorted(scored) == sorted(found[0]) for scored in found)
        if found and protocol != "token-aligned":
            pieces = pieces_of(val, max(fitting), max_tokens)
            tokens = [(file, token) for file, *ends in pieces for token in range(*ends)]
            assert sorted(found[0]) == tokens


@pytest.mark.parametrize("bos", [None, 49])
@pytest.mark.parametrize(
    ("length", "longest", "max_tokens"),  # of 24 in 60 the last sequence of a piece overlaps
    [(24, 60, 400), (1, 7, 50)],
)
def test_chunked_equals_one_sequence_at_a_time(length, longest, max_tokens, bos, make, tmp_path):
    """Where sequences overlap at the end of a piece, only the new tokens are scored."""
    model = make(pos="alibi")
    val = make_split(tmp_path, bos=bos, files=3)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    for file, first, stop in pieces_of(val, longest, max_tokens):
        text = torch.tensor(np.asarray(val.tokens[file], np.int64))
        end = first
        while end < stop:
            start = min(end, stop - length)
            if bos is None:
                x = text[start : start + length]
                y = text[start + 1 : start + length + 1]
            else:
                y = text[start : start + length]
                x = torch.cat((torch.tensor([bos]), y[:-1]))
            new = torch.arange(length) >= end - start
            loss_sum += losses_of(model, x, y) * new
            n_scored += new
            end = start + length
    got_sum, got_scored = loss.loss_by_position(
        model, val, length, max_tokens, lengths=(length, longest)
    )
    assert torch.equal(got_scored, n_scored)
    assert torch.allclose(got_sum, loss_sum, rtol=1e-4, atol=1e-3)


def test_chunked_at_the_context_length_is_the_validation_loss_of_training(make, text_data):
    """The same sequences, as many, so the same mean."""
    dataset = data.Dataset(text_data)
    model = make(pos="rope", vocab_size=257)
    cfg = train.TrainConfig(dataset=str(text_data), batch_size=4, eval_iters=20, dtype="float32")
    expected = train.estimate_loss(model, dataset, cfg)["val_loss"]
    loss_sum, n_scored = loss.loss_by_position(model, dataset.val, 24, 20 * 24)
    assert float(loss_sum.sum() / n_scored.sum()) == pytest.approx(expected, rel=1e-6)


# -----------------------------------------------------------------------------
# What the model computes
