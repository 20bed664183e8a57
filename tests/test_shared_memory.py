"""The memory of processes that share the weights, a sequence or a long text: it is measured.

Minutes each: python -m pytest tests/test_shared_memory.py --exhaustive
"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

import data
from model import GPT, GPTConfig

slow = pytest.mark.exhaustive
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304}


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


# A process is train() with AdamW in float32, one micro-batch of one sequence for
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


@slow
@on_linux
def test_four_processes_that_share_the_weights_take_less_than_half_each(measure_peak, training):
    resident = {}
    for processes, parallel in ((1, "ddp"), (4, "fsdp")):
        arguments = training(WEIGHTS, processes, parallel=parallel)
        resident[processes] = measure_peak("train", arguments, processes)
    assert resident[4] < 0.47 * resident[1]


@slow
@on_linux
def test_four_processes_that_share_a_sequence_have_a_third_of_its_activations(measure_tensors):
    """The peak of tensors above the weights and moments, which are there before a step."""
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in GPT(GPTConfig(**TOKENS)).parameters())
    activations = {}
    for parts in (1, 4):
        peak = measure_tensors(TOKENS, parts, sequence_parallel=parts)
        activations[parts] = peak - 12 * n_parameters  # float32: weights and two moments
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
