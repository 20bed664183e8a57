"""
Print the memory of a preset's training step, as train.py says it and as the allocator has it.

    python tests/simulated_gpu/preset_memory.py llama3_128k --compile

It trains a few steps as rank 0 of the preset's processes, on a GPU, or on the simulated one. There
the weights never take memory of the host: they stay empty on the device. Evaluations and
checkpoints are left out. The last line is JSON.
"""

import io
import json
import re
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
import torch.distributed as dist

import data
import train
from extend import ExtendConfig, training_lengths
from model import GPT, GPTConfig
from nanolong import cli
from nanolong.parallel import sharding
from nanolong.run.checkpoint import build_without_weights

STEPS = 3


@dataclass
class Preset:
    """What a preset is for: the processes, and the model of an extension before it."""

    files: tuple[str, ...]
    processes: int = 1
    extends: dict | None = None  # settings of the model


SMOLLM2_135M = {
    "vocab_size": 49152,
    "n_layer": 30,
    "n_head": 9,
    "n_kv_head": 3,
    "n_embd": 576,
    "mlp_dim": 1536,
    "block_size": 8192,
}
SMOLLM2_1_7B = {
    "vocab_size": 49152,
    "n_layer": 24,
    "n_head": 32,
    "n_embd": 2048,
    "mlp_dim": 8192,
    "block_size": 8192,
}
LLAMA3_8B = {
    "vocab_size": 128256,
    "n_layer": 32,
    "n_head": 32,
    "n_kv_head": 8,
    "n_embd": 4096,
    "mlp_dim": 14336,
    "tie_embeddings": False,
    "block_size": 8192,
}
PRESETS = {
    "gpt2": Preset(("gpt2",)),
    "gpt2_original": Preset(("gpt2_original",)),
    "gpt2_1m": Preset(("gpt2", "gpt2_1m"), processes=8),
    "finetune_public": Preset(("finetune_public",), extends=SMOLLM2_135M),
    "smollm2_64k": Preset(("smollm2_64k",), extends=SMOLLM2_1_7B),
    "llama3_128k": Preset(("llama3_128k",), processes=8, extends=LLAMA3_8B),
}


def build(preset, flags):
    """The settings, and the model without weights, extended where the preset is for extend.py."""
    words = [f"{name}.toml" for name in preset.files] + flags
    if preset.extends is None:
        classes = {"model_config": GPTConfig, "cfg": train.TrainConfig}
        args = cli.parse(**classes, presets=True, argv=words)
        args.model_config.vocab_size = 50304
        return args.cfg, build_without_weights(GPT, args.model_config)
    cfg = cli.parse(cfg=ExtendConfig, presets=True, argv=words).cfg
    model = build_without_weights(GPT, GPTConfig(**preset.extends))
    model.extend(cfg.method, cfg.factor)
    return cfg, model


def write_dataset(folder, vocab_size, length):
    """A dataset of zeros, long enough for sequences of so many tokens."""
    for split in ("train", "val"):
        tokens = np.zeros(max(4 * length, 1 << 20) + 1, int)
        data.write_tokens(folder / f"{split}.bin", tokens, vocab_size)
    meta = {"tokenizer": None, "vocab_size": vocab_size, "bos": None, "bos_default": False}
    (folder / "meta.json").write_text(json.dumps(meta))


def empty_weights(model, device):
    """Put a model's weights on the device, unwritten."""
    model.to_empty(device=device)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight


def empty_rows(file, name, like):
    """Stands in for sharding.read_part(): a process's rows of a parameter, unwritten."""
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    rows = sharding.own_rows(len(like), mesh.get_local_rank(), mesh.size())
    part = torch.empty((rows.stop - rows.start, *like.shape[1:]), device="cuda")
    return DTensor.from_local(
        part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def join_as_rank_0(processes):
    """The process group of rank 0, alone: the simulated NCCL waits for nobody."""
    if processes > 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=processes)
    dist.all_gather_object = gather_own_object
    sharding.read_part = empty_rows


def gather_own_object(everyone, mine):
    """Stands in for dist.all_gather_object(): all processes have the same."""
    everyone[:] = [mine] * len(everyone)


def record_peaks():
    """Returns a list, to which every training step appends its (peak, reserved) bytes."""
    peaks = []
    forward_backward, optimizer_step = train.forward_backward, train.optimizer_step

    def start(*args):
        torch.cuda.reset_peak_memory_stats()
        return forward_backward(*args)

    def end(*args):
        optimizer_step(*args)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    train.forward_backward, train.optimizer_step = start, end
    return peaks


def train_preset(preset, folder, flags):
    """Train for a few steps. Returns what was printed, and the allocator's peak of each step."""
    cfg, model = build(preset, [f"--dataset={folder}", f"--out_dir={folder / 'run'}", *flags])
    train_length, max_position = training_lengths(model, cfg) if preset.extends else (0, 0)
    write_dataset(folder, model.config.vocab_size, model.config.block_size)
    if cfg.parallel == "ddp":
        empty_weights(model, "cuda")
    model.folder = folder
    join_as_rank_0(preset.processes)
    train.estimate_loss = lambda *args: {"val_loss": 0.0}
    train.run.save = lambda *args: None
    peaks = record_peaks()
    with redirect_stdout(io.StringIO()) as printed:
        train.train(model, cfg, train_length, max_position)
    return printed.getvalue(), peaks


def find_bytes(pattern, text):
    """The bytes in a printed text, where the pattern has X."""
    number, unit = re.search(pattern.replace("X", r"([\d.]+) (GB|MB)"), text).groups()
    return round(float(number) * {"GB": 1e9, "MB": 1e6}[unit])


def main():
    name, *flags = sys.argv[1:]
    flags += [f"--max_iters={STEPS}", "--warmup_iters=1", "--device=cuda", "--dtype=bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        text, peaks = train_preset(PRESETS[name], Path(folder), flags)
    print(text)
    row = {
        "preset": name,
        "compiled": ", compiled\n" in text,
        "estimate": find_bytes("memory of a step: X of tensors, estimated", text),
        "printed": find_bytes("; X of tensors at the peak .measured.", text),
        "printed_reserved": find_bytes(".measured., X reserved", text),
        "peaks_of_steps": [peak for peak, _ in peaks],
        "reserved": peaks[-1][1],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
