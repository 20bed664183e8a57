"""Counts what a process sends in a training step; started by torchrun with a JSON of settings.

Prints JSON: the bytes of rank 0 for weights and gradients, and for tokens. The collectives of
torch.distributed are wrapped; what a call sends of its tensor: (n - 1) / n.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from nanolong.parallel import sharding
from nanolong.parallel.processes import join_processes
from nanolong.parallel.sequence import share_sequences
from nanolong.parallel.sharding import distribute

sent = {"weights": 0, "tokens": 0}


def count(name, kind, whole):
    """Wrap a collective. whole: the position of the tensor that all processes have parts of."""
    call = getattr(dist, name)

    def counted(*args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)]
        group = kwargs.get("group")
        n = dist.get_world_size(group)
        sent[kind] += tensors[whole].nbytes * (n - 1) // n
        return call(*args, **kwargs)

    setattr(dist, name, counted)


def reduce_scatter(self, output_tensor, input_tensor, group, op, async_op=False):
    """As on a GPU; a CPU sums all parts in all processes."""
    dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op)


def main():
    settings = json.loads(sys.argv[1])
    rank, world = join_processes("cpu")
    config = GPTConfig(**settings["config"])
    T = config.block_size
    torch.manual_seed(0)
    model = GPT(config)
    share_sequences(model, settings["parts"], [T])
    model.activation_checkpointing = settings["checkpointing"]
    sharding.SumInParts.__call__ = reduce_scatter
    forward = distribute(model, settings["parallel"], torch.device("cpu"), False)
    count("all_to_all_single", "tokens", 0)
    count("all_gather_single", "weights", 0)
    count("reduce_scatter_single", "weights", 1)
    tokens = torch.randint(config.vocab_size, (2, T))
    forward(tokens, tokens, reduction="sum").backward()
    if rank == 0:
        print(json.dumps(sent))


if __name__ == "__main__":
    main()
