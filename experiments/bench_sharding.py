"""
What several processes save: memory in shards, memory and time where they share every sequence.

    python experiments/bench_sharding.py > results/cpu/sharding.md
    python experiments/bench_sharding.py weights    only this; or tokens, evaluation, time

A process is train() of train.py with AdamW in float32, one micro-batch of one sequence for each
process, with an evaluation and checkpoints; or it is evaluate.py. Resident: the peak of the memory
of a process on Linux, above what it takes once torch and the model are imported. Tensors: that peak
where freed memory is returned to Linux at once, less that of the same run with a tiny model, which
is what libraries take. Counted: count_memory() of nanolong/memory.py. Needs 6 GB.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from model import GPT, GPTConfig

MB = 2**20
WEIGHTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304, "block_size": 256}
TOKENS = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 257, "block_size": 8192}
TEXT = {"n_layer": 2, "n_head": 4, "n_embd": 256, "vocab_size": 257, "block_size": 65536}
TIME = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 257, "block_size": 2048}
TINY = {"n_embd": 24, "vocab_size": 257, "block_size": 32}  # with the layers of another shape
WEIGHTS_GOAL = 0.45  # of the memory of one process, in each of four that share the weights
TOKENS_GOAL = 0.35  # of its activations, in each of four that share a sequence
COUNT_GOAL = 0.10  # how far the count may be from the tensors
LOSS_GOAL = 1e-5  # how far the losses of an evaluation may be from those of one process
STEPS = 12  # of the timed runs, the first two not counted


# -----------------------------------------------------------------------------
# In a process that is measured.


def resident_memory(name):
    """VmRSS or VmHWM (the peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"there is no {name}: this script needs Linux")


def train_model(model, settings):
    """Train in this process, on one core for each process."""
    from nanolong.parallel.processes import join_processes
    from train import TrainConfig, train

    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_processes])
    torch.set_num_threads(1)
    join_processes("cpu")
    torch.manual_seed(0)
    settings = {"batch_size": 1, "device": "cpu", "dtype": "float32", "compile": False, **settings}
    train(GPT(GPTConfig(**model)), TrainConfig(**settings))


def evaluate_model(words):
    import evaluate

    sys.argv = ["evaluate.py", *words]
    evaluate.main()


def work(task, arguments, returns_freed):
    """Do a task in this process, and print the peak of its memory."""
    from nanolong import devices
    from nanolong.cli import silent

    if returns_freed:
        set_malloc_options = devices.set_malloc_options
        devices.set_malloc_options = lambda keep_freed_memory: set_malloc_options(False)
    before = resident_memory("VmRSS")
    with silent(True):
        {"train": train_model, "evaluate": evaluate_model}[task](**arguments)
    # in one write: the lines of several processes must not mix
    sys.stdout.write(f"PEAK {resident_memory('VmHWM') - before} bytes\n")


# -----------------------------------------------------------------------------
# Starting them.


