"""Measure the memory and time that hf.py takes to import and export a large model.

    python experiments/bench_files.py                             1.2 B parameters, 20 GB of disk
    python experiments/bench_files.py --n_layer=2 --n_embd=1024   something smaller

Writes a Hugging Face directory in bfloat16 and a GGUF file, both in the shape of Llama 3.2 1B with
weights of no meaning, and runs hf.py on them. The peak memory of a process counts from the end of
its imports; the processes that verify an export print theirs. Needs Linux, gguf and transformers.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch

from experiments.report import markdown_table
from model import GPT, GPTConfig
from nanolong import cli
from nanolong.errors import UserError
from nanolong.hub.gguf_file import gguf_package
from nanolong.hub.gguf_import import gguf_name
from nanolong.hub.importing import read_settings
from nanolong.hub.layout import stored_shape, tensor_layout
from nanolong.tensor_file import TensorStream, write_tensors

ROOT = Path(__file__).resolve().parent.parent

VOCAB_SIZE = 128256  # rows of the embedding, the largest tensor


@dataclass
class BenchConfig:
    n_layer: int = 16  # transformer blocks
    n_embd: int = 2048  # embedding size; a head has 64 channels
    verify: bool = True  # let transformers verify the exports
    folder: str = ""  # where the files are written for the time; default: the system's for such


# Runs hf.py and prints its peak memory since the end of its imports, in bytes. The peak of the
# process is read from /proc, because ru_maxrss of a new process starts at that of its parent.
SCRIPT = """
import hf
from nanolong import cli

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])

after_imports = peak()
try:
    cli.run_main(hf.main)
finally:
    print("peak:", peak() - after_imports)
"""


def llama_config(cfg):
    """Return the config.json of a Llama with a quarter as many heads of keys as of queries."""
    n_head = cfg.n_embd // 64
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": cfg.n_embd,
        "intermediate_size": 4 * cfg.n_embd,
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": n_head,
        "num_key_value_heads": max(1, n_head // 4),
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def tensor_shapes(values):
    """Return the shapes of all tensors by Hugging Face's names."""
    config = GPTConfig(**read_settings(Path("config.json"), values))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    layout = tensor_layout(config)
    return {name: stored_shape(held, shapes) for name, held in layout.items()}


def random_tensor(shape):
    """Return weights that give logits of size 1: bfloat16."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[1] ** -0.5)


def write_directory(folder, values, shapes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    like = {}
    for name, shape in shapes.items():
        like[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    pairs = ((name, random_tensor(shape)) for name, shape in shapes.items())
    write_tensors(folder / "model.safetensors", TensorStream(like, pairs))


def write_gguf(file, values, shapes):
    """Write a GGUF file of these shapes in Q8_0, whose blocks are all alike."""
    gguf = gguf_package()
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_vocab_size(values["vocab_size"])
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        block = gguf.quants.quantize(np.linspace(-0.1, 0.1, 32, dtype=np.float32), q8)
        rows = np.tile(block, (shape[0], shape[1] // 32))
        writer.add_tensor(gguf_name(name), rows, raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_hf(*words):
    """Run hf.py; return its peak memory in bytes, its time in seconds, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"hf.py {' '.join(map(str, words))} failed: {reason}")
    *output, last = done.stdout.strip().splitlines()
    return int(last.removeprefix("peak: ")), time.perf_counter() - start, output


def measure(cfg, folder):
    """Import and export in a folder. Returns records: command, peak, seconds, output."""
    values = llama_config(cfg)
    shapes = tensor_shapes(values)
    write_directory(folder / "hf", values, shapes)
    write_gguf(folder / "model.gguf", values, shapes)
    verify = f"--verify={str(cfg.verify).lower()}"
    commands = [
        ("import", "hf", "float32"),
        ("import", "hf", "bfloat16", "--store=bfloat16"),
        ("import", "model.gguf", "gguf"),
        ("export", "float32", "exported-float32", verify),
        ("export", "bfloat16", "exported-bfloat16", verify),
    ]
    records = []
    for direction, source, target, *options in commands:
        words = (direction, folder / source, folder / target, *options)
        peak, seconds, output = run_hf(*words)
        command = " ".join([direction, source, target, *options])
        records.append({"command": command, "peak": peak, "seconds": seconds, "output": output})
    return records


def largest_bytes(cfg):
    """Return the size of the largest tensor in float32."""
    return 4 * VOCAB_SIZE * cfg.n_embd


def print_report(cfg, records):
    rows = []
    for record in records:
        peak = f"{record['peak'] / 1e6:.0f}"
        rows.append([f"`{record['command']}`", peak, f"{record['seconds']:.0f}"])
    print("\n".join(markdown_table(["hf.py", "peak, MB", "s"], rows)))
    print(f"\nThe largest tensor has {largest_bytes(cfg) / 1e6:.0f} MB in float32.")
    for record in records:
        print(f"\n{record['command']}:", *record["output"], sep="\n  ")


def main():
    cfg, *_ = cli.parse(BenchConfig, about=__doc__)
    with tempfile.TemporaryDirectory(dir=cfg.folder or None) as folder:
        print_report(cfg, measure(cfg, Path(folder)))


if __name__ == "__main__":
    cli.run_main(main)
