"""JSON as the standard has it. Python writes NaN and Infinity, which other programs refuse."""

import base64
import json
import math


def to_json(value, indent=None, sort_keys=False):
    """The JSON text of a value; a number that is not finite becomes null.

    Bytes, as the files of a tokenizer, are written in base64, and NumPy's numbers as numbers.
    """
    value = without_infinities(value)
    return json.dumps(value, indent=indent, sort_keys=sort_keys, allow_nan=False, default=encode)


def encode(value):
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value.tolist()


def from_json(text):
    """What to_json() has written, with bytes. Raises ValueError."""

    def decode(value):
        return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value

    return json.loads(text, object_hook=decode)


def without_infinities(value):
    """A copy of lists and dicts with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(file, value, indent=None):
    """Write a value as JSON. The file is whole or absent, whenever the process ends."""
    replace_text(file, to_json(value, indent) + "\n")


def replace_text(file, text):
    """Write a text file that is whole or absent, whenever the process ends."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
