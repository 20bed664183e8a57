"""Sequence parallelism: N processes share every sequence, and each computes T / N of its tokens.

    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi --sequence_parallel=4

All that a transformer computes outside attention, it computes for each token by itself. Around
attention, tokens are exchanged for heads (Ulysses, Jacobs et al. 2023, arXiv 2309.14509): one
all-to-all turns queries, keys and values of all heads and T / N tokens into those of H / N heads
and all T tokens; another turns the result back. A process thus computes whole rows of scores, so
every scheme works as it is: its bias, vectors and tables are those of the whole sequence, of which
a process takes the part of its own heads.
"""

import atexit
import math

import torch
import torch.distributed as dist

import kernels
from nanolong.errors import UserError
from nanolong.parallel.processes import rank_and_world

# the processes that share a sequence: those of this process, consecutive ranks; None: no others
_group = None


def share_sequences(model, size, lengths):
    """Let `size` consecutive ranks share every sequence; called in every process.

    Calls of the model that compute a part of a text then exchange tokens for heads. lengths: tokens
    of the sequences that will be shared; 0: the context length. Raises UserError for what cannot be
    shared.
    """
    _form_groups(size)
    if size == 1:
        return
    check_model(model, lengths, size)
    exchange = Exchange()
    for scheme in model.position_schemes():
        scheme.exchange = exchange


def _form_groups(size):
    global _group
    rank, world = rank_and_world()
    if size == sequence_rank_and_size()[1]:
        return
    if world % size:
        processes = "1 process" if world == 1 else f"{world} processes"
        raise UserError(
            f"--sequence_parallel={size} does not divide {processes}: start a multiple of {size} "
            f"by torchrun --nproc_per_node={size}, or give --sequence_parallel=1"
        )
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)  # every process takes part in making every group
        if rank in ranks:
            _group = group
    atexit.register(_leave_group)  # before the process leaves all groups


def stop_sharing(model):
    """Let each process compute whole sequences again, as the first one does after training."""
    for scheme in model.position_schemes():
        scheme.exchange = None
    _leave_group()


def _leave_group():
    global _group
    _group = None


def sequence_rank_and_size():
    """(rank among those that share a sequence, their number); (0, 1) without others."""
    if _group is None:
        return 0, 1
    return dist.get_rank(_group), dist.get_world_size(_group)


def data_rank_and_world():
    """(rank among those that have other sequences, their number)."""
    rank, world = rank_and_world()
    _, size = sequence_rank_and_size()
    return rank // size, world // size


def own_part(length):
    """The tokens of a sequence that this process computes: a slice."""
    rank, size = sequence_rank_and_size()
    if size == 1:
        return slice(None)
    return slice(rank * length // size, (rank + 1) * length // size)


def check_model(model, lengths, size):
    config = model.config
    counts = [(config.n_head, "head"), *((n or config.block_size, "token") for n in lengths)]
    for n, thing in counts:
        if n % size:
            thing += "" if n == 1 else "s"
            raise UserError(
                f"--sequence_parallel={size} does not divide {n} {thing}: choose another"
            )
    if config.dropout:
        raise UserError(f"--sequence_parallel={size} cannot drop activations: give --dropout=0")


def any_process(condition, everywhere=False):
    """Whether a condition holds in any process that shares this one's sequences, or everywhere."""
    group = dist.group.WORLD if everywhere else _group
    if group is None:
        return bool(condition)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    flag = torch.tensor(int(bool(condition)), device=device)
    dist.all_reduce(flag, group=group)
    return flag.item() > 0


def gather_tokens(x):
    """Join the parts (B, T / N, ...) of all processes, in the order of the tokens: (B, T, ...)."""
    if _group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(_group))]
    dist.all_gather(parts, x.contiguous(), group=_group)
    return torch.cat(parts, 1)


# -----------------------------------------------------------------------------
# Attention


class Exchange:
    """What Attention.forward() in model.py calls while processes share a sequence."""

    def own_tokens(self, length):
        """The tokens of a sequence that this process computes outside of attention."""
        return own_part(length)

    def own_terms(self, bias, relative, n_heads):
        """Cut the terms of a scheme to the heads of this process."""
        if relative is not None:
            keys, values, offsets = relative
            offsets = offsets and tuple(own_heads(x, n_heads) for x in offsets)
            relative = own_heads(keys, n_heads), own_heads(values, n_heads), offsets
        return own_heads(bias, n_heads), relative

    def tokens_to_heads(self, q, k, v):
        """(B, H, T / N, D) of all heads -> (B, H / N, T, D) of the heads of this process.

        Keys and values have Hk heads. Where N does not divide Hk, heads are repeated until it does.
        """
        _, N = sequence_rank_and_size()
        repeats = math.lcm(k.shape[1], N) // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        heads = [x.shape[1] // N for x in (q, k, v)]
        dtype = v.dtype
        # one all-to-all for the three of them: (N receivers, B, heads of each, T / N, D)
        parts = [x.unflatten(1, (N, -1)).movedim(1, 0) for x in (q, k, v)]
        received = all_to_all(torch.cat(parts, 2))  # (N senders, B, heads, T / N, D)
        # Each is a copy of its own: v must not keep the memory of q and k, which RoPE replaces.
        parts = received.split(heads, 2)
        q, k, v = (x.movedim(0, 2).flatten(2, 3) for x in parts)  # (B, heads, T, D)
        return q, k, v.to(dtype)

    def heads_to_tokens(self, y):
        """(B, H / N, T, D) -> (B, H, T / N, D): what tokens_to_heads() does, undone."""
        _, N = sequence_rank_and_size()
        received = all_to_all(y.unflatten(2, (N, -1)).movedim(2, 0))  # (N, B, H / N, T / N, D)
        return received.transpose(0, 1).flatten(1, 2)


def own_heads(x, n_heads):
    """Cut (n_head, ...) to the n_heads of this process: all of them without sequence parallelism.

    A term that all heads share, and None, are left as they are. For schemes whose rotate() has
    something for each head.
    """
    rank, size = sequence_rank_and_size()
    if x is None or len(x) != n_heads * size:
        return x
    return x[rank * n_heads : (rank + 1) * n_heads]


class AllToAll(torch.autograd.Function):
    """Send x[i] to process i of the group, and receive as much from each: (N, ...) -> (N, ...)."""

    @staticmethod
    def forward(ctx, x):
        return exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad)


all_to_all = kernels.between_graphs(AllToAll.apply)


def exchange(x):
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=_group)
    return received
