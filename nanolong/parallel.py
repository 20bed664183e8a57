"""Several processes, started by torchrun: joining them, DDP, FSDP and sequence parallelism.

    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi
    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi --parallel=fsdp
    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi --sequence_parallel=4

With ddp each process keeps the whole model, with fsdp 1 / N of the weights, gradients and moments:
a block's weights are gathered when it computes. With --sequence_parallel=N, N processes share every
sequence, and each computes T / N of its tokens. Around attention they exchange tokens for heads
(Ulysses, Jacobs et al. 2023, arXiv 2309.14509): one all-to-all turns queries, keys and values of
all heads and T / N tokens into queries, keys and values of H / N heads and all T tokens; another
turns the result back. A process thus computes whole rows of scores, so every scheme works as it is.
"""

import atexit
import math
import os
import time

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

import kernels
from nanolong import devices
from nanolong.errors import require

# the group of processes, of consecutive ranks, that share sequences with this one; None: no others
_group = None
# AllToAll.apply(), which torch.compile calls as it is, between two graphs
_all_to_all = None


def rank_and_world():
    """(rank, number of processes) of the current process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def join_processes(device):
    """Join the process group if torchrun started this process. Returns (rank, number of them).

    device: a torch.device. GPUs communicate by NCCL, CPUs by gloo.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        return rank_and_world()
    is_cuda = device.type == "cuda"
    if not is_cuda:  # the processes of a machine divide its cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    # without its device NCCL guesses it, with a warning
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    atexit.register(leave_group)
    return rank_and_world()


def leave_group():
    """Free the process group: gloo may abort a process that ends while it is alive."""
    global _group
    _group = None
    if dist.is_initialized():
        dist.destroy_process_group()
        # Its threads may still have to free the last tensors, for which they need the interpreter:
        # without it they abort the process (once in 20 runs with FSDP).
        time.sleep(0.2)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def broadcast(value):
    """Return the value of the first process in every process."""
    values = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(values)
    return values[0]


def communication_device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def sum_over_processes(x):
    """Sum a tensor over all processes, on the device by which they communicate, if any."""
    if dist.is_initialized():
        x = x.to(communication_device())
        dist.all_reduce(x)
    return x


def check_same(what):
    """Raise UserError in every process unless `what`, compared as text, is the same in all."""
    require(
        not any_process(str(what) != broadcast(str(what))),
        "the processes have other settings, code, torch, checkpoints or data: start all with the "
        "same command, of the same commit, on the same files",
    )


# -----------------------------------------------------------------------------
# A model in every process (ddp), or in shards (fsdp).


def distribute(model, device, sharded=False, compiled="false"):
    """Move a model to the device, whole (ddp) or in shards (fsdp).

    compiled: value of --compile. Returns the module to call in training. All have the weights of
    the first process. Raises UserError for shards in one process, and for graphs in several.
    """
    problem = "--compile=graphs is for one process: give --compile=true"
    require(compiled != "graphs" or not dist.is_initialized(), problem)
    require(
        not sharded or rank_and_world()[1] > 1,
        "--parallel=fsdp needs several processes: start them by torchrun --nproc_per_node=N, or "
        "give --parallel=ddp",
    )
    forward = model
    if compiled != "false":
        # Processes communicate in every block, which is not compiled: so compile block by block.
        by_block = sharded or sequence_rank_and_size()[1] > 1
        forward = devices.compile_model(model, by_block, in_graphs=compiled == "graphs")
    if sharded:
        return shard(model, device)
    model.to(device)
    if dist.is_initialized():
        ids = [device.index] if device.type == "cuda" else None
        # gradients are views of the communicated buffers, or each would exist twice
        ddp = torch.nn.parallel.DistributedDataParallel
        forward = ddp(forward, device_ids=ids, gradient_as_bucket_view=True)
    return forward


