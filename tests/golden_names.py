"""What the checkouts of golden.py call the same things, and how cases are recorded.

The cases use the names of the code after the redesign; NAMES says what they were before it. Only
imported in a process whose working directory is the checkout.
"""

import importlib
import json
import sys
import traceback
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from flags import last_of_each_flag
from safetensors.torch import save_file

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))
IS_OLD = not (ROOT / "rope_scaling.py").exists()

NAMES = {
    # what is imported
    "nanolong.errors.UserError": "config.UserError",
    "nanolong.inference.KVCache": "model.Cache",
    "rope_scaling.METHODS": "stretch.STRETCH",
    "rope_scaling.frequencies": "stretch.frequencies",
    "data.ByteTokenizer": "data.Bytes",
    "data.CharTokenizer": "data.Char",
    "data.tokenizer_from_json": "data.from_json",
    "data.encode_prompt": "data.prompt",
    "data.decode_stream": "data.stream",
    # attributes and methods
    "activation_checkpointing": "checkpoint_activations",
    "byte_lengths": "lengths",
    "count_bytes": "bytes_of",
    "document_ids": "documents_of",
    "extend": "stretch",
    "long_fraction": "share_of_long",
    "max_positions": "reach",
    "n_sequences": "count",
    "sample_positions": "draw_positions",
    "sequence": "window",
    "set_length": "prepare",
    # settings
    "extension": "stretch",
    "mlp_dim": "mlp_width",
    "original_length": "trained_length",
    "tie_embeddings": "tied",
    # flags that changed more than their name
    "--layer_pattern=FN": "--nope_every=2",
    "--layer_pattern=WN": "--nope_every=2",
    "--layer_pattern=FFFFN": "--nope_every=5",
}


def called(name):
    """What this checkout calls something."""
    return NAMES.get(name, name) if IS_OLD else name


def find(place):
    """Import an object by its place, such as "rope_scaling.METHODS"."""
    module, _, name = called(place).rpartition(".")
    return getattr(importlib.import_module(module), name)


def attribute(thing, name):
    """An attribute, or a method, of an object of this checkout."""
    return getattr(thing, called(name))


def flags(words):
    """Command-line arguments as this checkout takes them."""
    translated = []
    for word in last_of_each_flag(words):
        name, equals, value = word.removeprefix("--").partition("=")
        renamed = f"--{called(name)}{equals}{value}" if word.startswith("--") else word
        translated.append(NAMES[word] if IS_OLD and word in NAMES else renamed)
    return translated


def model_config(**settings):
    """A GPTConfig of this checkout."""
    if IS_OLD:
        settings = old_settings(settings)
    return find("model.GPTConfig")(**settings)


def old_settings(settings):
    """The settings of a model before the redesign: lists of layers, and a family for GPT-2."""
    settings = {called(name): value for name, value in settings.items()}
    pattern = settings.pop("layer_pattern", None)
    if pattern:
        letters = [pattern[i % len(pattern)] for i in range(settings["n_layer"])]
        settings["nope_layers"] = [i for i, letter in enumerate(letters) if letter in "NS"]
        settings["window_layers"] = [i for i, letter in enumerate(letters) if letter in "WS"]
    if settings.pop("norm", "rmsnorm") == "layernorm":
        settings["family"] = "gpt2"
    settings.pop("mlp", None)
    if settings.pop("bias", "none") != "none":
        settings["qkv_bias"] = True
    return settings


def new_model(config):
    """A freshly initialised model of this checkout."""
    if IS_OLD and config.family == "gpt2":
        return find("hf.GPT2")(config)
    return find("model.GPT")(config)


@torch.no_grad()
def fill(model):
    """Give every parameter random values that depend on its name alone, none of them zero."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        std = 1.0 if name.startswith("pos.") else 0.3
        p.copy_(torch.randn(p.shape, generator=generator) * std)
    return model.eval()


def make_model(**settings):
    """A small model in eval mode with weights that are the same in every checkout."""
    small = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 61}
    return fill(new_model(model_config(**{**small, **settings})))


def random_tokens(rows, length, vocab_size=61, seed=0):
    """Token ids (rows, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (rows, length), generator=generator)


class Recorder:
    """What the cases of a group found: "case | key" -> a tensor, or what JSON can hold."""

    def __init__(self):
        self.tensors, self.values = {}, {}
        self.refusals = (find("nanolong.errors.UserError"),)
        if IS_OLD:
            self.refusals += (find("checkpoint.Refused"),)

    @contextmanager
    def case(self, name):
        """Yield a dict to be filled with what is compared; a refusal is recorded as such."""
        found = {}
        try:
            yield found
        except self.refusals:
            found["refused"] = True
        except Exception:
            found["failed"] = traceback.format_exc()
        found = found or {"failed": "nothing was recorded"}
        for key, value in found.items():
            entry = f"{name} | {key}"
            assert entry not in self.values and entry not in self.tensors, entry
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(np.ascontiguousarray(value))
            if torch.is_tensor(value):
                self.tensors[entry] = value.detach().clone().contiguous()
            else:
                self.values[entry] = value

    def save(self, folder, group):
        save_file(self.tensors, folder / f"{group}.safetensors")
        # an imported tokenizer holds the bytes of its files
        text = json.dumps(self.values, indent=1, default=repr)
        (folder / f"{group}.json").write_text(text, encoding="utf-8")
