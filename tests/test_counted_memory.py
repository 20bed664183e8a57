"""What nanolong/memory.py counts from shapes: compared with the peak of processes, and plans.

On a GPU, NANOLONG_GPU=1 measures training steps there. Needs 6 GB with --all.
"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import DEVICE, ROOT

import data
from model import GPT, GPTConfig
from nanolong.memory import count_memory

STEP_GOAL = 0.15  # how far the count may be from the measured peak of a step
SHARED_GOAL = 0.10  # and from that of several processes
GIGABYTE = 10**9
CUDA_OVERHEAD = 2 * 2**30

# minutes each: python -m pytest tests/test_counted_memory.py --exhaustive
slow = pytest.mark.exhaustive
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="it needs a GPU, and NANOLONG_GPU=1")

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304}
GPT2_LAYERS = {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all"}
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 256, "vocab_size": 20000}
GROUPED = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 128, "block_size": 128}
GROUPED["vocab_size"] = 300
CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}
LARGE_VOCABULARY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "block_size": 512}
LARGE_VOCABULARY["vocab_size"] = 50304


def shape_of(config):
    """A model on the meta device."""
    with torch.device("meta"):
        return GPT(GPTConfig(**config))


@pytest.fixture
def measure_peak():
    """Run a task of memory_cases.py; return the largest peak of its processes, in bytes."""

    def measure_peak(task, arguments, processes=1, returns_freed=False):
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
        job = json.dumps([task, arguments, returns_freed], allow_nan=False)
        command = [*launcher, ROOT / "tests/memory_cases.py", job]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        peaks = [int(peak) for peak in re.findall(r"PEAK (\d+) bytes", done.stdout)]
        assert len(peaks) == processes, done.stderr[-3000:]
        return max(peaks)

    return measure_peak


# -----------------------------------------------------------------------------
# A step of one process


def case(name, config, batch_size, dtype, checkpointing=False, accumulation=1, marks=slow):
    return pytest.param(
        config, batch_size, dtype, checkpointing, accumulation, id=name, marks=marks
    )


@pytest.mark.parametrize(
    "config, batch_size, dtype, checkpointing, accumulation",
    [
        case("dropout", {**GROUPED, "dropout": 0.1}, 8, "bfloat16", marks=()),
        # few tokens, so that the gradients of earlier micro-batches count
        case("steps", {**GROUPED, "block_size": 64}, 1, "float32", accumulation=3, marks=()),
        case("learned", {**SMALL, "pos": "learned"}, 4, "float32"),
        case("GPT-2", {**SMALL, **GPT2_LAYERS}, 4, "float32"),
        # neither (T, T) scores nor (T, V) logits
        case("long", {**SMALL, "block_size": 4096, "vocab_size": 60}, 1, "float32", True),
        case("1,024", {**CHARACTERS, "block_size": 1024}, 4, "bfloat16"),
        case("4,096", {**CHARACTERS, "block_size": 4096}, 1, "float32"),
        case("4,096, checkpointing", {**CHARACTERS, "block_size": 4096}, 1, "float32", True),
        case("vocabulary", LARGE_VOCABULARY, 4, "float32"),
        case("GPU", {**GPT2, "block_size": 1024}, 16, "bfloat16", marks=on_gpu),
        case("GPU, long", {**GPT2, "block_size": 16384}, 1, "bfloat16", True, marks=on_gpu),
    ],
)
def test_counted_memory_is_near_the_measured_peak(
    config, batch_size, dtype, checkpointing, accumulation, measure_peak
):
    arguments = {"batch_size": batch_size, "dtype": dtype, "checkpointing": checkpointing}
    arguments |= {"accumulation": accumulation, "device": DEVICE}
    measured = measure_peak("step", {"config": config, **arguments})
    shape = (shape_of(config), batch_size, config["block_size"], dtype, checkpointing)
    counted = count_memory(*shape, device=DEVICE, accumulation=accumulation)
    print(f"counted {counted.peak / 2**20:,.1f} MiB, measured {measured / 2**20:,.1f} MiB")
    assert abs(counted.peak / measured - 1) < STEP_GOAL


# -----------------------------------------------------------------------------
# Plans: no card has run them

SMOLLM2 = {"n_layer": 24, "n_head": 32, "n_embd": 2048, "mlp_dim": 8192, "vocab_size": 49152}
LLAMA3 = {"n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096, "mlp_dim": 14336}
LLAMA3 |= {"vocab_size": 128256, "tie_embeddings": False}


@pytest.mark.parametrize(
    "config, length, shards, parts, gigabytes",
    [
        (SMOLLM2, 1 << 16, 1, 1, 55),  # config/smollm2_64k.toml
        (LLAMA3, 1 << 17, 8, 8, 50),  # config/llama3_128k.toml
        (GPT2, 1 << 20, 8, 4, 29),  # config/gpt2_1m.toml
    ],
)
def test_the_presets_for_long_contexts_fit_a_card_of_80_gb(
    config, length, shards, parts, gigabytes
):
    """The comments in the presets name the memory of a card."""
    model = shape_of({**config, "block_size": length})
    sharing = {"checkpointing": True, "shards": shards, "parts": parts}
    peak = count_memory(model, 1, length // parts, **sharing).peak
    assert round(peak / GIGABYTE) == gigabytes
    assert peak < 80 * GIGABYTE - CUDA_OVERHEAD


def test_the_longest_contexts_of_a_card_fit_and_the_next_do_not():
    """Of 124 M parameters on a card of 24 GB; the lengths are those of results/cpu/memory.md."""
    available = 24 * GIGABYTE - CUDA_OVERHEAD
    for length, how in ((44032, {}), (187392, {"checkpointing": True})):
        for T, fits in ((length, True), (length + 1024, False)):
            peak = count_memory(shape_of({**GPT2, "block_size": T}), 1, T, **how).peak
            assert (peak <= available) == fits


# -----------------------------------------------------------------------------
# Several processes. A process is train() with AdamW in float32, one micro-batch of one sequence for
# each, with an evaluation and checkpoints; or it is evaluate.py.

WEIGHTS = {**GPT2, "block_size": 256}
TOKENS = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 257, "block_size": 8192}
TEXT = {"n_layer": 2, "n_head": 4, "n_embd": 256, "vocab_size": 257, "block_size": 65536}
TINY = {"n_embd": 24, "vocab_size": 257, "block_size": 32}  # with the layers of another shape


@pytest.fixture
def training(tmp_path):
    """Return the arguments of a training of so many processes on random tokens."""

    def training(model, processes, **settings):
        dataset = tmp_path / f"data-{model['vocab_size']}"
        if not dataset.exists():
            dataset.mkdir()
            tokens = np.random.default_rng(0).integers(0, model["vocab_size"], 20_000)
            for split in ("train", "val"):
                data.write_tokens(dataset / f"{split}.bin", tokens, model["vocab_size"])
            meta = {"vocab_size": model["vocab_size"], "tokenizer": None}
            meta |= {"bos": None, "bos_default": False}
            (dataset / "meta.json").write_text(json.dumps(meta, allow_nan=False))
        files = {"dataset": str(dataset), "out_dir": str(tmp_path / "run"), "overwrite": True}
        settings = {"max_iters": 2, "eval_iters": 1, **settings}
        micro_batches = processes // settings.get("sequence_parallel", 1)
        settings["gradient_accumulation_steps"] = micro_batches
        return {"model": model, "settings": {**files, **settings}}

    return training


@pytest.fixture
def measure_tensors(measure_peak, training):
    """The peak of a training without what libraries take: less that of a tiny model."""

    def measure_tensors(model, processes, **settings):
        peaks = []
        for shape in (model, {**model, **TINY}):
            arguments = training(shape, processes, **settings)
            peaks.append(measure_peak("train", arguments, processes, returns_freed=True))
        return peaks[0] - peaks[1]

    return measure_tensors


def count_shared(model, tokens, **shared):
    return count_memory(shape_of(model), 1, tokens, "float32", device="cpu", **shared)


@slow
@on_linux
def test_four_processes_that_share_the_weights_take_less_than_half_each(
    measure_peak, measure_tensors, training
):
    resident = {}
    for processes, parallel in ((1, "ddp"), (4, "fsdp")):
        arguments = training(WEIGHTS, processes, parallel=parallel)
        resident[processes] = measure_peak("train", arguments, processes)
        counted = count_shared(WEIGHTS, WEIGHTS["block_size"], shards=processes).peak
        tensors = measure_tensors(WEIGHTS, processes, parallel=parallel)
        assert abs(counted / tensors - 1) < SHARED_GOAL
    assert resident[4] < 0.47 * resident[1]


@slow
@on_linux
def test_four_processes_that_share_a_sequence_have_a_third_of_its_activations(measure_tensors):
    """The peak of tensors above the weights and moments, which are there before a step."""
    activations = {}
    for parts in (1, 4):
        counted = count_shared(TOKENS, TOKENS["block_size"] // parts, parts=parts)
        kept = counted.parameters + counted.optimizer
        activations[parts] = measure_tensors(TOKENS, parts, sequence_parallel=parts) - kept
        assert abs((counted.peak - kept) / activations[parts] - 1) < SHARED_GOAL
    assert activations[4] < 0.35 * activations[1]


@slow
@on_linux
def test_four_processes_evaluate_a_long_text_as_one_does_in_less_memory(measure_peak, tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TEXT))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1)
    model.meta = {"tokenizer": {"kind": "bytes"}, "bos": 256}
    model.save(tmp_path / "model" / "step-000000")
    length, text = TEXT["block_size"], tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(32, 127, length + 100, "u1").tobytes())
    words = [str(tmp_path / "model"), f"--text={text}", f"--lengths={length}"]
    words += [f"--max_tokens={length}", "--dtype=float32", "--device=cpu"]
    peaks, losses = [], []
    for processes in (1, 4):
        file = tmp_path / f"{processes}.json"
        own = [f"--sequence_parallel={processes}", f"--json={file}"]
        peaks.append(measure_peak("evaluate", {"words": words + own}, processes))
        losses.append([record["loss"] for record in json.loads(file.read_text())])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert peaks[1] < peaks[0]