def build_without_weights(GPT, config):
    """Build a model whose parameters are on the meta device, and the tables of its scheme not."""

    def move_to_meta(module, name, p):
        return p if p is None or p.is_meta else torch.nn.Parameter(p.to("meta"), p.requires_grad)

    hook = register_module_parameter_registration_hook(move_to_meta)
    try:
        return GPT(config)
    finally:
        hook.remove()


def shard(model, device):
    """Keep this process's rows of every parameter, on the device; all have them from the first."""
    # importing them takes half a second
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = model.state_dict() if rank_and_world()[0] == 0 else {}
    # Without memory until they are cut; once for a head that is the embedding.
    empty = {p: torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, empty[p])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


def is_sharded(x):
    """Whether a tensor (then it is a DTensor) or a model (then an FSDPModule) is in shards."""
    return hasattr(x, "full_tensor") or hasattr(x, "set_requires_gradient_sync")


def whole(x):
    """A tensor in shards as a whole one; others as they are."""
    return x.full_tensor() if is_sharded(x) else x


def gather(tensors):
    """Gather tensors in shards, a dict by name, on the CPU of the first process; others get {}."""
    gathered = {}
    for name, x in tensors.items():
        x = whole(x)
        if rank_and_world()[0] == 0:
            gathered[name] = x.cpu()
    return gathered


def place_like(x, like):
    """Move a whole tensor to the device of a parameter, in shards if that is and has its shape."""
    device = like.device
    if not is_sharded(like) or x.shape != like.shape:
        return x.to(device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(device), like.device_mesh, like.placements)


def reshard(model):
    """Free the gathered weights that are in no block, after a forward pass without a backward."""
    if is_sharded(model):
        model.reshard()


def set_gradient_sync(forward, enabled):
    """Whether the next backward pass averages the gradients over the processes."""
    if is_sharded(forward):
        forward.set_requires_gradient_sync(enabled)
    elif dist.is_initialized():
        forward.require_backward_grad_sync = enabled


# -----------------------------------------------------------------------------
# Sequence parallelism.


def share_sequences(size, model, lengths):
    """Let `size` consecutive ranks share every sequence; called in every process.

    model: one that is called with own_part() of tokens, targets, positions and documents then.
    lengths: tokens of the sequences. Raises UserError for what cannot be shared.
    """
    global _group, _all_to_all
    if size == 1:
        return
    _, world = rank_and_world()
    require(
        world % size == 0,
        f"--sequence_parallel={size} does not divide {world} processes: start a multiple of {size} "
        f"by torchrun --nproc_per_node={size}, or give --sequence_parallel=1",
    )
    counts = [(model.config.n_head, "heads"), *((n, "tokens") for n in lengths)]
    for n, things in counts:
        require(n % size == 0, f"--sequence_parallel={size} does not divide {n} {things}")
    require(not model.config.dropout, "--sequence_parallel drops no activations: give --dropout=0")
    _group, _ = dist.new_subgroups(size)
    # not for all runs: it imports the compiler, which takes two seconds
    _all_to_all = torch.compiler.disable(AllToAll.apply)
    for scheme in (model.pos, model.nope):
        # fully_shard() adds a base class to a module, too. The scheme's own attend() then calls
        # SharedScheme.bias(), which it would not find in a wrapper. Parameters stay where they are.
        cls = type(scheme)
        scheme.__class__ = type(cls.__name__, (SharedScheme, cls), {})


def stop_sharing(model):
    """Let each process compute whole sequences again, as the first one does after training."""
    global _group
    _group = None
    for scheme in (model.pos, model.nope):
        if isinstance(scheme, SharedScheme):
            _, scheme.__class__ = type(scheme).__bases__


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


def own_part(batch):
    """The tokens of this process: a dict of tensors (..., T) or None -> (..., T / N)."""
    rank, size = sequence_rank_and_size()
    if size == 1:
        return batch
    docs = batch.get("docs")
    if batch["positions"] is None:
        positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        if docs is not None:
            positions = kernels.positions_in_documents(docs)
        batch = {**batch, "positions": positions}
    return {name: x if x is None else x.chunk(size, -1)[rank] for name, x in batch.items()}


