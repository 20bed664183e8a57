"""Several processes, started by torchrun: joining them, and noticing that one of them is lost.

torchrun --standalone --nproc_per_node=8 train.py ...
"""

import atexit
import datetime
import gc
import os
import time

import torch
import torch.distributed as dist

from nanolong.devices import pick_device
from nanolong.errors import LocalError, UserError

# Settings that may differ: of a device, and of where a machine keeps its files.
LOCAL_SETTINGS = {"dataset", "device", "entry", "json", "out_dir", "plot", "text"}
REPAIRS = {
    "code": "check out the same commit on every machine, with the same --entry files",
    "torch": "install the same version on every machine",
    "checkpoint": "let all machines share the run folder, or copy the same one to each",
    "data": "let all machines share the dataset, or copy the same files to each",
}


def rank_and_world():
    """(rank, number of processes) of the current process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def join_processes(device):
    """Join the process group if torchrun started this process. Returns (rank, number of them).

    GPUs communicate by NCCL, CPUs by gloo; the processes of a machine divide its cores.
    A process that waits for another longer than collective_timeout() ends itself.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return 0, 1
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if max_restarts and os.environ.get("TORCHELASTIC_RUN_ID") == "none":
        repair = "add --standalone, or on several machines --rdzv_id=NAME"
        raise UserError(f"torchrun --max-restarts without a name may resume another run: {repair}")
    device = pick_device(device)
    device_id = None
    if device.type == "cuda":
        device_id = torch.cuda.current_device()  # that of pick_device()
        backend = "nccl"
    else:
        processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, _available_cores() // processes_here))
        backend = "gloo"
    timeout = datetime.timedelta(seconds=collective_timeout())
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    store = _store_of_this_start(store, rank, world)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device_id,  # or NCCL guesses it, with a warning
    )
    atexit.register(_leave_group)
    return rank, world


def _leave_group():
    """Free the process group: gloo may abort a process that ends while it is alive."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a model in shards refers to it too, and is part of reference cycles


def _available_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def check_same_everywhere(**facts):
    """Raise LocalError in every process if a fact, compared as text, differs between processes.

    Only the first that differs is named: pass causes before their consequences.
    """
    rank, world = rank_and_world()
    if world == 1:
        return
    everyone = [None] * world
    dist.all_gather_object(everyone, {name: str(fact) for name, fact in facts.items()})
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        found = [theirs.get(name, "not given") for theirs in everyone]
        other = next((i for i in range(world) if found[i] != found[0]), None)
        if other is not None:
            repair = REPAIRS.get(name, "give all processes the same command and presets")
            raise LocalError(
                f"process {rank} of {world} stops, since {name} is {found[0]} in process 0 and "
                f"{found[other]} in process {other}: {repair}"
            )


def broadcast(value):
    """Return the value of the first process in every process."""
    values = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(values)
    return values[0]


def collective_timeout():
    """Seconds that a process waits for the others: NANOLONG_TIMEOUT, 600 by default."""
    text = os.environ.get("NANOLONG_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UserError(f"NANOLONG_TIMEOUT={text} is not a number of seconds: give 600 or so")
    return seconds


def _store_of_this_start(store, rank, world):
    """The part of torchrun's store that only the processes of this start use.

    torchrun keeps its store over restarts, so it may still hold the addresses of dead processes:
    rank 0 makes a fresh name for the group and hands it to every rank. The count of restarts may
    differ between machines, and with it torch's own prefix of the store (tests/stress/elastic.py:
    two launchers, one of which loses its worker). All processes take the highest one, so that all
    of them resume or none does.
    """
    token = os.urandom(8).hex()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0:
        group = token
        _welcome_processes(store, group, world)
        counts = [int(store.get(f"nanolong/{group}/{other}")) for other in range(1, world)]
        store.set(f"nanolong/{group}/restarts", str(max(int(restarts), *counts, 0)))
    else:
        store.set(f"nanolong/hello/{rank}", token)
        group = store.get(f"nanolong/welcome/{token}").decode()  # waits for rank 0
        store.set(f"nanolong/{group}/{rank}", restarts)
    most_restarts = store.get(f"nanolong/{group}/restarts").decode()
    if most_restarts != restarts:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = most_restarts
    return dist.PrefixStore(f"nanolong/{group}/group", store)


def _welcome_processes(store, group, world):
    """Tell the name of the group to every other process, until all of them have answered."""
    deadline = time.monotonic() + collective_timeout()
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"nanolong/hello/{other}"]):
                # The hello may be that of a dead process; its successor will overwrite it.
                token = store.get(f"nanolong/hello/{other}").decode()
                store.set(f"nanolong/welcome/{token}", group)
        missing = {other for other in missing if not store.check([f"nanolong/{group}/{other}"])}
        if time.monotonic() > deadline:
            raise dist.DistError(f"{len(missing)} processes did not join")
        time.sleep(0.01)


def lost_peer_message(error):
    """The message for an error of torch.distributed that a lost process causes, else None."""
    if not dist.is_available():
        return None
    phrases = ("gloo", "Connection closed by peer")
    if not (isinstance(error, dist.DistError) or any(phrase in str(error) for phrase in phrases)):
        return None
    return (
        f"process {os.environ.get('RANK', 0)} has lost another process, which ended or has not "
        f"answered for {collective_timeout():g} seconds (NANOLONG_TIMEOUT): look at what the other "
        "processes printed, then resume from the last checkpoint with --init_from=resume"
    )
