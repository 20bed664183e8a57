"""What importing.py and exporting.py share of Hugging Face's format.

The fields of a config.json, and the tensors: which of our parameters each holds.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch

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

    def real(self, key, low, high):
        value = self.get(key)
        # not bool, which is an int
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong_value(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def wrong_value(self, key, expected):
        return UserError(
            f"{self.file}: {self.name(key)} is {self.get(key)!r}, where {expected} is expected: "
            "download it again"
        )

    def optional_integer(self, key):
        return None if self.get(key) is None else self.integer(key)

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
        whole = isinstance(value, list) and len(value) >= n_layer
        if not whole or not all(choice in choices for choice in value):
            names = " or ".join(str(choice) for choice in choices)
            raise UserError(
                f"{self.file}: {key} does not name {names} for each of the {n_layer} layers: "
                "download it again"
            )
        return value[:n_layer]

    def require(self, key, choices):
        """Raise UserError unless a field has one of these values, or is left out."""
        value = self.get(key)
        if value is not None and value not in choices:
            raise UserError(
                f"{self.file}: {self.name(key)} is {value!r}, and only {choices[0]!r} is "
                "supported: choose another checkpoint"
            )


# -----------------------------------------------------------------------------
# Tensors


class Source(NamedTuple):
    """What a fold may depend on."""

    config: object  # GPTConfig
    values: dict  # of the config.json that is imported; empty in an export


def unchanged(tensor, source):
    return tensor


class Fold(NamedTuple):
    """How our parameters are computed from a stored tensor, and back.

    `read` returns the parameters, concatenated along their first dimension; `write` takes that.
    """

    read: Callable = unchanged
    write: Callable = unchanged
    # whether the weights are changed, not only moved: then the result may have to be rounded
    computes: bool = False
    # whether the tensor holds weight and bias of our module
    holds_bias: bool = False
    # further tensors that `read` takes: name -> our parameter of the same shape
    others: dict = {}


class HFTensor(NamedTuple):
    """What a tensor of a Hugging Face checkpoint holds."""

    parameters: list  # names of ours
    fold: Fold = Fold()
    source: Source | None = None

    def split(self, tensor, shapes, others=()):
        """Return our parameters that a stored tensor holds: [(name, tensor)]."""
        whole = self.fold.read(tensor, self.source, *others)
        sizes = [shapes[parameter][0] for parameter in self.parameters]
        return list(zip(self.parameters, whole.split(sizes), strict=True))

    def join(self, parts):
        """Return the stored tensor of our parameters."""
        return self.fold.write(torch.cat(parts) if len(parts) > 1 else parts[0], self.source)


def tensor_layout(family, config, shapes, values=None):
    """Return the names of all tensors of a model in a checkpoint of a family: name -> HFTensor.

    shapes: of our parameters, by name. values: of the config.json that is imported.
    """
    source = Source(config, values or {})
    layout = {}
    if family.position_table:
        layout[family.position_table] = HFTensor(["pos.table"])
    places = [("", "", family.model)]
    for layer in range(config.n_layer):
        for name, ours in family.layer_tensors.items():
            layout[f"{family.layer_prefix}{layer}.{name}"] = HFTensor([f"blocks.{layer}.{ours}"])
        places.append((f"{family.layer_prefix}{layer}.", f"blocks.{layer}.", family.layer))
    for their_prefix, our_prefix, modules in places:
        for module, ours in modules.items():
            fold = family.folds.get(module, Fold())
            for kinds in (["weight", "bias"],) if fold.holds_bias else (["weight"], ["bias"]):
                names = [f"{our_prefix}{name}.{kind}" for name in ours.split() for kind in kinds]
                if names[0] in shapes:
                    name = f"{their_prefix}{module}.{kinds[0]}"
                    layout[name] = HFTensor(names, fold, source)
    return layout


def stored_shapes(layout, shapes):
    """Return the shapes of all tensors of a layout, and of those that their folds take."""
    stored = {}
    for name, held in layout.items():
        parts = [torch.empty(shapes[parameter], device="meta") for parameter in held.parameters]
        stored[name] = tuple(held.join(parts).shape)
        for other, parameter in held.fold.others.items():
            stored[other] = tuple(shapes[parameter])
    return stored


def is_redundant(name):
    """Return whether a tensor that no parameter needs is a tied head, or computed at will."""
    computed = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")
    return name == "lm_head.weight" or name.endswith(computed)