def measure_peak(task, processes, returns_freed=False, **arguments):
    """The largest peak of so many processes that do a task, in bytes."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, __file__, json.dumps([task, arguments, returns_freed], allow_nan=False)]
    done = subprocess.run(command, capture_output=True, text=True)
    peaks = [int(peak) for peak in re.findall(r"PEAK (\d+) bytes", done.stdout)]
    if len(peaks) != processes:
        raise RuntimeError(done.stderr[-3000:])
    return max(peaks)


def measure_tensors(folder, model, processes, **settings):
    """The peak of a training without what libraries take."""
    peaks = []
    for shape in (model, {**model, **TINY}):
        run = training(folder, shape, processes, **settings)
        peaks.append(measure_peak("train", processes, True, **run))
    return peaks[0] - peaks[1]


def training(folder, model, processes, **settings):
    """The arguments of train_model() for a run of its own on random tokens."""
    dataset = folder / f"data-{model['vocab_size']}"
    if not dataset.exists():
        write_random_tokens(dataset, model["vocab_size"])
    run = tempfile.mkdtemp(prefix="run-", dir=folder)
    micro_batches = processes // settings.get("sequence_parallel", 1)
    files = {"dataset": str(dataset), "out_dir": run, "overwrite": True}
    steps = {"gradient_accumulation_steps": micro_batches, "max_iters": 2, "eval_iters": 1}
    return {"model": model, "settings": {**files, **steps, **settings}}


def write_random_tokens(folder, vocab_size):
    import data

    tokens = np.random.default_rng(0).integers(0, vocab_size, 20_000)
    folder.mkdir()
    for split in ("train", "val"):
        data.write_tokens(folder / f"{split}.bin", tokens, vocab_size)
    meta = {"vocab_size": vocab_size, "tokenizer": None, "bos": None, "bos_default": False}
    (folder / "meta.json").write_text(json.dumps(meta, allow_nan=False))


def count(model, tokens, **shared):
    """count_memory() of a training step in float32, of one sequence of so many tokens."""
    from nanolong.memory import count_memory

    return count_memory(GPTConfig(**model), 1, tokens, "float32", device="cpu", **shared)


# -----------------------------------------------------------------------------
# The sections of the report: each measures, and yields lines of Markdown.


def report_weights(folder):
    yield "## Weights in shards: 124 M parameters, 256 tokens"
    yield from table_head("processes", "resident", "of one", "tensors", "counted", "error")
    one, errors = None, []
    for processes, parallel in ((1, "ddp"), (4, "fsdp")):
        run = training(folder, WEIGHTS, processes, parallel=parallel)
        resident = measure_peak("train", processes, **run)
        tensors = measure_tensors(folder, WEIGHTS, processes, parallel=parallel)
        one = one or resident
        counted = count(WEIGHTS, WEIGHTS["block_size"], shards=processes).peak
        errors.append(counted / tensors - 1)
        yield row(
            name(processes, parallel), mb(resident), f"{resident / one:.2f}",
            mb(tensors), mb(counted), f"{errors[-1]:+.1%}",
        )  # fmt: skip
    yield from verdict("the error of the count", max(map(abs, errors)), COUNT_GOAL)
    yield from verdict("fsdp, of the resident memory of one process", resident / one, WEIGHTS_GOAL)


def report_tokens(folder):
    """The peak of tensors above the weights and moments, which are there before a step."""
    length = TOKENS["block_size"]
    yield f"## Activations of shared sequences: 4 layers of 128, {length:,} tokens"
    yield from table_head("processes", "activations", "of one", "counted", "error")
    one, errors = None, []
    for processes in (1, 4):
        counted = count(TOKENS, TOKENS["block_size"] // processes, parts=processes)
        kept = counted.parameters + counted.optimizer
        tensors = measure_tensors(folder, TOKENS, processes, sequence_parallel=processes)
        activations = tensors - kept
        one = one or activations
        errors.append((counted.peak - kept) / activations - 1)
        yield row(
            name(processes, "sequence_parallel"), mb(activations), f"{activations / one:.2f}",
            mb(counted.peak - kept), f"{errors[-1]:+.1%}",
        )  # fmt: skip
    yield from verdict("the error of the count", max(map(abs, errors)), COUNT_GOAL)
    yield from verdict("four processes, of one", activations / one, TOKENS_GOAL)


def report_evaluation(folder):
    length = TEXT["block_size"]
    yield f"## evaluate.py on {length:,} tokens: 2 layers of 256"
    yield from table_head("processes", "resident", "of one", "loss", "loss of the last quarter")
    model_folder, text = write_model(folder / "model", TEXT), folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(32, 127, length + 100, "u1").tobytes())
    words = [str(model_folder), f"--text={text}", f"--lengths={length}", f"--max_tokens={length}"]
    words += ["--dtype=float32", "--device=cpu"]
    found = []
    for processes in (1, 4):
        file = folder / f"{processes}.json"
        own = [f"--sequence_parallel={processes}", f"--json={file}"]
        resident = measure_peak("evaluate", processes, words=words + own)
        losses = [record["loss"] for record in json.loads(file.read_text())]
        found.append((resident, losses))
        yield row(
            name(processes, "sequence_parallel"), mb(resident), f"{resident / found[0][0]:.2f}",
            *(f"{loss:.6f}" for loss in losses),
        )  # fmt: skip
    differences = [abs(a - b) for a, b in zip(found[0][1], found[1][1], strict=True)]
    yield from verdict("the largest difference of a loss", max(differences), LOSS_GOAL)


def write_model(folder, shape):
    """A checkpoint with random weights and the tokenizer of bytes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1)
    model.meta = {"tokenizer": {"kind": "bytes"}, "bos": 256}
    model.save(folder / "step-000000")
    return folder


def report_time(folder):
    yield f"## Seconds of a step: 4 layers of 256, 2 sequences of {TIME['block_size']:,} tokens"
    yield from table_head("processes, on a core each", "seconds of a step", "of one")
    one = None
    ways = {"one": (1, {}), "ddp": (2, {}), "sequence_parallel": (2, {"sequence_parallel": 2})}
    for way, (processes, settings) in ways.items():
        settings |= {"gradient_accumulation_steps": 2, "log_interval": 1, "max_iters": STEPS}
        run = training(folder, TIME, processes, eval_interval=STEPS, **settings)
        measure_peak("train", processes, **run)
        seconds = seconds_of_a_step(Path(run["settings"]["out_dir"]))
        one = one or seconds
        yield row(name(processes, way), f"{seconds:.2f}", f"{seconds / one:.2f}")


def seconds_of_a_step(run):
    """The median over the steps of a run, without the first two."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    return 2 * TIME["block_size"] / statistics.median(speeds[2:])


def table_head(*columns):
    yield from ("", row(*columns), row(*["---"] * len(columns)))


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def mb(n_bytes):
    return f"{n_bytes / MB:,.0f} MiB"


def name(processes, way):
    return "1" if processes == 1 else f"{processes}, {way}"


def verdict(what, value, goal):
    result = "met" if value <= goal else "missed"
    yield f"\nGoal for {what}, at most {goal:g}: {result} ({value:.2g})."


SECTIONS = {
    "weights": report_weights,
    "tokens": report_tokens,
    "evaluation": report_evaluation,
    "time": report_time,
}


def main():
    from nanolong.provenance import provenance

    names = sys.argv[1:] or list(SECTIONS)
    print("# Several processes: memory and time\n")
    print(f"`python experiments/bench_sharding.py`; {provenance(torch.device('cpu'))}.\n")
    print(__doc__.strip().split("\n\n")[2])
    with tempfile.TemporaryDirectory() as folder:
        for section in names:
            print(flush=True)
            for line in SECTIONS[section](Path(folder)):
                print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        work(*json.loads(sys.argv[1]))
    else:
        main()
