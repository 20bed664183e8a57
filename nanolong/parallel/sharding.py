"""Sharded training: each of N processes keeps 1 / N of the weights, gradients and moments (FSDP).

    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi --parallel=fsdp

PyTorch's fully_shard() cuts every parameter into N parts by its rows. The weights of a block are
gathered when it computes and freed after that; its gradients are averaged over the processes, and
each process keeps its own rows of the mean. So all processes make the same forward and backward
passes at the same time. The other mode is DDP: each process keeps the whole model.

AdamW works element by element, on rows as on the whole. Muon needs whole matrices: it is refused.
"""

import math

import torch
import torch.distributed as dist

from nanolong.devices import compile_blocks, compile_model
from nanolong.errors import UserError
from nanolong.parallel.processes import rank_and_world
from nanolong.parallel.sequence import sequence_rank_and_size
from nanolong.tensor_file import read_tensor


def check_parallel(parallel, optimizer):
    """Raise UserError for --parallel=fsdp with one process, and with Muon."""
    if parallel == "fsdp" and optimizer == "muon":
        raise UserError(
            "--parallel=fsdp cuts matrices into rows, and Muon needs whole ones: give "
            "--optimizer=adamw"
        )
    if parallel == "fsdp" and rank_and_world()[1] == 1:
        repair = "start several by torchrun --nproc_per_node=N, or give --parallel=ddp"
        raise UserError(f"--parallel=fsdp needs several processes, and there is one: {repair}")


def distribute(model, parallel, device, use_compile):
    """Move a model to the device, whole (ddp) or in shards (fsdp), and compile it if `use_compile`.

    Returns the module to call in training.
    """
    # Processes communicate in every block, which is not compiled: so compile block by block.
    _, parts = sequence_rank_and_size()
    if use_compile and (parallel == "fsdp" or parts > 1):
        compile_blocks(model)
        use_compile = False
    if parallel == "fsdp":
        return shard(model, device)
    model.to(device)
    forward = compile_model(model) if use_compile else model
    if dist.is_initialized():
        device_ids = [device.index] if device.type == "cuda" else None
        forward = torch.nn.parallel.DistributedDataParallel(
            forward,
            device_ids=device_ids,
            gradient_as_bucket_view=True,  # or each gradient exists twice
        )
    return forward


def shard(model, device):
    """Keep only this process's rows of every parameter, on the device. Returns the model.

    Blocks are moved one at a time. Of parameters on the meta device each process reads its own rows
    from the model's checkpoint.
    """
    # importing them takes half a second
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for scheme in model.position_schemes():
        scheme.to(device)  # its tables
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # sharded on its own, so that its all-gather frees the last block before the loss
    fully_shard(model.norm, mesh=mesh)
    # The head's gradient is computed in the forward pass, and the embedding's needs no weights, so
    # the weights of both are freed before the backward pass.
    fully_shard([model.embed, model.head], mesh=mesh)
    model.embed.set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh)  # what is left: a scheme's own parameters
    if dist.get_backend() == "gloo":
        model.embed.set_custom_reduce_scatter(SumInParts())
    loaded = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p not in loaded and p.is_meta:  # a tied head is stored as the embedding
            rows = read_part(model.folder / "model.safetensors", name, p)
            loaded[p] = torch.nn.Parameter(rows, p.requires_grad)
    if loaded:
        parameters = model.named_parameters(remove_duplicate=False)
        model.load_state_dict({name: loaded.get(p, p) for name, p in parameters}, assign=True)
    return model


class SumInParts:
    """How fully_shard() sums gradients on a CPU. Gloo's own reduce_scatter copies all of them."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        parts = input_tensor.chunk(group.size())
        for part in parts:
            dist.all_reduce(part, op, group=group)
        output_tensor.copy_(parts[group.rank()])


def is_sharded(x):
    """Whether a tensor (then it is a DTensor) or a model (then an FSDPModule) is in shards."""
    return hasattr(x, "full_tensor") or hasattr(x, "set_requires_gradient_sync")


def gather(x):
    """The whole of a tensor; all processes take part where it is in shards."""
    return x.full_tensor() if is_sharded(x) else x


def free_gathered(model):
    """Free gathered weights that are in no block, after a forward pass without a backward pass."""
    if is_sharded(model):
        model.embed.reshard()
        model.reshard()


def read_part(file, name, like):
    """Read this process's rows of a tensor in a file.

    like: a tensor of its whole shape, which gives sharding, device and dtype.
    """
    if not is_sharded(like):
        return read_tensor(file, name).to(like.device, like.dtype, copy=True)
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    rows = own_rows(len(like), mesh.get_local_rank(), mesh.size())
    part = read_tensor(file, name, rows).to(mesh.device_type, like.dtype, copy=True)
    return DTensor.from_local(
        part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_rows(n, rank, world):
    """Return the slice of n rows that a process keeps, as torch.chunk() cuts; it may be empty."""
    size = math.ceil(n / world)
    return slice(min(rank * size, n), min((rank + 1) * size, n))


# -----------------------------------------------------------------------------
# Gradients


def set_gradient_sync(forward, enabled):
    """Whether the next backward pass averages the gradients over the processes."""
    if is_sharded(forward):
        forward.set_requires_gradient_sync(enabled)
    elif dist.is_initialized():
        forward.require_backward_grad_sync = enabled
