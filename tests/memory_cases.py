"""A process whose memory test_counted_memory.py measures: python tests/memory_cases.py JSON

The JSON is a task, its arguments, and whether freed memory is returned to Linux at once. Prints the
peak in bytes. `step`: of all allocations of torch's CPU allocator, as torch.profiler records them,
in two training steps; that of oneDNN and MKL is not in it. On a GPU: torch's own peak. `train` and
`evaluate`: of the process on Linux, above what it takes once torch and the model are imported.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import evaluate
from model import GPT, GPTConfig
from nanolong import devices
from nanolong.cli import silent
from nanolong.parallel.processes import join_processes
from train import TrainConfig, train


def take_two_steps(config, batch_size, dtype, checkpointing, accumulation, device):
    """Build model and optimizer and train for two steps on random tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config)).to(device).train()
    model.activation_checkpointing = checkpointing
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shape = (batch_size, config["block_size"])
    for _ in range(2):
        for _ in range(accumulation):
            tokens = torch.randint(0, config["vocab_size"], shape, device=device)
            with devices.autocast(device, getattr(torch, dtype)):
                loss = model(tokens, tokens)
            loss.backward()
            del loss
        torch._foreach_mul_([p.grad for p in model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure_steps(device, **case):
    """The peak of two training steps in this process, in bytes."""
    device = torch.device(device)
    if device.type == "cuda":
        take_two_steps(device=device, **case)
        return torch.cuda.max_memory_allocated()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        take_two_steps(device=device, **case)
    events = profile.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocated = 0
    peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def train_model(model, settings):
    """Train in this process, on one core for each process."""
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_processes])
    torch.set_num_threads(1)
    join_processes("cpu")
    torch.manual_seed(0)
    settings = {"batch_size": 1, "device": "cpu", "dtype": "float32", "compile": False, **settings}
    train(GPT(GPTConfig(**model)), TrainConfig(**settings))


def evaluate_model(words):
    sys.argv = ["evaluate.py", *words]
    evaluate.main()


def resident_memory(name):
    """VmRSS or VmHWM (the peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main():
    task, arguments, returns_freed = json.loads(sys.argv[1])
    if returns_freed:
        set_malloc_options = devices.set_malloc_options
        devices.set_malloc_options = lambda keep_freed_memory: set_malloc_options(False)
    if task == "step":
        peak = measure_steps(**arguments)
    else:
        before = resident_memory("VmRSS")
        with silent(True):
            {"train": train_model, "evaluate": evaluate_model}[task](**arguments)
        peak = resident_memory("VmHWM") - before
    # in one write: the lines of several processes must not mix
    sys.stdout.write(f"PEAK {peak} bytes\n")


if __name__ == "__main__":
    main()
