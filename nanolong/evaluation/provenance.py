"""What must stand next to a measured number, so that it can be measured again."""

import datetime
import platform
import re
from pathlib import Path

import torch

from nanolong.evaluation.comparison import training_facts
from nanolong.run import current_commit, weights_hash

ROOT = Path(__file__).resolve().parents[2]


def provenance(device, commits=()):
    """Commit, hardware, torch version and date, as a line of text.

    commits: commits of the measurements that were kept; by default this checkout's.
    """
    commits = list(dict.fromkeys(commits)) or [current_commit()]
    commit = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return f"{commit}, {hardware(device)}, {datetime.date.today()}"


def hardware(device):
    """GPU, or threads and processor, and torch's version, as a line of text."""
    version = torch.__version__.partition("+")[0]
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {version}"
    n_threads = torch.get_num_threads()
    threads = f"{n_threads} thread{'s' if n_threads > 1 else ''}"
    return f"{threads} of {_cpu_name()}, torch {version}"


def _cpu_name():
    """The processor and, of the vector instructions that decide its speed, those that it has."""
    file = Path("/proc/cpuinfo")  # on Linux
    info = file.read_text() if file.exists() else ""
    name = re.search(r"model name\s*: (.*\S)", info)
    if not name:
        return platform.processor() or platform.machine()
    flags = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    found = [flag for flag in flags if re.search(rf"\b{flag}\b", info)]
    return f"{name[1]} ({', '.join(found) or 'no AVX2'})"


# Settings of GPTConfig that describe_checkpoint() shows in words.
SHOWN = ("pos", "vocab_size", "block_size", "n_layer", "n_embd", "n_head", "extension")


def describe_checkpoint(model):
    """Return the settings and provenance of a loaded GPT: label -> text."""
    config = model.config
    extension = "none"
    if config.extension:
        options = [f", {key} {value}" for key, value in config.extension["options"].items()]
        method, factor = config.extension["method"], config.extension["factor"]
        extension = f"{method}, factor {factor:g}{''.join(options)}"
    default = vars(type(config)())
    changed = {name: x for name, x in vars(config).items() if x != default[name]}
    others = [f"{name} {x}" for name, x in changed.items() if name not in SHOWN]
    return {
        "folder": model.folder,
        "scheme": config.pos,
        "layers": f"{config.n_layer}, of {config.n_embd} channels and {config.n_head} heads",
        "other settings": ", ".join(others) or "as by default",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "context length": f"{config.block_size:,}, originally {config.original_length:,}",
        "extension": extension,
        **training_facts(model),
        "stored dtype": str(model.stored_dtype).removeprefix("torch."),
        "weights": weights_hash(model),
    }
