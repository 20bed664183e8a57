"""What the checkouts of golden.py call the same things, and how cases are recorded.

The cases use the names of the new checkout; NAMES says what they were in the old one. Only
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
IS_OLD = not (ROOT / "kernels" / "eager.py").exists()

NAMES = {"kernels.eager": "kernels.reference"}


def find(place):
    """Import an object by its place, such as "rope_scaling.METHODS"."""
    place = NAMES.get(place, place) if IS_OLD else place
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def flags(words):
    """Command-line arguments, of repeated ones the last."""
    return last_of_each_flag(words)


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
    return fill(find("model.GPT")(find("model.GPTConfig")(**{**small, **settings})))


def random_tokens(rows, length, vocab_size=61, seed=0):
    """Token ids (rows, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (rows, length), generator=generator)


class Recorder:
    """What the cases of a group found: "case | key" -> a tensor, or what JSON can hold."""

    def __init__(self):
        self.tensors, self.values = {}, {}
        self.refusals = (find("nanolong.errors.UserError"),)

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
