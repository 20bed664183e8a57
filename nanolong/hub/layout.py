"""What importing.py and exporting.py share of Hugging Face's format.

The fields of a config.json, and the tensors: which of our parameters each holds.
"""

import json
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanolong.errors import UserError

MAX_JSON_BYTES = 1 << 28

# Our setting mlp -> names of its activation function
ACTIVATIONS = {
    "swiglu": ("silu", "swish"),
    "geglu": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu_exact": ("gelu",),
}

# The longrope factor of a pair that is not rotated: its angle vanishes in float32 at any position.
UNROTATED = 1e30


def read_json(file):
    """Read a JSON object. Raises UserError, also for a file that is unreasonably large."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is larger than 256 MB")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {error}): download it again"
        ) from None
    return values


def is_number(value, low, high):
    """Return whether a value is a number of this range, and not a bool, which is an int."""
    return type(value) in (int, float) and low <= value <= high


class ConfigFields:
    """The fields of a config.json. Each method returns a value of the type that it names.

    defaults: of transformers. names: those of the fields that have other names than the keys here.
    Raises UserError for any other value, and for one out of range.
    """

    def __init__(self, file, values, defaults, names=None):
        self.file = file
        self.values = values
        self.defaults = defaults
        self.names = names or {}

    def name(self, key):
        """Return the name of a field in this file; an empty one if the family has no such field."""
        names = self.names.get(key, (key,))
        if not names:
            return ""
        # files may have Llama's name instead, as attribute_map of transformers allows it
        return next((name for name in (*names, key) if name in self.values), names[0])

    def get(self, key):
        """Return a field as it stands, by default transformers' default."""
        return self.values.get(self.name(key), self.defaults.get(key))

    def integer(self, key, low=1, high=1 << 30):
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong_value(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key):
        return None if self.get(key) is None else self.integer(key)

    def real(self, key, low, high):
        if not is_number(self.get(key), low, high):
            raise self.wrong_value(key, f"a number from {low:g} to {high:g}")
        return float(self.get(key))

    def reals(self, key, length, low, high):
        """Return a list of this many numbers."""
        values = self.get(key)
        is_whole = isinstance(values, list) and len(values) == length
        if not is_whole or not all(is_number(value, low, high) for value in values):
            raise self.wrong_value(key, f"a list of {length} numbers from {low:g} to {high:g}")
        return values

    def flag(self, key):
        value = self.get(key)
        if value is None and self.name(key) not in self.values:
            return False
        if not isinstance(value, bool):
            raise self.wrong_value(key, "true or false")
        return value

    def list_per_layer(self, key, n_layer, choices):
        """Return a list with one of the choices for each layer, or None if there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        is_whole = isinstance(value, list) and len(value) >= n_layer
        if not is_whole or not all(choice in choices for choice in value):
            names = " or ".join(map(str, choices))
            raise self.wrong_value(key, f"{names} for each of the {n_layer} layers")
        return value[:n_layer]

    def require(self, key, choices):
        """Raise UserError unless a field has one of these values, or neither value nor default."""
        value = self.get(key)
        is_left_out = value is None and key not in self.defaults
        if not is_left_out and value not in choices:
            raise UserError(
                f"{self.file}: {self.name(key)} is {value!r}, and only {choices[0]!r} is "
                "supported: choose another checkpoint"
            )

    def wrong_value(self, key, expected):
        return UserError(
            f"{self.file}: {self.name(key)} is {self.get(key)!r:.80}, where {expected} is "
            "expected: download it again"
        )


# -----------------------------------------------------------------------------
# Folds: how our parameters are computed from a stored tensor, and back. All but these names are
# fields of config.json that multiply the tensor, and that an export leaves at 1.

# GPT-2 stores matrices as (in, out), where torch's Linear has (out, in)
TRANSPOSED = "transposed"
# query, key and value of the first head are followed by those of the second
BY_HEAD = "by head"
# the norm adds 1 to its weight
ONE_ADDED = "one added"
# the weight of a norm that has a bias here
WITHOUT_BIAS = "without bias"
# BLOOM's embeddings, whose norm becomes part of them, and our head, which is without it
NORMED = "normed"
# llama.cpp rotates adjacent channels of q and k, and not those head_dim / 2 apart
ADJACENT = "adjacent"
# these compute nothing that would be rounded
MOVED = ("", TRANSPOSED, BY_HEAD, WITHOUT_BIAS, ADJACENT)
BLOOM_NORM = "transformer.word_embeddings_layernorm"


def swap_groups(tensor, n, m):
    """Exchange the first two dimensions of rows (n, m, D)."""
    return tensor.unflatten(0, (n, m, -1)).transpose(0, 1).flatten(0, 2)


def swap_pairs(tensor, n, m):
    """Exchange the last two dimensions of rows (H, n, m)."""
    return tensor.unflatten(0, (-1, n, m)).transpose(1, 2).flatten(0, 2)


class HFTensor(NamedTuple):
    """What a tensor of a Hugging Face checkpoint holds."""

    parameters: list  # names of ours, concatenated along their first dimension
    fold: str = ""
    config: object = None  # GPTConfig
    values: dict = {}  # of the config.json that is imported; empty in an export

    @property
    def norm_tensors(self):
        """Further tensors that split() takes: name -> our parameter of the same shape."""
        if self.fold != NORMED:
            return {}
        return {f"{BLOOM_NORM}.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}

    def split(self, tensor, shapes, norm=()):
        """Return our parameters that a stored tensor holds: [(name, tensor)]."""
        if self.fold == TRANSPOSED:
            tensor = tensor.t()
        elif self.fold == BY_HEAD:
            tensor = swap_groups(tensor, self.config.n_head, 3)
        elif self.fold == ADJACENT:
            tensor = swap_pairs(tensor, self.config.head_dim // 2, 2)
        elif self.fold == ONE_ADDED:
            tensor = tensor.float() + 1
        elif self.fold == WITHOUT_BIAS:
            tensor = torch.cat((tensor, torch.zeros_like(tensor)))
        elif self.fold == NORMED:
            tensor, weight, bias = (x.float() for x in (tensor, *norm))
            normed = F.layer_norm(tensor, weight.shape, weight, bias, self.config.norm_eps)
            tensor = torch.cat((normed, tensor))
        elif self.fold:
            power = -1 if self.fold == "logits_scaling" else 1
            tensor = tensor.float() * self.values.get(self.fold, 1) ** power
        sizes = [shapes[parameter][0] for parameter in self.parameters]
        return list(zip(self.parameters, tensor.split(sizes), strict=True))

    def join(self, parts):
        """Return the stored tensor of our parameters."""
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.fold == TRANSPOSED:
            return tensor.t()
        if self.fold == BY_HEAD:
            return swap_groups(tensor, 3, self.config.n_head)
        if self.fold == ADJACENT:
            return swap_pairs(tensor, 2, self.config.head_dim // 2)
        if self.fold == ONE_ADDED:
            return tensor.float() - 1
        if self.fold not in (WITHOUT_BIAS, NORMED):
            return tensor
        kept, left_out = tensor.chunk(2)
        if self.fold == WITHOUT_BIAS and not left_out.is_meta and left_out.any():
            raise UserError(
                "the norms have biases since the model was trained, and those of an MPT have none: "
                "export the model that was imported"
            )
        return kept


def tensor_layout(family, config, shapes, values=None):
    """Return the names of all tensors of a model in a checkpoint of a family: name -> HFTensor.

    shapes: of our parameters, by name. values: of the config.json that is imported.
    """
    layout = {}
    places = [("", "", family.model)]
    for layer in range(config.n_layer):
        places.append((f"{family.layer_prefix}{layer}.", f"blocks.{layer}.", family.layer))
    for their_prefix, our_prefix, modules in places:
        for module, ours in modules.items():
            fold = family.folds.get(module, "")
            # the empty kind: a tensor that is no weight or bias of a module
            kinds = [[".weight"], [".bias"], [""]]
            for held in [[".weight", ".bias"]] if fold == WITHOUT_BIAS else kinds:
                names = [f"{our_prefix}{name}{kind}" for name in ours.split() for kind in held]
                if names[0] in shapes:
                    tensor = HFTensor(names, fold, config, values or {})
                    layout[f"{their_prefix}{module}{held[0]}"] = tensor
    return layout


def stored_shapes(layout, shapes):
    """Return the shapes of all tensors of a layout, and of those that their folds take."""
    stored = {}
    for name, held in layout.items():
        parts = [torch.empty(shapes[parameter], device="meta") for parameter in held.parameters]
        stored[name] = tuple(held.join(parts).shape)
        for other, parameter in held.norm_tensors.items():
            stored[other] = tuple(shapes[parameter])
    return stored


def is_redundant(name):
    """Return whether a tensor that no parameter needs is a tied head, or computed at will."""
    computed = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")
    return name == "lm_head.weight" or name.endswith(computed)