def any_process(condition):
    """Whether a condition holds in any process."""
    return sum_over_processes(torch.tensor(int(bool(condition)))).item() > 0


def gather_tokens(x, dim=-1):
    """Join the parts (..., T / N) of all processes that share a sequence: (..., T)."""
    if _group is None or x is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(_group))]
    dist.all_gather(parts, x.contiguous(), group=_group)
    return torch.cat(parts, dim)


class SharedScheme:
    """What a process computes of a scheme; super() is the scheme, and knows of no processes."""

    def set_length(self, length):
        """Set the tables of a dynamic method for the whole text, whose end the last process has."""
        if self.is_dynamic:
            longest = torch.tensor(length, device=communication_device())
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=_group)
            length = longest.item()
        return super().set_length(length)

    def angles(self, x, layer, past):
        past.exchange = earlier_parts
        return super().angles(x, layer, past)

    def gates(self, x, layer, past):
        past.exchange = earlier_parts
        return super().gates(x, layer, past)

    def bias(self, n, layer):
        return own_heads(super().bias(n, layer), self.config.n_head)

    def vectors(self, n, layer):
        return own_heads(super().vectors(n, layer), self.config.n_head)

    def attend(self, q, k, v, pos, layer, cache, **mask):
        """Exchange tokens for heads, attend as the scheme does, and exchange heads for tokens.

        q (B, H, T / N, D) -> (B, H / N, T, D). If N does not divide the key/value heads, these are
        repeated until it does.
        """
        _, N = sequence_rank_and_size()
        repeats = math.lcm(k.shape[1], N) // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        q, k, v = (tokens_to_heads(x, N) for x in (q, k, v))
        if "gates" in mask:
            mask["gates"] = tokens_to_heads(mask["gates"], N)
        mask["docs"] = gather_tokens(mask["docs"])
        # own_part() made these from the indices, which is attention's default
        mask["positions"] = gather_tokens(mask["positions"]) if pos.dim() > 1 else None
        attended = super().attend(q, k, v, gather_tokens(pos), layer, cache, **mask)
        if isinstance(attended, tuple):  # with the log-sum-exp, for learned sinks
            return tuple(heads_to_tokens(x, N) for x in attended)
        return heads_to_tokens(attended, N)


def own_heads(x, n_head):
    """Cut (n_head, ...), or each of several, to the heads of this process, unless all share it."""
    if isinstance(x, tuple | list):
        return tuple(own_heads(each, n_head) for each in x)
    rank, size = sequence_rank_and_size()
    return x if x is None or len(x) != n_head else x.chunk(size)[rank]


def earlier_parts(x):
    """Get x (B, H, n, c) of the processes with earlier tokens: (B, H, rank n, c)."""
    rank, N = sequence_rank_and_size()
    received = _all_to_all(x.expand(N, *x.shape))
    return received[:rank].movedim(0, 2).flatten(2, 3)


def tokens_to_heads(x, N):
    """(B, H, T / N, ...) of all heads -> (B, H / N, T, ...) of the heads of this process."""
    received = _all_to_all(x.unflatten(1, (N, -1)).movedim(1, 0))  # (N, B, H / N, T / N, ...)
    return received.movedim(0, 2).flatten(2, 3)


def heads_to_tokens(y, N):
    """(B, H / N, T, ...) -> (B, H, T / N, ...): the inverse of tokens_to_heads()."""
    received = _all_to_all(y.unflatten(2, (N, -1)).movedim(2, 0))  # (N, B, H / N, T / N, ...)
    return received.transpose(0, 1).flatten(1, 2)


class AllToAll(torch.autograd.Function):
    """Send x[i] to process i of the group, and receive as much from each: (N, ...) -> (N, ...)."""

    @staticmethod
    def forward(ctx, x):
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=_group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)
