"""Several processes, started by torchrun: joining them, and DDP.

    torchrun --standalone --nproc_per_node=4 train.py --pos=alibi

Each process keeps the whole model, and computes other sequences; gradients are averaged.
"""

import atexit
import os
import time

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

from nanolong import devices
from nanolong.errors import require


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
    if dist.is_initialized():
        dist.destroy_process_group()
        # Its threads may still have to free the last tensors, for which they need the interpreter:
        # without it they abort the process.
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
# A model in every process.


def distribute(model, device, compiled=False):
    """Move a model to the device. Returns the module to call in training, compiled if asked.

    All have the weights of the first process.
    """
    model.to(device)
    forward = devices.compile_model(model) if compiled else model
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


def set_gradient_sync(forward, enabled):
    """Whether the next backward pass averages the gradients over the processes."""
    if dist.is_initialized():
        forward.require_backward_grad_sync = enabled


def any_process(condition):
    """Whether a condition holds in any process."""
    return sum_over_processes(torch.tensor(int(bool(condition)))).item() > 0
